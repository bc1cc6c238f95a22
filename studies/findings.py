"""What is claimed of any-order models, tested: experiments of arms, seeds and verdicts.

    python -m studies.findings E1 --seeds 1 --quick     # does it run? Three minutes, nine small books
    python -m studies.findings E1 --jobs 2              # train what is missing, write results/findings/E1.*
    python -m studies.findings E1 --configs             # write the runs' configs, to launch them by hand
    python -m studies.findings E1 --scale               # the same at the paper's scale: configs, and costs
    python -m studies.findings page                     # gather all in results/findings.md

An experiment is a file of studies/configs/findings. One that was cut off goes on: runs that are there, in
out/findings, are not trained again, nor those whose results stand in results/findings/E1.runs.jsonl
(remove it to repeat them).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from data.prepare import Prepare, prepare
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.files import to_json, write_atomically, write_text
from runtime.reports import markdown_table, versions
from runtime.validation import Count, check_values
from studies.experiments import report, suite
from studies.experiments.arms import ROOT, commits_of, write_config
from studies.experiments.suite import Experiment, load_experiment
from studies.experiments.tuning import choices_of
from studies.experiments.verdicts import judged, ratio_of
from training.plan import RunPlan, find_gpu, plan_run

GPU = "NVIDIA H100 80GB HBM3"
PAGE = ROOT / "results" / "findings.md"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    experiment: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/findings without its ending, or: page."""
    seeds: Count | None = None
    """By default as many as the experiment asks for."""
    recipes: tuple[str, ...] = ()
    """By default all that it has. What fewer recipes or seeds come to is written to
    out/findings/part."""
    jobs: Count = 1
    """Runs side by side, on a CPU; each has one thread."""
    quick: bool = False
    """A few steps of every arm, untuned, on the books that the repository has: to see that
    everything runs. Results go to out/findings/quick."""
    configs: bool = False
    """Train nothing: write the configs of the runs of seed 0 with every value that is tried, and
    name their folder."""
    scale: bool = False
    """Train nothing: write the configs of runs at the paper's scale, for GPUs, and tell what they
    cost."""


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
            raise UserError(f"{experiment.name} has no recipe {recipe!r}; it has {known}")
    if (a.scale or a.configs) and (a.seeds or a.jobs > 1 or a.quick):
        raise UserError(
            "--scale and --configs train nothing: leave out --seeds, --jobs and --quick"
        )
    if a.scale:
        print(*write_scaled(experiment, recipes), sep="\n")
    elif a.configs:
        write_configs(experiment, recipes)
    else:
        run(experiment, recipes, a)


def write_configs(experiment: Experiment, recipes: list[str]) -> None:
    """The configs of the runs of seed 0, for every value that is tried."""
    if experiment.bench:
        raise UserError(f"{experiment.name} is a benchmark and trains nothing: leave out --configs")
    for recipe in recipes:
        for arm in experiment.recipes[recipe].values():
            files = [write_config(experiment.config(recipe, arm, 0, t)) for t in choices_of(arm)]
    print(f"wrote {files[-1].parents[1]}/*/*.toml, for python train.py")


def write_scaled(experiment: Experiment, recipes: list[str]) -> list[str]:
    """The configs of runs at the paper's scale; lines that tell what each costs."""
    if experiment.bench:
        return [f"    {experiment.scale['command']}"]
    rows, plans = [], plans_at_scale(experiment, recipes)
    for arm, plan in plans:
        tokens = plan.tokens_per_step * plan.config.train.steps / 1e9
        memory, days = f"{plan.memory_total / 2**30:.1f}", f"{days_of(plan):.1f}"
        rows.append([str(write_config(plan.config)), arm, f"{tokens:,.0f}e9", memory, days])
    head = ["config", "arm", "tokens", "GiB of a GPU", "days of one"]
    return [*markdown_table(head, rows, left=2), "", cost_of(experiment, plans)]


def plans_at_scale(experiment: Experiment, recipes: list[str]) -> list[tuple[str, RunPlan]]:
    """The arms of these recipes at the paper's scale, with the plans of their runs on one GPU."""
    runs = [run for recipe in recipes for run in experiment.at_scale(recipe).items()]
    return [(arm, plan_run(config, 1, find_gpu(GPU))) for arm, config in runs]


