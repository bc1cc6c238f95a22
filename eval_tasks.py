"""Tasks that have right answers: records that are filled in, and those of lm-evaluation-harness.

    python eval_tasks.py out/sudoku6 --tasks sudoku6 --mode confidence --threshold 0.9 --html FILE
    python eval_tasks.py out/own --tasks data/questions --mode l2r --json result.json
    python eval_tasks.py out/quickstart --tasks my_task --include-path my_tasks --json result.json
    python eval_tasks.py out/aogpt_small --tasks hellaswag --order random --num-orders 16
    torchrun --nproc_per_node=8 eval_tasks.py gpt2/ --tasks gsm8k --gen-kwargs max_gen_toks=128

A task is the name or the folder of prepared records (data/prepare.py sudoku6, ... or records), or
else one of the harness, which needs: pip install -r requirements-harness.txt. Either has options of
its own: --tasks sudoku6 --help tells those of records.

The YAML file of a task is a program: by the harness's design it can name Python functions to call
(!function) and holds templates that are run (Jinja). Give only files that you would run;
--bundled-only loads no others than those that come with the harness.
"""

from __future__ import annotations

from runtime.errors import UserError

import contextlib
import dataclasses
import difflib
import itertools
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro

from checkpoints.load import load
from data.loader import find_dataset, load_meta
from data.puzzles import TASKS
from data.sources import cause
from evaluation.harness import HarnessModel, Settings, lm_eval, require_lm_eval
from evaluation.tasks import answer, open_questions, page_of
from runtime.command_line import ModelOptions, run_script
from runtime.devices import out_of_memory, pick_dtype
from runtime.outputs import OutputOptions, Outputs
from runtime.processes import Processes, processes
from runtime.reports import markdown_table, provenance
from runtime.validation import Count, NonNegative, check_values, flag
from sampling.modes import DecodingOptions, Mode, check_mode, with_mode_defaults
from sampling.plans import Score
from sampling.token_choice import Temperature

DECODING = {field.name for field in dataclasses.fields(DecodingOptions)}
HEAD = ["task", "mode", "exact match", "std. error", "possible", "records", "NFE", "seconds"]


def main() -> None:
    if names_records(sys.argv[1:]):
        of_records = tyro.cli(RecordArguments, description=__doc__)
        with processes(of_records.device) as procs:
            fill_in(of_records, procs)
        return
    check_options(sys.argv[1:])
    arguments = tyro.cli(Arguments, description=__doc__)
    require_lm_eval()
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def check_options(words: list[str]) -> None:
    """Raise ValueError for a command line that has no task, or options that only records have."""
    named = named_tasks(words)
    if not named and not {"--help", "-h"} & set(words):
        raise UserError("no task is named: give --tasks, such as --tasks sudoku6")
    fields = [
        {field.name for field in dataclasses.fields(of)} for of in (RecordArguments, Arguments)
    ]
    of_records = {flag(name) for name in fields[0] - fields[1]}
    modes = {*get_args(Score), "speculative"}  # which the harness is not answered in
    alone = [word for word in words if word.partition("=")[0] in of_records or word in modes]
    if named and alone:
        near = difflib.get_close_matches(named[0], TASKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{alone[0]} is for prepared records, and there is no folder of records "
            f"{named[0]!r}{hint or ': make it with data/prepare.py'}"
        )


def named_tasks(words: list[str]) -> list[str]:
    """What stands after every --tasks of a command line."""
    pairs = itertools.pairwise([*words, ""])
    return [word.partition("=")[2] or after for word, after in pairs if is_tasks(word)]


def names_records(words: list[str]) -> bool:
    """Whether the first task of a command line is a data set, and not one of the harness."""
    named = named_tasks(words)
    if not named or named[0] in TASKS:
        return bool(named)
    try:
        meta = load_meta(find_dataset(named[0]))
    except FileNotFoundError:
        return False
    # The harness has tasks of the names of evaluation sets, such as lambada; a folder is one's own.
    return meta.get("protocol") == "records" or Path(named[0]).is_dir()


