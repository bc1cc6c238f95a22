"""Tokenizers: text <-> ids, under three names.

gpt2     GPT-2's byte-pair encoding, 50257 ids (tiktoken's `r50k_base`)
english  a byte-pair encoding of 2048 ids, learned from English stories (learn_vocabulary.py), for
         small models, whose parameters and time a large vocabulary would use up
bytes    the UTF-8 bytes, 256 ids and one for end-of-text: needs no file
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
# How GPT-2 splits text into words, inside which pairs are merged.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # \s of tiktoken
# Before the last character of a long run of white space, where GPT-2 splits text anyway.
LONG_SPACE = re.compile(rf"(?=[{WHITE_SPACE}][^{WHITE_SPACE}])(?<=[{WHITE_SPACE}]{{100000}})")


class Tokenizer:
    """Ids run from 0 to vocab_size - 1; `eot` ends a document. Subclasses have encode_array(text),
    an array of unsigned integers (n,), in which "<|endoftext|>" is plain text, and _bytes_of(ids),
    in which the bytes of end-of-text are its name."""

    name: str
    vocab_size: int
    eot: int

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids) -> str:
        """Text of `ids` (sequence, array or 1-D tensor); invalid UTF-8 becomes U+FFFD. Raises
        UserError for an id outside the vocabulary."""
        return self._bytes_of(self._checked(ids)).decode("utf-8", errors="replace")

    def pieces(self, ids) -> list[str]:
        """Text of each of `ids`; joined, they are `decode(ids)`. A character whose bytes are spread
        over several tokens belongs to the one that completes it, U+FFFD to the one that shows that
        the bytes are invalid."""
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in self._checked(ids):
            if token == self.eot and pieces:  # no character continues over the end of a document
                pieces[-1] += decoder.decode(b"", final=True)
            pieces.append(decoder.decode(self._bytes_of([token])))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of the text of every id, (vocab_size,); 0 for end-of-text."""
        lengths = np.array([len(self._bytes_of([i])) for i in range(self.vocab_size)])
        lengths[self.eot] = 0
        return lengths

    def _checked(self, ids) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            known = f"the vocabulary of the {self.name!r} tokenizer (0 to {self.vocab_size - 1})"
            raise UserError(f"id {wrong} is not in {known}; was the text made with another one?")
        return ids


class BytesTokenizer(Tokenizer):
    name, vocab_size, eot = "bytes", 257, 256

    def encode_array(self, text: str) -> np.ndarray:
        data = _without_lone_surrogates(text).encode("utf-8")
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def _bytes_of(self, ids: list[int]) -> bytes:
        return b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids)


class BytePairTokenizer(Tokenizer):
    """An encoding of tiktoken; its last id ends a document."""

    def __init__(self):
        import tiktoken

        self._encoding = self._load(tiktoken)

    def encode_array(self, text: str) -> np.ndarray:
        text = _without_lone_surrogates(text)
        encode = functools.partial(self._encoding.encode_to_numpy, disallowed_special=())
        try:
            return encode(text)
        except ValueError:  # a million spaces in a row overflow the regular expression's stack
            return np.concatenate([encode(part) for part in LONG_SPACE.split(text)])

    def _bytes_of(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)


class GPT2Tokenizer(BytePairTokenizer):
    name, vocab_size, eot = "gpt2", 50257, 50256

    def _load(self, tiktoken):
        try:
            return tiktoken.get_encoding("r50k_base")
        except Exception as error:  # of requests, an OSError, a wrong hash: one remedy for all
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"tiktoken could not get r50k_base, the file of the gpt2 tokenizer ({reason}). "
                "Without a network, set TIKTOKEN_CACHE_DIR to a folder that holds it as "
                "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4, or use --tokenizer bytes"
            ) from error


class EnglishTokenizer(BytePairTokenizer):
    name, vocab_size, eot = "english", 2048, 2047

    def _load(self, tiktoken):
        # Not tiktoken's own reader of such files, which keeps a copy of them in its cache.
        lines = Path(__file__).with_name("english.tiktoken").read_bytes().splitlines()
        ranks = {base64.b64decode(token): int(i) for token, i in map(bytes.split, lines)}
        special = {END_OF_TEXT: self.eot}
        return tiktoken.Encoding(
            self.name, pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens=special
        )


TOKENIZERS = {"gpt2": GPT2Tokenizer, "english": EnglishTokenizer, "bytes": BytesTokenizer}


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, one of TOKENIZERS."""
    check_value(name, Literal[tuple(TOKENIZERS)], "the tokenizer")
    return TOKENIZERS[name]()


def _without_lone_surrogates(text: str) -> str:
    """`text` with surrogates that UTF-8 cannot hold (JSON lets them through) as U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
