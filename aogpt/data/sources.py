"""Where documents come from: files of the user's, published files, the Hugging Face
hub.

Rows of .jsonl and .parquet files are read one at a time; text files and .json files are
held whole. The package `datasets` reads the hub. Its readers of local files are not
used: they turn "NA" into a missing value and a date into a time."""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..runtime.errors import UserError, reason_of
from ..runtime.files import json_object, lines_of, sha256_file
from .tokenizers import END_OF_TEXT

OFFLINE = (
    "pip install datasets, or pass files: "
    "python data/prepare.py {} --source FILE.parquet ..."
)
MOST_LISTED = 100  # files in meta.json, which checkpoints hold, too
PACKED = (".gz", ".xz", ".zst")  # suffixes of compressed files
# Notes, each after a count.
MARKED = f"times {END_OF_TEXT} is read as ordinary text"
LEFT_OUT = "rows have a field {!r}, which is left out (see --field and --prompt-field)"
WINDOWS = "Windows line ends are converted"
EMPTY = "empty files are skipped"
COPIES = "files have the same bytes as another one"


@dataclass
class Reading:
    """The way in which documents are read, and what was noticed while reading."""

    field: str  # the field of a row that holds the text
    prompt_field: str | None = None  # the field of a row with its prompt (prompts.py)
    counts: Counter[str] = field(default_factory=Counter)  # notes, and how often
    left_out: Counter[str] = field(default_factory=Counter)  # other fields, how often

    @property
    def fields(self) -> set[str]:
        """Return the fields of a row that are read."""
        return {self.field}

    def document(self, row: dict, place: str) -> str:
        """Return the document of a row. Raises UserError, which begins with `place`."""
        self.left_out.update(row.keys() - self.fields)
        return text_of(row, self.field, place)


# (stream, its name for messages, how) -> documents
Reader = Callable[[BinaryIO, str, Reading], Iterator[str]]


@dataclass
class Corpus:
    """The documents of a split, to be read once."""

    documents: Iterable[str]
    description: list[dict]  # for meta.json; equal ones mean equal documents
    published: int | None = None  # documents of the published split
    reading: Reading = field(default_factory=lambda: Reading("text"))


def source_files(paths: Iterable[Path], readers: dict[str, Reader]) -> tuple[Path, ...]:
    """Return files of known kinds: the paths themselves, or those in a folder or
    matching a pattern, without hidden ones. Raises UserError where there is none, or
    one is given twice."""
    files: list[Path] = []
    for path in paths:
        is_one = not (path.is_dir() or glob.has_magic(str(path)))
        if is_one and not path.exists():
            raise UserError(f"there is no file {path}; a name with spaces needs quotes")
        if path.is_file() or is_one:
            files.append(path)
            continue
        if path.is_dir():
            inside = [p for p in path.rglob("*") if not is_hidden(p.relative_to(path))]
        else:
            inside = [Path(name) for name in glob.glob(str(path), recursive=True)]
        readable = [p for p in inside if p.is_file() and reader_of(p, readers)]
        if not readable:
            raise UserError(
                f"{path}: there is no file of a known kind ({', '.join(readers)}), "
                "hidden ones aside"
            )
        files += sorted(readable)
    times = Counter(path.resolve() for path in files)
    for path in files:
        if times[path.resolve()] > 1:
            raise UserError(f"{path}: this file is given twice")
    return tuple(files)


def is_hidden(path: Path) -> bool:
    """Return whether a path below a folder is one that programs keep for themselves
    (.ipynb_checkpoints); a pattern does not match it either."""
    return any(part.startswith(".") for part in path.parts)


