"""Score sentences: their probability, alternatives in them, and what fits into their gaps.

    python -m aogpt score RUN "The old horse was tired." --order random
    python -m aogpt score RUN "The old horse was tired." --each
    python -m aogpt score RUN "The [cat|dog|tax] barked."
    python -m aogpt score RUN "The dog[MASK:2] at the moon." --top 5

Log-probabilities are natural logarithms. For long texts and data sets see eval_ppl.py."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from . import text_model as aogpt
from .runtime.command_line import ModelOptions, run_script, show
from .runtime.devices import pick_device, pick_dtype
from .runtime.errors import UserError
from .runtime.outputs import OutputOptions, Outputs, markdown_table, provenance
from .runtime.validation import Count, check_values
from .sampling import gaps


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions, OutputOptions):
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), checkpoint, exported or released weights, or Hugging Face repo id."""
    texts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT ...")
    ]
    """Sentences. [this|that] ranks alternatives; [MASK:2] lists likely tokens for two positions."""
    order: str = "l2r"
    """Order in which tokens are predicted: l2r, random or another order.kind, as slots:block=8."""
    each: bool = False
    """Score each token given all others, before and after it, instead of along an order."""
    top: Count = 10
    """Number of tokens to list for each mask."""
    json: Path | None = None
    """Also write all results to this file."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if not a.texts:
        raise UserError(
            'nothing to score: give a text, as python -m aogpt score RUN "The cat sat."'
        )
    if a.each and a.order != "l2r":
        raise UserError("--each uses no order: leave out --order")
    outputs = Outputs({"--json": a.json}, [a.run], a.overwrite)
    device = pick_device(a.device)
    options = {"block_size": a.block_size, "checkpoint": a.checkpoint}
    model = aogpt.load(a.run, weights=a.weights, device=device, **options)
    model.model.to(dtype := pick_dtype(a.dtype, device))
    rows = []
    for text in a.texts:
        found, lines = answer(model, text, a)
        rows.append({"text": text} | found)
        show(*lines, "", sep="\n")
    with outputs:
        origin = provenance(a, dtype, device, checkpoint=model.loaded.describe())
        outputs.write_json(a.json, {"results": rows} | origin)


def answer(model: aogpt.TextModel, text: str, a: Arguments) -> tuple[dict, list[str]]:
    """The results for a text: plain values, and lines to show."""
    if gaps.MASK.search(text):
        if aogpt.ALTERNATIVES.search(text):
            raise UserError("give masks and alternatives in separate texts")
        blanks = model.blanks(text, a.top)
        cells = [
            [str(i), *(f"{t!r} {p:.1%}" for t, p in row)]
            for i, row in enumerate(blanks, 1)
        ]
        head = ["mask", *(f"{rank}." for rank in range(1, len(blanks[0]) + 1))]
        return {"blanks": blanks}, [
            text,
            "",
            *markdown_table(head, cells, left=len(head)),
        ]
    if aogpt.ALTERNATIVES.search(text):
        found = model.rank(text)
        head = ["text", "log p", "share", "log p given both sides"]
        cells = [
            [repr(r.text)[1:-1], f"{r.log_prob:.3f}", f"{r.share:.1%}"] for r in found
        ]
        for row, r in zip(cells, found, strict=True):
            row += [] if r.given_both_sides is None else [f"{r.given_both_sides:.3f}"]
        head = head[: len(cells[0])]
        return {"alternatives": [asdict(r) for r in found]}, markdown_table(head, cells)
    scored = model.score_each(text) if a.each else model.score(text, a.order, a.seed)
    pairs = zip(scored.pieces, scored.log_probs, strict=True)
    cells = [
        [repr(piece), f"{log_p:.3f}", f"{math.exp(log_p):.2%}"]
        for piece, log_p in pairs
    ]
    how = "each given all others" if a.each else f"order {a.order}"
    values = {"log_prob": -scored.nats, "bits_per_byte": scored.bits_per_byte}
    total = "log p {log_prob:.3f}, {bits_per_byte:.4f} bits a byte".format(**values)
    if a.each:  # no probability of the text: the factors do not belong to one order
        values = {"sum": -scored.nats}
        total = f"sum {-scored.nats:.3f}, no probability of the text"
    lines = [*markdown_table(["token", "log p", "p"], cells), "", f"{how}: {total}"]
    return values | asdict(scored), lines


if __name__ == "__main__":
    run_script(main)
