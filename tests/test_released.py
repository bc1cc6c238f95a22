"""Released weights: every layout gives the probabilities of its formulas; whatever else
is there is refused; convert.

The formulas are those of reference.py, in float64; the names of the releases are
written out here. GPT-2 is compared with `transformers` itself."""

import json
import math
import os
import random
import shutil

import pytest
import safetensors.torch
import torch
from helpers import flip_byte, limited_file_size, run_script
from reference import (
    encoder_outputs,
    log_probs,
    make_system,
    random_orders,
    random_tokens,
)

from aogpt.checkpoints import CheckpointError, load, load_model, store
from aogpt.runtime.errors import UserError
from aogpt.scoring import masked_log_probs, token_log_probs
from convert import convert

VOCAB = 37
WIDTH = 24
LAYERS = 2
HEADS = 3
BLOCK = 11
TOKENS = 31  # of the tokenizer, where [MASK] follows


# Modules of the releases and ours, in the order of the releases' parameters().
GPT_BLOCK = (
    "ln_1:norm1 attn.c_attn:attn.qkv attn.c_proj:attn.proj attn.q_norm:attn.q_norm "
    "attn.k_norm:attn.k_norm ln_2:norm2 mlp.c_fc:mlp.fc mlp.c_proj:mlp.proj "
    "adaLN.1:adaln"
)
DIFFUSION_BLOCK = (
    "norm1:norm1 attn_qkv:attn.qkv attn_out:attn.proj norm2:norm2 mlp.0:mlp.fc "
    "mlp.2:mlp.proj adaLN_modulation:adaln"
)
DIFFUSION_REST = (
    "sigma_map.mlp.0:noise.fc sigma_map.mlp.2:noise.proj output_layer.linear:head "
    "output_layer.norm_final:norm_f output_layer.adaLN_modulation:adaln_f"
)


