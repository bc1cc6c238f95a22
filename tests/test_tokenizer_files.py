"""tokenizer.json files: what begins and ends a text, text that is lost, and bytes."""

import dataclasses
import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers import (
    ALONE,
    change,
    needs_gpt2,
    prepared,
    run_main,
    tiny_config,
    write_jsonl,
)
from reference import make_system

import aogpt
import eval_ppl
import train
from aogpt.checkpoints import Loaded, load
from aogpt.data.loader import TokenDataset, load_meta, read_tokens
from aogpt.data.tokenizers import (
    END_OF_TEXT,
    byte_letters,
    get_tokenizer,
    is_gpt2s,
    text_bytes,
)
from aogpt.evaluation.eval_sets import EvalSet, open_eval_set, open_split
from aogpt.runtime.errors import UserError
from convert import convert

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>"]


def of_bytes():
    """Return a tokenizer of single bytes, and the SPECIAL tokens after them."""
    vocabulary = {letter: i for i, letter in enumerate(byte_letters())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def of_words(**options):
    """Return a tokenizer of pieces in which "▁" is a space, as Llama's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz."]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def lossy():
    """Lower case, no decoder, and the alphabet of an English text alone."""
    vocabulary = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz.")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def saved(tokenizer, folder, **files):
    """Write a tokenizer and files of JSON beside it; returns its path."""
    folder.mkdir(exist_ok=True)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def around(tokenizer, template):
    """Return the same tokenizer, which writes tokens around a text."""
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template,
        special_tokens=[
            (token, tokenizer.token_to_id(token))
            for token in SPECIAL
            if token in template
        ],
    )
    return tokenizer


def test_a_text_with_the_token_that_ends_one_is_refused(tmp_path):
    """Where the library reads it so: of a Unigram model with that piece, and where
    its added token is not special."""
    pieces = [("<unk>", -9.0), ("</s>", -1.0), *((letter, -2.0) for letter in "abs</>")]
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    plain = of_bytes()
    plain.add_tokens(["</s>"])
    for name, tokenizer in (("unigram", unigram), ("plain", plain)):
        path = saved(tokenizer, tmp_path / name)
        hub = get_tokenizer(str(path), end_token="</s>")
        assert hub.eot not in hub.encode("ab")
        with pytest.raises(UserError, match="the text holds '</s>', which"):
            hub.encode("a</s>b")


END = {"<|endoftext|>": 256, "<|im_end|>": 257, "<s>": 258}


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({}, "<|endoftext|>"),  # by its name
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, "<|im_end|>"),
        ({"config": {"eos_token_id": 257}}, "<|im_end|>"),
        ({"config": {"eos_token_id": [257, 256]}}, "<|im_end|>"),
        ({"config": {"eos_token_id": [99_999, 257]}}, "<|im_end|>"),
        ({"generation_config": {"eos_token_id": [257]}}, "<|im_end|>"),
        ({"config": {"eos_token_id": 99_999}}, "<|endoftext|>"),  # no such id
        (
            {
                "tokenizer_config": {"eos_token": "<|im_end|>"},
                "config": {"eos_token_id": 256},
            },
            "<|im_end|>",
        ),
    ],
)
def test_the_end_of_a_text_is_read_from_the_files_beside_it(tmp_path, files, end):
    path = saved(of_bytes(), tmp_path / "model", **files)
    tokenizer = get_tokenizer(str(path))
    assert (tokenizer.end_token, tokenizer.eot) == (end, END[end])
    assert tokenizer.decode([97, tokenizer.eot]) == "a" + END_OF_TEXT
    # Copies of it say the same, without the files beside the first.
    (tmp_path / "copy").mkdir()
    tokenizer.keep(tmp_path / "copy")
    copy = get_tokenizer("tokenizer.json", folder=tmp_path / "copy")
    assert copy.eot == tokenizer.eot
    assert copy.starts == tokenizer.starts
    assert copy.sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("template", "starts", "end"),
    [
        ("$A", [], 256),
        ("<s> $A", [258], 256),
        ("$A <|im_end|>", [], 257),  # an end that is appended is no beginning
        ("<s> $A <|im_end|>", [258], 257),
    ],
)
def test_what_a_tokenizer_writes_around_a_text_begins_and_ends_it(
    tmp_path, template, starts, end
):
    path = saved(around(of_bytes(), template), tmp_path)
    tokenizer = get_tokenizer(str(path))
    assert (tokenizer.starts, tokenizer.eot) == (starts, end)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize(
    ("template", "token"), [("<s> $A", "<s>"), ("$A <|im_end|>", "<|im_end|>")]
)
def test_a_tokenizer_that_writes_ids_past_its_vocabulary_is_refused(
    tmp_path, template, token
):
    path = saved(around(of_bytes(), template), tmp_path)
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"][token]["ids"] = [100_000]
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="writes id 100000 around a text, which is not"):
        get_tokenizer(str(path))


@pytest.mark.parametrize("largest", [5_000_000, 4_000_000_000])
def test_an_id_that_would_take_much_memory_is_refused(tmp_path, largest):
    """Each id below the largest one needs memory, also where it is no token."""
    path = saved(of_bytes(), tmp_path)
    values = json.loads(path.read_text())
    values["model"]["vocab"]["!"] = 60_000
    path.write_text(json.dumps(values))
    assert get_tokenizer(str(path)).vocab_size == 60_001
    values["model"]["vocab"]["!"] = largest
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"number of its ids is {largest + 1}, but"):
        get_tokenizer(str(path))
    path = saved(tokenizers.Tokenizer(tokenizers.models.BPE()), tmp_path)
    with pytest.raises(UserError, match="number of its ids is 0, but"):
        get_tokenizer(str(path))


def test_a_begin_that_only_the_settings_ask_for(tmp_path):
    settings = {"bos_token": "<s>", "add_bos_token": True}
    path = saved(of_bytes(), tmp_path, tokenizer_config=settings)
    assert get_tokenizer(str(path)).starts == [258]
    settings["add_bos_token"] = False
    path = saved(of_bytes(), tmp_path, tokenizer_config=settings)
    assert get_tokenizer(str(path)).starts == []


def test_the_user_names_the_end_and_prepare_prints_both(tmp_path, capsys):
    path = saved(around(of_bytes(), "<s> $A"), tmp_path / "model")
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    prepare = partial(prepared, "text", tokenizer=str(path), split="train")
    out = prepare(tmp_path / "o", source)
    said = capsys.readouterr().out
    words = "<|endoftext|> (id 256) ends a document; the model reads it after <s>"
    assert words in said
    with pytest.raises(UserError, match="made with another end token"):
        prepare(out, source, end_token="<|im_end|>")
    out = prepare(tmp_path / "p", source, end_token="<|im_end|>")
    assert "<|im_end|> (id 257) ends a document" in capsys.readouterr().out
    assert load_meta(out)["eot"] == 257
    assert read_tokens(out, "train")[-1] == 257
    assert get_tokenizer("tokenizer.json", folder=out).eot == 257
    prepare(out, source, end_token="<|im_end|>")
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="--end-token <eos>: name a token of"):
        prepare(tmp_path / "q", source, end_token="<eos>")


@pytest.fixture
def two_ends(tmp_path):
    """Return two folders of the same text and tokenizer.json, whose documents end with
    <|endoftext|> (256) and with <|im_end|> (257)."""
    path = saved(of_bytes(), tmp_path / "model")
    source = write_jsonl(tmp_path / "a.jsonl", ["some text " * 9] * 40)
    folders = []
    for end in ("<|endoftext|>", "<|im_end|>"):
        folder = prepared(
            "text",
            tmp_path / f"data{len(folders)}",
            source,
            tokenizer=str(path),
            end_token=end,
            val_fraction=0.2,
        )
        folders.append(folder)
    return folders


def test_a_run_keeps_its_end_of_text_and_is_scored_with_it(
    two_ends, tmp_path, monkeypatch, capsys
):
    first, second = two_ends
    config = tiny_config(first, tmp_path / "out", steps=5)
    config = change(config, model__vocab_size=259)
    train.train(config, ALONE)
    run = config.run_folder
    changed = change(config, data__folder=str(second), train__steps=6)
    with pytest.raises(UserError, match="data.eot = .*which cannot change"):
        train.train(changed, ALONE)
    fresh = change(changed, name="fresh", train__init_from=str(run))
    assert train.train(fresh, ALONE) == 0, "a new run may have another"

    convert(str(run), tmp_path / "export")
    words = re.escape("--end-token '<|endoftext|>'")
    for place in (run, tmp_path / "export"):
        loaded = load(place)
        open_eval_set(open_split(first, None), loaded)
        with pytest.raises(UserError, match=f"id 257.*{words}"):
            open_eval_set(open_split(second, None), loaded)
    pretrained = dataclasses.replace(loaded, system="LlamaForCausalLM")
    monkeypatch.setattr(eval_ppl, "load", lambda *a, **k: pretrained)
    said = {}
    for data in two_ends:
        said[data] = run_main(
            eval_ppl, monkeypatch, capsys, "x", "--datasets", str(data)
        )
    assert "end with id" not in said[first]
    assert f"documents of {second} end with id 257" in said[second]


TEXTS = ["", "a", "the cat. ", "  two spaces", "naïve 🤖", "\n\nlines\n", "a\ud800b"]


@pytest.mark.parametrize("make", [of_bytes, of_words])
def test_the_bytes_of_ids_are_those_of_the_text(tmp_path, make):
    """Also where a space is added before every document."""
    tokenizer = get_tokenizer(str(saved(make(), tmp_path)))
    assert tokenizer.adds_space == (make is of_words)
    for text in TEXTS:
        ids = tokenizer.encode_array(text)
        assert tokenizer.count_bytes(ids).sum() == text_bytes(text), repr(text)
    ids = []
    for text in TEXTS:
        ids += [*tokenizer.encode(text), tokenizer.eot]
    total = sum(map(text_bytes, TEXTS))
    assert tokenizer.count_bytes(np.array(ids)).sum() == total
    # The end of a document that began before: its own spaces count.
    rest = tokenizer.encode_array("a b")[1:]
    if make is of_words:
        assert tokenizer.count_bytes(rest[1:], starts=False).sum() == 2


@pytest.mark.parametrize("make", [of_bytes, of_words])
def test_documents_are_read_back_as_they_were_written(tmp_path, make):
    """Also where a space is added before every document."""
    library_tokenizer = make()
    tokenizer = get_tokenizer(str(saved(library_tokenizer, tmp_path)))
    ids = []
    for text in ("a b", " a", "", "b"):
        encoded = library_tokenizer.encode(text, add_special_tokens=False)
        ids += [*encoded.ids, tokenizer.eot]
    text = tokenizer.decode(ids)
    assert text == f"a b{END_OF_TEXT} a{END_OF_TEXT}{END_OF_TEXT}b{END_OF_TEXT}"
    assert "".join(tokenizer.pieces(ids)) == text
    assert tokenizer.encode_documents(text).tolist() == ids
    of_text = tokenizer.text_bytes_of(text, np.array(ids))
    assert of_text.sum() == len("a b ab")


def test_a_tokenizer_that_loses_text_is_told_and_its_bytes_are_the_texts(
    tmp_path, capsys
):
    path = saved(lossy(), tmp_path / "model")
    texts = ["the cat.", "The Cat.", "cat", "a café", "no"] * 4
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = prepared("text", tmp_path / "o", source, tokenizer=str(path), split="train")
    said = capsys.readouterr().out
    assert "note: the tokenizer loses text" in said
    entry = load_meta(out)["splits"]["train"]
    assert entry["text_bytes"] == sum(map(text_bytes, texts)) == 112
    # Without spaces and without "é".
    assert entry["token_bytes"] == 4 * (7 + 7 + 3 + 4 + 2)
    # A tokenizer that keeps all of it has nothing to tell.
    path = saved(of_words(), tmp_path / "good")
    prepared("text", tmp_path / "p", source, tokenizer=str(path), split="train")
    assert "loses text" not in capsys.readouterr().out


def gpt2_ids():
    """Return the ids of GPT-2's tokens, as tokenizer.json writes them."""
    letters = byte_letters()
    ranks = get_tokenizer("gpt2").ranks
    return {"".join(letters[byte] for byte in token): i for token, i in ranks.items()}


def write_gpt2(folder):
    """A random GPT-2 of 300 tokens, without a tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=16, n_embd=16, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@needs_gpt2
def test_a_gpt2_with_another_vocab_json_alone_is_refused(tmp_path):
    write_gpt2(tmp_path)
    ids = {**gpt2_ids(), "<|endoftext|>": 50256}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    assert load(tmp_path).tokenizer == "gpt2"
    ids["the"], ids["Ġthe"] = ids["Ġthe"], ids["the"]
    for other in (ids, {"日": 0}, {}):
        (tmp_path / "vocab.json").write_text(json.dumps(other))
        with pytest.raises(UserError, match="vocab.json is not GPT-2's"):
            load(tmp_path)


@needs_gpt2
def test_gpt2s_own_tokenizer_json_is_known_from_others(tmp_path):
    tokenizer = of_bytes()
    tokenizer.model = tokenizers.models.BPE(vocab=gpt2_ids(), merges=[])
    assert is_gpt2s(get_tokenizer(str(saved(tokenizer, tmp_path / "same"))))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    assert not is_gpt2s(get_tokenizer(str(saved(tokenizer, tmp_path / "lower"))))
    assert not is_gpt2s(get_tokenizer(str(saved(of_bytes(), tmp_path / "bytes"))))


NAMES = [
    "bytes",
    "english",
    "alphabet:abc hT",
    pytest.param("gpt2", marks=needs_gpt2),
    of_bytes,
    of_words,
    lossy,
]


def test_special_tokens_in_a_text_are_counted(tmp_path, capsys):
    text = "<s>a</s> b</s><|endoftext|>"
    name = str(saved(of_words(), tmp_path / "model"))
    tokenizer = get_tokenizer(name)
    assert not {1, 2} & set(tokenizer.encode(text))
    times = ["1 time <s>", "2 times </s>", "1 time <|endoftext|>"]
    notes = {f"{count} is read as ordinary text" for count in times}
    of_score = notes - {"1 time <|endoftext|> is read as ordinary text"}  # a token
    model = make_system(
        "GPT-2", 3, tokens=tokenizer.vocab_size, block_size=64, dtype=torch.float32
    )
    place = str(tmp_path / "model")
    size = tokenizer.vocab_size
    loaded = Loaded(model.eval(), place, 0, "raw", "tokenizer.json", size)
    of_text = aogpt.TextModel(loaded)
    for call, expected in (
        (lambda: of_text.score([text]), of_score),
        (lambda: of_text.generate([text], 1), notes),
        (lambda: of_text.rank([text + "[a|b]"]), of_score),
    ):
        with pytest.warns(UserWarning) as warned:
            call()
        assert {str(warning.message) for warning in warned} == expected

    source = write_jsonl(tmp_path / "a.jsonl", [text, "plain"])
    prepared("text", tmp_path / "data", source, tokenizer=name, split="val")
    printed = capsys.readouterr().out
    assert all(f"note: {note}" in printed for note in notes)


@pytest.mark.parametrize("scored_from", [0, 1], ids=["start token", "no start token"])
@pytest.mark.parametrize("name", NAMES)
def test_bits_a_byte_times_bytes_are_the_nats_in_every_script(
    tmp_path, monkeypatch, capsys, name, scored_from
):
    """The bytes are those of the text, without the tokens that nothing predicts."""
    text = "The caf\u00e9  was \udcff closed. \U0001f916"
    if callable(name):
        name = str(saved(name(), tmp_path / "model"))
    if name.startswith("alphabet"):
        text = "a cab at bat".replace("t", "h")
    tokenizer = get_tokenizer(name)
    count = tokenizer.vocab_size
    model = make_system("GPT-2", 3, tokens=count, block_size=4, dtype=torch.float32)
    recorded = "tokenizer.json" if name.endswith(".json") else name
    place = str(tmp_path / "model")
    loaded = Loaded(model.eval(), place, 0, "raw", recorded, count, scored_from)
    of_text = aogpt.TextModel(loaded)
    ids = tokenizer.encode_array(text)
    counts = tokenizer.count_bytes(ids)
    lost = text_bytes(text) / counts.sum()
    scored = np.arange(len(ids)) % 4 >= scored_from
    expected = counts[scored].sum() * lost

    (scores,) = of_text.score([text])
    assert scores.scored == scored.sum()
    assert scores.bytes == round(expected)
    nats = scores.bits_per_byte * scores.bytes * math.log(2)
    assert nats == pytest.approx(scores.nats)

    if scored_from == 0:  # a lone surrogate is read as U+FFFD, three bytes
        assert scores.bytes == len(text.replace("\udcff", "\ufffd").encode())

    path = tmp_path / "result.json"
    monkeypatch.setattr(eval_ppl, "load", lambda *a, **k: loaded)
    # Prepared data, where a document begins within a block.
    source = write_jsonl(tmp_path / "a.jsonl", [text] * 3)
    data = prepared("text", tmp_path / "data", source, tokenizer=name, split="val")
    rows = TokenDataset(data, "val", 4)
    words = ["x", "--datasets", data, "--json", path, "--overwrite"]
    run_main(eval_ppl, monkeypatch, capsys, *words)
    (row,) = json.loads(path.read_text())["results"]
    counts = tokenizer.count_bytes(rows.tokens)
    tail = len(rows.tokens) % 4
    if tail <= scored_from:  # a row of which nothing is scored
        counts = counts[: len(counts) - tail]
    scored = np.arange(len(counts)) % 4 >= scored_from
    assert row["tokens"] == scored.sum()
    size = row["bytes_per_token"] * row["tokens"]
    assert size == pytest.approx(counts[scored].sum() * lost)


def test_bits_per_byte_of_examples_are_of_what_is_predicted(tmp_path):
    path = saved(of_words(), tmp_path / "model")
    rows = ['{"prompt": "one", "text": " and two"}\n', '{"text": "three"}\n'] * 6
    (tmp_path / "a.jsonl").write_text("".join(rows))
    out = prepared(
        "records",
        tmp_path / "o",
        tmp_path / "a.jsonl",
        tokenizer=str(path),
        split="val",
        block_size=16,
    )
    data = open_split(out, "val")
    data.divide(16)
    questions = EvalSet("o", data, data.num_blocks)
    predicted = int((data.roles(range(data.num_blocks)) == 0).sum())
    total = questions.mean_bytes(0) * predicted
    assert total == pytest.approx(6 * (len(" and two") + len("three")))


def test_a_gpt2_with_a_tokenizer_of_its_own_is_read_and_exported_with_it(tmp_path):
    write_gpt2(tmp_path / "model")
    with_ids = load(tmp_path / "model")
    assert (with_ids.tokenizer, with_ids.vocab_size) == ("gpt2", 300)
    path = saved(of_bytes(), tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert (loaded.tokenizer, loaded.vocab_size) == ("tokenizer.json", 259)
    tokenizer = loaded.get_tokenizer()
    assert tokenizer.sha256 == get_tokenizer(str(path)).sha256
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    convert(str(tmp_path / "model"), tmp_path / "export")
    exported = load(tmp_path / "export")
    assert exported.get_tokenizer().encode("The cat") == tokenizer.encode("The cat")
