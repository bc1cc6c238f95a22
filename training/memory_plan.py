"""Before a run: the memory, time and traffic it needs, from its configuration alone; no weight is
allocated.

    python train.py configs/aogpt_7b.toml --plan --world-size 64

What one GPU holds, the fullest one, in bytes. N GPUs, T positions, n = micro-batch x T tokens; D
width, H heads, V vocabulary; f = 4 bytes (float32); h = 2 bytes in bfloat16, else 4.

    weights        f a parameter. ddp: all of them; fsdp: of each, ceil(rows / N) rows
    gradients      as many
    optimizer      AdamW: 2 f, and 4 bytes for the step of each tensor; Muon: f for its matrices
    ema            f, and f for each of optim.more_ema_decays
    in use         fsdp: gathered weights of 2 blocks (one is fetched while the other computes), h,
                   and of all that is outside blocks, f. In bfloat16 also autocast's copies of
                   linear layers, h: with fsdp of those outside blocks, with ddp of all
    in reduction   fsdp: gradients of a block, h, of all that is outside blocks, f, and of the
                   larger of the two again, f. Where several micro-batches are reduced together:
                   gradients that wait, in full, f
    activations    what autograd keeps of every token in every block, eager:
                     residuals before both norms             2 f D
                     inputs of qkv and of the MLP            2 h D, their norms' statistics 2 f
                     qkv, attention's output, log-sum-exp    4 h D + f H
                     normalised queries and keys             2 h D + 2 f H
                     mixed values (model.value_residual)     h D
                     MLP: before and after GELU              8 h D
                     adaLN: gathered gates, 1 + scale twice  4 h D
                            normed inputs, gated outputs     2 f D + 2 h D
                   which makes 22 h D + 4 f D for AO-GPT
                   selective checkpointing: the block's input, f D, results of its matrix products
                   and attention, 10 h D + f H, and of every position the adaLN table, 6 h D
                   block checkpointing: the block's input, f D
    working        the larger of what the head and one block need in passing.
                   head: gradients of its weight and its input, f D (V + n), and eager 12 bytes for
                   each logit of a chunk, compiled the logits and their gradient, 2 h n V
                   block: what checkpointing had left out of it, and the gradient that waits
                   meanwhile, f D

torch.compile keeps some 30% less of a block than autograd does; the residual stream is taken as
float32. CUDA's context, NCCL's buffers and gaps between tensors are not counted: RESERVED is left
free for them. Nor is what Muon needs in passing: two to four times f of its matrices (fsdp: of a
GPU's share), after the backward pass, when the activations are gone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval

from model import AOGPT, Block
from runtime.devices import GPU, GPUS
from runtime.errors import UserError
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import provenance
from runtime.validation import Count, Positive, check_values
from training import config as configuration
from training.config import Config
from training.optimizers import muon_matrices
from variants import build_model, flops_per_token, head_chunk, parameter_counts

FLOAT = 4  # bytes of weights, gradients and optimizer state
RESERVED = 0.1  # of a GPU's memory
INDEX_BYTES = 40  # a token: tokens, positions, order, its inverse and the loss
LARGEST_WORLD = 2**12  # GPUs, of those that `smallest_world` tries


@dataclass(frozen=True)
class RunPlan:
    """What `plan_run` found. Memory in bytes of the fullest GPU, in the parts that the top of this
    file explains."""

    config: Config
    world_size: int
    gpu: GPU
    utilisation: float
    """Assumed share of the GPUs' peak, of all operations."""
    dtype: str
    parameters: dict[str, int]
    """Of the whole model, by part."""
    memory: dict[str, int]
    memory_total: int
    memory_usable: int
    """Of the GPU, less what is reserved."""
    largest_micro_batch_size: int
    """Of those that divide a GPU's share of the batch; 0: not even 1 fits."""
    smallest_world_size: int | None
    """Power of two at which the configuration fits as it is; None: none up to LARGEST_WORLD."""
    micro_steps: int
    tokens_per_step: int
    flops_per_step: float
    """Of the model, forward and backward, as its MFU is counted."""
    flops_again_per_step: float
    """Of what is computed a second time in the backward pass."""
    seconds_per_step: float | None
    """None in float32, whose peak is not known."""
    sent_per_step: int
    """Bytes that every GPU sends to others in a step, ring algorithms."""
    checkpoint_bytes: int
    """Of one checkpoint, all its shards."""
    checkpoints: int
    """Kept at most, with the best one."""

    @property
    def fits(self) -> bool:
        return self.memory_total <= self.memory_usable


