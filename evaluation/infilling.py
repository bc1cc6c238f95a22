"""Infilling: how well a model predicts, and fills, the middle sentence of a passage, or its last
word.

N passages of T tokens; the middle of each goes from `start` to `end`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.tokenizers import Tokenizer
from model import AOGPT
from runtime.errors import UserError

SENTENCE_ENDS = (".", "!", "?")
AFTER_THEM = " \n\"')”’"  # what may stand between a sentence's end and the next one


@dataclass(frozen=True)
class Passages:
    tokens: Tensor
    """LongTensor (N, T)."""
    start: Tensor
    """LongTensor (N,), the first token of the middle."""
    end: Tensor
    """LongTensor (N,), the first one after it."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Passages:
        return Passages(self.tokens[rows], self.start[rows], self.end[rows])

    def known(self, both_sides: bool) -> Tensor:
        """BoolTensor (N, T): what stands before the middle and, if asked for, what after it."""
        positions = torch.arange(self.tokens.shape[1])
        before = positions < self.start[:, None]
        return before | (positions >= self.end[:, None]) if both_sides else before

    def middle(self, tokens: Tensor) -> list[list[int]]:
        """The middle of each row of tokens, (N, T)."""
        spans = zip(tokens.tolist(), self.start.tolist(), self.end.tolist(), strict=True)
        return [row[start:end] for row, start, end in spans]


def find_passages(blocks: Tensor, tokenizer: Tokenizer, shortest: int, longest: int) -> Passages:
    """Those of the blocks (N, T) that have a whole sentence of so many tokens; of several the one
    nearest to the middle."""
    ends_sentence: dict[int, bool] = {}
    rows, starts, ends = [], [], []
    for row, block in enumerate(blocks.tolist()):
        for token in set(block) - ends_sentence.keys():
            text = tokenizer.decode([token]).rstrip(AFTER_THEM)
            ends_sentence[token] = text.endswith(SENTENCE_ENDS)
        after = [i + 1 for i, token in enumerate(block) if ends_sentence[token]]
        spans = [
            (start, end)
            for start, end in zip(after, after[1:], strict=False)
            if shortest <= end - start <= longest
        ]
        if spans:
            start, end = min(spans, key=lambda span: abs(sum(span) - len(block)))
            rows.append(row)
            starts.append(start)
            ends.append(end)
    return Passages(blocks[rows], torch.tensor(starts).long(), torch.tensor(ends).long())


def find_last_words(
    tokens: Sequence[int], tokenizer: Tokenizer, count: int, length: int
) -> Passages:
    """The first `count` documents of two words or more in a row of tokens, of which the middle is
    the last word with the space before it (Paperno et al. 2016, LAMBADA).

    Of a longer document the last `length` tokens; shorter ones end with zeros, after the middle."""
    document: list[int] = []
    rows, starts, ends = [], [], []
    for token in map(int, tokens):
        if token != tokenizer.eot:
            document.append(token)
            continue
        kept, document = document[-length:], []
        if start := start_of_last_word(kept, tokenizer):
            rows.append(kept + [0] * (length - len(kept)))
            starts.append(start)
            ends.append(len(kept))
            if len(rows) == count:
                break
    return Passages(
        torch.tensor(rows).view(-1, length).long(),
        torch.tensor(starts).long(),
        torch.tensor(ends).long(),
    )


def start_of_last_word(document: list[int], tokenizer: Tokenizer) -> int:
    """The place of the last token from which on a document reads as white space and a word; 0
    where there is none."""
    for start in range(len(document) - 1, 0, -1):
        text = tokenizer.decode(document[start:])
        if text[:1].isspace() and text.strip():
            return start
    return 0


@torch.no_grad()
def middle_nll(model: AOGPT, passages: Passages, both_sides: bool) -> Tensor:
    """-log p of the middle, token after token, given what is known: (N,) float64, nats per token.

    With both sides the order is: what stands before, what stands after, then the middle from left
    to right. Raises ValueError where a model can continue a text only and both sides are asked for.
    """
    if model.config.l2r_only and both_sides:
        raise UserError("this model is not told its target and knows what stands before only")
    tokens, device = passages.tokens, model.wte.weight.device
    known, (N, T) = passages.known(both_sides), tokens.shape
    length, positions = passages.end - passages.start, torch.arange(T)
    if model.config.is_encoder:
        total = torch.zeros(N, dtype=torch.float64)
        for i in range(int(length.max())):  # a pass for the i-th token of every middle
            place = (passages.start + i)[:, None]
            masked = ~known & (positions >= place)
            log_probs = model.masked_log_probs(tokens.to(device), masked.to(device)).cpu().double()
            found = log_probs.gather(1, place.clamp(max=T - 1)).squeeze(1)
            total -= found.where(i < length, 0.0)
        return total / length
    # What is known first, then the middle, then what is neither: each from left to right.
    middle = ~known & (positions < passages.end[:, None])
    order = torch.where(known, 0, torch.where(middle, 1, 2)).argsort(dim=1, stable=True)
    log_probs = model.token_log_probs(tokens.to(device), order.to(device)).cpu().double()
    return -(log_probs * middle.gather(1, order)).sum(dim=1) / length


# ---- ROUGE ---------------------------------------------------------------------------------------


def rouge(text: str, reference: str) -> dict[str, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), from 0 to 1: of the words that two texts
    share, of their pairs of neighbours, and of their longest common subsequence. Words are runs of
    letters and digits, capital or small."""
    ours, theirs = (re.findall(r"\w+", t.lower()) for t in (text, reference))
    return {
        "rouge_1": _f1(_shared(ours, theirs, 1), len(ours), len(theirs)),
        "rouge_2": _f1(_shared(ours, theirs, 2), len(ours) - 1, len(theirs) - 1),
        "rouge_l": _f1(longest_common(ours, theirs), len(ours), len(theirs)),
    }


def _shared(a: list[str], b: list[str], n: int) -> int:
    """n-grams that both have, as often as both have them."""
    grams = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (a, b)]
    return sum((grams[0] & grams[1]).values())


def _f1(shared: int, ours: int, theirs: int) -> float:
    return 2 * shared / (ours + theirs) if shared else 0.0


def longest_common(a: Sequence, b: Sequence) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)  # of a so far and the first j of b
    for x in a:
        diagonal = 0
        for j, y in enumerate(b):
            above = lengths[j + 1]
            lengths[j + 1] = diagonal + 1 if x == y else max(above, lengths[j])
            diagonal = above
    return lengths[-1]
