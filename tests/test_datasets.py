"""Preparing datasets: detokenisers, the packing of the SEDD protocol, sources, and
prepare.py as users run it."""

import functools
import gzip
import http.server
import json
import lzma
import os
import re
import signal
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet as parquet_files
import pytest
from helpers import assert_user_error, documents, prepared, run_script, write_jsonl

from aogpt.data import books, catalogue, packing, sources
from aogpt.data import prepare as prepare_module
from aogpt.data.detokenisers import RULES, detokenise
from aogpt.data.loader import load_meta, read_tokens
from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import sha256_file, staging

BYTES = ("--tokenizer", "bytes", "--out")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CASES = {
    "wikitext": [
        (
            "the players ' hats , a guest @-@ starring role",
            "the players' hats, a guest-starring role",
        ),
        ("some 12 @,@ 000 men in about 3 @.@ 5 km", "some 12,000 men in about 3.5 km"),
        ("one : two ; three . four ! five ? six", "one: two; three. four! five? six"),
        ("a ( b c ) d [ e f ] g { h i } j", "a (b c) d [e f] g {h i} j"),
        ('he said " yes " and " no " again', 'he said "yes" and "no" again'),
        ("he said ' yes ' and ' no ' again", "he said 'yes' and 'no' again"),
        ("= = = = Deep = = = = ", "==== Deep ==== "),
        ("= = = Less = = = of = = Career = =", "=== Less === of == Career =="),
        (" = Title = \n", " = Title =\n"),
        ("45 ° north\n of N N N the film 's end", "45°north\nof 1 N 1 the film's end"),
        # in order: the comma leaves its space before the pair is closed, the full stop
        # ends at the line's end only
        ("x , ( y , z ) . \n", "x, (y, z).\n"),
        # an apostrophe counts as the opening of a pair too
        ("the dogs ' bark 's end", "the dogs'bark's end"),
        ("", ""),
    ],
    "ptb": [
        (
            "the company 's shares and two years ' time",
            "the company's shares and two years' time",
        ),
        ("it was n't so \n two", "it wasn't so\ntwo"),
        (r"N \/ N is 1\/2", "N / 1 is 1/2"),
        ("up N N to N N N N now", "up 1 1 to 1 1 1 1 now"),
        ("cost $ N billion or # N million", "cost $1 billion or #1 million"),
        ("mr. <unk> said <unk>", "mr. ? said ?"),
        ("$ N", "$ N"),  # no space after it: it stays, and so does the dollar's
    ],
    "lm1b": [
        (
            "see http : / / x.org and https : / / y.org",
            "see http://x.org and https://y.org",
        ),
        ("the man 's hat . It ended .", "the man's hat. It ended."),
        ("who ? me ! oh ?", "who? me! oh?"),
        ("one , two : three ; four / five !", "one, two: three; four/five!"),
        ('he said " yes sir " twice', 'he said "yes sir" twice'),
        ("he said ' - yes ' twice", "he said '- yes' twice"),
        ("one ( or two ) more [ or less ] for", "one (or two) more [or less] for"),
        ("paid $ 5 or £ 5", "paid $5 or £5"),
        (
            "at 5 p.m. ) .",
            "at 5 p.m. ) .",
        ),  # a full stop after what is no word keeps its space
    ],
    "lambada": [("  “ hi ” he said ’ \n", '\n" hi " he said ’'), ("", "\n")],
    # WikiText's rules alone would leave " / / " and the last full stop as they are.
    "scientific_papers": [
        (
            "http : / / a.b gives ( 3 @.@ 5 ) of it , yes .",
            "http:// a.b gives (3.5) of it, yes.",
        )
    ],
}


@pytest.mark.parametrize("name", RULES)
def test_detokenisers(name):
    for text, expected in CASES[name]:
        assert detokenise(name, text) == expected


