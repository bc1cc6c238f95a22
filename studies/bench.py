"""Measure speed as ratios between systems that run side by side, and memory.

python -m studies.bench decode --size medium --batch-size 32 --steps 64 256 1024
python -m studies.bench decode --size tiny --threads 1 --lengths 256 512 1024 --group 4
python -m studies.bench decode --lengths 1024 4096 --group 4 --memory --batch-size 1 8
python -m studies.bench train --size small --batch-size 16
python -m studies.bench gpu     # against targets; the second half of make gpu
"""

from collections.abc import Iterator
from pathlib import Path

import tyro

from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.devices import pick_device
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, commit, versions
from studies.bench_common import machine
from studies.decoding_speed import DecodeOptions, bench_decode
from studies.runs import report_of
from studies.step_speed import TrainOptions, bench_train

# What others show for a plain GPT on an H100: nanochat 41 to 46%, MosaicML 39.8%.
MFU_GOAL = 0.41
TIMES_GPT = 1.05  # a training step of AO-GPT relative to the plain GPT's
TIMES_FLOOR = 2.5  # decoding relative to its arithmetic and memory traffic
# An encoder's decoding relative to AO-GPT's, at every number of steps.
TIMES_ENCODER = 25
HEAD = ["check", "target", "measured", "verdict"]


def main() -> int | None:
    commands = {"decode": DecodeOptions, "train": TrainOptions, "gpu": bench_gpu}
    chosen = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    if isinstance(chosen, DecodeOptions):
        bench_decode(chosen)
    elif isinstance(chosen, TrainOptions):
        bench_train(chosen)
    else:
        return chosen


def bench_gpu(out: Path = Path("out") / "gpu") -> int:
    """Measure training and decoding on a GPU against their targets; without a GPU, a tiny model
    without targets. The exit status is 1 if a check misses its target.

    Args:
        out: Folder of gpu.json, the checks, and of the JSON of every measurement.
    """
    device = pick_device("auto")
    has_gpu = device.type == "cuda"
    if not has_gpu:
        show(
            "There is no GPU here: a tiny model is measured on the CPU, without targets.\n"
        )
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(device),
        "rows": [],
    }
    for row in on_a_gpu(out) if has_gpu else on_a_cpu(out):
        show("  ".join(row), flush=True)
        report["rows"].append(dict(zip(HEAD, row, strict=True)))
        write_json(out / "gpu.json", report)
    verdicts = [row["verdict"] for row in report["rows"]]
    wrong = verdicts.count("FAILS")
    show(f"\n{len(verdicts)} lines, {wrong} miss their target; {out / 'gpu.json'}")
    return 1 if wrong else 0


def on_a_cpu(out: Path) -> Iterator[list[str]]:
    yield from training(out, "tiny", 2, "--no-compile")
    yield from decoding(out, "tiny", 16, "--batch-size 2 --lengths 64")


def on_a_gpu(out: Path) -> Iterator[list[str]]:
    for size in ("small", "medium"):
        for batch_size in (16, 32, 64):
            yield from training(out, size, batch_size)
    for steps in (1024, 256, 64):
        yield from decoding(out, "medium", steps, "--batch-size 32 --compile")


def measured(out: Path, name: str, words: str) -> dict[str, dict]:
    """Return the rows of a benchmark by system. It is a process of its own."""
    report = report_of("studies.bench", *words.split())
    write_json(out / f"{name}.json", report)
    return {row["system"]: row for row in report["rows"]}


def check(
    name: str,
    measured: str,
    target: str = "",
    is_met: bool | None = None,
) -> list[str]:
    """Return a line; a figure without a target has no verdict."""
    if is_met is None:
        return [name, "", measured, ""]
    return [name, target, measured, "ok" if is_met else "FAILS"]


def failure(name: str, error: UserError) -> list[str]:
    """Return the line of a measurement that failed; too large a batch misses no target."""
    said = str(error).splitlines()[-1][-200:]
    return check(name, said, "to run", None if "out of memory" in said else False)


def training(
    out: Path, size: str, batch_size: int, words: str = ""
) -> Iterator[list[str]]:
    """Yield what a training step takes. The tiny model has no targets."""
    name = f"{size}, micro-batch {batch_size}"
    words = f"train --size {size} --batch-size {batch_size} --repeats 10 {words}"
    try:
        rows = measured(out, f"train_{size}_{batch_size}", words)
    except UserError as error:
        yield failure(name, error)
        return
    for system, row in rows.items():
        yield check(f"{name}, {system}: tokens/s", f"{row['tokens_per_second']:,.0f}")
    if size == "tiny":
        return
    ratio = rows["aogpt"]["times_gpt"][0]
    mfu = rows["gpt"]["mfu"]
    title = f"{name}: step x plain GPT's"
    yield check(title, f"{ratio:.3f}", f"<= {TIMES_GPT}", ratio <= TIMES_GPT)
    title = f"{name}: MFU of the plain GPT"
    if mfu is None:
        yield check(title, "unknown")
    else:
        yield check(title, f"{mfu:.1%}", f">= {MFU_GOAL:.0%}", mfu >= MFU_GOAL)
    peak = rows["aogpt"]["peak_bytes"] / 2**30
    yield check(f"{name}: peak memory", f"{peak:.1f} GiB")


def decoding(out: Path, size: str, steps: int, words: str = "") -> Iterator[list[str]]:
    """Yield what decoding takes. The targets are Medium's."""
    name = f"decoding, {steps} steps"
    words = f"decode --size {size} --steps {steps} --systems ours encoder {words}"
    try:
        rows = measured(out, f"decode_{size}_{steps}", words)
    except UserError as error:
        yield failure(name, error)
        return
    floor = rows["ours"]["times_floor"]
    encoder = rows["encoder"]["times_ours"]
    is_fast = None
    is_faster = None
    if size == "medium":
        is_fast = floor <= TIMES_FLOOR
        is_faster = encoder >= TIMES_ENCODER
    yield check(f"{name}: ms a call", f"{rows['ours']['ms_per_call']:.3g}")
    yield check(f"{name}: x floor", f"{floor:.2f}", f"<= {TIMES_FLOOR}", is_fast)
    target = f">= {TIMES_ENCODER}"
    yield check(f"{name}: encoder x ours", f"{encoder:.1f}", target, is_faster)


if __name__ == "__main__":
    run_script(main)
