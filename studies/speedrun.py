"""How few tokens does an any-order model need? Train run configs of a benchmark, print their lines.

    python -m studies.speedrun bytes                              # the leaderboard, and what has not been run
    python -m studies.speedrun bytes paper fast --jobs 2          # train, resumed if interrupted
    python -m studies.speedrun bytes paper fast --repetitions 3   # measure their speed, in turn
    python -m studies.speedrun bytes --markdown FILE              # write the leaderboard

A benchmark (studies/configs/speedrun) is an experiment with a goal, an any-order validation loss; it
fixes data, block size and evaluation. All run configs are tuned alike: seed 0 is trained with values
under `tune`, the lowest final loss decides, and the other seeds are trained with that value. Results
are in results/speedrun/BENCHMARK.json, those of single runs in BENCHMARK.runs.jsonl.
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
from studies.experiment import Experiment
from studies.machine import cpu_name, with_range
from studies.pages import mean_cell, tokens_to, tuned_cell, value_of
from studies.runner import Results, train
from studies.runs import ROOT, commits_of, read_run_configs, run_of
from training.config import Config

CONFIGS, RESULTS = ROOT / "studies" / "configs" / "speedrun", ROOT / "results" / "speedrun"
OUT = Path("out") / "speedrun"
RECIPE = ""  # the only one
TIMED_TOKENS, TIMED_STEPS = 100_000, 50  # at least, in a run that is timed
# What 2% of the tokens are worth, as a share of what four times the tokens are worth.
WORTH = math.log(1.02) / math.log(4)


@dataclass(frozen=True, kw_only=True)
class Arguments(OutputOptions):
    benchmark: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/speedrun without its suffix."""
    run_configs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run configs of the benchmark to train; none: print the leaderboard."""
    seeds: Count = 3
    jobs: Count = 1
    """Runs in parallel on a CPU, each with one thread."""
    processes: Count = 1
    """Of each run, one for each GPU of this machine, started by torchrun."""
    repetitions: NonNegative = 0
    """Instead of training, measure speed: so many times, a short run of each run config in turn."""
    markdown: Path | None = None
    """Write the leaderboard to this file."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    benchmark = load_benchmark(a.benchmark)
    outputs = Outputs({"--markdown": a.markdown}, (), a.overwrite)
    known = benchmark.recipes[RECIPE]
    for name in a.run_configs:
        if name not in known:
            raise UserError(
                f"there is no run config {name!r}; {a.benchmark} has {', '.join(known)}"
            )
    if a.repetitions and a.run_configs:
        write_json(speeds_file(benchmark), measure_speeds(benchmark, a))
        print(*time_table(benchmark), sep="\n")
    elif a.run_configs:
        train_run_configs(benchmark, a)
    else:
        print(*table(benchmark), sep="\n")
    if a.markdown:
        with outputs:
            outputs.write(a.markdown, "\n".join(table(benchmark)) + "\n")


def train_run_configs(benchmark: Experiment, a: Arguments) -> None:
    """Tune and train, write the results, and print a line for each run config."""
    chosen = {name: benchmark.recipes[RECIPE][name] for name in dict.fromkeys(a.run_configs)}
    experiment, results = replace(benchmark, recipes={RECIPE: chosen}), results_file(benchmark)
    rows = Results(results.with_suffix(".runs.jsonl"))
    options = {"jobs": a.jobs, "processes": a.processes}
    found = train(experiment, [RECIPE], a.seeds, rows, **options)[RECIPE]
    entries = {n: e | {"commit": commits_of(e["runs"])} for n, e in found.items()}
    known = read_entries(benchmark) | entries
    made = {"experiment": benchmark.name, "recipes": {RECIPE: known}, "torch": versions()["torch"]}
    write_json(results, made)
    print(*markdown_table(HEAD, [line(*of, benchmark.goal) for of in entries.items()]), sep="\n")


# ---- benchmarks ----------------------------------------------------------------------------------


@schema
class BenchmarkFile(TypedDict):
    goal: float
    base: dict[str, Any]
    run_configs: dict[str, dict]


