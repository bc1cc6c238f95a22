"""Queries that are a [MASK] at the target (`model.target = "mask_query"`)."""

import dataclasses
import json
import math

import pytest
import torch
from helpers import ALONE, read_lines, tiny_config
from reference import (
    LLAMA,
    OTHERS,
    TINY,
    TOKENS,
    log_probs,
    make_system,
    order_through,
    random_orders,
    random_tokens,
    seeded,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import eval_ppl
import train
from aogpt.model import ModelConfig
from aogpt.objectives import ao_ar_loss
from aogpt.scoring import (
    group_starts,
    masked_log_probs,
    masked_logits,
    token_log_probs,
)
from aogpt.systems import build_model, flops_per_token, parameter_counts, set_block_size
from aogpt.training.warm_start import warm_start

LENGTH = TINY["block_size"]
VARIANTS = {
    "learned": {},
    "rotary": OTHERS["mask_query, rotary"],
    "both": {"position": "both"},
    "layernorm, no qk-norm, tied": {
        "norm": "layernorm",
        "qk_norm": False,
        "tied_head": True,
    },
    "Llama": LLAMA,
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_variant(variant, seed=0, **settings):
    return make_system(
        "mask_query", seed, **VARIANTS[variant] | {"target": "mask_query"} | settings
    )


def parameters(model):
    return dict(model.named_parameters())


@every_variant
@pytest.mark.parametrize("group", [1, 2, 3, LENGTH])
@torch.no_grad()
def test_it_computes_its_formulas_in_groups_of_any_size(group, variant):
    """1e-9 is far above float64 rounding and far below any difference of formula."""
    model = make_variant(variant, seed=group)
    tokens, order = random_tokens(TOKENS, 3, LENGTH, 1), random_orders(3, LENGTH, 2)
    expected = log_probs(model.config, parameters(model), tokens, order, group)
    assert (
        -model(tokens, order, group_starts(order, group)) - expected
    ).abs().max() < 1e-9
    assert (token_log_probs(model, tokens, order, group) - expected).abs().max() < 1e-9
    logits = model.head_logits(model.hidden(tokens, order)).log_softmax(dim=-1)
    if group == 1:  # attention without a mask
        assert (-model(tokens, order) - expected).abs().max() < 1e-9
        own = logits.gather(2, tokens.gather(1, order)[..., None]).squeeze(2)
        assert (own - expected).abs().max() < 1e-9
    assert expected.std() > 0.3


@every_variant
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_gradient_of_every_parameter_is_that_of_the_per_token_computation(
    length, variant
):
    model = make_variant(variant, 3)
    tokens, order = (
        random_tokens(TOKENS, 3, length, seed=4),
        random_orders(3, length, seed=5),
    )
    weights = torch.randn(3, length, dtype=torch.float64, generator=seeded(6))
    names, values = zip(*parameters(model).items(), strict=True)
    expected = log_probs(model.config, parameters(model), tokens, order)
    expected = torch.autograd.grad(
        -(weights * expected).sum(), values, allow_unused=True
    )
    got = torch.autograd.grad(
        (weights * model(tokens, order)).sum(), values, allow_unused=True
    )
    for name, a, b in zip(names, got, expected, strict=True):
        a, b = (torch.zeros(()) if grad is None else grad for grad in (a, b))
        assert (a - b).abs().max() < 1e-9, name
        assert length < 7 or b.abs().max() > 1e-3, (
            f"{name} has no gradient: this proves nothing"
        )


@every_variant
@torch.no_grad()
def test_a_step_depends_on_the_tokens_before_it_and_on_no_other(variant):
    model = make_variant(variant, 4)
    tokens, order = random_tokens(TOKENS, 1, LENGTH, 0), random_orders(1, LENGTH, 1)
    before = model.head_logits(model.hidden(tokens, order))
    for step in range(LENGTH):
        changed = tokens.clone()
        changed[0, order[0, step]] = (tokens[0, order[0, step]] + 1) % TOKENS
        moved = (model.logits(changed, order) - before).abs().amax(dim=(0, 2))
        assert (moved[: step + 1] == 0).all()
        assert (moved[step + 1 :] > 1e-6).all()


@every_variant
@torch.no_grad()
def test_masked_tokens_are_scored_as_each_target_alone(variant):
    model = make_variant(variant, 1)
    tokens = random_tokens(TOKENS, 8, LENGTH, seed=2)
    masked = torch.rand(8, LENGTH, generator=seeded(3)) < 0.5
    masked[0], masked[1] = True, False
    got = masked_log_probs(model, tokens, masked)
    logits = iter(masked_logits(model, tokens, masked).log_softmax(dim=-1))
    for b, target in masked.nonzero().tolist():
        context = (~masked[b]).nonzero().flatten().tolist()
        order = torch.tensor([order_through(context, target, LENGTH)])
        alone = token_log_probs(model, tokens[b : b + 1], order)[0, len(context)]
        assert abs(got[b, target] - alone) < 1e-12
        assert abs(next(logits)[tokens[b, target]] - alone) < 1e-12
    assert (got[~masked] == 0).all() and (got[masked] < 0).all()


def test_dropout_acts_in_training_only_on_attention_too():
    """With dropout, attention takes the path with a mask: at a rate near 0 it is the
    same."""
    tokens, order = random_tokens(TOKENS, 2, LENGTH, 0), random_orders(2, LENGTH, 0)
    exact = token_log_probs(make_variant("rotary"), tokens, order)
    model = make_variant("rotary", dropout=0.5)
    assert torch.equal(token_log_probs(model, tokens, order), exact)
    assert not torch.allclose(model.train()(tokens, order), -exact, atol=1e-2)
    model = make_variant("rotary", dropout=1e-9).train()
    assert (model(tokens, order) + exact).abs().max() < 1e-7


def test_a_training_step_in_bfloat16_is_near_the_exact_one():
    model = make_variant("rotary", dtype=torch.float32)
    tokens, order = random_tokens(TOKENS, 4, LENGTH, 0), random_orders(4, LENGTH, 0)
    exact = model(tokens, order)
    exact.mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens, order)
    rounded.mean().backward()
    assert (rounded - exact).abs().max() < 0.3 and exact.std() > 0.3
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).norm() < 0.1 * gradients[name].norm(), name


