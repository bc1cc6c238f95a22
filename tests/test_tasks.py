"""Answers to puzzles (eval_tasks.py), and what tasks.py says of them."""

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
from studies import tasks as command
from studies.experiments.kept import Kept
from studies.experiments.tasks import (
    RESULTS,
    Decodings,
    against_l2r,
    conclusions,
    cost_table,
    cost_told,
    costs_of,
    figure,
    limit_cell,
    load_tasks,
    page,
    summary_table,
    task_table,
)

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


# ---- tasks.py ------------------------------------------------------------------------------------


def test_systems_are_tuned_alike_and_differ_in_what_they_are_only():
    found = load_tasks()
    assert found.keys() == TASKS.keys()
    for name, of in found.items():
        arms = of.experiment.recipes["fast"].values()
        configs = [of.experiment.config("fast", arm, 0, {}) for arm in arms]
        assert len({json.dumps(arm.tune) for arm in arms}) == 1
        for config in configs:
            assert config.model.block_size == TASKS[name].length
            for table in ("data", "optim", "train", "eval"):
                assert getattr(config, table) == getattr(configs[0], table)
            for key in ("n_layer", "n_head", "n_embd", "position"):
                assert getattr(config.model, key) == getattr(configs[0].model, key)


def test_a_run_decodes_in_every_way_that_it_can(trained):
    run, gpt, data = trained
    found = load_tasks()
    questions = {n: open_questions(str(data[n]), None, load(run), limit=8) for n in data}
    config = tiny_config("data", "out")

    def decode_all(loaded, of, questions):
        model, kind = loaded.model.config, "l2r" if loaded.model.config.l2r_only else "random"
        of_model = dataclasses.replace(config, model=model, order=OrderConfig(kind))
        decodings = Decodings(of, of_model, 8, Kept(None))
        decodings.asked = loaded, questions
        return {name: decodings.summary(name) for name in decodings.possible}

    of_run = decode_all(load(run), found["shuffle"], questions["shuffle"])
    assert of_run.keys() == found["shuffle"].decoders.keys()
    assert of_run["random, 4 a step"]["nfe"] == of_run["l2r, 4 a step"]["nfe"] == 2
    assert of_run["even, 4 steps"]["limit"] == TASKS["shuffle"].limit([2, 2, 2, 2])
    assert of_run["random, 4 a step"]["limit"] == TASKS["shuffle"].limit([4, 4])
    assert of_run["speculative"]["limit"] == pytest.approx(1)
    assert of_run["threshold 0.9"]["limit"] is None
    of_gpt = decode_all(load(gpt), found["reversal"], questions["reversal"])
    assert of_gpt.keys() == {"l2r"} and of_gpt["l2r"]["nfe"] == 4


def made_up(shares, nfe=8.0, seconds=1.0, **others):
    """The arm of a result: a share of right answers for each decoder and seed."""
    base = {"records": 100, "standard_error": 0.01, "limit": None, "token_forwards": 10 * seconds}
    runs = [
        {
            "seed": seed,
            "commit": "abc",
            "tokens": [5_000_000],
            "decoders": {
                name: base
                | {"exact_match": share, "nfe": nfe / (1 + ("fast" in name)), "seconds": seconds}
                for name, share in of_seed.items()
            },
        }
        for seed, of_seed in enumerate(shares)
    ]
    tuned = {"tuned": {"optim.muon_lr": 0.02}, "edge": False}
    return tuned | {"parameters": 1234, "runs": runs} | others


