"""From documents to token files: which split they go into, their tokens, and how these are packed.

full     every document, end-of-text after it, end to end: nothing is dropped
sedd     as the published zero-shot perplexities: 8 contiguous shards of the rows, in groups of
         1,000 rows; each group is concatenated and divided into blocks, its rest dropped
records  every example in a block of its own, and its prompt mask in a second file (prompts.py),
         unless all of every example is predicted"""

import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ..runtime.errors import UserError
from ..runtime.files import sha256_file
from ..runtime.randomness import SPLIT, philox_bits
from .detokenisers import detokenise
from .loader import token_dtype
from .sources import Corpus
from .tokenizers import Tokenizer

# of sedd
SHARDS = 8
GROUP_ROWS = 1000
BATCH = 1 << 24  # characters that are encoded at once, on several threads
Encoded = tuple[
    np.ndarray, np.ndarray | None
]  # tokens (n,), and the roles of those of an example


def route(
    corpora: dict[str, Corpus],
    fraction: float | None,
    limit: int | None,
    whole: bool = False,
) -> Iterator[tuple[str, str]]:
    """(split, document) of every document, in reading order. fraction: share of the "train"
    documents that becomes "val". limit: of documents of the first split. whole: never split one."""
    for number, (split, corpus) in enumerate(corpora.items()):
        documents = islice(corpus.documents, None if number else limit)
        if split == "train" and fraction is not None:
            yield from _train_and_val(documents, fraction, whole)
        else:
            yield from ((split, text) for text in documents)


def _train_and_val(
    documents: Iterator[str], fraction: float, whole: bool
) -> Iterator[tuple[str, str]]:
    """One validation document in every group of 1 / fraction in a row, or of all where they are
    fewer. Its place is drawn from the group's number: no split depends on later documents."""
    first_group = list(islice(documents, math.ceil(1 / fraction)))
    if len(first_group) == 1:
        if whole:
            raise UserError(
                "a single record makes no validation split: add records, or --split"
            )
        place = _place_to_split(*first_group, fraction)
        yield "train", first_group[0][:place]
        yield "val", first_group[0][place:]
        return
    size = min(1 / fraction, len(first_group))
    group = -1
    for index, text in enumerate(chain(first_group, documents)):
        if (group + 1) * size <= index:
            group += 1
            first = math.ceil(group * size)
            last = math.ceil((group + 1) * size)
            bits = philox_bits(0, group, range(1), 1, SPLIT)
            chosen = first + int(bits[0, 0]) % (last - first)
        yield "val" if index == chosen else "train", text


def _place_to_split(text: str, fraction: float) -> int:
    """Where the last share of a text begins: at the end of a line, else at a space, within the
    million characters before it."""
    place = len(text) - max(1, round(len(text) * fraction))
    if place < 1:
        raise UserError(f"the only document has {len(text)} characters; add documents")
    before = text[max(0, place - (1 << 20)) : place + 1]
    for space in "\n ":
        if found := [match.end() for match in re.finditer(rf"\S(?={space})", before)]:
            return place + 1 - len(before) + found[-1]
    return place


def encode_documents(
    tokenizer: Tokenizer, rules: str | None, texts: Iterable[str]
) -> Iterator[Encoded]:
    """Ids of documents, with end-of-text after each. rules: of `detokenise`."""
    texts = [detokenise(rules, text) for text in texts] if rules else texts
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken releases Python's lock
        # Bytes take less time than handing them to another thread.
        encode = map if tokenizer.name == "bytes" else pool.map
        for ids in encode(tokenizer.encode_array, texts):
            yield np.append(ids, np.array(tokenizer.eot, ids.dtype)), None


def batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The documents in lists of about BATCH characters."""
    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1]) + 128  # overhead in memory of a document
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


class SplitFile:
    """The token file of a split as it is written."""

    def __init__(self, path: Path, protocol: str, block_size: int | None, dtype: str):
        self.path = path
        self.protocol = protocol
        self.block_size = block_size
        self.dtype = token_dtype(dtype)
        # ends: the place after each document
        self.tokens = 0
        self.ends = array("q")
        self.has_roles = False  # whether a token is not predicted
        self._paths = [path] + [path.with_suffix(".roles.bin")] * (
            protocol == "records"
        )
        self._files = [open(path, "wb") for path in self._paths]

    def write(self, ids: np.ndarray, roles: np.ndarray | None) -> None:
        """Add a document."""
        ids = ids.astype(self.dtype, copy=False)
        for file, values in zip(self._files, (ids, roles), strict=False):
            file.write(values.data)
        self.tokens += ids.size
        self.has_roles |= roles is not None and bool(roles.any())
        self.ends.append(self.tokens)

    def close(self) -> dict:
        """Complete the file; returns its entry for meta.json."""
        for file in self._files:
            file.close()
        if not self.has_roles and self._paths[1:]:  # no prompts, no padding: no mask
            self._paths.pop().unlink()
        if self.protocol == "sedd":
            tokens = np.fromfile(self.path, self.dtype)
            kept = kept_ranges(np.array(self.ends), self.block_size)
            np.concatenate([tokens[start:stop] for start, stop in kept]).tofile(
                self.path
            )
        size = os.path.getsize(self.path) // self.dtype.itemsize
        if size == 0:
            what = f"{self.path.stem} has {self.tokens:,} tokens in {len(self.ends):,} rows"
            few = f"no group of {GROUP_ROWS:,} rows in a shard fills a block of {self.block_size:,}"
            raise UserError(
                f"{what}; {few}: lower --block-size, or use --protocol full"
            )
        facts = [{"file": p.name, "sha256": sha256_file(p)} for p in self._paths]
        counts = {"documents": len(self.ends), "dropped_tokens": self.tokens - size}
        return {"tokens": size, **counts, **facts[0]} | (
            {"roles": facts[1]} if facts[1:] else {}
        )


def kept_ranges(ends: np.ndarray, block_size: int) -> Iterator[tuple[int, int]]:
    """Token ranges that sedd keeps of rows laid end to end; ends (rows,): the place after each."""
    for shard in np.array_split(np.arange(len(ends)), SHARDS):  # larger ones first
        for first in shard[::GROUP_ROWS]:
            start = ends[first - 1] if first else 0
            stop = ends[min(first + GROUP_ROWS - 1, shard[-1])]
            yield int(start), int(stop - (stop - start) % block_size)