def load_benchmark(name: str) -> Experiment:
    """Read studies/configs/speedrun/NAME.toml: `goal`, `base` and `run_configs`. With `from` it
    names another benchmark, over whose base and run configs it lays its own; `length` scales the
    numbers of steps of that one."""
    source = f"benchmark {name}"
    values = from_values(read_values(name), BenchmarkFile, source)
    return Experiment(
        name=name,
        goal=values["goal"],
        base=values["base"],
        recipes={RECIPE: read_run_configs(values["run_configs"], source)},
        out=OUT / name,
    )


def read_values(name: str) -> dict:
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.toml")))
        raise UserError(f"there is no benchmark {name!r}; choose one of {known}")
    values = read_toml(path)
    if "from" not in values:
        return values
    source, length = read_values(values.pop("from")), values.pop("length", 1)
    with damaged(path, "compare it with studies/configs/speedrun/gpt2.toml"):
        steps = [(source["base"]["train"], "steps"), (source["base"]["eval"], "interval")]
        for table in source["run_configs"].values():
            steps += [(table, key) for key in ("train.steps", "eval.interval") if key in table]
        for table, key in steps:
            table[key] = round(length * table[key])
        for part in ("base", "run_configs"):
            for key, table in values.pop(part, {}).items():
                source[part][key] = source[part].get(key, {}) | table
        return source | values


def results_file(benchmark: Experiment) -> Path:
    return RESULTS / f"{benchmark.name}.json"


def speeds_file(benchmark: Experiment) -> Path:
    return RESULTS / f"{benchmark.name}.speeds.json"


def read_entries(benchmark: Experiment) -> dict[str, dict]:
    """The results by run config; also of some that the benchmark no longer has."""
    file = results_file(benchmark)
    advice = "remove it, and run its run configs again"
    return read_results(file, advice)["recipes"][RECIPE] if file.exists() else {}


# ---- time ----------------------------------------------------------------------------------------


def measure_speeds(benchmark: Experiment, a: Arguments) -> dict:
    """Tokens per second of run configs with results, in turn, so that other work of the machine
    affects all of them alike."""
    entries, configs = read_entries(benchmark), {}
    for name in dict.fromkeys(a.run_configs):
        if name not in entries:
            raise UserError(f"{name} has no results: run it first, without --repetitions")
        run_config = benchmark.recipes[RECIPE][name]
        configs[name] = benchmark.config(RECIPE, run_config, 0, entries[name]["tuned"])
    speeds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(a.repetitions):
        for name, config in configs.items():
            speeds[name].append(speed_of_short_run(config, a.processes))
            print(f"{name}: {speeds[name][-1]:,.0f} tokens per second", flush=True)
    made = {"command": command(), "commit": commit(), "cpu": cpu_name(), "versions": versions()}
    return {"tokens_per_second": speeds} | made


def speed_of_short_run(config: Config, processes: int) -> float:
    """Tokens per second of the first steps of a run, in a temporary folder."""
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
        return done.tokens_per_second


def time_table(benchmark: Experiment) -> list[str]:
    """The duration of runs at their measured speeds, and until they reach the goal, as shares of
    the first run config's, repetition by repetition: the median, and the least and largest."""
    speeds = read_results(speeds_file(benchmark), "remove it, and measure again")
    speeds, entries = speeds["tokens_per_second"], read_entries(benchmark)
    first = next(iter(speeds))
    durations = [tokens_of(entries[first]) / speed for speed in speeds[first]]

    def share_cell(tokens: float | None, name: str) -> str:
        if tokens is None:
            return "-"
        pairs = zip(speeds[name], durations, strict=True)
        return spread_of([tokens / speed / seconds for speed, seconds in pairs])

    lines = []
    for name in speeds:
        entry, tokens = entries[name], tokens_of(entries[name])
        lines.append(
            [
                name,
                mean_cell([value_of(row, "random") for row in ended(entry)]),
                spread_of([speed / 1000 for speed in speeds[name]]),
                f"{tokens / statistics.median(speeds[name]):.0f}",
                share_cell(tokens, name),
                share_cell(mean_tokens_to_goal(entry, benchmark.goal), name),
            ]
        )
    head = ["run config", "any order", "1,000 tokens per second", "seconds", f"of {first}'s"]
    return markdown_table([*head, "to the goal"], lines)


