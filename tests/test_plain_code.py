"""How the code reads: idioms that hide what a line does stay out."""

import ast
import functools

import pytest
from helpers import ROOT, tracked


@functools.cache
def source_files():
    """Return (name, syntax tree, number of lines) of every Python file of the
    project."""
    files = []
    for name in tracked("*.py"):
        path = ROOT / name
        if not path.is_symlink():
            text = path.read_text()
            files.append((name, ast.parse(text), len(text.splitlines())))
    return files


def is_text(node):
    """Return whether a node is a text or a list that is written there."""
    return isinstance(node, ast.JoinedStr | ast.List) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_condition(node):
    """Return whether a node is a comparison, `and`, `or` or `not`, or is named as a
    condition: has_bos, config.is_encoder, text.startswith(...)."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
        return True
    named = node.func if isinstance(node, ast.Call) else node
    name = getattr(named, "id", "") or getattr(named, "attr", "")
    return name.startswith(("is", "has_", "bool", "startswith", "endswith"))


def multiplied_texts(tree):
    """Yield the lines on which a text or a list is multiplied by a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [(node.left, node.right), (node.right, node.left)]
            if any(is_text(one) and is_condition(other) for one, other in sides):
                yield node.lineno


def packed_assignments(tree):
    """Yield the lines on which several values are assigned to several names, as a, b =
    1, 2."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if isinstance(node.targets[0], ast.Tuple):
                yield node.lineno


def is_gathered(value):
    """Return whether a value is a tuple or a dict of values that are written there. A
    dict with keys that are computed is none: no call can name such an argument."""
    if isinstance(value, ast.Tuple):
        return bool(value.elts)
    if isinstance(value, ast.Dict):
        return any(isinstance(key, ast.Constant) for key in value.keys)
    return False


def gathered_names(nodes):
    """Yield the variables to which such a tuple or dict is assigned."""
    for node in nodes:
        if isinstance(node, ast.Assign) and is_gathered(node.value):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and is_gathered(node.value):
            yield getattr(node.target, "id", "")


# Names that say nothing of what a variable holds.
EMPTY_NAMES = {"found", "told", "made", "how", "what", "others", "which", "of", "kept"}
# Where `known` is the number or the mask of the known tokens; elsewhere it is empty.
KNOWN_TOKENS = (
    "aogpt/sampling/",
    "aogpt/systems/",
    "aogpt/scoring.py",
    "aogpt/evaluation/",
    "aogpt/objectives.py",
)
# Keys of a file format: [ratios] of an experiment.
ALLOWED_NAMES = {("studies/verdicts.py", "of")}


def empty_names(file, tree):
    """Yield (line, name) of each variable and parameter whose name says nothing."""
    empty = set(EMPTY_NAMES)
    if not file.startswith(KNOWN_TOKENS):
        empty.add("known")
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name in empty and (file, name) not in ALLOWED_NAMES:
            yield node.lineno, name


def splats(tree):
    """Return the lines on which a call unpacks a generator, or a tuple or a dict that
    its function, or the top of the file, has written: an editor does not see which
    arguments these are. Lists, such as words of a command line, may be unpacked."""
    constants = set(gathered_names(tree.body))
    lines = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            continue
        names = set(constants)
        if isinstance(scope, ast.FunctionDef):
            names.update(gathered_names(ast.walk(scope)))
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                unpacked = [x.value for x in node.args if isinstance(x, ast.Starred)]
                unpacked += [x.value for x in node.keywords if x.arg is None]
                for value in unpacked:
                    is_hidden = is_gathered(value) or isinstance(
                        value, ast.GeneratorExp
                    )
                    if is_hidden or getattr(value, "id", None) in names:
                        lines.add(node.lineno)
    return sorted(lines)


def places_of(lines_of):
    """Return FILE:LINE of each line that a check finds in the sources."""
    places = []
    for name, tree, _ in source_files():
        for line in lines_of(tree):
            places.append(f"{name}:{line}")
    return places


@pytest.mark.parametrize(
    "lines_of, advice",
    [
        (splats, "name the arguments in the call, or write a loop"),
        (multiplied_texts, "write an if"),
    ],
)
def test_no_line_has_an_idiom_that_hides_what_it_does(lines_of, advice):
    places = places_of(lines_of)
    assert not places, f"{advice}: " + ", ".join(places)


def test_names_say_what_a_variable_holds():
    places = []
    for file, tree, _ in source_files():
        for line, name in empty_names(file, tree):
            places.append(f"{file}:{line}: {name}")
    assert not places, "take a noun of the field: " + ", ".join(places)


def test_assignments_of_several_values_are_rare():
    """Two that belong together may share a line, such as a swap: 5 in 1,000 lines."""
    lines = 0
    places = []
    for name, tree, count in source_files():
        lines += count
        places += [f"{name}:{line}" for line in packed_assignments(tree)]
    assert len(places) <= 5 * lines / 1000, places


def test_the_idioms_are_found():
    tree = ast.parse(
        "sizes = {'a': 1}\n"
        "f(**sizes)\n"
        "words = ['a']\n"
        "f(*words, **{key: 1})\n"
        "f(*(1, 2))\n"
        "f(*(i for i in x))\n"
        "b, c = 's' * (n != 1), [0] * count\n"
        "found = known = 's' * name.endswith('x')\n"
    )
    assert splats(tree) == [2, 5, 6]
    assert sorted(multiplied_texts(tree)) == [7, 8]
    assert list(packed_assignments(tree)) == [7]
    assert list(empty_names("a.py", tree)) == [(8, "found"), (8, "known")]
    assert list(empty_names("aogpt/sampling/a.py", tree)) == [(8, "found")]
