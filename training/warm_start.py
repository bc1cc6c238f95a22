"""A new model that starts from the weights of another one."""

from __future__ import annotations

import torch

from checkpoints.errors import CheckpointError
from model import AOGPT

# What must be the same in both models.
SHARED = ("attention", "n_head", "position", "norm", "norm_bias", "qk_norm", "gelu", "tied_head")
SHARED += ("start", "value_residual")


@torch.no_grad()
def warm_start(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2.

    A new adaLN starts as the identity (shift 0, scale 0, gate 1) and other new tables of target
    positions at 0, so the model first computes what the source does. Exceptions: two streams, whose
    queries are new, and a plain GPT with rotary positions, in which all distances grow by one.

    Raises CheckpointError if a weight of the source has no place in the model.
    """
    for name in SHARED:
        theirs, ours = getattr(source.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(
                f"cannot start from these weights: set model.{name} = {theirs!r} (it is {ours!r})"
            )
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        found = tuple(own[name].shape) if name in own else "no such weight"
        if found != tuple(weight.shape):
            raise CheckpointError(
                f"cannot start from these weights: {name} is {tuple(weight.shape)} in the "
                f"source, {found} in the model; give it the source's shape: {source.config}"
            )
        own[name].copy_(weight)
    for name in own.keys() - weights.keys():
        if "adaln" in name or (name.endswith("wtpe.weight") and model.config.target != "adaln"):
            own[name].zero_()
        if name.endswith("adaln.bias"):
            width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
            own[name][2 * width : 3 * width] = own[name][5 * width :] = 1
