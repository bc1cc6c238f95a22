"""Prepared token files, memory-mapped, and the batches that training and evaluation
read from them. A dataset is a folder with `meta.json` and a flat file of token ids for
each split (prepare.py). A split is divided into blocks of `block_size` tokens; the rest
after the last one is in no batch. Each epoch visits every block once, in an order that
depends on (seed, epoch) alone: resuming needs no loader state, and any number of
processes reads the same. Shapes: B sequences, T block_size."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
from annotated_types import Interval

from ..runtime import randomness
from ..runtime.errors import UserError
from ..runtime.files import sha256_file
from ..runtime.paths import DATA
from ..runtime.randomness import philox_bits
from ..runtime.validation import Count, FileName, NonNegative, expand_home, read_json
from .catalogue import command_for
from .prompts import END_GIVEN, PADDING, PREDICTED
from .record_end import RecordEnd
from .tokenizers import Tokenizer

if TYPE_CHECKING:  # prepare.py starts without torch
    import torch

FORMAT = 2  # the newest that is read; of prompts, where text has 1
IDS_AT_ONCE = 1 << 24
# Signs that a file without meta.json is not text in GPT-2's ids of 16 bits. "!" has the
# id 0, and the first 512 ids are bytes and the most frequent pairs. The upper half of
# an id of 32 bits is below 16 for every vocabulary of fewer than a million.
MOST_ZEROS = 0.25
FEW_IDS = 16
COMMON_IDS = 512
FEW_TOKENS = 100
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

    format: NonNegative
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


def find_dataset(name: str | Path) -> Path:
    """Return the prepared folder that `name` means: a path, or a name under the
    project's data/. Raises FileNotFoundError, which names the command that makes it."""
    path = expand_home(name)
    for folder in (path, DATA / name):
        if (folder / "meta.json").is_file() or (folder / "train.bin").is_file():
            return folder
    if path.exists():
        texts = shlex.quote(str(name))
        if path.is_dir():
            texts += "/*.txt"
        raise FileNotFoundError(
            f"{name} is not a prepared dataset, it has no meta.json; make one of its "
            f"text with: python data/prepare.py text --source {texts} --out data/own"
        )
    prepared = sorted(path.parent.name for path in DATA.glob("*/meta.json"))
    raise FileNotFoundError(
        f"{name} is not a prepared dataset, neither a folder nor in {DATA} "
        f"({', '.join(prepared) or 'none'}); make it with: {command_for(str(name))}"
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
    """Return the contents of meta.json, or for token files of nanoGPT, which lack it,
    `nanogpt_meta`. Raises FileNotFoundError."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        if path.with_name("train.bin").is_file():
            return nanogpt_meta(Path(folder))
        raise FileNotFoundError(
            f"{folder} is not a data set (no meta.json); make it with: "
            f"{command_for(str(folder))}"
        )
    meta = read_json(path, Meta, ADVICE)
    if meta["format"] > FORMAT:
        raise UserError(
            f"{path} has format {meta['format']}: update the code, or {ADVICE}"
        )
    return meta


def nanogpt_meta(folder: Path) -> Meta:
    """Return a meta.json for nanoGPT's train.bin and val.bin. Raises UserError for
    files that are not GPT-2's ids in 16 bits."""
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder} has a vocabulary of its own (meta.pkl): prepare its text again"
        )
    splits: dict[str, Split] = {}
    for path in (folder / "train.bin", folder / "val.bin"):
        if path.is_file() and path.stat().st_size:
            check_nanogpt(path)
            tokens = path.stat().st_size // 2
            splits[path.stem] = {"file": path.name, "tokens": tokens, "sha256": ""}
    return {
        "format": 1,
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "eot": 50256,
        "dtype": "uint16",
        "splits": splits,
        "notes": [
            f"{folder} has no meta.json: read as nanoGPT's files of uint16 ids, "
            "tokenizer gpt2"
        ],
    }


