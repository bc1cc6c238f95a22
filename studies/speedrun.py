"""How few tokens does an any-order model need? Train arms of a track and print their lines.

    python -m studies.speedrun bytes                        # the arms of a track, and what is known of them
    python -m studies.speedrun bytes paper fast --jobs 2    # train them: resumed if cut off
    python -m studies.speedrun bytes paper fast --turns 3   # how long they take, in turns
    python -m studies.speedrun bytes --markdown FILE        # the leaderboard

A track fixes data, block size, evaluation and a goal, an any-order validation loss. An arm is a
config with a few keys changed (studies/configs/speedrun/TRACK.toml). Every arm is tuned in the same way:
seed 0 is trained with values under its `tune` (`experiments.tuning.search`), the lowest loss at the
end decides, and the other seeds are trained with that value. Results stand in results/speedrun/
TRACK/ARM.json. An arm that was cut off goes on; what its runs came to is kept in ARM.runs.jsonl.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from evaluation.text_measures import mean_and_reach
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.files import write_json
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import command, commit, markdown_table, versions
from runtime.validation import (
    Count,
    NonNegative,
    check_values,
    damaged,
    from_values,
    read_results,
    read_toml,
    schema,
)
from studies.benchmarks.common import cpu_name, with_range
from studies.experiments.arms import (
    ROOT,
    Arm,
    commits_of,
    config_of,
    crossing,
    own_loss,
    read_arms,
    run_of,
    side_by_side,
)
from studies.experiments.kept import Kept
from studies.experiments.report import mean_cell, tuned_cell
from studies.experiments.tuning import at_edge, best_of, choices_of, search
from training import config as configuration
from training.config import Config

TRACKS, RESULTS = ROOT / "studies" / "configs" / "speedrun", ROOT / "results" / "speedrun"
OUT = Path("out") / "speedrun"
# What 2% of the tokens are worth, as a share of what four times the tokens are.
WORTH = math.log(1.02) / math.log(4)
# Losses of the averaged weights in metrics.jsonl, nats per token.
ANY_ORDER, L2R = "val_loss_random", "val_loss_l2r"


@dataclass(frozen=True, kw_only=True)
class Arguments(OutputOptions):
    track: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/speedrun, without its ending."""
    arms: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arms of the track to train; none: show what is known."""
    seeds: Count = 3
    jobs: Count = 1
    """Arms side by side, on a CPU; each has one thread."""
    processes: Count = 1
    """Of each run, one a GPU of this machine, started by torchrun."""
    turns: NonNegative = 0
    """Train nothing to its end: so many times, a short run of every arm in turn, for its speed."""
    markdown: Path | None = None
    """Write the table."""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    check_values(arguments)
    track = load_track(arguments.track)
    outputs = Outputs({"--markdown": arguments.markdown}, (), arguments.overwrite)
    for name in arguments.arms:
        if name not in track.arms:
            raise UserError(
                f"there is no arm {name!r}; {arguments.track} has {', '.join(track.arms)}"
            )
    chosen = [track.arms[name] for name in arguments.arms]
    if arguments.turns and chosen:
        write_json(track.speeds, measure_speeds(track, chosen, arguments))
        print(*time_table(track), sep="\n")
    else:
        with side_by_side(arguments.jobs) as pool:
            for result in pool.map(lambda arm: run_arm(track, arm, arguments), chosen):
                write_json(track.result(result["arm"]), result)
                print(*markdown_table(HEAD, [row(result)]), sep="\n", flush=True)
    if not arguments.arms:
        print(*table(track), sep="\n")
    if arguments.markdown:
        with outputs:
            outputs.write(arguments.markdown, "\n".join(table(track)) + "\n")


# ---- tracks and arms -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    name: str
    goal: float
    base: dict
    arms: dict[str, Arm]

    def result(self, arm: str) -> Path:
        return RESULTS / self.name / f"{arm}.json"

    @property
    def speeds(self) -> Path:
        """Tokens a second of its arms, measured in turns."""
        return RESULTS / f"{self.name}.speeds.json"

    def config(self, arm: Arm, seed: int, tuned: dict) -> Config:
        """The configuration of one run."""
        return config_of(self.base, arm, seed, tuned, OUT / self.name)


@schema
class TrackFile(TypedDict):
    goal: float
    base: dict[str, Any]
    arms: dict[str, dict]


def load_track(name: str) -> Track:
    """Read studies/configs/speedrun/NAME.toml: `goal`, the table `base`, which is a configuration, and for
    each arm a table of `from` (an arm whose changes it has, too), `why`, `tune` and dotted keys.
    `from` at its top is another track, over whose base and arms it lays its own; `length`, of that
    one, what share of their steps its runs have."""
    values = from_values(read_track(name), TrackFile, f"track {name}")
    arms = read_arms(values["arms"], f"track {name}")
    return Track(name, values["goal"], values["base"], arms)


def read_track(name: str) -> dict:
    """The values of a track's file, laid over those of the track that it is from, key by key."""
    path = TRACKS / f"{name}.toml"
    if not path.is_file():
        tracks = ", ".join(sorted(p.stem for p in TRACKS.glob("*.toml")))
        raise UserError(f"there is no track {name!r}; choose one of {tracks}")
    values = read_toml(path)
    if "from" not in values:
        return values
    source, length = read_track(values.pop("from")), values.pop("length", 1)
    with damaged(path, "see studies/configs/speedrun/gpt2.toml, which is from another track, too"):
        for table, key in lengths_of(source):
            table[key] = round(length * table[key])
        for part in ("base", "arms"):
            for key, table in values.pop(part, {}).items():
                source[part][key] = source[part].get(key, {}) | table
        return source | values


