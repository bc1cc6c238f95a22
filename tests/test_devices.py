"""runtime.devices: which device a process takes."""

import os

import pytest
import torch

from runtime.devices import deterministic, pick_device, tf32
from studies.benchmarks.tf32 import TF32, to_tf32


@pytest.mark.parametrize(
    "name, local_rank, index", [("cuda:1", 0, 1), ("auto", 1, 1), ("cuda", 0, 0)]
)
def test_a_gpu_becomes_the_current_one_before_anything_is_done_on_it(
    name, local_rank, index, monkeypatch
):
    """Two GPUs that are not there; a lone process, too, sets its own."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device(name, local_rank) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
    with pytest.raises(ValueError, match="PyTorch sees 2 GPUs here"):
        pick_device("cuda:2")
    assert pick_device("cpu") == torch.device("cpu") and len(chosen) == 1


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


@pytest.mark.parametrize("device, enabled", [("cuda", True), ("cuda", False), ("cpu", True)])
def test_tf32_is_for_gpus_that_are_to_have_it_and_given_back(device, enabled):
    with pytest.raises(KeyError), tf32(torch.device(device), enabled):
        expected = "high" if (device, enabled) == ("cuda", True) else "highest"
        assert torch.get_float32_matmul_precision() == expected
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_emulated_tf32_keeps_ten_bits_behind_the_point():
    """Against rounding in float64; and products are rounded where matrices are multiplied."""
    x = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    mantissa, exponent = torch.frexp(x.double())  # |mantissa| in [0.5, 1): 11 bits are 10 behind 1.
    expected = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    assert torch.equal(to_tf32(x).double(), expected)
    linear = torch.nn.Linear(30, 7)
    with torch.no_grad(), TF32() as mode:
        got = linear(x)
    exact = to_tf32(x).double() @ to_tf32(linear.weight).double().T + linear.bias
    assert mode.rounded == 1 and (got - exact).abs().max() < 1e-5  # sums of 30 in float32
    assert (got - linear(x)).abs().max() > 1e-5
