"""Jobs of several processes that lose some of them: killed, hanging, stopped, back with another number of processes.

Every test starts jobs of torchrun as a user would and disturbs them at random moments; `make soak` does so for longer.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import (
    ALONE,
    ROOT,
    assert_same_losses,
    change,
    make_data,
    tiny_config,
    torchrun,
    wait_for,
    write_config,
)
from jobs import (
    Job,
    assert_same_state,
    is_open,
    kill,
    last_step,
    random_moments,
    two_nodes,
    wait_for_moment,
)

import train
from runtime.processes import processes

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

RUNS = """
import sys
import train
from training import config
from runtime.command_line import run_script
from runtime.processes import processes

def main():
    with processes("cpu", group=True) as procs:
        for path in sys.argv[1:]:
            train.train(config.load_toml(path), procs)

run_script(main)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """{parallel: an undisturbed run of two processes that kept the checkpoint of every step}. The one of ddp has no
    dropout, whose masks depend on the number of processes."""
    out = tmp_path_factory.mktemp("undisturbed")
    every = {"checkpoint__interval": 1, "checkpoint__keep": 99}
    ddp = tiny_config(data, out, "ddp", model__dropout=0.0, **every)
    fsdp = tiny_config(data, out, "fsdp", train__parallel="fsdp", **every)
    script = out / "runs.py"
    script.write_text(RUNS)
    torchrun(2, script, write_config(ddp), write_config(fsdp), PYTHONPATH=str(ROOT))
    return {"ddp": ddp, "fsdp": fsdp}


@pytest.fixture
def start():
    """A function that starts a job; what is left of it after the test is ended."""
    jobs = []

    def call(*arguments, **keywords):
        jobs.append(Job(*arguments, **keywords))
        return jobs[-1]

    yield call
    for job in jobs:
        job.end()


def disturbed(reference, out, **changes):
    return change(reference, out=str(out), checkpoint__interval=4, checkpoint__keep=2, **changes)


def test_killed_ranks_come_back_exactly_a_hanging_one_ends_in_an_error_and_other_processes_go_on(
    undisturbed, tmp_path, start
):
    reference = undisturbed["ddp"]
    config = disturbed(reference, tmp_path, train__timeout=10.0)
    job, (rng, moments) = start(config, "--max-restarts=2"), random_moments(0, 2)
    for n, moment in enumerate(moments):
        kill(job, n, moment, rng)
    wait_for_moment(job, 2, "step", rng)
    hanging = job.workers()[rng.randrange(2)]
    os.kill(hanging, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(
        lambda: (
            "another process did not answer within 10 seconds (train.timeout): it hangs" in job.said
        )
    )
    assert time.monotonic() - stopped < 10 + 10, "the other process noticed too late"
    os.kill(hanging, signal.SIGKILL)  # torchrun would do so after half a minute
    assert job.wait() != 0
    assert len(job.starts()) == 3 and 'train.py", line' not in job.said, (
        "a user needs no traceback for that"
    )
    assert 0 < assert_same_state(config, reference) < 40

    one, four = (
        change(config, out=str(tmp_path / name), train__timeout=60.0) for name in ("one", "four")
    )
    for other in (one, four):
        shutil.copytree(config.run_folder, other.run_folder)
    train.train(one, ALONE)
    four = change(four, train__micro_batch_size=2)
    torchrun(4, "train.py", write_config(four))
    for other in (one, four):
        assert_same_losses(other, reference, 1e-5)


def test_under_fsdp_killed_ranks_come_back_exactly_and_a_signal_to_one_saves_in_time(
    undisturbed, tmp_path, start
):
    reference = undisturbed["fsdp"]
    config = disturbed(reference, tmp_path)
    job, (rng, moments) = start(config, "--max-restarts=2"), random_moments(1, 2)
    for n, moment in enumerate(moments):
        kill(job, n, moment, rng)
    wait_for_moment(job, 2, "step", rng)
    os.kill(job.workers()[1], signal.SIGTERM)
    assert job.wait() == 0, job.said
    step = assert_same_state(config, reference)
    assert (
        f"stopped at step {step} and saved" in job.said
        and "error (rank" not in job.said.split("resumed")[-1]
    )


def test_two_nodes_train_as_one_process_does_and_one_goes_on_when_the_other_is_lost(
    undisturbed, tmp_path, start
):
    config = disturbed(undisturbed["ddp"], tmp_path, train__timeout=60.0)
    alone = change(config, name="alone")
    train.train(alone, ALONE)
    launcher = two_nodes(
        "1:2", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    first = start(config, "--max-restarts=3", launcher=launcher)
    wait_for(
        lambda: is_open(launcher.port), first.process
    )  # what holds the store of the rendezvous must stay
    second = start(config, "--max-restarts=3", launcher=launcher)
    wait_for(lambda: first.starts() or second.starts(), first.process)
    assert {
        env["WORLD_SIZE"]
        for env in (first.processes() | second.processes()).values()
        if "RANK" in env
    } == {"2"}
    wait_for_moment(first if first.starts() else second, 0, "evaluation", random.Random(2))
    second.end()
    assert last_step(config) < 40
    assert first.wait() == 0, first.said
    assert 4 <= first.starts()[-1] < 40 and "finished 40 steps" in first.said
    assert_same_losses(config, alone, 1e-5)


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 900ms for recv",
            "did not answer within 9 seconds",
        ),
        ("wait timeout after 900ms, keys: /offer", "did not answer within 9 seconds"),
        (
            "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer",
            "was cut",
        ),
        ("Connection closed by peer [127.0.0.1]:1", "was cut"),
    ],
)
def test_what_a_lost_process_leads_to_is_said_in_words(text, said):
    with pytest.raises(
        ConnectionError, match=f"another process.*{said}.*; see the messages of the others"
    ):
        with processes("cpu", 9.0, group=True):
            raise RuntimeError(text)


@pytest.mark.parametrize(
    "text", ["mat1 and mat2 shapes cannot be multiplied", "CUDA error: the launch timed out"]
)
def test_any_other_error_between_processes_keeps_its_traceback(text):
    with pytest.raises(RuntimeError, match=text):
        with processes("cpu", 9.0, group=True):
            raise RuntimeError(text)
