"""Released weights under our names: AO-GPT (the paper's decoder), sigma-GPT (Pannatier
et al. 2024), GPT-2 as `transformers` stores it, and the masked-diffusion encoders RADD
(Ou et al. 2024) and SEDD (Lou et al. 2023). Layouts are recognized by the names of
their tensors."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import ModelConfig
from ..runtime.errors import UserError
from ..runtime.validation import Count, check_value
from ..systems import check_config
from .tensors import renamed

# Settings of GPT-2 and SEDD that our model has only these values for.
SETTINGS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_by_sigma": (True,),
}


def read(
    contents: dict, settings: dict | None, weights: str
) -> tuple[ModelConfig, dict[str, Tensor], dict]:
    """Return released weights as our configuration, tensors by our names, and the rest
    of `Loaded`. GPT-2 has no start token: our step 0 reads a zero [None], steps >= 1
    are GPT-2's. Raises UserError.

    contents: a state dict, or of AO-GPT and sigma-GPT a dict with the state dict in
    "model", its settings in "model_args" and averages in "ema_model". settings:
    config.json beside a state dict."""
    state = contents
    average = None
    if isinstance(contents.get("model"), dict):
        state = contents["model"]
        settings = contents.get("model_args")
        average = contents.get("ema_model")
    for name, tensor in state.items():
        check_value(tensor, Tensor, name)
    # without the prefixes of torch.compile and DistributedDataParallel
    state = renamed(state, lambda name: re.sub(r"^((_orig_mod|module)\.)+", "", name))
    system = layout_of(state)
    values = {}
    if isinstance(settings, dict):
        values.update(settings)
    if isinstance(values.get("model"), dict):  # of RADD and SEDD
        values.update(values["model"])
    uses_average = weights == "ema" and average is not None
    try:
        for name, supported in SETTINGS.items():
            value = values.get(name, supported[0])
            if value not in supported:
                raise UserError(
                    f"{name} is {value!r}, but our model has {supported[0]!r}"
                )
        config, state, names = LAYOUTS[system].read(state, values)
        if uses_average:
            state = _averaged(state, average, names)
        # One that keeps its name has no place in the model, and is refused there.
        tensors = renamed(state, lambda name: names.get(name, name))
    except UserError as error:
        raise UserError(f"its tensors are named as in {system}, but {error}") from None
    if tensors.get("start", torch.empty(0)).dim() == 2:  # a table of one row
        tensors["start"] = tensors["start"].squeeze(0)
    # All of them have GPT-2's tokens; the rows after these are [MASK] or padding.
    vocab_size = min(50257, config.mask_token or config.vocab_size)
    origin = {
        "step": contents.get("iter_num", 0),
        "weights": "ema" if uses_average else "raw",
        "tokenizer": "gpt2",
        "vocab_size": vocab_size,
        "scored_from": int(config.start == "hidden"),
        "system": system,
    }
    return config, tensors, origin


def _averaged(state: dict, average: dict, names: dict[str, str]) -> dict[str, Tensor]:
    """Return the averaged weights by name: a list in the order of the module's
    parameters()."""
    values = average.get("shadow_params") if isinstance(average, dict) else None
    ordered = [name for name in names if name in state]
    if not isinstance(values, list) or len(values) != len(ordered):
        raise UserError(
            f"its ema_model lacks shadow_params, a list of {len(ordered)} tensors"
        )
    return dict(zip(ordered, values, strict=True))


def listed(names: list[str], limit: int = 4) -> str:
    """Return the first few names, and how many there are."""
    shown = ", ".join(names[:limit]) or "nothing"
    if len(names) > limit:
        shown += f", ... ({len(names)} in all)"
    return shown


# Modules there -> ours, in the order of parameters(), which is that of the averaged
# weights; within a module the weight comes before the bias.
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


def gpt_names(n_layer: int, final: str = "transformer.") -> dict[str, str]:
    """Return our name of each parameter by its name in AO-GPT, sigma-GPT and GPT-2.
    final: the prefix of the last norm."""
    names = {}
    for table in ("wte", "wpe", "wtpe"):
        names.update(_parameters(f"transformer.{table}", table))
    names["transformer.wnonee.weight"] = "start"
    names.update(_blocks("transformer.h", GPT_BLOCK, n_layer))
    names.update(_parameters(f"{final}ln_f", "norm_f"))
    names.update(_parameters(f"{final}adaLN_final.1", "adaln_f"))
    names.update(_parameters("lm_head", "head"))
    return names


def diffusion_names(n_layer: int) -> dict[str, str]:
    """Return our name of each parameter by its name in RADD and SEDD."""
    names = {}
    names.update(_parameters("sigma_map.mlp.0", "noise.fc"))
    names.update(_parameters("sigma_map.mlp.2", "noise.proj"))
    names.update(_blocks("blocks", DIFFUSION_BLOCK, n_layer))
    names.update(_parameters("output_layer.norm_final", "norm_f"))
    names.update(_parameters("output_layer.linear", "head"))
    names.update(_parameters("output_layer.adaLN_modulation", "adaln_f"))
    names["vocab_embed.embedding"] = "wte.weight"
    return names


def _blocks(prefix: str, modules: dict[str, str], n_layer: int) -> dict[str, str]:
    """Return our name of each parameter of all blocks by its name there. modules: our
    names of a block's modules by theirs."""
    names = {}
    for layer in range(n_layer):
        for theirs, ours in modules.items():
            module = f"{prefix}.{layer}.{theirs}"
            names.update(_parameters(module, f"blocks.{layer}.{ours}"))
    return names


