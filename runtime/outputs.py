"""Where the results of a script go: nothing is overwritten unasked, and nothing is lost."""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import to_json, write_atomically

# Files of runs, exports and datasets, which no result replaces where their folder is an input.
INPUTS = ("config.json", "config.toml", "meta.json", "metrics.jsonl", "state.json", "best")
INPUT_SUFFIXES = (".bin", ".pt", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The option of every script that writes results."""

    overwrite: bool = False
    """Replace result files that exist already."""


class Outputs:
    """The files that a script is asked to write, checked before it does its work.

    with Outputs({"--json": a.json}, [a.prompts], a.overwrite) as outputs:
        outputs.write(a.json, text)"""

    def __init__(
        self, files: Mapping[str, Path | None], inputs: Iterable[Any] = (), overwrite: bool = False
    ):
        """files: by the option that names them. inputs: what the script reads; what is no existing
        path is ignored. Raises UserError for a file that cannot or must not be written."""
        self.unwritten: dict[Path, str | bytes] = {}
        inputs = [Path(path) for path in inputs if path and os.path.exists(path)]
        given = {option: Path(path) for option, path in files.items() if path is not None}
        options: dict[str, str] = {}
        for option, path in given.items():
            other = options.setdefault(os.path.realpath(path), option)
            if other != option and not _is_device(path):
                raise UserError(f"{other} and {option} name the same file; name different ones")
            if problem := _problem(path, inputs, overwrite):
                raise UserError(f"{option} {path} {problem}")

    def write(self, path: Path | None, content: str | bytes) -> None:
        """Write a result, whole or not at all; None is nowhere. It replaces earlier ones of this
        script. What cannot be written waits until the script ends."""
        if path is None:
            return
        self.unwritten[path] = content
        if isinstance(content, str):  # a prompt in JSON can hold a lone surrogate
            content = content.encode(errors="backslashreplace")
        try:
            if _is_device(path):
                path.write_bytes(content)
            else:
                write_atomically(path, lambda file: file.write(content))
            del self.unwritten[path]
        except OSError as error:
            print(f"warning: could not write {path}: {error}", file=sys.stderr)

    def write_json(self, path: Path | None, value: Any) -> None:
        self.write(path, to_json(value, indent=2) + "\n")

    def write_jsonl(self, path: Path | None, rows: Iterable[dict]) -> None:
        self.write(path, "".join(to_json(row) + "\n" for row in rows))

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, kind, *error) -> None:
        """Print what could not be written, or keep it in a temporary file, and say so."""
        lost = []
        for path, content in self.unwritten.items():
            if isinstance(content, str):
                print(f"---- {path}, which could not be written ----\n{content}", flush=True)
                lost.append(f"could not write {path}: it is printed instead")
            else:
                with tempfile.NamedTemporaryFile(suffix=f"-{path.name}", delete=False) as file:
                    file.write(content)
                lost.append(f"could not write {path}: it is in {file.name}")
        if lost and kind is None:
            raise OSError("; ".join(lost))


def _problem(path: Path, inputs: list[Path], overwrite: bool) -> str | None:
    """Why a result cannot or must not be written there, and what to do."""
    real = Path(os.path.realpath(path))
    if path.is_dir():
        return "is a folder; name a file"
    if not real.parent.is_dir():
        return f"cannot be written: there is no folder {path.parent}; make it first"
    if not os.access(path if path.exists() else real.parent, os.W_OK):
        return "cannot be written: no permission, or a read-only disk; name another file"
    for source in inputs if path.exists() else ():
        # Weights are read together with the files beside them.
        folder = source.parent if source.is_file() and _is_input(source) else source
        if path.samefile(source) or _is_input(real) and folder.resolve() in real.parents:
            return f"is a file that is read ({source}); name another file"
    if not overwrite and path.is_file() and path.stat().st_size:
        return "exists already; pass --overwrite to replace it, or name another file"
    return None


def _is_input(path: Path) -> bool:
    return path.name in INPUTS or path.suffix in INPUT_SUFFIXES


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()
