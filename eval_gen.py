"""Quality of generated text: perplexity under a judge, always beside entropy, since a text that
repeats itself is easy to predict.

    python eval_gen.py out/aogpt out/encoder --steps 64 256 --settings 1,1 0.9,0.95 --plot gen.png
    python eval_gen.py out/quickstart --judge out/other --mode l2r --group-size 1 4 --json gen.json
    python eval_gen.py --samples samples.jsonl --judge gpt2-large
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Interval

from checkpoints import Loaded, load
from data.loader import find_dataset, load_meta, read_tokens
from data.tokenizers import get_tokenizer
from evaluation.judges import load_judge
from evaluation.sample_sets import SampleSet, read_sample_sets
from evaluation.scoring import score_samples
from evaluation.text_measures import words_of
from runtime.command_line import ModelOptions, run_script
from runtime.devices import pick_dtype
from runtime.errors import UserError
from runtime.outputs import (
    OutputOptions,
    Outputs,
    markdown_table,
    new_figure,
    png,
    provenance,
    versions,
)
from runtime.processes import Processes, processes
from runtime.validation import LARGEST, Count, check_values, flag
from sampling import modes
from sampling.engine import Generation
from sampling.modes import BATCH_SIZE, DecodingOptions
from sampling.records import generation_cost, sample_records

# Columns of the table: title, key in a row of the results or among the settings of its sampler, and
# how numbers are written. evaluation/scoring.py makes the rows.
COLUMNS = (
    ("T", "temperature", "g"),
    ("top-p", "top_p", "g"),
    ("perplexity", "perplexity", ".2f"),
    ("95% from", "perplexity_low", ".2f"),
    ("to", "perplexity_high", ".2f"),
    ("of a sample", "mean_sample_perplexity", ".2f"),
    ("scored", "scored_tokens", "d"),
    ("entropy", "entropy", ".3f"),
    ("distinct-1", "distinct_1", ".3f"),
    ("distinct-2", "distinct_2", ".3f"),
    ("distinct-3", "distinct_3", ".3f"),
    ("repeated", "repetition_4", ".3f"),
    ("words", "known_words", ".3f"),
    ("NFE", "nfe", ".1f"),
    ("seconds", "seconds", ".1f"),
    ("tokens/s", "tokens_per_second", ".0f"),
)
LEGEND = (
    "Sampler: the mode with its steps (mdm, even), tokens a step (l2r, random, order, adaptive) or "
    "tokens drafted (speculative). Perplexity: exp of all nats over all scored tokens, with a 95% "
    "interval over samples; of a sample: the mean of the samples' own perplexities, as in some "
    "published tables. Of a sample's own tokens, means over samples: entropy of their histogram in "
    "nats; distinct-n, different n-grams / n-grams; repeated, the share of 4-grams that occurred "
    "before. Words: the share of words (letters only, three or more) that occur in the training "
    "text of --words-of. NFE: model calls that a sample took part in, mean. Seconds: generation of "
    "all samples of a row."
)
SIZES = "steps", "group_size", "draft"
JUDGED = {
    "ids": "",
    "retokenised": "; they reached the judge, which has another tokenizer, as text",
    "text": "; they came as text: entropy, distinct-n and repeated are of the judge's tokens",
}
WARM_UP_TOKENS = 8
WORDS_CHUNK = 1_000_000  # tokens of a training text that are read at once


@dataclass(frozen=True, kw_only=True)
class Sweep(DecodingOptions):
    """A row of the table for each value of --steps, --group-size or --draft, and of --settings."""

    steps: tuple[Count, ...] | None = None
    """Steps of mdm and even; by default one per token."""
    group_size: tuple[Count, ...] | None = None
    """Tokens a step of l2r, random, order and adaptive; by default 1."""
    draft: tuple[Annotated[int, Interval(ge=2, le=LARGEST)], ...] | None = None
    """speculative: tokens drafted in parallel; by default 8."""
    settings: tuple[str, ...] = ()
    """Pairs of temperature and top-p, as in 0.9,0.95; a curve of the plot for each."""

    def rows(self) -> list[DecodingOptions]:
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(DecodingOptions)}
        if self.settings and (self.temperature, self.top_p) != (1, 1):
            raise UserError("--settings holds temperature and top-p: leave out the options")
        # A mode has one of the three sizes; `with_mode_defaults` refuses the others.
        sizes = itertools.product(*(shared[key] or [None] for key in SIZES))
        pairs = self.settings or [f"{self.temperature},{self.top_p}"]
        found = []
        for pair, size in itertools.product(pairs, list(sizes)):
            swept = dict(zip(SIZES, size, strict=True))
            try:
                swept["temperature"], swept["top_p"] = map(float, pair.split(","))
                one = DecodingOptions(**shared | swept)
            except ValueError as error:
                example = "temperature and top-p, a comma between, as in 0.9,0.95"
                raise UserError(f"--settings {pair}: {error}; give {example}") from None
            found.append(modes.with_mode_defaults(one))
        return found


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Run folders (out/NAME) or checkpoints to sample from; all stand in one table and plot."""
    judge: str = "gpt2-large"
    """Hugging Face id or folder of a causal language model (it needs transformers), or a run,
    checkpoint or released weights of a decoder of this project; in float32."""
    samples: tuple[Path, ...] = ()
    """Score the samples of these files too, or alone: those of sample.py --jsonl or of
    --save-samples, or rows of {"text": TEXT}."""
    words_of: str | None = None
    """Prepared dataset: report which share of the samples' words occurs in its training text."""
    decoding: Annotated[Sweep, tyro.conf.arg(name="")]
    length: Annotated[int, Interval(ge=2, le=LARGEST)] | None = None
    """Tokens in a sample, of which a judge can score all but one; by default the block size."""
    num_samples: Count = 64
    """Samples of every row of the table. Every row starts from the same --seed."""
    json: Path | None = None
    """Write all results, also those of every sample, with settings, judge and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw perplexity over entropy as a PNG."""
    save_samples: Path | None = None
    """Write a JSON object per sample: what sample.py --jsonl writes, and its scores."""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    """Make or read the samples of every row, judge and report them."""
    check_values(a)
    if not a.runs and not a.samples:
        raise UserError("nothing to evaluate: name a run (out/NAME), or --samples FILE.jsonl")
    files = {flag(name): getattr(a, name) for name in ("json", "markdown", "plot", "save_samples")}
    outputs = Outputs(files, [*a.runs, *a.samples, a.judge], a.overwrite)
    sweep = a.decoding.rows()
    read = [samples for path in a.samples for samples in read_sample_sets(path)]
    vocabulary = training_words(a.words_of) if a.words_of else None
    judge = load_judge(a.judge, procs.device)
    models = {run: load(run, a.weights, block_size=a.block_size) for run in a.runs}
    samplers = [(run, fitted(run, models[run], options, a)) for run in a.runs for options in sweep]
    dtype = pick_dtype(a.dtype, procs.device)
    result = provenance(a, dtype, procs.device, procs.world_size, judge=judge.describe(), rows=[])
    result["settings"] |= result["settings"].pop("decoding")
    result["versions"] |= judge.libraries
    rows, saved = result["rows"], []
    for samples in itertools.chain(make_samples(samplers, models, a, dtype, procs), read):
        row = score_samples(samples, judge, a.decoding.batch_size or BATCH_SIZE, procs, vocabulary)
        rows.append(row)
        more = samples.cost | {"settings": samples.settings}
        for sample, scores in zip(samples.samples, row["per_sample"], strict=True):
            saved.append(sample | {"scores": scores} | more)
        if not procs.main:
            continue
        print(f"{row['run']} {name_of(row['sampler'])}: {row['perplexity']:.2f}", flush=True)
        # After every row, so that a long sweep that is cut short leaves its rows.
        outputs.write_json(a.json, result)
        lines = ["# Generation quality", "", f"    {result['command']}", "", *lines_of(result)]
        outputs.write(a.markdown, "\n".join(lines) + "\n")
        outputs.write(a.plot, a.plot and plot(rows, judge.name))
        outputs.write_jsonl(a.save_samples, saved)
    with outputs:
        procs.print0("", *lines_of(result), sep="\n")


