"""Results of runs, kept in a file of one line each beside what is made of them: whoever has the
file need not train them again."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

from runtime.files import json_object, read_lines, write_jsonl
from runtime.validation import damaged
from training import config as configuration
from training.config import Config


class Kept:
    """The results in a file, and those that come to it; its methods may be called by threads."""

    def __init__(self, file: Path | None):
        """file: None keeps nothing."""
        self.file, self.lock = file, threading.Lock()
        self.results: dict[str, dict] = {}
        self.lines: list[dict] = []
        if file and file.exists():
            with damaged(file, "remove it, and its runs are trained again"):
                lines = read_lines(file, "results")
                self.lines = [json_object(text, place) for place, text in lines]
                self.results = {line["key"]: line["result"] for line in self.lines}

    def has(self, config: Config, measured_by: list[list[str]]) -> bool:
        return key_of(config, measured_by) in self.results

    def of(self, config: Config, measured_by: list[list[str]], make: Callable[[], dict]) -> dict:
        """The result of a run that is measured by these commands: the one in the file, or else what
        `make` gives, which is added to it."""
        key = key_of(config, measured_by)
        if not self.has(config, measured_by):
            result = make()
            with self.lock:
                self.results[key] = result
                self.lines.append({"run": str(config.run_folder), "key": key, "result": result})
                if self.file:
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    write_jsonl(self.file, self.lines)
        return self.results[key]


def key_of(config: Config, measured_by: list[list[str]]) -> str:
    """Tells a run, measured so, from all others. Keys that a configuration does not change have no
    part in it, so that a new option makes no old result another's."""
    changed = configuration.differences(Config(), config)
    values = {key: new for key, (_, new) in changed.items()}
    text = json.dumps([values, measured_by], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
