"""Speculative decoding: draft tokens in parallel, then verify them in one causal pass of the same
model. Samples have the same distribution as one-token-at-a-time decoding.

`engine` is an `Engine`, whose docstring has the shapes. How many drafts a row accepts depends on
the model, so every round waits once for it; what is counted is on the host."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .plans import Plan
from .race import draw, fresh_uniforms
from .token_choice import ACCEPTED, CORRECTED, probabilities


def speculate(engine, plan: Plan, tally) -> None:
    """Draft and verify until every row is complete."""
    cached = torch.zeros_like(tally.known)
    by_queries = engine.model.config.target == "mask_query"
    if by_queries:  # a pass holds the drafts, the last of all tokens, and their queries
        engine.cache.lengthen(engine.T + plan.draft + 1)
    while (left := plan.length - tally.known).any():
        # 1. Draft up to `draft` slots of each row: in parallel, or without the model.
        known = tally.known
        size = left.clamp(max=plan.draft)
        if plan.draft_by == "model":
            draft_probs = draft(engine, tally, cached, known, size)
            # The first was drawn given all that it depends on, and its input is cached.
            first = cached = known + (size > 0)
            if by_queries:  # it was a [MASK]
                cached = known
        else:
            draft_probs = draft_from_pairs(engine, known, size)
            first = known
        # 2. Verify the others. Where something is left behind a full draft, the same pass predicts
        #    one slot more, the bonus.
        n_verify = known + size + (left > plan.draft) - first
        settled = first - known
        if n_verify.any():
            new = verify(
                engine, tally, cached, first, n_verify, known, size, draft_probs
            )
            settled = settled + new
        # 3. The inputs of what is settled are in the cache: input i holds the token before slot i,
        #    or the one in it.
        tally.unmask(settled)
        cached = (tally.known - 1).clamp(min=0) if by_queries else tally.known


def draft(engine, tally, cached: Tensor, known: Tensor, size: Tensor) -> Tensor:
    """Draw the next `size` slots of each row in parallel; their distributions (sum of size, V)."""
    logits, row, slot = predict_slots(engine, tally, cached, known, known, size)
    probs = probabilities(logits, engine.choice)
    engine.store(row, slot, draw(probs, engine.uniforms_at(row, slot)), logits)
    return probs


def draft_from_pairs(engine, known: Tensor, size: Tensor) -> Tensor:
    """Draft the next `size` slots of each row, one after the other: what most often follows the
    token on its left in what is known or drafted, or else the most frequent token there. The
    distributions (sum of size, V) that they were drawn from, each certain of one token."""
    T = engine.T
    V = engine.model.config.vocab_size
    device = engine.device
    known_ = known.to(device)
    size_ = size.to(device)
    # 1. The known tokens in sequence order, -1 where none is known: column p + 1 is position p.
    ordered = engine.tokens[:, :T].where(
        torch.arange(T, device=device) < known_[:, None], -1
    )
    text = torch.full((engine.B, T + 1), -1, device=device)
    text.scatter_(1, engine.order[:, :T] + 1, ordered)
    rows = torch.arange(engine.B, device=device)
    for column in range(int(size.max())):
        drafts = column < size_
        slot = torch.where(drafts, known_ + column, T)
        position = engine.order[rows, slot]
        # 2. Every known token has a vote, and each that follows the token on the left more than all
        #    of them together.
        left = text[rows, position][:, None]
        follows = (text[:, :-1] == left) & (left >= 0) & (text[:, 1:] >= 0)
        counts = (text[:, 1:] >= 0).long() + follows * 2 * T
        votes = torch.zeros(engine.B, V, dtype=torch.long, device=device)
        guess = votes.scatter_add_(1, text[:, 1:].clamp(min=0), counts).argmax(dim=1)
        # 3. It is part of the text for the drafts after it.
        engine.tokens[rows, slot] = guess
        text[rows, position + 1] = torch.where(drafts, guess, text[rows, position + 1])
    drafted = engine.tokens[engine.slots(known_, size_, int(size.sum()))]
    return F.one_hot(drafted.to(engine.draw_device), V).double()


def verify(
    engine, tally, cached, first, n_verify, known, size, draft_probs: Tensor
) -> Tensor:
    """Settle the drafts of a round; how many slots of each row, from `first` on, are settled, (B,).

    A draft x, drawn from p, is kept with probability min(1, q(x) / p(x)), where q is the order's
    joint given the drafts before it. The first that is not kept is drawn again from (q - p)+, and
    those after it are dropped. Settled tokens then follow q (Leviathan et al. 2023).

    Example: known = 3, three drafts a, b, c (size = 3), of which the first needs no verification
    (first = 4), and a bonus slot (n_verify = 3):

        slot, input   input token   slot holds   column
        3             x of slot 2   a            -        settled, and its input is cached
        4             a             b            0
        5             b             c            1
        6             c             nothing      2        bonus: drawn if b and c are kept

    If b is kept and c is not, `stop` is column 1: b and a new token in slot 5 are settled.

    first, n_verify: (B,) the first slot to verify, and how many, with the bonus. known, size: (B,)
    tokens known before the round, slots drafted after them. draft_probs: of all drafts."""
    # 1. Predict all drafts in one causal pass, as if they were known. Entry n is slot
    #    `first` + `column[n]` of row `row[n]`.
    logits, row, slot = predict_slots(
        engine, tally, cached, known + size, first, n_verify
    )
    q = probabilities(logits, engine.choice)  # (N, V)
    first, known, size, n_verify = (
        v.to(q.device) for v in (first, known, size, n_verify)
    )
    column = slot - first[row]
    is_draft = slot < (known + size)[row]  # the others are bonus slots
    # Drafts stand in draft_probs row after row. A bonus slot has p = 0: it is drawn from q.
    drafted_before = (size.cumsum(0) - size)[row]
    p = draft_probs[
        (drafted_before + slot - known[row]).clamp(max=len(draft_probs) - 1)
    ]
    p = p * is_draft[:, None]
    # 2. Accept each with probability min(1, q / p), by a coin of its own: u p < q.
    token = engine.tokens[row.to(engine.device), slot.to(engine.device)].to(q.device)[
        :, None
    ]
    uniforms = engine.uniforms_at(row, slot)
    coin = fresh_uniforms(uniforms, ACCEPTED)
    accept = coin * p.gather(1, token).squeeze(1) < q.gather(1, token).squeeze(1)
    # Log-probabilities under q replace those of the draft; slots not kept are overwritten later.
    engine.store(row, slot, token.squeeze(1), logits)
    # 3. `stop` (B,): the first column of each row that is not an accepted draft, be it a rejected
    #    draft or the bonus slot; `n_verify`, one past the last, where there is none.
    not_kept = torch.where(accept & is_draft, engine.T, column)
    stop = n_verify.scatter_reduce(0, row, not_kept, "amin")
    drawn = stop < n_verify
    # 4. Draw the slot of that column: a rejected draft from (q - p)+, with a fresh uniform number,
    #    since its own decided the draft; a bonus token from q, with its own. `entry` (B,): which of
    #    the N that slot is. Rows without such a slot take some other, and draw into slot T.
    entry = (n_verify.cumsum(0) - n_verify + stop).clamp(max=len(q) - 1)
    weights = (q[entry] - p[entry]).clamp(min=0)
    # p = q up to rounding leaves nothing to draw from, and q is right then.
    weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, q[entry])
    corrected = fresh_uniforms(uniforms[entry], CORRECTED)
    uniforms = torch.where(is_draft[entry], corrected, uniforms[entry])
    slot = torch.where(drawn, first + stop, engine.T)
    rows = torch.arange(engine.B, device=q.device)
    engine.store(rows, slot, draw(weights, uniforms), logits[entry])
    return (stop + drawn).cpu()  # those accepted, and the one drawn


def predict_slots(
    engine, tally, cached, known, first, size
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, V) of `size` slots of each row from `first` on, given `known` tokens, and their
    rows and slots (N,). Arguments (B,) on the host."""
    count = (size > 0) * (first + size - cached)
    of_queries = None
    if engine.model.config.target == "mask_query" and not torch.equal(first, known):
        # The contents of all slots before the last one, then the queries.
        count = (size > 0) * (first + size - 1 - cached + size)
        of_queries = first.to(engine.device)
    rows = (v[None] for v in (cached, known, count, size, size))
    (step,) = engine.steps(*rows, grouped=False, first=of_queries)
    hidden, index = engine.call(engine.predict, step)
    row, slot = engine.slots(first.to(engine.device), step.size, int(size.sum()))
    tally.called(count)
    logits = engine.logits(hidden[index[row, slot]])
    return logits, row.to(logits.device), slot.to(logits.device)
