"""The any-order loss is the masked-diffusion objective, exactly, on models small enough
to enumerate."""

import itertools

import pytest
import torch
from reference import all_sequences, enumerable_system, mask_sets, mdm_weight

from aogpt.objectives import ao_ar_loss, evaluation_masks

# positions and tokens: 81 sequences, 24 orders, 15 masks
N = 4
V = 3


def ao_ar_by_enumeration(model, sequences):
    """Return ao_ar_loss of each sequence over all N! orders, in nats a sequence:
    (rows,)."""
    orders = torch.tensor(list(itertools.permutations(range(N))))
    losses = []
    with torch.no_grad():
        for sequence in sequences:
            tokens = sequence.expand(len(orders), N)
            losses.append(ao_ar_loss(model, tokens, orders))
    return N * torch.stack(losses)


@pytest.mark.parametrize("target", ["adaln", "input"])
def test_any_order_loss_is_the_mdm_integral(target, seed=0):
    """int_0^1 (1/t) E_mask[sum over masked positions of -log p] dt of each of the 81
    sequences; given a set, -log p is its mean over the orders of that set. 1e-12: a
    thousand terms of size 1."""
    model, conditional = enumerable_system("AO-GPT", seed, target=target)
    sequences = all_sequences(V, N)
    integral = torch.zeros(len(sequences), dtype=torch.float64)
    for masked in mask_sets(N):
        weight = float(mdm_weight(masked, N))
        visible = [p for p in range(N) if p not in masked]
        contexts = list(itertools.permutations(visible))
        for position in masked:
            nll = torch.zeros(len(sequences), dtype=torch.float64)
            for context in contexts:
                nll -= conditional[context, position].log()
            integral += weight * nll / len(contexts)
    difference = ao_ar_by_enumeration(model, sequences) - integral
    assert difference.abs().max() < 1e-12
    assert integral.std() > 0.1


def test_evaluation_masks_hide_every_number_of_positions_equally_often(seed=0):
    """In 24 sequences of 6 positions, 4 have 1 masked, 4 have 2, ...; in each draw, in
    any share of the rows."""
    whole = evaluation_masks(seed, step=3, rows=range(24), total=24, length=6)
    other = evaluation_masks(seed, step=4, rows=range(24), total=24, length=6)
    counts = whole.masked.sum(dim=1)
    assert torch.bincount(counts).tolist() == [0, 4, 4, 4, 4, 4, 4]
    assert torch.equal(whole.weight, 6 / counts)
    part = evaluation_masks(seed, step=3, rows=range(7, 20), total=24, length=6)
    assert torch.equal(part.masked, whole.masked[7:20])
    assert torch.equal(part.weight, whole.weight[7:20])
    assert not torch.equal(other.masked, whole.masked)
