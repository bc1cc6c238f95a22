"""Decoders of transformers: logits, greedy text, tokenizers, and training that starts
from them."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import prepared, read_lines, run_script
from reference import random_tokens

import eval_ppl
import sample
import train
from aogpt.checkpoints import CheckpointError, load, pretrained
from aogpt.data import prepare
from aogpt.data.tokenizers import get_tokenizer
from aogpt.model import rotary_angles
from aogpt.runtime.errors import UserError
from convert import convert

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from test_tokenizer_files import around, of_bytes, of_words  # noqa: E402

TEXT = [
    "the quick brown fox — it's 10 o'clock. naïve café 日本語 😀\n\n  two  spaces " * 3
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = {
    "Llama": {"rope_parameters": LLAMA3},
    "Llama with biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "Mistral": {"sliding_window": None, "head_dim": 10},
    "Qwen2": {"rms_norm_eps": 1e-6},
    "Qwen3": {"head_dim": 10, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
}


@torch.no_grad()
def write_model(
    folder: Path, kind: str, dtype=torch.float32, intermediate_size=40, **saving
) -> torch.nn.Module:
    """Write a random tiny model of transformers and its tokenizer to a folder, as on
    the hub, and return the model."""
    name = kind.split()[0]
    tokenizer = of_words() if name == "Mistral" else of_bytes()
    if "Qwen" not in name:
        tokenizer = around(tokenizer, "<s> $A")
    starts = tokenizer.encode("").ids or [1]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=24,
        intermediate_size=intermediate_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=starts[0],
        **KINDS[kind],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa"
    )
    for parameter_name, p in model.named_parameters():
        p.copy_(0.3 * torch.randn_like(p) + ("norm" in parameter_name))
    model.to(dtype).save_pretrained(folder, **saving)
    tokenizer.save(str(folder / "tokenizer.json"))
    return in_transformers(folder)


def data_for(folder: Path, tmp_path: Path, **options) -> Path:
    """Prepare some text with the tokenizer of a folder, and return the data's."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXT * 40))
    return prepared(
        "text",
        tmp_path / "data",
        text,
        tokenizer=str(folder / "tokenizer.json"),
        **options,
    )


