"""Differences between run configs with 95% intervals, and verdicts on primary claims.

Welch's t test, since run configs differ in their spread over seeds and pairing them by seed removes
none of it; Holm's correction over all primary claims of an experiment, whose family-wise error is
then at most LEVEL. Other claims get an interval and no verdict.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from aogpt.evaluation.estimates import t_quantile

LEVEL = 0.05
SUPPORTED = "supported"
OPPOSITE = "the opposite"
UNDECIDED = "undecided"
PLATEAU = "undecided (unigram plateau)"
UNFINISHED = "undecided (a run did not end)"
UNMEASURED = "not measured"
NOTHING = (
    0.1  # nats per token: a loss this close to the unigram entropy is on its plateau
)

Entries = dict[str, dict]
"""By run config: {"runs": [the result of each seed]}, as `runner.train` returns them."""


@dataclass(frozen=True)
class Claim:
    """One figure is lower than another. A side is a term, or a difference A - B of two terms. A
    term is RUN_CONFIG, RUN_CONFIG:KIND, RUN_CONFIG:KIND@SHARE or a number. SHARE is the share of
    the tokens after which a loss is read, by default 1. KIND is by default that of the experiment:

    a name          a loss, or a measured figure
    ONE-2*OTHER     of two figures of one run
    lowest_LOSS     the lowest of all evaluations
    tokens_to_GOAL  millions of tokens until the training-order loss is at most GOAL"""

    says: str
    lower: str
    higher: str
    margin: float = (
        0.0  # `lower` may be larger by less than this: it is as good, within the margin
    )
    primary: list[str] = field(
        default_factory=list
    )  # recipes under which it gets a verdict


@dataclass(frozen=True)
class Ratio:
    """(a - b) / (c - d) of four sides, as those of a claim, seed by seed; none unless c > d."""

    says: str
    of: tuple[str, str]
    to: tuple[str, str]


@dataclass(frozen=True)
class Figure:
    """A loss or measure of one run."""

    value: float
    shared_error: float = (
        0.0  # standard error from samples that the runs of all seeds share
    )
    censored: bool = (
        False  # the run ended before it reached a goal: the value is a lower bound
    )


def figure_of(row: dict, kind: str, share: float = 1.0) -> Figure | None:
    """A measured figure of a run, or else its loss at the first evaluation after a share of its
    tokens. None if the run did not end or has no such figure."""
    if match := re.fullmatch(r"(\w+)-([\d.]+)\*(\w+)", kind):
        one, other = (figure_of(row, name, share) for name in (match[1], match[3]))
        factor = float(match[2])
        error = (
            math.hypot(one.shared_error, factor * other.shared_error)
            if one and other
            else 0
        )
        return (
            Figure(one.value - factor * other.value, error) if one and other else None
        )
    if share == 1 and kind in row.get("measured", {}):
        value, error = row["measured"][kind]
        return Figure(value, error or 0.0)
    if not row["tokens"]:
        return None
    if kind.startswith("tokens_to_"):
        reached = tokens_to(float(kind.removeprefix("tokens_to_")), row, "training")
        return Figure((reached or row["tokens"][-1]) / 1e6, censored=reached is None)
    if (lowest := kind.removeprefix("lowest_")) != kind and lowest in row["losses"]:
        return Figure(min(row["losses"][lowest]))
    if kind not in row["losses"]:
        return None
    place = next(
        i for i, n in enumerate(row["tokens"]) if n >= share * row["tokens"][-1]
    )
    # Its Monte Carlo error differs from seed to seed, so that the spread over seeds contains it.
    return Figure(row["losses"][kind][place])


def tokens_to(goal: float, row: dict, kind: str) -> float | None:
    """Tokens at which a loss first reaches the goal, interpolated between two evaluations; None if
    it never does."""
    points = list(zip(row["tokens"], row["losses"].get(kind, ()), strict=False))
    for (tokens, loss), (before, higher) in zip(
        points, points[:1] + points, strict=False
    ):
        if loss <= goal:
            share = (higher - goal) / (higher - loss) if higher > goal else 0
            return before + share * (tokens - before)
    return None


def judged(claim: Claim, kind: str, entries: Entries) -> dict | None:
    """A claim with its difference, higher - lower: {"says", "margin", "unit", "mean", "half_width",
    "p", "seeds", "verdict"}. The p value is of the difference plus the margin; the verdict is only
    what stands in the way of one, or nothing. None if a run config is missing."""
    (high, *less), (low, *more) = claim.higher.split(" - "), claim.lower.split(" - ")
    terms = [(1, side) for side in (high, *more)] + [
        (-1, side) for side in (low, *less)
    ]
    sides = sides_of([side for _, side in terms], kind, entries)
    if sides is None:
        return None
    signed = [(sign, side) for (sign, _), side in zip(terms, sides, strict=True)]
    found = {"says": claim.says, "margin": claim.margin, "seeds": min(map(len, sides))}
    found["unit"] = " M tokens" * ("tokens_to_" in claim.lower)
    if not all(any(side) for side in sides):
        return found | {
            "mean": None,
            "half_width": None,
            "p": None,
            "verdict": UNMEASURED,
        }
    if (
        len({parts_of(side, kind)[0] for _, side in terms}) == 1
    ):  # the same runs: a paired test
        signs = [sign for sign, _ in signed]
        signed = [(1, [combined(signs, run) for run in zip(*sides, strict=True)])]
    mean, half_width, p = compared(signed, claim.margin)
    found |= {"mean": mean, "half_width": half_width, "p": p, "verdict": ""}
    ended = all(figure for side in sides for figure in side)
    if not ended or any(
        f and f.censored for sign, side in signed for f in side if sign < 0
    ):
        found["verdict"] = UNFINISHED  # the runs that ended may be the lucky ones
    elif any(on_the_plateau(side, kind, entries) for _, side in terms):
        found["verdict"] = PLATEAU
    return found


def compared(
    terms: list[tuple[int, list[Figure | None]]], margin: float = 0.0
) -> tuple[float, float | None, float | None]:
    """The sum of signed means, half the width of its 95% interval, and the two-sided p value of the
    sum + margin, by Welch's t test; the sum alone if a term is of a single run. The error of
    samples that all seeds share is not in the spread over seeds, and is added to it."""
    signed = [(sign, [figure for figure in side if figure]) for sign, side in terms]
    values = [[figure.value for figure in side] for _, side in signed]
    mean = math.fsum(
        sign * statistics.mean(v) for (sign, _), v in zip(signed, values, strict=True)
    )
    if min(map(len, values)) < 2:
        return mean, None, None
    parts = [statistics.variance(side) / len(side) for side in values]
    shared = [
        statistics.mean(figure.shared_error for figure in side) for _, side in signed
    ]
    error = math.sqrt(sum(parts) + sum(each**2 for each in shared))
    if error == 0:
        return mean, 0.0, float(mean + margin == 0)
    squares = [
        part**2 / (len(side) - 1) for part, side in zip(parts, values, strict=True)
    ]
    degrees = (
        sum(parts) ** 2 / sum(squares) if sum(squares) else min(map(len, values)) - 1
    )
    from scipy import stats

    p = 2 * float(stats.t.sf(abs(mean + margin) / error, degrees))
    return mean, t_quantile(degrees) * error, p


def combined(signs: list[int], figures: tuple[Figure | None, ...]) -> Figure | None:
    """The signed sum of figures of one run."""
    if not all(figures):
        return None
    value = sum(
        sign * figure.value for sign, figure in zip(signs, figures, strict=True)
    )
    return Figure(value, math.hypot(*(figure.shared_error for figure in figures)))


def with_verdicts(claims: list[dict]) -> None:
    """Give all primary claims of an experiment their verdicts, by Holm's step-down procedure. One
    that its runs cannot decide (plateau, unfinished runs) counts as a test that failed."""
    p_of = {
        n: 1.0 if c["verdict"] or c["p"] is None else c["p"]
        for n, c in enumerate(claims)
    }
    adjusted = 0.0
    for rank, n in enumerate(sorted(p_of, key=p_of.get)):
        adjusted = max(adjusted, min(1.0, (len(claims) - rank) * p_of[n]))
        claim = claims[n]
        claim["p_holm"] = adjusted
        if not claim["verdict"]:
            holds = claim["mean"] + claim["margin"] > 0
            claim["verdict"] = (
                (SUPPORTED if holds else OPPOSITE) if adjusted < LEVEL else UNDECIDED
            )


def on_the_plateau(side: str, kind: str, entries: Entries) -> bool:
    """Whether a side is a loss that in some run is near the unigram entropy of the text that it is
    of: such a run has learned frequencies only, and says nothing about the claim."""
    name, of, share = parts_of(side, kind)
    for row in () if is_number(name) else entries[name]["runs"]:
        tested = of.startswith("eval_")
        measured = row.get("measured", {})
        figure = figure_of(row, of, share)
        unigram = measured.get(
            "unigram_test" if tested else "unigram", measured.get("unigram")
        )
        is_loss = tested or of.removeprefix("lowest_") in row["losses"]
        if is_loss and figure and unigram and figure.value > unigram[0] - NOTHING:
            return True
    return False


def ratio_of(ratio: Ratio, kind: str, entries: Entries) -> dict | None:
    """A ratio for each seed; None if a run config is missing."""
    sides = sides_of((*ratio.of, *ratio.to), kind, entries)
    if sides is None:
        return None
    seeds = [figures for figures in zip(*sides, strict=True) if all(figures)]
    parts = [(a.value - b.value, c.value - d.value) for a, b, c, d in seeds]
    values = [part / of for part, of in parts if of > 0]
    return {"says": ratio.says, "values": values if len(values) == len(parts) else []}


def sides_of(sides: Sequence[str], kind: str, entries: Entries) -> list | None:
    """For each side a list of its figures, one a seed; None if a run config is missing."""
    split = [parts_of(side, kind) for side in sides]
    names = [name for name, *_ in split if not is_number(name)]
    if not entries.keys() >= set(names):
        return None
    seeds = min(len(entries[name]["runs"]) for name in names)
    return [
        [Figure(float(name))] * seeds
        if is_number(name)
        else [figure_of(row, of, share) for row in entries[name]["runs"][:seeds]]
        for name, of, share in split
    ]


def parts_of(side: str, kind: str) -> tuple[str, str, float]:
    """The run config (or number), KIND and SHARE of a side."""
    name, kind_of_side, share = re.fullmatch(r"([^:]*):?([^@]*)@?(.*)", side).groups()
    return name, kind_of_side or kind, float(share or 1)


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+", text) is not None
