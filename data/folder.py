"""The folder of a dataset as it comes to be: written beside its final place, moved there when it is complete.

Whatever ends a run before that, the folder is what it was before; what killed runs leave is cleared by the next one.
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from data.loader import check_file, load_meta


def write_meta(folder: Path, meta: dict) -> None:
    with open(folder / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def is_finished(target: Path, meta: dict, overwrite: bool) -> bool:
    """Whether `target` holds the dataset that `meta` describes. ValueError where it holds something that stays."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise ValueError(f"{target} is a file; choose another --out")
    names = {path.name for path in target.iterdir()}
    if not names:
        return False
    strangers = sorted(name for name in names if name != "meta.json" and not name.endswith(".bin"))
    if (
        strangers or "meta.json" not in names
    ):  # never replace a folder that holds anything of the user's
        raise ValueError(
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
        raise ValueError(
            f"{error}\n{target} holds a damaged dataset: pass --overwrite to replace it, or choose another --out"
        ) from error
    differences = _differences(found, meta)
    if differences:
        raise ValueError(
            f"{target} holds a dataset made with other settings ({'; '.join(differences)}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return True


def _differences(found: dict, wanted: dict) -> list[str]:
    before = {"protocol": "full"} | found.get(
        "settings", {}
    )  # what there was before there were others
    now = wanted["settings"]
    different = [
        f"{key} was {before.get(key)!r}, now {now[key]!r}"
        for key in now
        if before.get(key) != now[key]
    ]
    if found.get("source") != wanted["source"]:
        different.append("the source has changed")
    return different


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, removed at the end unless it was moved."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{_run_id()}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"  # the host as well: several may share a disk


def clear_leftovers(target: Path) -> None:
    """Removes what killed runs left beside `target`."""
    for path in list(target.parent.iterdir()) if target.parent.is_dir() else []:
        for kind in ("partial", "old"):
            prefix = f".{target.name}.{kind}-"
            if not path.name.startswith(prefix) or not _is_dead(path.name.removeprefix(prefix)):
                continue
            if (
                kind == "old" and not target.exists()
            ):  # killed between the two moves of move_into_place
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_dead(run_id: str) -> bool:
    """Whether the run is known to have ended: of runs on other hosts nothing is known."""
    host, _, pid = run_id.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(pid) == os.getpid()


def move_into_place(partial: Path, target: Path) -> None:
    """Moves the finished folder to `target`; what was there before is kept until then."""
    _sync_folder(partial)
    old = target.parent / f".{target.name}.old-{_run_id()}"
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
