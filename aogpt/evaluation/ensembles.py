"""Order ensembles: a decoder's predictions, averaged over several orders of one
context.

A decoder's p(x_target | context) depends on the order in which the context is listed.
An ensemble of M members is the mean of the *probabilities* over M orders: the original
one and M - 1 uniformly random ones. Its loss is

    L_M = 1/T sum_i E[ -log 1/M sum_j p_j(x[s_i] | x[s_<i]) ]

where s is the prediction order and p_j lists the context s_<i in order j. Under uniform
s the original order is as random as the others, and L_M falls with M (Jensen's
inequality).

As written, one sequence takes T M passes. `cheap_gains` estimates L_M - L_1 without
bias in M:

1. One context instead of T: a uniform length on 0..T-1, a uniformly random set of
   positions, and the mean over all other positions instead of one target (RADD, arXiv
   2406.03736).
2. The gain instead of the loss: under uniform orders, mean_j log p_j - log mean_j p_j
   has the expectation L_M - L_1, and varies far less. L_1 takes causal passes
   (results/books.md#what-does-averaging-over-orders-of-the-context-gain).

B sequences, T positions, M members, S ensemble sizes."""

import math

import torch
from torch import Tensor

from ..model import Transformer
from ..orders import OrderConfig, Roles, orders_at
from ..runtime.randomness import ENSEMBLES, philox_bits, to_uniform
from ..scoring import token_log_probs

MAX_DRAWS = 2**24
MAX_MEMBERS = 2**16


def index_of(draw: int, member: int = 0) -> int:
    """Return the index in `philox_bits` of the random numbers of a Monte Carlo sample
    and a member of its ensemble; 0 has the original order."""
    return draw + MAX_DRAWS + (member << 48)


def uniforms(seed: int, index: int, rows: range, width: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64 (len(rows), width)."""
    bits = philox_bits(seed, index, rows, width, ENSEMBLES)
    return torch.from_numpy(to_uniform(bits))


def permute_context(
    order: Tensor, known: Tensor | int, keys: Tensor, prompt: Tensor | int = 0
) -> Tensor:
    """Return the orders (B, T) with their first `known` (B, 1) positions in a uniformly
    random order, except those of the prompt (B, 1), which stays first and as it is.
    keys: uniform numbers in [0, 1), (B, T)."""
    T = order.shape[1]
    steps = torch.arange(T)
    # The steps that are not known have keys above every random one, and rising.
    above = 1.0 + steps
    keys = torch.where(steps < known, keys, above)
    below = steps - float(T)
    keys = torch.where(steps < prompt, below, keys)
    permutation = keys.argsort(dim=1, stable=True)
    return order.gather(1, permutation)


def cheap_gains(
    model: Transformer,
    tokens: Tensor,
    sizes: tuple[int, ...],
    seed: int,
    draw: int,
    rows: range,
    batch_size: int,
    roles: Roles | None = None,
) -> Tensor:
    """Return unbiased estimates of L_M - L_1 under uniform orders, from one context of
    each sequence, in max(sizes) passes, whose members all sizes share: (B, S) float64,
    nats per token, on the CPU; at most 0, up to rounding.

    tokens: (B, T), the sequences `rows`. batch_size: contexts in a pass, without effect
    on the result. roles (on the CPU): which tokens are the prompt, a part of every
    context."""
    B = len(rows)
    T = tokens.shape[1]
    M = max(sizes)
    index = index_of(draw)
    order = orders_at(
        OrderConfig("random"), seed, index, rows, length=T, stream=ENSEMBLES
    )
    prompt = torch.zeros(B, 1, dtype=torch.long)
    end = prompt + T
    if roles is not None:
        order = roles.first_given(order)
        prompt = roles.given.sum(dim=1, keepdim=True)
        end = roles.lengths[:, None]
    # A uniform order leaves the first of its T + 1 columns of random numbers unused.
    share = uniforms(seed, index, rows, width=T + 1)[:, :1]
    known = prompt + (share * (end - prompt)).long()  # (B, 1)
    orders = [order]
    for member in range(1, M):
        keys = uniforms(seed, index_of(draw, member), rows, width=T)
        orders.append(permute_context(order, known, keys, prompt))

    # All members of all sequences are M B independent contexts.
    contexts = torch.cat(orders)
    log_probs = []
    for batch in torch.arange(M * B).split(batch_size):
        sequence = batch % B
        log_prob = token_log_probs(
            model,
            tokens[sequence.to(tokens.device)],
            contexts[batch].to(tokens.device),
            known[sequence].expand(-1, T).to(tokens.device),
        )
        log_probs.append(log_prob.double().cpu())
    log_probs = torch.cat(log_probs).view(M, B, T)

    gaps = []  # 0 at the steps that are known
    for size in sizes:
        members = log_probs[:size]
        log_mean = members.logsumexp(dim=0) - math.log(size)
        gaps.append(members.mean(dim=0) - log_mean)
    is_text = torch.arange(T) < end  # steps of padding come last
    gains = torch.stack(gaps) * is_text
    return gains.sum(dim=2).T / (end - known)
