"""Before a run: the memory, time and traffic it needs, from its configuration alone; no weight is allocated.

    python train.py configs/aogpt_7b.toml --plan --world-size 64

What one GPU holds, the fullest one, in bytes. N GPUs, P parameters, T positions, n = micro-batch x T tokens; D width,
H heads, V vocabulary; f = 4 bytes; h = 2 bytes in bfloat16, else 4.

    weights        f a parameter. ddp: all of them; fsdp: of each ceil(rows / N) rows, its share of dimension 0
    gradients      as many
    optimizer      AdamW: 2 f and a step of 4 bytes for each tensor; Muon: f for its matrices
    ema            f
    in use         fsdp: gathered weights, of 2 blocks (one is fetched while the other computes), h, and of all that is
                   outside blocks, f. In bfloat16 autocast's copies, h, of linear layers: fsdp: outside blocks; ddp: all
    in reduction   fsdp: gradients of a block, h, of all that is outside blocks, f, and of the larger of the two again,
                   f. Where several micro-batches are reduced together, gradients that wait, in full: f
    activations    what autograd keeps of every token in every block, eager:
                     residuals before both norms                   2 f D
                     inputs of qkv and of the MLP                  2 h D, their norms' statistics 2 f
                     qkv, attention's output and log-sum-exp       4 h D + f H
                     normalised queries and keys                   2 h D + 2 f H
                     MLP: before and after GELU                    8 h D
                     adaLN: gathered table, 1 + scale twice        8 h D
                            normed inputs, gated outputs           2 f D + 2 h D
                   which makes 26 h D + 4 f D for AO-GPT. selective: the block's input, f D, and the results of its
                   matrix products and attention, 10 h D + f H, and 6 h D a position for the table. block: f D
    working        the larger of what the head and one block need in passing. Head: the gradients of its weight and its
                   input, f D (V + n), and, eager, 12 bytes a logit of a chunk; compiled, logits and their gradient,
                   2 h n V. Block: what checkpointing had left out of it

torch.compile keeps some 30% less of a block than autograd does; the residual stream is taken as float32. CUDA's
context, NCCL's buffers and gaps between tensors are not counted: RESERVED is left free for them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from model import AOGPT, HEAD_CHUNK_ELEMENTS, Block
from runtime.devices import PEAK_BF16_FLOPS
from runtime.files import check_output, to_json
from runtime.reports import versions
from training import config as configuration
from training.config import Config
from training.optimizers import muon_matrices

FLOAT = 4  # bytes of weights, gradients and optimizer state
RESERVED = 0.1  # of a GPU's memory
INDEX_BYTES = 40  # a token: tokens, positions, order, its inverse and the loss
MEMORY_GIB = {  # what drivers report as the GPU's own, rounded down
    "NVIDIA B200": 178,
    "NVIDIA H200": 139,
    "NVIDIA H100 80GB HBM3": 79,
    "NVIDIA H100 NVL": 93,
    "NVIDIA H100 PCIe": 79,
    "NVIDIA A100-SXM4-40GB": 39,
    "NVIDIA A100-SXM4-80GB": 79,
    "NVIDIA A100-PCIE-40GB": 39,
    "NVIDIA A100 80GB PCIe": 79,
    "NVIDIA L40S": 44,
    "NVIDIA L4": 22,
    "NVIDIA A10G": 22,
    "NVIDIA A10": 22,
    "NVIDIA GeForce RTX 4090": 23,
    "NVIDIA GeForce RTX 3090": 23,
    "AMD Instinct MI300X": 191,
}


@dataclass(frozen=True)
class GPU:
    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 peak, operations per second."""


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found. Memory in bytes of the fullest GPU, in the parts that the top of this file explains."""

    name: str
    gpu: str
    world_size: int
    parallel: str
    dtype: str
    activation_checkpointing: str
    compiled: bool
    micro_batch_size: int
    micro_steps: int
    block_size: int
    parameters: dict[str, int]
    """Of the whole model, by part."""
    memory: dict[str, int]
    memory_total: int
    memory_usable: int
    """Of the GPU, less what is reserved."""
    largest_micro_batch_size: int
    """Of those that divide a GPU's share of the batch; 0: not even 1 fits."""
    smallest_world_size: int | None
    """Power of two at which the configuration fits as it is; None: none up to 4096."""
    tokens_per_step: int
    flops_per_step: float
    """Of the model, forward and backward, as its MFU is counted."""
    flops_again_per_step: float
    """Of what is computed a second time in the backward pass."""
    utilisation: float
    """Assumed share of the GPUs' peak, of all operations."""
    seconds_per_step: float | None
    """None in float32, whose peak is not known."""
    steps: int
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
    """A GPU by its exact device name. memory_gib: another size than it has. Raises ValueError for an unknown name."""
    if name not in PEAK_BF16_FLOPS:
        raise ValueError(
            f"--gpu {name!r} is not known; the known ones are {', '.join(PEAK_BF16_FLOPS)}"
        )
    memory_gib = MEMORY_GIB[name] if memory_gib is None else memory_gib
    if not 0 < memory_gib < math.inf:
        raise ValueError(f"--gpu-memory-gib is {memory_gib}; give a number of GiB above 0")
    return GPU(name, memory_gib * 2**30, PEAK_BF16_FLOPS[name])


