"""Tests of the evaluation sets: detokenisers, the packing of the SEDD protocol, sources, and finding datasets."""

import dataclasses
import functools
import gzip
import http.server
import json
import lzma
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_user_error, run_script
from hypothesis import given
from hypothesis import strategies as st

from data import catalogue, detokenisers, loader, packing
from data.loader import TokenDataset, evaluation_split, find_dataset, load_meta, read_tokens
from data.prepare import Prepare, prepare
from data.tokenizers import get_tokenizer

SETS = {each.name: each for each in catalogue.EVALUATION_SETS}


@pytest.fixture
def gpt2_file(monkeypatch):
    """tiktoken's file of GPT-2's tokenizer; skips where the environment names none."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("AOGPT_DATA", "") + "/tiktoken"
    if not Path(folder).is_dir():
        pytest.skip("needs TIKTOKEN_CACHE_DIR or AOGPT_DATA/tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", folder)


def made(name: str, out: Path, *source: Path, **options) -> Path:
    """prepare.py in this process, bytes as tokens unless told otherwise."""
    return prepare(
        Prepare(name, out=out, source=source, **({"tokenizer": "bytes", "workers": 1} | options))
    )


def documents(folder: Path, split: str = "test") -> list[str]:
    meta = load_meta(folder)
    text = get_tokenizer(meta["tokenizer"]).decode(read_tokens(folder, split, verify=True))
    return text.split("<|endoftext|>")[:-1]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# detokenisers: what each rule does, written by hand from the rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the players ' hats", "the players' hats"),
        ("a guest @-@ starring role", "a guest-starring role"),
        ("some 12 @,@ 000 men", "some 12,000 men"),
        ("about 3 @.@ 5 km", "about 3.5 km"),
        ("one : two", "one: two"),
        ("one ; two", "one; two"),
        ("one . two", "one. two"),
        ("one ! two", "one! two"),
        ("one ? two", "one? two"),
        ("one , two", "one, two"),
        ("a ( b c ) d", "a (b c) d"),
        ("a [ b c ] d", "a [b c] d"),
        ("a { b c } d", "a {b c} d"),
        ('he said " yes " and " no " again', 'he said "yes" and "no" again'),
        ("he said ' yes ' and ' no ' again", "he said 'yes' and 'no' again"),
        ("= = = = Deep = = = =", "==== Deep ===="),
        ("= = = Less = = =", "=== Less ==="),
        ("= = Career = =", "== Career =="),
        ("45 ° north", "45°north"),
        (" = Title = \n", " = Title =\n"),
        ("one\n two", "one\ntwo"),
        ("N N N", "N 1 N"),
        ("the film 's end", "the film's end"),
        # in order: the comma leaves its space before the pair is closed, the full stop ends at the line's end only
        ("x , ( y , z ) . \n", "x, (y, z).\n"),
        # an apostrophe counts as the opening of a pair too
        ("the dogs ' bark 's end", "the dogs'bark's end"),
        ("", ""),
    ],
)
def test_wikitext_rules(text, expected):
    assert detokenisers.wikitext(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the company 's shares", "the company's shares"),
        ("two years ' time", "two years' time"),
        ("it was n't so", "it wasn't so"),
        ("one \n two", "one\ntwo"),
        (r"N \/ N", "N / N"),
        (r"1\/2", "1/2"),
        ("up N N to N N N N now", "up 1 1 to 1 1 1 1 now"),
        ("cost $ N billion", "cost $1 billion"),
        ("cost # N million", "cost #1 million"),
        ("mr. <unk> said <unk>", "mr. ? said ?"),
        ("$ N", "$ N"),  # no space after it: it stays, and so does the dollar's
        (
            "the dow jones industrial average plunged N points",
            "the dow jones industrial average plunged 1 points",
        ),
    ],
)
def test_ptb_rules(text, expected):
    assert detokenisers.ptb(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see http : / / www.x.org now", "see http://www.x.org now"),
        ("see https : / / x.org now", "see https://x.org now"),
        ("the man 's hat", "the man's hat"),
        ("it ended . Then more", "it ended. Then more"),
        ("it ended .", "it ended."),
        ("who ? me", "who? me"),
        ("who ?", "who?"),
        ("oh ! no", "oh! no"),
        ("oh !", "oh!"),
        ("one , two", "one, two"),
        ("one : two", "one: two"),
        ("one ; two", "one; two"),
        ("and / or", "and/or"),
        ('he said " yes sir " twice', 'he said "yes sir" twice'),
        ("he said ' - yes ' twice", "he said '- yes' twice"),
        ("one ( or two ) more", "one (or two) more"),
        ("one [ or two ] more", "one [or two] more"),
        ("paid $ 5", "paid $5"),
        ("paid £ 5", "paid £5"),
        # a full stop after what is no word keeps its space
        ("at 5 p.m. ) .", "at 5 p.m. ) ."),
    ],
)
def test_lm1b_rules(text, expected):
    assert detokenisers.lm1b(text) == expected


def test_lambada_rules():
    assert detokenisers.lambada("  “ hi ” he said ’ \n") == '\n" hi " he said ’'
    assert detokenisers.lambada("") == "\n"


def test_real_lines(real_data):
    ptb = (real_data / "ptb" / "ptb.test.txt").read_text().splitlines()
    assert detokenisers.ptb(ptb[0].strip()) == "no it wasn't black monday"
    assert detokenisers.ptb(ptb[3].strip()).startswith(
        "the 1 stock specialist firms on the big board floor the buyers"
    )
    wiki = (
        (real_data / "wikitext" / "wiki.test.tokens")
        .read_text(encoding="utf-8")
        .splitlines(keepends=True)
    )
    assert detokenisers.wikitext(wiki[1]) == " = Robert Boulter =\n"
    assert detokenisers.wikitext(wiki[6]) == " == Career ==\n"
    assert detokenisers.wikitext(wiki[3]).startswith(
        " Robert Boulter is an English film, television and theatre actor. He had a guest-starring role on the "
        "television series The Bill in 2000. This"
    )
    assert ' he portrayed "Scott Parry" in the episode, "In Safe Hands". ' in detokenisers.wikitext(
        wiki[11]
    )
    with open(real_data / "lambada" / "lambada_test.jsonl", encoding="utf-8") as file:
        first = json.loads(next(file))["text"]
    assert detokenisers.lambada(first).startswith(
        "\nIn my palm is a clear stone, and inside it is a small ivory"
    )


# ---------------------------------------------------------------------------------------------------------------------
# packing


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [(0, 1)]),
        (7, [(i, i + 1) for i in range(7)]),
        (10, [(0, 2), (2, 4), *((i, i + 1) for i in range(4, 10))]),
        (
            3761,
            [(0, 471), *((471 + 470 * i, 471 + 470 * (i + 1)) for i in range(7))],
        ),  # the PTB test set
        (8001, [(0, 1000), (1000, 1001), *((1001 + 1000 * i, 2001 + 1000 * i) for i in range(7))]),
    ],
)
def test_groups(rows, expected):
    assert list(packing.groups(rows)) == expected


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_packing_against_lists(tmp_path_factory, lengths, block_size, group_rows, seed):
    """Rows of the given lengths, written in any batches, against concatenated lists."""
    rng = np.random.default_rng(seed)
    rows, start = [], 0
    for length in lengths:
        rows.append(list(range(start, start + length)))
        start += length
    expected = []
    for shard in np.array_split(
        np.arange(len(rows)), 8
    ):  # numpy's sizes are the same: larger ones first
        for first in range(0, len(shard), group_rows):
            flat = [i for row in shard[first : first + group_rows] for i in rows[row]]
            expected += flat[: len(flat) // block_size * block_size]
    cuts = sorted({0, start, *rng.integers(0, start + 1, 3).tolist()})
    ends = np.cumsum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "GROUP_ROWS", group_rows)
        patch.setattr(packing, "COPY_BYTES", 6)
        file = packing.SplitFile(tmp_path_factory.getbasetemp() / "test.bin", block_size)
        for low, high in zip(cuts, cuts[1:], strict=False):
            here = ends[(ends > low) & (ends <= high)] - low
            file.write(np.arange(low, high, dtype=np.uint16), here)
        if not expected:
            with pytest.raises(ValueError, match="lower --block-size, or use --protocol full"):
                file.entry()
            return
        entry = file.entry()
    assert np.fromfile(file.path, np.uint16).tolist() == expected
    assert (entry["tokens"], entry["dropped_tokens"]) == (len(expected), start - len(expected))
    assert entry["documents"] == len(rows) and entry["sha256"] == loader.sha256_file(file.path)
    assert not file.path.with_suffix(".ends").exists()


def test_the_blocks_are_those_of_the_package_datasets(tmp_path, real_data, gpt2_file):
    """Token for token, on the whole of PTB's and LAMBADA's test sets, on fewer rows than shards, and on shards of more
    than one group (11,283 rows)."""
    pytest.importorskip("datasets")
    ptb, lambada = real_data / "ptb" / "ptb.test.txt", real_data / "lambada" / "lambada_test.jsonl"
    thrice = write(tmp_path / "thrice.txt", ptb.read_text(encoding="utf-8") * 3)
    cases = [
        ("ptb", ptb, None, 1024),
        ("lambada", lambada, None, 1024),
        ("ptb", thrice, None, 1024),
        ("ptb", ptb, 5, 8),
        ("lambada", lambada, 9, 16),
    ]
    keys, jobs = ("kind", "source", "rows", "block_size"), []
    for number, case in enumerate(cases):
        jobs.append(dict(zip(keys, case, strict=True)) | {"out": tmp_path / f"{number}.npy"})
    write(tmp_path / "jobs.json", json.dumps(jobs, default=str))
    run_script(
        "tests/packing_reference.py",
        tmp_path / "jobs.json",
        HF_HOME=str(tmp_path / "hf"),
        HF_HUB_OFFLINE="1",
    )
    for number, (name, source, rows, block_size) in enumerate(cases):
        expected = np.load(tmp_path / f"{number}.npy")
        out = tmp_path / f"o{number}"
        made(name, out, source, tokenizer="gpt2", limit=rows, block_size=block_size)
        data = TokenDataset(out, "test", block_size, verify=True)
        assert len(expected) > 8 and torch.equal(
            data.blocks(range(data.num_blocks)), torch.from_numpy(expected)
        )
        entry = data.meta["splits"]["test"]
        made(name, tmp_path / f"f{number}", source, tokenizer="gpt2", limit=rows, protocol="full")
        assert (
            read_tokens(tmp_path / f"f{number}", "test").size
            == entry["tokens"] + entry["dropped_tokens"]
        )


def test_full_drops_nothing_and_meta_says_how(tmp_path):
    source = write(
        tmp_path / "a.txt", "".join(f" the {i} th row 's text is n't long \n" for i in range(40))
    )
    full, sedd = (
        made("ptb", tmp_path / "full", source, protocol="full"),
        made("ptb", tmp_path / "sedd", source, block_size=32),
    )
    rows = [f"the {i} th row's text isn't long" for i in range(40)]
    assert documents(full) == rows
    meta = load_meta(full)
    assert (meta["protocol"], meta["block_size"], meta["detokeniser"], meta["split"]) == (
        "full",
        None,
        "ptb",
        "test",
    )
    assert meta["splits"]["test"]["dropped_tokens"] == 0 and meta["packing"].endswith(
        "nothing dropped"
    )
    assert meta["notes"] == ["40 rows, where the published test split has 3,761"]
    meta = load_meta(sedd)
    assert (meta["protocol"], meta["block_size"], meta["splits"]["test"]["documents"]) == (
        "sedd",
        32,
        40,
    )
    for words in ("8 shards", "1000 rows", "blocks of 32"):
        assert words in meta["packing"]
    blocks = TokenDataset(sedd, "test", 32).blocks(range(3))
    shard = "\x00".join(rows[:5]) + "\x00"  # 40 rows: 5 a shard, and a shard is a group
    assert (
        get_tokenizer("bytes").decode(blocks.flatten()).replace("<|endoftext|>", "\x00")
        == shard[:96]
    )


def test_local_text_in_either_protocol(tmp_path):
    source = write(
        tmp_path / "a.jsonl",
        "".join(json.dumps({"text": f"{i} 's" * 20}) + "\n" for i in range(100)),
    )
    made("text", tmp_path / "sedd", source, protocol="sedd", block_size=16, val_fraction=0.2)
    meta = load_meta(tmp_path / "sedd")
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [
        80,
        20,
    ] and not meta["detokeniser"]
    assert all(
        entry["tokens"] % 16 == 0 and entry["dropped_tokens"] for entry in meta["splits"].values()
    )
    made("text", tmp_path / "one", source, split="test")
    assert documents(tmp_path / "one") == [f"{i} 's" * 20 for i in range(100)]
    assert evaluation_split(load_meta(tmp_path / "one")) == "test"


def test_the_number_of_workers_changes_no_block(tmp_path):
    rng = np.random.default_rng(0)
    texts = [
        "x " * int(n) + "'s" for n in rng.integers(0, 1500, 4500)
    ]  # 7 MB: more than the workers' first batches
    source = write(tmp_path / "a.txt", "\n".join(texts))
    one, two = (
        made("lm1b", tmp_path / f"{n}" / "o", source, workers=n, block_size=100, protocol="sedd")
        for n in (1, 2)
    )
    for name in ("test.bin", "meta.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert sorted(path.name for path in two.iterdir()) == ["meta.json", "test.bin"]


# ---------------------------------------------------------------------------------------------------------------------
# sources


def parquet(path: Path, rows: list[str], field: str = "text") -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table({field: arrow.array(rows, arrow.string())}), path
    )
    return path


WIKI = " \n = Title = \n \n One @-@ two . \n"
WIKI_ROWS = ["", " = Title =\n", "", " One-two.\n"]


def test_rows_of_every_kind_of_file(tmp_path):
    lines = WIKI.splitlines(keepends=True)
    published = ["" if not line.strip() else line for line in lines]
    files = [
        write(tmp_path / "wiki.test.tokens", WIKI),
        write(tmp_path / "crlf.txt", WIKI.replace("\n", "\r\n")),
        write(
            tmp_path / "rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in published)
        ),
        parquet(tmp_path / "rows.parquet", published),
        tmp_path / "wiki.test.raw.gz",
        tmp_path / "rows.jsonl.xz",
    ]
    files[4].write_bytes(gzip.compress(WIKI.encode()))
    files[5].write_bytes(lzma.compress(files[2].read_bytes()))
    for number, file in enumerate(files):
        folder = made("wikitext103", tmp_path / f"o{number}", file, protocol="full")
        assert documents(folder) == WIKI_ROWS, file
        assert load_meta(folder)["source"][0]["sha256"] == loader.sha256_file(file)
    assert (
        documents(made("wikitext2", tmp_path / "two", files[0], protocol="full"), "train")
        == WIKI_ROWS
    )


def test_rows_of_the_other_sets(tmp_path):
    lines = write(tmp_path / "news.en.heldout-00000-of-00050", " The man 's hat . \nWho ?\n")
    assert documents(made("lm1b", tmp_path / "a", lines, protocol="full")) == [
        "The man's hat.",
        "Who?",
    ]
    rows = [json.dumps({"text": text}) for text in (" “ a\n\nb ” ", "c")]
    passages = write(tmp_path / "p.jsonl", "\n".join(rows))
    assert documents(made("lambada", tmp_path / "b", passages, protocol="full")) == [
        '\n" a\n\nb "',
        "\nc",
    ]
    rows = [json.dumps({"sentence": text}) for text in (" no it was n't ", "")]
    sentences = write(tmp_path / "s.jsonl", "\n".join(rows))
    assert documents(made("ptb", tmp_path / "c", sentences, protocol="full")) == [
        "no it wasn't",
        "",
    ]


def test_unknown_words_in_wikitext_are_noted(tmp_path):
    folder = made(
        "wikitext103", tmp_path / "o", write(tmp_path / "a.tokens", "a <unk> b\n"), protocol="full"
    )
    notes = load_meta(folder)["notes"]
    assert len(notes) == 2 and "<unk>" in notes[1]


def rows_of(evaluation_set, split: str) -> list[str]:
    files = catalogue.Files([], [], [], evaluation_set.field, split)
    return [text for text, end in evaluation_set.corpora(files)[split].pieces() if end]


def test_rows_of_the_hub(tmp_path, monkeypatch):
    """The loading code on a repository of the hub's layout, in a folder: the configuration and split are picked."""
    datasets = pytest.importorskip("datasets")
    for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        (tmp_path / "wiki" / config).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            parquet(
                tmp_path / "wiki" / config / f"{split}-00000-of-00001.parquet",
                ["", f" {config} {split} \n"],
            )
    listed = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(
            f"  - split: {s}\n    path: {config}/{s}-*\n" for s in ("train", "validation", "test")
        )
        for config in ("wikitext-2-raw-v1", "wikitext-103-raw-v1")
    )
    write(tmp_path / "wiki" / "README.md", f"---\nconfigs:\n{listed}---\n")
    few = {"train": 2, "val": 2, "test": 2}
    repository = {"repository": str(tmp_path / "wiki"), "rows": few}
    two, many = (
        dataclasses.replace(SETS[name], **repository) for name in ("wikitext2", "wikitext103")
    )
    assert rows_of(two, "train") == ["", " wikitext-2-raw-v1 train \n"]
    assert rows_of(many, "val") == ["", " wikitext-103-raw-v1 validation \n"]
    with pytest.raises(ValueError, match="2 of 4,358 documents were served"):
        rows_of(dataclasses.replace(SETS["wikitext103"], repository=str(tmp_path / "wiki")), "test")

    # a repository that still holds a script: the converted copy, of which parts can be partial
    real = datasets.load_dataset

    def load(repository, config=None, **keywords):
        if keywords.pop("revision", None) is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found lm1b.py")
        return real(repository, config, **keywords)

    for folder in ("test", "partial-train"):
        (tmp_path / "lm1b" / "plain_text" / folder).mkdir(parents=True)
        parquet(tmp_path / "lm1b" / "plain_text" / folder / "0000.parquet", [f" {folder} . "])
    monkeypatch.setattr(datasets, "load_dataset", load)
    lm1b = dataclasses.replace(
        SETS["lm1b"], repository=str(tmp_path / "lm1b"), rows={"train": 1, "test": 1}
    )
    assert rows_of(lm1b, "test") == ["test ."] and rows_of(lm1b, "train") == ["partial-train ."]


