"""Tokenizers, which document goes into which split, and the loader."""

import base64
import functools
import hashlib
import itertools
import json
import math
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ALONE, flip_byte, needs_gpt2, prepared, tiny_config
from hypothesis import example, given
from hypothesis import strategies as st
from test_tokenizer_files import of_bytes, of_words, saved

import train
from aogpt.checkpoints import load, store
from aogpt.data import loader, packing, sources, tokenizers
from aogpt.data.loader import (
    TokenDataset,
    evaluation_split,
    find_dataset,
    load_meta,
    read_tokens,
    spread,
)
from aogpt.data.tokenizers import get_tokenizer
from aogpt.evaluation.eval_sets import open_eval_set, open_split
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import sha256_file
from convert import convert

every_tokenizer = pytest.mark.parametrize(
    "tokenizer", ["bytes", "english", pytest.param("gpt2", marks=needs_gpt2)]
)


@functools.cache
def tokenizer_of(name):
    """Return a tokenizer by its name, or that of the tokenizer.json of a function."""
    if not callable(name):
        return get_tokenizer(name)
    with tempfile.TemporaryDirectory() as folder:
        return get_tokenizer(str(saved(name(), Path(folder))))


@pytest.mark.parametrize(
    "name",
    ["bytes", "english", pytest.param("gpt2", marks=needs_gpt2), of_bytes, of_words],
)
@given(text=st.text())
@example(text="\n")
def test_round_trip(name, text):
    tokenizer = tokenizer_of(name)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text == "".join(tokenizer.pieces(tokens))
    assert tokenizer.vocab_size > max(tokens, default=0)
    assert name not in ("bytes", of_bytes) or tokens == list(text.encode())
    first = tokenizer.encode("the")
    assert tokenizer.decode(first + tokenizer.encode_after(text)) == "the" + text


@needs_gpt2
def test_gpt2_has_gpt2s_ids():
    tokenizer = get_tokenizer("gpt2")
    numbers = (tokenizer.name, tokenizer.vocab_size, tokenizer.eot)
    assert numbers == ("gpt2", 50257, 50256)
    published = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert tokenizer.sha256 == published
    assert tokenizer.encode("hello world\n") == [31373, 995, 198]
    with pytest.raises(UserError, match="must be one of"):
        get_tokenizer("gtp2")


@every_tokenizer
def test_encode_and_decode_of_the_unusual(tokenizer):
    tokenizer = get_tokenizer(tokenizer)
    encoded = tokenizer.encode("a<|endoftext|>b")  # text like any other
    assert tokenizer.eot not in encoded
    assert tokenizer.decode(encoded) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    encoded = tokenizer.encode("naïve")
    assert tokenizer.decode(torch.tensor(encoded)) == "naïve"
    assert tokenizer.decode(np.array(encoded)) == "naïve"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"id {wrong} is not in the vocabulary"):
            tokenizer.decode([1, wrong])


# every kind of byte that UTF-8 knows, in any order, which hardly ever is UTF-8
BYTES = st.sampled_from(
    [0x41, 0x80, 0x9F, 0xA0, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF4, 0xFF, 256]
)


@every_tokenizer
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_decoded_text(tokenizer, data):
    # ids 0 to 255 of the others are the single bytes
    last = get_tokenizer(tokenizer).vocab_size - 1
    ids = BYTES if tokenizer == "bytes" else st.integers(0, 256) | st.integers(0, last)
    tokens = data.draw(st.lists(ids, max_size=9))
    pieces = get_tokenizer(tokenizer).pieces(tokens)
    assert len(pieces) == len(tokens)
    text = get_tokenizer(tokenizer).to_bytes(tokens)
    assert "".join(pieces) == text.decode(errors="replace")


@every_tokenizer
def test_pieces_hold_whole_characters_and_end_with_their_document(tokenizer):
    is_bytes = tokenizer == "bytes"
    tokenizer = get_tokenizer(tokenizer)
    for text in ("naïve", "🤖 你好", "👩\u200d🚀 العربية\u2028\x00", "", "\ufffd"):
        pieces = tokenizer.pieces(np.array(tokenizer.encode(text), int))
        assert "".join(pieces) == text
        if is_bytes:  # a character stands where its last byte is
            expected = []
            for character in text:
                expected += [""] * (len(character.encode()) - 1)
                expected.append(character)
            assert pieces == expected
    part = tokenizer.encode("🤖")[:-1]
    half = [""] * (len(part) - 1) + ["\ufffd"]
    pieces = tokenizer.pieces([*part, tokenizer.eot, *part])
    assert pieces == [*half, "<|endoftext|>", *half]


