"""The Transformer: a decoder that predicts the tokens of a sequence in any order.

Shapes: B batch, T steps (= positions), W items fed in one cached step, C cache slots, D width, H heads, V vocabulary.

For T tokens x and an order s (a permutation of the positions), the input and output of step i are

    step i            0        1          ...  T-1
    input token       [None]   x[s[0]]         x[s[T-2]]      [None] is a learned start vector
    input position    0        s[0] + 1        s[T-2] + 1     `wpe`, block_size + 1 rows
    target position   s[0]     s[1]            s[T-1]         `wtpe`, block_size rows
    predicts          x[s[0]]  x[s[1]]         x[s[T-1]]

so T inputs give T predictions, under ordinary causal attention *along the order*. A causal decoder cannot know which
position it is asked for next unless it is told; AO-GPT tells every block through adaLN on the target position.

Source: Any-Order GPT as Masked Diffusion Model (Xue et al., arXiv 2506.19935), "the paper".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEAD_CHUNK_ELEMENTS = 2**25  # logits alive at once in the output head, outside torch.compile


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer. The defaults are AO-GPT Small with the GPT-2 vocabulary."""

    vocab_size: int = 50304
    """Rows of the token table: the tokenizer's vocabulary, padded up to a multiple of 64 for speed."""
    block_size: int = 1024
    """Longest sequence, in tokens."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    """Width of the residual stream; a multiple of n_head."""
    target: Literal["none", "input", "adaln"] = "adaln"
    """How a step is told the position it predicts. none: not at all (plain left-to-right GPT); input: a full-width
    embedding added to the input (sigma-GPT); adaln: it modulates every normalisation (AO-GPT)."""
    target_dim: int = 128
    """Width of the target-position embedding under adaln."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    qk_norm: bool = True
    """RMSNorm on the queries and keys of each head."""
    gelu: Literal["erf", "tanh"] = "erf"
    bias: bool = True
    """Biases on the linear layers of the blocks, and on LayerNorm."""
    tied_head: bool = False
    """The output head shares the token table."""
    head_bias: bool = True
    dropout: float = 0.0
    position_init: Literal["normal", "sinusoidal"] = "normal"
    """How the learned position tables start. normal: as the paper does; sinusoidal: as sine waves, so that neighbouring
    positions start alike, which lets a small any-order model find its neighbours after far fewer steps."""

    def __post_init__(self):
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"model.{name} is {getattr(self, name)!r}; it must be one of {get_args(hint)}")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "target_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"model.n_embd ({self.n_embd}) must be a multiple of model.n_head ({self.n_head})")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}; give a number from 0 to below 1")


