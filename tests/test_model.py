"""The decoder computes the formulas of the paper, forwards and backwards, however it is
called."""

import functools
import itertools
import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from helpers import some_slow
from reference import (
    DECODERS,
    LLAMA,
    ROTATED,
    TINY,
    TOKENS,
    log_probs,
    make_system,
    order_through,
    parameters,
    random_orders,
    random_text,
    random_tokens,
    seeded,
)

from aogpt import model as model_page
from aogpt import sampling
from aogpt.model import ModelConfig, PermutationGather, Target
from aogpt.runtime.errors import UserError
from aogpt.sampling.modes import contexts_of
from aogpt.scoring import masked_log_probs, token_log_probs
from aogpt.systems import (
    build_model,
    check_config,
    flops_per_token,
    init_weights,
    set_block_size,
)

LENGTH = TINY["block_size"]
VARIANTS = {
    **{name: (name, {}) for name in [*DECODERS, *ROTATED]},
    "no target": ("AO-GPT", {"target": "none"}),
    "no target, rotary": ("AO-GPT", {"target": "none", "position": "rotary"}),
    "target rotary, hidden start": ("target rotary", {"start": "hidden"}),
    "Llama, plain": ("Llama, plain", {}),
    "Llama, A3": ("Llama, A3", {}),
    "Llama, qk-norm, hidden start": ("Llama", {"qk_norm": True, "start": "hidden"}),
    "mixed values": ("AO-GPT", {"value_residual": True}),
    "mask_query, rotary": ("mask_query, rotary", {}),
    "mask_query, tables and rotary": ("mask_query", {"position": "both"}),
    "mask_query, layernorm, no qk-norm, tied": (
        "mask_query",
        {"norm": "layernorm", "qk_norm": False, "tied_head": True},
    ),
    "mask_query, Llama": ("mask_query", LLAMA),
    "per_block, tables and rotary": ("per_block, both", {}),
    "layernorm, tied": ("AO-GPT", {"norm": "layernorm", "tied_head": True}),
    "no bias, tanh, no qk-norm": (
        "AO-GPT",
        {"attn_bias": False, "mlp_bias": False, "gelu": "tanh", "qk_norm": False},
    ),
    "sigma-GPT without bias": (
        "sigma-GPT",
        {"attn_bias": False, "mlp_bias": False, "norm_bias": False, "qk_norm": True},
    ),
}


def make_variant(variant, seed=0, **settings):
    system, own = VARIANTS[variant]
    return make_system(system, seed, **(own | settings))


@pytest.mark.parametrize(
    "variant, length",
    some_slow(
        itertools.product(VARIANTS, [LENGTH, 6, 2, 1]),
        lambda variant, length: length == LENGTH or variant in ("AO-GPT", "two_stream"),
        "other lengths of every variant",
    ),
)
def test_a_decoder_computes_its_formulas(variant, length):
    """1e-9 is far above float64 rounding and far below any difference of formula."""
    model = make_variant(variant, seed=length)
    tokens, order = random_text(3, length, seed=1)
    order[0] = torch.arange(length)
    if model.config.l2r_only:
        order[:] = order[0]
    expected = log_probs(model.config, parameters(model), tokens, order)
    got = token_log_probs(model, tokens, order)
    assert got.shape == (3, length)
    assert not got.requires_grad
    assert (got - expected).abs().max() < 1e-9
    assert (-model(tokens, order) - expected).abs().max() < 1e-9
    # the weights matter: these are not nearly equal
    assert expected.std() > 0.3 or length < 3


@pytest.mark.parametrize(
    "variant",
    ["AO-GPT", "sigma-GPT", "GPT-2", "target rotary", "Llama"]
    + ["mask_query", "mask_query, rotary", "mask_query, Llama"],
)
def test_the_gradient_of_every_parameter_is_that_of_the_formulas(variant):
    model = make_variant(variant, 3)
    tokens, order = random_text(3, 7, seed=4)
    weights = torch.randn(3, 7, dtype=torch.float64, generator=seeded(6))
    names, values = zip(*parameters(model).items(), strict=True)
    expected = log_probs(model.config, parameters(model), tokens, order)
    expected = torch.autograd.grad(-(weights * expected).sum(), values)
    got = torch.autograd.grad((weights * model(tokens, order)).sum(), values)
    for name, a, b in zip(names, got, expected, strict=True):
        assert (a - b).abs().max() < 1e-9, name
        assert b.abs().max() > 1e-3, (
            f"{name} has no gradient: the comparison would prove nothing"
        )


