"""A text whose blanks are filled in one by one, and what the page draws of it."""

import itertools
import math

import torch
from torch import Tensor

from .. import text_model as aogpt
from ..data.pieces import readable_pieces, token_text
from ..runtime.command_line import visible
from ..runtime.errors import UserError
from ..runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from ..sampling import gaps
from ..sampling.adaptive import scores_of
from ..sampling.modes import Context
from ..sampling.resampling import fill_by_resampling
from ..sampling.token_choice import TokenChoice, choose_tokens
from ..scoring import masked_logits

IMPOSSIBLE = -1e4  # nats
CHOICES = 8  # tokens that are listed for a blank


class Fill:
    """A text whose blanks are filled in one by one: with one rule, temperature and seed
    throughout, as in the first sample of sample.py."""

    def __init__(self, text: aogpt.TextModel, context: Context):
        self.text = text
        self.context = list(context)
        self.tokens = list(context)
        # Position, token and its log p in nats, in the order in which they were filled.
        self.steps: list[tuple[int, int, float]] = []
        self._log_probs: Tensor | None = None  # of every blank, (blanks, V)

    @property
    def blanks(self) -> list[int]:
        """The positions that are not filled in."""
        return [i for i, token in enumerate(self.tokens) if token is None]

    @property
    def sums(self) -> list[float]:
        """log p of the tokens filled in, in their order, after each of them."""
        log_probs = [log_p for _, _, log_p in self.steps]
        return list(itertools.accumulate(log_probs, initial=0.0))

    def log_probs(self, position: int) -> Tensor:
        """Return log p of every id at a blank given all known tokens, float64 (V,)."""
        if self._log_probs is None:
            self._log_probs = self._log_probs_of_blanks()
        return self._log_probs[self.blanks.index(position)]

    def _log_probs_of_blanks(self) -> Tensor:
        """Return log p of every id at every blank, float64 (blanks, V). A decoder reads
        the known tokens in the order in which they became known."""
        rank = {position: i for i, (position, _, _) in enumerate(self.steps)}

        def place(position: int) -> tuple[bool, int]:
            is_blank = self.tokens[position] is None
            return is_blank, rank.get(position, -1)

        device = self.text.device
        positions = range(len(self.tokens))
        known = [token or 0 for token in self.tokens]
        is_blank = [token is None for token in self.tokens]
        logits = masked_logits(
            self.text.model,
            torch.tensor([known], device=device),
            torch.tensor([is_blank], device=device),
            torch.tensor([sorted(positions, key=place)], device=device),
        )
        log_probs = logits.cpu().double().log_softmax(dim=-1)
        # Ids that only pad the token table are never drawn.
        return log_probs[:, : self.text.loaded.vocab_size]

    def best(self, position: int, count: int = 1) -> list[tuple[int, float]]:
        """Return the likeliest ids at a blank, and their probabilities."""
        likeliest = self.log_probs(position).exp().topk(count)
        ids = likeliest.indices.tolist()
        return list(zip(ids, likeliest.values.tolist(), strict=True))

    def next(self, rule: str, seed: int) -> int | None:
        """Return the next blank by one of the page's rules; None if none is left, or if
        the visitor clicks on it."""
        blanks = self.blanks
        if not blanks or rule == "click":
            return None
        if rule == "l2r":
            return blanks[0]
        if rule == "random":
            return min(blanks, key=self._uniforms(seed, PLANS).__getitem__)
        log_probs = torch.stack([self.log_probs(blank) for blank in blanks])
        return blanks[int(scores_of(log_probs, [rule]).argmax())]

    def _uniforms(self, seed: int, stream: int) -> list[float]:
        """Return a random number for each position."""
        bits = philox_bits(seed, 0, range(1), len(self.context), stream)
        return to_uniform(bits)[0].tolist()

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
        self.steps.append((position, token, float(self.log_probs(position)[token])))
        self.tokens[position] = token
        self._log_probs = None

    def write(self, position: int, text: str) -> None:
        """Put one's own text into a blank and those right after it. Raises UserError if
        it does not fit."""
        ids = self.text.tokenizer.encode(text)
        places = range(position, position + len(ids))
        if not ids or not set(places) <= set(self.blanks):
            raise UserError(
                f"{text!r} has {len(ids)} tokens, which do not fit into these blanks"
            )
        for place, token in zip(places, ids, strict=True):
            self.put(place, token)

    def undo(self) -> None:
        """Take the last token back, if there is one."""
        if self.steps:
            position, _, _ = self.steps.pop()
            self.tokens[position] = None
            self._log_probs = None

    def left_to_right(self) -> tuple[float, float]:
        """Return log p of a finished text's filling given the rest, and of the whole
        text, nats."""
        (scores,) = gaps.score_fillings(self.text.model, [self.context], [self.tokens])
        filling = scores.filling * self.context.count(None)
        return filling, self.text.log_prob(self.tokens)


