"""Systems on tasks: who is right how often, in how many steps, decoded in which order.

configs/tasks/systems.toml says it all: a `base` configuration, `arms`, systems that are tuned
alike and trained over seeds on every one of the `tasks`, and `decoders`, by which each of them
answers the test split.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoints.load import Loaded, load
from data.tasks import TASKS
from evaluation.tasks import Questions, answer, open_questions
from evaluation.text_measures import mean_and_reach
from experiments import suite
from experiments.arms import ROOT, commits_of, read_arms, run_of
from experiments.kept import Kept
from experiments.report import tuned_cell
from experiments.suite import Experiment
from model import ModelConfig
from runtime.processes import Processes
from runtime.reports import markdown_table, new_figure, png
from runtime.schemas import read_toml
from sampling.modes import DecodingOptions, check_mode, with_mode_defaults
from training.config import Config

SYSTEMS = ROOT / "configs" / "tasks" / "systems.toml"
RESULTS = ROOT / "results" / "tasks"
RECIPE = "fast"
BATCH = 100  # records in flight
TOO_FEW = 0.01  # of the answers: nobody compares what it costs to be wrong


@dataclass(frozen=True)
class TaskExperiment:
    """One task, the systems that are trained on it, and how they decode."""

    task: str
    says: str
    """What is asked."""
    experiment: Experiment
    decoders: dict[str, DecodingOptions]
    """By name; without a temperature of their own, see `temperature_of`."""


def load_tasks(file: Path = SYSTEMS) -> dict[str, TaskExperiment]:
    """All tasks of a file, by name."""
    values = read_toml(file)
    arms, tasks = values.pop("arms"), values.pop("tasks")
    decoders = {
        name: DecodingOptions(**options) for name, options in values.pop("decoders").items()
    }
    found = {}
    for task, changes in tasks.items():
        says = changes.pop("says")
        fixed = {"data.folder": f"data/{task}", "model.block_size": TASKS[task].length}
        recipe = fixed | changes
        tables = {"recipe": recipe} | {name: {"from": "recipe"} | arms[name] for name in arms}
        recipes = {RECIPE: read_arms(tables, f"task {task}")}
        del recipes[RECIPE]["recipe"]
        settings = values | {"recipes": recipes, "x": {}, "claims": []}
        experiment = Experiment(name=f"tasks/{task}", **settings)
        found[task] = TaskExperiment(task, says, experiment, decoders)
    return found


# ---- decoding ------------------------------------------------------------------------------------


def temperature_of(task: str) -> float:
    """0, the likeliest tokens; 1 where the limit of samples is known."""
    return 1.0 if TASKS[task].limit else 0.0


def possible_decoders(of: TaskExperiment, model: ModelConfig) -> dict[str, DecodingOptions]:
    """Those of the decoders that a model can do, with all that they leave open."""
    found = {}
    for name, options in of.decoders.items():
        options = replace(
            options, temperature=temperature_of(of.task), batch_size=options.batch_size or BATCH
        )
        options = with_mode_defaults(options)
        with contextlib.suppress(ValueError):  # a plain GPT goes from left to right, say
            check_mode(options, model)
            found[name] = options
    return found


class Decodings:
    """What a run makes of the test split, decoder by decoder; it is loaded when the first of them
    is not known yet, and trained first where it is not there."""

    def __init__(self, of: TaskExperiment, config: Config, limit: int | None, kept: Kept):
        self.of, self.config, self.limit, self.kept = of, config, limit, kept

    def all(self) -> dict[str, dict]:
        """{decoder: `Answers.summary`}."""
        return {
            name: self.kept.of(
                self.config,
                [[f"limit {self.limit}", *changes_of(options)]],
                functools.partial(self.decode, options),
            )
            for name, options in possible_decoders(self.of, self.config.model).items()
        }

    def decode(self, options: DecodingOptions) -> dict:
        alone = Processes(0, 1, torch.device("cpu"))
        return answer(*self.asked, options, self.config.seed, alone).summary()

    @functools.cached_property
    def asked(self) -> tuple[Loaded, Questions]:
        loaded = load(run_of(self.config).config.run_folder)
        return loaded, open_questions(self.config.data.folder, "test", loaded, self.limit)


def changes_of(options: DecodingOptions) -> list[str]:
    """What options are, where they are not as by default: new options make no others of them."""
    default = vars(DecodingOptions())
    return [f"{key} {value}" for key, value in vars(options).items() if value != default[key]]


def run_task(
    of: TaskExperiment,
    seeds: int,
    jobs: int,
    quick: bool,
    limit: int | None,
    progress: Callable[[], None] = lambda: None,
    keep: Path | None = None,
) -> dict:
    """Train what is missing of a task, then decode with all of it. What the file `keep` holds of
    either is not done again, and what is done comes to it."""
    experiment = of.experiment
    trained = suite.train(experiment, [RECIPE], seeds, jobs, quick, progress, keep)[RECIPE]
    kept = Kept(keep)
    for name, found in trained.items():
        arm = experiment.recipes[RECIPE][name]
        for run in found["runs"]:
            config = experiment.config(RECIPE, arm, run["seed"], found["tuned"], quick)
            run["decoders"] = Decodings(of, config, limit, kept).all()
    return trained


# ---- tables --------------------------------------------------------------------------------------

HEAD = ["system", "decoded", "exact match", "possible", "NFE", "inputs", "ms a record"]


def values_of(arm: dict, decoder: str, key: str) -> list[float]:
    """A figure of a decoder, one a seed."""
    return [run["decoders"][decoder][key] for run in arm["runs"]]


def decoders_of(arm: dict) -> list[str]:
    return list(arm["runs"][0]["decoders"])


def mean_of(arm: dict, decoder: str, key: str) -> float:
    return statistics.mean(values_of(arm, decoder, key))


def share_cell(values: list[float]) -> str:
    """A share over seeds, with half its 95% interval."""
    mean, reach = mean_and_reach(values)
    return f"{mean:.1%}" if len(values) == 1 else f"{mean:.1%} +- {reach:.1%}"


def task_table(arms: dict[str, dict]) -> list[str]:
    """A line for every system and decoder."""
    rows = []
    for name, arm in arms.items():
        for decoder in decoders_of(arm):
            records = arm["runs"][0]["decoders"][decoder]["records"]
            rows.append(
                [
                    name,
                    decoder,
                    share_cell(values_of(arm, decoder, "exact_match")),
                    limit_cell(arm, decoder),
                    f"{mean_of(arm, decoder, 'nfe'):.1f}",
                    f"{mean_of(arm, decoder, 'token_forwards'):.0f}",
                    f"{1000 * mean_of(arm, decoder, 'seconds') / records:.1f}",
                ]
            )
    return markdown_table(HEAD, rows, left=2)


def best_decoder(arm: dict) -> str:
    """The one that is right most often; of equals the one with the fewest steps."""
    return max(
        decoders_of(arm),
        key=lambda d: (round(mean_of(arm, d, "exact_match"), 3), -mean_of(arm, d, "nfe")),
    )


@dataclass(frozen=True)
class Share:
    """Of right answers."""

    value: float
    answers: int
    over_seeds: float = 0.0
    """The standard error of the mean over seeds."""

    def error(self) -> float:
        """One standard error: the larger of that over answers, which is that of one answer where
        all are right or none, and that over seeds."""
        spread = max(self.value * (1 - self.value), 1 / self.answers)
        return max(math.sqrt(spread / self.answers), self.over_seeds)

    def ties(self, other: Share) -> bool:
        """Whether they differ by less than two standard errors or a hundredth."""
        difference = abs(self.value - other.value)
        return difference < max(0.01, 2 * math.hypot(self.error(), other.error()))


def share_of(arm: dict, decoder: str) -> Share:
    """Of the answers of all seeds."""
    answers = sum(run["decoders"][decoder]["records"] for run in arm["runs"])
    values = values_of(arm, decoder, "exact_match")
    over_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Share(statistics.mean(values), answers, over_seeds)


def against_l2r(arms: dict[str, dict]) -> str:
    """What any order is worth on a task: AO-GPT by its best decoder against the plain GPT."""
    if not {"aogpt", "gpt"} <= arms.keys():
        return "-"
    ours, gpt = (share_of(arms[name], best_decoder(arms[name])) for name in ("aogpt", "gpt"))
    if ours.ties(gpt):
        return "tie"
    return "wins" if ours.value > gpt.value else "loses"


def limit_cell(arm: dict, decoder: str) -> str:
    """The share of right answers that is possible, and whether it is met within two standard
    errors: those that as many answers would have if they were right as often as is possible, or
    those over seeds. Nothing where it is not known."""
    limits = values_of(arm, decoder, "limit")
    if None in limits:
        return ""
    share = share_of(arm, decoder)
    limit = Share(statistics.mean(limits), share.answers, share.over_seeds)
    met = abs(share.value - limit.value) <= 2 * limit.error()
    return f"{limit.value:.1%}" + (" (met)" if met else "")


def summary_table(results: dict[str, dict]) -> list[str]:
    """A line for every task: the best of each system, and what an encoder costs beside AO-GPT."""
    arms = list(next(iter(results.values())))
    rows = []
    for task, found in results.items():
        cells = []
        for arm in found.values():
            best = best_decoder(arm)
            cells.append(f"{share_cell(values_of(arm, best, 'exact_match'))} ({best})")
        rows.append([task, *cells, against_l2r(found), cost_cell(found)])
    return markdown_table(["task", *arms, "any order", "encoder / aogpt"], rows)


def cost_cell(arms: dict[str, dict], decoder: str = "confidence") -> str:
    """How many times the inputs and the seconds of AO-GPT an encoder takes by the same decoder, one
    position a step for both; nothing where they are not right as often, or hardly ever."""
    pair = [arms[name] for name in ("encoder", "aogpt") if name in arms]
    if len(pair) < 2 or any(decoder not in decoders_of(arm) for arm in pair):
        return "-"
    encoder, ours = (share_of(arm, decoder) for arm in pair)
    if min(encoder.value, ours.value) < TOO_FEW or not encoder.ties(ours):
        return "-"
    ratios = []
    for key in ("token_forwards", "seconds"):
        of_encoder, of_decoder = (mean_of(arm, decoder, key) for arm in pair)
        ratios.append(of_encoder / of_decoder)
    return "{:.1f}x inputs, {:.1f}x time".format(*ratios)


# ---- the figure and the page ---------------------------------------------------------------------


def figure(results: dict[str, dict]) -> bytes:
    """PNG: a panel for each task, exact match over NFE, a point for each system and decoder."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    drawing, grid = new_figure(rows, columns, (4.6 * columns, 3.6 * rows), squeeze=False)
    for axes in grid.flat[len(results) :]:
        axes.remove()
    for axes, (task, arms) in zip(grid.flat, results.items(), strict=False):
        for number, (name, arm) in enumerate(arms.items()):
            points = sorted(
                (mean_of(arm, d, "nfe"), mean_of(arm, d, "exact_match"), d)
                for d in decoders_of(arm)
            )
            nfe, share, _ = zip(*points, strict=True)
            axes.plot(nfe, share, "osD^"[number % 4], label=name, alpha=0.7, markersize=5)
        axes.set(title=task, xlabel="NFE", ylabel="exact match", ylim=(-0.05, 1.05))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return png(drawing, dpi=120)


