"""No two uses of a seed share random numbers."""

import ast
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import ROOT, tracked
from reference import accept, make_system, random_tokens

from aogpt.evaluation.ensembles import cheap_gains
from aogpt.evaluation.likelihood import token_nll
from aogpt.objectives import ObjectiveConfig, evaluation_masks, masks_at
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime import randomness
from aogpt.sampling import modes
from aogpt.sampling.modes import DecodingOptions, parse_mode

LENGTH = 6
ROWS = range(5)
RANDOM = OrderConfig("random")
TOKENS = random_tokens(vocab_size=11, batch_size=len(ROWS), length=LENGTH, seed=0)
MODEL = make_system("AO-GPT", 0)


def bits(stream, rows, width):
    """Take numbers of a stream as its use does."""
    return lambda: randomness.philox_bits(7, 3, rows, width, stream)


# Every use of one seed by scripts that may run on the same model; draw, step and prompt
# 3.
USES = {
    "training orders": lambda: orders_at(
        RANDOM, seed=7, step=3, rows=ROWS, length=LENGTH
    ),
    "likelihoods": lambda: (
        token_nll(MODEL, TOKENS, RANDOM, seed=7, draw=3, rows=ROWS, total=9).values
    ),
    "ELBO": lambda: evaluation_masks(seed=7, step=3, rows=ROWS, total=9, length=LENGTH),
    "ensembles": lambda: cheap_gains(
        MODEL, TOKENS, (2,), seed=7, draw=3, rows=ROWS, batch_size=9
    ),
    "samples": lambda: modes.plan_samples(
        parse_mode("random"), [[None] * LENGTH] * 4, 7, 5
    ),
    "shuffle": bits(randomness.SHUFFLE, range(1), 30),
    "dropout": bits(randomness.DROPOUT, ROWS, 1),
}


def test_no_two_uses_of_a_seed_share_a_number(monkeypatch):
    """All 64-bit numbers that each use takes are different from all others; so are
    those of the order and of the tokens of the same sample."""
    taken = {}
    real = np.random.Philox
    for name, use in USES.items():
        numbers = taken[name] = []

        class Recorder:
            def __init__(self, **settings):
                self.philox = real(**settings)

            def advance(self, count):
                self.philox.advance(count)
                return self

            def random_raw(self, count, numbers=numbers):
                bits = self.philox.random_raw(count)
                numbers.extend(bits.tolist())
                return bits

        monkeypatch.setattr(np.random, "Philox", Recorder)
        use()
    counts = Counter(number for numbers in taken.values() for number in set(numbers))
    assert set(counts.values()) == {1}
    assert all(taken.values())
    assert len(set(taken["samples"])) == len(taken["samples"])
    # encoders have no orders
    masks = masks_at(
        ObjectiveConfig("k_dce"), seed=7, step=3, rows=ROWS, total=9, length=LENGTH
    )
    assert masks.masked.any()


def test_every_stream_has_one_use_and_the_seed_no_other_generator():
    """A new use takes a new stream (and a line above), not a generator of the seed."""
    streams = [name for name in vars(randomness) if name.isupper()]
    assert len({getattr(randomness, name) for name in streams}) == len(streams)
    used = Counter()
    generators = []
    for place in sorted(tracked("*.py")):
        if place.startswith(("tests/", "extras/", "studies/")) or place == "model.py":
            continue
        for node in ast.walk(ast.parse((ROOT / place).read_text())):
            if isinstance(node, ast.ImportFrom):
                if (node.module or "").endswith("randomness"):
                    used.update(alias.name for alias in node.names)
            if isinstance(node, ast.Attribute):
                if getattr(node.value, "id", "") == "randomness":
                    used[node.attr] += 1
                if node.attr == "manual_seed":
                    generators.append(place)
    used = {name: used[name] for name in used if name in streams}
    # ORDERS: the default of orders and of masks. A run trains on one or the other.
    # text_model.py scores along the orders of eval_ppl.py.
    expected = dict.fromkeys(streams, 1)
    for name in ("ORDERS", "SCORED_ORDERS"):
        expected[name] = 2
    assert used == expected
    # The seed of dropout has a stream, those of the initial weights are hashed from
    # their names; the last takes no numbers.
    assert generators == [
        "aogpt/training/checkpoint.py",
        "aogpt/training/parallel.py",
        "train.py",
    ]


@pytest.mark.parametrize("mode", ["random", "mdm"])
def test_the_order_of_a_sample_says_nothing_of_its_tokens(mode):
    """Samples of a model whose tokens are uniform, on 4 x 4 cells of place in the order
    and id."""
    model = make_system("AO-GPT", 0, torch.float32, vocab_size=257, block_size=8)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    N = 1200
    options = DecodingOptions(mode=mode, batch_size=N)
    planned = modes.plan_samples(options.plan, [[None] * 8] * N, seed=0)
    got = options.engine(model, vocab_size=256).generate(*planned)
    place = torch.empty(N, 8).long()
    place.scatter_(1, planned.plan.order, torch.arange(8).expand(N, 8))
    cells = place // 2 * 4 + got.tokens // 64
    counts = cells.flatten().bincount(minlength=16)
    assert accept(counts, torch.full((16,), 1 / 16, dtype=torch.float64))
