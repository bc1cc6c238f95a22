"""Changes that users make, written into a copy of the project as they would write them:
each works at once in training, evaluation and sampling."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

SCRIPTS = ("train.py", "eval_ppl.py", "eval_gen.py", "sample.py")
SIZES = (
    "--model.vocab-size 320 --model.block-size 32 --model.n-layer 2 --model.n-head 2 "
    "--model.n-embd 32 --train.batch-size 8 --train.micro-batch-size 8 "
    "--train.device cpu --train.no-compile --optim.warmup-steps 1 --eval.interval 2 "
    "--eval.sequences 4 --checkpoint.interval 2 --train.steps 2 --out out"
).split()


class Copy:
    """A copy of the project that can be edited and run."""

    def __init__(self, folder, data):
        self.folder = folder
        self.data = data
        shutil.copytree(ROOT / "aogpt", folder / "aogpt")
        shutil.copytree(ROOT / "configs", folder / "configs")
        (folder / "data").mkdir()
        shutil.copy(ROOT / "data" / "prepare.py", folder / "data")
        for script in SCRIPTS:
            shutil.copy(ROOT / script, folder)

    def edit(self, name, before, after):
        """Write `after` in place of `before`, which is there once."""
        path = self.folder / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} does not hold {before!r} once"
        path.write_text(text.replace(before, after))

    def run(self, script, *words):
        """Run a script; what it prints, notes on stderr last. It must succeed."""
        done = subprocess.run(
            [sys.executable, script, *map(str, words)],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{script} {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def train(self, config, *words, name="run"):
        """Train out/NAME."""
        options = ["--data.folder", self.data, *SIZES, "--name", name]
        return self.run("train.py", f"configs/{config}.toml", *options, *words)

    def losses(self, *words):
        """Return the losses of eval_ppl.py, by the name of the order."""
        data = ["--datasets", self.data, "--max-sequences", 4]
        self.run("eval_ppl.py", "out/run", *data, *words, "--json", "losses.json")
        results = json.loads((self.folder / "losses.json").read_text())["results"]
        (self.folder / "losses.json").unlink()
        return {row["orders"]: row["nll"] for row in results}

    def samples(self, *words):
        """Return the records of samples of sample.py."""
        self.run("sample.py", "out/run", "--jsonl", "samples.jsonl", *words)
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        (self.folder / "samples.jsonl").unlink()
        return [json.loads(line) for line in lines]


@pytest.fixture
def project(tmp_path, data):
    return Copy(tmp_path, data)


@pytest.mark.slow(reason="six processes")
def test_an_order_is_a_line_and_a_case(project):
    """Even positions first, then odd ones."""
    project.edit(
        "aogpt/orders.py",
        '    "random": OrderFacts(',
        '    "even_first": OrderFacts(is_fixed=True),\n    "random": OrderFacts(',
    )
    project.edit(
        "aogpt/orders.py",
        '        case "r2l":\n',
        '        case "even_first":\n'
        "            return (identity % 2).argsort(dim=1, stable=True)\n"
        '        case "r2l":\n',
    )
    project.train("aogpt_small", "--order.kind", "even_first")
    assert "even_first" in (project.folder / "out" / "run" / "config.toml").read_text()
    assert "even_first" in project.losses("--orders", "l2r", "even_first")
    for sample in project.samples("--mode", "even_first", "--num-samples", 2):
        assert sample["order"] == [*range(0, 32, 2), *range(1, 32, 2)]
    mixture = "--order.kind mixture --order.mixed even_first".split()
    project.train("aogpt_small", *mixture, name="mixed")


@pytest.mark.slow(reason="six processes")
def test_a_way_to_condition_on_the_target_is_a_table_and_where_it_is_added(project):
    """A table that is added to the queries of every block. Muon, which takes matrices
    of attention, leaves it to AdamW."""
    project.edit("aogpt/model.py", '    "none",', '    "queries",\n    "none",')
    project.edit(
        "aogpt/model.py",
        "        self.q_norm: nn.Module = nn.Identity()\n",
        "        self.wtpe = None\n"
        '        if c.target == "queries":\n'
        "            self.wtpe = TargetTable(c, c.n_head * c.head_dim)\n"
        "        self.q_norm: nn.Module = nn.Identity()\n",
    )
    project.edit(
        "aogpt/model.py",
        "        q = self.q_norm(q)\n",
        "        if self.wtpe is not None:\n"
        "            q = q + p.lookup(self.wtpe.weight).view_as(q)\n"
        "        q = self.q_norm(q)\n",
    )
    project.train("aogpt_small", "--model.target", "queries", "--optim.kind", "muon")
    losses = project.losses()
    assert len(losses) == 2
    # Every token of a sample has the log-probability that scoring gives it.
    check = """
