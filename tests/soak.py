"""make soak: jobs of several processes are disturbed for some minutes, and what became of them is written down.

    PYTHONPATH=. python tests/soak.py [--kills 10] [--seed 0] [--out results/soak.md]

The long form of test_elastic.py, with the same tiny model. A run that does not end as the undisturbed one is written
down, too, and makes the exit status 1.
"""

import os
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
from runtime.reports import versions

STEPS = 150
EXACT, CLOSE = "weights and losses bit for bit", "losses within 1e-5"


@dataclass
class Arguments:
    kills: int = 10
    """Under ddp and under fsdp each."""
    seed: int = 0
    """Of the moments."""
    out: Path = Path("results/soak.md")


class Soak:
    """The undisturbed runs, and what has been seen so far."""

    def __init__(self, folder, arguments):
        self.folder, self.arguments, self.rows, self.kills, self.jobs = (
            folder,
            arguments,
            [],
            [],
            [],
        )
        data = make_data(folder)
        ddp = tiny_config(data, folder / "undisturbed", "ddp", steps=STEPS, model__dropout=0.0)
        self.undisturbed = {
            "ddp": ddp,
            "fsdp": change(ddp, name="fsdp", train__parallel="fsdp", model__dropout=0.1),
        }
        for config in self.undisturbed.values():
            torchrun(2, "train.py", write_config(config))
        self.alone = change(ddp, name="alone")
        train.train(self.alone, ALONE)

    def config(self, parallel, name, timeout=60.0):
        return change(
            self.undisturbed[parallel], out=str(self.folder / name), train__timeout=timeout
        )

    def start(self, *arguments, **keywords):
        self.jobs.append(Job(*arguments, **keywords))
        return self.jobs[-1]

    def write(self, case, config, end, backs, redone, kept, compare):
        """A row: `end` is what was expected, `backs` seconds to come back, `kept` what `compare` shows to be so."""
        try:
            assert end, f"it did not end as it should: {self.jobs[-1].said[-2000:]}"
            compare()
            left = [pid for job in self.jobs for pid in job.processes()]
            result = f"{kept}" if not left else f"NO: {len(left)} processes are left"
        except AssertionError as error:
            result = "NO: " + " ".join(str(error).split())[:200]
            print(error)
        seconds = (
            f"{min(backs):.1f} to {max(backs):.1f}"
            if len(backs) > 1
            else f"{backs[0]:.1f}"
            if backs
            else ""
        )
        self.rows.append((case, config.train.parallel, len(backs), seconds, redone, result))
        print(" | ".join(map(str, self.rows[-1])), flush=True)


def killed(soak, parallel):
    """Ranks are killed again and again; torchrun starts all again."""
    count, config = soak.arguments.kills, soak.config(parallel, "killed")
    job, (rng, moments) = (
        soak.start(config, f"--max-restarts={count}"),
        random_moments(soak.arguments.seed, count),
    )
    seen = [kill(job, n, moment, rng) for n, moment in enumerate(moments)]
    soak.kills += [(parallel, entry) for entry in seen]
    end = job.wait(600) == 0 and len(job.starts()) == count + 1
    backs, redone = (
        [entry["seconds"] for entry in seen],
        sum(entry["reached"] - entry["again"] for entry in seen),
    )
    case = f"{count} times SIGKILL to a random one of 2 processes"
    soak.write(
        case,
        config,
        end,
        backs,
        redone,
        EXACT,
        lambda: assert_same_state(config, soak.undisturbed[parallel]),
    )


def hung(soak, parallel, moment):
    """A process stops (SIGSTOP); the other one ends in an error, torchrun kills the first and starts both again."""
    config = soak.config(parallel, "hung", timeout=15.0)
    job, (rng, _) = soak.start(config, "--max-restarts=1"), random_moments(soak.arguments.seed, 1)
    wait_for_moment(job, 0, moment, rng)
    os.kill(job.workers()[rng.randrange(2)], signal.SIGSTOP)
    stopped, reached = time.monotonic(), last_step(config)
    wait_for(lambda: "did not answer within 15 seconds" in job.said, job.process)
    noticed = time.monotonic() - stopped
    wait_for(lambda: len(job.starts()) == 2, job.process)
    back, redone = time.monotonic() - stopped, reached - job.starts()[1]
    case = f"SIGSTOP to one of 2 processes in a {moment}, train.timeout 15 s; noticed after {noticed:.1f} s"
    end = job.wait() == 0
    soak.write(
        case,
        config,
        end,
        [back],
        redone,
        EXACT,
        lambda: assert_same_state(config, soak.undisturbed[parallel]),
    )


def stopped(soak, parallel):
    """SIGTERM to one rank, then to torchrun; the same command goes on each time."""
    config, (rng, _), backs = (
        soak.config(parallel, "stopped"),
        random_moments(soak.arguments.seed, 1),
        [],
    )
    end, job = True, soak.start(config)
    for receiver in ("rank", "torchrun"):
        wait_for_moment(job, 0, "step", rng)
        begun = time.monotonic()
        os.kill(job.workers()[1] if receiver == "rank" else job.process.pid, signal.SIGTERM)
        status = job.wait()
        end &= f"stopped at step {last_step(config)} and saved" in job.said and (
            receiver == "torchrun" or status == 0
        )
        job = soak.start(config)
        wait_for(lambda: job.starts(), job.process)  # noqa: B023
        backs.append(time.monotonic() - begun)
        end &= job.starts() == [last_step(config)]
    end &= job.wait() == 0
    case = "SIGTERM to one of 2 processes, then to torchrun; the same command again"
    soak.write(
        case,
        config,
        end,
        backs,
        0,
        EXACT,
        lambda: assert_same_state(config, soak.undisturbed[parallel]),
    )