INTRODUCTION = """# Systems on tasks

    python tasks.py star sudoku6 --jobs 2     # train what is missing of these tasks, and decode
    python tasks.py page                      # this page

Systems of equal size, each tuned alike, trained over seeds, and asked a thousand records (reversal:
a hundred) whose keys none of those has that they were trained on ([data](../docs/data.md)). Exact
match: all of an answer is right, mean over seeds with half its 95% interval; decoded greedily, but
copy, replace and shuffle at temperature 1, where what is *possible* for perfect conditionals is
known in closed form, and *met* if it is within two standard errors. NFE: passes that a record took
part in; inputs: tokens that they were fed, a record. A cell of the first table is a system's best
decoder. Any order *wins* if AO-GPT's is right more often than the plain GPT's, by two standard
errors and a hundredth; the last column is what the encoder costs beside AO-GPT where both are right
as often, by confidence, one position a step."""


def page(tasks: dict[str, TaskExperiment], results: dict[str, dict]) -> str:
    """results: the arms of each task, as `run_task` gives them."""
    first = next(iter(results.values()))
    sizes = ", ".join(f"{name} {arm['parameters']:,}" for name, arm in first.items())
    setting = next(iter(tasks.values())).experiment.setting
    lines = [INTRODUCTION, "", f"{setting} Parameters: {sizes}.", "", *summary_table(results), ""]
    lines += ["![exact match over NFE](tasks/tasks.png)", ""]
    for task, arms in results.items():
        tuned = ", ".join(f"{name} {tuned_cell(arm['tuned'])}" for name, arm in arms.items())
        commits = commits_of(run for arm in arms.values() for run in arm["runs"])
        tokens = {run["tokens"][-1] for arm in arms.values() for run in arm["runs"]}
        told = ", ".join(f"{n / 1e6:.1f}M" for n in sorted(tokens))
        lines += [f"## {task}: {tasks[task].says}", "", *task_table(arms), ""]
        lines += [f"{told} tokens. Tuned: {tuned}. Commit {commits}.", ""]
    if missing := [task for task in tasks if task not in results]:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join(lines).rstrip() + "\n"