def find_gpu(name: str, memory_gib: float | None = None) -> GPU:
    """A GPU by its exact device name. memory_gib: another size than it has. Raises ValueError for
    an unknown name."""
    if name not in GPUS:
        raise UserError(f"--gpu {name!r} is not known; the known ones are {', '.join(GPUS)}")
    gpu = GPUS[name]
    return gpu if memory_gib is None else dataclasses.replace(gpu, memory_gib=memory_gib)


def plan_run(config: Config, world_size: int, gpu: GPU, utilisation: float = 0.4) -> RunPlan:
    """The plan of a run. utilisation: share of the GPUs' peak, of all operations, that the run is
    taken to reach.

    Raises ValueError for a number of GPUs that the batch cannot be cut among.
    """
    check_batch(config, world_size)
    model = meta_model(config)
    t, size, bf16 = config.train, config.model.block_size, element_bytes(config) == 2
    memory = memory_by_part(config, model, world_size)
    usable = int(gpu.memory_gib * 2**30 * (1 - RESERVED))
    tokens = t.batch_size * size
    flops = flops_per_token(config.model, size) * tokens
    again = flops_again_per_token(config) * tokens
    seconds = (flops + again) / (world_size * gpu.flops * utilisation) if bf16 else None
    weights = sum(p.numel() for p in model.parameters())
    return RunPlan(
        config,
        world_size,
        gpu,
        utilisation,
        dtype="bfloat16" if bf16 else "float32",
        parameters=parameter_counts(model),
        memory=memory,
        memory_total=sum(memory.values()),
        memory_usable=usable,
        largest_micro_batch_size=largest_micro_batch(config, model, world_size, usable),
        smallest_world_size=smallest_world(config, model, usable),
        micro_steps=t.batch_size // (t.micro_batch_size * world_size),
        tokens_per_step=tokens,
        flops_per_step=flops,
        flops_again_per_step=again,
        seconds_per_step=seconds,
        sent_per_step=sent_bytes(config, model, world_size),
        # weights, their average and the optimizer's state
        checkpoint_bytes=2 * FLOAT * weights + state_bytes(config, model, 1)["optimizer"],
        checkpoints=config.checkpoint.keep + 1,
    )


def check_batch(config: Config, world_size: int) -> None:
    """Raise ValueError for a batch that so many GPUs cannot share in whole micro-batches."""
    t = config.train
    share, left_over = divmod(t.batch_size, world_size)
    if left_over:
        near = [share * world_size, (share + 1) * world_size]
        near = " or ".join(str(size) for size in near if size)
        raise UserError(
            f"train.batch_size ({t.batch_size}) cannot be cut among {world_size} GPUs: set "
            f"train.batch_size to a multiple of them, e.g. {near}, or --world-size to a divisor "
            "of it"
        )
    if share % t.micro_batch_size:
        raise UserError(
            f"train.micro_batch_size ({t.micro_batch_size}) must divide the {share} sequences that "
            f"each of {world_size} GPUs has of a step: set it to one of "
            f"{', '.join(map(str, divisors(share)))}"
        )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def meta_model(config: Config) -> AOGPT:
    """The model without its weights: names, shapes and counts."""
    with torch.device("meta"):
        return build_model(config.model)


def element_bytes(config: Config) -> int:
    """Of matrix work; "auto" is bfloat16, which every GPU here has."""
    return FLOAT if config.train.dtype == "float32" else 2


