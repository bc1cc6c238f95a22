"""The exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib

import torch


class EMA:
    """Exponential moving average of a model's parameters (the paper, appendix B.3.2; evaluation
    and sampling use it).

    The decay is warmed up: decay_t = min(decay, (1 + t) / (10 + t)) after t updates, for the first
    weights are those of a model that has learned nothing. Of sharded weights, every process
    averages its part.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        device = next(model.parameters()).device  # which steps are skipped is the device's to know
        self.updates = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, model: torch.nn.Module, finite: torch.Tensor | float = 1.0) -> None:
        """Take in the model's weights if `finite` is 1, and not if it is 0; without waiting for the
        device."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * finite
        self.updates += finite
        ours, theirs = (
            list(map(local, self.weights.values())),
            [local(p.detach()) for p in model.parameters()],
        )
        torch._foreach_lerp_(ours, theirs, [share.to(ours[0].dtype)] * len(ours))

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module):
        """The model with the averaged weights inside the block, with its own again after it."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        copy_in_place(self.weights, model)
        try:
            yield model
        finally:
            copy_in_place(own, model)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def copy_in_place(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Give the model's parameters the values of weights of the same names."""
    for name, p in model.named_parameters():
        p.copy_(weights[name])
