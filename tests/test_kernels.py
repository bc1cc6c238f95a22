"""Triton kernels against their references: on a GPU as they are, elsewhere in Triton's interpreter
(conftest.py); and assembled for an H100."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from reference import make_system, seeded
from scipy.stats import chisquare

from decode import generate, mdm_plan
from sampling import engine
from sampling.token_choice import TokenChoice, choose_tokens, probabilities

pytest.importorskip("triton")
from sampling import kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw_both(logits, uniforms, choice):
    """(tokens, log-probabilities) of the kernel, and of the reference."""
    logits, uniforms = logits.to(DEVICE), uniforms.to(DEVICE)
    kernel = [v.cpu() for v in kernels.choose(logits, uniforms, choice)]
    logits = logits.float().cpu()
    tokens = choose_tokens(logits, uniforms.cpu(), choice)
    log_probs = logits.double().log_softmax(-1).gather(1, kernel[0][:, None]).squeeze(1)
    return kernel, (tokens, log_probs)


CHOICES = {
    "all": TokenChoice(),
    "hot": TokenChoice(1.4),
    "nucleus": TokenChoice(0.9, 0.95),
    "small nucleus": TokenChoice(1.1, 0.3),
    "least nucleus": TokenChoice(1.0, 1e-9),
    "greedy": TokenChoice(0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("V, N, banned", [(2, 4, 0), (97, 12, 7), (5000, 3, 1)])
def test_the_kernel_draws_what_the_reference_draws(V, N, banned, name, dtype):
    """In bfloat16 many logits are equal, so that the nucleus ends among equals. The two round
    differently: a uniform number within 1e-6 of a boundary may fall on its other side, which has a
    chance of some 1e-4 in all these draws; no draw of these seeds does."""
    logits = (2.5 * torch.randn(N, V, generator=seeded(V))).to(dtype)
    logits[:, V - banned :] = -torch.inf
    uniforms = torch.rand(N, generator=seeded(N), dtype=torch.float64)
    kernel, reference = draw_both(logits, uniforms, CHOICES[name])
    assert torch.equal(kernel[0], reference[0])
    # float32: 24 bits of sums of up to 5,000 exponentials
    assert (kernel[1] - reference[1]).abs().max() < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot", "nucleus"])
def test_draws_follow_the_distribution(name):
    """The chance of a false alarm is 1e-4."""
    choice, rows = CHOICES[name], 300
    logits = torch.tensor([1.0, -0.5, 2.0, 2.0, -torch.inf, 0.3, 1.9, 2.0])
    uniforms = torch.rand(rows, generator=seeded(3), dtype=torch.float64)
    tokens, _ = kernels.choose(
        logits.expand(rows, -1).contiguous().to(DEVICE), uniforms.to(DEVICE), choice
    )
    expected = probabilities(logits[None], choice)[0]
    counts = torch.bincount(tokens.cpu(), minlength=8)
    possible = expected > 0
    assert not counts[~possible].any()
    if possible.sum() > 1:
        assert chisquare(counts[possible], expected[possible] * rows).pvalue > 1e-4


def test_sums_of_weights_do_not_depend_on_the_order():
    """The same draws whatever the tile, in which the sums are cut."""
    logits = 3 * torch.randn(3, 300, generator=seeded(0)).to(DEVICE)
    uniforms = torch.rand(3, generator=seeded(1), dtype=torch.float64).to(DEVICE)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        for tile in (64, 4096):
            patch.setattr(kernels, "TILE", tile)
            drawn.append(kernels.choose(logits, uniforms, TokenChoice(0.9, 0.5))[0])
    assert torch.equal(*drawn)


def test_a_model_that_overflowed_shows_in_the_log_probability():
    logits = torch.zeros(2, 5)
    logits[0, 3], logits[1, 0] = torch.nan, torch.inf
    uniforms = torch.tensor([0.5, 0.999], dtype=torch.float64)
    tokens, log_probs = kernels.choose(logits.to(DEVICE), uniforms.to(DEVICE), TokenChoice())
    assert ((tokens >= 0) & (tokens < 5)).all() and not log_probs.isfinite().any()


def test_what_the_kernel_cannot_draw_is_left_to_the_reference():
    logits = torch.zeros(2, 5)
    assert kernels.can_choose(logits, TokenChoice(0.9, 0.5))
    assert not kernels.can_choose(logits, TokenChoice(top_k=3))
    assert not kernels.can_choose(logits, TokenChoice(noise="float32"))
    assert not kernels.can_choose(logits.double(), TokenChoice())
    assert not kernels.can_choose(torch.empty(0, 2**18 + 1), TokenChoice())


def test_the_engine_stores_what_the_kernel_draws(monkeypatch):
    """The engine with the kernels, as on a GPU, and without: the same samples."""
    model = make_system("AO-GPT", 0)
    plan = mdm_plan(2, model.config.block_size, 3, seeded(0))
    settings = {"choice": TokenChoice(0.9, 0.9), "vocab_size": model.config.vocab_size - 1}
    reference = generate(model, plan, generator=seeded(1), **settings)
    monkeypatch.setattr(engine, "triton_kernels", lambda device: kernels)
    monkeypatch.setattr(kernels, "can_choose", lambda logits, choice: True)  # of float64, too
    with_kernels = generate(model, plan, generator=seeded(1), **settings)
    assert torch.equal(reference.tokens, with_kernels.tokens)
    assert (reference.log_probs - with_kernels.log_probs).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["_choose"])
def test_kernels_assemble_for_an_h100(name, tmp_path):
    """Down to machine code, without a GPU."""
    (tmp_path / "assemble.py").write_text(ASSEMBLE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, tmp_path / "assemble.py", name],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000  # bytes


ASSEMBLE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sampling import kernels

signatures = {
    "_choose": {
        "logits_at": "*bf16",
        "uniforms_at": "*fp64",
        "tokens_at": "*i64",
        "log_probs_at": "*fp32",
        "stride": "i64",
        "V": "i32",
        "temperature": "fp32",
        "top_p": "fp64",
    },
}
constants = {"_choose": {"GREEDY": False, "NUCLEUS": True, "TILE": 4096}}
name = sys.argv[1]
signature = signatures[name] | dict.fromkeys(constants[name], "constexpr")
source = ASTSource(fn=getattr(kernels, name), signature=signature, constexprs=constants[name])
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""
