"""Where documents come from: files of the user's, published files, the Hugging Face
hub.

The package `datasets` streams the hub and .parquet files, row by row. Text and JSON are
read here, because its readers change them. "text" makes "\n" of a lone "\r". "json"
reads a field of dates as times, and where one row of a field is a number it writes the
others in quotes; for a bad row it names no line. Here a field is a string, or an
error."""

import contextlib
import functools
import glob
import gzip
import io
import logging
import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from ..runtime.errors import UserError, reason_of
from ..runtime.files import lines_of, sha256_file
from ..runtime.validation import FileError, check_value, from_json

RowReader = Callable[[dict, str], str]  # (row, its place for messages) -> document
# (file, its name for messages, how rows are read) -> documents
Reader = Callable[[Path, str, RowReader], Iterator[str]]


@dataclass
class Corpus:
    """The documents of a split, to be read once."""

    documents: Iterable[str]
    description: list[dict]  # for meta.json; equal ones mean equal documents
    published: int | None = None  # documents of the published split


def source_files(paths: Iterable[Path], readers: dict[str, Reader]) -> tuple[Path, ...]:
    """Return files of known kinds: the paths themselves, or those in a folder, without
    hidden ones, which programs keep for themselves. Raises UserError where there is
    none, or one is given twice."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            path.stat()  # raises FileNotFoundError here, before any work
            files.append(path)
            continue
        inside = [p for p in path.rglob("*") if not is_hidden(p.relative_to(path))]
        readable = [p for p in inside if p.is_file() and reader_of(p, readers)]
        # without one, `find_reader` refuses the folder by its name
        files += sorted(readable) or [path]
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("a file is given twice; leave it out")
    return tuple(files)


def is_hidden(path: Path) -> bool:
    """Return whether a path below a folder is a hidden one, such as
    .ipynb_checkpoints/a.txt."""
    return any(part.startswith(".") for part in path.parts)


def local_files(
    paths: Iterable[Path], readers: dict[str, Reader], read_row: RowReader
) -> Corpus:
    """Return the documents of some files. readers: how files of each suffix are
    read."""
    description = []
    files = {}
    for path in paths:
        files[path] = find_reader(str(path), readers)
        size = path.stat().st_size
        sha256 = sha256_file(path)
        description.append({"file": path.name, "bytes": size, "sha256": sha256})
    documents = (
        text for path, read in files.items() for text in read(path, str(path), read_row)
    )
    return Corpus(documents, description)


def reader_of(file: Path | str, readers: dict[str, Reader]) -> Reader | None:
    """Return the reader of a file, by its suffix before that of a compression."""
    name = str(file).lower().removesuffix(".gz").removesuffix(".xz")
    for suffix, read in readers.items():
        if fnmatch(name, f"*{suffix}"):
            return read
    return None


def find_reader(file: str, readers: dict[str, Reader]) -> Reader:
    """Return the reader of a file. Raises UserError if there is none."""
    if reader := reader_of(file, readers):
        return reader
    raise UserError(
        f"{file}: unknown kind of file; known here are {', '.join(readers)}, "
        "each also with .gz or .xz"
    )


DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile)


@contextlib.contextmanager
def unpacked(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a file, unpacked. name: as messages call it."""
    # Without the format it would take .lzma, too, which has no checksum.
    read_xz = functools.partial(lzma.open, format=lzma.FORMAT_XZ)
    unpack = {".gz": gzip.open, ".xz": read_xz}.get(path.suffix.lower(), open)
    try:
        with unpack(path, "rb") as file:
            yield file
    except DAMAGED as error:
        raise UserError(
            f"{name}: damaged, cut short, or not a {path.suffix} file"
        ) from error


def unix_text(data: bytes, name: str) -> str:
    """Return the text of a file in UTF-8 with line ends of Unix. Raises UserError,
    which begins with its name."""
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode("utf-8-sig")
        # English in UTF-16 is valid UTF-8, with a zero beside each letter.
        if text.count("\0") <= len(text) / 4:
            return text.replace("\r\n", "\n")
    raise UserError(
        f"{name}: not UTF-8; convert it first, e.g. iconv -f latin1 -t utf-8, or -f "
        "utf-16"
    )


