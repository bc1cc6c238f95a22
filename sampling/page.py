"""A picture of generation order: one HTML file on which a reader scrubs through the steps and sees
the text fill in.

The page itself is page.html, a template: it holds everything, loads nothing, and reads its data
from JSON inside it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.errors import UserError
from runtime.files import to_json

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class PageSample:
    """One sample of T tokens, in sequence order. Raises ValueError when the lists differ in length
    or a step is < -1.

    pieces: the text of each token on its own, as `Tokenizer.pieces` gives it.
    step: the step, from 0, at which each token was unmasked; -1 for given ones (the prompt).
    log_probs: the log-probability in nats of each token under the model, when it was drawn;
        whatever stands at given ones is ignored.
    board: of what is boards, one after the other, a token a cell: rows and columns of a board, and
        of the boxes that it is made of. None: lines are as long as the page is wide.
    caption: what is said of the sample.
    """

    pieces: list[str]
    step: list[int]
    log_probs: list[float]
    board: tuple[int, int, int, int] | None = None
    caption: str = ""

    def __post_init__(self):
        if not len(self.pieces) == len(self.step) == len(self.log_probs):
            raise UserError(
                f"a sample has {len(self.pieces)} pieces, {len(self.step)} steps and "
                f"{len(self.log_probs)} log-probabilities; give one of each per token"
            )
        if self.step and min(self.step) < -1:
            raise UserError(
                f"a sample has step {min(self.step)}; steps are 0 or more, or -1 for a given token"
            )


def render(samples: list[PageSample], settings: dict) -> str:
    """The whole HTML document, self-contained; write it as UTF-8.

    samples: at least one, shown in this order and numbered from 1. settings: plain values by name,
    shown as they are. The URL fragment selects a state: `#sample=2&step=12` is the second sample
    after 12 of its steps. A page counts the steps that unmask something in that sample: step 0 is
    before the first of them, and without a fragment all are done. Raises ValueError when there are
    no samples.
    """
    if not samples:
        raise UserError("there are no samples to show; give at least one")
    data = to_json({"samples": [asdict(sample) for sample in samples], "settings": settings})
    # to_json leaves only ASCII; without "<" no text can end the script element that holds the data.
    data = data.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data, 1)
