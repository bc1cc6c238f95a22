"""Options: each is set by a config, study, result, example or page of the docs, or on a
list here with the reason why it stays."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
from helpers import ROOT, tracked

import eval_gen
import eval_ppl
import sample
from aogpt.training import config as configuration
from aogpt.training.config import Config

# Keys of train.py that nothing sets, and why they stay.
ALLOWED = {
    "order.share": "a setting of two kinds of orders, as in context_l2r:share=0.3",
    "train.timeout": "large runs need more time to write a checkpoint",
}
PLACES = ["configs", "studies", "results", "docs", "Makefile", "README.md"]
SUFFIXES = (".toml", ".py", ".md", ".ipynb", ".json", "")


@pytest.fixture(scope="module")
def texts():
    """Return the texts that may set options, by their paths."""
    contents = {}
    for name in tracked(*PLACES):
        path = Path(name)
        if path.suffix in SUFFIXES and (ROOT / path).is_file():
            contents[name] = (ROOT / path).read_text()
    return contents


def keys_in(table, prefix=""):
    """Yield the dotted keys of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                yield from keys_in(item, f"{prefix}{key}.")
        else:
            yield prefix + key


def is_given(option, texts):
    """Return whether a command in a text has an option."""
    pattern = re.compile(rf"{re.escape(option)}(?![\w-])")
    return any(pattern.search(text) for text in texts.values())


def test_every_key_of_a_config_is_set_somewhere(texts):
    in_tables = set()
    for name, text in texts.items():
        if name.endswith(".toml"):
            in_tables.update(keys_in(tomllib.loads(text)))
    unset = []
    for key in configuration.dotted(Config()):
        table, _, name = key.rpartition(".")
        if key.removeprefix("model.") in configuration.NOT_OPTIONS:
            continue
        is_set = any(one == key or one.endswith(f".{key}") for one in in_tables)
        is_set = is_set or key == "schedule"  # its tables have keys of their own
        option = "--" + key.replace("_", "-")
        negated = f"--{table}.no-{name}".replace("_", "-")
        is_set = is_set or is_given(option, texts) or is_given(negated, texts)
        # studies change configs by their keys
        quoted = f'"{key}"'
        is_set = is_set or any(
            quoted in text for path, text in texts.items() if path.endswith(".py")
        )
        if not is_set:
            unset.append(key)
    untold = sorted(set(unset) - ALLOWED.keys())
    assert not untold, f"set {untold} in {PLACES}, or say in ALLOWED why it stays"


def options_of(table):
    """Yield the names of the options of a dataclass."""
    hints = get_type_hints(table)
    for field in dataclasses.fields(table):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from options_of(hints[field.name])
        else:
            yield "--" + field.name.replace("_", "-")


@pytest.mark.parametrize("script", [sample, eval_ppl, eval_gen])
def test_every_option_of_a_script_is_set_somewhere(script, texts):
    positional = {"--run", "--other", "--sources"}
    options = set(options_of(script.Arguments)) - positional
    assert len(options) > 10
    assert not [option for option in options if not is_given(option, texts)]


# The most options of each script: a new one enters for one that leaves.
MOST = {"train": 65, "sample": 22, "eval_ppl": 18, "eval_gen": 16}


def test_no_script_has_more_options_than_before():
    counts = {"train": len(configuration.dotted(Config()))}
    counts["train"] -= len(configuration.NOT_OPTIONS)
    for script in (sample, eval_ppl, eval_gen):
        counts[script.__name__] = len(set(options_of(script.Arguments)))
    for name, count in counts.items():
        assert count <= MOST[name], f"{name}: a new option enters for one that leaves"
