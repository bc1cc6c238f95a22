"""The layout: what the files of the paper import. That imports between packages run one
way is for import-linter (make lint)."""

import ast
import sys

import pytest
from helpers import ROOT, tracked

SOURCES = [ROOT / name for name in tracked("*.py") if "tests/" not in name]
PAPER = {
    "model": set(),
    "orders": {"model", "runtime"},
    "scoring": {"model", "runtime"},
    "objectives": {"model", "orders", "runtime", "scoring", "systems"},
}
PACKAGES = {
    "runtime",
    "systems",
    "data",
    "checkpoints",
    "sampling",
    "evaluation",
    "training",
}


def imports(path):
    """Yield the first words of what a file imports; of the package's own modules,
    without "aogpt"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or node.names[0].name).removeprefix("aogpt.")
            yield module.split(".")[0]


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_is_built_on_itself(name):
    imported = set(imports(ROOT / "aogpt" / f"{name}.py"))
    assert imported & (PACKAGES | PAPER.keys() | {"studies"}) <= PAPER[name]
    if name == "model":
        assert imported <= {"torch", *sys.stdlib_module_names}


def test_the_package_and_the_scripts_import_neither_extras_nor_studies():
    for path in SOURCES:
        folder = path.parts[len(ROOT.parts)]
        if folder == "extras":
            assert "studies" not in imports(path), path
        elif folder != "studies":
            assert not {"extras", "studies"} & set(imports(path)), path
