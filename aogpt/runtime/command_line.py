"""How a script runs: options that several scripts share, errors in one line, and
printing."""

import functools
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from .errors import UserError
from .validation import Count, Seed, expand_home

# Control characters except newline and tab, line separators, and marks that reverse the
# direction.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
LONGEST_MESSAGE = (
    2000  # characters of an error: an option, or a path in it, may be long
)
PEER_SECONDS = 10.0  # in which torchrun ends the processes beside one that has ended


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Options of every script that loads models."""

    seed: Seed = 0
    """Seed of everything random."""
    weights: Literal["ema", "raw"] = "ema"
    """ema: the averaged weights, if there are any; raw: those of the last step."""
    device: str = "auto"
    """auto (CUDA if there is a GPU), cpu, cuda, cuda:1, mps or another device of
    PyTorch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision; auto: bfloat16 on a CUDA GPU that has it, float32 elsewhere."""


def _read_as_utf8(words: list[str]) -> str:
    """Return a text of the command line, whose bytes are UTF-8 in any locale."""
    return os.fsencode(words[0]).decode("utf-8")


# An option that is a text as it stands, also "None", which tyro would read as none.
TEXT = PrimitiveConstructorSpec(
    nargs=1,
    metavar="STR",
    instance_from_str=_read_as_utf8,
    is_instance=lambda value: value is None or isinstance(value, str),
    str_from_instance=lambda value: [str(value)],
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ComputeOptions):
    """Options of every script that loads models of runs."""

    checkpoint: str = "last"
    """Checkpoint of a run folder: last, best (lowest validation loss) or the number of
    a step."""
    block_size: Count | None = None
    """Longest sequence in tokens, if not that of training; only without position
    tables."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """Options of every script for one model."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights, or Hugging Face
    repo id."""


Class = TypeVar("Class", bound=type)


def with_help(options: Class) -> Class:
    """Set the help of each field of a dataclass of options, and of dataclasses in it,
    to the text under the field, and return the class. A line break of the source is a
    space there, unless it ends a sentence."""
    for part in get_type_hints(options).values():
        if is_dataclass(part):
            with_help(part)
    for owner in options.__mro__[:-1]:  # all but `object`
        set_help(owner)
    return options


@functools.cache  # a class is changed once, however often a process reads options
def set_help(owner: type) -> None:
    """Set the help of the fields that a class itself declares."""
    for field in docstring_parser.parse_from_object(owner).params:
        text = inspect.cleandoc(field.description or "")
        text = re.sub(r"(?<![.:])\n", " ", text)
        annotation = owner.__annotations__[field.arg_name]
        owner.__annotations__[field.arg_name] = Annotated[
            annotation, tyro.conf.arg(help=text)
        ]


def visible(text: Any, one_line: bool = False) -> str:
    """Return text in which control characters, and with `one_line` newlines, are
    escaped."""
    text = CONTROL.sub(
        lambda match: match[0].encode("unicode_escape").decode(), str(text)
    )
    if one_line:
        return text.replace("\n", "\\n")
    return text


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, given in the plural: (1, "tokens") -> "1 token"."""
    if count == 1:
        noun = re.sub(r"s\b", "", noun, count=1)
    return f"{count:,} {noun}"


def show(*values: Any, sep: str = " ", **options: Any) -> None:
    """Print values with control characters escaped, as they may come from a file or a
    model."""
    print(visible(sep.join(map(str, values))), **options)  # noqa: T201


def check_utf8(words: list[str]) -> None:
    """Raise UserError for a word of a command line that is not UTF-8. A text would
    become U+FFFD in silence, and safetensors opens no file of such a name."""
    for word in words:
        try:
            os.fsencode(word).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{word!a}: give a name or text in UTF-8") from None


def check_repeated(words: list[str]) -> None:
    """Raise UserError for an option that the words of a command line have twice, of
    which the last one alone would count."""
    seen = set()
    for word in words:
        option = re.match(r"--[\w.-]+(?=$|=)", word)
        if option is None:
            continue
        name = option[0].replace("_", "-")  # tyro takes both
        if name in seen:
            raise UserError(f"{name} is given twice; give it once, with all its values")
        seen.add(name)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit, unless an option is given twice or is not UTF-8.
    UserError, OSError and a lack of memory print one line and exit with status 2
    (AOGPT_TRACEBACK=1 adds the traceback), Ctrl-C with status 130."""
    # for characters that the terminal cannot show
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        check_utf8(sys.argv[1:])
        check_repeated(sys.argv[1:])
        with _paths_with_home():
            status = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        show("\ninterrupted", file=sys.stderr)
        status = 130
    except Exception as error:
        advice = ""
        if not isinstance(error, UserError | OSError):
            from .devices import out_of_memory  # imports torch, which takes seconds

            if not out_of_memory(error):
                raise
            advice = "out of memory; use a smaller batch or fewer samples: "
        if os.environ.get("AOGPT_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno and error.filename is None:
            advice = "the output cannot be written: "  # a full disk: names no file
        message = visible(f"{advice}{error}", one_line=True)
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]}... ({len(message):,} characters)"
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and isinstance(error, UserError | FileNotFoundError):
            tell_torchrun(f"error: {message}", file)
        else:
            rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
            show(f"error{rank}: {message}", file=sys.stderr)
        status = 2
    sys.exit(status)


def tell_torchrun(message: str, file: str) -> None:
    """Write why this process ends to the file that torchrun reads: it prints the
    message last, after its own traceback. A mistake of the user is one of all
    processes. torchrun ends the others when the first one on a machine has ended, so
    only a mistake that is theirs alone is told by them."""
    if os.environ.get("LOCAL_RANK") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PEER_SECONDS)
    reason = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    with open(file, "w") as stream:
        json.dump({"message": reason}, stream)


def _paths_with_home():
    """Return a registry of tyro in which "~" is the home directory in every option that
    is a path."""
    from tyro.constructors import ConstructorRegistry

    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: expand_home(words[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: spec if info.type is Path else None)
    return registry
