"""make soak: jobs of several processes are disturbed for some minutes, and what became
of them is written down.

    PYTHONPATH=tests python -m studies.soak --kills 10 --seed 0

The long form of tests/test_elastic.py. A run that does not end as
the undisturbed one is written down, too, and makes the exit status 1."""

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from helpers import (
    ALONE,
    assert_same_losses,
    change,
    make_data,
    tiny_config,
    torchrun,
    wait_for,
    write_config,
)

import train
from aogpt.runtime.outputs import markdown_table, versions

from .jobs import (
    Job,
    assert_same_state,
    is_open,
    kill,
    last_step,
    random_moments,
    two_nodes,
    wait_for_moment,
)

STEPS = 150


@dataclass
class Arguments:
    kills: int = 10
    """Under ddp and under fsdp each."""
    seed: int = 0
    """Seed of the moments."""
    out: Path = Path("results/soak.details.md")


class Soak:
    """The undisturbed runs, and what has been seen so far."""

    def __init__(self, folder, arguments):
        self.folder = folder
        self.arguments = arguments
        self.rows = []
        self.jobs = []
        ddp = tiny_config(make_data(folder), folder / "undisturbed", "ddp", steps=STEPS)
        fsdp = change(ddp, name="fsdp", train__parallel="fsdp")
        ddp = change(ddp, model__dropout=0.0)  # masks depend on the number of processes
        self.undisturbed = {"ddp": ddp, "fsdp": fsdp}
        self.alone = change(ddp, name="alone")
        for config in (ddp, fsdp):
            torchrun(2, "train.py", write_config(config))
        train.train(self.alone, ALONE)

    def config(self, parallel, name, timeout=60.0):
        out = str(self.folder / name)
        return change(self.undisturbed[parallel], out=out, train__timeout=timeout)

    def random(self):
        return random.Random(self.arguments.seed)

    def start(self, *arguments, **keywords):
        self.jobs.append(Job(*arguments, **keywords))
        return self.jobs[-1]

    def write(self, case, config, ended, backs, redone, exact=True):
        """Add a row. ended: whether the job ended as it should. backs: seconds until it
        came back from each disturbance. redone: steps. exact: the end is that of the
        undisturbed run of two processes, bit for bit; else its losses are close to
        those of one process."""
        try:
            assert ended, f"it did not end as it should: {self.jobs[-1].said[-2000:]}"
            if exact:
                assert_same_state(config, self.undisturbed[config.train.parallel])
            else:
                assert_same_losses(config, self.alone, 1e-5)
            left = [pid for job in self.jobs for pid in job.processes()]
            assert not left, f"{len(left)} processes are left"
            result = "weights and losses bit for bit" if exact else "losses within 1e-5"
        except AssertionError as error:
            result = "NO: " + " ".join(str(error).split())[:200]
            print(error)
        seconds = (
            " to ".join(f"{s:.1f}" for s in sorted({min(backs), max(backs)}))
            if backs
            else ""
        )
        row = (case, config.train.parallel, len(backs), seconds, redone, result)
        self.rows.append([str(cell) for cell in row])
        print(" | ".join(self.rows[-1]), flush=True)


def killed(soak, parallel):
    """Kill ranks again and again; torchrun starts all again each time."""
    count = soak.arguments.kills
    config = soak.config(parallel, "killed")
    job = soak.start(config, f"--max-restarts={count}")
    rng, moments = random_moments(soak.arguments.seed, count)
    seen = [kill(job, n, moment, rng) for n, moment in enumerate(moments)]
    ended = job.wait() == 0 and len(job.starts()) == count + 1
    backs, redone = zip(*seen, strict=True)
    case = f"{count} times SIGKILL to a random one of 2 processes"
    soak.write(case, config, ended, backs, sum(redone))


def hung(soak, parallel, moment):
    """Stop a process (SIGSTOP): the other one ends in an error, torchrun kills the
    first and starts both again."""
    config = soak.config(parallel, "hung", timeout=15.0)
    rng = soak.random()
    job = soak.start(config, "--max-restarts=1")
    wait_for_moment(job, 0, moment, rng)
    os.kill(job.workers()[rng.randrange(2)], signal.SIGSTOP)
    stopped = time.monotonic()
    reached = last_step(config)
    wait_for(lambda: "did not answer within 15 seconds" in job.said, job.process)
    noticed = time.monotonic() - stopped
    wait_for(lambda: len(job.starts()) == 2, job.process)
    back = time.monotonic() - stopped
    redone = reached - job.starts()[1]
    case = (
        f"SIGSTOP to one of 2 processes in a {moment}, train.timeout 15 s; "
        f"noticed after {noticed:.1f} s"
    )
    soak.write(case, config, job.wait() == 0, [back], redone)


