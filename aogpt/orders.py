"""Prediction orders of training, scoring and sampling: which position is predicted at
which step. Each kind is a mode of sample.py; for other modes see sampling/plans.py.

An order s of length T is a permutation of 0..T-1; `order[b, i]` is the position that
sequence b predicts at step i. The distribution over orders is the *formulation*: left
to right gives an autoregressive model, uniform over all T! orders a masked diffusion
model (the paper, section 3). An order is a function of (seed, optimizer step, row of
the global batch): see randomness.py."""

import contextlib
import functools
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .model import inverse_permutation
from .runtime.errors import UserError
from .runtime.randomness import ORDERS, philox_bits, to_uniform
from .runtime.validation import Count, Probability, Seed, check_values, open_regular


class OrderFacts(NamedTuple):
    """The properties of a kind of orders."""

    settings: tuple[str, ...] = ()  # the fields of OrderConfig that it reads
    is_fixed: bool = False  # nothing is drawn: all sequences have one order
    # Every permutation has a positive probability: encoders may be trained with it, and
    # its any-order loss chooses the best checkpoint.
    covers_all: bool = False
    least_block: int = 1  # blocks of one position would be left to right where it is 2


# A new kind is a line here, a case in `orders_at` and help above `OrderConfig.kind`; a
# new setting is a field of OrderConfig with its help above it.
ORDER_KINDS = {
    "l2r": OrderFacts(is_fixed=True),
    "r2l": OrderFacts(is_fixed=True),
    "random": OrderFacts(covers_all=True),
    "fixed_random": OrderFacts(("seed",), is_fixed=True),
    "fixed_blockwise": OrderFacts(("block", "seed"), is_fixed=True, least_block=2),
    "random_blockwise": OrderFacts(("block",), least_block=2),
    "slots": OrderFacts(("block",)),
    "context_l2r": OrderFacts(("share",)),
    "infill": OrderFacts(("share",)),
    "file": OrderFacts(("file",)),
}
BaseKind = Literal[*ORDER_KINDS]  # type: ignore[valid-type]
# A mixture also has the settings of the kind that it mixes in.
MIXABLE = dict.fromkeys(
    setting for kind in ORDER_KINDS.values() for setting in kind.settings
)
ORDER_KINDS["mixture"] = OrderFacts(("l2r_prob", "mixed", *MIXABLE), covers_all=True)
OrderKind = Literal[*ORDER_KINDS]  # type: ignore[valid-type]


@dataclass(frozen=True)
class OrderConfig:
    """A distribution over prediction orders."""

    # l2r, r2l: left to right, right to left. random: uniform. mixture: with probability
    # l2r_prob the kind `mixed`, else random. fixed_random: one permutation for the
    # whole run. fixed_blockwise: blocks left to right, one permutation inside all of
    # them. random_blockwise: blocks left to right, each in a random order (block
    # diffusion, arXiv 2503.09573). slots: blocks in random order, left to right inside
    # (ReFusion, arXiv 2512.13586). context_l2r: a random set of positions first, in
    # ascending order, then the others left to right (after AC-GPT, arXiv 2606.14943).
    # infill: all but one gap in reading order, then the
    # gap, left to right; its length is uniform from 1 to all but a "share" of the
    # positions, then its place. file: one of those in a file.
    kind: OrderKind = "mixture"
    # share of left-to-right sequences, or of `mixed` ones (mixture)
    l2r_prob: Probability = 0.1
    mixed: BaseKind = "l2r"  # in place of l2r (mixture)
    block: Count = 32  # positions in a block (fixed_blockwise, random_blockwise, slots)
    seed: Seed = 0  # seed of the fixed permutation (fixed_random, fixed_blockwise)
    # probability to be in the first set (context_l2r); of the positions,
    # the share that is context at least (infill)
    share: Probability = 0.5
    # a .npy file of integers (M, T), an order per row, all equally probable (file)
    file: str = ""

    def __post_init__(self):
        check_values(self, name="order.{}".format)
        kind = self.base_kind
        if kind == "file" and not self.file:
            raise UserError(
                "order.kind is 'file': name a .npy file of orders with order.file, in "
                "an option as file:file=ORDERS.npy"
            )
        if self.block < ORDER_KINDS[kind].least_block:
            raise UserError(
                "order.block is 1, and blocks of one position are left to right; give "
                "at least 2, or order.kind = 'l2r'"
            )

    @property
    def base_kind(self) -> OrderKind:
        """Return the kind of orders; of a mixture the one that it mixes in."""
        return self.mixed if self.kind == "mixture" else self.kind

    @functools.cached_property
    def as_mixed(self) -> "OrderConfig":
        """Return the orders that a mixture mixes in."""
        return replace(self, kind=self.mixed)

    @property
    def is_of_one_kind(self) -> bool:
        """Return whether all orders are of the `base_kind`, also in a mixture."""
        return self.kind != "mixture" or self.l2r_prob == 1

    @property
    def is_fixed(self) -> bool:
        """Return whether all sequences have one and the same order."""
        return self.is_of_one_kind and ORDER_KINDS[self.base_kind].is_fixed

    @property
    def is_l2r(self) -> bool:
        """Return whether all sequences are read from left to right."""
        return self.is_fixed and self.base_kind == "l2r"

    @property
    def is_any_order(self) -> bool:
        """Return whether every permutation may be drawn."""
        kind = self.base_kind if self.is_of_one_kind else self.kind
        return ORDER_KINDS[kind].covers_all

    @property
    def option(self) -> str:
        """Return these orders as `parse_order` reads them, such as slots:block=8."""
        settings = []
        for name in ORDER_KINDS[self.kind].settings:
            value = getattr(self, name)
            if value != getattr(OrderConfig, name):
                settings.append(f"{name}={value}")
        if not settings:
            return self.kind
        return f"{self.kind}:{','.join(settings)}"

    def check_blocks(self, length: int, sequences: str) -> None:
        """Raise UserError for orders in blocks that exceed sequences of this length.
        sequences: their name for the message."""
        has_blocks = "block" in ORDER_KINDS[self.base_kind].settings
        if has_blocks and self.block > length:
            raise UserError(
                f"order.block {self.block} exceeds {sequences}, {length} tokens; lower "
                "it"
            )


