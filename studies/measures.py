"""Measures of a run besides its validation losses: this project's scripts are run on
it, each in a process of its own, and their JSON is read. Figures are {name: [value,
standard error or None]}.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aogpt.data.loader import TokenDataset, spread
from aogpt.data.prompts import PREDICTED
from aogpt.data.tokenizers import END_OF_TEXT, get_tokenizer
from aogpt.evaluation.estimates import t_quantile
from aogpt.evaluation.text_measures import mean_and_error
from studies.generators import NATS_OF_TEXT
from studies.runs import report_of

Measured = dict[str, list[float | None]]


@dataclass(frozen=True)
class Measure:
    """A script and its arguments, in which {run} is the run to measure, {data} its
    dataset and {seed} its seed, which is that of its fixed order, too."""

    script: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...] = ()  # with --quick, in place of the same options
    run_configs: tuple[str, ...] = ()  # that it can measure; by default all
    recipes: tuple[str, ...] = ()  # under which it measures them; by default all

    def applies_to(self, recipe: str, name: str) -> bool:
        if self.recipes and recipe not in self.recipes:
            return False
        return not self.run_configs or name in self.run_configs

    def words(self, quick: bool) -> tuple[str, ...]:
        if not quick:
            return self.arguments
        return tuple(with_options(self.arguments, self.quick))


def with_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words of a command with these options and their values, in place of
    the same options: scripts refuse an option that is given twice."""
    replaced = set()
    for word in options:
        if word.startswith("--"):
            replaced.add(word.replace("_", "-"))
    remaining = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            is_replaced = word.replace("_", "-") in replaced
        if not is_replaced:
            remaining.append(word)
    return [*remaining, *options]


def measured_by(command: list[str]) -> Measured:
    """Return the figures of a script. Raises UserError with its last words if it
    fails."""
    report = report_of(*command)
    first = report["results"][0]
    if "exact_match" in first:
        return of_answers(report)
    if "tokens_a_pass" in first:
        return of_passes(report)
    return of_perplexity(report)


def of_perplexity(result: dict) -> Measured:
    """Return the figures of a report of eval_ppl.py in nats per token: eval_ORDERS for
    the first dataset, and nats_DATASET_ORDERS for each. The name ends in _mM for an
    ensemble of M orders; gain_ORDERS_mM is its gain over one order, of the first
    dataset. slots4 is slots:block=4; the seed of a fixed order, which differs from run
    to run, is left out."""
    figures: Measured = {}
    for row in result["results"]:
        name = re.sub("[:,]seed=[0-9]+", "", row["orders"])
        name = name.replace(":block=", "")
        if row["ensemble"] > 1:
            name += f"_m{row['ensemble']}"
        loss = [row["nll"], row["monte_carlo_error"]]
        figures.setdefault(f"eval_{name}", loss)
        figures[f"nats_{row['dataset']}_{name}"] = loss
        if row["gain"] is not None:
            gain = [row["gain"], row["gain_error"]]
            figures.setdefault(f"gain_{name}", gain)
    return figures


def of_answers(report: dict) -> Measured:
    """Return the figures of a report of studies.eval_tasks: the share of right answers,
    exact_TASK."""
    figures = {}
    for row in report["results"]:
        figures[f"exact_{row['task']}"] = [row["exact_match"], row["standard_error"]]
    return figures


def of_passes(report: dict) -> Measured:
    """Return the figures of a report of studies.passes: tokens_a_pass, and of a fixed
    order tokens_a_pass_ORDER."""
    figures = {}
    for row in report["results"]:
        name = "tokens_a_pass"
        if order := re.search("order=([a-z0-9_]+)", row["mode"]):
            name += f"_{order[1]}"
        figures[name] = [row["tokens_a_pass"], row["standard_error"]]
    return figures


@functools.cache
def least_loss(folder: str, sequences: int, size: int) -> float | None:
    """Return the nats per token that the generating distribution gives validation
    sequences in blocks of `size`; None if it is unknown."""
    nats_of = NATS_OF_TEXT.get(Path(folder).name)
    if not nats_of:
        return None
    data = TokenDataset(folder, "val", size)
    places = spread(sequences, data.num_blocks)
    blocks = data.blocks(places)
    tokenizer = get_tokenizer(data.meta["tokenizer"])
    text = tokenizer.decode(blocks.flatten())
    documents = text.split(END_OF_TEXT)[:-1]
    nats = sum(map(nats_of, documents))
    return nats / blocks.numel()


@functools.cache
def unigram(folder: str, split: str = "val") -> float:
    """Return the entropy of single tokens of a split, in nats; where there are prompts,
    of the tokens that are predicted."""
    dataset = TokenDataset(folder, split, block_size=None)
    tokens = dataset.tokens
    if dataset.of_records:
        dataset.divide(dataset.meta["block_size"])
        rows = range(dataset.num_blocks)
        tokens = dataset.blocks(rows)[dataset.roles(rows) == PREDICTED].numpy()
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / counts.sum()
    nats = -(shares * np.log(shares))
    return float(nats.sum())


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95% interval (Student's t); None for
    one value."""
    mean, error = mean_and_error(values)
    half_width = None
    if error is not None:
        half_width = t_quantile(len(values) - 1) * error
    return mean, half_width
