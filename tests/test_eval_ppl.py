"""eval_ppl.py: what it prints and writes, the same for any batches and processes."""

import json
import math
import shutil
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ALONE, LENGTH, flip_byte, make_data, torchrun
from reference import direct_nll

import eval_ppl
from checkpoints import load as checkpoint
from checkpoints import store
from convert import convert
from data.loader import TokenDataset
from data.prepare import Prepare, prepare
from evaluation.estimates import estimate
from evaluation.likelihood import JOINT_DRAWS, BatchRunner
from evaluation.published import PUBLISHED, published_perplexity
from orders import OrderConfig, orders_at
from runtime.files import sha256_file


@pytest.fixture
def evaluate(script, run, data, tmp_path):
    """Evaluate the run; the JSON report, which must be JSON and no dialect of it."""

    def call(*arguments, path=run):
        status, _, err = script(
            eval_ppl, path, "--datasets", data, "--json", tmp_path / "ppl.json", *arguments
        )
        assert status == 0, err
        return read_json(tmp_path / "ppl.json")

    return call


def read_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def by_name(report):
    return {(r["orders"], r["ensemble"]): r for r in report["results"]}


def direct(run, data, kind, draws, seed, count, weights="ema"):
    """Nats per token (count, draws, T), each in prediction order, from the model alone; and the orders."""
    model = checkpoint.load_model(run, weights)
    tokens = TokenDataset(data, "val", LENGTH).blocks(range(count))
    orders = [
        orders_at(OrderConfig(kind), seed, draw, range(count), LENGTH) for draw in range(draws)
    ]
    return np.stack(
        [-model.token_log_probs(tokens, order).double().numpy() for order in orders], axis=1
    ), orders


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_numbers_are_those_of_the_model_computed_directly(evaluate, run, data, weights):
    report = evaluate("--num-orders", 3, "--max-sequences", 21, "--seed", 5, "--weights", weights)
    for kind, draws in (("l2r", 1), ("random", 3)):
        per_draw = direct(run, data, kind, draws, 5, 21, weights)[0].mean(axis=2)
        per_sequence = per_draw.mean(axis=1)
        result = by_name(report)[kind, 1]
        # batches of 16 and 5 against one of 21: float32 rounding
        assert result["nll"] == pytest.approx(per_sequence.mean(), rel=1e-6)
        expected = math.sqrt(((per_sequence - per_sequence.mean()) ** 2).sum() / 20 / 21)
        assert result["standard_error"] == pytest.approx(expected, rel=1e-4)
        perplexity = math.exp(per_sequence.mean())
        assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
        # Student's t of 20 degrees of freedom
        interval = [perplexity * math.exp(sign * 2.0859634 * expected) for sign in (-1, 1)]
        assert result["perplexity_95"] == pytest.approx(interval, rel=1e-4)
        assert result["bits_per_token"] == pytest.approx(
            per_sequence.mean() / math.log(2), rel=1e-6
        )
        monte_carlo = math.sqrt(per_draw.var(axis=1, ddof=1).mean() / (21 * 3)) if draws > 1 else 0
        assert result["monte_carlo_error"] == pytest.approx(monte_carlo, rel=1e-4)
        assert (result["sequences"], result["tokens"], result["draws"]) == (21, 21 * LENGTH, draws)
        assert (
            result["token_forwards"] == 21 * LENGTH * draws and result["seconds_of_all_sizes"] > 0
        )
        assert result["stopped"] == ("exact" if kind == "l2r" else "budget")


