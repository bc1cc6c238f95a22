"""Parameters: initial values (the paper, section 3 and appendix B), counts, operations.

What a parameter is, its layer says: see "layers" in model.py."""

import torch
from torch import Tensor, nn

from ..model import ModelConfig, PositionTable, Transformer


def init_weights(model: Transformer, generator: torch.Generator | None = None) -> None:
    for name, p in model.named_parameters():
        init_weight(model, name, p, generator)


@torch.no_grad()
def init_weight(
    model: Transformer,
    name: str,
    p: Tensor,
    generator: torch.Generator | None = None,
) -> None:
    """Fill p, of the shape of the parameter `name` of the model: truncated normal (std
    0.02, or the layer's `init_std`, cut at 3 std), biases 0, norms 1, position tables as
    model.position_init says, and what a layer says of its own in `initial`."""
    parent, _, leaf = name.rpartition(".")
    layer = model.get_submodule(parent)
    initial = getattr(layer, "initial", {})
    if leaf in initial:
        nn.init.constant_(p, initial[leaf])
    elif leaf == "bias" and isinstance(layer, nn.Linear | nn.LayerNorm):
        nn.init.zeros_(p)
    elif isinstance(layer, nn.RMSNorm | nn.LayerNorm):
        nn.init.ones_(p)
    elif isinstance(layer, PositionTable) and layer.wave_std is not None:
        rows = len(p) + layer.first_wave
        waves = sinusoids(rows, p.shape[1], layer.wave_std)
        p.copy_(waves[layer.first_wave :])
    else:
        std = getattr(layer, "init_std", 0.02)
        nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """(rows, dim) sines and cosines of wavelengths from 2 pi to pi * rows, in geometric
    steps."""
    frequency = (2 / rows) ** torch.linspace(0, 1, (dim + 1) // 2)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim]
    return waves * (std / waves.std())


def parameter_counts(model: Transformer) -> dict[str, int]:
    """Parameters of embeddings, blocks, conditioning (target positions, adaLN, noise) and
    head."""
    conditioning = conditioning_parameters(model)
    blocks = set(model.blocks.parameters())
    last = set(model.norm_f.parameters()) | set(model.head.parameters())
    last -= {model.wte.weight}  # of a tied head
    counts = {"embeddings": 0, "blocks": 0, "conditioning": 0, "head": 0}
    for p in model.parameters():
        if p in conditioning:  # some of it lies inside the blocks
            part = "conditioning"
        elif p in blocks:
            part = "blocks"
        elif p in last:
            part = "head"
        else:
            part = "embeddings"
        counts[part] += p.numel()
    return counts


def conditioning_parameters(model: Transformer) -> set[nn.Parameter]:
    """The parameters that tell the model which position to predict, or the noise."""
    return {
        module.get_parameter(name)
        for module in model.modules()
        for name in getattr(module, "conditions", ())
    }


def block_matrices(c: ModelConfig) -> tuple[int, int]:
    """Weights of a block's matrices: all, and those of keys and values."""
    keys_and_values = 2 * c.kv_heads * c.head_dim * c.n_embd
    queries_and_output = 2 * c.n_head * c.head_dim * c.n_embd
    mlp = (3 if c.mlp == "swiglu" else 2) * c.n_embd * (c.mlp_width or 4 * c.n_embd)
    return queries_and_output + keys_and_values + mlp, keys_and_values


def flops_per_token(c: ModelConfig, length: int) -> float:
    """Operations of forward and backward per token: 6 per weight of a matrix that every
    token passes, plus 12 n_layer n_embd length for attention (PaLM, appendix B). A second
    stream has all of it again except keys and values. Queries that are a [MASK] have all
    of it again, but then the last block only projects the contents. adaLN is left out: it
    runs per position."""
    matrices, keys_and_values = block_matrices(c)
    weights = matrices * c.n_layer
    attentions = c.n_layer
    if c.target == "two_stream":
        weights += (matrices - keys_and_values) * c.n_layer
        attentions = 2 * c.n_layer
    elif c.target == "mask_query":
        queries = c.n_head * c.head_dim * c.n_embd
        weights += matrices * (c.n_layer - 1) + queries + keys_and_values
        attentions = 2 * c.n_layer - 1
    weights += c.n_embd * c.vocab_size
    return 6 * weights + attentions * 12 * c.n_head * c.head_dim * length
