"""Infilling: a sentence in the middle of a passage, predicted and filled in.

    python eval_infill.py results/books_model --data data/books_english --num-passages 500
    python eval_infill.py out/aogpt out/gpt out/encoder --data data/own --json infill.json
    python eval_infill.py out/aogpt out/gpt --data lambada --last-word

Its likelihood is measured given both sides and given what stands before alone; and samples of it
are compared with the true sentence by ROUGE. A model that can only continue has no other side. Nor
has the last word of a passage (--last-word), which is predicted given all that stands before it.
"""

from __future__ import annotations

from runtime.errors import UserError

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from checkpoints.load import Loaded, load
from data.loader import TokenDataset, evaluation_split, find_dataset, load_meta
from data.tokenizers import get_tokenizer
from evaluation.infilling import Passages, find_last_words, find_passages, middle_nll, rouge
from evaluation.text_measures import mean_and_reach
from runtime.command_line import ModelOptions, run_script
from runtime.devices import autocast, pick_device, pick_dtype
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import markdown_table, provenance
from runtime.validation import Count, check_values
from sampling.engine import generate
from sampling.plans import Plan, adaptive_plan, l2r_plan, random_plan
from sampling.token_choice import Temperature, TokenChoice

HEAD = ["run", "given", "filled in", "nats/token", "95%", "ROUGE-1", "ROUGE-2", "ROUGE-L"]


DATA = Path(__file__).parent / "data"
WORD = "passage"  # what is given of a last word


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders, exports or released weights."""
    data: str
    """Prepared data set: a name under data/, or a folder that data/prepare.py wrote."""
    split: str | None = None
    """By default the evaluation set's own, the only one, or val."""
    num_passages: Count = 200
    """Blocks to search for a sentence; those without one are left out."""
    last_word: bool = False
    """In place of sentences: the last word of each of so many documents, as LAMBADA asks for it."""
    shortest: Count = 6
    """Tokens of the sentence, at least."""
    longest: Count = 40
    """And at most."""
    temperature: Temperature = 0.0
    """Of the samples; 0 takes the most probable token."""
    batch_size: Count = 16
    json: Path | None = None
    """Write every figure, of every passage, to this file, and the table beside it (.md)."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if not a.runs:
        raise UserError("nothing to evaluate: name a run, such as results/books_model")
    table = a.json and a.json.with_suffix(".md")
    files = {"--json": a.json, "the table beside --json": table}
    outputs = Outputs(files, [*a.runs, a.data, DATA / a.data], a.overwrite)
    device = pick_device(a.device)
    dtype = pick_dtype(a.dtype, device)
    rows = []
    for run in a.runs:
        loaded = load(run, a.weights, device, a.block_size)
        with autocast(device, dtype):
            rows += evaluate(run, loaded, passages_of(a, loaded), a)
    lines = [*markdown_table(HEAD, [cells(row) for row in rows], left=3), "", *notes(rows)]
    with outputs:
        if a.json:
            outputs.write_json(a.json, provenance(a, dtype, device, rows=rows))
            outputs.write(table, "\n".join(lines) + "\n")
        print(*lines, sep="\n")


def passages_of(a: Arguments, loaded: Loaded) -> Passages:
    """The passages, in blocks of the model's size."""
    folder = find_dataset(a.data)
    split = a.split or evaluation_split(load_meta(folder))
    dataset = TokenDataset(folder, split, loaded.model.config.block_size)
    if dataset.meta["tokenizer"] != loaded.tokenizer:
        raise UserError(
            f"{a.data} holds {dataset.meta['tokenizer']} tokens, but the model was trained on "
            f"{loaded.tokenizer} tokens: prepare the data with --tokenizer {loaded.tokenizer}"
        )
    tokenizer = get_tokenizer(loaded.tokenizer)
    if a.last_word:
        size = loaded.model.config.block_size
        found = find_last_words(dataset.tokens, tokenizer, a.num_passages, size)
        if not len(found):
            raise UserError(f"no document of two words or more ends in {a.data}")
        return found
    blocks = dataset.blocks(list(range(min(a.num_passages, dataset.num_blocks))))
    found = find_passages(blocks, tokenizer, a.shortest, a.longest)
    if not len(found):
        raise UserError(
            f"no sentence of {a.shortest} to {a.longest} tokens in {len(blocks)} blocks of {a.data}"
        )
    return found