def test_its_parameters_and_its_length():
    model = make_variant("learned")
    names = set(parameters(make_system("AO-GPT", target="none")))
    assert set(parameters(model)) == names - {"start"} | {"query"}
    assert model.wpe.weight.shape == (LENGTH, TINY["n_embd"])  # no row for [None]
    assert parameter_counts(model)["conditioning"] == TINY["n_embd"]
    with pytest.raises(ValueError, match=f"no other block size than {LENGTH}"):
        set_block_size(model, LENGTH + 1)
    model = make_variant("rotary")
    set_block_size(model, LENGTH + 3)
    tokens, order = (
        random_tokens(TOKENS, 2, LENGTH + 3, 0),
        random_orders(2, LENGTH + 3, 1),
    )
    expected = log_probs(model.config, parameters(model), tokens, order)
    assert (token_log_probs(model, tokens, order) - expected).abs().max() < 1e-9


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"start": "hidden"}, "model.start"),
        ({"query_at": "before_target"}, "model.query_at"),
    ],
)
def test_settings_without_effect_are_refused(settings, words):
    with pytest.raises(ValueError, match=rf"{words}.*leave {words} out"):
        build_model(ModelConfig(**TINY | {"target": "mask_query"} | settings))


@pytest.mark.parametrize("position", ["learned", "rotary", "both"])
@torch.no_grad()
def test_it_starts_from_a_plain_gpt_whose_states_its_contents_have(position):
    """From left to right, contents are the inputs of a GPT without [None]."""
    source = make_system("AO-GPT", 1, target="none", position=position, start="hidden")
    config = ModelConfig(**TINY | {"target": "mask_query", "position": position})
    model = build_model(config).double().eval()
    warm_start(model, source)
    tokens, order = (
        random_tokens(TOKENS, 2, LENGTH, 0),
        torch.arange(LENGTH).expand(2, LENGTH),
    )
    states = []
    for each in (model, source):
        each.blocks[0].register_forward_hook(
            lambda block, inputs, out: states.append(out[0])
        )
        each.head_logits(each.hidden(tokens, order))
    # Input i + 1 of the GPT is content i.
    assert (states[0][:, : LENGTH - 1] - states[1][:, 1:]).abs().max() < 1e-12
    own = make_variant("learned", 2)
    again = build_model(own.config).double().eval()
    warm_start(again, own)
    assert torch.equal(
        again.head_logits(again.hidden(tokens, order)),
        own.head_logits(own.hidden(tokens, order)),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "model__position": "rotary",
            "model__value_residual": True,
            "model__dropout": 0.0,
        }
        | {"optim__kind": "muon"},
        {"train__activation_checkpointing": "block", "train__dtype": "bfloat16"},
        {"train__activation_checkpointing": "selective", "model__dropout": 0.0},
    ],
    ids=["dropout", "fast", "checkpointed", "selective"],
)
def test_a_run_trains_resumes_and_is_evaluated(script, data, tmp_path, changes):
    config = tiny_config(data, tmp_path, steps=8, model__target="mask_query", **changes)
    train.train(config, ALONE)
    longer = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=40)
    )
    train.train(longer, ALONE)
    losses = [
        row["loss"]
        for row in read_lines(config.run_folder / "metrics.jsonl")
        if "loss" in row
    ]
    assert len(losses) == 40 and losses[-1] < losses[0] - 0.5
    report = tmp_path / "report.json"
    words = [
        config.run_folder,
        "--datasets",
        data,
        "--max-sequences",
        8,
        "--json",
        report,
    ]
    status, _, err = script(eval_ppl, *words)
    assert status == 0, err
    for result in json.loads(report.read_text())["results"]:
        assert 0 < result["nll"] < math.log(257)


