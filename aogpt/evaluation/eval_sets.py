"""Texts to score: N rows of a set, B in a batch, T tokens in a block."""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoints import Loaded
from ..data import loader
from ..data.loader import TokenDataset
from ..data.tokenizers import get_tokenizer, other_tokenizer
from ..orders import Roles
from ..runtime.errors import UserError
from ..runtime.files import sha256_file
from ..runtime.validation import expand_home


class TextRow(NamedTuple):
    """A block of a text, n tokens."""

    tokens: np.ndarray  # (n,)
    bytes: np.ndarray  # (n,) of the text, that each token stands for
    document: int  # number of the text


class TextDataset(TokenDataset):
    """Texts in memory, without end-of-text. Each is cut into blocks of its own, of which the last
    may be shorter; a model that scores from token `scored_from` on leaves out what is shorter."""

    def __init__(
        self,
        texts: list[str],
        loaded: Loaded,
        block_size: int,
    ):
        tokenizer = loaded.get_tokenizer()
        ids = [tokenizer.encode_array(text) for text in texts]
        rows = []
        for document, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
            counts = tokenizer.text_bytes_of(text, tokens)
            for start in range(0, len(tokens), block_size):
                part = slice(start, start + block_size)
                rows.append(TextRow(tokens[part], counts[part], document))
        rows = [row for row in rows if len(row.tokens) > loaded.scored_from]
        # Rows of one length are scored together, the longest first.
        self.rows = sorted(rows, key=lambda row: -len(row.tokens))
        self.tokens = np.concatenate(ids)
        self.of_records = False
        self._opened = {}
        self.block_size = block_size
        self.num_blocks = len(self.rows)
        sha256 = hashlib.sha256(self.tokens.tobytes()).hexdigest()
        self.meta = {"tokenizer": loaded.tokenizer, "eot": tokenizer.eot}
        self.meta["splits"] = {"text": {"tokens": len(self.tokens), "sha256": sha256}}


@dataclass(frozen=True)
class EvalSet:
    """A split of a data set as rows to score: its blocks, or some spread over the split, and after
    all blocks, where nothing may be dropped, a shorter row of the tokens that are left."""

    name: str
    folder: (
        Path  # of the data, or of the model's file: where the tokenizer's is looked for
    )
    split: str
    dataset: TokenDataset
    count: int  # N, the rows

    def tokens(self, rows: range) -> Tensor:  # (B, T)
        if rows.start == self.dataset.num_blocks:  # the last row, which goes alone
            return self.dataset.tail()
        return self.dataset.blocks(self._chosen[rows])

    def batch(self, rows: range) -> range:
        """Return the first of these rows that all have one length."""
        blocks = self.dataset.num_blocks
        if rows.start < blocks < rows.stop:  # the row after the blocks is shorter
            return range(rows.start, blocks)
        return rows

    def roles(self, rows: range) -> Roles | None:  # None for text without prompts
        of = self.dataset
        return Roles.of(of.roles(self._chosen[rows])) if of.of_records else None

    @cached_property
    def _chosen(self) -> np.ndarray:  # the numbers of the blocks
        return loader.spread(self.count, self.dataset.num_blocks)

    @cached_property
    def lengths(self) -> Tensor:  # (N,) tokens of every row
        if roles := self.roles(range(self.count)):
            return roles.lengths
        lengths = torch.full((self.count,), self.dataset.block_size)
        if self.count > self.dataset.num_blocks:
            lengths[-1] = self.dataset.tail().shape[1]
        return lengths

    @cached_property
    def documents(self) -> Tensor:
        """(N,) number of the document that the middle of every row is in."""
        if self.dataset.meta.get("protocol") == "records":
            return torch.arange(self.count)
        rows = np.append(self._chosen, self.dataset.num_blocks)[
            : self.count
        ]  # or the tail's
        middles = rows * self.dataset.block_size + self.lengths.numpy() // 2
        ends = np.flatnonzero(self.dataset.tokens == self.dataset.meta["eot"])
        return torch.from_numpy(np.searchsorted(ends, middles))

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token that is predicted, as `mean_bytes`."""
        return self.mean_bytes(0)

    def mean_bytes(self, first: int) -> float:
        """Return the mean UTF-8 bytes of text per token that is predicted, from token `first` of
        every row on, or of its end where it has a prompt; end-of-text has none. NaN where the
        tokenizer's file is missing, which scoring does not need."""
        try:
            tokenizer = get_tokenizer(
                self.dataset.meta["tokenizer"], folder=self.folder
            )
        except ValueError:
            return math.nan
        tokenizer.check(self.dataset.meta.get("tokenizer_sha256"))
        rows = range(self.count)
        roles = self.roles(rows)
        if roles or self.count < self.dataset.num_blocks:
            starts = self._begin_documents(tokenizer.eot)
            tokens = self.tokens(rows).numpy()
            counts = np.stack(list(map(tokenizer.count_bytes, tokens, starts)))
            scored = np.ones(counts.shape, bool)
            scored[:, :first] = False
            if roles:
                has_prompt = roles.given.any(dim=1).numpy()
                scored = roles.predicted.numpy() & (scored | has_prompt[:, None])
        else:
            tokens = self.dataset.tokens[: int(self.lengths.sum())]
            counts = tokenizer.count_bytes(tokens)
            scored = np.arange(len(tokens)) % self.dataset.block_size >= first
        entry = self.dataset.meta["splits"][self.split]
        lost = 1.0  # bytes of the text for each byte of its tokens
        if entry.get("token_bytes"):
            lost = entry["text_bytes"] / entry["token_bytes"]
        return float(counts[scored].mean()) * lost

    def _begin_documents(self, eot: int) -> np.ndarray:
        """Whether the first token of each chosen block begins a document, bool (N,)."""
        if self.dataset.meta.get("protocol") == "records":
            return np.ones(self.count, bool)
        places = self._chosen * self.dataset.block_size
        return (places == 0) | (self.dataset.tokens[places - 1] == eot)

    def description(self) -> dict:
        """What a result names so that it can be reproduced: above all the file's checksum."""
        meta = self.dataset.meta
        known = {
            k: meta[k]
            for k in ("tokenizer", "protocol", "packing", "notes")
            if k in meta
        }
        place = {"split": self.split, "block_size": self.dataset.block_size}
        entry = meta["splits"][self.split]
        sha256 = entry["sha256"] or sha256_file(
            self.folder / entry["file"]
        )  # nanoGPT has none
        return known | place | entry | {"sha256": sha256}


