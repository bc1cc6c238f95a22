"""aogpt/sampling/live.py: samples that fill in on a terminal, and lines filled in as
they are typed."""

import contextlib
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from aogpt.runtime.command_line import visible
from aogpt.sampling import live

COLOR = {p: f"\033[38;5;{c}m" for p, c in live.COLORS.items()}
TOKENS = st.lists(
    st.tuples(
        st.text(
            st.one_of(st.sampled_from(" a\n\t\x1b漢é́🙂\u200f"), st.characters()),
            max_size=5,
        ),
        st.integers(-1, 4),
        st.floats(-12, 1e-7),
    ),
    max_size=40,
)


def screen(written: str, width: int) -> list[str]:
    """The lines of a terminal of this width on which this was written; none may be
    longer."""
    rows = [[]]
    row = 0
    column = 0
    for move, character in re.findall(
        r"(\033\[[^A-Za-z]*[A-Za-z])|(.)", written, re.DOTALL
    ):
        if move.endswith("A"):
            row -= int(move[2:-1])
            assert row >= 0, "above the first line"
        elif move in ("\033[K", "\033[J"):
            del rows[row][column:]
            if move == "\033[J":
                del rows[row + 1 :]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row = row + 1
            column = 0
            rows += [[]] * (row == len(rows))
            rows[row] = list(rows[row])
        elif character:
            size = live.columns(character)
            rows[row][column : column + max(1, size)] = [character, *[""] * (size - 1)]
            column += max(1, size)
            assert column <= width, "a line is too long"
    return ["".join(row) for row in rows]


@given(TOKENS, st.integers(2, 30), st.integers(-1, 4), st.booleans())
def test_any_sample_is_wrapped_to_the_width_and_keeps_its_text(
    tokens, width, now, color
):
    columns = list(zip(*tokens, strict=True)) or [(), (), ()]
    lines = live.wrap(live.cells(*columns, now, color), width)
    for line in lines:
        assert sum(live.columns(c) for c, _ in line) <= width
    expected = "".join("▁" if s > now else visible(p) for p, s, _ in tokens).replace(
        "\t", "    "
    )
    assert "".join(c for line in lines for c, _ in line) == expected.replace("\n", "")
    painted = "\n".join(map(live.paint, lines))
    assert re.sub("\033\\[[0-9;]*m", "", painted).replace("\n", "") == expected.replace(
        "\n", ""
    )
    styles = re.findall("\033\\[([0-9;]*)m", painted)
    assert all((style == "0") == bool(place % 2) for place, style in enumerate(styles))


def test_a_sample_is_painted_by_what_is_known_and_how_probable_it_was():
    sample = ["an ", "old ", "cow\a", "漢"], [-1, 1, 0, 2], [0.0, -0.1, -3.0, -9.0]
    shown = [live.paint(live.cells(*sample, now, color=True)) for now in (-1, 0, 1, 2)]
    mask = "\033[2m▁\033[0m"
    old = f"{COLOR[1]}old \033[0m"
    cow = f"{COLOR[0.1]}cow\\x07\033[0m"
    han = f"{COLOR[0.01]}漢\033[0m"
    assert shown[0] == "an \033[2m▁▁▁\033[0m"
    assert shown[1:] == [
        f"an {mask}{cow}{mask}",
        f"an {old}{cow}{mask}",
        f"an {old}{cow}{han}",
    ]
    assert live.paint(live.cells(*sample)) == "an \033[1mold cow\\x07漢\033[0m"
    lines = live.wrap(((c, "") for c in "an old 漢漢漢 horse"), 7)
    assert ["".join(c for c, _ in line) for line in lines] == [
        "an old ",
        "漢漢漢 ",
        "horse",
    ]


@settings(deadline=None, max_examples=40)
@given(TOKENS, st.integers(3, 30), st.integers(4, 12))
def test_frames_replace_each_other_and_leave_the_sample(tokens, width, height):
    columns = list(zip(*tokens, strict=True)) or [(), (), ()]
    waits = []
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(
            shutil, "get_terminal_size", lambda: os.terminal_size((width, height))
        )
        patch.setattr(select, "select", lambda *a: waits.append(a[3]) or ([], [], []))
        patch.setattr(os, "isatty", lambda file: False)
        assert live.play(*columns)
    steps = {step for step in columns[1] if step >= 0}
    assert len(waits) == 1 + len(steps) and (not steps or 1.9 < sum(waits) < 6.1)
    lines = live.wrap(live.cells(*columns), width - 1)
    found = screen(out.getvalue(), width)
    assert found[: len(lines)] == ["".join(c for c, _ in line) for line in lines]
    legend = f"step {len(steps)} of {len(steps)}; p when drawn: ≤0.01 ≤0.1 ≤0.3 ≤0.7 ≤1"
    assert "".join(found[len(lines) :]).replace(" ", "") == legend.replace(" ", "")
    moves = re.findall(r"\033\[(\d+)A", out.getvalue())
    assert all(int(up) < max(height, 3 + len(legend)) for up in moves)


