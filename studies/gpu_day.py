"""Everything that is to be measured when a GPU is at hand for half an hour, in parts.

    python -m studies.gpu_day decoding                       # 9 minutes
    python -m studies.gpu_day pretrained --folder SMOLLM2 --text books.jsonl.xz    # 18
    python -m studies.gpu_day sizes --text books.jsonl.xz    # 22
    python -m studies.gpu_day training                       # 5
    python -m studies.gpu_day decoding --small               # a rehearsal on a CPU

A part is a list of jobs. Each is a process of its own with a time limit, and writes
small files to --out: JOB.log, what it measures as JSON, and JOB.done.json. Run again, a
part goes on with the jobs that are not done; training goes on from its checkpoint. A
job whose time is up is asked to stop, so that training saves its state, and counts as
done if it may be cut short.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, markdown_table, versions
from aogpt.runtime.validation import Count, check_values
from studies.runs import ROOT, commit, target_of

Part = Literal["decoding", "pretrained", "sizes", "training"]
MINUTES = {"decoding": 9, "pretrained": 18, "sizes": 22, "training": 5}
GRACE = 30  # seconds in which a job whose time is up saves its state
# The least or the largest value for a figure of a system in the JSON of a benchmark.
# What others show for a plain GPT on an H100: nanochat 41 to 46% of its peak, MosaicML
# 39.8%.
TARGETS = {
    ("aogpt", "times_gpt"): ("at most", 1.05),
    ("gpt", "mfu"): ("at least", 0.41),
    ("ours", "times_floor"): ("at most", 2.5),
    ("encoder", "times_ours"): ("at least", 25.0),
}


@dataclass(frozen=True)
class Options:
    part: Annotated[Part, tyro.conf.Positional]
    out: Path = Path("out") / "gpu_day"
    """Folder of the results, one folder in it for each part."""
    minutes: Count | None = None
    """No job runs longer than this from now; by default 9, 18, 22 and 5 minutes."""
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
    command: str  # a script (FILE.py) or module, and its arguments
    may_be_cut: bool = False  # whether what it has done by then is a result
    needs: tuple[str, ...] = ()  # the jobs that train what it evaluates

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def main() -> int:
    options = tyro.cli(with_help(Options), description=__doc__)
    check_values(options)
    # A limit on the time of this script sends SIGTERM. As with Ctrl-C, its job ends
    # with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_part(options)


def run_part(o: Options) -> int:
    """Run what is not done yet of a part. The exit status is 1 if a job failed or had
    no time."""
    folder = o.out / o.part
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * (o.minutes or MINUTES[o.part])
    jobs = jobs_of(o, shlex.quote(str(folder.resolve())))
    by_name = {job.name: job for job in jobs}
    for job in jobs:
        if is_done(job, folder):
            continue
        missing = [name for name in job.needs if not is_done(by_name[name], folder)]
        if missing:
            show(f"{job.name}: {missing[0]} is not done; run the part again")
            continue
        left = ends - time.monotonic()
        if left < min(10, job.seconds):
            show(f"{job.name}: no time is left; run the part again")
            continue
        show(f"{job.name}: {job.command}", flush=True)
        seconds = min(left, job.seconds)
        if o.small:
            seconds = left  # a busy CPU takes longer than a GPU
        row = run_job(job, folder / f"{job.name}.log", seconds)
        write_json(folder / f"{job.name}.done.json", row)
    measured = [job for job in jobs if is_done(job, folder)]
    if not o.small and (lines := targets(measured, folder)):
        head = ["job", "figure", "measured", "target", "verdict"]
        show("\n".join([*markdown_table(head, lines, left=2), ""]))
    return report(jobs, folder)


def record_of(job: Job, folder: Path) -> dict | None:
    """Return what became of a job; None if it was not run, or by another command, as in
    a rehearsal."""
    file = folder / f"{job.name}.done.json"
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    return record if record["command"] == job.command else None


def is_done(job: Job, folder: Path) -> bool:
    record = record_of(job, folder)
    return record is not None and record["status"] == "done"


def jobs_of(o: Options, folder: str) -> list[Job]:
    """Return the jobs of a part; `folder` of their results is quoted for a command
    line."""
    match o.part:
        case "decoding":
            return decoding(o, folder)
        case "pretrained":
            return pretrained(o, folder)
        case "sizes":
            return sizes(o, folder)
    return training(o, folder)


def run_job(job: Job, log: Path, seconds: float) -> dict:
    """Run a job to its end, at most `seconds` long; what became of it."""
    script, *arguments = job.words
    started = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *target_of(script), *arguments],
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
    status = "failed"
    if process.returncode == 0 or (cut and job.may_be_cut):
        status = "done"
    elif cut:
        status = "cut"
    return {
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "exit_status": process.returncode,
        "command": job.command,
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
        record = record_of(job, folder) or {"status": "not run", "seconds": 0.0}
        status = record["status"]
        seconds = record["seconds"]
        wrong += status != "done"
        lines.append([job.name, status, f"{seconds:.0f}", str(job.seconds)])
    head = ["job", "status", "seconds", "limit"]
    show("\n".join(markdown_table(head, lines)))
    show(f"\nResults are in {folder}")
    return 1 if wrong else 0


def targets(jobs: list[Job], folder: Path) -> list[list[str]]:
    """Return what benchmarks have measured beside its target."""
    lines = []
    for job in jobs:
        file = folder / f"{job.name}.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        for row in report.get("rows", ()):
            for (system, key), (word, limit) in TARGETS.items():
                if row.get("system") != system or row.get(key) is None:
                    continue
                value = row[key]
                if key == "times_gpt":
                    value = value[0]  # the median
                is_met = value <= limit if word == "at most" else value >= limit
                figure = f"{system}: {key}"
                if "steps" in row:
                    figure += f", {row['steps']} steps"
                verdict = "met" if is_met else "missed"
                cells = [job.name, figure, f"{value:.3g}", f"{word} {limit:g}"]
                lines.append([*cells, verdict])
    return lines


# ---- the parts -----------------------------------------------------------------------


def decoding(o: Options, folder: str) -> list[Job]:
    """Return the jobs that test on the GPU, decode beside other systems, leave out
    ragged attention or graphs to see what each is worth, and measure memory by
    length."""
    tests = "-m gpu"
    size = "--size medium"
    compared = f"{size} --compile --repeats 2"
    steps = "64 128 256 512 1024"
    batch_sizes = (32, 1)
    middle = "--batch-size 32 --steps 256"
    lengths = "1024 2048 4096 8192"
    if o.small:
        tests = "-m 'gpu and not slow' -k 'keys_are_split or grow_by_a_quarter'"
        size = "--size tiny"
        compared = f"{size} --lengths 64 --repeats 1"
        steps = "8 16"
        batch_sizes = (2, 1)
        middle = "--batch-size 2 --steps 16"
        lengths = "32 64"
    tests = f"pytest -q -n 0 {tests} tests/test_kernels.py tests/test_gpu.py"
    jobs = [Job("tests", 150, tests)]
    for batch_size in batch_sizes:
        name = f"compared_{batch_size}"
        command = (
            f"studies.bench decode {compared} --batch-size {batch_size} --draft 16 "
            "--systems ours cache-only speculative gpt encoder encoder-eager "
            f"--steps {steps} --json {folder}/{name}.json "
            f"--shares {folder}/{name}_shares.json --overwrite"
        )
        jobs.append(Job(name, 200, command, may_be_cut=True))
    for part in ("attention", "graphs"):
        name = f"without_{part}"
        command = (
            f"studies.bench decode {compared} {middle} --systems ours --without {part} "
            f"--json {folder}/{name}.json --shares {folder}/{name}_shares.json "
            "--overwrite"
        )
        jobs.append(Job(name, 60, command))
    memory = (
        f"studies.bench decode {size} --lengths {lengths} --group 16 --memory "
        "--repeats 1 --batch-size 1 --systems ours encoder "
        f"--json {folder}/memory.json --overwrite"
    )
    jobs.append(Job("memory", 120, memory, may_be_cut=True))
    return jobs


def training(o: Options, folder: str) -> list[Job]:
    """Return the jobs that time the training step of Small and Medium beside a plain
    GPT's."""
    sizes = {
        "small": "--size small --batch-size 32 --repeats 10",
        "medium": "--size medium --batch-size 64 --repeats 10",
    }
    if o.small:
        sizes = {"medium": "--size tiny --batch-size 2 --no-compile --repeats 1"}
    jobs = []
    for name, words in sizes.items():
        file = f"{folder}/{name}.json"
        command = f"studies.bench train {words} --json {file} --overwrite"
        jobs.append(Job(name, 90, command))
    return jobs


