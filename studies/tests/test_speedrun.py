"""Benchmarks: run configs are tuned alike, trained over seeds and resumed, and
shown."""

import functools
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import tomli_w
from helpers import change, run_main, tiny_config

from aogpt.runtime.validation import FileError
from aogpt.training import config as configuration
from studies import runs, speedrun
from studies.pages import mean_tokens_to, tokens_to
from studies.runner import Results
from studies.speedrun import load_benchmark

BENCHMARKS = sorted(path.stem for path in speedrun.CONFIGS.glob("*.toml"))
# How many times the tokens of the run config whose name has no such ending.
SHARES = {
    "-x4": 4,
    "-x5": 5,
    "-x10": 10,
    "-half": 0.5,
    "-461k": 9 / 8,
    "-512k": 5 / 4,
    "-614k": 3 / 2,
    "-683k": 5 / 3,
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_run_configs_of_a_shipped_benchmark_keep_to_it_and_to_their_tokens(name):
    benchmark = load_benchmark(name)
    tokens = {}
    for one in benchmark.recipes[""].values():
        first = benchmark.config("", one, 0, {})
        other = benchmark.config("", one, 1, {})
        assert configuration.differences(first, other).keys() == {"name", "seed"}
        assert first.data.folder == benchmark.base["data"]["folder"]
        assert first.model.block_size == benchmark.base["model"]["block_size"]
        assert one.description
        assert all(len(values) >= 3 for values in one.tune.values())
        assert first.train.steps % first.eval.interval == 0
        of_step = first.train.batch_size * first.model.block_size
        tokens[one.name] = first.train.steps * of_step
    base = "tenth" if "tenth" in tokens else "fast-values"
    for one, count in tokens.items():
        times = 1
        for ending, share in SHARES.items():
            if one.endswith(ending):
                times = share
        if one.startswith("paper") and "tenth" in tokens:
            times = 10 * times
        assert count == pytest.approx(times * tokens[base], rel=1e-3), one


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "gpu"])
def test_the_shipped_page_has_losses_of_the_leaderboard(name):
    """It is made of the rows: nothing is trained."""
    benchmark = load_benchmark(name)
    entries = speedrun.load_entries(benchmark)
    page = (speedrun.RESULTS / "README.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`"))
    losses = re.findall(r"[\d.]+, [\d.]+, [\d.]+", line)
    leaderboard = "\n".join(speedrun.table(benchmark))
    assert len(losses) == 2
    assert all(f" {of_seeds} " in leaderboard for of_seeds in losses)
    rows = Results(speedrun.file_of(benchmark, ".runs.jsonl")).rows.values()
    names = {Path(row["run"]).name.split("_")[0] for row in rows}
    assert entries.keys() == names
    retired = speedrun.read_retired(name)
    assert len(retired) == (7 if name == "bytes64" else 0)
    assert all(len(entries[one]["runs"]) == 3 for one in retired)


def made_up(losses, tokens=100, tuned=2):
    runs = []
    for seed, loss in enumerate(losses):
        row = {
            "seed": seed,
            "losses": {"training": [loss], "random": [loss]},
            "tokens": [tokens],
            "measured": {},
            "tokens_per_second": 10,
            "commit": "c",
        }
        runs.append(row)
    return {
        "tuned": {"optim.lr": tuned},
        "at_boundary": False,
        "description": "",
        "runs": runs,
    }


def test_what_one_change_gives_is_told_seed_by_seed():
    rows = {
        "fast": made_up([2.0, 2.1, 2.2]),
        "fast-x4": made_up([1.0, 1.1, 1.2], tokens=400),
        "fast-a": made_up([1.9, 2.1, 2.05]),
        "fast-b": made_up([2.1]),
    }
    lines = [line.split("|")[1:-2] for line in speedrun.ingredients(rows)[3:]]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["fast-a", "-0.100, +0.000, -0.150"],
        ["fast-b", "+0.100"],
    ]
    assert speedrun.ingredients({"paper": rows["fast"]}) == []


