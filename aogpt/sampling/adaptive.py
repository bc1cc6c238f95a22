"""Steps that the model chooses: the positions of which it is most confident, and how
many of them.

`engine` is an `Engine`, whose docstring has the shapes."""

import torch
from torch import Tensor

from .cached import Step, inputs_kept, make_steps
from .plans import Plan
from .scores import SCORES, rule_of


def adapt(
    engine,
    plan: Plan,
    tally,
) -> None:
    """Unmask the candidates that pass the limits of `Pace` until every row is complete.
    Their number depends on the model, so every round waits once for it."""
    T = engine.T
    generated = plan.generated  # (B, T), by slot
    block_size = plan.block or max(T, 1)
    block_of = plan.order // block_size  # (B, T), by slot
    assert plan.pace is not None
    score_names: list[str] = [plan.unmask_by]
    if plan.pace.entropy_bound is not None:
        score_names.append("entropy")
    cached = torch.zeros_like(tally.known)
    while (tally.known < plan.length).any():
        # 1. The candidates of a row: what is left of the block that it is in.
        known = tally.known
        next_slot = known.clamp(max=T - 1)[:, None]
        block = block_of.gather(1, next_slot)  # (B, 1)
        unknown = tally.slots >= known[:, None]
        left = generated & unknown & (block_of == block)
        candidates = left.sum(dim=1)

        # 2. Predict them all, best first, and see how many of them to take.
        count = engine.count(
            cached,
            known,
            candidates,
            plan.length,
        )
        # The last two: the pass predicts all candidates, and may unmask all.
        (step,) = make_steps(
            cached[None],
            known[None],
            count[None],
            candidates[None],
            candidates[None],
            engine.device,
        )
        hidden, index = engine.call(engine.predict, step)
        index, scores = reorder(
            engine,
            hidden,
            index,
            step,
            by=score_names,
        )
        host_scores = [score.cpu() for score in scores]
        size = within_limits(
            plan,
            known,
            candidates,
            scores=host_scores,
        )

        # 3. Draw their tokens.
        row, slot = engine.slots(
            first=step.known,
            count=size.to(engine.device),
            total=int(size.sum()),
        )
        engine.draw(
            hidden,
            index,
            known=step.known,
            row=row,
            slot=slot,
        )
        cached = inputs_kept(engine.model, known, targets_fixed=False)
        tally.called(count)
        tally.unmask(size)


def within_limits(
    plan: Plan,
    known: Tensor,
    candidates: Tensor,
    scores: list[Tensor],
) -> Tensor:
    """Return how many candidates each row unmasks, (B,), one at least.

    scores: as `reorder` gives them, the last one minus the entropy where that is
    bounded."""
    pace = plan.pace
    assert pace is not None
    first_scores = scores[0]
    slots = torch.arange(first_scores.shape[1])
    start = known[:, None]
    end = (known + candidates)[:, None]
    is_candidate = (slots >= start) & (slots < end)  # (B, T + 1)
    taken = is_candidate
    if pace.threshold is not None:
        least = rule_of(plan.unmask_by).least(pace.threshold)
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


def reorder(
    engine,
    hidden: Tensor,
    index: Tensor,
    step: Step,
    by: list[str],
) -> tuple[Tensor, list[Tensor]]:
    """Put the candidates of every row in the order in which the model prefers them, by
    the first of the scores `by`.

    hidden, index: as `Engine.predict` gives them. Returns `index` in that order, and
    for each score those (B, T + 1) of its slots: inf where known, -inf where a slot is
    not a candidate."""
    # 1. The scores of every candidate, (N, scores).
    row, slot = engine.slots(
        first=step.known,
        count=step.candidates,
        total=step.all_candidates,
    )
    if engine.forced is None:
        targets = torch.zeros_like(slot)
    else:
        targets = engine.forced_at(row, slot)
    states = hidden[index[row, slot]]  # (N, D)
    state_chunks = states.split(engine.head_rows)
    target_chunks = targets.split(engine.head_rows)
    parts = []
    for chunk, chunk_targets in zip(state_chunks, target_chunks, strict=True):
        logits = engine.logits(chunk)
        parts.append(scores_of(logits, by, chunk_targets))
    candidate_scores = torch.cat(parts).to(engine.device)

    # 2. Their place by slot. Known slots stay in front (infinity; the sort is stable),
    #    slots that come later or that a row does not have stay behind, and so does
    #    slot T.
    slots = torch.arange(engine.T + 1, device=engine.device)
    is_unknown = slots >= step.known[:, None]
    exists = slots < engine.T
    by_slot = []
    for score in candidate_scores.unbind(dim=-1):
        scores = torch.full_like(engine.log_probs, -torch.inf)
        scores[row, slot] = score
        scores = scores.where(is_unknown, torch.inf)
        scores = scores.where(exists, -torch.inf)
        by_slot.append(scores)

    # 3. Highest score first.
    first_scores = by_slot[0]
    preferred = first_scores.argsort(
        dim=1,
        descending=True,
        stable=True,
    )
    order = engine.order.gather(1, preferred)
    engine.order.copy_(order)
    sorted_scores = [scores.gather(1, preferred) for scores in by_slot]
    return index.gather(1, preferred), sorted_scores


def scores_of(
    logits: Tensor,
    by: list[str],
    targets: Tensor | None = None,
) -> Tensor:
    """Return the scores (N, scores) of logits (N, V), higher is better: of `SCORES`, or
    oracle, the log-probability of the targets (N,)."""
    log_probs = logits.float().log_softmax(dim=-1)
    scores = []
    for name in by:
        if name == "oracle":
            assert targets is not None
            index = targets.to(log_probs.device)[:, None]
            score = log_probs.gather(1, index).squeeze(1)
        else:
            score = SCORES[name].function(log_probs)
        scores.append(score)
    return torch.stack(scores, dim=-1)
