"""Pages, comments and docstrings use the field's words (make lint)."""

import re
import subprocess
import sys
import tokenize
from pathlib import Path

WORDS = {  # a regular expression: what to write
    r"(told|tells?|telling) (its |the |their |a step its )?targets?": (
        "conditioned on the target"
    ),
    r"(the|is|are) surest|surer|sure enough": "most confident, above the threshold",
    r"mixed values|line to zero|plateau of single": (
        "value residual, linear decay, plateau"
    ),
    r"but for|for want of|whoever|of use|so many|as many as": "another sentence",
    r"\+-": "±",
}
PAGES = WORDS | {r"arms?": "run config"}  # in code a star graph has arms
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.M | re.S)  # of a page


def prose(path: Path) -> str:
    """The file without its code, line by line."""
    text = path.read_text(encoding="utf-8")
    comments = ""
    if path.suffix == ".md":
        return CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    if path.suffix == ".toml":
        return text
    for token in tokenize.generate_tokens(iter(text.splitlines(True)).__next__):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            comments += (
                "\n" * (token.start[0] - 1 - comments.count("\n")) + token.string
            )
    return comments


complaints = []
listing = ["git", "ls-files", "*.md", "*.py", "*.toml"]
for path in map(Path, subprocess.check_output(listing, text=True).split()):
    text = prose(path)
    for words, advice in (PAGES if path.suffix == ".md" else WORDS).items():
        for match in re.finditer(
            rf"(?<!\w)({words})(?!\w)".replace(" ", r"[\s#]+"), text, re.I
        ):
            line = text.count("\n", 0, match.start()) + 1
            complaints.append(f"{path}:{line}: {match[0]!r}; write: {advice}")
sys.exit("\n".join(complaints) or 0)
