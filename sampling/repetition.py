"""Against repetition: logits of a token choice that depend on what is in the sample already.

Shapes: B samples of T positions; N rows, each a position to draw; V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.token_choice import TokenChoice


def known_text(tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
    """Tokens by position (B, T), -1 where not known. tokens, order: (B, T + 1) by slot, the last of
    which is not used; known: (B,) slots."""
    tokens, order = tokens[:, :-1], order[:, :-1]
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.empty_like(tokens).scatter_(1, order, tokens.where(slots < known[:, None], -1))


def without_repeats(logits: Tensor, text: Tensor, position: Tensor, choice: TokenChoice) -> Tensor:
    """The logits (N, V) of `position` (N,), which is not known, in `text` (N, T), -1 where not
    known, with the choice's repetition penalty and ban of n-grams."""
    text, V = text.to(logits.device), logits.shape[1]
    if choice.repetition_penalty > 1:
        present = _marked(text.where(text >= 0, V), V)
        penalty = choice.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = penalised.where(present, logits)
    if choice.no_repeat_ngram is not None and choice.no_repeat_ngram <= text.shape[1]:
        banned = _completing(text, position.to(logits.device), choice.no_repeat_ngram, V)
        free = (~banned & (logits > -torch.inf)).any(dim=1, keepdim=True)
        logits = logits.masked_fill(banned & free, -torch.inf)
    return logits


def _completing(text: Tensor, position: Tensor, n: int, V: int) -> Tensor:
    """BoolTensor (N, V): the tokens that complete, at `position`, an n-gram that is in the text."""
    ngrams = F.pad(text, (n - 1, n - 1), value=-1).unfold(1, n, 1)  # (N, windows, n)
    known = ngrams >= 0
    banned = torch.zeros(len(text), V, dtype=torch.bool, device=text.device)
    row = torch.arange(len(text), device=text.device)
    for place in range(n):  # that the position has in the n-gram; all others must match
        window = ngrams[row, position - place + n - 1][:, None]
        match = (ngrams == window) & known
        match[..., place] = known[..., place]
        banned |= _marked(ngrams[..., place].where(match.all(dim=-1), V), V)
    return banned


def _marked(tokens: Tensor, V: int) -> Tensor:
    """BoolTensor (N, V): the ids among the tokens (N, any); V counts as none."""
    marked = torch.zeros(len(tokens), V + 1, dtype=torch.bool, device=tokens.device)
    return marked.scatter_(1, tokens, True)[:, :V]
