"""Quality of generated text: perplexity under a judge, always beside entropy.

A text that repeats itself is easy to predict: perplexity alone would reward it.

    python eval_gen.py out/aogpt out/encoder --steps 64 256 --settings 1,1 0.9,0.95 --plot gen.png
    python eval_gen.py out/quickstart --judge out/other --mode l2r --group-size 1 4 --json gen.json
    python eval_gen.py --samples samples.jsonl --judge gpt2-large
"""

from __future__ import annotations

from runtime.errors import UserError

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Interval

from checkpoints.load import Loaded, load
from data.loader import find_dataset, load_meta, read_tokens
from data.tokenizers import get_tokenizer
from evaluation.judges import load_judge
from evaluation.sample_sets import SampleSet, read_sample_sets
from evaluation.scoring import score_samples
from evaluation.text_measures import words_of
from runtime.command_line import ModelOptions, run_script
from runtime.devices import pick_dtype
from runtime.outputs import OutputOptions, Outputs
from runtime.processes import Processes, processes
from runtime.reports import markdown_table, new_figure, png, provenance, table_line, versions
from runtime.validation import LARGEST, Count, Seed, check_values, flag
from sampling import modes
from sampling.engine import Generation
from sampling.modes import BATCH_SIZE, Bound, Mode, SamplingOptions, UnmaskFirst
from sampling.plans import Schedule
from sampling.records import generation_cost, sample_records
from sampling.token_choice import Crossing, Noise, TokenChoice

