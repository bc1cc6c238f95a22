"""GGUF files (llama.cpp) of Llama's and Qwen's layouts, dequantised: the settings,
tensors and tokenizer of `pretrained`, under the names of `transformers`."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.tokenizers import HUB, HUB_SETTINGS
from ..runtime.errors import UserError, reason_of
from .tensors import LazyTensors

ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
BLOCK = {  # modules of blk.N: modules of model.layers.N
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
DIGITS = ("smollm",)  # tokenizers that read each digit by itself, else as GPT-2's
PLAIN = "gpt-2"
NORMAL = 1  # the type of a token of the vocabulary
CONTROL = 3  # the type of a token that is not text


class GGUFTokenizer(NamedTuple):
    """The tokenizer of a GGUF file."""

    tokens: dict[int, str]  # those of its vocabulary, by id, without added ones
    # Text by name; none where it is not of bytes, or splits text in a way that is
    # unknown here.
    files: dict[str, str]


def read_gguf(path: Path) -> tuple[dict[str, Any], LazyTensors, GGUFTokenizer]:
    """Return the settings of a config.json, the tensors, each dequantised when it is
    looked up, and the tokenizer. Raises UserError."""
    try:
        import gguf
    except ImportError:
        raise UserError("a .gguf file needs a package: pip install gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of NumPy and of the library, for damaged files
        raise UserError(f"it is not a whole GGUF file ({reason_of(error)})") from error
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"its architecture is {kind!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in stored:
        raise UserError(
            "its rotary frequencies are a table (Llama 3.1 and later): use the "
            "safetensors of the model"
        )
    settings = settings_of(kind, fields, tied="output.weight" not in stored)
    heads = {}
    if kind == "llama":  # whose rows llama.cpp interleaves, to rotate neighbours
        heads = {
            "attn_q": settings["num_attention_heads"],
            "attn_k": settings["num_key_value_heads"],
        }
    tensors = LazyTensors()
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        part = module.rpartition(".")[2]
        layer = module.split(".")[1] if module.startswith("blk.") else None
        theirs = OTHERS.get(module)
        if layer is not None and part in BLOCK:
            theirs = f"model.layers.{layer}.{BLOCK[part]}"
        if theirs is None:
            raise UserError(f"our model has no place for {name}")
        tensors.data[f"{theirs}.{leaf}"] = partial(dequantised, tensor, heads.get(part))
    kinds = fields.get("tokenizer.ggml.token_type", ())
    tokens = {}
    for i, token in enumerate(fields.get("tokenizer.ggml.tokens", ())):
        if i >= len(kinds) or kinds[i] == NORMAL:
            tokens[i] = token
    return settings, tensors, GGUFTokenizer(tokens, tokenizer_files(fields))


def settings_of(kind: str, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return the fields of a file as a config.json of `transformers`."""

    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"{kind}.{name}", default)

    scaling = field("rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"rotary positions are scaled by {scaling!r}; supported: none")
    for name in ("rope.scaling.factor", "rope.scale_linear"):  # without a type: linear
        if field(name, 1.0) != 1:
            raise UserError(
                f"rotary positions are scaled ({name} {field(name):g}); supported: none"
            )
    rotated = field("rope.dimension_count")
    width = field("attention.key_length")
    embedding = field("embedding_length")
    heads = field("attention.head_count")
    # What is missing or no number is refused where the settings are checked.
    if width is None and isinstance(embedding, int) and isinstance(heads, int):
        width = embedding // max(heads, 1)
    if None not in (rotated, width) and rotated != width:
        raise UserError(
            f"{rotated} of {width} dimensions of a head are rotated; supported: all"
        )
    window = field("attention.sliding_window")
    return {
        "architectures": [f"{ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field(
            "attention.head_count_kv", field("attention.head_count")
        ),
        "head_dim": field("attention.key_length"),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": field("rope.freq_base", 10000.0),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": tied,
    }


def dequantised(tensor: Any, heads: int | None) -> Tensor:
    """Return a tensor of a GGUF file as float32, (out, in) or (width,). heads: the
    number of heads of queries or keys whose rows are interleaved."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if heads is not None:
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(values))


def tokenizer_files(fields: dict[str, Any]) -> dict[str, str]:
    """Return `GGUFTokenizer.files` of the fields of a file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Files without a name, or with "default", split words in one of several ways.
    split = fields.get("tokenizer.ggml.pre")
    if fields.get("tokenizer.ggml.model") != "gpt2" or split not in (*DIGITS, PLAIN):
        return {}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for merge in merges:  # the library ends in a panic
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise UserError(
                f"its tokenizer joins {' and '.join(merge)}, which are not two of its "
                "tokens or make none; get it again"
            )
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split in DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", ())
    special = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
    library.add_special_tokens(special)
    settings = {}
    for name in ("bos", "eos"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    settings["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    return {HUB: library.to_str(), HUB_SETTINGS: json.dumps(settings)}
