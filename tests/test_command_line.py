"""How scripts end: one line for a user's mistake, a traceback for a bug, and no result lost."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT, run_script

MAIN = """
import os, signal, sys
from runtime.command_line import run_script
from runtime.errors import UserError
def main():
    {}
    print("not reached")
run_script(main)
"""
SMALLER = "use a smaller batch or fewer samples:"
RAISE = "raise their limit (ulimit -u)"
NO_THREAD = """raise RuntimeError("can't start new thread")"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    "body, status, out, err",
    [
        (INTERRUPT, 130, "", "interrupted"),
        ("print('\\u00e9\\u4e2d\\ud800'); return", 0, "\\xe9\\u4e2d\\ud800", ""),
        ("print('x' * 10**6, 'end'); return", 0, "x" * 10**6 + " end", ""),
        ("raise UserError('give --x')", 2, "", "error (rank 3): give --x"),
        ("open('/x')", 2, "", "error (rank 3): [Errno 2] No such file or directory: '/x'"),
        ("raise MemoryError", 2, "", f"error (rank 3): out of memory; {SMALLER}"),
        (NO_THREAD, 2, "", f"error (rank 3): too many processes; {RAISE}: can't start new thread"),
        ("return 5", 5, "", ""),
    ],
)
def test_a_script_ends_in_one_line_and_shows_everything(body, status, out, err):
    command = [sys.executable, "-c", MAIN.format(body)]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "RANK": "3"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    found = done.returncode, done.stdout.strip(), done.stderr.strip()
    assert found == (status, out, err)


BUG = """
import sys, model, {script}
from runtime.command_line import run_script
def forward(self, *arguments):
    first, second = arguments, 2, 3
model.RMSNorm.forward = forward
run_script({script}.main)
"""


@pytest.mark.parametrize("script", ["sample", "eval_ppl"])
def test_a_bug_in_the_model_keeps_its_traceback(run, data, script):
    options = {"sample": ["--num-samples", 1], "eval_ppl": ["--datasets", data]}[script]
    done = run_script("-c", BUG.format(script=script), run, *options, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert "ValueError: too many values to unpack (expected 2)" in done.stderr.splitlines()[-1]


def test_the_traceback_of_a_mistake_is_shown_on_demand(tmp_path):
    done = run_script("sample.py", tmp_path, check=False, AOGPT_TRACEBACK="1")
    assert done.returncode == 2 and "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_reader_that_leaves_ends_the_script_without_a_traceback():
    body = MAIN.format("for i in range(10**6): print(i)")
    piped = f"{sys.executable} -c '{body}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "0\n", "")
