"""Models from Python: text in, text out.

    import aogpt
    model = aogpt.load("results/books_model")
    print(model.score("The old horse was tired.").nats)
    print(model.fill("She[MASK:2-6] home.", candidates=3, seed=1)[0].text)
    print(model.rank("The [cat|dog|tax] barked.")[0].text)
    print(model.blanks("The cat[MASK] home.")[0])

A method that takes a text also takes a list of texts, and then returns a list. In a
text to score, rank or compare "<|endoftext|>" ends a document, as generated text has
it; in one to continue or to fill in it is ordinary characters. `.model` is the network,
`.tokenizer` its tokenizer, `.loaded` where they come from."""

import contextlib
import difflib
import math
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import checkpoints
from .data.pieces import token_text
from .data.tokenizers import END_OF_TEXT, Tokenizer
from .evaluation.estimates import Estimate
from .evaluation.eval_sets import comparable, open_texts
from .evaluation.likelihood import BatchRunner, Scorer, Task, difference, losses_of
from .orders import orders_at, parse_order
from .runtime.devices import pick_device
from .runtime.errors import UserError
from .runtime.processes import Processes
from .runtime.randomness import SCORED_ORDERS
from .runtime.validation import Count, Seed, check_value
from .sampling import gaps, modes, resampling
from .sampling.alternatives import common_contexts, read_choices
from .sampling.gaps import RankBy, Scores
from .sampling.modes import Context, DecodingOptions, Mode
from .scoring import masked_log_probs, masked_logits

BATCH_TOKENS = 4096  # of texts that are scored in one pass
NUM_SAMPLES = 4  # fillings of each length, if the caller does not say
Draws = Annotated[int, Interval(ge=1, le=1024)]  # random orders of a block
SampleCount = Annotated[int, Interval(ge=1, le=4096)]
Texts = list[str] | tuple[str, ...]


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a text's tokens, by position."""

    pieces: list[str]  # the text of each token; joined, the whole text
    log_probs: list[float | None]  # nats; None: not scored, having nothing before it
    bytes: int  # of the tokens that are scored, in UTF-8
    ids: list[int]

    @property
    def scored(self) -> int:
        """Return the number of tokens that are scored."""
        return sum(log_prob is not None for log_prob in self.log_probs)

    @property
    def nats(self) -> float:
        """Return -log p of the tokens that are scored."""
        return -_total(self.log_probs)

    @property
    def nats_per_token(self) -> float:
        """Return the mean of -log p over the tokens that are scored."""
        return self.nats / max(1, self.scored)

    @property
    def bits_per_byte(self) -> float:
        """Return -log2 p of the tokens that are scored, divided by the number of their
        bytes; NaN where they have no bytes, as the end of a text alone."""
        if not self.bytes:
            return math.nan
        return self.nats / math.log(2) / self.bytes


class Generated(str):
    """A generated text. It is a string that also has its tokens and the seed that
    repeats it."""

    tokens: list[int]
    seed: int

    def __new__(cls, text: str, tokens: list[int], seed: int) -> "Generated":
        generated = super().__new__(cls, text)
        generated.tokens = tokens
        generated.seed = seed
        return generated

    def __getnewargs__(self) -> tuple[str, list[int], int]:
        """Return the arguments of a copy, also of one that is read from a pickle."""
        return str(self), self.tokens, self.seed


@dataclass(frozen=True)
class Filling:
    """A text with its gaps filled in."""

    text: str
    tokens: list[int]
    scores: Scores  # nats per token
    context: Context  # the tokens, None in the gaps
    seed: int  # repeats it
    ranked_by: str  # which of the scores puts the fillings in order
    weight: float | None = None  # a plain GPT's: its share of p(filling | both sides)
    effective_sample_size: float | None = None  # a plain GPT's: of the continuations


@dataclass(frozen=True)
class Alternative:
    """A text with one of the alternatives of each bracket."""

    text: str
    log_prob: float  # of the whole text, nats
    share: float
    """The share of the probability of all alternatives: p(alternative | left) p(right |
    left, alternative), normalised over the alternatives."""
    given_both_sides: float | None
    """log p of the tokens that differ between alternatives, given all others, nats.
    None for the alternative of no text, and for a plain GPT, which would have to sum
    over all other fillings; its `share` uses both sides."""


class Likely(NamedTuple):
    """A token that fits into a blank."""

    text: str  # with its leading space; <0xA9> is a byte of a longer character
    probability: float
    id: int


