"""The Transformer: a decoder that predicts the tokens of a sequence in any order.

Shapes: B batch, T steps (= positions), D width, H heads, V vocabulary. In a parallel pass (see
`AOGPT.parallel_hidden`): N items in all, W items in the longest row, C cache slots.

For T tokens x and an order s (a permutation of the positions), the input and output of step i are

    step i            0        1          ...  T-1
    input token       [None]   x[s[0]]         x[s[T-2]]     [None] is a learned start vector
    input position    0        s[0] + 1        s[T-2] + 1    `wpe`, block_size + 1 rows
    target position   s[0]     s[1]            s[T-1]        `wtpe`, block_size rows
    predicts          x[s[0]]  x[s[1]]         x[s[T-1]]

so T inputs give T predictions, under ordinary causal attention *along the order*. A causal decoder
cannot know which position it is asked for next unless it is told; AO-GPT tells every block through
adaLN on the target position. `wpe` and `wtpe` are tables; positions can also be told by rotating
queries and keys (`Rotation`).

Source: Any-Order GPT as Masked Diffusion Model (Xue et al., arXiv 2506.19935), "the paper". The
systems that it compares AO-GPT with are settings of the same blocks (docs/systems.md).

To read AO-GPT first: `ModelConfig`, `Block`, then `AOGPT` down to `_trunk`. The cached parallel
pass, which generates, and the encoder come after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orders import inverse_permutation
from runtime.validation import BelowOne, Count, Table, check_values

# Logits alive at once in the output head, outside torch.compile: on a CPU as many as are faster
# than all at once, on a GPU as many as are worth their memory (3 GiB with the copies of a chunk).
HEAD_CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}


def head_chunk(vocab_size: int, device: str) -> int:
    """Tokens whose logits are alive at once; at least 256, as small matrix products are slow.
    device: "cpu" or "cuda"."""
    return max(256, HEAD_CHUNK_ELEMENTS.get(device, HEAD_CHUNK_ELEMENTS["cpu"]) // vocab_size)


@dataclass(frozen=True)
class ModelConfig(Table):
    """Shape of the Transformer. The defaults are AO-GPT Small with the GPT-2 vocabulary."""

    vocab_size: Count = 50304
    """Rows of the token table: for speed, the vocabulary rounded up to a multiple of 64."""
    block_size: Annotated[int, Interval(ge=1, le=2**20)] = 1024
    """Longest sequence, in tokens."""
    n_layer: Annotated[int, Interval(ge=1, le=10_000)] = 12
    n_head: Count = 12
    n_embd: Count = 768
    """Width of the residual stream; a multiple of n_head."""
    attention: Literal["causal", "full"] = "causal"
    """causal: a decoder, causal along the order. full: an encoder that sees all positions, masked
    ones as [MASK]."""
    target: Literal["none", "input", "adaln", "shared", "per_block", "two_stream", "rotary"] = (
        "adaln"
    )
    """How a step of a decoder is told the position it predicts. none: not at all (plain
    left-to-right GPT); input: a full-width embedding added to the input (sigma-GPT); adaln: it
    modulates every normalisation (AO-GPT); shared: one full-width table added again before every
    block; per_block: a table per block; two_stream: a query stream that starts from the target
    position and reads a content stream (XLNet, A3); rotary: by the rotation of its queries alone
    (see `position`; where it sees a single input, as step 0 does, rotation tells nothing). An
    encoder has "none"."""
    group_attention: bool = True
    """Inputs of two_stream that were predicted in one group see each other, as A3 trains them.
    False: each sees those before it only, for a model that was never trained in groups."""
    cond_dim: Count = 128
    """Width of the vector that adaLN is computed from."""
    noise: bool = False
    """adaLN on the noise level of an encoder (SEDD)."""
    mask_token: int | None = None
    """Id of [MASK] in an encoder: the first id after the tokenizer's; below vocab_size."""
    position: Literal["learned", "rotary", "both"] = "learned"
    """learned: a table with a row per position, added to the inputs. rotary: rotated queries and
    keys, base 10000; of a decoder keys by the position of their input, queries by that of their
    target. both: the two together."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = True
    """Biases of LayerNorm."""
    qk_norm: bool = True
    """RMSNorm on the queries and keys of each head."""
    gelu: Literal["erf", "tanh"] = "erf"
    value_residual: bool = False
    """Every block mixes the values of its attention with those of the first block (Zhou et al.,
    arXiv 2410.17897)."""
    attn_bias: bool = True
    """Biases on the attention's two linear layers."""
    mlp_bias: bool = True
    start: Literal["attended", "hidden"] = "attended"
    """Whether later steps of a decoder see [None]. hidden: no, as in GPT-2, which has no start
    token."""
    tied_head: bool = False
    """The output head shares the token table."""
    head_bias: bool = True
    dropout: BelowOne = 0.0
    position_init: Literal["normal", "sinusoidal"] = "normal"
    """How the learned position tables start. normal: as the paper does; sinusoidal: as sine waves,
    so that neighbouring positions start alike, which lets a small any-order model find its
    neighbours after far fewer steps."""

    def __post_init__(self):
        check_values(self, lambda field: f"model.{field}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd ({self.n_embd}) must be a multiple of model.n_head ({self.n_head})"
            )
        if self.rotates and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head width, but it is {self.head_dim}")
        if self.is_encoder:
            self._check_encoder()
        else:
            self._check_decoder()

    def _check_encoder(self) -> None:
        if self.target != "none":
            raise ValueError(
                f"model.target is {self.target!r}, but an encoder (model.attention = 'full') "
                "predicts every masked position at once and has no target position; set "
                "model.target to 'none'"
            )
        if self.mask_token is None or not 0 < self.mask_token < self.vocab_size:
            raise ValueError(
                f"model.mask_token is {self.mask_token}; an encoder (model.attention = 'full') "
                "needs the first id after the tokenizer's, below model.vocab_size "
                f"({self.vocab_size}): 50257 for gpt2, 257 for bytes"
            )

    def _check_decoder(self) -> None:
        for name, value in (("mask_token", None), ("noise", False)):
            if getattr(self, name) != value:
                raise ValueError(
                    f"model.{name} = {getattr(self, name)!r} is for encoders; set model.attention "
                    "to 'full'"
                )
        if self.target == "rotary" and not self.rotates:
            raise ValueError(
                "model.target = 'rotary' tells a step its target by rotating its queries; set "
                "model.position to 'rotary'"
            )

    @property
    def is_encoder(self) -> bool:
        return self.attention == "full"

    @property
    def l2r_only(self) -> bool:
        """A decoder that is not told which position it predicts: a plain GPT."""
        return not self.is_encoder and self.target == "none"

    @property
    def has_adaln(self) -> bool:
        return self.noise or self.target == "adaln"

    @property
    def has_position_table(self) -> bool:
        return self.position != "rotary"

    @property
    def length_is_fixed(self) -> bool:
        """Whether a table has a row per position, so that no sequence can be longer."""
        of_targets = ("input", "adaln", "shared", "per_block")
        return self.has_position_table or self.target in of_targets

    @property
    def rotates(self) -> bool:
        return self.position != "learned"

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


