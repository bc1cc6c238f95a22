"""The page of model.py is what runs: `train.py` and `eval_ppl.py` run its lines, of the
paper recipe or of the fast one."""

import ast
import sys

import coverage
from helpers import ROOT

import eval_ppl
import train
from aogpt import model as page
from aogpt.checkpoints import load_model
from aogpt.model import AOGPT, MLP, Attention, Block, Pass, Transformer

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


def run(monkeypatch, script, *words):
    """Run a script in this process, without its handling of errors."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    script.main()


def train_words(recipe, data, out):
    words = [RECIPES[recipe], "--data.folder", data, "--out", out, "--name", recipe]
    return [*map(str, words), "--train.steps", "2", *SIZES]


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
            assert type(load_model(tmp_path / recipe)) is AOGPT
    finally:
        recorder.stop()
    missing = set(recorder.analysis2(str(path))[3])
    statements = statements_of_methods(path)
    assert {statements[line] for line in missing & statements.keys()} == UNREACHED