def routed(texts, fraction, limit=None):
    corpus = sources.Corpus(iter(texts), [])
    return list(packing.route({"train": corpus}, fraction, limit))


def validation_documents(count, fraction, limit=None) -> list[int]:
    texts = [str(number) for number in range(count)]
    pairs = routed(texts, fraction, limit)
    assert [text for _, text in pairs] == texts[:limit]
    return [int(text) for split, text in pairs if split == "val"]


@given(st.integers(2, 300), st.integers(2, 300), st.floats(0.003, 0.5))
def test_both_splits_get_documents_by_index_only(count, more, fraction):
    few, many = sorted((count, more))
    alone = validation_documents(few, fraction)
    among_more = validation_documents(many, fraction)
    assert 0 < len(alone) < few
    assert abs(len(alone) - few * fraction) <= 1
    assert alone == validation_documents(many, fraction, limit=few)
    if few * fraction >= 1:  # else all documents are one group
        assert alone == [i for i in among_more if i < few]


def test_the_draw_is_uniform_within_groups():
    places = np.array(validation_documents(20_000, 0.1)) % 10
    counts = np.bincount(places, minlength=10)
    # chi-square, 9 degrees of freedom, p = 0.001
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    # fixed numbers: a prepared split must survive a change of numpy's version
    assert validation_documents(60, 0.1) == [4, 19, 24, 37, 46, 58]


@given(st.text(st.sampled_from("ab \n"), max_size=50), st.floats(0.01, 0.5))
def test_a_single_document_is_split_once(text, fraction):
    (one, train), (other, val) = routed([text + "the end"], fraction)
    assert (one, other) == ("train", "val")
    assert train + val == text + "the end"
    assert train
    assert val


def write_dataset(folder: Path, tokens, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    content = np.asarray(tokens, dtype=np.uint16).tobytes()
    (folder / "train.bin").write_bytes(content)
    entry = {
        "file": "train.bin",
        "tokens": len(tokens),
        "documents": 1,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    meta = {
        "format": 1,
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot": 256,
        "dtype": "uint16",
        "splits": {"train": entry},
    }
    meta.update(changes)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> TokenDataset:
    """23 blocks of 4 tokens, and 3 tokens that fill no block; block i holds 4 i .. 4 i
    + 3."""
    folder = write_dataset(tmp_path_factory.mktemp("numbered"), np.arange(23 * 4 + 3))
    return TokenDataset(folder, "train", 4)


def test_blocks(numbered):
    assert isinstance(numbered.tokens, np.memmap)
    assert numbered.tail().tolist() == [[92, 93, 94]]
    two = numbered.blocks(np.array([22, 0]))
    assert two.tolist() == [[88, 89, 90, 91], [0, 1, 2, 3]]
    assert numbered.blocks(np.array([], dtype=np.int64)).shape == (0, 4)
    for wrong in (-1, 23):
        with pytest.raises(AssertionError):
            numbered.blocks(np.array([wrong]))


@given(count=st.integers(1, 300), total=st.integers(1, 10**12))
def test_chosen_blocks_are_spread_over_all_of_them(count, total):
    """Each part of the split has its share, to within one."""
    chosen = spread(count, total)
    assert len(set(chosen.tolist())) == len(chosen) == min(count, total)
    for first in (total // 10, total // 2, 9 * total // 10):
        assert abs((chosen < first).sum() - first / total * len(chosen)) < 1
    assert count < total or chosen.tolist() == list(range(total))


@given(
    seed=st.integers(0, 2**64 - 1),
    global_batch=st.integers(1, 60),
    start=st.integers(0, 4),
)
def test_every_block_once_per_epoch(numbered, seed, global_batch, start):
    # batches straddle epochs, or hold several
    steps = range(math.ceil(23 * (start + 2) / global_batch) + 1)
    batches = [
        numbered.batch(seed, step, range(global_batch), global_batch) for step in steps
    ]
    seen = torch.cat(batches)[:, 0] // 4
    for epoch in range(start + 2):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)].tolist()) == list(range(23))