@pytest.mark.parametrize("count, block_size", [(40, 7), (5, 4), (9001, 16), (9, 90)])
def test_the_blocks_are_those_of_the_package_datasets(tmp_path, count, block_size):
    """Those of `Dataset.map` over batches of rows, in eight contiguous shards, as with
    eight processes: also of fewer rows than shards, of shards with more rows than a
    batch, and of rows that fill no block."""
    lengths = np.random.default_rng(0).integers(1, 9, count)
    rows = np.split(np.arange(lengths.sum()), lengths.cumsum()[:-1])

    def group(batch):
        ids = np.concatenate(batch["ids"])
        whole = len(ids) // block_size * block_size
        return {"ids": ids[:whole].reshape(-1, block_size)}

    expected = []
    table = datasets.Dataset.from_dict({"ids": rows})
    shards = min(count, 8)
    for index in range(shards):
        shard = table.shard(shards, index, contiguous=True)
        for block in shard.map(group, batched=True)["ids"]:
            expected += block
    path = tmp_path / "test.bin"
    file = packing.SplitFile(path, "sedd", block_size, get_tokenizer("bytes"))
    for row in rows:
        file.write("", row.astype(np.uint16), None)
    if not expected:
        with pytest.raises(UserError, match="lower --block-size, or use --protocol f"):
            file.close()
        return
    entry = file.close()
    assert np.fromfile(path, np.uint16).tolist() == expected
    assert entry["tokens"] == len(expected)
    assert entry["dropped_tokens"] == lengths.sum() - len(expected)
    assert entry["documents"] == count
    assert entry["sha256"] == sha256_file(path)


def test_both_protocols_and_what_meta_says(tmp_path):
    rows = [f"the {i} th row's text isn't long" for i in range(40)]
    text = "".join(f" the {i} th row 's text is n't long \n" for i in range(40))
    source = write(tmp_path / "a.txt", text)
    full = prepared("ptb", tmp_path / "full", source, protocol="full")
    assert documents(full) == rows
    sedd = prepared("ptb", tmp_path / "sedd", source, block_size=32)
    for folder, *expected in ((full, "full", None), (sedd, "sedd", 32)):
        meta = load_meta(folder)
        keys = ("protocol", "block_size", "detokeniser", "split")
        assert [meta[key] for key in keys] == [*expected, "ptb", "test"]
        assert meta["notes"] == ["40 rows, where the published test split has 3,761"]
        assert meta["splits"]["test"]["documents"] == 40
        assert (meta["splits"]["test"]["dropped_tokens"] == 0) == (folder == full)


def parquet(path: Path, rows: list[str], field: str = "text") -> Path:
    table = pyarrow.table(
        {"other": range(len(rows)), field: pyarrow.array(rows, pyarrow.string())}
    )
    parquet_files.write_table(table, path)
    return path


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
def test_text_in_each_format(tmp_path, compression):
    rows = write_jsonl(tmp_path / "rows", ["third", "", "naïve"]).read_bytes()
    contents = {
        "a.txt": b"first file,\r\n\r\nas it is\n",
        "b.MD": b"\xef\xbb\xbf# second\n",
        "c.jsonl": rows + b"\n",  # no document
        "v.txt": b"validation",
        "t.txt": b"test",
    }
    files = []
    for name, content in contents.items():
        file = tmp_path / f"{name}{compression}"
        file.write_bytes(COMPRESS[compression](content))
        files.append(file)
    *source, val, test = files
    folder = prepared("text", tmp_path / "o", *source, val=(val,), test=(test,))
    train = ["first file,\n\nas it is\n", "# second\n", "third", "", "naïve"]
    for split, texts in (("train", train), ("val", ["validation"]), ("test", ["test"])):
        assert documents(folder, split) == texts
    parts = load_meta(folder)["source"]
    assert [part["split"] for part in parts] == ["train"] * 3 + ["val", "test"]
    assert [part["file"] for part in parts] == [file.name for file in files]
    assert [part["sha256"] for part in parts] == [sha256_file(file) for file in files]
    assert str(tmp_path) not in (folder / "meta.json").read_text()


