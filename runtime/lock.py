"""A folder that one job at a time may write to.

The lock is a file `lock` in it, held in two ways. The kernel knows that a process has it open
(flock), and forgets it when the process ends, however it ends. Not every disk that machines share
tells them of one another's locks, so the file also says whose it is, and is touched every few
seconds: one that another machine has not touched for long is left over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from runtime.errors import UserError
from runtime.files import is_alive, temporary_beside
from runtime.processes import Processes

NAME = "lock"
TOUCHED_EVERY = 20.0  # seconds
LEFT_OVER_AFTER = 120.0


@contextlib.contextmanager
def locked_for_all(folder: Path, procs: Processes) -> Iterator[None]:
    """`locked` by the main process, for all processes of a job; all must call, and all raise."""
    with contextlib.ExitStack() as held:
        error = None
        if procs.main:
            try:
                held.enter_context(locked(folder))
            except (ValueError, OSError) as failure:
                error = str(failure)
        if error := procs.gather(error)[0]:
            raise UserError(error)
        yield


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made where there is none. Raises ValueError that says who
    has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file, known = _open_and_lock(path)
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_touching, args=(file, ended), daemon=True)
    try:
        check_owner(path, file.read(1000), known)
        file.seek(0)
        file.truncate()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": _job()}
        file.write(json.dumps(owner) + "\n")
        file.flush()
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()
            _remove(path, file)
    finally:
        file.close()


def _remove(path: Path, file) -> None:
    """Remove a job's own lock: not that of another, which took the place of a file that was
    removed."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            path.unlink()


def _open_and_lock(path: Path) -> tuple[IO[str], bool]:
    """The open file, and whether the kernel has locked it, as not every disk can."""
    known = True
    while True:
        if path.is_symlink() or path.exists() and not path.is_file():
            raise UserError(f"{path} is no file of a job: remove it")
        # "a" makes the file where there is none, and empties none.
        file = open(path, "a+", encoding="utf-8", errors="replace")
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(1000).strip()
            file.close()
            raise UserError(_in_use(path, owner)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            known = False
        # Between opening and locking, the job that had it may have ended and removed it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, known
        file.close()


def check_owner(path: Path, text: str, known: bool = True) -> None:
    """Raise ValueError if what stands in a lock file, whose kernel's lock is free, is of a job that
    may go on elsewhere, or here. known: the kernel knows of jobs on this machine."""
    if text.strip("\0\n ") and not text.startswith("{"):  # zeros: what a crash may leave
        raise UserError(f"{path} is no file of a job: remove it")
    try:
        owner = json.loads(text)
        host, job = owner["host"], owner["job"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # empty, or cut short: it was left by no job of ours that still runs
    # torchrun starts the processes of a job anew when one is lost, maybe on another machine.
    restarted = job is not None and job == _job()
    here = host == socket.gethostname()
    if restarted or here and (known or not _is_at_work(owner.get("pid"))):
        return
    # No job touches its file in the future.
    if abs(_now(path) - path.stat().st_mtime) < LEFT_OVER_AFTER:
        raise UserError(_in_use(path, text.strip()))


def _is_at_work(pid: Any) -> bool:
    return type(pid) is int and 0 < pid < 2**31 and is_alive(pid)


def _in_use(path: Path, owner: str) -> str:
    return (
        f"another job is at work in {path.parent} ({owner or 'of unknown place'}): wait for its "
        f"end, or choose another --name; if it was lost with its machine, wait "
        f"{LEFT_OVER_AFTER:.0f} seconds"
    )


def _job() -> str | None:
    """What all starts of one job under torchrun share."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name


def _now(path: Path) -> float:
    """The time by the clock of the disk, with which the machines' need not agree."""
    probe = temporary_beside(path)
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _keep_touching(file, ended: threading.Event) -> None:
    while not ended.wait(TOUCHED_EVERY):
        with contextlib.suppress(OSError):
            os.utime(file.fileno())  # by the clock of the disk
