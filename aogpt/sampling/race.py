"""A draw from weights and one uniform number, which rounding hardly ever changes.

Shapes: N rows, V ids."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # ids whose weights are added up first
RACES = 4  # the salts of `fresh_uniforms` from this one on are used here

# splitmix64 (Steele et al. 2014): the increment, 2**64 over the golden ratio, and the factors of
# the two mixing steps; minus 2**64, because the integers of torch are signed. Products wrap around.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row with probability proportional to its weight: (N, V) >= 0, (N,) ->
    LongTensor (N,).

    A race: id i arrives at the time E_i / weight, where E_i is exponential, a hash of the row's
    uniform number. The first one is drawn. (-log of the times are log weights with Gumbel noise.)
    Rounding of the weights, which varies with the batch, changes only races that end in a
    tie up to rounding; in an inverse CDF it would add up over the ids. Blocks race first, then the
    ids of the first block: V / 64 + 64 numbers instead of V."""
    return race(weights, uniforms)[0]


def fresh_uniforms(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Other uniform numbers (53 bits), a hash of the bits of these and of `salt`, which broadcast:
    the output function of splitmix64."""
    return _hash(uniforms, salt).double() * 2.0**-53


def _hash(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """The 53 bits of `fresh_uniforms`."""
    z = uniforms.view(torch.int64) * INCREMENT + salt
    z = z.bitwise_xor_(_shift_right(z, 30)).mul_(FIRST_FACTOR)
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(SECOND_FACTOR)
    return _shift_right(z.bitwise_xor_(_shift_right(z, 31)), 11)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # a shift of int64 copies the sign


def race(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The index (N,) that `draw` draws, and the total weight (N, 1)."""
    if extra := -weights.shape[1] % BLOCK:
        weights = F.pad(weights, (0, extra))
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    count = blocks.shape[1]
    # -E: the log of odd multiples of 2^-53, so that it is never 0, nor infinite.
    salts = torch.arange(RACES, RACES + BLOCK + count, device=weights.device)
    noise = (
        _hash(uniforms[:, None], salts).bitwise_or_(1).double().mul_(2.0**-53).log_()
    )
    block = (noise[:, BLOCK:] / sums).argmax(dim=-1, keepdim=True)
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1)
    column = (noise[:, :BLOCK] / within).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + column).squeeze(1), sums.sum(dim=-1, keepdim=True)
