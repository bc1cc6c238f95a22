"""Everything that is to be measured when a GPU is at hand for half an hour, in parts.

    python -m studies.gpu_day decoding                       # 9 minutes
    python -m studies.gpu_day pretrained --folder SMOLLM2 --text books.jsonl.xz    # 18
    python -m studies.gpu_day sizes --text books.jsonl.xz    # 22
    python -m studies.gpu_day training                       # 4
    python -m studies.gpu_day decoding --small               # a rehearsal on a CPU

A part is a list of jobs. Each is a process of its own with a time limit, and writes small files
to --out: JOB.log, what it measures as JSON or PNG, and JOB.done.json. Run again, a part goes on
with the jobs that are not done; training goes on from its checkpoint. A job whose time is up is
asked to stop, so that training saves its state, and counts as done if it may be cut short.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from aogpt.runtime.command_line import interrupt, run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, commit, markdown_table, versions
from aogpt.runtime.validation import Count, check_values
from studies.runs import ROOT

Part = Literal["decoding", "pretrained", "sizes", "training"]
MINUTES = {"decoding": 9, "pretrained": 18, "sizes": 22, "training": 4}
GRACE = 30  # seconds in which a job whose time is up saves its state

STEPS = ("64", "128", "256", "512", "1024")
COMPARED = ("ours", "cache-only", "speculative", "gpt", "encoder", "encoder-eager")
SIZES = {
    "30M": (8, 576, 9),
    "60M": (12, 640, 10),
    "120M": (12, 896, 14),
}  # layers, width, heads
KINDS = {  # options of the fast recipe
    "gpt": ["--model.target", "none", "--objective.kind", "ar", "--order.kind", "l2r"],
    "aogpt": [],
    "encoder": [
        *("--model.attention", "full", "--model.target", "none"),
        *("--model.mask-token", "2048", "--objective.kind", "lambda_dce"),
        *("--order.kind", "random"),
    ],
}


@dataclass(frozen=True)
class Options:
    part: Annotated[Part, tyro.conf.Positional]
    out: Path = Path("out") / "gpu_day"
    """Folder of the results, one folder in it for each part."""
    minutes: Count | None = None
    """No job runs longer than this from now; by default 9, 18, 22 and 4 minutes."""
    small: bool = False
    """A rehearsal: tiny models and few steps. Jobs have no limits besides --minutes."""
    folder: Path | None = None
    """pretrained: folder of a model in the Llama layout, with its tokenizer.json."""
    text: Path | None = None
    """pretrained, sizes: the text to train on; by default the shipped stories."""


@dataclass(frozen=True)
class Job:
    name: str
    seconds: int  # at most
    words: tuple[str, ...]  # a script (FILE.py) or module, and its arguments
    may_be_cut: bool = False  # whether what it has done by then is a result


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    check_values(options)
    # A limit on the time of this script sends SIGTERM. As with Ctrl-C, its job ends with it.
    signal.signal(signal.SIGTERM, interrupt)
    return run_part(options)


def run_part(o: Options) -> int:
    """Run what is not done yet of a part. The exit status is 1 if a job failed or had no time."""
    folder = o.out / o.part
    folder.mkdir(parents=True, exist_ok=True)
    minutes = o.minutes or MINUTES[o.part]
    ends = time.monotonic() + 60 * minutes
    made = {
        "decoding": decoding,
        "pretrained": pretrained,
        "sizes": sizes,
        "training": training,
    }
    jobs = made[o.part](o, folder.resolve())
    for job in jobs:
        file = folder / f"{job.name}.done.json"
        if file.exists() and json.loads(file.read_text())["status"] == "done":
            continue
        left = ends - time.monotonic()
        if left < min(10, job.seconds):
            show(f"{job.name}: no time is left; run the part again")
            continue
        show(f"{job.name}: {' '.join(job.words)}", flush=True)
        seconds = min(left, job.seconds)
        if o.small:
            seconds = left  # a busy CPU takes longer than a GPU
        write_json(file, run_job(job, folder / f"{job.name}.log", seconds))
    return report(jobs, folder)


def run_job(job: Job, log: Path, seconds: float) -> dict:
    """Run a job to its end, at most `seconds` long; what became of it."""
    script, *arguments = job.words
    target = [str(ROOT / script)] if script.endswith(".py") else ["-m", script]
    started = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *target, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cut = False
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            cut = True
            stop(process)
        except BaseException:  # Ctrl-C: the job is not to outlive this script
            stop(process)
            raise
    done = process.returncode == 0 or (cut and job.may_be_cut)
    return {
        "status": "done" if done else "cut" if cut else "failed",
        "seconds": round(time.monotonic() - started, 1),
        "exit_status": process.returncode,
        "command": " ".join(job.words),
        "commit": commit(),
        "versions": versions(),
        "begun_by": command(),
    }


def stop(process: subprocess.Popen) -> None:
    """Ask the processes of a job to stop, and kill them if they do not."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def report(jobs: list[Job], folder: Path) -> int:
    """Print what became of each job; 1 unless all are done."""
    lines = []
    wrong = 0
    for job in jobs:
        file = folder / f"{job.name}.done.json"
        row = (
            json.loads(file.read_text())
            if file.exists()
            else {"status": "not run", "seconds": 0}
        )
        wrong += row["status"] != "done"
        lines.append(
            [job.name, row["status"], f"{row['seconds']:.0f}", f"{job.seconds}"]
        )
    show(*markdown_table(["job", "status", "seconds", "limit"], lines), sep="\n")
    show(f"\nResults are in {folder}")
    return 1 if wrong else 0


