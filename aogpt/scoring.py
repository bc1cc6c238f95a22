"""Log-probabilities of known sequences under any model, in nats: along an order, of
masked tokens, in groups of steps.

Shapes: B sequences, T positions, V vocabulary."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .model import (
    AOGPT,
    HeadLoss,
    Transformer,
    inverse_permutation,
    seen_by_copies,
    shifted_inputs,
    without_start,
)
from .runtime.errors import UserError


@torch.no_grad()
def token_log_probs(
    model: Transformer,
    tokens: Tensor,
    order: Tensor,
    known: Tensor | None = None,
    lengths: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return log p(x[order[b, i]] | x[order[b, :known[b, i]]]), (B, T) in prediction
    order, nats; 0 at steps that are not scored.

    A decoder takes one pass if each step follows all steps before it, or if its queries
    are inputs of their own; else it takes a pass for each number of known tokens, as an
    encoder always does.

    Args:
        tokens: LongTensor (B, T) in sequence order.
        order: LongTensor (B, T), rows are permutations of 0..T-1.
        known: LongTensor (B, T), how many of the first tokens of the order each step is
            predicted from; step i is not scored if they are more than i. By default
            they are i. `group_starts` makes those of groups.
        lengths: LongTensor (B,), tokens of an encoder's rows that are shorter than T;
            their orders end with the positions that they do not have.
        vocab_size: predict among the ids below this one alone.

    Raises UserError for tokens outside the vocabulary, other shapes, rows of `order`
    that are not permutations, and groups or other orders than from left to right of a
    plain GPT."""
    check_tokens(model, tokens, order)
    check_permutations(order)
    steps = torch.arange(order.shape[1], device=order.device)
    if model.config.l2r_only:
        is_l2r = torch.equal(order, steps.expand_as(order))
        in_groups = known is not None and bool((known < steps).any())
        if in_groups or not is_l2r:
            raise UserError(
                "this model is a plain GPT, which has no target positions: it predicts "
                "one token after the other from left to right"
            )
    # These two call the model itself, which train.py compiles or shards.
    if vocab_size is None and not model.config.is_encoder:
        if known is None:
            return -model(tokens, order)
        if model.separate_queries:
            log_probs = -model(tokens, order, torch.minimum(known, steps))
            return log_probs.where(known <= steps, 0.0)

    def logits(x: Tensor) -> Tensor:
        return at_least_float32(model.head_logits(x)[..., :vocab_size])

    loss = HeadLoss(model.config)
    targets = tokens.gather(1, order)
    result = at_least_float32(torch.zeros_like(order, dtype=model.wte.weight.dtype))
    for x, scored in passes(model, tokens, order, known, lengths):
        nll = loss(logits, x[scored][None], targets[scored][None])
        result[scored] = -nll[0]
    return result


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
    order = unmasked_first(unknown)
    known = (~unknown).sum(dim=1, keepdim=True)
    log_probs = token_log_probs(model, tokens, order, known.expand_as(order))
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
    if order is None:
        order = unmasked_first(masked)
    check_permutations(order)
    is_masked = masked.gather(1, order)
    if (is_masked[:, :-1] & ~is_masked[:, 1:]).any():
        raise UserError("an order must have the masked positions after the others")
    x = parallel_hidden(model, tokens, order, known=(~masked).sum(dim=1))
    row, position = masked.nonzero(as_tuple=True)
    step = inverse_permutation(order)[row, position]
    return model.head_logits(x[row, step])


def unmasked_first(masked: Tensor) -> Tensor:
    """Return the order (B, T) of the unmasked positions, then the masked ones, both
    from left to right."""
    return masked.to(torch.uint8).argsort(dim=1, stable=True)


