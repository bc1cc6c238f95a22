"""The state of the page for one visitor of the playground, and the actions on it."""

import functools
from dataclasses import dataclass, replace

import aogpt
from aogpt.runtime.devices import pick_device
from aogpt.runtime.errors import UserError
from aogpt.runtime.validation import Seed, check_value
from aogpt.sampling import modes

from .fill import Fill, new_fill

RULES = {  # by their titles on the page
    "left to right": "l2r",
    "random": "random",
    "most confident first": "confidence",
    "least entropy first": "entropy",
    "largest margin first": "margin",
    "the blank that I click": "click",
}


@functools.lru_cache(maxsize=4)
def load(path: str) -> aogpt.TextModel:
    """Load a model, and keep the last four."""
    return aogpt.load(path, device=pick_device("auto"))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of the page's controls."""

    model: str
    text: str
    rule: str  # a value of RULES
    temperature: float
    top_p: float
    seed: int
    compare: bool  # two orders
    beside_rule: str
    beside_seed: int
    own: str  # text to put into a blank
    clicked: tuple[int, int] = (-1, -1)  # a position and a token


class Session:
    """A text, and beside it the same text with the same number of tokens filled in, in
    another order."""

    def __init__(self) -> None:
        self.fill: Fill | None = None
        self.beside: Fill | None = None
        self.selected: int | None = None  # the blank that the next step fills in
        self.source: tuple[str, str] | None = None  # the model and the text
        self.seeds = (0, 0)  # of the text and the one beside

    def act(self, settings: Settings, action: str) -> None:
        """Do what a visitor asks for; then the text beside keeps pace. Raises
        UserError.

        Args:
            settings: the values of the page's controls.
            action: "restart", "step", "run", "undo", "select" (a blank), "put" (a token
                of the list), "write" (one's own text) or "settings"."""
        check_value(settings.seed, Seed, "the seed")
        check_value(settings.beside_seed, Seed, "the seed beside")
        advances = action in ("step", "run")
        is_new = self.fill is None or action == "restart"
        if advances and self.source != (settings.model, settings.text):
            is_new = True
        if action == "run" and not is_new and not self.fill.blanks:
            # Draw again.
            settings = replace(
                settings, seed=settings.seed + 1, beside_seed=settings.beside_seed + 1
            )
            is_new = True
        if is_new:
            self.restart(settings)
        self.seeds = (settings.seed, settings.beside_seed)
        self._change(settings, action)
        if action != "select":
            self.selected = self.fill.next(settings.rule, settings.seed)
        if action == "settings" or not settings.compare:
            self.beside = None
        if settings.compare:
            self._keep_pace(settings)

    def _change(self, settings: Settings, action: str) -> None:
        """Fill in or take back tokens of the text."""
        fill = self.fill
        blanks = fill.blanks
        position, token = settings.clicked
        if action in ("step", "run", "write") and blanks and self.selected is None:
            raise UserError("click a blank first, or choose another order")
        match action:
            case "step" if blanks:
                self._draw(settings, self.selected)
            case "run" if blanks:
                blank = self.selected
                while blank is not None:
                    self._draw(settings, blank)
                    blank = fill.next(settings.rule, settings.seed)
            case "undo":
                fill.undo()
            case "select" if position in blanks:
                self.selected = position
            case "put" if position in blanks:  # a double click comes too late
                fill.put(position, token)
            case "write" if blanks:
                fill.write(self.selected, settings.own)

    def _draw(self, settings: Settings, blank: int) -> None:
        self.fill.draw(blank, settings.temperature, settings.seed, settings.top_p)

    def _keep_pace(self, settings: Settings) -> None:
        """Fill in the same number of tokens of the text beside."""
        seed = settings.beside_seed
        if self.beside is None:
            self.beside = new_fill(self.fill.text, self.fill.context)
        beside = self.beside
        while len(beside.steps) > len(self.fill.steps):
            beside.undo()
        while len(beside.steps) < len(self.fill.steps):
            blank = beside.next(settings.beside_rule, seed)
            beside.draw(blank, settings.temperature, seed, settings.top_p)

    def restart(self, settings: Settings) -> None:
        """Begin with the text anew. After an error no old text is left."""
        self.fill = None
        self.beside = None
        text = load(settings.model or "")
        context = modes.encode_gaps(settings.text, text.tokenizer, text.block_size)
        self.fill = new_fill(text, context)
        self.selected = self.fill.next(settings.rule, settings.seed)
        self.source = (settings.model, settings.text)