def training_words(name: str) -> frozenset[str]:
    folder = find_dataset(name)
    tokenizer, tokens = get_tokenizer(load_meta(folder)["tokenizer"]), read_tokens(folder, "train")
    words, rest = set(), ""
    for start in range(0, len(tokens), WORDS_CHUNK):
        text = rest + tokenizer.decode(tokens[start : start + WORDS_CHUNK])
        text, _, rest = text.rpartition(" ")  # its last word may go on
        words |= words_of(text)
    return frozenset(words | words_of(rest))


def fitted(run: str, loaded: Loaded, options: DecodingOptions, a: Arguments) -> dict:
    """Options, length and the like of a row, with what the model gives them."""
    if loaded.scored_from:
        raise UserError(
            f"{run} has no start token (GPT-2) and can only continue a text: make samples with "
            "sample.py --prompt TEXT --jsonl FILE, and score them with --samples FILE"
        )
    limit = loaded.model.config.block_size
    try:
        modes.check_mode(options, loaded.model.config)
        if a.length and a.length > limit:
            raise UserError(f"--length is {a.length}, but it was built for up to {limit} tokens")
    except UserError as error:
        raise UserError(f"{run}: {error}") from error
    options = modes.with_default_steps(options, [[None] * (a.length or limit)])
    own = {"run": run, "length": a.length or limit, "num_samples": a.num_samples, "seed": a.seed}
    return vars(options) | own


