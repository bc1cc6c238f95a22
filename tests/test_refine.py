"""Refinement has its laws, and tokens that repeat are penalised and banned as they are
defined."""

import functools
import itertools
import math

import pytest
import torch
from helpers import some_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    ENCODERS,
    ONE_BY_ONE,
    accept,
    chi_square_p,
    distribution_of,
    enumerable_system,
    logits_given,
    make_plan,
    make_system,
    random_tokens,
    seeded,
    sequence_counts,
    some_given,
)

import eval_gen
import sample
from aogpt.runtime.processes import Processes
from aogpt.sampling import TokenChoice, generate, l2r_plan, modes, random_plan
from aogpt.sampling.engine import Decoder
from aogpt.sampling.race import fresh_uniforms
from aogpt.sampling.refine import ROWS, given_others, redraw, redrawn, refine
from aogpt.sampling.token_choice import choose_tokens, without_repeats

N = 3
V = 3
SAMPLES = 7000
enumerated = functools.cache(enumerable_system)
ALONE = Processes(0, 1, torch.device("cpu"))


def uniforms_for(*shape, seed=0):
    return torch.rand(shape, generator=seeded(seed), dtype=torch.float64)


# ---- refinement ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "system", ["AO-GPT", "target rotary", "sigma-GPT", ONE_BY_ONE, "RADD"]
)
@pytest.mark.parametrize("mode", ["l2r", "random"])
def test_redrawing_the_last_of_an_order_keeps_the_joint_along_it(system, mode):
    model, conditional = enumerated(system, 3)
    uniforms = uniforms_for(SAMPLES, 4, seed=1)
    before = generate(model, make_plan(mode, SAMPLES, 4, seed=2), uniforms=uniforms)
    last = torch.zeros(SAMPLES, 4, dtype=torch.bool)
    last.scatter_(1, before.order[:, -1:], True)
    decoder = Decoder(model)
    fresh = uniforms_for(SAMPLES, 4, seed=3)
    after = redraw(decoder, before, last, uniforms, fresh)
    assert torch.equal(after.order, before.order)
    assert (after.tokens != before.tokens).any()
    assert torch.equal(after.tokens[~last], before.tokens[~last])
    expected = distribution_of(mode, conditional, V, 4)
    assert accept(sequence_counts(after.tokens, V), expected)
    # One that is not the last changes it: this test can tell.
    if (system, mode) == ("AO-GPT", "l2r"):
        first = torch.arange(4).expand(SAMPLES, 4) == 0
        moved = redraw(decoder, before, first, uniforms, fresh)
        counts = sequence_counts(moved.tokens, V)
        assert chi_square_p(counts, SAMPLES * expected) < 1e-6


def gibbs_chain(conditional):
    """Return the index of each state (order, sequence), and the matrix of a round that
    moves one random position to the end of the order and draws it anew given the
    others."""
    orders = list(itertools.permutations(range(N)))
    sequences = list(itertools.product(range(V), repeat=N))
    states = itertools.product(orders, sequences)
    index = {state: i for i, state in enumerate(states)}
    matrix = torch.zeros(len(index), len(index), dtype=torch.float64)
    for (order, tokens), i in index.items():
        for position in range(N):
            context = tuple(p for p in order if p != position)
            new_order = (*context, position)
            for token in range(V):
                new_tokens = (*tokens[:position], token, *tokens[position + 1 :])
                place = sequences.index(new_tokens)
                probability = conditional[context, position][place]
                j = index[new_order, new_tokens]
                matrix[i, j] += probability / N
    return index, matrix


