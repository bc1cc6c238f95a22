"""The folder of a dataset as it comes to be: written beside its final place, moved there when it is
complete.

Whatever ends a run before that, the folder is what it was before; what killed runs leave is cleared
by the next one.
"""

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from data.loader import check_file, load_meta
from runtime.errors import UserError
from runtime.files import is_alive, sync_folder
from runtime.validation import read_bounded

SPLITS = ("train", "val", "test")


def is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Whether `target` holds the dataset that `meta` describes.

    Raises ValueError where it holds something that stays: files of the user's, whatever `overwrite`
    says, and without it another or a damaged dataset."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise UserError(f"{target} is a file; choose another --out")
    names = {path.name for path in target.iterdir()}
    if not names:
        return False
    kinds = (".bin", ".roles.bin")
    own = {"meta.json", *(f"{split}{kind}" for split in SPLITS for kind in kinds)}
    strangers = sorted(names - own)
    if "meta.json" in names and not strangers and not _is_ours(target / "meta.json"):
        strangers = ["a meta.json that prepare.py has not written"]
    if strangers or "meta.json" not in names:
        raise UserError(
            f"{target} is not empty and holds more or other things than a prepared dataset "
            f"({', '.join(strangers[:3]) or 'no meta.json'}); choose another --out"
        )
    if overwrite:
        return False
    try:
        found = load_meta(target)
        for split in found["splits"]:
            check_file(target, found, split)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(
            f"{error}\n{target} holds a damaged dataset: pass --overwrite to replace it, "
            "or choose another --out"
        ) from error
    if differences := _differences(found, meta):
        raise UserError(
            f"{target} holds a dataset made with other settings ({'; '.join(differences)}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return True


def _is_ours(path: Path) -> bool:
    """Whether a meta.json begins as prepare.py's do, maybe of a damaged dataset."""
    text = read_bounded(path)[:10_000] if path.is_file() else b""
    return b'"format"' in text and b'"tokenizer"' in text


def _differences(found: dict, wanted: dict) -> list[str]:
    # folders from before there were protocols say nothing of them
    before = {"protocol": "full"} | found.get("settings", {})
    differences = [
        f"{key} was {before.get(key)!r}, now {value!r}"
        for key, value in wanted["settings"].items()
        if before.get(key) != value
    ]
    if found.get("source") != wanted["source"]:
        differences.append("the source has changed")
    return differences


# ---- writing beside, moving into place -----------------------------------------------------------


def _beside(target: Path, kind: str) -> Path:
    """What this process keeps beside `target`: its "partial" new folder, or the "old" one."""
    return target.parent / f".{target.name}.{kind}-{socket.gethostname()}-{os.getpid()}"


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, removed at the end unless it was moved, and with it the folders
    that were made for it."""
    partial = _beside(target, "partial")
    made = [folder for folder in partial.parents if not folder.exists()]  # innermost first
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # of one that is not empty, least of all by the dataset
            for folder in made:
                folder.rmdir()


def move_into_place(partial: Path, target: Path) -> None:
    """Move the finished folder to `target`; what was there before is kept until then."""
    sync_folder(partial)
    if target.exists():
        partial.chmod(stat.S_IMODE(target.stat().st_mode))
        target.rename(_beside(target, "old"))
    try:
        partial.rename(target)
        sync_folder(target.parent)
    finally:
        clear_leftovers(target)


def clear_leftovers(target: Path) -> None:
    """Remove what this run and killed ones have left beside `target`, and put back the old dataset
    of one that ended between the two moves of `move_into_place`."""
    if not target.parent.is_dir():
        return
    for path in list(target.parent.iterdir()):
        for kind in ("partial", "old"):
            prefix = f".{target.name}.{kind}-"
            if not path.name.startswith(prefix) or _is_alive(path.name.removeprefix(prefix)):
                continue
            if kind == "old" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(run: str) -> bool:
    """Whether another run, HOST-PID, may be at work. Several hosts can share a disk, and of runs on
    others nothing is known."""
    host, _, pid = run.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit():
        return True
    if int(pid) == os.getpid():
        return False
    return is_alive(int(pid))