# ---- the parts ---------------------------------------------------------------------------


def decoding(o: Options, folder: Path) -> list[Job]:
    """Are the kernels right? Then decoding against other systems, what each kernel is worth,
    and memory by length."""
    tests = ("-m", "gpu and not slow") if o.small else ("-m", "gpu")
    few = ("-k", "keys_are_split or grow_by_a_quarter") if o.small else ()
    words = (
        "pytest",
        "-q",
        "-n",
        "0",
        *tests,
        *few,
        "tests/test_kernels.py",
        "tests/test_gpu.py",
    )
    jobs = [Job("tests", 150, words)]
    size = (
        ("--size", "tiny", "--lengths", "64")
        if o.small
        else ("--size", "medium", "--compile")
    )
    steps = ("8", "16") if o.small else STEPS
    repeats = ("--repeats", "1" if o.small else "2")
    for batch_size in ("2", "1") if o.small else ("32", "1"):
        name = f"compared_{batch_size}"
        words = (
            "studies.bench",
            "decode",
            *size,
            *repeats,
            *("--batch-size", batch_size, "--draft", "16"),
            *("--systems", *COMPARED, "--steps", *steps),
            *("--json", str(folder / f"{name}.json")),
            *("--figure", str(folder / f"{name}.png")),
            *("--shares", str(folder / f"{name}_shares.json"), "--overwrite"),
        )
        jobs.append(Job(name, 200, words, may_be_cut=True))
    middle = (
        "--batch-size",
        "2" if o.small else "32",
        "--steps",
        "16" if o.small else "256",
    )
    for part in ("attention", "choice", "graphs"):
        name = f"without_{part}"
        words = (
            *("studies.bench", "decode", *size, *repeats, *middle, "--systems", "ours"),
            *("--without", part, "--json", str(folder / f"{name}.json")),
            *("--shares", str(folder / f"{name}_shares.json"), "--overwrite"),
        )
        jobs.append(Job(name, 60, words))
    lengths = ("32", "64") if o.small else ("1024", "2048", "4096", "8192")
    words = (
        *("studies.bench", "decode", *size[:2], "--lengths", *lengths, "--group", "16"),
        *(
            "--memory",
            "--repeats",
            "1",
            "--batch-size",
            "1",
            "--systems",
            "ours",
            "encoder",
        ),
        *("--json", str(folder / "memory.json"), "--overwrite"),
    )
    jobs.append(Job("memory", 120, words, may_be_cut=True))
    return jobs


def training(o: Options, folder: Path) -> list[Job]:
    """The training step beside a plain GPT's: as it is, with the fused norm, with FlashAttention 3
    and with another way to compile."""
    variants = {
        "plain": (),
        "fused_norm": ("--fused-norm",),
        "flash3": ("--flash3",),
        "max_autotune": ("--compile-mode", "max-autotune-no-cudagraphs"),
    }
    if o.small:
        size = ("--size", "tiny", "--batch-size", "2", "--no-compile", "--repeats", "1")
        variants = {"plain": ()}
    else:
        size = ("--size", "medium", "--batch-size", "64", "--repeats", "10")
    jobs = []
    for name, words in variants.items():
        file = str(folder / f"{name}.json")
        words = ("studies.bench", "train", *size, *words, "--json", file, "--overwrite")
        jobs.append(Job(name, 90, words))
    return jobs


