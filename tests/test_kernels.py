"""The Triton kernel against its reference: on a GPU as it is, elsewhere in Triton's interpreter
(conftest.py); and assembled for an H100."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from reference import make_plan, make_system, random_tokens, seeded, some_given

from aogpt.sampling import engine, generate
from aogpt.sampling.token_choice import TokenChoice, choose_tokens

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
if (
    not torch.cuda.is_available()
    and triton.__version__ < "3.7"
    and np.__version__ >= "2.4"
):
    pytest.skip(
        "the interpreter of Triton before 3.7 needs NumPy before 2.4",
        allow_module_level=True,
    )
from aogpt.sampling import kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CHOICES = [(1.0, 1.0), (1.4, 1.0), (0.9, 0.95), (1.1, 0.3), (1.0, 1e-9), (0.0, 1.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "V, N, banned, tile", [(2, 4, 0, 64), (97, 6, 7, 64), (5000, 3, 1, 1024)]
)
def test_the_kernel_draws_what_the_reference_draws(
    V, N, banned, tile, choice, dtype, monkeypatch
):
    """In bfloat16 the nucleus ends among equals. Whatever the tile, in which sums are cut."""
    logits = (2.5 * torch.randn(N, V, generator=seeded(V))).to(dtype)
    logits[:, V - banned :] = -torch.inf
    uniforms = torch.rand(N, generator=seeded(N), dtype=torch.float64)
    choice = TokenChoice(*choice)
    tokens = choose_tokens(logits.float(), uniforms, choice)
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    for size in (kernels.TILE, tile):
        monkeypatch.setattr(kernels, "TILE", size)
        got, log_probs = kernels.choose(logits.to(DEVICE), uniforms.to(DEVICE), choice)
        assert torch.equal(got.cpu(), tokens)
        # float32: 24 bits of sums of up to 5,000 exponentials
        assert (log_probs.cpu() - expected).abs().max() < 5e-6


def test_a_model_that_overflowed_shows_in_the_log_probability():
    logits = torch.zeros(2, 5)
    logits[0, 3] = torch.nan
    logits[1, 0] = torch.inf
    uniforms = torch.tensor([0.5, 0.999], dtype=torch.float64)
    tokens, log_probs = kernels.choose(
        logits.to(DEVICE), uniforms.to(DEVICE), TokenChoice()
    )
    assert ((tokens >= 0) & (tokens < 5)).all() and not log_probs.isfinite().any()


def test_what_the_kernel_cannot_draw_is_left_to_the_reference():
    """So is a setting that is added to `TokenChoice`: it must not be ignored in silence."""
    logits = torch.zeros(2, 5)
    min_p = [("min_p", float, 0.0)]
    more = dataclasses.make_dataclass("More", min_p, bases=(TokenChoice,), frozen=True)
    assert kernels.can_choose(logits, TokenChoice(0.9, 0.5)) and kernels.can_choose(
        logits, more()
    )
    dropped = TokenChoice(top_p=0.5, crossing="drop")
    noisy = TokenChoice(noise="float32")
    penalised = TokenChoice(repetition_penalty=1.1)
    banned = TokenChoice(no_repeat_ngram=3)
    for choice in (
        TokenChoice(top_k=3),
        dropped,
        noisy,
        penalised,
        banned,
        more(min_p=0.1),
    ):
        assert not kernels.can_choose(logits, choice)
    assert not kernels.can_choose(logits.double(), TokenChoice())
    assert not kernels.can_choose(torch.empty(0, 2**18 + 1), TokenChoice())


@pytest.mark.parametrize(
    "system, mode",
    [("AO-GPT", "exact 3"), ("target rotary", "confidence 2"), ("GPT-2", "l2r")]
    + [("AO-GPT, rotary", "speculative 3"), ("two_stream", "even 3")],
)
def test_the_engine_generates_with_the_kernel_what_it_does_without(
    system, mode, monkeypatch
):
    """Rows of different lengths, some tokens given. The kernel is opt in."""
    sizes = {"block_size": 16, "n_head": 2, "n_embd": 24, "cond_dim": 6}
    model = make_system(system, 0, torch.float32, 0.7, 17, **sizes).to(DEVICE)
    given = None if system == "GPT-2" else some_given(5, 12, seed=1)
    plan = make_plan(mode, 5, torch.tensor([12, 5, 0, 12, 9]), given)
    tokens = random_tokens(11, 5, 12, seed=2)
    settings = {"choice": TokenChoice(0.9, 0.9), "vocab_size": 11}
    calls = []
    choose = kernels.choose
    monkeypatch.setattr(engine, "triton_kernels", lambda device: kernels)
    monkeypatch.setattr(kernels, "choose", lambda *a: calls.append(a) or choose(*a))
    reference = generate(model, plan, tokens, generator=seeded(1), **settings)
    assert not calls
    got = generate(model, plan, tokens, generator=seeded(1), kernels=True, **settings)
    assert bool(calls) != mode.startswith("speculative")
    assert torch.equal(reference.tokens, got.tokens)
    assert (reference.log_probs - got.log_probs).abs().max() < 1e-5  # float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)]
)
def test_kernels_assemble_for_an_h100(number, tmp_path):
    """Without a GPU. number: the type of floats, fp64 where torch.compile calls the kernel."""
    (tmp_path / "assemble.py").write_text(ASSEMBLE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, tmp_path / "assemble.py", number],
        env=environment
        | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
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
from aogpt.sampling import kernels

types = ["*bf16", "*fp64", "*i64", "*fp32", "i64", "i32", sys.argv[1], "i64", "constexpr"]
signature = dict(zip(kernels._choose.arg_names, types, strict=True))
source = ASTSource(fn=kernels._choose, signature=signature, constexprs={"TILE": 4096})
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""
