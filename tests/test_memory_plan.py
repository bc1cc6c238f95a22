"""memory_plan.py: its bytes against those of real models, optimizers, averages, shards, saved tensors
and peaks."""

import json
import re
import resource
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, assert_user_error, change, run_script, torchrun
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
import train
from model import AOGPT, ModelConfig
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
from training.state import training_state

B, T, D, H, V = 4, 128, 64, 4, 320
LARGE = {
    "aogpt_1b": 8,
    "aogpt_7b": 64,
}  # configs with a plan in their comments, and for how many GPUs
H100 = "NVIDIA H100 80GB HBM3"
PLAIN = {"order__kind": "l2r", "model__target": "none"}


def small(layers=2, dtype="float32", **changes):
    """A config with an AO-GPT that is not square anywhere: no two sizes in it are the same."""
    model = ModelConfig(vocab_size=V, block_size=T, n_layer=layers, n_head=H, n_embd=D, cond_dim=24)
    config = Config(
        model=model, train=TrainConfig(steps=2000, batch_size=B, micro_batch_size=B, compile=False)
    )
    return change(config, train__dtype=dtype, **changes)


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
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "changes",
    [{}, PLAIN | {"model__tied_head": True}, {"model__target": "per_block"}],
    ids=["adaln", "tied", "per_block"],
)
def test_state_bytes_are_those_of_a_model_after_a_step(kind, changes):
    config = small(optim__kind=kind, **changes)
    model = AOGPT(config.model)
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
    config = small(
        layers=8, model__n_embd=256
    )  # names and settings in it are small only beside large weights
    model = AOGPT(config.model)
    optimizer = make_optimizer(model, config)
    losses(model, config).mean().backward()
    optimizer.step()
    state = training_state(
        1, model, EMA(model, 0.9), optimizer, configuration.to_dict(config), {}, {}
    )
    torch.save(state, tmp_path / "checkpoint.pt")
    planned = plan_run(config, 1, find_gpu(H100)).checkpoint_bytes
    assert (tmp_path / "checkpoint.pt").stat().st_size == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    "shape, world, share", [((7, 3), 2, 12), ((7, 3), 4, 6), ((7,), 8, 1), ((8, 5, 2), 4, 20)]
)
def test_the_share_of_a_parameter_is_its_rows_rounded_up(shape, world, share):
    assert share_of(torch.Size(shape), world) == share


SHARDED = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from training import config as configuration
from training import parallel
from training.averages import EMA
from training.optimizers import make_optimizer
from runtime.processes import Processes