# ---- what lasts: weights, gradients, optimizer, average ------------------------------------------


def share_of(shape: torch.Size, world_size: int) -> int:
    """Elements of a parameter on rank 0 under fsdp: ceil(rows / world_size) rows, the most that any
    rank holds."""
    return -(-shape[0] // world_size) * math.prod(shape[1:])


def state_bytes(config: Config, model: AOGPT, world_size: int) -> dict[str, int]:
    """Weights, gradients, optimizer state and averaged weights of the fullest GPU."""
    ways = world_size if config.train.parallel == "fsdp" else 1
    muon = muon_matrices(model) if config.optim.kind == "muon" else {}
    weights = optimizer = 0
    for name, p in model.named_parameters():
        size = FLOAT * share_of(p.shape, ways)
        weights += size
        # Muon keeps one average; AdamW keeps two and counts its steps, in a float32 each tensor.
        optimizer += size if name in muon else 2 * size + FLOAT
    averages = (1 + len(config.optim.more_ema_decays)) * weights
    return {"weights": weights, "gradients": weights, "optimizer": optimizer, "ema": averages}


def memory_by_part(config: Config, model: AOGPT, world_size: int) -> dict[str, int]:
    """Everything that the fullest GPU holds, bytes by part."""
    sequences = config.train.micro_batch_size
    return state_bytes(config, model, world_size) | {
        "in_use": in_use_bytes(config, model),
        "in_reduction": in_reduction_bytes(config, model, world_size),
        "activations": activation_bytes(config, sequences),
        "working": max(working_bytes(config, sequences).values()),
    }


# ---- what passes: weights in use, gradients in reduction -----------------------------------------


def block_and_outside(model: AOGPT) -> tuple[int, int]:
    """Parameters of the largest block and of everything outside of blocks: what fsdp gathers at
    once."""
    blocks = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if isinstance(module, Block)
    ]
    return max(blocks), sum(p.numel() for p in model.parameters()) - sum(blocks)


def in_use_bytes(config: Config, model: AOGPT) -> int:
    """Weights in the form in which they compute."""
    h, sharded = element_bytes(config), config.train.parallel == "fsdp"
    in_use = 0
    if sharded:  # two blocks: one is fetched while the other computes
        block, outside = block_and_outside(model)
        in_use += 2 * h * block + FLOAT * outside
    if h < FLOAT:
        # Autocast keeps its bfloat16 copies until the pass ends. fsdp gathers blocks in bfloat16
        # already, so nothing in them is copied. A set: a tied head is one parameter.
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        copied = {p for m in linear for p in m.parameters()}
        copied -= set(model.blocks.parameters()) if sharded else set()
        in_use += h * sum(p.numel() for p in copied)
    return in_use


def in_reduction_bytes(config: Config, model: AOGPT, world_size: int) -> int:
    """Gradients on their way to the other GPUs, beside those that every GPU keeps."""
    t, sharded = config.train, config.train.parallel == "fsdp"
    on_the_way = 0
    if sharded:
        block, outside = block_and_outside(model)
        on_the_way += element_bytes(config) * block + FLOAT * outside  # as the backward pass left
        on_the_way += FLOAT * max(block, outside)  # what is being reduced, in float32
    together = t.batch_size > t.micro_batch_size * world_size and not t.reduce_every_micro_batch
    if together and (sharded or world_size > 1):  # the micro-batches add up before they are reduced
        on_the_way += FLOAT * sum(p.numel() for p in model.parameters())
    return on_the_way


# ---- activations ---------------------------------------------------------------------------------


