"""Generation in any order: plans, token choice and the KV-cached engine.

A plan fixes, before the model runs, the order in which the positions of a sample are revealed and the groups in which
they are revealed together. Autoregressive decoding, masked-diffusion sampling and infilling differ in nothing but
their plan. In masked diffusion a position unmasks at a time that does not depend on the model, so drawing the times
first and evaluating the model only where something unmasks gives exactly the same distribution (the paper, Lemma 4.1).

Shapes: B samples, T positions, S steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model import AOGPT, KVCache, log_linear_noise

# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Which positions are revealed at which step, for B samples of T positions.

    order: LongTensor (B, T), positions in the order in which they are revealed, given positions first.
    step: LongTensor (B, T), the step at which ``order[b, i]`` is revealed; -1 for given ones; never falling along i.
        Positions of equal step are predicted in parallel, from the positions of earlier steps only.
    """

    order: Tensor
    step: Tensor

    def __post_init__(self):
        if self.order.shape != self.step.shape or self.order.dim() != 2:
            raise ValueError(f"order {tuple(self.order.shape)} and step {tuple(self.step.shape)} must both be (B, T)")
        positions = torch.arange(self.order.shape[1], device=self.order.device)
        if not torch.equal(self.order.sort(dim=1).values, positions.expand_as(self.order)):
            raise ValueError(f"every row of a plan's order must be a permutation of 0..{self.order.shape[1] - 1}")
        if (self.step < -1).any() or (self.step.diff(dim=1) < 0).any():
            raise ValueError("a plan's steps must be -1 (given) or more and must not fall along the order")

    def __getitem__(self, rows: slice) -> Plan:
        return Plan(self.order[rows], self.step[rows])

    def __len__(self) -> int:
        return len(self.order)

    def given(self) -> Tensor:
        """BoolTensor (B, T) in sequence order: the positions whose tokens come from the user."""
        return torch.zeros_like(self.step, dtype=torch.bool).scatter_(1, self.order, self.step < 0)


def l2r_plan(batch_size: int, length: int, given: Tensor | None = None) -> Plan:
    """Left to right, one position a step. given: BoolTensor (B, T) of positions that are context, or None."""
    order, index = _order_by(torch.arange(length).expand(batch_size, length), given)
    return Plan(order, index.clamp(min=-1))


def mdm_plan(
    batch_size: int,
    length: int,
    steps: int,
    generator: torch.Generator,
    given: Tensor | None = None,
    even: bool = False,
) -> Plan:
    """Masked-diffusion sampling in `steps` equal steps of the linear schedule (the paper, section 4.3).

    Exact: every masked position unmasks at its own time, U(0, 1), so the number revealed in a step varies and some
    steps reveal nothing. Even: a uniformly random order cut into `steps` groups whose sizes differ by at most one.

    Args:
        given: BoolTensor (B, T) of positions that are context, or None.
        generator: CPU generator of the times.
    """
    if not 1 <= steps <= 2**31:
        raise ValueError(f"steps is {steps}; sampling takes at least 1 and at most 2**31 steps")
    elapsed = torch.rand(batch_size, length, generator=generator, dtype=torch.float64)  # 1 - unmasking time
    order, index = _order_by(elapsed, given)
    if even:
        total = (index >= 0).sum(dim=1, keepdim=True)
        step = index * total.clamp(max=steps) // total.clamp(min=1)
    else:
        step = (elapsed.gather(1, order) * steps).long()
    return Plan(order, step.where(index >= 0, -1))