@pytest.fixture
def benchmark(data, tmp_path, monkeypatch):
    """Return a benchmark of seconds: a baseline that learns nothing, and two run
    configs."""
    base = change(
        tiny_config(data, tmp_path, steps=20), optim__lr=0.0, eval__interval=10
    )
    moving = {
        "from": "still",
        "description": "Adam",
        "tune": {"optim.lr": [1e-4, 1e-2]},
    }
    faster = {"from": "moving", "description": "Muon", "optim.kind": "muon"}
    values = {
        "goal": 5.0,
        "base": tomllib.loads(configuration.to_toml(base)),
        # As in the shipped benchmarks the seed that tunes is also reported.
        "tuning_seeds": [0],
        "run_configs": {
            "still": {"description": "zero"},
            "moving": moving,
            "faster": faster,
        },
    }
    monkeypatch.setattr(speedrun, "CONFIGS", tmp_path)
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(speedrun, "OUT", tmp_path / "runs")
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(values))
    return load_benchmark("tiny")


run = functools.partial(run_main, speedrun)


def row_of(table, name):
    """Return the cells of the line of a run config, in a table that was printed."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    ]
    (row,) = [row for row in rows if row[:1] == [name]]
    return row


@pytest.mark.slow(reason="tunes and trains")
def test_run_configs_are_tuned_and_trained(benchmark, tmp_path, monkeypatch, capsys):
    assert "Not run yet: still, moving, faster" in run(monkeypatch, capsys, "tiny")
    run(monkeypatch, capsys, "tiny", "still", "--seeds", 1, "--processes", 2)
    chosen = ["tiny", "still", "faster", "--seeds", 2, "--jobs", 2]
    out = run(monkeypatch, capsys, *chosen)
    entries = speedrun.load_entries(benchmark)
    still = entries["still"]
    faster = entries["faster"]
    assert [row["seed"] for row in faster["runs"]] == [0, 1]
    assert [t["tuned"] for t in faster["tuning"]] == [
        {"optim.lr": 1e-4},
        {"optim.lr": 1e-2},
    ]
    assert faster["tuned"] == {"optim.lr": 1e-2}
    assert still["tuning"] == []
    losses = [max(speedrun.losses_of(entry).values()) for entry in (faster, still)]
    assert losses[0] < losses[1] - 0.1
    assert mean_tokens_to(benchmark.goal, still["runs"], "random") is None
    config = benchmark.config("", benchmark.recipes[""]["still"], 1, {})
    assert still["runs"][1]["commit"] == runs.trained_by(config) != "unknown"
    # again: nothing is trained and nothing changes
    monkeypatch.setattr(runs, "run_alone", None)
    _, head, rows = out.partition("| run config")
    assert run(monkeypatch, capsys, *chosen) == head + rows
    # A run config that is retired keeps its line.
    lines = (tmp_path / "tiny.toml").read_text().partition("[run_configs.faster]")[0]
    lines += """