def in_transformers(folder):
    """Return the model of a folder, loaded by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return write_model(folder, "Llama"), folder


def in_float64(model, config):
    """The norms and rotary angles of transformers are float32 in a float64 model,
    too."""

    def norm(self, x):
        mean_square = x.square().mean(-1, True) + self.variance_epsilon
        return self.weight * x * torch.rsqrt(mean_square)

    def angles(x, position_ids, **_):
        cos, sin = rotary_angles(config)[position_ids].unbind(-2)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
    model.model.rotary_emb.forward = angles
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    dtype = torch.bfloat16 if kind == "Qwen2" else torch.float32
    theirs = write_model(tmp_path, kind, dtype, max_shard_size="15kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load(tmp_path)
    has_bos = "Qwen" not in kind
    assert loaded.scored_from == 1 - has_bos
    assert loaded.system == f"{kind.split()[0]}ForCausalLM"
    tokenizer = loaded.get_tokenizer()
    ours = loaded.model.double()
    tokens = random_tokens(loaded.vocab_size, batch_size=2, length=40, seed=3)
    start = torch.full((2, has_bos), theirs.config.bos_token_id)
    inputs = torch.cat([start, tokens], 1)
    expected = theirs(inputs).logits[:, :-1]
    got = ours.logits(tokens, torch.arange(40).expand(2, 40))[:, loaded.scored_from :]
    # theirs are float32
    assert expected.std() > 0.3
    assert (got - expected).abs().max() < 1e-4
    expected = in_float64(theirs, ours.config)(inputs).logits[:, :-1]
    assert (got - expected).abs().max() < 1e-9
    if has_bos:
        assert tokenizer.starts == [theirs.config.bos_token_id]
    else:
        assert tokenizer.starts == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": 200}, "wte.weight is"),
        ({"rope_theta": math.inf, "rope_parameters": None}, "rope_theta is inf"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rotary positions for each kind of layer",
        ),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
    ],
)
def test_what_the_model_has_no_part_for_is_refused_by_name(
    llama, tmp_path, change, words
):
    shutil.copytree(llama[1], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({Q_PROJ: torch.zeros(24, 23)}, "k_proj.weight is"),
        ({Q_PROJ: torch.zeros(24, 24, dtype=torch.float8_e4m3fn)}, "quantised"),
        # as many rows in all as queries, keys and values have together
        (
            {Q_PROJ: torch.zeros(12, 24), K_PROJ: torch.ones(24, 24)},
            r"q_proj.weight is \(12, 24\)",
        ),
    ],
)
def test_odd_tensors_are_refused_by_name(llama, tmp_path, changes, words):
    shutil.copytree(llama[1], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors.update(changes)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    "index, words",
    [
        ({"weight_map": {"x": 5}}, "is 5"),
        ({"weight_map": {"x": "../model.safetensors"}}, "without a path"),
        ({"weight_map": {"x": "fifo"}}, "fifo: there is no such"),
        ({"weight_map": {"x": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"x": "part.safetensors"}}, "disagree"),
        ({}, "it lacks weight_map"),
    ],
)
def test_an_index_names_files_of_its_folder(llama, tmp_path, index, words):
    folder = tmp_path / "model"
    shutil.copytree(llama[1], folder)
    shutil.copy(llama[1] / "model.safetensors", tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    os.mkfifo(folder / "fifo")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((CheckpointError, OSError), match=words):
        load(folder)


def test_two_tensors_of_one_name_are_refused(llama, tmp_path):
    shutil.copytree(llama[1], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b"v_proj", b"k_proj")
    file.write_bytes(data[:8] + header + data[8 + size :])
    with pytest.raises(CheckpointError, match="two keys .* in one object"):
        load(tmp_path)


def test_a_sliding_window_bounds_the_block(tmp_path):
    """Up to the window its attention sees all, as ours does."""
    write_model(tmp_path, "Mistral")
    config = json.loads((tmp_path / "config.json").read_text())
    config["sliding_window"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = in_transformers(tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.config.block_size == 16
    tokens = random_tokens(loaded.vocab_size, batch_size=1, length=16, seed=3)
    start = torch.full((1, 1), theirs.config.bos_token_id)
    with torch.no_grad():
        expected = theirs(torch.cat([start, tokens], dim=1)).logits[:, :-1]
        logits = loaded.model.logits(tokens, torch.arange(16)[None])
    assert (logits - expected).abs().max() < 1e-4
    convert(str(tmp_path), tmp_path / "export")
    for folder in (tmp_path, tmp_path / "export"):
        with pytest.raises(CheckpointError, match="sliding window of 16 tokens"):
            load(folder, block_size=17)


def test_blocks_are_cut_by_default_and_longer_ones_are_told(llama, monkeypatch):
    monkeypatch.setattr(pretrained, "LONGEST", 16)
    assert load(llama[1]).model.config.block_size == 16
    assert "blocks" not in load(llama[1]).description
    longer = load(llama[1], block_size=128).description
    assert longer.endswith("raw weights, in blocks of 128 tokens, not 16)")


PEAK = """
import resource, sys, time
from aogpt.checkpoints import load
import transformers
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def peak():
    lines = open("/proc/self/status").read().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
