"""A picture of generation order: one HTML file on which a reader scrubs through the
steps and sees the text fill in. page.html is its template: it loads nothing and reads
its data from JSON inside."""

from dataclasses import asdict, dataclass
from pathlib import Path

from ..runtime.files import to_json

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class PageSample:
    """One sample of T tokens, in sequence order."""

    pieces: list[str]  # the text of each token, as `Tokenizer.pieces` gives it
    step: list[int]  # the step, from 0, at which each was unmasked; -1: given
    # nats, under the model, when it was drawn; ignored at given ones
    log_probs: list[float]
    # A token a cell: rows and columns of a board, and of the boxes that it is made of;
    # None: lines as long as the page is wide.
    board: tuple[int, int, int, int] | None = None
    caption: str = ""


def render(samples: list[PageSample], settings: dict) -> str:
    """Return the whole HTML document; write it as UTF-8. settings: plain values by
    name, shown as they are. The URL fragment selects a state: `#sample=2&step=12` is
    the second sample after 12 of its steps that unmask something; without it all are
    done. `#play` plays the first sample from its first step on."""
    data = to_json(
        {"samples": [asdict(sample) for sample in samples], "settings": settings}
    )
    # to_json leaves only ASCII; without "<" no text can end the script element that
    # holds the data.
    data = data.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data, 1)
