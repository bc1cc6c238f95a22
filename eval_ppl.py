"""Perplexity of a trained model on text: left to right, in any order, and averaged over orders of
the context. Two models, A and B, are compared on the same text, paired by sequence.

    python eval_ppl.py out/quickstart --datasets stories
    python eval_ppl.py out/quickstart --text "The fox ran into the woods."
    python eval_ppl.py A B --datasets stories my.txt
    python eval_ppl.py A B --datasets sentences.txt --lines
    python eval_ppl.py RUN --datasets data/own --orders l2r random fixed_blockwise:block=32,seed=1
    torchrun --nproc_per_node=8 eval_ppl.py RUN --datasets wikitext103 ptb \\
        --orders l2r random --ensemble 1 8 64 --json FILE"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from annotated_types import Interval

from aogpt.checkpoints import Loaded, load
from aogpt.evaluation import likelihood
from aogpt.evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS
from aogpt.evaluation.eval_sets import (
    EvalSet,
    comparable,
    open_eval_set,
    open_texts,
    read_text,
)
from aogpt.evaluation.likelihood import Scorer, Task
from aogpt.evaluation.perplexity_table import (
    comparison,
    difference_row,
    markdown,
    result_rows,
)
from aogpt.model import ModelConfig
from aogpt.orders import parse_order, parse_settings
from aogpt.runtime.command_line import ModelOptions, run_script, show
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import OutputOptions, Outputs, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling.plans import Pace, Rule, RuleScore

TEXT = tyro.conf.arg(
    constructor=str, help_behavior_hint="(default: None)"
)  # tyro: None
RULE_SETTINGS = {"threshold": float, "entropy_bound": float, "most": int, "block": int}


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights, or Hugging Face repo id."""
    other: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")
    ] = None
    """A second model with the same tokenizer: also the difference of the two losses on the same
    text, with a 95% interval and a p value, in blocks of the smaller block size."""
    datasets: tuple[str, ...] = ()
    """Data sets that data/prepare.py wrote: names or folders. A .txt file or /dev/stdin is scored
    as it is, as one document without end-of-text."""
    lines: bool = False
    """Each line of a .txt file or /dev/stdin is a document, scored by itself; empty lines are left
    out. The errors, and the p value of two models, are then by line."""
    text: Annotated[str | None, TEXT] = None
    """A text to score as it is, such as a sentence."""
    split: str | None = None
    """Split to score; by default that of the evaluation set, the only one, or val."""
    orders: tuple[str, ...] | None = None
    """Orders to score.
    l2r: left to right.
    random: the mean over uniformly random orders, or an encoder's ELBO.
    Any order.kind of a config with its settings, such as fixed_blockwise:block=32,seed=1.
    score_entropy: SEDD's bound.
    confidence, entropy, margin: the order in which the model would decode the text, one pass per
    step; several positions per step as in confidence:threshold=0.9 or entropy:entropy_bound=0.5,
    also with most=4,block=32.
    oracle: the position whose true token is most probable comes next; not a likelihood.
    By default those of l2r and random that the model scores in a single pass."""
    ensemble: tuple[Annotated[int, Interval(ge=1, lt=MAX_MEMBERS)], ...] = (1,)
    """Sizes of order ensembles: average probabilities over this many random orders of the context;
    only for random orders, always in float32. 1: no ensemble."""
    group: Count = 1
    """Predict this many steps of an order at once, each from the groups before, as decoding in
    groups does. Costs one pass per group, except for two-stream models."""
    bound: Literal["mean", "iw"] = "mean"
    """How --num-orders orders are combined. mean: mean loss. iw: the importance-weighted
    bound, -log of the mean of the probabilities that they give a sequence."""
    num_orders: Annotated[int, Interval(ge=1, lt=MAX_DRAWS)] = 2
    """Monte Carlo samples per sequence: random orders, or an encoder's masks. Ensembles use a
    context per 8 of them, at least two."""
    max_sequences: Count | None = None
    """Score only this many blocks, spread over the split."""
    batch_size: Count | None = None
    """Sequences per pass; by default chosen for speed, and halved when memory runs out. Does not
    change the results."""
    json: Path | None = None
    """Write results, settings and versions to this file, and the table beside it (.md)."""


def check_arguments(a: Arguments) -> Outputs:
    """The files to write. Raises UserError for impossible options, before the work begins."""
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
    names = [Path(name).name for name in a.datasets] + ["text"] * (a.text is not None)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"two texts are called {twice!r}: score one after the other, or rename"
        )
    return Outputs.of_report(a.json, [a.run, a.other, *a.datasets], a.overwrite)


def scorers_of(
    a: Arguments,
    configs: list[ModelConfig],
    block_size: int,
) -> dict[str, list[Scorer]]:
    """What to score with each model, by name. Raises UserError where one has no such likelihood."""
    first, *others = map(default_orders, configs)
    names = a.orders or [
        name for name in first if all(name in other for other in others)
    ]
    if not names:
        raise UserError(
            "the models share no order that both score in one pass: give --orders l2r"
        )
    scorers = {
        text: [scorer_of(text, a, config, block_size) for config in configs]
        for text in names
    }
    found = sum(scorers.values(), [])
    if set(a.ensemble) != {1} and all(of.ensembles == (1,) for of in found):
        known = "ensembles are for any-order decoders, along random orders"
        raise UserError(f"{known}: leave out --ensemble, or give --orders random")
    if a.bound == "iw" and not any(of.weighted for of in found):
        raise UserError(
            "--bound iw needs several random orders of a decoder: give other --orders"
        )
    return scorers


