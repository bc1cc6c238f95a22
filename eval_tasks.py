"""The tasks of lm-evaluation-harness, with any checkpoint.

Needs: pip install -r requirements-harness.txt

    python eval_tasks.py out/quickstart --tasks my_task --include-path my_tasks --json result.json
    python eval_tasks.py out/aogpt_small --tasks hellaswag --order random --num-orders 16
    torchrun --nproc_per_node=8 eval_tasks.py gpt2/ --tasks gsm8k --gen-kwargs max_gen_toks=128

The YAML file of a task is a program: by the harness's design it can name Python functions to call
(!function) and holds templates that are run (Jinja). Give only files that you would run;
--bundled-only loads no others than those that come with the harness.
"""

from __future__ import annotations

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

import contextlib
import dataclasses
import difflib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from data.sources import cause
from evaluation.harness import HarnessModel, Settings, lm_eval, require_lm_eval
from runtime.command_line import run_script
from runtime.devices import out_of_memory
from runtime.outputs import OutputOptions, Outputs
from runtime.processes import Processes, processes
from runtime.ranges import Count, NonNegative, check_values
from runtime.reports import provenance

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


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    require_lm_eval()
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    from lm_eval.tasks import TaskManager

    check_values(a)
    if a.include_path is not None and not a.include_path.is_dir():
        raise ValueError(f"--include-path {a.include_path}: there is no such folder")
    if a.bundled_only and (a.include_path or any(Path(name).exists() for name in a.tasks)):
        raise ValueError("--bundled-only takes no files of tasks: name tasks of the harness")
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
        raise ValueError(
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
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise ValueError(
                f"there is no task {name!r}: {hint}Tasks of your own are found with "
                "--include-path FOLDER"
            )
        found += matching
    if not found:
        raise ValueError("--tasks names no task; give at least one")
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
