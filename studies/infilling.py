"""Infilling: how well a model predicts, and fills, the middle sentence of a passage, or
its last word. N passages of T tokens; the middle of each goes from `start` to `end`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aogpt.data.loader import spread
from aogpt.data.tokenizers import Tokenizer
from aogpt.model import AOGPT
from aogpt.runtime.errors import UserError
from aogpt.scoring import masked_log_probs, token_log_probs

SENTENCE_ENDS = (".", "!", "?")
AFTER_THEM = " \n\"')”’"  # what may be between a sentence's end and the next one


@dataclass(frozen=True)
class Passages:
    """The passages whose middle is to be predicted."""

    tokens: Tensor  # LongTensor (N, T)
    start: Tensor  # LongTensor (N,), the first token of the middle
    end: Tensor  # LongTensor (N,), the first one after it
    document: Tensor  # LongTensor (N,), the number of its document

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> "Passages":
        return Passages(
            tokens=self.tokens[rows],
            start=self.start[rows],
            end=self.end[rows],
            document=self.document[rows],
        )

    def known(self, both_sides: bool) -> Tensor:
        """Return the tokens before the middle and, with both sides, those after it, as
        True in a BoolTensor (N, T)."""
        T = self.tokens.shape[1]
        positions = torch.arange(T)
        is_before = positions < self.start[:, None]
        if not both_sides:
            return is_before
        is_after = positions >= self.end[:, None]
        return is_before | is_after

    def middle(self, rows: list[list[int]]) -> list[list[int]]:
        """Return the middle of each of N rows of tokens."""
        starts = self.start.tolist()
        ends = self.end.tolist()
        middles = []
        for row, start, end in zip(rows, starts, ends, strict=True):
            middles.append(row[start:end])
        return middles


def find_passages(
    blocks: Tensor,
    tokenizer: Tokenizer,
    shortest: int,
    longest: int,
    end: int,
    documents: Tensor | None = None,
) -> Passages:
    """Return the blocks (N, T) that have a whole sentence of this many tokens; where
    there are several, the middle is the one nearest to the middle of the block. Every
    full stop ends a sentence, also that of "Mr.".
    end: the id that ends a document.
    documents: the number of the document of each block, by default one for all."""
    T = blocks.shape[1]
    ends_sentence = {}
    for token in blocks.unique().tolist():
        text = tokenizer.decode([token]).rstrip(AFTER_THEM)
        ends_sentence[token] = text.endswith(SENTENCE_ENDS)
    rows = []
    spans = []
    for row, block in enumerate(blocks.tolist()):
        ends = []  # the first token after each sentence
        for place, token in enumerate(block):
            if ends_sentence[token]:
                ends.append(place + 1)
        sentences = []
        for first, last in zip(ends, ends[1:], strict=False):
            # One with an end-of-text spans two documents.
            is_whole = end not in block[first:last]
            if shortest <= last - first <= longest and is_whole:
                sentences.append((first, last))
        if sentences:
            # Twice the distance from the middle.
            nearest = min(sentences, key=lambda span: abs(span[0] + span[1] - T))
            rows.append(row)
            spans.append(nearest)
    if documents is None:
        documents = torch.zeros(len(blocks)).long()
    return _passages(blocks[rows], spans, documents[rows])


def _passages(
    tokens: Tensor, spans: list[tuple[int, int]], documents: Tensor
) -> Passages:
    """Return passages of tokens (N, T) whose middles have these starts and ends."""
    spans = torch.tensor(spans).long().view(-1, 2)
    return Passages(tokens, start=spans[:, 0], end=spans[:, 1], document=documents)


def find_last_words(
    tokens: Sequence[int], tokenizer: Tokenizer, count: int, length: int, end: int
) -> Passages:
    """Return those of `count` documents, spread over a row of tokens, that have two
    words or more. The middle is the last word with the space before it (Paperno et al.
    2016, LAMBADA). A longer document gives its last `length` tokens; shorter ones end
    with zeros, after the middle. end: the id that ends a document."""
    is_end = np.asarray(tokens) == end
    ends = np.flatnonzero(is_end)
    starts = np.append(0, ends[:-1] + 1)
    # The first row is there for its width alone.
    rows = [torch.zeros(length).long()]
    spans = []
    for number in spread(count, len(ends)):
        last = int(ends[number])
        first = max(int(starts[number]), last - length)
        document = [int(token) for token in tokens[first:last]]
        word = _start_of_last_word(document, tokenizer)
        if word > 0:
            rows.append(torch.tensor(document))
            spans.append((word, len(document)))
    padded = pad_sequence(rows, batch_first=True)
    return _passages(padded[1:], spans, documents=torch.arange(len(spans)))


def _start_of_last_word(document: list[int], tokenizer: Tokenizer) -> int:
    """Return the last token from which on a document reads as white space and a word;
    0: there is none."""
    # Of the whole document: some tokenizers drop the space before a text's first token.
    pieces = tokenizer.pieces(document)
    text = ""
    for start in range(len(document) - 1, 0, -1):
        text = pieces[start] + text
        # A piece of no text begins a character that later tokens complete.
        if pieces[start - 1] and text[:1].isspace() and text.strip():
            return start
    return 0


@torch.no_grad()
def middle_nll(model: AOGPT, passages: Passages, both_sides: bool) -> Tensor:
    """Return -log p of the middle, token after token, given the left side or both
    sides: (N,) float64, nats per token. With both sides (not for a plain GPT) the order
    is: the left side, the right side, then the middle."""
    if model.config.is_encoder:
        return _masked_middle_nll(model, passages, both_sides)
    tokens = passages.tokens
    device = model.wte.weight.device
    T = tokens.shape[1]
    positions = torch.arange(T)
    is_known = passages.known(both_sides)
    is_middle = ~is_known & (positions < passages.end[:, None])
    # First the known tokens, then the middle, then the others, each from left to right.
    rank = torch.where(is_middle, 1, 2)
    rank = torch.where(is_known, 0, rank)
    order = rank.argsort(dim=1, stable=True)
    log_probs = token_log_probs(model, tokens.to(device), order.to(device))
    log_probs = log_probs.cpu().double()  # (N, T) by step
    is_scored = is_middle.gather(1, order)
    total = (log_probs * is_scored).sum(dim=1)
    length = passages.end - passages.start
    return -total / length


def _masked_middle_nll(model: AOGPT, passages: Passages, both_sides: bool) -> Tensor:
    """Return `middle_nll` of an encoder: a pass for the i-th token of every middle."""
    tokens = passages.tokens
    device = model.wte.weight.device
    T = tokens.shape[1]
    positions = torch.arange(T)
    is_known = passages.known(both_sides)
    length = passages.end - passages.start
    total = torch.zeros(len(passages), dtype=torch.float64)
    for i in range(int(length.max())):
        place = (passages.start + i)[:, None]
        is_masked = ~is_known & (positions >= place)
        log_probs = masked_log_probs(model, tokens.to(device), is_masked.to(device))
        log_probs = log_probs.cpu().double()  # (N, T) by position
        index = place.clamp(max=T - 1)
        log_prob = log_probs.gather(1, index).squeeze(1)
        total -= log_prob.where(i < length, 0.0)
    return total / length


class Words:
    """A tokenizer of words for rouge_score, whose own one knows a-z only."""

    def tokenize(self, text: str) -> list[str]:
        """Return the runs of letters and digits of a text, in small letters."""
        return re.findall(r"\w+", text.lower())


def rouge(pairs: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Return the F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) of each (sample,
    reference)."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise UserError(
            "ROUGE needs the package rouge_score: "
            "pip install -r requirements/harness.txt"
        ) from None
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Words())
    scores: dict[str, list[float]] = {"rouge_1": [], "rouge_2": [], "rouge_l": []}
    for text, reference in pairs:
        score = scorer.score(reference, text)
        scores["rouge_1"].append(score["rouge1"].fmeasure)
        scores["rouge_2"].append(score["rouge2"].fmeasure)
        scores["rouge_l"].append(score["rougeL"].fmeasure)
    return scores