# Columns of the table: title, key in a row of the results or among the settings of its sampler,
# width, and how numbers are written. evaluation/scoring.py makes the rows and says where a new
# measure goes; "repeated" is its repetition of 4-grams. Rows are printed one by one, each as soon
# as it is known, so that widths cannot wait for the longest cell.
COLUMNS = (
    ("T", "temperature", 4, "g"),
    ("top-p", "top_p", 5, "g"),
    ("perplexity", "perplexity", 10, ".2f"),
    ("95% from", "perplexity_low", 10, ".2f"),
    ("to", "perplexity_high", 10, ".2f"),
    ("of a sample", "mean_sample_perplexity", 11, ".2f"),
    ("scored", "scored_tokens", 8, "d"),
    ("entropy", "entropy", 7, ".3f"),
    ("distinct-1", "distinct_1", 10, ".3f"),
    ("distinct-2", "distinct_2", 10, ".3f"),
    ("distinct-3", "distinct_3", 10, ".3f"),
    ("repeated", "repetition_4", 8, ".3f"),
    ("words", "known_words", 6, ".3f"),
    ("NFE", "nfe", 6, ".1f"),
    ("seconds", "seconds", 7, ".1f"),
    ("tokens/s", "tokens_per_second", 8, ".0f"),
)
HEAD = ["run", "sampler", *(title for title, *_ in COLUMNS)]
NAMES = 2  # columns of names, before those of numbers
LEGEND = (
    "Sampler: the mode with its steps (mdm, even), tokens a step (l2r, random, adaptive) or "
    "tokens drafted (speculative). Perplexity: exp of all nats over all scored tokens, with a "
    "95% interval over samples; of a sample: the mean of the samples' own, not less where all "
    "are of one length, which some published tables have. Scored: the tokens. Of a sample's own "
    "tokens, means over samples: entropy of their histogram in nats; distinct-n, the share of "
    "n-grams that differ from one another; repeated, the share of 4-grams that occurred before. "
    "Words: the share of words (letters only, three or more) that occur in the training text of "
    "--words-of. NFE: model calls that a sample took part in, mean. Seconds: generation, all "
    "samples of a row."
)
SAMPLER_WIDTH = len("speculative 128")
WARM_UP_TOKENS = 8
WORDS_CHUNK = 1_000_000  # tokens of a training text that are read at once


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Run folders (out/NAME) or checkpoints to sample from; all stand in one table and one
    plot."""
    judge: str = "gpt2-large"
    """Hugging Face id or folder of a causal language model (it needs transformers), or a run,
    checkpoint or released weights of a decoder of this project; in float32."""
    samples: tuple[Path, ...] = ()
    """Score the samples of these files too, or alone: those of sample.py --jsonl or of
    --save-samples, or rows of {"text": TEXT}."""
    words_of: str | None = None
    """Prepared dataset: tell which share of the samples' words occurs in its training text."""
    mode: Mode = "mdm"
    """As in sample.py."""
    steps: tuple[Count, ...] | None = None
    """Steps of mdm and even, a row of the table for each; by default one per token."""
    schedule: Schedule | None = None
    """Of mdm and even, as in sample.py."""
    group_size: tuple[Count, ...] | None = None
    """Tokens a step of l2r, random and adaptive, a row of the table for each; by default 1."""
    unmask_by: UnmaskFirst | None = None
    """Of adaptive, as in sample.py."""
    threshold: Bound | None = None
    """Of adaptive, as in sample.py."""
    entropy_bound: Bound | None = None
    """Of adaptive, as in sample.py."""
    block: Count | None = None
    """Of adaptive, as in sample.py."""
    draft_by: Literal["model", "ngram"] | None = None
    """Of speculative, as in sample.py."""
    draft: tuple[Annotated[int, Interval(ge=2, le=LARGEST)], ...] | None = None
    """speculative: tokens guessed in parallel, a row of the table for each; by default 8."""
    order: Literal["random", "l2r"] | None = None
    """Of speculative, as in sample.py."""
    settings: tuple[str, ...] = ("1,1",)
    """Temperature and top-p, as in 0.9,0.95; a curve of the plot for each."""
    top_k: Count | None = None
    """Draw from so many most probable tokens."""
    crossing: Crossing = "keep"
    """As in sample.py."""
    noise: Noise = "float64"
    """Precision of the draw, as in sample.py."""
    length: Annotated[int, Interval(ge=2, le=LARGEST)] | None = None
    """Tokens in a sample, of which a judge can score all but one; by default the block size."""
    num_samples: Count = 64
    """Samples of every row of the table. Every row starts from the same --seed."""
    batch_size: Count | None = None
    """Samples in flight at once; by default 16, or fewer where memory runs out. In float32 it
    changes no figure but the costs, in bfloat16 rounding depends on it."""
    compile: bool = False
    """torch.compile the model, worth it for many samples: seconds and tokens/s of the table then
    include the compilation of shapes that a row is the first to need."""
    json: Path | None = None
    """Write all results, also those of every sample, with settings, judge and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw perplexity over entropy as a PNG."""
    save_samples: Path | None = None
    """Write a JSON object per sample: what sample.py --jsonl writes, and its scores."""


@dataclass(frozen=True, kw_only=True)
class Sampler(SamplingOptions):
    """One way to sample from one run: a row of the table."""

    run: str
    seed: Seed


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    """Make or read the samples of every row, judge and report them."""
    outputs = check(a)
    samplers = samplers_of(a)
    read = [samples for path in a.samples for samples in read_sample_sets(path)]
    vocabulary = training_words(a.words_of) if a.words_of else None
    judge = load_judge(a.judge, procs.device)
    models = {run: load(run, a.weights, block_size=a.block_size) for run in a.runs}
    samplers = [fit_to_model(sampler, models[sampler.run]) for sampler in samplers]

    dtype = pick_dtype(a.dtype, procs.device)
    result = provenance(a, dtype, procs.device, procs.world_size, judge=judge.describe(), rows=[])
    result["versions"] |= judge.libraries
    longest = max(len(name) for name in [*a.runs, *(samples.name for samples in read)])
    widths = [max(3, longest), SAMPLER_WIDTH, *(width for _, _, width, _ in COLUMNS)]
    if procs.main:
        print(describe_judge(result["judge"]), "", sep="\n")
        print(*markdown_table(HEAD, [], NAMES, widths), sep="\n", flush=True)
    judged = []
    for samples in itertools.chain(make_samples(samplers, models, dtype, procs), read):
        row = score_samples(samples, judge, a.batch_size or BATCH_SIZE, procs, vocabulary)
        result["rows"].append(row)
        judged.append(samples)
        if procs.main:
            print(table_line(cells_of(row), widths, NAMES), flush=True)
            write(a, outputs, result, judged, widths)
    with outputs:
        procs.print0("", LEGEND, *notes(result["rows"]), sep="\n")


