"""The command `aogpt`, or `python -m aogpt`: text in, text out.

MODEL is a run folder, such as results/books_model, released weights, or a Hugging Face
repo id.

    aogpt score MODEL "The old horse was tired."     probability of tokens and text
    aogpt rank MODEL "The [cat|dog|tax] barked."     which alternative is most probable
    aogpt fill MODEL "She[MASK:4] home."             fill gaps
    aogpt blanks MODEL "The cat[MASK] home."         what fits into a blank
    aogpt generate MODEL "Once upon a time"          continue a text"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split

import math
import re
import sys
import warnings
from typing import Annotated, Any

import tyro

from .runtime.command_line import TEXT, run_script, show
from .runtime.errors import UserError

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Texts = Annotated[
    list[Annotated[str, TEXT]],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="TEXT ...", help_behavior_hint=""),
]


def load(path: str, texts: list[str]):
    """Load a model on a GPU if there is one. Raises UserError if there is no text."""
    if not texts:
        raise UserError(
            f"give a text after the model, {path}; one of several words needs quotes"
        )
    from . import text_model  # imports PyTorch, which --help does not need

    return text_model.load(path, device="auto")


def score(
    model: Model,
    texts: Texts,
    order: str = "l2r",
    seed: int = 0,
    end: bool = False,
    predict: tuple[str, ...] = (),
    orders: int = 1,
) -> None:
    """Print log p (nats) of the tokens of texts; --end scores the end, too. --predict
    3:7 20:21 scores these characters alone, given all others; --orders 16 averages."""
    spans = [span_of(words) for words in predict] or None
    scores = load(model, texts).score(
        texts, order, seed, end, predict=spans, orders=orders
    )
    for scored in scores:
        for piece, log_prob in zip(scored.pieces, scored.log_probs, strict=True):
            values = "        -        -"
            if log_prob is not None:
                values = f"{log_prob:9.3f} {math.exp(log_prob):8.2%}"
            show(f"{values}  {piece!r}")
        show(
            f"{-scored.nats:9.3f} nats, {scored.scored} tokens, "
            f"{scored.bits_per_byte:.4f} bits a byte"
        )


def span_of(words: str) -> tuple[int, int]:
    """Return the span of characters that FIRST:LAST is."""
    span = re.fullmatch(r"(\d{1,9}):(\d{1,9})", words)
    if span is None:
        raise UserError(f"--predict {words:.40}: give characters as 3:7")
    return int(span[1]), int(span[2])


def rank(model: Model, texts: Texts, end: bool = False) -> None:
    """Print alternatives with log p of the whole text, nats, and their shares."""
    for alternatives in load(model, texts).rank(texts, end):
        for row in alternatives:
            show(f"{row.log_prob:9.3f} {row.share:7.1%}  {row.text!r}")


def blanks(model: Model, texts: Texts, top: int = 10) -> None:
    """Print the likeliest tokens of each mask."""
    for blanks_of_text in load(model, texts).blanks(texts, top):
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
) -> None:
    """Print texts with their gaps filled in: [MASK] is one token, [MASK:4] four."""
    samples = load(model, texts).fill(
        texts, num_samples, seed, mode=mode, temperature=temperature, top_p=top_p
    )
    for sample in samples:
        show(sample.text)


def generate(
    model: Model,
    texts: Texts,
    new_tokens: int = 60,
    num_samples: int = 1,
    seed: int = 0,
    mode: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
) -> None:
    """Print continuations of texts; --mode l2r reads best."""
    samples = load(model, texts).generate(
        texts,
        new_tokens,
        num_samples,
        seed,
        mode=mode,
        temperature=temperature,
        top_p=top_p,
    )
    for sample in samples:
        show(sample.text)


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
