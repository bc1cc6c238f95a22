"""Shared by all tests: one way to run a script, small runs, and the folder of real
text."""

import gc
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from helpers import ALONE, encoder_config, make_data, of_system, tiny_config

import train
from aogpt.runtime.command_line import run_script as run_main

# Tiny tensors: one thread is faster, and the processes that tests start share two
# cores.
torch.set_num_threads(1)
# Without a GPU Triton's kernels run in its interpreter; Triton reads this when it is
# imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# no test may depend on how busy the machine is
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

LONG = (
    "test_decode",
    "test_kernels",
    "test_parallel",
    "test_train",
    "test_findings",
    "test_sample",
    "test_sharded",
    "test_elastic",
    "test_app",
)


def pytest_collection_modifyitems(items):
    """Two workers take file after file: the longest ones first, so that neither is left
    alone with one at the end. And a test that is marked as slow says why."""
    places = {name: place for place, name in enumerate(LONG)}
    # A stable sort: the order within files stays.
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None and not mark.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid}: slow needs a reason=")


def pytest_collection_finish():
    """Collections of garbage, which some tests and out-of-memory errors ask for, need
    not look at all that was imported: 0.2 s each."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_data():
    """Return the folder of real text that AOGPT_DATA names; tests that need it are
    skipped without it."""
    folder = os.environ.get("AOGPT_DATA")
    if not folder:
        pytest.skip("AOGPT_DATA is not set: no real text at hand")
    return Path(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run(data, tmp_path_factory):
    """Return a run folder whose averaged and last weights differ."""
    config = tiny_config(data, tmp_path_factory.mktemp("out"), checkpoint__interval=20)
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="session")
def plain(run, data):
    """Return a run of a model that is not conditioned on its target position."""
    config = of_system(tiny_config(data, run.parent, "plain", steps=6), "plain GPT")
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="session")
def encoder(run, data):
    """Return a run of a model with full attention."""
    config = of_system(tiny_config(data, run.parent, "encoder", steps=6), "encoder")
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture(scope="session")
def sedd(run, data):
    """Return a run of SEDD, which reads its noise level."""
    config = encoder_config(tiny_config(data, run.parent, "sedd", steps=6), noise=True)
    train.train(config, ALONE)
    return config.run_folder


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script's main with these arguments, as its last lines do, in this process:
    (exit status, stdout, stderr). An exception that it would show as a traceback fails
    the test."""

    def call(module, *arguments):
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *map(str, arguments)])
        capsys.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            # The script runs as a file, also where pytest runs as a module.
            patch.setattr(sys.modules["__main__"], "__spec__", None)
            run_main(module.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def mistake(script):
    """Run a script in vain, as after a mistake of the user's: what it says, on one
    line."""

    def call(module, *arguments):
        status, out, err = script(module, *arguments)
        assert status == 2 and not out and "Traceback" not in err, out + err
        return " ".join(err.split())

    return call


@pytest.fixture
def printed(script):
    """Run a script that succeeds: what it prints."""

    def call(module, *arguments):
        status, out, err = script(module, *arguments)
        assert status == 0, err
        return out

    return call


@pytest.fixture
def run_here(script):
    """In place of studies.runs.run_alone: a script runs in this process."""

    def call(name, *arguments, processes=1):
        module = importlib.import_module(name.removesuffix(".py"))
        status, out, errors = script(module, *arguments)
        return subprocess.CompletedProcess([name, *arguments], status, out, errors)

    return call


@pytest.fixture(autouse=True)
def signal_handlers():
    """train() takes over SIGTERM and SIGINT: give them back to pytest."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
