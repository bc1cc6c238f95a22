"""Gaps of unknown length, alternatives and scores of text: aogpt/sampling/gaps.py, aogpt/text_model.py, score.py."""

import dataclasses
import itertools
import json
import math
import runpy
import sys

import pytest
import torch
from helpers import run_main, run_script
from reference import DECODERS, ENCODERS, enumerable_system, make_system

import aogpt
import sample
from aogpt import score
from aogpt.checkpoints import Loaded
from aogpt.data.tokenizers import get_tokenizer
from aogpt.sampling import gaps

BOOKS = "results/books_model"
BOTH_SIDES = [name for name in (*DECODERS, *ENCODERS) if name != "GPT-2"]


@pytest.fixture(scope="module")
def books():
    return aogpt.load(BOOKS)


def small(system, **settings):
    """A random model over bytes, as text in and out."""
    settings = {"tokens": 257, "block_size": 32, "dtype": torch.float32} | settings
    model = make_system(system, 3, **settings).eval()
    return aogpt.TextModel(Loaded(model, "x", 0, "raw", "bytes", 257))


def test_masks_are_read():
    text = "a[MASK]b[MASK:3][MASK:02-4] [mask]"
    assert gaps.read_gaps(text) == [
        "a",
        range(1, 2),
        "b",
        range(3, 4),
        "",
        range(2, 5),
        " [mask]",
    ]
    for wrong in (
        "[MASK:]",
        "[MASK:0]",
        "[MASK:4-2]",
        "[MASK:1-0]",
        "[MASK:a]",
        "no",
        "[MASK:1",
    ):
        with pytest.raises(ValueError, match=r"mask|MASK"):
            gaps.read_gaps(wrong)


def test_every_combination_of_lengths_that_fits_is_a_context():
    tokenizer = get_tokenizer("bytes")
    found = gaps.contexts("a[MASK:1-3]b[MASK:2-3]c", tokenizer, 8)
    sizes = [
        [
            len(list(run))
            for blank, run in itertools.groupby(row, lambda t: t is None)
            if blank
        ]
        for row in found
    ]
    assert sizes == [[1, 2], [1, 3], [2, 2], [2, 3], [3, 2]]  # [3, 3] has 9 tokens
    assert [t for t in found[-1] if t is not None] == list(b"abc")
    for text, words in (
        ("a[MASK:1-3]", "needs text after"),
        ("abcdefgh[MASK:1-9]b", "block size, 8"),
        (f"[MASK:1-{gaps.MOST_LENGTHS + 1}]b", "narrower"),
    ):
        with pytest.raises(ValueError, match=words):
            gaps.contexts(text, tokenizer, 8)


@pytest.mark.parametrize("system", BOTH_SIDES)
def test_scores_are_products_of_conditionals_and_ragged_rows_score_as_each_alone(
    system,
):
    """By enumeration of a model of 3 tokens and 4 positions."""
    model, conditional = enumerable_system(system, 5)
    rows = [[0, 2, 1, 1], [1, 0, 2], [2, 2, 0, 1], [1, 2]]
    given = [[0, None, None, 1], [1, None, 2], [None, 2, None, 1], [None, 2]]
    together = gaps.score_fillings(model, given, rows)
    for context, row, scores in zip(given, rows, together, strict=True):
        (alone,) = gaps.score_fillings(model, [context], [row])
        for name in ("right", "joint", "filling"):
            assert abs(getattr(alone, name) - getattr(scores, name)) < 1e-6, name
    place = int("".join(map(str, rows[0])), 3)  # of the sequence among all
    along = [float(conditional[tuple(range(i)), i][place].log()) for i in range(4)]
    tolerance = 1e-5 if system == "SEDD" else 1e-9
    assert abs(together[0].right - along[3]) < tolerance
    assert abs(together[0].joint - sum(along[1:]) / 3) < tolerance
    filling = (
        conditional[(0, 3), 1][place].log() + conditional[(0, 3, 1), 2][place].log()
    )
    assert abs(together[0].filling - float(filling) / 2) < tolerance
    assert gaps.ranked(together) == sorted(range(4), key=lambda i: -together[i].right)


