"""Order ensembles: a decoder's predictions, averaged over several orders of one context.

A decoder's p(x_target | context) depends on the order in which the context is listed. An ensemble
of M members is the mean of the *probabilities* over M orders: the original one and M - 1 uniformly
random ones. Its loss is

    L_M = 1/T sum_i E[ -log 1/M sum_j p_j(x[s_i] | x[s_<i]) ]

where s is the prediction order and p_j lists the context s_<i in order j. Under uniform s the
original order is as random as the others, and L_M falls with M (Jensen's inequality).

As written, one sequence takes T M passes. `cheap_gains` estimates L_M - L_1 without bias in M:

1. One context instead of T: a uniform length on 0..T-1, a uniformly random set of positions, and
   the mean over all other positions instead of one target (RADD, arXiv 2406.03736).
2. The gain instead of the loss: under uniform orders, mean_j log p_j - log mean_j p_j has the
   expectation L_M - L_1, and varies far less. L_1 takes causal passes (results/order_ensembles.md).

B sequences, T positions, M members, S ensemble sizes."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..orders import OrderConfig, Roles, orders_at
from ..runtime.randomness import ENSEMBLES, philox_bits, to_uniform
from ..scoring import parallel_log_probs

# what the fields of a RandomStream hold
MAX_DRAWS = 2**24
MAX_MEMBERS = 2**16
CONTEXTS = 1  # the use of random numbers by `cheap_gains`


class RandomStream(NamedTuple):
    """Which random numbers of the stream ENSEMBLES of a seed: no two uses share any."""

    draw: int  # number of the Monte Carlo sample, below MAX_DRAWS
    use: int  # CONTEXTS, below 2**24
    member: int = 0  # of the ensemble, below MAX_MEMBERS; 0 has the original order

    @property
    def index(self) -> int:
        return self.draw + (self.use << 24) + (self.member << 48)  # of `philox_bits`

    def uniform(
        self, seed: int, rows: range, width: int
    ) -> Tensor:  # (len(rows), width) in [0, 1)
        bits = philox_bits(seed, self.index, rows, width, ENSEMBLES)
        return torch.from_numpy(to_uniform(bits))


def permute_context(
    order: Tensor,
    known: Tensor | int,
    seed: int,
    stream: RandomStream,
    rows: range,
    prompt: Tensor | int = 0,
) -> Tensor:
    """The orders (B, T) with their first `known` (B, 1) positions in a uniformly random order, but
    those of the prompt (B, 1), which stays first and as it is."""
    T = order.shape[1]
    steps = torch.arange(T)
    keys = stream.uniform(seed, rows, T)
    keys = torch.where(
        steps < known, keys, 1.0 + steps
    )  # above every random key, and in order
    keys = torch.where(steps < prompt, steps - float(T), keys)
    return order.gather(1, keys.argsort(dim=1, stable=True))


def ensemble_log_probs(log_probs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """log of the mean probability of the first m members, for m in sizes: (M, ...) -> (S, ...)."""
    sums = torch.stack([torch.logsumexp(log_probs[:size], dim=0) for size in sizes])
    counts = torch.tensor(sizes, dtype=sums.dtype, device=sums.device)
    return sums - counts.log().view(-1, *[1] * (sums.dim() - 1))


def cheap_gains(
    model,
    tokens: Tensor,
    sizes: tuple,
    seed: int,
    draw: int,
    rows: range,
    batch_size: int,
    roles: Roles | None = None,
) -> Tensor:
    """Unbiased estimates of L_M - L_1 under uniform orders, from one context of each sequence, in
    max(sizes) passes, whose members all sizes share.

    tokens: (B, T), the sequences `rows`; batch_size: contexts in a pass, without effect on the
    result; roles (on the CPU): which tokens are the prompt, a part of every context. Returns (B, S)
    float64, nats per token, on the CPU; at most 0, up to rounding."""
    T = tokens.shape[1]
    members = max(sizes)
    stream = RandomStream(draw, CONTEXTS)
    order = orders_at(OrderConfig("random"), seed, stream.index, rows, T, ENSEMBLES)
    prompt = torch.zeros(len(rows), 1, dtype=torch.long)
    end = prompt + T
    if roles is not None:
        order = roles.first_given(order)
        prompt = roles.given.sum(dim=1, keepdim=True)
        end = roles.lengths[:, None]
    # A uniform order leaves the first of its T + 1 columns of random numbers unused.
    known = prompt + (stream.uniform(seed, rows, T + 1)[:, :1] * (end - prompt)).long()
    orders = [order]
    for member in range(1, members):
        stream = RandomStream(draw, CONTEXTS, member)
        orders.append(permute_context(order, known, seed, stream, rows, prompt))

    # All members of all sequences are M B independent contexts.
    contexts = torch.cat(orders).split(batch_size)
    lengths = known[:, 0].repeat(members).split(batch_size)
    sequences = torch.arange(len(rows)).repeat(members).split(batch_size)
    log_probs = []
    for parts in zip(sequences, contexts, lengths, strict=True):
        sequence, context, length = (part.to(tokens.device) for part in parts)
        log_prob = parallel_log_probs(model, tokens[sequence], context, length)
        log_probs.append(log_prob.double().cpu())
    log_probs = torch.cat(log_probs).view(members, len(rows), T)

    means = torch.stack([log_probs[:size].mean(dim=0) for size in sizes])
    gaps = means - ensemble_log_probs(log_probs, sizes)  # 0 at the steps that are known
    gaps = gaps * (torch.arange(T) < end)  # steps of padding come last
    return gaps.sum(dim=2).T / (end - known)
