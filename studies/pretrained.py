"""A pretrained decoder (SmolLM2-135M): does this project agree with others about it,
and what does any-order training of it buy?

    python -m studies.pretrained agree FOLDER --data DATA --json agree.json
    python -m studies.pretrained lambada FOLDER --source FILE --rows lambada_ours.jsonl
    python -m studies.pretrained fill FOLDER --json plain.json
    python -m studies.pretrained gather REPORTS --starts RUN RUN
    python -m studies.pretrained page

`agree` compares with `transformers`; `lambada` predicts the last words of LAMBADA;
`fill` fills in ten fixed sentences. `gather` puts their reports, those of eval_ppl.py
and eval_infill.py, and the losses of runs into results/pretrained.json, in place of
older ones of the same names. `page` makes results/pretrained.md of it."""

import json
import re
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
from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.files import write_json, write_text
from aogpt.scoring import token_log_probs
from aogpt.training.config import load_toml
from extras import plain_gpt
from studies import pretrained_page
from studies.runs import ROOT, commit

ROWS = ROOT / "results" / "pretrained.json"
PAGE = ROOT / "results" / "pretrained.md"

LOCAL = ("command", "settings", "device", "model", "configs")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "The doctor opened the door and",
)
NEW_TOKENS = 16
BLOCK = 1024  # tokens of a block of a test split
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
        report = compared(self.data, 1, ours, theirs)
        report["sets"] = [
            compared(folder, self.blocks, ours, theirs) for folder in self.sets
        ]
        report["greedy"] = [compare_greedy(ours, theirs, prompt) for prompt in PROMPTS]
        report["commit"] = commit()
        report["torch"] = torch.__version__
        write_json(self.json, report)
        show(json.dumps(report, indent=1))


def compared(data: str, blocks: int, ours: aogpt.TextModel, theirs) -> dict:
    """Score the first blocks of the test split of some data with both models."""
    dataset = TokenDataset(find_dataset(data), "test", BLOCK)
    our_log_probs = []
    their_log_probs = []
    for block in dataset.blocks(range(blocks)):
        our_log_probs.append(log_probs_of_ours(ours, block[None]))
        their_log_probs.append(log_probs_of_theirs(theirs, block[None]))
    one = torch.cat(our_log_probs)
    other = torch.cat(their_log_probs)
    return {
        "set": Path(data).name,
        "blocks": blocks,
        "tokens": one.numel(),
        "largest_difference": float((one - other).abs().max()),
        "nll": {"ours": -float(one.mean()), "theirs": -float(other.mean())},
    }


@torch.no_grad()
def log_probs_of_ours(model: aogpt.TextModel, tokens: Tensor) -> Tensor:
    """Return log p of each token after the first given those before it, (B, T - 1)."""
    order = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return token_log_probs(model.model, tokens, order)[:, 1:].double()


