"""optimizers.py: the schedule, weight decay, which weights Muon moves and how, and its
state."""

import copy
import math

import pytest
import torch
from helpers import NoHostReads, change, tiny_config
from reference import SYSTEMS, make_system

from aogpt.systems import build_model, matrices_of
from aogpt.training import optimizers as optimizers_module
from aogpt.training.optimizers import learning_rate, learning_rates, make_optimizers


def muon_config(**changes):
    return tiny_config(
        "",
        "",
        optim__kind="muon",
        optim__muon_lr=2e-2,
        optim__weight_decay=0.5,
        **changes,
    )


def with_gradients(config, seed=0):
    """Return a model whose gradients are random numbers, always the same."""
    torch.manual_seed(1)
    model = build_model(config.model)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps, warmup", [(100, 10), (20, 0), (30, 28)])
def test_the_learning_rate_warms_up_linearly_then_falls_to_its_floor(
    kind, steps, warmup
):
    """wsd is constant until its last fifth, so that a run can be extended."""
    config = tiny_config("", "", steps=steps, optim__schedule=kind, optim__lr=0.5)
    config = change(config, optim__warmup_steps=warmup, optim__min_lr_ratio=0.2)
    start = warmup
    if kind == "wsd":
        start = max(warmup, steps - round(0.2 * steps))
    for step in range(steps + 1):
        progress = max(0, step - start) / (steps - start)
        remaining = 1 - progress
        if kind == "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        expected = 0.1 + 0.4 * remaining
        if step < warmup:
            expected = 0.5 * (step + 1) / warmup
        assert learning_rate(step, config) == pytest.approx(expected)
    both = learning_rates(17, change(config, optim__kind="muon", optim__muon_lr=1.5))
    assert both["lr"] == learning_rate(17, config)
    assert both["muon_lr"] == pytest.approx(3 * both["lr"])


def muon_weights(model):
    """Return the weights that Muon takes, by name."""
    matrices = {p for p, _ in matrices_of(model)}
    return {name: p for name, p in model.named_parameters() if p in matrices}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "target, tied", [("adaln", False), ("input", True), ("none", False)]
)
def test_weight_decay_shrinks_every_matrix_and_nothing_else(target, tied, kind):
    order = "l2r" if target == "none" else "random"
    config = muon_config(order__kind=order, model__target=target, model__tied_head=tied)
    config = change(config, optim__kind=kind)
    model = build_model(config.model)
    optimizers = make_optimizers(model, config)
    matrices = {}
    if kind == "muon":
        matrices = muon_weights(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        # then either optimizer moves a weight by its decay alone
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    for name, p in model.named_parameters():
        rate = 3e-3
        if name in matrices:
            rate = 2e-2
        factor = 1.0
        if p.dim() >= 2:
            factor = 1 - rate * 0.5
        torch.testing.assert_close(
            p.detach(), before[name] * factor, rtol=1e-6, atol=0, msg=name
        )


@pytest.mark.parametrize("system", SYSTEMS)
def test_muon_takes_the_matrices_of_attention_and_mlp_of_every_system_and_nothing_else(
    system,
):
    model = make_system(system, dtype=torch.float32)
    layers = ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"]
    if model.config.mlp == "swiglu":
        layers.append("mlp.gate")
    expected = set()
    for i in range(len(model.blocks)):
        expected.update(f"blocks.{i}.{layer}.weight" for layer in layers)
    assert muon_weights(model).keys() == expected
    owned = []
    for optimizer in make_optimizers(model, muon_config()):
        for group in optimizer.param_groups:
            owned += group["params"]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_step_of_muon_reads_no_value_of_the_device(found_inf):
    """Nor whether it is to be left out."""
    model = with_gradients(muon_config())
    _, optimizer = make_optimizers(model, muon_config())
    before = copy.deepcopy(model)
    matrices = muon_weights(model)
    optimizer.found_inf = torch.tensor(found_inf)
    with NoHostReads():
        optimizer.step()
    old_values = dict(before.named_parameters())
    for name, p in model.named_parameters():
        is_unchanged = bool(found_inf) or name not in matrices
        assert torch.equal(p, old_values[name]) == is_unchanged


def newton_schulz(gradient):
    """Return five steps of X <- a X + b (X X') X + c (X X')^2 X, in float64 (Jordan et
    al.)."""
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.double()
    if is_tall:
        x = x.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    if is_tall:
        return x.T
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_two_steps_of_muon_and_adamw_follow_their_formulas(monkeypatch, momentum):
    monkeypatch.setattr(optimizers_module, "MUON_MOMENTUM", momentum)
    config = muon_config()
    model = with_gradients(config)
    plain = with_gradients(config)
    optimizers = make_optimizers(model, config)
    (adamw,) = make_optimizers(plain, change(config, optim__kind="adamw"))
    starts = {name: p.detach().double() for name, p in muon_weights(model).items()}
    expected = dict(starts)
    buffers = {name: torch.zeros_like(value) for name, value in expected.items()}
    for seed in (0, 5):
        gradients = dict(with_gradients(config, seed).named_parameters())
        for each in (model, plain):
            for name, p in each.named_parameters():
                p.grad = gradients[name].grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        adamw.step()
        for name, weight in expected.items():
            gradient = gradients[name].grad.double()
            buffers[name] = momentum * buffers[name] + (1 - momentum) * gradient
            update = momentum * buffers[name] + (1 - momentum) * gradient  # Nesterov
            # queries, keys and values are matrices of their own
            parts = 3 if "qkv" in name else 1
            update = torch.cat([newton_schulz(part) for part in update.chunk(parts)])
            factor = math.sqrt(max(1, len(weight) / parts / weight.shape[1]))
            expected[name] = weight * (1 - 2e-2 * 0.5) - 2e-2 * factor * update
    plain_parameters = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if name in expected:  # float32, through five products of matrices
            step = expected[name] - starts[name]
            error = (p.detach().double() - expected[name]).norm() / step.norm()
            assert error < 1e-4, (name, error)
        else:
            assert torch.equal(p, plain_parameters[name]), name