def orders_at(
    config: OrderConfig,
    seed: int,
    step: int,
    rows: range,
    length: int,
    stream: int = ORDERS,
) -> Tensor:
    """Return the orders of the sequences `rows` of the global batch of one step,
    LongTensor (len(rows), length) on the CPU: a pure function of the arguments. stream:
    of `runtime.randomness`."""
    if length < 1 or seed < 0 or step < 0:
        raise UserError(
            f"the length of orders is {length}, their seed {seed}, their step {step}; "
            "give at least 1, 0 and 0"
        )
    B = len(rows)
    identity = torch.arange(length).expand(B, length)
    match config.kind:  # kinds that draw nothing
        case "l2r":
            return identity.clone()
        case "r2l":
            return identity.flip(1)
        case "fixed_random":
            order = _permutation(config.seed, length)
            return order.expand(B, length).clone()
        case "fixed_blockwise":
            order = _fixed_blockwise(config, length)
            return order.expand(B, length).clone()
    # Column 0 is the coin of a mixture, the others are keys of positions. Sorting
    # random keys gives a uniform permutation; ties among 64 bits (probability below T^2
    # / 2^65) go by position. A kind that needs one uniform number for a sequence takes
    # a key's: inside a mixture the coin is known to be small. More columns would change
    # the orders of all kinds.
    bits = philox_bits(seed, step, rows, length + 1, stream)
    coins = bits[:, 0]
    keys = bits[:, 1:]
    if config.kind == "random":
        return _sorted_by(keys)
    if config.kind == "mixture":
        order = _sorted_by(keys)
        is_mixed = torch.from_numpy(to_uniform(coins) < config.l2r_prob)
        mixed_orders = orders_at(
            config.as_mixed, seed, step, rows, length, stream=stream
        )
        return mixed_orders.where(is_mixed[:, None], order)
    uniform = to_uniform(keys)  # (B, T) in [0, 1)
    position = np.arange(length)
    match config.kind:  # kinds that draw
        case "file":
            orders = read_orders(config.file, length)
            chosen = coins % np.uint64(len(orders))
            return torch.from_numpy(orders[chosen.astype(np.int64)])
        case "random_blockwise":
            return _sorted_by(position // config.block + uniform)
        case "slots":
            first_of_block = position - position % config.block
            return _sorted_by(uniform[:, first_of_block])
        case "context_l2r":
            return _sorted_by(uniform >= config.share)
        case "infill":
            return _sorted_by(_in_gap(uniform, config.share))
    raise AssertionError(f"no case for order.kind = {config.kind!r}")


def _sorted_by(keys: np.ndarray) -> Tensor:
    """Return the positions of each row by ascending key, ties by position: (B, T)."""
    if keys.dtype == bool:
        keys = keys.astype(np.int8)  # which a stable sort sorts by radix
    return torch.from_numpy(keys.argsort(axis=1, kind="stable"))


def _in_gap(uniform: np.ndarray, share: float) -> np.ndarray:
    """Mark a gap of each row, bool (B, T): its length is uniform from 1 to (1 - share)
    T, its place uniform among those where it fits."""
    length = uniform.shape[1]
    longest = max(1, int((1 - share) * length))
    sizes = 1 + (uniform[:, :1] * longest).astype(np.int64)
    starts = (uniform[:, -1:] * (length - sizes + 1)).astype(np.int64)
    position = np.arange(length)
    return (position >= starts) & (position < starts + sizes)


def _permutation(seed: int, length: int, draw: int = 0) -> Tensor:
    """Return one uniformly random permutation (length,)."""
    (bits,) = philox_bits(seed, draw, range(1), length)
    return torch.from_numpy(bits.argsort(kind="stable"))


def _fixed_blockwise(config: OrderConfig, length: int) -> Tensor:
    """Return one order (length,) with blocks left to right and the same permutation
    inside each of them."""
    # The identity inside blocks would be left to right, which small blocks draw often.
    for draw in itertools.count():
        inside = _permutation(config.seed, config.block, draw)
        if inside.diff().min() < 0:
            break
    order = (torch.arange(0, length, config.block)[:, None] + inside).flatten()
    return order[order < length]  # the last block may be shorter


def read_orders(file: str, length: int) -> np.ndarray:
    """Return the orders in a .npy file, int64 (M, length). Of longer orders it takes
    the positions below `length`."""
    version = None
    with contextlib.suppress(OSError):  # which reading it will raise
        status = os.stat(file)
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return _read_orders(file, length, version)


@functools.lru_cache(maxsize=4)
def _read_orders(file: str, length: int, version: tuple | None) -> np.ndarray:
    """Return what `read_orders` does. version: of the file, which may be written again
    under its name."""
    try:
        with open_regular(Path(file)) as stream:
            orders = np.load(stream, allow_pickle=False)
    except Exception as error:  # NumPy reads the header as Python's own parser does
        raise UserError(
            f"order.file {file} cannot be read as a .npy file: {error}"
        ) from None
    is_table = isinstance(orders, np.ndarray) and orders.dtype.kind in "iu"
    is_table = is_table and orders.ndim == 2 and orders.size > 0
    if not is_table or not (np.sort(orders) == np.arange(orders.shape[1])).all():
        raise UserError(
            f"order.file {file} does not hold integers (M, T), of which each row is a "
            "permutation of 0..T-1"
        )
    count, longest = orders.shape
    if longest < length:
        raise UserError(
            f"order.file {file} holds orders of {longest}, not {length} positions"
        )
    return orders[orders < length].reshape(count, length).astype(np.int64)


@functools.cache
def parse_order(text: str, option: str) -> OrderConfig:
    """Return the distribution that `kind` or `kind:setting=value,...` means, such as
    slots:block=8."""
    types = setting_types(text.partition(":")[0])
    kind, values = parse_settings(text, types, option)
    try:
        return OrderConfig(kind, **values)
    except UserError as error:
        raise UserError(f"{option} {text}: {error}") from None


def setting_types(kind: str) -> dict[str, type]:
    """Return the types of the settings of a kind of orders, by name."""
    settings = ORDER_KINDS.get(kind, OrderFacts()).settings
    return {setting: type(getattr(OrderConfig, setting)) for setting in settings}


def parse_settings(text: str, types: dict[str, type], option: str) -> tuple:
    """Return the name and the settings, a dict, of a text `name:setting=value,...`.
    types: the type of each setting."""
    name, _, written = text.partition(":")
    values = {}
    for setting in written.split(",") if written else ():
        key, _, value = setting.partition("=")
        if key in values:
            raise UserError(f"{option} {text}: {key} is given twice")
        try:
            values[key] = types[key](value)
        except (KeyError, ValueError):
            names = [f"{one} ({kind.__name__})" for one, kind in types.items()]
            raise UserError(
                f"{option} {text}: {setting!r} is not a setting of {name}; it has "
                f"{', '.join(names) or 'none'}"
            ) from None
    return name, values


@dataclass
class Roles:
    """The predicted tokens and the given ones of B sequences; other tokens are
    padding."""

    predicted: Tensor  # BoolTensor (B, T)
    given: Tensor  # the same, prompts and ends
    end: Tensor | None = None  # the same, the ends that are given; None: there are none

    @classmethod
    def of(cls, roles: Tensor) -> "Roles":
        """Return the roles that a dataset holds as numbers (B, T): 0 predicted, 1
        prompt, 2 padding, 3 an end that is given."""
        end = roles == 3
        return cls(roles == 0, (roles == 1) | end, end)

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens of each row without padding, LongTensor (B,)."""
        return (self.predicted | self.given).sum(dim=1)

    def first_given(self, order: Tensor) -> Tensor:
        """Return the orders (B, T) with a given end first; then the prompt, ascending;
        then `order`; then padding."""
        T = order.shape[1]
        place = inverse_permutation(order)
        place = torch.where(self.given, torch.arange(T, device=order.device) - T, place)
        if self.end is not None:  # all others know how long the record is
            place = place.masked_fill(self.end, -T - 1)
        return torch.where(self.predicted | self.given, place, place + T).argsort(dim=1)
