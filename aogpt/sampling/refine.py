"""Refinement: redraw some tokens of complete samples given all others, for some rounds.

A round removes a share of the generated tokens and draws them again, one after the
other in a random order, each from the model's distribution given all that is known
then. A decoder reads the kept tokens in the order in which they became known; those
redrawn become its last. So redrawing the last token of an order leaves the joint along
that order as it is.

Shapes: B samples, T positions."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..model import AOGPT, head_chunk, inverse_permutation
from .cached import float32_logits
from .engine import Decoder, Generation, OnUnmasked
from .plans import Plan
from .race import fresh_uniforms
from .token_choice import REFINED

RefineBy = Literal["drawn", "others", "random"]
ROWS = 16  # that are scored in one pass, where no batch size is given


def refine(
    decoder: Decoder,
    samples: Generation,
    uniforms: Tensor,
    rounds: int,
    share: float,
    by: RefineBy,
    progress: OnUnmasked = None,
) -> Generation:
    """Return the samples after all rounds, with the log-probabilities of the text that
    is there then: each generated token given all tokens before it in `order`.

    Args:
        uniforms: (B, T), those the samples were drawn with, from which all random
            numbers are hashed.
        rounds: 0 returns the samples as they are.
        share: of the generated tokens that a round redraws.
        by: redraw the tokens of least log-probability when they were drawn, or given
            all others, or random ones.
        progress: as of `generate`."""
    if not rounds:
        return samples
    generated = samples.step >= 0
    count = redrawn(generated, share)
    for number in range(rounds):
        salt = REFINED - 2 * number
        keys = fresh_uniforms(uniforms, salt)
        fresh = fresh_uniforms(uniforms, salt - 1)
        if by == "others":
            samples, score = given_others(decoder, samples)
        elif by == "drawn":
            score = samples.log_probs
        else:
            score = keys
        score = score.double().where(generated, torch.inf)
        least_first = score.argsort(dim=1, stable=True)
        rank = inverse_permutation(least_first)
        chosen = rank < count[:, None]
        samples = redraw(
            decoder, samples, chosen, keys=keys, uniforms=fresh, progress=progress
        )
    return along_order(decoder, samples)


def redrawn(generated: Tensor, share: float) -> Tensor:
    """Return how many tokens of each sample a round redraws, LongTensor (B,): one at
    least, if any is generated. generated: BoolTensor (B, T)."""
    total = generated.sum(dim=1)
    count = (share * total).round().long()
    count = count.clamp(min=1)
    return count.minimum(total)


def redraw(
    decoder: Decoder,
    samples: Generation,
    chosen: Tensor,
    keys: Tensor,
    uniforms: Tensor,
    progress: OnUnmasked = None,
) -> Generation:
    """Return the samples with the chosen tokens, BoolTensor (B, T), drawn again one
    after the other, those of small key (B, T) in [0, 1) first. Their steps come after
    the sample's. uniforms, progress: as of `generate`."""
    plan = _last(samples.order, samples.length, chosen, keys)
    new = decoder.generate(
        plan,
        samples.tokens,
        uniforms=uniforms,
        progress=progress,
    )
    last_step = samples.step.amax(dim=1, keepdim=True)
    later = new.step + last_step + 1
    return Generation(
        tokens=new.tokens,
        step=later.where(chosen, samples.step),
        log_probs=new.log_probs.where(chosen, samples.log_probs),
        length=samples.length,
        model_calls=samples.model_calls + new.model_calls,
        token_forwards=samples.token_forwards + new.token_forwards,
        nfe=samples.nfe + new.nfe,
        order=new.order,
    )


