"""The exponential moving average (EMA) of a model's weights."""

import contextlib

import torch

from runtime.devices import supports_float64


class EMA:
    """Averaged weights, sharded as the weights are (the paper, appendix B.3.2). The decay after t
    updates is min(decay, (1 + t) / (10 + t)): the first weights have learned nothing."""

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        device = next(model.parameters()).device  # the device alone knows which steps were skipped
        dtype = torch.float64 if supports_float64(device) else torch.float32
        self.updates = torch.zeros((), dtype=dtype, device=device)

    @torch.no_grad()
    def update(self, model: torch.nn.Module, finite: torch.Tensor | float = 1.0) -> None:
        """Average in the model's weights if `finite` is 1, not if it is 0."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * finite
        self.updates += finite
        averages = [local(average) for average in self.weights.values()]
        weights = [local(p.detach()) for p in model.parameters()]
        torch._foreach_lerp_(averages, weights, [share.to(averages[0].dtype)] * len(averages))

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module):
        """Inside the block the model has the averaged weights."""
        weights = [local(p.detach()) for p in model.parameters()]
        original = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, [local(average) for average in self.weights.values()])
        try:
            yield model
        finally:
            torch._foreach_copy_(weights, original)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
