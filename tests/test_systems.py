"""Every system of the comparison computes its formulas and trains on its objective."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import some_slow
from reference import (
    DECODERS,
    ENCODERS,
    LEVEL,
    LLAMA,
    ONE_BY_ONE,
    SYSTEMS,
    TINY,
    TOKENS,
    all_sequences,
    chi_square_p,
    encoder_outputs,
    enumerable_system,
    exact_loss,
    listed_contexts,
    log_probs,
    make_system,
    order_through,
    parameters,
    random_text,
    random_tokens,
    randomise,
    seeded,
)
from torch._dynamo.testing import CompileCounterWithBackend

from aogpt.evaluation.likelihood import token_score_entropy
from aogpt.model import ModelConfig
from aogpt.objectives import (
    Masks,
    ObjectiveConfig,
    ao_ar_loss,
    masked_nll,
    masks_at,
    masks_of_count,
    score_entropy,
)
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime.errors import UserError
from aogpt.sampling import Engine, Plan
from aogpt.scoring import group_starts, masked_log_probs, masked_logits, token_log_probs
from aogpt.systems import build_model, log_linear_noise, parameter_counts
from aogpt.training.batches import make_batch
from aogpt.training.config import Config, StageConfig

LENGTH = TINY["block_size"]


def config_of(model):
    """Return the config of a run that trains this model."""
    c = model.config
    objective = ObjectiveConfig("ao_ar")
    if c.is_encoder:
        objective = ObjectiveConfig("score_entropy" if c.noise else "k_dce")
    elif c.l2r_only:
        objective = ObjectiveConfig("ar")
    elif c.target == "two_stream":
        objective = ObjectiveConfig("groupwise", group=2)
    order = OrderConfig("l2r" if c.l2r_only else "random")
    return Config(model=c, objective=objective, order=order)


def some_masked(batch_size, length, seed):
    """Return masks of several rates. The first row masks everything, the second
    nothing, the third one position."""
    rates = torch.linspace(0.1, 0.9, batch_size)[:, None]
    masked = torch.rand(batch_size, length, generator=seeded(seed)) < rates
    masked[0] = True
    masked[1] = False
    masked[2] = torch.arange(length) == 1
    return masked


@pytest.mark.parametrize(
    "system, settings",
    [
        ("two_stream", {}),
        ("two_stream", {"start": "hidden"}),
        ("two_stream, rotary", {}),
        ("two_stream, rotary", {"start": "hidden"}),
        ("mask_query", {}),
        ("mask_query, rotary", {}),
        ("mask_query", LLAMA),
    ],
)
@pytest.mark.parametrize("group", [2, LENGTH])
@torch.no_grad()
def test_decoders_of_groups_compute_their_formulas(group, system, settings):
    """1e-9 is far above float64 rounding and far below any difference of formula."""
    model = make_system(system, seed=group, **settings)
    tokens, order = random_text(3, LENGTH, seed=1)
    starts = group_starts(order, group)
    expected = log_probs(model.config, parameters(model), tokens, order, group)
    assert (model(tokens, order, starts) + expected).abs().max() < 1e-9
    scored = token_log_probs(model, tokens, order, starts)
    assert (scored - expected).abs().max() < 1e-9
    loss = ao_ar_loss(model, tokens, order, known=starts)
    assert abs(loss + expected.mean()) < 1e-9
    assert expected.std() > 0.3


@pytest.mark.parametrize("length, seed", [(LENGTH, 0), (6, 1)])
@pytest.mark.parametrize("system", ENCODERS)
@torch.no_grad()
def test_an_encoder_computes_its_formulas(system, length, seed):
    """Odd seeds mix values with those of the first block."""
    model = make_system(system, seed, value_residual=seed % 2 == 1)
    tokens = random_tokens(TOKENS, 6, length, seed + 1)
    masked = some_masked(6, length, seed + 2)
    sigma = None
    if model.config.noise:
        sigma = -torch.log(1 - (1 - 1e-3) * masked.double().mean(dim=1))
    outputs = encoder_outputs(model.config, parameters(model), tokens, masked, sigma)
    normaliser = outputs.exp().sum(dim=-1).log()
    of_token = outputs.gather(-1, tokens[..., None]).squeeze(-1)
    expected = (of_token - normaliser) * masked
    assert expected[masked].std() > 0.3
    scored = masked_log_probs(model, tokens, masked)
    assert (scored - expected).abs().max() < 1e-9
    if model.config.noise:
        terms = torch.stack([normaliser, of_token])
        difference = (model(tokens, masked, sigma) - terms) * masked
        assert difference.abs().max() < 1e-9
    else:
        assert (model(tokens, masked) + expected).abs().max() < 1e-9


@torch.no_grad()
def test_score_entropy_of_sedd_is_its_formula_and_its_training_loss(seed=1):
    """1e-5: the noise level's cosines are those of its float32 rounding."""
    model = make_system("SEDD", seed)
    config = config_of(model)
    tokens = random_tokens(TOKENS, 8, LENGTH, seed + 1)
    batch = make_batch(tokens, config, 3, range(8))
    masks = batch.masks
    sigma = masks.sigma[:, None, None]
    outputs = encoder_outputs(
        model.config, parameters(model), tokens, masks.masked, masks.sigma
    )
    log_scores = outputs - sigma.expm1().log() - math.log(model.config.vocab_size - 1)
    ratio = 1 / sigma.squeeze(-1).expm1()
    of_token = log_scores.gather(-1, tokens[..., None]).squeeze(-1)
    constant = ratio * (ratio.log() - 1)
    entropy = log_scores.exp().sum(-1) - ratio * of_token + constant
    expected = masks.weight * (entropy * masks.masked).sum(1) / LENGTH
    got = score_entropy(model, tokens, masks, vocab=TOKENS).mean(dim=1)
    relative_error = (got - expected) / (1 + expected.abs())
    assert relative_error.abs().max() < 1e-5
    assert expected.max() > 0.1
    loss = config.objective.definition.loss(model, batch, config.objective)
    assert torch.equal(loss, got.mean())


