"""Sets of generated samples, and the files that they are read from: a JSON object a line, as
sample.py --jsonl and eval_gen.py --save-samples write it, or just {"text": TEXT}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from data.tokenizers import TOKENIZERS, get_tokenizer
from runtime.errors import UserError
from runtime.files import read_lines
from runtime.validation import Amount, from_json, schema

COST = ("model_calls", "token_forwards", "seconds")
ADVICE = 'give an object with "text", as sample.py --jsonl writes, or {"text": TEXT}'


@schema
class Sample(TypedDict):
    text: str
    tokens: NotRequired[list[int]]
    step: NotRequired[list[int]]
    nfe: NotRequired[int]
    settings: NotRequired[dict[str, Any]]
    model_calls: NotRequired[Amount | None]
    token_forwards: NotRequired[Amount | None]
    seconds: NotRequired[Amount | None]


@dataclass(frozen=True)
class SampleSet:
    """Samples that were made in the same way."""

    name: str  # the run that made them, or else the file that they were read from
    samples: list[Sample]
    settings: dict  # how they were made; empty if unknown
    cost: dict  # those of COST that are known
    tokenizer: str | None  # of `tokens`; None where there is only text
    places: tuple[str, ...] = ()  # of samples that were read: "FILE line N"


def read_sample_sets(path: Path) -> list[SampleSet]:
    """The samples of a file, a set for all of equal settings. Raises UserError that names the line
    that is wrong."""
    groups: dict[str, list[tuple[str, Sample]]] = {}
    for place, line in read_lines(path, "--samples"):
        sample = from_json(line, Sample, place, ADVICE)
        if "step" in sample and len(sample["step"]) != len(sample.get("tokens", [])):
            raise UserError(f'{place}: "step" and "tokens" must be equally long')
        key = json.dumps(sample.get("settings"), sort_keys=True)
        groups.setdefault(key, []).append((place, sample))
    if not groups:
        raise UserError(f"--samples {path}: there is no sample in it")
    sets = []
    for group in groups.values():
        places, samples = zip(*group, strict=True)
        settings = samples[0].get("settings", {}) | {"file": str(path)}
        cost = {name: samples[0][name] for name in COST if samples[0].get(name) is not None}
        tokenizer, name = _tokenizer_of(path, group), str(settings.get("run", path))
        sets.append(SampleSet(name, list(samples), settings, cost, tokenizer, places))
    return sets


def _tokenizer_of(path: Path, group: list[tuple[str, Sample]]) -> str | None:
    """The tokenizer that makes the samples' text of their tokens; None if they have no tokens."""
    with_tokens = sum("tokens" in sample for _, sample in group)
    if with_tokens == 0:
        return None
    if with_tokens < len(group):
        raise UserError(
            f'{path}: some rows have "tokens", some not; give all of them tokens, or none'
        )
    # The last one first, and no more than needed: gpt2 may read its files from the network.
    fitting = (name for name in reversed(TOKENIZERS) if _is_text_of(name, group[0][1]))
    tokenizer = next(fitting, None)
    for place, sample in group:
        if tokenizer is None or not _is_text_of(tokenizer, sample):
            raise UserError(
                f'{place}: "tokens" are not those of "text" in '
                f'{tokenizer or "any known tokenizer"}; leave "tokens" out to score the text alone'
            )
    return tokenizer


def _is_text_of(tokenizer: str, sample: Sample) -> bool:
    decoder, tokens = get_tokenizer(tokenizer), sample["tokens"]
    known = all(0 <= token < decoder.vocab_size for token in tokens)
    return known and decoder.decode(tokens) == sample["text"]
