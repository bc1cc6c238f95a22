"""Perplexity of a trained model on text: left to right, in any order, and averaged over
orders of the context. Two models, A and B, are compared on the same text, paired by
sequence.

    python eval_ppl.py out/quickstart --datasets stories
    python eval_ppl.py A B --datasets stories data/own
    python eval_ppl.py RUN --datasets data/own --orders l2r fixed_blockwise:block=32
    torchrun --nproc_per_node=8 eval_ppl.py RUN --datasets wikitext103 ptb \\
        --orders l2r random --ensemble 1 8 64 --json FILE"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from annotated_types import Interval

from aogpt.checkpoints import load
from aogpt.evaluation import likelihood
from aogpt.evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS
from aogpt.evaluation.eval_sets import (
    SplitOption,
    comparable,
    note_on_end,
    open_eval_set,
    open_split,
)
from aogpt.evaluation.likelihood import Scorer, Task
from aogpt.evaluation.report import likelihood_lines
from aogpt.model import ModelConfig
from aogpt.orders import OrderConfig, parse_order
from aogpt.runtime.command_line import RunOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import Outputs, ReportOptions, provenance
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.validation import Count, check_values
from aogpt.sampling.modes import PlanFunction, parse_mode
from aogpt.sampling.scores import ScoreName

# What --orders can name: orders that are drawn, a mode in which the model chooses, or
# None, SEDD's bound.
Meaning = OrderConfig | PlanFunction | None

NO_START = (
    "the first token of a block is not scored, except after a prompt: {} has no start "
    "token"
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
    """Data sets that data/prepare.py wrote: names or folders."""
    orders: tuple[str, ...] | None = None
    """Orders to score.
    l2r: left to right.
    random: the mean over uniformly random orders, or an encoder's ELBO.
    Any order.kind of a config with its settings, such as
    fixed_blockwise:block=32,seed=1.
    score_entropy: SEDD's bound.
    confidence, entropy, margin: the order in which the model would decode the text, one
    pass per step, with the arguments of these modes of sample.py, such as
    confidence:threshold=0.9 or entropy:entropy_bound=0.5,group=4,block=32.
    oracle: the position whose true token is most probable comes next; not a likelihood.
    By default those of l2r, random and score_entropy that the model scores in a single
    pass."""
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
    """Monte Carlo samples per sequence: random orders, or an encoder's masks. Per 8 of
    them an ensemble takes one context of each sequence, two at least."""
    max_sequences: Count | None = None
    """Score only this many blocks, spread over the split."""


def check_arguments(a: Arguments) -> Outputs:
    """Return the files to write. Raises UserError for impossible options, before the
    work begins."""
    check_values(a)
    if not a.datasets or () in (a.orders, a.ensemble):
        raise UserError(
            "give RUN first, then --datasets, --orders and --ensemble, each with its "
            "values"
        )
    has_ensembles = set(a.ensemble) != {1}
    is_used = [has_ensembles, a.bound == "iw", a.other is not None]
    if sum(is_used) > 1 or (has_ensembles and a.group > 1):
        raise UserError(
            "leave out --ensemble or --bound: neither goes with the other or with a "
            "second model, and --ensemble not with --group"
        )
    names = [Path(name).name for name in a.datasets]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two texts are called {name!r}: score one after the other, or rename"
            )
    return Outputs.of_report(a.json, [a.run, a.other, *a.datasets], a.overwrite)


def parse_orders(a: Arguments) -> dict[str, Meaning]:
    """Return the meaning of each of --orders, by default all that some model scores in
    one pass."""
    meanings: dict[str, Meaning] = {}
    for text in a.orders or ("l2r", "random", "score_entropy"):
        if text == "score_entropy":
            meanings[text] = None
        elif text.partition(":")[0] in get_args(ScoreName):
            # The oracle, which is no mode, has the arguments of one.
            mode = parse_mode(text.replace("oracle", "confidence", 1), "--orders")
            if text.startswith("oracle"):
                mode = partial(mode, by="oracle")
            if a.group > 1:
                if "group" in mode.keywords:
                    raise UserError(f"--orders {text} has a group; leave out --group")
                mode = partial(mode, group=a.group)
            meanings[text] = mode
        else:
            meanings[text] = parse_order(text, "--orders")
    return meanings


def scorers_of(
    a: Arguments, orders: dict[str, Meaning], configs: list[ModelConfig]
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
                scorer = scorer_of(name, orders[name], a, config)
            except UserError as error:
                raise UserError(f"{run}: {error}") from None
            scorers[name].append(scorer)
    all_scorers = list(itertools.chain(*scorers.values()))
    lacks_ensembles = not any(scorer.larger_ensembles for scorer in all_scorers)
    lacks_weights = not any(scorer.weighted for scorer in all_scorers)
    if (max(a.ensemble) > 1 and lacks_ensembles) or (a.bound == "iw" and lacks_weights):
        raise UserError(
            "--ensemble and --bound iw are for any-order decoders along random orders: "
            "leave them out, or give --orders random"
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


def scorer_of(name: str, meaning: Meaning, a: Arguments, config: ModelConfig) -> Scorer:
    """Return how a model scores along one of --orders."""
    if meaning is None:  # SEDD's bound
        can_score = config.noise
    elif isinstance(meaning, OrderConfig) and meaning.kind == "l2r":
        can_score = True
    else:
        can_score = not config.l2r_only
    if not can_score:
        raise UserError(
            f"this model has no order {name!r}; leave out --orders, or give "
            f"{' or '.join(default_orders(config))}"
        )
    if a.group > 1 and (config.l2r_only or meaning is None):
        raise UserError("--group is for any-order models: leave it out")
    if meaning is None:
        return Scorer(joint=True)  # SEDD's bound
    if not isinstance(meaning, OrderConfig):
        return Scorer(mode=meaning, group=a.group)
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


def evaluate(a: Arguments, procs: Processes) -> None:
    """Score every text along every order; the main process prints and writes the
    results."""
    # 1. Everything that can be wrong before a model is loaded.
    outputs = check_arguments(a)
    dtype = pick_dtype(a.dtype, procs.device)
    orders = parse_orders(a)
    datasets = [open_split(name, a.split) for name in a.datasets]

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
    scorers = scorers_of(a, orders, configs)
    eval_sets = []
    for dataset in datasets:
        eval_set = open_eval_set(dataset, models[0], a.max_sequences, block_size)
        eval_sets.append(eval_set)
        blocks = eval_set.dataset.block_size
        for scorer in itertools.chain(*scorers.values()):
            if scorer.orders:
                scorer.orders.check_blocks(blocks, f"the blocks of {eval_set.name}")
        if "score_entropy" in scorers and eval_set.dataset.of_records:
            raise UserError("score_entropy takes no prompts; leave it out")
        for loaded in models:
            note = note_on_end(eval_set.dataset, loaded)
            if note is not None:
                notes.append(note)

    # 3. The losses, task after task.
    runner = likelihood.BatchRunner(procs, dtype, block_size)
    report: dict[str, Any] = {"results": []}
    if a.other is not None:
        report["differences"] = []

    def save(part: bool = False) -> None:
        """Write the report. part: more follows."""
        if not procs.main or a.json is None:
            return
        origins: Any = [loaded.origin() for loaded in models]
        checkpoint = origins[0]
        if a.other is not None:
            checkpoint = dict(zip("AB", origins, strict=True))
        origin = provenance(
            a, dtype, procs.device, procs.world_size, checkpoint=checkpoint
        )
        lines = [*likelihood_lines(models, report), *notes]
        outputs.write_report(a.json, {**report, **origin}, lines, part)

    for eval_set in eval_sets:
        for name, of_name in scorers.items():
            tasks = []
            losses = []
            rows = []
            for loaded, scorer in zip(models, of_name, strict=True):
                task = Task(loaded, eval_set, name, scorer)
                loss = likelihood.losses_of(task, runner, a.seed, a.num_orders)
                tasks.append(task)
                losses.append(loss)
                rows.append(likelihood.result_rows(task, loss, a.num_orders))
            report["results"] += itertools.chain(*rows)
            if a.other is not None:
                both = [of_model[0] for of_model in rows]
                gap = likelihood.difference_row(tasks, losses, both)
                report["differences"].append(gap)
            # After every task, so that a job that is killed loses none.
            save(part=True)
    if procs.main:
        show(*likelihood_lines(models, report), *notes, sep="\n")
    if a.json is not None:
        with outputs:  # raises an error if a file could not be written
            save()


def main() -> None:
    """Score the texts of the command line."""
    arguments = tyro.cli(
        with_help(Arguments), prog="python eval_ppl.py", description=__doc__
    )
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


if __name__ == "__main__":
    run_script(main)
