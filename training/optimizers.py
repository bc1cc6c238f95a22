"""Optimizers and the learning-rate schedule: AdamW for everything, or Muon for the matrices of the
blocks and AdamW for the rest.

AdamW is PyTorch's, Muon stands in muon.py; here stands which weights are whose."""

from __future__ import annotations

import math

import torch

from model import AOGPT
from training.config import Config
from training.muon import Muon

# ---- learning rates ------------------------------------------------------------------------------


def learning_rate(step: int, config: Config, peak: float | None = None) -> float:
    """Linear warm-up to `peak` (default optim.lr), then down to peak * min_lr_ratio at
    optim.decay_steps (default: the end of the run), along half a cosine or a straight line."""
    o = config.optim
    peak = o.lr if peak is None else peak
    if step < o.warmup_steps:
        return peak * (step + 1) / o.warmup_steps
    end = o.decay_steps or config.train.steps
    done = (step - o.warmup_steps) / max(1, end - o.warmup_steps)
    left = 1 - min(1.0, done)  # from 1 down to 0
    if o.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return peak * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left)


def learning_rates(step: int, config: Config) -> dict[str, float]:
    """The rates in force at a step, under the names of their keys: lr of AdamW and, where it is
    used, muon_lr."""
    rates = {"lr": learning_rate(step, config)}
    if config.optim.kind == "muon":
        rates["muon_lr"] = learning_rate(step, config, config.optim.muon_lr)
    return rates


def set_learning_rates(optimizer, rates: dict[str, float]) -> None:
    """Give every parameter group its rate."""
    for group in optimizer.param_groups:
        of_muon = "parts" in group  # AdamW's groups have none
        group["lr"] = rates["muon_lr" if of_muon else "lr"]


# ---- which optimizer moves what ------------------------------------------------------------------


def make_optimizer(model: AOGPT, config: Config) -> torch.optim.AdamW | MuonAdamW:
    """What optim.kind says; weight decay on matrices only."""
    o = config.optim
    matrices = muon_matrices(model) if o.kind == "muon" else {}
    rest = [p for name, p in model.named_parameters() if name not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
    if o.kind == "adamw":
        return adamw
    fused = [p for name, p in matrices.items() if name.endswith("qkv.weight")]
    whole = [p for name, p in matrices.items() if not name.endswith("qkv.weight")]
    muon = Muon(whole, fused, o.muon_lr, o.weight_decay, o.muon_momentum)
    return MuonAdamW(adamw, muon)


def muon_matrices(model: AOGPT) -> dict[str, torch.nn.Parameter]:
    """The matrices of attention and MLP, by name: what maps hidden vectors to hidden vectors, where
    Muon applies.

    Not its own: embeddings, position tables and the head, whose rows belong to tokens or positions,
    and the layers of adaLN and the noise level, which read a small conditioning vector.
    """
    return {
        name: p
        for name, p in model.blocks.named_parameters("blocks")
        if p.dim() == 2 and (".attn." in name or ".mlp." in name)
    }


class MuonAdamW:
    """Muon for some weights and AdamW for the others, behind the methods of one optimizer that
    training uses."""

    def __init__(self, adamw: torch.optim.AdamW, muon: Muon):
        self.adamw, self.muon = adamw, muon

    @property
    def param_groups(self) -> list[dict]:
        return self.adamw.param_groups + self.muon.param_groups

    def step(self) -> None:
        self.adamw.step()
        self.muon.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)
        self.muon.zero_grad(set_to_none)


def move(optimizer, finite: torch.Tensor) -> None:
    """Move the weights by their gradients if `finite`, a 0-dimensional tensor, is 1; leave
    everything, the optimizer's state included, if it is 0."""
    # Fused AdamW reads `found_inf` on the device, as it does for torch.amp.GradScaler, and so does
    # Muon. To ask `finite` here would make the CPU wait until the GPU has ended the step.
    for each in optimizers(optimizer):
        each.grad_scale, each.found_inf = None, 1 - finite.float()
    optimizer.step()


# ---- state, for checkpoints ----------------------------------------------------------------------


def optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of PyTorch that an optimizer of `make_optimizer` consists of."""
    if isinstance(optimizer, MuonAdamW):
        return [optimizer.adamw, optimizer.muon]
    return [optimizer]


def named_state(model: AOGPT, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """What an optimizer keeps of every parameter, by the parameter's name. PyTorch's own state
    dict has running numbers, which would not match when parameters move to another group."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: dict(values) for each in optimizers(optimizer) for p, values in each.state.items()
    }


def empty_state(model: AOGPT, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """What `named_state` gives after a first step, all of it 0; every tensor is cut among the
    processes as its parameter is."""
    names, empty = {p: name for name, p in model.named_parameters()}, {}
    for each in optimizers(optimizer):
        for p in (p for group in each.param_groups for p in group["params"]):
            keys = ("momentum_buffer",) if isinstance(each, Muon) else ("exp_avg", "exp_avg_sq")
            empty[names[p]] = {key: torch.zeros_like(p, requires_grad=False) for key in keys}
            if not isinstance(each, Muon):
                empty[names[p]]["step"] = torch.zeros(())
    return empty


def restore_state(model: AOGPT, optimizer, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Let an optimizer go on with what `named_state` gave, on the parameters' device."""
    owner = {}  # of a parameter: the optimizer that moves it
    for each in optimizers(optimizer):
        for group in each.param_groups:
            owner |= dict.fromkeys(group["params"], each)
    parameters = dict(model.named_parameters())
    for name, values in state.items():
        p = parameters[name]
        owner[p].state[p] = {key: value.to(p.device) for key, value in values.items()}
