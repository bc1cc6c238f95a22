"""make fuzz: malformed files and options, crashes, full disks and signals, and what became of them.

    PYTHONPATH=. python tests/fuzz.py [--cases 2000] [--seeds 0 1 2] [--series] [--out FILE.md]

Every case begins with a fresh copy of the same small folder: a dataset, a run, an export, weights
of a released layout, prompts, samples. Something in it is changed, or something happens while a
script runs, and the script is watched: it may refuse with one line (status 2) or do its work, but

    traceback  it must not show one
    crash      or die of a signal that nobody sent
    silent     or take damaged weights or tokens for whole ones
    foreign    or change a file that is not its result
    lost       or, disturbed and started again, end elsewhere than an undisturbed run
    slow       or take more than 30 seconds
    memory     or more than 2 GB

Hypothesis draws the cases from each seed. `--series` adds what is to be tried in full: flipped
bytes of every kind of file, kills and interrupts of a training run, a kill before and a full disk
at each of its file operations. A script runs in a child of this process, which has imported
everything already.
"""

import builtins
import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import lzma
import multiprocessing
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import huggingface_hub
import hypothesis
import lm_eval.tasks
import matplotlib.pyplot  # so that no child has to import it
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint
import tyro
from helpers import ALONE, ROOT, make_data, metrics, newest, prepared, tiny_config, write_config
from hypothesis import strategies as st

import convert
import eval_gen
import eval_infill
import eval_ppl
import eval_tasks
import sample
import train
from checkpoints import on_disk
from checkpoints.load import load
from data import prepare
from evaluation import published
from runtime.command_line import run_script
from runtime.reports import commit, markdown_table
from runtime.validation import Count, NonNegative, check_values
from studies import findings, speedrun
from studies.experiments import suite
from studies.experiments.tuning import choices_of

SECONDS, BYTES = 30, 2 * 2**30
STEPS, CHECKPOINTS = 6, "run/checkpoints"


@dataclass
class Arguments:
    cases: Count = 2000
    """Of all seeds together."""
    seeds: tuple[NonNegative, ...] = (0, 1, 2)
    series: bool = False
    """Add 200 flips of each file, 100 kills, 100 interrupts, and a fault at every operation."""
    minutes: Count = 120
    """After them no further case begins."""
    out: Path | None = None
    """Write the table as Markdown."""
    show: bool = False
    """Print every case, and the last line that the script said."""


# ---- the scripts, and the files they read --------------------------------------------------------


def moved(module, name, path, main):
    """Run `main` with a path of a module's own elsewhere."""
    setattr(module, name, Path(path))
    return main()


def harness(arguments):
    """eval_tasks.py without the thousands of tasks that come with the harness, which it would read
    for seconds; their caches in this folder."""
    datasets.config.HF_DATASETS_CACHE = Path("out.cache").absolute()
    every = lm_eval.tasks.TaskManager
    lm_eval.tasks.TaskManager = lambda **options: every(include_defaults=False, **options)
    sys.argv += arguments.split()
    return eval_tasks.main()


def load_a_track():
    track = speedrun.load_track("bytes64")
    for arm in track.arms.values():
        for tuned in choices_of(arm):
            track.config(arm, 0, tuned)