def local_files(
    paths: Iterable[Path], readers: dict[str, Reader], reading: Reading
) -> Corpus:
    """Return the documents of some files. readers: how files of each suffix are
    read."""
    description = []
    files = {}
    for path in paths:
        files[path] = find_reader(str(path), readers)
        description.append(
            {
                "file": path.name,
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
        )
    different = {file["sha256"] for file in description}
    reading.counts[COPIES] += len(description) - len(different)
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
                    reading.counts[MARKED] += text.count(END_OF_TEXT)
                    yield text
                    is_empty = False
            empty += is_empty
        if empty == len(files):
            names = ", ".join(str(path) for path in list(files)[:3])
            raise UserError(f"{names} holds no document; leave it out")
        reading.counts[EMPTY] += empty

    return Corpus(documents(), description, reading=reading)


def check_splits_differ(files: dict[str, tuple[Path, ...]]) -> None:
    """Raise UserError if two splits have a file in common: the same bytes, also under
    another name. files: those of each split."""
    by_size: dict[int, list[tuple[str, Path]]] = {}
    for split, paths in files.items():
        for path in paths:
            if path.is_file() and path.stat().st_size:
                by_size.setdefault(path.stat().st_size, []).append((split, path))
    for same_size in by_size.values():
        if len({split for split, _ in same_size}) == 1:
            continue
        first_of: dict[str, tuple[str, Path]] = {}  # the first file with a sha256
        for split, path in same_size:
            other, first = first_of.setdefault(sha256_file(path), (split, path))
            if other != split:
                raise UserError(
                    f"{path} ({split}) has the same bytes as {first} ({other}): "
                    "a file belongs to one split"
                )


def reader_of(file: Path | str, readers: dict[str, Reader]) -> Reader | None:
    """Return the reader of a file, by its suffix before that of a compression."""
    name = str(file).lower()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
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
        f"each also with {', '.join(PACKED[:-1])} or {PACKED[-1]}"
    )


def _open_zst(path: Path, mode: str) -> BinaryIO:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: .zst files need pip install datasets") from None
    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), mode), "zstd")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file, unpacked."""
    openers = {
        ".gz": gzip.open,
        ".xz": partial(lzma.open, format=lzma.FORMAT_XZ),  # .lzma has no checksum
        ".zst": _open_zst,
    }
    opener = openers.get(path.suffix.lower(), open)
    damage: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error)
    if opener is not open:
        damage += (OSError,)  # also of gzip and pyarrow
    try:
        with opener(path, "rb") as file:
            yield io.BufferedReader(file)
    except damage as error:
        if isinstance(error, OSError) and error.errno:  # such as a missing file
            raise
        raise UserError(
            f"{path}: damaged, cut short, or not a {path.suffix} file"
        ) from error


def decoded(data: bytes, name: str) -> str:
    """Return the text of a file in UTF-8. Raises UserError, which begins with its
    name."""
    if data.count(0) > len(data) / 4:
        # A mark of UTF-16 has no 0.
        order = "be" if data[0] == 0 or data[:2] == b"\xfe\xff" else "le"
        raise UserError(
            f"{name}: every other byte is 0, as in UTF-16; "
            f"convert it first, e.g. iconv -f utf-16{order} -t utf-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: not UTF-8 ({error.reason}); convert it first, "
            "e.g. iconv -f latin1 -t utf-8"
        ) from error


def read_whole(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """Yield the file as one document, with line ends of Unix; nothing if it is
    empty."""
    text = decoded(stream.read(), name)
    reading.counts[WINDOWS] += text.count("\r\n")
    if text:
        yield text.replace("\r\n", "\n")


def read_zipped(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """Yield the only file of a .zip as one document."""
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
    """Yield a document for each line, with its end."""
    for text in read_whole(stream, name, reading):
        yield from io.StringIO(text.replace("\r", "\n"), newline="\n")


def read_jsonl(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """Yield a document for each row of JSON."""
    for place, line in lines_of(stream, name):
        yield reading.document(json_object(line, place), place)


def read_json(stream: BinaryIO, name: str, reading: Reading) -> Iterator[str]:
    """Yield a document for each object in a list, which is the file or the only list in
    its object; for the file's object, if it is itself a row; or for each line, where a
    file of JSON lines has this suffix."""
    content = stream.read()
    try:
        values = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_jsonl(io.BytesIO(content), name, reading)
            return
        raise UserError(
            f"{name} line {error.lineno}: this is not JSON ({error.msg})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: this is not JSON ({reason_of(error)})") from None
    if isinstance(values, dict):
        lists = [key for key, value in values.items() if isinstance(value, list)]
        # A field that is read makes it a row, which may hold a list, such as of tags.
        is_row = len(lists) != 1 or not reading.fields.isdisjoint(values.keys() - lists)
        values = [values] if is_row else values[lists[0]]
    if not isinstance(values, list):
        raise UserError(
            f"{name}: this is a {type(values).__name__}, not a list of rows"
        )
    yield from texts_of(enumerate(values, 1), reading, name)


def check_read_once(
    columns: Sequence[str],
    reading: Reading,
    name: str,
) -> None:
    """Raise UserError if a field that is read is the name of two columns: a row would
    hold the last one alone."""
    for column in sorted(reading.fields):
        if columns.count(column) > 1:
            raise UserError(
                f"{name}: {columns.count(column)} columns are named {column!r}; rename "
                "all but one of them"
            )


def text_of(
    row: dict,
    field: str,
    place: str,
    option: str = "--field",
) -> str:
    """Return the text in a field of a row. Raises UserError, which begins with
    `place`."""
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
    """Yield a document for each row of a table."""

    def rows() -> Iterator[dict]:
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(stream)
        names = file.schema_arrow.names
        check_read_once(names, reading, name)
        columns = [name for name in names if name in reading.fields]
        for batch in file.iter_batches(500, columns=columns):
            for values in batch.to_pylist():
                row = dict.fromkeys(names)
                row.update(values)
                yield row

    numbered = _numbered(rows(), name, "damaged, or not a .parquet file")
    yield from texts_of(numbered, reading, name)


def _numbered(
    rows: Iterable[dict], name: str, problem: str
) -> Iterator[tuple[int, dict]]:
    """Yield rows and their numbers, from 1. problem: the message if reading fails."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield number, row
    except UserError:
        raise
    # pyarrow, datasets and the network have errors of their own.
    except Exception as error:
        raise UserError(
            f"{name}: {problem} ({reason_of(error)}, after row {number})"
        ) from error