def test_ensembles_gain_what_they_gain_when_every_step_of_every_order_is_scored(
    evaluate, run, data
):
    """On a trained model: within 4 standard errors of the definition, over the same texts."""
    arguments = ["--orders", "random", "--ensemble", 1, 2, 8, "--max-sequences", 40]
    cheap = by_name(evaluate(*arguments, "--num-orders", 40))
    tokens = TokenDataset(data, "val", LENGTH).blocks(range(40))
    settings = checkpoint.load_model(run), tokens, OrderConfig("random"), (1, 2, 8), 0
    draws = [direct_nll(*settings, draw, range(40)).mean(dim=1) for draw in range(3)]
    nll = torch.stack(draws, dim=1)  # (40, 3, sizes)
    for i, size in enumerate((2, 8), 1):
        result = cheap["random", size]
        loss, gain = estimate(nll[..., i]), estimate(nll[..., 0] - nll[..., i])
        assert result["gain"] > 0
        error = math.hypot(result["gain_error"], gain.standard_error)
        assert abs(result["gain"] - gain.nll) < 4 * error
        error = math.hypot(result["monte_carlo_error"], loss.monte_carlo_error)
        assert abs(result["nll"] - loss.nll) < 4 * error
        assert result["nll"] == pytest.approx(cheap["random", 1]["nll"] - result["gain"])
        assert (result["draws"], result["contexts"]) == (40, 5)
        assert result["token_forwards"] == 40 * LENGTH * (40 + 5 * size)
    assert cheap["random", 8]["gain"] > cheap["random", 2]["gain"]


def test_orders_of_any_distribution(evaluate):
    names = ["mixture:l2r_prob=1", "mixture:l2r_prob=0.0", "fixed_random:seed=4", "l2r", "random"]
    results = by_name(evaluate("--orders", *names, "--max-sequences", 9))
    same = [("mixture:l2r_prob=1", "l2r"), ("mixture:l2r_prob=0.0", "random")]
    for one, other in same:
        assert results[one, 1]["nll"] == results[other, 1]["nll"]
    assert len({r["nll"] for r in results.values()}) == 3
    assert results["fixed_random:seed=4", 1]["monte_carlo_error"] == 0


def test_the_answer_does_not_depend_on_processes_or_batches(evaluate, run, data, encoder, tmp_path):
    ensembles = ["--num-orders", 4, "--seed", 1, "--ensemble", 1, 4, "--target-se", 0.02]
    for path, arguments in ((run, ensembles), (encoder, ["--num-orders", 3])):
        arguments = ["--max-sequences", 21, *arguments]
        two = tmp_path / "two.json"
        torchrun(2, "eval_ppl.py", path, "--datasets", data, *arguments, "--json", two)
        reports = [read_json(two)]
        reports += [evaluate(*arguments, "--batch-size", size, path=path) for size in (1, 7)]
        assert reports[0]["processes"] == 2
        one = by_name(evaluate(*arguments, path=path))
        for report in reports:
            assert by_name(report).keys() == one.keys()
            for key, result in by_name(report).items():
                for number in ("nll", "standard_error", "monte_carlo_error", "gain", "gain_error"):
                    # float32 rounding of values of about 3, averaged over hundreds of tokens
                    expected = pytest.approx(one[key][number], abs=1e-6)
                    assert result[number] == expected, (key, number)
                for number in ("draws", "contexts", "stopped", "token_forwards"):
                    assert result[number] == one[key][number]


def test_draws_go_on_until_the_target_or_the_budget(evaluate):
    arguments = ["--orders", "random", "--max-sequences", 20, "--num-orders", 30]
    spread = by_name(evaluate(*arguments))["random", 1]["monte_carlo_error"] * math.sqrt(
        30
    )  # of a single draw
    target = spread / math.sqrt(12)
    result = by_name(evaluate(*arguments, "--target-se", target))["random", 1]
    assert result["stopped"] == "target" and result["monte_carlo_error"] <= target
    assert 8 <= result["draws"] <= 16
    result = by_name(evaluate(*arguments, "--target-se", target / 10))["random", 1]
    assert (result["stopped"], result["draws"]) == ("budget", 30) and result[
        "monte_carlo_error"
    ] > target / 10


def test_an_encoder_is_not_stopped_before_enough_draws_show_its_error(evaluate, encoder):
    report = evaluate("--max-sequences", 5, "--num-orders", 12, "--target-se", 100, path=encoder)
    assert by_name(report)["random", 1]["draws"] == JOINT_DRAWS


