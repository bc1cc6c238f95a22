"""eval_ppl.py: what it prints and writes, the same for any batches and processes."""

import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    ALONE,
    LENGTH,
    flip_byte,
    make_data,
    prepared,
    torchrun,
    val_blocks,
    write_jsonl,
    write_rows,
)

import eval_ppl
from aogpt.checkpoints import load_model, store
from aogpt.data.loader import TokenDataset, read_tokens
from aogpt.evaluation import likelihood
from aogpt.evaluation.likelihood import (
    BatchRunner,
    Task,
    decoding_nll,
    token_nll,
    token_score_entropy,
)
from aogpt.evaluation.report import monte_carlo
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime.randomness import SCORED_ORDERS
from aogpt.sampling.plans import score_plan
from aogpt.scoring import token_log_probs


@pytest.fixture
def evaluate(script, run, data, tmp_path):
    """Evaluate a run with these options; the JSON report, and what the terminal
    shows."""

    def call(options="", *more, path=run, other=(), datasets=(data,)):
        report = tmp_path / "ppl.json"
        models = [path, other][: 1 + bool(other)]
        files = ["--overwrite", "--json", report]
        if datasets:
            files += ["--datasets", *datasets]
        status, out, err = script(eval_ppl, *models, *files, *options.split(), *more)
        assert status == 0, err
        return json.loads(report.read_text()) | {"terminal": out}

    return call


def by_name(report):
    return {(r["orders"], r["ensemble"]): r for r in report["results"]}


