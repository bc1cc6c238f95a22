"""Decoding draws from the distribution it claims, in every mode, through a cache that
changes nothing."""

import copy
import dataclasses
import functools
import itertools
import math
from functools import partial
from unittest import mock

import pytest
import reference
import torch
from helpers import NoHostReads
from reference import (
    DECODERS,
    ENCODERS,
    ONE_BY_ONE,
    PACED,
    ROTARY_GPT,
    accept,
    all_sequences,
    enumerable_system,
    generate,
    make_plan,
    make_system,
    modes,
    random_tokens,
    sampled_counts,
    seeded,
    some_given,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from aogpt.evaluation.likelihood import decoding_nll, importance_weighted
from aogpt.orders import Roles
from aogpt.runtime.errors import UserError
from aogpt.sampling import (
    Engine,
    Samples,
    TokenChoice,
    batch,
    cached,
    compiled,
    group_sizes,
    order_plan,
    simple_generate,
    speculative_plan,
    token_choice,
)
from aogpt.sampling.batch import Batch
from aogpt.sampling.plans import score_plan
from aogpt.sampling.scores import best_first
from aogpt.scoring import token_log_probs

# positions and tokens of the enumerable models: 81 sequences
N = 4
V = 3
SAMPLES = 4000


FIXED = modes("""
    l2r, l2r:group=3, random, random:group=2, mdm:steps=1,
    mdm:steps=3, even:steps=2, mdm:steps=3,schedule=cosine,
    even:steps=3,schedule=cosine
""")
SPECULATIVE = modes("""
    speculative:order=l2r,draft=3, speculative:draft=2
""")
GPTS = ("GPT-2", ROTARY_GPT)
OF_EACH_KIND = modes("""
    l2r:group=3, random, mdm:steps=3,schedule=cosine, even:steps=2,
    confidence, entropy:group=3, confidence:threshold=0.45,block=3,
    speculative:draft=2
""")

enumerated = functools.cache(enumerable_system)


@functools.cache
def expected_distribution(mode, system, seed, choice=None, prompt=()):
    """Return the joint of a mode of `make_plan`; prompt: pairs of position and
    token."""
    conditional = enumerated(system, seed)[1]
    if choice is not None:
        conditional = reference.with_choice(conditional, choice, V, N)
    return reference.distribution_of(mode, conditional, V, N, dict(prompt))


# Modes whose distributions the chi-square test tells apart, so that acceptance means
# something.
OTHERS = {
    "mdm:steps=1": "mdm:steps=2, mdm:steps=5, even:steps=2, l2r",
    "mdm:steps=2,schedule=cosine": "mdm:steps=2, even:steps=2,schedule=cosine",
    "even:steps=3,schedule=cosine": "even:steps=3, mdm:steps=4,schedule=cosine",
    "confidence": "entropy, confidence:group=2, random",
    "entropy:group=2": "confidence:group=2, entropy, random:group=2",
    "speculative:order=l2r,draft=4": "l2r:group=2, random",
    "speculative:draft=3": "random:group=3, l2r",
}


# In one system each kind of mode, in the others those in which they take a way of their
# own.
SEEDS = {"AO-GPT": 1, "two_stream": 3, "mask_query": 3, "target rotary": 1}  # else 2
ENUMERATED = {
    "AO-GPT": modes("""
    l2r, l2r:group=3, random:group=2, random,
    mdm:steps=1, mdm:steps=5, mdm:steps=2,schedule=cosine, even:steps=3,
    even:steps=3,schedule=cosine, confidence, entropy:group=2,
    margin:group=3, speculative:order=l2r,draft=4, speculative:draft=3,
    confidence:threshold=0.45, confidence:threshold=0.4,entropy_bound=1.0,
    entropy:block=3,group=2
"""),
    "two_stream": modes("""
    random:group=2, mdm:steps=3,schedule=cosine, speculative:draft=4,
    confidence:threshold=0.45,block=3
"""),
    ONE_BY_ONE: ["random:group=2"],
    "mask_query": modes("""
    random:group=2, entropy, speculative:draft=4,
    confidence:threshold=0.45,block=3
"""),
    "target rotary": modes("""
    random, confidence:group=2, mdm:steps=3,
    speculative:order=l2r,draft=2
"""),
    "RADD": modes("l2r, mdm:steps=3, confidence:group=2"),
    "SEDD": modes("""
    even:steps=2, random:group=3, entropy:group=2
"""),
    "encoder AO-GPT": modes("""
    mdm:steps=3, confidence, confidence:threshold=0.45,block=3
"""),
}


def of_systems(table):
    """Return the parameters of a test of some modes of systems: {system: modes}."""
    pairs = [(system, mode) for system in table for mode in table[system]]
    return pytest.mark.parametrize("system, mode", pairs)


@of_systems(ENUMERATED)
def test_samples_match_enumeration(system, mode):
    seed = SEEDS.get(system, 2)
    model, _ = enumerated(system, seed)
    rejected = modes(OTHERS[mode]) if system == "AO-GPT" and mode in OTHERS else []
    number = 7000 if rejected else SAMPLES
    plan = make_plan(mode, number, N, seed=seed + 10)
    counts = sampled_counts(model, plan, seed + 20)
    assert accept(counts, expected_distribution(mode, system, seed))
    for other in rejected:
        expected = number * expected_distribution(other, system, seed)
        assert reference.chi_square_p(counts, expected) < 1e-6, other


INFILLED = {
    "AO-GPT": modes("""
    random:group=2, mdm:steps=3, even:steps=2,schedule=cosine, confidence,
    entropy:entropy_bound=0.95, confidence:block=2, speculative:draft=2
"""),
    "two_stream": ["mdm:steps=3"],
    "mask_query": ["entropy:group=2", "speculative:order=l2r,draft=3"],
    "target rotary": ["confidence", "speculative:order=l2r,draft=3"],
    "RADD": ["entropy"],
    "SEDD": ["even:steps=2"],
}


@of_systems(INFILLED)
def test_infilling_matches_enumeration(system, mode):
    """Over the sequences that begin and end as given."""
    seed = SEEDS.get(system, 2)
    prompt = {0: 1, 3: 0}
    given, tokens = reference.prompt_rows(prompt, SAMPLES, N)
    plan = make_plan(mode, SAMPLES, N, given, seed=4)
    counts = sampled_counts(enumerated(system, seed)[0], plan, 5, tokens)
    assert accept(
        counts, expected_distribution(mode, system, seed, prompt=tuple(prompt.items()))
    )


@pytest.mark.parametrize(
    "choice",
    [
        TokenChoice(0.6, top_p=0.75),
        TokenChoice(temperature=1.3, top_p=0.9, top_k=2),
        TokenChoice(0),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["mdm:steps=3", "speculative:draft=3"])
def test_truncated_sampling_matches_enumeration(mode, choice):
    plan = make_plan(mode, SAMPLES, N, seed=11)
    counts = sampled_counts(enumerated("AO-GPT", 1)[0], plan, 21, choice=choice)
    assert accept(counts, expected_distribution(mode, "AO-GPT", 1, choice))


RAGGED = {
    "AO-GPT": modes("l2r, random:group=2, entropy:group=2, speculative:draft=2"),
    "two_stream": ["random:group=2"],
    "mask_query": ["random:group=2"],
    "target rotary": ["speculative:draft=2"],
    "RADD": ["mdm:steps=2"],
    "SEDD": ["mdm:steps=2"],
}


@of_systems(RAGGED)
def test_rows_of_different_lengths_follow_the_distribution_of_their_own_length(
    system, mode
):
    """Lengths 4, 2, 3 and 0 in one batch, 1500 rows each."""
    model, _ = enumerated(system, 2)
    lengths = torch.tensor([4, 2, 3, 0]).repeat(1500)
    got = generate(
        model, make_plan(mode, len(lengths), lengths, seed=3), generator=seeded(4)
    )
    assert torch.equal(got.length, lengths)
    past = torch.arange(N) >= lengths[:, None]
    assert not got.tokens[past].any()
    assert not got.log_probs[past].any()
    assert (got.step[past] == -1).all()
    enumerate_them = reference.conditionals
    if system in ENCODERS:
        enumerate_them = reference.encoder_conditionals
    for length in (2, 3, 4):
        conditional = enumerate_them(model, V, length)
        expected = reference.distribution_of(mode, conditional, V, length)
        counts = reference.sequence_counts(got.tokens[lengths == length, :length], V)
        assert accept(counts, expected)


RULES = (
    modes("""
    confidence, entropy, margin, confidence:group=2, l2r,
    random:group=3
""")
    + PACED
)


@pytest.mark.parametrize(
    "system, seed, mode",
    [("AO-GPT", 1, mode) for mode in RULES]
    + [
        (s, 2, mode)
        for s in ("two_stream", "mask_query", *ENCODERS)
        for mode in ("margin", "confidence:threshold=0.45,block=3")
    ]
    + [("target rotary", 2, mode) for mode in ("l2r", "random:group=3")],
)
def test_forced_texts_have_the_probabilities_that_decoding_draws_them_with(
    system, seed, mode
):
    """All 81. Equals are taken in the order of the plan, here the same one for all."""
    model = enumerated(system, seed)[0]
    sequences = all_sequences(V, N)
    plan = make_plan(mode, len(sequences), N, seed=3)
    plan = dataclasses.replace(plan, order=plan.order[:1].expand(len(sequences), -1))
    got = generate(model, plan, forced=sequences)
    p = got.log_probs.double().sum(dim=1).exp()
    assert torch.equal(got.tokens, sequences)
    assert abs(p.sum().item() - 1) < 1e-6
    if not mode.startswith("random") and system not in ("RADD", "SEDD"):
        expected = expected_distribution(mode, system, seed)
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-8)


OWN_ORDERS = {  # how many positions a step predicts
    "one": score_plan,
    "two": partial(score_plan, group=2),
    "two of a block": partial(score_plan, group=2, block=3),
    "threshold": partial(score_plan, threshold=0.4),
    "entropy bound in a block": partial(
        score_plan, entropy_bound=1.0, group=3, block=2
    ),
}
OF_OWN_ORDERS = [
    "AO-GPT",
    "two_stream",
    "mask_query",
    "target rotary",
    "encoder AO-GPT",
]
SCORES = ["confidence", "entropy", "margin"]


@pytest.mark.parametrize("steps", OWN_ORDERS)
@pytest.mark.parametrize("system", OF_OWN_ORDERS)
def test_likelihoods_in_the_models_own_order_sum_to_one(system, steps):
    """Also where a token of each record is given: then for each value of it."""
    score = SCORES[(OF_OWN_ORDERS.index(system) + len(steps)) % 3]
    model = enumerated(system, 5)[0]
    sequences = all_sequences(V, N)
    mode = partial(OWN_ORDERS[steps], by=score)
    nll = decoding_nll(model, sequences, mode)
    assert abs(nll.values.sum(dim=1).neg().exp().sum().item() - 1) < 1e-6
    roles = Roles.of(torch.tensor([0, 1, 0, 0]).expand(len(sequences), N))
    nll = decoding_nll(model, sequences, mode, roles)
    assert torch.equal(nll.scored, roles.predicted)
    for token in range(V):
        p = nll.values.sum(dim=1)[sequences[:, 1] == token].neg().exp()
        assert abs(p.sum().item() - 1) < 1e-6


@pytest.mark.parametrize("system", ["AO-GPT", "target rotary", "encoder AO-GPT"])
@pytest.mark.parametrize("group", [1, 2])
def test_the_oracle_order_is_greedy_on_the_truth_and_no_likelihood(system, group):
    """All 81, by enumeration; equals are taken from left to right."""
    model, table = enumerated(system, 5)
    sequences = all_sequences(V, N)
    expected = torch.empty(len(sequences), N, dtype=torch.float64)
    for i in range(len(sequences)):
        context = ()
        while left := [p for p in range(N) if p not in context]:
            p = {target: float(table[context, target][i]) for target in left}
            now = sorted(left, key=lambda target: -p[target])[:group]  # noqa: B023
            for target in now:
                expected[i, target] = -math.log(p[target])
            context += tuple(now)
    mode = partial(score_plan, by="oracle", group=group)
    nll = decoding_nll(model, sequences, mode)
    torch.testing.assert_close(nll.values, expected, rtol=1e-5, atol=1e-6)
    assert abs(nll.values.sum(dim=1).neg().exp().sum().item() - 1) > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_the_weighted_bound_falls_with_its_orders_to_the_mean_of_the_probabilities(
    seed,
):
    """Over all K-tuples of the 6 orders of 3 positions, for all sequences."""
    model = enumerable_system("AO-GPT", seed, length=3)[0]
    sequences = all_sequences(V, 3)
    orders = torch.tensor(list(itertools.permutations(range(3))))
    log_p = [
        token_log_probs(model, sequences, order.expand_as(sequences))
        for order in orders
    ]
    nll = torch.stack([-p.double().sum(1) for p in log_p], dim=1)
    scored = torch.full((len(sequences),), 3.0, dtype=torch.float64)
    means = []
    for k in (1, 2, 3):
        tuples = itertools.product(range(6), repeat=k)
        bounds = [importance_weighted(nll[:, list(t)] / 3, scored).nll for t in tuples]
        means.append(sum(bounds) / len(bounds))
    limit = (math.log(6) - (-nll).logsumexp(dim=1)).mean().item() / 3
    assert means[0] == pytest.approx(nll.mean().item() / 3, abs=1e-12)
    assert means[0] > means[1] > means[2] > limit
    assert importance_weighted(nll / 3, scored).nll == pytest.approx(limit, abs=1e-12)


LENGTH = 12
TOKENS = 17
LENGTHS = torch.tensor([12, 5, 0, 12, 1, 9, 12])


@functools.cache
def text_model(system="AO-GPT", dtype=torch.float32, seed=0):
    model = make_system(
        system, seed, dtype, 0.7, TOKENS, block_size=16, n_head=2, n_embd=24, cond_dim=6
    )
    # token vectors of size 1 would leave every prediction certain
    if model.config.tied_head:
        with torch.no_grad():
            for p in model.norm_f.parameters():
                p *= 0.2
    return model


def uniforms_for(rows, length=LENGTH, seed=0):
    return torch.rand(rows, length, generator=seeded(seed), dtype=torch.float64)


def given_for(system, rows, seed):
    """Return some given positions, BoolTensor (rows, LENGTH): of a plain GPT those at
    the beginning."""
    given = some_given(rows, LENGTH, seed=seed)
    if system not in GPTS:
        return given
    counts = given.sum(dim=1, keepdim=True)
    return torch.arange(LENGTH) < counts


# One system has all kinds of modes, the others those in which they have code of their
# own.
LOG_PROBS = {
    "mask_query": OF_EACH_KIND,
    # Candidates at all free positions are predicted for their targets.
    "sigma-GPT": ["confidence:group=2"],
    "AO-GPT": ["confidence:group=2"],
    "AO-GPT, rotary": ["confidence:group=2"],
    "shared": ["confidence:group=2"],
    "per_block": ["confidence:group=2"],
    "per_block, both": ["confidence:group=2"],
    # Tokens of a group see each other, or are predicted one by one.
    "two_stream": ["even:steps=2"],
    ONE_BY_ONE: ["even:steps=2"],
    # Relative positions: drafts are verified at targets that rotate the queries.
    "target rotary": SPECULATIVE,
    "Llama": SPECULATIVE,
    "mask_query, rotary": ["speculative:draft=2"],
    "GPT-2": ["l2r"],
    ROTARY_GPT: ["l2r"],
    # No cache; that of SEDD is conditioned on the share of masks.
    "RADD": ["random", "confidence:threshold=0.45,block=3"],
    "SEDD": ["mdm:steps=3,schedule=cosine", "margin:group=2"],
    "encoder AO-GPT": ["l2r", "entropy:group=3"],
}
ALONE = {
    "AO-GPT": OF_EACH_KIND,
    "two_stream": ["random:group=2"],  # tokens of a group see each other
    "mask_query": ["confidence:group=2"],  # candidates are inputs of their own
    "GPT-2": ["l2r"],
    "SEDD": ["even:steps=3,schedule=cosine"],  # the share of masks is an input
    "encoder AO-GPT": ["entropy"],  # every step reads the whole row
}


@of_systems(LOG_PROBS)
def test_generated_log_probs_are_those_of_the_uncached_model(system, mode):
    """Before temperature and truncation, in the order and the steps that were taken."""
    model = text_model(system)
    given = given_for(system, 7, seed=7)
    given[2:4] = False
    # relative: without any token given, no position is preferred to another
    if system in ("RADD", "SEDD", "target rotary", "Llama", "mask_query, rotary"):
        given[:, 0] = True
    plan = make_plan(mode, 7, LENGTHS, given, seed=8)
    tokens = random_tokens(TOKENS, 7, LENGTH, seed=9)
    got = generate(
        model,
        plan,
        tokens,
        generator=seeded(10),
        choice=TokenChoice(temperature=0.8, top_p=0.9, top_k=12),
    )
    assert torch.equal(got.tokens[plan.given], tokens[plan.given])
    for b, length in enumerate(LENGTHS.tolist()):
        if length:
            order = got.order[b, :length]
            steps = got.step[b][order]
            if mode in FIXED:
                assert torch.equal(order, plan.order[b, :length])
                assert torch.equal(steps, plan.step[b, :length])
            expected = reference.log_probs_of_steps(
                model, got.tokens[b, :length], order, steps, bool(plan.draft)
            )
            assert (got.log_probs[b][order] - expected).abs().max() < 1e-5
    exists = torch.arange(LENGTH) < LENGTHS[:, None]
    free = exists & ~given
    assert (got.log_probs[free] < 0).all()
    assert (got.log_probs[~free] == 0).all()


SIMPLE_MODES = modes("l2r, l2r:group=3, random:group=2, mdm:steps=4")


@pytest.mark.parametrize(
    "system, mode",
    [
        (system, mode)
        for system in [*DECODERS, ONE_BY_ONE]
        for mode in SIMPLE_MODES
        if system not in GPTS or mode == "l2r"
    ],
)
def test_the_simple_sampler_is_the_engine(system, mode):
    """Tokens and log-probabilities, some tokens given; float64. Padded ids above the
    vocabulary have no share."""
    vocab_size = TOKENS - 2
    model = text_model(system, torch.float64)
    given = given_for(system, 4, seed=3)
    plan = make_plan(mode, 4, LENGTH, given, seed=2)
    tokens = random_tokens(TOKENS, batch_size=4, length=LENGTH, seed=1)
    uniforms = uniforms_for(4)
    got = generate(model, plan, tokens, uniforms=uniforms, vocab_size=vocab_size)
    for b, sizes in enumerate(group_sizes(plan).tolist()):
        ours, log_probs = simple_generate(
            model,
            plan.order[b],
            [n for n in sizes if n],
            uniforms[b],
            tokens[b],
            vocab_size=vocab_size,
        )
        assert torch.equal(ours, got.tokens[b])
        assert (log_probs - got.log_probs[b]).abs().max() < 1e-5  # kept in float32


def assert_same_samples(got, expected):
    """Tokens, steps and log-probabilities, which are stored as float32, in steps of up
    to 1e-6."""
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.step, expected.step)
    assert (got.log_probs - expected.log_probs).abs().max() < 1e-5