@given(
    seed=st.integers(0, 9),
    step=st.integers(0, 40),
    size=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_any_partition_into_processes_gives_the_same_batch(
    numbered, seed, step, size, cuts
):
    whole = numbered.batch(seed, step, range(size), size)
    edges = itertools.pairwise([0, *sorted(min(cut, size) for cut in cuts), size])
    parts = [numbered.batch(seed, step, range(*edge), size) for edge in edges]
    assert torch.equal(torch.cat(parts), whole)
    # a resumed run has no history
    fresh = TokenDataset(Path(numbered.tokens.filename).parent, "train", 4)
    assert torch.equal(fresh.batch(seed, step, range(size), size), whole)


def test_shuffles_are_uniform_and_differ_between_epochs_and_seeds(numbered):
    def order(seed, epoch):
        return tuple((numbered.batch(seed, epoch, range(23), 23)[:, 0] // 4).tolist())

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4
    counts = np.bincount([order(seed, 0)[0] for seed in range(2300)], minlength=23)
    assert ((counts - 100) ** 2 / 100).sum() < 48.3  # 22 degrees of freedom, p = 0.001
    # fixed numbers: a run must be able to go on under another version of numpy
    fixed = "4 5 15 10 11 9 6 7 22 18 17 1 21 12 0 14 19 8 2 20 13 16 3"
    assert order(1, 2) == tuple(map(int, fixed.split()))


def test_files_are_checked_by_size_always_and_by_checksum_when_asked(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "d")
    rng = random.Random(3)
    file = folder / "train.bin"
    original = file.read_bytes()
    TokenDataset(folder, "train", 16, verify=True)
    for _ in range(10):
        file.write_bytes(original)
        flip_byte(file, 2 * rng.randrange(len(original) // 2), rng.randrange(1, 256))
        TokenDataset(folder, "train", 16)
        with pytest.raises(UserError, match="train.bin is damaged: .*checksum"):
            TokenDataset(folder, "train", 16, verify=True)
    file.write_bytes(original[:-2])
    with pytest.raises(UserError, match="train.bin is damaged: "):
        TokenDataset(folder, "train", 16)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="train.bin"):
        TokenDataset(folder, "train", 16)
    with pytest.raises(FileNotFoundError, match="no meta.json.*prepare.py"):
        load_meta(tmp_path)


OUTSIDE = {"file": "../secret", "tokens": 50, "sha256": ""}
NO_NUMBER = {"file": "train.bin", "tokens": True, "sha256": ""}


@pytest.mark.parametrize(
    ("tokens", "split", "block_size", "changes", "says"),
    [
        (50, "val", 4, {}, "the split of .* is 'val', but it must be one of 'train'"),
        (50, "train", 51, {}, "50 tokens.*lower block_size to at most 50"),
        (50, "train", 1, {"format": 3}, "meta.json: format is 3"),
        (50, "train", 1, {"splits": {"train": {}}}, "lacks splits.train.file"),
        (50, "train", 1, {"splits": {"train": OUTSIDE}}, "train.file is"),
        (50, "train", 1, {"splits": {"train": NO_NUMBER}}, "train.tokens is"),
        (300, "train", 1, {}, "holds the id 299"),  # even where the checksum is right
        (
            64,
            "train",
            16,
            {"block_size": 32, "protocol": "sedd"},
            "not of 16: .* --block-size 16",
        ),
    ],
)
def test_loader_refuses(tmp_path, tokens, split, block_size, changes, says):
    folder = write_dataset(tmp_path / "d", range(tokens), **changes)
    with pytest.raises(UserError, match=says):
        TokenDataset(folder, split, block_size)


def test_damaged_meta(tmp_path):
    for content in (b"{", b"[]", b"{}", b'{"format": 1}', b"\xff"):
        (tmp_path / "meta.json").write_bytes(content)
        with pytest.raises(UserError, match="meta.json: "):
            load_meta(tmp_path)


def test_the_split_to_evaluate_on():
    for splits, made_for, expected in (
        ({"test": {}}, None, "test"),
        ({"train": {}}, None, "train"),
        ({"train": {}, "val": {}, "test": {}}, "test", "test"),
    ):
        assert evaluation_split({"splits": splits, "split": made_for}) == expected
    assert evaluation_split({"splits": {"train": {}, "val": {}}}) == "val"


def test_find_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "DATA", tmp_path / "data")
    (tmp_path / "data").mkdir()
    folder = write_dataset(tmp_path / "data" / "mine", range(9))
    for name in ("mine", str(folder), folder):
        assert find_dataset(name) == folder
    assert read_tokens(folder, "train").tolist() == list(range(9))
    monkeypatch.chdir(tmp_path / "data")
    assert find_dataset("mine") == Path("mine")
    with pytest.raises(
        FileNotFoundError, match=r"in .* \(mine\); make it.* data/prepare.py ptb$"
    ):
        find_dataset("ptb")


def write_vocabulary(path, change=lambda lines: lines):
    lines = [(bytes([i]), i) for i in range(256)] + [(b"the", 256), (b" cat", 257)]
    lines = [f"{base64.b64encode(token).decode()} {i}" for token, i in lines]
    path.write_text("".join(f"{line}\n" for line in change(lines)))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines, "QQ== 258"],  # a token twice
        lambda lines: [*lines, "IHRoZQ== 257"],  # an id twice
        lambda lines: [*lines, "IHRoZQ== 259"],  # without 258
        lambda lines: ["A*== 0", *lines[1:]],  # no base64
        lambda lines: ["AA== x", *lines[1:]],  # no id
        lambda lines: ["IHRoZQ== 0", *lines[1:]],  # without a byte
        lambda lines: [],
    ],
)
def test_a_damaged_vocabulary_is_refused_in_a_line(tmp_path, change):
    with pytest.raises(UserError, match="v.tiktoken is not a vocabulary: "):
        get_tokenizer(str(write_vocabulary(tmp_path / "v.tiktoken", change)))


