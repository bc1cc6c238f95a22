"""A pretrained decoder (SmolLM2-135M): does this project agree with others about it, and
what does any-order training of it buy?

    python -m studies.pretrained agree FOLDER --data DATA --json agree.json
    python -m studies.pretrained lambada FOLDER --source FILE --rows lambada_ours.jsonl
    python -m studies.pretrained fresh EXPORT ... --python VENV/bin/python --data DATA \\
        --json fresh.json
    python -m studies.pretrained fill FOLDER --json plain.json
    python -m studies.pretrained fill FOLDER --adapter ADAPTER --json adapter.json
    python -m studies.pretrained whole FOLDER --json whole.json
    python -m studies.pretrained gather REPORTS --starts RUN ... --long RUN --adapter ADAPTER
    python -m studies.pretrained page

`agree` compares with `transformers`; `lambada` predicts the last words of LAMBADA;
`fresh` loads exports in an environment without this project; `fill` fills in ten fixed
sentences, `whole` measures one as a process. `gather` puts their reports, those of eval_ppl.py
and eval_infill.py, and the losses of runs into results/pretrained.json, in place of
older ones of the same names. `page` makes results/pretrained.md of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

import aogpt
from aogpt.data.loader import TokenDataset, find_dataset
from aogpt.evaluation import harness
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json, write_text
from aogpt.runtime.outputs import commit
from aogpt.scoring import token_log_probs
from aogpt.training.config import load_toml
from studies import pretrained_page
from studies.runs import ROOT

ROWS = ROOT / "results" / "pretrained.json"
PAGE = ROOT / "results" / "pretrained.md"

LOCAL = ("command", "settings", "device", "model", "adapter", "configs")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "The doctor opened the door and",
)
NEW_TOKENS = 16
SCORED = 1024  # tokens that are compared with transformers one by one
BLOCK = 1024  # tokens of a block of an evaluation set
CHUNK = 20  # passages that are written at once
SENTENCES = (
    "The doctor[MASK:3-8] and closed the door.",
    "He poured the hot[MASK:1-2] into a cup.",
    "She took his[MASK:1-3] and went to the door.",
    "The sun rises in the[MASK:1-2] and sets in the west.",
    "My sister plays the[MASK:1-4] in the school orchestra.",
    "The recipe calls for two cups of[MASK:1-4] and a pinch of salt.",
    "After the storm[MASK:3-8] and the streets were full of water.",
    "The old man[MASK:4-10], for he had not eaten since the morning.",
    "I would like to[MASK:3-8], but I have no money.",
    "The cat[MASK:3-8]. Then it fell asleep by the fire.",
)

Path_ = Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Agree:
    """Compare a pretrained folder with how `transformers` reads it, in float32."""

    folder: Path_
    data: str
    """Prepared data with the tokenizer of the model: its test split is scored."""
    sets: tuple[str, ...] = ()
    """More prepared data, of which --blocks blocks are scored by both."""
    blocks: int = 2
    json: Path

    def run(self) -> None:
        from transformers import AutoModelForCausalLM

        ours = aogpt.load(self.folder, block_size=BLOCK)
        theirs = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32
        ).eval()
        tokens = blocks_of(self.data, 1)[:, :SCORED]
        our_log_probs = log_probs_of_ours(ours, tokens)
        their_log_probs = log_probs_of_theirs(theirs, tokens)
        report = {
            "tokens": SCORED - 1,
            "largest_difference": float((our_log_probs - their_log_probs).abs().max()),
            "nll": {
                "ours": -float(our_log_probs.mean()),
                "theirs": -float(their_log_probs.mean()),
            },
            "sets": [self.compare_set(name, ours, theirs) for name in self.sets],
            "greedy": [compare_greedy(ours, theirs, prompt) for prompt in PROMPTS],
            "commit": commit(),
            "torch": torch.__version__,
        }
        write_json(self.json, report)
        show(json.dumps(report, indent=1))

    def compare_set(self, name: str, ours, theirs) -> dict:
        """Score the first blocks of a set with both models."""
        tokens = blocks_of(name, self.blocks)
        nll = {"ours": 0.0, "theirs": 0.0}
        for block in tokens:
            row = block[None]
            nll["ours"] -= float(log_probs_of_ours(ours, row).mean())
            nll["theirs"] -= float(log_probs_of_theirs(theirs, row).mean())
        return {
            "set": Path(name).name,
            "blocks": len(tokens),
            "tokens": len(tokens) * (BLOCK - 1),
            "nll": {key: value / len(tokens) for key, value in nll.items()},
        }


def blocks_of(data: str, count: int) -> Tensor:
    """Return the first blocks of the test split, LongTensor (count, BLOCK)."""
    dataset = TokenDataset(find_dataset(data), "test", BLOCK)
    return dataset.blocks(range(count))


@torch.no_grad()
def log_probs_of_ours(model: aogpt.TextModel, tokens: Tensor) -> Tensor:
    """Return log p of each token after the first given those before it, (B, T - 1)."""
    order = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return token_log_probs(model.model, tokens, order)[:, 1:].double()


@torch.no_grad()
def log_probs_of_theirs(model, tokens: Tensor) -> Tensor:
    """Return the same of a model of `transformers`."""
    log_probs = model(tokens).logits[:, :-1].double().log_softmax(dim=-1)
    return log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def compare_greedy(ours: aogpt.TextModel, theirs, prompt: str) -> dict:
    """Continue a prompt with the most probable tokens, by both."""
    ids = ours.tokenizer.encode(prompt)
    expected = theirs.generate(
        torch.tensor([ids]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    found = ours.generate(prompt, NEW_TOKENS, temperature=0)
    return {
        "prompt": prompt,
        "new_tokens": NEW_TOKENS,
        "text": str(found),
        "same_tokens": found.tokens == expected[0].tolist(),
    }


# Runs in the other environment: prints log p of each token after the first, and what
# is installed there.
FRESH = """\
import importlib.util, json, sys
import torch, transformers

