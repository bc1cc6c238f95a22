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

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from . import checkpoints
from .data.pieces import token_text
from .data.tokenizers import (
    END_OF_TEXT,
    AlphabetTokenizer,
    BytesTokenizer,
    notes_on_special,
    without_lone_surrogates,
)
from .orders import orders_at, parse_order
from .runtime.devices import pick_device
from .runtime.errors import UserError
from .runtime.randomness import SCORED_ORDERS
from .runtime.validation import Count, Seed, check_value
from .sampling import modes
from .sampling.modes import DecodingOptions
from .scoring import check_finite, known_from, masked_logits, token_log_probs

TEMPERATURE = 0.7  # of generated text
BATCH_TOKENS = 4096  # of texts that are scored in one pass
PROGRESS_SECONDS = 2.0  # before a bar appears
INNER = r"\[[^\[\]|]*\]"  # brackets within an alternative, as of an atom: [nH]
BRACKETS = re.compile(rf"\[((?:[^\[\]|]|{INNER})*\|(?:[^\[\]]|{INNER})*)\]")
MOST_ALTERNATIVES = 512  # combinations of the brackets of a text
Answer = TypeVar("Answer")


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
        device: "auto" for CUDA if there is a GPU, "cpu", "cuda", "cuda:1", "mps", or
            another device of PyTorch.
        block_size: the longest text in tokens, if not that of training.
        checkpoint: which one of a run folder: "last", "best" or the number of a step.

    Raises UserError for what cannot be loaded."""
    check_value(path, str | Path, "path")
    check_value(block_size, Count | None, "block_size")
    device = pick_device(device)
    return TextModel(checkpoints.load(path, weights, device, block_size, checkpoint))


@dataclass(frozen=True)
class Row:
    """Tokens to score in one pass."""

    ids: list[int]
    order: list[int]  # of their positions
    given: int  # how many of the first steps are not scored


class TextModel:
    """A model and its tokenizer, as `load` returns them."""

    def __init__(self, loaded: checkpoints.Loaded):
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.get_tokenizer()
        self.device = self.model.wte.weight.device
        self.block_size = self.model.config.block_size
        self.scored_from = loaded.scored_from
        self.longest = self.block_size  # tokens of a text
        self.end = loaded.record_end  # of records, where it is given
        self._end_tokens: list[int] = []
        if self.end is not None:  # which is known before the first token
            self._end_tokens = [self.end.token]
            self.scored_from = 0
            self.longest = self.end.longest_in(self.block_size)

    def __repr__(self) -> str:
        return f"TextModel({self.loaded.description}, {self.device})"

    def _checked(self, texts: Any, end_is_token: bool) -> list[str]:
        """Return a list of texts, and warn of special tokens in them that are read as
        ordinary text. Raises UserError for other values, such as one text, or the None
        or NaN of an empty cell of a table."""
        check_value(texts, list[Any], "texts")
        for place, text in enumerate(texts, 1):
            check_value(text, str, f"text {place} of {len(texts)}")
        counts = self.tokenizer.count_special(
            modes.MASK.sub("", text) for text in texts
        )
        if end_is_token:
            counts.pop(END_OF_TEXT, None)
        for note in notes_on_special(counts):
            warnings.warn(note, stacklevel=3)
        return list(texts)

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
        texts = self._checked(texts, end_is_token=True)
        for brackets in filter(None, map(BRACKETS.search, texts)):
            warnings.warn(
                f"{brackets[0][:40]} is scored as it is written; rank compares "
                "alternatives",
                stacklevel=2,
            )
        check_value(predict, list[tuple[int, int]] | None, "predict")
        if predict is None:
            is_refused = orders > 1
        else:
            is_l2r = isinstance(order, str) and order == "l2r"
            is_refused = not is_l2r or end or not predict
        if is_refused:
            raise UserError(
                "predict takes spans, such as [(3, 7)], and orders, and neither order "
                "nor end"
            )
        if predict is None:
            return self._score(texts, order, seed, end)
        return self._joints(texts, predict, orders, seed)

    def _score(
        self,
        texts: list[str],
        order: str | Sequence[int] | Tensor,
        seed: int,
        end: bool,
    ) -> list[Scored]:
        def blocks_of(text: str) -> list[Row]:
            ids = self._ids_to_score(text, end)
            blocks = []
            for number, start in enumerate(range(0, len(ids), self.block_size)):
                block = ids[start : start + self.block_size]
                places = self._order(order, len(block), seed, number)
                blocks.append(Row(block, places, self.scored_from))
            return blocks

        results = []
        for text, blocks, log_probs in self._scored_rows(texts, blocks_of):
            ids = [token for block in blocks for token in block.ids]
            values = list(itertools.chain(*log_probs))
            if end and self.end is not None:  # its probability is that of the length
                values.append(self.end.log_prob(len(ids)))
                ids.append(self.end.token)
            results.append(self._scored(text, ids, values, end))
        return results

    def _joints(
        self, texts: list[str], spans: Sequence[Span], count: int, seed: int
    ) -> list[Joint]:
        """Return p(tokens of the spans | all others) of each text."""

        def rows_of(text: str) -> list[Row]:
            ids = self._ids_to_score(text, whole=True)
            predicted = self._positions_of(text, ids, spans)
            given = sorted(set(range(len(ids))) - set(predicted))
            self._check_known(len(given))
            rows = []
            for places in orders_of(len(predicted), count, seed):
                last = [predicted[place] for place in places]
                rows.append(Row(ids, given + last, len(given)))
            return rows

        joints = []
        vocab_size = self.loaded.vocab_size
        for text, rows, of_orders in self._scored_rows(texts, rows_of, vocab_size):
            scored = self._scored(text, rows[0].ids, of_orders[0])
            joints.append(joint_of(scored, [_total(values) for values in of_orders]))
        return joints

    def _positions_of(
        self, text: str, ids: list[int], spans: Sequence[Span]
    ) -> list[int]:
        """Return the positions of the tokens that spans of characters touch."""
        tokens = [self.tokenizer.to_bytes([token]) for token in ids]
        data = b"".join(tokens)
        shift = int(self.tokenizer.adds_space and data.startswith(b" "))
        if data[shift:] != without_lone_surrogates(text).encode():
            raise UserError(
                "the tokenizer changes this text, so spans of its characters are not "
                "those of tokens: write it as the tokenizer does"
            )
        starts = [0, *itertools.accumulate(map(len, tokens))]
        positions = set()
        for first, last in spans:
            if not 0 <= first < last <= len(text):
                raise UserError(
                    f"the span {first}:{last} is empty or not in the text, which has "
                    f"{len(text)} characters"
                )
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
            positions.update(touched)
        return sorted(positions)

    def _ids_to_score(
        self, text: str, end: bool = False, whole: bool = False
    ) -> list[int]:
        """Return the tokens of a text, and with `end` an end-of-text, unless the end is
        given. whole: refuse texts that are longer than a block."""
        modes.refuse_masks(text, "give it to fill or blanks, or leave it out")
        ids = self.tokenizer.encode_documents(text).tolist()
        if len(ids) + end <= self.scored_from:
            raise UserError("there is no text to score")
        if end and self.end is None:
            ids.append(self.tokenizer.eot)
        whole = whole or self.end is not None
        if whole and len(ids) > self.longest:
            raise UserError(
                f"the text has {len(ids)} tokens, and this model takes {self.longest} "
                "at once: give the part that matters"
            )
        if self.end is not None and self.end.token in ids:
            raise UserError(
                "a record of this model has one end, which follows the text by itself: "
                f"leave out {END_OF_TEXT}"
            )
        return ids

    def _check_known(self, count: int) -> None:
        """Raise UserError where the first prediction has too few tokens before it."""
        if count < self.scored_from:
            raise UserError(
                "this model has no start token, so it cannot score the first token of "
                "a text: put a word before what is scored"
            )

    def _scored(
        self,
        text: str,
        ids: list[int],
        log_probs: list[float | None],
        end: bool = False,
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
    ) -> list[int]:
        """Return the order of block `number` of a text."""
        if isinstance(order, str):
            config = parse_order(order, "order")
            rows = orders_at(config, seed, number, range(1), length, SCORED_ORDERS)
            return rows[0].tolist()
        if isinstance(order, Tensor):
            order = order.tolist()
        check_value(order, list[int], "order")
        if sorted(order) != list(range(length)):
            raise UserError(
                f"order must be a permutation of 0..{length - 1}, a place for each "
                "token; longer texts than a block are scored block by block"
            )
        return list(order)

    def _scored_rows(
        self,
        texts: list[str],
        rows_of: Callable[[str], list[Row]],
        vocab_size: int | None = None,
    ) -> Iterator[tuple[str, list[Row], list[list[float | None]]]]:
        """Yield each text with its rows and their `_log_probs`."""
        rows_of_texts = each(rows_of, texts)
        all_rows = list(itertools.chain(*rows_of_texts))
        log_probs = iter(self._log_probs(all_rows, vocab_size))
        for text, rows in zip(texts, rows_of_texts, strict=True):
            yield text, rows, list(itertools.islice(log_probs, len(rows)))

    def _log_probs(
        self, rows: list[Row], vocab_size: int | None
    ) -> list[list[float | None]]:
        """Return log p of each token of rows along their orders, by position; None
        where it is not scored. Rows of similar length share a pass. vocab_size: as of
        `token_log_probs`."""
        log_probs: list[list[float | None]] = [[] for _ in rows]
        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
        with tqdm(
            total=len(rows),
            unit="block",
            delay=PROGRESS_SECONDS,
            disable=None,  # without a terminal
            leave=False,
        ) as bar:
            while by_length:
                longest = len(rows[by_length[-1]].ids)
                size = max(1, BATCH_TOKENS // longest)
                batch = by_length[-size:]
                del by_length[-size:]
                scored = self._log_probs_of_batch(
                    [rows[number] for number in batch], vocab_size
                )
                for number, values in zip(batch, scored, strict=True):
                    log_probs[number] = values
                bar.update(len(batch))
        return log_probs

    def _log_probs_of_batch(
        self, rows: list[Row], vocab_size: int | None
    ) -> list[list[float | None]]:
        """Return `_log_probs` of rows that share a pass."""
        texts = [torch.tensor(row.ids + self._end_tokens) for row in rows]
        x = pad_sequence(texts, batch_first=True)
        N, T = x.shape
        steps = torch.arange(T).repeat(N, 1)
        order = steps.clone()
        for number, row in enumerate(rows):
            places = self._end_first(row.order)
            order[number, : len(places)] = torch.tensor(places)
        given = torch.tensor([row.given for row in rows]) + len(self._end_tokens)
        along = token_log_probs(
            self.model,
            x.to(self.device),
            order.to(self.device),
            known=known_from(given[:, None], steps).to(self.device),
            lengths=torch.tensor([len(text) for text in texts], device=self.device),
            vocab_size=vocab_size,
        )
        check_finite(along)
        along = along.cpu().double()
        by_position = torch.zeros_like(along).scatter_(1, order, along).tolist()
        log_probs = []
        for row, values in zip(rows, by_position, strict=True):
            of_row: list[float | None] = values[: len(row.ids)]
            for position in row.order[: row.given]:
                of_row[position] = None
            log_probs.append(of_row)
        return log_probs

    def _end_first(self, order: list[int]) -> list[int]:
        """Return the order (T,) of a text's positions, behind that of a given end."""
        return [len(order), *order] if self._end_tokens else order

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

        def context_of(prompt: str) -> modes.Context:
            modes.refuse_masks(prompt, "generate continues a text; fill takes masks")
            ids = self.tokenizer.encode(prompt)
            length = None if new_tokens is None else len(ids) + new_tokens
            return modes.continued(ids, length, self.longest, self.end)

        prompts = self._checked(prompts, end_is_token=False)
        contexts = each(context_of, prompts)
        return self._sample(contexts, num_samples, seed, temperature, options)

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
        texts = self._checked(texts, end_is_token=False)
        contexts = each(self._with_gaps, texts)
        return self._sample(contexts, num_samples, seed, temperature, options)

    def _with_gaps(self, text: str) -> modes.Context:
        """Return the tokens of a text with masks, and None for each token to fill."""
        learned = not isinstance(self.tokenizer, AlphabetTokenizer | BytesTokenizer)
        if learned and " [MASK" in text:
            warnings.warn(
                "words begin with their space: with one before [MASK], the mask stands "
                "for the rest of a word",
                stacklevel=4,
            )
        context = modes.encode_gaps(text, self.tokenizer, self.longest)
        return [*context, *self._end_tokens]

    def _sample(
        self,
        contexts: list[modes.Context],
        count: int,
        seed: int,
        temperature: float,
        options: dict[str, Any],
    ) -> list[Sample]:
        """Return `count` samples of each context."""
        check_value(seed, Seed, "seed")
        check_value(count, Count, "num_samples")
        for context in contexts:
            modes.check_start(
                bool(context) and context[0] is not None, self.scored_from
            )
        decoding = DecodingOptions(temperature=temperature, **options)
        mode = decoding.mode or modes.default_mode(self.model.config)
        samples = []
        for _, generation in modes.generate_samples(
            decoding.engine(self.model, self.loaded.vocab_size),
            modes.parse_mode(mode),
            dict(enumerate(contexts)),
            seed,
            count,
            end=self.end,
        ):
            for row in generation.rows():
                text = self.tokenizer.decode(row.tokens)
                samples.append(Sample(text, row.tokens, row.log_probs, row.order))
        return samples

    # ---- blanks and alternatives -----------------------------------------------------

    def blanks(self, texts: Sequence[str], top: int = 10) -> list[list[list[Likely]]]:
        """Return, for each text and every masked token of it, the `top` likeliest
        tokens given the known text, all in one pass."""
        check_value(top, Count, "top")

        def likely_of(text: str) -> list[list[Likely]]:
            context = self._with_gaps(text)
            tokens = torch.tensor([[token or 0 for token in context]])
            blanks = [n for n, token in enumerate(context) if token is None]
            (probabilities,) = self._probabilities(tokens, blanks)
            best = probabilities.topk(min(top, self.loaded.vocab_size))
            return list(map(self._likely, best.indices, best.values))

        return each(likely_of, self._checked(texts, end_is_token=False))

    @torch.no_grad()
    def _probabilities(
        self, tokens: Tensor, masked: list[int], before: Sequence[int] = ()
    ) -> Tensor:
        """Return p(token | the unmasked tokens) at masked positions, float64 (B,
        masked, V), in rising order.

        tokens: LongTensor (B, T), with the end of a record. before: known positions
        that a decoder reads last; it reads the others from left to right."""
        B, T = tokens.shape
        last = [*before, *masked]
        rest = [n for n in range(T - len(self._end_tokens)) if n not in last]
        order = torch.tensor([self._end_first([*rest, *last])], device=self.device)
        is_masked = torch.zeros(1, T, dtype=torch.bool, device=self.device)
        is_masked[0, masked] = True
        parts = []
        for rows in tokens.to(self.device).split(max(1, BATCH_TOKENS // T)):
            logits = masked_logits(
                self.model, rows, is_masked.expand_as(rows), order.expand_as(rows)
            )
            logits = logits[:, : self.loaded.vocab_size]
            parts.append(logits.double().softmax(dim=-1))
        probabilities = torch.cat(parts)
        check_finite(probabilities)
        return probabilities.unflatten(0, (B, len(masked)))

    def _likely(self, ids: Tensor, probabilities: Tensor) -> list[Likely]:
        """Return tokens with their probabilities."""
        likely = []
        for token, value in zip(ids.tolist(), probabilities.tolist(), strict=True):
            likely.append(Likely(token_text(self.tokenizer, token), value, token))
        return likely

    def pairs(
        self, texts: Sequence[str], first: int, second: int, top: int = 32
    ) -> list[Pairs]:
        """Return, for each text, the joint probabilities of what may stand at two
        places given the rest of it, p(first) p(second | first), from one row more than
        tokens at the first place.

        Args:
            first, second: places of characters, the same in each text; each must be one
                token.
            top: how many tokens of each place, the likeliest ones. Where that is all of
                them, as of an alphabet, the table sums to 1."""
        check_value(top, Count, "top")

        def pairs_of(text: str) -> Pairs:
            ids = self._ids_to_score(text, whole=True)
            positions = []
            for place in (first, second):
                positions += self._positions_of(text, ids, [(place, place + 1)])
            if len(positions) != 2 or positions[0] == positions[1]:
                raise UserError(
                    f"pairs takes two places, each of one token: characters {first} "
                    f"and {second} are of tokens {positions}; give spans to "
                    "score(predict=)"
                )
            self._check_known(len(ids) - 2)
            return self._pairs(ids, positions, top)

        return each(pairs_of, self._checked(texts, end_is_token=True))

    def _pairs(self, ids: list[int], positions: list[int], top: int) -> Pairs:
        """Return the joint probabilities at two positions of a text."""
        # Each place given the text without both.
        tokens = torch.tensor([[*ids, *self._end_tokens]], device=self.device)
        (marginals,) = self._probabilities(tokens, sorted(positions))  # (2, V)
        if positions[0] > positions[1]:
            marginals = marginals.flip(0)
        top = min(top, self.loaded.vocab_size - len(self._end_tokens))
        values, candidates = marginals.topk(top)  # (2, top)
        # The second place given each token of the first.
        rows = tokens.repeat(top, 1)
        rows[:, positions[0]] = candidates[0]
        conditionals = self._probabilities(rows, positions[1:], before=positions[:1])
        table = values[0][:, None] * conditionals[:, 0, candidates[1]]
        return Pairs(
            first=self._likely(candidates[0], values[0]),
            second=self._likely(candidates[1], values[1]),
            table=table.tolist(),
        )

    def rank(self, texts: Sequence[str], end: bool = False) -> list[list[Alternative]]:
        """Rank the alternatives of texts, "The [cat|dog|tax] barked.", by the
        probability of the whole text, the most probable first. Equal texts count once.

        Args:
            texts: with alternatives in brackets, each at most a block long.
            end: score the end of the text, too. Where alternatives stand at the end,
                "She went home[.|]", the shorter one is otherwise a beginning of the
                longer one, and a beginning is always at least as probable."""
        end = end or self.end is not None  # log p(length) of alternatives that differ

        def wholes_of(text: str) -> list[str]:
            wholes = alternatives_of(text)
            first_tokens = set()
            for whole in wholes:
                # An empty record whose end is given has no token.
                ids = self._ids_to_score(whole, end, whole=True)
                first_tokens.add(tuple(ids[:1]))
            # One that all begin with need not be scored to compare them.
            self._check_known(count=int(len(first_tokens) == 1))
            return wholes

        wholes_of_texts = each(wholes_of, self._checked(texts, end_is_token=True))
        wholes = list(itertools.chain(*wholes_of_texts))
        scores = iter(self._score(wholes, order="l2r", seed=0, end=end))
        ranked = []
        for wholes in wholes_of_texts:
            totals = [-next(scores).nats for _ in wholes]
            shares = torch.tensor(totals, dtype=torch.float64).softmax(dim=0).tolist()
            alternatives = list(map(Alternative, wholes, totals, shares))
            ranked.append(sorted(alternatives, key=lambda one: -one.log_prob))
        return ranked


def each(function: Callable[[str], Answer], texts: list[str]) -> list[Answer]:
    """Return function(text) of each text; a UserError says which text it is of."""
    answers = []
    for place, text in enumerate(texts, 1):
        try:
            answers.append(function(text))
        except UserError as error:
            if len(texts) == 1:
                raise
            message = f"text {place} of {len(texts)}: {error}"
            raise UserError(message) from error.__cause__
    return answers


def orders_of(size: int, count: int, seed: int) -> list[Sequence[int]]:
    """Return orders of `size` tokens: as written, or `count` random ones, or all where
    there are no more."""
    if count == 1:
        return [range(size)]
    if count >= math.factorial(size):
        return list(itertools.permutations(range(size)))
    config = parse_order("random", "order")
    return orders_at(config, seed, 0, range(count), size, SCORED_ORDERS).tolist()


def joint_of(scored: Scored, log_probs: list[float]) -> Joint:
    """Return the scores of a text with the mean of the probability over K orders, from
    its logarithm in each."""
    totals = torch.tensor(log_probs, dtype=torch.float64)
    count = len(totals)
    error = 0.0
    if count not in (1, math.factorial(scored.scored)):  # not as written, nor all
        probabilities = (totals - totals.amax()).exp()
        error = float(probabilities.std() / probabilities.mean()) / math.sqrt(count)
    return Joint(
        **vars(scored),
        log_prob=float(totals.logsumexp(dim=0)) - math.log(count),
        standard_error=error,
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
        if brackets := BRACKETS.search(whole):
            raise UserError(
                f"{brackets[0][:40]} stands within an alternative: write its whole "
                "alternatives, [a cat|a dog|a cow]"
            )
        wholes[whole] = None  # a dict keeps the order of what is written
    return list(wholes)


def _total(log_probs: list[float | None]) -> float:
    """Return the sum of the log-probabilities of the tokens that are scored."""
    return math.fsum(log_prob for log_prob in log_probs if log_prob is not None)
