"""The class of the model of each configuration."""

from ..model import AOGPT, ModelConfig, Transformer
from .encoder import Encoder
from .mask_query import MaskQuery
from .two_stream import TwoStream

# The class of each `SystemTarget`; for other targets it is AOGPT, of model.py.
DECODERS: dict[str, type[Transformer]] = {
    "two_stream": TwoStream,
    "mask_query": MaskQuery,
}


def system_of(config: ModelConfig) -> type[Transformer]:
    """Return the class of the models with this configuration."""
    if config.is_encoder:
        return Encoder
    return DECODERS.get(config.target, AOGPT)
