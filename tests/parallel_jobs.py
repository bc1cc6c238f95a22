"""Functions below, each with a configuration, done by several processes in turn:

python tests/parallel_jobs.py 2 NAME=CONFIG ... 4 NAME=CONFIG ...

It forks them once everything is imported, which takes longer than the jobs."""

import errno
import itertools
import os
import resource
import secrets
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # which optimizers import: before the fork
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from aogpt.checkpoints import store
from aogpt.data.loader import TokenDataset
from aogpt.runtime.processes import processes
from aogpt.training import checkpoint as states
from aogpt.training import config as configuration
from aogpt.training.checkpoint import Saver, StopRequest


def full(tensor):
    """Return a whole tensor, also of a sharded one."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def full_state(state):
    """Return every tensor of a training state, whole, by its name in a checkpoint."""
    return {name: full(tensor) for name, tensor in states.named_tensors(state).items()}


def start(config, procs):
    data = TokenDataset(config.data.folder, "train", config.model.block_size)
    return states.start(config, data.meta, procs), data


def run(config, procs):
    """Train."""
    train.train(config, procs)


def moved(config, procs):
    """Go on from the first checkpoint of the run before "_to_" in the name; what was
    restored."""
    source = configuration.load_toml(
        Path(config.out) / f"{config.name.partition('_to_')[0]}.toml"
    )
    folder = config.run_folder / "checkpoints"
    if procs.main:
        folder.mkdir(parents=True)
        for path in store.find(source.run_folder, up_to=source.checkpoint.interval):
            shutil.copytree(path, folder / path.name)
    procs.gather(None)  # until it is there
    restored = full_state(start(config, procs)[0])
    train.train(config, procs)
    return restored


def steps(config, procs):
    """Return losses and gradient norms of all steps, and how often gradients were
    reduced in each."""
    if procs.main:  # a finished run of this name would have no steps left
        shutil.rmtree(config.run_folder, ignore_errors=True)
    procs.gather(None)
    state, data = start(config, procs)
    rows = []
    count = Reductions()
    plain_replicate = train.replicate
    plain_update = train.update

    def replicate(*arguments):
        model = plain_replicate(*arguments)
        if model is not state.model:
            model.register_comm_hook(count, reduce_bucket)
        return model

    def update(state, loss, norm):
        rows.append([loss.item(), norm.item(), count.number])
        plain_update(state, loss, norm)
        count.number = 0

    patched_replicate = mock.patch.object(train, "replicate", replicate)
    patched_update = mock.patch.object(train, "update", update)
    with patched_replicate, patched_update, count:
        train.training_loop(config, procs, state, data, None, StopRequest(procs))
    return rows


class Reductions(TorchDispatchMode):
    """Counts how often processes get their parts of sums."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.number += "reduce_scatter" in str(function)
        return function(*arguments, **(keywords or {}))


def reduce_bucket(count, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    count.number += 1
    return allreduce_hook(None, bucket)


def compiled(config, procs):
    """Train, and count the frames that torch.compile has compiled after each step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = train.update
    counts = []

    def update(*arguments):
        plain(*arguments)
        counts.append(torch._dynamo.utils.counters["frames"]["ok"])

    with mock.patch.object(train, "update", update):
        train.train(config, procs)
    return counts


def killed(config, procs):
    """Train, and be killed when the second checkpoint is written and has no name
    yet."""
    renamed = []
    plain = os.rename

    def rename(source, target):
        renamed.append(target)
        if len(renamed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(source, target)

    os.rename = rename
    train.train(config, procs)


def faulty(config, procs):
    """Checkpoints fail: at step 4 a full disk, at 6 no renaming, at 8 no making of
    folders."""
    save = Saver.save
    rename = os.rename
    mkdir = Path.mkdir
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse(*arguments, **keywords):
        raise PermissionError(errno.EPERM, "not today")

    def faulty_save(self, state, best):
        step = state.progress.step
        if step == 4 and not procs.main:
            # Python ignores the signal
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        os.rename = refuse if step == 6 else rename
        Path.mkdir = refuse if step == 8 else mkdir
        try:
            save(self, state, best)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            os.rename = rename
            Path.mkdir = mkdir

    with mock.patch.object(Saver, "save", faulty_save):
        train.train(config, procs)


def do(*jobs):
    with processes("cpu", 120.0, group=True) as procs:
        for job in jobs:
            name, _, path = job.partition("=")
            config = configuration.load_toml(path)
            result = globals()[name](config, procs)
            if procs.main:
                config.run_folder.mkdir(parents=True, exist_ok=True)
                torch.save(result, config.run_folder / f"{name}.pt")


def launch(world, *jobs):
    """As torchrun does, without the fork."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=secrets.token_hex(8),
        start_method="fork",
    )
    elastic_launch(config, do)(*jobs)


def main(*words):
    at = [i for i, word in enumerate(words) if word.isdigit()]
    for begin, end in itertools.pairwise([*at, len(words)]):
        launch(int(words[begin]), *words[begin + 1 : end])


if __name__ == "__main__":
    main(*sys.argv[1:])