def block_bytes(config: Config, checkpointing: str) -> int:
    """Bytes of a token in a block that autograd keeps for the backward pass: the list at the top of
    this file, in the same order, and what other architectures have besides."""
    m, f, h = config.model, FLOAT, element_bytes(config)
    D, H = m.n_embd, m.n_head
    streams = 2 if m.target == "two_stream" else 1
    queries = streams - 1  # the second stream computes queries only, no keys and values
    if checkpointing == "block":
        return streams * f * D
    if checkpointing == "selective":
        # h D: attention 1, its projection 1, the layers of the MLP 4 and 1; then qkv
        return streams * (f * D + 7 * h * D + f * H) + (3 + queries) * h * D
    kept = streams * 2 * f * D  # residuals before both norms
    kept += streams * 2 * h * D  # inputs of qkv and of the MLP
    kept += streams * 2 * (f if m.norm == "rmsnorm" else 2 * f)  # LayerNorm: mean and variance
    kept += (3 + queries) * h * D  # qkv
    kept += streams * (h * D + f * H)  # attention's output, log-sum-exp
    if m.qk_norm:
        kept += (2 + queries) * f * H  # the statistics of queries and keys
    if m.qk_norm or m.rotates:
        kept += (2 + queries) * h * D  # queries and keys, normalised or rotated
    if m.value_residual:
        kept += h * D  # values, mixed
    kept += streams * 8 * h * D  # the MLP, before and after GELU
    if m.target == "adaln":
        kept += 4 * h * D  # its rows; those of the noise level are of a sequence, not a token
    if m.has_adaln:
        kept += 2 * f * D + 2 * h * D  # normed inputs, gated outputs
    if m.start == "hidden":
        kept += h * D  # attention's output, joined with that of input 0
    if m.dropout:
        kept += streams * 2 * D  # masks, a byte each
    largest_group = max(stage.group for stage in (config.objective, *config.schedule))
    if config.objective.kind == "groupwise" and largest_group > 1:
        kept += 2 * h * m.block_size  # the masks of both streams
    return kept


def activation_bytes(config: Config, sequences: int) -> int:
    """What autograd keeps of a micro-batch, until its backward pass, without the logits."""
    m, h, checkpointing = config.model, element_bytes(config), config.train.activation_checkpointing
    tokens = sequences * m.block_size
    final_norm = 2 * FLOAT * m.n_embd  # its input and its output
    if m.has_adaln:
        final_norm += FLOAT * m.n_embd
    if m.target == "adaln":
        final_norm += h * m.n_embd
    kept = tokens * (m.n_layer * block_bytes(config, checkpointing) + final_norm + INDEX_BYTES)
    if checkpointing == "selective" and m.target == "adaln":
        kept += m.n_layer * m.block_size * 6 * m.n_embd * h
    return kept


def working_bytes(config: Config, sequences: int) -> dict[str, int]:
    """What the head and the backward pass of one block need besides: {"head", "block"}; never both
    at once."""
    m, t, h = config.model, config.train, element_bytes(config)
    tokens = sequences * m.block_size
    if t.compile:
        logits = 2 * h * tokens * m.vocab_size
    else:
        logits = 12 * min(tokens, head_chunk(m.vocab_size, "cuda")) * m.vocab_size
    head = logits + FLOAT * m.n_embd * (m.vocab_size + tokens)
    block = tokens * (block_bytes(config, "none") - block_bytes(config, t.activation_checkpointing))
    if t.activation_checkpointing != "none":
        block += tokens * FLOAT * m.n_embd  # the gradient that waits while it is computed again
    gradients = tokens * m.n_embd * (FLOAT + 4 * h)  # of the residuals and inside the MLP
    return {"head": head, "block": max(block, gradients)}


# ---- what would fit ------------------------------------------------------------------------------


def fits(config: Config, model: AOGPT, world_size: int, usable: int) -> bool:
    return sum(memory_by_part(config, model, world_size).values()) <= usable


