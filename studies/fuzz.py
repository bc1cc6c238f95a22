"""make fuzz: malformed files and options, and what became of them.

    PYTHONPATH=tests python -m studies.fuzz --cases 2000 --seeds 0 1 2

Every case starts with a fresh copy of the same small folder, in which something is
changed. The script may refuse with one line (status 2) or do its work, but not

    traceback  show one
    crash      die of a signal that nobody sent
    silent     use damaged weights or tokens without a word
    foreign    change a file that is not its result
    slow       take more than 30 seconds of a processor, or not end in 5 minutes
    memory     take more than 2 GB

A script runs in a child of this process, which has imported everything already. Full
disks, signals and kills are in the tests of training."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint
import tyro
from helpers import ALONE, make_data, tiny_config, write_config

import convert
import eval_gen
import eval_ppl
import sample
import train
from aogpt.checkpoints import load_model, store
from aogpt.checkpoints.released import gpt_names
from aogpt.data import prepare
from aogpt.runtime.command_line import run_script
from aogpt.runtime.validation import Count, NonNegative, check_values
from aogpt.training.config import Config

SECONDS = 30  # of a processor
HANGING = 300  # seconds until a script is killed that waits for something
BYTES = 2 * 2**30
STEPS = 6
CHECKPOINTS = "run/checkpoints"
NEWEST = f"{CHECKPOINTS}/step_{STEPS:08d}"


@dataclass
class Arguments:
    cases: Count = 2000
    """Number of cases of all seeds together."""
    seeds: tuple[NonNegative, ...] = (0, 1, 2)
    show: bool = False
    """Print every case, and the last line that the script printed."""


def converts():
    return tyro.cli(convert.convert)


SAMPLE = "--num-samples 2 --mode mdm:steps=3 --jsonl out.jsonl --device cpu"
PERPLEXITY = (
    "--datasets data --max-sequences 2 --num-orders 1 --json out.json --device cpu"
)
COMMANDS = {  # name: script, arguments within the folder, what it leaves
    "sample": (sample.main, f"run {SAMPLE}", "out.jsonl"),
    "sample best": (sample.main, f"run/best {SAMPLE}", "out.jsonl"),
    "sample export": (sample.main, f"export {SAMPLE}", "out.jsonl"),
    "sample prompts": (
        sample.main,
        f"run --prompts prompts.jsonl {SAMPLE}",
        "out.jsonl",
    ),
    "convert": (converts, "run new", "new/model.safetensors"),
    "convert export": (converts, "export new", "new/model.safetensors"),
    "convert release": (converts, "released.pt new", "new/model.safetensors"),
    "resume": (train.main, f"run.toml --train.steps {STEPS + 3}", CHECKPOINTS),
    "perplexity": (eval_ppl.main, f"run {PERPLEXITY}", "out.json"),
    "prepare": (
        prepare.main,
        "text --source text.jsonl --tokenizer bytes --out new",
        "new",
    ),
    "judge": (eval_gen.main, "samples.jsonl --judge run --json out.json", "out.json"),
}
OF_RUN = ("sample", "resume", "convert", "perplexity")
READERS = {
    f"{NEWEST}/state.json": OF_RUN,
    f"{NEWEST}/model.safetensors": ("resume",),
    f"{NEWEST}/ema.safetensors": OF_RUN,
    f"{NEWEST}/optimizer.safetensors": ("resume",),
    "run/best": ("sample best", "resume"),
    "run/metrics.jsonl": ("resume",),
    "run.toml": ("resume",),
    "export/config.json": ("sample export", "convert export"),
    "export/model.safetensors": ("sample export", "convert export"),
    "released.pt": ("convert release",),
    "data/meta.json": ("resume", "perplexity"),
    "data/train.bin": ("resume",),
    "data/val.bin": ("perplexity", "resume"),
    "prompts.jsonl": ("sample prompts",),
    "samples.jsonl": ("judge",),
    "text.jsonl": ("prepare",),
}
# What has checksums: changed bytes are noticed, or change nothing in the result.
PROTECTED = (".safetensors", ".bin", ".pt", "state.json", "export/config.json")
OPTIONS = {
    "sample": "num-samples length temperature top-p top-k batch-size seed mode "
    "block-size dtype weights device prompt jsonl html",
    "perplexity": "orders ensemble group num-orders max-sequences split json",
    "prepare": "limit val-fraction field tokenizer split source val out",
    "judge": "mode num-samples batch-size length judge json",
    "resume": "optim.lr train.batch-size train.micro-batch-size model.n-layer "
    "model.n-embd eval.sequences eval.draws order.kind data.folder train.device "
    "checkpoint.keep seed",
}
ODD = [
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    True,
]
ODD += [
    None,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "é" * 9999,
    [],
    {},
    [[]],
    [1, "a"],
]
ODD += [{"a": 1}, [0] * 999]
WORDS = [
    word for word in map(str, ODD) if "\0" not in word and "\ud800" not in word and word
]
OUTPUTS = ("jsonl", "html", "json", "out")
FILES = [
    "notes.md",
    "prompts.jsonl",
    "data",
    "link",
    "out.new",
]  # that outputs are to replace
BYTEWISE = ("flip", "cut", "zeros", "insert", "empty", "folder", "noise")
TREEWISE = ("value", "drop", "rename", "deep", "crafted value", "crafted drop")


class Case(NamedTuple):
    kind: str  # file or option
    file: str  # that is changed
    command: str
    change: str  # the kind of change, or the option
    seed: str  # of what else is random


def random_case(seed):
    """Return a case by its seed; most change a file."""
    rng = random.Random(seed)
    kind = rng.choice(["file"] * 5 + ["option"] * 3)
    if kind == "file":
        file = rng.choice(sorted(READERS))
        changes = BYTEWISE
        if file.endswith(("json", "jsonl", "toml")):
            changes += TREEWISE
        change = rng.choice(changes)
        return Case(kind, file, rng.choice(READERS[file]), change, seed)
    command = rng.choice(sorted(OPTIONS))
    return Case(kind, "", command, rng.choice(OPTIONS[command].split()), seed)


def change_file(path, change, rng):
    """Change a file as a damaged disk, a careless editor or an attacker would."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) if data else 0
    match change:
        case "flip":
            for _ in range(rng.choice((1, 1, 1, 5))):
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        case "cut":
            del data[at:]
        case "zeros":
            data[at : at + 64] = bytes(64)
        case "insert":
            data[at:at] = rng.randbytes(rng.choice((1, 8, 4096)))
        case "empty":
            data.clear()
        case "noise":
            data = rng.randbytes(len(data))
        case "folder":
            path.unlink()
            return path.mkdir()
        case _:
            data = changed_tree(path, data.decode(), change, rng).encode(
                errors="surrogatepass"
            )
    path.write_bytes(data)


