"""Tokenizers: text <-> ids, under two names.

gpt2   GPT-2's byte-pair encoding, 50257 ids; read from tiktoken's `r50k_base`, which has the same ids in one file
bytes  the UTF-8 bytes themselves, 256 ids and one for end-of-text: needs no file, suits small models
"""

import codecs
import difflib
import functools
import re

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# \s of tiktoken's regular expressions (Unicode White_Space); Python's \s also holds U+001C to U+001F
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class Tokenizer:
    """What the two tokenizers share.

    Attributes: `name`; `vocab_size` (ids run from 0 to vocab_size - 1); `eot`, the id that ends a document.
    """

    name: str
    vocab_size: int
    eot: int

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of `text` as an unsigned integer array (n,); "<|endoftext|>" in it is text like any other."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the string "<|endoftext|>" in it is text like any other, never the special token."""
        return self.encode_array(text).tolist()

    def decode(self, ids) -> str:
        """Text of `ids` (any sequence, array or 1-D tensor of integers).

        End-of-text becomes "<|endoftext|>"; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id
        outside the vocabulary.
        """
        return self._decode(self._checked(ids))

    def pieces(self, ids) -> list[str]:
        """Text of each of `ids` on its own (same input as `decode`); joined, the pieces are exactly `decode(ids)`.

        A character whose bytes are spread over several tokens belongs to the token that completes it; the earlier
        ones get "". Bytes that are no UTF-8 become U+FFFD in the piece of the token that shows it: their own, or the
        next one where that could still have completed a character. Raises ValueError as `decode` does.
        """
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in self._checked(ids):
            if (
                token == self.eot and pieces
            ):  # nothing goes on over the end of a text: its piece is its name alone
                pieces[-1] += decoder.decode(b"", final=True)
            pieces.append(decoder.decode(self._bytes(token)))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def _checked(self, ids) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"id {wrong} is not in the vocabulary of the {self.name!r} tokenizer, "
                f"whose ids are 0 to {self.vocab_size - 1}; was the text made with another tokenizer?"
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def _bytes(self, token: int) -> bytes:
        raise NotImplementedError


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(_without_lone_surrogates(text).encode("utf-8"), dtype=np.uint8).astype(
            np.uint16
        )

    def _decode(self, ids: list[int]) -> str:
        documents, start = [], 0
        for _ in range(ids.count(self.eot)):
            end = ids.index(self.eot, start)
            documents.append(bytes(ids[start:end]))
            start = end + 1
        documents.append(bytes(ids[start:]))
        return END_OF_TEXT.encode().join(documents).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        return END_OF_TEXT.encode() if token == self.eot else bytes([token])


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding; 50256 ends a document. Raises ValueError when its file cannot be had."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self):
        self._encoding = _load_r50k()

    def encode_array(self, text: str) -> np.ndarray:
        text = _without_lone_surrogates(text)
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except (
            ValueError
        ):  # the regular expression runs out of stack in about a million spaces in a row
            parts = [
                self._encoding.encode_to_numpy(part, disallowed_special=())
                for part in _cut_long_spaces(text)
            ]
            return np.concatenate(parts)

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids, errors="replace")

    def _bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": BytesTokenizer}


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name` ("gpt2" or "bytes"). Raises ValueError for any other name."""
    if name not in TOKENIZERS:
        near = difflib.get_close_matches(str(name).lower(), TOKENIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown tokenizer {name!r}: {hint}the tokenizers are {', '.join(map(repr, TOKENIZERS))}"
        )
    return TOKENIZERS[name]()


def _load_r50k():
    # imported here: whoever works with bytes needs neither tiktoken nor its file
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError(
            "the gpt2 tokenizer needs the package tiktoken: pip install tiktoken, "
            "or use the bytes tokenizer (--tokenizer bytes)"
        ) from error
    try:
        return tiktoken.get_encoding("r50k_base")
    except (
        Exception
    ) as error:  # requests' errors, OSErrors, a hash that does not match: one remedy for all
        raise ValueError(
            "tiktoken could not get r50k_base, the file of the gpt2 tokenizer "
            f"({type(error).__name__}: {_shorten(str(error))}). Without a network, set TIKTOKEN_CACHE_DIR "
            "to a folder that holds it as 0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4 (tiktoken's cache name "
            "for r50k_base.tiktoken); or use the bytes tokenizer (--tokenizer bytes)"
        ) from error


def _cut_long_spaces(text: str) -> list[str]:
    """`text` cut before the last character of very long runs of white space, which leaves GPT-2's ids as they are.

    GPT-2 splits text so that such a run, without its last character, is one word: the cut is where it cuts as well.
    """
    runs = (match.span() for match in re.finditer(f"[{WHITE_SPACE}]+", text))
    ends = [end - 1 for start, end in runs if end - start >= 100_000 and end < len(text)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _shorten(message: str, limit: int = 200) -> str:
    message = " ".join(message.split())
    return message if len(message) <= limit else message[:limit] + "..."


def _without_lone_surrogates(text: str) -> str:
    """`text` with surrogates that no UTF-8 can hold (JSON lets them through) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
