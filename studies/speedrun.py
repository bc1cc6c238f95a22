"""How few tokens does an any-order model need? Train run configs of a benchmark.

    python -m studies.speedrun bytes                              # the leaderboard
    python -m studies.speedrun bytes paper fast --jobs 2          # train, resumed if interrupted
    python -m studies.speedrun bytes paper fast --repetitions 3   # measure their speed, in turn

A benchmark (studies/configs/speedrun) is an experiment with a goal, an any-order validation loss;
it fixes data, block size and evaluation. Run configs are tuned alike: the benchmark's tuning seeds
are trained with values under `tune`, and the lowest final loss decides.
Results are the rows of results/speedrun/BENCHMARK.runs.jsonl, of which the leaderboard is made.
"""

import contextlib
import itertools
import json
import math
import re
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, commit, markdown_table, versions
from aogpt.runtime.validation import (
    Count,
    FileError,
    check_values,
    damaged,
    read_bounded,
    read_toml,
)
from aogpt.training.config import Config
from studies.bench_common import cpu_name, spread_of
from studies.experiment import Experiment, laid_over, read_run_configs
from studies.pages import mean_cell, mean_tokens_to, tuned_cell, value_of
from studies.runner import MissingRow, Results, Runner, commits_of
from studies.runs import ROOT, finished_run, speed_of

