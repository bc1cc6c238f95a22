"""Gaps that a plain GPT fills: extras/plain_gpt.py against enumeration."""

import copy
import itertools
import math

import pytest
import torch

import aogpt
from aogpt.data.tokenizers import get_tokenizer
from aogpt.model import AOGPT, ModelConfig
from aogpt.scoring import token_log_probs
from extras import plain_gpt
from extras.plain_gpt import Gapped, fill, read

GAPS = {
    "one": Gapped([[0], [1, 2, 0]], [range(2, 3)]),
    "lengths": Gapped([[0], [1, 2]], [range(1, 4)]),
    "two": Gapped([[0], [1, 2], [2]], [range(1, 3), range(2, 3)]),
    "at the end": Gapped([[0], [1], []], [range(1, 2), range(1, 2)]),
}


@pytest.fixture(scope="module")
def model():
    """A random plain GPT of three tokens, whose predictions depend on what is known."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=3, block_size=8, n_layer=2, n_head=2, n_embd=16, target="none"
    )
    network = AOGPT(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return network


def exact(model, gapped):
    """Return log p of the gaps and the known text after the first one, by the tokens
    and lengths of each possible filling."""
    log_probs = {}
    for lengths in itertools.product(*gapped.lengths):
        for ids in itertools.product(range(3), repeat=sum(lengths)):
            rest = list(ids)
            tokens = list(gapped.texts[0])
            for length, after in zip(lengths, gapped.texts[1:], strict=True):
                tokens += [rest.pop(0) for _ in range(length)]
                tokens += after
            x = torch.tensor([tokens])
            each = token_log_probs(model, x, torch.arange(len(tokens))[None])[0]
            log_p = float(each[len(gapped.texts[0]) :].sum())
            log_probs[tuple(tokens), lengths] = log_p
    return log_probs


@pytest.mark.parametrize("name", GAPS)
@torch.no_grad()
def test_joints_are_exact_and_every_filling_is_found(model, name):
    gapped = GAPS[name]
    log_probs = exact(model, gapped)
    result = fill(model, gapped, draws=2000, seed=1, vocab_size=3)
    assert 1 <= result.effective_sample_size <= 2000
    for filling in result.fillings:
        expected = log_probs[tuple(filling.tokens), filling.lengths]
        assert math.isclose(filling.joint, expected, abs_tol=1e-6)
    assert math.isclose(sum(filling.share for filling in result.fillings), 1)
    best = max(log_probs, key=log_probs.get)
    assert best in [(tuple(one.tokens), one.lengths) for one in result.fillings]
    if len(gapped.lengths) == 1 and len(gapped.lengths[0]) == 1:
        joints = [filling.joint for filling in result.fillings]
        assert joints == sorted(joints, reverse=True)
        assert tuple(result.fillings[0].tokens) == best[0]
    evidence = math.log(sum(map(math.exp, log_probs.values())))
    assert math.isclose(result.log_evidence, evidence, abs_tol=0.1)


@pytest.mark.parametrize("name", GAPS)
@torch.no_grad()
def test_the_estimate_of_the_text_after_the_gaps_is_unbiased(model, name):
    """With few continuations, over 100 seeds."""
    gapped = GAPS[name]
    expected = sum(map(math.exp, exact(model, gapped).values()))
    estimates = []
    for seed in range(100):
        result = fill(model, gapped, draws=3, seed=10 * seed, vocab_size=3)
        estimates.append(math.exp(result.log_evidence) / expected)
    ratios = torch.tensor(estimates).double()
    error = float(ratios.std()) / 10
    assert abs(float(ratios.mean()) - 1) < 4 * error + 1e-9


def test_masks_are_read_and_mistakes_are_told(model):
    tokenizer = get_tokenizer("bytes")
    gapped = read("a[MASK:2-3][MASK]b", tokenizer)
    assert gapped == Gapped([[97], [98]], [range(3, 5)])
    for text in ("ab", "a[MASK:3-2]b", "a[MASK:3-]b[MASK]c", "a[MASK: 3]b[MASK]c"):
        with pytest.raises(aogpt.UserError):
            read(text, tokenizer)
    for text in (Gapped([[], [1]], [range(1, 2)]), Gapped([[0], [1]], [range(1, 20)])):
        with pytest.raises(aogpt.UserError):
            fill(model, text)
    with pytest.raises(aogpt.UserError, match="draws is 0"):
        fill(model, Gapped([[0], [1]], [range(1, 2)]), draws=0)
    records = aogpt.load("results/molecules_model")
    gapped = read("CC[MASK]O", records.tokenizer)
    with pytest.raises(aogpt.UserError, match="records whose end is given"):
        fill(records.model, gapped)


BOOKS = "results/books_model"


def test_fillings_stand_in_the_order_of_the_number_that_is_printed(printed):
    """One length by the exact joint; of several the text after the gap counts twice,
    and the share is no order."""
    for text in ("He took his[MASK:1] and ran.", "He took his[MASK:1-3] and ran."):
        options = ["--draws", 16, "--candidates", 9]
        *lines, _ = printed(plain_gpt, BOOKS, text, *options).splitlines()
        scores = [float(line.split()[0]) for line in lines]
        assert len(scores) > 2
        assert scores == sorted(scores, reverse=True)


def test_a_nan_is_no_ranking(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.wte.weight[2] = math.nan
    gapped = Gapped([[0], [1, 2, 0]], [range(1, 3)])
    with pytest.raises(aogpt.UserError, match="not finite"):
        fill(broken, gapped, draws=4, vocab_size=3)
