"""Measure speed as ratios between systems that run side by side, and memory.

python -m studies.bench decode --size medium --batch-size 32 --steps 64 256 1024
python -m studies.bench decode --size tiny --threads 1 --lengths 256 512 1024 --group 4
python -m studies.bench decode --lengths 1024 4096 --group 4 --memory --batch-size 1 8
python -m studies.bench train --size small --batch-size 16
python -m studies.bench gpu     # against targets; the second half of make gpu
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import tyro

from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.devices import pick_device
from aogpt.runtime.files import write_json
from aogpt.runtime.outputs import command, commit, versions
from studies import bench_common as common
from studies.decoding_speed import DecodeOptions, bench_decode
from studies.runs import run_alone
from studies.step_speed import TrainOptions, bench_train

# What others show for a plain GPT on an H100: nanochat 41 to 46%, MosaicML 39.8%.
MFU_GOAL = 0.41
TIMES_GPT = 1.05  # a training step of AO-GPT relative to the plain GPT's
TIMES_FLOOR = 2.5  # decoding relative to its arithmetic and memory traffic
TIMES_ENCODER = (
    25  # an encoder's decoding relative to AO-GPT's, at every number of steps
)
HEAD = ["check", "target", "measured", "verdict"]
Lines = Iterator[list[str]]


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
    rows = []
    if device.type != "cuda":
        show(
            "There is no GPU here: a tiny model is measured on the CPU, without targets.\n"
        )
    out.mkdir(parents=True, exist_ok=True)
    made = {"command": command(), "commit": commit(), "versions": versions()}
    made["machine"] = common.machine(device)
    for row in on_a_gpu(out, device) if device.type == "cuda" else on_a_cpu(out):
        rows.append(row)
        show("  ".join(row), flush=True)
        checks = [dict(zip(HEAD, row, strict=True)) for row in rows]
        write_json(out / "gpu.json", made | {"rows": checks})
    wrong = sum(row[-1] == "FAILS" for row in rows)
    show(f"\n{len(rows)} lines, {wrong} miss their target; {out / 'gpu.json'}")
    return 1 if wrong else 0


def check(
    name: str, measured: str, target: str = "", ok: bool | None = None
) -> list[str]:
    """A line; ok is None for a figure without a target."""
    return [name, target, measured, {True: "ok", False: "FAILS", None: ""}[ok]]


def measure(
    out: Path, name: str, *words: str
) -> tuple[dict[str, dict], list[list[str]]]:
    """The rows of a benchmark by system, and a line if it failed: it is a process of its own."""
    file = out / f"{name}.json"
    done = run_alone("studies.bench", *words, "--json", str(file), "--overwrite")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        ok = None if "out of memory" in said[-1] else False
        return {}, [check(name, said[-1][:200], "to run", ok)]
    return {row["system"]: row for row in json.loads(file.read_text())["rows"]}, []


def on_a_cpu(out: Path) -> Lines:
    yield from training(out, "tiny", 2, False, "--no-compile")
    yield from decoding(
        out,
        "tiny",
        16,
        "--batch-size",
        "2",
        "--lengths",
        "64",
    )


def on_a_gpu(out: Path, device: torch.device) -> Lines:
    for size, batch_size in itertools.product(("small", "medium"), (16, 32, 64)):
        yield from training(out, size, batch_size, True)
    for steps in (1024, 256, 64):
        yield from decoding(
            out,
            "medium",
            steps,
            "--batch-size",
            "32",
            "--compile",
        )


def training(
    out: Path, size: str, batch_size: int, has_targets: bool, *words: str
) -> Lines:
    """Yield what a training step takes."""
    words = "--size", size, "--batch-size", str(batch_size), "--repeats", "10", *words
    rows, failed = measure(out, f"train_{size}_{batch_size}", "train", *words)
    yield from failed
    name = f"{size}, micro-batch {batch_size}"
    for system, row in rows.items():
        yield check(f"{name}, {system}: tokens/s", f"{row['tokens_per_second']:,.0f}")
    if rows and has_targets:
        ours = rows["aogpt"]
        ratio = ours["times_gpt"][0]
        yield check(
            f"{name}: step x plain GPT's",
            f"{ratio:.3f}",
            f"<= {TIMES_GPT}",
            ratio <= TIMES_GPT,
        )
        mfu = rows["gpt"]["mfu"]
        if mfu is None:
            yield check(f"{name}: MFU of the plain GPT", "unknown")
        else:
            yield check(
                f"{name}: MFU of the plain GPT",
                f"{mfu:.1%}",
                f">= {MFU_GOAL:.0%}",
                mfu >= MFU_GOAL,
            )
        yield check(f"{name}: peak memory", f"{ours['peak_bytes'] / 2**30:.1f} GiB")


def decoding(out: Path, size: str, steps: int, *words: str) -> Lines:
    """The targets are Medium's."""
    words = ("--size", size, "--steps", str(steps), *words)
    words += ("--systems", "ours", "encoder")
    rows, failed = measure(out, f"decode_{size}_{steps}", "decode", *words)
    yield from failed
    if not rows:
        return
    name = f"decoding, {steps} steps"
    floor = rows["ours"]["times_floor"]
    encoder = rows["encoder"]["times_ours"]
    yield check(f"{name}: ms a call", f"{rows['ours']['ms_per_call']:.3g}")
    if size != "medium":
        yield check(f"{name}: x floor", f"{floor:.2f}")
        yield check(f"{name}: encoder x ours", f"{encoder:.1f}")
        return
    yield check(
        f"{name}: x floor", f"{floor:.2f}", f"<= {TIMES_FLOOR}", floor <= TIMES_FLOOR
    )
    yield check(
        f"{name}: encoder x ours",
        f"{encoder:.1f}",
        f">= {TIMES_ENCODER}",
        encoder >= TIMES_ENCODER,
    )


if __name__ == "__main__":
    run_script(main)
