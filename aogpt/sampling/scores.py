"""Scores by which a model chooses the positions to unmask first. To add one: a
function, and a row of `SCORES`; all scripts then have it.

Shapes: N positions, V vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
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


def target_log_prob(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of the targets (N,), (N, V) -> (N,)."""
    index = targets.to(log_probs.device)[:, None]
    return log_probs.gather(1, index).squeeze(1)


@dataclass(frozen=True)
class ScoreRule:
    """A score of positions: the highest one is unmasked first."""

    function: Callable[..., Tensor]  # of log-probabilities, (N, V) -> (N,)
    # The least score that passes a threshold, as a user gives it.
    least: Callable[[float], float] = lambda threshold: threshold
    largest_threshold: float = 1.0
    needs_targets: bool = False  # the function takes the true tokens (N,) as well


# Scores that a user can name.
SCORES = {
    "confidence": ScoreRule(confidence, least=least_log_prob),
    "entropy": ScoreRule(
        minus_entropy, least=lambda threshold: -threshold, largest_threshold=math.inf
    ),
    "margin": ScoreRule(margin),
}
ALL_SCORES = SCORES | {
    # For the likelihood of known tokens.
    "oracle": ScoreRule(target_log_prob, least=least_log_prob, needs_targets=True)
}
ScoreName = Literal[*ALL_SCORES]  # type: ignore[valid-type]


def scores_of(
    logits: Tensor, names: Sequence[str], targets: Tensor | None = None
) -> Tensor:
    """Return the scores of these names, (N, scores), of logits (N, V); higher is
    better. targets: the true tokens (N,), where a score needs them."""
    log_probs = logits.float().log_softmax(dim=-1)
    scores = []
    for name in names:
        rule = ALL_SCORES[name]
        if rule.needs_targets:
            score = rule.function(log_probs, targets)
        else:
            score = rule.function(log_probs)
        scores.append(score)
    return torch.stack(scores, dim=-1)


def rounding_of(dtype: torch.dtype) -> float:
    """Return how far apart the scores of a model in this dtype may be, relative to
    their size or to 1, if they differ by rounding alone."""
    return max(2**-18, 2 * torch.finfo(dtype).eps)


def best_first(scores: Tensor, tolerance: float) -> Tensor:
    """Return the places of scores (B, T), highest score first, LongTensor (B, T).

    Places with equal scores stay in order: a group of equals is the highest score that
    is left and all within the tolerance of it, which is relative to scores above 1."""
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    loss = -scores.gather(1, by_score)  # ascending
    margin = tolerance * loss.abs().clamp(min=1)
    limit = torch.where(loss.isinf(), loss, loss + margin)
    # The first group begins at 0, each other one where the one before ends. T is the
    # end of the last one. Those beginnings are found that 1, 2, 4, ... steps reach.
    T = scores.shape[1]
    end = torch.searchsorted(loss, limit, right=True)
    end = F.pad(end, (0, 1), value=T)
    begins = torch.zeros_like(end)
    begins[:, 0] = 1
    for _ in range(T.bit_length()):
        begins = begins.scatter_reduce(1, end, begins, "amax")
        end = end.gather(1, end)
    number = begins[:, :T].cumsum(dim=1)
    group = torch.empty_like(number).scatter_(1, by_score, number)
    return group.argsort(dim=1, stable=True)