def test_rows_of_published_files(tmp_path):
    write(tmp_path / "ptb.valid.txt", " one \n two \n")
    write(tmp_path / "lambada_test.jsonl", json.dumps({"text": "a\nb"}))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        ptb = dataclasses.replace(
            SETS["ptb"], url=address + "ptb.{}.txt", rows={"val": 2, "test": 2}
        )
        lambada = dataclasses.replace(
            SETS["lambada"], url=address + "lambada_{}.jsonl", rows={"test": 1}
        )
        assert rows_of(ptb, "val") == ["one", "two"] and rows_of(lambada, "test") == ["a\nb"]
        with pytest.raises(ValueError, match="could not get ptb.*404.*ptb --source FILE"):
            rows_of(ptb, "test")
        with pytest.raises(ValueError, match="1 of 5,153 documents"):
            rows_of(dataclasses.replace(lambada, rows=SETS["lambada"].rows), "test")
        server.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# what users get wrong


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    contents = {
        "empty.txt": b"",
        "good.txt": b"one row\n" * 20,
        "text.jsonl": b'{"text": "one"}\n' * 20,
        "number.jsonl": b'{"text": 1}\n',
        "empty.jsonl": b"\n",
        "latin.txt": "one\ncaf\xe9\n".encode("latin1"),
        "binary.txt": b"PAR1\x00\x01\x02\n",
        "fake.parquet": b"no parquet at all",
        "model.bin": b"\x80\x04",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


@pytest.mark.parametrize(
    ("name", "file", "options", "says"),
    [
        ("ptb", "empty.txt", {}, "empty.txt is empty"),
        (
            "ptb",
            "text.jsonl",
            {},
            "line 1: no field 'sentence'; its fields are 'text'; choose one with --field",
        ),
        (
            "ptb",
            "model.bin",
            {},
            "unknown kind of file; known here are .parquet and .jsonl, and text files .*: .txt",
        ),
        ("ptb", "binary.txt", {}, "binary.txt, line 1: this is not text"),
        ("ptb", "latin.txt", {}, "latin.txt: not UTF-8"),
        (
            "ptb",
            "good.txt",
            {},
            "160 tokens in 20 rows.*fills a block of 1,024: lower --block-size, or use --proto",
        ),
        (
            "lambada",
            "good.txt",
            {},
            "known here are .parquet and .jsonl; its rows are not single lines",
        ),
        ("lambada", "number.jsonl", {}, "'text' holds int, not a string"),
        ("lambada", "text.jsonl", {"field": "body"}, "no field 'body'"),
        ("lambada", "empty.jsonl", {}, "holds no documents"),
        (
            "lambada",
            "text.jsonl",
            {"split": "val"},
            "lambada has no split 'val'.*its splits are test",
        ),
        (
            "wikitext103",
            "good.txt",
            {"split": "tests"},
            "did you mean test. its splits are train, val, test",
        ),
        (
            "wikitext103",
            "good.txt",
            {"protocol": "sed"},
            "unknown protocol 'sed': did you mean sedd",
        ),
        (
            "wikitext103",
            "good.txt",
            {"protocol": "full", "block_size": 8},
            "--block-size is for --protocol sedd",
        ),
        ("wikitext103", "good.txt", {"block_size": 0}, "--block-size must be at least 1"),
        ("wikitext103", "good.txt", {"val_fraction": 0.1}, "is an evaluation set"),
        (
            "text",
            "good.txt",
            {"split": "val", "val_fraction": 0.1},
            "--split writes all documents to one split",
        ),
        ("text", "good.txt", {"block_size": 8}, "--block-size is for --protocol sedd"),
    ],
)
def test_wrong_files_and_options(tmp_path, files, name, file, options, says):
    with pytest.raises(ValueError, match=says):
        made(name, tmp_path / "o", files[file], **options)
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob(".o*"))


