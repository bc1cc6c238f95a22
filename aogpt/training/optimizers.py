"""Optimizers (AdamW, or Muon with AdamW), learning rates, averaged weights."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..model import Matrices, Transformer
from ..runtime.devices import supports_float64
from ..systems import matrices_of
from .config import Config
from .muon import Muon, local

MAX_GRAD_NORM = 1.0  # larger gradients are scaled down to it
MUON_MOMENTUM = 0.95  # decay of Muon's average gradient
WSD_DECAY = 0.2  # share of the steps that decay


def learning_rate(step: int, config: Config, peak: float | None = None) -> float:
    """Return the learning rate at a step (from 0): linear warm-up to `peak` (optim.lr),
    then cosine or linear decay to peak * min_lr_ratio at the end of the run; wsd:
    constant until the last steps, then linear decay (Hu et al., arXiv 2404.06395)."""
    o = config.optim
    if peak is None:
        peak = o.lr
    if step < o.warmup_steps:
        return peak * (step + 1) / o.warmup_steps
    end = config.train.steps
    start = o.warmup_steps
    if o.schedule == "wsd":
        start = max(start, end - round(WSD_DECAY * end))
    steps = max(1, end - start)
    done = (step - start) / steps
    done = min(1.0, max(0.0, done))
    left = 1 - done  # from 1 to 0
    if o.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    ratio = o.min_lr_ratio + (1 - o.min_lr_ratio) * left
    return peak * ratio


def learning_rates(step: int, config: Config) -> dict[str, float]:
    """Return {"lr": AdamW's rate} at a step (from 0), with Muon also "muon_lr"."""
    rates = {"lr": learning_rate(step, config)}
    if config.optim.kind == "muon":
        rates["muon_lr"] = learning_rate(step, config, config.optim.muon_lr)
    return rates


def make_optimizers(model: Transformer, config: Config) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon for the matrices of the blocks if optim.kind says so.
    Weights decay in matrices only. Every group of parameters has its peak learning
    rate, "peak_lr"."""
    o = config.optim
    matrices: Matrices = []
    if o.kind == "muon":
        matrices = matrices_of(model)
    orthogonalised = {p for p, _ in matrices}
    decayed = []
    undecayed = []
    for p in model.parameters():
        if p in orthogonalised:
            continue
        if p.dim() >= 2:
            decayed.append(p)
        else:
            undecayed.append(p)
    groups = [
        {"params": decayed, "weight_decay": o.weight_decay, "peak_lr": o.lr},
        {"params": undecayed, "weight_decay": 0.0, "peak_lr": o.lr},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
    if o.kind == "adamw":
        return [adamw]
    muon = Muon(
        matrices, lr=o.muon_lr, weight_decay=o.weight_decay, momentum=MUON_MOMENTUM
    )
    return [adamw, muon]


def named_state(
    model: Transformer, optimizers: list[torch.optim.Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """Return {parameter name: optimizer state}; PyTorch's numbers depend on the
    groups."""
    names: dict[Tensor, str] = {}
    for name, p in model.named_parameters():
        names[p] = name
    states = {}
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            states[names[p]] = dict(values)
    return states


def allocate_state(optimizers: list[torch.optim.Optimizer]) -> None:
    """Make the state tensors, which an optimizer else makes in its first step, to load
    into."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                zeros = torch.zeros_like(p, requires_grad=False)
                if isinstance(optimizer, Muon):
                    state = {"momentum_buffer": zeros}
                else:
                    state = {
                        "exp_avg": zeros,
                        "exp_avg_sq": zeros.clone(),
                        "step": torch.zeros((), device=p.device),
                    }
                optimizer.state[p] = state


class EMA:
    """The averages of a model's weights, sharded like the weights (the paper, appendix
    B.3.2). The decay after t updates is min(decay, (1 + t) / (10 + t)), so that the
    initial weights are soon forgotten."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            self.weights[name] = p.detach().clone()
        # The device alone knows which steps were skipped.
        device = next(model.parameters()).device
        dtype = torch.float64 if supports_float64(device) else torch.float32
        self.updates = torch.zeros((), dtype=dtype, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor | float = 1.0) -> None:
        """Add the model's weights to the average if `finite` is 1; do nothing if it is
        0."""
        decay = (1 + self.updates) / (10 + self.updates)
        share = (1 - decay.clamp(max=self.decay)) * finite
        self.updates += finite
        averages = [local(average) for average in self.weights.values()]
        weights = [local(p.detach()) for p in self.parameters.values()]
        share = share.to(averages[0].dtype)
        torch._foreach_lerp_(averages, weights, [share] * len(averages))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights inside a `with` block."""
        averages = [local(average) for average in self.weights.values()]
        weights = [local(p.detach()) for p in self.parameters.values()]
        original = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, original)
