"""A run folder that one job at a time may write to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.errors import UserError
from runtime.processes import Processes


@contextlib.contextmanager
def locked_for_all(folder: Path, procs: Processes) -> Iterator[None]:
    """Hold the lock of a folder, which is made if missing, for all processes of a job: all must
    call, and all raise. The kernel frees it when the main process ends, however it ends."""
    lock, error = FileLock(folder / "lock"), None
    if procs.main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            error = f"another job trains in {folder}: wait for its end, or choose another --name"
        except OSError as failure:
            error = str(failure)
    if error := procs.gather(error)[0]:
        raise UserError(error)
    try:
        yield
    finally:
        lock.release()
