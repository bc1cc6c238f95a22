"""Which document goes into which split. Validation documents are drawn from the seed."""

import math
from collections.abc import Iterator

from data.sources import Corpus, Piece, safe_cut
from runtime.errors import UserError
from runtime.randomness import SPLIT, philox_bits

RoutedPiece = tuple[str, str, bool]  # split, text, whether the document ends here


def route(
    corpora: dict[str, Corpus],
    fraction: float | None,
    seed: int,
    limit: int | None,
    records: bool = False,
) -> Iterator[RoutedPiece]:
    """Every piece with its split, in reading order.

    Args:
        corpora: the documents of each split.
        fraction: share of the documents of "train" that becomes "val"; None: none of them.
        seed: of that draw.
        limit: on the documents of the first split, which are those of --source; None: all.
        records: documents are records, which are never cut.
    """
    for number, (split, corpus) in enumerate(corpora.items()):
        if split == "train" and fraction is not None:
            yield from _split_documents(corpus, fraction, seed, limit, records)
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


def _split_documents(
    corpus: Corpus, fraction: float, seed: int, limit: int | None, records: bool
) -> Iterator[RoutedPiece]:
    """One validation document in every group of 1 / fraction in a row; both splits get at least one
    document.

    The place in the group is drawn from (seed, number of the group), so a document's split depends
    on nothing that comes after it, except that a corpus of fewer documents than one group is a
    group itself.
    """
    group_size = 1 / fraction
    enough = math.ceil(group_size)
    documents = corpus.count(min(enough, limit or enough))
    if documents == 1 and records:
        raise UserError(
            "a single record makes no training and validation split: add records, or give --split"
        )
    if documents == 1:
        yield from _split_one_document(corpus, fraction, limit)
        return
    group_size = min(group_size, documents)
    group, index = 0, 0  # index: of the document
    chosen = _chosen(seed, group, group_size)
    for text, end in _limited(corpus, limit):
        yield "val" if index == chosen else "train", text, end
        index += end
        while chosen < index:
            group += 1
            chosen = _chosen(seed, group, group_size)


def _chosen(seed: int, group: int, group_size: float) -> int:
    """The index of the document that group number `group` gives to validation."""
    first, last = math.ceil(group * group_size), math.ceil((group + 1) * group_size)
    bits = philox_bits(seed, group, range(1), 1, SPLIT)
    return first + int(bits[0, 0]) % (last - first)


def _split_one_document(
    corpus: Corpus, fraction: float, limit: int | None
) -> Iterator[RoutedPiece]:
    """The end of the only document is validation: the given share of its characters, cut at a space
    if possible."""
    characters = sum(len(text) for text, _ in _limited(corpus, limit))
    boundary = characters - max(1, round(characters * fraction))
    if boundary < 1:
        raise UserError(
            f"the only document has {characters} characters, too few for a training and a "
            "validation split; add documents"
        )
    split, start = "train", 0
    for text, end in _limited(corpus, limit):
        if split == "train" and start + len(text) > boundary:
            cut = safe_cut(text, boundary - start) or boundary - start
            yield "train", text[:cut], True
            split, text, start = "val", text[cut:], start + cut
        yield split, text, end
        start += len(text)
