"""From documents to token files: which split they go into, their tokens, and how these are packed.

full     every document, end-of-text after it, end to end: nothing is dropped
sedd     as the published zero-shot perplexities: 8 contiguous shards of the rows, each divided into
         groups of 1,000 rows; each group is concatenated and divided into blocks, its rest dropped.
         What two calls of `map(num_proc=8)` of the package datasets give
records  every example in a block of its own, and its prompt mask in a second file (prompts.py)
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.detokenisers import detokenise
from data.loader import DTYPE
from data.prompts import encode_example
from data.sources import Corpus, Piece, safe_place
from data.tokenizers import Tokenizer
from runtime.errors import UserError
from runtime.files import sha256_file
from runtime.randomness import SPLIT, philox_bits

SHARDS, GROUP_ROWS = 8, 1000  # of sedd
BATCH = 1 << 20  # characters that a thread encodes at once
RoutedPiece = tuple[str, str, bool]  # split, text, whether the document ends here
# Tokens (n,), the places in them after which a document ends, and the roles of examples.
Encoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def route(
    corpora: dict[str, Corpus],
    fraction: float | None,
    seed: int,
    limit: int | None,
    whole: bool = False,
) -> Iterator[RoutedPiece]:
    """Every piece with its split, in reading order.

    fraction: share of the "train" documents that becomes "val"; None: none. limit: on the documents
    of the first split, those of --source. whole: never split a document."""
    for number, (split, corpus) in enumerate(corpora.items()):
        if split == "train" and fraction is not None:
            yield from _train_and_val(corpus, fraction, seed, limit, whole)
        else:
            for text, end in _limited(corpus, limit if number == 0 else None):
                yield split, text, end


def _limited(corpus: Corpus, limit: int | None) -> Iterator[Piece]:
    """The pieces of the first `limit` documents."""
    documents = 0
    for text, end in corpus.pieces():
        yield text, end
        documents += end
        if documents == limit:
            break


def _train_and_val(
    corpus: Corpus, fraction: float, seed: int, limit: int | None, whole: bool
) -> Iterator[RoutedPiece]:
    """One validation document in every group of 1 / fraction in a row, or of all where they are
    fewer. Its place in the group is drawn from (seed, number of the group), so a document's split
    does not depend on later ones."""
    size = 1 / fraction
    enough = math.ceil(size)
    documents = sum(end for _, end in _limited(corpus, min(enough, limit or enough)))
    if documents == 1 and whole:
        raise UserError("a single record makes no validation split: add records, or give --split")
    if documents == 1:
        yield from _split_one_document(corpus, fraction, limit)
        return
    size = min(size, documents)
    group, index = -1, 0  # index: of the document
    for text, end in _limited(corpus, limit):
        if (group + 1) * size <= index:
            group += 1
            first, last = math.ceil(group * size), math.ceil((group + 1) * size)
            bits = philox_bits(seed, group, range(1), 1, SPLIT)
            chosen = first + int(bits[0, 0]) % (last - first)
        yield "val" if index == chosen else "train", text, end
        index += end


def _split_one_document(
    corpus: Corpus, fraction: float, limit: int | None
) -> Iterator[RoutedPiece]:
    """The end of the only document, a share of its characters, is validation; split at a space if
    possible."""
    characters = sum(len(text) for text, _ in _limited(corpus, limit))
    boundary = characters - max(1, round(characters * fraction))
    if boundary < 1:
        raise UserError(f"the only document has {characters} characters; add documents")
    split, start = "train", 0
    for text, end in _limited(corpus, limit):
        if split == "train" and start + len(text) > boundary:
            place = safe_place(text, boundary - start) or boundary - start
            yield "train", text[:place], True
            split, text, start = "val", text[place:], start + place
        yield split, text, end
        start += len(text)


def encode_documents(tokenizer: Tokenizer, rules: str | None, batch: list[Piece]) -> Encoded:
    """Ids with end-of-text after every document. rules: of `detokenise`, for whole documents."""
    arrays, ends, size = [], [], 0
    for text, end in batch:
        ids = tokenizer.encode_array(detokenise(rules, text) if rules else text)
        arrays.append(ids.astype(DTYPE, copy=False))
        size += ids.size + end
        if end:
            arrays.append(np.array([tokenizer.eot], DTYPE))
            ends.append(size)
    return np.concatenate(arrays), np.array(ends, np.int64), None


def encode_examples(
    tokenizer: Tokenizer, block_size: int, end: bool, batch: list[Piece]
) -> Encoded:
    """A block for each piece; end: see `encode_example`."""
    pairs = [encode_example(text, tokenizer, block_size, end) for text, _ in batch]
    ids, roles = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return ids.astype(DTYPE), np.arange(1, len(pairs) + 1) * block_size, roles


def encode_all(
    pieces: Iterable[RoutedPiece], encode: Callable[[list[Piece]], Encoded], workers: int
) -> Iterator[tuple[str, Encoded]]:
    """(split, what `encode` makes of its next pieces), in order. On threads: tiktoken releases
    Python's lock, and processes take longer to start than a test set to encode."""
    pending = deque()
    with ThreadPoolExecutor(workers) as pool:
        for split, batch in batches(pieces):
            pending.append((split, pool.submit(encode, batch)))
            if len(pending) > 2 * workers:  # enough to keep all busy, few enough to bound memory
                split, encoded = pending.popleft()
                yield split, encoded.result()
        for split, encoded in pending:
            yield split, encoded.result()


