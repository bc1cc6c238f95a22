"""Shared by all tests: one way to run a script, small models, and the folder of real text."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import ALONE, make_data, tiny_config

import train
from objectives import ObjectiveConfig
from orders import OrderConfig
from runtime.command_line import run_script as run_main

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(
    1
)  # tiny tensors: one thread is faster, and the processes that tests start share two cores


def run_script(*arguments, check=True, timeout=300, **environment):
    """Run a script of the project as a user would, from its root; returns the finished process with its text."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    if check:
        assert done.returncode == 0, (
            f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
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


SLOW = (
    "test_train",
    "test_elastic",
    "test_parallel",
    "test_end_to_end",
    "test_sharded",
    "test_budget",
    "test_eval_ppl",
)


def pytest_collection_modifyitems(items):
    """Two workers take file after file: the slow ones first, so that neither is left alone with one at the end."""
    places = {name: place for place, name in enumerate(SLOW)}
    items.sort(
        key=lambda item: places.get(item.path.stem, len(places))
    )  # stable: the order within files stays


@pytest.fixture(scope="session")
def real_data():
    """The folder of real text that AOGPT_DATA names; tests that need it are skipped without it."""
    folder = os.environ.get("AOGPT_DATA")
    if not folder:
        pytest.skip("AOGPT_DATA is not set: no real text at hand")
    return Path(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run folder whose averaged and last weights differ."""
    config = tiny_config(data, tmp_path_factory.mktemp("out"), checkpoint__interval=20)
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="module")
def plain(run, data):
    """A run of a model that is not told its target position."""
    config = tiny_config(
        data, run.parent, "plain", steps=6, order=OrderConfig("l2r"), model__target="none"
    )
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="module")
def encoder(run, data):
    """A run of a model with full attention."""
    config = tiny_config(data, run.parent, "encoder", steps=6)
    model = replace(config.model, attention="full", target="none", mask_token=257)
    config = replace(
        config, model=model, objective=ObjectiveConfig("lambda_dce"), order=OrderConfig("random")
    )
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script's main with these arguments, as its last lines do, in this process: (exit status, stdout, stderr).

    An exception that the script would show as a traceback fails the test.
    """

    def call(module, *arguments):
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_main(module.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call
