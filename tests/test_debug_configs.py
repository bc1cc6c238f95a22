"""Every system, through the scripts: its debug config trains, resumes, is evaluated and
sampled."""

import json
import math

import golden
import pytest
from helpers import ROOT, read_lines, some_slow

import eval_ppl
import sample
import train
from aogpt.checkpoints import store
from aogpt.training import config as configuration

SYSTEMS = sorted((ROOT / "configs" / "debug").glob("*.toml"))


def short(steps):
    """Return options that cut a debug config down to a few steps."""
    options = (
        f"--train.steps {steps} --optim.warmup-steps 2 --eval.interval 4 "
        "--eval.sequences 8 --checkpoint.interval 4 --train.log-interval 1"
    )
    return options.split()


@pytest.mark.parametrize(
    "path",
    some_slow(
        [(path,) for path in SYSTEMS],
        lambda path: path.stem in ("aogpt", "encoder"),
        "four scripts, three seconds, for each",
    ),
    ids=lambda path: path.stem,
)
def test_a_debug_config_trains_resumes_evaluates_and_samples(
    printed, data, tmp_path, path
):
    options = ["--out", tmp_path, "--data.folder", data]
    printed(train, path, *options, *short(4))
    assert "resumed from" in printed(train, path, *options, *short(8))
    run = tmp_path / configuration.load_toml(path).name
    assert [int(p.stem[5:]) for p in store.find(run)] == [4, 8]
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))

    report = tmp_path / "report.json"
    words = ["--datasets", data, "--max-sequences", 4, "--json", report]
    printed(eval_ppl, run, *words)
    for result in json.loads(report.read_text())["results"]:
        # eight steps teach it more than the uniform distribution
        assert 0 < result["nll"] < math.log(257)

    mode = "l2r" if path.stem in ("gpt", "gpt2") else "mdm"
    words = ["--mode", mode, "--num-samples", 2, "--prompt", "The "]
    assert printed(sample, run, *words).count("The ") == 2


def test_golden_losses_are_of_every_debug_config():
    """`make golden` compares them: they are those of one machine."""
    recorded = json.loads(golden.FILE.read_text())
    assert list(recorded) == [path.stem for path in SYSTEMS]
    for losses in recorded.values():
        assert len(losses["loss"]) == golden.STEPS
        assert all(map(math.isfinite, losses["loss"]))
