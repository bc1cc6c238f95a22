"""How the code reads: idioms that hide what a line does stay out."""

import ast
import functools
import subprocess

from helpers import ROOT


@functools.cache
def source_files():
    """Return (name, syntax tree, number of lines) of every Python file of the
    project."""
    files = []
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
            files.append((name, ast.parse(text), len(text.splitlines())))
    return files


def is_text(node):
    """Return whether a node is a text or a list that is written there."""
    return isinstance(node, ast.JoinedStr | ast.List) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_condition(node):
    """Return whether a node is a comparison, `and`, `or`, `not`, bool(...), or is named
    as a condition: has_bos, config.is_encoder, text.startswith(...)."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
        return True
    named = node.func if isinstance(node, ast.Call) else node
    name = getattr(named, "id", "") or getattr(named, "attr", "")
    if name.startswith(("is_", "has_")):
        return True
    return name in ("bool", "isinstance", "startswith", "endswith")


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
    """Return whether a value is a tuple or a dict of values that are written there, or
    a sum of such. A dict with keys that are computed is none: no call can name such an
    argument."""
    if isinstance(value, ast.Tuple):
        return bool(value.elts)
    if isinstance(value, ast.Dict):
        return any(isinstance(key, ast.Constant) for key in value.keys)
    if isinstance(value, ast.BinOp):
        return is_gathered(value.left) or is_gathered(value.right)
    if isinstance(value, ast.IfExp):
        return is_gathered(value.body) or is_gathered(value.orelse)
    is_dict = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict"
    return is_dict and bool(value.keywords)


def gathered_names(nodes):
    """Yield the variables to which such a tuple or dict is assigned."""
    for node in nodes:
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):  # values: dict[str, Any] = {...}
            targets = [node.target]
        if targets and is_gathered(node.value):
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id


def is_starred_generator(argument):
    """Return whether an argument is *(... for ...): how many arguments it gives is not
    seen in the call."""
    return is_starred(argument) and isinstance(argument.value, ast.GeneratorExp)


def starred_generators(tree):
    """Yield the lines on which a call unpacks a generator that is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(map(is_starred_generator, node.args)):
            yield node.lineno


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
    """Return the lines on which a call unpacks a tuple or a dict that its function, or
    the top of the file, has written: an editor does not see which arguments these are.
    Lists, such as words of a command line, may be unpacked."""
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
                unpacked = [arg.value for arg in node.args if is_starred(arg)]
                unpacked += [arg.value for arg in node.keywords if arg.arg is None]
                for value in unpacked:
                    if is_gathered(value) or getattr(value, "id", None) in names:
                        lines.add(node.lineno)
    return sorted(lines)


def is_starred(argument):
    return isinstance(argument, ast.Starred)


def places_of(lines_of):
    """Return FILE:LINE of each line that a check finds in the sources."""
    places = []
    for name, tree, _ in source_files():
        for line in lines_of(tree):
            places.append(f"{name}:{line}")
    return places


def test_no_call_unpacks_what_the_file_has_gathered():
    places = places_of(splats)
    assert not places, "name the arguments in the call: " + ", ".join(places)


def test_no_text_or_list_is_multiplied_by_a_condition():
    places = places_of(multiplied_texts)
    assert not places, "write an if: " + ", ".join(places)


def test_no_call_unpacks_a_generator():
    places = places_of(starred_generators)
    assert not places, "write a loop: " + ", ".join(places)


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
    tree = ast.parse("a = 's' * (n != 1)\nb, c = 1, 2\nd = 2 * n\n")
    assert list(multiplied_texts(tree)) == [1]
    assert list(packed_assignments(tree)) == [2]
    tree = ast.parse(
        "sizes = {'a': 1}\n"
        "f(**sizes)\n"
        "words = ['a']\n"
        "f(*words)\n"
        "f(*(1, 2))\n"
        "f(**{key: 1})\n"
    )
    assert splats(tree) == [2, 5]
    tree = ast.parse(
        "a = [1] * has_bos\nb = 's' * name.endswith('x')\nc = [0] * count\n"
    )
    assert list(multiplied_texts(tree)) == [1, 2]
    assert splats(ast.parse("sizes: dict = {'a': 1}\nf(**sizes)\n")) == [2]
    assert list(starred_generators(ast.parse("f(*(i for i in x))\nf(*x)\n"))) == [1]
    tree = ast.parse("found = known = 1\ndef f(what): seen = what\n")
    assert sorted(empty_names("a.py", tree)) == [
        (1, "found"),
        (1, "known"),
        (2, "what"),
    ]
    assert list(empty_names("aogpt/sampling/a.py", ast.parse("known = 1"))) == []
