"""Texts from Python and the command line: aogpt/text_model.py, aogpt/__main__.py."""

import importlib.util
import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import ROOT, run_main
from reference import make_system

import aogpt
from aogpt import __main__ as commands
from aogpt.checkpoints import Loaded
from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError
from aogpt.sampling import modes
from aogpt.scoring import token_log_probs

BOOKS = "results/books_model"
SYSTEMS_OF_ANY_ORDER = [
    "AO-GPT",
    "target rotary",
    "two_stream",
    "mask_query",
    "Llama, A3",
    "encoder AO-GPT",
    "RADD",
    "SEDD",
]


@pytest.fixture(scope="module")
def books():
    return aogpt.load(BOOKS)


def small(system):
    """Return a TextModel of a random model over bytes."""
    model = make_system(system, 3, tokens=257, block_size=32, dtype=torch.float32)
    return aogpt.TextModel(Loaded(model, "x", 0, "raw", "bytes", 257))


def of_letters(system, letters):
    """Return a TextModel of a random float64 model whose vocabulary is larger than its
    alphabet and the end."""
    model = make_system(system, 3, tokens=6, block_size=8)
    tokenizer = f"alphabet:{letters}"
    return aogpt.TextModel(Loaded(model, "x", 0, "raw", tokenizer, len(letters) + 1))


def test_masks_are_read_and_their_length_is_compared_before_they_are_made():
    tokenizer = get_tokenizer("bytes")
    context = modes.encode_gaps("a[MASK:2][MASK]b", tokenizer, 8)
    assert context == [97, None, None, None, 98]
    for text in ("a", "a[MASK:0]", "a[MASK:2-3]b", "a[MASK:999999999]"):
        with pytest.raises(UserError):
            modes.encode_gaps(text, tokenizer, 8)


@pytest.mark.parametrize("system", ["AO-GPT", "GPT-2", "RADD"])
@torch.no_grad()
def test_scores_are_those_of_each_text_alone(system):
    text = small(system)
    texts = ["abc", "a longer one", "x"]
    for one, scored in zip(texts, text.score(texts), strict=True):
        tokens = torch.tensor([list(one.encode())])
        order = torch.arange(len(one))[None]
        expected = token_log_probs(text.model, tokens, order)[0].tolist()
        assert scored.log_probs == pytest.approx(expected, abs=1e-4)
        assert scored.nats == pytest.approx(-math.fsum(expected), abs=1e-3)


@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
def test_parts_of_a_text_are_scored_given_the_rest(system):
    text = small(system)
    (one,) = text.score(["abcd"], predict=[(1, 2)])
    ((likely,),) = text.blanks(["a[MASK]cd"], top=257)
    (expected,) = [row.probability for row in likely if row.id == ord("b")]
    assert math.isclose(math.exp(one.log_prob), expected, rel_tol=1e-5)
    assert [value is None for value in one.log_probs] == [True, False, True, True]
    assert (one.scored, one.bytes, one.nats) == (1, 1, -one.log_prob)
    # Both orders of two tokens, by the chain rule.
    spans = [(0, 1), (2, 4)]
    texts = ["abcd", "xyzw", "abc"]
    with pytest.raises(UserError, match="text 3 of 3: the span 2:4 is"):
        text.score(texts, predict=spans)
    joints = text.score(texts[:2], predict=spans, orders=6)
    for joint, words in zip(joints, texts, strict=False):
        assert joint.standard_error == 0
        each = []
        for order in itertools.permutations([0, 2, 3]):
            (scored,) = text.score([words], [1, *order])
            each.append(sum(scored.log_probs[position] for position in order))
        mean = math.log(sum(map(math.exp, each)) / 6)
        assert math.isclose(joint.log_prob, mean, rel_tol=1e-4)
    (some,) = text.score(["abcd"], predict=spans, orders=5)
    assert some.standard_error > 0
    assert abs(some.log_prob - joints[0].log_prob) < 6 * some.standard_error


