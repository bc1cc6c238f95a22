"""gpu.py: what a CPU can show of it. That it finds what is wrong, goes on past what fails, and that
all is right here."""

import json

import pytest
import torch
from helpers import run_script

import gpu
import train
from benchmarks import correctness
from benchmarks.correctness import Check, at_most

CPU = torch.device("cpu")


@pytest.mark.slow
def test_on_a_cpu_all_is_as_it_should_be(tmp_path):
    """Every kind of model against float64, compiled, decoded; and training in processes."""
    out = tmp_path / "gpu"
    done = run_script("gpu.py", "--device", "cpu", "--out", out, check=True)
    result = json.loads((out / "gpu.json").read_text())
    rows = result["rows"]
    assert {row["part"] for row in rows} == {0, 1} and len(rows) > 60
    assert {row["verdict"] for row in rows} == {"ok", ""}
    assert result["versions"]["torch"] == str(torch.__version__)
    table = (out / "gpu.md").read_text()
    for row in rows:
        assert row["check"] in table and row["check"] in done.stdout


@pytest.mark.parametrize("wrong", ["loss", "gradients"])
def test_a_number_that_is_a_little_wrong_is_found(wrong):
    """A relative 1e-4, in float32 only."""
    config = correctness.small_configs()["aogpt_small"]

    def loss_of(model, batch, config, step):
        loss = train.training_loss(model, batch, config, step)
        if model.wte.weight.dtype == torch.float64:
            return loss
        factor = 1 + 1e-4
        return loss * factor if wrong == "loss" else factor * (loss - loss.detach()) + loss.detach()

    checks = list(correctness.losses_and_gradients(config, "aogpt", CPU, loss_of))
    failed = [check.name for check in checks if not check.ok]
    expected = ["aogpt: gradients in float32, relative error"]
    if wrong == "loss":
        expected.insert(0, "aogpt: loss in float32, relative error")
    assert failed == expected


def test_a_check_that_fails_with_an_error_is_a_line_and_the_next_one_runs(
    tmp_path, monkeypatch, capsys
):
    def broken():
        yield at_most("before", 0.5, 1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def part(device, out):
        """a part"""
        yield "broken", broken
        yield "after", lambda: [Check("after", "", "3", None)]

    monkeypatch.setattr(gpu, "PARTS", {1: part})
    gpu.run_part(1, CPU, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    rows = [json.loads(line.removeprefix(gpu.MARK)) for line in printed]
    assert [(row["check"], row["verdict"]) for row in rows] == [
        ("before", "ok"),
        ("broken", "ERROR"),
        ("after", ""),
    ]
    assert rows[1]["measured"].endswith("an illegal memory access was encountered")


def test_a_part_that_takes_too_long_is_ended_and_said(tmp_path, capsys):
    arguments = gpu.Arguments(parts=(0,), out=tmp_path, device="cpu", minutes=0.01)
    (row,) = gpu.in_a_process(0, arguments)
    assert row["verdict"] == "OUT OF TIME" and row["check"] == "part 0 to its end"


def test_what_misses_its_target_is_the_exit_status(tmp_path, monkeypatch, capsys):
    rows = [gpu.row(1, at_most("a", 2.0, 1.0)), gpu.row(1, at_most("b", 1.0, 1.0))]
    monkeypatch.setattr(gpu, "in_a_process", lambda part, arguments: rows)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--parts", "1", "--out", str(tmp_path)])
    assert gpu.main() == 1
    assert "2 lines, 1 not as they should be" in capsys.readouterr().out
    assert "FAILS" in (tmp_path / "gpu.md").read_text()
