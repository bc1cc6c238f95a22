"""Tests of the data room: tokenizers, prepare.py as a user runs it, and the loader."""

import contextlib
import gzip
import hashlib
import itertools
import json
import lzma
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as prepare_script
from data import sources
from data.loader import TokenDataset, dtype_name, load_meta, ngram_entropies, random_bits
from data.tokenizers import TOKENIZERS, BytesTokenizer, get_tokenizer

ROOT = Path(__file__).resolve().parent.parent


def _tiktoken_folder() -> str | None:
    """The folder that holds r50k_base, where the environment names one."""
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        return os.environ["TIKTOKEN_CACHE_DIR"]
    folder = Path(os.environ.get("AOGPT_DATA", "")) / "tiktoken"
    return str(folder) if "AOGPT_DATA" in os.environ and folder.is_dir() else None


needs_gpt2 = pytest.mark.skipif(
    _tiktoken_folder() is None, reason="needs TIKTOKEN_CACHE_DIR or AOGPT_DATA/tiktoken"
)


@pytest.fixture(autouse=True, scope="module")
def _tiktoken_cache():
    with pytest.MonkeyPatch.context() as patch:
        if _tiktoken_folder():
            patch.setenv("TIKTOKEN_CACHE_DIR", _tiktoken_folder())
        yield


def command(*args) -> list[str]:
    return [sys.executable, str(ROOT / "data" / "prepare.py"), *map(str, args)]


