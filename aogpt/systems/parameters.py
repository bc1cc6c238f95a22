"""Parameters: initial values (the paper, section 3 and appendix B), counts, operations on them."""

import math

import torch
from torch import Tensor, nn

from ..model import AOGPT, ModelConfig


def init_weights(model: AOGPT, generator: torch.Generator | None = None) -> None:
    for name, p in model.named_parameters():
        init_weight(model.config, name, p, generator)


@torch.no_grad()
def init_weight(
    config: ModelConfig, name: str, p: Tensor, generator: torch.Generator | None = None
) -> None:
    """Fill p, of the shape of the weight `name`: truncated normal (std 0.02, cut at 3 std;
    residual projections 0.02 / sqrt(2 n_layer)), biases 0, norms 1, shares of values 0.5; position
    tables as model.position_init says."""
    waves = config.position_init == "sinusoidal"
    if name.endswith("bias"):
        nn.init.zeros_(p)
    elif name.endswith("attn.mix"):
        nn.init.constant_(p, 0.5)
    elif "norm" in name:
        nn.init.ones_(p)
    elif waves and name == "wpe.weight":
        p.copy_(sinusoids(*p.shape, std=0.04))
    elif waves and name == "wtpe.weight":
        # The waves of `wpe`, whose row 0 is for [None]. adaLN reads them through weights of std
        # 0.02, which a larger std makes up for.
        std = 2.0 if config.target == "adaln" else 0.04
        p.copy_(sinusoids(len(p) + 1, p.shape[1], std)[1:])
    else:
        std = 0.02
        if name.endswith(
            ("attn.proj.weight", "mlp.proj.weight")
        ):  # 2 n_layer of these add up
            std = 0.02 / math.sqrt(2 * config.n_layer)
        nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """(rows, dim) sines and cosines of wavelengths from 2 pi to pi * rows, in geometric steps."""
    frequency = (2 / rows) ** torch.linspace(0, 1, (dim + 1) // 2)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]
    return waves * (std / waves.std())


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


def block_matrices(c: ModelConfig) -> tuple[int, int]:
    """Weights of a block's matrices: all, and those of keys and values."""
    keys_and_values = 2 * c.kv_heads * c.head_dim * c.n_embd
    mlp = (3 if c.mlp == "swiglu" else 2) * c.n_embd * (c.mlp_width or 4 * c.n_embd)
    return 2 * c.n_head * c.head_dim * c.n_embd + keys_and_values + mlp, keys_and_values


def flops_per_token(c: ModelConfig, length: int) -> float:
    """Operations of forward and backward per token: 6 per weight of a matrix that every token
    passes, plus 12 n_layer n_embd length for attention (PaLM, appendix B). A second stream has all
    of it again except keys and values. Queries that are a [MASK] have all of it again, but then
    the last block only projects the contents. adaLN is left out: it runs per position."""
    (matrices, keys_and_values), streams = block_matrices(c), 1
    if c.target == "two_stream":
        matrices = 2 * matrices - keys_and_values
        streams = 2
    total = matrices * c.n_layer
    attentions = streams * c.n_layer
    if c.target == "mask_query":
        projection = c.n_head * c.head_dim * c.n_embd + keys_and_values
        total = matrices * (2 * c.n_layer - 1) + projection
        attentions = 2 * c.n_layer - 1
    total += c.n_embd * c.vocab_size
    return 6 * total + attentions * 12 * c.n_head * c.head_dim * length
