"""Examples: short texts of which a part, the prompt, is given, each in a block of its own.

The prompt stands between marks, anywhere in the text, in one part or several:

    [GIVEN]12+34=[/GIVEN]046
    The [GIVEN]old horse[/GIVEN] was tired

Beside the token file lies the prompt mask, a byte for each token, its *role*:

    PREDICTED   the model learns it, and is scored on it
    PROMPT      the model sees it before all others, without a loss
    PADDING     after the end of the example: not seen, not predicted
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from data.sources import text_of
from data.tokenizers import Tokenizer
from runtime.errors import UserError
from runtime.files import json_object, lines_of

PREDICTED, PROMPT, PADDING = range(3)
BEGIN, END = "[GIVEN]", "[/GIVEN]"
MARKS = re.compile(r"(\[/?GIVEN\])")


def as_prompt(text: str) -> str:
    return f"{BEGIN}{text}{END}" if text else ""


def spans(example: str, place: str = "this record") -> list[tuple[str, int]]:
    """The parts of an example and their roles. Raises UserError, which begins with `place`, for
    marks that do not come in pairs or nothing to predict."""
    parts = MARKS.split(example)  # every other one is a mark
    if parts[1::2] != [BEGIN, END] * (len(parts) // 4):
        raise UserError(f"{place}: {BEGIN} or {END} without its other mark; write {BEGIN}text{END}")
    result = [(part, i // 2 % 2) for i, part in enumerate(parts) if i % 2 == 0 and part]
    if all(role == PROMPT for _, role in result):
        raise UserError(f"{place}: all of it is given, and nothing left to predict")
    return result


def encode_example(
    tokenizer: Tokenizer, block_size: int, end: bool, example: str
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and roles, (block_size,) each, padded with end-of-text.

    Every part is encoded by itself, so that the prompt's tokens do not depend on the rest. end:
    whether a predicted end-of-text follows. Raises UserError for an example that is too long."""
    ids, roles = [], []
    for text, role in spans(example):
        part = tokenizer.encode(text)
        ids += part
        roles += [role] * len(part)
    missing = block_size - len(ids) - end
    if missing < 0:
        size = f"{block_size - missing} tokens, more than a block of {block_size}"
        raise UserError(f"the record {example[:40]!r}... has {size}: give a larger --block-size")
    ids += [tokenizer.eot] * (end + missing)
    roles += [PREDICTED] * end + [PADDING] * missing
    return np.array(ids, np.uint16), np.array(roles, np.uint8)


def read_examples(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """An example for each row of JSON: {"prompt": ..., "text": what follows it}, or {"text": with
    marks}; `field` replaces "text"."""
    for place, line in lines_of(stream, name):
        row = json_object(line, place)
        text = text_of(row, field, place)
        if "prompt" in row:
            if MARKS.search(text + text_of(row, "prompt", place)):
                raise UserError(f"{place}: give a prompt or {BEGIN} marks, not both")
            text = as_prompt(row["prompt"]) + text
        spans(text, place)  # raises for what is wrong with it, while its place is known
        yield text
