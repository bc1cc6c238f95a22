"""bench.py decode and its baselines: correct samplers, figures that agree, bad arguments."""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from unittest.mock import patch

import pytest
import reference
import torch
from helpers import ALONE, assert_user_error, make_data, run_script, tiny_config
from reference import LEVEL, chi_square_p, make_plan, seeded

import train
from checkpoints import on_disk
from checkpoints.errors import CheckpointError
from checkpoints.load import load
from model import ModelConfig
from orders import OrderConfig
from sampling.engine import generate
from sampling.plans import Plan, group_sizes, l2r_plan, mdm_plan
from sampling.token_choice import TokenChoice
from studies.benchmarks import common
from studies.benchmarks import decode as bench
from studies.benchmarks import lengths as lengths_bench
from studies.benchmarks import loading as loading_bench
from studies.benchmarks import memory as memory_bench
from studies.benchmarks.baselines import decode_cached, decode_uncached, draw
from studies.benchmarks.common import Rates
from studies.benchmarks.decode import floor_of, model_calls, only_calls, row_groups
from studies.experiments.measures import of_bench
from variants import build_model

N, V = 4, 3  # positions and tokens of the enumerable model: 81 sequences
SAMPLES = 10_000
LENGTH, VOCAB = 12, 17  # of the model whose log-probabilities are compared
IDS = 15  # of its vocabulary; the ids from 15 on are padding
PLAIN = TokenChoice()
SAMPLERS = {"baseline": decode_cached, "no-cache": decode_uncached}


def tiny_model(dtype=torch.float32, seed=0, **settings):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 24, "cond_dim": 6}
    config = ModelConfig(**{"vocab_size": VOCAB, "block_size": 16} | sizes | settings)
    return reference.randomise(build_model(config).to(dtype), seed, scale=0.7)


def sample(sampler, model, plan, choice=PLAIN, vocab_size=IDS, seed=0, **options):
    common = {"choice": choice, "vocab_size": vocab_size, "generator": seeded(seed)}
    return SAMPLERS[sampler](model, plan, **common, **options)


