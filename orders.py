"""Prediction orders: which position is predicted at which step.

An order sigma of length T is a permutation of the positions 0..T-1; `order[b, i]` is the position
that sequence b predicts at step i. The distribution over orders is the *formulation* axis of the
project: left-to-right gives an autoregressive model, uniform over all T! orders gives an any-order
model, which is a masked diffusion model (the paper, section 3).

Randomness is counter-based: the order of a sequence is a function of (seed, step, index in the
global batch) and of nothing else, so neither resuming nor the number of processes can change it.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch

from runtime.randomness import philox_bits, to_uniform
from runtime.ranges import Count, Probability, Seed, Table, check_values

OrderKind = Literal["l2r", "random", "mixture", "fixed_random", "fixed_blockwise"]
ORDER_SETTINGS = {  # fields of OrderConfig that a kind reads besides `kind`
    "l2r": (),
    "random": (),
    "mixture": ("l2r_prob",),
    "fixed_random": ("seed",),
    "fixed_blockwise": ("block", "seed"),
}


@dataclass(frozen=True)
class OrderConfig(Table):
    """A distribution over prediction orders."""

    kind: OrderKind = "mixture"
    """l2r; random: uniform, drawn per sequence; mixture: l2r with probability l2r_prob, else
    random; fixed_random: one permutation for the whole run; fixed_blockwise: blocks from left to
    right, one permutation inside every block, which is not left to right."""
    l2r_prob: Probability = 0.1
    """Share of left-to-right sequences (mixture only)."""
    block: Count = 32
    """Positions in a block (fixed_blockwise only)."""
    seed: Seed = 0
    """Seed of the fixed permutation (fixed_random and fixed_blockwise only)."""

    def __post_init__(self):
        check_values(self, lambda field: f"order.{field}")
        if self.kind == "fixed_blockwise" and self.block == 1:
            raise ValueError(
                "order.block is 1, and blocks of one position are left to right; give at least 2, "
                "or order.kind = 'l2r'"
            )

    @property
    def is_fixed(self) -> bool:
        """All sequences have one and the same order: nothing is drawn."""
        return self.kind in ("l2r", "fixed_random", "fixed_blockwise")


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
        raise ValueError(f"an order needs at least one position, but length is {length}")
    identity = torch.arange(length).expand(len(rows), length)
    if config.kind == "l2r":
        return identity.clone()
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


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """The step at which each position is predicted, (B, T) -> (B, T):
    `inverse[b, order[b, i]] == i`."""
    steps = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, steps)


def _permutation(seed: int, length: int, draw: int = 0) -> torch.Tensor:
    return torch.from_numpy(philox_bits(seed, draw, range(1), length)[0].argsort(kind="stable"))


def _blockwise(config: OrderConfig, length: int) -> torch.Tensor:
    # The identity inside blocks would be left to right, which small blocks draw often.
    draws = (_permutation(config.seed, config.block, draw) for draw in itertools.count())
    inside = next(p for p in draws if p.diff().min() < 0)
    starts = torch.arange(0, length, config.block)
    order = (starts[:, None] + inside).flatten()
    return order[order < length]  # the last block may be shorter
