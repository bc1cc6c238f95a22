"""Accuracy on tasks: prompts of a prepared data set, or tasks of lm-evaluation-harness.

    python eval_tasks.py out/own --tasks data/questions --mode confidence --html FILE
    python eval_tasks.py out/own --tasks data/questions --mode l2r --json result.json
    python eval_tasks.py out/quickstart --tasks my_task --include-path my_tasks
    python eval_tasks.py out/aogpt --tasks hellaswag --order random --num-orders 16
    torchrun --nproc_per_node=8 eval_tasks.py gpt2/ --tasks gsm8k

A task is a prepared data set with prompts, by name or folder (data/prepare.py records;
puzzles with several right answers: python -m studies.puzzle_answers), or a task of the
harness, which needs: pip install -r requirements/harness.txt.

The YAML file of a task can run code (Python functions, Jinja templates): use only files
that you trust."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from aogpt.checkpoints import Loaded, load
from aogpt.data.catalogue import OF_STUDIES, command_for
from aogpt.data.loader import find_dataset, load_meta
from aogpt.evaluation import harness
from aogpt.evaluation.answers import (
    Judge,
    Questions,
    answer,
    open_questions,
    page_of,
)
from aogpt.runtime.command_line import RunOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import OutputOptions, Outputs, markdown_table, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, NonNegative, check_values, flag
from aogpt.sampling.modes import (
    DecodingOptions,
    Mode,
    changed_settings,
    check_mode,
    end_note,
    with_mode_defaults,
)
from aogpt.sampling.token_choice import Temperature

# Columns of the table, and how numbers are written.
COLUMNS = {
    "task": "",
    "mode": "",
    "exact_match": ".4f",
    "standard_error": ".4f",
    "limit": ".4f",
    "records": "d",
    "nfe": ".1f",
    "seconds": ".1f",
}
OF_DATA = ("split", "html")  # options that the tasks of the harness do not have
OF_HARNESS = ("num_orders", "include_path", "num_fewshot", "gen_kwargs")


@dataclass(frozen=True, kw_only=True)
class Decoding(DecodingOptions):
    """Prompts: by default --mode confidence, and l2r for a plain GPT. The harness:
    --mode is that of generation, by default l2r, and mdm for encoders; --order that of
    log-likelihoods, l2r (default) or random, an estimate of the ELBO (encoders'
    default)."""

    temperature: Temperature | None = None
    """Prepared data: by default 0 (the most probable token). The harness: by default
    1."""


@dataclass(frozen=True, kw_only=True)
class Arguments(harness.Settings, RunOptions, OutputOptions):
    tasks: tuple[str, ...]
    """Prepared data, by name or folder; or tasks, groups or tags of the harness by name
    (* matches any text), or YAML files of tasks."""
    decoding: Annotated[Decoding, tyro.conf.arg(name="")]
    limit: Count | None = None
    """Use only this many rows of every task: of prepared data evenly spread, of the
    harness the first. By default all."""
    split: str | None = None
    """Prepared data: the split; by default test, if there is one."""
    html: Path | None = None
    """Prepared data: write a page on which the first answers fill in, step by step."""
    include_path: Path | None = None
    """Harness: folder with the YAML files of your own tasks."""
    num_fewshot: NonNegative | None = None
    """Harness: examples before every context; by default the number that the task
    sets."""
    gen_kwargs: str | None = None
    """Harness: settings of generation that replace those of the tasks, such as
    "max_gen_toks=64,temperature=0.7,do_sample=True"."""
    json: Path | None = None
    """Write results, settings and versions to this file."""
    samples: Path | None = None
    """Write a JSON object per row of every task: the answer, and whether it is
    right."""


def main(judges: Mapping[str, Judge] | None = None) -> None:
    """Answer the tasks of the command line. judges: see `open_questions`."""
    a = tyro.cli(with_help(Arguments), prog="python eval_tasks.py", description=__doc__)
    check_values(a)
    if not a.tasks:
        raise UserError(
            "--tasks names no task; give at least one, such as --tasks data/questions"
        )
    of_data = is_prepared(a.tasks[0])
    if of_data:
        refuse_options(a, OF_HARNESS, kind="tasks of the harness")
    else:
        refuse_options(a, OF_DATA, kind="prepared data")
        harness.require_lm_eval()
    with processes(a.device) as procs:
        if of_data:
            answer_prompts(a, procs, judges)
        else:
            evaluate(a, procs)


def refuse_options(a: Arguments, names: tuple[str, ...], kind: str) -> None:
    """Raise UserError if one of these options, which are for tasks of another kind, is
    given."""
    for name in names:
        if getattr(a, name) != getattr(Arguments, name):
            raise UserError(
                f"{flag(name)} is for {kind}, not for {a.tasks[0]}: leave it out"
            )


def is_prepared(task: str) -> bool:
    """Return whether a task is a prepared data set, not a task of the harness."""
    if task in OF_STUDIES:  # a message says how to make it
        return True
    try:
        meta = load_meta(find_dataset(task))
    except FileNotFoundError:
        return False
    # The harness has tasks with the names of evaluation sets, such as lambada.
    return meta.get("protocol") == "records" or Path(task).is_dir()


def answer_prompts(
    a: Arguments, procs: Processes, judges: Mapping[str, Judge] | None
) -> None:
    """Answer all prompts of all tasks; the main process prints and writes the
    results."""
    files = {"--json": a.json, "--samples": a.samples, "--html": a.html}
    outputs = Outputs(files, [a.run], a.overwrite)
    loaded = load(
        a.run,
        a.weights,
        procs.device,
        a.block_size,
        a.checkpoint,
    )
    dtype = pick_dtype(a.dtype, procs.device)
    loaded.model.to(dtype)
    # All tasks are opened first, so that a wrong one costs no answers.
    tasks = []
    for name in a.tasks:
        questions = open_questions(name, a.split, loaded, a.limit, judges)
        tasks.append((questions, options_for(a, loaded, questions)))
    results = []
    rows = []
    notes = []
    page = None
    for questions, options in tasks:
        notes.extend(questions.notes)
        answers = answer(loaded, questions, options, a.seed, procs)
        result = {
            "task": questions.name,
            **vars(options),
            "mode": mode_of(a, loaded) or options.mode,
            **answers.summary(),
        }
        results.append(result)
        for record in answers.records:
            rows.append({"task": questions.name, **record})
        notes.append(f"{questions.name}: {', '.join(changed_settings(result))}")
        if result["exact_match"] in (0, 1):
            # Clopper and Pearson: what would be seen in one of 40 such sets.
            least = 0.025 ** (1 / result["records"])
            limits = f"above {least:.4f}"
            if result["exact_match"] == 0:
                limits = f"below {1 - least:.4f}"
            notes.append(
                f"{questions.name}: all answers are alike, so the standard error says "
                f"nothing; the 95% interval is {limits}"
            )
        if page is None:
            shown = {key: value for key, value in result.items() if value is not None}
            page = page_of(loaded, questions, answers, shown)
        if procs.main:  # after every task, so that a job that is killed loses none
            origin = origin_of(a, loaded, dtype, procs)
            outputs.write_jsonl(a.samples, rows, part=True)
            outputs.write(a.html, page, part=True)
            outputs.write_json(a.json, {"results": results, **origin}, part=True)
    if procs.main:
        with outputs:  # raises an error if a file could not be written
            outputs.write_jsonl(a.samples, rows)
            outputs.write(a.html, page)
            outputs.write_json(a.json, {"results": results, **origin})
            show(loaded.description, "", *table_of(results), "", *notes, sep="\n")


def mode_of(a: Arguments, loaded: Loaded) -> Mode | None:
    """Return the mode in which a model answers prompts; None if --order says it."""
    if a.decoding.mode is None and a.decoding.order is None:
        return "l2r" if loaded.model.config.l2r_only else "confidence"
    return a.decoding.mode


def options_for(a: Arguments, loaded: Loaded, questions: Questions) -> DecodingOptions:
    """Return how the questions of a task are answered. Raises UserError for a mode that
    the model does not have."""
    temperature = a.decoding.temperature
    if temperature is None:
        temperature = questions.judge.temperature if questions.judge else 0.0
    mode = mode_of(a, loaded)
    options = replace(a.decoding, temperature=temperature, mode=mode)
    options = with_mode_defaults(options)
    check_mode(options, loaded.model.config)
    return options


def table_of(results: list[dict]) -> list[str]:
    """Return the lines of the table of results."""
    cells = []
    for result in results:
        row = []
        for key, form in COLUMNS.items():
            value = result[key]
            row.append("" if value is None else format(value, form))
        cells.append(row)
    head = [key.replace("_", " ") for key in COLUMNS]
    return markdown_table(head, cells, left=2)


def origin_of(
    a: Arguments, loaded: Loaded, dtype: torch.dtype, procs: Processes
) -> dict:
    """Return the settings, versions and files on which the results depend."""
    return provenance(
        a, dtype, procs.device, procs.world_size, checkpoint=loaded.origin()
    )


def evaluate(a: Arguments, procs: Processes) -> None:
    """Have the harness evaluate its tasks; the main process prints and writes the
    results."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    if a.include_path is not None and not a.include_path.is_dir():
        raise UserError(
            f"--include-path {a.include_path} is no folder; name the one that holds "
            "the YAML files of your tasks"
        )
    inputs = [a.run, *a.tasks, a.include_path]
    outputs = Outputs({"--json": a.json, "--samples": a.samples}, inputs, a.overwrite)
    # 1. The model, as the harness knows it.
    settings = {f.name: getattr(a, f.name) for f in fields(harness.Settings)}
    settings.update(vars(a.decoding))
    if a.decoding.temperature is None:
        settings["temperature"] = 1.0
    model = harness.HarnessModel(a.run, procs, **settings)

    # 2. Its results.
    manager = TaskManager(include_path=a.include_path)
    results = lm_eval.simple_evaluate(
        model,
        tasks=find_tasks(manager, a.tasks, a.include_path),
        task_manager=manager,
        num_fewshot=a.num_fewshot,
        limit=a.limit,
        gen_kwargs=a.gen_kwargs,
        log_samples=a.samples is not None,
    )
    requests = model.request_counts()
    if not procs.main:
        return

    # 3. The printed tables and notes. The order and the mode are those that were
    #    used, where the user left them to the model.
    mode = a.decoding.mode or model.decoding.mode
    show(
        f"{model.loaded.description}, log-likelihoods: {model.order}, generation: "
        f"{mode}\n{make_table(results)}"
    )
    if results.get("groups"):
        show(make_table(results, "groups"))
    if requests["spanning"] or requests["truncated"]:
        show(
            f"of {requests['all']:,} requests, {requests['truncated']:,} contexts lost "
            f"their beginning (the block size is {model.block_size}); in "
            f"{requests['spanning']:,} a token spans context and continuation"
        )
    if requests["generated"]:
        note = end_note(model.decoding)
        if note:
            show(note, file=sys.stderr)
    if requests["windows"]:
        show(
            f"whole texts: {requests['windows']:,} windows of at most "
            f"{model.block_size} tokens, context included"
        )

    # 4. The files.
    origin = origin_of(a, model.loaded, model.dtype, procs)
    document = {"requests": requests, **origin}
    document["settings"]["order"] = model.order
    document["settings"]["mode"] = mode
    document["versions"]["lm_eval"] = lm_eval.__version__
    document["task_versions"] = results["versions"]
    for name in (
        "results",
        "groups",
        "n-samples",
        "n-shot",
        "higher_is_better",
        "configs",
    ):
        if name in results:
            document[name] = results[name]
    rows = []
    for task, of_task in results.get("samples", {}).items():
        for row in of_task:
            rows.append({"task": task, **row})
    with outputs:
        outputs.write_jsonl(a.samples, rows)
        outputs.write_json(a.json, document)


def find_tasks(
    manager, wanted: tuple[str, ...], include_path: Path | None
) -> list[str]:
    """Return the task names and YAML files that `wanted`, names or patterns, stand for.
    include_path: the folder of the user's own tasks."""
    tasks = []
    for name in wanted:
        matching = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matching and include_path is not None:
            raise UserError(
                f"neither the harness nor a file in {include_path} has a task "
                f"{name!r}: give what follows `task:` in its YAML file"
            )
        if not matching:
            raise UserError(
                f"there is no task or prepared data {name!r}; make it with: "
                f"{command_for(name)}; your own tasks need --include-path"
            )
        tasks += matching
    return tasks


if __name__ == "__main__":
    run_script(main)
