"""Prepared token files, memory-mapped, and the batches that training and evaluation read from them.

A dataset is a folder with `meta.json` and one flat file of token ids per split (see prepare.py). A
split is cut into blocks of `block_size` tokens; the few tokens after the last whole block are in no
batch. Each epoch visits every block once, in an order that follows from (seed, epoch) alone, so the
batch of a step follows from (seed, step): resuming needs no loader state, and the number of
processes changes nothing.

Shapes: B sequences, T block_size.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

import numpy as np
from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from data.catalogue import DATASETS
from data.tokenizers import TOKENIZERS
from runtime import randomness
from runtime.errors import UserError
from runtime.files import sha256_file
from runtime.randomness import philox_bits, to_uniform
from runtime.validation import Count, FileName, NonNegative, read_json, schema

# torch makes the tensors at the end, nothing else: prepare.py does without, and starts in a moment
if TYPE_CHECKING:
    import torch

FORMAT = 2  # the newest that is read; of records, where text has 1
Dtype = Literal["uint16", "uint32"]
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LENGTHS = 8  # that a batch can be cut to: torch.compile makes code for each of them
CHUNK_BYTES = 4 << 20  # of a token file that is checked
LENGTHS_AT_ONCE = 512  # steps whose lengths come from one call of Philox


# ---- meta.json -----------------------------------------------------------------------------------


@schema
class Format(TypedDict):
    format: NonNegative


@schema
class RolesFile(TypedDict):
    """The roles of the tokens of records, a byte each (data/records.py)."""

    file: FileName
    sha256: str


@schema
class Split(TypedDict):
    """A token file."""

    file: FileName
    tokens: Annotated[int, Interval(ge=0, lt=2**63)]
    sha256: str
    roles: NotRequired[RolesFile]


@schema
class Meta(Format):
    """The contents of meta.json, as prepare.py writes them; folders of earlier versions lack some
    keys."""

    tokenizer: str
    vocab_size: Count
    eot: NonNegative
    dtype: Dtype
    splits: dict[str, Split]
    protocol: NotRequired[str]
    packing: NotRequired[str]
    block_size: NotRequired[Count | None]
    split: NotRequired[str | None]
    notes: NotRequired[list[str]]
    source: NotRequired[list[dict[str, Any]]]
    settings: NotRequired[dict[str, Any]]


def dtype_name(vocab_size: int) -> str:
    """The smaller of "uint16" and "uint32" that holds the ids 0 .. vocab_size - 1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def batch_lengths(seed: int, steps: range, block_size: int, random_prob: float) -> np.ndarray:
    """Length of the sequences in the global batch of each step, int64 (len(steps),): a pure
    function of the arguments.

    It is block_size; but with probability `random_prob` it is drawn uniformly from 1 .. block_size
    and rounded up to an eighth of block_size. A cut batch keeps the first tokens of its blocks; the
    others are not seen in that epoch. One length for the whole batch needs no padding, so nothing
    stands where a shorter text has ended: an encoder attends to nothing there, a decoder's orders
    hold no such position. And the mean over its micro-batches and processes remains the mean over
    its tokens. Lengths below an eighth of block_size do not occur.
    """
    lengths = np.full(len(steps), block_size, dtype=np.int64)
    if random_prob == 0 or not len(steps):
        return lengths
    # two numbers a step, of the chunks of steps that these ones are in
    first, last = steps.start // LENGTHS_AT_ONCE, (steps.stop - 1) // LENGTHS_AT_ONCE
    bits = [
        philox_bits(seed, chunk, range(1), 2 * LENGTHS_AT_ONCE, randomness.LENGTHS)[0]
        for chunk in range(first, last + 1)
    ]
    start = steps.start - first * LENGTHS_AT_ONCE
    uniform = to_uniform(np.concatenate(bits)).reshape(-1, 2)[start : start + len(steps)]
    is_random, drawn = (
        uniform[:, 0] < random_prob,
        1 + (uniform[:, 1] * block_size).astype(np.int64),
    )
    eighths = -(-np.arange(1, LENGTHS + 1) * block_size // LENGTHS)  # rounded up
    rounded = eighths[np.searchsorted(eighths, drawn)]
    return np.where(is_random, rounded, lengths)


# ---- the folder of a dataset ---------------------------------------------------------------------


def find_dataset(name) -> Path:
    """The prepared folder that `name` means: a path, or a name under the project's data/.

    Raises FileNotFoundError that says how to prepare it where there is none.
    """
    home = Path(__file__).resolve().parent
    for folder in (Path(name), home / name):
        if (folder / "meta.json").is_file():
            return folder
    if str(name) in DATASETS:
        source = "" if DATASETS[str(name)].source == "never" else " [--source FILE ...]"
        raise FileNotFoundError(
            f"the dataset {name} is not prepared yet; make it with: "
            f"python data/prepare.py {name}{source}"
        )
    prepared = sorted(path.parent.name for path in home.glob("*/meta.json"))
    raise FileNotFoundError(
        f"{name} is no prepared dataset: neither a folder with a meta.json nor one of those in "
        f"{home} ({', '.join(prepared) or 'none yet'}); make one with: "
        f"python data/prepare.py NAME --out DIR, where NAME is {', '.join(DATASETS)}"
    )


def evaluation_split(meta: dict) -> str:
    """The split to evaluate on where none is named: that of an evaluation set, else the only one,
    else "val"."""
    if len(meta["splits"]) == 1:
        return next(iter(meta["splits"]))
    return meta["split"] if meta.get("split") in meta["splits"] else "val"


def load_meta(folder) -> Meta:
    """The contents of `folder`/meta.json.

    Raises FileNotFoundError where the folder or the file is missing, ValueError where the file is
    damaged, not a dataset's, or of a newer format.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.is_file():
        lack = "is not a prepared dataset: it has no meta.json"
        raise FileNotFoundError(
            f"{folder}{f' {lack}' if folder.is_dir() else ': no such dataset folder'}; "
            f"make one with: python data/prepare.py NAME --out {folder} (--help names them)"
        )
    advice = "prepare the dataset again"
    if (version := read_json(path, Format, advice)["format"]) > FORMAT:
        raise UserError(
            f"{path} has format {version}, this code reads up to {FORMAT}: update the code, "
            f"or {advice}"
        )
    meta = read_json(path, Meta, advice)
    if meta.get("protocol") in ("sedd", "records") and not meta.get("block_size"):
        raise UserError(f"{path} lacks block_size, which its protocol has; {advice}")
    if meta.get("protocol") == "records" and any("roles" not in s for s in meta["splits"].values()):
        raise UserError(f"{path}: a split of records lacks roles; {advice}")
    tokenizer = TOKENIZERS.get(meta["tokenizer"])
    if tokenizer and meta["vocab_size"] != tokenizer.vocab_size:
        raise UserError(
            f"{path}: vocab_size is {meta['vocab_size']}, but the {tokenizer.name} tokenizer has "
            f"{tokenizer.vocab_size} ids; {advice}"
        )
    return meta


def check_file(folder, meta: dict, split: str, verify: bool = False) -> Path:
    """Path of a split's token file, after comparing its size and contents with `meta`; the contents
    only once, unless with `verify`, for as long as this machine sees that the file has not changed.

    Raises FileNotFoundError or ValueError that say what does not fit.
    """
    if split not in meta["splits"]:
        splits = ", ".join(map(repr, meta["splits"]))
        raise UserError(f"{folder} has no split {split!r}; its splits are {splits}")
    entry = meta["splits"][split]
    path = Path(folder) / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing although meta.json lists it; prepare the dataset again"
        )
    size, expected = path.stat().st_size, entry["tokens"] * DTYPES[meta["dtype"]].itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes, but {entry['tokens']:,} tokens of {meta['dtype']} need "
            f"{expected:,}: the file is damaged or not this dataset's; copy it or prepare it again"
        )
    facts = entry["sha256"], meta["dtype"], meta["vocab_size"]
    check_once(path, facts, verify, lambda: check_contents(path, meta, entry))
    if "roles" in entry:
        check_roles(path.with_name(entry["roles"]["file"]), entry, verify)
    return path


def check_once(path: Path, facts: tuple, verify: bool, check: Callable[[], None]) -> None:
    """Check the contents of a file, with `verify` or where this machine has not done so since it
    was changed; of several processes one does, while the others wait. facts: what it is compared
    with."""
    mark = mark_of(path, facts)
    if mark.exists() and not verify:
        return
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if verify else one_at_a_time(mark.with_suffix(".lock")):
        if verify or not mark.exists():  # by now another process may have checked it
            check()
            with suppress(OSError):  # then they are checked again the next time
                mark.touch()


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait until no other process of this machine is within this, by a lock that ends with whoever
    holds it. Where no such file can be made, do not wait."""
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(open(lock, "w")), fcntl.LOCK_EX)
            stack.callback(lock.unlink, missing_ok=True)
        yield


