"""AO-GPT: a Transformer that predicts the tokens of a sequence in any order.

For tokens x and an order s, a permutation of the positions, step i sees
x[s[0]] .. x[s[i-1]] and predicts x[s[i]]. For the order 2 0 3 1:

    step i            0        1    2    3
    input token       [None]   x2   x0   x3     x[s[i-1]]; [None] is a learned vector
    input position    0        3    1    4      s[i-1] + 1: row of `wpe`; 0 is [None]'s
    target position   2        0    3    1      s[i]: row of `wtpe`
    attends to        0        0-1  0-2  0-3    inputs of steps 0 to i
    predicts          x2       x0   x3   x1     x[s[i]]; its loss is -log p of that

Attention is causal along the order. A causal decoder cannot know which position comes
next, so every step is conditioned on its target position: `ModelConfig.target` says
how. The paper's answer is adaLN: the target position modulates every norm (Xue et al.,
arXiv 2506.19935, section 3). With "rotary" alone step 0 does not know its target: where
there is one key, attention returns its value whatever the query is.

`AOGPT.forward` returns the losses (B, T) of all steps; training minimises their mean
(objectives.py).

Shapes: B batch, T steps, D width, H heads, V vocabulary. `systems.build_model` makes a
model with initial values, scoring.py scores known sequences, sampling/ has the cache of
keys and values. Other systems on the same blocks are in systems/."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# How a decoder is conditioned on the target position. To add a way: a line here, and a
# layer or a `Pass` below that names what it `conditions`.
DecoderTarget = Literal[
    "none",  # a plain GPT
    "input",  # an embedding of the target position is added to the input (sigma-GPT)
    "adaln",  # it modulates every norm (AO-GPT)
    "shared",  # it is added before every block
    "per_block",  # the same, a table per block
    "rotary",  # nothing but queries that are rotated to it
]
# Those of decoders with a class of their own, which systems/kinds.py names.
SystemTarget = Literal[
    "two_stream",  # a stream of queries, which start from it, reads the tokens' (A3)
    "mask_query",  # the query is a [MASK] at the target (Eso-LM B)
]
Target = Literal[DecoderTarget, SystemTarget]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the Transformer, by default that of AO-GPT Small with GPT-2's
    vocabulary."""

    # rows of the token table: the vocabulary, up to a multiple of 64
    vocab_size: int = 50304
    block_size: int = 1024  # longest sequence, in tokens
    n_layer: int = 12  # blocks
    n_head: int = 12  # heads of the queries
    n_embd: int = 768  # width of the residual stream; a multiple of n_head
    # full: an encoder, unknown tokens are [MASK]
    attention: Literal["causal", "full"] = "causal"
    target: Target = "adaln"  # how a decoder is conditioned on the target position
    group_attention: bool = True  # two_stream: inputs of one group see each other (A3)
    cond_dim: int = 128  # width of the vector that adaLN reads
    noise: bool = False  # encoder: adaLN on the noise level (SEDD)
    # encoder: id of [MASK], the first id after the tokenizer's
    mask_token: int | None = None
    # a table, rotated q and k, or both
    position: Literal["learned", "rotary", "both"] = "learned"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # before attention and MLP
    norm_bias: bool = True  # of LayerNorm
    qk_norm: bool = True  # RMSNorm on the queries and keys of each head
    gelu: Literal["erf", "tanh"] = "erf"  # exact, or its approximation by tanh
    # mix values with the first block's (Zhou et al., 2410.17897)
    value_residual: bool = False
    attn_bias: bool = True  # of the four matrices of attention
    mlp_bias: bool = True  # of the matrices of the MLP
    # hidden: later steps do not see [None]
    start: Literal["attended", "hidden"] = "attended"
    tied_head: bool = False  # the output head shares the token table
    head_bias: bool = True  # of the output head
    dropout: float = 0.0  # share of activations set to zero in training
    # initial values of position tables
    position_init: Literal["normal", "sinusoidal"] = "normal"

    # What the Llama family has; the defaults leave it out.

    # heads of keys and values (grouped queries); None: n_head
    n_kv_head: int | None = None
    head_width: int | None = None  # of one head; None: n_embd / n_head
    mlp: Literal["gelu", "swiglu"] = "gelu"  # swiglu: gated by SiLU
    mlp_width: int | None = None  # None: 4 n_embd
    # None: as attn_bias, which is then that of q, k and v
    attn_proj_bias: bool | None = None
    norm_eps: float = 1e-5  # is added to the mean square, against division by zero
    rope_base: float = 10000.0  # of the wavelengths of rotated positions
    # Llama 3: see `rotary_angles`
    rope_scaling: tuple[float, float, float, int] | None = None
    # rotary: the position of queries. before_target: from left to right it is the
    # input's own, as in a plain GPT with RoPE
    query_at: Literal["target", "before_target"] = "target"

    @property
    def is_encoder(self) -> bool:
        """Return whether attention is full: over a partly masked sequence."""
        return self.attention == "full"

    @property
    def l2r_only(self) -> bool:
        """Return whether this is a decoder without target positions: a plain GPT."""
        return not self.is_encoder and self.target == "none"

    @property
    def has_adaln(self) -> bool:
        """Return whether adaLN reads the target position or the noise level."""
        return self.noise or self.target == "adaln"

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys are rotated to their positions."""
        return self.position != "learned"

    @property
    def head_dim(self) -> int:
        return self.head_width or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def mlp_dim(self) -> int:
        return self.mlp_width or 4 * self.n_embd

    @property
    def proj_bias(self) -> bool:
        """Return whether the output projection of attention has a bias."""
        if self.attn_proj_bias is None:
            return self.attn_bias
        return self.attn_proj_bias


# ---- one pass: what all blocks share -------------------------------------------------


class Pass:
    """What the blocks of one pass share: where inputs stand, which positions they
    predict, and how they attend.

    This is the training pass. Those of systems/ and sampling/ override `attend`,
    `modulation` and `lookup`."""

    targets: Tensor  # (B, T) AO-GPT's order; a pass without targets has none

    def __init__(
        self,
        model: "Transformer",
        positions: Tensor,
        targets: Tensor | None = None,
        inverse: Tensor | None = None,
        adaln_input: Tensor | None = None,
        allowed: Tensor | None = None,
    ):
        """Make a pass of a model in the mode (training or not) that it is in.

        positions (B, T): where the inputs stand. targets (B, T): the positions that
        they predict, if these differ; inverse: see `inverse_permutation`. adaln_input:
        what adaLN reads, of AO-GPT (block_size, cond_dim) silu(wtpe). allowed
        (B, 1, T, T): True where step i sees an input; None: inputs 0..i."""
        config = model.config
        self.inverse = inverse
        self.allowed = allowed
        self.adaln_input = adaln_input
        self.hide_start = config.start == "hidden"
        self.dropout = config.dropout if model.training else 0.0
        # (cos, sin) of rotary positions, see `rotate`
        self.key_angles: tuple[Tensor, Tensor] | None = None
        self.query_angles: tuple[Tensor, Tensor] | None = None
        if model.angles is not None:
            self.key_angles = model.angles_at(positions)
            self.query_angles = self.key_angles
        if targets is not None:
            self.targets = targets
            if model.angles is not None and config.target != "none":
                # A key is at row s[j - 1] + 1, so the query of target s[i] is at row
                # s[i] + 1. "before_target": at s[i], as in a plain GPT, whose query is
                # at the token before.
                shift = int(config.query_at == "target")
                self.query_angles = model.angles_at(targets + shift)
        self.added: Tensor | None = None  # (B, T, D), added before every block
        if config.target == "shared":
            assert model.wtpe is not None
            self.added = self.lookup(model.wtpe.weight)

    def enter(self, layer: int) -> None:
        """Note that block `layer` comes next; n_layer is the final norm. A pass with a
        cache of keys and values needs to know."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of attention, (B, T, D), for q, k and v of the shape
        (B, T, H, D/H)."""
        if self.allowed is not None:
            return attention(q, k, v, mask=self.allowed, dropout=self.dropout)
        if not self.hide_start:
            return attention(q, k, v, causal=True, dropout=self.dropout)
        # Input 0 sees itself alone: its output is its value, for all heads that share
        # it. A mask would rule out fast kernels.
        heads_per_value = q.shape[2] // v.shape[2]
        start_value = v[:, :1].repeat_interleave(heads_per_value, dim=2)
        rest = attention(
            q[:, 1:], k[:, 1:], v[:, 1:], causal=True, dropout=self.dropout
        )
        return torch.cat([start_value.flatten(2), rest], dim=1)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """Return adaLN's shifts, scales and gates for each step: `parts` tensors
        (B, T, D)."""
        table = linear(self.adaln_input)  # (block_size, parts D): once per position
        tables = table.chunk(parts, dim=-1)
        return tuple(self.lookup(part) for part in tables)

    def lookup(self, table: Tensor) -> Tensor:
        """Return the rows of a per-position table at the targets: (block_size, D) ->
        (B, T, D)."""
        length = self.targets.shape[1]
        rows = table[:length]  # (T, D)
        return PermutationGather.apply(rows, self.targets, self.inverse)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return the output of softmax attention, (B, T, D).

    q (B, T, H, D/H); k and v have H heads or a divisor of H. mask: True where a key is
    visible."""
    # Norms and rotation may leave q and k in float32; v has autocast's dtype.
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    has_groups = q.shape[2] != k.shape[2]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, D/H)
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=has_groups,
    )
    y = y.transpose(1, 2)  # (B, T, H, D/H)
    return y.flatten(2)  # (B, T, D)


