"""The fused norm of adaLN against float64, and the options of a GPU that are opt in."""

import copy

import numpy as np
import pytest
import torch
from reference import make_system, seeded

from aogpt.model import inverse_permutation
from aogpt.objectives import ao_ar_loss
from aogpt.runtime.errors import UserError
from aogpt.training import gpu_options
from aogpt.training.config import TrainConfig
from aogpt.training.gpu_options import FusedPass, use_gpu_options

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
if (
    not torch.cuda.is_available()
    and triton.__version__ < "3.7"
    and np.__version__ >= "2.4"
):
    pytest.skip(
        "the interpreter of Triton before 3.7 needs NumPy before 2.4",
        allow_module_level=True,
    )
from aogpt.training.norm_kernel import modulated_norm  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def in_float64(x, weight, table, targets):
    shift, scale = table.chunk(6, dim=-1)[:2]
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight
    return normed * (1 + scale[targets]) + shift[targets]


@pytest.mark.parametrize(
    "B, T, D, positions", [(1, 1, 16, 1), (3, 10, 24, 13), (2, 7, 130, 7)]
)
@pytest.mark.parametrize(
    "x_dtype, table_dtype, limit",
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 5e-3),  # as under autocast
        (torch.bfloat16, torch.bfloat16, 5e-3),
    ],
)
def test_values_and_gradients_are_those_of_float64(
    B, T, D, positions, x_dtype, table_dtype, limit
):
    """Also with sequences that are shorter than the table; shift and scale are columns
    of it."""
    generator = seeded(D)
    x = torch.randn(B, T, D, generator=generator).to(x_dtype)
    weight = torch.randn(D, generator=generator)
    table = (0.5 * torch.randn(positions, 6 * D, generator=generator)).to(table_dtype)
    targets = torch.stack([torch.randperm(T, generator=generator) for _ in range(B)])
    grad = torch.randn(B, T, D, generator=generator).to(table_dtype)
    exact = [v.double().requires_grad_() for v in (x, weight, table)]
    expected = in_float64(*exact, targets)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    inputs = [v.to(DEVICE).requires_grad_() for v in (x, weight, table)]
    shift, scale = inputs[2].chunk(6, dim=-1)[:2]
    targets = targets.to(DEVICE)
    inverse = inverse_permutation(targets)
    y, _ = modulated_norm(*inputs[:2], shift, scale, targets, inverse, EPS)
    assert y.dtype == table_dtype
    gradients = torch.autograd.grad(y, inputs, grad.to(DEVICE))
    results = zip((y, *gradients), (expected, *expected_gradients), strict=True)
    for got, wanted in results:
        assert (got.cpu().double() - wanted).norm() <= limit * wanted.norm()


def small_model():
    return make_system(
        "AO-GPT",
        scale=0.7,
        tokens=17,
        block_size=12,
        n_head=2,
        n_embd=24,
        cond_dim=6,
    )


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(gpu_options, "can_run_triton", lambda device: True)


def loss_and_gradients(model):
    generator = seeded(3)
    device = model.wte.weight.device
    tokens = torch.randint(17, (4, 12), generator=generator).to(device)
    order = torch.stack([torch.randperm(12, generator=generator) for _ in range(4)])
    loss = ao_ar_loss(model, tokens, order.to(device))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([loss.flatten(), *[g.flatten() for g in gradients]]).double().cpu()


def test_a_model_with_the_fused_norm_has_the_gradients_of_float64(with_triton):
    exact = small_model()
    expected = loss_and_gradients(exact)
    model = copy.deepcopy(exact).float().to(DEVICE)
    use_gpu_options(model, TrainConfig(fused_norm=True), DEVICE)
    assert model.pass_type is FusedPass
    got = loss_and_gradients(model)
    assert abs(got[0] - expected[0]) < 1e-5 * expected[0]
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow(reason="compiles")
def test_the_fused_norm_compiles_into_one_graph(with_triton):
    torch._dynamo.reset()
    model = small_model().float().to(DEVICE)
    expected = loss_and_gradients(model)
    use_gpu_options(model, TrainConfig(fused_norm=True), DEVICE)
    model.compile(dynamic=False)
    counters = torch._dynamo.utils.counters
    counters.clear()
    got = loss_and_gradients(model)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert (got - expected).norm() < 1e-5 * expected.norm()
    torch._dynamo.reset()


def test_without_a_gpu_or_for_another_model_the_options_are_refused(
    with_triton, monkeypatch
):
    model = make_system("target rotary", 0, torch.float32)
    with pytest.raises(UserError, match="train.fused_norm is for decoders with"):
        use_gpu_options(model, TrainConfig(fused_norm=True), DEVICE)
    monkeypatch.undo()
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match="train.fused_norm needs an NVIDIA GPU"):
        use_gpu_options(small_model(), TrainConfig(fused_norm=True), cpu)
    with pytest.raises(UserError, match="train.flash3 needs an NVIDIA GPU"):
        use_gpu_options(small_model(), TrainConfig(flash3=True), cpu)
    model = small_model()
    use_gpu_options(model, TrainConfig(), cpu)
    assert model.pass_type is not FusedPass
