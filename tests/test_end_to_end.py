"""From text to samples through the scripts, as a user runs them."""

import json
import math
import random

from helpers import read_lines, run_script

OPTIONS = """--name letters --model.block-size 32 --model.n-head 2 --model.n-embd 32
--model.cond-dim 16 --optim.lr 1e-2 --optim.warmup-steps 10 --optim.ema-decay 0.95 --train.steps 120
--train.micro-batch-size 8 --train.device cpu --eval.interval 120 --eval.sequences 32
--checkpoint.interval 120""".split()
LETTERS = "abcdefghijklmnop"


def test_from_a_text_file_to_samples_with_bytes(tmp_path):
    """Bytes of long runs of one letter: by itself a letter is one of 16 (2.8 nats),
    beside any other nearly certain."""
    rng = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(rng.choice(LETTERS) * rng.randrange(100, 300) for _ in range(400))
    )
    source = ["--source", text, "--val-fraction", 0.2, "--tokenizer", "bytes"]
    run_script("data/prepare.py", "text", *source, "--out", tmp_path / "data")
    folders = ["--data.folder", tmp_path / "data", "--out", tmp_path / "out"]
    trained = run_script("train.py", "configs/debug/aogpt.toml", *OPTIONS, *folders)
    run = tmp_path / "out" / "letters"
    assert f"next: python sample.py {run}" in trained.stdout

    report = tmp_path / "ppl.json"
    samples = tmp_path / "samples.jsonl"
    limits = ["--max-sequences", 64, "--orders", "l2r", "random", "--json", report]
    run_script("eval_ppl.py", run, "--datasets", tmp_path / "data", *limits)
    found = json.loads(report.read_text())
    losses = {result["orders"]: result["nll"] for result in found["results"]}
    # without the context it could do no better than the frequencies of letters
    assert losses["random"] < math.log(len(LETTERS)) - 1.2, losses
    validated = read_lines(run / "metrics.jsonl")[-1]
    assert all(f"val_loss_{kind}" in validated for kind in losses)

    options = [
        "--num-samples",
        3,
        "--steps",
        16,
        "--prompt",
        "cccccccc",
        "--jsonl",
        samples,
    ]
    run_script("sample.py", run, *options)
    lines = read_lines(samples)
    assert len(lines) == 3
    assert all(line["text"].startswith("cccccccc") for line in lines)
    text = "".join(line["text"][8:] for line in lines)
    assert text.count("c") / len(text) > 0.5, "the samples do not follow their prompt"