def listed_conditionals(model, length, seed):
    """Return {(context, target): log p(token 0 at the target | context)} of every
    context and target, by `generate`."""
    keys = listed_contexts(length)
    orders = [order_through(context, target, length) for context, target in keys]
    order = torch.tensor(orders)
    known_count = torch.tensor([len(context) for context, _ in keys])[:, None]
    plan = Plan(order, (torch.arange(length) - known_count).clamp(min=-1))
    tokens = random_tokens(model.config.vocab_size - 1, 1, length, seed)
    tokens = tokens.expand_as(order)
    # always the first token
    got = Engine(model).generate(plan, tokens, forced=torch.zeros_like(order))
    values = {}
    for (context, target), row in zip(keys, got.log_probs, strict=True):
        values[context, target] = float(row[target])
    return values


def count_distinct(values, tolerance=4e-6):
    """Return the number of different values. Gaps below 4e-6 are none: float32 above
    -32 has steps of at most 2e-6."""
    values = sorted(values)
    assert values[0] > -32
    gaps = [b - a for a, b in itertools.pairwise(values)]
    return 1 + sum(gap > tolerance for gap in gaps)


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "GPT-2"])
def test_there_is_one_conditional_per_set_or_order_of_context(system):
    """Finding 5. Where rotation alone tells positions, those without any context are
    one."""
    length = 4
    seed = 0
    model = make_system(system, seed, block_size=length)
    values = listed_conditionals(model, length, seed)
    gaps = []
    for (context, target), value in values.items():
        gaps.append(abs(value - values[tuple(sorted(context)), target]))
    if system in ENCODERS:
        expected = length * 2 ** (length - 1)
        coinciding = SYSTEMS[system].get("position") == "rotary"
        assert max(gaps) < 1e-6  # float32 of logs of size 1 to 10
    else:
        expected = 0
        for k in range(length):
            contexts = math.comb(length, k) * math.factorial(k)
            expected += contexts * (length - k)
        coinciding = system in ("target rotary", "Llama")
        assert max(gaps) > 1e-2
    if coinciding:
        expected -= length - 1
    assert count_distinct(values.values()) == expected