def stopped(soak, parallel):
    """SIGTERM a rank, then torchrun; the same command goes on each time."""
    config = soak.config(parallel, "stopped")
    rng = soak.random()
    backs = []
    ended = True
    job = soak.start(config)
    for receiver in ("rank", "torchrun"):
        wait_for_moment(job, 0, "step", rng)
        begun = time.monotonic()
        os.kill(
            job.workers()[1] if receiver == "rank" else job.process.pid, signal.SIGTERM
        )
        status = job.wait()
        ended &= f"stopped at step {last_step(config)} and saved" in job.said
        ended &= receiver == "torchrun" or status == 0
        job = soak.start(config)
        wait_for(job.starts, job.process)
        backs.append(time.monotonic() - begun)
        ended &= job.starts() == [last_step(config)]
    ended &= job.wait() == 0
    case = "SIGTERM to one of 2 processes, then to torchrun; the same command again"
    soak.write(case, config, ended, backs, 0)


def other_numbers(soak):
    """Kill torchrun alone: its processes end, too. Go on with 1, 4 and 2 processes."""
    config = soak.config("ddp", "numbers")
    rng = soak.random()
    backs = []
    ended = True
    redone = 0
    job = soak.start(config)
    for processes in (1, 4, 2):
        wait_for_moment(job, 0, "step", rng)
        begun = time.monotonic()
        reached = last_step(config)
        os.kill(job.process.pid, signal.SIGKILL)
        ended &= job.wait() == -signal.SIGKILL
        reached = max(reached, last_step(config))
        config = change(config, train__micro_batch_size=2)
        job = soak.start(
            config, launcher=("--standalone", f"--nproc_per_node={processes}")
        )
        wait_for(job.starts, job.process)
        backs.append(time.monotonic() - begun)
        redone += reached - job.starts()[0]
    ended &= job.wait() == 0
    case = (
        "SIGKILL to torchrun of 2 processes, which end with it; "
        "again with 1, then 4, then 2 processes"
    )
    soak.write(case, config, ended, backs, redone, exact=False)


def nodes(soak, parallel, number, settings):
    """Two nodes. number "2": a worker of one is killed, and both start theirs again,
    with different counts of restarts. "1:2": a node is lost, and the other goes on
    alone. settings: of the rendezvous."""
    config = change(soak.config(parallel, f"nodes {number}"), model__dropout=0.0)
    launcher, port = two_nodes(number, settings)
    first = soak.start(config, "--max-restarts=3", launcher=launcher)
    wait_for(lambda: is_open(port), first.process)
    second = soak.start(config, "--max-restarts=3", launcher=launcher)
    wait_for(lambda: first.starts() or second.starts(), first.process)
    wait_for_moment(first if first.starts() else second, 0, "step", soak.random())
    before = (first.starts(), second.starts())
    lost = time.monotonic()
    reached = last_step(config)
    if number == "2":
        os.kill(*second.workers().values(), signal.SIGKILL)
        case = "SIGKILL to the worker of one of two nodes"
    else:
        second.end()
        case = (
            "one of two nodes is lost for good (SIGKILL to its torchrun and worker), "
            + settings
        )
    wait_for(lambda: (first.starts(), second.starts()) != before, first.process)
    back = time.monotonic() - lost
    again = first.starts() if first.starts() != before[0] else second.starts()
    ended = first.wait() == 0 and (number == "1:2" or second.wait() == 0)
    soak.write(case, config, ended, [back], reached - again[-1], exact=False)


REPORT = """# Jobs that lose processes, and what becomes of them

    PYTHONPATH=tests python -m studies.soak --kills {kills} --seed {seed}  # make soak

{minutes:.0f} minutes on {cores} CPU cores, torch {torch}, gloo: a tiny model,
{steps} steps, a checkpoint every 4 steps, an evaluation every 5. Two nodes are two
torchruns on 127.0.0.1. Seconds: from the disturbance until the run goes on, all imports
included. Steps are redone from the last checkpoint. The last column compares with the
undisturbed run: of two processes where it says bit for bit, else of one; it also means
that no process was left behind.

{cases}
"""


def report(soak, minutes):
    a = soak.arguments
    head = [
        "what happens",
        "parallel",
        "disturbances",
        "seconds to come back",
        "steps redone",
    ]
    cases = markdown_table(
        [*head, "the end is that of the undisturbed run"], soak.rows, left=2
    )
    text = REPORT.format(
        kills=a.kills,
        seed=a.seed,
        minutes=minutes,
        cores=os.cpu_count(),
        torch=versions()["torch"],
        steps=STEPS,
        cases="\n".join(cases),
    )
    a.out.write_text(text)
    print(f"wrote {a.out}")


def main():
    arguments = tyro.cli(Arguments, description=__doc__)
    begun = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments)
        try:
            for parallel in ("ddp", "fsdp"):
                killed(soak, parallel)
            hung(soak, "ddp", "step")
            hung(soak, "fsdp", "checkpoint")
            stopped(soak, "fsdp")
            other_numbers(soak)
            nodes(soak, "ddp", "2", "last_call_timeout=30")
            # torchrun's defaults, and shorter ones
            nodes(soak, "ddp", "1:2", "last_call_timeout=30,keep_alive_interval=5")
            nodes(soak, "fsdp", "1:2", "last_call_timeout=5,keep_alive_interval=1")
        finally:
            for job in soak.jobs:
                job.end()
            report(soak, (time.monotonic() - begun) / 60)
    return int(any(row[-1].startswith("NO") for row in soak.rows))


if __name__ == "__main__":
    sys.exit(main())
