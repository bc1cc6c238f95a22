"""studies/prepare.py: what it makes, and what it refuses."""

import pytest
from study_data import prepared_study

from aogpt.runtime.errors import UserError


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("copy", None, {"block_size": 8}, "copy takes no --block-size"),
        ("copy", None, {"tokenizer": "gpt2"}, "copy takes no --tokenizer"),
        ("copy", None, {"split": "train"}, "copy takes no --split"),
        ("shuffled", "x", {"split": "test"}, "test of shuffled has no document"),
    ],
)
def test_what_cannot_be_prepared_is_said(tmp_path, name, text, options, says):
    source = []
    if text is not None:
        source = [tmp_path / "text.txt"]
        source[0].write_text(text)
    with pytest.raises(UserError, match=says):
        prepared_study(name, tmp_path / "out", *source, **options)
    assert not (tmp_path / "out").exists()