# positions and tokens: 81 sequences, 24 orders, 15 masks
N = 4
V = 3
PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=N)))  # all masks
EPS = 1e-3


def pattern_index(masked):
    """Return the index in PATTERNS of each mask (..., N)."""
    powers = torch.tensor([2 ** (N - 1 - i) for i in range(N)])
    return (masked * powers).sum(dim=-1)


def integral(a, b, low, high):
    """Return int_low^high r^a (1-r)^b dr, in fractions."""
    total = Fraction(0)
    for j in range(b + 1):
        power = a + j + 1
        difference = Fraction(high) ** power - Fraction(low) ** power
        total += Fraction((-1) ** j * math.comb(b, j), power) * difference
    return total


def expected_estimate(kind, model, tokens):
    """Return E[masked_nll] of each sequence: 6 nodes are exact for polynomials of
    degree 3."""
    settings = []  # share, number of masked positions or time, weight of the loss
    if kind == "k_dce":
        for k in range(1, N + 1):
            settings.append((1 / N, k, N / k))
    else:
        nodes, weights = np.polynomial.legendre.leggauss(6)
        for node, weight in zip(nodes, weights, strict=True):
            time = (node + 1) / 2
            settings.append((weight / 2, time, 1 / time))
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for pattern in PATTERNS:
        m = int(pattern.sum())
        masked = pattern.expand(len(tokens), N)
        for share, at, weight in settings:
            if kind == "k_dce":
                probability = (m == at) / math.comb(N, at)
            else:
                rate = at
                if kind == "t_dce":
                    rate = (1 - EPS) * at
                probability = rate**m * (1 - rate) ** (N - m)
            weights_of_rows = torch.full((len(tokens),), weight, dtype=torch.float64)
            if probability:
                masks = Masks(masked, weights_of_rows, sigma=weights_of_rows)
                loss = masked_nll(model, tokens, masks).detach()
                total += share * probability * loss
    return total


@pytest.mark.parametrize("kind", ["lambda_dce", "k_dce", "t_dce"])
@torch.no_grad()
def test_masked_losses_agree_in_expectation_with_the_any_order_loss(kind):
    """What t_dce leaves out, int_{1-eps}^1 (1/r) E_mask[...] dr, is added in
    fractions."""
    model, conditional = enumerable_system("encoder AO-GPT", seed=0)
    tokens = all_sequences(V, N)
    expected = exact_loss(conditional, list(itertools.permutations(range(N))))
    got = expected_estimate(kind, model, tokens)
    if kind == "t_dce":
        rows = tokens.repeat_interleave(len(PATTERNS), dim=0)
        log_probs = masked_log_probs(model, rows, PATTERNS.repeat(len(tokens), 1))
        losses = -log_probs.sum(1).view(len(tokens), len(PATTERNS))
        for i, m in enumerate(PATTERNS.sum(dim=1).tolist()):
            if m:  # r^m / r: one masked position fewer
                weight = float(integral(m - 1, N - m, 1 - Fraction(EPS), 1))
                got += weight * losses[:, i] / N
    assert (got - expected).abs().max() < 1e-12
    assert expected.std() > 0.1


def drawn_masks(kind, seed, step, rows, total, length=N):
    return masks_at(ObjectiveConfig(kind), seed, step, rows, total, length)


def highest_rate(kind):
    """Return the end of the interval over which the rate of a mask is uniform."""
    if kind in ("t_dce", "score_entropy"):
        return 1 - Fraction(EPS)
    return Fraction(1)


