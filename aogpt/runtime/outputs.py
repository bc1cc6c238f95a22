"""Result files that overwrite nothing without --overwrite, tables, figures,
provenance."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_line import show, visible
from .errors import UserError
from .files import to_json, write_atomically
from .validation import expand_home

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The option of scripts that write results."""

    overwrite: bool = False
    """Overwrite existing result files."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OutputOptions):
    """Options of scripts that report results in a table."""

    json: Path | None = None
    """Write all results, settings and versions to this file, and the table beside it
    (.md)."""


class Outputs:
    """The result files of a script, checked before its work begins.

    with Outputs({"--json": a.json}, [a.prompts], a.overwrite) as outputs:
        outputs.write(a.json, text)"""

    def __init__(
        self,
        files: Mapping[str, Path | None],
        inputs: Iterable[Any] = (),
        overwrite: bool = False,
    ):
        """Check the files. Raises UserError for one that cannot or must not be written.

        Args:
            files: path by option.
            inputs: files that are read and must not be overwritten; ignored if they do
                not exist.
            overwrite: whether existing files may be replaced."""
        self.failed: dict[Path, str] = {}
        self.overwrite = overwrite
        self.written: set[Path] = set()
        sources = [expand_home(name) for name in inputs if name]
        options: dict[str, str] = {}
        for option, path in files.items():
            if path is None:
                continue
            other = options.setdefault(os.path.realpath(path), option)
            if other != option and not _is_device(path):
                raise UserError(
                    f"{other} and {option} name the same file; name different ones"
                )
            check_output(option, path, sources, overwrite)

    @classmethod
    def of_report(
        cls, json: Path | None, inputs: Iterable[Any], overwrite: bool
    ) -> "Outputs":
        """Return the outputs of `write_report`: the file of --json, and beside it the
        table as Markdown (.md)."""
        files = {
            "--json": json,
            "the table beside --json": json and json.with_suffix(".md"),
        }
        return cls(files, inputs, overwrite)

    def write(
        self,
        path: Path | None,
        content: str | bytes,
        part: bool = False,
        append: bool = False,
    ) -> None:
        """Write a result atomically (None: do nothing). Prints text that cannot be
        written. part: the whole follows and replaces it; a device or a pipe, which
        keeps all that it gets, gets the whole alone. append: add to what was written.

        Without --overwrite the first write fails where another process has written the
        file since this one looked; later writes replace what this process wrote."""
        if path is None or (part and _is_device(path)):
            return
        data = content
        if isinstance(content, str):  # a prompt in JSON can hold a lone surrogate
            data = content.encode(errors="backslashreplace")
        try:
            if append or _is_device(path):
                with open(path, "ab") as file:
                    file.write(data)
            else:
                replace = self.overwrite or path in self.written
                write_atomically(path, lambda file: file.write(data), replace)
                self.failed.pop(path, None)  # of an earlier part of the result
            self.written.add(path)
        except OSError as error:
            self.failed[path] = f"could not write {path}: {error}"
            if isinstance(content, str):
                show(
                    f"---- {path}, which could not be written ----\n{content}",
                    flush=True,
                )

    def write_json(self, path: Path | None, value: Any, part: bool = False) -> None:
        """Write plain values as indented JSON, as `write` does."""
        self.write(path, to_json(value, indent=2) + "\n", part)

    def write_report(
        self, json: Path | None, value: Any, lines: Iterable[str], part: bool = False
    ) -> None:
        """Write the files of `of_report`, as `write` does. lines: the table."""
        self.write_json(json, value, part)
        table = "\n".join(map(escaped, lines)) + "\n"
        self.write(json and json.with_suffix(".md"), table, part)

    def write_jsonl(
        self,
        path: Path | None,
        rows: Iterable[dict],
        part: bool = False,
        append: bool = False,
    ) -> None:
        """Write a line of JSON for each row, as `write` does."""
        text = "".join(to_json(row) + "\n" for row in rows)
        self.write(path, text, part, append)

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, kind, *error) -> None:
        """Raise OSError if a result could not be written, after the others were."""
        if self.failed and kind is None:
            raise OSError("; ".join(self.failed.values()))


# Names of files of runs, checkpoints, exports and data sets: no result replaces one.
PROTECTED = """
best config.toml lock meta.* metrics.jsonl state.json
*.bin *.pt *.pth *.safetensors *.safetensors.index.json
*config.json merges.txt special_tokens_map.json tokenizer* vocab*
""".split()


def check_output(option: str, path: Path, sources: list[Path], overwrite: bool) -> None:
    """Raise UserError for a result file that cannot or must not be written. sources:
    the files that are read."""
    words = [word.removeprefix(f"{option}=") for word in sys.argv]
    is_named_as_folder = any(
        word.endswith(("/", "/.")) and expand_home(word) == path for word in words
    )
    # To open one waits for a reader, without end. Those of /dev are a shell's pipes.
    is_named_pipe = path.is_fifo() and Path("/dev") not in path.absolute().parents
    writable = path if path.exists() else path.parent
    if (
        path.is_dir()
        or is_named_as_folder
        or is_named_pipe
        or not path.parent.is_dir()
        or not os.access(writable, os.W_OK)
    ):
        raise UserError(
            f"{option} {path} cannot be written: name a file, in a folder that exists "
            "and that you may write to"
        )
    if not path.exists():
        return
    is_source = any(each.exists() and path.samefile(each) for each in sources)
    names = (path.name, os.path.basename(os.path.realpath(path)))
    if is_source or any(fnmatch(name, own) for name in names for own in PROTECTED):
        raise UserError(
            f"{option} {path} is an input, or a file of a run, a model or a data set, "
            "which no result replaces; name another file"
        )
    if not overwrite and path.is_file() and path.stat().st_size:
        raise UserError(
            f"{option} {path} exists already; pass --overwrite to replace it"
        )


def _is_device(path: Path) -> bool:  # or a FIFO, as /dev/stdout may be
    return path.exists() and not path.is_file()


def versions() -> dict[str, str]:
    """Return the versions that a reported number depends on."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "numpy": metadata.version("numpy"),
    }


