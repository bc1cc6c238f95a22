"""Quality of generated text: perplexity under a judge, always beside entropy, since repetition alone looks good.

python eval_gen.py out/aogpt out/encoder --steps 64 128 256 512 1024 --settings 1,1 0.9,0.95 0.7,0.95 --plot gen.png
python eval_gen.py out/quickstart --judge out/other --mode l2r --group-size 1 2 4 --json result.json
python eval_gen.py --samples samples.jsonl --judge gpt2-large
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tqdm import tqdm

from checkpoints import store as checkpoint
from data.tokenizers import TOKENIZERS, get_tokenizer
from evaluation.judges import (
    Judge,
    calls,
    corpus_perplexity,
    distinct,
    exp,
    load_judge,
    mean_and_error,
    repetition,
)
from evaluation.judges import unigram_entropy as entropy
from runtime.command_line import run_script
from runtime.devices import pick_dtype
from runtime.files import check_output, to_json
from runtime.processes import Processes, processes
from runtime.reports import versions
from sampling import modes
from sampling.engine import TokenChoice
from sampling.modes import Mode, flag
from sampling.plans import Schedule

OUTPUTS = ("json", "markdown", "plot", "save_samples")
BOUNDS = ("perplexity_low", "perplexity_high")
BEHIND = (
    ("checkpoint", "from"),
    ("dtype", "model in"),
    ("noise", "noise of"),
    ("top_k", "top-k"),
    ("seed", "seed"),
)
JUDGED = {  # how samples reached the judge, if not by their ids
    "retokenised": "reached the judge, whose tokenizer is another, through their text",
    "text": "came as text: entropy, distinct-n and repeated are of the judge's tokens",
}
SAMPLER_WIDTH = 15
WARM_UP = 8  # tokens
# Of the table: the width of a column, what stands over it, and its text for a row.
COLUMNS = (
    (4, "T", lambda row: plain(row["sampler"].get("temperature"), "g")),
    (5, "top-p", lambda row: plain(row["sampler"].get("top_p"), "g")),
    (10, "perplexity", lambda row: plain(row["perplexity"], ".2f")),
    (20, "95% interval", lambda row: interval(row)),
    (7, "entropy", lambda row: plain(row["entropy"], ".3f")),
    (10, "distinct-1", lambda row: plain(row["distinct_1"], ".3f")),
    (10, "distinct-2", lambda row: plain(row["distinct_2"], ".3f")),
    (10, "distinct-3", lambda row: plain(row["distinct_3"], ".3f")),
    (8, "repeated", lambda row: plain(row["repetition_4"], ".3f")),
    (6, "NFE", lambda row: plain(row["nfe"], ".1f")),
    (7, "seconds", lambda row: plain(row.get("seconds"), ".1f")),
    (8, "tokens/s", lambda row: plain(row.get("tokens_per_second"), ".0f")),
)
LEGEND = (
    "Sampler: the mode with its steps (mdm, even), tokens a step (l2r, random, adaptive) or tokens drafted "
    "(speculative). "
    "Perplexity: exp of all nats over all scored tokens, with a 95% interval over samples. Of a sample's own tokens, "
    "means over samples: entropy of their histogram in nats; distinct-n, the share of n-grams that differ from one "
    "another; repeated, the share of 4-grams that occurred before. NFE: model calls that a sample took part in, mean. "
    "Seconds: generation, all samples of a row."
)


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Run folders (out/NAME) or checkpoint files to sample from; all stand in one table and one plot."""
    judge: str = "gpt2-large"
    """Hugging Face id or folder of a causal language model (it needs transformers), or a run, checkpoint or released
    weights of a decoder of this project."""
    samples: tuple[Path, ...] = ()
    """Score the samples of these files too, or alone: those of sample.py --jsonl or of --save-samples, or rows of
    {"text": TEXT}."""
    mode: Mode = "mdm"
    """As in sample.py."""
    steps: tuple[int, ...] | None = None
    """Steps of mdm and even, a row of the table for each; by default one per token."""
    schedule: Schedule | None = None
    group_size: tuple[int, ...] | None = None
    """Tokens a step of l2r, random and adaptive, a row of the table for each; by default 1."""
    reveal_by: Literal["confidence", "entropy", "random"] | None = None
    draft: tuple[int, ...] | None = None
    """speculative: tokens guessed in parallel, a row of the table for each; by default 8."""
    order: Literal["random", "l2r"] | None = None
    settings: tuple[str, ...] = ("1,1",)
    """Temperature and top-p, as in 0.9,0.95; a curve of the plot for each."""
    top_k: int | None = None
    noise: Literal["float64", "float32", "bfloat16"] = "float64"
    """Precision of the draw, as in sample.py."""
    length: int | None = None
    """Tokens in a sample; by default the model's block size."""
    num_samples: int = 64
    """Samples of every row of the table."""
    batch_size: int = 16
    """Samples in flight at once; in float32 it changes no figure but the costs, in bfloat16 rounding depends on it."""
    seed: int = 0
    """Every row of the table starts from it."""
    json: Path | None = None
    """Write all results, also those of every sample, with settings, judge and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw perplexity over entropy as a PNG."""
    save_samples: Path | None = None
    """Write a JSON object per sample: what sample.py --jsonl writes, and its scores."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the models that generate; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    judge_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Sampler:
    """One way to sample from one run: a row of the table. The fields are those of sample.py's options."""

    run: str
    mode: Mode
    steps: int | None
    schedule: Schedule | None
    group_size: int | None
    reveal_by: str | None
    draft: int | None
    order: str | None
    length: int | None
    num_samples: int
    batch_size: int
    temperature: float
    top_p: float
    top_k: int | None
    noise: str
    seed: int

    @property
    def choice(self) -> TokenChoice:
        return TokenChoice(self.temperature, self.top_p, self.top_k, self.noise)


