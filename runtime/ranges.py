"""What values an option or a key of a config may have, declared once, beside its type.

    @dataclass(frozen=True)
    class Arguments:
        num_samples: Count = 4
        mode: Literal["mdm", "l2r"] = "mdm"

        def __post_init__(self):
            check_values(self)  # "--num-samples is 0; give a number at least 1 and at most 2**31"

The bounds are those of the package annotated_types, which pydantic and hypothesis understand, too:
schemas.py reads files by the same types.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

from runtime.errors import UserError

LARGEST = 2**31  # of a count: no list or tensor of ours is longer

Count = Annotated[int, Interval(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Interval(ge=0, le=LARGEST)]
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
Probability = Annotated[float, Interval(ge=0, le=1)]
Ratio = Probability  # the same numbers, where nothing is left to chance
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
Amount = Annotated[float, Interval(ge=0, lt=math.inf)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]  # a momentum, a decay, a share to drop

# What values of a type are called, and the types of these values: a bool is an int to isinstance.
KINDS = {
    int: ("an integer", int),
    float: ("a number", int | float),
    bool: ("true or false", bool),
    str: ("a string", str),
}


class Table:
    """Base of dataclasses that are tables of a file: what schemas.py makes them of has no key that
    they do not declare."""

    __pydantic_config__ = {"extra": "forbid"}


def flag(name: str) -> str:
    """The option of a field, as it is written on the command line: num_samples -> --num-samples."""
    return "--" + name.replace("_", "-")


def check_values(values: Any, name: Callable[[str], str] = flag) -> None:
    """Raise ValueError if a field of a dataclass is outside of what its type declares.

    name: what a user calls a field, for the message.
    """
    for field, hint in _declared(type(values)).items():
        check_value(getattr(values, field), hint, name(field))


@functools.cache
def _declared(table: type) -> dict[str, Any]:
    """The fields of a dataclass and their types, with all that these declare."""
    hints = get_type_hints(table, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(table)}


def check_value(value: Any, hint: Any, name: str) -> None:
    """Raise ValueError if the value is outside of the Literals and bounds that a type declares."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in KINDS:
        kind, allowed = KINDS[hint]
        if not isinstance(value, allowed) or isinstance(value, bool) and hint is not bool:
            raise UserError(f"{name} is {value!r}, but it must be {kind}")
    elif origin in (Union, types.UnionType):  # X | None
        if value is not None:
            for option in (option for option in arguments if option is not type(None)):
                check_value(value, option, name)
    elif origin is tuple:  # tuple[X, ...]
        if not isinstance(value, list | tuple):
            raise UserError(f"{name} is {value!r}, but it must be a list")
        for item in value:
            check_value(item, arguments[0], name)
    elif origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(repr, arguments))
            near = difflib.get_close_matches(str(value), map(str, arguments), n=1)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name} is {value!r}; it must be one of {choices}{guess}")
    elif origin is Annotated:
        check_value(value, arguments[0], name)
        bounds = [bound for item in arguments[1:] for bound in _bounds(item)]
        if not all(_within(value, bound) for bound in bounds):
            raise UserError(f"{name} is {value}; {_advice(bounds)}")


def _bounds(metadata: Any) -> list:
    """The single bounds of an Interval, which is a group of them, or of a bound alone."""
    if isinstance(metadata, Interval):
        return [bound for item in metadata for bound in _bounds(item)]
    return [metadata] if isinstance(metadata, Ge | Gt | Le | Lt) else []


def _within(value: float, bound: Ge | Gt | Le | Lt) -> bool:
    """Whether a value keeps a bound. NaN keeps none."""
    match bound:
        case Ge(limit):
            return value >= limit
        case Gt(limit):
            return value > limit
        case Le(limit):
            return value <= limit
        case Lt(limit):
            return value < limit


def _advice(bounds: list) -> str:
    """What to give instead, in words."""
    words = []
    for bound in bounds:
        match bound:
            case Ge(limit):
                words.append(f"at least {limit}")
            case Gt(limit):
                words.append(f"above {limit}")
            case Le(limit):
                words.append(f"at most {_large(limit)}")
            case Lt(limit):
                words.append("finite" if limit == math.inf else f"below {_large(limit)}")
    return f"give a number {' and '.join(words)}"


def _large(limit: float) -> str:
    """A power of two above a thousand as 2**n."""
    power = isinstance(limit, int) and limit > 1000 and limit & (limit - 1) == 0
    return f"2**{limit.bit_length() - 1}" if power else f"{limit}"