def test_spans_are_of_whole_tokens_in_the_text(books):
    (joint,) = books.score(["The mother smiled."], predict=[(4, 10)])
    assert [value is None for value in joint.log_probs[:3]] == [True, False, True]
    with pytest.warns(UserWarning, match="4:6 is widened to whole tokens, ' mother'"):
        (widened,) = books.score(["The mother smiled."], predict=[(4, 6)])
    assert widened == joint
    for spans, words in (
        ([(4, 4)], "4:4 is empty or not in the text"),
        ([(4, 99)], "4:99 is empty or not in the text"),
        ([], "predict takes spans"),
        ([("a", 1)], "predict is 'a', but it must be an integer"),
    ):
        with pytest.raises(UserError, match=words):
            books.score(["The mother smiled."], predict=spans)
    with pytest.raises(UserError, match="neither order nor end"):
        books.score(["The mother."], "random", predict=[(4, 10)])
    with pytest.raises(UserError, match="neither order nor end"):
        books.score(["The mother."], np.array([0, 1]), predict=[(4, 10)])
    with pytest.raises(UserError, match="plain GPT"):
        small("GPT-2").score(["abc"], predict=[(0, 1)])
    two = "é日"  # each of several tokens of bytes
    (joint,) = small("AO-GPT").score([two], predict=[(1, 2)])
    assert [value is None for value in joint.log_probs] == [True] * 2 + [False] * 3


def test_a_file_of_orders_that_is_written_again_is_read_again(books, tmp_path):
    file = tmp_path / "orders.npy"
    (ids,) = [one.ids for one in books.score(["The mother smiled."])]
    for order in ("l2r", "r2l"):
        places = np.arange(len(ids))[None]
        np.save(file, places if order == "l2r" else places[:, ::-1])
        (read,) = books.score(["The mother smiled."], order=f"file:file={file}")
        (named,) = books.score(["The mother smiled."], order=order)
        assert read == named


def test_special_tokens_that_are_read_as_text_get_a_warning(books, monkeypatch, capsys):
    note = "1 time <|endoftext|> is read as ordinary"
    words = ["aogpt", "blanks", BOOKS, "<|endoftext|>The[MASK] ran."]
    monkeypatch.setattr("sys.argv", words)
    commands.main()
    assert capsys.readouterr().err.startswith(f"note: {note}")
    with pytest.warns(UserWarning, match="rank compares alternatives"):
        books.score(["The [cat|dog] ran."], predict=[(0, 3)])


def test_a_space_before_a_mask_gets_a_warning(books):
    with pytest.warns(UserWarning, match="words begin with their space"):
        (spaced,) = books.blanks(["The [MASK] smiled."], top=1)
    assert not spaced[0][0].text.startswith(" ")


def test_alternatives_rank_by_the_probability_of_the_whole_text(books):
    (ranked,) = books.rank(["He opened the [door|book|door] and went out."])
    assert [row.text for row in ranked][0] == "He opened the door and went out."
    assert len(ranked) == 2
    scored = books.score([row.text for row in ranked])
    for row, one in zip(ranked, scored, strict=True):
        assert row.log_prob == pytest.approx(-one.nats)
    assert sum(row.share for row in ranked) == pytest.approx(1)
    (atoms,) = books.rank(["c1[[nH]|o]cc[nH]1"])  # brackets within an alternative
    assert {one.text for one in atoms} == {"c1[nH]cc[nH]1", "c1occ[nH]1"}
    (ends,) = books.rank(["She went home[.|]"], end=True)
    assert ends[0].log_prob > ends[1].log_prob


def test_a_seed_repeats_every_sample_and_lists_are_those_of_sample_py(books):
    texts = ["She[MASK:3] home.", "The[MASK] ran."]
    filled = books.fill(texts, num_samples=2, seed=5, mode="l2r")
    assert filled == books.fill(texts, num_samples=2, seed=5, mode="l2r")
    assert len(filled) == 4
    assert filled[0].text.startswith("She")
    assert filled[3].text.endswith(" ran.")
    assert sorted(filled[0].order) == list(range(len(filled[0].tokens)))
    generated = books.generate(["It was", ""], 5, num_samples=2, mode="l2r")
    assert generated[0].text.startswith("It was")
    assert books.generate([], 5) == []


