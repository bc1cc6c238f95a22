"""Whether a device computes what it should: the checks of `gpu.py` that need no other process.

Models are small and have random weights: what is compared is arithmetic, not speed. Tolerances:
float32 has 24 bits, so a loss of a few hundred products differs from float64 by some 1e-6 of
itself; bfloat16 has 8 bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model import AOGPT
from runtime.devices import autocast
from sampling import engine, passes
from sampling.engine import Engine, Generation
from sampling.plans import Plan, l2r_plan, mdm_plan, random_plan, speculative_plan
from sampling.token_choice import TokenChoice, choose_tokens, probabilities
from training.averages import EMA
from training.batches import Batch, make_batch
from training.config import Config, load_toml
from training.optimizers import make_optimizer, move
from variants import build_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {"vocab_size": 512, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64}
BATCH = 8
COMPILED_TOO = ("aogpt_small", "aogpt_small_fast", "gpt_small")  # whose decoding is checked
EAGER_ON_A_CPU = ("a3_small", "radd_small")
LossOf = Callable[[AOGPT, Batch, Config, int], Tensor]
"""The loss of a model on a batch, as training computes it (`train.training_loss`)."""


@dataclass(frozen=True)
class Check:
    """A line of the table."""

    name: str
    target: str
    measured: str
    ok: bool | None
    """None: a figure without a target."""


def at_most(name: str, measured: float, limit: float) -> Check:
    return Check(name, f"<= {limit:g}", f"{measured:.2g}", measured <= limit)


def all_checks(device: torch.device, loss_of: LossOf) -> Iterator[tuple[str, Callable]]:
    """The name of each check, and the function that yields its lines."""
    configs = small_configs()
    for name, config in configs.items():
        yield name, lambda c=config, n=name: losses_and_gradients(c, n, device, loss_of)
    fast = configs["aogpt_small_fast"]
    yield "compiled", lambda: compiled_training(fast, device, loss_of)
    yield "skipped", lambda: skipped_step(fast, device)
    yield "no wait", lambda: step_without_waiting(fast, device, loss_of)
    yield "token choice", lambda: token_choice(device)
    for name in COMPILED_TOO:
        yield f"decoding, {name}", lambda n=name: decoding(configs[n], n, device)
    for name in EAGER_ON_A_CPU:
        compiled = device.type == "cuda"
        yield f"decoding, {name}", lambda n=name, c=compiled: decoding(configs[n], n, device, c)


# ---- models --------------------------------------------------------------------------------------


def small_configs() -> dict[str, Config]:
    """Every shipped config with a small model of its kind, by name; but not two that come to the
    same."""
    known: dict[str, Config] = {}
    # NAME_small before all others that come to the same.
    for file in sorted(CONFIGS.glob("*.toml"), key=lambda file: ("_small" not in file.name, file)):
        config = load_toml(file)
        sizes = SIZES | {"cond_dim": min(config.model.cond_dim, 16)}
        if config.model.mask_token is not None:
            sizes["mask_token"] = SIZES["vocab_size"] - 1
        train = dataclasses.replace(config.train, batch_size=BATCH, micro_batch_size=BATCH)
        small = dataclasses.replace(
            config, model=dataclasses.replace(config.model, **sizes), train=train
        )
        kinds = [(c.model, c.objective, c.order) for c in known.values()]
        if (small.model, small.objective, small.order) not in kinds:
            known[file.stem] = small
    return known


@torch.no_grad()
def random_model(config: Config) -> AOGPT:
    """In float64 on the CPU, with weights that float32 holds exactly. All of them matter: those
    that begin as 0 (adaLN, biases) or 1 (norms) do not here."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config.model).eval()  # an encoder where the configuration is one's
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.double()


def batch_of(config: Config, step: int = 0) -> Batch:
    ids = config.model.mask_token or config.model.vocab_size
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(ids, (BATCH, config.model.block_size), generator=generator)
    return make_batch(tokens, config, step, range(BATCH))


def loss_and_gradients(
    model: AOGPT, config: Config, dtype: torch.dtype, loss_of: LossOf
) -> tuple[Tensor, list[Tensor]]:
    """On the device of the model; returned in float64 on the CPU."""
    device = model.wte.weight.device
    batch = batch_of(config).map(lambda tensor: tensor.to(device))
    with autocast(device, dtype):
        loss = loss_of(model, batch, config, 0)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return loss.detach().double().cpu(), [gradient.double().cpu() for gradient in gradients]


def relative_errors(got: tuple, expected: tuple) -> tuple[float, float]:
    """Of the loss, and of all gradients together."""
    (loss, gradients), (loss_, gradients_) = got, expected
    difference = sum((a - b).square().sum() for a, b in zip(gradients, gradients_, strict=True))
    norm = sum(gradient.square().sum() for gradient in gradients_)
    return float((loss - loss_).abs() / loss_.abs()), float((difference / norm).sqrt())


