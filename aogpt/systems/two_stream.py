"""Two streams with the same weights (XLNet, A3): the content stream sees its own
tokens; the query stream knows its target position only, reads the content stream, and
predicts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import (
    Block,
    ModelConfig,
    Pass,
    Transformer,
    attention,
    rotate,
    shifted_inputs,
    without_start,
)
from .parameters import block_matrices
from .queries import QueryDecoder


class TwoStreamPass(Pass):
    """A pass in which inputs and queries see all inputs up to their own step, or those
    for which two masks (B, 1, T, T) are True."""

    def __init__(
        self,
        model: Transformer,
        positions: Tensor,
        targets: Tensor,
        allowed: Tensor | None = None,
        query_allowed: Tensor | None = None,
    ):
        super().__init__(model, positions, targets, allowed=allowed)
        self.query_allowed = query_allowed
        # An input, which predicts nothing, attends from where it stands.
        self.target_angles = self.query_angles
        self.query_angles = self.key_angles

    def attend_queries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of the queries, (B, T, D). q is the query stream's, k and v
        are the content's."""
        if self.query_allowed is None:
            return super().attend(q, k, v)
        return attention(q, k, v, mask=self.query_allowed, dropout=self.dropout)


class TwoStreamBlock(Block):
    """A `Block` for both streams, which share its layers."""

    def forward(  # type: ignore[override]
        self, x: Tensor, queries: Tensor, p: TwoStreamPass, first_values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return inputs x and queries, (B, T, D) each, after this block, and its
        values, None unless blocks mix them."""
        attn = self.attn
        normed = self.norm1(x)
        q, k, v, values = attn.heads(normed, p, first_values)
        y = attn.proj(p.attend(q, k, v))
        query_q = self.query_heads(self.norm1(queries), p)
        query_y = attn.proj(p.attend_queries(query_q, k, v))
        x = x + self.drop(y)
        queries = queries + self.drop(query_y)
        y = self.mlp(self.norm2(x))
        x = x + self.drop(y)
        query_y = self.mlp(self.norm2(queries))
        queries = queries + self.drop(query_y)
        return x, queries, values

    def query_heads(self, normed: Tensor, p: TwoStreamPass) -> Tensor:
        """Return the heads q (B, T, H, D/H) of normed queries (B, T, D). Queries have
        neither keys nor values, so they need the first rows of the projection only."""
        attn = self.attn
        rows = attn.heads_of[0] * attn.head_dim
        bias = None
        if attn.qkv.bias is not None:
            bias = attn.qkv.bias[:rows]
        q = F.linear(normed, attn.qkv.weight[:rows], bias)
        q = q.unflatten(-1, (-1, attn.head_dim))
        q = attn.q_norm(q)
        if p.target_angles is not None:
            q = rotate(q, p.target_angles)
        return q


class TwoStream(QueryDecoder):
    """A decoder whose queries are a stream of their own."""

    query_stream = True

    def __init__(self, config: ModelConfig):
        super().__init__(config, TwoStreamBlock)

    @classmethod
    def query_weights(cls, c: ModelConfig) -> int:
        """Count the weights of the matrices of all blocks that the query of a token
        passes: all but those of keys and values."""
        matrices = block_matrices(c)
        return c.n_layer * (matrices.all - matrices.keys_and_values)

    @classmethod
    def query_attentions(cls, c: ModelConfig) -> int:
        """Count the blocks in which queries attend: all."""
        return c.n_layer

    def hidden(
        self, tokens: Tensor, order: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states of the queries, (B, T, D): see
        `QueryDecoder.hidden`."""
        in_tokens, in_positions = shifted_inputs(tokens, order)
        x = self.embed(in_tokens, in_positions)
        allowed = None
        query_allowed = None
        if known is not None:
            allowed, query_allowed = self.group_masks(known)
        p = TwoStreamPass(self, in_positions, order, allowed, query_allowed)
        return self.run_blocks(x, p)

    def group_masks(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masks of inputs and of queries in groups (A3), (B, 1, T, T) each.
        Steps that know the same number of tokens, `known` (B, T), are a group.

        An input sees all groups up to its own, also the tokens of its own group after
        it; a query sees the groups before its own. So nothing depends on the order
        inside a group. Example: two groups of two, known = 0 0 2 2. Input i holds
        the token of step i - 1:

            input, step   input holds   the input sees   the query sees
            0             [None]        0                0
            1             group 1       0 1 2            0
            2             group 1       0 1 2            0 1 2
            3             group 2       0 1 2 3          0 1 2   (input 4 has step 3's)

        Without group_attention input 1 sees 0 1."""
        inputs = torch.arange(known.shape[1], device=known.device)
        # the group of an input's token, by the tokens before it; -1: [None]
        before = (1, 0)
        group = F.pad(known[:, :-1], before, value=-1)
        if not self.config.group_attention:
            group = inputs.expand_as(group)
        allowed = group.unsqueeze(1) <= group.unsqueeze(2)  # (B, T, T)
        allowed = without_start(allowed, inputs[:, None], self.config)
        last = known.unsqueeze(2)  # (B, T, 1) the last input that a query sees
        query_allowed = inputs <= last
        query_allowed = without_start(query_allowed, last, self.config)
        return allowed.unsqueeze(1), query_allowed.unsqueeze(1)

    def run_blocks(self, x: Tensor, p: Any) -> Tensor:
        """Return the final hidden states of the queries, (B, T, D), for embedded inputs
        x (B, T, D). p: a pass that has `attend_queries`."""
        queries = self.query.expand(*p.targets.shape, -1)  # (B, T, D)
        if self.wpe is not None:
            # Row 0 of the table is [None]'s.
            queries = self.query + self.wpe(p.targets + 1)
        x = self.drop(x)
        first_values = None
        for layer, block in enumerate(self.blocks):
            p.enter(layer)
            x, queries, values = block(x, queries, p, first_values)
            if first_values is None:
                first_values = values
        return self.norm_f(queries)
