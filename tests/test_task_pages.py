"""Systems on tasks: tuned alike, decoded in every way that they can, and reported as they are."""

import json

import pytest

from studies import runner, tasks
from studies.answer_pages import (
    RESULTS,
    details,
    figure,
    page,
    summary_table,
    task_table,
)
from studies.pages import reported
from studies.puzzles import TASKS

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


def test_the_shipped_results_are_those_of_the_rows_and_the_page_is_made_of_them(
    monkeypatch,
):
    """Nothing is trained or decoded again."""
    monkeypatch.setattr(runner, "finished_run", None)
    monkeypatch.setattr(tasks, "decode", lambda *arguments: pytest.fail("it decodes"))
    monkeypatch.setattr(tasks, "prepare", lambda options, datasets: None)
    written = []
    entries = {}
    monkeypatch.setattr(tasks, "write_json", lambda file, made: written.append(made))
    for name in (name for name in KNOWN if (RESULTS / f"{name}.json").exists()):
        assert tasks.run(name, KNOWN[name], DECODERS, tasks.Arguments())
        shipped = json.loads((RESULTS / f"{name}.json").read_text())
        assert json.loads(json.dumps(written[-1]["recipes"])) == shipped["recipes"]
        entries[name] = reported(KNOWN[name], shipped)["fast"]
        seeds = [
            run["seed"] for entry in entries[name].values() for run in entry["runs"]
        ]
        assert not set(seeds) & set(KNOWN[name].tuning_seeds)
    assert (RESULTS / "README.md").read_text() == page(entries)
    assert (RESULTS / "tasks.details.md").read_text() == details(KNOWN, entries)


def made_up(shares):
    """The entry of a system: a share of right answers for each decoder and seed."""
    base = {
        "records": 100,
        "limit": None,
        "token_forwards": 10,
        "seconds": 1.0,
        "nfe": 8.0,
    }
    entry = {
        "tuned": {"optim.muon_lr": 0.02},
        "at_boundary": False,
        "parameters": 1234,
        "runs": [],
    }
    for of_seed in shares:
        decoders = {
            name: base | {"exact_match": share} for name, share in of_seed.items()
        }
        run = {
            "commit": "abc",
            "tokens": [5_000_000],
            "losses": {"random": [0.5]},
            "measured": {},
        }
        entry["runs"].append(run | {"decoders": decoders})
    return entry


def test_the_tables_and_the_pages_say_what_the_results_are():
    """Of few seeds the values; of four a mean: 3.18 (Student's t) times 0.0115 / sqrt(4)."""
    entries = {
        "aogpt": made_up(
            [{"l2r": 0.2, "confidence": 0.96}, {"l2r": 0.3, "confidence": 0.98}]
        ),
        "encoder": made_up([{"confidence": 0.49}, {"confidence": 0.51}] * 2),
        "gpt": made_up([{"l2r": 0.25}, {"l2r": 0.27}]),
        "two_stream": made_up([{"confidence": 1.0}, {"confidence": 0.036}]),
    }
    row = next(
        s for s in task_table(entries) if s.startswith("| aogpt") and "confidence" in s
    )
    expected = ["aogpt", "confidence", "96.0%, 98.0%", "", "8.0", "10", "10.0"]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == expected
    head, _, row = (
        [c.strip() for c in s.split("|")] for s in summary_table({"star": entries})
    )
    told = dict(zip(head, row, strict=True))
    assert told["GPT, left to right"] == "25.0%, 27.0%"
    assert told["AO-GPT, most confident first"] == "96.0%, 98.0%"
    assert told["two streams, most confident first"] == "100.0%, 3.6%"
    assert told["encoder, most confident first"] == "50.0% ± 1.8%"
    assert "| star |" in page({"star": entries})
    text = details(KNOWN, {"star": entries})
    assert (
        "aogpt 1,234" in text and "## star:" in text and "Not run yet: sudoku6" in text
    )
    assert (
        "- aogpt: any-order loss 0.5000, 0.5000; muon_lr 0.02" in text
        and "5.0M tokens" in text
    )
    assert figure({"star": entries})[:4] == b"\x89PNG"
