"""Gaps of unknown length, alternatives and scores of text: aogpt/sampling/gaps.py and
resampling.py, aogpt/text_model.py, aogpt/commands.py."""

import copy
import dataclasses
import inspect
import itertools
import json
import math
import pickle
import re
import runpy
import sys
import typing
from collections import Counter

import pytest
import torch
from helpers import read_lines, run_main, run_script, write_rows
from reference import (
    DECODERS,
    ENCODERS,
    chi_square_p,
    enumerable_system,
    make_system,
)

import aogpt
import sample
from aogpt import commands
from aogpt.checkpoints import Loaded
from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError
from aogpt.sampling import gaps, resampling
from aogpt.sampling.resampling import fill_by_resampling
from aogpt.scoring import masked_log_probs, masked_logits, token_log_probs

BOOKS = "results/books_model"
BOTH_SIDES = [name for name in (*DECODERS, *ENCODERS) if name != "GPT-2"]


@pytest.fixture(scope="module")
def books():
    return aogpt.load(BOOKS)


def small(system):
    """Return a TextModel of a random model over bytes."""
    model = make_system(system, 3, tokens=257, block_size=32, dtype=torch.float32)
    return aogpt.TextModel(Loaded(model, "x", 0, "raw", "bytes", 257))


def test_masks_are_read():
    parts = gaps.read_gaps("a[MASK]b[MASK:3][MASK:02-4] [mask]")
    # masks side by side are one
    assert parts[::2] == ["a", "b", " [mask]"]
    assert parts[1::2] == [range(1, 2), range(5, 8)]
    assert gaps.read_gaps("[MASK:1-3][MASK][MASK:2]") == ["", range(4, 7), ""]
    for wrong in "[MASK:] [MASK:0] [MASK:4-2] [MASK:1-0] [MASK:a] no [MASK:1".split():
        with pytest.raises(ValueError, match=r"mask|MASK"):
            gaps.read_gaps(wrong)


def sizes_of_gaps(context):
    """Return how many tokens are missing in each gap of a context."""
    runs = itertools.groupby(context, key=lambda token: token is None)
    return tuple(len(list(run)) for missing, run in runs if missing)


def test_every_combination_of_lengths_that_fits_is_a_context():
    tokenizer = get_tokenizer("bytes")
    gapped = gaps.encode_gaps("a[MASK:1-3]b[MASK:2-3]c", tokenizer, 8)
    contexts = gapped.contexts(8)
    sizes = [sizes_of_gaps(context) for context in contexts]
    # (3, 3) has 9 tokens
    assert sizes == [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)]
    assert "5 of 6 lengths" in gapped.dropped_note(len(contexts), 8)
    assert gapped.dropped_note(len(gapped.contexts(9)), 9) == ""
    last_known = [t for t in contexts[-1] if t is not None]
    assert last_known == list(b"abc")
    for text, words in (
        ("a[MASK:1-3]", "needs text after"),
        ("abcdefgh[MASK:1-9]b", "block size, 8"),
        (f"[MASK:1-{gaps.MOST_LENGTHS + 1}]b", "narrower"),
    ):
        with pytest.raises(ValueError, match=words):
            gaps.encode_gaps(text, tokenizer, 8)


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
        assert alone.right == pytest.approx(scores.right, rel=0, abs=1e-6)
        assert alone.joint == pytest.approx(scores.joint, rel=0, abs=1e-6)
        assert alone.filling == pytest.approx(scores.filling, rel=0, abs=1e-6)
    place = int("0211", 3)  # of the first row among all sequences

    def log_p(context, target):
        return float(conditional[context, target][place].log())

    tolerance = 1e-5 if system == "SEDD" else 1e-9
    first = together[0]
    assert abs(first.right - log_p((0, 1, 2), 3)) < tolerance
    joint = log_p((0,), 1) + log_p((0, 1), 2) + log_p((0, 1, 2), 3)
    assert abs(first.joint - joint / 3) < tolerance
    filling = log_p((0, 3), 1) + log_p((0, 3, 1), 2)
    assert abs(first.filling - filling / 2) < tolerance
    for by in ("right", "joint", "filling"):
        best_first = sorted(range(4), key=lambda i: -getattr(together[i], by))
        assert gaps.ranked(together, by) == best_first


@pytest.mark.parametrize(
    "system",
    ["AO-GPT", "target rotary", "two_stream", "mask_query, rotary", "RADD", "SEDD"],
)
def test_blanks_and_single_tokens_are_the_conditionals(system):
    """All blanks in one pass: each given the known tokens alone."""
    text = small(system)
    ids = text.tokenizer.encode("a cat sat")
    tokens = torch.tensor([ids])
    for masked in ([1], [0, 3, 8]):
        mask = torch.zeros(1, 9, dtype=torch.bool)
        mask[0, masked] = True
        logits = masked_logits(text.model, tokens, mask)
        log_probs = logits.double().log_softmax(-1)
        index = tokens[0, masked][:, None]
        got = log_probs.gather(1, index)[:, 0]
        expected = masked_log_probs(text.model, tokens, mask)[0, masked]
        assert (got - expected).abs().max() < 1e-5
    each = text.score_each("a cat sat").log_probs
    mask = torch.eye(9, dtype=torch.bool)
    expected = masked_log_probs(text.model, tokens.expand(9, 9), mask).diagonal()
    assert each == pytest.approx(expected.tolist(), rel=0, abs=1e-5)


def filled_log_prob(text, tokens, hidden):
    """Return log p of the tokens in a range of places, from left to right, given all
    others."""
    given = [None if i in hidden else token for i, token in enumerate(tokens)]
    (scores,) = gaps.score_fillings(text.model, [given], [tokens])
    return scores.filling * len(hidden)


@pytest.mark.parametrize(
    "model, written, after",
    [
        ("books", "The caf[é|è|e|es] was full.", " was full."),
        ("books", "The c[a|o]t sat.", " sat."),
        ("bytes", "a [é|e] b", " b"),
    ],
)
def test_alternatives_are_scored_given_the_tokens_that_all_share(
    books, model, written, after
):
    """All tokens that differ are scored, also inside words and characters."""
    text = books if model == "books" else small("AO-GPT")
    ranked = text.rank(written)
    rows = [text.tokenizer.encode(alternative.text) for alternative in ranked]
    end = text.tokenizer.encode(after)
    shared = 0  # tokens with which all begin
    while len({tuple(row[: shared + 1]) for row in rows}) == 1:
        shared += 1
    for alternative, row in zip(ranked, rows, strict=True):
        assert row[-len(end) :] == end
        hidden = range(shared, len(row) - len(end))
        expected = filled_log_prob(text, row, hidden)
        assert math.isclose(alternative.given_both_sides, expected, abs_tol=1e-4)