def cell_probabilities(kind):
    """Return the probability of each quarter of the rates and each mask, (4, 16); of
    k_dce, where the number of masked positions is uniform on 1 to n, and of a number
    all sets are as frequent, that of each mask, (1, 16)."""
    sizes = PATTERNS.sum(dim=1).tolist()
    if kind == "k_dce":
        chances = [1 / (N * math.comb(N, m)) if m else 0.0 for m in sizes]
        return torch.tensor([chances], dtype=torch.float64)
    end = highest_rate(kind)
    quarters = []
    for quarter in range(4):
        lowest = end * quarter / 4
        highest = end * (quarter + 1) / 4
        quarters.append(
            [float(integral(m, N - m, lowest, highest) / end) for m in sizes]
        )
    return torch.tensor(quarters, dtype=torch.float64)


def cells_of(masks, kind):
    """Return which cell of `cell_probabilities` each mask is in."""
    cells = pattern_index(masks.masked)
    if kind == "k_dce":
        return cells
    rates = rate_of(masks, kind) / float(highest_rate(kind))
    return (rates * 4).long().clamp(0, 3) * 16 + cells


def rate_of(masks, kind):
    """Return the rate at which the positions of each row were masked, from the weight
    of the row."""
    if kind == "score_entropy":  # weight sigma'(t) = (1 - eps) / (1 - rate)
        return 1 - (1 - EPS) / masks.weight
    if kind == "t_dce":
        return (1 - EPS) / masks.weight
    return 1 / masks.weight


@pytest.mark.parametrize("seed, share", [(0, 0.0), (1, 0.5), (2, 1.0)])
@pytest.mark.parametrize("kind", ["t_dce", "k_dce", "lambda_dce", "score_entropy"])
def test_masks_have_their_distribution_and_a_share_of_them_leaves_a_prefix(
    kind, seed, share
):
    """`share` of the masks of m positions are the one of the last m."""
    masks = masks_at(
        ObjectiveConfig(kind, prefix_prob=share),
        seed,
        step=5,
        rows=range(40_000),
        total=40_000,
        length=N,
    )
    if kind == "k_dce":  # perhaps float32
        assert (masks.weight * masks.masked.sum(1) - N).abs().max() < 1e-6
    elif highest_rate(kind) < 1:  # sigma is its noise level
        assert (1 - (-masks.sigma).exp() - rate_of(masks, kind)).abs().max() < 1e-9
    plain = cell_probabilities(kind)
    suffixes = torch.zeros_like(plain)
    for m in range(N + 1):
        of_size = PATTERNS.sum(1) == m
        last = torch.arange(N) >= N - m
        is_suffix = (PATTERNS == last).all(dim=1)
        suffixes[:, is_suffix] = plain[:, of_size].sum(dim=1, keepdim=True)
    expected = ((1 - share) * plain + share * suffixes).flatten()
    counts = cells_of(masks, kind).bincount(minlength=len(expected))
    assert chi_square_p(counts, 40_000 * expected) > LEVEL


@pytest.mark.parametrize("total", [1, 7])
@pytest.mark.parametrize("kind", ["lambda_dce", "k_dce"])
def test_stratified_masks_have_their_distribution_in_every_row(kind, total):
    batches = [drawn_masks(kind, 0, step, range(total), total) for step in range(4000)]
    expected = 4000 * cell_probabilities(kind).flatten()
    for row in range(total):
        masked = torch.stack([masks.masked[row] for masks in batches])
        weight = torch.stack([masks.weight[row] for masks in batches])
        cells = cells_of(Masks(masked, weight, sigma=weight), kind)
        observed = cells.bincount(minlength=len(expected))
        assert chi_square_p(observed, expected) > LEVEL, f"row {row}"


