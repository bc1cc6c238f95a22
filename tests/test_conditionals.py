"""Findings 4 and 5 of the paper (arXiv 2506.19935): how many conditionals an
architecture models.

An encoder's conditional depends on the set of unmasked positions, a decoder's also on
their order."""

import math

import pytest
import torch
from reference import enumerable_system


def distinct(conditionals, decimals=10):
    """The number of different distributions among {(context, target): p(x_target |
    x_context)}. Two of different targets differ, since they are compared as functions
    of the whole sequence."""
    values = {
        (target, *torch.round(values, decimals=decimals).tolist())
        for (*_, target), values in conditionals.items()
    }
    return len(values)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_an_encoder_has_a_conditional_for_each_set_and_a_decoder_for_each_order(length):
    _, encoder = enumerable_system("encoder AO-GPT", seed=0, length=length, tokens=2)
    assert distinct(encoder) == length * 2 ** (length - 1)
    _, decoder = enumerable_system("AO-GPT", seed=0, length=length, tokens=2)
    ordered = sum(math.factorial(length) // math.factorial(k) for k in range(length))
    assert distinct(decoder) == len(decoder) == ordered
    # The sum is n! (1/0! + 1/1! + ...), the first terms of e n!.
    assert math.floor(math.e * math.factorial(length)) - ordered in (0, 1)
