"""Where documents come from: a `Corpus` class for each kind of source, a reader for each of file.

A corpus yields *pieces*, pairs (text, end): a document is the texts up to and including the one
with end=True. Most documents are one piece; a big text file is many, cut where no tokenizer can
tell, so that nothing ever has to be held whole.

Which datasets there are, and what they are made of, is in catalogue.py.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from runtime.errors import UserError
from runtime.files import json_object, lines_of, sha256_file

PIECE_BYTES = 1 << 20
# What has no white space in so many bytes is not text, and would have to be held whole to be cut
# where GPT-2 cuts it.
MAX_WORD_BYTES = 64 << 20
COMPRESSIONS = (".gz", ".xz")
COMPRESSED_BYTES = 1 << 16
XZ_MEMORY = 256 << 20  # a file can ask for up to 4 GB; what xz -9 writes needs 65 MB
XZ_PADDING = 4096  # bytes: a page of zeros is what a crash leaves of a stream

Piece = tuple[str, bool]
# (stream, its name for messages, the field of a row that holds the text) -> pieces
Reader = Callable[[BinaryIO, str, str], Iterator[Piece]]
Result = TypeVar("Result")

NO_DATASETS = (
    "downloads from the Hugging Face hub need the package datasets: "
    "pip install datasets, or pass local files with --source FILE"
)


class Corpus:
    """Documents of one split.

    Attributes: `position` of `total`, in `unit`s, is the progress so far (total is None where it is
    not known); `packages` are those whose versions the documents may depend on.
    """

    total: int | None = None
    unit = "documents"
    position = 0
    packages: tuple[str, ...] = ()

    def pieces(self) -> Iterator[Piece]:
        """Yields (text, end) from the beginning; can be called again.

        Raises ValueError for what cannot be read."""
        raise NotImplementedError  # every corpus has its own

    def describe(self) -> list[dict]:
        """What identifies the contents, for meta.json: equal descriptions mean equal documents."""
        raise NotImplementedError  # every corpus has its own

    def notes(self) -> list[str]:
        """What a user should know about the documents that have been read."""
        return []

    def count(self, limit: int) -> int:
        """Number of documents, counting no further than `limit`."""
        return _count(self.pieces(), limit)


def _count(pieces: Iterable[Piece], limit: int) -> int:
    found = 0
    for _, end in pieces:
        found += end
        if found >= limit:
            break
    return found


# ---- local files ---------------------------------------------------------------------------------


class LocalFiles(Corpus):
    """The documents of some files, file after file.

    `readers` says how files of each suffix are read, such as TEXT_FILES; all but .parquet can also
    be compressed. `field` holds the text in files of rows. Raises ValueError for a file of another
    kind, FileNotFoundError for one that is not there.
    """

    unit = "B"

    def __init__(self, paths: Iterable[Path], readers: dict[str, Reader], field: str):
        self.paths = list(paths)
        for path in self.paths:
            if path.is_dir():
                raise UserError(f"{path} is a folder; pass the files in it, e.g. {path}/*.txt")
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file")
        self.readers = [find_reader(path.name, readers, str(path)) for path in self.paths]
        self.field = field
        self.total = sum(path.stat().st_size for path in self.paths)
        if read_parquet in self.readers:
            self.packages = ("pyarrow",)

    def describe(self) -> list[dict]:
        return [
            {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in self.paths
        ]

    def count(self, limit: int) -> int:
        found = 0
        for path, reader in zip(self.paths, self.readers, strict=True):
            if found >= limit:
                break
            if reader is read_whole:
                found += 1  # known without reading what may be gigabytes
            else:
                found += _count(self._pieces_of(path, reader), limit - found)
        return found

    def pieces(self) -> Iterator[Piece]:
        self.position = 0
        for path, reader in zip(self.paths, self.readers, strict=True):
            yield from self._pieces_of(path, reader)

    def _pieces_of(self, path: Path, reader: Reader) -> Iterator[Piece]:
        before = self.position
        with _opened(path) as (raw, unpacked):
            for piece in not_empty(reader(unpacked, str(path), self.field), str(path)):
                self.position = before + raw.tell()  # in bytes of the compressed file
                yield piece
        self.position = before + path.stat().st_size


def find_reader(file: str, readers: dict[str, Reader], name: str) -> Reader:
    """The reader for a file of this name. A suffix that ends in "-" stands for all that begin so.

    Raises ValueError, which calls the file `name`, if there is none."""
    suffixes = [suffix.lower() for suffix in Path(file).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    for suffix, reader in readers.items():
        if suffixes and (
            suffixes[-1] == suffix or (suffix[-1] == "-" and suffixes[-1].startswith(suffix))
        ):
            return reader
    raise UserError(
        f"{name}: unknown kind of file; known here are {', '.join(readers)} "
        "(each but .parquet also followed by .gz or .xz)"
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(raw, unpacked) streams of a file; errors of the compression are ValueErrors that name it."""
    decompress = {".gz": gzip.open, ".xz": open_xz}.get(path.suffix.lower())
    try:
        with open(path, "rb") as raw:
            if decompress is None:
                yield raw, raw
            else:
                with decompress(raw) as unpacked:
                    yield raw, unpacked
    except EOFError as error:
        raise UserError(
            f"{path}: the compressed file ends too early; it is incomplete, get it again"
        ) from error
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: damaged, or not a {path.suffix} file ({error})") from error


