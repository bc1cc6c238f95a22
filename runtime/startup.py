"""What a command does before anything else: it makes sure that an interrupt ends in one line and
status 130, from the first import on, which together take seconds.

    if __name__ == "__main__":
        from runtime.startup import begin

        begin()

    import torch ...

Imports nothing that takes time.
"""

import contextlib
import os
import signal
import sys


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
        # What a plain terminal cannot show is written as \uXXXX, not an error.
        getattr(sys, name).reconfigure(errors="backslashreplace")


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _unraisable(found) -> None:
    """What a destructor has raised, which goes nowhere."""
    if found.exc_type is KeyboardInterrupt:
        end_at_once()
    sys.__unraisablehook__(found)
