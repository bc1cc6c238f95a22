"""What is claimed of any-order models, tested: experiments of arms, seeds and verdicts.

    python findings.py E1 --seeds 1 --quick     # does it run? Three minutes, a small book
    python findings.py E1 --jobs 2              # train what is missing, write results/findings/E1.*
    python findings.py E1 --configs             # write the runs' configs, to launch them by hand
    python findings.py page                     # gather all in results/findings.md

An experiment is a file of configs/findings. Runs that are there are not trained again, and one that
was cut off goes on.
"""

from __future__ import annotations

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from data.prepare import Prepare, prepare
from experiments import report, suite
from experiments.arms import ROOT, write_config
from experiments.suite import Experiment, load_experiment
from runtime.command_line import run_script
from runtime.files import write_atomically, write_json, write_text
from runtime.ranges import Count, check_values
from runtime.reports import versions

PAGE = ROOT / "results" / "findings.md"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    experiment: Annotated[str, tyro.conf.Positional]
    """A file of configs/findings without its ending, or: page."""
    seeds: Count | None = None
    """By default as many as the experiment asks for."""
    recipes: tuple[str, ...] = ()
    """By default all that it has."""
    jobs: Count = 1
    """Runs side by side, on a CPU; each has one thread."""
    quick: bool = False
    """A few steps of every arm, untuned, on the book that the repository has: to see that
    everything runs. Results go to out/findings/quick."""
    configs: bool = False
    """Train nothing: write the configs of the runs of seed 0 with every value that is tried, and
    name their folder."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if a.experiment == "page":
        write_text(PAGE, report.page())
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return
    experiment = load_experiment(a.experiment)
    recipes = list(a.recipes) or list(experiment.recipes)
    for recipe in recipes:
        if recipe not in experiment.recipes:
            known = ", ".join(experiment.recipes)
            raise ValueError(f"{experiment.name} has no recipe {recipe!r}; it has {known}")
    if a.configs:
        write_configs(experiment, recipes)
    else:
        run(experiment, recipes, a)


def write_configs(experiment: Experiment, recipes: list[str]) -> None:
    """The configs of the runs of seed 0, for every value that is tried."""
    for recipe in recipes:
        for arm in experiment.recipes[recipe].values():
            files = [write_config(experiment.config(recipe, arm, 0, t)) for t in arm.grid()]
    print(f"wrote {files[-1].parents[1]}/*/*.toml, for python train.py")


def run(experiment: Experiment, recipes: list[str], a: Arguments) -> None:
    """Train what is missing, and write JSON, table and figure."""
    seeds = a.seeds or experiment.seeds
    if a.quick:
        prepare_quick_text(experiment)
    arms = [arm for recipe in recipes for arm in experiment.recipes[recipe].values()]
    total = sum(len(suite.pilots_of(arm, a.quick)) + seeds for arm in arms)
    with tqdm(total=total, unit="run", desc=experiment.name, disable=None) as bar:
        trained = suite.train(experiment, recipes, seeds, a.jobs, a.quick, bar.update)
    claims = {
        recipe: [j for c in experiment.claims if (j := suite.judged(c, experiment.kind, arms))]
        for recipe, arms in trained.items()
    }
    commits = {r["commit"] for arms in trained.values() for v in arms.values() for r in v["runs"]}
    found = {"experiment": experiment.name, "recipes": trained, "claims": claims}
    found |= {"commit": ", ".join(sorted(commits)), "torch": versions()["torch"]}
    folder = suite.OUT / "quick" if a.quick else report.RESULTS
    write_results(experiment, found, folder)


def write_results(experiment: Experiment, found: dict, folder: Path) -> None:
    """NAME.json, NAME.md and NAME.png; the table on the terminal."""
    file = folder / f"{experiment.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, found)
    lines = report.tables(experiment, found)
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")
    image = report.figure(experiment, found)
    write_atomically(file.with_suffix(".png"), lambda f: f.write(image))
    print(*lines, f"wrote {file} and, beside it, the table and the figure", sep="\n")


def prepare_quick_text(experiment: Experiment) -> None:
    """The stories that the repository has, in bytes, in place of the experiment's data."""
    folder = ROOT / "data" / "stories_bytes"
    if not (folder / "meta.json").exists():
        prepare(Prepare("stories", tokenizer="bytes", out=folder))
    experiment.base["data"] = {"folder": str(folder)}


if __name__ == "__main__":
    run_script(main)
