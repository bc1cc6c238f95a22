"""Scores of generated samples: what a judge and the measures say of each, and of a whole set.

A new measure: compute it in `text_measures`, name it in `measures`, and give it a column in the
table of eval_gen.py.
"""

from __future__ import annotations

import math

from tqdm import tqdm

from evaluation.judges import Judge
from evaluation.sample_sets import SampleSet
from evaluation.text_measures import (
    corpus_perplexity,
    distinct,
    exp,
    known_words,
    mean_and_error,
    model_calls,
    repetition,
    unigram_entropy,
)
from runtime.errors import UserError
from runtime.processes import Processes


def score_samples(
    samples: SampleSet,
    judge: Judge,
    batch_size: int,
    procs: Processes,
    vocabulary: frozenset[str] | None = None,
) -> dict:
    """What the judge and the measures say of a set: over all samples, and of each in `per_sample`.

    Every process scores its share. batch_size: as in `Judge.score`. vocabulary: the words that
    `known_words` knows. Raises ValueError for a sample of a file that is too short to be scored."""
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
                raise UserError(f"{place}: the sample has {least} tokens; 2 at least can be scored")

    windows, quiet = len(judge.windows(judged)), None if procs.main else True
    with tqdm(total=windows, desc="judge", unit="window", disable=quiet, leave=False) as bar:
        scores = judge.score(judged, batch_size, bar.update)
    speculative = samples.settings.get("mode") == "speculative"
    results = []
    for sample, ids, (nll, count) in zip(own, tokens, scores, strict=True):
        perplexity = exp(nll / count) if count else math.nan
        scored = {"nll": nll, "scored_tokens": count, "perplexity": perplexity}
        step = sample.get("step")
        known = math.nan if vocabulary is None else known_words(sample["text"], vocabulary)
        scored |= counts(ids, step) | measures(ids, step, speculative)
        scored["nfe"] = sample.get("nfe", scored["nfe"])  # older files have steps alone
        results.append(scored | {"known_words": known})
    results = sum(procs.gather(results), [])

    row = {"run": samples.name, "tokens_judged": how} | summary(results) | samples.cost
    if seconds := samples.cost.get("seconds"):
        row["tokens_per_second"] = (row["tokens"] - row["given_tokens"]) / seconds
    row |= {"tokenizer": samples.tokenizer, "sampler": samples.settings}
    return row | {"per_sample": results}


def counts(tokens: list[int], step: list[int] | None) -> dict[str, int]:
    """Of one sample: all its tokens, and those that were generated. step: where it is known."""
    generated = len(tokens) if step is None else sum(s >= 0 for s in step)
    return {"tokens": len(tokens), "generated_tokens": generated}


def measures(tokens: list[int], step: list[int] | None, speculative: bool) -> dict[str, float]:
    """Of one sample, without a judge: numbers whose means over samples `summary` takes, whatever
    they are."""
    return {
        "entropy": unigram_entropy(tokens),
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "distinct_3": distinct(tokens, 3),
        "repetition_4": repetition(tokens, 4),
        "nfe": math.nan if step is None else model_calls(step, speculative),
    }


MEASURES = (*measures([], None, speculative=False), "known_words")  # their names


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
    for name in MEASURES:
        row[name], row[f"{name}_standard_error"] = mean_and_error(columns[name])
    return row