SAMPLE = "--num-samples 2 --steps 3 --jsonl out.jsonl --device cpu"
COMMANDS = {  # name: script, arguments within the folder, what it leaves
    "sample": (sample.main, f"run {SAMPLE}", "out.jsonl"),
    "sample best": (sample.main, f"run/best {SAMPLE}", "out.jsonl"),
    "sample export": (sample.main, f"export {SAMPLE}", "out.jsonl"),
    "sample prompts": (sample.main, f"run --prompts prompts.jsonl {SAMPLE}", "out.jsonl"),
    "convert": (lambda: tyro.cli(convert.convert), "run new", "new"),
    "convert export": (lambda: tyro.cli(convert.convert), "export new", "new"),
    "convert release": (lambda: tyro.cli(convert.convert), "released.pt new", "new"),
    "resume": (train.main, f"run.toml --train.steps {STEPS + 3}", CHECKPOINTS),
    "plot": (train.main, "--plot run --plot-out out.png", "out.png"),
    "perplexity": (
        eval_ppl.main,
        "run --datasets data --max-sequences 2 --num-orders 1 --json out.json --device cpu",
        "out.json",
    ),
    "orders": (
        eval_ppl.main,
        "run --datasets data --max-sequences 2 --orders file:file=orders.npy --json out.json "
        "--device cpu",
        "out.json",
    ),
    "tasks": (
        eval_tasks.main,
        "run --tasks questions --mode l2r --json out.json --device cpu",
        "out.json",
    ),
    "prepare": (
        prepare.main,
        "text --source text.jsonl.xz notes.txt.gz --tokenizer bytes --out new",
        "new/train.bin",
    ),
    "prepare records": (
        prepare.main,
        "records --source records.jsonl --tokenizer bytes --block-size 64 --out new",
        "new/train.bin",
    ),
    "harness": (
        lambda: harness("run --tasks task.yaml --json out.json --device cpu"),
        "",
        "out.json",
    ),
    "infill": (
        eval_infill.main,
        "run --data short --num-passages 4 --shortest 2 --json out.json --device cpu",
        "out.json",
    ),
    # Files of the project itself, which a user may edit, in this folder instead of their own.
    "published": (
        lambda: moved(published, "PUBLISHED", "published.toml", eval_ppl.main),
        "run --datasets data --max-sequences 2 --num-orders 1 --json out.json --device cpu",
        "out.json",
    ),
    "experiment": (
        lambda: moved(suite, "CONFIGS", "findings", findings.main),
        "E1 --configs",
        "out/findings",
    ),
    "track": (lambda: moved(speedrun, "TRACKS", "tracks", load_a_track), "", "tracks"),
    "judge": (eval_gen.main, "--samples samples.jsonl --judge run --json out.json", "out.json"),
}
NEWEST = f"{CHECKPOINTS}/step_{STEPS:08d}"
OF_RUN = ("sample", "resume", "convert", "perplexity")
READERS = {
    f"{NEWEST}/state.json": OF_RUN,
    f"{NEWEST}/model.safetensors": ("resume",),
    f"{NEWEST}/ema.safetensors": OF_RUN,
    f"{NEWEST}/optimizer.safetensors": ("resume",),
    "run/best": ("sample best", "resume"),
    "run/metrics.jsonl": ("plot", "resume"),
    "run/lock": ("resume",),
    "run.toml": ("resume",),
    "export/config.json": ("sample export", "convert export"),
    "export/model.safetensors": ("sample export", "convert export"),
    "released.pt": ("convert release",),
    "data/meta.json": ("resume", "perplexity"),
    "data/train.bin": ("resume",),
    "data/val.bin": ("perplexity", "resume"),
    "prompts.jsonl": ("sample prompts",),
    "samples.jsonl": ("judge",),
    "orders.npy": ("orders",),
    "text.jsonl.xz": ("prepare",),
    "notes.txt.gz": ("prepare",),
    "records.jsonl": ("prepare records",),
    "questions/meta.json": ("tasks",),
    "questions/test.bin": ("tasks",),
    "questions/test.roles.bin": ("tasks",),
    "task.yaml": ("harness",),
    "rows.jsonl": ("harness",),
    "short/meta.json": ("infill",),
    "published.toml": ("published",),
    "findings/E1.toml": ("experiment",),
    "findings/common.toml": ("experiment",),
    "tracks/bytes64.toml": ("track",),
}
# What has checksums: changed bytes are noticed, or change nothing in the result.
PROTECTED = (".safetensors", ".bin", ".pt", "state.json", "export/config.json", ".xz", ".gz")
OUTPUTS = {
    "sample": ("--jsonl", "--html"),
    "perplexity": ("--json", "--per-token"),
    "judge": ("--json", "--markdown", "--plot", "--save-samples"),
    "plot": ("--plot-out",),
    "tasks": ("--json", "--html"),
    "prepare": ("--out",),
}
OPTIONS = {
    "sample": "num-samples steps length temperature top-p top-k batch-size seed mode block-size "
    "dtype weights device prompt infill group-size",
    "perplexity": "orders ensemble group num-orders target-se max-sequences batch-size split",
    "tasks": "mode steps threshold block temperature batch-size limit split weights tasks",
    "prepare": "limit val-fraction field tokenizer split source val",
    "prepare records": "block-size limit val-fraction field",
    "judge": "settings steps num-samples batch-size length words-of judge",
    "infill": "data split num-passages shortest longest temperature batch-size weights seed",
    "experiment": "seeds recipes jobs",
    "resume": "optim.lr train.batch-size train.micro-batch-size model.n-layer model.n-embd "
    "eval.sequences eval.draws order.kind data.folder train.device checkpoint.keep seed "
    "optim.warmup-steps data.random-length-prob",
}
ODD = [0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e308, 1e-320, float("nan"), float("inf"), True]
ODD += [None, "", "x", "../x", "/etc/passwd", "\0", "\ud800", "é" * 9999, [], {}, [[]], [1, "a"]]
ODD += [{"a": 1}, [0] * 999]
WORDS = [word for word in map(str, ODD) if "\0" not in word and "\ud800" not in word and word]