[retired.faster]
description = "Muon"
tuned = { "optim.lr" = 1e-2 }
at_boundary = true
runs = "lr0.01"
"""
    (tmp_path / "tiny.toml").write_text(lines)
    left = run(monkeypatch, capsys, "tiny")
    assert row_of(left, "faster") == row_of(out, "faster")
    assert "Not run yet: moving" in left
    losses = (row["losses"]["random"][-1] for row in faster["runs"])
    assert row_of(left, "faster")[1] == ", ".join(f"{loss:.3f}" for loss in losses)


def test_time_is_measured_in_turn_and_told(benchmark, tmp_path, monkeypatch, capsys):
    """100 tokens at 10, 20 and 25 a second take 10, 5 and 4 seconds; 300 at 60, 60 and
    25 more."""
    moving = made_up([2.0, 2.2], tuned=1e-4)
    for row in moving["runs"]:  # the goal, 5, is passed at 60 of 300 tokens
        row["tokens"] = [60, 300]
        row["losses"] = {"training": [5.0, 2.0], "random": [5.0, 2.0]}
    still = made_up([6.0, 6.2], tuned=1e-4)
    entries = {"still": still, "moving": moving}
    monkeypatch.setattr(speedrun, "load_entries", lambda benchmark: entries)
    speeds = iter((10, 60, 20, 60, 25, 25))
    asked = []

    def pretended(config, processes):
        asked.append((config.name.split("_")[0], config.optim.lr))
        return next(speeds)

    with monkeypatch.context() as patched:
        patched.setattr(speedrun, "speed_of_short_run", pretended)
        run(monkeypatch, capsys, "tiny", "still", "moving", "--repetitions", 3)
    assert asked == [("still", 1e-4), ("moving", 1e-4)] * 3
    saved_speeds = json.loads((tmp_path / "results" / "tiny.speeds.json").read_text())
    assert saved_speeds["tokens_per_second"] == {
        "still": [10, 20, 25],
        "moving": [60, 60, 25],
    }
    rows = [line.split("|") for line in speedrun.time_table(benchmark)[2:]]
    still, moving = ([cell.strip() for cell in row] for row in rows)
    assert still[3:7] == ["0.02 (0.01 - 0.025)", "5", "1 (1 - 1)", "-"]
    assert moving[4:7] == ["5", "1 (0.5 - 3)", "0.2 (0.1 - 0.6)"]


def test_a_run_that_ends_or_diverges_is_a_result_and_no_other(
    benchmark, monkeypatch, run_here
):
    config = benchmark.config("", benchmark.recipes[""]["still"], 0, {})
    with monkeypatch.context() as patch:
        for said, status, message in (
            ("the loss is not finite", 1, None),
            ("no space left", 1, "no space left"),
            ("", -9, "status -9"),
            ("", 0, "stopped before its last step"),  # by a signal
        ):
            done = subprocess.CompletedProcess([], status, stderr=said)
            patch.setattr(runs, "run_alone", lambda *words, done=done, **options: done)
            if message is None:
                assert runs.finished_run(config) is None
                continue
            with pytest.raises(ValueError, match=message):
                runs.finished_run(config)
    monkeypatch.setattr(runs, "commit", lambda: "two")
    monkeypatch.setattr(runs, "run_alone", run_here)
    assert runs.finished_run(config)
    assert runs.trained_by(config) == "two"
    monkeypatch.setattr(speedrun, "TIMED_TOKENS", 1)
    monkeypatch.setattr(speedrun, "TIMED_STEPS", 10)
    config = change(config, name="timed")
    assert speedrun.speed_of_short_run(config, 1) > 0
    assert not config.run_folder.exists()


def test_a_benchmark_is_laid_over_the_one_that_it_is_from(benchmark, tmp_path):
    (tmp_path / "smaller.toml").write_text(
        'from = "tiny"\ngoal = 4.0\nlength = 0.5\n[base.optim]\nwarmup_steps = 3\n'
        '[run_configs.moving]\nfrom = "still"\n"optim.lr" = 1e-3\n'
        '[run_configs.last]\nfrom = "faster"\n'
    )
    smaller = load_benchmark("smaller")
    names = [*smaller.recipes[""]]
    assert smaller.goal == 4.0
    assert names == ["still", "moving", "faster", "last"]
    configs = {
        name: smaller.config("", one, 0, {})
        for name, one in smaller.recipes[""].items()
    }
    assert configs["last"].optim.kind == "muon"
    assert configs["moving"].optim.lr == 1e-3
    before = benchmark.config("", benchmark.recipes[""]["still"], 0, {})
    changed = configuration.differences(before, configs["still"])
    assert changed.keys() == {
        "out",
        "optim.warmup_steps",
        "train.steps",
        "eval.interval",
    }
    assert configs["still"].train.steps == 10


def test_what_is_wrong_is_named(benchmark, tmp_path, monkeypatch, capsys):
    for words, message in (
        (["tinny"], "there is no benchmark 'tinny'; choose one of tiny"),
        (
            ["tiny", "fatser"],
            "no run config is 'fatser'; tiny has still, moving, faster",
        ),
        (["tiny", "still", "--repetitions", 1], "still has no results: run it first"),
    ):
        with pytest.raises(ValueError, match=message):
            run(monkeypatch, capsys, *words)
    for text, message in (
        ("goal = 4.0", "tiny.toml is damaged: KeyError: 'run_configs'"),
        (
            "goal = 4.0\n[base]\n[run_configs.a]\ntune = 3",
            "a.tune is 3, but it must be a",
        ),
    ):
        (tmp_path / "tiny.toml").write_text(text)
        with pytest.raises(FileError, match=message):
            load_benchmark("tiny")


def test_the_goal_is_reached_between_two_evaluations():
    row = {"tokens": [100, 200], "losses": {"random": [3.0, 2.0]}}
    assert tokens_to(3.5, row, "random") == 100
    assert tokens_to(2.25, row, "random") == 175
    assert tokens_to(1.0, row, "random") is None
    # of a plain GPT the any-order loss is not known
    assert tokens_to(2.25, row, "l2r") is None