WIKI = " \n = Title = \n \n One @-@ two . \n"


def test_rows_of_every_kind_of_file(tmp_path):
    published = [
        line if line.strip() else "" for line in WIKI.splitlines(keepends=True)
    ]
    files = [
        write(tmp_path / "wiki.test.tokens", WIKI),
        write(tmp_path / "crlf.txt", WIKI.replace("\n", "\r\n")),
        write_jsonl(tmp_path / "rows.jsonl", published),
        parquet(tmp_path / "rows.parquet", published),
    ]
    for number, file in enumerate(files):
        folder = prepared("wikitext103", tmp_path / f"o{number}", file, protocol="full")
        assert documents(folder) == ["", " = Title =\n", "", " One-two.\n"], file
        assert load_meta(folder)["source"][0]["sha256"] == sha256_file(file)


def rows_of(name: str, split: str, numbers: tuple, **place) -> list[str]:
    """Return the rows of a dataset that is read from another hub or url, and has
    published numbers of rows of its own."""
    dataset = replace(catalogue.DATASETS[name], numbers=numbers, **place)
    read_row = functools.partial(sources.text_of, field=dataset.field)
    args = prepare_module.Prepare(name, split=split)
    return list(dataset.corpora(args, read_row)[split].documents)


def test_rows_of_the_hub(tmp_path, monkeypatch):
    """The loading code on a repository of the hub's layout, in a folder: the
    configuration and split are picked."""
    wiki = tmp_path / "wiki"
    listed = ""
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        (wiki / config).mkdir(parents=True)
        listed += f"- config_name: {config}\n  data_files:\n"
        for split in ("train", "validation", "test"):
            path = wiki / config / f"{split}-00000-of-00001.parquet"
            parquet(path, ["", f" {config} {split} \n"])
            listed += f"  - split: {split}\n    path: {config}/{split}-*\n"
    write(wiki / "README.md", f"---\nconfigs:\n{listed}---\n")
    two = (2, 2, 2)
    rows = ["", " wikitext-2-raw-v1 train \n"]
    hub = (str(wiki), "wikitext-2-raw-v1")
    assert rows_of("wikitext2", "train", two, hub=hub) == rows
    hub = (str(wiki), "wikitext-103-raw-v1")
    rows = ["", " wikitext-103-raw-v1 validation \n"]
    assert rows_of("wikitext103", "val", two, hub=hub) == rows

    # a repository that still holds a script: the converted copy, of which parts can be
    # partial
    real = datasets.load_dataset

    def load(repository, config=None, **keywords):
        if keywords.pop("revision", None) is None:
            raise RuntimeError(
                "Dataset scripts are no longer supported, but found lm1b.py"
            )
        return real(repository, config, **keywords)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for folder in ("test", "partial-train"):
        (tmp_path / "lm1b" / "plain_text" / folder).mkdir(parents=True)
        parquet(
            tmp_path / "lm1b" / "plain_text" / folder / "0000.parquet",
            [f" {folder} . "],
        )
    hub = (str(tmp_path / "lm1b"), "plain_text")
    assert rows_of("lm1b", "test", (1, 1), hub=hub) == ["test ."]
    assert rows_of("lm1b", "train", (1, 1), hub=hub) == ["partial-train ."]


def test_rows_of_published_files(tmp_path):
    write(tmp_path / "ptb.valid.txt", " one \n two \n")
    write_jsonl(tmp_path / "lambada_test.jsonl", ["a\nb"])
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=tmp_path
    )
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        ptb = address + "ptb.{}.txt"
        lambada = address + "lambada_{}.jsonl"
        assert rows_of("ptb", "val", (2, 2, 2), url=ptb) == ["one", "two"]
        assert rows_of("lambada", "test", (1,), url=lambada) == ["a\nb"]
        with pytest.raises(
            UserError, match="ptb.test.txt: .*404.*get it elsewhere.*--source FILE"
        ):
            rows_of("ptb", "test", (2, 2, 2), url=ptb)
        server.shutdown()