import json, torch
from aogpt.checkpoints import load_model
from aogpt.scoring import token_log_probs
from aogpt.systems import matrices_of, parameter_counts

model = load_model("out/run")
tables = [block.attn.wtpe.weight for block in model.blocks]
assert len(tables) == 2
assert not {id(p) for p, _ in matrices_of(model)} & {id(p) for p in tables}
assert parameter_counts(model)["conditioning"] == sum(p.numel() for p in tables)
for line in open("kept.jsonl"):
    sample = json.loads(line)
    order = torch.tensor([sample["order"]])
    found = token_log_probs(model, torch.tensor([sample["tokens"]]), order)[0]
    expected = torch.tensor(sample["log_probs"])[order[0]]
    # In float32; a sample's are of the tokenizer's ids, of which there are fewer.
    shift = found - expected
    assert shift.max() < 1e-4 and shift.std() < 0.1, shift
"""
    samples = project.samples("--mode", "random", "--num-samples", 2)
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (project.folder / "kept.jsonl").write_text(lines)
    (project.folder / "check.py").write_text(check)
    project.run("check.py")


@pytest.mark.slow(reason="eight processes")
def test_a_token_rule_is_a_field_and_where_it_truncates(project):
    """Tokens that are more probable than 1.25 times the mean of the vocabulary."""
    file = "aogpt/sampling/token_choice.py"
    project.edit(
        file,
        "    def __post_init__(self):\n        check_values(self, name=str)",
        "    above_mean: float = 0.0\n"
        '    """Draw from tokens with this many times the mean probability."""\n'
        "    def __post_init__(self):\n        check_values(self, name=str)",
    )
    project.edit(
        file,
        "    if probs is all_probs:\n",
        "    if choice.above_mean > 0:\n"
        "        mean = probs.mean(dim=-1, keepdim=True)\n"
        "        probs = probs.where(probs >= choice.above_mean * mean, 0)\n"
        "    if probs is all_probs:\n",
    )
    project.train("aogpt_small")

    def least(samples):
        """Return the least log-probability of a token of the samples."""
        return min(min(sample["log_probs"]) for sample in samples)

    rule = ["--above-mean", 1.25]
    bound = math.log(1.25 / 320)  # the table of tokens has 320 rows
    samples = project.samples("--mode", "random", "--num-samples", 8)
    assert least(samples) < bound - 1e-3
    for mode in ("random", "mdm", "speculative"):
        samples = project.samples("--mode", mode, "--num-samples", 8, *rule)
        assert least(samples) > bound - 1e-4  # float32
        assert samples[0]["settings"]["above_mean"] == 1.25
    # A rule that leaves no token at all leaves the most probable one.
    words = ["--mode", "l2r", "--num-samples", 2]
    samples = project.samples(*words, "--above-mean", 1e6)
    greedy = project.samples(*words, "--temperature", 0)
    assert [s["tokens"] for s in samples] == [s["tokens"] for s in greedy]


def test_a_score_of_positions_is_a_function_and_a_row(project):
    """Positions first where the token with id 0 is likeliest."""
    project.edit(
        "aogpt/sampling/scores.py",
        "SCORES = {\n",
        "SCORES = {\n"
        '    "id_zero": ScoreRule(lambda log_probs: log_probs[:, 0],\n'
        "        least=lambda threshold: 2 - threshold, largest_threshold=99.0),\n",
    )
    check = """
