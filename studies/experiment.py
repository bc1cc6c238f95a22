"""An experiment of the findings suite: what it compares, its runs, and the verdicts on its claims.

A file of studies/configs/findings says it all: a `base` configuration, `recipes`, each a set of changes and
what is tuned, under every one of which all `arms` are trained, and `claims`, each of a loss that is
lower than another. Arms of one seed see the same batches and are validated under the same orders,
so that differences between them are paired.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.generators import NATS_OF_TEXT
from data.loader import TokenDataset, find_dataset, read_tokens
from data.tokenizers import END_OF_TEXT, get_tokenizer
from evaluation.text_measures import unigram_entropy
from runtime.errors import UserError
from runtime.validation import damaged, from_values, read_results, read_toml
from studies.experiments.arms import (
    ROOT,
    Arm,
    Run,
    config_of,
    own_loss,
    read_arms,
    run_of,
    side_by_side,
)
from studies.experiments.kept import Kept
from studies.experiments.measures import Measure, Measured, at_entropy, figures_of
from studies.experiments.tuning import at_edge, best_of, choices_of, middle_of, search
from studies.experiments.verdicts import Claim, Ratio
from training import memory_plan
from training.config import Config

CONFIGS = ROOT / "studies" / "configs" / "findings"
OUT = Path("out") / "findings"
OTHER_SEED = 1000  # of runs that are no arms: none of theirs
QUICK = {
    "train.steps": 150,
    "train.compile": False,  # which takes longer than these steps
    "optim.warmup_steps": 15,
    "eval.interval": 50,
    "eval.sequences": 64,
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    title: str
    source: str
    """Who claims it."""
    setting: str
    meaning: str
    """What came out, in words; the verdicts are computed."""
    kind: str
    """The loss that is compared, as in `Claim`; own: under the orders that an arm learns."""
    claims: list[Claim]
    ratios: list[Ratio] = field(default_factory=list)
    seeds: int = 3

    base: dict = field(default_factory=dict)
    recipes: dict[str, dict[str, Arm]] = field(default_factory=dict)
    """The arms under each recipe."""
    whys: dict[str, str] = field(default_factory=dict)
    """What each recipe is."""
    alone: dict[str, Arm] = field(default_factory=dict)
    """The arms without any recipe."""
    runs: dict[str, dict[str, Arm]] = field(default_factory=dict)
    """By recipe: runs that its arms begin from or are measured with, trained once, untuned."""
    measures: list[Measure] = field(default_factory=list)
    models: str = ""
    """The experiment whose base, recipes and arms it has, and so whose runs."""
    bench: Measure | None = None
    """In place of arms: a benchmark, whose systems are compared."""
    scale: dict[str, dict | str] = field(default_factory=dict)
    """By arm, where it is not as here, what it is at the paper's scale (see `at_scale`), and under
    `all` what all arms are; under `fast`, by arm, what it is in the fast recipe alone; under
    `command`, what measures each RUN, or is the benchmark."""

    figure: str
    """curves, families, sweep, averages, lines, points or frontier: see `experiments.report`."""
    shown: list[str] = field(default_factory=list)
    """Losses and figures that the table, a sweep and points show."""
    x: dict[str, float] = field(default_factory=dict)
    """Of a sweep, where each arm stands; of lines, where each of the figures shown; of points,
    those of them that are drawn."""
    x_label: str = ""
    y_label: str = "nats per token"
    goal: float | None = None
    """A loss: how many tokens take an arm there?"""

    def config(self, recipe: str, arm: Arm, seed: int, tuned: dict, quick: bool = False) -> Config:
        """The configuration of one run. A fixed order is another one for every seed."""
        changes = arm.changes | {"order.seed": seed} | (QUICK if quick else {})
        start = changes.get("train.init_from")
        if start in self.others(recipe):
            changes["train.init_from"] = str(self.other_run(recipe, start, quick).run_folder)
        out = OUT / ("quick" if quick else "") / (self.models or self.name) / recipe
        return config_of(self.base, replace(arm, changes=changes), seed, tuned, out)

    def at_scale(self, recipe: str) -> dict[str, Config]:
        """By arm, the run that tests the same at the paper's scale: configs/aogpt_small.toml, or
        the `config` that `scale` names, in the fast recipe with _fast at the end, with what the
        arm changes, or else what `scale` does; none where there is no such config."""
        found = {}
        for name in self.recipes[recipe] if recipe in self.of_scale() else ():
            own = self.scale.get("all", {}) | self.scale.get(name, {})
            if recipe == "fast":
                own |= self.scale.get("fast", {}).get(name, {})
                own.pop("optim.decay_steps", None)  # its rate is 0 at the end of every run
            changes = {} if "config" in own else self.alone[name].changes
            file = own.pop("config", "aogpt_small") + ("_fast" if recipe == "fast" else "")
            path = CONFIGS.parent / f"{file}.toml"
            if path.is_file():
                base = read_toml(path)
                arm = Arm(name, changes | own, {}, "")
                folder = "fast" if recipe == "fast" else "paper"  # as that config's recipe is
                found[name] = config_of(base, arm, 0, {}, OUT / "at_scale" / self.name / folder)
        return found

    def of_scale(self) -> list[str]:
        """The recipes that there are at the paper's scale."""
        slow = "paper" if "paper" in self.recipes else "sinusoidal"
        return [slow, "fast"]

    def others(self, recipe: str) -> dict[str, Arm]:
        """Of `runs`, those under a recipe."""
        return self.runs.get(recipe, {})

    def other_run(self, recipe: str, name: str, quick: bool = False) -> Config:
        """That of one of `runs`."""
        arm = self.others(recipe)[name]
        return self.config(recipe, arm, OTHER_SEED, middle_of(arm), quick)


