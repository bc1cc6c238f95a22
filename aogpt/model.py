"""AO-GPT: a Transformer that predicts the tokens of a sequence in any order.

For tokens x and an order s, a permutation of the positions, step i sees x[s[0]] .. x[s[i-1]] and
predicts x[s[i]]. For the order 2 0 3 1:

    step i            0        1    2    3
    input token       [None]   x2   x0   x3     x[s[i-1]]; [None] is a learned start vector
    input position    0        3    1    4      s[i-1] + 1: row of the table `wpe`, 0 is [None]'s
    target position   2        0    3    1      s[i]: row of the table `wtpe`
    predicts          x2       x0   x3   x1     x[s[i]]

Attention is causal along the order. A causal decoder cannot know which position comes next, so
every step is conditioned on its target position: `ModelConfig.target` says how. The paper's answer
is adaLN: the target position modulates every norm (Xue et al., arXiv 2506.19935, section 3).

Shapes: B batch, T steps, D width, H heads, V vocabulary. Build one with `systems.build_model`,
which adds initial values and scoring; the KV cache is in sampling/."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Target = Literal[
    "none",
    "input",
    "adaln",
    "shared",
    "per_block",
    "two_stream",
    "rotary",
    "mask_query",
]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the Transformer. The defaults are AO-GPT Small with GPT-2's vocabulary.

    Values of target: none: a plain GPT; input: an embedding of the target position is added to the
    input (sigma-GPT); adaln: it modulates every norm (AO-GPT); shared: it is added before every
    block; per_block: the same, a table per block; two_stream: a query stream that starts from it
    reads a content stream (XLNet, A3); rotary: nothing but queries that are rotated to it;
    mask_query: the query is a [MASK] at the target (Eso-LM B)."""

    __pydantic_config__ = {
        "extra": "forbid"
    }  # unknown keys of a config file are refused

    vocab_size: int = (
        50304  # rows of the token table: the vocabulary, up to a multiple of 64
    )
    block_size: int = 1024  # longest sequence, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width of the residual stream; a multiple of n_head
    attention: Literal["causal", "full"] = (
        "causal"  # full: an encoder, unknown tokens are [MASK]
    )
    target: Target = "adaln"  # how a decoder is conditioned on the target position
    group_attention: bool = True  # two_stream: inputs of one group see each other (A3)
    cond_dim: int = 128  # width of the vector that adaLN reads
    noise: bool = False  # encoder: adaLN on the noise level (SEDD)
    mask_token: int | None = (
        None  # encoder: id of [MASK], the first id after the tokenizer's
    )
    position: Literal["learned", "rotary", "both"] = (
        "learned"  # a table, rotated q and k, or both
    )
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = True  # of LayerNorm
    qk_norm: bool = True  # RMSNorm on the queries and keys of each head
    gelu: Literal["erf", "tanh"] = "erf"
    value_residual: bool = (
        False  # mix values with the first block's (Zhou et al., 2410.17897)
    )
    attn_bias: bool = True
    mlp_bias: bool = True
    start: Literal["attended", "hidden"] = (
        "attended"  # hidden: later steps do not see [None]
    )
    tied_head: bool = False  # the output head shares the token table
    head_bias: bool = True
    dropout: float = 0.0
    position_init: Literal["normal", "sinusoidal"] = (
        "normal"  # initial values of position tables
    )
    # What the Llama family has; the defaults leave it out.
    n_kv_head: int | None = (
        None  # heads of keys and values (grouped queries); None: n_head
    )
    head_width: int | None = None  # of one head; None: n_embd / n_head
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_width: int | None = None  # None: 4 n_embd
    attn_proj_bias: bool | None = (
        None  # None: as attn_bias, which is then that of q, k and v
    )
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: tuple[float, float, float, int] | None = (
        None  # Llama 3: see `rotary_angles`
    )
    query_at: Literal["target", "before_target"] = (
        "target"  # rotary: the position of queries.
    )
    # before_target: from left to right it is the input's own, as in a plain GPT with RoPE

    @property
    def is_encoder(self) -> bool:
        return self.attention == "full"

    @property
    def l2r_only(self) -> bool:
        """A decoder without target positions: a plain GPT."""
        return not self.is_encoder and self.target == "none"

    @property
    def has_adaln(self) -> bool:
        return self.noise or self.target == "adaln"

    @property
    def rotates(self) -> bool:
        return self.position != "learned"

    @property
    def head_dim(self) -> int:
        return self.head_width or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


