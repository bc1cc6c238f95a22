"""Optimizers (AdamW, or Muon with AdamW), learning rates, averaged weights."""

import contextlib
import math

import torch

from ..model import Transformer
from ..runtime.devices import supports_float64
from .adapters import trainable
from .config import Config
from .muon import Muon
from .parallel import local


def learning_rate(step: int, config: Config, peak: float | None = None) -> float:
    """Learning rate at a step (from 0): linear warm-up to `peak` (optim.lr), then cosine or linear
    decay to peak * min_lr_ratio at optim.decay_steps (0: the end of the run); wsd: constant until
    the last decay_share of the steps, then linear decay (Hu et al., arXiv 2404.06395)."""
    o = config.optim
    peak = o.lr if peak is None else peak
    if step < o.warmup_steps:
        return peak * (step + 1) / o.warmup_steps
    end = o.decay_steps or config.train.steps
    start = o.warmup_steps
    if o.schedule == "wsd":
        start = max(start, end - round(o.decay_share * end))
    left = 1 - min(1.0, max(0.0, (step - start) / max(1, end - start)))  # from 1 to 0
    if o.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return peak * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left)


def learning_rates(step: int, config: Config) -> dict[str, float]:
    """{"lr": AdamW's rate} at a step (from 0), with Muon also "muon_lr"."""
    rates = {"lr": learning_rate(step, config)}
    if config.optim.kind == "muon":
        rates["muon_lr"] = learning_rate(step, config, config.optim.muon_lr)
    return rates


def set_learning_rates(optimizer, step: int, config: Config) -> None:
    """Set the rates of a step (from 0)."""
    rates = learning_rates(step, config)
    for each in optimizers(optimizer):
        rate = rates["muon_lr" if isinstance(each, Muon) else "lr"]
        for group in each.param_groups:
            group["lr"] = rate


def make_optimizer(
    model: Transformer, config: Config
) -> "torch.optim.AdamW | MuonAdamW":
    """The optimizer of optim.kind, with weight decay on matrices only."""
    o = config.optim
    matrices = muon_matrices(model) if o.kind == "muon" else []
    orthogonalised = {p for p, _ in matrices}
    rest = [p for p in trainable(model).values() if p not in orthogonalised]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
    if o.kind == "adamw":
        return adamw
    muon = Muon(matrices, o.muon_lr, o.weight_decay, o.muon_momentum)
    return MuonAdamW(adamw, muon)


def muon_matrices(model: Transformer) -> list[tuple[torch.nn.Parameter, list[int]]]:
    """What the layers of the model give to Muon, with the rows of each part."""
    return [
        matrix
        for layer in model.modules()
        if hasattr(layer, "matrices")
        for matrix in layer.matrices()
    ]


class MuonAdamW:
    """Two optimizers behind the methods of one that training uses."""

    def __init__(self, adamw: torch.optim.AdamW, muon: Muon):
        self.adamw = adamw
        self.muon = muon

    @property
    def param_groups(self) -> list[dict]:
        return self.adamw.param_groups + self.muon.param_groups

    def step(self) -> None:
        self.adamw.step()
        self.muon.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)
        self.muon.zero_grad(set_to_none)


def optimizers(optimizer) -> list[torch.optim.Optimizer]:
    both = isinstance(optimizer, MuonAdamW)
    return [optimizer.adamw, optimizer.muon] if both else [optimizer]


def named_state(model: Transformer, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """{parameter name: optimizer state}; PyTorch's numbers depend on the groups."""
    names = {p: name for name, p in model.named_parameters()}
    states = (state for each in optimizers(optimizer) for state in each.state.items())
    return {names[p]: dict(values) for p, values in states}


def allocate_state(optimizer) -> None:
    """Make the state tensors, which an optimizer else makes in its first step, to load into."""
    for each in optimizers(optimizer):
        keys = (
            ("momentum_buffer",)
            if isinstance(each, Muon)
            else ("exp_avg", "exp_avg_sq")
        )
        for p in (p for group in each.param_groups for p in group["params"]):
            each.state[p] = {
                key: torch.zeros_like(p, requires_grad=False) for key in keys
            }
            if not isinstance(each, Muon):
                each.state[p]["step"] = torch.zeros((), device=p.device)


class EMA:
    """Averaged weights, sharded like the weights (the paper, appendix B.3.2). The decay after t
    updates is min(decay, (1 + t) / (10 + t)), so that the initial weights are soon forgotten."""

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.weights = {
            name: p.detach().clone() for name, p in trainable(model).items()
        }
        device = next(
            model.parameters()
        ).device  # the device alone knows which steps were skipped
        dtype = torch.float64 if supports_float64(device) else torch.float32
        self.updates = torch.zeros((), dtype=dtype, device=device)

    @torch.no_grad()
    def update(
        self, model: torch.nn.Module, finite: torch.Tensor | float = 1.0
    ) -> None:
        """Add the model's weights to the average if `finite` is 1; do nothing if it is 0."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * finite
        self.updates += finite
        averages = [local(average) for average in self.weights.values()]
        weights = [local(p.detach()) for p in trainable(model).values()]
        torch._foreach_lerp_(
            averages, weights, [share.to(averages[0].dtype)] * len(averages)
        )

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module):
        """Inside the block the model has the averaged weights."""
        weights = [local(p.detach()) for p in trainable(model).values()]
        original = [weight.clone() for weight in weights]
        torch._foreach_copy_(
            weights, [local(average) for average in self.weights.values()]
        )
        try:
            yield model
        finally:
            torch._foreach_copy_(weights, original)
