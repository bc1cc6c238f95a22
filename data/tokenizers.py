"""Tokenizers: text <-> ids, under three names.

gpt2     GPT-2's byte-pair encoding, 50257 ids; read from tiktoken's `r50k_base`, which has the same
         ids in one file
english  a small byte-pair encoding, 2048 ids, learned from English stories (learn_vocabulary.py):
         for small models, whose parameters and time a large vocabulary would use up
bytes    the UTF-8 bytes themselves, 256 ids and one for end-of-text: needs no file
"""

import base64
import codecs
import functools
import re
from pathlib import Path
from typing import Literal

import numpy as np

from runtime.errors import UserError
from runtime.validation import check_value

END_OF_TEXT = "<|endoftext|>"
# \s of tiktoken's regular expressions (Unicode White_Space); Python's \s holds U+001C-U+001F too
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# How GPT-2 cuts a text into words, inside of which pairs are merged.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LONG_SPACE = 100_000  # characters of white space in a row, at which a text is cut


class Tokenizer:
    """What the tokenizers share.

    Attributes: `name`; `vocab_size` (ids run from 0 to vocab_size - 1); `eot`, the id that ends a
    document.
    """

    name: str
    vocab_size: int
    eot: int

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of `text` as an unsigned integer array (n,); "<|endoftext|>" in it is text like any
        other, never the special token."""
        raise NotImplementedError  # every tokenizer has its own

    def _bytes_of(self, ids: list[int]) -> bytes:
        """The bytes that `ids` stand for; those of end-of-text are its name."""
        raise NotImplementedError  # every tokenizer has its own

    def encode(self, text: str) -> list[int]:
        """`encode_array` as a list."""
        return self.encode_array(text).tolist()

    def decode(self, ids) -> str:
        """Text of `ids` (any sequence, array or 1-D tensor of integers).

        End-of-text becomes "<|endoftext|>"; bytes that are no UTF-8 become U+FFFD. Raises
        ValueError for an id outside the vocabulary.
        """
        return self._bytes_of(self._checked(ids)).decode("utf-8", errors="replace")

    def pieces(self, ids) -> list[str]:
        """Text of each of `ids` on its own (same input as `decode`); joined, the pieces are exactly
        `decode(ids)`.

        A character whose bytes are spread over several tokens belongs to the token that completes
        it; the earlier ones get "". Bytes that are no UTF-8 become U+FFFD in the piece of the token
        that shows it: their own, or the next one where that could still have completed a character.
        Raises ValueError as `decode` does.
        """
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in self._checked(ids):
            # no character goes on over the end of a document: what is open is shown before it
            if token == self.eot and pieces:
                pieces[-1] += decoder.decode(b"", final=True)
            pieces.append(decoder.decode(self._bytes_of([token])))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of the text of every id, (vocab_size,); 0 for end-of-text, which is none."""
        lengths = np.array([len(self._bytes_of([i])) for i in range(self.vocab_size)])
        lengths[self.eot] = 0
        return lengths

    def _checked(self, ids) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise UserError(
                f"id {wrong} is not in the vocabulary of the {self.name!r} tokenizer, whose ids "
                f"are 0 to {self.vocab_size - 1}; was the text made with another tokenizer?"
            )
        return ids


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def encode_array(self, text: str) -> np.ndarray:
        data = _without_lone_surrogates(text).encode("utf-8")
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def _bytes_of(self, ids: list[int]) -> bytes:
        return b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids)


class BytePairTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken; the id after the last of its vocabulary ends a document."""

    def __init__(self, encoding):
        self._encoding = encoding

    def encode_array(self, text: str) -> np.ndarray:
        text = _without_lone_surrogates(text)
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        # the regular expression runs out of stack in about a million spaces in a row
        except ValueError:
            parts = _cut_long_spaces(text)
            encode = self._encoding.encode_to_numpy
            return np.concatenate([encode(part, disallowed_special=()) for part in parts])

    def _bytes_of(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's byte-pair encoding. Raises ValueError when its file cannot be had."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self):
        super().__init__(_load_r50k())


class EnglishTokenizer(BytePairTokenizer):
    """The byte-pair encoding of data/english.tiktoken."""

    name = "english"
    vocab_size = 2048
    eot = 2047

    def __init__(self):
        super().__init__(_load_english(self.eot))


TOKENIZERS = {"gpt2": GPT2Tokenizer, "english": EnglishTokenizer, "bytes": BytesTokenizer}


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`, one of TOKENIZERS. Raises ValueError for any other name."""
    check_value(name, Literal[tuple(TOKENIZERS)], "the tokenizer")
    return TOKENIZERS[name]()


def _tiktoken(name: str):
    # imported here: whoever works with bytes needs neither tiktoken nor its file
    try:
        import tiktoken
    except ImportError as error:
        raise UserError(
            f"the {name} tokenizer needs the package tiktoken: pip install tiktoken, "
            "or use the bytes tokenizer (--tokenizer bytes)"
        ) from error
    return tiktoken


def _load_english(eot: int):
    # Not tiktoken's own reader of such files, which keeps a copy of them in its cache.
    lines = Path(__file__).with_name("english.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(i) for token, i in map(bytes.split, lines)}
    return _tiktoken("english").Encoding(
        "english",
        pat_str=GPT2_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: eot},
        explicit_n_vocab=eot + 1,
    )


def _load_r50k():
    tiktoken = _tiktoken("gpt2")
    try:
        return tiktoken.get_encoding("r50k_base")
    # requests' errors, OSErrors, a hash that does not match: one remedy for all
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            "tiktoken could not get r50k_base, the file of the gpt2 tokenizer "
            f"({type(error).__name__}: {reason}). Without a network, set TIKTOKEN_CACHE_DIR to a "
            "folder that holds it as 0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4 (tiktoken's cache "
            "name for r50k_base.tiktoken); or use the bytes tokenizer (--tokenizer bytes)"
        ) from error


def _cut_long_spaces(text: str) -> list[str]:
    """`text` cut before the last character of very long runs of white space, which leaves GPT-2's
    ids as they are: it splits text so that such a run, without its last character, is one word."""
    cuts = [0]
    for run in re.finditer(f"[{WHITE_SPACE}]{{{LONG_SPACE},}}", text):
        if run.end() < len(text):
            cuts.append(run.end() - 1)
    cuts.append(len(text))
    return [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]


def _without_lone_surrogates(text: str) -> str:
    """`text` with surrogates that no UTF-8 can hold (JSON lets them through) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