def load_experiment(name: str) -> Experiment:
    """Read studies/configs/findings/NAME.toml. Raises ValueError where there is none."""
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(names())
        raise UserError(f"there is no experiment {name!r}; choose one of {known}")
    with damaged(path, "compare it with another experiment's"):
        return experiment_of(name)


def experiment_of(name: str) -> Experiment:
    """`load_experiment` of a file that is there; raises whatever its values lead to."""
    values, source = read_values(name), f"experiment {name}"
    if "models" in values:
        of_models = read_values(values["models"])
        values |= {part: of_models[part] for part in ("base", "recipes", "arms")}
    arms, others = values.pop("arms", {}), values.pop("runs", {})
    x = values.pop("x", {}) | {arm: t.pop("x") for arm, t in arms.items() if "x" in t}
    recipes, runs, whys = {}, {}, {}
    for recipe, changes in values.pop("recipes", {}).items():
        whys[recipe] = changes.get("why", "")
        chosen = changes.pop("arms", list(arms))
        # An arm is laid over the recipe, as over an arm above it.
        tables = {arm: {"from": "recipe"} | t for arm, t in (arms | others).items()}
        read = read_arms({"recipe": changes} | tables, source)
        recipes[recipe] = {arm: read[arm] for arm in arms if arm in chosen}
        runs[recipe] = {other: read[other] for other in others}
    alone = read_arms(arms, source)
    parts = {"claims": Claim, "ratios": Ratio, "measures": Measure}
    for key, kind in parts.items():
        values[key] = from_values(values.get(key, []), list[kind], source)
    bench = from_values(values.pop("bench"), Measure, source) if "bench" in values else None
    own = {"recipes": recipes, "whys": whys, "alone": alone, "runs": runs, "x": x, "bench": bench}
    return Experiment(name=name, **own, **values)


def read_values(name: str) -> dict:
    """The values of its file, with its base and recipes laid over those of common.toml: a recipe
    over the one there that has its name, or that it says it is `from`."""
    values, common = read_toml(CONFIGS / f"{name}.toml"), read_toml(CONFIGS / "common.toml")
    if "arms" in values:
        own = values.get("base", {})
        tables = {key: common["base"].get(key, {}) | t for key, t in own.items() if type(t) is dict}
        values["base"] = common["base"] | own | tables
        shared, own = common["recipes"], values["recipes"]
        values["recipes"] = {
            name: (shared[recipe.pop("from")] if "from" in recipe else shared.get(name, {}))
            | recipe
            for name, recipe in own.items()
        }
    return values


def names() -> list[str]:
    """The experiments there are, E2 before E10."""
    return sorted((p.stem for p in CONFIGS.glob("E*.toml")), key=lambda name: int(name[1:]))


# ---- runs ----------------------------------------------------------------------------------------

Found = dict[str, dict[str, dict]]
"""By recipe and arm: {"why", "tuning": [{"tuned", "loss"}], "runs": [one for each seed]}."""


def number_of_runs(experiment: Experiment, recipes: list[str], seeds: int, quick: bool) -> int:
    """About how many of all arms there will be: to tune one takes three, as a rule."""
    arms = [arm for recipe in recipes for arm in experiment.recipes[recipe].values()]
    tuned = [] if quick else [arm for arm in arms if len(choices_of(arm)) > 1]
    return sum(min(3, len(choices_of(arm))) for arm in tuned) + seeds * len(arms)


