"""Prepared text as something to score: which rows, of how many tokens, and what tells it apart.

N rows of a set, B in a batch, T tokens in a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoints.load import Loaded
from data.loader import (
    TokenDataset,
    evaluation_split,
    find_dataset,
    frequency_losses,
    load_meta,
    read_tokens,
)
from data.tokenizers import get_tokenizer
from orders import Roles
from runtime.errors import UserError

NGRAM_TOKENS = 10_000_000  # of the training split: more do not change what they lose visibly


@dataclass(frozen=True)
class EvalSet:
    """A split of a prepared data set as rows to score: its blocks and then, where nothing may be
    dropped, a shorter row of the tokens after the last block."""

    name: str
    folder: Path
    split: str
    dataset: TokenDataset
    count: int
    """N, the rows."""

    def tokens(self, rows: range) -> Tensor:
        """(B, T); (1, less than T) for the row after the last block, which is asked for alone."""
        if rows.start == self.dataset.num_blocks:
            return self.dataset.tail()
        return self.dataset.blocks(list(rows))

    def roles(self, rows: range) -> Roles | None:
        """Of records, on the CPU; None of other text."""
        return Roles.of(self.dataset.roles(list(rows))) if self.dataset.of_records else None

    def lengths(self) -> Tensor:
        """(N,) tokens of every row."""
        if self.dataset.of_records:
            return self.roles(range(self.count)).lengths
        lengths = torch.full((self.count,), self.dataset.block_size)
        if self.count > self.dataset.num_blocks:
            lengths[-1] = self.dataset.tail().shape[1]
        return lengths

    @cached_property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token of the rows, of records per token that is predicted;
        end-of-text is a token of none. NaN where
        the tokenizer's file cannot be had, which scoring does not need."""
        try:
            lengths = get_tokenizer(self.dataset.meta["tokenizer"]).byte_lengths()
        except ValueError:
            return math.nan
        if roles := self.roles(range(self.count)):
            predicted = self.dataset.blocks(list(range(self.count)))[roles.predicted]
            return float(lengths[predicted.numpy()].mean())
        return float(lengths[self.text()].mean())

    def text(self) -> np.ndarray:
        """The tokens of the rows, but of records, one after the other."""
        return self.dataset.tokens[: int(self.lengths().sum())]

    def description(self) -> dict:
        """What a result must name for another to reproduce it: above all the file's checksum."""
        meta = self.dataset.meta
        known = {k: meta[k] for k in ("tokenizer", "protocol", "packing", "notes") if k in meta}
        place = {"split": self.split, "block_size": self.dataset.block_size}
        return known | place | meta["splits"][self.split]

    def frequencies(self) -> dict[str, float]:
        """What tables of frequencies of the training split lose on these rows, nats per token;
        nothing where there is no such split, and nothing of records: what is given and what fills
        their blocks up is not predicted."""
        meta = self.dataset.meta
        if self.dataset.of_records or "train" not in meta["splits"]:
            return {}
        counted = read_tokens(self.folder, "train")[:NGRAM_TOKENS]
        losses = frequency_losses(counted, self.text(), meta["vocab_size"])
        return dict(zip(("unigrams of train", "bigrams of train"), losses, strict=True))


def open_eval_set(
    name: str, split: str | None, loaded: Loaded, max_sequences: int | None = None
) -> EvalSet:
    """The prepared data set of this name, in blocks of the model.

    Raises ValueError where it is missing or damaged or is not for this model."""
    folder = find_dataset(name)
    meta = load_meta(folder)
    if meta["tokenizer"] != loaded.tokenizer:
        raise UserError(
            f"{folder} holds {meta['tokenizer']} tokens, but the model was trained on "
            f"{loaded.tokenizer} tokens; prepare the text again with --tokenizer {loaded.tokenizer}"
        )
    split = split or evaluation_split(meta)
    # Results name the checksum of the text, so it must be true: verify.
    dataset = TokenDataset(folder, split, loaded.model.config.block_size, verify=True)
    rows = dataset.num_blocks
    # The other protocol, sedd, drops what is left over, as published evaluations do. A rest of no
    # more than the tokens that the model cannot score holds nothing to count.
    if meta.get("protocol", "full") == "full" and dataset.tail().shape[1] > loaded.scored_from:
        rows += 1
    return EvalSet(Path(name).name, folder, split, dataset, min(rows, max_sequences or rows))