def given_others(decoder: Decoder, samples: Generation) -> tuple[Generation, Tensor]:
    """Return the samples, with the cost added, and the log-probability (B, T) of each
    generated token given all others: a pass for each token, those of a sample side by
    side."""
    generated = samples.step >= 0
    any_generated = generated.any(dim=1)
    T = samples.step.shape[1]
    scores = torch.zeros_like(samples.log_probs)
    calls = 0
    forwards = 0
    for b in any_generated.nonzero().flatten().tolist():
        positions = generated[b].nonzero()  # (n, 1)
        n = len(positions)
        alone = torch.arange(T) == positions  # (n, T): one position in each row
        tokens = samples.tokens[b].expand(n, T)
        plan = _last(
            order=samples.order[b].expand(n, T),
            length=samples.length[b].expand(n),
            chosen=alone,
            keys=torch.zeros(n, T),
        )
        scored = decoder.generate(plan, tokens, forced=tokens)
        scores[b, generated[b]] = scored.log_probs[alone]
        calls += scored.model_calls
        forwards += scored.token_forwards
    samples = replace(
        samples,
        model_calls=samples.model_calls + calls,
        token_forwards=samples.token_forwards + forwards,
        nfe=samples.nfe + generated.sum(dim=1),
    )
    return samples, scores


@torch.no_grad()
def along_order(decoder: Decoder, samples: Generation) -> Generation:
    """Return the samples with the log-probability of each generated token given all
    tokens before it in `order`, among the ids that may be drawn. It takes one pass of a
    decoder, or one a generated token of an encoder, whose cost is added."""
    model = decoder.model
    generated = samples.step >= 0
    if model.config.is_encoder:
        T = samples.order.shape[1]
        place = inverse_permutation(samples.order)
        keys = place / T
        plan = _last(
            samples.order,
            samples.length,
            chosen=generated,
            keys=keys,
        )
        # Compiling would take longer than these passes.
        plain = replace(decoder, compile=False, kernels=False)
        scored = plain.generate(plan, samples.tokens, forced=samples.tokens)
        return replace(
            samples,
            log_probs=scored.log_probs,
            model_calls=samples.model_calls + scored.model_calls,
            token_forwards=samples.token_forwards + scored.token_forwards,
            nfe=samples.nfe + scored.nfe,
        )
    device = model.wte.weight.device
    size = decoder.batch_size or ROWS
    token_parts = samples.tokens.split(size)
    order_parts = samples.order.split(size)
    parts = []
    for tokens, order in zip(token_parts, order_parts, strict=True):
        tokens = tokens.to(device)
        order = order.to(device)
        log_probs = _one_pass(model, tokens, order, decoder.vocab_size)
        parts.append(log_probs.cpu())
    log_probs = torch.cat(parts)
    any_generated = generated.any(dim=1)
    forwards = int(samples.length[any_generated].sum())
    return replace(
        samples,
        log_probs=log_probs.where(generated, 0.0),
        model_calls=samples.model_calls + len(parts),
        token_forwards=samples.token_forwards + forwards,
        nfe=samples.nfe + any_generated,
    )


def _one_pass(
    model: AOGPT,
    tokens: Tensor,
    order: Tensor,
    vocab_size: int | None,
) -> Tensor:
    """Return log p (B, T), float32 by position, of tokens (B, T) along order (B, T)."""
    hidden = model.hidden(tokens, order).flatten(0, 1)
    targets = tokens.gather(1, order).flatten()
    chunk = head_chunk(model.config.vocab_size, tokens.device.type)
    parts = []
    state_chunks = hidden.split(chunk)
    target_chunks = targets.split(chunk)
    for states, chunk_targets in zip(state_chunks, target_chunks, strict=True):
        logits = float32_logits(model, states)
        logits = logits[:, :vocab_size].float()
        log_probs = logits.log_softmax(dim=-1)
        index = chunk_targets[:, None]
        parts.append(log_probs.gather(1, index).squeeze(1))
    by_step = torch.cat(parts).view(order.shape)
    by_position = torch.zeros_like(by_step)
    return by_position.scatter_(1, order, by_step)


def _last(
    order: Tensor,
    length: Tensor,
    chosen: Tensor,
    keys: Tensor,
) -> Plan:
    """Return a plan that generates the chosen positions by rising key (B, T) in [0, 1),
    after all others in their order."""
    T = order.shape[1]
    place = inverse_permutation(order).double()
    # Positions that a shorter sample does not have come after the chosen ones.
    is_absent = place >= length[:, None]
    key = torch.where(is_absent, place + 2 * T, place)
    key = torch.where(chosen, T + keys, key)
    number_kept = length - chosen.sum(dim=1)
    step = torch.arange(T) - number_kept[:, None]
    return Plan(
        order=key.argsort(dim=1, stable=True),
        step=step.clamp(min=-1),
        length=length,
    )
