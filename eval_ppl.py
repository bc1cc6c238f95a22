"""Perplexity of a trained model on prepared text: left to right, in any order, and averaged over
orders of the context.

    python eval_ppl.py out/quickstart --datasets stories
    python eval_ppl.py RUN --datasets data/own --orders l2r random fixed_blockwise:block=32,seed=1
    torchrun --nproc_per_node=8 eval_ppl.py RUN --datasets wikitext103 ptb \\
        --orders l2r random --ensemble 1 8 64 --json FILE
"""

from __future__ import annotations

from runtime.errors import UserError

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from annotated_types import Interval
from torch import Tensor

from checkpoints.load import Loaded, load
from evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS
from evaluation.eval_sets import EvalSet, open_eval_set
from evaluation.likelihood import BatchRunner, Scores, ScoringTask, score
from evaluation.orders_compared import disagreements, table
from evaluation.perplexity_table import markdown, notes, result_rows
from model import ModelConfig
from orders import ORDER_SETTINGS, OrderConfig, parse_order, parse_settings
from runtime.command_line import ModelOptions, run_script
from runtime.devices import pick_dtype
from runtime.outputs import OutputOptions, Outputs
from runtime.processes import Processes, processes
from runtime.reports import provenance
from runtime.validation import Count, Positive, check_values
from sampling.plans import Pace, Rule, Score

DATA = Path(__file__).parent / "data"
# Of orders that the model chooses.
RULE_SETTINGS = {"threshold": float, "entropy_bound": float, "most": int, "block": int}

# ---- options -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), exported folder, released weights or Hugging Face repo id."""
    datasets: tuple[str, ...]
    """Prepared data sets: names under data/, or folders that data/prepare.py wrote."""
    split: str | None = None
    """By default the evaluation set's own, the only one, or val."""
    orders: tuple[str, ...] | None = None
    """Orders to score: l2r, random (any-order: the mean over uniform orders; an encoder's ELBO), or
    any distribution with its settings, as fixed_blockwise:block=32,seed=1 or mixture:l2r_prob=0.5;
    of SEDD also score_entropy, its own bound; confidence, entropy or margin: the order in which the
    model itself would decode the text, most certain first, a pass for every step, also at its pace,
    as confidence:threshold=0.9 or entropy:entropy_bound=0.5,most=4,block=32. By default l2r and
    random, or what the model has of them in a single pass: an encoder takes as many passes as
    tokens along an order."""
    ensemble: tuple[Annotated[int, Interval(ge=1, lt=MAX_MEMBERS)], ...] = (1,)
    """Sizes of order ensembles: probabilities averaged over that many orders of the context, for
    uniformly random orders, always in float32 (rounding looks like a gain). 1 is no ensemble."""
    group: Count = 1
    """Steps of an order that are predicted at once, from those before them alone, as decoding in
    groups does: a pass for each group, but of a two-stream model."""
    bound: Literal["mean", "iw"] = "mean"
    """Of several orders: the mean of their losses; or iw, the importance-weighted bound over
    --num-orders of them, -log of the mean of the probabilities that they give a sequence."""
    disagreement: bool = False
    """Also tell how far the likelihoods of the same text differ from order to order."""
    num_orders: Annotated[int, Interval(ge=1, lt=MAX_DRAWS)] | None = None
    """Draws per sequence (Monte Carlo) of orders or of an encoder's masks; by default 2, with
    --target-se at most 1000. Ensembles draw a context for every 8 orders, but two at least."""
    target_se: Positive | None = None
    """Draw until the Monte Carlo standard error is at most this many nats per token, or
    --num-orders are drawn."""
    max_sequences: Count | None = None
    """Score only the first blocks of the split."""
    batch_size: Count | None = None
    """Sequences in a pass; by default as many as are of use, halved where the memory runs out. The
    results do not depend on it."""
    json: Path | None = None
    """Write results, settings and versions to this file, and the table beside it as Markdown
    (.md)."""
    per_token: Path | None = None
    """Write the loss of every token, averaged over draws, to this .npz file, with the tokens and
    the block numbers. No ensembles: they have gains only. Of an encoder: the token's terms of the
    ELBO, 0 where no draw masked it."""

    @property
    def max_draws(self) -> int:
        return self.num_orders or (1000 if self.target_se else 2)


