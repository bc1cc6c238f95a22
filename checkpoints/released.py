"""Released weights under our names: AO-GPT, sigma-GPT, GPT-2, RADD and SEDD.

Pure translation; load.py reads the files. Layouts are told apart by the names of their tensors.
Every tensor of a release must have its place and every parameter of the model its tensor, of the
right shape; whatever does not fit is a ValueError that names it.

What they are: AO-GPT, the decoder of the paper; sigma-GPT (Pannatier et al. 2024), its target
position added at the input; GPT-2 as `transformers` stores it; RADD (Ou et al. 2024) and SEDD (Lou
et al. 2023), masked-diffusion encoders.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NotRequired

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from checkpoints.on_disk import DTYPES
from model import ModelConfig
from runtime.errors import UserError
from runtime.validation import Count, from_values, schema
from variants import build_model


def layout(state: dict) -> str:
    """The layout of a state dict: "AO-GPT", "sigma-GPT", "GPT-2", "RADD" or "SEDD"; ValueError if
    it is another."""
    names = [re.sub(PREFIXES, "", str(name)) for name in state]
    if "vocab_embed.embedding" in names:
        return (
            "SEDD"
            if any(name.startswith("sigma_map.") or "adaLN" in name for name in names)
            else "RADD"
        )
    if any(name.startswith("transformer.") and ".adaLN" in name for name in names):
        return "AO-GPT"
    if any(name.startswith(("transformer.wtpe.", "transformer.wnonee.")) for name in names):
        return "sigma-GPT"
    if any(re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.c_attn\.weight", name) for name in names):
        return "GPT-2"
    raise UserError(f"it holds {_list(sorted(map(repr, names)))}: none of the known layouts")


def translate(
    state: dict[str, Tensor], config: dict | None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A released state dict as our model: its configuration, and its tensors under the names of
    model.py's parameters.

    GPT-2 has no start token: its model scores x[0] from a zero [None], and only steps >= 1 (left to
    right) are GPT-2's.

    Args:
        state: name -> tensor as released, maybe with the prefixes of torch.compile and
            DistributedDataParallel.
        config: what lies beside it: `model_args` of AO-GPT and sigma-GPT, config.json of the
            others.

    Raises ValueError for unknown layouts, settings this model has no place for, and tensors that
    are missing, unknown or of the wrong shape.
    """
    kind = layout(state)
    arrange, shape = LAYOUTS[kind]
    place = "in its configuration (model_args, or config.json beside it)"
    try:
        state = _without_prefixes(state)
        settings = from_values({} if config is None else config, shape, place)
        model_config, state, names = arrange(state, settings)
        return model_config, _rename(state, names, model_config)
    except ValueError as error:
        raise UserError(f"its tensors are named as in {kind}, but {error}") from None


def averaged(state: dict[str, Tensor], shadow_params: list[Tensor]) -> dict[str, Tensor]:
    """The averaged weights of AO-GPT or sigma-GPT under the names of the last ones.

    The average is a list in the order of the module's parameters(), where a head that is the token
    table does not appear again.
    """
    kind = layout(state)
    state = _without_prefixes(state)
    if kind == "sigma-GPT":
        state = _without_tied_head(state)
    names = [name for name in gpt_names(kind, _blocks(state)) if name in state]
    if len(shadow_params) != len(names):
        raise UserError(f"ema_model holds {len(shadow_params)} tensors for {len(names)} parameters")
    for name, average in zip(names, shadow_params, strict=True):
        if not isinstance(average, Tensor) or average.shape != state[name].shape:
            shape = tuple(getattr(average, "shape", ()))
            raise UserError(
                f"{name} is {tuple(state[name].shape)} in model, but {shape} in ema_model"
            )
    return dict(zip(names, shadow_params, strict=True))


# ---- names ---------------------------------------------------------------------------------------

PREFIXES = r"^((_orig_mod|module)\.)+"  # of torch.compile and DistributedDataParallel