def _order_by(key: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Order (B, T): the given positions in ascending order, then the others by rising key (>= 0); and the index (B, T)
    of each entry among the others, negative for given ones."""
    B, T = key.shape
    position = torch.arange(T).expand(B, T)
    given = torch.zeros(B, T, dtype=torch.bool) if given is None else given.cpu()
    order = torch.where(given, position.to(key.dtype) - T, key).argsort(dim=1, stable=True)
    return order, position - given.sum(dim=1, keepdim=True)


# ---- token choice ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenChoice:
    """How a token is drawn from the model's distribution: temperature first, then top-k, then the nucleus."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass reaches top_p (nucleus sampling)."""
    top_k: int | None = None
    """Keep the top_k most probable tokens."""

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number above 0 and up to 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; keep at least 1 token")


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: TokenChoice) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution in float64.

    One uniform number a token decides; with float64 probabilities no mass is lost, as it is with float32 Gumbel noise
    (Zheng et al. 2024).

    Args:
        logits: (N, V). uniforms: float64 (N,) in [0, 1).

    Returns: LongTensor (N,).
    """
    if choice.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double()
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / choice.temperature).softmax(dim=-1)
    ids = None
    if choice.top_p < 1 or choice.top_k is not None:
        probs, ids = probs.sort(dim=-1, descending=True, stable=True)
        if choice.top_k is not None:
            probs[:, choice.top_k :] = 0
        mass_before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(mass_before >= choice.top_p * probs.sum(dim=-1, keepdim=True), 0)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that a token of probability 0 is never taken.
    threshold = torch.minimum(uniforms.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    return (drawn if ids is None else ids.gather(1, drawn)).squeeze(-1)


# ---- the engine ------------------------------------------------------------------------------------------------------


@dataclass
class Generation:
    """Samples and how they came about.

    tokens: LongTensor (B, T) in sequence order.
    step: LongTensor (B, T), the plan's step at which each position was revealed, -1 for given ones.
    log_probs: float tensor (B, T), log-probability (nats) of each revealed token under the model, among the ids that
        may be drawn, before temperature and truncation; 0 for given ones.
    model_calls: forward passes of the model, all batches together.
    token_forwards: inputs those passes were fed, padding left out.
    """

    tokens: Tensor
    step: Tensor
    log_probs: Tensor
    model_calls: int
    token_forwards: int


@torch.no_grad()
def generate(
    model: AOGPT,
    plan: Plan,
    tokens: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    choice: TokenChoice | None = None,
    vocab_size: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Generation:
    """Generate the samples of a plan: a decoder with a KV cache, an encoder with a full pass per step.

    Args:
        model: in eval mode, on any device.
        plan: B samples of T <= block_size positions.
        tokens: LongTensor (B, T) that holds the given tokens at the plan's given positions; the rest is ignored.
        generator: CPU generator of one uniform number per position, or
        uniforms: those numbers, float64 (B, T) in sequence order: sample b depends on row b alone.
        choice: temperature, top-p, top-k.
        vocab_size: only ids below it are drawn (the rows that pad the token table are not tokens).
        batch_size: samples in flight at once; all by default.
        progress: called after every model call with the number of positions it revealed.
    """
    B, T = plan.order.shape
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if B == 0:
        raise ValueError("the plan holds no samples; plan at least one")
    if T > model.config.block_size:
        raise ValueError(f"samples of {T} tokens, but the model was built for up to {model.config.block_size}")
    if tokens is None:
        if (plan.step < 0).any():
            raise ValueError("the plan has given positions: pass their tokens")
        tokens = torch.zeros(B, T, dtype=torch.long)
    if tokens.shape != (B, T):
        raise ValueError(f"tokens are {tuple(tokens.shape)}, but the plan is for {(B, T)}")
    if uniforms is not None and uniforms.shape != (B, T):
        raise ValueError(f"uniforms are {tuple(uniforms.shape)}, but the plan is for {(B, T)}")
    for name, value in (("vocab_size", vocab_size), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1, or None for all")
    given = tokens.cpu()[plan.given()]
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < model.config.vocab_size:
        raise ValueError(f"a given token is outside the model's vocabulary of {model.config.vocab_size}")
    if uniforms is None:
        uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    choice = choice or TokenChoice()
    tables = list(model.adaln_tables())
    parts = [
        _generate_batch(model, plan[rows], tokens[rows], uniforms[rows], choice, vocab_size, tables, progress)
        for rows in _slices(B, batch_size or B)
    ]
    return Generation(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "step", "log_probs")),
        *(sum(getattr(part, name) for part in parts) for name in ("model_calls", "token_forwards")),
    )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def group_sizes(plan: Plan) -> Tensor:
    """Positions in each group of each row, LongTensor (B, G), empty groups at the end.

    Steps in which a row reveals nothing are left out: groups of a row are its own non-empty steps, so the number of
    model calls is that of the longest row.
    """
    step = plan.step
    starts = step.diff(dim=1, prepend=torch.full_like(step[:, :1], -1)) > 0
    index = starts.cumsum(dim=1)  # 1 for the first group, 0 for given positions
    sizes = torch.zeros(len(step), int(index.max()) + 1, dtype=torch.long)
    return sizes.scatter_add_(1, index, torch.ones_like(index))[:, 1:]


def _generate_batch(model, plan, tokens, uniforms, choice, vocab_size, tables, progress) -> Generation:
    B, T = plan.order.shape
    device, dtype = model.wte.weight.device, model.wte.weight.dtype
    encoder = model.config.attention == "full"
    sizes = group_sizes(plan)
    known = (plan.step < 0).sum(dim=1)
    cached = torch.where(known == T, known, 0)  # a row with nothing to reveal is fed nothing
    widest = int(max((known[:, None] + sizes[:, :1]).max(), 2 * sizes.max())) if sizes.numel() else 0
    cache = None if encoder else KVCache(model.config, B, T + widest, device=device, dtype=dtype)

    order = plan.order.to(device)
    ordered = tokens.to(device).gather(1, order)
    ordered_uniforms = uniforms.to(device).gather(1, order)
    ordered_log_probs = torch.zeros(B, T, device=device)
    steps, token_forwards = torch.arange(T), 0
    for g in range(sizes.shape[1]):
        size = sizes[:, g]
        fresh = known - cached  # inputs to feed before the first target's
        revealed = ((steps >= known[:, None]) & (steps < (known + size)[:, None])).to(device)
        if encoder:
            hidden = _encoder_step(model, ordered, order, known.to(device), revealed)
        else:
            hidden = _decoder_step(model, ordered, order, cached, fresh, size, cache, tables)
        logits = model.logits(hidden)[:, :vocab_size]
        drawn = choose_tokens(logits, ordered_uniforms[revealed], choice)
        ordered[revealed] = drawn
        ordered_log_probs[revealed] = logits.float().log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
        token_forwards += T * int((size > 0).sum()) if encoder else int((fresh + size).sum())
        # The first copy stays in the cache. A finished row needs nothing more: it counts as fully cached.
        known = known + size
        finished = known == T
        cached = torch.where(finished, known, known - size + 1)
        if progress is not None:
            progress(int(size.sum()))

    in_sequence = [torch.empty_like(v).scatter_(1, order, v).cpu() for v in (ordered, ordered_log_probs)]
    step = torch.empty_like(plan.step).scatter_(1, plan.order, plan.step)
    return Generation(in_sequence[0], step, in_sequence[1], sizes.shape[1], token_forwards)


def _decoder_step(model: AOGPT, ordered, order, cached, fresh, size, cache: KVCache, tables) -> Tensor:
    """Hidden states (N, D) of the targets of every row, rows one after the other."""
    width, device = int((fresh + size).max()), order.device
    length = int(cached.max()) + width
    known = cached + fresh
    hidden = model.parallel_hidden(ordered, order, cached.to(device), known.to(device), width, cache, length, tables)
    items = torch.arange(width)
    is_target = (items >= fresh[:, None]) & (items < (fresh + size)[:, None])
    return hidden[is_target.to(device)]


def _encoder_step(model: AOGPT, ordered, order, known, revealed) -> Tensor:
    """The same for an encoder: one pass of full attention over the rows that reveal something, and over no others."""
    active = revealed.any(dim=1)
    visible = torch.arange(order.shape[1], device=order.device) < known[:, None]
    inputs = torch.where(visible, ordered, model.config.mask_token)
    inputs = torch.empty_like(inputs).scatter_(1, order, inputs)[active]
    sigma = None
    if model.config.noise:
        masked_share = 1 - known[active] / order.shape[1]
        sigma = log_linear_noise(masked_share.double())  # bfloat16 would round it to infinity
    hidden = model.encoder_hidden(inputs, sigma)
    rows = torch.arange(len(inputs), device=order.device)[:, None]
    return hidden[rows, order[active]][revealed[active]]
