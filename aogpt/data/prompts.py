"""Examples: short texts of which a part, the prompt, is given, each in a block of its
own. The prompt stands between marks, anywhere in the text, in one part or several:

    [GIVEN]12+34=[/GIVEN]046
    The [GIVEN]old horse[/GIVEN] was tired

Beside the token file lies the prompt mask, a byte for each token, its *role*:

    PREDICTED   the model learns it, and is scored on it
    PROMPT      the model sees it before all others, without a loss
    PADDING     after the end of the example: not seen, not predicted

A run with data.end = 'given' reads the end of each example as given, too, and before
all other tokens, so that each of them is predicted by a model that knows the length."""

import re

import numpy as np

from ..runtime.errors import UserError
from .sources import text_of
from .tokenizers import Tokenizer

PREDICTED = 0
PROMPT = 1
PADDING = 2
END_GIVEN = 3  # never in a file: the reader of data.end = 'given' puts it there
BEGIN = "[GIVEN]"
END = "[/GIVEN]"
MARKS = re.compile(r"(\[/?GIVEN\])")


def as_prompt(text: str) -> str:
    """Return a text marked as prompt; an empty one has no marks."""
    return f"{BEGIN}{text}{END}" if text else ""


def without_marks(example: str) -> str:
    """Return the text of an example, prompt included."""
    return MARKS.sub("", example)


def spans(example: str, place: str = "this record") -> list[tuple[str, int]]:
    """Return the parts of an example and their roles. Raises UserError, which begins
    with `place`."""
    parts = MARKS.split(example)  # every other one is a mark
    if parts[1::2] != [BEGIN, END] * (len(parts) // 4):
        raise UserError(
            f"{place}: {BEGIN} or {END} without its other mark; write {BEGIN}text{END}"
        )
    result = []
    for i, part in enumerate(parts[::2]):
        if part:
            role = PROMPT if i % 2 else PREDICTED
            result.append((part, role))
    if all(role == PROMPT for _, role in result):
        raise UserError(f"{place}: there is no text to predict")
    return result


def encode_example(
    tokenizer: Tokenizer, block_size: int, end: bool, example: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and roles, padded with end-of-text to (block_size,) each; longer
    examples stay longer. end: whether a predicted end-of-text follows."""
    ids = []
    roles = []
    for text, role in spans(example):
        # By itself: a prompt's tokens do not depend on the rest.
        if ids:
            part = tokenizer.encode_after(text)
        else:
            part = tokenizer.encode(text)
        ids += part
        roles += [role] * len(part)
    if PREDICTED not in roles:  # a tokenizer may read white space as nothing
        raise UserError(f"there is no token to predict in {example[:40]!r}")
    if end:
        ids.append(tokenizer.eot)
        roles.append(PREDICTED)
    missing = max(0, block_size - len(ids))
    ids += [tokenizer.eot] * missing
    roles += [PADDING] * missing
    return np.array(ids, tokenizer.dtype), np.array(roles, np.uint8)


def example_of(row: dict, place: str, field: str, prompt_field: str | None) -> str:
    """Return the example of a row, marked: {"prompt": ..., "text": what follows it}, or
    {"text": text with marks}. Raises UserError, which begins with `place`."""
    text = text_of(row, place, field)
    prompt = prompt_field or "prompt"
    if prompt != field and (prompt in row or prompt_field):
        given = text_of(row, place, prompt, "--prompt-field")
        if MARKS.search(text + given):
            raise UserError(f"{place}: give a prompt or {BEGIN} marks, not both")
        text = as_prompt(given) + text
    spans(text, place)  # raises UserError here, where the place is known
    return text
