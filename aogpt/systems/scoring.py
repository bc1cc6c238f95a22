"""Log-probabilities of known sequences: along an order, of masked tokens, in groups."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model import AOGPT, Pass, attention, inverse_permutation
from ..runtime.errors import UserError
from .chunked_head import ChunkedHead


class MaskedPass(Pass):
    """A training pass in which step i sees the inputs that a mask (B, 1, T, T) allows."""

    def __init__(
        self, config, targets: Tensor, condition: Tensor | None, allowed: Tensor
    ):
        super().__init__(config, targets, condition)
        self.allowed = allowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=self.allowed)


class Scoring:
    """What every decoder can say of a known sequence; `Encoder` has its own forms."""

    @torch.no_grad()
    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """log p(x[order[b, i]] | x[order[b, :i]]), (B, T) in prediction order, nats.

        tokens (B, T) in sequence order; order (B, T). Raises UserError for tokens outside the
        vocabulary, other shapes, and rows of `order` that are not permutations."""
        check_tokens(self, tokens, order)
        check_permutations(order)
        return -self(tokens, order)

    @torch.no_grad()
    def masked_log_probs(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """log p(true token | all unmasked tokens) at every masked position, in one pass.

        tokens (B, T); masked BoolTensor (B, T); lengths (B,) of rows shorter than T. Returns
        (B, T) in sequence order, nats; 0 at unmasked positions."""
        check_mask(self, tokens, masked)
        unknown = masked
        if lengths is not None:  # padding is not context
            padding = (
                torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
            )
            unknown = masked | padding
            masked = masked & ~padding
        order = unknown.to(torch.uint8).argsort(
            dim=1, stable=True
        )  # the context comes first
        log_probs = self.parallel_log_probs(tokens, order, known=(~unknown).sum(1))
        return torch.zeros_like(log_probs).scatter_(1, order, log_probs) * masked

    @torch.no_grad()
    def masked_logits(
        self, tokens: Tensor, masked: Tensor, order: Tensor | None = None
    ) -> Tensor:
        """Logits of every masked token given all unmasked ones, in one pass: (masked tokens, V),
        row after row, by position. tokens (B, T); masked BoolTensor (B, T). order (B, T): in which
        a decoder reads the unmasked tokens, the masked ones last; by default from left to right."""
        check_mask(self, tokens, masked)
        if order is None:
            order = masked.to(torch.uint8).argsort(dim=1, stable=True)
        x = self.parallel_hidden(tokens, order, known=(~masked).sum(1))
        row, position = masked.nonzero(as_tuple=True)
        return self.head_logits(x[row, inverse_permutation(order)[row, position]])

    @torch.no_grad()
    def parallel_log_probs(
        self, tokens: Tensor, order: Tensor, known: Tensor
    ) -> Tensor:
        """log p(x[order[b, r]] | x[order[b, :known[b]]]) for every step r >= known[b], in one pass.

        The first `known` (B,) positions of the order are the context of all others. Returns (B, T)
        in prediction order, nats; 0 at steps < known."""
        x = self.parallel_hidden(tokens, order, known)
        log_probs = -self.head_loss(x, tokens.gather(1, order))
        predicted = torch.arange(order.shape[1], device=order.device) >= known[:, None]
        return log_probs.where(predicted, torch.zeros_like(log_probs))

    def parallel_hidden(self, tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
        """Final hidden states (B, T, D). Steps up to `known` are those of training. Every later one
        is a copy of input `known`, the last known token, with a target of its own; it sees the
        inputs before that one and itself, never another copy."""
        steps = torch.arange(order.shape[1], device=order.device)
        source = torch.minimum(
            steps, known[:, None]
        )  # (B, T) the input that each step copies
        in_tokens, in_positions = (
            v.gather(1, source) for v in self.inputs(tokens, order)
        )
        allowed = (steps < source.unsqueeze(2)) | (steps == steps[:, None])  # (B, T, T)
        allowed = without_start(allowed, steps[:, None], self.config)
        p = MaskedPass(self.config, order, self.condition(), allowed.unsqueeze(1))
        return self.trunk(self.embed(in_tokens, in_positions), in_positions, p)


class Decoder(ChunkedHead, Scoring, AOGPT):
    """AO-GPT with a chunked head and scoring of known sequences."""


def without_start(allowed: Tensor, last: Tensor, config) -> Tensor:
    """A mask (..., keys) in which a hidden [None] is visible only to queries that see nothing else:
    those whose last input, of the shape (..., 1), is 0."""
    if config.start != "hidden":
        return allowed
    return allowed & (
        (torch.arange(allowed.shape[-1], device=allowed.device) > 0) | (last == 0)
    )


@torch.no_grad()
def group_log_probs(
    model: AOGPT,
    tokens: Tensor,
    order: Tensor,
    group: int,
    prompt_lengths=None,
    lengths=None,
) -> Tensor:
    """As `token_log_probs`, but the `group` steps of a group are predicted at once from the groups
    before it: what decoding in such groups draws from. A pass for each group; models whose queries
    are inputs of their own (two_stream, mask_query) need one.

    Args:
        prompt_lengths: (B,) steps before the first group; the result means nothing there.
        lengths: (B,) of an encoder's rows that are shorter than T; their orders end with the
            positions that they do not have."""
    config = model.config
    if group == 1 and not config.is_encoder:
        return model.token_log_probs(tokens, order)
    if config.l2r_only:
        raise UserError(
            "this model has no target positions and predicts one token at a time"
        )
    if config.target in ("two_stream", "mask_query"):
        return model.token_log_probs(
            tokens, order, group_starts(order, group, prompt_lengths)
        )
    check_tokens(model, tokens, order)
    check_permutations(order)
    result = torch.zeros(order.shape, device=order.device, dtype=model.wte.weight.dtype)
    for known, steps in groups_of(order, group, prompt_lengths):
        more = {"steps": steps, "lengths": lengths} if config.is_encoder else {}
        log_probs = model.parallel_log_probs(tokens, order, known, **more)
        result = log_probs.where(steps, result.to(log_probs.dtype))
    return result


def group_starts(
    order: Tensor, group: int, prompt_lengths: Tensor | None = None
) -> Tensor:
    """The first step of every step's group, (B, T). Steps of the prompt are groups of one."""
    steps = torch.arange(order.shape[1], device=order.device)
    if prompt_lengths is None:
        return (steps - steps % group).expand_as(order)
    past = steps - prompt_lengths[:, None]  # steps since the first group began
    return torch.where(past < 0, steps, steps - past % group)


