"""What bench decode compares with: a sampler with the same distributions, as one would write it
first. It pads all rows, rebuilds the mask in every step, computes adaLN for every input, lengthens
its cache by concatenation and sorts the vocabulary for the nucleus.

Shapes: B samples, T positions, W inputs of one step, H heads, D width, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from model import AOGPT, Pass, attention
from sampling import Generation, Plan, TokenChoice, group_sizes


class PerTokenPass(Pass):
    """adaLN for every input; each sees what `mask` says, causally without one."""

    def __init__(self, model: AOGPT, targets: Tensor, mask=None, cache=None):
        super().__init__(model.config, None, model.condition())
        self.targets, self.mask, self.cache = targets, mask, cache

    def enter(self, layer: int) -> None:
        self.layer = layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.cache is not None:
            k, v = self.cache.append(self.layer, k, v)
        return attention(q, k, v, self.mask, causal=self.mask is None)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        return linear(self.condition[self.targets]).chunk(parts, dim=-1)  # (B, W, D) each


class GrowingCache:
    """Keys and values of every layer, (B, slots, H, D/H), that grow by concatenation. The next
    inputs go to `slots` (B, W); what is in slots from `start` on is dropped."""

    def __init__(self, n_layer: int):
        self.layers: list[tuple] = [(None, None)] * n_layer
        self.slots, self.start = None, 0

    def append(self, layer: int, *keys_and_values: Tensor) -> tuple[Tensor, ...]:
        """Add the keys and values of the inputs, (B, W, H, D/H) each; returns all."""
        grown = []
        for old, new in zip(self.layers[layer], keys_and_values, strict=True):
            room = torch.zeros_like(new)
            longer = room if old is None else torch.cat([old[:, : self.start], room], dim=1)
            grown.append(longer.scatter_(1, self.slots[:, :, None, None].expand_as(new), new))
        self.layers[layer] = tuple(grown)
        return self.layers[layer]


@torch.no_grad()
def decode_plainly(
    model: AOGPT,
    plan: Plan,
    *,
    choice: TokenChoice,
    vocab_size: int,
    generator: torch.Generator,
    cached: bool = True,
    calls: Collection[int] | None = None,
) -> Generation:
    """Generate the samples of a plan without prompts, with AO-GPT in eval mode.

    vocab_size: only ids below it are drawn. generator: on the model's device. calls: without a
    cache, run the model in these steps only and leave token 0 where the others would unmask;
    `model_calls` and `token_forwards` are of the whole plan.
    """
    c = model.config
    settings = c.attention, c.target, c.start, c.position, c.value_residual
    assert settings == ("causal", "adaln", "attended", "learned", False), "AO-GPT alone"
    assert not model.training and (plan.step >= 0).all(), "in eval mode, without prompts"
    weight, cache = model.wte.weight, GrowingCache(model.config.n_layer) if cached else None
    order, steps = plan.order.to(weight.device), plan.step.unique().tolist()
    tokens, log_probs = torch.zeros_like(order), torch.zeros_like(order, dtype=weight.dtype)
    known = start = torch.zeros_like(plan.order[:, 0])  # (B,); inputs before `start` are cached
    token_forwards = 0
    for call, step in enumerate(steps):
        size = (plan.step == step).sum(dim=1)  # (B,) positions that each row unmasks
        active = size > 0
        count = known - start + size  # inputs of each row
        token_forwards += int(count[active].sum())
        if calls is None or call in calls:
            rows, width = torch.ones_like(active) if cached else active, int(count[active].max())
            some = rows.to(order.device)
            hidden = hidden_states(
                model, tokens[some], order[some], start[rows], known[rows], width, cache
            )
            predicts = between(known - start, count, width)[rows].to(order.device)
            logits = at_least_float32(model.head_logits(hidden[predicts])[:, :vocab_size])
            drawn = draw(logits, choice, generator)
            unmasked = between(known, known + size, order.shape[1]).to(order.device)
            tokens[unmasked] = drawn
            of_drawn = logits.log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
            log_probs[unmasked] = of_drawn.to(log_probs.dtype)
        if cached:  # the first copy of the last known token is its true input
            start = torch.where(active, known + 1, start)
        known = known + size
    tokens, log_probs = (
        torch.empty_like(v).scatter_(1, order, v).cpu() for v in (tokens, log_probs)
    )
    step = torch.empty_like(plan.step).scatter_(1, plan.order, plan.step)
    nfe = (group_sizes(plan) > 0).sum(dim=1)
    return Generation(tokens, step, log_probs, plan.length, len(steps), token_forwards, nfe)


def between(low: Tensor, high: Tensor, width: int) -> Tensor:
    """BoolTensor (B, width): places from `low` (B,) to below `high` (B,)."""
    places = torch.arange(width)
    return (places >= low[:, None]) & (places < high[:, None])


def hidden_states(
    model: AOGPT,
    tokens: Tensor,
    order: Tensor,
    start: Tensor,
    known: Tensor,
    width: int,
    cache: GrowingCache | None,
) -> Tensor:
    """Final hidden states (B, W, D) of the inputs from slot `start` (B,) on; tokens (B, T) in
    prediction order. Slots below `known` (B,) hold true inputs, causally; slot i from `known` on is
    a copy of input `known` with target order[i], which sees the true inputs and itself."""
    first = int(start.max())
    start, known = (v.to(order.device)[:, None] for v in (start, known))
    slots = start + torch.arange(width, device=order.device)
    source = torch.minimum(slots, known)
    before = (source - 1).clamp(min=0)
    positions = torch.where(source == 0, 0, order.gather(1, before) + 1)
    targets = order.gather(1, slots.clamp(max=order.shape[1] - 1))
    keys = torch.arange(first + width, device=order.device)
    mask = (keys < source.unsqueeze(-1)) | (keys == slots.unsqueeze(-1))  # (B, W, keys)
    if cache is not None:
        cache.slots, cache.start = slots, first
    x = model.embed(tokens.gather(1, before), positions)
    return model.trunk(x, positions, PerTokenPass(model, targets, mask.unsqueeze(1), cache))


def draw(logits: Tensor, choice: TokenChoice, generator: torch.Generator) -> Tensor:
    """Draw one token per row of logits (N, V): softmax, a full sort for top-k and top-p,
    multinomial."""
    if choice.greedy:
        return logits.argmax(dim=-1)
    probs = (at_least_float32(logits) / choice.temperature).softmax(dim=-1)
    if choice.top_p == 1 and choice.top_k is None:
        return torch.multinomial(probs, 1, generator=generator).squeeze(1)
    probs, ids = probs.sort(dim=-1, descending=True)
    probs[:, choice.top_k or probs.shape[1] :] = 0
    mass_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(mass_before >= choice.top_p * probs.sum(dim=-1, keepdim=True), 0)
    return ids.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 is too coarse to sum probabilities."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
