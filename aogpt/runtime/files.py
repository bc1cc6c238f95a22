"""Atomic file writes, locks, checksums, and rows of JSON."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import UserError
from .validation import open_regular

if TYPE_CHECKING:
    from .processes import Processes

LONGEST_NAME = 200  # bytes, so that words beside it stay below the 255 of a file name


def write_atomically(
    path: Path, write: Callable[[BinaryIO], Any], replace: bool = True
) -> None:
    """Call write(file) on a temporary sibling, flush it and move it into place, or
    leave no trace. Raises FileExistsError for devices and FIFOs and, without `replace`,
    for a file that is not empty."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} is not a regular file; remove it, or name another file"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, a character up to 4 of them.
    temporary = path.with_name(f".{path.name[:48]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            if path.stat().st_size and not replace:
                raise FileExistsError(
                    errno.EEXIST, "another process has written it meanwhile", str(path)
                )
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_leftovers(target: Path) -> None:
    """Remove what killed processes left beside a folder that `staging` makes. If one
    ended between the two moves, the folder that was there is back."""
    from filelock import FileLock, Timeout

    for path in target.parent.glob(f"{glob.escape(partial_name(target))}*"):
        # The lock of a process that has ended is free.
        lock = FileLock(path / "lock")
        with contextlib.suppress(Timeout, OSError):
            lock.acquire(blocking=False)
            if (path / "old").exists() and not target.exists():
                (path / "old").rename(target)
            shutil.rmtree(path, ignore_errors=True)
            lock.release()


def partial_name(target: Path) -> str:
    """Return the beginning of the names of folders in which `target` is made."""
    name = target.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}.partial-"


@contextlib.contextmanager
def staging(target: Path, replace: bool = True) -> Iterator[Path]:
    """Make a new folder that becomes `target` at the end, or is removed after an error.
    Also removes leftovers of killed processes. Raises OSError if `target` exists and
    not `replace`."""
    from filelock import FileLock

    clear_leftovers(target)
    beside = target.with_name(partial_name(target) + secrets.token_hex(4))
    lock = FileLock(beside / "lock")
    beside.mkdir(parents=True)
    try:
        lock.acquire()
        (beside / "new").mkdir()
        yield beside / "new"
        for path in (beside / "new").iterdir():
            sync(path)
        if replace and target.exists():
            target.rename(beside / "old")
        (beside / "new").rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        lock.release()


@contextlib.contextmanager
def locked_for_all(folder: Path, procs: "Processes") -> Iterator[None]:
    """Make a folder and hold its lock for the whole job. All processes must call.
    Raises UserError if another job holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    error = None
    if procs.main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            error = (
                f"another job trains in {folder}: wait until it ends, or choose "
                "another --name"
            )
        except OSError as failure:
            error = str(failure)
    if error := procs.gather(error)[0]:
        raise UserError(error)
    try:
        yield
    finally:
        lock.release()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, as 64 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON of plain values; NaN and infinity become null, paths become
    strings."""
    text = json.dumps(value, default=str)
    return json.dumps(
        json.loads(text, parse_constant=lambda number: None), indent=indent
    )


def write_text(path: Path, text: str) -> None:
    """Write a text, atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write plain values as indented JSON, atomically."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write a line of JSON for each row, atomically."""
    write_text(path, "".join(to_json(row) + "\n" for row in rows))


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file that are not blank, each with its place, "FILE
    line N". Raises UserError for a file of none."""
    is_stdin = str(path) == "/dev/stdin"
    is_empty = True
    with path.open("rb") if is_stdin else open_regular(path) as file:
        for place, line in lines_of(file, str(path)):
            is_empty = False
            yield place, line
    if is_empty:
        raise UserError(f"{path} is empty or blank: write one text a line")


def lines_of(stream: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of an open file as `read_lines` does, with one line in memory at
    a time."""
    # Lines of bytes: text would also be split at characters that JSON strings may hold.
    for number, data in enumerate(stream, 1):
        place = f"{name} line {number}"
        try:
            line = data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: this is not UTF-8; save the file as UTF-8"
            ) from error
        if line.strip():
            yield place, line.removesuffix("\n").removesuffix("\r")