def days_of(plan: RunPlan) -> float:
    """Of one GPU."""
    return plan.seconds_per_step * plan.config.train.steps / 86400


def cost_of(experiment: Experiment, plans: list[tuple[str, RunPlan]]) -> str:
    """A sentence: the command, how many runs, what they cost, and what measures them."""
    measured_by = f"`{experiment.scale['command']}`" if "command" in experiment.scale else ""
    if experiment.bench:
        return measured_by
    command = f"`python -m studies.findings {experiment.name} --scale`"
    days = sum(days_of(plan) for _, plan in plans)
    whose = f", those of {experiment.models}" if experiment.models else ""
    return (
        f"{command} writes {len(plans)} configs a seed{whose}, {days:.1f} days of an {GPU} at 40% "
        "of its peak." + f" Each RUN is measured by {measured_by}." * bool(measured_by)
    )


def run(experiment: Experiment, recipes: list[str], a: Arguments) -> None:
    """Train what is missing, and write JSON, table and figure."""
    seeds = a.seeds or experiment.seeds
    keep = None if a.quick else report.RESULTS / f"{experiment.name}.runs.jsonl"
    if a.quick:
        prepare_quick_text(experiment)
    if experiment.bench:
        trained = suite.benchmark(experiment, a.quick)
    else:
        total = suite.number_of_runs(experiment, recipes, seeds, a.quick)
        with suite.RunsBar(experiment.name, total) as bar:
            of_runs = experiment, recipes, seeds, a.jobs, a.quick, bar.done, keep
            trained = suite.train(*of_runs)
    found = {"experiment": experiment.name, "recipes": trained, **judgements(experiment, trained)}
    found["others"] = suite.results_of_others(experiment, recipes, a.quick, keep)
    runs = (run for arms in trained.values() for arm in arms.values() for run in arm["runs"])
    found["at_scale"] = cost_of(experiment, plans_at_scale(experiment, recipes))
    found |= {"commit": commits_of(runs), "torch": versions()["torch"]}
    whole = recipes == list(experiment.recipes) and seeds >= experiment.seeds
    folder = suite.OUT / ("quick" if a.quick else "part")
    write_results(experiment, found, report.RESULTS if whole and not a.quick else folder)


def judgements(experiment: Experiment, trained: suite.Found) -> dict:
    """What the arms of each recipe say of the experiment's claims, and its ratios."""
    parts = {"claims": (experiment.claims, judged), "ratios": (experiment.ratios, ratio_of)}
    return {
        part: {
            recipe: [said for one in asked if (said := answer(one, experiment.kind, arms))]
            for recipe, arms in trained.items()
        }
        for part, (asked, answer) in parts.items()
    }


def write_results(experiment: Experiment, found: dict, folder: Path) -> None:
    """NAME.json, NAME.md and NAME.png; the table on the terminal."""
    file = folder / f"{experiment.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, to_json(found) + "\n")
    lines = report.tables(experiment, found)
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")
    image = report.figure(experiment, found)
    write_atomically(file.with_suffix(".png"), lambda f: f.write(image))
    print(*lines, f"wrote {file} and, beside it, the table and the figure", sep="\n")


def prepare_quick_text(experiment: Experiment) -> None:
    """The stories that the repository has, in bytes, in place of all texts that it has not; data
    that are made from nothing are made."""
    stories, generated = ROOT / "data" / "stories_bytes", {"polya", "latin5"}
    if not (stories / "meta.json").exists():
        prepare(Prepare("stories", tokenizer="bytes", out=stories))
    experiment.base["data"] = {"folder": str(stories)}
    for arm in (arm for arms in experiment.recipes.values() for arm in arms.values()):
        folder = Path(arm.changes.get("data.folder", ""))
        if folder.name in generated:
            if not (ROOT / folder / "meta.json").exists():
                prepare(Prepare(folder.name))
        elif folder.name:
            arm.changes["data.folder"] = str(stories)


if __name__ == "__main__":
    run_script(main)
