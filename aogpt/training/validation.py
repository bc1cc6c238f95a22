"""Validation during training: losses of the held-out split."""

import contextlib
import math
import statistics
from typing import NamedTuple

import torch

from ..data.loader import TokenDataset, spread
from ..model import Transformer
from ..objectives import token_nll
from ..orders import OrderConfig, Roles
from ..runtime.devices import autocast
from ..runtime.processes import Processes
from .config import Config
from .optimizers import EMA
from .parallel import reshard


class Loss(NamedTuple):
    """Nats per token of the validation split under some orders."""

    mean: float
    error: float | None  # standard error over Monte Carlo samples of orders or masks


Losses = dict[str, Loss]  # by the name of the orders: l2r, random, fixed, own


def evaluate(
    model: Transformer,
    averages: list[EMA],
    val_data: TokenDataset,
    config: Config,
    procs: Processes,
) -> dict[str, Losses]:
    """Validation losses by weights: "" the first average, "_raw" the last weights, "_ema0.99"
    another average. All processes must call."""
    first, *others = averages
    weights = {"": first.applied(model), "_raw": contextlib.nullcontext()}
    weights |= {f"_ema{ema.decay:g}": ema.applied(model) for ema in others}
    result: dict[str, Losses] = {}
    model.eval()
    for name, applied in weights.items():
        with applied:
            result[name] = {
                kind: validation_loss(model, val_data, orders, config, procs, group)
                for kind, (orders, group) in validation_orders(config)[0].items()
            }
    model.train()
    return result


def validation_orders(config: Config) -> tuple[dict[str, tuple[OrderConfig, int]], str]:
    """(order, group size) to validate with, by name: left to right, any order, and the run's order
    at the end of its schedule. And the name of the last, whose loss selects the best checkpoint."""
    m, (own, group) = config.model, config.stage(config.train.steps)
    group = group if config.objective.kind == "groupwise" else 1
    orders = {} if m.is_encoder else {"l2r": (OrderConfig("l2r"), 1)}
    orders |= {} if m.l2r_only else {"random": (OrderConfig("random"), 1)}
    if m.is_encoder or group == 1 and own.kind in ("l2r", "random", "mixture"):
        return orders, "l2r" if own.kind == "l2r" or m.l2r_only else "random"
    name = "fixed" if own.is_fixed and group == 1 else "own"
    return orders | {name: (own, group)}, name


def best_by(config: Config) -> str:
    """The name of the orders whose loss selects the best checkpoint."""
    return validation_orders(config)[1]


def validation_loss(
    model,
    val_data: TokenDataset,
    orders: OrderConfig,
    config: Config,
    procs: Processes,
    group=1,
) -> Loss:
    """Mean nats per token of eval.sequences blocks, `group` tokens at a time, under eval.draws
    orders or masks each. Blocks, evenly spread, and orders are the same in every validation. All
    processes must call."""
    chosen = spread(config.eval.sequences, val_data.num_blocks)
    count = len(chosen)
    size = config.micro_batch_size(procs.world_size)
    dtype = config.dtype_on(procs.device)
    draws = 1 if orders.is_fixed else config.eval.draws
    totals = torch.zeros(draws, dtype=torch.float64)  # losses of sequences, by draw
    scored = torch.zeros((), dtype=torch.float64)  # tokens of data with prompts
    share = procs.share(count)
    largest_share = math.ceil(count / procs.world_size)
    for first in range(share.start, share.start + largest_share, size):
        batch_rows = range(first, min(first + size, share.stop))
        roles = None
        # Under fsdp all processes join a forward pass, some with sequence 0, which is not counted.
        counts = bool(batch_rows)
        batch_rows = batch_rows or range(1)
        tokens = val_data.blocks(chosen[batch_rows]).to(procs.device)
        if val_data.of_records:
            roles = Roles.of(val_data.roles(chosen[batch_rows]))
            scored += roles.predicted.sum() * counts
        for draw in range(draws):
            rows = config.seed, draw, batch_rows, count
            with autocast(procs.device, dtype):
                nll = token_nll(
                    model, tokens, orders, *rows, group=group, roles=roles
                ).cpu()
            if counts:
                # With prompts, sequences differ in predicted tokens: the mean is over tokens.
                totals[draw] += nll.mean(dim=1).sum() if roles is None else nll.nansum()
    reshard(model)

    totals, scored = map(sum, zip(*procs.gather((totals, scored)), strict=True))
    means = (totals / (scored if val_data.of_records else count)).tolist()
    error = statistics.stdev(means) / math.sqrt(draws) if draws > 1 else None
    return Loss(statistics.mean(means), error)