def test_the_rest_after_the_last_block_counts_where_nothing_may_be_dropped(
    evaluate, run, data, tmp_path
):
    """Protocol full, cut to a rest of 5 tokens: every token counts once."""
    full = shutil.copytree(data, tmp_path / "full")
    meta = json.loads((full / "meta.json").read_text())
    tokens = TokenDataset(data, "val", 1).tokens[: 3 * LENGTH + 5]
    (full / "val.bin").write_bytes(tokens.tobytes())
    meta["splits"]["val"] |= {"tokens": len(tokens), "sha256": sha256_file(full / "val.bin")}
    (full / "meta.json").write_text(json.dumps(meta | {"protocol": "full"}))
    report = evaluate(
        "--datasets",
        full,
        "--orders",
        "l2r",
        "random",
        "--ensemble",
        1,
        2,
        "--per-token",
        tmp_path / "t.npz",
    )
    result, model = by_name(report)["l2r", 1], checkpoint.load_model(run)
    rows = [
        torch.from_numpy(part.astype(np.int64))[None] for part in np.split(tokens, [16, 32, 48])
    ]
    nll = [-model.token_log_probs(row, torch.arange(row.shape[1])[None]).double() for row in rows]
    assert result["nll"] == pytest.approx(float(torch.cat(nll, dim=1).mean()), rel=1e-6)
    assert (result["sequences"], result["tokens"]) == (4, 53)
    saved = np.load(tmp_path / "t.npz", allow_pickle=False)
    assert (
        np.isnan(saved["full/l2r/1/nll"]).sum() == 11 and (saved["full/tokens"] == -1).sum() == 11
    )
    assert np.nanmean(saved["full/random/1/nll"]) == pytest.approx(
        by_name(report)["random", 1]["nll"]
    )
    assert by_name(report)["random", 2]["gain"] > 0


def test_the_first_token_of_a_model_without_a_start_token_is_not_scored(
    evaluate, plain, data, tmp_path
):
    """An export that says so, as one of GPT-2 does."""
    convert(str(plain), tmp_path / "export")
    settings = json.loads((tmp_path / "export" / "config.json").read_text())
    (tmp_path / "export" / "config.json").write_text(json.dumps(settings | {"scored_from": 1}))
    report = evaluate(
        "--max-sequences", 5, "--per-token", tmp_path / "t.npz", path=tmp_path / "export"
    )
    (result,) = report["results"]
    expected = direct(plain, data, "l2r", 1, 0, 5)[0][:, 0]
    assert result["nll"] == pytest.approx(expected[:, 1:].mean(), rel=1e-6)
    assert (result["tokens"], result["token_forwards"]) == (5 * (LENGTH - 1), 5 * LENGTH)
    nll = np.load(tmp_path / "t.npz")["data/l2r/1/nll"]
    assert np.isnan(nll[:, 0]).all() and nll[:, 1:] == pytest.approx(expected[:, 1:], rel=1e-5)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_report_holds_settings_checkpoint_data_seed_and_versions(evaluate, run, data):
    report = evaluate("--max-sequences", 3, "--seed", 5, "--orders", "l2r")
    assert [(r["dataset"], r["orders"], r["ensemble"]) for r in report["results"]] == [
        ("data", "l2r", 1)
    ]
    expected = {"path": str(store.find(run)[-1]), "step": 40, "weights": "ema", "system": None}
    assert report["checkpoint"] == expected
    settings = report["settings"]
    assert (settings["seed"], settings["max_sequences"], settings["dtype"]) == (5, 3, "float32")
    meta, facts = json.loads((data / "meta.json").read_text()), report["results"][0]["data"]
    assert (
        facts["sha256"] == meta["splits"]["val"]["sha256"]
        and facts["tokens"] == meta["splits"]["val"]["tokens"]
    )
    assert (facts["tokenizer"], facts["split"], facts["block_size"]) == ("bytes", "val", LENGTH)
    for key in ("protocol", "packing"):
        assert facts.get(key) == meta.get(key)
    assert (
        report["versions"]["torch"] == torch.__version__
        and {"python", "numpy"} <= report["versions"].keys()
    )
    assert report["processes"] == 1 and report["device"] == "cpu"


