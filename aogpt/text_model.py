"""Models from Python: lists of texts in, lists of answers out.

    import aogpt
    model = aogpt.load("results/books_model")
    print(model.score(["The old horse was tired."])[0].nats)
    print(model.fill(["She[MASK:4] home."], seed=1)[0].text)
    print(model.rank(["The [cat|dog|tax] barked."])[0][0].text)
    print(model.blanks(["The cat[MASK] home."])[0][0])

In a text to score or rank "<|endoftext|>" ends a document, as generated text has it; in
one to continue or to fill in it is ordinary characters, as are the tokenizer's other
special tokens everywhere, such as "</s>". A warning says where a text has one.

`.model` is the network, `.tokenizer` its tokenizer, `.loaded` where they come from."""

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from . import checkpoints
from .data.pieces import token_text
from .data.tokenizers import END_OF_TEXT, notes_on_special, without_lone_surrogates
from .orders import orders_at, parse_order
from .runtime.devices import pick_device
from .runtime.errors import UserError
from .runtime.processes import Processes
from .runtime.randomness import SCORED_ORDERS
from .runtime.validation import Count, Seed, check_value
from .sampling import gaps, modes
from .sampling.modes import Context, DecodingOptions
from .sampling.records import contexts_with_end, end_first, without_end
from .scoring import known_from, masked_logits, token_log_probs

TEMPERATURE = 0.7  # of generated text
BATCH_TOKENS = 4096  # of texts that are scored in one pass
PROGRESS_SECONDS = 2.0  # before a bar appears
BRACKETS = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")  # of alternatives
MOST_ALTERNATIVES = 512  # combinations of the brackets of a text


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
    def bits_per_byte(self) -> float | None:
        """Return -log2 p of the tokens that are scored, divided by the number of their
        bytes; None where they have no bytes, as the end of a text alone."""
        if not self.bytes:
            return None
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True)
class Joint(Scored):
    """The probability of some tokens of a text given all others. The log-probabilities
    are those of the first order, None where a token is given."""

    log_prob: float  # of all predicted tokens together; over orders, of the mean
    standard_error: float  # of log_prob, from the choice of orders; 0 if all are scored

    @property
    def nats(self) -> float:
        """Return -log p of the predicted tokens given all others."""
        return -self.log_prob


Span = tuple[int, int]  # of characters: from, to, as in text[from:to]


@dataclass(frozen=True)
class Sample:
    """A text that was generated or filled in."""

    text: str
    tokens: list[int]
    log_probs: list[float]  # nats, given what was known then; 0 of given tokens
    order: list[int]  # positions in the order in which they became known


@dataclass(frozen=True)
class Alternative:
    """A text with one of the alternatives of each bracket."""

    text: str
    log_prob: float  # of the whole text, left to right, nats
    share: float
    """p(alternative | the rest of the text), among the alternatives: the share of the
    whole text's probability."""


@dataclass(frozen=True)
class Likely:
    """A token that fits into a blank."""

    text: str  # with its leading space; <0xA9> is a byte of a longer character
    probability: float
    id: int


@dataclass(frozen=True)
class Pairs:
    """The joint probabilities of two tokens of a text given all others."""

    first: list[Likely]  # what may stand at the first place, the most probable first
    second: list[Likely]  # at the second place, without knowing the first
    table: list[list[float]]  # [n][m]: of first[n] and second[m] together