# ---- samples -------------------------------------------------------------------------------------


def make_samples(
    samplers: list[tuple[str, dict]], models: dict[str, Loaded], a: Arguments, dtype, procs
) -> Iterator[SampleSet]:
    """The samples of every row, all of them on every process."""
    warm = None
    for run, settings in samplers:
        loaded = models[run]
        loaded.model.to(procs.device, dtype)
        if run != warm:  # no row is to pay for what is done once, such as loading kernels
            warm, length = run, min(settings["length"], WARM_UP_TOKENS)
            most = procs.world_size * (settings["batch_size"] or BATCH_SIZE)
            short = {"length": length, "num_samples": min(settings["num_samples"], most)}
            generate(loaded, settings | short | {"steps": settings["steps"] and length}, procs)
        started = time.perf_counter()
        samples = generate(loaded, settings, procs, label=f"{name_of(settings)} samples")
        cost = generation_cost(samples, time.perf_counter() - started)
        settings |= {"dtype": str(dtype).removeprefix("torch."), "weights": loaded.weights}
        settings |= {"checkpoint": loaded.describe(), "versions": versions()}
        records = sample_records(samples, get_tokenizer(loaded.tokenizer))
        yield SampleSet(run, records, settings, cost, loaded.tokenizer)


def generate(loaded: Loaded, s: dict, procs: Processes, label: str | None = None) -> Generation:
    """Every process generates its share; the samples of all on every process."""
    options = DecodingOptions(**{f.name: s[f.name] for f in dataclasses.fields(DecodingOptions)})
    planned = modes.plan_samples(options, [[None] * s["length"]], s["seed"], s["num_samples"])
    model, size = loaded.model, loaded.vocab_size
    return modes.generate_distributed(model, planned, options, size, procs, label=label)


# ---- reported ------------------------------------------------------------------------------------


def number(value, form: str) -> str:
    known = isinstance(value, int | float) and not math.isnan(value)
    return format(value, form) if known else "-"


