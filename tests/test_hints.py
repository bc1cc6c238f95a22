"""Commands that the programs print, in messages and in --help, can be run: they
parse."""

import ast
import re
import shlex
import tomllib

import pytest
from helpers import ROOT, shell_lines
from test_docs import COMMANDS, cases_of, module_of, script_of
from test_docs import parse as parse  # a fixture

from aogpt.data import catalogue

SOURCES = [
    path
    for path in [
        *ROOT.glob("*.py"),
        *(ROOT / "aogpt").rglob("*.py"),
        *(ROOT / "extras").rglob("*.py"),
        *(ROOT / "studies").rglob("*.py"),
    ]
    if not path.is_symlink() and "tests" not in path.parts
]
FIELDS = {  # what a message may have in the place of a variable
    "name": "stories",
    "options": "--name stories --data.folder data/stories --data.end given",
    "last": "stories",
    "folder": "data/own",
    "place": "data/own",
    "config": "configs/quickstart.toml",
    "sample_options(config, predicts_end)": '--mode l2r --prompt "..." --until-end',
    "kills": "10",
    "seed": "0",
    "path": "configs/quickstart.toml",
    "command": "-m studies.speculation",
}
COMMAND = re.compile(
    r"(?:python (?:-m )?[\w./]+|torchrun .*?\.py|^aogpt [a-z]+)(?: .*|$)", re.M
)
END = re.compile(r"\s{2,}|;|\)|`|, (?:or|then) | \(as | makes ")  # of the command


def texts(path):
    """Yield the strings of a source file, docstrings and messages alike."""
    tree = ast.parse(path.read_text())
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            text = ""
            for value in node.values:
                if isinstance(value, ast.Constant):
                    text += value.value
                else:
                    text += FIELDS.get(ast.unparse(value.value), "X")
            yield text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node.value


def commands_in(path):
    for text in texts(path):
        text = text.replace("{}", FIELDS["name"])
        for field, value in FIELDS.items():  # of texts for str.format
            text = text.replace(f"{{{field}}}", value)
        for line in shell_lines(text):
            if match := COMMAND.search(line.strip()):
                command = END.split(match[0])[0]
                yield tuple(shlex.split(re.sub(r" \.\.\.(?= |$)", "", command)))


HINTS = {words: path.name for path in SOURCES for words in commands_in(path)}


def check(words, parse):
    """Parse a command, unless it is one of the pages, which test_docs.py parses."""
    if words in COMMANDS:
        return
    script, arguments = script_of(words)
    without_options = ("train.py", "aogpt", "studies.filling")
    assert script in without_options or module_of(script)
    if not arguments or "--help" in arguments:
        return
    arguments = [
        word.replace("CONFIG.toml", "configs/quickstart.toml") for word in arguments
    ]
    parse(script, arguments)


@pytest.mark.parametrize("words", cases_of(HINTS))
def test_a_printed_command_parses(words, parse, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(words, parse)


def test_hints_are_found():
    scripts = {script_of(words)[0] for words in HINTS}
    assert {"train.py", "data/prepare.py", "studies.findings"} <= scripts
    assert len(HINTS) >= 70


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=str)
def test_the_data_of_each_config_can_be_made_as_the_message_says(
    path, parse, monkeypatch
):
    """What train.py prints where the data is missing."""
    monkeypatch.chdir(ROOT)
    config = tomllib.loads(path.read_text())
    folder = config.get("data", {}).get("folder", "data/openwebtext")
    command = catalogue.command_for(folder)
    words = [word for word in shlex.split(command) if word != "..."]
    check(tuple(words), parse)
    prepared_folder = words[-1] if "--out" in words else f"data/{words[-1]}"
    assert prepared_folder == folder
