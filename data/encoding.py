"""Tokenising on all cores, in order, with a bounded number of batches under way."""

import collections
import itertools
import os
import signal
from collections.abc import Iterable, Iterator

import numpy as np

from data.detokenisers import DETOKENISERS
from data.loader import DTYPES, dtype_name
from data.tokenizers import get_tokenizer

BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 8192
WINDOW = 3  # batches per worker that may wait: enough to keep all workers busy, few enough to bound memory

RoutedPiece = tuple[str, str, bool]  # split, text, whether the document ends here
Encoded = dict[
    str, tuple[np.ndarray, np.ndarray]
]  # per split: ids, places in them after which a document is complete


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


def encode_batch(tokenizer_name: str, detokeniser: str | None, batch: list[RoutedPiece]) -> Encoded:
    """Per split of the batch: the ids, in the dtype of the file, with end-of-text after every document, and the
    places after which documents end. A `detokeniser` is for pieces that are whole documents."""
    tokenizer = get_tokenizer(tokenizer_name)
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    eot = np.array([tokenizer.eot], dtype=dtype)
    arrays: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    sizes: collections.Counter[str] = collections.Counter()
    ends: dict[str, list[int]] = collections.defaultdict(list)
    for split, text, end in batch:
        text = DETOKENISERS[detokeniser](text) if detokeniser else text
        ids = tokenizer.encode_array(text).astype(dtype, copy=False)
        arrays[split].append(ids)
        sizes[split] += ids.size
        if end:
            arrays[split].append(eot)
            sizes[split] += 1
            ends[split].append(sizes[split])
    return {
        split: (np.concatenate(parts), np.array(ends[split], np.int64))
        for split, parts in arrays.items()
    }


def encode_all(
    todo: Iterator[list[RoutedPiece]], tokenizer_name: str, detokeniser: str | None, workers: int
) -> Iterator[Encoded]:
    """`encode_batch` of every batch, in order, on `workers` processes."""
    head = list(itertools.islice(todo, 2 * workers))
    if (
        workers == 1 or len(head) < 2 * workers
    ):  # little text is done before the workers would have started
        for batch in itertools.chain(head, todo):
            yield encode_batch(tokenizer_name, detokeniser, batch)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # spawn: a forked child would inherit the locks of whatever threads pyarrow has running
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        pending, started = collections.deque(), False
        for batch in itertools.chain(head, todo):
            if (
                not started
            ):  # workers inherit the mask: no Ctrl-C strikes one that is still importing
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            pending.append(pool.submit(encode_batch, tokenizer_name, detokeniser, batch))
            if not started:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            started = True
            if len(pending) >= WINDOW * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a tokenising process was killed, for lack of memory perhaps; try again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    import threading

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes: the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent dies: a parent that is killed outright cannot, and the worker would wait on."""
    from multiprocessing import connection, parent_process

    connection.wait([parent_process().sentinel])
    os._exit(1)
