"""What users bring: files of every kind, bad rows, odd text, splits that overlap."""

import json
import re

import pyarrow
import pyarrow.parquet as parquet_files
import pytest
from helpers import documents, needs_gpt2, prepared, write_jsonl, write_rows

from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError

TEXTS = ["plain", "NA", "2020-01-01", 'a "quoted", cell\nof two lines', "null", ""]


def test_rows_are_text_in_every_kind_of_file(tmp_path):
    """A date stays a date's text, and NA no missing value."""
    rows = [{"n": i, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    write_rows(tmp_path / "c.json", rows)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        out = prepared("text", tmp_path / f"o{number}", path, split="test")
        assert documents(out) == TEXTS, path
    one = tmp_path / "one.json"  # a row
    one.write_text(json.dumps({"text": "first", "tags": [{"text": "a tag"}]}, indent=1))
    assert documents(prepared("text", tmp_path / "o", one, split="test")) == ["first"]


@pytest.mark.parametrize(
    "columns, names, says",
    [
        ([["one", None, "two"]], ["text"], "row 2: .*.NoneType"),
        ([["one"], ["two"]], ["text", "text"], ".*Multiple matches for .*text"),
    ],
)
def test_nulls_and_columns_of_one_name_are_refused(tmp_path, columns, names, says):
    path = tmp_path / "a.parquet"
    arrays = [pyarrow.array(column) for column in columns]
    parquet_files.write_table(pyarrow.Table.from_arrays(arrays, names=names), path)
    with pytest.raises(UserError, match=f"a.parquet:? {says}"):
        prepared("text", tmp_path / "o", path, split="test")


def test_a_table_leaves_nothing_behind(tmp_path, monkeypatch):
    """The package `datasets` keeps what it reads, by default in the home folder. A file
    is not a pattern there either."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = tmp_path / "[a] *.parquet"
    table = pyarrow.table({"text": TEXTS, "day": ["2020-01-01"] * len(TEXTS)})
    parquet_files.write_table(table, path)
    assert documents(prepared("text", tmp_path / "o", path, split="test")) == TEXTS
    day = prepared("text", tmp_path / "p", path, split="test", field="day")
    assert documents(day) == ["2020-01-01"] * len(TEXTS)
    assert not cache.exists()
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("text", ["plain text ", "naïve text – "])
@pytest.mark.parametrize("encoding", ["utf-16le", "utf-16be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_text_in_utf16_is_refused(tmp_path, text, encoding, mark):
    (tmp_path / "c.txt").write_bytes((mark + text * 9).encode(encoding))
    with pytest.raises(UserError, match="c.txt: not UTF-8; convert it first"):
        prepared("text", tmp_path / "q", tmp_path / "c.txt")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("# Heading\n" + "word " * 40_000, " "),  # one long line after a heading
        ("# Heading\n" + "x" * 200_000, "x"),  # no place to divide at
        ("a line of words\n" * 10_000, "s"),  # at the end of a line, as ever
    ],
)
def test_one_document_is_divided_near_the_place_of_its_share(tmp_path, text, end):
    (tmp_path / "a.txt").write_text(text)
    out = prepared("text", tmp_path / "o", tmp_path / "a.txt", val_fraction=0.05)
    [train] = documents(out, "train")
    [val] = documents(out, "val")
    assert train + val == text
    assert len(val) == pytest.approx(0.05 * len(text), rel=0.11)
    if end == "x":
        return
    assert train[-1] in "ds"
    assert val[0] in " \n"  # after a whole word or line


def test_a_file_is_given_once(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    with pytest.raises(UserError, match="a file is given twice"):
        prepared("text", tmp_path / "o", source, link)


def test_rows_of_two_splits_are_counted(tmp_path, capsys):
    rows = [f"text number {i % 20}" for i in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    held_out = write_jsonl(tmp_path / "b.jsonl", ["text number 3", "another", ""])
    of_val = write_jsonl(tmp_path / "c.jsonl", ["another"] * 3)
    (tmp_path / "a.txt").write_bytes(b"one line\nand another one\n" * 50)
    # A copy with other line ends is no other text.
    (tmp_path / "b.txt").write_bytes(b"one line\r\nand another one\r\n" * 50 + b"\n")
    other = write_jsonl(tmp_path / "d.jsonl", [f"row {i}" for i in range(200)])
    notes = [
        (source, {}, ["10 of 10 documents of val are in train"]),
        (
            source,
            {"val": (held_out,), "test": (of_val,)},
            [
                "1 of 3 documents of val are in train",
                "3 of 3 documents of test are in val",
            ],
        ),
        (
            tmp_path / "a.txt",
            {"val": (tmp_path / "b.txt",)},
            ["1 of 1 document of val are in train"],
        ),
        (other, {}, []),
    ]
    for number, (file, options, expected) in enumerate(notes):
        prepared("text", tmp_path / f"o{number}", file, **options)
        said = capsys.readouterr().out
        assert re.findall("note: (.*), too", said) == expected


@needs_gpt2
@pytest.mark.parametrize("character", [" ", "\n", "\t", "\u3000"])
def test_a_million_of_one_white_space_character_is_encoded(character):
    text = "before" + character * 1_000_000 + "after"
    for name in ("gpt2", "english"):
        tokenizer = get_tokenizer(name)
        ids = tokenizer.encode_array(text)
        assert tokenizer.decode(ids) == text
    # Shorter runs have tiktoken's own tokens.
    short = "a" + character * 65_535 + "b"
    gpt2 = get_tokenizer("gpt2")
    assert gpt2.encode(short) == gpt2.encoding.encode_ordinary(short)


def test_a_folder_to_write_that_cannot_be_one_is_a_message(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "x").symlink_to(tmp_path / "y")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    for out in (tmp_path / "x", tmp_path / "x" / "deeper"):
        with pytest.raises(OSError, match=str(tmp_path / "x")):
            prepared("text", out, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "x", "y"]
