"""Released weights: every layout gives the probabilities of its formulas; whatever else is there is
refused; convert.

The formulas are written out here in float64 on the tensors under the names of the release. They use
no code of the project. GPT-2 is compared with `transformers` itself.
"""

import dataclasses
import json
import math
import os
import random
import shutil
import zipfile

import pytest
import safetensors.torch
import torch
from helpers import ROOT, assert_user_error, flip_byte, limited_file_size, make_data, run_script
from reference import random_orders, random_tokens

import eval_ppl
import sample
from checkpoints import load as checkpoint
from checkpoints import on_disk, store
from checkpoints.errors import CheckpointError
from convert import convert
from data.tokenizers import get_tokenizer
from model import ModelConfig
from runtime.command_line import run_script as run_main
from training.averages import EMA
from training.config import Config
from training.state import Progress, State, named_tensors, plain_values
from training.warm_start import warm_start
from variants import build_model

VOCAB, WIDTH, LAYERS, HEADS, BLOCK = 37, 24, 2, 3, 11
TOKENS = 31  # of the tokenizer, where [MASK] follows
COND = 20  # width of SEDD's condition


# ---- released files with random weights ----------------------------------------------------------


def fill(shapes, seed):
    """Random values of a size that matters, {name: shape} -> {name: float32 tensor}."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            noise = 0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
        # wte, wpe, wtpe, wnonee keep their size
        elif "embed" not in name and ".w" not in name.removesuffix(".weight"):
            noise = noise / math.sqrt(shape[1])
        state[name] = noise
    return state


def ao_gpt_shapes():
    """Names and shapes of an AO-GPT in the order of its parameters()."""
    shapes = {
        "transformer.wte.weight": (VOCAB, WIDTH),
        "transformer.wpe.weight": (BLOCK + 1, WIDTH),
        "transformer.wtpe.weight": (BLOCK, 128),
        "transformer.wnonee.weight": (1, WIDTH),
    }
    for i in range(LAYERS):
        h = f"transformer.h.{i}."
        shapes |= {h + "ln_1.weight": (WIDTH,)}
        shapes |= {
            h + "attn.c_attn.weight": (3 * WIDTH, WIDTH),
            h + "attn.c_attn.bias": (3 * WIDTH,),
        }
        shapes |= {h + "attn.c_proj.weight": (WIDTH, WIDTH), h + "attn.c_proj.bias": (WIDTH,)}
        shapes |= {
            h + "attn.q_norm.weight": (WIDTH // HEADS,),
            h + "attn.k_norm.weight": (WIDTH // HEADS,),
        }
        shapes |= {h + "ln_2.weight": (WIDTH,)}
        shapes |= {h + "mlp.c_fc.weight": (4 * WIDTH, WIDTH), h + "mlp.c_fc.bias": (4 * WIDTH,)}
        shapes |= {h + "mlp.c_proj.weight": (WIDTH, 4 * WIDTH), h + "mlp.c_proj.bias": (WIDTH,)}
        shapes |= {h + "adaLN.1.weight": (6 * WIDTH, 128), h + "adaLN.1.bias": (6 * WIDTH,)}
    f = "transformer.final_layer."
    shapes |= {f + "ln_f.weight": (WIDTH,)}
    shapes |= {f + "adaLN_final.1.weight": (2 * WIDTH, 128), f + "adaLN_final.1.bias": (2 * WIDTH,)}
    return shapes | {"lm_head.weight": (VOCAB, WIDTH), "lm_head.bias": (VOCAB,)}


def sigma_gpt_shapes(bias):
    """The same for a sigma-GPT; the head is the token table."""
    shapes = {
        "transformer.wte.weight": (VOCAB, WIDTH),
        "transformer.wpe.weight": (BLOCK + 1, WIDTH),
        "transformer.wtpe.weight": (BLOCK, WIDTH),
        "transformer.wnonee.weight": (1, WIDTH),
    }
    for i in range(LAYERS):
        h = f"transformer.h.{i}."
        shapes |= {h + "ln_1.weight": (WIDTH,), h + "ln_1.bias": (WIDTH,)}
        shapes |= {
            h + "attn.c_attn.weight": (3 * WIDTH, WIDTH),
            h + "attn.c_attn.bias": (3 * WIDTH,),
        }
        shapes |= {h + "attn.c_proj.weight": (WIDTH, WIDTH), h + "attn.c_proj.bias": (WIDTH,)}
        shapes |= {h + "ln_2.weight": (WIDTH,), h + "ln_2.bias": (WIDTH,)}
        shapes |= {h + "mlp.c_fc.weight": (4 * WIDTH, WIDTH), h + "mlp.c_fc.bias": (4 * WIDTH,)}
        shapes |= {h + "mlp.c_proj.weight": (WIDTH, 4 * WIDTH), h + "mlp.c_proj.bias": (WIDTH,)}
    shapes |= {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    return {name: shape for name, shape in shapes.items() if bias or not name.endswith("bias")}


def container(layout, prefix="", **changes):
    """(contents of the .pt file, last weights, averaged weights) of "AO-GPT", "sigma-GPT" or
    "sigma-GPT, no bias"."""
    bias = layout != "sigma-GPT, no bias"
    shapes = ao_gpt_shapes() if layout == "AO-GPT" else sigma_gpt_shapes(bias)
    raw, average = fill(shapes, 1), fill(shapes, 2)
    saved = raw if layout == "AO-GPT" else raw | {"lm_head.weight": raw["transformer.wte.weight"]}
    args = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": BLOCK, "bias": bias}
    contents = {
        "model_args": args | {"vocab_size": VOCAB, "dropout": 0.0},
        "model": {prefix + name: tensor for name, tensor in saved.items()},
        "ema_model": {"decay": 0.9999, "num_updates": 7, "shadow_params": list(average.values())},
        "iter_num": 1234,
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
        "optimizer": {"state": {}, "param_groups": [{"lr": 6e-4, "params": [0, 1]}]},
        "best_val_loss": torch.tensor(3.5),
    }
    return contents | changes, raw, average


def diffusion(layout):
    """(config.json, state dict) of "RADD" or "SEDD"."""
    rows, sedd = TOKENS + 1, layout == "SEDD"
    shapes = {"vocab_embed.embedding": (rows, WIDTH)}
    if sedd:
        shapes |= {"sigma_map.mlp.0.weight": (COND, 256), "sigma_map.mlp.0.bias": (COND,)}
        shapes |= {"sigma_map.mlp.2.weight": (COND, COND), "sigma_map.mlp.2.bias": (COND,)}
    for i in range(LAYERS):
        b = f"blocks.{i}."
        shapes |= {b + "norm1.weight": (WIDTH,), b + "norm2.weight": (WIDTH,)}
        shapes |= {b + "attn_qkv.weight": (3 * WIDTH, WIDTH), b + "attn_out.weight": (WIDTH, WIDTH)}
        shapes |= {b + "mlp.0.weight": (4 * WIDTH, WIDTH), b + "mlp.0.bias": (4 * WIDTH,)}
        shapes |= {b + "mlp.2.weight": (WIDTH, 4 * WIDTH), b + "mlp.2.bias": (WIDTH,)}
        if sedd:
            shapes |= {
                b + "adaLN_modulation.weight": (6 * WIDTH, COND),
                b + "adaLN_modulation.bias": (6 * WIDTH,),
            }
        else:
            shapes |= {b + "norm1.bias": (WIDTH,), b + "norm2.bias": (WIDTH,)}
    o = "output_layer."
    shapes |= {
        o + "norm_final.weight": (WIDTH,),
        o + "linear.weight": (rows, WIDTH),
        o + "linear.bias": (rows,),
    }
    if sedd:
        shapes |= {
            o + "adaLN_modulation.weight": (2 * WIDTH, COND),
            o + "adaLN_modulation.bias": (2 * WIDTH,),
        }
    else:
        shapes |= {o + "norm_final.bias": (WIDTH,)}
    size = WIDTH // HEADS
    state = fill(shapes, 3) | {
        "rotary_emb.inv_freq": 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
    }
    settings = {
        "hidden_size": WIDTH,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
        "dropout": 0.1,
        "name": "small",
    }
    settings |= {"cond_dim": COND, "scale_by_sigma": True, "length": BLOCK} if sedd else {}
    return {"ngpus": 8, "tokens": TOKENS, "graph": {"type": "absorb"}, "model": settings}, state


def write_folder(folder, settings, state, name="model.safetensors"):
    """A Hugging Face folder; the .bin as it was written before PyTorch 1.6."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if name.endswith("safetensors"):
        state = {key: tensor.clone().contiguous() for key, tensor in state.items()}
        safetensors.torch.save_file(state, folder / name, metadata={"format": "pt"})
    else:
        torch.save(state, folder / name, _use_new_zipfile_serialization=False)
    return folder


