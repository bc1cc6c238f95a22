"""Pretrained decoders as `transformers` stores them: Llama, Mistral, Qwen2, Qwen3 and what shares
their layout (SmolLM2, ...), under our names.

From left to right our model computes what theirs does; with target "rotary" and query_at
"before_target" the same weights predict in any order. A begin-of-text token is our [None]; where
the tokenizer writes none (Qwen, SmolLM2), [None] is hidden, and the first token is not scored."""

from typing import Any

import torch
from torch import Tensor

from ..data.tokenizers import HubTokenizer
from ..model import ModelConfig
from ..runtime.errors import UserError
from ..runtime.validation import Count, check_value
from ..systems import check_config

ARCHITECTURES = tuple(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
NOT_THEIRS = (None, "aogpt")  # as model_type
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LONGEST = 4096  # the block size of a model that takes longer sequences, if the user names no other
BLOCK = {  # of model.layers.N
    "input_layernorm": "norm1",
    "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.fc",
    "mlp.down_proj": "mlp.proj",
}


def is_pretrained(settings: dict) -> bool:
    """Whether a config.json is of a causal language model of `transformers`, other than GPT-2, and
    not one that convert.py --hub wrote."""
    names = settings.get("architectures")
    kind = settings.get("model_type")
    other = names == ["GPT2LMHeadModel"] or kind in NOT_THEIRS
    return isinstance(names, list) and len(names) > 0 and not other


def read(
    settings: dict, state: dict[str, Tensor], tokenizer: HubTokenizer
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our configuration and tensors by our names; `state` is used up. Raises UserError for an
    architecture that our model does not have."""
    config = config_of(settings, bool(tokenizer.starts))
    tensors = {}
    if odd := [name for name, tensor in state.items() if tensor.dtype not in DTYPES]:
        raise UserError(f"{odd[0]} is {state[odd[0]].dtype}: it has quantised weights")

    def move(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                tensors[f"{ours}.{kind}"] = state.pop(f"{theirs}.{kind}")

    for number in range(config.n_layer):
        theirs = f"model.layers.{number}."
        ours = f"blocks.{number}."
        for name, our_name in BLOCK.items():
            move(theirs + name, ours + our_name)
        for kind in ("weight", "bias"):
            names = [f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"]
            if all(name in state for name in names):
                tensors[f"{ours}attn.qkv.{kind}"] = torch.cat(
                    [state.pop(name) for name in names]
                )
    move("model.norm", "norm_f")
    move("lm_head", "head")
    move("model.embed_tokens", "wte")
    if config.tied_head:
        tensors.pop("head.weight", None)
    table = tensors.get("wte.weight", torch.zeros(config.vocab_size, config.n_embd))
    first = tokenizer.starts[0] if tokenizer.starts else tokenizer.eot
    if tokenizer.vocab_size > len(table):
        raise UserError(
            f"tokenizer.json has {tokenizer.vocab_size} ids, the table {len(table)}"
        )
    # A copy: the weight is trained apart. Where [None] is hidden, step 0 alone reads it.
    tensors["start"] = table[first].clone()
    left = [name for name in state if not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise UserError(f"our model has no place for {', '.join(sorted(left)[:4])}")
    return config, tensors


def config_of(settings: dict, has_bos: bool) -> ModelConfig:
    """The plain GPT of a config.json."""
    refuse_what_differs(settings)
    of = settings.get
    names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {
        "n_embd": "hidden_size",
        "mlp_width": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    for theirs in (*names.values(), "max_position_embeddings"):
        check_value(of(theirs), Count, theirs)
    sizes = {ours: settings[theirs] for ours, theirs in names.items()}
    qwen2, qwen3 = (
        settings["architectures"][0].startswith(name) for name in ("Qwen2", "Qwen3")
    )
    biased = bool(of("attention_bias", False))
    base, scaling = rope_of(settings)
    config = ModelConfig(
        **sizes,
        block_size=min(settings["max_position_embeddings"], LONGEST),
        n_kv_head=of("num_key_value_heads") or sizes["n_head"],
        head_width=of("head_dim") or sizes["n_embd"] // sizes["n_head"],
        target="none",
        position="rotary",
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=of("rms_norm_eps", 1e-6),
        qk_norm=qwen3,
        mlp="swiglu",
        attn_bias=qwen2 or biased,
        attn_proj_bias=biased and not qwen2,
        mlp_bias=bool(of("mlp_bias", False)),
        start="attended" if has_bos else "hidden",
        tied_head=bool(of("tie_word_embeddings", False)),
        head_bias=False,
    )
    check_config(config)
    return config


def refuse_what_differs(settings: dict) -> None:
    name = settings["architectures"][0]
    if name not in ARCHITECTURES:
        raise UserError(
            f"its architecture is {name}; supported are {', '.join(ARCHITECTURES)}"
        )
    of = settings.get
    mistral = name.startswith("Mistral")  # whose default is a window
    window = of("sliding_window", 4096 if mistral else None)
    window = window if of("use_sliding_window", mistral) else None
    rotated = of("partial_rotary_factor", 1.0)
    rotated = rope_settings(settings).get("partial_rotary_factor", rotated)
    layers = of("layer_types") or []
    found = {
        "quantised weights (quantization_config)": of("quantization_config"),
        f"a sliding window of {window} tokens": window or "sliding_attention" in layers,
        f"the activation {of('hidden_act')}": of("hidden_act", "silu") != "silu",
        "layers without positions (no_rope_layers)": of("no_rope_layers"),
        "partly rotated heads (partial_rotary_factor)": rotated != 1.0,
    }
    if odd := [what for what, is_there in found.items() if is_there]:
        raise UserError(f"it has {odd[0]}, which our model does not")


def rope_settings(settings: dict) -> dict[str, Any]:
    """As transformers 5 writes them, or 4."""
    return settings.get("rope_parameters") or settings.get("rope_scaling") or {}


def rope_of(settings: dict) -> tuple[float, tuple[float, float, float, int] | None]:
    """Base and scaling of the rotary frequencies."""
    rope = rope_settings(settings)
    base = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise UserError(
            f"rotary positions are scaled by {kind!r}; supported: none and llama3"
        )
    names = [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ]
    if missing := [name for name in names if name not in rope]:
        raise UserError(f"its rotary scaling lacks {missing[0]}")
    factor, low, high, length = (rope[name] for name in names)
    return base, (float(factor), float(low), float(high), int(length))