def check_arguments(a: Arguments) -> Outputs:
    """The files to write. Raises ValueError for what cannot be done, before the work begins."""
    check_values(a)
    names = " ".join(a.datasets)
    if not a.datasets:
        raise UserError("--datasets names nothing; give RUN first, then --datasets and a name")
    if len({Path(name).name for name in a.datasets}) < len(a.datasets):
        raise UserError(
            f"--datasets {names}: results go by the last part of a path; give each its own"
        )
    if not a.ensemble:
        raise UserError("--ensemble names no size; give one at least, or leave it out")
    if a.target_se and a.max_draws < 2:
        raise UserError("--target-se needs --num-orders 2 or more: one draw has no visible error")
    if a.group > 1 and set(a.ensemble) != {1}:
        raise UserError("ensembles are of single steps: leave out --ensemble or --group")
    if a.bound == "iw" and (a.num_orders is None or a.target_se or set(a.ensemble) != {1}):
        raise UserError(
            "--bound iw is over a number of orders: give --num-orders, without --target-se and "
            "--ensemble"
        )
    if a.per_token and a.per_token.suffix != ".npz":
        raise UserError(f"--per-token {a.per_token}: name a file that ends in .npz")
    if a.json and a.json.suffix in (".md", ".npz"):  # names of what is written beside it
        raise UserError(f"--json {a.json}: name a file that ends in .json")
    table = a.json and a.json.with_suffix(".md")
    files = {"--json": a.json, "the table beside --json": table, "--per-token": a.per_token}
    inputs = [a.run, *a.datasets, *(DATA / name for name in a.datasets)]
    return Outputs(files, inputs, a.overwrite)


def parse_rule(text: str) -> Rule | None:
    """The model's own order that `score` or `score:setting=value,...` means; None of another."""
    if text.partition(":")[0] not in get_args(Score):
        return None
    score, values = parse_settings(text, RULE_SETTINGS, "threshold=0.9", "--orders")
    for key, value in values.items():
        least = 1 if RULE_SETTINGS[key] is int else 0
        if not value >= least:  # nor is that which is no number
            raise UserError(f"--orders {text}: {key} is {value}; give a larger number")
    block = values.pop("block", None)
    try:
        return Rule(score, Pace(**values) if values else None, block)
    except ValueError as error:
        raise UserError(f"--orders {text}: {error}") from None


@dataclass(frozen=True)
class Scored:
    """What one of --orders asks for."""

    orders: OrderConfig
    rule: Rule | None = None
    """Instead: the model's own order, one for each text."""
    score_entropy: bool = False
    """Instead: SEDD's own bound."""


def scored_by(text: str, a: Arguments, config: ModelConfig) -> Scored:
    """What `text` means for this model. Raises ValueError where it has no such likelihood."""
    if text == "score_entropy":
        if not config.noise:
            raise UserError("--orders score_entropy is the bound of SEDD; this is another model")
        return Scored(OrderConfig("random"), score_entropy=True)
    rule = parse_rule(text)
    if rule and rule.pace and a.group > 1:
        raise UserError(
            f"--orders {text} says itself how many positions a step takes; leave out --group, or "
            f"write most={a.group} there"
        )
    found = Scored(OrderConfig("l2r"), rule) if rule else Scored(parse_order(text, "--orders"))
    if "block" in ORDER_SETTINGS[found.orders.kind] and found.orders.block > config.block_size:
        raise UserError(
            f"--orders {text}: the model's block size is {config.block_size}; give a smaller block"
        )
    if config.l2r_only and (found.orders.kind != "l2r" or rule):
        raise UserError(
            f"this model is not told its target position and has no {text!r} perplexity; "
            "give --orders l2r"
        )
    return found


