"""Exact joints beside sums: the scores of a passage, and the figure."""

import json
import lzma

import pytest

import aogpt
from studies import joints


def test_a_phrase_is_scored_in_four_ways(tmp_path, capsys):
    """The exact one is that of `score`, from the words in the middle."""
    words = "The old man went to the door and looked at the snow".split() * 5
    text = " ".join(words[: joints.WORDS])
    model = aogpt.load("results/books_model")
    row = joints.scores_of(model, text)
    middle = (joints.WORDS - joints.PHRASE) // 2
    before = len(" ".join(words[:middle]))
    assert text[before:].startswith(row["phrase"])
    (one,) = model.score([text], predict=[(before, before + len(row["phrase"]))])
    assert row["tokens"] == one.scored
    assert row["exact"] == pytest.approx(one.log_prob)
    source = tmp_path / "a.jsonl.xz"
    with lzma.open(source, "wt") as file:
        file.write(json.dumps({"text": text + " " + text}) + "\n")
    results = tmp_path / "joints.json"
    joints.run(source, count=3, out=results)
    assert "pseudo - exact: " in capsys.readouterr().out
    figure = tmp_path / "joints.png"
    joints.draw(results, figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