def test_mistakes_are_told(books):
    plain = small("GPT-2")
    for call, words in (
        (lambda: books.score("one text"), "texts is .* but it must be a list"),
        (lambda: books.score([None]), "text 1 of 1 is None"),
        (lambda: books.score(["a", "The[MASK] ran"]), "text 2 of 2: .*has a mask"),
        (lambda: books.generate(["a[MASK]"]), "fill takes masks"),
        (lambda: books.fill(["a"]), "there is no mask"),
        (lambda: books.rank(["a"]), "no alternatives"),
        (lambda: books.rank(["[nH] [a"]), "no alternatives"),
        (lambda: books.rank(["A [cat|[dog|cow]] ran."]), "within an alternative"),
        (lambda: books.rank(["[b|c]" + " a" * 256]), "257 tokens.* 256 at once"),
        (lambda: books.rank(["[b|c]" + " a" * 255], end=True), "257 tokens"),
        (lambda: books.score(["a b"], (1, 1)), "a permutation of 0..1"),
        (lambda: books.score(["a b"], 1), "order is 1, but it must be a list"),
        (lambda: plain.score(["ab"], (1, 0)), "plain GPT"),
        (lambda: plain.fill(["a[MASK]b"]), "plain GPT"),
        (lambda: plain.blanks(["a[MASK]b"]), "plain GPT"),
    ):
        with pytest.raises(UserError, match=words):
            call()
    with pytest.raises(TypeError, match="temprature"):
        books.fill(["a[MASK]"], temprature=1)


def test_a_command_without_a_text_says_so(monkeypatch):
    monkeypatch.setattr("sys.argv", ["aogpt", "fill", BOOKS])
    with pytest.raises(UserError, match="give texts after the model"):
        commands.main()