def test_its_loss_is_the_any_order_loss():
    model = make_variant("rotary")
    tokens, order = random_tokens(TOKENS, 3, LENGTH, 1), random_orders(3, LENGTH, 2)
    expected = -log_probs(model.config, parameters(model), tokens, order).mean()
    assert abs(ao_ar_loss(model, tokens, order) - expected) < 1e-9


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2, "mlp": "swiglu"}])
def test_flops_of_its_matrices_are_what_pytorch_counts(settings):
    """Times three for forward and backward."""
    config = ModelConfig(96, 64, 3, 4, 32, target="mask_query", **settings)
    model = build_model(config).eval()
    tokens, order = random_tokens(96, 2, 16, 0), random_orders(2, 16, 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, order)
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(n for operation, n in counts.items() if "mm" in str(operation))
    assert flops_per_token(config, 0) == 3 * matrices / (2 * 16)
    # Contents attend in all blocks but the last one, queries in all.
    attention = 12 * 5 * config.n_embd
    assert flops_per_token(config, 16) - flops_per_token(config, 0) == 16 * attention


def test_its_training_forward_compiles_to_one_graph_once():
    """fullgraph=True raises on a graph break; the counter sees every graph."""
    torch._dynamo.reset()
    model = make_variant("rotary", dtype=torch.float32).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(2):
        tokens, order = (
            random_tokens(TOKENS, 4, LENGTH, seed),
            random_orders(4, LENGTH, seed),
        )
        results = []
        for run in (compiled, model):
            model.zero_grad()
            loss = run(tokens, order)
            loss.mean().backward()
            results.append(
                (loss.detach(), *(p.grad.clone() for p in model.parameters()))
            )
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()
