"""Plans have the distribution they claim, for rows that differ in length and in what is
given."""

import dataclasses
from collections import Counter

import pytest
import torch
from reference import (
    accept,
    even_sizes,
    generate,
    make_plan,
    make_system,
    modes,
    options_of,
    plans_of,
    seeded,
    some_given,
)

from aogpt.runtime.errors import UserError
from aogpt.sampling import (
    Plan,
    Samples,
    even_plan,
    group_sizes,
    order_plan,
    score_plan,
    speculative_plan,
    stack_plans,
)
from aogpt.sampling.plans import Pace
from aogpt.sampling.scores import SCORES

MODES = modes("""
    l2r, l2r:group=3, random, random:group=4, mdm:steps=5,
    even:steps=5, mdm:steps=4,schedule=cosine,
    even:steps=4,schedule=cosine, confidence:group=2, entropy,
    random:group=2, speculative:order=l2r,draft=3,
    speculative:draft=2
""")
LENGTHS = torch.tensor([9, 0, 4, 1, 7, 9, 9, 3, 5, 8])


def rows_of(plan):
    """Return (order, step) of every row, up to its length."""
    rows = []
    for row, length in enumerate(plan.length.tolist()):
        order = plan.order[row, :length].tolist()
        rows.append((order, plan.step[row, :length].tolist()))
    return rows


def sizes_of(step):
    """Return the sizes of the steps 0, 1, ... of one row, empty ones included."""
    steps = max(step, default=-1) + 1
    return [step.count(s) for s in range(steps)]


@pytest.mark.parametrize("lengths", [9, LENGTHS], ids=["equal lengths", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_given_positions_come_first_and_every_row_has_its_length(mode, lengths):
    given = some_given(10, 9, seed=1)
    plan = make_plan(mode, 10, lengths, given)
    length = torch.as_tensor(lengths).expand(10)
    existing = torch.arange(9) < length[:, None]
    assert torch.equal(plan.length, length)
    assert torch.equal(plan.valid, existing)
    assert torch.equal(plan.given, given & existing)
    for (order, step), is_given in zip(rows_of(plan), given.tolist(), strict=True):
        context = [p for p in range(len(order)) if is_given[p]]
        k = len(context)
        assert order[:k] == context
        assert step[:k] == [-1] * k
        assert min(step[k:], default=0) >= 0
        assert sorted(order) == list(range(len(order)))
    part = plan[1:3]
    assert (len(plan), len(part)) == (10, 2)
    assert rows_of(part) == rows_of(plan)[1:3]
    options = options_of(mode)
    score = options.name if options.name in SCORES else "order"
    assert part.unmask_by == plan.unmask_by == score
    assert part.draft == plan.draft == (options.draft or 0)


@pytest.mark.parametrize("scale, shift", [(-1, -1), (10, -30), (-0.5, 0), (100, 0)])
def test_the_keys_of_a_mode_may_be_any_numbers(scale, shift):
    """Such as -position: what is given stays so, and what is absent stays last."""
    given = torch.tensor([[True, False, False, True, False]] * 2)
    samples = Samples(2, torch.tensor([5, 4]), given=given)
    plan = samples.in_groups(samples.position * scale + shift, 1)
    assert torch.equal(plan.given, given)
    if scale > 0:
        expected = [[0, 3, 1, 2, 4], [0, 3, 1, 2, 4]]
    else:
        expected = [[0, 3, 4, 2, 1], [0, 3, 2, 1, 4]]
    assert plan.order.tolist() == expected
    assert plan.length.tolist() == [5, 4]


def test_where_nothing_is_generated_there_are_no_groups():
    all_given = torch.ones(2, 3, dtype=torch.bool)
    nothing = order_plan(Samples(2, torch.tensor([0, 3]), given=all_given), "l2r")
    assert group_sizes(nothing).shape == (2, 0)
    assert group_sizes(order_plan(Samples(0, 5), "l2r")).shape == (0, 0)


def test_rows_planned_one_by_one_are_stacked_to_a_plan():
    lengths = [4, 0, 6, 1]
    apart = []
    for seed, length in enumerate(lengths):
        apart.append(make_plan("entropy:group=2", 1, length, seed=seed))
    plan = stack_plans(apart)
    assert plan.length.tolist() == lengths
    assert plan.unmask_by == "entropy"
    assert plan.order.shape == (4, 6)
    assert rows_of(plan) == [rows_of(one)[0] for one in apart]
    drafted = stack_plans([speculative_plan(Samples(2, 5), draft=3)])
    assert (len(drafted), drafted.draft) == (2, 3)


@pytest.mark.parametrize(
    "mode",
    modes("""
    random:group=2, random:group=3, speculative:draft=2, l2r:group=3,
    even:steps=2, even:steps=2,schedule=cosine,
    mdm:steps=1, mdm:steps=2, mdm:steps=3, mdm:steps=5,
    mdm:steps=2,schedule=cosine, mdm:steps=3,schedule=cosine
"""),
)
def test_orders_and_their_groups_have_the_distribution_of_their_definition(mode):
    """Half of the rows are 4 long: 24 orders. The others are 5 long with two given: 6
    orders."""
    length = torch.tensor([4, 5]).repeat(6000)
    given = torch.zeros(12_000, 5, dtype=torch.bool)
    given[1::2, 1] = True
    given[1::2, 4] = True
    rows = rows_of(make_plan(mode, 12_000, length, given, 0))
    # Speculation drafts groups of a random order.
    options = options_of(mode.replace("speculative:draft", "random:group"))
    for first, context, free in ((0, (), range(4)), (1, (1, 4), (0, 2, 3))):
        expected = {}
        for probability, order, sizes in plans_of(options, free, context):
            step = [-1] * len(context)
            for number, size in enumerate(sizes):
                step += [number] * size
            expected[order, tuple(step)] = float(probability)
        counts = Counter()
        for order, step in rows[first::2]:
            counts[tuple(order), tuple(step)] += 1
        assert counts.keys() <= expected.keys()
        if len(expected) > 1:
            observed = torch.tensor([counts[plan] for plan in expected])
            probabilities = torch.tensor(list(expected.values()), dtype=torch.float64)
            assert accept(observed, probabilities)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 16, 64])
