"""Differences between run configs with 95% intervals, and verdicts on primary claims.

Welch's t test, since run configs differ in their spread over seeds. Runs are not paired
by seed: for most pairs of configs that would narrow the interval, for some widen it,
and one rule holds for all. The runs of a config are one sample, however often a claim
names it. Beside it the ranks of the runs (Mann and Whitney), which a claim can have its
verdict from: one failed run in eight doubles a mean's interval and leaves ranks nearly
as they are. Where runs succeed or fail, a claim can be about the number of runs that
succeed, by Fisher's exact test. Holm's correction over all primary claims of an
experiment, whose family-wise error is then at most LEVEL; a p value within a factor of
two of LEVEL is called borderline. Other claims get an interval and no verdict.
"""

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aogpt.evaluation.estimates import t_quantile

LEVEL = 0.05
NEAR = 2.0  # p values within this factor of LEVEL are borderline
CONFIRMED = "confirmed"
OPPOSITE = "opposite"
UNDECIDED = "undecided"
BORDERLINE = "undecided (borderline)"
BORDERLINE_OPPOSITE = "undecided (borderline, opposite)"
PLATEAU = "undecided (unigram plateau)"
UNFINISHED = "undecided (a run did not end)"
UNMEASURED = "not measured"
NO_VERDICT = "no verdict"
# nats per token: a loss this close to the unigram entropy is on its plateau
NOTHING = 0.1

Entries = dict[str, dict]
"""By run config: {"runs": [the result of each seed]}, as `runner.train` returns
them."""


@dataclass(frozen=True)
class Claim:
    """One figure is lower than another. A side is a term, or a difference A - B of two
    terms. A term is RUN_CONFIG, RUN_CONFIG:KIND, RUN_CONFIG:KIND@SHARE or a number.
    SHARE is the share of the tokens after which a loss is read, by default 1. KIND is
    by default that of the experiment:

    a name          a loss, or a measured figure
    ONE-2*OTHER     of two figures of one run
    lowest_LOSS     the lowest of all evaluations
    tokens_to_GOAL  millions of tokens until the training-order loss is at most GOAL"""

    says: str
    lower: str
    higher: str
    # `lower` may be larger by less than this: it is as good, within the margin
    margin: float = 0.0
    # recipes under which it gets a verdict
    primary: list[str] = field(default_factory=list)
    ranks: bool = False  # the verdict is from ranks, for data where some runs fail
    # Why its verdict says nothing, seen after its runs; it still counts as a test.
    no_verdict: str = ""
    # If given, the claim is that fewer runs of `lower` than of `higher` succeed, which
    # are those whose figure is at least this. Both sides are one term.
    success: float | None = None


@dataclass(frozen=True)
class Figure:
    """A loss or measure of one run."""

    value: float
    # standard error from samples that the runs of all seeds share
    shared_error: float = 0.0
    # the run ended before it reached a goal: the value is a lower bound
    censored: bool = False


def figure_of(row: dict, kind: str, share: float = 1.0) -> Figure | None:
    """Return a measured figure of a run, or else its loss at the first evaluation after
    a share of its tokens. None if the run did not end or has no such figure."""
    weighted = re.fullmatch(r"(\w+)-([\d.]+)\*(\w+)", kind)
    if weighted:
        one, factor, other = weighted.groups()
        figures = [figure_of(row, one, share), figure_of(row, other, share)]
        return combined([1, -float(factor)], figures)
    if share == 1 and kind in row.get("measured", {}):
        value, error = row["measured"][kind]
        return Figure(value, error or 0.0)
    if not row["tokens"]:
        return None
    losses = row["losses"]
    if kind.startswith("tokens_to_"):
        goal = float(kind.removeprefix("tokens_to_"))
        reached = tokens_to(goal, row, "training")
        count = reached or row["tokens"][-1]
        return Figure(count / 1e6, censored=reached is None)
    if kind.startswith("lowest_"):
        values = losses.get(kind.removeprefix("lowest_"))
        return Figure(min(values)) if values else None
    if kind not in losses:
        return None
    # Its Monte Carlo error differs from seed to seed, so that the spread over seeds
    # contains it.
    for tokens, loss in zip(row["tokens"], losses[kind], strict=True):
        if tokens >= share * row["tokens"][-1]:
            return Figure(loss)
    return None


