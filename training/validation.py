"""Validation during training: losses of the held-out split, and how they fall along the order."""

import contextlib
import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor

from data.loader import TokenDataset
from model import AOGPT
from objectives import evaluation_masks, token_nll
from orders import OrderConfig, Roles, orders_at
from runtime.devices import autocast, pick_dtype
from runtime.processes import Processes
from training.averages import EMA
from training.config import Config
from training.parallel import reshard

CURVE_POINTS = 64  # at most


class Loss(NamedTuple):
    """Nats per token of the validation split under some orders."""

    mean: float
    error: float | None  # standard error over Monte Carlo samples of orders or masks
    curve: list  # mean by step, see `add_by_step`; None where nothing was measured


Losses = dict[str, Loss]  # by the name of the orders: l2r, random, fixed, own


def evaluate(
    model: AOGPT, averages: list[EMA], val_data: TokenDataset, config: Config, procs: Processes
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
                for kind, (orders, group) in validation_orders(config).items()
            }
    model.train()
    return result


def final_stage(config: Config) -> tuple[OrderConfig, int]:
    """Orders and group size at the end of a schedule: the same in all validations of a run."""
    orders, group = config.stage(config.train.steps)
    return orders, group if config.objective.kind == "groupwise" else 1


def best_by(config: Config) -> str:
    """The name of the run's own orders, whose validation loss decides which checkpoint is best."""
    orders, group = final_stage(config)
    if config.model.is_encoder or group == 1 and orders.kind in ("l2r", "random", "mixture"):
        l2r = orders.kind == "l2r" or config.model.l2r_only
        return "l2r" if l2r else "random"
    return "fixed" if orders.is_fixed and group == 1 else "own"


def validation_orders(config: Config) -> dict[str, tuple[OrderConfig, int]]:
    """Orders and groups to evaluate in, by name: left to right, any order, the run's own."""
    kinds = {"l2r": not config.model.is_encoder, "random": not config.model.l2r_only}
    orders = {kind: (OrderConfig(kind), 1) for kind, possible in kinds.items() if possible}
    own = best_by(config)
    return orders if own in orders else orders | {own: final_stage(config)}


def validation_loss(
    model, val_data: TokenDataset, orders: OrderConfig, config: Config, procs: Processes, group=1
) -> Loss:
    """Mean nats per token of eval.sequences blocks, predicted `group` at a time, under eval.draws
    orders or masks each, the same in every validation of a run. All processes must call."""
    count, size = min(config.eval.sequences, val_data.num_blocks), config.train.micro_batch_size
    dtype = pick_dtype(config.train.dtype, procs.device)
    draws = 1 if orders.is_fixed else config.eval.draws
    totals = torch.zeros(draws, dtype=torch.float64)  # losses of sequences, by draw
    scored = torch.zeros((), dtype=torch.float64)  # tokens of data with prompts
    sums = torch.zeros(2, min(CURVE_POINTS, val_data.block_size), dtype=torch.float64)

    share = procs.share(count)
    largest_share = math.ceil(count / procs.world_size)
    for first in range(share.start, share.start + largest_share, size):
        batch_rows, roles = range(first, min(first + size, share.stop)), None
        # Under fsdp all processes take part in a forward pass: one that has no sequences left makes
        # it on sequence 0, which does not count.
        counts = bool(batch_rows)
        batch_rows = batch_rows or range(1)
        tokens = val_data.blocks(list(batch_rows)).to(procs.device)
        if val_data.of_records:
            roles = Roles.of(val_data.roles(list(batch_rows)))
            scored += roles.predicted.sum() * counts
        for draw in range(draws):
            rows = config.seed, draw, batch_rows, count
            with autocast(procs.device, dtype):
                nll = token_nll(model, tokens, orders, *rows, group=group, roles=roles).cpu()
            if counts:
                # Sequences of data with prompts differ in length: their mean is over tokens.
                totals[draw] += nll.mean(dim=1).sum() if roles is None else nll.nansum()
                add_by_step(sums, nll, None if config.model.is_encoder else orders, rows, roles)
    reshard(model)

    gathered = zip(*procs.gather((totals, sums, scored)), strict=True)
    totals, sums, scored = map(sum, gathered)
    means = (totals / (scored if val_data.of_records else count)).tolist()
    curve = [loss / n if n else None for loss, n in sums.T.tolist()]
    error = statistics.stdev(means) / math.sqrt(draws) if draws > 1 else None
    return Loss(statistics.mean(means), error, curve)


def add_by_step(
    sums: Tensor, nll: Tensor, orders: OrderConfig | None, rows: tuple, roles: Roles | None
) -> None:
    """Add losses (B, T) to sums (2, points) float64, of losses and their number, by how many tokens
    are known: step i of T at point floor(i points / T). orders: None for an encoder, whose masked
    tokens count at the number of known ones. rows: (seed, draw, rows, total) of `token_nll`."""
    seed, draw, batch_rows, total = rows
    length, measured, nll = nll.shape[1], ~nll.isnan(), nll.nan_to_num()
    if orders is None:
        masks = evaluation_masks(seed, draw, batch_rows, total, length, roles)
        number = masks.masked.sum(dim=1)
        step = (length if roles is None else roles.lengths) - number
        losses = nll.sum(dim=1) / masks.weight  # of a sequence, over its masked positions
    else:
        order = orders_at(orders, seed, draw, batch_rows, length)
        order = order if roles is None else roles.first_given(order)
        step = torch.arange(length)
        losses = nll.gather(1, order).sum(dim=0)  # of a step, over sequences
        number = measured.gather(1, order).sum(dim=0)
    sums.index_add_(1, step * sums.shape[1] // length, torch.stack([losses, number.double()]))
