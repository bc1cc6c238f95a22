"""Tasks in which order matters, or does not: systems of equal size, decoded in many
ways.

    python -m studies.tasks --jobs 2                # train what is missing, and decode
    python -m studies.tasks star sudoku6 --jobs 2   # results/tasks/star.runs.jsonl, ...
    python -m studies.tasks star --seeds 1 --quick  # does it run? A few steps of each
    python -m studies.tasks details star            # every system and decoder
    python -m studies.tasks page                    # the page and the figure of all

Systems, decoders and tasks are those of studies/configs/tasks/systems.toml. A missing
dataset is made first. Finished runs are not trained again, nor those with a row in
results/tasks/star.runs.jsonl (remove it to repeat them), and an interrupted run is
resumed. The page, the figure and the details are made of these rows.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from aogpt.checkpoints import load
from aogpt.evaluation.eval_sets import open_questions
from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_atomically, write_text
from aogpt.runtime.processes import Processes
from aogpt.runtime.validation import check_values, read_toml
from aogpt.sampling.modes import DecodingOptions, check_mode
from aogpt.training.config import Config
from studies.answer_pages import (
    COMPARED,
    CONFIGS,
    RECIPE,
    RESULTS,
    Entries,
    details,
    figure,
    page,
    task_table,
)
from studies.answers import answer, first_rows
from studies.experiment import Experiment, read_run_configs
from studies.pages import reported
from studies.prepare import DATASETS, PrepareStudy, prepare
from studies.puzzles import TASKS
from studies.runner import MissingRow, Results, Runner, RunOptions
from studies.runs import ROOT, finished_run

# records decoded together; and with --quick, in all
BATCH = 100
QUICK_RECORDS = 100


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Tasks of studies/configs/tasks/systems.toml, by default all and then the page;
    `details`, or `details` and tasks; or `page`."""


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    check_values(a)
    torch.set_num_threads(1)  # decoding is timed
    tasks, decoders = load_tasks()
    if a.tasks == ("page",):
        write_page(tasks, decoders)
        return
    only_details = a.tasks[:1] == ("details",)
    names = a.tasks[1:] if only_details else a.tasks
    for name in names:
        if name not in tasks:
            raise UserError(f"there is no task {name!r}; choose of {', '.join(tasks)}")
    chosen = {name: tasks[name] for name in names or tasks}
    if only_details:
        show(details(chosen, load_results(chosen, decoders)), end="")
        return
    is_complete = not a.quick and not a.tasks
    for name, experiment in chosen.items():
        run(name, experiment, decoders, a)
        if a.seeds and a.seeds < experiment.seeds:
            is_complete = False
    if is_complete:
        write_page(tasks, decoders)


def load_tasks() -> tuple[dict[str, Experiment], dict[str, dict]]:
    """Return an experiment for each task, with what it asks as its title, and decoding
    options by name. A task has the systems of all, and its own."""
    values = read_toml(CONFIGS / "systems.toml")
    tasks = {}
    for task, changes in values["tasks"].items():
        title = changes.pop("says")
        seeds = changes.pop("seeds", values["seeds"])
        systems = {**values["run_configs"], **changes.pop("run_configs", {})}
        changes.setdefault("tune", values["tune"])
        changes["data.folder"] = f"data/{task}"
        changes["model.block_size"] = TASKS[task].length
        run_configs = read_run_configs(systems, task, changes)
        tasks[task] = Experiment(
            name=f"tasks/{task}",
            title=title,
            setting=values["setting"],
            base=values["base"],
            recipes={RECIPE: run_configs},
            seeds=seeds,
            tuning_seeds=values["tuning_seeds"],
        )
    return tasks, values["decoders"]


def run(
    task: str, experiment: Experiment, decoders: dict[str, str], a: Arguments
) -> Entries:
    """Train what is missing of a task, decode, print the results and return the
    systems."""
    if not (ROOT / "data" / task / "meta.json").exists():
        prepare(PrepareStudy(task), DATASETS)
    file = None if a.quick else RESULTS / f"{task}.runs.jsonl"
    results = Results(file)
    runner = Runner(experiment, results, jobs=a.jobs, quick=a.quick)
    entries = answered(task, runner, decoders, a.seeds or experiment.seeds)
    show("\n".join(task_table(entries)))
    return entries


def load_results(
    tasks: dict[str, Experiment], decoders: dict[str, str]
) -> dict[str, Entries]:
    """Return the systems of each task, made of the rows of its runs: without systems
    that lack a run, and without tasks that lack a system which is compared on all, or
    a decoder of some run."""
    compared = {system for system, _ in COMPARED.values()}
    results = {}
    for task, experiment in tasks.items():
        rows = Results(RESULTS / f"{task}.runs.jsonl", complete=True)
        with contextlib.suppress(MissingRow):
            runner = Runner(experiment, rows, partial=True)
            entries = answered(task, runner, decoders, experiment.seeds)
            if compared <= entries.keys():
                results[task] = entries
    return results


def answered(
    task: str, runner: Runner, decoders: dict[str, str], seeds: int
) -> Entries:
    """Return the systems of a task with the "decoders" of each run: how it answers,
    decoded in each way that it can be. Trains and decodes what has no row."""
    experiment = runner.experiment
    systems = experiment.recipes[RECIPE]
    entries = runner.train(seeds)[RECIPE]
    limit = QUICK_RECORDS if runner.quick else None
    for seed in range(seeds):
        configs = {}
        for system, entry in entries.items():
            # A copy: the row of the run itself is saved without them.
            entry["runs"][seed] = {**entry["runs"][seed], "decoders": {}}
            configs[system] = experiment.config(
                RECIPE, systems[system], seed, entry["tuned"], runner.quick
            )
        for name, mode in decoders.items():
            words = [f"limit {limit}", f"mode {mode}"]
            # Times are compared: one system after the other.
            for system, config in configs.items():
                options = decoding_options(mode, task, config)
                if options:
                    make = functools.partial(decode, config, options, limit)
                    result = runner.results.of(config, [words], make)
                    entries[system]["runs"][seed]["decoders"][name] = result
    return reported(experiment, {RECIPE: entries})[RECIPE]


def decoding_options(mode: str, task: str, config: Config) -> DecodingOptions | None:
    """Return options with the task's temperature; None if the model does not have the
    mode, as a plain GPT only decodes left to right."""
    temperature = TASKS[task].temperature
    options = DecodingOptions(mode=mode, temperature=temperature, batch_size=BATCH)
    with contextlib.suppress(UserError):
        check_mode(options.plan, config.model)
        return options


def decode(config: Config, options: DecodingOptions, limit: int | None) -> dict:
    """Return `Answers.summary` of a run on the test split, after a warm-up."""
    finished_run(config)
    loaded = load(config.run_folder)
    alone = Processes(0, 1, torch.device("cpu"))
    questions = open_questions(config.data.folder, "test", loaded, limit)
    judge = TASKS.get(questions.dataset)
    few = first_rows(questions, options.batch_size)
    answer(loaded, few, options, config.seed, alone, judge)
    answers = answer(loaded, questions, options, config.seed, alone, judge)
    return answers.summary()


def write_page(tasks: dict[str, Experiment], decoders: dict[str, str]) -> None:
    results = load_results(tasks, decoders)
    image = figure(results)
    file = RESULTS / "tasks.png"
    write_atomically(file, lambda stream: stream.write(image))
    write_text(RESULTS / "README.md", page(results))
    show("wrote results/tasks")


if __name__ == "__main__":
    run_script(main)
