"""Log-probabilities of known sequences under any model, in nats: along an order, of
masked tokens, in groups of steps.

Shapes: B sequences, T positions, V vocabulary."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .model import (
    AOGPT,
    ModelConfig,
    Pass,
    Transformer,
    inverse_permutation,
    shifted_inputs,
)
from .runtime.errors import UserError


@torch.no_grad()
def token_log_probs(
    model: Transformer,
    tokens: Tensor,
    order: Tensor,
    group: int = 1,
    prompt_lengths: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return log p(x[order[b, i]] | x[order[b, :i]]), (B, T) in prediction order, nats.

    It takes one pass of a decoder, and one for each step of an encoder, which masks all
    later steps.

    Args:
        tokens: LongTensor (B, T) in sequence order.
        order: LongTensor (B, T), rows are permutations of 0..T-1.
        group: the steps of a group are predicted at once from the groups before it,
            as in decoding in such groups. It takes a pass for each group; models whose
            queries are inputs of their own need one for all.
        prompt_lengths: LongTensor (B,), steps before the first group; in groups the
            result means nothing there.
        lengths: LongTensor (B,), tokens of an encoder's rows that are shorter than T;
            their orders end with the positions that they do not have.

    Raises UserError for tokens outside the vocabulary, other shapes, rows of `order`
    that are not permutations, and groups or other orders than from left to right of a
    plain GPT."""
    check_tokens(model, tokens, order)
    check_permutations(order)
    if model.config.l2r_only:
        l2r = torch.arange(order.shape[1], device=order.device)
        if group > 1 or not torch.equal(order, l2r.expand_as(order)):
            raise UserError(
                "this model is a plain GPT, which has no target positions: it predicts "
                "one token after the other from left to right"
            )
    if group == 1 and not model.config.is_encoder:
        return -model(tokens, order)
    if model.separate_queries:
        starts = group_starts(order, group, prompt_lengths)
        return -model(tokens, order, starts)
    result = torch.zeros(
        order.shape,
        device=order.device,
        dtype=model.wte.weight.dtype,
    )
    for known, steps in groups_of(order, group, prompt_lengths):
        log_probs = parallel_log_probs(
            model, tokens, order, known=known, steps=steps, lengths=lengths
        )
        result = log_probs.where(steps, result.to(log_probs.dtype))
    return result


@torch.no_grad()
def joint_log_probs(
    model: Transformer, tokens: Tensor, order: Tensor, known: int, vocab_size: int
) -> Tensor:
    """Return log p(x[order[b, i]] | x[order[b, :i]]) of the steps from `known` on,
    float64 (B, T - known), nats, among the first `vocab_size` ids alone: the sum of a
    row is the exact log-probability of its last tokens given the first ones.

    tokens, order: LongTensor (B, T), as of `token_log_probs`. It takes one pass of a
    decoder, and one for each of these steps of an encoder."""
    check_tokens(model, tokens, order)
    check_permutations(order)
    if model.config.is_encoder:
        encoder: Any = model  # of systems/encoder.py
        row = torch.arange(len(tokens), device=tokens.device)
        states = []
        for step in range(known, order.shape[1]):
            masked = torch.zeros_like(tokens, dtype=torch.bool)
            masked.scatter_(1, order[:, step:], True)
            states.append(encoder.masked_hidden(tokens, masked)[row, order[:, step]])
        logits = encoder.head_logits(torch.stack(states, dim=1))
    else:
        logits = model.head_logits(model.hidden(tokens, order)[:, known:])
    log_probs = logits[..., :vocab_size].double().log_softmax(dim=-1)
    targets = tokens.gather(1, order)[:, known:]
    return log_probs.gather(2, targets[..., None]).squeeze(2)


