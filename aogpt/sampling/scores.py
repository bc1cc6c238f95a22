"""Scores by which a model chooses the positions to unmask first. To add one: a
function, and a row of `SCORES`; all scripts and the playground then have it.

Shapes: N positions, V vocabulary."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def confidence(log_probs: Tensor) -> Tensor:
    """Return the log-probability of the likeliest token, (N, V) -> (N,)."""
    return log_probs.amax(dim=-1)


def minus_entropy(log_probs: Tensor) -> Tensor:
    """Return minus the entropy, nats, (N, V) -> (N,)."""
    # 0 times minus infinity is not a number, but 0 times the least number is 0.
    least = torch.finfo(torch.float).min
    probs = log_probs.exp()
    return (probs * log_probs.clamp(min=least)).sum(dim=-1)


def margin(log_probs: Tensor) -> Tensor:
    """Return the likeliest probability minus the second, (N, V) -> (N,)."""
    highest = log_probs.topk(2, dim=-1).values.exp()
    return highest[:, 0] - highest[:, 1]


def least_log_prob(threshold: float) -> float:
    """Return the logarithm of a least probability, which may be 0."""
    if threshold == 0:
        return -math.inf
    return math.log(threshold)


@dataclass(frozen=True)
class ScoreRule:
    """A score of positions: the highest one is unmasked first."""

    function: Callable[[Tensor], Tensor]  # of log-probabilities, (N, V) -> (N,)
    title: str  # of this order in the playground
    # The least score that passes a threshold, as a user gives it.
    least: Callable[[float], float] = lambda threshold: threshold
    largest_threshold: float = 1.0


SCORES = {
    "confidence": ScoreRule(
        confidence, title="most confident first", least=least_log_prob
    ),
    "entropy": ScoreRule(
        minus_entropy,
        title="least entropy first",
        least=lambda threshold: -threshold,
        largest_threshold=math.inf,
    ),
    "margin": ScoreRule(margin, title="largest margin first"),
}
Score = Literal[*SCORES]  # type: ignore[valid-type]


def rule_of(name: str) -> ScoreRule:
    """Return the rule of a score. The oracle's thresholds are probabilities, as those
    of confidence."""
    return SCORES["confidence" if name == "oracle" else name]
