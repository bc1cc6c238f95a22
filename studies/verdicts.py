"""Verdicts on claims, computed from differences between run configs, paired by seed."""

import math
import re
import statistics
from dataclasses import dataclass, field

PLATEAU = "unresolved (plateau)"
UNFINISHED = "unresolved (a run did not end)"
UNMEASURED = "not measured"
NOTHING = 0.1  # nats per token: a loss this close to the unigram entropy is on its plateau

Entries = dict[str, dict]
"""By run config: {"runs": [the result of each seed]}, as `runner.train` returns them."""


@dataclass(frozen=True)
class Claim:
    """One figure is lower than another. A side is RUN_CONFIG, RUN_CONFIG:KIND,
    RUN_CONFIG:KIND@SHARE or a number. KIND is a loss or a measured figure, by default that of the
    experiment; SHARE is the share of the tokens after which a loss is read, by default 1."""

    says: str
    lower: str
    higher: str
    margin: float = 0.0  # `lower` may be larger by less than this: two figures are alike
    primary: list[str] = field(default_factory=list)  # recipes under which it gets a verdict


@dataclass(frozen=True)
class Ratio:
    """(a - b) / (c - d) of four sides, as those of a claim; none unless c > d with every seed."""

    says: str
    of: tuple[str, str]
    to: tuple[str, str]


@dataclass(frozen=True)
class Figure:
    """Of one run."""

    value: float
    error: float | None = None  # standard error of the Monte Carlo estimate, if known
    shared_samples: bool = False  # runs of all seeds were measured with the same samples


def figure_of(row: dict, kind: str, share: float = 1.0) -> Figure | None:
    """A measured figure of a run, or else its loss at the first evaluation after a share of its
    tokens. None if the run did not end or has no such figure."""
    if share == 1 and kind in row.get("measured", {}):
        return Figure(*row["measured"][kind], shared_samples=True)
    if not row["tokens"] or kind not in row["losses"]:
        return None
    wanted = share * row["tokens"][-1]
    place = next(i for i, tokens in enumerate(row["tokens"]) if tokens >= wanted)
    errors = row["losses"].get(f"{kind}_error")
    return Figure(row["losses"][kind][place], errors[place] if errors else None)


def judged(claim: Claim, kind: str, entries: Entries) -> dict | None:
    """A claim and its verdict; None if a run config is missing. The error of a mean difference has
    two sources: seeds, and the Monte Carlo estimates."""
    sides = sides_of((claim.lower, claim.higher), kind, entries)
    if sides is None:
        return None
    seeds = [(low, high) for low, high in zip(*sides, strict=True) if low and high]
    differences = [high.value - low.value + claim.margin for low, high in seeds]
    monte_carlo = math.hypot(*map(monte_carlo_error, zip(*seeds, strict=True)))
    found = verdict(differences, monte_carlo)
    if not seeds:
        found["verdict"] = UNMEASURED
    elif len(seeds) < len(sides[0]):
        found["verdict"] = UNFINISHED  # the runs that ended may be the lucky ones
    elif on_the_plateau(claim, kind, entries):
        found["verdict"] = PLATEAU
    found |= {"differences": differences, "monte_carlo_error": monte_carlo}
    return {"says": claim.says, "margin": claim.margin} | found


def verdict(differences: list[float], monte_carlo: float) -> dict:
    """reproduced: all paired differences are above 0, and their mean by more than two standard
    errors (seeds and Monte Carlo together). reversed: the mirror image. Otherwise unresolved."""
    if len(differences) < 2:
        return {"mean": differences[0] if differences else None, "verdict": "unresolved"}
    mean = statistics.mean(differences)
    over_seeds = statistics.stdev(differences) / math.sqrt(len(differences))
    error = math.sqrt(over_seeds**2 + monte_carlo**2)
    clear = abs(mean) > 2 * error and all(d * mean > 0 for d in differences)
    word = "unresolved" if not clear else "reproduced" if mean > 0 else "reversed"
    return {"mean": mean, "error": error, "verdict": word}


def on_the_plateau(claim: Claim, kind: str, entries: Entries) -> bool:
    """Whether both sides are losses near the unigram entropy: such runs have learned frequencies
    only, and say nothing about the claim."""
    sides = [parts_of(side, kind) for side in (claim.lower, claim.higher)]
    if claim.margin or any(is_number(name) for name, *_ in sides):
        return False
    losses = [
        (figure_of(row, of, share), row["measured"]["unigram"][0])
        for name, of, share in sides
        for row in entries[name]["runs"]
        if (of in row["losses"] or of.startswith("eval_")) and "unigram" in row.get("measured", {})
    ]
    near = [loss is not None and loss.value > unigram - NOTHING for loss, unigram in losses]
    return bool(near) and all(near)


def ratio_of(ratio: Ratio, kind: str, entries: Entries) -> dict | None:
    """A ratio for each seed; None if a run config is missing."""
    sides = sides_of((*ratio.of, *ratio.to), kind, entries)
    if sides is None:
        return None
    seeds = [figures for figures in zip(*sides, strict=True) if all(figures)]
    parts = [(a.value - b.value, c.value - d.value) for a, b, c, d in seeds]
    values = [part / of for part, of in parts if of > 0]
    return {"says": ratio.says, "values": values if len(values) == len(parts) else []}


def monte_carlo_error(figures: tuple[Figure, ...]) -> float:
    """Of the mean over seeds. Samples that all seeds share do not average out."""
    errors = [figure.error or 0.0 for figure in figures]
    if any(figure.shared_samples for figure in figures):
        return statistics.mean(errors)
    return math.hypot(*errors) / len(errors)


def sides_of(sides: tuple[str, ...], kind: str, entries: Entries) -> list | None:
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
