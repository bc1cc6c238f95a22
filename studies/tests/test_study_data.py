"""studies/prepare.py: what it makes, and what it refuses."""

import pytest
from study_data import prepared_study

from aogpt.runtime.errors import UserError


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("copy", None, {"block_size": 8}, "records of copy have 17 tokens"),
        ("copy", None, {"tokenizer": "gpt2"}, "leave out --tokenizer"),
        ("copy", None, {"split": "train"}, "splits of its own"),
        ("shuffled", "x", {"split": "test"}, "no document of shuffled is left"),
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
