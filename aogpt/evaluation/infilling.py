"""Infilling: how well a model predicts, and fills, the middle sentence of a passage, or its last
word. N passages of T tokens; the middle of each goes from `start` to `end`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.loader import spread
from ..data.tokenizers import Tokenizer
from ..model import AOGPT
from ..runtime.errors import UserError
from ..scoring import masked_log_probs, token_log_probs

SENTENCE_ENDS = (".", "!", "?")
AFTER_THEM = " \n\"')”’"  # what may be between a sentence's end and the next one


@dataclass(frozen=True)
class Passages:
    tokens: Tensor  # LongTensor (N, T)
    start: Tensor  # LongTensor (N,), the first token of the middle
    end: Tensor  # LongTensor (N,), the first one after it

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> "Passages":
        return Passages(self.tokens[rows], self.start[rows], self.end[rows])

    def known(self, both_sides: bool) -> Tensor:
        """BoolTensor (N, T): what is before the middle and, with both sides, what is after it."""
        positions = torch.arange(self.tokens.shape[1])
        before = positions < self.start[:, None]
        return before | (positions >= self.end[:, None]) if both_sides else before

    def middle(self, rows: list[list[int]]) -> list[list[int]]:
        """The middle of each of N rows of tokens."""
        spans = zip(rows, self.start.tolist(), self.end.tolist(), strict=True)
        return [row[start:end] for row, start, end in spans]


def find_passages(
    blocks: Tensor, tokenizer: Tokenizer, shortest: int, longest: int
) -> Passages:
    """The blocks (N, T) that have a whole sentence of this many tokens, and of several the one that
    is nearest to the middle."""
    ids = blocks.unique().tolist()
    rows = []
    spans = []
    texts = {token: tokenizer.decode([token]).rstrip(AFTER_THEM) for token in ids}
    for row, block in enumerate(blocks.tolist()):
        ends = [
            i + 1
            for i, token in enumerate(block)
            if texts[token].endswith(SENTENCE_ENDS)
        ]
        pairs = zip(ends, ends[1:], strict=False)
        fitting = [(a, b) for a, b in pairs if shortest <= b - a <= longest]
        if fitting:
            rows.append(row)
            spans.append(min(fitting, key=lambda span: abs(sum(span) - len(block))))
    return Passages(blocks[rows], *torch.tensor(spans).long().view(-1, 2).T)


def find_last_words(
    tokens: Sequence[int], tokenizer: Tokenizer, count: int, length: int
) -> Passages:
    """Those of `count` documents, spread over a row of tokens, that have two words or more. The
    middle is the last word with the space before it (Paperno et al. 2016, LAMBADA). Of longer
    documents the last `length` tokens; shorter ones end with zeros, after the middle."""
    ends = np.flatnonzero(np.asarray(tokens) == tokenizer.eot)
    starts = np.append(0, ends[:-1] + 1)
    # the first row for its width alone
    rows = [torch.zeros(length).long()]
    spans = []
    for number in spread(count, len(ends)):
        start = int(starts[number])
        end = int(ends[number])
        last = [int(token) for token in tokens[max(start, end - length) : end]]
        if start := _start_of_last_word(last, tokenizer):
            rows.append(torch.tensor(last))
            spans.append((start, len(last)))
    rows = pad_sequence(rows, batch_first=True)[1:]
    return Passages(rows, *torch.tensor(spans).long().view(-1, 2).T)


def _start_of_last_word(document: list[int], tokenizer: Tokenizer) -> int:
    """The last token from which on a document reads as white space and a word; 0: there is none."""
    for start in range(len(document) - 1, 0, -1):
        text = tokenizer.decode(document[start:])
        if text[:1].isspace() and text.strip():
            return start
    return 0


@torch.no_grad()
def middle_nll(model: AOGPT, passages: Passages, both_sides: bool) -> Tensor:
    """-log p of the middle, token after token, given what is known: (N,) float64, nats per token.
    With both sides (not a plain GPT's) the order is: what is before, after, then the middle."""
    tokens = passages.tokens
    device = model.wte.weight.device
    known = passages.known(both_sides)
    T = tokens.shape[1]
    length = passages.end - passages.start
    positions = torch.arange(T)
    if model.config.is_encoder:
        total = torch.zeros(len(passages), dtype=torch.float64)
        for i in range(int(length.max())):  # a pass for the i-th token of every middle
            place = (passages.start + i)[:, None]
            masked = ~known & (positions >= place)
            log_probs = (
                masked_log_probs(model, tokens.to(device), masked.to(device))
                .cpu()
                .double()
            )
            found = log_probs.gather(1, place.clamp(max=T - 1)).squeeze(1)
            total -= found.where(i < length, 0.0)
        return total / length
    # What is known first, then the middle, then what is neither: each from left to right.
    middle = ~known & (positions < passages.end[:, None])
    order = torch.where(known, 0, torch.where(middle, 1, 2)).argsort(dim=1, stable=True)
    log_probs = (
        token_log_probs(model, tokens.to(device), order.to(device)).cpu().double()
    )
    return -(log_probs * middle.gather(1, order)).sum(dim=1) / length


class Words:
    """Runs of letters and digits, in small letters (rouge_score's own tokenizer knows a-z only)."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())


def rouge(pairs: list[tuple[str, str]]) -> dict[str, list[float]]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) of each (sample, reference)."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        install = "pip install -r requirements-harness.txt"
        raise UserError(f"ROUGE needs the package rouge_score: {install}") from None
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Words())
    found = [scorer.score(reference, text) for text, reference in pairs]
    names = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
    return {
        key: [scores[name].fmeasure for scores in found] for key, name in names.items()
    }
