"""Tuning: which value of what an arm leaves open is best, by runs with seed 0. All arms of
speedrun.py, findings.py and tasks.py are tuned in this way."""

from __future__ import annotations

import math
from collections.abc import Callable

from runtime.errors import UserError
from studies.experiments.arms import Arm

Values = dict[str, float]
"""Dotted key of a configuration, and a value: one key, or none where nothing is left open."""


def choices_of(arm: Arm) -> list[Values]:
    """What an arm may be tuned to, in the order of the values under its `tune`."""
    if len(arm.tune) > 1:
        raise UserError(f"{arm.name} tunes {', '.join(arm.tune)}: choose one of them")
    for key, values in arm.tune.items():
        return [{key: value} for value in values]
    return [{}]


def search(
    choices: list[Values],
    loss_of: Callable[[Values], float],
    known: Callable[[Values], bool] = lambda values: False,
) -> list[tuple[Values, float]]:
    """Try the middle one of the choices and both of its neighbours, then neighbours of the best
    one, until both of its own have been tried. Returns all that were tried, in their order, with
    their losses; nothing where there is one choice only.

    Both, since where the loss hardly changes, chance would lead away from values that are better.
    known: those whose losses are at hand already, which count as tried."""
    if len(choices) == 1:
        return []
    at_hand = [place for place, values in enumerate(choices) if known(values)]
    middle = len(choices) // 2
    tried = {place: loss_of(choices[place]) for place in at_hand or [middle]}
    while True:
        best = min(tried, key=tried.get)
        wanted = (middle, middle + 1, middle - 1, best + 1, best - 1)
        left = [n for n in wanted if 0 <= n < len(choices) and n not in tried]
        if not left:
            return [(choices[place], tried[place]) for place in sorted(tried)]
        tried[left[0]] = loss_of(choices[left[0]])


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
        raise UserError(f"no run of {arm.name} ended: lower the values that it tunes")
    return values


def at_edge(choices: list[Values], tuned: Values) -> bool:
    """Whether what was best is the first or the last choice: beyond it might be better."""
    return len(choices) > 1 and tuned in (choices[0], choices[-1])
