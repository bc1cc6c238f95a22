"""Two streams with the same weights (XLNet, A3): the content stream sees its own tokens; the
query stream knows its target position only, reads the content stream, and predicts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import (
    Block,
    ModelConfig,
    Pass,
    PositionTable,
    Transformer,
    attention,
    inverse_permutation,
    rotate,
    shifted_inputs,
)
from ..scoring import without_start


class TwoStreamPass(Pass):
    """What inputs and queries see: all inputs up to their own step, or what two masks
    (B, 1, T, T) allow."""

    def __init__(
        self,
        config: ModelConfig,
        targets: Tensor,
        allowed: Tensor | None = None,
        query_allowed: Tensor | None = None,
    ):
        super().__init__(config, targets)
        self.allowed = allowed
        self.query_allowed = query_allowed
        self.target_angles: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.allowed is None:
            return super().attend(q, k, v)
        return attention(q, k, v, mask=self.allowed, dropout=self.dropout)

    def attend_queries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the query stream; k and v are the content's."""
        if self.query_allowed is None:
            return super().attend(q, k, v)
        return attention(q, k, v, mask=self.query_allowed, dropout=self.dropout)


class TwoStreamBlock(nn.Module):
    """The layers of a `Block` for both streams, which share them."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        block = Block(c)
        self.norm1 = block.norm1
        self.norm2 = block.norm2
        self.attn = block.attn
        self.mlp = block.mlp
        self.drop = block.drop

    def forward(
        self,
        x: Tensor,
        queries: Tensor,
        p: TwoStreamPass,
        first_values: Tensor | None,
    ) -> tuple:
        """Both streams, (B, T, D) each -> both streams, and values where blocks mix
        them."""
        attn = self.attn
        q, k, v, values = attn.heads(self.norm1(x), p, first_values)
        y = attn.proj(p.attend(q, k, v))
        # Queries have neither keys nor values: they need the first rows of the
        # projection only.
        rows = attn.heads_of[0] * attn.head_dim
        bias = None if attn.qkv.bias is None else attn.qkv.bias[:rows]
        q = F.linear(self.norm1(queries), attn.qkv.weight[:rows], bias)
        q = attn.q_norm(q.unflatten(-1, (-1, attn.head_dim)))
        if p.target_angles is not None:
            q = rotate(q, *p.target_angles)
        answer = attn.proj(p.attend_queries(q, k, v))
        x = x + self.drop(y)
        queries = queries + self.drop(answer)
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x, queries + self.drop(self.mlp(self.norm2(queries))), values


class TwoStream(Transformer):
    """A decoder whose queries are a stream of their own."""

    conditions = ("query",)
    separate_queries = True
    query_stream = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        c = config
        self.start = nn.Parameter(torch.empty(c.n_embd))
        self.query = nn.Parameter(torch.empty(c.n_embd))  # where queries start from
        if c.position != "rotary":
            self.wpe = PositionTable(c, c.block_size + 1, c.n_embd)
        self.add_blocks(TwoStreamBlock)

    def forward(
        self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None
    ) -> Tensor:
        """As `AOGPT.forward`; group_start: see `hidden`."""
        x = self.hidden(tokens, order, group_start)
        steps = inverse_permutation(order)
        wanted = torch.empty_like(tokens).scatter_(1, steps, tokens)
        return self.loss(self.head_logits, x, wanted)

    def hidden(
        self, tokens: Tensor, order: Tensor, group_start: Tensor | None = None
    ) -> Tensor:
        """As `AOGPT.hidden`. group_start (B, T): step i is predicted from the tokens of
        steps < group_start[:, i]; None: groups of one."""
        in_tokens, in_positions = shifted_inputs(tokens, order)
        p = TwoStreamPass(self.config, order)
        if group_start is not None:
            p.allowed, p.query_allowed = self.group_masks(group_start)
        return self.trunk(self.embed(in_tokens, in_positions), in_positions, p)

    def parallel_hidden(self, tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
        """As `scoring.parallel_hidden`: queries of steps from `known` on read inputs
        0..known."""
        in_tokens, in_positions = shifted_inputs(tokens, order)
        steps = torch.arange(order.shape[1], device=order.device)
        source = torch.minimum(steps, known[:, None]).unsqueeze(2)  # (B, T, 1)
        query_allowed = without_start(steps <= source, source, self.config)
        p = TwoStreamPass(self.config, order, query_allowed=query_allowed.unsqueeze(1))
        return self.trunk(self.embed(in_tokens, in_positions), in_positions, p)

    def group_masks(self, group_start: Tensor) -> tuple[Tensor, Tensor]:
        """What inputs and queries see in groups (A3), (B, 1, T, T) each.

        An input sees all groups up to its own, and of its own the tokens after it, too; a
        query sees the groups before its own. So nothing depends on the order inside a
        group. Example: two groups of two, group_start 0 0 2 2. Input i holds the token of
        step i - 1:

            input, step   input holds   the input sees   the query sees
            0             [None]        0                0
            1             group 1       0 1 2            0
            2             group 1       0 1 2            0 1 2
            3             group 2       0 1 2 3          0 1 2   (input 4 has step 3's)

        Without group_attention input 1 sees 0 1."""
        inputs = torch.arange(group_start.shape[1], device=group_start.device)
        # the group of an input's token, by the step where that begins
        group = F.pad(group_start[:, :-1], (1, 0), value=-1)
        if not self.config.group_attention:
            group = inputs.expand_as(group)
        allowed = group.unsqueeze(1) <= group.unsqueeze(2)
        allowed = without_start(allowed, inputs[:, None], self.config)
        last = group_start.unsqueeze(2)
        query_allowed = without_start(inputs <= last, last, self.config)
        return allowed.unsqueeze(1), query_allowed.unsqueeze(1)

    def trunk(self, x: Tensor, in_positions: Tensor, p: TwoStreamPass) -> Tensor:
        """Embedded inputs (B, T, D) at positions (B, T) -> final hidden states of the
        queries, (B, T, D)."""
        p.dropout = self.config.dropout if self.training else 0.0
        if self.config.rotates:
            p.key_angles = p.query_angles = self.angles_at(in_positions, x.dtype)
            p.target_angles = self.target_angles(p, x.dtype)
        queries = self.query.expand(*p.targets.shape, -1)
        if self.wpe is not None:
            # Row 0 of the table is [None]'s.
            queries = self.query + self.wpe(p.targets + 1)
        x = self.drop(x)
        first_values = None
        for layer, block in enumerate(self.blocks):
            p.enter(layer)
            x, queries, values = block(x, queries, p, first_values)
            first_values = values if first_values is None else first_values
        return self.final_norm(queries, p)
