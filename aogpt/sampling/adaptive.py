"""Steps that the model chooses: the positions of which it is most confident, and how many of them.

`engine` is an `Engine`, whose docstring has the shapes."""

import math

import torch
from torch import Tensor

from .cached import Step
from .plans import Plan


def adapt(engine, plan: Plan, tally) -> None:
    """Unmask the candidates that pass the limits of `Pace` until every row is complete. How many
    do depends on the model, so every round waits once for it."""
    cached = torch.zeros_like(tally.known)
    generated = plan.generated()
    block_of = plan.order // (plan.block or max(engine.T, 1))
    by = [plan.unmask_by] + ["entropy"] * (plan.pace.entropy_bound is not None)
    while (tally.known < plan.length).any():
        # 1. The candidates of a row: what is left of the block that it is in.
        known = tally.known
        block = block_of.gather(1, known.clamp(max=engine.T - 1)[:, None])
        left = generated & (tally.slots >= known[:, None]) & (block_of == block)
        candidates = left.sum(dim=1)
        # 2. Predict them all, best first, and see how many of them to take.
        count = engine.count(cached, known, candidates, plan.length)
        (step,) = engine.steps(
            *(v[None] for v in (cached, known, count, candidates, candidates))
        )
        hidden, index = engine.call(engine.predict, step)
        index, scores = reorder(engine, hidden, index, step, by)
        size = within_limits(plan, known, candidates, [v.cpu() for v in scores])
        # 3. Draw their tokens.
        total = int(size.sum())
        slots = engine.slots(step.known, size.to(engine.device), total)
        engine.draw(hidden, index, step.known, *slots)
        cached = engine.cached_after(known, chosen=True)
        tally.called(count)
        tally.unmask(size)


def within_limits(
    plan: Plan, known: Tensor, candidates: Tensor, scores: list[Tensor]
) -> Tensor:
    """How many candidates each row unmasks, (B,), one at least. scores: as `reorder` gives them,
    the last one minus the entropy where that is bounded."""
    pace = plan.pace
    slots = torch.arange(scores[0].shape[1])
    taken = candidate = (slots >= known[:, None]) & (
        slots < (known + candidates)[:, None]
    )
    if pace.threshold is not None:
        limit = pace.threshold
        log = math.log(limit) if limit else -math.inf
        least = {"confidence": log, "oracle": log, "margin": limit, "entropy": -limit}
        taken = taken & (scores[0] >= least[plan.unmask_by])
    if pace.entropy_bound is not None:
        entropy = (-scores[-1]).where(candidate, 0).double()
        others = entropy.cumsum(dim=1) - entropy.cummax(dim=1).values
        taken = taken & (others <= pace.entropy_bound)
    return torch.minimum(taken.sum(dim=1).clamp(min=1, max=pace.most), candidates)


def reorder(engine, hidden: Tensor, index: Tensor, step: Step, by: list[str]) -> tuple:
    """Put the candidates of every row in the order in which the model prefers them, by the first of
    the scores `by`. hidden, index: as `Engine.predict` gives them. Returns `index` in that order,
    and the scores (B, T + 1) of its slots: inf where known, -inf where it is not a candidate."""
    # 1. The scores of every candidate, (N, scores).
    row, slot = engine.slots(step.known, step.candidates, step.all_candidates)
    targets = (
        torch.zeros_like(slot) if engine.forced is None else engine.forced_at(row, slot)
    )
    chunks = (x.split(engine.head_rows) for x in (hidden[index[row, slot]], targets))
    found = [scores_of(engine.logits(x), by, of) for x, of in zip(*chunks, strict=True)]
    found = torch.cat(found).to(engine.device)
    # 2. Their place by slot. Known slots stay in front (infinity; the sort is stable), slots that
    #    come later or that a row does not have stay behind, and so does slot T.
    slots = torch.arange(engine.T + 1, device=engine.device)
    by_slot = []
    for score in found.unbind(dim=-1):
        scores = torch.full_like(engine.log_probs, -torch.inf)
        scores[row, slot] = score
        scores = scores.where(slots >= step.known[:, None], torch.inf)
        by_slot.append(scores.where(slots < engine.T, -torch.inf))
    # 3. Highest score first.
    preferred = by_slot[0].argsort(dim=1, descending=True, stable=True)
    engine.order.copy_(engine.order.gather(1, preferred))
    return index.gather(1, preferred), [
        scores.gather(1, preferred) for scores in by_slot
    ]


def scores_of(logits: Tensor, by: list[str], targets: Tensor | None = None) -> Tensor:
    """(N, V) -> (N, scores), higher is better. confidence: the log-probability of the likeliest
    token; oracle: that of the target, (N,); entropy: minus the entropy; margin: the likeliest
    probability minus the second."""
    log_probs = logits.float().log_softmax(dim=-1)
    scores = []
    for name in by:
        match name:
            case "confidence":
                scores.append(log_probs.amax(dim=-1))
            case "oracle":
                at = targets[:, None].to(log_probs.device)
                scores.append(log_probs.gather(1, at).squeeze(1))
            case "margin":
                first, second = log_probs.topk(2, dim=-1).values.exp().unbind(dim=-1)
                scores.append(first - second)
            case "entropy":
                # 0 times minus infinity is not a number, but 0 times the least number is 0.
                least = torch.finfo(torch.float).min
                scores.append(
                    (log_probs.exp() * log_probs.clamp(min=least)).sum(dim=-1)
                )
    return torch.stack(scores, dim=-1)