@torch.no_grad()
def masked_log_probs(
    model: Transformer, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Return log p(true token | all unmasked tokens) of every masked position, in one
    pass.

    tokens LongTensor (B, T); masked BoolTensor (B, T); lengths LongTensor (B,) of rows
    that are shorter than T. Returns (B, T) in sequence order, nats; 0 at unmasked
    positions."""
    check_mask(model, tokens, masked)
    unknown = masked
    if lengths is not None:  # padding is neither context nor predicted
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        padding = positions >= lengths[:, None]
        unknown = masked | padding
        masked = masked & ~padding
    if model.config.is_encoder:
        encoder: Any = model  # of systems/encoder.py
        return encoder.log_probs(tokens, masked, lengths)
    # The context comes first.
    order = unknown.to(torch.uint8).argsort(dim=1, stable=True)
    log_probs = parallel_log_probs(
        model,
        tokens,
        order,
        known=(~unknown).sum(1),
    )
    return torch.zeros_like(log_probs).scatter_(1, order, log_probs) * masked


@torch.no_grad()
def masked_logits(
    model: Transformer, tokens: Tensor, masked: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return the logits of every masked token given all unmasked ones, in one pass:
    (masked tokens, V), row after row, by position.

    tokens LongTensor (B, T); masked BoolTensor (B, T). order LongTensor (B, T): the
    order in which a decoder reads the unmasked tokens, the masked ones last; by default
    from left to right."""
    check_mask(model, tokens, masked)
    if model.config.is_encoder:
        encoder: Any = model  # of systems/encoder.py
        return encoder.head_logits(encoder.masked_hidden(tokens, masked)[masked])
    if order is None:
        order = masked.to(torch.uint8).argsort(dim=1, stable=True)
    check_permutations(order)
    is_masked = masked.gather(1, order)
    if (is_masked[:, :-1] & ~is_masked[:, 1:]).any():
        raise UserError("an order must have the masked positions after the others")
    x = parallel_hidden(
        model,
        tokens,
        order,
        known=(~masked).sum(1),
    )
    row, position = masked.nonzero(as_tuple=True)
    step = inverse_permutation(order)[row, position]
    return model.head_logits(x[row, step])


@torch.no_grad()
def parallel_log_probs(
    model: Transformer,
    tokens: Tensor,
    order: Tensor,
    known: Tensor,
    steps: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return log p(x[order[b, r]] | x[order[b, :known[b]]]) of every step r >=
    known[b], in one pass.

    Args:
        known: LongTensor (B,), how many positions of the order are the context.
        steps: BoolTensor (B, T), the steps to score; by default all from `known` on.
        lengths: LongTensor (B,) of an encoder's rows that are shorter than T.

    Returns (B, T) in prediction order, nats; 0 at all other steps."""
    if steps is None:
        steps = torch.arange(order.shape[1], device=order.device) >= known[:, None]
    else:
        check_boolean(steps, "steps")
    if not model.config.is_encoder:
        x = parallel_hidden(model, tokens, order, known)
        log_probs = -model.loss(model.head_logits, x, tokens.gather(1, order))
        return log_probs.where(steps, torch.zeros_like(log_probs))
    encoder: Any = model  # of systems/encoder.py
    step_of = inverse_permutation(order)
    masked = step_of >= known[:, None]
    if lengths is not None:
        masked &= step_of < lengths[:, None]
    row, step = steps.nonzero(as_tuple=True)
    position = order[row, step]
    x = encoder.masked_hidden(tokens, masked, lengths)[row, position]
    logits = at_least_float32(model.head_logits(x))
    scored = logits.log_softmax(dim=-1).gather(1, tokens[row, position, None])
    log_probs = torch.zeros(
        order.shape,
        device=order.device,
        dtype=scored.dtype,
    )
    log_probs[row, step] = scored.squeeze(1)
    return log_probs


def parallel_hidden(
    model: Transformer, tokens: Tensor, order: Tensor, known: Tensor
) -> Tensor:
    """Return final hidden states (B, T, D) of a decoder. Steps up to `known` (B,) are
    those of training; all later ones are predicted from the first `known` tokens.

    Each later step is a copy of input `known`, the last known token, with its own
    target; it sees the inputs before that one and itself, never another copy. Models
    whose queries are inputs of their own have a method `parallel_hidden` instead."""
    if model.separate_queries:
        queries: Any = model  # of systems/two_stream.py or mask_query.py
        return queries.parallel_hidden(tokens, order, known)
    decoder = cast(AOGPT, model)
    steps = torch.arange(order.shape[1], device=order.device)
    source = torch.minimum(steps, known[:, None])  # (B, T) the input of each step
    in_tokens, in_positions = shifted_inputs(tokens, order)
    in_tokens = in_tokens.gather(1, source)
    in_positions = in_positions.gather(1, source)
    allowed = (steps < source.unsqueeze(2)) | (steps == steps[:, None])  # (B, T, T)
    allowed = without_start(allowed, steps[:, None], model.config)
    adaln_input = None
    if decoder.adaln_f is not None:
        adaln_input = decoder.target_vectors()
    p = Pass(
        decoder,
        in_positions,
        targets=order,
        inverse=inverse_permutation(order),
        adaln_input=adaln_input,
        allowed=allowed.unsqueeze(1),
    )
    return decoder.trunk(decoder.embed(in_tokens, in_positions), p)


def without_start(
    allowed: Tensor,
    last: Tensor,
    config: ModelConfig,
) -> Tensor:
    """Return a mask (..., keys) in which a hidden [None] is visible only to queries
    that see nothing else: those whose last input, of the shape (..., 1), is 0."""
    if config.start != "hidden":
        return allowed
    keys = torch.arange(allowed.shape[-1], device=allowed.device)
    return allowed & ((keys > 0) | (last == 0))


def group_starts(
    order: Tensor, group: int, prompt_lengths: Tensor | None = None
) -> Tensor:
    """Return the first step of every step's group, (B, T). Steps of the prompt are
    groups of one."""
    steps = torch.arange(order.shape[1], device=order.device)
    if prompt_lengths is None:
        return (steps - steps % group).expand_as(order)
    past = steps - prompt_lengths[:, None]  # steps since the first group began
    return torch.where(past < 0, steps, steps - past % group)


def groups_of(
    order: Tensor, group: int, prompt_lengths: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each group, the step where it begins in each row (B,) and its steps,
    BoolTensor (B, T)."""
    if group < 1:
        raise UserError(f"the group is {group}; give a number of at least 1")
    B, T = order.shape
    if prompt_lengths is None:
        prompt_lengths = torch.zeros(
            B,
            dtype=torch.long,
            device=order.device,
        )
    steps = torch.arange(T, device=order.device)
    for start in range(0, T - int(prompt_lengths.min()), group):
        known = (prompt_lengths + start).clamp(max=T)
        yield known, (steps >= known[:, None]) & (steps < known[:, None] + group)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def check_tokens(
    model: Transformer,
    tokens: Tensor,
    companion: Tensor,
) -> None:
    """Raise UserError if tokens, and an order or a mask of them, do not fit the
    model."""
    if tokens.shape != companion.shape or tokens.dim() != 2:
        raise UserError(
            f"tokens {tuple(tokens.shape)} and {tuple(companion.shape)} must both be "
            "(batch, length)"
        )
    T = tokens.shape[1]
    limit = model.config.block_size
    if not 1 <= T <= limit:
        raise UserError(f"{T} tokens a sequence; this model takes 1 to {limit}")
    V = model.config.vocab_size
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(
            f"tokens run from {low} to {high}; this model knows 0 to {V - 1}"
        )


def check_mask(
    model: Transformer,
    tokens: Tensor,
    masked: Tensor,
) -> None:
    """Raise UserError if tokens and a mask of them do not fit the model."""
    if model.config.l2r_only:
        raise UserError(
            "this model is a plain GPT, which has one prediction for all masked "
            "positions: score along an order from left to right"
        )
    check_tokens(model, tokens, masked)
    check_boolean(masked, "masked")


def check_boolean(mask: Tensor, name: str) -> None:
    """Raise UserError for a mask that is not boolean, on which indexing and ~ would
    have another meaning."""
    if mask.dtype != torch.bool:
        raise UserError(f"{name} is {mask.dtype}; give a boolean tensor")


def check_permutations(order: Tensor) -> None:
    """Raise UserError if a row of (B, T) is not a permutation of 0..T-1."""
    steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
    if not torch.equal(order.sort(dim=1).values, steps):
        raise UserError(
            f"every row of order must be a permutation of 0..{order.shape[1] - 1}"
        )
