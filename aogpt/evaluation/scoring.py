"""Generated samples: the files that they are read from, what a judge and the measures say of each,
and of a whole set.

To add a measure of a sample's token ids: a function in `text_measures`, a name in `MEASURES`, a row
in `COLUMNS` of eval_gen.py. One that needs the text or the whole set: `score_samples`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from ..data.loader import evaluation_split, find_dataset, load_meta, read_tokens, spread
from ..data.tokenizers import FILES, TOKENIZERS, get_tokenizer
from ..runtime.errors import UserError
from ..runtime.files import read_lines
from ..runtime.processes import Processes
from ..runtime.validation import Amount, from_json, schema
from . import text_measures
from .judges import Judge
from .mauve_score import mauve_score
from .text_measures import jensen_shannon, ngrams

NGRAMS = (1, 2, 3)
CHUNK = 256
MOST_CHUNKS = 2**13
ADVICE = 'give an object with "text", as sample.py --jsonl writes, or {"text": TEXT}'


@schema
class Sample(TypedDict):
    text: str
    tokens: NotRequired[list[int]]
    step: NotRequired[list[int]]
    nfe: NotRequired[int]
    settings: NotRequired[dict[str, Any]]
    seconds: NotRequired[Amount | None]


@dataclass(frozen=True)
class SampleSet:
    """Samples that were made in the same way."""

    name: str  # the run that made them, or else the file that they were read from
    samples: list[Sample]
    settings: dict  # how they were made; empty if unknown
    seconds: float | None  # that it took, if known
    tokenizer: str | None  # of `tokens`; None where there is only text


def read_sample_sets(path: Path) -> list[SampleSet]:
    """The samples of a file, a set for all of equal settings."""
    groups: dict[str, list[Sample]] = {}
    for place, line in read_lines(path, "--samples"):
        sample = from_json(line, Sample, place, ADVICE)
        groups.setdefault(
            json.dumps(sample.get("settings"), sort_keys=True), []
        ).append(sample)
    if not groups:
        raise UserError(f"--samples {path}: there is no sample in it")
    sets = []
    for samples in groups.values():
        settings = samples[0].get("settings", {}) | {"file": str(path)}
        name = str(settings.get("run", path))
        # Each sample has the seconds up to then.
        seconds = max((s.get("seconds") or 0.0 for s in samples), default=0.0) or None
        sets.append(SampleSet(name, samples, settings, seconds, _tokenizer_of(samples)))
    return sets


def _tokenizer_of(samples: list[Sample]) -> str | None:
    """The tokenizer that makes the samples' text from their tokens; None if none does."""

    def fits(name: str, sample: Sample) -> bool:
        decoder = get_tokenizer(name)
        tokens = sample["tokens"]
        known = all(0 <= token < decoder.vocab_size for token in tokens)
        return known and decoder.decode(tokens) == sample["text"]

    if not all("tokens" in sample for sample in samples):
        return None
    # gpt2 last, which may read its files from the network.
    return next(
        (n for n in reversed(TOKENIZERS) if all(fits(n, s) for s in samples)), None
    )