load(sys.argv[1])
before = resident()
open("/proc/self/clear_refs", "w").write("5")
model = load(sys.argv[2]).model
weights = sum(4 * p.numel() for p in model.parameters())
print((peak() - before) / weights)
"""


@pytest.mark.slow(reason="writes and loads models large enough to be measured")
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory"
)
def test_loading_needs_little_more_memory_than_the_weights(llama, tmp_path):
    tokenizer = of_bytes()
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=tokenizer.get_vocab_size(),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    done = run_script("-c", PEAK, llama[1], tmp_path)
    assert 0.9 < float(done.stdout) < 1.3


def test_a_tokenizer_cuts_and_pads_nothing(tmp_path):
    path = tmp_path / "tokenizer.json"
    library_tokenizer = of_bytes()
    library_tokenizer.enable_truncation(3)
    library_tokenizer.enable_padding(length=50)
    library_tokenizer.save(str(path))
    assert len(get_tokenizer(str(path)).encode("the quick brown fox")) > 3
    assert len(get_tokenizer(str(path)).encode("a")) == 1
    path.write_text("{")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        get_tokenizer(str(path))


@pytest.fixture
def train_from(printed, tmp_path):
    """Train from a folder of transformers in tmp_path; what is printed."""

    def call(config, folder, data, options):
        words = [f"configs/{config}.toml", "--train.init-from", folder]
        words += ["--data.folder", data, "--out", tmp_path, "--train.device", "cpu"]
        return printed(train, *words, *options.split())

    return call


@pytest.fixture
def evaluate(printed, tmp_path):
    """Evaluate models on some blocks of data: their losses, and what is printed."""

    def call(data, options, *models):
        path = tmp_path / "loss.json"
        words = [*models, "--datasets", data, "--json", path, "--overwrite"]
        said = printed(eval_ppl, *words, *options.split())
        return [row["nll"] for row in json.loads(path.read_text())["results"]], said

    return call


def test_a_decoder_is_trained_scored_and_sampled(
    llama, tmp_path, printed, train_from, evaluate
):
    """From a folder of transformers to an any-order model, with a rate of 0: the
    left-to-right loss stays that of the folder."""
    folder = llama[1]
    text = tmp_path / "text.txt"
    data = tmp_path / "data"
    text.write_text(
        "\n\n".join(f"the quick brown fox {i} it's 10 o'clock" for i in range(400))
    )
    tokenizer = folder / "tokenizer.json"
    words = ["text", "--source", text, "--out", data, "--tokenizer", tokenizer]
    hint = f"configs/smollm2.toml --name data --data.folder {data}"
    assert f"next: python train.py {hint}" in printed(prepare, *words)
    options = "--train.batch-size 4 --optim.warmup-steps 0 --optim.lr 0.0 "
    options += "--model.block-size 32 --eval.sequences 4 --train.no-compile "
    options += "--train.parallel ddp --train.steps"
    said = train_from("aogpt_llama", folder, data, f"{options} 2")
    assert "started from the weights of" in said
    assert "resumed" in train_from("aogpt_llama", folder, data, f"{options} 3")
    run = tmp_path / "aogpt_llama"
    said = printed(sample, run, "--prompt", "the quick[MASK:4] fox")
    assert "the quick" in said
    assert "[MASK" not in said
    options = "--max-sequences 8 --block-size 32 --orders"
    (of_run, random), _ = evaluate(data, f"{options} l2r random", run)
    (of_folder,), _ = evaluate(data, f"{options} l2r", folder)
    assert of_run == pytest.approx(of_folder, abs=1e-6)
    assert random > 0


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_which_tokens_a_run_and_its_source_are_scored_on_is_said(
    kind, tmp_path, train_from, evaluate
):
    """Qwen has no start token; the head of Qwen3 is tied to the table of tokens, as
    SmolLM2's is. The run's loss, here before its first step, counts the first token of
    a block, that of the source does not; of both together neither does."""
    folder = tmp_path / "model"
    write_model(folder, kind)
    has_start = kind == "Llama"
    data = data_for(folder, tmp_path, val_fraction=0.2)
    options = "--train.steps 1 --train.batch-size 4 --optim.warmup-steps 0 "
    options += "--optim.lr 0.0 --model.block-size 8 --eval.sequences 6"
    said = train_from("smollm2", folder, data, options)
    assert ("it has no start token" in said) != has_start
    run = tmp_path / "smollm2"
    first_loss = read_lines(run / "metrics.jsonl")[0]["val_loss_l2r"]

    def loss(*models):
        options = "--orders l2r --max-sequences 6 --block-size 8"
        losses, said = evaluate(data, options, *models)
        note = "the first token of a block is not scored"
        assert (note in said) == (folder in models and not has_start)
        return losses

    (of_run,) = loss(run)
    (of_source,) = loss(folder)
    assert of_run == pytest.approx(first_loss, rel=1e-5)
    assert (of_run == pytest.approx(of_source, rel=1e-5)) == has_start
    assert loss(run, folder) == pytest.approx([of_source, of_source], rel=1e-5)


def test_an_encoder_starts_from_a_pretrained_decoder(
    llama, tmp_path, printed, train_from
):
    """test_resume.py has the weights of each layout."""
    folder = llama[1]
    data = data_for(folder, tmp_path, val_fraction=0.2)
    V = load(folder).model.config.vocab_size
    options = f"--model.mask-token {V} --model.vocab-size {V + 1} --name encoder "
    options += "--model.position rotary --model.block-size 16 "
    options += "--model.attention full --model.target none --train.steps 50 "
    options += "--objective.kind lambda_dce --order.kind random --order.l2r-prob 0 "
    options += "--train.batch-size 8 --optim.lr 2e-3 --optim.warmup-steps 5 "
    options += "--eval.interval 25"
    train_from("smollm2", folder, data, options)
    run = tmp_path / "encoder"
    rows = read_lines(run / "metrics.jsonl")
    losses = [row["val_loss_random_raw"] for row in rows if "val_loss_random" in row]
    assert len(losses) == 3  # of the first one before all steps
    assert losses[-1] < losses[0] - 0.3
    assert "[MASK" not in printed(sample, run, "--prompt", "the[MASK:3] fox")
