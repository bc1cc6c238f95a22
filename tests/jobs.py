"""Jobs of torchrun that are killed, stopped and started again, for test_elastic.py and soak.py."""

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

from checkpoints import store
from training.metrics import read_metrics

MOMENTS = ("step", "evaluation", "checkpoint")

# ---- jobs ----------------------------------------------------------------------------------------


class Job:
    """torchrun with train.py, in the background; its output goes to a file. `end` leaves no process
    of it behind."""

    def __init__(self, config, *options, launcher=("--standalone", "--nproc_per_node=2")):
        self.config, path = config, write_config(config)
        name, value = "AOGPT_JOB", secrets.token_hex(8)
        self.mark = f"{name}={value}"  # in the environment of all its processes
        self.output = path.with_name(f"{path.stem}.{value}.txt")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *launcher, *options)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), name: value}
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [*torchrun, "train.py", str(path)], cwd=ROOT, env=env, stdout=file, stderr=file
            )

    @property
    def said(self):
        return self.output.read_text()

    def processes(self):
        """Its processes that run: {process id: environment}, torchrun's and the workers'."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                environment = (path / "environ").read_text(errors="replace").split("\0")
                if self.mark in environment:
                    pairs = [entry.split("=", 1) for entry in environment if "=" in entry]
                    found[int(path.name)] = dict(pairs)
        return found

    def workers(self):
        """The workers that run: {rank: process id}."""
        return {int(env["RANK"]): pid for pid, env in self.processes().items() if "RANK" in env}

    def starts(self):
        """For every time that the run was started: the step that it went on from."""
        steps, resumed = [], 0
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


class TwoNodes(tuple):
    """Options of two torchruns on this machine that stand for two nodes of one process each;
    `port` of their store."""

    port: int


def two_nodes(number, settings="last_call_timeout=30"):
    """number: of nodes, "2" or "1:2". settings: of the rendezvous."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={port}")
    nodes = (f"--nnodes={number}", "--nproc_per_node=1")
    options = TwoNodes((*nodes, *place, f"--rdzv_conf={settings}"))
    options.port = port
    return options


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# ---- moments -------------------------------------------------------------------------------------


def random_moments(seed, count):
    """A generator seeded with `seed`, and `count` kinds of moments: each as often as the others, in
    random order."""
    rng = random.Random(seed)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(count)]
    rng.shuffle(moments)
    return rng, moments


def last_step(config):
    """The last step whose loss is written."""
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def wait_for_moment(job, start, moment, rng):
    """Wait for a random moment of that kind after the job's start number `start` (from 0). Returns
    the step that it started from."""
    wait_for(lambda: len(job.starts()) > start, job.process)
    config, base = job.config, job.starts()[start]
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
    """Kill a random worker of two at a random moment, and wait until the job has come back. Returns
    what soak.py writes down of it."""
    base = wait_for_moment(job, start, moment, rng)
    rank = rng.randrange(2)
    wait_for(lambda: rank in job.workers(), job.process)
    os.kill(job.workers()[rank], signal.SIGKILL)
    killed, reached = time.monotonic(), last_step(job.config)
    wait_for(lambda: len(job.starts()) > start + 1, job.process)
    seconds, again = time.monotonic() - killed, job.starts()[start + 1]
    where = {"moment": moment, "rank": rank, "from": base}
    return where | {"reached": reached, "again": again, "seconds": seconds}


# ---- what is left --------------------------------------------------------------------------------


def assert_same_state(config, reference):
    """The newest checkpoint is what the undisturbed run had at that step, bit for bit, and so are
    the losses to it."""
    newest = store.find(config.run_folder)[-1]
    ours = read_checkpoint(newest) | {"config": None}
    expected = read_checkpoint(reference.run_folder / "checkpoints" / newest.name)
    assert_same(ours, expected | {"config": None})
    step = store.step_of(newest)
    ours, expected = (
        [line for line in metrics(c) if line["step"] <= step] for c in (config, reference)
    )
    assert ours == expected
    return step