@pytest.mark.parametrize(
    "system", ["AO-GPT", "target rotary", "two_stream", "RADD", "SEDD"]
)
def test_blanks_and_single_tokens_are_the_conditionals(system):
    """All blanks in one pass: each given the known tokens alone."""
    text = small(system)
    ids = text.tokenizer.encode("a cat sat")
    tokens = torch.tensor([ids])
    for masked in ([1], [0, 3, 8]):
        mask = torch.zeros(1, 9, dtype=torch.bool)
        mask[0, masked] = True
        logits = text.model.masked_logits(tokens, mask)
        got = logits.double().log_softmax(-1)[
            range(len(masked)), [ids[i] for i in masked]
        ]
        expected = text.model.masked_log_probs(tokens, mask)[0, masked]
        assert (got - expected).abs().max() < 1e-5
    each = text.score_each("a cat sat").log_probs
    mask = torch.eye(9, dtype=torch.bool)
    expected = text.model.masked_log_probs(tokens.expand(9, 9), mask).diagonal()
    assert max(abs(a - b) for a, b in zip(each, expected.tolist(), strict=True)) < 1e-5


def test_an_empty_alternative_inside_a_token_has_log_p_of_nothing(books):
    rows = books.rank("a hou[|t]se sat")
    assert [r.given_both_sides for r in rows if r.text == "a house sat"] == [0]


