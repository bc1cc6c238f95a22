"""A text whose blanks are filled in one by one, and its view for the page."""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

import aogpt
from aogpt.data.pieces import token_text
from aogpt.data.tokenizers import Tokenizer
from aogpt.runtime.command_line import visible
from aogpt.runtime.errors import UserError
from aogpt.runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from aogpt.sampling.modes import Context
from aogpt.sampling.scores import scores_of
from aogpt.sampling.token_choice import TokenChoice, choose_tokens
from aogpt.scoring import known_from, masked_logits, token_log_probs

IMPOSSIBLE = -1e4  # nats
CHOICES = 8  # tokens that are listed for a blank
REPLACEMENT = "\ufffd"


class Filled(NamedTuple):
    """A token that was filled in."""

    position: int
    token: int
    log_prob: float  # nats, given all tokens that were known


class Fill:
    """A text whose blanks are filled in one by one: with one rule, temperature and seed
    throughout, as in the first sample of sample.py."""

    def __init__(self, text: aogpt.TextModel, context: Context):
        self.text = text
        self.context = list(context)
        self.tokens = list(context)
        self.steps: list[Filled] = []
        self._log_probs: Tensor | None = None  # of every blank, (blanks, V)

    @property
    def blanks(self) -> list[int]:
        """Return the positions that are not filled in."""
        return [i for i, token in enumerate(self.tokens) if token is None]

    @property
    def sums(self) -> list[float]:
        """Return the sum of log p of the tokens filled in, after each of them."""
        sums = [0.0]
        for step in self.steps:
            sums.append(sums[-1] + step.log_prob)
        return sums

    def log_probs(self, position: int) -> Tensor:
        """Return log p of every id at a blank given all known tokens, float64 (V,)."""
        if self._log_probs is None:
            self._log_probs = self._log_probs_of_blanks()
        return self._log_probs[self.blanks.index(position)]

    def _log_probs_of_blanks(self) -> Tensor:
        """Return log p of every id at every blank, float64 (blanks, V). A decoder reads
        the known tokens in the order in which they became known."""
        order = []
        is_blank = []
        for position, token in enumerate(self.tokens):
            is_blank.append(token is None)
            is_given = self.context[position] is not None
            if is_given:
                order.append(position)
        for step in self.steps:
            order.append(step.position)
        order += self.blanks
        tokens = [token or 0 for token in self.tokens]
        device = self.text.device
        logits = masked_logits(
            self.text.model,
            torch.tensor([tokens], device=device),
            torch.tensor([is_blank], device=device),
            torch.tensor([order], device=device),
        )
        log_probs = logits.cpu().double().log_softmax(dim=-1)
        # Ids that only pad the token table are never drawn.
        vocab_size = self.text.loaded.vocab_size
        return log_probs[:, :vocab_size]

    def best(self, position: int, count: int = 1) -> list[tuple[int, float]]:
        """Return the likeliest ids at a blank, and their probabilities."""
        probabilities = self.log_probs(position).exp()
        best = probabilities.topk(min(count, len(probabilities)))
        ids = best.indices.tolist()
        values = best.values.tolist()
        return list(zip(ids, values, strict=True))

    def next(self, rule: str, seed: int) -> int | None:
        """Return the next blank by one of the page's rules; None if none is left, or if
        the visitor clicks on it."""
        blanks = self.blanks
        if not blanks or rule == "click":
            return None
        if rule == "l2r":
            return blanks[0]
        if rule == "random":
            uniforms = self._uniforms(seed, PLANS)
            return min(blanks, key=lambda blank: uniforms[blank])
        log_probs = [self.log_probs(blank) for blank in blanks]
        scores = scores_of(torch.stack(log_probs), [rule])
        return blanks[int(scores.argmax())]

    def _uniforms(self, seed: int, stream: int) -> list[float]:
        first = range(1)  # the first sample of sample.py
        width = len(self.context)
        bits = philox_bits(seed, 0, rows=first, width=width, stream=stream)
        uniforms = to_uniform(bits)
        return uniforms[0].tolist()

    def draw(
        self, position: int, temperature: float, seed: int, top_p: float = 1.0
    ) -> None:
        """Draw the token of a blank."""
        uniform = self._uniforms(seed, TOKENS)[position]
        token = choose_tokens(
            self.log_probs(position)[None],
            torch.tensor([uniform], dtype=torch.float64),
            TokenChoice(temperature=temperature, top_p=top_p),
        )
        self.put(position, int(token))

    def put(self, position: int, token: int) -> None:
        """Put a token into a blank."""
        log_probs = self.log_probs(position)
        step = Filled(position=position, token=token, log_prob=float(log_probs[token]))
        self.steps.append(step)
        self.tokens[position] = token
        self._log_probs = None

    def write(self, position: int, text: str) -> None:
        """Put one's own text into a blank and those right after it. Raises UserError if
        it does not fit."""
        tokenizer = self.text.tokenizer
        encode = tokenizer.encode_after if position > 0 else tokenizer.encode
        ids = encode(text)
        places = range(position, position + len(ids))
        fits = set(places) <= set(self.blanks)
        if not ids or not fits:
            raise UserError(
                f"{text!r} has {len(ids)} tokens, which do not fit into these blanks"
            )
        for place, token in zip(places, ids, strict=True):
            self.put(place, token)

    def undo(self) -> None:
        """Take the last token back, if there is one."""
        if self.steps:
            step = self.steps.pop()
            self.tokens[step.position] = None
            self._log_probs = None

    def left_to_right(self) -> tuple[float, float]:
        """Return log p of a finished text's filling given the rest, and of the whole
        text, nats."""
        given = [i for i, token in enumerate(self.context) if token is not None]
        blanks = [i for i, token in enumerate(self.context) if token is None]
        tokens = torch.tensor([self.tokens], device=self.text.device)
        order = torch.tensor([given + blanks], device=self.text.device)
        left_to_right = torch.arange(tokens.shape[1], device=self.text.device)[None]
        log_probs = token_log_probs(
            self.text.model, tokens, order, known=known_from(len(given), left_to_right)
        )
        filling = float(log_probs.double().sum())
        whole = token_log_probs(self.text.model, tokens, left_to_right)
        first = self.text.loaded.scored_from
        return filling, float(whole[0, first:].double().sum())


