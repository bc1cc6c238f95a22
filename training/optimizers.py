"""Optimizers and the learning-rate schedule: AdamW for everything, or Muon for the matrices of the blocks."""

from __future__ import annotations

import math

import torch

from model import AOGPT
from training.config import Config


def learning_rate(step: int, config: Config, peak: float | None = None) -> float:
    """Linear warm-up to `peak` (default optim.lr), then a cosine to peak * min_lr_ratio at the end of the run."""
    o = config.optim
    peak = o.lr if peak is None else peak
    if step < o.warmup_steps:
        return peak * (step + 1) / o.warmup_steps
    done = (step - o.warmup_steps) / max(1, config.train.steps - o.warmup_steps)
    return peak * (
        o.min_lr_ratio + (1 - o.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )


def learning_rates(step: int, config: Config) -> dict[str, float]:
    """The rates in force at a step, under the names of their keys: lr of AdamW and, where it is used, muon_lr."""
    rates = {"lr": learning_rate(step, config)}
    if config.optim.kind == "muon":
        rates["muon_lr"] = learning_rate(step, config, config.optim.muon_lr)
    return rates


def set_learning_rates(optimizer, rates: dict[str, float]) -> None:
    """Give every parameter group its rate; Muon's groups are those with Newton-Schulz steps."""
    for group in optimizer.param_groups:
        group["lr"] = rates["muon_lr" if "ns_steps" in group else "lr"]


def make_optimizer(model: AOGPT, config: Config) -> torch.optim.AdamW | MuonAdamW:
    """What optim.kind says; weight decay on matrices only. Raises ValueError where PyTorch has no Muon."""
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
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optim.kind = 'muon' needs PyTorch 2.9 or newer, but this is {torch.__version__}; upgrade torch, or set "
            "optim.kind to 'adamw'"
        )
    # match_rms_adamw: updates as large as AdamW's, so that rate and weight decay mean the same in both
    settings = {"lr": o.muon_lr, "weight_decay": o.weight_decay, "momentum": o.muon_momentum}
    return MuonAdamW(
        adamw, torch.optim.Muon(matrices.values(), **settings, adjust_lr_fn="match_rms_adamw")
    )


def muon_matrices(model: AOGPT) -> dict[str, torch.nn.Parameter]:
    """The matrices of attention and MLP, by name: what maps hidden vectors to hidden vectors, where Muon applies.

    Not its own: embeddings, position tables and the head, whose rows belong to tokens or positions, and the layers of
    adaLN and the noise level, which read a small conditioning vector. The fused qkv matrix counts as one.
    """
    parts = (".attn.", ".mlp.")
    return {
        n: p
        for n, p in model.blocks.named_parameters("blocks")
        if p.dim() == 2 and any(s in n for s in parts)
    }


def parts(optimizer) -> list[torch.optim.Optimizer]:
    return list(optimizer.parts.values()) if isinstance(optimizer, MuonAdamW) else [optimizer]


def named_state(model: AOGPT, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """What an optimizer keeps of every parameter, by the parameter's name."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: dict(values) for part in parts(optimizer) for p, values in part.state.items()}


def restore_state(model: AOGPT, optimizer, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Let an optimizer go on with what `named_state` gave, on the parameters' device."""
    own = dict(model.named_parameters())
    place = {
        p: part for part in parts(optimizer) for group in part.param_groups for p in group["params"]
    }
    for name, values in state.items():
        place[own[name]].state[own[name]] = {
            key: value.to(own[name].device) for key, value in values.items()
        }


def move(optimizer, finite: torch.Tensor) -> None:
    """Move the weights by their gradients if `finite`, a 0-dimensional tensor, is 1; leave everything if it is 0.

    AdamW decides on the device, as it does for torch.amp.GradScaler, so nothing waits; Muon waits for the answer.
    """
    if isinstance(optimizer, MuonAdamW):
        if finite.item():
            optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, 1 - finite.float()
    optimizer.step()


class MuonAdamW:
    """Muon for some weights and AdamW for the others, behind the methods of one optimizer that training uses."""

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Optimizer):
        self.parts = {"adamw": adamw, "muon": muon}

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none)
