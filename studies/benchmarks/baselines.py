"""What bench.py measures against: the same weights, distributions and losses, written the way one
writes them first.

`PerToken` is AO-GPT's training pass; the other two are samplers. `decode_cached` keeps keys and
values and lengthens them by concatenation in every step; `decode_uncached` feeds every known token
anew in every step. Both are batched over rows, walk through the plan's steps with all rows padded
to the widest, rebuild the attention mask in every step, compute adaLN for every token they feed,
use PyTorch's fused attention, evaluate the output head at the unmasked positions only and sort the
vocabulary for the nucleus.

Shapes: B samples or sequences, T positions, S steps, W items fed in one step, H heads, D width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import AOGPT, ModelConfig
from runtime.errors import UserError
from sampling.engine import Generation
from sampling.plans import Plan, group_sizes
from sampling.token_choice import TokenChoice


class PerToken(nn.Module):
    """AO-GPT's training pass with adaLN computed for every token of the batch, in every block.

    All T tokens follow [None], so that sequences are T + 1 long; the last token predicts nothing,
    and what it gives is thrown away. The head's logits are all kept, (B, T + 1, V). Loss and
    gradients are those of the model it wraps.
    """

    def __init__(self, model: AOGPT):
        super().__init__()
        _check(model)
        if model.config.dropout:
            raise UserError("the per-token baseline has no dropout; set model.dropout to 0")
        self.model = model

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """tokens, order (B, T) -> negative log-probabilities (B, T) in prediction order, nats."""
        model, ordered = self.model, tokens.gather(1, order)
        start = model.start.expand(len(tokens), 1, -1)
        x = torch.cat([start, model.wte(ordered)], dim=1) + model.wpe(F.pad(order + 1, (1, 0)))
        targets = F.pad(order, (0, 1))  # the last token has no target: any will do
        x = _trunk(model, x, targets)
        logits = model.head_logits(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ordered.flatten(), reduction="none").view_as(
            order
        )


@torch.no_grad()
def decode_cached(
    model: AOGPT, plan: Plan, *, choice: TokenChoice, vocab_size: int, generator: torch.Generator
) -> Generation:
    """Generate the samples of a plan without given positions, with a cache that grows.

    Args:
        model: AO-GPT (a decoder with adaLN) in eval mode.
        vocab_size: only ids below it are drawn.
        generator: of the tokens, on the model's device.

    Raises ValueError for a plan or model that these samplers do not cover.
    """
    _check_plan(model, plan)
    state, cache = _State(model, plan), GrowingCache(model.config.n_layer)
    known = cached = torch.zeros_like(plan.order[:, 0])
    for size in _step_sizes(plan):
        active = size > 0
        fresh = known - cached
        items = _Items(state, cached, known, int((fresh + size)[active].max()))
        cache.write_to(items.slots, start=int(cached.max()))
        hidden = _item_hidden(model, items, cache)
        targets = items.targets_of(fresh, size)
        state.unmask(
            model.head_logits(hidden[targets])[:, :vocab_size], known, size, choice, generator
        )
        state.token_forwards += int((fresh + size)[active].sum())
        # The first copy of the last known token is its true input.
        cached = torch.where(active, known + 1, cached)
        known = known + size
    return state.result()


@torch.no_grad()
def decode_uncached(
    model: AOGPT,
    plan: Plan,
    *,
    choice: TokenChoice,
    vocab_size: int,
    generator: torch.Generator,
    calls: Collection[int] | None = None,
) -> Generation:
    """The same without a cache; in every step only the rows that unmask something are fed.

    Args:
        calls: run the model in these calls only (0 is the first step that unmasks something) and
            leave token 0 where the others would unmask, to time a part of the work. `model_calls`
            and `token_forwards` are of the whole plan.
    """
    _check_plan(model, plan)
    state = _State(model, plan)
    known = torch.zeros_like(plan.order[:, 0])
    for call, size in enumerate(_step_sizes(plan)):
        active = size > 0
        state.token_forwards += int((known + size)[active].sum())
        if calls is None or call in calls:
            nothing = torch.zeros_like(known[active])
            items = _Items(state, nothing, known[active], int((known + size)[active].max()), active)
            hidden = _item_hidden(model, items)
            targets = items.targets_of(known[active], size[active])
            state.unmask(
                model.head_logits(hidden[targets])[:, :vocab_size], known, size, choice, generator
            )
        known = known + size
    return state.result()


AO_GPT = "a decoder with model.target = 'adaln', an attended start and learned tables of positions"


def is_ao_gpt(config: ModelConfig) -> bool:
    """Whether a model is the paper's, the one that the baselines compute."""
    c = config
    settings = c.attention, c.target, c.start, c.position, c.value_residual
    return settings == ("causal", "adaln", "attended", "learned", False)


def _check(model: AOGPT) -> None:
    if not is_ao_gpt(model.config):
        raise UserError(f"the baselines are of AO-GPT: {AO_GPT}")


def _check_plan(model: AOGPT, plan: Plan) -> None:
    _check(model)
    if model.training:
        raise UserError("the model is in training mode; call model.eval() first")
    if (plan.step < 0).any():
        raise UserError("the baselines take plans without given positions")


def _step_sizes(plan: Plan):
    """Yield how many positions each row unmasks, (B,), for every step in which any row unmasks
    something."""
    for step in plan.step.unique().tolist():
        yield (plan.step == step).sum(dim=1)