def load(
    path: str | Path,
    *,
    weights: Literal["ema", "raw"] = "ema",
    device: str | torch.device = "auto",
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


class TextModel:
    """A model and its tokenizer, as `load` returns them."""

    def __init__(self, loaded: checkpoints.Loaded):
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.get_tokenizer()
        self.device = self.model.wte.weight.device
        self.block_size = self.model.config.block_size
        self.end = loaded.record_end  # of records, where it is given
        self.scored_from = loaded.scored_from
        self.longest = self.block_size  # tokens of a text
        if self.end is not None:  # which is known before the first token
            self.scored_from = 0
            self.longest = self.end.longest_in(self.block_size)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        kind = "any order"
        if self.model.config.l2r_only:
            kind = "left to right"
        elif self.model.config.is_encoder:
            kind = "encoder"
        return (
            f"TextModel({self.loaded.description}; {kind}, {size / 1e6:.1f}M "
            f"parameters, blocks of {self.block_size} tokens, {self.tokenizer.name}, "
            f"{self.device})"
        )

    def _warn_of_special(
        self, texts: list[str], but_end: bool = False, has_masks: bool = False
    ) -> None:
        """Warn of special tokens that are read as ordinary text, and of a space before
        a mask. but_end: "<|endoftext|>" is read as a token."""
        counts = self.tokenizer.count_special(gaps.MASK.sub("", text) for text in texts)
        if but_end:
            counts.pop(END_OF_TEXT, None)
        notes = notes_on_special(counts)
        if has_masks:
            notes += {gaps.space_note(text, self.tokenizer): None for text in texts}
        for note in notes:
            if note is not None:
                warnings.warn(note, stacklevel=3)

    # ---- likelihood ------------------------------------------------------------------

    def score(
        self,
        texts: Sequence[str],
        order: str | Sequence[int] | Tensor = "l2r",
        seed: int = 0,
        end: bool = False,
        *,
        predict: Sequence[Span] | None = None,
        orders: int = 1,
    ) -> Sequence[Scored]:
        """Score texts: log p of every token, given those before it in an order; with
        `predict`, the probability of parts of a text given all the rest of it, as
        `Joint`.

        Args:
            texts: scored in batches. Longer texts than a block are scored in blocks,
                each by itself. "<|endoftext|>" ends a document: it is one token, of no
                bytes.
            order: "l2r", "random" or another kind of orders.py, or a permutation of the
                T places of each text, such as [2, 0, 1].
            seed: the seed of the orders, which are the same for texts of one length.
            end: score the end of each text, too, as one more token.
            predict: spans of characters, the same in each text: [(3, 7), (20, 21)] are
                text[3:7] and text[20:21]. log p of their tokens given all others is
                exact, in one pass (an encoder takes one for each token). Half a token
                is widened to the whole one, with a warning.
            orders: the predicted tokens as written (1), or the mean of their
                probabilities over K orders drawn by the seed; over all, if K reaches
                their number.

        A model without a start token does not score the first token of an order: its
        log_prob is None. Raises UserError for a text of which no token can be scored,
        and for masks."""
        check_value(seed, Seed, "seed")
        check_value(orders, Count, "orders")
        texts = checked_texts(texts)
        self._warn_of_special(texts, but_end=True)
        for text in texts:
            brackets = BRACKETS.search(text)
            if brackets is not None:
                warnings.warn(
                    f"{brackets[0][:40]} is scored as it is written; rank compares "
                    "alternatives",
                    stacklevel=2,
                )
        if predict is not None:
            if order != "l2r" or end:
                raise UserError(
                    "predict has orders of its own: leave out order and end"
                )
            return self._joints(texts, predict, orders, seed)
        if orders > 1:
            raise UserError("orders are of predict; leave one of them out")
        return self._score(texts, order, seed, end)

    def _score(
        self,
        texts: list[str],
        order: str | Sequence[int] | Tensor,
        seed: int,
        end: bool,
    ) -> list[Scored]:
        ids_of_texts = []
        blocks = []
        orders = []
        for place, text in enumerate(texts, 1):
            with in_list(place, len(texts)):
                ids = self._ids_to_score(text, end)
            ids_of_texts.append(ids)
            if end and self.end is not None:  # whose probability is that of the length
                ids = ids[:-1]
            for number, start in enumerate(range(0, len(ids), self.block_size)):
                block = ids[start : start + self.block_size]
                blocks.append(block)
                orders.append(self._order(order, len(block), seed, number).tolist())
        firsts = [self.scored_from] * len(blocks)
        log_probs_of_blocks = iter(self._log_probs(blocks, orders, firsts))
        results = []
        for text, ids in zip(texts, ids_of_texts, strict=True):
            log_probs: list[float | None] = []
            count = len(ids)
            if end and self.end is not None:
                count -= 1
            while len(log_probs) < count:
                log_probs += next(log_probs_of_blocks)
            if count < len(ids) and self.end is not None:
                log_probs.append(self.end.log_prob(count))
            results.append(self._scored(text, ids, log_probs, end))
        return results

    def _joints(
        self, texts: list[str], spans: Sequence[Span], count: int, seed: int
    ) -> list[Joint]:
        """Return p(tokens of the spans | all others) of each text."""
        self._check_any_order()
        ids_of_texts = []
        counts = []  # orders of each text, and whether they are all
        rows = []
        orders = []
        firsts = []
        for place, text in enumerate(texts, 1):
            with in_list(place, len(texts)):
                ids = self._ids_to_score(text, end=False)
                if len(ids) > self.block_size:
                    raise UserError(
                        f"the text has {len(ids)} tokens, more than a block, "
                        f"{self.block_size}: give the part that matters"
                    )
                predicted = self._positions_of(text, ids, spans)
            given = sorted(set(range(len(ids))) - set(predicted))
            if len(given) < self.scored_from:
                raise UserError(
                    "this model has no start token, so it cannot score the first "
                    "token: leave one out of predict"
                )
            permutations, is_whole = orders_of(len(predicted), count, seed)
            for permutation in permutations.tolist():
                rows.append(ids)
                orders.append(given + [predicted[place] for place in permutation])
                firsts.append(len(given))
            ids_of_texts.append(ids)
            counts.append((len(permutations), is_whole))
        vocab_size = self.loaded.vocab_size
        log_probs_of_orders = iter(self._log_probs(rows, orders, firsts, vocab_size))
        joints = []
        for text, ids, (size, is_whole) in zip(
            texts, ids_of_texts, counts, strict=True
        ):
            log_probs = list(itertools.islice(log_probs_of_orders, size))
            scored = self._scored(text, ids, log_probs[0], end=False)
            totals = torch.tensor(list(map(_total, log_probs)), dtype=torch.float64)
            joints.append(joint_of(scored, totals, is_whole))
        return joints

    def _positions_of(
        self, text: str, ids: list[int], spans: Sequence[Span]
    ) -> list[int]:
        """Return the positions of the tokens that spans of characters touch."""
        check_spans(spans, len(text))
        tokens = [self.tokenizer.to_bytes([token]) for token in ids]
        data = b"".join(tokens)
        shift = int(self.tokenizer.adds_space and data.startswith(b" "))
        if data[shift:] != without_lone_surrogates(text).encode():
            raise UserError(
                "the tokenizer changes this text, so spans of its characters are not "
                "those of tokens: write it as the tokenizer does"
            )
        starts = [0, *itertools.accumulate(map(len, tokens))]
        positions = []
        for first, last in spans:
            begin = shift + len(without_lone_surrogates(text[:first]).encode())
            stop = shift + len(without_lone_surrogates(text[:last]).encode())
            touched = []
            for position in range(len(ids)):
                if starts[position] < stop and starts[position + 1] > begin:
                    touched.append(position)
            widened = data[starts[touched[0]] : starts[touched[-1] + 1]]
            if widened.strip() != data[begin:stop].strip():
                warnings.warn(
                    f"{first}:{last} is widened to whole tokens, "
                    f"{widened.decode(errors='replace')!r}",
                    stacklevel=4,
                )
            positions += touched
        return sorted(set(positions))

    def _ids_to_score(self, text: str, end: bool) -> list[int]:
        """Return the tokens of a text, and with `end` an end-of-text."""
        gaps.refuse_masks(text, "give it to fill or blanks, or leave it out")
        ids = self.tokenizer.encode_documents(text).tolist()
        if self.end is not None:
            self._check_record(ids)
        if end:
            ids.append(self.tokenizer.eot)
        if len(ids) <= self.scored_from:
            raise UserError("there is no text to score")
        return ids

    def _check_record(self, ids: list[int]) -> None:
        """Raise UserError for tokens that are no record of a model of records."""
        assert self.end is not None
        if self.end.token in ids:
            raise UserError(
                "a record of this model has one end, which follows the text by itself: "
                f"leave out {END_OF_TEXT}"
            )
        if len(ids) > self.longest:
            raise UserError(
                f"the text has {len(ids)} tokens, more than a record of this model, "
                f"{self.longest}"
            )

    def _with_end(self, tokens: list) -> list:
        """Return the tokens of a text, with the end of a record where it is given."""
        if self.end is None:
            return tokens
        return [*tokens, self.end.token]

    def _with_end_first(self, order: list[int]) -> list[int]:
        """Return the order (T,) of a text's positions, behind that of a given end."""
        if self.end is None:
            return order
        return [len(order), *order]

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
        self, order: str | Sequence[int] | Tensor, length: int, seed: int, number: int
    ) -> Tensor:
        """Return the order (T,) of block `number` of a text."""
        if isinstance(order, list | tuple):
            if not all(type(place) is int for place in order):
                raise UserError(f"order is {order!r:.40}: give a list of whole numbers")
            order = torch.tensor(order)
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
                "'random', or a list of places, such as [1, 0, 2]"
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
        self,
        rows: list[list[int]],
        orders: list[list[int]],
        firsts: list[int],
        vocab_size: int | None = None,
    ) -> list[list[float | None]]:
        """Return log p of each token of rows along their orders, by position; None
        where none is scored, at the first `firsts` steps of a row. Rows of similar
        length share a pass. vocab_size: as of `token_log_probs`."""
        log_probs: list[list[float | None]] = [[] for _ in rows]
        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        with progress_of(len(rows), "block") as bar:
            while by_length:
                longest = len(rows[by_length[-1]])
                size = max(1, BATCH_TOKENS // longest)
                batch = by_length[-size:]
                del by_length[-size:]
                by_position = self._log_probs_of_batch(
                    [rows[number] for number in batch],
                    [orders[number] for number in batch],
                    [firsts[number] for number in batch],
                    vocab_size,
                ).tolist()
                for number, padded in zip(batch, by_position, strict=True):
                    row = padded[: len(rows[number])]
                    for position in orders[number][: firsts[number]]:
                        row[position] = None
                    log_probs[number] = row
                bar.update(len(batch))
        return log_probs

    def _log_probs_of_batch(
        self,
        rows: list[list[int]],
        orders: list[list[int]],
        firsts: list[int],
        vocab_size: int | None,
    ) -> Tensor:
        """Return `_log_probs` of rows that share a pass, float64 (N, T), 0 where none
        is scored."""
        texts = [torch.tensor(self._with_end(row)) for row in rows]
        x = pad_sequence(texts, batch_first=True)
        N, T = x.shape
        steps = torch.arange(T).repeat(N, 1)
        order = steps.clone()
        for number, places in enumerate(orders):
            places = self._with_end_first(places)
            order[number, : len(places)] = torch.tensor(places)
        first = torch.tensor(firsts)[:, None] + int(self.end is not None)
        along = token_log_probs(
            self.model,
            x.to(self.device),
            order.to(self.device),
            known=known_from(first, steps).to(self.device),
            lengths=torch.tensor([len(text) for text in texts], device=self.device),
            vocab_size=vocab_size,
        )
        check_finite(along)
        along = along.cpu().double()
        return torch.zeros_like(along).scatter_(1, order, along)

    # ---- generation ------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str],
        new_tokens: int | None = None,
        num_samples: int = 1,
        seed: int = 0,
        *,
        temperature: float = TEMPERATURE,
        **options: Any,
    ) -> list[Sample]:
        """Continue prompts.

        Args:
            prompts: continued in batches; "" begins a text.
            new_tokens: how many to generate; by default what fits into a block.
            num_samples: of each prompt, one after the other.
            seed: repeats the samples.
            temperature: below 1 tokens are more probable ones than the model's.
            options: fields of `sampling.modes.DecodingOptions`, such as mode="l2r" or
                top_p=0.9."""
        check_value(new_tokens, int | None, "new_tokens")
        prompts = checked_texts(prompts)
        self._warn_of_special(prompts)
        contexts = []
        for place, prompt in enumerate(prompts, 1):
            with in_list(place, len(prompts)):
                contexts.append(self._context_after(prompt, new_tokens))
        options["temperature"] = temperature
        return self._sample(contexts, num_samples, seed, options)

    def _context_after(self, prompt: str, new_tokens: int | None) -> Context:
        """Return the tokens of a prompt, and None for each token to generate."""
        gaps.refuse_masks(prompt, "generate continues a text; fill takes masks")
        ids = self.tokenizer.encode(prompt)
        longest = self.longest
        if self.end is not None and new_tokens is None and len(ids) <= longest:
            return ids  # the length is drawn: `contexts_with_end`
        room = longest - len(ids)
        count = room if new_tokens is None else new_tokens
        if not 0 < count <= room:
            raise UserError(
                f"the prompt has {len(ids)} tokens and new_tokens is {count}; together "
                f"at most {longest}, and at least 1 is new"
            )
        return self._with_end(ids + [None] * count)

    def fill(
        self,
        texts: Sequence[str],
        num_samples: int = 1,
        seed: int = 0,
        *,
        temperature: float = TEMPERATURE,
        **options: Any,
    ) -> list[Sample]:
        """Fill the gaps of texts, "She[MASK:4] home.": [MASK] is one token, [MASK:4]
        four. Put no space before a mask, since words begin with theirs. Arguments as of
        `generate`. Raises UserError for a text without masks."""
        texts = checked_texts(texts)
        self._warn_of_special(texts, has_masks=True)
        contexts = []
        for place, text in enumerate(texts, 1):
            with in_list(place, len(texts)):
                contexts.append(self._context_of(text))
        options["temperature"] = temperature
        return self._sample(contexts, num_samples, seed, options)

    def _context_of(self, text: str) -> Context:
        """Return the tokens of a text with masks, and None for each token to fill."""
        longest = self.longest
        return self._with_end(gaps.encode_gaps(text, self.tokenizer, longest))

    def _sample(
        self, contexts: list[Context], count: int, seed: int, options: dict[str, Any]
    ) -> list[Sample]:
        """Return `count` samples of each context."""
        check_value(seed, Seed, "seed")
        check_value(count, Count, "num_samples")
        config = self.model.config
        unknown = sorted(set(options) - set(DecodingOptions.__dataclass_fields__))
        if unknown:
            raise UserError(f"there is no option {unknown[0]!r}")
        keys = list(range(len(contexts)))
        if self.end is None:
            for context in contexts:
                modes.check_context(context, config, self.loaded.scored_from)
        else:  # samples of one context differ in length
            with_end = contexts_with_end(
                self.end, dict(enumerate(contexts)), seed, count, longest=self.longest
            )
            contexts = list(with_end.values())
            keys = list(with_end)
            count = 1
        samples = []
        with _python_names():
            decoding = DecodingOptions(**options)
            if decoding.mode is None:
                decoding = replace(decoding, mode=modes.default_mode(config))
            modes.check_mode(decoding.plan, config)
            if not contexts:
                return []
            planned = modes.plan_samples(decoding.plan, contexts, seed, count, keys)
            if self.end is not None:
                planned = planned._replace(plan=end_first(planned.plan))
            engine = decoding.engine(self.model, self.loaded.vocab_size)
            alone = Processes(0, 1, self.device)
            generation = modes.generate_distributed(engine, planned, alone)
        if self.end is not None:
            generation = without_end(generation)
        orders = generation.order.tolist()
        for number, (tokens, _, log_probs) in enumerate(generation.rows()):
            order = orders[number]
            sample = Sample(
                text=self.tokenizer.decode(tokens),
                tokens=tokens,
                log_probs=log_probs,
                order=[position for position in order if position < len(tokens)],
            )
            samples.append(sample)
        return samples

    # ---- blanks and alternatives -----------------------------------------------------

    def blanks(self, texts: Sequence[str], top: int = 10) -> list[list[list[Likely]]]:
        """Return, for each text and every masked token of it, the `top` likeliest
        tokens given the known text, all in one pass."""
        check_value(top, Count, "top")
        self._check_any_order()
        texts = checked_texts(texts)
        self._warn_of_special(texts, has_masks=True)
        likely = []
        with progress_of(len(texts), "text") as bar:
            for place, text in enumerate(texts, 1):
                with in_list(place, len(texts)):
                    likely.append(self._blanks(text, top))
                bar.update()
        return likely

    @torch.no_grad()
    def _blanks(self, text: str, top: int) -> list[list[Likely]]:
        context = self._context_of(text)
        tokens = [token or 0 for token in context]
        is_blank = [token is None for token in context]
        length = len(tokens) - int(self.end is not None)
        order = sorted(range(length), key=is_blank.__getitem__)
        logits = masked_logits(
            self.model,
            torch.tensor([tokens], device=self.device),
            torch.tensor([is_blank], device=self.device),
            torch.tensor([self._with_end_first(order)], device=self.device),
        )
        logits = logits[:, : self.loaded.vocab_size]
        probabilities = logits.double().softmax(dim=-1)
        check_finite(probabilities)
        best = probabilities.topk(min(top, self.loaded.vocab_size))
        likely_of_blanks = []
        for ids, values in zip(best.indices, best.values, strict=True):
            likely_of_blanks.append(self._likely(ids, values))
        return likely_of_blanks

    def _likely(self, ids: Tensor, probabilities: Tensor) -> list[Likely]:
        """Return tokens with their probabilities."""
        likely = []
        for token, value in zip(ids.tolist(), probabilities.tolist(), strict=True):
            likely.append(Likely(token_text(self.tokenizer, token), value, token))
        return likely

    def pairs(
        self,
        texts: Sequence[str],
        first: int,
        second: int,
        top: int = 32,
        orders: int = 1,
    ) -> list[Pairs]:
        """Return, for each text, the joint probabilities of what may stand at two
        places given the rest of it, from one row more than tokens at the first place.

        Args:
            first, second: places of characters, the same in each text; each must be one
                token. p(first) p(second | first): the other way round it is another
                estimate.
            top: how many tokens of each place, the likeliest ones. Where that is all of
                them, as of an alphabet, the table sums to 1.
            orders: 1, or 2 for the mean of both ways."""
        check_value(top, Count, "top")
        check_value(orders, Literal[1, 2], "orders")
        self._check_any_order()
        texts = checked_texts(texts)
        self._warn_of_special(texts, but_end=True)
        tables = []
        for place, text in enumerate(texts, 1):
            with in_list(place, len(texts)):
                tables.append(self._pairs(text, (first, second), top, orders))
        return tables

    @torch.no_grad()
    def _pairs(self, text: str, places: Span, top: int, orders: int) -> Pairs:
        """Return the joint probabilities at two places of a text."""
        ids = self._ids_to_score(text, end=False)
        if len(ids) > self.longest:
            raise UserError(
                f"the text has {len(ids)} tokens; pairs takes at most {self.longest}"
            )
        positions = []
        for place in places:
            (position, *more) = self._positions_of(text, ids, [(place, place + 1)])
            if more or position in positions:
                raise UserError(
                    f"pairs takes two places, each of one token; character {place} has "
                    "several, or that of the other place: give score(predict=) spans"
                )
            positions.append(position)
        if len(ids) - 2 < self.scored_from:
            raise UserError("this model has no start token: give a longer text")
        # 1. Each place given the text without both.
        tokens = torch.tensor([self._with_end(ids)], device=self.device)
        marginals = self._distributions(tokens, positions, unknown=2)  # (2, V)
        top = min(top, self.loaded.vocab_size - int(self.end is not None))
        values, candidates = marginals.topk(top)  # (2, top)

        # 2. The second place given each token of the first; and the other way round.
        tables = []
        for given in range(orders):
            rows = tokens.repeat(top, 1)
            rows[:, positions[given]] = candidates[given]
            order = [positions[given], positions[1 - given]]
            conditionals = self._distributions(rows, order, unknown=1)  # (top, V)
            chosen = conditionals[:, candidates[1 - given]]
            table = values[given][:, None] * chosen
            tables.append(table.T if given else table)
        table = torch.stack(tables).mean(dim=0)
        return Pairs(
            first=self._likely(candidates[0], values[0]),
            second=self._likely(candidates[1], values[1]),
            table=table.tolist(),
        )

    def _distributions(self, tokens: Tensor, last: list[int], unknown: int) -> Tensor:
        """Return the distributions (rows * unknown, V) of the `unknown` last positions
        of the order that ends with `last`, float64. tokens: (B, T), with the end of a
        record."""
        B, T = tokens.shape
        length = T - int(self.end is not None)
        rest = [position for position in range(length) if position not in last]
        order = torch.tensor([self._with_end_first([*rest, *last])])
        masked = torch.zeros(1, T, dtype=torch.bool)
        masked[0, last[len(last) - unknown :]] = True
        parts = []
        for rows in tokens.split(max(1, BATCH_TOKENS // T)):
            logits = masked_logits(
                self.model,
                rows,
                masked.expand(len(rows), T).to(self.device),
                order.expand(len(rows), T).to(self.device),
            )
            logits = logits[:, : self.loaded.vocab_size]
            parts.append(logits.double().softmax(dim=-1))
        distributions = torch.cat(parts)
        check_finite(distributions)
        if unknown == 2 and last[0] > last[1]:  # they come by position
            distributions = distributions.flip(0)
        return distributions

    def rank(self, texts: Sequence[str], end: bool = False) -> list[list[Alternative]]:
        """Rank the alternatives of texts, "The [cat|dog|tax] barked.", by the
        probability of the whole text, the most probable first. Equal texts count once.

        Args:
            texts: with alternatives in brackets.
            end: score the end of the text, too. Where alternatives stand at the end,
                "She went home[.|]", the shorter one is otherwise a beginning of the
                longer one, and a beginning is always at least as probable."""
        texts = checked_texts(texts)
        self._warn_of_special(texts, but_end=True)
        ranked = []
        with progress_of(len(texts), "text") as bar:
            for place, text in enumerate(texts, 1):
                with in_list(place, len(texts)):
                    ranked.append(self._rank(text, end))
                bar.update()
        return ranked

    def _rank(self, text: str, end: bool) -> list[Alternative]:
        wholes = alternatives_of(text)
        end = end or self.end is not None  # log p(length) of alternatives that differ
        rows = [self._ids_to_score(whole, end) for whole in wholes]
        if self.scored_from and len({row[0] for row in rows}) > 1:
            raise UserError(
                "this model has no start token, so it cannot score the first token of "
                "a text, and these alternatives begin differently: put a word before "
                "them"
            )
        scores = self._score(wholes, order="l2r", seed=0, end=end)
        totals = [-scored.nats for scored in scores]
        shares = torch.tensor(totals, dtype=torch.float64).softmax(dim=0).tolist()
        alternatives = []
        for whole, total, share in zip(wholes, totals, shares, strict=True):
            alternatives.append(Alternative(whole, log_prob=total, share=share))
        return sorted(alternatives, key=lambda alternative: -alternative.log_prob)


def check_spans(spans: Any, length: int) -> None:
    """Raise UserError unless spans are pairs of places in a text of this length that do
    not overlap."""
    if not isinstance(spans, list | tuple) or not spans:
        raise UserError("predict takes spans of characters, such as [(3, 7), (20, 21)]")
    last = 0
    for span in sorted(spans, key=str):
        is_pair = isinstance(span, list | tuple) and len(span) == 2
        if not is_pair or not all(type(place) is int for place in span):
            raise UserError(f"{span!r:.40} is no span of characters, such as (3, 7)")
        if not 0 <= span[0] < span[1] <= length:
            raise UserError(
                f"the span {span[0]}:{span[1]} is empty or not in the text, which has "
                f"{length} characters"
            )
    for begin, end in sorted(spans):
        if begin < last:
            raise UserError(f"the span {begin}:{end} overlaps another one")
        last = end


def orders_of(size: int, count: int, seed: int) -> tuple[Tensor, bool]:
    """Return orders of `size` tokens, LongTensor (K, size), and whether they are all
    that count: as written, `count` random ones, or all there are."""
    if count == 1:
        return torch.arange(size)[None], True
    if size < 9 and count >= math.factorial(size):
        return torch.tensor(list(itertools.permutations(range(size)))), True
    config = parse_order("random", "order")
    orders = orders_at(
        config, seed=seed, step=0, rows=range(count), length=size, stream=SCORED_ORDERS
    )
    return orders, False


def joint_of(scored: Scored, totals: Tensor, is_whole: bool) -> Joint:
    """Return the scores of a text with the mean of the probability over K orders.
    totals (K,): its logarithm in each order; is_whole: these are all orders."""
    count = len(totals)
    error = 0.0
    if not is_whole:
        probabilities = (totals - totals.amax()).exp()
        error = float(probabilities.std() / probabilities.mean()) / math.sqrt(count)
    return Joint(
        pieces=scored.pieces,
        log_probs=scored.log_probs,
        bytes=scored.bytes,
        ids=scored.ids,
        log_prob=float(totals.logsumexp(dim=0)) - math.log(count),
        standard_error=error,
    )


def check_finite(numbers: Tensor) -> None:
    """Raise UserError if a number is NaN: a ranking by it would be any order."""
    if numbers.isnan().any():
        raise UserError(
            "the model's output is not finite: its weights overflowed or hold NaN"
        )


def alternatives_of(text: str) -> list[str]:
    """Return each different text that brackets of alternatives allow."""
    parts = BRACKETS.split(text)
    if len(parts) == 1:
        raise UserError("there are no alternatives; write [this|that]")
    choices = [part.split("|") for part in parts[1::2]]
    if math.prod(map(len, choices)) > MOST_ALTERNATIVES:
        raise UserError(f"give at most {MOST_ALTERNATIVES} combinations")
    wholes = {}
    for words in itertools.product(*choices):
        whole = parts[0]
        for word, after in zip(words, parts[2::2], strict=True):
            whole += word + after
        wholes[whole] = None  # a dict keeps the order of what is written
    return list(wholes)


def checked_texts(texts: Any) -> list[str]:
    """Return a list of texts. Raises UserError for other values, such as one text, or
    the None or NaN of an empty cell of a table."""
    if isinstance(texts, str | bytes) or not isinstance(texts, list | tuple):
        raise UserError(f"give a list of texts; this is {texts!r:.40}")
    for place, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UserError(
                f"text {place} of {len(texts)} is {text!r:.40}; leave it out, or give "
                "a string"
            )
    return list(texts)


def progress_of(count: int, unit: str) -> tqdm:
    """Return a progress bar for a list that takes more than seconds, on a terminal."""
    return tqdm(
        total=count,
        unit=unit,
        delay=PROGRESS_SECONDS,
        disable=None,  # without a terminal
        leave=False,
    )


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


def _total(log_probs: list[float | None]) -> float:
    """Return the sum of the log-probabilities of the tokens that are scored."""
    return math.fsum(log_prob for log_prob in log_probs if log_prob is not None)
