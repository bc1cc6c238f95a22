"""Bach's chorales in four voices, with the splits of Boulanger-Lewandowski et al. (2012), as crops
of 32 sixteenths. A crop is a block of 128 notes: soprano, alto, tenor and bass of one sixteenth,
then of the next. The source does not distinguish held from repeated notes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from itertools import cycle, groupby, product
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from ..runtime.validation import from_json
from .prompts import as_prompt
from .sources import Corpus
from .tokenizers import HIGHEST, LOWEST, VOICES, get_tokenizer

URL = "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/master/Jsb16thSeparated.json"
CROP = 32  # sixteenths
HOP = 16  # from the start of a crop of training to that of the next
SHIFTS = [*range(-5, 7)]  # transpositions of training, semitones
LEFT_OUT = "sixteenths at the end of a chorale fill no crop and are left out"
Pitch = Literal[-1] | Annotated[int, Interval(ge=LOWEST, le=HIGHEST)]  # -1: a rest
Chorale = list[tuple[Pitch, Pitch, Pitch, Pitch]]
Chorales = dict[Literal["train", "valid", "test"], list[Chorale]]


def chorale_corpora(
    corpus: Corpus, splits: Collection[str], predicted: Collection[str]
) -> dict[str, Corpus]:
    """The crops of each split as examples (prompts.py). Those of training overlap by half and are
    there in every transposition within the range of pitches; others are as written and do not
    overlap. corpus: whole files, Jsb16thSeparated.json. predicted: voices, of which the others are
    the prompt; none: all are predicted."""
    name = next(iter(corpus.description[0].values()))  # of the file
    found = {}
    advice = "give Jsb16thSeparated.json"

    @cache
    def files() -> list[Chorales]:
        return [from_json(text, Chorales, name, advice) for text in corpus.documents]

    def crops(split: str, hop: int, shifts: Collection[int]) -> Iterator[str]:
        key = "valid" if split == "val" else split
        for chorale in (chorale for file in files() for chorale in file.get(key, ())):
            notes = np.array(chorale).reshape(-1, len(VOICES))
            last = len(chorale) - CROP
            corpus.counts[LEFT_OUT] += last % hop if last >= 0 else len(chorale)
            for start, shift in product(range(0, last + 1, hop), shifts):
                crop = notes[start : start + CROP].flatten()
                sung = crop[crop >= 0] + shift
                if (
                    LOWEST <= sung.min(initial=LOWEST)
                    and sung.max(initial=HIGHEST) <= HIGHEST
                ):
                    yield example(np.where(crop >= 0, crop + shift, crop), predicted)

    for split in splits:
        hop, shifts = (HOP, SHIFTS) if split == "train" else (CROP, [0])
        facts = {"crop": CROP, "a crop every": hop, "transpositions": shifts}
        found[split] = Corpus(crops(split, hop, shifts), [facts, *corpus.description])
    return found


def example(pitches: np.ndarray, predicted: Collection[str]) -> str:
    """The text of a crop, in which voices that are not predicted are marked as prompt."""
    pieces = get_tokenizer("chorales").pieces(np.maximum(pitches - LOWEST + 1, 0))
    given = cycle([bool(predicted) and voice not in predicted for voice in VOICES])
    text = ""
    for is_given, pairs in groupby(
        zip(given, pieces, strict=False), key=lambda pair: pair[0]
    ):
        part = "".join(piece for _, piece in pairs)
        text += as_prompt(part) if is_given else part
    return text