# ---- one pass: what all blocks share -------------------------------------------------------------


class Pass:
    """What the blocks of one pass share: each step's target, how it attends, what adaLN gives it.
    This is the training pass; those of systems/ and sampling/ override `attend`, `modulation`."""

    def __init__(self, config: ModelConfig, targets: Tensor | None, condition=None):
        self.targets = targets  # (B, T) the position that each step predicts
        self.inverse = None if targets is None else inverse_permutation(targets)
        self.condition = (
            condition  # (block_size, cond_dim) silu(wtpe), all that adaLN reads
        )
        self.hide_start = config.start == "hidden"
        self.dropout = 0.0
        self.query_angles = self.key_angles = (
            None  # (cos, sin) of rotary positions, see `rotate`
        )

    def enter(self, layer: int) -> None:
        """Called before block `layer`; n_layer is the final norm. A KV cache looks up its part."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, T, H, D/H) each -> (B, T, D): step i sees inputs 0..i."""
        if not self.hide_start:
            return attention(q, k, v, causal=True, dropout=self.dropout)
        # Input 0 sees itself alone, so its output is its value. A mask would rule out fast kernels.
        rest = attention(
            q[:, 1:], k[:, 1:], v[:, 1:], causal=True, dropout=self.dropout
        )
        first = v[:, :1].repeat_interleave(
            q.shape[2] // v.shape[2], dim=2
        )  # to all heads
        return torch.cat([first.flatten(2), rest], dim=1)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """adaLN's shifts, scales and gates for each step, `parts` tensors (B, T, D)."""
        table = linear(
            self.condition
        )  # (block_size, parts D): once per position, not per token
        return tuple(self.lookup(part) for part in table.chunk(parts, dim=-1))

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor
    ) -> Tensor:
        """The norm of x (B, T, D), shifted and scaled by what `modulation` gives."""
        return modulate(norm(x), shift, scale)

    def lookup(self, table: Tensor) -> Tensor:
        """Rows of a per-position table at the targets: (block_size, D) -> (B, T, D)."""
        return PermutationGather.apply(
            table[: self.targets.shape[1]], self.targets, self.inverse
        )


