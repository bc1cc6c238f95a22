"""Validation during training: losses of the held-out split."""

import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

from ..data.loader import TokenDataset, spread
from ..model import Transformer
from ..orders import OrderConfig, Roles
from ..runtime.devices import autocast
from ..runtime.processes import Processes
from .config import Config
from .optimizers import EMA
from .parallel import reshard


class Loss(NamedTuple):
    """A validation loss: nats per token under some orders."""

    mean: float
    error: float | None  # standard error over Monte Carlo samples of orders or masks


# By the name of the orders, a key of `metrics.ORDER_TITLES`.
LossByOrders = dict[str, Loss]


class ValidationOrders(NamedTuple):
    """A distribution over orders, of which `group` steps are predicted at once."""

    orders: OrderConfig
    group: int = 1


def evaluate(
    model: Transformer,
    average: EMA,
    val_data: TokenDataset,
    config: Config,
    procs: Processes,
) -> dict[str, LossByOrders]:
    """Return the validation losses by weights: "ema", the averaged ones, and "raw", the
    last ones. All processes must call."""
    weights: dict[str, contextlib.AbstractContextManager] = {
        "ema": average.applied(),
        "raw": contextlib.nullcontext(),
    }
    orders, _ = validation_orders(config)
    result: dict[str, LossByOrders] = {}
    model.eval()
    for name, applied in weights.items():
        losses: LossByOrders = {}
        with applied:
            for kind, (of_kind, group) in orders.items():
                losses[kind] = validation_loss(
                    model, val_data, of_kind, config, procs, group=group
                )
        result[name] = losses
    model.train()
    return result


def validation_orders(config: Config) -> tuple[dict[str, ValidationOrders], str]:
    """Return the orders to validate with, by name: left to right, any order, and the
    run's order at the end of its schedule, where it is another one. And the name of the
    orders whose loss selects the best checkpoint."""
    m = config.model
    own, group = config.last_stage()
    orders = {}
    if not m.is_encoder:
        orders["l2r"] = ValidationOrders(OrderConfig("l2r"))
    if not m.l2r_only:
        orders["random"] = ValidationOrders(OrderConfig("random"))
    if m.is_encoder:
        return orders, "random"
    if group == 1 and own.is_l2r:
        return orders, "l2r"
    if group == 1 and own.is_any_order:
        return orders, "random"
    name = "fixed" if own.is_fixed and group == 1 else "own"
    orders[name] = ValidationOrders(own, group)
    return orders, name


def best_by(config: Config) -> str:
    """Return the name of the orders whose loss selects the best checkpoint."""
    return validation_orders(config)[1]


def validation_loss(
    model: Transformer,
    val_data: TokenDataset,
    orders: OrderConfig,
    config: Config,
    procs: Processes,
    group: int = 1,
) -> Loss:
    """Return the mean nats per token of eval.sequences blocks, `group` tokens at a
    time, under eval.draws orders or masks each. Blocks, evenly spread, and orders are
    the same in every validation. All processes must call."""
    from ..evaluation.likelihood import token_nll  # which --help does not need

    chosen = spread(config.eval.sequences, val_data.num_blocks)
    count = len(chosen)
    size = config.micro_batch_size(procs.world_size)
    precision = autocast(procs.device, config.dtype_on(procs.device))
    draws = 1 if orders.is_fixed else config.eval.draws
    totals = torch.zeros(draws, dtype=torch.float64)  # losses of tokens, by draw
    tokens_scored = 0
    share = procs.share(count)
    largest_share = math.ceil(count / procs.world_size)
    for first in range(share.start, share.start + largest_share, size):
        batch_rows = range(first, min(first + size, share.stop))
        # Under fsdp all processes join a forward pass, some with sequence 0, which is
        # not counted.
        counts = bool(batch_rows)
        if not counts:
            batch_rows = range(1)
        tokens = val_data.blocks(chosen[batch_rows]).to(procs.device)
        roles = None
        if val_data.of_records:
            roles = Roles.of(val_data.roles(chosen[batch_rows]))
        for draw in range(draws):
            with precision:
                nll = token_nll(
                    model,
                    tokens,
                    orders,
                    seed=config.seed,
                    draw=draw,
                    rows=batch_rows,
                    total=count,
                    group=group,
                    roles=roles,
                )
            if counts:
                totals[draw] += nll.values.sum(dim=1).sum().cpu()
        if counts:  # as many in every draw
            tokens_scored += int(nll.scored.sum())
    reshard(model)

    parts = procs.gather((totals, tokens_scored))
    total = sum(of_process for of_process, _ in parts)
    means = (total / sum(of_process for _, of_process in parts)).tolist()
    error = None
    if draws > 1:
        error = statistics.stdev(means) / math.sqrt(draws)
    return Loss(statistics.mean(means), error)


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of metrics.jsonl; lines that a kill or a full disk has cut short
    are skipped."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