def check_nanogpt(path: Path) -> None:
    """Raise UserError unless the first ids of a file look like text in GPT-2's ids."""
    if path.stat().st_size % 2:
        raise UserError(
            f"{path} has an odd number of bytes: it does not hold ids of 16 bits"
        )
    ids = np.fromfile(path, token_dtype("uint16"), count=IDS_AT_ONCE)
    if len(ids) < FEW_TOKENS:
        return
    zeros = float((ids == 0).mean())
    # The upper halves of ids of 32 bits, in either order of bytes: at most 3.
    upper_halves = int(ids[1::2].max())
    if zeros > MOST_ZEROS or upper_halves < FEW_IDS:
        raise UserError(
            f"{path} has no meta.json, and if its ids have 16 bits, {zeros:.0%} are 0 "
            f"and every other one is at most {upper_halves}: they have 32 or 64. Write "
            "them as uint16, or prepare the text again"
        )
    if ids.max() < COMMON_IDS:
        raise UserError(
            f"{path} has no meta.json, and its largest id is {ids.max()}: these are "
            "not ids of GPT-2 but of characters, say. Prepare the text again"
        )


def read_tokens(folder: str | Path, split: str, verify: bool = False) -> np.ndarray:
    """Return all ids of a split (n,), memory-mapped, after a check of sizes and the
    first ids, or with `verify` of all ids and checksums. Raises FileNotFoundError or
    UserError."""
    meta = load_meta(folder)
    if split not in meta["splits"]:
        raise UserError(
            f"{folder} has no split {split!r}; it has {', '.join(meta['splits'])}"
        )
    entry = meta["splits"][split]
    count = entry["tokens"]
    token_file = Path(folder) / entry["file"]
    dtype = token_dtype(meta["dtype"])
    files = [(token_file, entry["sha256"], count * dtype.itemsize)]
    if roles := entry.get("roles"):
        files.append((token_file.with_name(roles["file"]), roles["sha256"], count))
    for path, sha256, size in files:
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes, but {count:,} tokens need "
                f"{size:,}: it is damaged; copy it, or {ADVICE}"
            )
        if verify and sha256 and sha256_file(path) != sha256:
            raise UserError(f"{path} does not match its checksum; copy it, or {ADVICE}")
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


class Shuffles:
    """The orders of the blocks of a data set in its epochs. Those of four are kept: a
    batch moves on to the next epoch, never back."""

    def __init__(self):
        self.order = functools.lru_cache(maxsize=4)(shuffled)

    def indices(self, seed: int, numbers: np.ndarray, count: int) -> np.ndarray:
        """Return the numbers of the blocks that sequences read, int64 (B,): sequence n
        reads block shuffle_e[n % count] of epoch e = n // count."""
        epochs, places = np.divmod(numbers, count)
        indices = np.empty_like(places)
        # Two epochs where a batch straddles them, more if it is larger than the
        # dataset.
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = self.order(seed, int(epoch), count)
            indices[here] = order[places[here]]
        return indices


