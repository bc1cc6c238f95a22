"""The sampler to read first: one sequence of a decoder, in any order, with a KV cache.

Sampling has two stages. First the order and the sizes are drawn, without the model
(plans.py; docs/method.md says why that is exact). Then this loop runs the model:

    order = torch.tensor([4, 1, 5, 0, 2, 3])
    uniforms = torch.rand(6, dtype=torch.float64)
    tokens, log_probs = simple_generate(model, order, [3, 2, 1], uniforms)

The second step knows the tokens x4, x1 and x5 and predicts positions 0 and 2 in one
pass. Both of its last inputs hold the last known token, each with a target of its own;
neither sees the other:

    input   token    predicts       sees inputs
    0       [None]   4 (not read)   0            in the cache since the first step
    1       x4       1 (not read)   0 1          computed now; stays in the cache
    2       x1       5 (not read)   0 1 2        computed now; stays in the cache
    3       x5       0              0 1 2 3      computed now; stays in the cache
    4       x5       2              0 1 2   4    computed now; replaced in the next step

Inputs 1 and 2 are computed in the second step, as the first one did not know their
tokens. cached.py says this for batches, and for models with queries of their own.

`engine` does the same for batches of any plan, and never makes the host wait for the
device."""

import torch
from torch import Tensor

from ..model import AOGPT
from ..runtime.errors import UserError
from .cached import KVCache, predict_next
from .token_choice import TokenChoice, draw


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
        model: a decoder in evaluation mode, as dropout would make samples inexact.
        order: LongTensor (T,), positions in the order of prediction; of a plain GPT
            from left to right.
        sizes: how many positions each step predicts, at least one; of a plain GPT one.
            The positions of the order before these are given.
        uniforms: float64 (T,) in [0, 1), by position: what `draw` turns into tokens.
        tokens: LongTensor (T,), by position; those that are given are read.
        temperature: 0 takes the most probable tokens.
        vocab_size: no id from it on is drawn.
        top_p: tokens are drawn from the `nucleus` of this probability.

    Raises UserError for what does not fit together."""
    check_inputs(model, order, sizes, uniforms, tokens, vocab_size)
    choice = TokenChoice(temperature, top_p)  # which checks them
    T = len(order)
    text = torch.zeros_like(order)  # tokens by position
    if tokens is not None:
        text = tokens.to(torch.long, copy=True)
    log_probs = torch.zeros(T, device=order.device)
    cache = KVCache(model.config, 1, T, order.device, model.wte.weight.dtype)
    known = T - sum(sizes)  # tokens that are given: the first ones of the order
    for size in sizes:
        # 1. Predict the next positions of the order, each from all tokens known so far.
        #    Keys and values of inputs that stay are in the cache.
        ordered = text[order]  # those that are not known yet are not read
        logits = predict_next(model, ordered, order, known, size, cache)  # (size, V)

        # 2. Draw a token for each position, from its own distribution.
        positions = order[known : known + size]
        allowed = logits[:, :vocab_size]
        if choice.greedy:  # divided by the temperature, logits could overflow
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


def check_inputs(
    model: AOGPT,
    order: Tensor,
    sizes: list[int],
    uniforms: Tensor,
    tokens: Tensor | None,
    vocab_size: int | None,
) -> None:
    """Raise UserError for inputs that `simple_generate` cannot use."""
    T = len(order)
    config = model.config
    if config.is_encoder or model.training:
        raise UserError("this sampler is for decoders in evaluation mode: model.eval()")
    positions = torch.arange(T, device=order.device)
    is_permutation = torch.equal(order.sort().values, positions)
    if order.dtype != torch.long or not is_permutation or T > config.block_size:
        raise UserError(
            f"the order must be a permutation of 0..{T - 1} (LongTensor), of up to "
            f"{config.block_size} positions"
        )
    fits = sum(sizes) == T if tokens is None else sum(sizes) <= T
    if any(size < 1 for size in sizes) or not fits:
        raise UserError(
            f"sizes are {sizes}; give numbers of at least 1 that add up to {T}, or to "
            "less with the tokens of the first positions of the order, which are given"
        )
    one_by_one = all(size == 1 for size in sizes)
    if config.l2r_only and not (one_by_one and torch.equal(order, positions)):
        raise UserError(
            "this model is a plain GPT: give it the order from left to right, and "
            "sizes of 1"
        )
    if uniforms.shape != (T,) or uniforms.dtype != torch.float64:
        raise UserError(f"give {T} uniforms of float64, one for each position")
    if vocab_size is not None and not 1 <= vocab_size <= config.vocab_size:
        raise UserError(f"vocab_size must be from 1 to {config.vocab_size}")
    if tokens is not None:
        given = tokens[order[: T - sum(sizes)]]
        if ((given < 0) | (given >= config.vocab_size)).any():
            raise UserError(f"given tokens must be from 0 to below {config.vocab_size}")


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return probabilities (N, V), 0 outside the most probable tokens that together
    have at least `top_p` (Holtzman et al. 2020); not normalized again."""
    if top_p == 1:
        return probs
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(dim=-1) - ranked
    truncated = torch.where(mass_before < top_p, ranked, 0)
    return torch.zeros_like(probs).scatter(-1, ids, truncated)
