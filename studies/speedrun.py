"""How few tokens does an any-order model need? Train run configs of a benchmark.

    python -m studies.speedrun bytes                             # the leaderboard
    python -m studies.speedrun bytes paper fast --jobs 2         # train, or resume
    python -m studies.speedrun bytes paper fast --repetitions 3  # speed, in turn

A benchmark (studies/configs/speedrun) is an experiment with a goal, an any-order
validation loss; it fixes data, block size and evaluation. Run configs are tuned alike:
the benchmark's tuning seeds are trained with values under `tune`, and the lowest final
loss decides. Results are the rows of results/speedrun/BENCHMARK.runs.jsonl, of which
the leaderboard is made.
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

from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, markdown_table, versions
from aogpt.runtime.validation import (
    Count,
    FileError,
    check_values,
    read_bounded,
    read_toml,
)
from aogpt.training.config import Config
from studies.bench_common import cpu_name, spread_of
from studies.experiment import Experiment, damaged, laid_over, read_run_configs
from studies.pages import mean_cell, mean_tokens_to, tuned_cell, value_of
from studies.runner import MissingRow, Results, Runner, commits_of
from studies.runs import ROOT, commit, finished_run, speed_of

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
    """Instead of training, measure speed by short runs: each run config this often, in
    turn."""


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
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
        show("\n".join(time_table(benchmark)))
    elif a.run_configs:
        train(benchmark, a)
    else:
        show("\n".join(table(benchmark)))


def train(benchmark: Experiment, a: Arguments) -> None:
    results = Results(file_of(benchmark, ".runs.jsonl"))
    experiment = only(benchmark, a.run_configs)
    runner = Runner(experiment, results, jobs=a.jobs, processes=a.processes)
    entries = runner.train(a.seeds)[RECIPE]
    chosen = {name: entries[name] for name in a.run_configs}
    show("\n".join(results_table(chosen, benchmark.goal)))


def only(benchmark: Experiment, names: tuple[str, ...]) -> Experiment:
    """Return the benchmark with these run configs."""
    run_configs = benchmark.recipes[RECIPE]
    chosen = {name: run_configs[name] for name in names}
    return replace(benchmark, recipes={RECIPE: chosen})


def load_benchmark(name: str) -> Experiment:
    """Read studies/configs/speedrun/NAME.toml: `goal`, `base` and `run_configs`. With
    `from` it names another benchmark, over whose base and run configs it lays its own;
    `length` scales the numbers of steps of that one."""
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
        names = sorted(file.stem for file in CONFIGS.glob("*.toml"))
        raise FileError(
            f"there is no benchmark {name!r}; choose one of {', '.join(names)}"
        )
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
        for key in ("steps", "interval", "train.steps", "eval.interval"):
            if key in table:
                table[key] = round(length * table[key])
    for part in ("base", "run_configs"):
        changes = values.pop(part, {})
        values[part] = laid_over(source[part], changes)
    source.update(values)
    return source


def file_of(benchmark: Experiment, suffix: str) -> Path:
    return RESULTS / f"{benchmark.name}{suffix}"


def load_entries(benchmark: Experiment) -> dict[str, dict]:
    """Return the results of each run config that has some, made of the rows of its
    runs; also of retired ones, which the benchmark no longer trains."""
    results = Results(file_of(benchmark, ".runs.jsonl"), complete=True)
    by_run = {}
    seeds_of: dict[str, int] = {}
    for row in results.rows.values():
        run = Path(row["run"]).name
        by_run[run] = row["result"]
        name, seed = re.fullmatch(r"(.*?)(?:_.*)?_s(\d+)", run).groups()
        seeds_of[name] = max(seeds_of.get(name, 0), int(seed) + 1)
    entries = {}
    for name in benchmark.recipes[RECIPE]:
        # Seeds after the first may be of a rate that is no longer the best.
        for seeds in range(seeds_of.get(name, 0), 0, -1):
            with contextlib.suppress(MissingRow):
                runner = Runner(only(benchmark, (name,)), results)
                entries[name] = runner.train(seeds)[RECIPE][name]
                break
    for name, entry in read_retired(benchmark.name).items():
        pattern = rf"{re.escape(name)}_{entry['runs']}_s\d+"
        runs = [by_run[run] for run in by_run if re.fullmatch(pattern, run)]
        runs.sort(key=lambda result: result["seed"])
        entry["runs"] = runs
        entries[name] = entry
    return entries


def read_retired(name: str) -> dict[str, dict]:
    """Return the run configs that a benchmark no longer trains: {"description",
    "tuned", "at_boundary", "runs": the tuned value as it is in the names of their
    runs}."""
    return read_toml(CONFIGS / f"{name}.toml").get("retired", {})


def measure_speeds(benchmark: Experiment, a: Arguments) -> None:
    """Write the tokens per second of run configs with results, measured in turn, so
    that other work of the machine affects all of them alike."""
    entries = load_entries(benchmark)
    for name in a.run_configs:
        if name not in entries:
            raise UserError(
                f"{name} has no results: run it first, without --repetitions"
            )
    configs = {}
    for name in a.run_configs:
        run_config = benchmark.recipes[RECIPE][name]
        tuned = entries[name]["tuned"]
        configs[name] = benchmark.config(RECIPE, run_config, 0, tuned)
    speeds = speeds_in_turn(configs, a.repetitions, a.processes)
    report = {
        "tokens_per_second": speeds,
        "command": command(),
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": versions(),
    }
    write_json(file_of(benchmark, ".speeds.json"), report)


def speeds_in_turn(
    configs: dict[str, Config], repetitions: int, processes: int = 1
) -> dict[str, list[float]]:
    """Return the tokens per second of each repetition of short runs, by name."""
    speeds: dict[str, list[float]] = {}
    for _, (name, config) in itertools.product(range(repetitions), configs.items()):
        speed = speed_of_short_run(config, processes)
        speeds.setdefault(name, []).append(speed)
        show(f"{name}: {speed:,.0f} tokens per second", flush=True)
    return speeds


def speed_of_short_run(config: Config, processes: int) -> float:
    """Return tokens per second of the first steps of a run, in a temporary folder."""
    tokens = config.train.batch_size * config.model.block_size
    steps = max(TIMED_STEPS, math.ceil(TIMED_TOKENS / tokens))
    with tempfile.TemporaryDirectory() as folder:
        warmup = min(config.optim.warmup_steps, steps)
        short = replace(
            config,
            out=folder,
            train=replace(config.train, steps=steps, log_interval=steps // 10),
            optim=replace(config.optim, warmup_steps=warmup),
            eval=replace(config.eval, interval=steps, sequences=1),
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
    lines = []
    for name, own_speeds in speeds.items():
        entry = entries[name]
        tokens = tokens_of(entry)
        to_goal = mean_tokens_to(benchmark.goal, entry["runs"], "random")
        seconds = tokens / statistics.median(own_speeds)
        lines.append(
            [
                name,
                loss_cell(entry, "random"),
                spread_of([speed / 1000 for speed in own_speeds]),
                f"{seconds:.0f}",
                share_cell(tokens, own_speeds, durations),
                share_cell(to_goal, own_speeds, durations),
            ]
        )
    head = [
        "run config",
        "any order",
        "1,000 tokens per second",
        "seconds",
        f"of {first}'s",
        "to the goal",
    ]
    return markdown_table(head, lines)


def share_cell(
    tokens: float | None, speeds: list[float], durations: list[float]
) -> str:
    """Return the time of these tokens at each speed as a share of a duration; a dash
    for no tokens."""
    if tokens is None:
        return "-"
    shares = []
    for speed, duration in zip(speeds, durations, strict=True):
        shares.append(tokens / speed / duration)
    return spread_of(shares)


def table(benchmark: Experiment) -> list[str]:
    """Return the leaderboard: run configs with results, the fewest tokens and the
    lowest loss first. Ingredients that did not pay stay there, though the benchmark no
    longer has them."""
    entries = load_entries(benchmark)

    def rank(name: str) -> tuple[int, float]:
        losses = losses_of(entries[name])
        return tokens_of(entries[name]), statistics.mean(losses.values())

    ranked = {name: entries[name] for name in sorted(entries, key=rank)}
    lines = results_table(ranked, benchmark.goal)
    lines += ingredients(entries)
    if file_of(benchmark, ".speeds.json").exists():
        lines += ["", *time_table(benchmark)]
    missing = [name for name in benchmark.recipes[RECIPE] if name not in entries]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return lines


def results_table(entries: dict[str, dict], goal: float) -> list[str]:
    """Return a line for each run config: the losses of the seeds, or their mean with
    its 95% CI; tokens and minutes are means."""
    lines = []
    for name, entry in entries.items():
        rows = ended(entry)
        minutes = [row["tokens"][-1] / row["tokens_per_second"] / 60 for row in rows]
        to_goal = mean_tokens_to(goal, entry["runs"], "random")
        lines.append(
            [
                name,
                loss_cell(entry, "random"),
                loss_cell(entry, "l2r"),
                str(len(rows)),
                millions(tokens_of(entry)),
                "-" if to_goal is None else millions(to_goal),
                f"{statistics.mean(minutes):.1f}",
                tuned_cell(entry),
                commits_of(entry["runs"]),
                entry["description"],
            ]
        )
    head = ["run config", "any order", "left to right", "seeds", "tokens"]
    head += ["to the goal", "minutes", "tuned", "commit", "description"]
    return markdown_table(head, lines)


def loss_cell(entry: dict, kind: str) -> str:
    return mean_cell([value_of(row, kind) for row in ended(entry)])


def millions(tokens: float) -> str:
    return f"{tokens / 1e6:.2f}M"


def ended(entry: dict) -> list[dict]:
    """Return the runs that did not diverge; that with seed 0 is among them."""
    return [row for row in entry["runs"] if row["tokens"]]


def tokens_of(entry: dict) -> int:
    return ended(entry)[0]["tokens"][-1]


def losses_of(entry: dict) -> dict[int, float]:
    losses = {}
    for row in ended(entry):
        losses[row["seed"]] = row["losses"]["training"][-1]
    return losses


def ingredients(entries: dict[str, dict]) -> list[str]:
    """Return what one change to "fast" gives, seed by seed: run configs "fast-..." with
    equal tokens."""
    if "fast" not in entries:
        return []
    tokens = tokens_of(entries["fast"])
    fast = losses_of(entries["fast"])
    lines = []
    for name, entry in sorted(entries.items()):
        if name.startswith("fast-") and tokens_of(entry) == tokens:
            differences = []
            for seed, loss in losses_of(entry).items():
                if seed in fast:
                    differences.append(loss - fast[seed])
            difference = mean_cell(differences, "+.3f")
            lines.append([name, difference, entry["description"]])
    head = ["one change", "loss minus fast's", "description"]
    return ["", *markdown_table(head, lines)]


if __name__ == "__main__":
    run_script(main)
