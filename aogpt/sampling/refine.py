"""Refinement: redraw some tokens of complete samples given all that is kept, for some rounds.

A round removes a share of the generated tokens and draws them again, one after the other in a
random order, each from the model's distribution given all that is known then. A decoder reads the
kept tokens in the order in which they became known; those redrawn become its last. So redrawing the
last token of an order leaves the joint along that order as it is.

Shapes: B samples, T positions."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..model import AOGPT, inverse_permutation
from .engine import Generation, generate
from .plans import Plan
from .race import fresh_uniforms
from .token_choice import REFINED

RefineBy = Literal["drawn", "others", "random"]


def refine(
    model: AOGPT,
    samples: Generation,
    uniforms: Tensor,
    rounds: int,
    share: float,
    by: RefineBy,
    progress: Callable[[int], None] | None = None,
    **settings,
) -> Generation:
    """The samples after all rounds. uniforms: those the samples were drawn with, from which all
    random numbers are hashed. by: redraw the tokens of least log-probability, when they were drawn
    or given all others, or random ones. settings: of `generate`."""
    generated = samples.step >= 0
    count = redrawn(generated, share)[:, None]
    for salt in range(REFINED, REFINED - 2 * rounds, -2):
        keys, fresh = (fresh_uniforms(uniforms, salt - i) for i in range(2))
        if by == "others":
            samples, score = given_others(model, samples, **settings)
        else:
            score = samples.log_probs if by == "drawn" else keys
        least_first = (
            score.double().where(generated, torch.inf).argsort(dim=1, stable=True)
        )
        chosen = inverse_permutation(least_first) < count
        how = settings | {"uniforms": fresh, "progress": progress}
        samples = redraw(model, samples, chosen, keys, **how)
    return samples


def redrawn(generated: Tensor, share: float) -> Tensor:
    """How many tokens of each sample a round redraws, (B,): one at least, if any is generated."""
    total = generated.sum(dim=1)
    return (share * total).round().long().clamp(min=1).minimum(total)


def redraw(
    model: AOGPT, samples: Generation, chosen: Tensor, keys: Tensor, **how
) -> Generation:
    """The samples with the chosen tokens, BoolTensor (B, T), drawn again one after the other, those
    of small key (B, T) in [0, 1) first. Their steps come after the sample's. how: of `generate`."""
    plan = _last(samples.order, samples.length, chosen, keys)
    new = generate(model, plan, samples.tokens, **how)
    step = new.step + samples.step.amax(dim=1, keepdim=True) + 1
    step = step.where(chosen, samples.step)
    log_probs = new.log_probs.where(chosen, samples.log_probs)
    names = "model_calls", "token_forwards", "nfe"
    cost = (getattr(samples, name) + getattr(new, name) for name in names)
    return Generation(new.tokens, step, log_probs, samples.length, *cost, new.order)


def given_others(model: AOGPT, samples: Generation, **how) -> tuple[Generation, Tensor]:
    """The samples, with the cost added, and the log-probability (B, T) of each generated token
    given all others: a pass for each token, those of a sample side by side."""
    generated = samples.step >= 0
    T = samples.step.shape[1]
    scores = torch.zeros_like(samples.log_probs)
    calls = 0
    forwards = 0
    for b in generated.any(dim=1).nonzero().flatten().tolist():
        alone = torch.arange(T) == generated[b].nonzero()  # (n, T)
        n = len(alone)
        order, tokens = (v[b].expand(n, T) for v in (samples.order, samples.tokens))
        plan = _last(order, samples.length[b].expand(n), alone, torch.zeros(n, T))
        got = generate(model, plan, tokens, forced=tokens, **how)
        scores[b, generated[b]] = got.log_probs[alone]
        calls = calls + got.model_calls
        forwards = forwards + got.token_forwards
    cost = {
        "model_calls": samples.model_calls + calls,
        "nfe": samples.nfe + generated.sum(dim=1),
    }
    cost["token_forwards"] = samples.token_forwards + forwards
    return dataclasses.replace(samples, **cost), scores


def _last(order: Tensor, length: Tensor, chosen: Tensor, keys: Tensor) -> Plan:
    """A plan that generates the chosen positions by rising key, after all others in their order."""
    T = order.shape[1]
    place = inverse_permutation(order).double()
    key = torch.where(chosen, T + keys, place + 2 * T * (place >= length[:, None]))
    step = torch.arange(T) - (length - chosen.sum(dim=1))[:, None]
    return Plan(key.argsort(dim=1, stable=True), step.clamp(min=-1), length)
