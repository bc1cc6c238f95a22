"""Speculative decoding: draft tokens in parallel, then verify them in one causal pass
of the same model. Samples have the same distribution as one-token-at-a-time decoding.

How many drafts a row accepts depends on the model, so every round waits once for it;
counts are on the host.

Shapes: B samples in flight, N places of all rows, V vocabulary; a place is an index
in the prediction order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch, CachedBatch, Tally
from .cached import make_steps, ragged
from .plans import Plan
from .token_choice import ACCEPTED, CORRECTED, draw, fresh_uniforms, probabilities


def speculate(batch: Batch, plan: Plan, tally: Tally) -> None:
    """Draft and verify until every row is complete."""
    by_queries = batch.model.mask_queries
    if by_queries:  # a pass holds the drafts, the last of all tokens, and their queries
        assert isinstance(batch, CachedBatch)
        batch.cache.lengthen(batch.T + plan.draft + 1)
    cached = torch.zeros_like(tally.known)
    left = plan.length - tally.known
    while left.any():
        # 1. Draft up to `draft` places of each row in parallel.
        known = tally.known
        size = left.clamp(max=plan.draft)
        drafts = draft(batch, tally, cached, known, size)
        # The first was drawn given all that it depends on.
        first = known + (size > 0)
        # Its input is cached, unless it was a [MASK].
        cached = known if by_queries else first

        # 2. Verify the others. Where something is left behind a full draft, the same
        #    pass predicts one place more, the bonus.
        has_bonus = left > plan.draft
        end = known + size + has_bonus
        n_verify = end - first
        settled = first - known
        if n_verify.any():
            verified = verify(
                batch, tally, drafts, cached=cached, first=first, n_verify=n_verify
            )
            settled = settled + verified

        # 3. The inputs of what is settled are in the cache: input i holds the token
        #    before place i, or with queries the one in it.
        tally.unmask(settled)
        cached = tally.known
        if by_queries:
            cached = (cached - 1).clamp(min=0)
        left = plan.length - tally.known


@dataclass
class Drafts:
    """The tokens that a round has drafted: `size` places of each row from `known`
    on."""

    known: Tensor  # (B,)
    size: Tensor  # (B,)
    probs: Tensor  # (sum of size, V) the distributions that they were drawn from


def draft(
    batch: Batch, tally: Tally, cached: Tensor, known: Tensor, size: Tensor
) -> Drafts:
    """Draw the next `size` places of each row in parallel."""
    logits, row, place = predict_places(
        batch, tally, cached=cached, known=known, first=known, size=size
    )
    probs = probabilities(logits, batch.choice)
    uniforms = batch.uniforms_at(row, place)
    tokens = draw(probs, uniforms)
    batch.store(row, place, tokens, logits)
    return Drafts(known=known, size=size, probs=probs)


def verify(
    batch: Batch,
    tally: Tally,
    drafts: Drafts,
    cached: Tensor,
    first: Tensor,
    n_verify: Tensor,
) -> Tensor:
    """Settle the drafts of a round. Return how many places of each row, from `first`
    on, are settled, (B,).

    A draft x, drawn from p, is kept with probability min(1, q(x) / p(x)), where q is
    the order's joint given the drafts before it. The first that is not kept is drawn
    again from (q - p)+, and those after it are dropped. Settled tokens then follow q
    (Leviathan et al. 2023).

    Example: known = 3, three drafts a, b, c (size = 3), of which the first needs no
    verification (first = 4), and a bonus place (n_verify = 3):

        place, input   input token    place holds  column
        3              x of place 2   a            -        settled, its input is cached
        4              a              b            0
        5              b              c            1
        6              c              nothing      2        bonus, if b and c are kept

    If b is kept and c is not, `stop` is column 1: b and a new token in place 5 are
    settled.

    cached: (B,) inputs in the cache. first, n_verify: (B,) the first place to verify,
    and how many, with the bonus."""
    # 1. Predict all drafts in one causal pass, as if they were known. Entry n of N is
    #    place `first` + `column[n]` of row `row[n]`.
    logits, row, place = predict_places(
        batch,
        tally,
        cached=cached,
        known=drafts.known + drafts.size,
        first=first,
        size=n_verify,
    )
    q = probabilities(logits, batch.choice)  # (N, V)
    first = first.to(q.device)
    known = drafts.known.to(q.device)
    size = drafts.size.to(q.device)
    n_verify = n_verify.to(q.device)
    column = place - first[row]
    draft_end = known + size
    is_draft = place < draft_end[row]  # the others are bonus places
    # Distributions stand row after row. A bonus place has p = 0: it is drawn from q.
    drafts_before = size.cumsum(0) - size  # (B,) in the rows before
    number = drafts_before[row] + place - known[row]
    last = len(drafts.probs) - 1
    p = drafts.probs[number.clamp(max=last)]
    p = p * is_draft[:, None]

    # 2. Accept each with probability min(1, q / p), by a coin of its own: u p < q.
    token = batch.tokens[row.to(batch.device), place.to(batch.device)]
    token = token.to(q.device)
    index = token[:, None]
    p_token = p.gather(1, index).squeeze(1)
    q_token = q.gather(1, index).squeeze(1)
    uniforms = batch.uniforms_at(row, place)
    coin = fresh_uniforms(uniforms, ACCEPTED)
    accept = coin * p_token < q_token
    # Log-probabilities under q replace those of the draft; places not kept are
    # overwritten later.
    batch.store(row, place, token, logits)

    # 3. `stop` (B,): the first column of each row that is not an accepted draft, be it
    #    a rejected draft or the bonus place; `n_verify`, one past the last, where there
    #    is none.
    is_kept = accept & is_draft
    not_kept = torch.where(is_kept, batch.T, column)
    stop = n_verify.scatter_reduce(0, row, not_kept, "amin")
    is_drawn = stop < n_verify

    # 4. Draw the place of that column: a rejected draft from (q - p)+, with a fresh
    #    uniform number, since its own decided the draft; a bonus token from q, with its
    #    own. `entry` (B,): which of the N that place is. Rows without such a place take
    #    some other, and draw into place T.
    entries_before = n_verify.cumsum(0) - n_verify
    entry = (entries_before + stop).clamp(max=len(q) - 1)
    q = q[entry]
    p = p[entry]
    weights = (q - p).clamp(min=0)
    # p = q up to rounding leaves nothing to draw from, and q is right then.
    total = weights.sum(dim=1, keepdim=True)
    weights = torch.where(total > 0, weights, q)
    uniforms = uniforms[entry]
    corrected = fresh_uniforms(uniforms, CORRECTED)
    uniforms = torch.where(is_draft[entry], corrected, uniforms)
    tokens = draw(weights, uniforms)
    place = torch.where(is_drawn, first + stop, batch.T)
    rows = torch.arange(batch.B, device=q.device)
    batch.store(rows, place, tokens, logits[entry])
    settled = stop + is_drawn  # those accepted, and the one drawn
    return settled.cpu()


def predict_places(
    batch: Batch,
    tally: Tally,
    cached: Tensor,
    known: Tensor,
    first: Tensor,
    size: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (N, V) of `size` places of each row from `first` on, given `known`
    tokens, and their rows and places (N,). Arguments (B,) on the host."""
    is_active = size > 0
    inputs = first + size - cached
    first_query = None
    by_queries = batch.model.mask_queries
    if by_queries and not torch.equal(first, known):
        # The contents of all places before the last one, then the queries.
        contents = first + size - 1 - cached
        inputs = contents + size
        first_query = first.to(batch.device)
    count = is_active * inputs
    (step,) = make_steps(
        cached=cached[None],
        known=known[None],
        count=count[None],
        candidates=size[None],
        size=size[None],  # that it may unmask: all candidates
        device=batch.device,
        grouped=False,
        first=first_query,
    )
    hidden, index = batch.predict(step)
    row, _, place = ragged(
        first.to(batch.device), step.size, total=int(size.sum()), unused=batch.T
    )
    tally.called(count)
    logits = batch.logits(hidden[index[row, place]])
    row = row.to(logits.device)
    place = place.to(logits.device)
    return logits, row, place
