"""Decoders whose queries are inputs of their own: what two_stream.py and mask_query.py
share."""

import abc

import torch
from torch import Tensor, nn

from ..model import ModelConfig, PositionTable, Transformer, in_prediction_order


class QueryDecoder(Transformer, abc.ABC):
    """A decoder in which an input holds a token and a query, which starts from a
    learned vector, predicts one."""

    conditions = ("query",)
    separate_queries = True

    def __init__(self, config: ModelConfig, block_type: type[nn.Module]):
        super().__init__(config)
        c = config
        if self.has_start:
            self.start = nn.Parameter(torch.empty(c.n_embd))
        self.query = nn.Parameter(torch.empty(c.n_embd))
        if c.position != "rotary":
            rows = c.block_size + int(self.has_start)  # row 0 is [None]'s
            self.wpe = PositionTable(c, rows, c.n_embd)
        self.add_blocks(block_type)

    @classmethod
    @abc.abstractmethod
    def query_weights(cls, c: ModelConfig) -> int:
        """Count the weights of the matrices of all blocks that the query of a token
        passes."""

    @classmethod
    @abc.abstractmethod
    def query_attentions(cls, c: ModelConfig) -> int:
        """Count the blocks in which queries attend, besides the tokens."""

    def forward(
        self, tokens: Tensor, order: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """Return -log p of the token of each step, nats, (B, T) in prediction order.
        tokens, order (B, T): as in `AOGPT.forward`; known: see `hidden`."""
        wanted = in_prediction_order(tokens, order)
        x = self.hidden(tokens, order, known)  # (B, T, D)
        return self.loss(self.head_logits, x, wanted)

    @abc.abstractmethod
    def hidden(
        self, tokens: Tensor, order: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states of the queries, (B, T, D); state i predicts
        position order[:, i].

        known (B, T): step i is predicted from the first known[:, i] tokens of the
        order, at most i; None: from all before it."""