# ---- the formulas, in float64 --------------------------------------------------------------------


def layer_norm(p, name, x):
    x = (
        (x - x.mean(-1, keepdim=True))
        / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        * p[name + "weight"]
    )
    return x + p.get(name + "bias", 0)


def rms_norm(p, name, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[name + "weight"]


def linear(p, name, x):
    return x @ p[name + "weight"].T + p.get(name + "bias", 0)


def silu(x):
    return x / (1 + (-x).exp())


def gelu_erf(x):
    return x * (1 + (x / math.sqrt(2)).erf()) / 2


def gelu_tanh(x):
    return x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


def modulated(x, shift, scale):
    return x * (1 + scale) + shift


def attend(q, k, v, seen):
    """(T, D) each; seen (T, T) says which keys a query sees."""
    outputs = []
    for q_h, k_h, v_h in zip(*(t.chunk(HEADS, dim=-1) for t in (q, k, v)), strict=True):
        scores = (q_h @ k_h.T / math.sqrt(q_h.shape[-1])).masked_fill(~seen, -math.inf)
        outputs.append(scores.softmax(-1) @ v_h)
    return torch.cat(outputs, dim=-1)


def decoder_log_probs(state, tokens, order):
    """Of an AO-GPT or a sigma-GPT: log p(x[s[i]] | x[s[:i]]), (B, T)."""
    p = {name.removeprefix("transformer."): t.double() for name, t in state.items()}
    adaln = "final_layer.ln_f.weight" in p
    norm, rows = rms_norm if adaln else layer_norm, []
    for x, s in zip(tokens, order, strict=True):
        h = torch.cat([p["wnonee.weight"], p["wte.weight"][x[s[:-1]]]])
        h = h + p["wpe.weight"][torch.cat([torch.zeros(1, dtype=torch.long), s[:-1] + 1])]
        c = p["wtpe.weight"][s]
        h = h if adaln else h + c
        seen = torch.ones(len(s), len(s)).tril().bool()
        for b in (f"h.{i}." for i in range(LAYERS)):
            none = torch.zeros(()), torch.zeros(()), torch.ones(())
            shift1, scale1, gate1, shift2, scale2, gate2 = (
                linear(p, b + "adaLN.1.", silu(c)).split(WIDTH, dim=-1) if adaln else none + none
            )
            a = linear(p, b + "attn.c_attn.", modulated(norm(p, b + "ln_1.", h), shift1, scale1))
            q, k, v = a.split(WIDTH, dim=-1)
            if adaln:
                q, k = (
                    torch.cat(
                        [rms_norm(p, b + name, head) for head in t.chunk(HEADS, dim=-1)], dim=-1
                    )
                    for name, t in (("attn.q_norm.", q), ("attn.k_norm.", k))
                )
            h = h + gate1 * linear(p, b + "attn.c_proj.", attend(q, k, v, seen))
            m = gelu_erf(
                linear(p, b + "mlp.c_fc.", modulated(norm(p, b + "ln_2.", h), shift2, scale2))
            )
            h = h + gate2 * linear(p, b + "mlp.c_proj.", m)
        if adaln:
            h = modulated(
                norm(p, "final_layer.ln_f.", h),
                *linear(p, "final_layer.adaLN_final.1.", silu(c)).chunk(2, -1),
            )
            logits = linear(p, "lm_head.", h)
        else:
            logits = norm(p, "ln_f.", h) @ p["wte.weight"].T
        rows.append(logits.log_softmax(-1)[torch.arange(len(s)), x[s]])
    return torch.stack(rows)


def turned(x):
    """Rotary positions: in every head, components j and j + half turn together by position *
    10000^(-j / half)."""
    T, half = x.shape[0], WIDTH // HEADS // 2
    angle = torch.arange(T).double()[:, None] / 10000 ** (torch.arange(half).double() / half)
    cos, sin, heads = angle.cos(), angle.sin(), []
    for head in x.chunk(HEADS, dim=-1):
        a, b = head[:, :half], head[:, half:]
        heads += [a * cos - b * sin, a * sin + b * cos]
    return torch.cat(heads, dim=-1)


def encoder_outputs(state, tokens, sigma=None):
    """Of one sequence with [MASK] in place, (T,): RADD's logits or, at noise level sigma, SEDD's,
    (T, V + 1)."""
    p = {name: t.double() for name, t in state.items()}
    h, c = p["vocab_embed.embedding"][tokens], None
    if sigma is not None:
        angle = sigma * torch.exp(-math.log(10000) * torch.arange(128).double() / 128)
        c = torch.cat([angle.cos(), angle.sin()])
        c = silu(linear(p, "sigma_map.mlp.2.", silu(linear(p, "sigma_map.mlp.0.", c))))
    seen = torch.ones(len(tokens), len(tokens)).bool()
    none = torch.zeros(()), torch.zeros(()), torch.ones(())
    for b in (f"blocks.{i}." for i in range(LAYERS)):
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            none + none if c is None else linear(p, b + "adaLN_modulation.", c).split(WIDTH)
        )
        a = linear(p, b + "attn_qkv.", modulated(layer_norm(p, b + "norm1.", h), shift1, scale1))
        q, k, v = a.split(WIDTH, dim=-1)
        h = h + gate1 * linear(p, b + "attn_out.", attend(turned(q), turned(k), v, seen))
        m = gelu_tanh(
            linear(p, b + "mlp.0.", modulated(layer_norm(p, b + "norm2.", h), shift2, scale2))
        )
        h = h + gate2 * linear(p, b + "mlp.2.", m)
    h = layer_norm(p, "output_layer.norm_final.", h)
    if c is not None:
        h = modulated(h, *linear(p, "output_layer.adaLN_modulation.", c).chunk(2))
    return linear(p, "output_layer.linear.", h)