def test_equal_alternatives_count_once_and_an_empty_one_has_no_tokens(books):
    once = {row.text: row.share for row in books.rank("The [cat|dog] sat.")}
    again = {row.text: row.share for row in books.rank("The [cat|cat|cat|dog] sat.")}
    assert once == pytest.approx(again)
    assert len(again) == 2
    both_sides = {
        row.text: row.given_both_sides for row in books.rank("a hou[|t]se sat")
    }
    assert both_sides["a house sat"] is None


def test_the_end_of_a_text_counts_where_alternatives_end_it(books):
    """Without it a beginning is always at least as probable as what it begins."""
    text = "They lived happily ever after[.| and]"
    log_probs = {row.text: row.log_prob for row in books.rank(text + "[|.]")}
    for last_words in ("after.", "after and"):
        shorter = f"They lived happily ever {last_words}"
        assert log_probs[shorter] >= log_probs[shorter + "."]
    for row in books.rank(text, end=True):
        tokens = [*books.tokenizer.encode(row.text), books.tokenizer.eot]
        assert math.isclose(row.log_prob, books.log_prob(tokens), abs_tol=1e-3)
        scored = books.score(row.text, end=True)
        assert math.isclose(-scored.nats, row.log_prob, abs_tol=1e-3)
        assert scored.bytes == len(row.text)
        assert scored.ids == tokens
    with_open_end = books.rank("She went home[.|]", end=False)
    assert with_open_end[0].text == "She went home"
    with_end = books.rank("She went home[.|]", end=True)
    assert with_end[0].text == "She went home."


def test_alternatives_rank_by_the_probability_of_the_whole_text():
    text = small("AO-GPT")
    ranked = text.rank("The [cat|dog|old dog|] sat [on|by] it")
    assert len(ranked) == 8
    total_share = sum(row.share for row in ranked)
    assert math.isclose(total_share, 1, abs_tol=1e-9)
    for row in ranked:
        tokens = torch.tensor([list(row.text.encode())])
        order = torch.arange(tokens.shape[1])[None]
        total = float(token_log_probs(text.model, tokens, order).double().sum())
        assert math.isclose(row.log_prob, total, abs_tol=1e-4)
    log_probs = [row.log_prob for row in ranked]
    assert log_probs == sorted(log_probs, reverse=True)


def test_an_alternative_of_no_tokens_has_no_probability_given_both_sides():
    text = small("AO-GPT")
    scores = {row.text: row.given_both_sides for row in text.rank("a [cat|] sat")}
    expected = filled_log_prob(text, list(b"a cat sat"), range(2, 5))
    assert math.isclose(scores["a cat sat"], expected, abs_tol=1e-4)
    assert scores["a  sat"] is None
    of_encoder = small("RADD").rank("a [cat|] sat")
    without = {row.text for row in of_encoder if row.given_both_sides is None}
    assert without == {"a  sat"}
    of_plain_gpt = small("GPT-2").rank("a [cat|] sat")
    assert {row.given_both_sides for row in of_plain_gpt} == {None}