def _parameters(theirs: str, ours: str) -> dict[str, str]:
    """Return our names of a module's weight and bias by their names there."""
    return {f"{theirs}.weight": f"{ours}.weight", f"{theirs}.bias": f"{ours}.bias"}


def _ao_gpt(state: dict, settings: dict):
    config = _gpt_config(settings, cond_dim=_width(state, "transformer.wtpe.weight"))
    return config, state, gpt_names(config.n_layer, "transformer.final_layer.")


def _sigma_gpt(state: dict, settings: dict):
    config = _gpt_config(
        settings,
        target="input",
        norm="layernorm",
        norm_bias=settings.get("bias", True),
        qk_norm=False,
        tied_head=True,
        head_bias=False,
    )
    return config, _without_tied_head(state), gpt_names(config.n_layer)


def _gpt2(state: dict, settings: dict):
    """Read GPT-2, whose linear layers are stored transposed (Conv1D) and whose causal
    masks are buffers."""
    config = _gpt_config(
        settings,
        length="n_positions",
        target="none",
        start="hidden",
        norm="layernorm",
        qk_norm=False,
        gelu="tanh",
        tied_head=True,
        head_bias=False,
    )
    translated = {"transformer.wnonee.weight": torch.zeros(config.n_embd)}
    prefix = re.compile(r"^(?!transformer\.|lm_head\.)")
    state = renamed(state, lambda name: prefix.sub("transformer.", name))
    for name, tensor in state.items():
        if re.fullmatch(r".*\.c_\w+\.weight", name) and tensor.dim() == 2:
            tensor = tensor.T
        if name == "transformer.wpe.weight":  # our input position p + 1 is GPT-2's p
            tensor = F.pad(tensor, (0, 0, 1, 0))
        if not re.fullmatch(r".*\.attn\.(masked_)?bias", name):
            translated[name] = tensor
    return config, _without_tied_head(translated), gpt_names(config.n_layer)


def _radd(state: dict, settings: dict):
    config = _diffusion_config(settings)
    return config, _without_frequencies(state), diffusion_names(config.n_layer)


