"""Where documents come from: one `Corpus` class per kind of source, and the table of datasets.

A corpus yields *pieces*, pairs (text, end): a document is the texts up to and including the one with end=True.
Most documents are one piece; a big text file is many, cut where no tokenizer can tell, so that nothing ever has
to be held whole.

Which datasets there are, and what they are made of, is in catalogue.py.
"""

import codecs
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data.loader import sha256_file

PIECE_BYTES = 1 << 20
# what has no white space in so many bytes is not text, and would have to be held whole to be cut like GPT-2 cuts it
MAX_WORD_BYTES = 64 << 20
TEXT_SUFFIXES = (".txt", ".md")
PACKINGS = ("", ".gz", ".xz")

Piece = tuple[str, bool]


class Corpus:
    """Documents of one split. `position` of `total` (in `unit`s; total None where unknown) is the progress so far."""

    total: int | None = None
    unit = "documents"
    position = 0
    packages: tuple[str, ...] = ()  # whose versions the documents may depend on

    def pieces(self) -> Iterator[Piece]:
        """Yields (text, end) from the beginning; can be called again. Raises ValueError for what cannot be read."""
        raise NotImplementedError

    def describe(self) -> list[dict]:
        """What identifies the contents, for meta.json: equal descriptions mean equal documents."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What a user should know about the documents that have been read."""
        return []

    def count(self, limit: int) -> int:
        """Number of documents, counting no further than `limit`."""
        found = 0
        for _, end in self.pieces():
            found += end
            if found >= limit:
                break
        return found


# ---------------------------------------------------------------------------------------------------------------------
# local files


class TextFiles(Corpus):
    """.txt and .md files (one document each) and .jsonl files (one document a line), each also as .gz or .xz."""

    unit = "B"

    def __init__(self, paths: Iterable[Path], field: str):
        self.paths = [checked_file(path, _text_kind) for path in paths]
        self.field = field
        self.total = sum(path.stat().st_size for path in self.paths)

    def describe(self) -> list[dict]:
        return [describe_file(path) for path in self.paths]

    def count(self, limit: int) -> int:
        found = 0
        for path in self.paths:
            if found >= limit:
                break
            if _text_kind(path) != ".jsonl":
                found += 1  # known without reading what may be gigabytes
            else:
                found += Corpus.count(TextFiles([path], self.field), limit - found)
        return found

    def pieces(self) -> Iterator[Piece]:
        self.position = 0
        for path in self.paths:
            before = self.position
            read = _jsonl_pieces if _text_kind(path) == ".jsonl" else _text_pieces
            with _opened(path) as (raw, unpacked):
                for piece in read(path, unpacked, self.field):
                    self.position = before + raw.tell()
                    yield piece
            self.position = before + path.stat().st_size


class LineFiles(Corpus):
    """Text files, each also as .gz or .xz, of which every line is a document; its end belongs to it."""

    unit = "B"

    def __init__(self, paths: Iterable[Path]):
        self.paths = list(paths)
        self.total = sum(path.stat().st_size for path in self.paths)

    def describe(self) -> list[dict]:
        return [describe_file(path) for path in self.paths]

    def pieces(self) -> Iterator[Piece]:
        self.position = 0
        for path in self.paths:
            before = self.position
            with _opened(path) as (raw, unpacked):
                for line in _lines(path, unpacked):
                    self.position = before + raw.tell()
                    yield line, True
            self.position = before + path.stat().st_size


def _lines(path: Path, stream) -> Iterator[str]:
    number, lines = 0, io.TextIOWrapper(stream, encoding="utf-8-sig")
    try:
        while line := lines.readline(MAX_WORD_BYTES):
            number += 1
            if "\0" in line or len(line) == MAX_WORD_BYTES:
                raise ValueError(
                    f"{path}, line {number}: this is not text, a line a document; is it the right file?"
                )
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 ({error.reason}, not far after line {number}); is it text?"
        ) from error
    if number == 0:
        raise ValueError(f"{path} is empty; leave it out")