def test_commands_read_a_text_a_line_and_print_json(
    books, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "lines.txt"
    file.write_text("The [cat|tax] barked.\n\nA [dog|day] ran.\n")
    words = ["rank", BOOKS, "--file", str(file), "--json"]
    rows = run_main(commands, monkeypatch, capsys, *words).splitlines()
    texts = [line for line in file.read_text().splitlines() if line]
    for row, ranked in zip(rows, books.rank(texts), strict=True):
        assert [one["text"] for one in json.loads(row)] == [one.text for one in ranked]
    words = ["score", BOOKS, "The mother.", "--predict", "4:10", "--json"]
    row = json.loads(run_main(commands, monkeypatch, capsys, *words))
    (joint,) = books.score(["The mother."], predict=[(4, 10)])
    assert math.isclose(row["log_prob"], joint.log_prob, rel_tol=1e-5)
    monkeypatch.setattr("sys.argv", ["aogpt", "score", BOOKS, str(file), "--json"])
    commands.main()
    printed = capsys.readouterr()
    assert "is taken as a text; --file reads the file" in printed.err
    row = json.loads(printed.out)
    assert row["log_prob"] == pytest.approx(sum(row["log_probs"]))
    monkeypatch.setattr("sys.argv", ["aogpt", "score", BOOKS, "--file", "b.jsonl"])
    with pytest.raises(UserError, match="b.jsonl is JSON"):
        commands.main()
    monkeypatch.setattr("sys.argv", ["aogpt", "score", BOOKS, "a", "--file", "b"])
    with pytest.raises(UserError, match="give texts after the model"):
        commands.main()


@pytest.mark.parametrize(
    "words, answer",
    [
        (["score", BOOKS, "The old horse."], "bits a byte"),
        (["score", BOOKS, "The old horse.", "--predict", "4:7", "8:13"], "2 tokens"),
        (["rank", BOOKS, "The [cat|tax] barked."], "%"),
        (["fill", BOOKS, "She[MASK:3] home.", "--seed", "1"], "home."),
        (["blanks", BOOKS, "The cat[MASK] home.", "--top", "3"], "%"),
        (["generate", BOOKS, "Once upon", "--new-tokens", "4"], "Once upon"),
    ],
)
def test_every_command_answers(monkeypatch, capsys, words, answer):
    assert answer in run_main(commands, monkeypatch, capsys, *words)


@pytest.mark.parametrize("system", [*SYSTEMS_OF_ANY_ORDER, "mask_query, rotary"])
def test_pairs_are_the_joint_of_two_places(system):
    """All of an alphabet of four: they sum to 1, and each is that of `score`."""
    text = of_letters(system, "abc")
    tables = []  # {(token at 1, token at 3): probability}, of both ways
    for places in ((1, 3), (3, 1)):
        (pairs,) = text.pairs(["abcab"], *places)
        assert sum(map(sum, pairs.table)) == pytest.approx(1)
        table = {}
        for n, m in itertools.product(range(4), repeat=2):
            tokens = {places[0]: pairs.first[n].id, places[1]: pairs.second[m].id}
            table[tokens[1], tokens[3]] = pairs.table[n][m]
        tables.append(table)
    for first, second in itertools.product(range(3), repeat=2):  # 3 is the end
        one = f"a{'abc'[first]}c{'abc'[second]}b"
        (joint,) = text.score([one], predict=[(1, 2), (3, 4)])
        (mean,) = text.score([one], predict=[(1, 2), (3, 4)], orders=2)
        both = [table[first, second] for table in tables]
        assert both[0] == pytest.approx(math.exp(joint.log_prob))
        assert sum(both) / 2 == pytest.approx(math.exp(mean.log_prob))
    (few,) = text.pairs(["abcab"], 1, 3, top=2)
    assert (len(few.first), len(few.table), len(few.table[0])) == (2, 2, 2)


def test_pairs_are_of_two_tokens(books):
    for places, words in (((4, 5), "two places, each of"), ((4, 99), "99:100 is")):
        with pytest.raises(UserError, match=words):
            books.pairs(["The mother smiled."], *places)
    with pytest.raises(UserError, match="plain GPT"):
        small("GPT-2").pairs(["abc"], 0, 1)


def example(name):
    """Return an example of the docs as a module."""
    path = ROOT / "docs" / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_of_minimal_pairs(books, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(aogpt, "load", lambda path: books)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("The cats sleep.\tThe cats sleeps.\nShe went on.\tShe goed on.\n")
    example("minimal_pairs").main("MODEL", str(pairs))
    first, second, total = capsys.readouterr().out.splitlines()
    assert "'sleep.'" in first
    assert "'sleeps.'" in first
    assert "'went'" in second
    (joint,) = books.score(["She went on."], predict=[(4, 8)])
    assert f"'went' {joint.log_prob:.2f}" in second
    assert total == "2 of 2 pairs right"
    for bad in ("", "One sentence.", "The same.\tThe same.", "Three.\tin a\trow."):
        pairs.write_text(f"The cats sleep.\tThe cats sleeps.\n{bad}\n")
        with pytest.raises(aogpt.UserError, match=r"line 2: write two different"):
            example("minimal_pairs").main("MODEL", str(pairs))


def test_the_example_of_surprisal(books, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(aogpt, "load", lambda path: books)
    items = tmp_path / "items.tsv"
    items.write_text("The carpenter went home.\tcarpenter\n")
    example("surprisal").main("MODEL", str(items))
    _, row = capsys.readouterr().out.splitlines()
    before, with_it = books.score(["The", "The carpenter"])
    (joint,) = books.score(["The carpenter went home."], predict=[(4, 13)])
    numbers = f"{joint.scored},{with_it.nats - before.nats:.3f},{joint.nats:.3f}"
    assert row == f"The carpenter went home.,carpenter,{numbers}"
    for bad in ("Without a tab.", "The cat and the cat.\tcat", "The cat.\t"):
        items.write_text(f"The cat.\tcat\n{bad}\n")
        with pytest.raises(aogpt.UserError, match="line 2: write a sentence, a tab"):
            example("surprisal").main("MODEL", str(items))


def test_the_example_of_substitutions(monkeypatch, capsys):
    """A single score is the difference of two joints; so is a double one."""
    text = of_letters("AO-GPT", "abcd")
    monkeypatch.setattr(aogpt, "load", lambda path: text)
    with pytest.raises(aogpt.UserError, match=r"no token for \['e'\]"):
        example("substitutions").main("MODEL", "abcab", "abcde")
    example("substitutions").main("MODEL", "abcab", "abcd")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]

    def gain(changes):
        mutant = list("abcab")
        spans = []
        for change in changes:
            place = int(change[1]) - 1
            assert mutant[place] == change[0]
            mutant[place] = change[2]
            spans.append((place, place + 1))
        old, new = text.score(["abcab", "".join(mutant)], predict=spans)
        return new.log_prob - old.log_prob

    assert len([line for line in lines if len(line) == 2]) == 5  # one of each place
    assert len([line for line in lines if len(line) > 2]) == 10  # all pairs of places
    for line in lines:
        changes = [word.rstrip(",") for word in line[1:3]]
        assert float(line[0]) == pytest.approx(gain(changes), abs=6e-4)
        if len(line) > 2:
            total = gain(changes[:1]) + gain(changes[1:])
            assert float(line[-1]) == pytest.approx(total, abs=2e-3)
