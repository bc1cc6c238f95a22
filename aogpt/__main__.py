"""The command `aogpt`, or `python -m aogpt`.

aogpt score results/books_model "The [cat|dog|tax] barked."
aogpt playground results/books_model"""

import sys

from .runtime.command_line import run_script
from .runtime.errors import UserError

COMMANDS = ("score", "playground")


def main() -> int | None:
    """Run the command that the first word names, with the words after it."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("--help", "-h"):
        print(__doc__)  # noqa: T201
        return 0
    if command not in COMMANDS:
        raise UserError(f"no command {command!r}; choose one of {', '.join(COMMANDS)}")
    sys.argv = [f"aogpt {command}", *sys.argv[2:]]
    if command == "score":
        from .score import main as run_command
    else:
        from .playground.app import main as run_command
    return run_command()


def console() -> None:
    """The entry point of the installed command."""
    run_script(main)


if __name__ == "__main__":
    console()
