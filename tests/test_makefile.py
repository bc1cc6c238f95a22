"""`make` installs requirements with uv where it is on the path, else with pip, and on
Linux without a GPU takes PyTorch from its CPU index."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

TARGET = ".venv/.requirements"
WITHOUT_GPU = pytest.mark.skipif(
    sys.platform != "linux" or any(Path("/dev").glob("nvidia[0-9]*")),
    reason="needs Linux without a GPU",
)
EDITABLE = "--no-deps --no-build-isolation --editable ."
# Of a stub: what it installs is written down; an index fails if $INDEX_FAILS is set.
RECORD = """echo "$*" >> installed.txt
case "$*" in *--index-url*) exit ${INDEX_FAILS:-0};; esac"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with what `make` installs by, and programs of its own."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("install.py", "threads.py"):
        shutil.copy(ROOT / "requirements" / name, tmp_path / "requirements")
    (tmp_path / "requirements.txt").write_text("torch==0.0.1\nnumpy\n")
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\npytest\n")
    (tmp_path / "requirements" / "harness.txt").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    make_program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    return tmp_path


def make_program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_environment_with_pip(folder):
    """Make a .venv whose Python runs scripts and records what pip is to install."""
    run = f'case "$1" in -m) ;; *) exec {sys.executable} "$@";; esac'
    version = 'case "$*" in *--version) exit 0;; esac'
    program = folder / ".venv" / "bin" / "python"
    make_program(program, f"{run}\n{version}\n{RECORD}")


def run_make(folder, *arguments, fails=False, **variables):
    """As a user would, without uv unless the folder has one, and not as a part of the
    make that runs the tests; it succeeds, unless `fails`."""
    elsewhere = [
        place
        for place in os.environ["PATH"].split(":")
        if not (Path(place) / "uv").exists()
    ]
    path = ":".join([str(folder / "bin"), *elsewhere])
    finished = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=os.environ | {"PATH": path} | variables,
        capture_output=True,
        text=True,
    )
    assert bool(finished.returncode) == fails, finished.stderr
    return finished


def installed(folder):
    """Return what was installed, a list of lines, and forget it."""
    record = folder / "installed.txt"
    lines = record.read_text().splitlines()
    record.unlink()
    return lines


@WITHOUT_GPU
def test_uv_is_used_where_it_is_on_the_path(folder):
    make = f"mkdir -p .venv/bin && ln -s {sys.executable} .venv/bin/python"
    make_program(folder / "bin" / "uv", f'case "$1" in venv) {make};; esac\n{RECORD}')
    finished = run_make(folder, TARGET, f"PYTHON={sys.executable}")
    first, torch, rest, package = installed(folder)
    assert first.startswith("venv --quiet --seed --python")
    assert torch.endswith("/whl/cpu torch==0.0.1")
    start = "pip install --python .venv/bin/python"
    assert rest == f"{start} -r requirements.txt"
    assert package == f"{start} {EDITABLE}"
    assert "creating the environment .venv" in finished.stdout
    assert "up to date" in run_make(folder, TARGET).stdout


@WITHOUT_GPU
def test_without_a_gpu_pytorch_alone_comes_from_the_cpu_index(folder):
    make_environment_with_pip(folder)
    finished = run_make(folder, TARGET, "CPU_INDEX=http://mirror/cpu")
    torch, rest, package = installed(folder)
    assert torch.endswith("--no-deps --index-url http://mirror/cpu torch==0.0.1")
    for line in (rest, package):
        assert "index" not in line
    assert rest.endswith("-r requirements.txt")
    assert package.endswith(EDITABLE)
    assert "nothing from there" not in finished.stdout


@WITHOUT_GPU
def test_an_index_that_does_not_answer_costs_one_line(folder):
    make_environment_with_pip(folder)
    finished = run_make(folder, TARGET, INDEX_FAILS="1")
    assert finished.stdout.count("nothing from there: PyTorch's default build") == 1
    assert not finished.stderr


def test_with_a_gpu_everything_comes_from_the_default_index(folder):
    make_program(folder / "bin" / "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    make_environment_with_pip(folder)
    run_make(folder, TARGET)
    rest, package = installed(folder)
    assert rest.endswith("-r requirements.txt")
    assert package.endswith(EDITABLE)


def test_an_included_file_pins_pytorch_too(folder):
    """As requirements-dev.txt does, for an environment that has another version."""
    make_environment_with_pip(folder)
    (folder / TARGET).touch()
    run_make(folder, "-o", TARGET, ".venv/.requirements-dev")
    assert installed(folder)[-1].endswith("-r requirements-dev.txt")


def test_what_an_installer_says_is_shown_where_it_fails(folder):
    make_environment_with_pip(folder)
    python = folder / ".venv" / "bin" / "python"
    script = python.read_text()
    fails = 'case "$*" in *-r*) echo "ERROR: no space left"; exit 1;; esac'
    make_program(python, f"{script}\n{fails}")
    finished = run_make(folder, TARGET, fails=True)
    assert "ERROR: no space left" in finished.stderr
    assert not (folder / TARGET).exists()


def test_an_environment_without_pip_or_uv_is_refused(folder):
    command = [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"]
    subprocess.run(command, check=True)
    finished = run_make(folder, TARGET, fails=True)
    assert ".venv has no pip, and uv is not found" in finished.stderr


def test_an_old_python_is_refused_before_anything_is_installed(folder):
    old = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    script = f"shift; exec '{sys.executable}' -c '{old}' \"$1\""
    make_program(folder / "bin" / "python3", script)
    finished = run_make(folder, TARGET, fails=True)
    assert "Python 3.11 or newer is needed" in finished.stderr
    assert f"make PYTHON=python3.11 {TARGET}, or" in finished.stderr
    assert "uv venv --python 3.12" in finished.stderr
    assert not (folder / ".venv").exists()


def test_threads_follow_what_is_idle(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "requirements")
    import threads

    for idle, wanted in ((2.0, "2"), (60.0, "2"), (1.2, "1"), (-3.0, "1")):
        monkeypatch.setattr(threads, "idle_cores", lambda idle=idle: idle)
        threads.main()
        captured = capsys.readouterr()
        assert captured.out == f"{wanted}\n"
        assert captured.err.startswith(f"== threads: {wanted}; idle cores: {idle}")
    monkeypatch.undo()
    assert threads.idle_cores(0.2) <= os.cpu_count()
