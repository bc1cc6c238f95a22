"""Tasks in which order matters, or does not: systems of equal size, decoded in many ways.

    python -m studies.tasks --jobs 2                 # train what is missing of all tasks, decode
    python -m studies.tasks star sudoku6 --jobs 2    # of these; results/tasks/star.json and so on
    python -m studies.tasks star --quick             # does it run? A few steps of every system
    python -m studies.tasks page                     # the pages again, of all that has results

Systems, decoders and tasks are those of studies/configs/tasks/systems.toml. A missing dataset is
made first. Finished runs are not trained again, nor those with a row in
results/tasks/star.runs.jsonl (remove it to repeat them), and an interrupted run is resumed.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from aogpt.checkpoints import load
from aogpt.evaluation.answers import answer, open_questions
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_atomically, write_json, write_text
from aogpt.runtime.outputs import versions
from aogpt.runtime.processes import Processes
from aogpt.runtime.validation import check_values, read_results, read_toml
from aogpt.sampling.modes import DecodingOptions, check_mode, with_mode_defaults
from aogpt.training.config import Config
from studies.answer_pages import (
    CONFIGS,
    RECIPE,
    RESULTS,
    details,
    figure,
    page,
    task_table,
)
from studies.experiment import OUT, Experiment, read_run_configs
from studies.pages import reported
from studies.prepare import DATASETS, PrepareStudy, prepare
from studies.puzzles import TASKS
from studies.runner import Results, Runner, RunOptions
from studies.runs import ROOT, finished_run

# records decoded together; and with --quick, in all
BATCH = 100
QUICK_RECORDS = 100


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Tasks of studies/configs/tasks/systems.toml, or: page. By default all, and then the page."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    torch.set_num_threads(1)  # decoding is timed
    known, decoders = load_tasks()
    if a.tasks == ("page",):
        write_page(known)
        return
    for name in a.tasks:
        if name not in known:
            raise UserError(f"there is no task {name!r}; choose of {', '.join(known)}")
    complete = [run(name, known[name], decoders, a) for name in a.tasks or known]
    if not a.tasks and all(complete):
        write_page(known)


def load_tasks() -> tuple[dict[str, Experiment], dict[str, dict]]:
    """An experiment for each task, with what it asks as its title; decoding options by name."""
    values = read_toml(CONFIGS / "systems.toml")
    parts = "run_configs", "tune", "tasks", "decoders"
    run_configs, tune, tasks, decoders = (values.pop(part) for part in parts)
    found = {}
    for task, changes in tasks.items():
        of = {"name": f"tasks/{task}", "title": changes.pop("says")}
        of["seeds"] = changes.pop("seeds", values["seeds"])
        changes |= {
            "data.folder": f"data/{task}",
            "model.block_size": TASKS[task].length,
        }
        of["recipes"] = {
            RECIPE: read_run_configs(run_configs, task, {"tune": tune} | changes)
        }
        found[task] = Experiment(**values | of)
    return found, decoders


def run(
    task: str, experiment: Experiment, decoders: dict[str, dict], a: Arguments
) -> bool:
    """Train what is missing of a task, decode, and write and print the results. Returns whether
    they are complete."""
    if not (ROOT / "data" / task / "meta.json").exists():
        prepare(PrepareStudy(task), DATASETS)
    seeds = a.seeds or experiment.seeds
    limit = QUICK_RECORDS if a.quick else None
    results = Results(None if a.quick else RESULTS / f"{task}.runs.jsonl")
    found = Runner(experiment, results, jobs=a.jobs, quick=a.quick).train(seeds)
    entries = found[RECIPE]
    systems = experiment.recipes[RECIPE]

    def config(system: str, seed: int) -> Config:
        tuned = entries[system]["tuned"]
        return experiment.config(RECIPE, systems[system], seed, tuned, a.quick)

    for seed in range(seeds):
        for entry in entries.values():
            entry["runs"][seed]["decoders"] = {}
        for (
            name,
            values,
        ) in decoders.items():  # times are compared: one system after the other
            settings = [
                f"limit {limit}",
                *(f"{key} {value}" for key, value in values.items()),
            ]
            for system, entry in entries.items():
                if options := decoding_options(values, task, config(system, seed)):
                    make = functools.partial(
                        decode, config(system, seed), options, limit
                    )
                    answers = results.of(config(system, seed), [settings], make)
                    entry["runs"][seed]["decoders"][name] = answers
    complete = seeds >= experiment.seeds and not a.quick
    folder = RESULTS if complete else OUT / ("quick" if a.quick else "part") / "tasks"
    file = folder / f"{task}.json"
    origin = {"torch": versions()["torch"]}
    values = {"experiment": experiment.name, "recipes": found} | origin
    write_json(file, values)
    show(*task_table(reported(experiment, values)[RECIPE]), f"wrote {file}", sep="\n")
    return complete


def decoding_options(values: dict, task: str, config: Config) -> DecodingOptions | None:
    """Options with the task's temperature; None if the model does not support them, as a plain GPT
    only decodes left to right."""
    settings = {"temperature": TASKS[task].temperature, "batch_size": BATCH}
    options = with_mode_defaults(DecodingOptions(**values | settings))
    with contextlib.suppress(UserError):
        check_mode(options, config.model)
        return options


def decode(config: Config, options: DecodingOptions, limit: int | None) -> dict:
    """`Answers.summary` of a run on the test split, after a warm-up."""
    finished_run(config)
    loaded = load(config.run_folder)
    alone = Processes(0, 1, torch.device("cpu"))
    questions = open_questions(config.data.folder, "test", loaded, limit, TASKS)
    answer(loaded, questions.first(options.batch_size), options, config.seed, alone)
    return answer(loaded, questions, options, config.seed, alone).summary()


def write_page(known: dict[str, Experiment]) -> None:
    """The pages and the figure of all tasks that have results."""
    files = {
        task: file for task in known if (file := RESULTS / f"{task}.json").exists()
    }
    found = {task: read_results(file, "make it again") for task, file in files.items()}
    results = {
        task: reported(known[task], values)[RECIPE] for task, values in found.items()
    }
    image = figure(results)
    write_atomically(RESULTS / "tasks.png", lambda file: file.write(image))
    write_text(RESULTS / "README.md", page(results))
    write_text(RESULTS / "tasks.details.md", details(known, results))
    show("wrote results/tasks")


if __name__ == "__main__":
    run_script(main)
