"""Sets of generated samples: read from files, scored by a judge, and summed up in a row of numbers.

A file holds a JSON object a line, as sample.py --jsonl and eval_gen.py --save-samples write it, or
just {"text": TEXT}.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data.tokenizers import TOKENIZERS, get_tokenizer
from evaluation.judges import Judge
from evaluation.text_measures import (
    corpus_perplexity,
    distinct,
    exp,
    mean_and_error,
    model_calls,
    repetition,
    unigram_entropy,
)
from runtime.files import json_object, read_lines
from runtime.processes import Processes


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


# ---- reading -------------------------------------------------------------------------------------


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
        raise ValueError(f"--samples {path}: there is no sample in it")
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
        raise ValueError(
            f'{place}: give an object with "text", as sample.py --jsonl writes, or {{"text": TEXT}}'
        )
    for key in ("tokens", "step"):
        values = sample.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(
                f'{place}: "{key}" must be a list of whole numbers, as sample.py writes it'
            )
    if "step" in sample and len(sample["step"]) != len(sample.get("tokens", [])):
        raise ValueError(f'{place}: "step" and "tokens" must be equally long')
    if not isinstance(sample.get("settings", {}), dict):
        raise ValueError(f'{place}: "settings" must be an object, as sample.py writes it')


def find_tokenizer(path: Path, places: tuple[str, ...], samples: tuple[dict, ...]) -> str | None:
    """The tokenizer that makes the samples' text of their tokens; None if they have no tokens."""
    with_tokens = sum("tokens" in sample for sample in samples)
    if with_tokens == 0:
        return None
    if with_tokens < len(samples):
        raise ValueError(
            f'{path}: some rows have "tokens", some not; give all of them tokens, or none'
        )
    # The last one first, and no more than needed: gpt2 reads its files, at worst from the network.
    fitting = (name for name in reversed(TOKENIZERS) if is_text_of(name, samples[0]))
    tokenizer = next(fitting, None)
    for place, sample in zip(places, samples, strict=True):
        if tokenizer is None or not is_text_of(tokenizer, sample):
            raise ValueError(
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


# ---- scores --------------------------------------------------------------------------------------


def score_samples(samples: SampleSet, judge: Judge, batch_size: int, procs: Processes) -> dict:
    """What the judge and the measures say of a set: over all samples, and of each in `per_sample`.

    Every process scores its share. batch_size: as in `Judge.score`. Raises ValueError for a sample
    of a file that is too short to be scored."""
    if samples.tokenizer is None:
        how = "text"
    elif judge.has_ids_of(samples.tokenizer):
        how = "ids"
    else:
        how = "retokenised"
    share = procs.share(len(samples.samples))
    own = samples.samples[share.start : share.stop]
    judged = [s["tokens"] if how == "ids" else judge.encode(s["text"]) for s in own]
    # The measures are of the sample's own tokens, and only of the judge's where it has none.
    tokens = [s.get("tokens", ids) for s, ids in zip(own, judged, strict=True)]
    if samples.places:
        places = samples.places[share.start : share.stop]
        for place, *both in zip(places, tokens, judged, strict=True):
            least = min(map(len, both))
            if least < 2:
                raise ValueError(
                    f"{place}: the sample has {least} tokens; 2 at least can be scored"
                )

    windows, quiet = len(judge.windows(judged)), None if procs.main else True
    with tqdm(total=windows, desc="judge", unit="window", disable=quiet, leave=False) as bar:
        scores = judge.score(judged, batch_size, bar.update)
    speculative = samples.settings.get("mode") == "speculative"
    results = []
    for sample, ids, (nll, count) in zip(own, tokens, scores, strict=True):
        perplexity = exp(nll / count) if count else math.nan
        scored = {"nll": nll, "scored_tokens": count, "perplexity": perplexity}
        results.append(scored | measures(ids, sample.get("step"), speculative))
    results = sum(procs.gather(results), [])

    row = {"run": samples.name, "tokens_judged": how} | summary(results) | samples.cost
    if seconds := samples.cost.get("seconds"):
        row["tokens_per_second"] = (row["tokens"] - row["given_tokens"]) / seconds
    row |= {"tokenizer": samples.tokenizer, "sampler": samples.settings}
    return row | {"per_sample": results}


def measures(tokens: list[int], step: list[int] | None, speculative: bool) -> dict:
    """Of one sample, without a judge. step: where it is known."""
    generated = len(tokens) if step is None else sum(s >= 0 for s in step)
    return {
        "tokens": len(tokens),
        "generated_tokens": generated,
        "entropy": unigram_entropy(tokens),
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "distinct_3": distinct(tokens, 3),
        "repetition_4": repetition(tokens, 4),
        "nfe": math.nan if step is None else model_calls(step, speculative),
    }


def summary(results: list[dict]) -> dict:
    """Over all samples: corpus perplexity, and means with standard errors."""
    columns = {name: [result[name] for result in results] for name in results[0]}
    tokens, scored = sum(columns["tokens"]), columns["scored_tokens"]
    row = {
        "samples": len(results),
        "tokens": tokens,
        "given_tokens": tokens - sum(columns["generated_tokens"]),
        "scored_tokens": sum(scored),
        "unscored_samples": scored.count(0),
    }
    row |= corpus_perplexity(columns["nll"], scored)
    row["mean_sample_perplexity"], _ = mean_and_error(columns["perplexity"])
    for name in ("entropy", "distinct_1", "distinct_2", "distinct_3", "repetition_4", "nfe"):
        row[name], row[f"{name}_standard_error"] = mean_and_error(columns[name])
    return row
