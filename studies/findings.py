"""Questions about any-order models, answered by experiments: run configs, seeds,
verdicts.

    python -m studies.findings E13 --seeds 1 --quick   # does it run? Three minutes
    python -m studies.findings E13 --jobs 2            # results/findings/E13.*
    python -m studies.findings E13 --run-configs l2r0 # some now, the others later
    python -m studies.findings details E13             # all figures, claims, rates
    python -m studies.findings speeds E21              # what each run config takes
    python -m studies.findings page                    # all pages of what has results

An experiment is a file of studies/configs/findings. An interrupted one is resumed:
finished runs in out/findings are not trained again, nor those with a row in
results/findings/E13.runs.jsonl (remove the file to repeat them). Pages, figures and
details are made of these rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from aogpt.data.catalogue import DATASETS
from aogpt.data.prepare import Prepare, prepare
from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_atomically, write_json, write_text
from aogpt.runtime.outputs import versions
from aogpt.runtime.validation import check_values
from studies import experiment as experiments
from studies import pages
from studies import prepare as studies_prepare
from studies.bench_common import cpu_name
from studies.costs import costs_in_turn
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.figures import figure, targets_figure
from studies.front_figures import FIGURES as FRONT_FIGURES
from studies.puzzles import TASKS
from studies.runner import Recipes, Results, Runner, RunOptions
from studies.runs import ROOT, commit
from studies.speedrun import speeds_in_turn
from studies.systems_page import systems_page

REPETITIONS = 7  # of each short run
QUICK_DOCUMENTS = 200  # of a puzzle, with --quick


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    words: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """An experiment (a file of studies/configs/findings without its suffix), `details`
    or `speeds` and an experiment, or `page`."""
    run_configs: tuple[str, ...] = ()
    """Only these run configs. Their rows are saved, results go to out/findings/part."""


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    check_values(a)
    match a.words:
        case ["page"]:
            write_pages()
        case ["speeds", name]:
            measure_speeds(load_experiment(name))
        case ["details", name]:
            load_experiment(name)  # its name is checked first
            experiment, recipes = pages.load_results(name)
            show("\n".join(pages.details_of(experiment, recipes)))
        case [name]:
            run(load_experiment(name), a)
        case _:
            raise UserError(
                "name one experiment, or: details EXPERIMENT, or: speeds EXPERIMENT, "
                "or: page"
            )


def run(experiment: Experiment, a: Arguments) -> None:
    """Train what is missing; write the page and the figure, and print the tables. With
    fewer seeds, or more, there is no page, whose text may speak of them, and the figure
    is in out/findings."""
    name = experiment.name
    seeds = a.seeds or experiment.seeds
    complete = seeds == experiment.seeds and not a.quick and not a.run_configs
    file = pages.RESULTS / f"{name}.runs.jsonl"
    if a.quick:
        file = None  # its rows are of no use
        prepare_quick_data(experiment)
    for chosen in a.run_configs:
        if chosen not in experiment.run_configs:
            names = ", ".join(experiment.run_configs)
            recipe = next(iter(experiment.recipes)) if a.quick else name
            raise UserError(f"{recipe} has no run config {chosen!r}, but {names}")
    runner = Runner(
        experiment, Results(file), jobs=a.jobs, quick=a.quick, chosen=a.run_configs
    )
    recipes = pages.reported(experiment, runner.train(seeds))
    show("\n".join(pages.details_of(experiment, recipes)))
    if complete:
        write_pages_of(experiment, recipes)
        return
    folder = experiments.OUT / ("quick" if a.quick else "part")
    write_figure(folder, pages.Page(name, experiment, recipes))


def measure_speeds(experiment: Experiment) -> None:
    """Write what the run configs in the table of costs take: tokens a second of short
    runs, time and memory of decoding, memory of training. They take turns, so that
    other work of the machine affects all of them alike."""
    if not experiment.equal_time:
        raise UserError(f"{experiment.name} has no table of costs to measure for")
    _, recipes = pages.load_results(experiment.name)
    speeds: pages.Speeds = {}
    costs = {}
    for recipe, entries in recipes.items():
        show(f"{recipe}:", flush=True)
        configs = {}
        for name in experiment.equal_time:
            run_config = experiment.recipes[recipe][name]
            # rates change nothing here, where they are not tuned yet
            tuned = entries.get(name, {}).get("tuned", run_config.untuned)
            configs[name] = experiment.config(recipe, run_config, 0, tuned)
        speeds[recipe] = speeds_in_turn(configs, REPETITIONS)
        costs[recipe] = costs_in_turn(configs, REPETITIONS)
    report = {
        "tokens_per_second": speeds,
        "costs": costs,
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": versions(),
    }
    write_json(pages.RESULTS / f"{experiment.name}.speeds.json", report)


def write_pages() -> None:
    for name in experiment_names():
        if pages.has_results(name):
            write_pages_of(*pages.load_results(name))
    write_text(pages.RESULTS / "README.md", pages.overview())
    if "E21" in experiment_names():
        write_text(pages.RESULTS / "systems.md", systems_page())
        write_targets_page()
        write_front_figures()
    for name, page in pages.FRONT.items():
        text = pages.filled((CONFIGS / name).read_text())
        write_text(pages.RESULTS.parent / page, text)
    show("wrote results/README.md, results/audit.md and results/findings")


def write_targets_page() -> None:
    """Write the page and figure on conditioning and context orders, of E21's runs."""
    _, recipes = pages.load_results("E21")
    write_image(pages.RESULTS / "targets.png", targets_figure(recipes["chorales"]))
    text = pages.filled((CONFIGS / "targets.md").read_text())
    write_text(pages.RESULTS / "targets.md", text)


def write_front_figures() -> None:
    for name, make in FRONT_FIGURES.items():
        write_image(pages.RESULTS.parent / name, make())


def write_pages_of(experiment: Experiment, recipes: Recipes) -> None:
    claims = pages.judgements(experiment, recipes)
    for page in pages.pages_of(experiment, recipes):
        if experiment.figure_on_page:
            write_figure(pages.RESULTS, page)
        file = pages.RESULTS / f"{page.name}.md"
        write_text(file, "\n".join(pages.page_of(page, claims)))
        show(f"wrote {file}")


def write_figure(folder: Path, page: pages.Page) -> None:
    file = folder / f"{page.name}.png"
    write_image(file, figure(page.experiment, page.recipes))
    show(f"wrote {file}")


def write_image(file: Path, image: bytes) -> None:
    write_atomically(file, lambda stream: stream.write(image))


def prepare_quick_data(experiment: Experiment) -> None:
    """Keep the first recipe alone. Its data are a few documents of its own, if it is of
    puzzles, else the repository's stories in bytes; both are prepared if necessary."""
    name = Path(experiment.base.get("data", {}).get("folder", "")).name
    if name in TASKS:
        folder = ROOT / "data" / "quick" / name
        request = Prepare(name, limit=QUICK_DOCUMENTS, out=folder)
        datasets = studies_prepare.DATASETS
    else:
        folder = ROOT / "data" / "stories_bytes"
        request = Prepare("stories", tokenizer="bytes", out=folder)
        datasets = DATASETS
    if not (folder / "meta.json").exists():
        prepare(request, datasets)
    experiment.base["data"] = {"folder": str(folder)}
    for other in list(experiment.recipes)[1:]:
        del experiment.recipes[other]
    for run_configs in experiment.recipes.values():
        for one in run_configs.values():
            one.changes.pop("data.folder", None)
            one.changes.pop("data.max_tokens", None)


if __name__ == "__main__":
    run_script(main)
