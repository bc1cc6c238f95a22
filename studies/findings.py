"""Test claims about any-order models by experiments: run configs, seeds, verdicts.

    python -m studies.findings E1 --seeds 1 --quick   # does it run? Three minutes
    python -m studies.findings E1 --jobs 2            # train what is missing: results/findings/E1.*
    python -m studies.findings E1 --configs           # only write the configs of the runs
    python -m studies.findings E1 --scale             # those at the paper's scale, with their cost
    python -m studies.findings page                   # collect everything in results/findings.md

An experiment is a file of studies/configs/findings. An interrupted one is resumed: finished runs in
out/findings are not trained again, nor those with a row in results/findings/E1.runs.jsonl (remove
the file to repeat them).
"""

from dataclasses import dataclass
from typing import Annotated

import tyro

from data.prepare import Prepare, prepare
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.files import to_json, write_atomically, write_text
from runtime.outputs import markdown_table, versions
from runtime.validation import check_values
from studies import experiment as experiments
from studies import pages
from studies.experiment import Experiment, load_experiment
from studies.figures import figure
from studies.runner import Found, Results, Runner, RunOptions, benchmark, commits_of, train
from studies.runs import ROOT, write_config
from studies.verdicts import judged, ratio_of
from training.plan import RunPlan, find_gpu, plan_run

GPU = "NVIDIA H100 80GB HBM3"
PAGE = ROOT / "results" / "findings.md"


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    experiment: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/findings without its suffix, or: page."""
    recipes: tuple[str, ...] = ()
    """By default all. Results of fewer go to out/findings/part."""
    configs: bool = False
    """Train nothing: write the configs of the runs with seed 0, with every value to try."""
    scale: bool = False
    """Train nothing: write the configs of runs at the paper's scale, for GPUs, and print their
    cost."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if a.experiment == "page":
        write_text(PAGE, pages.page())
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
        write_scaled(experiment, recipes)
    elif a.configs:
        write_configs(experiment, recipes)
    else:
        run(experiment, recipes, a)


def run(experiment: Experiment, recipes: list[str], a: Arguments) -> None:
    """Train what is missing; write the JSON, the tables and the figure, and print the tables."""
    seeds = a.seeds or experiment.seeds
    results = Results(None if a.quick else pages.RESULTS / f"{experiment.name}.runs.jsonl")
    if a.quick:
        prepare_quick_text(experiment)
    if experiment.bench:
        trained = benchmark(experiment, a.quick)
    else:
        trained = train(experiment, recipes, seeds, results, jobs=a.jobs, quick=a.quick)
    runner = Runner(experiment, results, quick=a.quick)
    rows = (row for entries in trained.values() for e in entries.values() for row in e["runs"])
    found = {
        "experiment": experiment.name,
        "recipes": trained,
        **judgements(experiment, trained),
        "helpers": {recipe: runner.helper_results(recipe) for recipe in recipes},
        "at_scale": cost_of(experiment, plans_at_scale(experiment, recipes)),
        "commit": commits_of(rows),
        "torch": versions()["torch"],
    }
    complete = recipes == list(experiment.recipes) and seeds >= experiment.seeds
    partial = experiments.OUT / ("quick" if a.quick else "part")
    folder = pages.RESULTS if complete and not a.quick else partial
    file = folder / f"{experiment.name}.json"
    write_text(file, to_json(found) + "\n")  # first, so that an error below loses nothing
    lines = pages.tables(experiment, found)
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")
    image = figure(experiment, found)
    write_atomically(file.with_suffix(".png"), lambda f: f.write(image))
    print(*lines, f"wrote {file}, its table (.md) and its figure (.png)", sep="\n")


def judgements(experiment: Experiment, trained: Found) -> dict:
    """The verdicts on the experiment's claims, and its ratios, for each recipe."""
    parts = {"claims": (experiment.claims, judged), "ratios": (experiment.ratios, ratio_of)}
    return {
        part: {
            recipe: [said for one in listed if (said := judge(one, experiment.kind, entries))]
            for recipe, entries in trained.items()
        }
        for part, (listed, judge) in parts.items()
    }


def prepare_quick_text(experiment: Experiment) -> None:
    """Replace all data by the repository's stories, in bytes, preparing them if necessary."""
    stories = ROOT / "data" / "stories_bytes"
    if not (stories / "meta.json").exists():
        prepare(Prepare("stories", tokenizer="bytes", out=stories))
    experiment.base["data"] = {"folder": str(stories)}
    for run_configs in experiment.recipes.values():
        for one in run_configs.values():
            one.changes.pop("data.folder", None)


def write_configs(experiment: Experiment, recipes: list[str]) -> None:
    """Write the configs of the runs with seed 0, for every value to try."""
    if experiment.bench:
        raise UserError(f"{experiment.name} is a benchmark and trains nothing: leave out --configs")
    for recipe in recipes:
        for one in experiment.recipes[recipe].values():
            files = [write_config(experiment.config(recipe, one, 0, t)) for t in one.choices]
    print(f"wrote {files[-1].parents[1]}/*/*.toml, for python train.py")


def write_scaled(experiment: Experiment, recipes: list[str]) -> None:
    """Write the configs of runs at the paper's scale, and print the cost of each."""
    rows, plans = [], plans_at_scale(experiment, recipes)
    for plan in plans:
        tokens = plan.tokens_per_step * plan.config.train.steps / 1e9
        memory, days = f"{plan.memory_total / 2**30:.1f}", f"{days_of(plan):.1f}"
        rows.append([str(write_config(plan.config)), f"{tokens:,.0f}e9", memory, days])
    if rows:
        head = ["config", "tokens", "GiB of a GPU", "GPU days"]
        print(*markdown_table(head, rows), "", sep="\n")
    print(cost_of(experiment, plans))


def plans_at_scale(experiment: Experiment, recipes: list[str]) -> list[RunPlan]:
    """The run configs of these recipes at the paper's scale, planned for one GPU."""
    configs = [config for r in recipes for config in experiment.at_scale(r).values()]
    return [plan_run(config, 1, find_gpu(GPU)) for config in configs]


def days_of(plan: RunPlan) -> float:
    return plan.seconds_per_step * plan.config.train.steps / 86400


def cost_of(experiment: Experiment, plans: list[RunPlan]) -> str:
    """A sentence: the command, the number of runs, their cost, and what measures them."""
    measured_by = f"`{experiment.scale['command']}`" if "command" in experiment.scale else ""
    if experiment.bench:
        return measured_by
    command = f"`python -m studies.findings {experiment.name} --scale`"
    whose = f", those of {experiment.models}" if experiment.models else ""
    return (
        f"{command} writes {len(plans)} configs a seed{whose}, {sum(map(days_of, plans)):.1f} days "
        f"of an {GPU} at 40% of its peak."
        + f" Each RUN is measured by {measured_by}."
        * bool(measured_by)
    )


if __name__ == "__main__":
    run_script(main)
