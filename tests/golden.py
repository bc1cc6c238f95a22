"""The losses of 12 steps of every debug config, as golden.json has them.

make golden                     # compares, and names the configs that differ
make golden OPTIONS=--record    # records them anew

They are equal to the last digit between commits on one machine with one thread; another
processor or version of PyTorch rounds differently: record there first, from a commit
that is right."""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from helpers import ALONE, ROOT, change, metrics

import train
from aogpt.training import config as configuration

FILE = ROOT / "tests" / "golden.json"
STEPS = 12


def losses_of(path: Path, data: Path, out: Path) -> dict[str, list[float]]:
    """Train a debug config for 12 steps; return its losses by their keys in
    metrics.jsonl."""
    config = change(
        configuration.load_toml(path),
        out=str(out),
        data__folder=str(data),
        train__steps=STEPS,
        train__log_interval=1,
        train__device="cpu",
        optim__warmup_steps=4,
        eval__interval=6,
        eval__sequences=8,
        checkpoint__interval=STEPS,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(config, ALONE)
    losses: dict[str, list[float]] = {}
    for line in metrics(config):
        for key, value in line.items():
            if key == "loss" or key.startswith("val_loss"):
                losses.setdefault(key, []).append(value)
    return losses


def main() -> int:
    """Compare or record. Returns the exit status, 1 where a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write golden.json anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        words = "data/prepare.py stories --tokenizer bytes --out".split()
        command = [sys.executable, *words, str(data)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        for path in sorted((ROOT / "configs" / "debug").glob("*.toml")):
            measured[path.stem] = losses_of(path, data, Path(folder))
    if options.record:
        FILE.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"recorded the losses of {len(measured)} configs in {FILE}")
        return 0
    golden = json.loads(FILE.read_text())
    different = []
    for name in sorted(golden.keys() | measured.keys()):
        if golden.get(name) != measured.get(name):
            different.append(name)
    print(
        f"{len(measured) - len(different)} of {len(measured)} configs have their losses"
    )
    if different:
        print("others have, or are new or gone:", ", ".join(different))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
