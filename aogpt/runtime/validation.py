"""Types for the values of options, config keys and files, checked by pydantic."""

import codecs
import contextlib
import dataclasses
import difflib
import functools
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Interval, Predicate
from typing_extensions import is_typeddict

from .errors import UserError, reason_of

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


class Table:
    """Base of dataclasses that are tables of a file: undeclared keys are errors."""

    __pydantic_config__ = {"extra": "forbid"}


def schema(table: type) -> type:
    """Let a TypedDict accept undeclared keys, which files of later versions may
    have."""
    table.__pydantic_config__ = {"extra": "allow"}
    return table


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
    try:
        _validator(hint).validate_python(value, strict=True)
    except ValueError as error:
        raise UserError(_problem(error, hint, name)) from None


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


@functools.cache
def _validator(shape: Any):
    from pydantic import TypeAdapter  # 0.1 s to import, not for --help

    return TypeAdapter(shape)


def from_values(
    values: Any,
    shape: Any,
    source: str,
    advice: str = "",
) -> Any:
    """Return plain values as an instance of a type, such as a dataclass. Raises
    FileError."""
    # Strict validation of JSON, unlike that of Python values, turns lists into tuples
    # and tables into dataclasses. Dates become lists, which no type accepts.
    with damaged(source, advice):
        text = json.dumps(values, default=lambda value: [str(value)])
    return from_json(text, shape, source, advice)


def from_json(
    text: str | bytes,
    shape: Any,
    source: str,
    advice: str = "",
) -> Any:
    """Return JSON text as an instance of a type, such as a dataclass. Raises
    FileError."""
    try:
        return _validator(shape).validate_json(text, strict=True)
    except ValueError as error:
        problem = _problem(error, shape)
        if advice:
            raise FileError(f"{source}: {problem}; {advice}") from None
        raise FileError(f"{source}: {problem}") from None


def read_json(path: Path, shape: Any, advice: str) -> Any:
    """Return the contents of a JSON file of this type."""
    return from_json(
        read_bounded(path).removeprefix(codecs.BOM_UTF8), shape, str(path), advice
    )


def read_toml(path: Path) -> dict:
    """Return the values of a TOML file, for `from_values`."""
    try:
        return tomllib.loads(read_bounded(path).decode("utf-8-sig"), parse_float=number)
    except (ValueError, RecursionError) as error:
        # ValueError: also of a very long number
        raise FileError(f"{path} is not a TOML file: {error}") from None


def number(text: str) -> float:
    """Return a number of TOML as a float, or as an int where it is whole and has an
    exponent, such as 1e3."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() else value


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes. Raises FileError."""
    # opening a FIFO would wait
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileError(f"{path} is not a regular file; copy its contents to one")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FileError(
            f"{path} has more than {most >> 20} MB: it is not a settings file; name "
            "another"
        )
    return data


def expand_home(path: str | Path) -> Path:
    """Return the path with the home directory for "~"."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # the user has no home directory
        raise UserError(f"{path}: {error} Write the path without ~.") from None


@contextlib.contextmanager
def damaged(path: Path | str, advice: str) -> Iterator[None]:
    """Turn an exception while a file is read into a FileError that names it."""
    try:
        yield
    except (FileError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FileError(f"{path} is damaged: {reason_of(error)}; {advice}") from error


OTHER_NAMES = {  # keys, and their names in other projects
    "lr": "learning_rate max_lr",
    "warmup_steps": "warmup_iters num_warmup_steps",
    "steps": "max_iters max_steps num_steps",
    "epochs": "num_epochs max_epochs num_train_epochs",
    "n_layer": "n_layers num_layers num_hidden_layers",
    "n_head": "n_heads num_heads num_attention_heads",
    "n_embd": "hidden_size d_model dim embed_dim",
    "block_size": "seq_len context_length max_seq_len",
    "folder": "dataset data_dir",
}
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table of keys",
    "dataclass": "a table of keys",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _problem(errors: Any, shape: Any, key: str = "") -> str:
    """Return pydantic's first error in one line: the key, the value and what it may
    be."""
    error = errors.errors(include_url=False)[0]
    key = key or ".".join(part for part in error["loc"] if isinstance(part, str))
    kind = error["type"]
    context = error.get("ctx", {})
    value = error["input"]
    if kind == "json_invalid":
        return f"this is not JSON ({context['error']})"
    if kind == "value_error":  # raised by a dataclass's own checks
        return str(context["error"])
    if kind == "missing":
        return f"it lacks {key}"
    if kind == "unexpected_keyword_argument":
        return f"unknown key {key!r}{nearest_key(key, shape)}"
    message = f"{key or 'it'} is {reprlib.repr(value)}"
    if kind == "predicate_failed":
        return f"{message}; give a name without a path"
    if kind == "literal_error":
        choices = re.findall("'(.*?)'", context["expected"])
        near = difflib.get_close_matches(str(value), choices, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        choices = ", ".join(map(repr, choices)) or context["expected"]
        return f"{message}; it must be one of {choices}{guess}"
    if context.keys() & BOUNDS:
        return f"{message}; give a number {_bounds(keys_of(shape).get(key, shape))}"
    wanted = KINDS.get(kind.split("_")[0])
    if any(name.startswith(f"{key}.") for name in keys_of(shape)):
        if wanted == "a list" or isinstance(error["loc"][-1], int):
            wanted = f"a list of tables: write [[{key}]]"
    if wanted is None:
        return f"{message}, but it {error['msg'].removeprefix('Input ')}"
    return f"{message}, but it must be {wanted}"


def _bounds(hint: Any) -> str:
    """Return the bounds that a type declares, in words."""
    words = []
    for item in get_args(hint):
        for name, word in BOUNDS.items():
            limit = getattr(item, name, None)
            if limit is not None:
                words.append(f"{word} {limit}")
        if inside := _bounds(item):
            words.append(inside)
    text = " and ".join(words).replace("below inf", "finite")
    return text.replace(f"{LARGEST}", "2**31").replace(f"{2**63}", "2**63")


def keys_of(table: Any, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key of nested tables, and its type."""
    keys = {}
    is_class = isinstance(table, type) and dataclasses.is_dataclass(table)
    if is_class or is_typeddict(table):
        for field, hint in _hints(table).items():
            inner = keys_of(hint, f"{prefix}{field}.")
            if inner:
                keys.update(inner)
            else:
                keys[prefix + field] = hint
    for argument in get_args(table):  # as of tuple[X, ...] | None
        keys.update(keys_of(argument, prefix))
    return keys


def nearest_key(key: str, table: Any, shown: Callable[[str], str] = repr) -> str:
    """Return advice on an unknown key: a similar key, or one of another table."""
    keys = list(keys_of(table))
    prefix = "".join(key.rpartition(".")[:2])
    here = []  # the keys of this table
    for name in keys:
        first = name.removeprefix(prefix).split(".")[0]
        if name.startswith(prefix) and prefix + first not in here:
            here.append(prefix + first)
    last = key.removeprefix(prefix)
    for ours, theirs in OTHER_NAMES.items():
        if last in theirs.split():
            last = ours
            break
    near = difflib.get_close_matches(key, here, 1, 0.9)
    if not near:
        near = [name for name in keys if name.split(".")[-1] == last]
    if not near:
        near = difflib.get_close_matches(key, [*here, *keys], 1)
    if near:
        return f"; did you mean {shown(near[0])}?"
    return f"; the keys are {', '.join(here)}"
