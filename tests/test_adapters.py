"""Adapters: trained alone on a frozen base, saved alone, resumed, merged when
loaded."""

import dataclasses
import json
import shutil

import pytest
import safetensors.torch
import torch
from helpers import (
    ALONE,
    assert_same_losses,
    change,
    make_data,
    run_script,
    tiny_config,
    write_config,
)
from reference import random_tokens

import train
from aogpt.checkpoints import CheckpointError, adapters, load, store
from aogpt.checkpoints.load import make_model
from aogpt.model import ModelConfig
from aogpt.runtime.errors import UserError
from aogpt.systems import build_model
from aogpt.training.adapters import add_adapters, alpha_of
from convert import convert

pytest.importorskip("peft")

SHAPE = ModelConfig(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=8)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return the configuration of a run of adapters, and the folder of its base."""
    folder = tmp_path_factory.mktemp("adapters")
    config = tiny_config(make_data(folder), folder / "out", name="base", steps=6)
    config = change(
        config,
        model__position="rotary",
        model__target="rotary",
        model__mlp="swiglu",
        model__dropout=0.0,
    )
    train.train(config, ALONE)
    convert(str(config.run_folder), folder / "base")
    config = change(
        config,
        name="tuned",
        train__init_from=str(folder / "base"),
        train__lora_rank=3,
        train__steps=8,
        optim__lr=1e-2,
        optim__warmup_steps=0,
    )
    train.train(config, ALONE)
    return config, folder / "base"


def test_adapters_of_shorter_blocks_than_those_of_their_base_are_loaded(
    tmp_path, capsys
):
    """The base has a table of positions, of which the run has fewer rows."""
    config = tiny_config(make_data(tmp_path), tmp_path / "out", name="base", steps=6)
    config = change(
        config,
        order__kind="l2r",
        objective__kind="ar",
        model__target="none",
        model__dropout=0.0,
    )
    train.train(config, ALONE)
    base = tmp_path / "base"
    convert(str(config.run_folder), base)
    config = change(
        config,
        name="tuned",
        train__init_from=str(base),
        train__lora_rank=2,
        model__block_size=8,
    )
    train.train(config, ALONE)
    said = capsys.readouterr().out
    assert "other than in its source: model.block_size = 8 (was 16)" in said
    convert(str(config.run_folder), tmp_path / "adapter", adapter=True)
    for model in (
        load(config.run_folder).model,
        load(tmp_path / "adapter").model,
        load(base, adapter=tmp_path / "adapter").model,
    ):
        assert model.config.block_size == 8
        rows = load(base).model.wpe.weight[: len(model.wpe.weight)]
        assert torch.equal(model.wpe.weight, rows)


class Wide(torch.nn.Module):
    """A layer in the place of an MLP, with names of its own."""

    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.shift = torch.nn.Linear(width, width)  # which it does not name as a matrix

    def matrices(self):
        return [(layer.weight, [len(layer.weight)]) for layer in (self.up, self.down)]


def test_adapters_are_of_the_matrices_that_a_layer_names():
    model = build_model(dataclasses.replace(SHAPE, mlp="swiglu"))
    model.blocks[1].mlp = Wide(SHAPE.n_embd)
    add_adapters(model, rank=2)
    adapted = {
        name.partition(".lora_")[0]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert adapted == {
        "blocks.0.attn.qkv",
        "blocks.0.attn.proj",
        "blocks.0.mlp.fc",
        "blocks.0.mlp.gate",
        "blocks.0.mlp.proj",
        "blocks.1.attn.qkv",
        "blocks.1.attn.proj",
        "blocks.1.mlp.up",
        "blocks.1.mlp.down",
    }


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_run_saves_its_adapters_alone_with_the_sha256_of_the_base(tuned):
    config, base = tuned
    path = store.find(config.run_folder)[-1]
    values = store.read_values(path)
    assert all(".lora_" in name for name in values["tensors"])
    assert values["adapter"] == {
        "rank": 3,
        "alpha": 6.0,
        "base": str(base),
        "base_sha256": adapters.weights_sha256(load(base).model),
    }
    tensors = store.read_all(path, values, "model.")
    assert len(tensors) == 2 * 5 * config.model.n_layer  # A and B of five matrices
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_merged_adapters_compute_what_peft_does_unmerged(tuned, weights):
    config, base = tuned
    path = store.find(config.run_folder)[-1]
    unmerged = load(base).model
    add_adapters(unmerged, 3)
    prefix = "ema." if weights == "ema" else "model."
    parts = store.read_all(path, store.read_values(path), prefix)
    assert not unmerged.load_state_dict(parts, strict=False).unexpected_keys
    tokens = random_tokens(vocab_size=257, batch_size=2, length=16, seed=1)
    order = torch.stack([torch.randperm(16) for _ in range(2)])
    with torch.no_grad():
        expected = unmerged.logits(tokens, order)
        merged = load(config.run_folder, weights=weights).model.logits(tokens, order)
        before = load(base).model.logits(tokens, order)
    assert (merged - expected).abs().max() < 1e-5
    assert (merged - before).abs().max() > 1e-3


@pytest.mark.parametrize("attn_bias", [False, True])
@pytest.mark.parametrize("target", ["two_stream", "mask_query", "rotary"])
def test_every_stream_reads_the_adapters(target, attn_bias):
    """The model that trains and the merged one compute the same."""
    shape = dataclasses.replace(
        SHAPE,
        target=target,
        attn_bias=attn_bias,
        position="rotary",
    )
    torch.manual_seed(1)
    model = build_model(shape)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_adapters(model, rank=2)
    parts = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)
            parts[name] = p.detach()
    adapter = {"rank": 2, "alpha": alpha_of(2)}
    tokens = random_tokens(vocab_size=64, batch_size=2, length=8, seed=1)
    order = torch.stack([torch.randperm(8) for _ in range(2)])
    with torch.no_grad():
        trained = model.logits(tokens, order)
        adapters.merge(base, parts, adapter)
        merged = make_model(shape, base).logits(tokens, order)
    assert (merged - trained).abs().max() < 1e-4


def test_an_exported_adapter_is_merged_into_the_base_that_is_given(tuned, tmp_path):
    config, base = tuned
    convert(str(config.run_folder), tmp_path / "adapter", adapter=True, dtype="float32")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter.safetensors",
        "config.json",
    }
    expected = parameters(load(config.run_folder).model)
    moved = shutil.copytree(base, tmp_path / "moved")
    for loaded in (
        load(tmp_path / "adapter"),
        load(moved, adapter=tmp_path / "adapter"),
        load(moved, adapter=config.run_folder),
    ):
        merged = parameters(loaded.model)
        assert all(torch.equal(merged[name], p) for name, p in expected.items())
        assert loaded.tokenizer == "bytes"
        assert loaded.step == 8
    convert(str(tmp_path / "adapter"), tmp_path / "merged")
    merged = parameters(load(tmp_path / "merged").model)
    assert all(torch.equal(merged[name], p) for name, p in expected.items())


def test_an_exported_adapter_is_bfloat16_unless_another_type_is_named(tuned, tmp_path):
    """Half the space. Each factor is rounded to 8 bits, so each entry of a product
    moves by at most 2^-7 of the sum of the absolute values that it adds up."""
    config, base = tuned
    run = str(config.run_folder)
    convert(run, tmp_path / "half", adapter=True)
    convert(run, tmp_path / "whole", adapter=True, dtype="float32")
    small, large = [
        safetensors.torch.load_file(tmp_path / name / "adapter.safetensors")
        for name in ("half", "whole")
    ]
    assert {tensor.dtype for tensor in small.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in large.values()} == {torch.float32}
    exported = parameters(load(tmp_path / "half").model)
    expected = parameters(load(tmp_path / "whole").model)
    before = parameters(load(base).model)
    moved = 0
    for name, tensor in large.items():
        module, _, factor = name.partition(".lora_")
        if factor != "A.weight":
            continue
        other = large[f"{module}.lora_B.weight"]
        weight = f"{module}.weight"
        limit = 2 * 2**-7 * (other.abs() @ tensor.abs())  # alpha / rank is 2
        difference = (exported[weight] - expected[weight]).abs()
        assert (difference <= limit + 1e-6).all()
        assert not torch.equal(exported[weight], before[weight])
        moved += int((difference > 0).sum())
    assert moved > 0, "the rounding shows"


def test_an_adapter_whose_checkpoint_is_replaced_meanwhile_is_the_newest(
    tuned, tmp_path, monkeypatch
):
    """A run that is training removes the checkpoint between its values and its
    tensors."""
    config, _ = tuned
    run = shutil.copytree(config.run_folder, tmp_path / "run")
    path = store.find(run)[-1]
    read_all = store.read_all

    def replaced(checkpoint, values, prefix=""):
        if checkpoint == path:
            path.rename(store.path_of(run, 9))
        return read_all(checkpoint, values, prefix)

    monkeypatch.setattr(store, "read_all", replaced)
    convert(str(run), tmp_path / "adapter", adapter=True)
    convert(str(run), tmp_path / "merged")
    assert not path.exists()
    expected = parameters(load(config.run_folder).model)
    merged = parameters(load(tmp_path / "merged").model)
    assert all(torch.equal(merged[name], p) for name, p in expected.items())


def test_another_base_a_damaged_file_and_a_run_without_adapters_are_refused(
    tuned, tmp_path
):
    config, base = tuned
    convert(str(config.run_folder), tmp_path / "adapter", adapter=True)
    other = config.run_folder.with_name("base")
    convert(str(other), tmp_path / "raw", weights="raw")
    with pytest.raises(CheckpointError, match="another sha256"):
        load(tmp_path / "raw", adapter=tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="trained all weights"):
        load(base, adapter=other)
    with pytest.raises(CheckpointError, match="not a run with --train.lora-rank"):
        convert(str(other), tmp_path / "none", adapter=True)
    file = tmp_path / "adapter" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "config.json").read_text())
    settings["adapter"]["rank"] = 30
    (tmp_path / "adapter" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "adapter")


def test_a_run_of_adapters_resumes_exactly(tuned, tmp_path):
    config, _ = tuned
    parts = change(config, out=str(tmp_path), train__steps=8, checkpoint__interval=3)
    train.train(change(parts, train__steps=3, optim__decay_steps=8), ALONE)
    train.train(change(parts, optim__decay_steps=8), ALONE)
    whole = change(parts, name="whole", optim__decay_steps=8)
    train.train(whole, ALONE)
    resumed = parameters(load(parts.run_folder, weights="raw").model)
    for name, p in parameters(load(whole.run_folder, weights="raw").model).items():
        assert torch.equal(p, resumed[name]), name
    with pytest.raises(UserError, match="rank of the adapters"):
        train.train(change(parts, train__lora_rank=4, train__steps=9), ALONE)


@pytest.mark.slow(reason="starts two processes")
def test_two_processes_train_the_adapters_of_one(tuned, tmp_path):
    config, _ = tuned
    alone = change(config, out=str(tmp_path), name="alone")
    two = change(alone, name="two")
    train.train(alone, ALONE)
    run_script("tests/parallel_jobs.py", 2, f"run={write_config(two)}")
    assert_same_losses(two, alone, 1e-5)
    expected = parameters(load(alone.run_folder).model)
    for name, p in parameters(load(two.run_folder).model).items():
        assert (p - expected[name]).abs().max() < 1e-4, name


def test_what_cannot_be_adapted_is_refused(tuned, tmp_path):
    config, _ = tuned
    with pytest.raises(UserError, match="set train.init_from"):
        change(config, train__init_from="")
    with pytest.raises(UserError, match="train.parallel to 'ddp'"):
        change(config, train__parallel="fsdp")
    with pytest.raises(UserError, match="optim.kind = 'adamw'"):
        change(config, optim__kind="muon")
    plain = tiny_config(config.data.folder, tmp_path, name="plain", steps=5)
    model = dataclasses.replace(config.model, target="none")
    plain = change(plain, order__kind="l2r", objective__kind="ar", model=model)
    train.train(plain, ALONE)
    new = change(
        config,
        out=str(tmp_path),
        model=dataclasses.replace(config.model, target="shared"),
        train__init_from=str(plain.run_folder),
    )
    with pytest.raises(UserError, match="the model adds wtpe.weight"):
        train.train(new, ALONE)
