"""The command `aogpt`, or `python -m aogpt`: text in, text out.

MODEL is a run folder, such as results/books_model, released weights, or a Hugging Face
repo id.

    aogpt score MODEL "The old horse was tired."     probability of tokens and text
    aogpt score MODEL "A cat slept." --predict 2:5   of characters given all others
    aogpt rank MODEL "The [cat|dog|tax] barked."     which alternative is most probable
    aogpt fill MODEL "She[MASK:4] home."             fill gaps
    aogpt blanks MODEL "The cat[MASK] home."         what fits into a blank
    aogpt generate MODEL "Once upon a time"          continue a text

--file FILE reads a text a line and skips blank lines; --file - reads standard input.
--json prints each answer as a line of JSON."""

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


@dataclasses.dataclass(frozen=True)
class Words:
    """What every command is given.

    Args:
        file: a text a line; - is standard input.
        json: print each answer as a line of JSON.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    texts: Annotated[
        list[Annotated[str, TEXT]],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="TEXT ...", help_behavior_hint=""),
    ]
    file: str | None = None
    json: bool = False

    def load(self) -> Any:
        """Load the model, on a GPU if there is one."""
        from . import text_model  # imports PyTorch, which --help does not need

        return text_model.load(self.model)

    def read(self) -> list[str]:
        """Return the texts of the command line, or the lines of a file that are not
        blank."""
        if (self.file is None) == (not self.texts):
            raise UserError(
                "give texts after the model, in quotes, or --file FILE with one a line"
            )
        if self.file is None:
            for text in self.texts:
                if os.path.isfile(text):
                    show_note(f"{text!r} is taken as a text; --file reads the file")
            return self.texts
        path = Path("/dev/stdin" if self.file == "-" else self.file)
        if path.suffix in (".json", ".jsonl"):
            raise UserError(f"--file {path} is JSON: give a file with a text a line")
        return [line for _, line in read_lines(path)]

    def show(self, answers: Iterable[Any], lines: Iterable[str]) -> None:
        """Print answers in words, or each as a line of JSON."""
        if self.json:
            lines = (dumps(answer, default=fields_of) for answer in answers)
        for line in lines:
            show(line)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How texts are generated.

    Args:
        num_samples: of each text.
        seed: repeats the samples.
        mode: the order of generation, such as l2r, random or confidence.
        temperature: below 1 prefers the model's more probable tokens; 1 is the model's
            own distribution.
        top_p: draw from the most probable tokens that together have this share.
    """

    num_samples: int = 1
    seed: int = 0
    mode: str | None = None
    temperature: float = 0.7
    top_p: float = 1.0


Asked = Annotated[Words, tyro.conf.arg(name="")]
Sampled = Annotated[Sampling, tyro.conf.arg(name="")]


def fields_of(answer: Any) -> dict[str, Any]:
    """Return an answer as plain values."""
    row = dataclasses.asdict(answer)
    for name in ("nats", "bits_per_byte"):
        value = getattr(answer, name, None)
        if value is not None and math.isfinite(value):
            row[name] = value
    if "nats" in row:
        row["log_prob"] = -row["nats"]
    return row


def score(
    words: Asked,
    order: str = "l2r",
    seed: int = 0,
    end: bool = False,
    predict: tuple[str, ...] = (),
    orders: int = 1,
) -> None:
    """Print log p (nats) of the tokens of texts, or of parts of them given the rest.

    Args:
        order: in which tokens are scored: l2r, random or another kind.
        seed: of random orders.
        end: score the end of each text, too.
        predict: characters to score given all others, the same in each text: 3:7 20:21
            are text[3:7] and text[20:21].
        orders: average the probability of --predict over this number of orders.
    """
    spans = [span_of(span) for span in predict] or None
    texts = words.read()
    scores = words.load().score(texts, order, seed, end, predict=spans, orders=orders)
    lines = []
    for scored in scores:
        for piece, log_prob in zip(scored.pieces, scored.log_probs, strict=True):
            values = "        -        -"
            if log_prob is not None:
                values = f"{log_prob:9.3f} {math.exp(log_prob):8.2%}"
            lines.append(f"{values}  {piece!r}")
        totals = f"{-scored.nats:9.3f} nats, {scored.scored} tokens"
        if scored.bits_per_byte is not None:
            totals += f", {scored.bits_per_byte:.4f} bits a byte"
        if orders > 1:  # of --predict alone, so this is a `Joint`
            error = scored.standard_error
            totals += f"; averaged over orders, ± {error:.3f}; above: the first one"
        lines.append(totals)
    words.show(scores, lines)


def span_of(text: str) -> tuple[int, int]:
    """Return the span of characters that FIRST:LAST is."""
    span = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if span is None:
        raise UserError(f"--predict {text:.40}: give characters as 3:7")
    return int(span[1]), int(span[2])


def rank(words: Asked, end: bool = False) -> None:
    """Print alternatives with log p of the whole text, nats, and their shares.

    Args:
        end: score the end of each text, too; a model of records always does.
    """
    texts = words.read()
    ranked = words.load().rank(texts, end)
    lines = []
    for alternatives in ranked:
        for row in alternatives:
            lines.append(f"{row.log_prob:9.3f} {row.share:7.1%}  {row.text!r}")
    words.show(ranked, lines)


def blanks(words: Asked, top: int = 10) -> None:
    """Print the likeliest tokens of each mask.

    Args:
        top: how many tokens.
    """
    texts = words.read()
    likely_tokens = words.load().blanks(texts, top)
    lines = []
    for blanks_of_text in likely_tokens:
        for likely in blanks_of_text:
            lines.append(
                "  ".join(f"{one.text!r} {one.probability:.1%}" for one in likely)
            )
    words.show(likely_tokens, lines)


def fill(words: Asked, sampling: Sampled) -> None:
    """Print texts with their gaps filled in: [MASK] is one token, [MASK:4] four."""
    texts = words.read()
    samples = words.load().fill(texts, **vars(sampling))
    words.show(samples, [sample.text for sample in samples])


def generate(words: Asked, sampling: Sampled, new_tokens: int | None = None) -> None:
    """Print continuations of texts by 60 tokens, or --new-tokens; of a model of records
    to their end. --mode l2r reads best.

    Args:
        new_tokens: how many tokens follow each text.
    """
    texts = words.read()
    model = words.load()
    if new_tokens is None and model.end is None:
        new_tokens = 60
    samples = model.generate(texts, new_tokens, **vars(sampling))
    words.show(samples, [sample.text for sample in samples])


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