def test_alternatives_rank_by_the_probability_of_the_whole_text():
    text = small("AO-GPT")
    found = text.rank("The [cat|dog|old dog|] sat [on|by] it")
    assert len(found) == 8 and abs(sum(row.share for row in found) - 1) < 1e-9
    for row in found:
        tokens = torch.tensor([list(row.text.encode())])
        order = torch.arange(tokens.shape[1])[None]
        total = float(text.model.token_log_probs(tokens, order).double().sum())
        assert abs(row.log_prob - total) < 1e-4
    assert [row.log_prob for row in found] == sorted(
        (r.log_prob for r in found), reverse=True
    )
    (one,) = text.rank("a [cat|] sat")[:1]
    whole = list(b"a cat sat")
    given = [token if not 2 <= i < 5 else None for i, token in enumerate(whole)]
    (scores,) = gaps.score_fillings(text.model, [given], [whole])
    spans = {row.text: row.given_both_sides for row in text.rank("a [cat|] sat")}
    assert abs(spans["a cat sat"] - 3 * scores.filling) < 1e-4 and one.text in spans
    assert spans["a  sat"] == 0  # log p of nothing
    with pytest.raises(ValueError, match="no alternatives"):
        text.rank("no brackets")
    with pytest.raises(ValueError, match="at most 512 combinations"):
        text.rank("[a|b]" * 10)
    assert {row.given_both_sides for row in small("GPT-2").rank("a [cat|] sat")} == {
        None
    }
    assert 0 in {row.given_both_sides for row in small("RADD").rank("a [cat|] sat")}
    for call, name in (
        (lambda: text.fill("a[MASK:2]", candidates=0), "candidates"),
        (lambda: text.fill("a[MASK:2]", num_samples=0), "num_samples"),
        (lambda: text.blanks("a[MASK:2]", top=0), "top"),
        (lambda: text.compare(text, "a cat", draws=0), "draws"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is 0; give a number at least 1"):
            call()


def test_text_in_text_out(books):
    found = books.fill("She[MASK:2-6] home.", candidates=3, mode="l2r", temperature=0.7)
    assert len(found) == 3 == len({filling.text for filling in found})
    assert all(f.text.startswith("She") and f.text.endswith(" home.") for f in found)
    rights = [filling.scores.right for filling in found]
    assert rights == sorted(rights, reverse=True)
    assert found == books.fill(
        "She[MASK:2-6] home.", candidates=3, mode="l2r", temperature=0.7
    )
    text = books.generate("Once upon a time", 12, mode="l2r", temperature=0)
    assert (
        text.startswith("Once upon a time") and len(books.tokenizer.encode(text)) >= 12
    )
    scored = books.score("Once upon a time there was a king.")
    assert "".join(scored.pieces) == "Once upon a time there was a king."
    assert (
        scored.nats == -math.fsum(scored.log_probs) and 0.5 < scored.bits_per_byte < 2.5
    )
    assert books.score("Once upon a time", "random", seed=1) != books.score(
        "Once upon a time", "random"
    )
    assert books.score("A long text. " * 200).nats > 1000  # in blocks
    (likely,) = books.blanks("Once upon a[MASK] there was", 2048)
    shares = [share for _, share in likely]
    assert abs(sum(shares) - 1) < 1e-6 and shares == sorted(shares, reverse=True)
    log_p = books.score_each("Once upon a time there was").log_probs[5]
    assert abs(math.log(dict(likely)[" time"]) - log_p) < 1e-4
    for wrong in (
        lambda: books.score(""),
        lambda: books.generate("a", 10**6),
        lambda: books.blanks("a"),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_models_are_compared_on_the_same_blocks():
    one = small("AO-GPT")
    other = small("RADD")
    text = "a cat sat on a mat. " * 9
    same = one.compare(one, text)
    assert (same.nll, same.p_value) == (0, 1)
    found = one.compare(other, text, "random", seed=1)
    back = other.compare(one, text, "random", seed=1)
    assert (
        abs(found.nll + back.nll) < 1e-6
        and 0 < found.p_value <= 1
        and found.half_width > 0
    )
    two = small("two_stream").score(text).nats - one.score(text).nats
    assert abs(small("two_stream").compare(one, text).nll - two / len(text)) < 1e-5


def test_what_a_plain_gpt_or_one_without_a_start_token_cannot_do_is_refused():
    plain = small("GPT-2")
    one = small("AO-GPT")
    text = "a cat sat on a mat. " * 4
    backwards = torch.arange(2, -1, -1)
    for wrong in (
        lambda: plain.score("abc", "random"),
        lambda: plain.score("abc", backwards),
        lambda: plain.score_each("abc"),
        lambda: plain.fill("a[MASK:2]c", mode="l2r"),
        lambda: plain.compare(one, text, "random"),
        lambda: one.compare(plain, text, "random"),
    ):
        with pytest.raises(ValueError, match="plain GPT|only continue"):
            wrong()
    assert plain.score("abc") == plain.score("abc", torch.arange(3))
    other = aogpt.TextModel(dataclasses.replace(one.loaded, scored_from=1))
    for wrong in (
        lambda: other.generate(new_tokens=3),
        lambda: other.fill("[MASK:2]b"),
        lambda: other.score_each("a"),
        lambda: other.score("a"),
    ):
        with pytest.raises(
            ValueError, match="no start token|no text to score|give 2 to 32"
        ):
            wrong()
    whole = one.score(text)
    for order, found in (
        ("l2r", other.score(text)),
        ("random", other.score(text, "random")),
    ):
        zeros = [i for i, p in enumerate(found.log_probs) if p == 0]
        assert len(zeros) == 3 and found.bytes == 77  # of 80 bytes in blocks of 32
        if order == "l2r":
            assert zeros == [0, 32, 64]
            kept = [p for i, p in enumerate(whole.log_probs) if i not in zeros]
            assert math.isclose(
                found.bits_per_byte, -sum(kept) / 77 / math.log(2), abs_tol=1e-9
            )
    assert one.compare(other, text) == other.compare(one, text)  # neither scores them
    assert one.compare(other, text).nll == 0
    tokens = aogpt.TextModel(one.loaded)
    tokens.loaded = dataclasses.replace(one.loaded, tokenizer="gpt2")
    with pytest.raises(ValueError, match="compare models of one tokenizer"):
        one.compare(tokens, text)


def test_the_best_fillings_are_shown(tmp_path, monkeypatch, capsys):
    """Several gaps and several texts: JSONL, page and terminal."""
    lines = tmp_path / "lines.jsonl", tmp_path / "page.html", tmp_path / "texts.jsonl"
    rows = [
        {"infill": "She[MASK:1-3] and[MASK:2-3] home."},
        {"prompt": "The", "length": 8},
    ]
    lines[2].write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (BOOKS, "--mode", "l2r", "--num-samples", 2)
    files = ("--prompts", lines[2], "--jsonl", lines[0], "--html", lines[1])
    run_main(sample, monkeypatch, capsys, *words, *files, "--candidates", 3)
    found = [json.loads(line) for line in lines[0].read_text().splitlines()]
    assert [row["prompt_index"] for row in found] == [0, 0, 0, 1, 1]
    rights = [row["scores"]["right"] for row in found[:3]]
    assert rights == sorted(rights, reverse=True) and "scores" not in found[3]
    assert all(
        " and" in row["text"] and row["text"].endswith(" home.") for row in found[:3]
    )
    assert "text to the right" in lines[1].read_text()
    rows.append(
        {"infill": "She[MASK:1] home."}
    )  # of a known length: 8 samples of it alone
    lines[2].write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_main(
        sample, monkeypatch, capsys, *words, *files, "--candidates", 8, "--overwrite"
    )
    more = [json.loads(line) for line in lines[0].read_text().splitlines()]
    assert len({row["text"] for row in more if row["prompt_index"] == 2}) > 2
    assert [r["text"] for r in more if r["prompt_index"] == 1] == [
        r["text"] for r in found[3:]
    ]
    words = (*words, "--refine", 2, "--no-repeat-ngram", 2, "--repetition-penalty", 1.1)
    told = run_script("sample.py", *words, "--infill", "She[MASK:2-4] home.").stdout
    assert told.count("=== sample") == 1 and "log p a token" in told
    for text, word in (
        ("a[MASK:1-2]", "needs text after"),
        ("a [MASK:3-1] b", "no length"),
    ):
        with pytest.raises(ValueError, match=f"--infill: .*{word}"):
            run_main(sample, monkeypatch, capsys, *words, "--infill", text)


@pytest.mark.parametrize(
    "cut", [("--stop", " home"), ("--stop", " h", "e"), ("--until-end",)]
)
def test_fillings_are_ranked_whole_and_distinct_whatever_is_cut(
    tmp_path, monkeypatch, capsys, cut
):
    path = tmp_path / "a.jsonl"
    words = (BOOKS, "--mode", "l2r", "--num-samples", 2, "--seed", 2)
    eot = aogpt.load(BOOKS).tokenizer.eot
    penalty = (
        ("--temperature", 3) if cut == ("--until-end",) else ()
    )  # the end is often drawn
    options = ("--jsonl", path, "--overwrite", "--candidates", 40, *penalty)

    def found(*more):
        text = ("--infill", "She[MASK:2] went[MASK:2] home.")
        run_main(sample, monkeypatch, capsys, *words, *text, *options, *more)
        return [json.loads(line) for line in path.read_text().splitlines()]

    whole = found()
    shorter = found(*cut)
    assert [row["scores"] for row in shorter] == [row["scores"] for row in whole]
    for row, full in zip(shorter, whole, strict=True):
        assert row["tokens"] == full["tokens"][: row["length"]]
        if cut == ("--until-end",):
            assert (row["length"] < full["length"]) == (eot in full["tokens"])
        else:
            assert row["text"] in full["text"] and row["length"] < full["length"]
    assert len({tuple(row["tokens"]) for row in whole}) == len(whole) > 4


def test_equal_fillings_are_one_and_candidates_need_masks(monkeypatch, capsys, books):
    assert len(books.fill("She[MASK:2] home.", 3, mode="l2r", temperature=0)) == 1
    words = (BOOKS, "--candidates", 3, "--temperature", 0, "--mode", "l2r")
    told = run_main(
        sample, monkeypatch, capsys, *words, "--infill", "She[MASK:2] home."
    )
    assert told.count("=== sample") == 1
    with pytest.raises(ValueError, match="--candidates chooses among fillings"):
        run_main(sample, monkeypatch, capsys, *words, "--prompt", "She")


def test_the_terminal_is_imported_where_it_is_needed(monkeypatch):
    """Windows has no termios."""
    for name in ("termios", "tty"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "play" in runpy.run_module("aogpt.sampling.live")


def test_score_prints_and_writes_what_it_found(tmp_path, monkeypatch, capsys, books):
    path = tmp_path / "scores.json"
    texts = ("The old horse.", "The [cat|tax] barked.", "The dog[MASK:2] home.")
    told = run_script(
        "-m", "aogpt", "score", BOOKS, *texts, "--top", 2, "--json", path
    ).stdout
    plain, ranked, blanks = json.loads(path.read_text())["results"]
    assert abs(plain["log_prob"] + books.score("The old horse.").nats) < 1e-4
    assert [row["text"] for row in ranked["alternatives"]] == [
        r.text for r in books.rank(texts[1])
    ]
    assert [len(row) for row in blanks["blanks"]] == [2, 2]
    assert "bits a byte" in told and "log p given both sides" in told
    told = run_main(score, monkeypatch, capsys, BOOKS, texts[0], "--each")
    assert "no probability of the text" in told
    assert math.isclose(sum(plain["log_probs"]), plain["log_prob"], abs_tol=1e-6)
    told = run_main(score, monkeypatch, capsys, BOOKS, "[MASKED] men")
    assert "bits a byte" in told
    for words, said in (
        ([], "give a text"),
        (["The [cat|dog][MASK] home."], "in separate texts"),
        (["a", "--each", "--order", "random"], "leave out --order"),
    ):
        with pytest.raises(ValueError, match=said):
            run_main(score, monkeypatch, capsys, BOOKS, *words)
    monkeypatch.setattr("aogpt.text_model.load", lambda *a, **k: small("GPT-2"))
    told = run_main(score, monkeypatch, capsys, BOOKS, "The [cat|tax] barked.")
    assert "share" in told and "both sides" not in told