# ---- AO-GPT and sigma-GPT ------------------------------------------------------------------------

PT_LAYOUTS = ("AO-GPT", "sigma-GPT", "sigma-GPT, no bias")


@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("layout", PT_LAYOUTS)
def test_a_released_decoder_gives_the_probabilities_of_its_formulas(
    tmp_path, layout, prefix, weights
):
    contents, raw, average = container(layout, prefix)
    torch.save(contents, tmp_path / "released.pt")
    loaded = checkpoint.load(
        tmp_path / "released.pt", **({} if weights == "ema" else {"weights": "raw"})
    )
    assert (loaded.weights, loaded.step, loaded.scored_from) == (weights, 1234, 0)
    assert (loaded.tokenizer, loaded.vocab_size, loaded.path) == (
        "gpt2",
        VOCAB,
        str(tmp_path / "released.pt"),
    )
    assert not loaded.model.training
    tokens = random_tokens(VOCAB, 2, BLOCK, seed=0)
    order = torch.cat([random_orders(1, BLOCK, seed=0), torch.arange(BLOCK)[None]])
    expected = {
        "ema": decoder_log_probs(average, tokens, order),
        "raw": decoder_log_probs(raw, tokens, order),
    }
    got = loaded.model.double().token_log_probs(tokens, order)
    # float64 rounding only: the weights themselves are the file's, exactly
    assert (got - expected[weights]).abs().max() < 1e-9
    assert (expected["ema"] - expected["raw"]).abs().max() > 0.1


