"""Runs of train.py, each in a process of its own with one thread, resumed if
interrupted."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from aogpt.runtime.errors import UserError
from aogpt.runtime.files import read_lines, write_text
from aogpt.runtime.validation import from_json
from aogpt.training import config as configuration
from aogpt.training.config import Config
from aogpt.training.val_losses import best_by, read_metrics

ROOT = Path(__file__).resolve().parents[1]
# By default glibc returns large tensors to the system as soon as they are freed, and
# the system clears the pages of the next one: nearly half of a step's time with a
# vocabulary of 50,000.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def commit() -> str:
    """Return the commit of this code, with "-dirty" if files outside results/ have
    changed."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout

    changed = git("diff", "HEAD", "--name-only", "--", ".", ":!results")
    name = git("describe", "--always").strip() or "unknown"
    return f"{name}-dirty" if changed else name


def rows_by(key: str, file: Path) -> dict[str, dict]:
    """Return the rows of a JSONL file of results by their value of `key`; none where
    there is no file."""
    rows = {}
    if file.exists():
        for place, text in read_lines(file):
            row = from_json(text, dict, place)
            rows[row[key]] = row
    return rows


def main_loss(config: Config) -> str:
    """Return the key of metrics.jsonl that a run is judged by: the loss under its
    training orders."""
    return f"val_loss_{best_by(config)}"


def validations_of(config: Config, lines: list[dict] | None) -> list[dict]:
    return [line for line in lines or () if main_loss(config) in line]


def speed_of(lines: list[dict] | None) -> float | None:
    """Return tokens per second, median of the logged steps; the first line contains the
    start."""
    speeds = []
    for line in lines or ():
        if "loss" in line:
            speeds.append(line["tokens_per_second"])
    if not speeds:
        return None
    return statistics.median(speeds[1:] or speeds)


def finished_run(config: Config, processes: int = 1) -> list[dict] | None:
    """Return the metrics of a run, which is trained to its end first if necessary; None
    if it diverged, which is a result, too. Raises UserError if training fails
    otherwise, or was stopped."""
    if not has_ended(config):
        # `python train.py FILE` trains the same run by hand.
        file = beside(config, ".toml")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, configuration.to_toml(config))
        write_text(beside(config, ".commit"), commit())
        process = run_alone("train.py", str(file), processes=processes)
        if process.returncode and "not finite" in process.stderr:
            return None
        if process.returncode:
            raise UserError(f"{config.run_folder}: {last_words(process)}")
        if not has_ended(config):  # a signal stopped it
            raise UserError(
                f"{config.run_folder} stopped before its last step; run it again"
            )
    return read_metrics(config.run_folder / "metrics.jsonl")


def has_ended(config: Config) -> bool:
    """Return whether this run has been trained to its end. Raises UserError if the
    folder holds a run of another configuration."""
    file = config.run_folder / "config.toml"
    if not file.exists():
        return False
    trained = configuration.load_toml(file)
    changed = configuration.differences(trained, config)
    if changed:
        raise UserError(
            f"{config.run_folder} holds a run with another {', '.join(changed)}: "
            "remove the folder, or give the run config another name"
        )
    lines = validations_of(config, read_metrics(file.with_name("metrics.jsonl")))
    return any(line["step"] == config.train.steps for line in lines)


def trained_by(config: Config) -> str:
    """Return the commit of the code that finished the training of a run."""
    file = beside(config, ".commit")
    return file.read_text() if file.exists() else "unknown"


def beside(config: Config, suffix: str) -> Path:
    return config.run_folder.with_name(config.name + suffix)


def report_of(*command: str) -> dict:
    """Run a script (FILE.py) or module with its arguments, and return what it writes
    with --json. Raises UserError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        run_well(*command, "--json", str(file))
        return json.loads(file.read_text())


def run_well(*command: str) -> None:
    """Run a script or module to its end. Raises UserError with its last words if it
    fails."""
    process = run_alone(*command)
    if process.returncode:
        raise UserError(f"{' '.join(command)}: {last_words(process)}")


def last_words(process: subprocess.CompletedProcess) -> str:
    """Return why a process failed: the end of its stderr, or its exit status."""
    return process.stderr.strip()[-500:] or f"it ended with status {process.returncode}"


def run_alone(
    script: str, *arguments: str, processes: int = 1
) -> subprocess.CompletedProcess:
    """Run a script or module to its end, in processes of one thread."""
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone"]
        words.append(f"--nproc_per_node={processes}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY}
    return subprocess.run(
        [*words, *target_of(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def target_of(script: str) -> list[str]:
    """Return the words after `python` that run a script (FILE.py) of this project or a
    module."""
    if script.endswith(".py"):
        return [str(ROOT / script)]
    return ["-m", script]
