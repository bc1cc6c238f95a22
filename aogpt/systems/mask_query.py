"""Queries that are a [MASK] at the target: the idea of Eso-LM (B), arXiv 2506.01928.

Two kinds of inputs run through the same blocks, T of each for a sequence of T tokens.
Content i holds the token of step i at its own position. Query i is the embedding of
[MASK], a learned vector, at the same position, and predicts that token. For the order
2 0 3 1:

    step i                0         1           2            3
    content i: token      x2        x0          x3           x1
    query i: token        [MASK]    [MASK]      [MASK]       [MASK]
    position of both      2         0           3            1
    content i sees        c0        c0 c1       c0 c1 c2     c0 c1 c2 c3
    query i sees          q0        c0 q1       c0 c1 q2     c0 c1 c2 q3

There is neither [None] nor a shift by one, and nothing else conditions a step on its
target. In two streams (XLNet, A3) a query has no key of its own."""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import Block, ModelConfig, Pass, Transformer, attention
from .parameters import block_matrices
from .queries import QueryDecoder

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class MaskQueryPass(Pass):
    """A pass of T contents, followed by their T queries."""

    def __init__(
        self, model: Transformer, positions: Tensor, known: Tensor | None = None
    ):
        """Make a pass. positions (B, 2 T): of contents and queries. known: LongTensor
        (B, T), the number of contents that each query sees; None: query i sees the i
        contents before it."""
        super().__init__(model, positions)
        self.known = known

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of attention, (B, 2 T, D), for q, k and v
        (B, 2 T, H, D/H)."""
        T = q.shape[1] // 2
        contents = attention(
            q[:, :T], k[:, :T], v[:, :T], causal=True, dropout=self.dropout
        )
        queries = self.attend_queries(q, k, v)
        return torch.cat([contents, queries], dim=1)

    def attend_queries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of the queries alone, (B, T, D), for q, k and v
        (B, 2 T, H, D/H)."""
        if self.known is None and not self.dropout and q.device.type == "cpu":
            return merged_attention(q, k, v)
        T = q.shape[1] // 2
        mask = self.query_mask(T, q.device)
        return attention(q[:, T:], k, v, mask=mask, dropout=self.dropout)

    def queries_of(self, x: Tensor) -> Tensor:
        """Return the queries (B, T, D) among inputs x (B, 2 T, D)."""
        T = x.shape[1] // 2
        return x[:, T:]

    def query_mask(self, T: int, device: torch.device) -> Tensor:
        """Return which contents and queries each query sees: bool
        (B or 1, 1, T, 2 T)."""
        steps = torch.arange(T, device=device)
        known = self.known
        if known is None:
            known = steps.unsqueeze(0)  # (1, T)
        contents = steps < known.unsqueeze(2)  # (B or 1, T, T)
        itself = steps == steps.unsqueeze(1)
        mask = torch.cat([contents, itself.expand_as(contents)], dim=2)
        return mask.unsqueeze(1)