@pytest.mark.parametrize("layout", PT_LAYOUTS)
def test_the_average_follows_the_order_of_the_parameters_however_the_names_lie_in_the_file(
    tmp_path, layout
):
    contents, _, average = container(layout)
    contents["model"] = dict(reversed(contents["model"].items()))
    torch.save(contents, tmp_path / "released.pt")
    tokens, order = random_tokens(VOCAB, 1, 7, seed=1), random_orders(1, 7, seed=1)
    got = checkpoint.load_model(tmp_path / "released.pt").double().token_log_probs(tokens, order)
    assert (got - decoder_log_probs(average, tokens, order)).abs().max() < 1e-9


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(iter_num=-5), "iter_num is -5"),
        (lambda c: c.update(iter_num=math.nan), "iter_num is nan"),
        (
            lambda c: c["model"].update({"module.lm_head.weight": torch.zeros(1)}),
            "the same name but for a prefix",
        ),
    ],
)
def test_what_no_release_holds_is_refused(tmp_path, change, message):
    contents, _, _ = container("AO-GPT")
    change(contents)
    torch.save(contents, tmp_path / "released.pt")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "released.pt")


@pytest.mark.parametrize("old", [True, False])
def test_a_format_without_checksums_is_named(tmp_path, capsys, old):
    contents, _, _ = container("AO-GPT")
    path = tmp_path / "released.pt"
    torch.save(contents, path, _use_new_zipfile_serialization=not old)
    checkpoint.load(path)
    assert ("has no checksums" in capsys.readouterr().err) == old


def test_without_an_average_the_last_weights_are_used_and_reported(tmp_path):
    contents, raw, _ = container("AO-GPT")
    del contents["ema_model"], contents["iter_num"]
    torch.save(contents, tmp_path / "released.pt", _use_new_zipfile_serialization=False)
    loaded = checkpoint.load(tmp_path / "released.pt")
    assert (loaded.weights, loaded.step) == ("raw", 0) and "raw weights" in loaded.describe()
    assert torch.equal(loaded.model.head.weight, raw["lm_head.weight"])


def test_a_vocabulary_that_is_padded_counts_as_the_tokenizers(tmp_path):
    contents, _, _ = container("sigma-GPT", ema_model=None)
    contents["model_args"]["vocab_size"] = 50304
    for name in ("transformer.wte.weight", "lm_head.weight"):
        contents["model"][name] = torch.zeros(50304, WIDTH)
    torch.save(contents, tmp_path / "released.pt")
    loaded = checkpoint.load(tmp_path / "released.pt")
    assert (loaded.vocab_size, loaded.model.config.vocab_size) == (50257, 50304)


def test_a_folder_with_one_pt_file_is_that_file_and_with_two_an_error_that_names_them(tmp_path):
    torch.save(container("AO-GPT")[0], tmp_path / "small.pt")
    assert checkpoint.load(tmp_path).path == str(tmp_path / "small.pt")
    shutil.copy(tmp_path / "small.pt", tmp_path / "medium.pt")
    with pytest.raises(CheckpointError, match=r"medium\.pt, small\.pt; give the path of one"):
        checkpoint.load(tmp_path)


# ---- RADD and SEDD -------------------------------------------------------------------------------


def masked_case(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, masked = (
        random_tokens(TOKENS, 3, BLOCK, seed),
        torch.rand(3, BLOCK, generator=generator) < 0.5,
    )
    masked[0] = True
    return tokens, masked, torch.where(masked, TOKENS, tokens)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_radd_gives_the_probabilities_of_its_formulas(tmp_path, file):
    settings, state = diffusion("RADD")
    loaded = checkpoint.load(write_folder(tmp_path, settings, state, file))
    assert (loaded.tokenizer, loaded.vocab_size, loaded.weights, loaded.step) == (
        "gpt2",
        TOKENS,
        "raw",
        0,
    )
    assert loaded.model.config.block_size == 1024  # the file does not say
    tokens, masked, inputs = masked_case(0)
    got = loaded.model.double().masked_log_probs(tokens, masked)
    for b in range(3):
        logits = encoder_outputs(state, inputs[b])[:, :TOKENS]
        expected = logits.log_softmax(-1)[torch.arange(BLOCK), tokens[b]] * masked[b]
        assert (got[b] - expected).abs().max() < 1e-9
    assert torch.equal(
        checkpoint.load_model(tmp_path / file).wte.weight, state["vocab_embed.embedding"]
    )


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_sedd_gives_the_scores_and_probabilities_of_its_formulas(tmp_path, file):
    settings, state = diffusion("SEDD")
    state = {f"module.{name}": tensor for name, tensor in state.items()}
    model = checkpoint.load_model(write_folder(tmp_path, settings, state, file)).double()
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    assert model.config.block_size == BLOCK
    tokens, masked, inputs = masked_case(1)
    rate = masked.double().mean(1)
    sigma = -(1 - (1 - 1e-3) * rate).log()
    got, (normaliser, output) = model.masked_log_probs(tokens, masked), model(tokens, masked, sigma)
    steps, shift = torch.arange(BLOCK), math.log(TOKENS)
    for b in range(3):
        outputs = encoder_outputs(state, inputs[b], sigma[b])[:, :TOKENS]
        log_score = outputs - sigma[b].expm1().log() - shift
        expected = log_score[steps, tokens[b]] - log_score.logsumexp(-1)
        # the frequencies of the noise embedding are float32, as in the release: 2^-24 of an angle
        # of up to 7
        assert (got[b] - expected * masked[b]).abs().max() < 1e-5
        assert (output[b] - outputs[steps, tokens[b]])[masked[b]].abs().max() < 1e-5
        assert (normaliser[b] - outputs.logsumexp(-1))[masked[b]].abs().max() < 1e-5


def test_sedd_hears_the_noise_level(tmp_path):
    """Else the comparison above would not show that the noise embedding is right."""
    _, state = diffusion("SEDD")
    inputs = masked_case(1)[2][0]
    low, high = (
        encoder_outputs(state, inputs, torch.tensor(sigma, dtype=torch.float64))
        for sigma in (0.1, 3.0)
    )
    assert (low - high).abs().max() > 0.1


# ---- GPT-2 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """(a small random GPT-2 of transformers in float64, its folder)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=BLOCK, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    reference = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            p.add_(
                torch.randn(p.shape, generator=generator)
                * (0.3 if p.dim() == 1 else 0.5 if "wte" in name else 0.2)
            )
    reference.save_pretrained(folder)
    return reference.double(), folder