def texts_of(
    rows: Iterable[tuple[int, dict]], reading: Reading, name: str
) -> Iterator[str]:
    """Yield the document of each row. rows: rows with their numbers."""
    for number, row in rows:
        place = f"{name} row {number}"
        if not isinstance(row, dict):
            raise UserError(
                f"{place}: this is a {type(row).__name__}, not an object of JSON"
            )
        yield reading.document(row, place)


def hub_rows(
    name: str, repository: str, config: str | None, split: str, reading: Reading
) -> Corpus:
    """Return a split of a dataset on the Hugging Face hub, streamed. name: the name of
    the dataset here."""

    def rows() -> Iterator[dict]:
        from datasets import load_dataset

        load = partial(
            load_dataset,
            repository,
            split=split,
            streaming=True,
        )
        try:
            streamed = load(config)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # datasets runs no loading scripts any more. For repositories that have one,
            # the hub keeps a converted copy, in folders CONFIG/SPLIT or
            # CONFIG/partial-SPLIT.
            files = {split: f"{config or '*'}/*{split}/*.parquet"}
            streamed = load(data_files=files, revision="refs/convert/parquet")
        yield from streamed

    source = {"dataset": repository}
    if config is not None:
        source["config"] = config
    numbered = _numbered(rows(), repository, f"the hub failed; {OFFLINE.format(name)}")
    return Corpus(texts_of(numbered, reading, repository), [source], reading=reading)


def downloaded_file(
    name: str, url: str, readers: dict[str, Reader], reading: Reading
) -> Corpus:
    """Return the documents of the file at an address, which is held in memory."""

    def documents() -> Iterator[str]:
        import urllib.request

        read = find_reader(url, readers)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                stream = io.BytesIO(response.read())
        except Exception as error:  # http has errors of its own
            raise UserError(
                f"{url}: {reason_of(error)}; get it elsewhere, then: "
                f"python data/prepare.py {name} --source FILE"
            ) from error
        yield from read(stream, url, reading)

    return Corpus(documents(), [{"url": url}], reading=reading)


ROW_FILES: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole}
TEXT_FILES.update(ROW_FILES)