def named(model, modules, theirs="", ours=""):
    """Yield the weights and biases that a model has of these modules, by the names of a
    release."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, our in (pair.split(":") for pair in modules.split()):
        for kind in ("weight", "bias"):
            if f"{ours}{our}.{kind}" in parameters:
                yield f"{theirs}{name}.{kind}", parameters[f"{ours}{our}.{kind}"]


def gpt(layout, seed):
    """(a random AO-GPT or sigma-GPT, its state dict in the order of the release's
    parameters())."""
    has_bias = "no bias" not in layout
    model = make_system(
        layout.partition(",")[0],
        seed,
        torch.float32,
        vocab_size=VOCAB,
        cond_dim=128,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        block_size=BLOCK,
        attn_bias=has_bias,
        mlp_bias=has_bias,
        norm_bias=has_bias,
    )
    state = dict(named(model, "wte:wte wpe:wpe wtpe:wtpe", "transformer."))
    state["transformer.wnonee.weight"] = model.start.detach()[None].clone()
    for i in range(LAYERS):
        state.update(named(model, GPT_BLOCK, f"transformer.h.{i}.", f"blocks.{i}."))
    final = "transformer.final_layer." if layout == "AO-GPT" else "transformer."
    state.update(named(model, "ln_f:norm_f adaLN_final.1:adaln_f", final))
    state.update(named(model, "lm_head:head"))
    assert len(state) == len(list(model.parameters()))
    return model, state


def container(layout="AO-GPT", prefix="", **changes):
    """(contents of the .pt file, the model of its last weights, of the averaged
    ones)."""
    raw, state = gpt(layout, 1)
    average, shadow = gpt(layout, 2)
    if layout != "AO-GPT":
        state["lm_head.weight"] = state["transformer.wte.weight"]
    contents = {
        "model_args": {
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_embd": WIDTH,
            "block_size": BLOCK,
            "bias": "no bias" not in layout,
            "vocab_size": VOCAB,
            "dropout": 0.0,
        },
        "model": {prefix + name: tensor for name, tensor in state.items()},
        "ema_model": {
            "decay": 0.9999,
            "num_updates": 7,
            "shadow_params": list(shadow.values()),
        },
        "iter_num": 1234,
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
        "optimizer": {"state": {}, "param_groups": [{"lr": 6e-4, "params": [0, 1]}]},
        "best_val_loss": torch.tensor(3.5),
    }
    return contents | changes, raw, average


def diffusion(layout):
    """(config.json, state dict, the model) of "RADD" or "SEDD"."""
    model = make_system(
        layout,
        3,
        torch.float32,
        tokens=TOKENS,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        block_size=BLOCK,
    )
    state = {"vocab_embed.embedding": model.wte.weight.detach().clone()}
    for i in range(LAYERS):
        state.update(named(model, DIFFUSION_BLOCK, f"blocks.{i}.", f"blocks.{i}."))
    state.update(named(model, DIFFUSION_REST))
    assert len(state) == len(list(model.parameters()))
    head = WIDTH // HEADS
    exponents = torch.arange(0, head, 2).float() / head
    state["rotary_emb.inv_freq"] = 1.0 / 10000**exponents
    settings = {
        "ngpus": 8,
        "tokens": TOKENS,
        "graph": {"type": "absorb"},
        "model": {
            "hidden_size": WIDTH,
            "n_blocks": LAYERS,
            "n_heads": HEADS,
            "dropout": 0.1,
        },
    }
    if layout == "SEDD":
        settings["model"]["scale_by_sigma"] = True
        settings["model"]["length"] = BLOCK
    return settings, state, model


def write_diffusion(folder, layout, name="model.safetensors"):
    """Write a folder of a random RADD or SEDD and return it."""
    settings, state, _ = diffusion(layout)
    return write_folder(folder, settings, state, name)


def plain(model):
    """Return the parameters in float64, for reference.py."""
    return {name: p.detach().double() for name, p in model.named_parameters()}


def write_folder(folder, settings, state, name="model.safetensors"):
    """Write a Hugging Face folder, the .bin as it was written before PyTorch 1.6."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if name.endswith("safetensors"):
        state = {key: tensor.clone().contiguous() for key, tensor in state.items()}
        safetensors.torch.save_file(state, folder / name, metadata={"format": "pt"})
    else:
        torch.save(state, folder / name, _use_new_zipfile_serialization=False)
    return folder


PT_LAYOUTS = ("AO-GPT", "sigma-GPT", "sigma-GPT, no bias")


@pytest.fixture
def released(tmp_path):
    return tmp_path / "released.pt"


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
@pytest.mark.parametrize("layout", PT_LAYOUTS)
def test_a_released_decoder_gives_the_probabilities_of_its_formulas(
    released, layout, prefix
):
    contents, raw, average = container(layout, prefix)
    if prefix:  # the average follows the order of the parameters, not that of the file
        contents["model"] = dict(reversed(contents["model"].items()))
    torch.save(contents, released)
    tokens = random_tokens(VOCAB, 2, BLOCK, seed=0)
    order = torch.cat([random_orders(1, BLOCK, seed=0), torch.arange(BLOCK)[None]])
    for weights, model in (("ema", average), ("raw", raw)):
        loaded = load(released, weights=weights)
        assert (loaded.weights, loaded.step, loaded.scored_from) == (weights, 1234, 0)
        assert (loaded.tokenizer, loaded.vocab_size) == ("gpt2", VOCAB)
        assert not loaded.model.training
        expected = log_probs(model.config, plain(model), tokens, order)
        got = token_log_probs(loaded.model.double(), tokens, order)
        # float64 rounding only: the weights themselves are the file's, exactly
        assert (got - expected).abs().max() < 1e-9


def test_without_an_average_the_last_weights_are_used_and_reported(released):
    contents, raw, _ = container()
    del contents["ema_model"], contents["iter_num"]
    torch.save(contents, released, _use_new_zipfile_serialization=False)
    loaded = load(released)
    assert (loaded.weights, loaded.step) == ("raw", 0)
    assert "raw weights" in loaded.description
    same_weights(loaded.model, raw)


