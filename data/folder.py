"""The folder of a dataset: written beside its final place, moved there when it is complete."""

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from data.loader import check_file, load_meta
from runtime.errors import UserError
from runtime.files import is_alive, sync_folder

SPLITS = ("train", "val", "test")
FILES = {"meta.json", *(f"{split}{kind}" for split in SPLITS for kind in (".bin", ".roles.bin"))}


def is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Whether `target` holds the dataset that `meta` describes. Raises UserError where it holds
    other files, whatever `overwrite` says, or without it another or a damaged dataset."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; choose another --out")
    names = {path.name for path in target.iterdir()} if target.exists() else set()
    strangers = ", ".join(sorted(names - FILES)[:3]) or "no meta.json"
    if names and (names - FILES or "meta.json" not in names):
        other = f"holds more or other things than a prepared dataset ({strangers})"
        raise UserError(f"{target} {other}; choose another --out")
    if overwrite or not names:
        return False
    advice = "pass --overwrite to replace it, or choose another --out"
    try:
        found = load_meta(target)
        for split in found["splits"]:
            check_file(target, found, split, verify=True)
    except (UserError, FileNotFoundError) as error:
        raise UserError(f"{target} holds a damaged dataset ({error}): {advice}") from error
    # Folders from before there were protocols do not name them.
    before = {"protocol": "full"} | found.get("settings", {})
    differences = [
        f"{key} was {before.get(key)!r}, now {value!r}"
        for key, value in meta["settings"].items()
        if before.get(key) != value
    ] + ["the source has changed"] * (found.get("source") != meta["source"])
    if differences:
        made = f"holds a dataset made with other settings ({'; '.join(differences)})"
        raise UserError(f"{target} {made}: {advice}")
    return True


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which replaces it at the end; removed where that fails."""
    clear_leftovers(target)
    beside = target.with_name(f".{target.name}.partial-{socket.gethostname()}-{os.getpid()}")
    try:
        (beside / "new").mkdir(parents=True)
        yield beside / "new"
        for path in (beside / "new").iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            target.rename(beside / "old")
        (beside / "new").rename(target)
        sync_folder(target.parent)
    finally:
        _remove(beside, target)


def clear_leftovers(target: Path) -> None:
    """Remove what killed runs of this machine have left beside `target`."""
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    for path in target.parent.glob(glob.escape(prefix) + "*"):
        pid = int(path.name.removeprefix(prefix))
        if pid == os.getpid() or not is_alive(pid):
            _remove(path, target)


def _remove(beside: Path, target: Path) -> None:
    if (beside / "old").exists() and not target.exists():  # killed between the two moves
        (beside / "old").rename(target)
    shutil.rmtree(beside, ignore_errors=True)
