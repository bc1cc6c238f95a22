"""Plans have the distribution they claim, for rows that differ in length and in what is given."""

import dataclasses
import itertools
import math

import pytest
import torch
from reference import accept, chi_square_p, even_sizes, exact_plans, make_plan, seeded, some_given

import sampling as decode

MODES = (
    "l2r, l2r 3, random 1, random 4, exact 5, even 5, cosine 4, even-cosine 4, confidence 2, "
    "entropy 1, any 2, speculative 3, speculative-random 2"
).split(", ")
LENGTHS = torch.tensor([9, 0, 4, 1, 7, 9, 9, 3, 5, 8])


def rows_of(plan):
    """(order, step) of every row, up to its length."""
    rows = zip(plan.order.tolist(), plan.step.tolist(), plan.length.tolist(), strict=True)
    return [(order[:length], step[:length]) for order, step, length in rows]


def sizes_of(step):
    """Sizes of the steps 0, 1, ... of one row, empty ones included."""
    return [step.count(s) for s in range(max(step, default=-1) + 1)]


# ---- every plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [9, LENGTHS], ids=["equal lengths", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_given_positions_come_first_in_ascending_order(mode, lengths):
    given = some_given(10, 9, seed=1)
    plan = make_plan(mode, 10, lengths, given)
    length = torch.as_tensor(lengths).expand(10)
    existing = torch.arange(9) < length[:, None]
    assert torch.equal(plan.length, length) and torch.equal(plan.valid(), existing)
    assert torch.equal(plan.given_positions(), given & existing)
    assert torch.equal(plan.generated().sum(dim=1), (~given & existing).sum(dim=1))
    for (order, step), row in zip(rows_of(plan), given.tolist(), strict=True):
        context = [p for p in range(len(order)) if row[p]]
        assert order[: len(context)] == context
        assert all(s == -1 for s in step[: len(context)]) and all(
            s >= 0 for s in step[len(context) :]
        )
        assert sorted(order) == list(range(len(order)))