# ---- what is asked for ---------------------------------------------------------------------------


def check(a: Arguments) -> Outputs:
    """The files to write. ValueError for what has no meaning or cannot be written."""
    check_values(a)
    if not a.runs and not a.samples:
        raise UserError(
            "nothing to evaluate: name a run to sample from (out/NAME), or --samples FILE.jsonl"
        )
    if not a.settings:
        raise UserError("--settings is empty; give at least one, or leave it out")
    for named in (a.runs, a.samples):
        if len(set(named)) < len(named):
            raise UserError("a run or a file of samples is named twice; name each once")
    files = {flag(name): getattr(a, name) for name in ("json", "markdown", "plot", "save_samples")}
    return Outputs(files, [*a.runs, *a.samples, a.judge], a.overwrite)


def training_words(name: str) -> frozenset[str]:
    """The words of a dataset's training text, which may be too long to be held whole."""
    folder = find_dataset(name)
    tokenizer, tokens = get_tokenizer(load_meta(folder)["tokenizer"]), read_tokens(folder, "train")
    words, rest = set(), ""
    for start in range(0, len(tokens), WORDS_CHUNK):
        text = rest + tokenizer.decode(tokens[start : start + WORDS_CHUNK])
        text, _, rest = text.rpartition(" ")  # its last word may go on
        words |= words_of(text)
    return frozenset(words | words_of(rest))


def samplers_of(a: Arguments) -> list[Sampler]:
    """A sampler for every run, setting and size of steps."""
    names = {field.name for field in dataclasses.fields(Sampler)}
    shared = {f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.name in names}
    settings = [parse_setting(text) for text in a.settings]
    # A mode has one of the three sizes; `with_mode_defaults` refuses the others.
    sizes = list(itertools.product(a.steps or [None], a.group_size or [None], a.draft or [None]))
    samplers = []
    for run, (temperature, top_p), size in itertools.product(a.runs, settings, sizes):
        steps, group_size, draft = size
        swept = {"run": run, "temperature": temperature, "top_p": top_p}
        swept |= {"steps": steps, "group_size": group_size, "draft": draft}
        samplers.append(modes.with_mode_defaults(Sampler(**shared | swept)))
    return samplers


def parse_setting(text: str) -> tuple[float, float]:
    """Temperature and top-p."""
    try:
        temperature, top_p = map(float, text.split(","))
    except ValueError:
        raise UserError(
            f"--settings {text}: give temperature and top-p, a comma between, as in 0.9,0.95"
        ) from None
    try:
        TokenChoice(temperature, top_p)
    except ValueError as error:
        raise UserError(f"--settings {text}: {error}") from error
    return temperature, top_p


def fit_to_model(sampler: Sampler, loaded: Loaded) -> Sampler:
    """The sampler with the length and steps that the model gives it. ValueError if the model cannot
    sample so."""
    if loaded.scored_from:
        raise UserError(
            f"{sampler.run} has no start token (GPT-2) and can only continue a text: make samples "
            "with sample.py --prompt TEXT --jsonl FILE, and score them with --samples FILE"
        )
    try:
        modes.check_mode(sampler, loaded.model.config)
    except ValueError as error:
        raise UserError(f"{sampler.run}: {error}") from error
    block_size = loaded.model.config.block_size
    if sampler.length and sampler.length > block_size:
        raise UserError(
            f"--length is {sampler.length}, but {sampler.run} was built for up to {block_size} "
            "tokens"
        )
    length = sampler.length or block_size
    return modes.with_default_steps(dataclasses.replace(sampler, length=length), [[None] * length])


# ---- samples: made, or read ----------------------------------------------------------------------


