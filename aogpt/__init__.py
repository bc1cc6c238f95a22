"""AO-GPT: a GPT that models tokens in any order.

    import aogpt
    model = aogpt.load("results/books_model")
    print(model.fill(["She[MASK:4] home."])[0].text)

A mistake in an argument raises `aogpt.UserError`, a ValueError whose message is one
line. `aogpt.text_model` says what a model does with text; `aogpt.model` is the network
on one page, and `aogpt.Engine` makes samples of it from a plan."""

from typing import TYPE_CHECKING, Any

from .runtime.errors import UserError

if TYPE_CHECKING:
    from .sampling import Engine
    from .text_model import (
        Alternative,
        Joint,
        Likely,
        Pairs,
        Sample,
        Scored,
        TextModel,
        load,
    )

__version__ = "0.2.0"

__all__ = [
    "Alternative",
    "Engine",
    "Joint",
    "Likely",
    "Pairs",
    "Sample",
    "Scored",
    "TextModel",
    "UserError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import `aogpt.load` and its like when they are first used: PyTorch takes seconds
    to import, and a command that prepares data needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Engine":
        from .sampling import Engine

        return Engine
    from . import text_model

    return getattr(text_model, name)
