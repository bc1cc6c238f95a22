"""Systems on tasks: tuned alike, decoded in every way that they can, and reported as they are."""

import dataclasses
import json

import pytest
from helpers import ALONE, prepared, tiny_config

import train
from data.puzzles import TASKS
from orders import OrderConfig
from studies import runner, tasks
from studies.answer_pages import RESULTS, against_l2r, figure, page, summary_table, task_table

KNOWN, DECODERS = tasks.load_tasks()


def test_systems_are_tuned_alike_and_differ_in_what_they_are_only():
    assert KNOWN.keys() == TASKS.keys()
    for name, experiment in KNOWN.items():
        systems = experiment.recipes["fast"].values()
        configs = [experiment.config("fast", one, 0, {}) for one in systems]
        assert len({json.dumps(one.tune) for one in systems}) == 1
        for config in configs:
            assert config.model.block_size == TASKS[name].length
            for table in ("data", "optim", "train", "eval"):
                assert getattr(config, table) == getattr(configs[0], table)
            for key in ("n_layer", "n_head", "n_embd", "position"):
                assert getattr(config.model, key) == getattr(configs[0].model, key)


@pytest.mark.parametrize("name", KNOWN)
def test_the_shipped_results_are_those_of_the_rows(name, monkeypatch, tmp_path):
    """Nothing is trained or decoded again."""
    monkeypatch.setattr(runner, "finished_run", None)
    monkeypatch.setattr(tasks, "decode", lambda *arguments: pytest.fail("it decodes"))
    monkeypatch.setattr(tasks, "prepare", lambda options: None)
    written = []
    monkeypatch.setattr(tasks, "write_json", lambda file, made: written.append(made))
    assert tasks.run(name, KNOWN[name], DECODERS, tasks.Arguments())
    shipped = json.loads((RESULTS / f"{name}.json").read_text())
    assert json.loads(json.dumps(written[0]["recipes"])) == shipped["recipes"]


def test_the_page_is_made_of_the_results_that_are_shipped():
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in KNOWN}
    entries = {name: values["recipes"]["fast"] for name, values in results.items()}
    assert RESULTS.with_suffix(".md").read_text() == page(KNOWN, entries)


@pytest.mark.parametrize("task, plain", [("shuffle", False), ("reversal", True)])
def test_a_run_decodes_in_every_way_that_it_can(task, plain, tmp_path):
    data = prepared(task, tmp_path / task, limit=400)
    config = tiny_config(data, tmp_path, steps=5, model__block_size=TASKS[task].length)
    if plain:
        model = dataclasses.replace(config.model, target="none")
        config = dataclasses.replace(config, model=model, order=OrderConfig("l2r"))
    assert train.train(config, ALONE) == 0
    possible = {n: tasks.decoding_options(of, task, config) for n, of in DECODERS.items()}
    decoded = {
        name: tasks.decode(config, options, 8) for name, options in possible.items() if options
    }
    if plain:
        assert decoded.keys() == {"l2r"} and decoded["l2r"]["nfe"] == 4
        return
    assert decoded.keys() == DECODERS.keys()
    assert decoded["random, 4 a step"]["nfe"] == decoded["l2r, 4 a step"]["nfe"] == 2
    assert decoded["even, 4 steps"]["limit"] == TASKS[task].limit([2, 2, 2, 2])
    assert decoded["random, 4 a step"]["limit"] == TASKS[task].limit([4, 4])
    assert decoded["speculative"]["limit"] == pytest.approx(1)
    assert decoded["threshold 0.9"]["limit"] is None


def made_up(shares):
    """The entry of a system: a share of right answers for each decoder and seed."""
    base = {"records": 100, "limit": None, "token_forwards": 10, "seconds": 1.0, "nfe": 8.0}
    entry = {"tuned": {"optim.muon_lr": 0.02}, "at_boundary": False, "parameters": 1234, "runs": []}
    for of_seed in shares:
        decoders = {name: base | {"exact_match": share} for name, share in of_seed.items()}
        entry["runs"].append({"commit": "abc", "tokens": [5_000_000], "decoders": decoders})
    return entry


def cells_of(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_tables_and_the_page_say_what_the_results_are():
    """Interval: Student's t of one degree of freedom, 12.706 times 0.02 / sqrt(2)."""
    entries = {
        "aogpt": made_up([{"l2r": 0.2, "confidence": 0.96}, {"l2r": 0.3, "confidence": 0.98}]),
        "encoder": made_up([{"confidence": 0.5, "fast": 0.5}] * 2),
        "gpt": made_up([{"l2r": 0.25}, {"l2r": 0.27}]),
    }
    row = next(s for s in task_table(entries) if s.startswith("| aogpt") and "confidence" in s)
    assert cells_of(row) == ["aogpt", "confidence", "97.0% ± 12.7%", "", "8.0", "10", "10.0"]
    head, _, row = summary_table({"star": entries})
    told = dict(zip(cells_of(head), cells_of(row), strict=True))
    assert told["aogpt, l2r"].startswith("25.0%") and told["aogpt, confidence"].startswith("97.0%")
    assert told["encoder, confidence"].startswith("50.0%") and told["any order"] == "wins"
    text = page(KNOWN, {"star": entries})
    assert "aogpt 1,234" in text and "## star:" in text and "Not run yet: sudoku6" in text
    assert "5.0M tokens. Tuned: aogpt muon_lr 0.02" in text
    untuned = {name: entry | {"tuned": {}} for name, entry in entries.items()}
    assert "5.0M tokens. Commit" in page(KNOWN, {"star": untuned})
    assert figure({"star": entries})[:4] == b"\x89PNG"


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
    entries = {
        "aogpt": made_up([{"l2r": 1.0, "confidence": share} for share in ours]),
        "gpt": made_up([{"l2r": share} for share in gpt]),
    }
    assert against_l2r(entries) == word


def test_a_task_that_there_is_not_is_said(script):
    status, _, err = script(tasks, "stars")
    assert status == 2 and "there is no task 'stars'; choose of star, sudoku6" in err
