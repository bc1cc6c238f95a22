"""Prediction orders: which position is predicted at which step.

An order sigma of length T is a permutation of the positions 0..T-1; `order[b, i]` is the position
that sequence b predicts at step i. The distribution over orders is the *formulation* axis of the
project: left-to-right gives an autoregressive model, uniform over all T! orders gives an any-order
model, which is a masked diffusion model (the paper, section 3).

Randomness is counter-based: the order of a sequence is a function of (seed, step, index in the
global batch) and of nothing else, so neither resuming nor the number of processes can change it.
"""

import functools
import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from model import inverse_permutation
from runtime.errors import UserError
from runtime.randomness import philox_bits, to_uniform
from runtime.validation import Count, Probability, Seed, Table, check_values, read_bounded

OrderKind = Literal[
    "l2r",
    "r2l",
    "random",
    "mixture",
    "fixed_random",
    "fixed_blockwise",
    "random_blockwise",
    "slots",
    "context_l2r",
    "random_l2r",
    "sliding",
    "file",
]
ORDER_SETTINGS = {  # fields of OrderConfig that a kind reads besides `kind`
    "l2r": (),
    "r2l": (),
    "random": (),
    "mixture": ("l2r_prob",),
    "fixed_random": ("seed",),
    "fixed_blockwise": ("block", "seed"),
    "random_blockwise": ("block",),
    "slots": ("block",),
    "context_l2r": ("share",),
    "random_l2r": ("share",),
    "sliding": ("window",),
    "file": ("file",),
}
FIXED = ("l2r", "r2l", "fixed_random", "fixed_blockwise")  # nothing is drawn


@dataclass(frozen=True)
class OrderConfig(Table):
    """A distribution over prediction orders."""

    kind: OrderKind = "mixture"
    """l2r, r2l: left to right, right to left; random: uniform, drawn per sequence; mixture: l2r
    with probability l2r_prob, else random; fixed_random: one permutation for the whole run;
    fixed_blockwise: blocks from left to right, one permutation inside every block, which is not
    left to right (of a sequence shorter than a block what is left of it); random_blockwise: blocks
    from left to right, each in a random order of its own (block diffusion, arXiv 2503.09573);
    slots: blocks in random order, left to right inside them (ReFusion, arXiv 2512.13586);
    context_l2r: a random set of positions first, in ascending order, then the others left to right
    (after AC-GPT, arXiv 2606.14943, where that set is given); random_l2r: the same, but that set in
    random order (Eso-LM, arXiv 2506.01928); sliding: always one of the first `window` positions
    that are left, all equally probable (after Set Diffusion, arXiv 2607.01775, whose windows are of
    sets); file: one of those in a file."""
    l2r_prob: Probability = 0.1
    """Share of left-to-right sequences (mixture only)."""
    block: Count = 32
    """Positions in a block (fixed_blockwise, random_blockwise and slots only)."""
    seed: Seed = 0
    """Seed of the fixed permutation (fixed_random and fixed_blockwise only)."""
    share: Probability = 0.5
    """Probability of a position to be in the set that comes first (context_l2r and random_l2r
    only)."""
    window: Count = 8
    """Positions that the next one is among (sliding only)."""
    file: str = ""
    """A NumPy file (.npy) of integers (M, T), an order in every row, of which a sequence has any,
    all equally probable (file only)."""

    def __post_init__(self):
        check_values(self, lambda field: f"order.{field}")
        if self.kind == "file" and not self.file:
            raise UserError("order.kind is 'file': name a .npy file of orders with order.file")
        if self.kind in ("fixed_blockwise", "random_blockwise") and self.block == 1:
            raise UserError(
                "order.block is 1, and blocks of one position are left to right; give at least 2, "
                "or order.kind = 'l2r'"
            )

    @property
    def is_fixed(self) -> bool:
        """All sequences have one and the same order: nothing is drawn."""
        return self.kind in FIXED

    def check_length(self, length: int) -> None:
        """Raise ValueError for blocks that are longer than sequences of this length."""
        if "block" in ORDER_SETTINGS[self.kind] and self.block > length:
            raise UserError(
                f"order.block ({self.block}) exceeds model.block_size ({length}); lower it"
            )