CONFIGS = ROOT / "studies" / "configs" / "speedrun"
RESULTS = ROOT / "results" / "speedrun"
OUT = Path("out") / "speedrun"
RECIPE = ""  # the only one
# at least, in a run that is timed
TIMED_TOKENS = 100_000
TIMED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Arguments:
    benchmark: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/speedrun without its suffix."""
    run_configs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run configs of the benchmark to train; none: print the leaderboard."""
    seeds: Count = 3
    jobs: Count = 1
    """Runs in parallel on a CPU, each with one thread."""
    processes: Count = 1
    """Processes of each run, one for each GPU of this machine, started by torchrun."""
    repetitions: Count | None = None
    """Instead of training, measure speed by short runs: each run config this often, in turn."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    benchmark = load_benchmark(a.benchmark)
    run_configs = benchmark.recipes[RECIPE]
    for name in a.run_configs:
        if name not in run_configs:
            raise UserError(
                f"no run config is {name!r}; {a.benchmark} has {', '.join(run_configs)}"
            )
    if a.repetitions and a.run_configs:
        measure_speeds(benchmark, a)
        show(*time_table(benchmark), sep="\n")
    elif a.run_configs:
        train(benchmark, a)
    else:
        show(*table(benchmark), sep="\n")


def train(benchmark: Experiment, a: Arguments) -> None:
    """Train run configs; print their results."""
    results = Results(file_of(benchmark, ".runs.jsonl"))
    experiment = only(benchmark, a.run_configs)
    runner = Runner(experiment, results, jobs=a.jobs, processes=a.processes)
    entries = runner.train(a.seeds)[RECIPE]
    lines = [line(name, entries[name], benchmark.goal) for name in a.run_configs]
    show(*markdown_table(HEAD, lines), sep="\n")


def only(benchmark: Experiment, names: tuple[str, ...]) -> Experiment:
    """Return the benchmark with these run configs."""
    chosen = {name: benchmark.recipes[RECIPE][name] for name in names}
    return replace(benchmark, recipes={RECIPE: chosen})


def load_benchmark(name: str) -> Experiment:
    """Read studies/configs/speedrun/NAME.toml: `goal`, `base` and `run_configs`. With `from` it
    names another benchmark, over whose base and run configs it lays its own; `length` scales the
    numbers of steps of that one."""
    with damaged(
        CONFIGS / f"{name}.toml", "compare it with studies/configs/speedrun/gpt2.toml"
    ):
        values = read_values(name)
        run_configs = read_run_configs(values.pop("run_configs"), f"benchmark {name}")
        values.pop("retired", None)
        return Experiment(
            name=name, out=OUT / name, recipes={RECIPE: run_configs}, **values
        )


def read_values(name: str) -> dict:
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.toml")))
        raise FileError(f"there is no benchmark {name!r}; choose one of {known}")
    values = read_toml(path)
    if "from" not in values:
        return values
    source = read_values(values.pop("from"))
    length = values.pop("length", 1)
    tables = [
        source["base"]["train"],
        source["base"]["eval"],
        *source["run_configs"].values(),
    ]
    for table in tables:
        for key in {"steps", "interval", "train.steps", "eval.interval"} & table.keys():
            table[key] = round(length * table[key])
    for part in ("base", "run_configs"):
        source[part] = laid_over(source[part], values.pop(part, {}))
    return source | values


def file_of(benchmark: Experiment, suffix: str) -> Path:
    return RESULTS / f"{benchmark.name}{suffix}"


def load_entries(benchmark: Experiment) -> dict[str, dict]:
    """Return the results of each run config that has some, made of the rows of its runs; also of
    retired ones, which the benchmark no longer trains."""
    results = Results(file_of(benchmark, ".runs.jsonl"), complete=True)
    seeds_of: dict[str, int] = {}
    for row in results.rows.values():
        name, seed = re.fullmatch(
            r"(.*?)(?:_.*)?_s(\d+)", Path(row["run"]).name
        ).groups()
        seeds_of[name] = max(seeds_of.get(name, 0), int(seed) + 1)
    entries = {}
    for name in benchmark.recipes[RECIPE]:
        # Seeds after the first may be of a rate that is no longer the best.
        for seeds in range(seeds_of.get(name, 0), 0, -1):
            with contextlib.suppress(MissingRow):
                runner = Runner(only(benchmark, (name,)), results)
                entries[name] = runner.train(seeds)[RECIPE][name]
                break
    for name, retired in read_retired(benchmark.name).items():
        place = re.compile(rf"{re.escape(name)}_{retired['runs']}_s\d+")
        rows = [
            row["result"]
            for row in results.rows.values()
            if place.fullmatch(Path(row["run"]).name)
        ]
        runs = sorted(rows, key=lambda result: result["seed"])
        entries[name] = retired | {"runs": runs}
    return entries


def read_retired(name: str) -> dict[str, dict]:
    """Return the run configs that a benchmark no longer trains: {"description", "tuned",
    "at_boundary", "runs": the tuned value as it is in the names of their runs}."""
    return read_toml(CONFIGS / f"{name}.toml").get("retired", {})


def measure_speeds(benchmark: Experiment, a: Arguments) -> None:
    """Write the tokens per second of run configs with results, measured in turn, so that other work
    of the machine affects all of them alike."""
    entries = load_entries(benchmark)
    for name in a.run_configs:
        if name not in entries:
            raise UserError(
                f"{name} has no results: run it first, without --repetitions"
            )
    speeds: dict[str, list[float]] = {name: [] for name in a.run_configs}
    for _, name in itertools.product(range(a.repetitions), speeds):
        run_config = benchmark.recipes[RECIPE][name]
        tuned = entries[name]["tuned"]
        config = benchmark.config(RECIPE, run_config, 0, tuned)
        speeds[name].append(speed_of_short_run(config, a.processes))
        show(f"{name}: {speeds[name][-1]:,.0f} tokens per second", flush=True)
    made = {
        "command": command(),
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": versions(),
    }
    write_json(file_of(benchmark, ".speeds.json"), {"tokens_per_second": speeds} | made)


def speed_of_short_run(config: Config, processes: int) -> float:
    """Return tokens per second of the first steps of a run, in a temporary folder."""
    tokens = config.train.batch_size * config.model.block_size
    steps = max(TIMED_STEPS, math.ceil(TIMED_TOKENS / tokens))
    with tempfile.TemporaryDirectory() as folder:
        steps_of = replace(config.train, steps=steps, log_interval=steps // 10)
        optim = replace(
            config.optim, warmup_steps=min(config.optim.warmup_steps, steps)
        )
        validation = replace(config.eval, interval=steps, sequences=1)
        short = replace(
            config, out=folder, train=steps_of, optim=optim, eval=validation
        )
        return speed_of(finished_run(short, processes))


def time_table(benchmark: Experiment) -> list[str]:
    """Return the duration of runs at their measured speeds, and until they reach the
    goal, as shares of the first run config's, repetition by repetition: the median, and
    the least and largest."""
    file = file_of(benchmark, ".speeds.json")
    with damaged(file, "remove it, and measure again"):
        speeds = json.loads(read_bounded(file))["tokens_per_second"]
    entries = load_entries(benchmark)
    first = next(iter(speeds))
    durations = [tokens_of(entries[first]) / speed for speed in speeds[first]]

    def share(tokens: float | None, of: list[float]) -> str:
        pairs = zip(of, durations, strict=True)
        return (
            spread_of([tokens / speed / whole for speed, whole in pairs])
            if tokens
            else "-"
        )

    lines = []
    for name, of in speeds.items():
        tokens = tokens_of(entries[name])
        rows = entries[name]["runs"]
        loss = mean_cell([value_of(row, "random") for row in ended(entries[name])])
        cells = [loss, spread_of([speed / 1000 for speed in of])]
        cells += [f"{tokens / statistics.median(of):.0f}", share(tokens, of)]
        lines.append(
            [name, *cells, share(mean_tokens_to(benchmark.goal, rows, "random"), of)]
        )
    head = [
        "run config",
        "any order",
        "1,000 tokens per second",
        "seconds",
        f"of {first}'s",
    ]
    return markdown_table([*head, "to the goal"], lines)


HEAD = [
    "run config",
    "any order",
    "left to right",
    "seeds",
    "tokens",
    "to the goal",
    "minutes",
]
HEAD += ["tuned", "commit", "description"]


def table(benchmark: Experiment) -> list[str]:
    """Return the leaderboard: run configs with results, the fewest tokens and the
    lowest loss first. Ingredients that did not pay stay there, though the benchmark no
    longer has them."""
    known = load_entries(benchmark)
    place = {
        n: (tokens_of(e), statistics.mean(losses_of(e).values()))
        for n, e in known.items()
    }
    ranked = sorted(known, key=place.get)
    lines = markdown_table(
        HEAD, [line(name, known[name], benchmark.goal) for name in ranked]
    )
    lines += ingredients(known)
    if file_of(benchmark, ".speeds.json").exists():
        lines += ["", *time_table(benchmark)]
    missing = [name for name in benchmark.recipes[RECIPE] if name not in known]
    return [*lines, *(["", f"Not run yet: {', '.join(missing)}."] if missing else [])]


def line(name: str, entry: dict, goal: float) -> list[str]:
    """Return the losses of the seeds, or their mean with its 95% CI; tokens and minutes
    are means."""
    rows = ended(entry)
    reached = mean_tokens_to(goal, entry["runs"], "random")
    minutes = statistics.mean(
        r["tokens"][-1] / r["tokens_per_second"] / 60 for r in rows
    )
    losses = [
        mean_cell([value_of(row, kind) for row in rows]) for kind in ("random", "l2r")
    ]
    tokens = [
        "-" if n is None else f"{n / 1e6:.2f}M" for n in (tokens_of(entry), reached)
    ]
    told = [tuned_cell(entry), commits_of(entry["runs"]), entry["description"]]
    return [name, *losses, str(len(rows)), *tokens, f"{minutes:.1f}", *told]


def ended(entry: dict) -> list[dict]:
    """Return the runs that did not diverge; that with seed 0 is among them."""
    return [row for row in entry["runs"] if row["tokens"]]


def tokens_of(entry: dict) -> int:
    return ended(entry)[0]["tokens"][-1]


def losses_of(entry: dict) -> dict[int, float]:
    """Return the loss under the training orders by seed."""
    return {row["seed"]: row["losses"]["training"][-1] for row in ended(entry)}


def ingredients(known: dict[str, dict]) -> list[str]:
    """Return what one change to "fast" gives, seed by seed: run configs "fast-..." with
    equal tokens."""
    if "fast" not in known:
        return []
    fast = losses_of(known["fast"])
    lines = []
    for name, entry in sorted(known.items()):
        if name.startswith("fast-") and tokens_of(entry) == tokens_of(known["fast"]):
            losses = losses_of(entry)
            differences = [losses[seed] - fast[seed] for seed in losses if seed in fast]
            lines.append([name, mean_cell(differences, "+.3f"), entry["description"]])
    return [
        "",
        *markdown_table(["one change", "loss minus fast's", "description"], lines),
    ]


if __name__ == "__main__":
    run_script(main)
