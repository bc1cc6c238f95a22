"""Tokens are drawn from the distribution that temperature, top-k and nucleus define, on
every path alike."""

import itertools
import math

import pytest
import torch
from reference import accept, seeded, tempered, truncated

from aogpt.sampling import token_choice
from aogpt.sampling.simple import nucleus
from aogpt.sampling.token_choice import (
    RACES,
    TokenChoice,
    choose_tokens,
    draw,
    fresh_uniforms,
    probabilities,
)

GRID = 2**13
JUST_BELOW_ONE = torch.tensor(1 - 2.0**-53, dtype=torch.float64)

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
    TokenChoice(temperature=1e-5),
    TokenChoice(temperature=3.0),
    TokenChoice(top_p=1e-9),
    TokenChoice(top_p=0.5),
    TokenChoice(top_p=0.9),
    TokenChoice(top_p=1.0 - 1e-12),
    TokenChoice(top_k=3),
    TokenChoice(top_k=100),
    TokenChoice(top_k=3, top_p=0.6),
    TokenChoice(temperature=0.7, top_p=0.85, top_k=5),
]


def even_uniforms(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def random_uniforms(n, seed):
    return torch.rand(n, generator=seeded(seed), dtype=torch.float64)


def defined(logits, choice):
    """Return the distribution (V,) of a choice from a list of logits, by definition, in
    plain Python."""
    tempered_probs = tempered(logits, choice.temperature)
    probs = truncated(tempered_probs, choice)
    return torch.tensor(probs, dtype=torch.float64)


@pytest.fixture(params=["CPU", "device"])
def path(request, monkeypatch):
    """Both ways to draw from a nucleus: row by row, and all rows by bisection
    (GPUs)."""
    monkeypatch.setattr(token_choice, "_may_branch", lambda x: request.param == "CPU")
    return request.param


@pytest.mark.parametrize(
    "shape, choice",
    [
        *itertools.product(("random", "ties", "flat"), CHOICES),
        *itertools.product(SHAPES, CHOICES[-2:]),
    ],
)
def test_tokens_are_drawn_from_the_truncated_distribution(shape, choice, path):
    """Allowed are 4.5 standard deviations, on a grid of uniforms, too. Of the flat
    shape, top_p = 0.5 are exactly the four lowest ids."""
    logits = torch.tensor(SHAPES[shape])
    expected = defined(SHAPES[shape], choice)
    rows = logits.expand(GRID, -1)
    drawn = choose_tokens(rows, even_uniforms(GRID), choice)
    shares = drawn.bincount(minlength=len(logits)) / GRID
    variance = (expected * (1 - expected) / GRID).clamp(min=0)
    allowed = 2.001 / GRID + 4.5 * variance.sqrt()
    assert ((shares - expected).abs() <= allowed).all()
    assert not shares[expected == 0].any()
    (got,) = probabilities(logits[None], choice)
    assert got.dtype == torch.float64
    assert abs(float(got.sum()) - 1) < 1e-12
    assert (((got > 0) == (expected > 0)) | (got < 1e-12)).all()
    assert (got - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "choice",
    [
        TokenChoice(0),
        TokenChoice(1e-300),
        TokenChoice(top_p=0),
        TokenChoice(temperature=0.5, top_p=0, top_k=3),
        TokenChoice(top_k=1),
    ],
)
def test_greedy_choices_take_the_first_of_the_most_probable_whatever_the_uniform(
    choice, path
):
    # ten ties or so in every row
    logits = torch.randint(5, (30, 50), generator=seeded(0)).float()
    first = [row.index(max(row)) for row in logits.tolist()]
    for u in (0.0, 0.5, float(JUST_BELOW_ONE)):
        drawn = choose_tokens(logits, torch.full((30,), u, dtype=torch.float64), choice)
        assert drawn.tolist() == first
    assert choice.greedy
    assert probabilities(logits, choice).nonzero()[:, 1].tolist() == first


@pytest.mark.parametrize(
    "choice", [TokenChoice(), TokenChoice(top_p=0.9), TokenChoice(top_k=4)], ids=str
)
@pytest.mark.parametrize("vocab", [6, 50_304])
def test_a_token_of_probability_zero_is_never_drawn(vocab, choice, path):
    logits = torch.randn(16, vocab, generator=seeded(0))
    impossible = torch.rand(16, vocab, generator=seeded(1)) < 0.5
    impossible[:, 0] = True
    impossible[:, -1] = True
    impossible[:, 1] = False
    logits = logits.masked_fill(impossible, -math.inf)
    logits[::2, 0] = -1e5  # not minus infinity, but its probability underflows to 0
    for u in (torch.tensor(0.0, dtype=torch.float64), JUST_BELOW_ONE):
        drawn = choose_tokens(logits, u.expand(16), choice)
        assert not impossible.gather(1, drawn[:, None]).any()


def test_no_probability_mass_is_lost_below_float32():
    """Noise of 24 bits could never draw a token of probability 2^-30. Among many
    numbers are those with which it is drawn: about the expected number have a first
    exponential below 2^-20, and the weight decides between two of them that noise of 24
    bits would not tell apart."""
    uniforms = random_uniforms(2**23, 0)
    early = 1 - fresh_uniforms(uniforms, RACES)  # E = -log of the rest, about this
    uniforms = uniforms[early < 2.0**-20]
    assert 1 <= len(uniforms) <= 24  # 8 are expected
    first = -fresh_uniforms(uniforms, RACES).log()
    second = -fresh_uniforms(uniforms, RACES + 1).log()
    for factor, token in ((1.001, 0), (0.999, 1)):
        weights = torch.stack([factor * first, second], dim=1)
        assert (draw(weights, uniforms) == token).all()


def nucleus_by_sorting(probs, top_p):
    """Return BoolTensor (N, V): the tokens before which less than top_p of the mass is
    reached."""
    probs = probs.double()
    ranked, place = probs.sort(dim=1, descending=True, stable=True)
    mass_before = ranked.cumsum(dim=1) - ranked
    mass = probs.cumsum(dim=1)[:, -1:]
    in_nucleus = (mass_before < top_p * mass) & (ranked > 0)
    in_nucleus[:, 0] = True
    return torch.empty_like(in_nucleus).scatter_(1, place, in_nucleus)


def normal(vocab, seed):
    return torch.randn(vocab, generator=seeded(seed))


DISTRIBUTIONS = {
    "random": lambda vocab, seed: 2 * normal(vocab, seed),
    "peaked": lambda vocab, seed: 6 * normal(vocab, seed),
    # few distinct values, so that the boundary runs through hundreds of equal tokens
    "ties": lambda vocab, seed: (
        torch.randint(4, (vocab,), generator=seeded(seed)) * 0.5
    ),
    "bfloat16": lambda vocab, seed: (2 * normal(vocab, seed)).bfloat16().float(),
    # probabilities down to below the least float32 number, where they are 0
    "underflow": lambda vocab, seed: 40 * normal(vocab, seed),
    "flat": lambda vocab, seed: torch.full((vocab,), 0.3 * seed),
    "one-hot": lambda vocab, seed: (torch.arange(vocab) == seed).log() + 2,
}
# No multiple of 1/10, 1/257 or 1/50304, where a flat nucleus would hang on the last
# bit.
TOP_P = [1e-12, 0.0123, 0.31, 0.505, 0.777, 0.9137, 0.995, 1 - 1e-9]


@pytest.mark.parametrize(
    "name, vocab, dtype",
    [
        *itertools.product(DISTRIBUTIONS, [257], [torch.float32, torch.float64]),
        ("ties", 50_304, torch.float32),
    ],
)
def test_the_nucleus_is_the_sorted_one_and_both_paths_draw_the_same_tokens_of_it(
    name, vocab, dtype, monkeypatch
):
    count = 4 if vocab > 1000 else 60
    rows = [DISTRIBUTIONS[name](vocab, seed % 9) for seed in range(count)]
    logits = torch.stack(rows).to(dtype)
    probs = (logits - logits.amax(dim=-1, keepdim=True)).softmax(dim=-1)
    uniforms = random_uniforms(count, 1)
    uniforms[0] = 0.0
    uniforms[1] = JUST_BELOW_ONE
    for top_p in TOP_P:
        choice = TokenChoice(top_p=top_p)
        in_nucleus = nucleus_by_sorting(probs, top_p)
        got = probabilities(logits, choice)
        assert torch.equal(got > 0, in_nucleus)
        expected = probs.double() * in_nucleus
        expected = expected / expected.sum(dim=1, keepdim=True)
        assert (got - expected).abs().max() < 1e-12
        by_row = choose_tokens(logits, uniforms, choice)
        with monkeypatch.context() as patch:
            patch.setattr(token_choice, "_may_branch", lambda x: False)
            by_bisection = choose_tokens(logits, uniforms, choice)
        assert torch.equal(by_row, by_bisection)
        assert in_nucleus.gather(1, by_row[:, None]).all()


UNIFORM = torch.full((100,), 0.01, dtype=torch.float64)  # over 100 cells


@pytest.mark.parametrize("salt", [1, 50_303])
@pytest.mark.parametrize("kind", ["random", "grid", "small"])
def test_fresh_uniforms_are_uniform_and_independent_of_the_old_ones(kind, salt):
    """10 x 10 cells of both, of the new with the last digits of the old, and of two
    salts."""
    n = 50_000
    old = random_uniforms(n, salt)
    if kind == "grid":
        old = even_uniforms(n)
    elif kind == "small":
        old = old * 2.0**-30
    new = fresh_uniforms(old, salt)
    assert accept((new * 100).long().bincount(minlength=100), UNIFORM)
    scaled = old / old.max() * (1 - 1e-9)
    last_digits = (scaled * 5000) % 1
    for part in (scaled, last_digits):
        row = (part * 10).long()
        column = (new * 10).long()
        observed = (row * 10 + column).bincount(minlength=100)
        of_old = row.bincount(minlength=10).double() / n
        of_new = column.bincount(minlength=10).double() / n
        assert accept(observed, torch.outer(of_old, of_new).flatten())
    several = fresh_uniforms(old[:, None], torch.tensor([salt, salt + 1]))
    assert torch.equal(several[:, 0], new)  # a pure function that broadcasts
    cells = (several * 10).long() @ torch.tensor([10, 1])
    assert accept(cells.bincount(minlength=100), UNIFORM)


@pytest.mark.parametrize("vocab", [63, 200, 5000])
def test_a_draw_races_blocks_and_then_ids_and_pads_what_is_no_multiple(vocab):
    """Every id as often as its weight says."""
    weights = torch.rand(vocab, generator=seeded(0), dtype=torch.float64) ** 8
    parts = []
    for seed in range(10):
        uniforms = random_uniforms(2000, seed)
        parts.append(draw(weights.expand(2000, -1), uniforms))
    drawn = torch.cat(parts)
    assert accept(drawn.bincount(minlength=vocab), weights / weights.sum())


def test_rounding_of_the_logits_moves_no_token():
    """Logits of 50,304 ids are perturbed a hundred times as much as float32 rounds; an
    inverse CDF in id order moves one token in 20."""
    noise = seeded(1)
    logits = 2.5 * torch.randn(200, 50_304, generator=noise)
    uniforms = torch.rand(200, generator=noise, dtype=torch.float64)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=noise)
    one = choose_tokens(logits, uniforms, TokenChoice())
    other = choose_tokens(rounded, uniforms, TokenChoice())
    assert int((one != other).sum()) <= 1


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_impossible_token_choices_are_refused_by_name(settings, word):
    with pytest.raises(ValueError, match=word):
        TokenChoice(**settings)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_the_nucleus_of_the_simple_sampler_is_the_samplers(top_p):
    logits = torch.randn(40, 256, generator=seeded(1), dtype=torch.float64) * 3
    logits[0] = 0.0  # where all are equal, lower ids come first
    truncated_probs = nucleus(logits.softmax(dim=-1), top_p)
    expected = probabilities(logits, TokenChoice(top_p=top_p))
    torch.testing.assert_close(
        truncated_probs / truncated_probs.sum(dim=-1, keepdim=True), expected
    )