def make_samples(
    samplers: list[Sampler], models: dict[str, Loaded], dtype, procs: Processes
) -> Iterator[SampleSet]:
    """The samples of every sampler. A run warms up first: no row is to pay for what is done once,
    such as loading kernels and taking memory."""
    for run, samplers_of_run in itertools.groupby(samplers, key=lambda sampler: sampler.run):
        loaded = models[run]
        loaded.model.to(procs.device, dtype)
        for number, sampler in enumerate(samplers_of_run):
            if number == 0:
                warm_up(sampler, loaded, procs)
            yield sample(sampler, loaded, dtype, procs)


def warm_up(sampler: Sampler, loaded: Loaded, procs: Processes) -> None:
    """Generate a batch of a few tokens on every process, and forget it."""
    length = min(sampler.length, WARM_UP_TOKENS)
    batch_size = sampler.batch_size or BATCH_SIZE
    num_samples = min(sampler.num_samples, procs.world_size * batch_size)
    short = dataclasses.replace(sampler, length=length, num_samples=num_samples)
    if sampler.steps:
        short = dataclasses.replace(short, steps=length)
    generate(short, loaded, procs)


def generate(sampler: Sampler, loaded: Loaded, procs: Processes, label=None) -> Generation:
    """Every process generates its share; the samples of all on every process."""
    return modes.generate_distributed(
        loaded.model,
        modes.plan_samples(sampler, [[None] * sampler.length], sampler.seed),
        sampler.choice,
        loaded.vocab_size,
        procs,
        batch_size=sampler.batch_size,
        compile=sampler.compile,
        label=label,
    )


