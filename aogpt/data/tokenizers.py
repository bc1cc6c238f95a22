"""Tokenizers: text <-> ids, under three names, of an alphabet, or of a file.

gpt2     GPT-2's byte-pair encoding, 50257 ids (tiktoken's `r50k_base`)
english  a byte-pair encoding of 2048 ids, learned from stories, for small models
bytes    the UTF-8 bytes, 256 ids and one for end-of-text: needs no file
alphabet:ACDE... the characters of a string, in its order, and end-of-text

A vocabulary of the user's (tokenizer.tiktoken) and that of a pretrained model of
`transformers` (tokenizer.json) are files, which are copied into data, runs and
exports."""

import base64
import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from ..runtime.errors import UserError, reason_of
from ..runtime.files import write_atomically, write_json
from ..runtime.validation import check_value, expand_home, read_bounded, read_json

TOKENIZERS = ("gpt2", "english", "bytes")
OWN = "tokenizer.tiktoken"  # the name of a tokenizer of the user's, and of its file
HUB = "tokenizer.json"  # the same of a pretrained model
HUB_SETTINGS = "tokenizer_config.json"  # beside HUB: which tokens begin and end a text
FILES = (OWN, HUB)
# Keys of meta.json and of `Loaded` that identify a tokenizer. The id that ends a text
# is not among them: a model may start from one that ends texts with another token.
RECORDED = ("tokenizer", "tokenizer_sha256", "vocab_size")
ALPHABET = "alphabet:"  # and its characters: a name
END_OF_TEXT = "<|endoftext|>"
# Names of the token that ends a text, where no file beside a tokenizer.json says it:
# of Llama 2 and 3, Mistral, Qwen, SmolLM2, DeepSeek.
ENDS = re.compile("</s>|<eos>|<.?end.?of.?(text|sentence).?>", re.IGNORECASE)
# A key of the settings beside it in exports of earlier versions: {"file": its sha256,
# "source": that of the file with the same ids for which it stands}.
SOURCE = "aogpt_source"
# Of a tokenizer.json; each id needs memory, also one of no token.
VocabSize = Annotated[int, Interval(ge=1, le=1 << 22)]
ENGLISH = Path(__file__).with_name("english.tiktoken")
# The sha256 of GPT-2's ids and tokens, without end-of-text (`is_gpt2s_vocabulary`).
GPT2_SHA256 = "4c9d30e24aa2b6a802cbe721e72c4ea9f4ac076781eafb0686f6ae4019f7f130"
GPT2_END = 50256
# How GPT-2 splits text into words, inside which pairs are merged.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A run of this many white-space characters is encoded by itself: the stack of
# tiktoken's regular expressions overflows at some 500,000 of them.
LONG_RUN = re.compile(r"\s{65536}")