OWN_SETTINGS = {
    "data/published.toml": "published.toml",
    "studies/configs/findings/E1.toml": "findings/E1.toml",
    "studies/configs/findings/common.toml": "findings/common.toml",
    "studies/configs/speedrun/bytes64.toml": "tracks/bytes64.toml",
    "studies/configs/speedrun/bytes.toml": "tracks/bytes.toml",
}
TASK = """task: own
dataset_path: json
dataset_kwargs:
  data_files:
    test: "rows.jsonl"
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
metadata:
  version: 1
"""


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    kind: str
    file: str
    """The file that is changed, or that an output is to replace."""
    command: str
    how: str
    """The kind of change, or the option, or what happens."""
    numbers: int = 0
    """Seed of what else is drawn."""
    operation: int = 0
    """At which file operation it happens; 0: drawn as well."""


BYTEWISE = ("flip", "cut", "zeros", "insert", "empty", "fifo", "folder", "zero device", "noise")
TREEWISE = ("value", "drop", "rename", "deep", "crafted value", "crafted drop")
DISTURBANCES = ("die before an operation", "full disk", "kill", "interrupt", "terminate")


@st.composite
def cases(draw):
    """Mostly changed files."""
    kind = draw(st.sampled_from(["file"] * 5 + ["option"] * 2 + ["output"] * 2 + ["disturbed"]))
    file, command, how = "", "resume", ""
    if kind == "file":
        file = draw(st.sampled_from(sorted(READERS)))
        command = draw(st.sampled_from(READERS[file]))
        how = draw(
            st.sampled_from(BYTEWISE + TREEWISE * file.endswith(("json", "jsonl", "toml", "yaml")))
        )
    elif kind == "option":
        command = draw(st.sampled_from(sorted(OPTIONS)))
        how = draw(st.sampled_from(OPTIONS[command].split()))
    elif kind == "output":
        command = draw(st.sampled_from(sorted(OUTPUTS)))
        how = draw(st.sampled_from(OUTPUTS[command]))
        others = ["notes.md", "link", "/dev/null", ".out.tmp"]
        file = draw(st.sampled_from(sorted(READERS) + others))
    else:
        how = draw(st.sampled_from(DISTURBANCES))
    return Case(kind, file, command, how)


FLIPPED = {  # a file of every kind that has checksums, and who reads it
    "released.pt": "convert release",
    f"{NEWEST}/ema.safetensors": "sample",
    f"{NEWEST}/optimizer.safetensors": "resume",
    "export/model.safetensors": "sample export",
    "data/train.bin": "resume",
    "data/val.bin": "perplexity",
}


def series(operations):
    """What is tried in full; operations: how many a training run has."""
    for seed in range(200):
        for file, command in FLIPPED.items():
            yield Case("flipped byte", file, command, "one flip", seed)
    for seed in range(100):
        for how in ("kill", "interrupt"):
            yield Case(f"{how}, any time", "", "resume", how, seed)
    for number in range(1, operations + 1):
        for how in ("die before an operation", "full disk"):
            yield Case(f"{how}, each", "", "resume", how, 0, number)


