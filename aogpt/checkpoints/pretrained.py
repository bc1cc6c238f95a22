"""Pretrained decoders as `transformers` stores them, read under our names: Llama,
Mistral, Qwen2, Qwen3 and what shares their layout (SmolLM2, ...).

From left to right our model computes what theirs does; with target "rotary" and
query_at "before_target" the same weights predict in any order. A begin-of-text token is
our [None]; where the tokenizer writes none (Qwen, SmolLM2), [None] is hidden, and the
first token is not scored."""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from annotated_types import Interval
from torch import Tensor

from ..data.tokenizers import HubTokenizer
from ..model import ModelConfig
from ..runtime.errors import UserError
from ..runtime.validation import Count, from_values
from ..systems import check_config
from .tensors import LazyTensors, described

MISTRAL_WINDOW = 4096  # tokens, where its config.json names none


@dataclass(frozen=True)
class Architecture:
    """The properties of a decoder of `transformers` that its config.json lacks."""

    qkv_bias: bool = False  # biases of queries, keys and values alone
    qk_norm: bool = False
    window: int | None = None  # of attention, in tokens, unless config.json has another


# By the name in a config.json. To read one more: a line here.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(window=MISTRAL_WINDOW),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LONGEST = 4096  # block size of a model that takes longer sequences, unless one is given
BLOCK = {  # modules of blocks.N: the modules of model.layers.N, whose rows are joined
    "norm1": ["input_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "norm2": ["post_attention_layernorm"],
    "mlp.gate": ["mlp.gate_proj"],
    "mlp.fc": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}
TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
Base = Annotated[float, Interval(gt=1, lt=math.inf)]


class RopeSettings(TypedDict):
    """Rotary positions in a config.json."""

    rope_type: NotRequired[str]
    type: NotRequired[str]  # its older name
    rope_theta: NotRequired[Base | None]
    partial_rotary_factor: NotRequired[Positive | None]
    full_attention: NotRequired[Any]  # such a table for each kind of layer
    sliding_attention: NotRequired[Any]


class Llama3Scaling(TypedDict):
    """How Llama 3 scales rotary positions, in the same table."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count


class Settings(TypedDict):
    """The contents of a config.json of a pretrained decoder that are read here."""

    architectures: list[str]
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: NotRequired[Count | None]
    head_dim: NotRequired[Count | None]
    vocab_size: Count
    max_position_embeddings: Count
    rms_norm_eps: NotRequired[Positive]
    hidden_act: NotRequired[str]
    attention_bias: NotRequired[bool | None]
    mlp_bias: NotRequired[bool | None]
    tie_word_embeddings: NotRequired[bool | None]
    rope_theta: NotRequired[Base | None]
    rope_parameters: NotRequired[RopeSettings | None]  # of transformers 5
    rope_scaling: NotRequired[RopeSettings | None]  # of transformers 4
    partial_rotary_factor: NotRequired[Positive | None]
    sliding_window: NotRequired[Count | None]
    use_sliding_window: NotRequired[bool | None]
    layer_types: NotRequired[list[str] | None]
    no_rope_layers: NotRequired[Any]
    quantization_config: NotRequired[Any]


def is_pretrained(settings: dict) -> bool:
    """Return whether a config.json is of a causal language model of `transformers`,
    other than GPT-2, and not one that an earlier version's --hub wrote."""
    names = settings.get("architectures")
    other = names == ["GPT2LMHeadModel"] or settings.get("model_type") in (
        None,
        "aogpt",
    )
    return isinstance(names, list) and len(names) > 0 and not other


def read(
    settings: dict, state: MutableMapping[str, Tensor], tokenizer: HubTokenizer
) -> tuple[ModelConfig, LazyTensors]:
    """Return our configuration and the tensors of `state` by our names. Raises
    UserError for an architecture that our model does not have."""
    config = config_of(settings, has_start=bool(tokenizer.starts))
    tensors = LazyTensors()
    unused = {name for name in state if not name.endswith("rotary_emb.inv_freq")}
    width = config.head_dim
    heads = (config.n_head, config.kv_heads, config.kv_heads)
    qkv_rows = [count * width for count in heads]
    for ours, theirs in module_names(config).items():
        for kind in ("weight", "bias"):
            names = [f"{module}.{kind}" for module in theirs]
            rows = qkv_rows if ours.endswith("attn.qkv") else None
            if unused.issuperset(names):
                tensors.data[f"{ours}.{kind}"] = partial(joined, state, names, rows)
                unused.difference_update(names)
    if config.tied_head:
        unused.discard(HEAD)
    if unused:
        raise UserError(f"our model has no place for {', '.join(sorted(unused)[:4])}")
    rows = len(state[TABLE]) if TABLE in state else config.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer.json has {tokenizer.vocab_size} ids, the table {rows}"
        )
    first = tokenizer.starts[0] if tokenizer.starts else tokenizer.eot
    # A copy: the weight is trained apart. Where [None] is hidden, step 0 alone reads
    # it.
    if TABLE in state:
        tensors.data["start"] = lambda: joined(state, [TABLE])[first].clone()
    return config, tensors


