"""aogpt/training/plan.py: its bytes against those of real models, optimizers, averages,
shards, checkpoints and steps."""

import itertools
import re
import weakref

import pytest
import torch
from helpers import ROOT, change, some_slow, torchrun, write_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aogpt import model as model_page
from aogpt.model import ModelConfig
from aogpt.systems import build_model
from aogpt.training import config as configuration
from aogpt.training import plan as planning
from aogpt.training.config import Config, TrainConfig
from aogpt.training.metrics import GPU, GPUS
from aogpt.training.optimizers import EMA, make_optimizers, named_state
from aogpt.training.parallel import RecomputedBlock
from aogpt.training.plan import memory_of, meta_model, plan_run, plan_text, state_bytes

B = 4
T = 128
D = 64
V = 320
LARGE = {"aogpt_1b": 8, "aogpt_7b": 64}  # for how many GPUs the comment has a plan
H100 = "NVIDIA H100 80GB HBM3"
PLAIN = {"order__kind": "l2r", "model__target": "none"}


def small(layers=2, dtype="float32", **changes):
    model = ModelConfig(
        vocab_size=V, block_size=T, n_layer=layers, n_head=4, n_embd=D, cond_dim=24
    )
    train = TrainConfig(2000, batch_size=B, micro_batch_size=B, compile=False)
    return change(Config(model=model, train=train), train__dtype=dtype, **changes)


def loaded(name):
    return configuration.load_toml(ROOT / "configs" / f"{name}.toml")


def losses(model, config):
    """A training pass in the precision of the config: (B, T)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        V - 20, (config.train.micro_batch_size, T), generator=generator
    )
    order = torch.stack([torch.randperm(T, generator=generator) for _ in tokens])
    with torch.autocast(
        "cpu", torch.bfloat16, enabled=config.train.dtype == "bfloat16"
    ):
        return model(tokens, order)


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
    ema = EMA(model, 0.9)
    optimizers = make_optimizers(model, config)
    losses(model, config).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    state = [
        t for values in named_state(model, optimizers).values() for t in values.values()
    ]
    measured = {
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(p.grad for p in model.parameters()),
        "optimizer": storage_bytes(state),
        "ema": storage_bytes(ema.weights.values()),
    }
    assert state_bytes(config, meta_model(config), 1) == measured
    more = state_bytes(
        change(config, optim__more_ema_decays=(0.5, 0.6)), meta_model(config), 1
    )
    assert more == measured | {"ema": 3 * measured["ema"]}


@pytest.mark.slow(reason="trains in several processes")
@pytest.mark.parametrize("world", [2, 3])
def test_shares_are_those_of_fsdp(tmp_path, world):
    # heads of 15: nothing divides evenly
    config = small(train__parallel="fsdp", model__n_embd=60)
    config = change(config, out=str(tmp_path))
    torchrun(world, "tests/parallel_jobs.py", f"state_bytes={write_config(config)}")
    first, *others = torch.load(config.run_folder / "state_bytes.pt")
    assert first == state_bytes(config, meta_model(config), world)
    assert all(size <= first[part] for found in others for part, size in found.items())


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still alive, now and
    at most."""

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


CASES = {
    "adaln": {},
    "plain": PLAIN,
    "two streams": {"model__target": "two_stream"},
    "selective": {"train__activation_checkpointing": "selective"},
    "block": {"train__activation_checkpointing": "block"},
    "chunked head": {"model__vocab_size": 4096, "chunk": 2**17},
}