def change_file(path, how, rng):
    """Change a file as a damaged disk, a careless editor or an enemy would."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) if data else 0
    match how:
        case "one flip":
            data[at] ^= rng.randrange(1, 256)
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
        case "fifo" | "folder" | "zero device":
            path.unlink()
            {"fifo": os.mkfifo, "folder": os.mkdir, "zero device": link_to_zeros}[how](path)
            return
        case _:
            data = changed_tree(path, data.decode(), how, rng).encode(errors="surrogatepass")
    path.write_bytes(data)


def link_to_zeros(path):
    """To a device of this folder's own, where whoever runs this could replace the system's."""
    zeros = Path("/dev/zero")
    if os.access("/dev", os.W_OK):
        zeros = path.with_name("zeros")
        os.mknod(zeros, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    path.symlink_to(zeros)


def changed_tree(path, text, how, rng):
    """The text of a file of settings with one value, key or level changed."""
    if path.suffix in (".toml", ".yaml"):
        sign = " = " if path.suffix == ".toml" else ": "
        lines = text.splitlines()
        places = [i for i, line in enumerate(lines) if sign in line]
        place = rng.choice(places)
        key, _, _ = lines[place].partition(sign)
        new = {"drop": "", "rename": f"{key}x{sign}1", "deep": f"{key}{sign}" + "[" * 9999}
        lines[place] = new.get(how, f"{key}{sign}{json.dumps(rng.choice(ODD))}")
        return "\n".join(lines)
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    place = rng.randrange(len(lines))
    values = json.loads(lines[place])
    spots = [(values, key) for key in values]
    for table, key in spots:  # grows as it is gone through
        if isinstance(table[key], dict):
            spots += [(table[key], inner) for inner in table[key]]
    table, key = rng.choice(spots)
    if how == "deep":
        table[key] = 0
        deep = "[" * 9999 + "]" * 9999
        lines[place] = json.dumps(values).replace(": 0", f": {deep}", 1)
        return "\n".join(lines)
    value = table.pop(key)
    if how == "rename":
        table[f"{key}s"] = value
    elif how.endswith("value"):
        table[key] = rng.choice(ODD)
    if how.startswith("crafted") and "sha256" in values:
        values["sha256"] = on_disk.digest(values)
    lines[place] = json.dumps(values)
    return "\n".join(lines)


# ---- running a script ----------------------------------------------------------------------------


@dataclass
class Ended:
    status: int
    said: str
    seconds: float
    memory: int


def run(main, arguments, folder, prepare=None, disturb=None):
    """Run a script's main in a child of this process. prepare: called in the child before.
    disturb: (seconds, signal) that it is sent."""
    said, started = folder.with_suffix(".said"), time.monotonic()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.chdir(folder)
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            sys.stdout, sys.stderr = (open(fd, "w", buffering=1) for fd in (1, 2))
            sys.argv = ["script.py", *arguments]
            if prepare:
                prepare()
            try:
                run_script(main)
            except SystemExit as stop:
                os._exit(stop.code if isinstance(stop.code, int) else 1)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        seconds = time.monotonic() - started
        if ended:
            break
        if disturb and seconds > disturb[0]:
            os.kill(child, disturb[1])
            disturb = None
        if seconds > SECONDS + 1:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    # A child that was killed at once has not opened it.
    text = said.read_text(errors="replace") if said.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), text, seconds, usage.ru_maxrss * 1024)


DONE = multiprocessing.Value("i", 0)  # file operations of the last child that counted them


def fail_at(count, fail):
    """Count the file operations that change something; let the count-th one fail."""
    DONE.value = 0

    def wrap(module, name):
        function = getattr(module, name)

        def call(*arguments, **keywords):
            if name != "open" or for_writing(*arguments, **keywords):
                DONE.value += 1
                if DONE.value == count:
                    fail()
            return function(*arguments, **keywords)

        setattr(module, name, call)

    for name in ("open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "truncate"):
        wrap(os, name)
    for module in (builtins, io):
        wrap(module, "open")
    wrap(safetensors.torch, "save_file")


def for_writing(file, mode="r", *more, **keywords):
    """Whether a call of open() writes; os.open() has flags in place of a mode."""
    if isinstance(mode, int):
        return mode & (os.O_WRONLY | os.O_RDWR)
    return file != os.devnull and not isinstance(file, int) and set(mode) & set("wax+")


def disk_is_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- the campaign --------------------------------------------------------------------------------


WHAT = ("done", "warned", "refused", "bad")  # becomes of a case

# What a kind of case does; the others disturb a training run.
KINDS = {"file": "file", "flipped byte": "file", "option": "option", "output": "output"}


class Campaign:
    """The folder that cases begin with, and what has been seen so far."""

    def __init__(self, folder, deadline, show):
        self.base, self.deadline, self.show = folder / "base", deadline, show
        self.seen, self.failures, self.devices = Counter(), [], devices()
        self.base.mkdir()
        make_data(self.base)
        os.chdir(self.base)
        self.config = tiny_config("data", "", steps=STEPS, checkpoint__interval=3)
        train.train(self.config, ALONE)
        write_config(self.config)
        convert.convert("run", Path("export"))
        self._write_release()
        Path("prompts.jsonl").write_text('{"prompt": "the "}\n{"infill": "of[MASK:3] step"}\n')
        Path("samples.jsonl").write_text('{"text": "any order"}\n{"text": "the model", "n": 1}\n')
        self._write_settings()
        np.save("orders.npy", np.stack([np.arange(16), np.arange(16)[::-1]]))
        book = json.dumps({"text": "It was a bright cold day. " * 40}) + "\n"
        # Of several streams: the end of the first is not the end of the file.
        Path("text.jsonl.xz").write_bytes(b"".join(lzma.compress(book.encode()) for _ in range(3)))
        Path("notes.txt.gz").write_bytes(gzip.compress(b"The clocks were striking. " * 40))
        record = {"prompt": "2 + 2 = ", "text": "4"}
        Path("records.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
        prepared("records", Path("questions"), Path("records.jsonl"), block_size=16, split="test")
        Path("notes.md").write_text("mine")
        Path(".out.tmp").write_text("mine")
        Path("link").symlink_to("notes.md")
        Path("run/lock").write_text("{}")
        os.chdir(ROOT)
        with self.copy(self.base) as work:  # how long an undisturbed run is, in two ways
            shutil.rmtree(work / "run")
            alone = run(train.main, ["run.toml"], work, lambda: fail_at(0, None))
            assert alone.status == 0, alone.said
        self.operations, self.seconds = DONE.value, alone.seconds
        self.results = {name: self.result_of(self.base, name) for name in COMMANDS}

    def _write_settings(self):
        """A task for the harness, and copies of the project's own settings and results."""
        for source, target in OWN_SETTINGS.items():
            Path(target).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / source, target)
        row = {"text": "the order of ", "choices": ["the model", "tokens"], "gold": 1}
        Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        Path("task.yaml").write_text(TASK)
        Path("short.txt").write_text("It is. So be it. We go. " * 99)
        prepared("text", Path("short"), Path("short.txt"), val_fraction=0.2)

    def _write_release(self):
        """The run's weights as a release of AO-GPT has them."""
        from checkpoints.released import gpt_names

        model = load("run").model
        ours = dict(model.named_parameters())
        names = gpt_names("AO-GPT", model.config.n_layer).items()
        state = {theirs: ours[name].detach().clone() for theirs, name in names if name in ours}
        state["transformer.wnonee.weight"] = state["transformer.wnonee.weight"][None]
        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
        settings = {name: getattr(model.config, name) for name in sizes}
        torch.save({"model": state, "model_args": settings, "iter_num": 3}, "released.pt")

    def result_of(self, base, name):
        """What a command leaves in an undisturbed folder."""
        with self.copy(base) as folder:
            main, arguments, _ = COMMANDS[name]
            ended = run(main, arguments.split(), folder)
            assert ended.status == 0, (name, ended.said)
            return self.result(folder, name)

    @contextlib.contextmanager
    def copy(self, base):
        folder = self.base.with_name("work")
        shutil.copytree(base, folder, symlinks=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def result(self, folder, name):
        """The part of a command's result that follows from what it reads alone."""
        path = folder / COMMANDS[name][2]
        if name.startswith("sample"):
            return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
        if name.startswith("convert"):
            return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
        if name.startswith("prepare"):
            return hashlib.sha256(path.read_bytes()).hexdigest()
        if name == "resume":
            return sorted(file.name for file in path.glob("step*")), last_weights(folder)
        if name in ("perplexity", "orders"):
            return [row["nll"] for row in json.loads(path.read_text())["results"]]
        return path.exists()

    def case(self, case, numbers=None):
        """Run a case and count what became of it."""
        case = case if numbers is None else replace(case, numbers=numbers)
        if time.monotonic() > self.deadline:
            return
        with self.copy(self.base) as folder:
            try:
                happens = getattr(self, KINDS.get(case.kind, "disturbed"))
                verdict, ended = happens(case, folder, random.Random(case.numbers))
            finally:
                Path(folder.with_suffix(".said")).unlink(missing_ok=True)
        if devices() != self.devices:
            verdict = "foreign"
        if verdict == "ok":
            text = ended.said
            if "Traceback" in text:
                verdict = "traceback"
            elif ended.status not in (0, 2):
                verdict = "crash"
            elif ended.seconds > SECONDS:
                verdict = "slow"
            elif ended.memory > BYTES:
                verdict = "memory"
        what = "bad" if verdict != "ok" else "refused" if ended.status else "done"
        if what == "done" and "warning" in ended.said:
            what = "warned"
        self.seen[case.kind, what] += 1
        if self.show:
            last = (ended.said.strip().splitlines() or [""])[-1][:300]
            print(f"{what}, {ended.seconds:.1f} s: {case}\n    {last}", flush=True)
        if verdict != "ok":
            self.failures.append((verdict, case))
            print(f"{verdict}: {case}\n{ended.said[-1500:]}", flush=True)

    def file(self, case, folder, rng):
        path = folder / case.file
        change_file(path, case.how, rng)
        main, arguments, _ = COMMANDS[case.command]
        before = tree(folder)
        ended = run(main, arguments.split(), folder)
        own = ("run/",) if case.command == "resume" else ("new", "out.", "out")
        if changed(before, tree(folder), own):
            return "foreign", ended
        noticed = ended.status == 2 or "warning" in ended.said
        if not noticed and case.file.endswith(PROTECTED) and not case.how.startswith("crafted"):
            if self.result(folder, case.command) != self.results[case.command]:
                return "silent", ended
        return "ok", ended

    def option(self, case, folder, rng):
        main, arguments, _ = COMMANDS[case.command]
        before = tree(folder)
        value = rng.choice(WORDS)
        ended = run(main, [*arguments.split(), f"--{case.how}", value], folder)
        own = ("run/",) if case.command == "resume" else ("new", "out.", "out")
        return "foreign" if changed(before, tree(folder), own) else "ok", ended

    def output(self, case, folder, rng):
        main, arguments, _ = COMMANDS[case.command]
        path = Path(case.file) if case.file.startswith("/") else folder / case.file
        overwrite = ["--overwrite"] * rng.randrange(2)
        before = tree(folder)
        ended = run(main, [*arguments.split(), case.how, str(path), *overwrite], folder)
        replaceable = ["notes.md", ".out.tmp"] + [case.file] * (case.file not in arguments)
        # What is read, or may be replaced only when that is asked for, is still there.
        beside = str(Path(case.file).with_suffix(".md"))  # the table beside --json
        new = ("out.", *([beside] if beside not in before else []))
        own = (*new, *(replaceable if overwrite else ()))
        return "foreign" if changed(before, tree(folder), own) else "ok", ended

    def disturbed(self, case, folder, rng):
        """Start the run anew, disturb it, and let it go on."""
        shutil.rmtree(folder / "run")
        prepare = disturb = None
        number = case.operation or rng.randrange(1, self.operations + 1)
        if case.how == "die before an operation":
            prepare = lambda: fail_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))  # noqa: E731
        elif case.how == "full disk":
            prepare = lambda: fail_at(number, disk_is_full)  # noqa: E731
        else:
            names = {"kill": "SIGKILL", "interrupt": "SIGINT", "terminate": "SIGTERM"}
            disturb = rng.uniform(0, self.seconds), getattr(signal, names[case.how])
        first = run(train.main, ["run.toml"], folder, prepare, disturb)
        if "Traceback" in first.said or first.status not in (0, 2, 130, -9, -15):
            return "traceback", first
        again = run(train.main, ["run.toml"], folder)
        if again.status == 0:
            os.chdir(folder)
            found = newest(self.config), metrics(self.config)
            os.chdir(self.base)
            expected = newest(self.config), metrics(self.config)
            os.chdir(ROOT)
            if not same(found, expected):
                return "lost", again
        return ("ok" if again.status == 0 else "lost"), again


