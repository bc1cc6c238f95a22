"""From text to samples through the scripts, as a user runs them."""

import json
import math
import random

from helpers import read_lines

import eval_ppl
import sample
import train
from aogpt.data import prepare

OPTIONS = """--name letters --model.block-size 32 --model.n-head 2 --model.n-embd 32
--model.cond-dim 16 --optim.lr 1e-2 --optim.warmup-steps 10 --optim.ema-decay 0.95
--train.steps 120 --train.micro-batch-size 8 --train.device cpu --eval.interval 120
--eval.sequences 32 --checkpoint.interval 120""".split()
LETTERS = "abcdefghijklmnop"


def test_from_a_text_file_to_samples_with_bytes(printed, tmp_path):
    """Bytes of long runs of one letter: by itself a letter is one of 16 (2.8 nats),
    beside any other nearly certain."""
    rng = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(rng.choice(LETTERS) * rng.randrange(100, 300) for _ in range(400))
    )
    source = ["--source", text, "--val-fraction", 0.2, "--tokenizer", "bytes"]
    printed(prepare, "text", *source, "--out", tmp_path / "data")
    folders = ["--data.folder", tmp_path / "data", "--out", tmp_path / "out"]
    said = printed(train, "configs/debug/aogpt.toml", *OPTIONS, *folders)
    letters = tmp_path / "out" / "letters"
    assert f"next: python sample.py {letters}" in said

    report = tmp_path / "ppl.json"
    samples = tmp_path / "samples.jsonl"
    limits = ["--max-sequences", 64, "--orders", "l2r", "random", "--json", report]
    printed(eval_ppl, letters, "--datasets", tmp_path / "data", *limits)
    results = json.loads(report.read_text())["results"]
    losses = {result["orders"]: result["nll"] for result in results}
    # without the context it could do no better than the frequencies of letters
    assert losses["random"] < math.log(len(LETTERS)) - 1.2, losses
    validated = read_lines(letters / "metrics.jsonl")[-1]
    assert all(f"val_loss_{kind}" in validated for kind in losses)

    options = "--num-samples 3 --mode mdm:steps=16 --prompt cccccccc".split()
    printed(sample, letters, *options, "--jsonl", samples)
    lines = read_lines(samples)
    assert len(lines) == 3
    assert all(line["text"].startswith("cccccccc") for line in lines)
    text = "".join(line["text"][8:] for line in lines)
    assert text.count("c") / len(text) > 0.5, "the samples do not follow their prompt"
