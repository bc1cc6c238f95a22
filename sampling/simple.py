"""The sampler to read first: one sequence of a decoder, in any order, with a KV cache.

`engine` does the same for batches of any plan, on any device, without waiting for it.
"""

import torch
from torch import Tensor

from model import AOGPT
from sampling.cached import KVCache, cached_hidden, make_steps


@torch.no_grad()
def simple_generate(
    model: AOGPT, order: Tensor, sizes: list[int], uniforms: Tensor, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities (T,), in sequence order; log-probabilities of given tokens
    are 0.

    order: (T,) positions, in the order of prediction. sizes: how many are predicted in each step;
    positions before these are given, in tokens (T,). uniforms: (T,) in [0, 1), float64, by
    position: the token is the first whose cumulative probability is above this number."""
    T = len(order)
    cache = KVCache(model.config, 1, T, order.device, model.wte.weight.dtype)
    x = torch.zeros_like(order) if tokens is None else tokens[order]  # in prediction order
    log_probs = torch.zeros(T)
    cached, known = 0, T - sum(sizes)
    for size in sizes:
        # 1. One pass over the inputs that are not cached yet: known tokens, each with the next of
        #    the order as its target, and copies of the last one for the other targets.
        numbers = cached, known, known + size - cached, size, size
        (step,) = make_steps(*(torch.tensor([[n]]) for n in numbers), order.device)
        hidden = cached_hidden(model, x[None], order[None], step, cache)  # (inputs, D)
        # 2. Draw the next tokens, each from its own distribution given the known ones.
        log_p = model.head_logits(hidden[-size:]).double().log_softmax(dim=-1)  # (size, V)
        new = slice(known, known + size)
        point = uniforms[order[new], None]
        x[new] = (log_p.exp().cumsum(dim=-1) <= point).sum(dim=-1).clamp(max=log_p.shape[1] - 1)
        log_probs[new] = log_p.gather(1, x[new, None]).squeeze(1).float()
        # 3. The input of the first target is the true one of its place, so it stays in the cache.
        cached, known = known + 1, known + size
    place = order.argsort()
    return x[place], log_probs[place]