def changed_tree(path, text, change, rng):
    """Return the text of a TOML, JSON or JSON lines file with one value, key or level
    changed."""
    lines = text.splitlines() if path.suffix != ".json" else [text]
    if path.suffix == ".toml":
        place = rng.choice([i for i, line in enumerate(lines) if " = " in line])
        key = lines[place].partition(" = ")[0]
        new = {"drop": "", "rename": f"{key}x = 1", "deep": f"{key} = " + "[" * 9999}
        lines[place] = new.get(change, f"{key} = {json.dumps(rng.choice(ODD))}")
        return "\n".join(lines)
    place = rng.randrange(len(lines))
    values = json.loads(lines[place])
    spots = [(values, key) for key in values]
    for table, key in spots:  # grows meanwhile
        if isinstance(table[key], dict):
            spots += [(table[key], inner) for inner in table[key]]
    table, key = rng.choice(spots)
    value = table.pop(key)
    if change == "rename":
        table[f"{key}s"] = value
    elif change.endswith("value"):
        table[key] = rng.choice(ODD)
    elif change == "deep":
        table[key] = 0
    if change.startswith("crafted") and "sha256" in values:
        values["sha256"] = store.digest(values)
    lines[place] = json.dumps(values)
    if change == "deep":
        lines[place] = lines[place].replace(": 0", f": {'[' * 9999}{']' * 9999}", 1)
    return "\n".join(lines)


