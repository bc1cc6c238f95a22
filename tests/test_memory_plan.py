"""memory_plan.py: its bytes against those of real models, optimizers, averages, shards, saved
tensors and peaks."""

import json
import re
import resource
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, change, torchrun
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
import train
from checkpoints import store
from model import ModelConfig
from objectives import ObjectiveConfig
from orders import OrderConfig
from runtime.devices import GPU
from training import config as configuration
from training import memory_plan
from training.averages import EMA
from training.config import Config, TrainConfig
from training.memory_plan import (
    block_bytes,
    find_gpu,
    memory_by_part,
    meta_model,
    plan_run,
    share_of,
    state_bytes,
)
from training.optimizers import make_optimizer, named_state
from training.parallel import checkpoint_activations
from training.state import Progress, State, named_tensors, plain_values
from variants import build_model

B, T, D, H, V = 4, 128, 64, 4, 320
LARGE = {"aogpt_1b": 8, "aogpt_7b": 64}  # configs with a plan in their comments: for how many GPUs
H100 = "NVIDIA H100 80GB HBM3"
PLAIN = {"order__kind": "l2r", "model__target": "none"}


def small(layers=2, dtype="float32", **changes):
    """A config with an AO-GPT that is not square anywhere: no two sizes in it are the same."""
    model = ModelConfig(vocab_size=V, block_size=T, n_layer=layers, n_head=H, n_embd=D, cond_dim=24)
    train = TrainConfig(2000, batch_size=B, micro_batch_size=B, compile=False)
    return change(Config(model=model, train=train), train__dtype=dtype, **changes)


def small_encoder(layers=2, dtype="float32", objective="lambda_dce", **model):
    base, objective = small(layers, dtype), ObjectiveConfig(objective)
    encoder = replace(base.model, attention="full", target="none", mask_token=V - 10, **model)
    return replace(base, model=encoder, objective=objective, order=OrderConfig("random"))


def loaded(name, **changes):
    return change(configuration.load_toml(ROOT / "configs" / f"{name}.toml"), **changes)


def losses(model, config, sequences=B):
    """A training pass in the precision of the config: (sequences, T)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(V - 20, (sequences, T), generator=generator)
    which = torch.stack([torch.randperm(T, generator=generator) for _ in tokens])
    extra = None
    if config.model.is_encoder:
        which, extra = which < T // 2, torch.full((sequences,), 0.5) if config.model.noise else None
    if config.objective.kind == "groupwise":
        extra = (torch.arange(T) - torch.arange(T) % 4).expand(sequences, T)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.train.dtype == "bfloat16"):
        return model(tokens, which, extra)


# ---- weights, gradients, optimizer, average ------------------------------------------------------


def storage_bytes(tensors):
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "changes",
    [{}, PLAIN | {"model__tied_head": True}, {"model__target": "per_block"}],
    ids=["adaln", "tied", "per_block"],
)
def test_state_bytes_are_those_of_a_model_after_a_step(kind, changes):
    config = small(optim__kind=kind, **changes)
    model = build_model(config.model)
    ema, optimizer = EMA(model, 0.9), make_optimizer(model, config)
    losses(model, config).mean().backward()
    optimizer.step()
    ema.update(model)
    state = [t for values in named_state(model, optimizer).values() for t in values.values()]
    measured = {
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(p.grad for p in model.parameters()),
        "optimizer": storage_bytes(state),
        "ema": storage_bytes(ema.weights.values()),
    }
    assert state_bytes(config, meta_model(config), 1) == measured


def test_a_checkpoint_has_the_planned_size(tmp_path):
    config = small(layers=8, model__n_embd=256)  # beside these weights names and settings are small
    model = build_model(config.model)
    optimizer = make_optimizer(model, config)
    losses(model, config).mean().backward()
    optimizer.step()
    state = State(model, [EMA(model, 0.9)], optimizer, Progress(step=1))
    values = plain_values(state, None, config, {})
    path = store.write(tmp_path, values, named_tensors(state), keep=1)
    planned = plan_run(config, 1, find_gpu(H100)).checkpoint_bytes
    written = sum(file.stat().st_size for file in path.iterdir())
    assert written == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    "shape, world, share", [((7, 3), 2, 12), ((7, 3), 4, 6), ((7,), 8, 1), ((8, 5, 2), 4, 20)]
)
def test_the_share_of_a_parameter_is_its_rows_rounded_up(shape, world, share):
    assert share_of(torch.Size(shape), world) == share


SHARDED = """
import json, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import DeviceMesh
from training import config as configuration
from training import parallel
from training.averages import EMA
from training.optimizers import make_optimizer
from runtime.processes import Processes


