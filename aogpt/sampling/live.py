"""At the terminal: replay finished samples step by step, and read lines to fill in."""

import contextlib
import itertools
import math
import os
import select
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator

from ..runtime.command_line import show, visible
from ..runtime.errors import UserError

Cell = tuple[str, str]  # a character and the escape sequence of its style, or ""
MASK = "▁"
DIM = "\033[2m"
BOLD = "\033[1m"
RESET = "\033[0m"
COLORS = {
    0.01: 197,
    0.1: 208,
    0.3: 142,
    0.7: 71,
    1: 32,
}  # up to a probability; on black and white
SHADES = {most: f"\033[38;5;{color}m" for most, color in COLORS.items()}
# no cursor, no wrapped lines
ENTER = "\033[?25l\033[?7l"
LEAVE = f"{RESET}\033[?7h\033[?25h"


def can_style() -> bool:
    """Whether standard output is a terminal that knows escape sequences and the mask."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return (
        is_terminal
        and (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    )


def columns(c: str) -> int:
    """Columns of the terminal that a character takes."""
    return (
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
    )


def cells(
    pieces,
    step,
    log_probs,
    now: float = math.inf,
    color: bool = False,
) -> Iterator[Cell]:
    """A sample after step `now`: a mask for each token of a later step; other tokens colored by
    their probability, or else bold; given text (step -1) as it is."""
    for piece, when, log_prob in zip(pieces, step, log_probs, strict=True):
        probability = min(1.0, math.exp(log_prob))
        shade = next(style for most, style in SHADES.items() if probability <= most)
        style = "" if when < 0 else shade if color else BOLD
        text, style = (MASK, DIM) if when > now else (visible(piece), style)
        yield from ((character, style) for character in text.replace("\t", "    "))


def wrap(found: Iterable[Cell], width: int) -> list[list[Cell]]:
    """Lines of at most `width` columns (2 or more), broken after spaces where there are any."""
    lines = []
    line = []
    used = 0
    for cell in found:
        while cell[0] != "\n" and used + columns(cell[0]) > width:
            cut = max(
                (i for i, (c, _) in enumerate(line, 1) if c == " "), default=len(line)
            )
            lines.append(line[:cut])
            line = line[cut:]
            used = sum(columns(c) for c, _ in line)
        line.append(cell)
        used += columns(cell[0])
        if cell[0] == "\n":
            lines.append(line[:-1])
            line = []
            used = 0
    return [*lines, line]


def paint(found: Iterable[Cell]) -> str:
    """Text with the escape sequences of its styles, each of which is reset."""
    runs = itertools.groupby(found, key=lambda cell: cell[1])
    parts = ((style, "".join(character for character, _ in run)) for style, run in runs)
    return "".join(f"{style}{part}{RESET}" if style else part for style, part in parts)


def play(
    pieces: list[str],
    step: list[int],
    log_probs: list[float],
) -> bool:
    """Replay a sample and leave it there. A key or Ctrl-C ends that; False: it was Ctrl-C."""
    import termios  # Windows has neither
    import tty

    color, (width, height) = not os.environ.get("NO_COLOR"), shutil.get_terminal_size()
    width = max(2, width - 1)
    drawn = 0
    steps = sorted({-1, *step})
    last = len({-1, *step}) - 1
    stride = 1 + last // 120  # steps of a frame
    pause = min(5.0, max(2.0, last / 10)) * stride / max(1, last)  # seconds

    def draw(done: int) -> None:
        nonlocal drawn
        below = [(c, DIM) for c in f"step {done} of {last}" + "; p when drawn:" * color]
        below += [
            (c, style) for most, style in SHADES.items() if color for c in f" ≤{most:g}"
        ]
        below = wrap(below, width)
        lines = wrap(cells(pieces, step, log_probs, steps[done], color), width)
        if (
            done < last
        ):  # of what is taller than the terminal, the lines around the first mask
            room = max(1, height - 1 - len(below))
            first = next(i for i, line in enumerate(lines) if (MASK, DIM) in line)
            top = max(0, min(first - room // 2, len(lines) - room))
            lines = lines[top : top + room]
        text = "".join(f"{paint(line)}\033[K\n" for line in lines + below)
        up = f"\033[{drawn}A" if drawn else ""
        sys.stdout.write(f"{up}\r{text}\033[J")
        drawn = len(lines + below)

    keys = [0] if os.isatty(0) else []  # standard input
    modes = [termios.tcgetattr(key) for key in keys]
    try:
        sys.stdout.write(ENTER)
        for key in keys:
            tty.setcbreak(key, termios.TCSADRAIN)
        typed = select.select(keys, [], [], 0)[
            0
        ]  # before: that is the next line, which is kept
        for done in range(0, last, stride):
            draw(done)
            if select.select(keys, [], [], pause)[0]:
                typed or os.read(0, 1024)
                break
    except KeyboardInterrupt:
        return False
    finally:
        for key, mode in zip(keys, modes, strict=True):
            termios.tcsetattr(key, termios.TCSADRAIN, mode)
        sys.stdout.write(LEAVE)
        draw(last)
    return True


def interact(fill: Callable[[str, int], None], seed: int) -> None:
    """Call fill(line, seed) for every line of standard input until "exit" or its end, and for an
    empty one again with the last one that could be filled and the next seed. Mistakes are told."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and found again)
    if sys.stdin is None:
        raise UserError("standard input is closed, so that there are no lines to read")
    sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    line = ""
    now = seed - 1
    if prompt:
        show(
            "Type text, also with [MASK:3] or [MASK:2-6]. Empty line: again. exit: end."
        )
    try:
        while (typed := input(prompt)) != "exit":
            request = (typed, seed) if typed else (line, now + 1)
            try:
                fill(*request)
                line, now = request
            except UserError as error:
                show(visible(f"error: {error}", one_line=True), file=sys.stderr)
    except EOFError:
        if prompt:
            show()  # the shell's prompt begins a line
