"""Tasks in which order matters, or does not: AO-GPT, an encoder, a plain GPT and a two-stream decoder
of equal size, decoded in many ways, and how often their answers are right.

    python -m studies.tasks --jobs 2                 # train what is missing of all tasks; results/tasks.md
    python -m studies.tasks star sudoku6 --jobs 2    # of these; results/tasks/*.json
    python -m studies.tasks star --quick             # does it run? A few steps of every system
    python -m studies.tasks page                     # results/tasks.md, of all tasks that have results

Systems, decoders and tasks are those of studies/configs/tasks/systems.toml. A missing dataset is made
first. Finished runs are not trained again, nor those with a row in results/tasks/star.runs.jsonl
(remove the file to repeat them), and an interrupted run is resumed.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from checkpoints.load import Loaded, load
from data.prepare import Prepare, prepare
from data.tasks import TASKS
from evaluation.tasks import ON_PAGE, Answers, Questions, answer, open_questions, page_of
from model import ModelConfig
from runtime.command_line import run_script
from runtime.errors import UserError
from runtime.files import write_atomically, write_json, write_text
from runtime.processes import Processes
from runtime.reports import versions
from runtime.validation import Count, check_values, damaged, read_results, read_toml
from sampling.modes import DecodingOptions, check_mode, with_mode_defaults
from studies.answer_pages import ANY_ORDER, RECIPE, RESULTS, figure, page, task_table
from studies.experiment import OUT, Experiment
from studies.runner import Results, train
from studies.runs import ROOT, read_run_configs, run_of
from training.config import Config

SYSTEMS = ROOT / "studies" / "configs" / "tasks" / "systems.toml"
BATCH = 100  # records decoded together


@dataclass(frozen=True, kw_only=True)
class Arguments:
    tasks: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[TASK ...]")
    ] = ()
    """Tasks of studies/configs/tasks/systems.toml, or: page. By default all, and then the page."""
    seeds: Count | None = None
    """By default as many as the file says. Results of fewer seeds or records go to
    out/findings/part."""
    jobs: Count = 1
    """Runs in parallel on a CPU, each with one thread."""
    limit: Count | None = None
    """Only the first records of the test split."""
    quick: bool = False
    """A few steps of every system, untuned, to see that everything runs. Results go to
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
    complete = [run(known[name], a) for name in a.tasks or known]
    if not a.tasks and all(complete):
        write_page(known)


@dataclass(frozen=True)
class TaskExperiment:
    """A task, the systems that are trained on it, and how they decode."""

    task: str
    says: str
    """What has to be answered."""
    experiment: Experiment
    decoders: dict[str, dict]
    """Decoding options by name."""


def load_tasks(file: Path = SYSTEMS) -> dict[str, TaskExperiment]:
    values = read_toml(file)
    run_configs, tune = values.pop("run_configs"), values.pop("tune")
    tasks, decoders = values.pop("tasks"), values.pop("decoders")
    found = {}
    for task, changes in tasks.items():
        says = changes.pop("says")
        fixed = {"data.folder": f"data/{task}", "model.block_size": TASKS[task].length}
        tables = {"recipe": fixed | changes | {"tune": tune}}
        tables |= {name: {"from": "recipe"} | table for name, table in run_configs.items()}
        systems = read_run_configs(tables, f"task {task}")
        del systems["recipe"]
        experiment = Experiment(name=f"tasks/{task}", recipes={RECIPE: systems}, **values)
        found[task] = TaskExperiment(task, says, experiment, decoders)
    return found


def run(of: TaskExperiment, a: Arguments) -> bool:
    """Train what is missing of a task, decode, and write and print the results. Returns whether
    they are complete."""
    if not (ROOT / "data" / of.task / "meta.json").exists():
        prepare(Prepare(of.task))
    seeds = a.seeds or of.experiment.seeds
    results = Results(None if a.quick else RESULTS / f"{of.task}.runs.jsonl")
    found = train(of.experiment, [RECIPE], seeds, results, jobs=a.jobs, quick=a.quick)
    decode(of, found[RECIPE], seeds, results, a)
    complete = seeds >= of.experiment.seeds and a.limit is None and not a.quick
    folder = RESULTS if complete else OUT / ("quick" if a.quick else "part") / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    file, torch_version = folder / f"{of.task}.json", versions()["torch"]
    made = {"experiment": of.experiment.name, "recipes": found, "torch": torch_version}
    write_json(file, made)
    print(*task_table(found[RECIPE]), f"wrote {file}", sep="\n")
    if complete and TASKS[of.task].board:
        aogpt = of.experiment.recipes[RECIPE]["aogpt"]
        config = of.experiment.config(RECIPE, aogpt, 0, found[RECIPE]["aogpt"]["tuned"])
        write_text(file.with_suffix(".html"), Decoder(of, config, ON_PAGE).page())
    return complete


