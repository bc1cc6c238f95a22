"""Ragged attention against its reference: on a GPU as it is, elsewhere in Triton's
interpreter (conftest.py); and CUDA graphs."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import some_slow
from reference import make_plan, make_system, random_tokens, seeded, some_given

from aogpt.model import attention
from aogpt.runtime import devices
from aogpt.sampling import Engine, compiled
from aogpt.sampling.cached import Step, ragged
from aogpt.sampling.token_choice import TokenChoice

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
from aogpt.sampling import attention_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="a stand-in for what a GPU does")


INTERPRETED = "Triton's interpreter takes one or two seconds for each"

# ---- attention -----------------------------------------------------------------------


def masked_attention(q, k, v, keys, values, step, hide_start):
    """Return the reference in float64: (N, H D)."""
    row, _, slot = ragged(step.cached, step.count, total=step.inputs, unused=-1)
    source = torch.minimum(slot, step.known[row])[:, None]
    slots = torch.arange(keys.shape[1] - 1)
    visible = (slots < source) | (slots == slot[:, None])
    if hide_start:
        visible &= (slots > 0) | (slot[:, None] == 0)
    return attention(
        q[:, None].double(),
        keys[row, :-1].double(),
        values[row, :-1].double(),
        mask=visible[:, None, None],
    ).flatten(1)


# B, T, heads, key heads, width, hidden start, splits, inputs of a row at most
CASES = {
    "plain": (3, 20, 2, 2, 16, False, 1, 5),
    "many inputs": (2, 90, 2, 2, 16, False, 1, 80),
    "width 24, grouped": (3, 20, 4, 2, 24, False, 1, 9),
    "width 64, hidden start": (4, 40, 2, 2, 64, True, 1, 5),
    "width 128, three queries a key": (2, 20, 3, 1, 128, False, 1, 9),
    "splits, width 20, grouped": (3, 70, 6, 2, 20, False, 4, 12),
    "twenty queries a key, splits": (2, 40, 20, 1, 16, True, 2, 12),
}
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}
if DEVICE == "cuda":  # the interpreter multiplies the bits of bfloat16 numbers
    LIMITS[torch.bfloat16] = 2e-2


@pytest.mark.parametrize(
    "case, dtype",
    some_slow(
        itertools.product(CASES, LIMITS),
        lambda case, dtype: dtype == torch.float32 or case == "plain",
        INTERPRETED,
    ),
)
def test_ragged_attention_is_masked_attention(case, dtype, monkeypatch):
    """Rows of different lengths, one of them finished, one without a known token, and
    padding."""
    B, T, H, key_heads, D, hide_start, splits, most = CASES[case]
    monkeypatch.setattr(attention_kernel, "TILE_K", 16 if D < 128 else 32)
    monkeypatch.setattr(
        attention_kernel, "pick_splits", lambda programs, length: splits
    )
    generator = seeded(B + D)
    cached = torch.randint(0, T - 2, (B,), generator=generator)
    known_count = (cached + torch.randint(0, 3, (B,), generator=generator)).clamp(
        max=T - 1
    )
    count = known_count - cached + torch.randint(1, most, (B,), generator=generator)
    count = torch.minimum(count, T - cached)
    count[0] = 0
    cached[1] = known_count[1] = 0
    count[1] = most - 1
    N = int(count.sum())
    rows = torch.stack([cached, known_count, count, count, count])
    step = Step(rows, N, int(count.max()), T, B, 0, 0)
    row, column, _ = ragged(cached, count, total=N, unused=T)
    q = torch.randn(N + 3, H, D, generator=generator).to(dtype)
    kv = torch.randn(N + 3, 2, key_heads, D, generator=generator).to(dtype)
    keys, values = torch.randn(2, B, T + 1, key_heads, D, generator=generator).to(dtype)
    keys[row, cached[row] + column] = kv[:N, 0]
    values[row, cached[row] + column] = kv[:N, 1]
    expected = masked_attention(
        q[:N], kv[:N, 0], kv[:N, 1], keys, values, step, hide_start
    )
    padded = dataclasses.replace(step, rows=rows.to(DEVICE), inputs=N + 3)
    tiles = attention_kernel.make_tiles(padded, H, key_heads, dtype)
    q, kv, keys, values = (x.to(DEVICE) for x in (q, kv, keys, values))
    got = attention_kernel.attend(
        q, kv[:, 0], kv[:, 1], keys, values, tiles, hide_start
    ).cpu()
    assert got.isfinite().all(), "what pads the inputs must not spoil the cache"
    assert (got[:N] - expected).abs().max() < LIMITS[dtype]


# ---- the engine ----------------------------------------------------------------------


@pytest.fixture
def attention_calls(monkeypatch):
    """Take engines that compile for those of a GPU; the calls of ragged attention."""
    calls = []
    monkeypatch.setattr(devices, "can_run_triton", lambda device: True)
    monkeypatch.setattr(attention_kernel, "TILE_K", 16)
    attend = attention_kernel.attend

    def counted_attend(*arguments, **named):
        calls.append(arguments)
        return attend(*arguments, **named)

    monkeypatch.setattr(attention_kernel, "attend", counted_attend)
    return calls


def small_system(system):
    model = make_system(
        system,
        dtype=torch.float32,
        scale=0.7,
        tokens=17,
        block_size=16,
        n_head=2,
        n_embd=24,
        cond_dim=6,
    )
    return model.to(DEVICE)


# ---- graphs --------------------------------------------------------------------------


def replayed(self, stage, step, tensors):
    """In place of a CUDA graph: replaying runs the stage again on the buffers of the
    recording, and overwrites its result."""
    result = stage(step, *tensors)

    def replay():
        new = stage(step, *tensors)
        if torch.is_tensor(result):
            result.copy_(new)
        elif result is not None:
            for old, value in zip(result, new, strict=True):
                old.copy_(value)

    return SimpleNamespace(replay=replay), result


@pytest.fixture
def graphs(monkeypatch, attention_calls):
    """Engines with stand-ins for CUDA graphs and without a compiler."""
    monkeypatch.setattr(compiled.Graphed, "capture", replayed)
    monkeypatch.setattr(compiled, "compiled_copy", lambda model: model)


def test_sizes_of_graphs_grow_by_a_quarter_at_most():
    sizes = compiled.ladder(10**9)
    assert sizes[-1] >= compiled.LARGEST_GRAPH
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert smaller < larger <= max(smaller + 8, 1.25 * smaller)
    assert compiled.ladder(100)[-2] < 100 <= compiled.ladder(100)[-1]


@pytest.mark.parametrize(
    "system, mode",
    some_slow(
        [
            ("AO-GPT", "mdm:steps=3"),
            ("GPT-2", "l2r"),
            ("AO-GPT", "entropy:entropy_bound=0.95"),
            ("target rotary", "speculative:order=l2r,draft=3"),
            ("AO-GPT", "confidence:threshold=0.45,block=3"),
            ("Llama", "random:group=3"),
            ("AO-GPT", "even:steps=2"),
            ("two_stream", "even:steps=4"),
            ("SEDD", "even:steps=4"),
        ],
        lambda system, mode: system == "Llama",
        INTERPRETED,
    ),
)
def test_replayed_steps_with_ragged_attention_are_eager_steps(
    system, mode, graphs, attention_calls, monkeypatch
):
    """Batches of rows of different lengths, some tokens given; nothing is recorded once
    a plan has begun, and steps that are too large for a graph do without."""
    largest = 8 if mode == "even:steps=2" else compiled.LARGEST_GRAPH
    monkeypatch.setattr(compiled, "LARGEST_GRAPH", largest)
    compiled.ladder.cache_clear()
    model = small_system(system)
    given = None if mode == "l2r" else some_given(5, 12, seed=1)
    choice = TokenChoice(0.9, 0.9)
    eager_engine = Engine(model, choice, vocab_size=11)
    fast_engine = Engine(model, choice, vocab_size=11, batch_size=3, compile=True)
    tokens = random_tokens(vocab_size=11, batch_size=5, length=12, seed=2)
    plan = make_plan(mode, 5, torch.tensor([12, 5, 0, 12, 9]), given)
    eager = eager_engine.generate(plan, tokens, seeded(2))
    assert not attention_calls
    got = fast_engine.generate(plan, tokens, seeded(2))
    assert bool(attention_calls) == (system not in ("two_stream", "SEDD"))
    assert torch.equal(eager.tokens, got.tokens)
    # batches of 5 and of 3
    assert (eager.log_probs - got.log_probs).abs().max() < 1e-5
    recorded = {key.method for key in fast_engine.batch.graphs}
    assert ("predict" in recorded) == (system != "two_stream")
    is_adaptive = "speculative" in mode or "threshold" in mode or "bound" in mode
    assert ("unmask" in recorded) != is_adaptive
    assert max(key.size for key in fast_engine.batch.graphs) <= largest
    before = len(fast_engine.batch.graphs)
    fast_engine.generate(plan, tokens, seeded(3))
    assert len(fast_engine.batch.graphs) == before
    compiled.ladder.cache_clear()