class PlainFill(Fill):
    """The same with a plain GPT. What fits into a blank is estimated from weighted
    fillings of the whole text, those that agree with the tokens filled in so far."""

    def __init__(self, text: aogpt.TextModel, context: Context, seed: int):
        super().__init__(text, context)
        gapped = gaps.gapped_of(context)
        if not gapped.known[0] and text.loaded.scored_from:
            raise UserError("this model has no start token (GPT-2): begin with text")
        self.weighted = fill_by_resampling(
            text.model, gapped, seed=seed, vocab_size=text.loaded.vocab_size
        )

    def log_probs(self, position: int) -> Tensor:
        """Return log p of every id at a blank, float64 (V,); IMPOSSIBLE where none was
        drawn."""
        shares = torch.zeros(self.text.loaded.vocab_size, dtype=torch.float64)
        pairs = zip(self.weighted.tokens, self.weighted.weights, strict=True)
        for tokens, weight in pairs:
            if all(tokens[place] == token for place, token, _ in self.steps):
                shares[tokens[position]] += weight
        return (shares / shares.sum()).log().clamp(min=IMPOSSIBLE)

    def put(self, position: int, token: int) -> None:
        """Put a token into a blank. Raises UserError for one that was not drawn."""
        if self.log_probs(position)[token] <= IMPOSSIBLE:
            raise UserError(
                "a plain GPT takes tokens of the fillings that it drew: choose one of the "
                "list, or Restart with another seed"
            )
        super().put(position, token)

    def left_to_right(self) -> tuple[float, float]:
        """Return NaN, and log p of the whole text, nats."""
        return math.nan, self.text.log_prob(self.tokens)


def new_fill(text: aogpt.TextModel, context: Context, seed: int) -> Fill:
    """Return a text to fill in with any model."""
    if text.model.config.l2r_only:
        return PlainFill(text, context, seed)
    return Fill(text, context)


def view(fill: Fill, selected: int | None = None) -> dict:
    """Return a text as app.js draws it. selected: the blank that is outlined."""
    tokens: list[dict] = []
    runs = itertools.groupby(
        range(len(fill.tokens)), key=lambda i: fill.tokens[i] is None
    )
    for is_blank, run in runs:
        positions = list(run)
        if is_blank:
            tokens += blank_views(fill, positions, selected)
        else:
            tokens += known_views(fill, positions)
    scores = [("in the order taken", fill.sums[-1], len(fill.steps))]
    if not fill.blanks:
        filling, whole = fill.left_to_right()
        if not math.isnan(filling):
            scores.append(("the same tokens, left to right", filling, len(fill.steps)))
        scores.append(("the whole text, left to right", whole, len(tokens)))
    choices = []
    if selected is not None:
        for token, p in fill.best(selected, CHOICES):
            if p > 0:
                choices.append((selected, token, shown(fill, token), p))
    return {"tokens": tokens, "scores": scores, "sums": fill.sums, "choices": choices}


def shown(fill: Fill, token: int) -> str:
    """Return the text of one token. Control characters are escaped, and half a
    character is shown as its bytes."""
    return visible(token_text(fill.text.tokenizer, token))


def blank_views(fill: Fill, positions: list[int], selected: int | None) -> list[dict]:
    """Return the blanks of a run, with their likeliest tokens."""
    views = []
    for position in positions:
        ((token, p),) = fill.best(position)
        blank = {
            "blank": position,
            "next": position == selected,
            "text": shown(fill, token),
            "p": p,
        }
        views.append(blank)
    return views


def known_views(fill: Fill, positions: list[int]) -> list[dict]:
    """Return the tokens of a run that are known, with the steps that filled them in; 0
    for given ones."""
    steps = {}
    for number, (position, _, log_p) in enumerate(fill.steps, 1):
        steps[position] = (number, log_p)
    ids = [fill.tokens[position] for position in positions]
    pieces = readable_pieces(fill.text.tokenizer, ids)
    views = []
    for position, piece in zip(positions, pieces, strict=True):
        step, log_p = steps.get(position, (0, 0.0))
        views.append({"step": step, "text": visible(piece), "p": math.exp(log_p)})
    return views
