"""Assemble every Triton kernel for a GPU that need not be here, and print a line of
JSON each; or make a table of such lines.

    python -m studies.assemble --gpu 90
    python -m studies.assemble --table results/gpu/kernels.jsonl

ptxas and cuobjdump are those of Triton's wheel. spilled_bytes: what a thread keeps in
memory because the registers do not suffice."""

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import tyro
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aogpt.runtime.command_line import show
from aogpt.runtime.outputs import markdown_table
from aogpt.sampling import attention_kernel

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Type of numbers, width of a head, queries of a tile, query heads of a key head,
# splits.
ATTENTION = [
    ("bf16", 64, 16, 1, 1),
    ("bf16", 64, 64, 1, 1),
    ("bf16", 64, 16, 1, 8),
    ("bf16", 96, 16, 1, 1),
    ("bf16", 128, 64, 4, 1),
    ("bf16", 128, 64, 1, 8),
    ("fp16", 16, 16, 3, 1),
    ("fp32", 64, 16, 1, 1),
    ("fp32", 128, 16, 1, 1),
]


def assemble(
    name: str, kernel, types: dict, constants: dict, gpu: int, **options
) -> None:
    """types: of the arguments that are no constants."""
    signature = {
        argument: types.get(argument, "constexpr") for argument in kernel.arg_names
    }
    aligned = {}
    for index, argument in enumerate(kernel.arg_names):
        if types.get(argument, "").startswith("*") or "_" in argument:
            if argument in types:
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    kernel_binary = triton.compile(
        source, target=GPUTarget("cuda", gpu, 32), options=options
    )
    binary = kernel_binary.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        words = [TOOL, "--dump-resource-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    row = {
        "kernel": name,
        "gpu": f"sm_{gpu}",
        "bytes": len(binary),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "spilled_bytes": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "shared_bytes": kernel_binary.metadata.shared,
    }
    show(json.dumps(row))


def assemble_attention(gpu: int) -> None:
    for number, width, queries, group, splits in ATTENTION:
        types = {
            "q": f"*{number}",
            "k": f"*{number}",
            "v": f"*{number}",
            "keys": f"*{number}",
            "values": f"*{number}",
            "rows": "*i64",
            "starts": "*i64",
            "ends": "*i64",
            "q_input": "i32",
            "q_head": "i32",
            "k_input": "i32",
            "k_head": "i32",
            "v_input": "i32",
            "v_head": "i32",
            "cache_row": "i32",
            "cache_slot": "i32",
            "cache_head": "i32",
            "N": "i32",
            "B": "i32",
            "out": f"*{number}" if splits == 1 else "*fp32",
            "log_sums": "*fp32",
            "scale": "fp32",
        }
        dtype = DTYPES[number]
        tile_k, warps, stages, precision = attention_kernel.pick_tile(
            dtype, width, queries
        )
        constants = {
            "HIDDEN": 1,
            "HEADS": 12,
            "GROUP": group,
            "D": width,
            "WIDTH": triton.next_power_of_2(width),
            "TILE_Q": queries,
            "TILE_K": tile_k,
            "SPLITS": splits,
            "ROWS": 64,
            "PRECISION": precision,
        }
        name = f"attention, {number}, width {width}, {queries} queries, {splits} splits"
        assemble(
            name,
            attention_kernel._attend,
            types,
            constants,
            gpu,
            num_warps=warps,
            num_stages=stages,
        )


def assemble_merge(gpu: int) -> None:
    for width in (64, 96):
        types = {"parts": "*fp32", "log_sums": "*fp32", "out": "*bf16", "n": "i32"}
        constants = {"D": width, "WIDTH": triton.next_power_of_2(width), "SPLITS": 8}
        assemble(
            f"merging, width {width}", attention_kernel._merge, types, constants, gpu
        )


def table(rows: list[dict]) -> list[str]:
    """Return the lines of a table with a line for each kernel, in bytes, the GPUs side
    by side."""
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    kernels: dict[str, dict[str, dict]] = {}
    for row in rows:
        kernels.setdefault(row["kernel"], {})[row["gpu"]] = row
    head = ["kernel"]
    for gpu in gpus:
        head += [f"{gpu}: registers", "spilled", "shared memory"]
    cells = []
    for kernel, by_gpu in kernels.items():
        cells.append([kernel])
        for gpu in gpus:
            row = by_gpu[gpu]
            cells[-1] += [
                str(row["registers"]),
                str(row["spilled_bytes"]),
                f"{row['shared_bytes']:,}",
            ]
    return markdown_table(head, cells, left=1)


@dataclass
class Arguments:
    gpu: int | None = None
    """90: an H100, 80: an A100."""
    table: Path | None = None
    """Print the table of a file of lines."""


def main():
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.table is not None:
        lines = arguments.table.read_text().splitlines()
        show("\n".join(table([json.loads(line) for line in lines])))
    if arguments.gpu is not None:
        os.environ.pop("TRITON_INTERPRET", None)
        assemble_attention(arguments.gpu)
        assemble_merge(arguments.gpu)


if __name__ == "__main__":
    main()
