"""The commands `aogpt score|fill|rank|blanks|generate MODEL TEXT ...`.

Each is a dataclass of its options with a method `answer` for one text, which returns
plain values, for --json, and the lines to show."""

import abc
import functools
import inspect
import math
import re
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from . import text_model as aogpt
from .data.pieces import token_text
from .orders import parse_order
from .runtime.command_line import ModelOptions, counted, run_script, show, with_help
from .runtime.devices import pick_device, pick_dtype
from .runtime.errors import UserError
from .runtime.outputs import OutputOptions, Outputs, markdown_table, provenance
from .runtime.validation import Count, check_values
from .sampling.alternatives import BRACKETS
from .sampling.gaps import MASK, RankBy, encode_gaps, seed_of_request, space_note
from .sampling.modes import Mode
from .sampling.resampling import is_resampled
from .sampling.token_choice import Temperature, TokenChoice

Answer = tuple[dict, list[str]]


@dataclass(frozen=True, kw_only=True)
class Command(ModelOptions, OutputOptions, abc.ABC):
    """The options of all commands."""

    example: ClassVar[str]  # a text for messages
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Run folder (out/NAME), checkpoint, exported or released weights, or Hugging Face
    repo id."""
    texts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT ...")
    ]
    """One text or several."""
    json: Path | None = None
    """Also write all results to this file."""

    def __post_init__(self):
        check_values(self)

    @abc.abstractmethod
    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        """Return the results for a text: plain values, and lines to show."""


@dataclass(frozen=True, kw_only=True)
class Score(Command):
    """Score texts: the probability of each token and of the whole text.

    aogpt score MODEL "The old horse was tired." --order random
    aogpt score MODEL "The old horse was tired." --each

    Log-probabilities are natural logarithms. "<|endoftext|>" in a text is end-of-text.
    For long texts and data sets see eval_ppl.py."""

    example = "The old horse was tired."
    order: str = "l2r"
    """Order in which tokens are predicted: l2r, random or another order.kind, as
    slots:block=8."""
    each: bool = False
    """Score each token given all others, before and after it, instead of along an
    order."""
    end: bool = False
    """Score the end of the text, too, as one more token."""

    def __post_init__(self):
        super().__post_init__()
        if self.each and (self.order != "l2r" or self.end):
            raise UserError(
                "--each uses no order and no end: leave out --order and --end"
            )

    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        if BRACKETS.search(text):
            raise UserError("the text has alternatives: aogpt rank compares them")
        if self.each:
            scored = model.score_each(text)
            values = {"sum": -scored.nats}
            lines = token_table(model, scored)
            lines.append(
                f"each given all others: sum {-scored.nats:.3f}, no probability of the "
                "text"
            )
        else:
            scored = model.score(text, self.order, self.seed, end=self.end)
            bits = scored.bits_per_byte
            values = {
                "log_prob": -scored.nats,
                "scored": scored.scored,
                "nats_per_token": scored.nats_per_token,
                "bits_per_byte": None if math.isnan(bits) else bits,
            }
            lines = token_table(model, scored)
            lines.append(
                f"order {self.order}: log p {-scored.nats:.3f} of {scored.scored} "
                f"tokens, {number(bits, 4)} bits a byte"
            )
            orders = parse_order(self.order, "--order")
            if orders.has_longer_blocks(len(scored.ids)):
                lines.append(
                    f"its blocks of {orders.block} are longer than the text, "
                    f"{counted(len(scored.ids), 'tokens')}, which is one block"
                )
            blocks = math.ceil(len(scored.ids) / model.block_size)
            if blocks > 1:
                lines.append(
                    f"the sum over {blocks} blocks of at most {model.block_size} "
                    "tokens, each scored by itself"
                )
        values.update(asdict(scored))
        return values, lines


@dataclass(frozen=True, kw_only=True)
class Rank(Command):
    """Rank alternatives in a text by the probability of the whole text.

    aogpt rank MODEL "The [cat|dog|tax] barked."
    aogpt rank MODEL "She went home[.|]" --end"""

    example = "The [cat|dog|tax] barked."
    end: bool = False
    """Score the end of the text, too: for alternatives at the end."""

    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        alternatives = model.rank(text, end=self.end)
        head = ["text", "log p", "share"]
        has_both_sides = any(row.given_both_sides is not None for row in alternatives)
        if has_both_sides:
            head.append("log p given both sides")
        cells = []
        for alternative in alternatives:
            row = [
                one_line(alternative.text),
                number(alternative.log_prob),
                f"{alternative.share:.1%}",
            ]
            if has_both_sides:
                row.append(number(alternative.given_both_sides))
            cells.append(row)
        legend = (
            "log p of the whole text, in nats, and its share among the alternatives"
        )
        if has_both_sides:
            legend += "; given both sides: of the tokens that alternatives do not share"
        lines = markdown_table(head, cells)
        lines += ["", legend]
        ids = []
        for row in alternatives:
            ids.append(model.tokenizer.encode_documents(row.text).tolist())
        begins = any(a != b and b[: len(a)] == a for a in ids for b in ids)
        if begins and not self.end:
            lines.append(
                "one text is the beginning of another, so it is at least as probable: "
                "--end scores the end of the text, too"
            )
        return {"alternatives": [asdict(row) for row in alternatives]}, lines


@dataclass(frozen=True, kw_only=True)
class Blanks(Command):
    """List the likeliest tokens for each masked token, given the text on both sides.

    aogpt blanks MODEL "The dog[MASK:2] at the moon." --top 5"""

    example = "The cat[MASK] home."
    top: Count = 10
    """Number of tokens to list for each mask."""

    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        blanks = model.blanks(text, self.top)
        ranks = range(1, len(blanks[0]) + 1)
        head = ["mask"] + [f"{rank}." for rank in ranks]
        cells = []
        values = []
        for place, likely in enumerate(blanks, 1):
            texts = [f"{token.text!r} {token.probability:.1%}" for token in likely]
            cells.append([str(place), *texts])
            values.append([token._asdict() for token in likely])
        lines = [text, ""]
        lines += markdown_table(head, cells, left=len(head))
        nothing_known = MASK.sub("", text) == ""
        if nothing_known and all(likely == blanks[0] for likely in blanks[1:]):
            lines.append(
                "nothing is known, and this model predicts the same at all positions "
                "then: it is conditioned on them by distances alone"
            )
        return {"blanks": values}, lines


@dataclass(frozen=True, kw_only=True)
class Drawing(Command, TokenChoice):
    """The options of commands that draw tokens."""

    seed: int | None = None
    """Repeats the samples; by default they are drawn anew each time. Each further text
    has a seed of its own, which is printed and repeats it alone."""
    num_samples: Count | None = None
    """Samples to draw."""
    mode: Mode | None = None
    """Order of the tokens: mdm (default), l2r (default of a plain GPT), confidence,
    ..."""

    def choice(self) -> dict[str, Any]:
        """Return the options of `TokenChoice`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(TokenChoice)}


