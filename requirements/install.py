"""Install pinned requirements into .venv, with uv where it is on the path, else with
pip. `make` calls it; by hand: docs/install.md.

    python3 requirements/install.py requirements.txt --editable .

On Linux without an NVIDIA GPU, PyTorch alone comes from its CPU index, a tenth of the
download; if that index does not answer, it comes from the default one. Every other
package comes from the default index only. It is not a part of the package and needs
the standard library alone, because nothing is installed yet.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from urllib.parse import unquote

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LARGE = re.compile(r"Downloading (\S+)\s.*?(\d+(?:\.\d+)?)\s*(Mi?B|Gi?B)")
UNPACKING = re.compile(r"Installing collected packages:(.*)|Prepared (\d+) packages")
say = functools.partial(print, flush=True)


def has_gpu():
    """Return whether this machine has an NVIDIA GPU: a device file, or nvidia-smi that
    lists one (WSL has no device file)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        finished = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU" in finished.stdout


def pinned_torch(files):
    """Return the line torch==... of requirement files and of the files that they
    include, or None."""
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").split("\n"):
            if line.startswith("torch=="):
                return line.strip()
            if line.startswith("-r "):
                included = pinned_torch([Path(file).parent / line[3:].strip()])
                if included:
                    return included
    return None


def is_installed(python, requirement):
    """Return whether the environment has this version, of any build ("2.13.0+cpu")."""
    name, version = requirement.split("==")
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    finished = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return finished.stdout.strip().split("+")[0] == version


def make_environment(folder, uv):
    """Create a virtual environment with this Python, unless it exists."""
    if (folder / "bin" / "python").exists():
        return
    say(f"== creating the environment {folder}: some seconds")
    if uv:
        # --seed adds pip: without it `pip install` would fill another environment.
        command = [uv, "venv", "--quiet", "--seed", "--python", sys.executable, folder]
    else:
        command = [sys.executable, "-m", "venv", folder]
    if subprocess.run(command).returncode:
        sys.exit(f"{folder} could not be made; see docs/install.md")


def installer(python, uv):
    """Return the command that installs packages for a Python, without its arguments."""
    if uv:
        return [uv, "pip", "install", "--python", python]
    pip = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
    if pip.returncode:
        folder = Path(python).parents[1]
        sys.exit(f"{folder} has no pip, and uv is not found: install uv, or remove it")
    command = [python, "-m", "pip", "install", "--progress-bar=off", "--no-input"]
    if not sys.dont_write_bytecode:
        # Compiling all files of PyTorch takes longer than unpacking them. Python
        # compiles those that are used when it imports them, if it may keep them.
        command.append("--no-compile")
    return [*command, "--disable-pip-version-check"]


def run(command, variables=()):
    """Run an installer and return its exit status and last lines. Of its output only
    large downloads and the start of unpacking are shown, each before its silence."""
    lines = deque(maxlen=20)
    process = subprocess.Popen(
        command,
        env={**os.environ, **dict(variables)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for line in process.stdout:
        lines.append(line)
        large = LARGE.search(line)
        unpacking = UNPACKING.search(line)
        if large and (large[3].startswith("G") or float(large[2]) >= 20):
            file = unquote(large[1].rpartition("/")[2])
            name = "-".join(file.split("-")[:2])
            say(f"   downloading {name}: {large[2]} {large[3]}")
        elif unpacking:
            names = unpacking[1] or ""  # pip's, of which uv prints the number alone
            count = unpacking[2] or str(len(names.split(",")))
            say(f"   unpacking{names if count == '1' else f' {count} packages'}")
    return process.wait(), "".join(lines)


def install_cpu_torch(command, requirement, index):
    """Install PyTorch alone from an index of CPU builds; return whether that worked."""
    say(f"   no NVIDIA GPU here: {requirement} for CPUs from {index}")
    say("   with the other packages about 0.4 GB to download")
    arguments = ["--no-deps", "--index-url", index, requirement]
    variables = {
        "PIP_RETRIES": "1",
        "PIP_TIMEOUT": "10",
        "PIP_DEFAULT_TIMEOUT": "10",
        "UV_HTTP_RETRIES": "1",
        "UV_HTTP_TIMEOUT": "10",
        # This package must not come from further indexes of the user's settings.
        "PIP_EXTRA_INDEX_URL": "",
        "UV_EXTRA_INDEX_URL": "",
    }
    status, _ = run([*command, *arguments], variables)
    if status:
        say("   nothing from there: PyTorch's default build instead, about 3 GB")
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="requirement files")
    parser.add_argument("--environment", type=Path, default=Path(".venv"))
    parser.add_argument(
        "--editable", metavar="FOLDER", help="this package, as it stands"
    )
    parser.add_argument(
        "--cpu-index", default=CPU_INDEX, help="of PyTorch's CPU builds, e.g. a mirror"
    )
    options = parser.parse_args()
    uv = shutil.which("uv")
    make_environment(options.environment, uv)
    python = str(options.environment / "bin" / "python")
    command = installer(python, uv)
    torch = pinned_torch(options.files)
    if torch and is_installed(python, torch):
        torch = None
    tool = "uv" if uv else "pip"
    files = " ".join(options.files)
    say(f"== installing {files} into {options.environment} with {tool}")
    if torch and sys.platform == "linux" and not has_gpu():
        install_cpu_torch(command, torch, options.cpu_index)
    elif torch and sys.platform == "linux":
        say("   with PyTorch for NVIDIA GPUs, about 3 GB to download")
    steps = [[word for file in options.files for word in ("-r", file)]]
    if options.editable:
        # PyTorch brings setuptools, which builds the package.
        settings = ["--no-deps", "--no-build-isolation"]
        steps.append([*settings, "--editable", options.editable])
    for arguments in steps:
        status, lines = run([*command, *arguments])
        if status:
            sys.exit(f"{lines}\n{' '.join([*command, *arguments])} failed")


if __name__ == "__main__":
    main()
