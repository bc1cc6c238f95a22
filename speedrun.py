"""How few tokens does an any-order model need? Train arms of a track and print their lines.

    python speedrun.py bytes                        # the arms of a track, and what is known of them
    python speedrun.py bytes paper fast --jobs 2    # train them: resumed if cut off
    python speedrun.py bytes --markdown FILE        # the leaderboard

A track fixes data, block size, evaluation and a goal, an any-order validation loss. An arm is a
config with a few keys changed (configs/speedrun/TRACK.toml). Every arm is tuned in the same way:
seed 0 is trained with each value under its `tune`, the lowest any-order loss at the end decides,
and the other seeds are trained with that value. Results: results/speedrun/TRACK/ARM.json.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from evaluation.estimates import t_quantile
from runtime.command_line import run_script
from runtime.files import write_json, write_text
from runtime.ranges import Count
from runtime.reports import markdown_table, versions
from training import config as configuration
from training.config import Config
from training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent
TRACKS, RESULTS = ROOT / "configs" / "speedrun", ROOT / "results" / "speedrun"
OUT = Path("out") / "speedrun"
LOSS = "val_loss_random"  # of the averaged weights, nats per token


@dataclass(frozen=True, kw_only=True)
class Arguments:
    track: Annotated[str, tyro.conf.Positional]
    """A file of configs/speedrun, without its ending."""
    arms: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arms of the track to train; none: show what is known."""
    seeds: Count = 3
    jobs: Count = 1
    """Runs side by side, each with one thread where there are several."""
    markdown: Path | None = None
    """Write the table."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    changes: dict
    """Dotted keys of the configuration, and what is not as in the track."""
    tune: dict
    """Dotted keys, and the values that are tried."""
    why: str


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    track = load_track(arguments.track)
    for name in arguments.arms:
        if name not in track.arms:
            raise ValueError(
                f"there is no arm {name!r}; {arguments.track} has {', '.join(track.arms)}"
            )
    for name in arguments.arms:
        result = run_arm(track, track.arms[name], arguments)
        write_json(track.result(name), result)
        print(*markdown_table(HEAD, [row(track, name, result)]), sep="\n", flush=True)
    if not arguments.arms:
        print(*table(track), sep="\n")
    if arguments.markdown:
        write_text(arguments.markdown, "\n".join(table(track)) + "\n")


# ---- tracks and arms -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    name: str
    goal: float
    base: dict
    arms: dict[str, Arm]

    def result(self, arm: str) -> Path:
        return RESULTS / self.name / f"{arm}.json"

    def config(self, arm: Arm, seed: int, tuned: dict) -> Config:
        """The configuration of one run."""
        values = configuration.to_dict(configuration.from_dict(self.base, f"the track {self.name}"))
        words = [f"{key.rpartition('.')[2]}{value:g}" for key, value in tuned.items()]
        name = "_".join([arm.name, *words, f"s{seed}"])
        changes = arm.changes | tuned
        changes |= {"name": name, "seed": seed, "out": str(OUT / self.name)}
        for key, value in changes.items():
            table = values
            *path, last = key.split(".")
            for part in path:
                table = table[part]
            table[last] = value
        return configuration.from_dict(values, f"arm {arm.name}")


def load_track(name: str) -> Track:
    """Read configs/speedrun/NAME.toml: `goal`, the table `base`, which is a configuration, and for
    each arm a table of `from` (an arm whose changes it has, too), `why`, `tune` and dotted keys."""
    path = TRACKS / f"{name}.toml"
    if not path.is_file():
        tracks = ", ".join(sorted(p.stem for p in TRACKS.glob("*.toml")))
        raise ValueError(f"there is no track {name!r}; choose one of {tracks}")
    values = tomllib.loads(path.read_text())
    arms: dict[str, Arm] = {}
    for arm, table in values["arms"].items():
        inherited = arms[table.pop("from")] if "from" in table else Arm("", {}, {}, "")
        why, tune = table.pop("why", ""), table.pop("tune", inherited.tune)
        changes = inherited.changes | table
        changes = {key: value for key, value in changes.items() if key not in tune}
        arms[arm] = Arm(arm, changes, tune, why)
    return Track(name, values["goal"], values["base"], arms)


# ---- training ------------------------------------------------------------------------------------


def run_arm(track: Track, arm: Arm, a: Arguments) -> dict:
    """Tune an arm with seed 0, then train the other seeds; what every run came to."""
    grid = [
        dict(zip(arm.tune, values, strict=True)) for values in itertools.product(*arm.tune.values())
    ]
    with ThreadPoolExecutor(a.jobs) as pool:
        tuning = list(pool.map(lambda tuned: run(track, arm, 0, tuned), grid))
        best = min(tuning, key=lambda result: result["loss"])
        rest = pool.map(lambda seed: run(track, arm, seed, best["tuned"]), range(1, a.seeds))
        runs = [best, *rest]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    origin = {"commit": commit, "jobs": a.jobs, "versions": versions()}
    config = configuration.to_dict(track.config(arm, 0, best["tuned"]))
    return {
        "arm": arm.name,
        "why": arm.why,
        "tuning": tuning,
        "runs": runs,
        "config": config,
    } | origin


def run(track: Track, arm: Arm, seed: int, tuned: dict) -> dict:
    """What a run came to, which is trained to its end first where it is not there. A rate that is
    too high for it to end is a result, too: an infinite loss. Raises ValueError if it fails
    otherwise."""
    config = track.config(arm, seed, tuned)
    found = {"seed": seed, "tuned": tuned}
    metrics = config.run_folder / "metrics.jsonl"
    if not has_ended(metrics, config):
        failure = train_to_the_end(config)
        if "not finite" in failure:
            return found | {"loss": math.inf, "l2r": math.inf, "tokens": 0, "tokens_to_goal": None}
        if failure:
            raise ValueError(f"{config.run_folder}: {failure}")
    lines = read_metrics(metrics)
    validations = [line for line in lines if LOSS in line]
    last = validations[-1]
    # The first line has the start in it.
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line][1:]
    found |= {
        "loss": last[LOSS],
        "l2r": last["val_loss_l2r"],
        "tokens": last["tokens"],
        "tokens_to_goal": crossing(validations, track.goal),
        "tokens_per_second": statistics.median(speeds),
        "curve": [[line["tokens"], line[LOSS], line["val_loss_l2r"]] for line in validations],
    }
    print(f"{config.name}: any order {found['loss']:.4f}, l2r {found['l2r']:.4f}", flush=True)
    return found


def has_ended(metrics: Path, config: Config) -> bool:
    """Whether a run of this configuration has been trained to its end."""
    file = config.run_folder / "config.toml"
    if not file.exists() or configuration.differences(configuration.load_toml(file), config):
        return False
    return any(
        line["step"] == config.train.steps and LOSS in line for line in read_metrics(metrics)
    )


def train_to_the_end(config: Config) -> str:
    """Train a run, in a process of one thread. Returns what it ended with, if not well."""
    file = config.run_folder.with_name(f"{config.name}.toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, configuration.to_toml(config))
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", file],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip()[-500:] if done.returncode else ""


def crossing(validations: list[dict], goal: float) -> float | None:
    """Tokens at which the loss first passes the goal, on the straight line between two evaluations;
    None if it never does."""
    for i, line in enumerate(validations):
        if line[LOSS] > goal:
            continue
        if i == 0:
            return line["tokens"]
        before = validations[i - 1]
        share = (before[LOSS] - goal) / (before[LOSS] - line[LOSS])
        return before["tokens"] + share * (line["tokens"] - before["tokens"])
    return None


# ---- the table -----------------------------------------------------------------------------------

HEAD = [
    "arm",
    "any order",
    "+-",
    "left to right",
    "tokens",
    "to the goal",
    "minutes",
    "tuned",
    "commit",
]


def row(track: Track, name: str, result: dict) -> list[str]:
    runs = result["runs"]
    losses, l2r = [r["loss"] for r in runs], [r["l2r"] for r in runs]
    error = math.nan
    if len(losses) > 1:
        error = t_quantile(len(losses) - 1) * statistics.stdev(losses) / len(losses) ** 0.5
    reached = [r.get("tokens_to_goal") for r in runs]
    to_goal = "-" if None in reached else f"{statistics.mean(reached) / 1e6:.2f}M"
    minutes = statistics.mean(
        r["tokens"] / r["tokens_per_second"] / 60 for r in runs if "tokens" in r
    )
    tuned = ", ".join(
        f"{key.rpartition('.')[2]} {value:g}" for key, value in runs[0]["tuned"].items()
    )
    return [
        name,
        f"{statistics.mean(losses):.4f}",
        f"{error:.4f}",
        f"{statistics.mean(l2r):.4f}",
        f"{runs[0]['tokens'] / 1e6:.2f}M",
        to_goal,
        f"{minutes:.1f}",
        tuned,
        result["commit"],
    ]


def table(track: Track) -> list[str]:
    """The leaderboard: arms with results, the lowest loss first at equal tokens."""
    known = {
        name: json.loads(track.result(name).read_text())
        for name in track.arms
        if track.result(name).exists()
    }
    rows = [row(track, name, result) for name, result in known.items()]
    rows.sort(key=lambda cells: (cells[4], float(cells[1])))
    missing = [name for name in track.arms if name not in known]
    lines = markdown_table(HEAD, rows)
    return [*lines, *([f"not run yet: {', '.join(missing)}"] if missing else [])]


if __name__ == "__main__":
    run_script(main)