class Ended(NamedTuple):
    status: int
    said: str
    seconds: float
    memory: int


def run(main, arguments, folder):
    """Run a script's main in a child of this process."""
    said = folder.with_suffix(".said")
    started = time.monotonic()
    said.touch()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.chdir(folder)
            output = os.open(said, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            sys.stdout, sys.stderr = (open(fd, "w", buffering=1) for fd in (1, 2))
            sys.argv = ["script.py", *arguments]
            try:
                run_script(main)
            except SystemExit as stop:
                os._exit(stop.code if isinstance(stop.code, int) else 1)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    is_hanging = False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if not is_hanging and time.monotonic() - started > HANGING:
            is_hanging = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    # No verdict depends on how busy the machine is.
    seconds = usage.ru_utime + usage.ru_stime
    if is_hanging:
        seconds = HANGING
    text = said.read_text(errors="replace")
    said.unlink()
    return Ended(
        os.waitstatus_to_exitcode(status), text, seconds, usage.ru_maxrss * 1024
    )


OUTCOMES = (
    "done",
    "warned",
    "refused",
    "bad",
)  # becomes of a case; warned: damage was named


class Campaign:
    """The folder that cases start with, and what has been seen so far."""

    def __init__(self, folder, show):
        self.base = folder / "base"
        self.show = show
        self.seen = Counter()
        self.failures = []
        config = tiny_config("data", "", steps=STEPS, checkpoint__interval=3)
        self.base.mkdir()
        make_data(self.base)
        with contextlib.chdir(self.base):
            train.train(config, ALONE)
            write_config(config)
            convert.convert("run", Path("export"))
            write_release()
            Path("link").symlink_to("notes.md")
        for name, text in TEXTS.items():
            (self.base / name).write_text(text)
        self.results = {}
        for name, (main, arguments, _) in COMMANDS.items():
            with self.copy() as work:
                ended = run(main, arguments.split(), work)
                assert ended.status == 0, (name, ended.said)
                self.results[name] = result(work, name)

    @contextlib.contextmanager
    def copy(self):
        folder = self.base.with_name("work")
        shutil.copytree(self.base, folder, symlinks=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def case(self, case):
        """Run a case and count what became of it."""
        with self.copy() as folder:
            verdict, ended = self.changed(case, folder, random.Random(case.seed))
        if not verdict:
            bad = {
                "traceback": "Traceback" in ended.said,
                "slow": ended.seconds > SECONDS,
                "crash": ended.status not in (0, 2),
                "memory": ended.memory > BYTES,
            }
            verdict = next((name for name, is_so in bad.items() if is_so), None)
        outcome = "bad" if verdict else "refused" if ended.status else "done"
        if outcome == "done" and "warning" in ended.said:
            outcome = "warned"
        self.seen[case.kind, outcome] += 1
        if verdict:
            self.failures.append((verdict, case))
        if verdict or self.show:
            said = ended.said.strip()[-1500 if verdict else -200 :]
            print(
                f"{verdict or outcome}, {ended.seconds:.1f} s: {case}\n{said}",
                flush=True,
            )

    def changed(self, case, folder, rng):
        """Change a file of the folder, or give an option an odd value."""
        main, arguments, _ = COMMANDS[case.command]
        arguments = arguments.split()
        if case.kind == "file":
            change_file(folder / case.file, case.change, rng)
        else:
            words = FILES if case.change in OUTPUTS else WORDS
            arguments += [f"--{case.change}", rng.choice(words)]
        before = tree(folder)
        own = ("new", "out.")
        if case.command == "resume":
            own = (run_folder(before["run.toml"]),)
        ended = run(main, arguments, folder)
        after = tree(folder)
        names = [name for name in before | after if before.get(name) != after.get(name)]
        if any(not f"{name}/".startswith(own) for name in names):
            return "foreign", ended
        # one that was killed for its time is counted as slow
        noticed = (
            ended.status != 0
            or "warning" in ended.said
            or case.change.startswith("crafted")
        )
        if case.kind == "file" and case.file.endswith(PROTECTED) and not noticed:
            if result(folder, case.command) != self.results[case.command]:
                return "silent", ended
        return None, ended


def run_folder(config):
    """Return the folder that holds the run of a config file, of the name by default if
    it has none. config: its bytes; anything else is refused."""
    try:
        values = tomllib.loads(config.decode())
    except (AttributeError, ValueError, RecursionError):
        return "run/"
    out = str(values.get("out", Config.out))
    place = Path(out) / str(values.get("name", Config.name))
    return f"{place.parts[0]}/"


TEXTS = {
    "prompts.jsonl": '{"prompt": "the "}\n{"prompt": "of[MASK:3] step"}\n',
    "samples.jsonl": '{"text": "any order"}\n{"text": "the model", "n": 1}\n',
    "text.jsonl": json.dumps({"text": "It was a bright cold day. " * 40}) + "\n",
    "notes.md": "mine",
}


def write_release():
    """Write the run's weights in the layout of AO-GPT's releases."""
    model = load_model("run")
    ours = dict(model.named_parameters())
    names = gpt_names(model.config.n_layer, "transformer.final_layer.").items()
    state = {
        theirs: ours[name].detach().clone() for theirs, name in names if name in ours
    }
    state["transformer.wnonee.weight"] = state["transformer.wnonee.weight"][None]
    sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    settings = {name: getattr(model.config, name) for name in sizes}
    torch.save({"model": state, "model_args": settings, "iter_num": 3}, "released.pt")


def result(folder, name):
    """Return the part of a command's result that depends only on what it reads."""
    path = folder / COMMANDS[name][2]
    if name.startswith("sample"):
        return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
    if name == "perplexity":
        return [row["nll"] for row in json.loads(path.read_text())["results"]]
    if name == "resume":
        path = sorted(path.glob("step*"))[-1] / "model.safetensors"
    if path.suffix == ".safetensors":
        return path.parent.name, hashlib.sha256(path.read_bytes()).hexdigest()
    return path.exists()


def tree(folder):
    """What is in a folder: the contents of files, of everything else its kind."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    regular = {
        name for name, path in paths.items() if path.is_file() and not path.is_symlink()
    }
    return {
        n: p.read_bytes() if n in regular else p.lstat().st_mode
        for n, p in paths.items()
    }


def main():
    arguments = tyro.cli(Arguments, description=__doc__)
    check_values(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HUB_OFFLINE"] = "1"
        started = time.monotonic()
        campaign = Campaign(Path(folder), arguments.show)
        each = arguments.cases // len(arguments.seeds)
        cases = [
            random_case(f"{seed} {n}") for seed in arguments.seeds for n in range(each)
        ]
        for case in cases:
            campaign.case(case)
        minutes = (time.monotonic() - started) / 60
    for kind in sorted({kind for kind, _ in campaign.seen}):
        print(
            f"{kind}:",
            ", ".join(
                f"{campaign.seen[kind, outcome]} {outcome}" for outcome in OUTCOMES
            ),
        )
    verdicts = Counter(verdict for verdict, _ in campaign.failures)
    print(
        f"{len(cases)} cases in {minutes:.0f} minutes; bad: {dict(verdicts) or 'none'}"
    )
    for verdict, case in campaign.failures:
        print(f"{verdict}: {case}")
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
