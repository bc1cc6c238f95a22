"""sample.py and eval_ppl.py: what they print and write, the same for any batches and processes; bad arguments."""

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
from data.tokenizer import get_tokenizer
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


@pytest.fixture
def draw(script, run, tmp_path):
    """Sample from the run: the JSON objects of the samples."""

    def call(*arguments, path=run):
        status, _, err = script(sample, path, "--jsonl", tmp_path / "samples.jsonl", *arguments)
        assert status == 0, err
        return read_lines(tmp_path / "samples.jsonl")

    return call


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def column(samples, key):
    return [line[key] for line in samples]


# ---- sample.py: samples ----------------------------------------------------------------------------------------------


def test_every_sample_is_printed_and_written_with_all_that_made_it(script, run, tmp_path):
    path = tmp_path / "samples.jsonl"
    status, out, err = script(sample, run, "--num-samples", 3, "--steps", 5, "--seed", 4, "--jsonl", path)
    assert status == 0
    lines = read_lines(path)
    assert len(lines) == out.count("=== sample") == 3
    for line in lines:
        assert line["text"] in out
        assert line["text"] == get_tokenizer("bytes").decode(line["tokens"])
        assert len(line["tokens"]) == len(line["step"]) == len(line["log_probs"]) == LENGTH
        assert all(0 <= token < 257 for token in line["tokens"]), "padding rows of the token table are no tokens"
        assert all(0 <= step < 5 for step in line["step"])
        assert all(p < 0 for p in line["log_probs"])
        assert 1 <= line["model_calls"] <= 5
        settings = line["settings"]
        assert (settings["steps"], settings["seed"], settings["mode"], settings["top_p"]) == (5, 4, "mdm", 1.0)
        assert f"{checkpoint.find(run)[-1]} (step 40, ema weights)" in settings["checkpoint"]
        assert settings["versions"]["torch"] == torch.__version__
    assert "3 samples of 16 tokens" in err and "model calls" in err


def test_one_seed_gives_the_same_samples_whatever_the_batch_size_and_another_seed_others(draw):
    for mode in (["--mode", "mdm", "--steps", 5], ["--mode", "even", "--steps", 5], ["--mode", "l2r"]):
        common = [*mode, "--num-samples", 5, "--seed", 3]
        samples = draw(*common)
        for size in (1, 2, 3):
            again = draw(*common, "--batch-size", size)
            assert column(again, "tokens") == column(samples, "tokens")
            assert column(again, "step") == column(samples, "step")
        assert column(draw(*common[:-1], 4), "tokens") != column(samples, "tokens")
        fewer = draw(*mode, "--num-samples", 5, "--seed", 3, "--length", 10)
        assert [len(line["tokens"]) for line in fewer] == [10] * 5


@pytest.mark.parametrize("count", [1, 5])
def test_two_processes_give_the_samples_of_one(draw, run, tmp_path, count):
    """Also with fewer samples than processes."""
    arguments = ["--num-samples", count, "--seed", 3, "--steps", 5, "--prompt", "the"]
    done = torchrun(2, "sample.py", run, *arguments, "--jsonl", tmp_path / "two.jsonl")
    two, one = read_lines(tmp_path / "two.jsonl"), draw(*arguments)
    for key in ("tokens", "step", "text"):
        assert column(two, key) == column(one, key)
    # other batches round differently, and the file holds six digits
    np.testing.assert_allclose(column(two, "log_probs"), column(one, "log_probs"), atol=1e-5)
    assert done.stdout.count("=== sample") == count


@pytest.mark.parametrize("mode", ["mdm", "even", "l2r"])
@pytest.mark.parametrize("prompt", ["the", "é🎉", "<|endoftext|>"])
def test_a_prompt_is_kept_and_only_the_rest_is_generated(draw, mode, prompt):
    given = len(prompt.encode())
    for line in draw("--mode", mode, "--prompt", prompt, "--num-samples", 2):
        assert bytes(line["tokens"][:given]) == prompt.encode() and line["text"].startswith(prompt)
        assert line["prompt_tokens"] == given
        assert line["step"][:given] == [-1] * given and min(line["step"][given:]) >= 0
        assert line["log_probs"][:given] == [0.0] * given and max(line["log_probs"][given:]) < 0