# ---- the baselines are correct samplers ----------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "mode, dtype, settings",
    [
        *(
            (mode, torch.float64, {})
            for mode in ("l2r", "exact 1", "exact 4", "exact 30", "even 5")
        ),
        ("exact 4", torch.float32, {}),
        ("exact 5", torch.float64, {"norm": "layernorm", "gelu": "tanh"}),
        ("exact 5", torch.float64, {"qk_norm": False, "tied_head": True}),
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_models_full_pass(sampler, mode, dtype, settings):
    """Log-probabilities of size 1 to 10 round at about 1e-15 in float64 and 1e-6 in float32, a few
    times over in two layers; the reference is collected in float32."""
    model, plan = tiny_model(dtype, **settings), make_plan(mode, 5, LENGTH, seed=3)
    got = sample(sampler, model, plan, vocab_size=VOCAB, seed=1)
    expected = reference.uncached_log_probs(model, got.tokens, plan)
    assert (got.log_probs - expected).abs().max() < (1e-6 if dtype == torch.float64 else 1e-5)
    assert got.log_probs.max() < 0


@pytest.mark.parametrize("mode", ["exact 1", "exact 3", "even 2"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_follow_the_enumerated_distribution(sampler, mode):
    kind, steps = mode.split()
    model = tiny_model(torch.float64, vocab_size=V, block_size=N, n_layer=1, n_embd=8, cond_dim=4)
    exact = kind == "exact"
    plans = (
        reference.exact_plans(range(N), (), int(steps))
        if exact
        else reference.fixed_plans(range(N), (), (2, 2))
    )
    expected = reference.plan_distribution(reference.conditionals(model, V, N), plans)
    plan = make_plan(mode, SAMPLES, N, seed=4)
    counts = reference.sequence_counts(sample(sampler, model, plan, vocab_size=V, seed=5).tokens, V)
    assert chi_square_p(counts, SAMPLES * expected) > LEVEL
    shifted = chi_square_p(counts, SAMPLES * expected.roll(1))
    assert shifted < 1e-20, "the test would accept anything"


@pytest.mark.parametrize(
    "choice", [PLAIN, TokenChoice(0.6), TokenChoice(0.9, 0.8), TokenChoice(1.0, 1.0, 3)], ids=str
)
def test_tokens_are_drawn_from_the_truncated_distribution(choice):
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -3.0])
    weights = [math.exp(x / choice.temperature) for x in logits.tolist()]
    expected, mass = torch.zeros(6, dtype=torch.float64), 0.0
    for token in sorted(range(6), key=lambda v: -weights[v])[: choice.top_k]:
        if mass < choice.top_p * sum(weights):
            expected[token] = weights[token]
        mass += weights[token]
    drawn = draw(logits.expand(SAMPLES, 6), choice, seeded(2)).bincount(minlength=6)
    assert chi_square_p(drawn, SAMPLES * expected / expected.sum()) > LEVEL


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_tokens_are_drawn_and_zero_temperature_is_greedy(sampler):
    model, plan, greedy = tiny_model(), make_plan("exact 5", 6, LENGTH), TokenChoice(0)
    assert sample(sampler, model, plan).tokens.max() < IDS
    expected = generate(model, plan, choice=greedy, vocab_size=IDS).tokens
    assert torch.equal(sample(sampler, model, plan, greedy).tokens, expected)


@pytest.mark.parametrize("mode", ["l2r", "exact 4", "exact 30", "even 5"])
def test_the_baselines_count_their_work(mode):
    """A cached row is fed every group, and what no copy of the group before it left in the cache;
    an uncached one all known tokens and the group, wherever it unmasks something."""
    model, plan = tiny_model(), make_plan(mode, 5, LENGTH)
    rows = [[size for size in row if size] for row in group_sizes(plan).tolist()]
    cached, uncached = (sample(sampler, model, plan) for sampler in SAMPLERS)
    fed = sum(sum(sizes) + sum(size - 1 for size in sizes[:-1]) for sizes in rows)
    fed_anew = sum(sum(sizes[: g + 1]) for sizes in rows for g in range(len(sizes)))
    assert (cached.token_forwards, uncached.token_forwards) == (fed, fed_anew)
    assert cached.model_calls == uncached.model_calls == len(plan.step.unique())
    assert torch.equal(cached.step, torch.zeros_like(plan.step).scatter(1, plan.order, plan.step))


def test_the_baselines_refuse_what_they_do_not_cover():
    plan, given = l2r_plan(2, 8), l2r_plan(2, 8, torch.arange(8).expand(2, 8) < 3)
    for sampler in SAMPLERS:
        with pytest.raises(ValueError, match="adaln"):
            sample(sampler, tiny_model(target="input"), plan)
        with pytest.raises(ValueError, match="eval"):
            sample(sampler, tiny_model().train(), plan)
        with pytest.raises(ValueError, match="given"):
            sample(sampler, tiny_model(), given)


# ---- timing a part of the calls ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact 4", "exact 40", "even 5"])
def test_a_part_of_an_encoders_plan_has_the_same_calls(mode):
    """What a call costs an encoder is the rows it feeds and the positions it unmasks."""
    encoder = tiny_model(attention="full", target="none", mask_token=IDS)
    plan, tokens = make_plan(mode, 5, LENGTH), torch.zeros(5, LENGTH).long()
    options = {"generator": seeded(0), "vocab_size": IDS}
    unmasked, part = [], []
    whole = generate(encoder, plan, progress=unmasked.append, **options)
    assert whole.model_calls == model_calls("encoder", plan)
    assert whole.token_forwards == LENGTH * int(group_sizes(plan).count_nonzero())
    calls = [0, 2, whole.model_calls - 1]
    got = generate(encoder, only_calls(plan, calls), tokens, progress=part.append, **options)
    assert part == [unmasked[call] for call in calls]
    assert got.token_forwards == LENGTH * int((group_sizes(plan)[:, calls] > 0).sum())
    assert generate(encoder, only_calls(plan, []), tokens, vocab_size=IDS).model_calls == 0


def test_a_part_of_the_uncached_calls_unmasks_that_part():
    model, plan, calls = tiny_model(), make_plan("even 4", 3, LENGTH), [1, 3]
    got, whole = sample("no-cache", model, plan, calls=calls), sample("no-cache", model, plan)
    run = torch.isin(got.step, torch.tensor(calls))
    assert (got.log_probs[run] < 0).all() and (got.log_probs[~run] == 0).all()
    assert (got.model_calls, got.token_forwards) == (whole.model_calls, whole.token_forwards)


def test_groups_of_a_row_are_its_own_non_empty_steps():
    plan = Plan(torch.arange(4).expand(2, 4), torch.tensor([[3, 3, 7, 9], [0, 1, 1, 1]]))
    assert row_groups(plan).tolist() == [[0, 0, 1, 2], [0, 1, 1, 1]]
    assert group_sizes(plan).tolist() == [[2, 1, 1], [1, 3, 0]]
    assert (model_calls("ours", plan), model_calls("no-cache", plan)) == (3, 5)


# ---- models and the floor ------------------------------------------------------------------------


def test_logits_are_scaled_to_the_entropy_of_a_language_model():
    for config in (bench.SIZES["tiny"][0], bench.encoder_config(*bench.SIZES["tiny"])):
        model = common.random_model(config, 0, torch.device("cpu"))
        _, flat = bench.scale_logits(model, 1.0, 500, 16, seed=0)
        assert math.log(500) - 0.1 < flat < math.log(500)
        scale, entropy = bench.scale_logits(model, None, 500, 16, seed=0)
        assert scale > 1 and abs(entropy - bench.ENTROPY) < 0.01
        again = bench.scale_logits(model, 1.0, 500, 16, seed=0)
        assert again == (1.0, entropy), "the scaled weights have this entropy"


def test_the_floor_counts_bytes_and_operations():
    """Two rows of three tokens in groups of 2 and 1: input 0 twice for the first group, then 1 and
    2 with 0 cached. Pairs of an input and one it sees, per row: the two copies see themselves; 1
    and 2 see 2 and 3 inputs."""
    c = ModelConfig(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
    plan = Plan(torch.arange(3).expand(2, 3), torch.tensor([[0, 0, 1], [0, 0, 1]]))
    blocks, head, pair = 12 * 2 * 16**2, 50 * 16, 4 * 2 * 16
    read = 4 * (blocks + head) + 4 * (blocks + head + 2 * 2 * 16 * 2)
    first = 2 * (2 * 2 * blocks + 2 * 2 * head + pair * 2)
    second = 2 * (2 * 2 * blocks + 2 * head + pair * 5)
    slow_memory, slow_processor = Rates(1e30, 10.0), Rates(10.0, 1e30)
    floor = floor_of(c, plan, 50, 4, slow_memory)
    assert (floor["floor_bytes"], floor["floor_flops"]) == (read, first + second)
    assert floor["floor_seconds"] == pytest.approx(read / 10)
    seconds = floor_of(c, plan, 50, 4, slow_processor)["floor_seconds"]
    assert seconds == pytest.approx((first + second) / 10)


# ---- the script ----------------------------------------------------------------------------------

TINY = ["decode", "--size=tiny", "--batch-size=3", "--length=32", "--device=cpu", "--repeats=2"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Folder with all that one run wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    outputs = [f"--{option}={folder / option}" for option in ("json", "markdown", "plot")]
    done = run_script("-m", "studies.bench", *TINY, "--steps", 4, 32, "--slow-calls", 4, *outputs)
    return folder, done.stdout


def test_every_system_and_step_is_reported_with_figures_that_agree(measured):
    folder, _ = measured
    result = json.loads((folder / "json").read_text())
    rows = {(row["system"], row["steps"]): row for row in result["rows"]}
    systems = ("ours", "baseline", "no-cache", "encoder")
    assert set(rows) == {(system, steps) for system in systems for steps in (4, 32)}
    for (system, steps), row in rows.items():
        ours = rows["ours", steps]
        assert len(row["all_seconds"]) == 2
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["times_ours"] == pytest.approx(row["seconds"] / ours["seconds"])
        assert row["tokens_per_second"] == pytest.approx(3 * 32 / row["seconds"])
        pairs = zip(row["all_seconds"], row["all_model_calls"], strict=True)  # a plan for each turn
        calls = statistics.median(1000 * seconds / calls for seconds, calls in pairs)
        assert row["ms_per_call"] == pytest.approx(calls) and row["first_seconds"] > 0
        assert row["extrapolated"] == (row["measured_calls"] < row["model_calls"])
        assert row["extrapolated"] == (system in ("no-cache", "encoder") and row["model_calls"] > 4)
    for steps in (4, 32):
        generator = seeded(0)
        _, plan = (mdm_plan(3, 32, steps, generator) for _ in range(2))  # the first is a warm-up
        row_wise, step_wise = group_sizes(plan).shape[1], len(plan.step.unique())
        calls = {"ours": row_wise, "baseline": step_wise, "no-cache": step_wise}
        for system, expected in (calls | {"encoder": row_wise}).items():
            assert rows[system, steps]["model_calls"] == expected
        fed = 32 * int(group_sizes(plan).count_nonzero())
        assert rows["encoder", steps]["token_forwards"] == fed
        ours = rows["ours", steps]
        assert 3 * 32 <= ours["token_forwards"] <= 3 * (2 * 32 + steps)
        assert ours["floor_seconds"] > 0
        floor = ours["floor_seconds"]  # those of plans of one kind hardly differ
        assert 0.7 * ours["seconds_min"] < ours["times_floor"] * floor < 1.4 * ours["seconds_max"]


def test_the_report_says_what_was_measured_on_what(measured):
    folder, printed = measured
    result = json.loads((folder / "json").read_text())
    assert result["settings"]["batch_size"] == 3 and result["settings"]["dtype"] == "float32"
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["name"] in printed and result["machine"]["threads"] == 1
    assert result["rates"]["flops"] > 0 and result["rates"]["bandwidth"] > 0
    for model in result["models"].values():
        assert abs(model["entropy"] - bench.ENTROPY) < 0.01
    markdown = (folder / "markdown").read_text()
    assert result["command"].startswith("python -m studies.bench decode --size=tiny")
    assert result["command"] in markdown and printed.strip() in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 8 and len({line.count("|") for line in table}) == 1
    assert "Extrapolated" in printed and "4 of " in printed and "only the ratios" in printed
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")


def test_a_run_gives_size_and_weights_and_keeps_its_logits(tmp_path):
    data, l2r = make_data(tmp_path), OrderConfig("l2r")
    run = tiny_config(data, tmp_path, steps=6)
    plain = tiny_config(data, tmp_path, "plain", steps=6, order=l2r, model__target="none")
    train.train(run, ALONE)
    train.train(plain, ALONE)
    sizes = {"device": "cpu", "batch_size": 2, "length": 16, "steps": (4,), "repeats": 1}
    options = {"dtype": "bfloat16", "json": tmp_path / "json"}
    bench.bench_decode(bench.DecodeOptions(run=str(run.run_folder), **sizes, **options))
    result = json.loads((tmp_path / "json").read_text())
    ours = result["models"]["ours"]
    assert ours["logit_scale"] == 1 and result["settings"]["dtype"] == "bfloat16"
    assert ours["parameters"] == build_model(run.model).num_params()
    assert [row["system"] for row in result["rows"]] == ["ours", "baseline", "no-cache", "encoder"]
    longer = bench.DecodeOptions(run=str(run.run_folder), **sizes | {"length": 9999})
    with pytest.raises(ValueError, match="--length 9999 exceeds the model's block size"):
        bench.bench_decode(longer)
    with pytest.raises(ValueError, match="not AO-GPT"):
        bench.bench_decode(bench.DecodeOptions(run=str(plain.run_folder), **sizes))


def test_all_calls_of_chosen_systems_and_of_even_plans():
    chosen = ("--slow-calls", 0, "--plan", "even", "--systems", "encoder", "ours")
    done = run_script("-m", "studies.bench", *TINY, "--steps", 8, *chosen)
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")][2:]
    cells = [(row[0].strip(), row[4].strip(), row[-1].strip()) for row in table]
    assert cells == [("encoder", "8", "all"), ("ours", "8", "all")]
    assert "Extrapolated" not in done.stdout


OWN_PLANS = ("cache-only", "l2r", "speculative", "gpt")


def test_systems_with_plans_of_their_own_decode_as_many_tokens():
    sizes = {"size": "tiny", "batch_size": 3, "length": 200, "repeats": 1, "device": "cpu"}
    options = bench.DecodeOptions(systems=("ours", "rotary", *OWN_PLANS), steps=(50,), **sizes)
    made = bench.DecodeBench(options, torch.device("cpu"), torch.float32)
    rows = {row["system"]: row for row in made.rows(50, rates=None)}
    assert made.model.config.block_size == 200  # random weights are as long as need be
    assert rows["l2r"]["model_calls"] == rows["gpt"]["model_calls"] == 200
    assert rows["cache-only"]["model_calls"] == 50
    # Of n known inputs each call feeds those that are new, and a copy for all 200 - n unknown ones.
    assert rows["cache-only"]["token_forwards"] > 3 * sum(200 - 4 * n for n in range(50))
    assert rows["rotary"]["token_forwards"] == rows["ours"]["token_forwards"] < 3 * 2 * 200
    assert made.others["rotary"].config.target == "rotary"
    assert "times_floor" not in rows["ours"]


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_an_exponent_is_the_slope_of_logarithms(power):
    lengths = [64, 128, 1024]
    values = [3 * n**power for n in lengths]
    assert lengths_bench.slope(lengths, values) == pytest.approx(power)


def test_growth_with_length_is_measured_and_reported(tmp_path, capsys):
    files = {"json": tmp_path / "l.json", "plot": tmp_path / "l.png"}
    options = lengths_bench.LengthsOptions(
        size="tiny",
        lengths=(32, 8, 16),
        systems=("ours", "encoder", "cache-only"),
        longest_cache_only=16,
        repeats=2,
        device="cpu",
        **files,
    )
    lengths_bench.bench_lengths(options)
    result, printed = json.loads(files["json"].read_text()), capsys.readouterr().out
    assert [row["length"] for row in result["rows"]] == [8, 8, 8, 16, 16, 16, 32, 32]
    fits = result["exponents"]
    assert fits["encoder"]["token_forwards"] == [pytest.approx(2, abs=0.2)] * 2
    assert fits["ours"]["token_forwards"][0] < 1.2 and len(fits["ours"]["seconds"]) == 2
    for r, fit in enumerate(fits["ours"]["seconds"]):
        own = [row["all_seconds"][r] for row in result["rows"] if row["system"] == "ours"]
        assert fit == pytest.approx(math.log2(own[2] / own[0]) / 2)  # at equal distances
    for r, fit in enumerate(fits["cache-only"]["seconds"]):
        own = [row["all_seconds"][r] for row in result["rows"] if row["system"] == "cache-only"]
        assert fit == pytest.approx(math.log2(own[1] / own[0]))
    assert (
        "| encoder" in printed
        and " - " in printed
        and files["plot"].read_bytes().startswith(b"\x89PNG")
    )
    measured = of_bench(result)
    assert measured["ours"]["repeats"][1]["seconds_32"][0] == result["rows"][-2]["all_seconds"][1]
    assert "seconds_32" not in measured["cache-only"]["repeats"][1]
    for wrong in ({"lengths": (32, 32)}, {"lengths": (32, 64, 128), "longest_cache_only": 32}):
        with pytest.raises(ValueError, match="fewer than two"):
            lengths_bench.bench_lengths(lengths_bench.LengthsOptions(**wrong))


@pytest.mark.slow
def test_memory_of_decoding_is_that_of_processes_of_their_own(tmp_path, capsys):
    """A cache of 2 samples x 2 layers x 64 wide in float32 takes 2 KiB a token: 8 MiB more
    at 4,096 tokens than at 64. Pages, and what steps take, blur it by a few MiB."""
    file, lengths = tmp_path / "m.json", (64, 4096)
    options = memory_bench.MemoryOptions(
        size="tiny", lengths=lengths, batch_sizes=(2,), group=128, systems=("rotary",), json=file
    )
    memory_bench.bench_memory(dataclasses.replace(options, device="cpu", threads=1))
    result, printed = json.loads(file.read_text()), capsys.readouterr().out
    short, long = result["rows"]
    assert long["planned_bytes"] - short["planned_bytes"] > 8 * 2**20
    assert long["peak_bytes"] > 0.8 * long["planned_bytes"] > short["peak_bytes"] / 4
    assert "| rotary" in printed
    (figures,) = of_bench(result)["rotary_2"]["repeats"]
    assert figures["peak_4096"][0] == long["peak_bytes"] / 2**20
    ratio = long["peak_bytes"] / short["peak_bytes"]
    assert figures["peak"][0] == pytest.approx(math.log(ratio) / math.log(64))
    with pytest.raises(ValueError, match="two lengths"):
        memory_bench.bench_memory(memory_bench.MemoryOptions(lengths=(64,)))


def test_every_repeat_has_an_exponent_of_its_own():
    rows = [{"length": n, "all_peak_bytes": [5 * n, n * n]} for n in (64, 256, 1024)]
    assert [memory_bench.growth(rows, repeat) for repeat in (0, 1)] == pytest.approx([1, 2])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"steps": (4, 0)}, "--steps is 0; .* at least 1"),
        ({"steps": ()}, "--steps .* at least 1"),
        ({"systems": ()}, "--systems"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"slow_calls": -1}, "--slow-calls is -1"),
        ({"threads": 0}, "--threads is 0"),
        ({"run": "nowhere/at-all"}, "nowhere"),
        ({"json": Path("nowhere/result.json")}, "--json .* make it first"),
        ({"top_p": -0.1}, "top_p"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused_by_name(settings, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny = {"size": "tiny", "length": 32, "device": "cpu"}
    with pytest.raises(ValueError, match=words):
        bench.bench_decode(bench.DecodeOptions(**tiny | settings))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((*TINY, "--systems", "ours", "theirs"), ("theirs", "no-cache")),
        (("train", "--size=tiny", "--length=129"), ("--length 129", "block size")),
    ],
    ids=["decode", "train"],
)
def test_bad_command_lines_end_with_a_message(arguments, words):
    assert_user_error(run_script("-m", "studies.bench", *arguments, check=False), *words)


def test_loading_is_timed_with_checksums_and_without(tmp_path, capsys):
    file = tmp_path / "l.json"
    options = loading_bench.LoadingOptions(size="tiny", repeats=2, folder=tmp_path, json=file)
    loading_bench.bench_loading(options)
    result = json.loads(file.read_text())
    assert [row["cold"] for row in result["rows"]] == [True, False]
    assert all(len(row[key]) == 2 for row in result["rows"] for key in ("checked", "unchecked"))
    assert "| in memory" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]  # the checkpoint is gone


def test_loading_unchecked_reads_what_is_damaged_and_checked_refuses_it(tmp_path):
    options = loading_bench.LoadingOptions(size="tiny")
    loading_bench.write_checkpoint(tmp_path, options)
    (part,) = tmp_path.rglob("ema.safetensors")
    with open(part, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match="can be read"):
        loading_bench.measure(tmp_path, False, 1)
    with patch.object(on_disk, "_check_parts"):
        load(tmp_path)
