"""Bach's chorales in four voices, with the splits of Boulanger-Lewandowski et al.
(2012), as crops of 32 sixteenths. A crop is a block of 128 notes: soprano, alto, tenor
and bass of one sixteenth, then of the next. The source does not distinguish held from
repeated notes.

notes.json is their tokenizer.json: "r" for a rest, then the pitches C2 to A5, 47 ids
and one for end-of-text. It reads notes with white space between them, and knows no
flats."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from aogpt.data.catalogue import Dataset
from aogpt.data.prepare import Prepare
from aogpt.data.prompts import as_prompt
from aogpt.data.sources import Corpus, Reader, RowReader, read_whole
from aogpt.runtime.validation import from_json

URL = "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/master/Jsb16thSeparated.json"
TOKENIZER = Path(__file__).with_name("notes.json")
VOICES = ("soprano", "alto", "tenor", "bass")
# MIDI pitches
LOWEST = 36
HIGHEST = 81
REST = -1
NAMES = "C C# D D# E F F# G G# A A# B".split()  # of the pitches of an octave
CROP = 32  # sixteenths
HOP = 16  # from the start of a crop of training to that of the next
SHIFTS = tuple(range(-5, 7))  # transpositions of training, semitones
InRange = Interval(ge=LOWEST, le=HIGHEST)
Pitch = Literal[-1] | Annotated[int, InRange]  # -1: a rest
Chorale = list[tuple[Pitch, Pitch, Pitch, Pitch]]
Chorales = dict[Literal["train", "valid", "test"], list[Chorale]]


@dataclass(frozen=True)
class ChoralesDataset(Dataset):
    """The crops of each split as examples (prompts.py). Those of training overlap by
    half and are there in every transposition within the range of pitches; others are as
    written and do not overlap."""

    predict: tuple[str, ...] = ()  # voices; the others are the prompt; none: all

    def corpora(self, args: Prepare, read_row: RowReader) -> dict[str, Corpus]:
        whole = super().corpora(args, read_row)["train"]
        source = whole.description[0]
        name = str(next(iter(source.values())))  # of the file

        @cache
        def files() -> list[Chorales]:
            advice = "give Jsb16thSeparated.json"
            contents = []
            for text in whole.documents:
                contents.append(from_json(text, Chorales, name, advice))
            return contents

        def crops(split: str, hop: int, shifts: Collection[int]) -> Iterator[str]:
            key = "valid" if split == "val" else split
            for file in files():
                for chorale in file.get(key, ()):
                    for crop in crops_of(np.array(chorale), hop, shifts):
                        yield example(crop, self.predict)

        corpora = {}
        for split in self.splits:
            hop = HOP if split == "train" else CROP
            shifts = SHIFTS if split == "train" else (0,)
            facts = {"crop": CROP, "a crop every": hop, "transpositions": list(shifts)}
            documents = crops(split, hop, shifts)
            description = [facts, *whole.description]
            corpora[split] = Corpus(documents, description)
        return corpora


def crops_of(
    chorale: np.ndarray, hop: int, shifts: Collection[int]
) -> Iterator[np.ndarray]:
    """Yield the crops (CROP * 4,) of a chorale (sixteenths, 4) in each transposition
    within the range of pitches. hop: sixteenths from one crop to the next."""
    starts = range(0, len(chorale) - CROP + 1, hop)
    for start, shift in product(starts, shifts):
        crop = chorale[start : start + CROP].flatten()
        sung = crop[crop != REST] + shift
        lowest = sung.min(initial=LOWEST)
        highest = sung.max(initial=HIGHEST)
        if lowest >= LOWEST and highest <= HIGHEST:
            yield np.where(crop == REST, REST, crop + shift)


def example(pitches: np.ndarray, predicted: Collection[str]) -> str:
    """Return the text of a crop, in which voices that are not predicted are marked as
    prompt."""
    notes = []  # (whether it is prompt, name)
    for place, pitch in enumerate(pitches):
        voice = VOICES[place % len(VOICES)]
        is_given = bool(predicted) and voice not in predicted
        notes.append((is_given, name_of(int(pitch))))
    text = ""
    for is_given, group in groupby(notes, key=itemgetter(0)):
        part = "".join(f" {name}" for _, name in group)
        if not text:
            part = part.removeprefix(" ")
        text += as_prompt(part) if is_given else part
    return text


def name_of(pitch: int) -> str:
    """Return the name of a MIDI pitch, such as C4 for 60; r for a rest."""
    if pitch == REST:
        return "r"
    octave, note = divmod(pitch, len(NAMES))
    return f"{NAMES[note]}{octave - 1}"


def pitches_of(ids: list[int]) -> list[int]:
    """Return the MIDI pitches of token ids; rests, and what is no note, are REST."""
    last = HIGHEST - LOWEST + 1
    pitches = []
    for number in ids:
        is_note = 1 <= number <= last
        pitches.append(LOWEST + number - 1 if is_note else REST)
    return pitches


READERS: dict[str, Reader] = {".json": read_whole}
CHORALES = ChoralesDataset(
    source="optional",
    url=URL,
    readers=READERS,
    tokenizer=str(TOKENIZER),
    protocol="records",
    block_size=CROP * len(VOICES),
    config="studies/configs/chorales.toml",
)
