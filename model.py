"""The Transformer: a decoder that predicts the tokens of a sequence in any order.

Shapes: B batch, T steps (= positions), D width, H heads, V vocabulary; in a cached pass N items in all, W in the widest
row, C cache slots.

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
    attention: Literal["causal", "full"] = "causal"
    """causal: a decoder, causal along the order. full: an encoder that sees all positions, masked ones as [MASK]."""
    target: Literal["none", "input", "adaln", "shared", "per_block", "two_stream"] = "adaln"
    """How a step of a decoder is told the position it predicts. none: not at all (plain left-to-right GPT); input: a
    full-width embedding added to the input (sigma-GPT); adaln: it modulates every normalisation (AO-GPT); shared: one
    full-width table added again before every block; per_block: a table per block; two_stream: a query stream that
    starts from the target position and reads a content stream (XLNet, A3). An encoder has "none"."""
    cond_dim: int = 128
    """Width of the vector that adaLN is computed from."""
    noise: bool = False
    """adaLN on the noise level of an encoder (SEDD)."""
    mask_token: int | None = None
    """Id of [MASK] in an encoder: the first id after the tokenizer's; below vocab_size."""
    position: Literal["learned", "rotary"] = "learned"
    """rotary: rotated queries and keys, base 10000 (encoders)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = True
    """Biases of LayerNorm."""
    qk_norm: bool = True
    """RMSNorm on the queries and keys of each head."""
    gelu: Literal["erf", "tanh"] = "erf"
    attn_bias: bool = True
    """Biases on the attention's two linear layers."""
    mlp_bias: bool = True
    start: Literal["attended", "hidden"] = "attended"
    """Whether later steps of a decoder see [None]. hidden: no, as in GPT-2, which has no start token."""
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
                raise ValueError(
                    f"model.{name} is {getattr(self, name)!r}; it must be one of {get_args(hint)}"
                )
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "cond_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd ({self.n_embd}) must be a multiple of model.n_head ({self.n_head})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}; give a number from 0 to below 1")
        self._check_architecture()

    def _check_architecture(self) -> None:
        encoder = self.attention == "full"
        if encoder and self.target != "none":
            raise ValueError(
                f"model.target is {self.target!r}, but an encoder (model.attention = 'full') predicts every masked "
                "position at once and has no target position; set model.target to 'none'"
            )
        if encoder and not (self.mask_token is not None and 0 < self.mask_token < self.vocab_size):
            raise ValueError(
                f"model.mask_token is {self.mask_token}; an encoder (model.attention = 'full') needs the first id "
                f"after the tokenizer's, below model.vocab_size ({self.vocab_size}): 50257 for gpt2, 257 for bytes"
            )
        for name, value in (("mask_token", None), ("noise", False), ("position", "learned")):
            if not encoder and getattr(self, name) != value:
                value = getattr(self, name)
                raise ValueError(
                    f"model.{name} = {value!r} is for encoders; set model.attention to 'full'"
                )
        if self.position == "rotary" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"rotary positions need an even head width, but it is {self.n_embd // self.n_head}"
            )
        if self.start == "hidden" and self.target == "two_stream":
            raise ValueError(
                "model.start = 'hidden' leaves the first query of two_stream nothing to read"
            )

    @property
    def adaln(self) -> bool:
        return self.noise or self.target == "adaln"


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