@dataclass
class SampleSet:
    """Samples that belong together. rows: `text`, and where they are known `tokens` and `step`, and the `place` of the
    row in a file. settings, cost: as sample.py writes them. tokenizer: of the tokens, or None."""

    run: str
    rows: list[dict]
    settings: dict
    cost: dict
    tokenizer: str | None


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    samplers = check(a)
    sets = [found for path in a.samples for found in read_samples(path)]
    judge = load_judge(a.judge, pick_dtype(a.judge_dtype, procs.device), procs.device)
    models = {run: checkpoint.load(run, a.weights) for run in a.runs}
    samplers = [fit(sampler, models[sampler.run]) for sampler in samplers]
    width = max(map(len, ("run", *a.runs, *(s.run for s in sets))))
    result, done = header(a, judge, procs), []
    if procs.main:
        print(*facts(result), "", *table_head(width), sep="\n", flush=True)
    for samples in itertools.chain(generated(samplers, models, a, procs), sets):
        result["rows"].append(evaluate_set(samples, judge, a.batch_size, procs))
        done.append(samples)
        if procs.main:
            print(table_row(result["rows"][-1], width), flush=True)
            write(a, result, width, done)
    if procs.main:
        print("", LEGEND, *notes(result), sep="\n")


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check(a: Arguments) -> list[Sampler]:
    """The rows of the table. ValueError for what has no meaning or cannot be written."""
    if not a.runs and not a.samples:
        raise ValueError(
            "nothing to evaluate: name a run to sample from (out/NAME), or --samples FILE.jsonl"
        )
    for name in ("steps", "group_size", "draft", "settings"):
        if getattr(a, name) == ():
            raise ValueError(f"{flag(name)} is empty; give at least one, or leave it out")
    for name in OUTPUTS:
        check_output(getattr(a, name), flag(name))
    files = [
        path.resolve() for path in (*a.samples, *(getattr(a, name) for name in OUTPUTS)) if path
    ]
    if len(set(files)) < len(files):
        raise ValueError(
            "--samples and the files to write name the same file twice; name different ones"
        )
    if len(set(a.runs)) < len(a.runs):
        raise ValueError("a run is named twice; name each once")
    if a.batch_size < 1:
        raise ValueError(f"--batch-size is {a.batch_size}; give at least 1")
    if a.top_k is not None and a.top_k < 1:
        raise ValueError(f"--top-k is {a.top_k}; give at least 1")
    if a.length is not None and a.length < 2:
        raise ValueError(f"--length is {a.length}; give at least 2, of which a judge can score one")
    names = {field.name for field in dataclasses.fields(Sampler)} & {
        field.name for field in dataclasses.fields(a)
    }
    common = {name: getattr(a, name) for name in names}
    sweep = [
        dict.fromkeys(getattr(a, name) or (None,)) for name in ("steps", "group_size", "draft")
    ]
    samplers = []
    for run, setting in itertools.product(
        a.runs or ("",), dict.fromkeys(map(parse_setting, a.settings))
    ):
        for steps, group_size, draft in itertools.product(*sweep):
            own = {"steps": steps, "group_size": group_size, "draft": draft, "run": run}
            sampler = modes.with_defaults(
                Sampler(**common | own, temperature=setting[0], top_p=setting[1])
            )
            samplers.append(sampler)
    return samplers if a.runs else []


