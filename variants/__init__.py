"""Every system as one of three classes: `build_model(config)`."""

from __future__ import annotations

import dataclasses

from model import AOGPT, ModelConfig
from runtime.errors import UserError
from variants.checks import check_config, length_is_fixed
from variants.chunked_head import ChunkedHead, head_chunk
from variants.counts import flops_per_token, parameter_counts
from variants.encoder import Encoder, log_linear_noise
from variants.initial_values import init_weight, init_weights
from variants.scoring import Scoring, group_log_probs, group_starts
from variants.two_stream import TwoStream, TwoStreamPass

__all__ = [
    "Decoder",
    "Encoder",
    "TwoStream",
    "TwoStreamPass",
    "build_model",
    "check_config",
    "flops_per_token",
    "group_log_probs",
    "group_starts",
    "head_chunk",
    "init_weight",
    "init_weights",
    "length_is_fixed",
    "log_linear_noise",
    "parameter_counts",
    "set_block_size",
]


class Decoder(ChunkedHead, Scoring, AOGPT):
    """AO-GPT with a chunked head and scoring of known sequences."""


def build_model(config: ModelConfig) -> Decoder | TwoStream | Encoder:
    """The model of a configuration, with initial values. Raises UserError for an impossible one."""
    check_config(config)
    if config.is_encoder:
        model = Encoder(config)
    else:
        model = (TwoStream if config.target == "two_stream" else Decoder)(config)
    init_weights(model)
    return model


def set_block_size(model: AOGPT, block_size: int) -> None:
    """Take sequences of up to so many tokens from now on; nothing says that a model is any good on
    longer ones than it was trained on. Raises UserError for one with tables of positions."""
    if length_is_fixed(model.config) and block_size != model.config.block_size:
        raise UserError(
            f"this model has tables of {model.config.block_size} positions and takes no other "
            f"block size, such as {block_size}; only models without tables do: those with "
            "model.position = 'rotary' and, decoders, model.target = 'rotary', 'none' or "
            "'two_stream'"
        )
    model.config = dataclasses.replace(model.config, block_size=block_size)
    model.make_angles(model.head.weight.device)
