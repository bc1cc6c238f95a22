"""The layout: what the paper's three files import, and the names that other programs build on.

That imports between the folders run one way is for import-linter (make lint); it reads packages,
and these three are single files.
"""

import json
import subprocess
import sys

import pytest
from conftest import THINNED
from helpers import ROOT

FOLDERS = {"studies", "training", "evaluation", "sampling", "checkpoints"}
FOLDERS |= {"data", "runtime"}
PAPER = {"model", "orders", "objectives"}


@pytest.mark.parametrize(
    "name, may", [("model", {"orders"}), ("orders", set()), ("objectives", {"model", "orders"})]
)
def test_the_paper_is_built_on_itself_and_on_runtime_only(name, may):
    list_imports = f"import {name}, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", list_imports], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {module.split(".")[0] for module in json.loads(done.stdout)}
    assert imported & (FOLDERS | PAPER) <= may | {name, "runtime"}


def test_names_that_other_programs_import():
    import checkpoints
    import sampling

    for name in ("load_model", "load", "CheckpointError"):
        assert callable(getattr(checkpoints, name))
    for name in ("generate", "Generation", "Engine", "Plan", "TokenChoice", "group_sizes"):
        assert callable(getattr(sampling, name))
    for kind in ("l2r", "random", "mdm", "adaptive", "speculative"):
        assert callable(getattr(sampling, f"{kind}_plan"))


def test_tests_of_which_cases_are_left_out_are_tests():
    """One that was renamed would be run in full again, and nobody would notice."""
    source = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert all(f"def {name}(" in source for name in THINNED)
