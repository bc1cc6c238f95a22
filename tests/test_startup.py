"""Interrupts from the first import to the last line, closed outputs, and terminals that know ASCII
only: one line, and nothing is lost."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, run_script

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("script", ["sample.py", "train.py"])
def test_an_interrupt_of_the_imports_is_one_line(tmp_path, script):
    (tmp_path / "torch.py").write_text(INTERRUPT)
    done = run_script(script, "--help", check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 130 and done.stderr.strip() == "interrupted" and not done.stdout


MAIN = """
import os, signal, sys
from runtime.startup import begin
begin()
from runtime.command_line import run_script
class Victim:
    def __del__(self): os.kill(os.getpid(), signal.SIGINT)
def main():
    {}
    print("not reached")
run_script(main)
"""


@pytest.mark.parametrize(
    "body, status, out, err",
    [
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "", "interrupted"),
        ("Victim()", 130, "", "interrupted"),
        # as pydantic does
        (
            "try: os.kill(os.getpid(), signal.SIGINT)\n"
            "    except KeyboardInterrupt: raise RuntimeError('in place of it')",
            130,
            "",
            "interrupted",
        ),
        ("print('\\u00e9\\u4e2d\\ud800'); return", 0, "\\xe9\\u4e2d\\ud800", ""),
        ("print('x' * 10**6, 'end'); return", 0, "x" * 10**6 + " end", ""),
    ],
)
def test_a_script_ends_in_one_line_and_shows_everything(body, status, out, err):
    command = [sys.executable, "-c", MAIN.format(body)]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    found = done.returncode, done.stdout.strip(), done.stderr.strip()
    assert found == (status, out, err)


def test_closed_outputs_lose_no_result(run, tmp_path):
    """The first file that is opened would have the number of standard output."""
    path = tmp_path / "samples.jsonl"
    options = f"--num-samples 1 --jsonl {path} >&- 2>&- <&-"
    command = f"{sys.executable} sample.py {run} {options}"
    subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True)
    assert [*json.loads(path.read_text())][0] == "text"


@pytest.mark.parametrize("end", ["| true", "> /dev/full"])
def test_results_outlive_who_reads_what_is_printed(run, data, tmp_path, end):
    path = tmp_path / "table.json"
    options = f"--datasets {data} --max-sequences 2 --num-orders 1 --json {path}"
    command = f"{sys.executable} eval_ppl.py {run} {options} {end}"
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True)
    assert json.loads(path.read_text())["results"]