def test_a_vocabulary_is_known_by_its_sha256(tmp_path):
    """Not by its name or the order of its lines; that of GPT-2 is the one that tiktoken
    checks."""
    one = write_vocabulary(tmp_path / "one.tiktoken")
    same = write_vocabulary(tmp_path / "same.tiktoken", lambda lines: lines[::-1])
    swapped = [*range(256), 257, 256]
    other = write_vocabulary(
        tmp_path / "other.tiktoken",
        lambda lines: [f"{lines[i].split()[0]} {n}" for n, i in enumerate(swapped)],
    )
    checksums = [get_tokenizer(str(path)).sha256 for path in (one, same, other)]
    assert checksums[0] == checksums[1] != checksums[2]
    assert checksums[0] == sha256_file(one)
    english = Path(tokenizers.__file__).with_name("english.tiktoken")
    assert get_tokenizer("english").sha256 == sha256_file(english)


def test_a_vocabulary_of_ones_own_goes_from_the_data_to_the_run_and_its_export(
    tmp_path,
):
    (tmp_path / "a.txt").write_text("the cat sat on the cat, " * 60)
    vocabulary = write_vocabulary(tmp_path / "v.tiktoken")
    text = tmp_path / "a.txt"
    data = prepared("text", tmp_path / "data", text, tokenizer=str(vocabulary))
    meta = load_meta(data)
    assert (meta["tokenizer"], meta["vocab_size"]) == ("tokenizer.tiktoken", 259)
    config = tiny_config(data, tmp_path / "out", steps=5)
    train.train(config, ALONE)
    convert(str(config.run_folder), tmp_path / "export")
    (tmp_path / "v.tiktoken").unlink()
    for path in (
        config.run_folder,
        store.find(config.run_folder)[0],
        tmp_path / "export",
    ):
        loaded = load(path)
        assert loaded.tokenizer_sha256 == meta["tokenizer_sha256"]
        assert loaded.get_tokenizer().sha256 == meta["tokenizer_sha256"]
        assert loaded.get_tokenizer().encode("the cat") == [256, 257]
        assert open_eval_set(open_split(data, None), loaded).mean_bytes(0) > 1.2

    lines = (data / "tokenizer.tiktoken").read_text().splitlines()
    lines[256:] = [lines[256].replace("256", "257"), lines[257].replace("257", "256")]
    (tmp_path / "w.tiktoken").write_text("\n".join(lines))
    (tmp_path / "export" / "tokenizer.tiktoken").write_text("\n".join(lines))
    with pytest.raises(UserError, match="tokenizer.tiktoken has changed .* put its"):
        loaded.get_tokenizer()
    with pytest.raises(UserError, match="made with another vocabulary"):
        prepared("text", data, text, tokenizer=str(tmp_path / "w.tiktoken"))
    prepared("text", data, text, tokenizer=str(tmp_path / "w.tiktoken"), overwrite=True)
    with pytest.raises(UserError, match="of another vocabulary"):
        open_eval_set(open_split(data, None), loaded)
    with pytest.raises(UserError, match="data.tokenizer"):
        train.train(config, ALONE)


def test_training_on_fewer_tokens_takes_blocks_spread_over_the_split(tmp_path):
    folder = write_dataset(tmp_path, np.arange(95))
    few = TokenDataset(folder, "train", 4, max_tokens=22)
    assert few.num_blocks == 5
    assert few.blocks(range(5))[:, 0].tolist() == [0, 16, 36, 52, 72]
    seen = torch.cat([few.batch(3, step, range(5), 5) for step in range(4)])
    assert seen[:, 0].bincount(minlength=95)[[0, 16, 36, 52, 72]].tolist() == [4] * 5
    assert TokenDataset(folder, "train", 4, max_tokens=10**9).num_blocks == 23