class Reference:
    """Held-out text, to whose n-grams those of samples are compared (arXiv 2606.08417): chunks
    spread over the split; every other one tells how near text itself comes."""

    def __init__(self, name: str):
        folder = find_dataset(name)
        meta = load_meta(folder)
        self.tokenizer = meta["tokenizer"]
        tokenizer = get_tokenizer(self.tokenizer, folder=folder)
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self.tokens = tokens = read_tokens(folder, evaluation_split(meta))
        whole = tokens[: tokens.size // CHUNK * CHUNK].reshape(-1, CHUNK)
        chunks = whole[spread(MOST_CHUNKS, len(whole))].tolist()
        self.other = chunks[1::2]
        self.counts = {n: ngrams(chunks[::2], n) for n in NGRAMS}

    def divergences(self, samples: SampleSet) -> dict[str, float]:
        """js_N: the Jensen-Shannon divergence of the samples' N-grams from those of the text, nats;
        js_N_text: that of about as much other text, below which no samples need to come."""
        found = self._tokens_of(samples)
        count = -(-sum(map(len, found)) // CHUNK)
        text = [self.other[n] for n in spread(count, len(self.other))]
        row = {}
        for n, counts in self.counts.items():
            row[f"js_{n}"] = jensen_shannon(ngrams(found, n), counts)
            row[f"js_{n}_text"] = jensen_shannon(ngrams(text, n), counts)
        return row

    def _tokens_of(self, samples: SampleSet) -> list[list[int]]:
        own = samples.tokenizer == self.tokenizer
        return [s["tokens"] if own else self.encode(s["text"]) for s in samples.samples]

    def passages(self, samples: SampleSet) -> list[str]:
        """Twice as many passages of the text as there are samples, or what there is, as long
        as samples on average, spread over the split."""
        lengths = [len(tokens) for tokens in self._tokens_of(samples)]
        length = max(1, round(sum(lengths) / len(lengths)))
        places = spread(2 * len(lengths), len(self.tokens) // length)
        return [self.decode(self.tokens[n * length : (n + 1) * length]) for n in places]


def mauve_scores(
    samples: SampleSet,
    judged: list[list[int]],
    reference: Reference,
    judge: Judge,
    batch_size: int,
    procs: Processes,
) -> dict[str, float]:
    """mauve: of the samples and passages of the reference, by the judge's features;
    mauve_text: of other passages and these, above which samples need not come. judged: this
    process's share of the samples, in the judge's ids."""
    passages = reference.passages(samples)
    share = procs.share(len(passages))
    read = [judge.encode(text) for text in passages[share.start : share.stop]]
    of_samples = sum(procs.gather(judge.features(judged, batch_size)), [])
    of_text = np.array(sum(procs.gather(judge.features(read, batch_size)), []))
    if not procs.main:
        return {}
    return {
        "mauve": mauve_score(of_text[::2], np.array(of_samples)),
        "mauve_text": mauve_score(of_text[::2], of_text[1::2]),
    }


def score_samples(
    samples: SampleSet,
    judge: Judge,
    batch_size: int,
    procs: Processes,
    reference: Reference | None = None,
    mauve: bool = False,
) -> dict:
    """The scores of a set: over all samples, and of each in `per_sample`; every process scores its
    share. batch_size: as in `Judge.score`. mauve: also compare them with the reference so."""
    how = "text"
    if samples.tokenizer is not None:
        same = samples.tokenizer not in FILES and judge.has_ids_of(samples.tokenizer)
        how = "ids" if same else "retokenised"
    share = procs.share(len(samples.samples))
    own = samples.samples[share.start : share.stop]
    judged = [s["tokens"] if how == "ids" else judge.encode(s["text"]) for s in own]
    scores = judge.score(judged, batch_size, quiet=not procs.main)
    results = []
    measured_tokens = []
    for sample, ids, (nll, count) in zip(own, judged, scores, strict=True):
        # Measures are of the sample's own tokens, or else of the judge's.
        tokens = ids if how == "text" else sample["tokens"]
        measured_tokens.append(tokens)
        perplexity = text_measures.exp(nll / count) if count else math.nan
        result = {"nll": nll, "scored_tokens": count, "perplexity": perplexity}
        result |= {
            "tokens": len(tokens),
            "given_tokens": sample.get("step", []).count(-1),
        }
        measured = {name: measure(tokens) for name, measure in MEASURES.items()}
        results.append(result | measured | {"nfe": sample.get("nfe", math.nan)})
    results = sum(procs.gather(results), [])
    measured_tokens = sum(procs.gather(measured_tokens), [])
    for result, bleu in zip(
        results, text_measures.self_bleu(measured_tokens), strict=True
    ):
        result["self_bleu"] = bleu

    row = {"run": samples.name, "tokens_judged": how} | summary(results)
    row["distinct_samples"] = len(set(map(tuple, measured_tokens)))
    row |= reference.divergences(samples) if reference and procs.main else {}
    if reference and mauve:
        row |= mauve_scores(samples, judged, reference, judge, batch_size, procs)
    row |= {
        "seconds": samples.seconds,
        "tokenizer": samples.tokenizer,
        "sampler": samples.settings,
    }
    return row | {"per_sample": results}


# Numbers of one sample's tokens, without a judge, whose means over samples `summary` takes.
MEASURES = {
    "entropy": text_measures.unigram_entropy,
    "distinct_1": lambda tokens: text_measures.distinct(tokens, 1),
    "distinct_2": lambda tokens: text_measures.distinct(tokens, 2),
    "distinct_3": lambda tokens: text_measures.distinct(tokens, 3),
    "repetition_4": lambda tokens: 1 - text_measures.distinct(tokens, 4),
}


def summary(results: list[dict]) -> dict:
    """Over all samples: corpus perplexity, and means with standard errors."""
    columns = {name: [result[name] for result in results] for name in results[0]}
    scored = columns["scored_tokens"]
    row = {
        "samples": len(results),
        "tokens": sum(columns["tokens"]),
        "given_tokens": sum(columns["given_tokens"]),
        "scored_tokens": sum(scored),
        "unscored_samples": scored.count(0),
        **text_measures.corpus_perplexity(columns["nll"], scored),
        "mean_sample_perplexity": text_measures.mean_and_error(columns["perplexity"])[
            0
        ],
    }
    for name in (*MEASURES, "self_bleu", "nfe"):
        row[name], row[f"{name}_standard_error"] = text_measures.mean_and_error(
            columns[name]
        )
    return row
