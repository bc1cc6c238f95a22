"""The commands in docs/paper.md parse."""

import re
import shlex

import pytest
from helpers import ROOT

import eval_gen
import eval_ppl
import sample
from data import prepare
from studies import bench
from training import config as configuration

PAGE = (ROOT / "docs" / "paper.md").read_text()
COMMANDS = re.findall(r"`((?:python|torchrun) [^`]*)`", PAGE)
SCRIPTS = {
    "eval_gen.py": (eval_gen, "evaluate"),
    "eval_ppl.py": (eval_ppl, "evaluate"),
    "sample.py": (sample, "sample"),
    "data/prepare.py": (prepare, "prepare"),
    "studies.bench": (bench, "bench_decode"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_papers_tables_parses(command, monkeypatch):
    """And names options that go together, data sets and configs that exist."""
    words = [word for word in shlex.split(command)[1:] if word != "-m"]
    script, *words = words[words[0].startswith("--nproc") :]
    if script == "train.py":
        monkeypatch.chdir(ROOT)
        assert configuration.from_command_line(words, "").name == words[0][8:-5]
        return
    (module, name), parsed = SCRIPTS[script], []
    monkeypatch.setattr(module, name, lambda arguments, *_: parsed.append(arguments))
    monkeypatch.setattr("sys.argv", [script, *words])
    module.main()
    [arguments] = parsed
    if script == "eval_gen.py":
        assert len(arguments.decoding.rows()) == 5 * len(arguments.decoding.settings)
    if script == "eval_ppl.py":
        eval_ppl.check_arguments(arguments)
        assert set(arguments.datasets) <= set(prepare.DATASETS)
    if script == "sample.py":
        sample.modes.with_mode_defaults(arguments.decoding)


def test_the_page_has_a_command_for_every_script_and_few_words():
    used = {script for script in [*SCRIPTS, "train.py"] if any(script in c for c in COMMANDS)}
    assert used == {*SCRIPTS, "train.py"}
    assert len(re.sub(r"`[^`]*`", "", PAGE).split()) <= 600