@of_systems(ALONE)
def test_a_sample_depends_on_its_own_row_and_not_on_the_batch(system, mode):
    """Float64, so that no rounding tips a token. What stands at free positions is
    ignored; tokens that may not be drawn may be given."""
    model = text_model(system, torch.float64)
    given = given_for(system, 7, seed=3)
    given[2] = False
    tokens = random_tokens(TOKENS, 7, LENGTH, seed=4)
    plan = make_plan(mode, 7, LENGTHS, given)
    uniforms = uniforms_for(7, seed=5)
    choice = TokenChoice(0.9, 0.9)

    def draw(inputs, uniforms=uniforms, **settings):
        return generate(
            model, plan, inputs, uniforms=uniforms, choice=choice, **settings
        )

    before = tokens.clone()
    global_state = torch.get_rng_state()
    few = draw(tokens, vocab_size=5)
    assert torch.equal(tokens, before)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert (few.tokens[~given] < 5).all()
    other_inputs = tokens.where(given, (tokens + 1) % TOKENS)
    assert torch.equal(draw(other_inputs, vocab_size=5).tokens, few.tokens)

    whole = draw(tokens)
    for size in (1, 3, 100):
        parts = draw(tokens, batch_size=size)
        assert_same_samples(parts, whole)
        assert parts.token_forwards == whole.token_forwards
        assert torch.equal(parts.length, LENGTHS)

    changed = uniforms.clone()
    changed[3] = (changed[3] + 0.5) % 1
    same = (draw(tokens, uniforms=changed).tokens == whole.tokens).all(dim=1)
    assert same.tolist() == [b != 3 for b in range(7)]


