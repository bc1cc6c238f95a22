"""The memory and time of a run, from its configuration alone.

    python -m aogpt.training.plan configs/aogpt_7b.toml --world-size 64

Options of train.py, such as --train.parallel fsdp, override keys of the config.
Memory is that of the fullest process. Exact: weights, gradients, optimizer, ema.
Estimated: in_use (cast or gathered weights, unreduced gradients), activations
(saved for the backward pass), working (the head, or a recomputed block)."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval

from ..model import Transformer, head_chunk
from ..runtime.command_line import run_script, show
from ..runtime.validation import Count, check_values
from ..systems import build_model, flops_per_token, parameter_counts
from ..systems.parameters import block_matrices
from .config import Config, from_command_line, refuse
from .metrics import GPU, GPUS, TIME, in_units
from .optimizers import muon_matrices

FLOAT = 4  # bytes of weights, gradients and optimizer state
BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
DECIMAL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
COUNTS = ((1e6, "M"), (1e3, "k"), (1, ""))
RESERVED = (
    0.1  # share of a GPU's memory that is left for CUDA, NCCL and gaps between tensors
)


@dataclass(frozen=True)
class RunPlan:
    config: Config
    parameters: dict[str, int]
    micro_batch_size: int
    memory: dict[str, int]  # bytes of the fullest GPU by part
    memory_usable: int  # bytes of the GPU, less the reserve
    largest_micro_batch_size: (
        int  # sequences; fits and divides a GPU's share of the batch; 0: none
    )
    tokens_per_step: int
    seconds_per_step: float
    checkpoint_bytes: int  # weights, their first average and the optimizer's state

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())


def plan_run(
    config: Config, world_size: int, gpu: GPU, utilisation: float = 0.4
) -> RunPlan:
    """Plan a run on `world_size` GPUs. utilisation: assumed share of their bfloat16 peak. Raises
    UserError if the batch cannot be divided among them."""
    t = config.train
    m = config.model
    model = meta_model(config)
    refuse(
        t.epochs,
        "a plan does not read the data: give --train.steps instead of train.epochs",
    )
    micro_size = config.micro_batch_size(world_size)
    share = t.batch_size // world_size
    usable = int(gpu.memory_gib * 2**30 * (1 - RESERVED))
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    memory = {size: memory_of(config, model, world_size, size) for size in sizes}
    fitting = [size for size in sizes if sum(memory[size].values()) <= usable]
    tokens = t.batch_size * m.block_size
    flops = flops_per_token(m, m.block_size)
    if t.activation_checkpointing == "block":  # the forward pass of the blocks again
        again = 2 * block_matrices(m)[0] + 4 * m.n_head * m.head_dim * m.block_size
        flops += m.n_layer * again
    return RunPlan(
        config,
        parameters=parameter_counts(model),
        micro_batch_size=micro_size,
        memory=memory[micro_size],
        memory_usable=usable,
        largest_micro_batch_size=max(fitting, default=0),
        tokens_per_step=tokens,
        seconds_per_step=tokens * flops / (world_size * gpu.flops * utilisation),
        checkpoint_bytes=2 * FLOAT * count(model)
        + state_bytes(config, model, 1)["optimizer"],
    )


def meta_model(config: Config) -> Transformer:
    """The model on the meta device: names and shapes without weights."""
    with torch.device("meta"):
        return build_model(config.model)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def state_bytes(config: Config, model: Transformer, world_size: int) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and averages of the fullest process."""
    shards = world_size if config.train.parallel == "fsdp" else 1
    muon = set()
    if config.optim.kind == "muon":
        muon = {p for p, _ in muon_matrices(model)}
    weights = optimizer = 0
    for p in model.parameters():
        size = (
            FLOAT * -(-len(p) // shards) * math.prod(p.shape[1:])
        )  # FSDP2 shards rows
        weights += size
        optimizer += size if p in muon else 2 * size + FLOAT  # AdamW counts its steps
    averages = (1 + len(config.optim.more_ema_decays)) * weights
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": optimizer,
        "ema": averages,
    }


