"""studies/infilling.py and eval_infill.py: the middle of a passage, given
both sides or one."""

import json
import math

import pytest
import torch
from helpers import ALONE, LENGTH, prepared, tiny_config, write_jsonl, write_rows
from reference import DECODERS, ENCODERS, make_system, order_through, random_tokens
from study_data import stopping_at_the_second
from test_tokenizer_files import of_bytes, of_words, saved

import train
from aogpt.checkpoints import Loaded
from aogpt.data.tokenizers import get_tokenizer
from aogpt.sampling import Engine
from aogpt.sampling.modes import DecodingOptions
from aogpt.scoring import masked_log_probs, masked_logits, token_log_probs
from studies import eval_infill
from studies.infilling import (
    Passages,
    find_last_words,
    find_passages,
    middle_nll,
    rouge,
)

T = 9
TOKENS = 11


def test_the_sentence_nearest_to_the_middle_is_found_in_bytes():
    text = 'It was. "No!" he said. The cat sat on it. Then they all went home. End'
    block = torch.tensor([list(text.encode())])
    tokenizer = get_tokenizer("bytes")
    end = tokenizer.eot
    passages = find_passages(block, tokenizer, 10, 30, end)
    (middle,) = passages.middle(passages.tokens.tolist())
    assert tokenizer.decode(middle) == " The cat sat on it."
    # of another length it is another
    longer = find_passages(block, tokenizer, 20, 30, end)
    (middle,) = longer.middle(block.tolist())
    assert tokenizer.decode(middle) == " Then they all went home."
    assert len(find_passages(block, tokenizer, 40, 50, end)) == 0
    # A sentence does not span two documents.
    two = block.clone()
    two[0, text.index("sat")] = end
    (middle,) = find_passages(two, tokenizer, 12, 30, end).middle(two.tolist())
    assert tokenizer.decode(middle) == " Then they all went home."
    before, _, after = text.partition(" The cat sat on it.")
    both_sides = passages.known(both_sides=True)[0]
    assert tokenizer.decode(block[0, both_sides]) == before + after
    left = passages.known(both_sides=False)[0]
    assert tokenizer.decode(block[0, left]) == before


@pytest.mark.parametrize("name", ["bytes", "english"])
@pytest.mark.parametrize("end", [None, 3], ids=["its end", "another end"])
def test_the_last_words_of_documents_are_found_whatever_the_tokens(name, end):
    tokenizer = get_tokenizer(name)
    end = tokenizer.eot if end is None else end
    documents = [
        "Who saw the cat",
        "One",
        "It was on the warm\u2019 mat ",
        "a space of three bytes\u2003here",
        "",
        "He came home late",
    ]
    row = []
    for text in documents:
        row += [*tokenizer.encode(text), end]
    row += tokenizer.encode("never ended")
    passages = find_last_words(row, tokenizer, 10, 20, end)
    middles = passages.middle(passages.tokens.tolist())
    words = [tokenizer.decode(ids) for ids in middles]
    assert words == [" cat", " mat ", "\u2003here", " late"]
    assert passages.tokens.shape == (4, 20)
    contexts = (
        "Who saw the",
        "It was on the warm\u2019",
        "a space of three bytes",
        "He came home",
    )
    for ids, start, text in zip(passages.tokens, passages.start, contexts, strict=True):
        # of a character that was cut
        given = tokenizer.decode(ids[:start]).strip("\ufffd")
        assert given
        assert text.endswith(given)
    assert len(find_last_words(row, tokenizer, 2, 20, end)) == 2
    # no room for the context
    assert len(find_last_words(row, tokenizer, 10, 1, end)) == 0