def test_rounding_does_not_make_float32_samples_depend_on_the_batch():
    """At this width batches of 1 and 8 take other kernels, and some tokens are drawn
    again."""
    model = make_system(
        "AO-GPT", 1, torch.float32, vocab_size=8192, n_embd=256, n_head=4, block_size=64
    )
    plan = make_plan("even:steps=8", 8, 64)
    uniforms = uniforms_for(8, 64, seed=2)
    whole, alone = (
        generate(
            model,
            plan,
            batch_size=size,
            uniforms=uniforms,
            choice=TokenChoice(top_p=0.9),
        )
        for size in (8, 1)
    )
    assert torch.equal(alone.tokens, whole.tokens)


class OnDevice(torch.Tensor):
    """A tensor of a device without float64, named "meta", with the values of one of the
    CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        assert values.dtype != torch.float64, "this device has no float64"
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            device="meta",
            dtype=values.dtype,
        )

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        name = function.__name__
        leaves = [x for x in tree_leaves((arguments, keywords)) if torch.is_tensor(x)]
        here = any(isinstance(x, cls) for x in leaves)
        target = keywords.get("device")
        if here and not name.startswith(("_to_copy", "copy_")):
            assert all(isinstance(x, cls) or not x.dim() for x in leaves), function
        if target is not None:
            here = torch.device(target).type == "meta"
            keywords["device"] = "cpu"
        arguments, keywords = tree_map_only(
            cls, lambda x: x.values, (arguments, keywords)
        )
        result = function(*arguments, **keywords)
        return tree_map(lambda x: cls(x) if here and torch.is_tensor(x) else x, result)


class FactoryFunctions(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return OnDevice.__torch_dispatch__(function, types, arguments, keywords)


WITHOUT_FLOAT64 = {
    "AO-GPT": modes("entropy:entropy_bound=0.95, speculative:order=l2r,draft=3"),
    "mask_query": ["mdm:steps=3"],
    "SEDD": ["mdm:steps=3"],
}


@of_systems(WITHOUT_FLOAT64)
def test_on_a_device_without_float64_the_same_tokens_are_drawn(
    system, mode, monkeypatch
):
    given = torch.arange(6).expand(3, -1) < 1  # or relative models prefer no position
    model = text_model(system)
    plan = make_plan(mode, 3, 6, given, seed=2)
    tokens = random_tokens(TOKENS, batch_size=3, length=6, seed=1)
    uniforms = uniforms_for(3, 6)
    choice = TokenChoice(top_p=0.9)

    def draw(model):
        return generate(model, plan, tokens, uniforms=uniforms, choice=choice)

    expected = draw(model)
    monkeypatch.setattr(batch, "WITHOUT_FLOAT64", ("meta",))
    with FactoryFunctions():
        moved = copy.deepcopy(model).requires_grad_(False)
        moved._apply(lambda values: OnDevice(values.detach().float()))
        got = draw(moved)
    assert moved.wte.weight.device.type == "meta"
    assert not isinstance(got.tokens, OnDevice)
    assert_same_samples(got, expected)


@pytest.mark.parametrize("mode", OF_EACH_KIND)
def test_calls_and_inputs_are_counted_where_the_model_is_called(mode, monkeypatch):
    """A sample takes part in as many calls as it needs alone."""
    inputs = []

    def counted_hidden(model, ordered, order, step, **more):
        inputs.append(step.inputs)
        return cached.cached_hidden(model, ordered, order, step, **more)

    plan = make_plan(mode, 7, LENGTHS, some_given(7, LENGTH, seed=2))
    tokens = torch.zeros(7, LENGTH).long()
    uniforms = uniforms_for(7)
    calls = []
    for b in range(7):
        row = slice(b, b + 1)
        alone = generate(text_model(), plan[row], tokens[row], uniforms=uniforms[row])
        calls.append(alone.model_calls)
    monkeypatch.setattr(batch, "cached_hidden", counted_hidden)
    progress = []
    got = generate(
        text_model(), plan, tokens, uniforms=uniforms, progress=progress.append
    )
    assert got.nfe.tolist() == calls
    assert got.model_calls == len(inputs)
    assert got.token_forwards == sum(inputs)
    assert sum(progress) == int(plan.generated.sum())
    if mode in FIXED:
        longest = int(group_sizes(plan).bool().sum(1).max())
        assert got.model_calls == longest == len(progress)


BY_HAND = {"l2r": 12, "mdm:steps=1": 12, "random": 12, "even:steps=4": 12 + 3 * 2}


@pytest.mark.parametrize("mode", BY_HAND)
def test_inputs_of_a_row_are_those_counted_by_hand(mode):
    """Groups of one, and a single group, compute every step once; 4 groups of 3 have 12
    copies of a last known token, and after every group but the last the 2 of its tokens
    that no copy has left in the cache."""
    got = generate(text_model(), make_plan(mode, 1, LENGTH), generator=seeded(0))
    assert got.token_forwards == BY_HAND[mode]


@pytest.mark.parametrize("draft", [2, 3, 5])
def test_speculation_accepts_every_draft_where_positions_are_independent(draft):
    """A model that does not look at its inputs: a round settles all drafts and one
    more."""
    model = make_system("AO-GPT", 0, tokens=TOKENS, block_size=LENGTH)
    with torch.no_grad():
        for p in (model.wte.weight, model.wpe.weight, model.start):
            p.zero_()
        for block in model.blocks:
            block.attn.proj.weight.zero_()
    got = generate(
        model,
        speculative_plan(Samples(4, LENGTH, seeded(0)), draft),
        generator=seeded(1),
    )
    rounds = -(-LENGTH // (draft + 1))
    assert got.model_calls == 2 * rounds - (LENGTH % (draft + 1) == 1) < LENGTH
    assert (got.step.max(dim=1).values == rounds - 1).all()


def test_where_there_is_nothing_to_generate_no_call_is_made():
    tokens = random_tokens(vocab_size=17, batch_size=2, length=LENGTH, seed=0)
    plan = order_plan(Samples(2, LENGTH, given=torch.ones(2, LENGTH).bool()), "l2r")
    got = generate(text_model(), plan, tokens, generator=seeded(0))
    assert torch.equal(got.tokens, tokens)
    assert (got.model_calls, got.token_forwards) == (0, 0)
    nothing = order_plan(Samples(2, 0), "l2r")
    assert generate(text_model(), nothing, generator=seeded(0)).model_calls == 0


def test_where_memory_runs_out_the_batch_is_halved_and_the_samples_stay(monkeypatch):
    """Memory runs out in the second step of more than `most` samples. Progress ends at
    what is generated."""
    model = text_model(dtype=torch.float64)
    plan = make_plan("mdm:steps=5", 8, LENGTH)
    whole = generate(model, plan, generator=seeded(0))
    most = 2
    sizes = []
    progress = []
    step = Batch.take_step

    def limited(self, *arguments):
        if sizes[-1:] != [self.B]:
            sizes.append(self.B)
        elif self.B > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *arguments)

    monkeypatch.setattr(Batch, "take_step", limited)
    got = generate(model, plan, generator=seeded(0), progress=progress.append)
    assert sizes == [8, 4, 2]
    assert torch.equal(got.tokens, whole.tokens)
    assert sum(progress) == 8 * LENGTH
    most = 0
    with pytest.raises(ValueError, match="with one sample of .* take shorter"):
        generate(model, plan, generator=seeded(0))


@pytest.fixture
def counted_graphs(monkeypatch):
    """torch.compile without its slow code generator; counts what that would be
    handed."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile = torch.compile

    def with_counter(function, dynamic, **settings):
        return compile(function, dynamic=dynamic, backend=counter, **settings)

    monkeypatch.setattr(torch, "compile", with_counter)
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "system, mode, top_p",
    [
        ("AO-GPT", "even:steps=2", 0.9),
        ("two_stream", "speculative:order=l2r,draft=4", 0.9),
    ],
)
def test_compiled_generation_is_eager_generation_and_compiles_once(
    system, mode, top_p, counted_graphs
):
    """No graph is broken (no more graphs than calls); the same plan again compiles
    nothing."""
    model = text_model(system, torch.float64)
    plan = make_plan(mode, 7, LENGTHS, some_given(7, LENGTH, seed=1))
    tokens = random_tokens(TOKENS, 7, LENGTH, seed=2)

    def run(compile):
        return generate(
            model,
            plan,
            tokens,
            generator=seeded(1),
            compile=compile,
            choice=TokenChoice(0.9, top_p),
            batch_size=4,
            vocab_size=11,
        )

    eager = run(False)
    got = run(True)
    assert_same_samples(got, eager)
    assert eager.model_calls == got.model_calls
    assert eager.token_forwards == got.token_forwards
    graphs = counted_graphs.frame_count
    assert 0 < graphs <= got.model_calls  # one for all layers of a shape
    again = run(True)
    assert counted_graphs.frame_count == graphs
    assert torch.equal(again.tokens, eager.tokens)