class Tokenizer:
    """Ids run from 0 to vocab_size - 1; `eot` ends a document. Subclasses have name,
    vocab_size, eot, encode_array(text), (n,) of `dtype`, to which "<|endoftext|>" is
    plain text, and, except HubTokenizer, ranks (ids by a token's bytes)."""

    name: str
    vocab_size: int
    eot: int
    adds_space = False  # before a text
    starts: list[int] = []  # ids that a pretrained model reads before a text
    special_tokens = frozenset({END_OF_TEXT})  # plain text to `encode`
    texts: list[bytes]  # of each id, END_OF_TEXT of `eot`
    # Whether the text of each id begins with a space, bool (vocab_size,); with
    # adds_space.
    begins_with_space: np.ndarray

    @property
    def dtype(self) -> str:
        """Return the type of token files: "uint16" or "uint32"."""
        if self.vocab_size <= 2**16:
            return "uint16"
        return "uint32"

    @functools.cached_property
    def file(self) -> bytes:
        """Return the vocabulary as a .tiktoken file, in the order of the ids."""
        lines = []
        for token, i in sorted(self.ranks.items(), key=itemgetter(1)):
            lines.append(b"%b %d\n" % (base64.b64encode(token), i))
        return b"".join(lines)

    @functools.cached_property
    def sha256(self) -> str:
        """Return the sha256 of the vocabulary, its identity."""
        return hashlib.sha256(self.file).hexdigest()

    def keep(self, folder: Path) -> None:
        """Write a vocabulary that is a file into a folder, where `get_tokenizer` finds
        it."""
        if self.name not in FILES:
            return
        path = folder / self.name
        write_atomically(path, lambda file: file.write(self.file))

    def check(self, sha256: str | None) -> None:
        """Raise UserError if metadata record another vocabulary; None: they record
        none."""
        if sha256 is None or sha256 == self.sha256:
            return
        raise UserError(
            f"the vocabulary of {self.name} has changed since the data or model was "
            f"made (sha256 {self.sha256[:12]}, was {sha256[:12]}): put its file back"
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without end-of-text."""
        return self.encode_array(text).tolist()

    def encode_documents(self, text: str) -> np.ndarray:
        """Return the ids of a text in which "<|endoftext|>" ends a document, as
        `decode` writes it, (n,) of `dtype`."""
        first, *documents = text.split(END_OF_TEXT)
        parts = [self.encode_array(first)]
        for document in documents:
            parts.append(np.array([self.eot], self.dtype))
            parts.append(self.encode_array(document))
        return np.concatenate(parts)

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that follows another one."""
        return self.encode(text)

    def count_special(self, texts: Iterable[str]) -> Counter[str]:
        """Return how often each special token stands in texts, in which it is plain
        text."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        return Counter(token for text in texts for token in pattern.findall(text))

    def to_bytes(self, ids: list[int]) -> bytes:
        """Return the text of `ids` in UTF-8, of which a part may be invalid."""
        return b"".join(self.texts[i] for i in ids)

    def decode(self, ids) -> str:
        """Return the text of `ids` (sequence, array or 1-D tensor); invalid UTF-8
        becomes U+FFFD."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"id {i} is not in the vocabulary of the {self.name!r} tokenizer "
                    f"(0 to {self.vocab_size - 1}); was the text made with another one?"
                )
        return "".join(self.pieces(ids))

    def pieces(self, ids) -> list[str]:
        """Return the text of each of `ids`; joined, they are `decode(ids)`. A character
        of several tokens belongs to the one that completes it, U+FFFD to the one that
        shows that it is invalid."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        before = self.eot
        for token in map(int, ids):
            # No character continues over the end of a document.
            if token == self.eot and pieces:
                pieces[-1] += decoder.decode(b"", final=True)
            text = self.to_bytes([token])
            if self.adds_space and before == self.eot:
                text = text.removeprefix(b" ")
            pieces.append(decoder.decode(text))
            before = token
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of the text of every id, int64
        (vocab_size,); 0 for end-of-text."""
        lengths = np.array([len(self.to_bytes([i])) for i in range(self.vocab_size)])
        lengths[self.eot] = 0
        return lengths

    def count_bytes(self, ids: np.ndarray, starts: bool = True) -> np.ndarray:
        """Return the UTF-8 bytes of text that each of `ids` (n,) stands for, int64
        (n,): 0 for end-of-text, and without a space that the tokenizer adds before a
        document. starts: whether the first id begins a document, as every id after
        end-of-text.

        The sum over the ids of a text is `text_bytes` of the text, unless the tokenizer
        loses text."""
        ids = np.asarray(ids, np.int64)
        lengths = self.byte_lengths[ids]
        if self.adds_space and len(ids):
            is_first = np.append(starts, ids[:-1] == self.eot)
            has_space = self.begins_with_space[ids]
            lengths = lengths - (is_first & has_space)
        return lengths

    def text_bytes_of(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Return the UTF-8 bytes of a text that each of its ids (n,), as of
        `encode_documents`, stands for, float64 (n,): 0 for end-of-text. Their sum is
        `text_bytes` of the documents. Where the tokenizer loses text, the bytes of all
        ids are larger in proportion."""
        counts = self.count_bytes(ids)
        total = max(1, counts.sum())
        documents = text.replace(END_OF_TEXT, "")
        return counts * (text_bytes(documents) / total)


class BytesTokenizer(Tokenizer):
    """The UTF-8 bytes of a text, and an id for its end."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    ranks = {bytes([i]): i for i in range(256)}
    texts = [*ranks, END_OF_TEXT.encode()]

    def encode_array(self, text: str) -> np.ndarray:
        data = without_lone_surrogates(text).encode()
        return np.frombuffer(data, np.uint8).astype(self.dtype)


class AlphabetTokenizer(Tokenizer):
    """An alphabet of characters, such as amino acids; text with another one is an
    error."""

    def __init__(self, letters: str):
        if len(set(letters)) < len(letters):
            raise UserError(f"{ALPHABET}{letters} has a character twice")
        self.letters = letters
        self.name = ALPHABET + letters
        self.eot = len(letters)
        self.vocab_size = self.eot + 1
        self.ids = {letter: i for i, letter in enumerate(letters)}
        self.ranks = {letter.encode(): i for letter, i in self.ids.items()}
        self.texts = [*self.ranks, END_OF_TEXT.encode()]

    def encode_array(self, text: str) -> np.ndarray:
        ids = map(self.ids.__getitem__, text)
        try:
            return np.fromiter(ids, self.dtype, len(text))
        except KeyError as error:
            place = text.index(error.args[0])
            around = text[max(place - 20, 0) : place + 20]
            raise UserError(
                f"{error} is not in the alphabet {self.letters!r}; add it, or leave "
                f"such text out, near {around!r}"
            ) from None


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
        text = without_lone_surrogates(text)
        ends = [match.end() for match in LONG_RUN.finditer(text)]
        parts = []
        for start, stop in itertools.pairwise([0, *ends, len(text)]):
            part = text[start:stop]
            ids = self.encoding.encode_to_numpy(part, disallowed_special=())
            parts.append(ids)
        return np.concatenate(parts).astype(np.uint16)


class HubTokenizer(Tokenizer):
    """The tokenizer.json of a pretrained model, read by the library `tokenizers`: of
    bytes (GPT-2, Llama 3, Qwen), or of words in which "▁" is a space (Llama 2,
    Mistral).

    end_token: the token that ends a text; by default what the files beside it say."""

    name = HUB

    def __init__(self, path: Path, end_token: str | None = None):
        import tokenizers

        self.file = read_bounded(path)
        try:
            self.inner = tokenizers.Tokenizer.from_str(self.file.decode())
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"{path} is not a tokenizer.json: {reason_of(error)}"
            ) from None
        self.inner.no_truncation()
        self.inner.no_padding()
        ids = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        check_value(self.vocab_size, VocabSize, f"{path}: the number of its ids")
        self.settings = _json_beside(path, HUB_SETTINGS)
        self.starts, self.eot = _begin_and_end(
            self.inner, ids, path, self.settings, end_token
        )
        self.inner.encode_special_tokens = True  # in a text they are plain text
        added = self.inner.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self.special_tokens = frozenset(special - {""} | {END_OF_TEXT})
        self.texts = _bytes_of_tokens(self.inner, ids, self.file)
        self.texts[self.eot] = END_OF_TEXT.encode()
        self.begins_with_space = np.array([b.startswith(b" ") for b in self.texts])
        # A letter that every vocabulary has, or else a token's own text.
        probe = "a"
        has_letter = "a" in ids or "▁a" in ids
        if not has_letter:
            token = self.texts[min(set(ids.values()) - {self.eot})]
            probe = token.decode(errors="replace").strip()
        text = self.to_bytes(self.encode(probe))
        self.adds_space = text.startswith(b" ")

    @property
    def end_token(self) -> str:
        """Return the token that ends a text, as tokenizer.json has it."""
        return self.inner.id_to_token(self.eot)

    @property
    def start_tokens(self) -> list[str]:
        """Return the tokens that the pretrained model reads before a text."""
        return [self.inner.id_to_token(i) for i in self.starts]

    @functools.cached_property
    def sha256(self) -> str:
        """Return the sha256 of its file, or of the one for which it stands (SOURCE)."""
        own = super().sha256
        record = self.settings.get(SOURCE)
        if isinstance(record, dict) and record.get("file") == own:
            return str(record.get("source"))
        return own

    def keep(self, folder: Path) -> None:
        """Write tokenizer.json, and beside it which tokens begin and end a text."""
        super().keep(folder)
        settings: dict[str, Any] = {"eos_token": self.end_token}
        if SOURCE in self.settings:
            settings[SOURCE] = self.settings[SOURCE]
        if self.starts:
            settings["bos_token"] = self.start_tokens[0]
            settings["add_bos_token"] = True
        write_json(folder / HUB_SETTINGS, settings)

    def encode_array(self, text: str) -> np.ndarray:
        text = without_lone_surrogates(text)
        try:
            ids = self.inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"tokenizer.json cannot encode {text[:40]!r}: {reason_of(error)}"
            ) from None
        if self.eot in ids:
            raise UserError(
                f"the text holds {self.end_token!r}, which this tokenizer.json reads "
                "as the end of a text, not as ordinary text: take it out"
            )
        return np.array(ids, self.dtype)

    def encode_after(self, text: str) -> list[int]:
        if not self.adds_space:
            return self.encode(text)
        # After a character that does not merge with the first one of the text.
        for start in "\n0.":
            before = self.encode(start)
            whole = self.encode(start + text)
            if whole[: len(before)] == before:
                break
        return whole[len(before) :]