def gpt2_files(reference, original, folder, kind):
    settings = json.loads((original / "config.json").read_text())
    state = {name: tensor.float() for name, tensor in reference.state_dict().items()}
    if kind == "saved by transformers":
        return original
    if kind == "bin with the masks of old versions":
        for i in range(LAYERS):
            state[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, BLOCK, BLOCK).tril().bool()
            state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return write_folder(folder, settings, state, "pytorch_model.bin")
    state = {
        name.removeprefix("transformer."): t
        for name, t in state.items()
        if name != "lm_head.weight"
    }
    for i in range(LAYERS):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, BLOCK, BLOCK).tril()
    return write_folder(folder, settings, state)


@pytest.mark.parametrize(
    "kind", ["saved by transformers", "bin with the masks of old versions", "without prefix"]
)
def test_gpt2_gives_the_probabilities_of_transformers(gpt2, tmp_path, kind):
    reference, original = gpt2
    loaded = checkpoint.load(gpt2_files(reference, original, tmp_path, kind))
    assert (loaded.scored_from, loaded.weights, loaded.step, loaded.vocab_size) == (
        1,
        "raw",
        0,
        VOCAB,
    )
    tokens = random_tokens(VOCAB, 3, BLOCK, seed=5)
    with torch.no_grad():
        logits = reference(tokens).logits
    expected = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    got = loaded.model.double().token_log_probs(tokens, torch.arange(BLOCK).expand(3, BLOCK))
    assert (got[:, loaded.scored_from :] - expected).abs().max() < 1e-9
    assert got[:, 0].isfinite().all()
    assert expected.std() > 0.5


def started_from_gpt2(folder, target):
    """A model of GPT-2's sizes that starts from its weights, and GPT-2."""
    source = checkpoint.load_model(folder).double()
    model = build_model(dataclasses.replace(source.config, target=target)).double()
    warm_start(model, source)
    return model, source


def test_gpt2_starts_an_ao_gpt_with_equal_logits_left_to_right(gpt2):
    reference, folder = gpt2
    model, source = started_from_gpt2(folder, "adaln")
    tokens, order = random_tokens(VOCAB, 2, BLOCK, seed=6), torch.arange(BLOCK).expand(2, BLOCK)
    with torch.no_grad():
        logits = [m.logits(m.hidden(tokens, order)) for m in (model, source)]
        expected = reference(tokens).logits
    assert (logits[0] - logits[1]).abs().max() < 1e-12
    assert (logits[0][:, 1:] - expected[:, :-1]).abs().max() < 1e-9
    assert torch.equal(model.token_log_probs(tokens, order), -model(tokens, order).detach())
    # only the modulation has to move for the model to tell its targets apart
    assert model.wtpe.weight.std() > 0 and model.blocks[0].adaln.weight.abs().max() == 0


@torch.no_grad()
def test_gpt2_starts_a_two_stream_decoder_whose_content_stream_it_is(gpt2):
    """The queries have to learn to ask; what they read is GPT-2's already. 1e-9: as above."""
    reference, folder = gpt2
    model, source = started_from_gpt2(folder, "two_stream")
    tokens, order = random_tokens(VOCAB, 2, BLOCK, seed=6), torch.arange(BLOCK).expand(2, BLOCK)
    contents = []
    model.blocks[-1].register_forward_hook(lambda block, inputs, out: contents.append(out[0]))
    nll = model(tokens, order)
    logits = model.head_logits(model.norm_f(contents[0]))
    assert (logits[:, 1:] - reference(tokens).logits[:, :-1]).abs().max() < 1e-9
    assert nll.isfinite().all() and (nll - source(tokens, order)).abs().max() > 0.1


# ---- what is refused -----------------------------------------------------------------------------


def refused(path, *words, **keywords):
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, **keywords)
    message = str(error.value)
    for word in (str(path), *words):
        assert word in message, f"{word!r} is not in: {message}"


LAYOUT_NAMES = ("AO-GPT", "sigma-GPT", "GPT-2", "RADD", "SEDD")


def test_files_of_other_tensors_are_named_with_what_they_hold_and_what_is_supported(tmp_path):
    """Files that hold no tensors at all are refused in test_checkpoint.py."""
    torch.save({"net.0.weight": torch.zeros(2)}, tmp_path / "foreign.pt")
    refused(tmp_path / "foreign.pt", "net.0.weight", "supported are", *LAYOUT_NAMES)
    torch.save({"model": {"net.weight": torch.zeros(2)}, "model_args": {}}, tmp_path / "nested.pt")
    refused(tmp_path / "nested.pt", "net.weight", *LAYOUT_NAMES)