def test_a_vocabulary_that_is_padded_counts_as_the_tokenizers(released):
    contents, _, _ = container("sigma-GPT", ema_model=None)
    contents["model_args"]["vocab_size"] = 50304
    for name in ("transformer.wte.weight", "lm_head.weight"):
        contents["model"][name] = torch.zeros(50304, WIDTH)
    torch.save(contents, released)
    loaded = load(released)
    assert (loaded.vocab_size, loaded.model.config.vocab_size) == (50257, 50304)


def test_a_folder_with_one_pt_file_is_that_file_and_with_two_an_error_that_names_them(
    tmp_path,
):
    torch.save(container()[0], tmp_path / "small.pt")
    assert load(tmp_path).path == str(tmp_path / "small.pt")
    shutil.copy(tmp_path / "small.pt", tmp_path / "medium.pt")
    message = r"medium\.pt, small\.pt; give the path of one file"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_two_names_that_are_one_without_their_prefix_are_refused(released):
    contents, _, _ = container()
    table = contents["model"]["transformer.wte.weight"]
    contents["model"]["_orig_mod.transformer.wte.weight"] = 2 * table
    torch.save(contents, released)
    words = "two tensors of the name transformer.wte.weight"
    with pytest.raises(CheckpointError, match=words):
        load(released)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layout, limit", [("RADD", 1e-9), ("SEDD", 1e-5)])
