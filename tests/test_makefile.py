"""`make` installs requirements with pip or, where the environment has none, with uv."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

TARGET = ".venv/.requirements"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the Makefile and no requirements, and programs of its
    own."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "bin").mkdir()
    return tmp_path


def make_program(folder, name, script):
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def run_make(folder, *arguments):
    """As a user would, and not as a part of the make that runs the tests."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def test_an_environment_without_pip_is_filled_by_uv(folder):
    """As `uv venv` makes it."""
    make_program(folder, "uv", 'echo "uv $*"')
    command = [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"]
    subprocess.run(command, check=True)
    finished = run_make(folder, TARGET, "TORCH=cpu", "PYTHON=false")
    assert finished.returncode == 0, finished.stderr
    words = "uv pip install --python .venv/bin/python --torch-backend cpu"
    assert f"{words} -r requirements.txt" in finished.stdout
    assert finished.stdout.rstrip().endswith("--no-build-isolation --editable .")
    again = run_make(folder, TARGET)
    assert "up to date" in again.stdout


def test_pip_is_used_where_it_is_and_may_take_the_cpu_build(folder):
    make_program(folder, "uv", "exit 3")
    make_program(folder, "python", 'echo "python $*"')
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(folder / "bin" / "python", folder / ".venv" / "bin")
    for option, wanted in ((), False), (("TORCH=cpu",), True):
        finished = run_make(folder, "--always-make", TARGET, *option)
        assert finished.returncode == 0, finished.stderr
        assert "python -m pip install" in finished.stdout
        assert ("whl/cpu" in finished.stdout) is wanted
        # For `import aogpt` in every folder.
        assert finished.stdout.rstrip().endswith("--no-build-isolation --editable .")
        assert "0.4 GB" in finished.stdout


def test_an_old_python_is_told_before_anything_is_installed(folder):
    old = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    make_program(folder, "python3", f"shift; exec '{sys.executable}' -c '{old}' \"$1\"")
    finished = run_make(folder, TARGET, "TORCH=cpu")
    assert finished.returncode != 0
    assert "Python 3.11 or newer is needed" in finished.stderr
    assert f"make PYTHON=python3.11 {TARGET} TORCH=cpu, or" in finished.stderr
    assert "uv venv --python 3.12" in finished.stderr
    assert not (folder / ".venv").exists()
