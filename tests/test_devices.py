"""runtime.devices: which device a process takes."""

import os

import pytest
import torch

from runtime.devices import deterministic, pick_device


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