# Their modules -> ours, in the order of their parameters(); within a module, the weight comes
# before the bias. The order matters: the averaged weights of AO-GPT and sigma-GPT are a list
# without names, so `averaged` tells them by their places. The names of single tensors (wte, wtpe,
# wnonee, lm_head) stand also in the layouts and in what they share, below.
GPT_BLOCK = {
    "ln_1": "norm1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "attn.q_norm": "attn.q_norm",
    "attn.k_norm": "attn.k_norm",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
    "adaLN.1": "adaln",
}
DIFFUSION_BLOCK = {
    "norm1": "norm1",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "norm2": "norm2",
    "mlp.0": "mlp.fc",
    "mlp.2": "mlp.proj",
    "adaLN_modulation": "adaln",
}


def gpt_names(kind: str, n_layer: int) -> dict[str, str]:
    """Names in AO-GPT, sigma-GPT and GPT-2 -> ours, in the order of their parameters()."""
    modules = {"transformer.wte": "wte", "transformer.wpe": "wpe", "transformer.wtpe": "wtpe"}
    modules |= {"transformer.wnonee": "start"}
    for i in range(n_layer):
        modules |= {
            f"transformer.h.{i}.{theirs}": f"blocks.{i}.{ours}"
            for theirs, ours in GPT_BLOCK.items()
        }
    final = "transformer.final_layer." if kind == "AO-GPT" else "transformer."
    modules |= {f"{final}ln_f": "norm_f", f"{final}adaLN_final.1": "adaln_f", "lm_head": "head"}
    return _with_kinds(modules) | {"transformer.wnonee.weight": "start"}


def diffusion_names(n_layer: int) -> dict[str, str]:
    """Every name in RADD and SEDD -> ours."""
    modules = {"sigma_map.mlp.0": "noise.fc", "sigma_map.mlp.2": "noise.proj"}
    for i in range(n_layer):
        modules |= {
            f"blocks.{i}.{theirs}": f"blocks.{i}.{ours}" for theirs, ours in DIFFUSION_BLOCK.items()
        }
    modules |= {"output_layer.norm_final": "norm_f", "output_layer.linear": "head"}
    modules |= {"output_layer.adaLN_modulation": "adaln_f"}
    return _with_kinds(modules) | {"vocab_embed.embedding": "wte.weight"}


def _with_kinds(modules: dict[str, str]) -> dict[str, str]:
    return {
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in modules.items()
        for kind in ("weight", "bias")
    }


# ---- their configurations ------------------------------------------------------------------------
#
# What has no place in ModelConfig must be as our model has it, where it is there.


@schema
class GPTSettings(TypedDict):
    """Of AO-GPT and sigma-GPT: `model_args` in the file of weights."""

    vocab_size: Count
    block_size: Count
    n_layer: Count
    n_head: Count
    n_embd: Count
    bias: NotRequired[bool]


@schema
class GPT2Settings(TypedDict):
    """Of config.json beside GPT-2's weights, as `transformers` writes it."""

    vocab_size: Count
    n_positions: Count
    n_layer: Count
    n_head: Count
    n_embd: Count
    model_type: NotRequired[Literal["gpt2"]]
    activation_function: NotRequired[Literal["gelu_new", "gelu_pytorch_tanh"]]
    layer_norm_epsilon: NotRequired[Annotated[float, Interval(ge=1e-5, le=1e-5)]]
    scale_attn_weights: NotRequired[Literal[True]]
    scale_attn_by_inverse_layer_idx: NotRequired[Literal[False]]
    add_cross_attention: NotRequired[Literal[False]]


@schema
class DiffusionShape(TypedDict):
    length: NotRequired[Count]
    n_blocks: Count
    n_heads: Count
    hidden_size: Count
    scale_by_sigma: NotRequired[bool]


@schema
class Graph(TypedDict):
    type: NotRequired[Literal["absorb"]]