def make_plan(config: Config, world_size: int, gpu: GPU, utilisation: float = 0.4) -> Plan:
    """The plan of a run. utilisation: share of the GPUs' peak, of all operations, that the run is taken to reach.

    Raises ValueError for a number of GPUs that the batch cannot be cut among.
    """
    check(config, world_size, utilisation)
    model = meta_model(config)
    t, size, bf16 = config.train, config.model.block_size, element_bytes(config) == 2
    memory, usable = memory_of(config, model, world_size), int(gpu.memory * (1 - RESERVED))
    tokens = t.batch_size * size
    flops = model.flops_per_token(size) * tokens
    again = flops_again_per_token(config) * tokens
    seconds = (flops + again) / (world_size * gpu.flops * utilisation) if bf16 else None
    weights = sum(p.numel() for p in model.parameters())
    return Plan(
        name=config.name,
        gpu=gpu.name,
        world_size=world_size,
        parallel=t.parallel,
        dtype="bfloat16" if bf16 else "float32",
        activation_checkpointing=t.activation_checkpointing,
        compiled=t.compile,
        micro_batch_size=t.micro_batch_size,
        micro_steps=t.batch_size // (t.micro_batch_size * world_size),
        block_size=size,
        parameters=model.num_params(),
        memory=memory,
        memory_total=sum(memory.values()),
        memory_usable=usable,
        largest_micro_batch_size=largest_micro_batch(config, model, world_size, usable),
        smallest_world_size=smallest_world(config, model, usable),
        tokens_per_step=tokens,
        flops_per_step=flops,
        flops_again_per_step=again,
        utilisation=utilisation,
        seconds_per_step=seconds,
        steps=t.steps,
        sent_per_step=sent_bytes(config, model, world_size),
        checkpoint_bytes=2 * FLOAT * weights + state_bytes(config, model, 1)["optimizer"],
        checkpoints=config.checkpoint.keep + 1,
    )


def check(config: Config, world_size: int, utilisation: float) -> None:
    t = config.train
    if world_size < 1:
        raise ValueError(f"--world-size is {world_size}; a run has at least 1 process, one a GPU")
    if not 0 < utilisation <= 1:
        raise ValueError(
            f"--mfu is {utilisation}; give a share of the GPU's peak from above 0 to 1"
        )
    if t.batch_size % world_size:
        up, down = (
            t.batch_size + -t.batch_size % world_size,
            t.batch_size - t.batch_size % world_size,
        )
        near = f"{down} or {up}" if down else f"{up}"
        raise ValueError(
            f"train.batch_size ({t.batch_size}) cannot be cut among {world_size} GPUs: set train.batch_size to a "
            f"multiple of them, e.g. {near}, or --world-size to a divisor of it"
        )
    share = t.batch_size // world_size
    if share % t.micro_batch_size:
        raise ValueError(
            f"train.micro_batch_size ({t.micro_batch_size}) must divide the {share} sequences that each of "
            f"{world_size} GPUs has of a step: set it to one of {', '.join(map(str, divisors(share)))}"
        )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def meta_model(config: Config) -> AOGPT:
    """The model without its weights: names, shapes and counts."""
    with torch.device("meta"):
        return AOGPT(config.model)


def element_bytes(config: Config) -> int:
    """Of matrix work; "auto" is bfloat16, which every GPU here has."""
    return FLOAT if config.train.dtype == "float32" else 2


# ---- memory ----------------------------------------------------------------------------------------------------------


