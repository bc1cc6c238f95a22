"""aogpt/sampling/terminal.py: bold type, and lines filled in as they are typed."""

import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest
from helpers import ROOT

import sample
from aogpt.sampling import terminal


def test_generated_text_is_bold():
    pieces = ["an ", "old\a", "漢"]
    text = terminal.emphasised(pieces, [-1, 1, 0])
    assert text == "an \033[1mold\\x07漢\033[0m"


class Terminal:
    """A process in a pseudo-terminal of 24 lines of 70 columns."""

    def __init__(self, *arguments):
        self.file, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
        self.written = ""
        env = os.environ | {
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
            "PYTHONIOENCODING": "utf-8",
        }
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "sample.py", *map(str, arguments)],
            cwd=ROOT,
            env=env,
            stdin=other,
            stdout=other,
            stderr=other,
        )
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


def test_lines_are_filled_on_a_terminal(run, script):
    infill = "any[MASK:3] model"
    expected = []
    for seed in (3, 4):
        words = ["--mode", "l2r", "--seed", seed, "--infill", infill]
        status, out, _ = script(sample, run, *words, "--num-samples", 1)
        assert status == 0
        expected.append(out.split("\n", 1)[1].strip("\n"))
    window = Terminal(run, "--interactive", "--mode", "l2r", "--seed", 3)
    window.until("> ")
    window.type(f"{infill}\n")
    first = window.until("> ")
    window.type("a [MASK:] b\n")
    wrong = window.until("> ")
    assert "error: this line: '[MASK:]' is not a mask" in wrong
    assert "Traceback" not in wrong
    window.type("\n")  # the line that could be filled, with the next seed
    second = window.until("> ")
    assert "with seed 4" in second
    window.type("exit\n")
    assert window.process.wait(60) == 0
    os.close(window.file)
    os.close(window.other)
    for text, shown in zip(expected, (first, second), strict=True):
        assert terminal.BOLD in shown
        plain = shown.replace(terminal.BOLD, "").replace(terminal.RESET, "")
        assert text in plain.replace("\r\n", "\n")


def test_lines_of_standard_input_are_filled_as_they_are_without_a_terminal(
    run, script, monkeypatch
):
    lines = (
        "the \n\n[MASK:2]model\nany order mask to\xff\nthe any order mask\nexit\nthe\n"
    )
    data = io.TextIOWrapper(io.BytesIO(lines.encode("latin1")), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", data)
    status, out, err = script(sample, run, "--interactive", "--mode", "l2r")
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
