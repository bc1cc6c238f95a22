"""Where documents come from: files of the user's, published files, the Hugging Face hub. Rows of
.jsonl and .parquet files are read one at a time; text files are held whole."""

import contextlib
import glob
import gzip
import hashlib
import io
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..runtime.errors import UserError, reason_of
from ..runtime.files import json_object, lines_of, sha256_file
from .tokenizers import END_OF_TEXT

OFFLINE = "pip install datasets, or pass files: python data/prepare.py {} --source FILE.parquet ..."
MOST_LISTED = 100  # files in meta.json, which checkpoints hold, too
MARKED = f"times {END_OF_TEXT} is read as ordinary text (--split-at '{END_OF_TEXT}' divides there)"
LEFT_OUT = "rows have a field {!r}, which is left out (see --field and --prompt-field)"


@dataclass
class Reading:
    """How documents are read, and what was noticed on the way."""

    field: str  # the field of a row that holds the text
    prompt_field: str | None = (
        None  # the field with the prompt of an example (prompts.py)
    )
    split_at: str | None = None  # the separator of documents in a text
    counts: Counter[str] = field(
        default_factory=Counter
    )  # notes for the user, and how often

    @property
    def fields(self) -> set[str]:  # the fields of a row that are read
        return {self.field}

    def document(self, row: dict, place: str) -> str:
        """The document of a row. Raises UserError, which begins with `place`."""
        self.counts.update(LEFT_OUT.format(key) for key in row.keys() - self.fields)
        return text_of(row, self.field, place)

    def documents(self, text: str) -> Iterator[str]:
        """The documents in what was read as one."""
        if self.split_at:
            yield from filter(
                None, (part.strip("\n") for part in text.split(self.split_at))
            )
        else:
            self.counts[MARKED] += text.count(END_OF_TEXT)
            yield text


# (stream, its name for messages, how) -> documents
Reader = Callable[[BinaryIO, str, Reading], Iterator[str]]


@dataclass
class Corpus:
    """The documents of a split, to be read once."""

    documents: Iterable[str]
    description: list[dict]  # for meta.json; equal ones mean equal documents
    published: int | None = None  # documents of the published split
    counts: Counter[str] = field(
        default_factory=Counter
    )  # of `Reading`, shared by all splits


def found_files(paths: Iterable[Path], readers: dict[str, Reader]) -> tuple[Path, ...]:
    """Files of known kinds: the paths themselves, or those in a folder or matching a pattern."""
    files: list[Path] = []
    for path in paths:
        if path.is_file() or not (path.is_dir() or glob.has_magic(str(path))):
            files.append(path)
            continue
        inside = (
            path.rglob("*") if path.is_dir() else glob.glob(str(path), recursive=True)
        )
        known = [p for p in map(Path, inside) if p.is_file() and reader_of(p, readers)]
        if not known:
            raise UserError(
                f"{path}: there is no file of a known kind ({', '.join(readers)})"
            )
        files += sorted(known)
    return tuple(files)


def local_files(
    paths: Iterable[Path], readers: dict[str, Reader], reading: Reading
) -> Corpus:
    """The documents of some files. readers: how files of each suffix are read."""
    description = []
    files = {}
    for path in paths:
        files[path] = find_reader(str(path), readers)
        facts = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        description.append({"file": path.name, **facts})
    if len(files) > MOST_LISTED:
        digest = hashlib.sha256(repr(description).encode()).hexdigest()
        size = sum(file["bytes"] for file in description)
        description = [
            {"file": f"{len(files):,} files", "bytes": size, "sha256": digest}
        ]

    def documents() -> Iterator[str]:
        empty = 0
        for path, read in files.items():
            is_empty = True
            with unpacked(path) as stream:
                for text in read(stream, str(path), reading):
                    yield from reading.documents(text)
                    is_empty = False
            empty += is_empty
        if empty == len(files):
            raise UserError(
                f"{', '.join(map(str, [*files][:3]))} holds no document; leave it out"
            )
        reading.counts["empty files are skipped"] += empty

    return Corpus(documents(), description)


def reader_of(file: Path | str, readers: dict[str, Reader]) -> Reader | None:
    """The reader of a file, by its suffix."""
    unpacked = str(file).lower().removesuffix(".gz").removesuffix(".xz")
    return next(
        (read for suffix, read in readers.items() if fnmatch(unpacked, f"*{suffix}")),
        None,
    )


