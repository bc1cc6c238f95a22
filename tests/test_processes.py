"""Variables of torchrun that another job left behind."""

import pytest

from aogpt.runtime.errors import UserError
from aogpt.runtime.processes import processes

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.mark.parametrize(
    "name, text",
    [
        ("RANK", "3"),
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "x"),
        ("WORLD_SIZE", "2"),
    ],
)
def test_variables_that_cannot_be_right_are_named_in_one_line(name, text, monkeypatch):
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name} = {text}") as error:
        with processes("cpu"):
            pass
    assert "unset these variables" in str(error.value)
    assert "\n" not in str(error.value)
