"""bench.py train: its baseline is AO-GPT, its figures agree, nothing is compiled again, bad
arguments."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
from helpers import run_script
from reference import randomise

from model import AOGPT, ModelConfig
from orders import OrderConfig, orders_at
from runtime.devices import has_compiler
from studies.benchmarks import train as bench
from studies.benchmarks.baselines import PerToken
from studies.benchmarks.train import PHASES, Trainee, TrainOptions
from variants import build_model

COMPILER = has_compiler()
CPU = torch.device("cpu")
BASE = "gpt" if COMPILER else "per-token"


def tiny(**settings):
    return ModelConfig(
        **{
            "vocab_size": 17,
            "block_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 24,
            "cond_dim": 6,
        }
        | settings
    )


# ---- the per-token baseline ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 7, 1])
@pytest.mark.parametrize(
    "settings", [{}, {"norm": "layernorm", "gelu": "tanh"}, {"qk_norm": False, "tied_head": True}]
)
def test_the_per_token_baseline_has_ao_gpts_loss_and_gradients(settings, length):
    """In float64 rounding is about 1e-16 of numbers near 1, a few hundred of which are added up."""
    model = randomise(build_model(tiny(**settings)).double(), seed=1, scale=0.7)
    tokens = torch.randint(17, (5, length), generator=torch.Generator().manual_seed(2))
    order = orders_at(OrderConfig("mixture", l2r_prob=0.4), 0, 3, range(5), length)
    losses, gradients = [], []
    for called in (model, PerToken(model)):
        model.zero_grad()
        nll = called(tokens, order)
        (nll * torch.arange(1, length + 1)).mean().backward()  # every step has a weight of its own
        losses.append(nll.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[0].shape == (5, length) and (losses[0] - losses[1]).abs().max() < 1e-12
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() < 1e-11, name
    used = [name for name, gradient in gradients[0].items() if gradient.abs().max() > 0]
    assert {"wtpe.weight", "blocks.1.adaln.weight", "adaln_f.bias", "head.bias"} <= set(used)


def test_the_per_token_baseline_refuses_what_it_does_not_cover():
    for settings, words in (
        ({"target": "input"}, "adaln"),
        ({"start": "hidden"}, "attended"),
        ({"dropout": 0.1}, "0"),
    ):
        with pytest.raises(ValueError, match=words):
            PerToken(build_model(tiny(**settings)))


# ---- the systems ---------------------------------------------------------------------------------


def trainee(name, **settings):
    a = TrainOptions(**{"size": "tiny", "batch_size": 2, "device": "cpu"} | settings)
    return Trainee(name, a, 32, CPU, torch.float32)


def test_systems_differ_in_what_they_are_named_after_only():
    ours, plain, per_token = map(trainee, ("aogpt-eager", "gpt-eager", "per-token"))
    assert dataclasses.replace(ours.model.config, target="none") == plain.model.config
    assert ours.model.config == per_token.model.config
    for (name, p), q in zip(
        ours.model.named_parameters(), per_token.model.parameters(), strict=True
    ):
        assert torch.equal(p, q), name
    tokens, order = ours.batch(3)
    assert torch.equal(plain.batch(3)[0], tokens) and torch.equal(
        plain.batch(3)[1], torch.arange(32).expand(2, 32)
    )
    assert all(map(torch.equal, per_token.batch(3), (tokens, order)))
    assert not torch.equal(ours.batch(4)[0], tokens) and not torch.equal(ours.batch(4)[1], order)
    assert tokens.max() < 500, "ids from 500 on are padding"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_trains_and_the_baseline_trains_alike(optimizer):
    """Over ten steps of about 6e-4 the weights move by 1e-3 and more; float32 gradients differ in
    the seventh digit, which AdamW may turn into a whole step where a gradient is nearly 0: hence
    the mean."""
    ours, per_token = (trainee(name, optimizer=optimizer) for name in ("aogpt-eager", "per-token"))
    start = [p.detach().clone() for p in ours.model.parameters()]
    losses = [(ours.timed_step(step).loss, per_token.timed_step(step).loss) for step in range(10)]
    assert max(abs(x - y) for x, y in losses) < 1e-3 and len(set(losses)) == 10
    for p, q, before in zip(
        ours.model.parameters(), per_token.model.parameters(), start, strict=True
    ):
        moved = (p - before).abs().mean()
        assert moved > 0 and (p - q).abs().mean() < 0.02 * moved
    assert ours.ema.updates == 10
    assert all(p.grad is None for p in ours.model.parameters())


def test_memory_is_that_of_weights_average_moments_and_what_a_step_needs():
    system = trainee("aogpt-eager")
    weights = 4 * sum(p.numel() for p in system.model.parameters())
    assert system.state_bytes() == 2 * weights
    system.timed_step(0)
    counters = 4 * len(list(system.model.parameters()))  # AdamW's number of steps, one a tensor
    assert system.state_bytes() == 4 * weights + counters
    # Muon has one moment of a matrix; AdamW, which trains the rest, two.
    muon = trainee("aogpt-eager", optimizer="muon")
    muon.timed_step(0)
    assert 2 * weights < muon.state_bytes() < 4 * weights
    logits = 4 * 2 * 32 * 512
    peak = system.peak_bytes(1)
    assert 5 * weights + counters < peak < 5 * weights + 10 * logits + 2**21, (
        "at least the gradients come on top"
    )
    assert system.peak_bytes(2) == peak
    longer = Trainee("aogpt-eager", system.options, 128, CPU, torch.float32)
    longer.timed_step(0)
    assert longer.peak_bytes(1) > peak + 3 * logits


def test_compiled_steps_are_not_compiled_again_whatever_the_order(monkeypatch):
    graphs, plain = [], AOGPT.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(AOGPT, "compile", lambda self, **how: plain(self, backend=counting, **how))
    torch._dynamo.reset()
    systems = [trainee("aogpt", warmup=2, repeats=8), trainee("gpt", warmup=2, repeats=8)]
    orders = {tuple(systems[0].batch(step)[1].flatten().tolist()) for step in range(10)}
    steps = bench.measure(systems, systems[0].options)
    assert len(graphs) == 2 and len(orders) == 10
    assert {name: len(taken) for name, taken in steps.items()} == {"aogpt": 10, "gpt": 10}

    def shorter_at_last(step):
        ours.length = 31 if step == 9 else 32
        return Trainee.batch(ours, step)

    ours = systems[0]
    monkeypatch.setattr(ours, "batch", shorter_at_last)
    with pytest.raises(torch._dynamo.exc.RecompileError):
        bench.measure([ours], ours.options)


# ---- the script ----------------------------------------------------------------------------------

TINY = ["train", "--size", "tiny", "--batch-size", 3, "--length", 64, "--device", "cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Folder with all that one run wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    outputs = [
        f"--{option}={folder / option}" for option in ("json", "markdown", "plot", "profile")
    ]
    systems = [*(["gpt"] if COMPILER else []), "per-token", "aogpt-eager", "gpt-eager"]
    done = run_script(
        "-m", "studies.bench", *TINY, "--repeats", 3, "--warmup", 2, "--systems", *systems, *outputs
    )
    return folder, done.stdout


@pytest.mark.slow
def test_the_figures_of_every_system_agree(measured):
    folder, _ = measured
    result = json.loads((folder / "json").read_text())
    rows = {row["system"]: row for row in result["rows"]}
    for row in rows.values():
        seconds = [sum(step[phase] for phase in PHASES) for step in row["all_steps"]]
        assert len(seconds) == 3 and min(seconds) > 0
        assert row["seconds"] == pytest.approx(statistics.median(seconds))
        assert (row["seconds_min"], row["seconds_max"]) == pytest.approx(
            (min(seconds), max(seconds))
        )
        for phase in PHASES:
            assert row[f"{phase}_seconds"] == pytest.approx(
                statistics.median(s[phase] for s in row["all_steps"])
            )
        assert row["tokens_per_second"] == pytest.approx(3 * 64 / row["seconds"])
        assert row["mfu"] is None and result["peak_flops"] is None, "no CPU has a known peak"
        flops = build_model(bench.SIZES["tiny"][0]).flops_per_token(64) * row["tokens_per_second"]
        assert row["share_of_matrix_product"] == pytest.approx(
            flops / result["matrix_product_flops"]
        )
        assert row["peak_bytes"] > row["state_bytes"] > 16 * row["parameters"]
        for base in {BASE, "per-token"}:
            key = f"times_{base.replace('-', '_')}"
            assert row[key] == pytest.approx(row["seconds"] / rows[base]["seconds"])
            turns = [
                sum(mine[phase] for phase in PHASES) / sum(other[phase] for phase in PHASES)
                for mine, other in zip(row["all_steps"], rows[base]["all_steps"], strict=True)
            ]
            assert (row[f"{key}_min"], row[f"{key}_max"]) == pytest.approx((min(turns), max(turns)))
    assert rows["aogpt-eager"]["first_loss"] == pytest.approx(
        rows["per-token"]["first_loss"], abs=1e-5
    )
    losses = {name: [step["loss"] for step in row["all_steps"]] for name, row in rows.items()}
    if COMPILER:
        assert losses["gpt"] == pytest.approx(losses["gpt-eager"], abs=1e-4)
    assert losses["per-token"] != losses["gpt-eager"]


@pytest.mark.slow
def test_the_report_says_what_was_measured_on_what(measured):
    folder, printed = measured
    result = json.loads((folder / "json").read_text())
    assert (result["settings"]["length"], result["settings"]["dtype"]) == (64, "float32")
    assert result["versions"]["torch"] == torch.__version__ and result["machine"]["threads"] == 1
    markdown = (folder / "markdown").read_text()
    assert (
        result["command"].startswith("python -m studies.bench train --size tiny")
        and result["command"] in markdown
    )
    assert printed.strip() in markdown and result["machine"]["name"] in printed
    assert "only the ratios" in printed and "unknown" in printed
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(result["rows"]) and len({line.count("|") for line in lines}) == 1
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_profile_is_a_trace_and_a_table_for_every_system(measured):
    folder, _ = measured
    systems = [row["system"] for row in json.loads((folder / "json").read_text())["rows"]]
    assert {path.name for path in (folder / "profile").iterdir()} == {
        f"{s}.{k}" for s in systems for k in ("json", "txt")
    }
    for system in systems:
        events = json.loads((folder / "profile" / f"{system}.json").read_text())["traceEvents"]
        spans = {
            e["name"]: (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("name") in PHASES and "dur" in e
        }
        assert (
            spans["forward"][1]
            <= spans["backward"][0]
            < spans["backward"][1]
            <= spans["optimizer"][0]
        )
        table = (folder / "profile" / f"{system}.txt").read_text()
        assert "aten::mm" in table and "aten::_fused_adamw_" in table
        assert ("cpp_fused" in table) == (system == "gpt"), "compiled kernels have their own lines"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"length": 129}, "--length 129 exceeds the block size of tiny, 128"),
        ({"length": 0}, "--length is 0"),
        ({"systems": ()}, "--systems"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"warmup": 0}, "--warmup is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"device": "tpu"}, "tpu"),
        ({"json": Path("nowhere/result.json")}, "--json .* make it first"),
        ({"profile": Path(__file__)}, "--profile .* name a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        bench.bench_train(TrainOptions(**{"size": "tiny", "device": "cpu"} | settings))


def test_compiling_without_a_compiler_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(bench, "has_compiler", lambda: False)
    with pytest.raises(
        ValueError, match="aogpt and gpt: .* C[+][+] compiler .* --systems aogpt-eager"
    ):
        bench.bench_train(TrainOptions(size="tiny", device="cpu"))