def decode(
    of: TaskExperiment, entries: dict[str, dict], seeds: int, results: Results, a: Arguments
) -> None:
    """Add to every run what each decoder makes of the test split: `Answers.summary`."""
    systems = of.experiment.recipes[RECIPE]
    for seed in range(seeds):
        models = {
            name: Decoder(
                of,
                of.experiment.config(RECIPE, systems[name], seed, entry["tuned"], a.quick),
                a.limit,
            )
            for name, entry in entries.items()
        }
        for entry in entries.values():
            entry["runs"][seed]["decoders"] = {}
        for decoder in of.decoders:  # whose times are compared: one system after the other
            for name, model in models.items():
                if decoder in model.possible:
                    summary = model.summary(decoder, results)
                    entries[name]["runs"][seed]["decoders"][decoder] = summary


class Decoder:
    """A run that answers the test split, trained and loaded when it is first needed."""

    def __init__(self, of: TaskExperiment, config: Config, limit: int | None):
        self.of, self.config, self.limit = of, config, limit
        self.possible = possible_decoders(of, config.model)

    def summary(self, decoder: str, results: Results) -> dict:
        settings = [f"{key} {value}" for key, value in self.of.decoders[decoder].items()]
        measured_by = [[f"limit {self.limit}", *settings]]
        make = functools.partial(self.decode, self.possible[decoder])
        return results.of(self.config, measured_by, make)

    def decode(self, options: DecodingOptions) -> dict:
        loaded, questions = self.loaded
        self.answer(loaded, questions.first(options.batch_size), options)  # a warm-up
        return self.answer(loaded, questions, options).summary()

    def answer(self, loaded: Loaded, questions: Questions, options: DecodingOptions) -> Answers:
        alone = Processes(0, 1, torch.device("cpu"))
        return answer(loaded, questions, options, self.config.seed, alone)

    def page(self) -> str:
        """HTML on which some records fill in, the most confident positions first."""
        loaded, questions = self.loaded
        answers = self.answer(loaded, questions.first(ON_PAGE), self.possible[ANY_ORDER])
        return page_of(loaded, questions, answers, {"task": self.of.task, "decoded": ANY_ORDER})

    @functools.cached_property
    def loaded(self) -> tuple[Loaded, Questions]:
        loaded = load(run_of(self.config).config.run_folder)
        return loaded, open_questions(self.config.data.folder, "test", loaded, self.limit)


def possible_decoders(of: TaskExperiment, model: ModelConfig) -> dict[str, DecodingOptions]:
    """The decoders that a model supports, with the task's temperature."""
    found = {}
    for name, values in of.decoders.items():
        options = DecodingOptions(**values)
        batch_size, temperature = options.batch_size or BATCH, TASKS[of.task].temperature
        options = replace(options, temperature=temperature, batch_size=batch_size)
        options = with_mode_defaults(options)
        with contextlib.suppress(ValueError):  # a plain GPT only decodes left to right
            check_mode(options, model)
            found[name] = options
    return found


def write_page(known: dict[str, TaskExperiment]) -> None:
    """The page and the figure of all tasks that have results."""
    files = {task: file for task in known if (file := RESULTS / f"{task}.json").exists()}
    if not files:
        raise UserError(f"no results in {RESULTS} yet: name a task first")
    with damaged(RESULTS, "make its files again: python -m studies.tasks TASK"):
        found = {task: read_results(file, "make it again") for task, file in files.items()}
        results = {task: values["recipes"][RECIPE] for task, values in found.items()}
        says = {task: of.says for task, of in known.items()}
        setting = next(iter(known.values())).experiment.setting
        image, text = figure(results), page(says, setting, results)
    write_atomically(RESULTS / "tasks.png", lambda file: file.write(image))
    write_text(RESULTS.with_suffix(".md"), text)
    print(f"wrote {RESULTS.with_suffix('.md').relative_to(ROOT)}")


if __name__ == "__main__":
    run_script(main)