def test_wrong_parquet_files(tmp_path, files):
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match="a.parquet, row 1: no field 'sentence'; its fields are 'text'"
    ):
        made("ptb", tmp_path / "o", parquet(tmp_path / "a.parquet", ["one"]))
    with pytest.raises(ValueError, match="e.parquet holds no documents"):
        made("ptb", tmp_path / "o", parquet(tmp_path / "e.parquet", [], "sentence"))
    with pytest.raises(ValueError, match="fake.parquet"):
        made("ptb", tmp_path / "o", files["fake.parquet"])
    with pytest.raises(ValueError, match="mixes files of different kinds .jsonl, parquet."):
        made("ptb", tmp_path / "o", tmp_path / "a.parquet", files["text.jsonl"])


def test_the_script_says_what_is_wrong(tmp_path, files):
    def run(*arguments, **environment):
        return run_script(
            "data/prepare.py", *arguments, "--out", tmp_path / "o", check=False, **environment
        )

    assert_user_error(
        run("lambada", "--source", files["good.txt"], "--tokenizer", "bytes"), ".parquet and .jsonl"
    )
    assert_user_error(run("ptb", "--split", "dev"), "has no split 'dev'", "train, val, test")
    proxy = "http://127.0.0.1:9"  # nobody is there: no network, and no waiting for it either
    done = run("ptb", "--tokenizer", "bytes", HTTPS_PROXY=proxy, https_proxy=proxy)
    assert_user_error(done, "could not get ptb", "data/prepare.py ptb --source FILE")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = run("wikitext2", "--tokenizer", "bytes", **offline)
    assert_user_error(
        done, "could not get wikitext2 from the Hugging Face hub", "wikitext2 --source FILE"
    )
    write(tmp_path / "datasets.py", "raise ImportError('not installed')")
    done = run("wikitext2", "--tokenizer", "bytes", PYTHONPATH=str(tmp_path))
    assert_user_error(done, "need the package datasets: pip install datasets", "--source FILE")
    assert not (tmp_path / "o").exists()