def run(*args, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def run_ok(*args, **env) -> subprocess.CompletedProcess:
    done = run(*args, **env)
    assert done.returncode == 0, done.stderr
    return done


def fails(*args, says: tuple[str, ...], **env) -> str:
    """Runs prepare.py, which must refuse as a script refuses: exit status 2, a message, no traceback."""
    done = run(*args, **env)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    for words in says:
        assert words in done.stderr, done.stderr
    return done.stderr


def ids(folder: Path, split: str) -> list[int]:
    return TokenDataset(folder, split, 1, verify=True).tokens.tolist()


def text_of(folder: Path, split: str) -> str:
    return get_tokenizer(load_meta(folder)["tokenizer"]).decode(ids(folder, split))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_jsonl(path: Path, texts, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def big_text(tmp_path_factory) -> Path:
    """A text file of about 60 MB."""
    path = tmp_path_factory.mktemp("big") / "big.txt"
    line = "it is a truth universally acknowledged, that a file in want of a test must be large\n"
    path.write_text(line * (60_000_000 // len(line)))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_gpt2
@given(st.text())
def test_gpt2_round_trip(text):
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_gpt2
def test_gpt2_has_gpt2s_ids():
    tokenizer = get_tokenizer("gpt2")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("gpt2", 50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("hello world\n") == [31373, 995, 198]
    assert tokenizer.decode([15496, 50256, 995]) == "Hello<|endoftext|> world"


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_end_of_text_in_a_text_is_text(name):
    tokenizer = get_tokenizer(name)
    encoded = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot not in encoded and tokenizer.decode(encoded) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_decode_takes_any_ids_and_no_others(name):
    tokenizer = get_tokenizer(name)
    encoded = tokenizer.encode("naïve")
    assert tokenizer.decode(torch.tensor(encoded)) == tokenizer.decode(np.array(encoded)) == "naïve"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("🤖")[:1])
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"id {wrong} is not in the vocabulary"):
            tokenizer.decode([1, wrong])


@given(
    st.lists(
        st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF4, 0xFF, 256]),
        max_size=9,
    )
)
def test_pieces_of_any_bytes_join_to_the_decoded_text(tokens):
    # every kind of byte that UTF-8 knows, in any order, which hardly ever is UTF-8
    tokenizer = get_tokenizer("bytes")
    pieces = tokenizer.pieces(tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == tokenizer.decode(tokens)


@needs_gpt2
@given(st.lists(st.one_of(st.integers(0, 256), st.integers(0, 50256)), max_size=9))
def test_pieces_of_any_gpt2_ids_join_to_the_decoded_text(tokens):
    tokenizer = get_tokenizer("gpt2")  # its ids 0 to 255 are the single bytes
    pieces = tokenizer.pieces(tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
@pytest.mark.parametrize("text", ["naïve", "🤖 你好", "👩\u200d🚀 العربية\u2028\x00", "", "\ufffd"])
def test_pieces_hold_whole_characters(name, text):
    tokenizer = get_tokenizer(name)
    tokens = tokenizer.encode(text)
    pieces = tokenizer.pieces(np.array(tokens, dtype=np.int64))
    assert "".join(pieces) == text
    if name == "bytes":  # a character stands where its last byte is
        assert [piece for piece in pieces if piece] == list(text)
        assert pieces == [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_pieces_end_with_their_document(name):
    tokenizer = get_tokenizer(name)
    cut = tokenizer.encode("🤖")[:-1]
    half = [""] * (len(cut) - 1) + ["\ufffd"]
    assert tokenizer.pieces([*cut, tokenizer.eot, *cut]) == [*half, "<|endoftext|>", *half]
    assert tokenizer.pieces([tokenizer.eot]) == ["<|endoftext|>"] and tokenizer.pieces([]) == []
    with pytest.raises(ValueError, match=f"id {tokenizer.vocab_size} is not in the vocabulary"):
        tokenizer.pieces([1, tokenizer.vocab_size])


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_lone_surrogates_are_replaced(name):
    tokenizer = get_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@needs_gpt2
def test_gpt2_encodes_a_million_spaces_as_it_encodes_few():
    tokenizer = get_tokenizer("gpt2")
    text = "a" + " " * 1_500_000 + "b" + "\n" * 1_500_000
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded) == text
    assert encoded[-750_000:] == [tokenizer.encode("\n\n")[0]] * 750_000
    assert encoded[-750_001] == tokenizer.encode(" b")[0]


def test_unknown_tokenizer_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'gpt2'"):
        get_tokenizer("gtp2")


def test_gpt2_without_its_file_says_what_to_do(tmp_path):
    # a proxy that is not there: no network, and no waiting for it either
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    fails(
        "text",
        "--source",
        source,
        "--out",
        tmp_path / "o",
        says=("TIKTOKEN_CACHE_DIR", "--tokenizer bytes"),
        TIKTOKEN_CACHE_DIR=str(tmp_path / "none"),
        HTTPS_PROXY="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
    )


# ---------------------------------------------------------------------------------------------------------------------
# cutting long files

SNIPPETS = [
    *" \n\r\t'",
    "\u3000",
    "\x1c",
    "\x85",
    "\xa0",
    "ab",
    "'s",
    "12",
    "!?",
    "é",
    "中",
    "\n\n\n",
    "   ",
    " \n",
]
PIECES_OF_TEXT = st.lists(
    st.sampled_from(SNIPPETS) | st.characters(exclude_categories=["Cs"]), max_size=40
).map("".join)


@needs_gpt2
@settings(max_examples=500, deadline=None)
@given(PIECES_OF_TEXT, st.integers(0, 60))
def test_a_safe_cut_leaves_gpt2s_ids_alone(text, before):
    cut = sources.safe_cut(text, before)
    encode = get_tokenizer("gpt2").encode
    assert 0 <= cut <= before
    assert encode(text[:cut]) + encode(text[cut:]) == encode(text)


@needs_gpt2
@settings(max_examples=200, deadline=None)
@given(PIECES_OF_TEXT.filter(bool), st.integers(1, 9))
def test_a_file_read_in_pieces_has_the_ids_of_the_whole(tmp_path_factory, text, piece_bytes):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece_bytes)
        pieces = list(sources.TextFiles([path], "text").pieces())
    encode = get_tokenizer("gpt2").encode
    whole = text.removeprefix("\ufeff")
    assert "".join(piece for piece, _ in pieces) == whole
    assert [i for piece, _ in pieces for i in encode(piece)] == encode(whole)
    assert [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]


def test_long_text_really_is_cut(big_text):
    pieces = sources.TextFiles([big_text], "text").pieces()
    assert all(
        0 < len(piece) < 2 * sources.PIECE_BYTES and not end
        for piece, end in itertools.islice(pieces, 20)
    )


# ---------------------------------------------------------------------------------------------------------------------
# which document goes where


class Memory(sources.Corpus):
    """Documents from a list."""

    def __init__(self, texts):
        self.texts = texts

    def pieces(self):
        return ((text, True) for text in self.texts)


def validation_documents(
    count: int, fraction: float, seed: int, limit: int | None = None
) -> list[int]:
    routed = list(
        prepare_script.route(
            {"train": Memory([str(i) for i in range(count)])}, fraction, seed, limit
        )
    )
    assert [text for _, text, _ in routed] == [str(i) for i in range(min(count, limit or count))]
    return [int(text) for split, text, _ in routed if split == "val"]


@given(st.integers(2, 300), st.floats(0.003, 0.5), st.integers(0, 2**70))
def test_both_splits_get_documents(count, fraction, seed):
    chosen = validation_documents(count, fraction, seed)
    assert 0 < len(chosen) < count
    assert abs(len(chosen) - count * fraction) <= 1


@given(st.integers(100, 300), st.integers(100, 300), st.integers(0, 9))
def test_a_documents_split_depends_on_seed_and_index_only(count, more, seed):
    few, many = sorted((count, more))
    assert validation_documents(few, 0.02, seed) == [
        i for i in validation_documents(many, 0.02, seed) if i < few
    ]
    assert validation_documents(many, 0.02, seed, limit=few) == validation_documents(
        few, 0.02, seed
    )


def test_the_draw_is_uniform_within_groups_and_depends_on_the_seed():
    places = np.array(validation_documents(20_000, 0.1, seed=3)) % 10
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    assert validation_documents(1000, 0.1, 0) != validation_documents(1000, 0.1, 1)


@given(st.lists(st.text(st.sampled_from("ab \n"), max_size=9), max_size=5), st.floats(0.01, 0.5))
def test_a_single_document_is_cut_once(pieces, fraction):
    corpus = Memory(pieces)
    corpus.pieces = lambda: (
        (text, i == len(pieces)) for i, text in enumerate([*pieces, "the end"], 0)
    )
    routed = list(prepare_script.route({"train": corpus}, fraction, 0, None))
    joined = {
        split: "".join(text for s, text, _ in routed if s == split) for split in ("train", "val")
    }
    assert joined["train"] + joined["val"] == "".join(pieces) + "the end" and all(joined.values())
    assert [split for split, _, end in routed if end] == ["train", "val"]


def test_random_bits_are_fixed_numbers():
    # prepared splits and shuffles must survive a change of numpy's version
    assert random_bits(1, 2, 2, 1).tolist() == FIXED_BITS
    assert random_bits(1, 2, 1, 2).tolist() != FIXED_BITS[:1]


FIXED_BITS = [10612419859462301991, 7774404274552179346]


# ---------------------------------------------------------------------------------------------------------------------
# prepare.py, as a user runs it


def test_help_explains_itself():
    shown = run_ok("--help").stdout
    for words in (
        "--source",
        "--tokenizer",
        "--overwrite",
        "pydocs",
        "openwebtext",
        ".jsonl",
        "--val-fraction",
    ):
        assert words in shown


def test_pydocs(tmp_path):
    done = run_ok("pydocs", "--out", tmp_path / "o")
    meta = load_meta(tmp_path / "o")
    assert meta["format"] == 1 and meta["tokenizer"] == "bytes" and meta["dtype"] == "uint16"
    assert (meta["vocab_size"], meta["eot"]) == (257, 256)
    assert (
        meta["versions"]["python"] in str(meta["source"])
        and meta["versions"]["numpy"] == np.__version__
    )
    train, val = ids(tmp_path / "o", "train"), ids(tmp_path / "o", "val")
    assert 1_000_000 < len(train) < 10_000_000 and 20_000 < len(val) < 0.2 * len(train)
    for split, tokens in (("train", train), ("val", val)):
        entry = meta["splits"][split]
        assert (
            entry["tokens"] == len(tokens)
            and entry["documents"] == tokens.count(256)
            and tokens[-1] == 256
        )
        assert (
            hashlib.sha256((tmp_path / "o" / entry["file"]).read_bytes()).hexdigest()
            == entry["sha256"]
        )
    text = text_of(tmp_path / "o", "train") + text_of(tmp_path / "o", "val")
    assert "Return a list of the words in the string" in text  # of the help topics
    assert "Read and write ZIP files." in text  # of a docstring
    assert f"{len(train):,} tokens" in done.stdout and "python train.py" in done.stdout
    assert str(tmp_path) not in (tmp_path / "o" / "meta.json").read_text()


def pack(path: Path, packing: str) -> Path:
    if not packing:
        return path
    packed = path.with_name(path.name + packing)
    packed.write_bytes({".gz": gzip, ".xz": lzma}[packing].compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_text_in_each_format(tmp_path, packing):
    (tmp_path / "a.txt").write_bytes(b"first file,\r\n\r\nas it is\n")
    (tmp_path / "b.MD").write_text("# second\n", encoding="utf-8-sig")
    write_jsonl(tmp_path / "c.jsonl", ["third", "", "naïve <|endoftext|>"])
    with open(tmp_path / "c.jsonl", "a") as file:
        file.write("\n")  # an empty line is no document
    (tmp_path / "v.txt").write_text("validation")
    (tmp_path / "t.txt").write_text("test")
    a, b, c, v, t = (
        pack(tmp_path / name, packing) for name in ("a.txt", "b.MD", "c.jsonl", "v.txt", "t.txt")
    )
    run_ok(
        "text",
        "--source",
        a,
        b,
        c,
        "--val",
        v,
        "--test",
        t,
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "o",
    )
    documents = [
        b"first file,\r\n\r\nas it is\n",
        b"# second\n",
        b"third",
        b"",
        "naïve <|endoftext|>".encode(),
    ]
    assert ids(tmp_path / "o", "train") == [i for document in documents for i in [*document, 256]]
    assert text_of(tmp_path / "o", "val") == "validation<|endoftext|>"
    assert text_of(tmp_path / "o", "test") == "test<|endoftext|>"
    meta = load_meta(tmp_path / "o")
    assert [(part["split"], part["file"]) for part in meta["source"]] == [
        ("train", a.name),
        ("train", b.name),
        ("train", c.name),
        ("val", v.name),
        ("test", t.name),
    ]
    assert meta["source"][0]["sha256"] == hashlib.sha256(a.read_bytes()).hexdigest()
    assert [meta["splits"][split]["documents"] for split in ("train", "val", "test")] == [5, 1, 1]


@needs_gpt2
def test_gpt2_field_and_share_of_documents(tmp_path):
    texts = [f"Document {i} says hello." for i in range(50)]
    source = write_jsonl(tmp_path / "a.jsonl", texts, field="body")
    run_ok(
        "text",
        "--source",
        source,
        "--field",
        "body",
        "--val-fraction",
        0.1,
        "--seed",
        5,
        "--out",
        tmp_path / "o",
    )
    meta = load_meta(tmp_path / "o")
    assert (
        meta["tokenizer"] == "gpt2"
        and meta["vocab_size"] == 50257
        and "tiktoken" in meta["versions"]
    )
    found = {
        split: text_of(tmp_path / "o", split).split("<|endoftext|>")[:-1]
        for split in ("train", "val")
    }
    chosen = set(validation_documents(50, 0.1, 5))
    assert (
        found["val"] == [text for i, text in enumerate(texts) if i in chosen] and len(chosen) == 5
    )
    assert found["train"] == [text for i, text in enumerate(texts) if i not in chosen]


def test_limit(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [f"<{i}>" for i in range(40)])
    run_ok(
        "text", "--source", source, "--limit", 10, "--tokenizer", "bytes", "--out", tmp_path / "o"
    )
    splits = load_meta(tmp_path / "o")["splits"]
    assert (splits["train"]["documents"], splits["val"]["documents"]) == (9, 1)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_openwebtext_from_local_files(tmp_path, suffix):
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}" for i in range(30)]
    paths = [tmp_path / f"{part}{suffix}" for part in "ab"]
    for path, rows in zip(paths, (texts[:20], texts[20:]), strict=True):
        if suffix == ".parquet":
            parquet.write_table(arrow.table({"text": rows}), path)
        else:
            write_jsonl(path, rows)
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    run_ok(
        "openwebtext", "--source", *paths, "--tokenizer", "bytes", "--out", tmp_path / "o", **env
    )
    found = {
        split: text_of(tmp_path / "o", split).split("<|endoftext|>")[:-1]
        for split in ("train", "val")
    }
    assert len(found["val"]) == 1 and sorted(found["train"] + found["val"]) == sorted(texts)
    meta = load_meta(tmp_path / "o")
    assert meta["settings"]["val_fraction"] == 0.0005 and "datasets" in meta["versions"]
    assert [part["file"] for part in meta["source"]] == [path.name for path in paths]
    if suffix == ".parquet":
        fails(
            "openwebtext",
            "--source",
            *paths,
            "--tokenizer",
            "bytes",
            "--field",
            "body",
            "--out",
            tmp_path / "p",
            says=("row 1: no field 'body'", "'text'", "--field"),
            **env,
        )


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_the_number_of_workers_changes_nothing(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "\n\n", "naïve", "1234"]
    source = write_jsonl(
        tmp_path / "a.jsonl", (" ".join(rng.choice(words, 2000)) for _ in range(800))
    )
    for workers in (1, 2):
        run_ok(
            "text",
            "--source",
            source,
            "--tokenizer",
            tokenizer,
            "--workers",
            workers,
            "--out",
            tmp_path / str(workers) / "o",
        )
    assert tree(tmp_path / "1") == tree(tmp_path / "2")


def test_a_second_run_does_nothing(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    args = ("text", "--source", source, "--tokenizer", "bytes", "--out", tmp_path / "o")
    run_ok(*args)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    assert "nothing to do" in run_ok(*args, "--workers", 2).stdout
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    fails(*args, "--seed", 1, says=("other settings", "seed was 0, now 1", "--overwrite", "--out"))
    write_jsonl(source, ["one", "two", "three"])
    fails(*args, says=("the source has changed", "--overwrite"))
    run_ok(*args, "--overwrite")
    assert load_meta(tmp_path / "o")["splits"]["train"]["documents"] == 2
    (tmp_path / "o" / "train.bin").write_bytes(b"")
    fails(*args, says=("damaged", "--overwrite"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "o"]


def test_overwrite_keeps_the_old_dataset_until_the_end(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    args = ("--tokenizer", "bytes", "--out", tmp_path / "o", "--overwrite")
    run_ok("text", "--source", source, *args)
    before = tree(tmp_path / "o")
    bad = write_jsonl(tmp_path / "bad.jsonl", [f"{i}" for i in range(100)])
    with open(bad, "a") as file:
        file.write("{\n")
    fails("text", "--source", bad, *args, says=("bad.jsonl, line 101",))
    assert tree(tmp_path / "o") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "o"]


def test_overwrite_never_replaces_a_folder_of_the_users(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("keep")
    fails(
        "text",
        "--source",
        source,
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "mine",
        "--overwrite",
        says=("notes.md", "choose another --out"),
    )
    assert tree(tmp_path / "mine") == {"notes.md": b"keep"}
    (tmp_path / "empty").mkdir()
    run_ok("text", "--source", source, "--tokenizer", "bytes", "--out", tmp_path / "empty")


@contextlib.contextmanager
def under_way(source: Path, out: Path, *args):
    """A run of prepare.py in a process group of its own, once it has written some of its output."""
    process = subprocess.Popen(
        command(
            "text", "--source", source, "--tokenizer", "bytes", "--workers", 2, "--out", out, *args
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 30
        while not any(
            path.stat().st_size > 8 << 20
            for path in out.parent.glob(f".{out.name}.partial-*/train.bin")
        ):
            assert process.poll() is None and time.monotonic() < limit, (
                "ended before it could be interrupted"
            )
            time.sleep(0.002)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def living(group: int) -> list[str]:
    """Processes of a process group, without the dead that nobody has collected yet."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            states.append(path.read_text().rpartition(")")[2].split())
    return [state for state, _, its_group, *_ in states if its_group == str(group) and state != "Z"]


def test_kill_in_the_middle(tmp_path, big_text):
    out = tmp_path / "o"
    with under_way(big_text, out) as process:
        assert len(living(process.pid)) >= 3 or not Path("/proc/self").exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        limit = time.monotonic() + 10
        while living(process.pid) and time.monotonic() < limit:
            time.sleep(0.01)
        assert not living(process.pid)  # the workers end by themselves when their parent is gone
    assert not out.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".o.partial-") and not (left / "meta.json").exists()
    with pytest.raises(FileNotFoundError):
        TokenDataset(left, "train", 8)
    run_ok("text", "--source", big_text, "--tokenizer", "bytes", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
    assert load_meta(out)["splits"]["train"]["tokens"] > 50_000_000


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_cleans_up_and_keeps_what_was_there(tmp_path, big_text, sig):
    out = tmp_path / "o"
    small = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    run_ok("text", "--source", small, "--tokenizer", "bytes", "--out", out)
    before = tree(out)
    with under_way(big_text, out, "--overwrite") as process:
        if sig == signal.SIGINT:
            os.killpg(process.pid, sig)  # what a terminal does
        else:
            process.send_signal(sig)
        process.wait(timeout=30)
        stderr = process.stderr.read()
    assert process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    assert tree(out) == before and sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "o",
    ]


def test_a_run_killed_between_the_two_moves_is_mended(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    args = ("text", "--source", source, "--tokenizer", "bytes", "--out", tmp_path / "o")
    run_ok(*args)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "o").rename(tmp_path / f".o.old-{socket.gethostname()}-{ended.pid}")
    assert "nothing to do" in run_ok(*args).stdout
    assert (tmp_path / "o" / "meta.json").exists()


@pytest.mark.parametrize("protocol", ["full", "sedd"])
def test_memory_stays_bounded(tmp_path, big_text, protocol):
    small = tmp_path / "small.txt"
    small.write_text("a few words\n" * 500)
    # measured from a small process: a child begins with the peak of the one it was forked from
    measure = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    peaks = {}
    for source in (small, big_text):
        args = command(
            "text", "--source", source, "--tokenizer", "bytes", "--out", tmp_path / source.stem
        )
        args += ["--protocol", protocol] + ["--block-size", "64"] * (protocol == "sedd")
        done = subprocess.run(
            [sys.executable, "-c", measure, *args], capture_output=True, text=True, check=True
        )
        peaks[source] = int(done.stdout) / 1024
    # a few pieces of 1 MB, as bytes, text and ids, and not the 60 MB of the file or the 120 MB of its ids
    assert peaks[big_text] - peaks[small] < 40, peaks


def test_wide_vocabularies_are_written_as_uint32(tmp_path, monkeypatch):
    class Wide(BytesTokenizer):
        name, vocab_size, eot = "wide", 70_000, 69_999

    monkeypatch.setitem(TOKENIZERS, "wide", Wide)
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    folder = prepare_script.prepare(
        prepare_script.Prepare(
            "text", out=tmp_path / "o", source=(source,), tokenizer="wide", workers=1
        )
    )
    assert load_meta(folder)["dtype"] == "uint32"
    data = TokenDataset(folder, "train", 4, verify=True)
    assert data.tokens.dtype == np.uint32 and data.blocks(np.array([0]))[0, -1] == 69_999


def test_dtype_boundary():
    assert [dtype_name(size) for size in (257, 50257, 65536, 65537)] == [
        "uint16",
        "uint16",
        "uint16",
        "uint32",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# what users get wrong


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    good = json.dumps({"text": "good"}).encode() + b"\n"
    noise = b"".join(
        json.dumps({"text": os.urandom(50).hex()}).encode() + b"\n" for _ in range(200)
    )
    contents = {
        "good.jsonl": good * 3,
        "empty.txt": b"",
        "empty.jsonl": b"\n\n",
        "one.txt": b"x",
        "latin.txt": "caf\xe9".encode("latin1"),
        "syntax.jsonl": good + b"{'text': 1}\n",
        "number.jsonl": good + b'{"text": 3}\n',
        "list.jsonl": b'["text"]\n',
        "other.jsonl": good + b'{"body": "b", "title": "t"}\n',
        "latin.jsonl": good + b'{"text": "\xe9"}\n',
        "cut.txt.gz": gzip.compress(noise)[:-3000],
        "cut.jsonl.xz": lzma.compress(noise)[:-3000],
        "fake.txt.gz": b"no gzip",
        "fake.txt.xz": b"no xz",
        "page.html": b"<p>",
        "README": b"text",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty.txt", ("empty.txt is empty",)),
        ("empty.jsonl", ("empty.jsonl holds no documents",)),
        ("one.txt", ("has 1 characters", "add documents")),
        ("latin.txt", ("latin.txt: not UTF-8", "byte 3", "iconv")),
        ("latin.jsonl", ("latin.jsonl, line 2: not UTF-8",)),
        ("syntax.jsonl", ("syntax.jsonl, line 2: not JSON",)),
        ("number.jsonl", ("number.jsonl, line 2", "'text' holds int, not a string")),
        ("list.jsonl", ("list.jsonl, line 1: a JSON object is needed",)),
        ("other.jsonl", ("other.jsonl, line 2: no field 'text'", "'body', 'title'", "--field")),
        ("cut.txt.gz", ("cut.txt.gz", "ends too early")),
        ("cut.jsonl.xz", ("cut.jsonl.xz", "ends too early")),
        ("fake.txt.gz", ("fake.txt.gz: damaged, or not a .gz file",)),
        ("fake.txt.xz", ("fake.txt.xz: damaged, or not a .xz file",)),
        ("page.html", ("page.html: unknown kind of file", ".txt, .md and .jsonl", ".gz or .xz")),
        ("README", ("README: unknown kind of file",)),
    ],
)
def test_files_that_cannot_be_read(tmp_path, files, name, says):
    out = tmp_path / "out" / "o"
    fails("text", "--source", files[name], "--tokenizer", "bytes", "--out", out, says=says)
    assert not out.exists() and not list((tmp_path / "out").glob(".o*"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["texts"], ("did you mean text?", "pydocs, text, openwebtext")),
        (["text"], ("--source FILE",)),
        (["pydocs", "--source", "{good}"], ("takes no --source", "text --source")),
        (["pydocs", "--val", "{good}"], ("--val-fraction",)),
        (["text", "--source", "{missing}"], ("missing.txt: no such file",)),
        (["text", "--source", "{folder}"], ("is a folder", "*.txt")),
        (["text", "--source", "{good}", "--val", "{good}"], ("given 2 times",)),
        (["text", "--source", "{good}", "--val-fraction", "0.7"], ("--val-fraction must be",)),
        (["text", "--source", "{good}", "--workers", "0"], ("--workers must be at least 1",)),
        (["text", "--source", "{good}", "--tokenizer", "byte"], ("did you mean 'bytes'",)),
        (["openwebtext", "--source", "{missing}"], ("no such file",)),
        (["openwebtext", "--source", "{html}"], (".parquet and .jsonl",)),
    ],
)
def test_options_that_do_not_fit(tmp_path, files, args, says):
    places = {
        "good": files["good.jsonl"],
        "html": files["page.html"],
        "missing": tmp_path / "missing.txt",
        "folder": tmp_path,
    }
    args = [arg.format(**places) for arg in args]
    tokenizer = [] if "--tokenizer" in args else ["--tokenizer", "bytes"]
    fails(*args, *tokenizer, "--out", tmp_path / "o", says=says)
    assert not (tmp_path / "o").exists()


def test_openwebtext_without_a_network_says_what_to_do(tmp_path):
    pytest.importorskip("datasets")
    fails(
        "openwebtext",
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "o",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "hf"),
        says=("Hugging Face hub", "--source FILE.parquet"),
    )
    assert not (tmp_path / "o").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the loader


def write_dataset(
    folder: Path, tokens, dtype: str = "uint16", split: str = "train", changes=None
) -> Path:
    folder.mkdir(exist_ok=True)
    content = np.asarray(tokens, dtype=dtype).tobytes()
    (folder / f"{split}.bin").write_bytes(content)
    entry = {
        "file": f"{split}.bin",
        "tokens": len(tokens),
        "documents": 1,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    meta = {
        "format": 1,
        "name": "made",
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot": 256,
        "dtype": dtype,
        "splits": {split: entry},
        **(changes or {}),
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> TokenDataset:
    """23 blocks of 4 tokens, and 3 tokens that fill no block; block i holds 4 i .. 4 i + 3."""
    return TokenDataset(
        write_dataset(tmp_path_factory.mktemp("numbered"), np.arange(23 * 4 + 3)), "train", 4
    )


def test_blocks(numbered):
    assert numbered.num_blocks == 23 and isinstance(numbered.tokens, np.memmap)
    blocks = numbered.blocks(np.array([22, 0]))
    assert blocks.dtype == torch.int64 and blocks.tolist() == [[88, 89, 90, 91], [0, 1, 2, 3]]
    assert numbered.blocks(np.array([], dtype=np.int64)).shape == (0, 4)
    for wrong in (-1, 23):
        with pytest.raises(ValueError, match="from 0 to 22"):
            numbered.blocks(np.array([wrong]))


@given(seed=st.integers(0, 2**64 - 1), global_batch=st.integers(1, 60), start=st.integers(0, 4))
def test_every_block_once_per_epoch(numbered, seed, global_batch, start):
    steps = range(
        math.ceil(23 * (start + 2) / global_batch) + 1
    )  # batches straddle epochs, or hold several
    seen = torch.cat(
        [numbered.batch(seed, step, range(global_batch), global_batch)[:, 0] // 4 for step in steps]
    )
    for epoch in range(start + 2):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)].tolist()) == list(range(23))


@given(
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(1, 30),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_any_partition_into_processes_gives_the_same_batch(
    numbered, seed, step, global_batch, cuts
):
    whole = numbered.batch(seed, step, range(global_batch), global_batch)
    edges = [0, *sorted(min(cut, global_batch) for cut in cuts), global_batch]
    parts = [
        numbered.batch(seed, step, range(*edge), global_batch) for edge in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(parts), whole)
    fresh = TokenDataset(
        Path(numbered.tokens.filename).parent, "train", 4
    )  # a resumed run has no history
    assert torch.equal(fresh.batch(seed, step, range(global_batch), global_batch), whole)


def test_shuffles_differ_between_epochs_and_seeds(numbered):
    epochs = {
        tuple(numbered.batch(seed, step, range(23), 23)[:, 0].tolist())
        for seed in (0, 1)
        for step in (0, 1)
    }
    assert len(epochs) == 4
    with pytest.raises(ValueError, match="rows"):
        numbered.batch(0, 0, range(3, 6), 5)


def test_shuffle_is_uniform(numbered):
    first = [int(numbered.batch(seed, 0, range(1), 1)[0, 0]) // 4 for seed in range(2300)]
    assert (
        (np.bincount(first, minlength=23) - 100) ** 2 / 100
    ).sum() < 48.3  # 22 degrees of freedom, p = 0.001


def test_loader_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such dataset folder.*prepare.py"):
        load_meta(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no meta.json"):
        load_meta(tmp_path)
    folder = write_dataset(tmp_path / "d", np.arange(50))
    with pytest.raises(ValueError, match="no split 'val'; its splits are 'train'"):
        TokenDataset(folder, "val", 4)
    with pytest.raises(ValueError, match="50 tokens.*lower block_size to at most 50"):
        TokenDataset(folder, "train", 51)
    with pytest.raises(ValueError, match="at least 1"):
        TokenDataset(folder, "train", 0)
    changed = bytearray((folder / "train.bin").read_bytes())
    changed[7] ^= 1
    (folder / "train.bin").write_bytes(changed)
    TokenDataset(folder, "train", 4)
    with pytest.raises(ValueError, match="does not match its checksum"):
        TokenDataset(folder, "train", 4, verify=True)
    (folder / "train.bin").write_bytes(changed[:-2])
    with pytest.raises(ValueError, match="98 bytes.*50 tokens of uint16 need 100"):
        TokenDataset(folder, "train", 4)
    (folder / "train.bin").unlink()
    with pytest.raises(FileNotFoundError, match="train.bin is missing"):
        TokenDataset(folder, "train", 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format 2.*update the code"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"splits": {"train": {}}}, "every split needs"),
    ],
)
def test_meta_errors(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        TokenDataset(write_dataset(tmp_path / "d", [1, 2, 3], changes=changes), "train", 1)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 1}'])
def test_damaged_meta(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match="prepare the dataset again"):
        load_meta(tmp_path)


def test_empty_split_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="0 tokens"):
        TokenDataset(write_dataset(tmp_path / "d", []), "train", 4)


# ---------------------------------------------------------------------------------------------------------------------
# entropies


def test_entropies_of_hand_computed_cases():
    # a b a b a: three a and two b; the next token follows from the one before
    unigram, bigram = ngram_entropies(np.array([0, 1, 0, 1, 0], dtype=np.uint16), 2)
    assert unigram == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.4))) and bigram == 0
    # a a b a: pairs aa, ab, ba; after a (twice) a or b, after b (once) a
    assert ngram_entropies(np.array([0, 0, 1, 0]), 2)[1] == pytest.approx(2 / 3 * math.log(2))
    assert ngram_entropies(np.array([7, 7, 7]), 8) == (0, 0)
    # large ids: the code of a pair does not fit the dtype of the ids
    tokens = np.array([50256, 50255, 50256, 50254] * 5 + [50256], dtype=np.uint16)
    assert ngram_entropies(tokens, 50257)[1] == pytest.approx(0.5 * math.log(2))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=50))
def test_entropies_against_brute_force(tokens):
    pairs = list(itertools.pairwise(tokens))
    expected = -sum(
        math.log(pairs.count(p) / sum(q[0] == p[0] for q in pairs)) for p in pairs
    ) / len(pairs)
    unigram = -sum(math.log(tokens.count(t) / len(tokens)) for t in tokens) / len(tokens)
    assert ngram_entropies(np.array(tokens), 5) == pytest.approx((unigram, expected), abs=1e-12)


def test_entropy_errors():
    with pytest.raises(ValueError, match="at least 2"):
        ngram_entropies(np.array([1]), 2)
    with pytest.raises(ValueError, match="outside a vocabulary of 2"):
        ngram_entropies(np.array([1, 2]), 2)