def merged_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of attention of T queries, (B, T, D), over the contents before
    them and themselves, without a mask.

    q (B, 2 T, H, D/H): contents, then queries; k and v have H heads or a divisor of
    H."""
    T = q.shape[1] // 2
    groups = q.shape[2] // k.shape[2]
    if groups > 1:  # each head of keys and values serves several of queries
        k = k.repeat_interleave(groups, dim=2)
        v = v.repeat_interleave(groups, dim=2)
    q = q.to(v.dtype).transpose(1, 2)  # (B, H, 2 T, D/H)
    k = k.to(v.dtype).transpose(1, 2)
    v = v.transpose(1, 2)
    own_k = k[:, :, T:]
    own_v = v[:, :, T:]
    if T == 1:  # there is no content to see
        y = own_v
    else:
        # The last content is seen by no query.
        content_k = k[:, :, : T - 1]
        content_v = v[:, :, : T - 1]
        y = MergedAttention.apply(q[:, :, T:], content_k, content_v, own_k, own_v)
    return y.transpose(1, 2).flatten(2)


class MergedAttention(torch.autograd.Function):
    """The attention of query i over the contents 0 .. i - 1 and its own key.
    A training step with a mask instead takes 1.00 to 1.03 times as long for sequences
    of 64 and 128 tokens, 1.08 for 256 and 1.38 for 1,024 (one CPU core).

    Query i + 1 over contents 0 .. i is ordinary causal attention, so flash attention
    computes it. Its result is merged with the value of the query's own key, by the
    logarithms of the sums of exponentials of both. The backward pass of flash attention
    needs only the merged output and logarithm to give the gradients of contents (as in
    ring attention, arXiv 2310.01889)."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor
    ) -> Tensor:
        """Return the output (B, H, T, D/H) for q, own_k and own_v (B, H, T, D/H), and
        k and v (B, H, T - 1, D/H)."""
        own_score = (q * own_k).sum(-1) / math.sqrt(q.shape[-1])  # (B, H, T)
        # Query 0 sees itself alone. The rest is of the queries after it.
        later_q = q[:, :, 1:]
        later_own_v = own_v[:, :, 1:]
        later_score = own_score[:, :, 1:]
        dropout = 0.0
        is_causal = True
        read, log_sum = FLASH(later_q, k, v, dropout, is_causal)
        merged_log_sum = torch.logaddexp(later_score.to(log_sum.dtype), log_sum)
        own_share = (later_score - merged_log_sum).exp().unsqueeze(-1)
        merged = torch.lerp(read, later_own_v, own_share.to(read.dtype))
        ctx.save_for_backward(q, k, v, own_k, own_v, merged, merged_log_sum, own_share)
        return torch.cat([own_v[:, :, :1], merged], dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Return the gradients of the five inputs for that of the output."""
        q, k, v, own_k, own_v, merged, merged_log_sum, own_share = ctx.saved_tensors
        later_grad = grad[:, :, 1:]
        later_q = q[:, :, 1:]
        later_own_k = own_k[:, :, 1:]
        later_own_v = own_v[:, :, 1:]
        dropout = 0.0
        is_causal = True
        grad_q, grad_k, grad_v = FLASH_BACKWARD(
            later_grad, later_q, k, v, merged, merged_log_sum, dropout, is_causal
        )
        # The softmax's gradient at the own score: p (dL/dp - sum of p dL/dp over all
        # keys).
        grad_share = later_grad * (later_own_v - merged)
        grad_score = own_share * grad_share.sum(-1, keepdim=True)
        grad_score = grad_score.to(q.dtype) / math.sqrt(q.shape[-1])
        grad_q = grad_q + grad_score * later_own_k
        grad_own_k = grad_score * later_q
        grad_own_v = own_share.to(grad.dtype) * later_grad
        before = (0, 0, 1, 0)  # query 0: its output is its own value
        return (
            F.pad(grad_q, before),
            grad_k,
            grad_v,
            F.pad(grad_own_k, before),
            torch.cat([grad[:, :, :1], grad_own_v], dim=2),
        )


class MaskQueryBlock(Block):
    """A `Block`; the last one computes the output of the queries alone."""

    is_last = False

    def forward(
        self, x: Tensor, p: Pass, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x (B, 2 T, D) after this block, from the last block its queries (B, T,
        D) alone, and the block's values. A cached pass, which has another number of
        inputs, is computed whole."""
        if not (isinstance(p, MaskQueryPass) and self.is_last):
            return super().forward(x, p, first_values)
        normed = self.norm1(x)
        q, k, v, values = self.attn.heads(normed, p, first_values)
        y = self.attn.proj(p.attend_queries(q, k, v))
        queries = p.queries_of(x) + self.drop(y)
        y = self.mlp(self.norm2(queries))
        return queries + self.drop(y), values


class MaskQuery(QueryDecoder):
    """A decoder whose queries are a [MASK] at their targets; `query` is its
    embedding."""

    mask_queries = True
    has_start = False

    def __init__(self, config: ModelConfig):
        super().__init__(config, MaskQueryBlock)
        last = cast(MaskQueryBlock, self.blocks[-1])
        last.is_last = True  # nothing reads the contents after it

    @classmethod
    def query_weights(cls, c: ModelConfig) -> int:
        """Count the weights of the matrices that the query of a token passes: those of
        the token, too, but the last block only projects the contents."""
        matrices = block_matrices(c)
        last = matrices.queries + matrices.keys_and_values
        return (c.n_layer - 1) * matrices.all + last

    @classmethod
    def query_attentions(cls, c: ModelConfig) -> int:
        """Count the blocks in which queries attend besides the contents: all but the
        last, where the contents do not."""
        return c.n_layer - 1

    def hidden(
        self, tokens: Tensor, order: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states of the queries, (B, T, D): see
        `QueryDecoder.hidden`."""
        contents = self.wte(tokens.gather(1, order))
        queries = self.query.to(contents.dtype).expand_as(contents)
        x = torch.cat([contents, queries], dim=1)  # (B, 2 T, D)
        positions = order.repeat(1, 2)
        p = MaskQueryPass(self, positions, known)
        return self.run_blocks(self.with_positions(x, positions), p)

    def with_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return inputs (..., D) plus their rows of the table of positions, if the
        model has one."""
        if self.wpe is None:
            return x
        return x + self.wpe(positions)