# ---------------------------------------------------------------------------------------------------------------------
# finding and reading what was prepared


def test_a_sedd_folder_holds_blocks_of_one_size(tmp_path):
    source = write(tmp_path / "a.txt", "a sentence of some length\n" * 80)
    folder = made("ptb", tmp_path / "o", source, block_size=32)
    assert TokenDataset(folder, "test", 32).tail().shape == (1, 0)
    with pytest.raises(
        ValueError, match="blocks of 32 tokens .protocol sedd., not of 16: .* --block-size 16"
    ):
        TokenDataset(folder, "test", 16)
    with pytest.raises(ValueError, match="other settings .block_size was 32, now 16"):
        made("ptb", folder, source, block_size=16)
    made("ptb", folder, source, block_size=32)  # nothing to do
    full = TokenDataset(made("ptb", tmp_path / "f", source, protocol="full"), "test", 32)
    whole = torch.cat([full.blocks(range(full.num_blocks)).flatten(), full.tail()[0]])
    assert full.tail().shape == (1, 80 * 26 % 32)
    assert whole.tolist() == read_tokens(tmp_path / "f", "test").tolist() and len(whole) == 80 * 26


def test_folders_from_before_the_protocols(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    folder = made("text", tmp_path / "o", source)
    meta = load_meta(folder)
    for key in ("protocol", "packing", "block_size", "detokeniser", "split", "notes"):
        del meta[key]
    for key in ("protocol", "block_size", "split"):
        del meta["settings"][key]
    for entry in meta["splits"].values():
        del entry["dropped_tokens"]
    write(folder / "meta.json", json.dumps(meta))
    assert (
        TokenDataset(folder, "train", 2).num_blocks == 2
        and evaluation_split(load_meta(folder)) == "val"
    )
    made("text", folder, source)
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match="protocol was 'full', now 'sedd'"):
        made("text", folder, source, protocol="sedd", block_size=2)