def command() -> str:
    """Return this command, as it would be typed at the top of the repository."""
    module = sys.modules["__main__"].__spec__  # of `python -m`
    script = ["-m", module.name] if module else [Path(sys.argv[0]).name]
    return shlex.join(["python", *script, *sys.argv[1:]])


def provenance(
    arguments: Any,
    dtype: "torch.dtype",
    device: "torch.device",
    processes: int = 1,
    **more,
) -> dict:
    """Return everything that results depend on. arguments: the options. dtype: the
    dtype that was used."""
    settings = asdict(arguments)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings.pop("overwrite", None)  # nothing depends on it
    decoding = settings.pop("decoding", {})
    settings.update(decoding)
    origin = {
        "command": command(),
        "settings": settings,
        "device": str(device),
        "processes": processes,
        "versions": versions(),
    }
    origin.update(more)
    return origin


def escaped(line: str) -> str:
    """Return one line of Markdown, with HTML tags and control characters escaped."""
    # An odd number of backslashes before "<" escapes it already.
    return re.sub(
        r"(?<!\\)((?:\\\\)*)<(?=[a-zA-Z/!?])", r"\1\\<", visible(line, one_line=True)
    )


def markdown_table(head: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """Return the lines of a Markdown table, padded: `left` columns left-aligned, then
    right-aligned."""
    table = []
    for cells in [head, *rows]:
        table.append([escaped(cell).replace("|", r"\|") for cell in cells])
    widths = [max(3, *map(len, column)) for column in zip(*table, strict=True)]
    rule = ["-" * width for width in widths[:left]]
    rule += ["-" * (width - 1) + ":" for width in widths[left:]]
    lines = []
    for cells in [table[0], rule, *table[1:]]:
        padded = map(str.ljust, cells[:left], widths[:left])
        aligned_right = map(str.rjust, cells[left:], widths[left:])
        lines.append(f"| {' | '.join([*padded, *aligned_right])} |")
    return lines
