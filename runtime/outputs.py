"""Where the results of a script go: one place that overwrites nothing unasked and loses nothing.

    outputs = Outputs({"--json": a.json, "--html": a.html}, [a.prompts], a.overwrite)
    with outputs:
        ...
        outputs.write(a.json, text)

Made before the work begins, it raises ValueError for what could not be written after it. What
cannot be written all the same, as on a disk that has become full, is printed at the end.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import rewrite, temporary_beside, to_json

# Names of files that are no result of a script that writes results: in a folder that it reads, not
# even --overwrite gives them away.
KEPT = ("config.json", "config.toml", "meta.json", "metrics.jsonl", "state.json", "best")
KEPT_SUFFIXES = (".bin", ".pt", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The option of every script that writes results."""

    overwrite: bool = False
    """Replace result files that exist already."""


_living: weakref.WeakSet[Outputs] = weakref.WeakSet()


def _note_what_is_read(event: str, arguments: tuple) -> None:
    """A hook of Python's own (PEP 578): called for all files that are opened, by whatever code."""
    if event == "open" and isinstance(arguments[0], str | bytes):
        path, mode, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR) and "+" not in (mode or ""):
            for outputs in list(_living):
                outputs.read.add(os.fsdecode(path))


@functools.cache  # hooks stay
def _begin_to_note() -> None:
    sys.addaudithook(_note_what_is_read)


class Outputs:
    """The files that a script is asked to write."""

    def __init__(
        self, files: Mapping[str, Path | None], inputs: Iterable[Any] = (), overwrite: bool = False
    ):
        """files: by the option that names them; None where it is not given. inputs: files and
        folders that the script reads; None and what is no path are passed over.

        Raises ValueError for a file that cannot be written, that would be replaced without
        `overwrite`, or that is an input."""
        _begin_to_note()
        _living.add(self)
        self.read: set[str] = set()  # paths that this process has opened to read, from here on
        self.unwritten: dict[Path, str | bytes] = {}
        self.overwrite, self.own = overwrite, set()  # what it has written
        given = {option: Path(path) for option, path in files.items() if path is not None}
        read = [Path(path) for path in inputs if path and os.path.exists(path)]
        seen: dict[Path, str] = {}
        for option, path in given.items():
            other = seen.setdefault(path.resolve(), option)
            if other != option and (path.is_file() or not path.exists()):  # not a device
                raise UserError(f"{other} and {option} name the same file; name different ones")
            check_place(path, option)
            for source in read:
                check_not_input(path, option, source)
            if not overwrite and path.is_file() and path.stat().st_size:
                raise UserError(
                    f"{option} {path} exists already; pass --overwrite to replace it, or name "
                    "another file"
                )

    def write(self, path: Path | None, content: str | bytes) -> None:
        """Write a result, whole or not at all; None is nowhere. Later results of the same path
        replace earlier ones. What cannot be written waits until the script ends."""
        if path is None:
            return
        self.unwritten[path] = content
        try:
            if path not in self.own:
                self.check_again(path)
            # Half a pair of UTF-16, which a prompt in JSON can hold, has no place in UTF-8.
            text = isinstance(content, str)
            rewrite(path, content.encode(errors="backslashreplace") if text else content)
            del self.unwritten[path]
            self.own.add(path)
        except OSError as error:
            print(f"warning: could not write {path}: {error}", file=sys.stderr)

    def check_again(self, path: Path) -> None:
        """Raise FileExistsError for a file that has come to be read or to be there since the
        beginning."""
        if not path.is_file():
            return
        if any(os.path.exists(read) and path.samefile(read) for read in self.read):
            raise FileExistsError(f"{path} is a file that is read; name another file")
        if not self.overwrite and path.stat().st_size:
            raise FileExistsError(f"{path} has come to be there meanwhile; name another file")

    def write_json(self, path: Path | None, value: Any) -> None:
        self.write(path, to_json(value, indent=2) + "\n")

    def write_jsonl(self, path: Path | None, rows: Iterable[dict]) -> None:
        self.write(path, "".join(to_json(row) + "\n" for row in rows))

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error) -> None:
        """Print what could not be written, or put it elsewhere, and say so."""
        lost = []
        for path, content in self.unwritten.items():
            if isinstance(content, str):
                print(f"---- {path}, which could not be written ----\n{content}", flush=True)
                lost.append(f"could not write {path}: it is printed instead")
            else:
                lost.append(f"could not write {path}: {_keep_elsewhere(path, content)}")
        if lost and error[0] is None:
            raise OSError("; ".join(lost))


def _keep_elsewhere(path: Path, content: bytes) -> str:
    """Save what cannot be printed in the system's folder for such files."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(suffix=f"-{path.name}", delete=False) as file:
            file.write(content)
        return f"it is in {file.name}"
    except OSError as error:
        return f"nor could it be kept elsewhere ({error})"


def check_place(path: Path, option: str) -> None:
    """Raise ValueError if a result file could not be written."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            if not os.access(path, os.W_OK):
                raise PermissionError("it may not be written to")
            return
        temporary = temporary_beside(path.resolve())  # root may write anywhere, but not on any disk
        temporary.open("xb").close()
        temporary.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error}") from error


def check_not_input(path: Path, option: str, source: Path) -> None:
    """Raise ValueError if a result would replace what the script reads: a file, or one of those
    that a run folder, an export or a dataset consists of, by whatever name."""
    if not path.exists():
        return
    # Who names weights, or a run's file `best`, reads what lies beside them, too.
    folder = source.parent if source.is_file() and is_kept(source) else source
    real = path.resolve()
    replaced = path.samefile(source) or is_kept(real) and folder.resolve() in real.parents
    if not replaced and path.is_file() and path.stat().st_nlink > 1 and folder.is_dir():
        replaced = any(is_kept(file) and file.samefile(path) for file in folder.rglob("*"))
    if replaced:
        raise UserError(f"{option} {path} is a file that is read ({source}); name another file")


def is_kept(path: Path) -> bool:
    return path.name in KEPT or path.suffix in KEPT_SUFFIXES
