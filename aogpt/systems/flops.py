"""Operations of a training step, from a configuration alone."""

from ..model import ModelConfig
from .kinds import system_of
from .parameters import block_matrices
from .queries import QueryDecoder


def flops_per_token(c: ModelConfig, length: int) -> float:
    """Return the operations of forward and backward per token: 6 per weight of a matrix
    that every token passes, plus 12 n_layer n_embd length for attention (PaLM, appendix
    B). Where queries are inputs of their own, their operations count, too. adaLN, which
    runs once per position, does not count."""
    weights = block_matrices(c).all * c.n_layer
    attentions = c.n_layer
    system = system_of(c)
    if issubclass(system, QueryDecoder):
        weights += system.query_weights(c)
        attentions += system.query_attentions(c)
    weights += c.n_embd * c.vocab_size  # the head
    width = c.n_head * c.head_dim
    return 6 * weights + attentions * 12 * width * length
