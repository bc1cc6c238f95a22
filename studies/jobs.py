"""Jobs of several processes that are killed, stopped and started again: for soak.py and
tests/test_elastic.py."""

import contextlib
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from helpers import ROOT, assert_same, metrics, read_checkpoint, wait_for, write_config

from aogpt.checkpoints import store
from aogpt.training.val_losses import read_metrics

MOMENTS = ("step", "evaluation", "checkpoint")


class Job:
    """torchrun with train.py, in the background; its output goes to a file."""

    def __init__(
        self, config, *options, launcher=("--standalone", "--nproc_per_node=2")
    ):
        self.config = config
        path = write_config(config)
        name = "AOGPT_JOB"
        value = secrets.token_hex(8)
        self.mark = f"{name}={value}"  # in the environment of all its processes
        self.output = path.with_name(f"{path.stem}.{value}.txt")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *launcher, *options)
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            name: value,
        }
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [*torchrun, "train.py", str(path)],
                cwd=ROOT,
                env=env,
                stdout=file,
                stderr=file,
            )

    @property
    def said(self):
        return self.output.read_text()

    def processes(self):
        """Its processes, torchrun's and the workers': {process id: environment}."""
        environments = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                environment = (path / "environ").read_text(errors="replace").split("\0")
                if self.mark in environment:
                    pairs = [
                        entry.split("=", 1) for entry in environment if "=" in entry
                    ]
                    environments[int(path.name)] = dict(pairs)
        return environments

    def workers(self):
        """{rank: process id}"""
        return {
            int(env["RANK"]): pid
            for pid, env in self.processes().items()
            if "RANK" in env
        }

    def starts(self):
        """Return the step that the run went on from, for every time that it was
        started."""
        steps = []
        resumed = 0
        for step in re.findall(r"resumed from \S*step_(\d+)|parameters: \d", self.said):
            if step:
                resumed = int(step)
            else:
                steps.append(resumed)
                resumed = 0
        return steps

    def wait(self):
        """torchrun's exit status, once all its processes have ended."""
        status = self.process.wait(600)
        wait_for(lambda: not self.processes())
        return status

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


def two_nodes(number, settings="last_call_timeout=30"):
    """Return options of two torchruns that stand for two nodes ("2" or "1:2"), and
    their store's port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = (
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        f"--rdzv_id={port}",
    )
    nodes = (f"--nnodes={number}", "--nproc_per_node=1")
    return (*nodes, *place, f"--rdzv_conf={settings}"), port


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def random_moments(seed, count):
    """Return a seeded generator, and `count` kinds of moments in random order, each as
    often."""
    rng = random.Random(seed)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(count)]
    rng.shuffle(moments)
    return rng, moments


def last_step(config):
    """Return the last step whose loss is written."""
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def wait_for_moment(job, start, moment, rng):
    """Wait for such a moment after start number `start` of the job; the step it went on
    from."""
    wait_for(lambda: len(job.starts()) > start, job.process)
    config = job.config
    base = job.starts()[start]
    step = base + rng.randint(1, 9)
    if moment == "evaluation":  # the line of a step is written before its evaluation
        step = (step // config.eval.interval + 1) * config.eval.interval
    unfinished = config.run_folder / "checkpoints"

    def reached():
        # A small checkpoint is written so quickly that one may miss every one of them.
        if moment == "checkpoint" and last_step(config) < base + 9:
            return any(unfinished.glob(".step_*.tmp"))
        return last_step(config) >= step

    wait_for(reached, job.process)
    if moment != "checkpoint":
        time.sleep(rng.uniform(0, 0.03))  # any moment of a step
    return base


def kill(job, start, moment, rng):
    """Kill a random worker at a random moment; the seconds and steps until the job is
    back."""
    wait_for_moment(job, start, moment, rng)
    rank = rng.randrange(2)
    wait_for(lambda: rank in job.workers(), job.process)
    os.kill(job.workers()[rank], signal.SIGKILL)
    killed = time.monotonic()
    reached = last_step(job.config)
    wait_for(lambda: len(job.starts()) > start + 1, job.process)
    return time.monotonic() - killed, reached - job.starts()[start + 1]


def assert_same_state(config, reference):
    """The newest checkpoint and the losses to it are the undisturbed run's, bit for
    bit."""
    newest = store.find(config.run_folder)[-1]
    ours = read_checkpoint(newest) | {"config": None}
    expected = read_checkpoint(reference.run_folder / "checkpoints" / newest.name)
    assert_same(ours, expected | {"config": None})
    step = store.step_of(newest)
    ours = [line for line in metrics(config) if line["step"] <= step]
    expected = [line for line in metrics(reference) if line["step"] <= step]
    assert ours == expected
    return step
