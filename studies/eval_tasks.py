"""Accuracy on tasks: prompts of a prepared data set.

    python -m studies.eval_tasks out/own --tasks data/questions --html FILE
    python -m studies.eval_tasks out/own --tasks data/questions --mode l2r --json FILE
    torchrun --nproc_per_node=8 -m studies.eval_tasks out/own --tasks data/questions

A task is a prepared data set with prompts, by name or folder (data/prepare.py records;
puzzles with several right answers: python -m studies.puzzle_answers)."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from aogpt.checkpoints import Loaded, load
from aogpt.evaluation.eval_sets import open_questions
from aogpt.runtime.command_line import RunOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import OutputOptions, Outputs, markdown_table, provenance
from aogpt.runtime.paths import DATA
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling.modes import (
    DecodingOptions,
    changed_settings,
    check_mode,
    parse_mode,
)
from aogpt.sampling.token_choice import Temperature
from studies.answers import Judge, answer, page_of
from studies.prepare import DATASETS

# Puzzles of which another answer than the one in the data can be right.
SEVERAL_ANSWERS = ("colouring", "replace", "shuffle")
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


@dataclass(frozen=True, kw_only=True)
class Decoding(DecodingOptions):
    """Decoding options, by default --mode confidence, and l2r for a plain GPT."""

    temperature: Temperature | None = None
    """By default 0 (the most probable token)."""


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions, OutputOptions):
    tasks: tuple[str, ...]
    """Prepared data, by name or folder."""
    decoding: Annotated[Decoding, tyro.conf.arg(name="")]
    limit: Count | None = None
    """Use only this many rows of every task, evenly spread. By default all."""
    split: str | None = None
    """The split; by default test, if there is one."""
    html: Path | None = None
    """Write a page on which the first answers fill in, step by step."""
    json: Path | None = None
    """Write results, settings and versions to this file."""
    samples: Path | None = None
    """Write a JSON object per row of every task: the answer, and whether it is
    right."""


def main(judges: Mapping[str, Judge] | None = None) -> None:
    """Answer the tasks of the command line. judges: by the name of the data set."""
    a = tyro.cli(
        with_help(Arguments), prog="python -m studies.eval_tasks", description=__doc__
    )
    check_values(a)
    if not a.tasks:
        raise UserError(
            "--tasks names no task; give at least one, such as --tasks data/questions"
        )
    with processes(a.device) as procs:
        answer_prompts(a, procs, judges)


def answer_prompts(
    a: Arguments, procs: Processes, judges: Mapping[str, Judge] | None
) -> None:
    """Answer all prompts of all tasks; the main process prints and writes the
    results."""
    files = {"--json": a.json, "--samples": a.samples, "--html": a.html}
    outputs = Outputs(files, [a.run], a.overwrite)
    loaded = load(a.run, a.weights, procs.device, a.block_size, a.checkpoint)
    dtype = pick_dtype(a.dtype, procs.device)
    loaded.model.to(dtype)
    # All tasks are opened first, so that a wrong one costs no answers.
    tasks = []
    for name in a.tasks:
        if name in DATASETS and not (DATA / name).exists():
            raise UserError(f"{name}: make it with: python -m studies.prepare {name}")
        questions = open_questions(name, a.split, loaded, a.limit)
        judge = (judges or {}).get(questions.dataset)
        tasks.append((questions, judge, options_for(a, loaded, judge)))
    results = []
    rows = []
    notes = []
    page = None
    for questions, judge, options in tasks:
        if questions.note:
            notes.append(questions.note)
        if judge is None and questions.dataset in SEVERAL_ANSWERS:
            notes.append(
                f"{questions.name}: other answers than the one in the data are right, "
                "too, and count as wrong here: take python -m studies.puzzle_answers"
            )
        answers = answer(loaded, questions, options, a.seed, procs, judge)
        result = {"task": questions.name, **vars(options), **answers.summary()}
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
            page = page_of(loaded, answers, judge, shown)
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


def options_for(a: Arguments, loaded: Loaded, judge: Judge | None) -> DecodingOptions:
    """Return how the questions of a task are answered. Raises UserError for a mode that
    the model does not have."""
    temperature = a.decoding.temperature
    if temperature is None:
        temperature = judge.temperature if judge else 0.0
    config = loaded.model.config
    mode = a.decoding.mode or ("l2r" if config.l2r_only else "confidence")
    check_mode(parse_mode(mode), config)
    return replace(a.decoding, temperature=temperature, mode=mode)


def table_of(results: list[dict]) -> list[str]:
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


if __name__ == "__main__":
    run_script(main)
