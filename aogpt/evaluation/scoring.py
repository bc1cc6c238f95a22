"""Generated samples: reading them from files, and scoring each one and a whole set by a
judge and by measures.

To add a measure of a sample's token ids: a function and a row of `MEASURES` in
text_measures.py. One that needs the text or the whole set: `score_samples`."""

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
    """A sample to score, as sample.py --jsonl writes it."""

    text: str
    tokens: NotRequired[list[int]]
    step: NotRequired[list[int]]
    nfe: NotRequired[int]
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
    for place, line in read_lines(path, "--samples"):
        sample = from_json(line, Sample, place, ADVICE)
        key = json.dumps(sample.get("settings"), sort_keys=True)
        group = groups.setdefault(key, [])
        group.append(sample)
    if not groups:
        raise UserError(f"--samples {path}: there is no sample in it")
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
        if all(_fits(name, sample) for sample in samples):
            return name
    return None


def _fits(tokenizer: str, sample: Sample) -> bool:
    """Return whether a tokenizer makes the sample's text from its tokens; not one whose
    vocabulary is not at hand."""
    try:
        decoder = get_tokenizer(tokenizer)
    except UserError:
        return False
    tokens = sample["tokens"]
    if not all(0 <= token < decoder.vocab_size for token in tokens):
        return False
    return decoder.decode(tokens) == sample["text"]


