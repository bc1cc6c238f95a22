"""Train adapters (LoRA) of a frozen base with `peft`; see checkpoints/adapters.py."""

from torch import nn

from ..model import Transformer
from ..runtime.errors import UserError
from ..systems import matrices_of


def add_adapters(model: Transformer, rank: int) -> None:
    """Freeze the weights of a model and add adapters, which at first change nothing.
    Raises UserError without `peft`."""
    try:
        import peft
    except ImportError:
        raise UserError("--train.lora-rank needs a package: pip install peft") from None

    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=int(alpha_of(rank)),
        lora_dropout=0.0,
        target_modules=adapted_layers(model),
    )
    peft.inject_adapter_in_model(settings, model)  # this freezes all other weights


def adapted_layers(model: Transformer) -> list[str]:
    """Return the names of the linear layers whose weights are matrices of a block."""
    matrices = {weight for weight, _ in matrices_of(model)}
    names = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.weight in matrices:
            names.append(name)
    return names


def alpha_of(rank: int) -> float:
    """Return the factor of the products times the rank: twice the rank, as is
    common."""
    return 2.0 * rank


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