def lengths_of(values: dict) -> list[tuple[dict, str]]:
    """Where the values of a track tell numbers of steps: the tables, and their keys."""
    base = values["base"]
    found = [(base["train"], "steps"), (base["eval"], "interval")]
    for arm in values["arms"].values():
        found += [(arm, key) for key in ("train.steps", "eval.interval") if key in arm]
    return found


# ---- training ------------------------------------------------------------------------------------


def run_arm(track: Track, arm: Arm, a: Arguments) -> dict:
    """Tune an arm with seed 0, then train the other seeds; what every run came to."""
    kept = Kept(track.result(arm.name).with_suffix(".runs.jsonl"))

    def run(seed: int, tuned: dict) -> dict:
        config = track.config(arm, seed, tuned)
        found = kept.of(config, [], lambda: result_of(config, tuned, a.processes))
        goal = tokens_to(track.goal, found) if own_loss(config) == ANY_ORDER else None
        return found | {"tokens_to_goal": goal}

    def loss_of(tuned: dict) -> float:
        loss = run(0, tuned)["loss"]
        return math.inf if loss is None else loss

    def is_kept(tuned: dict) -> bool:
        return kept.has(track.config(arm, 0, tuned), [])

    tried = search(choices_of(arm), loss_of, is_kept)
    tuned = best_of(arm, tried)
    runs = [run(seed, tuned) for seed in range(a.seeds)]
    config = configuration.to_dict(track.config(arm, 0, tuned))
    return {
        "arm": arm.name,
        "why": arm.why,
        "tuning": [run(0, values) for values, _ in tried],
        "runs": runs,
        "config": config,
        "commit": commits_of(runs),
        "versions": versions(),
    }


def result_of(config: Config, tuned: dict, processes: int) -> dict:
    """What a run came to; no loss where its rate was too high for it to end."""
    done = run_of(config, processes)
    if done.loss is not None:
        print(f"{config.name}: {own_loss(config)} {done.loss:.4f}", flush=True)
    found = {"seed": config.seed, "tuned": tuned, "commit": done.commit}
    if done.lines is None:
        return found | {"loss": None}
    validations = done.validations
    last = validations[-1]
    return found | {
        "loss": done.loss,
        "any_order": last.get(ANY_ORDER),
        "l2r": last.get(L2R),
        "tokens": last["tokens"],
        "tokens_per_second": speed_of(done.lines),
        "curve": [[line["tokens"], line.get(ANY_ORDER), line.get(L2R)] for line in validations],
    }


