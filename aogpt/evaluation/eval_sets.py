"""Texts to score: N rows of a set, B in a batch, T tokens in a block."""

import contextlib
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..checkpoints import Loaded
from ..data import loader
from ..data.loader import TokenDataset
from ..data.tokenizers import HUB, HubTokenizer, get_tokenizer, other_tokenizer
from ..orders import Roles
from ..runtime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SplitOption:
    """The option of scripts that score a prepared data set."""

    split: str | None = None
    """Split to score; by default that of the evaluation set, the only one, or val."""


@dataclass(frozen=True)
class EvalSet:
    """A split of a data set as rows to score: its blocks, or some of them spread over
    the split. Where nothing may be dropped, a shorter row of the tokens that are left
    follows after all blocks."""

    name: str
    dataset: TokenDataset
    count: int  # N, the rows

    def tokens(self, rows: range) -> Tensor:
        """Return the tokens of these rows, LongTensor (B, T)."""
        if rows.start == self.dataset.num_blocks:  # the last row, which goes alone
            return self.dataset.tail()
        return self.dataset.blocks(self._chosen[rows])

    def of_one_length(self, rows: range) -> range:
        """Return the first of these rows that all have one length."""
        blocks = self.dataset.num_blocks
        if rows.start < blocks < rows.stop:  # the row after the blocks is shorter
            return range(rows.start, blocks)
        return rows

    def roles(self, rows: range) -> Roles | None:
        """Return the predicted tokens and the prompts of these rows; None for text
        without prompts."""
        if not self.dataset.of_records:
            return None
        return Roles.of(self.dataset.roles(self._chosen[rows]))

    @cached_property
    def _chosen(self) -> np.ndarray:
        """Return the numbers of the blocks of the rows, (N,)."""
        return loader.spread(self.count, self.dataset.num_blocks)

    @cached_property
    def lengths(self) -> Tensor:
        """Return the number of tokens of every row, (N,)."""
        roles = self.roles(range(self.count))
        if roles is not None:
            return roles.lengths
        lengths = torch.full((self.count,), self.dataset.block_size)
        if self.count > self.dataset.num_blocks:
            lengths[-1] = self.dataset.tail().shape[1]
        return lengths

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """Return the number of tokens of every row up to the last one of its prompt,
        (N,); 0 without a prompt."""
        roles = self.roles(range(self.count))
        if roles is None:
            return torch.zeros(self.count, dtype=torch.long)
        prompt = roles.given
        if roles.end is not None:
            prompt = prompt & ~roles.end
        return (prompt * torch.arange(1, prompt.shape[1] + 1)).amax(dim=1)

    @cached_property
    def _places(self) -> np.ndarray:
        """Return the place in the split of the first token of every row, (N,)."""
        # After all blocks, where there is one more row, that of the tail.
        rows = np.append(self._chosen, self.dataset.num_blocks)
        return rows[: self.count] * self.dataset.block_size

    @cached_property
    def documents(self) -> Tensor:
        """Return the number of the document that holds the middle of every row,
        (N,)."""
        meta = self.dataset.meta
        if meta.get("protocol") == "records":
            return torch.arange(self.count)
        ends = np.flatnonzero(self.dataset.tokens == meta["eot"])
        middles = self._places + self.lengths.numpy() // 2
        return torch.from_numpy(np.searchsorted(ends, middles))

    def mean_bytes(self, first: int) -> float | None:
        """Return the mean UTF-8 bytes of text per token that is predicted, from token
        `first` of every row on, or of its end where it has a prompt; end-of-text has
        none. None without the tokenizer."""
        dataset = self.dataset
        tokenizer = dataset.tokenizer
        if tokenizer is None:
            return None
        begins = (self._places == 0) | (
            dataset.tokens[self._places - 1] == tokenizer.eot
        )
        begins |= dataset.meta.get("protocol") == "records"
        size = 0
        number = 0
        for row, begins_document in enumerate(begins):
            rows = range(row, row + 1)
            tokens = self.tokens(rows)[0].numpy()
            scored = np.arange(len(tokens)) >= first
            roles = self.roles(rows)
            if roles is not None:
                has_prompt = bool(roles.given.any())
                scored = roles.predicted[0].numpy() & (scored | has_prompt)
            counts = tokenizer.count_bytes(tokens, starts=begins_document)
            size += int(counts[scored].sum())
            number += int(scored.sum())
        entry = dataset.meta["splits"][dataset.split]
        text_share = 1.0  # bytes of the text for each byte of its tokens
        if entry.get("token_bytes"):
            text_share = entry["text_bytes"] / entry["token_bytes"]
        return size / number * text_share

    def description(self) -> dict:
        """Return the properties of the data that make a result reproducible, such as
        the file's checksum."""
        meta = self.dataset.meta
        description = {}
        for key in ("tokenizer", "protocol", "packing", "notes"):
            if key in meta:
                description[key] = meta[key]
        description["split"] = self.dataset.split
        description["block_size"] = self.dataset.block_size
        description.update(meta["splits"][self.dataset.split])
        return description


