"""Tokens a pass of exact speculation, over samples of a run.

    python -m studies.passes out/books --modes speculative:draft=16 --json FILE

A draft and its check are two passes. A pass counts for a sample as long as that is
unfinished, whatever the others of its batch do."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from aogpt.evaluation.text_measures import mean_and_error
from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.files import read_lines, write_json
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import Count, check_values, from_json
from studies.runs import run_well


@dataclass(frozen=True, kw_only=True)
class Arguments:
    model: Annotated[Path, tyro.conf.Positional]
    modes: tuple[str, ...] = ("speculative:draft=16", "speculative:order=l2r,draft=16")
    """Modes of sample.py."""
    samples: Count = 64
    length: Count = 64
    """Tokens of a sample; at most the run's block."""
    json: Path | None = None


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    check_values(a)
    rows = [measured(a, mode) for mode in a.modes]
    cells = []
    for row in rows:
        low = row["tokens_a_pass"] - 2 * row["standard_error"]
        high = row["tokens_a_pass"] + 2 * row["standard_error"]
        interval = f"{low:.2f} to {high:.2f}"
        cells.append([row["mode"], f"{row['tokens_a_pass']:.2f}", interval])
    show("\n".join(markdown_table(["mode", "tokens a pass", "2 errors"], cells)))
    if a.json:
        write_json(a.json, {"results": rows})


def measured(a: Arguments, mode: str) -> dict:
    """Return the mean over samples of the tokens that a pass predicts."""
    command = ["sample.py", str(a.model), "--mode", mode]
    command += ["--length", str(a.length), "--num-samples", str(a.samples)]
    values = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        run_well(*command, "--jsonl", str(file))
        for place, line in read_lines(file):
            sample = from_json(line, dict, place)
            values.append(len(sample["tokens"]) / sample["nfe"])
    mean, error = mean_and_error(values)
    return {
        "mode": mode,
        "tokens_a_pass": mean,
        "standard_error": error,
        "samples": a.samples,
        "length": a.length,
    }


if __name__ == "__main__":
    run_script(main)
