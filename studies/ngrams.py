"""The divergence of the n-grams of samples from those of held-out text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from aogpt.data.loader import (
    evaluation_split,
    find_dataset,
    load_meta,
    read_tokens,
    spread,
)

CHUNK = 256  # tokens
MOST_CHUNKS = 2**13


def ngrams(samples: Iterable[Sequence[int]], n: int) -> Counter:
    """Count how often each n-gram occurs within samples."""
    counts: Counter = Counter()
    for tokens in samples:
        shifted = [tokens[start:] for start in range(n)]
        counts.update(zip(*shifted, strict=False))
    return counts


def jensen_shannon(one: Counter, other: Counter) -> float | None:
    """Return the Jensen-Shannon divergence of two distributions of counts in nats, 0 to
    log 2; None if one is empty."""
    one_total = one.total()
    other_total = other.total()
    if one_total == 0 or other_total == 0:
        return None
    divergence = 0.0
    for key in one.keys() | other.keys():
        p = one[key] / one_total
        q = other[key] / other_total
        if p > 0:
            divergence += p * math.log(2 * p / (p + q)) / 2
        if q > 0:
            divergence += q * math.log(2 * q / (p + q)) / 2
    return divergence


def divergences(
    samples: Sequence[Sequence[int]], dataset: str
) -> dict[str, float | None]:
    """Return js_2, the divergence of the samples' 2-grams from those of the held-out
    text of a dataset with the same tokenizer, in nats; and js_2_text, that of about as
    much other text from there, below which no samples need to come.

    Chunks of 256 tokens are spread over the split: every other one is compared with,
    the rest is the other text."""
    folder = find_dataset(dataset)
    tokens = read_tokens(folder, evaluation_split(load_meta(folder)))
    count = tokens.size // CHUNK
    chunks = tokens[: count * CHUNK].reshape(-1, CHUNK)
    chunks = chunks[spread(MOST_CHUNKS, count)].tolist()
    text = ngrams(chunks[::2], 2)
    rest = chunks[1::2]
    total = sum(len(sample) for sample in samples)
    as_many = spread(-(-total // CHUNK), len(rest))  # rounded up
    return {
        "js_2": jensen_shannon(ngrams(samples, 2), text),
        "js_2_text": jensen_shannon(ngrams([rest[n] for n in as_many], 2), text),
    }