def load(
    path: str | Path,
    *,
    weights: Literal["ema", "raw"] = "ema",
    device: str | torch.device = "cpu",
    block_size: int | None = None,
    checkpoint: str = "last",
) -> "TextModel":
    """Load a model with text in and out.

    Args:
        path: a run folder, a checkpoint, exported or released weights, or a Hugging
            Face repo id.
        weights: "ema" for averaged weights, where there are any, or "raw" for the last
            ones.
        device: "auto" for a GPU if there is one, "cpu", "cuda", "cuda:1", "mps", or
            another device of PyTorch.
        block_size: the longest text in tokens, if not that of training.
        checkpoint: which one of a run folder: "last", "best" or the number of a step.

    Raises UserError for what cannot be loaded."""
    check_value(path, str | Path, "path")
    check_value(block_size, Count | None, "block_size")
    with _python_names():
        loaded = checkpoints.load(
            path,
            weights=weights,
            device=pick_device(device),
            block_size=block_size,
            checkpoint=checkpoint,
        )
        return TextModel(loaded)


@contextlib.contextmanager
def _python_names() -> Iterator[None]:
    """Name options in messages as Python does: top_p where a message for the command
    line has --top-p."""
    try:
        yield
    except UserError as error:
        message = re.sub(
            r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)",
            lambda name: name[1].replace("-", "_"),
            str(error),
        )
        raise type(error)(message) from error.__cause__


def check_ranked(scores: Sequence[Scores], by: RankBy) -> None:
    """Raise UserError if fillings have no probability of this name, such as that of the
    text to the right where none follows."""
    if any(math.isnan(getattr(one, by)) for one in scores):
        raise UserError(
            f'rank_by is "{by}", but these fillings have no such probability: leave it '
            "out"
        )


