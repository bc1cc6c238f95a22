"""Values that options, config keys and files may have: declared as types, and checked here."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import reprlib
import stat
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Interval, Le, Lt, Predicate

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


# ---- files of settings ----

MAX_BYTES = 64 << 20  # of a file of settings: state.json has a tenth of a kilobyte for each tensor
MAX_DEPTH = 50  # of tables within tables
MAX_VALUES = 1_000_000  # in lists and tables, counted as often as they occur

T = TypeVar("T")


class FileError(ValueError):
    """A file that cannot be used; the message names it and says why and what to do."""


def is_file_name(name: str) -> bool:
    """Whether a name stays in its folder."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


FileName = Annotated[str, Predicate(is_file_name)]


def schema(table: type[T]) -> type[T]:
    """Let a TypedDict keep the keys that it does not declare, for files of later versions."""
    table.__pydantic_config__ = {"extra": "allow"}
    return table


# ---- reading -------------------------------------------------------------------------------------


def read_json(path: Path, shape: type[T], advice: str) -> T:
    """The contents of a JSON file of this type. advice: what to do where they are not."""
    with damaged(path, advice):
        text = read_bounded(path).removeprefix(codecs.BOM_UTF8)
        return from_json(text, shape, str(path), advice)


def read_results(path: Path, advice: str) -> Any:
    """The contents of a JSON file that a script of this project wrote, and reads back; whoever uses
    them does so within `damaged`."""
    with damaged(path, advice):
        return json.loads(read_bounded(path))


def read_toml(path: Path) -> dict:
    """The values of a TOML file, for `from_values`."""
    try:
        values = tomllib.loads(read_bounded(path).decode("utf-8-sig"))
    except FileError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: a number of absurd length, too
        raise FileError(f"{path} is not a TOML file: {error}") from None
    if too_deep(values):
        raise FileError(f"{path} is not a TOML file that anybody wrote: it is nested too deep")
    return values


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file of settings, which is a regular one and not larger than that."""
    # Without O_NONBLOCK, a FIFO would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder; name a file")
            raise FileError(f"{path} is no regular file; copy what it holds to one")
        data = file.read(most + 1)
    if len(data) > most:
        raise FileError(f"{path} has more than {most >> 20} MB: it is no file of settings")
    return data


@contextlib.contextmanager
def damaged(path: Path | str, advice: str) -> Iterator[None]:
    """Turn what escapes while a file is read into one line that says so.

    Errors that name the file already, of the disk and of memory pass."""
    try:
        yield
    except (FileError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FileError(f"{path} is damaged: {reason}; {advice}") from error


def too_deep(value: Any) -> bool:
    """Whether lists and tables lie within one another deeper than anybody writes them, or hold more
    than anybody writes: a file of a few lines can name the same list in many places. What is not
    too deep can be walked by functions that call themselves."""
    level, count = [value] if isinstance(value, dict | list | tuple) else [], 0
    for _ in range(MAX_DEPTH):
        below = []
        for values in level:
            within = values.values() if isinstance(values, dict) else values
            count += len(within)
            if count > MAX_VALUES:
                return True
            below += [v for v in within if isinstance(v, dict | list | tuple)]
        level = below
        if not level:
            return False
    return True


# ---- checking ------------------------------------------------------------------------------------


def from_values(values: Any, shape: type[T], source: str, advice: str = "") -> T:
    """Plain values as what a type declares; a dataclass is made, and refuses keys it does not have.

    source: what messages call the file. Raises FileError."""
    if too_deep(values):
        raise FileError(f"{source}: it is nested too deep, or too large, for settings")
    # As JSON, in which lists may become tuples, and tables dataclasses, but nothing else becomes
    # what it is not. A date, which JSON does not have, becomes what nothing asks for.
    with damaged(source, advice):
        text = json.dumps(values, default=lambda value: [str(value)])
    return from_json(text, shape, source, advice)


def from_json(text: str | bytes, shape: type[T], source: str, advice: str = "") -> T:
    """`from_values` of JSON."""
    from pydantic import ValidationError  # a tenth of a second that no script should always wait

    try:
        return _validator(shape).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        end = f"; {advice}" if advice else ""
        raise FileError(f"{source}: {_in_words(first, shape)}{end}") from None


@functools.cache
def _validator(shape: type):
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _in_words(error: dict, shape: type) -> str:
    """What is wrong with which key, in the words that options have for it."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    name, kind, value = ".".join(path), error["type"], error["input"]
    match kind:
        case "json_invalid":
            return f"this is not JSON ({error['ctx']['error']})"
        case "value_error":  # of a dataclass's own checks
            return str(error["ctx"]["error"])
        case "missing":
            near = difflib.get_close_matches(path[-1], value, n=1)
            return f"it lacks {name}" + (f"; is {near[0]!r} meant for it?" if near else "")
        case "unexpected_keyword_argument":
            return f"unknown key {name!r}{nearest_key(path, shape)}"
        case "dataclass_type" | "dict_type" | "dataclass_exact_type":
            what = f"{name} is {short(value)}, but it" if name else f"it is {short(value)}, but"
            of_list = error["loc"] and isinstance(error["loc"][-1], int)
            listed = f": write [[{name}]]" if of_list else ""
            return f"{what} must be a table of keys{listed}"
    hint = _hint_at(error["loc"], shape)
    if kind in ("tuple_type", "list_type") and dataclasses.is_dataclass(get_args(_base(hint))[0]):
        return f"{name} is {short(value)}, but it must be a list of tables: write [[{name}]]"
    if _base(hint) is float and type(value) is int:
        value = float(value)
    try:
        check_value(value, hint, name)
    except ValueError as advice:
        return str(advice)
    if kind == "predicate_failed":
        return f"{name} is {short(value)}; give a name without a path"
    return f"{name} is {short(value)}, but it {error['msg'].removeprefix('Input ')}"


