"""The output head in chunks of tokens, so that float32 logits (B, T, V) never exist at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits alive at once: on a CPU fewer are faster than all, on a GPU they take 3 GiB with copies.
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}


def head_chunk(vocab_size: int, device: str) -> int:
    """Tokens in a chunk; at least 256, as small matrix products are slow."""
    return max(256, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // vocab_size)


class ChunkedHead:
    """Replaces the head of `AOGPT`. Faster than torch's linear_cross_entropy where both were
    measured (results/speed.md)."""

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, (B, T, D), (B, T) -> (B, T), nats."""
        return self.in_chunks(self._cross_entropy, x, targets).view(targets.shape)

    def _cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head_logits(x), targets, reduction="none")

    def in_chunks(self, function: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """function(x (n, D), targets (n,)) of all B T tokens; the backward pass repeats chunks."""
        x = x.flatten(0, 1)
        targets = targets.flatten()
        n = head_chunk(self.config.vocab_size, x.device.type)
        if (
            torch.compiler.is_compiling() or len(x) <= n
        ):  # compiled, the softmax is fused anyway
            return function(x, targets)
        options = {
            "use_reentrant": False,
            "preserve_rng_state": False,
        }  # nothing here is random
        chunks = zip(x.split(n), targets.split(n), strict=True)
        return torch.cat([checkpoint(function, *chunk, **options) for chunk in chunks])