tokens = torch.tensor([json.loads(sys.argv[2])])
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, trust_remote_code=True
)
with torch.no_grad():
    log_probs = model.eval()(tokens).logits[:, :-1].double().log_softmax(dim=-1)
report = {
    "log_probs": log_probs.gather(2, tokens[:, 1:, None]).flatten().tolist(),
    "class": type(model).__name__,
    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    "has_aogpt": importlib.util.find_spec("aogpt") is not None,
}
print(json.dumps(report))
"""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Compare exports of convert.py with what `transformers` computes of them in an
    environment that has torch and transformers alone."""

    exports: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders that convert.py --hub or --layout transformers wrote."""
    python: Path
    """The other environment's Python."""
    data: str
    """Prepared data with the tokenizer of the model."""
    tokens: int = 256
    """Of the first block of the test split."""
    json: Path

    def run(self) -> None:
        tokens = blocks_of(self.data, 1)[:, : self.tokens]
        rows = []
        for export in self.exports:
            ours = log_probs_of_ours(aogpt.load(export), tokens)[0]
            rows.append(self.compare(Path(export), tokens[0].tolist(), ours))
            show(json.dumps(rows[-1]))
        report = {"rows": rows, "commit": commit(), "torch": torch.__version__}
        write_json(self.json, report)

    def compare(self, export: Path, tokens: list[int], ours: Tensor) -> dict:
        """Return the largest difference of log p, nats, and how they were computed.
        Raises UserError if the environment has this project or cannot load the
        export."""
        words = [self.python, "-c", FRESH, export.resolve(), json.dumps(tokens)]
        done = subprocess.run(
            words,
            cwd=export.parent,
            env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": "hf_cache"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UserError(f"{self.python} could not load {export}: {last}")
        report = json.loads(done.stdout.splitlines()[-1])
        if report.pop("has_aogpt"):
            raise UserError(f"{self.python} has this project: take another environment")
        theirs = torch.tensor(report.pop("log_probs"), dtype=torch.float64)
        return report | {
            "export": export.name,
            "tokens": len(tokens) - 1,
            "largest_difference": float((ours - theirs).abs().max()),
        }


@dataclass(frozen=True, kw_only=True)
class Lambada:
    """Predict the last word of each passage of LAMBADA, left to right or also given the
    full stop after it. A row is written for each passage; the same command goes on."""

    model: Path_
    source: Path
    """The test file of OpenAI, a JSON object with the key `text` a line."""
    rows: Path
    """JSON lines to write."""
    reader: Literal["ours", "hf", "both_sides"] = "ours"
    """ours: this project's scores for the harness; hf: those of the harness's own model;
    both_sides: fill the word in by resampling, given a full stop after it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    passages: int | None = None
    """The first ones; by default all."""

    def run(self) -> None:
        lines = self.source.read_text().splitlines()[: self.passages]
        texts = [json.loads(line)["text"].strip() for line in lines]
        done = 0
        if self.rows.exists():
            done = len(self.rows.read_text().splitlines())
        if done == len(texts):
            return
        answer = self.scorer()
        with self.rows.open("a") as file:
            for start in range(done, len(texts), CHUNK):
                chunk = texts[start : start + CHUNK]
                for row in answer(chunk, start):
                    file.write(json.dumps(row) + "\n")
                file.flush()
                show(f"{start + len(chunk)} of {len(texts)}", flush=True)

    def scorer(self) -> Callable[[list[str], int], list[dict]]:
        """Return a function of passages and the number of the first one, which returns
        their rows."""
        if self.reader == "both_sides":
            model = aogpt.load(self.model)
            return lambda texts, start: [
                filled_word(model, text, start + i) for i, text in enumerate(texts)
            ]
        if self.reader == "ours":
            scores = harness.HarnessModel(
                self.model, device="cpu", dtype=self.dtype, batch_size=8
            )
        else:
            from lm_eval.models.huggingface import HFLM

            scores = HFLM(self.model, device="cpu", dtype=self.dtype, batch_size=8)
        return lambda texts, start: last_words(scores, texts)


def divided(text: str) -> tuple[str, str]:
    """Return a passage without its last word, and that word."""
    context, _, word = text.rpartition(" ")
    return context, word


def last_words(scores, texts: list[str]) -> list[dict]:
    """Return log p of each last word with the space before it, nats, and whether each
    of its tokens is the most probable one. scores: a model of the harness."""
    from lm_eval.api.instance import Instance

    requests = []
    for number, text in enumerate(texts):
        context, word = divided(text)
        requests.append(
            Instance(
                request_type="loglikelihood",
                doc={},
                arguments=(context, f" {word}"),
                idx=number,
            )
        )
    rows = []
    for log_prob, greedy in scores.loglikelihood(requests, disable_tqdm=True):
        rows.append({"log_prob": round(float(log_prob), 6), "right": bool(greedy)})
    return rows


def filled_word(model: aogpt.TextModel, text: str, seed: int) -> dict:
    """Return whether the best filling of the last word is right, given the text before
    it and a full stop after it."""
    context, word = divided(text)
    (filling,) = model.fill(f"{context}[MASK:1-4].", 1, seed=seed)
    return {
        "right": filling.text == f"{context} {word}.",
        "effective_sample_size": round(filling.effective_sample_size, 3),
    }


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Fill in ten fixed sentences; the fillings are the best ones of one seed."""

    model: Path_
    adapter: Path | None = None
    mode: str | None = None
    temperature: float | None = None
    num_samples: int | None = None
    candidates: int = 2
    seed: int = 0
    json: Path

    def run(self) -> None:
        started = time.process_time()
        model = aogpt.load(self.model, adapter=self.adapter)
        loaded = time.process_time()
        rows = []
        for sentence in SENTENCES:
            before = time.process_time()
            fillings = model.fill(
                sentence,
                self.candidates,
                num_samples=self.num_samples,
                seed=self.seed,
                temperature=self.temperature,
                mode=self.mode,
            )
            row = {
                "sentence": sentence,
                "fillings": [filling.text for filling in fillings],
                "effective_sample_size": fillings[0].effective_sample_size,
                "cpu_seconds": time.process_time() - before,
            }
            rows.append(row)
            show(f"{row['cpu_seconds']:.1f} s: {row['fillings']}")
        report = {
            "model": self.model,
            "adapter": str(self.adapter or ""),
            "mode": self.mode,
            "temperature": self.temperature,
            "seed": self.seed,
            "load_cpu_seconds": loaded - started,
            "rows": rows,
            "commit": commit(),
        }
        write_json(self.json, report)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Measure the command line that fills in the first sentence, as a whole process of one
    thread, loading included."""

    model: Path_
    repeats: int = 3
    json: Path

    def run(self) -> None:
        import resource  # not on Windows

        words = ("-m", "aogpt", "fill", self.model, SENTENCES[0])
        rows = []
        for _ in range(self.repeats):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds = time.monotonic() - started
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            row = {
                "cpu_seconds": after.ru_utime
                + after.ru_stime
                - before.ru_utime
                - before.ru_stime,
                "seconds": seconds,
                "output": done.stdout.splitlines()[2],
            }
            rows.append(row)
            show(json.dumps(row), flush=True)
        write_json(self.json, {"rows": rows, "commit": commit()})


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Put reports and the losses of runs into one file."""

    reports: Annotated[Path, tyro.conf.Positional]
    """Folder of the reports, NAME.json, and of the rows of `lambada`, NAME.jsonl."""
    starts: tuple[Path, ...] = ()
    """Run folders of short runs on the same tokens in the same orders."""
    long: Path | None = None
    """Folder of the run that went on."""
    adapter: Path | None = None
    """Its adapter, as convert.py wrote it, which filled in the sentences."""

    def run(self) -> None:
        if (self.long is None) != (self.adapter is None):
            raise UserError("give --long and --adapter together: a run and its adapter")
        rows = json.loads(ROWS.read_text()) if ROWS.exists() else {"starts": {}}
        for path in sorted(self.reports.glob("*.jsonl")):
            rows[path.stem] = columns_of(path)
        for path in sorted(self.reports.glob("*.json")):
            report = json.loads(path.read_text())
            # Paths of one machine say nothing elsewhere.
            rows[path.stem] = {
                key: value for key, value in report.items() if key not in LOCAL
            }
        for run in self.starts:
            rows["starts"][run.name] = losses_of(run)
        if self.long and self.adapter:
            rows["long"] = losses_of(self.long)
            settings = json.loads((self.adapter / "config.json").read_text())
            rows["long"]["exported_step"] = settings["step"]
        write_json(ROWS, rows)


def columns_of(path: Path) -> dict[str, list]:
    """Return rows of JSON lines as a list for each key."""
    columns: dict[str, list] = {}
    for line in path.read_text().splitlines():
        for key, value in json.loads(line).items():
            columns.setdefault(key, []).append(value)
    return columns


def losses_of(run: Path) -> dict:
    """Return what a run recorded: its settings, losses and validations by step."""
    config = load_toml(run / "config.toml")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    by_step: dict[int, dict] = {}
    for line in lines:
        row = json.loads(line)
        by_step.setdefault(row["step"], {}).update(row)
    rows = [by_step[step] for step in sorted(by_step)]
    training = [row for row in rows if "loss" in row]
    return {
        "target": config.model.target,
        "query_at": config.model.query_at,
        "lora_rank": config.train.lora_rank,
        "lr": config.optim.lr,
        "mixed": config.order.mixed,
        "share": config.order.l2r_prob,
        "tokens_a_step": config.train.batch_size * config.model.block_size,
        "steps": [row["step"] for row in training],
        "losses": [row["loss"] for row in training],
        "grad_norms": [row["grad_norm"] for row in training],
        "tokens_per_second": [row["tokens_per_second"] for row in training],
        "validations": [
            {
                key: row[key]
                for key in row
                if key.startswith("val_loss") or key == "step"
            }
            for row in rows
            if "val_loss_l2r" in row
        ],
    }


@dataclass(frozen=True, kw_only=True)
class Page:
    """Write the page."""

    def run(self) -> None:
        rows = json.loads(ROWS.read_text())
        write_text(PAGE, pretrained_page.page(rows))


def main() -> None:
    command = tyro.extras.subcommand_cli_from_dict(
        {
            "agree": Agree,
            "fresh": Fresh,
            "lambada": Lambada,
            "fill": Fill,
            "whole": Whole,
            "gather": Gather,
            "page": Page,
        },
        description=__doc__,
    )
    command.run()


if __name__ == "__main__":
    run_script(main)