GOOD = b'{"text": "good"}\n'
NOISE = b"".join(
    b'{"text": "%s"}\n' % os.urandom(50).hex().encode() for _ in range(200)
)
BAD_FILES = [
    ("empty.txt", b"", "train of text has no document"),
    ("one.txt", b"x", "a single record or character makes no validation"),
    ("latin.txt", "caf\xe9".encode("latin1"), "latin.txt: not UTF-8; .*iconv"),
    ("syntax.jsonl", GOOD + b"{'text': 1}\n", "syntax.jsonl line 2: this is not JSON"),
    (
        "other.jsonl",
        GOOD + b'{"text": 3, "title": "t"}\n',
        "other.jsonl line 2: no text in the field 'text', but 'text' .int.*'title'.*"
        "--field",
    ),
    ("list.jsonl", b'["text"]\n', "list.jsonl line 1: it is .*a table of keys"),
    ("rows.json", b'[{"text": "ok"}, 5]', "rows.json row 2 is 5, but"),
    (
        "twice.jsonl",
        GOOD + b'{"text": "a", "text": "b"}\n',
        "twice.jsonl line 2: .*two keys 'text' in one",
    ),
    (
        "twice.json",
        b'[{"text": "a", "id": {"n": 1, "n": 2}}]',
        "twice.json: .*two keys 'n' in one object",
    ),
    ("cut.txt.gz", gzip.compress(NOISE)[:-3000], "cut.txt.gz.*cut short"),
    ("a.parquet", b"no parquet at all", "a.parquet: parquet cannot be read from it"),
    ("page.html", b"<p>", "page.html: unknown kind of file.*.txt, .md, .*.gz or .xz"),
]


@pytest.mark.parametrize(("file", "content", "says"), BAD_FILES)
def test_files_that_cannot_be_read(tmp_path, file, content, says):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=says):
        prepared("text", tmp_path / "out" / "o", tmp_path / file)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("name", "file", "options", "says"),
    [
        (
            "ptb",
            "a.txt",
            {},
            "160 tokens in 20 rows.* a block of 1,024: lower --block-size",
        ),
        (
            "texts",
            "a.txt",
            {},
            "'texts', but it must be one of 'stories', .*'text', .*'openwebtext'",
        ),
        ("text", "*.txt", {}, r"No such file .*/\*.txt"),
        ("stories", "a.txt", {}, "stories takes no --source"),
        (
            "text",
            "a.txt",
            {"split": "val", "val_fraction": 0.1},
            "one of --split, --val-fraction and --val",
        ),
        (
            "text",
            "a.txt",
            {"val_fraction": 0.7},
            "--val-fraction is 0.7, .* at most 0.5",
        ),
        (
            "lambada",
            "a.txt",
            {"split": "val"},
            "--split of lambada is 'val'.*one of 'test'",
        ),
    ],
)
def test_options_that_do_not_fit(tmp_path, name, file, options, says):
    write(tmp_path / "a.txt", "one row\n" * 20)
    with pytest.raises((UserError, FileNotFoundError), match=says):
        prepared(name, tmp_path / "out" / "o", tmp_path / file, **options)
    assert not list(tmp_path.glob("out/*"))


def test_folders_and_what_is_noticed_on_the_way(tmp_path, capsys):
    """Files of a hidden folder are not read, unless it is the one that is given."""
    tmp_path = tmp_path / ".home"
    (tmp_path / "in" / "deep" / ".hidden").mkdir(parents=True)
    hidden = (".hidden.txt", "deep/.hidden/a.txt")
    for name in ("a.txt", "deep/b.txt.gz", "c.MD", "empty.txt", "other.html", *hidden):
        text = "" if "empty" in name else f"{name} one\r\ntwo\r\n<|endoftext|>\nthree"
        data = text.encode()
        (tmp_path / "in" / name).write_bytes(
            gzip.compress(data) if "gz" in name else data
        )
    write_jsonl(tmp_path / "in" / "r.jsonl", ["a\r\nb"] * 3)
    folder = prepared("text", tmp_path / "o", tmp_path / "in", split="test")
    said = capsys.readouterr().out
    assert "note: 3 times <|endoftext|> is read as ordinary text" in said
    assert load_meta(folder)["splits"]["test"]["documents"] == 6


