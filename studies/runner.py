"""The runner of findings, speedrun and tasks: run configs are tuned alike with seed 0, trained over
seeds and measured, and what every run came to is saved as a row of a JSONL file.

With the file at hand its runs are not trained again. A row is {"run": folder, "key": ..., "result":
{"seed", "commit", "tokens", "losses", "measured", "tokens_per_second"}}: validation losses by kind
at each evaluation, and figures {name: [value, standard error or None]}.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from data.loader import find_dataset
from runtime.errors import UserError
from runtime.files import json_object, read_lines, write_jsonl
from runtime.validation import damaged, read_results
from studies.experiment import OUT, Experiment
from studies.measures import at_entropy, entropy_of_blocks, figures_of, least_loss, unigram
from studies.runs import Run, RunConfig, Values, main_loss, run_of
from training import config as configuration
from training import memory_plan
from training.config import Config

Found = dict[str, dict[str, dict]]
"""By recipe and run config: {"description", "tuning": [{"tuned", "loss"}], "tuned", "at_boundary",
"parameters", "runs": [the result of each seed]}."""


class Results:
    """The rows of a JSONL file, and those that are added; its methods may be called by threads."""

    def __init__(self, file: Path | None = None):
        """file: None saves nothing."""
        self.file, self.lock = file, threading.Lock()
        self.rows: dict[str, dict] = {}
        if file and file.exists():
            with damaged(file, "remove it, and its runs are trained again"):
                rows = [json_object(text, place) for place, text in read_lines(file, "results")]
                self.rows = {row["key"]: row for row in rows if "result" in row}

    def of(self, config: Config, measured_by: list[list[str]], make: Callable[[], dict]) -> dict:
        """The result of a run that these commands measure: the saved one, or else that of `make`,
        which is saved."""
        key = key_of(config, measured_by)
        if key not in self.rows:
            row = {"run": str(config.run_folder), "key": key, "result": make()}
            with self.lock:
                self.rows[key] = row
                if self.file:
                    write_jsonl(self.file, self.rows.values())
        return self.rows[key]["result"]


def key_of(config: Config, measured_by: list[list[str]]) -> str:
    """Identifies a run and its measures. Keys with their default values do not count, so that a new
    option invalidates no results."""
    changed = configuration.differences(Config(), config)
    values = {key: new for key, (_, new) in changed.items()}
    text = json.dumps([values, measured_by], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- tuning --------------------------------------------------------------------------------------


def search(
    choices: list[Values], loss_of: Callable[[Values], float]
) -> list[tuple[Values, float]]:
    """Try the middle choice and both neighbours, then neighbours of the best one, until both of its
    own have been tried: where the loss is flat, chance would lead away from better values. Returns
    those tried, in their order, with their losses; nothing if there is only one choice."""
    if len(choices) == 1:
        return []
    middle = len(choices) // 2
    tried = {middle: loss_of(choices[middle])}
    while True:
        best = min(tried, key=tried.get)
        wanted = (middle, middle + 1, middle - 1, best + 1, best - 1)
        left = [n for n in wanted if 0 <= n < len(choices) and n not in tried]
        if not left:
            return [(choices[place], tried[place]) for place in sorted(tried)]
        tried[left[0]] = loss_of(choices[left[0]])


def best_of(run_config: RunConfig, tried: list[tuple[Values, float]]) -> Values:
    """The choice whose run ended lowest; the middle one if none was tried. A run that diverged has
    an infinite loss. Raises UserError if all did."""
    if not tried:
        return run_config.untuned
    values, loss = min(tried, key=lambda of_one: of_one[1])
    if loss == math.inf:
        raise UserError(f"no run of {run_config.name} ended: lower the values that it tunes")
    return values


def at_boundary(choices: list[Values], tuned: Values) -> bool:
    """Whether the best choice is the first or the last: a value beyond it might be better."""
    return len(choices) > 1 and tuned in (choices[0], choices[-1])


# ---- training ------------------------------------------------------------------------------------


def train(
    experiment: Experiment,
    recipes: list[str],
    seeds: int,
    results: Results,
    *,
    jobs: int = 1,
    processes: int = 1,
    quick: bool = False,
) -> Found:
    """Tune every run config with seed 0, then train its other seeds with the best value, and
    measure them, `jobs` runs at a time. Nothing is tuned with `quick`.

    Runs are tuned at full length: in short runs, still on the unigram plateau, rates cannot be told
    apart, and the best one there is not the best one later."""
    chosen = [(recipe, one) for recipe in recipes for one in experiment.trained(recipe)]
    open_choices = [] if quick else [one for _, one in chosen if len(one.choices) > 1]
    total = sum(min(3, len(one.choices)) for one in open_choices) + seeds * len(chosen)
    pool = ThreadPoolExecutor(jobs)
    bar = tqdm(desc=experiment.name, total=total, unit="run", smoothing=1, disable=None)
    runner = Runner(experiment, results, processes, quick, bar)
    found: Found = {recipe: {} for recipe in recipes}
    try:
        tuning = [pool.submit(runner.tune, recipe, one) for recipe, one in chosen]
        tried = [future.result() for future in tuning]
        best = [best_of(one, of_one) for (_, one), of_one in zip(chosen, tried, strict=True)]
        runs = [
            [pool.submit(runner.run, recipe, one, seed, tuned) for seed in range(seeds)]
            for (recipe, one), tuned in zip(chosen, best, strict=True)
        ]
        for (recipe, one), pairs, tuned, of_one in zip(chosen, tried, best, runs, strict=True):
            model = memory_plan.meta_model(experiment.config(recipe, one, 0, tuned))
            found[recipe][one.name] = {
                "description": one.description,
                "tuning": [{"tuned": values, "loss": loss} for values, loss in pairs],
                "tuned": tuned,
                "at_boundary": not quick and at_boundary(one.choices, tuned),
                "parameters": sum(p.numel() for p in model.parameters()),
                "runs": [future.result() for future in of_one],
            }
    finally:  # after an error or an interrupt no further run starts
        pool.shutdown(cancel_futures=True)
        bar.close()
    return found


class Runner:
    """Makes the runs of an experiment when they are needed; its methods may be called by
    threads."""

    def __init__(
        self,
        experiment: Experiment,
        results: Results,
        processes: int = 1,
        quick: bool = False,
        bar: tqdm | None = None,
    ):
        self.experiment, self.results, self.processes = experiment, results, processes
        self.quick, self.bar, self.lock = quick, bar, threading.Lock()

    def tune(self, recipe: str, run_config: RunConfig) -> list[tuple[Values, float]]:
        """What `search` tries with seed 0."""

        def loss_of(tuned: Values) -> float:
            config = self.experiment.config(recipe, run_config, 0, tuned, self.quick)
            losses = self.result(recipe, config, [])["losses"]
            return losses["training"][-1] if losses else math.inf

        return [] if self.quick else search(run_config.choices, loss_of)

    def run(self, recipe: str, run_config: RunConfig, seed: int, tuned: Values) -> dict:
        """The result of a run with the experiment's measures."""
        config = self.experiment.config(recipe, run_config, seed, tuned, self.quick)
        helpers = self.experiment.helpers.get(recipe, {})
        folders = {n: self.experiment.helper(recipe, n, self.quick).run_folder for n in helpers}
        places = {"run": config.run_folder, "data": config.data.folder} | folders
        commands = []
        for number, measure in enumerate(self.experiment.measures):
            if measure.applies_to(run_config.name):
                words = [*measure.arguments, *(measure.quick if self.quick else ())]
                commands.append((number, [word.format(**places) for word in words]))
        return self.result(recipe, config, commands)

    def result(self, recipe: str, config: Config, commands: list[tuple[int, list[str]]]) -> dict:
        """The result of a run, trained first if necessary; commands: the number and the arguments
        of each measure."""

        def make() -> dict:
            if not self.quick:
                self.check_data()
            with self.lock:  # the first run trains the helpers, the others wait
                for name in self.experiment.helpers.get(recipe, {}):
                    run_of(self.experiment.helper(recipe, name, self.quick))
            done = run_of(config, self.processes)
            tqdm.write(f"{config.name}: {main_loss(config)} {done.loss}")
            result = result_of(done)
            if done.lines:
                result["measured"] |= self.measured(commands, config)
            return result

        found = self.results.of(config, [words for _, words in commands], make)
        if self.bar is not None:
            self.bar.update()
        return found

    def helper_results(self, recipes: list[str]) -> dict[str, dict[str, dict]]:
        """By recipe and name."""
        configs = {
            recipe: {
                n: self.experiment.helper(recipe, n, self.quick)
                for n in self.experiment.helpers.get(recipe, {})
            }
            for recipe in recipes
        }
        return {
            recipe: {
                name: self.results.of(config, [], lambda config=config: result_of(run_of(config)))
                for name, config in of_recipe.items()
            }
            for recipe, of_recipe in configs.items()
        }

    def measured(self, commands: list[tuple[int, list[str]]], config: Config) -> dict:
        figures: dict = {}
        for number, words in commands:
            file = config.run_folder.with_name(f"{config.name}.{self.experiment.name}.{number}.json")
            figures |= figures_of(self.experiment.measures[number].script, words, file)
        if any(name.startswith("judge_") for name in figures):
            entropy = entropy_of_blocks(config.data.folder, config.model.block_size)
            figures |= at_entropy(figures, entropy) | {"entropy_of_text": [entropy, None]}
        return figures

    def check_data(self) -> None:
        """Raise FileNotFoundError if a dataset of a measure is missing, before hours of runs."""
        for measure in self.experiment.measures:
            for word in measure.arguments:
                if word.startswith("data/"):
                    find_dataset(word)


