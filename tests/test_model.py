"""The Transformer computes the formulas of the paper, forwards and backwards, and compiles to one graph."""

import math

import pytest
import torch
from reference import (
    all_sequences,
    log_probs,
    order_through,
    random_orders,
    random_tokens,
    randomise,
)

import model as model_module
from model import AOGPT, KVCache, ModelConfig, ParallelPass, PermutationGather

TINY = {"vocab_size": 11, "block_size": 9, "n_layer": 2, "n_head": 3, "n_embd": 12, "cond_dim": 5}

VARIANTS = {
    "adaln": {"target": "adaln"},
    "input": {"target": "input"},
    "none": {"target": "none"},
    "sigma-gpt": {
        "target": "input",
        "norm": "layernorm",
        "qk_norm": False,
        "tied_head": True,
        "head_bias": False,
    },
    "gpt-2": {
        "target": "none",
        "norm": "layernorm",
        "qk_norm": False,
        "gelu": "tanh",
        "tied_head": True,
        "head_bias": False,
    },
    "adaln, layernorm, tied": {"target": "adaln", "norm": "layernorm", "tied_head": True},
    "adaln, no bias, tanh, no qk-norm": {
        "target": "adaln",
        "attn_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "gelu": "tanh",
        "qk_norm": False,
    },
    "input, layernorm without bias": {
        "target": "input",
        "norm": "layernorm",
        "attn_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "head_bias": False,
    },
}

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_model(seed=0, dtype=torch.float64, **settings):
    return randomise(AOGPT(ModelConfig(**(TINY | settings))).to(dtype), seed)


def parameters(model):
    return dict(model.named_parameters())


# ---- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, 6])  # the whole block, and less than it
@every_variant
def test_token_log_probs_are_the_formulas_of_the_paper(variant, length):
    """Float64 against plain loops: both round at 1e-16, a few hundred operations deep, so 1e-9 is far above rounding
    and far below any difference of formula."""
    model = make_model(seed=length, **VARIANTS[variant])
    tokens, order = random_tokens(11, 3, length, seed=1), random_orders(3, length, seed=2)
    expected = log_probs(model.config, parameters(model), tokens, order)
    got = model.token_log_probs(tokens, order)
    assert got.shape == (3, length) and not got.requires_grad
    assert (got - expected).abs().max() < 1e-9
    assert expected.std() > 0.3  # the weights matter: these are not 9 nearly equal numbers


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_token_log_probs_for_single_tokens_and_left_to_right(seed):
    model = make_model(seed)
    for length in (1, 2, 5):
        tokens = random_tokens(11, 2, length, seed)
        order = torch.arange(length).expand(2, length)
        expected = log_probs(model.config, parameters(model), tokens, order)
        assert (model.token_log_probs(tokens, order) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("variant", ["adaln", "input", "gpt-2"])
def test_the_gradient_of_every_parameter_is_that_of_the_per_token_computation(variant):
    """The reference indexes one token's conditioning at a time, so its gradient is autograd's own; the model's adaLN
    rows come back through `PermutationGather`. Gradients here are of size 1: 1e-9 is relative too."""
    model = make_model(3, **VARIANTS[variant])
    tokens, order = random_tokens(11, 3, 7, seed=4), random_orders(3, 7, seed=5)
    weights = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    names, values = zip(*parameters(model).items(), strict=True)
    expected = torch.autograd.grad(
        -(weights * log_probs(model.config, parameters(model), tokens, order)).sum(), values
    )
    got = torch.autograd.grad((weights * model(tokens, order)).sum(), values)
    for name, a, b in zip(names, got, expected, strict=True):
        assert (a - b).abs().max() < 1e-9, name
        assert b.abs().max() > 1e-3, f"{name} has no gradient: the comparison would prove nothing"


def test_two_backward_passes_are_bitwise_equal():
    model = make_model(0, dtype=torch.float32)
    tokens, order = random_tokens(11, 32, 9, seed=0), random_orders(32, 9, seed=1)
    runs = [
        torch.autograd.grad(model(tokens, order).sum(), list(model.parameters())) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("target", ["adaln", "input", "none"])
def test_the_probabilities_of_all_sequences_sum_to_one_under_every_order(target):
    """A leak of the token to be predicted, or of a later one, would break the normalisation."""
    model = make_model(5, vocab_size=3, target=target)
    sequences = all_sequences(3, 4)
    for order in random_orders(6, 4, seed=3):
        total = (
            model.token_log_probs(sequences, order.expand(len(sequences), 4)).sum(dim=1).exp().sum()
        )
        assert abs(total - 1) < 1e-12  # 81 terms in float64


def test_the_order_of_the_context_matters_to_a_decoder():
    """Conditionals are order-dependent; without this the tests of orders elsewhere would show nothing."""
    model = make_model(0)
    tokens = random_tokens(11, 1, 6, seed=0)
    orders = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 0, 3, 1, 4, 5]])
    last = model.token_log_probs(tokens.expand(2, 6), orders)[:, 4]
    assert abs(last[0] - last[1]) > 1e-2