def pretrained(o: Options, folder: Path) -> list[Job]:
    """A pretrained decoder in any order: all weights, evaluated before and after."""
    if o.folder is None and not o.small:
        raise UserError(
            "the part `pretrained` needs --folder, a model in the Llama layout"
        )
    data = folder / "data"
    tokenizer = "english" if o.folder is None else str(o.folder / "tokenizer.json")
    jobs = [prepare(o, data, tokenizer)]
    if o.folder is None:
        train = ["configs/aogpt_small_fast.toml", *SMALL_MODEL, *SMALL_VOCABULARY]
        train += ["--train.steps", "4"]
    else:
        train = ["configs/aogpt_llama.toml", "--train.init-from", str(o.folder)]
        train += ["--train.activation-checkpointing", "none", "--train.steps", "4000"]
        jobs.append(evaluate("before", str(o.folder), data, folder, o.small))
    train += run_options(folder, data, "any_order", o.small)
    train += [
        "--train.parallel",
        "ddp",
        "--optim.lr",
        "1e-4",
        "--order.l2r-prob",
        "0.2",
    ]
    jobs.append(Job("any_order", 720, ("train.py", *train), may_be_cut=True))
    jobs.append(evaluate("after", str(folder / "any_order"), data, folder, o.small))
    return jobs


def sizes(o: Options, folder: Path) -> list[Job]:
    """What any order costs by size: a GPT, AO-GPT and an encoder of three sizes with the fast
    recipe; then samples of AO-GPT and the encoder, judged by the GPT."""
    data = folder / "data"
    jobs = [prepare(o, data, "english")]
    chosen = {"30M": SIZES["30M"]} if o.small else SIZES
    for size, (layers, width, heads) in chosen.items():
        for kind, options in KINDS.items():
            name = f"{kind}_{size}"
            words = [
                "configs/aogpt_small_fast.toml",
                *options,
                *run_options(folder, data, name, o.small),
            ]
            words += SMALL_VOCABULARY
            if o.small:
                words += SMALL_MODEL
            else:
                words += ["--model.n-layer", str(layers), "--model.n-embd", str(width)]
                words += ["--model.n-head", str(heads)]
            words += ["--train.steps", "4" if o.small else "1600"]
            jobs.append(Job(name, 240, ("train.py", *words)))
            jobs.append(
                evaluate(f"{name}_ppl", str(folder / name), data, folder, o.small)
            )
    size = list(chosen)[-1]
    words = (
        *(
            "eval_gen.py",
            str(folder / f"aogpt_{size}"),
            str(folder / f"encoder_{size}"),
        ),
        *(
            "--judge",
            str(folder / f"gpt_{size}"),
            "--steps",
            *(("4",) if o.small else STEPS[::2]),
        ),
        *("--settings", "0.8,0.95", "0.9,0.95", "1,1"),
        *("--num-samples", "2" if o.small else "128"),
        *("--json", str(folder / "samples.json"), "--overwrite"),
    )
    jobs.append(Job("samples", 240, words))
    return jobs


SMALL_MODEL = ["--model.n-layer", "2", "--model.n-embd", "32", "--model.n-head", "2"]
SMALL_VOCABULARY = ["--model.vocab-size", "2112"]  # of the tokenizer `english`


def prepare(o: Options, data: Path, tokenizer: str) -> Job:
    """Tokenise the text, here rather than where it comes from."""
    words = ["data/prepare.py", "stories"]
    if o.text is not None:
        words = ["data/prepare.py", "text", "--source", str(o.text)]
        if ".jsonl" in o.text.name:
            words += ["--field", "text"]
    words += ["--tokenizer", tokenizer, "--out", str(data)]
    return Job("prepare", 240, tuple(words))


def run_options(folder: Path, data: Path, name: str, small: bool) -> list[str]:
    """Options of train.py that all runs share."""
    words = ["--name", name, "--out", str(folder), "--data.folder", str(data)]
    words += ["--model.block-size", "32" if small else "512"]
    words += ["--train.batch-size", "2" if small else "128"]
    words += ["--train.micro-batch-size", "2" if small else "32"]
    words += ["--optim.warmup-steps", "1" if small else "100"]
    words += ["--eval.sequences", "2" if small else "256"]
    return words


def evaluate(name: str, model: str, data: Path, folder: Path, small: bool) -> Job:
    words = (
        *("eval_ppl.py", model, "--datasets", str(data), "--split", "val"),
        *("--max-sequences", "2" if small else "256"),
        *("--json", str(folder / f"{name}.json"), "--overwrite"),
    )
    return Job(name, 90, words)


if __name__ == "__main__":
    run_script(main)
