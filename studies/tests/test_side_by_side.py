"""Two checkouts side by side: what is compared, and how sure it is."""

import json

import pytest
from helpers import ROOT

from aogpt.runtime.errors import UserError
from studies import side_by_side
from studies.side_by_side import median_interval, ratio_of, table_of


def test_a_ratio_is_of_the_halves_of_pairs():
    """The machine is twice as slow in the second pair."""
    seconds = {"here": [3.0, 6.0, 3.3], "other": [2.0, 4.0, 2.0]}
    assert ratio_of(seconds) == 1.5


def test_the_interval_of_a_median_leaves_out_the_values_that_the_sign_test_allows():
    """2 P(at most k heads of n) <= 0.05: k + 1 values are left out at each end from
    n = 9 on."""
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    for count, interval in ((7, (0.0, 6.0)), (9, (1.0, 7.0)), (35, (11.0, 23.0))):
        values = [float(i) for i in range(count)]
        assert median_interval(values) == interval


def test_the_table_of_speed_is_of_its_rows():
    file = ROOT / "results" / "side_by_side_cpu.json"
    rows = json.loads(file.read_text())["rows"]
    page = (ROOT / "results" / "speed.details.md").read_text()
    for row, line in zip(rows, table_of(rows)[2:], strict=True):
        assert len(row["ratios"]) == 7
        assert min(row["ratios"]) == row["interval"][0]
        cells = [cell.strip() for cell in line.split("|")]
        benchmark = cells[1]
        ratio = cells[4]
        interval = cells[5]
        assert f"| {benchmark}" in page
        assert f"| {ratio} | {interval} |" in page


def test_another_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["side_by_side", str(tmp_path)])
    with pytest.raises(UserError, match="not a checkout"):
        side_by_side.main()


@pytest.mark.slow(reason="four processes decode and train")
def test_a_checkout_is_as_fast_as_itself(tmp_path, monkeypatch, capsys):
    turns = {}
    for benchmark, (turn, _) in side_by_side.TURNS.items():
        if benchmark in ("decoding, 256 steps", "decoding, 1,024 steps"):
            turn, _ = side_by_side.TURNS["decoding, 64 steps"]
        turns[benchmark] = (turn, 1)
    monkeypatch.setattr(side_by_side, "TURNS", turns)
    file = tmp_path / "rows.json"
    words = ["side_by_side", str(ROOT), "--repeats", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", words)
    side_by_side.main()
    report = json.loads(file.read_text())
    assert report["commits"]["here"] == report["commits"]["other"]
    assert {row["what"] for row in report["rows"]} == set(turns)
    for row in report["rows"]:
        assert 0.3 < row["ratio"] < 3
    assert "a training step" in capsys.readouterr().out
