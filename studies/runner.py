"""The runner of findings, speedrun and tasks: run configs are tuned alike, trained over
seeds and measured, and the result of every run is saved as a row of a JSONL file.

With the file at hand its runs are not trained again. A row is {"run": folder, "key":
..., "result": {"seed", "commit", "tokens", "losses", "measured", "tokens_per_second"}}:
validation losses by kind at each evaluation, and figures {name: [value, standard error
or None]}.
"""

import hashlib
import itertools
import json
import math
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from aogpt.data.loader import find_dataset
from aogpt.runtime.command_line import show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_jsonl
from aogpt.runtime.validation import Count
from aogpt.systems import build_on_meta, flops_per_token
from aogpt.training import config as configuration
from aogpt.training.config import Config
from studies.experiment import Experiment, RunConfig, Values
from studies.measures import Measured, least_loss, measured_by, unigram
from studies.runs import (
    finished_run,
    main_loss,
    rows_by,
    speed_of,
    trained_by,
    validations_of,
)
from studies.verdicts import figure_of

Recipes = dict[str, dict[str, dict]]
"""By recipe and run config: {"description", "tuning": [{"tuned", "loss"}], "tuned",
"tuned_as", "at_boundary", "parameters", "flops" (per trained token), "runs": [the
result of each seed]}."""


Place = tuple[int, ...]  # of a grid of values to tune


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    seeds: Count | None = None
    """By default those of the experiment. Others give results in out/findings/part."""
    jobs: Count = 1
    """Runs in parallel on a CPU, each with one thread."""
    quick: bool = False
    """A few steps of every run config of the first recipe, untuned, to see that
    everything runs. Results go to out/findings/quick."""


class MissingRow(UserError):
    """A result is asked for whose run has no row."""


class Results:
    """The rows of a JSONL file, and those that are added; its methods may be called by
    threads.

    file: None saves nothing. complete: nothing is added; a missing row raises
    MissingRow."""

    def __init__(self, file: Path | None = None, complete: bool = False):
        self.file = file
        self.complete = complete
        self.lock = threading.Lock()
        self.rows = rows_by("key", file) if file else {}

    def of(
        self, config: Config, commands: list[list[str]], make: Callable[[], dict]
    ) -> dict:
        """Return the result of a run that is measured by these commands: the saved one,
        or else that of `make`, which is saved."""
        key = key_of(config, commands)
        if key not in self.rows and self.complete:
            raise MissingRow(f"{self.file} has no row of {config.run_folder}")
        if key not in self.rows:
            row = {"run": str(config.run_folder), "key": key, "result": make()}
            with self.lock:
                self.save(row)
        return self.rows[key]["result"]

    def save(self, row: dict) -> None:
        """Add a row, to the file as well, which another process may have written."""
        if self.file is None:
            self.rows[row["key"]] = row
            return
        name = hashlib.sha256(str(self.file.resolve()).encode()).hexdigest()
        with FileLock(Path(tempfile.gettempdir()) / f"aogpt-{name[:16]}.lock"):
            self.rows.update(rows_by("key", self.file))
            self.rows[row["key"]] = row
            write_jsonl(self.file, self.rows.values())


def key_of(config: Config, commands: list[list[str]]) -> str:
    """Return what identifies a run and its measures. Keys with their default values do
    not count, so that a new option invalidates no results."""
    values = {}
    changed = configuration.differences(Config(), config)
    for key, (_, new) in changed.items():
        values[key] = new
    identity = [values, commands]
    text = json.dumps(identity, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]


def commits_of(results: Iterable[dict]) -> str:
    """Return all commits of some results, each once; a run that was resumed has
    several."""
    commits = set()
    for result in results:
        commits.update(result["commit"].split(", "))
    return ", ".join(sorted(commits))


