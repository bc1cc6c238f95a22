"""Scores of generated samples: what a judge and the measures say of each, and of a whole set.

To add a measure: compute it in `text_measures`, name it in `measures`, and give it a column in the
table of eval_gen.py.
"""

from __future__ import annotations

import math

from tqdm import tqdm

from evaluation import text_measures as text
from evaluation.judges import Judge
from evaluation.sample_sets import SampleSet
from runtime.processes import Processes


def score_samples(
    samples: SampleSet,
    judge: Judge,
    batch_size: int,
    procs: Processes,
    vocabulary: frozenset[str] | None = None,
) -> dict:
    """The scores of a set: over all samples, and of each in `per_sample`; every process scores its
    share. batch_size: as in `Judge.score`; vocabulary: for `known_words`."""
    how = "text"
    if samples.tokenizer is not None:
        how = "ids" if judge.has_ids_of(samples.tokenizer) else "retokenised"
    share = procs.share(len(samples.samples))
    own = samples.samples[share.start : share.stop]
    judged = [s["tokens"] if how == "ids" else judge.encode(s["text"]) for s in own]
    windows, quiet = len(judge.windows(judged)), None if procs.main else True
    with tqdm(total=windows, desc="judge", unit="window", disable=quiet, leave=False) as bar:
        scores = judge.score(judged, batch_size, bar.update)
    speculative = samples.settings.get("mode") == "speculative"
    results = []
    for sample, ids, (nll, count) in zip(own, judged, scores, strict=True):
        # Measures are of the sample's own tokens, or else of the judge's.
        tokens, step = sample.get("tokens", ids), sample.get("step")
        generated = len(tokens) if step is None else sum(s >= 0 for s in step)
        known = math.nan if vocabulary is None else text.known_words(sample["text"], vocabulary)
        result = {
            "nll": nll,
            "scored_tokens": count,
            "perplexity": text.exp(nll / count) if count else math.nan,
            "tokens": len(tokens),
            "generated_tokens": generated,
            **measures(tokens, step, speculative),
            "known_words": known,
        }
        if "nfe" in sample:  # older files have steps alone
            result["nfe"] = sample["nfe"]
        results.append(result)
    results = sum(procs.gather(results), [])

    row = {"run": samples.name, "tokens_judged": how} | summary(results) | samples.cost
    if seconds := samples.cost.get("seconds"):
        row["tokens_per_second"] = (row["tokens"] - row["given_tokens"]) / seconds
    row |= {"tokenizer": samples.tokenizer, "sampler": samples.settings}
    return row | {"per_sample": results}


def measures(tokens: list[int], step: list[int] | None, speculative: bool) -> dict[str, float]:
    """Numbers of one sample, without a judge, whose means over samples `summary` takes."""
    return {
        "entropy": text.unigram_entropy(tokens),
        **{f"distinct_{n}": text.distinct(tokens, n) for n in (1, 2, 3)},
        "repetition_4": 1 - text.distinct(tokens, 4),
        "nfe": math.nan if step is None else text.model_calls(step, speculative),
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
        **text.corpus_perplexity(columns["nll"], scored),
        "mean_sample_perplexity": text.mean_and_error(columns["perplexity"])[0],
    }
    for name in (*measures([], None, speculative=False), "known_words"):
        row[name], row[f"{name}_standard_error"] = text.mean_and_error(columns[name])
    return row
