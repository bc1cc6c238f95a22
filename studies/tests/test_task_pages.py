"""Systems on tasks: tuned alike, decoded in every way that they can, and reported as
they are."""

import json
import re
import statistics
from pathlib import Path

import audit_findings
import pytest
from helpers import ROOT, run_main

from aogpt.runtime.errors import UserError
from studies import pages, tasks
from studies.answer_pages import (
    RESULTS,
    details,
    figure,
    mean_of,
    page,
    summary_table,
    task_table,
    values_of,
)
from studies.measures import mean_and_half_width
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


def test_the_shipped_page_is_made_of_the_rows():
    """Nothing is trained or decoded again."""
    results = tasks.load_results(KNOWN, DECODERS)
    assert results.keys() == KNOWN.keys()
    for name, entries in results.items():
        for entry in entries.values():
            seeds = [run["seed"] for run in entry["runs"]]
            assert not set(seeds) & set(KNOWN[name].tuning_seeds)
    assert (RESULTS / "README.md").read_text() == page(results)
    assert f"## {name}: " in details(KNOWN, results)


def test_a_task_without_all_rows_has_no_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "RESULTS", tmp_path)
    chosen = {"mirror": KNOWN["mirror"]}
    lines = (RESULTS / "mirror.runs.jsonl").read_text().splitlines(keepends=True)
    half = lines[: len(lines) // 2]
    for written, expected in ((lines, ["mirror"]), (half, [])):
        (tmp_path / "mirror.runs.jsonl").write_text("".join(written))
        assert list(tasks.load_results(chosen, DECODERS)) == expected
    said = run_main(tasks, monkeypatch, capsys, "details", "mirror")
    assert "Not run yet: mirror." in said
    with pytest.raises(UserError, match="there is no task 'mirrors'"):
        run_main(tasks, monkeypatch, capsys, "details", "mirrors")


def test_a_system_of_one_task_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RESULTS", tmp_path)
    chosen = {"colouring": KNOWN["colouring"]}
    lines = (RESULTS / "colouring.runs.jsonl").read_text().splitlines(keepends=True)
    remaining = [line for line in lines if "adaln_rotary" not in line]
    file = tmp_path / "colouring.runs.jsonl"
    file.write_text("".join(remaining))
    systems = tasks.load_results(chosen, DECODERS)["colouring"]
    assert "adaln_rotary" not in systems
    file.write_text("".join(lines))
    complete = tasks.load_results(chosen, DECODERS)["colouring"]
    assert complete.keys() - systems.keys() == {"adaln_rotary"}
    decoded = [n for n, line in enumerate(lines) if "exact_match" in line]
    file.write_text("".join(lines[: decoded[-1]] + lines[decoded[-1] + 1 :]))
    assert not tasks.load_results(chosen, DECODERS)


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
        "tuned_as": "",
        "tuning": [{"tuned": {"optim.muon_lr": 0.02}, "loss": 0.5}],
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
    """Of few seeds the values; of four a mean: 3.18 (Student's t) times 0.0115 /
    sqrt(4)."""
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
    head, _, row = summary_table({"star": entries})
    head = [cell.strip() for cell in head.split("|")]
    row = [cell.strip() for cell in row.split("|")]
    cells = dict(zip(head, row, strict=True))
    assert cells["GPT, left to right"] == "25.0%, 27.0%"
    assert cells["AO-GPT, most confident first"] == "96.0%, 98.0%"
    assert cells["two streams, most confident first"] == "100.0%, 3.6%"
    assert cells["encoder, most confident first"] == "50.0% ± 1.8%"
    assert "| star |" in page({"star": entries})
    text = details(KNOWN, {"star": entries})
    for words in ("aogpt 1,234", "## star:", "Not run yet: sudoku6"):
        assert words in text
    assert "- aogpt: any-order loss 0.5000, 0.5000; muon_lr 0.02" in text
    assert "5.0M tokens" in text
    assert figure({"star": entries})[:4] == b"\x89PNG"


def cells_of(path: Path, title: str) -> list[str]:
    """Return the cells of a table's row after its title, which has these words."""
    for line in path.read_text().splitlines():
        cells = line.split("|")[1:-1]
        if cells and title in cells[0]:
            return cells[1:]
    raise AssertionError(f"{path} has no row {title!r}")


def numbers_in(cell: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", cell)


@pytest.mark.parametrize(
    ("title", "task"),
    [
        ("6x6 Sudoku", "sudoku6"),
        ("asked backwards", "reversal"),
        ("colouring", "colouring"),
    ],
)
def test_the_table_of_the_audit_has_the_numbers_of_the_page_of_tasks(title, task):
    shown = cells_of(ROOT / "results" / "audit.md", title)
    gpt, aogpt, _, encoder = cells_of(ROOT / "results" / "tasks" / "README.md", task)
    for cell, source in zip(shown, (gpt, aogpt, encoder), strict=True):
        values = numbers_in(cell)
        exact = numbers_in(source)
        assert len(values) == len(exact) == 3
        for value, number in zip(values, exact, strict=True):
            unit = 10.0 ** -len(value.partition(".")[2])
            assert abs(float(value) - float(number)) <= unit / 2 + 1e-9


@pytest.mark.parametrize(
    "experiment, recipe, row, names",
    [
        ("E21", "chorales", "loss on [chorales]", ["adaln_rotary", "adaln", "rotary"]),
        ("E22", "fast", "bytes of books", ["rotary", "adaln_rotary", "adaln"]),
    ],
)
def test_the_table_of_the_audit_has_the_numbers_of_the_runs(
    experiment, recipe, row, names
):
    _, aogpt, encoder = cells_of(ROOT / "results" / "audit.md", row)
    shown = [*numbers_in(aogpt), *numbers_in(encoder)]
    names = ["mask_query", "mask_query_half", *names, "encoder"]
    for name, value in zip(names, shown, strict=True):
        losses = audited_figures(experiment, recipe, name, "eval_random")
        assert value == f"{statistics.mean(losses):.3f}"


def audited_figures(
    experiment: str, recipe: str, run_config: str, kind: str
) -> list[float]:
    """Return the figures of the reported runs, read without the project's code."""
    runs = audit_findings.read(experiment).runs_of(recipe, run_config)
    return [audit_findings.figure(run, kind) for run in runs]


def test_the_numbers_below_the_table_of_the_audit_are_those_of_the_runs():
    text = " ".join((ROOT / "results" / "audit.md").read_text().split())

    def mean(experiment, recipe, run_config, kind="eval_random"):
        return statistics.mean(audited_figures(experiment, recipe, run_config, kind))

    def shares(run_config):
        return audited_figures("E21", "sudoku", run_config, "exact_sudoku6")

    assert f"Two streams have {mean('E21', 'chorales', 'two_stream'):.3f}." in text
    assert f"Two streams have {mean('E22', 'fast', 'two_stream'):.3f}." in text
    sides = [mean("E15", "books", name) for name in ("encoder_2M", "encoder_ce_2M")]
    assert f"loss took {sides[0] - sides[1]:.3f} ± " in text
    assert f"at most {250 * max(shares('adaln')):.0f} of 250" in text.replace(
        "at most one of", "at most 1 of"
    )
    seeds = [f"{100 * share:.1f}" for share in shares("adaln_rotary")]
    listed = "98, 99, 91, 99.6, 98, 22, 85 and 98%"
    assert listed in text
    for value, shown in zip(seeds, numbers_in(listed), strict=True):
        assert value == shown or f"{float(value):.0f}" == shown
    of_full = shares("adaln_full")
    lowest, highest = min(of_full), max(of_full)
    words = f"with twice the parameters, {100 * lowest:.0f} to {100 * highest:.1f}%"
    assert words in text
    of_rotation = shares("rotary")
    lowest, highest = min(of_rotation), max(of_rotation)
    assert f"rotation alone solves {100 * lowest:.0f} to {100 * highest:.0f}%" in text
    best = [*shares("two_stream"), *shares("mask_query"), *shares("encoder")]
    assert f"encoder {100 * min(best):.0f} to {100 * max(best):.0f}%" in text
    for run_config, words in (
        ("adaln", "alone it answers {:.0f}%"),
        ("adaln_rotary", "beside rotation {:.0f}%"),
        ("rotary", "rotation alone {:.0f}%"),
        ("two_stream", "two streams {:.0f}%"),
        ("mask_query", "a [MASK] query {:.0f}%"),
        ("encoder", "an encoder {:.0f}%"),
    ):
        share = mean("E28", "reversal", run_config, "exact_reversal")
        assert words.format(100 * share) in text
    assert runs_that_find_the_path("masked_ce") == 0
    assert "with the unweighted loss none of 20 runs finds it" in text


def test_the_pages_say_how_adaln_does_on_colouring():
    entries = tasks.load_results({"colouring": KNOWN["colouring"]}, DECODERS)
    entry = entries["colouring"]["adaln_rotary"]
    shares = values_of(entry, "confidence", "exact_match")
    words = ", ".join(f"{100 * share:.0f}" for share in shares)
    for page_file in (ROOT / "results" / "audit.md", RESULTS / "README.md"):
        text = " ".join(page_file.read_text().split())
        assert f"adaLN beside rotation {words}%" in text


def runs_that_find_the_path(run_config: str) -> int:
    answers = audited_figures("E26", "star", run_config, "exact_star")
    assert len(answers) == 20
    return sum(answer >= 0.9 for answer in answers)


def test_the_table_of_the_audit_has_the_numbers_of_runs_that_find_the_path():
    cells = cells_of(ROOT / "results" / "audit.md", "star graph")
    gpt, aogpt, encoder = [cell.strip() for cell in cells]
    assert gpt == str(runs_that_find_the_path("gpt"))
    assert encoder == str(runs_that_find_the_path("encoder"))
    names = {
        "rotation": "rotary",
        "[MASK] query": "mask_query",
        "adaLN + rotation": "adaln_rotary",
        "adaLN": "adaln",
    }
    shown = dict(part.rsplit(" ", 1) for part in aogpt.replace("*", "").split(", "))
    assert shown.keys() == names.keys()
    for title, run_config in names.items():
        assert shown[title] == str(runs_that_find_the_path(run_config))


@pytest.mark.parametrize(
    ("title", "task"), [("6x6 Sudoku", "sudoku6"), ("colouring", "colouring")]
)
def test_the_shares_of_the_table_of_the_audit_are_among_those_of_the_rows(title, task):
    """Rows say which run was decoded, their keys hide how: so each share that is shown
    has to be one of its run, in the order of seeds 1 to 3."""
    by_run = {}
    for line in (RESULTS / f"{task}.runs.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "exact_match" in row["result"]:
            by_run.setdefault(row["run"].split("/")[-1], []).append(
                row["result"]["exact_match"]
            )
    cells = cells_of(ROOT / "results" / "audit.md", title)
    for system, cell in zip(("gpt", "aogpt", "encoder"), cells, strict=True):
        for seed, shown in enumerate(numbers_in(cell)[:3], start=1):
            unit = 10.0 ** -len(shown.partition(".")[2])
            distances = []
            for run, values in by_run.items():
                if run.startswith(f"{system}_") and run.endswith(f"_s{seed}"):
                    distances += [abs(100 * v - float(shown)) for v in values]
            assert min(distances) <= unit / 2 + 1e-9


@pytest.mark.parametrize(
    "experiment, recipe, place, sentence",
    [
        (
            "E20",
            "fast",
            0,
            "gap is {:.3f} ± ... at the first evaluation and {:.3f} ± ... at the end",
        ),
        (
            "E23",
            "sinusoidal",
            1,
            "largest at the second evaluation, {:.3f} ± ..., and falls to {:.3f} ± ...",
        ),
    ],
)
def test_the_audit_has_the_gaps_between_all_orders_and_left_to_right(
    experiment, recipe, place, sentence
):
    """Means over seeds on validation text, each along its training orders."""
    entries = pages.load_results(experiment)[1][recipe]
    means = {}
    for name in ("random", "l2r"):
        curves = [row["losses"]["training"] for row in entries[name]["runs"]]
        means[name] = [statistics.mean(losses) for losses in zip(*curves, strict=True)]
    pairs = zip(means["random"], means["l2r"], strict=True)
    gaps = [all_orders - left_to_right for all_orders, left_to_right in pairs]
    text = (ROOT / "results" / "audit.md").read_text()
    pattern = re.escape(sentence.format(gaps[place], gaps[-1]))
    assert re.search(pattern.replace(r"\.\.\.", r"0\.\d{3}"), text)
    if experiment == "E23":
        assert max(gaps) == gaps[place]


def test_the_audit_has_the_times_of_decoding_sudokus():
    """One token a pass in random order, beside rotation."""
    entries = tasks.load_results({"sudoku6": KNOWN["sudoku6"]}, DECODERS)["sudoku6"]
    rotation = mean_of(entries["aogpt"], "random", "seconds")
    lines = (ROOT / "results" / "audit.md").read_text().splitlines()
    (two_streams,) = [line for line in lines if "| `two_stream` |" in line]
    (encoder,) = [line for line in lines if "`--model.attention full` |" in line]
    for line, system in ((two_streams, "two_stream"), (encoder, "encoder")):
        ratio = mean_of(entries[system], "random", "seconds") / rotation
        assert f"{ratio:.2g} times rotation's" in line


def test_the_page_of_tasks_says_how_much_the_best_order_can_hurt():
    """In points, with the interval over seeds; of two seeds that of the records."""
    entries = tasks.load_results(
        {name: KNOWN[name] for name in ("colouring", "shuffle")}, DECODERS
    )
    text = " ".join((RESULTS / "README.md").read_text().split())
    chosen = values_of(entries["colouring"]["aogpt"], "confidence", "exact_match")
    in_order = values_of(entries["colouring"]["aogpt"], "l2r", "exact_match")
    losses = [100 * (b - a) for a, b in zip(chosen, in_order, strict=True)]
    mean, half_width = mean_and_half_width(losses)
    assert f"on colouring, {mean:.2f} ± {half_width:.2f} points" in text
    entry = entries["shuffle"]["two_stream"]
    chosen = mean_of(entry, "confidence", "exact_match")
    other = mean_of(entry, "l2r", "exact_match")
    records = sum(values_of(entry, "l2r", "records"))
    variance = (chosen * (1 - chosen) + other * (1 - other)) / records
    loss = f"{100 * (other - chosen):.2f} ± {196 * variance**0.5:.2f}"
    assert f"two streams on shuffle, {loss} (two seeds" in text


def test_the_table_of_the_audit_has_the_losses_of_the_page_of_books():
    text = (ROOT / "results" / "books.md").read_text()
    losses = [f"{float(number):.3f}" for number in re.findall(r"\d\.\d{4}\b", text)]
    for cell in cells_of(ROOT / "results" / "audit.md", "loss on [books]"):
        assert set(numbers_in(cell)) <= set(losses)
