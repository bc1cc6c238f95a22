"""One model on several processes: replicas (DDP) or shards (FSDP2), with activation
checkpointing and compilation, all from outside the model."""

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from ..model import Transformer
from ..runtime.devices import has_compiler
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..systems import build_model, init_weight
from .config import Config

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# What selective activation checkpointing saves: matrix products, and attention, which
# has an operation of its own on every device.
MOST_SHAPES = 32  # of compiled code
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.aten._scaled_dot_product_attention_math_for_mps.default,
)


def build(
    config: Config,
    procs: Processes,
    weights: dict[str, Tensor] | None = None,
    empty: bool = False,
) -> Transformer:
    """Return a model on its device. Under fsdp it is sharded block by block, so that no
    process holds more than one block in full. weights: initial values by name, which
    are used up; None: random, or with `empty` zeros to load a checkpoint into."""
    with torch.device("meta"):
        model = build_model(config.model)
    shard = None
    if config.train.parallel == "fsdp":
        shard = sharding(config, procs)

    def initial_value(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if weights is not None:
            return weights.pop(name).detach().to(dtype)
        value = torch.zeros(shape)
        if not empty:
            # From a generator per weight, on the CPU: the same on any device.
            digest = hashlib.sha256(f"{config.seed} {name}".encode()).digest()
            seed = int.from_bytes(digest[:8])
            generator = torch.Generator().manual_seed(seed)
            init_weight(model, name, value, generator)
        return value

    @torch.no_grad()
    def materialize(prefix: str) -> None:
        for name, p in list(model.named_parameters()):
            if p.is_meta and name.startswith(prefix):
                value = initial_value(name, p.shape, p.dtype)
                parameter = nn.Parameter(value.to(procs.device))
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, parameter)

    for i, block in enumerate(model.blocks):
        materialize(f"blocks.{i}.")
        if config.train.activation_checkpointing != "none":
            block = RecomputedBlock(block, config)
            model.blocks[i] = block
        if shard is not None:
            shard(block)
    materialize("")
    model.make_angles()
    if config.model.tied_head:  # each has a tensor of its own by now
        model.head.weight = model.wte.weight
    if shard is not None:
        shard(model)
    return model


def sharding(config: Config, procs: Processes) -> Callable[[nn.Module], None]:
    """Return a function that shards the weights of a module. Blocks are gathered in the
    precision of matrix products, everything else and all gradients in float32."""
    # These take half a second to import, which --help and one process do not need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP2 warns of in-place writes to views of outputs; the model has none.
    warnings.filterwarnings("ignore", message="(?s).*returned a view tensor")
    mesh = init_device_mesh(procs.device.type, (procs.world_size,))
    dtype = config.dtype_on(procs.device)

    def shard(module: nn.Module) -> None:
        is_cast = dtype != torch.float32 and not isinstance(module, Transformer)
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if is_cast else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)

    return shard


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard`, which adds methods, has sharded a model."""
    return hasattr(model, "reshard")


class RecomputedBlock(nn.Module):
    """A block whose backward pass computes activations again, all or those that
    train.activation_checkpointing names. It has the block's layers under their
    names."""

    def __init__(self, block: nn.Module, config: Config):
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        self.of_block = (block,)  # a tuple, so that no parameter is registered twice
        self.selective = config.train.activation_checkpointing == "selective"
        self.has_dropout = config.model.dropout > 0

    def forward(self, *inputs):
        """Return the results of the block for these inputs."""
        (block,) = self.of_block
        # torch.compile takes functions that a module names as they are: neither methods
        # nor values of attributes.
        if not self.selective:
            return checkpoint.checkpoint(
                block, *inputs, use_reentrant=False, preserve_rng_state=self.has_dropout
            )
        if self.has_dropout:
            # Attention is recomputed: saved, it would not consume its random numbers.
            contexts = with_products_saved
        else:
            contexts = with_attention_saved
        return checkpoint.checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.has_dropout,
            context_fn=contexts,
        )


def with_products_saved() -> tuple:
    """Return the contexts in which products of matrices are saved."""
    return checkpoint.create_selective_checkpoint_contexts(save_products)


def with_attention_saved() -> tuple:
    """Return the contexts in which products and attention are saved."""
    return checkpoint.create_selective_checkpoint_contexts(save_attention_too)


def save_products(context, operation, *arguments, **keywords):
    """Save the results of products of matrices alone."""
    if operation in PRODUCTS:
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def save_attention_too(context, operation, *arguments, **keywords):
    """Save the results of products of matrices and of attention."""
    if operation in ATTENTION:
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return save_products(context, operation)


@contextlib.contextmanager
def compiled(model: Transformer, procs: Processes):
    """Return a context in which the model is compiled, once for every shape: those of
    training, of whole and of last batches in validation. Raises UserError without
    a compiler."""
    if procs.device.type == "cpu" and not has_compiler():
        raise UserError(
            "train.compile needs a C++ compiler on a CPU: pass --train.no-compile"
        )
    if is_sharded(model):
        # FSDP gathers the weights of a block right before it, outside of compiled code.
        for block in model.blocks:
            block.compile(dynamic=False)
        model.loss.compile(dynamic=False)
    else:
        model.compile(dynamic=False)
    # Beyond torch.compile's default limit of 8 shapes the model would silently run
    # uncompiled.
    with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
        yield


def replicate(model: Transformer, procs: Processes) -> nn.Module:
    """Return the module that a training step calls: the model, in DDP if processes hold
    replicas of it."""
    if procs.world_size == 1 or is_sharded(model):
        return model
    with warnings.catch_warnings():  # newer PyTorch renames broadcast_buffers
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )


def exchange_gradients(model: nn.Module, exchange: bool) -> None:
    """Set whether processes exchange the gradients of the next micro-batch, with all
    accumulated ones, or go on accumulating."""
    if is_sharded(model):
        cast("FSDPModule", model).set_requires_gradient_sync(exchange)
    elif isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = exchange  # what its no_sync() sets


def reshard(model: nn.Module) -> None:
    """Free, under fsdp, the weights that a pass without a backward has gathered: they
    may change."""
    if is_sharded(model):
        cast("FSDPModule", model).reshard()