def tokens_to(goal: float, row: dict, kind: str) -> float | None:
    """Return tokens at which a loss first reaches the goal, interpolated between two
    evaluations; None if it never does."""
    before = None
    losses = row["losses"].get(kind, ())
    for tokens, loss in zip(row["tokens"], losses, strict=False):
        if loss <= goal:
            if before is None:
                return tokens
            last_tokens, last_loss = before
            share = (last_loss - goal) / (last_loss - loss)
            return last_tokens + share * (tokens - last_tokens)
        before = (tokens, loss)
    return None


class Side(NamedTuple):
    """A term of a claim: a figure of the runs of a config, or a number."""

    name: str  # the run config, or the number
    kind: str
    share: float

    @property
    def is_number(self) -> bool:
        return is_number(self.name)


def judged(claim: Claim, kind: str, entries: Entries) -> dict | None:
    """Return a claim with its difference, higher - lower; None if a run config is
    missing.

    {"says", "margin", "unit", "ranks", "no_verdict", "mean", "half_width", "p",
    "median", "p_rank", "seeds", "successes", "verdict"}: p values are of the difference
    plus the margin, p by Welch's test and p_rank by ranks; the verdict is only what
    stands in the way of one, or nothing. In a claim about successes the mean is a
    difference of shares, p is Fisher's, and "successes" are those of higher and of
    lower."""
    coefficients = coefficients_of(claim, kind)
    figures = figures_of(coefficients, entries)
    if figures is None:
        return None
    unit = " M tokens" if "tokens_to_" in claim.lower else ""
    judgement = {
        "says": claim.says,
        "margin": claim.margin,
        "unit": unit,
        "ranks": claim.ranks,
        "no_verdict": claim.no_verdict,
        "mean": None,
        "half_width": None,
        "p": None,
        "median": None,
        "p_rank": None,
        "seeds": min(map(len, figures.values())),
        "successes": None,
        "verdict": "",
    }
    for of_side in figures.values():
        if not any(of_side):
            judgement["verdict"] = UNMEASURED
            return judgement
    if claim.success is not None:
        higher = figures[side_of(claim.higher, kind)]
        lower = figures[side_of(claim.lower, kind)]
        judgement.update(compared_by_successes(higher, lower, claim.success))
        return judgement
    samples = samples_of(coefficients, figures)
    mean, half_width, p = compared(list(samples.values()), claim.margin)
    judgement["mean"] = mean
    judgement["half_width"] = half_width
    judgement["p"] = p
    median, p_rank = compared_by_ranks(samples, claim.margin)
    judgement["median"] = median
    judgement["p_rank"] = p_rank
    if is_unfinished(coefficients, figures):
        judgement["verdict"] = UNFINISHED  # the runs that ended may be the lucky ones
    elif any(on_the_plateau(side, entries) for side in coefficients):
        judgement["verdict"] = PLATEAU
    return judgement


def is_unfinished(
    coefficients: dict[Side, int], figures: dict[Side, list[Figure | None]]
) -> bool:
    """Return whether a run did not end, or a side that is subtracted is a lower
    bound."""
    for side, of_side in figures.items():
        is_subtracted = coefficients[side] < 0
        for figure in of_side:
            if figure is None or (figure.censored and is_subtracted):
                return True
    return False


def coefficients_of(claim: Claim, kind: str) -> dict[Side, int]:
    """Return the sides of a claim with their coefficients in higher - lower; a side
    that it names twice is one, and a side that cancels is left out."""
    coefficients: Counter[Side] = Counter()
    for sign, text in ((1, claim.higher), (-1, claim.lower)):
        first, *subtracted = text.split(" - ")
        coefficients[side_of(first, kind)] += sign
        for term in subtracted:
            coefficients[side_of(term, kind)] -= sign
    for side in list(coefficients):
        if coefficients[side] == 0:
            del coefficients[side]
    return coefficients


