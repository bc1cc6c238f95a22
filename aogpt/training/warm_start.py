"""Start from the weights of another model: a run, an export or a pretrained decoder."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import CheckpointError
from ..model import Layer, ModelConfig, PositionTable, Transformer
from ..systems import position_tables, system_of

# Keys of layers that a start adds only where the user sets them.
OPTIONAL = ("attn_bias", "mlp_bias", "head_bias")


def with_shape_of(
    source: ModelConfig, config: ModelConfig, given: Collection[str]
) -> ModelConfig:
    """Return `config` with the source's value of every key that is not in `given` and
    that changes what the weights mean, or how many there are."""
    theirs = {}
    for name, before in asdict(source).items():
        if name in given:
            continue
        if name in OPTIONAL or not may_differ(name, source, config):
            theirs[name] = before
    return replace(config, **theirs)


def may_differ(name: str, theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Return whether a start may change the key `name` of [model]: because no weight of
    the source depends on it, or because it adds weights that change nothing at
    first."""
    becomes_encoder = ours.is_encoder and theirs.target == "none"
    match name:
        case "dropout" | "position_init" | "block_size":  # of tables: see `check_start`
            return True
        case "attention" | "mask_token":
            return becomes_encoder and not theirs.is_encoder
        case "vocab_size":  # [MASK] is a row more
            more = ours.vocab_size > theirs.vocab_size
            return becomes_encoder and not theirs.is_encoder and more
        case "target":
            return theirs.target == "none"
        case "noise" | "attn_bias" | "mlp_bias" | "head_bias":
            return getattr(theirs, name) is False
        case "cond_dim":
            return not theirs.has_adaln
        case "group_attention":
            return not system_of(theirs).query_stream
        case "query_at":
            return theirs.target == "none"
        case "start":
            return not system_of(ours).has_start
    return False


def differing_keys(
    theirs: ModelConfig, ours: ModelConfig
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, theirs, ours) of the keys of [model] that differ."""
    for name, before in asdict(theirs).items():
        now = getattr(ours, name)
        if before != now:
            yield name, before, now


def check_start(model: Transformer, source: Transformer) -> None:
    """Raise CheckpointError if weights of `source` would mean something else in
    `model`."""
    theirs = source.config
    ours = model.config
    for name, before, now in differing_keys(theirs, ours):
        if not may_differ(name, theirs, ours):
            raise CheckpointError(
                f"cannot start from these weights: set model.{name} = {before!r} (it "
                f"is {now!r})"
            )
    if position_tables(source) and theirs.block_size < ours.block_size:
        raise CheckpointError(
            "cannot start from these weights: their tables have "
            f"{theirs.block_size} positions; set model.block_size to at most that (it "
            f"is {ours.block_size})"
        )


@torch.no_grad()
def warm_start(model: Transformer, source: Transformer) -> None:
    """Copy the weights of `source` into `model`, e.g. of GPT-2 into an adaLN decoder. A
    new adaLN starts as the identity (shift 0, scale 0, gate 1), other new tables of
    target positions at 0: at first the model computes what the source does, except with
    two streams or queries that are a [MASK], or for a plain GPT with rotary positions
    without query_at = "before_target". Longer position tables are cropped. An encoder
    also starts from a plain GPT (DiffuLLaMA, arXiv 2410.17891; without its shift by one
    position), with the mean of the token vectors for [MASK]. Raises CheckpointError if
    the weights would mean something else in the model."""
    check_start(model, source)
    mask_token = None
    if not source.config.is_encoder:
        mask_token = model.config.mask_token
    layers = dict(source.named_modules())
    for name, layer in model.named_modules():
        if name not in layers:
            if isinstance(layer, Layer):
                layer.make_neutral()
            continue
        weights = dict(layers[name].named_parameters(recurse=False))
        for leaf, p in layer.named_parameters(recurse=False):
            if leaf not in weights:
                continue
            weight = rows_of(layers[name], layer, weights[leaf])
            if mask_token is not None and name in ("wte", "head"):
                tokens = weight[:mask_token]  # rows (V, D), or biases (V,)
                p.copy_(tokens.mean(dim=0).expand_as(p))
                p[: len(tokens)] = tokens
            else:
                p.copy_(weight)


def rows_of(source: nn.Module, layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight of `source`; of a table of positions, the rows that `layer` has,
    too."""
    if isinstance(source, PositionTable) and isinstance(layer, PositionTable):
        return source.rows_for(layer)
    return weight