class TextModel:
    """A model and its tokenizer, as `load` returns them."""

    def __init__(self, loaded: checkpoints.Loaded):
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.get_tokenizer()
        self.device = self.model.wte.weight.device
        self.block_size = self.model.config.block_size

    # ---- likelihood ------------------------------------------------------------------

    @overload
    def score(
        self, text: str, order: str | Tensor = ..., seed: int = ..., *, end: bool = ...
    ) -> Scored: ...

    @overload
    def score(
        self,
        text: Texts,
        order: str | Tensor = ...,
        seed: int = ...,
        *,
        end: bool = ...,
    ) -> list[Scored]: ...

    def score(
        self,
        text: str | Texts,
        order: str | Tensor = "l2r",
        seed: int = 0,
        *,
        end: bool = False,
    ) -> Scored | list[Scored]:
        """Score a text: log p of every token, given those before it in an order.

        Args:
            text: a text, or a list of texts, which are scored in batches. Longer texts
                than a block are scored in blocks, each by itself. "<|endoftext|>" ends
                a document: it is one token, of no bytes.
            order: "l2r", "random" or another kind of orders.py, or a permutation (T,).
            seed: the seed of the orders, which are the same for texts of one length.
            end: score the end of the text, too, as one more token.

        A model without a start token does not score the first token of an order: its
        log_prob is None. Raises UserError for a text of which no token can be scored,
        and for masks."""
        check_value(seed, Seed, "seed")
        scored = self._score_all(_list_of(text), order, seed, end)
        return scored[0] if isinstance(text, str) else scored

    def _score_all(
        self, texts: list[str], order: str | Tensor, seed: int, end: bool
    ) -> list[Scored]:
        """Score texts, in blocks."""
        ids_of_texts = []
        blocks = []
        orders = []
        for place, text in enumerate(texts, 1):
            with in_list(place, len(texts)):
                ids = self._ids_to_score(text, end)
            ids_of_texts.append(ids)
            for number, start in enumerate(range(0, len(ids), self.block_size)):
                block = ids[start : start + self.block_size]
                blocks.append(block)
                orders.append(self._order(order, len(block), seed, number))
        log_probs_of_blocks = iter(self._log_probs(blocks, orders))
        results = []
        for text, ids in zip(texts, ids_of_texts, strict=True):
            log_probs: list[float | None] = []
            while len(log_probs) < len(ids):
                log_probs += next(log_probs_of_blocks)
            results.append(self._scored(text, ids, log_probs, end))
        return results

    def _ids_to_score(self, text: str, end: bool) -> list[int]:
        """Return the tokens of a text, and with `end` an end-of-text."""
        gaps.refuse_masks(text, "give it to fill or blanks, or leave it out")
        ids = self.tokenizer.encode_documents(text).tolist()
        if end:
            ids.append(self.tokenizer.eot)
        if len(ids) <= self.loaded.scored_from:
            raise UserError("there is no text to score")
        return ids

    def _scored(
        self, text: str, ids: list[int], log_probs: list[float | None], end: bool
    ) -> Scored:
        """Return the scores of a text, with the number of bytes of its tokens."""
        of_text = ids[:-1] if end else ids
        pieces = self.tokenizer.pieces(of_text)
        if end:
            pieces.append(END_OF_TEXT)
        bytes_of_tokens = self.tokenizer.text_bytes_of(text, np.array(of_text))
        is_scored = [log_prob is not None for log_prob in log_probs[: len(of_text)]]
        return Scored(
            pieces=pieces,
            log_probs=log_probs,
            bytes=round(float(bytes_of_tokens[is_scored].sum())),
            ids=ids,
        )

    def _order(
        self, order: str | Tensor, length: int, seed: int, number: int
    ) -> Tensor:
        """Return the order (T,) of block `number` of a text."""
        if isinstance(order, Tensor):
            left_to_right = list(range(length))
            self._check_any_order(order.tolist() == left_to_right)
            if sorted(order.tolist()) != left_to_right:
                raise UserError(
                    f"order must be a permutation of 0..{length - 1}, a place for each "
                    "token; longer texts than a block are scored block by block"
                )
            return order
        if not isinstance(order, str):
            raise UserError(
                f"order is {order!r}: give the name of a kind, such as 'l2r' or "
                "'random', or a tensor of places: torch.tensor([1, 0, 2])"
            )
        with _python_names():
            config = parse_order(order, "order")
            self._check_any_order(config.kind == "l2r")
            rows = orders_at(
                config,
                seed=seed,
                step=number,
                rows=range(1),
                length=length,
                stream=SCORED_ORDERS,
            )
            return rows[0]

    def _check_any_order(self, is_l2r: bool = False) -> None:
        """Raise UserError for an order other than left to right and a plain GPT."""
        if self.model.config.l2r_only and not is_l2r:
            raise UserError(
                "this model is a plain GPT: it only predicts from left to right"
            )

    def _log_probs(
        self, rows: list[list[int]], orders: list[Tensor]
    ) -> list[list[float | None]]:
        """Return log p of each token of rows along their orders, by position; None
        where none is scored. Rows of similar length share a pass."""
        log_probs: list[list[float | None]] = [[] for _ in rows]
        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        while by_length:
            longest = len(rows[by_length[-1]])
            size = max(1, BATCH_TOKENS // longest)
            batch = by_length[-size:]
            del by_length[-size:]
            log_probs_of_batch = self._log_probs_of_batch(
                [rows[number] for number in batch], [orders[number] for number in batch]
            )
            for number, log_probs_of_row in zip(batch, log_probs_of_batch, strict=True):
                first = orders[number][: self.loaded.scored_from]
                for position in first.tolist():
                    log_probs_of_row[position] = None
                log_probs[number] = log_probs_of_row
        return log_probs

    def _log_probs_of_batch(
        self, rows: list[list[int]], orders: list[Tensor]
    ) -> list[list[float | None]]:
        """Return log p of each token of rows along their orders, by position, in one
        pass."""
        x = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        N, T = x.shape
        order = torch.arange(T).repeat(N, 1)
        for number, row_order in enumerate(orders):
            order[number, : len(row_order)] = row_order
        lengths = torch.tensor([len(row) for row in rows])
        along = gaps.log_probs_along(
            self.model, x, order=order, lengths=lengths, start=torch.zeros_like(lengths)
        )
        by_position = torch.zeros_like(along).scatter_(1, order, along)
        log_probs = []
        for row, padded in zip(rows, by_position.tolist(), strict=True):
            log_probs.append(padded[: len(row)])
        return log_probs

    @overload
    def score_each(self, text: str) -> Scored: ...

    @overload
    def score_each(self, text: Texts) -> list[Scored]: ...

    def score_each(self, text: str | Texts) -> Scored | list[Scored]:
        """Score every token given all others of the text, which must fit into a block.
        The sum is no probability of the text.

        Args:
            text: a text, or a list of them."""
        texts = _list_of(text)
        scored = []
        for place, one in enumerate(texts, 1):
            with in_list(place, len(texts)):
                scored.append(self._score_each(one))
        return scored[0] if isinstance(text, str) else scored

    def _score_each(self, text: str) -> Scored:
        self._check_any_order()
        gaps.refuse_masks(text, "give it to fill or blanks, or leave it out")
        ids = self._encode(text)
        T = len(ids)
        log_probs: list[float | None] = []
        tokens = torch.tensor([ids], device=self.device)
        positions = torch.arange(T, device=self.device)
        for rows in positions.split(16):
            masked = positions == rows[:, None]
            copies = tokens.expand(len(rows), T)
            batch = masked_log_probs(self.model, copies, masked)
            log_probs += batch[masked].tolist()
        return self._scored(text, ids, log_probs, end=False)

    def _encode(self, text: str, extra: int = 0) -> list[int]:
        """Return the tokens of a text that fits into a block, with `extra` more."""
        ids = self.tokenizer.encode_documents(text).tolist()
        shortest = 1 + self.loaded.scored_from
        longest = self.block_size - extra
        if not shortest <= len(ids) <= longest:
            raise UserError(
                f"the text has {len(ids)} tokens; give {shortest} to {longest}"
            )
        return ids

    def log_prob(self, ids: list[int]) -> float:
        """Return log p of the tokens of a whole text, left to right, nats."""
        if not ids:
            raise UserError("there is no token to score")
        (log_probs,) = self._log_probs([ids], [torch.arange(len(ids))])
        return _total(log_probs)

    def compare(
        self,
        other: "TextModel",
        text: str | Texts,
        order: str = "l2r",
        seed: int = 0,
        draws: int = 2,
    ) -> Estimate:
        """Return the loss of this model minus that of another of the same tokenizer,
        nats per token, with `half_width` of its 95% interval and `p_value`.

        Args:
            other: the second model.
            text: a text, whose blocks are the sequences; or a list of independent
                texts, such as sentences, each scored by itself. Then the interval and
                p_value are by text.
            order: an order as in `score`.
            seed: the seed of the orders.
            draws: random orders of each block, the same for both models."""
        check_value(draws, Draws, "draws")
        check_value(seed, Seed, "seed")
        check_value(order, str, "order")
        if not isinstance(other, TextModel):
            raise UserError(
                f"other is {other!r}, but it must be a TextModel: aogpt.load(PATH)"
            )
        with _python_names():
            orders = parse_order(order, "order")
        texts = _list_of(text)
        if not texts:
            raise UserError("there is no text to compare on")
        for place, document in enumerate(texts, 1):
            with in_list(place, len(texts)):
                gaps.refuse_masks(document, "compare takes texts without one")
        models = comparable([self.loaded, other.loaded])
        size = min(self.block_size, other.block_size)
        eval_set = open_texts(
            "text", texts, models[0], max_sequences=None, block_size=size
        )
        alone = Processes(rank=0, world_size=1, device=self.device)
        runner = BatchRunner(alone, torch.float32, size)
        tasks = []
        for model, loaded in zip((self, other), models, strict=True):
            model._check_any_order(orders.kind == "l2r")
            elbo = loaded.model.config.is_encoder and orders.kind == "random"
            scorer = Scorer(orders, joint=elbo)
            tasks.append(Task(loaded, eval_set, order, scorer))
        losses = [losses_of(task, runner, seed, draws) for task in tasks]
        return difference(tasks, losses)

    # ---- generation ------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: str = ...,
        new_tokens: int | None = ...,
        *,
        num_samples: None = ...,
        seed: int | None = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        **options: Any,
    ) -> Generated: ...

    @overload
    def generate(
        self,
        prompt: str = ...,
        new_tokens: int | None = ...,
        *,
        num_samples: int,
        seed: int | None = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        **options: Any,
    ) -> list[Generated]: ...

    @overload
    def generate(
        self,
        prompt: Texts,
        new_tokens: int | None = ...,
        *,
        num_samples: None = ...,
        seed: int | None = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        **options: Any,
    ) -> list[Generated]: ...

    @overload
    def generate(
        self,
        prompt: Texts,
        new_tokens: int | None = ...,
        *,
        num_samples: int,
        seed: int | None = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        **options: Any,
    ) -> list[list[Generated]]: ...

    def generate(
        self,
        prompt: str | Texts = "",
        new_tokens: int | None = None,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        mode: Mode | None = None,
        **options: Any,
    ) -> Generated | list[Generated] | list[list[Generated]]:
        """Continue a prompt.

        Args:
            prompt: a text, or a list of texts, which are continued in batches.
            new_tokens: how many to generate; by default what fits into a block.
            num_samples: return a list of this number of samples of each prompt.
            seed: repeats the samples; None: draws anew each time. A sample's `seed`
                says which.
            temperature: 0 takes the most probable token.
            top_p: draw from the most probable tokens that together have this
                probability.
            top_k: draw from this number of most probable tokens.
            mode: the order: "mdm" (default), "l2r" (default of a plain GPT),
                "confidence", ...
            options: other fields of `sampling.modes.DecodingOptions`.

        Returns a `Generated`, a string with the prompt; lists for a list or with
        num_samples."""
        count = 1 if num_samples is None else num_samples
        check_value(count, SampleCount, "num_samples")
        seed = _checked_seed(seed)
        check_value(new_tokens, int | None, "new_tokens")
        prompts = _list_of(prompt)
        contexts = []
        for place, text in enumerate(prompts, 1):
            with in_list(place, len(prompts)):
                contexts.append(self._context_after(text, new_tokens))
        if not contexts:
            return []
        options.update(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            mode=mode,
        )
        rows = self._sample(contexts, count, seed, options)
        samples = []
        for row in rows:
            samples.append(Generated(self.tokenizer.decode(row), row, seed))
        if num_samples is None:
            return samples[0] if isinstance(prompt, str) else samples
        samples_of_prompts = []
        for start in range(0, len(samples), count):
            samples_of_prompts.append(samples[start : start + count])
        return samples_of_prompts[0] if isinstance(prompt, str) else samples_of_prompts

    def _context_after(self, prompt: str, new_tokens: int | None) -> Context:
        """Return the tokens of a prompt, and None for each token to generate."""
        gaps.refuse_masks(prompt, "generate continues a text; fill takes masks")
        ids = self.tokenizer.encode(prompt)
        room = self.block_size - len(ids)
        count = room if new_tokens is None else new_tokens
        if not 0 < count <= room:
            raise UserError(
                f"the prompt has {len(ids)} tokens and new_tokens is {count}; together "
                f"at most {self.block_size}, and at least 1 is new"
            )
        return ids + [None] * count

    @overload
    def fill(
        self,
        text: str,
        candidates: int = ...,
        *,
        num_samples: int | None = ...,
        seed: int | None = ...,
        temperature: float | None = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        rank_by: RankBy | None = ...,
        **options: Any,
    ) -> list[Filling]: ...

    @overload
    def fill(
        self,
        text: Texts,
        candidates: int = ...,
        *,
        num_samples: int | None = ...,
        seed: int | None = ...,
        temperature: float | None = ...,
        top_p: float = ...,
        top_k: int | None = ...,
        mode: Mode | None = ...,
        rank_by: RankBy | None = ...,
        **options: Any,
    ) -> list[list[Filling]]: ...

    def fill(
        self,
        text: str | Texts,
        candidates: int = 1,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int | None = None,
        mode: Mode | None = None,
        rank_by: RankBy | None = None,
        **options: Any,
    ) -> list[Filling] | list[list[Filling]]:
        """Fill the gaps of a text, "She[MASK:2-6] home.": [MASK] is one token, [MASK:3]
        three, [MASK:2-6] two to six. Put no space before a mask, since words begin with
        theirs; a warning says where there is one.

        A plain GPT has not learned to fill gaps. It draws continuations of the left
        text and weights them by how probable they and the rest of the text are
        (`sampling.resampling`). `weight` and `effective_sample_size` of a filling say
        how far to trust that. With mode="resampling" any decoder fills gaps so.

        Args:
            text: a text with gaps, or a list of them.
            candidates: how many different fillings to return at most, the best first.
            num_samples: fillings to draw of each length, by default 4; with resampling,
                continuations to draw, by default 64.
            seed: repeats the fillings; None: draws anew each time. `Filling.seed` says
                which.
            temperature: 0 takes the most probable token; by default 1. Resampling draws
                continuations at this temperature, by default 0.75; the weights correct
                for it.
            top_p: draw from the most probable tokens that together have this
                probability.
            top_k: draw from this number of most probable tokens.
            mode: the order: "mdm" (default), "l2r", "confidence", ...; or "resampling".
            rank_by: "filling": the mean log p of the filling given both sides. "right":
                that of the text to the right given all before it. "joint": that of
                both, left to right. By default "filling" if all gaps have known
                lengths, else "right", which does not depend on the number of tokens
                that are filled in. Resampling: "joint", or "joint and right" where
                lengths differ, which counts the text to the right twice.
            options: other fields of `sampling.modes.DecodingOptions`.

        Returns a list of fillings; a list of such lists for a list of texts. Raises
        UserError for a text without masks, or whose shortest gaps exceed a block."""
        check_value(candidates, SampleCount, "candidates")
        if num_samples is not None:
            check_value(num_samples, SampleCount, "num_samples")
        check_value(rank_by, RankBy | None, "rank_by")
        first_seed = _checked_seed(seed)
        options.update(top_p=top_p, top_k=top_k, mode=mode)
        if temperature is not None:
            options["temperature"] = temperature
        texts = _list_of(text)
        gapped_texts = []
        for place, one in enumerate(texts, 1):
            with in_list(place, len(texts)):
                gapped = gaps.encode_gaps(one, self.tokenizer, self.block_size)
            gapped_texts.append(gapped)
            _note_space(one, self.tokenizer)
        fillings_of_texts = []
        for place, gapped in enumerate(gapped_texts, 1):
            fill = self._fill
            if resampling.is_resampled(gapped, mode, self.model.config):
                fill = self._fill_by_resampling
            with in_list(place, len(texts)):
                fillings = fill(
                    gapped,
                    candidates=candidates,
                    num_samples=num_samples,
                    seed=gaps.seed_of_request(first_seed, place - 1),
                    rank_by=rank_by,
                    options=options,
                )
            fillings_of_texts.append(fillings)
        return fillings_of_texts[0] if isinstance(text, str) else fillings_of_texts

    def _fill(
        self,
        gapped: gaps.Gapped,
        candidates: int,
        num_samples: int | None,
        seed: int,
        rank_by: RankBy | None,
        options: dict[str, Any],
    ) -> list[Filling]:
        """Draw fillings of every length, and rank them."""
        contexts = gapped.contexts(self.block_size)
        note = gapped.dropped_note(len(contexts), self.block_size)
        if note:
            warnings.warn(note, stacklevel=3)
        count = num_samples or NUM_SAMPLES
        if len(contexts) == 1:
            count = max(count, candidates)
        rows = self._sample(contexts, count, seed, options)
        context_of_rows = []
        for context in contexts:
            context_of_rows += [context] * count
        by = rank_by or gaps.rank_by(self.model, contexts)
        best = gaps.best_fillings(
            self.model, context_of_rows, rows, most=candidates, by=by
        )
        check_ranked([scores for _, scores in best], by)
        fillings = []
        for i, scores in best:
            filling = Filling(
                text=self.tokenizer.decode(rows[i]),
                tokens=rows[i],
                scores=scores,
                context=context_of_rows[i],
                seed=seed,
                ranked_by=by,
            )
            fillings.append(filling)
        return fillings

    def _fill_by_resampling(
        self,
        gapped: gaps.Gapped,
        candidates: int,
        num_samples: int | None,
        seed: int,
        rank_by: RankBy | None,
        options: dict[str, Any],
    ) -> list[Filling]:
        """Draw continuations of the text before the gaps, and weight them."""
        if rank_by == "filling":
            raise UserError(
                'resampling has no probability of a filling given both sides: "joint" '
                "ranks in the same way"
            )
        options = dict(options)
        options.setdefault("temperature", resampling.TEMPERATURE)
        decoding = self._decoding(options)
        modes.check_start(bool(gapped.known[0]), self.loaded.scored_from)
        note = resampling.dropped_note(gapped, self.block_size)
        if note:
            warnings.warn(note, stacklevel=3)
        with _python_names():
            weighted = resampling.fill_by_resampling(
                self.model,
                gapped,
                seed=seed,
                draws=num_samples or resampling.DRAWS,
                choice=decoding,
                vocab_size=self.loaded.vocab_size,
            )
        by = rank_by or ("joint" if gapped.combinations == 1 else "joint and right")
        numbers = list(range(len(weighted.tokens)))
        if rank_by is not None:
            check_ranked(weighted.scores, rank_by)
            numbers = gaps.ranked(weighted.scores, rank_by)
        fillings = []
        for i in numbers[:candidates]:
            filling = Filling(
                text=self.tokenizer.decode(weighted.tokens[i]),
                tokens=weighted.tokens[i],
                scores=weighted.scores[i],
                context=weighted.contexts[i],
                seed=seed,
                ranked_by=by,
                weight=weighted.weights[i],
                effective_sample_size=weighted.effective_sample_size,
            )
            fillings.append(filling)
        return fillings

    def _sample(
        self, contexts: list[Context], count: int, seed: int, options: dict[str, Any]
    ) -> list[list[int]]:
        """Return the tokens of `count` samples of each context."""
        decoding = self._decoding(options)
        for context in contexts:
            modes.check_context(context, self.model.config, self.loaded.scored_from)
        with _python_names():
            return modes.generate_rows(
                self.model,
                contexts,
                decoding,
                vocab_size=self.loaded.vocab_size,
                seed=seed,
                count=count,
            )

    def _decoding(self, options: dict[str, Any]) -> DecodingOptions:
        """Return the options of decoding, with the defaults of their mode. Raises
        UserError for unknown and impossible ones."""
        values: dict[str, Any] = {}
        for name, value in options.items():
            _check_option(name)
            values[name] = _as_tuples(value)
        config = self.model.config
        with _python_names():
            decoding = DecodingOptions(**values)
            decoding = modes.with_mode_defaults(decoding, config.l2r_only)
            modes.check_mode(decoding, config)
            return decoding

    # ---- blanks and alternatives -----------------------------------------------------

    @overload
    def blanks(self, text: str, top: int = ...) -> list[list[Likely]]: ...

    @overload
    def blanks(self, text: Texts, top: int = ...) -> list[list[list[Likely]]]: ...

    def blanks(
        self, text: str | Texts, top: int = 10
    ) -> list[list[Likely]] | list[list[list[Likely]]]:
        """Return, for every masked token of a text, the likeliest tokens given the
        known text, all in one pass.

        Args:
            text: a text with masks of known length, or a list of them.
            top: how many tokens to list for each."""
        check_value(top, Count, "top")
        self._check_any_order()
        texts = _list_of(text)
        likely = []
        for place, one in enumerate(texts, 1):
            _note_space(one, self.tokenizer)
            with in_list(place, len(texts)):
                likely.append(self._blanks(one, top))
        return likely[0] if isinstance(text, str) else likely

    @torch.no_grad()
    def _blanks(self, text: str, top: int) -> list[list[Likely]]:
        gapped = gaps.encode_gaps(text, self.tokenizer, self.block_size)
        if gapped.combinations > 1:
            raise UserError("give masks of one length, as [MASK:3]; fill takes a range")
        context = gapped.context([lengths[0] for lengths in gapped.lengths])
        tokens = [token or 0 for token in context]
        is_blank = [token is None for token in context]
        logits = masked_logits(
            self.model,
            torch.tensor([tokens], device=self.device),
            torch.tensor([is_blank], device=self.device),
        )
        logits = logits[:, : self.loaded.vocab_size]
        probabilities = logits.double().softmax(dim=-1)
        best = probabilities.topk(min(top, self.loaded.vocab_size))
        likely_of_blanks = []
        for ids, values in zip(
            best.indices.tolist(), best.values.tolist(), strict=True
        ):
            likely = []
            for token, probability in zip(ids, values, strict=True):
                text = token_text(self.tokenizer, token)
                likely.append(Likely(text, probability, token))
            likely_of_blanks.append(likely)
        return likely_of_blanks

    @overload
    def rank(self, text: str, *, end: bool = ...) -> list[Alternative]: ...

    @overload
    def rank(self, text: Texts, *, end: bool = ...) -> list[list[Alternative]]: ...

    def rank(
        self, text: str | Texts, *, end: bool = False
    ) -> list[Alternative] | list[list[Alternative]]:
        """Rank the alternatives of a text, "The [cat|dog|tax] barked.", by the
        probability of the whole text, the most probable first. Equal texts count once.

        Args:
            text: a text with alternatives in brackets, or a list of them.
            end: score the end of the text, too. Where alternatives stand at the end,
                "She went home[.|]", the shorter one is otherwise a beginning of the
                longer one, and a beginning is always at least as probable.

        `given_both_sides` compares the tokens that are not the same in all
        alternatives. In "c[a|o]t" these may be whole words, since tokens do not end
        where letters do."""
        texts = _list_of(text)
        ranked = []
        for place, one in enumerate(texts, 1):
            with in_list(place, len(texts)):
                ranked.append(self._rank(one, end))
        return ranked[0] if isinstance(text, str) else ranked

    def _rank(self, text: str, end: bool) -> list[Alternative]:
        gaps.refuse_masks(
            text, "rank takes alternatives, [this|that]; fill takes masks"
        )
        choices = read_choices(text)
        words_of_texts = choices.texts()
        rows = [self._encode(whole, extra=int(end)) for whole in words_of_texts]
        first_tokens = {row[0] for row in rows}
        if self.loaded.scored_from and len(first_tokens) > 1:
            raise UserError(
                "this model has no start token, so it cannot score the first token of "
                "a text, and these alternatives begin differently: put a word before "
                "them"
            )
        contexts = common_contexts(self.tokenizer, choices.fixed, words_of_texts, rows)
        if end:
            rows = [[*row, self.tokenizer.eot] for row in rows]
            contexts = [[*context, self.tokenizer.eot] for context in contexts]
        orders = [torch.arange(len(row)) for row in rows]
        totals = [_total(log_probs) for log_probs in self._log_probs(rows, orders)]
        shares = torch.tensor(totals, dtype=torch.float64).softmax(dim=0).tolist()
        given_both_sides: list[float | None] = [None] * len(rows)
        if not self.model.config.l2r_only:
            scores = gaps.score_fillings(self.model, contexts, rows)
            for i, words in enumerate(words_of_texts.values()):
                hidden = contexts[i].count(None)
                if hidden > 0 and any(words):
                    given_both_sides[i] = scores[i].filling * hidden
        alternatives = []
        for i, whole in enumerate(words_of_texts):
            alternative = Alternative(
                text=whole,
                log_prob=totals[i],
                share=shares[i],
                given_both_sides=given_both_sides[i],
            )
            alternatives.append(alternative)
        return sorted(alternatives, key=lambda alternative: -alternative.log_prob)