def choose_orders(a: Arguments, config: ModelConfig) -> dict[str, Scored]:
    """What to score, by name. Raises ValueError where the model has no such likelihood."""
    possible = ("l2r", "random")
    if config.is_encoder:  # it sees a set of tokens, in no order
        possible = ("random", "score_entropy") if config.noise else ("random",)
    elif config.l2r_only:  # a decoder that can only know the order it was trained on
        possible = ("l2r",)
    if a.orders == ():
        raise UserError("--orders names no order; give l2r, random, or another distribution")
    named = {text: scored_by(text, a, config) for text in a.orders or possible}
    if a.group > 1 and (config.l2r_only or "score_entropy" in named):
        raise UserError(
            "--group is for models that are told their targets, scored as probabilities; leave it "
            "out, or name other --orders"
        )
    return named


def check_measures(a: Arguments, config: ModelConfig, named: dict[str, Scored]) -> None:
    """Raise ValueError where --bound, --disagreement or --ensemble asks for what these orders of
    this model do not have."""
    if a.bound == "iw":
        fixed = all(of.orders.is_fixed for of in named.values())
        if fixed or (config.is_encoder and "random" in named):
            raise UserError(
                "--bound iw needs orders that are drawn, and of an encoder those of a "
                "distribution other than random, whose ELBO takes no order: give other --orders"
            )
    if a.disagreement:
        drawn = [of for of in named.values() if not of.orders.is_fixed]
        if config.is_encoder and ("random" in named or "score_entropy" in named):
            raise UserError(
                "--disagreement is of likelihoods along orders, which an ELBO takes none of: give "
                "other --orders"
            )
        if len(named) < 2 and not (drawn and a.max_draws > 1):
            raise UserError("--disagreement needs two --orders, or two draws of one")
    if set(a.ensemble) != {1}:
        reason = None
        if config.is_encoder:
            reason = "is an encoder, whose predictions do not depend on the order of the context"
        elif config.l2r_only:
            reason = "is not told its target position: it knows one order only"
        if reason:
            raise UserError(
                f"this model {reason}, so there is no ensemble of orders; leave out --ensemble"
            )
        if all(of.orders.kind != "random" for of in named.values()):
            raise UserError(
                f"ensembles are of uniformly random orders, not of {', '.join(named)}; "
                "add random to --orders, or leave out --ensemble"
            )


def check_sets(a: Arguments, eval_sets: list[EvalSet], orders: dict[str, Scored]) -> None:
    """Raise ValueError for what is not known of records."""
    records = [eval_set.name for eval_set in eval_sets if eval_set.dataset.of_records]
    if records and (set(a.ensemble) != {1} or "score_entropy" in orders):
        raise UserError(
            f"{records[0]} holds records, of which a part is given: neither --ensemble nor "
            "score_entropy takes that into account; leave them out"
        )


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(a: Arguments, procs: Processes) -> None:
    outputs = check_arguments(a)
    loaded = load(a.run, a.weights, procs.device, a.block_size)
    config, dtype = loaded.model.config, pick_dtype(a.dtype, procs.device)
    orders = choose_orders(a, config)
    check_measures(a, config, orders)
    eval_sets = [open_eval_set(name, a.split, loaded, a.max_sequences) for name in a.datasets]
    check_sets(a, eval_sets, orders)
    runner = BatchRunner(procs, dtype, config.block_size, a.batch_size)
    source = {key: getattr(loaded, key) for key in ("path", "step", "weights", "system")}
    origin = provenance(a, dtype, procs.device, procs.world_size, checkpoint=source)
    report = Report(a, loaded, orders, eval_sets, origin) if procs.main else None
    for eval_set in eval_sets:
        for name, of in orders.items():
            task = task_of(a, loaded, eval_set, name, of)
            scores = score(task, runner)
            if report:  # written after every task, so that a job that is killed loses none
                report.add(task, scores)
                report.write(outputs)
    if report:
        with outputs:
            print("\n".join(report.lines()))


def task_of(a: Arguments, loaded: Loaded, eval_set: EvalSet, name: str, of: Scored) -> ScoringTask:
    # Ensembles are estimated for uniformly random orders only.
    sizes = tuple(sorted(set(a.ensemble))) if of.orders.kind == "random" else (1,)
    return ScoringTask(
        loaded=loaded,
        eval_set=eval_set,
        name=name,
        orders=of.orders,
        ensemble_sizes=sizes,
        seed=a.seed,
        max_draws=a.max_draws,
        target_se=a.target_se,
        per_token=a.per_token is not None,
        score_entropy=of.score_entropy,
        group=a.group,
        rule=of.rule,
        bound=a.bound,
    )