def memory_of(
    config: Config, model: Transformer, world_size: int, sequences: int
) -> dict[str, int]:
    """Bytes of the fullest process by part, with micro-batches of `sequences`."""
    t = config.train
    m = config.model
    f = FLOAT
    fsdp = config.train.parallel == "fsdp"
    h = (
        f if t.dtype == "float32" else 2
    )  # of matrix products; every known GPU has bfloat16
    total = count(model)
    block = count(model.blocks[0])
    outside = count(model) - count(model.blocks)
    in_use = (outside if fsdp else total) * h * (h < f)  # copies of autocast
    in_use += fsdp * (
        (3 * h + f) * block + 2 * f * outside
    )  # two blocks, gradients of one
    together = t.batch_size > sequences * world_size and not t.reduce_every_micro_batch
    in_use += (
        f * total * (together and (fsdp or world_size > 1))
    )  # gradients before reduction

    tokens = sequences * m.block_size
    whole = (
        16 * h + 2 * f + m.has_adaln * (6 * h + 2 * f)
    )  # bytes of a block per token and D
    saved = {"none": whole, "selective": 10 * h + f, "block": f}[
        t.activation_checkpointing
    ]
    inputs = 2 if m.target in ("two_stream", "mask_query") else 1  # for each token
    per_block = inputs * tokens * m.n_embd
    logits = (
        2 * h * tokens
        if t.compile
        else 12 * min(tokens, head_chunk(m.vocab_size, "cuda"))
    )
    head = logits * m.vocab_size + f * m.n_embd * (m.vocab_size + tokens)
    activations = m.n_layer * per_block * saved
    working = max(head, per_block * (whole - saved))
    estimated = {"in_use": in_use, "activations": activations, "working": working}
    return state_bytes(config, model, world_size) | estimated


@dataclass(frozen=True)
class PlanOptions:
    world_size: Count = 1  # GPUs, one per process
    gpu: Literal[*GPUS] = "NVIDIA H100 80GB HBM3"  # device name of the GPUs
    mfu: Annotated[float, Interval(gt=0, le=1)] = (
        0.4  # assumed share of their bfloat16 peak
    )


def main() -> None:
    import tyro

    names = {
        "prog": "python -m aogpt.training.plan CONFIG.toml",
        "description": __doc__,
    }
    o, rest = tyro.cli(PlanOptions, return_unknown_args=True, **names)
    check_values(o)
    config = from_command_line(rest, __doc__)
    plan = plan_run(config, o.world_size, GPUS[o.gpu], o.mfu)
    title = f"{config.name} on {o.world_size} x {o.gpu}: {config.train.parallel}"
    show(title, plan_text(plan), sep="\n")


def plan_text(plan: RunPlan) -> str:
    t = plan.config.train
    total = plan.memory_total
    usable = plan.memory_usable
    verdict = (
        f"{'fits' if total <= usable else 'does NOT fit'} in {in_units(usable, BINARY)}"
    )
    here = f"here {plan.micro_batch_size}"
    parameters = sum(plan.parameters.values())
    step = plan.seconds_per_step
    conditioning = f"{100 * plan.parameters['conditioning'] / parameters:.2g}% of them conditioning"
    rows = [("parameters", in_units(parameters, COUNTS), conditioning)]
    rows += [(part, in_units(n, BINARY), "") for part, n in plan.memory.items()]
    rows += [
        (
            "memory of a GPU",
            in_units(total, BINARY),
            f"{verdict}, {RESERVED:.0%} left free",
        ),
        ("largest micro-batch", f"{plan.largest_micro_batch_size}", here),
        ("time of a step", in_units(step, TIME), f"{plan.tokens_per_step:,} tokens"),
        ("time of the run", in_units(step * t.steps, TIME), f"{t.steps:,} steps"),
        ("a checkpoint", in_units(plan.checkpoint_bytes, DECIMAL), ""),
    ]
    return "\n".join(f"  {a:<20}{b:>12}   {note}".rstrip() for a, b, note in rows)


if __name__ == "__main__":
    run_script(main)