# ---- one model -----------------------------------------------------------------------------------


def evaluate(run: str, loaded: Loaded, passages: Passages, a: Arguments) -> list[dict]:
    """A row for what is given and for every way to fill it in."""
    model, rows = loaded.model, []
    sides = ["left"] if model.config.l2r_only else ["left", "both"]
    for side in [WORD] if a.last_word else sides:
        nll = in_batches(
            passages, a.batch_size, lambda part, both=side == "both": middle_nll(model, part, both)
        )
        for mode in ["l2r"] if side != "both" else ["l2r", "random", "adaptive"]:
            texts = fill_in(loaded, passages, side == "both", mode, a)
            scores = [rouge(*pair) for pair in texts]
            row = {"run": run, "given": side, "mode": mode, "nll": nll.tolist()}
            rows.append(row | {key: [s[key] for s in scores] for key in scores[0]})
    return rows


def in_batches(passages: Passages, size: int, work) -> Tensor:
    parts = [work(passages[i : i + size]) for i in range(0, len(passages), size)]
    return torch.cat(parts)


def fill_in(
    loaded: Loaded, passages: Passages, both_sides: bool, mode: str, a: Arguments
) -> list[tuple[str, str]]:
    """(sample, true sentence) of every passage. Without the other side, rows end with it."""
    tokenizer, plan = get_tokenizer(loaded.tokenizer), plan_of(passages, both_sides, mode, a.seed)
    done = generate(
        loaded.model,
        plan,
        passages.tokens[:, : plan.order.shape[1]],
        generator=torch.Generator().manual_seed(a.seed),
        choice=TokenChoice(a.temperature),
        vocab_size=loaded.vocab_size,
        batch_size=a.batch_size,
    )
    pairs = zip(passages.middle(done.tokens), passages.middle(passages.tokens), strict=True)
    return [(tokenizer.decode(ours), tokenizer.decode(true)) for ours, true in pairs]


def plan_of(passages: Passages, both_sides: bool, mode: str, seed: int) -> Plan:
    """The steps that fill in the middle."""
    N, T = passages.tokens.shape
    length = torch.full((N,), T) if both_sides else passages.end
    known = passages.known(both_sides)[:, : int(length.max())]
    generator = torch.Generator().manual_seed(seed)
    match mode:
        case "l2r":
            return l2r_plan(N, length, known)
        case "random":
            return random_plan(N, length, generator, known)
        case _:
            return adaptive_plan(N, length, "confidence", generator, known)


# ---- reported ------------------------------------------------------------------------------------


def cells(row: dict) -> list[str]:
    mean, reach = mean_and_reach(row["nll"])
    scores = [f"{statistics.mean(row[key]):.3f}" for key in ("rouge_1", "rouge_2", "rouge_l")]
    return [row["run"], row["given"], row["mode"], f"{mean:.4f}", f"+- {reach:.4f}", *scores]


def notes(rows: list[dict]) -> list[str]:
    """What the other side is worth, passage by passage."""
    what = "last word" if rows[0]["given"] == WORD else "sentence"
    lines = [
        f"{len(rows[0]['nll'])} {what}s. nats/token: of the true {what}, token after token from "
        f"left to right, mean over {what}s; ROUGE: F1 of samples against it."
    ]
    for run in dict.fromkeys(row["run"] for row in rows):
        nll = {row["given"]: row["nll"] for row in rows if row["run"] == run}
        if len(nll) == 2 and len(nll["left"]) > 1:
            gains = [a - b for a, b in zip(nll["left"], nll["both"], strict=True)]
            mean, reach = mean_and_reach(gains)
            lines.append(
                f"{run}: the other side is worth {mean:.4f} nats/token, 95% interval "
                f"{mean - reach:.4f} to {mean + reach:.4f}"
            )
    return lines


if __name__ == "__main__":
    run_script(main)