def benchmark(experiment: Experiment, quick: bool) -> Found:
    """The systems of a benchmark in place of run configs; its repeats stand in for seeds."""
    bench = experiment.bench
    file = OUT / ("quick" if quick else "") / experiment.name / "bench.json"
    words = [*bench.arguments, *(bench.quick if quick else ())]
    systems = figures_of(bench.script, words, file)
    commit = read_results(file, "remove it, to have it measured again")["commit"]
    return {
        "side by side": {
            name: {
                "description": system["description"],
                "tuning": [],
                "tuned": {},
                "runs": [
                    {"commit": commit, "tokens": [], "losses": {}, "measured": figures}
                    for figures in system["repeats"]
                ],
            }
            for name, system in systems.items()
        }
    }


def result_of(run: Run) -> dict:
    """What is saved of a run. losses: `training`, those under its training orders, and others by
    kind, each with KIND_error. measured: the entropy of single tokens, and `excess`, the distance
    of the last loss from the least possible one, where that is known."""
    config, losses = run.config, {}
    result = {"seed": config.seed, "commit": run.commit, "tokens": [], "losses": losses}
    result["measured"] = {"unigram": [unigram(config.data.folder), None]}
    least = least_loss(config.data.folder, config.eval.sequences, config.model.block_size)
    if least is not None and run.loss is not None:
        result["measured"]["excess"] = [round(run.loss - least, 6), None]
    main = main_loss(config)
    for line in run.validations:
        result["tokens"].append(line["tokens"])
        values = {"training": line[main], "training_error": line.get(main.replace("loss", "error"))}
        for key, value in line.items():
            if key.startswith("val_loss_"):
                values[key.removeprefix("val_loss_")] = value
            elif key.startswith("val_error_"):
                values[key.removeprefix("val_error_") + "_error"] = value
        for key, value in values.items():
            # Six digits are beyond the accuracy of everything here, and halve the file.
            losses.setdefault(key, []).append(None if value is None else round(value, 6))
    return result | {"tokens_per_second": run.tokens_per_second}