def test_dropout_acts_in_training_only():
    model = make_model(0, dropout=0.5)
    tokens, order = random_tokens(11, 2, 9, seed=0), random_orders(2, 9, seed=0)
    exact = make_model(0).token_log_probs(tokens, order)
    assert torch.equal(model.token_log_probs(tokens, order), exact)
    model.train()
    assert not torch.allclose(model(tokens, order), -exact, atol=1e-2)


# ---- adaLN by tables and a gather ------------------------------------------------------------------------------------


def gather_case(batch, length, width, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(length, width, generator=generator, dtype=dtype)
    order = random_orders(batch, length, seed)
    return table, order, order.argsort(dim=1)


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 5), (4, 6)])
def test_permutation_gather_passes_gradcheck(batch, length):
    table, order, inverse = gather_case(batch, length, 3, seed=batch)
    table.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: PermutationGather.apply(t, order, inverse), table)


def test_permutation_gather_equals_plain_indexing_with_its_gradient():
    table, order, inverse = gather_case(5, 8, 3, seed=0)
    weights = torch.randn(5, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs, grads = [], []
    for gather in (lambda t: PermutationGather.apply(t, order, inverse), lambda t: t[order]):
        leaf = table.clone().requires_grad_()
        out = gather(leaf)
        outputs.append(out)
        grads.append(torch.autograd.grad((out.sin() * weights).sum(), leaf)[0])
    assert torch.equal(*outputs)
    assert (
        grads[0] - grads[1]
    ).abs().max() < 1e-13  # five float64 terms a row, summed in another order


def test_permutation_gather_sums_bfloat16_gradients_in_float32():
    """4,096 gradients of one, of which bfloat16 alone (8 bits) could not count past 256."""
    table, order, inverse = gather_case(4096, 2, 1, seed=0, dtype=torch.bfloat16)
    table.requires_grad_()
    PermutationGather.apply(table, order, inverse).sum().backward()
    assert table.grad.dtype == torch.bfloat16
    assert table.grad.flatten().tolist() == [4096.0, 4096.0]


def test_modulations_hold_one_row_per_position_and_only_with_adaln():
    model = make_model(0)
    assert [tuple(t.shape) for t in model.modulations()] == [(9, 72), (9, 72), (9, 24)]
    assert make_model(0, target="input").modulations() == []


# ---- parallel targets ------------------------------------------------------------------------------------------------


def masked_by_single_orders(model, tokens, masked):
    """Each masked position alone, under the order (unmasked positions ascending, it, the rest)."""
    length = tokens.shape[1]
    result = torch.zeros(tokens.shape, dtype=torch.float64)
    for b, row in enumerate(masked.tolist()):
        context = [p for p in range(length) if not row[p]]
        for target in (p for p in range(length) if row[p]):
            order = torch.tensor([order_through(context, target, length)])
            result[b, target] = model.token_log_probs(tokens[b : b + 1], order)[0, len(context)]
    return result


@every_variant
def test_masked_log_probs_are_those_of_each_target_alone(variant):
    """Rows: random masks of several rates, all masked, none masked, one masked, one known. Same float64 arithmetic but
    for the summation order of attention, hence 1e-12."""
    model = make_model(1, **VARIANTS[variant])
    tokens = random_tokens(11, 10, 8, seed=2)
    rates = torch.tensor([0.2, 0.5, 0.8, 0.5, 0.5, 0.5])[:, None]
    masked = torch.rand(6, 8, generator=torch.Generator().manual_seed(3)) < rates
    one = torch.eye(8, dtype=torch.bool)
    masked = torch.cat(
        [masked, torch.ones(1, 8).bool(), torch.zeros(1, 8).bool(), one[:1], ~one[5:6]]
    )
    got = model.masked_log_probs(tokens, masked)
    assert (got - masked_by_single_orders(model, tokens, masked)).abs().max() < 1e-12
    assert (got[~masked] == 0).all() and (got[masked] < 0).all()


def test_masked_log_probs_do_not_look_at_masked_tokens():
    model = make_model(1)
    tokens, masked = (
        random_tokens(11, 2, 8, seed=0),
        torch.tensor([[1, 0, 1, 1, 0, 0, 1, 0]] * 2, dtype=torch.bool),
    )
    tokens[1] = tokens[0]
    tokens[1, 2] = (tokens[0, 2] + 1) % 11
    a, b = model.masked_log_probs(tokens, masked)
    others = torch.arange(8) != 2
    assert (a - b)[others].abs().max() < 1e-14 and abs(a[2] - b[2]) > 1e-3


def test_masked_log_probs_of_a_single_position():
    model = make_model(1)
    tokens = torch.tensor([[4]])
    expected = model.token_log_probs(tokens, torch.tensor([[0]]))
    assert (model.masked_log_probs(tokens, torch.tensor([[True]])) - expected).abs().max() < 1e-12


# ---- the cache -------------------------------------------------------------------------------------------------------


def cached_logits(model, tokens, order, known, sizes, spares=(0, 0, 0)):
    """Logits of every target after the first `known[b]`, decoded through the cache in groups of `sizes[b]`.

    spares: how much larger than needed the items, the width and the length of a pass are.

    sizes: (B, G), zero where a row is finished. Returns {(b, i): (group start, logits)} for step i of row b.
    """
    B, T = order.shape
    cache = KVCache(model.config, B, T, dtype=model.wte.weight.dtype)
    ordered, tables = tokens.gather(1, order), model.modulations()
    known, cached, result = known.clone(), torch.zeros(B, dtype=torch.long), {}
    for size in sizes.T:
        count = (size > 0) * (known + size - cached)
        seen = ordered.where(
            torch.arange(T) < known[:, None], 0
        )  # nobody may peek at what is not decoded yet
        sizes_of_pass = (int(count.sum()), int(count.max()), int((cached + count).max()))
        items, width, length = (v + spare for v, spare in zip(sizes_of_pass, spares, strict=True))
        feed = ParallelPass(cached, known, count, items, width, min(length, T))
        logits = model.head(model.parallel_hidden(seen, order, feed, cache, tables))
        first = (count.cumsum(0) - count).tolist()
        for b in range(B):
            for i in range(int(known[b]), int(known[b] + size[b])):
                result[b, i] = int(known[b]), logits[first[b] + i - int(cached[b])]
        cached = torch.where(size > 0, known + 1, cached).clamp(max=T)
        known = known + size
    assert (known == T).all()
    return result


GROUPS = {
    "groups of one": ([0, 0, 0], [[1] * 8] * 3),
    "groups of three": ([0, 0, 0], [[3, 3, 2]] * 3),
    "one group": ([0, 0, 0], [[8]] * 3),
    "ragged": ([0, 0, 0], [[1, 4, 2, 1], [5, 1, 2, 0], [8, 0, 0, 0]]),
    "prompts": ([3, 0, 7], [[2, 2, 1, 0], [2, 2, 2, 2], [1, 0, 0, 0]]),
}


@pytest.mark.parametrize("spares", [(0, 0, 0), (5, 3, 2)], ids=["tight", "padded"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("variant", ["adaln", "input", "sigma-gpt"])
@torch.no_grad()
def test_cached_logits_are_those_of_the_uncached_forward(variant, groups, spares):
    """Float32, logits of size 1 to 5: both ways round at about 1e-6 and differ in summation order only."""
    settings = VARIANTS[variant] | {"n_embd": 24}
    model = randomise(AOGPT(ModelConfig(**(TINY | settings))), seed=1, scale=0.7)
    tokens, order = random_tokens(11, 3, 8, seed=3), random_orders(3, 8, seed=4)
    known, sizes = map(torch.tensor, GROUPS[groups])
    decoded = cached_logits(model, tokens, order, known, sizes, spares)
    assert len(decoded) == int((8 - known).sum())
    for (b, i), (start, logits) in decoded.items():
        row = order[b].tolist()
        full = torch.tensor([order_through(row[:start], row[i], 8)])
        expected = model.head(model.hidden(tokens[b : b + 1], full))[0, start]
        assert (logits - expected).abs().max() < 1e-5, (b, i)
        assert expected.std() > 0.1


# ---- the output head -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "elements", [1, 2**25]
)  # chunks of 256 rows (the least), and one chunk for all
@pytest.mark.parametrize("tied", [False, True])
def test_head_nll_is_cross_entropy_with_its_gradients_in_chunks(monkeypatch, elements, tied):
    monkeypatch.setattr(model_module, "HEAD_CHUNK_ELEMENTS", elements)
    model = make_model(0, tied_head=tied)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 200, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    targets = random_tokens(11, 3, 200, seed=2)
    chunks = []
    model.head.register_forward_hook(lambda module, inputs, output: chunks.append(len(output)))

    got = model.head_nll(x, targets)
    assert chunks == ([256, 256, 88] if elements == 1 else [600])
    logits = x @ model.head.weight.T + model.head.bias
    expected = logits.logsumexp(-1) - logits.gather(-1, targets[..., None]).squeeze(-1)
    assert (got - expected).abs().max() < 1e-12  # float64, eleven terms a row
    leaves = [x, model.head.weight, model.head.bias]
    grads = [torch.autograd.grad((nll * weights).sum(), leaves) for nll in (got, expected)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-11  # sums of 600 float64 terms
    with torch.no_grad():
        assert torch.equal(model.head_nll(x, targets), got)


def test_head_nll_gives_the_same_parameter_gradients_whatever_the_chunk(monkeypatch):
    model = make_model(0, block_size=150)
    tokens, order = random_tokens(11, 4, 150, seed=0), random_orders(4, 150, seed=1)
    grads = []
    for elements in (1, 2**25):
        monkeypatch.setattr(model_module, "HEAD_CHUNK_ELEMENTS", elements)
        grads.append(torch.autograd.grad(model(tokens, order).mean(), list(model.parameters())))
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-12  # a mean: gradients of size 1e-2 in float64


# ---- initialisation and size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["adaln", "input"])
@pytest.mark.parametrize("seed", [0, 1])
def test_initialisation_is_a_normal_cut_at_three_deviations(target, seed):
    """A normal of deviation s cut at 3 s has deviation 0.98658 s. The sample deviation of N values is off by
    1 / sqrt(2 N) at most (relative; a cut normal has thinner tails), the mean by s / sqrt(N): five of these."""
    shape = {"vocab_size": 300, "block_size": 128, "n_layer": 3, "n_head": 2, "n_embd": 64}
    model = AOGPT(ModelConfig(**shape, target=target, norm="layernorm"))
    model.init_weights(torch.Generator().manual_seed(seed))
    pooled = []
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            std = (
                0.02 / math.sqrt(6)
                if name.endswith(("attn.proj.weight", "mlp.proj.weight"))
                else 0.02
            )
            n = p.numel()
            assert abs(p.std() / (0.98658 * std) - 1) < 5 / math.sqrt(2 * n), name
            assert abs(p.mean()) < 5 * std / math.sqrt(n), name
            assert p.abs().max() <= 3 * std * (1 + 1e-6), name
            pooled.append(p.detach().flatten() / std)
    values = torch.cat(pooled).double()
    beyond = float((values.abs() > 2).double().mean())  # normal: 0.0455 - 0.0027 of the 0.9973 kept
    assert abs(beyond - 0.04291) < 5 * math.sqrt(0.0429 / len(values))


def test_initialisation_follows_its_generator():
    a, b, c = (AOGPT(ModelConfig(**TINY)) for _ in range(3))
    for model, seed in ((a, 0), (b, 0), (c, 1)):
        model.init_weights(torch.Generator().manual_seed(seed))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)


def test_parameter_names_of_ao_gpt():
    """Checkpoints and converters build on these names."""
    block = [
        "norm1.weight",
        "norm2.weight",
        "attn.qkv.weight",
        "attn.qkv.bias",
        "attn.proj.weight",
        "attn.proj.bias",
    ]
    block += [
        "attn.q_norm.weight",
        "attn.k_norm.weight",
        "mlp.fc.weight",
        "mlp.fc.bias",
        "mlp.proj.weight",
    ]
    block += ["mlp.proj.bias", "adaln.weight", "adaln.bias"]
    expected = {
        "start",
        "wte.weight",
        "wpe.weight",
        "wtpe.weight",
        "norm_f.weight",
        "adaln_f.weight",
        "adaln_f.bias",
    }
    expected |= {"head.weight", "head.bias"} | {
        f"blocks.{i}.{name}" for i in range(2) for name in block
    }
    assert set(parameters(make_model())) == expected


def on_meta(**settings):
    with torch.device("meta"):
        return AOGPT(ModelConfig(**settings))


@pytest.mark.parametrize("layers, width, heads", [(12, 768, 12), (24, 1024, 16)])
def test_parameter_counts_of_the_published_sizes(layers, width, heads):
    V, N, D, C = 50304, 1024, width, 128
    counts = on_meta(n_layer=layers, n_embd=width, n_head=heads).num_params()
    linear = 12 * D * D + 9 * D  # qkv, projection, fc, projection with their biases
    assert counts == {
        "embeddings": V * D + (N + 1) * D + D,
        "blocks": layers * (linear + 2 * D + 2 * (D // heads)),
        "conditioning": N * C + layers * (C + 1) * 6 * D + (C + 1) * 2 * D,
        "head": D + V * D + V,
    }


@every_variant
def test_the_split_of_parameter_counts_sums_to_the_total(variant):
    model = make_model(**VARIANTS[variant])
    counts = model.num_params()
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert (counts["conditioning"] == 0) == (model.config.target == "none")


@pytest.mark.parametrize("length", [16, 64])
def test_flops_per_token_is_what_pytorch_counts(length):
    """PyTorch's own count of one forward pass, times three for forward and backward. There the tables of adaLN are
    counted, so the model has none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(
        vocab_size=96, block_size=64, n_layer=3, n_head=4, n_embd=32, target="input"
    )
    model = AOGPT(config).eval()
    tokens, order = random_tokens(96, 2, length, 0), random_orders(2, length, 0)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, order)
    assert model.flops_per_token(length) == 3 * counter.get_total_flops() / (2 * length)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["adaln", "input", "none"])
def test_training_forward_compiles_to_one_graph_once(target):
    """fullgraph=True raises on a graph break; the counter sees every graph handed to the backend."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = make_model(0, dtype=torch.float32, target=target).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in range(3):
        tokens, order = random_tokens(11, 4, 9, seed=batch), random_orders(4, 9, seed=batch + 10)
        grads = []
        for run in (compiled, model):
            model.zero_grad()
            loss = run(tokens, order)
            loss.mean().backward()
            grads.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
        for a, b in zip(*grads, strict=True):
            # Float32 in another order of summation: losses are near 3, gradients near 0.1.
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["vocab_size", "block_size", "n_layer", "n_head", "n_embd", "cond_dim"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"model\.{name} is {value}.*at least 1"):
        ModelConfig(**{name: value})


def test_width_must_divide_into_heads():
    with pytest.raises(
        ValueError, match=r"n_embd \(10\) must be a multiple of model\.n_head \(4\)"
    ):
        ModelConfig(n_embd=10, n_head=4)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_must_be_a_share(dropout):
    with pytest.raises(ValueError, match="dropout"):
        ModelConfig(dropout=dropout)


@pytest.mark.parametrize("scores", ["token_log_probs", "masked_log_probs"])
@pytest.mark.parametrize(
    "tokens, shape, words",
    [
        (torch.zeros(2, 5).long(), (2, 4), r"\(2, 5\).*\(2, 4\)"),
        (torch.zeros(5).long(), (5,), r"batch, length"),
        (torch.zeros(1, 10).long(), (1, 10), r"10 tokens.*1 to 9"),
        (torch.zeros(1, 0).long(), (1, 0), r"0 tokens.*1 to 9"),
        (torch.tensor([[0, 11]]), (1, 2), r"11.*0 to 10"),
        (torch.tensor([[0, -1]]), (1, 2), r"-1.*0 to 10"),
    ],
)
def test_scoring_refuses_what_the_model_cannot_take(scores, tokens, shape, words):
    model = make_model()
    other = (
        torch.arange(shape[-1]).expand(shape)
        if scores == "token_log_probs"
        else torch.ones(shape).bool()
    )
    with pytest.raises(ValueError, match=words):
        getattr(model, scores)(tokens, other)