def steps_of(plan):
    model = make_system("AO-GPT", block_size=1024, n_layer=1)
    steps = []
    with mock.patch.object(Batch, "take_step", lambda self, step: steps.append(step)):
        generate(model, plan, torch.zeros_like(plan.order), generator=seeded(0))
    return steps


@pytest.mark.parametrize(
    "mode", ["mdm:steps=64", "mdm:steps=64,schedule=cosine", "entropy:group=16"]
)
def test_a_plan_takes_few_shapes_and_another_plan_of_its_kind_hardly_a_new_one(mode):
    """Each costs a compilation."""
    given = torch.arange(1024).expand(8, -1) < 300
    shapes = set()
    for seed in range(3):
        most = len(shapes) + 4 if shapes else 24
        for step in steps_of(make_plan(mode, 8, 1024, given, seed=seed)):
            few = compiled.few_shapes(step, 1024)
            shapes.add((few.inputs, few.width, few.end))
        assert len(shapes) <= most


@pytest.mark.parametrize(
    "mode", ["l2r", "mdm:steps=4", "mdm:steps=4,schedule=cosine", "entropy:group=2"]
)
@pytest.mark.parametrize(
    "system", ["AO-GPT", "two_stream", "mask_query", "SEDD", "target rotary"]
)
def test_no_step_reads_a_value_of_the_device(system, mode, monkeypatch):
    monkeypatch.setattr(token_choice, "_may_branch", lambda x: False)
    engine = Engine(text_model(system), TokenChoice(0.9, 0.9), vocab_size=11)
    step = Batch.take_step
    plan = make_plan(mode, 7, LENGTHS)
    uniforms = uniforms_for(7)

    def guarded(*arguments):
        with NoHostReads():
            return step(*arguments)

    monkeypatch.setattr(Batch, "take_step", guarded)
    assert (engine.generate(plan, uniforms=uniforms).tokens < 11).all()
    with pytest.raises(AssertionError, match="waits for the device"), NoHostReads():
        torch.ones(1).item()