def passes(
    model: Transformer,
    tokens: Tensor,
    order: Tensor,
    known: Tensor | None,
    lengths: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the final hidden states of each pass that `token_log_probs` takes, (B, T,
    D) by step, and the steps that it predicts, BoolTensor (B, T)."""
    T = order.shape[1]
    steps = torch.arange(T, device=order.device)
    if known is None:
        known = steps.expand_as(order)
    scored = known <= steps
    if lengths is not None:
        scored &= steps < lengths[:, None]
    follows = known == steps  # all steps before it
    if not model.config.is_encoder and not (scored & ~follows).any():
        yield model.hidden(tokens, order), scored
        return
    if model.separate_queries:  # which may know different numbers of tokens in one pass
        yield model.hidden(tokens, order, torch.minimum(known, steps)), scored
        return
    left = known.where(scored, T)
    while (left < T).any():
        first = left.amin(dim=1)  # (B,), T in a row that is done
        now = (left < T) & (left == first[:, None])
        yield parallel_hidden(model, tokens, order, first, lengths), now
        left = left.masked_fill(now, T)


def parallel_hidden(
    model: Transformer,
    tokens: Tensor,
    order: Tensor,
    known: Tensor,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the final hidden states (B, T, D) of all steps, of which those from
    `known` (B,) on are predicted from the first `known` tokens of the order. lengths:
    as of `token_log_probs`.

    In a decoder each of these is a copy of input `known`, the last known token, with
    its own target. It sees the inputs before that one and itself, never another
    copy."""
    steps = torch.arange(order.shape[1], device=order.device)
    if model.config.is_encoder:
        encoder: Any = model  # of systems/encoder.py
        step_of = inverse_permutation(order)
        masked = step_of >= known[:, None]
        if lengths is not None:
            masked &= step_of < lengths[:, None]
        x = encoder.masked_hidden(tokens, masked, lengths)
        return x.gather(1, order[..., None].expand_as(x))
    # (B, T) how many tokens each step knows, and the input that it is a copy of
    source = torch.minimum(steps, known[:, None])
    if model.separate_queries:
        return model.hidden(tokens, order, source)
    decoder = cast(AOGPT, model)
    in_tokens, in_positions = shifted_inputs(tokens, order)
    in_tokens = in_tokens.gather(1, source)
    in_positions = in_positions.gather(1, source)
    allowed = seen_by_copies(steps, steps[:, None], source.unsqueeze(2))  # (B, T, T)
    allowed = without_start(allowed, steps[:, None], model.config)
    return decoder.trunk(in_tokens, in_positions, order, allowed.unsqueeze(1))


def group_starts(
    order: Tensor, group: int, prompt_lengths: Tensor | None = None
) -> Tensor:
    """Return the first step of every step's group, (B, T), which is the number of
    tokens that it is predicted from. Steps of the prompt are groups of one."""
    steps = torch.arange(order.shape[1], device=order.device)
    if prompt_lengths is None:
        return (steps - steps % group).expand_as(order)
    past = steps - prompt_lengths[:, None]  # steps since the first group began
    return torch.where(past < 0, steps, steps - past % group)


def known_from(first: Tensor | int, known: Tensor) -> Tensor:
    """Return numbers of known tokens (B, T) for `token_log_probs`, such that the steps
    before `first`, (B, 1) or a number, are not scored."""
    T = known.shape[1]
    steps = torch.arange(T, device=known.device)
    return known.masked_fill(steps < first, T)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def check_tokens(model: Transformer, tokens: Tensor, companion: Tensor) -> None:
    """Raise UserError if tokens, and an order or a mask of them, do not fit the
    model."""
    limit = model.config.block_size
    is_batch = tokens.dim() == 2 and tokens.shape == companion.shape
    if not is_batch or not 1 <= tokens.shape[1] <= limit:
        raise UserError(
            f"tokens {tuple(tokens.shape)} and {tuple(companion.shape)} must both be "
            f"(batch, length), the length 1 to {limit}"
        )
    V = model.config.vocab_size
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(
            f"tokens run from {low} to {high}; this model knows 0 to {V - 1}"
        )


def check_mask(model: Transformer, tokens: Tensor, masked: Tensor) -> None:
    """Raise UserError if tokens and a mask of them do not fit the model."""
    if model.config.l2r_only:
        raise UserError(
            "this model is a plain GPT, which has one prediction for all masked "
            "positions: score along an order from left to right"
        )
    check_tokens(model, tokens, masked)
    check_boolean(masked, "masked")


def check_finite(numbers: Tensor, whose: str = "the model") -> None:
    """Raise UserError if a number is NaN: a ranking by it would be any order."""
    if numbers.isnan().any():
        raise UserError(
            f"the output of {whose} is not finite: its weights overflowed or hold NaN"
        )


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
