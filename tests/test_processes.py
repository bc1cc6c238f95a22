"""Variables of torchrun that another job left behind."""

import pytest

from aogpt.runtime.errors import UserError
from aogpt.runtime.processes import processes

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "3"}, "RANK is '3', not a number from 0 to 0"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', not a number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number of at least 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', not a number of at least 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but torchrun did not start"),
    ],
)
def test_variables_that_cannot_be_right_are_named_in_one_line(
    environment, message, monkeypatch
):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=message) as error, processes("cpu"):
        pass
    assert "unset RANK" in str(error.value)
    assert "\n" not in str(error.value)