def pretrained(o: Options, folder: str) -> list[Job]:
    """Return the jobs that train a pretrained decoder in any order, all its weights,
    and evaluate it before and after. Raises UserError without a folder."""
    if o.folder is None and not o.small:
        raise UserError(
            "the part `pretrained` needs --folder, a model in the Llama layout"
        )
    if o.folder is None:
        jobs = [prepare(o, folder, "english")]
        start = (
            f"configs/aogpt_small_fast.toml {SMALL_MODEL} {VOCABULARY} --train.steps 4"
        )
    else:
        model = shlex.quote(str(o.folder))
        jobs = [
            prepare(o, folder, f"{model}/tokenizer.json"),
            evaluate(o, folder, "before", model),
        ]
        start = (
            f"configs/aogpt_llama.toml --train.init-from {model} "
            "--train.activation-checkpointing none --train.steps 4000"
        )
    command = (
        f"train.py {start} {run_options(o, folder, 'any_order')} --train.parallel ddp "
        "--optim.lr 1e-4 --order.l2r-prob 0.2"
    )
    jobs.append(Job("any_order", 720, command, may_be_cut=True))
    jobs.append(evaluate(o, folder, "after", f"{folder}/any_order"))
    return jobs


def sizes(o: Options, folder: str) -> list[Job]:
    """Return the jobs that show what any order costs by size: a GPT, AO-GPT and an
    encoder of three sizes with the fast recipe; then samples of AO-GPT and the encoder,
    judged by the GPT."""
    models = {
        "30M": "--model.n-layer 8 --model.n-embd 576 --model.n-head 9",
        "60M": "--model.n-layer 12 --model.n-embd 640 --model.n-head 10",
        "120M": "--model.n-layer 12 --model.n-embd 896 --model.n-head 14",
    }
    steps = 1600
    samples = "--mode mdm:steps=64 mdm:steps=256 mdm:steps=1024 --num-samples 128"
    if o.small:
        models = {"30M": SMALL_MODEL}
        steps = 4
        samples = "--mode mdm:steps=4 --num-samples 2"
    jobs = [prepare(o, folder, "english")]
    for size, model in models.items():
        for kind, options in KINDS.items():
            name = f"{kind}_{size}"
            command = (
                f"train.py configs/aogpt_small_fast.toml {options} {VOCABULARY} "
                f"{model} {run_options(o, folder, name)} --train.steps {steps}"
            )
            jobs.append(Job(name, 240, command))
            job = evaluate(o, folder, f"{name}_ppl", f"{folder}/{name}")
            jobs.append(replace(job, needs=(name,)))
    needs = tuple(f"{kind}_{size}" for kind in KINDS)
    for temperature, top_p in ((0.8, 0.95), (0.9, 0.95), (1, 1)):
        name = f"samples_{temperature}"
        command = (
            f"eval_gen.py {folder}/aogpt_{size} {folder}/encoder_{size} "
            f"--judge {folder}/gpt_{size} {samples} --temperature {temperature} "
            f"--top-p {top_p} --json {folder}/{name}.json --overwrite"
        )
        jobs.append(Job(name, 80, command, needs=needs))
    return jobs