@dataclass(frozen=True, kw_only=True)
class Fill(Drawing):
    """Fill the gaps of a text: [MASK] is one token, [MASK:3] three, [MASK:2-6] two to
    six.

    aogpt fill MODEL "The doctor[MASK:3-8] and closed the door." --candidates 3

    Put no space before a mask: words begin with theirs. A plain GPT fills gaps, too: it
    draws continuations, by default 64, and weights them by how well the text goes
    on. With --mode resampling other decoders do so as well."""

    example = "She[MASK:2-6] home."
    candidates: Count = 3
    """Different fillings to show at most, the best first."""
    temperature: Temperature | None = None
    """By default 0.7; of resampling 0.75, for which the weights correct."""
    rank_by: RankBy | None = None
    """What ranks fillings: filling (log p given both sides), right (of the text to the
    right), joint (of both). By default filling for gaps of known length, else right;
    joint of resampling."""

    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        choice = self.choice()
        gapped = encode_gaps(text, model.tokenizer, model.block_size)
        resamples = is_resampled(gapped, self.mode, model.model.config)
        if self.temperature is None and not resamples:
            choice["temperature"] = 0.7
        fillings = model.fill(
            text,
            self.candidates,
            num_samples=self.num_samples,
            seed=self.seed,
            mode=self.mode,
            rank_by=self.rank_by,
            **choice,
        )
        best = fillings[0]
        rows = []
        for filling in fillings:
            row = asdict(filling)
            for name, value in row["scores"].items():
                if math.isnan(value):
                    row["scores"][name] = None
            rows.append(row)
        ranking = best.ranked_by
        if ranking == "joint and right":
            ranking += ", summed over their tokens (the columns are means)"
        last = f"nats per token; ranked by {ranking}; seed {best.seed}"
        if best.effective_sample_size is not None:
            last += (
                "; weight: share of p(text in the gap | both sides), whatever its "
                f"length; effective sample size {best.effective_sample_size:.1f}"
            )
        lines = filling_table(fillings)
        lines += ["", last]
        return {"fillings": rows}, lines


@dataclass(frozen=True, kw_only=True)
class Generate(Drawing):
    """Continue a text.

    aogpt generate MODEL "Once upon a time" --mode l2r --top-p 0.9 --new-tokens 60

    Left to right reads best."""

    example = "Once upon a time"
    new_tokens: Count = 60
    """Tokens to generate."""
    temperature: Temperature = 0.7
    """0 takes the most probable token."""

    def answer(self, model: aogpt.TextModel, text: str) -> Answer:
        samples = model.generate(
            text,
            self.new_tokens,
            num_samples=self.num_samples or 1,
            seed=self.seed,
            mode=self.mode,
            **self.choice(),
        )
        lines = []
        for sample in samples:
            lines += [sample, ""]
        seed = samples[0].seed
        lines.append(f"seed {seed}")
        return {"samples": list(map(str, samples)), "seed": seed}, lines


