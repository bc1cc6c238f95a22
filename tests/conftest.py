"""Shared by all tests: one way to run a script, small models, and the folder of real text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)  # tiny tensors: one thread is faster, and the processes that tests start share two cores


def run_script(*arguments, check=True, timeout=300, **environment):
    """Run a script of the project as a user would, from its root; returns the finished process with its text."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    if check:
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def torchrun(processes, *arguments, **keywords):
    """`run_script` under torchrun with that many processes on this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return run_script(*launcher, *arguments, **keywords)


def assert_user_error(done, *words):
    """The script ended as for a user's mistake: status 2, a message with these words, no traceback."""
    assert done.returncode == 2, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


@pytest.fixture(scope="session")
def real_data():
    """The folder of real text that AOGPT_DATA names; tests that need it are skipped without it."""
    folder = os.environ.get("AOGPT_DATA")
    if not folder:
        pytest.skip("AOGPT_DATA is not set: no real text at hand")
    return Path(folder)
