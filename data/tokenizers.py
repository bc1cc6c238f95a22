"""Tokenizers: text <-> ids, under three names.

gpt2     GPT-2's byte-pair encoding, 50257 ids (tiktoken's `r50k_base`)
english  a byte-pair encoding of 2048 ids, learned from English stories, for small models, whose
         parameters and time a large vocabulary would use up
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

TOKENIZERS = ("gpt2", "english", "bytes")
END_OF_TEXT = "<|endoftext|>"
# How GPT-2 splits text into words, inside which pairs are merged.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Ids run from 0 to vocab_size - 1; `eot`, the last one, ends a document. Subclasses have a
    name, these numbers, encode_array(text), unsigned integers (n,), in which "<|endoftext|>" is
    plain text, and to_bytes(ids), in which end-of-text has the bytes of its name."""

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids) -> str:
        """Text of `ids` (sequence, array or 1-D tensor); invalid UTF-8 becomes U+FFFD. Raises
        UserError for an id outside the vocabulary."""
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            known = f"the vocabulary of the {self.name!r} tokenizer (0 to {self.vocab_size - 1})"
            raise UserError(f"id {wrong[0]} is not in {known}; was the text made with another one?")
        return self.to_bytes(ids).decode("utf-8", errors="replace")

    def pieces(self, ids) -> list[str]:
        """Text of each of `ids`; joined, they are `decode(ids)`. A character whose bytes are spread
        over several tokens belongs to the one that completes it, U+FFFD to the one that shows that
        the bytes are invalid."""
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in ids.tolist() if hasattr(ids, "tolist") else ids:
            if token == self.eot and pieces:  # no character continues over the end of a document
                pieces[-1] += decoder.decode(b"", final=True)
            pieces.append(decoder.decode(self.to_bytes([token])))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of the text of every id, (vocab_size,); 0 for end-of-text."""
        return np.array([len(self.to_bytes([i])) for i in range(self.eot)] + [0])


class BytesTokenizer(Tokenizer):
    name, vocab_size, eot = "bytes", 257, 256

    def encode_array(self, text: str) -> np.ndarray:
        data = without_lone_surrogates(text).encode()
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def to_bytes(self, ids: list[int]) -> bytes:
        return b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids)


class BytePairTokenizer(Tokenizer):
    """An encoding of tiktoken."""

    def __init__(self, name: str, encoding):
        self.name, self.encoding, self.to_bytes = name, encoding, encoding.decode_bytes
        self.vocab_size, self.eot = encoding.n_vocab, encoding.eot_token

    def encode_array(self, text: str) -> np.ndarray:
        text = without_lone_surrogates(text)
        encode = functools.partial(self.encoding.encode_to_numpy, disallowed_special=())
        try:
            return encode(text).astype(np.uint16)
        except ValueError:  # a million spaces in a row overflow the regular expression's stack
            parts = re.split(r"(\s{100000})(?=\s)", text)
            return np.concatenate([encode(part) for part in parts]).astype(np.uint16)


def without_lone_surrogates(text: str) -> str:
    """JSON can hold lone surrogates, which UTF-8 cannot: they become U+FFFD, as in tiktoken."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, one of TOKENIZERS."""
    check_value(name, Literal[TOKENIZERS], "the tokenizer")
    if name == "bytes":
        return BytesTokenizer()
    import tiktoken

    if name == "english":
        # Not tiktoken's own reader of such files, which keeps a copy of them in its cache.
        lines = Path(__file__).with_name("english.tiktoken").read_bytes().splitlines()
        ranks = {base64.b64decode(token): int(i) for token, i in map(bytes.split, lines)}
        words = {"pat_str": GPT2_WORDS, "special_tokens": {END_OF_TEXT: len(ranks)}}
        return BytePairTokenizer(name, tiktoken.Encoding(name, mergeable_ranks=ranks, **words))
    try:
        return BytePairTokenizer(name, tiktoken.get_encoding("r50k_base"))
    except Exception as error:  # of requests, an OSError, a wrong hash: one remedy for all
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"tiktoken could not get r50k_base, the file of the gpt2 tokenizer ({reason}). "
            "Without a network, set TIKTOKEN_CACHE_DIR to a folder that holds it as "
            "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4, or use --tokenizer bytes"
        ) from error
