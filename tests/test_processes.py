"""Processes of a job: variables that another job left behind, and waiting for the
others."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from aogpt.runtime.errors import UserError
from aogpt.runtime.processes import processes

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOB = """
from aogpt.runtime import processes
from aogpt.runtime.command_line import run_script
processes.PATIENCE = 0.5
def main():
    with processes.processes("cpu") as procs:
        print(procs.world_size, procs.gather(procs.rank))
run_script(main)
"""


def start(**environment):
    """Return a process of a job, with no variables of torchrun but these."""
    inherited = {name: text for name, text in os.environ.items() if name not in NAMES}
    return subprocess.Popen(
        [sys.executable, "-c", JOB],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_of_two(rank, port):
    """One of the two processes of a job on this machine."""
    return start(WORLD_SIZE="2", RANK=rank, MASTER_ADDR="localhost", MASTER_PORT=port)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "3"}, "RANK is '3', not a number from 0 to 0"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', not a number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number of at least 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', not a number of at least 0"),
        ({"WORLD_SIZE": "2"}, "has no MASTER_ADDR"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"},
            "MASTER_PORT is 'http', not a number from 0 to 65535",
        ),
    ],
)
def test_variables_that_cannot_be_right_are_named_in_one_line(
    environment, message, monkeypatch
):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=message) as error, processes("cpu"):
        pass
    assert "unset RANK" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_lonely_process_says_for_whom_it_waits_and_ends_at_ctrl_c(rank):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    process = start_of_two(rank, port)
    note = process.stderr.readline()
    assert "waiting for the other processes of a job of 2" in note
    assert f"localhost:{port}" in note
    assert "unset RANK" in note
    process.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert time.monotonic() - interrupted < 15


def test_processes_that_start_without_torchrun_find_one_another():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    jobs = [start_of_two(rank, port) for rank in ("1", "0")]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        assert out == "2 [0, 1]\n"