@pytest.mark.parametrize(
    "system",
    some_slow(
        [("AO-GPT",), ("target rotary",), ("RADD",)],
        lambda system: system == "AO-GPT",
        "the chain is the same code for every system",
    ),
)
def test_refinement_at_random_is_the_gibbs_chain_of_the_conditionals(system):
    model, conditional = enumerated(system, 1, length=N)
    index, matrix = gibbs_chain(conditional)
    ones = torch.ones(len(index), dtype=torch.float64)
    assert torch.allclose(matrix.sum(dim=1), ones)
    uniforms = uniforms_for(SAMPLES, N, seed=5)
    samples = generate(model, l2r_plan(SAMPLES, N), uniforms=uniforms)
    start = torch.zeros(len(index), dtype=torch.float64)
    joint = distribution_of("l2r", conditional, V, N)
    start[: V**N] = joint  # the first order is from left to right
    stationary = torch.linalg.matrix_power(matrix, 4096)[0]
    for rounds in (1, 2, 30):
        expected = start @ torch.linalg.matrix_power(matrix, rounds)
        after = refine(Decoder(model), samples, uniforms, rounds, 0.1, "random")
        if system in ENCODERS:  # the order means nothing to them
            of_tokens = expected.view(-1, V**N).sum(dim=0)
            assert accept(sequence_counts(after.tokens, V), of_tokens)
        states = []
        pairs = zip(after.order.tolist(), after.tokens.tolist(), strict=True)
        for order, text in pairs:
            states.append(index[tuple(order), tuple(text)])
        counts = torch.tensor(states).bincount(minlength=len(index))
        assert accept(counts, expected), rounds
        # The text is scored at the end: a decoder in one pass for each batch of rows,
        # an encoder in one for each position.
        passes = 1
        calls = -(-SAMPLES // ROWS)
        if system in ENCODERS:
            passes = N
            calls = N
        assert (after.nfe == N + rounds + passes).all()
        assert after.model_calls == N + rounds + calls
    assert accept(counts, stationary)
    assert (expected - stationary).abs().sum() < 1e-3
    # It is another distribution than that of the samples: the conditionals have no
    # joint.
    of_sequences = SAMPLES * stationary.view(-1, V**N).sum(dim=0)
    counts = sequence_counts(samples.tokens, V)
    assert chi_square_p(counts, of_sequences) < 1e-6


@pytest.mark.parametrize("system", ["AO-GPT", "two_stream", "RADD"])
@torch.no_grad()
def test_the_least_likely_given_all_others_or_when_drawn_are_redrawn(system):
    """Rows of several lengths, with given tokens; one has nothing to generate."""
    model = make_system(system, 2)
    B = 6
    T = 8
    length = torch.tensor([8, 8, 5, 8, 3, 7])
    is_prompt = some_given(B, T, 1)
    tokens = random_tokens(vocab_size=11, batch_size=B, length=T, seed=3)
    uniforms = uniforms_for(B, T, seed=4)
    plan = random_plan(B, length, uniforms_for(B, T, seed=6), is_prompt)
    samples = generate(model, plan, tokens, uniforms=uniforms, vocab_size=11)
    generated = samples.step >= 0
    decoder = Decoder(model, vocab_size=11, batch_size=3)
    again, scores = given_others(decoder, samples)
    assert torch.equal(again.nfe, samples.nfe + generated.sum(dim=1))
    for b, p in generated.nonzero().tolist():
        order = samples.order[b, : length[b]].tolist()
        other_positions = [q for q in order if q != p]
        row = samples.tokens[b, : length[b]]
        logits = logits_given(model, row, other_positions, p)[:11]
        expected = logits.log_softmax(dim=-1)[row[p]]
        assert abs(float(scores[b, p]) - float(expected)) < 1e-5
    count = redrawn(generated, 0.4)
    expected_count = []
    for size in generated.sum(dim=1).tolist():
        # 40%, and at least one where there is any
        expected_count.append(round(0.4 * size) or min(size, 1))
    assert count.tolist() == expected_count
    assert count[1] == 0
    for by, score in (("others", scores), ("drawn", samples.log_probs)):
        after = refine(decoder, samples, uniforms, 1, 0.4, by)
        moved = after.step > samples.step.amax(dim=1, keepdim=True)
        assert torch.equal(moved.sum(dim=1), count)
        lowest_kept = score.where(generated & ~moved, torch.inf).amin(dim=1)
        highest_moved = score.where(moved, -torch.inf).amax(dim=1)
        assert (highest_moved <= lowest_kept).all()
        assert torch.equal(after.tokens[~moved], samples.tokens[~moved])
        assert torch.equal(after.step[~moved], samples.step[~moved])
        choosing = 0
        if by == "others":
            choosing = generated.sum(dim=1)
        scoring = generated.any(dim=1)
        if model.config.is_encoder:
            scoring = generated.sum(dim=1)
        assert torch.equal(after.nfe, samples.nfe + choosing + count + scoring)
        for b in range(B):
            last = after.order[b, length[b] - count[b] : length[b]]
            moved_positions = moved[b].nonzero().flatten()
            assert torch.equal(last.sort().values, moved_positions)


@pytest.mark.parametrize("by", ["drawn", "others", "random"])
@pytest.mark.parametrize("system", ["AO-GPT", "target rotary", "two_stream", "RADD"])
@torch.no_grad()
def test_log_probs_after_refinement_are_those_of_the_text_that_is_there(system, by):
    """Rows of several lengths, with given tokens, from steps of several tokens."""
    model = make_system(system, 2)
    B = 5
    T = 8
    length = torch.tensor([8, 8, 5, 3, 7])
    given_tokens = some_given(B, T, 1)
    tokens = random_tokens(vocab_size=11, batch_size=B, length=T, seed=3)
    uniforms = uniforms_for(B, T, seed=4)
    plan = random_plan(B, length, uniforms_for(B, T, seed=6), given_tokens, group=3)
    samples = generate(model, plan, tokens, uniforms=uniforms, vocab_size=11)
    decoder = Decoder(model, vocab_size=11, batch_size=2)
    after = refine(decoder, samples, uniforms, rounds=3, share=0.4, by=by)
    for b in range(B):
        n = int(length[b])
        row = after.tokens[b, :n]
        order = after.order[b, :n].tolist()
        for place, position in enumerate(order):
            expected = 0.0
            if after.step[b, position] >= 0:
                logits = logits_given(model, row, order[:place], position)[:11]
                expected = float(logits.log_softmax(dim=-1)[row[position]])
            assert abs(float(after.log_probs[b, position]) - expected) < 1e-4
    assert not torch.allclose(after.log_probs, samples.log_probs)
    unchanged = refine(Decoder(model), samples, uniforms, rounds=0, share=0.4, by=by)
    assert unchanged is samples


@pytest.mark.parametrize("by", ["drawn", "others", "random"])
def test_options_of_refinement_reach_every_sample_and_no_rounds_change_nothing(by):
    model = make_system("AO-GPT", 4)
    contexts = [[1, None, 2, None, None, None], [None] * 9]

    def generated(batch_size=None, **more):
        options = modes.DecodingOptions(mode="mdm", batch_size=batch_size, **more)
        options = modes.with_mode_defaults(options)
        planned = modes.plan_samples(options, contexts, seed=5, num_samples=4)
        return modes.generate_distributed(
            model, planned, options, 11, ALONE, end_token=3
        )

    plain = generated()
    refined = generated(refine=3, refine_share=0.3, refine_by=by)
    full = generated(refine=0)
    assert torch.equal(plain.tokens, full.tokens)
    assert torch.equal(plain.log_probs, full.log_probs)
    assert (refined.tokens[:4, [0, 2]] == torch.tensor([1, 2])).all()
    assert (refined.step[:4, [0, 2]] == -1).all()
    assert refined.model_calls > plain.model_calls
    for size in (1, 3):
        alone = generated(size, refine=3, refine_share=0.3, refine_by=by)
        for same in ("tokens", "nfe", "order", "step"):
            assert torch.equal(getattr(alone, same), getattr(refined, same))
    assert torch.equal(generated(3).order, plain.order)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--refine-by", "random"], "--refine-by has no meaning without --refine"),
        (["--refine", 1, "--refine-share", 0], "--refine-share"),
        (
            ["--mode", "speculative", "--repetition-penalty", 2],
            "leave out --repetition-penalty",
        ),
        (
            ["--mode", "speculative", "--no-repeat-ngram", 2],
            "leave out --repetition-penalty",
        ),
        (["--repetition-penalty", 0.5], "--repetition-penalty is 0.5"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(script, run, words, message):
    status, _, err = script(sample, run, *words)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_refinement_as_a_user_sees_it(printed, mistake, run, plain):
    said = mistake(sample, plain, "--refine", 2)
    assert "--refine needs a model that is conditioned on the target" in said
    words = ["--num-samples", 2, "--length", 9, "--mode", "l2r", "--refine", 2]
    out = printed(eval_gen, run, "--judge", run, *words)
    assert "l2r 1, refined 2" in out
    assert " 12.0 |" in out


# ---- against repetition --------------------------------------------------------------


def plain_logits(logits, text, position, choice):
    """Return `without_repeats` of one row, word for word as the options are defined."""
    result = []
    for token, logit in enumerate(logits.tolist()):
        penalty = 1
        if token in text:
            penalty = choice.repetition_penalty
        if logit > 0:
            result.append(logit / penalty)
        else:
            result.append(logit * penalty)
    texts_with = []  # for each token, the text in which it stands at the position
    for token in range(len(result)):
        texts_with.append([*text[:position], token, *text[position + 1 :]])
    if n := choice.no_repeat_ngram:
        starts = range(len(text) - n + 1)
        ngrams = [text[s : s + n] for s in starts]
        complete = [ngram for ngram in ngrams if None not in ngram]
        banned = []
        for text_with in texts_with:
            windows = [text_with[s : s + n] for s in starts if s <= position < s + n]
            banned.append(any(window in complete for window in windows))
        result = without(banned, result)
    if choice.banned:
        words = [list(word) for word in choice.banned]
        banned = []
        for text_with in texts_with:
            holds = [holds_through(text_with, word, position) for word in words]
            banned.append(any(holds))
        result = without(banned, result)
    return torch.tensor(result, dtype=logits.dtype)


def without(banned, logits):
    """Return the logits with -inf for what is banned, unless nothing would be left."""
    result = []
    for is_banned, logit in zip(banned, logits, strict=True):
        result.append(-math.inf if is_banned else logit)
    return result if max(result) > -math.inf else logits


def holds_through(text, word, position):
    """Return whether a word stands in the text at a place that includes the
    position."""
    n = len(word)
    for start in range(len(text) - n + 1):
        if start <= position < start + n and text[start : start + n] == word:
            return True
    return False


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)
choices = st.builds(
    TokenChoice,
    repetition_penalty=st.sampled_from([1.0, 1.2, 5.0]),
    no_repeat_ngram=st.sampled_from([None, 1, 2, 3, 4, 99]),
    banned=WORDS.map(lambda words: tuple(map(tuple, words))),
)


@given(st.data(), choices)
@settings(max_examples=300)
def test_repeated_tokens_are_penalised_and_banned_as_they_are_defined(data, choice):
    vocab = data.draw(st.integers(1, 4))
    if any(max(word) >= vocab for word in choice.banned):
        vocab = 4
    T = data.draw(st.integers(1, 9))
    tokens = st.one_of(st.none(), st.integers(0, vocab - 1))
    text = data.draw(st.lists(tokens, min_size=T, max_size=T))
    position = data.draw(st.integers(0, T - 1))
    text[position] = None
    seed = data.draw(st.integers(0, 99))
    logits = torch.randn(1, vocab, generator=seeded(seed)).double()
    last_token = data.draw(st.integers(0, 4))
    logits[0, last_token + 1 :] = -torch.inf  # ids that are no tokens
    row = torch.tensor([[-1 if t is None else t for t in text]])
    got = without_repeats(logits, row, torch.tensor([position]), choice)
    expected = plain_logits(logits[0], text, position, choice)
    torch.testing.assert_close(got[0], expected)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("system", ["AO-GPT", "target rotary"])
@torch.no_grad()
def test_the_engine_draws_what_a_plain_loop_draws(system, group):
    """Ragged rows with given tokens; in a group, each position sees what was known
    before it."""
    model = make_system(system, 6, tokens=5)
    B = 7
    T = 9
    vocab = 5
    is_prompt = some_given(B, T, 2)
    tokens = random_tokens(vocab, batch_size=B, length=T, seed=3)
    uniforms = uniforms_for(B, T, seed=8)
    length = torch.tensor([9, 9, 4, 8, 9, 6, 9])
    plan = random_plan(B, length, uniforms_for(B, T, seed=9), is_prompt, group)
    choice = TokenChoice(0.9, 0.95, repetition_penalty=1.7, no_repeat_ngram=2)
    got = generate(model, plan, tokens, uniforms=uniforms, choice=choice, batch_size=3)
    for b in range(B):
        n = int(length[b])
        order = plan.order[b, :n].tolist()
        steps = plan.step[b, :n].tolist()
        text = [None] * n
        for p in plan.given[b, :n].nonzero().flatten().tolist():
            text[p] = int(tokens[b, p])
        for step in sorted(set(steps) - {-1}):
            context = []
            group_positions = []
            for p, s in zip(order, steps, strict=True):
                if s < step:
                    context.append(p)
                elif s == step:
                    group_positions.append(p)
            before = list(text)
            row = torch.tensor([0 if t is None else t for t in before])
            for p in group_positions:
                logits = logits_given(model, row, context, p)
                changed = plain_logits(logits, before, p, choice)
                token = choose_tokens(changed[None], uniforms[b, p, None], choice)
                text[p] = int(token)
                log_prob = logits.log_softmax(dim=-1)[text[p]]  # the model's own
                assert abs(float(got.log_probs[b, p]) - float(log_prob)) < 1e-5
        assert got.tokens[b, :n].tolist() == text


@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
@pytest.mark.parametrize(
    "mode",
    [
        "l2r",
        "random --group-size 2",
        "mdm --steps 4",
        "confidence",
        "confidence --threshold 0.45",
    ],
)
def test_no_ngram_repeats_and_a_choice_without_either_changes_no_bit(system, mode):
    model = make_system(system, 3, block_size=12)
    uniforms = uniforms_for(5, 12, seed=2)
    plan = make_plan(mode, 5, 12, seed=1)
    generated = functools.partial(
        generate, model, plan, uniforms=uniforms, vocab_size=11
    )
    plain = generated()
    for choice in (
        TokenChoice(repetition_penalty=1.0),
        TokenChoice(no_repeat_ngram=13),
    ):
        same = generated(choice=choice)
        assert torch.equal(same.tokens, plain.tokens)
        assert torch.equal(same.log_probs, plain.log_probs)
    choice = TokenChoice(0.05, repetition_penalty=1.1, no_repeat_ngram=1)
    # one at a time: no token repeats while others are left
    if mode in ("l2r", "confidence"):
        rows = generated(choice=choice).tokens
        assert [len(set(row)) for row in rows.tolist()] == [11] * 5
        rows = generated(choice=TokenChoice(0.05)).tokens
        assert any(len(set(row)) < 11 for row in rows.tolist())


def test_numbers_of_rounds_are_those_of_no_other_use():
    uniforms = uniforms_for(1, 50)
    numbers = [fresh_uniforms(uniforms, salt) for salt in range(-40, 80)]
    different = torch.cat(numbers).unique()
    assert len(different) == 120 * 50
