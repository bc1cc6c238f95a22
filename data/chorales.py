"""Bach's chorales in four voices, with the splits of Boulanger-Lewandowski et al. (2012), as crops
of 32 sixteenths. A crop is a block of 128 notes: soprano, alto, tenor and bass of one sixteenth,
then of the next. Held and repeated notes are not told apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from itertools import cycle, groupby
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval
from typing_extensions import TypedDict

from data.prompts import as_prompt
from data.sources import Corpus
from data.tokenizers import HIGHEST, LOWEST, VOICES, get_tokenizer
from runtime.validation import from_json, schema

URL = "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/master/Jsb16thSeparated.json"
CROP = 32  # sixteenths
HOP = 16  # from the start of a crop of training to that of the next
SHIFTS = (*range(-5, 7),)  # transpositions of training, semitones
LEFT_OUT = "sixteenths at the end of a chorale fill no crop and are left out"
Pitch = Literal[-1] | Annotated[int, Interval(ge=LOWEST, le=HIGHEST)]  # -1: a rest
Chorale = list[tuple[Pitch, Pitch, Pitch, Pitch]]


@schema
class Chorales(TypedDict):
    """The contents of Jsb16thSeparated.json."""

    train: list[Chorale]
    valid: list[Chorale]
    test: list[Chorale]


def chorale_corpora(
    corpus: Corpus, splits: Collection[str], predicted: Collection[str]
) -> dict[str, Corpus]:
    """The crops of each split as examples (prompts.py). Those of training overlap by half and are
    there in every transposition within the range of pitches; others are as written and do not
    overlap. corpus: whole files of JSON. predicted: voices, of which the others are the prompt;
    none: all are predicted."""
    name = next(iter(corpus.description[0].values()))  # of the file

    @cache
    def files() -> list[Chorales]:
        advice = "give Jsb16thSeparated.json"
        return [from_json(text, Chorales, name, advice) for text in corpus.documents]

    def crops(split: str) -> Iterator[str]:
        hop, shifts = ways(split)
        for chorale in (c for file in files() for c in file["valid" if split == "val" else split]):
            notes, last = np.array(chorale).reshape(-1, len(VOICES)), len(chorale) - CROP
            corpus.counts[LEFT_OUT] += last % hop if last >= 0 else len(chorale)
            for start in range(0, last + 1, hop):
                for shift in shifts:
                    crop = notes[start : start + CROP]
                    crop = np.where(crop < 0, crop, crop + shift)
                    sung = crop[notes[start : start + CROP] >= 0]
                    if LOWEST <= sung.min(initial=LOWEST) and sung.max(initial=0) <= HIGHEST:
                        yield example(crop.flatten(), predicted)

    def description(split: str) -> list[dict]:
        hop, shifts = ways(split)
        facts = {"crop": CROP, "a crop every": hop, "transpositions": [*shifts]}
        return [facts, *corpus.description]

    return {split: Corpus(crops(split), description(split)) for split in splits}


def ways(split: str) -> tuple[int, tuple[int, ...]]:
    """Sixteenths from one crop to the next, and transpositions."""
    return (HOP, SHIFTS) if split == "train" else (CROP, (0,))


def example(pitches: np.ndarray, predicted: Collection[str]) -> str:
    """The text of a crop, in which voices that are not predicted are marked as prompt."""
    pieces = get_tokenizer("chorales").pieces(np.maximum(pitches - LOWEST + 1, 0))
    given = cycle([bool(predicted) and voice not in predicted for voice in VOICES])
    parts = groupby(zip(given, pieces, strict=False), key=lambda pair: pair[0])
    texts = ((is_given, "".join(piece for _, piece in part)) for is_given, part in parts)
    return "".join(as_prompt(text) if is_given else text for is_given, text in texts)