class PermutationGather(torch.autograd.Function):
    """Rows of a per-position table in the order of each sequence: (T, D), (B, T) -> (B, T, D).

    Every row of `order` is a permutation of 0..T-1, so the gradient is a gather by the inverse permutation and a sum
    over the batch: no atomics, hence deterministic on every device.
    """

    @staticmethod
    def forward(table: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return table[order]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        batch = torch.arange(grad.shape[0], device=grad.device)[:, None]
        accumulate = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
        return grad[batch, inverse].sum(0, dtype=accumulate).to(grad.dtype), None, None


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight takes the dtype of the input, so that the fused kernel also runs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)
    return RMSNorm(config.n_embd, eps=1e-5)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """Sine and cosine waves over the rows, wavelengths from 2 pi to pi * rows in geometric steps: (rows, dim)."""
    frequency = (2 / rows) ** torch.linspace(0, 1, (dim + 1) // 2)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]
    return waves * (std / waves.std())


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class KVCache:
    """Keys and values of every layer, allocated once.

    Input i of a sequence owns slot i. Slots past the known tokens are scratch space for the parallel targets of a step.
    """

    def __init__(self, config: ModelConfig, batch_size: int, slots: int, device=None, dtype=None):
        shape = (config.n_layer, batch_size, slots, config.n_head, config.n_embd // config.n_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)  # (L, B, C, H, D/H)
        self.values = torch.zeros(shape, device=device, dtype=dtype)


@dataclass
class CachedStep:
    """One layer's view of the cache for one step: `slots` (B, W) are written, the first `length` slots are read."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    length: int

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the (B, W, H, D/H) keys and values of this step; return all (B, length, H, D/H)."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.keys[rows, self.slots] = k.to(self.keys.dtype)
        self.values[rows, self.slots] = v.to(self.values.dtype)
        return self.keys[:, : self.length], self.values[:, : self.length]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        head_dim = config.n_embd // config.n_head
        self.q_norm = RMSNorm(head_dim, eps=1e-5) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=1e-5) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, cached: CachedStep | None = None) -> Tensor:
        """x (B, T, D). mask: BoolTensor (B, 1, T, keys), True where a key is seen; None means causal."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, D // self.n_head).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if cached is not None:
            k, v = cached.update(k, v)
        q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attn, self.mlp = Attention(config), MLP(config)
        self.adaln = nn.Linear(config.target_dim, 6 * config.n_embd) if config.target == "adaln" else None
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, modulation: Tensor | None, mask=None, cached: CachedStep | None = None) -> Tensor:
        """x (B, T, D); modulation: (B, T, 6 D) rows of this block's adaLN table, None without adaLN."""
        if modulation is None:
            x = x + self.drop(self.attn(self.norm1(x), mask, cached))
            return x + self.drop(self.mlp(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        x = x + gate1 * self.drop(self.attn(modulate(self.norm1(x), shift1, scale1), mask, cached))
        return x + gate2 * self.drop(self.mlp(modulate(self.norm2(x), shift2, scale2)))


class AOGPT(nn.Module):
    """Any-order GPT: log p(x | order) of token sequences under any order of prediction (the paper, section 3)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size + 1, config.n_embd)
        self.start = nn.Parameter(torch.empty(config.n_embd))
        target_dim = {"none": None, "input": config.n_embd, "adaln": config.target_dim}[config.target]
        self.wtpe = nn.Embedding(config.block_size, target_dim) if target_dim else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = make_norm(config)
        self.adaln_f = nn.Linear(config.target_dim, 2 * config.n_embd) if config.target == "adaln" else None
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Truncated normal (std 0.02, cut at 3 std; residual projections 0.02 / sqrt(2 n_layer)), biases 0."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "norm" in name:
                nn.init.ones_(p)
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("proj.weight") else 0.02
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)
        if self.config.position_init == "sinusoidal":
            self.wpe.weight.copy_(sinusoids(*self.wpe.weight.shape, std=0.04))
            if self.wtpe is not None:  # adaLN only hears its target through a linear layer of std 0.02
                rows, dim = self.wtpe.weight.shape
                std = 2.0 if self.config.target == "adaln" else 0.04
                self.wtpe.weight.copy_(sinusoids(rows + 1, dim, std)[1:])  # position p is row p + 1 of `wpe`

    # ---- scoring: all T predictions of a known sequence in one causal pass --------------------------------------

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Negative log-probability of every token given those before it in the order; differentiable.

        Args:
            tokens: LongTensor (B, T), T <= block_size, in sequence order.
            order: LongTensor (B, T); every row is a permutation of 0..T-1.

        Returns: float tensor (B, T), nats, in prediction order.
        """
        return self.head_nll(self.hidden(tokens, order), tokens.gather(1, order))

    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """log p(x[order[b, i]] | x[order[b, :i]]), (B, T) in prediction order, natural logarithm.

        Raises ValueError if the shapes differ, T exceeds block_size, a token is not in the vocabulary or a row of
        `order` is not a permutation.
        """
        self._check(tokens, order)
        steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
        if not torch.equal(order.sort(dim=1).values, steps):
            raise ValueError(f"every row of order must be a permutation of 0..{order.shape[1] - 1}")
        with torch.no_grad():
            return -self(tokens, order)

    def hidden(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Final hidden states (B, T, D) of the training pass; state i predicts position order[:, i]."""
        shifted = order[:, :-1]
        in_tokens = F.pad(tokens.gather(1, shifted), (1, 0))  # its first column stands for [None]
        in_positions = F.pad(shifted + 1, (1, 0))
        steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
        inverse = torch.empty_like(order).scatter_(1, order, steps)
        tables = self.adaln_tables(order.shape[1])
        return self._trunk(in_tokens, in_positions, order, tables, lambda t: PermutationGather.apply(t, order, inverse))

    def _trunk(self, in_tokens, in_positions, targets, tables, rows, mask=None, cache: KVCache | None = None, **step):
        """Embed, run the blocks, normalise: (B, W) inputs and targets -> (B, W, D).

        `rows` picks the rows of a per-position table that belong to `targets`: (positions, D) -> (B, W, D).
        """
        x = self.wte(in_tokens)
        x = torch.where((in_positions == 0).unsqueeze(-1), self.start.to(x.dtype), x) + self.wpe(in_positions)
        if self.config.target == "input":
            x = x + self.wtpe(targets)
        x = self.drop(x)
        for i, block in enumerate(self.blocks):
            modulation = rows(next(tables)) if self.adaln_f is not None else None
            cached = CachedStep(cache.keys[i], cache.values[i], **step) if cache is not None else None
            x = block(x, modulation, mask, cached)
        x = self.norm_f(x)
        if self.adaln_f is not None:
            x = modulate(x, *rows(next(tables)).chunk(2, dim=-1))
        return x

    def adaln_tables(self, length: int | None = None):
        """Yield the modulation of every block, (length, 6 D), then of the final norm, (length, 2 D), if there is adaLN.

        The modulation depends on the target position only, so one row per position serves the whole batch.
        """
        if self.adaln_f is None:
            return
        c = F.silu(self.wtpe.weight[:length])
        for layer in [*(block.adaln for block in self.blocks), self.adaln_f]:
            yield layer(c)

    def head_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the output head, (B, T, D), (B, T) -> (B, T), without keeping (B, T, V) float32 logits.

        Compiled, the float32 softmax is fused into its reductions. Eager, more than HEAD_CHUNK_ELEMENTS logits are
        computed in chunks, and again in the backward pass. PyTorch 2.13's chunked linear_cross_entropy does the same
        job; these chunks also run on older versions, and were faster where both were measured (results/loss_head.md).
        """
        flat_x, flat_targets = x.flatten(0, 1), targets.flatten()
        rows = max(256, HEAD_CHUNK_ELEMENTS // self.config.vocab_size)
        if torch.compiler.is_compiling() or len(flat_x) <= rows:
            nll = self._chunk_nll(flat_x, flat_targets)
        else:
            chunks = zip(flat_x.split(rows), flat_targets.split(rows), strict=True)
            again = {"use_reentrant": False, "preserve_rng_state": False}
            nll = torch.cat([checkpoint(self._chunk_nll, *chunk, **again) for chunk in chunks])
        return nll.view(targets.shape)

    def _chunk_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets, reduction="none")

    def _check(self, tokens: Tensor, other: Tensor) -> None:
        if tokens.shape != other.shape or tokens.dim() != 2:
            raise ValueError(f"tokens {tuple(tokens.shape)} and {tuple(other.shape)} must both be (batch, length)")
        if not 1 <= tokens.shape[1] <= self.config.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens a sequence; this model takes 1 to {self.config.block_size}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            low, high = int(tokens.min()), int(tokens.max())
            raise ValueError(f"tokens run from {low} to {high}; this model knows 0 to {self.config.vocab_size - 1}")

    # ---- parallel prediction: many targets that see the same context ---------------------------------------------

    def masked_log_probs(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """log p(true token | all unmasked tokens) at every masked position, in one pass.

        The unmasked positions, in ascending order, are the context; every masked position is predicted from them and
        from nothing else (the parallel mask of `parallel_hidden`).

        Args:
            tokens: LongTensor (B, T), in sequence order.
            masked: BoolTensor (B, T).

        Returns: float tensor (B, T) in sequence order, natural logarithm; 0 at unmasked positions.
        """
        self._check(tokens, masked)
        order = masked.to(torch.uint8).argsort(dim=1, stable=True)
        ordered, known = tokens.gather(1, order), (~masked).sum(1)
        with torch.no_grad():
            x = self.parallel_hidden(ordered, order, torch.zeros_like(known), known, tokens.shape[1])
            log_probs = -self.head_nll(x, ordered)
        log_probs = torch.zeros_like(log_probs).scatter_(1, order, log_probs)
        return log_probs.where(masked, torch.zeros_like(log_probs))

    def parallel_hidden(
        self,
        ordered: Tensor,
        order: Tensor,
        cached: Tensor,
        known: Tensor,
        width: int,
        cache: KVCache | None = None,
        length: int | None = None,
        tables: list[Tensor] | None = None,
    ) -> Tensor:
        """Feed the inputs that are not in the cache yet, then one copy of the last known input per parallel target.

        Item w of a row stands for step i = cached + w and targets position order[i]. While i < known it is input i
        itself, seen causally. From i = known on it is a copy of input `known` (the last known token) that sees the
        inputs before it and itself, never another copy: what training shows under the order (context, target). Item w
        is written to cache slot i; the first copy is the true input `known`, so its slot is the one that stays.

        Args:
            ordered, order: (B, T) tokens and positions in prediction order; tokens from `known` on are ignored.
            cached: (B,) how many inputs the cache holds. known: (B,) how many tokens are known, >= cached.
            width: W, items a row is fed; rows that need fewer are padded with items nobody reads.
            cache, length: the cache and how many of its slots are in use, >= max(cached) + W; None: no cache.
            tables: the list of `adaln_tables`, to compute them once for many calls.

        Returns: (B, W, D) final hidden states; item w predicts position order[cached + w].
        """
        T = order.shape[1]
        slots = cached[:, None] + torch.arange(width, device=order.device)
        source = torch.minimum(slots, known[:, None])
        before = (source - 1).clamp(min=0)
        in_positions = torch.where(source == 0, 0, order.gather(1, before) + 1)
        targets = order.gather(1, slots.clamp(max=T - 1))
        keys = torch.arange(width if cache is None else length, device=order.device)
        mask = (keys < source.unsqueeze(-1)) | (keys == slots.unsqueeze(-1))
        step = {} if cache is None else {"slots": slots, "length": length}
        return self._trunk(
            ordered.gather(1, before),
            in_positions,
            targets,
            iter(tables) if tables is not None else self.adaln_tables(),
            lambda table: table[targets],
            mask=mask.unsqueeze(1),
            cache=cache,
            **step,
        )

    # ---- size ----------------------------------------------------------------------------------------------------

    def num_params(self) -> dict[str, int]:
        """Parameter counts, split as embeddings, blocks, conditioning (target positions and adaLN) and head."""
        counts = dict.fromkeys(("embeddings", "blocks", "conditioning", "head"), 0)
        for name, p in self.named_parameters():
            if name.startswith("wtpe") or "adaln" in name:
                counts["conditioning"] += p.numel()
            elif name.startswith(("wte", "wpe", "start")):
                counts["embeddings"] += p.numel()
            else:
                counts["blocks" if name.startswith("blocks") else "head"] += p.numel()
        return counts

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward per token: 6 per weight of a matrix that every token
        passes, plus 12 n_layer n_embd length for attention (PaLM, appendix B). adaLN is left out: it runs per position.
        """
        c = self.config
        return 6 * (12 * c.n_layer * c.n_embd**2 + c.n_embd * c.vocab_size) + 12 * c.n_layer * c.n_embd * length