class XzStreams(io.RawIOBase):
    """The contents of an .xz file. Python's own reader takes a damaged second stream for rubbish
    after the end, and leaves it out without a word."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._decoder, self._compressed = raw, None, b""
        self._zeros = 0  # since the last stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            if not self._compressed and (self._decoder is None or self._decoder.needs_input):
                self._compressed = self._raw.read(COMPRESSED_BYTES)
                if not self._compressed:
                    if self._decoder is None:
                        return 0
                    raise EOFError
            if self._decoder is None:
                found = self._compressed.lstrip(b"\0")  # a few may lie between streams
                self._zeros += len(self._compressed) - len(found)
                if self._zeros >= XZ_PADDING:
                    raise lzma.LZMAError("zeros in place of a stream")
                self._compressed = found
                if not found:
                    continue
                self._zeros = 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            data = self._decoder.decompress(self._compressed, max_length=len(buffer))
            self._compressed = b""
            if self._decoder.eof:
                self._compressed, self._decoder = self._decoder.unused_data, None
            if data:
                buffer[: len(data)] = data
                return len(data)


def open_xz(raw: BinaryIO) -> BinaryIO:
    return io.BufferedReader(XzStreams(raw))


# ---- readers of files ----------------------------------------------------------------------------


def not_empty(pieces: Iterable[Piece], name: str) -> Iterator[Piece]:
    """The same pieces; ValueError at their end if there were none."""
    piece = None
    for piece in pieces:
        yield piece
    if piece is None:
        raise UserError(f"{name} holds no documents; leave it out")


def read_whole(stream: BinaryIO, name: str, field: str = "") -> Iterator[Piece]:
    """The stream as one document, in pieces of about PIECE_BYTES that have the ids of the whole."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, offset = "", 0
    while chunk := stream.read(PIECE_BYTES):
        offset += len(chunk)
        seen = len(held)  # where there is no place to cut
        held += _decoded(decoder, chunk, name, offset)
        if cut := safe_cut(held, after=seen - 1):
            yield held[:cut], False
            held = held[cut:]
        elif len(held) > MAX_WORD_BYTES:
            raise UserError(
                f"{name}: {len(held):,} characters without a place to cut them (a character "
                "followed by a space or a newline); this is not text as tokenizers know it"
            )
    held += _decoded(decoder, b"", name, offset, final=True)
    if offset > 0:
        yield held, True


def _decoded(decoder, chunk: bytes, name: str, offset: int, final: bool = False) -> str:
    """The text of a chunk that ends at byte `offset` of the file."""
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        # error.object begins with what the decoder held back of the chunk before
        where = offset - len(error.object) + error.start
        raise UserError(
            f"{name}: not UTF-8 ({error.reason} at byte {where:,}); convert it first, "
            "e.g. iconv -f latin1 -t utf-8"
        ) from error


