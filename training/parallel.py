"""One model on several processes: replicas (DDP) or shards (FSDP2), with activation checkpointing
and compilation.

The model knows nothing of all this: everything is done to it from outside. Whatever the processes,
a weight of a new model follows from the run's seed and the weight's name alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data.loader import LENGTHS
from model import AOGPT
from runtime.devices import has_compiler, pick_dtype
from runtime.errors import UserError
from runtime.processes import Processes
from training.config import Config
from variants import build_model, init_weight

# What selective activation checkpointing keeps. Which attention PyTorch calls depends on the
# device; a build has only those that it can run.
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

# ---- building ------------------------------------------------------------------------------------


def build(
    config: Config, procs: Processes, weights: Mapping[str, Tensor] | None = None, empty=False
) -> AOGPT:
    """A model on its device, cut among the processes under fsdp.

    The model begins on the meta device, without memory. Each block is made real and cut before the
    next one, so that no process ever holds more than one block in full.

    Args:
        weights: initial values by name; None: new ones.
        empty: leave the weights at 0, for a checkpoint that is about to be read.
    """
    with torch.device("meta"):
        model = build_model(config.model)
    shard = sharding(config, procs)
    for i, block in enumerate(model.blocks):
        materialize(model, f"blocks.{i}.", weights, config, procs, empty)
        checkpoint_activations(block, config)
        shard(block)
    materialize(model, "", weights, config, procs, empty)
    model.make_angles(procs.device)
    if config.model.tied_head:  # each has been given a tensor of its own
        model.head.weight = model.wte.weight
    shard(model)
    return model


@torch.no_grad()
def materialize(
    model: AOGPT,
    prefix: str,
    weights: Mapping[str, Tensor] | None,
    config: Config,
    procs: Processes,
    empty: bool,
) -> None:
    """Give memory and values to the weights below `prefix` that are still on the meta device."""
    for name, p in list(model.named_parameters()):
        if not p.is_meta or not name.startswith(prefix):
            continue
        if empty:  # drawing the weights of a large model, to be overwritten, takes minutes
            value = torch.zeros(p.shape, device=procs.device)
        elif weights is not None:
            value = weights[name].to(procs.device, p.dtype, copy=True)
        else:
            # A generator for each weight: were there one for all, a weight would depend on those
            # drawn before it. On the CPU, so that it does not depend on the device either.
            seed = hashlib.sha256(f"{config.seed} {name}".encode()).digest()[:8]
            value = torch.empty(p.shape)
            init_weight(
                config.model, name, value, torch.Generator().manual_seed(int.from_bytes(seed))
            )
            value = value.to(procs.device)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(value))


def sharding(config: Config, procs: Processes) -> Callable[[nn.Module], None]:
    """A function that cuts the weights of a module among all processes; under ddp it does nothing.

    Blocks are gathered in the precision of matrix work, which halves the traffic, what remains in
    float32 (autocast rounds it where it is used), and gradients are reduced in float32: the numbers
    are those of ddp, but for the rounding of norm weights and of the shares of mixed values.
    """
    if config.train.parallel == "ddp":
        return lambda module: None
    # FSDP2 warns that views of outputs must not be written into; nobody writes into the losses.
    warnings.filterwarnings("ignore", message="(?s).*returned a view tensor")
    mesh = init_device_mesh(procs.device.type, (procs.world_size,))
    dtype = pick_dtype(config.train.dtype, procs.device)
    block_dtype = None if dtype == torch.float32 else dtype

    def shard(module: nn.Module) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=None if isinstance(module, AOGPT) else block_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)

    return shard


def checkpoint_activations(block: nn.Module, config: Config) -> None:
    """Let the backward pass of a block compute again what train.activation_checkpointing says,
    instead of keeping it: time for memory."""
    kind = config.train.activation_checkpointing
    if kind == "none":
        return
    options = {"use_reentrant": False, "preserve_rng_state": config.model.dropout > 0}
    if kind == "selective":
        # Attention with dropout draws random numbers. Were its result kept and it not run again,
        # the dropout after it would draw those numbers instead of its own.
        kept = MATRIX_PRODUCTS if config.model.dropout else MATRIX_PRODUCTS + ATTENTION
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(kept))
    block.forward = functools.partial(checkpoint, block.forward, **options)


# ---- training ------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled(model: AOGPT, config: Config, procs: Processes):
    """Compile the model in place, if the configuration says so, and let it be compiled inside the
    block as often as it has to be: once for every shape it is called with.

    These are at most LENGTHS in training, and the whole and the last batch of an evaluation: more
    than torch.compile's default limit, past which it would silently go on uncompiled.
    """
    if not config.train.compile:
        yield
        return
    if procs.device.type == "cpu" and not has_compiler():
        raise UserError(
            "train.compile needs a C++ compiler on a CPU and there is none; pass --train.no-compile"
        )
    if isinstance(model, FSDPModule):
        # FSDP gathers the weights of a block right before it: that stays outside of compiled code.
        for block in model.blocks:
            block.compile(dynamic=False)
        model.head_loss = torch.compile(model.head_loss, dynamic=False)
    else:
        model.compile(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=4 * LENGTHS):
        yield


def replicate(model: AOGPT, procs: Processes) -> nn.Module:
    """What a training step calls: the model in DDP where processes hold replicas of it, else the
    model."""
    if procs.world_size == 1 or isinstance(model, FSDPModule):
        return model
    # Buffers follow from the configuration, so there is none to send around.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def gradient_exchange(
    model: nn.Module, last: bool, config: Config
) -> contextlib.AbstractContextManager:
    """A context for the forward and backward pass of one micro-batch. Gradients are exchanged in
    the last one of a step, or, to hold fewer of them under fsdp, in each."""
    exchange = last or config.train.reduce_every_micro_batch
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(exchange)
    elif isinstance(model, DistributedDataParallel) and not exchange:
        return model.no_sync()
    return contextlib.nullcontext()


def reshard(model: nn.Module) -> None:
    """Under fsdp, forget the weights that a forward pass has gathered; call it after passes without
    a backward, which would do so. Kept, they would hide a change of the weights from the next
    pass."""
    if isinstance(model, FSDPModule):
        model.reshard()
