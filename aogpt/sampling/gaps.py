"""Texts with gaps: [MASK:3] is three tokens to fill in, [MASK] one. Masks side by side
are one gap."""

import re

from ..data.tokenizers import AlphabetTokenizer, BytesTokenizer, Tokenizer
from ..runtime.errors import UserError
from .modes import Context

MASK = re.compile(r"(\[MASK\b[^\]]*\]?)")
LENGTH = re.compile(r"\[MASK(?::0*([1-9]\d{0,8}))?\]")  # without leading zeros


class TooLong(UserError):
    """A text that leaves no room in a block."""


def read_gaps(text: str) -> list[str | int]:
    """Return text and the lengths of gaps, in turn; masks with nothing between them are
    one gap. Raises UserError for a text without a mask, and for a mask that is not
    written correctly."""
    parts: list[str | int] = []
    for number, part in enumerate(MASK.split(text)):
        is_text = number % 2 == 0
        if is_text:
            parts.append(part)
            continue
        mask = LENGTH.fullmatch(part)
        if mask is None:
            raise UserError(
                f"{part[:40]!r} is not a mask; write [MASK:n] for n tokens, n at least "
                "1"
            )
        length = int(mask[1] or 1)
        follows_mask = parts[-1] == "" and len(parts) > 1
        if follows_mask:
            parts.pop()
            before = parts.pop()
            assert isinstance(before, int)
            length += before
        parts.append(length)
    if len(parts) == 1:
        raise UserError("there is no mask; write [MASK:n] for n new tokens")
    return parts


def encode_gaps(text: str, tokenizer: Tokenizer, block_size: int) -> Context:
    """Return the tokens of a text with masks, None in its gaps. Raises TooLong for one
    that does not fit into a block."""
    parts = read_gaps(text)
    # Added up before anything is made: a mask can name any length.
    gaps = sum(part for part in parts if isinstance(part, int))
    tokens: Context = []
    if gaps <= block_size:
        for number, part in enumerate(parts):
            if isinstance(part, int):
                tokens += [None] * part
            elif number == 0:
                tokens += tokenizer.encode(part)
            else:
                tokens += tokenizer.encode_after(part)
    if max(gaps, len(tokens)) > block_size:
        raise TooLong(
            f"text and masks exceed the block size, {block_size} tokens; shorten them"
        )
    return tokens


def space_note(text: str, tokenizer: Tokenizer) -> str | None:
    """Return a note on a space before a mask, if the tokenizer's words begin with
    theirs, so that the space would be a token of its own."""
    is_of_characters = isinstance(tokenizer, BytesTokenizer | AlphabetTokenizer)
    if " [MASK" not in text or is_of_characters:
        return None
    return (
        "a mask after a space is filled as if the space were a word; leave the "
        'space out, as in "The[MASK] ran"'
    )


def refuse_masks(text: str, advice: str) -> None:
    """Raise UserError for a text that has a mask where none is allowed."""
    mask = MASK.search(text)
    if mask is not None:
        beginning = mask[0][:40]
        raise UserError(f"the text has a mask, {beginning}: {advice}")
