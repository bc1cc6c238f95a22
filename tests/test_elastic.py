"""Jobs of torchrun that lose processes at random moments."""

import os
import re
import signal
from pathlib import Path

import jobs
import pytest
from helpers import (
    ALONE,
    assert_same_losses,
    change,
    tiny_config,
    torchrun,
    wait_for,
    write_config,
)

import train
from aogpt.checkpoints import store
from aogpt.runtime.processes import processes

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)


def undisturbed(data, out, **changes):
    """Return an undisturbed run of two processes that kept the checkpoint of every
    step."""
    config = tiny_config(
        data, out, checkpoint__interval=1, checkpoint__keep=99, **changes
    )
    torchrun(2, "train.py", write_config(config))
    return config


@pytest.fixture(scope="module")
def undisturbed_ddp(data, tmp_path_factory):
    """Without dropout, whose masks depend on the number of processes."""
    return undisturbed(data, tmp_path_factory.mktemp("ddp"), model__dropout=0.0)


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


def disturbed(reference, out, **changes):
    return change(
        reference, out=str(out), checkpoint__interval=4, checkpoint__keep=2, **changes
    )


@pytest.mark.slow(reason="kills processes of torchrun and waits for them")
@needs_proc
def test_a_killed_rank_comes_back_exactly_and_a_hanging_one_ends_in_an_error(
    undisturbed_ddp, tmp_path, start
):
    # Short, because the test waits it out: the hanging rank is noticed only when the
    # time is over.
    config = disturbed(undisturbed_ddp, tmp_path, train__timeout=15.0)
    job = start(config, "--max-restarts=1")
    rng, (moment,) = jobs.random_moments(0, 1)
    jobs.kill(job, 0, moment, rng)
    jobs.wait_for_moment(job, 1, "step", rng)
    hanging = job.workers()[rng.randrange(2)]
    os.kill(hanging, signal.SIGSTOP)
    message = (
        "another process did not answer within 15 seconds (train.timeout): it hangs"
    )
    wait_for(lambda: message in job.said)
    os.kill(hanging, signal.SIGKILL)  # torchrun would do so after half a minute
    assert job.wait() != 0
    assert len(job.starts()) == 2
    assert 'train.py", line' not in job.said, "a user needs no traceback for that"
    assert 0 < jobs.assert_same_state(config, undisturbed_ddp) < 40


@needs_proc
@pytest.mark.parametrize(
    "receiver",
    [
        "rank 1",
        pytest.param(
            "torchrun", marks=pytest.mark.slow(reason="the same for torchrun")
        ),
    ],
)
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(
    data, tmp_path, start, receiver
):
    config = tiny_config(data, tmp_path, steps=100_000, eval__interval=0)
    job = start(change(config, checkpoint__interval=100_000))
    wait_for(lambda: jobs.last_step(config) >= 3, job.process)
    # rank 1 is the process that neither logs nor saves
    receiving = job.workers()[1] if receiver == "rank 1" else job.process.pid
    os.kill(receiving, signal.SIGTERM)
    job.wait()  # with a process one step ahead, the other would wait for it in vain
    step = int(re.search(r"stopped at step (\d+) and saved", job.said)[1])
    newest = store.find(config.run_folder)[-1]
    assert jobs.last_step(config) == step
    assert store.step_of(newest) == step
    assert step >= 3
    assert "error (rank" not in job.said
    assert 'train.py", line' not in job.said


@needs_proc
@pytest.mark.slow(reason="kills processes of torchrun and waits for them")
def test_under_fsdp_killed_ranks_come_back_exactly_and_a_signal_to_one_saves_in_time(
    data, tmp_path, start
):
    reference = undisturbed(data, tmp_path / "undisturbed", train__parallel="fsdp")
    config = disturbed(reference, tmp_path)
    job = start(config, "--max-restarts=2")
    rng, moments = jobs.random_moments(1, 2)
    for n, moment in enumerate(moments):
        jobs.kill(job, n, moment, rng)
    jobs.wait_for_moment(job, 2, "step", rng)
    os.kill(job.workers()[1], signal.SIGTERM)
    assert job.wait() == 0, job.said
    step = jobs.assert_same_state(config, reference)
    assert f"stopped at step {step} and saved" in job.said
    assert "error (rank" not in job.said.split("resumed")[-1]


@needs_proc
@pytest.mark.slow(reason="kills processes of torchrun and waits for them")
def test_two_nodes_train_as_one_process_does(undisturbed_ddp, tmp_path, start):
    config = disturbed(undisturbed_ddp, tmp_path, train__timeout=300.0)
    alone = change(config, name="alone")
    train.train(alone, ALONE)
    launcher, _ = jobs.two_nodes(2, "last_call_timeout=30,read_timeout=600")
    nodes = [start(config, launcher=launcher) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert_same_losses(config, alone, 1e-5)


@needs_proc
@pytest.mark.slow(reason="kills processes of torchrun and waits for them")
def test_when_torchrun_is_killed_its_processes_end_and_another_number_goes_on(
    undisturbed_ddp, tmp_path, start
):
    config = disturbed(undisturbed_ddp, tmp_path)
    rng = jobs.random_moments(2, 1)[0]
    job = start(config)
    jobs.wait_for_moment(job, 0, "step", rng)
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL  # once all its processes have ended
    assert start(config, launcher=("--standalone", "--nproc_per_node=1")).wait() == 0
    assert_same_losses(config, undisturbed_ddp, 1e-5)


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
