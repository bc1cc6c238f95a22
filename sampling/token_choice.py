"""Token choice: from logits and one uniform number to a token.

A categorical draw must not lose probability mass: Gumbel noise of float32 cannot reach improbable tokens and silently
lowers the temperature (Zheng et al. 2024). By default a token is therefore drawn without any noise: one uniform number
of 53 bits is looked up in the cumulative distribution, summed in float64.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ACCEPTED, CORRECTED, REDRAWN = 1, 2, 3  # what `fresh_uniforms` of a token's uniform number are for


@dataclass(frozen=True)
class TokenChoice:
    """How a token is drawn from the model's distribution: temperature first, then top-k, then the nucleus."""

    temperature: float = 1.0
    """0 (or less than 1e-10) takes the most probable token."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass reaches top_p (the nucleus), the lower id first among equals;
    0 keeps the most probable one."""
    top_k: int | None = None
    """Keep the top_k most probable tokens."""
    noise: Literal["float64", "float32", "bfloat16"] = "float64"
    """float64: the exact draw. float32, bfloat16: Gumbel noise of that precision, as many published samplers use it,
    which lowers the temperature; for comparison with them."""

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature is {self.temperature}; give 0 (greedy) or a positive number"
            )
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number from 0 to 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; keep at least 1 token")
        if self.noise not in ("float64", "float32", "bfloat16"):
            raise ValueError(
                f"noise is {self.noise!r}; it must be 'float64', 'float32' or 'bfloat16'"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-10 or self.top_p == 0 or self.top_k == 1


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: TokenChoice) -> Tensor:
    """Draw one token a row.

    The nucleus is sampled without being sorted: a token is drawn from all, and one look at the mass ranked before it
    tells whether it belongs to the nucleus. If it does not, as happens with probability 1 - top_p at most, it is drawn
    again from the nucleus proper. That, too, is exact: P(i) + (1 - P(nucleus)) P(i) / P(nucleus) = P(i) / P(nucleus).
    Its uniform number is a new one, made of the bits of the first: where in its share the first one fell would depend
    on the last bits of the logits, and these on the batch.

    Args:
        logits: (N, V). uniforms: float64 (N,) in [0, 1).

    Returns: LongTensor (N,).
    """
    if choice.greedy:
        return logits.argmax(dim=-1)
    probs = _tempered(logits, choice)
    if choice.noise != "float64":
        return _gumbel_argmax(
            _truncated(probs, choice.top_p), uniforms, getattr(torch, choice.noise)
        )
    drawn, total = _invert(probs, uniforms)
    if choice.top_p == 1:
        return drawn
    wanted = choice.top_p * total
    outside, again = _outside_nucleus(probs, drawn, wanted), fresh_uniforms(uniforms, REDRAWN)
    if not _may_branch(probs):
        return torch.where(outside, draw(_nucleus(probs, wanted), again), drawn)
    for row in outside.nonzero().flatten().tolist():
        drawn[row] = _draw_again(probs[row], drawn[row], wanted[row], again[row])
    return drawn


def probabilities(logits: Tensor, choice: TokenChoice) -> Tensor:
    """The distribution that `choose_tokens` draws from: float64 (N, V), rows summing to 1."""
    if choice.greedy:
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(
            1, logits.argmax(dim=-1, keepdim=True), 1.0
        )
    probs = _truncated(_tempered(logits, choice), choice.top_p).double()
    return probs / probs.sum(dim=-1, keepdim=True)


