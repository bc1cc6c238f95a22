"""A pretrained decoder (SmolLM2-135M): does this project agree with others about it, and
what does any-order training of it buy?

    python -m studies.pretrained agree FOLDER --data DATA --json agree.json
    python -m studies.pretrained fill FOLDER --json plain.json
    python -m studies.pretrained fill FOLDER --adapter ADAPTER --json adapter.json
    python -m studies.pretrained gather REPORTS --starts RUN ... --long RUN --adapter ADAPTER
    python -m studies.pretrained page

`agree` compares with `transformers`; `fill` fills in ten fixed sentences. `gather` puts
their reports, those of eval_ppl.py, eval_infill.py and eval_tasks.py, and the losses of
runs into results/pretrained.json, of which `page` makes results/pretrained.md."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

import aogpt
from aogpt.data.loader import TokenDataset, find_dataset
from aogpt.runtime.command_line import run_script, show
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
class Gather:
    """Put reports and the losses of runs into one file."""

    reports: Annotated[Path, tyro.conf.Positional]
    """Folder of the reports, NAME.json."""
    starts: tuple[Path, ...]
    """Run folders of short runs on the same tokens in the same orders."""
    long: Path
    """Folder of the run that went on."""
    adapter: Path
    """Its adapter, as convert.py wrote it, which filled in the sentences."""

    def run(self) -> None:
        rows = {}
        for path in sorted(self.reports.glob("*.json")):
            report = json.loads(path.read_text())
            # Paths of one machine say nothing elsewhere.
            rows[path.stem] = {
                key: value for key, value in report.items() if key not in LOCAL
            }
        rows["starts"] = {run.name: losses_of(run) for run in self.starts}
        rows["long"] = losses_of(self.long)
        settings = json.loads((self.adapter / "config.json").read_text())
        rows["long"]["exported_step"] = settings["step"]
        write_json(ROWS, rows)


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
        {"agree": Agree, "fill": Fill, "gather": Gather, "page": Page},
        description=__doc__,
    )
    command.run()


if __name__ == "__main__":
    run_script(main)
