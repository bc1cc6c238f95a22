"""Arms: ways to train that are compared, each a configuration with a few keys changed.

    [base]                       # a configuration, as train.py takes it
    [arms.fast]
    from = "slow"                # an arm above it, whose changes it has, too
    why = "the rate falls along a line"
    tune = { "optim.lr" = [1e-3, 2e-3, 4e-3] }
    "optim.schedule" = "linear"

A run is an arm with a seed and a value for every key under `tune`. It is trained to its end where
it is not there yet, in a process of its own with one thread; the same command goes on with one that
was cut off. The file beside its folder, OUT/NAME.toml, is its whole configuration: `python train.py
OUT/NAME.toml` trains it by hand.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from runtime.errors import UserError
from runtime.files import write_text
from runtime.reports import commit
from runtime.validation import FileError, from_values, read_bounded, schema
from training import config as configuration
from training.config import Config
from training.metrics import read_metrics
from training.validation import best_by

ROOT = Path(__file__).resolve().parent.parent.parent
# glibc gives large tensors back to the system as soon as they are freed, and the system clears the
# memory of the next: nearly half of the time of a step with a vocabulary of 50,000.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    changes: dict
    """Dotted keys of the configuration, and what is not as in its base."""
    tune: dict
    """Dotted keys, and the values that are tried."""
    why: str


# Besides dotted keys of a configuration.
ArmTable = schema(
    TypedDict("ArmTable", {"from": str, "why": str, "tune": dict[str, list]}, total=False)
)


def read_arms(tables: dict[str, dict], source: str) -> dict[str, Arm]:
    """Arms from the tables of a TOML file, which `source` names in errors."""
    tables = from_values(tables, dict[str, ArmTable], source)
    arms: dict[str, Arm] = {}
    for name, table in tables.items():
        table = dict(table)
        above = table.pop("from", None)
        if above is not None and above not in arms:
            raise FileError(f"{source}: {name} is from {above!r}, which is no arm above it")
        inherited = arms[above] if above else Arm("", {}, {}, "")
        why, tune = table.pop("why", ""), table.pop("tune", inherited.tune)
        tune = {key: values for key, values in tune.items() if key not in table}
        changes = inherited.changes | table
        changes = {key: value for key, value in changes.items() if key not in tune}
        arms[name] = Arm(name, changes, tune, why)
    return arms


def config_of(base: dict, arm: Arm, seed: int, tuned: dict, out: Path) -> Config:
    """The configuration of one run; its folder is OUT/NAME."""
    values = copy.deepcopy(base)
    words = [f"{key.rpartition('.')[2]}{value:g}" for key, value in tuned.items()]
    name = "_".join([arm.name, *words, f"s{seed}"])
    changes = arm.changes | tuned | {"name": name, "seed": seed, "out": str(out)}
    for key, value in changes.items():
        table = values
        *path, last = key.split(".")
        for part in path:
            table = table.setdefault(part, {})  # an unknown key is refused below, by its name
        table[last] = value
    return configuration.from_dict(values, f"arm {arm.name}")


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run came to."""

    config: Config
    commit: str
    """Of the code that trained it; several where it was resumed."""
    lines: list[dict] | None
    """Its metrics.jsonl. None: its loss became infinite, and it did not end."""

    @property
    def validations(self) -> list[dict]:
        """The lines of evaluations."""
        return [line for line in self.lines or () if own_loss(self.config) in line]

    @property
    def loss(self) -> float | None:
        """Its last validation loss, under the orders that it learns; None if it did not end."""
        return self.validations[-1][own_loss(self.config)] if self.lines else None


def own_loss(config: Config) -> str:
    """The key of metrics.jsonl that a run is judged by: under the orders that it learns."""
    return f"val_loss_{best_by(config)}"


def run_of(config: Config, processes: int = 1) -> Run:
    """The run of a configuration, which is trained to its end first where it is not there. A rate
    that is too high for it to end is a result, too. Raises ValueError if it fails otherwise."""
    if not has_ended(config):
        failure = train_to_the_end(config, processes)
        if "not finite" in failure:
            return Run(config, commit(), None)
        if failure or not has_ended(config):
            stopped = "stopped before its last step; give the same command again"
            raise UserError(f"{config.run_folder} {failure[-500:] or stopped}")
    noted = config.run_folder / "commit"
    trained_by = text_of(noted) or "unknown"
    return Run(config, trained_by, read_metrics(config.run_folder / "metrics.jsonl"))


def commits_of(results: Iterable[dict]) -> str:
    """All commits that results of runs are of, each once; a run that was resumed has several."""
    return ", ".join(sorted({c for result in results for c in result["commit"].split(", ")}))


def text_of(path: Path) -> str:
    """What stands in a small file; nothing where there is none."""
    return read_bounded(path).decode(errors="replace") if path.exists() else ""


def has_ended(config: Config) -> bool:
    """Whether a run of this configuration has been trained to its end. Raises ValueError where the
    folder holds a run of another configuration: an arm was changed since."""
    file = config.run_folder / "config.toml"
    if not file.exists():
        return False
    if changed := configuration.differences(configuration.load_toml(file), config):
        raise UserError(
            f"{config.run_folder} holds a run with another {', '.join(changed)}: the arm has been "
            "changed since; remove the folder, or give the arm another name"
        )
    lines = read_metrics(file.with_name("metrics.jsonl"))
    return any(line["step"] == config.train.steps and own_loss(config) in line for line in lines)


def write_config(config: Config) -> Path:
    """The file that a run is trained from, beside its folder."""
    file = config.run_folder.with_name(f"{config.name}.toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, configuration.to_toml(config))
    return file


def train_to_the_end(config: Config, processes: int) -> str:
    """Train a run, in processes of one thread. Returns what it ended with, if not well."""
    file = write_config(config)
    started = config.run_folder.with_name(f"{config.name}.commit")
    known = text_of(started).split(", ") if started.exists() else []
    write_text(started, ", ".join(dict.fromkeys([*known, commit()])))  # a run can be resumed
    done = run_alone("train.py", str(file), processes=processes)
    if done.returncode == 0:  # at its end, or stopped by a signal
        if has_ended(config):
            started.replace(config.run_folder / "commit")
        return ""
    return done.stderr.strip() or f"ended with status {done.returncode}"


def run_alone(script: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
    """Run a script of this project to its end, in processes of one thread."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), ROOT / script, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | KEEP_MEMORY,
        capture_output=True,
        text=True,
    )


@contextlib.contextmanager
def side_by_side(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of so many threads, which after an interrupt or an error begins nothing new."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:  # where all went well, all has been waited for
        pool.shutdown(cancel_futures=True)


def crossing(validations: list[dict], key: str, goal: float) -> float | None:
    """Tokens at which a loss first passes the goal, on the straight line between two evaluations;
    None if it never does."""
    before = None
    for line in validations:
        if line[key] <= goal:
            if before is None:
                return line["tokens"]
            share = (before[key] - goal) / (before[key] - line[key])
            return before["tokens"] + share * (line["tokens"] - before["tokens"])
        before = line
    return None