def attention(q, k, v, mask=None, causal=False, dropout=0.0) -> Tensor:
    """Softmax attention, q (B, T, H, D/H), k and v with as many heads or a divisor of them ->
    (B, T, D). mask: True where a key is visible."""
    # Norms and rotation may leave q and k in float32; v has autocast's dtype.
    q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D/H)
    how = {
        "dropout_p": dropout,
        "is_causal": causal,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    y = F.scaled_dot_product_attention(q, k, v, mask, **how)
    return y.transpose(1, 2).flatten(2)  # (B, T, D)


class PermutationGather(torch.autograd.Function):
    """table[order], (T, D), (B, T) -> (B, T, D). Rows of `order` are permutations, so the gradient
    is a gather by the inverse and a sum. Indexing would add with atomics, in no fixed order."""

    @staticmethod
    def forward(ctx, table: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return table[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        batch = torch.arange(grad.shape[0], device=grad.device)[:, None]
        accumulate = torch.promote_types(
            grad.dtype, torch.float32
        )  # bfloat16 is too coarse for it
        return grad[batch, inverse].sum(0, dtype=accumulate).to(grad.dtype), None, None


def inverse_permutation(order: Tensor) -> Tensor:
    """The step at which each position is predicted: inverse[b, order[b, i]] == i, (B, T)."""
    steps = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, steps)


class RMSNorm(nn.RMSNorm):
    """The fused kernel wants input and weight in one dtype, under autocast, too."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype if x.is_cuda else x.dtype
        return F.rms_norm(
            x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps
        )


def make_norm(c: ModelConfig) -> nn.Module:
    if c.norm == "layernorm":
        return nn.LayerNorm(c.n_embd, eps=c.norm_eps, bias=c.norm_bias)
    return RMSNorm(c.n_embd, eps=c.norm_eps)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def rotary_angles(c: ModelConfig, device=None) -> Tensor:
    """Cosines and sines of each position's angles, float64 (block_size + 1, 2, D/H / 2).

    rope_scaling (factor, low, high, length), Llama 3.1: frequencies of fewer than `low` turns in
    `length` positions are divided by the factor, those of more than `high` stay, linear between."""
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
    frequency = c.rope_base**-exponents
    if c.rope_scaling is not None:
        factor, low, high, length = c.rope_scaling
        share = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (share + (1 - share) / factor)
    angle = torch.arange(c.block_size + 1, dtype=torch.float64)[:, None] * frequency
    angles = torch.stack([angle.cos(), angle.sin()], dim=1)
    no_float64 = torch.device(device or "cpu").type == "mps"
    return angles.to(device, torch.float32 if no_float64 else torch.float64)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of x (..., H, D/H) by angles whose cosines
    and sines are (..., 1, D/H / 2): coordinate i turns with i + D/H / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads_of = c.n_head, c.kv_heads, c.kv_heads  # q, k, v
        self.head_dim = c.head_dim
        width = c.n_head * c.head_dim
        proj_bias = c.attn_bias if c.attn_proj_bias is None else c.attn_proj_bias
        self.qkv = nn.Linear(
            c.n_embd, sum(self.heads_of) * c.head_dim, bias=c.attn_bias
        )
        self.proj = nn.Linear(width, c.n_embd, bias=proj_bias)
        self.mix = nn.Parameter(torch.full((2,), 0.5)) if c.value_residual else None
        self.q_norm = (
            RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        )
        self.k_norm = (
            RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        )

    def forward(self, x: Tensor, p: Pass, first_values: Tensor | None) -> tuple:
        """x (B, T, D) -> the output (B, T, D), and this block's values where blocks mix them."""
        q, k, v, values = self.heads(x, p, first_values)
        return self.proj(p.attend(q, k, v)), values

    def heads(self, x: Tensor, p: Pass, first_values: Tensor | None) -> tuple:
        heads = self.qkv(x).unflatten(
            -1, (-1, self.head_dim)
        )  # (B, T, H of all three, D/H)
        q, k, v = heads.split(self.heads_of, dim=-2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        values = None
        if self.mix is not None:
            values = v
            v = self.mix[0] * v + self.mix[1] * (
                v if first_values is None else first_values
            )
        if p.key_angles is not None:
            q = rotate(q, *p.query_angles)
            k = rotate(k, *p.key_angles)
        return q, k, v, values


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if c.gelu == "tanh" else "none"
        width = c.mlp_width or 4 * c.n_embd
        self.fc = nn.Linear(c.n_embd, width, bias=c.mlp_bias)
        self.gate = (
            nn.Linear(c.n_embd, width, bias=c.mlp_bias) if c.mlp == "swiglu" else None
        )
        self.proj = nn.Linear(width, c.n_embd, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:  # Shazeer, arXiv 2002.05202
            return self.proj(F.silu(self.gate(x)) * self.fc(x))
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    """Attention and MLP, pre-norm, with adaLN as in the paper, section 3."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.norm1 = make_norm(c)
        self.norm2 = make_norm(c)
        self.attn = Attention(c)
        self.mlp = MLP(c)
        self.adaln = nn.Linear(c.cond_dim, 6 * c.n_embd) if c.has_adaln else None
        self.wtpe = (
            nn.Embedding(c.block_size, c.n_embd) if c.target == "per_block" else None
        )
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, p: Pass, first_values: Tensor | None) -> tuple:
        """x (B, T, D), first_values (B, T, H, D/H): the first block's. Returns x and values."""
        if self.wtpe is not None:
            x = x + p.lookup(self.wtpe.weight)
        if self.adaln is None:
            y, values = self.attn(self.norm1(x), p, first_values)
            x = x + self.drop(y)
            return x + self.drop(self.mlp(self.norm2(x))), values
        shift1, scale1, gate1, shift2, scale2, gate2 = p.modulation(self.adaln, parts=6)
        normed = p.modulated_norm(self.norm1, x, shift1, scale1)
        y, values = self.attn(normed, p, first_values)
        x = x + gate1 * self.drop(y)
        y = self.mlp(p.modulated_norm(self.norm2, x, shift2, scale2))
        return x + gate2 * self.drop(y), values


# ---- the model -----------------------------------------------------------------------------------


class AOGPT(nn.Module):
    """A decoder of log p(x | order) under any order of prediction (the paper, section 3)."""

    block_type = Block
    pass_type = Pass  # of training

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.make_inputs()
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(self.block_type(c) for _ in range(c.n_layer))
        self.norm_f = make_norm(c)
        self.adaln_f = nn.Linear(c.cond_dim, 2 * c.n_embd) if c.has_adaln else None
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=c.head_bias)
        if c.tied_head:
            self.head.weight = self.wte.weight
        self.make_angles()

    def make_inputs(self) -> None:
        c = self.config
        width = {"adaln": c.cond_dim, "input": c.n_embd, "shared": c.n_embd}.get(
            c.target
        )
        self.wpe = (
            nn.Embedding(c.block_size + 1, c.n_embd) if c.position != "rotary" else None
        )
        self.start = nn.Parameter(torch.empty(c.n_embd))
        self.wtpe = nn.Embedding(c.block_size, width) if width else None

    def make_angles(self, device: torch.device | None = None) -> None:
        angles = rotary_angles(self.config, device) if self.config.rotates else None
        self.register_buffer("angles", angles, persistent=False)

    def _apply(self, *arguments, **keywords):  # .to() and its like
        super()._apply(*arguments, **keywords)
        self.make_angles(
            self.head.weight.device
        )  # angles stay exact in a bfloat16 model
        return self

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """-log p(x[order[b, i]] | x[order[b, :i]]), nats, (B, T) in prediction order. tokens (B, T)
        in sequence order; order (B, T), every row a permutation of 0..T-1."""
        # tokens.gather(1, order), as a scatter that torch.compile does not repeat for every logit.
        wanted = torch.empty_like(tokens).scatter_(
            1, inverse_permutation(order), tokens
        )
        return self.head_loss(self.hidden(tokens, order), wanted)

    def logits(self, tokens: Tensor, order: Tensor) -> Tensor:
        return self.head_logits(
            self.hidden(tokens, order)
        )  # (B, T, V), of positions order[:, i]

    def hidden(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Final hidden states (B, T, D); state i predicts position order[:, i]."""
        in_tokens, in_positions = self.inputs(tokens, order)
        p = self.pass_type(self.config, order, self.condition())
        return self.trunk(self.embed(in_tokens, in_positions), in_positions, p)

    def condition(self) -> Tensor | None:
        return F.silu(self.wtpe.weight) if self.config.target == "adaln" else None

    def inputs(self, tokens: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the order, one step late, and their positions; 0 stands for [None]."""
        shifted = order[:, :-1]
        return F.pad(tokens.gather(1, shifted), (1, 0)), F.pad(shifted + 1, (1, 0))

    def embed(self, in_tokens: Tensor, in_positions: Tensor) -> Tensor:
        x = self.wte(in_tokens)
        x = torch.where((in_positions == 0).unsqueeze(-1), self.start.to(x.dtype), x)
        return x if self.wpe is None else x + self.wpe(in_positions)

    def trunk(self, x: Tensor, in_positions: Tensor, p: Pass) -> Tensor:
        """Embedded inputs (B, T, D) at positions (B, T) -> final hidden states (B, T, D)."""
        target = self.config.target
        p.dropout = self.config.dropout if self.training else 0.0
        if self.config.rotates:
            p.key_angles = p.query_angles = self.angles_at(in_positions, x.dtype)
            if target not in ("none", "two_stream", "mask_query"):
                # Scores depend on the key's position minus the target.
                p.query_angles = self.target_angles(p, x.dtype)
        added = p.lookup(self.wtpe.weight) if target in ("input", "shared") else None
        x = self.drop(x + added if target == "input" else x)
        first_values = None
        for layer, block in enumerate(self.blocks):
            p.enter(layer)
            x, values = block(x + added if target == "shared" else x, p, first_values)
            first_values = values if first_values is None else first_values
        return self.final_norm(x, p)

    def final_norm(self, x: Tensor, p: Pass) -> Tensor:
        p.enter(len(self.blocks))
        if self.adaln_f is None:
            return self.norm_f(x)
        shift, scale = p.modulation(self.adaln_f, parts=2)
        return p.modulated_norm(self.norm_f, x, shift, scale)

    def angles_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) for `rotate`, (B, T, 1, D/H / 2) each, at positions (B, T)."""
        angles = self.angles.to(torch.promote_types(dtype, torch.float32))
        return angles[positions].unsqueeze(-3).unbind(-2)

    def target_angles(self, p: Pass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles of queries: at the target, whose own input stands at target + 1, or before it."""
        return self.angles_at(p.targets + (self.config.query_at == "target"), dtype)

    def head_logits(self, x: Tensor) -> Tensor:
        return self.head(x)  # (..., D) -> (..., V)

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, (B, T, D), (B, T) -> (B, T), nats."""
        logits = self.head_logits(x.flatten(0, 1))
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(
            targets.shape
        )
