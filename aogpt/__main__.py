"""The command `aogpt`, or `python -m aogpt`.

aogpt score MODEL "The old horse was tired."        probability of tokens and text
aogpt rank MODEL "The [cat|dog|tax] barked."        which alternative is most probable
aogpt fill MODEL "She[MASK:2-6] home."              fill gaps
aogpt blanks MODEL "The cat[MASK] home."            what fits into a blank
aogpt generate MODEL "Once upon a time"             continue a text
aogpt playground MODEL                              all of this in the browser

MODEL: a run folder, such as results/books_model, released weights, or a Hugging Face
repo id. `aogpt COMMAND --help` lists the options, `aogpt --version` says which release
this is."""

import sys

from . import __version__
from .runtime import environment  # noqa: F401  # says if packages are missing
from .runtime.command_line import run_script, show


def main() -> int | None:
    """Run the command that the first word names, with the words after it."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("--help", "-h"):
        show(__doc__)
        return 0
    if command == "--version":
        show(f"aogpt {__version__}")
        return 0
    program = "aogpt"
    if sys.argv[0].endswith("__main__.py"):  # not the installed command
        program = "python -m aogpt"
    sys.argv = [f"{program} {command}", *sys.argv[2:]]
    if command == "playground":
        from .playground.app import main as run_command
    else:
        from .commands import main as run_command
    return run_command()


def console() -> None:
    """Run the installed command `aogpt`."""
    run_script(main)


if __name__ == "__main__":
    console()
