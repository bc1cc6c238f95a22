"""results/pretrained.md is made of results/pretrained.json."""

import json

from helpers import ROOT

from studies import pretrained_page

ROWS = ROOT / "results" / "pretrained.json"


def test_the_page_is_what_the_rows_say():
    rows = json.loads(ROWS.read_text())
    page = (ROOT / "results" / "pretrained.md").read_text()
    assert pretrained_page.page(rows) == page


def test_a_report_that_is_missing_is_named_as_not_run():
    rows = json.loads(ROWS.read_text())
    known = {name: rows[name] for name in ("starts", "long", "ppl_books")}
    page = pretrained_page.page(known)
    _, missing = page.split("## Not run")
    assert "the ten sentences with the adapter" in missing
    assert "## Ten fixed sentences" not in page
