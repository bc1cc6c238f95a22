"""A few cases of make fuzz."""

import pytest
from helpers import run_script


@pytest.mark.slow(reason="a small campaign takes a minute")
def test_no_case_of_a_small_campaign_is_bad():
    done = run_script(
        "-m", "studies.fuzz", "--cases", 4, "--seeds", 11, PYTHONPATH="tests"
    )
    assert "bad: none" in done.stdout
    assert "4 cases" in done.stdout
