"""What runs say of a claim: differences between arms, seed by seed, and the verdict, which nobody
writes by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

PLATEAU = "unresolved (plateau)"
NOTHING = 0.1  # nats a token: what is learned of frequencies alone moves less than this
Arms = dict[str, dict]
"""By name: {"runs": [one for each seed]}, as `experiments.suite.train` makes them."""


@dataclass(frozen=True)
class Claim:
    """That one figure is lower than another. A side is ARM, ARM:KIND or a number. KIND is a loss of
    metrics.jsonl, as in val_loss_KIND, or a figure of a measure; by default that of the
    experiment."""

    says: str
    lower: str
    higher: str
    margin: float = 0.0
    """The lower one may be larger by less than this: of what is expected to be alike."""


@dataclass(frozen=True)
class Ratio:
    """Of two differences, each of two sides as those of a claim: (a - b) / (c - d). Where the
    latter is not above 0 with every seed, there is nothing of which to take a share."""

    says: str
    of: tuple[str, str]
    to: tuple[str, str]


def judged(claim: Claim, kind: str, arms: Arms) -> dict | None:
    """A claim and what its arms, those of a recipe, say of it; None where they are not all there.

    The error of a mean difference has two sources: seeds, and what one run's figures were estimated
    from, such as draws of orders (Monte Carlo)."""
    sides = sides_of((claim.lower, claim.higher), kind, arms)
    if sides is None:
        return None
    seeds = [(low, high) for low, high in zip(*sides, strict=True) if low and high]
    differences = [high[0] - low[0] + claim.margin for low, high in seeds]
    errors = [error or 0.0 for pair in seeds for _, error in pair]
    monte_carlo = math.sqrt(sum(e * e for e in errors)) / max(1, len(seeds))
    return {
        "says": claim.says,
        "differences": differences,
        "monte_carlo_error": monte_carlo,
        **verdict(differences, monte_carlo),
        **({"verdict": PLATEAU} if on_the_plateau(claim, kind, arms) else {}),
    }


def on_the_plateau(claim: Claim, kind: str, arms: Arms) -> bool:
    """Whether both sides are losses from which no more has been learned than how frequent single
    tokens are. They tell of that, whatever the claim is about."""
    names = [side.partition(":")[0] for side in (claim.lower, claim.higher)]
    if claim.margin or any(is_number(name) for name in names):
        return False
    kinds = [side.partition(":")[2] or kind for side in (claim.lower, claim.higher)]
    of_seeds = [
        (run["losses"][kind][-1], run["measured"]["unigram"][0])
        for name, kind in zip(names, kinds, strict=True)
        for run in arms[name]["runs"]
        if run["losses"].get(kind) and "unigram" in run.get("measured", {})
    ]
    return bool(of_seeds) and all(loss > unigram - NOTHING for loss, unigram in of_seeds)


def ratio_of(ratio: Ratio, kind: str, arms: Arms) -> dict | None:
    """A ratio, one a seed; None where its arms are not all there."""
    sides = sides_of((*ratio.of, *ratio.to), kind, arms)
    if sides is None:
        return None
    seeds = [values for values in zip(*sides, strict=True) if all(values)]
    parts = [(a - b, c - d) for (a, _), (b, _), (c, _), (d, _) in seeds]
    whole = all(of > 0 for _, of in parts)
    return {"says": ratio.says, "values": [part / of for part, of in parts] if whole else []}


Figure = tuple[float, float | None]
"""A value and its error, if it is known."""


def sides_of(sides: tuple[str, ...], kind: str, arms: Arms) -> list[list[Figure | None]] | None:
    """The figures of each side, one a seed; None where an arm is missing."""
    split = [side.partition(":") for side in sides]
    names = [arm for arm, *_ in split if not is_number(arm)]
    if any(name not in arms for name in names):
        return None
    seeds = min((len(arms[name]["runs"]) for name in names), default=0)
    return [
        [(float(arm), None)] * seeds
        if is_number(arm)
        else [figure_of(run, of or kind) for run in arms[arm]["runs"][:seeds]]
        for arm, _, of in split
    ]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def figure_of(run: dict, kind: str) -> Figure | None:
    """What was measured of a run, or its last loss of this kind; None of one that did not end or
    has no such figure."""
    if kind in run.get("measured", {}):
        value, error = run["measured"][kind]
        return value, error
    if not run["tokens"] or kind not in run["losses"]:
        return None
    errors = run["losses"].get(f"{kind}_error")
    return run["losses"][kind][-1], errors[-1] if errors else None


def verdict(differences: list[float], monte_carlo: float) -> dict:
    """Whether paired differences, one a seed, are as claimed: above 0.

    reproduced: all of them are, and their mean is more than two standard errors (of seeds and Monte
    Carlo together) from 0. reversed: the mirror image. Else unresolved."""
    if len(differences) < 2:
        return {"mean": differences[0] if differences else None, "verdict": "unresolved"}
    mean = statistics.mean(differences)
    of_seeds = statistics.stdev(differences) / math.sqrt(len(differences))
    error = math.sqrt(of_seeds**2 + monte_carlo**2)
    word = "unresolved"
    if abs(mean) > 2 * error:
        if all(d > 0 for d in differences):
            word = "reproduced"
        elif all(d < 0 for d in differences):
            word = "reversed"
    return {"mean": mean, "error": error, "verdict": word}
