"""Prepared token files, memory-mapped, and the batches that training and evaluation
read from them. A dataset is a folder with `meta.json` and a flat file of token ids for
each split (prepare.py). A split is divided into blocks of `block_size` tokens; the rest
after the last one is in no batch. Each epoch visits every block once, in an order that
depends on (seed, epoch) alone: resuming needs no loader state, and any number of
processes reads the same. Shapes: B sequences, T block_size."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
from annotated_types import Interval

from ..runtime import randomness
from ..runtime.errors import UserError
from ..runtime.files import sha256_file
from ..runtime.paths import DATA
from ..runtime.randomness import philox_bits
from ..runtime.validation import (
    Count,
    FileName,
    NonNegative,
    check_value,
    expand_home,
    read_json,
)
from .catalogue import command_for
from .prompts import END_GIVEN, PADDING, PREDICTED
from .record_end import RecordEnd
from .tokenizers import Tokenizer

if TYPE_CHECKING:  # prepare.py starts without torch
    import torch

IDS_AT_ONCE = 1 << 24
ADVICE = "prepare the dataset again"


class Split(TypedDict):
    """The entry of a split in meta.json."""

    file: FileName
    tokens: Annotated[int, Interval(ge=1, lt=2**63)]
    sha256: str
    # File and sha256 of the prompt mask, a byte a token.
    roles: NotRequired[dict[str, FileName]]
    # UTF-8 bytes of the text, and those its tokens stand for, where they can differ
    text_bytes: NotRequired[NonNegative]
    token_bytes: NotRequired[NonNegative]
    # Of records that end: how many have each number of tokens before the end.
    lengths: NotRequired[dict[str, NonNegative]]


class Meta(TypedDict):
    """The contents of meta.json; folders of earlier versions lack some keys."""

    format: Annotated[int, Interval(ge=0, le=2)]  # 2: of prompts, where text has 1
    tokenizer: str
    tokenizer_sha256: NotRequired[str]  # of its vocabulary
    vocab_size: Count
    eot: NonNegative
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, Split]
    protocol: NotRequired[str]
    block_size: NotRequired[Count | None]
    split: NotRequired[str | None]
    notes: NotRequired[list[str]]
    settings: NotRequired[dict[str, Any]]
    # Of a run, in its checkpoints alone: a `file_record` of each file that it reads.
    files: NotRequired[dict[str, dict]]


def find_dataset(name: str | Path) -> Path:
    """Return the prepared folder that `name` means: a path, or a name under the
    project's data/. Raises FileNotFoundError, which names the command that makes it."""
    for folder in (expand_home(name), DATA / name):
        if (folder / "meta.json").is_file():
            return folder
    prepared = sorted(path.parent.name for path in DATA.glob("*/meta.json"))
    raise FileNotFoundError(
        f"{name} is not a prepared dataset (it has no meta.json), neither a folder nor "
        f"in {DATA} ({', '.join(prepared) or 'none'}); make it with: "
        f"{command_for(str(name).removesuffix('.txt'))}"
    )


def evaluation_split(meta: dict) -> str:
    """Return the split to evaluate on by default: the only one, that of an evaluation
    set, or "val"."""
    if len(meta["splits"]) == 1:
        return next(iter(meta["splits"]))
    if meta.get("split") in meta["splits"]:
        return meta["split"]
    return "val"


def load_meta(folder: str | Path) -> Meta:
    """Return the contents of meta.json. Raises FileNotFoundError."""
    return read_json(find_dataset(folder) / "meta.json", Meta, ADVICE)


