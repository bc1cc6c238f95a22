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

import copy
import itertools
import json
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
from evaluation.text_measures import mean_and_error
from runtime.command_line import run_script
from runtime.files import write_json, write_text
from runtime.ranges import Count, check_values
from runtime.reports import commit, markdown_table, versions
from training import config as configuration
from training.config import Config
from training.metrics import read_metrics
from training.validation import best_by

ROOT = Path(__file__).resolve().parent
TRACKS, RESULTS = ROOT / "configs" / "speedrun", ROOT / "results" / "speedrun"
OUT = Path("out") / "speedrun"
# Losses of the averaged weights in metrics.jsonl, nats per token.
ANY_ORDER, L2R = "val_loss_random", "val_loss_l2r"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    track: Annotated[str, tyro.conf.Positional]
    """A file of configs/speedrun, without its ending."""
    arms: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arms of the track to train; none: show what is known."""
    seeds: Count = 3
    jobs: Count = 1
    """Runs side by side, on a CPU; each has one thread."""
    processes: Count = 1
    """Of each run, one a GPU of this machine, started by torchrun."""
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
    check_values(arguments)
    track = load_track(arguments.track)
    for name in arguments.arms:
        if name not in track.arms:
            raise ValueError(
                f"there is no arm {name!r}; {arguments.track} has {', '.join(track.arms)}"
            )
    for name in arguments.arms:
        result = run_arm(track, track.arms[name], arguments)
        write_json(track.result(name), result)
        print(*markdown_table(HEAD, [row(result)]), sep="\n", flush=True)
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
        values = copy.deepcopy(self.base)
        words = [f"{key.rpartition('.')[2]}{value:g}" for key, value in tuned.items()]
        name = "_".join([arm.name, *words, f"s{seed}"])
        changes = arm.changes | tuned
        changes |= {"name": name, "seed": seed, "out": str(OUT / self.name)}
        for key, value in changes.items():
            table = values
            *path, last = key.split(".")
            for part in path:
                table = table.setdefault(part, {})  # an unknown key is refused below, by its name
            table[last] = value
        return configuration.from_dict(values, f"arm {arm.name}")


def load_track(name: str) -> Track:
    """Read configs/speedrun/NAME.toml: `goal`, the table `base`, which is a configuration, and for
    each arm a table of `from` (an arm whose changes it has, too), `why`, `tune` and dotted keys.
    `from` at its top is another track, over whose base and arms it lays its own."""
    values = read_track(name)
    arms: dict[str, Arm] = {}
    for arm, table in values["arms"].items():
        source = table.pop("from", None)
        if source is not None and source not in arms:
            raise ValueError(f"track {name}: {arm} is from {source!r}, which is no arm above it")
        inherited = arms[source] if source else Arm("", {}, {}, "")
        why, tune = table.pop("why", ""), table.pop("tune", inherited.tune)
        tune = {key: values for key, values in tune.items() if key not in table}
        changes = inherited.changes | table
        changes = {key: value for key, value in changes.items() if key not in tune}
        arms[arm] = Arm(arm, changes, tune, why)
    return Track(name, values["goal"], values["base"], arms)


def read_track(name: str) -> dict:
    """The values of a track's file, laid over those of the track that it is from, key by key."""
    path = TRACKS / f"{name}.toml"
    if not path.is_file():
        tracks = ", ".join(sorted(p.stem for p in TRACKS.glob("*.toml")))
        raise ValueError(f"there is no track {name!r}; choose one of {tracks}")
    values = tomllib.loads(path.read_text())
    if "from" not in values:
        return values
    source = read_track(values.pop("from"))
    for part in ("base", "arms"):
        for key, table in values.pop(part, {}).items():
            source[part][key] = source[part].get(key, {}) | table
    return source | values


# ---- training ------------------------------------------------------------------------------------


def run_arm(track: Track, arm: Arm, a: Arguments) -> dict:
    """Tune an arm with seed 0, then train the other seeds; what every run came to."""
    grid = [
        dict(zip(arm.tune, values, strict=True)) for values in itertools.product(*arm.tune.values())
    ]
    with ThreadPoolExecutor(a.jobs) as pool:
        tuning = list(pool.map(lambda tuned: run(track, arm, 0, tuned, a.processes), grid))
        ended = [result for result in tuning if result["loss"] is not None]
        if not ended:
            raise ValueError(f"no run of {arm.name} ended: lower the values that it tunes")
        best = min(ended, key=lambda result: result["loss"])
        seeds = range(1, a.seeds)
        rest = pool.map(lambda seed: run(track, arm, seed, best["tuned"], a.processes), seeds)
        runs = [best, *rest]
    commits = sorted({result["commit"] for result in runs})
    config = configuration.to_dict(track.config(arm, 0, best["tuned"]))
    return {
        "arm": arm.name,
        "why": arm.why,
        "tuning": tuning,
        "runs": runs,
        "config": config,
        "commit": ", ".join(commits),
        "versions": versions(),
    }