def check_contents(path: Path, meta: dict, entry: dict) -> None:
    """Raise ValueError for a token file that is not the one of its checksum, or has ids that its
    tokenizer does not, which a model would look up beyond the end of its table."""
    digest, largest, dtype = hashlib.sha256(), -1, DTYPES[meta["dtype"]]
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
    check_sum(path, digest.hexdigest(), entry["sha256"])
    if largest >= meta["vocab_size"]:
        raise UserError(
            f"{path} holds the id {largest}, but the {meta['tokenizer']} tokenizer has "
            f"{meta['vocab_size']} ids; prepare the dataset again"
        )


def check_sum(path: Path, found: str, sha256: str) -> None:
    """Raise ValueError where a file has another checksum."""
    if found != sha256:
        raise UserError(
            f"{path} does not match its checksum (sha256 {found[:12]}... instead of "
            f"{sha256[:12]}...): the file is damaged; copy it or prepare it again"
        )


def check_roles(path: Path, entry: dict, verify: bool) -> None:
    """As `check_file`, of the roles of a split of records, which meta.json has `entry` for."""
    if not path.is_file() or path.stat().st_size != entry["tokens"]:
        raise UserError(
            f"{path} is missing or has not one byte for each of {entry['tokens']:,} tokens: copy "
            "it or prepare the dataset again"
        )
    sha256 = entry["roles"]["sha256"]
    check_once(path, (sha256,), verify, lambda: check_sum(path, sha256_file(path), sha256))