def _as_tuples(value: Any) -> Any:
    """Return a value with lists, also those in lists, as tuples."""
    if isinstance(value, list | tuple):
        return tuple(_as_tuples(item) for item in value)
    return value


def _list_of(text: Any) -> list[str]:
    """Return a text, or a list of texts, as a list. Raises UserError for other values,
    such as the None or NaN of an empty cell of a table."""
    if isinstance(text, str):
        return [text]
    if isinstance(text, bytes) or not isinstance(text, Iterable):
        raise UserError(f"give a text or a list of texts; this is {text!r:.40}")
    texts = list(text)
    for place, one in enumerate(texts, 1):
        if not isinstance(one, str):
            raise UserError(
                f"text {place} of {len(texts)} is {one!r:.40}; leave it out, or give a "
                "string"
            )
    return texts


@contextlib.contextmanager
def in_list(place: int, count: int) -> Iterator[None]:
    """Put the number of a text in its list before the message of a UserError; place:
    the number, from 1."""
    try:
        yield
    except UserError as error:
        if count == 1:
            raise
        raise type(error)(f"text {place} of {count}: {error}") from error.__cause__


def _note_space(text: str, tokenizer: Tokenizer) -> None:
    """Warn of a space before a mask."""
    note = gaps.space_note(text, tokenizer)
    if note is not None:
        warnings.warn(note, stacklevel=3)


def _total(log_probs: list[float | None]) -> float:
    """Return the sum of the log-probabilities of the tokens that are scored."""
    return math.fsum(log_prob for log_prob in log_probs if log_prob is not None)


def _check_option(name: str) -> None:
    """Raise UserError for an option of decoding that does not exist."""
    names = [field.name for field in fields(DecodingOptions)]
    if name in names:
        return
    # A parameter of a method can be meant, too.
    names += ["num_samples", "seed", "candidates", "new_tokens"]
    near = difflib.get_close_matches(
        name,
        names,
        n=1,
        cutoff=0.5,
    )
    if near:
        raise UserError(f"there is no option {name!r}; did you mean {near[0]!r}?")
    raise UserError(f"there is no option {name!r}; there are {names}")


def _checked_seed(seed: int | None) -> int:
    """Return the seed, or a new one."""
    if seed is None:
        return secrets.randbits(32)
    check_value(seed, Seed, "seed")
    return seed