def test_what_cannot_be_ranked_or_counted_is_refused():
    text = small("AO-GPT")
    with pytest.raises(ValueError, match="no alternatives"):
        text.rank("no brackets")
    with pytest.raises(ValueError, match="at most 512 combinations"):
        text.rank("[a|b]" * 10)
    for call, name in (
        (lambda: text.fill("a[MASK:2]", candidates=0), "candidates"),
        (lambda: text.fill("a[MASK:2]", num_samples=0), "num_samples"),
        (lambda: text.blanks("a[MASK:2]", top=0), "top"),
        (lambda: text.compare(text, "a cat", draws=0), "draws"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is 0; give a number at least 1"):
            call()


def test_fillings_are_distinct_and_ranked_by_the_text_to_the_right(books):

    def fill():
        return books.fill(
            "She[MASK:2-6] home.", candidates=3, mode="l2r", temperature=0.7, seed=3
        )

    fillings = fill()
    texts = {filling.text for filling in fillings}
    assert len(texts) == len(fillings) == 3
    for text in texts:
        assert text.startswith("She")
        assert text.endswith(" home.")
    rights = [filling.scores.right for filling in fillings]
    assert rights == sorted(rights, reverse=True)
    for filling in fillings:
        assert filling.ranked_by == "right"
        assert filling.seed == 3
    assert fill() == fillings


def test_a_text_is_continued_and_scored(books):
    text = books.generate("Once upon a time", 12, mode="l2r", temperature=0)
    assert text.startswith("Once upon a time")
    assert len(books.tokenizer.encode(text)) >= 12
    scored = books.score("Once upon a time there was a king.")
    assert "".join(scored.pieces) == "Once upon a time there was a king."
    assert scored.nats == -math.fsum(scored.log_probs)
    assert 0.5 < scored.bits_per_byte < 2.5
    first = books.score("Once upon a time", "random", seed=0)
    assert first != books.score("Once upon a time", "random", seed=1)
    assert books.score("A long text. " * 200).nats > 1000  # in blocks
    for wrong in (
        lambda: books.score(""),
        lambda: books.generate("a", 10**6),
        lambda: books.blanks("a"),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_end_of_text_in_a_text_to_score_is_one_token_of_no_bytes():
    one = small("AO-GPT")
    end = one.tokenizer.eot
    ids = [*b"a cat", end, *b"on", end]
    text = one.tokenizer.decode(ids)
    scored = one.score(text)
    assert scored.ids == ids
    assert scored.bytes == len("a cat") + len("on")
    assert "".join(scored.pieces) == text
    assert math.isclose(-scored.nats, one.log_prob(ids), abs_tol=1e-4)
    assert one.score_each(text).ids == ids
    ranked = {row.text: row for row in one.rank("a [cat|dog]<|endoftext|>on[|.]")}
    first = ranked["a cat<|endoftext|>on."]
    ids = [*b"a cat", end, *b"on."]
    assert math.isclose(first.log_prob, one.log_prob(ids), abs_tol=1e-4)
    two_stream = small("two_stream")
    difference = two_stream.score(text).nats - scored.nats
    comparison = two_stream.compare(one, text)
    assert abs(comparison.nll - difference / len(scored.ids)) < 1e-5
    # In a prompt it is a text like any other.
    continued = one.generate("<|endoftext|>", 2)
    assert continued.tokens[:-2] == list(b"<|endoftext|>")


def test_blanks_lists_every_token_with_its_probability(books):
    (likely,) = books.blanks("Once upon a[MASK] there was", top=2048)
    shares = [share for _, share, _ in likely]
    assert abs(sum(shares) - 1) < 1e-6
    assert shares == sorted(shares, reverse=True)
    by_text = {text: share for text, share, _ in likely}
    log_p = books.score_each("Once upon a time there was").log_probs[5]
    assert abs(math.log(by_text[" time"]) - log_p) < 1e-4
    assert len(by_text) == 2048  # each token has a text of its own
    assert "<0xC3>" in by_text
    assert not any("\ufffd" in text for text in by_text)
    for text, _, token in likely[:99]:
        of_token = books.tokenizer.to_bytes([token])
        assert of_token == text.encode() or "<0x" in text


def test_models_are_compared_on_the_same_blocks():
    one = small("AO-GPT")
    other = small("RADD")
    text = "a cat sat on a mat. " * 9
    same = one.compare(one, text)
    assert same.nll == 0
    assert same.p_value == 1
    comparison = one.compare(other, text, "random", seed=1)
    back = other.compare(one, text, "random", seed=1)
    assert abs(comparison.nll + back.nll) < 1e-6
    assert 0 < comparison.p_value <= 1
    assert comparison.half_width > 0
    two_stream = small("two_stream")
    difference = two_stream.score(text).nats - one.score(text).nats
    comparison = two_stream.compare(one, text)
    assert abs(comparison.nll - difference / len(text)) < 1e-5


def test_what_a_plain_gpt_or_one_without_a_start_token_cannot_do_is_refused():
    plain = small("GPT-2")
    one = small("AO-GPT")
    text = "a cat sat on a mat. " * 4
    backwards = torch.arange(2, -1, -1)
    for wrong in (
        lambda: plain.score("abc", "random"),
        lambda: plain.score("abc", backwards),
        lambda: plain.score_each("abc"),
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
        says = "no start token|no text to score|give 2 to 32"
        with pytest.raises(ValueError, match=says):
            wrong()
    for order in ("l2r", "random"):
        scores = other.score(text, order)
        unscored = [i for i, p in enumerate(scores.log_probs) if p is None]
        assert len(unscored) == 3
        assert scores.bytes == 77  # of 80 bytes in blocks of 32
        assert scores.scored == 77
        assert math.isclose(scores.nats_per_token, scores.nats / 77)
        if order == "l2r":
            assert unscored == [0, 32, 64]
            log_probs = one.score(text).log_probs
            nats = -sum(p for i, p in enumerate(log_probs) if i not in unscored)
            bits = nats / 77 / math.log(2)
            assert math.isclose(scores.bits_per_byte, bits, abs_tol=1e-9)
    assert one.compare(other, text) == other.compare(one, text)  # neither scores them
    assert one.compare(other, text).nll == 0
    tokens = aogpt.TextModel(one.loaded)
    tokens.loaded = dataclasses.replace(one.loaded, tokenizer="gpt2")
    with pytest.raises(ValueError, match="compare models of one tokenizer"):
        one.compare(tokens, text)


def test_the_best_fillings_are_shown(tmp_path, monkeypatch, capsys):
    """Several gaps and several texts: JSONL, page and terminal."""
    samples = tmp_path / "lines.jsonl"
    page = tmp_path / "page.html"
    prompts = tmp_path / "texts.jsonl"
    rows = [
        {"infill": "She[MASK:1-3] and[MASK:2-3] home."},
        {"prompt": "The", "length": 8},
    ]
    write_rows(prompts, rows)
    words = [BOOKS, "--mode", "l2r", "--num-samples", 2]
    files = ["--prompts", prompts, "--jsonl", samples, "--html", page]
    run_main(sample, monkeypatch, capsys, *words, *files, "--candidates", 3)
    shown_rows = read_lines(samples)
    assert [row["prompt_index"] for row in shown_rows] == [0, 0, 0, 1, 1]
    rights = [row["scores"]["right"] for row in shown_rows[:3]]
    assert rights == sorted(rights, reverse=True)
    assert "scores" not in shown_rows[3]
    for row in shown_rows[:3]:
        assert " and" in row["text"]
        assert row["text"].endswith(" home.")
    assert "text to the right" in page.read_text()
    # of a known length: 8 samples of it alone
    rows.append({"infill": "She[MASK:1] home."})
    write_rows(prompts, rows)
    options = [*words, *files, "--candidates", 8, "--overwrite"]
    monkeypatch.setattr("sys.argv", ["sample", *map(str, options)])
    sample.main()
    wrote = capsys.readouterr().err.splitlines()[-2:]
    assert wrote == [f"wrote {samples}", f"wrote {page}"]
    texts_of_prompt = {0: [], 1: [], 2: []}
    for row in read_lines(samples):
        texts_of_prompt[row["prompt_index"]].append(row["text"])
    assert len(set(texts_of_prompt[2])) > 2
    assert texts_of_prompt[1] == [row["text"] for row in shown_rows[3:]]
    infill = ["--infill", "She[MASK:2-4] home."]
    printed = run_main(sample, monkeypatch, capsys, *words, *infill)
    assert printed.count("=== sample") == 1
    assert "log p a token" in printed
    for text, word in (
        ("a[MASK:1-2]", "needs text after"),
        ("a [MASK:3-1] b", "no length"),
    ):
        with pytest.raises(ValueError, match=f"--infill: .*{word}"):
            run_main(sample, monkeypatch, capsys, *words, "--infill", text)


def test_fillings_are_ranked_whole_and_distinct_whatever_is_cut(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "a.jsonl"
    words = [BOOKS, "--mode", "l2r", "--num-samples", 2, "--seed", 2]
    words += ["--infill", "She[MASK:2] went[MASK:2] home.", "--candidates", 40]
    words += ["--jsonl", path, "--overwrite"]
    words += ["--temperature", 3]  # the end is often drawn
    eot = aogpt.load(BOOKS).tokenizer.eot
    run_main(sample, monkeypatch, capsys, *words)
    whole = read_lines(path)
    run_main(sample, monkeypatch, capsys, *words, "--until-end")
    shorter = read_lines(path)
    assert [row["scores"] for row in shorter] == [row["scores"] for row in whole]
    for row, full in zip(shorter, whole, strict=True):
        assert row["tokens"] == full["tokens"][: row["length"]]
        assert (row["length"] < full["length"]) == (eot in full["tokens"])
    assert len({tuple(row["tokens"]) for row in whole}) == len(whole) > 4


def test_equal_fillings_are_one_and_candidates_need_masks(monkeypatch, capsys, books):
    fillings = books.fill("She[MASK:2] home.", 3, mode="l2r", temperature=0)
    assert len(fillings) == 1
    words = [BOOKS, "--candidates", 3, "--temperature", 0, "--mode", "l2r"]
    infill = ["--infill", "She[MASK:2] home."]
    printed = run_main(sample, monkeypatch, capsys, *words, *infill)
    assert printed.count("=== sample") == 1
    with pytest.raises(ValueError, match="--candidates chooses among fillings"):
        run_main(sample, monkeypatch, capsys, *words, "--prompt", "She")


@pytest.fixture
def command(monkeypatch, capsys, books):
    """Run `aogpt NAME` in this process; what it prints."""
    monkeypatch.setattr("aogpt.text_model.load", lambda *a, **k: books)

    def call(name, *words):
        monkeypatch.setattr("sys.argv", [f"aogpt {name}", BOOKS, *map(str, words)])
        commands.main()
        return capsys.readouterr().out

    return call


def test_a_space_before_a_mask_is_noted_where_words_begin_with_theirs(books):
    assert "leave the space out" in gaps.space_note("The [MASK:2] ran", books.tokenizer)
    assert gaps.space_note("The[MASK:2] ran", books.tokenizer) is None
    assert gaps.space_note("The [MASK:2] ran", get_tokenizer("bytes")) is None
    with pytest.warns(UserWarning, match="leave the space out"):
        books.fill("The [MASK] ran.", num_samples=1)
    with pytest.warns(UserWarning, match="leave the space out"):
        books.blanks("The [MASK] ran.")


def test_score_prints_and_writes_what_it_found(tmp_path, command, books, monkeypatch):
    path = tmp_path / "scores.json"
    text = "The old horse."
    printed = command("score", text, "--json", path)
    (plain,) = json.loads(path.read_text())["results"]
    assert abs(plain["log_prob"] + books.score(text).nats) < 1e-4
    assert "bits a byte" in printed
    assert "no probability of the text" in command("score", text, "--each")
    assert math.isclose(sum(plain["log_probs"]), plain["log_prob"], abs_tol=1e-6)
    assert "bits a byte" in command("score", "[MASKED] men")
    assert "'<0xC3>'" in command("score", "caf\u00e9 \u00c3\u00df")
    for words, said in (
        ([], "give a text"),
        (["The [cat|tax] barked."], "aogpt rank compares them"),
        (["The dog[MASK] home."], "give it to fill or blanks"),
        (["a", "--each", "--order", "random"], "leave out --order"),
    ):
        with pytest.raises(ValueError, match=said):
            command("score", *words)
    plain_model = small("GPT-2")
    no_start = dataclasses.replace(plain_model.loaded, scored_from=1)
    for model in (plain_model, aogpt.TextModel(no_start)):
        monkeypatch.setattr("aogpt.text_model.load", lambda *a, m=model, **k: m)
        printed = command("rank", "The [cat|tax] barked.")
        assert "share" in printed
        assert "both sides" not in printed
    printed = command("score", "abc")
    assert "'a'" in printed
    assert "|       - |     - |" in printed
    assert "100.00%" not in printed
    assert "of 2 tokens" in printed


def test_what_a_number_does_not_say_is_told_beside_it(command, books):
    """A sum over blocks, the beginning of another text, a prediction of nothing."""
    beside = "2 blocks of at most 256 tokens, each scored by itself"
    assert beside in command("score", "The old horse was tired. " * 50)
    assert "each scored by itself" not in command("score", "The old horse.")
    for block, is_told in ((2, False), (100, True)):
        printed = command("score", "The old horse.", "--order", f"slots:block={block}")
        assert ("which is one block" in printed) == is_told
    assert "at least as probable" in command("rank", "She went home[.|]")
    assert "at least as probable" not in command("rank", "She went home[.|]", "--end")
    assert "at least as probable" not in command("rank", "The [cat|tax] barked.")
    assert "at least as probable" not in command("rank", "I saw [a|an]")
    assert "nothing is known" in command("blanks", "[MASK:2]")
    assert "nothing is known" not in command("blanks", "The[MASK:2]")
    with pytest.warns(UserWarning, match="2 of 4 lengths of the masks are tried"):
        books.fill("She[MASK:252-255] home.", num_samples=1)


def test_every_command_answers(tmp_path, command, books):
    path = tmp_path / "a.json"
    text = "She[MASK:2-3] home."
    printed = command("fill", text, "--candidates", 2, "--seed", 3, "--json", path)
    fillings = json.loads(path.read_text())["results"][0]["fillings"]
    assert len(fillings) == 2
    assert "ranked by right; seed 3" in printed
    assert all(row["text"] in printed for row in fillings)
    expected = books.fill(text, candidates=2, seed=3, temperature=0.7)
    assert fillings[0]["text"] == expected[0].text
    printed = command("rank", "She went home[.|]", "--end")
    assert printed.index("home. ") < printed.index("home  ")
    text = "The [cat|tax] barked."
    printed = command("rank", text, "--json", path, "--overwrite")
    (ranked,) = json.loads(path.read_text())["results"]
    expected = [row.text for row in books.rank(text)]
    assert [row["text"] for row in ranked["alternatives"]] == expected
    assert "log p given both sides" in printed
    text = "The dog[MASK:2] home."
    printed = command("blanks", text, "--top", 3, "--json", path, "--overwrite")
    (blanks,) = json.loads(path.read_text())["results"]
    assert "1." in printed
    assert [len(row) for row in blanks["blanks"]] == [3, 3]
    printed = command("generate", "Once upon", "--new-tokens", 5, "--num-samples", 2)
    assert printed.count("Once upon") == 2
    assert "seed " in printed
    both = command("generate", "Once", "Twice", "--new-tokens", 5, "--seed", 4)
    seeds = re.findall(r"^seed (\d+)$", both, re.M)
    assert seeds[0] == "4" != seeds[1]
    alone = command("generate", "Twice", "--new-tokens", 5, "--seed", seeds[1])
    assert both.endswith(alone)
    again = command("generate", "Once upon", "--new-tokens", 5, "--seed", 4)
    assert again == command("generate", "Once upon", "--new-tokens", 5, "--seed", 4)
    for words, said in (
        (("fill", "no mask here"), "there is no mask"),
        (("generate", "a[MASK]"), "fill takes masks"),
        (("rank", "no brackets"), "no alternatives"),
        (("fill", text, "--top-p", 2), "--top-p is 2"),
        (("fill", text, "no mask here"), "text 2 of 2: there is no mask"),
    ):
        with pytest.raises(ValueError, match=said):
            command(*words)


def test_a_forgotten_model_or_quotes_are_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["aogpt fill", "She[MASK] home."])
    with pytest.raises(ValueError, match="the model comes first, then the text: aogpt"):
        commands.main()
    commands.check_words("score", BOOKS, ("The horse", "was", "tired."))
    assert capsys.readouterr().err == ""
    commands.check_words("score", BOOKS, ("The", "horse"))
    assert "note: these are 2 texts of one word" in capsys.readouterr().err


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_without_a_text_names_one_that_it_takes(
    name, command, monkeypatch, capsys
):
    with pytest.raises(ValueError, match=f"give a text, as in: aogpt {name}") as error:
        command(name)
    example = str(error.value).split('"')[1]
    assert command(name, example)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.argv", [f"aogpt {name}", BOOKS, example])
    commands.main()
    assert capsys.readouterr().err.startswith(f"loading {BOOKS}\n")


def test_candidates_of_one_length_are_ranked_given_both_sides(books):
    """By the filling, not by the text after it alone."""
    text = "The old[MASK] barked."
    fillings = books.fill(text, candidates=8, seed=0, num_samples=32)
    (blank,) = books.blanks(text, top=2048)
    probability = {token: p for _, p, token in blank}
    place = fillings[0].context.index(None)
    probabilities = [probability[filling.tokens[place]] for filling in fillings]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(fillings) == 8
    assert {filling.ranked_by for filling in fillings} == {"filling"}
    for by in ("right", "joint"):
        again = books.fill(text, candidates=8, seed=0, num_samples=32, rank_by=by)
        scores = [getattr(filling.scores, by) for filling in again]
        assert scores == sorted(scores, reverse=True)
    for mode in (None, "resampling"):
        with pytest.raises(ValueError, match='rank_by is "right"'):
            books.fill("The old[MASK]", rank_by="right", mode=mode)


def test_without_a_seed_every_call_draws_anew_and_says_its_seed(books):
    texts = {books.generate("Once", 12) for _ in range(4)}
    assert len(texts) == 4
    one = books.generate("Once", 12)
    assert books.generate("Once", 12, seed=one.seed) == one
    fills = [books.fill("She[MASK:4] home.")[0] for _ in range(4)]
    assert len({filling.text for filling in fills}) > 1
    again = books.fill("She[MASK:4] home.", seed=fills[0].seed)[0]
    assert again == fills[0]
    for seed in (-1, 2**64, 1.5):
        with pytest.raises(ValueError, match="^seed is "):
            books.generate("Once", seed=seed)
        with pytest.raises(ValueError, match="^seed is "):
            books.fill("a[MASK]b", seed=seed)


def test_lists_in_lists_out(books):
    texts = [
        "The old horse was tired.",
        "It rained.",
        "Once upon a time there was a king.",
    ]
    together = books.score(texts)
    for text, scored in zip(texts, together, strict=True):
        alone = books.score(text)
        assert scored.pieces == alone.pieces
        assert scored.bytes == alone.bytes
        assert scored.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
    encoder = small("RADD")
    for order in ("l2r", "random"):
        pairs = zip(texts, encoder.score(texts, order), strict=True)
        for text, scored in pairs:
            alone = encoder.score(text, order).log_probs
            assert scored.log_probs == pytest.approx(alone, abs=1e-4)
    assert books.score([]) == books.generate([]) == books.fill([]) == []
    samples = books.generate(["Once", "The old horse"], 5, num_samples=2, seed=1)
    assert [len(row) for row in samples] == [2, 2]
    assert all(text.startswith("Once") for text in samples[0])
    gapped = ["She[MASK:2] home.", "He[MASK:1-2] away."]
    fillings = books.fill(gapped, seed=1)
    assert fillings[0] == books.fill(gapped[0], seed=1)
    for text, best in zip(gapped, fillings, strict=True):
        assert books.fill(text, seed=best[0].seed) == best
    for method, wrong in (
        (books.score, ["one", "", "two"]),
        (books.score_each, ["one", "two[MASK]", "three"]),
        (books.fill, ["She[MASK] home.", "two", "[MASK]"]),
        (books.blanks, ["a[MASK]", "b[MASK:2-3] c", "d[MASK]"]),
        (books.rank, ["a [b|c]", "two", "d [e|f]"]),
        (books.generate, ["one", "two[MASK]", "three"]),
    ):
        with pytest.raises(aogpt.UserError, match="^text 2 of 3: "):
            method(wrong)
        with pytest.raises(aogpt.UserError, match="^text 2 of 2 is nan; leave it out"):
            method(["a [b|c][MASK].", math.nan])  # an empty cell of a table
        with pytest.raises(aogpt.UserError, match="a list of texts; this is None"):
            method(None)
    brackets = ["The [cat|dog] sat.", "It was [dark|old]."]
    shares = [[row.share for row in rows] for rows in books.rank(brackets)]
    assert [len(row) for row in shares] == [2, 2]
    (first, _) = books.blanks(["a[MASK] b", "c[MASK:2] d"], top=3)
    assert first == books.blanks("a[MASK] b", top=3)


def test_equal_texts_of_a_list_are_filled_independently(books):
    same = ["She[MASK:6] home."] * 3
    for mode in (None, "resampling"):
        fillings = books.fill(same, seed=1, num_samples=2, mode=mode)
        assert len({best[0].seed for best in fillings}) == 3
        assert len({best[0].text for best in fillings}) > 1


def test_lengths_that_resampling_leaves_out_are_told():
    model = small("AO-GPT")
    text = "She went[MASK:2-30] and left."
    for mode in (None, "resampling"):
        with pytest.warns(UserWarning, match="of 29 lengths of the masks are tried"):
            model.fill(text, mode=mode, num_samples=8)


def test_a_command_takes_the_temperature_of_what_it_does(command, books, monkeypatch):
    """A plain GPT continues a text at 0.7 and resamples at 0.75."""
    gpt = small("GPT-2")
    monkeypatch.setattr("aogpt.text_model.load", lambda *a, **k: gpt)
    taken = []
    monkeypatch.setattr(
        gpt, "_decoding", lambda options: taken.append(options["temperature"]) or 1 / 0
    )
    for text in ("She went[MASK:4]", "She[MASK:4] left."):
        with pytest.raises(ZeroDivisionError):
            command("fill", text)
    assert taken == [0.7, resampling.TEMPERATURE]


def test_equal_tokens_of_several_divisions_keep_their_best_scores(books):
    """Two gaps of one and two tokens, or of two and one, can be filled equally."""
    gapped = gaps.encode_gaps(
        "He said[MASK:1-2],[MASK:1-2] home.", books.tokenizer, books.block_size
    )
    comma = books.tokenizer.encode_after(",")[0]
    contexts = [gapped.context(lengths) for lengths in ((1, 2), (2, 1))]
    filled = []
    for context in contexts:
        tokens = [comma if token is None else token for token in context]
        filled.append(tokens)
    assert filled[0] == filled[1]
    scores = [
        gaps.score_fillings(books.model, [context], [filled[0]])[0]
        for context in contexts
    ]
    for order in ((0, 1), (1, 0)):
        ((_, best),) = gaps.best_fillings(
            books.model,
            [contexts[i] for i in order],
            filled,
            most=4,
            by="right",
        )
        assert best.right == pytest.approx(max(score.right for score in scores))


def test_a_generated_text_is_copied_and_pickled_with_its_tokens(books):
    (text,) = books.generate("The", 4, num_samples=1, seed=3)
    unpickled = pickle.loads(pickle.dumps(text))
    for twin in (copy.copy(text), copy.deepcopy(text), unpickled):
        assert (twin, twin.tokens, twin.seed) == (text, text.tokens, 3)


def test_a_letter_that_is_not_in_the_alphabet_is_refused():
    model = make_system("AO-GPT", 3, tokens=4, block_size=16, dtype=torch.float32)
    text = aogpt.TextModel(Loaded(model, "x", 0, "raw", "alphabet:ACG", 4))
    with pytest.raises(UserError, match="is not in the alphabet"):
        text.score("AC\ud800")


def test_a_mask_that_is_no_gap_is_told(books):
    for call, words in (
        (lambda: books.score("The cat[MASK] home."), "fill or blanks"),
        (lambda: books.score_each("The cat[MASK:2] home."), "fill or blanks"),
        (lambda: books.generate("She[MASK:2] home"), "fill takes masks"),
        (lambda: books.rank("The [cat|dog][MASK] home."), "fill takes masks"),
        (lambda: books.compare(books, "The cat[MASK] home."), "without one"),
    ):
        with pytest.raises(aogpt.UserError, match=f"the text has a mask, .*{words}"):
            call()
    assert books.score("[MASKED] men").nats > 0  # that is no mask
    with pytest.raises(aogpt.UserError, match="draws is 1000000000"):
        books.compare(books, "a b", "random", draws=10**9)


def test_a_block_of_no_tokens_is_refused():
    for size in (0, -5):
        with pytest.raises(ValueError, match="block_size"):
            aogpt.load(BOOKS, block_size=size)


def test_mistakes_are_told_in_the_words_of_python(books):
    for options, words in (
        ({"temprature": 1}, "no option 'temprature'; did you mean 'temperature'"),
        ({"num_sample": 1}, "did you mean 'num_samples'"),
        ({"mode": "l2r", "steps": 3}, "steps has no meaning with mode l2r"),
        ({"top_p": 2}, "top_p is 2"),
        ({"group_size": 0}, "group_size is 0"),
        ({"mode": "order", "order": "no"}, "order"),
        ({"candidates": 10**9}, "candidates is 1000000000; give a number at least 1"),
        ({"num_samples": 10**9}, "num_samples is 1000000000"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            books.fill("She[MASK:2] home.", **options)
        assert "--" not in str(error.value), error.value
    for call, words in (
        (lambda: aogpt.load(BOOKS, device="gpu"), "device 'gpu' is not known; give"),
        (lambda: aogpt.load(None), "path is None"),
        (lambda: aogpt.load(BOOKS, block_size="64"), "block_size is '64'"),
        (lambda: books.score("It rained.", order=[0, 1]), r"order is .*torch.tensor"),
        (lambda: books.generate("It", "5"), "new_tokens is '5', but it must be"),
    ):
        with pytest.raises(aogpt.UserError, match=words):
            call()
    with pytest.raises(ValueError, match="checkpoint") as error:
        aogpt.load(BOOKS, checkpoint="7")
    assert "--" not in str(error.value)


def test_a_model_without_a_start_token_ranks_only_texts_of_one_beginning():
    text = small("GPT-2")
    other = aogpt.TextModel(dataclasses.replace(text.loaded, scored_from=1))
    with pytest.raises(ValueError, match="put a word before them"):
        other.rank("[He|~|Q] said.")
    assert len(other.rank("He [ran|sat].")) == 2
    # The end alone is scored: no bytes to divide by.
    scored = other.score("H", end=True)
    assert scored.scored == 1
    assert scored.bytes == 0
    assert math.isnan(scored.bits_per_byte)


# ---- plain GPTs: sampling-importance-resampling --------------------------------------


def exact_fillings(model, gapped, tokens):
    """Return {(row, sizes of its gaps): log p of the text after its beginning} of every
    filling, and {the same: p of the filling given the text around its gaps}; `tokens`
    is the number of tokens, which are enumerated. Of gaps with nothing between them
    only one may have several lengths."""
    log_probs = {}
    beginning = len(gapped.known[0])
    for sizes in itertools.product(*gapped.lengths):
        context = gapped.context(sizes)
        for filling in itertools.product(range(tokens), repeat=context.count(None)):
            rest = iter(filling)
            row = [next(rest) if token is None else token for token in context]
            order = torch.arange(len(row))[None]
            of_row = token_log_probs(model, torch.tensor([row]), order).double()
            key = (tuple(row), sizes_of_gaps(context))
            log_probs[key] = float(of_row[0, beginning:].sum())
    total = float(torch.tensor(list(log_probs.values())).logsumexp(dim=0))
    probabilities = {}
    for key, log_prob in log_probs.items():
        probabilities[key] = math.exp(log_prob - total)
    return log_probs, probabilities


def keys_of_fillings(fillings):
    """Return the tokens and the lengths of the gaps of each filling, as in
    `exact_fillings`."""
    pairs = zip(fillings.tokens, fillings.contexts, strict=True)
    return [(tuple(tokens), sizes_of_gaps(context)) for tokens, context in pairs]


def resampled_p_value(fillings, keys, exact):
    """Return the p value of 1,500 fillings drawn by their weights, against {key:
    probability}; keys: those of the fillings."""
    counts = Counter(keys[i] for i in fillings.resampled(1500, seed=5))
    observed = torch.tensor([counts[key] for key in exact])
    expected = 1500 * torch.tensor(list(exact.values()))
    return chi_square_p(observed, expected)


RESAMPLED = [
    gaps.Gapped([[0], [1, 2, 0]], [range(2, 3)]),
    gaps.Gapped([[0], [1, 2]], [range(1, 4)]),
    gaps.Gapped([[0], [1, 2], [2]], [range(1, 3), range(2, 3)]),
    gaps.Gapped([[0], [1], []], [range(1, 2), range(1, 2)]),
    gaps.Gapped([[0], [], [1, 2]], [range(1, 3), range(1, 2)]),
]
RESAMPLED_IDS = ["one", "lengths", "two", "at the end", "side by side"]


@pytest.mark.parametrize("gapped", RESAMPLED, ids=RESAMPLED_IDS)
def test_resampled_fillings_follow_the_exact_distribution(gapped):
    model = make_system("GPT, rotary", 3, tokens=3, block_size=8, dtype=torch.float64)
    model.eval()
    log_probs, exact = exact_fillings(model, gapped, 3)
    errors = []
    for draws in (4, 128, 2**14):
        fillings = fill_by_resampling(model, gapped, seed=1, draws=draws, vocab_size=3)
        keys = keys_of_fillings(fillings)
        weights = dict(zip(keys, fillings.weights, strict=True))
        assert math.isclose(sum(weights.values()), 1, abs_tol=1e-9)
        assert 1 - 1e-9 <= fillings.effective_sample_size <= draws + 1e-9
        for key, scores in zip(keys, fillings.scores, strict=True):
            count = len(key[0]) - len(gapped.known[0])
            assert math.isclose(scores.joint * count, log_probs[key], abs_tol=1e-9)
        differences = [abs(weights.get(key, 0) - p) for key, p in exact.items()]
        errors.append(sum(differences) / 2)  # total variation distance
        if draws == 4:
            assert resampled_p_value(fillings, keys, exact) < 1e-3
        if draws == 2**14:  # many more than are drawn: theirs is the only noise
            assert resampled_p_value(fillings, keys, exact) > 1e-3
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.05
    evidence = float(torch.tensor(list(log_probs.values())).logsumexp(dim=0))
    assert math.isclose(fillings.log_evidence, evidence, abs_tol=0.02)


def test_copies_and_lengths_of_one_continuation_count_once_in_the_sample_size():
    """Two gaps: the continuation that fills the first one well is copied."""
    model = make_system("GPT, rotary", 3, tokens=3, block_size=8, dtype=torch.float64)
    model.eval()
    one = fill_by_resampling(model, RESAMPLED[2], seed=1, draws=1, vocab_size=3)
    assert one.effective_sample_size == pytest.approx(1)  # of a row in two lengths
    for seed in range(5):
        few = fill_by_resampling(model, RESAMPLED[2], seed=seed, draws=3, vocab_size=3)
        assert 1 <= few.effective_sample_size <= 3 + 1e-9
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0]).double()
    size = resampling._sample_size(weights, origin=torch.tensor([0, 1, 1, 3]))
    assert size == pytest.approx(2)


@pytest.mark.parametrize("system", [name for name in DECODERS if name != "mask_query"])
def test_any_decoder_fills_gaps_by_resampling(system):
    """By the probabilities that it gives whole texts from left to right, enumerated."""
    gapped = gaps.Gapped([[0], [1, 2, 0]], [range(1, 3)])
    model = make_system(system, 3, tokens=3, block_size=8, dtype=torch.float64).eval()
    # Flat: else some fillings are too rare to be drawn.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("norm_f", "adaln_f", "head", "wte")):
                parameter.mul_(0.1)
    log_probs, exact = exact_fillings(model, gapped, 3)
    fillings = fill_by_resampling(model, gapped, seed=1, draws=2**13, vocab_size=3)
    keys = keys_of_fillings(fillings)
    assert resampled_p_value(fillings, keys, exact) > 1e-3
    for key, scores in zip(keys, fillings.scores, strict=True):
        count = len(key[0]) - len(gapped.known[0])
        assert math.isclose(scores.joint * count, log_probs[key], abs_tol=1e-9)


def test_a_model_that_is_none_and_a_text_of_no_tokens_are_refused(books):
    with pytest.raises(ValueError, match="other is None.*must be a TextModel"):
        books.compare(None, "The old horse.")
    with pytest.raises(ValueError, match="no token to score"):
        books.log_prob([])


def test_a_model_of_any_order_fills_gaps_by_resampling_if_it_is_told(books):
    text = "The old[MASK:1-3] was tired."
    best = books.fill(text, 2, seed=1, mode="resampling")
    assert len(best) == 2
    assert best[0].ranked_by == "joint and right"
    for filling in best:
        assert 0 < filling.weight <= 1
        assert filling.effective_sample_size >= 1
        assert filling.text.startswith("The old")
        assert filling.text.endswith(" was tired.")
    assert books.fill(text, seed=1)[0].weight is None
    for call, words in (
        (lambda: books.generate("The", mode="resampling"), "text with masks"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for system in ("RADD", "mask_query"):
        with pytest.raises(ValueError, match="queries are no .MASK."):
            small(system).fill("a[MASK]c", mode="resampling")
        with pytest.raises(ValueError, match="queries are no .MASK."):
            fill_by_resampling(small(system).model, RESAMPLED[1], seed=1)


@pytest.mark.parametrize("gapped", RESAMPLED, ids=RESAMPLED_IDS)
def test_the_estimated_probability_of_the_text_after_gaps_is_unbiased(gapped):
    """With few continuations, over 100 seeds, against enumeration."""
    model = make_system("GPT, rotary", 3, tokens=3, block_size=8, dtype=torch.float64)
    model.eval()
    log_probs, _ = exact_fillings(model, gapped, 3)
    exact = sum(math.exp(log_prob) for log_prob in log_probs.values())
    estimates = [
        fill_by_resampling(model, gapped, seed=seed, draws=3, vocab_size=3)
        for seed in range(100)
    ]
    log_evidence = torch.tensor([one.log_evidence for one in estimates]).double()
    ratios = log_evidence.exp() / exact
    error = float(ratios.std()) / math.sqrt(len(ratios))
    assert abs(float(ratios.mean()) - 1) < 4 * error + 1e-9


def test_a_plain_gpt_fills_gaps_in_text():
    plain = small("GPT, rotary")
    fillings = plain.fill("a[MASK:2-4]c d[MASK]f.", candidates=5, seed=1)
    assert len(fillings) == 5
    again = plain.fill("a[MASK:2-4]c d[MASK]f.", candidates=5, seed=1)
    for filling, same in zip(fillings, again, strict=True):
        assert filling.seed == 1
        assert filling.text == same.text
        assert filling.weight == same.weight
    for filling in fillings:
        context_ids = [t for t in filling.context if t is not None]
        assert bytes(context_ids) == b"ac df."
        assert 0 < filling.weight <= 1
        assert filling.effective_sample_size >= 1
        context = [filling.context]
        (scores,) = gaps.score_fillings(plain.model, context, [filling.tokens])
        assert math.isclose(scores.joint, filling.scores.joint, abs_tol=1e-4)
        assert math.isclose(scores.right, filling.scores.right, abs_tol=1e-4)
    fillings = plain.fill("a[MASK:2]c", candidates=9, seed=1)
    joint = [filling.scores.joint for filling in fillings]
    assert joint == sorted(joint, reverse=True)
    assert len(joint) == 9
    assert plain.fill("a[MASK:3]", seed=1)[0].weight is None  # it only continues
    by_right = plain.fill("a[MASK:1-3]c", candidates=9, seed=1, rank_by="right")
    right = [filling.scores.right for filling in by_right]
    assert right == sorted(right, reverse=True)
    other = aogpt.TextModel(dataclasses.replace(plain.loaded, scored_from=1))
    for call, words in (
        (lambda: plain.fill("a[MASK:2]c", rank_by="filling"), "given both sides"),
        (lambda: plain.fill("a[MASK:2]c", mode="random"), "mode random"),
        (lambda: other.fill("[MASK:2]c"), "no start token"),
        (lambda: plain.fill("a[MASK:1-20]c[MASK:1-20]e"), "narrower ranges"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_example_fills_a_text_file_and_ranks_the_rows_of_a_table(tmp_path):
    (tmp_path / "a.txt").write_text("Dear friend,\nShe[MASK:2] home.\n")
    (tmp_path / "a.csv").write_text("id,sentence\n1,The [cat|xqz] sat.\n")
    done = run_script(
        "docs/examples/fill_and_rank.py",
        BOOKS,
        "--gaps",
        tmp_path / "a.txt",
        "--spellings",
        tmp_path / "a.csv",
        PYTHONPATH=".",
    )
    greeting, filled, head, row = done.stdout.splitlines()
    assert greeting == "Dear friend,"
    assert head == "id,sentence,best,share"
    assert filled.startswith("She")
    assert filled.endswith(" home.")
    assert "[" not in filled
    assert row.startswith("1,The [cat|xqz] sat.,The cat sat.,")


def test_the_example_reads_tables_of_spreadsheets_and_names_mistakes(
    tmp_path, monkeypatch, capsys, books
):
    example = runpy.run_path("docs/examples/fill_and_rank.py")
    table = tmp_path / "a.csv"
    # With a mark at the beginning, as spreadsheets write it.
    table.write_text("sentence;id\nThe [cat|xqz] sat.;1\n", encoding="utf-8-sig")
    example["rank_rows"](books, table)
    head, row = capsys.readouterr().out.splitlines()
    assert head == "sentence;id;best;share"
    assert row.startswith("The [cat|xqz] sat.;1;The cat sat.;")
    for text, words in (
        ("id,text\n1,The [cat|xqz] sat.\n", "no column 'sentence'; it has .'id'"),
        ("", "no column 'sentence'"),
        ("id,sentence\n1,The [cat|xqz], sat.\n", "quotes around"),
        ("id,sentence\n1\n", "text 1 of 1 is None"),
    ):
        table.write_text(text)
        with pytest.raises(aogpt.UserError, match=words):
            example["rank_rows"](books, table)


@pytest.mark.parametrize("name", ["score", "score_each", "generate", "fill", "blanks"])
def test_editors_see_every_argument_and_the_type_of_the_answer(name):
    method = getattr(aogpt.TextModel, name)
    overloads = typing.get_overloads(method)
    whole = inspect.signature(method)
    answers = set()
    for overload in overloads:
        signature = inspect.signature(overload)
        assert list(signature.parameters) == list(whole.parameters)
        answers.add(str(signature.return_annotation))
    assert len(overloads) >= 2
    assert len(answers) >= 2
    for parameter in whole.parameters:
        assert parameter == "self" or parameter in method.__doc__
