"""The tour runs, and shows what its text says. After a change, write its outputs again:

PYTHONPATH=. .venv/bin/python tests/test_tour.py
"""

import copy
import re
import subprocess
import sys

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "docs" / "tour.ipynb"
CELLS = 12


def executed(notebook):
    """Return the notebook with the outputs of a fresh kernel that starts in its
    folder."""
    notebook = copy.deepcopy(notebook)
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        timeout=300,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    # without the kernel's version
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """What each code cell printed."""
    return [
        "".join(o.get("text", "") for o in cell.outputs)
        for cell in code_cells(notebook)
    ]


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def fresh(committed, tmp_path_factory):
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(home / name.lower()))
        return executed(committed)  # raises for a cell that fails


def test_the_committed_notebook_is_whole_and_names_no_machine(committed):
    nbformat.validate(committed)
    cells = code_cells(committed)
    assert [cell.execution_count for cell in cells] == list(range(1, CELLS + 1))
    assert [cell.cell_type for cell in committed.cells] == ["markdown", "code"] * CELLS
    shown = "\n".join([cell.source for cell in committed.cells] + printed(committed))
    assert not re.search(
        r"(^|[^\w.])/(home|root|tmp|work|usr|opt|Users|content)/|[A-Z]:\\", shown
    )
    pictures = []
    for number, cell in enumerate(cells, start=1):
        for output in cell.outputs:
            if "data" in output:
                assert output.output_type == "display_data"
                pictures.append(number)
            else:  # no warnings, no errors
                assert output.name == "stdout"
    assert pictures == [4, 8]


EXECUTES = pytest.mark.slow(reason="executes the notebook, twenty seconds")


@EXECUTES
def test_the_committed_outputs_are_those_of_this_code(committed, fresh):
    """Except for the numbers, which depend a little on the machine."""
    for ours, theirs in zip(printed(fresh), printed(committed), strict=True):
        ours = re.sub(r"[\d.,]+|\s+", " ", ours).split()
        theirs = re.sub(r"[\d.,]+|\s+", " ", theirs).split()
        assert ours == theirs


@EXECUTES
def test_every_step_shows_what_it_says(fresh):
    texts = printed(fresh)
    # 5 and 6: an infill keeps both sides; the steps fill in each position of the gap
    # once.
    for line in texts[4].splitlines():
        assert line.startswith("- She opened the door,")
        assert line.endswith(" and he took off his hat.")
    filled = []
    for line in texts[5].splitlines()[1:]:
        filled += re.match(r" *\d+  ([\d ]*?)  ", line)[1].split()
    assert sorted(map(int, filled)) == list(range(5, 17))
    # 9: the loss rises as the steps fall.
    losses = [float(nats) for nats in re.findall(r"([\d.]+) nats/token", texts[8])]
    assert len(losses) == 5
    assert losses == sorted(losses)
    # 10: any order is the harder task.
    l2r, random = re.findall(r"perplexity ([\d.]+), 95% interval", texts[9])
    assert float(l2r) < float(random)
    assert "same tokens: True" in texts[10]


def test_the_first_cell_changes_nothing_outside_a_clone(committed, tmp_path):
    source = code_cells(committed)[0].source

    def run(folder):
        command = [sys.executable, "-B", "-c", source]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    for folder in (ROOT, NOTEBOOK.parent):
        assert run(folder).stdout.startswith("ready")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "AssertionError: set REPOSITORY" in done.stderr
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    nbformat.write(executed(nbformat.read(NOTEBOOK, as_version=4)), NOTEBOOK)
