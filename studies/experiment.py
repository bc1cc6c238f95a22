"""An experiment: run configs under recipes, what is measured of their runs, and claims
about it.

A run config is a base configuration with a few keys changed:

    [base]                                  # a configuration, as train.py takes it
    [run_configs.fast]
    from = "slow"                           # optional: a run config above, to inherit
    description = "the rate decays linearly"
    tune = { "optim.lr" = [1e-3, 2e-3, 4e-3] }
    "optim.schedule" = "linear"

A recipe is a set of changes with a value to tune; all run configs are trained under
each recipe. Runs with the same seed see the same batches and are validated under the
same orders, which lets chance act alike on them (verdicts do not pair them).
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from aogpt.runtime.errors import UserError, reason_of
from aogpt.runtime.validation import FileError, from_values, read_toml
from aogpt.training import config as configuration
from aogpt.training.config import Config
from studies.measures import Measure
from studies.runs import ROOT
from studies.verdicts import Claim

CONFIGS = ROOT / "studies" / "configs" / "findings"
OUT = Path("out") / "findings"
HELPER_SEED = 1000  # a seed that no run config has
QUICK = {
    "train.steps": 150,
    "train.compile": False,  # compiling takes longer than these steps
    "optim.warmup_steps": 15,
    "eval.interval": 50,
    "eval.sequences": 64,
}

Values = dict[str, float]
"""The tuned keys of the configuration and their values."""


@dataclass(frozen=True)
class RunConfig:
    name: str
    changes: dict  # dotted keys of the configuration whose values differ from the base
    tune: dict[str, list]  # dotted keys and the values to try, a grid
    description: str = ""
    tuned_as: str = ""  # another run config, whose best value this one uses

    @property
    def untuned(self) -> Values:
        """Return the middle of the grid."""
        middle = {}
        for key, values in self.tune.items():
            middle[key] = values[len(values) // 2]
        return middle


KEYS = {"from": str, "description": str, "tune": dict[str, list], "tuned_as": str}
# Beside these there are dotted keys of the configuration.
RUN_CONFIG_TABLE = TypedDict("RunConfigTable", KEYS, total=False)
TABLES = dict[str, RUN_CONFIG_TABLE]


def read_run_configs(
    tables: dict[str, dict], source: str, recipe: dict | None = None
) -> dict[str, RunConfig]:
    """Return run configs from the tables of a TOML file, which `source` names in
    errors. recipe: the changes that run configs inherit which are not from another
    one."""
    run_configs: dict[str, RunConfig] = {}
    all_tables = {"": recipe or {}}
    all_tables.update(tables)
    for name, table in from_values(all_tables, TABLES, source).items():
        parent = table.pop("from", "" if name else None)
        inherited = RunConfig("", {}, {})
        if parent is not None:
            inherited = run_configs[parent]
        description = table.pop("description", "")
        tune = table.pop("tune", inherited.tune)
        tuned_as = table.pop("tuned_as", "")
        changes = dict(inherited.changes)
        changes.update(table)
        # A key is either tuned or has a value.
        tuned = {}
        for key, values in tune.items():
            if key not in table:
                tuned[key] = values
                changes.pop(key, None)
        run_configs[name] = RunConfig(name, changes, tuned, description, tuned_as)
    del run_configs[""]
    return run_configs


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    title: str = ""  # the question
    short: str = ""  # its answer in a sentence or two, without a number
    answer: str = ""  # what came out, in words, with its numbers as pages.py reads them
    source: str = ""  # what the paper and others say
    setting: str = ""
    caveats: str = ""
    # in the table of all: theme, found, limit (of its verdicts)
    row: dict[str, str] = field(default_factory=dict)
    # By recipe, where recipes ask different questions: the texts above of a page of its
    # own.
    parts: dict[str, dict] = field(default_factory=dict)
    # the loss or figure that is compared; training: under training orders
    kind: str = "training"
    claims: list[Claim] = field(default_factory=list)
    seeds: int = 3
    # of recipes or run configs with fewer seeds
    seeds_of: dict[str, int] = field(default_factory=dict)
    first_seed: int = 0  # above those that a pilot has seen
    # Rates are tuned by the mean loss of these seeds, which are not reported.
    tuning_seeds: list[int] = field(default_factory=lambda: [100, 101])
    tune_by: str = "training"  # the figure, a loss under the run's own training orders
    # Instead: the number of tuning runs whose figure (`kind`, a share of right answers)
    # is at least this. Of equal numbers the values nearest to the middle of the grid
    # count, since the outcome of few runs leaves many equal.
    tune_by_success: float | None = None
    # run configs whose best value all others use
    tune_on: list[str] = field(default_factory=list)
    goal: float | None = None  # a loss: how many tokens until a run reaches it?

    base: dict = field(default_factory=dict)
    recipes: dict[str, dict[str, RunConfig]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)  # of the recipes
    # By recipe: runs from which others start, or with which they are measured; not
    # tuned.
    helpers: dict[str, dict[str, RunConfig]] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    # Names that stand in claims and texts for one of several run configs: for the one
    # whose tuning runs ended lowest.
    best_of: dict[str, list[str]] = field(default_factory=dict)
    out: Path | None = None  # folder of the runs; by default OUT/NAME

    figure: str = ""  # curves, points, lines, scatter or runs: see figures.py
    figure_on_page: bool = True  # False where the table says as much
    # curves: the loss that is drawn of run configs for which the compared one means
    # nothing.
    figure_losses: dict[str, str] = field(default_factory=dict)
    figure_shares_axis: bool = True  # of losses, among the panels of curves
    figure_top: float | None = None  # curves: the upper end of the axis of losses
    families: bool = False  # curves: a panel for run configs whose names begin alike
    shown: list[str] = field(default_factory=list)  # losses and measures in the table
    # Run configs in a table of costs, and those that stand for them with fewer tokens.
    equal_time: dict[str, str] = field(default_factory=dict)
    # The x coordinate of each run config (lines), or of each measure that is drawn
    # (points).
    x: dict[str, float] = field(default_factory=dict)
    x_label: str = ""  # lines

    def config(
        self,
        recipe: str,
        run_config: RunConfig,
        seed: int,
        tuned: Values,
        quick: bool = False,
    ) -> Config:
        """Return the configuration of one run. A fixed order differs from seed to
        seed."""
        folder = self.out
        if folder is None:
            folder = OUT / ("quick" if quick else "") / self.name
        words = [run_config.name]
        for key, value in tuned.items():
            words.append(f"{key.rpartition('.')[2]}{value:g}")
        words.append(f"s{seed}")
        changes = copy.deepcopy(run_config.changes)
        if quick:
            changes.update(QUICK)
        changes.update(tuned)
        changes["name"] = "_".join(words)
        changes["seed"] = seed
        changes["out"] = str(folder / recipe)
        if self.out is None:
            changes["order.seed"] = seed
        start = changes.get("train.init_from")
        if start and seed != HELPER_SEED:
            helpers = self.helper_configs(recipe, quick)
            if start in helpers:
                changes["train.init_from"] = str(helpers[start].run_folder)
        values = copy.deepcopy(self.base)
        for key, value in changes.items():
            table = values
            *path, last = key.split(".")
            for part in path:  # an unknown key is refused below, by its name
                table = table.setdefault(part, {})
            table[last] = value
        for stage in values.get("schedule", ()):  # a fraction is of all steps
            step = stage["step"]
            if isinstance(step, float):
                stage["step"] = round(step * values["train"]["steps"])
        return configuration.from_dict(values, f"run config {run_config.name}")

    @property
    def run_configs(self) -> list[str]:
        """Return the names of the run configs of all recipes, each once."""
        names: dict[str, None] = {}
        for run_configs in self.recipes.values():
            names.update(dict.fromkeys(run_configs))
        return list(names)

    @property
    def success(self) -> float | None:
        """The figure from which on a run succeeds, if claims are about the number of
        those."""
        for claim in self.claims:
            if claim.success is not None:
                return claim.success
        return None

    def seeds_in(self, recipe: str, run_config: str, count: int) -> range:
        """Return the seeds of a run config's runs, `count` of them or fewer."""
        for name in (recipe, run_config):
            count = min(count, self.seeds_of.get(name, count))
        return range(self.first_seed, self.first_seed + count)

    def helper_configs(self, recipe: str, quick: bool = False) -> dict[str, Config]:
        helpers = self.helpers.get(recipe, {})
        configs = {}
        for name, one in helpers.items():
            configs[name] = self.config(recipe, one, HELPER_SEED, one.untuned, quick)
        return configs


