"""Linear layers laid out for a CPU: what decoding of few rows at a time spends its time in."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from model import AOGPT, MLP


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU, its weight laid out by oneDNN: for few rows 2 to 4
    times as fast."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: Tensor, then: str = "none", variant: str = "") -> Tensor:
        """`then`: an activation that is applied to the output where it is computed."""
        x = x.to(self.weight.dtype)  # under autocast it may come in another
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, then, [], variant)


class PackedMLP(nn.Module):
    def __init__(self, mlp: MLP):
        super().__init__()
        self.approximate = mlp.approximate
        self.fc, self.proj = PackedLinear(mlp.fc), PackedLinear(mlp.proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x, "gelu", self.approximate))


def packed(model: AOGPT) -> AOGPT:
    """The model with packed linear layers, sharing all parameters, where that makes it faster: in
    float32 on a CPU. Elsewhere the model itself."""
    weight = model.wte.weight
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not on_cpu or weight.dtype != torch.float32:
        return model
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is MLP:
                setattr(module, name, PackedMLP(child))
            elif type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
    return model
