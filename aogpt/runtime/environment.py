"""Imported first by every script: says in one line that packages are missing, as they
are where the environment is not activated, or that one cannot be imported for a
variable of the environment, and exits with status 2."""

import os
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

# Scripts draw into files, and matplotlib cannot be imported with a wrong backend.
os.environ["MPLBACKEND"] = "Agg"

# tqdm reads its variables when it is imported. Without any that can wait.
variables = [name for name in os.environ if name.startswith("TQDM_")]
if variables:
    try:
        import tqdm  # noqa: F401
    except ValueError as error:
        sys.stderr.write(f"error: {', '.join(variables)}: {error}; unset it\n")
        sys.exit(2)