def find_reader(file: str, readers: dict[str, Reader]) -> Reader:
    if reader := reader_of(file, readers):
        return reader
    known = f"{', '.join(readers)}, each also with .gz or .xz"
    raise UserError(f"{file}: unknown kind of file; known here are {known}")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    xz = partial(lzma.open, format=lzma.FORMAT_XZ)  # .lzma files have no checksum
    opener = {".gz": gzip.open, ".xz": xz}.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"{path}: damaged, cut short, or not a {path.suffix} file"
        ) from error


def read_whole(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """The file as one document, with line ends of Unix; none if it is empty."""
    try:
        text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        advice = "convert it first, e.g. iconv -f latin1 -t utf-8"
        raise UserError(f"{name}: not UTF-8 ({error.reason}); {advice}") from error
    reading.counts["Windows line ends are converted"] += text.count("\r\n")
    if text:
        yield text.replace("\r\n", "\n")


def read_zipped(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """The only file of a .zip as one document."""
    try:
        with (
            zipfile.ZipFile(stream) as archive,
            archive.open(*archive.namelist()) as file,
        ):
            yield from read_whole(file, name, reading)
    except (zipfile.BadZipFile, TypeError) as error:  # TypeError: not one file
        raise UserError(
            f"{name}: no .zip of one file ({reason_of(error)}); get it again"
        ) from None


def read_lines(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """A document for each line, with its end."""
    for text in read_whole(stream, name, reading):
        yield from io.StringIO(text.replace("\r", "\n"), newline="\n")


def read_jsonl(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """A document for each row of JSON."""
    for place, line in lines_of(stream, name):
        yield reading.document(json_object(line, place), place)


def text_of(row: dict, field: str, place: str, option: str = "--field") -> str:
    if field not in row:
        fields = ", ".join(map(repr, row)) or "(none)"
        raise UserError(
            f"{place}: no field {field!r}, but {fields}; choose one with {option}"
        )
    if not isinstance(text := row[field], str):
        raise UserError(
            f"{place}: the field {field!r} holds {type(text).__name__}, not a string"
        )
    return text


def read_parquet(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """A document for each row of a table."""

    def rows() -> Iterator[dict]:
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(stream)
        names = file.schema_arrow.names
        for batch in file.iter_batches(
            500, columns=[n for n in names if n in reading.fields]
        ):
            yield from (dict.fromkeys(names) | row for row in batch.to_pylist())

    return texts_of(rows(), reading, name, "damaged, or not a .parquet file")


def texts_of(
    rows: Iterable[dict], reading: Reading, name: str, problem: str
) -> Iterator[str]:
    """The document in each row. problem: the message if reading fails."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield reading.document(row, f"{name} row {number}")
    except UserError:
        raise
    except (
        Exception
    ) as error:  # pyarrow, datasets and the network have errors of their own
        raise UserError(
            f"{name}: {problem} ({reason_of(error)}, after row {number})"
        ) from error


def hub_rows(
    name: str, repository: str, config: str | None, split: str, how: Reading
) -> Corpus:
    """A split of a dataset on the Hugging Face hub, streamed. name: of the dataset here."""

    def hub() -> Iterator[dict]:
        from datasets import load_dataset

        load = partial(load_dataset, repository, split=split, streaming=True)
        try:
            streamed = load(config)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # datasets runs no loading scripts any more. For repositories that have one, the hub
            # keeps a converted copy, in folders CONFIG/SPLIT or CONFIG/partial-SPLIT.
            files = {split: f"{config or '*'}/*{split}/*.parquet"}
            streamed = load(data_files=files, revision="refs/convert/parquet")
        yield from streamed

    problem = f"the hub failed; {OFFLINE.format(name)}"
    source = {"dataset": repository} | ({} if config is None else {"config": config})
    return Corpus(texts_of(hub(), how, repository, problem), [source])


def downloaded_file(
    name: str, url: str, readers: dict[str, Reader], reading: Reading
) -> Corpus:
    """The file at an address, held in memory."""

    def documents() -> Iterator[str]:
        import urllib.request

        read = find_reader(url, readers)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                stream = io.BytesIO(response.read())
        except Exception as error:  # http has errors of its own
            advice = (
                f"get it elsewhere, then: python data/prepare.py {name} --source FILE"
            )
            raise UserError(f"{url}: {reason_of(error)}; {advice}") from error
        yield from read(stream, url, reading)

    return Corpus(documents(), [{"url": url}])


ROW_FILES: dict[str, Reader] = {".jsonl": read_jsonl, ".parquet": read_parquet}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole, **ROW_FILES}