@pytest.mark.parametrize("both", [True, False], ids=["both sides", "left"])
@pytest.mark.parametrize("system", [*DECODERS, *ENCODERS])
def test_the_likelihood_of_the_middle_is_the_product_of_its_conditionals(system, both):
    """Each token given what is known and the tokens of the middle before it (SEDD in
    float32)."""
    both = both and system != "GPT-2"  # which can only continue
    model = make_system(system, 2)
    tokens = random_tokens(TOKENS, batch_size=4, length=T, seed=1)
    passages = Passages(
        tokens,
        start=torch.tensor([3, 0, 5, 2]),
        end=torch.tensor([6, 4, 9, 3]),
        document=torch.zeros(4).long(),
    )
    got = middle_nll(model, passages, both)
    for b in range(4):
        start = int(passages.start[b])
        end = int(passages.end[b])
        context = list(range(start))
        if both:
            context += range(end, T)
        row = passages.tokens[b : b + 1]
        nll = 0.0
        for position in range(start, end):
            if system in ENCODERS:
                masked = torch.tensor([[p not in context for p in range(T)]])
                log_probs = masked_log_probs(model, row, masked)
                nll -= float(log_probs[0, position])
            else:
                order = torch.tensor([order_through(context, position, T)])
                log_probs = token_log_probs(model, row, order)
                nll -= float(log_probs[0, len(context)])
            context.append(position)
        assert float(got[b]) == pytest.approx(nll / (end - start), abs=1e-5)


@pytest.mark.parametrize("mode", ["l2r", "random", "confidence"])
@pytest.mark.parametrize("system", ENCODERS)
def test_an_encoder_is_sampled_by_the_conditionals_that_it_is_scored_by(
    system, mode, monkeypatch
):
    """Given the left side: with [MASK] up to the end of the block."""
    generate = Engine.generate
    generations = []

    def recorded(*arguments, **settings):
        generations.append(generate(*arguments, **settings))
        return generations[-1]

    monkeypatch.setattr(Engine, "generate", recorded)
    model = make_system(system, 2, torch.float32).eval()
    N = 24
    passages = Passages(
        random_tokens(TOKENS, batch_size=N, length=T, seed=1),
        start=torch.arange(N) % 4,
        end=torch.arange(N) % 4 + 3,
        document=torch.zeros(N).long(),
    )
    loaded = Loaded(model, "x", 0, "raw", "bytes", TOKENS)
    options = DecodingOptions(mode=mode, temperature=0)
    rows = eval_infill.fill_in(loaded, passages, False, options, seed=0)
    (samples,) = generations
    tokens = samples.tokens
    for b in range(N):
        start = int(passages.start[b])
        end = int(passages.end[b])
        assert rows[b][:start] == passages.tokens[b, :start].tolist()
        for position in range(start, end):
            masked = samples.step[b] >= samples.step[b, position]
            logits = masked_logits(model, tokens[b : b + 1], masked[None])
            place = int(masked[:position].sum())  # among the masked ones
            assert rows[b][position] == int(logits[place, :TOKENS].argmax())
        if mode != "confidence":
            nothing_after = samples.step[b, end:] > samples.step[b, :end].max()
            assert nothing_after.all()


def test_intervals_are_by_document_where_these_differ():
    values = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    mean, one_document = eval_infill.mean_and_half_width(values, [0] * 6)
    _, three_documents = eval_infill.mean_and_half_width(values, [0, 0, 1, 1, 2, 2])
    assert mean == 2
    assert three_documents > 2 * one_document > 0


@pytest.fixture
def said(tmp_path):
    """Return a data set of short sentences."""
    words = tmp_path / "said.txt"
    words.write_text("It is. We go. Oh no! Is it you? We are. " * 60)
    return prepared("text", tmp_path / "said", words, split="val")


def test_a_plain_gpt_fills_in_by_resampling(plain, said, printed, tmp_path):
    report = tmp_path / "infill.json"
    options = ["--data", said, "--shortest", 2, "--longest", 12, "--json", report]
    options += ["--num-passages", 3, "--draws", 8]
    out = printed(eval_infill, plain, *options)
    _, row = json.loads(report.read_text())["rows"]
    assert row["given"] == "both"
    assert row["mode"] == "resampling"
    assert row["draws"] == 8
    for size in row["effective_sample_size"]:
        assert 1 <= size <= 8
    assert len(row["nll"]) == len(row["rouge_l"]) == len(row["documents"])
    assert f"{plain}: 8 continuations at temperature 0.75" in out
    assert "lower bound" in out


