"""gpu.py: what a CPU can show of it. That it finds what is wrong, goes on past what fails, and that
all is right here."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import run_script
from torch.autograd import DeviceType

import train
from studies import gpu
from studies.benchmarks import correctness
from studies.benchmarks.correctness import Check, at_most

CPU = torch.device("cpu")


@pytest.mark.slow
def test_on_a_cpu_all_is_as_it_should_be(tmp_path):
    """Every kind of model against float64, compiled, decoded; and training in processes."""
    out = tmp_path / "gpu"
    done = run_script("-m", "studies.gpu", "--device", "cpu", "--out", out, check=True)
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


def test_time_on_a_gpu_is_that_of_kernels_alone():
    """A profile also gives it to the operator that launched the kernel, and to the region."""

    def event(key, device, time, annotation=False):
        return SimpleNamespace(
            key=key, device_type=device, self_device_time_total=time, is_user_annotation=annotation
        )

    events = [
        event("aten::mm", DeviceType.CPU, 5.0),
        event("nvjet_hsh_128x256", DeviceType.CUDA, 5.0),
        event("Torch-Compiled Region: 0/0", DeviceType.CUDA, 9.0, annotation=True),
        event("flash_fwd_kernel", DeviceType.CUDA, 3.0),
        event("triton_poi_fused_add_0", DeviceType.CUDA, 1.0),
    ]
    times = gpu.kernel_times(events)
    kinds = {gpu.kind_of_kernel(name): time for name, time in times.items()}
    assert kinds == {"matrix products": 5.0, "attention": 3.0, "other": 1.0}


@pytest.mark.parametrize("mfu, verdict", [(0.5, True), (0.3, False), (None, None)])
def test_figures_of_training_are_held_against_their_targets(tmp_path, monkeypatch, mfu, verdict):
    """Of a benchmark and a GPU that are not there."""
    planned = gpu.planned_bytes("small", 32)
    rows = [
        {"system": "aogpt", "tokens_per_second": 1e5, "times_gpt": 1.05, "mfu": mfu}
        | {"peak_bytes": 0.8 * planned, "seconds": 1.0},
        {"system": "gpt"},
    ]
    monkeypatch.setattr(
        gpu.bench_train, "bench_train", lambda o: o.json.write_text(json.dumps({"rows": rows}))
    )
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    found = {c.name: c.ok for c in gpu.training("small", 32, CPU, tmp_path)}
    assert found == {
        "small, micro-batch 32: tokens/s": None,
        "small, micro-batch 32: step x plain GPT's": True,
        "small, micro-batch 32: MFU": verdict,
        "small, micro-batch 32: peak memory / plan": True,
    }
    memory.total_memory = planned // 2
    (left_out,) = gpu.training("small", 32, CPU, tmp_path)
    assert left_out.ok is None and "left out" in left_out.measured


def test_figures_of_decoding_are_held_against_their_targets(tmp_path, monkeypatch):
    rows = [
        {"system": "ours", "ms_per_call": 2.0, "first_seconds": 9.0, "times_floor": 2.4},
        {"system": "encoder", "times_ours": 99.0},
        {"system": "baseline", "times_ours": 5.0},
    ]
    monkeypatch.setattr(
        gpu, "bench_decode", lambda o: o.json.write_text(json.dumps({"rows": rows}))
    )
    found = {c.name: c.ok for c in gpu.decoding(1024, CPU, tmp_path)}
    assert found["1024 steps: x floor"] is True
    assert found["1024 steps: encoder x ours"] is False
    found = {c.name: c.ok for c in gpu.decoding(64, CPU, tmp_path)}
    assert found["64 steps: encoder x ours"] is None


def test_what_misses_its_target_is_the_exit_status(tmp_path, monkeypatch, capsys):
    rows = {0: [gpu.row(0, at_most("a", 2.0, 1.0))], 1: [gpu.row(1, at_most("b", 1.0, 1.0))]}
    monkeypatch.setattr(gpu, "in_a_process", lambda part, arguments: rows[part])
    monkeypatch.setattr("sys.argv", ["gpu.py", "--parts", "1", "--out", str(tmp_path)])
    assert gpu.main() == 1
    assert "2 lines, 1 not as they should be" in capsys.readouterr().out
    assert "FAILS" in (tmp_path / "gpu.md").read_text()
