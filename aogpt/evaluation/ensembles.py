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

from typing import NamedTuple

import torch
from torch import Tensor

from ..model import Transformer
from ..orders import OrderConfig, Roles, orders_at
from ..runtime.randomness import ENSEMBLES, philox_bits, to_uniform
from ..scoring import token_log_probs

# What the fields of a RandomStream hold.
MAX_DRAWS = 2**24
MAX_MEMBERS = 2**16
CONTEXTS = 1  # the use of random numbers by `cheap_gains`


class RandomStream(NamedTuple):
    """A part of the random numbers of the stream ENSEMBLES of a seed; no two parts
    overlap."""

    draw: int  # number of the Monte Carlo sample, below MAX_DRAWS
    use: int  # CONTEXTS, below 2**24
    member: int = 0  # of the ensemble, below MAX_MEMBERS; 0 has the original order

    @property
    def index(self) -> int:
        """Return the index of this part in `philox_bits`."""
        use = self.use << 24
        member = self.member << 48
        return self.draw + use + member

    def uniform(self, seed: int, rows: range, width: int) -> Tensor:
        """Return uniform numbers in [0, 1), float64 (len(rows), width)."""
        bits = philox_bits(seed, self.index, rows, width, ENSEMBLES)
        uniforms = to_uniform(bits)
        return torch.from_numpy(uniforms)


def permute_context(
    order: Tensor,
    known: Tensor | int,
    seed: int,
    stream: RandomStream,
    rows: range,
    prompt: Tensor | int = 0,
) -> Tensor:
    """Return the orders (B, T) with their first `known` (B, 1) positions in a uniformly
    random order, except those of the prompt (B, 1), which stays first and as it is."""
    T = order.shape[1]
    steps = torch.arange(T)
    keys = stream.uniform(seed, rows, width=T)
    # The steps that are not known have keys above every random one, and rising.
    above = 1.0 + steps
    keys = torch.where(steps < known, keys, above)
    below = steps - float(T)
    keys = torch.where(steps < prompt, below, keys)
    permutation = keys.argsort(dim=1, stable=True)
    return order.gather(1, permutation)


def ensemble_log_probs(log_probs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the log of the mean probability of the first m members for m in sizes,
    (S, ...), from those of all members, (M, ...)."""
    log_sums = []
    for size in sizes:
        members = log_probs[:size]
        log_sums.append(members.logsumexp(dim=0))
    log_sums = torch.stack(log_sums)
    counts = torch.tensor(sizes, dtype=log_sums.dtype, device=log_sums.device)
    log_counts = counts.log()
    while log_counts.dim() < log_sums.dim():
        log_counts = log_counts.unsqueeze(-1)
    return log_sums - log_counts


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
    stream = RandomStream(draw, CONTEXTS)
    order = orders_at(
        OrderConfig("random"), seed, stream.index, rows, length=T, stream=ENSEMBLES
    )
    prompt = torch.zeros(B, 1, dtype=torch.long)
    end = prompt + T
    if roles is not None:
        order = roles.first_given(order)
        prompt = roles.given.sum(dim=1, keepdim=True)
        end = roles.lengths[:, None]
    # A uniform order leaves the first of its T + 1 columns of random numbers unused.
    uniforms = stream.uniform(seed, rows, width=T + 1)
    share = uniforms[:, :1]
    number_scored = end - prompt
    known = prompt + (share * number_scored).long()  # (B, 1)
    orders = [order]
    for member in range(1, M):
        permuted = permute_context(
            order,
            known,
            seed,
            stream=RandomStream(draw, CONTEXTS, member),
            rows=rows,
            prompt=prompt,
        )
        orders.append(permuted)

    # All members of all sequences are M B independent contexts.
    contexts = torch.cat(orders)
    lengths = known.expand(B, T).repeat(M, 1)
    sequences = torch.arange(B).repeat(M)
    log_probs = []
    for start in range(0, M * B, batch_size):
        batch = slice(start, start + batch_size)
        sequence = sequences[batch].to(tokens.device)
        log_prob = token_log_probs(
            model,
            tokens[sequence],
            contexts[batch].to(tokens.device),
            lengths[batch].to(tokens.device),
        )
        log_probs.append(log_prob.double().cpu())
    log_probs = torch.cat(log_probs).view(M, B, T)

    means = torch.stack([log_probs[:size].mean(dim=0) for size in sizes])
    gaps = means - ensemble_log_probs(log_probs, sizes)  # 0 at the steps that are known
    is_text = torch.arange(T) < end  # steps of padding come last
    gaps = gaps * is_text
    number_predicted = end - known
    return gaps.sum(dim=2).T / number_predicted
