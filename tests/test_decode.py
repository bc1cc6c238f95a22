"""Decoding draws from the distribution it claims, through a cache that changes nothing."""

import itertools
import math

import pytest
import torch
from reference import (
    all_sequences,
    chi_square_p,
    conditionals,
    exact_plans,
    fixed_plans,
    one_stage_distribution,
    order_through,
    plan_distribution,
    random_orders,
    random_tokens,
    randomise,
)

from decode import Plan, TokenChoice, choose_tokens, generate, group_sizes, l2r_plan, mdm_plan
from model import AOGPT, ModelConfig

LEVEL = 1e-4  # significance of each chi-square test; seeds are fixed, so an accepted test stays accepted
N, V = 4, 3  # positions and tokens of the enumerable model: 81 sequences
SAMPLES = 20_000


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def plan_in_sequence(plan):
    """The step of every position: {(row, position): step}."""
    rows = zip(plan.order.tolist(), plan.step.tolist(), strict=True)
    return {(b, p): s for b, (order, step) in enumerate(rows) for p, s in zip(order, step, strict=True)}


# ---- plans -----------------------------------------------------------------------------------------------------------


def some_given(batch_size, length, seed):
    """Rows with nothing given, everything given and random subsets given."""
    given = torch.rand(batch_size, length, generator=seeded(seed)) < 0.4
    given[0], given[1] = False, True
    return given


def make_plan(name, batch_size, length, given=None, seed=0):
    if name == "l2r":
        return l2r_plan(batch_size, length, given)
    kind, steps = name.split()
    return mdm_plan(batch_size, length, int(steps), seeded(seed), given, even=kind == "even")


@pytest.mark.parametrize("name", ["l2r", "exact 5", "even 5"])
def test_given_positions_come_first_in_ascending_order(name):
    given = some_given(20, 9, seed=1)
    plan = make_plan(name, 20, 9, given)
    assert torch.equal(plan.given(), given)
    for order, step, row in zip(plan.order.tolist(), plan.step.tolist(), given.tolist(), strict=True):
        context = [p for p in range(9) if row[p]]
        assert order[: len(context)] == context
        assert all(s == -1 for s in step[: len(context)]) and all(s >= 0 for s in step[len(context) :])
        assert sorted(order) == list(range(9))


def test_left_to_right_plan_is_one_position_a_step_in_ascending_order():
    given = some_given(20, 9, seed=2)
    plan = l2r_plan(20, 9, given)
    for order, step, row in zip(plan.order.tolist(), plan.step.tolist(), given.tolist(), strict=True):
        free = [p for p in range(9) if not row[p]]
        k = 9 - len(free)
        assert order[k:] == free and step[k:] == list(range(len(free)))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 20])
def test_even_plan_has_groups_that_differ_by_at_most_one(steps):
    given = some_given(30, 9, seed=3)
    plan = mdm_plan(30, 9, steps, seeded(0), given, even=True)
    for step, free in zip(plan.step.tolist(), (~given).sum(dim=1).tolist(), strict=True):
        sizes = [step.count(s) for s in range(max(step) + 1)]
        assert sum(sizes) == free and len(sizes) == min(steps, free)
        assert not sizes or max(sizes) - min(sizes) <= 1


def steps_of(counts):
    """The step of each entry of an order that is cut into groups of these sizes: (2, 0, 1) -> (0, 0, 2)."""
    return tuple(step for step, count in enumerate(counts) for _ in range(count))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_exact_plan_is_uniform_order_with_multinomial_groups(steps, seed):
    """The joint distribution of order and steps for 3 positions, all 6 * compositions outcomes."""
    plan = mdm_plan(12_000, 3, steps, seeded(seed))
    plans = list(exact_plans(range(3), (), steps))
    cell = {(order, steps_of(counts)): i for i, (_, order, counts) in enumerate(plans)}
    drawn = zip(map(tuple, plan.order.tolist()), map(tuple, plan.step.tolist()), strict=True)
    observed = torch.tensor([cell[outcome] for outcome in drawn]).bincount(minlength=len(plans))
    assert chi_square_p(observed, 12_000 * torch.tensor([float(p) for p, _, _ in plans], dtype=torch.float64)) > LEVEL


