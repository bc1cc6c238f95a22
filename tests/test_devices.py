"""runtime.devices: which device a process takes, and what it cannot do."""

import os

import pytest
import torch

from aogpt.runtime.devices import deterministic, pick_device, pick_dtype, tf32


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    "name, local_rank, index", [("{}:1", 0, 1), ("{}", 1, 1), ("{}", 0, 0)]
)
def test_a_gpu_becomes_the_current_one_before_anything_is_done_on_it(
    kind, name, local_rank, index, monkeypatch
):
    """Two GPUs that are not there; a lone process, too, sets its own."""
    chosen = []
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 2)
    monkeypatch.setattr(module, "set_device", chosen.append)
    assert pick_device(name.format(kind), local_rank) == torch.device(kind, index)
    assert chosen == [torch.device(kind, index)]
    with pytest.raises(ValueError, match="PyTorch sees 2 GPUs here"):
        pick_device(f"{kind}:2")
    assert pick_device("cpu") == torch.device("cpu")
    assert len(chosen) == 1
    assert pick_device("auto").type == ("cuda" if kind == "cuda" else "cpu")


def test_an_apple_gpu_which_lacks_float64_is_taken_by_name_alone(monkeypatch):
    for module in (torch.mps, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert pick_device("mps") == torch.device("mps", 0)
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    "name, message",
    [
        ("mps", "PyTorch sees 0 GPUs here; take the device cpu"),
        ("cuda:9", "PyTorch sees . GPUs here; take the device cpu"),
        ("meta", "'meta' is not known; give auto, cpu"),
        ("gpu", "'gpu' is not known; give auto, cpu"),
        ("cuda:x", "'cuda:x' is not known; give auto, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(name, message):
    with pytest.raises(ValueError, match=f"^device .*{message}.*$"):
        pick_device(name)


@pytest.mark.parametrize(
    "kind, fast", [("cpu", True), ("cuda", True), ("xpu", True), ("mps", False)]
)
def test_bfloat16_is_what_autocast_has(kind, fast):
    device = torch.device(kind)
    assert pick_dtype("bfloat16", device) == (torch.bfloat16 if fast else torch.float32)
    assert pick_dtype("float32", device) == torch.float32
    assert kind == "cuda" or pick_dtype("auto", device) == torch.float32


@pytest.mark.parametrize("enabled", [True, False])
def test_deterministic_operations_are_asked_for_and_given_back(enabled, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(KeyError), deterministic(enabled):
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == enabled
        raise KeyError  # however a run ends
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize(
    "kind, enabled, precision",
    [("cuda", True, "high"), ("cuda", False, "highest"), ("cpu", True, "highest")],
)
def test_tf32_is_for_gpus_that_are_to_have_it_and_given_back(kind, enabled, precision):
    with pytest.raises(KeyError), tf32(torch.device(kind), enabled):
        assert torch.get_float32_matmul_precision() == precision
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"