# ---- layers --------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """RMSNorm that reaches the fused kernel under autocast, too, which wants weight and input in
    one dtype: on a CPU the input's, on a GPU, where it is to be in float32, the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype if x.is_cuda else x.dtype
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.norm_bias)
    return RMSNorm(config.n_embd, eps=1e-5)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def cut(table: Tensor, parts: int = 1) -> tuple[Tensor, ...]:
    """A table's columns in equal parts."""
    return table.chunk(parts, dim=-1)


class PermutationGather(torch.autograd.Function):
    """table[order], the rows of a per-position table in the order of each sequence: (T, D), (B, T)
    -> (B, T, D), with a deterministic gradient.

    Plain indexing adds up the gradients of a row with atomics, whose order, and hence rounding,
    differs from run to run on a GPU. But every row of `order` is a permutation of 0..T-1, so the
    gradient is a gather, too, and a sum over the batch: inverse[b, p], the step that predicts
    position p, is where row p of the table went (`inverse_permutation`).
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
        # 16-bit numbers are too coarse to add up a batch.
        accumulate = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
        return grad[batch, inverse].sum(0, dtype=accumulate).to(grad.dtype), None, None


@dataclass
class AttentionMask:
    """Which inputs the queries of one pass see, the same in every block. The default: all; of
    a pass that a kernel computes: those before them, as their positions in the cache say."""

    causal: bool = False
    """Query i sees inputs 0..i."""
    hide_start: bool = False
    """With causal, or a kernel: input 0 is seen by itself only."""
    allowed: Tensor | None = None
    """Without either: BoolTensor (B or 1, 1, queries or 1, keys), True where a key is seen."""


@dataclass
class Rotation:
    """The rotary angles of one pass, the same in every block: cosines and sines, see `rotate`.

    The score of a query rotated to position p and a key rotated to position r depends on p - r, not
    on p and r themselves (Su et al., arXiv 2104.09864). A decoder has two positions at every step:
    its input's and its target's. A key is rotated to the position of its own input, so that it
    stays as it is in the cache, whatever is predicted later; a query to the *target* position of
    its step. So a score depends on how far the key's token lies from the token that is predicted,
    and "the word before the one I predict" is the same pattern everywhere in a sequence. With a
    learned table of positions it has to be learned for every pair of positions on its own.
    """

    keys: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    second_stream: tuple[Tensor, Tensor] | None = None
    """Of the query stream of two_stream. Then `queries` are those of the content stream, which must
    not know targets: they are rotated as the keys are."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.attn_bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.attn_bias)
        self.mix = nn.Parameter(torch.empty(2)) if config.value_residual else None
        self.q_norm = RMSNorm(config.head_dim, eps=1e-5) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=1e-5) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x,
        mask: AttentionMask,
        rotation: Rotation | None = None,
        cache=None,
        first_values=None,
        queries=None,
        query_mask=None,
    ):
        """x (B, T, D) -> its output, that of `queries`, and values for other blocks.

        x: in a parallel pass, which has a cache, items (N, D).
        queries: of the shape of x, a second stream that reads the keys and values of x as
            query_mask says.

        Returns: the output, of the shape of x; that of the queries or None; and what other blocks
        take as first_values, where model.value_residual mixes them, or None.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(-3)
        q, k, own_values = self.q_norm(q), self.k_norm(k), None
        if self.mix is not None:
            own_values = v
            other = v if first_values is None else first_values
            v = self.mix[0] * v + self.mix[1] * other
        if rotation is not None:
            q, k = rotate(q, *rotation.queries), rotate(k, *rotation.keys)
        if cache is not None:
            k, v = cache.update(k, v)  # now with those of earlier passes
        y = self._attend(q, k, v, mask, cache)
        if queries is None:
            return y, None, own_values
        # Queries have neither keys nor values, so they need the first third of the projection only.
        D = x.shape[-1]
        bias = None if self.qkv.bias is None else self.qkv.bias[:D]
        q = self.q_norm(
            F.linear(queries, self.qkv.weight[:D], bias).unflatten(-1, (self.n_head, -1))
        )
        if rotation is not None:
            q = rotate(q, *rotation.second_stream)
        return y, self._attend(q, k, v, query_mask, cache), own_values

    def _attend(self, q, k, v, mask: AttentionMask, cache: LayerCache | None) -> Tensor:
        """q (B, T, H, D/H) or of items (N, H, D/H); k, v (B, keys, H, D/H) -> projected, as x."""
        if cache is not None and cache.kernel is not None:
            return self.proj(cache.attend(q, mask).flatten(1))
        if cache is not None:
            q = cache.layout.to_grid(q)
        # Norms and rotation may leave q and k in float32; v has autocast's dtype, or the cache's.
        q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
        first = None
        if mask.hide_start:
            # Input 0 attends to itself alone, so its output is its value, and the others go on
            # without it. A mask would do the same, but the fastest kernels take none but causal.
            first, q, k, v = v[:, :, :1], q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.allowed, dropout_p=p, is_causal=mask.causal
        )
        if first is not None:
            y = torch.cat([first, y], dim=2)
        y = y.transpose(1, 2).flatten(2)
        return self.proj(y if cache is None else cache.layout.to_items(y))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.mlp_bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    """Attention and MLP, pre-norm. It reads its own parameters only, so that it can be sharded,
    compiled or computed again in the backward pass by itself."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attn, self.mlp = Attention(config), MLP(config)
        self.adaln = nn.Linear(config.cond_dim, 6 * config.n_embd) if config.has_adaln else None
        per_block = config.target == "per_block"
        self.wtpe = nn.Embedding(config.block_size, config.n_embd) if per_block else None
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x,
        mask,
        rows_of_targets,
        condition=None,
        modulation=None,
        rotation=None,
        cache=None,
        first_values=None,
    ):
        """One block; with adaLN as in the paper, section 3.

        Args:
            x: (B, T, D), or the (N, D) items of a parallel pass.
            mask: what attention may see.
            rows_of_targets: a function that looks up, in a table with a row per position, the row
                of each step's target, cut into equal `parts` (by default one):
                (positions, ...) -> a tuple of (B, T, .../parts) or (N, .../parts). Where the table
                has these rows already, it only cuts them (`cut`).
            condition: (positions, cond_dim), what adaLN is computed from, or of a pass with few
                items (N, cond_dim), of their targets; of an encoder (B, 1, cond_dim).
            modulation: (positions, 6 D), the output of adaLN, where that is known already.
            rotation: `Rotation`; None without rotary positions.
            cache: `LayerCache`, of a parallel pass.
            first_values: the second result of the first block, for all others, (B, T, H, D/H) or
                (N, H, D/H).

        Returns: of the shape of x; and the values of its attention, None unless blocks mix them.
        """
        if self.wtpe is not None:
            x = x + rows_of_targets(self.wtpe.weight)[0]
        if self.adaln is None:
            h, _, values = self.attn(self.norm1(x), mask, rotation, cache, first_values)
            x = x + self.drop(h)
            return x + self.drop(self.mlp(self.norm2(x))), values
        # adaLN depends on the target position alone, so it is computed once per position, not once
        # per token: the whole batch shares the table, and every token takes the row of its target.
        if modulation is None:
            modulation = self.adaln(condition)
        shift1, scale1, gate1, shift2, scale2, gate2 = rows_of_targets(modulation, parts=6)
        h = modulate(self.norm1(x), shift1, scale1)
        h, _, values = self.attn(h, mask, rotation, cache, first_values)
        x = x + gate1 * self.drop(h)
        h = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + gate2 * self.drop(h), values