@schema
class DiffusionSettings(TypedDict):
    """Of config.json beside the weights of RADD and SEDD."""

    tokens: Count
    model: DiffusionShape
    graph: NotRequired[Graph | None]


# ---- layouts: (state, settings) -> (ModelConfig, state, names) -----------------------------------


def _ao_gpt(state: dict, args: GPTSettings):
    config = ModelConfig(
        **_sizes(args),
        cond_dim=_width(state, "transformer.wtpe.weight"),
        attn_bias=args.get("bias", True),
        mlp_bias=args.get("bias", True),
    )
    return config, _start_as_vector(state), gpt_names("AO-GPT", config.n_layer)


def _sigma_gpt(state: dict, args: GPTSettings):
    bias = args.get("bias", True)
    config = ModelConfig(
        **_sizes(args),
        target="input",
        norm="layernorm",
        norm_bias=bias,
        attn_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        tied_head=True,
        head_bias=False,
    )
    return (
        config,
        _start_as_vector(_without_tied_head(state)),
        gpt_names("sigma-GPT", config.n_layer),
    )


def _gpt2(state: dict, settings: GPT2Settings):
    """Linear layers are stored transposed (Conv1D); causal masks are stored as buffers."""
    config = ModelConfig(
        **_sizes(settings, block_size="n_positions"),
        target="none",
        norm="layernorm",
        qk_norm=False,
        gelu="tanh",
        start="hidden",
        tied_head=True,
        head_bias=False,
    )
    state = {
        re.sub(r"^(?!transformer\.|lm_head\.)", "transformer.", name): tensor
        for name, tensor in state.items()
    }
    for name, tensor in list(state.items()):
        if re.fullmatch(r"transformer\.h\.\d+\.attn\.(masked_)?bias", name):
            del state[name]
        elif re.fullmatch(r"transformer\.h\..*\.c_\w+\.weight", name) and tensor.dim() == 2:
            state[name] = tensor.T
    if "transformer.wpe.weight" in state:  # our input position p + 1 is GPT-2's p
        state["transformer.wpe.weight"] = F.pad(state["transformer.wpe.weight"], (0, 0, 1, 0))
    state["transformer.wnonee.weight"] = torch.zeros(config.n_embd)
    return config, _without_tied_head(state), gpt_names("GPT-2", config.n_layer)


def _radd(state: dict, settings: DiffusionSettings, **sedd):
    """Rotary positions; the mask is the last row of the token table."""
    shape = settings["model"]
    config = ModelConfig(
        block_size=shape.get("length", 1024),
        n_layer=shape["n_blocks"],
        n_head=shape["n_heads"],
        n_embd=shape["hidden_size"],
        vocab_size=settings["tokens"] + 1,
        mask_token=settings["tokens"],
        attention="full",
        target="none",
        position="rotary",
        norm="layernorm",
        qk_norm=False,
        gelu="tanh",
        attn_bias=False,
        **sedd,
    )
    state = dict(state)
    frequency = state.pop("rotary_emb.inv_freq", None)
    if frequency is not None:
        head_dim = config.n_embd // config.n_head
        expected = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        # a release in half precision rounds them by up to 2^-8
        if frequency.shape != expected.shape or not torch.allclose(
            frequency.float(), expected, rtol=5e-3, atol=1e-7
        ):
            raise UserError("rotary_emb.inv_freq is not that of rotary positions with base 10000")
    return config, state, diffusion_names(config.n_layer)


def _sedd(state: dict, settings: DiffusionSettings):
    if not settings["model"].get("scale_by_sigma", True):
        raise UserError("its scale_by_sigma is False; known is True")
    return _radd(
        state,
        settings,
        noise=True,
        norm_bias=False,
        cond_dim=_width(state, "sigma_map.mlp.2.weight"),
    )


LAYOUTS = {
    "AO-GPT": (_ao_gpt, GPTSettings),
    "sigma-GPT": (_sigma_gpt, GPTSettings),
    "GPT-2": (_gpt2, GPT2Settings),
    "RADD": (_radd, DiffusionSettings),
    "SEDD": (_sedd, DiffusionSettings),
}