def _text_kind(path: Path) -> str:
    """.txt, .md or .jsonl, without a packing suffix; ValueError for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in (*TEXT_SUFFIXES, ".jsonl"):
        raise ValueError(
            f"{path}: unknown kind of file; known are .txt, .md and .jsonl, each also followed by .gz or .xz"
        )
    return suffixes[-1]


def checked_file(path: Path, check: Callable[[Path], object]) -> Path:
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; pass the files in it, e.g. {path}/*.txt")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    check(path)
    return path


def describe_file(path: Path) -> dict:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


@contextlib.contextmanager
def _opened(path: Path):
    """(raw, unpacked) binary streams of a file; errors of the packing become ValueErrors that name the file."""
    import gzip
    import lzma
    import zlib

    packing = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower())
    try:
        with (
            open(path, "rb") as raw,
            packing(raw) if packing else contextlib.nullcontext(raw) as unpacked,
        ):
            yield raw, unpacked
    except EOFError as error:
        raise ValueError(
            f"{path}: the compressed file ends too early; it is incomplete, get it again"
        ) from error
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: damaged, or not a {path.suffix} file ({error})") from error


def _text_pieces(path: Path, stream, field: str) -> Iterator[Piece]:
    """One document of about PIECE_BYTES a piece; the same ids for the pieces as for the whole file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, offset = "", 0
    while chunk := stream.read(PIECE_BYTES):
        offset += len(chunk)
        held += _decoded(decoder, chunk, path, offset)
        cut = safe_cut(held)
        if cut:
            yield held[:cut], False
            held = held[cut:]
        elif len(held) > MAX_WORD_BYTES:
            raise ValueError(
                f"{path}: {len(held):,} characters without a place to cut them (a character followed by "
                "a space or a newline); this is not text as tokenizers know it"
            )
    held += _decoded(decoder, b"", path, offset, final=True)
    if offset == 0:
        raise ValueError(f"{path} is empty; leave it out")
    yield held, True


def _decoded(decoder, chunk: bytes, path: Path, offset: int, final: bool = False) -> str:
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        where = (
            offset - len(error.object) + error.start
        )  # error.object begins with what the decoder held back
        raise ValueError(
            f"{path}: not UTF-8 ({error.reason} at byte {where:,}); convert it first, e.g. iconv -f latin1 -t utf-8"
        ) from error


def safe_cut(text: str, before: int | None = None) -> int:
    """The last place (at most `before`) where GPT-2's ids of both sides are those of the whole; 0 where there is none.

    It is between a character that is no white space and a newline (or else a carriage return, or a space). GPT-2
    splits text into words first, and no word goes on from a character that is no white space into white space;
    the rules that look ahead look from white space only, so the left part, which ends in none, is split the same.
    """
    end = len(text) if before is None else min(before + 1, len(text))
    for space in "\n\r ":
        place = text.rfind(space, 0, end)
        while place > 0:
            if not text[place - 1].isspace():
                return place
            place = text.rfind(space, 0, place)
    return 0


def _jsonl_pieces(path: Path, stream, field: str) -> Iterator[Piece]:
    found = False
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            found = True
            yield _json_text(line, field, f"{path}, line {number}"), True
    if not found:
        raise ValueError(f"{path} holds no documents; leave it out")


def _json_text(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object is needed, got {type(record).__name__}")
    return _field(record, field, where)


def _field(record: dict, field: str, where: str) -> str:
    if field not in record:
        raise ValueError(
            f"{where}: no field {field!r}; its fields are {', '.join(map(repr, record)) or '(none)'}; "
            "choose one with --field"
        )
    if not isinstance(record[field], str):
        raise ValueError(
            f"{where}: the field {field!r} holds {type(record[field]).__name__}, not a string; "
            "choose another with --field, or mend the file"
        )
    return record[field]


# ---------------------------------------------------------------------------------------------------------------------
# the English that comes with Python


class PythonDocs(Corpus):
    """The topics of pydoc's help(), one document each, then the docstrings of the standard library, a document a
    module. About 2 MB; differs between Python versions, not between machines with the same one."""

    MIN_CHARACTERS = 200  # modules with one line of documentation are all alike
    LEFT_OUT = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "__pycache__",
    }

    def describe(self) -> list[dict]:
        return [{"documentation": "Python " + ".".join(map(str, sys.version_info[:3]))}]

    def pieces(self) -> Iterator[Piece]:
        import sysconfig

        root = Path(sysconfig.get_path("stdlib"))
        modules = [
            path
            for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts)
            if self.LEFT_OUT.isdisjoint(path.relative_to(root).parts)
        ]
        topics = self._topics()
        self.total, self.position = len(topics) + len(modules), 0
        for name in sorted(topics):
            self.position += 1
            yield topics[name], True
        for path in modules:
            self.position += 1
            text = _docstrings(path)
            if len(text) >= self.MIN_CHARACTERS:
                yield text, True

    def _topics(self) -> dict[str, str]:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise ValueError(
                "this Python comes without its documentation (pydoc_data); use another Python, or "
                "text of your own: python data/prepare.py text --source FILE"
            ) from error
        return topics


