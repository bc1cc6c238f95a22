"""The memory and time of a run, from its configuration alone.

    python -m aogpt.training.plan configs/aogpt_1b.toml --world-size 8

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
from ..systems import build_model, flops_per_token, parameter_counts, system_of
from ..systems.parameters import block_matrices
from .config import Config, from_command_line, refuse
from .metrics import GPU, GPUS, TIME, in_units
from .optimizers import muon_matrices

FLOAT = 4  # bytes of weights, gradients and optimizer state
BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
DECIMAL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
COUNTS = ((1e6, "M"), (1e3, "k"), (1, ""))
# share of a GPU's memory that is left for CUDA, NCCL and gaps between tensors
RESERVED = 0.1


@dataclass(frozen=True)
class RunPlan:
    config: Config
    parameters: dict[str, int]
    micro_batch_size: int
    memory: dict[str, int]  # bytes of the fullest GPU by part
    memory_usable: int  # bytes of the GPU, less the reserve
    # sequences; fits and divides a GPU's share of the batch; 0: none
    largest_micro_batch_size: int
    tokens_per_step: int
    seconds_per_step: float
    checkpoint_bytes: int  # weights, their first average and the optimizer's state

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())


def plan_run(
    config: Config,
    world_size: int,
    gpu: GPU,
    utilisation: float = 0.4,
) -> RunPlan:
    """Plan a run on `world_size` GPUs. utilisation: assumed share of their bfloat16
    peak. Raises UserError if the batch cannot be divided among them."""
    t = config.train
    m = config.model
    model = meta_model(config)
    refuse(
        t.epochs > 0,
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
        again = 2 * block_matrices(m).all + 4 * m.n_head * m.head_dim * m.block_size
        flops += m.n_layer * again
    weights_and_average = 2 * FLOAT * count(model)
    optimizer = state_bytes(config, model, 1)["optimizer"]
    return RunPlan(
        config,
        parameters=parameter_counts(model),
        micro_batch_size=micro_size,
        memory=memory[micro_size],
        memory_usable=usable,
        largest_micro_batch_size=max(fitting, default=0),
        tokens_per_step=tokens,
        seconds_per_step=tokens * flops / (world_size * gpu.flops * utilisation),
        checkpoint_bytes=weights_and_average + optimizer,
    )


def meta_model(config: Config) -> Transformer:
    """The model on the meta device: names and shapes without weights."""
    with torch.device("meta"):
        return build_model(config.model)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def state_bytes(
    config: Config,
    model: Transformer,
    world_size: int,
) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and averages of the fullest
    process."""
    shards = world_size if config.train.parallel == "fsdp" else 1
    muon = set()
    if config.optim.kind == "muon":
        muon = {p for p, _ in muon_matrices(model)}
    weights = 0
    optimizer = 0
    for p in model.parameters():
        rows = math.ceil(len(p) / shards)  # FSDP2 shards rows
        size = FLOAT * rows * math.prod(p.shape[1:])
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
    config: Config,
    model: Transformer,
    world_size: int,
    sequences: int,
) -> dict[str, int]:
    """Bytes of the fullest process by part, with micro-batches of `sequences`."""
    t = config.train
    m = config.model
    is_sharded = t.parallel == "fsdp"
    full = FLOAT
    # of matrix products; every known GPU has bfloat16
    half = FLOAT if t.dtype == "float32" else 2
    total = count(model)
    block = count(model.blocks[0])
    outside = total - count(model.blocks)

    in_use = 0
    if half < full:  # copies of autocast
        in_use += half * (outside if is_sharded else total)
    if is_sharded:  # two blocks, gradients of one
        in_use += (3 * half + full) * block + 2 * full * outside
    accumulates = t.batch_size > sequences * world_size
    if accumulates and not t.reduce_every_micro_batch:
        if is_sharded or world_size > 1:  # gradients before reduction
            in_use += full * total

    # Bytes that a block saves per input and width.
    whole = 16 * half + 2 * full
    if m.has_adaln:
        whole += 6 * half + 2 * full
    saved_by = {"none": whole, "selective": 10 * half + full, "block": full}
    saved = saved_by[t.activation_checkpointing]
    tokens = sequences * m.block_size
    inputs = 2 if system_of(m).separate_queries else 1  # for each token
    per_block = inputs * tokens * m.n_embd
    if t.compile:
        logits = 2 * half * tokens
    else:
        logits = 12 * min(tokens, head_chunk(m.vocab_size, "cuda"))
    head = logits * m.vocab_size + full * m.n_embd * (m.vocab_size + tokens)
    recomputed = per_block * (whole - saved)
    return {
        **state_bytes(config, model, world_size),
        "in_use": in_use,
        "activations": m.n_layer * per_block * saved,
        "working": max(head, recomputed),
    }


@dataclass(frozen=True)
class PlanOptions:
    world_size: Count = 1  # GPUs, one per process
    # device name of the GPUs
    gpu: Literal[*GPUS] = "NVIDIA H100 80GB HBM3"  # type: ignore[valid-type]
    # assumed share of their bfloat16 peak
    mfu: Annotated[float, Interval(gt=0, le=1)] = 0.4


def main() -> None:
    import tyro

    o, rest = tyro.cli(
        PlanOptions,
        return_unknown_args=True,
        prog="python -m aogpt.training.plan CONFIG.toml",
        description=__doc__,
    )
    check_values(o)
    config = from_command_line(rest, __doc__)
    plan = plan_run(config, o.world_size, GPUS[o.gpu], o.mfu)
    title = f"{config.name} on {o.world_size} x {o.gpu}: {config.train.parallel}"
    show(title, plan_text(plan), sep="\n")


def plan_text(plan: RunPlan) -> str:
    steps = plan.config.train.steps
    total = plan.memory_total
    usable = plan.memory_usable
    parameters = sum(plan.parameters.values())
    conditioning = 100 * plan.parameters["conditioning"] / parameters
    seconds = plan.seconds_per_step
    fits = "fits" if total <= usable else "does NOT fit"
    rows = [
        (
            "parameters",
            in_units(parameters, COUNTS),
            f"{conditioning:.2g}% of them conditioning",
        )
    ]
    for part, size in plan.memory.items():
        rows.append((part, in_units(size, BINARY), ""))
    rows += [
        (
            "memory of a GPU",
            in_units(total, BINARY),
            f"{fits} in {in_units(usable, BINARY)}, {RESERVED:.0%} left free",
        ),
        (
            "largest micro-batch",
            f"{plan.largest_micro_batch_size}",
            f"here {plan.micro_batch_size}",
        ),
        (
            "time of a step",
            in_units(seconds, TIME),
            f"{plan.tokens_per_step:,} tokens",
        ),
        ("time of the run", in_units(seconds * steps, TIME), f"{steps:,} steps"),
        ("a checkpoint", in_units(plan.checkpoint_bytes, DECIMAL), ""),
    ]
    lines = [f"  {name:<20}{value:>12}   {note}" for name, value, note in rows]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    run_script(main)