def new_fill(text: aogpt.TextModel, context: Context) -> Fill:
    """Return a text to fill in. Raises UserError for a plain GPT."""
    if text.model.config.l2r_only:
        raise UserError("this model is a plain GPT, which only continues texts")
    if text.end is not None:
        raise UserError(
            "this model was trained on records whose end is given (data.end), which "
            "the page does not show: python -m aogpt fill MODEL TEXT"
        )
    return Fill(text, context)


def view(fill: Fill, selected: int | None = None) -> dict:
    """Return a text as app.js draws it. selected: the blank that is outlined."""
    return {
        "tokens": token_views(fill, selected),
        "scores": score_views(fill),
        "sums": fill.sums,
        "choices": choice_views(fill, selected),
    }


def token_views(fill: Fill, selected: int | None) -> list[dict]:
    """Return the tokens of a text, blanks and known ones, run by run."""
    views: list[dict] = []
    positions = range(len(fill.tokens))
    runs = itertools.groupby(positions, key=lambda i: fill.tokens[i] is None)
    for is_blank, run in runs:
        if is_blank:
            views += blank_views(fill, list(run), selected)
        else:
            views += known_views(fill, list(run))
    return views


def score_views(fill: Fill) -> list[tuple[str, float, int]]:
    """Return sums of log-probabilities, each with its name and its number of tokens."""
    count = len(fill.steps)
    scores = [("in the order taken", fill.sums[-1], count)]
    if fill.blanks:
        return scores
    filling, whole = fill.left_to_right()
    scores.append(("the same tokens, left to right", filling, count))
    # Without a start token the first token is not scored.
    scored = len(fill.tokens) - fill.text.loaded.scored_from
    scores.append(("the whole text, left to right", whole, scored))
    return scores


def choice_views(fill: Fill, selected: int | None) -> list[tuple[int, int, str, float]]:
    """Return the tokens that fit into the outlined blank: the blank, the token, its
    text and its probability."""
    if selected is None:
        return []
    choices = []
    for token, probability in fill.best(selected, CHOICES):
        if probability > 0:
            text = shown(fill, token)
            choices.append((selected, token, text, probability))
    return choices


def shown(fill: Fill, token: int) -> str:
    """Return the text of one token. Control characters are escaped, and half a
    character is shown as its bytes."""
    return visible(token_text(fill.text.tokenizer, token))


def blank_views(fill: Fill, positions: list[int], selected: int | None) -> list[dict]:
    """Return the blanks of a run, with their likeliest tokens."""
    views = []
    for position in positions:
        ((token, probability),) = fill.best(position)
        blank = {
            "blank": position,
            "next": position == selected,
            "text": shown(fill, token),
            "p": probability,
        }
        views.append(blank)
    return views


def known_views(fill: Fill, positions: list[int]) -> list[dict]:
    """Return the known tokens of a run, each with the number of the step that filled it
    in; 0 for the tokens of the prompt."""
    number_of = {}
    for number, step in enumerate(fill.steps, 1):
        number_of[step.position] = number
    ids = [fill.tokens[position] for position in positions]
    pieces = readable_pieces(fill.text.tokenizer, ids)
    views = []
    for position, piece in zip(positions, pieces, strict=True):
        number = number_of.get(position, 0)
        probability = 1.0
        if number > 0:
            probability = math.exp(fill.steps[number - 1].log_prob)
        token = {"step": number, "text": visible(piece), "p": probability}
        views.append(token)
    return views


def readable_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token, as `Tokenizer.pieces`, but with bytes in place of
    characters that are not complete. A complete character belongs to its last token."""
    pieces = tokenizer.pieces(ids)
    start = 0  # the first token of this character
    for i, piece in enumerate(pieces):
        if piece == "" and i + 1 < len(pieces):
            continue
        tokens = ids[start : i + 1]
        if piece == "" or REPLACEMENT in piece:
            is_written = REPLACEMENT.encode() in tokenizer.to_bytes(tokens)
            if not is_written:
                pieces[start : i + 1] = [token_text(tokenizer, t) for t in tokens]
        start = i + 1
    return pieces
