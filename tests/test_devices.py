"""runtime.devices: which device a process takes."""

import pytest
import torch

from runtime.devices import pick_device


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