def parse_setting(text: str) -> tuple[float, float]:
    """Temperature and top-p."""
    try:
        temperature, top_p = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"--settings {text}: give temperature and top-p, a comma between, as in 0.9,0.95"
        ) from None
    try:
        TokenChoice(temperature, top_p)
    except ValueError as error:
        raise ValueError(f"--settings {text}: {error}") from error
    return temperature, top_p


def fit(sampler: Sampler, loaded: checkpoint.Loaded) -> Sampler:
    """The sampler with the length and steps that the model gives it. ValueError if the model cannot sample so."""
    if loaded.scored_from:
        raise ValueError(
            f"{sampler.run} has no start token (GPT-2) and can only continue a text: make samples with sample.py "
            "--prompt TEXT --jsonl FILE, and score them with --samples FILE"
        )
    try:
        modes.check_model(sampler, loaded.model.config)
    except ValueError as error:
        raise ValueError(f"{sampler.run}: {error}") from error
    block_size = loaded.model.config.block_size
    length = sampler.length or block_size
    if length > block_size:
        raise ValueError(
            f"--length is {length}, but {sampler.run} was built for up to {block_size} tokens"
        )
    steps = sampler.steps or (length if sampler.mode in ("mdm", "even") else None)
    return dataclasses.replace(sampler, length=length, steps=steps)


# ---- samples: made, or read ------------------------------------------------------------------------------------------


def generated(
    samplers: list[Sampler], models: dict[str, checkpoint.Loaded], a: Arguments, procs: Processes
):
    """Yields the samples of every sampler. A run warms up first: no row is to pay for what is done once."""
    dtype, run = pick_dtype(a.dtype, procs.device), None
    for sampler in samplers:
        loaded = models[sampler.run]
        loaded.model.to(procs.device, dtype)
        if sampler.run != run:
            run = sampler.run
            warm_up(sampler, loaded, procs)
        yield make_samples(sampler, loaded, procs)


def warm_up(sampler: Sampler, loaded: checkpoint.Loaded, procs: Processes) -> None:
    """Generate a batch of a few tokens and forget it; the first calls of a model load kernels and take memory."""
    length = min(sampler.length, WARM_UP)
    samples, steps = (
        min(sampler.num_samples, procs.world_size * sampler.batch_size),
        sampler.steps and length,
    )
    short = dataclasses.replace(sampler, length=length, steps=steps, num_samples=samples)
    drawn = modes.draw(short, [[None] * length])
    modes.generate_shared(
        loaded.model, drawn, short.choice, loaded.vocab_size, procs, batch_size=short.batch_size
    )


def make_samples(sampler: Sampler, loaded: checkpoint.Loaded, procs: Processes) -> SampleSet:
    """Generate, every process its share; the samples of all on every process."""
    tokenizer, dtype = get_tokenizer(loaded.tokenizer), next(loaded.model.parameters()).dtype
    drawn = modes.draw(sampler, [[None] * sampler.length])
    started = time.perf_counter()
    sizes = {
        "batch_size": sampler.batch_size,
        "label": f"{name_of(dataclasses.asdict(sampler))} samples",
    }
    parts = modes.generate_shared(
        loaded.model, drawn, sampler.choice, loaded.vocab_size, procs, **sizes
    )
    cost = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("model_calls", "token_forwards")
    }
    cost["seconds"] = round(time.perf_counter() - started, 3)
    rows = [
        {
            "text": tokenizer.decode(tokens),
            "prompt_index": 0,
            "prompt": "",
            "length": len(tokens),
            "tokens": tokens,
        }
        | {"step": step, "log_probs": [round(p, 6) for p in log_probs]}
        for tokens, step, log_probs in modes.rows_of(parts)
    ]
    settings = dataclasses.asdict(sampler) | {"dtype": str(dtype).removeprefix("torch.")}
    settings |= {"weights": loaded.weights, "checkpoint": loaded.describe(), "versions": versions()}
    return SampleSet(sampler.run, rows, settings, cost, loaded.tokenizer)