def bytes_of(tensors):
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    # the gradients of a group share one
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


config = configuration.load_toml(sys.argv[1])
dist.init_process_group("gloo")
for world in (2, 3, 4):  # the first of the four processes
    mesh = DeviceMesh("cpu", list(range(world)))
    if dist.get_rank() >= world:
        continue
    parallel.init_device_mesh = lambda *_: mesh
    model = parallel.build(config, Processes(dist.get_rank(), world, torch.device("cpu")))
    ema, optimizer = EMA(model, 0.9), make_optimizer(model, config)
    T = config.model.block_size
    model(torch.arange(T)[None] % 7, torch.randperm(T)[None]).mean().backward()
    optimizer.step()
    ema.update(model)
    state = [t for values in optimizer.state.values() for t in values.values()]
    measured = {
        "weights": bytes_of(model.parameters()),
        "gradients": bytes_of(p.grad for p in model.parameters()),
        "optimizer": bytes_of(state),
        "ema": bytes_of(ema.weights.values()),
    }
    Path(sys.argv[2], f"{world} {dist.get_rank()}.json").write_text(json.dumps(measured))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shares_are_those_of_fsdp_on_2_3_and_4_processes(tmp_path):
    # heads of 15: nothing divides evenly
    config = small(train__parallel="fsdp", model__n_embd=60, model__qk_norm=True)
    (tmp_path / "run.toml").write_text(configuration.to_toml(config))
    (tmp_path / "sharded.py").write_text(SHARDED)
    torchrun(4, tmp_path / "sharded.py", tmp_path / "run.toml", tmp_path, PYTHONPATH=str(ROOT))
    measured = {
        tuple(map(int, path.stem.split())): json.loads(path.read_text())
        for path in tmp_path.glob("*.json")
    }
    assert sorted(measured) == [(world, rank) for world in (2, 3, 4) for rank in range(world)]
    for (world, rank), found in measured.items():
        planned = state_bytes(config, meta_model(config), world)
        for part, size in found.items():
            right = size == planned[part] if rank == 0 else size <= planned[part]
            assert right, (world, rank, part)


# ---- activations ---------------------------------------------------------------------------------


def saved_tensors(config):
    """What autograd saves in a training pass, without parameters; compiled if so configured."""
    torch.manual_seed(0)
    model = build_model(config.model)
    if config.train.compile:
        torch._dynamo.reset()
        # what inductor keeps, without a C++ compiler
        model.compile(backend="aot_eager_decomp_partition")
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = tensor  # holding it, so that no other one takes its place
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses(model, config)
    return list(seen.values())


def saved_by_a_block(one, two):
    """Bytes of a token that the second block saves, without autocast's copies of its weights; and
    what the model with two saves."""
    saved = saved_tensors(two)
    both = storage_bytes(saved) - storage_bytes(saved_tensors(one))
    return (both - cast_weights(one)) / (B * T), saved


def cpu_norms(config):
    """Bytes of a token in a block that RMSNorm saves on a CPU, where it is several kernels instead
    of one: x / rms, and of bfloat16 inputs their float32 copies, too."""
    m, streams = config.model, 2 if config.model.target == "two_stream" else 1
    residual = 2 * streams * 4 * m.n_embd if m.norm == "rmsnorm" else 0
    heads = (1 + streams) * 4 * m.n_embd if m.qk_norm else 0
    if config.train.dtype == "float32":
        return residual + heads
    # in place of the second stream's queries as they were
    return residual + 2 * heads - (streams - 1) * 2 * m.n_embd


