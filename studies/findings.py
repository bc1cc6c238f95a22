"""Questions about any-order models, answered by experiments: run configs, seeds, verdicts.

    python -m studies.findings E13 --seeds 1 --quick   # does it run? Three minutes
    python -m studies.findings E13 --jobs 2            # what is missing: results/findings/E13.*
    python -m studies.findings page                      # all pages of what has results

An experiment is a file of studies/configs/findings. An interrupted one is resumed: finished runs in
out/findings are not trained again, nor those with a row in results/findings/E13.runs.jsonl (remove
the file to repeat them).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from aogpt.data.prepare import Prepare, prepare
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.files import to_json, write_atomically, write_text
from aogpt.runtime.outputs import versions
from aogpt.runtime.validation import check_values
from studies import experiment as experiments
from studies import pages
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.figures import figure
from studies.runner import Results, Runner, RunOptions, commits_of
from studies.runs import ROOT


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    experiment: Annotated[str, tyro.conf.Positional]
    """A file of studies/configs/findings without its suffix, or: page."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if a.experiment == "page":
        for name in experiment_names():
            if (file := pages.RESULTS / f"{name}.json").exists():
                write_page(file, *pages.results_of(name))
        write_text(pages.RESULTS / "README.md", pages.overview())
        front = pages.filled((CONFIGS / "front.md").read_text())
        write_text(pages.RESULTS.parent / "README.md", front)
        show("wrote results/README.md and results/findings")
    else:
        run(load_experiment(a.experiment), a)


def run(experiment: Experiment, a: Arguments) -> None:
    """Train what is missing; write the results, their page and figure, and print the tables."""
    seeds = a.seeds or experiment.seeds
    results = Results(
        None if a.quick else pages.RESULTS / f"{experiment.name}.runs.jsonl"
    )
    if a.quick:
        prepare_quick_text(experiment)
    runner = Runner(experiment, results, jobs=a.jobs, quick=a.quick)
    trained = runner.train(seeds)
    rows = (
        row
        for entries in trained.values()
        for e in entries.values()
        for row in e["runs"]
    )
    found = {"experiment": experiment.name, "recipes": trained}
    found |= {"commit": commits_of(rows), "torch": versions()["torch"]}
    complete = seeds >= experiment.seeds and not a.quick
    partial = experiments.OUT / ("quick" if a.quick else "part")
    file = (pages.RESULTS if complete else partial) / f"{experiment.name}.json"
    write_page(file, experiment, found, whole=complete)
    show(
        *pages.details_of(experiment, found),
        f"wrote {file}, a page and a figure",
        sep="\n",
    )


def write_page(
    file: Path, experiment: Experiment, found: dict, whole: bool = True
) -> None:
    """The file of results with the claims and their p values, the figure and the details beside it,
    and unless a part of them is missing, which the text may speak of, the page."""
    judged = found | {"claims": pages.judgements(experiment, found)}
    write_text(
        file, to_json(judged) + "\n"
    )  # first, so that an error below loses nothing
    details = pages.details_of(experiment, found)
    write_text(file.with_suffix(".details.md"), "\n".join(details))
    image = figure(experiment, {"recipes": pages.reported(experiment, found)})
    write_atomically(file.with_suffix(".png"), lambda f: f.write(image))
    if whole:
        write_text(file.with_suffix(".md"), "\n".join(pages.page_of(experiment, found)))


def prepare_quick_text(experiment: Experiment) -> None:
    """Keep the first recipe alone, and replace all data by the repository's stories, in bytes,
    preparing them if necessary."""
    stories = ROOT / "data" / "stories_bytes"
    if not (stories / "meta.json").exists():
        prepare(Prepare("stories", tokenizer="bytes", out=stories))
    experiment.base["data"] = {"folder": str(stories)}
    for other in list(experiment.recipes)[1:]:
        del experiment.recipes[other]
    for run_configs in experiment.recipes.values():
        for one in run_configs.values():
            one.changes.pop("data.folder", None)
            one.changes.pop("data.max_tokens", None)


if __name__ == "__main__":
    run_script(main)
