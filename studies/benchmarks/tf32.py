"""bench.py tf32: what TF32 would do to the gains of order ensembles, without a GPU.

TF32, an Nvidia GPU's fast products of float32 matrices, rounds both factors to 10 bits behind the
point and adds up in float32. Here the factors are rounded in the same way (to nearest, ties away
from zero) before products in float32. Rounding that differs from member to member of an ensemble
looks like a gain, since the mean of noisy probabilities is better than each of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints.load import load
from evaluation.ensembles import cheap_gains
from evaluation.eval_sets import open_eval_set
from evaluation.text_measures import mean_and_error
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import markdown_table, provenance
from runtime.validation import Count, check_values

PRODUCTS = {  # operators, and where their factors stand
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
}


@dataclass(frozen=True, kw_only=True)
class TF32Options(OutputOptions):
    """Estimate the same gains in float32, emulated TF32 and bfloat16."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder or checkpoint."""
    dataset: str = "stories"
    ensemble: tuple[Count, ...] = (2, 8, 16)
    sequences: Count = 64
    seed: int = 0
    json: Path | None = None


class TF32(TorchDispatchMode):
    """A context in which the factors of every product of float32 matrices are rounded to TF32."""

    def __init__(self):
        super().__init__()
        self.rounded = 0  # products

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in PRODUCTS and arguments[0].dtype == torch.float32:
            self.rounded += 1
            arguments = list(arguments)
            for place in PRODUCTS[function]:
                arguments[place] = to_tf32(arguments[place])
        return function(*arguments, **(keywords or {}))


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to 10 bits behind the point, of float32's 23."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 2**12) & ~(2**13 - 1)).view(torch.float32)


def bench_tf32(a: TF32Options) -> None:
    """Run the comparison and report. Raises ValueError for a run or data that do not fit."""
    check_values(a)
    outputs = Outputs({"--json": a.json}, [a.run], a.overwrite)
    loaded = load(a.run)
    eval_set = open_eval_set(a.dataset, None, loaded, a.sequences)
    sequences = range(min(a.sequences, eval_set.dataset.num_blocks))
    tokens = eval_set.tokens(sequences)

    def gains(precision: contextlib.AbstractContextManager) -> Tensor:
        """Of every sequence and size, (N, sizes), nats per token."""
        # The plain way to compute attention is one that consists of matrix products.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), precision:
            return cheap_gains(loaded.model, tokens, a.ensemble, a.seed, 0, sequences, 16)

    exact = gains(contextlib.nullcontext())
    found = {
        "float32": exact,
        "TF32": gains(TF32()) - exact,
        "bfloat16": gains(torch.autocast("cpu", torch.bfloat16)) - exact,
    }
    lines, rows = [], []
    for i, size in enumerate(a.ensemble):
        figures = {name: mean_and_error(values[:, i].tolist()) for name, values in found.items()}
        rows.append({"size": size} | figures)
        cells = [f"{mean:.2e} +- {error:.1e}" for mean, error in figures.values()]
        lines.append([str(size), *cells])
    head = ["M", "gain in float32", "TF32 less float32", "bfloat16 less float32"]
    print("\n".join(markdown_table(head, lines)))
    origin = provenance(a, torch.float32, torch.device("cpu"))
    with outputs:
        outputs.write_json(a.json, {"rows": rows} | origin)