def test_stratified_rates_and_counts_lie_one_in_each_part():
    """Of a batch of 8 one has a rate in each eighth, and two have each number of masked
    positions."""
    for step in range(50):
        masks = drawn_masks("lambda_dce", seed=1, step=step, rows=range(8), total=8)
        rates = (1 / masks.weight).double()
        eighths = (rates * 8).long().clamp(max=7)
        assert sorted(eighths.tolist()) == list(range(8))
        masks = drawn_masks("k_dce", seed=1, step=step, rows=range(8), total=8)
        counts = masks.masked.sum(dim=1)
        assert sorted(counts.tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]
        assert torch.equal(masks.weight, N / counts)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 100, 1025])
def test_counts_at_the_ends_of_the_random_numbers_are_one_and_all(n):
    """Never none, never more than there are."""
    ends = [0.0, 2.0**-64, 1 - 2.0**-53]
    row_uniforms = torch.tensor(ends, dtype=torch.float64)
    position_uniforms = torch.rand(3, n, dtype=torch.float64)
    masks = masks_of_count(row_uniforms, position_uniforms, None)
    counts = masks.masked.sum(dim=1)
    assert counts.tolist() == [1, 1, n]
    assert torch.equal(masks.weight, n / counts)


def test_the_unweighted_loss_is_a_mean_over_the_masked_tokens_of_lambda_dce():
    """Of which half are masked on average."""
    for step in range(3):
        weighted = drawn_masks("lambda_dce", seed=5, step=step, rows=range(8), total=8)
        plain = drawn_masks("masked_ce", seed=5, step=step, rows=range(8), total=8)
        assert torch.equal(weighted.masked, plain.masked)
        assert set(plain.weight.tolist()) == {2.0}


@pytest.mark.parametrize("kind", ["lambda_dce", "k_dce", "t_dce", "score_entropy"])
def test_masks_are_a_function_of_seed_step_and_row(kind):

    def drawn(rows=range(12), seed=3, step=7):
        return drawn_masks(kind, seed, step, rows, total=12, length=LENGTH)

    whole = drawn()
    for start, stop in ((0, 1), (1, 5), (4, 12)):
        part = drawn(range(start, stop))
        for name in ("masked", "weight", "sigma"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[start:stop])
    for other in (drawn(seed=4), drawn(step=8)):
        assert not torch.equal(other.masked, whole.masked)
        assert not torch.equal(other.weight, whole.weight)
    # rows differ among themselves
    assert len({tuple(row) for row in whole.masked.tolist()}) > 6


def test_draws_of_the_score_entropy_bound_have_its_integral_as_their_mean(seed=0):
    """By quadrature over time, all masks enumerated: within 4.5 standard errors of 400
    draws."""
    model = make_system("SEDD", seed, tokens=V, block_size=N, n_head=2, n_embd=8)
    tokens = random_tokens(V, 1, N, seed).expand(16, N)
    points, weights = np.polynomial.legendre.leggauss(200)
    exact = 0.0
    m = PATTERNS.sum(1)
    for t, share in zip((points + 1) / 2, weights / 2, strict=True):
        rate = (1 - EPS) * t
        times = torch.full((len(PATTERNS),), t, dtype=torch.float64)
        sigma = log_linear_noise(times)
        masks = Masks(PATTERNS, torch.full_like(sigma, (1 - EPS) / (1 - rate)), sigma)
        with torch.no_grad():
            losses = score_entropy(model, tokens, masks, V).mean(dim=1)
        probabilities = rate**m * (1 - rate) ** (N - m)
        exact += share * float((probabilities * losses).sum())
    draws = []
    for draw in range(400):
        with torch.no_grad():
            terms = token_score_entropy(model, tokens, seed, draw, range(16), 16)
        draws.append(terms)
    means = torch.stack([terms.mean() for terms in draws])
    error = means.std() / 20
    assert abs(means.mean() - exact) < 4.5 * error
    assert error < 0.05 * exact
    # Whatever rows a process has, they are drawn alike.
    with torch.no_grad():
        part = token_score_entropy(model, tokens[:3], seed, 0, range(5, 8), 16)
    assert (part - draws[0][5:8]).abs().max() < 1e-5