class Terminal:
    """A process in a pseudo-terminal of 24 lines of 70 columns."""

    def __init__(self, *arguments):
        self.file, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
        self.before = termios.tcgetattr(other)
        self.written = ""
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        env |= {
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
            "PYTHONIOENCODING": "utf-8",
        }
        command = [sys.executable, "sample.py", *map(str, arguments)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), other)
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, **streams)
        self.other = other

    def until(self, words: str) -> str:
        """What it writes next, up to these words."""
        while words not in self.written:
            assert select.select([self.file], [], [], 120)[0], self.written
            self.written += os.read(self.file, 65536).decode(errors="replace")
        found, _, self.written = self.written.partition(words)
        return found + words

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())


def test_lines_are_filled_and_replayed_on_a_terminal(run, script):
    infill = "any[MASK:3] model"
    options = ["--mode", "l2r", "--seed", 3]
    expected = []
    for seed in (3, 4):
        words = [
            "--mode",
            "l2r",
            "--seed",
            seed,
            "--infill",
            infill,
            "--num-samples",
            1,
        ]
        expected.append(script(sample, run, *words)[1].split("\n", 1)[1].strip("\n"))
    terminal = Terminal(run, "--interactive", "--live", *options)
    terminal.until("> ")
    terminal.type(f"{infill}\n")
    first = terminal.until("step 0 of 3") + terminal.until("> ")
    assert "step 1 of 3" in first and "step 2 of 3" in first
    terminal.type("a [MASK:] b\n")
    wrong = terminal.until("> ")
    assert (
        "error: this line: '[MASK:]' is not a mask" in wrong
        and "Traceback" not in wrong
    )
    terminal.type("\n")  # the line that could be filled, with the next seed
    second = terminal.until("step 0 of 3")
    terminal.type("x")  # a key, which is not a line
    second += terminal.until("with seed 4")
    assert "step 1 of 3" not in second
    terminal.until("> ")
    terminal.type("the \n")
    third = terminal.until("step 0 of")
    terminal.process.send_signal(signal.SIGINT)
    third += terminal.until("> ")
    assert "step 1 of" not in third and "interrupted" not in third
    terminal.type("exit\n")
    assert terminal.process.wait(60) == 0
    assert termios.tcgetattr(terminal.other) == terminal.before
    os.close(terminal.file), os.close(terminal.other)
    for text, shown in zip(expected, (first, second), strict=True):
        start = shown.index("=== sample 1")
        end = shown.index("1 sample of")
        rows = "\n".join(screen(shown[start:end].replace("\r\n", "\n"), 120))
        assert text in rows and "▁" not in rows
        assert shown.rindex(live.LEAVE) > shown.rindex(live.ENTER)
        assert shown.rindex("\033[0m") > max(map(shown.rindex, (live.DIM, "\033[38")))


def test_lines_of_standard_input_are_filled_as_they_are_without_a_terminal(
    run, script, monkeypatch
):
    lines = (
        "the \n\n[MASK:2]model\nany order mask to\xff\nthe any order mask\nexit\nthe\n"
    )
    data = io.TextIOWrapper(io.BytesIO(lines.encode("latin1")), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", data)
    status, out, err = script(sample, run, "--interactive", "--live", "--mode", "l2r")
    assert status == 0 and "\033" not in out and out.count("=== sample 1 ===") == 3
    told = [
        line for line in err.splitlines() if "1 sample of " in line or "error" in line
    ]
    assert ["with seed 0" in line for line in told] == [True, False, True, False, False]
    assert "with seed 1" in told[1] and "7 tokens" in told[2]
    assert all("error: this line: the prompt has" in line for line in told[3:])


@pytest.mark.parametrize(
    "words",
    ["--prompt a", "--infill [MASK:1]", "--prompts a.txt", "--jsonl a", "--html a"],
)
def test_lines_are_read_or_given(run, script, words):
    status, out, err = script(sample, run, "--interactive", *words.split())
    assert (status, out) == (2, "") and f"leave out {words.split()[0]}" in err
    assert err.count("\n") == 1