def read_tokens(folder: str | Path, split: str, verify: bool = False) -> np.ndarray:
    """Return all ids of a split (n,), memory-mapped, after a check of sizes and the
    first ids, or with `verify` of all ids and checksums. Raises FileNotFoundError or
    UserError."""
    meta = load_meta(folder)
    check_value(split, Literal[tuple(meta["splits"])], f"the split of {folder}")
    entry = meta["splits"][split]
    count = entry["tokens"]
    token_file = Path(folder) / entry["file"]
    dtype = token_dtype(meta["dtype"])
    files = [(token_file, entry["sha256"], count * dtype.itemsize)]
    if roles := entry.get("roles"):
        files.append((token_file.with_name(roles["file"]), roles["sha256"], count))
    for path, sha256, size in files:
        is_whole = path.stat().st_size == size
        if not is_whole or (verify and sha256_file(path) != sha256):
            raise UserError(
                f"{path} is damaged: it does not match its size or checksum in "
                f"meta.json; copy it, or {ADVICE}"
            )
    ids = np.memmap(token_file, dtype, mode="r")
    checked = count if verify else 1
    for start in range(0, checked, IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        largest = int(part.max())
        if largest >= meta["vocab_size"]:
            raise UserError(
                f"{token_file} holds the id {largest}, but the {meta['tokenizer']} "
                f"tokenizer has {meta['vocab_size']} ids; {ADVICE}"
            )
    return ids


def token_dtype(name: str) -> np.dtype:
    """Return the type of a token file, little-endian on every machine."""
    return np.dtype(name).newbyteorder("<")


def spread(count: int, total: int) -> np.ndarray:
    """Return `count` numbers, at most `total`, spread evenly over range(total), int64
    (count,)."""
    count = min(count, total)
    return np.arange(count, dtype=np.int64) * total // max(1, count)


class TokenDataset:
    """One split of a prepared dataset, memory-mapped, as `num_blocks` blocks of
    `block_size` tokens, or of fewer where its examples with prompts are shorter.

    block_size: None: `divide` gives it later. verify: see `read_tokens`. max_tokens:
    take only blocks of this many tokens, spread over the split; 0: all. Raises
    FileNotFoundError or UserError."""

    tokenizer: Tokenizer | None = None  # of the ids, where it has been read
    end_given = False  # whether the end of a record is given: see `give_end`

    def __init__(
        self,
        folder,
        split: str,
        block_size: int | None,
        verify: bool = False,
        max_tokens: int = 0,
    ):
        self.meta = load_meta(folder)
        self.tokens = read_tokens(folder, split, verify)
        self.split = split
        self.folder = Path(folder)
        self.shift = 0  # not 0 where a run had batches of another size before
        entry = self.meta["splits"][split]
        path = self.folder / entry["file"]
        # Of each file, which a run saves and compares when it resumes.
        self.files = {str(path): file_record(path, entry["sha256"])}
        self.of_records = "roles" in entry  # whether there are roles (prompts.py)
        if self.of_records:
            path = self.folder / entry["roles"]["file"]
            self.files[str(path)] = file_record(path, entry["roles"]["sha256"])
            self._all_roles = np.memmap(path, np.uint8, mode="r")
        if block_size is not None:
            self.divide(block_size, max_tokens)
            if self.num_blocks == 0:
                count = f"{self.tokens.size:,}"
                raise UserError(
                    f"{split} of {folder} has {count} tokens, fewer than a block of "
                    f"{block_size:,}: lower block_size to at most {count}, or prepare "
                    "more text"
                )

    def divide(self, block_size: int, max_tokens: int = 0) -> None:
        """Divide the split into blocks, of an example each where it has prompts. Raises
        UserError for a length that it was not prepared for."""
        protocol = self.meta.get("protocol")
        packed = self.meta.get("block_size") or block_size
        if protocol == "records" and packed < block_size:
            block_size = packed  # a model may take longer sequences
        if packed != block_size:
            raise UserError(
                f"{self.folder} is packed into blocks of {packed} tokens (protocol "
                f"{protocol}), not of {block_size}: set the model's block_size to "
                f"{packed}, or prepare it again with --block-size {block_size}"
            )
        self.block_size = block_size
        self.num_blocks = self.tokens.size // block_size
        whole = self.tokens[: self.num_blocks * block_size]
        self._blocks = whole.reshape(-1, block_size)
        if self.of_records:
            self._roles = self._all_roles.reshape(-1, block_size)
        if max_tokens:  # a copy in memory
            wanted = max(1, max_tokens // block_size)
            chosen = spread(wanted, self.num_blocks)
            self._blocks = self._blocks[chosen]
            self.num_blocks = len(chosen)
            if self.of_records:
                self._roles = self._roles[chosen]

    def give_end(self) -> None:
        """Give the end of every record (END_GIVEN in prompts.py). Of a split in
        blocks. Raises UserError if its records have no end, or one inside."""
        end = self.meta["eot"]
        if "train" in self.meta["splits"]:  # of a set to score the model has lengths
            RecordEnd.of(self.meta, self.folder)
        if not self.of_records:  # each is a whole block: the file of roles would be 0
            self._roles = np.zeros((self.num_blocks, self.block_size), np.uint8)
            self.of_records = True
        at_once = max(1, IDS_AT_ONCE // self.block_size)
        for first in range(0, self.num_blocks, at_once):
            rows = slice(first, min(first + at_once, self.num_blocks))
            is_end = (self._blocks[rows] == end) & (self._roles[rows] != PADDING)
            ends = is_end.sum(axis=1)
            if (ends != 1).any():
                record = first + int((ends != 1).argmax()) + 1
                raise UserError(
                    f"record {record} of {self.split} in {self.folder} has its end, id "
                    f"{end}, inside its text, too: leave it out, or set data.end "
                    "= 'predicted'"
                )
        self.end_given = True

    def check_unchanged(self) -> None:
        """Raise UserError or OSError if a file has another size or time than when it
        was opened."""
        for path, opened in self.files.items():
            stat = Path(path).stat()
            # Reading beyond a shorter one raises SIGBUS.
            if [stat.st_size, stat.st_mtime_ns] != [opened["size"], opened["times"][0]]:
                raise UserError(
                    f"{path} has changed since it was opened: see that it is whole "
                    "and start again"
                )

    def roles(self, indices) -> torch.Tensor:
        """Return the roles (prompts.py) of the tokens in these blocks of examples,
        uint8 (B, T)."""
        import torch

        return torch.from_numpy(self._roles_at(indices))

    def _roles_at(self, indices) -> np.ndarray:
        """Return the roles of the tokens in these blocks, uint8 (B, T)."""
        roles = self._roles[np.asarray(indices, dtype=np.int64)]  # a copy
        if self.end_given:
            lengths = (roles != PADDING).sum(axis=-1, keepdims=True)
            np.put_along_axis(roles, lengths - 1, END_GIVEN, axis=-1)
        return roles

    def predicted(self, seed: int, step: int, global_batch: int) -> int:
        """Return the number of predicted tokens in a global batch of examples with
        prompts."""
        indices = self.indices(seed, step, range(global_batch), global_batch)
        return int((self._roles_at(indices) == PREDICTED).sum())

    def blocks(self, indices) -> torch.LongTensor:
        """Return the tokens of the blocks with these numbers (B integers in
        0 .. num_blocks - 1), LongTensor (B, T). Raises UserError or OSError for a file
        that has changed."""
        import torch

        self.check_unchanged()
        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(indices):
            assert 0 <= indices.min() <= indices.max() < self.num_blocks, indices
        tokens = self._blocks[indices].astype(np.int64)
        return torch.from_numpy(tokens)

    def tail(self) -> torch.LongTensor:
        """Return the tokens after the last whole block, LongTensor (1, t), t < T."""
        import torch

        rest = self.tokens[self.num_blocks * self.block_size :]
        return torch.from_numpy(rest.astype(np.int64))[None]

    def batch(
        self, seed: int, step: int, rows: range, global_batch: int
    ) -> torch.LongTensor:
        """Return the sequences `rows` of the global batch of `step`, LongTensor
        (B, T)."""
        return self.blocks(self.indices(seed, step, rows, global_batch))

    def indices(
        self, seed: int, step: int, rows: range, global_batch: int
    ) -> np.ndarray:
        """Return the numbers of the blocks that `batch` reads, int64 (B,): sequence g =
        step * global_batch + row + shift is block shuffle_e[g % num_blocks] of epoch e
        = g // num_blocks."""
        assert step >= 0
        if len(rows):
            assert 0 <= min(rows) <= max(rows) < global_batch, rows
        sequence = self.shift + step * global_batch + np.asarray(rows, dtype=np.int64)
        epochs, places = np.divmod(sequence, self.num_blocks)
        indices = np.empty_like(places)
        # Two epochs where a batch straddles them, more if it is larger than the
        # dataset.
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = shuffled(seed, int(epoch), self.num_blocks)
            indices[here] = order[places[here]]
        return indices


def file_record(path: Path, sha256: str) -> dict:
    """Return the checksum, size and times of a file."""
    stat = path.stat()
    return {
        "sha256": sha256,
        "size": stat.st_size,
        "times": [stat.st_mtime_ns, stat.st_ctime_ns],
    }


@functools.lru_cache(maxsize=4)  # a batch moves on to the next epoch, never back
def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of the blocks in an epoch, int64 (count,)."""
    # A sort of raw bits: Generator.permutation may change with numpy's version.
    (bits,) = philox_bits(
        seed, epoch, rows=range(1), width=count, stream=randomness.SHUFFLE
    )
    return np.argsort(bits, kind="stable")