def samples_of(
    coefficients: dict[Side, int], figures: dict[Side, list[Figure | None]]
) -> dict[str, list[Figure | None]]:
    """Return the independent samples of a difference, a list with a figure for each
    seed: by run config (or number) the sum of its sides with their coefficients. The
    difference is the sum of the means of all samples."""
    sides_of: dict[str, list[Side]] = {}
    for side in coefficients:
        sides_of.setdefault(side.name, []).append(side)
    samples = {}
    for name, sides in sides_of.items():
        factors = [coefficients[side] for side in sides]
        samples[name] = []
        for seed in range(len(figures[sides[0]])):
            of_seed = [figures[side][seed] for side in sides]
            samples[name].append(combined(factors, of_seed))
    return samples


def compared(
    samples: list[list[Figure | None]], margin: float = 0.0
) -> tuple[float, float | None, float | None]:
    """Return the sum of the means of independent samples, half the width of its 95%
    interval, and the two-sided p value of the sum + margin, by Welch's t test; the sum
    alone if a sample is of a single run. The error of orders, masks or records that
    all seeds share is not in the spread over seeds, and is added to it."""
    from scipy import stats

    means = []
    parts = []
    shares_of_degrees = []
    shared = []
    sizes = []
    for sample in samples:
        figures = [figure for figure in sample if figure]
        values = [figure.value for figure in figures]
        size = len(values)
        sizes.append(size)
        means.append(statistics.mean(values))
        shared_errors = [figure.shared_error for figure in figures]
        shared.append(statistics.mean(shared_errors) ** 2)
        if size > 1:
            part = statistics.variance(values) / size
            parts.append(part)
            shares_of_degrees.append(part**2 / (size - 1))
    mean = math.fsum(means)
    if min(sizes) < 2:
        return mean, None, None
    error = math.sqrt(sum(parts) + sum(shared))
    if error == 0:
        return mean, 0.0, float(math.isclose(mean, -margin, abs_tol=1e-12))
    degrees = min(sizes) - 1
    if sum(shares_of_degrees):
        degrees = sum(parts) ** 2 / sum(shares_of_degrees)
    half_width = t_quantile(degrees) * error
    t = abs(mean + margin) / error
    p = 2 * float(stats.t.sf(t, degrees))
    return mean, half_width, p


def compared_by_ranks(
    samples: dict[str, list[Figure | None]], margin: float = 0.0
) -> tuple[float | None, float | None]:
    """Return a difference as the median over pairs of runs (Hodges and Lehmann), and
    the two-sided p value of the difference + margin by ranks: of two run configs by the
    test of Mann and Whitney, of one against a number by Wilcoxon's signed ranks. None
    and None for sums over more run configs, or if a sample is of a single run."""
    numbers = []
    of_runs = []
    for name, sample in samples.items():
        values = [figure.value for figure in sample if figure]
        if is_number(name):
            numbers.append(values[0])
        else:
            of_runs.append(values)
    if len(of_runs) not in (1, 2) or min(map(len, of_runs)) < 2:
        return None, None
    from scipy import stats

    number = math.fsum(numbers)
    first = of_runs[0]
    shifted = [value + number + margin for value in first]
    if len(of_runs) == 1:
        pairs = itertools.combinations_with_replacement(first, 2)
        median = statistics.median((one + other) / 2 for one, other in pairs)
        p = stats.wilcoxon(shifted).pvalue if any(shifted) else 1.0
    else:
        second = of_runs[1]
        pairs = itertools.product(first, second)
        median = statistics.median(one + other for one, other in pairs)
        opposed = [-value for value in second]
        has_ties = len({*shifted, *opposed}) < len(shifted) + len(opposed)
        method = "asymptotic" if has_ties else "exact"
        p = stats.mannwhitneyu(shifted, opposed, method=method).pvalue
    return median + number, float(p)


def compared_by_successes(
    higher: list[Figure | None], lower: list[Figure | None], least: float
) -> dict:
    """Return the difference in the share of runs that succeed, the number of those of
    each side, and the two-sided p value of Fisher's exact test. A run succeeds if its
    figure is at least `least`; one that did not end fails."""
    from scipy import stats

    successes = []
    failures = []
    shares = []
    for figures in (higher, lower):
        count = sum(1 for figure in figures if figure and figure.value >= least)
        successes.append(count)
        failures.append(len(figures) - count)
        shares.append(count / len(figures))
    p = stats.fisher_exact([successes, failures]).pvalue
    return {"mean": shares[0] - shares[1], "p": float(p), "successes": successes}


