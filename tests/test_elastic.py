"""Jobs of torchrun that are told to end or lose a process."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers import change, tiny_config, wait_for

from aogpt.checkpoints import store
from aogpt.runtime.processes import processes
from studies import jobs


@pytest.fixture
def start():
    """Yield a function that starts a job; what is left of it after the test is
    ended."""
    started = []

    def call(*arguments, **keywords):
        started.append(jobs.Job(*arguments, **keywords))
        return started[-1]

    yield call
    for job in started:
        job.end()


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(
    data, tmp_path, start
):
    """`make soak` has the same for torchrun, kills, hangs and two nodes."""
    config = tiny_config(data, tmp_path, steps=100_000, eval__interval=0)
    job = start(change(config, checkpoint__interval=100_000))
    wait_for(lambda: jobs.last_step(config) >= 3, job.process)
    # rank 1 is the process that neither logs nor saves
    os.kill(job.workers()[1], signal.SIGTERM)
    job.wait()  # with a process one step ahead, the other would wait for it in vain
    step = int(re.search(r"stopped at step (\d+) and saved", job.said)[1])
    newest = store.find(config.run_folder)[-1]
    assert jobs.last_step(config) == step
    assert store.step_of(newest) == step
    assert step >= 3
    assert "error (rank" not in job.said
    assert 'train.py", line' not in job.said


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "[/gloo/unbound_buffer.cc:81] Timed out waiting 900ms for recv",
            "not answer within 9 sec",
        ),
        ("wait timeout after 900ms, keys: /offer", "not answer within 9 seconds"),
        (
            "[/gloo/tcp/pair.cc:537] Read error [::1]:1: Connection reset by peer",
            "was cut",
        ),
        ("Connection closed by peer [127.0.0.1]:1", "was cut"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
        ("CUDA error: the launch timed out", None),
    ],
)
def test_a_lost_process_is_said_in_words_and_any_other_error_keeps_its_traceback(
    text, said
):
    kind = ConnectionError if said else RuntimeError
    words = (
        f"another process.*{said}.*; see the messages of the others"
        if said
        else f"^{text}$"
    )
    with pytest.raises(kind, match=words):
        with processes("cpu", 9.0, group=True):
            raise RuntimeError(text)