@pytest.mark.parametrize(
    ("splits", "prepared", "expected"),
    [
        (["test"], "test", "test"),
        (["train"], "train", "train"),
        (["train"], None, "train"),
        (["train", "val"], None, "val"),
        (["train", "val", "test"], None, "val"),
        (["train", "val", "test"], "test", "test"),
    ],
)
def test_the_split_to_evaluate_on(splits, prepared, expected):
    assert evaluation_split({"splits": dict.fromkeys(splits, {}), "split": prepared}) == expected


def test_find_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "data" / "loader.py"))
    source = write(tmp_path / "a.txt", "one\ntwo\n")
    folder = made("ptb", tmp_path / "data" / "mine", source, protocol="full")
    assert (
        find_dataset("mine") == folder
        and find_dataset(str(folder)) == folder
        and find_dataset(folder) == folder
    )
    monkeypatch.chdir(tmp_path / "data")
    assert find_dataset("mine") == Path("mine")
    with pytest.raises(
        FileNotFoundError,
        match=r"ptb is not prepared yet.*python data/prepare.py ptb .--source FILE",
    ):
        find_dataset("ptb")
    with pytest.raises(
        FileNotFoundError, match=r"pydocs is not prepared yet.*python data/prepare.py pydocs$"
    ):
        find_dataset("pydocs")
    with pytest.raises(
        FileNotFoundError,
        match=r"ptbb is no prepared dataset.*\(mine\).*wikitext2, wikitext103, ptb",
    ):
        find_dataset("ptbb")


def test_splits_and_protocols_of_the_sets():
    """Those of the published tables; what models are trained on is not packed."""
    splits = {
        "wikitext2": "train",
        "wikitext103": "test",
        "ptb": "test",
        "lambada": "test",
        "lm1b": "test",
    }
    assert {name: each.split for name, each in SETS.items()} == splits
    protocols = {name: each.protocol for name, each in catalogue.DATASETS.items()}
    assert protocols == {
        **dict.fromkeys(("pydocs", "text", "openwebtext"), "full"),
        **dict.fromkeys(SETS, "sedd"),
    }