def test_a_folder_with_an_unrelated_config_is_an_error(tmp_path):
    bert = {"bert.embeddings.word_embeddings.weight": torch.zeros(3, 4)}
    folder = write_folder(tmp_path / "bert", {"model_type": "bert"}, bert)
    refused(folder, "bert.embeddings.word_embeddings.weight", *LAYOUT_NAMES)
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no", "model.safetensors or pytorch_model.bin", *LAYOUT_NAMES)
    settings, state = diffusion("RADD")
    refused(
        write_folder(tmp_path / "other", {"tokens": TOKENS}, state),
        "named as in RADD",
        "config.json",
    )
    refused(
        write_folder(tmp_path / "list", [1], state), "config.json: it is [1], but must be a table"
    )
    (tmp_path / "list" / "config.json").write_text("{not json")
    refused(tmp_path / "list", "config.json: this is not JSON")
    (tmp_path / "list" / "config.json").unlink()
    refused(tmp_path / "list", "config.json beside it", "it lacks tokens")


@pytest.mark.parametrize("kind", ["released", "export"])
def test_no_flipped_byte_of_a_file_of_weights_goes_unnoticed_unless_it_changes_nothing(
    tmp_path, kind
):
    """A .pt of others has the checksums of its zip file, which leave out what fills its gaps."""
    path = tmp_path / "released.pt"
    torch.save(container("AO-GPT")[0], path)
    if kind == "export":
        convert(str(path), tmp_path / "export")
        path = tmp_path / "export" / "model.safetensors"
    expected, original = checkpoint.load_model(path), path.read_bytes()
    rng, noticed = random.Random(7), 0
    for _ in range(40):
        path.write_bytes(original)
        flip_byte(path, rng.randrange(len(original)), rng.randrange(1, 256))
        try:
            found = checkpoint.load_model(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            noticed += 1
        else:
            same_weights(found, expected)
    assert noticed == 40 if kind == "export" else noticed > 20


@pytest.mark.parametrize("size", [5, 60, 0.5, -1])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "released.pt"])
def test_truncated_files_are_an_error_that_names_them(tmp_path, file, size):
    path = tmp_path / file
    if file == "released.pt":
        torch.save(container("AO-GPT")[0], path)
    else:
        write_folder(tmp_path, *diffusion("RADD"), name=file)
    full = path.stat().st_size
    os.truncate(
        path, full + size if size < 0 else size if isinstance(size, int) else int(full * size)
    )
    refused(path, "cannot be read", "supported are")


def changed(change):
    """An AO-GPT .pt after change(contents)."""
    contents = container("AO-GPT")[0]
    change(contents)
    return contents


