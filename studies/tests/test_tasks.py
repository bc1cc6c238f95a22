"""Answers to prompts (eval_tasks.py) and to puzzles (puzzle_answers.py)."""

import json
import math

import pytest
import torch
from helpers import ALONE, change, prepared, read_lines, tiny_config, write_rows
from study_data import prepared_study, stopping_at_the_second

import aogpt
import train
from aogpt.checkpoints.load import load
from aogpt.evaluation.eval_sets import open_questions
from aogpt.orders import OrderConfig
from aogpt.sampling.modes import DecodingOptions
from studies import eval_tasks, puzzle_answers, tasks
from studies.answers import answer, given_first
from studies.puzzles import TASKS

DECODERS = tasks.load_tasks()[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of a few steps on shuffle and reversal, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = {
        name: prepared_study(name, folder / name, limit=400)
        for name in ("shuffle", "reversal")
    }
    config = tiny_config(data["shuffle"], folder, steps=5, model__block_size=17)
    gpt = tiny_config(data["reversal"], folder, "gpt", steps=5, model__block_size=9)
    gpt = change(gpt, order=OrderConfig("l2r"), model__target="none")
    assert train.train(config, ALONE) == train.train(gpt, ALONE) == 0
    return config, gpt, data


def test_every_record_is_answered_and_compared(trained, printed, tmp_path):
    config, _, data = trained
    report = tmp_path / "out.json"
    samples = tmp_path / "out.samples"
    page = tmp_path / "out.html"
    options = ["--tasks", data["shuffle"], "--mode", "random:group=4"]
    options += ["--limit", 50, "--json", report, "--samples", samples, "--html", page]
    out = printed(puzzle_answers, config.run_folder, *options)
    result = json.loads(report.read_text())["results"][0]
    assert result["mode"] == "random:group=4"
    assert result["temperature"] == 1.0
    rows = read_lines(samples)
    assert len(rows) == 50
    assert result["records"] == 50
    assert result["nfe"] == 2
    right = [TASKS["shuffle"].is_right(row["answer"], row["text"]) for row in rows]
    assert [row["right"] for row in rows] == right
    share = sum(right) / 50
    assert result["exact_match"] == pytest.approx(share)
    error = math.sqrt(share * (1 - share) / 49)
    assert result["standard_error"] == pytest.approx(error)
    assert result["limit"] == pytest.approx(TASKS["shuffle"].limit([4, 4]))
    for row in rows:
        assert row["answer"][:9] == row["text"][:9]
        assert row["step"][:9] == [-1] * 9
        assert sorted(row["step"][9:]) == [0] * 4 + [1] * 4
    assert "shuffle" in out
    assert f"{share:.4f}" in out
    if share == 0:
        assert "the 95% interval is below 0.0711" in out  # 1 - 0.025 ** (1 / 50)
    assert "<script" in page.read_text()


def test_a_given_end_is_known_first_as_where_texts_are_filled(tmp_path):
    """Answers are what `fill` writes, of records whose end is given."""
    molecules = aogpt.load("results/molecules_model")
    wholes = ["COc1cc(C=O)ccc1O", "CCc1nn(C)c(C(=O)NC)c1N", "O=C1CCCN1Cc1ccccc1"]
    rows = []
    texts = []
    for whole in wholes:
        text = f"[GIVEN]{whole[:6]}[/GIVEN]{whole[6:11]}[GIVEN]{whole[11:]}[/GIVEN]"
        rows.append({"text": text})
        texts.append(f"{whole[:6]}[MASK:5]{whole[11:]}")
    source = write_rows(tmp_path / "rows.jsonl", rows)
    data = prepared(
        "records",
        tmp_path / "data",
        source,
        tokenizer=molecules.tokenizer.name,
        block_size=molecules.block_size,
        split="test",
    )
    loaded = molecules.loaded
    questions = open_questions(data, None, loaded)
    options = DecodingOptions(mode="confidence", temperature=0)
    answers = answer(loaded, questions, options, 0, ALONE)
    filled = molecules.fill(texts, mode="confidence", temperature=0)
    assert [row["answer"] for row in answers.records] == [one.text for one in filled]


def test_a_model_that_can_only_continue_is_asked_with_what_is_given_first(
    trained, printed, mistake
):
    _, config, data = trained
    possible = {}
    for name, decoder in DECODERS.items():
        options = tasks.decoding_options(decoder, "reversal", config)
        if options:
            possible[name] = options
    assert list(possible) == ["l2r"]
    assert tasks.decode(config, possible["l2r"], 8)["nfe"] == 4
    gpt = config.run_folder
    questions = open_questions(str(data["reversal"]), None, load(gpt), limit=5)
    first = given_first(questions)
    expected = [row[4:] + row[:4] for row in questions.tokens.tolist()]
    assert first.tokens.tolist() == expected
    assert torch.equal(first.roles.given[0], torch.arange(9) < 5)
    arguments = ["--tasks", data["reversal"], "--limit", 10]
    out = printed(eval_tasks, gpt, *arguments)
    assert "| l2r" in out
    assert "reversal" in out
    said = mistake(eval_tasks, gpt, *arguments, "--mode", "confidence")
    assert "take mode l2r" in said


def test_a_run_decodes_in_every_way_of_a_study(trained):
    decoded = {}
    for name, decoder in DECODERS.items():
        options = tasks.decoding_options(decoder, "shuffle", trained[0])
        decoded[name] = tasks.decode(trained[0], options, 8)
    assert decoded["random, 4 a step"]["nfe"] == decoded["l2r, 4 a step"]["nfe"] == 2
    assert decoded["even, 4 steps"]["limit"] == TASKS["shuffle"].limit([2, 2, 2, 2])
    assert decoded["random, 4 a step"]["limit"] == TASKS["shuffle"].limit([4, 4])
    assert decoded["speculative"]["limit"] == pytest.approx(1)
    assert decoded["threshold 0.9"]["limit"] is None


def test_what_cannot_be_answered_is_said(trained, mistake, data):
    run = trained[0].run_folder
    shuffle = trained[2]["shuffle"]
    for words, says in (
        (["--tasks", data], "holds text without prompts"),
        (["--tasks", "colouring"], "make it with: python -m studies.prepare colouring"),
        (["--tasks", shuffle, "--mode", "mdm:threshold=0.5"], "not a setting of mdm"),
    ):
        assert says in mistake(eval_tasks, run, *words)


def test_a_wrong_task_costs_no_answers_and_what_is_finished_is_saved(
    trained, mistake, data, tmp_path, monkeypatch
):
    run = trained[0].run_folder
    shuffle = trained[2]["shuffle"]
    report = tmp_path / "out.json"
    answer_once, answered = stopping_at_the_second(answer)
    monkeypatch.setattr(eval_tasks, "answer", answer_once)
    words = ["--limit", 4, "--json", report, "--tasks", shuffle]
    assert "holds text without" in mistake(eval_tasks, run, *words, data)
    assert not answered and not report.exists()
    assert "stopped" in mistake(eval_tasks, run, *words, shuffle)
    (result,) = json.loads(report.read_text())["results"]
    assert result["records"] == 4
    assert result["task"] == "shuffle"


def test_puzzles_of_several_answers_are_noted_without_their_judge(trained, printed):
    words = [trained[0].run_folder, "--limit", 2, "--tasks", trained[2]["shuffle"]]
    note = "other answers than the one in the data are right"
    assert note in printed(eval_tasks, *words)
    assert note not in printed(puzzle_answers, *words)