def size_of(settings: dict) -> str:
    """The size of steps, which a sweep varies."""
    names = *SIZES, "threshold", "entropy_bound"
    return str(next(filter(None, map(settings.get, names)), ""))


def name_of(settings: dict) -> str:
    return f"{settings['mode']} {size_of(settings)}" if "mode" in settings else "text"


def lines_of(result: dict) -> list[str]:
    """The report: judge, table, legend and notes."""
    judge, rows, cells = result["judge"], result["rows"], []
    limit = judge["context"]
    windows = f"windows of up to {limit} tokens that do not overlap" if limit else "one window each"
    for row in rows:
        values = row["sampler"] | row
        numbers = [number(values.get(key), form) for _, key, form in COLUMNS]
        cells.append([row["run"], name_of(row["sampler"]), *numbers])
    return [
        f"Judge: {judge['source']}, {judge['parameters']:,} parameters, {judge['dtype']}; it "
        f"scores {judge['scored']}, {windows}.",
        "",
        *markdown_table(["run", "sampler", *(title for title, *_ in COLUMNS)], cells, left=2),
        "",
        LEGEND,
        *(f"- {note}" for note in notes(rows)),
    ]


def notes(rows: list[dict]) -> list[str]:
    """What a reader must know beside the table: how the samples were made and judged."""
    lines = []
    for row in rows:
        s, parts = row["sampler"], [f"{row['samples']} samples a row"]
        names = {"checkpoint": "from", "dtype": "model in", "noise": "noise of", "seed": "seed"}
        names |= {"top_k": "top-k"}
        parts += [f"{text} {s[key]}" for key, text in names.items() if s.get(key) is not None]
        parts += ["without the token that crosses top-p"] * (s.get("crossing") == "drop")
        lines += [f"{row['run']}: {', '.join(parts)}{JUDGED[row['tokens_judged']]}."]
    lines = list(dict.fromkeys(lines))  # the rows of a sweep share theirs
    if given := sum(row["given_tokens"] for row in rows):
        lines.append(f"{given} tokens were given, not generated; they are scored like the rest.")
    if unscored := sum(row["unscored_samples"] for row in rows):
        lines.append(f"{unscored} samples are a single token to the judge and are not scored.")
    return lines


def plot(rows: list[dict], judge: str) -> bytes:
    """PNG of perplexity over entropy: a curve per run and setting, its points labelled by the size
    of their steps."""
    from matplotlib.ticker import LogFormatter

    curves = {}
    for row in rows:
        settings, name = row["sampler"], row["run"]
        if "mode" in settings:
            t, p, k = (number(settings.get(key), "g") for key in ("temperature", "top_p", "top_k"))
            name += f", {settings['mode']}, T {t}, top-p {p}, top-k {k}".removesuffix(", top-k -")
        curves.setdefault(name, []).append(row)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    figure, axes = new_figure(size=(7.5, 5))
    for name, points in curves.items():
        keys = "entropy", "perplexity", "perplexity_low", "perplexity_high"
        x, y, low, high = np.array([[row[key] for key in keys] for row in points]).T
        marker = "osD^vP*X"[runs.index(points[0]["run"]) % 8]
        style = {"marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.2}
        # To matplotlib, dollars are mathematics.
        axes.errorbar(x, y, yerr=(y - low, high - y), label=name.replace("$", r"\$"), **style)
        for row, *point in zip(points, x, y, strict=True):
            place = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(size_of(row["sampler"]), point, **place)
    counts = ", ".join(str(count) for count in sorted({row["samples"] for row in rows}))
    axes.set_title(f"{counts} samples a point, bars: 95%")
    label = f"perplexity under {judge}".replace("$", r"\$")
    axes.set(yscale="log", xlabel="unigram entropy, nats", ylabel=label)
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.margins(0.08)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return png(figure)


if __name__ == "__main__":
    run_script(main)