def same(a, b):
    from helpers import assert_same

    try:
        assert_same(a[0], b[0])
    except AssertionError:
        return False
    return a[1] == b[1]


def last_weights(folder):
    paths = sorted((folder / CHECKPOINTS).glob("step_*/model.safetensors"))
    return hashlib.sha256(paths[-1].read_bytes()).hexdigest()


def devices():
    return [os.stat(f"/dev/{name}").st_rdev for name in ("null", "zero", "full")]


def tree(folder):
    """What lies in a folder: the contents of files, what else there is by its kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        regular = path.is_file() and not path.is_symlink()
        found[name] = path.read_bytes() if regular else path.lstat().st_mode
    return found


def changed(before, after, own):
    """Names of files that differ and are none of a script's own; links are followed by none."""
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return [name for name in names if not name.startswith(own)]


def report(campaign, arguments, seconds):
    """The table, as Markdown."""
    kinds = sorted({kind for kind, _ in campaign.seen})
    rows = [[kind, *(str(campaign.seen[kind, what]) for what in WHAT)] for kind in kinds]
    verdicts = Counter(verdict for verdict, _ in campaign.failures)
    lines = ["# Malformed files, odd options, outputs and disturbances", ""]
    seeds = " ".join(map(str, arguments.seeds))
    words = f"--cases {arguments.cases} --seeds {seeds}" + " --series" * arguments.series
    lines += [f"    PYTHONPATH=. python tests/fuzz.py {words}", ""]
    total = sum(campaign.seen.values())
    code = f"commit {commit()}, torch {torch.__version__}"
    lines += [f"{total} cases in {seconds / 60:.0f} minutes; {code}.", ""]
    lines += [
        "Done: the script did its work, and what it left was whole (of a flipped byte: it means "
        "nothing). Warned: the same, but a warning names what is wrong, as a damaged checkpoint, "
        "in whose place the one before is used. Refused: one line, status 2. A run here has "
        f"{campaign.operations} file operations that change something.",
        "",
    ]
    lines += [*markdown_table(["what", *WHAT], rows), ""]
    lines += [f"bad: {dict(verdicts) or 'none'}", ""]
    return lines + [f"- {verdict}: {case}" for verdict, case in campaign.failures]


def main():
    arguments = tyro.cli(Arguments, description=__doc__)
    check_values(arguments)
    torch.set_num_threads(1)
    matplotlib.pyplot.figure().savefig(os.devnull, format="png")  # loads the fonts
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOGPT_CACHE"] = f"{folder}/cache"
        huggingface_hub.constants.HF_HUB_OFFLINE = True  # nobody waits for a network
        started = time.monotonic()
        campaign = Campaign(Path(folder), started + 60 * arguments.minutes, arguments.show)

        of_each = hypothesis.settings(
            max_examples=arguments.cases // len(arguments.seeds),
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        for seed in arguments.seeds:
            # Hypothesis likes small numbers and repeats itself: what is drawn within a case is not
            # left to it.
            numbers = itertools.count(seed * 10**6)
            draw = hypothesis.given(cases())(lambda case: campaign.case(case, next(numbers)))  # noqa: B023
            hypothesis.seed(seed)(of_each(draw))()
        if arguments.series:
            for case in series(campaign.operations):
                campaign.case(case)
        lines = report(campaign, arguments, time.monotonic() - started)
    print(*lines, sep="\n")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return int(bool(campaign.failures))


if __name__ == "__main__":
    sys.exit(main())
