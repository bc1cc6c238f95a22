"""Steps that the model chooses: the positions of which it is most confident, and how
many of them.

Shapes: B samples in flight, T positions; a place is an index in the prediction
order."""

import torch
from torch import Tensor

from .batch import Batch, Tally
from .cached import make_steps
from .plans import Plan
from .scores import ALL_SCORES


def adapt(batch: Batch, plan: Plan, tally: Tally) -> None:
    """Unmask the candidates that pass the limits of `Pace` until every row is complete.
    Their number depends on the model, so every round waits once for it."""
    T = batch.T
    generated = plan.generated  # (B, T), by place
    block_size = plan.block or max(T, 1)
    block_of = plan.order // block_size  # (B, T), by place
    assert plan.pace is not None
    score_names: list[str] = [plan.unmask_by]
    if plan.pace.entropy_bound is not None:
        score_names.append("entropy")
    cached = torch.zeros_like(tally.known)
    while (tally.known < plan.length).any():
        # 1. The candidates of a row: what is left of the block that it is in.
        known = tally.known
        next_place = known.clamp(max=T - 1)[:, None]
        block = block_of.gather(1, next_place)  # (B, 1)
        unknown = tally.places >= known[:, None]
        left = generated & unknown & (block_of == block)
        candidates = left.sum(dim=1)

        # 2. Predict them all, best first, and see how many of them to take.
        count = batch.count(cached, known, candidates, plan.length)
        (step,) = make_steps(
            cached=cached[None],
            known=known[None],
            count=count[None],
            candidates=candidates[None],
            size=candidates[None],  # that it may unmask: all
            device=batch.device,
        )
        hidden, index = batch.predict(step)
        index, scores = batch.prefer(step, hidden, index, by=score_names)
        size = within_limits(plan, known, candidates, scores.cpu())

        # 3. Draw their tokens.
        step.size.copy_(size)
        step.all_size = int(size.sum())
        batch.unmask(step, hidden, index)
        cached = batch.inputs_kept(known, targets_fixed=False)
        tally.called(count)
        tally.unmask(size)


def within_limits(
    plan: Plan, known: Tensor, candidates: Tensor, scores: Tensor
) -> Tensor:
    """Return how many candidates each row unmasks, (B,), one at least.

    scores: as `Batch.prefer` gives them, the last one minus the entropy where that is
    bounded."""
    pace = plan.pace
    assert pace is not None
    first_scores = scores[0]
    places = torch.arange(first_scores.shape[1])
    start = known[:, None]
    end = (known + candidates)[:, None]
    is_candidate = (places >= start) & (places < end)  # (B, T + 1)
    taken = is_candidate
    if pace.threshold is not None:
        least = ALL_SCORES[plan.unmask_by].least(pace.threshold)
        taken = taken & (first_scores >= least)
    if pace.entropy_bound is not None:
        entropy = -scores[-1]
        entropy = entropy.where(is_candidate, 0)
        entropy = entropy.double()
        total = entropy.cumsum(dim=1)
        largest = entropy.cummax(dim=1).values
        without_largest = total - largest
        taken = taken & (without_largest <= pace.entropy_bound)
    size = taken.sum(dim=1)
    size = size.clamp(min=1, max=pace.most)
    return torch.minimum(size, candidates)
