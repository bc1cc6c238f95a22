"""Generated samples: reading them from files, and scoring each one and a whole set by a
judge and by measures.

To add a measure of a sample's token ids: a function and a row of `MEASURES` in
text_measures.py. One that needs the text or the whole set: `score_samples`."""

import contextlib
import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ..data.tokenizers import FILES, TOKENIZERS, get_tokenizer
from ..runtime.errors import UserError
from ..runtime.files import read_lines
from ..runtime.processes import Processes
from ..runtime.validation import Amount, from_json
from . import text_measures
from .estimates import exp
from .judges import Judge

ADVICE = 'give an object with "text", as sample.py --jsonl writes, or {"text": TEXT}'


class Sample(TypedDict):
    """A sample to score, as sample.py --jsonl writes it."""

    text: str
    tokens: NotRequired[list[int]]
    step: NotRequired[list[int]]
    nfe: NotRequired[int]
    prompt: NotRequired[str]
    settings: NotRequired[dict[str, Any]]
    seconds: NotRequired[Amount | None]


@dataclass(frozen=True)
class SampleSet:
    """A set of samples that were made in the same way."""

    name: str  # the run that made them, or else the file that they were read from
    samples: list[Sample]
    settings: dict  # how they were made; empty if unknown
    seconds: float | None  # that it took, if known
    tokenizer: str | None  # of `tokens`; None where there is only text


def read_sample_sets(path: Path) -> list[SampleSet]:
    """Return the samples of a file, a set for all of equal settings."""
    groups: dict[str, list[Sample]] = {}
    for place, line in read_lines(path):
        sample = from_json(line, Sample, place, ADVICE)
        key = json.dumps(sample.get("settings"), sort_keys=True)
        group = groups.setdefault(key, [])
        group.append(sample)
    return [_sample_set(samples, path) for samples in groups.values()]


def _sample_set(samples: list[Sample], path: Path) -> SampleSet:
    """Return the set of samples of equal settings from a file."""
    settings = dict(samples[0].get("settings", {}))
    settings["file"] = str(path)
    # Each sample has the seconds up to then.
    seconds = max(sample.get("seconds") or 0.0 for sample in samples)
    return SampleSet(
        name=str(settings.get("run", path)),
        samples=samples,
        settings=settings,
        seconds=seconds or None,
        tokenizer=_tokenizer_of(samples),
    )


def _tokenizer_of(samples: list[Sample]) -> str | None:
    """Return the tokenizer that makes the samples' text from their tokens; None if none
    does."""
    if not all("tokens" in sample for sample in samples):
        return None
    # gpt2 last, which may read its files from the network.
    for name in reversed(TOKENIZERS):
        # A vocabulary is not at hand, or has no such ids.
        with contextlib.suppress(UserError):
            decode = get_tokenizer(name).decode
            if all(decode(sample["tokens"]) == sample["text"] for sample in samples):
                return name
    return None


def score_samples(
    samples: SampleSet, judge: Judge, batch_size: int, procs: Processes
) -> dict:
    """Return the scores of a set: over all samples, and of each in `per_sample`; every
    process scores its share. batch_size: as in `Judge.score`."""
    judged_as = _judged_as(samples, judge)
    share = procs.share(len(samples.samples))
    own = samples.samples[share.start : share.stop]
    if judged_as == "ids":
        judged = [sample["tokens"] for sample in own]
    else:
        judged = [judge.encode(sample["text"]) for sample in own]
    scores = judge.score(judged, batch_size, quiet=not procs.main)
    # Measures are of the sample's own tokens, or else of the judge's.
    measured = judged
    if judged_as != "text":
        measured = [sample["tokens"] for sample in own]
    results = []
    for sample, tokens, score in zip(own, measured, scores, strict=True):
        nll, count = score
        result = _result(sample, tokens, nll, count)
        results.append(result)

    results = list(chain(*procs.gather(results)))
    measured = list(chain(*procs.gather(measured)))
    distinct_samples = {tuple(tokens) for tokens in measured}
    distinct_scored = set()
    for result, tokens in zip(results, measured, strict=True):
        if result["scored_tokens"]:
            distinct_scored.add(tuple(tokens))
    of_all = summary(results)
    if len(distinct_scored) == 1:  # one sample, drawn several times, shows no error
        for key in ("standard_error", "perplexity_low", "perplexity_high"):
            of_all[key] = None
    return {
        "run": samples.name,
        "tokens_judged": judged_as,
        **of_all,
        "distinct_samples": len(distinct_samples),
        "seconds": samples.seconds,
        "tokenizer": samples.tokenizer,
        "sampler": samples.settings,
        "per_sample": results,
    }


def _judged_as(samples: SampleSet, judge: Judge) -> str:
    """Return the form in which the judge reads the samples: "ids", "retokenised" (as
    text, as their tokens are not known to be the judge's) or "text" (they have no
    tokens)."""
    if not all("tokens" in sample for sample in samples.samples):
        return "text"
    if samples.tokenizer not in FILES and samples.tokenizer == judge.loaded.tokenizer:
        return "ids"
    return "retokenised"


def _result(sample: Sample, tokens: list[int], nll: float, count: int) -> dict:
    """Return the results of one sample: the nats of its `count` scored tokens, and the
    measures of its tokens."""
    perplexity = None
    if count:
        perplexity = exp(nll / count)
    steps = sample.get("step", [])
    result = {
        "nll": nll,
        "scored_tokens": count,
        "perplexity": perplexity,
        "tokens": len(tokens),
        "given_tokens": steps.count(-1),
    }
    for name, measure in text_measures.MEASURES.items():
        result[name] = measure.function(tokens)
    result["nfe"] = sample.get("nfe")
    result["prompt"] = sample.get("prompt")
    return result


def summary(results: list[dict]) -> dict:
    """Return numbers of all samples: corpus perplexity, and means with standard errors,
    by prompt where there are several."""
    columns = {}
    for name in results[0]:
        columns[name] = [result[name] for result in results]
    scored = columns["scored_tokens"]
    prompts = numbers_of(columns["prompt"])
    perplexity, _ = text_measures.mean_and_error(columns["perplexity"])
    row = {
        "samples": len(results),
        "tokens": sum(columns["tokens"]),
        "given_tokens": sum(columns["given_tokens"]),
        "scored_tokens": sum(scored),
        "unscored_samples": scored.count(0),
        "prompts": scored_prompts(prompts, scored),
        **text_measures.corpus_perplexity(columns["nll"], scored, prompts),
        "mean_sample_perplexity": perplexity,
    }
    for name in (*text_measures.MEASURES, "nfe"):
        mean, error = text_measures.mean_and_error(columns[name], prompts)
        row[name] = mean
        row[f"{name}_standard_error"] = error
    return row


def scored_prompts(prompts: list[int] | None, scored: list[int]) -> int | None:
    """Return the number of different prompts of samples with scored tokens; None where
    they are not known."""
    if prompts is None:
        return None
    pairs = zip(prompts, scored, strict=True)
    return len({prompt for prompt, count in pairs if count})


def numbers_of(prompts: list[str | None]) -> list[int] | None:
    """Return a number for each sample's prompt, the same for equal ones; None where a
    sample's prompt is not known."""
    if None in prompts:
        return None
    different = list(dict.fromkeys(prompts))
    numbers = {prompt: number for number, prompt in enumerate(different)}
    return [numbers[prompt] for prompt in prompts]
