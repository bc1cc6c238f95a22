"""At the terminal: generated text in bold type, and lines that are filled in as they
are typed."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence

from ..runtime.command_line import show, visible
from ..runtime.errors import UserError

BOLD = "\033[1m"
RESET = "\033[0m"


def can_style() -> bool:
    """Return whether standard output is a terminal that knows escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def emphasised(pieces: Sequence[str], step: Sequence[int]) -> str:
    """Return a text from its tokens, in which those are bold that were generated, not
    given (step -1)."""
    text = ""
    tokens = zip(pieces, step, strict=True)
    for is_given, run in itertools.groupby(tokens, key=lambda token: token[1] < 0):
        shown = visible("".join(piece for piece, _ in run))
        text += shown if is_given else f"{BOLD}{shown}{RESET}"
    return text


def interact(fill: Callable[[str, int], None], seed: int) -> None:
    """Call fill(line, seed) for every line of standard input until "exit" or its end,
    and for an empty one again with the last one that could be filled and the next seed.
    Mistakes are told."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and found again)
    if sys.stdin is None:
        raise UserError("standard input is closed, so that there are no lines to read")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    if prompt:
        show(
            "Type text, also with [MASK:3] or [MASK:2-6]. Empty line: again. exit: end."
        )
    last_line = ""
    last_seed = seed - 1
    try:
        while True:
            line = input(prompt)
            line_seed = seed
            if line == "exit":
                break
            if not line:
                line = last_line
                line_seed = last_seed + 1
            try:
                fill(line, line_seed)
                last_line = line
                last_seed = line_seed
            except UserError as error:
                show(visible(f"error: {error}", one_line=True), file=sys.stderr)
    except EOFError:
        if prompt:
            show()  # the shell's prompt begins a line
