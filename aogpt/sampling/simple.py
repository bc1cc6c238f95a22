"""The sampler to read first: one sequence of a decoder, in any order, with a KV cache.

Sampling has two stages. First the order and the sizes are drawn, without the model
(plans.py; docs/method.md says why that is exact). Then this loop runs the model.
cached.py has a table of what is kept in the cache and what is computed again.

`engine` does the same for batches of any plan, and never makes the host wait for the
device."""

import torch
from torch import Tensor

from ..model import AOGPT
from ..runtime.errors import UserError
from .cached import KVCache, predict_next
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
    """Return tokens, LongTensor (T,), and their log-probabilities in nats, (T,), both
    in sequence order. Log-probabilities are the model's among the ids that may be
    drawn, before temperature and top-p; those of given tokens are 0.

    Args:
        model: in evaluation mode, as dropout would make samples inexact.
        order: LongTensor (T,), positions in the order of prediction.
        sizes: how many positions each step predicts; the positions before these are
            given.
        uniforms: float64 (T,) in [0, 1), by position: what `draw` turns into tokens.
        tokens: LongTensor (T,), by position; those that are given are read.
        temperature: 0 takes the most probable tokens.
        vocab_size: no id from it on is drawn.
        top_p: tokens are drawn from the `nucleus` of this probability."""
    T = len(order)
    text = torch.zeros_like(order)  # tokens by position
    if tokens is not None:
        text = tokens.clone()
    log_probs = torch.zeros(T, device=order.device)
    cache = KVCache(model.config, 1, T, order.device, model.wte.weight.dtype)
    known = T - sum(sizes)  # tokens that are given: the first ones of the order
    if known > 0 and tokens is None:
        raise UserError("the first positions of the order are given: pass their tokens")
    for size in sizes:
        # 1. Predict the next positions of the order, each from all tokens known so far.
        #    Keys and values of inputs that stay are in the cache.
        ordered = text[order]
        logits = predict_next(model, ordered, order, known, size, cache)  # (size, V)

        # 2. Draw a token for each position, from its own distribution.
        positions = order[known : known + size]
        allowed = logits[:, :vocab_size]
        if temperature < 1e-10 or top_p == 0:  # logits could overflow
            drawn = allowed.argmax(dim=-1)
        else:
            probs = (allowed / temperature).softmax(dim=-1)
            probs = nucleus(probs, top_p)
            drawn = draw(probs, uniforms[positions])

        # 3. From now on they are known.
        text[positions] = drawn
        token_log_probs = allowed.log_softmax(dim=-1)
        for i in range(size):
            log_probs[positions[i]] = token_log_probs[i, drawn[i]]
        known = known + size
    return text, log_probs


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return probabilities (N, V), 0 outside the most probable tokens that together
    have at least `top_p` (Holtzman et al. 2020); not normalized again."""
    if top_p == 1:
        return probs
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(dim=-1) - ranked
    truncated = torch.where(mass_before < top_p, ranked, 0)
    return torch.zeros_like(probs).scatter(-1, ids, truncated)