def test_a_decoder_of_any_order_fills_in_by_resampling_too(
    run, said, printed, tmp_path
):
    report = tmp_path / "infill.json"
    options = ["--data", said, "--shortest", 2, "--longest", 12, "--json", report]
    options += ["--num-passages", 3, "--draws", 8, "--mode", "l2r"]
    out = printed(eval_infill, run, *options)
    rows = json.loads(report.read_text())["rows"]
    assert [(row["given"], row["mode"]) for row in rows] == [
        ("left", "l2r"),
        ("both", "l2r"),
        ("both", "resampling"),
    ]
    left, both, resampled = [row["nll"] for row in rows]
    assert both != resampled
    gains = [one - other for one, other in zip(left, both, strict=True)]
    worth = sum(gains) / len(gains)
    assert f"{run}: the right side is worth {worth:.4f} nats/token" in out


def test_draws_leave_out_a_model_that_cannot_resample(said):
    model = make_system("mask_query", 3, tokens=257, block_size=32).eval()
    loaded = Loaded(model, "x", 0, "raw", "bytes", 257)
    a = eval_infill.Arguments(
        runs=("x",),
        data=str(said),
        num_passages=3,
        shortest=2,
        longest=12,
        draws=8,
        decoding=DecodingOptions(mode="l2r", temperature=0),
    )
    passages = eval_infill.passages_of(a, [loaded])
    rows = eval_infill.evaluate("x", loaded, passages, a)
    assert [row["mode"] for row in rows] == ["l2r", "l2r"]


def test_rouge_counts_shared_words_pairs_and_the_longest_common_subsequence():
    for one, other, *expected in (
        ("The cat sat on the mat.", "the cat lay on a mat", 4 / 6, 1 / 5, 4 / 6),
        ("One, two: three!", "one two three", 1, 1, 1),
        ("", "c", 0, 0, 0),
        ("c b a", "a b c", 1, 0, 1 / 3),  # in another order: the same words
        ("a a a", "a b", 2 / 5, 0, 2 / 5),  # as often as both have it
        ("na\u00efve _x", "naive _x", 1 / 2, 0, 1 / 2),  # letters are not only a to z
    ):
        scores = rouge([(one, other)])
        measured = [scores[key][0] for key in ("rouge_1", "rouge_2", "rouge_l")]
        assert measured == pytest.approx(expected)


def test_the_script_reports_what_the_functions_say(
    run, plain, encoder, said, printed, mistake, tmp_path
):
    report = tmp_path / "infill.json"
    options = ["--data", said, "--shortest", 2, "--longest", 12, "--json", report]
    out = printed(eval_infill, run, plain, encoder, *options)
    rows = json.loads(report.read_text())["rows"]
    expected = [
        (str(run), "left", "l2r"),
        (str(run), "both", "l2r"),
        (str(run), "both", "random"),
        (str(run), "both", "confidence"),
        (str(plain), "left", "l2r"),
        (str(encoder), "left", "l2r"),
        (str(encoder), "both", "l2r"),
        (str(encoder), "both", "random"),
        (str(encoder), "both", "confidence"),
    ]
    assert [(row["run"], row["given"], row["mode"]) for row in rows] == expected
    for row in rows:
        assert len(row["nll"]) == len(rows[0]["nll"]) == len(row["rouge_l"])
        for nll in row["nll"]:
            assert 0 < nll < 2 * math.log(320)
        for score in row["rouge_1"]:
            assert 0 <= score <= 1
    assert rows[0]["nll"] != rows[1]["nll"] == rows[2]["nll"]
    settings = json.loads(report.read_text())["settings"]
    assert settings["temperature"] == 0
    assert settings["mode"] is None
    assert settings["shortest"] == 2
    assert f"{run}: the right side is worth" in out
    assert f"{plain}: the right" not in out
    assert report.with_suffix(".md").read_text() == out
    records = prepared(
        "records",
        tmp_path / "records",
        write_rows(tmp_path / "rows.jsonl", [{"text": "One. Two. Three."}]),
        block_size=32,
        split="test",
    )
    assert "holds records" in mistake(eval_infill, run, "--data", records)
    words = ["--data", said, "--shortest", 15, "--longest", 15]
    assert "no sentence of 15 to 15 tokens" in mistake(eval_infill, run, *words)