COMMANDS = {
    "score": Score,
    "rank": Rank,
    "fill": Fill,
    "blanks": Blanks,
    "generate": Generate,
}


def number(value: float | None, decimals: int = 3) -> str:
    """Return a number with this number of decimals, "-" for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{decimals}f}"


def one_line(text: str) -> str:
    """Return a text in which line ends and other control characters are escaped."""
    return repr(text)[1:-1]


def token_table(model: aogpt.TextModel, scored: aogpt.Scored) -> list[str]:
    """Return the lines of a table of tokens, "-" for those that are not scored."""
    cells = []
    for token, log_prob in zip(scored.ids, scored.log_probs, strict=True):
        probability = "-"
        if log_prob is not None:
            probability = f"{math.exp(log_prob):.2%}"
        text = repr(token_text(model.tokenizer, token))
        cells.append([text, number(log_prob), probability])
    lines = markdown_table(["token", "log p", "p"], cells)
    lines.append("")
    return lines


def filling_table(fillings: list[aogpt.Filling]) -> list[str]:
    """Return the lines of a table of fillings with their scores."""
    head = ["text", "log p of the text to the right", "joint", "filling"]
    is_weighted = fillings[0].weight is not None
    if is_weighted:
        head.append("weight")
    cells = []
    for filling in fillings:
        scores = filling.scores
        row = [
            one_line(filling.text),
            number(scores.right),
            number(scores.joint),
            number(scores.filling),
        ]
        if is_weighted:
            row.append(f"{filling.weight:.1%}")
        cells.append(row)
    return markdown_table(head, cells)


def check_words(command: str, model: str, texts: tuple[str, ...]) -> None:
    """Raise UserError where the model or the text is missing, and note texts that look
    like the words of one text."""
    program = sys.argv[0]
    example = COMMANDS[command].example
    if re.search(r"[\s\[]", model) and not Path(model).exists():
        raise UserError(
            f"there is no model {model!r}; the model comes first, then the text: "
            f'{program} MODEL "{example}"'
        )
    if not texts:
        raise UserError(f'give a text, as in: {program} {model} "{example}"')
    if len(texts) > 1 and not any(" " in text for text in texts):
        show(
            f"note: these are {len(texts)} texts of one word; put a text of several "
            f'words in quotes: {program} {model} "{example}"',
            file=sys.stderr,
        )


def run(command: str) -> None:
    """Run the command of this name with the words of the command line."""
    if command not in COMMANDS:
        names = ", ".join([*COMMANDS, "playground"])
        raise UserError(f"no command {command!r}; choose one of {names}")
    kind = COMMANDS[command]
    # A function: tyro would show mistakes in the options of a class in a box. Indented,
    # as tyro joins lines that begin with a letter.
    a = tyro.cli(
        functools.partial(with_help(kind)),
        prog=sys.argv[0],
        description=textwrap.indent(inspect.getdoc(kind) or "", " "),
    )
    check_words(command, a.model, a.texts)
    outputs = Outputs({"--json": a.json}, [a.model], a.overwrite)
    device = pick_device(a.device)
    if sys.stderr.isatty():
        show(f"loading {a.model}", file=sys.stderr)  # ten seconds of a large model
    model = aogpt.load(
        a.model,
        weights=a.weights,
        device=device,
        block_size=a.block_size,
        checkpoint=a.checkpoint,
    )
    dtype = pick_dtype(a.dtype, device)
    model.model.to(dtype)
    rows = []
    warnings.filterwarnings("ignore", message="note: a mask after")  # shown here
    # Others are lines of their own, without the place in the code.
    warnings.formatwarning = lambda message, *place: f"{message}\n"
    for place, text in enumerate(a.texts, 1):
        if note := space_note(text, model.tokenizer):
            show(note, file=sys.stderr)
        of_text = a
        if isinstance(a, Drawing) and a.seed is not None:
            of_text = replace(a, seed=seed_of_request(a.seed, place - 1))
        with aogpt.in_list(place, len(a.texts)):
            values, lines = of_text.answer(model, text)
        row = {"text": text}
        row.update(values)
        rows.append(row)
        lines.append("")
        show("\n".join(lines))
    with outputs:
        origin = provenance(a, dtype, device, checkpoint=model.loaded.description)
        report = {"results": rows}
        report.update(origin)
        outputs.write_json(a.json, report)


def main() -> None:
    """Run the command that `python -m aogpt` has put into sys.argv, as "aogpt
    score"."""
    run(sys.argv[0].split()[-1])


if __name__ == "__main__":
    run_script(main)
