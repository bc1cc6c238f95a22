"""How the code reads: idioms that hide what a line does stay out."""

import ast
import subprocess

from helpers import ROOT


def source_files():
    """(name, syntax tree, number of lines) of every Python file of the project."""
    listing = subprocess.run(
        ["git", "ls-files", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listing.stdout.split():
        path = ROOT / name
        if not path.is_symlink():
            text = path.read_text()
            yield name, ast.parse(text), len(text.splitlines())


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_condition(node):
    """A comparison, `and`, `or`, `not` or bool(...)."""
    called = getattr(getattr(node, "func", None), "id", "")
    is_operator = isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp)
    return is_operator or called in ("bool", "isinstance")


def multiplied_texts(tree):
    """The lines on which a text is multiplied by a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [(node.left, node.right), (node.right, node.left)]
            if any(is_text(one) and is_condition(other) for one, other in sides):
                yield node.lineno


def packed_assignments(tree):
    """The lines on which several values are assigned to several names, as a, b = 1, 2."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if isinstance(node.targets[0], ast.Tuple):
                yield node.lineno


def test_no_text_is_multiplied_by_a_condition():
    places = [
        f"{name}:{line}"
        for name, tree, _ in source_files()
        for line in multiplied_texts(tree)
    ]
    assert not places, "write an if: " + ", ".join(places)


def test_assignments_of_several_values_are_rare():
    """Two that belong together may share a line, such as a swap: 5 in 1,000 lines."""
    lines = 0
    places = []
    for name, tree, count in source_files():
        lines += count
        places += [f"{name}:{line}" for line in packed_assignments(tree)]
    assert len(places) <= 5 * lines / 1000, places


def test_the_idioms_are_found():
    tree = ast.parse("a = 's' * (n != 1)\nb, c = 1, 2\nd = 2 * n\n")
    assert list(multiplied_texts(tree)) == [1]
    assert list(packed_assignments(tree)) == [2]
