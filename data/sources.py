"""Where documents come from: files of the user's, published files, the Hugging Face hub.

Rows of .jsonl and .parquet files are read one at a time; text files are held whole.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from runtime.errors import UserError
from runtime.files import json_object, lines_of, sha256_file

OFFLINE = "pip install datasets, or pass files: python data/prepare.py {} --source FILE.parquet ..."
# (stream, its name for messages, the field of a row that holds the text) -> documents
Reader = Callable[[BinaryIO, str, str], Iterator[str]]


@dataclass
class Corpus:
    """The documents of a split, to be read once.

    description: for meta.json; equal ones mean equal documents. published: how many documents the
    published split has."""

    documents: Iterable[str]
    description: list[dict]
    published: int | None = None


def local_files(paths: Iterable[Path], readers: dict[str, Reader], field: str) -> Corpus:
    """The documents of some files. readers: how files of each suffix are read."""
    description, files = [], {}
    for path in paths:
        files[path] = find_reader(str(path), readers)
        facts = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        description.append({"file": path.name, **facts})

    def documents() -> Iterator[str]:
        for path, read in files.items():
            empty = True
            with unpacked(path) as stream:
                for text in read(stream, str(path), field):
                    empty = False
                    yield text
            if empty:
                raise UserError(f"{path} holds no document; leave it out")

    return Corpus(documents(), description)


def find_reader(file: str, readers: dict[str, Reader]) -> Reader:
    """The reader of a file, by its suffix."""
    unpacked = file.lower().removesuffix(".gz").removesuffix(".xz")
    for suffix, reader in readers.items():
        if fnmatch(unpacked, f"*{suffix}"):
            return reader
    known = f"{', '.join(readers)} (each also followed by .gz or .xz)"
    raise UserError(f"{file}: unknown kind of file; known here are {known}")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: damaged, cut short, or not a {path.suffix} file") from error


def read_whole(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """The file as one document; none if it is empty."""
    try:
        text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        advice = "convert it first, e.g. iconv -f latin1 -t utf-8"
        raise UserError(f"{name}: not UTF-8 ({error.reason}); {advice}") from error
    if text:
        yield text


def read_lines(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """A document for each line, with its end."""
    for text in read_whole(stream, name, field):
        lines = re.finditer(r"[^\n]*\n|[^\n]+", re.sub(r"\r\n?", "\n", text))
        for number, line in enumerate(lines, 1):
            if "\0" in line[0]:
                raise UserError(f"{name} line {number}: this is not text; is it the right file?")
            yield line[0]


def read_jsonl(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """A document for each row of JSON."""
    for place, line in lines_of(stream, name):
        yield text_of(json_object(line, place), field, place)


def text_of(row: dict, field: str, place: str) -> str:
    if field not in row:
        fields = ", ".join(map(repr, row)) or "(none)"
        raise UserError(f"{place}: no field {field!r}, but {fields}; choose one with --field")
    if not isinstance(row[field], str):
        kind = type(row[field]).__name__
        raise UserError(f"{place}: the field {field!r} holds {kind}, not a string; mend the file")
    return row[field]


def read_parquet(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """A document for each row of a table."""

    def rows() -> Iterator[dict]:
        from pyarrow.parquet import ParquetFile

        for table in ParquetFile(stream).iter_batches(1000):
            yield from table.to_pylist()

    return texts_of(rows(), field, name, "damaged, or not a .parquet file")


def texts_of(rows: Iterable[dict], field: str, name: str, problem: str) -> Iterator[str]:
    """The document in each row. problem: what it is where reading them fails."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield text_of(row, field, f"{name} row {number}")
    except UserError:
        raise
    except Exception as error:  # pyarrow, datasets and the network have errors of their own
        raise UserError(f"{name}: {problem} ({cause(error)}, after row {number})") from error


def hub_rows(name: str, repository: str, config: str | None, split: str, field: str) -> Corpus:
    """A split of a dataset on the Hugging Face hub, streamed. name: of the dataset here."""

    def hub() -> Iterator[dict]:
        from datasets import load_dataset

        options = {"split": split, "streaming": True}
        try:
            streamed = load_dataset(repository, config, **options)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # datasets runs no loading scripts any more. For repositories that have one, the hub
            # keeps a converted copy, in folders CONFIG/SPLIT or CONFIG/partial-SPLIT.
            files = {split: f"{config or '*'}/*{split}/*.parquet"}
            copy = {"data_files": files, "revision": "refs/convert/parquet"}
            streamed = load_dataset(repository, **copy, **options)
        yield from streamed

    problem = f"the hub failed; {OFFLINE.format(name)}"
    source = {"dataset": repository} | ({} if config is None else {"config": config})
    return Corpus(texts_of(hub(), field, repository, problem), [source])


def downloaded_file(name: str, url: str, readers: dict[str, Reader], field: str) -> Corpus:
    """The file at an address, held in memory."""

    def documents() -> Iterator[str]:
        import urllib.request

        read = find_reader(url, readers)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                stream = io.BytesIO(response.read())
        except Exception as error:  # http has errors of its own
            raise UserError(f"{url}: {cause(error)}; {OFFLINE.format(name)}") from error
        yield from read(stream, url, field)

    return Corpus(documents(), [{"url": url}])


def cause(error: BaseException) -> str:
    """The first line of the innermost error, which is the one that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


ROW_FILES: dict[str, Reader] = {".jsonl": read_jsonl, ".parquet": read_parquet}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole, **ROW_FILES}