def orders_at(config: OrderConfig, seed: int, step: int, rows: range, length: int) -> torch.Tensor:
    """Orders of the sequences `rows` of the global batch of one step.

    Args:
        config: the distribution.
        seed, step: of the run; the result is a pure function of (config, seed, step, row, length).
        rows: indices in the global batch.
        length: T, positions in a sequence.

    Returns: LongTensor (len(rows), T) of positions, on the CPU.
    """
    if length < 1:
        raise UserError(f"an order needs at least one position, but length is {length}")
    identity = torch.arange(length).expand(len(rows), length)
    if config.kind == "l2r":
        return identity.clone()
    if config.kind == "r2l":
        return identity.flip(1)
    if config.kind == "fixed_random":
        return _permutation(config.seed, length).expand(len(rows), length).clone()
    if config.kind == "fixed_blockwise":
        return _blockwise(config, length).expand(len(rows), length).clone()
    # Sorting random keys gives a uniform permutation. Ties among 64-bit keys (probability below
    # T^2 / 2^65) are broken by position. Column 0 is the coin of a mixture.
    bits = philox_bits(seed, step, rows, length + 1)
    order = torch.from_numpy(bits[:, 1:].argsort(axis=1, kind="stable"))
    if config.kind == "random":
        return order
    if config.kind == "mixture":
        coin = torch.from_numpy(to_uniform(bits[:, :1]))
        return torch.where(coin < config.l2r_prob, identity, order)
    if config.kind == "file":
        orders = read_orders(config.file, length)
        return torch.from_numpy(orders[(bits[:, 0] % np.uint64(len(orders))).astype(np.int64)])
    if config.kind == "sliding":
        return _sliding(to_uniform(bits[:, 1:]), config.window)
    if config.kind in ORDER_KEYS:
        keys = ORDER_KEYS[config.kind](config, to_uniform(bits[:, 1:]))
        return torch.from_numpy(keys.argsort(axis=1, kind="stable"))
    # Not reached, as OrderConfig knows these kinds only; one that is added is not to be forgotten.
    raise NotImplementedError(f"orders of kind {config.kind!r}")