class Reference:
    """The n-grams of held-out text, with which those of samples are compared (arXiv
    2606.08417), from chunks spread over the split. Every other chunk shows how near
    text itself comes."""

    def __init__(self, name: str):
        folder = find_dataset(name)
        meta = load_meta(folder)
        self.tokenizer = meta["tokenizer"]
        tokenizer = get_tokenizer(self.tokenizer, folder=folder)
        self.encode = tokenizer.encode_documents
        self.decode = tokenizer.decode
        split = evaluation_split(meta)
        if "roles" in meta["splits"][split]:
            raise UserError(
                f"--reference {name} holds examples, padded to one length, of which "
                "the n-grams are no language: give a data set of texts"
            )
        self.tokens = read_tokens(folder, split)
        number_of_chunks = self.tokens.size // CHUNK
        if number_of_chunks < 2:
            raise UserError(
                f"--reference {name} has {self.tokens.size} tokens to compare with; it "
                f"needs {2 * CHUNK}"
            )
        chunked = self.tokens[: number_of_chunks * CHUNK]
        chunks = chunked.reshape(-1, CHUNK)
        places = spread(MOST_CHUNKS, number_of_chunks)
        chunks = chunks[places].tolist()
        self.other = chunks[1::2]
        self.counts = {n: ngrams(chunks[::2], n) for n in NGRAMS}

    def divergences(self, samples: SampleSet) -> dict[str, float]:
        """Return js_N: the Jensen-Shannon divergence of the samples' N-grams from those
        of the text, nats; js_N_text: that of about as much other text, below which no
        samples need to come, or of all that is read; js_tokens and js_text_tokens: the
        tokens of both."""
        sequences = self._tokens_of(samples)
        total = sum(len(tokens) for tokens in sequences)
        count = -(-total // CHUNK)  # rounded up
        places = spread(count, len(self.other))
        text = [self.other[place] for place in places]
        row: dict[str, float] = {
            "js_tokens": total,
            "js_text_tokens": CHUNK * len(text),
        }
        for n, counts in self.counts.items():
            of_samples = ngrams(sequences, n)
            of_text = ngrams(text, n)
            row[f"js_{n}"] = jensen_shannon(of_samples, counts)
            row[f"js_{n}_text"] = jensen_shannon(of_text, counts)
        return row

    def _tokens_of(self, samples: SampleSet) -> list[list[int]]:
        """Return the samples as tokens of the reference's tokenizer. In text
        "<|endoftext|>" is its end-of-text."""
        # Two files of one name may hold two vocabularies.
        is_known = self.tokenizer not in FILES
        if is_known and samples.tokenizer == self.tokenizer:
            return [sample["tokens"] for sample in samples.samples]
        return [self.encode(sample["text"]).tolist() for sample in samples.samples]

    def passages(self, samples: SampleSet) -> list[str]:
        """Return passages of the text, two for each sample or all that there are, as
        long as samples on average, spread over the split."""
        lengths = [len(tokens) for tokens in self._tokens_of(samples)]
        mean = sum(lengths) / len(lengths)
        length = max(1, round(mean))
        places = spread(2 * len(lengths), len(self.tokens) // length)
        texts = []
        for place in places:
            start = place * length
            texts.append(self.decode(self.tokens[start : start + length]))
        return texts


def mauve_scores(
    samples: SampleSet,
    judged: list[list[int]],
    reference: Reference,
    judge: Judge,
    batch_size: int,
    procs: Processes,
) -> dict[str, float]:
    """Return two numbers by the judge's features. mauve: of the samples and passages of
    the reference; mauve_text: of other passages and these, an upper limit for as
    many samples, and mauve_text_passages, the number of either. judged: this process's
    share of the samples, in the judge's ids."""
    passages = reference.passages(samples)
    share = procs.share(len(passages))
    own = passages[share.start : share.stop]
    own_tokens = [judge.encode(text) for text in own]
    sample_features = judge.features(judged, batch_size)
    sample_features = np.array(_joined(procs.gather(sample_features)))
    text_features = judge.features(own_tokens, batch_size)
    text_features = np.array(_joined(procs.gather(text_features)))
    if not procs.main:
        return {}
    compared = text_features[::2]
    return {
        "mauve": mauve_score(compared, sample_features),
        "mauve_text": mauve_score(compared, text_features[1::2]),
        "mauve_text_passages": len(text_features) // 2,
    }


def score_samples(
    samples: SampleSet,
    judge: Judge,
    batch_size: int,
    procs: Processes,
    reference: Reference | None = None,
    mauve: bool = False,
) -> dict:
    """Return the scores of a set: over all samples, and of each in `per_sample`; every
    process scores its share. batch_size: as in `Judge.score`. mauve: also compare the
    samples with the reference by MAUVE."""
    judged_as = _judged_as(samples, judge)
    share = procs.share(len(samples.samples))
    own = samples.samples[share.start : share.stop]
    if judged_as == "ids":
        judged = [sample["tokens"] for sample in own]
    else:
        judged = [judge.encode(sample["text"]) for sample in own]
    scores = judge.score(judged, batch_size, quiet=not procs.main)
    # Measures are of the sample's own tokens, or else of the judge's.
    if judged_as == "text":
        measured = judged
    else:
        measured = [sample["tokens"] for sample in own]
    results = []
    for sample, tokens, score in zip(own, measured, scores, strict=True):
        nll, count = score
        result = _result(sample, tokens, nll, count)
        results.append(result)

    results = _joined(procs.gather(results))
    measured = _joined(procs.gather(measured))
    self_bleu = text_measures.self_bleu(measured)
    for result, bleu in zip(results, self_bleu, strict=True):
        result["self_bleu"] = None if math.isnan(bleu) else bleu
    distinct_samples = {tuple(tokens) for tokens in measured}
    divergences = {}
    if reference is not None and procs.main:
        divergences = reference.divergences(samples)
    mauve_row = {}
    if reference is not None and mauve:
        mauve_row = mauve_scores(
            samples, judged, reference, judge, batch_size=batch_size, procs=procs
        )
    of_all = summary(results)
    if len(results) > 1 and len(distinct_samples) == 1:
        # One sample, drawn several times, shows no error.
        for key in ("standard_error", "perplexity_low", "perplexity_high"):
            of_all[key] = math.nan
    return {
        "run": samples.name,
        "tokens_judged": judged_as,
        **of_all,
        "distinct_samples": len(distinct_samples),
        **divergences,
        **mauve_row,
        "seconds": samples.seconds,
        "tokenizer": samples.tokenizer,
        "sampler": samples.settings,
        "per_sample": results,
    }


def _judged_as(samples: SampleSet, judge: Judge) -> str:
    """Return the form in which the judge reads the samples: "ids", "retokenised" (as
    text, as their tokens are of another tokenizer) or "text" (they have no tokens)."""
    if samples.tokenizer is None:
        return "text"
    if samples.tokenizer not in FILES and judge.has_ids_of(samples.tokenizer):
        return "ids"
    return "retokenised"


def _result(
    sample: Sample,
    tokens: list[int],
    nll: float,
    count: int,
) -> dict:
    """Return the results of one sample: the nats of its `count` scored tokens, and the
    measures of its tokens."""
    perplexity = None
    if count:
        perplexity = text_measures.exp(nll / count)
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
    return result


def _joined(parts: list[list]) -> list:
    """Return the lists of all processes as one."""
    return [item for part in parts for item in part]


def summary(results: list[dict]) -> dict:
    """Return numbers of all samples: corpus perplexity, and means with standard
    errors."""
    columns = {}
    for name in results[0]:
        columns[name] = [result[name] for result in results]
    scored = columns["scored_tokens"]
    perplexity, _ = text_measures.mean_and_error(columns["perplexity"])
    row = {
        "samples": len(results),
        "tokens": sum(columns["tokens"]),
        "given_tokens": sum(columns["given_tokens"]),
        "scored_tokens": sum(scored),
        "unscored_samples": scored.count(0),
        **text_measures.corpus_perplexity(columns["nll"], scored),
        "mean_sample_perplexity": perplexity,
    }
    for name in (*text_measures.MEASURES, "self_bleu", "nfe"):
        mean, error = text_measures.mean_and_error(columns[name])
        row[name] = mean
        row[f"{name}_standard_error"] = error
    return row
