"""Quality of generated text: its perplexity under a judge, a second language model,
beside its entropy, as repetitive text has a low perplexity.

    python eval_gen.py out/aogpt out/encoder --mode mdm:steps=64 mdm:steps=256
    python eval_gen.py out/quickstart --judge out/other --mode l2r l2r:group=4
    python eval_gen.py --samples samples.jsonl --judge gpt2-large"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from annotated_types import Interval

from aogpt.checkpoints import Loaded, load
from aogpt.evaluation.judges import load_judge
from aogpt.evaluation.report import Column, number, table
from aogpt.evaluation.scoring import SampleSet, read_sample_sets, score_samples
from aogpt.evaluation.text_measures import MEASURES
from aogpt.runtime.command_line import ModelOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import Outputs, ReportOptions, provenance, versions
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import LARGEST, Count, check_values
from aogpt.sampling import modes
from aogpt.sampling.modes import MODE_HELP, DecodingOptions, sample_records

SCORED = ("text", "tokens", "step", "nfe")  # of a record, what the measures read
JUDGED = {
    "ids": "",
    "retokenised": "; they reached the judge, which has another tokenizer, as text",
    "text": "; they came as text: measures of tokens are of the judge's tokens",
}


@dataclass(frozen=True, kw_only=True)
class Sweep(DecodingOptions):
    """Decoding in several modes, a row of the table each."""

    mode: Annotated[tuple[str, ...], MODE_HELP] = ()

    def __post_init__(self):
        check_values(self)
        self.rows()

    def rows(self) -> list[DecodingOptions]:
        """Return the options of each row."""
        shared = {f.name: getattr(self, f.name) for f in fields(DecodingOptions)}
        del shared["mode"]
        return [DecodingOptions(mode=mode, **shared) for mode in self.mode or (None,)]


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, ReportOptions):
    runs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")
    ] = ()
    """Run folders (out/NAME) or checkpoints to sample from, compared in one table."""
    judge: str = "gpt2-large"
    """Hugging Face id or folder of a causal language model (it needs transformers), or
    a run, checkpoint or released weights of a decoder of this project; in float32."""
    samples: tuple[Path, ...] = ()
    """Also score the samples in these files, or only them if there is no RUN: files of
    sample.py --jsonl, or of rows {"text": TEXT}."""
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
    if not a.runs and not a.samples:
        raise UserError(
            "nothing to evaluate: name a run (out/NAME), or --samples FILE.jsonl"
        )
    outputs = Outputs.of_report(a.json, [*a.runs, *a.samples, a.judge], a.overwrite)
    sweep = a.decoding.rows()
    read = []
    for path in a.samples:
        read += read_sample_sets(path)
    judge = load_judge(a.judge, procs.device)
    models = {}
    samplers = []
    for run in a.runs:
        models[run] = load(run, a.weights, "cpu", a.block_size, a.checkpoint)
        if models[run].of_records and models[run].record_end is None:
            procs.print0(modes.RECORDS_NOTE, file=sys.stderr)
        for options in sweep:
            samplers.append((run, fitted(run, models[run], options, a)))
    dtype = pick_dtype(a.dtype, procs.device)
    result = provenance(
        a, dtype, procs.device, procs.world_size, judge=judge.describe(), rows=[]
    )
    result["versions"].update(judge.libraries)
    generated = make_samples(samplers, models, a, dtype, procs)
    for samples in itertools.chain(generated, read):
        row = score_samples(samples, judge, a.decoding.batch_size, procs)
        result["rows"].append(row)
        if not procs.main:
            continue
        sampler = row["sampler"]
        name = name_of(sampler)
        if "temperature" in sampler:
            name += f", temperature {sampler['temperature']:g}"
            name += f", top-p {sampler['top_p']:g}"
        perplexity = number(row["perplexity"], ".2f")
        show(f"{row['run']} {name}: perplexity {perplexity}", flush=True)
        # After every row, so that a long sweep that is cut short leaves its rows.
        outputs.write_report(a.json, result, report_of(result), part=True)
    with outputs:
        if procs.main:
            outputs.write_report(a.json, result, report_of(result))
        procs.print0("", *lines_of(result), sep="\n")


def fitted(
    run: str, loaded: Loaded, options: DecodingOptions, a: Arguments
) -> DecodingOptions:
    """Return the options with a mode of the model. Raises UserError if it cannot
    generate with them."""
    if loaded.scored_from:
        raise UserError(
            f"{run} has no start token, as its tokenizer writes none: make samples "
            "with sample.py --prompt TEXT --jsonl FILE, then give --samples FILE"
        )
    if loaded.record_end is not None:
        raise UserError(
            f"{run} was trained on records that end (data.end): make samples with "
            "sample.py --jsonl FILE, then give --samples FILE"
        )
    config = loaded.model.config
    limit = config.block_size
    if options.mode is None:
        options = replace(options, mode=modes.default_mode(config))
    modes.check_mode(options.plan, config)
    if a.length and a.length > limit:
        raise UserError(
            f"{run}: --length is {a.length}; give at most its block size, {limit}"
        )
    return options


def make_samples(
    rows: list[tuple[str, DecodingOptions]],
    models: dict[str, Loaded],
    a: Arguments,
    dtype: torch.dtype,
    procs: Processes,
) -> Iterator[SampleSet]:
    """Yield the samples of every row, all of them on every process."""
    for run, options in rows:
        loaded = models[run]
        loaded.model.to(procs.device, dtype)
        length = a.length or loaded.model.config.block_size
        settings = dict(vars(options))
        settings["run"] = run
        settings["length"] = length
        settings["num_samples"] = a.num_samples
        settings["seed"] = a.seed
        settings["dtype"] = str(dtype).removeprefix("torch.")
        settings["weights"] = loaded.weights
        settings["checkpoint"] = loaded.description
        settings["versions"] = versions()
        label = f"{name_of(settings)} samples"
        records = []
        engine = options.engine(loaded.model, loaded.vocab_size)
        started = time.perf_counter()
        for part in modes.parts_of(1, a.num_samples):
            planned = modes.plan_samples(
                options.plan,
                [[None] * length],
                a.seed,
                num_samples=len(part.samples),
                first=part.samples.start,
            )
            samples = modes.generate_distributed(engine, planned, procs, label=label)
            for record in sample_records(samples, loaded.get_tokenizer()):
                records.append({key: record[key] for key in SCORED})
        seconds = round(time.perf_counter() - started, 3)
        yield SampleSet(run, records, settings, seconds, loaded.tokenizer)


def name_of(settings: dict) -> str:
    """Return the mode of samples, as --mode has it; "text" for samples without one."""
    return str(settings.get("mode", "text"))


def table_columns() -> list[Column]:
    """Return the columns of a report, whose rows evaluation/scoring.py makes."""
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
        if measure.title is not None:
            columns.append(Column(measure.title, name, measure.form))
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


def legend() -> str:
    """Return the meanings of the columns of the table."""
    meanings = []
    for measure in MEASURES.values():
        if measure.title is not None and measure.meaning:
            meanings.append(f"{measure.title}: {measure.meaning}")
    return (
        "Sampler: the --mode. Perplexity: exp of all nats "
        "over all scored tokens, with a 95% interval over samples; of a sample: the "
        "mean of the samples' own. The other columns are means over samples; "
        f"{'; '.join(meanings)}; different: how many samples differ. NFE: "
        "model calls of a sample, none for a step that unmasks nothing. Seconds: to "
        "generate all samples of a row."
    )


def lines_of(result: dict) -> list[str]:
    """Return the report: judge, table, legend and notes."""
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
        legend(),
    ]
    shown = {"mode"}
    shown.update(column.value for column in columns if column.value is not name_of)
    for note in notes(result["rows"], shown):
        lines.append(f"- {note}")
    return lines


def tokens_of_a_sample(row: dict) -> str:
    """Return the tokens of a sample, or of the shortest and the longest one."""
    lengths = {sample["tokens"] for sample in row["per_sample"]}
    shortest = min(lengths)
    longest = max(lengths)
    if shortest == longest:
        return f"{longest} tokens a sample"
    return f"{shortest} to {longest} tokens a sample"


def notes(rows: list[dict], shown: set[str]) -> list[str]:
    """Return the notes below the table: how the samples were made and judged. shown:
    options that the table shows."""
    lines = []
    for row in rows:
        sampler = row["sampler"]
        parts = [f"{row['samples']} samples a row", tokens_of_a_sample(row)]
        for key in ("checkpoint", "dtype", "seed"):
            if sampler.get(key) is not None:
                parts.append(f"{key} {sampler[key]}")
        parts += modes.changed_settings(sampler, shown=shown)
        if row["unscored_samples"]:
            parts.append(f"{row['unscored_samples']} of them too short to be scored")
        judged = JUDGED[row["tokens_judged"]]
        lines.append(f"{row['run']}: {', '.join(parts)}{judged}.")
    lines = list(dict.fromkeys(lines))  # rows of a sweep have equal notes
    given = sum(row["given_tokens"] for row in rows)
    if given:
        lines.append(
            f"{given} tokens were given, not generated; they are scored like the rest."
        )
    return lines


if __name__ == "__main__":
    run_script(main)