def test_even_plans_have_the_rounded_expected_sizes(steps, schedule):
    """Left out: odd multiples of 3, where a cosine lies exactly between two
    integers."""
    lengths = torch.tensor([*LENGTHS.tolist(), 16, 64, 97])
    given = some_given(13, 97, seed=3)
    given[10:] = False
    plan = even_plan(Samples(13, lengths, seeded(0), given), steps, schedule)
    for _, step in rows_of(plan):
        free = sum(s >= 0 for s in step)
        is_between = schedule == "cosine" and free in (3, 9) and free <= steps
        if free and not is_between:
            sizes = sizes_of(step)
            expected = list(even_sizes(free, steps, schedule))
            assert sizes == expected[: len(sizes)]
            assert not any(expected[len(sizes) :])


def listed(order, step):
    return lambda: Plan(torch.tensor(order), torch.tensor(step))


def changed(**settings):
    return lambda: dataclasses.replace(order_plan(Samples(2, 3), "l2r"), **settings)


def adaptive(by, **settings):
    return lambda: score_plan(Samples(1, 4), by, **settings)


RULES = "'order', 'confidence', 'entropy'"


@pytest.mark.parametrize(
    "make, words",
    [
        (listed([[0, 0, 2]], [[0, 1, 2]]), r"permutation of 0\.\.2"),
        (listed([[0, 1, 2]], [[0, 2, 1]]), "not fall"),
        (listed([[0, 1, 2]], [[-2, 0, 1]]), "-1"),
        (changed(length=torch.tensor([3])), "2 numbers from 0 to 3"),
        (
            changed(
                order=torch.tensor([[0, 1, 2], [0, 2, 1]]), length=torch.tensor([3, 2])
            ),
            "before those it does not",
        ),
        (changed(unmask_by="random"), f"'random'.*{RULES}"),
        (changed(pace=Pace(most=2)), "pace needs unmask_by"),
        (changed(unmask_by="margin", block=2), "block needs a pace"),
        (changed(unmask_by="margin", draft=2), "draft takes neither"),
        (adaptive("surprise"), f"'surprise'.*{RULES}, 'margin'"),
        (adaptive("entropy", group=0, block=2), "most is 0, but it must be at least 1"),
    ],
)
def test_what_is_not_a_plan_is_refused_by_name(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_samples_that_cannot_be_are_a_user_error():
    model = make_system("AO-GPT", 0)
    with pytest.raises(UserError, match="0 samples"):
        generate(model, order_plan(Samples(0, 4), "l2r"))
    with pytest.raises(UserError, match="vocab_size"):
        generate(model, order_plan(Samples(1, 4), "l2r"), vocab_size=0)
