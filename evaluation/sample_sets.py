"""Sets of generated samples, and the files that they are read from.

A file holds a JSON object a line, as sample.py --jsonl and eval_gen.py --save-samples write it, or
just {"text": TEXT}.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from data.tokenizers import TOKENIZERS, get_tokenizer
from runtime.errors import UserError
from runtime.files import json_object, read_lines


@dataclass(frozen=True)
class SampleSet:
    """Samples that were made in the same way."""

    name: str
    """The run that made them, or else the file that they were read from."""
    samples: list[dict]
    """As sample.py --jsonl writes them: `text`, and where they are known `tokens` and `step`."""
    settings: dict
    """How they were made; empty where that is not known."""
    cost: dict
    """model_calls, token_forwards and seconds, where they are known."""
    tokenizer: str | None
    """Of `tokens`; None where there is only text."""
    places: tuple[str, ...] = ()
    """Of samples that were read: "FILE line N" of each."""


def read_sample_sets(path: Path) -> list[SampleSet]:
    """The samples of a file, a set for all of equal settings. Raises ValueError that names the line
    that is wrong."""
    groups = {}
    for place, line in read_lines(path, "--samples"):
        sample = json_object(line, place)
        check_sample(sample, place)
        key = json.dumps(sample.get("settings"), sort_keys=True)
        groups.setdefault(key, []).append((place, sample))
    if not groups:
        raise UserError(f"--samples {path}: there is no sample in it")
    sets = []
    for group in groups.values():
        places, samples = zip(*group, strict=True)
        settings = samples[0].get("settings", {})
        names = ("model_calls", "token_forwards", "seconds")
        cost = {name: samples[0][name] for name in names if is_number(samples[0].get(name))}
        tokenizer = find_tokenizer(path, places, samples)
        name, settings = str(settings.get("run", path)), settings | {"file": str(path)}
        sets.append(SampleSet(name, list(samples), settings, cost, tokenizer, places))
    return sets


def check_sample(sample: dict, place: str) -> None:
    """ValueError if it is not what sample.py writes."""
    if not isinstance(sample.get("text"), str):
        raise UserError(
            f'{place}: give an object with "text", as sample.py --jsonl writes, or {{"text": TEXT}}'
        )
    for key in ("tokens", "step"):
        values = sample.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise UserError(
                f'{place}: "{key}" must be a list of whole numbers, as sample.py writes it'
            )
    if "step" in sample and len(sample["step"]) != len(sample.get("tokens", [])):
        raise UserError(f'{place}: "step" and "tokens" must be equally long')
    if not isinstance(sample.get("settings", {}), dict):
        raise UserError(f'{place}: "settings" must be an object, as sample.py writes it')


def find_tokenizer(path: Path, places: tuple[str, ...], samples: tuple[dict, ...]) -> str | None:
    """The tokenizer that makes the samples' text of their tokens; None if they have no tokens."""
    with_tokens = sum("tokens" in sample for sample in samples)
    if with_tokens == 0:
        return None
    if with_tokens < len(samples):
        raise UserError(
            f'{path}: some rows have "tokens", some not; give all of them tokens, or none'
        )
    # The last one first, and no more than needed: gpt2 reads its files, at worst from the network.
    fitting = (name for name in reversed(TOKENIZERS) if is_text_of(name, samples[0]))
    tokenizer = next(fitting, None)
    for place, sample in zip(places, samples, strict=True):
        if tokenizer is None or not is_text_of(tokenizer, sample):
            raise UserError(
                f'{place}: "tokens" are not those of "text" in '
                f'{tokenizer or "any known tokenizer"}; leave "tokens" out to score the text alone'
            )
    return tokenizer


def is_text_of(tokenizer: str, sample: dict) -> bool:
    """Whether the tokenizer makes the sample's text of its tokens."""
    decoder, tokens = get_tokenizer(tokenizer), sample["tokens"]
    known = all(0 <= token < decoder.vocab_size for token in tokens)
    return known and decoder.decode(tokens) == sample["text"]


def is_number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
