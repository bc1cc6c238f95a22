"""Triton's kernels, assembled for two GPUs that need not be here."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, read_lines

pytest.importorskip("triton")


def test_the_table_of_registers_is_of_its_rows_and_none_spills():
    from studies.assemble import table

    folder = ROOT / "results" / "gpu"
    rows = read_lines(folder / "kernels.jsonl")
    assert {row["gpu"] for row in rows} == {"sm_90", "sm_80"}
    assert len(rows) == 2 * 11
    assert all(row["spilled_bytes"] == 0 for row in rows)
    assert "\n".join(table(rows)) in (folder / "kernels.md").read_text()


@pytest.mark.slow(reason="assembles eleven kernels")
@pytest.mark.parametrize("gpu", [90, 80])
def test_kernels_assemble_without_spilled_registers(gpu, tmp_path):
    """90: an H100, 80: an A100."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "studies.assemble", "--gpu", str(gpu)],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 11
    for row in rows:
        assert row["bytes"] > 1000
        assert row["registers"] <= 255
        assert row["spilled_bytes"] == 0, row