def sample(sampler: Sampler, loaded: Loaded, dtype, procs: Processes) -> SampleSet:
    """The samples of a sampler, all of them on every process."""
    settings = dataclasses.asdict(sampler) | {
        "dtype": str(dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "checkpoint": loaded.describe(),
        "versions": versions(),
    }
    started = time.perf_counter()
    generation = generate(sampler, loaded, procs, label=f"{sampler_name(settings)} samples")
    cost = generation_cost(generation, time.perf_counter() - started)
    samples = sample_records(generation, get_tokenizer(loaded.tokenizer))
    return SampleSet(sampler.run, samples, settings, cost, loaded.tokenizer)


# ---- reported ------------------------------------------------------------------------------------


def cells_of(row: dict) -> list[str]:
    """The cells of the table for a row of the results."""
    values = row["sampler"] | row
    numbers = [number(values.get(key), form) for _, key, _, form in COLUMNS]
    return [row["run"], sampler_name(row["sampler"]), *numbers]


def number(value, form: str) -> str:
    """A number, or a dash for what is not known."""
    known = isinstance(value, int | float) and not math.isnan(value)
    return format(value, form) if known else "-"


def sampler_name(settings: dict) -> str:
    """Mode and size of its steps."""
    return f"{settings['mode']} {step_size(settings)}" if "mode" in settings else "text"


def step_size(settings: dict) -> str:
    """The size of steps that a mode has: what a sweep varies."""
    names = "steps", "group_size", "draft", "threshold", "entropy_bound"
    sizes = [settings.get(name) for name in names]
    return str(next(filter(None, sizes), ""))


def describe_judge(judge: dict) -> str:
    windows = "one window a sample"
    if judge["context"]:
        windows = f"windows of up to {judge['context']} tokens that do not overlap"
    return (
        f"Judge: {judge['source']}, {judge['parameters']:,} parameters, {judge['dtype']}; it "
        f"scores {judge['scored']}, {windows}."
    )


def notes(rows: list[dict]) -> list[str]:
    """What a reader must know beside the table: what is behind the rows, and how some were
    judged."""
    lines = []
    for row in rows:
        parts = [f"{row['samples']} samples a row"]
        for name, label in (
            ("checkpoint", "from"),
            ("dtype", "model in"),
            ("noise", "noise of"),
            ("top_k", "top-k"),
            ("seed", "seed"),
        ):
            if row["sampler"].get(name) is not None:
                parts.append(f"{label} {row['sampler'][name]}")
        if row["sampler"].get("crossing") == "drop":
            parts.append("without the token that crosses top-p")
        lines.append(f"{row['run']}: {', '.join(parts)}.")
        if row["tokens_judged"] == "retokenised":
            lines.append(
                f"The samples of {row['run']} reached the judge, whose tokenizer is another, "
                "through their text."
            )
        if row["tokens_judged"] == "text":
            lines.append(
                f"The samples of {row['run']} came as text: entropy, distinct-n and repeated are "
                "of the judge's tokens."
            )
    lines = list(dict.fromkeys(lines))  # the rows of a sweep share theirs
    if given := sum(row["given_tokens"] for row in rows):
        lines.append(f"{given} tokens were given, not generated; they are scored like the rest.")
    if unscored := sum(row["unscored_samples"] for row in rows):
        lines.append(f"{unscored} samples are a single token to the judge and are not scored.")
    return lines


def write(
    a: Arguments, outputs: Outputs, result: dict, judged: list[SampleSet], widths: list[int]
) -> None:
    """Write the files that are asked for; after every row, so that a long sweep that is cut short
    leaves its rows."""
    rows = result["rows"]
    if a.json:
        outputs.write_json(a.json, result)
    if a.markdown:
        table = markdown_table(HEAD, [cells_of(row) for row in rows], NAMES, widths)
        lines = ["# Generation quality", "", f"    {result['command']}", ""]
        lines += [describe_judge(result["judge"]), "", *table, "", LEGEND, ""]
        lines += [f"- {note}" for note in notes(rows)]
        outputs.write(a.markdown, "\n".join(lines) + "\n")
    if a.plot:
        outputs.write(a.plot, plot(rows, result["judge"]["name"]))
    if a.save_samples:
        records = []
        for samples, row in zip(judged, rows, strict=True):
            more = samples.cost | {"settings": samples.settings}
            for sample, scores in zip(samples.samples, row["per_sample"], strict=True):
                records.append(sample | {"scores": scores} | more)
        outputs.write_jsonl(a.save_samples, records)


def plot(rows: list[dict], judge: str) -> bytes:
    """PNG of perplexity over entropy: a curve per run and setting, its points labelled by the size
    of their steps."""
    from matplotlib.ticker import LogFormatter

    curves = {}
    for row in rows:
        curves.setdefault(curve_name(row), []).append(row)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    figure, axes = new_figure(size=(7.5, 5))
    for name, points in curves.items():
        x = [row["entropy"] for row in points]
        y = [row["perplexity"] for row in points]
        below = [row["perplexity"] - row["perplexity_low"] for row in points]
        above = [row["perplexity_high"] - row["perplexity"] for row in points]
        marker = "osD^vP*X"[runs.index(points[0]["run"]) % 8]
        style = {"marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.2}
        axes.errorbar(x, y, yerr=(below, above), label=literal(name), **style)
        for row, *point in zip(points, x, y, strict=True):
            label = step_size(row["sampler"])
            axes.annotate(label, point, (5, 4), textcoords="offset points", fontsize=8)
    counts = ", ".join(str(count) for count in sorted({row["samples"] for row in rows}))
    axes.set_title(f"{counts} samples a point, bars: 95%")
    axes.set(
        yscale="log", xlabel="unigram entropy, nats", ylabel=literal(f"perplexity under {judge}")
    )
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.margins(0.08)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return png(figure)


def curve_name(row: dict) -> str:
    """Run, mode and settings."""
    settings = row["sampler"]
    if "mode" not in settings:
        return row["run"]
    temperature, top_p = (number(settings.get(name), "g") for name in ("temperature", "top_p"))
    name = f"{row['run']}, {settings['mode']}, T {temperature}, top-p {top_p}"
    return name if settings.get("top_k") is None else f"{name}, top-k {settings['top_k']}"


def literal(text: str) -> str:
    """The text for matplotlib, to which dollars are mathematics."""
    return text.replace("$", r"\$")


if __name__ == "__main__":
    run_script(main)