def test_data_of_earlier_versions_is_found_finished(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    meta = json.loads(
        (prepared("text", tmp_path / "o", source) / "meta.json").read_text()
    )
    del meta["tokenizer_sha256"]
    for key in ("prompt_field", "skip_long"):
        del meta["settings"][key]
    meta["settings"]["split_at"] = None  # of a removed option
    write(tmp_path / "o" / "meta.json", json.dumps(meta))
    prepared("text", tmp_path / "o", source)
    assert "nothing to do" in capsys.readouterr().out
    meta["settings"]["split_at"] = "|"
    write(tmp_path / "o" / "meta.json", json.dumps(meta))
    with pytest.raises(UserError, match="made with another split_at"):
        prepared("text", tmp_path / "o", source)


def test_the_help_names_every_dataset(printed):
    shown = printed(prepare_module, "--help")
    assert all(re.search(rf"\b{name}\b", shown) for name in catalogue.DATASETS)


# a proxy that is not there: no network, and no waiting for it either


def test_the_script_says_what_cannot_be_had_without_a_network(tmp_path):
    nobody = "http://127.0.0.1:9"  # a proxy that is not there: no waiting for it either
    source = write(tmp_path / "a.txt", "some text")
    for arguments, environment, says in (
        (
            ["wikitext2", *BYTES],
            {"HF_HUB_OFFLINE": "1"},
            ["Salesforce/wikitext: the hub failed", "wikitext2 --source FILE.parquet"],
        ),
        (
            ["text", "--source", source, "--tokenizer", "gpt2", "--out"],
            {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "https_proxy": nobody},
            ["TIKTOKEN_CACHE_DIR", "--tokenizer english or bytes"],
        ),
    ):
        environment["HF_HOME"] = str(tmp_path / "hf")
        words = ["data/prepare.py", *arguments, tmp_path / "o"]
        assert_user_error(run_script(*words, check=False, **environment), *says)
        assert not (tmp_path / "o").exists()


def test_stories_are_chapters_of_the_books_in_the_repository_and_need_no_torch(
    tmp_path,
):
    """Nor the package datasets: the script starts in a moment."""
    for module in ("torch", "datasets", "pyarrow"):
        write(tmp_path / f"{module}.py", "raise AssertionError('imported')")
    for command in (["--help"], ["stories", "--out", tmp_path / "o"]):
        done = run_script("data/prepare.py", *command, PYTHONPATH=str(tmp_path))
    meta = load_meta(tmp_path / "o")
    assert (meta["tokenizer"], meta["vocab_size"]) == ("english", 2048)
    assert (meta["format"], meta["dtype"], meta["eot"]) == (1, "uint16", 2047)

    train = documents(tmp_path / "o", "train")
    val = documents(tmp_path / "o", "val")
    assert len(train) + len(val) == 171
    assert len(val) == 8
    assert sum(map(len, train + val)) > 2_700_000
    assert any("Dorothy" in text for text in train)
    assert "python train.py configs/quickstart.toml" in done.stdout
    for split, entry in meta["splits"].items():
        tokens = read_tokens(tmp_path / "o", split)
        assert entry["documents"] == (tokens == 2047).sum()
        assert f"{entry['tokens']:,} tokens" in done.stdout


def test_a_second_run_does_nothing(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    out = tmp_path / "o"

    def again(**options):
        return prepared("text", out, source, **options)

    again()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again()
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(
        UserError, match="made with another protocol, block_size: .*--out"
    ):
        again(protocol="sedd", block_size=2)
    write_jsonl(source, ["one", "two", "three"])
    with pytest.raises(UserError, match="made with another source: .*--overwrite"):
        again()
    again(overwrite=True)
    assert load_meta(out)["splits"]["train"]["documents"] == 2
    (out / "train.bin").write_bytes(bytes((out / "train.bin").stat().st_size))
    with pytest.raises(UserError, match="does not match its size or checksum"):
        again()
    assert names(tmp_path) == ["a.jsonl", "o"]


def test_overwrite_keeps_what_was_there_and_replaces_datasets_only(
    tmp_path, monkeypatch
):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    folder = prepared("text", tmp_path / "o", source)
    before = tree(folder)
    bad = write(tmp_path / "bad.jsonl", '{"text": "a"}\n' * 100 + "{\n")
    with pytest.raises(UserError, match="bad.jsonl line 101"):
        prepared("text", folder, bad, overwrite=True)
    assert tree(folder) == before
    assert names(tmp_path) == ["a.jsonl", "bad.jsonl", "o"]
    for name, content in {"notes.md": "keep", "mine.bin": "keep"}.items():
        write(folder / name, content)
        with pytest.raises(UserError, match=f"{name}.*choose another --out"):
            prepared("text", folder, source, overwrite=True)
        assert tree(folder) == before | {name: b"keep"}
        (folder / name).unlink()
    for path in folder.iterdir():
        path.unlink()
    real = prepare_module.write_splits

    def slow(*arguments):
        (folder / "thesis.txt").write_text("precious")
        return real(*arguments)

    monkeypatch.setattr(prepare_module, "write_splits", slow)
    with pytest.raises(UserError, match="thesis.txt.*choose another --out"):
        prepared("text", folder, source)  # an empty folder is filled
    assert names(folder) == ["thesis.txt"]


def left_behind(folder: Path, *, with_old: bool) -> Path:
    """Leave what a process leaves that is killed before it removes its partial folder;
    another process has its number meanwhile. with_old: before the second move."""
    left = folder.with_name(f".{folder.name}.partial-{os.getppid()}")
    left.mkdir()
    (left / "lock").touch()
    if with_old:
        (left / "new").mkdir()
        folder.rename(left / "old")
    return left


def test_a_run_that_ended_between_the_two_moves_is_mended(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    folder = prepared("text", tmp_path / "o", source)
    before = tree(folder)
    left_behind(folder, with_old=True)
    with pytest.raises(UserError, match="made with another val_fraction"):
        prepared("text", folder, source, val_fraction=0.4)
    assert tree(folder) == before
    assert names(tmp_path) == ["a.jsonl", "o"]


def test_the_next_start_clears_what_a_killed_one_left(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    folder = prepared("text", tmp_path / "o", source)
    left_behind(folder, with_old=False)
    capsys.readouterr()
    prepared("text", folder, source)
    assert "nothing to do" in capsys.readouterr().out
    assert names(tmp_path) == ["a.jsonl", "o"]


def test_a_start_leaves_the_work_of_another_one_alone(tmp_path):
    with staging(tmp_path / "o") as folder:
        (folder / "file").touch()
        prepared("text", tmp_path / "o", write_jsonl(tmp_path / "a.jsonl", ["a", "b"]))
        assert (folder / "file").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_cleans_up_and_keeps_what_was_there(
    tmp_path, script, monkeypatch, number
):
    """A shell's `&` makes a script ignore Ctrl-C, not SIGTERM."""
    out = prepared(
        "text", tmp_path / "o", write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    )
    before = tree(out)
    is_ignored = number == signal.SIGTERM
    signal.signal(
        signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler
    )
    write_document = packing.SplitFile.write
    written = []

    def interrupted(self, *document):
        write_document(self, *document)
        written.append(document)
        if len(written) == 50:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(packing.SplitFile, "write", interrupted)
    source = write_jsonl(tmp_path / "b.jsonl", ["another"] * 100)
    words = ["text", "--source", source, *BYTES, out, "--overwrite"]
    status, _, err = script(prepare_module, *words)
    assert (status, len(written)) == (130, 50)
    assert "interrupted" in err
    assert tree(out) == before
    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "o"]


def test_a_text_set_of_a_hub_is_prepared_by_its_name(tmp_path, printed):
    """A folder has the form of a repository: its files, or README.md, say what the
    splits are."""
    folder = tmp_path / "owner" / "tales"
    (folder / "fine").mkdir(parents=True)
    tales = [f"tale {i}" for i in range(40)]
    write_jsonl(folder / "fine" / "train.jsonl", tales, field="story")
    files = "configs:\n- config_name: fine\n  data_files:\n"
    files += "  - split: train\n    path: fine/*.jsonl\n"
    (folder / "README.md").write_text(f"---\n{files}---\n")
    out = tmp_path / "out"
    options = "--field story --config fine --val-fraction 0.1".split()
    options += [*BYTES, out]
    printed(prepare_module, "hub", folder, *options)
    val = documents(out, "val")
    assert sorted(documents(out, "train") + val) == sorted(tales)
    assert len(val) == 4
    assert load_meta(out)["source"][0]["config"] == "fine"
    with pytest.raises(UserError, match="hub needs a repository, OWNER/NAME"):
        prepared("hub", out)
    with pytest.raises(UserError, match="alphabet:ABA has a character twice"):
        prepared("stories", tmp_path / "o", tokenizer="alphabet:ABA")


def test_books_come_from_their_repository_in_their_splits(tmp_path, monkeypatch):
    listed = "split\tauthor\ttitle\tbytes\ntrain\tX Y\tOne: 1\t9\nval\tX Y\tÉ\t4\n"
    listed += "test\tX Y\tTwo\t3\n"
    (tmp_path / "books.tsv").write_text(listed)
    monkeypatch.setattr(books, "LIST", tmp_path / "books.tsv")
    file = tmp_path / "books.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("repository-0/README.md", "about")
        archive.writestr(
            "repository-0/X Y/E\u0301 .md", "two!\r\n"
        )  # as some file systems write É
        archive.writestr("repository-0/X Y/One: 1.md", "one\r\n\r\none!\r\n")
        archive.writestr("repository-0/X Y/Two.md", "two")
    folder = prepared("books", tmp_path / "out", file, tokenizer="bytes")
    assert documents(folder, "train") == ["one\n\none!"]
    assert documents(folder, "val") == ["two!"]
    assert documents(folder, "test") == ["two"]
    for old, new in (("Two", "Three"), ("Two\t3", "Two\t4")):
        (tmp_path / "books.tsv").write_text(listed.replace(old, new))
        with pytest.raises(UserError, match="T.*o*e*.md is missing or has another len"):
            prepared("books", tmp_path / "other", file, tokenizer="bytes")


def test_an_alphabet_of_ones_own_is_the_vocabulary_of_the_data(tmp_path):
    amino = "ACDEFGHIKLMNPQRSTVWY"
    folder = tmp_path / "proteins"
    rng = np.random.default_rng(0)
    proteins = ["".join(rng.choice(list(amino), 50)) for _ in range(40)]
    source = write_jsonl(tmp_path / "proteins.jsonl", proteins)
    alphabet = f"alphabet:{amino}"
    prepared("text", folder, source, tokenizer=alphabet)
    meta = load_meta(folder)
    assert meta["vocab_size"] == 21
    assert meta["tokenizer"] == alphabet
    assert sorted(documents(folder, "train") + documents(folder, "val")) == sorted(
        proteins
    )
    tokenizer = get_tokenizer(meta["tokenizer"])
    assert tokenizer.encode("YAC") == [19, 0, 1]
    assert tokenizer.decode([1, 0, 20]) == "CA<|endoftext|>"
    source.write_text('{"text": "ACBD"}\n' * 30)
    with pytest.raises(UserError, match="'B' is not in the alphabet.* 'ACBD'$"):
        prepared("text", tmp_path / "other", source, tokenizer=alphabet)