def test_a_run_that_cannot_fill_in_costs_no_results_and_what_is_finished_is_saved(
    run, plain, said, mistake, tmp_path, monkeypatch
):
    report = tmp_path / "infill.json"
    options = ["--data", said, "--shortest", 2, "--longest", 12, "--json", report]
    evaluate_once, evaluated = stopping_at_the_second(eval_infill.evaluate)
    monkeypatch.setattr(eval_infill, "evaluate", evaluate_once)
    words = [run, plain, *options, "--mode", "random"]
    assert "plain GPT" in mistake(eval_infill, *words)
    assert not evaluated and not report.exists()
    assert "stopped" in mistake(eval_infill, run, plain, *options)
    rows = json.loads(report.read_text())["rows"]
    assert {row["run"] for row in rows} == {str(run)}


@pytest.mark.parametrize("last_word", [False, True], ids=["sentence", "last word"])
def test_models_of_other_block_sizes_fill_in_the_same_passages(
    run, data, said, printed, tmp_path, last_word
):
    config = tiny_config(
        data, run.parent, "twice", steps=6, model__block_size=2 * LENGTH
    )
    train.train(config, ALONE)
    longer = config.run_folder
    report = tmp_path / "infill.json"
    options = ["--num-passages", 9, "--mode", "l2r", "--overwrite", "--json", report]
    if last_word:
        texts = [f"we saw {i} cats and dogs" for i in range(60)]
        source = write_jsonl(tmp_path / "rows.jsonl", texts)
        rows_of_text = prepared("text", tmp_path / "rows", source, split="val")
        options += ["--data", rows_of_text, "--last-word"]
    else:
        options += ["--data", said, "--shortest", 2, "--longest", 12]
    rows_of_runs = []
    for runs in ([run, longer], [longer, run], [longer]):
        printed(eval_infill, *runs, *options)
        rows = json.loads(report.read_text())["rows"]
        rows_of_runs.append([row for row in rows if row["run"] == str(longer)])
        for row in rows:
            assert row["documents"] == rows[0]["documents"]
            assert len(row["nll"]) == len(rows[0]["nll"])
    assert rows_of_runs[0] == rows_of_runs[1] != rows_of_runs[2]


def test_last_words_are_predicted_from_what_precedes(
    run, plain, encoder, tmp_path, printed, mistake
):
    texts = [f"we saw {i} cats" for i in range(60)]
    source = write_jsonl(tmp_path / "rows.jsonl", texts)
    data = prepared("text", tmp_path / "rows", source, split="val")
    report = tmp_path / "words.json"
    options = ["--data", data, "--last-word", "--num-passages", 5, "--json", report]
    out = printed(eval_infill, run, plain, encoder, *options)
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["given"] == "passage"
        assert row["mode"] == "l2r"
        assert len(row["nll"]) == 5
    assert "5 last words. nats/token: of the true last word" in out
    assert "worth" not in out
    for unused in ("--draws", "--shortest", "--longest"):
        words = ["--data", data, "--last-word", unused, 8]
        assert f"{unused} has no meaning" in mistake(eval_infill, run, *words)


@pytest.mark.parametrize("make", [of_bytes, of_words])
def test_the_last_word_is_found_where_a_tokenizer_adds_a_space(tmp_path, make):
    tokenizer = get_tokenizer(str(saved(make(), tmp_path)))
    ids = [*tokenizer.encode("we saw the cat"), tokenizer.eot]
    passages = find_last_words(ids, tokenizer, 1, 20, tokenizer.eot)
    assert tokenizer.decode(ids[: int(passages.start)]) == "we saw the"
    assert int(passages.end) == len(ids) - 1
