"""Perplexity of a trained model on text: left to right, in any order, and averaged over
orders of the context. Two models, A and B, are compared on the same text, paired by
sequence.

    python eval_ppl.py out/quickstart --datasets stories
    python eval_ppl.py out/quickstart --text "The fox ran into the woods."
    python eval_ppl.py A B --datasets stories my.txt
    python eval_ppl.py A B --datasets sentences.txt --lines
    python eval_ppl.py RUN --datasets data/own --orders l2r fixed_blockwise:block=32
    torchrun --nproc_per_node=8 eval_ppl.py RUN --datasets wikitext103 ptb \\
        --orders l2r random --ensemble 1 8 64 --json FILE"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from annotated_types import Interval

from aogpt.checkpoints import Loaded, load
from aogpt.data.loader import TokenDataset
from aogpt.evaluation import likelihood
from aogpt.evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS
from aogpt.evaluation.estimates import Estimate
from aogpt.evaluation.eval_sets import (
    EvalSet,
    SplitOption,
    TextDataset,
    comparable,
    note_on_end,
    open_eval_set,
    open_split,
    open_texts,
    read_text,
)
from aogpt.evaluation.likelihood import Scorer, Scores, Task
from aogpt.model import ModelConfig
from aogpt.orders import OrderConfig, parse_order, parse_settings
from aogpt.runtime.command_line import TEXT, RunOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import Outputs, ReportOptions, markdown_table, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling.gaps import refuse_masks
from aogpt.sampling.plans import Pace, Rule, RuleScore
from aogpt.sampling.scores import SCORES

RULE_SETTINGS = {"threshold": float, "entropy_bound": float, "most": int, "block": int}
# What --orders can name: orders that are drawn, a rule by which the model chooses, or
# None, SEDD's bound.
Meaning = OrderConfig | Rule | None
# A prepared data set, or the texts of a file.
Source = TokenDataset | list[str]

LABELS = {
    "l2r": "left to right",
    "random": "any order",
    "score_entropy": "any order, score entropy",
}
HEAD = [
    "text",
    "orders",
    "ensemble",
    "nats/token",
    "std. error",
    "by document",
    "Monte Carlo",
    "bits/token",
    "bits/byte",
    "perplexity",
    "95% interval",
]
# Notes on the rows of the table, in the order in which they are printed.
EXACT = (
    "left to right, another fixed order, or the model's own by confidence, entropy or "
    "margin: exact, -log p of the text in that order"
)
NOTES = {
    "random": (
        "any order: the mean loss over random orders, of an encoder over masks; an "
        "upper bound of -log of the mean probability over orders (docs/likelihoods.md)"
    ),
    "score_entropy": (
        "score entropy: SEDD's own bound, with which it is published; any order: its "
        "outputs normalised to probabilities"
    ),
    "iw": (
        "weighted over K: -log of the mean probability of a sequence over K orders; "
        "its expectation is between the mean over orders and -log of the mean over "
        "all orders"
    ),
    "oracle": (
        "oracle: next the position whose true token is most probable; it looks at the "
        "answer and is not a likelihood: such probabilities of all texts do not add "
        "up to 1"
    ),
}
COMPARED = [
    "text",
    "orders",
    "A, nats/token",
    "B",
    "A - B",
    "A, bits/byte",
    "B",
    "A - B",
    "p",
]
NO_START = (
    "the first token of a block is not scored, except after a prompt: {} has no start "
    "token"
)
ENSEMBLE = "ensemble: orders of the context whose probabilities are averaged"
FEW = 16  # differences of samples: from fewer a Monte Carlo error is rough
ROUGH = "Monte Carlo: from few samples here, so itself rough; more: --num-orders {}"
UNKNOWN = (
    "unknown: needs two sequences (std. error), documents or samples (Monte Carlo)"
)
PAIRED = (
    "A - B: the mean of the differences of the same sequences, below 0 where A is "
    "better, ± the half-width of the 95% interval, the wider one of over sequences and "
    "by document; p: two-sided t test that the mean is 0"
)


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions, ReportOptions, SplitOption):
    other: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")
    ] = None
    """A second model with the same tokenizer: also the difference of the two losses on
    the same text, with a 95% interval and a p value, in blocks of the smaller block
    size."""
    datasets: tuple[str, ...] = ()
    """Data sets that data/prepare.py wrote: names or folders. A .txt file or /dev/stdin
    is scored as it is, as one document. No end-of-text is put after it;
    "<|endoftext|>" in it is one, a token of no bytes."""
    lines: bool = False
    """Each line of a .txt file or /dev/stdin is a document, scored by itself; empty
    lines are left out. The errors, and the p value of two models, are then by line."""
    text: Annotated[str | None, TEXT] = None
    """A text to score as it is, such as a sentence. "<|endoftext|>" is end-of-text."""
    orders: tuple[str, ...] | None = None
    """Orders to score.
    l2r: left to right.
    random: the mean over uniformly random orders, or an encoder's ELBO.
    Any order.kind of a config with its settings, such as
    fixed_blockwise:block=32,seed=1.
    score_entropy: SEDD's bound.
    confidence, entropy, margin: the order in which the model would decode the text, one
    pass per step; several positions per step as in confidence:threshold=0.9 or
    entropy:entropy_bound=0.5, also with most=4,block=32.
    oracle: the position whose true token is most probable comes next; not a likelihood.
    By default those of l2r and random that the model scores in a single pass."""
    ensemble: tuple[Annotated[int, Interval(ge=1, lt=MAX_MEMBERS)], ...] = (1,)
    """Sizes of order ensembles: average probabilities over this many random orders of
    the context;
    only for random orders, always in float32. 1: no ensemble."""
    group: Count = 1
    """Predict this many steps of an order at once, each from the groups before, as
    decoding in groups does. Costs one pass per group, except for two-stream models."""
    bound: Literal["mean", "iw"] = "mean"
    """How --num-orders orders are combined. mean: mean loss. iw: the
    importance-weighted bound, -log of the mean of the probabilities that they give a
    sequence."""
    num_orders: Annotated[int, Interval(ge=1, lt=MAX_DRAWS)] = 2
    """Monte Carlo samples per sequence: random orders, or an encoder's masks. Ensembles
    use a context per 8 of them, at least two."""
    max_sequences: Count | None = None
    """Score only this many blocks, spread over the split."""
    batch_size: Count | None = None
    """Sequences per pass; by default chosen for speed, and halved when memory runs out.
    Does not change the results."""


def check_arguments(a: Arguments) -> Outputs:
    """Return the files to write. Raises UserError for impossible options, before the
    work begins."""
    check_values(a)
    if set(a.ensemble) != {1} and (a.group > 1 or a.bound == "iw"):
        raise UserError(
            "ensembles do not combine with --group or --bound iw: leave out --ensemble"
        )
    if a.other and (set(a.ensemble) != {1} or a.bound == "iw"):
        raise UserError(
            "two models are compared by mean losses: leave out --ensemble and --bound"
        )
    for option in ("orders", "ensemble"):
        if getattr(a, option) == ():
            raise UserError(
                f"--{option} is empty; give RUN first, then --{option} and its values"
            )
    if not a.datasets and a.text is None:
        raise UserError(
            "nothing to score: give RUN first, then --datasets and names, or --text"
        )
    if a.lines and not any(map(is_text_file, a.datasets)):
        raise UserError(
            "--lines is for texts: give --datasets FILE.txt, or leave it out"
        )
    if a.split is not None and all(map(is_text_file, a.datasets)):
        raise UserError(
            "--split is of prepared data sets: give --datasets NAME, or leave it out"
        )
    if a.text is not None:
        refuse_masks(a.text, "aogpt blanks takes masks")
    names = [Path(name).name for name in a.datasets]
    if a.text is not None:
        names.append("text")
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two texts are called {name!r}: score one after the other, or rename"
            )
    return Outputs.of_report(a.json, [a.run, a.other, *a.datasets], a.overwrite)


def read_orders(a: Arguments) -> dict[str, Meaning]:
    """Return the meaning of each of --orders, by default all that some model scores in
    one pass."""
    meanings: dict[str, Meaning] = {}
    for text in a.orders or ("l2r", "random", "score_entropy"):
        if text == "score_entropy":
            meanings[text] = None
        elif text.partition(":")[0] in get_args(RuleScore):
            meanings[text] = parse_rule(text, a.group)
        else:
            try:
                meanings[text] = parse_order(text, "--orders")
            except UserError as error:
                scores = ", ".join(get_args(RuleScore))
                raise UserError(
                    f"{error} (--orders also takes {scores} and score_entropy)"
                ) from None
    return meanings


def parse_rule(text: str, group: int) -> Rule:
    """Return the decoding order that `confidence` or `confidence:setting=value,...`
    means."""
    score, values = parse_settings(text, RULE_SETTINGS, "threshold=0.9", "--orders")
    block = values.pop("block", None)
    if block is not None and block < 1:
        raise UserError(
            f"--orders {text}: block is {block}; give a number of at least 1"
        )
    if not values:
        return Rule(score, block=block)
    if group > 1:
        raise UserError(
            f"--orders {text}: leave out --group, or write most={group} here"
        )
    pace = Pace(
        threshold=values.get("threshold"),
        entropy_bound=values.get("entropy_bound"),
        most=values.get("most"),
    )
    return Rule(score, pace, block)


def is_text_file(name: str) -> bool:
    """Return whether this is a text to read, not the name of a prepared data set."""
    return name == "/dev/stdin" or name.endswith(".txt")


def read_sources(a: Arguments, procs: Processes) -> dict[str, Source]:
    """Return the data sets and texts to score, by name. Raises UserError or OSError for
    one that is missing or damaged."""
    sources: dict[str, Source] = {}
    for name in a.datasets:
        if not is_text_file(name):
            sources[Path(name).name] = open_split(name, a.split)
            continue
        text = procs.gather(procs.main and read_text(name))[0]
        texts = [text]
        if a.lines:
            texts = [line for line in text.split("\n") if line.strip()] or [""]
        sources[Path(name).name] = texts
    if a.text is not None:
        sources["text"] = [a.text]
    return sources


def scorers_of(
    a: Arguments,
    orders: dict[str, Meaning],
    configs: list[ModelConfig],
    block_size: int,
) -> dict[str, list[Scorer]]:
    """Return the scorers of each model, by the name of the orders. Raises UserError
    where a model has no such likelihood."""
    names = list(orders)
    if a.orders is None:  # what all models score in one pass
        for config in configs:
            names = [name for name in names if name in default_orders(config)]
    if not names:
        raise UserError(
            "the models share no order that both score in one pass: give --orders l2r"
        )
    scorers: dict[str, list[Scorer]] = {}
    for name in names:
        scorers[name] = []
        for run, config in zip((a.run, a.other), configs, strict=False):
            try:
                scorer = scorer_of(name, orders[name], a, config, block_size)
            except UserError as error:
                if a.other is None:
                    raise
                raise UserError(f"{run}: {error}") from None
            scorers[name].append(scorer)
    all_scorers = [scorer for of_name in scorers.values() for scorer in of_name]
    if set(a.ensemble) != {1} and not any(
        scorer.ensembles != (1,) for scorer in all_scorers
    ):
        raise UserError(
            "ensembles are for any-order decoders, along random orders: leave out "
            "--ensemble, or give --orders random"
        )
    if a.bound == "iw" and not any(scorer.weighted for scorer in all_scorers):
        raise UserError(
            "--bound iw needs several random orders of a decoder: give other --orders"
        )
    return scorers


def default_orders(config: ModelConfig) -> tuple[str, ...]:
    """Return the orders along which a model scores a text in a single pass."""
    if config.noise:
        return ("random", "score_entropy")
    if config.is_encoder:  # it sees a set of tokens, in no order
        return ("random",)
    if config.l2r_only:
        return ("l2r",)
    return ("l2r", "random")


def scorer_of(
    name: str, meaning: Meaning, a: Arguments, config: ModelConfig, block_size: int
) -> Scorer:
    """Return how a model scores along one of --orders."""
    if a.group > 1 and (config.l2r_only or meaning is None):
        raise UserError("--group is for any-order models: leave it out")
    if meaning is None:
        if not config.noise:
            raise UserError(
                "--orders score_entropy is the bound of SEDD; this is another model"
            )
        return Scorer(joint=True)
    is_l2r = isinstance(meaning, OrderConfig) and meaning.kind == "l2r"
    if config.l2r_only and not is_l2r:
        raise UserError(
            f"this model is a plain GPT and has no {name!r} order; give --orders l2r"
        )
    if isinstance(meaning, Rule):
        return Scorer(rule=meaning, group=a.group)
    if meaning.has_longer_blocks(block_size):
        raise UserError(
            f"order.block {meaning.block} exceeds model.block_size {block_size}; lower "
            "it"
        )
    is_uniform = meaning.kind == "random"
    is_elbo = is_uniform and config.is_encoder and a.group == 1
    sizes = (1,)
    if is_uniform and not config.is_encoder:
        sizes = tuple(sorted(set(a.ensemble)))
    return Scorer(
        orders=meaning,
        group=a.group,
        ensembles=sizes,
        weighted=a.bound == "iw" and not meaning.is_fixed and not is_elbo,
        joint=is_elbo,
    )


def open_all(
    a: Arguments, sources: dict[str, Source], loaded: Loaded, block_size: int
) -> list[EvalSet]:
    """Return the data sets and texts, in blocks of this size."""
    eval_sets = []
    for name, source in sources.items():
        if isinstance(source, TokenDataset):
            eval_set = open_eval_set(source, loaded, a.max_sequences, block_size)
        else:
            eval_set = open_texts(name, source, loaded, a.max_sequences, block_size)
        eval_sets.append(eval_set)
    return eval_sets


def evaluate(a: Arguments, procs: Processes) -> None:
    """Score every text along every order; the main process prints and writes the
    results."""
    # 1. Everything that can be wrong before a model is loaded.
    outputs = check_arguments(a)
    dtype = pick_dtype(a.dtype, procs.device)
    orders = read_orders(a)
    sources = read_sources(a, procs)

    # 2. The models, and what to score with each.
    models = []
    for name in (a.run, a.other):
        if name is not None:
            loaded = load(name, a.weights, procs.device, a.block_size, a.checkpoint)
            models.append(loaded)
    notes = []
    for loaded in models:
        if loaded.scored_from:
            notes.append(NO_START.format(loaded.path))
    if a.other is not None:
        models = comparable(models)
    configs = [loaded.model.config for loaded in models]
    block_size = min(config.block_size for config in configs)
    scorers = scorers_of(a, orders, configs, block_size)
    eval_sets = open_all(a, sources, models[0], block_size)
    for eval_set in eval_sets:
        blocks = eval_set.dataset.block_size
        for scorer in itertools.chain(*scorers.values()):
            if scorer.orders and scorer.orders.has_longer_blocks(blocks):
                raise UserError(
                    f"order.block {scorer.orders.block} exceeds the blocks of "
                    f"{eval_set.name}, {blocks} tokens; lower it"
                )
        for loaded in models:
            note = note_on_end(eval_set.dataset, loaded)
            if note is not None:
                notes.append(note)
        if isinstance(eval_set.dataset, TextDataset):
            for note in eval_set.dataset.notes:
                notes.append(f"{eval_set.name}: {note}")
    if "score_entropy" in scorers:
        if any(eval_set.dataset.of_records for eval_set in eval_sets):
            raise UserError("score_entropy takes no prompts; leave it out")

    # 3. The losses, task after task.
    runner = likelihood.BatchRunner(procs, dtype, block_size, a.batch_size)
    report = Report(a, models, notes)
    for eval_set in eval_sets:
        for name, of_name in scorers.items():
            tasks = []
            losses = []
            for loaded, scorer in zip(models, of_name, strict=True):
                task = Task(loaded, eval_set, name, scorer)
                tasks.append(task)
                losses.append(likelihood.losses_of(task, runner, a.seed, a.num_orders))
            report.add(tasks, losses)
            # After every task, so that a job that is killed loses none.
            if procs.main and a.json:
                outputs.write_report(
                    a.json, report.document(dtype, procs), report.lines(), part=True
                )
    if procs.main:
        with outputs:  # raises an error if a file could not be written
            if a.json:
                outputs.write_report(
                    a.json, report.document(dtype, procs), report.lines()
                )
            show(*report.lines(), sep="\n")


@dataclass
class Report:
    """The results of all tasks so far."""

    a: Arguments
    models: list[Loaded]
    notes: list[str]  # on the models
    results: list[dict] = field(default_factory=list)
    differences: list[dict] = field(default_factory=list)

    def add(self, tasks: list[Task], losses: list[likelihood.Losses]) -> None:
        """Add the losses of one text along one order, of each model."""
        rows = []
        for task, loss in zip(tasks, losses, strict=True):
            scores = likelihood.scores_of(task, loss)
            rows.append(result_rows(task, scores, self.a.num_orders))
        for of_model in rows:
            self.results += of_model
        if self.a.other:
            gap = likelihood.difference(tasks, losses)
            both = [of_model[0] for of_model in rows]
            self.differences.append(difference_row(both, gap))

    def lines(self) -> list[str]:
        """Return the models and the table."""
        if not self.a.other:
            table = markdown(self.results)
            return [self.models[0].description, "", *table, *self.notes]
        first, second = self.models
        lines = [
            f"A: {first.description}",
            "",
            f"B: {second.description}",
            "",
            *comparison(self.differences),
            *self.notes,
        ]
        if first.tokens and second.tokens and first.tokens != second.tokens:
            lines += [
                "",
                f"note: A has trained on {first.tokens:,} tokens, B on "
                f"{second.tokens:,}",
            ]
        return lines

    def document(self, dtype: torch.dtype, procs: Processes) -> dict:
        """Return the content of the file of --json."""
        sources = [loaded.origin() for loaded in self.models]
        checkpoint = sources[0]
        document: dict[str, Any] = {"results": self.results}
        if self.a.other:
            checkpoint = {"A": sources[0], "B": sources[1]}
            document["differences"] = self.differences
        origin = provenance(
            self.a, dtype, procs.device, procs.world_size, checkpoint=checkpoint
        )
        document.update(origin)
        return document


def result_rows(task: Task, scores: Scores, draws: int) -> list[dict]:
    """Return the results of a task for the JSON report, one per ensemble size."""
    rows = []
    eval_set = task.eval_set
    bytes_per_token = task.bytes_per_token() or None  # an end of text has none
    for size, (loss, change) in scores.items():
        bits_per_byte = None
        if bytes_per_token is not None:
            bits_per_byte = loss.nll / math.log(2) / bytes_per_token
        row = {
            "model": task.loaded.path,
            "dataset": eval_set.name,
            "data": eval_set.description(),
            "orders": task.name,
            "group": task.scorer.group,
            "bound": "iw" if task.scorer.weighted else "mean",
            "ensemble": size,
            **vars(loss),
            "perplexity": loss.perplexity,
            "perplexity_95": loss.interval(),
            "bits_per_token": loss.nll / math.log(2),
            "bits_per_byte": bits_per_byte,
            "bytes_per_token": bytes_per_token,
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "blocks": eval_set.dataset.num_blocks,
            "tokens": int(task.scored_tokens().sum()),
            "nats_per_record": record_nats(task, loss.nll),
            "draws": 1 if task.scorer.exact else draws,
            "exact": task.scorer.exact,
        }
        rows.append(row)
    return rows


def record_nats(task: Task, nll: float) -> float | None:
    """Return the mean nats of a whole record that ends, from those of its tokens: where
    its end is given, with -log p(length). None for other text."""
    eval_set = task.eval_set
    if "lengths" not in eval_set.dataset.meta["splits"][eval_set.dataset.split]:
        return None
    nats = nll * int(task.scored_tokens().sum()) / eval_set.count
    end = task.loaded.record_end
    if end is not None:
        lengths = eval_set.lengths.tolist()  # with the end
        nats -= sum(end.log_prob(length - 1) for length in lengths) / len(lengths)
    return nats


def difference_row(rows: list[dict], gap: Estimate) -> dict:
    """Return the comparison of two models on one text, along one order, for the JSON
    report: from their `result_rows`, and the estimate of the difference of their
    losses."""
    a, b = rows
    half_width = gap.half_width
    bits = dict.fromkeys(("a", "b", "difference", "half_width_95"))
    if a["bytes_per_token"] is not None:
        unit = math.log(2) * a["bytes_per_token"]  # nats of a bit per byte
        bits["a"] = a["bits_per_byte"]
        bits["b"] = b["bits_per_byte"]
        bits["difference"] = gap.nll / unit
        if half_width is not None:
            bits["half_width_95"] = half_width / unit
    return {
        "dataset": a["dataset"],
        "data": a["data"],
        "orders": a["orders"],
        "group": a["group"],
        "bound": a["bound"],
        "nll": {
            "a": a["nll"],
            "b": b["nll"],
            "difference": gap.nll,
            "half_width_95": half_width,
        },
        "bits_per_byte": bits,
        "p": gap.p_value,
        "p_by": "document" if gap.documents > 1 else "sequence",
        "standard_error": gap.standard_error,
        "document_error": gap.document_error,
        "monte_carlo_error": gap.monte_carlo_error,
        "sequences": gap.sequences,
        "documents": gap.documents,
        "blocks": a["blocks"],
        "tokens": a["tokens"],
        "draws": a["draws"],
    }


def markdown(results: list[dict]) -> list[str]:
    """Return the lines of the table and of its notes."""
    has_gains = any(r["gain"] is not None for r in results)
    head = list(HEAD)
    if has_gains:
        head.append("gain")
    rows = []
    for r in results:
        interval = ""
        low, high = r["perplexity_95"]
        if low is not None:
            interval = f"{low:.3f} to {high:.3f}"
        cells = [
            r["dataset"],
            title_of(r),
            str(r["ensemble"]),
            f"{r['nll']:.4f}",
            _number(r["standard_error"], 4),
            _number(r["document_error"], 4),
            monte_carlo_cell(r),
            f"{r['bits_per_token']:.4f}",
            _number(r["bits_per_byte"], 4),
            f"{r['perplexity']:.3f}",
            interval,
        ]
        if has_gains:
            gain = ""
            if r["gain"] is not None:
                gain = f"{r['gain']:.5f} ± {_number(r['gain_error'], 5)}"
            cells.append(gain)
        rows.append(cells)
    table = markdown_table(head, rows, left=2)
    return [*table, "", *_notes(results), *table_notes(results)]


def monte_carlo_cell(r: dict) -> str:
    """Return the Monte Carlo error of a result, or that nothing of it is sampled."""
    if r["orders"].partition(":")[0] == "oracle":
        return "none"
    if r["exact"]:
        return "exact"
    return _number(r["monte_carlo_error"], 5)


def table_notes(results: list[dict]) -> list[str]:
    """Return the notes on the columns of the table of one model."""
    notes = []
    if any(monte_carlo_cell(r) == "exact" for r in results):
        notes.append(EXACT)
    if any(r["ensemble"] > 1 for r in results):
        notes.append(ENSEMBLE)
    errors = []
    for r in results:
        errors += [r["standard_error"], r["document_error"], r["monte_carlo_error"]]
        enough = 1 + math.ceil(FEW / r["sequences"])
        if 1 < r["draws"] < enough:
            notes.append(ROUGH.format(enough))
    if any(error is None for error in errors):
        notes.append(UNKNOWN)
    for r in results:
        if r["nats_per_record"] is not None:
            notes.append(
                f"{r['dataset']}, {title_of(r)}: {r['nats_per_record']:.3f} nats a "
                "record, end or length included"
            )
    return list(dict.fromkeys(notes))


def comparison(differences: list[dict]) -> list[str]:
    """Return the lines of the table of two models and of its notes."""
    rows = []
    for r in differences:
        cells = [r["dataset"], title_of(r)]
        for unit in ("nll", "bits_per_byte"):
            compared = r[unit]
            difference = _number(compared["difference"], 4)
            half_width = _number(compared["half_width_95"], 4)
            cells.append(_number(compared["a"], 4))
            cells.append(_number(compared["b"], 4))
            cells.append(f"{difference} ± {half_width}")
        cells.append("unknown" if r["p"] is None else f"{r['p']:.2g}")
        rows.append(cells)
    table = markdown_table(COMPARED, rows, left=2)
    return [*table, "", *_notes(differences), PAIRED]


def _notes(results: list[dict]) -> list[str]:
    """Return a line for each text, and the notes on the rows of the table."""
    texts = {}
    kinds = set()
    for r in results:
        kinds.add(r["orders"].partition(":")[0])
        kinds.add(r["bound"])
        sequences = "sequence" if r["sequences"] == 1 else "sequences"
        documents = "document" if r["documents"] == 1 else "documents"
        text = f"{r['dataset']} ({r['data']['split']}): {r['sequences']:,}"
        if r["sequences"] < r["blocks"]:
            text += f" of {r['blocks']:,}"
        text += (
            f" {sequences} of {r['documents']:,} {documents}, {r['tokens']:,} tokens"
        )
        if "p_by" in r:
            text += f", blocks of {r['data']['block_size']:,}; p by {r['p_by']}"
        texts[r["dataset"]] = text
    notes = list(texts.values())
    for kind, note in NOTES.items():
        if kind in kinds:
            notes.append(note)
    return notes


def title_of(row: dict) -> str:
    """Return the name of the orders of a row in the table."""
    name = row["orders"]
    text = LABELS.get(name, name)
    if name.partition(":")[0] == "oracle":
        text = f"{name} (no likelihood)"
    if name in SCORES:
        text = f"the model's, by {name}"
    if row["group"] > 1:
        text += f", groups of {row['group']}"
    if row["bound"] == "iw":
        text += f", weighted over {row['draws']}"
    return text


def _number(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Score the texts of the command line."""
    arguments = tyro.cli(
        with_help(Arguments), prog="python eval_ppl.py", description=__doc__
    )
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


if __name__ == "__main__":
    run_script(main)