def fresh_uniforms(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Other uniform numbers (53 bits), a pure function of the bits of these and of `salt`, which broadcast."""
    z = (
        uniforms.view(torch.int64) * -7046029254386353131 + salt
    )  # the golden ratio, then the mixes of splitmix64
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    return _shifted(z ^ _shifted(z, 31), 11).double() * 2.0**-53


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row with probability proportional to its weight: (N, V) >= 0, (N,) -> LongTensor (N,)."""
    return _invert(weights, uniforms)[0]


def _may_branch(x: Tensor) -> bool:
    """Whether to look at values and do only what they need: on a GPU that would wait for it, compiled it would break
    the graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts in copies of the sign


def _tempered(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Probabilities (N, V), float32 or float64, zero outside the top k. Not normalised again after that cut."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    probs = (logits if choice.temperature == 1 else logits / choice.temperature).softmax(dim=-1)
    if choice.top_k is None or choice.top_k >= probs.shape[-1]:
        return probs
    least = probs.topk(choice.top_k, dim=-1).values[:, -1:]
    missing = choice.top_k - (probs > least).sum(dim=-1, keepdim=True)
    return _cut(probs, least, missing)


def _cut(probs: Tensor, least: Tensor, ties: Tensor) -> Tensor:
    """Keep what is above `least` (N, 1), and of what equals it the first `ties` (N, 1)."""
    equal = probs == least
    kept = (probs > least) | (equal & (equal.cumsum(dim=-1) <= ties))
    return torch.where(kept, probs, 0)


def _compare(relation, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """relation(a, b) as 0.0 and 1.0: a CPU multiplies by these several times faster than it selects by booleans."""
    return relation(a, b, out=torch.empty_like(like))


def _mass_above(probs: Tensor, least: Tensor) -> Tensor:
    """Mass (N, 1), float64, of the tokens more probable than `least` (N, 1)."""
    return (
        _compare(torch.gt, probs, least, probs)
        .mul_(probs)
        .sum(dim=-1, keepdim=True, dtype=torch.float64)
    )


def _missing(probs: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
    """How many tokens of probability `least` the nucleus holds beside the more probable ones; <= 0: not even those."""
    return ((wanted - _mass_above(probs, least)) / least.double()).ceil()


def _outside_nucleus(probs: Tensor, token: Tensor, wanted: Tensor) -> Tensor:
    """BoolTensor (N,): whether the mass ranked before the token of each row reaches `wanted` (N, 1)."""
    p = probs.gather(1, token[:, None])
    missing, equal = _missing(probs, p, wanted), _compare(torch.eq, probs, p, probs)
    if _may_branch(probs) and float(equal.sum()) == len(probs):
        return (missing <= 0).squeeze(1)  # no ties
    ids = torch.arange(probs.shape[-1], device=probs.device, dtype=probs.dtype)
    earlier = _compare(torch.lt, ids, token[:, None].to(probs.dtype), probs)
    return (earlier.mul_(equal).sum(dim=-1, keepdim=True) >= missing).squeeze(1)


def _draw_again(probs: Tensor, rejected: Tensor, wanted: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the nucleus of one row (V,) of which a token outside it is known: only what is at least as probable as
    that token, a small part of the vocabulary, has to be sorted."""
    ids = (probs >= probs[rejected]).nonzero().squeeze(1)
    ranked, place = probs[ids].sort(descending=True, stable=True)
    cumulative = ranked.double().cumsum(dim=0)
    kept = torch.where(cumulative - ranked < wanted, ranked, 0)
    return ids[
        draw(torch.empty_like(kept).scatter_(0, place, kept).unsqueeze(0), uniform.unsqueeze(0))[0]
    ]


def _nucleus(probs: Tensor, wanted: Tensor) -> Tensor:
    """Zero outside the nucleus: the tokens before which, ranked by falling probability, less than `wanted` is reached.

    The least probability kept is found by bisection. Floats that are not negative are ordered as their bits are, so
    bisecting the bits ends at the exact value after 31 (float32) or 63 halvings, without a sort and for all rows alike.
    """
    bits, count = (torch.int32, 31) if probs.dtype == torch.float32 else (torch.int64, 63)
    high = probs.amax(dim=-1, keepdim=True).view(bits)  # the mass above `high` stays below `wanted`
    low = torch.full_like(high, -1)  # that above `low` does not
    for _ in range(count):
        middle = low + (high - low + 1) // 2
        enough = _mass_above(probs, middle.view(probs.dtype)) < wanted
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    least = high.view(probs.dtype)
    return _cut(probs, least, _missing(probs, least, wanted))


def _truncated(probs: Tensor, top_p: float) -> Tensor:
    return (
        probs
        if top_p == 1
        else _nucleus(probs, top_p * probs.sum(dim=-1, keepdim=True, dtype=torch.float64))
    )


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Look uniforms up in the cumulative weights, first among blocks of them, then in the block: the index (N,), and
    the total weight (N, 1)."""
    size = math.gcd(weights.shape[-1], 64)
    blocks = weights.unflatten(-1, (-1, size))
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    block, point = _look_up(ends, uniforms.unsqueeze(-1) * ends[:, -1:])
    before = ends.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0)
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, size)).squeeze(1).double()
    column, _ = _look_up(before + within.cumsum(dim=-1), point)
    return (block * size + column).squeeze(1), ends[:, -1:]


def _look_up(cumulative: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (N, 1) whose cumulative weight exceeds the point (N, 1); and the point, moved below the last one
    if rounding put it there, so that nothing of weight 0 is ever taken. Some index where weights are not numbers."""
    last = cumulative[:, -1:]
    point = torch.minimum(point, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, point, right=True).clamp(
        max=cumulative.shape[-1] - 1
    ), point


def _gumbel_argmax(weights: Tensor, uniforms: Tensor, dtype: torch.dtype) -> Tensor:
    """The index of the largest log weight plus Gumbel noise, both rounded to `dtype`, as are the noise's uniforms."""
    salt = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    bits = {torch.float32: 24, torch.bfloat16: 8}[dtype]  # what torch.rand draws in these types
    noise = (fresh_uniforms(uniforms[:, None], salt) * 2**bits).floor() * 2.0**-bits
    noise = -(-noise.to(dtype).log()).log()
    noise = noise.clamp(
        min=torch.finfo(dtype).min
    )  # a uniform of 0: not minus infinity, which means cut off
    return (weights.log().to(dtype) + noise).argmax(dim=-1)