def safe_cut(text: str, before: int | None = None, after: int = 0) -> int:
    """The last place (at most `before`, above `after`) where GPT-2's ids of both sides are those of
    the whole; 0 where there is none.

    It is between a character that is no white space and a newline (or else a carriage return, or a
    space). GPT-2 splits text into words first, and no word goes on from a character that is no
    white space into white space; the rules that look ahead look from white space only, so the left
    part, which ends in none, is split the same.
    """
    end = len(text) if before is None else min(before + 1, len(text))
    start = max(after, 0)
    backwards = text[start:end][::-1]  # in which the last place is the first that is found
    for space in "\n\r ":
        if found := re.search(rf"{space}(?=\S)", backwards):
            return end - 1 - found.start()
    return 0


def read_lines(stream: BinaryIO, name: str, field: str = "") -> Iterator[Piece]:
    """A document a line; the end of the line belongs to it."""
    number, lines = 0, io.TextIOWrapper(stream, encoding="utf-8-sig")
    try:
        while line := lines.readline(MAX_WORD_BYTES):
            number += 1
            if "\0" in line or len(line) == MAX_WORD_BYTES:
                raise UserError(
                    f"{name} line {number}: this is not text, a line a document; "
                    "is it the right file?"
                )
            yield line, True
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: not UTF-8 ({error.reason}, not far after line {number}); is it text?"
        ) from error


def read_jsonl(stream: BinaryIO, name: str, field: str) -> Iterator[Piece]:
    """A document a row of JSON, in its `field`."""
    for place, row in read_jsonl_rows(stream, name):
        yield text_of(row, field, place), True


def read_jsonl_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, dict]]:
    """The place and the values of every row of JSON."""
    for place, line in lines_of(stream, name):
        yield place, json_object(line, place)


