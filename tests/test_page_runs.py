"""The page of model.py is what runs: of the paper recipe and of the fast one,
`train.py` and `eval_ppl.py` run its lines, and none of them does without one of its
methods."""

import ast
import inspect
import sys
from dataclasses import replace

import coverage
import pytest
from helpers import ALONE, ROOT

import eval_ppl
import train
from aogpt import model as page
from aogpt.model import AOGPT, MLP, Attention, Block, Pass, Transformer
from aogpt.training.config import from_command_line

CLASSES = (Pass, Attention, MLP, Block, page.HeadLoss, Transformer, AOGPT)
SIZES = (
    "--model.vocab-size 320 --model.block-size 64 --model.n-layer 2 --model.n-head 4 "
    "--model.n-embd 32 --train.batch-size 8 --train.micro-batch-size 8 "
    "--train.device cpu --train.no-compile --optim.warmup-steps 1 --eval.interval 2 "
    "--eval.sequences 4 --checkpoint.interval 2"
).split()
RECIPES = {
    "paper": ROOT / "configs" / "aogpt_small.toml",
    "fast": ROOT / "configs" / "aogpt_small_fast.toml",
}

# Lines that neither recipe needs: other targets, a hidden [None], what the Llama family
# has, records whose end is given, and what serves other files.
UNREACHED = {
    "return attention(q, k, v, mask=self.allowed, dropout=self.dropout)",
    "heads_per_value = q.shape[2] // v.shape[2]",
    "start_value = v[:, :1].repeat_interleave(heads_per_value, dim=2)",
    "rest = attention(",
    "return torch.cat([start_value.flatten(2), rest], dim=1)",
    "self.gate = nn.Linear(c.n_embd, width, bias=c.mlp_bias)",
    "hidden = F.silu(self.gate(x)) * self.fc(x)",
    "weights.insert(1, self.gate.weight)",
    "self.wtpe = TargetTable(c, c.n_embd, wave_std=None)",
    "x = x + p.lookup(self.wtpe.weight)",
    "x = x + p.added",
    "self.head.weight = self.wte.weight",
    "return self.head_logits(self.hidden(*inputs))",
    "ids = torch.arange(self.config.vocab_size, device=self.wte.weight.device)",
    "self.excluded = (ids == end) | (ids >= vocab_size)",
    "logits = self.without_excluded(logits)",
    "assert self.excluded is not None",
    "return logits.masked_fill(self.excluded, IMPOSSIBLE)",
    "self.wtpe = TargetTable(c, c.n_embd)",
    "assert model.wtpe is not None",
    "self.added = self.lookup(model.wtpe.weight)",
    "raise ValueError(",
}

# Methods that one of the recipes does without, and why; `logits` is for users.
ONLY_OF = {
    "paper": {"Pass.modulation", "Pass.lookup", "AOGPT.target_vectors"},
    "fast": {"Transformer.angles_at"},
}
OF_USERS = {"Transformer.logits"}
# where the end of a record is given
OF_RECORDS = {"Transformer.exclude", "Transformer.without_excluded"}
OF_MUON = {"Attention.matrices", "MLP.matrices"}
OF_LOADING = {"Transformer._apply"}  # training makes the weights where they are


def methods():
    """(class, name) of every method that is written on the page."""
    for kind in CLASSES:
        for name, value in vars(kind).items():
            if inspect.isfunction(value):
                yield kind, name


def run(monkeypatch, script, *words):
    """Run a script in this process, without its handling of errors."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    script.main()


def train_words(recipe, data, out):
    words = [RECIPES[recipe], "--data.folder", data, "--out", out, "--name", recipe]
    return [*map(str, words), "--train.steps", "2", *SIZES]


@pytest.fixture(scope="module")
def configs(data, tmp_path_factory):
    """Return the config of a finished run of each recipe."""
    out = tmp_path_factory.mktemp("page")
    configs_by_recipe = {}
    for recipe in RECIPES:
        configs_by_recipe[recipe] = from_command_line(
            train_words(recipe, data, out), ""
        )
        train.train(configs_by_recipe[recipe], ALONE)
    return configs_by_recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_builds_the_class_on_the_page(configs, recipe):
    from aogpt.checkpoints import load_model

    assert type(load_model(configs[recipe].run_folder)) is AOGPT


def statements_of_methods(path):
    """Return the first line of each statement in the methods of CLASSES, {number:
    text}."""
    text = path.read_text()
    lines = text.splitlines()
    names = {kind.__name__ for kind in CLASSES}
    statements = {}
    for kind in ast.parse(text).body:
        if not isinstance(kind, ast.ClassDef) or kind.name not in names:
            continue
        for method in kind.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            for node in ast.walk(method):
                is_docstring = isinstance(node, ast.Expr) and isinstance(
                    node.value, ast.Constant
                )
                if isinstance(node, ast.stmt) and node is not method:
                    if not is_docstring:
                        statements[node.lineno] = lines[node.lineno - 1].strip()
    return statements


def test_every_line_of_the_page_runs_in_one_of_the_recipes(monkeypatch, data, tmp_path):
    """Lines of other systems, which are named above, are left out. Chunks of the head
    are small."""
    path = ROOT / "aogpt" / "model.py"
    monkeypatch.setitem(page.CHUNK_ELEMENTS, "cpu", 1)
    recorder = coverage.Coverage(include=[str(path)], data_file=None)
    recorder.start()
    try:
        for recipe in RECIPES:
            run(monkeypatch, train, *train_words(recipe, data, tmp_path))
            words = [tmp_path / recipe, "--datasets", data, "--max-sequences", 2]
            run(monkeypatch, eval_ppl, *words)
    finally:
        recorder.stop()
    missing = set(recorder.analysis2(str(path))[3])
    statements = statements_of_methods(path)
    assert {statements[line] for line in missing & statements.keys()} == UNREACHED


class Broken(Exception):
    pass


@pytest.mark.parametrize("command", ["train", "eval_ppl"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_command_does_without_a_method_of_the_page(
    monkeypatch, data, configs, tmp_path, recipe, command
):
    """Each fails if that method does. Without the parsing of the command line."""
    (other,) = RECIPES.keys() - {recipe}
    config = configs[recipe]
    arguments = eval_ppl.Arguments(
        run=str(config.run_folder), datasets=(str(data),), max_sequences=2
    )

    def fail(*arguments, **keywords):
        raise Broken

    survived = set()
    for kind, name in methods():
        method = f"{kind.__name__}.{name}"
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fail)
            try:
                if command == "train":
                    train.train(replace(config, out=str(tmp_path / method)), ALONE)
                else:
                    eval_ppl.evaluate(arguments, ALONE)
            except Broken:
                continue
        survived.add(method)
    expected = OF_USERS | OF_RECORDS | ONLY_OF[other]
    if command == "train":
        expected |= OF_LOADING
    if command == "eval_ppl" or recipe == "paper":
        expected |= OF_MUON
    assert survived == expected
