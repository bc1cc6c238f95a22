"""What a command does before anything else: it makes sure that an interrupt ends in one line and
status 130, from the first import on, which together take seconds.

    if __name__ == "__main__":
        from runtime.startup import begin

        begin()

    import torch ...

Imports nothing that takes time.
"""

import contextlib
import io
import os
import signal
import sys

# With which pathlib's RuntimeErrors begin: links that go in a circle, and a user without a home.
PATH_ERRORS = ("Symlink loop", "Could not determine home")


def begin() -> None:
    signal.signal(signal.SIGINT, end_at_once)
    # A process whose output is closed would give its number to the next file that it opens, and
    # write into that what was meant for a terminal.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        else:
            setattr(sys, name, lasting(getattr(sys, name)))


class _Lasting(io.FileIO):
    """A file that, once it cannot be written to, is written to no more, which is no error: work
    whose reader has left (`| head`) or whose log is on a full disk goes on, and is saved."""

    broken = False

    def write(self, data) -> int:
        if not self.broken:
            try:
                return super().write(data)
            except OSError:
                self.broken = True
        return len(data)


def lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same output, which outlives its reader; what a plain terminal cannot show is written as
    \\uXXXX, not an error."""
    stream.flush()
    raw = _Lasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def broken(stream) -> bool:
    """Whether an output of `lasting` could not be written to."""
    return getattr(getattr(getattr(stream, "buffer", None), "raw", None), "broken", False)


def end_at_once(number=None, frame=None) -> None:
    """End here, whatever is going on: Python would raise an exception, which where nobody waits for
    it (an import, a destructor, the end of a script) becomes a traceback, or is lost."""
    if os.environ.get("RANK", "0") == "0":
        # not print, which may be what was interrupted
        with contextlib.suppress(OSError):  # nobody may be listening
            os.write(2, b"\ninterrupted\n")
    os._exit(130)


def interruptible() -> None:
    """From here on, an interrupt is a KeyboardInterrupt, which lets what is open be closed."""
    signal.signal(signal.SIGINT, interrupt)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


_seen = False


def interrupt(number, frame) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt


def interrupted() -> bool:
    """Whether there has been an interrupt, whatever has become of the exception: some libraries
    make another of it."""
    return _seen


def _unraisable(found) -> None:
    """What a destructor has raised, which goes nowhere."""
    if found.exc_type is KeyboardInterrupt:
        end_at_once()
    sys.__unraisablehook__(found)