def test_a_released_encoder_gives_the_probabilities_of_its_formulas(
    tmp_path, layout, limit, file
):
    """Frequencies of SEDD's noise embedding are float32, as in the release: 2^-24 of an
    angle of up to 7."""
    settings, state, reference = diffusion(layout)
    prefix = "module." if layout == "SEDD" else ""
    prefixed = {prefix + name: tensor for name, tensor in state.items()}
    loaded = load(write_folder(tmp_path, settings, prefixed, file))
    assert (loaded.tokenizer, loaded.vocab_size) == ("gpt2", TOKENS)
    assert (loaded.weights, loaded.step) == ("raw", 0)
    # RADD's file does not say
    assert loaded.model.config.block_size == (BLOCK if layout == "SEDD" else 1024)
    tokens = random_tokens(TOKENS, 3, BLOCK, seed=1)
    masked = random_tokens(2, 3, BLOCK, seed=1).bool()
    masked[0] = True
    sigma = None
    if layout == "SEDD":
        sigma = -(1 - (1 - 1e-3) * masked.double().mean(1)).log()
    config = reference.config
    outputs = encoder_outputs(config, plain(reference), tokens, masked, sigma)
    expected = outputs.log_softmax(-1).gather(2, tokens[..., None]).squeeze(2) * masked
    got = masked_log_probs(loaded.model.double(), tokens, masked)
    assert (got - expected).abs().max() < limit
    if sigma is not None:  # else the comparison would not show that the noise is right
        other = encoder_outputs(config, plain(reference), tokens, masked, sigma / 3)
        assert (other - outputs).abs().max() > 0.1
    by_file = load_model(tmp_path / file)
    assert torch.equal(by_file.wte.weight, state["vocab_embed.embedding"])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """(a small random GPT-2 of transformers in float64, its folder)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=BLOCK, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    reference = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            size = 0.3 if p.dim() == 1 else 0.5 if "wte" in name else 0.2
            p.add_(torch.randn(p.shape, generator=generator) * size)
    reference.save_pretrained(folder)
    return reference.double(), folder


def gpt2_files(reference, original, folder, kind):
    if kind == "saved by transformers":
        return original
    settings = json.loads((original / "config.json").read_text())
    state = {name: tensor.float() for name, tensor in reference.state_dict().items()}
    mask = torch.ones(1, 1, BLOCK, BLOCK).tril()
    if kind == "bin with the masks of old versions":
        for attention in ("transformer.h.0.attn", "transformer.h.1.attn"):
            state[f"{attention}.bias"] = mask.bool()
            state[f"{attention}.masked_bias"] = torch.tensor(-1e4)
        return write_folder(folder, settings, state, "pytorch_model.bin")
    del state["lm_head.weight"]
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    state["h.0.attn.bias"] = mask
    state["h.1.attn.bias"] = mask
    return write_folder(folder, settings, state)


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    ["saved by transformers", "bin with the masks of old versions", "without prefix"],
)
def test_gpt2_gives_the_probabilities_of_transformers(gpt2, tmp_path, kind):
    reference, original = gpt2
    loaded = load(gpt2_files(reference, original, tmp_path, kind))
    assert (loaded.scored_from, loaded.weights, loaded.step) == (1, "raw", 0)
    assert loaded.vocab_size == VOCAB
    tokens = random_tokens(VOCAB, 3, BLOCK, seed=5)
    logits = reference(tokens).logits
    expected = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    got = token_log_probs(
        loaded.model.double(), tokens, torch.arange(BLOCK).expand(3, BLOCK)
    )
    assert (got[:, loaded.scored_from :] - expected).abs().max() < 1e-9
    assert got[:, 0].isfinite().all()
    assert expected.std() > 0.5


def refused(path, *words, **keywords):
    with pytest.raises(CheckpointError) as error:
        load(path, **keywords)
    message = str(error.value)
    for word in (str(path), *words):
        assert word in message, f"{word!r} is not in: {message}"


LAYOUT_NAMES = ["AO-GPT", "sigma-GPT", "GPT-2", "RADD", "SEDD"]


def test_a_folder_with_an_unrelated_config_is_an_error(tmp_path):
    bert = {"bert.embeddings.word_embeddings.weight": torch.zeros(3, 4)}
    folder = write_folder(tmp_path / "bert", {"model_type": "bert"}, bert)
    refused(folder, "bert.embeddings.word_embeddings.weight", *LAYOUT_NAMES)
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no", "model.safetensors or pytorch_model.bin", *LAYOUT_NAMES)
    state = diffusion("RADD")[1]
    folder = write_folder(tmp_path / "other", {"tokens": TOKENS}, state)
    refused(
        folder, "named as in RADD", "n_blocks in model_args, or in config.json beside"
    )
    (folder / "config.json").write_text("{not json")
    refused(folder, "config.json: this is not JSON")


def test_no_flipped_byte_of_a_pt_file_goes_unnoticed_unless_it_changes_nothing(
    released,
):
    """The checksums of its zip file leave out what fills its gaps. Checkpoints and
    exports have a sha256 of each file."""
    torch.save(container()[0], released)
    expected = load_model(released)
    original = released.read_bytes()
    rng = random.Random(7)
    noticed = 0
    for _ in range(40):
        released.write_bytes(original)
        flip_byte(released, rng.randrange(len(original)), rng.randrange(1, 256))
        try:
            model = load_model(released)
        except CheckpointError as error:
            assert str(released) in str(error)
            noticed += 1
        else:
            same_weights(model, expected)
    assert noticed > 20


@pytest.mark.parametrize(
    "file, share",
    [("model.safetensors", 0.999), ("pytorch_model.bin", 0.5), ("released.pt", 0)],
)
def test_truncated_files_are_an_error_that_names_them(tmp_path, file, share):
    path = tmp_path / file
    torch.save(container()[0], path)
    if file != "released.pt":
        write_diffusion(tmp_path, "RADD", file)
    os.truncate(path, int(path.stat().st_size * share))
    refused(path, "cannot be read", "supported are")


WRONG = {  # changes the tensors of an AO-GPT -> what the message says
    "missing": (
        lambda t: [t.pop(f"transformer.h.1.attn.{name}_norm.weight") for name in "qk"],
        "it lacks blocks.1.attn.k_norm.weight, blocks.1.attn.q_norm.weight",
    ),
    "unknown": (
        lambda t: t.update({"transformer.h.0.attn.gate": torch.zeros(2)}),
        "the model has no place for transformer.h.0.attn.gate",
    ),
    "a wrong shape": (
        lambda t: t.update({"lm_head.bias": torch.zeros(VOCAB + 1)}),
        "head.bias is (38,) of torch.float32 in the file, (37,)",
    ),
    "integers": (
        lambda t: t.update({"lm_head.bias": torch.zeros(VOCAB).long()}),
        "head.bias is (37,) of torch.int64",
    ),
    "NaN": (
        lambda t: t.update({"lm_head.bias": torch.full((VOCAB,), math.nan)}),
        "numbers that are not finite",
    ),
}


@pytest.mark.parametrize("mistake_name", WRONG)
def test_wrong_tensors_are_named(released, mistake_name):
    contents = container()[0]
    change, words = WRONG[mistake_name]
    change(contents["model"])
    torch.save(contents, released)
    refused(released, words, "supported are", weights="raw")


def test_an_average_that_lacks_a_tensor_and_another_head_are_refused(released):
    contents = container()[0]
    contents["ema_model"]["shadow_params"].pop()
    torch.save(contents, released)
    refused(released, "lacks shadow_params, a list of 37 tensors")
    contents = container("sigma-GPT")[0]
    contents["model"]["lm_head.weight"] = torch.ones(VOCAB, WIDTH)
    torch.save(contents, released)
    refused(released, "lm_head.weight and transformer.wte.weight differ")


def test_settings_that_the_model_has_no_place_for_are_refused(gpt2, tmp_path):
    settings, state, _ = diffusion("SEDD")
    settings["model"]["scale_by_sigma"] = False
    refused(write_folder(tmp_path / "a", settings, state), "scale_by_sigma is False")
    settings = json.loads((gpt2[1] / "config.json").read_text())
    state = safetensors.torch.load_file(gpt2[1] / "model.safetensors")
    for name, value in (
        ("activation_function", "relu"),
        ("scale_attn_by_inverse_layer_idx", True),
    ):
        folder = write_folder(tmp_path / name, settings | {name: value}, state)
        refused(folder, name, repr(value))


def test_a_repo_id_without_network_is_a_clear_error(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = "there is no some-org/some-model here.*Hugging Face"
    with pytest.raises((UserError, OSError), match=message):  # told in one line
        convert("some-org/some-model", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_repo_that_the_cache_holds_is_loaded_by_its_id(tmp_path, monkeypatch):
    import huggingface_hub

    settings, state, _ = diffusion("RADD")
    cached = tmp_path / "models--org--radd-1.5"
    write_folder(cached / "snapshots" / "abc", settings, state, "pytorch_model.bin")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = load("org/radd-1.5").model
    assert torch.equal(model.wte.weight, state["vocab_embed.embedding"])


def same_weights(a, b):
    a = dict(a.named_parameters())
    b = dict(b.named_parameters())
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_an_export_of_every_layout_loads_back_the_same(gpt2, tmp_path, capsys, layout):
    source = gpt2[1]
    if layout in PT_LAYOUTS:
        source = tmp_path / "released.pt"
        torch.save(container(layout)[0], source)
    elif layout != "GPT-2":
        source = write_diffusion(tmp_path / layout, layout)
    original = load(source)
    convert(str(source), tmp_path / "export")
    loaded = load(tmp_path / "export")
    same_weights(loaded.model, original.model)
    assert loaded.model.config == original.model.config
    assert loaded.system == layout
    for name in ("step", "weights", "tokenizer", "vocab_size", "scored_from", "system"):
        assert getattr(loaded, name) == getattr(original, name)
    assert loaded.path == str(tmp_path / "export" / "model.safetensors")
    out = capsys.readouterr().out
    assert str(source) in out
    assert f"wrote {tmp_path}/export" in out


def test_tensors_that_are_views_of_one_storage_are_read_and_converted(
    released, tmp_path
):
    contents, raw, _ = container()
    state = contents["model"]
    storage = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = storage.split([tensor.numel() for tensor in state.values()])
    for (name, tensor), part in zip(list(state.items()), parts, strict=True):
        state[name] = part.view_as(tensor)
    state["lm_head.bias"] = torch.zeros(1).expand(VOCAB)
    torch.save(contents, released)
    with torch.no_grad():
        raw.head.bias.zero_()
    same_weights(load(released, "raw").model, raw)
    convert(str(released), tmp_path / "export", weights="raw")
    same_weights(load(tmp_path / "export").model, raw)


def test_tensors_that_overlap_in_a_safetensors_file_are_refused(tmp_path):
    path = write_diffusion(tmp_path, "RADD") / "model.safetensors"
    contents = path.read_bytes()
    size = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + size])
    first = header["blocks.0.attn_out.weight"]
    header["blocks.1.attn_out.weight"]["data_offsets"] = first["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + contents[8 + size :])
    refused(path, "invalid offset for tensor")


def test_convert_as_a_process(run, tmp_path):
    export = tmp_path / "new" / "raw"
    done = run_script("convert.py", run, export, "--weights", "raw")
    assert "step 40, raw weights" in done.stdout
    settings = json.loads((export / "config.json").read_text())
    origin = [settings[name] for name in ("source", "weights", "step")]
    assert origin == [str(run), "raw", 40]
    same_weights(load_model(export), load_model(run, "raw"))


def test_an_export_holds_one_set_of_weights_and_says_so_when_the_other_is_asked_for(
    run, tmp_path
):
    ema = tmp_path / "ema"
    convert(str(run), ema)
    same_weights(load_model(ema), load_model(run, "ema"))
    refused(ema, "ema weights only", "--weights raw", weights="raw")
    settings = json.loads((ema / "config.json").read_text())
    for changes, words in (
        (
            {"files": {"model.safetensors": "0" * 64}},
            "model.safetensors is damaged (checksum)",
        ),
        ({"vocab_size": 999}, "has a vocabulary of 999, but its model"),
        ({"format": "aogpt-export-9"}, "not of the format aogpt-export-2"),
        ({"step": -1}, "step"),
        ({"model": None}, "model"),
    ):
        changed = settings | changes
        text = json.dumps(changed | {"sha256": store.digest(changed)})
        (ema / "config.json").write_text(text)
        refused(ema, words)


def test_an_export_in_bfloat16_is_half_as_large_and_loads_as_its_rounded_weights(
    run, tmp_path
):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        convert(str(run), tmp_path / dtype, dtype=dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    # names, too
    assert 0.5 * sizes["float32"] <= sizes["bfloat16"] < 0.6 * sizes["float32"]
    exact = load_model(tmp_path / "float32")
    rounded = load_model(tmp_path / "bfloat16")
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(b, a.bfloat16().float())


def test_convert_leaves_what_exists_alone_and_nothing_half_written(run, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists already"):
        convert(str(run), tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    with (
        pytest.raises(CheckpointError, match="could not write .*new: .*File too large"),
        limited_file_size(1000),
    ):
        convert(str(run), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_of_two_that_convert_into_one_folder_the_later_one_says_so(
    run, tmp_path, monkeypatch
):
    def digest_later(settings):
        monkeypatch.setattr("convert.digest", store.digest)
        convert(str(run), tmp_path / "new")
        return store.digest(settings)

    monkeypatch.setattr("convert.digest", digest_later)
    with pytest.raises(CheckpointError, match="could not write .*new: .*not empty"):
        convert(str(run), tmp_path / "new")
    assert load_model(tmp_path / "new")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_best_that_cannot_be_named_leaves_the_new_checkpoint_whole(
    run, tmp_path, capsys, monkeypatch
):
    """It is a warning of `best`, and none that the checkpoint could not be written."""
    copy = shutil.copytree(run, tmp_path / "run")
    older, path = store.find(copy)
    values = store.read_values(path)

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_text", full)
    best = {"step": store.step_of(older), "loss": 1.0}
    store.settle(copy, {**values, "best": best}, keep=9)
    said = capsys.readouterr().err
    assert "warning: could not write" in said and "best" in said
    assert store.read_values(path) == values