def speed_of(lines: list[dict]) -> float:
    """Tokens a second of a run; the first line has the start in it."""
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
    return statistics.median(speeds[1:] or speeds)


def tokens_to(goal: float, found: dict) -> float | None:
    """Tokens at which the any-order loss of a run passes the goal; None if it never does."""
    curve = [{"tokens": tokens, "loss": loss} for tokens, loss, _ in found.get("curve", ())]
    return crossing(curve, "loss", goal)


# ---- time ----------------------------------------------------------------------------------------

TIMED_TOKENS, TIMED_STEPS = 100_000, 50  # of a short run, at least


def measure_speeds(track: Track, arms: list[Arm], a: Arguments) -> dict:
    """Tokens a second of arms with results, in turns, so that what else the machine does falls on
    all alike."""
    configs = {}
    for arm in arms:
        result = read_results(track.result(arm.name), f"run {arm.name} first, without --turns")
        configs[arm.name] = track.config(arm, 0, result["runs"][0]["tuned"])
    speeds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(a.turns):
        for name, config in configs.items():
            speeds[name].append(speed_of_short_run(config, a.processes))
            print(f"{name}: {speeds[name][-1]:,.0f} tokens a second", flush=True)
    made = {"command": command(), "commit": commit(), "cpu": cpu_name(), "versions": versions()}
    return {"tokens_per_second": speeds} | made