@torch.no_grad()
def log_probs_of_theirs(model, tokens: Tensor) -> Tensor:
    """Return log p of each token but the first, (B, T - 1), by `transformers`."""
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
    text = ours.generate([prompt], NEW_TOKENS, temperature=0)[0]
    return {
        "prompt": prompt,
        "new_tokens": NEW_TOKENS,
        "text": text.text,
        "same_tokens": text.tokens == expected[0].tolist(),
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
    """ours: this project's scores for the harness; hf: those of the harness's own
    model;
    both_sides: fill the word in by resampling, given a full stop after it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    passages: int | None = None
    """The first ones; by default all."""
    temperature: float | None = None
    num_samples: int | None = None

    def run(self) -> None:
        lines = self.source.read_text().splitlines()[: self.passages]
        texts = [json.loads(line)["text"].strip() for line in lines]
        done = 0
        if self.rows.exists():
            text = self.rows.read_text()
            whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            write_text(self.rows, whole)
            done = len(whole.splitlines())
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
                self.filled_word(model, text, seed=start + i)
                for i, text in enumerate(texts)
            ]
        if self.reader == "ours":
            from extras.harness import HarnessModel  # needs lm_eval

            model = aogpt.load(self.model)
            if self.dtype == "bfloat16":
                model.model.bfloat16()
            scores = HarnessModel(model)
        else:
            from lm_eval.models.huggingface import HFLM

            scores = HFLM(self.model, device="cpu", dtype=self.dtype, batch_size=8)
        return lambda texts, start: last_words(scores, texts)

    def filled_word(self, model: aogpt.TextModel, text: str, seed: int) -> dict:
        """Return whether the best filling of the last word is right, given the text
        before it and a full stop after it."""
        context, word = divided(text)
        drawn = fillings_of(
            model, f"{context}[MASK:1-4].", seed, self.num_samples, self.temperature
        )
        best = model.tokenizer.decode(drawn.fillings[0].tokens)
        return {
            "right": best == f"{context} {word}.",
            "effective_sample_size": round(drawn.effective_sample_size, 3),
        }


def fillings_of(
    model: aogpt.TextModel,
    text: str,
    seed: int,
    draws: int | None,
    temperature: float | None,
) -> plain_gpt.Fillings:
    """Return the fillings of the gaps of a text, from left to right."""
    return plain_gpt.fill(
        model.model,
        plain_gpt.read(text, model.tokenizer),
        draws=draws or plain_gpt.DRAWS,
        temperature=temperature or plain_gpt.TEMPERATURE,
        seed=seed,
        vocab_size=model.loaded.vocab_size,
    )


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


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Fill in ten fixed sentences; the fillings are the best ones of one seed."""

    model: Path_
    temperature: float | None = None
    num_samples: int | None = None
    candidates: int = 2
    seed: int = 0
    json: Path

    def run(self) -> None:
        started = time.process_time()
        model = aogpt.load(self.model)
        loaded = time.process_time()
        rows = []
        for sentence in SENTENCES:
            before = time.process_time()
            drawn = fillings_of(
                model, sentence, self.seed, self.num_samples, self.temperature
            )
            texts = []
            for filling in drawn.fillings[: self.candidates]:
                texts.append(model.tokenizer.decode(filling.tokens))
            row = {
                "sentence": sentence,
                "fillings": texts,
                "effective_sample_size": drawn.effective_sample_size,
                "cpu_seconds": time.process_time() - before,
            }
            rows.append(row)
            show(f"{row['cpu_seconds']:.1f} s: {row['fillings']}")
        report = {
            "model": self.model,
            "temperature": self.temperature,
            "seed": self.seed,
            "load_cpu_seconds": loaded - started,
            "rows": rows,
            "commit": commit(),
        }
        write_json(self.json, report)


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Put reports and the losses of runs into one file."""

    reports: Annotated[Path, tyro.conf.Positional]
    """Folder of the reports, NAME.json, and of the rows of `lambada`, NAME.jsonl."""
    starts: tuple[Path, ...] = ()
    """Run folders of short runs on the same tokens in the same orders."""

    def run(self) -> None:
        rows = json.loads(ROWS.read_text()) if ROWS.exists() else {"starts": {}}
        for path in sorted(self.reports.glob("*.jsonl")):
            rows[path.stem] = columns_of(path)
        for path in sorted(self.reports.glob("*.json")):
            report = json.loads(path.read_text())
            rows[path.stem] = {
                key: value for key, value in report.items() if key not in LOCAL
            }
        for run in self.starts:
            rows["starts"][run.name] = losses_of(run)
        write_json(ROWS, without_folders(rows))


def without_folders(value):
    """Return a document in whose texts the last part of each absolute path is in its
    place: folders of one machine say nothing elsewhere."""
    if isinstance(value, str):
        return re.sub(r"(?<!\S)/\S*/(?=\S)", "", value)
    if isinstance(value, dict):
        pairs = value.items()
        return {without_folders(key): without_folders(one) for key, one in pairs}
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    return value


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
            "agree": with_help(Agree),
            "lambada": with_help(Lambada),
            "fill": with_help(Fill),
            "gather": with_help(Gather),
            "page": with_help(Page),
        },
        description=__doc__,
    )
    command.run()


if __name__ == "__main__":
    run_script(main)