def combined(
    factors: Sequence[float], figures: Sequence[Figure | None]
) -> Figure | None:
    """Return the sum of figures of one run, each times its factor; None if one is
    missing."""
    if not all(figures):
        return None
    value = 0.0
    error = 0.0
    for factor, figure in zip(factors, figures, strict=True):
        value += factor * figure.value
        error = math.hypot(error, factor * figure.shared_error)
    return Figure(value, error)


def with_verdicts(claims: list[dict], tests: int) -> None:
    """Give the primary claims of an experiment their verdicts, by Holm's step-down
    procedure. One that its runs cannot decide (plateau, unfinished runs) counts as a
    test that failed.

    tests: number of primary claims of the experiment; those that are not run yet count
    as tests that failed, too."""
    p_of = {}
    for number, claim in enumerate(claims):
        p = deciding_p(claim)
        p_of[number] = 1.0 if claim["verdict"] or p is None else p
    adjusted = 0.0
    for rank, number in enumerate(sorted(p_of, key=p_of.get)):
        claim = claims[number]
        p = (tests - rank) * p_of[number]
        adjusted = max(adjusted, min(1.0, p))
        claim["p_holm"] = adjusted
        if claim["no_verdict"]:
            claim["verdict"] = NO_VERDICT
        elif not claim["verdict"]:
            claim["verdict"] = verdict_of(claim)


def deciding_p(claim: dict) -> float | None:
    """Return the p value that the verdict on a claim is from, before Holm's correction;
    None if its runs have none."""
    return claim["p_rank"] if claim["ranks"] else claim["p"]


def verdict_of(claim: dict) -> str:
    """Return the verdict on a claim by its p value after Holm's correction."""
    p = claim["p_holm"]
    if p >= NEAR * LEVEL:
        return UNDECIDED
    difference = claim["median"] if claim["ranks"] else claim["mean"]
    holds = difference + claim["margin"] > 0
    if p > LEVEL / NEAR:
        return BORDERLINE if holds else BORDERLINE_OPPOSITE
    return CONFIRMED if holds else OPPOSITE


def on_the_plateau(side: Side, entries: Entries) -> bool:
    """Return whether a side is a loss that in some run is near the unigram entropy of
    the text that it is of: such a run has learned frequencies only, and says nothing
    about the claim."""
    if side.is_number:
        return False
    is_tested = side.kind.startswith("eval_")
    for row in entries[side.name]["runs"]:
        measured = row.get("measured", {})
        figure = figure_of(row, side.kind, side.share)
        unigram = measured.get("unigram")
        if is_tested:
            unigram = measured.get("unigram_test", unigram)
        is_loss = is_tested or side.kind.removeprefix("lowest_") in row["losses"]
        if is_loss and figure and unigram and figure.value > unigram[0] - NOTHING:
            return True
    return False


def figures_of(
    sides: Sequence[Side], entries: Entries
) -> dict[Side, list[Figure | None]] | None:
    """Return the figures of each side, one a seed, of which run configs may have
    different numbers; None if a run config is missing."""
    names = {side.name for side in sides if not side.is_number}
    if not entries.keys() >= names:
        return None
    seeds = min(len(entries[name]["runs"]) for name in names)
    figures = {}
    for side in sides:
        if side.is_number:
            figures[side] = [Figure(float(side.name))] * seeds
        else:
            rows = entries[side.name]["runs"]
            figures[side] = [figure_of(row, side.kind, side.share) for row in rows]
    return figures


def side_of(text: str, kind: str) -> Side:
    """Return the side that RUN_CONFIG:KIND@SHARE or a number means; `kind` is the
    default."""
    parts = re.fullmatch(r"([^:]*):?([^@]*)@?(.*)", text)
    name, kind_of_side, share = parts.groups()
    return Side(name, kind_of_side or kind, float(share or 1))


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+", text) is not None
