"""Parameters: initial values (the paper, section 3 and appendix B), counts.

A `Layer` describes its parameters."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model import Layer, Matrices, ModelConfig, PositionTable, Transformer


def init_weights(model: Transformer, generator: torch.Generator | None = None) -> None:
    """Fill all parameters of a model: see `init_weight`."""
    for name, p in model.named_parameters():
        init_weight(model, name, p, generator)


@torch.no_grad()
def init_weight(
    model: nn.Module, name: str, p: Tensor, generator: torch.Generator | None = None
) -> None:
    """Fill p, of the shape of the parameter `name` of the model: truncated normal (std
    0.02, or the layer's `init_std`, cut at 3 std), biases 0, norms 1, position tables
    as model.position_init says, and the values that a layer names in `initial`."""
    parent, _, leaf = name.rpartition(".")
    layer = model.get_submodule(parent)
    if isinstance(layer, Layer) and leaf in layer.initial:
        nn.init.constant_(p, layer.initial[leaf])
    elif leaf == "bias" and isinstance(layer, nn.Linear | nn.LayerNorm):
        nn.init.zeros_(p)
    elif isinstance(layer, nn.RMSNorm | nn.LayerNorm):
        nn.init.ones_(p)
    elif isinstance(layer, PositionTable) and layer.wave_std is not None:
        rows = len(p) + layer.first_wave
        waves = sinusoids(rows, p.shape[1], layer.wave_std)
        p.copy_(waves[layer.first_wave :])
    else:
        std = layer.init_std if isinstance(layer, Layer) else Layer.init_std
        nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std, generator=generator)


def sinusoids(rows: int, dim: int, std: float) -> Tensor:
    """Return sines and cosines (rows, dim) of wavelengths from 2 pi to pi * rows, in
    geometric steps, with standard deviation `std`."""
    steps = torch.linspace(0, 1, (dim + 1) // 2)
    frequency = (2 / rows) ** steps
    positions = torch.arange(rows).unsqueeze(1)
    angle = positions * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)
    waves = waves[:, :dim]
    return waves * (std / waves.std())


def parameter_counts(model: Transformer) -> dict[str, int]:
    """Count the parameters of embeddings, blocks, conditioning (target positions,
    adaLN, noise) and head."""
    conditioning = conditioning_parameters(model)
    blocks = set(model.blocks.parameters())
    last = {*model.norm_f.parameters(), *model.head.parameters()}
    last.discard(model.wte.weight)  # of a tied head
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
    """Return the parameters that condition the model on target positions or noise."""
    parameters = set()
    for module in model.modules():
        if isinstance(module, Layer):
            for name in module.conditions:
                parameters.add(module.get_parameter(name))
    return parameters


def matrices_of(model: nn.Module) -> Matrices:
    """Return the weights that the layers of the model list as matrices, with the rows
    of each part: Muon orthogonalises them."""
    matrices: Matrices = []
    for layer in model.modules():
        if isinstance(layer, Layer):
            matrices += layer.matrices()
    return matrices


class BlockMatrices(NamedTuple):
    """The numbers of weights in the matrices of a block."""

    keys_and_values: int
    queries: int
    output: int  # of attention
    mlp: int

    @property
    def all(self) -> int:
        """Return the number of weights of the whole block."""
        return sum(self)


def block_matrices(c: ModelConfig) -> BlockMatrices:
    """Count the weights of the matrices of a block."""
    matrices_of_mlp = 3 if c.mlp == "swiglu" else 2
    queries = c.n_head * c.head_dim * c.n_embd
    return BlockMatrices(
        keys_and_values=2 * c.kv_heads * c.head_dim * c.n_embd,
        queries=queries,
        output=queries,
        mlp=matrices_of_mlp * c.n_embd * c.mlp_dim,
    )
