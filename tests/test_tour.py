"""The tour runs, and shows what its text says. To write its outputs again, after a change:

PYTHONPATH=. .venv/bin/python tests/test_tour.py
"""

import asyncio
import base64
import copy
import json
import re
import subprocess
import sys

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "docs" / "tour.ipynb"


def executed(notebook):
    """The notebook with the outputs of a fresh kernel that starts in its folder."""
    notebook = copy.deepcopy(notebook)
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=300, resources=folder, record_timing=False).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # without the kernel's version
    return notebook


def texts(notebook):
    """What each code cell printed."""
    streams = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(o.get("text", "") for o in outputs) for outputs in streams]


if __name__ == "__main__":
    nbformat.write(executed(nbformat.read(NOTEBOOK, as_version=4)), NOTEBOOK)
