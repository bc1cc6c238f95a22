"""What models cost beside each other on one core: memory of a training step, time and
memory of decoding. Weights are random, which changes none of these."""

import itertools
import time
from dataclasses import asdict, dataclass

import torch

from aogpt.runtime.command_line import show
from aogpt.sampling import Engine, Plan, plans
from aogpt.systems import build_model
from aogpt.training.batches import make_batch
from aogpt.training.config import Config
from aogpt.training.optimizers import EMA, make_optimizers
from studies.bench_common import seeded
from studies.decoding_speed import allocated
from studies.step_speed import update

SAMPLES = 8
CPU = torch.device("cpu")


@dataclass
class Costs:
    """Of one run config. Bytes are the most at a time, of tensors."""

    training_bytes: int  # with weights, their average and the optimizer's state
    decoding_bytes: int  # without the weights
    samples: int  # decoded at once
    steps: tuple[int, ...]  # of decoding: few, and one for each position
    seconds: list[list[float]]  # for each of `steps`, of each repetition


def costs_in_turn(configs: dict[str, Config], repetitions: int) -> dict[str, dict]:
    """Return the costs by name. All models decode in turn, in each repetition the same
    plan; one more before that is a warm-up."""
    torch.set_num_threads(1)  # as in the runs
    engines: dict[str, Engine] = {}
    costs: dict[str, Costs] = {}
    for name, config in configs.items():
        steps = (config.model.block_size // 4, config.model.block_size)
        engine = Engine(build_model(config.model).eval())
        plan = masked_diffusion(config, steps[-1], 0)
        _, most = allocated(CPU, lambda e=engine, p=plan: e.generate(p))
        engines[name] = engine
        costs[name] = Costs(
            training_bytes=training_bytes(config),
            decoding_bytes=most,
            samples=SAMPLES,
            steps=steps,
            seconds=[[] for _ in steps],
        )
    for repetition, name in itertools.product(range(repetitions + 1), configs):
        own = costs[name]
        for steps, seconds in zip(own.steps, own.seconds, strict=True):
            plan = masked_diffusion(configs[name], steps, repetition)
            started = time.perf_counter()
            engines[name].generate(plan, uniforms=seeded(repetition))
            if repetition > 0:
                seconds.append(time.perf_counter() - started)
        show(f"{name}: decoded {SAMPLES} samples", flush=True)
    return {name: asdict(own) for name, own in costs.items()}


def masked_diffusion(config: Config, steps: int, seed: int) -> Plan:
    samples = plans.Samples(SAMPLES, config.model.block_size, seeded(seed))
    return plans.mdm_plan(samples, steps)


def training_bytes(config: Config) -> int:
    """Return the most bytes of tensors in the first two steps of a run on a CPU."""
    shape = (config.train.batch_size, config.model.block_size)

    def train() -> None:
        model = build_model(config.model)
        average = EMA(model, config.optim.ema_decay)
        optimizers = make_optimizers(model, config)
        ids = config.model.mask_token or config.model.vocab_size
        tokens = torch.randint(ids, shape, generator=seeded())
        for step in range(2):
            batch = make_batch(tokens, config, step, range(shape[0]))
            loss = config.objective.definition.loss(model, batch, config.objective)
            update(loss, model, optimizers, average)

    _, most = allocated(CPU, train)
    return most
