"""eval_ppl.py: what it prints and writes, the same for any batches and processes; mistakes that all scripts catch."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import torchrun
from test_checkpoint import Hostile
from test_train import ALONE, make_data, tiny_config

import checkpoint
import eval_ppl
import sample
import train
from data.loader import TokenDataset
from orders import OrderConfig, orders_at
from runtime import run_script as run_main

LENGTH = 16  # the block size of tiny_config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run folder whose averaged and last weights differ."""
    config = tiny_config(data, tmp_path_factory.mktemp("out"), checkpoint__interval=20)
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="module")
def plain(run, data):
    """A run of a model that is not told its target position."""
    config = tiny_config(data, run.parent, "plain", steps=6, order=OrderConfig("l2r"), model__target="none")
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script's main with these arguments, as its last lines do, in this process: (exit status, stdout, stderr).

    An exception that the script would show as a traceback fails the test.
    """

    def call(module, *arguments):
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_main(module.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call


# ---- mistakes that both scripts catch --------------------------------------------------------------------------------


def test_a_run_that_is_not_there_or_has_no_checkpoint_is_an_error_for_both_scripts(script, tmp_path, data):
    for module, options in ((sample, []), (eval_ppl, ["--data", data])):
        status, _, err = script(module, tmp_path / "nowhere", *options)
        assert status == 2 and "give a run folder (out/NAME) or a checkpoint file (.pt)" in err
        status, _, err = script(module, tmp_path, *options)
        assert status == 2 and "holds no checkpoints/step_*.pt" in err
        status, _, err = script(module, *options)
        assert status == 2 and "RUN" in err


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(script, tmp_path):
    torch.save(Hostile(tmp_path / "touched"), tmp_path / "hostile.pt")
    status, out, err = script(sample, tmp_path / "hostile.pt")
    assert status == 2 and "hostile.pt cannot be read as a checkpoint" in err and not out
    assert not (tmp_path / "touched").exists()


def test_a_foreign_file_is_an_error_that_says_what_was_found_and_what_is_supported(script, tmp_path):
    torch.save({"net": 1, "iteration": 2}, tmp_path / "foreign.pt")
    status, _, err = script(sample, tmp_path / "foreign.pt")
    assert status == 2 and "'iteration', 'net'" in err and "supported are" in err


@pytest.mark.parametrize("module", [train, sample, eval_ppl], ids=lambda module: module.__name__)
def test_help_exits_0_and_shows_an_example_and_every_option(script, module):
    status, out, _ = script(module, "--help")
    assert status == 0
    assert f"python {module.__name__}.py" in out
    fields = {"train": ["optim.lr"], "sample": ["top-p", "jsonl"], "eval_ppl": ["num-orders", "json"]}[module.__name__]
    for name in fields:
        assert f"--{name}" in out


# ---- eval_ppl.py -----------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(script, run, data, tmp_path):
    """Evaluate the run; the JSON report, which must be JSON and no dialect of it."""

    def call(*arguments, path=run):
        status, _, err = script(eval_ppl, path, "--data", data, "--json", tmp_path / "ppl.json", *arguments)
        assert status == 0, err
        return read_json(tmp_path / "ppl.json")

    return call


def read_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def direct(run, data, kind, draws, seed, count, weights="ema"):
    """Nats per token (count, draws) from the model alone."""
    model = checkpoint.load_model(run, weights)
    tokens = TokenDataset(data, "val", LENGTH).blocks(range(count))
    orders = [orders_at(OrderConfig(kind), seed, draw, range(count), LENGTH) for draw in range(draws)]
    return torch.stack([-model.token_log_probs(tokens, order).double().mean(1) for order in orders], dim=1).numpy()


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_numbers_are_those_of_the_model_computed_directly(evaluate, run, data, weights):
    report = evaluate("--num-orders", 3, "--max-sequences", 21, "--seed", 5, "--weights", weights)
    for kind, draws in (("l2r", 1), ("random", 3)):
        per_sequence = direct(run, data, kind, draws, 5, 21, weights).mean(axis=1)
        result = report["results"][kind]
        # batches of 16 and 5 against one of 21: float32 rounding
        assert result["nll"] == pytest.approx(per_sequence.mean(), rel=1e-6)
        expected = math.sqrt(((per_sequence - per_sequence.mean()) ** 2).sum() / 20 / 21)
        assert result["standard_error"] == pytest.approx(expected, rel=1e-4)
        assert result["perplexity"] == pytest.approx(math.exp(per_sequence.mean()), rel=1e-5)
        assert result["sequences"] == 21


def test_the_report_holds_settings_checkpoint_data_seed_and_versions(evaluate, run, data):
    report = evaluate("--max-sequences", 3, "--seed", 5, "--orders", "l2r")
    assert list(report["results"]) == ["l2r"]
    assert report["checkpoint"] == {"path": str(checkpoint.find(run)[-1]), "step": 40, "weights": "ema"}
    settings = report["settings"]
    assert (settings["seed"], settings["max_sequences"], settings["dtype"]) == (5, 3, "float32")
    meta = json.loads((data / "meta.json").read_text())
    assert report["data"]["sha256"] == meta["splits"]["val"]["sha256"]
    assert report["versions"]["torch"] == torch.__version__ and {"python", "numpy"} <= report["versions"].keys()
    assert report["processes"] == 1 and report["device"] == "cpu"


def test_the_entropies_of_the_text_stand_beside_the_model(evaluate, data):
    tokens = np.array(TokenDataset(data, "train", 1).tokens)
    share = np.bincount(tokens) / len(tokens)
    share = share[share > 0]
    entropies = evaluate("--max-sequences", 2)["entropies"]
    assert entropies["unigram entropy of train"] == pytest.approx(-(share * np.log(share)).sum())
    assert 0 < entropies["bigram entropy of train"] < entropies["unigram entropy of train"]


def test_the_table_shows_nats_and_perplexity_of_both_kinds_of_order(script, run, data, evaluate):
    results = evaluate()["results"]
    status, out, _ = script(eval_ppl, run, "--data", data)
    assert status == 0
    for kind, label in (("l2r", "left to right"), ("random", "any order")):
        (line,) = (line for line in out.splitlines() if line.startswith(label))
        assert f"{results[kind]['nll']:.4f}" in line and f"{results[kind]['perplexity']:.3f}" in line


def test_the_answer_does_not_depend_on_processes_or_batches(evaluate, run, data, tmp_path):
    arguments = ["--max-sequences", 21, "--num-orders", 2, "--seed", 1]
    torchrun(2, "eval_ppl.py", run, "--data", data, *arguments, "--json", tmp_path / "two.json")
    reports = [read_json(tmp_path / "two.json"), evaluate(*arguments, "--batch-size", 1)]
    reports += [evaluate(*arguments, "--batch-size", 7)]
    assert reports[0]["processes"] == 2
    for report in reports:
        for kind, result in evaluate(*arguments)["results"].items():
            for number in ("nll", "standard_error"):
                # float32 rounding of values of about 3, averaged over hundreds of tokens
                assert report["results"][kind][number] == pytest.approx(result[number], abs=1e-6)


def test_the_orders_follow_from_the_seed(evaluate):
    first, again, other = (evaluate("--seed", seed, "--max-sequences", 5)["results"] for seed in (1, 1, 2))
    assert first == again
    assert first["l2r"] == other["l2r"] and first["random"] != other["random"]


def test_one_sequence_has_no_standard_error_and_the_report_is_still_json(evaluate):
    assert evaluate("--max-sequences", 1)["results"]["l2r"].get("standard_error") is None


def test_a_model_without_target_positions_is_scored_left_to_right_only(evaluate, script, plain, data):
    expected = direct(plain, data, "l2r", 1, 0, 4).mean()
    report = evaluate("--orders", "l2r", "--max-sequences", 4, path=plain)
    assert report["results"]["l2r"]["nll"] == pytest.approx(expected, rel=1e-6)
    assert list(evaluate("--max-sequences", 4, path=plain)["results"]) == ["l2r"]
    status, _, err = script(eval_ppl, plain, "--data", data, "--orders", "random")
    assert status == 2 and "has no 'random' perplexity; give --orders l2r" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--max-sequences", 0], ["--max-sequences is 0", "at least 1"]),
        (["--num-orders", 0], ["--num-orders is 0"]),
        (["--batch-size", -2], ["--batch-size is -2"]),
        (["--seed", -1], ["seed", "-1"]),
        (["--split", "tset"], ["no split 'tset'", "'train', 'val'"]),
        (["--data", "no/such/folder"], ["no/such/folder: no such dataset folder", "data/prepare.py"]),
        (["--orders", "backwards"], ["backwards", "l2r"]),
        (["--orders"], ["--orders"]),
        (["--max-sequencez", 3], ["--max-sequencez", "--max-sequences"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:30],
)
def test_a_bad_argument_of_eval_ends_with_status_2_and_a_message(script, run, data, arguments, words):
    if "--data" not in arguments:
        arguments = ["--data", data, *arguments]
    status, _, err = script(eval_ppl, run, *arguments)
    assert status == 2
    for word in words:
        assert word in " ".join(err.split())


def test_data_of_another_tokenizer_or_too_short_for_a_block_are_errors(script, run, data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2"}))
    status, _, err = script(eval_ppl, run, "--data", other)
    assert status == 2 and "holds gpt2 tokens, but the model was trained on bytes tokens" in err
    assert "--tokenizer bytes" in err
    meta["splits"]["val"]["tokens"] = LENGTH - 1
    (other / "meta.json").write_text(json.dumps(meta))
    (other / "val.bin").write_bytes(bytes(2 * (LENGTH - 1)))
    status, _, err = script(eval_ppl, run, "--data", other)
    assert status == 2 and "fewer than one block of 16" in err
