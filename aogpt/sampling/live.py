"""At the terminal: replay finished samples step by step, and read lines to fill in."""

import contextlib
import itertools
import math
import os
import select
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..runtime.command_line import show, visible
from ..runtime.errors import UserError

Cell = tuple[str, str]  # a character and the escape sequence of its style, or ""
MASK = "▁"
DIM = "\033[2m"
BOLD = "\033[1m"
RESET = "\033[0m"
# For a probability of at most this: a color that reads on black and on white.
COLORS = {0.01: 197, 0.1: 208, 0.3: 142, 0.7: 71, 1: 32}
SHADES = {most: f"\033[38;5;{color}m" for most, color in COLORS.items()}
# no cursor, no wrapped lines
ENTER = "\033[?25l\033[?7l"
LEAVE = f"{RESET}\033[?7h\033[?25h"


def can_style() -> bool:
    """Whether standard output is a terminal that knows escape sequences and the
    mask."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return False
    encoding = sys.stdout.encoding or "utf-8"
    return encoding.lower().replace("-", "") == "utf8"


def columns(c: str) -> int:
    """Return the columns of the terminal that a character takes."""
    if unicodedata.combining(c):
        return 0
    if unicodedata.east_asian_width(c) in "WF":
        return 2
    return 1


def cells(
    pieces: Sequence[str],
    step: Sequence[int],
    log_probs: Sequence[float],
    now: float = math.inf,
    color: bool = False,
) -> Iterator[Cell]:
    """Yield the cells of a sample after step `now`: a mask for each token of a later
    step; other tokens colored by their probability, or else bold; given text (step -1)
    as it is."""
    for piece, when, log_prob in zip(
        pieces,
        step,
        log_probs,
        strict=True,
    ):
        text = visible(piece)
        style = BOLD
        if when > now:
            text = MASK
            style = DIM
        elif when < 0:
            style = ""
        elif color:
            style = shade_of(min(1.0, math.exp(log_prob)))
        for character in text.replace("\t", "    "):
            yield character, style


def shade_of(probability: float) -> str:
    """Return the style of a token of this probability."""
    for most, style in SHADES.items():
        if probability <= most:
            return style
    return ""  # not a number


def wrap(text: Iterable[Cell], width: int) -> list[list[Cell]]:
    """Return lines of at most `width` columns (2 or more), broken after spaces where
    there are any."""
    lines = []
    line: list[Cell] = []
    used = 0
    for cell in text:
        character = cell[0]
        while character != "\n" and used + columns(character) > width:
            cut = len(line)
            spaces = [i for i, (c, _) in enumerate(line, 1) if c == " "]
            if spaces:
                cut = spaces[-1]
            lines.append(line[:cut])
            line = line[cut:]
            used = sum(columns(c) for c, _ in line)
        line.append(cell)
        used += columns(character)
        if character == "\n":
            lines.append(line[:-1])
            line = []
            used = 0
    return [*lines, line]


def paint(text: Iterable[Cell]) -> str:
    """Return text with the escape sequences of its styles, each of which is reset."""
    painted = ""
    for style, run in itertools.groupby(text, key=lambda cell: cell[1]):
        part = "".join(character for character, _ in run)
        painted += f"{style}{part}{RESET}" if style else part
    return painted


def play(
    pieces: list[str],
    step: list[int],
    log_probs: list[float],
) -> bool:
    """Replay a sample and leave it there. A key or Ctrl-C ends that. Return False if it
    was Ctrl-C."""
    import termios  # Windows has neither
    import tty

    color = not os.environ.get("NO_COLOR")
    terminal = shutil.get_terminal_size()
    width = max(2, terminal.columns - 1)
    steps = sorted({-1, *step})
    last = len(steps) - 1
    stride = 1 + last // 120  # steps of a frame
    seconds = min(5.0, max(2.0, last / 10))
    pause = seconds * stride / max(1, last)  # seconds
    drawn = 0  # lines that are on the screen

    def draw(done: int) -> None:
        nonlocal drawn
        legend = [(c, DIM) for c in f"step {done} of {last}"]
        if color:
            legend += [(c, DIM) for c in "; p when drawn:"]
            for most, style in SHADES.items():
                legend += [(c, style) for c in f" ≤{most:g}"]
        below = wrap(legend, width)
        lines = wrap(
            cells(
                pieces,
                step,
                log_probs,
                steps[done],
                color,
            ),
            width,
        )
        if done < last:
            # Of what is taller than the terminal, the lines around the first mask.
            room = max(1, terminal.lines - 1 - len(below))
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
        # What was typed before is the next line, which is kept.
        typed, _, _ = select.select(
            keys,
            [],
            [],
            0,
        )
        for done in range(0, last, stride):
            draw(done)
            pressed, _, _ = select.select(
                keys,
                [],
                [],
                pause,
            )
            if pressed:
                if not typed:
                    os.read(0, 1024)
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
