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


def read_sample_sets(path: Path) -> list[SampleSet]:
    """The samples of a file, a set for all of equal settings."""
    groups: dict[str, list[Sample]] = {}
    for place, line in read_lines(path, "--samples"):
        sample = from_json(line, Sample, place, ADVICE)
        if "step" in sample and len(sample["step"]) != len(sample.get("tokens", [])):
            raise UserError(f'{place}: "step" and "tokens" must be equally long')
        groups.setdefault(json.dumps(sample.get("settings"), sort_keys=True), []).append(sample)
    if not groups:
        raise UserError(f"--samples {path}: there is no sample in it")
    sets = []
    for samples in groups.values():
        settings = samples[0].get("settings", {}) | {"file": str(path)}
        cost = {name: samples[0][name] for name in COST if samples[0].get(name) is not None}
        name, tokenizer = str(settings.get("run", path)), _tokenizer_of(path, samples)
        sets.append(SampleSet(name, samples, settings, cost, tokenizer))
    return sets


def _tokenizer_of(path: Path, samples: list[Sample]) -> str | None:
    """The tokenizer that makes the samples' text of their tokens; None if they have no tokens."""
    if not any("tokens" in sample for sample in samples):
        return None

    def fits(name: str, sample: Sample) -> bool:
        decoder, tokens = get_tokenizer(name), sample.get("tokens", [])
        known = all(0 <= token < decoder.vocab_size for token in tokens)
        return "tokens" in sample and known and decoder.decode(tokens) == sample["text"]

    # gpt2 last, which may read its files from the network.
    found = next((name for name in reversed(TOKENIZERS) if fits(name, samples[0])), None)
    if found is None or not all(fits(found, sample) for sample in samples):
        raise UserError(
            f'{path}: some "tokens" are missing, or are not those of their "text" in '
            f'{found or "any known tokenizer"}; leave "tokens" out to score the text alone'
        )
    return found