def is_tasks(word: str) -> bool:
    return word == "--tasks" or word.startswith("--tasks=")


# ---- records -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordArguments(DecodingOptions, ModelOptions, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights."""
    tasks: tuple[str, ...]
    """Prepared records: names under data/, or folders."""
    mode: Mode | None = None
    """As in sample.py; by default confidence, the surest position first, and of a plain GPT l2r."""
    split: str | None = None
    """By default test, where there is one."""
    temperature: Temperature | None = None
    """By default 0, the most probable tokens; 1 for copy, replace and shuffle, whose limits are
    those of samples."""
    limit: Count | None = None
    """Only the first records of every task."""
    json: Path | None = None
    """Write results, settings and versions to this file."""
    samples: Path | None = None
    """Write a JSON object per record: its text, the answer, whether it is right, the step of each
    token, and its NFE."""
    html: Path | None = None
    """Write a page on which the first records of the first task fill in, step by step."""


def fill_in(a: RecordArguments, procs: Processes) -> None:
    """Answer all records of all tasks; the main process prints and writes what came of it."""
    files = {"--json": a.json, "--samples": a.samples, "--html": a.html}
    outputs = Outputs(files, [a.run], a.overwrite)
    loaded = load(a.run, a.weights, procs.device, a.block_size)
    dtype = pick_dtype(a.dtype, procs.device)
    loaded.model.to(dtype)
    results, rows, page = [], [], None
    for name in a.tasks:
        questions = open_questions(name, a.split, loaded, a.limit)
        temperature = a.temperature
        if temperature is None:
            temperature = questions.task.temperature if questions.task else 0.0
        mode = a.mode or ("l2r" if loaded.model.config.l2r_only else "confidence")
        options = with_mode_defaults(dataclasses.replace(a, temperature=temperature, mode=mode))
        check_mode(options, loaded.model.config)
        answers = answer(loaded, questions, options, a.seed, procs)
        used = {key: value for key, value in vars(options).items() if key in DECODING}
        results.append({"task": questions.name} | used | {"mode": mode} | answers.summary())
        of_samples = zip(answers.samples.rows(), answers.samples.nfe.tolist(), strict=True)
        rows += [
            {"task": questions.name} | record | {"step": step, "nfe": nfe}
            for record, ((_, step, _), nfe) in zip(answers.records, of_samples, strict=True)
        ]
        told = {key: value for key, value in results[-1].items() if value is not None}
        page = page or page_of(loaded, questions, answers, told)
    if not procs.main:
        return
    print(loaded.describe(), "", *markdown_table(HEAD, [cells(r) for r in results], 2), sep="\n")
    checkpoint = {key: getattr(loaded, key) for key in ("path", "step", "weights", "system")}
    origin = provenance(a, dtype, procs.device, procs.world_size, checkpoint=checkpoint)
    with outputs:
        outputs.write_jsonl(a.samples, rows)
        outputs.write(a.html, page)
        outputs.write_json(a.json, {"results": results} | origin)


def cells(result: dict) -> list[str]:
    limit = "" if result["limit"] is None else f"{result['limit']:.4f}"
    numbers = f"{result['exact_match']:.4f}", f"{result['standard_error']:.4f}", limit
    cost = str(result["records"]), f"{result['nfe']:.1f}", f"{result['seconds']:.1f}"
    return [result["task"], result["mode"], *numbers, *cost]


# ---- lm-evaluation-harness -----------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent
ROOMS = ("checkpoints", "data", "evaluation", "runtime", "sampling")