@torch.no_grad()
def test_without_group_attention_a_group_is_predicted_from_the_tokens_before_it():
    """As by a step that knows this number of tokens, which the next test has."""
    model = make_system(ONE_BY_ONE, 3)
    tokens, order = random_text(3, LENGTH)
    starts = group_starts(order, 4)
    got = token_log_probs(model, tokens, order, starts)
    expected = token_log_probs(model, tokens, order, known=starts)
    assert (got - expected).abs().max() < 1e-12
    gpt = make_system("AO-GPT", target="none")
    l2r = torch.arange(LENGTH).expand(3, LENGTH)
    for one_order, starts in ((l2r, group_starts(l2r, 2)), (order, None)):
        with pytest.raises(ValueError, match="plain GPT.*from left to right"):
            token_log_probs(gpt, tokens, one_order, starts)


@pytest.mark.parametrize("system", ["two_stream", "mask_query", "AO-GPT"])
@torch.no_grad()
def test_among_all_ids_groups_have_the_probabilities_that_they_have_without(system):
    """vocab_size is that of the model, float64."""
    model = make_system(system, 3)
    tokens, order = random_text(3, LENGTH)
    starts = group_starts(order, 4)
    expected = token_log_probs(model, tokens, order, starts)
    size = model.config.vocab_size
    got = token_log_probs(model, tokens, order, starts, vocab_size=size)
    assert (got - expected).abs().max() < 1e-12


@pytest.mark.parametrize("system", ["AO-GPT", "mask_query", ONE_BY_ONE, "RADD", "SEDD"])
@torch.no_grad()
def test_each_step_is_predicted_from_its_own_number_of_known_tokens(system):
    """Against that step alone, moved to where its context ends: 1e-9, float64."""
    model = make_system(system, 3)
    tokens, order = random_text(3, LENGTH)
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(0, LENGTH, order.shape, generator=generator)
    got = token_log_probs(model, tokens, order, known=sizes)
    steps = torch.arange(LENGTH)
    assert torch.equal(got == 0, sizes > steps)
    for b, i in (sizes <= steps).nonzero().tolist():
        size = sizes[b, i]
        moved = order_through(order[b, :size].tolist(), int(order[b, i]), LENGTH)
        alone = token_log_probs(model, tokens[b : b + 1], torch.tensor([moved]))[
            0, size
        ]
        assert abs(got[b, i] - alone) < 1e-9


def training_loss(model, config, step, rows):
    """Return the loss of the first rows of a batch, as train.py computes it."""
    tokens = random_tokens(TOKENS, rows, LENGTH, step)
    batch = make_batch(tokens, config, step, range(rows))
    return config.objective.definition.loss(model, batch, config.objective)


@pytest.mark.parametrize(
    "system",
    some_slow(
        [(system,) for system in SYSTEMS],
        lambda system: system in ("AO-GPT", "two_stream", "mask_query", "SEDD"),
        "each is compiled",
    ),
)
def test_the_training_forward_of_every_system_compiles_to_one_graph_once(system):
    """fullgraph=True raises on a graph break; the counter sees every graph."""
    torch._dynamo.reset()
    model = make_system(system, dtype=torch.float32, n_layer=1).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    config = config_of(model)
    for step in range(2):
        results = []
        for forward in (compiled, model):
            model.zero_grad()
            loss = training_loss(forward, config, step, 4)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def dead_by_design(system, name, p):
    """Return a mask of the elements of a parameter that cannot learn."""
    dead = torch.zeros_like(p, dtype=torch.bool)
    if system in ENCODERS and name in ("head.weight", "head.bias"):
        dead[TOKENS] = True  # [MASK] is never predicted
    if system in ("GPT-2", "sigma-GPT") and name.endswith("qkv.bias"):
        # Without QK-norm the bias of the keys moves all scores of a query alike.
        dead[TINY["n_embd"] : 2 * TINY["n_embd"]] = True
    if system == "GPT-2" and name == "wpe.weight":
        dead[-1] = True  # left to right, the last token is never an input
    return dead


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_element_of_every_parameter_learns(system):
    """Gradients of what learns are above 1e-8, float64 rounding of a zero is 1e-16."""
    model = make_system(system, seed=2)
    training_loss(model, config_of(model), 1, 64).backward()
    for name, p in model.named_parameters():
        dead = p.grad.abs() < 1e-12
        expected = dead_by_design(system, name, p)
        if name == "wte.weight" and system in DECODERS and not model.config.tied_head:
            # the decoders here know one id that the data does not use
            expected[TOKENS] = True
        assert torch.equal(dead, expected), f"{name}: {int(dead.sum())} dead elements"


