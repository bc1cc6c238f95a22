"""results/speculation.md is made of results/speculation.runs.jsonl."""

from helpers import ROOT, prepared

from studies import runs, speculation
from studies.runs import rows_by


def test_the_page_is_what_the_rows_say():
    rows = rows_by("name", speculation.ROWS)
    page = (ROOT / "results" / "speculation.md").read_text()
    assert speculation.page(rows) == page
    drafted = rows["speculative, draft 16"]
    rate = drafted["tokens"] / drafted["samples"] / drafted["nfe"]
    text = page.replace("\n", " ")
    assert f"settles {rate:.1f} tokens a pass when it drafts 16" in text
    assert speculation.figure(rows).startswith(b"\x89PNG")


def test_a_row_has_the_scores_and_the_divergence_of_its_samples(
    tmp_path, monkeypatch, run_here
):
    source = tmp_path / "text.txt"
    source.write_text("The old horse was tired. " * 800)
    folder = prepared(
        "text", tmp_path / "text", source, tokenizer="english", split="test"
    )
    monkeypatch.setattr(speculation, "REFERENCE", str(folder))
    monkeypatch.setattr(runs, "run_alone", run_here)
    row = speculation.measured("left to right", "l2r", samples=2, length=8)
    assert row["tokens"] == 16
    assert row["nfe"] == 8
    assert row["perplexity"] > 1
    assert 0 < row["js_2_text"] < row["js_2"] < 0.694
