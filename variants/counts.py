"""What a model has and takes: parameters, floating-point operations."""

from __future__ import annotations

from model import AOGPT, ModelConfig


def parameter_counts(model: AOGPT) -> dict[str, int]:
    """Parameters of embeddings, blocks, conditioning (target positions, adaLN) and head."""
    counts = dict.fromkeys(("embeddings", "blocks", "conditioning", "head"), 0)
    for name, p in model.named_parameters():
        # First what conditions: some of it lies inside the blocks, some before the head.
        if "wtpe" in name or "adaln" in name or name.startswith(("query", "noise")):
            counts["conditioning"] += p.numel()
        elif name.startswith(("wte", "wpe", "start")):
            counts["embeddings"] += p.numel()
        else:
            counts["blocks" if name.startswith("blocks") else "head"] += p.numel()
    return counts


def flops_per_token(c: ModelConfig, length: int) -> float:
    """Operations of forward and backward per token: 6 per weight of a matrix that every token
    passes, plus 12 n_layer n_embd length for attention (PaLM, appendix B). A second stream has all
    of it again except keys and values. adaLN is left out: it runs per position."""
    streams, of_block = (2, 22) if c.target == "two_stream" else (1, 12)
    matrices = of_block * c.n_layer * c.n_embd**2 + c.n_embd * c.vocab_size
    return 6 * matrices + streams * 12 * c.n_layer * c.n_embd * length