class RunsBar(tqdm):
    """How many runs of an experiment there are, and an estimate of the time that the others take,
    in which those that were there already have no part."""

    def __init__(self, name: str, total: int, **options):
        super().__init__(desc=name, total=total, unit="run", smoothing=0, disable=None, **options)

    def done(self, made: bool) -> None:
        """made: not there already."""
        if not self.disable:  # as where nobody looks at a terminal
            self.initial += not made
            self.update()


def train(
    experiment: Experiment,
    recipes: list[str],
    seeds: int,
    jobs: int,
    quick: bool,
    progress: Callable[[bool], None] = lambda made: None,
    keep: Path | None = None,
) -> Found:
    """Tune every arm with seed 0, then train its other seeds with what was best, and measure them;
    runs of all arms side by side, `jobs` at a time. `progress` is told of each whether it had to be
    made. Where nothing is to be chosen, as with `quick`, nothing is tuned. Results that the file
    `keep` holds are not made again, and those that are made come to it.

    Arms are tuned at full length: in short runs, whose losses still stand on the plateau from which
    any order is learned, rates cannot be told apart, and what is best there is not best later.
    What is tried is that of `search`."""
    if not quick:
        check_data(experiment)
    chosen = [(recipe, arm) for recipe in recipes for arm in experiment.recipes[recipe].values()]
    made = Runs(experiment, quick, Kept(keep), progress)
    found: Found = {recipe: {} for recipe in recipes}
    with side_by_side(jobs) as pool:
        tuning = [pool.submit(made.tune, recipe, arm) for recipe, arm in chosen]
        tried = [future.result() for future in tuning]
        best = [best_of(arm, of_arm) for (_, arm), of_arm in zip(chosen, tried, strict=True)]
        runs = [
            [pool.submit(made.measured_run, recipe, arm, seed, tuned) for seed in range(seeds)]
            for (recipe, arm), tuned in zip(chosen, best, strict=True)
        ]
        for (recipe, arm), values, tuned, of_arm in zip(chosen, tried, best, runs, strict=True):
            found[recipe][arm.name] = {
                "why": arm.why,
                "tuning": [{"tuned": value, "loss": loss} for value, loss in values],
                "tuned": tuned,
                "edge": not quick and at_edge(choices_of(arm), tuned),
                "parameters": parameters_of(experiment.config(recipe, arm, 0, tuned)),
                "runs": [future.result() for future in of_arm],
            }
    return found


class Runs:
    """The runs of an experiment, each made when it is asked for; its methods may be called by
    threads."""

    def __init__(
        self, experiment: Experiment, quick: bool, kept: Kept, progress: Callable[[bool], None]
    ):
        self.experiment, self.quick, self.kept = experiment, quick, kept
        self.progress, self.lock = progress, threading.Lock()

    def tune(self, recipe: str, arm: Arm) -> list[tuple[dict, float]]:
        """What `search` tries of an arm, with seed 0."""

        def loss_of(tuned: dict) -> float:
            config = self.experiment.config(recipe, arm, 0, tuned, self.quick)
            losses = self.result(recipe, config, [])["losses"]
            return losses["own"][-1] if losses else math.inf

        return [] if self.quick else search(choices_of(arm), loss_of)

    def measured_run(self, recipe: str, arm: Arm, seed: int, tuned: dict) -> dict:
        """A run's results, with those of the experiment's measures."""
        config = self.experiment.config(recipe, arm, seed, tuned, self.quick)
        return self.result(
            recipe, config, commands_of(self.experiment, recipe, arm, config, self.quick)
        )

    def result(self, recipe: str, config: Config, commands: Commands) -> dict:
        def make() -> dict:
            self.train_others(recipe)
            done = run_of(config)
            found = summary(done)
            if done.lines:
                found["measured"] |= measured(self.experiment, commands, config)
            return found

        measured_by = [words for _, words in commands]
        made = not self.kept.has(config, measured_by)
        found = self.kept.of(config, measured_by, make)
        self.progress(made)
        return found

    def train_others(self, recipe: str) -> None:
        """The runs that arms begin from or are measured with: trained when the first arm asks."""
        with self.lock:
            for name in self.experiment.others(recipe):
                run_of(self.experiment.other_run(recipe, name, self.quick))


def results_of_others(
    experiment: Experiment, recipes: list[str], quick: bool, keep: Path | None
) -> dict[str, dict[str, dict]]:
    """By recipe and name: what the runs that arms begin from or are measured with came to."""
    kept, found = Kept(keep), {}
    for recipe in recipes:
        configs = {n: experiment.other_run(recipe, n, quick) for n in experiment.others(recipe)}
        found[recipe] = {
            name: kept.of(config, [], lambda config=config: summary(run_of(config)))
            for name, config in configs.items()
        }
    return found