def inverse_of(order: Tensor) -> Tensor:
    """The step at which each position is predicted, (B, T) -> (B, T)."""
    steps = torch.arange(order.shape[1], device=order.device)
    return torch.empty_like(order).scatter_(1, order, steps.expand_as(order))


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight takes the dtype of the input, so that the fused kernel also runs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.norm_bias)
    return RMSNorm(config.n_embd, eps=1e-5)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """Sine and cosine waves over the rows, wavelengths from 2 pi to pi * rows in geometric steps: (rows, dim)."""
    frequency = (2 / rows) ** torch.linspace(0, 1, (dim + 1) // 2)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]
    return waves * (std / waves.std())


def log_linear_noise(t: Tensor, eps: float = 1e-3) -> Tensor:
    """Noise level sigma(t) = -log(1 - (1 - eps) t) at which a token is masked with probability (1 - eps) t (SEDD)."""
    return -torch.log1p(-(1 - eps) * t)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def ragged(counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows of different lengths one after the other: row and column of `total` items, and whether they exist.

    counts: LongTensor (B,), items of each row. total: a host number >= counts.sum(), so that nothing waits for the
    device. Returns three (total,) tensors; items past the last row have existing = False, column 0 and some row.
    """
    ends = counts.cumsum(0)
    item = torch.arange(total, device=counts.device)
    row = torch.searchsorted(ends, item, right=True).clamp(max=len(counts) - 1)
    existing = item < ends[-1]
    return row, (item - (ends - counts)[row]) * existing, existing


class KVCache:
    """Keys and values of every layer, allocated once.

    Input i of a sequence owns slot i. Slots past the known tokens are scratch space for the parallel targets of a step;
    the last slot takes what nobody reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        length: int,
        device=None,
        dtype=None,
        layers=None,
    ):
        layers = config.n_layer if layers is None else layers
        shape = (layers, batch_size, length + 1, config.n_head, config.n_embd // config.n_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)  # (L, B, C, H, D/H)
        self.values = torch.zeros(shape, device=device, dtype=dtype)


@dataclass
class Feed:
    """What one cached pass is fed: of every row, `count` consecutive steps from `cached` on.

    Tensors live on the device; the three numbers are known on the host and fix the shapes of the pass. They may be
    larger than needed, so that passes of many sizes share a few shapes.
    """

    cached: Tensor
    """(B,) inputs that the cache holds."""
    known: Tensor
    """(B,) tokens that are known, >= cached. Steps from `known` on are parallel targets."""
    count: Tensor
    """(B,) steps fed; 0 for a row that is finished."""
    items: int
    """N >= count.sum()."""
    width: int
    """W >= count.max()."""
    length: int
    """Cache slots that are read, >= (cached + count).max()."""


@dataclass
class CachedStep:
    """One layer's view of the cache for one pass of N items: where they are written and how queries are laid out."""

    keys: Tensor
    values: Tensor
    row: Tensor
    column: Tensor
    slot: Tensor
    grid: Tensor
    """(B, W), the item that stands in each cell of a rectangle of queries."""
    length: int

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the (N, H, D/H) keys and values of this pass; return all (B, length, H, D/H)."""
        self.keys[self.row, self.slot] = k.to(self.keys.dtype)
        self.values[self.row, self.slot] = v.to(self.values.dtype)
        return self.keys[:, : self.length], self.values[:, : self.length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, H, D/H) by (T, 1, D/H) angles, rotate-half pairing (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_angles(length: int, head_dim: int, device, dtype) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    )
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass
class View:
    """What the attention of one pass may see, the same for every block."""

    causal: bool = True
    """Input i sees inputs 0..i. False without a mask: everything."""
    mask: Tensor | None = None
    """BoolTensor (B, 1, W, keys), True where a key is seen; replaces `causal`."""
    query_mask: Tensor | None = None
    """The same for the query stream, where it differs from `causal`."""
    hide_start: bool = False
    """Input 0 is seen by itself only (full passes; in a cached pass the mask says so)."""
    rotary: tuple[Tensor, Tensor] | None = None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.attn_bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.attn_bias)
        head_dim = config.n_embd // config.n_head
        self.q_norm = RMSNorm(head_dim, eps=1e-5) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=1e-5) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, view: View, cached: CachedStep | None = None, queries: Tensor | None = None
    ):
        """x (B, T, D), or the (N, D) items of a cached pass -> the same shape; with a query stream of that shape, which
        reads the keys of x, the outputs of both."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(-3)
        q, k = self.q_norm(q), self.k_norm(k)
        if view.rotary is not None:
            q, k = rotate(q, *view.rotary), rotate(k, *view.rotary)
        if cached is not None:
            k, v = cached.update(k, v)
        y = self._attend(q, k, v, view.mask, view, cached)
        if queries is None:
            return y
        D = x.shape[-1]
        bias = None if self.qkv.bias is None else self.qkv.bias[:D]
        q = self.q_norm(
            F.linear(queries, self.qkv.weight[:D], bias).unflatten(-1, (self.n_head, -1))
        )
        return y, self._attend(q, k, v, view.query_mask, view, cached)

    def _attend(
        self, q, k, v, mask: Tensor | None, view: View, cached: CachedStep | None
    ) -> Tensor:
        """Queries (B, T, H, D/H) or (N, H, D/H), keys and values (B, keys, H, D/H) -> projected, in the shape of x."""
        q = q if cached is None else q[cached.grid]
        q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
        own = None
        if view.hide_start and mask is None:
            own, q, k, v = v[:, :, :1], q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]
        p = self.dropout if self.training else 0.0
        causal = view.causal and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
        if own is not None:  # input 0 attends to nothing but itself
            y = torch.cat([own, y], dim=2)
        y = y.transpose(1, 2).flatten(2)
        return self.proj(y if cached is None else y[cached.row, cached.column])


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.mlp_bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attn, self.mlp = Attention(config), MLP(config)
        self.adaln = nn.Linear(config.cond_dim, 6 * config.n_embd) if config.adaln else None
        self.wtpe = (
            nn.Embedding(config.block_size, config.n_embd) if config.target == "per_block" else None
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x, view: View, rows=None, condition=None, table=None, cached=None, queries=None
    ):
        """One block; it reads its own parameters only, so that it can be sharded, compiled or computed again alone.

        Args:
            x: (B, T, D), or the (N, D) items of a cached pass.
            rows: picks the rows of a per-position table that belong to the targets: (positions, D) -> the shape of x.
            condition: (positions, cond_dim), what adaLN is computed from.
            table: (positions, 6 D), what it gives, if that is known.
            cached: the cache of a cached pass.
            queries: query stream, of the shape of x, which reads the keys and values of x only.

        Returns x, or x and the queries.
        """
        if queries is not None:
            return self._two_stream(x, queries, view, cached)
        if self.wtpe is not None:
            x = x + rows(self.wtpe.weight)
        if self.adaln is None:
            x = x + self.drop(self.attn(self.norm1(x), view, cached))
            return x + self.drop(self.mlp(self.norm2(x)))
        table = self.adaln(condition) if table is None else table
        shift1, scale1, gate1, shift2, scale2, gate2 = rows(table).chunk(6, dim=-1)
        x = x + gate1 * self.drop(self.attn(modulate(self.norm1(x), shift1, scale1), view, cached))
        return x + gate2 * self.drop(self.mlp(modulate(self.norm2(x), shift2, scale2)))

    def _two_stream(self, x: Tensor, queries: Tensor, view: View, cached: CachedStep | None):
        y, answer = self.attn(self.norm1(x), view, cached, self.norm1(queries))
        x, queries = x + self.drop(y), queries + self.drop(answer)
        return x + self.drop(self.mlp(self.norm2(x))), queries + self.drop(
            self.mlp(self.norm2(queries))
        )


class NoiseEmbedding(nn.Module):
    """Vector (B, dim) of a noise level (B,): 256 cosines and sines, then an MLP (SEDD)."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc, self.proj = nn.Linear(256, dim), nn.Linear(dim, dim)

    def forward(self, sigma: Tensor) -> Tensor:
        frequency = 10000.0 ** (-torch.arange(128, device=sigma.device, dtype=torch.float64) / 128)
        angle = sigma.double()[:, None] * frequency
        return self.proj(
            F.silu(self.fc(torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.fc.weight.dtype)))
        )


class AOGPT(nn.Module):
    """One Transformer for every system of the comparison; AO-GPT is its default configuration.

    Decoders model log p(x | order) under any order of prediction (the paper, section 3); encoders predict masked tokens
    from all others.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        decoder = config.attention == "causal"
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = (
            nn.Embedding(config.block_size + decoder, config.n_embd)
            if config.position == "learned"
            else None
        )
        self.start = nn.Parameter(torch.empty(config.n_embd)) if decoder else None
        self.query = (
            nn.Parameter(torch.empty(config.n_embd)) if config.target == "two_stream" else None
        )
        target_dim = {
            "input": config.n_embd,
            "shared": config.n_embd,
            "adaln": config.cond_dim,
        }.get(config.target)
        self.wtpe = nn.Embedding(config.block_size, target_dim) if target_dim else None
        self.noise = NoiseEmbedding(config.cond_dim) if config.noise else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = make_norm(config)
        self.adaln_f = nn.Linear(config.cond_dim, 2 * config.n_embd) if config.adaln else None
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every weight its initial value."""
        for name, p in self.named_parameters():
            self.init_weight(name, p, generator)

    @torch.no_grad()
    def init_weight(self, name: str, p: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill p, of the shape of the weight `name`: truncated normal (std 0.02, cut at 3 std; residual projections
        0.02 / sqrt(2 n_layer)), biases 0, norms 1; position tables as model.position_init says."""
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif "norm" in name:
            nn.init.ones_(p)
        elif self.config.position_init == "sinusoidal" and name == "wpe.weight":
            p.copy_(sinusoids(*p.shape, std=0.04))
        elif self.config.position_init == "sinusoidal" and name == "wtpe.weight":
            std = (
                2.0 if self.config.target == "adaln" else 0.04
            )  # adaLN hears it through a linear layer of std 0.02
            p.copy_(sinusoids(len(p) + 1, p.shape[1], std)[1:])  # position p is row p + 1 of `wpe`
        else:
            std = (
                0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("proj.weight") else 0.02
            )
            nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)

    # ---- scoring: all T predictions of a known sequence in one pass -----------------------------------------------

    def forward(self, tokens: Tensor, which: Tensor, extra: Tensor | None = None) -> Tensor:
        """The training pass; differentiable.

        Args:
            tokens: LongTensor (B, T), T <= block_size, in sequence order.
            which: decoder: order, LongTensor (B, T), every row a permutation of 0..T-1. Encoder: masked, BoolTensor.
            extra: two-stream decoder: LongTensor (B, T), for step i the first step of its group (None: groups of one).
                Encoder with noise: the noise level sigma, (B,).

        Returns: (B, T) negative log-probability, nats, of every token given those before it, in prediction order
            (decoder), or of every masked token given the others, 0 elsewhere, in sequence order (encoder). With noise:
            (2, B, T), the log of the summed exponentials of the output and the output of the true token.
        """
        if self.config.attention == "full":
            x = self.encoder_hidden(torch.where(which, self.config.mask_token, tokens), extra)
            return (
                self.head_nll(x, tokens) if self.config.noise else self.head_nll(x, tokens) * which
            )
        # tokens.gather(1, which), but a compiled backward pass keeps this and would do that again for every logit.
        ordered = torch.empty_like(tokens).scatter_(1, inverse_of(which), tokens)
        return self.head_nll(self.hidden(tokens, which, extra), ordered)

    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """log p(x[order[b, i]] | x[order[b, :i]]), (B, T) in prediction order, natural logarithm; for decoders.

        Raises ValueError if the shapes differ, T exceeds block_size, a token is not in the vocabulary or a row of
        `order` is not a permutation.
        """
        if self.config.attention == "full":
            raise ValueError(
                "an encoder has no log-probabilities along an order; use masked_log_probs"
            )
        self._check(tokens, order)
        steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
        if not torch.equal(order.sort(dim=1).values, steps):
            raise ValueError(f"every row of order must be a permutation of 0..{order.shape[1] - 1}")
        with torch.no_grad():
            return -self(tokens, order)

    def hidden(self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, D) of a decoder's training pass; state i predicts position order[:, i].

        group_start: (B, T), two_stream only: step i is predicted from the tokens of steps < group_start[i].
        """
        if group_start is not None and self.config.target != "two_stream":
            raise ValueError("groups in training need model.target = 'two_stream'")
        T = order.shape[1]
        shifted = order[:, :-1]
        in_tokens = F.pad(tokens.gather(1, shifted), (1, 0))  # its first column stands for [None]
        in_positions = F.pad(shifted + 1, (1, 0))
        inverse = inverse_of(order)
        view = View(hide_start=self.config.start == "hidden")
        if group_start is not None:
            view.query_mask = (
                torch.arange(T, device=order.device) <= group_start.unsqueeze(-1)
            ).unsqueeze(1)
        x = self._embed(in_tokens, in_positions)
        return self._trunk(
            x,
            view,
            order,
            lambda table: PermutationGather.apply(table[:T], order, inverse),
            self._condition(),
        )

    def encoder_hidden(
        self, tokens: Tensor, sigma: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (B, T, D) of an encoder; tokens (B, T) with [MASK] in place; sigma (B,) with noise;
        lengths (B,): of rows that are shorter than T, whose padding no position sees."""
        x, view, c = self.wte(tokens), View(causal=False), self.config
        if lengths is not None:
            view.mask = (torch.arange(tokens.shape[1], device=x.device) < lengths[:, None])[
                :, None, None
            ]
        if c.position == "rotary":
            view.rotary = rotary_angles(tokens.shape[1], c.n_embd // c.n_head, x.device, x.dtype)
        else:
            x = x + self.wpe.weight[: tokens.shape[1]]
        condition = F.silu(self.noise(sigma)).unsqueeze(1) if c.noise else None
        return self._trunk(x, view, None, lambda table: table, condition)

    def _embed(self, in_tokens: Tensor, in_positions: Tensor) -> Tensor:
        """Inputs of a decoder, one vector a token: position 0 is [None], whatever its token."""
        x = self.wte(in_tokens)
        return torch.where((in_positions == 0).unsqueeze(-1), self.start.to(x.dtype), x) + self.wpe(
            in_positions
        )

    def _trunk(
        self,
        x,
        view: View,
        targets,
        rows,
        condition,
        tables=None,
        cache: KVCache | None = None,
        **step,
    ) -> Tensor:
        """Run the blocks and the final norm on embedded inputs (B, T, D), or on the items (N, D) of a cached pass.

        rows, condition: see `Block.forward`. tables: the list of `adaln_tables`, to use it instead of `condition`.
        """
        variant = self.config.target
        queries = self.query + self.wpe(targets + 1) if variant == "two_stream" else None
        added = rows(self.wtpe.weight) if variant in ("input", "shared") else None
        x = self.drop(x + added if variant == "input" else x)
        for i, block in enumerate(self.blocks):
            cached = None
            if cache is not None:
                layer = i % len(
                    cache.keys
                )  # a pass that leaves nothing behind makes do with one layer's space
                cached = CachedStep(cache.keys[layer], cache.values[layer], **step)
            if variant == "two_stream":
                x, queries = block(x, view, cached=cached, queries=queries)
                continue
            x = x + added if variant == "shared" else x
            x = block(x, view, rows, condition, tables[i] if tables else None, cached)
        x = self.norm_f(x if queries is None else queries)
        if not self.config.adaln:
            return x
        return modulate(
            x, *rows(tables[-1] if tables else self.adaln_f(condition)).chunk(2, dim=-1)
        )

    def _condition(self) -> Tensor | None:
        """What adaLN is computed from, (block_size, cond_dim). It depends on the target position only, so one row per
        position serves the whole batch. None without adaLN on the target position."""
        return F.silu(self.wtpe.weight) if self.config.target == "adaln" else None

    def adaln_tables(self) -> list[Tensor]:
        """The modulation of every block, (block_size, 6 D), and of the final norm, (block_size, 2 D), for many passes.

        Empty without adaLN on the target position.
        """
        condition = self._condition()
        layers = [*(block.adaln for block in self.blocks), self.adaln_f]
        return [layer(condition) for layer in layers] if condition is not None else []

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
        return nll.T.reshape(-1, *targets.shape) if self.config.noise else nll.view(targets.shape)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) -> logits (..., V) of the tokens; an encoder's end before [MASK]."""
        return self.head(x)[..., : self.config.mask_token]

    def _chunk_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x)
        if self.config.noise:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return torch.stack(
                [logits.logsumexp(dim=-1), logits.gather(1, targets[:, None]).squeeze(1)], dim=1
            )
        return F.cross_entropy(logits, targets, reduction="none")

    def _check(self, tokens: Tensor, other: Tensor) -> None:
        if tokens.shape != other.shape or tokens.dim() != 2:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} and {tuple(other.shape)} must both be (batch, length)"
            )
        if not 1 <= tokens.shape[1] <= self.config.block_size:
            raise ValueError(
                f"{tokens.shape[1]} tokens a sequence; this model takes 1 to {self.config.block_size}"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            low, high = int(tokens.min()), int(tokens.max())
            raise ValueError(
                f"tokens run from {low} to {high}; this model knows 0 to {self.config.vocab_size - 1}"
            )

    # ---- parallel prediction: many targets that see the same context ---------------------------------------------

    def masked_log_probs(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """log p(true token | all unmasked tokens) at every masked position, in one pass.

        Decoder: the unmasked positions, in ascending order, are the context; every masked position is predicted from
        them and from nothing else (the parallel mask of `parallel_hidden`). Encoder: one pass of full attention, with
        the noise level, if it has one, of the time that equals the share of masked tokens.

        Args:
            tokens: LongTensor (B, T), in sequence order.
            masked: BoolTensor (B, T).

        Returns: float tensor (B, T) in sequence order, natural logarithm; 0 at unmasked positions.
        """
        self._check(tokens, masked)
        if self.config.attention == "full":
            with torch.no_grad():
                if not self.config.noise:
                    return -self(tokens, masked)
                normaliser, output = self(tokens, masked, log_linear_noise(masked.double().mean(1)))
                return (output - normaliser) * masked
        order, known = masked.to(torch.uint8).argsort(dim=1, stable=True), (~masked).sum(1)
        log_probs = self.parallel_log_probs(tokens, order, known)
        return torch.zeros_like(log_probs).scatter_(1, order, log_probs)

    def parallel_log_probs(self, tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
        """log p(x[order[b, r]] | x[order[b, :known[b]]]) for every step r >= known[b], in one pass; for decoders.

        The first `known` positions of the order, as listed, are the context. Every other position is predicted from
        them and from nothing else (the parallel mask of `parallel_hidden`).

        Args:
            tokens: LongTensor (B, T), in sequence order.
            order: LongTensor (B, T), permutations of the positions.
            known: LongTensor (B,), 0 to T.

        Returns: float tensor (B, T) in prediction order, natural logarithm; 0 at steps < known.
        """
        ordered = tokens.gather(1, order)
        B, T = tokens.shape
        feed = Feed(
            torch.zeros_like(known),
            known,
            torch.full_like(known, T),
            items=B * T,
            width=T,
            length=T,
        )
        with torch.no_grad():
            x = self.parallel_hidden(ordered, order, feed)
            log_probs = -self.head_nll(x.view(B, T, -1), ordered)
        predicted = torch.arange(T, device=order.device) >= known[:, None]
        return log_probs.where(predicted, torch.zeros_like(log_probs))

    def parallel_hidden(
        self,
        ordered: Tensor,
        order: Tensor,
        feed: Feed,
        cache: KVCache | None = None,
        tables: list[Tensor] | None = None,
    ) -> Tensor:
        """Feed the inputs that are not in the cache yet, then one copy of the last known input per parallel target.

        An item stands for a step i of its row and targets position order[i]. While i < known it is input i itself, seen
        causally. From i = known on it is a copy of input `known` (the last known token) that sees the inputs before it
        and itself, never another copy: what training shows under the order (context, target). Its key and value go to
        cache slot i; the first copy is the true input `known`, so its slot is the one that stays.

        Pure tensor code without a wait for the device: its shapes depend on the host numbers of `feed` alone.

        Args:
            ordered, order: (B, T) tokens and positions in prediction order; tokens from `known` on are ignored.
            feed: which steps of which rows.
            cache: of at least T slots; None: nothing is cached before or after this pass.
            tables: the list of `adaln_tables`, to compute them once for many calls.

        Returns: (N, D) final hidden states, rows one after the other; the item of step i predicts position order[i].
        """
        B, T = order.shape
        if cache is None:
            fast, device = torch.is_autocast_enabled(order.device.type), order.device
            dtype = torch.get_autocast_dtype(device.type) if fast else self.wte.weight.dtype
            cache = KVCache(self.config, B, T, device, dtype, layers=1)
        row, column, existing = ragged(feed.count, feed.items)
        slot = torch.where(existing, feed.cached[row] + column, cache.keys.shape[2] - 1)
        source = torch.minimum(slot, feed.known[row])
        before = (source - 1).clamp(min=0)
        in_positions = torch.where(source == 0, 0, order[row, before] + 1)
        targets = order[row, slot.clamp(max=T - 1)]
        cells = torch.arange(feed.width, device=order.device)
        first = feed.count.cumsum(0) - feed.count
        grid = (first[:, None] + cells).clamp(max=feed.items - 1)
        view = self._parallel_view(feed.cached[:, None] + cells, feed)
        x = self._embed(ordered[row, before], in_positions)
        condition = None if tables else self._condition()
        places = {"row": row, "column": column, "slot": slot, "grid": grid, "length": feed.length}
        return self._trunk(
            x, view, targets, lambda table: table[targets], condition, tables, cache, **places
        )

    def _parallel_view(self, slots: Tensor, feed: Feed) -> View:
        """What the queries in `slots` (B, W) see of the first `feed.length` cache slots."""
        source = torch.minimum(slots, feed.known[:, None]).unsqueeze(-1)
        keys = torch.arange(feed.length, device=slots.device)
        mask = (keys < source) | (keys == slots.unsqueeze(-1))
        if self.config.start == "hidden":
            mask &= (keys > 0) | (slots == 0).unsqueeze(-1)
        # The content of slot `known` is input `known` itself: queries see it, and nothing after it.
        return View(mask=mask.unsqueeze(1), query_mask=(keys <= source).unsqueeze(1))

    # ---- size ----------------------------------------------------------------------------------------------------

    def num_params(self) -> dict[str, int]:
        """Parameter counts, split as embeddings, blocks, conditioning (target positions and adaLN) and head."""
        counts = dict.fromkeys(("embeddings", "blocks", "conditioning", "head"), 0)
        for name, p in self.named_parameters():
            if "wtpe" in name or "adaln" in name or name.startswith(("query", "noise")):
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
        return (
            6 * (12 * c.n_layer * c.n_embd**2 + c.n_embd * c.vocab_size)
            + 12 * c.n_layer * c.n_embd * length
        )