def mark_of(path: Path, facts: tuple) -> Path:
    """An empty file that tells that this machine has compared a file, as it is now, with these
    facts."""
    cache = Path(os.environ.get("AOGPT_CACHE") or Path("~/.cache/aogpt").expanduser())
    now = path.stat()
    state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    known = (socket.gethostname(), *state, *facts)
    return cache / "checked_tokens" / hashlib.sha256(repr(known).encode()).hexdigest()


def read_tokens(folder, split: str, verify: bool = False) -> np.ndarray:
    """All ids of a split (n,), whatever its blocks: a np.memmap, or an empty array.

    Raises as `TokenDataset` does."""
    meta = load_meta(folder)
    path, count = check_file(folder, meta, split, verify), meta["splits"][split]["tokens"]
    dtype = DTYPES[meta["dtype"]]
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


# ---- batches -------------------------------------------------------------------------------------


class TokenDataset:
    """One split of a prepared dataset, as blocks of `block_size` tokens; of records, which may be
    shorter than a model's blocks, of as many as they have.

    Attributes: `meta` (dict, the folder's meta.json); `tokens` (np.memmap, all ids of the split);
    `num_blocks`.

    `verify` compares the file's sha256 even if that has been done before. Raises FileNotFoundError
    or ValueError for a missing, damaged or newer dataset, for a split with fewer tokens than one
    block, and for another block size than the one that the folder was packed for (protocol
    sedd).
    """

    def __init__(self, folder, split: str, block_size: int, verify: bool = False):
        self.meta = load_meta(folder)
        self.block_size = block_size
        self.tokens = read_tokens(folder, split, verify)
        count, packed = self.tokens.size, self.meta.get("block_size")
        if block_size < 1:
            raise UserError(f"block_size must be at least 1, not {block_size}")
        protocol = self.meta.get("protocol")
        if protocol == "records" and packed < block_size:
            self.block_size = block_size = packed  # a model may be made for longer ones
        if packed is not None and packed != block_size:
            what = f"prepare it again with --block-size {block_size}, or with --protocol full"
            if protocol == "records":
                what = f"set the model's block_size to {packed} or more"
            raise UserError(
                f"{folder} is packed into blocks of {packed} tokens (protocol {protocol}), not of "
                f"{block_size}: {what}"
            )
        if count < block_size:
            raise UserError(
                f"the {split} split of {folder} has {count:,} tokens, fewer than one block of "
                f"{block_size:,}: lower block_size to at most {count:,}, or prepare more text"
            )
        self.num_blocks = count // block_size
        self._blocks = self.tokens[: self.num_blocks * block_size].reshape(-1, block_size)
        self._roles = None
        if roles := self.meta["splits"][split].get("roles"):
            path = Path(folder) / roles["file"]  # checked with the tokens
            self._roles = np.memmap(path, dtype=np.uint8, mode="r", shape=self._blocks.shape)
        self._shuffles: dict[tuple[int, int], np.ndarray] = {}

    @property
    def of_records(self) -> bool:
        """Whether tokens have roles: a block is a record (data/records.py)."""
        return self._roles is not None

    def roles(self, indices) -> torch.Tensor | None:
        """The roles of the tokens in these blocks, uint8 (B, T); None where they have none."""
        import torch

        if self._roles is None:
            return None
        return torch.from_numpy(self._roles[np.asarray(indices, dtype=np.int64)])

    def blocks(self, indices) -> torch.LongTensor:
        """Blocks number `indices` (B integers in 0 .. num_blocks - 1) -> LongTensor (B, T)."""
        import torch

        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if indices.size and not (0 <= indices.min() and indices.max() < self.num_blocks):
            raise UserError(
                f"block numbers run from 0 to {self.num_blocks - 1}, got {indices.min()} to "
                f"{indices.max()}"
            )
        return torch.from_numpy(self._blocks[indices].astype(np.int64))

    def tail(self) -> torch.LongTensor:
        """The tokens after the last whole block -> LongTensor (1, t), 0 <= t < T: for what must
        drop nothing."""
        import torch

        rest = self.tokens[self.num_blocks * self.block_size :]
        return torch.from_numpy(rest.astype(np.int64))[None]

    def batch(self, seed: int, step: int, rows: range, global_batch: int) -> torch.LongTensor:
        """Sequences `rows` (a range within 0 .. global_batch - 1) of the global batch of `step`
        -> LongTensor (B, T)."""
        return self.blocks(self.indices(seed, step, rows, global_batch))

    def indices(self, seed: int, step: int, rows: range, global_batch: int) -> np.ndarray:
        """The numbers of the blocks that `batch` reads, int64 (B,).

        A pure function of its arguments and of the file. Sequence g = step * global_batch + row of
        the run is block shuffle_e[g % num_blocks] of epoch e = g // num_blocks.
        """
        if step < 0 or (len(rows) and not (0 <= min(rows) and max(rows) < global_batch)):
            raise UserError(
                f"step {step} and rows {rows} must not be negative, and rows stay below "
                f"{global_batch=}"
            )
        sequence = step * global_batch + np.asarray(rows, dtype=np.int64)
        epochs, places = np.divmod(sequence, self.num_blocks)
        indices = np.empty_like(places)
        # two where the batch straddles an epoch, more if it outgrows the dataset
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self._shuffle(seed, int(epoch))[places[here]]
        return indices

    def _shuffle(self, seed: int, epoch: int) -> np.ndarray:
        """The order of the blocks in an epoch, int64 (num_blocks,)."""
        key = (seed, epoch)
        if key not in self._shuffles:
            # a batch moves from one epoch to the next: older ones are not needed again
            if len(self._shuffles) >= 2:
                self._shuffles.pop(next(iter(self._shuffles)))
            # a sort of raw bits: Generator.permutation may change with numpy's version
            bits = philox_bits(seed, epoch, range(1), self.num_blocks, randomness.SHUFFLE)[0]
            self._shuffles[key] = np.argsort(bits, kind="stable")
        return self._shuffles[key]


