"""Every system as one of four classes: `build_model(config)`, which checks the configuration."""

import dataclasses
from typing import Annotated, get_type_hints

from annotated_types import Interval

from ..model import AOGPT, ModelConfig
from ..runtime.errors import UserError
from ..runtime.validation import BelowOne, check_value
from .chunked_head import head_chunk
from .encoder import Encoder, log_linear_noise
from .mask_query import MaskQuery
from .parameters import flops_per_token, init_weight, init_weights, parameter_counts
from .scoring import Decoder, group_log_probs, group_starts
from .two_stream import TwoStream, TwoStreamPass


def build_model(config: ModelConfig) -> Decoder | TwoStream | MaskQuery | Encoder:
    """The model of a configuration, with initial values. Raises UserError for an impossible one."""
    check_config(config)
    if config.is_encoder:
        model = Encoder(config)
    elif config.target == "two_stream":
        model = TwoStream(config)
    elif config.target == "mask_query":
        model = MaskQuery(config)
    else:
        model = Decoder(config)
    if (
        not model.wte.weight.is_meta
    ):  # without memory, for weights that are read from a file
        init_weights(model)
    return model


def set_block_size(model: AOGPT, block_size: int) -> None:
    """Take sequences of up to `block_size` tokens from now on. A model may be bad at lengths that
    it was not trained on. Raises UserError for one with tables of positions."""
    if length_is_fixed(model.config) and block_size != model.config.block_size:
        tables = f"this model has tables of {model.config.block_size} positions"
        without = (
            "model.position = 'rotary' and, decoders, model.target = 'rotary', 'none'"
        )
        only = (
            f"only models without tables do: those with {without}, 'two_stream' or "
            "'mask_query'"
        )
        raise UserError(
            f"{tables} and takes no other block size, such as {block_size}; {only}"
        )
    model.config = dataclasses.replace(model.config, block_size=block_size)
    model.make_angles(model.head.weight.device)


LARGEST = {"vocab_size": 2**24, "block_size": 2**20, "n_layer": 10_000, "n_head": 2**12}
LARGEST |= {"n_embd": 2**17, "cond_dim": 2**17}
BOUNDS = {
    name: Annotated[int, Interval(ge=1, le=most)] for name, most in LARGEST.items()
}
BOUNDS |= {
    "dropout": BelowOne,
    "n_kv_head": BOUNDS["n_head"] | None,
    "head_width": BOUNDS["n_embd"] | None,
    "mlp_width": Annotated[int, Interval(ge=1, le=2**20)] | None,
    "norm_eps": Annotated[float, Interval(gt=0, lt=1)],
    "rope_base": Annotated[float, Interval(gt=1)],
}


def check_config(c: ModelConfig) -> None:
    """Raise UserError for values that are out of range or do not go together."""
    for name, hint in get_type_hints(ModelConfig).items():
        check_value(getattr(c, name), BOUNDS.get(name, hint), f"model.{name}")
    if c.head_width is None and c.n_embd % c.n_head:
        odd = (
            f"model.n_embd ({c.n_embd}) must be a multiple of model.n_head ({c.n_head})"
        )
        raise UserError(odd)
    if c.n_head % c.kv_heads:
        odd = f"model.n_head ({c.n_head}) must be a multiple of model.n_kv_head ({c.n_kv_head})"
        raise UserError(odd)
    if c.rotates and c.head_dim % 2:
        raise UserError(
            f"rotary positions need an even head width, but it is {c.head_dim}"
        )
    if c.is_encoder and c.target != "none":
        none = "an encoder (model.attention = 'full') has no target position"
        raise UserError(
            f"model.target is {c.target!r}, but {none}; set model.target to 'none'"
        )
    if c.is_encoder and (c.mask_token is None or not 0 < c.mask_token < c.vocab_size):
        needs = "an encoder (model.attention = 'full') needs the first id after the tokenizer's"
        below = (
            f"below model.vocab_size ({c.vocab_size}): 50257 for gpt2, 257 for bytes"
        )
        raise UserError(f"model.mask_token is {c.mask_token}; {needs}, {below}")
    for name, value in (("mask_token", c.mask_token), ("noise", c.noise or None)):
        if not c.is_encoder and value is not None:
            only = f"model.{name} = {value!r} is for encoders"
            raise UserError(f"{only}; set model.attention to 'full'")
    factor, low, high, length = c.rope_scaling or (1, 1, 2, 1)
    if not (factor >= 1 and 0 < low < high and length > 0):
        wanted = "give factor >= 1, low, a higher high, length"
        raise UserError(f"model.rope_scaling is {c.rope_scaling}; {wanted}")
    if not c.is_encoder and c.target == "rotary" and not c.rotates:
        raise UserError(
            "model.target = 'rotary' rotates queries: set model.position to 'rotary'"
        )
    if c.target == "mask_query" and c.start == "hidden":
        raise UserError(
            "model.start = 'hidden' hides [None], which model.target = 'mask_query' "
            "does without; leave model.start out"
        )
    if c.target == "mask_query" and c.query_at == "before_target":
        raise UserError(
            "model.query_at is 'before_target', but with model.target = 'mask_query' "
            "a query stands at its target; leave model.query_at out"
        )


def length_is_fixed(c: ModelConfig) -> bool:
    """Whether a table has a row per position, so that no sequence can be longer."""
    return c.position != "rotary" or c.target in (
        "input",
        "adaln",
        "shared",
        "per_block",
    )
