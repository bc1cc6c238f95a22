"""Result files that overwrite nothing without --overwrite, tables, figures,
provenance."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .command_line import show, visible
from .errors import UserError
from .files import to_json, write_atomically
from .paths import PROJECT
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
        sources = []
        for name in inputs:
            if name and os.path.exists(expand_home(name)):
                sources.append(expand_home(name))
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
        self, path: Path | None, content: str | bytes, part: bool = False
    ) -> None:
        """Write a result atomically (None: do nothing). Prints text that cannot be
        written. part: the whole follows and replaces it; a device or a pipe, which
        keeps all that it gets, gets the whole alone.

        Without --overwrite the first write fails where another process has written the
        file since this one looked; later writes replace what this process wrote."""
        if path is None or (part and _is_device(path)):
            return
        # A prompt in JSON can hold a lone surrogate.
        data = content
        if isinstance(content, str):
            data = content.encode(errors="backslashreplace")
        try:
            if _is_device(path):
                path.write_bytes(data)
            else:
                replace = self.overwrite or path in self.written
                write_atomically(path, lambda file: file.write(data), replace)
            self.written.add(path)
            self.failed.pop(path, None)  # of an earlier part of the result
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
        self, path: Path | None, rows: Iterable[dict], part: bool = False
    ) -> None:
        """Write a line of JSON for each row, as `write` does."""
        self.write(path, "".join(to_json(row) + "\n" for row in rows), part)

    def append_jsonl(self, path: Path, rows: Iterable[dict]) -> None:
        """Add rows to a result that `write_jsonl` began. Prints rows that cannot be
        written."""
        text = "".join(to_json(row) + "\n" for row in rows)
        try:
            if path in self.failed:
                raise OSError(self.failed[path])
            with open(path, "ab") as file:
                file.write(text.encode())
        except OSError as error:
            self.failed.setdefault(path, f"could not write {path}: {error}")
            show(text, end="", flush=True)

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, kind, *error) -> None:
        """Raise OSError if a result could not be written, after the others were."""
        if self.failed and kind is None:
            raise OSError("; ".join(self.failed.values()))


def check_output(option: str, path: Path, sources: list[Path], overwrite: bool) -> None:
    """Raise UserError for a result file that cannot or must not be written. sources:
    the files that are read."""
    words = [word.removeprefix(f"{option}=") for word in sys.argv]
    is_named_as_folder = f"{path}/" in words or f"{path}{os.sep}" in words
    if path.is_dir() or is_named_as_folder:
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(
            f"{option} {path}: there is no folder {path.parent}; make it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(
            f"{option} {path}: no permission to write it; name another file"
        )
    if path.exists() and any(path.samefile(source) for source in sources):
        raise UserError(f"{option} {path} is an input; name another file")
    if owner := owner_of(path):
        raise UserError(
            f"{option} {path} is a file of {owner}, which no result replaces; "
            "name another file"
        )
    if not overwrite and path.is_file() and path.stat().st_size:
        raise UserError(
            f"{option} {path} exists already; pass --overwrite to replace it"
        )


class Protected(NamedTuple):
    """A kind of folder whose own files no result replaces."""

    kind: str
    signs: tuple[str, ...]  # files or folders: a folder with one of them is of the kind
    files: tuple[str, ...]  # patterns of its own files


WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")
VOCABULARY = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")
PROTECTED = (
    Protected("a checkpoint", ("state.json",), ("*",)),
    Protected(
        "a run",
        ("checkpoints", "metrics.jsonl", "config.toml"),
        ("config.toml", "metrics.jsonl", "best", "lock", *VOCABULARY),
    ),
    Protected(
        "an exported model",
        ("config.json",),
        ("*config.json", "README.md", "*.py", "*.jinja", *WEIGHTS, *VOCABULARY),
    ),
    Protected(
        "a data set",
        ("meta.json", "train.bin"),
        ("meta.json", "meta.pkl", "*.bin", *VOCABULARY),
    ),
)


def owner_of(path: Path) -> str | None:
    """Return, in words, the run, checkpoint, export or data set to which a path, or the
    file that it links to, belongs; None where there is none."""
    for place in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for folder in PROTECTED:
            is_of_kind = any((place.parent / sign).exists() for sign in folder.signs)
            if is_of_kind and any(fnmatch(place.name, name) for name in folder.files):
                return f"{folder.kind}, {place.parent}"
    return None


def _is_device(path: Path) -> bool:  # or a FIFO, as /dev/stdout may be
    return path.exists() and not path.is_file()


def versions() -> dict[str, str]:
    """Return the versions that a reported number depends on."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "numpy": metadata.version("numpy"),
    }


def commit() -> str:
    """Return the commit of this code, with "-dirty" if files outside results/ have
    changed."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=PROJECT, capture_output=True, text=True
        ).stdout

    changed = git("diff", "HEAD", "--name-only", "--", ".", ":!results")
    name = git("describe", "--always").strip() or "unknown"
    return f"{name}-dirty" if changed else name


def command() -> str:
    """Return this command, as it would be typed at the top of the repository."""
    module = sys.modules["__main__"].__spec__  # of `python -m`
    # A command of the package, as "aogpt score", which __main__ has put there.
    if sys.argv[0].startswith(("aogpt ", "python -m aogpt ")):
        return shlex.join([*sys.argv[0].split(), *sys.argv[1:]])
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
    widths = []
    for column in zip(*table, strict=True):
        widths.append(max(3, max(len(cell) for cell in column)))
    rule = []
    for number, width in enumerate(widths):
        rule.append("-" * width if number < left else "-" * (width - 1) + ":")
    table.insert(1, rule)
    lines = []
    for cells in table:
        padded = []
        for number, cell in enumerate(cells):
            width = widths[number]
            padded.append(cell.ljust(width) if number < left else cell.rjust(width))
        lines.append(f"| {' | '.join(padded)} |")
    return lines