# ---- what a model should beat --------------------------------------------------------------------


def frequency_losses(
    counted: np.ndarray, tokens: np.ndarray, vocab_size: int
) -> tuple[float, float]:
    """Mean loss of `tokens` (m,) but the first, nats per token, of who knows how frequent tokens
    are in `counted` (n,), and of who knows how frequent pairs of neighbours are, too: the two marks
    that a training curve should fall below.

    Counts are smoothed, since not every pair has been seen: unigrams by one more of each, bigrams
    by interpolation with them (Witten and Bell 1991: as often as a token was followed by one that
    had not followed it before, it is again). Holds the distinct pairs, never a vocab_size**2 table.
    Raises ValueError for fewer than two tokens or an id outside the vocabulary."""
    for ids in (counted, tokens):
        if ids.ndim != 1 or ids.size < 2:
            raise UserError(
                f"pairs need a flat array of at least 2 tokens, got one of shape {ids.shape}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UserError(
                f"ids run from {ids.min()} to {ids.max()}, outside a vocabulary of {vocab_size}"
            )
    unigram = (np.bincount(counted, minlength=vocab_size) + 1) / (counted.size + vocab_size)
    pairs, seen = np.unique(pairs_of(counted, vocab_size), return_counts=True)
    followed = np.bincount(counted[:-1], minlength=vocab_size)
    different = np.bincount(pairs // vocab_size, minlength=vocab_size)
    wanted = pairs_of(tokens, vocab_size)
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    times = np.where(pairs[place] == wanted, seen[place], 0)
    before, of_next = tokens[:-1], unigram[tokens[1:]]
    total = followed[before] + different[before]
    shares = (times + different[before] * of_next) / np.maximum(total, 1)
    bigram = np.where(total > 0, shares, of_next)
    return float(-np.log(of_next).mean()), float(-np.log(bigram).mean())


def pairs_of(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Neighbours as one number each, in place: there are many."""
    pairs = ids[:-1].astype(np.int64)
    pairs *= vocab_size
    pairs += ids[1:]
    return pairs
