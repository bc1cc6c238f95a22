"""Token files as prepare.py writes them, and the two ways documents are packed into them.

full   every document, end-of-text after it, end to end: nothing is dropped
sedd   what the published zero-shot perplexities are measured on (the SEDD protocol): the rows are cut into 8
       contiguous shards, each shard into groups of 1,000 rows; each group is concatenated and cut into blocks, and
       what is left of it fills none and is dropped. So a file holds blocks of one size, and nothing else.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PROTOCOLS = ("sedd", "full")
SHARDS = 8
GROUP_ROWS = 1000
COPY_BYTES = 4 << 20


def describe(block_size: int | None) -> str:
    """The packing in words, for meta.json; `block_size` None is the protocol full."""
    if block_size is None:
        return "documents end to end, nothing dropped"
    return f"{SHARDS} shards of rows, groups of {GROUP_ROWS} rows, blocks of {block_size}, remainders of groups dropped"


def groups(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, after the last) of the rows that are concatenated and cut by themselves under `sedd`.

    Shard sizes differ by at most one, larger ones first; the groups of a shard are full, except its last.
    """
    size, larger = divmod(rows, SHARDS)
    start = 0
    for shard in range(SHARDS):
        stop = start + size + (shard < larger)
        for first in range(start, stop, GROUP_ROWS):
            yield first, min(first + GROUP_ROWS, stop)
        start = stop


def kept(ends: np.ndarray, block_size: int) -> Iterator[tuple[int, int]]:
    """Token ranges that `sedd` keeps of rows laid end to end; `ends` (rows,) holds the place after each row."""
    for first, stop in groups(len(ends)):
        start = int(ends[first - 1]) if first else 0
        yield start, start + (int(ends[stop - 1]) - start) // block_size * block_size


def compact(path: Path, ranges: Iterable[tuple[int, int]]) -> tuple[int, str]:
    """Leaves only the given byte ranges (ascending) of a file, in place; returns its new size and sha256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "r+b") as file:
        for start, stop in ranges:
            while start < stop:
                file.seek(start)
                chunk = file.read(min(COPY_BYTES, stop - start))
                file.seek(size)
                file.write(chunk)
                digest.update(chunk)
                start, size = start + len(chunk), size + len(chunk)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


class SplitFile:
    """The token file of a split as it is written: end to end, and packed under `sedd` when it is complete.

    `block_size` None is the protocol full. Under sedd the ends of the rows wait in a file beside it: where the shards
    begin depends on how many rows there are.
    """

    def __init__(self, path: Path, block_size: int | None = None):
        self.path, self.block_size, self.tokens, self.documents = path, block_size, 0, 0
        self._itemsize = 1
        self._hash = hashlib.sha256()
        self._file = open(path, "wb")
        self._ends_path = path.with_suffix(".ends")
        self._ends = open(self._ends_path, "wb") if block_size is not None else None

    def write(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Appends `ids` (n,); `ends` holds the places in it after which a document is complete."""
        self._file.write(ids.data)
        if self._ends is None:
            self._hash.update(ids.data)
        else:
            self._ends.write((ends.astype(np.uint64) + np.uint64(self.tokens)).data)
        self.tokens += ids.size
        self.documents += ends.size
        self._itemsize = ids.itemsize

    def close(self) -> None:
        for file in (self._file, self._ends):
            if file is not None and not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def entry(self) -> dict:
        """Completes the file and describes it for meta.json. Raises ValueError where sedd leaves no block."""
        self.close()
        tokens, sha256 = self.tokens, self._hash.hexdigest()
        if self._ends is not None:
            tokens, sha256 = self._pack()
        return {
            "file": self.path.name,
            "tokens": tokens,
            "documents": self.documents,
            "dropped_tokens": self.tokens - tokens,
            "sha256": sha256,
        }

    def _pack(self) -> tuple[int, str]:
        ends = np.memmap(self._ends_path, dtype=np.uint64, mode="r")
        ranges = (
            (start * self._itemsize, stop * self._itemsize)
            for start, stop in kept(ends, self.block_size)
        )
        size, sha256 = compact(self.path, ranges)
        del ends
        self._ends_path.unlink()
        if not size:
            raise ValueError(
                f"the {self.path.stem} split has {self.tokens:,} tokens in {self.documents:,} rows, and no group of "
                f"{GROUP_ROWS:,} rows in a shard (an eighth of the rows) fills a block of {self.block_size:,}: "
                "lower --block-size, or use --protocol full"
            )
        return size // self._itemsize, sha256