def sample_orders(
    config: OrderConfig, batch_size: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw `batch_size` orders from `config`, for code that has a generator rather than steps.

    Args:
        config: the distribution.
        batch_size, length: B and T.
        generator: source of randomness; it is advanced by one draw.

    Returns: LongTensor (B, T) on the CPU.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return orders_at(config, seed, 0, range(batch_size), length)


@dataclass
class Roles:
    """Which tokens of B sequences are predicted, and which are given before all others: those of
    records (data/records.py)."""

    predicted: torch.Tensor
    """BoolTensor (B, T)."""
    given: torch.Tensor
    """BoolTensor (B, T). What is neither is absent: positions past the end of a record."""

    @classmethod
    def of(cls, roles: torch.Tensor) -> "Roles":
        """From the numbers that a data set has for its tokens, (B, T): 0 predicted, 1 given, 2
        absent."""
        return cls(roles == 0, roles == 1)

    @property
    def lengths(self) -> torch.Tensor:
        """LongTensor (B,), the tokens of each record."""
        return (self.predicted | self.given).sum(dim=1)

    def to(self, device) -> "Roles":
        return Roles(self.predicted.to(device), self.given.to(device))

    def first_given(self, order: torch.Tensor) -> torch.Tensor:
        """The orders (B, T) with given positions first, in ascending order, then those that are
        predicted as they come in `order`, then those that are absent."""
        T = order.shape[1]
        # The place of a position: that in `order`, but that of given ones is before all those.
        place = inverse_permutation(order)
        positions = torch.arange(T, device=order.device)
        place = torch.where(self.given, positions - T, place)
        return torch.where(self.predicted | self.given, place, place + T).argsort(dim=1)


# What positions are sorted by, of uniform random numbers for each, (B, T) -> (B, T).


def _blockwise_keys(config: OrderConfig, uniform: np.ndarray) -> np.ndarray:
    return np.arange(uniform.shape[1]) // config.block + uniform


def _slot_keys(config: OrderConfig, uniform: np.ndarray) -> np.ndarray:
    """A block has the random number of its first position; equals stay from left to right."""
    positions = np.arange(uniform.shape[1])
    return uniform[:, positions - positions % config.block]


def _context_keys(config: OrderConfig, uniform: np.ndarray) -> np.ndarray:
    return (uniform >= config.share).astype(np.int8)  # equals stay from left to right


def _random_first_keys(config: OrderConfig, uniform: np.ndarray) -> np.ndarray:
    return np.where(uniform < config.share, uniform, 1.0)


ORDER_KEYS = {
    "random_blockwise": _blockwise_keys,
    "slots": _slot_keys,
    "context_l2r": _context_keys,
    "random_l2r": _random_first_keys,
}


def _sliding(uniform: np.ndarray, window: int) -> torch.Tensor:
    """Step by step: a window of the first positions left, of which one is drawn and replaced by the
    next one to come, so that it stays sorted."""
    B, T = uniform.shape
    order, rows = np.empty((B, T), np.int64), np.arange(B)
    left = np.tile(np.arange(T), (B, 1))  # the positions left, ascending; then those taken
    for step in range(T):
        size = min(window, T - step)
        drawn = (uniform[:, step] * size).astype(np.int64)
        order[:, step] = left[rows, drawn]
        # Move what stands before the one drawn one place on, and begin after it.
        moves = np.arange(1, size) <= drawn[:, None]
        left[:, 1:size] = np.where(moves, left[:, : size - 1], left[:, 1:size])
        left = left[:, 1:]
    return torch.from_numpy(order)


@functools.lru_cache(maxsize=4)
def read_orders(file: str, length: int) -> np.ndarray:
    """The orders in a file, int64 (M, length); for sequences that are shorter than they, those of
    their positions. Raises ValueError where there are none."""
    try:
        # From memory, where a header that claims more than there is takes none.
        orders = np.load(io.BytesIO(read_bounded(Path(file), 2**30)), allow_pickle=False)
    except Exception as error:  # NumPy reads the header as Python's own parser does
        raise UserError(f"order.file {file} cannot be read as a .npy file: {error}") from None
    of_integers = isinstance(orders, np.ndarray) and orders.dtype.kind in "iu"
    if not of_integers or orders.ndim != 2 or not len(orders):
        raise UserError(f"order.file {file} does not hold integers (M, T), an order a row")
    count, longest = orders.shape
    if longest < length:
        raise UserError(
            f"order.file {file} holds orders of {longest} positions, but sequences have {length}"
        )
    if not (np.sort(orders, axis=1) == np.arange(longest)).all():
        raise UserError(f"order.file {file} has a row that is no permutation of 0..{longest - 1}")
    return orders[orders < length].reshape(count, length).astype(np.int64)


def _permutation(seed: int, length: int, draw: int = 0) -> torch.Tensor:
    return torch.from_numpy(philox_bits(seed, draw, range(1), length)[0].argsort(kind="stable"))


def _blockwise(config: OrderConfig, length: int) -> torch.Tensor:
    # The identity inside blocks would be left to right, which small blocks draw often.
    draws = (_permutation(config.seed, config.block, draw) for draw in itertools.count())
    inside = next(p for p in draws if p.diff().min() < 0)
    starts = torch.arange(0, length, config.block)
    order = (starts[:, None] + inside).flatten()
    return order[order < length]  # the last block may be shorter
