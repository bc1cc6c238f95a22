"""Order ensembles: a decoder's predictions from several orders of one context, averaged.

A decoder's p(x_target | context) depends on the order in which the context is listed. An ensemble of M members is the
mean of the *probabilities* over M orders of it, the original one and M - 1 uniformly random ones. Its loss is

    L_M = 1/T sum_i E[ -log 1/M sum_j p(x[s_i] | s_<i in order j) ],    s the prediction order,

and under uniform s, where the original order of the context is as random as the others, L_M falls with M (Jensen).

direct  Every step of an order has M - 1 permuted contexts, each a full pass: any distribution of orders, T M passes.
cheap   Uniform s only. A step is then a uniformly random context length, at which every position that remains is as
        likely as s_i to be the target (the middle form of the objective in the paper, section 2), and one pass scores
        them all. It estimates not L_M but the gain L_M - L_1, as the mean over lengths and targets of

            mean_j log p_j - log mean_j p_j  <=  0,

        which is L_M - L_1 because every member's -log p_j has the same expectation. It varies little from context to
        context; L_1 itself comes from ordinary causal passes, each of which scores T steps.

B sequences, T positions, M members, S ensemble sizes.
"""

import numpy as np
import torch
from torch import Tensor

from orders import OrderConfig, orders_at, philox_bits

MAX_DRAWS = 2**24


def table(draw: int, place: int, member: int = 0) -> int:
    """Number of a table of random numbers (`orders.philox_bits`): of one draw (below MAX_DRAWS), place and member.

    Place 0 holds the orders, place 1 the contexts of the cheap ensemble, place 2 + i those of step i of the direct one.
    """
    return draw + (place << 24) + (member << 48)


def _uniform(seed: int, number: int, rows: range, width: int) -> Tensor:
    return torch.from_numpy((philox_bits(seed, number, rows, width) >> np.uint64(11)) * 2.0**-53)


def permute_context(
    order: Tensor, known: Tensor | int, seed: int, number: int, rows: range
) -> Tensor:
    """The orders (B, T) with their first `known` positions in a uniformly random order, the others as they are.

    known: (B, 1) or a number. A pure function of (order, known, seed, number of the table, row).
    """
    steps = torch.arange(order.shape[1])
    keys = torch.where(steps < known, _uniform(seed, number, rows, order.shape[1]), 1.0 + steps)
    return order.gather(1, keys.argsort(dim=1, stable=True))


def ensemble_log_probs(log_probs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """log of the mean probability of the first m members, for every m of `sizes`: (M, ...) -> (S, ...)."""
    logs = torch.stack([torch.logsumexp(log_probs[:m], dim=0) for m in sizes])
    return logs - torch.tensor(sizes, dtype=logs.dtype, device=logs.device).log().view(
        -1, *[1] * (logs.dim() - 1)
    )


def cheap_gains(
    model,
    tokens: Tensor,
    sizes: tuple[int, ...],
    seed: int,
    draw: int,
    rows: range,
    batch_size: int,
) -> Tensor:
    """Unbiased estimates of L_M - L_1 under uniform orders from one random context of each sequence.

    Args:
        tokens: (B, T), the sequences `rows`.
        sizes: of the ensembles; all share the members of the largest, which is max(sizes) passes.
        batch_size: sequences in a pass. It changes nothing else.

    Returns: (B, S) float64, nats per token, on the CPU; never above 0 but for rounding.
    """
    T, members = tokens.shape[1], max(sizes)
    order = orders_at(OrderConfig("random"), seed, table(draw, 1), rows, T)
    known = (
        _uniform(seed, table(draw, 1), rows, T + 1)[:, :1] * T
    ).long()  # the column that uniform orders leave
    orders = [order] + [
        permute_context(order, known, seed, table(draw, 1, j), rows) for j in range(1, members)
    ]
    work = (torch.cat(orders), known.repeat(members, 1), torch.arange(len(rows)).repeat(members))
    log_probs = []
    for part in zip(*(x.split(batch_size) for x in work), strict=True):
        order, lengths, row = (x.to(tokens.device) for x in part)
        log_probs.append(model.parallel_log_probs(tokens[row], order, lengths[:, 0]).double().cpu())
    log_probs = torch.cat(log_probs).view(members, len(rows), T)
    means = torch.stack([log_probs[:m].mean(dim=0) for m in sizes])
    gaps = means - ensemble_log_probs(log_probs, sizes)  # 0 at steps that are known
    return gaps.sum(dim=2).T / (T - known)


def direct_nll(
    model,
    tokens: Tensor,
    orders: OrderConfig,
    sizes: tuple[int, ...],
    seed: int,
    draw: int,
    rows: range,
) -> Tensor:
    """-log of the ensembles' probability of every token along one order of each sequence: one draw, unbiased.

    Step i is scored from the original context and from max(sizes) - 1 permutations of it that are drawn for this step
    alone, each with a full pass; the first two steps have a single context. Arguments as in `cheap_gains`; orders: any.

    Returns: (B, T, S) float64, nats, in sequence order.
    """
    T = tokens.shape[1]
    order = orders_at(orders, seed, draw, rows, T)
    original = model.token_log_probs(tokens, order.to(tokens.device)).double()
    log_probs = original.expand(max(sizes), *original.shape).clone()
    for step in range(2, T):
        for member in range(1, max(sizes)):
            permuted = permute_context(order, step, seed, table(draw, 2 + step, member), rows).to(
                tokens.device
            )
            log_probs[member, :, step] = model.token_log_probs(tokens, permuted)[:, step].double()
    nll = -ensemble_log_probs(log_probs, sizes)
    return (
        torch.empty_like(nll).scatter_(2, order.to(nll.device).expand_as(nll), nll).permute(1, 2, 0)
    )


def passes(method: str, size: int, length: int) -> int:
    """Full passes of one draw of an ensemble of `size` for one sequence: cheap, for the gain; direct, for the loss."""
    return size if method == "cheap" else 1 + (size - 1) * max(length - 2, 0)