VOCABULARY = "--model.vocab-size 2112"  # of the tokenizer `english`
SMALL_MODEL = "--model.n-layer 2 --model.n-embd 32 --model.n-head 2"
KINDS = {  # options of the fast recipe
    "gpt": "--model.target none --objective.kind ar --order.kind l2r",
    "aogpt": "",
    "encoder": (
        "--model.attention full --model.target none --model.mask-token 2048 "
        "--objective.kind lambda_dce --order.kind random"
    ),
}


def prepare(o: Options, folder: str, tokenizer: str) -> Job:
    """Return the job that tokenises the text, on the machine that trains on it."""
    source = "stories"
    if o.text is not None:
        source = f"text --source {shlex.quote(str(o.text))}"
        if ".jsonl" in o.text.name:
            source += " --field text"
    command = f"data/prepare.py {source} --tokenizer {tokenizer} --out {folder}/data"
    return Job("prepare", 240, command)


def run_options(o: Options, folder: str, name: str) -> str:
    sizes = (
        "--model.block-size 512 --train.batch-size 128 --train.micro-batch-size 32 "
        "--optim.warmup-steps 100 --eval.sequences 256"
    )
    if o.small:
        sizes = (
            "--model.block-size 32 --train.batch-size 2 --train.micro-batch-size 2 "
            "--optim.warmup-steps 1 --eval.sequences 2"
        )
    return f"--name {name} --out {folder} --data.folder {folder}/data {sizes}"


def evaluate(o: Options, folder: str, name: str, model: str) -> Job:
    sequences = 2 if o.small else 256
    command = (
        f"eval_ppl.py {model} --datasets {folder}/data --split val "
        f"--max-sequences {sequences} --json {folder}/{name}.json --overwrite"
    )
    return Job(name, 90, command)


if __name__ == "__main__":
    run_script(main)