def groups_of(
    order: Tensor, group: int, prompt_lengths: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each group, the step where it begins in each row (B,) and its steps, bool (B, T)."""
    B, T = order.shape
    if prompt_lengths is None:
        prompt_lengths = torch.zeros(B, dtype=torch.long, device=order.device)
    steps = torch.arange(T, device=order.device)
    for start in range(0, T - int(prompt_lengths.min()), group):
        known = (prompt_lengths + start).clamp(max=T)
        yield known, (steps >= known[:, None]) & (steps < known[:, None] + group)


def check_tokens(model: AOGPT, tokens: Tensor, other: Tensor) -> None:
    """Raise UserError if tokens and what comes with them (orders, masks) do not fit the model."""
    if tokens.shape != other.shape or tokens.dim() != 2:
        found = f"tokens {tuple(tokens.shape)} and {tuple(other.shape)}"
        raise UserError(f"{found} must both be (batch, length)")
    T = tokens.shape[1]
    limit = model.config.block_size
    V = model.config.vocab_size
    if not 1 <= T <= limit:
        raise UserError(f"{T} tokens a sequence; this model takes 1 to {limit}")
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= V:
        raise UserError(
            f"tokens run from {low} to {high}; this model knows 0 to {V - 1}"
        )


def check_mask(model: AOGPT, tokens: Tensor, masked: Tensor) -> None:
    check_tokens(model, tokens, masked)
    check_boolean(masked, "masked")


def check_boolean(mask: Tensor, name: str) -> None:
    """Raise UserError for a mask of integers: indexing and ~ would mean something else."""
    if mask.dtype != torch.bool:
        raise UserError(f"{name} is {mask.dtype}; give a boolean tensor")


def check_permutations(order: Tensor) -> None:
    """Raise UserError if a row of (B, T) is not a permutation of 0..T-1."""
    steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
    if not torch.equal(order.sort(dim=1).values, steps):
        raise UserError(
            f"every row of order must be a permutation of 0..{order.shape[1] - 1}"
        )