@pytest.mark.parametrize("lengths", [9, LENGTHS], ids=["equal lengths", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_group_sizes_are_those_of_the_non_empty_steps_of_each_row(mode, lengths):
    plan = make_plan(mode, 10, lengths, some_given(10, 9, seed=2), seed=3)
    expected = [[n for n in sizes_of(step) if n] for _, step in rows_of(plan)]
    widest = max(map(len, expected))
    assert decode.group_sizes(plan).tolist() == [
        row + [0] * (widest - len(row)) for row in expected
    ]


def test_group_sizes_leave_out_steps_that_unmask_nothing():
    order = torch.arange(5).expand(4, 5)
    steps = [[0, 0, 4, 4, 4], [-1, -1, 2, 3, 9], [-1] * 5, [1, 5, 5, 7, 7]]
    plan = decode.Plan(order, torch.tensor(steps), torch.tensor([5, 5, 5, 3]))
    assert decode.group_sizes(plan).tolist() == [[2, 3, 0], [1, 1, 1], [0, 0, 0], [1, 2, 0]]


def test_group_sizes_of_rows_without_anything_to_unmask():
    assert decode.group_sizes(
        decode.l2r_plan(2, torch.tensor([0, 0]), torch.zeros(2, 0).bool())
    ).shape == (2, 0)
    assert decode.group_sizes(decode.l2r_plan(0, 5)).shape == (0, 0)
    assert decode.group_sizes(
        decode.l2r_plan(2, torch.tensor([0, 3]), torch.ones(2, 3).bool())
    ).shape == (2, 0)


@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if not mode.startswith("l2r") and mode != "speculative 3"]
)
def test_plans_follow_their_generator(mode):
    a, b, c = (make_plan(mode, 4, 16, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.order, b.order) and torch.equal(a.step, b.step)
    assert not torch.equal(a.order, c.order)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_plan_are_a_plan(mode):
    plan = make_plan(mode, 10, LENGTHS)
    part = plan[1:3]
    assert len(plan) == 10 and len(part) == 2
    for name in ("order", "step", "length"):
        assert torch.equal(getattr(part, name), getattr(plan, name)[1:3])
    assert (part.unmask_by, part.draft) == (plan.unmask_by, plan.draft)


def test_rows_planned_one_by_one_are_stacked_to_a_plan():
    """Of different lengths; what is past a row's end is no part of it."""
    lengths = [4, 0, 6, 1]
    apart = [make_plan("entropy 2", 1, n, seed=i) for i, n in enumerate(lengths)]
    plan = decode.stack_plans(apart)
    assert plan.length.tolist() == lengths and plan.unmask_by == "entropy"
    assert plan.order.shape == (4, 6)
    assert rows_of(plan) == [rows_of(one)[0] for one in apart]
    drafted = decode.stack_plans(
        [decode.speculative_plan(2, 5, 3), decode.speculative_plan(1, 3, 3)]
    )
    assert len(drafted) == 3 and drafted.draft == 3


# ---- left to right, random, adaptive, speculative ------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 4, 20])
def test_left_to_right_plan_unmasks_groups_in_ascending_order(group):
    given = some_given(10, 9, seed=2)
    for (order, step), row in zip(
        rows_of(decode.l2r_plan(10, LENGTHS, given, group)), given.tolist(), strict=True
    ):
        free = [p for p in range(len(order)) if not row[p]]
        k = len(order) - len(free)
        assert order[k:] == free and step[k:] == [i // group for i in range(len(free))]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "mode", ["random 2", "even 2", "even-cosine 2", "any 3", "speculative-random 2"]
)
def test_order_is_uniform_over_the_positions_that_are_not_given(mode, seed):
    """Half of the rows are 4 long: 24 orders. The others are 5 long with two given: 6 orders of the
    rest."""
    length = torch.tensor([4, 5]).repeat(6000)
    given = torch.zeros(12_000, 5, dtype=torch.bool)
    given[1::2, 1] = given[1::2, 4] = True
    plan = make_plan(mode, 12_000, length, given, seed)
    for rows, context, free in (
        (plan.order[::2, :4], (), range(4)),
        (plan.order[1::2], (1, 4), (0, 2, 3)),
    ):
        cell = {(*context, *perm): i for i, perm in enumerate(itertools.permutations(free))}
        observed = torch.tensor([cell[tuple(row)] for row in rows.tolist()])
        uniform = torch.full((len(cell),), 1 / len(cell), dtype=torch.float64)
        assert accept(observed.bincount(minlength=len(cell)), uniform)


def test_random_and_adaptive_plans_have_groups_of_the_size_asked_for():
    given = some_given(10, 9, seed=2)
    for plan in (
        decode.random_plan(10, LENGTHS, seeded(0), given, 4),
        decode.adaptive_plan(10, LENGTHS, "entropy", seeded(0), given, 4),
    ):
        for _, step in rows_of(plan):
            free = [s for s in step if s >= 0]
            assert free == [i // 4 for i in range(len(free))]


def test_what_adaptive_and_speculative_plans_say():
    by = {
        name: decode.adaptive_plan(2, 5, name, seeded(0))
        for name in ("confidence", "entropy", "random")
    }
    assert {name: plan.unmask_by for name, plan in by.items()} == {
        "confidence": "confidence",
        "entropy": "entropy",
        "random": "order",
    }
    assert all(plan.draft == 0 for plan in by.values())
    plan, shuffled = decode.speculative_plan(3, 7, 3), decode.speculative_plan(3, 7, 3, seeded(0))
    assert plan.draft == shuffled.draft == 3 and plan.unmask_by == shuffled.unmask_by == "order"
    assert torch.equal(plan.order, torch.arange(7).expand(3, 7))
    assert not torch.equal(shuffled.order, plan.order)


# ---- masked diffusion ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 20])
def test_even_plan_has_groups_that_differ_by_at_most_one(steps):
    given = some_given(10, 9, seed=3)
    plan = decode.mdm_plan(10, LENGTHS, steps, seeded(0), given, even=True)
    for _, step in rows_of(plan):
        sizes, free = sizes_of(step), sum(s >= 0 for s in step)
        assert sum(sizes) == free and len(sizes) == min(steps, free)
        assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("n", [1, 2, 3, 16, 64, 97])
def test_even_cosine_plan_has_the_rounded_expected_sizes(n, steps):
    """n (1 - cos(pi k / (2 steps))) positions are unmasked after k steps: few first, many last.
    None of these lies exactly between two integers but for n = 1 or odd and one step of three (1 -
    cos 60 degrees = 1 / 2), where both roundings are right."""
    step = decode.mdm_plan(1, n, steps, seeded(0), even=True, schedule="cosine").step[0].tolist()
    sizes, expected = sizes_of(step), list(even_sizes(n, steps, "cosine"))
    sizes += [0] * (len(expected) - len(sizes))
    halves = [
        n * (1 - math.cos(math.pi / 2 * (k + 1) / len(expected))) % 1 for k in range(len(expected))
    ]
    if any(abs(share - 0.5) < 1e-9 for share in halves):
        reached, wanted = (torch.tensor(v).cumsum(0) for v in (sizes, expected))
        assert (
            (reached - wanted).abs() <= torch.tensor([abs(share - 0.5) < 1e-9 for share in halves])
        ).all()
    else:
        assert sizes == expected
    assert sum(sizes) == n
    if n >= 2 * steps > 2:
        assert sizes[0] < n / steps < sizes[-1]
        # the expected sizes rise; rounding takes 1
        assert all(b >= a - 1 for a, b in itertools.pairwise(sizes))


def steps_of(counts):
    """The step of each entry of an order that is cut into groups of these sizes: (2, 0, 1) -> (0,
    0, 2)."""
    return tuple(step for step, count in enumerate(counts) for _ in range(count))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_exact_plan_is_uniform_order_with_multinomial_groups(schedule, steps, seed):
    """The joint distribution of order and steps for 3 positions, all 6 * compositions outcomes."""
    plan = decode.mdm_plan(12_000, 3, steps, seeded(seed), schedule=schedule)
    plans = list(exact_plans(range(3), (), steps, schedule))
    cell = {(order, steps_of(counts)): i for i, (_, order, counts) in enumerate(plans)}
    drawn = zip(map(tuple, plan.order.tolist()), map(tuple, plan.step.tolist()), strict=True)
    observed = torch.tensor([cell[outcome] for outcome in drawn]).bincount(minlength=len(plans))
    expected = [float(probability) for probability, _, _ in plans]
    assert accept(observed, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("steps", [7, 50])
def test_steps_of_the_cosine_schedule_have_their_distribution(steps, seed):
    """A position unmasks between the times t > s with probability sin(pi t / 2) - sin(pi s / 2),
    whatever its row's length; the linear schedule is told apart beyond doubt."""
    plan = decode.mdm_plan(
        3000, torch.tensor([9, 4, 7]).repeat(1000), steps, seeded(seed), schedule="cosine"
    )
    observed = plan.step[plan.valid()].bincount(minlength=steps)
    edges = (torch.arange(steps, -1, -1, dtype=torch.float64) / steps * math.pi / 2).sin()
    assert accept(observed, -edges.diff())
    assert chi_square_p(observed, torch.full((steps,), float(observed.sum()) / steps)) < 1e-20


def test_exact_plans_of_very_many_steps_stay_in_range():
    for schedule in ("linear", "cosine"):
        plan = decode.mdm_plan(100, 20, 2**31, seeded(0), schedule=schedule)
        assert 0 <= int(plan.step.min()) and int(plan.step.max()) < 2**31


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order, step, words",
    [
        ([[0, 1, 2]], [[0, 1]], r"\(1, 3\).*\(1, 2\)"),
        ([0, 1], [0, 1], r"\(B, T\)"),
        ([[0, 0, 2]], [[0, 1, 2]], r"permutation of 0\.\.2"),
        ([[1, 2, 3]], [[0, 1, 2]], r"permutation of 0\.\.2"),
        ([[0, 1, 2], [0, 1, -1]], [[0, 1, 2]] * 2, r"permutation of 0\.\.2"),
        ([[0, 1, 2]], [[0, 2, 1]], "not fall"),
        ([[0, 1, 2]], [[0, -1, 1]], "not fall"),
        ([[0, 1, 2]], [[-2, 0, 1]], "-1"),
    ],
)
def test_what_is_not_a_plan_is_refused(order, step, words):
    with pytest.raises(ValueError, match=words):
        decode.Plan(torch.tensor(order), torch.tensor(step))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"length": torch.tensor([3])}, "2 numbers from 0 to 3"),
        ({"length": torch.tensor([3, 4])}, "2 numbers from 0 to 3"),
        ({"length": torch.tensor([-1, 3])}, "2 numbers from 0 to 3"),
        (
            {"order": torch.tensor([[0, 1, 2], [0, 2, 1]]), "length": torch.tensor([3, 2])},
            "before those it does not",
        ),
        ({"unmask_by": "random"}, "'random'.*'order', 'confidence', 'entropy'"),
        ({"draft": 1}, "draft of 1 .*at least 2"),
        ({"draft": -2}, "draft of -2 .*at least 2"),
        ({"draft": 2, "unmask_by": "entropy"}, "draft of 2 .*in order"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(settings, words):
    plan = decode.l2r_plan(2, 3)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(plan, **settings)


def test_steps_past_the_end_of_a_row_may_be_anything_but_below_minus_one():
    order, length = torch.arange(4).expand(1, 4), torch.tensor([2])
    plan = decode.Plan(order, torch.tensor([[1, 3, 0, -1]]), length)
    assert decode.group_sizes(plan).tolist() == [[1, 1]] and plan.generated().tolist() == [
        [True, True, False, False]
    ]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: decode.mdm_plan(1, 4, 0, seeded(0)), "steps is 0.*at least 1"),
        (lambda: decode.mdm_plan(1, 4, -1, seeded(0)), "steps is -1.*at least 1"),
        (lambda: decode.mdm_plan(1, 4, 2**31 + 1, seeded(0)), r"at most 2\*\*31"),
        (
            lambda: decode.mdm_plan(1, 4, 2, seeded(0), schedule="sine"),
            "'sine'.*('linear', 'cosine'|'cosine', 'linear')",
        ),
        (lambda: decode.l2r_plan(1, 4, group=0), "group of 0"),
        (lambda: decode.random_plan(1, 4, seeded(0), group=-1), "group of -1"),
        (lambda: decode.adaptive_plan(1, 4, "entropy", seeded(0), group=0), "group of 0"),
        (
            lambda: decode.adaptive_plan(1, 4, "surprise", seeded(0)),
            "'surprise'.*'order', 'confidence', 'entropy', 'margin'",
        ),
        (lambda: decode.adaptive_plan(1, 4, "random", seeded(0), block=2), "score to choose by"),
        (
            lambda: decode.adaptive_plan(1, 4, "entropy", seeded(0), threshold=-1.0),
            "threshold is -1.0; give a number of at least 0",
        ),
        (
            lambda: decode.adaptive_plan(1, 4, "entropy", seeded(0), group=0, block=2),
            "most is 0; give a number of at least 1",
        ),
        (lambda: decode.speculative_plan(1, 4, 1), "draft of 1 .*at least 2"),
    ],
)
def test_settings_of_a_plan_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "length, given, words",
    [
        (-1, None, "length must be a number >= 0, or 2 of them"),
        (torch.tensor([3, 4, 5]), None, "length must be a number >= 0, or 2 of them"),
        (torch.tensor([3, -4]), None, "length must be a number >= 0, or 2 of them"),
        (
            4,
            torch.zeros(2, 5, dtype=torch.bool),
            r"given is \(2, 5\), but the samples are \(2, 4\)",
        ),
        (torch.tensor([3, 4]), torch.zeros(4, dtype=torch.bool), r"given is \(4,\)"),
    ],
)
def test_lengths_and_given_positions_that_do_not_fit_are_refused_by_name(length, given, words):
    for build in (
        decode.l2r_plan,
        lambda *a: decode.random_plan(*a[:2], seeded(0), a[2]),
        lambda *a: decode.speculative_plan(*a[:2], 3, None, a[2]),
    ):
        with pytest.raises(ValueError, match=words):
            build(2, length, given)
