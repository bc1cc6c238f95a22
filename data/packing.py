"""Token files as prepare.py writes them, and the ways documents are packed into them.

full   every document, end-of-text after it, end to end: nothing is dropped
sedd   what the published zero-shot perplexities are measured on (the SEDD protocol): the rows are
       cut into 8 contiguous shards, each shard into groups of 1,000 rows; each group is
       concatenated and cut into blocks, and what is left of it fills none and is dropped. So a file
       holds blocks of one size, and nothing else.
records  every document in a block of its own, and a second file that says of every token whether
       it is given, predicted or absent (data/records.py)
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from runtime.errors import UserError

SHARDS = 8
GROUP_ROWS = 1000
COPY_BYTES = 4 << 20


def in_words(protocol: str, block_size: int | None) -> str:
    """The packing in words, for meta.json."""
    if protocol == "full":
        return "documents end to end, nothing dropped"
    if protocol == "records":
        return f"a record in each block of {block_size}, with the roles of its tokens"
    return (
        f"{SHARDS} shards of rows, groups of {GROUP_ROWS} rows, blocks of {block_size}, "
        "remainders of groups dropped"
    )


def groups(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, after the last) of the rows that are concatenated and cut by themselves under
    `sedd`.

    Shard sizes differ by at most one, larger ones first; the groups of a shard are full, except its
    last.
    """
    size, larger = divmod(rows, SHARDS)
    start = 0
    for shard in range(SHARDS):
        stop = start + size + (shard < larger)
        for first in range(start, stop, GROUP_ROWS):
            yield first, min(first + GROUP_ROWS, stop)
        start = stop


def kept_ranges(ends: np.ndarray, block_size: int) -> Iterator[tuple[int, int]]:
    """Token ranges that `sedd` keeps of rows laid end to end; `ends` (rows,) holds the place after
    each row."""
    for first, stop in groups(len(ends)):
        start = int(ends[first - 1]) if first else 0
        tokens = int(ends[stop - 1]) - start
        yield start, start + tokens // block_size * block_size


def keep_only(path: Path, ranges: Iterable[tuple[int, int]]) -> tuple[int, str]:
    """Leave only the given byte ranges (ascending) of a file, in place, however large it is.

    Returns its new size and sha256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "r+b") as file:
        for start, stop in ranges:
            while start < stop:
                file.seek(start)
                chunk = file.read(min(COPY_BYTES, stop - start))
                file.seek(size)  # never beyond `start`: what is still to be read stays whole
                file.write(chunk)
                digest.update(chunk)
                start, size = start + len(chunk), size + len(chunk)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


class SplitFile:
    """The token file of a split as it is written: end to end, and packed under `sedd` when it is
    complete.

    `block_size` is that of sedd, and None otherwise. Under sedd the ends of the rows wait in a file
    beside it: where the shards begin depends on how many rows there are. Roles, where tokens have
    them, go to a file of their own.
    """

    def __init__(self, path: Path, dtype: np.dtype, block_size: int | None = None):
        self.path, self.dtype, self.block_size = path, dtype, block_size
        self.tokens = self.documents = 0
        self._hash = hashlib.sha256()
        self._file = open(path, "wb")
        self._roles: SplitFile | None = None
        self._ends_path = path.with_suffix(".ends")
        self._ends = None if block_size is None else open(self._ends_path, "wb")

    def write(self, ids: np.ndarray, ends: np.ndarray, roles: np.ndarray | None = None) -> None:
        """Append `ids` (n,); `ends` holds the places in it after which a document is complete,
        `roles` (n,), uint8, the roles of records."""
        if roles is not None:
            if self._roles is None:
                self._roles = SplitFile(self.path.with_suffix(".roles.bin"), roles.dtype)
            self._roles.write(roles, ends)
        self._file.write(ids.data)
        if self._ends is None:
            self._hash.update(ids.data)
        else:
            self._ends.write((ends.astype(np.uint64) + np.uint64(self.tokens)).data)
        self.tokens += ids.size
        self.documents += ends.size

    def close(self) -> dict:
        """Complete the file and describe it for meta.json.

        Raises ValueError where sedd leaves no block."""
        for file in (self._file, self._ends):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        if self._ends is None:
            tokens, sha256 = self.tokens, self._hash.hexdigest()
        else:
            tokens, sha256 = self._pack()
        entry = {
            "file": self.path.name,
            "tokens": tokens,
            "documents": self.documents,
            "dropped_tokens": self.tokens - tokens,
            "sha256": sha256,
        }
        if self._roles is not None:
            roles = self._roles.close()
            entry["roles"] = {key: roles[key] for key in ("file", "sha256")}
        return entry

    def _pack(self) -> tuple[int, str]:
        """Drop what fills no block; returns the number of tokens left and the file's sha256."""
        itemsize = self.dtype.itemsize
        ends = np.memmap(self._ends_path, dtype=np.uint64, mode="r")  # as many as there are rows
        ranges = kept_ranges(ends, self.block_size)
        size, sha256 = keep_only(self.path, ((a * itemsize, b * itemsize) for a, b in ranges))
        del ends
        self._ends_path.unlink()
        if size == 0:
            raise UserError(
                f"the {self.path.stem} split has {self.tokens:,} tokens in {self.documents:,} "
                f"rows, and no group of {GROUP_ROWS:,} rows in a shard (an eighth of the rows) "
                f"fills a block of {self.block_size:,}: lower --block-size, "
                "or use --protocol full"
            )
        return size // itemsize, sha256