def _begin_and_end(
    inner, ids: dict[str, int], path: Path, settings: dict, end_token: str | None
) -> tuple[list[int], int]:
    """Return the ids before a text and the id that ends one. A tokenizer.json has the
    first in its post-processor; its settings, and config.json and
    generation_config.json beside it, name the second."""
    before: list[int] = []
    after: list[int] = []
    if count := inner.num_special_tokens_to_add(is_pair=False):
        plain = inner.encode("a", add_special_tokens=False).ids
        whole = inner.encode("a").ids
        before = whole[:count]
        for place in range(count + 1):
            if whole[place : place + len(plain)] == plain:
                before = whole[:place]
                after = whole[place + len(plain) :]
                break
    for i in before + after:
        if inner.id_to_token(i) is None:
            raise UserError(
                f"{path} writes id {i} around a text, which is not in its vocabulary"
            )
    start = _token_id(settings.get("bos_token"), ids)
    if not before and settings.get("add_bos_token") is True and start is not None:
        before = [start]
    named = [
        settings.get("eos_token"),
        _json_beside(path, "config.json").get("eos_token_id"),
        _json_beside(path, "generation_config.json").get("eos_token_id"),
        after,
        sorted(i for token, i in ids.items() if ENDS.fullmatch(token)),
    ]
    if end_token is not None:
        named = [end_token]
    for value in named:
        end = _token_id(value, ids)
        if end is not None:
            return before, end
    raise UserError(
        f"--end-token {end_token or ''}: name a token of {path} that ends a text, such "
        "as </s>"
    )


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a file of JSON in the same folder; {} where there is
    none."""
    file = path.with_name(name)
    if not file.is_file():
        return {}
    return read_json(file, dict, "get it again")


def _token_id(value: Any, ids: dict[str, int]) -> int | None:
    """Return the id that a config file means: by an id, a token, {"content": token}, or
    a list, of which the first one that there is counts. None if the vocabulary does not
    have it."""
    if isinstance(value, list):
        for one in value:
            if (token := _token_id(one, ids)) is not None:
                return token
        return None
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        return ids.get(value)
    if type(value) is int and value in ids.values():
        return value
    return None


def _bytes_of_tokens(inner, ids: dict[str, int], file: bytes) -> list[bytes]:
    """Return the bytes of text that each id stands for."""
    added = inner.get_added_tokens_decoder()
    decoder = json.loads(file).get("decoder")
    of_bytes = '"ByteLevel"' in json.dumps(decoder)
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    texts = [b""] * (max(ids.values()) + 1)
    for token, i in ids.items():
        byte = None
        if not of_bytes:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        if byte:
            texts[i] = bytes.fromhex(byte[1])
        elif i in added:
            texts[i] = token.encode()
        elif of_bytes and letters.keys() >= set(token):
            texts[i] = bytes(letters[letter] for letter in token)
        else:
            texts[i] = token.replace("▁", " ").encode()
    return texts


def notes_on_special(counts: Counter[str]) -> list[str]:
    """Return a note on each special token of `Tokenizer.count_special`."""
    notes = []
    for token, count in counts.items():
        times = "time" if count == 1 else "times"
        notes.append(f"{count:,} {times} {token} is read as ordinary text")
    return notes


def is_gpt2s(tokenizer: HubTokenizer) -> bool:
    """Return whether a tokenizer.json is GPT-2's own: its vocabulary and its rules. A
    folder of GPT-2's architecture with another one must not be read with GPT-2's
    ids."""
    rules = json.loads(tokenizer.file)
    words = rules.get("pre_tokenizer") or {}
    if rules.get("normalizer") or words.get("type") != "ByteLevel":
        return False
    if words.get("add_prefix_space") or tokenizer.eot != GPT2_END:
        return False
    return is_gpt2s_vocabulary(tokenizer.inner.get_vocab(with_added_tokens=False))


def is_gpt2s_vocabulary(ids: Mapping[str, int]) -> bool:
    """Return whether ids by token, as tokenizer.json has them, or the vocab.json of
    older folders, are GPT-2's own."""
    pairs = sorted((i, token) for token, i in ids.items() if token != END_OF_TEXT)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == GPT2_SHA256


