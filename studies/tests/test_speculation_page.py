"""results/speculation.md is made of results/speculation.runs.jsonl."""

from helpers import ROOT

from studies import speculation
from studies.runs import rows_by


def test_the_page_is_what_the_rows_say():
    rows = rows_by("name", speculation.ROWS)
    page = (ROOT / "results" / "speculation.md").read_text()
    assert speculation.page(rows) == page
    drafted = rows["speculative, draft 16"]
    rate = drafted["tokens"] / drafted["samples"] / drafted["nfe"]
    text = page.replace("\n", " ")
    assert f"settles {rate:.1f} tokens a pass when it drafts 16" in text
