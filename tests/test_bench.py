"""bench.py and its baselines: correct samplers, the figures of the report, bad arguments."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import ALONE, assert_user_error, make_data, run_script, tiny_config
from reference import (
    chi_square_p,
    conditionals,
    exact_plans,
    fixed_plans,
    order_through,
    plan_distribution,
    randomise,
)

import train
from benchmarks import decode as bench
from benchmarks.baselines import decode_cached, decode_uncached, draw
from benchmarks.decode import Rates, floor_of, group_sizes, model_calls, only_calls, row_groups
from model import AOGPT, ModelConfig
from orders import OrderConfig
from sampling.engine import Plan, TokenChoice, generate, l2r_plan, mdm_plan

LEVEL = 1e-4  # significance of each chi-square test; seeds are fixed, so an accepted test stays accepted
N, V = 4, 3  # positions and tokens of the enumerable model: 81 sequences
SAMPLES = 10_000
LENGTH, VOCAB, IDS = (
    12,
    17,
    15,
)  # of the model whose log-probabilities are compared; ids from 15 on are padding
PLAIN = TokenChoice()
SAMPLERS = {"baseline": decode_cached, "no-cache": decode_uncached}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def tiny_model(dtype=torch.float32, seed=0, **settings):
    config = {
        "vocab_size": VOCAB,
        "block_size": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 24,
        "cond_dim": 6,
    } | settings
    return randomise(AOGPT(ModelConfig(**config)).to(dtype), seed, scale=0.7)


def make_plan(mode, batch_size, length, seed=0):
    if mode == "l2r":
        return l2r_plan(batch_size, length)
    kind, steps = mode.split()
    return mdm_plan(batch_size, length, int(steps), seeded(seed), even=kind == "even")


# ---- the baselines are correct samplers ------------------------------------------------------------------------------


def full_pass_log_probs(model, tokens, plan):
    """Log-probability of each token given the groups before its own, from one full pass each."""
    result = torch.zeros(tokens.shape, dtype=torch.float64)
    for b, (order, step) in enumerate(zip(plan.order.tolist(), plan.step.tolist(), strict=True)):
        starts = [step.index(s) for s in step]
        orders = torch.tensor(
            [order_through(order[:m], p, len(order)) for m, p in zip(starts, order, strict=True)]
        )
        rows = model.token_log_probs(tokens[b].expand(len(order), -1), orders)
        result[b, order] = rows[range(len(order)), starts].double()
    return result


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("mode", ["l2r", "exact 1", "exact 4", "exact 30", "even 4", "even 5"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_log_probs_are_those_of_the_models_full_pass(sampler, mode, dtype, tolerance):
    """Log-probabilities of size 1 to 10 round at about 1e-15 and 1e-6, a few times over in two layers."""
    model, plan = tiny_model(dtype), make_plan(mode, 5, LENGTH, seed=3)
    got = SAMPLERS[sampler](model, plan, choice=PLAIN, vocab_size=VOCAB, generator=seeded(1))
    assert (got.log_probs - full_pass_log_probs(model, got.tokens, plan)).abs().max() < tolerance
    assert got.log_probs.max() < 0


@pytest.mark.parametrize(
    "settings", [{"norm": "layernorm", "gelu": "tanh"}, {"qk_norm": False, "tied_head": True}]
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_log_probs_with_other_layers(sampler, settings):
    model, plan = tiny_model(torch.float64, **settings), make_plan("exact 5", 4, LENGTH, seed=3)
    got = SAMPLERS[sampler](model, plan, choice=PLAIN, vocab_size=VOCAB, generator=seeded(1))
    assert (got.log_probs - full_pass_log_probs(model, got.tokens, plan)).abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["exact 1", "exact 3", "even 2"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_follow_the_enumerated_distribution(sampler, mode):
    kind, steps = mode.split()
    model = tiny_model(torch.float64, vocab_size=V, block_size=N, n_layer=1, n_embd=8, cond_dim=4)
    plan = make_plan(mode, SAMPLES, N, seed=4)
    plans = (
        exact_plans(range(N), (), int(steps))
        if kind == "exact"
        else fixed_plans(range(N), (), (2, 2))
    )
    expected = plan_distribution(conditionals(model, V, N), plans)
    got = SAMPLERS[sampler](model, plan, choice=PLAIN, vocab_size=V, generator=seeded(5)).tokens
    counts = (got * V ** torch.arange(N - 1, -1, -1)).sum(dim=1).bincount(minlength=V**N)
    assert chi_square_p(counts, SAMPLES * expected) > LEVEL
    assert chi_square_p(counts, SAMPLES * expected.roll(1)) < 1e-20, (
        "the test would accept anything"
    )


@pytest.mark.parametrize(
    "choice", [PLAIN, TokenChoice(0.6), TokenChoice(0.9, 0.8), TokenChoice(1.0, 1.0, 3)], ids=str
)
def test_tokens_are_drawn_from_the_truncated_distribution(choice):
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -3.0])
    weights = [math.exp(x / choice.temperature) for x in logits.tolist()]
    ranked, mass, expected = (
        sorted(range(6), key=lambda v: -weights[v]),
        0.0,
        torch.zeros(6, dtype=torch.float64),
    )
    for token in ranked[: choice.top_k]:
        if mass < choice.top_p * sum(weights):
            expected[token] = weights[token]
        mass += weights[token]
    drawn = draw(logits.expand(SAMPLES, 6), choice, seeded(2)).bincount(minlength=6)
    assert chi_square_p(drawn, SAMPLES * expected / expected.sum()) > LEVEL


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_tokens_are_drawn_and_zero_temperature_is_greedy(sampler):
    model, plan = tiny_model(), make_plan("exact 5", 6, LENGTH)
    got = SAMPLERS[sampler](model, plan, choice=PLAIN, vocab_size=IDS, generator=seeded(0))
    assert got.tokens.max() < IDS
    greedy = SAMPLERS[sampler](
        model, plan, choice=TokenChoice(0), vocab_size=IDS, generator=seeded(0)
    )
    assert torch.equal(
        greedy.tokens, generate(model, plan, choice=TokenChoice(0), vocab_size=IDS).tokens
    )


@pytest.mark.parametrize("mode", ["l2r", "exact 4", "exact 30", "even 5"])
def test_the_baselines_count_their_work(mode):
    """A cached row is fed every group, and what no copy of the group before it left in the cache; an uncached one all
    known tokens and the group, wherever it reveals something."""
    model, plan = tiny_model(), make_plan(mode, 5, LENGTH)
    rows = [[size for size in row if size] for row in group_sizes(plan).tolist()]
    common = {"choice": PLAIN, "vocab_size": IDS, "generator": seeded(0)}
    cached, uncached = decode_cached(model, plan, **common), decode_uncached(model, plan, **common)
    assert cached.token_forwards == sum(
        sum(sizes) + sum(size - 1 for size in sizes[:-1]) for sizes in rows
    )
    assert uncached.token_forwards == sum(
        sum(sizes[: g + 1]) for sizes in rows for g in range(len(sizes))
    )
    assert (
        cached.model_calls
        == uncached.model_calls
        == len({s for row in plan.step.tolist() for s in row})
    )
    assert torch.equal(cached.step, torch.zeros_like(plan.step).scatter(1, plan.order, plan.step))


def test_the_baselines_refuse_what_they_do_not_cover():
    plan, common = l2r_plan(2, 8), {"choice": PLAIN, "vocab_size": IDS, "generator": seeded(0)}
    given = l2r_plan(2, 8, torch.arange(8).expand(2, 8) < 3)
    for sampler in SAMPLERS.values():
        with pytest.raises(ValueError, match="adaln"):
            sampler(tiny_model(target="input"), plan, **common)
        with pytest.raises(ValueError, match="eval"):
            sampler(tiny_model().train(), plan, **common)
        with pytest.raises(ValueError, match="given"):
            sampler(tiny_model(), given, **common)


# ---- timing a part of the calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact 4", "exact 40", "even 5"])
def test_a_part_of_an_encoders_plan_has_the_same_calls(mode):
    """What a call costs an encoder is the rows it feeds and the positions it reveals."""
    encoder = tiny_model(attention="full", target="none", mask_token=IDS)
    plan, tokens = make_plan(mode, 5, LENGTH), torch.zeros(5, LENGTH).long()
    revealed, part = [], []
    whole = generate(encoder, plan, generator=seeded(0), vocab_size=IDS, progress=revealed.append)
    assert whole.model_calls == model_calls("encoder", plan)
    assert whole.token_forwards == LENGTH * int(group_sizes(plan).count_nonzero())
    calls = [0, 2, whole.model_calls - 1]
    got = generate(
        encoder,
        only_calls(plan, calls),
        tokens,
        generator=seeded(0),
        vocab_size=IDS,
        progress=part.append,
    )
    assert part == [revealed[call] for call in calls]
    assert got.token_forwards == LENGTH * int((group_sizes(plan)[:, calls] > 0).sum())
    assert generate(encoder, only_calls(plan, []), tokens, vocab_size=IDS).model_calls == 0


def test_a_part_of_the_uncached_calls_reveals_that_part():
    model, plan = tiny_model(), make_plan("even 4", 3, LENGTH)
    calls, common = [1, 3], {"choice": PLAIN, "vocab_size": IDS}
    got = decode_uncached(model, plan, generator=seeded(0), calls=calls, **common)
    whole = decode_uncached(model, plan, generator=seeded(0), **common)
    run = torch.isin(got.step, torch.tensor(calls))
    assert (got.log_probs[run] < 0).all() and (got.log_probs[~run] == 0).all()
    assert (got.model_calls, got.token_forwards) == (whole.model_calls, whole.token_forwards)


def test_groups_of_a_row_are_its_own_non_empty_steps():
    plan = Plan(torch.arange(4).expand(2, 4), torch.tensor([[3, 3, 7, 9], [0, 1, 1, 1]]))
    assert row_groups(plan).tolist() == [[0, 0, 1, 2], [0, 1, 1, 1]]
    assert group_sizes(plan).tolist() == [[2, 1, 1], [1, 3, 0]]
    assert (model_calls("ours", plan), model_calls("no-cache", plan)) == (3, 5)


# ---- models and the floor --------------------------------------------------------------------------------------------


def test_logits_are_scaled_to_the_entropy_of_a_language_model():
    for config in (bench.SIZES["tiny"][0], bench.encoder_config(*bench.SIZES["tiny"])):
        model = bench.random_model(config, 0, torch.device("cpu"))
        _, flat = bench.scale_logits(model, 1.0, 500, 16, seed=0)
        assert math.log(500) - 0.1 < flat < math.log(500)
        scale, entropy = bench.scale_logits(model, None, 500, 16, seed=0)
        assert scale > 1 and abs(entropy - bench.ENTROPY) < 0.01
        assert bench.scale_logits(model, 1.0, 500, 16, seed=0) == (1.0, entropy), (
            "the scaled weights have this entropy"
        )


def test_the_floor_counts_bytes_and_operations():
    """Two rows of three tokens in groups of 2 and 1: input 0 twice for the first group, then 1 and 2 with 0 cached."""
    c = ModelConfig(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
    plan = Plan(torch.arange(3).expand(2, 3), torch.tensor([[0, 0, 1], [0, 0, 1]]))
    blocks, head = 12 * 2 * 16**2, 50 * 16
    expected_bytes = [4 * (blocks + head), 4 * (blocks + head + 2 * 2 * 16 * 2)]
    # Pairs of an input and one it sees, per row: the two copies see themselves; 1 and 2 see 2 and 3 inputs.
    expected_flops = [
        2 * (2 * 2 * blocks + 2 * 2 * head + 4 * 2 * 16 * 2),
        2 * (2 * 2 * blocks + 2 * head + 128 * 5),
    ]
    slow_memory, slow_processor = Rates(1e30, 10.0), Rates(10.0, 1e30)
    floor = floor_of(c, plan, 50, 4, slow_memory)
    assert floor["floor_bytes"] == sum(expected_bytes) and floor["floor_flops"] == sum(
        expected_flops
    )
    assert floor["floor_seconds"] == pytest.approx(sum(expected_bytes) / 10)
    assert floor_of(c, plan, 50, 4, slow_processor)["floor_seconds"] == pytest.approx(
        sum(expected_flops) / 10
    )


# ---- the script ------------------------------------------------------------------------------------------------------

TINY = [
    "decode",
    "--size",
    "tiny",
    "--batch-size",
    3,
    "--length",
    32,
    "--device",
    "cpu",
    "--repeats",
    2,
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Folder with all that one run wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    outputs = [f"--{option}={folder / option}" for option in ("json", "markdown", "plot")]
    done = run_script("bench.py", *TINY, "--steps", 4, 32, "--slow-calls", 4, *outputs)
    return folder, done.stdout


def test_every_system_and_step_is_reported_with_figures_that_agree(measured):
    folder, _ = measured
    result = json.loads((folder / "json").read_text())
    rows = {(row["system"], row["steps"]): row for row in result["rows"]}
    assert set(rows) == {
        (s, k) for s in ("ours", "baseline", "no-cache", "encoder") for k in (4, 32)
    }
    for (system, steps), row in rows.items():
        ours = rows["ours", steps]
        assert len(row["all_seconds"]) == 2
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["times_ours"] == pytest.approx(row["seconds"] / ours["seconds"])
        assert row["tokens_per_second"] == pytest.approx(3 * 32 / row["seconds"])
        assert row["ms_per_call"] == pytest.approx(1000 * row["seconds"] / row["model_calls"])
        assert row["extrapolated"] == (row["measured_calls"] < row["model_calls"])
        assert row["extrapolated"] == (system in ("no-cache", "encoder") and row["model_calls"] > 4)
    for steps in (4, 32):
        plan = mdm_plan(3, 32, steps, seeded(0))
        row_wise, step_wise = group_sizes(plan).shape[1], len(plan.step.unique())
        for system, calls in {
            "ours": row_wise,
            "baseline": step_wise,
            "no-cache": step_wise,
            "encoder": row_wise,
        }.items():
            assert rows[system, steps]["model_calls"] == calls
        assert rows["encoder", steps]["token_forwards"] == 32 * int(
            group_sizes(plan).count_nonzero()
        )
        assert 3 * 32 <= rows["ours", steps]["token_forwards"] <= 3 * (2 * 32 + steps)
        floor = rows["ours", steps]
        assert floor["floor_seconds"] > 0
        assert floor["times_floor"] == pytest.approx(floor["seconds"] / floor["floor_seconds"])


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
    assert (
        result["command"].startswith("python bench.py decode --size tiny")
        and result["command"] in markdown
    )
    assert printed.strip() in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 8 and len({line.count("|") for line in table}) == 1
    assert "Extrapolated" in printed and "4 of " in printed and "only the ratios" in printed
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")


def test_a_run_gives_size_and_weights_and_keeps_its_logits(tmp_path):
    run = tiny_config(make_data(tmp_path), tmp_path, steps=6)
    train.train(run, ALONE)
    plain = tiny_config(
        make_data(tmp_path),
        tmp_path,
        "plain",
        steps=6,
        order=OrderConfig("l2r"),
        model__target="none",
    )
    train.train(plain, ALONE)
    settings = {
        "run": str(run.run_folder),
        "device": "cpu",
        "batch_size": 2,
        "length": 16,
        "steps": (4,),
        "repeats": 1,
    }
    bench.bench_decode(bench.DecodeOptions(**settings, dtype="bfloat16", json=tmp_path / "json"))
    result = json.loads((tmp_path / "json").read_text())
    assert (
        result["models"]["ours"]["logit_scale"] == 1 and result["settings"]["dtype"] == "bfloat16"
    )
    assert result["models"]["ours"]["parameters"] == AOGPT(run.model).num_params()
    assert [row["system"] for row in result["rows"]] == ["ours", "baseline", "no-cache", "encoder"]
    with pytest.raises(ValueError, match="not AO-GPT"):
        bench.bench_decode(bench.DecodeOptions(**settings | {"run": str(plain.run_folder)}))


def test_all_calls_of_chosen_systems_and_of_even_plans():
    done = run_script(
        "bench.py",
        *TINY,
        "--steps",
        8,
        "--slow-calls",
        0,
        "--plan",
        "even",
        "--systems",
        "encoder",
        "ours",
    )
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [(row[0].strip(), row[4].strip(), row[-1].strip()) for row in table] == [
        ("encoder", "8", "all"),
        ("ours", "8", "all"),
    ]
    assert "Extrapolated" not in done.stdout


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"length": 129}, "--length 129 exceeds .* block size, 128"),
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
    with pytest.raises(ValueError, match=words):
        bench.bench_decode(
            bench.DecodeOptions(**{"size": "tiny", "length": 32, "device": "cpu"} | settings)
        )


def test_bad_command_lines_end_with_a_message():
    assert_user_error(
        run_script("bench.py", *TINY, "--systems", "ours", "theirs", check=False),
        "theirs",
        "no-cache",
    )
    assert_user_error(
        run_script("bench.py", *TINY, "--length", 129, check=False), "--length 129", "block size"
    )
