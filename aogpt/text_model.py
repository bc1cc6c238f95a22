"""Models from Python: text in, text out.

    import aogpt
    model = aogpt.load("results/books_model")
    print(model.score("The old horse was tired.").nats)
    print(model.fill("She[MASK:2-6] home.", candidates=3)[0].text)
    print(model.rank("The [cat|dog|tax] barked.")[0].text)
    print(model.blanks("The cat[MASK] home.")[0])

`.model` is the network, `.tokenizer` its tokenizer: see checkpoints.Loaded."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checkpoints
from .evaluation.estimates import Estimate
from .evaluation.eval_sets import comparable, open_text
from .evaluation.likelihood import BatchRunner, Scorer, Task, difference, losses_of
from .orders import orders_at, parse_order
from .runtime.errors import UserError
from .runtime.processes import Processes
from .runtime.randomness import SCORED_ORDERS
from .runtime.validation import Count, check_value
from .sampling import gaps, modes
from .sampling.modes import Context, DecodingOptions

ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a text's tokens, nats, by position."""

    pieces: list[str]  # the text of each token
    log_probs: list[float]
    bytes: int  # of the scored text in UTF-8

    @property
    def nats(self) -> float:
        """-log p of the text."""
        return -math.fsum(self.log_probs)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(1, self.bytes)


@dataclass(frozen=True)
class Filling:
    """A text with its gaps filled in. Scores are in nats per token: `gaps.Scores`."""

    text: str
    tokens: list[int]
    scores: gaps.Scores
    context: Context  # the tokens, None in the gaps


@dataclass(frozen=True)
class Alternative:
    """A text with one of the alternatives of each bracket."""

    text: str
    log_prob: float  # of the whole text, nats
    share: float  # of the probability of all alternatives
    given_both_sides: (
        float | None
    )  # log p of the alternatives given the rest; None: a plain GPT


def load(path: str, **options: Any) -> "TextModel":
    """A model with text in and out. options: weights, device, block_size, checkpoint, of
    `checkpoints.load`, which says what paths there are."""
    return TextModel(checkpoints.load(path, **options))