def read_samples(path: Path) -> list[SampleSet]:
    """The samples of a file, a set for all that were made in the same way."""
    if not path.is_file():
        raise ValueError(f"--samples {path}: there is no such file")
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--samples {path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    sets = {}
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # str.splitlines would also cut at what JSON strings may hold
        if line.strip():
            row = read_row(f"{path} line {number}", line)
            sets.setdefault(json.dumps(row.get("settings"), sort_keys=True), []).append(row)
    if not sets:
        raise ValueError(f"--samples {path}: there is no sample in it")
    return [read_set(path, rows) for rows in sets.values()]


def read_row(place: str, line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(
            f'{place}: give an object with "text", as sample.py --jsonl writes, or {{"text": TEXT}}'
        )
    for key in ("tokens", "step"):
        values = row.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(
                f'{place}: "{key}" must be a list of whole numbers, as sample.py writes it'
            )
    if "step" in row and len(row["step"]) != len(row.get("tokens", [])):
        raise ValueError(f'{place}: "step" and "tokens" must be equally long')
    if not isinstance(row.get("settings", {}), dict):
        raise ValueError(f'{place}: "settings" must be an object, as sample.py writes it')
    return row | {"place": place}


def read_set(path: Path, rows: list[dict]) -> SampleSet:
    """Rows of equal settings. Their tokenizer is the one that makes their text of their tokens."""
    tokenizer, first = None, rows[0]
    with_tokens = [row for row in rows if "tokens" in row]
    if with_tokens and len(with_tokens) < len(rows):
        raise ValueError(
            f'{path}: some rows have "tokens", some not; give all of them tokens, or none'
        )
    if with_tokens:
        tokenizer = next((name for name in reversed(TOKENIZERS) if is_text_of(name, first)), None)
        for row in rows:
            if tokenizer is None or not is_text_of(tokenizer, row):
                raise ValueError(
                    f'{row["place"]}: "tokens" are not those of "text" in {tokenizer or "any known tokenizer"}; leave '
                    '"tokens" out to score the text alone'
                )
    settings = first.get("settings", {})
    cost = {
        name: first[name]
        for name in ("model_calls", "token_forwards", "seconds")
        if is_number(first.get(name))
    }
    return SampleSet(
        str(settings.get("run", path)), rows, settings | {"file": str(path)}, cost, tokenizer
    )


def is_text_of(tokenizer: str, row: dict) -> bool:
    decoder = get_tokenizer(tokenizer)
    ids = row["tokens"]
    return all(0 <= i < decoder.vocab_size for i in ids) and decoder.decode(ids) == row["text"]


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- scores ----------------------------------------------------------------------------------------------------------


def evaluate_set(samples: SampleSet, judge: Judge, batch_size: int, procs: Processes) -> dict:
    """A row of the table: what the judge and the measures say of all samples. Adds the scores of each to its row."""
    how = "text" if samples.tokenizer is None else "retokenised"
    if samples.tokenizer and judge.has_ids_of(samples.tokenizer):
        how = "ids"
    own = procs.share(len(samples.rows))
    rows = samples.rows[own.start : own.stop]
    judged = [row["tokens"] if how == "ids" else judge.encode(row["text"]) for row in rows]
    tokens = [row.get("tokens", ids) for row, ids in zip(rows, judged, strict=True)]
    for row, ids, seen in zip(rows, tokens, judged, strict=True):
        if "place" in row and (len(ids) < 2 or len(seen) < 2):
            raise ValueError(
                f"{row['place']}: the sample has {min(len(ids), len(seen))} tokens; 2 at least can be scored"
            )
    total = len(judge.windows(judged))
    with tqdm(
        total=total, desc="judge", unit="window", disable=None if procs.main else True, leave=False
    ) as bar:
        scores = judge.score(judged, batch_size, bar.update)
    speculative = samples.settings.get("mode") == "speculative"
    own_scores = [
        {"nll": nll, "scored_tokens": count, "perplexity": exp(nll / count) if count else math.nan}
        | measures(ids, row.get("step"), speculative)
        for ids, row, (nll, count) in zip(tokens, rows, scores, strict=True)
    ]
    scores = sum(procs.gather(own_scores), [])
    for row, score in zip(samples.rows, scores, strict=True):
        row["scores"] = score
    return (
        {"run": samples.run, "tokens_judged": how}
        | summary(samples, scores)
        | {"per_sample": scores}
    )


def measures(tokens: list[int], step: list[int] | None, speculative: bool) -> dict:
    """Of one sample, without a judge. step: where it is known."""
    generated = len(tokens) if step is None else sum(s >= 0 for s in step)
    result = {"tokens": len(tokens), "generated_tokens": generated, "entropy": entropy(tokens)}
    result |= {f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3)} | {
        "repetition_4": repetition(tokens)
    }
    return result | {"nfe": math.nan if step is None else calls(step, speculative)}


def summary(samples: SampleSet, scores: list[dict]) -> dict:
    """Over all samples: corpus perplexity, means with standard errors, cost."""
    columns = {name: [score[name] for score in scores] for name in scores[0]}
    tokens, scored, generated = (
        sum(columns[name]) for name in ("tokens", "scored_tokens", "generated_tokens")
    )
    result = {
        "samples": len(scores),
        "tokens": tokens,
        "given_tokens": tokens - generated,
        "scored_tokens": scored,
    }
    result |= {"unscored_samples": columns["scored_tokens"].count(0)}
    result |= corpus_perplexity(columns["nll"], columns["scored_tokens"])
    result["mean_sample_perplexity"] = mean_and_error(columns["perplexity"])[0]
    for name in ("entropy", "distinct_1", "distinct_2", "distinct_3", "repetition_4", "nfe"):
        result[name], result[f"{name}_standard_error"] = mean_and_error(columns[name])
    result |= samples.cost
    if seconds := samples.cost.get("seconds"):
        result["tokens_per_second"] = generated / seconds
    return result | {"tokenizer": samples.tokenizer, "sampler": samples.settings}


# ---- results ---------------------------------------------------------------------------------------------------------


def header(a: Arguments, judge: Judge, procs: Processes) -> dict:
    """What all rows share; `rows` is still empty."""
    settings = dataclasses.asdict(a) | {
        "dtype": str(pick_dtype(a.dtype, procs.device)).removeprefix("torch.")
    }
    result = {
        "command": shlex.join(["python", "eval_gen.py", *sys.argv[1:]]),
        "judge": judge.describe(),
    }
    result |= {"settings": settings, "processes": procs.world_size, "device": str(procs.device)}
    return result | {"versions": versions() | judge.libraries, "rows": []}


def facts(result: dict) -> list[str]:
    j = result["judge"]
    where = (
        f"windows of up to {j['context']} tokens that do not overlap"
        if j["context"]
        else "one window a sample"
    )
    return [
        f"Judge: {j['source']}, {j['parameters']:,} parameters, {j['dtype']}; it scores {j['scored']}, {where}."
    ]


def notes(result: dict) -> list[str]:
    """What is behind the rows, and what a reader must know of some."""
    rows, lines, alike = result["rows"], [], {}
    for row in rows:
        known = (
            f"{label} {row['sampler'][n]}"
            for n, label in BEHIND
            if row["sampler"].get(n) is not None
        )
        alike.setdefault((row["run"], row["samples"], ", ".join(known)), []).append(
            row["scored_tokens"]
        )
    for (run, samples, known), counts in alike.items():
        least, most = min(counts), max(counts)
        scored = f"{least} tokens" if least == most else f"{least} to {most} tokens"
        lines.append(
            f"{run}: {', '.join(filter(None, (f'{samples} samples and {scored} scored a row', known)))}."
        )
    for how, text in JUDGED.items():
        if runs := list(dict.fromkeys(row["run"] for row in rows if row["tokens_judged"] == how)):
            lines.append(f"The samples of {', '.join(runs)} {text}.")
    given, unscored = (
        sum(row[name] for row in rows) for name in ("given_tokens", "unscored_samples")
    )
    if given:
        lines.append(f"{given} tokens were given, not generated; they are scored like the rest.")
    if unscored:
        lines.append(f"{unscored} samples are a single token to the judge and are not scored.")
    return lines


def name_of(sampler: dict) -> str:
    """Mode and size of its steps, for the table."""
    return f"{sampler['mode']} {swept(sampler)}" if "mode" in sampler else "text"


def swept(sampler: dict) -> str:
    """What a sweep varies."""
    return str(
        next((sampler[name] for name in ("steps", "group_size", "draft") if sampler.get(name)), "")
    )


def plain(value, form: str) -> str:
    """A number, or a dash for what is not known."""
    return format(value, form) if isinstance(value, int | float) and not math.isnan(value) else "-"


def interval(row: dict) -> str:
    low, high = (row[name] for name in BOUNDS)
    return "-" if math.isnan(low) else f"{low:.2f} to {high:.2f}"


def table_row(row: dict | None, width: int) -> str:
    """A line of the table, in Markdown; None: its head. width: of the first column, the run."""
    run, sampler = ("run", "sampler") if row is None else (row["run"], name_of(row["sampler"]))
    texts = (
        title.rjust(size) if row is None else text(row).rjust(size) for size, title, text in COLUMNS
    )
    return f"| {' | '.join([run.ljust(width), sampler.ljust(SAMPLER_WIDTH), *texts])} |"


def table_head(width: int) -> list[str]:
    rules = ["-" * width, "-" * SAMPLER_WIDTH, *("-" * (size - 1) + ":" for size, _, _ in COLUMNS)]
    return [table_row(None, width), f"| {' | '.join(rules)} |"]


def write(a: Arguments, result: dict, width: int, saved: list[SampleSet]) -> None:
    """Write the files that are asked for; after every row, so that a long sweep that is cut short leaves its rows."""
    files = {}
    if a.json:
        files[a.json] = to_json(result, indent=2).encode() + b"\n"
    if a.markdown:
        table = [*table_head(width), *(table_row(row, width) for row in result["rows"])]
        lines = [
            "# Generation quality",
            "",
            f"    {result['command']}",
            "",
            *facts(result),
            "",
            *table,
            "",
            LEGEND,
        ]
        lines += ["", *(f"- {note}" for note in notes(result)), ""]
        files[a.markdown] = "\n".join(lines).encode()
    if a.plot:
        files[a.plot] = plot(result)
    if a.save_samples:
        lines = (
            to_json(
                {k: v for k, v in row.items() if k != "place"}
                | found.cost
                | {"settings": found.settings}
            )
            + "\n"
            for found in saved
            for row in found.rows
        )
        files[a.save_samples] = "".join(lines).encode()
    for path, data in files.items():
        checkpoint.write_atomically(path, lambda file, data=data: file.write(data))


def plot(result: dict) -> bytes:
    """PNG of perplexity over entropy: a curve per run and setting, its points labelled by what is swept."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    curves, judge = {}, result["judge"]["name"]
    for row in result["rows"]:
        curves.setdefault(curve_of(row), []).append(row)
    runs = list(dict.fromkeys(row["run"] for row in result["rows"]))
    for label, rows in curves.items():
        x, y = ([row[key] for row in rows] for key in ("entropy", "perplexity"))
        below, above = ([abs(row[key] - row["perplexity"]) for row in rows] for key in BOUNDS)
        marker = "osD^vP*X"[runs.index(rows[0]["run"]) % 8]
        axes.errorbar(
            x,
            y,
            yerr=(below, above),
            marker=marker,
            markersize=5,
            capsize=2,
            linewidth=1.2,
            label=literal(label),
        )
        for row in rows:
            point = (row["entropy"], row["perplexity"])
            axes.annotate(
                swept(row["sampler"]), point, (5, 4), textcoords="offset points", fontsize=8
            )
    axes.set(
        yscale="log", xlabel="unigram entropy, nats", ylabel=literal(f"perplexity under {judge}")
    )
    axes.set_title(
        f"{', '.join(map(str, sorted({row['samples'] for row in result['rows']})))} samples a point, bars: 95%"
    )
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.margins(0.08)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    plt.close(figure)
    return image.getvalue()


def literal(text: str) -> str:
    """The text for matplotlib, to which dollars are mathematics."""
    return text.replace("$", r"\$")


def curve_of(row: dict) -> str:
    s = row["sampler"]
    if "mode" not in s:
        return row["run"]
    top_k = f", top-k {s['top_k']}" if s.get("top_k") is not None else ""
    return f"{row['run']}, {s['mode']}, T {plain(s.get('temperature'), 'g')}, top-p {plain(s.get('top_p'), 'g')}{top_k}"


if __name__ == "__main__":
    run_script(main)
