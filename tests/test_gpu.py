"""`make gpu` runs this on a GPU; elsewhere what a CPU can show runs.

Models are small and have random weights: what is compared is arithmetic. float32 has 24
bits, so a loss of a few hundred products differs from float64 by some 1e-6 of itself;
bfloat16 has 8 bits."""

import contextlib
import copy
import dataclasses

import helpers
import pytest
import torch
from helpers import (
    ROOT,
    change,
    metrics,
    run_script,
    tiny_config,
    torchrun,
    write_config,
)

from aogpt.runtime.devices import autocast
from aogpt.sampling import (
    Engine,
    Samples,
    TokenChoice,
    mdm_plan,
    order_plan,
    speculative_plan,
)
from aogpt.sampling.token_choice import choose_tokens
from aogpt.scoring import token_log_probs
from aogpt.systems import build_model
from aogpt.training.batches import make_batch
from aogpt.training.checkpoint import Progress, State
from aogpt.training.config import load_toml
from aogpt.training.optimizers import EMA, make_optimizers
from train import update

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
VOCAB_SIZE = 512
BLOCK_SIZE = 32
BATCH = 8

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", DEVICES)]


def small_configs():
    """Return every shipped config with a small model of its kind, by name, each kind
    once."""
    configs = {}
    for file in sorted((ROOT / "configs").glob("*_small*.toml")):
        config = load_toml(file)
        mask_token = config.model.mask_token
        model = dataclasses.replace(
            config.model,
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
            n_layer=2,
            n_head=2,
            n_embd=64,
            cond_dim=min(config.model.cond_dim, 16),
            mask_token=None if mask_token is None else VOCAB_SIZE - 1,
        )
        small = change(
            config, model=model, train__batch_size=BATCH, train__micro_batch_size=BATCH
        )
        kind = small.model, small.objective, small.order
        if kind not in [(c.model, c.objective, c.order) for c in configs.values()]:
            configs[file.stem] = small
    return configs


CONFIGS = small_configs()