@dataclass(frozen=True, kw_only=True)
class Arguments(Settings, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights."""
    tasks: tuple[str, ...]
    """Tasks, groups or tags of the harness by name (also with *), or the YAML files of tasks."""
    include_path: Path | None = None
    """Folder with the YAML files of your own tasks."""
    bundled_only: bool = False
    """Only tasks that come with the harness: no file or folder of others."""
    num_fewshot: NonNegative | None = None
    """Examples in front of every context; by default what the task says."""
    limit: Count | None = None
    """Only the first rows of every task; for a try."""
    gen_kwargs: str | None = None
    """Settings of generation instead of the tasks' own,
    "max_gen_toks=64,temperature=0.7,do_sample=True"."""
    json: Path | None = None
    """Write results, settings and versions to this file."""
    samples: Path | None = None
    """Write a JSON object per row of every task: its requests, the answers and their scores."""


def evaluate(a: Arguments, procs: Processes) -> None:
    from lm_eval.tasks import TaskManager

    check_values(a)
    if a.include_path is not None and not a.include_path.is_dir():
        raise UserError(f"--include-path {a.include_path}: there is no such folder")
    if a.bundled_only and (a.include_path or any(Path(name).exists() for name in a.tasks)):
        raise UserError("--bundled-only takes no files of tasks: name tasks of the harness")
    inputs = [a.run, *a.tasks, a.include_path]
    outputs = Outputs({"--json": a.json, "--samples": a.samples}, inputs, a.overwrite)
    settings = {field.name: getattr(a, field.name) for field in dataclasses.fields(Settings)}
    model = HarnessModel(a.run, procs, **settings)
    with mistakes_of_tasks():
        manager = TaskManager(include_path=a.include_path)
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=find_tasks(manager, a.tasks),
            num_fewshot=a.num_fewshot,
            limit=a.limit,
            gen_kwargs=a.gen_kwargs,
            task_manager=manager,
            log_samples=a.samples is not None,
        )
    if procs.main:
        with outputs:
            report(a, outputs, model, results)


@contextlib.contextmanager
def mistakes_of_tasks():
    """Turn what the harness and its libraries raise into one line: their tasks are at fault, broken
    YAML, unknown keys, missing splits, rows without a field. Errors of this project pass."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(frame.filename).parent in (ROOT, *(ROOT / room for room in ROOMS))
        if ours or out_of_memory(error):
            raise
        raise UserError(
            f"the tasks cannot be evaluated: {cause(error)} ({Path(frame.filename).name}, line "
            f"{frame.lineno}); mend their files, or name other tasks"
        ) from error


def find_tasks(manager, wanted: tuple[str, ...]) -> list[str]:
    """The names of tasks, each as given or all that match a pattern; ValueError for what is not
    there."""
    found = []
    for name in wanted:
        matching = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, [*TASKS, *manager.all_tasks], n=3)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise UserError(
                f"there is no task {name!r}, and no folder of prepared records: {hint}Records are "
                "made by data/prepare.py; tasks of the harness of your own are found with "
                "--include-path FOLDER"
            )
        found += matching
    if not found:
        raise UserError("--tasks names no task; give at least one")
    return found


def report(a: Arguments, outputs: Outputs, model: HarnessModel, results: dict) -> None:
    """Print the harness's tables and write the files that are asked for."""
    from lm_eval.utils import make_table

    loaded, settings = model.loaded, model.settings
    kinds = f"log-likelihoods: {settings.order}, generation: {settings.mode}"
    print(f"{loaded.describe()}, {kinds}")
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if a.samples:
        rows = [{"task": task} | row for task, rows in results["samples"].items() for row in rows]
        outputs.write_jsonl(a.samples, rows)
    if a.json:
        checkpoint = {"path": loaded.path, "step": loaded.step, "weights": loaded.weights}
        # The order and the mode that were taken, where the user left them to the model.
        used = dataclasses.replace(a, order=settings.order, mode=settings.mode)
        document = provenance(
            used, model.dtype, model.device, model.world_size, checkpoint=checkpoint
        )
        document["versions"]["lm_eval"] = lm_eval.__version__
        for name in ("results", "groups", "n-samples", "n-shot", "higher_is_better", "configs"):
            if name in results:
                document[name] = results[name]
        document["task_versions"] = results["versions"]
        outputs.write_json(a.json, document)


if __name__ == "__main__":
    run_script(main)
