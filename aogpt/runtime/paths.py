"""Where the project's own folders are, for a clone and for an installed package."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
IS_CLONE = (PROJECT / "train.py").is_file()
# With an installed package, datasets lie in the folder from which a command is run.
DATA = Path("data")
if IS_CLONE:
    DATA = PROJECT / "data"