@pytest.mark.parametrize(
    "case, dtype",
    some_slow(
        itertools.product(CASES, ["float32", "bfloat16"]),
        lambda case, dtype: dtype == "float32" or case == "adaln",
        "the other type",
    ),
)
def test_the_peak_of_a_step_is_the_plans_within_a_factor(case, dtype, monkeypatch):
    changes = CASES[case]
    """1.2 to 1.6: a CPU's RMSNorm saves several tensors where a GPU's saves one."""
    changes = {"train__batch_size": 16, "train__micro_batch_size": 16} | changes
    chunk = changes.pop("chunk", 2**25)
    for device in ("cpu", "cuda"):  # a plan is for GPUs
        monkeypatch.setitem(model_page.CHUNK_ELEMENTS, device, chunk)
    config = small(6, dtype, **changes)
    torch.manual_seed(0)
    model = build_model(config.model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if config.train.activation_checkpointing != "none":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = RecomputedBlock(block, config)
    with Live([t for p in model.parameters() for t in (p, p.grad)]) as live:
        losses(model, config).mean().backward()
    memory = memory_of(config, meta_model(config), 1, 16)
    planned = sum(memory[part] for part in ("in_use", "activations", "working"))
    assert planned / 1.2 < live.peak < 1.6 * planned


def test_the_time_of_a_step_by_hand():
    config = small(
        layers=3, dtype="bfloat16", train__batch_size=48, train__parallel="fsdp"
    )
    gpu = GPU(1e12, 80)
    flops = (6 * (12 * 3 * D * D + D * V) + 12 * 3 * D * T) * 48 * T
    plan = plan_run(config, 4, gpu, 0.5)
    assert plan.tokens_per_step == 48 * T
    assert plan.seconds_per_step == pytest.approx(flops / (4 * 1e12 * 0.5))
    block = plan_run(
        change(config, train__activation_checkpointing="block"), 4, gpu, 0.5
    )
    again = (2 * 12 * 3 * D * D + 4 * 3 * D * T) * 48 * T  # a third, without the head's
    assert block.seconds_per_step == pytest.approx((flops + again) / (4 * 1e12 * 0.5))


def test_the_command_prints_the_plan_of_a_config_with_overrides(script, tmp_path):
    options = [
        "--world-size",
        2,
        "--gpu",
        "NVIDIA A10G",
        "--mfu",
        0.3,
        "--optim.kind",
        "muon",
    ]
    path = ROOT / "configs" / "aogpt_1b.toml"
    status, text, err = script(planning, path, *options, "--out", tmp_path / "run")
    assert status == 0, err
    config = change(loaded("aogpt_1b"), optim__kind="muon")
    plan = plan_run(config, 2, GPUS["NVIDIA A10G"], 0.3)
    assert plan_text(plan) in text and not (tmp_path / "run").exists()
    assert (
        f"{sum(plan.parameters.values()) / 1e6:,.0f} M" in text
        and "does NOT fit" in text
    )
    status, text, err = script(planning, ROOT / "configs" / "quickstart.toml")
    assert status == 0 and not re.search(
        r"(?<![\d.])0[.0]* (GiB|MiB|GB|s|days|M)", text
    ), text


@pytest.mark.parametrize(
    "options, words",
    [
        ("configs/aogpt_1b.toml --world-size 0", "--world-size is 0"),
        (
            "configs/aogpt_1b.toml --world-size 7",
            "must be a multiple of the 7 processes",
        ),
        ("configs/aogpt_1b.toml --gpu H100", "H100"),
        ("", "give a config file first"),
    ],
)
def test_a_plan_that_cannot_be_made_is_an_error(script, monkeypatch, options, words):
    monkeypatch.chdir(ROOT)
    status, out, err = script(planning, *options.split())
    assert status == 2 and not out and words in " ".join(err.split())


@pytest.mark.parametrize("name", LARGE)
def test_what_the_config_and_documentation_say_of_plans_is_not_stale(name):
    path = ROOT / "configs" / "aogpt_1b.toml"
    text = path.read_text()
    words = [str(path)]
    if name == "aogpt_7b":  # the options in the comment
        (command,) = re.findall(r"(--name aogpt_7b .*?)\n#\n", text, re.DOTALL)
        words += command.replace("\\\n#", " ").split()
    config = configuration.from_command_line(words, "")
    assert config.name == name
    plan = plan_run(config, LARGE[name], GPUS[H100])
    total = sum(plan.parameters.values())
    seconds = plan.seconds_per_step
    days = plan.config.train.steps * seconds / 86400
    share = plan.parameters["conditioning"] / total
    assert plan.memory_total <= plan.memory_usable
    memory = f"{plan.memory_total / 2**30:.1f}"
    saved = f"{plan.checkpoint_bytes / 1e9:.1f}"
    assert f"--world-size {LARGE[name]}" in text
    assert (
        f"{total / 1e6:,.1f}M parameters, {share:.1%} of them conditioning; {memory} GiB"
        in text
    )
    assert f"{seconds:.2f} s a step, {days:.1f} days; {saved} GB a checkpoint\n" in text
    shown = (ROOT / "docs" / "large_runs.md").read_text().replace("\n    ", "\n")
    assert name != "aogpt_1b" or f"\n{plan_text(plan)}\n" in shown