def _docstrings(path: Path) -> str:
    """The docstrings of a module, its classes and functions, in the order of the file, empty lines between them."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
    ):  # templates and files for other versions, which some distributions ship
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "".join(text + "\n\n" for node in nodes if (text := ast.get_docstring(node)))


# ---------------------------------------------------------------------------------------------------------------------
# from the network


class PublishedFile(Corpus):
    """The file that `fetch` writes to a path, read as the corpus that `read` makes of it; kept no longer than that."""

    unit = "B"

    def __init__(self, fetch: Callable[[Path], None], read: Callable[[Path], Corpus], url: str):
        self.fetch, self.read, self.url = fetch, read, url

    def describe(self) -> list[dict]:
        return [{"url": self.url}]

    def pieces(self) -> Iterator[Piece]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self.url.rpartition("/")[2]
            self.fetch(path)
            corpus = self.read(path)
            self.total = corpus.total
            for piece in corpus.pieces():
                self.position = corpus.position
                yield piece


def fetch(url: str, path: Path) -> None:
    """Downloads a file; whatever can go wrong there is raised as it comes."""
    import shutil
    import urllib.request

    with urllib.request.urlopen(url, timeout=60) as response, open(path, "wb") as file:
        shutil.copyfileobj(response, file)


class HubRows(Corpus):
    """Rows of a dataset that `open_rows()` loads through the package `datasets`, a document a row.

    `name` is for messages; fewer rows than `expected` are an error, where they can be counted beforehand.
    """

    packages = ("datasets",)

    def __init__(
        self,
        open_rows: Callable[[], Iterable[dict]],
        description: list[dict],
        field: str,
        name: str,
        expected: int | None = None,
    ):
        self.open_rows, self.description, self.field = open_rows, description, field
        self.name, self.expected = name, expected
        self._rows: Iterable[dict] | None = None

    def describe(self) -> list[dict]:
        return self.description

    def pieces(self) -> Iterator[Piece]:
        if self._rows is None:
            self._rows = self.open_rows()
            self.total = len(self._rows) if hasattr(self._rows, "__len__") else None
            if self.total is not None and self.expected is not None:
                check_complete(self.name, self.total, self.expected)
        self.position = 0
        rows = iter(self._rows)
        while (row := self._next(rows)) is not None:
            self.position += 1
            yield _field(row, self.field, f"{self.name}, row {self.position}"), True
        if self.position == 0:
            raise ValueError(f"{self.name} holds no documents")

    def _next(self, rows: Iterator[dict]) -> dict | None:
        try:
            return next(rows, None)
        except (
            Exception
        ) as error:  # whatever pyarrow, json or the network raise: rows are read as they are needed
            raise ValueError(
                f"reading {self.name} through the package datasets failed after row {self.position} ({cause(error)})"
            ) from error


def check_complete(name: str, found: int, expected: int) -> None:
    """Raises ValueError where fewer documents were downloaded than there should be."""
    if found < expected:
        raise ValueError(
            f"{name}: {found:,} of {expected:,} documents were served (the hub's converted copies can be partial); "
            "download the files and pass them with --source"
        )


def hub_rows(repository: str, config: str | None, split: str, streaming: bool) -> Iterable[dict]:
    """Rows of a split of a dataset on the Hugging Face hub; whatever can go wrong there is raised as it comes."""
    load = datasets_package().load_dataset
    try:
        return load(repository, config, split=split, streaming=streaming)
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        # `datasets` 4 runs no loading scripts; where the repository still holds one, the hub keeps a converted copy,
        # in folders CONFIG/SPLIT or, where it is not complete, CONFIG/partial-SPLIT
        files = {split: f"{config or '*'}/*{split}/*.parquet"}
        revision = "refs/convert/parquet"
        return load(
            repository, data_files=files, split=split, revision=revision, streaming=streaming
        )


def local_rows(paths: list[Path]) -> Iterable[dict]:
    datasets = datasets_package()
    kind = "parquet" if paths[0].suffix.lower() == ".parquet" else "json"
    try:
        if kind == "parquet":
            from pyarrow.parquet import read_metadata

            paths = [
                path for path in paths if read_metadata(path).num_rows
            ]  # `datasets` stumbles over those of no rows
            if not paths:
                return []
        # streaming: the files are here already, an Arrow copy of them would only take space
        return datasets.load_dataset(
            kind, data_files=[str(path) for path in paths], split="train", streaming=True
        )
    except Exception as error:
        raise ValueError(
            f"the package datasets could not read {', '.join(map(str, paths))} ({cause(error)})"
        ) from error


def datasets_package():
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "downloads and .parquet files need the package datasets: pip install datasets, or pass local files of "
            "another kind with --source FILE"
        ) from error
    return datasets


def cause(error: BaseException) -> str:
    """The first line of the innermost error, which is the one that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