def text_bytes(text: str) -> int:
    """Return the UTF-8 bytes of a text, of which a lone surrogate is U+FFFD: the
    denominator of bits per byte."""
    text = without_lone_surrogates(text)
    return len(text.encode())


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in GPT-2's
    vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    free_codes = iter(range(256, 512))
    letters = []
    for byte in range(256):
        code = byte if byte in printable else next(free_codes)
        letters.append(chr(code))
    return letters


def without_lone_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of lone surrogates, as tiktoken does: JSON can
    hold them, UTF-8 cannot."""
    if text.isascii():
        return text
    pairs = text.encode("utf-16", "surrogatepass")
    return pairs.decode("utf-16", "replace")


def other_tokenizer(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, tuple]:
    """Return {key: (theirs, ours)} for the RECORDED keys whose values differ, where
    both descriptions have them."""
    sha256 = theirs.get("tokenizer_sha256")
    is_same_file = sha256 is not None and sha256 == ours.get("tokenizer_sha256")
    differences = {}
    for key in RECORDED:
        if key == "tokenizer" and is_same_file:
            continue  # one vocabulary under two names
        pair = (theirs.get(key), ours.get(key))
        if None not in pair and pair[0] != pair[1]:
            differences[key] = pair
    return differences


def get_tokenizer(
    name: str,
    sha256: str | None = None,
    folder: Path | None = None,
    end_token: str | None = None,
) -> Tokenizer:
    """Return the tokenizer of this name: one of TOKENIZERS, alphabet:LETTERS, a path
    FILE.tiktoken or tokenizer.json, or OWN or HUB in `folder` or up to two folders
    above it. end_token: see HubTokenizer. Raises UserError for another sha256, OSError
    for a file that is missing."""
    if name in FILES and folder:
        name = str(_find_file(name, folder))
    if name.startswith(ALPHABET):
        tokenizer = AlphabetTokenizer(name.removeprefix(ALPHABET))
    elif name.endswith(".tiktoken"):
        tokenizer = _read_file(expand_home(name))
    elif name.endswith(".json"):
        tokenizer = HubTokenizer(expand_home(name), end_token)
    else:
        tokenizer = _get_known(name)
    tokenizer.check(sha256)
    return tokenizer


def _find_file(name: str, folder: Path) -> Path:
    """Return the file of this name in a folder, or in one of up to two above it."""
    above = folder.absolute().parents[:2]
    for place in [folder, *above]:
        if (place / name).is_file():
            return place / name
    return folder.parent / name if folder.is_file() else folder / name


def _read_file(path: Path) -> BytePairTokenizer:
    """Return the tokenizer of a .tiktoken file: the base64 of a token and its id a
    line, ids from 0."""
    import tiktoken

    # tiktoken's own reader of such files would leave a copy of them in its cache.
    name = "english" if path == ENGLISH else OWN
    lines = read_bounded(path).splitlines()
    ranks = {}
    with contextlib.suppress(ValueError):  # then some line is missing
        for line in lines:
            coded, i = line.split()
            ranks[base64.b64decode(coded, validate=True)] = int(i)
    size = len(ranks)
    is_complete = size == len(lines) and sorted(ranks.values()) == list(range(size))
    has_bytes = all(bytes([i]) in ranks for i in range(256))
    if not is_complete or not has_bytes or size >= 2**16:
        raise UserError(
            f"{path} is not a vocabulary: on each line the base64 of a token and its "
            "id, ids 0, 1, ... up to 65,534, each once, and all 256 bytes"
        )
    encoding = tiktoken.Encoding(
        name,
        pat_str=GPT2_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: size},
    )
    return BytePairTokenizer(name, encoding)


@functools.cache
def _get_known(name: str) -> Tokenizer:
    if name == "bytes":
        return BytesTokenizer()
    if name == "english":
        return _read_file(ENGLISH)
    check_value(name, Literal[TOKENIZERS], "the tokenizer")  # GPT-2's is left
    import tiktoken

    try:
        return BytePairTokenizer(name, tiktoken.get_encoding("r50k_base"))
    # an error of `requests`, an OSError, a wrong hash: one remedy for all
    except Exception as error:
        raise UserError(
            "GPT-2's vocabulary cannot be downloaded; use --tokenizer english or "
            "bytes, or set TIKTOKEN_CACHE_DIR to a folder that holds it as "
            f"0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4 ({type(error).__name__})"
        ) from error