def share_of(shape: torch.Size, world_size: int) -> int:
    """Elements of a parameter on rank 0 under fsdp: ceil(rows / world_size) rows, the most that any rank holds."""
    return -(-shape[0] // world_size) * math.prod(shape[1:])


def state_bytes(config: Config, model: AOGPT, world_size: int) -> dict[str, int]:
    """Weights, gradients, optimizer state and averaged weights of the fullest GPU."""
    ways = world_size if config.train.parallel == "fsdp" else 1
    parts = {name: share_of(p.shape, ways) for name, p in model.named_parameters()}
    weights = FLOAT * sum(parts.values())
    muon = muon_matrices(model) if config.optim.kind == "muon" else {}
    optimizer = sum(
        FLOAT * size if name in muon else 2 * FLOAT * size + FLOAT for name, size in parts.items()
    )
    return {"weights": weights, "gradients": weights, "optimizer": optimizer, "ema": weights}


def memory_of(config: Config, model: AOGPT, world_size: int) -> dict[str, int]:
    """Everything that the fullest GPU holds, bytes by part."""
    sequences = config.train.micro_batch_size
    in_use, in_reduction = passing_bytes(config, model, world_size)
    return state_bytes(config, model, world_size) | {
        "in_use": in_use,
        "in_reduction": in_reduction,
        "activations": activation_bytes(config, sequences),
        "working": max(working_bytes(config, sequences).values()),
    }


def passing_bytes(config: Config, model: AOGPT, world_size: int) -> tuple[int, int]:
    """Weights in the form in which they compute, and gradients on their way to the other GPUs."""
    h, t, sharded = element_bytes(config), config.train, config.train.parallel == "fsdp"
    total = sum(p.numel() for p in model.parameters())
    cast = {
        p: p.numel()
        for m in model.modules()
        if isinstance(m, torch.nn.Linear)
        for p in m.parameters()
    }
    inside = set(model.blocks.parameters()) if sharded else set()
    copies = h * sum(size for p, size in cast.items() if p not in inside) if h < FLOAT else 0
    together = t.batch_size > t.micro_batch_size * world_size and not t.reduce_every_micro_batch
    waiting = FLOAT * total if together and (sharded or world_size > 1) else 0
    if not sharded:
        return copies, waiting
    block, outside = groups(model)
    reduced = h * block + FLOAT * outside + FLOAT * max(block, outside)
    return 2 * h * block + FLOAT * outside + copies, reduced + waiting


def groups(model: AOGPT) -> tuple[int, int]:
    """Parameters of a block and of everything outside of blocks: what fsdp gathers at once."""
    blocks = [
        sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block)
    ]
    return max(blocks), sum(p.numel() for p in model.parameters()) - sum(blocks)


def block_bytes(config: Config, checkpointing: str) -> int:
    """Bytes of a token in a block that autograd keeps for the backward pass (the list at the top of this file)."""
    m, f, h = config.model, FLOAT, element_bytes(config)
    D, H, streams = m.n_embd, m.n_head, 2 if m.target == "two_stream" else 1
    queries = streams - 1  # the second stream computes queries only
    if checkpointing == "block":
        return streams * f * D
    if checkpointing == "selective":
        return streams * (f * D + 7 * h * D + f * H) + (3 + queries) * h * D
    kept = streams * (2 * f * D + 2 * h * D + 9 * h * D + f * H) + (3 + queries) * h * D
    kept += 2 * streams * (f if m.norm == "rmsnorm" else 2 * f)
    if m.qk_norm:
        kept += (2 + queries) * f * H
    if m.qk_norm or m.position == "rotary":
        kept += (2 + queries) * h * D
    if m.adaln:
        kept += 2 * f * D + 2 * h * D + (8 * h * D if m.target == "adaln" else 0)
    if m.start == "hidden":
        kept += h * D  # attention's output, joined with that of input 0
    if m.dropout:
        kept += 2 * streams * D
    if (
        config.objective.kind == "groupwise"
        and max(s.group for s in (config.objective, *config.schedule)) > 1
    ):
        kept += h * m.block_size  # the query stream's mask
    return kept