class TwoStreamBlock(Block):
    """Two streams with the same weights (XLNet, A3): x, which sees its own tokens, and queries,
    which know only their target position and what they read from x. A `Block` in its layers only:
    it has no adaLN, and takes and returns both streams."""

    def forward(
        self, x, queries, mask, query_mask, rotation=None, cache=None, first_values=None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both streams, and values; x, mask, rotation, cache, first_values: as in `Block`; queries:
        of the shape of x."""
        asking = self.norm1(queries), query_mask
        y, answer, values = self.attn(self.norm1(x), mask, rotation, cache, first_values, *asking)
        x, queries = x + self.drop(y), queries + self.drop(answer)
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x, queries + self.drop(self.mlp(self.norm2(queries))), values


# ---- what decoder and encoder share --------------------------------------------------------------


class Transformer(nn.Module):
    """Token table, blocks and output head. `AOGPT` and `Encoder` say what goes in and comes out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Weights are drawn, and gradient norms summed, in the order in which modules are made.
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.make_inputs()
        self.drop = nn.Dropout(config.dropout)
        block = TwoStreamBlock if config.target == "two_stream" else Block
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layer))
        self.norm_f = make_norm(config)
        self.adaln_f = nn.Linear(config.cond_dim, 2 * config.n_embd) if config.has_adaln else None
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.wte.weight
        self.make_angles()
        self.init_weights()

    def make_inputs(self) -> None:
        """Make what turns positions, and what else a subclass is told, into vectors."""
        raise NotImplementedError  # AOGPT and Encoder have their own

    def make_angles(self, device: torch.device | None = None) -> None:
        """Make the rotary angles of all positions, (block_size + 1, 2, D/H / 2). They are not
        weights, and no checkpoint holds them. In float64, so that a model in float64 is exact."""
        angles = None
        if self.config.rotates:
            angles = rotary_angles(self.config.block_size + 1, self.config.head_dim, device)
        self.register_buffer("angles", angles, persistent=False)

    def set_block_size(self, block_size: int) -> None:
        """Take sequences of up to so many tokens from now on. Nothing says that a model is any good
        on longer ones than it was trained on. Raises ValueError for one with tables of positions.
        """
        if self.config.length_is_fixed and block_size != self.config.block_size:
            raise ValueError(
                f"this model has tables of {self.config.block_size} positions and takes no other "
                f"block size, such as {block_size}; only models without tables do: those with "
                "model.position = 'rotary' and, decoders, model.target = 'rotary', 'none' or "
                "'two_stream'"
            )
        self.config = dataclasses.replace(self.config, block_size=block_size)
        self.make_angles(self.head.weight.device)

    def _apply(self, *arguments, **keywords):
        """What `.to()` and its like do to all tensors. Angles go along to another device, but a
        model that is cast to bfloat16 keeps exact ones."""
        super()._apply(*arguments, **keywords)
        self.make_angles(self.head.weight.device)
        return self

    def angles_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `rotate` needs for vectors at these positions, (...) -> (..., 1, D/H / 2) each.
        dtype: of the model; angles are in float32 at least."""
        dtype = torch.promote_types(dtype, torch.float32)
        cos, sin = self.angles.to(dtype)[positions].unsqueeze(-3).unbind(-2)
        return cos, sin

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Give every weight its initial value."""
        for name, p in self.named_parameters():
            self.init_weight(name, p, generator)

    @torch.no_grad()
    def init_weight(self, name: str, p: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill p, of the shape of the weight `name`: truncated normal (std 0.02, cut at 3 std;
        residual projections 0.02 / sqrt(2 n_layer)), biases 0, norms 1, shares of values 0.5;
        position tables as model.position_init says."""
        waves = self.config.position_init == "sinusoidal"
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith("attn.mix"):
            nn.init.constant_(p, 0.5)
        elif "norm" in name:
            nn.init.ones_(p)
        elif waves and name == "wpe.weight":
            p.copy_(sinusoids(*p.shape, std=0.04))
        elif waves and name == "wtpe.weight":
            # The waves of `wpe`, whose row 0 is for [None], so that a position has the same in
            # both. adaLN reads them through weights of std 0.02, which a larger std makes up for.
            std = 2.0 if self.config.target == "adaln" else 0.04
            p.copy_(sinusoids(len(p) + 1, p.shape[1], std)[1:])
        else:
            std = 0.02
            # 2 n_layer of these add up in the residual stream.
            if name.endswith(("attn.proj.weight", "mlp.proj.weight")):
                std = 0.02 / math.sqrt(2 * self.config.n_layer)
            nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)

    def final_norm(self, x, rows_of_targets, condition, modulation=None) -> Tensor:
        """The last norm, with its adaLN; arguments as in `Block.forward`."""
        x = self.norm_f(x)
        if self.adaln_f is None:
            return x
        if modulation is None:
            modulation = self.adaln_f(condition)
        return modulate(x, *rows_of_targets(modulation, parts=2))

    def logits(self, x: Tensor, float32: bool = False) -> Tensor:
        """Hidden states (..., D) -> logits (..., V) of the tokens.

        float32: the sums of a bfloat16 product as a GPU has them, for (n, D). Rounded to bfloat16
        they have 8 bits, too few for a draw that is to be exact.
        """
        if float32 and x.is_cuda and self.head.weight.dtype == torch.bfloat16:
            logits = torch.mm(x, self.head.weight.T, out_dtype=torch.float32)
            return logits if self.head.bias is None else logits.add_(self.head.bias)
        return self.head(x)

    def head_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the output head, (B, T, D), (B, T) -> (B, T), nats."""
        return self.head_in_chunks(self._cross_entropy, x, targets).view(targets.shape)

    def _cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), targets, reduction="none")

    def head_in_chunks(self, function: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """function(x (n, D), targets (n,)) of all B T tokens, without (B, T, V) float32 logits.

        Compiled, the float32 softmax is fused into its reductions. Eager, more tokens than
        `head_chunk` are computed in chunks, and again in the backward pass. PyTorch 2.13's chunked
        linear_cross_entropy does the same job; these chunks also run on older versions, and were
        faster where both were measured (results/loss_head.md).
        """
        x, targets = x.flatten(0, 1), targets.flatten()
        n = head_chunk(self.config.vocab_size, x.device.type)
        if torch.compiler.is_compiling() or len(x) <= n:
            return function(x, targets)
        recompute = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
        chunks = zip(x.split(n), targets.split(n), strict=True)
        return torch.cat([checkpoint(function, *chunk, **recompute) for chunk in chunks])

    def check_tokens(self, tokens: Tensor, other: Tensor) -> None:
        """Raise ValueError if tokens or what comes with them (orders, masks) do not fit."""
        if tokens.shape != other.shape or tokens.dim() != 2:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} and {tuple(other.shape)} must both be "
                "(batch, length)"
            )
        T, limit, V = tokens.shape[1], self.config.block_size, self.config.vocab_size
        if not 1 <= T <= limit:
            raise ValueError(f"{T} tokens a sequence; this model takes 1 to {limit}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= V:
            raise ValueError(f"tokens run from {low} to {high}; this model knows 0 to {V - 1}")

    def num_params(self) -> dict[str, int]:
        """Parameter counts: embeddings, blocks, conditioning (target positions, adaLN) and head."""
        counts = dict.fromkeys(("embeddings", "blocks", "conditioning", "head"), 0)
        for name, p in self.named_parameters():
            # First what conditions: some of it lies inside the blocks, some before the head.
            if "wtpe" in name or "adaln" in name or name.startswith(("query", "noise")):
                counts["conditioning"] += p.numel()
            elif name.startswith(("wte", "wpe", "start")):
                counts["embeddings"] += p.numel()
            else:
                counts["blocks" if name.startswith("blocks") else "head"] += p.numel()
        return counts

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward per token: 6 per weight of a matrix
        that every token passes, plus 12 n_layer n_embd length for attention (PaLM, appendix B).
        A second stream has all of it again but keys and values. adaLN is left out: it runs per
        position."""
        c = self.config
        streams, of_block = (2, 22) if c.target == "two_stream" else (1, 12)
        matrices = of_block * c.n_layer * c.n_embd**2 + c.n_embd * c.vocab_size
        return 6 * matrices + streams * 12 * c.n_layer * c.n_embd * length


# ---- the decoder ---------------------------------------------------------------------------------


@dataclass
class ParallelPass:
    """The steps that one parallel pass (`AOGPT.parallel_hidden`) computes: of every row `count`
    steps from `cached` on.

    Tensors live on the device; the three numbers are known on the host and fix the shapes of the
    pass. They may be larger than needed, so that passes of many sizes share a few shapes.
    """

    cached: Tensor
    """(B,) inputs that the cache holds."""
    known: Tensor
    """(B,) tokens that are known, >= cached. Steps from `known` on predict the others."""
    count: Tensor
    """(B,) steps computed; 0 for a row that is finished."""
    items: int
    """N >= count.sum()."""
    width: int
    """W >= count.max()."""
    length: int
    """Cache slots that are read, >= (cached + count).max()."""
    grouped: bool = False
    """Of two_stream: what is known but not cached is one group, unless nothing is cached at all,
    and its inputs see all of it, as in training with groups."""


class AOGPT(Transformer):
    """A decoder of log p(x | order) under any order of prediction (the paper, section 3).

    AOGPT(config) of an encoder's configuration (attention "full") is an `Encoder`.
    """

    def __new__(cls, config: ModelConfig | None = None):
        if config is not None and config.is_encoder:  # copy.deepcopy gives no config
            return Encoder(config)
        return super().__new__(cls)

    def make_inputs(self) -> None:
        c = self.config
        # Row 0 is the position of [None].
        self.wpe = nn.Embedding(c.block_size + 1, c.n_embd) if c.has_position_table else None
        self.start = nn.Parameter(torch.empty(c.n_embd))
        self.query = nn.Parameter(torch.empty(c.n_embd)) if c.target == "two_stream" else None
        width = {"adaln": c.cond_dim, "input": c.n_embd, "shared": c.n_embd}.get(c.target)
        self.wtpe = nn.Embedding(c.block_size, width) if width else None

    # The training pass: all T predictions of a known sequence at once.

    def forward(self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None) -> Tensor:
        """-log p(x[order[b, i]] | x[order[b, :i]]); differentiable.

        Args:
            tokens: LongTensor (B, T), T <= block_size, in sequence order.
            order: LongTensor (B, T), every row a permutation of 0..T-1.
            group_start: see `hidden`.

        Returns: (B, T), nats, in prediction order.
        """
        # tokens.gather(1, order), but as a scatter, which torch.compile does once and keeps. A
        # gather it would do again for every logit, inside the backward pass of the head.
        ordered = torch.empty_like(tokens).scatter_(1, inverse_permutation(order), tokens)
        return self.head_nll(self.hidden(tokens, order, group_start), ordered)

    def hidden(self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, D) of the training pass; state i predicts order[:, i].

        group_start: LongTensor (B, T), two_stream only: step i is predicted from the tokens of
            steps < group_start[:, i]. None: groups of one.
        """
        if group_start is not None and self.config.target != "two_stream":
            raise ValueError("groups in training need model.target = 'two_stream'")
        T = order.shape[1]
        # The table at the top of this file: the inputs are the tokens of the order, one step late.
        shifted = order[:, :-1]
        in_tokens = F.pad(tokens.gather(1, shifted), (1, 0))  # its first column stands for [None]
        in_positions = F.pad(shifted + 1, (1, 0))
        inverse = inverse_permutation(order)  # for the gradient of what is looked up by target
        mask = query_mask = AttentionMask(causal=True, hide_start=self.config.start == "hidden")
        if group_start is not None:
            mask, query_mask = self._group_masks(group_start)

        def rows_of_targets(table: Tensor, parts: int = 1) -> tuple[Tensor, ...]:
            # Part by part: the gradients of all parts would be copied into one tensor first.
            return tuple(
                PermutationGather.apply(part[:T], order, inverse) for part in cut(table, parts)
            )

        return self._trunk(
            self._embed(in_tokens, in_positions),
            in_positions,
            targets=order,
            rows_of_targets=rows_of_targets,
            condition=self._condition(),
            mask=mask,
            query_mask=query_mask,
        )

    def _group_masks(self, group_start: Tensor) -> tuple[AttentionMask, AttentionMask]:
        """What inputs and queries of two_stream see in groups (A3); group_start: see `hidden`.

        An input sees all groups up to its own, and of its own the tokens after it, too; a query
        sees the groups before its own. So nothing depends on the order inside a group. Example: two
        groups of two, group_start 0 0 2 2. Input i holds the token of step i - 1:

            input, step   input holds   the input sees   the query sees
            0             [None]        0                0
            1             group 1       0 1 2            0
            2             group 1       0 1 2            0 1 2
            3             group 2       0 1 2 3          0 1 2      (input 4 would hold step 3's)

        Without group_attention input 1 sees 0 1.
        """
        inputs = torch.arange(group_start.shape[1], device=group_start.device)
        group = F.pad(group_start[:, :-1], (1, 0), value=-1)  # of an input's token, by its start
        if not self.config.group_attention:
            group = inputs.expand_as(group)
        seen = group.unsqueeze(1) <= group.unsqueeze(2)
        asked = inputs <= group_start.unsqueeze(2)
        return self._masks(seen, asked, inputs[:, None], group_start.unsqueeze(2))

    def _masks(
        self, seen: Tensor, asked: Tensor, slots: Tensor, last: Tensor
    ) -> tuple[AttentionMask, AttentionMask]:
        """Attention masks of the inputs in `slots`, which see (..., keys) `seen`, and of queries
        that see `asked`, up to the inputs `last`. With a hidden start only what has nothing else
        to see sees it."""
        if self.config.start == "hidden":
            later = torch.arange(seen.shape[-1], device=seen.device) > 0
            seen, asked = seen & (later | (slots == 0)), asked & (later | (last == 0))
        return AttentionMask(allowed=seen.unsqueeze(1)), AttentionMask(allowed=asked.unsqueeze(1))

    def _embed(self, in_tokens: Tensor, in_positions: Tensor) -> Tensor:
        """Inputs, one vector a token: at position 0 it is [None], whatever the token."""
        x = self.wte(in_tokens)
        x = torch.where((in_positions == 0).unsqueeze(-1), self.start.to(x.dtype), x)
        return x if self.wpe is None else x + self.wpe(in_positions)

    def _rotation(
        self, in_positions: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Rotation | None:
        if not self.config.rotates:
            return None
        # Positions of inputs count [None] as 0, so the target's, on the same scale, is one more.
        own, target = self.angles_at(in_positions, dtype), self.angles_at(targets + 1, dtype)
        match self.config.target:
            case "none":  # a plain GPT is not told its target
                return Rotation(keys=own, queries=own)
            case "two_stream":
                return Rotation(keys=own, queries=own, second_stream=target)
            case _:
                return Rotation(keys=own, queries=target)

    def _trunk(
        self,
        x,
        in_positions,
        *,
        targets,
        rows_of_targets,
        condition,
        mask,
        query_mask,
        modulations=None,
        caches=None,
    ) -> Tensor:
        """Run the blocks and the final norm.

        Args:
            x: embedded inputs (B, T, D), or the items (N, D) of a parallel pass.
            in_positions: their positions, (B, T) or (N,), of 0 to block_size.
            targets: their target positions, of the same shape.
            rows_of_targets, condition: see `Block`.
            mask: what they see; query_mask: and what the query stream sees, in two_stream.
            modulations: as `modulations` gives them, where they are computed already; the last is
                that of the final norm.
            caches: of a parallel pass, a `LayerCache` for each block.
        """
        variant = self.config.target
        modulations = modulations or [None] * (len(self.blocks) + 1)
        rotation = self._rotation(in_positions, targets, x.dtype)
        queries = self._queries(targets) if variant == "two_stream" else None
        added = rows_of_targets(self.wtpe.weight)[0] if variant in ("input", "shared") else None
        x, first = self.drop(x + added if variant == "input" else x), None
        for i, block in enumerate(self.blocks):
            more = rotation, caches[i] if caches else None, first
            if variant == "two_stream":
                x, queries, values = block(x, queries, mask, query_mask, *more)
            else:
                x = x + added if variant == "shared" else x
                x, values = block(x, mask, rows_of_targets, condition, modulations[i], *more)
            first = values if first is None else first
        if variant == "two_stream":
            x = queries  # predictions come from the query stream
        return self.final_norm(x, rows_of_targets, condition, modulations[-1])

    def _queries(self, targets: Tensor) -> Tensor:
        """What the query stream starts from, (..., D): the same vector everywhere and, where there
        is a table of positions, its row of the target."""
        if self.wpe is None:
            return self.query.expand(*targets.shape, -1)
        return self.query + self.wpe(targets + 1)  # the table counts [None], hence the + 1

    def _condition(self) -> Tensor | None:
        """What adaLN is computed from, (block_size, cond_dim). None without adaLN."""
        return F.silu(self.wtpe.weight) if self.config.target == "adaln" else None

    def modulations(self) -> list[Tensor]:
        """The outputs of adaLN for all target positions, which generation computes once for all
        its passes: of each block, (block_size, 6 D), and last of the final norm, (block_size, 2 D).
        Empty without adaLN."""
        condition = self._condition()
        if condition is None:
            return []
        return [*(block.adaln(condition) for block in self.blocks), self.adaln_f(condition)]

    # Scoring of known sequences.

    @torch.no_grad()
    def token_log_probs(
        self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None
    ) -> Tensor:
        """log p(x[order[b, i]] | x[order[b, :i]]), (B, T) in prediction order, natural logarithm.

        group_start: see `hidden`; then given the tokens of the groups before its own.

        Raises ValueError if the shapes differ, T exceeds block_size, a token is not in the
        vocabulary or a row of `order` is not a permutation.
        """
        self.check_tokens(tokens, order)
        check_permutations(order)
        return -self(tokens, order, group_start)

    @torch.no_grad()
    def group_log_probs(
        self, tokens: Tensor, order: Tensor, group: int, given: Tensor | None = None
    ) -> Tensor:
        """As `token_log_probs`, but the steps of a group of `group` are predicted at once, from the
        groups before it alone: what decoding in such groups draws from. A pass for each group; of
        two_stream, which is trained so, one for all.

        given: LongTensor (B,), the steps of each row that are given, before its first group; the
            result means nothing there. None: none.

        Raises ValueError as `token_log_probs`, and of a model that is not told its target.
        """
        if group == 1:
            return self.token_log_probs(tokens, order)
        if self.config.l2r_only:
            raise ValueError("this model is not told its target and predicts one token at a time")
        if self.config.target == "two_stream":
            return self.token_log_probs(tokens, order, group_starts(order, group, given))
        self.check_tokens(tokens, order)
        check_permutations(order)
        result = torch.zeros(order.shape, device=order.device, dtype=self.wte.weight.dtype)
        for known, steps in groups_of(order, group, given):
            log_probs = self.parallel_log_probs(tokens, order, known)
            result = log_probs.where(steps, result.to(log_probs.dtype))
        return result

    def masked_log_probs(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """log p(true token | all unmasked tokens) at every masked position, in one pass.

        The unmasked positions, in ascending order, are the context; every masked position is
        predicted from them and from nothing else (`parallel_log_probs`).

        Args:
            tokens: LongTensor (B, T), in sequence order.
            masked: BoolTensor (B, T).

        Returns: float tensor (B, T) in sequence order, natural logarithm; 0 at unmasked positions.
        """
        self.check_tokens(tokens, masked)
        order = masked.to(torch.uint8).argsort(dim=1, stable=True)
        log_probs = self.parallel_log_probs(tokens, order, known=(~masked).sum(1))
        return torch.zeros_like(log_probs).scatter_(1, order, log_probs)

    @torch.no_grad()
    def parallel_log_probs(self, tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
        """log p(x[order[b, r]] | x[order[b, :known[b]]]) for every step r >= known[b], in one pass.

        The first `known` positions of the order, as listed, are the context. Every other position
        is predicted from them and from nothing else (the parallel mask of `parallel_hidden`).

        Args:
            tokens: LongTensor (B, T), in sequence order.
            order: LongTensor (B, T), permutations of the positions.
            known: LongTensor (B,), 0 to T.

        Returns: float tensor (B, T) in prediction order, natural logarithm; 0 at steps < known.
        """
        ordered = tokens.gather(1, order)
        B, T = tokens.shape
        cached, count = torch.zeros_like(known), torch.full_like(known, T)
        steps = ParallelPass(cached, known, count, items=B * T, width=T, length=T)
        x = self.parallel_hidden(ordered, order, steps)
        log_probs = -self.head_nll(x.view(B, T, -1), ordered)
        predicted = torch.arange(T, device=order.device) >= known[:, None]
        return log_probs.where(predicted, torch.zeros_like(log_probs))

    # The cached parallel pass: many targets that see the same context.

    def parallel_hidden(
        self,
        ordered: Tensor,
        order: Tensor,
        this_pass: ParallelPass,
        cache: KVCache | None = None,
        modulations: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute the steps that the cache does not hold, and many targets from one context.

        An item is one step i of one row. It predicts position order[i], and its key and value go
        to cache slot i. The inputs 0 to `known` exist, as input i holds the token of step i - 1:
        those steps are computed as in training. Step `known`, the last of them, is also the first
        whose token is wanted. Every later step takes a copy of that step's input, the last known
        token, with a target of its own; it sees the inputs before that one and itself, never
        another copy. So each is predicted as in training under the order (known tokens, target).

        Example: T = 6 and the order is 4 1 5 0 2 3. The tokens of positions 4, 1 and 5 are known;
        those of 0 and 2 are wanted next, both at once. Nothing is cached yet, so steps 0 to 4 are
        computed (cached = 0, known = 3, count = 5):

            step, slot   input token   at position   predicts   sees slots
            0            [None]        0             4          0
            1            x4            5             1          0 1
            2            x1            2             5          0 1 2
            3            x5            6             0          0 1 2 3     first target
            4            x5            6             2          0 1 2   4   second: a copy of it

        Slots 0 to 3 hold true inputs and stay. Slot 4 holds a copy of input 3; input 4, the token
        x0, did not exist yet. Once x0 and x2 are drawn, the next pass computes it, and with it the
        last target (cached = 4, known = 5, count = 2):

            4            x0            1             2          0 1 2 3 4
            5            x2            3             3          0 1 2 3 4 5

        Pure tensor code without a wait for the device: its shapes depend on the host numbers of
        `this_pass` alone, so that it can be compiled and captured in a CUDA graph.

        Args:
            ordered, order: (B, T) tokens and positions in prediction order; tokens from `known` on
                are ignored.
            this_pass: which steps of which rows.
            cache: of at least T slots; None: nothing is cached before or after this pass.
            modulations: of `AOGPT.modulations`, to compute them once for many calls. None: adaLN is
                computed in this pass, of all positions or, if it has fewer items, of those.

        Returns: (N, D) final hidden states, rows one after the other; the item of step i predicts
            position order[i].
        """
        B, T = order.shape
        if cache is None:
            autocast, device = torch.is_autocast_enabled(order.device.type), order.device
            dtype = torch.get_autocast_dtype(device.type) if autocast else self.wte.weight.dtype
            cache = KVCache(self.config, B, T, device, dtype, shared=True)
        layout = ItemLayout.of(this_pass, cache.unused_slot)
        row, slot = layout.row, layout.slot
        # The input that an item is, or is a copy of, and the step whose token that input holds.
        source = torch.minimum(slot, this_pass.known[row])
        before = (source - 1).clamp(min=0)
        in_positions = torch.where(source == 0, 0, order[row, before] + 1)
        targets = order[row, slot.clamp(max=T - 1)]  # items too many have the unused slot, >= T
        condition, rows_of_targets = None, lambda table, parts=1: cut(table[targets], parts)
        if modulations is None:
            condition = self._condition()
            if condition is not None and len(targets) < len(condition):
                condition, rows_of_targets = condition[targets], cut  # few rows are wanted
        mask, query_mask = self._parallel_masks(this_pass, kernel=cache.kernel is not None)
        return self._trunk(
            self._embed(ordered[row, before], in_positions),
            in_positions,
            targets=targets,
            rows_of_targets=rows_of_targets,
            condition=condition,
            mask=mask,
            query_mask=query_mask,
            modulations=modulations,
            caches=cache.layers(layout, this_pass),
        )

    def _parallel_masks(
        self, this_pass: ParallelPass, kernel: bool
    ) -> tuple[AttentionMask, AttentionMask]:
        """What the items of a parallel pass see of the first cache slots, (B, 1, W, length), and
        what the query stream sees."""
        if kernel:  # two_stream has none
            mask = AttentionMask(hide_start=self.config.start == "hidden")
            return mask, mask
        cached, known = (v.view(-1, 1, 1) for v in (this_pass.cached, this_pass.known))
        columns = torch.arange(this_pass.width, device=cached.device)
        slots = cached + columns[:, None]  # (B, W, 1)
        source = torch.minimum(slots, known)  # as in `parallel_hidden`
        keys = torch.arange(this_pass.length, device=cached.device)
        seen = (keys < source) | (keys == slots)  # what came before, and itself: no other copy
        if this_pass.grouped and self.config.target == "two_stream" and self.config.group_attention:
            seen |= (cached > 0) & (slots <= known) & (keys <= known)
        # A query of two_stream has no key of its own. It reads the true inputs, 0 to `source`.
        return self._masks(seen, keys <= source, slots, source)


def ragged(counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows of different lengths one after the other: row and column of `total` items, and
    whether they are valid. For counts 3 and 1 and a total of 5:

        row      0     0     0     1     1
        column   0     1     2     0     0
        valid    True  True  True  True  False    items past the last row

    counts: LongTensor (B,), items of each row. total: a host number >= counts.sum(), so that
    nothing waits for the device.
    """
    ends = counts.cumsum(0)
    starts = ends - counts
    item = torch.arange(total, device=counts.device)
    row = torch.searchsorted(ends, item, right=True).clamp(max=len(counts) - 1)
    valid = item < ends[-1]
    return row, (item - starts[row]) * valid, valid


@dataclass
class ItemLayout:
    """Where the N items of a parallel pass lie in the cache and in a (B, W) rectangle of queries.

    Linear layers take the items one after the other, so that short rows cost nothing; attention
    takes the rectangle.
    """

    row: Tensor
    """(N,) the row of each item in the rectangle."""
    column: Tensor
    """(N,) its column."""
    slot: Tensor
    """(N,) its cache slot; items too many (N is >= the steps computed) have the unused one."""
    item_of_cell: Tensor
    """(B, W) the item of each cell of the rectangle. A cell past the end of its row repeats some
    other item, and its result is not read."""
    length: int
    """Cache slots that are read."""

    @classmethod
    def of(cls, this_pass: ParallelPass, unused_slot: int) -> ItemLayout:
        count, items = this_pass.count, this_pass.items
        row, column, valid = ragged(count, items)
        slot = torch.where(valid, this_pass.cached[row] + column, unused_slot)
        starts = count.cumsum(0) - count
        columns = torch.arange(this_pass.width, device=count.device)
        item_of_cell = (starts[:, None] + columns).clamp(max=items - 1)
        return cls(row, column, slot, item_of_cell, this_pass.length)

    def to_grid(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, W, ...)."""
        return x[self.item_of_cell]

    def to_items(self, x: Tensor) -> Tensor:
        """(B, W, ...) -> (N, ...)."""
        return x[self.row, self.column]


class KVCache:
    """Keys and values, allocated once: of every layer a tensor (B, C = length + 1, H, D/H) each.

    Slot i belongs to step i of a sequence; the last slot takes what nobody reads. shared: for a
    single pass that leaves nothing behind, all layers share the space of one, each overwriting what
    the one before wrote.

    Layers are tensors of their own because compiled code cannot write into a part of a tensor in
    place: it would copy all of it, in every layer of every step.
    """

    def __init__(
        self, config: ModelConfig, batch_size, length, device=None, dtype=None, shared=False
    ):
        self.n_layer, self.unused_slot = config.n_layer, length
        layers = range(1 if shared else self.n_layer)
        shape = (batch_size, length + 1, config.n_head, config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.kernel: Callable | None = None
        """What reads the cache without a mask: `sampling.kernels.attend_cached`. It does not know
        what two_stream needs."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def layers(self, layout: ItemLayout, this_pass: ParallelPass) -> list[LayerCache]:
        """What each block is given in a pass of this layout."""
        layers = [
            LayerCache(k, v, layout, this_pass, self.kernel)
            for k, v in zip(self.keys, self.values, strict=True)
        ]
        return layers * (self.n_layer // len(layers))


@dataclass
class LayerCache:
    """The cache of one layer, (B, C, H, D/H), in one parallel pass."""

    keys: Tensor
    values: Tensor
    layout: ItemLayout
    this_pass: ParallelPass
    kernel: Callable | None

    def attend(self, q: Tensor, mask: AttentionMask) -> Tensor:
        """Attention of the items (N, H, D/H) by the kernel; of the same shape."""
        p = self.this_pass
        rows = p.cached, p.known, p.count
        q = q.to(self.keys.dtype)
        return self.kernel(q, self.keys, self.values, *rows, p.width, mask.hide_start)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the (N, H, D/H) keys and values of this pass; return all (B, length, H, D/H)."""
        row, slot, length = self.layout.row, self.layout.slot, self.layout.length
        self.keys[row, slot] = k.to(self.keys.dtype)
        self.values[row, slot] = v.to(self.values.dtype)
        return self.keys[:, :length], self.values[:, :length]


# ---- the encoder ---------------------------------------------------------------------------------


class Encoder(Transformer):
    """Full attention over a partly masked sequence, which predicts the masked tokens: the masked
    diffusion models that the paper compares with (RADD, SEDD)."""

    def make_inputs(self) -> None:
        c = self.config
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.has_position_table else None
        self.noise = NoiseEmbedding(c.cond_dim) if c.noise else None

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor,
        sigma: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """-log p(true token | unmasked tokens) at masked positions; differentiable.

        Args:
            tokens: LongTensor (B, T), T <= block_size, in sequence order.
            masked: BoolTensor (B, T).
            sigma: (B,) noise levels, for a model with noise.
            lengths: (B,) of rows that are shorter than T.

        Returns: (B, T), nats, in sequence order; 0 at unmasked positions. With noise, whose outputs
            are scores, (2, B, T): see `head_nll`.
        """
        x = self.hidden(torch.where(masked, self.config.mask_token, tokens), sigma, lengths)
        nll = self.head_nll(x, tokens)
        return nll if self.config.noise else nll * masked

    def hidden(
        self, tokens: Tensor, sigma: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (B, T, D); tokens (B, T) with [MASK] in place; sigma (B,) with noise;
        lengths (B,): of rows that are shorter than T, whose padding no position sees."""
        T, c = tokens.shape[1], self.config
        x, mask, rotation, condition = self.wte(tokens), AttentionMask(), None, None
        if lengths is not None:
            real = torch.arange(T, device=x.device) < lengths[:, None]
            mask = AttentionMask(allowed=real[:, None, None])
        if c.rotates:
            angles = self.angles_at(torch.arange(T, device=x.device), x.dtype)
            rotation = Rotation(keys=angles, queries=angles)
        if c.has_position_table:
            x = x + self.wpe.weight[:T]
        if c.noise:
            condition = F.silu(self.noise(sigma)).unsqueeze(1)  # (B, 1, cond_dim)

        x, first = self.drop(x), None
        for block in self.blocks:
            settings = {"rotation": rotation, "first_values": first}
            # One modulation for a whole sequence, (B, 1, 6 D), serves all its positions.
            x, values = block(x, mask, cut, condition, **settings)
            first = values if first is None else first
        return self.final_norm(x, cut, condition)

    def logits(self, x: Tensor, float32: bool = False) -> Tensor:
        """As in `Transformer`, but (..., mask_token): the tokens end at [MASK]."""
        return super().logits(x, float32)[..., : self.config.mask_token]

    def head_nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Without noise as in `Transformer`, (B, T). With noise two numbers of each token, of
        which score entropy is made, (2, B, T): the log of the summed exponentials of the output,
        and the output of the true token."""
        if not self.config.noise:
            return super().head_nll(x, targets)
        pairs = self.head_in_chunks(self._normaliser_and_output, x, targets)  # (B T, 2)
        return pairs.T.reshape(2, *targets.shape)

    def _normaliser_and_output(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        output = logits.gather(1, targets[:, None]).squeeze(1)
        return torch.stack([logits.logsumexp(dim=-1), output], dim=1)

    @torch.no_grad()
    def masked_log_probs(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """log p(true token | all unmasked tokens) at every masked position, in one pass; arguments
        and result as those of `AOGPT.masked_log_probs`. With noise, its level is that of the time
        that equals the share of masked tokens. lengths: (B,) of rows that are shorter than T."""
        self.check_tokens(tokens, masked)
        if not self.config.noise:
            return -self(tokens, masked, lengths=lengths)
        normaliser, output = self(tokens, masked, self._noise_of(masked, lengths), lengths)
        return (output - normaliser) * masked

    @torch.no_grad()
    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """log p(x[order[b, i]] | x[order[b, :i]]), arguments and result as those of
        `AOGPT.token_log_probs`. What is left is masked, so that every step is a pass of its own: T
        passes of T tokens, where a decoder needs one."""
        return self.group_log_probs(tokens, order, group=1)

    def _noise_of(self, masked: Tensor, lengths: Tensor | None) -> Tensor:
        """Of the share of masked tokens of each row, (B,)."""
        total = masked.shape[1] if lengths is None else lengths
        return log_linear_noise(masked.double().sum(1) / total)

    @torch.no_grad()
    def group_log_probs(
        self,
        tokens: Tensor,
        order: Tensor,
        group: int,
        given: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """As `AOGPT.group_log_probs`, a pass for each group. lengths: (B,) of rows that are shorter
        than T; their orders end with the positions that they do not have."""
        self.check_tokens(tokens, order)
        check_permutations(order)
        step_of = inverse_permutation(order)
        result = torch.zeros(order.shape, device=order.device, dtype=self.wte.weight.dtype)
        for known, steps in groups_of(order, group, given):
            masked = step_of >= known[:, None]
            if lengths is not None:
                masked &= step_of < lengths[:, None]
            inputs = torch.where(masked, self.config.mask_token, tokens)
            sigma = self._noise_of(masked, lengths) if self.config.noise else None
            row, step = steps.nonzero(as_tuple=True)
            targets = order[row, step]
            logits = self.logits(self.hidden(inputs, sigma, lengths)[row, targets], float32=True)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_probs = logits.log_softmax(-1).gather(1, tokens[row, targets, None])
            result = result.to(log_probs.dtype)
            result[row, step] = log_probs.squeeze(1)
        return result


class NoiseEmbedding(nn.Module):
    """Vector (B, dim) of a noise level (B,): 256 cosines and sines, then an MLP (SEDD)."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc, self.proj = nn.Linear(256, dim), nn.Linear(dim, dim)

    def forward(self, sigma: Tensor) -> Tensor:
        frequency = 10000.0 ** (-torch.arange(128, device=sigma.device, dtype=torch.float64) / 128)
        angle = sigma.double()[:, None] * frequency
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.fc.weight.dtype)
        return self.proj(F.silu(self.fc(waves)))


def check_permutations(order: Tensor) -> None:
    """Raise ValueError if a row of (B, T) is no permutation of 0..T-1."""
    steps = torch.arange(order.shape[1], device=order.device).expand_as(order)
    if not torch.equal(order.sort(dim=1).values, steps):
        raise ValueError(f"every row of order must be a permutation of 0..{order.shape[1] - 1}")


def group_starts(order: Tensor, group: int, given: Tensor | None = None) -> Tensor:
    """The first step of every step's group of `group`, of the shape of `order`, (B, T). given:
    (B,), steps of each row that are given, before its first group; they are groups of one, as where
    a text is continued."""
    steps = torch.arange(order.shape[1], device=order.device)
    if given is None:
        return (steps - steps % group).expand_as(order)
    past = steps - given[:, None]  # steps since the first group began
    return torch.where(past < 0, steps, steps - past % group)


def groups_of(
    order: Tensor, group: int, given: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each group of `group` steps, one after the other, where it begins in each row, LongTensor
    (B,), and its steps, BoolTensor (B, T). Arguments as of `group_starts`."""
    B, T = order.shape
    if given is None:
        given = torch.zeros(B, dtype=torch.long, device=order.device)
    steps = torch.arange(T, device=order.device)
    for start in range(0, T - int(given.min()), group):
        known = (given + start).clamp(max=T)
        yield known, (steps >= known[:, None]) & (steps < known[:, None] + group)


def log_linear_noise(t: Tensor, eps: float = 1e-3) -> Tensor:
    """Noise level sigma(t) = -log(1 - (1 - eps) t) at which a token is masked with probability
    (1 - eps) t (SEDD)."""
    return -torch.log1p(-(1 - eps) * t)


# ---- waves ---------------------------------------------------------------------------------------


def rotary_angles(positions: int, head_dim: int, device=None) -> Tensor:
    """Cosines and sines of the angles of each position, float64 (positions, 2, D/H / 2)."""
    exact = {"device": device, "dtype": torch.float64}
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
    angle = torch.arange(positions, **exact)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of the vectors x, (..., H, D/H), by the angles
    whose cosines and sines are given, (..., 1, D/H / 2): coordinate i turns with i + D/H / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """(rows, dim) sines and cosines of wavelengths from 2 pi to pi * rows, in geometric steps."""
    frequency = (2 / rows) ** torch.linspace(0, 1, (dim + 1) // 2)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]
    return waves * (std / waves.std())
