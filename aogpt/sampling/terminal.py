"""At the terminal: generated text in bold type."""

import itertools
import os
import sys
from collections.abc import Sequence

from ..runtime.command_line import visible

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