# ---- training ------------------------------------------------------------------------------------


def losses_and_gradients(
    config: Config, name: str, device: torch.device, loss_of: LossOf
) -> Iterator[Check]:
    """On the device, in both precisions, against float64 on the CPU."""
    exact = random_model(config)
    expected = loss_and_gradients(exact, config, torch.float64, loss_of)
    model = copy.deepcopy(exact).float().to(device)
    for dtype, limits in ((torch.float32, (1e-5, 1e-5)), (torch.bfloat16, (1e-3, 2e-2))):
        got = loss_and_gradients(model, config, dtype, loss_of)
        loss, gradients = relative_errors(got, expected)
        precision = str(dtype).removeprefix("torch.")
        yield at_most(f"{name}: loss in {precision}, relative error", loss, limits[0])
        yield at_most(f"{name}: gradients in {precision}, relative error", gradients, limits[1])


def compiled_training(config: Config, device: torch.device, loss_of: LossOf) -> Iterator[Check]:
    model = random_model(config).float().to(device)
    expected = loss_and_gradients(model, config, torch.float32, loss_of)
    torch._dynamo.reset()
    model.compile(dynamic=False)
    loss, gradients = relative_errors(
        loss_and_gradients(model, config, torch.float32, loss_of), expected
    )
    yield at_most("compiled against eager: loss, relative difference", loss, 1e-5)
    yield at_most("compiled against eager: gradients, relative difference", gradients, 1e-5)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    yield at_most("compiled training: graph breaks", breaks, 0)
    torch._dynamo.reset()


def skipped_step(config: Config, device: torch.device) -> Iterator[Check]:
    """A step whose gradients are not finite changes nothing, which the device decides by itself."""
    model = random_model(config).float().to(device)
    optimizer, average = make_optimizer(model, config), EMA(model, 0.9)
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    finite = torch.zeros((), device=device)
    move(optimizer, finite)
    average.update(model, finite)
    moved = sum(
        not torch.equal(p, q)
        for p, q in itertools.chain(
            zip(model.parameters(), before, strict=True),
            zip(average.weights.values(), before, strict=True),
        )
    )
    yield at_most("tensors that a step with infinite gradients changed", moved, 0)


def step_without_waiting(config: Config, device: torch.device, loss_of: LossOf) -> Iterator[Check]:
    """Forward, backward, clipping, optimizer and average of a step: an error where it waits."""
    model = random_model(config).float().to(device).train()
    optimizer, average = make_optimizer(model, config), EMA(model, 0.9)
    batch = batch_of(config).map(lambda tensor: tensor.to(device))
    for number in range(3):  # the first steps may load kernels and make states
        with no_waiting(device) if number == 2 else contextlib.nullcontext():
            with autocast(device, torch.bfloat16):
                loss = loss_of(model, batch, config, 0)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            finite = (loss + norm).isfinite().float()
            move(optimizer, finite)
            average.update(model, finite)
            optimizer.zero_grad(set_to_none=True)
    yield at_most("training steps of three that were skipped", 3 - int(average.updates), 0)
    if device.type == "cuda":
        yield Check("training steps that wait for the GPU", "none", "none", True)


