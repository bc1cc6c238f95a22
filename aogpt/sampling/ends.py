"""Samples that end at an end-of-text: where they end, and what is left of them.

Shapes: B samples, T positions of the longest."""

from dataclasses import replace

import torch
from torch import Tensor

from .engine import Engine, Generation
from .plans import Plan


def cut_at_end(
    engine: Engine, samples: Generation, plan: Plan, end_token: int
) -> Generation:
    """Return the samples of a plan, each up to the end-of-text that it generated after
    all of its given tokens.

    The log-probabilities are those of the tokens that stay: where one was drawn given
    tokens that are cut away, all are scored once more, in the steps in which they were
    generated. What samples cost stays what it was."""
    T = samples.tokens.shape[1]
    position = torch.arange(T)
    last_given = torch.where(plan.given, position, -1).amax(dim=1, keepdim=True)
    is_own = (samples.step >= 0) & (position > last_given)
    is_end = is_own & (samples.tokens == end_token)
    first_end = torch.where(is_end, position, T).amin(dim=1)
    length = torch.minimum(first_end, samples.length)

    # By place in the order: an encoder reads [MASK] wherever a token follows, a decoder
    # reads what became known before.
    is_cut = (samples.order >= length[:, None]) & plan.valid
    stays = (samples.order < length[:, None]) & plan.generated
    if engine.model.config.is_encoder:
        is_changed = is_cut.any(dim=1) & stays.any(dim=1)
    else:
        is_after_cut = is_cut.cumsum(dim=1) > 0
        is_changed = (stays & is_after_cut).any(dim=1)
    rows = is_changed.nonzero().squeeze(1)
    log_probs = samples.log_probs.where(position < length[:, None], 0)
    if len(rows):
        tokens = samples.tokens[rows]
        shorter = shortened(plan, samples, rows, length[rows])
        scored = engine.generate(shorter, tokens, forced=tokens)
        log_probs[rows] = scored.log_probs
    return replace(samples, length=length, log_probs=log_probs)


def shortened(plan: Plan, samples: Generation, rows: Tensor, length: Tensor) -> Plan:
    """Return the plan by which samples were generated, without the positions from
    `length` (rows,) on."""
    order = samples.order[rows]
    step = samples.step[rows].gather(1, order)
    if plan.draft:  # verified one after the other
        step = torch.arange(order.shape[1]).where(step >= 0, -1)
    is_cut = order >= length[:, None]
    place = is_cut.to(torch.uint8).argsort(dim=1, stable=True)  # what is cut comes last
    return Plan(order=order.gather(1, place), step=step.gather(1, place), length=length)
