"""A run folder belongs to one job, and to nobody once that job is gone."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ALONE, ROOT, tiny_config

import train
from runtime import lock
from runtime.lock import locked

HOLD = "import time; from pathlib import Path; from runtime.lock import locked\n"
HOLD += "with locked(Path({!r})): print('held', flush=True); time.sleep(600)"


def test_a_second_training_is_refused_and_the_next_one_is_not(data, tmp_path):
    config = tiny_config(data, tmp_path, steps=6)
    with locked(config.run_folder):
        with pytest.raises(ValueError, match=f"another job is at work in .*{os.getpid()}.*--name"):
            train.train(config, ALONE)
        assert [path.name for path in config.run_folder.iterdir()] == ["lock"]
    train.train(config, ALONE)
    assert not (config.run_folder / "lock").exists()


def test_a_lock_goes_with_its_process_however_that_ends(tmp_path):
    command = [sys.executable, "-c", HOLD.format(str(tmp_path))]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"another job is at work.*{holder.pid}"):
        locked(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "seconds, job, held", [(1, None, True), (999, None, False), (1, "a", True), (1, "b", False)]
)
def test_a_lock_of_another_machine_counts_while_it_is_touched(
    tmp_path, monkeypatch, seconds, job, held
):
    """Job b goes on here after its processes were started anew."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "job": job}))
    os.utime(tmp_path / "lock", (time.time() - seconds,) * 2)
    if held:
        with pytest.raises(ValueError, match="another job is at work .*elsewhere"):
            locked(tmp_path).__enter__()
    else:
        with locked(tmp_path):
            pass


def test_a_lock_is_touched_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "TOUCHED_EVERY", 0.01)
    with locked(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        while (tmp_path / "lock").stat().st_mtime == 0:
            time.sleep(0.001)


@pytest.mark.parametrize("text", ["", "{", '{"host": 1}', "{[" * 9999, "\0"])
def test_what_is_no_lock_of_a_job_stops_nobody(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("text", ["my house key", "[]"])
def test_a_file_of_this_name_that_is_somebodys_is_not_taken(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(ValueError, match="lock is no file of a job: remove it"):
        locked(tmp_path).__enter__()
    assert (tmp_path / "lock").read_text() == text


def test_a_lock_from_the_future_is_left_over(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "job": None}))
    os.utime(tmp_path / "lock", (time.time() + 9999,) * 2)
    with locked(tmp_path):
        pass


def test_a_disk_without_locks_of_the_kernel_leaves_jobs_of_this_machine_to_their_numbers(
    tmp_path, monkeypatch
):
    def unknown(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock.fcntl, "flock", unknown)
    with locked(tmp_path), pytest.raises(ValueError, match="another job is at work"):
        locked(tmp_path).__enter__()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = {"host": socket.gethostname(), "pid": ended.pid, "job": None}
    (tmp_path / "lock").write_text(json.dumps(owner))
    with locked(tmp_path):
        pass


def test_a_job_removes_no_lock_of_another(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock").unlink()  # by somebody
        with locked(tmp_path):
            (tmp_path / "lock").rename(tmp_path / "other")
            (tmp_path / "lock").write_text("{}")
    assert (tmp_path / "lock").read_text() == "{}"
