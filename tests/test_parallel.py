"""Runs of several processes give the numbers of one, whatever the processes and the
shards."""

import itertools
import math
from dataclasses import replace

import parallel_jobs
import pytest
import torch
from helpers import (
    ALONE,
    assert_same,
    assert_same_losses,
    change,
    metrics,
    needs_compiler,
    read_checkpoint,
    run_script,
    tiny_config,
    write_config,
)

import train
from aogpt.data.loader import TokenDataset
from aogpt.objectives import ObjectiveConfig
from aogpt.orders import OrderConfig
from aogpt.runtime.processes import processes
from aogpt.training import parallel
from aogpt.training.batches import micro_batches
from aogpt.training.checkpoint import StopRequest


def do(*parts):
    """Let several processes do jobs of parallel_jobs.py, part by part: (number of
    processes, [(function, configuration)])."""
    words = []
    for world, jobs in parts:
        words += [world, *(f"{name}={write_config(config)}" for name, config in jobs)]
    assert "FutureWarning" not in run_script("tests/parallel_jobs.py", *words).stderr


def result(name, config):
    return torch.load(config.run_folder / f"{name}.pt", weights_only=True)


PLACES = list(itertools.product(("ddp", "fsdp"), (1, 2, 4)))
MOVES = [  # a checkpoint of one file, or of 1, 2 and 4 processes; to fewer and to more
    (("ddp", 2), ("fsdp", 4)),
    (("fsdp", 1), ("ddp", 4)),
    (("fsdp", 2), ("ddp", 1)),
    (("fsdp", 2), ("fsdp", 4)),
    (("fsdp", 4), ("ddp", 1)),
]
STEPS = 6
MOVED = 4


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Return the runs of all places, {place: configuration}. Seven validation sequences
    are no multiple of the processes."""
    out = tmp_path_factory.mktemp("everywhere")
    base = tiny_config(data, out, steps=STEPS, model__dropout=0.0, model__n_layer=1)
    base = change(base, train__micro_batch_size=2, eval__interval=3)
    base = change(base, optim__kind="muon", model__position="rotary")
    base = change(base, checkpoint__keep=99, checkpoint__interval=MOVED)
    return {
        to: change(base, name=f"{to[0]}_{to[1]}", train__parallel=to[0])
        for to in PLACES
    }


@pytest.fixture(scope="module")
def moves(undisturbed):
    """Return the runs that go on elsewhere, {(from, to): configuration}."""
    configs = {}
    for source, to in MOVES:
        name = f"{undisturbed[source].name}_to_{undisturbed[to].name}"
        configs[source, to] = change(undisturbed[to], name=name, eval__interval=0)
    return configs


def moved(moves, source, to):
    """Return the jobs of the moves between these numbers of processes."""
    return [
        ("moved", config)
        for (start, end), config in moves.items()
        if (start[1], end[1]) == (source, to)
    ]


def runs_on(undisturbed, world):
    """Return the jobs of the runs of this number of processes."""
    return [
        ("run", config) for (_, count), config in undisturbed.items() if count == world
    ]


@pytest.fixture(scope="module")
def everywhere(undisturbed, moves, pairs):
    """The runs of one and two processes. Launching takes seconds, so the same processes
    also do the other jobs of this file."""
    steps = [("steps", shards) for _, shards in pairs.values()]
    do(
        (1, runs_on(undisturbed, 1)),
        (2, [*runs_on(undisturbed, 2), *steps]),
        (1, moved(moves, 2, 1)),
    )


@pytest.fixture(scope="module")
def on_four(everywhere, undisturbed, moves):
    """The runs of four processes, on any machine."""
    jobs = [*runs_on(undisturbed, 4), *moved(moves, 1, 4), *moved(moves, 2, 4)]
    do((4, jobs), (1, moved(moves, 4, 1)))


def places(values):
    """Return parameters of a test; those of four processes are slow."""
    slow = pytest.mark.slow(reason="starts four processes")
    return [
        pytest.param(*value, marks=[slow] if "4" in str(value) else [])
        for value in values
    ]


@pytest.mark.parametrize(
    "kind, world", places(place for place in PLACES if place != ("ddp", 1))
)
def test_all_processes_under_ddp_and_fsdp_give_the_losses_of_one_process(
    request, undisturbed, kind, world
):
    request.getfixturevalue("on_four" if world == 4 else "everywhere")
    assert_same_losses(undisturbed[kind, world], undisturbed["ddp", 1], 1e-5)


@pytest.mark.parametrize("source, to", places(MOVES))
def test_a_checkpoint_goes_on_bit_for_bit_on_any_number_of_processes(
    request, undisturbed, moves, source, to
):
    """The first loss differs by the order of a few sums in float32, 6e-8 of a loss of
    about 5.6; AdamW then amplifies that."""
    request.getfixturevalue("on_four" if 4 in source + to else "everywhere")
    before = undisturbed[source]
    config = moves[source, to]
    path = before.run_folder / "checkpoints" / f"step_{MOVED:08d}"
    assert_same(result("moved", config), read_checkpoint(path)["tensors"])
    ours = metrics(config, "loss")
    expected = metrics(before, "loss")
    assert list(ours) == list(range(MOVED + 1, STEPS + 1))
    assert abs(ours[MOVED + 1] - expected[MOVED + 1]) < 2e-6
    assert max(abs(ours[step] - expected[step]) for step in ours) < 1e-5


SYSTEMS = {  # changes of the model, objective, orders
    "left to right": ({"target": "none"}, "ar", "l2r"),
    "adaln": ({"target": "adaln"}, "ao_ar", "mixture"),
    "tied head": ({"tied_head": True, "position": "rotary"}, "ao_ar", "random"),
    "per block": ({"target": "per_block"}, "ao_ar", "random"),
    "two streams": ({"target": "two_stream"}, "groupwise", "random"),
    "score entropy": (
        {
            "target": "none",
            "attention": "full",
            "mask_token": 257,
            "noise": True,
            "position": "rotary",
        },
        "score_entropy",
        "random",
    ),
}


def system(base, name, **changes):
    settings, objective, order = SYSTEMS[name]
    config = replace(
        base,
        name=name.replace(" ", "_"),
        model=replace(base.model, **settings),
        objective=ObjectiveConfig(objective),
        order=OrderConfig(order),
    )
    return change(config, **changes)


@pytest.fixture(scope="module")
def short(data, tmp_path_factory):
    """Four steps of four micro-batches, or of two on each of two processes."""
    base = tiny_config(
        data, tmp_path_factory.mktemp("short"), steps=5, model__dropout=0.0
    )
    base = change(
        base, eval__interval=0, checkpoint__interval=99, train__micro_batch_size=2
    )
    return change(base, optim__warmup_steps=1, train__steps=4)


@pytest.fixture(scope="module")
def pairs(short, run):
    """{name: (a configuration for one process, one for two)} of runs that should
    agree."""
    alone = {name: system(short, name) for name in SYSTEMS}
    # a matrix of 33 rows, which two processes cannot share evenly
    alone["muon"] = change(short, name="muon", optim__kind="muon", model__mlp_width=33)
    alone["started"] = change(short, name="started", train__init_from=str(run))
    pairs = {}
    # Activation checkpointing changes nothing, either: every kind has its turn.
    for (name, config), kind in zip(alone.items(), itertools.cycle(("none", "block"))):
        shards = change(config, name=f"{config.name}_2", train__parallel="fsdp")
        pairs[name] = config, change(shards, train__activation_checkpointing=kind)
    replicas = change(alone["muon"], name="muon_replicas", train__parallel="ddp")
    pairs["muon, replicas"] = alone["muon"], replicas
    reduced = change(short, name="reduced")
    for kind in ("ddp", "fsdp"):
        config = change(reduced, name=f"reduced_{kind}", train__parallel=kind)
        pairs[kind] = reduced, config
    return pairs


@pytest.mark.parametrize("name", [*SYSTEMS, "muon", "muon, replicas", "started"])
def test_every_system_takes_the_same_steps_on_two_processes_as_alone(
    pairs, everywhere, name
):
    """Losses and gradient norms; in shards, unless the name says otherwise."""
    alone, shared = pairs[name]
    expected = torch.tensor(parallel_jobs.steps(alone, ALONE))
    ours = torch.tensor(result("steps", shared))
    assert len(ours) == 4
    assert expected[0, 0] != expected[3, 0]
    torch.testing.assert_close(ours[:, 0], expected[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[:, 1], expected[:, 1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind, groups", [("ddp", 1), ("fsdp", 3)])
def test_gradients_are_reduced_once_a_step(pairs, everywhere, kind, groups):
    """ddp has one bucket, fsdp a group of weights for each of two blocks and for the
    rest."""
    alone, shared = pairs[kind]
    ours = torch.tensor(result("steps", shared))
    expected = torch.tensor(parallel_jobs.steps(alone, ALONE))
    assert ours[:, 2].tolist() == [groups] * 4
    torch.testing.assert_close(ours[:, 0], expected[:, 0], rtol=0, atol=1e-5)


@pytest.mark.slow(reason="compiles in two processes")
@needs_compiler
def test_compiled_shards_have_the_losses_of_eager_ones_and_compile_once(short):
    base = change(
        short, train__parallel="fsdp", train__activation_checkpointing="block"
    )
    eager = change(base, name="eager")
    compiled = change(base, name="compiled", train__compile=True)
    do((2, [("run", eager), ("compiled", compiled)]))
    frames = result("compiled", compiled)
    assert frames[0] > 0
    assert frames == [frames[0]] * 4
    ours = metrics(compiled, "loss")
    expected = metrics(eager, "loss")
    # Fused kernels round differently (relative 1e-7), and AdamW's first steps amplify
    # it.
    assert max(abs(ours[step] - expected[step]) for step in expected) < 1e-4
    assert len(ours) == 4


@pytest.mark.parametrize("name", ["adaln", "two streams", "per block", "score entropy"])
def test_activation_checkpointing_changes_no_gradient(short, name):
    config = system(short, name, model__dropout=0.3)
    dataset = TokenDataset(config.data.folder, "train", 16)
    batch = next(micro_batches(dataset, config, ALONE, 0))
    gradients = []
    torch.set_default_dtype(torch.float64)
    try:
        for kind in ("none", "block"):
            changed = change(config, train__activation_checkpointing=kind)
            model = parallel.build(changed, ALONE).double()
            torch.manual_seed(3)
            changed.objective.definition.loss(
                model, batch, changed.objective
            ).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
    finally:
        torch.set_default_dtype(torch.float32)
    expected, recomputed = gradients
    assert any(g.abs().sum() > 0 for g in expected.values())
    # the same operations on the same numbers, summed in the same order
    torch.testing.assert_close(recomputed, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_leaves_weights_averages_moments_and_counts_untouched(
    short, kind, optimizer, monkeypatch
):
    config = change(short, name=f"skips_{kind}_{optimizer}", optim__kind=optimizer)
    config = change(config, train__parallel=kind)
    with processes("cpu", 60.0, group=True) as procs:
        state, data = parallel_jobs.start(config, procs)
        plain = train.update
        states = []

        def update(state, loss, norm):
            if len(states) == 2:
                for p in state.model.parameters():
                    p.grad.mul_(math.nan)
                norm = norm * math.nan
            plain(state, loss, norm)
            updates = state.average.updates.item()
            states.append((parallel_jobs.full_state(state), updates))

        monkeypatch.setattr(train, "update", update)
        stop = StopRequest(procs)
        train.training_loop(
            change(config, train__steps=4), procs, state, data, None, stop
        )
    (_, _), (before, updates), (spoilt, same), (after, more) = states
    assert_same(spoilt, before)
    assert same == updates == 2
    assert more == 3
    assert state.progress.step == 4
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    for name in (
        "model.start",
        "ema.start",
        "optimizer.start.exp_avg",
        "optimizer.start.step",
    ):
        assert not torch.equal(after[name], before[name])
