"""A new model that starts from the weights of another one."""

from __future__ import annotations

import torch

from checkpoints.errors import CheckpointError
from model import AOGPT


@torch.no_grad()
def warm_start(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2.

    Every weight of the source must have its place. Where the model has adaLN and the source has
    none, adaLN starts as the identity (shift 0, scale 0, gate 1), and other target-position tables
    start at 0, so that at first the model computes exactly what the source does (a two-stream
    decoder takes the weights, but asks a query stream instead; a plain GPT with rotary positions
    rotates its queries to the position before the target, and all distances grow by one).
    """
    for name in (
        "attention",
        "n_head",
        "position",
        "norm",
        "norm_bias",
        "qk_norm",
        "gelu",
        "tied_head",
        "start",
        "value_residual",
    ):
        theirs, ours = getattr(source.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(
                f"cannot start from these weights: set model.{name} = {theirs!r} (it is {ours!r})"
            )
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        if name not in own or own[name].shape != weight.shape:
            found = tuple(own[name].shape) if name in own else "no such weight"
            raise CheckpointError(
                f"cannot start from these weights: {name} is {tuple(weight.shape)} in the "
                f"source, {found} in the model; give it the source's shape: {source.config}"
            )
        own[name].copy_(weight)
    for name, weight in own.items():
        if name not in weights and (
            "adaln" in name or name.endswith("wtpe.weight") and model.config.target != "adaln"
        ):
            weight.zero_()
            if name.endswith("adaln.bias"):
                width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
                weight[2 * width : 3 * width] = weight[5 * width :] = 1