@torch.no_grad()
def random_model(config):
    """In float64 on the CPU, with weights that float32 holds exactly and that all
    matter."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config.model).eval()
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.double()


def batch_of(config, device="cpu"):
    ids = config.model.mask_token or config.model.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ids, (BATCH, config.model.block_size), generator=generator)
    return make_batch(tokens, config, 0, range(BATCH)).map(
        lambda tensor: tensor.to(device)
    )


def loss_and_gradients(model, config, dtype):
    """On the device of the model; in float64 on the CPU."""
    device = model.wte.weight.device
    with autocast(device, dtype):
        loss = config.objective.definition.loss(
            model, batch_of(config, device), config.objective
        )
    gradients = torch.autograd.grad(
        loss, list(model.parameters()), materialize_grads=True
    )
    return loss.detach().double().cpu(), torch.cat(
        [g.double().cpu().flatten() for g in gradients]
    )


def relative_errors(got, expected):
    return [
        float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)
    ]


@contextlib.contextmanager
def no_waiting(device):
    """It is an error that the CPU waits for a GPU."""
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_float64(device, name):
    config = CONFIGS[name]
    exact = random_model(config)
    expected = loss_and_gradients(exact, config, torch.float64)
    model = copy.deepcopy(exact).float().to(device)
    for dtype, limits in (
        (torch.float32, (1e-5, 1e-5)),
        (torch.bfloat16, (1e-3, 2e-2)),
    ):
        loss, gradients = relative_errors(
            loss_and_gradients(model, config, dtype), expected
        )
        assert loss < limits[0] and gradients < limits[1], (dtype, loss, gradients)


@pytest.mark.slow(reason="compiles")
def test_compiled_training_is_eager_training_without_a_graph_break(device):
    config = CONFIGS["aogpt_small_fast"]
    model = random_model(config).float().to(device)
    expected = loss_and_gradients(model, config, torch.float32)
    torch._dynamo.reset()
    model.compile(dynamic=False)
    got = loss_and_gradients(model, config, torch.float32)
    assert max(relative_errors(got, expected)) < 1e-5
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_training_step_waits_for_nothing_and_skips_what_is_not_finite(device):
    config = CONFIGS["aogpt_small_fast"]
    model = random_model(config).float().to(device).train()
    average = EMA(model, 0.9)
    batch = batch_of(config, device)
    state = State(model, average, make_optimizers(model, config), Progress())
    for number in range(3):  # the first steps may load kernels and make states
        with no_waiting(device if number == 2 else "cpu"):
            with autocast(torch.device(device), torch.bfloat16):
                loss = config.objective.definition.loss(model, batch, config.objective)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(state, loss, norm)
    assert int(average.updates) == 3
    before = [p.clone() for p in (*model.parameters(), *average.weights.values())]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    nan = torch.full((), torch.nan, device=device)
    update(state, nan, nan)
    after = (*model.parameters(), *average.weights.values())
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))


@pytest.mark.slow(reason="trains in several processes")
def test_processes_resumed_and_deterministic_runs_have_the_losses_of_one(
    device, tmp_path
):
    config = tiny_config(
        helpers.make_data(tmp_path),
        tmp_path,
        steps=6,
        model__n_embd=64,
        model__dropout=0.0,
        optim__warmup_steps=2,
        train__device=device,
        train__dtype="float32",
        checkpoint__interval=3,
    )

    def losses(name, run=run_script, **changes):
        of_run = change(config, name=name, **changes)
        run("train.py", write_config(of_run))
        return list(metrics(of_run, "loss").values())

    def parallel(*words):
        processes = 2
        if device == "cuda":
            processes = min(2, torch.cuda.device_count())
        return torchrun(processes, *words)

    alone = losses("alone")
    for mode in ("ddp", "fsdp"):
        together = losses(mode, parallel, train__parallel=mode)
        assert together == pytest.approx(alone, abs=1e-4)
    losses("halves", train__steps=3)
    assert losses("halves") == pytest.approx(alone, abs=1e-4)
    once = losses("once", train__deterministic=True)
    assert losses("again", train__deterministic=True) == once


def test_tokens_are_drawn_as_on_a_cpu(device):
    choice = TokenChoice(0.9, 0.95)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(128, 50257, generator=generator)
    uniforms = torch.rand(128, generator=generator, dtype=torch.float64)
    drawn = choose_tokens(logits.to(device), uniforms.to(device), choice).cpu()
    assert int((drawn != choose_tokens(logits, uniforms, choice)).sum()) <= 1


def engine_of(model, **options):
    return Engine(model, TokenChoice(0.9, 0.95), **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_is_the_uncached_model(device, name):
    """In bfloat16, too, where it may be a third further from float64 than the uncached
    one."""
    config = CONFIGS[name]
    exact = random_model(config)
    B = 5
    T = config.model.block_size
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    order = "l2r" if config.model.l2r_only else "random"
    plans = [order_plan(Samples(B, T, generator), order)]
    if not (config.model.is_encoder or config.model.l2r_only):
        plans.append(speculative_plan(Samples(B, T, generator), 4))

    def log_probs(dtype, plan):
        """Of the samples of a plan: cached, uncached, and uncached in float64."""
        model = copy.deepcopy(exact).to(device, dtype)
        done = engine_of(model).generate(plan, uniforms=uniforms)
        text = done.tokens.to(device), plan.order.to(device)
        cached = done.log_probs.gather(1, plan.order).double()
        uncached = token_log_probs(model, text[0], text[1]).cpu()
        return cached, uncached, token_log_probs(exact, done.tokens, plan.order)

    for plan in plans:
        cached, uncached, _ = log_probs(torch.float32, plan)
        assert (cached - uncached).abs().max() < 1e-4
    cached, uncached, expected = log_probs(torch.bfloat16, plans[0])
    assert (cached - expected).norm() < 4 / 3 * (uncached - expected).norm()


@pytest.mark.slow(reason="compiles")
@pytest.mark.parametrize("name", ["aogpt_small", "aogpt_small_fast", "gpt_small"])
def test_compiled_decoding_is_eager_decoding_and_compiles_nothing_twice(device, name):
    config = CONFIGS[name]
    model = random_model(config).float().to(device)
    generator = torch.Generator().manual_seed(1)
    B = 5
    T = config.model.block_size
    batch = Samples(B, T, generator)
    plan = mdm_plan(batch, 12)
    if config.model.l2r_only:
        plan = order_plan(batch, "l2r")
    uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    expected = engine_of(model).generate(plan, uniforms=uniforms)
    torch._dynamo.reset()
    engine = engine_of(model, compile=True)
    counters = torch._dynamo.utils.counters
    for _ in range(3):  # compiled, recorded, replayed
        done = engine.generate(plan, uniforms=uniforms)
        graphs = counters["stats"]["unique_graphs"]
    assert torch.equal(done.tokens, expected.tokens)
    engine.generate(plan, uniforms=uniforms)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
