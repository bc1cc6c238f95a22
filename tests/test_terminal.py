"""aogpt/sampling/terminal.py: generated text in bold type."""

from aogpt.sampling import terminal


def test_generated_text_is_bold():
    pieces = ["an ", "old\a", "漢"]
    text = terminal.emphasised(pieces, [-1, 1, 0])
    assert text == "an \033[1mold\\x07漢\033[0m"