# ---- shared by the layouts -----------------------------------------------------------------------


def _rename(state: dict, names: dict[str, str], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors under our names. ValueError unless they are exactly the parameters of a model of
    this shape."""
    shapes = parameter_shapes(config, len(state))
    missing = [theirs for theirs, ours in names.items() if ours in shapes and theirs not in state]
    unknown = [theirs for theirs in state if names.get(theirs) not in shapes]
    problems = [f"it lacks {_list(missing)}"] if missing else []
    problems += [f"the model has no place for {_list(unknown)}"] if unknown else []
    if problems:
        raise UserError(" and ".join(problems))
    for theirs, tensor in state.items():
        expected = shapes[names[theirs]]
        if tuple(tensor.shape) != expected:
            raise UserError(
                f"{theirs} (our {names[theirs]}) is {tuple(tensor.shape)}, not "
                f"{expected} as it should be"
            )
        check_tensor(theirs, tensor)
    return {names[theirs]: tensor for theirs, tensor in state.items()}


def parameter_shapes(config: ModelConfig, tensors: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by name, without memory for them. tensors: how many there
    are of its weights. Raises ValueError where that is less than one for each layer."""
    if config.n_layer > tensors:
        raise UserError(f"there are {tensors} tensors for a model of {config.n_layer} layers")
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not what weights are: real numbers, one after the other
    (a sparse one, or a view that repeats what the file holds once, can be of any size)."""
    plain = tensor.layout == torch.strided and str(tensor.dtype).removeprefix("torch.") in DTYPES
    if not plain or tensor.is_meta:
        raise UserError(
            f"{name} holds {tensor.dtype} ({tensor.layout}), not plain floating-point numbers"
        )
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise UserError(f"{name} is {tuple(tensor.shape)}, more than the file holds")


def _without_prefixes(state: dict) -> dict[str, Tensor]:
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} is {type(tensor).__name__}, not a tensor")
    without = {re.sub(PREFIXES, "", str(name)): tensor for name, tensor in state.items()}
    if len(without) < len(state):
        raise UserError("two of its tensors have the same name but for a prefix")
    return without


def _without_tied_head(state: dict) -> dict[str, Tensor]:
    """Without lm_head.weight, which is the token table again."""
    state = dict(state)
    head = state.pop("lm_head.weight", None)
    table = state.get("transformer.wte.weight")
    if head is not None and table is not None and not torch.equal(head, table):
        raise UserError(
            "lm_head.weight and transformer.wte.weight differ, though the layout shares them"
        )
    return state


def _start_as_vector(state: dict) -> dict[str, Tensor]:
    """With the one row of transformer.wnonee, the learned [None], as a vector."""
    row = state.get("transformer.wnonee.weight")
    return (
        state | {"transformer.wnonee.weight": row[0]}
        if row is not None and row.shape[:1] == (1,)
        else state
    )


def _blocks(state: dict) -> int:
    numbers = [re.match(r"transformer\.h\.(\d+)\.", name) for name in state]
    return 1 + max((int(found[1]) for found in numbers if found), default=-1)


def _width(state: dict, name: str) -> int:
    if name not in state or state[name].dim() != 2:
        raise UserError(f"it lacks {name}, a matrix")
    return state[name].shape[1]


def _sizes(settings: GPTSettings | GPT2Settings, block_size: str = "block_size") -> dict[str, int]:
    """The sizes of a ModelConfig that have its names in a release; block_size: its name there."""
    same = ("vocab_size", "n_layer", "n_head", "n_embd")
    return {name: settings[name] for name in same} | {"block_size": settings[block_size]}


def _list(names: list[str], limit: int = 4) -> str:
    """The first few names, and how many they are if that is not all."""
    shown = ", ".join(names[:limit]) or "nothing"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else shown
