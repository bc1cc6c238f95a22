"""Quality of generated text: its perplexity under a judge, a second language model,
beside its entropy, as repetitive text has a low perplexity.

    python eval_gen.py out/aogpt out/encoder --mode mdm:steps=64 mdm:steps=256
    python eval_gen.py out/quickstart --judge out/other --mode l2r l2r:group=4
    python eval_gen.py samples.jsonl --judge openai-community/gpt2-large"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import itertools
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from annotated_types import Interval

from aogpt.checkpoints import Loaded, load
from aogpt.evaluation.judges import Judge
from aogpt.evaluation.report import Column, number, table
from aogpt.evaluation.sample_sets import SampleSet, read_sample_sets, score_samples
from aogpt.evaluation.text_measures import MEASURES
from aogpt.runtime.command_line import ComputeOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import Outputs, ReportOptions, provenance, versions
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import (
    LARGEST,
    Count,
    check_value,
    check_values,
    expand_home,
)
from aogpt.sampling import modes
from aogpt.sampling.modes import MODE_HELP, DecodingOptions, sample_records

SCORED = ("text", "tokens", "step", "nfe")  # of a record, what the measures read
JUDGED = {
    "ids": "",
    "retokenised": "; the judge read them as text, in tokens of its own",
    "text": "; they came as text: measures of tokens are of the judge's tokens",
}


@dataclass(frozen=True, kw_only=True)
class Sweep(DecodingOptions):
    """Decoding in several modes, a row of the table each."""

    mode: Annotated[tuple[str, ...], MODE_HELP] = ()

    def __post_init__(self):
        check_values(self, name=str)
        for mode in self.mode:
            modes.parse_mode(mode)


@dataclass(frozen=True, kw_only=True)
class Arguments(ComputeOptions, ReportOptions):
    sources: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN or FILE.jsonl ..."),
    ]
    """Runs (out/NAME), checkpoints or files out/NAME/best to sample from, and files of
    samples: of sample.py --jsonl, or with the rows {"text": TEXT}. All are compared in
    one table."""
    judge: str = "openai-community/gpt2-large"
    """The decoder that scores the samples, in float32: a run, checkpoint, export or
    released weights, or the Hugging Face repo id of a GPT-2, Llama or its like."""
    decoding: Annotated[Sweep, tyro.conf.arg(name="")]
    length: Annotated[int, Interval(ge=2, le=LARGEST)] | None = None
    """Tokens in a sample, all but the first of which are scored; by default the block
    size."""
    num_samples: Count = 64
    """Samples of every row of the table. Every row starts from the same --seed."""


def main() -> None:
    """Evaluate the samples of the command line."""
    arguments = tyro.cli(
        with_help(Arguments), prog="python eval_gen.py", description=__doc__
    )
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    """Make or read the samples of every row, judge and report them."""
    check_values(a)
    if not a.sources:
        raise UserError("nothing to evaluate: name a run (out/NAME) or a FILE.jsonl")
    outputs = Outputs.of_report(a.json, [*a.sources, a.judge], a.overwrite)
    runs = []
    sets_of_files = []
    for source in a.sources:
        if source.endswith(".jsonl"):
            sets_of_files += read_sample_sets(expand_home(source))
        else:
            runs.append(source)
    judge = Judge(a.judge, procs.device)
    rows = []
    for run in runs:
        loaded = load(run, a.weights, "cpu")
        for mode in a.decoding.mode or [modes.default_mode(loaded.model.config)]:
            check_model(run, loaded, mode, a.length)
            rows.append((run, loaded, mode))
    dtype = pick_dtype(a.dtype, procs.device)
    result = provenance(
        a, dtype, procs.device, procs.world_size, judge=judge.describe(), rows=[]
    )
    generated = (make_samples(*row, a, dtype, procs) for row in rows)
    for samples in itertools.chain(generated, sets_of_files):
        row = score_samples(samples, judge, a.decoding.batch_size, procs)
        result["rows"].append(row)
        if procs.main:
            perplexity = number(row["perplexity"], ".2f")
            name = name_of(row["sampler"])
            show(f"{row['run']} {name}: perplexity {perplexity}", flush=True)
            # After every row, so that a long sweep that is cut short leaves its rows.
            outputs.write_report(a.json, result, report_of(result), part=True)
    with outputs:
        if procs.main:
            outputs.write_report(a.json, result, report_of(result))
        procs.print0("", *lines_of(result), sep="\n")


def check_model(run: str, loaded: Loaded, mode: str, length: int | None) -> None:
    """Raise UserError for a model that cannot generate samples of this length from
    nothing in a mode."""
    if loaded.scored_from or loaded.record_end is not None:
        raise UserError(
            f"{run} has no start token, or was trained on records that end (data.end): "
            "make samples with sample.py --jsonl FILE, then give FILE"
        )
    modes.check_mode(modes.parse_mode(mode), loaded.model.config)
    limit = loaded.model.config.block_size
    check_value(length, Annotated[int, Interval(le=limit)] | None, f"{run}: --length")


def make_samples(
    run: str,
    loaded: Loaded,
    mode: str,
    a: Arguments,
    dtype: torch.dtype,
    procs: Processes,
) -> SampleSet:
    """Return the samples of a row, all of them on every process."""
    loaded.model.to(procs.device, dtype)
    length = a.length or loaded.model.config.block_size
    settings = {
        **vars(a.decoding),
        "mode": mode,
        "run": run,
        "length": length,
        "num_samples": a.num_samples,
        "seed": a.seed,
        "dtype": str(dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "checkpoint": loaded.description,
        "versions": versions(),
    }
    records = []
    started = time.perf_counter()
    for _, samples in modes.generate_samples(
        a.decoding.engine(loaded.model, loaded.vocab_size),
        modes.parse_mode(mode),
        {0: [None] * length},
        a.seed,
        a.num_samples,
        procs,
        label=f"{mode} samples",
    ):
        for record in sample_records(samples, loaded.get_tokenizer()):
            scored = {key: record[key] for key in SCORED}
            records.append({**scored, "prompt": ""})
    seconds = round(time.perf_counter() - started, 3)
    return SampleSet(run, records, settings, seconds, loaded.tokenizer)


def name_of(settings: dict) -> str:
    """Return the mode of samples, as --mode has it; "text" for samples without one."""
    return str(settings.get("mode", "text"))


def table_columns() -> list[Column]:
    """Return the columns of a report, whose rows evaluation/sample_sets.py makes."""
    columns = [
        Column("run", "run"),
        Column("sampler", name_of),
        Column("temperature", "temperature", "g"),
        Column("top-p", "top_p", "g"),
        Column("perplexity", "perplexity", ".2f"),
        Column("95% from", "perplexity_low", ".2f"),
        Column("to", "perplexity_high", ".2f"),
        Column("of a sample", "mean_sample_perplexity", ".2f"),
    ]
    for name, measure in MEASURES.items():
        columns.append(Column(measure.title, name, ".3f"))
    columns += [
        Column("different", "distinct_samples", "d"),
        Column("NFE", "nfe", ".1f"),
        Column("seconds", "seconds", ".1f"),
    ]
    return columns


def report_of(result: dict) -> list[str]:
    """Return the report with its title and its command."""
    head = ["# Generation quality", "", f"    {result['command']}", ""]
    return [*head, *lines_of(result)]


def lines_of(result: dict) -> list[str]:
    """Return the report: judge, table and notes."""
    judge = result["judge"]
    columns = table_columns()
    rows = [{**row["sampler"], **row} for row in result["rows"]]
    lines = [
        f"Judge: {judge['source']}, {judge['parameters']:,} parameters, "
        f"{judge['dtype']}; it scores {judge['scored']}; samples longer than its "
        f"context, {judge['context']}, are cut.",
        "",
        *table(columns, rows),
        "",
        "What the columns are: docs/evaluation.md#generation-quality",
    ]
    shown = {"mode"}
    shown.update(column.value for column in columns if column.value is not name_of)
    for note in notes(result["rows"], shown):
        lines.append(f"- {note}")
    return lines


def notes(rows: list[dict], shown: set[str]) -> list[str]:
    """Return the notes below the table: how the samples were made and judged. shown:
    options that the table shows."""
    lines = []
    given = 0
    for row in rows:
        sampler = row["sampler"]
        lengths = [sample["tokens"] for sample in row["per_sample"]]
        parts = [
            f"{row['samples']} samples a row",
            f"{min(lengths)} to {max(lengths)} tokens a sample",
        ]
        for key in ("checkpoint", "dtype", "seed"):
            if sampler.get(key) is not None:
                parts.append(f"{key} {sampler[key]}")
        parts += modes.changed_settings(sampler, shown=shown)
        if (row["prompts"] or 1) > 1:
            parts.append(
                f"of {row['prompts']} prompts, intervals by prompt where wider"
            )
        if row["unscored_samples"]:
            parts.append(f"{row['unscored_samples']} of them too short to be scored")
        judged = JUDGED[row["tokens_judged"]]
        lines.append(f"{row['run']}: {', '.join(parts)}{judged}.")
        given += row["given_tokens"]
    if given:
        lines.append(
            f"{given} tokens were given, not generated; they are scored like the rest."
        )
    return list(dict.fromkeys(lines))  # rows of a sweep have equal notes


if __name__ == "__main__":
    run_script(main)
