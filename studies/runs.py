"""A run config is a base configuration with a few keys changed; a run trains one, with one seed.

    [base]                                  # a configuration, as train.py takes it
    [run_configs.fast]
    from = "slow"                           # optional: a run config above, whose changes it inherits
    description = "the rate decays linearly"
    tune = { "optim.lr" = [1e-3, 2e-3, 4e-3] }
    "optim.schedule" = "linear"

Each run is trained in a process of its own with one thread, and resumed if it was interrupted.
`python train.py OUT/NAME.toml` trains the same run by hand.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from runtime.errors import UserError
from runtime.files import write_text
from runtime.reports import commit
from runtime.validation import FileError, from_values, schema
from training import config as configuration
from training.config import Config
from training.metrics import read_metrics
from training.validation import best_by

ROOT = Path(__file__).resolve().parents[1]
# By default glibc returns large tensors to the system as soon as they are freed, and the system
# clears the pages of the next one: nearly half of a step's time with a vocabulary of 50,000.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}

Values = dict[str, float]
"""A dotted key of the configuration and its value, or nothing where no key is tuned."""


@dataclass(frozen=True)
class RunConfig:
    name: str
    changes: dict
    """Dotted keys of the configuration whose values differ from the base."""
    tune: dict[str, list]
    """A dotted key and the values to try; at most one key."""
    description: str = ""

    @property
    def choices(self) -> list[Values]:
        """What can be tried, in the order of the values under `tune`."""
        if len(self.tune) > 1:
            raise UserError(f"{self.name} tunes {', '.join(self.tune)}: choose one of them")
        return [{key: v} for key, values in self.tune.items() for v in values] or [{}]

    @property
    def untuned(self) -> Values:
        """The middle choice."""
        return self.choices[len(self.choices) // 2]


# Other keys of the table are dotted keys of a configuration.
RunConfigTable = schema(
    TypedDict(
        "RunConfigTable", {"from": str, "description": str, "tune": dict[str, list]}, total=False
    )
)


def read_run_configs(tables: dict[str, dict], source: str) -> dict[str, RunConfig]:
    """Run configs from the tables of a TOML file, which `source` names in errors."""
    found: dict[str, RunConfig] = {}
    for name, table in from_values(tables, dict[str, RunConfigTable], source).items():
        changes = dict(table)
        parent = changes.pop("from", None)
        if parent is not None and parent not in found:
            raise FileError(f"{source}: {name} is from {parent!r}, which is no run config above it")
        inherited = found[parent] if parent else RunConfig("", {}, {})
        description = changes.pop("description", "")
        tune = changes.pop("tune", inherited.tune)
        tune = {key: values for key, values in tune.items() if key not in changes}
        changes = inherited.changes | changes
        changes = {key: value for key, value in changes.items() if key not in tune}
        found[name] = RunConfig(name, changes, tune, description)
    return found


def config_of(base: dict, run_config: RunConfig, seed: int, tuned: Values, out: Path) -> Config:
    """The configuration of one run; its folder is OUT/NAME."""
    values = copy.deepcopy(base)
    words = [f"{key.rpartition('.')[2]}{value:g}" for key, value in tuned.items()]
    name = "_".join([run_config.name, *words, f"s{seed}"])
    changes = run_config.changes | tuned | {"name": name, "seed": seed, "out": str(out)}
    for key, value in changes.items():
        table = values
        *path, last = key.split(".")
        for part in path:
            table = table.setdefault(part, {})  # an unknown key is refused below, by its name
        table[last] = value
    return configuration.from_dict(values, f"run config {run_config.name}")


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    config: Config
    commit: str
    """Of the code that trained it; several if it was resumed by another."""
    lines: list[dict] | None
    """Its metrics.jsonl. None: its loss became infinite before the last step."""

    @property
    def validations(self) -> list[dict]:
        return [line for line in self.lines or () if main_loss(self.config) in line]

    @property
    def loss(self) -> float | None:
        """The last validation loss under the training orders; None if the run diverged."""
        return self.validations[-1][main_loss(self.config)] if self.lines else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the logged steps; the first line, which contains the start, does not count."""
        speeds = [line["tokens_per_second"] for line in self.lines or () if "loss" in line]
        return statistics.median(speeds[1:] or speeds) if speeds else None


def main_loss(config: Config) -> str:
    """The key of metrics.jsonl that a run is judged by: the loss under its training orders."""
    return f"val_loss_{best_by(config)}"


def run_of(config: Config, processes: int = 1) -> Run:
    """The finished run of a configuration, trained first if necessary. A run that diverges is a
    result, too. Raises UserError if training fails otherwise, or was stopped."""
    commits = config.run_folder.with_name(f"{config.name}.commit")
    if not has_ended(config):
        known = commits.read_text().split(", ") if commits.exists() else []
        file = write_config(config)
        write_text(commits, ", ".join(dict.fromkeys([*known, commit()])))
        done = run_alone("train.py", str(file), processes=processes)
        if done.returncode and "not finite" in done.stderr:
            return Run(config, commit(), None)
        if done.returncode:
            status = f"ended with status {done.returncode}"
            raise UserError(f"{config.run_folder}: {done.stderr.strip()[-500:] or status}")
        if not has_ended(config):  # a signal stopped it
            raise UserError(f"{config.run_folder} stopped before its last step; run it again")
    trained_by = commits.read_text() if commits.exists() else "unknown"
    return Run(config, trained_by, read_metrics(config.run_folder / "metrics.jsonl"))


def commits_of(rows: Iterable[dict]) -> str:
    """All commits of some results, each once; a run that was resumed has several."""
    return ", ".join(sorted({c for row in rows for c in row["commit"].split(", ")}))


def has_ended(config: Config) -> bool:
    """Whether this run has been trained to its end. Raises UserError if the folder holds a run of
    another configuration."""
    file = config.run_folder / "config.toml"
    if not file.exists():
        return False
    if changed := configuration.differences(configuration.load_toml(file), config):
        raise UserError(
            f"{config.run_folder} holds a run with another {', '.join(changed)}: the run config has "
            "been changed since; remove the folder, or give the run config another name"
        )
    lines = read_metrics(file.with_name("metrics.jsonl"))
    return any(line["step"] == config.train.steps and main_loss(config) in line for line in lines)


def write_config(config: Config) -> Path:
    """Write the file that a run is trained from, beside its folder."""
    file = config.run_folder.with_name(f"{config.name}.toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, configuration.to_toml(config))
    return file


def run_alone(script: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
    """Run a script (FILE.py) or module (studies.bench) to its end, in processes of one thread."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    target = [ROOT / script] if script.endswith(".py") else ["-m", script]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *target, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | KEEP_MEMORY,
        capture_output=True,
        text=True,
    )
