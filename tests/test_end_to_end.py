"""From text to samples through the scripts, as a user runs them."""

import json
import math
import os
import random

import pytest
from helpers import read_lines, run_script

CONFIG = """
name = "{name}"
out = "{out}"
[model]
vocab_size = {vocab_size}
block_size = {block_size}
n_layer = 2
n_head = 2
n_embd = 32
cond_dim = 16
target = "{target}"
[order]
kind = "{order}"
[data]
folder = "{data}"
[optim]
lr = 1e-2
warmup_steps = 10
ema_decay = 0.95
[train]
steps = {steps}
batch_size = 16
micro_batch_size = 8
device = "cpu"
compile = false
[eval]
interval = {steps}
sequences = 32
[checkpoint]
interval = {steps}
"""


def train_evaluate_sample(
    folder, data, environment=None, sampling=(), orders=("l2r", "random"), **values
):
    """Run train.py, eval_ppl.py and sample.py; returns (run folder, evaluation report, lines of the
    samples)."""
    environment = environment or {}
    config = folder / "config.toml"
    config.write_text(CONFIG.format(out=folder / "out", data=data, **values))
    run = folder / "out" / values["name"]
    trained = run_script("train.py", config, **environment)
    assert f"next: python sample.py {run}" in trained.stdout
    report, samples = folder / "ppl.json", folder / "samples.jsonl"
    limits = ["--max-sequences", 64, "--orders", *orders]
    run_script("eval_ppl.py", run, "--datasets", data, *limits, "--json", report, **environment)
    drawn = run_script(
        "sample.py", run, "--num-samples", 3, "--jsonl", samples, *sampling, **environment
    )
    lines = read_lines(samples)
    assert len(lines) == 3 and all(line["text"] in drawn.stdout for line in lines)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return run, json.loads(report.read_text()), lines


LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Bytes of long runs of one letter: by itself a letter is one of 16 (2.8 nats), beside any
    other nearly certain."""
    folder = tmp_path_factory.mktemp("letters")
    rng = random.Random(0)
    text = "".join(rng.choice(LETTERS) * rng.randrange(100, 300) for _ in range(400))
    (folder / "text.txt").write_text(text)
    source = ["--source", folder / "text.txt", "--val-fraction", 0.2]
    run_script("data/prepare.py", "text", *source, "--tokenizer", "bytes", "--out", folder / "data")
    return folder / "data"


@pytest.mark.parametrize(
    "target, order",
    [
        ("adaln", "mixture"),
        pytest.param("input", "random", marks=pytest.mark.slow),
        pytest.param("none", "l2r", marks=pytest.mark.slow),
    ],
)
def test_from_a_text_file_to_samples_with_bytes(letters, tmp_path, target, order):
    orders, sampling = ["l2r", "random"], ["--steps", 16]
    if target == "none":
        orders, sampling = ["l2r"], ["--mode", "l2r"]
    values = {"name": target, "target": target, "order": order}
    values |= {"vocab_size": 320, "block_size": 32, "steps": 120}
    run, report, lines = train_evaluate_sample(
        tmp_path, letters, sampling=[*sampling, "--prompt", "cccccccc"], orders=orders, **values
    )
    (frequencies,) = report["frequencies"].values()
    unigram = frequencies["unigrams of train"]
    assert unigram > 2.5
    losses = {result["orders"]: result["nll"] for result in report["results"]}
    own = "l2r" if order == "l2r" else "random"
    # whoever ignores the context does as well as frequencies of tokens do
    assert losses[own] < unigram - 1.0, losses
    curves = {key for key in read_lines(run / "metrics.jsonl")[-1] if key.startswith("val_curve_")}
    assert curves == {f"val_curve_{kind}" for kind in losses}
    text = "".join(line["text"][8:] for line in lines)
    assert all(line["text"].startswith("cccccccc") for line in lines)
    assert text.count("c") / len(text) > 0.5, "the samples do not follow their prompt"


@pytest.mark.slow
def test_from_real_books_to_samples_with_gpt2_tokens(real_data, tmp_path):
    environment = {}
    if "TIKTOKEN_CACHE_DIR" not in os.environ and (real_data / "tiktoken").is_dir():
        environment["TIKTOKEN_CACHE_DIR"] = str(real_data / "tiktoken")
    books, data = real_data / "books", tmp_path / "data"
    source = ["--source", books / "train.jsonl.xz", "--val", books / "val.jsonl.xz", "--limit", 5]
    run_script("data/prepare.py", "text", *source, "--out", data, **environment)
    meta = json.loads((data / "meta.json").read_text())
    assert meta["tokenizer"] == "gpt2" and meta["splits"]["train"]["documents"] == 5
    values = {"name": "books", "target": "adaln", "order": "mixture"}
    values |= {"vocab_size": 50304, "block_size": 64, "steps": 12}
    prompt = "It was a"
    _, report, lines = train_evaluate_sample(
        tmp_path, data, environment, ["--steps", 8, "--prompt", prompt, "--top-p", 0.9], **values
    )
    for result in report["results"]:
        assert 5 < result["nll"] < math.log(50304) - 0.3, (
            "a dozen steps learn at least that most tokens never occur"
        )
    assert all(line["text"].startswith(prompt) and len(line["tokens"]) == 64 for line in lines)
    assert all(token < 50257 for line in lines for token in line["tokens"])
