"""Refinement has its laws, and tokens that repeat are penalised and banned as they are
defined."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    enumerable_system,
    logits_given,
    make_plan,
    make_system,
    random_tokens,
    seeded,
    some_given,
)

from aogpt.runtime.processes import Processes
from aogpt.sampling import TokenChoice, generate, random_plan
from aogpt.sampling.race import fresh_uniforms
from aogpt.sampling.token_choice import choose_tokens, without_repeats

N = 3
V = 3
SAMPLES = 7000
enumerated = functools.cache(enumerable_system)
ALONE = Processes(0, 1, torch.device("cpu"))


def uniforms_for(*shape, seed=0):
    return torch.rand(shape, generator=seeded(seed), dtype=torch.float64)


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