def cells_of(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_tables_and_the_page_say_what_the_results_are():
    """Interval: Student's t of one degree of freedom, 12.706 times 0.02 / sqrt(2)."""
    arms = {
        "aogpt": made_up([{"l2r": 0.2, "confidence": 0.96}, {"l2r": 0.3, "confidence": 0.98}]),
        "encoder": made_up([{"confidence": 0.5, "fast": 0.5}] * 2, seconds=4.0),
        "gpt": made_up([{"l2r": 0.25}, {"l2r": 0.27}]),
    }
    row = next(li for li in task_table(arms) if li.startswith("| aogpt") and "confidence" in li)
    assert cells_of(row) == ["aogpt", "confidence", "97.0% +- 12.7%", "", "8.0", "10", "10.0"]
    head, _, row = summary_table({"star": arms})
    told = dict(zip(cells_of(head), cells_of(row), strict=True))
    assert told["aogpt, l2r"].startswith("25.0%") and told["aogpt, confidence"].startswith("97.0%")
    assert told["encoder, confidence"].startswith("50.0%") and told["any order"] == "wins"
    assert costs_of({"star": arms}) == []  # the encoder is right less often
    assert cost_table([]) == ["Nowhere."] and "Nowhere" in cost_told([])
    ends = {
        n: made_up([{"confidence": 0.97}] * 9, seconds=s) for n, s in (("aogpt", 1), ("encoder", 4))
    }
    assert cells_of(cost_table(costs_of({"star": ends}))[-1]) == [
        "star", "confidence", "8.0", "97.0%", "97.0%", "4.0 +- 0.0", "4.0 +- 0.0",
    ]  # fmt: skip
    dearer = ends | {"encoder": made_up([{"confidence": 0.97}] * 9, seconds=6)}
    told = cost_told(costs_of({"star": ends, "copy": dearer}))
    assert "4.0 (star, confidence) to 6.0 times (copy, confidence) the seconds" in told
    assert "more than 5.0 times" in told
    text = page(load_tasks(), {"star": arms})
    assert "aogpt 1,234" in text and "## star:" in text and "Not run yet: sudoku6" in text
    assert "5.0M tokens. Tuned: aogpt muon_lr 0.02" in text
    assert "Any order wins: star. It ties: nowhere." in text
    # Two standard errors: of 200 answers, of which half are right or nearly all; of seeds.
    assert "and the plain GPT in less than half: star (97.0% +- 2.4% against 26.0% +- 6.2%" in text
    untuned = page(load_tasks(), {"star": {n: arm | {"tuned": {}} for n, arm in arms.items()}})
    assert "5.0M tokens. Commit" in untuned and "Tuned" not in untuned
    assert figure({"star": arms})[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "ours, gpt, word",
    [
        ([0.9, 0.9, 0.9], [0.5, 0.5, 0.5], "wins"),
        ([0.5, 0.5, 0.5], [0.9, 0.9, 0.9], "loses"),
        ([0.99, 0.99, 0.99], [0.985, 0.985, 0.985], "tie"),
        ([0.99, 0.99, 0.2], [0.3, 0.3, 0.3], "unresolved"),  # seeds that scatter are no tie
        ([0.6, 0.6, 0.6], [0.58, 0.58, 0.58], "unresolved"),  # nor is what 300 answers cannot tell
    ],
)
def test_what_any_order_is_worth_is_told_by_decoders_chosen_beforehand(ours, gpt, word):
    """Whatever AO-GPT may do from left to right."""
    arms = {
        "aogpt": made_up([{"l2r": 1.0, "confidence": share} for share in ours]),
        "gpt": made_up([{"l2r": share} for share in gpt]),
    }
    assert against_l2r(arms) == word


@pytest.mark.parametrize(
    "shares, limit, met",
    [
        ([0.47, 0.47], 0.5, True),  # 200 answers: three errors are 10.6%
        ([0.6, 0.62], 0.5, False),
        ([0.3, 0.6, 0.9], 0.9, False),  # that seeds scatter excuses nothing
        ([0.995, 0.995], 1.0, True),  # no model is exact
        ([0.97, 0.97], 1.0, False),
        ([0.0, 0.0], 0.02, True),  # none of 200: a chance of 1.8%
        ([0.0, 0.0], 0.04, False),  # of 0.03%
    ],
)
def test_a_limit_is_met_within_the_error_of_answers(shares, limit, met):
    arm = made_up([{"random": share} for share in shares])
    for run in arm["runs"]:
        run["decoders"]["random"]["limit"] = limit
    assert limit_cell(arm, "random") == f"{limit:.1%} ({'met' if met else 'not met'})"
    told = "\n".join(conclusions({"copy": {"aogpt": arm}}))
    assert f"met in {int(met)} of 1 ways" in told
    assert ("Not met: none" if met else "Not met: copy, aogpt, random") in told


def test_the_page_is_made_of_the_results_that_are_shipped():
    known = load_tasks()
    files = {name: RESULTS / f"{name}.json" for name in known}
    results = {n: json.loads(f.read_text())["arms"] for n, f in files.items() if f.exists()}
    if results:
        assert RESULTS.with_suffix(".md").read_text() == page(known, results)


def test_a_task_that_there_is_not_is_said(script):
    for words, says in (
        (["stars"], "there is no task 'stars'"),
        (["copy", "page"], "page is of all tasks that have results: give it alone"),
    ):
        status, _, err = script(command, *words)
        assert status == 2 and says in err