class TokenDataset:
    """One split of a prepared dataset, as blocks of `block_size` tokens, or of fewer
    where its examples with prompts are shorter. Attributes: folder, split, meta, tokens
    (all ids, memory-mapped), of_records, and of blocks block_size and num_blocks.

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
        self.folder = Path(folder)
        self.split = split
        self.meta = load_meta(folder)
        self.tokens = read_tokens(folder, split, verify)
        self.shift = 0  # not 0 where a run had batches of another size before
        self.shuffles = Shuffles()
        entry = self.meta["splits"][split]
        paths = [self.folder / entry["file"]]
        self._sha256 = [entry["sha256"]]
        self.of_records = "roles" in entry
        if self.of_records:
            paths.append(self.folder / entry["roles"]["file"])
            self._sha256.append(entry["roles"]["sha256"])
            self._all_roles = np.memmap(paths[1], np.uint8, mode="r")
        self._opened = {}  # size and time of each file
        for path in paths:
            stat = path.stat()
            self._opened[path] = (stat.st_size, stat.st_mtime_ns)
        if block_size is not None:
            self.divide(block_size, max_tokens)

    def divide(self, block_size: int, max_tokens: int = 0) -> None:
        """Divide the split into blocks, of an example each where it has prompts. Raises
        UserError for a length that it was not prepared for."""
        protocol = self.meta.get("protocol")
        packed = self.meta.get("block_size") or block_size
        if protocol == "records" and packed < block_size:
            block_size = packed  # a model may take longer sequences
        if packed != block_size and protocol == "records":
            raise UserError(
                f"{self.folder} is packed into blocks of {packed} tokens (protocol "
                f"records), not of {block_size}: set the model's block_size to "
                f"{packed} or more"
            )
        if packed != block_size:
            raise UserError(
                f"{self.folder} is packed into blocks of {packed} tokens (protocol "
                f"{protocol}), not of {block_size}: prepare it again with "
                f"--block-size {block_size}, or with --protocol full"
            )
        count = self.tokens.size
        if count < block_size:
            raise UserError(
                f"{self.split} of {self.folder} has {count:,} tokens, fewer than a "
                f"block of {block_size:,}: lower block_size to at most {count:,} "
                "(--model.block-size of train.py, --block-size of others), or prepare "
                "more text"
            )
        self.block_size = block_size
        self.num_blocks = count // block_size
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
        end = RecordEnd.of(self.meta, self.folder)
        if not self.of_records:  # each is a whole block: the file of roles would be 0
            self._roles = np.zeros((self.num_blocks, self.block_size), np.uint8)
            self.of_records = True
        at_once = max(1, IDS_AT_ONCE // self.block_size)
        for first in range(0, self.num_blocks, at_once):
            rows = slice(first, min(first + at_once, self.num_blocks))
            is_end = (self._blocks[rows] == end.token) & (self._roles[rows] != PADDING)
            ends = is_end.sum(axis=1)
            if (ends != 1).any():
                record = first + int((ends != 1).argmax()) + 1
                raise UserError(
                    f"record {record} of {self.split} in {self.folder} has its end, id "
                    f"{end.token}, inside its text, too: leave it out, or set data.end "
                    "= 'predicted'"
                )
        self.end_given = True

    def files(self) -> dict[str, dict]:
        """Return the checksum, size and times of each file, by path, which a run
        records for `changed_files` when it resumes."""
        recorded = {}
        for path, sha256 in zip(self._opened, self._sha256, strict=True):
            recorded[str(path)] = file_record(path, sha256)
        return recorded

    def check_unchanged(self) -> None:
        """Raise UserError or OSError if a file has another size or time than when it
        was opened."""
        for path, stamp in self._opened.items():
            stat = path.stat()
            # Reading beyond a shorter one raises SIGBUS.
            if (stat.st_size, stat.st_mtime_ns) != stamp:
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
        0 .. num_blocks - 1), LongTensor (B, T)."""
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
        return self.shuffles.indices(seed, sequence, self.num_blocks)


def file_record(path: Path, sha256: str | None) -> dict:
    """Return the checksum, size and times of a file."""
    stat = path.stat()
    return {
        "sha256": sha256,
        "size": stat.st_size,
        "times": [stat.st_mtime_ns, stat.st_ctime_ns],
    }


def changed_files(before: dict[str, dict], now: dict[str, dict]) -> list[str]:
    """Return notes on files that hold other data than `before` (`TokenDataset.files`),
    or have another size or time and no checksum that would show whether they changed.
    Raises UserError for a file that does not match its checksum."""
    notes = []
    for path, recorded in now.items():
        if recorded == before.get(path):
            continue
        if not recorded["sha256"]:
            if path in before:
                notes.append(
                    f"{path} has another size or time than when the run last started, "
                    "and no checksum: see that it is the same"
                )
        elif sha256_file(Path(path)) != recorded["sha256"]:
            raise UserError(
                f"{path} has changed since the run last started: it does not match its "
                f"checksum; copy it, or {ADVICE}"
            )
        elif path in before and recorded["sha256"] != before[path]["sha256"]:
            notes.append(f"{path} holds other data than when the run last started")
    return notes


def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of the blocks in an epoch, int64 (count,)."""
    # A sort of raw bits: Generator.permutation may change with numpy's version.
    (bits,) = philox_bits(
        seed, epoch, rows=range(1), width=count, stream=randomness.SHUFFLE
    )
    return np.argsort(bits, kind="stable")
