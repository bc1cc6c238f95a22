"""Which document goes into which split. Validation documents are drawn from the seed."""

import math
from collections.abc import Iterator

from data.sources import Corpus, Piece, safe_place
from runtime.errors import UserError
from runtime.randomness import SPLIT, philox_bits

RoutedPiece = tuple[str, str, bool]  # split, text, whether the document ends here


def route(
    corpora: dict[str, Corpus],
    fraction: float | None,
    seed: int,
    limit: int | None,
    whole: bool = False,
) -> Iterator[RoutedPiece]:
    """Every piece with its split, in reading order.

    fraction: share of the "train" documents that becomes "val"; None: none. limit: on the documents
    of the first split, those of --source. whole: never split a document."""
    for number, (split, corpus) in enumerate(corpora.items()):
        if split == "train" and fraction is not None:
            yield from _train_and_val(corpus, fraction, seed, limit, whole)
        else:
            for text, end in _limited(corpus, limit if number == 0 else None):
                yield split, text, end


def _limited(corpus: Corpus, limit: int | None) -> Iterator[Piece]:
    """The pieces of the first `limit` documents."""
    documents = 0
    for text, end in corpus.pieces():
        yield text, end
        documents += end
        if documents == limit:
            break


def _train_and_val(
    corpus: Corpus, fraction: float, seed: int, limit: int | None, whole: bool
) -> Iterator[RoutedPiece]:
    """One validation document in every group of 1 / fraction in a row, or of all where they are
    fewer. Its place in the group is drawn from (seed, number of the group), so a document's split
    does not depend on later ones."""
    size = 1 / fraction
    enough = math.ceil(size)
    documents = sum(end for _, end in _limited(corpus, min(enough, limit or enough)))
    if documents == 1 and whole:
        raise UserError("a single record makes no validation split: add records, or give --split")
    if documents == 1:
        yield from _split_one_document(corpus, fraction, limit)
        return
    size = min(size, documents)
    group, index = -1, 0  # index: of the document
    for text, end in _limited(corpus, limit):
        if (group + 1) * size <= index:
            group += 1
            first, last = math.ceil(group * size), math.ceil((group + 1) * size)
            bits = philox_bits(seed, group, range(1), 1, SPLIT)
            chosen = first + int(bits[0, 0]) % (last - first)
        yield "val" if index == chosen else "train", text, end
        index += end


def _split_one_document(
    corpus: Corpus, fraction: float, limit: int | None
) -> Iterator[RoutedPiece]:
    """The end of the only document, a share of its characters, is validation; split at a space if
    possible."""
    characters = sum(len(text) for text, _ in _limited(corpus, limit))
    boundary = characters - max(1, round(characters * fraction))
    if boundary < 1:
        raise UserError(f"the only document has {characters} characters; add documents")
    split, start = "train", 0
    for text, end in _limited(corpus, limit):
        if split == "train" and start + len(text) > boundary:
            place = safe_place(text, boundary - start) or boundary - start
            yield "train", text[:place], True
            split, text, start = "val", text[place:], start + place
        yield split, text, end
        start += len(text)
