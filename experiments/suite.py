"""An experiment of the findings suite: what it compares, its runs, and the verdicts on its claims.

A file of configs/findings says it all: a `base` configuration, `recipes`, each a set of changes and
what is tuned, under every one of which all `arms` are trained, and `claims`, each of a loss that is
lower than another. Arms of one seed see the same batches and are validated under the same orders,
so that differences between them are paired.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.generators import ENTROPY_PER_TOKEN
from experiments.arms import ROOT, Arm, Run, config_of, own_loss, read_arms, run_of
from training.config import Config

CONFIGS = ROOT / "configs" / "findings"
OUT = Path("out") / "findings"
PILOT = 0.25  # of the length of a run: what rates are tuned with
QUICK = {"train.steps": 150, "optim.warmup_steps": 15, "eval.interval": 50, "eval.sequences": 64}


@dataclass(frozen=True)
class Claim:
    """That one loss is lower than another."""

    says: str
    lower: str
    """ARM or ARM:KIND. KIND is a loss of metrics.jsonl, as in val_loss_KIND; by default that of the
    experiment."""
    higher: str


@dataclass(frozen=True)
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
    seeds: int
    figure: str
    """curves, sweep or averages: see `experiments.report`."""
    base: dict
    recipes: dict[str, dict[str, Arm]]
    """The arms under each recipe."""
    x: dict[str, float]
    """Of a sweep: where each arm stands."""
    claims: list[Claim]
    x_label: str = ""
    goal: float | None = None
    """A loss: how many tokens take an arm there?"""
    shown: list[str] = field(default_factory=list)
    """Losses that the table and a sweep show."""

    def config(self, recipe: str, arm: Arm, seed: int, tuned: dict, quick: bool = False) -> Config:
        """The configuration of one run. A fixed order is another one for every seed."""
        changes = arm.changes | {"order.seed": seed} | (QUICK if quick else {})
        out = OUT / ("quick" if quick else "") / self.name / recipe
        return config_of(self.base, replace(arm, changes=changes), seed, tuned, out)

    def pilot(self, recipe: str, arm: Arm, tuned: dict) -> Config:
        """That of a run to tune with: as seed 0, but shorter, and evaluated once, at its end."""
        config = self.config(recipe, arm, 0, tuned)
        steps = round(PILOT * config.train.steps)
        return replace(
            config,
            name=f"{config.name}_pilot",
            train=replace(config.train, steps=steps),
            eval=replace(config.eval, interval=steps),
        )


def load_experiment(name: str) -> Experiment:
    """Read configs/findings/NAME.toml. Raises ValueError where there is none."""
    path = CONFIGS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(names())
        raise ValueError(f"there is no experiment {name!r}; choose one of {known}")
    values = tomllib.loads(path.read_text())
    arms, recipes = values.pop("arms"), {}
    x = {arm: table.pop("x") for arm, table in arms.items() if "x" in table}
    for recipe, changes in values.pop("recipes").items():
        chosen = changes.pop("arms", list(arms))
        # An arm is laid over the recipe, as over an arm above it.
        tables = {"recipe": changes} | {
            arm: {"from": "recipe"} | arms[arm] for arm in arms if arm in chosen
        }
        recipes[recipe] = read_arms(tables, f"experiment {name}")
        del recipes[recipe]["recipe"]
    claims = [Claim(**claim) for claim in values.pop("claims")]
    return Experiment(name=name, recipes=recipes, x=x, claims=claims, **values)


def names() -> list[str]:
    """The experiments there are, E2 before E10."""
    return sorted((p.stem for p in CONFIGS.glob("E*.toml")), key=lambda name: int(name[1:]))


# ---- runs ----------------------------------------------------------------------------------------

Found = dict[str, dict[str, dict]]
"""By recipe and arm: {"why", "tuning": [{"tuned", "loss"}], "runs": [one for each seed]}."""


def train(
    experiment: Experiment,
    recipes: list[str],
    seeds: int,
    jobs: int,
    quick: bool,
    progress: Callable[[], None] = lambda: None,
) -> Found:
    """Tune every arm, in short runs with seed 0, then train its seeds with what was best; runs of
    all arms side by side, `jobs` at a time. `progress` is called after each. Where nothing is to be
    chosen, as with `quick`, nothing is tuned."""
    chosen = [(recipe, arm) for recipe in recipes for arm in experiment.recipes[recipe].values()]

    def run(config: Config) -> Run:
        done = run_of(config)
        progress()
        return done

    found: Found = {recipe: {} for recipe in recipes}
    with ThreadPoolExecutor(jobs) as pool:
        pilots = [
            [pool.submit(run, experiment.pilot(recipe, arm, t)) for t in pilots_of(arm, quick)]
            for recipe, arm in chosen
        ]
        tried = [[pilot.result().loss for pilot in of_arm] for of_arm in pilots]
        best = [best_of(arm, losses) for (_, arm), losses in zip(chosen, tried, strict=True)]
        runs = [
            [
                pool.submit(run, experiment.config(recipe, arm, seed, tuned, quick))
                for seed in range(seeds)
            ]
            for (recipe, arm), tuned in zip(chosen, best, strict=True)
        ]
        for (recipe, arm), losses, tuned, of_arm in zip(chosen, tried, best, runs, strict=True):
            found[recipe][arm.name] = {
                "why": arm.why,
                "tuning": [
                    {"tuned": t, "loss": loss}
                    for t, loss in zip(pilots_of(arm, quick), losses, strict=True)
                ],
                "tuned": tuned,
                "entropy": known_entropy(experiment.config(recipe, arm, 0, tuned)),
                "runs": [summary(future.result()) for future in of_arm],
            }
    return found


def pilots_of(arm: Arm, quick: bool = False) -> list[dict]:
    """What is tried for an arm."""
    values = arm.grid()
    return [] if quick or len(values) == 1 else values


def best_of(arm: Arm, losses: list[float | None]) -> dict:
    """What an arm is tuned to: the values whose pilot ended lowest; without pilots those in the
    middle. Raises ValueError if no pilot ended.

    losses: of the pilots, as in `pilots_of`."""
    values = arm.grid()
    if not losses:
        return values[len(values) // 2]
    ended = [(loss, i) for i, loss in enumerate(losses) if loss is not None]
    if not ended:
        raise ValueError(f"no run of {arm.name} ended: lower the values that it tunes")
    return values[min(ended)[1]]


def known_entropy(config: Config) -> float | None:
    """Of the data of a run, nats per token, where it is known."""
    entropy = ENTROPY_PER_TOKEN.get(Path(config.data.folder).name)
    return entropy() if entropy else None


def summary(run: Run) -> dict:
    """What is kept of a run: its validation losses and their errors, by tokens."""
    result = {"seed": run.config.seed, "commit": run.commit, "tokens": [], "losses": {}}
    for line in run.validations:
        result["tokens"].append(line["tokens"])
        key = own_loss(run.config)
        losses = {"own": line[key], "own_error": line.get(key.replace("loss", "error"))}
        for key, value in line.items():
            for name, ending in (("val_loss_", ""), ("val_error_", "_error")):
                if key.startswith(name):
                    losses[key.removeprefix(name) + ending] = value
        for key, value in losses.items():
            result["losses"].setdefault(key, []).append(value)
    return result


# ---- verdicts ------------------------------------------------------------------------------------


def judged(claim: Claim, kind: str, arms: dict[str, dict]) -> dict | None:
    """A claim and what its arms, those of a recipe, say of it; None where they are not all there.

    The error of a mean difference has two sources: seeds, and the draws of the orders under which
    losses are estimated (Monte Carlo)."""
    sides = [side.partition(":") for side in (claim.lower, claim.higher)]
    if any(arm not in arms for arm, *_ in sides):
        return None
    ends = [[end_of(run, of or kind) for run in arms[arm]["runs"]] for arm, _, of in sides]
    seeds = [(low, high) for low, high in zip(*ends, strict=True) if low and high]
    differences = [high[0] - low[0] for low, high in seeds]
    errors = [error or 0.0 for pair in seeds for _, error in pair]
    monte_carlo = math.sqrt(sum(e * e for e in errors)) / max(1, len(seeds))
    return {
        "says": claim.says,
        "differences": differences,
        "monte_carlo_error": monte_carlo,
        **verdict(differences, monte_carlo),
    }


def end_of(run: dict, kind: str) -> tuple[float, float | None] | None:
    """The last loss of a run and its error; None of one that did not end."""
    if not run["tokens"]:
        return None
    errors = run["losses"].get(f"{kind}_error")
    return run["losses"][kind][-1], errors[-1] if errors else None


def verdict(differences: list[float], monte_carlo: float) -> dict:
    """Whether paired differences, one a seed, are as claimed: above 0.

    reproduced: all of them are, and their mean is more than two standard errors (of seeds and Monte
    Carlo together) from 0. reversed: the mirror image. Else unresolved."""
    if len(differences) < 2:
        return {"mean": differences[0] if differences else None, "verdict": "unresolved"}
    mean = statistics.mean(differences)
    of_seeds = statistics.stdev(differences) / math.sqrt(len(differences))
    error = math.sqrt(of_seeds**2 + monte_carlo**2)
    word = "unresolved"
    if abs(mean) > 2 * error:
        if all(d > 0 for d in differences):
            word = "reproduced"
        elif all(d < 0 for d in differences):
            word = "reversed"
    return {"mean": mean, "error": error, "verdict": word}
