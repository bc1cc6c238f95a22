"""Tokenising on all cores, in order, with a bounded number of batches under way.

On threads, not processes: tiktoken lets go of Python's lock while it encodes, which is 96% of the
work for documents of some thousand characters. Threads start at once and share the tokenizer, and
an interrupt has one process to end.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from data.loader import DTYPES, dtype_name
from data.records import encode_record
from data.splits import RoutedPiece
from data.tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 8192
WINDOW = 3  # batches a worker that may wait: enough to keep all busy, few enough to bound memory


class Encoded(NamedTuple):
    """Some tokens of a split."""

    ids: np.ndarray
    ends: np.ndarray
    """The places in them after which a document is complete."""
    roles: np.ndarray | None = None
    """Of records: of every token, see data/records.py."""


# from the pieces of a batch to what they add to each split
Encode = Callable[[list[RoutedPiece]], dict[str, Encoded]]


def batches(pieces: Iterable[RoutedPiece]) -> Iterator[list[RoutedPiece]]:
    """The pieces in lists of about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_batch(
    tokenizer: Tokenizer, detokenise: Callable[[str], str] | None, batch: list[RoutedPiece]
) -> dict[str, Encoded]:
    """Per split of the batch: the ids, in the dtype of the file, with end-of-text after every
    document, and where documents end. `detokenise` is for pieces that are whole documents."""
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    eot = np.array([tokenizer.eot], dtype=dtype)
    arrays: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    ends: dict[str, list[int]] = collections.defaultdict(list)
    sizes: collections.Counter[str] = collections.Counter()
    for split, text, end in batch:
        ids = tokenizer.encode_array(detokenise(text) if detokenise else text)
        arrays[split].append(ids.astype(dtype, copy=False))
        sizes[split] += ids.size
        if end:
            arrays[split].append(eot)
            sizes[split] += 1
            ends[split].append(sizes[split])
    return {
        split: Encoded(np.concatenate(parts), np.array(ends[split], np.int64))
        for split, parts in arrays.items()
    }


def encode_records(
    tokenizer: Tokenizer, block_size: int, end: bool, batch: list[RoutedPiece]
) -> dict[str, Encoded]:
    """As `encode_batch`, but every piece is a record, which takes a block of its own. end: see
    `data.records.encode_record`."""
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    records: dict[str, list] = collections.defaultdict(list)
    for split, record, _ in batch:
        records[split].append(encode_record(record, tokenizer, block_size, end))
    result = {}
    for split, pairs in records.items():
        ids, roles = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        ends = np.arange(1, len(pairs) + 1) * block_size
        result[split] = Encoded(ids.astype(dtype), ends, roles)
    return result


def encode_all(
    pieces: Iterable[RoutedPiece], encode: Encode, workers: int
) -> Iterator[dict[str, Encoded]]:
    """What `encode` makes of all pieces, in order, on `workers` threads. Close the iterator to end
    them early."""
    if workers == 1:
        yield from map(encode, batches(pieces))
        return
    pool = ThreadPoolExecutor(workers)
    pending: collections.deque[Future[dict[str, Encoded]]] = collections.deque()
    try:
        for batch in batches(pieces):
            pending.append(pool.submit(encode, batch))
            if len(pending) >= WINDOW * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