def experiment_names() -> list[str]:
    """Return the names of all experiments, by number."""
    names = [path.stem for path in CONFIGS.glob("E*.toml")]
    return sorted(names, key=lambda name: int(name[1:]))


@contextlib.contextmanager
def damaged(path: Path | str, advice: str) -> Iterator[None]:
    """Turn an exception while a file is read into a FileError that names it."""
    try:
        yield
    except (FileError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FileError(f"{path} is damaged: {reason_of(error)}; {advice}") from error


def load_experiment(name: str) -> Experiment:
    """Read studies/configs/findings/NAME.toml. Raises UserError if there is no such
    file."""
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        names = ", ".join(experiment_names())
        raise UserError(f"there is no experiment {name!r}; choose one of {names}")
    with damaged(path, "compare it with another experiment's"):
        return experiment_of(name, read_values(name), f"experiment {name}")


def read_values(name: str) -> dict:
    """Return the values of an experiment's file. Its base and recipes are laid over
    those of common.toml: a recipe over the one with its name, or the one that it is
    `from`."""
    values = read_toml(CONFIGS / f"{name}.toml")
    common = read_toml(CONFIGS / "common.toml")
    if "run_configs" not in values:
        return values
    own_base = values.get("base", {})
    values["base"] = laid_over(common["base"], own_base)
    for name, recipe in values["recipes"].items():
        source = recipe.pop("from", name)
        merged = dict(common["recipes"].get(source, {}))
        merged.update(recipe)
        for key in recipe.get("tune", {}):  # what is tuned here is not fixed
            if key not in recipe:
                merged.pop(key, None)
        values["recipes"][name] = merged
    return values


def laid_over(tables: dict, changes: dict) -> dict:
    """Return tables of a file with those of another over them, key by key."""
    merged = copy.deepcopy(tables)
    for name, change in changes.items():
        if isinstance(change, dict):
            merged.setdefault(name, {}).update(change)
        else:
            merged[name] = change
    return merged


def experiment_of(name: str, values: dict, source: str) -> Experiment:
    """Return the experiment of a file's values; `source` names it in errors."""
    tables = values.pop("run_configs", {})
    helper_tables = values.pop("helpers", {})
    places = values.pop("x", {})
    for run_config, table in tables.items():
        if "x" in table:
            places[run_config] = table.pop("x")
    recipes = {}
    helpers = {}
    descriptions = {}
    recipe_tables = values.pop("recipes", {})
    for recipe, changes in recipe_tables.items():
        descriptions[recipe] = changes.get("description", "")
        chosen = changes.pop("run_configs", list(tables))
        run_configs = read_run_configs(tables | helper_tables, source, changes)
        helpers[recipe] = {}
        for helper in helper_tables:
            helpers[recipe][helper] = run_configs.pop(helper)
        recipes[recipe] = {}
        for run_config, one in run_configs.items():
            if run_config in chosen:
                recipes[recipe][run_config] = one
    unknown = values.get("seeds_of", {}).keys() - recipes.keys() - tables.keys()
    if unknown:
        raise UserError(
            f"{source}: seeds_of names {sorted(unknown)[0]!r}, which is no recipe or "
            "run config"
        )
    claims = values.pop("claims", [])
    measures = values.pop("measures", [])
    return Experiment(
        name=name,
        recipes=recipes,
        helpers=helpers,
        descriptions=descriptions,
        x=places,
        claims=from_values(claims, list[Claim], source),
        measures=from_values(measures, list[Measure], source),
        **values,
    )
