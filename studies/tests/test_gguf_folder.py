"""A GGUF file of Llama's layout becomes a folder that loads."""

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
from test_pretrained import KINDS, TEXT, write_model

from aogpt.checkpoints import load
from aogpt.runtime.errors import UserError
from studies import gguf_folder

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")


def of_merges():
    """Return a tokenizer of bytes and of a pair that TEXT has often, as SmolLM2's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    of_bytes = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = of_bytes(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=259,  # as of `write_model`
        initial_alphabet=of_bytes.alphabet(),
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def write_gguf(path, folder, quantised=False, split="smollm"):
    """Write a folder of `transformers` as llama.cpp's converter does. split: the name
    of the way in which its tokenizer splits text."""
    settings = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_eos_token_id(settings["eos_token_id"])
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    blocks = {theirs: ours for ours, theirs in gguf_folder.BLOCK.items()}
    outer = {theirs: ours for ours, theirs in gguf_folder.OTHERS.items()}
    heads = {
        "attn_q": settings["num_attention_heads"],
        "attn_k": settings["num_key_value_heads"],
    }
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        values = tensor.numpy()
        ours = outer.get(module)
        if ours is None:
            _, _, layer, part = module.split(".", 3)
            ours = f"blk.{layer}.{blocks[part]}"
            count = heads.get(blocks[part])
            if count:  # neighbours rotate together
                pairs = values.reshape(count, 2, -1, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{ours}.weight", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{ours}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_converted_file_is_the_model_of_its_folder(quantised, tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "Llama", {})  # without scaled positions
    folder = tmp_path / "folder"
    write_model(folder, "Llama", intermediate_size=64)
    of_merges().save(str(folder / "tokenizer.json"))
    write_gguf(tmp_path / "model.gguf", folder, quantised, split="gpt-2")
    gguf_folder.convert(tmp_path / "model.gguf", tmp_path / "converted")
    expected = load(folder)
    loaded = load(tmp_path / "converted")
    weights = dict(loaded.model.named_parameters())
    largest = 0.0
    for name, p in expected.model.named_parameters():
        difference = (weights[name] - p).abs().max().item()
        largest = max(largest, difference)
        assert difference < (0.01 if quantised else 1e-12), name
    assert (largest > 0) == quantised
    ids = expected.get_tokenizer().encode(TEXT[0])
    assert loaded.get_tokenizer().encode(TEXT[0]) == ids
    config = loaded.model.config  # the file has the epsilon of the norms in float32
    assert config.norm_eps == pytest.approx(expected.model.config.norm_eps)
    assert replace(config, norm_eps=1.0) == replace(expected.model.config, norm_eps=1.0)


def test_another_way_of_splitting_text_is_refused(tmp_path):
    folder = tmp_path / "folder"
    write_model(folder, "Llama")
    of_merges().save(str(folder / "tokenizer.json"))
    write_gguf(tmp_path / "model.gguf", folder, split="default")
    with pytest.raises(UserError, match="splits text as 'default'"):
        gguf_folder.convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