@pytest.mark.parametrize("system", ["AO-GPT", "mask_query, rotary"])
def test_dropout_acts_in_training_only(system):
    """At a rate near 0, at which attention takes the path with dropout, it changes
    nothing."""
    model = make_system(system, dropout=0.5)
    tokens, order = random_text(2, 9)
    exact = token_log_probs(make_system(system), tokens, order)
    assert torch.equal(token_log_probs(model, tokens, order), exact)
    assert not torch.allclose(model.train()(tokens, order), -exact, atol=1e-2)
    model = make_system(system, dropout=1e-9).train()
    assert (model(tokens, order) + exact).abs().max() < 1e-7


def test_permutation_gather_sums_bfloat16_gradients_in_float32():
    """bfloat16 alone could not count past 256."""
    table = torch.randn(2, 1, generator=seeded(0)).bfloat16().requires_grad_()
    order = random_orders(batch_size=4096, length=2, seed=0)
    PermutationGather.apply(table, order, order.argsort(dim=1)).sum().backward()
    assert table.grad.dtype == torch.bfloat16
    assert table.grad.flatten().tolist() == [4096.0, 4096.0]


@pytest.mark.parametrize(
    "variant, length", [*((variant, 8) for variant in VARIANTS), ("AO-GPT", 1)]
)
def test_masked_log_probs_are_those_of_each_target_alone(variant, length):
    """Each under the order (unmasked positions ascending, it, the rest)."""
    model = make_variant(variant, 1)
    tokens = random_tokens(TOKENS, 10, length, seed=2)
    if model.config.l2r_only:
        with pytest.raises(UserError, match="plain GPT"):
            masked_log_probs(model, tokens, torch.ones_like(tokens, dtype=torch.bool))
        return
    rates = torch.tensor([0.2, 0.5, 0.8, 0.5, 0.5, 0.5, 1.0, 0.0])[:, None]
    masked = torch.rand(8, length, generator=seeded(3)) < rates
    one = torch.eye(length, dtype=torch.bool)
    masked = torch.cat([masked, one[:1], ~one[length // 2, None]])
    got = masked_log_probs(model, tokens, masked)
    for b, target in masked.nonzero().tolist():
        context = (~masked[b]).nonzero().flatten().tolist()
        order = torch.tensor([order_through(context, target, length)])
        alone = token_log_probs(model, tokens[b : b + 1], order)[0, len(context)]
        assert abs(got[b, target] - alone) < 1e-12
    assert (got[~masked] == 0).all()
    assert (got[masked] < 0).all()


# chunks of 256 rows, the least, and one for all
@pytest.mark.parametrize("elements", [1, 2**25])
@pytest.mark.parametrize("tied", [False, True])
def test_head_loss_is_cross_entropy_with_its_gradients_in_chunks(
    monkeypatch, elements, tied
):
    monkeypatch.setitem(model_page.CHUNK_ELEMENTS, "cpu", elements)
    model = make_system("AO-GPT", tied_head=tied)
    generator = seeded(1)
    x = torch.randn(
        3, 200, 12, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weights = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    targets = random_tokens(TOKENS, batch_size=3, length=200, seed=2)
    chunks = []
    model.head.register_forward_hook(
        lambda module, inputs, output: chunks.append(len(output))
    )

    got = model.loss(model.head_logits, x, targets)
    assert chunks == ([256, 256, 88] if elements == 1 else [600])
    logits = x @ model.head.weight.T + model.head.bias
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    assert (got - expected).abs().max() < 1e-12  # float64, eleven terms a row
    leaves = [x, model.head.weight, model.head.bias]
    grads = [
        torch.autograd.grad((nll * weights).sum(), leaves) for nll in (got, expected)
    ]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-11  # sums of 600 float64 terms
    with torch.no_grad():
        assert torch.equal(model.loss(model.head_logits, x, targets), got)


@pytest.mark.parametrize("target", ["adaln", "input"])
def test_initialisation_is_a_normal_cut_at_three_deviations(target, seed=0):
    """Deviations (0.98658 s) and means within five of their own standard deviations."""
    config = ModelConfig(
        vocab_size=300,
        block_size=128,
        n_layer=3,
        n_head=2,
        n_embd=64,
        target=target,
        norm="layernorm",
    )
    model = build_model(config)
    init_weights(model, seeded(seed))
    pooled = []
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / (math.sqrt(6) if name.endswith("proj.weight") else 1)
            n = p.numel()
            assert abs(p.std() / (0.98658 * std) - 1) < 5 / math.sqrt(2 * n), name
            assert abs(p.mean()) < 5 * std / math.sqrt(n), name
            assert p.abs().max() <= 3 * std * (1 + 1e-6), name
            pooled.append(p.detach().flatten() / std)
    values = torch.cat(pooled).double()
    # normal: 0.0455 - 0.0027 of the 0.9973 kept
    beyond = float((values.abs() > 2).double().mean())
    assert abs(beyond - 0.04291) < 5 * math.sqrt(0.0429 / len(values))


def test_parameters_of_ao_gpt_have_their_names_and_order():
    """Checkpoints build on the names; the norm of all gradients is summed in this
    order."""
    expected = "start wte.weight wpe.weight wtpe.weight".split()
    for layer in range(2):
        block = """
            norm1.weight norm2.weight
            attn.qkv.weight attn.qkv.bias attn.proj.weight attn.proj.bias
            attn.q_norm.weight attn.k_norm.weight
            mlp.fc.weight mlp.fc.bias mlp.proj.weight mlp.proj.bias
            adaln.weight adaln.bias
        """
        expected += [f"blocks.{layer}.{name}" for name in block.split()]
    expected += "norm_f.weight adaln_f.weight adaln_f.bias".split()
    expected += "head.weight head.bias".split()
    assert list(parameters(make_system("AO-GPT"))) == expected


@pytest.mark.parametrize("target", ["input", "two_stream"])
@pytest.mark.parametrize("length", [16, 64])
def test_flops_per_token_is_what_pytorch_counts(length, target):
    """Times three for forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(
        vocab_size=96, block_size=64, n_layer=3, n_head=4, n_embd=32, target=target
    )
    model = build_model(config).eval()
    tokens, order = random_text(2, length, vocab_size=96)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(tokens, order)
    flops = 3 * counter.get_total_flops()
    assert flops_per_token(config, length) == flops / (2 * length)


ENCODER = {"attention": "full", "target": "none", "mask_token": 257, "vocab_size": 320}
SIZES = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "cond_dim")
REFUSED = [({name: 0}, rf"model\.{name} is 0.*at least 1") for name in SIZES]
REFUSED += [
    *(({"dropout": p}, "model.dropout") for p in (-0.1, 1.0, float("nan"))),
    ({**ENCODER, "mask_token": None}, "mask_token is None; an encoder.*50257 for gpt2"),
    (
        {**ENCODER, "mask_token": 320},
        r"mask_token is 320.*below model\.vocab_size \(320\)",
    ),
    ({**ENCODER, "mask_token": 0}, "mask_token is 0"),
    ({"mask_token": 257}, "mask_token = 257 does not go with"),
    ({"noise": True}, "noise = True does not go with"),
    ({"target": "rotary"}, "target = 'rotary'.*set model.position to 'rotary'"),
    ({**ENCODER, "target": "adaln"}, "target = 'adaln' does not go with"),
    (
        {**ENCODER, "position": "rotary", "n_head": 4, "n_embd": 12},
        "even head width, but it is 3",
    ),
]


@pytest.mark.parametrize("settings, words", REFUSED)
def test_an_impossible_architecture_is_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        check_config(ModelConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [{"target": "two_stream"}, {"target": "mask_query"}, {"attention": "full"}],
)
def test_ao_gpt_is_not_made_of_the_configuration_of_another_class(settings):
    """It would be a decoder that does not know what to predict, without a word."""
    config = ModelConfig(n_layer=1, n_head=2, n_embd=32, **settings)
    with pytest.raises(ValueError, match="build_model"):
        model_page.AOGPT(config)


@pytest.mark.parametrize("shape", [(1, 5), (2, 4)])
def test_an_order_of_another_shape_than_the_tokens_is_refused(shape):
    tokens = torch.zeros(2, 5, dtype=torch.long)
    order = torch.arange(shape[1]).expand(shape)
    with pytest.raises(ValueError, match=r"the order is .*, the tokens \(2, 5\)"):
        make_system("AO-GPT")(tokens, order)


@pytest.mark.parametrize("system", ["AO-GPT", "two_stream", "mask_query"])
def test_a_row_that_is_no_permutation_raises_in_every_pass(system):
    """No check of values runs in training; a loss of memory that nobody wrote would be
    wrong without a word."""
    model = make_system(system)
    tokens = torch.zeros(2, 5).long()
    for row in ([0, 3, 1, 3, 2], [4, 4, 4, 4, 4], [0, 1, 2, 3, 5]):
        order = torch.tensor([[0, 1, 2, 3, 4], row])
        for _ in range(5):
            message = "out of (bounds|range)"
            with pytest.raises((RuntimeError, IndexError), match=message):
                model(tokens, order)


@pytest.mark.parametrize(
    "tokens, shape, words",
    [
        (torch.zeros(2, 5).long(), (2, 4), r"\(2, 5\).*\(2, 4\)"),
        (torch.zeros(5).long(), (5,), r"batch, length"),
        (torch.zeros(1, 10).long(), (1, 10), r"\(1, 10\).*1 to 9"),
        (torch.tensor([[0, 12]]), (1, 2), r"12.*0 to 11"),
    ],
)
@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
def test_scoring_refuses_what_the_model_cannot_take(system, tokens, shape, words):
    model = make_system(system)
    with pytest.raises(ValueError, match=words):
        masked_log_probs(model, tokens, torch.ones(shape).bool())
    with pytest.raises(ValueError, match=words):
        token_log_probs(model, tokens, torch.arange(shape[-1]).expand(shape))


@pytest.mark.parametrize("system", ["AO-GPT", "RADD"])
def test_an_order_that_is_no_permutation_is_refused(system):
    tokens = torch.zeros(1, 5).long()
    message = "every row of order must be a permutation of 0..4"
    with pytest.raises(ValueError, match=message):
        token_log_probs(make_system(system), tokens, torch.tensor([[0, 3, 1, 3, 2]]))


@pytest.mark.parametrize("system", ["target rotary", "mask_query, rotary"])
def test_a_model_without_tables_takes_other_lengths_and_agrees_on_short_ones(system):
    message = f"no other block size than {LENGTH}, such as {LENGTH + 1}.*wtpe"
    with pytest.raises(ValueError, match=message):
        set_block_size(make_variant("AO-GPT, rotary"), LENGTH + 1)
    model = make_system(system, 4)
    tokens, order = random_text(3, LENGTH, seed=1)
    expected = token_log_probs(model, tokens, order)
    set_block_size(model, 2 * LENGTH)
    assert (token_log_probs(model, tokens, order) - expected).abs().max() < 1e-12
    longer, order = random_text(2, 2 * LENGTH, seed=3)
    reference = log_probs(model.config, parameters(model), longer, order)
    assert (token_log_probs(model, longer, order) - reference).abs().max() < 1e-9


def test_every_way_to_condition_on_the_target_is_compared_with_its_formulas():
    """One that no code reads would train and score without a word."""
    targets = {make_variant(variant).config.target for variant in VARIANTS}
    assert targets == set(get_args(Target))


@pytest.mark.parametrize("dtype", [torch.long, torch.uint8, torch.float32])
def test_a_mask_of_another_type_is_refused_wherever_one_is_taken(dtype):
    tokens = random_tokens(vocab_size=11, batch_size=2, length=4, seed=0)
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]]).to(dtype)
    decoder, two_stream, encoder = map(make_system, ("AO-GPT", "two_stream", "RADD"))
    for take in (
        *(
            functools.partial(masked_log_probs, m, tokens)
            for m in (decoder, two_stream, encoder)
        ),
        lambda m: encoder(tokens, m),
        lambda m: encoder.masked_hidden(tokens, m),
        lambda m: sampling.Samples(2, 4, given=m),
        lambda m: contexts_of(tokens, m, torch.tensor([4, 4])),
    ):
        take(mask.bool())
        with pytest.raises(UserError, match=f"is {dtype}.* give a boolean tensor"):
            take(mask)


@pytest.mark.parametrize(
    "system", ["AO-GPT", "two_stream", "AO-GPT, rotary", "RADD", "SEDD"]
)
def test_masked_tokens_of_a_shorter_row_are_those_of_the_row_alone(system):
    model = make_system(system)
    tokens = random_tokens(vocab_size=11, batch_size=3, length=6, seed=0)
    masked = torch.rand(3, 6) < 0.5
    lengths = torch.tensor([6, 2, 4])
    masked[:, 0] = True
    got = masked_log_probs(model, tokens, masked, lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = masked_log_probs(model, tokens[b : b + 1, :n], masked[b : b + 1, :n])[0]
        assert (got[b, :n] - alone).abs().max() < 1e-5
        assert not got[b, n:].any()