PLAN = order_plan(Samples(1, 4), "l2r")
FIRST = torch.tensor([[True, False, False, False]])
PROMPTED = order_plan(Samples(1, 4, given=FIRST), "l2r")
DRAFTED = speculative_plan(Samples(1, 4), draft=2)


@pytest.mark.parametrize(
    "system, plan, arguments, words",
    [
        ("AO-GPT", order_plan(Samples(1, 17), "l2r"), {}, "17 tokens.*at most 16"),
        ("AO-GPT", PROMPTED, {}, "given positions: pass their tokens"),
        (
            "AO-GPT",
            PROMPTED,
            {"tokens": torch.tensor([[17, 0, 0, 0]])},
            r"tokens must be \(1, 4\) numbers from 0 to below 17",
        ),
        (
            "AO-GPT",
            PLAN,
            {"uniforms": torch.ones(1, 4).double()},
            "uniforms must be .* below 1",
        ),
        (
            "AO-GPT",
            dataclasses.replace(PLAN, unmask_by="oracle"),
            {},
            "needs forced tokens",
        ),
        (
            "AO-GPT",
            PLAN,
            {"forced": torch.full((1, 4), 17)},
            "forced must be .* below 17",
        ),
        (
            "AO-GPT",
            PLAN,
            {"forced": torch.full((1, 4), 9), "vocab_size": 9},
            "forced must be .* below 9",
        ),
        (
            "AO-GPT",
            DRAFTED,
            {"forced": torch.zeros(1, 4).long()},
            "speculation draws its tokens",
        ),
        ("RADD", DRAFTED, {}, "speculation needs causal"),
        ("GPT-2", DRAFTED, {}, "plain GPT"),
        # It has one prediction for all positions: samples would be wrong.
        (ROTARY_GPT, make_plan("random", 1, 4), {}, "plain GPT.*mode l2r, one token"),
    ],
)
def test_generate_refuses_what_it_cannot_do_and_says_why(
    system, plan, arguments, words
):
    with pytest.raises(ValueError, match=words):
        generate(text_model(system), plan, generator=seeded(0), **arguments)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode.*eval"):
        generate(make_system("AO-GPT").train(), PLAN, generator=seeded(0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "choice",
    [TokenChoice(), TokenChoice(top_p=0.9), TokenChoice(0.0), TokenChoice(top_k=2)],
)
@pytest.mark.parametrize(
    "mode", ["l2r", "even:steps=3", "entropy:group=2", "speculative:order=l2r,draft=3"]
)
def test_a_model_whose_output_is_not_finite_gives_an_error_and_no_samples(
    mode, choice, bad
):
    model = make_system("AO-GPT")
    with torch.no_grad():
        model.head.bias[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        generate(model, make_plan(mode, 2, 4), generator=seeded(0), choice=choice)


def test_packed_layers_generate_what_the_models_own_do(monkeypatch):
    """Several samples of a wide model take them; a single one, which needs no second
    copy of the weights, and those of narrower models do not."""
    model = make_system("AO-GPT", 0, torch.float32)
    plan = make_plan("l2r", 3, 8)
    uniforms = uniforms_for(3, 8, seed=1)
    plain = generate(model, plan, uniforms=uniforms)
    monkeypatch.setattr(cached, "WIDE", 0)
    packed = generate(model, plan, uniforms=uniforms)
    assert torch.equal(packed.tokens, plain.tokens)
    torch.testing.assert_close(packed.log_probs, plain.log_probs)
    for batch_size, is_packed in ((3, True), (1, False)):
        copy = cached.decoding_copy(model, batch_size)
        layers = {type(module) for module in copy.modules()}
        assert (cached.PackedLinear in layers) == is_packed


@pytest.mark.parametrize("mode", ["l2r", "l2r:group=3"])
@pytest.mark.parametrize("system", ["AO-GPT", "two_stream", "mask_query"])
def test_a_sample_that_has_ended_takes_no_more_passes(system, mode):
    """It is the same up to its end, and costs a pass for each step up to the next
    look."""
    model = text_model(system)
    given = some_given(7, LENGTH, seed=7)
    plan = make_plan(mode, 7, LENGTHS, given, seed=8)
    tokens = random_tokens(vocab_size=8, batch_size=7, length=LENGTH, seed=9)
    whole = generate(model, plan, tokens, uniforms=uniforms_for(7))
    # one that at least a row generates
    end = int(whole.tokens[0, whole.step[0] >= 0][2])
    with mock.patch("aogpt.sampling.engine.STEPS_TO_END", 1):
        short = generate(model, plan, tokens, uniforms=uniforms_for(7), end_token=end)
    for b, (row, step, *_) in enumerate(whole.rows()):
        # An end is one only after all that is given.
        last_given = max((p for p in range(len(row)) if step[p] < 0), default=-1)
        ends = [p for p, token in enumerate(row) if token == end and p > last_given]
        length = min(ends, default=len(row))
        last = max(step[: length + 1], default=-1)
        assert short.length[b] == length
        assert short.nfe[b] == len({s for s in step if 0 <= s <= last})
        assert short.tokens[b, :length].tolist() == row[:length]
        assert not short.tokens[b, length:].any()
        assert (short.step[b, length:] == -1).all()
    assert short.nfe.sum() < whole.nfe.sum()
    assert short.token_forwards < whole.token_forwards


@pytest.mark.parametrize("mode", ["confidence", "entropy", "margin:group=3"])
@pytest.mark.parametrize("system", ["RADD", "SEDD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_scores_follow_the_order_of_the_plan(system, mode, dtype):
    """Where nothing is given, every position is alike to a model with relative
    positions alone, whatever the rounding of its place in the batch."""
    model = copy.deepcopy(text_model(system, seed=3)).to(dtype)
    plan = make_plan(mode, 16, LENGTH, None, seed=5)
    got = generate(model, plan, uniforms=uniforms_for(16))
    size = int((plan.step[0] == 0).sum())
    assert torch.equal(got.order[:, :size], plan.order[:, :size])
    assert len(got.order[:, 0].unique()) > 4
    # Beside longer samples.
    lengths = torch.full((16,), LENGTH)
    lengths[8:] = 16
    longer = make_plan(mode, 16, lengths, None, seed=5)
    longer.order[:8, :LENGTH] = plan.order[:8]
    got = generate(model, longer, uniforms=uniforms_for(16, 16))
    assert torch.equal(got.order[:8, :size], plan.order[:8, :size])


def test_the_best_come_first_and_equals_stay_in_order():
    scores = torch.tensor([[0.5, 2.0, torch.inf, 1.9, 0.5, -torch.inf, 1.85, 2.1]])
    assert best_first(scores, 0.0).tolist() == [[2, 7, 1, 3, 6, 0, 4, 5]]
    # 2.1 and what is within 0.12 of it, then 1.9.
    assert best_first(scores, 0.058).tolist() == [[2, 1, 7, 3, 6, 0, 4, 5]]
    assert best_first(scores, 9.0).tolist() == [[2, 0, 1, 3, 4, 6, 7, 5]]


def test_the_simple_sampler_is_greedy_at_no_temperature_and_without_a_nucleus():
    model = make_system("AO-GPT", 0, torch.float64)
    order = torch.arange(4)
    uniforms = torch.full((4,), 0.9, dtype=torch.float64)
    greedy, _ = simple_generate(model, order, [1] * 4, uniforms, temperature=0)
    for settings in ({"top_p": 0.0}, {"temperature": 1e-320}):
        tokens, _ = simple_generate(model, order, [1] * 4, uniforms, **settings)
        assert torch.equal(tokens, greedy)


@pytest.mark.parametrize(
    "system, changes, words",
    [
        ("RADD", {}, "for decoders"),
        ("AO-GPT", {"order": torch.tensor([0, 0, 1, 3])}, "a permutation of 0..3"),
        ("AO-GPT", {"sizes": [2, 0, 2]}, "at least 1 that add up to 4"),
        ("AO-GPT", {"sizes": [2]}, "with the tokens of the first"),
        ("AO-GPT", {"uniforms": torch.zeros(4)}, "4 uniforms of float64"),
        ("AO-GPT", {"temperature": math.nan}, "temperature is nan"),
        ("GPT-2", {"sizes": [2, 2]}, "plain GPT.*left to right, and sizes of 1"),
        ("AO-GPT", {"vocab_size": 0}, "vocab_size must be from 1"),
        ("AO-GPT", {"sizes": [3], "tokens": torch.full((4,), 99)}, "given tokens must"),
    ],
)
def test_the_simple_sampler_refuses_what_it_cannot_use(system, changes, words):
    with pytest.raises(UserError, match=words):
        simple_generate(
            make_system(system, 0),
            order=changes.get("order", torch.arange(4)),
            sizes=changes.get("sizes", [1] * 4),
            uniforms=changes.get("uniforms", torch.zeros(4).double()),
            tokens=changes.get("tokens"),
            temperature=changes.get("temperature", 1.0),
            vocab_size=changes.get("vocab_size"),
        )
