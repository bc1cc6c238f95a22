"""Configs for eight GPUs, built small and stepped once as process 0 of eight, in a
process group whose messages go nowhere."""

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, small_config
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from aogpt.data.loader import TokenDataset
from aogpt.runtime.processes import Processes
from aogpt.training.checkpoint import Progress, State, StopRequest
from aogpt.training.optimizers import EMA, make_optimizers
from aogpt.training.parallel import build

CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.toml"))
    if "--nproc_per_node=8" in path.read_text() or "fsdp" in path.read_text()
]


@pytest.fixture
def procs():
    """Process 0 of eight."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield Processes(rank=0, world_size=8, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_for_eight_gpus_makes_a_step(path, procs, data, tmp_path, monkeypatch):
    config = small_config(
        path.stem,
        data,
        tmp_path,
        train__batch_size=16,
        train__micro_batch_size=1,
        optim__warmup_steps=0,
        train__steps=1,
        eval__interval=0,
    )
    tokens = TokenDataset(data, "train", 64)
    model = build(config, procs)
    assert isinstance(model, FSDPModule) == (config.train.parallel == "fsdp")
    state = State(
        model=model,
        average=EMA(model, config.optim.ema_decay),
        optimizers=make_optimizers(model, config),
        progress=Progress(),
    )
    config.run_folder.mkdir()
    saved = []

    def save(saver, state, best):
        saved.append(state.progress.step)
        saver.written = tmp_path

    monkeypatch.setattr(train.Saver, "save", save)
    train.training_loop(config, procs, state, tokens, None, StopRequest(procs))
    assert saved == [1]