WRONG = {
    "missing tensors": (
        lambda c: [c["model"].pop(f"transformer.h.1.attn.{name}_norm.weight") for name in "qk"],
        ["it lacks transformer.h.1.attn.q_norm.weight, transformer.h.1.attn.k_norm.weight"],
    ),
    "a layer less": (
        lambda c: [c["model"].pop(name) for name in list(c["model"]) if ".h.1." in name],
        ["it lacks transformer.h.1.ln_1.weight", "(14 in all)"],
    ),
    "an unknown tensor": (
        lambda c: c["model"].update({"transformer.h.0.attn.gate": torch.zeros(2)}),
        ["the model has no place for transformer.h.0.attn.gate"],
    ),
    "a wrong shape": (
        lambda c: c["model"].update({"lm_head.bias": torch.zeros(VOCAB + 1)}),
        [f"lm_head.bias (our head.bias) is ({VOCAB + 1},), not ({VOCAB},)"],
    ),
    "another width than model_args": (
        lambda c: c["model_args"].update(n_embd=2 * WIDTH),
        [f"is ({VOCAB}, {WIDTH}), not ({VOCAB}, {2 * WIDTH})"],
    ),
    "heads that do not divide": (lambda c: c["model_args"].update(n_head=5), ["n_head"]),
    "no model_args": (lambda c: c.pop("model_args"), ["it lacks vocab_size"]),
    "model_args that are text": (
        lambda c: c["model_args"].update(n_layer="two"),
        ["n_layer is 'two', but it must be an integer"],
    ),
    "integers": (
        lambda c: c["model"].update({"lm_head.bias": torch.zeros(VOCAB, dtype=torch.long)}),
        ["lm_head.bias holds torch.int64"],
    ),
    "complex numbers": (
        lambda c: c["model"].update({"lm_head.bias": torch.zeros(VOCAB, dtype=torch.complex64)}),
        ["lm_head.bias holds torch.complex64"],
    ),
    "a sparse tensor": (
        lambda c: c["model"].update({"lm_head.bias": torch.zeros(VOCAB).to_sparse()}),
        ["lm_head.bias holds torch.float32 (torch.sparse_coo)"],
    ),
    "a view of one number": (
        lambda c: c["model"].update({"lm_head.bias": torch.zeros(1).expand(VOCAB)}),
        ["lm_head.bias is", "more than the file holds"],
    ),
    "NaN": (
        lambda c: c["ema_model"]["shadow_params"][-1].fill_(math.nan),
        ["numbers that are not finite"],
    ),
    "more layers than there can be": (
        lambda c: c["model_args"].update(n_layer=10_000),
        ["tensors for a model of 10000 layers"],
    ),
    "layers without end": (
        lambda c: c["model_args"].update(n_layer=10**7),
        ["n_layer is 10000000"],
    ),
    "no tensor": (lambda c: c["model"].update({"lm_head.bias": [0.0]}), ["lm_head.bias is list"]),
    "an average that lacks a tensor": (
        lambda c: c["ema_model"]["shadow_params"].pop(),
        ["ema_model holds 36 tensors for 37 parameters"],
    ),
    "an average in another order": (
        lambda c: c["ema_model"]["shadow_params"].reverse(),
        ["transformer.wte.weight is (37, 24) in model, but (37,) in ema_model"],
    ),
    "an average of another kind": (
        lambda c: c.update(ema_model={"decay": 0.9}),
        ["lacks 'shadow_params'"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_contents_are_named(tmp_path, what):
    change, words = WRONG[what]
    torch.save(changed(change), tmp_path / "released.pt")
    refused(tmp_path / "released.pt", *words, "supported are")


def test_a_sigma_gpt_without_a_start_vector_or_with_a_head_of_its_own_is_named(tmp_path):
    contents, _, _ = container("sigma-GPT", ema_model=None)
    contents["model"]["lm_head.weight"] = contents["model"]["lm_head.weight"] + 1
    torch.save(contents, tmp_path / "released.pt")
    refused(tmp_path / "released.pt", "lm_head.weight and transformer.wte.weight differ")
    del contents["model"]["lm_head.weight"], contents["model"]["transformer.wnonee.weight"]
    torch.save(contents, tmp_path / "released.pt")
    refused(tmp_path / "released.pt", "named as in sigma-GPT", "it lacks transformer.wnonee.weight")


def test_settings_that_the_model_has_no_place_for_are_refused(gpt2, tmp_path):
    settings, state = diffusion("SEDD")
    refused(
        write_folder(tmp_path / "a", settings | {"graph": {"type": "uniform"}}, state),
        "'uniform'",
        "'absorb'",
    )
    base = 1 / 500 ** (torch.arange(0, 8, 2).float() / 8)
    refused(
        write_folder(tmp_path / "b", settings, state | {"rotary_emb.inv_freq": base}), "base 10000"
    )
    settings = json.loads((gpt2[1] / "config.json").read_text())
    state = safetensors.torch.load_file(gpt2[1] / "model.safetensors")
    for name, value in (("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True)):
        refused(write_folder(tmp_path / name, settings | {name: value}, state), name, repr(value))
    linear = {name: t.T if "c_attn.weight" in name else t for name, t in state.items()}
    refused(
        write_folder(tmp_path / "c", settings, linear),
        "transformer.h.0.attn.c_attn.weight",
        "(24, 72)",
    )


# ---- Hugging Face repos --------------------------------------------------------------------------


def test_a_repo_id_without_network_is_a_clear_error(tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run_script("convert.py", "some-org/some-model", tmp_path / "x", check=False, **offline)
    assert_user_error(done, "there is no some-org/some-model here", "Hugging Face")
    assert not (tmp_path / "x").exists()


def test_a_repo_that_the_cache_holds_is_loaded_by_its_id(tmp_path, monkeypatch):
    import huggingface_hub

    settings, state = diffusion("RADD")
    cached = tmp_path / "models--org--radd-1.5"
    write_folder(cached / "snapshots" / "abc", settings, state, "pytorch_model.bin")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loaded = checkpoint.load("org/radd-1.5")
    assert torch.equal(loaded.model.wte.weight, state["vocab_embed.embedding"])


def test_a_mistyped_path_is_not_looked_for_on_hugging_face(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for path in ("out/nothing", "other/model.pt", "a/b/c", "nothing"):
        with pytest.raises(CheckpointError, match=f"there is no {path}; give a run folder"):
            checkpoint.load(path)


# ---- convert -------------------------------------------------------------------------------------


def same_weights(a, b):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def all_sources(folder, gpt2_folder):
    for name in ("AO-GPT", "sigma-GPT"):
        torch.save(container(name)[0], folder / f"{name}.pt")
    folders = {name: write_folder(folder / name, *diffusion(name)) for name in ("RADD", "SEDD")}
    return (
        {name: folder / f"{name}.pt" for name in ("AO-GPT", "sigma-GPT")}
        | folders
        | {"GPT-2": gpt2_folder}
    )


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_an_export_of_every_layout_loads_back_the_same(gpt2, tmp_path, capsys, layout):
    source = all_sources(tmp_path, gpt2[1])[layout]
    original = checkpoint.load(source)
    convert(str(source), tmp_path / "export")
    loaded = checkpoint.load(tmp_path / "export")
    same_weights(loaded.model, original.model)
    assert loaded.model.config == original.model.config
    for name in ("step", "weights", "tokenizer", "vocab_size", "scored_from", "system"):
        assert getattr(loaded, name) == getattr(original, name)
    assert loaded.system == layout
    assert loaded.path == str(tmp_path / "export" / "model.safetensors")
    out = capsys.readouterr().out
    assert str(source) in out and f"wrote {tmp_path}/export" in out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a checkpoint whose averaged and last weights differ, and the data it
    belongs to."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=320, block_size=16, n_layer=1, n_head=2, n_embd=8, cond_dim=4)
    model, ema = build_model(config), EMA(build_model(config), 0.9)
    state = State(model, [ema], torch.optim.AdamW(model.parameters()), Progress(step=5))
    data = {"tokenizer": "bytes", "vocab_size": 257}
    values = plain_values(state, None, Config(name="run", model=config), data)
    store.write(folder / "run", values, named_tensors(state), keep=1)
    return folder / "run", make_data(folder)


def test_convert_as_a_process_and_the_scripts_on_the_export(run, tmp_path, monkeypatch, capsys):
    folder, data = run
    done = run_script("convert.py", folder, tmp_path / "new" / "raw", "--weights", "raw")
    assert "step 5, raw weights" in done.stdout and str(tmp_path / "new" / "raw") in done.stdout
    export = tmp_path / "new" / "raw"
    assert sorted(path.name for path in export.iterdir()) == ["config.json", "model.safetensors"]
    assert list(export.parent.iterdir()) == [export]
    settings = json.loads((export / "config.json").read_text())
    assert settings["source"] == str(folder) and settings["model"]["n_embd"] == 8
    assert (settings["weights"], settings["step"], settings["tokenizer"]) == ("raw", 5, "bytes")
    same_weights(checkpoint.load_model(export), checkpoint.load_model(folder, "raw"))
    outputs = []
    for path in (export, folder):
        scripts = {
            sample: ["--num-samples", 2, "--jsonl", tmp_path / "samples.jsonl", "--weights", "raw"]
        }
        scripts[eval_ppl] = [
            "--datasets",
            data,
            "--max-sequences",
            4,
            "--json",
            tmp_path / "ppl.json",
            "--weights",
            "raw",
        ]
        for module, arguments in scripts.items():
            monkeypatch.setattr(
                "sys.argv", [module.__name__, str(path), *map(str, arguments), "--overwrite"]
            )
            with pytest.raises(SystemExit) as stop:
                run_main(module.main)
            assert not stop.value.code, capsys.readouterr().err
        lines = (tmp_path / "samples.jsonl").read_text().splitlines()
        results = json.loads((tmp_path / "ppl.json").read_text())["results"]
        results = [
            {name: value for name, value in r.items() if name != "seconds_of_all_sizes"}
            for r in results
        ]
        outputs.append(([json.loads(line)["tokens"] for line in lines], results))
    assert outputs[0] == outputs[1]


def test_an_export_holds_one_set_of_weights_and_says_so_when_the_other_is_asked_for(run, tmp_path):
    folder, _ = run
    convert(str(folder), tmp_path / "ema")
    same_weights(checkpoint.load_model(tmp_path / "ema"), checkpoint.load_model(folder, "ema"))
    refused(tmp_path / "ema", "ema weights only", "--weights raw", weights="raw")
    convert(str(folder), tmp_path / "raw", "raw")
    assert checkpoint.load(tmp_path / "raw").weights == "raw"
    settings = json.loads((tmp_path / "raw" / "config.json").read_text())

    def write(settings):
        text = json.dumps(settings | {"sha256": on_disk.digest(settings)})
        (tmp_path / "raw" / "config.json").write_text(text)

    for key in ("model", "tokenizer", "files"):
        write({name: value for name, value in settings.items() if name != key})
        refused(tmp_path / "raw", "lacks", key)
    write(settings | {"files": {"model.safetensors": "0" * 64}})
    refused(tmp_path / "raw", "model.safetensors is damaged (checksum)")
    write(settings | {"model": settings["model"] | {"n_layer": 10_000}})
    refused(tmp_path / "raw", "for a model of 10000 layers")
    write(settings | {"step": "3"})
    refused(tmp_path / "raw", "config.json: step is '3', but it must be an integer")
    write(settings | {"model": settings["model"] | {"x": 1}})
    refused(tmp_path / "raw", "unknown key 'model.x'")


def test_an_export_in_bfloat16_is_half_as_large_and_loads_as_its_rounded_weights(run, tmp_path):
    (folder, _), sizes = run, {}
    for dtype in ("float32", "bfloat16"):
        convert(str(folder), tmp_path / dtype, dtype=dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    assert 0.5 * sizes["float32"] <= sizes["bfloat16"] < 0.6 * sizes["float32"]  # names, too
    exact, rounded = (checkpoint.load_model(tmp_path / dtype) for dtype in sizes)
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert b.dtype == torch.float32 and torch.equal(b, a.bfloat16().float())


def test_convert_leaves_what_exists_alone_and_nothing_half_written(run, tmp_path):
    folder, _ = run
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists already"):
        convert(str(folder), tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    with (
        pytest.raises(CheckpointError, match="could not write .*new: .*File too large"),
        limited_file_size(1000),
    ):
        convert(str(folder), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="could not write"):
        convert(str(folder), tmp_path / "file" / "new")


@pytest.mark.parametrize("place", ["model_args", "iter_num"])
@pytest.mark.parametrize("levels", [20, 60])
def test_a_list_named_in_many_places_is_refused_before_it_is_walked(tmp_path, place, levels):
    """Two kilobytes that stand for 2^levels words."""
    words = ["ha"] * 2
    for _ in range(levels):
        words = [words, words]
    value = {"vocab_size": words} if place == "model_args" else words
    torch.save(container("AO-GPT")[0] | {place: value}, tmp_path / "released.pt")
    refused(tmp_path / "released.pt", "too large" if place == "model_args" else "iter_num is [[")


def test_a_packed_file_is_not_unpacked(tmp_path):
    path = tmp_path / "released.pt"
    torch.save(container("AO-GPT")[0], tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="packed, as torch.save packs nothing"):
        checkpoint.check_sum(path)


@torch.no_grad()
def test_the_weights_in_this_repository_know_english_in_every_order():
    """Of a sentence that nobody trained on: 3.2 to 3.5 nats a token, where words as they are
    frequent would be 6.3 (results/books.md) and words thrown about are more."""
    loaded = checkpoint.load(ROOT / "results" / "books_model")
    text = "The old man opened the door, and looked at the child who was sitting by the fire."
    tokens = torch.tensor([get_tokenizer(loaded.tokenizer).encode(text)])
    length = tokens.shape[1]
    orders = torch.stack([torch.arange(length), *random_orders(3, length, 0)])
    nll = -loaded.model.token_log_probs(tokens.expand_as(orders), orders).mean(dim=1)
    assert (nll < 4.5).all()
    mixed = tokens[:, random_orders(1, length, 1)[0]]
    assert -loaded.model.token_log_probs(mixed, orders[:1]).mean() > nll[0] + 2