def seen_by_copies(keys: Tensor, place: Tensor, source: Tensor) -> Tensor:
    """Return which inputs a copy of input `source` at `place` sees: those before the
    source, and itself. With place == source these are all up to itself."""
    return (keys < source) | (keys == place)


def without_start(allowed: Tensor, last: Tensor, config: ModelConfig) -> Tensor:
    """Return a mask (..., keys) in which a hidden [None] is visible only to queries
    that see nothing else: those whose last input, of the shape (..., 1), is 0."""
    if config.start != "hidden":
        return allowed
    keys = torch.arange(allowed.shape[-1], device=allowed.device)
    return allowed & ((keys > 0) | (last == 0))


class PermutationGather(torch.autograd.Function):
    """The lookup table[order], (B, T, D), in a table (T, D) by an order (B, T). The
    rows of the order are permutations, so the gradient is a gather by the inverse and a
    sum. The gradient of indexing would add with atomics, in no fixed order."""

    @staticmethod
    def forward(ctx, table: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Return the rows (B, T, D). inverse (B, T): see `inverse_permutation`."""
        ctx.save_for_backward(inverse)
        return table[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Return the gradient (T, D) of the table for that of the rows, (B, T, D)."""
        (inverse,) = ctx.saved_tensors
        batch = torch.arange(len(grad), device=grad.device)
        by_position = grad[batch[:, None], inverse]  # (B, T, D)
        # bfloat16 is too coarse to add in
        accumulate = torch.promote_types(grad.dtype, torch.float32)
        table_grad = by_position.sum(0, dtype=accumulate)  # (T, D)
        return table_grad.to(grad.dtype), None, None


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the step that predicts each position: inverse[b, order[b, i]] == i,
    (B, T).

    A position that no step predicts gets T, which is out of bounds of every table, so
    that a lookup with it raises."""
    T = order.shape[-1]
    steps = torch.arange(T, device=order.device)
    inverse = torch.full_like(order, T)
    return inverse.scatter_(-1, order, steps.expand_as(order))


# ---- layers --------------------------------------------------------------------------

Matrices = list[tuple[Tensor, list[int]]]


class Layer(nn.Module):
    """A layer that describes its parameters, so that nothing depends on their names
    (systems/parameters.py)."""

    init_std = 0.02  # of the initial values of its matrices
    initial: dict[str, float] = {}  # parameters that start at one value
    # parameters that tell the model which position to predict
    conditions: tuple[str, ...] = ()

    def matrices(self) -> Matrices:
        """Return the weights that Muon orthogonalises, with the rows of each part."""
        return []

    def make_neutral(self) -> None:
        """Set values with which a new layer changes no output of a model."""


class RMSNorm(nn.RMSNorm):
    """An RMSNorm that has input and weight in one dtype under autocast, too, as the
    fused kernel needs them."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype if x.is_cuda else x.dtype
        x = x.to(dtype)
        weight = self.weight.to(dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def make_norm(c: ModelConfig) -> nn.Module:
    if c.norm == "layernorm":
        return nn.LayerNorm(c.n_embd, eps=c.norm_eps, bias=c.norm_bias)
    return RMSNorm(c.n_embd, eps=c.norm_eps)


class PositionTable(nn.Embedding):
    """A learned vector for each position."""

    def __init__(
        self, c: ModelConfig, rows: int, width: int, wave_std: float | None = 0.04
    ):
        """Make a table (rows, width). wave_std: standard deviation of the initial sine
        waves, where model.position_init asks for them."""
        super().__init__(rows, width)
        self.wave_std = wave_std if c.position_init == "sinusoidal" else None
        # Row i starts with the sine waves of position i + first_wave.
        self.first_wave = 0
        # Rows in front of that of position 0: one where [None] has a row, else none.
        self.rows_before = rows - c.block_size

    def rows_for(self, table: "PositionTable") -> Tensor:
        """Return the rows of this table that a table of shorter blocks has, too."""
        first = self.rows_before - table.rows_before
        return self.weight[first:][: table.num_embeddings]


class TargetTable(PositionTable, Layer):
    """A learned vector for each target position."""

    conditions = ("weight",)

    def __init__(self, c: ModelConfig, width: int, wave_std: float | None = 0.04):
        super().__init__(c, c.block_size, width, wave_std)
        # Position 0 has the waves that it has in `wpe`, where it is row 1.
        self.first_wave = 1

    def make_neutral(self) -> None:
        """Set all vectors to 0, which changes nothing where they are added."""
        nn.init.zeros_(self.weight)


class ConditionTable(TargetTable):
    """The target table that adaLN reads, (block_size, cond_dim). Its waves have a
    larger std, as adaLN's initial weights have a std of 0.02."""

    def __init__(self, c: ModelConfig):
        super().__init__(c, c.cond_dim, wave_std=2.0)

    def make_neutral(self) -> None:
        """Change nothing: adaLN, which reads the table, is neutral itself, and would
        learn nothing from zeros."""


class AdaLN(nn.Linear, Layer):
    """A layer that computes a shift and a scale for each norm, and a gate for each
    output of a block, from a vector (..., cond_dim)."""

    conditions = ("weight", "bias")

    def __init__(self, c: ModelConfig, parts: int):
        """Make a layer of 6 parts for a block (shift, scale and gate, twice), or of 2
        for the final norm."""
        super().__init__(c.cond_dim, parts * c.n_embd)
        self.parts = parts

    def make_neutral(self) -> None:
        """Set shifts and scales to 0 and gates to 1, whatever the input."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        parts = self.bias.view(self.parts, -1)
        gates = parts[2::3]  # (2 or 0, D)
        nn.init.ones_(gates)


class Projection(nn.Linear, Layer):
    """The linear layer back to the residual stream, (..., width) -> (..., D). There are
    2 n_layer of these, whose outputs add up, so their initial values are smaller."""

    def __init__(self, c: ModelConfig, width: int, bias: bool):
        super().__init__(width, c.n_embd, bias=bias)
        self.init_std = 0.02 / math.sqrt(2 * c.n_layer)


def rotary_angles(c: ModelConfig) -> Tensor:
    """Return cosines and sines of the positions' angles, float64 on the CPU,
    (block_size + 1, 2, D/H/2).

    rope_scaling (factor, low, high, length), Llama 3.1: frequencies of fewer than `low`
    turns in `length` positions are divided by the factor, those of more than `high`
    stay, linear between."""
    coordinates = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device="cpu")
    exponents = coordinates / c.head_dim
    frequency = c.rope_base**-exponents
    if c.rope_scaling is not None:
        factor, low, high, length = c.rope_scaling
        turns = length * frequency / (2 * math.pi)
        share = (turns - low) / (high - low)
        share = share.clamp(0, 1)
        frequency = frequency * (share + (1 - share) / factor)
    positions = torch.arange(c.block_size + 1, dtype=torch.float64, device="cpu")
    angle = positions[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return the rotary embedding (Su et al., arXiv 2104.09864) of x (..., H, D/H) by
    angles, given as cosines and sines, (..., 1, D/H / 2) each: coordinate i turns with
    i + D/H / 2."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)  # (..., H, D/H / 2)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat([turned_a, turned_b], dim=-1)


class Attention(Layer):
    """The self-attention of a block. The pass decides which inputs a step sees."""

    initial = {"mix": 0.5}

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads_of = (c.n_head, c.kv_heads, c.kv_heads)  # q, k, v
        self.head_dim = c.head_dim
        rows = sum(self.heads_of) * c.head_dim
        width = c.n_head * c.head_dim
        self.qkv = nn.Linear(c.n_embd, rows, bias=c.attn_bias)
        self.proj = Projection(c, width, bias=c.proj_bias)
        self.mix: nn.Parameter | None = None
        if c.value_residual:
            # shares of this block's values and of the first block's
            self.mix = nn.Parameter(torch.full((2,), 0.5))
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, eps=c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, eps=c.norm_eps)

    def forward(
        self, x: Tensor, p: Pass, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, D) for x (B, T, D), and this block's values, which
        are None unless blocks mix them."""
        q, k, v, values = self.heads(x, p, first_values)
        y = p.attend(q, k, v)  # (B, T, D)
        return self.proj(y), values

    def heads(
        self, x: Tensor, p: Pass, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k and v of x (B, T, D), (B, T, heads, D/H) each, and this block's
        values before they are mixed, or None."""
        qkv = self.qkv(x)  # (B, T, all heads times D/H)
        per_head = (-1, self.head_dim)
        heads = qkv.unflatten(-1, per_head)
        q, k, v = heads.split(self.heads_of, dim=-2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        values = None
        if self.mix is not None:
            values = v
            first = v if first_values is None else first_values
            v = self.mix[0] * v + self.mix[1] * first
        if p.query_angles is not None:
            q = rotate(q, p.query_angles)
        if p.key_angles is not None:
            k = rotate(k, p.key_angles)
        return q, k, v, values

    def matrices(self) -> Matrices:
        """Return the two weights with the rows of their parts: queries, keys and values
        are matrices of their own."""
        rows_of_qkv = [heads * self.head_dim for heads in self.heads_of]
        rows_of_proj = [len(self.proj.weight)]
        return [(self.qkv.weight, rows_of_qkv), (self.proj.weight, rows_of_proj)]


class MLP(Layer):
    """An MLP: two layers with a GELU between them, or SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if c.gelu == "tanh" else "none"
        width = c.mlp_dim
        self.fc = nn.Linear(c.n_embd, width, bias=c.mlp_bias)
        self.gate = None
        if c.mlp == "swiglu":
            self.gate = nn.Linear(c.n_embd, width, bias=c.mlp_bias)
        self.proj = Projection(c, width, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, T, D) for x (B, T, D)."""
        if self.gate is not None:  # Shazeer, arXiv 2002.05202
            hidden = F.silu(self.gate(x)) * self.fc(x)
        else:
            hidden = F.gelu(self.fc(x), approximate=self.approximate)
        return self.proj(hidden)

    def matrices(self) -> Matrices:
        """Return the weights, each with its rows as one part."""
        weights = [self.fc.weight, self.proj.weight]
        if self.gate is not None:
            weights.insert(1, self.gate.weight)
        return [(weight, [len(weight)]) for weight in weights]


class Block(nn.Module):
    """A block of attention and MLP, pre-norm, with adaLN as in the paper, section 3."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.norm1 = make_norm(c)
        self.norm2 = make_norm(c)
        self.attn = Attention(c)
        self.mlp = MLP(c)
        self.adaln: AdaLN | None = None
        if c.has_adaln:
            self.adaln = AdaLN(c, parts=6)
        self.wtpe: TargetTable | None = None
        if c.target == "per_block":
            self.wtpe = TargetTable(c, c.n_embd, wave_std=None)
        self.drop = nn.Dropout(c.dropout)

    def forward(
        self, x: Tensor, p: Pass, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x (B, T, D) after this block, and this block's values (B, T, H, D/H)
        for a value residual. first_values: those of the first block; None in it."""
        if self.wtpe is not None:
            x = x + p.lookup(self.wtpe.weight)
        if p.added is not None:
            x = x + p.added
        if self.adaln is None:
            normed = self.norm1(x)
            y, values = self.attn(normed, p, first_values)
            x = x + self.drop(y)
            normed = self.norm2(x)
            y = self.mlp(normed)
            return x + self.drop(y), values
        modulation = p.modulation(self.adaln, parts=6)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        normed = self.norm1(x) * (1 + scale1) + shift1
        y, values = self.attn(normed, p, first_values)
        x = x + gate1 * self.drop(y)
        normed = self.norm2(x) * (1 + scale2) + shift2
        y = self.mlp(normed)
        return x + gate2 * self.drop(y), values


# Logits in memory at once: on a CPU fewer are faster than all, on a GPU they take 3 GiB
# with copies.
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
IMPOSSIBLE = -1e9  # a logit whose probability is 0 in every precision


def head_chunk(vocab_size: int, device: str) -> int:
    """Return the number of tokens in a chunk: at least 256, as small matrix products
    are slow."""
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"])
    return max(256, elements // vocab_size)


class HeadLoss(nn.Module):
    """The cross-entropy of the output head, in chunks of tokens, so that the float32
    logits (B T, V) never exist at once; the backward pass computes those of a chunk
    again.

    It has no parameters. It is a module so that it can be compiled by itself. Faster
    than torch's linear_cross_entropy where both were measured (results/speed.md)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.vocab_size = c.vocab_size

    def forward(self, head: Callable, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the losses of the tokens `wanted` (B, T) in nats, (B, T).

        head: a function of states (n, D) that returns logits (n, V). x (B, T, D): final
        hidden states."""
        shape = wanted.shape
        x = x.flatten(0, 1)  # (B T, D)
        wanted = wanted.flatten()
        size = head_chunk(self.vocab_size, x.device.type)
        # Compiled, the softmax is fused anyway.
        if torch.compiler.is_compiling() or len(x) <= size:
            losses = self.losses(head, x, wanted)
            return losses.unflatten(0, shape)
        parts = []
        chunks = zip(x.split(size), wanted.split(size), strict=True)
        for x_chunk, wanted_chunk in chunks:
            losses = checkpoint(
                self.losses,
                head,
                x_chunk,
                wanted_chunk,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing here is random
            )
            parts.append(losses)
        return torch.cat(parts).unflatten(0, shape)

    def losses(self, head: Callable, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the losses of the tokens of a chunk, (n,), from x (n, D) and wanted
        (n,)."""
        logits = head(x)
        return F.cross_entropy(logits, wanted, reduction="none")


# ---- models --------------------------------------------------------------------------


class Transformer(Layer):
    """The base of every system: a table of tokens, blocks, a final norm, a head.

    A system adds its inputs and a pass, which decides what its blocks see. Parameters
    are counted and saved in the order in which they are made."""

    # Whether queries are inputs of their own (systems/two_stream.py, mask_query.py).
    # Then no key depends on a target, and one pass predicts all groups of steps, each
    # from the groups before it.
    separate_queries = False
    # Two streams: queries have no keys. Only there may inputs of a group of steps see
    # each other (model.group_attention).
    query_stream = False
    mask_queries = False  # each query is a [MASK] among the inputs
    has_start = True  # [None] is an input
    # Final hidden states (B, T, D); every system has inputs of its own.
    hidden: Callable[..., Tensor]
    angles: Tensor | None  # of rotary positions
    excluded: Tensor | None  # BoolTensor (V,): the ids that no token has; None: none

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.start: nn.Parameter | None = None  # [None]
        self.wpe: PositionTable | None = None
        self.wtpe: TargetTable | None = None  # a table of target positions
        self.register_buffer("excluded", None, persistent=False)

    def exclude(self, vocab_size: int, end: int) -> None:
        """Give no probability to the id `end` and to those from `vocab_size` on: for
        records whose end is given, which stand nowhere else in a record."""
        ids = torch.arange(self.config.vocab_size, device=self.wte.weight.device)
        self.excluded = (ids == end) | (ids >= vocab_size)

    def add_blocks(self, block_type: type[nn.Module]) -> None:
        """Make blocks, final norm and head, which come last among the parameters."""
        c = self.config
        self.blocks = nn.ModuleList()
        for _ in range(c.n_layer):
            self.blocks.append(block_type(c))
        self.norm_f = make_norm(c)
        self.adaln_f: AdaLN | None = None
        if c.has_adaln:
            self.adaln_f = AdaLN(c, parts=2)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=c.head_bias)
        if c.tied_head:
            self.head.weight = self.wte.weight
        self.loss = HeadLoss(c)
        self.make_angles()

    def make_angles(self) -> None:
        """Make the buffer of the angles of rotary positions (`rotary_angles`), which is
        float32 in a bfloat16 model, too."""
        angles = None
        if self.config.rotates:
            weight = self.head.weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            angles = rotary_angles(self.config).to(dtype).to(weight.device)
        self.register_buffer("angles", angles, persistent=False)

    def _apply(self, *arguments, **keywords):  # .to() and its like
        super()._apply(*arguments, **keywords)
        self.make_angles()  # from float64 again
        return self

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of tokens at positions, (B, T) each."""
        x = self.wte(tokens)
        if self.start is not None:
            is_start = (positions == 0).unsqueeze(-1)  # (B, T, 1)
            start = self.start.to(x.dtype)
            x = torch.where(is_start, start, x)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        return x

    def run_blocks(self, x: Tensor, p: Pass) -> Tensor:
        """Return the final hidden states (B, T, D) of embedded inputs x (B, T, D): run
        all blocks and the final norm."""
        if self.wtpe is not None and self.config.target == "input":
            x = x + p.lookup(self.wtpe.weight)
        x = self.drop(x)
        first_values = None
        for layer, block in enumerate(self.blocks):
            p.enter(layer)
            x, values = block(x, p, first_values)
            if first_values is None:
                first_values = values
        p.enter(len(self.blocks))
        if self.adaln_f is None:
            return self.norm_f(x)
        shift, scale = p.modulation(self.adaln_f, parts=2)
        return self.norm_f(x) * (1 + scale) + shift

    def angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines for `rotate`, (B, T, 1, D/H / 2) each, at
        positions (B, T)."""
        assert self.angles is not None
        rows = self.angles[positions]  # (B, T, 2, D/H / 2)
        rows = rows.unsqueeze(-3)  # for all heads
        cos, sin = rows.unbind(-2)
        return cos, sin

    def head_logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of final hidden states (..., D)."""
        logits = self.head(x)
        if self.excluded is not None:
            logits = self.without_excluded(logits)
        return logits

    def without_excluded(self, logits: Tensor) -> Tensor:
        """Return logits (..., V) in which excluded ids have no probability."""
        assert self.excluded is not None
        # Not minus infinity: such a loss times a weight of 0 would be NaN.
        return logits.masked_fill(self.excluded, IMPOSSIBLE)

    def logits(self, *inputs) -> Tensor:
        """Return the logits (B, T, V) for the arguments of `hidden`."""
        return self.head_logits(self.hidden(*inputs))


class AOGPT(Transformer):
    """A decoder of log p(x | order) in any order (the paper, section 3).

    To train one from scratch, make it by `systems.build_model`, which sets the initial
    values; those of the class itself are torch's."""

    def __init__(self, config: ModelConfig):
        if config.is_encoder or config.target not in get_args(DecoderTarget):
            raise ValueError(
                f"this configuration (target {config.target!r}, {config.attention} "
                "attention) is of another class than AOGPT: use "
                "aogpt.systems.build_model(config)"
            )
        super().__init__(config)
        c = config
        self.start = nn.Parameter(torch.zeros(c.n_embd))
        if c.position != "rotary":
            self.wpe = PositionTable(c, c.block_size + 1, c.n_embd)
        if c.target == "adaln":
            self.wtpe = ConditionTable(c)
        elif c.target in ("input", "shared"):
            self.wtpe = TargetTable(c, c.n_embd)
        self.add_blocks(Block)

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Return -log p(x[order[b, i]] | x[order[b, :i]]), nats, in prediction order.

        tokens (B, T) in sequence order; order (B, T), every row a permutation of
        0..T-1, else an error of an index out of bounds. With target "none" the order
        must be left to right: it is not checked, and others mean nothing. Returns
        (B, T)."""
        if order.shape != tokens.shape:
            raise ValueError(
                f"the order is {tuple(order.shape)}, the tokens {tuple(tokens.shape)}"
            )
        wanted = in_prediction_order(tokens, order)
        x = self.hidden(tokens, order)  # (B, T, D)
        return self.loss(self.head_logits, x, wanted)

    def hidden(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Return the final hidden states (B, T, D); state i predicts position
        order[:, i]."""
        in_tokens, in_positions = shifted_inputs(tokens, order)
        return self.trunk(in_tokens, in_positions, order)

    def trunk(
        self,
        in_tokens: Tensor,
        in_positions: Tensor,
        order: Tensor,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states (B, T, D) for inputs (B, T), which scoring
        chooses in another way than `hidden`. allowed: see `Pass`."""
        x = self.embed(in_tokens, in_positions)
        adaln_input = None
        if self.adaln_f is not None:
            adaln_input = self.target_vectors()
        p = Pass(
            self,
            in_positions,
            targets=order,
            inverse=inverse_permutation(order),
            adaln_input=adaln_input,
            allowed=allowed,
        )
        return self.run_blocks(x, p)

    def target_vectors(self) -> Tensor:
        """Return the input of adaLN by target position, (block_size, cond_dim)."""
        assert self.wtpe is not None
        return F.silu(self.wtpe.weight)


def in_prediction_order(tokens: Tensor, order: Tensor) -> Tensor:
    """Return tokens.gather(1, order), (B, T), by a scatter: torch.compile would fuse a
    gather into the loss and repeat it for every logit."""
    wanted = torch.empty_like(tokens)
    return wanted.scatter_(1, inverse_permutation(order), tokens)


def shifted_inputs(tokens: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input tokens and their positions, (B, T) each: the tokens in the order
    (B, T), one step late. Position 0 is that of [None]."""
    shifted = order[:, :-1]
    before = (1, 0)  # one 0 in front
    in_tokens = tokens.gather(1, shifted)
    in_positions = shifted + 1
    return F.pad(in_tokens, before), F.pad(in_positions, before)