@pytest.mark.parametrize("seed", [0, 1])
def test_even_plan_has_a_uniform_order(seed):
    plan = mdm_plan(12_000, 4, 2, seeded(seed), even=True)
    cell = {perm: i for i, perm in enumerate(itertools.permutations(range(4)))}
    observed = torch.tensor([cell[tuple(row)] for row in plan.order.tolist()]).bincount(minlength=24)
    assert chi_square_p(observed, torch.full((24,), 500.0)) > LEVEL


def test_plans_follow_their_generator():
    a, b, c = (mdm_plan(4, 16, 6, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(a.order, b.order) and torch.equal(a.step, b.step)
    assert not torch.equal(a.order, c.order)


def test_group_sizes_leave_out_steps_that_reveal_nothing():
    order = torch.arange(5).expand(3, 5)
    plan = Plan(order, torch.tensor([[0, 0, 4, 4, 4], [-1, -1, 2, 3, 9], [-1] * 5]))
    assert group_sizes(plan).tolist() == [[2, 3, 0], [1, 1, 1], [0, 0, 0]]


def test_rows_of_a_plan_are_a_plan():
    plan = mdm_plan(5, 6, 3, seeded(0))
    part = plan[1:3]
    assert len(plan) == 5 and len(part) == 2
    assert torch.equal(part.order, plan.order[1:3]) and torch.equal(part.step, plan.step[1:3])


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
        Plan(torch.tensor(order), torch.tensor(step))


@pytest.mark.parametrize("steps", [0, -1])
def test_a_plan_takes_at_least_one_step(steps):
    with pytest.raises(ValueError, match=f"steps is {steps}.*at least 1"):
        mdm_plan(1, 4, steps, seeded(0))


# ---- token choice ----------------------------------------------------------------------------------------------------

GRID = 2**14
JUST_BELOW_ONE = torch.tensor(1.0, dtype=torch.float64).nextafter(torch.tensor(0.0, dtype=torch.float64))


def truncated(probs, choice):
    """What is kept of a list of probabilities, by definition: sort (lower id first among equals), keep top_k,
    renormalise, then keep the shortest head whose mass reaches top_p, renormalise."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: choice.top_k]
    mass, kept, reached = sum(probs[i] for i in ranked), [], 0.0
    for i in ranked:
        kept.append(i)
        reached += probs[i] / mass
        if reached >= choice.top_p:
            break
    mass = sum(probs[i] for i in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))]


def tempered(logits, temperature):
    weights = [math.exp((v - max(logits)) / temperature) for v in logits]
    return [w / sum(weights) for w in weights]


def drawn_shares(logits, choice):
    """Share of an even grid of uniforms that each token receives: its probability, to 1 / GRID."""
    uniforms = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    drawn = choose_tokens(torch.tensor(logits).expand(GRID, len(logits)), uniforms, choice)
    return (drawn.bincount(minlength=len(logits)) / GRID).tolist()


SHAPES = {
    "random": [0.3, -1.2, 2.0, 0.9, -0.4, 1.1, 0.0, -2.5],
    "ties": [1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0, 0.5],
    "flat": [0.7] * 8,
    "one-hot": [-math.inf, -math.inf, 3.0, -math.inf],
    "two, the rest impossible": [-math.inf, 0.5, -math.inf, 0.0, -math.inf],
    "sharp": [0.0, 30.0, 29.0, -30.0],
}
CHOICES = [
    TokenChoice(),
    TokenChoice(temperature=0.5),
    TokenChoice(temperature=3.0),
    TokenChoice(top_p=1e-9),
    TokenChoice(top_p=0.3),
    TokenChoice(top_p=0.5),
    TokenChoice(top_p=0.9),
    TokenChoice(top_p=1.0 - 1e-12),
    TokenChoice(top_k=1),
    TokenChoice(top_k=3),
    TokenChoice(top_k=100),
    TokenChoice(top_k=3, top_p=0.6),
    TokenChoice(temperature=0.7, top_k=5, top_p=0.85),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_drawn_from_the_truncated_distribution(shape, choice):
    """Inverting the cumulative distribution on a grid gives each token its probability to within one grid cell."""
    expected = truncated(tempered(SHAPES[shape], choice.temperature), choice)
    shares = drawn_shares(SHAPES[shape], choice)
    for got, want in zip(shares, expected, strict=True):
        assert abs(got - want) <= 1.001 / GRID and (want > 0 or got == 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "choice", [TokenChoice(), TokenChoice(0.6, 0.9), TokenChoice(1.5, top_k=7), TokenChoice(0.8, 0.7, 9)], ids=str
)
def test_drawn_tokens_pass_chi_square(choice, seed):
    logits = 1.5 * torch.randn(12, generator=seeded(seed))
    uniforms = torch.rand(50_000, generator=seeded(seed + 100), dtype=torch.float64)
    drawn = choose_tokens(logits.expand(50_000, 12), uniforms, choice)
    expected = truncated(tempered(logits.double().tolist(), choice.temperature), choice)
    assert chi_square_p(drawn.bincount(minlength=12), 50_000 * torch.tensor(expected, dtype=torch.float64)) > LEVEL


def test_each_row_is_drawn_from_its_own_logits():
    logits = torch.randn(40, 9, generator=seeded(0))
    uniforms = torch.rand(40, generator=seeded(1), dtype=torch.float64)
    for choice in (TokenChoice(), TokenChoice(0.7, 0.8), TokenChoice(top_k=4), TokenChoice(0)):
        together = choose_tokens(logits, uniforms, choice)
        apart = [choose_tokens(logits[i : i + 1], uniforms[i : i + 1], choice) for i in range(40)]
        assert together.dtype == torch.int64 and torch.equal(together, torch.cat(apart))


def test_temperature_zero_is_greedy_whatever_the_uniform():
    logits = torch.randn(30, 50, generator=seeded(0))
    for u in (0.0, 0.5, float(JUST_BELOW_ONE)):
        drawn = choose_tokens(logits, torch.full((30,), u, dtype=torch.float64), TokenChoice(temperature=0))
        assert torch.equal(drawn, logits.argmax(dim=1))


@pytest.mark.parametrize("choice", [TokenChoice(), TokenChoice(top_p=0.9), TokenChoice(top_k=4)], ids=str)
@pytest.mark.parametrize("vocab", [6, 50_304])
def test_a_token_of_probability_zero_is_never_drawn(vocab, choice):
    """Impossible tokens at both ends and between, at both ends of the uniforms: rounding may not reach them."""
    logits = torch.randn(64, vocab, generator=seeded(0))
    impossible = torch.rand(64, vocab, generator=seeded(1)) < 0.5
    impossible[:, 0], impossible[:, -1], impossible[:, 1] = True, True, False
    logits = logits.masked_fill(impossible, -math.inf)
    logits[::2, 0] = -1e5  # not minus infinity, but its probability underflows to 0
    for u in (torch.tensor(0.0, dtype=torch.float64), JUST_BELOW_ONE):
        drawn = choose_tokens(logits, u.expand(64), choice)
        assert not impossible.gather(1, drawn[:, None]).any()


def test_no_probability_mass_is_lost_below_float32():
    """A token of probability 1e-9, which noise of 24 bits could never draw, has its own interval of uniforms."""
    p = 1e-9
    logits = torch.tensor([math.log(p), math.log1p(-p)], dtype=torch.float64)
    uniforms = torch.tensor([0.5 * p, 0.99 * p, 1.01 * p, 2 * p], dtype=torch.float64)
    assert choose_tokens(logits.expand(4, 2), uniforms, TokenChoice()).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_impossible_token_choices_are_refused_by_name(settings, word):
    with pytest.raises(ValueError, match=word):
        TokenChoice(**settings)


# ---- the exact distribution over all 81 sequences --------------------------------------------------------------------


def enumerable_model(seed=0, target="adaln"):
    config = ModelConfig(vocab_size=V, block_size=N, n_layer=1, n_head=2, n_embd=8, cond_dim=4, target=target)
    return randomise(AOGPT(config).double(), seed)


def with_choice(conditional, choice):
    """The conditionals after temperature, top-k and nucleus, by the definitions above."""
    result = {}
    for (context, target), p in conditional.items():
        rows = p.view((V,) * N).movedim(target, -1).reshape(-1, V)
        rows = [truncated(tempered(row.log().tolist(), choice.temperature), choice) for row in rows]
        back = torch.tensor(rows, dtype=torch.float64).view((V,) * N).movedim(-1, target)
        result[context, target] = back.flatten()
    return result


def sampled_counts(model, plan, seed, tokens=None, choice=None):
    got = generate(model, plan, tokens, generator=seeded(seed), choice=choice).tokens
    place = torch.tensor([V ** (N - 1 - i) for i in range(N)])
    return (got * place).sum(dim=1).bincount(minlength=V**N)


def accept(counts, distribution):
    assert abs(float(distribution.sum()) - 1) < 1e-12
    return chi_square_p(counts, counts.sum() * distribution) > LEVEL


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_exact_sampler_matches_enumeration(steps, seed):
    model = enumerable_model(seed)
    expected = plan_distribution(conditionals(model, V, N), exact_plans(range(N), (), steps))
    counts = sampled_counts(model, mdm_plan(SAMPLES, N, steps, seeded(seed + 10)), seed + 20)
    assert accept(counts, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_chi_square_test_tells_samplers_apart(seed):
    """So that acceptance above means something: samples of one step are not those of five, of an even plan or l2r."""
    model = enumerable_model(seed)
    conditional = conditionals(model, V, N)
    counts = sampled_counts(model, mdm_plan(SAMPLES, N, 1, seeded(1)), 2)
    others = [exact_plans(range(N), (), 2), exact_plans(range(N), (), 5), fixed_plans(range(N), (), (2, 2))]
    for plans in (*others, [(1, tuple(range(N)), (1,) * N)]):
        wrong = plan_distribution(conditional, plans)
        assert chi_square_p(counts, SAMPLES * wrong) < 1e-20


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_even_sampler_matches_enumeration(steps, seed):
    model = enumerable_model(seed, target="input")
    plan = mdm_plan(SAMPLES, N, steps, seeded(seed + 10), even=True)
    sizes = tuple(group_sizes(plan)[0].tolist())
    expected = plan_distribution(conditionals(model, V, N), fixed_plans(range(N), (), sizes))
    assert accept(sampled_counts(model, plan, seed + 20), expected)


@pytest.mark.parametrize("target", ["adaln", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_left_to_right_sampler_matches_enumeration(seed, target):
    model = enumerable_model(seed, target)
    identity = torch.arange(N).expand(V**N, N)
    expected = model.token_log_probs(all_sequences(V, N), identity).sum(dim=1).exp()
    assert accept(sampled_counts(model, l2r_plan(SAMPLES, N), seed + 20), expected)


@pytest.mark.parametrize("prompt", [{1: 2}, {0: 1, 3: 0}, {1: 0, 2: 2, 3: 1}])
@pytest.mark.parametrize("mode", ["exact 1", "exact 3", "even 2", "l2r"])
def test_infilling_matches_enumeration(mode, prompt):
    model = enumerable_model(3)
    given = torch.tensor([p in prompt for p in range(N)]).expand(SAMPLES, N)
    tokens = torch.tensor([prompt.get(p, 0) for p in range(N)]).expand(SAMPLES, N)
    plan = make_plan(mode, SAMPLES, N, given, seed=4)
    context, free = tuple(sorted(prompt)), [p for p in range(N) if p not in prompt]
    if mode == "l2r":
        plans = [(1, (*context, *free), (1,) * len(free))]
    elif mode.startswith("even"):
        plans = fixed_plans(free, context, tuple(group_sizes(plan)[0].tolist()))
    else:
        plans = exact_plans(free, context, int(mode[-1]))
    expected = plan_distribution(conditionals(model, V, N), plans, n_given=len(context))
    sequences = all_sequences(V, N)
    fits = torch.stack([sequences[:, p] == token for p, token in prompt.items()]).all(dim=0)
    assert accept(sampled_counts(model, plan, 5, tokens), expected * fits)


@pytest.mark.parametrize(
    "choice", [TokenChoice(0.6), TokenChoice(top_p=0.75), TokenChoice(top_k=2), TokenChoice(1.3, 0.9, 2)], ids=str
)
@pytest.mark.parametrize("seed", [0, 1])
def test_truncated_sampling_matches_enumeration(seed, choice):
    model = enumerable_model(seed)
    conditional = with_choice(conditionals(model, V, N), choice)
    expected = plan_distribution(conditional, exact_plans(range(N), (), 3))
    counts = sampled_counts(model, mdm_plan(SAMPLES, N, 3, seeded(seed + 10)), seed + 20, choice=choice)
    assert accept(counts, expected)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_stages_and_one_stage_are_the_same_distribution(seed, steps):
    """Lemma 4.1 of the paper, both sides enumerated: drawing token-or-mask at every masked position in every step, and
    drawing the whole plan before the model runs, differ by float64 rounding alone."""
    conditional = conditionals(enumerable_model(seed), V, N)
    one = one_stage_distribution(conditional, N, steps)
    two = plan_distribution(conditional, exact_plans(range(N), (), steps))
    assert abs(float(one.sum()) - 1) < 1e-12
    assert (one - two).abs().max() < 1e-12


# ---- the cache -------------------------------------------------------------------------------------------------------

LENGTH = 12


def text_model(seed=0, dtype=torch.float32, **settings):
    config = {"vocab_size": 17, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 24, "cond_dim": 6} | settings
    return randomise(AOGPT(ModelConfig(**config)).to(dtype), seed, scale=0.7)


def uncached_log_probs(model, tokens, plan):
    """Each revealed position under the order (known before its group, it, the rest), in one uncached pass each."""
    result = torch.zeros(tokens.shape)
    for b, (order, step) in enumerate(zip(plan.order.tolist(), plan.step.tolist(), strict=True)):
        for i in (i for i in range(len(order)) if step[i] >= 0):
            start = step.index(step[i])
            single = torch.tensor([order_through(order[:start], order[i], len(order))])
            result[b, order[i]] = model.token_log_probs(tokens[b : b + 1], single)[0, start]
    return result


VARIANTS = {
    "adaln": {},
    "input": {"target": "input"},
    "gpt-2": {"target": "none", "norm": "layernorm", "qk_norm": False, "tied_head": True, "gelu": "tanh"},
}


@pytest.mark.parametrize("prompted", [False, True], ids=["unprompted", "prompted"])
@pytest.mark.parametrize("mode", ["l2r", "exact 1", "exact 4", "exact 30", "even 4", "even 5"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_generated_log_probs_are_those_of_the_uncached_model(variant, mode, prompted):
    """Float32: log-probabilities of size 1 to 10 round at about 1e-6."""
    model = text_model(**VARIANTS[variant])
    given = some_given(5, LENGTH, seed=7) if prompted else None
    plan = make_plan(mode, 5, LENGTH, given, seed=8)
    tokens = random_tokens(17, 5, LENGTH, seed=9)
    got = generate(model, plan, tokens, generator=seeded(10))
    assert (got.log_probs - uncached_log_probs(model, got.tokens, plan)).abs().max() < 1e-5
    assert (got.log_probs[~plan.given()] < 0).all() and (got.log_probs[plan.given()] == 0).all()


def test_log_probs_are_the_models_own_before_temperature_and_truncation():
    model = text_model()
    plan = mdm_plan(4, LENGTH, 5, seeded(0))
    got = generate(model, plan, generator=seeded(1), choice=TokenChoice(0.5, 0.8, 6))
    assert (got.log_probs - uncached_log_probs(model, got.tokens, plan)).abs().max() < 1e-5


# ---- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["l2r", "exact 4", "even 3"])
def test_given_tokens_are_untouched_and_the_others_replaced(mode):
    given = some_given(8, LENGTH, seed=3)
    tokens = random_tokens(17, 8, LENGTH, seed=4)
    before = tokens.clone()
    plan = make_plan(mode, 8, LENGTH, given)
    got = generate(text_model(), plan, tokens, generator=seeded(0))
    assert torch.equal(got.tokens[given], tokens[given]) and torch.equal(tokens, before)
    assert not torch.equal(got.tokens[~given], tokens[~given])
    other = tokens.where(given, (tokens + 1) % 17)  # what stands at free positions is ignored
    assert torch.equal(generate(text_model(), plan, other, generator=seeded(0)).tokens, got.tokens)


@pytest.mark.parametrize("mode", ["l2r", "exact 4", "even 3"])
def test_a_sample_depends_on_its_own_row_and_not_on_the_batch(mode):
    """Float64, so that no rounding difference between batch shapes can tip a token."""
    model, given = text_model(dtype=torch.float64), some_given(7, LENGTH, seed=3)
    tokens, plan = random_tokens(17, 7, LENGTH, seed=4), make_plan(mode, 7, LENGTH, given)
    uniforms = torch.rand(7, LENGTH, generator=seeded(5), dtype=torch.float64)
    whole = generate(model, plan, tokens, uniforms=uniforms)
    for size in (1, 2, 3, 7, 100):
        parts = generate(model, plan, tokens, uniforms=uniforms, batch_size=size)
        assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.step, whole.step)
        assert (parts.log_probs - whole.log_probs).abs().max() < 1e-6  # stored as float32
    changed = uniforms.clone()
    changed[3] = 1 - changed[3]
    other = generate(model, plan, tokens, uniforms=changed)
    same = (other.tokens == whole.tokens).all(dim=1)
    assert same.tolist() == [True, True, True, False, True, True, True]


def test_uniforms_belong_to_positions_and_a_generator_draws_them():
    model, plan = text_model(), mdm_plan(4, LENGTH, 5, seeded(0))
    uniforms = torch.rand(4, LENGTH, generator=seeded(6), dtype=torch.float64)
    by_generator, by_uniforms = generate(model, plan, generator=seeded(6)), generate(model, plan, uniforms=uniforms)
    assert torch.equal(by_generator.tokens, by_uniforms.tokens)
    # In one step no position sees another: changing one position's number changes that position alone.
    plan = mdm_plan(1, LENGTH, 1, seeded(0))
    low, high = uniforms[:1].clone(), uniforms[:1].clone()
    low[0, 3], high[0, 3] = 0.0, float(JUST_BELOW_ONE)
    a, b = (generate(model, plan, uniforms=u).tokens[0] for u in (low, high))
    assert (a != b).nonzero().flatten().tolist() == [3]


def test_generation_is_reproducible_and_leaves_the_global_generator_alone():
    model, plan = text_model(), mdm_plan(3, LENGTH, 5, seeded(0))
    before = torch.get_rng_state()
    a, b, c = (generate(model, plan, generator=seeded(seed)).tokens for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("choice", [TokenChoice(), TokenChoice(0.9, 0.95), TokenChoice(0)], ids=str)
def test_vocab_size_limits_what_is_drawn_but_not_what_is_given(choice):
    model = text_model()
    with torch.no_grad():
        model.head.bias[5:] += 4  # left alone, the model mostly draws the ids that are ruled out
    given = some_given(20, LENGTH, seed=0)
    tokens = torch.full((20, LENGTH), 16)
    plan = mdm_plan(20, LENGTH, 4, seeded(0), given)
    free = generate(model, plan, tokens, generator=seeded(1), choice=choice).tokens[~given]
    assert (free >= 5).double().mean() > 0.5
    got = generate(model, plan, tokens, generator=seeded(1), choice=choice, vocab_size=5).tokens
    assert (got[~given] < 5).all() and (got[given] == 16).all()


@pytest.mark.parametrize("mode", ["l2r", "exact 6", "even 4"])
def test_steps_are_those_of_the_plan_in_sequence_order(mode):
    plan = make_plan(mode, 6, LENGTH, some_given(6, LENGTH, seed=1))
    got = generate(text_model(), plan, torch.zeros(6, LENGTH).long(), generator=seeded(0))
    assert {(b, p): s for b, row in enumerate(got.step.tolist()) for p, s in enumerate(row)} == plan_in_sequence(plan)


@pytest.mark.parametrize("prompted", [False, True], ids=["unprompted", "prompted"])
@pytest.mark.parametrize("mode", ["l2r", "exact 1", "exact 5", "exact 100", "even 5"])
def test_model_calls_and_token_forwards(mode, prompted):
    """Calls: the non-empty steps of the longest row of each batch. Work: below 2n + steps inputs a row."""
    plan = make_plan(mode, 6, LENGTH, some_given(6, LENGTH, seed=2) if prompted else None)
    model, tokens, seen = text_model(), torch.zeros(6, LENGTH).long(), []
    steps = [len({s for s in row if s >= 0}) for row in plan.step.tolist()]
    got = generate(model, plan, tokens, generator=seeded(0), progress=seen.append)
    assert got.model_calls == max(steps) == len(seen)
    assert sum(seen) == int((~plan.given()).sum())
    assert got.token_forwards < sum(2 * LENGTH + k for k in steps)
    halves = generate(model, plan, tokens, generator=seeded(0), batch_size=3)
    assert halves.model_calls == max(steps[:3]) + max(steps[3:])
    assert halves.token_forwards == got.token_forwards


@pytest.mark.parametrize("mode", ["l2r", "exact 1"])
def test_groups_of_one_and_a_single_group_feed_every_step_once(mode):
    got = generate(text_model(), make_plan(mode, 3, LENGTH), generator=seeded(0))
    assert got.token_forwards == 3 * LENGTH


def test_groups_of_k_feed_the_copies_and_then_the_revealed_tokens():
    """4 groups of 3: 12 copies of a last known token, and after every group but the last the 2 of its tokens that no
    copy has left in the cache."""
    got = generate(text_model(), mdm_plan(1, 12, 4, seeded(0), even=True), generator=seeded(0))
    assert got.token_forwards == 12 + 3 * 2


def test_nothing_to_generate_costs_no_call():
    tokens = random_tokens(17, 2, LENGTH, seed=0)
    got = generate(text_model(), l2r_plan(2, LENGTH, torch.ones(2, LENGTH).bool()), tokens, generator=seeded(0))
    assert torch.equal(got.tokens, tokens)
    assert (got.model_calls, got.token_forwards) == (0, 0)
    assert (got.step == -1).all() and (got.log_probs == 0).all()


@pytest.mark.parametrize("length", [1, 16])  # a single position, and the whole block
def test_shortest_and_longest_samples(length):
    model, plan = text_model(), mdm_plan(3, length, 4, seeded(0))
    got = generate(model, plan, generator=seeded(1))
    assert got.tokens.shape == (3, length)
    assert (got.log_probs - uncached_log_probs(model, got.tokens, plan)).abs().max() < 1e-5


def test_any_order_can_be_a_plan():
    """A hand-made plan: a context that is not in ascending order keeps its order."""
    model, order = text_model(), random_orders(2, LENGTH, seed=5)
    step = torch.tensor([[-1, -1, -1, 0, 0, 2, 2, 2, 2, 3, 7, 7], [-1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 5]])
    plan = Plan(order, step)
    got = generate(model, plan, random_tokens(17, 2, LENGTH, seed=6), generator=seeded(1))
    assert (got.log_probs - uncached_log_probs(model, got.tokens, plan)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "plan, arguments, words",
    [
        (l2r_plan(1, 17), {}, "17 tokens.*up to 16"),
        (l2r_plan(1, 4, torch.tensor([[True, False, False, False]])), {}, "given positions: pass their tokens"),
        (l2r_plan(1, 4), {"tokens": torch.zeros(1, 5).long()}, r"\(1, 5\).*\(1, 4\)"),
        (l2r_plan(1, 4), {"tokens": torch.zeros(4).long()}, r"\(4,\).*\(1, 4\)"),
        (l2r_plan(1, 2, torch.tensor([[True, False]])), {"tokens": torch.tensor([[17, 0]])}, "vocabulary of 17"),
        (l2r_plan(1, 2, torch.tensor([[True, False]])), {"tokens": torch.tensor([[-1, 0]])}, "vocabulary of 17"),
    ],
)
def test_generate_refuses_what_it_cannot_do(plan, arguments, words):
    with pytest.raises(ValueError, match=words):
        generate(text_model(), plan, generator=seeded(0), **arguments)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"uniforms": torch.zeros(2, 3, dtype=torch.float64)}, "uniforms"),
        ({"uniforms": torch.zeros(2, 5, dtype=torch.float64)}, "uniforms"),
        ({"uniforms": torch.zeros(3, 4, dtype=torch.float64)}, "uniforms"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_generate_refuses_impossible_settings_by_name(arguments, word):
    with pytest.raises(ValueError, match=word):
        generate(text_model(), l2r_plan(2, 4), generator=seeded(0), **arguments)