def comparable(models: list[Loaded]) -> list[Loaded]:
    """Return the models, set to score the same tokens. Raises UserError for other
    tokenizers."""
    if other_tokenizer(vars(models[0]), vars(models[-1])):
        tokenizers = [f"{model.path} has {model.tokenizer} tokens" for model in models]
        raise UserError(
            f"{' and '.join(tokenizers)}, of another vocabulary: compare models of one "
            "tokenizer"
        )
    if (models[0].record_end is None) != (models[-1].record_end is None):
        raise UserError(
            "of these models one knows the end of a record (data.end = 'given') and "
            "one predicts it: score each alone, and compare nats a record"
        )
    scored_from = max(model.scored_from for model in models)
    return [replace(model, scored_from=scored_from) for model in models]


def open_split(
    name: str,
    split: str | None,
    preferred_split: str | None = None,
    verify: bool = True,
) -> TokenDataset:
    """Return a split of the prepared data set of this name with its tokenizer, not yet
    in blocks. verify: compare the checksum, which results name. Raises UserError or
    OSError where it is missing or damaged."""
    folder = loader.find_dataset(name)
    meta = loader.load_meta(folder)
    if not split and preferred_split in meta["splits"]:
        split = preferred_split
    split = split or loader.evaluation_split(meta)
    dataset = TokenDataset(folder, split, None, verify=verify)
    # Scoring does without: where the file is missing, bits per byte are unknown.
    with contextlib.suppress(UserError, OSError):
        dataset.tokenizer = get_tokenizer(meta["tokenizer"], folder=folder)
    return dataset


def open_eval_set(
    dataset: TokenDataset,
    loaded: Loaded,
    max_sequences: int | None = None,
    block_size: int | None = None,
) -> EvalSet:
    """Return an `open_split` in blocks of the model, or of `block_size`.
    Raises UserError where it is not for this model, its vocabulary has changed, or no
    token of it can be scored."""
    meta = dataset.meta
    if other_tokenizer(vars(loaded), meta):
        theirs = f"{loaded.tokenizer} tokens"
        if meta["tokenizer"] == loaded.tokenizer:
            theirs += " of another vocabulary"
        raise UserError(
            f"{dataset.folder} holds {meta['tokenizer']} tokens, but the model was "
            f"trained on {theirs}; prepare the text with the model's --tokenizer"
        )
    if dataset.tokenizer is not None:
        dataset.tokenizer.check(meta.get("tokenizer_sha256"))
    note_on_end(dataset, loaded)  # raises UserError for a run that knows another end
    dataset.divide(block_size or loaded.model.config.block_size)
    if loaded.record_end is not None:
        dataset.give_end()
    rows = dataset.num_blocks
    # The protocol sedd drops the rest after all blocks, as published evaluations do.
    if meta.get("protocol", "full") == "full":
        if dataset.tail().shape[1] > loaded.scored_from:
            rows += 1
    if rows == 0:
        raise UserError(
            f"{dataset.folder} has {len(dataset.tokens)} tokens, of which none can be "
            "scored: give a longer text"
        )
    count = min(rows, max_sequences or rows)
    return EvalSet(dataset.folder.name, dataset, count)


def note_on_end(dataset: TokenDataset, loaded: Loaded) -> str | None:
    """Return a note if documents of a data set end with another id than a model's
    tokenizer says; None where it is the same or not known. Raises UserError for a model
    trained here, which has learned its own."""
    if Path(loaded.tokenizer).name != HUB:
        return None  # of all other tokenizers the vocabulary says it
    try:
        tokenizer = cast(HubTokenizer, loaded.get_tokenizer())
    except (UserError, OSError):  # its file is missing: scoring does without
        return None
    end = dataset.meta["eot"]
    if end == tokenizer.eot:
        return None
    difference = (
        f"documents of {dataset.folder} end with id {end}, those of the model with "
        f"{tokenizer.end_token} (id {tokenizer.eot})"
    )
    if loaded.system is None:
        raise UserError(
            f"{difference}: prepare the text with --end-token "
            f"{shlex.quote(tokenizer.end_token)}"
        )
    return difference


@dataclass(frozen=True)
class Questions:
    """The rows of a data set with prompts, as a model reads them."""

    name: str
    dataset: str | None  # its name for the command that prepared it
    tokens: Tensor  # LongTensor (N, T)
    roles: Roles
    note: str | None  # on its end-of-text


def open_questions(
    name: str, split: str | None, loaded: Loaded, limit: int | None = None
) -> Questions:
    """Return the rows of a prepared data set, or `limit` of them, spread over the
    split. split: by default test, where there is one. Raises UserError for a set
    without prompts."""
    dataset = open_split(name, split, preferred_split="test", verify=False)
    eval_set = open_eval_set(dataset, loaded, limit)
    rows = range(eval_set.count)
    roles = eval_set.roles(rows)
    if roles is None:
        raise UserError(
            f"{dataset.folder} holds text without prompts; make some with: "
            "python data/prepare.py records --source FILE.jsonl"
        )
    return Questions(
        name=eval_set.name,
        dataset=dataset.meta.get("settings", {}).get("dataset"),
        tokens=eval_set.tokens(rows),
        roles=roles,
        note=note_on_end(dataset, loaded),
    )