@dataclass(frozen=True)
class TextEvalSet(EvalSet):
    """Texts in memory, or some of their blocks. Each text is a document."""

    dataset: TextDataset

    @cached_property
    def chosen(self) -> list[TextRow]:
        return [self.dataset.rows[i] for i in self._chosen]

    def tokens(self, rows: range) -> Tensor:
        tokens = [row.tokens for row in self.chosen[rows.start : rows.stop]]
        return torch.from_numpy(np.stack(tokens).astype(np.int64))

    def batch(self, rows: range) -> range:
        length = self.lengths[rows.start]
        others = (self.lengths[rows.start : rows.stop] != length).nonzero()
        if len(others):
            return rows[: int(others[0])]
        return rows

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor([len(row.tokens) for row in self.chosen])

    @cached_property
    def documents(self) -> Tensor:
        return torch.tensor([row.document for row in self.chosen])

    def mean_bytes(self, first: int) -> float:
        counts = [row.bytes[first:] for row in self.chosen]
        return float(np.concatenate(counts).mean())


def comparable(models: list[Loaded]) -> list[Loaded]:
    """The models, set to score the same tokens. Raises UserError for other tokenizers."""
    if other_tokenizer(vars(models[0]), vars(models[-1])):
        found = " and ".join(
            f"{model.path} has {model.tokenizer} tokens" for model in models
        )
        raise UserError(
            f"{found}, of another vocabulary: compare models of one tokenizer"
        )
    return [replace(m, scored_from=max(m.scored_from for m in models)) for m in models]


def open_eval_set(
    name: str,
    split: str | None,
    loaded: Loaded,
    max_sequences: int | None = None,
    preferred_split: str | None = None,
    verify: bool = True,
    block_size: int | None = None,
) -> EvalSet:
    """The prepared data set of this name, in blocks of the model, or of `block_size`. verify:
    compare the checksum, which results name. Raises UserError or OSError where it is missing,
    damaged or not for this model."""
    folder = loader.find_dataset(name)
    meta = loader.load_meta(folder)
    if other_tokenizer(vars(loaded), meta):
        other = ""
        if meta["tokenizer"] == loaded.tokenizer:
            other = " of another vocabulary"
        ours = f"but the model was trained on {loaded.tokenizer} tokens{other}"
        advice = "prepare the text with the model's --tokenizer"
        raise UserError(f"{folder} holds {meta['tokenizer']} tokens, {ours}; {advice}")
    preferred = preferred_split if preferred_split in meta["splits"] else None
    split = split or preferred or loader.evaluation_split(meta)
    block_size = block_size or loaded.model.config.block_size
    dataset = TokenDataset(folder, split, block_size, verify=verify)
    return _eval_set(Path(name).name, folder, split, dataset, loaded, max_sequences)


def open_texts(
    name: str,
    texts: list[str],
    loaded: Loaded,
    max_sequences: int | None,
    block_size: int,
) -> EvalSet:
    """Texts that are not prepared, each a document. Raises UserError where no token of one can be
    scored."""
    dataset = TextDataset(texts, loaded, block_size)
    scored = {row.document for row in dataset.rows}
    for number, text in enumerate(texts):
        if number not in scored:
            place = name
            if len(texts) > 1:
                place = f"text {number + 1} of {name}, {text[:40]!r},"
            count = len(loaded.get_tokenizer().encode(text))
            raise UserError(
                f"{place} has {count} tokens, of which none can be scored: give a longer text"
            )
    count = min(dataset.num_blocks, max_sequences or dataset.num_blocks)
    return TextEvalSet(name, Path(loaded.path), "text", dataset, count)


def _eval_set(
    name,
    folder,
    split,
    dataset,
    loaded,
    max_sequences,
) -> EvalSet:
    rows = dataset.num_blocks
    # The protocol sedd drops what is left over, as published evaluations do.
    whole = dataset.meta.get("protocol", "full") == "full"
    rows += whole and dataset.tail().shape[1] > loaded.scored_from
    return EvalSet(name, folder, split, dataset, min(rows, max_sequences or rows))


def read_text(path: str) -> str:
    """A text file or standard input, with line ends of Unix."""
    try:
        return expand_home(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise UserError(f"{path}: this is not UTF-8; save the file as UTF-8") from None