def bytes_of(tensors):
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())  # the gradients of a group share one


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
    measured = {"weights": bytes_of(model.parameters()), "gradients": bytes_of(p.grad for p in model.parameters()),
                "optimizer": bytes_of(state), "ema": bytes_of(ema.weights.values())}
    print("MEASURED", json.dumps([world, dist.get_rank(), measured]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_shares_are_those_of_fsdp_on_2_3_and_4_processes(tmp_path):
    config = small(
        train__parallel="fsdp", model__n_embd=60, model__qk_norm=True
    )  # heads of 15: nothing divides evenly
    (tmp_path / "run.toml").write_text(configuration.to_toml(config))
    (tmp_path / "sharded.py").write_text(SHARDED)
    done = torchrun(4, tmp_path / "sharded.py", tmp_path / "run.toml", PYTHONPATH=str(ROOT))
    measured = {}
    for line in done.stdout.splitlines():
        if line.startswith("MEASURED"):
            world, rank, found = json.loads(line.removeprefix("MEASURED"))
            measured[world, rank] = found
    assert sorted(measured) == [(world, rank) for world in (2, 3, 4) for rank in range(world)]
    for (world, rank), found in measured.items():
        planned = state_bytes(config, meta_model(config), world)
        for part, size in found.items():
            assert size == planned[part] if rank == 0 else size <= planned[part], (
                world,
                rank,
                part,
            )


# ---- activations ---------------------------------------------------------------------------------


def saved_tensors(config):
    """What autograd saves in a training pass, without parameters; compiled if the config says so."""
    torch.manual_seed(0)
    model = AOGPT(config.model)
    if config.train.compile:
        torch._dynamo.reset()
        model.compile(
            backend="aot_eager_decomp_partition"
        )  # what inductor keeps, without a C++ compiler
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = (
                tensor  # holding it, so that no other one takes its place
            )
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses(model, config)
    return list(seen.values())


def cpu_norms(config):
    """Bytes of a token in a block that RMSNorm saves on a CPU, where it is several kernels instead of one: x / rms, and
    of bfloat16 inputs their float32 copies, too."""
    m, streams = config.model, 2 if config.model.target == "two_stream" else 1
    residual = 2 * streams * 4 * m.n_embd if m.norm == "rmsnorm" else 0
    heads = (1 + streams) * 4 * m.n_embd if m.qk_norm else 0
    if config.train.dtype == "float32":
        return residual + heads
    return (
        residual + 2 * heads - (streams - 1) * 2 * m.n_embd
    )  # in place of the second stream's queries as they were


def cast_weights(config):
    """Bytes of autocast's copies of the weights of a block; a second stream has its own of the queries' rows."""
    linear = [m for m in meta_model(config).blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    sizes = sum(
        p.numel() for m in linear for p in m.parameters() if p.dim() == 2
    )  # biases are added, not saved
    sizes += config.model.n_embd**2 if config.model.target == "two_stream" else 0
    return 2 * sizes if config.train.dtype == "bfloat16" else 0


ARCHITECTURES = {
    "adaln": {},
    "plain": PLAIN,
    "gpt2": PLAIN | {"model__norm": "layernorm", "model__qk_norm": False},
    "hidden start": {"model__start": "hidden"},
    "shared": {"model__target": "shared"},
    "per block": {"model__target": "per_block"},
    "two streams": {"model__target": "two_stream"},
    "groups": {"model__target": "two_stream", "objective": ObjectiveConfig("groupwise", group=4)},
}
ENCODER = {"attention": "full", "target": "none", "mask_token": V - 10}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_bytes_of_a_block_are_what_autograd_saves(changes, dtype):
    one, two = (small(layers=layers, dtype=dtype, **changes) for layers in (1, 2))
    measured = (
        storage_bytes(saved_tensors(two)) - storage_bytes(saved_tensors(one)) - cast_weights(one)
    ) / (B * T)
    assert block_bytes(one, "none") + cpu_norms(one) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lambda_dce", "score_entropy"])
def test_bytes_of_an_encoders_block_are_what_autograd_saves(kind, dtype):
    noise = {"noise": True, "position": "rotary"} if kind == "score_entropy" else {}
    base = small(layers=2, dtype=dtype)
    two = replace(
        base,
        model=replace(base.model, **ENCODER, **noise),
        objective=ObjectiveConfig(kind),
        order=OrderConfig("random"),
    )
    one = change(two, model__n_layer=1)
    measured = (
        storage_bytes(saved_tensors(two)) - storage_bytes(saved_tensors(one)) - cast_weights(one)
    ) / (B * T)
    # adaLN on the noise level keeps a few vectors a sequence, not a token
    assert block_bytes(one, "none") + cpu_norms(one) == pytest.approx(measured, rel=0.02)


def test_compiled_training_keeps_less_than_planned_and_logits_as_planned():
    one, two = (small(layers=layers, dtype="bfloat16", train__compile=True) for layers in (1, 2))
    saved = saved_tensors(two)
    measured = (storage_bytes(saved) - storage_bytes(saved_tensors(one)) - cast_weights(one)) / (
        B * T
    )
    assert 0.5 * block_bytes(one, "none") < measured < block_bytes(one, "none")
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
    """Live bytes after the forward pass, and the peak of the whole step, of a model that already has gradients."""
    torch.manual_seed(0)
    model = AOGPT(config.model)
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
    """The peak is in the backward pass of a block, in that of a chunk of the head, or in that of the whole head."""
    for module in (model_module, memory_plan):
        monkeypatch.setattr(module, "HEAD_CHUNK_ELEMENTS", chunk)
    sizes = {
        "train__batch_size": 16,
        "train__micro_batch_size": 16,
        "model__vocab_size": vocabulary,
    }
    config = small(layers=6, dtype=dtype, train__activation_checkpointing=checkpointing, **sizes)
    kept, peak = step_bytes(config)
    memory = memory_by_part(config, meta_model(config), 1)
    norms = (
        16 * T * cpu_norms(config)
    )  # of a block: in all of them, in the one computed again, or in none at once
    in_all = 6 * norms if checkpointing == "none" else 0
    again = (
        norms
        if checkpointing != "none"
        and memory_plan.working_bytes(config, 16)["block"] == memory["working"]
        else 0
    )
    copies = (
        memory["in_use"] if checkpointing == "none" else 0
    )  # else gone before the backward pass
    planned = memory["activations"] + copies + in_all + 16 * T * 4 * D  # the last norm's
    if chunk == 2**16:  # no logits are kept
        assert planned == pytest.approx(kept, rel=0.03)
    assert planned + memory["working"] + again == pytest.approx(peak, rel=0.05)


# ---- the whole plan ------------------------------------------------------------------------------


def test_time_and_traffic_by_hand():
    config = small(layers=3, dtype="bfloat16", train__batch_size=48, train__parallel="fsdp")
    gpu = GPU("a GPU", 1e12, 80)
    weights = sum(p.numel() for p in AOGPT(config.model).parameters())
    model_flops = (6 * (12 * 3 * D * D + D * V) + 12 * 3 * D * T) * 48 * T
    plan = plan_run(config, 4, gpu, 0.5)
    assert (plan.micro_steps, plan.tokens_per_step) == (3, 48 * T)
    assert plan.flops_per_step == model_flops and plan.flops_again_per_step == 0
    assert plan.seconds_per_step == pytest.approx(model_flops / (4 * 1e12 * 0.5))

    outside = weights - 3 * sum(p.numel() for p in AOGPT(config.model).blocks[0].parameters())
    gathered = 3 * (
        2 * 2 * (weights - outside) + 4 * outside
    )  # 3 micro-batches; blocks twice in bfloat16
    assert plan.sent_per_step == (gathered + 4 * weights) * 3 // 4
    often = change(config, train__reduce_every_micro_batch=True)
    assert plan_run(often, 4, gpu).sent_per_step == (gathered + 3 * 4 * weights) * 3 // 4
    ddp = plan_run(change(config, train__parallel="ddp"), 4, gpu)
    assert ddp.sent_per_step == 2 * 4 * weights * 3 // 4
    assert plan_run(config, 1, gpu).sent_per_step == 0

    block = plan_run(change(config, train__activation_checkpointing="block"), 4, gpu, 0.5)
    assert (
        block.flops_again_per_step == (2 * 12 * 3 * D * D + 4 * 3 * D * T) * 48 * T
    )  # a third, without the head's
    assert plan_run(change(config, train__dtype="float32"), 4, gpu).seconds_per_step is None


def test_ddp_holds_everything_and_fsdp_a_share_on_every_gpu():
    config = small(dtype="bfloat16", train__batch_size=16)
    gpu = find_gpu(H100)
    parts = ("weights", "gradients", "optimizer", "ema")
    alone, ddp = plan_run(config, 1, gpu).memory, plan_run(config, 4, gpu).memory
    fsdp = plan_run(change(config, train__parallel="fsdp"), 4, gpu).memory
    for part in parts:
        assert ddp[part] == alone[part]
        assert fsdp[part] == pytest.approx(alone[part] / 4, rel=0.01)
    assert alone["in_reduction"] == ddp["in_reduction"] == 0  # one micro-batch on each of 4
    two = change(config, train__batch_size=32)
    assert (
        plan_run(two, 4, gpu).memory["in_reduction"] == alone["weights"]
    )  # what waits for the second one
    two = change(two, train__parallel="fsdp")
    often = change(two, train__reduce_every_micro_batch=True)
    waiting = (
        plan_run(two, 4, gpu).memory["in_reduction"]
        - plan_run(often, 4, gpu).memory["in_reduction"]
    )
    assert waiting == alone["weights"]


@pytest.mark.parametrize("name, gib", [("aogpt_1b", 22), ("aogpt_7b", 50)])
def test_the_micro_batch_and_the_number_of_gpus_that_fit_are_the_limits(name, gib):
    config, world, gpu = loaded(name), LARGE[name], find_gpu(H100, gib)

    def fits(world, **changes):
        return plan_run(change(config, **changes), world, gpu).fits

    plan = plan_run(config, world, gpu)
    largest = plan.largest_micro_batch_size
    larger = [d for d in memory_plan.divisors(config.train.batch_size // world) if d > largest]
    assert largest > 0 and fits(world, train__micro_batch_size=largest)
    assert larger and not any(fits(world, train__micro_batch_size=size) for size in larger)
    small_batch = change(config, train__micro_batch_size=2)
    found = plan_run(small_batch, world, gpu).smallest_world_size
    assert (
        found > 1
        and plan_run(small_batch, found, gpu).fits
        and not plan_run(small_batch, found // 2, gpu).fits
    )


# ---- the command line ----------------------------------------------------------------------------


def test_the_script_prints_the_plan_and_writes_it(script, tmp_path):
    out = tmp_path / "plan.json"
    options = [
        "--world-size",
        2,
        "--gpu-memory-gib",
        24,
        "--mfu",
        0.3,
        "--plan-json",
        out,
        "--out",
        tmp_path / "x_y",
    ]
    options += ["--optim.kind", "muon", "--train.activation-checkpointing", "block"]
    status, text, err = script(train, ROOT / "configs" / "aogpt_1b.toml", "--plan", *options)
    assert status == 0, err
    report = json.loads(out.read_text())
    config = loaded("aogpt_1b", optim__kind="muon", train__activation_checkpointing="block")
    plan = plan_run(config, 2, find_gpu(H100, 24), 0.3)
    assert report["plan"]["memory"] == plan.memory and report["plan"]["fits"] == plan.fits
    assert report["config"]["out"].endswith("x_y")  # other options pass as they are
    assert memory_plan.plan_text(plan) in text and not (tmp_path / "x_y").exists()
    total = sum(AOGPT.num_params(meta_model(config)).values())
    assert f"{total / 1e6:,.1f}" in text and "does NOT fit" in text
    assert plan.smallest_world_size > 2 and re.search(
        rf"GPUs that it fits on +{plan.smallest_world_size} ", text
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ("--world-size 0", ["--world-size is 0"]),
        ("--world-size 3", ["(512) cannot be cut among 3 GPUs", "510 or 513"]),
        ("--world-size 1024", ["cannot be cut among 1024 GPUs", "e.g. 1024, or"]),
        (
            "--world-size 32",
            ["train.micro_batch_size (32) must divide the 16 sequences", "one of 1, 2, 4, 8, 16"],
        ),
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


def test_a_plan_without_a_config_is_an_error():
    assert_user_error(run_script("train.py", "--plan", check=False), "give a config file first")


def test_the_plan_of_7_billion_weights_needs_no_room_for_them():
    """28 GB of weights, planned by a process that may have 1 GB of data."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))

    command = [sys.executable, "train.py", "configs/aogpt_7b.toml", "--plan", "--world-size", "64"]
    done = subprocess.run(
        command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "6,967.2" in done.stdout and "fits in" in done.stdout


def main_figures(plan):
    """The line that the comments of a large config end with."""
    total = sum(plan.parameters.values())
    return (
        f"{total / 1e6:,.1f}M parameters, {plan.parameters['conditioning'] / total:.1%} of them conditioning; "
        f"{plan.memory_total / 2**30:.1f} GiB a GPU;\n#     {plan.seconds_per_step:.2f} s a step, "
        f"{plan.steps * plan.seconds_per_step / 86400:.1f} days; {plan.checkpoint_bytes / 1e9:.1f} GB a checkpoint"
    )


@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_fits_its_gpus_and_its_comments_are_not_stale(name):
    plan = plan_run(loaded(name), LARGE[name], find_gpu(H100))
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    assert plan.fits
    assert f"--world-size {LARGE[name]} says for {H100} at 40%" in text
    assert f"#     {main_figures(plan)}\n" in text


def test_the_documentation_shows_what_the_plan_prints():
    text = (ROOT / "docs" / "large_runs.md").read_text()
    shown = "aogpt_7b on" + text.split("\n    aogpt_7b on")[1].split("\n\n")[0]
    lines = {line.removeprefix("    ") for line in shown.splitlines()}
    plan = plan_run(loaded("aogpt_7b"), LARGE["aogpt_7b"], find_gpu(H100))
    assert len(lines) > 10 and lines <= set(memory_plan.plan_text(plan).splitlines())
