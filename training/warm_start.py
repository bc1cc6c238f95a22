"""Starting from the weights of another model: a run, an export, a pretrained decoder."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from checkpoints import CheckpointError
from model import AOGPT, ModelConfig
from variants import length_is_fixed

# Keys that may differ between a model and the source of its weights: any value; what is gained.
FREE = ("dropout", "position_init", "block_size")
GAINED = {"target": "none"} | dict.fromkeys(("noise", "attn_bias", "mlp_bias", "head_bias"), False)


def with_shape_of(source: ModelConfig, config: ModelConfig, given: Collection[str]) -> ModelConfig:
    """The configuration of a model that starts from a source: keys that are not given, and without
    which its weights would mean something else, are the source's."""
    theirs = {name: before for name, before, _ in differences(source, config) if name not in given}
    return replace(config, **theirs)


def differences(theirs: ModelConfig, ours: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, theirs, ours) of what keeps a model from starting from these weights."""
    unread = {"cond_dim": not theirs.has_adaln, "group_attention": theirs.target != "two_stream"}
    unread["query_at"] = theirs.target == "none"
    for name, before in asdict(theirs).items():
        now, free = getattr(ours, name), name in FREE or unread.get(name)
        if before != now and not free and GAINED.get(name, now) != before:
            yield name, before, now


@torch.no_grad()
def warm_start(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2. A new adaLN
    starts as the identity (shift 0, scale 0, gate 1) and other new tables of target positions at 0,
    so the model first computes what the source does, except for two streams and, without
    query_at = "before_target", for a plain GPT with rotary positions. Longer tables of positions
    are cropped. Raises CheckpointError if the weights would mean something else in the model."""
    theirs, ours, refused = source.config, model.config, "cannot start from these weights"
    for name, before, now in differences(theirs, ours):
        raise CheckpointError(f"{refused}: set model.{name} = {before!r} (it is {now!r})")
    if length_is_fixed(theirs) and theirs.block_size < ours.block_size:
        size = f"their tables have {theirs.block_size} positions; set model.block_size to at most"
        raise CheckpointError(f"{refused}: {size} that (it is {ours.block_size})")
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        table = name.endswith(("wpe.weight", "wtpe.weight"))  # a row per position
        own[name].copy_(weight[: len(own[name])] if table else weight)
    for name in own.keys() - weights.keys():
        if "adaln" in name or (name.endswith("wtpe.weight") and model.config.target != "adaln"):
            own[name].zero_()
        if name.endswith("adaln.bias"):
            width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
            own[name][2 * width : 3 * width] = own[name][5 * width :] = 1
