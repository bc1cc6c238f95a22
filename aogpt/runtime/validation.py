"""Plain values, of options, JSON and TOML, as values of the types that a dataclass or a
TypedDict declares."""

import codecs
import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
import reprlib
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Interval, Predicate

from .errors import UserError

LARGEST = 2**31  # of a count: no list or tensor of ours is longer
Count = Annotated[int, Interval(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Interval(ge=0, le=LARGEST)]
Seed = Annotated[int, Interval(ge=0, lt=2**63)]
Probability = Annotated[float, Interval(ge=0, le=1)]  # or a share
Amount = Annotated[float, Interval(ge=0, lt=math.inf)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]  # a momentum, a decay, a dropout rate
FileName = Annotated[
    str, Predicate(lambda name: re.fullmatch(r"(?!\.{0,2}$)[^/\\\0]+", name))
]

MAX_BYTES = 64 << 20  # of a file of settings: state.json has 100 bytes for each tensor


class FileError(UserError):
    """A file that cannot be used. The message says which file, why, and what to do."""


def flag(name: str) -> str:
    """Return the option of this name: num_samples -> --num-samples."""
    return "--" + name.replace("_", "-")


def check_values(values: Any, name: Callable[[str], str] = flag) -> None:
    """Check every field of a dataclass as `check_value` does. name: returns the name
    that messages have for a field."""
    hints = _hints(type(values))
    for field in dataclasses.fields(values):
        check_value(getattr(values, field.name), hints[field.name], name(field.name))


def check_value(value: Any, hint: Any, name: str) -> None:
    """Raise UserError if a value is not what a type declares."""
    typed(value, hint, name)


def typed(value: Any, hint: Any, name: str = "") -> Any:
    """Return a plain value as a value of a type: tables become dataclasses, lists
    tuples, integers floats. Undeclared keys are errors in a dataclass; a TypedDict
    takes them, as files of later versions may have some. Raises UserError. name: the
    dotted key, for messages."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        inner, *limits = arguments
        value = typed(value, inner, name)
        for limit in limits:
            _check_limit(value, limit, name)
        return value
    if origin is NotRequired:
        return typed(value, arguments[0], name)
    if origin in (Union, types.UnionType):
        return _of_union(value, arguments, name)
    if origin is Literal:
        is_one = any(type(value) is type(a) and value == a for a in arguments)
        _require(is_one, name, value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (tuple, list):
        return _of_list(value, origin, arguments, name)
    if hint is list or origin is dict or hint is dict:
        kind = list if hint is list else dict
        _require(isinstance(value, kind), name, value, KINDS[kind])
        if not arguments:
            return value
        of_keys, of_values = arguments
        return {
            typed(key, of_keys, name): typed(item, of_values, _inside(name, key))
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return _of_table(value, hint, name)
    if hint is float and type(value) is int:
        return float(value)
    # `isinstance` would take true for 1.
    is_kind = isinstance(value, hint) and (type(value) is not bool or hint is bool)
    _require(is_kind, name, value, KINDS.get(hint, hint.__name__))
    return value


KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
    list: "a list",
    dict: "a table of keys",
    types.NoneType: "null",
}
BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def _require(condition: bool, name: str, value: Any, kind: str) -> None:
    """Raise UserError for a value that is not of this kind."""
    if not condition:
        raise UserError(
            f"{name or 'it'} is {reprlib.repr(value)}, but it must be {kind}"
        )


def _inside(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _check_limit(value: Any, limit: Any, name: str) -> None:
    """Raise UserError for a value beyond the bounds that a type is annotated with."""
    if isinstance(limit, Predicate):
        _require(limit.func(value), name, value, "a name without a path")
    words = []
    is_within = True
    for attribute, (word, holds) in BOUNDS.items():
        bound = getattr(limit, attribute, None)
        if bound is not None:
            words.append(f"{word} {bound}")
            is_within = is_within and holds(value, bound)  # NaN is beyond every bound
    _require(is_within, name, value, " and ".join(words))


def _of_union(value: Any, options: tuple, name: str) -> Any:
    """Return a value as one of several types, the first that it is of."""
    if value is None and types.NoneType in options:
        return None
    *first, last = (option for option in options if option is not types.NoneType)
    for option in first:
        with contextlib.suppress(UserError):
            return typed(value, option, name)
    return typed(value, last, name)


def _of_list(value: Any, kind: type, hints: tuple, name: str) -> Any:
    """Return a list or a tuple as a list or a tuple of these types."""
    _require(isinstance(value, list | tuple), name, value, "a list")
    if kind is tuple and hints[1:] != (...,):
        _require(len(value) == len(hints), name, value, f"a list of {len(hints)}")
        return tuple(
            typed(item, hint, name) for item, hint in zip(value, hints, strict=True)
        )
    return kind(typed(item, hints[0], name) for item in value)


def _of_table(value: Any, table: Any, name: str) -> Any:
    """Return a table as a dataclass, or check that it has the keys of a TypedDict."""
    is_class = dataclasses.is_dataclass(table)
    if is_class and isinstance(value, table):
        return value
    _require(isinstance(value, dict), name, value, "a table of keys")
    hints = _hints(table)
    result = dict(value)
    for key, item in value.items():
        if key in hints:
            result[key] = typed(item, hints[key], _inside(name, key))
        elif is_class:
            raise UserError(
                f"unknown key {_inside(name, key)!r}; the keys are {', '.join(hints)}"
            )
    if is_class:
        fields = dataclasses.fields(table)
        required = [f.name for f in fields if _is_required(f)]
    else:
        optional = (key for key in hints if get_origin(hints[key]) is NotRequired)
        required = sorted(table.__required_keys__ - set(optional))
    for key in required:
        if key not in result:
            raise UserError(f"it lacks {_inside(name, key)}")
    return table(**result)


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def from_values(values: Any, shape: Any, source: str, advice: str = "") -> Any:
    """Return plain values as an instance of a type, such as a dataclass. Raises
    FileError, which names their source."""
    try:
        return typed(values, shape)
    except UserError as problem:
        message = f"{source}: {problem}"
        if advice:
            message += f"; {advice}"
        raise FileError(message) from None


def parse_json(text: str | bytes) -> Any:
    """Return the value of a text in JSON. Raises ValueError or RecursionError (brackets
    nested too deep), also for an object with two equal keys, of which Python would drop
    the first."""
    return json.loads(text, object_pairs_hook=_object_of)


def _object_of(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in row if keys.count(key) > 1)
        raise ValueError(f"two keys {key!r} in one object")
    return row


def from_json(text: str | bytes, shape: Any, source: str, advice: str = "") -> Any:
    """Return JSON text as an instance of a type, such as a dataclass. Raises
    FileError."""
    try:
        values = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{source}: this is not JSON ({error})") from None
    return from_values(values, shape, source, advice)


def read_json(path: Path, shape: Any, advice: str) -> Any:
    """Return the contents of a JSON file of this type."""
    return from_json(
        read_bounded(path).removeprefix(codecs.BOM_UTF8), shape, str(path), advice
    )


def read_toml(path: Path) -> dict:
    """Return the values of a TOML file, for `from_values`."""
    try:
        return tomllib.loads(read_bounded(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # ValueError: also of a very long number
        raise FileError(f"{path} is not a TOML file: {error}") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises FileNotFoundError also for a FIFO, which
    would wait for a writer, a device or a folder."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file, or not a regular one")
    return path.open("rb")


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a file of at most MAX_BYTES. Raises FileError, and OSError
    for what is not a regular file."""
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise FileError(f"{path} has more than {MAX_BYTES >> 20} MB; name another file")
    return data


def expand_home(path: str | Path) -> Path:
    """Return the path with the home directory for "~"."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # the user has no home directory
        raise UserError(f"{path}: {error} Write the path without ~.") from None