def largest_micro_batch(config: Config, model: AOGPT, world_size: int, usable: int) -> int:
    """Of the divisors of a GPU's share of the batch, the largest that fits; 0 where none does."""
    for size in reversed(divisors(config.train.batch_size // world_size)):
        train = dataclasses.replace(config.train, micro_batch_size=size)
        if fits(dataclasses.replace(config, train=train), model, world_size, usable):
            return size
    return 0


def smallest_world(config: Config, model: AOGPT, usable: int) -> int | None:
    """The smallest power of two of GPUs on which the configuration fits as it is."""
    t, size = config.train, 1
    while size <= LARGEST_WORLD:
        shares = t.batch_size % (t.micro_batch_size * size) == 0
        if shares and fits(config, model, size, usable):
            return size
        size *= 2
    return None


# ---- time and traffic ----------------------------------------------------------------------------


def flops_again_per_token(config: Config) -> float:
    """Operations of a token that the backward pass repeats: the blocks' forward pass, and the
    head's in chunks."""
    m, t = config.model, config.train
    again = 0
    if t.activation_checkpointing == "block":
        again += 24 * m.n_layer * m.n_embd**2 + 4 * m.n_layer * m.n_embd * m.block_size
    if not t.compile and t.micro_batch_size * m.block_size > head_chunk(m.vocab_size, "cuda"):
        again += 2 * m.n_embd * m.vocab_size
    return again


def sent_bytes(config: Config, model: AOGPT, world_size: int) -> int:
    """Bytes that each GPU sends in a step. ddp: an all-reduce of the gradients. fsdp: in every
    micro-batch two all-gathers of the weights of blocks and one of the others, and a reduce-scatter
    of the gradients. Gradients move once a step, or with train.reduce_every_micro_batch once a
    micro-batch. Muon gathers its updates (ddp) or sends shards to their owners and back (fsdp)."""
    t, total = config.train, sum(p.numel() for p in model.parameters())
    micro_steps = t.batch_size // (t.micro_batch_size * world_size)
    moved = FLOAT * total * (micro_steps if t.reduce_every_micro_batch else 1)
    if t.parallel == "ddp":
        moved *= 2  # an all-reduce is a reduce-scatter and an all-gather
    else:
        _, outside = block_and_outside(model)
        moved += micro_steps * (2 * element_bytes(config) * (total - outside) + FLOAT * outside)
    if config.optim.kind == "muon":
        updates = FLOAT * sum(p.numel() for p in muon_matrices(model).values())
        moved += updates if t.parallel == "ddp" else 2 * updates // world_size
    return moved * (world_size - 1) // world_size


# ---- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanArguments(OutputOptions):
    plan: bool = True
    """Print memory, time and traffic of the run and train nothing."""
    world_size: Count = 1
    """GPUs of the run, one a process."""
    gpu: str = "NVIDIA H100 80GB HBM3"
    """Their exact device name."""
    gpu_memory_gib: Positive | None = None
    """Memory of each in GiB, where it is not what this GPU has."""
    mfu: Annotated[float, Interval(gt=0, le=1)] = 0.4
    """Share of their peak that the run is taken to reach, recomputed operations included."""
    plan_json: Path | None = None
    """Also write the numbers to this file."""


def print_plan(arguments: list[str], description: str) -> int:
    """`CONFIG.toml --plan [options of PlanArguments] [--table.key value ...]`."""
    import tyro

    # tyro takes the options of a plan; what it does not know is the config's.
    what = "Print memory, time and traffic of a run and train nothing. Any key of the config can "
    what += "be overridden besides."
    options = {"prog": "train.py CONFIG.toml", "description": what, "return_unknown_args": True}
    a, rest = tyro.cli(PlanArguments, args=arguments, **options)
    check_values(a)
    outputs = Outputs({"--plan-json": a.plan_json}, rest[:1], a.overwrite)
    config = configuration.from_command_line(rest, description)
    plan = plan_run(config, a.world_size, find_gpu(a.gpu, a.gpu_memory_gib), a.mfu)
    print(plan_text(plan))
    if a.plan_json:
        plan_numbers = dataclasses.asdict(plan) | {"fits": plan.fits}
        report = {"config": plan_numbers.pop("config"), "plan": plan_numbers}
        dtype, no_device = getattr(torch, plan.dtype), torch.device("meta")
        with outputs:
            outputs.write_json(a.plan_json, report | provenance(a, dtype, no_device))
    return 0


def plan_text(plan: RunPlan) -> str:
    """The plan as lines of text: what it is of, then sections of (label, value, note)."""
    t = plan.config.train
    lines = [
        f"{plan.config.name} on {plan.world_size} x {plan.gpu.name}: {t.parallel}, {plan.dtype}, "
        f"activation checkpointing {t.activation_checkpointing}, "
        f"{'compiled' if t.compile else 'not compiled'}"
    ]
    sections = {
        "parameters, millions": parameter_rows(plan),
        "memory of one GPU, GiB": memory_rows(plan),
        "time and traffic": time_rows(plan),
    }
    for title, rows in sections.items():
        lines += ["", title]
        lines += [f"  {label:<34}{value:>12}   {note}".rstrip() for label, value, note in rows]
    return "\n".join(lines)


def parameter_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    total = sum(plan.parameters.values())
    rows = [
        (name, f"{count / 1e6:,.1f}", f"{count / total:.1%}")
        for name, count in plan.parameters.items()
    ]
    return [*rows, ("total", f"{total / 1e6:,.1f}", "")]


def memory_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    t, size = plan.config.train, plan.config.model.block_size
    sharded = t.parallel == "fsdp"
    labels = {
        "weights": "weights, float32",
        "gradients": "gradients, float32",
        "optimizer": "optimizer",
        "ema": "averaged weights (EMA)",
        "in_use": "weights in use, gathered" if sharded else "weights, bfloat16 copies",
        "in_reduction": "gradients in reduction",
        "activations": f"activations, {t.micro_batch_size} x {size} tokens",
        "working": "working memory of head or block",
    }
    rows = [(label, gib(plan.memory[part]), "") for part, label in labels.items()]
    verdict = "fits" if plan.fits else "does NOT fit"
    verdict += f" in {gib(plan.memory_usable)}, {RESERVED:.0%} left free"
    largest = f"{plan.largest_micro_batch_size}"
    rows += [
        ("total", gib(plan.memory_total), verdict),
        ("largest micro-batch that fits", largest, "of the divisors of its share"),
    ]
    if not plan.fits:
        smallest, note = plan.smallest_world_size, "at this micro-batch"
        note += "" if smallest else ": more GPUs would not help"
        rows.append(("GPUs that it fits on", f"{smallest or 'none'}", note))
    return rows


def time_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    t, size = plan.config.train, plan.config.model.block_size
    again = plan.flops_again_per_step / plan.flops_per_step
    batch = f"{plan.world_size} GPUs x {plan.micro_steps} x micro-batch "
    batch += f"{t.micro_batch_size} x {size}"
    rows = [
        ("tokens a step", f"{plan.tokens_per_step:,}", batch),
        ("operations a step", f"{plan.flops_per_step:.2e}", f"and {again:.0%} of them again"),
    ]
    if plan.seconds_per_step is None:
        rows.append(("seconds a step", "-", "no peak is known for float32"))
    else:
        mfu, daily = plan.utilisation / (1 + again), 86400 / plan.seconds_per_step
        billions = plan.tokens_per_step / 1e9
        speed = f"at {plan.utilisation:.0%} of the peak (MFU {mfu:.1%})"
        run = f"{t.steps:,} steps, {t.steps * billions:,.0f}e9 tokens"
        rows += [
            ("seconds a step", f"{plan.seconds_per_step:,.2f}", speed),
            ("steps a day", f"{daily:,.0f}", f"{daily * billions:,.1f}e9 tokens"),
            ("days of the run", f"{t.steps / daily:,.1f}", run),
        ]
    kept = f"{plan.checkpoints} kept at most: {plan.checkpoints * plan.checkpoint_bytes / 1e9:,.1f}"
    return rows + [
        ("sent by each GPU, GB a step", f"{plan.sent_per_step / 1e9:,.2f}", ""),
        ("a checkpoint, GB", f"{plan.checkpoint_bytes / 1e9:,.1f}", kept),
    ]


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
