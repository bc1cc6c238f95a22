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
from ..systems import build_on_meta, init_weight
from .config import Config

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

MOST_SHAPES = 32  # of compiled code


def build(
    config: Config,
    procs: Processes,
    weights: dict[str, Tensor] | None = None,
    empty: bool = False,
) -> Transformer:
    """Return a model on its device. Under fsdp it is sharded block by block, so that no
    process holds more than one block in full. weights: initial values by name, which
    are used up; None: random, or with `empty` zeros to load a checkpoint into."""
    model = build_on_meta(config.model)
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
        if config.train.activation_checkpointing == "block":
            block = RecomputedBlock(block, has_dropout=config.model.dropout > 0)
            model.blocks[i] = block
        if shard is not None:
            shard(block)
    materialize("")
    if config.model.tied_head:  # the table of tokens alone was given a value
        model.head.weight = model.wte.weight
    model.make_angles()  # on the device of the head
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
    """A block whose backward pass computes activations again. It has the block's layers
    under their names."""

    def __init__(self, block: nn.Module, has_dropout: bool):
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        self.of_block = (block,)  # a tuple, so that no parameter is registered twice
        self.has_dropout = has_dropout

    def forward(self, *inputs):
        """Return the results of the block for these inputs."""
        (block,) = self.of_block
        return checkpoint.checkpoint(
            block, *inputs, use_reentrant=False, preserve_rng_state=self.has_dropout
        )


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


def set_gradient_exchange(model: nn.Module, exchange: bool) -> None:
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
