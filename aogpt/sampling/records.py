"""Samples of records whose end is given (data/record_end.py): a length is drawn first,
and the end stands at its place before any token is known."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..data.record_end import RecordEnd
from ..runtime.randomness import LENGTHS, philox_bits, to_uniform
from .engine import Generation
from .plans import Context, Plan

# The key of a sample is this times its number plus the key of its context.
MOST_CONTEXTS = 2**32


def contexts_with_end(
    end: RecordEnd,
    contexts: Mapping[int, Context],
    seed: int,
    num_samples: int,
    block_size: int,
) -> dict[int, Context]:
    """Return `num_samples` contexts for each one, by keys for `plan_samples`, with the
    end in its place.

    contexts: by key. One that has the end keeps its length. To others a length is drawn
    that they fit, together with the end in a block: a function of (seed, key, number of
    the sample)."""
    longest = end.longest_in(block_size)
    result = {}
    for key, context in contexts.items():
        known = len(context)
        lengths = [known] * num_samples
        has_end = known > 0 and context[-1] == end.token
        if not has_end:
            bits = philox_bits(seed, key, range(num_samples), width=1, stream=LENGTHS)
            uniforms = to_uniform(bits)[:, 0].tolist()
            lengths = end.draw(uniforms, least=known, most=longest)
        for number, length in enumerate(lengths):
            tokens = context
            if not has_end:
                tokens = [*context, *[None] * (length - known), end.token]
            result[key + MOST_CONTEXTS * number] = tokens
    return result


def end_first(plan: Plan) -> Plan:
    """Return a plan in which the last position of each sample, a given end, is known
    before all others: decoders were trained to read it first."""
    is_end = plan.order == plan.length[:, None] - 1
    place = is_end.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    # The given tokens, which have no step, stay in front.
    return replace(plan, order=plan.order.gather(1, place))


def without_end(samples: Generation) -> Generation:
    """Return samples of records without their end, which is given."""
    length = samples.length - 1
    is_text = torch.arange(samples.tokens.shape[1]) < length[:, None]
    return replace(samples, tokens=samples.tokens.where(is_text, 0), length=length)