def read_parquet(stream: BinaryIO, name: str, field: str) -> Iterator[Piece]:
    """A document a row, in the column `field`."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            f"{name}: reading .parquet files needs the package pyarrow: pip install pyarrow"
        ) from error
    number = 0
    try:
        file = ParquetFile(stream)
        if field not in file.schema_arrow.names:
            text_of(dict.fromkeys(file.schema_arrow.names), field, name)  # says so
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield text_of({field: text}, field, f"{name} row {number}"), True
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{name}: damaged, or not a .parquet file ({cause(error)} after row {number})"
        ) from error


def text_of(row: dict, field: str, place: str) -> str:
    """The text in a row. Raises ValueError, with its place, where there is none."""
    if field not in row:
        raise UserError(
            f"{place}: no field {field!r}; its fields are "
            f"{', '.join(map(repr, row)) or '(none)'}; choose one with --field"
        )
    if not isinstance(row[field], str):
        raise UserError(
            f"{place}: the field {field!r} holds {type(row[field]).__name__}, not a string; "
            "choose another with --field, or mend the file"
        )
    return row[field]


ROW_FILES: dict[str, Reader] = {".jsonl": read_jsonl, ".parquet": read_parquet}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole, **ROW_FILES}


# ---- from the network ----------------------------------------------------------------------------


@dataclass
class DownloadedFile(Corpus):
    """The file at an address, small enough to be held in memory."""

    name: str  # the dataset's, for messages
    url: str
    readers: dict[str, Reader]
    field: str
    unit = "B"

    def describe(self) -> list[dict]:
        return [{"url": self.url}]

    def pieces(self) -> Iterator[Piece]:
        read = find_reader(self.url.rpartition("/")[2], self.readers, self.url)
        content = _from_network(self.name, self._get)
        self.total, stream = len(content), io.BytesIO(content)
        for piece in not_empty(read(stream, self.url, self.field), self.url):
            self.position = stream.tell()
            yield piece

    def _get(self) -> bytes:
        import urllib.request

        with urllib.request.urlopen(self.url, timeout=60) as response:
            return response.read()


@dataclass
class HubRows(Corpus):
    """A split of a dataset on the Hugging Face hub, a document a row."""

    name: str  # the dataset's here, for messages
    repository: str
    config: str | None
    split: str
    field: str  # of a row, with the text
    streaming: bool = True  # else the split is downloaded as a whole first, and kept
    expected: int | None = None  # fewer rows are an error, where they can be counted beforehand
    packages = ("datasets",)

    def describe(self) -> list[dict]:
        config = {} if self.config is None else {"config": self.config}
        return [{"dataset": self.repository} | config]

    def pieces(self) -> Iterator[Piece]:
        self.position = 0
        rows = iter(self._rows)
        while (row := self._next(rows)) is not None:
            self.position += 1
            yield text_of(row, self.field, f"{self.repository} row {self.position}"), True

    @functools.cached_property
    def _rows(self) -> Iterable[dict]:
        rows = _from_network(self.name, self._load)
        if hasattr(rows, "__len__"):
            self.total = len(rows)
            check_complete(self.name, self.total, self.expected or 0)
        return rows

    def _next(self, rows: Iterator[dict]) -> dict | None:
        try:
            return next(rows, None)
        except Exception as error:  # whatever pyarrow or the network raise: rows come as needed
            raise UserError(
                f"reading {self.repository} through the package datasets failed after row "
                f"{self.position} ({cause(error)})"
            ) from error

    def _load(self) -> Iterable[dict]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise UserError(NO_DATASETS) from error
        options = {"split": self.split, "streaming": self.streaming}
        try:
            return load_dataset(self.repository, self.config, **options)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # `datasets` 4 runs no loading scripts; where the repository still holds one, the hub
            # keeps a converted copy, in folders CONFIG/SPLIT or, where it is not complete,
            # CONFIG/partial-SPLIT
            files = {self.split: f"{self.config or '*'}/*{self.split}/*.parquet"}
            return load_dataset(
                self.repository, data_files=files, revision="refs/convert/parquet", **options
            )


def _from_network(name: str, get: Callable[[], Result]) -> Result:
    """What `get` returns; ValueError that says how to do without the network where it fails."""
    try:
        return get()
    # no network, a moved repository, a full disk, a changed layout: one remedy for all
    except Exception as error:
        if isinstance(error, ValueError) and isinstance(error.__cause__, ImportError):
            raise
        raise UserError(
            f"could not get {name} from the Hugging Face hub or its published address "
            f"({cause(error)}). Download its files where there is a network and pass them: "
            f"python data/prepare.py {name} --source FILE.parquet ... "
            "(--help names the other kinds of files)"
        ) from error


def check_complete(name: str, found: int, expected: int) -> None:
    """Raises ValueError where fewer documents were downloaded than there should be."""
    if found < expected:
        raise UserError(
            f"{name}: {found:,} of {expected:,} documents were served (the hub's converted copies "
            "can be partial); download the files and pass them with --source"
        )


def cause(error: BaseException) -> str:
    """The first line of the innermost error, which is the one that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---- the English that comes with Python ----------------------------------------------------------


class PythonDocs(Corpus):
    """The topics of pydoc's help(), one document each, then the docstrings of the standard library,
    a document a module. About 2 MB; differs between Python versions, not between machines with the
    same one."""

    MIN_CHARACTERS = 200  # modules with one line of documentation are all alike
    LEFT_OUT = frozenset(
        "site-packages dist-packages test tests idle_test lib2to3 pydoc_data __pycache__".split()
    )

    def describe(self) -> list[dict]:
        return [{"documentation": "Python " + ".".join(map(str, sys.version_info[:3]))}]

    def pieces(self) -> Iterator[Piece]:
        import sysconfig

        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UserError(
                "this Python comes without its documentation (pydoc_data); use another Python, or "
                "text of your own: python data/prepare.py text --source FILE"
            ) from error
        root = Path(sysconfig.get_path("stdlib"))
        modules = []
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
            if self.LEFT_OUT.isdisjoint(path.relative_to(root).parts):
                modules.append(path)
        self.total, self.position = len(topics) + len(modules), 0
        for name in sorted(topics):
            self.position += 1
            yield topics[name], True
        for path in modules:
            self.position += 1
            text = _docstrings(path)
            if len(text) >= self.MIN_CHARACTERS:
                yield text, True


def _docstrings(path: Path) -> str:
    """The docstrings of a module, its classes and functions, in the order of the file, empty lines
    between them."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(path.read_bytes())
    # templates and files for other versions, which some distributions ship
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "".join(text + "\n\n" for node in nodes if (text := ast.get_docstring(node)))