class _State:
    """The samples so far, in prediction order."""

    def __init__(self, model: AOGPT, plan: Plan):
        self.plan, self.order = plan, plan.order.to(model.wte.weight.device)
        self.tokens = torch.zeros_like(self.order)
        self.log_probs = torch.zeros(
            self.order.shape, device=self.order.device, dtype=model.wte.weight.dtype
        )
        self.token_forwards = 0

    def unmask(
        self, logits: Tensor, known: Tensor, size: Tensor, choice: TokenChoice, generator
    ) -> None:
        """Draw the tokens of this step from their logits (N, V), rows one after the other."""
        logits = at_least_float32(logits)
        drawn = draw(logits, choice, generator)
        index = torch.arange(self.order.shape[1])
        unmasked = ((index >= known[:, None]) & (index < (known + size)[:, None])).to(
            self.order.device
        )
        self.tokens[unmasked] = drawn
        log_probs = logits.log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
        self.log_probs[unmasked] = log_probs.to(self.log_probs.dtype)

    def result(self) -> Generation:
        def in_sequence(v: Tensor, order: Tensor) -> Tensor:
            return torch.empty_like(v).scatter_(1, order, v).cpu()

        return Generation(
            tokens=in_sequence(self.tokens, self.order),
            step=in_sequence(self.plan.step, self.plan.order),
            log_probs=in_sequence(self.log_probs, self.order),
            length=self.plan.length,
            model_calls=len(self.plan.step.unique()),
            token_forwards=self.token_forwards,
            nfe=(group_sizes(self.plan) > 0).sum(dim=1),
        )


class _Items:
    """What one step feeds: the known inputs after the `cached` first ones, then a copy of the last
    per target.

    Item w of a row takes slot cached + w. Slots below `known` are true inputs, seen causally; slot
    i from `known` on is a copy of input `known` with target order[i], which sees the inputs before
    it and itself, no other copy.
    """

    def __init__(
        self, state: _State, cached: Tensor, known: Tensor, width: int, rows: Tensor | None = None
    ):
        device = state.order.device
        tokens, order = state.tokens, state.order
        if rows is not None:
            tokens, order = tokens[rows.to(device)], order[rows.to(device)]
        self.slots = cached.to(device)[:, None] + torch.arange(width, device=device)
        source = torch.minimum(self.slots, known.to(device)[:, None])
        before = (source - 1).clamp(min=0)
        self.tokens = tokens.gather(1, before)
        self.positions = torch.where(source == 0, 0, order.gather(1, before) + 1)
        self.targets = order.gather(1, self.slots.clamp(max=order.shape[1] - 1))
        keys = torch.arange(int(cached.max()) + width, device=device)
        mask = (keys < source.unsqueeze(-1)) | (keys == self.slots.unsqueeze(-1))
        self.mask = mask.unsqueeze(1)  # (B, 1, W, keys)

    def targets_of(self, fresh: Tensor, size: Tensor) -> Tensor:
        """BoolTensor (B, W): the items that predict something."""
        index = torch.arange(self.slots.shape[1])
        return ((index >= fresh[:, None]) & (index < (fresh + size)[:, None])).to(self.slots.device)


class GrowingCache:
    """Keys and values of every layer, (B, H, slots, D/H), lengthened by concatenation; input i of a
    row owns slot i."""

    def __init__(self, n_layer: int):
        self.layers = [(None, None)] * n_layer

    def write_to(self, slots: Tensor, start: int) -> None:
        """The next items go to `slots` (B, W); slots from `start` on held nothing that stays."""
        self.slots, self.start = slots, start

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of this step's items, (B, H, W, D/H); returns all."""
        past_k, past_v = self.layers[layer]
        self.layers[layer] = self._lengthened(past_k, k), self._lengthened(past_v, v)
        return self.layers[layer]

    def _lengthened(self, old: Tensor | None, new: Tensor) -> Tensor:
        room = torch.zeros_like(new)
        longer = room if old is None else torch.cat([old[:, :, : self.start], room], dim=2)
        index = self.slots[:, None, :, None].expand_as(new)
        return longer.scatter_(2, index, new)


def _item_hidden(model: AOGPT, items: _Items, cache: GrowingCache | None = None) -> Tensor:
    """Final hidden states (B, W, D) of the items, from the model's layers."""
    x = torch.where((items.positions == 0).unsqueeze(-1), model.start, model.wte(items.tokens))
    return _trunk(model, x + model.wpe(items.positions), items.targets, items.mask, cache)


def _trunk(
    model: AOGPT,
    x: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    cache: GrowingCache | None = None,
) -> Tensor:
    """Blocks and final norm, adaLN and all, on embedded tokens (B, W, D) with targets (B, W);
    causal without a mask."""
    condition = F.silu(model.wtpe(targets))
    for i, block in enumerate(model.blocks):
        shift1, scale1, gate1, shift2, scale2, gate2 = block.adaln(condition).chunk(6, dim=-1)
        h = block.norm1(x) * (1 + scale1) + shift1
        q, k, v = _heads(block.attn, h)
        if cache is not None:
            k, v = cache.append(i, k, v)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + gate1 * block.attn.proj(h.transpose(1, 2).flatten(2))
        x = x + gate2 * block.mlp(block.norm2(x) * (1 + scale2) + shift2)
    shift, scale = model.adaln_f(condition).chunk(2, dim=-1)
    return model.norm_f(x) * (1 + scale) + shift


def _heads(attn, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (B, H, W, D/H)."""
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.n_head, -1)).unbind(2)
    return tuple(t.transpose(1, 2) for t in (attn.q_norm(q), attn.k_norm(k), v))


def draw(logits: Tensor, choice: TokenChoice, generator: torch.Generator) -> Tensor:
    """Draw one token a row of logits (N, V), (N,): softmax, a full sort if anything is cut off,
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
    """bfloat16 has 8 bits of precision, too few to add up probabilities."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
