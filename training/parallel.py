"""One model on several processes: replicas (DDP) or shards (FSDP2), with activation checkpointing and compilation.

The model knows nothing of all this: everything is done to it from outside. Whatever the processes, a weight of a new
model follows from the run's seed and the weight's name alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model import AOGPT, Transformer
from runtime.devices import pick_dtype
from runtime.processes import Processes
from training.config import Config

MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)


def build(
    config: Config, procs: Processes, weights: Mapping[str, Tensor] | None = None, empty=False
) -> AOGPT:
    """A model on its device, with new weights or the given ones, by name, in full; with none yet if `empty`.

    Under fsdp every process holds its part of every weight (a DTensor) and never more than one block in full.
    """
    with torch.device("meta"):
        model = AOGPT(config.model)
    shard = sharding(config, procs)
    for i, block in enumerate(model.blocks):
        fill(model, f"blocks.{i}.", weights, config, procs, empty)
        checkpoint_activations(block, config)
        shard(block)
    fill(model, "", weights, config, procs, empty)
    if config.model.tied_head:
        model.head.weight = model.wte.weight
    shard(model)
    return model


@torch.no_grad()
def fill(
    model: AOGPT,
    prefix: str,
    weights: Mapping[str, Tensor] | None,
    config: Config,
    procs,
    empty: bool,
) -> None:
    """Make real the weights below `prefix` that are still on the meta device."""
    for name, p in list(model.named_parameters()):
        if not p.is_meta or not name.startswith(prefix):
            continue
        value = torch.empty(p.shape)
        if empty:  # a checkpoint will fill it: drawing the weights of a large model takes minutes
            value = torch.zeros(p.shape, device=procs.device)
        elif weights is None:
            seed = hashlib.sha256(f"{config.seed} {name}".encode()).digest()[:8]
            model.init_weight(name, value, torch.Generator().manual_seed(int.from_bytes(seed)))
        else:
            value.copy_(weights[name])
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(value.to(procs.device)))


def sharding(config: Config, procs: Processes):
    """What cuts the weights of a module among all processes; nothing under ddp.

    Blocks are gathered in the precision of matrix work, what remains in float32 (autocast rounds it where it is used),
    and gradients are reduced in float32: the numbers of ddp, but for the rounding of norm weights.
    """
    if config.train.parallel == "ddp":
        return lambda module: None
    warnings.filterwarnings(
        "ignore", message="(?s).*returned a view tensor"
    )  # nobody writes into the losses
    mesh = init_device_mesh(procs.device.type, (procs.world_size,))
    dtype = pick_dtype(config.train.dtype, procs.device)
    low = dtype if dtype != torch.float32 else None

    def shard(module: nn.Module) -> None:
        param_dtype = None if isinstance(module, Transformer) else low
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)

    return shard


def checkpoint_activations(block: nn.Module, config: Config) -> None:
    """Let the backward pass of a block compute again what train.activation_checkpointing says."""
    kind = config.train.activation_checkpointing
    if kind == "none":
        return
    options = {"use_reentrant": False, "preserve_rng_state": config.model.dropout > 0}
    if kind == "selective":
        # Attention with dropout draws random numbers: were it not run again, the dropout after it would get others.
        kept = MATRIX_PRODUCTS if config.model.dropout else MATRIX_PRODUCTS + ATTENTION
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(kept))
    block.forward = functools.partial(checkpoint, block.forward, **options)


def compile_model(model: AOGPT) -> None:
    """Compile in place: the whole model, or under fsdp, whose gathering stays outside, its blocks and its head."""
    if not isinstance(model, FSDPModule):
        model.compile(dynamic=False)
        return
    for block in model.blocks:
        block.compile(dynamic=False)
    model.head_nll = torch.compile(model.head_nll, dynamic=False)


def replicate(model: AOGPT, procs: Processes) -> nn.Module:
    """What a training step calls: the model in DDP, where processes hold replicas of it, else the model."""
    if procs.world_size == 1 or isinstance(model, FSDPModule):
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def micro_step(model: nn.Module, last: bool, config: Config):
    """A context for one forward and backward pass: gradients are exchanged in the last one of a step, or in each."""
    exchange = last or config.train.reduce_every_micro_batch
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(exchange)
    elif isinstance(model, DistributedDataParallel) and not exchange:
        return model.no_sync()
    return contextlib.nullcontext()


def drop_gathered(model: nn.Module) -> None:
    """After a pass without a backward: forget gathered weights, which would outlive a change of the weights."""
    if isinstance(model, FSDPModule):
        model.reshard()


def like(full: Tensor, target: Tensor) -> Tensor:
    """A full tensor, cut as `target` is; every process cuts its own part."""
    if not isinstance(target, DTensor):
        return full
    full = full.to(target.device)
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
