"""Adapters (LoRA, Hu et al., arXiv 2106.09685): products of two thin matrices, A (rank,
in) and B (out, rank), that are added to matrices of a base model.

A checkpoint of a run with --train.lora-rank, or a folder of convert.py --adapter, holds
these alone, with the sha256 of the base's weights. They are merged when a model is
loaded, so that decoding is that of any other model."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from ..model import ModelConfig, Transformer
from ..runtime.errors import UserError
from ..runtime.validation import Amount, Count, NonNegative, schema

FORMAT = "aogpt-adapter-1"
FILE = "adapter.safetensors"
PART = re.compile(r"(.+)\.lora_([AB])(\.default)?\.weight")


@schema
class Adapter(TypedDict):
    """The record of its adapters in a checkpoint."""

    rank: Count
    alpha: Amount  # the products are multiplied by alpha / rank
    base: str  # path or repository of the base model
    base_sha256: str


@schema
class AdapterExport(TypedDict):
    """The contents of config.json of a folder of convert.py --adapter."""

    model: ModelConfig
    adapter: Adapter
    step: NonNegative
    weights: Literal["ema", "raw"]
    tokenizer: str
    tokenizer_sha256: str | None
    vocab_size: Count
    files: dict[str, str]  # sha256 by file


def weights_sha256(model: Transformer) -> str:
    """Return the sha256 of all weights as float32, in the order of their names: the
    same whichever file they came from."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(p.detach().float().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_base(model: Transformer, adapter: Mapping[str, Any], path: str) -> None:
    """Raise UserError if a model is not the one that the adapters were trained on."""
    if weights_sha256(model) != adapter["base_sha256"]:
        raise UserError(
            f"{path} is not the base of these adapters, {adapter['base']}: its weights "
            f"have another sha256 than {adapter['base_sha256'][:12]}"
        )


def merge(
    base: dict[str, Tensor], parts: Mapping[str, Tensor], adapter: Mapping[str, Any]
) -> None:
    """Add the products of the adapters to the matrices of `base`, by name, in place.
    Raises UserError for adapters of other matrices."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for name in parts:
        match = PART.fullmatch(name)
        if match is None or f"{match[1]}.weight" not in base:
            raise UserError(f"the base has no place for the adapter {name}")
        matrices.setdefault(match[1], {})[match[2]] = parts[name].float()
    for module, pair in matrices.items():
        weight = base[f"{module}.weight"]
        if pair.keys() != {"A", "B"}:
            raise UserError(f"the adapter of {module} lacks one of its two matrices")
        shape = (pair["B"].shape[0], pair["A"].shape[1])
        if pair["B"].shape[1] != pair["A"].shape[0] or shape != weight.shape:
            raise UserError(
                f"the adapter of {module} is not of the shape of its matrix"
            )
        weight.add_(pair["B"] @ pair["A"], alpha=adapter["alpha"] / adapter["rank"])
