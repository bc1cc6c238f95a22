"""Tokenizers: text <-> ids, under four names, or of a file.

gpt2     GPT-2's byte-pair encoding, 50257 ids (tiktoken's `r50k_base`)
english  a byte-pair encoding of 2048 ids, learned from English stories, for small models
bytes    the UTF-8 bytes, 256 ids and one for end-of-text: needs no file
chorales notes of four voices in turn, C2 to A5, and rests: 48 ids
alphabet:ACDE... the characters of a string, in its order, and end-of-text

Files, which are kept beside data, runs and exports under the names tokenizer.tiktoken, a vocabulary
of the user's, and tokenizer.json, that of a pretrained model of `transformers`."""

import base64
import codecs
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..runtime.errors import UserError, reason_of
from ..runtime.files import write_atomically
from ..runtime.validation import check_value, expand_home, read_bounded

TOKENIZERS = ("gpt2", "english", "bytes", "chorales")
OWN = "tokenizer.tiktoken"  # the name of a tokenizer of the user's, and of its file
HUB = "tokenizer.json"  # the same of a pretrained model
FILES = (OWN, HUB)
RECORDED = (
    "tokenizer",
    "tokenizer_sha256",
    "vocab_size",
)  # keys of meta.json and of `Loaded`
ALPHABET = "alphabet:"  # and its characters: a name
END_OF_TEXT = "<|endoftext|>"
# What ends a text in a tokenizer.json: of Llama 2 and 3, Mistral, Qwen, SmolLM2, DeepSeek.
ENDS = re.compile("</s>|<eos>|<.?end.?of.?(text|sentence).?>", re.IGNORECASE)
MAX_VOCABULARY = 256 << 20  # bytes of a tokenizer.json
VOICES = ("soprano", "alto", "tenor", "bass")
# MIDI pitches of a chorale
LOWEST = 36
HIGHEST = 81
NOTES = "C C# D D# E F F# G G# A A# B".split()
FLATS = {"Db": "C#", "Eb": "D#", "Gb": "F#", "Ab": "G#", "Bb": "A#"}
ENGLISH = Path(__file__).with_name("english.tiktoken")
# How GPT-2 splits text into words, inside which pairs are merged.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Ids run from 0 to vocab_size - 1; `eot` ends a document. Subclasses have name, vocab_size,
    eot, encode_array(text), (n,) of `dtype`, to which "<|endoftext|>" is plain text, to_bytes(ids)
    with that text for end-of-text, and, except HubTokenizer, ranks (ids by a token's bytes)."""

    adds_space = False  # before a text

    @property
    def dtype(self) -> str:  # of token files
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @functools.cached_property
    def file(self) -> bytes:
        """The vocabulary as a .tiktoken file, in the order of the ids."""
        lines = sorted((i, base64.b64encode(token)) for token, i in self.ranks.items())
        return b"".join(b"%b %d\n" % (token, i) for i, token in lines)

    @functools.cached_property
    def sha256(self) -> str:  # the identity of the vocabulary
        return hashlib.sha256(self.file).hexdigest()

    def keep(self, folder: Path) -> None:
        """Write a vocabulary that is a file into a folder, where `get_tokenizer` finds it."""
        if self.name in FILES:
            write_atomically(folder / self.name, lambda file: file.write(self.file))

    def check(self, sha256: str | None) -> None:
        """Raise UserError if metadata record another vocabulary; None: they record none."""
        if sha256 not in (None, self.sha256):
            what = f"the vocabulary of {self.name} has changed since the data or model"
            sums = f"sha256 {self.sha256[:12]}, was {sha256[:12]}"
            raise UserError(f"{what} was made ({sums}): put its file back")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_after(self, text: str) -> list[int]:
        """The ids of a text that follows another one."""
        return self.encode(text)

    def decode(self, ids) -> str:
        """Text of `ids` (sequence, array or 1-D tensor); invalid UTF-8 becomes U+FFFD."""
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            known = f"the vocabulary of the {self.name!r} tokenizer (0 to {self.vocab_size - 1})"
            raise UserError(
                f"id {wrong[0]} is not in {known}; was the text made with another one?"
            )
        return self.to_bytes(ids).decode("utf-8", errors="replace")

    def pieces(self, ids) -> list[str]:
        """Text of each of `ids`; joined, they are `decode(ids)`. A character of several tokens
        belongs to the one that completes it, U+FFFD to the one that shows that it is invalid."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for token in ids.tolist() if hasattr(ids, "tolist") else ids:
            if (
                token == self.eot and pieces
            ):  # no character continues over the end of a document
                pieces[-1] += decoder.decode(b"", final=True)
            pieces.append(decoder.decode(self.to_bytes([token])))
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of the text of every id, (vocab_size,); 0 for end-of-text."""
        ids = range(self.vocab_size)
        return np.array([len(self.to_bytes([i])) if i != self.eot else 0 for i in ids])

    def pitches(self, ids: list[int]) -> list[int] | None:
        """MIDI pitches of `ids`, -1 for a rest; None where they are text."""
        return None


class BytesTokenizer(Tokenizer):
    name = "bytes"
    vocab_size = 257
    eot = 256
    ranks = {bytes([i]): i for i in range(256)}

    def encode_array(self, text: str) -> np.ndarray:
        data = without_lone_surrogates(text).encode()
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def to_bytes(self, ids: list[int]) -> bytes:
        return b"".join(
            END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids
        )


class AlphabetTokenizer(Tokenizer):
    """Characters, such as amino acids; text with another one is an error."""

    def __init__(self, letters: str):
        if twice := sorted({letter for letter in letters if letters.count(letter) > 1}):
            raise UserError(
                f"--alphabet has {twice[0]!r} twice; give each character once"
            )
        self.letters = letters
        self.name = ALPHABET + letters
        self.eot = len(letters)
        self.vocab_size = self.eot + 1
        self.ranks = {letter.encode(): i for i, letter in enumerate(letters)}

    def encode_array(self, text: str) -> np.ndarray:
        codes, known = (
            np.frombuffer(t.encode("utf-32-le"), np.uint32)
            for t in (text, self.letters)
        )
        order = known.argsort()
        places = np.searchsorted(known[order], codes).clip(max=self.eot - 1)
        if (wrong := known[order][places] != codes).any():
            found = f"{chr(codes[wrong][0])!r} is not in the alphabet {self.letters!r}"
            raise UserError(f"{found}; add it, or leave such text out")
        return order[places].astype(self.dtype)

    def to_bytes(self, ids: list[int]) -> bytes:
        return "".join([*self.letters, END_OF_TEXT][i] for i in ids).encode()


class ChoralesTokenizer(Tokenizer):
    """Notes of the four VOICES in turn: a line of text is a sixteenth, "C5  G4  E4  C3". Id 0 is a
    rest, r; ids from 1 are the pitches from LOWEST. Bb4 is read as A#4."""

    name = "chorales"
    vocab_size = HIGHEST - LOWEST + 3
    eot = HIGHEST - LOWEST + 2
    names = [
        "r",
        *(f"{NOTES[p % 12]}{p // 12 - 1}" for p in range(LOWEST, HIGHEST + 1)),
    ]
    ranks = {name.encode(): i for i, name in enumerate(names)}

    def encode_array(self, text: str) -> np.ndarray:
        words = [FLATS.get(word[:2], word[:2]) + word[2:] for word in text.split()]
        if wrong := [word for word in words if word not in self.names]:
            advice = "write C2 to A5, such as F#4 or Bb4, or r for a rest"
            raise UserError(f"{wrong[0][:40]!r} is not a note of a chorale; {advice}")
        return np.array([self.ranks[word.encode()] for word in words], np.uint16)

    def pieces(self, ids) -> list[str]:
        names = [([*self.names, END_OF_TEXT])[i] for i in ids]
        return [n + "\n" if i % 4 == 3 else n.ljust(4) for i, n in enumerate(names)]

    def to_bytes(self, ids: list[int]) -> bytes:
        return "".join(self.pieces(ids)).encode()

    def byte_lengths(self) -> np.ndarray:
        return np.full(
            self.vocab_size, np.nan
        )  # bits per byte of text mean nothing here

    def pitches(self, ids: list[int]) -> list[int]:
        return [i - 1 + LOWEST if 0 < i < self.eot else -1 for i in ids]


class BytePairTokenizer(Tokenizer):
    """An encoding of tiktoken."""

    def __init__(self, name: str, encoding):
        self.name = name
        self.encoding = encoding
        self.to_bytes = encoding.decode_bytes
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token
        self.ranks = encoding._mergeable_ranks

    def encode_array(self, text: str) -> np.ndarray:
        ids = self.encoding.encode_to_numpy(
            without_lone_surrogates(text), disallowed_special=()
        )
        return ids.astype(np.uint16)


class HubTokenizer(Tokenizer):
    """The tokenizer.json of a pretrained model, read by the library `tokenizers`: of bytes (GPT-2,
    Llama 3, Qwen), or of words in which "▁" is a space (Llama 2, Mistral)."""

    name = HUB

    def __init__(self, path: Path):
        import tokenizers

        if not path.is_file():
            raise UserError(f"there is no {path}; put the model's tokenizer.json there")
        self.file = read_bounded(path, MAX_VOCABULARY)
        try:
            self.inner = tokenizers.Tokenizer.from_str(self.file.decode())
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"{path} is not a tokenizer.json: {reason_of(error)}"
            ) from None
        self.inner.no_truncation()
        self.inner.no_padding()
        ids = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        ends = sorted(i for token, i in ids.items() if ENDS.fullmatch(token))
        if not ends:
            raise UserError(f"{path} has no token that ends a text, such as </s>")
        self.eot = ends[0]
        self.starts = self.inner.encode("").ids[:1]  # what it writes before a text
        self.inner.encode_special_tokens = True  # in a text they are plain text
        added = self.inner.get_added_tokens_decoder()
        of_bytes = '"ByteLevel"' in json.dumps(json.loads(self.file).get("decoder"))
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        self.bytes = [b""] * self.vocab_size
        for token, i in ids.items():
            byte = not of_bytes and re.fullmatch("<0x([0-9A-F]{2})>", token)
            if byte:
                self.bytes[i] = bytes.fromhex(byte[1])
            elif i in added:
                self.bytes[i] = token.encode()
            elif of_bytes and letters.keys() >= set(token):
                self.bytes[i] = bytes(letters[letter] for letter in token)
            else:
                self.bytes[i] = token.replace("▁", " ").encode()
        self.bytes[self.eot] = END_OF_TEXT.encode()
        self.adds_space = self.to_bytes(self.encode("a")).startswith(b" ")

    def encode_array(self, text: str) -> np.ndarray:
        text = without_lone_surrogates(text)
        return np.array(
            self.inner.encode(text, add_special_tokens=False).ids, self.dtype
        )

    def encode_after(self, text: str) -> list[int]:
        if not self.adds_space:
            return self.encode(text)
        for (
            start
        ) in "\n0.":  # after a character that does not merge with the first of the text
            before = self.encode(start)
            whole = self.encode(start + text)
            if whole[: len(before)] == before:
                break
        return whole[len(before) :]

    def to_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.bytes[i] for i in ids)

    def pieces(self, ids) -> list[str]:
        pieces = super().pieces(ids)
        if self.adds_space and pieces:
            pieces[0] = pieces[0].removeprefix(" ")
        return pieces

    def decode(self, ids) -> str:
        text = super().decode(ids)
        return text.removeprefix(" ") if self.adds_space else text


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def without_lone_surrogates(text: str) -> str:
    """JSON can hold lone surrogates, which UTF-8 cannot: they become U+FFFD, as in tiktoken."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def other_tokenizer(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, tuple]:
    """{key: (theirs, ours)} of the RECORDED keys that differ, where both descriptions have them."""
    pairs = {key: (theirs.get(key), ours.get(key)) for key in RECORDED}
    if pairs["tokenizer_sha256"][0] == pairs["tokenizer_sha256"][1] is not None:
        del pairs["tokenizer"]  # one vocabulary under two names
    return {
        key: pair
        for key, pair in pairs.items()
        if None not in pair and pair[0] != pair[1]
    }


def get_tokenizer(
    name: str, sha256: str | None = None, folder: Path | None = None
) -> Tokenizer:
    """The tokenizer of this name: one of TOKENIZERS, alphabet:LETTERS, a path FILE.tiktoken or
    tokenizer.json, or OWN or HUB in `folder` or up to two folders above it. Raises UserError for
    another sha256."""
    if name in FILES and folder:
        places = [place / name for place in (folder, *folder.absolute().parents[:2])]
        name = str(next((file for file in places if file.is_file()), places[0]))
    if name.startswith(ALPHABET):
        tokenizer = AlphabetTokenizer(name.removeprefix(ALPHABET))
    elif name.endswith(".tiktoken"):
        tokenizer = _read_file(expand_home(name))
    elif name.endswith(".json"):
        tokenizer = HubTokenizer(expand_home(name))
    else:
        tokenizer = _get_known(name)
    tokenizer.check(sha256)
    return tokenizer


def _read_file(path: Path) -> BytePairTokenizer:
    """The tokenizer of a .tiktoken file: the base64 of a token and its id a line, ids from 0."""
    import tiktoken

    if not path.exists() or path.is_file() and not path.stat().st_size:
        advice = f"give one of at least 256 tokens, or copy it back ({OWN} of data, run or export)"
        raise UserError(f"the vocabulary {path} is missing or empty: {advice}")
    # Not tiktoken's own reader of such files, which keeps a copy of them in its cache.
    name = "english" if path == ENGLISH else OWN
    ranks = {}
    for number, line in enumerate(read_bounded(path).splitlines(), 1):
        try:
            token, i = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(i)
        except ValueError:
            raise UserError(
                f"{path} line {number}: not the base64 of a token and its id"
            ) from None
        if len(ranks) != number:
            raise UserError(f"{path} line {number}: this token is in it twice")
    if sorted(ranks.values()) != [*range(len(ranks))] or not 256 <= len(ranks) < 2**16:
        raise UserError(
            f"{path}: ids must be 0, 1, ... each once, at least 256 and below 65,536"
        )
    if any(bytes([i]) not in ranks for i in range(256)):
        raise UserError(f"{path}: each of the 256 bytes must be a token")
    words = {"pat_str": GPT2_WORDS, "special_tokens": {END_OF_TEXT: len(ranks)}}
    return BytePairTokenizer(
        name, tiktoken.Encoding(name, mergeable_ranks=ranks, **words)
    )


@functools.cache
def _get_known(name: str) -> Tokenizer:
    check_value(name, Literal[TOKENIZERS], "the tokenizer")
    if name in ("bytes", "chorales"):
        return BytesTokenizer() if name == "bytes" else ChoralesTokenizer()
    if name == "english":
        return _read_file(ENGLISH)
    import tiktoken

    try:
        return BytePairTokenizer(name, tiktoken.get_encoding("r50k_base"))
    except (
        Exception
    ) as error:  # of requests, an OSError, a wrong hash: one remedy for all
        what = (
            f"tiktoken could not get r50k_base, the gpt2 tokenizer ({reason_of(error)})"
        )
        place = "a folder that holds it as 0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
        advice = f"set TIKTOKEN_CACHE_DIR to {place}, or use --tokenizer bytes"
        raise UserError(f"{what}. Without a network, {advice}") from error
