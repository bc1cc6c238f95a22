"""Imported first by every script: says in one line that packages are missing, as they
are where the environment is not activated, and exits with status 2."""

import sys
from importlib.util import find_spec

problem = ""
if find_spec("tyro") is None:  # which few have for another reason, unlike PyTorch
    problem = "lacks the packages of requirements.txt"
if sys.version_info < (3, 11):  # noqa: UP036  # what pip checks
    problem = "is older than 3.11"
if problem:
    sys.stderr.write(
        f"error: this Python, {sys.executable}, {problem}; activate the environment: "
        ". .venv/bin/activate (docs/install.md says how to make it)\n"
    )
    sys.exit(2)
