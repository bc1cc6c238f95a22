"""Queries that are a [MASK] at the target (`model.target = "mask_query"`): what only
they have. test_model.py and test_systems.py have their formulas."""

import json
import math

import pytest
import torch
from helpers import ALONE, change, metrics, tiny_config
from reference import TINY, make_system, parameters, random_text, tiny_model
from torch.utils.flop_counter import FlopCounterMode

import eval_ppl
import train
from aogpt.model import ModelConfig
from aogpt.systems import build_model, flops_per_token, parameter_counts, set_block_size

LENGTH = TINY["block_size"]


def test_a_training_step_in_bfloat16_is_near_the_exact_one():
    model = make_system("mask_query, rotary", dtype=torch.float32)
    tokens, order = random_text(4, LENGTH)
    exact = model(tokens, order)
    exact.mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens, order)
    rounded.mean().backward()
    assert (rounded - exact).abs().max() < 0.3
    assert exact.std() > 0.3
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).norm() < 0.1 * gradients[name].norm(), name


def test_its_parameters_and_its_length():
    """test_model.py has one of rotary positions, which takes other lengths."""
    model = make_system("mask_query")
    names = set(parameters(make_system("AO-GPT", target="none")))
    assert set(parameters(model)) == names - {"start"} | {"query"}
    assert model.wpe.weight.shape == (LENGTH, TINY["n_embd"])  # no row for [None]
    assert parameter_counts(model)["conditioning"] == TINY["n_embd"]
    with pytest.raises(ValueError, match=f"no other block size than {LENGTH}"):
        set_block_size(model, LENGTH + 1)


@pytest.mark.parametrize(
    "settings", [{"start": "hidden"}, {"query_at": "before_target"}]
)
def test_settings_without_effect_are_refused(settings):
    with pytest.raises(ValueError, match="are for .None., .* leave them out"):
        build_model(tiny_model("mask_query", **settings))


def test_a_run_trains_resumes_and_is_evaluated(printed, data, tmp_path):
    """With the fast recipe, dropout, recomputation and bfloat16."""
    config = tiny_config(data, tmp_path, steps=8, model__target="mask_query")
    config = change(config, model__position="rotary", model__value_residual=True)
    config = change(config, optim__kind="muon", train__dtype="bfloat16")
    config = change(config, train__activation_checkpointing="block")
    train.train(config, ALONE)
    train.train(change(config, train__steps=24), ALONE)
    losses = list(metrics(config, "loss").values())
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 0.5
    report = tmp_path / "report.json"
    words = ["--datasets", data, "--max-sequences", 8, "--json", report]
    printed(eval_ppl, config.run_folder, *words)
    for result in json.loads(report.read_text())["results"]:
        assert 0 < result["nll"] < math.log(257)


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2, "mlp": "swiglu"}])
def test_flops_of_its_matrices_are_what_pytorch_counts(settings):
    """Times three for forward and backward."""
    config = ModelConfig(
        vocab_size=96,
        block_size=64,
        n_layer=3,
        n_head=4,
        n_embd=32,
        target="mask_query",
        **settings,
    )
    model = build_model(config).eval()
    tokens, order = random_text(2, 16, vocab_size=96)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, order)
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(n for operation, n in counts.items() if "mm" in str(operation))
    assert flops_per_token(config, 0) == 3 * matrices / (2 * 16)
    # Contents attend in all blocks but the last one, queries in all.
    attention = 12 * 5 * config.n_embd
    assert flops_per_token(config, 16) - flops_per_token(config, 0) == 16 * attention
