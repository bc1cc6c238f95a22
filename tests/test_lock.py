"""A run folder belongs to one job, and to nobody once that job is gone."""

import signal
import subprocess
import sys

import pytest
import torch
from helpers import ALONE, ROOT, tiny_config

import train
from aogpt.runtime.files import locked_for_all
from aogpt.runtime.processes import Processes

HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from aogpt.runtime.files import locked_for_all
# without importing PyTorch
alone = SimpleNamespace(main=True, gather=lambda value: [value])
with locked_for_all(Path(sys.argv[1]), alone):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_training_is_refused_and_the_next_one_is_not(data, tmp_path):
    config = tiny_config(data, tmp_path, steps=6)
    with locked_for_all(config.run_folder, ALONE):
        message = f"another job trains in {config.run_folder}.*--name"
        with pytest.raises(ValueError, match=message):
            train.train(config, ALONE)
        assert [path.name for path in config.run_folder.iterdir()] == ["lock"]
    train.train(config, ALONE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_goes_with_its_process_however_that_ends(tmp_path, number):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with (
        pytest.raises(ValueError, match="another job"),
        locked_for_all(tmp_path, ALONE),
    ):
        pass
    holder.send_signal(number)
    holder.wait()
    with locked_for_all(tmp_path, ALONE):
        pass


def test_what_the_main_process_is_refused_all_are(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Processes, "gather", lambda procs, value: ["another job", value]
    )
    other = Processes(1, 2, torch.device("cpu"))
    with (
        pytest.raises(ValueError, match="another job"),
        locked_for_all(tmp_path, other),
    ):
        pass
    assert not list(tmp_path.iterdir())