def _sedd(state: dict, settings: dict):
    config = _diffusion_config(
        settings,
        noise=True,
        norm_bias=False,
        cond_dim=_width(state, "sigma_map.mlp.2.weight"),
    )
    return config, _without_frequencies(state), diffusion_names(config.n_layer)


def _diffusion_config(settings: dict, **model) -> ModelConfig:
    """Return the configuration of an encoder, with rotary positions; the mask is the
    last row of the token table. model: more keys of ModelConfig."""
    tokens = _size(settings, "tokens")
    config = ModelConfig(
        vocab_size=tokens + 1,
        mask_token=tokens,
        block_size=settings.get("length", 1024),
        n_layer=_size(settings, "n_blocks"),
        n_head=_size(settings, "n_heads"),
        n_embd=_size(settings, "hidden_size"),
        attention="full",
        target="none",
        position="rotary",
        norm="layernorm",
        qk_norm=False,
        gelu="tanh",
        attn_bias=False,
        **model,
    )
    check_config(config)
    return config


def _without_frequencies(state: dict) -> dict[str, Tensor]:
    """Return the tensors without those of the rotary positions, which have no
    parameters."""
    return {name: t for name, t in state.items() if name != "rotary_emb.inv_freq"}


@dataclass(frozen=True)
class Layout:
    """The layout in which a system stores its weights. To read another one, add a line
    to LAYOUTS."""

    # One of its names begins with a match. The first layout with one is chosen.
    mark: str
    read: Callable[[dict, dict], tuple[ModelConfig, dict, dict[str, str]]]
    """(state, settings) -> configuration, tensors by their names, names -> ours."""


LAYOUTS = {
    "SEDD": Layout(r"sigma_map\.", _sedd),
    "RADD": Layout(r"vocab_embed\.embedding$", _radd),
    "AO-GPT": Layout(r".*\.adaLN", _ao_gpt),
    "sigma-GPT": Layout(r"transformer\.(wtpe|wnonee)\.", _sigma_gpt),
    "GPT-2": Layout(r"(transformer\.)?h\.\d+\.attn\.c_attn\.weight$", _gpt2),
}


def layout_of(state: dict[str, Tensor]) -> str:
    """Return the layout of a state dict: a key of LAYOUTS. Raises UserError."""
    for system, layout in LAYOUTS.items():
        if any(re.match(layout.mark, name) for name in state):
            return system
    raise UserError(f"it holds {listed(sorted(state))}: none of the known layouts")


def _gpt_config(settings: dict, length: str = "block_size", **model) -> ModelConfig:
    """Return the configuration of a GPT. length: the name of its block size in the
    settings. model: the keys of ModelConfig that are no sizes, as the layout has
    them."""
    bias = settings.get("bias", True)
    config = ModelConfig(
        vocab_size=_size(settings, "vocab_size"),
        block_size=_size(settings, length),
        n_layer=_size(settings, "n_layer"),
        n_head=_size(settings, "n_head"),
        n_embd=_size(settings, "n_embd"),
        attn_bias=bias,
        mlp_bias=bias,
        **model,
    )
    check_config(config)
    return config


def _size(settings: dict, name: str) -> int:
    """Return a size from the settings. Raises UserError without a whole number."""
    size = settings.get(name)
    check_value(size, Count, f"{name} in model_args, or in config.json beside it,")
    return size


def _without_tied_head(state: dict) -> dict[str, Tensor]:
    """Return the tensors without lm_head.weight, which is the token table again. Raises
    UserError if it is not."""
    head = state.get("lm_head.weight")
    table = state.get("transformer.wte.weight")
    if head is not None and table is not None and not torch.equal(head, table):
        raise UserError(
            "lm_head.weight and transformer.wte.weight differ: they must be the same"
        )
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def _width(state: dict, name: str) -> int:
    """Return the number of columns of a matrix. Raises UserError where there is no
    matrix of this name."""
    if name not in state or state[name].dim() != 2:
        raise UserError(f"it lacks {name}, a matrix")
    return state[name].shape[1]
