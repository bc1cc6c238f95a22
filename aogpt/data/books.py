"""The English books behind the results, published up to 1927, in the splits of
books.tsv. They come from a public repository with a Markdown file for each book, as a
.zip."""

import csv
import unicodedata
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from ..runtime.errors import UserError
from .sources import Corpus, RowReader, unix_text, unpacked

COMMIT = "f9edc0ac68ef4d4bc6b16cbc1a3d68d5783a7e28"
URL = f"https://github.com/mlschmitt/classic-books-markdown/archive/{COMMIT}.zip"
LIST = Path(__file__).with_name("books.tsv")  # split, year, author, title, bytes


def books() -> list[dict[str, str]]:
    with LIST.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def read_books(path: Path, name: str, read_row: RowReader) -> Iterator[str]:
    """Yield the books of books.tsv, in its order. Raises UserError if one is missing or
    has another length than the one behind the results."""
    with unpacked(path, name) as file, zipfile.ZipFile(file) as archive:
        files = {}
        for member in archive.namelist():
            place = PurePosixPath(member)
            author = place.parts[-2] if len(place.parts) > 2 else ""
            title = place.name.removesuffix(".md").strip()
            files[_key(author, title)] = member
        for book in books():
            key = _key(book["author"], book["title"])
            text = ""
            if key in files:
                data = archive.read(files[key])
                text = unix_text(data, f"{name}: {key}.md").strip()
            if len(text.encode()) != int(book["bytes"]):
                raise UserError(
                    f"{name}: {key}.md is missing or has another length; the books are "
                    f"those of {URL}"
                )
            yield text


def _key(author: str, title: str) -> str:
    """Return the author and title by which a book is found, in one form of their
    accents."""
    return unicodedata.normalize("NFC", f"{author}/{title}")


def book_splits(corpus: Corpus, splits: tuple[str, ...]) -> dict[str, Corpus]:
    """Divide the books into the splits of books.tsv. corpus: all books, in its
    order."""

    texts = cache(lambda: list(zip(books(), corpus.documents, strict=True)))

    def part(split: str) -> Iterator[str]:
        for book, text in texts():
            if book["split"] == split:
                yield text

    return {split: Corpus(part(split), corpus.description) for split in splits}
