"""Every system as a model: `build_model(config)`, which checks the configuration."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import torch
from annotated_types import Interval
from torch.overrides import TorchFunctionMode

from ..model import ModelConfig, PositionTable, Transformer
from ..runtime.errors import UserError
from ..runtime.validation import BelowOne, check_value
from .encoder import NOISE_EPS, log_linear_noise
from .flops import flops_per_token
from .kinds import system_of
from .parameters import init_weight, init_weights, matrices_of, parameter_counts


def build_model(config: ModelConfig) -> Transformer:
    """Return the model of a configuration, with initial values. Raises UserError for an
    impossible one."""
    check_config(config)
    model = system_of(config)(config)
    init_weights(model)
    return model


class WithoutInitialValues(TorchFunctionMode):
    """New modules keep the parameters that they are made with. On the meta device these
    have no values, and to set them torch imports its compiler, a second of every
    start."""

    def __torch_function__(
        self,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return named["tensor"]
        return function(*args, **named)


def build_on_meta(config: ModelConfig) -> Transformer:
    """Return the model of a configuration without memory, for its shapes or to be given
    weights. Raises UserError for an impossible one."""
    check_config(config)
    with torch.device("meta"), WithoutInitialValues():
        return system_of(config)(config)


def set_block_size(model: Transformer, block_size: int) -> None:
    """Take sequences of up to `block_size` tokens from now on. A model may be bad at
    lengths that it was not trained on. Raises UserError for one with tables of
    positions."""
    tables = position_tables(model)
    if tables and block_size != model.config.block_size:
        raise UserError(
            f"this model takes no other block size than {model.config.block_size}, "
            f"such as {block_size}: it has tables of positions ({', '.join(tables)})"
        )
    model.config = dataclasses.replace(model.config, block_size=block_size)
    model.make_angles()


def position_tables(model: Transformer) -> list[str]:
    """Return the names of the tables that have a row per position, so that no sequence
    can be longer; none of a model with rotary positions alone."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, PositionTable):
            names.append(name)
    return names


BOUNDS = {
    "vocab_size": Annotated[int, Interval(ge=1, le=2**24)],
    "block_size": Annotated[int, Interval(ge=1, le=2**20)],
    "n_layer": Annotated[int, Interval(ge=1, le=10_000)],
    "n_head": Annotated[int, Interval(ge=1, le=2**12)],
    "n_embd": Annotated[int, Interval(ge=1, le=2**17)],
    "cond_dim": Annotated[int, Interval(ge=1, le=2**17)],
    "dropout": BelowOne,
    "n_kv_head": Annotated[int, Interval(ge=1, le=2**12)] | None,
    "head_width": Annotated[int, Interval(ge=1, le=2**17)] | None,
    "mlp_width": Annotated[int, Interval(ge=1, le=2**20)] | None,
    "norm_eps": Annotated[float, Interval(gt=0, lt=1)],
    "rope_base": Annotated[float, Interval(gt=1)],
}


def check_config(c: ModelConfig) -> None:
    """Raise UserError for values that are out of range or do not go together."""
    for name, hint in get_type_hints(ModelConfig).items():
        check_value(getattr(c, name), BOUNDS.get(name, hint), f"model.{name}")
    if c.head_width is None and c.n_embd % c.n_head:
        raise UserError(
            f"model.n_embd ({c.n_embd}) must be a multiple of model.n_head ({c.n_head})"
        )
    if c.n_head % c.kv_heads:
        raise UserError(
            f"model.n_head ({c.n_head}) must be a multiple of model.n_kv_head "
            f"({c.n_kv_head})"
        )
    if c.rotates and c.head_dim % 2:
        raise UserError(
            f"rotary positions need an even head width, but it is {c.head_dim}"
        )
    if c.is_encoder and (c.mask_token is None or not 0 < c.mask_token < c.vocab_size):
        raise UserError(
            f"model.mask_token is {c.mask_token}; an encoder (model.attention = "
            "'full') needs the first id after the tokenizer's, below model.vocab_size "
            f"({c.vocab_size}): 50257 for gpt2, 257 for bytes"
        )
    misplaced = {
        "target": c.is_encoder and c.target != "none",
        "mask_token": not c.is_encoder and c.mask_token is not None,
        "noise": not c.is_encoder and c.noise,
    }
    for name, is_misplaced in misplaced.items():
        if is_misplaced:
            raise UserError(
                f"model.{name} = {getattr(c, name)!r} does not go with model.attention "
                f"= {c.attention!r}: an encoder ('full') has a model.mask_token, may "
                "have model.noise, and has model.target = 'none'"
            )
    if c.rope_scaling is not None:
        factor, low, high, length = c.rope_scaling
        if not (factor >= 1 and 0 < low < high and length > 0):
            raise UserError(
                f"model.rope_scaling is {c.rope_scaling}; give factor >= 1, low, a "
                "higher high, length"
            )
    if not c.is_encoder and c.target == "rotary" and not c.rotates:
        raise UserError(
            "model.target = 'rotary' rotates queries: set model.position to 'rotary'"
        )
    has_start = system_of(c).has_start
    is_of_start = c.start == "hidden" or c.query_at == "before_target"
    if not c.is_encoder and is_of_start and not has_start:
        raise UserError(
            "model.start = 'hidden' and model.query_at = 'before_target' are for "
            f"[None], which model.target = {c.target!r} does without; leave them out"
        )
