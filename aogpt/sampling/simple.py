"""The sampler to read first: one sequence of a decoder, in any order, with a KV cache.

Orders come from plans.py. `engine` does the same for batches of any plan, and does not make the
host wait for the device."""

import torch
from torch import Tensor

from ..model import AOGPT
from .cached import KVCache, cached_hidden, make_steps
from .race import draw


@torch.no_grad()
def simple_generate(
    model: AOGPT,
    order: Tensor,
    sizes: list[int],
    uniforms: Tensor,
    tokens: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities (T,), in sequence order; log-probabilities of given tokens
    are 0.

    order: (T,) positions, in the order of prediction. sizes: how many are predicted in each step;
    positions before these are given, in tokens (T,). uniforms: (T,) in [0, 1), float64, by
    position: what `draw` turns into tokens. temperature: 0 takes the likeliest ones. vocab_size: no
    id from it on is drawn."""
    T = len(order)
    cache = KVCache(model.config, 1, T, order.device, model.wte.weight.dtype)
    x = (
        torch.zeros_like(order) if tokens is None else tokens[order]
    )  # in prediction order
    log_probs = torch.zeros(T)
    cached = 0
    known = T - sum(sizes)
    for size in sizes:
        # 1. One pass over inputs `cached` to `known + size - 1`. Those up to `known` hold their own
        #    true token; later ones repeat the last known token, each with another target. With
        #    mask_query, those before `known` hold their own token, all others are a [MASK].
        count = known + size - cached
        numbers = (
            cached,
            known,
            count,
            size,
            size,
        )  # of `Step`, the last two: predicted, unmasked
        (step,) = make_steps(*(torch.tensor([[n]]) for n in numbers), order.device)
        hidden = cached_hidden(model, x[None], order[None], step, cache)  # (inputs, D)
        # 2. Draw the next tokens, each from its own distribution given the known ones.
        log_p = (
            model.head_logits(hidden[-size:]).double().log_softmax(dim=-1)
        )  # (size, V)
        new = slice(known, known + size)
        allowed = log_p[:, :vocab_size]
        if temperature == 0:
            x[new] = allowed.argmax(dim=-1)
        else:
            x[new] = draw((allowed / temperature).softmax(dim=-1), uniforms[order[new]])
        log_probs[new] = log_p.gather(1, x[new, None]).squeeze(1).float()
        # 3. Input `known`, that of the first target, was a true one, so inputs 0 to `known` are
        #    cached now. The copies will be overwritten, and so will be every [MASK].
        cached = known if model.config.target == "mask_query" else known + 1
        known = known + size
    place = order.argsort()
    return x[place], log_probs[place]