def short(value: Any, most: int = 60) -> str:
    # Of a list within lists only the beginning: all of it may be larger than memory.
    text = reprlib.repr(value) if isinstance(value, dict | list | tuple | set) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _hint_at(path: tuple, shape: Any) -> Any:
    """The type that is declared at a place: keys of tables, numbers in lists."""
    for part in path:
        base, arguments = _base(shape), get_args(_base(shape))
        if isinstance(part, int):
            shape = arguments[0]
        elif get_origin(base) is dict:
            shape = arguments[1]
        else:
            shape = get_type_hints(base, include_extras=True).get(part, Any)
    return shape


def _base(hint: Any) -> Any:
    """A type without what is said about it: no bounds, not that it may be left out or None."""
    options = [option for option in get_args(hint) if option is not NoneType]
    wrapped = get_origin(hint) in (Annotated, NotRequired) or (
        get_origin(hint) in (Union, UnionType) and len(options) == 1
    )
    return _base(options[0]) if wrapped else hint


# ---- keys ----------------------------------------------------------------------------------------


def keys_of(table: type, prefix: str = "") -> list[str]:
    """Every dotted key of nested dataclasses."""
    keys = []
    for field, hint in get_type_hints(table).items():
        inner = _base(hint)
        inner = get_args(inner)[0] if get_origin(inner) is tuple else inner
        if dataclasses.is_dataclass(inner):
            keys += keys_of(inner, f"{prefix}{field}.")
        else:
            keys.append(prefix + field)
    return keys


def nearest_key(path: list[str], table: type) -> str:
    """What to write instead of an unknown key: one that is almost the same in this table, else the
    key of this name in another, else the most alike in this table, else the most alike of all, else
    a list of what there is."""
    *tables, key = path
    keys, prefix = keys_of(table), "".join(f"{name}." for name in tables)
    here = [name.removeprefix(prefix) for name in keys if name.startswith(prefix)]
    here = list(dict.fromkeys(prefix + name.split(".")[0] for name in here))
    near = [name for name in here if difflib.get_close_matches(key, [name.split(".")[-1]], 1, 0.8)]
    near = near or [name for name in keys if name.split(".")[-1] == key]
    near = near or difflib.get_close_matches(prefix + key, here, 1)
    near = near or difflib.get_close_matches(key, keys, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(here)}"