def run(track: Track, arm: Arm, seed: int, tuned: dict, processes: int) -> dict:
    """What a run came to, which is trained to its end first where it is not there. A rate that is
    too high for it to end is a result, too: no loss. Raises ValueError if it fails otherwise."""
    config = track.config(arm, seed, tuned)
    found = {"seed": seed, "tuned": tuned}
    if not has_ended(config):
        failure = train_to_the_end(config, processes)
        if "not finite" in failure:
            return found | {"loss": None, "tokens_to_goal": None, "commit": commit()}
        if failure or not has_ended(config):
            stopped = "stopped before its last step; give the same command again"
            raise ValueError(f"{config.run_folder} {failure[-500:] or stopped}")
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    own = own_loss(config)
    validations = [line for line in lines if own in line]
    last = validations[-1]
    # The first line has the start in it.
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
    speeds = speeds[1:] or speeds
    noted = config.run_folder / "commit"
    found |= {
        "commit": noted.read_text() if noted.exists() else "unknown",
        "loss": last[own],
        "any_order": last.get(ANY_ORDER),
        "l2r": last.get(L2R),
        "tokens": last["tokens"],
        "tokens_to_goal": crossing(validations, track.goal) if own == ANY_ORDER else None,
        "tokens_per_second": statistics.median(speeds),
        "curve": [[line["tokens"], line.get(ANY_ORDER), line.get(L2R)] for line in validations],
    }
    print(f"{config.name}: {own} {found['loss']:.4f}", flush=True)
    return found


def own_loss(config: Config) -> str:
    """The key of metrics.jsonl that a run is judged by: under the orders that it learns."""
    return f"val_loss_{best_by(config)}"


def has_ended(config: Config) -> bool:
    """Whether a run of this configuration has been trained to its end. Raises ValueError where the
    folder holds a run of another configuration: an arm was changed since."""
    file = config.run_folder / "config.toml"
    if not file.exists():
        return False
    if changed := configuration.differences(configuration.load_toml(file), config):
        raise ValueError(
            f"{config.run_folder} holds a run with another {', '.join(changed)}: the arm has been "
            "changed since; remove the folder, or give the arm another name"
        )
    lines = read_metrics(file.with_name("metrics.jsonl"))
    return any(line["step"] == config.train.steps and own_loss(config) in line for line in lines)


def train_to_the_end(config: Config, processes: int) -> str:
    """Train a run, in processes of one thread. Returns what it ended with, if not well."""
    file = config.run_folder.with_name(f"{config.name}.toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, configuration.to_toml(config))
    started = config.run_folder.with_name(f"{config.name}.commit")
    known = started.read_text().split(", ") if started.exists() else []
    write_text(started, ", ".join(dict.fromkeys([*known, commit()])))  # a run can be resumed
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), ROOT / "train.py", file],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        started.replace(config.run_folder / "commit")
        return ""
    return done.stderr.strip() or f"ended with status {done.returncode}"


def crossing(validations: list[dict], goal: float) -> float | None:
    """Tokens at which the loss first passes the goal, on the straight line between two evaluations;
    None if it never does."""
    for i, line in enumerate(validations):
        if line[ANY_ORDER] > goal:
            continue
        if i == 0:
            return line["tokens"]
        before = validations[i - 1]
        share = (before[ANY_ORDER] - goal) / (before[ANY_ORDER] - line[ANY_ORDER])
        return before["tokens"] + share * (line["tokens"] - before["tokens"])
    return None


# ---- the table -----------------------------------------------------------------------------------

HEAD = [
    "arm",
    "any order",
    "left to right",
    "seeds",
    "tokens",
    "to the goal",
    "minutes",
    "tuned",
    "commit",
    "what it is",
]


def row(result: dict) -> list[str]:
    """The line of an arm: means over its seeds, of losses with half a 95% interval."""
    ended = runs_that_ended(result)
    reached = [r["tokens_to_goal"] for r in result["runs"]]
    minutes = statistics.mean(r["tokens"] / r["tokens_per_second"] / 60 for r in ended)
    tuned = ended[0]["tuned"].items()
    return [
        result["arm"],
        mean_loss(ended, "any_order"),
        mean_loss(ended, "l2r"),
        str(len(ended)),
        f"{ended[0]['tokens'] / 1e6:.2f}M",
        "-" if None in reached else f"{statistics.mean(reached) / 1e6:.2f}M",
        f"{minutes:.1f}",
        ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in tuned),
        result["commit"],
        result["why"],
    ]


def mean_loss(runs: list[dict], key: str) -> str:
    """A loss over seeds, or "-" where the models have none of this kind."""
    losses = [r[key] for r in runs]
    if None in losses:
        return "-"
    mean, error = mean_and_error(losses)
    if len(losses) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} +- {t_quantile(len(losses) - 1) * error:.4f}"


def runs_that_ended(result: dict) -> list[dict]:
    """The runs of an arm but those whose losses became infinite; the tuned one is among them."""
    return [r for r in result["runs"] if r["loss"] is not None]


def table(track: Track) -> list[str]:
    """The leaderboard: arms with results, the fewest tokens first and the lowest loss. Those of
    ingredients that did not pay stay there, though the track has them no more."""
    known = [json.loads(file.read_text()) for file in (RESULTS / track.name).glob("*.json")]

    def place(result: dict) -> tuple[int, float]:
        ended = runs_that_ended(result)
        return ended[0]["tokens"], statistics.mean(r["loss"] for r in ended)

    known.sort(key=place)
    missing = [name for name in track.arms if not track.result(name).exists()]
    lines = markdown_table(HEAD, [row(result) for result in known])
    return [*lines, *([f"not run yet: {', '.join(missing)}"] if missing else [])]


if __name__ == "__main__":
    run_script(main)