def test_the_modes_reveal_positions_as_they_say(draw):
    (l2r,) = draw("--mode", "l2r", "--num-samples", 1, "--prompt", "th")
    assert l2r["step"] == [-1, -1, *range(14)] and l2r["model_calls"] == 14
    for line in draw("--mode", "even", "--steps", 5, "--num-samples", 3):
        counts = np.bincount(line["step"], minlength=5)
        assert sorted(counts) == [3, 3, 3, 3, 4] and line["model_calls"] == 5
    one_step = draw("--mode", "mdm", "--steps", 1, "--num-samples", 3)
    assert column(one_step, "step") == [[0] * LENGTH] * 3 and column(one_step, "model_calls") == [1] * 3
    # exact masked diffusion draws the number of tokens of a step: of 20 samples hardly two agree in all four
    counts = {tuple(np.bincount(line["step"], minlength=4)) for line in draw("--steps", 4, "--num-samples", 20)}
    assert len(counts) > 5


def test_temperature_0_takes_the_most_probable_token_whatever_the_seed(draw, run):
    arguments = ["--mode", "l2r", "--num-samples", 1, "--temperature", 0]
    (line,), (other,) = draw(*arguments), draw(*arguments, "--seed", 9)
    assert line["tokens"] == other["tokens"]
    model, tokens = checkpoint.load_model(run), torch.tensor([line["tokens"]])
    with torch.no_grad():
        logits = model.head(model.hidden(tokens, torch.arange(LENGTH)[None]))[0, :, :257]
    assert logits.argmax(-1).tolist() == line["tokens"]
    expected = logits.log_softmax(-1).max(-1).values
    # the cached steps round differently from one causal pass: float32, values of about 3
    np.testing.assert_allclose(line["log_probs"], expected, atol=1e-5)


def test_averaged_weights_are_the_default_and_a_checkpoint_file_is_as_good_as_its_folder(draw, run):
    samples = column(draw("--seed", 1), "tokens")
    assert column(draw("--seed", 1, "--weights", "ema"), "tokens") == samples
    assert column(draw("--seed", 1, "--weights", "raw"), "tokens") != samples
    assert column(draw("--seed", 1, path=checkpoint.find(run)[-1]), "tokens") == samples


def test_a_model_without_target_positions_samples_left_to_right(draw, plain):
    assert column(draw("--mode", "l2r", "--num-samples", 1, path=plain), "step") == [list(range(LENGTH))]


# ---- sample.py: mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "x" * 16], ["16 tokens", "--length is 16", "block size"]),
        (["--prompt", "x" * 5, "--length", 5], ["5 tokens", "--length"]),
        (["--length", 17], ["--length is 17", "block size, 16"]),
        (["--length", 0], ["--length is 0"]),
        (["--steps", 0], ["steps is 0"]),
        (["--mode", "even", "--steps", -3], ["steps is -3"]),
        (["--mode", "l2r", "--steps", 4], ["--steps", "l2r"]),
        (["--temperature", -1], ["temperature is -1"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--top-p", 0], ["top_p is 0"]),
        (["--top-p", 2], ["top_p is 2"]),
        (["--top-k", 0], ["top_k is 0"]),
        (["--num-samples", 0], ["--num-samples is 0"]),
        (["--batch-size", 0], ["--batch-size is 0"]),
        (["--jsonl", "no/such/folder/x.jsonl"], ["--jsonl no/such/folder/x.jsonl", "there is no folder"]),
        (["--device", "banana"], ["device 'banana'"]),
        (["--seed", 10**30], ["seed"]),
        (["--stepz", 3], ["--stepz", "--steps"]),
        (["--mode", "random"], ["--mode", "mdm"]),
        (["--num-samples", "many"], ["--num-samples", "many"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:30],
)
def test_a_bad_argument_of_sample_ends_with_status_2_and_a_message(script, run, arguments, words):
    status, _, err = script(sample, run, *arguments)
    assert status == 2
    for word in words:
        assert word in " ".join(err.split())


@pytest.mark.parametrize("mode", ["mdm", "even"])
def test_a_mode_that_the_model_cannot_do_is_an_error_that_names_the_one_it_can(script, plain, mode):
    status, _, err = script(sample, plain, "--mode", mode)
    assert status == 2 and f"--mode {mode} needs a model that is told its target position" in err and "l2r" in err


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
