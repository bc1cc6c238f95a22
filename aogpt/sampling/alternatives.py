"""Alternatives of a text, "The [cat|dog|tax] barked.": read, and the tokens around
them."""

import itertools
import math
import re
from dataclasses import dataclass

from ..data.pieces import byte_spans
from ..data.tokenizers import Tokenizer, text_bytes
from ..runtime.errors import UserError
from .gaps import MOST_LENGTHS
from .modes import Context

BRACKETS = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")


@dataclass(frozen=True)
class Choices:
    """A text with brackets of alternatives."""

    fixed: list[str]  # the text around the brackets: one part more than brackets
    words: list[list[str]]  # the alternatives in each bracket

    def texts(self) -> dict[str, tuple[str, ...]]:
        """Return each different whole text, with its words in the brackets."""
        words_of_texts: dict[str, tuple[str, ...]] = {}
        for words in itertools.product(*self.words):
            whole = self.fixed[0]
            for word, after in zip(words, self.fixed[1:], strict=True):
                whole += word + after
            words_of_texts.setdefault(whole, words)
        return words_of_texts


def read_choices(text: str) -> Choices:
    """Read a text with alternatives. Raises UserError for one without, and for more
    than 512 combinations."""
    parts = BRACKETS.split(text)
    if len(parts) == 1:
        raise UserError("there are no alternatives; write [this|that]")
    choices = Choices(
        fixed=parts[::2],
        words=[part.split("|") for part in parts[1::2]],
    )
    if math.prod(map(len, choices.words)) > MOST_LENGTHS:
        raise UserError(f"give at most {MOST_LENGTHS} combinations of alternatives")
    return choices


def common_contexts(
    tokenizer: Tokenizer,
    fixed: list[str],
    words_of_texts: dict[str, tuple[str, ...]],
    rows: list[list[int]],
) -> list[Context]:
    """Return the tokens of each text, None for those that are not in all texts at the
    same place of the fixed text.

    Args:
        tokenizer: of the rows.
        fixed: the text around the brackets.
        words_of_texts: each whole text, with its words in the brackets.
        rows: the tokens of each text."""
    places_of_rows = []
    for (whole, words), row in zip(words_of_texts.items(), rows, strict=True):
        spans = byte_spans(tokenizer, row, whole)
        if spans is None:
            return _between_common_ends(rows)
        places_of_rows.append(_places(fixed, words, row, spans))
    shared = set(places_of_rows[0])
    for places in places_of_rows:
        shared.intersection_update(places)
    shared.discard(None)
    contexts = []
    for row, places in zip(rows, places_of_rows, strict=True):
        context: Context = []
        for token, place in zip(row, places, strict=True):
            context.append(token if place in shared else None)
        contexts.append(context)
    return contexts


Place = tuple[int, int, int]  # a part of the fixed text, the first byte in it, a token


def _places(
    fixed: list[str],
    words: tuple[str, ...],
    row: list[int],
    spans: list[tuple[int, int]],
) -> list[Place | None]:
    """Return the place of each token of a row in the fixed text; None for a token that
    is not wholly inside of one part. spans: the bytes of each token."""
    begins = []
    ends = []
    position = 0
    for part, word in zip(fixed, (*words, ""), strict=True):
        begins.append(position)
        ends.append(position + text_bytes(part))
        position = ends[-1] + text_bytes(word)
    places: list[Place | None] = []
    for token, (start, end) in zip(row, spans, strict=True):
        place = None
        for number in range(len(fixed)):
            if begins[number] <= start and end <= ends[number]:
                place = (number, start - begins[number], token)
                break
        places.append(place)
    return places


def _between_common_ends(rows: list[list[int]]) -> list[Context]:
    """Return the tokens of each row, None between the beginning and the end that all
    share."""
    shortest = min(map(len, rows))
    before = 0
    while before < shortest and len({row[before] for row in rows}) == 1:
        before += 1
    after = 0
    while after < shortest - before and len({row[-1 - after] for row in rows}) == 1:
        after += 1
    contexts = []
    for row in rows:
        hidden = len(row) - before - after
        context: Context = list(row[:before])
        context += [None] * hidden
        context += row[len(row) - after :]
        contexts.append(context)
    return contexts