def search(
    tune: dict[str, list],
    loss_of: Callable[[Values], float],
    at_hand: Callable[[Values], bool] = lambda values: False,
    equal_to_middle: bool = False,
) -> list[tuple[Values, float]]:
    """Try the middle of the grid and its neighbours along every key, then neighbours of
    the best point, until all of its own have been tried: where the loss is flat, chance
    would lead away from better values. Of equal losses the lowest values count, so that
    it goes down where every run has diverged; with `equal_to_middle` those nearest to
    the middle. Points whose loss is at hand count as tried. Returns those tried, with
    their losses, such that the first of equal losses counts; nothing if there is only
    one point."""
    sizes = [len(values) for values in tune.values()]
    if math.prod(sizes) <= 1:
        return []

    def values_at(place: Place) -> Values:
        chosen = {}
        for number, key in zip(place, tune, strict=True):
            chosen[key] = tune[key][number]
        return chosen

    middle = tuple(size // 2 for size in sizes)

    def in_order(places: Iterable[Place]) -> list[Place]:
        """Return points such that the first of equal losses counts."""
        places = sorted(places)
        if equal_to_middle:
            places.sort(key=lambda place: math.dist(place, middle))
        return places

    tried = {}
    for place in itertools.product(*map(range, sizes)):
        if at_hand(values_at(place)):
            tried[place] = loss_of(values_at(place))
    while True:
        best = min(in_order(tried), key=tried.get, default=middle)
        places = around(middle, sizes) + around(best, sizes)
        left = [place for place in places if place not in tried]
        if not left:
            break
        place = left[0]
        tried[place] = loss_of(values_at(place))
    return [(values_at(place), tried[place]) for place in in_order(tried)]


def around(place: Place, sizes: list[int]) -> list[Place]:
    """Return a point of a grid and its neighbours along every axis."""
    places = [place]
    for axis, size in enumerate(sizes):
        for step in (1, -1):
            moved = list(place)
            moved[axis] += step
            if 0 <= moved[axis] < size:
                places.append(tuple(moved))
    return places


def best_of(run_config: RunConfig, tried: list[tuple[Values, float]]) -> Values:
    """Return the choice whose run ended lowest; the middle one if none was tried.
    Raises UserError if all runs diverged, which have infinite losses."""
    if not tried:
        return run_config.untuned
    values, loss = min(tried, key=lambda pair: pair[1])
    if loss == math.inf:
        raise UserError(
            f"no run of {run_config.name} ended: lower the values that it tunes"
        )
    return values


def with_best(best_of: dict[str, list[str]], entries: dict[str, dict]) -> dict:
    """Return the entries of a recipe with one more for each name of `best_of`: a copy
    of that of the run config whose tuning runs ended lowest. A name has no entry where
    one of its run configs has no results or is not tuned.

    best_of: names, and the run configs that each may stand for."""
    result = dict(entries)
    for name, candidates in best_of.items():
        losses = {}
        for candidate in candidates:
            tuning = entries.get(candidate, {}).get("tuning")
            if tuning:
                losses[candidate] = min(row["loss"] for row in tuning)
        if len(losses) == len(candidates):
            result[name] = entries[min(losses, key=losses.get)]
    return result


@dataclass
class Runner:
    """Makes the runs of an experiment; its methods may be called by threads."""

    experiment: Experiment
    results: Results
    jobs: int = 1  # runs at a time
    processes: int = 1  # of each run
    quick: bool = False
    partial: bool = False  # leave out run configs whose rows are missing
    chosen: tuple[str, ...] = ()  # names of run configs; all if empty
    lock: threading.Lock = field(default_factory=threading.Lock)

    def train(self, seeds: int) -> Recipes:
        """Tune every run config, then train its seeds with the best value, and measure
        them. Nothing is tuned with `quick`.

        Runs are tuned at full length: short runs are still on the unigram plateau,
        where all rates do equally well, and the best rate there is not the best one
        later."""
        pool = ThreadPoolExecutor(self.jobs)
        try:
            recipes = {}
            for recipe in self.experiment.recipes:
                recipes[recipe] = self.train_recipe(recipe, seeds, pool)
            return recipes
        finally:  # after an error or an interrupt no further run starts
            pool.shutdown(cancel_futures=True)

    def train_recipe(
        self, recipe: str, seeds: int, pool: ThreadPoolExecutor
    ) -> dict[str, dict]:
        """Tune, train and measure the run configs of a recipe."""
        run_configs = {}
        for name, one in self.experiment.recipes[recipe].items():
            if not self.chosen or name in self.chosen:
                run_configs[name] = one
        tuning = {}
        for one in run_configs.values():
            names = tuple(self.tuned_on(one))
            if names not in tuning:
                sources = [self.experiment.recipes[recipe][name] for name in names]
                tuning[names] = pool.submit(self.tune, recipe, sources)
        entries: dict[str, dict] = {}
        for one in run_configs.values():
            pairs = self.result_at_hand(tuning[tuple(self.tuned_on(one))])
            if pairs is not None:
                entries[one.name] = self.entry(recipe, one, pairs, seeds, pool)
        complete = {}
        for name, entry in entries.items():
            runs = [self.result_at_hand(future) for future in entry["runs"]]
            if None not in runs:
                entry["runs"] = runs
                complete[name] = entry
        return complete

    def result_at_hand(self, future: Future):
        """Return the result of a future; None if it lacks a row and results may be
        partial."""
        try:
            return future.result()
        except MissingRow:
            if not self.partial:
                raise
            return None

    def entry(
        self,
        recipe: str,
        one: RunConfig,
        pairs: list[tuple[Values, float]],
        seeds: int,
        pool: ThreadPoolExecutor,
    ) -> dict:
        """Return what is known of a run config before its runs, and its runs as
        futures.

        pairs: what its tuning has tried, with losses."""
        tuned = best_of(one, pairs)
        tuning_rows = []
        for values, loss in pairs:
            tuning_rows.append({"tuned": values, "loss": loss})
        at_boundary = False
        for key, grid in one.tune.items():
            if pairs and tuned[key] in (grid[0], grid[-1]):
                at_boundary = True
        config = self.experiment.config(recipe, one, 0, tuned)
        model = build_on_meta(config.model)
        return {
            "description": one.description,
            "tuning": tuning_rows,
            "tuned": tuned,
            "tuned_as": one.tuned_as,
            "at_boundary": at_boundary,
            "parameters": sum(p.numel() for p in model.parameters()),
            "flops": flops_per_token(config.model, config.model.block_size),
            "runs": [
                pool.submit(self.run, recipe, one, seed, tuned)
                for seed in self.experiment.seeds_in(recipe, one.name, seeds)
            ],
        }

    def tuned_on(self, run_config: RunConfig) -> list[str]:
        """Return the run configs on which the values of this one are tuned."""
        return self.experiment.tune_on or [run_config.tuned_as or run_config.name]

    def tune(
        self, recipe: str, run_configs: list[RunConfig]
    ) -> list[tuple[Values, float]]:
        """Return what `search` tries, by the mean over these run configs and the tuning
        seeds."""

        success = self.experiment.tune_by_success

        def runs(tuned: Values) -> list[tuple[Config, list[list[str]]]]:
            runs = []
            for one in run_configs:
                for seed in self.experiment.tuning_seeds:
                    config = self.experiment.config(recipe, one, seed, tuned)
                    commands = []
                    if success is not None:
                        commands = self.commands(recipe, one, config)
                    runs.append((config, commands))
            return runs

        def loss_of(tuned: Values) -> float:
            losses = []
            for config, commands in runs(tuned):
                result = self.result(recipe, config, commands)
                if success is None:
                    figure = figure_of(result, self.experiment.tune_by)
                    losses.append(figure.value if figure else math.inf)
                else:
                    figure = figure_of(result, self.experiment.kind)
                    failed = figure is None or figure.value < success
                    losses.append(float(failed))
            return statistics.mean(losses)

        def at_hand(tuned: Values) -> bool:
            for config, commands in runs(tuned):
                arguments = [command[1:] for command in commands]
                if key_of(config, arguments) not in self.results.rows:
                    return False
            return True

        if self.quick:
            return []
        return search(
            run_configs[0].tune, loss_of, at_hand, equal_to_middle=success is not None
        )

    def commands(
        self, recipe: str, run_config: RunConfig, config: Config
    ) -> list[list[str]]:
        places = {
            "run": config.run_folder,
            "data": config.data.folder,
            "seed": config.seed,
        }
        commands = []
        for measure in self.experiment.measures:
            if measure.applies_to(recipe, run_config.name):
                words = measure.words(self.quick)
                words = [word.format_map(places) for word in words]
                commands.append([measure.script, *words])
        return commands

    def run(self, recipe: str, run_config: RunConfig, seed: int, tuned: Values) -> dict:
        config = self.experiment.config(recipe, run_config, seed, tuned, self.quick)
        commands = self.commands(recipe, run_config, config)
        return self.result(recipe, config, commands)

    def result(self, recipe: str, config: Config, commands: list[list[str]]) -> dict:
        """Return the result of a run, which is trained and measured if it is not
        there."""

        def make() -> dict:
            # Missing data should not stop us after hours of runs.
            for command in commands:
                for word in command:
                    if word.startswith("data/"):
                        find_dataset(word)
            with self.lock:  # the first run trains the helpers, the others wait
                helpers = self.experiment.helper_configs(recipe, self.quick)
                for helper in helpers.values():
                    finished_run(helper)
            result = result_of(config, finished_run(config, self.processes))
            loss = "diverged"
            if result["tokens"]:
                loss = result["losses"]["training"][-1]
            show(f"{config.name}: {loss}", flush=True)
            if result["tokens"]:
                result["measured"].update(measured_by_all(config, commands))
            return result

        arguments = [command[1:] for command in commands]  # without the script
        return self.results.of(config, arguments, make)


def measured_by_all(config: Config, commands: list[list[str]]) -> Measured:
    """Return the figures of all commands; beside those of the test split its unigram
    entropy."""
    figures = {}
    for command in commands:
        figures.update(measured_by(command))
        splits = []
        for option, word in itertools.pairwise(command):
            if option == "--split":
                splits.append(word)
        if splits[-1:] == ["test"]:  # the last one counts
            entropy = unigram(config.data.folder, "test")
            figures["unigram_test"] = [entropy, None]
    return figures


def result_of(config: Config, lines: list[dict] | None) -> dict:
    """Return what is saved of a run. losses: `training`, those under its training
    orders, and others by kind, each with KIND_error. measured: the entropy of single
    tokens, and `excess`, the distance of the last loss from the least possible one,
    where that is known."""
    main = main_loss(config)
    losses: dict[str, list] = {}
    tokens = []
    for line in validations_of(config, lines):
        tokens.append(line["tokens"])
        values = {
            "training": line[main],
            "training_error": line.get(main.replace("loss", "error")),
        }
        for key, value in line.items():
            if key.startswith("val_loss_"):
                values[key.removeprefix("val_loss_")] = value
        for key, value in line.items():
            if key.startswith("val_error_"):
                values[key.removeprefix("val_error_") + "_error"] = value
        for key, value in values.items():
            # Six digits are beyond the accuracy of everything here, and halve the file.
            rounded = None if value is None else round(value, 6)
            losses.setdefault(key, []).append(rounded)
    folder = config.data.folder
    measured = {"unigram": [unigram(folder), None]}
    least = least_loss(folder, config.eval.sequences, config.model.block_size)
    if least is not None and tokens:
        excess = round(line[main] - least, 6)
        measured["excess"] = [excess, None]
    return {
        "seed": config.seed,
        "commit": trained_by(config),
        "tokens": tokens,
        "losses": losses,
        "measured": measured,
        "tokens_per_second": speed_of(lines),
    }