def check_data(experiment: Experiment) -> None:
    """Raise FileNotFoundError for a data set that a measure names and that is not there: measures
    come after hours of runs."""
    for measure in experiment.measures:
        for word in measure.arguments:
            if word.startswith("data/"):
                find_dataset(word)


def benchmark(experiment: Experiment, quick: bool) -> Found:
    """The systems of its benchmark, as arms that nobody trained; its repeats are their seeds."""
    bench = experiment.bench
    words = [*bench.arguments, *(bench.quick if quick else ())]
    folder = OUT / ("quick" if quick else "") / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "bench.json"
    systems = figures_of(bench, words, file)
    measured_by = read_results(file, "remove it, to have it measured again")["commit"]
    return {
        "side by side": {
            name: {
                "why": system["why"],
                "tuning": [],
                "tuned": {},
                "runs": [
                    {"commit": measured_by, "tokens": [], "losses": {}, "measured": figures}
                    for figures in system["repeats"]
                ],
            }
            for name, system in systems.items()
        }
    }


Commands = list[tuple[int, list[str]]]
"""The places of measures among those of their experiment, and what their scripts are given."""


def commands_of(
    experiment: Experiment, recipe: str, arm: Arm, config: Config, quick: bool
) -> Commands:
    """What measures a run."""
    folders = {
        n: experiment.other_run(recipe, n, quick).run_folder for n in experiment.others(recipe)
    }
    places = {"run": config.run_folder, "data": config.data.folder} | folders
    commands = []
    for number, measure in enumerate(experiment.measures):
        if measure.is_of(arm.name):
            words = [*measure.arguments, *(measure.quick if quick else ())]
            commands.append((number, [word.format(**places) for word in words]))
    return commands


def measured(experiment: Experiment, commands: Commands, config: Config) -> Measured:
    """What the experiment's measures say of a run."""
    figures: Measured = {}
    for number, words in commands:
        file = config.run_folder.with_name(f"{config.name}.{experiment.name}.{number}.json")
        figures |= figures_of(experiment.measures[number], words, file)
    if any(name.startswith("judge_") for name in figures):
        own = entropy_of_blocks(config.data.folder, config.model.block_size)
        figures |= at_entropy(figures, own) | {"entropy_of_text": [own, None]}
    return figures


def parameters_of(config: Config) -> int:
    return sum(memory_plan.meta_model(config).num_params().values())


@functools.cache
def least_loss(folder: str, sequences: int, size: int) -> float | None:
    """Of the first sequences of the validation split, in blocks of `size`, nats per token: what the
    distribution that they were drawn from gives them, where it is known."""
    exact = NATS_OF_TEXT.get(Path(folder).name)
    if not exact:
        return None
    data = TokenDataset(folder, "val", size)
    blocks = data.blocks(list(range(min(sequences, data.num_blocks))))
    text = get_tokenizer(data.meta["tokenizer"]).decode(blocks.flatten())
    return sum(map(exact, text.split(END_OF_TEXT)[:-1])) / blocks.numel()


@functools.cache
def unigram(folder: str) -> float:
    """Entropy of single tokens of the validation text, nats."""
    counts = np.bincount(read_tokens(Path(folder), "val"))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@functools.cache
def entropy_of_blocks(folder: str, size: int) -> float:
    """`unigram_entropy` of a block of the validation text, mean of the first thousand blocks."""
    data = TokenDataset(folder, "val", size)
    blocks = data.blocks(list(range(min(1000, data.num_blocks))))
    return statistics.mean(map(unigram_entropy, blocks.tolist()))


def summary(run: Run) -> dict:
    """What is kept of a run: its validation losses and their errors, by tokens; and as `measured`
    the entropy of single tokens of the text that they are of, and `excess`, by how much its own
    loss is above what those sequences have at least, where that is known."""
    result = {"seed": run.config.seed, "commit": run.commit, "tokens": [], "losses": {}}
    result["measured"] = {"unigram": [unigram(run.config.data.folder), None]}
    config = run.config
    least = least_loss(config.data.folder, config.eval.sequences, config.model.block_size)
    if least is not None and run.loss is not None:
        result["measured"]["excess"] = [round(run.loss - least, 6), None]
    for line in run.validations:
        result["tokens"].append(line["tokens"])
        key = own_loss(run.config)
        losses = {"own": line[key], "own_error": line.get(key.replace("loss", "error"))}
        for key, value in line.items():
            for name, ending in (("val_loss_", ""), ("val_error_", "_error")):
                if key.startswith(name):
                    losses[key.removeprefix(name) + ending] = value
        for key, value in losses.items():
            # Six digits are more than anything here is known to, and half the size of a file.
            value = None if value is None else round(value, 6)
            result["losses"].setdefault(key, []).append(value)
    return result