def spread_of(values: list[float]) -> str:
    return with_range(statistics.median(values), min(values), max(values))


# ---- the leaderboard -----------------------------------------------------------------------------

HEAD = ["run config", "any order", "left to right", "seeds", "tokens", "to the goal", "minutes"]
HEAD += ["tuned", "commit", "description"]


def line(name: str, entry: dict, goal: float) -> list[str]:
    """Means over seeds, of losses with the half-width of their 95% CI."""
    rows, reached = ended(entry), mean_tokens_to_goal(entry, goal)
    minutes = statistics.mean(r["tokens"][-1] / r["tokens_per_second"] / 60 for r in rows)
    return [
        name,
        *(mean_cell([value_of(row, kind) for row in rows]) for kind in ("random", "l2r")),
        str(len(rows)),
        f"{tokens_of(entry) / 1e6:.2f}M",
        "-" if reached is None else f"{reached / 1e6:.2f}M",
        f"{minutes:.1f}",
        tuned_cell(entry),
        entry["commit"],
        entry["description"],
    ]


def mean_tokens_to_goal(entry: dict, goal: float) -> float | None:
    """Mean over seeds; None if one of them does not reach it."""
    reached = [tokens_to(goal, row, "random") for row in entry["runs"]]
    return None if None in reached else statistics.mean(reached)


def ended(entry: dict) -> list[dict]:
    """The runs that did not diverge; that with seed 0 is among them."""
    return [row for row in entry["runs"] if row["tokens"]]


def tokens_of(entry: dict) -> int:
    return ended(entry)[0]["tokens"][-1]


def losses_of(entry: dict) -> dict[int, float]:
    """The loss under the training orders by seed."""
    return {row["seed"]: row["losses"]["training"][-1] for row in ended(entry)}


def table(benchmark: Experiment) -> list[str]:
    """The leaderboard: run configs with results, the fewest tokens and the lowest loss first.
    Ingredients that did not pay stay there, though the benchmark no longer has them."""
    with damaged(results_file(benchmark), "remove it, and run its run configs again"):
        known = sorted(
            read_entries(benchmark).items(),
            key=lambda of: (tokens_of(of[1]), statistics.mean(losses_of(of[1]).values())),
        )
        lines = markdown_table(HEAD, [line(*of, benchmark.goal) for of in known])
        lines += ingredients(dict(known))
        if speeds_file(benchmark).exists():
            lines += ["", *time_table(benchmark)]
    missing = [name for name in benchmark.recipes[RECIPE] if name not in dict(known)]
    return [*lines, *(["", f"Not run yet: {', '.join(missing)}."] if missing else [])]


def ingredients(known: dict[str, dict]) -> list[str]:
    """What one change to "fast" gives, seed by seed: the run configs "fast-..." with as many
    tokens."""
    if not {"fast", "fast-x4"} <= known.keys():
        return []
    fast, longer = losses_of(known["fast"]), losses_of(known["fast-x4"])
    worth = WORTH * (statistics.mean(fast.values()) - statistics.mean(longer.values()))
    lines = []
    for name, entry in known.items():
        if not name.startswith("fast-") or tokens_of(entry) != tokens_of(known["fast"]):
            continue
        losses = losses_of(entry)
        differences = [losses[seed] - fast[seed] for seed in fast.keys() & losses.keys()]
        mean, half_width = mean_and_reach(differences)
        word = "no difference" if abs(mean) < half_width else "costs" if mean > 0 else "pays"
        if word == "pays" and -mean < worth:
            word = "too little"
        lines.append([name, f"{mean:+.4f} ± {half_width:.4f}", word, entry["description"]])
    return ["", *markdown_table(["one change", "any order", "it", "description"], sorted(lines))]


if __name__ == "__main__":
    run_script(main)
