"""Tokens as people read them.

A character of several bytes can be cut into several tokens. Then no token alone is a
piece of text, and a byte that is no character is written <0xA9>."""

import re

from .tokenizers import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token with the space it begins with, and <0xA9> for each
    byte that is part of a character only."""
    data = tokenizer.to_bytes([token])
    text = data.decode(errors="surrogateescape")

    def shown(byte: re.Match) -> str:
        value = ord(byte[0]) - 0xDC00
        return f"<0x{value:02X}>"

    return re.sub("[\udc80-\udcff]", shown, text)
