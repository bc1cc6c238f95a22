"""Validation during training: losses of the held-out split, and how they fall along the order.

B sequences, T positions.
"""

from __future__ import annotations

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

CURVE_POINTS = 64  # at most; of a curve by step


class Loss(NamedTuple):
    """Nats per token of the validation split under some orders."""

    mean: float
    error: float | None
    """Standard error of the mean, as other draws of orders or masks would have given another;
    None of a single draw. The sequences are the same in every run."""
    curve: list
    """By step, see `by_step`."""


Losses = dict[str, Loss]
"""By the name of the orders, as in metrics.jsonl: l2r, random, fixed, own."""


def evaluate(
    model: AOGPT, averages: list[EMA], val_data: TokenDataset, config: Config, procs: Processes
) -> dict[str, Losses]:
    """Validation losses by the weights, named as in metrics.jsonl: "" the averaged ones, "_raw" the
    last, "_ema0.99" those of another decay. All processes must call.

    averages: that of optim.ema_decay first.
    """

    def losses() -> Losses:
        _, group = final_stage(config)
        return {
            name: validation_loss(
                model, val_data, orders, config, procs, group if name == "own" else 1
            )
            for name, orders in validation_orders(config).items()
        }

    model.eval()
    ema, *others = averages
    with ema.applied(model):
        result = {"": losses()}
    result["_raw"] = losses()
    for other in others:
        with other.applied(model):
            result[f"_ema{other.decay:g}"] = losses()
    model.train()
    return result


def validation_orders(config: Config) -> dict[str, OrderConfig]:
    """The distributions over orders that the model can be evaluated under, by name: those of the
    any-order and of the left-to-right likelihood, and the run's own where they are others or come
    in groups."""
    if config.model.is_encoder:  # an encoder knows no order
        return {"random": OrderConfig("random")}
    orders = {"l2r": OrderConfig("l2r")}
    if not config.model.l2r_only:
        orders["random"] = OrderConfig("random")
    own, group = final_stage(config)
    if group > 1 or own.kind not in ("l2r", "random", "mixture"):
        orders["fixed" if own.is_fixed and group == 1 else "own"] = own
    return orders


def best_by(config: Config) -> str:
    """The name of the orders whose validation loss says which checkpoint is the best: the run's
    own."""
    names = validation_orders(config)
    for own in ("fixed", "own"):
        if own in names:
            return own
    # A mixture is random orders but for a few. A model without target positions has l2r alone.
    orders, _ = final_stage(config)
    return "l2r" if orders.kind == "l2r" or "random" not in names else "random"


def final_stage(config: Config) -> tuple[OrderConfig, int]:
    """Orders and group size that a schedule leads to: it is judged by them from the first step on,
    so that all losses of a run can be compared."""
    orders, group = config.stage(config.train.steps)
    return orders, group if config.objective.kind == "groupwise" else 1


def validation_loss(
    model: AOGPT,
    val_data: TokenDataset,
    orders: OrderConfig,
    config: Config,
    procs: Processes,
    group: int = 1,
) -> Loss:
    """Mean nats per token of the first eval.sequences blocks, predicted `group` at a time.

    Every block is scored under eval.draws orders (a single one where orders are not random), or
    sets of masked positions, which are the same in every evaluation of the run, so that the loss
    changes with the weights alone.
    """
    count, size = min(config.eval.sequences, val_data.num_blocks), config.train.micro_batch_size
    points = min(CURVE_POINTS, val_data.block_size)
    dtype = pick_dtype(config.train.dtype, procs.device)
    draws = 1 if orders.is_fixed else config.eval.draws
    totals = torch.zeros(draws, dtype=torch.float64)  # of the losses of sequences, by draw
    tokens_scored = torch.zeros((), dtype=torch.float64)  # of records
    sums = torch.zeros(2, points, dtype=torch.float64)  # of losses by step, and how many

    share = procs.share(count)
    largest_share = math.ceil(count / procs.world_size)
    for first in range(share.start, share.start + largest_share, size):
        batch_rows = range(first, min(first + size, share.stop))
        # Under fsdp a forward pass is common work of all processes: one that has fewer sequences
        # than another makes a pass too many, on sequence 0, and does not count it.
        counts = bool(batch_rows)
        batch_rows = batch_rows or range(1)
        tokens = val_data.blocks(list(batch_rows)).to(procs.device)
        roles = None
        if val_data.of_records:
            roles = Roles.of(val_data.roles(list(batch_rows)))
            tokens_scored += roles.predicted.sum() * counts
        for draw in range(draws):
            of_draw = config.seed, draw, batch_rows, count
            with autocast(procs.device, dtype):
                nll = token_nll(model, tokens, orders, *of_draw, group=group, roles=roles).cpu()
            if counts:
                # A mean of means, or of records, which differ in length, a sum over tokens.
                totals[draw] += nll.mean(dim=1).sum() if roles is None else nll.nansum()
                sums += by_step(nll, orders, config, draw, batch_rows, count, points, roles)
    reshard(model)

    all_totals, all_sums, all_scored = zip(
        *procs.gather((totals, sums, tokens_scored)), strict=True
    )
    means = (sum(all_totals) / (sum(all_scored) if val_data.of_records else count)).tolist()
    losses, numbers = sum(all_sums).tolist()
    curve = [loss / n if n else None for loss, n in zip(losses, numbers, strict=True)]
    error = statistics.stdev(means) / math.sqrt(draws) if draws > 1 else None
    return Loss(statistics.mean(means), error, curve)


def by_step(
    nll: Tensor,
    orders: OrderConfig,
    config: Config,
    draw: int,
    batch_rows: range,
    total: int,
    points: int,
    roles: Roles | None = None,
) -> Tensor:
    """Losses by how much of the sequence is known: (2, points) float64, their sums and their
    numbers.

    The step of a token is the number of tokens that are known when it is predicted; step i of T
    counts at point floor(i points / T). An encoder has no order, but all its masked tokens are
    predicted from the others: those of a sequence with i unmasked tokens count at step i, and the
    set of these is uniformly random, as the first i of a decoder's random order are.

    Args:
        nll: (B, T), what `token_nll` gave in a draw for the sequences `batch_rows` of `total`.
        roles: of records; what is given is known.
    """
    length, scored = nll.shape[1], ~nll.isnan()
    nll = nll.nan_to_num()
    if config.model.is_encoder:
        masks = evaluation_masks(config.seed, draw, batch_rows, total, length, roles)
        number = masks.masked.sum(dim=1)
        step = (length if roles is None else roles.lengths) - number
        losses = nll.sum(dim=1) / masks.weight  # of a sequence, over its masked positions
    else:
        order = orders_at(orders, config.seed, draw, batch_rows, length)
        if roles is not None:
            order = roles.first_given(order)
        step = torch.arange(length)
        losses = nll.gather(1, order).sum(dim=0)  # of a step, over sequences
        number = scored.gather(1, order).sum(dim=0)
    point = step * points // length
    sums = torch.zeros(2, points, dtype=torch.float64)
    sums[0].index_add_(0, point, losses)
    sums[1].index_add_(0, point, number.double())
    return sums