def activation_bytes(config: Config, sequences: int) -> int:
    """What autograd keeps of a micro-batch, until its backward pass, without the logits."""
    m, h, checkpointing = config.model, element_bytes(config), config.train.activation_checkpointing
    tokens = sequences * m.block_size
    last = (2 * FLOAT + (FLOAT if m.adaln else 0) + (h if m.target == "adaln" else 0)) * m.n_embd
    kept = tokens * (m.n_layer * block_bytes(config, checkpointing) + last + INDEX_BYTES)
    if checkpointing == "selective" and m.target == "adaln":
        kept += m.n_layer * m.block_size * 6 * m.n_embd * h
    return kept


def working_bytes(config: Config, sequences: int) -> dict[str, int]:
    """What the head and the backward pass of one block need besides: {"head", "block"}; never both at once."""
    m, t, h = config.model, config.train, element_bytes(config)
    tokens = sequences * m.block_size
    rows = min(tokens, max(256, HEAD_CHUNK_ELEMENTS // m.vocab_size))
    logits = 2 * h * tokens * m.vocab_size if t.compile else 12 * rows * m.vocab_size
    head = logits + FLOAT * m.n_embd * (m.vocab_size + tokens)
    block = tokens * (block_bytes(config, "none") - block_bytes(config, t.activation_checkpointing))
    return {"head": head, "block": max(block, tokens * m.n_embd * (FLOAT + 4 * h))}


def fits(config: Config, model: AOGPT, world_size: int, usable: int, **train) -> bool:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
    return sum(memory_of(config, model, world_size).values()) <= usable


def largest_micro_batch(config: Config, model: AOGPT, world_size: int, usable: int) -> int:
    sizes = divisors(config.train.batch_size // world_size)
    return max(
        (s for s in sizes if fits(config, model, world_size, usable, micro_batch_size=s)), default=0
    )


def smallest_world(config: Config, model: AOGPT, usable: int) -> int | None:
    t = config.train
    sizes = [2**k for k in range(13) if t.batch_size % (t.micro_batch_size * 2**k) == 0]
    return next((size for size in sizes if fits(config, model, size, usable)), None)


# ---- time and traffic ------------------------------------------------------------------------------------------------


def flops_again_per_token(config: Config) -> float:
    """Operations of a token that the backward pass repeats: the blocks' forward pass, and the head's in chunks."""
    m, t = config.model, config.train
    blocks = 24 * m.n_layer * m.n_embd**2 + 4 * m.n_layer * m.n_embd * m.block_size
    chunked = not t.compile and t.micro_batch_size * m.block_size > max(
        256, HEAD_CHUNK_ELEMENTS // m.vocab_size
    )
    head = 2 * m.n_embd * m.vocab_size if chunked else 0
    return (blocks if t.activation_checkpointing == "block" else 0) + head


def sent_bytes(config: Config, model: AOGPT, world_size: int) -> int:
    """Bytes that each GPU sends in a step. ddp: an all-reduce of the gradients. fsdp: in every micro-batch two
    all-gathers of the weights of blocks and one of the others, and a reduce-scatter of the gradients. Gradients move
    once a step, or with train.reduce_every_micro_batch once a micro-batch."""
    t, total = config.train, sum(p.numel() for p in model.parameters())
    micro_steps = t.batch_size // (t.micro_batch_size * world_size)
    moved = FLOAT * total * (micro_steps if t.reduce_every_micro_batch else 1)
    if t.parallel == "ddp":
        moved *= 2
    else:
        _, outside = groups(model)
        moved += micro_steps * (2 * element_bytes(config) * (total - outside) + FLOAT * outside)
    return moved * (world_size - 1) // world_size


# ---- the command line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanArguments:
    plan: bool = True
    """Print memory, time and traffic of the run and train nothing."""
    world_size: int = 1
    """GPUs of the run, one a process."""
    gpu: str = "NVIDIA H100 80GB HBM3"
    """Their exact device name."""
    gpu_memory_gib: float | None = None
    """Memory of each in GiB, where it is not what this GPU has."""
    mfu: float = 0.4
    """Share of their peak that the run is taken to reach, recomputed operations included."""
    plan_json: Path | None = None
    """Also write the numbers to this file."""


def print_plan(arguments: list[str], description: str) -> int:
    """`CONFIG.toml --plan [options of PlanArguments] [--table.key value ...]`."""
    import tyro

    what = "Print memory, time and traffic of a run and train nothing. Any key of the config can be overridden besides."
    options = {"prog": "train.py CONFIG.toml", "description": what, "return_unknown_args": True}
    a, rest = tyro.cli(PlanArguments, args=arguments, **options)
    check_output(a.plan_json, "--plan-json")
    config = configuration.from_command_line(rest, description)
    plan = make_plan(config, a.world_size, find_gpu(a.gpu, a.gpu_memory_gib), a.mfu)
    print(table(plan))
    if a.plan_json:
        facts = dataclasses.asdict(plan) | {"fits": plan.fits}
        report = {"plan": facts, "config": configuration.to_dict(config), "versions": versions()}
        a.plan_json.write_text(to_json(report, indent=2) + "\n")
    return 0


def table(plan: Plan) -> str:
    """The plan as lines of text."""
    head = f"{plan.name} on {plan.world_size} x {plan.gpu}: {plan.parallel}, {plan.dtype}, "
    head += f"activation checkpointing {plan.activation_checkpointing}, {'' if plan.compiled else 'not '}compiled"
    total = sum(plan.parameters.values())
    lines = [head, "", "parameters, millions"]
    lines += [
        _row(name, f"{n / 1e6:,.1f}", f"{n / total:.1%}") for name, n in plan.parameters.items()
    ]
    lines += [_row("total", f"{total / 1e6:,.1f}"), "", "memory of one GPU, GiB"]
    lines += [_row(label, _gib(plan.memory[name])) for name, label in memory_labels(plan).items()]
    verdict = "fits" if plan.fits else "does NOT fit"
    lines += [
        _row(
            "total",
            _gib(plan.memory_total),
            f"{verdict} in {_gib(plan.memory_usable)}, {RESERVED:.0%} left free",
        )
    ]
    lines += [
        _row(
            "largest micro-batch that fits",
            f"{plan.largest_micro_batch_size}",
            "of the divisors of its share",
        )
    ]
    if not plan.fits:
        note = (
            "at this micro-batch"
            if plan.smallest_world_size
            else "at this micro-batch: more GPUs would not help"
        )
        lines += [_row("GPUs that it fits on", f"{plan.smallest_world_size or 'none'}", note)]
    return "\n".join(lines + ["", *time_lines(plan)])


def memory_labels(plan: Plan) -> dict[str, str]:
    sharded = plan.parallel == "fsdp"
    return {
        "weights": "weights, float32",
        "gradients": "gradients, float32",
        "optimizer": "optimizer",
        "ema": "averaged weights (EMA)",
        "in_use": "weights in use, gathered" if sharded else "weights, bfloat16 copies",
        "in_reduction": "gradients in reduction",
        "activations": f"activations, {plan.micro_batch_size} x {plan.block_size} tokens",
        "working": "working memory of head or block",
    }


def time_lines(plan: Plan) -> list[str]:
    again = plan.flops_again_per_step / plan.flops_per_step
    shape = f"{plan.world_size} GPUs x {plan.micro_steps} x micro-batch {plan.micro_batch_size} x {plan.block_size}"
    lines = ["time and traffic", _row("tokens a step", f"{plan.tokens_per_step:,}", shape)]
    lines += [
        _row("operations a step", f"{plan.flops_per_step:.2e}", f"and {again:.0%} of them again")
    ]
    if plan.seconds_per_step is None:
        lines += [_row("seconds a step", "-", "no peak is known for float32")]
    else:
        mfu, daily = plan.utilisation / (1 + again), 86400 / plan.seconds_per_step
        speed = f"at {plan.utilisation:.0%} of the peak (MFU {mfu:.1%})"
        lines += [_row("seconds a step", f"{plan.seconds_per_step:,.2f}", speed)]
        lines += [
            _row(
                "steps a day",
                f"{daily:,.0f}",
                f"{daily * plan.tokens_per_step / 1e9:,.1f}e9 tokens",
            )
        ]
        run = f"{plan.steps:,} steps, {plan.steps * plan.tokens_per_step / 1e9:,.0f}e9 tokens"
        lines += [_row("days of the run", f"{plan.steps / daily:,.1f}", run)]
    lines += [_row("sent by each GPU, GB a step", f"{plan.sent_per_step / 1e9:,.2f}")]
    kept = f"{plan.checkpoints} kept at most: {plan.checkpoints * plan.checkpoint_bytes / 1e9:,.1f}"
    return lines + [_row("a checkpoint, GB", f"{plan.checkpoint_bytes / 1e9:,.1f}", kept)]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def _row(label: str, value: str, note: str = "") -> str:
    return f"  {label:<34}{value:>12}   {note}".rstrip()
