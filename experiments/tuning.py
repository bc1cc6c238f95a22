"""Tuning: which value of what an arm leaves open is best, by runs with seed 0. All arms of
speedrun.py, findings.py and tasks.py are tuned in this way."""

from __future__ import annotations

import math
from collections.abc import Callable

from experiments.arms import Arm

Values = dict[str, float]
"""Dotted key of a configuration, and a value: one key, or none where nothing is left open."""


def choices_of(arm: Arm) -> list[Values]:
    """What an arm may be tuned to, in the order of the values under its `tune`."""
    if len(arm.tune) > 1:
        raise ValueError(f"{arm.name} tunes {', '.join(arm.tune)}: choose one of them")
    for key, values in arm.tune.items():
        return [{key: value} for value in values]
    return [{}]


def search(choices: list[Values], loss_of: Callable[[Values], float]) -> list[tuple[Values, float]]:
    """Those that were tried, in their order, and their losses: from the middle on to larger values
    for as long as the loss falls; where it does not, to smaller ones in the same way. Where there
    is one choice, nothing is tried."""
    if len(choices) == 1:
        return []
    middle = len(choices) // 2
    tried = {middle: loss_of(choices[middle])}
    for way in (range(middle + 1, len(choices)), range(middle - 1, -1, -1)):
        for place in way:
            lowest = min(tried.values())
            tried[place] = loss_of(choices[place])
            if tried[place] >= lowest:
                break
        if min(tried, key=tried.get) != middle:
            break
    return [(choices[place], tried[place]) for place in sorted(tried)]


def middle_of(arm: Arm) -> Values:
    """What an arm has that is not tuned."""
    choices = choices_of(arm)
    return choices[len(choices) // 2]


def best_of(arm: Arm, tried: list[tuple[Values, float]]) -> Values:
    """What an arm is tuned to: the values whose run ended lowest; where none were tried those in
    the middle. Raises ValueError if no run ended.

    tried: what `search` has found; a loss is infinite where a run did not end."""
    if not tried:
        return middle_of(arm)
    values, loss = min(tried, key=lambda of_one: of_one[1])
    if loss == math.inf:
        raise ValueError(f"no run of {arm.name} ended: lower the values that it tunes")
    return values


def at_edge(arm: Arm, tuned: Values) -> bool:
    """Whether what was best might be better still beyond what may be tried."""
    choices = choices_of(arm)
    return len(choices) > 1 and tuned in (choices[0], choices[-1])
