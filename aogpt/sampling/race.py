"""A draw from weights and one uniform number.

The same sample shall come out of every batch, and batches round the weights
differently. A cumulative sum (inverse CDF) adds rounding up over all ids, and may then
draw another one. In a race every id has a time of its own, and the first one wins:
rounding changes only races that end in a tie up to rounding.

Shapes: N rows, V ids, K blocks of ids."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # ids whose weights are added up first
RACES = 4  # the salts of `fresh_uniforms` from this one on are used here

# splitmix64 (Steele et al. 2014): the increment, 2**64 over the golden ratio, and the
# factors of the two mixing steps; minus 2**64, because torch's integers are signed.
# Products wrap around.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row with probability proportional to its weight: (N, V) >= 0,
    (N,) -> LongTensor (N,).

    A race: id i arrives at the time E_i / weight, where E_i is exponential, a hash of
    the row's uniform number. The first one is drawn. (-log of the times are log weights
    with Gumbel noise.) Blocks race first, then the ids of the first block: V / 64 + 64
    numbers instead of V."""
    index, _ = race(weights, uniforms)
    return index


def fresh_uniforms(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Return other uniform numbers (53 bits), a hash of the bits of these and of
    `salt`, which broadcast: the output function of splitmix64."""
    bits = _hash(uniforms, salt)
    return bits.double() * 2.0**-53


def _hash(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Return the 53 bits of `fresh_uniforms`."""
    bits = uniforms.view(torch.int64)
    z = bits * INCREMENT
    z = z + salt  # one copy for each salt
    # A shift of int64 copies the sign from the left: the masks keep the other bits.
    shifted = z >> 30
    shifted.bitwise_and_(2**34 - 1)
    z.bitwise_xor_(shifted)
    z.mul_(FIRST_FACTOR)
    shifted = z >> 27
    shifted.bitwise_and_(2**37 - 1)
    z.bitwise_xor_(shifted)
    z.mul_(SECOND_FACTOR)
    shifted = z >> 31
    shifted.bitwise_and_(2**33 - 1)
    z.bitwise_xor_(shifted)
    shifted = z >> 11
    return shifted.bitwise_and_(2**53 - 1)


def race(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index (N,) that `draw` draws, and the total weight (N, 1), float64."""
    V = weights.shape[1]
    missing = -V % BLOCK
    if missing:
        weights = F.pad(weights, (0, missing))
    blocks = weights.unflatten(1, (-1, BLOCK))  # (N, K, BLOCK)
    block_sums = blocks.sum(dim=-1, dtype=torch.float64)  # (N, K)
    K = blocks.shape[1]

    # 1. Minus an exponential number for each id of a block and for each block: the log
    #    of odd multiples of 2^-53, so that it is never 0, nor infinite.
    last = RACES + BLOCK + K
    salts = torch.arange(RACES, last, device=uniforms.device)
    noise = _hash(uniforms[:, None], salts)
    noise = noise.bitwise_or_(1)
    noise = noise.double()
    noise.mul_(2.0**-53)
    noise.log_()
    id_noise = noise[:, :BLOCK]
    block_noise = noise[:, BLOCK:]

    # 2. The first block.
    scores = block_noise / block_sums
    block = scores.argmax(dim=-1, keepdim=True)  # (N, 1)

    # 3. The first id of that block.
    index = block.unsqueeze(-1)
    index = index.expand(-1, 1, BLOCK)
    weights = blocks.gather(1, index)
    weights = weights.squeeze(1)  # (N, BLOCK)
    scores = id_noise / weights
    column = scores.argmax(dim=-1, keepdim=True)  # (N, 1)

    drawn = block * BLOCK + column
    drawn = drawn.squeeze(1)
    total = block_sums.sum(dim=-1, keepdim=True)
    return drawn, total