def speed_of_short_run(config: Config, processes: int) -> float:
    """Train the first steps of a run in a folder of its own, which is thrown away."""
    tokens = config.train.batch_size * config.model.block_size
    steps = max(TIMED_STEPS, math.ceil(TIMED_TOKENS / tokens))
    with tempfile.TemporaryDirectory() as folder:
        short = replace(
            config,
            out=folder,
            train=replace(config.train, steps=steps, log_interval=steps // 10),
            optim=replace(config.optim, warmup_steps=min(config.optim.warmup_steps, steps)),
            eval=replace(config.eval, interval=steps, sequences=1),
        )
        done = run_of(short, processes)
        if done.lines is None:
            raise UserError(f"{config.name}: its loss became infinite within {steps} steps")
        return speed_of(done.lines)


def time_table(track: Track) -> list[str]:
    """How long the runs of arms take by their measured speeds, and how long to the goal; shares are
    of the first arm, to its end, turn by turn: the median, and the least and largest."""
    advice = "remove it, and measure again with --turns"
    speeds = read_results(track.speeds, advice)["tokens_per_second"]
    results = {name: read_results(track.result(name), "run its arm again") for name in speeds}
    first = next(iter(speeds))
    ends = [tokens_of(results[first]) / speed for speed in speeds[first]]  # seconds, by turn
    rows = []
    for name, result in results.items():
        shares = [
            share_cell(tokens, speeds[name], ends)
            for tokens in (tokens_of(result), mean_tokens_to_goal(result))
        ]
        thousands = [speed / 1000 for speed in speeds[name]]
        seconds = tokens_of(result) / statistics.median(speeds[name])
        loss = mean_loss(runs_that_ended(result), "any_order")
        rows.append([name, loss, spread_of(thousands), f"{seconds:.0f}", *shares])
    return markdown_table(
        ["arm", "any order", "1,000 tokens a second", "seconds", f"of {first}'s", "to the goal"],
        rows,
    )


def share_cell(tokens: float | None, speeds: list[float], ends: list[float]) -> str:
    """What share of the first arm's seconds, `ends`, so many tokens take, turn by turn."""
    if tokens is None:
        return "-"
    shares = [tokens / speed / end for speed, end in zip(speeds, ends, strict=True)]
    return spread_of(shares)


def spread_of(values: list[float]) -> str:
    """The median, and the least and largest."""
    return with_range(statistics.median(values), min(values), max(values))


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
    reached = mean_tokens_to_goal(result)
    minutes = statistics.mean(r["tokens"] / r["tokens_per_second"] / 60 for r in ended)
    return [
        result["arm"],
        mean_loss(ended, "any_order"),
        mean_loss(ended, "l2r"),
        str(len(ended)),
        f"{ended[0]['tokens'] / 1e6:.2f}M",
        "-" if reached is None else f"{reached / 1e6:.2f}M",
        f"{minutes:.1f}",
        tuned_cell(ended[0]["tuned"]) + " (edge)" * is_at_edge(result),
        result["commit"],
        result["why"],
    ]


def mean_tokens_to_goal(result: dict) -> float | None:
    """Mean over seeds; None where one of them does not reach it."""
    reached = [run["tokens_to_goal"] for run in result["runs"]]
    return None if None in reached else statistics.mean(reached)


def is_at_edge(result: dict) -> bool:
    """Whether the best value is the first or the last of those that were tried."""
    return at_edge([run["tuned"] for run in result["tuning"]], result["runs"][0]["tuned"])


def mean_loss(runs: list[dict], key: str) -> str:
    """A loss over seeds, or "-" where the models have none of this kind."""
    return mean_cell([r[key] for r in runs])


def runs_that_ended(result: dict) -> list[dict]:
    """The runs of an arm but those whose losses became infinite; the tuned one is among them."""
    return [r for r in result["runs"] if r["loss"] is not None]


def table(track: Track) -> list[str]:
    """The leaderboard: arms with results, the fewest tokens first and the lowest loss. Those of
    ingredients that did not pay stay there, though the track has them no more."""
    folder, advice = RESULTS / track.name, "remove it, and run its arm again"

    def place(result: dict) -> tuple[int, float]:
        return tokens_of(result), statistics.mean(losses_of(result).values())

    with damaged(folder, "remove the file that is none of an arm, and run that again"):
        known = [read_results(file, advice) for file in folder.glob("*.json")]
        known.sort(key=place)
        lines = [*markdown_table(HEAD, [row(result) for result in known]), *ingredients(known)]
        if track.speeds.exists():
            lines += ["", *time_table(track)]
    missing = [name for name in track.arms if not track.result(name).exists()]
    return [*lines, *(["", f"Not run yet: {', '.join(missing)}."] if missing else [])]


def ingredients(known: list[dict]) -> list[str]:
    """What one change to "fast" gives, seed by seed: arms "fast-..." with as many tokens."""
    by_name = {result["arm"]: result for result in known}
    if not {"fast", "fast-x4"} <= by_name.keys():
        return []
    fast, longer = losses_of(by_name["fast"]), losses_of(by_name["fast-x4"])
    worth = WORTH * (statistics.mean(fast.values()) - statistics.mean(longer.values()))
    rows = []
    for name, result in by_name.items():
        if not name.startswith("fast-") or tokens_of(result) != tokens_of(by_name["fast"]):
            continue
        own = losses_of(result)
        shared = fast.keys() & own.keys()
        mean, reach = mean_and_reach([own[seed] - fast[seed] for seed in shared])
        word = "no difference" if abs(mean) < reach else "costs" if mean > 0 else "pays"
        if word == "pays" and -mean < worth:
            word = "too little"
        rows.append([name, f"{mean:+.4f} +- {reach:.4f}", word, result["why"]])
    return ["", *markdown_table(["one change", "any order", "it", "what it is"], sorted(rows))]


def losses_of(result: dict) -> dict[int, float]:
    """By seed."""
    return {run["seed"]: run["loss"] for run in runs_that_ended(result)}


def tokens_of(result: dict) -> int:
    return runs_that_ended(result)[0]["tokens"]


if __name__ == "__main__":
    run_script(main)
