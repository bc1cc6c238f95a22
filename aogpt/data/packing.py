"""From documents to token files: which split they go into, their tokens, and how these
are packed.

full     every document, end-of-text after it, end to end: nothing is dropped
sedd     as the published zero-shot perplexities: 8 contiguous shards of the rows, in
         groups of 1,000 rows; each group is concatenated and divided into blocks, its
         rest dropped
records  every example in a block of its own, and its prompt mask in a second file
         (prompts.py), unless all of every example is predicted"""

import hashlib
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ..runtime.errors import UserError
from ..runtime.files import sha256_file
from ..runtime.randomness import SPLIT, philox_bits
from .loader import token_dtype
from .prompts import PADDING, without_marks
from .sources import Corpus
from .tokenizers import HUB, Tokenizer, text_bytes

# the protocol sedd
SHARDS = 8
GROUP_ROWS = 1000
BATCH = 1 << 24  # characters that are encoded at once, on several threads
WHITE_SPACE = b" \t\r\n"  # in which copies of a document may differ
# Where a single document may be divided: at the last line end or word end in this part
# of the validation share before its beginning.
NEAR = 0.1


def route(
    corpora: dict[str, Corpus],
    fraction: float | None,
    limit: int | None,
    whole: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield (split, document) of every document, in reading order. fraction: share of
    the "train" documents that becomes "val". limit: the most documents to take of the
    first split. whole: never split one."""
    for number, (split, corpus) in enumerate(corpora.items()):
        documents = iter(corpus.documents)
        if number == 0:
            documents = islice(documents, limit)
        if split == "train" and fraction is not None:
            yield from _train_and_val(documents, fraction, whole)
        else:
            yield from ((split, text) for text in documents)


def _train_and_val(
    documents: Iterator[str], fraction: float, whole: bool
) -> Iterator[tuple[str, str]]:
    """Yield one validation document in every group of 1 / fraction documents in a row;
    fewer documents than that are one group. Its place is drawn from the group's number:
    no split depends on later documents."""
    first_group = list(islice(documents, math.ceil(1 / fraction)))
    if len(first_group) == 1:
        text = first_group[0]
        if whole or len(text) < 2:
            raise UserError(
                "a single record or character makes no validation split: add more, or "
                "give --split"
            )
        place = _place_to_split(text, fraction)
        yield "train", text[:place]
        yield "val", text[place:]
        return
    size = min(1 / fraction, len(first_group))
    group = -1
    for index, text in enumerate(chain(first_group, documents)):
        if (group + 1) * size <= index:
            group += 1
            first = math.ceil(group * size)
            last = math.ceil((group + 1) * size)
            bits = philox_bits(0, group, rows=range(1), width=1, stream=SPLIT)
            chosen = first + int(bits[0, 0]) % (last - first)
        if index == chosen:
            yield "val", text
        else:
            yield "train", text


def _place_to_split(text: str, fraction: float) -> int:
    """Return the place where the last share of a text begins: after the end of a line
    near it, else after the end of a word, else the exact place."""
    count = max(1, round(len(text) * fraction))
    place = len(text) - count
    first = max(0, place - round(NEAR * count))
    before = text[first : place + 1]
    for space in ("\n", r"\s"):
        if match := re.match(rf".*\S(?={space})", before, re.DOTALL):
            return first + match.end()
    return place


def encode_documents(
    tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[np.ndarray, None]]:
    """Yield the ids (n,) of documents, with end-of-text after each, and no roles."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken releases Python's lock
        for ids in pool.map(tokenizer.encode_array, texts):
            end = np.array(tokenizer.eot, ids.dtype)
            yield np.append(ids, end), None


def batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the documents in lists of about BATCH characters."""
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

    def __init__(
        self,
        path: Path,
        protocol: str,
        block_size: int | None,
        tokenizer: Tokenizer,
        records_end: bool = False,
    ):
        self.path = path
        self.protocol = protocol
        self.block_size = block_size
        self.tokenizer = tokenizer
        self.records_end = records_end  # whether end-of-text follows each record
        self.dtype = token_dtype(tokenizer.dtype)
        self.tokens = 0
        self.ends = array("q")  # the place after each document
        # a hash of each document's text without white space, unless nothing is left
        self.hashes = array("Q")
        # Of the text, and of what the ids stand for, where a tokenizer.json may lose
        # some of it. The other tokenizers lose nothing.
        self.text_bytes = 0
        self.token_bytes = 0
        self.has_roles = False  # whether a token is not predicted
        # Tokens before the end of a record, and how many records have as many.
        self.lengths: Counter[int] = Counter()
        self._file = path.open("wb")
        self._roles_path = path.with_suffix(".roles.bin")
        self._roles_file = None
        if protocol == "records":
            self._roles_file = self._roles_path.open("wb")

    def write(self, text: str, ids: np.ndarray, roles: np.ndarray | None) -> None:
        """Add a document."""
        ids = ids.astype(self.dtype, copy=False)
        self._file.write(ids.data)
        if roles is not None:
            self._roles_file.write(roles.data)
            self.has_roles |= bool(roles.any())
            if self.records_end:
                # From the roles: end-of-text can also stand inside a record.
                self.lengths[int((roles != PADDING).sum()) - 1] += 1
        self.tokens += ids.size
        self.ends.append(self.tokens)
        data = text.encode("utf-8", "surrogatepass").translate(None, WHITE_SPACE)
        if data:
            digest = hashlib.blake2b(data, digest_size=8).digest()
            self.hashes.append(int.from_bytes(digest, "little"))
        if self.tokenizer.name == HUB:
            plain = text if roles is None else without_marks(text)
            self.text_bytes += text_bytes(plain)
            self.token_bytes += int(self.tokenizer.count_bytes(ids).sum())

    def close(self) -> dict:
        """Complete the file. Returns its entry for meta.json. Raises UserError if the
        protocol leaves no token."""
        self._file.close()
        if self._roles_file:
            self._roles_file.close()
            if not self.has_roles:  # no prompts, no padding: no mask
                self._roles_path.unlink()
        if self.protocol == "sedd":
            tokens = np.fromfile(self.path, self.dtype)
            ranges = ranges_of_blocks(np.array(self.ends), self.block_size)
            parts = [tokens[start:stop] for start, stop in ranges]
            np.concatenate(parts).tofile(self.path)
        size = os.path.getsize(self.path) // self.dtype.itemsize
        if size == 0:
            raise UserError(
                f"{self.path.stem} has {self.tokens:,} tokens in {len(self.ends):,} "
                f"rows; no group of {GROUP_ROWS:,} rows in a shard fills a block of "
                f"{self.block_size:,}: lower --block-size, or use --protocol full"
            )
        entry = {
            "tokens": size,
            "documents": len(self.ends),
            "dropped_tokens": self.tokens - size,
            "file": self.path.name,
            "sha256": sha256_file(self.path),
        }
        if self.text_bytes:
            entry["text_bytes"] = self.text_bytes
            entry["token_bytes"] = self.token_bytes
        if self.lengths:
            entry["lengths"] = {str(n): self.lengths[n] for n in sorted(self.lengths)}
        if self.has_roles:
            entry["roles"] = {
                "file": self._roles_path.name,
                "sha256": sha256_file(self._roles_path),
            }
        return entry


def shared_rows(train: SplitFile, other: SplitFile) -> int:
    """Return how many documents of another split are in the training split, too."""
    hashes = np.frombuffer(other.hashes, np.uint64)
    is_shared = np.isin(hashes, np.frombuffer(train.hashes, np.uint64))
    return int(is_shared.sum())


def ranges_of_blocks(ends: np.ndarray, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield the token ranges that become blocks under sedd, of rows laid end to end;
    ends (rows,): the place after each."""
    for shard in np.array_split(np.arange(len(ends)), SHARDS):  # larger ones first
        for first in shard[::GROUP_ROWS]:
            last = min(first + GROUP_ROWS - 1, shard[-1])
            start = int(ends[first - 1]) if first else 0
            stop = int(ends[last])
            rest = (stop - start) % block_size
            yield start, stop - rest
