"""What runs say of a claim: differences between arms, seed by seed, and the verdict, which nobody
writes by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

PLATEAU = "unresolved (plateau)"
UNFINISHED = "unresolved (a run did not end)"
UNMEASURED = "not measured"
NOTHING = 0.1  # nats a token: what is learned of frequencies alone moves less than this
Arms = dict[str, dict]
"""By name: {"runs": [one for each seed]}, as `experiments.suite.train` makes them."""


@dataclass(frozen=True)
class Claim:
    """That one figure is lower than another. A side is ARM, ARM:KIND, ARM:KIND@SHARE or a number.
    KIND is a loss of metrics.jsonl, as in val_loss_KIND, or a figure of a measure; by default that
    of the experiment. SHARE is that of the tokens after which a loss is looked at; by default 1."""

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
    differences = [high.value - low.value + claim.margin for low, high in seeds]
    monte_carlo = math.hypot(*map(monte_carlo_error, zip(*seeds, strict=True)))
    found = verdict(differences, monte_carlo)
    if not seeds:
        found["verdict"] = UNMEASURED
    elif len(seeds) < len(sides[0]):
        found["verdict"] = UNFINISHED  # those that ended may be the lucky ones
    elif on_the_plateau(claim, kind, arms):
        found["verdict"] = PLATEAU
    of_chance = {"differences": differences, "monte_carlo_error": monte_carlo}
    return {"says": claim.says, "margin": claim.margin, **of_chance, **found}


def on_the_plateau(claim: Claim, kind: str, arms: Arms) -> bool:
    """Whether both sides are losses from which no more has been learned than how frequent single
    tokens are. They tell of that, whatever the claim is about."""
    sides = [parts_of(side, kind) for side in (claim.lower, claim.higher)]
    if claim.margin or any(is_number(arm) for arm, *_ in sides):
        return False
    of_seeds = [
        (figure_of(run, of, share), run["measured"]["unigram"][0])
        for arm, of, share in sides
        for run in arms[arm]["runs"]
        if is_loss(run, of) and "unigram" in run.get("measured", {})
    ]
    return bool(of_seeds) and all(
        loss is not None and loss.value > unigram - NOTHING for loss, unigram in of_seeds
    )


def is_loss(run: dict, kind: str) -> bool:
    """Whether a figure is a loss of the text that a run is validated on."""
    return kind in run["losses"] or kind.startswith("eval_")


def ratio_of(ratio: Ratio, kind: str, arms: Arms) -> dict | None:
    """A ratio, one a seed; None where its arms are not all there."""
    sides = sides_of((*ratio.of, *ratio.to), kind, arms)
    if sides is None:
        return None
    seeds = [values for values in zip(*sides, strict=True) if all(values)]
    parts = [(a.value - b.value, c.value - d.value) for a, b, c, d in seeds]
    whole = all(of > 0 for _, of in parts)
    return {"says": ratio.says, "values": [part / of for part, of in parts] if whole else []}


@dataclass(frozen=True)
class Figure:
    """Of one run."""

    value: float
    error: float | None = None
    """Of what it was estimated from, if it is known."""
    same_draws: bool = False
    """Whether runs of all seeds were measured with the same draws, as those of measures are."""


def monte_carlo_error(figures: tuple[Figure, ...]) -> float:
    """That of the mean of one side, a figure for each seed. Draws that all seeds share do not
    average out."""
    errors = [figure.error or 0.0 for figure in figures]
    if any(figure.same_draws for figure in figures):
        return statistics.mean(errors)
    return math.hypot(*errors) / len(errors)


def parts_of(side: str, kind: str) -> tuple[str, str, float]:
    """The arm (or number), KIND and SHARE of a side."""
    arm, _, named = side.partition(":")
    named, _, share = named.partition("@")
    return arm, named or kind, float(share or 1)


def sides_of(sides: tuple[str, ...], kind: str, arms: Arms) -> list[list[Figure | None]] | None:
    """The figures of each side, one a seed; None where an arm is missing."""
    split = [parts_of(side, kind) for side in sides]
    names = [arm for arm, *_ in split if not is_number(arm)]
    if any(name not in arms for name in names):
        return None
    seeds = min((len(arms[name]["runs"]) for name in names), default=0)
    return [
        [Figure(float(arm))] * seeds
        if is_number(arm)
        else [figure_of(run, of, share) for run in arms[arm]["runs"][:seeds]]
        for arm, of, share in split
    ]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def figure_of(run: dict, kind: str, share: float = 1.0) -> Figure | None:
    """What was measured of a run at its end; or its loss of this kind after a share of its tokens,
    at the first evaluation from there on. None of one that did not end or has no such figure."""
    if share == 1 and kind in run.get("measured", {}):
        return Figure(*run["measured"][kind], same_draws=True)
    if not run["tokens"] or kind not in run["losses"]:
        return None
    wanted = share * run["tokens"][-1]
    place = next(i for i, tokens in enumerate(run["tokens"]) if tokens >= wanted)
    errors = run["losses"].get(f"{kind}_error")
    return Figure(run["losses"][kind][place], errors[place] if errors else None)


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
