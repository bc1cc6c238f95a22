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

from helpers import ROOT, assert_same, metrics, wait_for, write_config

from checkpoints import sharded, store
from training.metrics import read_metrics

MOMENTS = ("step", "evaluation", "checkpoint")


class Job:
    """torchrun with train.py, in the background; its output goes to a file. `end` leaves no process of it behind."""

    def __init__(self, config, *options, launcher=("--standalone", "--nproc_per_node=2")):
        self.config, self.path = config, write_config(config)
        self.mark = f"AOGPT_JOB={secrets.token_hex(8)}"
        name, value = self.mark.split("=")
        env = os.environ | {"OMP_NUM_THREADS": "1", name: value}
        self.output = self.path.with_name(f"{self.path.stem}.{value}.txt")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launcher,
            *options,
            "train.py",
            str(self.path),
        ]
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)

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
                    found[int(path.name)] = dict(
                        entry.split("=", 1) for entry in environment if "=" in entry
                    )
        return found

    def workers(self):
        """The workers that run: {rank: process id}."""
        return {int(env["RANK"]): pid for pid, env in self.processes().items() if "RANK" in env}

    def starts(self):
        """For every time that the run was started: the step that it went on from."""
        begun = re.findall(r"resumed from \S*step_(\d+)|parameters: \d", self.said)
        return [
            int(before or 0) for before, now in zip(["", *begun], begun, strict=False) if not now
        ]

    def wait(self, seconds=300):
        """torchrun's exit status, once all its processes have ended."""
        status = self.process.wait(seconds)
        wait_for(lambda: not self.processes(), seconds=10)
        return status

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


class TwoNodes(tuple):
    """Options of two torchruns on this machine that stand for two nodes of one process each; `port` of their store."""

    port: int


def two_nodes(number, settings="last_call_timeout=30"):
    """number: of nodes, "2" or "1:2". settings: of the rendezvous."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={port}")
    options = TwoNodes(
        (f"--nnodes={number}", "--nproc_per_node=1", *place, f"--rdzv_conf={settings}")
    )
    options.port = port
    return options


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def last_step(config):
    """The last step whose loss is written."""
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def wait_for_moment(job, start, moment, rng):
    """Wait for a random moment of that kind after the job's start number `start` (from 0). Returns the step before."""
    wait_for(lambda: len(job.starts()) > start, job.process)
    config, base = job.config, job.starts()[start]
    folder, step = config.run_folder / "checkpoints", base + rng.randint(1, 9)
    if moment == "checkpoint":
        wait_for(lambda: list(folder.glob(".step_*.tmp")), job.process)
    else:
        every = config.eval.interval
        step = (
            step if moment == "step" else (step // every + 1) * every
        )  # its line is written before its evaluation
        wait_for(lambda: last_step(config) >= step, job.process)
        time.sleep(rng.uniform(0, 0.03))
    return base


def kill(job, start, moment, rng):
    """Kill a random worker of two at a random moment. Returns what soak.py writes down of it."""
    base = wait_for_moment(job, start, moment, rng)
    rank = rng.randrange(2)
    wait_for(lambda: rank in job.workers(), job.process)
    os.kill(job.workers()[rank], signal.SIGKILL)
    killed, reached = time.monotonic(), last_step(job.config)
    wait_for(lambda: len(job.starts()) > start + 1, job.process)
    back = time.monotonic() - killed
    again = job.starts()[start + 1]
    return {
        "moment": moment,
        "rank": rank,
        "from": base,
        "reached": reached,
        "again": again,
        "seconds": back,
    }


def whole(path):
    """A checkpoint of either form with all its tensors, without what may differ between equal runs."""
    state = store.read(path, verify=path.is_file())
    state["tensors"] = sharded.read_all(path, "") if path.is_dir() else {}
    return state | {"config": None}


def assert_same_state(config, reference):
    """The newest checkpoint is what the undisturbed run had at that step, bit for bit, and so are the losses to it."""
    newest = store.find(config.run_folder)[-1]
    assert_same(whole(newest), whole(reference.run_folder / "checkpoints" / newest.name))
    step = store.step_of(newest)
    ours, expected = (
        [line for line in metrics(c) if line["step"] <= step] for c in (config, reference)
    )
    assert ours == expected
    return step


def random_moments(seed, count):
    """A generator seeded with `seed`, and `count` kinds of moments: each as often as the others, in random order."""
    rng = random.Random(seed)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(count)]
    rng.shuffle(moments)
    return rng, moments
