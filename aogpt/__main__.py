"""The command `aogpt`, or `python -m aogpt`: text in, text out.

MODEL is a run folder, such as results/books_model, released weights, or a Hugging Face
repo id.

    aogpt score MODEL "The old horse was tired."     probability of tokens and text
    aogpt rank MODEL "The [cat|dog|tax] barked."     which alternative is most probable
    aogpt fill MODEL "She[MASK:4] home."             fill gaps
    aogpt blanks MODEL "The cat[MASK] home."         what fits into a blank
    aogpt generate MODEL "Once upon a time"          continue a text

--file FILE reads a text a line, --file - standard input; --json prints each answer as a
line of JSON."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split

import dataclasses
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import tyro

from .runtime.command_line import TEXT, run_script, show
from .runtime.errors import UserError
from .runtime.files import read_lines

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Texts = Annotated[
    list[Annotated[str, TEXT]],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="TEXT ...", help_behavior_hint=""),
]


def load(path: str):
    """Load a model on a GPU if there is one."""
    from . import text_model  # imports PyTorch, which --help does not need

    return text_model.load(path, device="auto")


def read(texts: list[str], file: str | None) -> list[str]:
    """Return the texts of the command line, or the lines of a file that are not blank.
    Raises UserError if there is no text, or if there are both."""
    if file is None and texts == ["-"]:
        texts = []
        file = "-"
    if (file is None) == (not texts):
        raise UserError(
            "give texts after the model, in quotes, or --file FILE with one a line"
        )
    if file is None:
        for text in texts:
            if os.path.isfile(text):  # no error for a long text
                show(
                    f"note: {text} is read as text; --file {text} reads its lines",
                    file=sys.stderr,
                )
        return texts
    path = Path("/dev/stdin" if file == "-" else file)
    lines = [line for _, line in read_lines(path, "--file")]
    if not lines:
        raise UserError(f"--file {file}: it has no text; write one a line")
    return lines


def show_json(answers: Iterable[Any]) -> None:
    """Print each answer as a line of JSON."""

    def fields_of(answer: Any) -> dict[str, Any]:
        row = dataclasses.asdict(answer)
        for name in ("nats", "bits_per_byte"):
            value = getattr(answer, name, None)
            if value is not None and math.isfinite(value):
                row[name] = value
        return row

    for answer in answers:
        show(dumps(answer, default=fields_of))


def show_texts(samples: Iterable[Any], json: bool) -> None:
    """Print the text of each sample, or all of it as a line of JSON."""
    if json:
        return show_json(samples)
    for sample in samples:
        show(sample.text)


def score(
    model: Model,
    texts: Texts,
    order: str = "l2r",
    seed: int = 0,
    end: bool = False,
    predict: tuple[str, ...] = (),
    orders: int = 1,
    file: str | None = None,
    json: bool = False,
) -> None:
    """Print log p (nats) of the tokens of texts; --end scores the end, too. --predict
    3:7 20:21 scores these characters alone, given all others; --orders 16 averages."""
    spans = [span_of(words) for words in predict] or None
    scores = load(model).score(
        read(texts, file), order, seed, end, predict=spans, orders=orders
    )
    if json:
        return show_json(scores)
    for scored in scores:
        for piece, log_prob in zip(scored.pieces, scored.log_probs, strict=True):
            values = "        -        -"
            if log_prob is not None:
                values = f"{log_prob:9.3f} {math.exp(log_prob):8.2%}"
            show(f"{values}  {piece!r}")
        totals = f"{-scored.nats:9.3f} nats, {scored.scored} tokens"
        if scored.bits_per_byte is not None:
            totals += f", {scored.bits_per_byte:.4f} bits a byte"
        show(totals)


def span_of(words: str) -> tuple[int, int]:
    """Return the span of characters that FIRST:LAST is."""
    span = re.fullmatch(r"(\d{1,9}):(\d{1,9})", words)
    if span is None:
        raise UserError(f"--predict {words:.40}: give characters as 3:7")
    return int(span[1]), int(span[2])


def rank(
    model: Model,
    texts: Texts,
    end: bool = False,
    file: str | None = None,
    json: bool = False,
) -> None:
    """Print alternatives with log p of the whole text, nats, and their shares."""
    ranked = load(model).rank(read(texts, file), end)
    if json:
        return show_json(ranked)
    for alternatives in ranked:
        for row in alternatives:
            show(f"{row.log_prob:9.3f} {row.share:7.1%}  {row.text!r}")


def blanks(
    model: Model,
    texts: Texts,
    top: int = 10,
    file: str | None = None,
    json: bool = False,
) -> None:
    """Print the likeliest tokens of each mask."""
    likely_tokens = load(model).blanks(read(texts, file), top)
    if json:
        return show_json(likely_tokens)
    for blanks_of_text in likely_tokens:
        for likely in blanks_of_text:
            words = [f"{one.text!r} {one.probability:.1%}" for one in likely]
            show("  ".join(words))


def fill(
    model: Model,
    texts: Texts,
    num_samples: int = 1,
    seed: int = 0,
    mode: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    file: str | None = None,
    json: bool = False,
) -> None:
    """Print texts with their gaps filled in: [MASK] is one token, [MASK:4] four."""
    samples = load(model).fill(
        read(texts, file),
        num_samples,
        seed,
        mode=mode,
        temperature=temperature,
        top_p=top_p,
    )
    show_texts(samples, json)


def generate(
    model: Model,
    texts: Texts,
    new_tokens: int | None = None,
    num_samples: int = 1,
    seed: int = 0,
    mode: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    file: str | None = None,
    json: bool = False,
) -> None:
    """Print continuations of texts by 60 tokens, or --new-tokens; of a model of records
    to their end. --mode l2r reads best."""
    text_model = load(model)
    if new_tokens is None and text_model.end is None:
        new_tokens = 60
    samples = text_model.generate(
        read(texts, file),
        new_tokens,
        num_samples,
        seed,
        mode=mode,
        temperature=temperature,
        top_p=top_p,
    )
    show_texts(samples, json)


FUNCTIONS = {
    function.__name__: function for function in (score, rank, fill, blanks, generate)
}


def main() -> None:
    """Run the function that the first word names, with the words after it."""
    if sys.argv[1:2] == ["--version"]:
        from . import __version__

        show(f"aogpt {__version__}")
    else:
        with warnings.catch_warnings():
            warnings.showwarning = show_note
            tyro.extras.subcommand_cli_from_dict(
                FUNCTIONS, prog="aogpt", description=__doc__
            )


def show_note(message: Warning | str, *where: Any, **named: Any) -> None:
    """Print a warning as a line, without the place in the code that it comes from."""
    show(f"note: {message}", file=sys.stderr)


def console() -> None:
    """Run the installed command `aogpt`."""
    run_script(main)


if __name__ == "__main__":
    console()