def cast_weights(config):
    """Bytes of autocast's copies of the weights of a block; a second stream has its own of the
    queries' rows."""
    if config.train.dtype == "float32":
        return 0
    linear = [m for m in meta_model(config).blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    sizes = sum(m.weight.numel() for m in linear)  # biases are added, not saved
    sizes += config.model.n_embd**2 if config.model.target == "two_stream" else 0
    return 2 * sizes


GROUPS = {"model__target": "two_stream", "objective": ObjectiveConfig("groupwise", group=4)}
ARCHITECTURES = {  # how to make one, and how close its bytes are
    "adaln": (small, {}, 0.005),
    "plain": (small, PLAIN, 0.005),
    "gpt2": (small, PLAIN | {"model__norm": "layernorm", "model__qk_norm": False}, 0.005),
    "hidden start": (small, {"model__start": "hidden"}, 0.005),
    "rotary": (small, {"model__position": "rotary"}, 0.005),
    "mixed values": (small, {"model__value_residual": True}, 0.005),
    "shared": (small, {"model__target": "shared"}, 0.005),
    "per block": (small, {"model__target": "per_block"}, 0.005),
    "two streams": (small, {"model__target": "two_stream"}, 0.005),
    "groups": (small, GROUPS, 0.005),
    # adaLN on the noise level keeps a few vectors a sequence, not a token
    "encoder": (small_encoder, {}, 0.02),
    "SEDD": (
        small_encoder,
        {"objective": "score_entropy", "noise": True, "position": "rotary"},
        0.02,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make, changes, close", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_bytes_of_a_block_are_what_autograd_saves(make, changes, close, dtype):
    one, two = (make(layers, dtype, **changes) for layers in (1, 2))
    measured, _ = saved_by_a_block(one, two)
    assert block_bytes(one, "none") + cpu_norms(one) == pytest.approx(measured, rel=close)


def test_compiled_training_keeps_less_than_planned_and_logits_as_planned():
    one, two = (small(layers, "bfloat16", train__compile=True) for layers in (1, 2))
    measured, saved = saved_by_a_block(one, two)
    assert 0.5 < measured / block_bytes(one, "none") < 1
    logits = [t for t in saved if t.numel() == B * T * V]
    assert [t.element_size() for t in logits] == [2]  # and as much again for their gradient


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still alive, now and at most."""

    def __init__(self, own):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = dict.fromkeys((t.untyped_storage()._cdata for t in own), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata)
        return out

    def forget(self, key):
        self.now -= self.sizes.pop(key)


def step_bytes(config):
    """Live bytes after the forward pass, and the peak of the whole step, of a model that has
    gradients already."""
    torch.manual_seed(0)
    model = build_model(config.model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for block in model.blocks:
        checkpoint_activations(block, config)
    with Live([t for p in model.parameters() for t in (p, p.grad)]) as live:
        loss = losses(model, config, config.train.micro_batch_size).mean()
        kept = live.now
        loss.backward()
    return kept, live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
@pytest.mark.parametrize(
    "vocabulary, chunk", [(V, 2**16), (4096, 2**16), (1024, 2**25)], ids=["block", "chunks", "head"]
)
def test_the_peak_of_a_step_is_what_the_plan_says(
    vocabulary, chunk, checkpointing, dtype, monkeypatch
):
    """The peak is in the backward pass of a block, of a chunk of the head, or of the whole head."""
    for device in ("cpu", "cuda"):  # a plan is for GPUs
        monkeypatch.setitem(model_module.HEAD_CHUNK_ELEMENTS, device, chunk)
    sizes = {"train__batch_size": 16, "train__micro_batch_size": 16}
    sizes |= {"model__vocab_size": vocabulary}
    config = small(layers=6, dtype=dtype, train__activation_checkpointing=checkpointing, **sizes)
    kept, peak = step_bytes(config)
    memory = memory_by_part(config, meta_model(config), 1)
    # What RMSNorm saves besides on a CPU: in all blocks, or in the one computed again; and
    # autocast's copies are gone before a backward pass that computes again.
    norms, in_all, copies = 16 * T * cpu_norms(config), 0, 0
    working = memory_plan.working_bytes(config, 16)
    if checkpointing == "none":
        in_all, copies = 6 * norms, memory["in_use"]
    else:
        working["block"] += norms
    planned = memory["activations"] + copies + in_all + 16 * T * 4 * D  # the last norm's
    if chunk == 2**16:  # no logits are kept
        assert planned == pytest.approx(kept, rel=0.03)
    assert planned + max(working.values()) == pytest.approx(peak, rel=0.05)


# ---- the whole plan ------------------------------------------------------------------------------


def test_time_and_traffic_by_hand():
    config = small(layers=3, dtype="bfloat16", train__batch_size=48, train__parallel="fsdp")
    gpu = GPU("a GPU", 1e12, 80)
    weights = sum(p.numel() for p in build_model(config.model).parameters())
    model_flops = (6 * (12 * 3 * D * D + D * V) + 12 * 3 * D * T) * 48 * T
    plan = plan_run(config, 4, gpu, 0.5)
    assert (plan.micro_steps, plan.tokens_per_step) == (3, 48 * T)
    assert plan.flops_per_step == model_flops and plan.flops_again_per_step == 0
    assert plan.seconds_per_step == pytest.approx(model_flops / (4 * 1e12 * 0.5))

    outside = weights - 3 * sum(p.numel() for p in build_model(config.model).blocks[0].parameters())
    # 3 micro-batches; blocks twice in bfloat16
    gathered = 3 * (2 * 2 * (weights - outside) + 4 * outside)
    assert plan.sent_per_step == (gathered + 4 * weights) * 3 // 4
    often = change(config, train__reduce_every_micro_batch=True)
    assert plan_run(often, 4, gpu).sent_per_step == (gathered + 3 * 4 * weights) * 3 // 4
    ddp = plan_run(change(config, train__parallel="ddp"), 4, gpu)
    assert ddp.sent_per_step == 2 * 4 * weights * 3 // 4
    assert plan_run(config, 1, gpu).sent_per_step == 0
    # Muon's matrices: a block has 12 D^2 weights of them, updates are gathered, shards go and come
    muon, matrices = change(config, optim__kind="muon"), 4 * 3 * 12 * D * D
    more = plan_run(muon, 4, gpu).sent_per_step - plan_run(config, 4, gpu).sent_per_step
    assert more == 2 * (matrices // 4) * 3 // 4
    muon = plan_run(change(muon, train__parallel="ddp"), 4, gpu)
    assert muon.sent_per_step - ddp.sent_per_step == matrices * 3 // 4

    block = plan_run(change(config, train__activation_checkpointing="block"), 4, gpu, 0.5)
    # a third, without the head's
    assert block.flops_again_per_step == (2 * 12 * 3 * D * D + 4 * 3 * D * T) * 48 * T
    assert plan_run(change(config, train__dtype="float32"), 4, gpu).seconds_per_step is None


def test_ddp_holds_everything_and_fsdp_a_share_on_every_gpu():
    def memory(config, world):
        return memory_by_part(config, meta_model(config), world)

    config = small(dtype="bfloat16", train__batch_size=16)
    alone, ddp = memory(config, 1), memory(config, 4)
    fsdp = memory(change(config, train__parallel="fsdp"), 4)
    for part in ("weights", "gradients", "optimizer", "ema"):
        assert ddp[part] == alone[part]
        assert fsdp[part] == pytest.approx(alone[part] / 4, rel=0.01)
    assert alone["in_reduction"] == ddp["in_reduction"] == 0  # one micro-batch on each of 4
    # what waits for a second micro-batch
    two = change(config, train__batch_size=32)
    assert memory(two, 4)["in_reduction"] == alone["weights"]
    two = change(two, train__parallel="fsdp")
    often = change(two, train__reduce_every_micro_batch=True)
    waiting = memory(two, 4)["in_reduction"] - memory(often, 4)["in_reduction"]
    assert waiting == alone["weights"]


@pytest.mark.parametrize("name, gib", [("aogpt_1b", 22), ("aogpt_7b", 50)])
def test_the_micro_batch_and_the_number_of_gpus_that_fit_are_the_limits(name, gib):
    config, world, gpu = loaded(name), LARGE[name], find_gpu(H100, gib)

    def fits(world, size):
        return plan_run(change(config, train__micro_batch_size=size), world, gpu).fits

    largest = plan_run(config, world, gpu).largest_micro_batch_size
    larger = [d for d in memory_plan.divisors(config.train.batch_size // world) if d > largest]
    assert largest > 0 and fits(world, largest)
    assert larger and not any(fits(world, size) for size in larger)
    two = change(config, train__micro_batch_size=2)
    found = plan_run(two, world, gpu).smallest_world_size
    assert found > 1 and fits(found, 2) and not fits(found // 2, 2)


# ---- the command line ----------------------------------------------------------------------------


def test_the_script_prints_the_plan_and_writes_it(script, tmp_path):
    out, run = tmp_path / "plan.json", tmp_path / "x_y"
    options = ["--world-size", 2, "--gpu-memory-gib", 24, "--mfu", 0.3, "--plan-json", out]
    options += ["--optim.kind", "muon", "--train.activation-checkpointing", "block", "--out", run]
    status, text, err = script(train, ROOT / "configs" / "aogpt_1b.toml", "--plan", *options)
    assert status == 0, err
    report = json.loads(out.read_text())
    config = loaded("aogpt_1b", optim__kind="muon", train__activation_checkpointing="block")
    plan = plan_run(config, 2, find_gpu(H100, 24), 0.3)
    assert report["plan"]["memory"] == plan.memory and report["plan"]["fits"] == plan.fits
    assert report["settings"]["world_size"] == 2 and "--plan" in report["command"]
    assert report["config"]["out"].endswith("x_y")  # other options pass as they are
    assert memory_plan.plan_text(plan) in text and not run.exists()
    total, world = sum(meta_model(config).num_params().values()), plan.smallest_world_size
    assert f"{total / 1e6:,.1f}" in text and "does NOT fit" in text
    assert world > 2 and re.search(rf"GPUs that it fits on +{world} ", text)


@pytest.mark.parametrize(
    "options, words",
    [
        ("--world-size 0", ["--world-size is 0"]),
        ("--world-size 3", ["(512) cannot be cut among 3 GPUs", "510 or 513"]),
        ("--world-size 1024", ["cannot be cut among 1024 GPUs", "e.g. 1024, or"]),
        ("--world-size 32", ["(32) must divide the 16 sequences", "one of 1, 2, 4, 8, 16"]),
        ("--gpu H100", ["'H100' is not known", H100]),
        ("--gpu-memory-gib 0", ["--gpu-memory-gib is 0"]),
        ("--mfu 40", ["--mfu is 40", "above 0 and at most 1"]),
        ("--plan-json nowhere/plan.json", ["there is no folder nowhere"]),
        ("--wrld-size 3", ["Unrecognized options", "--wrld-size"]),
    ],
)
def test_a_plan_that_cannot_be_made_is_an_error_that_says_what_to_set(script, options, words):
    status, out, err = script(train, ROOT / "configs" / "aogpt_1b.toml", "--plan", *options.split())
    assert status == 2 and not out
    for word in words:
        assert word in " ".join(err.split())


def test_a_plan_without_a_config_is_an_error(script):
    status, out, err = script(train, "--plan")
    assert status == 2 and not out and "give a config file first" in err


def test_the_plan_of_7_billion_weights_needs_no_room_for_them():
    """28 GB of weights, planned by a process that may have 1 GB of data."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))

    command = [sys.executable, *"train.py configs/aogpt_7b.toml --plan --world-size 64".split()]
    captured = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, **captured)
    assert done.returncode == 0, done.stderr
    assert "6,967.2" in done.stdout and "fits in" in done.stdout


def main_figures(plan):
    """The lines that the comments of a large config end with."""
    total, seconds = sum(plan.parameters.values()), plan.seconds_per_step
    conditioning = plan.parameters["conditioning"] / total
    days = plan.config.train.steps * seconds / 86400
    return (
        f"#     {total / 1e6:,.1f}M parameters, {conditioning:.1%} of them conditioning; "
        f"{plan.memory_total / 2**30:.1f} GiB a GPU;\n"
        f"#     {seconds:.2f} s a step, {days:.1f} days; "
        f"{plan.checkpoint_bytes / 1e9:.1f} GB a checkpoint\n"
    )


@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_fits_its_gpus_and_its_comments_are_not_stale(name):
    plan = plan_run(loaded(name), LARGE[name], find_gpu(H100))
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    assert plan.fits
    assert f"--world-size {LARGE[name]} says for {H100} at 40%" in text
    assert main_figures(plan) in text


def test_the_documentation_shows_what_the_plan_prints():
    text = (ROOT / "docs" / "large_runs.md").read_text()
    shown = "aogpt_7b on" + text.split("\n    aogpt_7b on")[1].split("\n\n")[0]
    lines = {line.removeprefix("    ") for line in shown.splitlines()}
    plan = plan_run(loaded("aogpt_7b"), LARGE["aogpt_7b"], find_gpu(H100))
    assert len(lines) > 10 and lines <= set(memory_plan.plan_text(plan).splitlines())