@contextlib.contextmanager
def no_waiting(device: torch.device):
    """A context in which it is an error that the CPU waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- decoding ------------------------------------------------------------------------------------


def token_choice(device: torch.device) -> Iterator[Check]:
    """What the engine draws on the device, by its kernel if it has one, against the CPU."""
    kernels, choice = passes.triton_kernels(device), TokenChoice(0.9, 0.95)

    def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
        logits, uniforms = logits.to(device), uniforms.to(device)
        if kernels is not None:
            return kernels.choose(logits, uniforms, choice)[0].cpu()
        return choose_tokens(logits, uniforms, choice).cpu()

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(512, 50257, generator=generator)
    uniforms = torch.rand(512, generator=generator, dtype=torch.float64)
    different = draw(logits, uniforms) != choose_tokens(logits, uniforms, choice)
    # A draw within rounding of a boundary may fall on its other side: some 1e-6 of all.
    yield at_most("token choice: draws unlike the CPU's, of 512", int(different.sum()), 1)
    rows = 20_000
    logits = torch.tensor([[1.0, -0.5, 2.0, 2.0, -torch.inf, 0.3, 1.9, 2.0]])
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
    counts = torch.bincount(draw(logits.repeat(rows, 1), uniforms), minlength=8)
    expected = probabilities(logits, choice)[0] * rows
    possible = expected > 0
    distance = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2), distance.float() / 2))
    ok = p > 1e-4 and not counts[~possible].any()
    yield Check("token choice: p of chi-square, 20,000 draws", "> 0.0001", f"{p:.2g}", ok)


def decoding(
    config: Config, name: str, device: torch.device, compiled: bool = True
) -> Iterator[Check]:
    """Cached against uncached, also in speculation and in bfloat16; compiled against eager, with
    kernels and without."""
    model = random_model(config).float().to(device)
    B, T = 5, config.model.block_size
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    if config.model.l2r_only:
        single = parallel = l2r_plan(B, T)
    else:
        single, parallel = random_plan(B, T, generator), mdm_plan(B, T, 12, generator)
    yield at_most(
        f"{name}: log-probabilities of the cached pass against the uncached, largest difference",
        distance_to_uncached(model, single, uniforms),
        1e-4,
    )
    yield from in_bfloat16(config, name, device, single, uniforms)
    if not (config.model.is_encoder or config.model.l2r_only):
        drafted = speculative_plan(B, T, 4, generator)
        yield at_most(
            f"{name}: log-probabilities of speculation against the uncached, largest difference",
            distance_to_uncached(model, drafted, uniforms),
            1e-4,
        )
    made = engine_of(model, parallel)
    eager = made.generate(parallel, uniforms=uniforms)
    yield from steps_wait_for_nothing(made, parallel, uniforms, f"{name}, eager")
    with kernels_off():
        plain = run(model, parallel, uniforms)
    different = int((plain.tokens != eager.tokens).sum())
    if passes.triton_kernels(device) is not None:
        yield at_most(f"{name}: tokens that the kernels change, of {B * T}", different, 0)
    if compiled:
        yield from compiled_decoding(model, name, parallel, uniforms, eager)


def distance_to_uncached(model: AOGPT, plan: Plan, uniforms: Tensor) -> float:
    """The largest difference of a log-probability; of a plan of one token at a time."""
    done, device = run(model, plan, uniforms), model.wte.weight.device
    score = model.token_log_probs(done.tokens.to(device), plan.order.to(device)).cpu()
    return float((done.log_probs.gather(1, plan.order) - score).abs().max())


def in_bfloat16(
    config: Config, name: str, device: torch.device, plan: Plan, uniforms: Tensor
) -> Iterator[Check]:
    """The cached pass with its kernels may be as far from float64 as the uncached pass is, since
    both round alike; a third more is left for the order of sums."""
    exact = random_model(config)
    model = copy.deepcopy(exact).bfloat16().to(device)
    done = run(model, plan, uniforms)
    score = exact.token_log_probs(done.tokens, plan.order)
    uncached = model.token_log_probs(done.tokens.to(device), plan.order.to(device)).cpu().double()
    cached = done.log_probs.gather(1, plan.order).double()
    errors = [float((log_probs - score).square().mean().sqrt()) for log_probs in (cached, uncached)]
    text = f"{name}: error of the cached pass in bfloat16 / of the uncached"
    yield at_most(text, errors[0] / errors[1], 4 / 3)


def compiled_decoding(
    model: AOGPT, name: str, plan: Plan, uniforms: Tensor, eager: Generation
) -> Iterator[Check]:
    torch._dynamo.reset()
    made, counters = engine_of(model, plan, compile=True), torch._dynamo.utils.counters
    for _ in range(3):  # compiled, recorded, replayed
        compiled = made.generate(plan, uniforms=uniforms)
        graphs = counters["stats"]["unique_graphs"]
    different = int((compiled.tokens != eager.tokens).sum())
    yield at_most(f"{name}: tokens that compiling changes, of {eager.tokens.numel()}", different, 0)
    yield from steps_wait_for_nothing(made, plan, uniforms, f"{name}, compiled")
    compiled_again = counters["stats"]["unique_graphs"] - graphs
    yield at_most(f"{name}: graphs compiled after the warm-up", compiled_again, 0)
    breaks = sum(counters["graph_break"].values())
    yield at_most(f"{name}: graph breaks in decoding", breaks, 0)
    torch._dynamo.reset()


def steps_wait_for_nothing(
    made: Engine, plan: Plan, uniforms: Tensor, name: str
) -> Iterator[Check]:
    """On a GPU: generate with an engine that has done so before, and raise where a step waits."""
    device, step = made.order.device, made._run

    def without_waiting(*arguments):
        with no_waiting(device):
            return step(*arguments)

    made._run = without_waiting
    made.generate(plan, uniforms=uniforms)
    made._run = step
    if device.type == "cuda":
        yield Check(f"{name}: steps of decoding that wait for the GPU", "none", "none", True)


def engine_of(model: AOGPT, plan: Plan, compile: bool = False) -> Engine:
    return Engine(model, len(plan), plan.order.shape[1], TokenChoice(0.9, 0.95), compile=compile)


def run(model: AOGPT, plan: Plan, uniforms: Tensor) -> Generation:
    return engine_of(model, plan).generate(plan, uniforms=uniforms)


@contextlib.contextmanager
def kernels_off():
    """A context in which new engines use no Triton kernels."""
    before = passes.triton_kernels
    engine.triton_kernels = passes.triton_kernels = lambda device: None
    try:
        yield
    finally:
        engine.triton_kernels = passes.triton_kernels = before