def other_numbers(soak):
    """torchrun alone is killed: its processes end, too. Then 1, 4 and 2 processes."""
    config, (rng, _), backs = (
        soak.config("ddp", "numbers"),
        random_moments(soak.arguments.seed, 1),
        [],
    )
    redone, end, job = 0, True, soak.start(config)
    for processes in (1, 4, 2):
        wait_for_moment(job, 0, "step", rng)
        begun, reached = time.monotonic(), last_step(config)
        os.kill(job.process.pid, signal.SIGKILL)
        end &= job.wait() == -signal.SIGKILL
        ended = last_step(config)
        config = change(config, train__micro_batch_size=2)
        job = soak.start(config, launcher=("--standalone", f"--nproc_per_node={processes}"))
        wait_for(lambda: job.starts(), job.process)  # noqa: B023
        backs.append(time.monotonic() - begun)
        redone += max(reached, ended) - job.starts()[0]
    end &= job.wait() == 0
    case = "SIGKILL to torchrun of 2 processes, which end with it; again with 1, then 4, then 2 processes"
    soak.write(
        case,
        config,
        end,
        backs,
        redone,
        CLOSE,
        lambda: assert_same_losses(config, soak.alone, 1e-5),
    )


def nodes(soak, parallel, settings):
    """Two nodes; one is lost, the other goes on alone. settings: of the rendezvous."""
    config, (rng, _) = soak.config(parallel, "nodes"), random_moments(soak.arguments.seed, 1)
    config = change(config, model__dropout=0.0)  # its masks would depend on the number of processes
    launcher = two_nodes("1:2", settings)
    first = soak.start(config, "--max-restarts=3", launcher=launcher)
    wait_for(lambda: is_open(launcher.port), first.process)
    second = soak.start(config, "--max-restarts=3", launcher=launcher)
    wait_for(lambda: first.starts() or second.starts(), first.process)
    wait_for_moment(first if first.starts() else second, 0, "step", rng)
    before, lost, reached = len(first.starts()), time.monotonic(), last_step(config)
    second.end()
    wait_for(lambda: len(first.starts()) > before, first.process)
    backs, redone = [time.monotonic() - lost], reached - first.starts()[-1]
    end = first.wait() == 0
    case = f"one of two nodes is lost for good (SIGKILL to its torchrun and worker), {settings}"
    soak.write(
        case,
        config,
        end,
        backs,
        redone,
        CLOSE,
        lambda: assert_same_losses(config, soak.alone, 1e-5),
    )


def both_nodes(soak):
    """A fixed number of nodes: two."""
    config, launcher = soak.config("ddp", "both"), two_nodes("2")
    jobs = [soak.start(config, launcher=launcher) for _ in range(2)]
    end = [job.wait() for job in jobs] == [0, 0]
    case = "two nodes of one process each, undisturbed"
    soak.write(
        case, config, end, [], 0, CLOSE, lambda: assert_same_losses(config, soak.alone, 1e-5)
    )


def report(soak, minutes):
    a = soak.arguments
    command = f"PYTHONPATH=. python tests/soak.py --kills {a.kills} --seed {a.seed}     # make soak"
    lines = [
        "# Jobs that lose processes, and what becomes of them",
        "",
        f"    {command}",
        "",
        f"{minutes:.0f} minutes on {os.cpu_count()} CPU cores, torch {versions()['torch']}, gloo: a tiny model,",
        f"{STEPS} steps, a checkpoint every 4 steps, an evaluation every 5. Two nodes are two torchruns on 127.0.0.1.",
        "Seconds: from the disturbance until the run goes on, all imports included. Steps are redone from the last",
        "checkpoint. The last column compares with the undisturbed run: of two processes where it says bit for bit,",
        "else of one; it also means that no process was left behind.",
        "",
        "| what happens | parallel | disturbances | seconds to come back | steps redone | the end is that of the "
        "undisturbed run |",
        "|---|---|--:|--:|--:|---|",
        *("| " + " | ".join(map(str, row)) + " |" for row in soak.rows),
        "",
        "Every SIGKILL of the first rows. *evaluation*: soon after the line of a step that is evaluated; *checkpoint*: "
        "once the unfinished file or folder of one exists; *step*: up to 30 ms after the line of a random step.",
        "",
        "| parallel | moment | rank | started from step | reached step | came back at step | after seconds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for parallel, k in soak.kills:
        cells = (
            parallel,
            k["moment"],
            k["rank"],
            k["from"],
            k["reached"],
            k["again"],
            f"{k['seconds']:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    a.out.write_text("\n".join(lines) + "\n")
    print(f"wrote {a.out}")


def main():
    arguments, begun = tyro.cli(Arguments, description=__doc__), time.monotonic()
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
            both_nodes(soak)
            nodes(soak, "ddp", "last_call_timeout=30,keep_alive_interval=5")  # torchrun's defaults
            nodes(soak, "fsdp", "last_call_timeout=5,keep_alive_interval=1")
        finally:
            for job in soak.jobs:
                job.end()
            report(soak, (time.monotonic() - begun) / 60)
    return int(any(row[-1].startswith("NO") for row in soak.rows))


if __name__ == "__main__":
    sys.exit(main())