class Report:
    """What has been scored so far, on the main process."""

    def __init__(
        self,
        a: Arguments,
        loaded: Loaded,
        orders: dict[str, Scored],
        eval_sets: list[EvalSet],
        origin: dict,
    ):
        self.a, self.loaded, self.orders, self.eval_sets = a, loaded, orders, eval_sets
        self.origin = origin
        self.frequencies = {s.name: s.frequencies() for s in eval_sets}
        self.results: list[dict] = []
        self.of_tokens: dict[str, Tensor] = {}
        """By the name of an array in the file of --per-token."""
        self.scored: dict[str, dict[str, Tensor]] = {}
        """By text and orders: the losses of every sequence in every draw, (N, D)."""
        self.weights: dict[str, Tensor] = {}

    def add(self, task: ScoringTask, scores: Scores) -> None:
        text = task.eval_set.name
        self.results += result_rows(task, scores, self.a.weights)
        self.scored.setdefault(text, {})[task.name] = scores.losses
        scored = task.scored_tokens().double()
        self.weights[text] = scored / scored.mean()
        if scores.token_nll is not None:
            # 1 is the ensemble size: ensembles do not score every token.
            self.of_tokens[f"{text}/{task.name}/1/nll"] = scores.token_nll

    def disagreements(self) -> list[dict]:
        return [
            row
            for text, losses in self.scored.items()
            for row in disagreements(text, losses, self.weights[text])
        ]

    def lines(self) -> list[str]:
        """The table and its notes."""
        found = [self.loaded.describe(), "", *markdown(self.results, self.frequencies), ""]
        found += notes(self.results, self.a.target_se) + ensemble_notes(self.a, self.orders)
        if self.a.disagreement:
            found += ["", *table(self.disagreements())]
        return found

    def write(self, outputs: Outputs) -> None:
        """The files that are asked for."""
        a, found = self.a, {"results": self.results, "frequencies": self.frequencies}
        if a.disagreement:
            found["disagreements"] = self.disagreements()
        if a.json:
            outputs.write_json(a.json, found | self.origin)
            outputs.write(a.json.with_suffix(".md"), "\n".join(self.lines()) + "\n")
        if a.per_token:
            outputs.write(a.per_token, tokens_file(self.eval_sets, self.of_tokens))


def ensemble_notes(a: Arguments, orders: dict[str, Scored]) -> list[str]:
    """Where an ensemble was asked for and is not to be had."""
    if set(a.ensemble) == {1}:
        return []
    lines = []
    without = [name for name, of in orders.items() if of.orders.kind != "random"]
    if without:
        lines.append(f"no ensembles of {', '.join(without)}: they are of uniform orders (random)")
    if a.per_token:
        lines.append(f"{a.per_token} holds M = 1 only: ensembles do not score every token")
    return lines


def tokens_file(eval_sets: list[EvalSet], losses: dict[str, Tensor]) -> bytes:
    """An .npz file of arrays: TEXT/ORDERS/1/nll (N, T), NaN where a token is not scored;
    TEXT/tokens (N, T) in sequence order, -1 after the end of a shorter last row; TEXT/blocks
    (N,)."""
    arrays = {name: values.numpy() for name, values in losses.items()}
    for eval_set in eval_sets:
        blocks = min(eval_set.count, eval_set.dataset.num_blocks)
        tokens = eval_set.tokens(range(blocks))
        if eval_set.count > blocks:
            rest = eval_set.dataset.tail()
            rest = F.pad(rest, (0, tokens.shape[1] - rest.shape[1]), value=-1)
            tokens = torch.cat([tokens, rest])
        arrays[f"{eval_set.name}/tokens"] = tokens.numpy()
        arrays[f"{eval_set.name}/blocks"] = np.arange(eval_set.count)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


if __name__ == "__main__":
    run_script(main)