@pytest.mark.parametrize("system", SYSTEMS)
def test_parameter_counts_of_every_system_sum_to_the_total(system):
    model = make_system(system)
    counts = parameter_counts(model)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    D = TINY["n_embd"]
    L = TINY["n_layer"]
    adaln = 6 * L * D * 6 + 6 * 2 * D  # 5 inputs and a bias for every output
    conditioning = {
        "sigma-GPT": LENGTH * D,
        "AO-GPT": LENGTH * 5 + adaln,
        "AO-GPT, rotary": LENGTH * 5 + adaln,
        "shared": LENGTH * D,
        "per_block": L * LENGTH * D,
        "two_stream": D,
        "mask_query": D,
        "SEDD": 257 * 5 + 6 * 5 + adaln,
    }
    assert counts["conditioning"] == conditioning.get(system, 0)
    has_start = system in DECODERS and system != "mask_query"  # [None]
    positions = {"learned": LENGTH + has_start, "rotary": 0}[model.config.position]
    assert counts["embeddings"] == D * (TINY["vocab_size"] + positions + has_start)


CURRICULUM = Config(
    model=ModelConfig(
        TOKENS + 1, LENGTH, n_layer=1, n_head=2, n_embd=8, target="two_stream"
    ),
    objective=ObjectiveConfig("groupwise", group=3),
    order=OrderConfig("random", seed=7),
    schedule=(
        StageConfig(step=10, kind="l2r", l2r_prob=0.1, group=1),
        StageConfig(step=20, kind="l2r", l2r_prob=0.1, group=2),
        StageConfig(step=35, kind="mixture", l2r_prob=0.25, group=4),
    ),
)


L2R_STAGE = OrderConfig("l2r", 0.1, seed=7)


@pytest.mark.parametrize(
    "order, group, steps",
    [
        (OrderConfig("random", seed=7), 3, (0, 9)),
        (L2R_STAGE, 1, (10, 19)),
        (L2R_STAGE, 2, (20, 34)),
        (OrderConfig("mixture", 0.25, seed=7), 4, (35, 36, 10**9)),
    ],
)
def test_training_uses_the_orders_and_groups_of_each_stage_until_the_next(
    order, group, steps
):
    model = randomise(build_model(CURRICULUM.model).double(), 0)
    for step in steps:
        tokens = random_tokens(TOKENS, 6, LENGTH, step)
        orders = orders_at(order, CURRICULUM.seed, step, range(6), LENGTH)
        starts = group_starts(orders, group)
        expected = ao_ar_loss(model, tokens, orders, known=starts)
        assert torch.equal(training_loss(model, CURRICULUM, step, 6), expected)


def test_orders_and_groups_that_do_not_fit_are_a_user_error():
    model = make_system("AO-GPT", 0)
    tokens = torch.tensor([[0, 1, 2]])
    masked = torch.tensor([[True, False, False]])
    with pytest.raises(UserError, match="permutation"):
        masked_logits(model, tokens, masked, order=torch.tensor([[0, 0, 2]]))
    with pytest.raises(UserError, match="masked positions after the others"):
        masked_logits(model, tokens, masked, order=torch.tensor([[0, 1, 2]]))