from aogpt.model import AOGPT, ModelConfig
from aogpt.sampling import modes
from aogpt.evaluation.report import orders_of
from eval_ppl import Arguments, parse_orders

words = "id_zero:threshold=9"
arguments = Arguments(run="", orders=(words,))
plan = parse_orders(arguments)[words](modes.example_samples())
assert plan.pace.threshold == 9
row = {"orders": "id_zero", "group": 1, "bound": "mean"}
assert orders_of(row) == "the model's, by id_zero"
config = ModelConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)
model = AOGPT(config).eval()

def samples(mode):
    options = modes.DecodingOptions(mode=mode)
    planned = modes.plan_samples(options.plan, [[None] * 8], seed=1)
    return options.engine(model, vocab_size=8).generate(*planned)

slow = samples("id_zero")
assert slow.step.max() == 7
# No log-probability is 2 - 1.5: one position a step. All are above 2 - 99.
assert samples("id_zero:threshold=1.5").order.equal(slow.order)
assert samples("id_zero:threshold=99").step.max() == 0
"""
    (project.folder / "check.py").write_text(check)
    project.run("check.py")


@pytest.mark.slow(reason="five processes")
def test_a_mode_is_a_function_and_a_row(project):
    """The one of docs/sampling.md: every second position first."""
    page = (ROOT / "docs" / "sampling.md").read_text()
    code = page.partition("def halves_plan")[2].partition("```")[0]
    project.edit(
        "aogpt/sampling/plans.py",
        "def stack_plans(",
        f"def halves_plan{code}\n\ndef stack_plans(",
    )
    project.train("aogpt_small")
    shown = project.run("sample.py", "--help").replace("│", " ")
    assert "halves (first=0, group=1): Fill in every" in " ".join(shown.split())
    for sample in project.samples("--mode", "halves", "--num-samples", 2):
        assert sample["order"] == [*range(0, 32, 2), *range(1, 32, 2)]
        assert sample["settings"]["mode"] == "halves"
    for sample in project.samples("--mode", "halves:first=1,group=4"):
        assert sample["order"] == [*range(1, 32, 2), *range(0, 32, 2)]
        assert max(sample["step"]) == 7
    judged = "out/run --judge out/run --num-samples 2 --mode halves halves:group=8"
    assert "| halves:group=8 |" in project.run("eval_gen.py", *judged.split())


@pytest.mark.slow(reason="three processes")
def test_a_metric_is_a_function_and_a_row(project):
    """The longest run of one token in a sample."""
    file = "aogpt/evaluation/text_measures.py"
    project.edit(
        file,
        "@dataclass(frozen=True)\nclass Measure:\n",
        "def longest_run(tokens):\n"
        "    longest = 0\n"
        "    run = 0\n"
        "    for i, token in enumerate(tokens):\n"
        "        same = i > 0 and token == tokens[i - 1]\n"
        "        run = run + 1 if same else 1\n"
        "        longest = max(longest, run)\n"
        "    return longest\n\n\n"
        "@dataclass(frozen=True)\nclass Measure:\n",
    )
    project.edit(
        file,
        "MEASURES = {\n",
        'MEASURES = {\n    "longest_run": Measure(longest_run, title="longest run"),\n',
    )
    project.train("aogpt_small")
    words = "out/run --judge out/run --mode l2r --temperature 0".split()
    table = project.run("eval_gen.py", *words, "--num-samples", 2, "--json", "gen.json")
    (head,) = [line for line in table.splitlines() if line.startswith("| run")]
    assert "longest run" in head
    (row,) = json.loads((project.folder / "gen.json").read_text())["rows"]
    runs = [sample["longest_run"] for sample in row["per_sample"]]
    assert row["longest_run"] == sum(runs) / len(runs) >= 1
