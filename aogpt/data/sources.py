"""Where documents come from: files of the user's, published files, the Hugging Face
hub.

The package `datasets` streams the hub and .parquet files, row by row. Text and JSON are
read here, because its readers change them. "text" makes "\n" of a lone "\r". "json"
reads a field of dates as times, and where one row of a field is a number it writes the
others in quotes; for a bad row it names no line. Here a field is a string, or an
error. CSV is not read: its reader, pandas, loses cells where rows differ in length."""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..runtime.errors import UserError, reason_of
from ..runtime.files import json_object, lines_of, parse_json, sha256_file

OFFLINE = "or pass files: python data/prepare.py {} --source FILE.parquet ..."
MOST_LISTED = 100  # files in meta.json, which checkpoints hold, too
PACKED = (".gz", ".xz", ".zst")  # suffixes of compressed files
# Notes, each after a count.
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


# (file, its name for messages, how) -> documents
Reader = Callable[[Path, str, Reading], Iterator[str]]


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
            for text in read(path, str(path), reading):
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
    import pyarrow  # as `datasets`, it takes a second

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), mode), "zstd")


@contextlib.contextmanager
def unpacked(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a file, unpacked. name: as messages call it."""
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
            f"{name}: damaged, cut short, or not a {path.suffix} file"
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


def unix_text(data: bytes, name: str, reading: Reading) -> str:
    """Return the text of a file in UTF-8 with line ends of Unix."""
    text = decoded(data, name)
    reading.counts[WINDOWS] += text.count("\r\n")
    return text.replace("\r\n", "\n")


def read_whole(path: Path, name: str, reading: Reading) -> Iterator[str]:
    """Yield the file as one document; nothing if it is empty."""
    with unpacked(path, name) as file:
        text = unix_text(file.read(), name, reading)
    if text:
        yield text


def read_lines(path: Path, name: str, reading: Reading) -> Iterator[str]:
    """Yield a document for each line, with its end."""
    for text in read_whole(path, name, reading):
        yield from io.StringIO(text.replace("\r", "\n"), newline="\n")


def read_jsonl(path: Path, name: str, reading: Reading) -> Iterator[str]:
    """Yield a document for each row of JSON."""
    with unpacked(path, name) as file:
        for place, line in lines_of(file, name):
            yield reading.document(json_object(line, place), place)


def read_json(path: Path, name: str, reading: Reading) -> Iterator[str]:
    """Yield a document for each object in a list, which is the file or the only list in
    its object; for the file's object, if it is itself a row; or for each line, where a
    file of JSON lines has this suffix."""
    with unpacked(path, name) as file:
        content = file.read()
    try:
        values = parse_json(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_jsonl(path, name, reading)
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


def text_of(row: dict, field: str, place: str, option: str = "--field") -> str:
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


def texts_of(
    rows: Iterable[tuple[int, Any]], reading: Reading, name: str
) -> Iterator[str]:
    """Yield the document of each row. rows: rows with their numbers."""
    for number, row in rows:
        place = f"{name} row {number}"
        if not isinstance(row, dict):
            raise UserError(
                f"{place}: this is a {type(row).__name__}, not an object of JSON"
            )
        yield reading.document(row, place)


def streamed(
    load: Callable[..., Iterable[dict]], name: str, problem: str
) -> Iterator[tuple[int, dict]]:
    """Yield the rows that `datasets` streams, and their numbers, from 1. load: calls
    `load_dataset` with the options that it is given, whose cache is removed at the end.
    name, problem: of the message if reading fails."""
    import datasets  # here, as it takes a second

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs it raises, too
    number = 0
    with tempfile.TemporaryDirectory() as cache:
        try:
            for number, row in enumerate(load(streaming=True, cache_dir=cache), 1):
                yield number, row
        # pyarrow, datasets and the network have errors of their own.
        except Exception as error:
            raise UserError(
                f"{name}: {problem} ({reason_of(error)}, after row {number})"
            ) from error


def with_datasets(kind: str, **settings: Any) -> Reader:
    """Return the reader of a kind of file that `datasets` has. settings: of this
    kind."""

    def read(path: Path, name: str, reading: Reading) -> Iterator[str]:
        def load(**options: Any) -> Iterable[dict]:
            from datasets import load_dataset

            file = glob.escape(str(path.absolute()))
            return load_dataset(
                kind, data_files=file, split="train", **settings, **options
            )

        rows = streamed(load, name, f"{kind} cannot be read from it")
        yield from texts_of(rows, reading, name)

    return read


def hub_rows(
    name: str, repository: str, config: str | None, split: str, reading: Reading
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
    problem = f"the hub failed; {OFFLINE.format(name)}"
    rows = streamed(load, repository, problem)
    return Corpus(texts_of(rows, reading, repository), [source], reading=reading)


def downloaded_file(
    name: str, url: str, readers: dict[str, Reader], reading: Reading
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
                    f"{url}: {reason_of(error)}; get it elsewhere, then: "
                    f"python data/prepare.py {name} --source FILE"
                ) from error
            yield from read(path, url, reading)

    return Corpus(documents(), [{"url": url}], reading=reading)


ROW_FILES: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": with_datasets("parquet"),
}
TEXT_FILES: dict[str, Reader] = {".txt": read_whole, ".md": read_whole}
TEXT_FILES.update(ROW_FILES)