def module_names(config: ModelConfig) -> dict[str, list[str]]:
    """Return the modules of `transformers` that make each of our modules, by name."""
    names = {"wte": ["model.embed_tokens"], "norm_f": ["model.norm"]}
    for layer in range(config.n_layer):
        for ours, theirs in BLOCK.items():
            names[f"blocks.{layer}.{ours}"] = [
                f"model.layers.{layer}.{module}" for module in theirs
            ]
    if not config.tied_head:
        names["head"] = ["lm_head"]
    return names


def joined(
    state: MutableMapping[str, Tensor], names: list[str], rows: list[int] | None = None
) -> Tensor:
    """Join the rows of tensors. rows: the number of rows of each, where the joined
    tensor's shape does not check it. Raises UserError for quantised or odd ones."""
    parts = [state[name] for name in names]
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        is_plain = isinstance(part, Tensor) and part.dtype in DTYPES and part.dim() > 0
        fits = is_plain and part.shape[1:] == parts[0].shape[1:]
        if not fits or (rows and len(part) != rows[i]):
            raise UserError(
                f"{name} is {described(part)}: it has quantised weights, or another "
                "shape than config.json says"
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def config_of(settings: dict, has_start: bool) -> ModelConfig:
    """Return the plain GPT of a config.json. has_start: its tokenizer writes a
    begin-of-text. Raises UserError for parts that our model does not have."""
    name = settings["architectures"][0]
    if name not in ARCHITECTURES:
        raise UserError(
            f"its architecture is {name}; supported are {', '.join(ARCHITECTURES)}"
        )
    settings = from_values(settings, Settings, "config.json")
    refuse_what_differs(settings)
    architecture = ARCHITECTURES[name]
    has_bias = bool(settings.get("attention_bias"))
    n_head = settings["num_attention_heads"]
    width = settings["hidden_size"]
    lengths = [settings["max_position_embeddings"], LONGEST, window_of(settings)]
    config = ModelConfig(
        vocab_size=settings["vocab_size"],
        block_size=min(length for length in lengths if length),
        n_layer=settings["num_hidden_layers"],
        n_head=n_head,
        n_embd=width,
        n_kv_head=settings.get("num_key_value_heads") or n_head,
        head_width=settings.get("head_dim") or width // n_head,
        mlp_width=settings["intermediate_size"],
        target="none",
        position="rotary",
        rope_base=rope_base(settings),
        rope_scaling=rope_scaling(settings),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        qk_norm=architecture.qk_norm,
        mlp="swiglu",
        attn_bias=architecture.qkv_bias or has_bias,
        attn_proj_bias=has_bias and not architecture.qkv_bias,
        mlp_bias=bool(settings.get("mlp_bias")),
        start="attended" if has_start else "hidden",
        tied_head=bool(settings.get("tie_word_embeddings")),
        head_bias=False,
    )
    check_config(config)
    return config


def window_of(settings: Settings) -> int | None:
    """Return the tokens that attention looks back over; None: all of them. Shorter
    sequences do not see the difference."""
    usual = ARCHITECTURES[settings["architectures"][0]].window
    layers = settings.get("layer_types") or []
    is_used = settings.get("use_sliding_window", usual is not None)
    if is_used or "sliding_attention" in layers:
        return settings.get("sliding_window", usual)
    return None


def check_length(window: int | None, block_size: int) -> None:
    """Raise UserError for sequences that are longer than a sliding window."""
    if window is not None and block_size > window:
        raise UserError(
            f"it has a sliding window of {window} tokens, which our model does not: "
            f"give at most that (block size {block_size})"
        )


def refuse_what_differs(settings: Settings) -> None:
    """Raise UserError for parts that our model does not have."""
    rope = rope_settings(settings)
    kind = kind_of_scaling(rope)
    usual = settings.get("partial_rotary_factor")
    rotated = rope.get("partial_rotary_factor", usual)
    by_kind_of_layer = "full_attention" in rope or "sliding_attention" in rope
    activation = settings.get("hidden_act", "silu")
    layers = settings.get("layer_types") or []
    slides = "sliding_attention" in layers
    differs = {
        "quantised weights (quantization_config)": settings.get("quantization_config"),
        f"rotary scaling of the kind {kind!r}": kind not in ("default", "llama3"),
        f"the activation {activation}": activation != "silu",
        "a sliding window of no size": slides and window_of(settings) is None,
        "layers without positions (no_rope_layers)": settings.get("no_rope_layers"),
        "partly rotated heads (partial_rotary_factor)": rotated not in (None, 1.0),
        "rotary positions for each kind of layer (rope_parameters)": by_kind_of_layer,
    }
    for part, is_there in differs.items():
        if is_there:
            raise UserError(f"it has {part}, which our model does not")


def rope_settings(settings: Settings) -> RopeSettings:
    """Return the table of rotary positions: its name differs between releases."""
    return settings.get("rope_parameters") or settings.get("rope_scaling") or {}


def kind_of_scaling(rope: RopeSettings) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_base(settings: Settings) -> float:
    """Return the base of the rotary frequencies."""
    rope = rope_settings(settings)
    return float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)


def rope_scaling(settings: Settings) -> tuple[float, float, float, int] | None:
    """Return ModelConfig.rope_scaling."""
    rope = rope_settings(settings)
    if kind_of_scaling(rope) == "default":
        return None
    scaling = from_values(rope, Llama3Scaling, "rotary scaling in config.json")
    return (
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        scaling["original_max_position_embeddings"],
    )