def batches(pieces: Iterable[RoutedPiece]) -> Iterator[tuple[str, list[Piece]]]:
    """Pieces of one split that follow each other, about BATCH characters at once."""
    current, batch, size = None, [], 0
    for split, text, end in pieces:
        if batch and (size >= BATCH or split != current):
            yield current, batch
            batch, size = [], 0
        current = split
        batch.append((text, end))
        size += len(text) + 128  # what a piece takes beside its characters
    if batch:
        yield current, batch


class SplitFile:
    """The token file of a split as it is written."""

    def __init__(self, path: Path, protocol: str, block_size: int | None):
        self.path, self.protocol, self.block_size = path, protocol, block_size
        self.tokens = self.documents = 0
        self._ends: list[np.ndarray] = []  # where shards start depends on the number of rows
        self._files = [open(path, "wb")]
        if protocol == "records":
            self._files.append(open(path.with_suffix(".roles.bin"), "wb"))

    def write(self, ids: np.ndarray, ends: np.ndarray, roles: np.ndarray | None) -> None:
        for file, values in zip(self._files, (ids, roles), strict=False):
            file.write(values.data)
        if self.protocol == "sedd":
            self._ends.append(ends + self.tokens)
        self.tokens += ids.size
        self.documents += ends.size

    def close(self) -> dict:
        """Complete the file; returns its entry for meta.json."""
        for file in self._files:
            file.close()
        tokens = self._pack() if self.protocol == "sedd" else self.tokens
        paths = [Path(file.name) for file in self._files]
        facts = [{"file": path.name, "sha256": sha256_file(path)} for path in paths]
        counts = {"documents": self.documents, "dropped_tokens": self.tokens - tokens}
        roles = {"roles": facts[1]} if facts[1:] else {}
        return {"tokens": tokens, **counts, **facts[0], **roles}

    def _pack(self) -> int:
        """Drop what fills no block, in place; returns the number of tokens left."""
        tokens, size = np.memmap(self.path, DTYPE, mode="r+"), 0
        for start, stop in kept_ranges(np.concatenate(self._ends), self.block_size):
            if start > size:
                tokens[size : size + stop - start] = tokens[start:stop]
            size += stop - start
        tokens.flush()
        os.truncate(self.path, size * DTYPE.itemsize)
        if size == 0:
            few = (
                f"the {self.path.stem} split has {self.tokens:,} tokens in {self.documents:,} rows"
            )
            group = (
                f"no group of {GROUP_ROWS:,} rows in a shard fills a block of {self.block_size:,}"
            )
            raise UserError(f"{few}, and {group}: lower --block-size, or use --protocol full")
        return size


def kept_ranges(ends: np.ndarray, block_size: int) -> Iterator[tuple[int, int]]:
    """Token ranges that sedd keeps of rows laid end to end; ends (rows,): the place after each."""
    for shard in np.array_split(np.arange(len(ends)), SHARDS):  # larger ones first
        for first in shard[::GROUP_ROWS]:
            start = ends[first - 1] if first else 0
            stop = ends[min(first + GROUP_ROWS - 1, shard[-1])]
            yield int(start), int(stop - (stop - start) % block_size)


def in_words(protocol: str, block_size: int | None) -> str:
    """The packing in words, for meta.json."""
    sedd = f"{SHARDS} shards of rows, groups of {GROUP_ROWS} rows, blocks of {block_size}"
    return {
        "full": "documents end to end, nothing dropped",
        "records": f"a record in each block of {block_size}, with the roles of its tokens",
        "sedd": f"{sedd}, remainders of groups dropped",
    }[protocol]
