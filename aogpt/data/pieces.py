"""Tokens as people read them, and where they are in a text, in bytes.

A character of several bytes can be cut into several tokens. Then no token alone is a
piece of text, so places are counted in bytes, and a byte that is no character is
written <0xA9>."""

import re

from .tokenizers import Tokenizer, without_lone_surrogates

REPLACEMENT = "\ufffd"


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token with the space it begins with, and <0xA9> for each
    byte that is part of a character only."""
    data = tokenizer.to_bytes([token])
    text = data.decode(errors="surrogateescape")

    def shown(byte: re.Match) -> str:
        value = ord(byte[0]) - 0xDC00
        return f"<0x{value:02X}>"

    return re.sub("[\udc80-\udcff]", shown, text)


def readable_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token, as `Tokenizer.pieces`, but with bytes in place of
    characters that are not complete. A complete character belongs to its last token."""
    pieces = tokenizer.pieces(ids)
    start = 0  # the first token of this character
    for i, piece in enumerate(pieces):
        if piece == "" and i + 1 < len(pieces):
            continue
        tokens = ids[start : i + 1]
        if piece == "" or REPLACEMENT in piece:
            is_written = REPLACEMENT.encode() in tokenizer.to_bytes(tokens)
            if not is_written:
                pieces[start : i + 1] = [token_text(tokenizer, t) for t in tokens]
        start = i + 1
    return pieces


def byte_spans(
    tokenizer: Tokenizer, ids: list[int], text: str
) -> list[tuple[int, int]] | None:
    """Return the bytes (from, to) of a text that each of its tokens holds; None for a
    tokenizer that changes texts, so that its tokens have no places in them."""
    data = without_lone_surrogates(text).encode()
    pieces = [tokenizer.to_bytes([token]) for token in ids]
    whole = b"".join(pieces)
    start = 0
    if whole != data:
        if whole != b" " + data:  # the space that some tokenizers put before a text
            return None
        start = -1
    spans = []
    for piece in pieces:
        end = start + len(piece)
        spans.append((max(start, 0), max(end, 0)))
        start = end
    return spans