def default_orders(config: ModelConfig) -> tuple[str, ...]:
    if config.is_encoder:  # it sees a set of tokens, in no order
        return ("random", "score_entropy") if config.noise else ("random",)
    return ("l2r",) if config.l2r_only else ("l2r", "random")


def scorer_of(
    text: str,
    a: Arguments,
    config: ModelConfig,
    block_size: int,
) -> Scorer:
    """What one of --orders means."""
    if a.group > 1 and (config.l2r_only or text == "score_entropy"):
        raise UserError("--group is for any-order models: leave it out")
    if text == "score_entropy":
        if not config.noise:
            raise UserError(
                "--orders score_entropy is the bound of SEDD; this is another model"
            )
        return Scorer(joint=True)
    rule = (
        parse_rule(text, a.group)
        if text.partition(":")[0] in get_args(RuleScore)
        else None
    )
    orders = None if rule else parse_order(text, "--orders")
    if config.l2r_only and (rule or orders.kind != "l2r"):
        raise UserError(
            f"this model is a plain GPT and has no {text!r} order; give --orders l2r"
        )
    if rule:
        return Scorer(rule=rule, group=a.group)
    orders.check_length(block_size)
    uniform = orders.kind == "random"
    sizes = (
        tuple(sorted(set(a.ensemble))) if uniform and not config.is_encoder else (1,)
    )
    elbo = uniform and config.is_encoder and a.group == 1
    weighted = a.bound == "iw" and not orders.is_fixed and not elbo
    return Scorer(orders, None, a.group, sizes, weighted, joint=elbo)


def parse_rule(text: str, group: int) -> Rule:
    """The decoding order that `confidence` or `confidence:setting=value,...` means."""
    score, values = parse_settings(text, RULE_SETTINGS, "threshold=0.9", "--orders")
    block = values.pop("block", None)
    if block is not None and block < 1:
        raise UserError(
            f"--orders {text}: block is {block}; give a number of at least 1"
        )
    if values and group > 1:
        raise UserError(
            f"--orders {text}: leave out --group, or write most={group} here"
        )
    return Rule(score, Pace(**values) if values else None, block)


def is_text_file(name: str) -> bool:
    """Whether this is a text to read, not the name of a prepared data set."""
    return name == "/dev/stdin" or name.endswith(".txt")


def open_all(
    a: Arguments,
    loaded: Loaded,
    block_size: int,
    procs: Processes,
) -> list[EvalSet]:
    """The data sets and texts, in blocks of this size."""
    eval_sets = []
    limits = {"max_sequences": a.max_sequences, "block_size": block_size}
    for name in a.datasets:
        if is_text_file(name):
            text = procs.gather(procs.main and read_text(name))[0]
            texts = [text]
            if a.lines:
                texts = [line for line in text.split("\n") if line.strip()] or [""]
            eval_sets.append(open_texts(Path(name).name, texts, loaded, **limits))
        else:
            eval_sets.append(open_eval_set(name, a.split, loaded, **limits))
    if a.text is not None:
        eval_sets.append(open_texts("text", [a.text], loaded, **limits))
    return eval_sets


def evaluate(a: Arguments, procs: Processes) -> None:
    outputs = check_arguments(a)
    names = [a.run, a.other][: 1 + (a.other is not None)]
    how = (a.block_size, a.checkpoint)
    models = comparable([load(name, a.weights, procs.device, *how) for name in names])
    dtype = pick_dtype(a.dtype, procs.device)
    block_size = min(loaded.model.config.block_size for loaded in models)
    scorers = scorers_of(a, [loaded.model.config for loaded in models], block_size)
    eval_sets = open_all(a, models[0], block_size, procs)
    if "score_entropy" in scorers and any(
        each.dataset.of_records for each in eval_sets
    ):
        raise UserError("score_entropy takes no prompts; leave it out")
    runner = likelihood.BatchRunner(procs, dtype, block_size, a.batch_size)
    sources = [
        {k: getattr(m, k) for k in ("path", "step", "weights", "system")}
        for m in models
    ]
    source = dict(zip("AB", sources, strict=True)) if a.other else sources[0]
    origin = provenance(a, dtype, procs.device, procs.world_size, checkpoint=source)
    results = []
    differences = []
    lines = []
    for eval_set, (name, of) in itertools.product(eval_sets, scorers.items()):
        tasks = [
            Task(loaded, eval_set, name, s)
            for loaded, s in zip(models, of, strict=True)
        ]
        losses = [
            likelihood.losses_of(task, runner, a.seed, a.num_orders) for task in tasks
        ]
        scores = [
            likelihood.scores_of(*pair) for pair in zip(tasks, losses, strict=True)
        ]
        rows = [
            result_rows(*pair, a.num_orders) for pair in zip(tasks, scores, strict=True)
        ]
        results += sum(rows, [])
        report = {"results": results}
        lines = [models[0].describe(), "", *markdown(results)]
        if a.other:
            gap = likelihood.difference(tasks, losses)
            differences.append(difference_row([row for (row,) in rows], gap))
            report["differences"], (first, second) = (
                differences,
                (m.describe() for m in models),
            )
            lines = [f"A: {first}", "", f"B: {second}", "", *comparison(differences)]
        if procs.main:  # after every task, so that a job that is killed loses none
            outputs.write_report(a.json, report | origin, lines)
    if procs.main:
        with outputs:
            show("\n".join(lines))


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


if __name__ == "__main__":
    run_script(main)