def read_whole(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield the file as one document; nothing if it is empty."""
    with unpacked(path, name) as file:
        text = unix_text(file.read(), name)
    if text:
        yield text


def read_lines(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield a document for each line, with its end."""
    for text in read_whole(path, name, read_row):
        yield from io.StringIO(text.replace("\r", "\n"), newline="\n")


def read_jsonl(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield a document for each row of JSON."""
    with unpacked(path, name) as file:
        for place, line in lines_of(file, name):
            yield read_row(from_json(line, dict, place), place)


def read_json(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield a document for each object in a list, or for each line where a file of JSON
    lines has this suffix."""
    with unpacked(path, name) as file:
        content = file.read()
    try:
        values = from_json(content, Any, name)
    except FileError as error:
        if "Extra data" not in str(error):
            raise
        yield from read_jsonl(path, name, read_row)
        return
    if not isinstance(values, list):  # JSON lines of one line
        values = [values]
    yield from texts_of(values, read_row, name)


def text_of(row: dict, place: str, field: str, option: str = "--field") -> str:
    """Return the text in a field of a row. Raises UserError, which begins with
    `place`."""
    text = row.get(field)
    if not isinstance(text, str):
        types = [f"{key!r} ({type(value).__name__})" for key, value in row.items()]
        raise UserError(
            f"{place}: no text in the field {field!r}, but {', '.join(types)}; choose "
            f"one with {option}"
        )
    return text


def texts_of(rows: Iterable[Any], read_row: RowReader, name: str) -> Iterator[str]:
    """Yield the document of each row."""
    for number, row in enumerate(rows, 1):
        place = f"{name} row {number}"
        check_value(row, dict, place)
        yield read_row(row, place)


def streamed(
    load: Callable[..., Iterable[dict]], name: str, problem: str
) -> Iterator[dict]:
    """Yield the rows that `datasets` streams. load: calls `load_dataset` with the
    options that it is given, whose cache is removed at the end. name, problem: of the
    message if reading fails."""
    import datasets  # here, as it takes a second

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs it raises, too
    with tempfile.TemporaryDirectory() as cache:
        try:
            yield from load(streaming=True, cache_dir=cache)
        # pyarrow, datasets and the network have errors of their own.
        except Exception as error:
            raise UserError(f"{name}: {problem} ({reason_of(error)})") from error


def read_parquet(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield a document for each row of a table."""

    def load(**options: Any) -> Iterable[dict]:
        from datasets import load_dataset

        file = glob.escape(str(path.absolute()))
        return load_dataset("parquet", data_files=file, split="train", **options)

    rows = streamed(load, name, "parquet cannot be read from it")
    yield from texts_of(rows, read_row, name)


def hub_rows(
    name: str, repository: str, config: str | None, split: str, read_row: RowReader
) -> Corpus:
    """Return a split of a dataset on the Hugging Face hub, streamed. name: the name of
    the dataset here."""

    def load(**options: Any) -> Iterable[dict]:
        from datasets import load_dataset

        try:
            return load_dataset(repository, config, split=split, **options)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # datasets runs no loading scripts any more. For repositories that have one,
            # the hub keeps a converted copy, in folders CONFIG/SPLIT or
            # CONFIG/partial-SPLIT.
            return load_dataset(
                repository,
                data_files={split: f"{config or '*'}/*{split}/*.parquet"},
                revision="refs/convert/parquet",
                split=split,
                **options,
            )

    source = {"dataset": repository}
    if config is not None:
        source["config"] = config
    files = f"python data/prepare.py {name} --source FILE.parquet ..."
    rows = streamed(load, repository, f"the hub failed; or pass files: {files}")
    return Corpus(texts_of(rows, read_row, repository), [source])


def downloaded_file(
    url: str, readers: dict[str, Reader], read_row: RowReader
) -> Corpus:
    """Return the documents of the file at an address."""

    def documents() -> Iterator[str]:
        import urllib.request

        read = find_reader(url, readers)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / url.rpartition("/")[2]
            try:
                with urllib.request.urlopen(url, timeout=60) as response:
                    with path.open("wb") as file:
                        shutil.copyfileobj(response, file)
            except Exception as error:  # http has errors of its own
                raise UserError(
                    f"{url}: {reason_of(error)}; get it elsewhere and give it with "
                    "--source FILE"
                ) from error
            yield from read(path, url, read_row)

    return Corpus(documents(), [{"url": url}])


ROW_FILES: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole}
TEXT_FILES.update(ROW_FILES)
