"""Records: short texts of which a part is given, such as a question and its answer, each in a block
of its own.

A record is written as text in which what is given stands between two marks:

    [GIVEN]12+34=[/GIVEN]046
    The [GIVEN]old horse[/GIVEN] was tired

Its tokens fill the beginning of a block. Beside the token file lies one of the same number of
bytes, the *role* of every token:

    PREDICTED   the model learns it, and is scored on it
    GIVEN       the model sees it before all others, and no loss is on it
    ABSENT      the record has ended: nobody sees it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import BinaryIO

import numpy as np

from data.sources import Piece, read_jsonl_rows, text_of
from data.tokenizers import Tokenizer
from runtime.errors import UserError

PREDICTED, GIVEN, ABSENT = range(3)
BEGIN, END = "[GIVEN]", "[/GIVEN]"


def given(text: str) -> str:
    """The text, marked as given."""
    return f"{BEGIN}{text}{END}" if text else ""


def spans(record: str, place: str = "this record") -> list[tuple[str, int]]:
    """The texts of a record and their roles, in order; ValueError, with its place, for marks that
    do not come in pairs and for a record that leaves nothing to predict."""
    parts, role, result = re.split(r"(\[/?GIVEN\])", record), PREDICTED, []
    for part in parts:
        if part in (BEGIN, END):
            if (part == BEGIN) == (role == GIVEN):
                raise UserError(f"{place}: {part} without its other mark; write {BEGIN}text{END}")
            role = GIVEN if part == BEGIN else PREDICTED
        elif part:
            result.append((part, role))
    if role == GIVEN:
        raise UserError(f"{place}: {BEGIN} without {END}; write {BEGIN}text{END}")
    if all(role == GIVEN for _, role in result):
        raise UserError(f"{place}: all of it is given, and nothing left to predict")
    return result


def encode_record(
    record: str, tokenizer: Tokenizer, block_size: int, end: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a record and the roles of them, (block_size,) each, padded with end-of-text.

    Every span is encoded by itself, so that where what is given ends does not depend on what
    follows. end: whether the text is followed by an end-of-text that is predicted, too. Raises
    ValueError for a record that is too long.
    """
    ids, roles = [], []
    for text, role in spans(record):
        part = tokenizer.encode(text)
        ids += part
        roles += [role] * len(part)
    if end:
        ids.append(tokenizer.eot)
        roles.append(PREDICTED)
    missing = block_size - len(ids)
    if missing < 0:
        raise UserError(
            f"the record {record[:40]!r}... has {len(ids)} tokens, more than a block of "
            f"{block_size}: give a larger --block-size"
        )
    ids, roles = ids + [tokenizer.eot] * missing, roles + [ABSENT] * missing
    return np.array(ids), np.array(roles, np.uint8)


def read_records(stream: BinaryIO, name: str, field: str) -> Iterator[Piece]:
    """A record a row of JSON: {"prompt": what is given, "text": what follows it}, {"text": with
    marks}, or {"text": ..., "given": a mask, with 1 for each character that is given and 0 for each
    other}. `field` is the name of the text."""
    for place, row in read_jsonl_rows(stream, name):
        record = text_of(row, field, place)
        ways = [key for key in ("prompt", "given") if key in row]
        if ways:
            told = {key: text_of(row, key, place) for key in ways}
            if len(ways) > 1 or re.search(r"\[/?GIVEN\]", record + told.get("prompt", "")):
                raise UserError(f"{place}: give a prompt, a mask or {BEGIN} marks, one of them")
            if "prompt" in told:
                record = given(told["prompt"]) + record
            else:
                record = masked(record, told["given"], place)
        spans(record, place)  # raises for what is wrong with it, while its place is known
        yield record, True


def masked(text: str, mask: str, place: str) -> str:
    """The text with marks around what a mask says is given. Raises ValueError, with its place, for
    a mask of another length or of other characters."""
    if len(mask) != len(text) or set(mask) - {"0", "1"}:
        raise UserError(
            f"{place}: `given` must have a 1 (given) or a 0 (predicted) for each of the "
            f"{len(text)} characters of the text; it has {len(mask)} characters"
        )
    parts = groupby(zip(text, mask, strict=True), key=lambda pair: pair[1])
    texts = [("".join(letter for letter, _ in pairs), kind) for kind, pairs in parts]
    return "".join(given(part) if kind == "1" else part for part, kind in texts)


RECORD_FILES = {".jsonl": read_records}
