"""Benchmarks: figures agree, and every listed system can be reported."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import reference
import torch
from helpers import needs_compiler
from reference import generate, make_plan, seeded

from aogpt.model import ModelConfig
from aogpt.sampling import Plan, Samples, group_sizes, mdm_plan
from aogpt.systems import build_model
from studies import bench, decoding_speed, step_speed
from studies.decoding_speed import DecodeOptions, floor_of, parts_of
from studies.step_speed import Trainee, TrainOptions

# of a tiny model, whose other ids are padding
LENGTH = 12
IDS = 15
CPU = torch.device("cpu")


def tiny_model(**changes):
    config = ModelConfig(
        vocab_size=17, block_size=16, n_layer=2, n_head=2, n_embd=24, cond_dim=6
    )
    model = build_model(dataclasses.replace(config, **changes))
    return reference.randomise(model, 0, scale=0.7)


def tiny(options, device="cpu", repeats=2, **settings):
    """Return options of a benchmark (the class `options`) for the smallest model."""
    return options(size="tiny", device=device, repeats=repeats, **settings)


@pytest.mark.parametrize("mode", ["mdm:steps=4", "mdm:steps=40", "even:steps=5"])
def test_a_part_of_a_plan_has_the_same_calls(mode):
    models = {
        "encoder": tiny_model(attention="full", target="none", mask_token=IDS),
        "no-cache": tiny_model(),
    }
    plan = make_plan(mode, 5, LENGTH)
    tokens = torch.zeros(5, LENGTH).long()
    sizes = group_sizes(plan)
    calls = [0, 2, sizes.shape[1] - 1]
    inputs = {
        "encoder": torch.full_like(sizes, LENGTH),
        "no-cache": sizes.cumsum(dim=1),
    }
    for system, model in models.items():
        unmasked = []
        forwards = 0
        for part in parts_of(system, plan, calls):
            samples = generate(
                model,
                part,
                tokens,
                generator=seeded(0),
                vocab_size=IDS,
                progress=unmasked.append,
            )
            forwards += samples.token_forwards
        assert unmasked == sizes[:, calls].sum(dim=0).tolist()
        assert forwards == int((inputs[system] * (sizes > 0))[:, calls].sum())


def test_the_floor_counts_bytes_and_operations():
    """Two rows of three tokens in groups of 2 and 1: 2 and 5 pairs of an input and one
    it sees."""
    model = tiny_model(vocab_size=64, block_size=8, n_embd=16)
    plan = Plan(torch.arange(3).expand(2, 3), torch.tensor([[0, 0, 1], [0, 0, 1]]))
    blocks = 12 * 2 * 16**2
    head = 50 * 16
    pair = 4 * 2 * 16
    read = 4 * (blocks + head) + 4 * (blocks + head + 2 * 2 * 16 * 2)
    flops = 2 * (2 * 2 * blocks + 2 * 2 * head + pair * 2)
    flops += 2 * (2 * 2 * blocks + 2 * head + pair * 5)
    memory = {"flops": 1e30, "bandwidth": 10}
    processor = {"flops": 10, "bandwidth": 1e30}
    assert floor_of(plan, model, 50, memory) == pytest.approx(read / 10)
    assert floor_of(plan, model, 50, processor) == pytest.approx(flops / 10)


@pytest.mark.slow(reason="times four systems")
def test_systems_with_steps_of_their_own_are_timed_once(tmp_path, script):
    """And an encoder that is not compiled has an engine of its own."""
    words = "--size tiny --batch-size 2 --lengths 16 --device cpu --repeats 1".split()
    words += ["--steps", 4, 8, "--draft", 4, "--json", tmp_path / "json"]
    systems = ["speculative", "gpt", "encoder", "encoder-eager"]
    status, _, said = script(bench, "decode", *words, "--systems", *systems)
    assert status == 0
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    by_system = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(row)
    for system in systems:
        first, second = by_system[system]
        own = system in ("speculative", "gpt")
        assert (first["all_seconds"] == second["all_seconds"]) == own
        assert said.count(f"steps, {system}: ") == (2 if own else 4)  # with a warm-up
        assert ("times_floor" in first) == (system == "gpt")
        assert first["calls"] == {"gpt": 16}.get(system, first["calls"])
    options = tiny(DecodeOptions, compile=True)
    benchmark = decoding_speed.DecodeBench(options, 2, 16, CPU, torch.float32)
    assert benchmark.engine("ours", (2, 16)) is benchmark.engine("speculative", (2, 16))


FEW = "--batch-size 1 --device cpu --repeats 1"
DECODE = f"decode --lengths 12 24 --group 6 {FEW}"
TRAIN = f"train --length 16 --warmup 1 --no-compile --size tiny {FEW}"
DECODING_SYSTEMS = " ".join(decoding_speed.SYSTEMS)
TRAINING_SYSTEMS = " ".join(step_speed.SYSTEMS)


@pytest.mark.slow(reason="two benchmarks, each in full")
@pytest.mark.parametrize(
    "command",
    [
        f"{DECODE} --size tiny --memory --systems {DECODING_SYSTEMS}",
        f"{DECODE} --size tiny --systems ours rotary",
        f"{DECODE} --size bench --systems ours rotary",
        f"{DECODE} --size tiny --dtype bfloat16 --systems ours",
        f"{DECODE} --size tiny --dtype float32 --systems ours",
        f"{TRAIN} --optimizer adamw --systems {TRAINING_SYSTEMS}",
        f"{TRAIN} --optimizer muon --systems {TRAINING_SYSTEMS}",
        f"{TRAIN} --dtype bfloat16 --systems gpt",
        f"{TRAIN} --dtype float32 --systems gpt",
    ],
)
def test_every_choice_that_an_option_lists_is_run_and_reported(
    tmp_path, script, command
):
    """In a report that has them all, written before it is printed."""
    words = command.split()
    status, out, err = script(bench, *words, "--json", tmp_path / "o.json")
    assert status == 0, err
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert {row["system"] for row in rows} == set(words[words.index("--systems") + 1 :])
    assert all(f"| {row['system']} " in out for row in rows)
    assert "weights of" in err


@pytest.mark.slow(reason="times every system")
def test_every_system_and_step_is_reported_with_figures_that_agree(tmp_path, script):
    words = "--size tiny --batch-size 3 --lengths 32 --device cpu --repeats 2".split()
    words += ["--steps", 4, 32, "--json", tmp_path / "json"]
    words += ["--shares", tmp_path / "shares"]
    status, printed, _ = script(bench, "decode", *words)
    assert status == 0
    shares = json.loads((tmp_path / "shares").read_text())
    assert sum(shares["shares"].values()) == pytest.approx(1)
    assert shares["steps"] == 32
    assert min(shares["shares"][part] for part in ("attention", "matrix products")) > 0
    result = json.loads((tmp_path / "json").read_text())
    rows = {(row["system"], row["steps"]): row for row in result["rows"]}
    systems = ("ours", "no-cache", "encoder")
    assert set(rows) == {(system, steps) for system in systems for steps in (4, 32)}
    for (system, steps), row in rows.items():
        ours = rows["ours", steps]
        seconds = row["all_seconds"]
        assert len(seconds) == 2
        assert row["ms_per_call"] > 0
        assert row["seconds"] == pytest.approx(statistics.median(seconds))
        assert row["times_ours"] == pytest.approx(row["seconds"] / ours["seconds"])
        partly = system in ("no-cache", "encoder") and row["calls"] > 8
        assert (row["timed_calls"] < row["calls"]) == partly
    for steps in (4, 32):
        generator = seeded(0)
        # the first is a warm-up
        _, plan = (mdm_plan(Samples(3, 32, generator), steps) for _ in range(2))
        sizes = group_sizes(plan)
        assert {rows[system, steps]["calls"] for system in systems} == {sizes.shape[1]}
        predicted = 32 * int(sizes.count_nonzero())
        assert rows["encoder", steps]["token_forwards"] == predicted
        token_forwards = int((sizes.cumsum(dim=1) * (sizes > 0)).sum())
        assert rows["no-cache", steps]["token_forwards"] == token_forwards
        ours = rows["ours", steps]
        assert 3 * 32 <= ours["token_forwards"] <= 3 * (2 * 32 + steps)
        assert ours["times_floor"] > 0
        tokens = ours["tokens_per_second"] * ours["seconds"]
        assert tokens == pytest.approx(3 * 32)
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["name"] in printed
    assert result["machine"]["threads"] == 1
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 6
    assert " ~" in table[-1]
    assert "only the ratios" in printed


@pytest.mark.slow(reason="allocates what it measures")
def test_memory_is_that_of_buffers_and_working_tensors():
    options = tiny(
        DecodeOptions,
        lengths=(32, 128),
        batch_size=(1, 2),
        memory=True,
        repeats=1,
        group=4,
        systems=("ours", "l2r", "encoder"),
    )
    rows = {}
    for row in decoding_speed.bench_decode(options)["rows"]:
        rows[row["system"], row["batch_size"], row["length"]] = row["peak_bytes"]
    assert len(rows) == 2 * 2 * 3
    for system in ("ours", "l2r"):
        for size in (1, 2):
            cache_bytes = 2 * 2 * size * 128 * 64 * 4  # keys and values
            assert (
                cache_bytes
                <= rows[system, size, 128]
                < cache_bytes + (1 + 3 * size) * 2**20
            )
    assert rows["encoder", 2, 128] > 2 * rows["encoder", 2, 32] > 0


def test_impossible_settings_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(step_speed, "has_compiler", lambda: False)
    for measure, options, settings, words in (
        (decoding_speed.bench_decode, DecodeOptions, {"repeats": 0}, "--repeats is 0"),
        (
            decoding_speed.bench_decode,
            DecodeOptions,
            {"json": Path("no/x")},
            "--json .* a folder that exists",
        ),
        (step_speed.bench_train, TrainOptions, {"device": "tpu"}, "tpu"),
        (step_speed.bench_train, TrainOptions, {}, "C[+][+] compiler .* --no-compile"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(tiny(options, **settings))


@pytest.mark.slow(reason="compiles two systems")
def test_compiled_steps_are_not_compiled_again_whatever_the_order(monkeypatch):
    graphs = []
    plain = torch.nn.Module.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **settings: plain(self, backend=counting, **settings),
    )
    torch._dynamo.reset()
    options = TrainOptions(
        size="tiny", batch_size=2, length=32, compile=True, warmup=2, repeats=8
    )
    systems = [Trainee(name, options, CPU, torch.float32) for name in ("aogpt", "gpt")]
    ours = systems[0]
    assert torch.equal(systems[1].batch(3)[0], ours.batch(3)[0])
    assert torch.equal(systems[1].batch(3)[1], torch.arange(32).expand(2, 32))
    orders = {tuple(ours.batch(step)[1].flatten().tolist()) for step in range(10)}
    steps = step_speed.measure(systems, options)
    assert len(graphs) == 2
    assert len(orders) == 10
    assert {name: len(taken) for name, taken in steps.items()} == {
        "aogpt": 10,
        "gpt": 10,
    }


@needs_compiler
@pytest.mark.slow(reason="every system is trained")
def test_figures_of_every_system_of_training_agree(capsys):
    systems = tuple(step_speed.SYSTEMS)
    compiled = tiny(
        TrainOptions, batch_size=3, length=64, systems=systems, compile=True
    )
    eager = dataclasses.replace(compiled, compile=False)
    rows = {row["system"]: row for row in step_speed.bench_train(compiled)["rows"]}
    eager_rows = step_speed.bench_train(eager)["rows"]
    printed = capsys.readouterr().out
    assert rows.keys() == step_speed.SYSTEMS.keys()
    assert all(f"| {system}" in printed for system in rows)
    assert "unknown" in printed
    for row in rows.values():
        assert row["seconds"] == pytest.approx(statistics.median(row["all_seconds"]))
        assert row["tokens_per_second"] == pytest.approx(3 * 64 / row["seconds"])
        assert row["mfu"] is None, "no CPU has a known peak"
        median, low, high = row["times_gpt"]
        assert median == pytest.approx(row["seconds"] / rows["gpt"]["seconds"])
        assert low <= high
    for row in eager_rows:
        assert row["losses"] == pytest.approx(rows[row["system"]]["losses"], abs=1e-4)