def test_several_data_sets_and_splits(evaluate, data, tmp_path):
    other = make_data(tmp_path, words=900, seed=1).rename(tmp_path / "other")
    results = evaluate(
        "--datasets", data, other, "--orders", "l2r", "--split", "train", "--max-sequences", 6
    )["results"]
    assert [(r["dataset"], r["data"]["split"]) for r in results] == [
        ("data", "train"),
        ("other", "train"),
    ]
    assert results[0]["nll"] != results[1]["nll"]


def test_the_entropies_of_the_text_stand_beside_the_model(evaluate, data):
    tokens = np.array(TokenDataset(data, "train", 1).tokens)
    share = np.bincount(tokens) / len(tokens)
    share = share[share > 0]
    entropies = evaluate("--max-sequences", 2)["entropies"]["data"]
    assert entropies["unigram entropy of train"] == pytest.approx(-(share * np.log(share)).sum())
    assert 0 < entropies["bigram entropy of train"] < entropies["unigram entropy of train"]


def test_the_markdown_table_is_on_the_terminal_and_beside_the_report(script, run, data, tmp_path):
    arguments = [
        "--datasets",
        data,
        "--max-sequences",
        20,
        "--ensemble",
        1,
        4,
        "--json",
        tmp_path / "ppl.json",
    ]
    status, out, _ = script(eval_ppl, run, *arguments)
    assert status == 0
    table = (tmp_path / "ppl.md").read_text()
    assert table.strip() == out.strip() and "published" not in table
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    assert len({len(row) for row in rows}) == 1 and all(set(cell) <= {"-", ":"} for cell in rows[1])
    found = {(row[1], row[2]): dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    labels = {"l2r": "left to right", "random": "any order"}
    results = by_name(read_json(tmp_path / "ppl.json"))
    assert list(results) == [("l2r", 1), ("random", 1), ("random", 4)]
    for (kind, size), result in results.items():
        row = found[labels[kind], str(size)]
        assert (
            row["nats/token"] == f"{result['nll']:.4f}"
            and row["perplexity"] == f"{result['perplexity']:.3f}"
        )
        assert row["token-forwards"] == f"{result['token_forwards']:,}"
    assert found["any order", "4"]["gain"].startswith(f"{results['random', 4]['gain']:.5f}")
    assert "unigram entropy of train" in table and "no ensembles of l2r" in table


def test_the_loss_of_every_token(script, run, data, encoder, tmp_path):
    arguments = [
        "--datasets",
        data,
        "--max-sequences",
        9,
        "--per-token",
        tmp_path / "t.npz",
        "--seed",
        3,
    ]
    assert script(eval_ppl, run, *arguments, "--num-orders", 3)[0] == 0
    saved = np.load(tmp_path / "t.npz", allow_pickle=False)
    tokens = TokenDataset(data, "val", LENGTH).blocks(range(9)).numpy()
    assert np.array_equal(saved["data/tokens"], tokens) and np.array_equal(
        saved["data/blocks"], np.arange(9)
    )
    in_order, orders = direct(run, data, "random", 3, 3, 9)
    expected = np.zeros((9, LENGTH))
    for draw, order in enumerate(orders):
        rows = np.arange(9)[:, None]
        expected[rows, order.numpy()] += in_order[:, draw] / 3
    assert saved["data/random/1/nll"] == pytest.approx(expected, rel=1e-5)
    assert saved["data/l2r/1/nll"] == pytest.approx(
        direct(run, data, "l2r", 1, 3, 9)[0][:, 0], rel=1e-5
    )

    status, out, _ = script(eval_ppl, run, *arguments, "--ensemble", 2)
    assert status == 0 and "M = 1 only" in out
    assert "data/random/1/nll" in np.load(tmp_path / "t.npz")
    report = tmp_path / "ppl.json"
    assert script(eval_ppl, encoder, *arguments, "--json", report)[0] == 0
    (result,) = read_json(report)["results"]
    mean = np.load(tmp_path / "t.npz")["data/random/1/nll"].mean()
    assert mean == pytest.approx(result["nll"], rel=1e-6)


def test_bfloat16_is_compared_with_float32(script, run, data, tmp_path):
    arguments = [
        "--datasets",
        data,
        "--max-sequences",
        8,
        "--num-orders",
        1,
        "--json",
        tmp_path / "ppl.json",
    ]
    results = {}
    for dtype in ("float32", "bfloat16"):
        status, out, _ = script(eval_ppl, run, *arguments, "--dtype", dtype)
        results[dtype] = by_name(read_json(tmp_path / "ppl.json"))
        assert status == 0 and ("bfloat16 - float32 on 8 blocks" in out) == (dtype == "bfloat16")
    for key, result in results["bfloat16"].items():
        gap = result["bfloat16_minus_float32"]
        assert gap["sequences"] == 8 and 0 < abs(gap["mean"]) <= gap["largest"] < 0.05
        # the sample is everything here
        assert gap["mean"] == pytest.approx(
            result["nll"] - results["float32"][key]["nll"], abs=1e-6
        )


def test_the_orders_follow_from_the_seed(evaluate):
    def numbers(seed):
        results = by_name(evaluate("--seed", seed, "--max-sequences", 5, "--ensemble", 1, 4))
        return {key: (r["nll"], r["gain"]) for key, r in results.items()}

    first, again, other = (numbers(seed) for seed in (1, 1, 2))
    assert first == again and first["l2r", 1] == other["l2r", 1]
    assert (
        first["random", 1] != other["random", 1] and first["random", 4][1] != other["random", 4][1]
    )


def test_what_a_single_sequence_or_draw_does_not_tell_is_unknown_and_the_report_is_still_json(
    evaluate, tmp_path
):
    results = by_name(evaluate("--max-sequences", 1, "--num-orders", 1))
    assert (
        results["l2r", 1]["standard_error"] is None and results["l2r", 1]["monte_carlo_error"] == 0
    )
    assert results["random", 1]["monte_carlo_error"] is None
    assert "unknown" in (tmp_path / "ppl.md").read_text()


@pytest.mark.parametrize("left_over", [1, 2, 9])
def test_what_is_left_after_the_last_block_counts_by_its_tokens_in_mean_and_error(
    script, run, left_over, tmp_path
):
    """Even a single token; the standard error is that of a mean weighted by tokens."""
    text, folder = tmp_path / "text.txt", tmp_path / "data"
    text.write_text(
        ("the order of any mask " * 20)[: 12 * LENGTH + left_over - 1]
    )  # and end-of-text
    prepare(Prepare("text", source=(text,), tokenizer="bytes", split="test", out=folder))
    dataset = TokenDataset(folder, "test", LENGTH)
    assert dataset.tail().shape == (1, left_over)
    status, _, err = script(
        eval_ppl, run, "--datasets", folder, "--orders", "l2r", "--json", tmp_path / "ppl.json"
    )
    assert status == 0, err
    (result,) = read_json(tmp_path / "ppl.json")["results"]
    model = checkpoint.load_model(run)
    rows = [*dataset.blocks(list(range(dataset.num_blocks))), dataset.tail()[0]]
    nll = [-model.token_log_probs(row[None], torch.arange(len(row))[None]).double() for row in rows]
    total, tokens, n = sum(float(x.sum()) for x in nll), sum(x.numel() for x in nll), len(rows)
    mean = total / tokens
    assert result["tokens"] == tokens and result["nll"] == pytest.approx(mean, rel=1e-6)
    squares = sum((float(x.sum()) - mean * x.numel()) ** 2 for x in nll)
    assert result["standard_error"] == pytest.approx(
        math.sqrt(squares / (n - 1) * n) / tokens, rel=1e-4
    )


def test_a_target_alone_has_a_budget_that_reaches_it(evaluate):
    results = by_name(evaluate("--orders", "random", "--target-se", 0.01, "--max-sequences", 6))
    assert (
        results["random", 1]["stopped"] == "target"
        and results["random", 1]["monte_carlo_error"] <= 0.01
    )


def test_a_text_whose_file_was_changed_is_refused(script, run, data, tmp_path):
    changed = shutil.copytree(data, tmp_path / "changed")
    flip_byte(changed / "val.bin", 10)
    status, _, err = script(eval_ppl, run, "--datasets", changed)
    assert status == 2 and "checksum" in err


# ---- published figures ---------------------------------------------------------------------------


def published(
    system, size=(12, 768), orders="random", ensemble=1, split="test", weights="ema", **changes
):
    meta = {"protocol": "sedd", "splits": {split: {}}, "settings": {"dataset": "ptb"}} | changes
    config = SimpleNamespace(n_layer=size[0], n_embd=size[1])
    loaded = SimpleNamespace(system=system, model=SimpleNamespace(config=config))
    dataset = SimpleNamespace(meta=meta, num_blocks=3)
    eval_set = SimpleNamespace(dataset=dataset, split=split, count=3)
    task = SimpleNamespace(eval_set=eval_set, loaded=loaded, name=orders)
    return published_perplexity(task, ensemble, weights)


def test_published_figures_stand_beside_released_models_under_the_same_protocol_only():
    assert published("AO-GPT") == 141.92
    assert published("AO-GPT", (24, 1024), ensemble=64) == 85.75
    assert published("GPT-2", (24, 1024), "l2r") == 123.14
    assert published("RADD", settings={"dataset": "lm1b"}) == 74.28
    assert published("RADD", split="train", settings={"dataset": "wikitext2"}) == 38.26
    assert published("GPT-2") is None  # no any-order likelihood
    assert published(None) is None
    for difference in (
        {"ensemble": 16},
        {"size": (4, 128)},
        {"orders": "mixture:l2r_prob=0"},
        {"protocol": "full"},
        {"notes": ["another tokenizer"]},
        {"settings": {"dataset": "books"}},
        {"settings": {"dataset": "wikitext2"}},  # measured on its train split
        {"split": "train"},
        {"weights": "raw"},
    ):
        assert published("AO-GPT", **difference) is None, difference
    table = tomllib.loads(PUBLISHED.read_text())
    kinds = [kind for size in ("small", "medium") for kind in table[size].values()]
    figures = [row for kind in kinds for row in kind.values()]
    assert len(figures) == 22 and all(len(row) == len(table["datasets"]) == 5 for row in figures)


# ---- batches -------------------------------------------------------------------------------------


def batches(capacity, **settings):
    """Run 23 rows with work that runs out of memory above `capacity` rows."""
    seen = []

    def work(tokens, rows):
        if len(rows) > capacity:
            raise torch.OutOfMemoryError("out of memory")
        seen.append(len(rows))
        return torch.arange(rows.start, rows.stop)

    eval_set = SimpleNamespace(
        count=23,
        name="text",
        dataset=SimpleNamespace(num_blocks=23),
        tokens=lambda rows: torch.zeros(len(rows), 256),
    )
    runner = BatchRunner(ALONE, torch.float32, 256, **settings)  # 16 rows are 4,096 tokens
    return runner.run(SimpleNamespace(eval_set=eval_set, name="l2r"), work).tolist(), seen


def test_the_batch_is_halved_until_it_fits():
    assert batches(100) == (list(range(23)), [16, 7])
    assert batches(5) == (list(range(23)), [4, 4, 4, 4, 4, 3])
    with pytest.raises(ValueError, match="out of memory at 1 sequences.*use a device with more"):
        batches(0)
    with pytest.raises(ValueError, match="out of memory at 8 sequences.*leave out --batch-size"):
        batches(5, batch_size=8)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_a_model_has_the_orders_that_it_knows_and_no_others(evaluate, script, plain, encoder, data):
    expected = direct(plain, data, "l2r", 1, 0, 4)[0].mean()
    results = by_name(evaluate("--max-sequences", 4, path=plain))
    assert list(results) == [("l2r", 1)]
    assert results["l2r", 1]["nll"] == pytest.approx(expected, rel=1e-6)
    no_ensemble = ["--ensemble", 1, 8]
    for path, arguments, words in (
        (plain, ["--orders", "random"], "has no 'random' perplexity; give --orders l2r"),
        (plain, no_ensemble, "knows one order only, so there is no ensemble of orders"),
        (encoder, ["--orders", "l2r"], "is an encoder and has no 'l2r' perplexity; give --orders"),
        (encoder, no_ensemble, "its predictions do not depend on the order of the context"),
    ):
        status, _, err = script(eval_ppl, path, "--datasets", data, *arguments)
        assert status == 2 and words in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--max-sequences", 0], ["--max-sequences is 0", "at least 1"]),
        (["--num-orders", 0], ["--num-orders is 0"]),
        (["--batch-size", -2], ["--batch-size is -2"]),
        (["--seed", -1], ["seed", "-1"]),
        (["--split", "tset"], ["no split 'tset'", "'train', 'val'"]),
        (
            ["--datasets", "no/such/folder"],
            ["no/such/folder is no prepared dataset", "data/prepare.py"],
        ),
        (["--datasets", "lm1b"], ["lm1b is not prepared yet", "python data/prepare.py lm1b"]),
        (["--datasets"], ["--datasets"]),
        (["--datasets", "a/books", "b/books"], ["--datasets a/books b/books", "give each its own"]),
        (["--orders", "backwards"], ["backwards", "l2r"]),
        (["--orders"], ["--orders"]),
        (["--orders", "fixed_blockwise:blocks=3"], ["'blocks' is no setting", "block, seed"]),
        (["--orders", "random:seed=5"], ["'seed' is no setting of random; it has none"]),
        (["--orders", "fixed_blockwise:block=17"], ["block size is 16", "smaller block"]),
        (["--json", "same.npz", "--per-token", "same.npz"], ["--json same.npz", ".json"]),
        (["--orders", "fixed_blockwise:block=x"], ["block is 'x'", "int"]),
        (
            ["--orders", "fixed_blockwise:block=0"],
            ["--orders fixed_blockwise:block=0", "at least 1"],
        ),
        (["--ensemble", 0], ["--ensemble is 0", "at least 1"]),
        (["--ensemble"], ["--ensemble"]),
        (["--ensemble", 8, "--orders", "l2r"], ["uniformly random orders, not of l2r"]),
        (["--per-token", "t.json"], ["--per-token t.json", ".npz"]),
        (["--json", "table.md"], ["--json table.md", ".json"]),
        (["--target-se", 0], ["--target-se is 0"]),
        (["--target-se", 0.1, "--num-orders", 1], ["--num-orders 2 or more"]),
        (["--max-sequencez", 3], ["--max-sequencez", "--max-sequences"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:30],
)
def test_a_bad_argument_of_eval_ends_with_status_2_and_a_message(
    script, run, data, arguments, words
):
    if "--datasets" not in arguments:
        arguments = ["--datasets", data, *arguments]
    status, _, err = script(eval_ppl, run, *arguments)
    assert status == 2
    for word in words:
        assert word in " ".join(err.split())


def test_data_of_another_tokenizer_or_block_or_too_short_for_one_are_errors(
    script, run, data, tmp_path
):
    other = shutil.copytree(data, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())

    def error(**changes):
        (other / "meta.json").write_text(json.dumps(meta | changes))
        status, out, err = script(eval_ppl, run, "--datasets", other)
        assert status == 2 and not out
        return err

    err = error(tokenizer="gpt2")
    assert (
        "holds gpt2 tokens, but the model was trained on bytes tokens" in err
        and "--tokenizer bytes" in err
    )
    err = error(protocol="sedd", block_size=32)
    assert (
        "packed into blocks of 32 tokens (protocol sedd), not of 16" in err
        and "--block-size 16" in err
    )
    (other / "val.bin").write_bytes(bytes(2 * (LENGTH - 1)))
    meta["splits"]["val"] |= {"tokens": LENGTH - 1, "sha256": sha256_file(other / "val.bin")}
    assert "fewer than one block of 16" in error()
