"""Which class a configuration is of."""

from ..model import AOGPT, ModelConfig, Transformer
from .encoder import Encoder
from .mask_query import MaskQuery
from .two_stream import TwoStream

# The class of each `SystemTarget`; other targets are of the decoder on the page, AOGPT.
DECODERS: dict[str, type[Transformer]] = {
    "two_stream": TwoStream,
    "mask_query": MaskQuery,
}


def system_of(config: ModelConfig) -> type[Transformer]:
    """Return the class of the models with this configuration."""
    if config.is_encoder:
        return Encoder
    return DECODERS.get(config.target, AOGPT)