class TextModel:
    """A model and its tokenizer, as `load` returns them."""

    def __init__(self, loaded: checkpoints.Loaded):
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.get_tokenizer()
        self.device = self.model.wte.weight.device
        self.block_size = self.model.config.block_size

    def score(self, text: str, order: str | Tensor = "l2r", seed: int = 0) -> Scored:
        """log p of every token, given those before it in an order: "l2r", "random" or another kind
        of orders.py, or a permutation (T,). Longer texts are scored in blocks, each by itself; a
        model without a start token does not score the first token of an order (0)."""
        ids = self.tokenizer.encode(text)
        found = []
        skipped = []
        if len(ids) <= self.loaded.scored_from:
            raise UserError("there is no text to score")
        for number, start in enumerate(range(0, len(ids), self.block_size)):
            tokens = torch.tensor([ids[start : start + self.block_size]])
            along = self._order(order, tokens.shape[1], seed, number)
            found += self._along(tokens, along)
            skipped += [ids[start + int(along[0, 0])]] * self.loaded.scored_from
        size = len(text.encode(errors="replace")) - len(
            self.tokenizer.to_bytes(skipped)
        )
        return Scored(self.tokenizer.pieces(ids), found, size)

    def _order(
        self, order: str | Tensor, length: int, seed: int, number: int
    ) -> Tensor:
        if isinstance(order, Tensor):
            self._check_plain(order.tolist() == [*range(length)])
            return order[None]
        orders = parse_order(order, "order")
        self._check_plain(orders.kind == "l2r")
        return orders_at(orders, seed, number, range(1), length, SCORED_ORDERS)

    def _check_plain(self, is_l2r: bool = False) -> None:
        if self.model.config.l2r_only and not is_l2r:
            raise UserError(
                "this model is a plain GPT: it only predicts from left to right"
            )

    def _along(self, tokens: Tensor, order: Tensor) -> list[float]:
        """log p of each token along an order, by position; 0 where none is scored."""
        found = self.model.token_log_probs(
            tokens.to(self.device), order.to(self.device)
        )
        found[:, : self.loaded.scored_from] = 0
        return (
            torch.zeros_like(found)
            .scatter_(1, order.to(self.device), found)[0]
            .tolist()
        )

    def score_each(self, text: str) -> Scored:
        """log p of every token given all others of the text, which must fit into a block."""
        ids = self._encode(text)
        T = len(ids)
        found = []
        self._check_plain()
        tokens = torch.tensor([ids], device=self.device)
        for start in range(0, T, 16):
            rows = torch.arange(start, min(T, start + 16), device=self.device)
            masked = torch.arange(T, device=self.device) == rows[:, None]
            log_probs = self.model.masked_log_probs(tokens.expand(len(rows), T), masked)
            found += log_probs[masked].tolist()
        return Scored(
            self.tokenizer.pieces(ids), found, len(text.encode(errors="replace"))
        )

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        shortest = 1 + self.loaded.scored_from
        if not shortest <= len(ids) <= self.block_size:
            raise UserError(
                f"the text has {len(ids)} tokens; give {shortest} to {self.block_size}"
            )
        return ids

    def generate(
        self, prompt: str = "", new_tokens: int | None = None, **options: Any
    ) -> str:
        """A continuation of a prompt, prompt included, up to a block. options: seed, and those of
        `modes.DecodingOptions`: mode, temperature, top_p, ..."""
        ids = self.tokenizer.encode(prompt)
        room = self.block_size - len(ids)
        blanks = [None] * (room if new_tokens is None else new_tokens)
        if not 0 < len(blanks) <= room:
            what = f"the prompt has {len(ids)} tokens and new_tokens is {len(blanks)}"
            raise UserError(
                f"{what}; together at most {self.block_size}, and at least 1 is new"
            )
        (tokens,) = self._sample([ids + blanks], 1, options)
        return self.tokenizer.decode(tokens)

    def fill(
        self, text: str, candidates=1, num_samples=4, **options: Any
    ) -> list[Filling]:
        """The best of the different fillings of a text's gaps, "She[MASK:2-6] home.", the best
        first: those after which the known text to the right is most probable, per token.
        num_samples: of each length. options: as of `generate`."""
        check_value(candidates, Count, "candidates")
        check_value(num_samples, Count, "num_samples")
        given = gaps.contexts(text, self.tokenizer, self.block_size)
        count = max(num_samples, candidates) if len(given) == 1 else num_samples
        rows = self._sample(given, count, options)
        contexts = [context for context in given for _ in range(count)]
        best = gaps.best_fillings(self.model, contexts, rows, candidates)
        decode = self.tokenizer.decode
        return [
            Filling(decode(rows[i]), rows[i], scores, contexts[i]) for i, scores in best
        ]

    def _sample(
        self, given: list[Context], count: int, options: dict
    ) -> list[list[int]]:
        seed = options.pop("seed", 0)
        config = self.model.config
        decoding = modes.with_mode_defaults(DecodingOptions(**options), config.l2r_only)
        modes.check_mode(decoding, config)
        modes.check_context(given[0], config, self.loaded.scored_from)
        return modes.generate_rows(
            self.model, given, decoding, self.loaded.vocab_size, seed, count
        )

    @torch.no_grad()
    def blanks(self, text: str, top: int = 10) -> list[list[tuple[str, float]]]:
        """For every masked token of a text, the likeliest tokens and their probabilities given the
        known text, all in one pass."""
        check_value(top, Count, "top")
        self._check_plain()
        context, *others = gaps.contexts(text, self.tokenizer, self.block_size)
        if others:
            raise UserError("give masks of a known length: [MASK:3], not [MASK:2-3]")
        tokens = torch.tensor([[token or 0 for token in context]], device=self.device)
        blank = torch.tensor([[token is None for token in context]], device=self.device)
        logits = self.model.masked_logits(tokens, blank)[:, : self.loaded.vocab_size]
        best = logits.double().softmax(dim=-1).topk(min(top, logits.shape[1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            [(self.tokenizer.decode([i]), p) for i, p in zip(*r, strict=True)]
            for r in rows
        ]

    def rank(self, text: str) -> list[Alternative]:
        """The alternatives of a text, "The [cat|dog|tax] barked.", the most probable text first."""
        parts = ALTERNATIVES.split(text)  # text and alternatives, in turn
        if len(parts) == 1:
            raise UserError("there are no alternatives; write [this|that]")
        parts[1::2] = [part.split("|") for part in parts[1::2]]
        if math.prod(map(len, parts[1::2])) > gaps.MOST_LENGTHS:
            raise UserError(
                f"give at most {gaps.MOST_LENGTHS} combinations of alternatives"
            )
        whole = []
        given = []
        rows = []
        for words in itertools.product(*parts[1::2]):
            pieces = [
                p for pair in zip(parts[::2], [*words, ""], strict=True) for p in pair
            ]
            places = list(itertools.accumulate(map(len, pieces), initial=0))
            whole.append("".join(pieces))
            rows.append(self._encode(whole[-1]))
            spans = list(zip(places[1::2], places[2::2], strict=True))[: len(words)]
            given.append(self._without(rows[-1], spans))
        scores = gaps.score_fillings(self.model, given, rows)
        totals = [self.log_prob(row) for row in rows]
        weights = torch.tensor(totals, dtype=torch.float64).softmax(dim=0).tolist()
        sizes = [
            None if self.model.config.l2r_only else row.count(None) for row in given
        ]
        both = [
            size and s.filling * size for s, size in zip(scores, sizes, strict=True)
        ]
        return sorted(
            map(Alternative, whole, totals, weights, both), key=lambda r: -r.log_prob
        )

    def compare(
        self,
        other: "TextModel",
        text: str,
        order: str = "l2r",
        seed: int = 0,
        draws: int = 2,
    ) -> Estimate:
        """The loss of this model minus that of another of the same tokenizer on a text, nats per
        token, paired by block: `nll`, `half_width` of its 95% interval, `p_value`. draws: random
        orders of each block, the same for both."""
        check_value(draws, Count, "draws")
        size = min(self.block_size, other.block_size)
        models = comparable([self.loaded, other.loaded])
        eval_set = open_text("text", text, models[0], None, size)
        runner = BatchRunner(Processes(0, 1, self.device), torch.float32, size)
        orders = parse_order(order, "order")
        tasks = []
        for model, loaded in zip((self, other), models, strict=True):
            model._check_plain(orders.kind == "l2r")
            elbo = loaded.model.config.is_encoder and orders.kind == "random"
            tasks.append(Task(loaded, eval_set, order, Scorer(orders, joint=elbo)))
        return difference(
            tasks, [losses_of(task, runner, seed, draws) for task in tasks]
        )

    def _without(self, ids: list[int], spans: list[tuple[int, int]]) -> Context:
        """The tokens, None where they hold characters of a span (from, to) of the text."""
        ends = list(itertools.accumulate(map(len, self.tokenizer.pieces(ids))))
        places = zip(ids, [0, *ends], ends, strict=False)
        return [
            None
            if any(max(start, begin) < min(end, until) for begin, until in spans)
            else token
            for token, start, end in places
        ]

    def log_prob(self, ids: list[int]) -> float:
        """log p of the tokens of a whole text, left to right, nats."""
        return math.fsum(self._along(torch.tensor([ids]), torch.arange(len(ids))[None]))
