"""Answers to puzzles (eval_tasks.py)."""

import dataclasses
import json
import math

import pytest
import torch
from helpers import ALONE, prepared, read_lines, tiny_config

import eval_tasks
import train
from checkpoints.load import load
from data.puzzles import TASKS
from evaluation.answers import open_questions
from orders import OrderConfig

# ---- eval_tasks.py -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of a few steps on shuffle and reversal, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = {name: prepared(name, folder / name, limit=400) for name in ("shuffle", "reversal")}
    config = tiny_config(data["shuffle"], folder, steps=5, model__block_size=17)
    assert train.train(config, ALONE) == 0
    gpt = tiny_config(data["reversal"], folder, name="gpt", steps=5, model__block_size=9)
    model = dataclasses.replace(gpt.model, target="none")
    gpt = dataclasses.replace(gpt, model=model, order=OrderConfig("l2r"))
    assert train.train(gpt, ALONE) == 0
    return config.run_folder, gpt.run_folder, data


def test_every_record_is_answered_and_compared(trained, script, tmp_path):
    run, _, data = trained
    files = {name: tmp_path / f"out.{name}" for name in ("json", "samples", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    status, out, err = script(
        eval_tasks, run, "--tasks", data["shuffle"], "--mode", "random", "--group-size", 4,
        "--limit", 50, *options,
    )  # fmt: skip
    assert status == 0, err
    result = json.loads(files["json"].read_text())["results"][0]
    used = {key: result[key] for key in ("mode", "group_size", "temperature", "unmask_by")}
    assert used == {"mode": "random", "group_size": 4, "temperature": 1.0, "unmask_by": None}
    rows = read_lines(files["samples"])
    assert len(rows) == 50 and result["records"] == 50 and result["nfe"] == 2
    right = [TASKS["shuffle"].is_right(row["answer"], row["text"]) for row in rows]
    assert [row["right"] for row in rows] == right
    share = sum(right) / 50
    error = math.sqrt(share * (1 - share) / 49)
    assert result["exact_match"] == pytest.approx(share)
    assert result["standard_error"] == pytest.approx(error)
    assert result["limit"] == pytest.approx(TASKS["shuffle"].limit([4, 4]))
    for row in rows:
        assert row["answer"][:9] == row["text"][:9]
        assert row["step"][:9] == [-1] * 9 and sorted(row["step"][9:]) == [0] * 4 + [1] * 4
    assert "shuffle" in out and f"{share:.4f}" in out
    assert "<script" in files["html"].read_text()


def test_a_model_that_can_only_continue_is_asked_with_what_is_given_first(trained, script):
    _, gpt, data = trained
    questions = open_questions(str(data["reversal"]), None, load(gpt), limit=5)
    first = questions.given_first()
    for row, other in zip(questions.tokens.tolist(), first.tokens.tolist(), strict=True):
        assert other == row[4:] + row[:4]
    assert torch.equal(first.roles.given[0], torch.arange(9) < 5)
    arguments = "--tasks", data["reversal"], "--limit", 10, "--mode"
    status, out, err = script(eval_tasks, gpt, *arguments, "l2r")
    assert status == 0 and "reversal" in out, err
    status, out, err = script(eval_tasks, gpt, f"--tasks={data['reversal']}", "--limit", 10)
    assert status == 0 and "| l2r" in out, err
    status, _, err = script(eval_tasks, gpt, *arguments, "confidence")
    assert status == 2 and "takes --mode l2r" in err


def test_names_of_the_harness_are_not_taken_for_data(tmp_path, monkeypatch):
    """data/lambada is text to score, and lambada a task of the harness."""
    protocols = {"lambada": "sedd", "questions": "records"}
    monkeypatch.setattr(eval_tasks, "load_meta", lambda name: {"protocol": protocols[name]})

    def find(name):
        if name not in protocols:
            raise FileNotFoundError(name)
        return name

    monkeypatch.setattr(eval_tasks, "find_dataset", find)
    found = map(eval_tasks.is_prepared, ("lambada", "questions", "sudoku6", "hellaswag"))
    assert list(found) == [False, True, True, False]


def test_what_cannot_be_answered_is_said(trained, script, data):
    run, *_ = trained
    for words, says in (
        (["--tasks", data], "holds text without prompts"),
        (["--tasks", "colouring"], "make it with: python data/prepare.py colouring"),
        (["--tasks", trained[2]["shuffle"], "--mode", "mdm", "--threshold", 0.5], "no meaning"),
        (["--tasks", trained[2]["shuffle"], "--threshold", 90], "confidence is a probability"),
        (["--tasks", trained[2]["shuffle"], "--num-fewshot", 2], "is for tasks of the harness"),
        (["--tasks", trained[2]["shuffle"], "--mode", "margin", "--unmask-by", "entropy"], "leave"),
    ):
        status, _, err = script(eval_tasks, run, *words)
        assert status == 2 and says in err, err
