"""The sampler to read first: one sequence of a decoder, in any order, with a KV cache.

Orders come from plans.py. `engine` does the same for batches of any plan, and does not make the
host wait for the device."""

import torch
from torch import Tensor

from ..model import AOGPT
from .cached import KVCache, cached_hidden, single_step
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
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return tokens, LongTensor (T,), and their log-probabilities in nats, (T,), both in
    sequence order. Log-probabilities of given tokens are 0.

    Args:
        order: LongTensor (T,), positions in the order of prediction.
        sizes: how many positions each step predicts; the positions before these are given.
        uniforms: float64 (T,) in [0, 1), by position: what `draw` turns into tokens.
        tokens: LongTensor (T,), by position; those that are given are read.
        temperature: 0 takes the most probable tokens.
        vocab_size: no id from it on is drawn.
        top_p: tokens are drawn from the `nucleus` of this probability."""
    device = order.device
    T = len(order)
    cache = KVCache(model.config, 1, T, device, model.wte.weight.dtype)
    x = torch.zeros_like(order)  # tokens in prediction order
    if tokens is not None:
        x = tokens[order]
    log_probs = torch.zeros(T, device=device)
    cached = 0  # inputs whose keys and values are in the cache
    known = T - sum(sizes)  # tokens, at the beginning of the order
    masked = model.config.target == "mask_query"
    for size in sizes:
        # 1. One pass over inputs `cached` to `known + size - 1`. Those up to `known` hold
        #    their own true token. Later ones repeat the last known token, each with another
        #    target. With mask_query those before `known` hold their own token, and all
        #    others are a [MASK].
        count = known + size - cached
        step = single_step(cached, known, count, size, device)
        hidden = cached_hidden(model, x[None], order[None], step, cache)  # (count, D)
        logits = model.head_logits(hidden[-size:]).double()  # (size, V)
        # 2. Draw the next tokens, each from its own distribution given the known ones.
        positions = order[known : known + size]
        allowed = logits[:, :vocab_size]
        if temperature == 0:
            drawn = allowed.argmax(dim=-1)
        else:
            probs = (allowed / temperature).softmax(dim=-1)
            drawn = draw(nucleus(probs, top_p), uniforms[positions])
        x[known : known + size] = drawn
        all_log_probs = logits.log_softmax(dim=-1)
        for i in range(size):
            log_probs[known + i] = all_log_probs[i, drawn[i]]
        # 3. Input `known`, that of the first target, was a true one, so inputs 0 to `known`
        #    are cached now. The copies will be overwritten, and so will be every [MASK].
        cached = known if masked else known + 1
        known = known + size
    place = order.argsort()  # where each position is in the order
    return x[place], log_probs[place]


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return probabilities (N, V), 0 outside the most probable tokens that together have
    at least `top_p` (Holtzman et al. 2020); not normalized again."""
    if top_p == 1:
        return probs
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(dim=-1) - ranked
    kept = torch.where(mass_before < top_p, ranked, 0)
    return torch.zeros_like(probs).scatter(-1, ids, kept)
