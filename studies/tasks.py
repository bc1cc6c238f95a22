"""Tasks where order matters, or does not: AO-GPT, an encoder, a plain GPT and a two-stream decoder
of equal size, decoded in many ways, and how often they are right.

    python -m studies.tasks --jobs 2                 # train what is missing of all tasks; results/tasks.md
    python -m studies.tasks star sudoku6 --jobs 2    # of these; results/tasks/*.json
    python -m studies.tasks star --quick             # does it run? A few steps of every system
    python -m studies.tasks page                     # results/tasks.md, of all tasks that have results

Systems, decoders and tasks are those of studies/configs/tasks/systems.toml. A data set that is not there
is made first; runs that are there are not trained again, nor those whose results stand in
results/tasks/star.runs.jsonl (remove it to repeat them), and one that was cut off goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from data.prepare import Prepare, prepare
from data.puzzles import TASKS
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.files import write_atomically, write_json, write_text
from runtime.reports import versions
from runtime.validation import Count, check_values, damaged, read_results
from studies.experiments import suite
from studies.experiments.arms import ROOT
from studies.experiments.tasks import (
    RECIPE,
    RESULTS,
    TaskExperiment,
    board_page,
    figure,
    load_tasks,
    page,
    run_task,
    task_table,
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    tasks: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")
    ] = ()
    """Tasks of studies/configs/tasks/systems.toml, or: page. By default all, and then the page."""
    seeds: Count | None = None
    """By default as many as the file asks for. What fewer come to, or fewer records, is written to
    out/findings/part."""
    jobs: Count = 1
    """Runs side by side, on a CPU; each has one thread."""
    limit: Count | None = None
    """Only the first records of the test split."""
    quick: bool = False
    """A few steps of every system, untuned: to see that everything runs. Results go to
    out/findings/quick."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    torch.set_num_threads(1)  # decoding is timed
    known = load_tasks()
    if a.tasks == ("page",):
        write_page(known)
        return
    if "page" in a.tasks:
        raise UserError("page is of all tasks that have results: give it alone")
    for name in a.tasks:
        if name not in known:
            raise UserError(f"there is no task {name!r}; choose of {', '.join(known)}, or page")
    for name in a.tasks or known:
        run(known[name], a)
    if not a.tasks and is_whole(a, known):
        write_page(known)


def is_whole(a: Arguments, tasks: dict[str, TaskExperiment]) -> bool:
    """Whether nothing of what the file asks for is left out."""
    seeds = max(of.experiment.seeds for of in tasks.values())
    return (a.seeds or seeds) >= seeds and a.limit is None and not a.quick


def run(of: TaskExperiment, a: Arguments) -> None:
    """Train what is missing of a task, decode, and write and print what came of it."""
    if not (ROOT / "data" / of.task / "meta.json").exists():
        prepare(Prepare(of.task))
    seeds = a.seeds or of.experiment.seeds
    total = suite.number_of_runs(of.experiment, [RECIPE], seeds, a.quick)
    keep = None if a.quick else RESULTS / f"{of.task}.runs.jsonl"
    whole = is_whole(a, {of.task: of})
    folder = RESULTS if whole else suite.OUT / ("quick" if a.quick else "part") / "tasks"
    with suite.RunsBar(of.task, total) as bar:
        found = run_task(of, seeds, a.jobs, a.quick, a.limit, bar.done, keep)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{of.task}.json"
    write_json(file, {"task": of.task, "arms": found, "versions": versions()})
    print(*task_table(found), f"wrote {file}", sep="\n")
    if whole and TASKS[of.task].board:
        write_text(file.with_suffix(".html"), board_page(of, found))


def write_page(known: dict[str, TaskExperiment]) -> None:
    """The page and the figure of all tasks that have results."""
    files = {task: file for task in known if (file := RESULTS / f"{task}.json").exists()}
    if not files:
        raise UserError(f"no results in {RESULTS} yet: name a task first")
    with damaged(RESULTS, "make its files again: python -m studies.tasks TASK"):
        found = {task: read_results(file, "make it again") for task, file in files.items()}
        results = {task: values["arms"] for task, values in found.items()}
        image, text = figure(results), page(known, results)
    write_atomically(RESULTS / "tasks.png", lambda file: file.write(image))
    write_text(RESULTS.with_suffix(".md"), text)
    print(f"wrote {RESULTS.with_suffix('.md').relative_to(ROOT)}")


if __name__ == "__main__":
    run_script(main)