def direct(run, data, kind, draws, seed, count, weights="ema"):
    """Return nats per token (count, draws, T) in sequence order, from the model
    alone."""
    model = load_model(run, weights)
    rows = range(count)
    nll = []
    tokens = val_blocks(data, count)
    for draw in range(draws):
        order = orders_at(OrderConfig(kind), seed, draw, rows, LENGTH, SCORED_ORDERS)
        along = -token_log_probs(model, tokens, order).double()
        nll.append(torch.empty_like(along).scatter_(1, order, along))
    return torch.stack(nll, dim=1).numpy()


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_numbers_are_those_of_the_model_computed_directly(
    evaluate, run, data, weights
):
    report = evaluate(f"--num-orders 3 --max-sequences 21 --seed 5 --weights {weights}")
    for kind, draws in (("l2r", 1), ("random", 3)):
        per_draw = direct(run, data, kind, draws, 5, 21, weights).mean(axis=2)
        per_sequence = per_draw.mean(axis=1)
        mean = per_sequence.mean()
        result = by_name(report)[kind, 1]
        assert result["nll"] == pytest.approx(mean, rel=1e-6)
        expected = math.sqrt(((per_sequence - mean) ** 2).sum() / 20 / 21)
        assert result["standard_error"] == pytest.approx(expected, rel=1e-4)
        assert result["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
        # Student's t of 20 degrees of freedom
        interval = [math.exp(mean + sign * 2.0859634 * expected) for sign in (-1, 1)]
        assert result["perplexity_95"] == pytest.approx(interval, rel=1e-4)
        assert result["bits_per_token"] == pytest.approx(mean / math.log(2), rel=1e-6)
        # end-of-text is no byte
        is_byte = read_tokens(data, "val")[: result["tokens"]] != 256
        bits = result["bits_per_byte"] * is_byte.mean()
        assert bits == pytest.approx(result["bits_per_token"])
        monte_carlo = 0
        if draws > 1:
            variance = per_draw.var(axis=1, ddof=1).mean()
            monte_carlo = math.sqrt(variance / (21 * draws))
        assert result["monte_carlo_error"] == pytest.approx(monte_carlo, rel=1e-4)
        assert result["sequences"] == 21
        assert result["tokens"] == 21 * LENGTH
        assert result["draws"] == draws


def test_orders_of_any_distribution(evaluate):
    orders = "mixture:l2r_prob=1 mixture:l2r_prob=0.0 fixed_random:seed=4 l2r random"
    results = by_name(evaluate(f"--max-sequences 9 --orders {orders}"))
    losses = {order: result["nll"] for (order, _), result in results.items()}
    assert losses["mixture:l2r_prob=1"] == losses["l2r"]
    assert losses["mixture:l2r_prob=0.0"] == losses["random"]
    assert len(set(losses.values())) == 3
    assert results["fixed_random:seed=4", 1]["monte_carlo_error"] == 0


@pytest.mark.slow(reason="starts two processes, several times")
def test_the_answer_does_not_depend_on_processes_or_batches(
    evaluate, run, data, encoder, tmp_path, monkeypatch
):
    for path, options in (
        (run, "--max-sequences 21 --num-orders 4 --seed 1 --ensemble 1 4"),
        (encoder, "--max-sequences 21 --num-orders 3"),
    ):
        two = tmp_path / "two.json"
        files = ["--datasets", data, "--json", two, "--overwrite"]
        torchrun(2, "eval_ppl.py", path, *files, *options.split())
        of_two = json.loads(two.read_text())
        assert of_two["processes"] == 2
        expected = by_name(evaluate(options, path=path))
        assert_same_numbers(by_name(of_two), expected)
        for size in (1, 7):
            monkeypatch.setitem(likelihood.BATCH_TOKENS, "cpu", size * LENGTH)
            assert_same_numbers(by_name(evaluate(options, path=path)), expected)
        monkeypatch.undo()


def assert_same_numbers(results, expected):
    """Results by name differ by rounding in float32 at most."""
    numbers = ("nll", "standard_error", "monte_carlo_error", "gain", "gain_error")
    assert results.keys() == expected.keys()
    for key, result in results.items():
        for number in numbers:
            near = pytest.approx(expected[key][number], abs=1e-6)
            assert result[number] == near, (key, number)


@pytest.mark.parametrize("left_over", [1, 5])
def test_what_is_left_after_the_last_block_counts(evaluate, run, left_over, tmp_path):
    text = tmp_path / "text.txt"
    folder = tmp_path / "left"
    length = 12 * LENGTH + left_over - 1  # and end-of-text
    text.write_text(("the order of any mask " * 20)[:length])
    prepared("text", folder, text, split="test")
    dataset = TokenDataset(folder, "test", LENGTH)
    results = by_name(evaluate("--orders l2r random --ensemble 1 2", datasets=[folder]))
    model = load_model(run)
    result = results["l2r", 1]
    rows = [*dataset.blocks(list(range(12))), dataset.tail()[0]]
    nll = []  # of a row
    for row in rows:
        order = torch.arange(len(row))[None]
        nll.append(-float(token_log_probs(model, row[None], order).double().sum()))
    tokens = 12 * LENGTH + left_over
    mean = sum(nll) / tokens
    assert (result["sequences"], result["tokens"]) == (13, tokens)
    assert result["nll"] == pytest.approx(mean, rel=1e-6)
    lengths = np.array([len(row) for row in rows])
    squares = ((np.array(nll) - mean * lengths) ** 2).sum()
    error = math.sqrt(squares / 12 * 13) / tokens
    assert result["standard_error"] == pytest.approx(error, rel=1e-4)
    assert results["random", 2]["gain"] > 0


def test_weighted_bounds_are_those_of_the_losses(evaluate, run, data):
    report = evaluate("--orders l2r random --num-orders 4 --max-sequences 9 --bound iw")
    of_tokens = direct(run, data, "random", draws=4, seed=0, count=9)
    losses = of_tokens.mean(axis=2)  # (9, 4)
    bound = -np.log(np.exp(-losses * LENGTH).mean(axis=1)) / LENGTH
    result = by_name(report)["random", 1]
    assert result["nll"] == pytest.approx(bound.mean(), rel=1e-5)
    assert result["bound"] == "iw"
    assert by_name(report)["l2r", 1]["bound"] == "mean"
    assert result["nll"] < losses.mean()
    assert result["monte_carlo_error"] > 0
    assert "weighted over 4" in report["terminal"]


def test_prompts_are_context_and_not_scored(evaluate, run, tmp_path):
    rows = [
        {"prompt": "ab" * (i % 3 + 1), "text": "step"[: i % 4 + 1]} for i in range(40)
    ]
    source = write_rows(tmp_path / "r.jsonl", rows)
    folder = tmp_path / "records"
    prepared("records", folder, source, split="test", block_size=LENGTH)
    report = by_name(evaluate("--orders l2r random confidence", datasets=(folder,)))
    model = load_model(run)
    total = 0.0
    count = 0
    for row in rows:
        tokens = torch.tensor([[*(row["prompt"] + row["text"]).encode(), 256]])
        scored = token_log_probs(model, tokens, torch.arange(tokens.shape[1])[None])
        total -= scored[0, len(row["prompt"]) :].sum().item()
        count += len(row["text"]) + 1
    for result in report.values():
        assert result["tokens"] == count
    assert report["l2r", 1]["nll"] == pytest.approx(total / count, rel=1e-5)
    predicted = sum(len(row["text"]) for row in rows)  # end-of-text has no bytes
    per_token = report["l2r", 1]["nll"] / math.log(2) * count / predicted
    assert report["l2r", 1]["bits_per_byte"] == pytest.approx(per_token)


def test_a_text_is_scored_in_the_order_that_the_model_would_decode_it_in(
    evaluate, run, data
):
    """test_decode.py has the probabilities of texts in these orders, by enumeration."""
    plans = {
        "confidence": partial(score_plan, by="confidence"),
        "margin": partial(score_plan, by="margin"),
        "entropy:group=2,block=8": partial(score_plan, by="entropy", group=2, block=8),
    }
    orders = " ".join(plans)
    report = by_name(evaluate(f"--max-sequences 3 --orders {orders}"))
    model = load_model(run)
    tokens = val_blocks(data, 3)
    for name, plan in plans.items():
        nll = decoding_nll(model, tokens, plan).values.mean().item()
        result = report[name, 1]
        assert result["nll"] == pytest.approx(nll, rel=1e-5)
        assert (result["draws"], result["monte_carlo_error"]) == (1, 0)


@pytest.mark.parametrize("kind, size", [("run", 3), ("encoder", 3), ("encoder", 1)])
def test_orders_are_scored_in_groups(evaluate, run, encoder, data, kind, size):
    """test_prompts.py has the loss of each token, given the groups before its own."""
    path = run if kind == "run" else encoder
    options = f"--orders l2r random --group {size} --max-sequences 4 --num-orders 1"
    report = evaluate(options, path=path)
    model = load_model(path)
    tokens = val_blocks(data, 4)
    # else an ELBO
    for name in ("l2r", "random")[: 1 if (kind, size) == ("encoder", 1) else 2]:
        nll = token_nll(
            model,
            tokens,
            OrderConfig(name),
            seed=0,
            draw=0,
            rows=range(4),
            total=4,
            group=size,
        )
        result = by_name(report)[name, 1]
        assert result["nll"] == pytest.approx(nll.values.mean().item(), rel=1e-5)
    assert (f"groups of {size}" in report["terminal"]) == (size > 1)


def test_sedd_is_scored_as_probabilities_and_by_its_own_bound(evaluate, data, sedd):
    report = evaluate("--max-sequences 4 --num-orders 8", path=sedd)
    results = by_name(report)
    assert list(results) == [("random", 1), ("score_entropy", 1)]
    model = load_model(sedd)
    tokens = val_blocks(data, 4)
    with torch.no_grad():
        draws = [
            token_score_entropy(model, tokens, 0, d, range(4), 4).mean()
            for d in range(8)
        ]
    assert results["score_entropy", 1]["nll"] == pytest.approx(
        float(sum(draws)) / 8, rel=1e-6
    )
    assert "any order, score entropy" in report["terminal"]
    assert "SEDD's own bound" in report["terminal"]


def test_the_report_holds_settings_checkpoint_data_seed_and_versions(
    evaluate, run, data, tmp_path
):
    other = make_data(tmp_path, words=900, seed=1).rename(tmp_path / "other")
    options = "--max-sequences 3 --seed 5 --orders l2r --split train"
    report = evaluate(options, datasets=[data, other])
    result, second = report["results"]
    assert (result["dataset"], second["dataset"]) == ("data", "other")
    expected = {
        "path": str(store.find(run)[-1]),
        "step": 40,
        "weights": "ema",
        "system": None,
    }
    assert report["checkpoint"] == expected
    assert (report["settings"]["seed"], report["settings"]["dtype"]) == (5, "float32")
    meta = json.loads((data / "meta.json").read_text())
    text = result["data"]
    assert text.items() >= meta["splits"]["train"].items()
    assert (text["tokenizer"], text["split"], text["block_size"]) == (
        "bytes",
        "train",
        LENGTH,
    )
    assert report["versions"]["torch"] == torch.__version__


def test_the_markdown_table_is_on_the_terminal_and_beside_the_report(
    evaluate, data, tmp_path
):
    report = evaluate("--max-sequences 20 --ensemble 1 4")
    table = (tmp_path / "ppl.md").read_text()
    assert table.strip() == report["terminal"].strip()
    lines = [line for line in table.splitlines() if line[:1] == "|"][2:]
    results = by_name(report)
    assert list(results) == [("l2r", 1), ("random", 1), ("random", 4)]
    one = results["random", 1]
    four = results["random", 4]
    assert four["gain"] > 0
    assert four["nll"] == pytest.approx(one["nll"] - four["gain"])
    for ((kind, _), result), line in zip(results.items(), lines, strict=True):
        assert {"l2r": "left to right", "random": "any order"}[kind] in line
        assert f" {result['nll']:.4f} " in line
        assert f" {result['perplexity']:.3f} " in line
    assert f" {four['gain']:.5f}" in lines[-1]


def test_only_what_is_not_sampled_is_called_exact():
    """Two random orders may happen to give one loss."""
    row = {"orders": "l2r", "exact": True, "monte_carlo_error": 0.0}
    assert monte_carlo(row) == "exact"
    sampled = {"orders": "infill", "exact": False, "monte_carlo_error": 0.0}
    assert monte_carlo(sampled) == 0
    for oracle in ("oracle", "oracle:group=4"):  # no likelihood
        row["orders"] = oracle
        assert monte_carlo(row) == "none"


def test_what_a_single_sequence_or_draw_does_not_tell_is_unknown(evaluate, tmp_path):
    report = evaluate("--max-sequences 1 --num-orders 1")
    l2r, random = report["results"]
    assert l2r["standard_error"] is None
    assert l2r["monte_carlo_error"] == 0
    assert random["monte_carlo_error"] is None
    assert "unknown" in report["terminal"]
    file = write_jsonl(tmp_path / "a.jsonl", [""])  # end-of-text has no bytes
    empty = prepared("text", tmp_path / "empty", file, split="test")
    (row,) = evaluate("--orders l2r", datasets=[empty])["results"]
    assert (row["tokens"], row["bits_per_byte"]) == (1, None)


def batches(capacity):
    """Run 23 rows with work that runs out of memory above `capacity` rows."""
    seen = []

    def work(tokens, rows):
        if len(rows) > capacity:
            raise torch.OutOfMemoryError("out of memory")
        seen.append(len(rows))
        return torch.arange(rows.start, rows.stop)

    eval_set = SimpleNamespace(
        name="text",
        count=23,
        tokens=lambda rows: torch.zeros(len(rows), 256),
        dataset=SimpleNamespace(num_blocks=23),
        of_one_length=lambda rows: rows,
    )
    # 16 rows are 4,096 tokens
    runner = BatchRunner(ALONE, torch.float32, 256)
    return runner.run(Task(None, eval_set, "l2r", None), work).tolist(), seen


def test_the_batch_is_halved_until_it_fits():
    assert batches(100) == (list(range(23)), [16, 7])
    assert batches(5) == (list(range(23)), [4, 4, 4, 4, 4, 3])
    with pytest.raises(torch.OutOfMemoryError):
        batches(0)


def test_a_model_has_the_orders_that_it_knows_and_no_others(
    evaluate, mistake, plain, encoder, data
):
    assert list(by_name(evaluate("--max-sequences 4", path=plain))) == [("l2r", 1)]
    for path, options, words in (
        (
            plain,
            "--orders random",
            "no order 'random'; leave out --orders, or give l2r",
        ),
        (plain, "--group 2", "--group is for any-order models"),
        (encoder, "--orders score_entropy", "no order 'score_entropy'"),
        (encoder, "--ensemble 1 8", "--ensemble and --bound iw are for any-order dec"),
        (encoder, "--bound iw --num-orders 2", "--bound iw are for any-order decoders"),
    ):
        arguments = ["--datasets", data, *options.split()]
        assert words in mistake(eval_ppl, path, *arguments)


def test_a_bad_option_ends_with_status_2_and_a_message(mistake, run, data):
    for options, words in (
        ("--split tset", "is 'tset', but it must be one of"),
        ("--datasets lm1b", "python data/prepare.py lm1b"),
        ("--orders fixed_blockwise:blocks=3", "'blocks=3' is not a setting"),
        ("--orders confidence:block=0", "--orders confidence:block=0: block is 0"),
        ("--orders fixed_blockwise:block=17", "order.block 17 exceeds the blocks of"),
        ("--ensemble 8 --group 2", "leave out --ensemble or --bound"),
        ("--json table.md", "name the same file"),
    ):
        datasets = [] if "--datasets" in options else ["--datasets", data]
        assert words in mistake(eval_ppl, run, *datasets, *options.split())


def test_data_changed_or_of_another_tokenizer_or_block_are_refused(
    mistake, run, data, tmp_path
):
    other = shutil.copytree(data, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    gpt2 = {"tokenizer": "gpt2", "vocab_size": 50257}
    for changes, words in (
        (gpt2, "holds gpt2 tokens, but the model was trained on bytes tokens"),
        ({"protocol": "sedd", "block_size": 32}, "--block-size 16"),
        ({}, "checksum"),
    ):
        (other / "meta.json").write_text(json.dumps(meta | changes))
        if not changes:
            flip_byte(other / "val.bin", 10)
        assert words in mistake(eval_ppl, run, "--datasets", other)
