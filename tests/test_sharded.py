"""Checkpoints that several processes write together: whole or not there."""

import os
import shutil

import parallel_jobs
import pytest
from helpers import (
    assert_same,
    change,
    metrics,
    newest,
    read_checkpoint,
    run_script,
    tiny_config,
    write_config,
)
from safetensors.torch import load_file

import train
from aogpt.checkpoints import load, store
from aogpt.runtime.processes import processes
from aogpt.training.checkpoint import Saver
from convert import convert

META = {"tokenizer": "bytes", "vocab_size": 257}


@pytest.fixture(scope="module")
def procs():
    """This process as one that may write sharded checkpoints."""
    with processes("cpu", 60.0, group=True) as alone:
        yield alone


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded")
    return tiny_config(
        data,
        out,
        steps=10,
        checkpoint__interval=2,
        model__dropout=0.0,
        train__parallel="fsdp",
        eval__interval=2,
    )


@pytest.fixture(scope="module")
def pair(base):
    """Two runs of two processes: an undisturbed one, and what one with faults said. And
    a run of one process that was killed."""
    config = change(base, name="two")
    faulty = change(base, name="faulty")
    killed = change(base, name="killed")
    jobs = [2, f"run={write_config(config)}", f"faulty={write_config(faulty)}"]
    jobs += [1, f"killed={write_config(killed)}"]
    done = run_script("tests/parallel_jobs.py", *jobs, check=False)
    assert "(exitcode: -9)" in done.stderr, done.stderr
    return config, faulty, done


@pytest.fixture
def copy(pair, tmp_path):
    """Return the undisturbed run of two processes, to damage; its checkpoints of steps
    8 and 10."""
    config = change(pair[0], out=str(tmp_path))
    shutil.copytree(pair[0].run_folder, config.run_folder)
    return config, *store.find(config.run_folder)


@pytest.fixture
def state(base, procs, tmp_path):
    """Return the state of a run that is about to begin, and its configuration."""
    config = change(base, out=str(tmp_path))
    return parallel_jobs.start(config, procs)[0], config


def names(path):
    return sorted(file.name for file in path.iterdir())


def test_checkpoints_that_fail_on_any_process_are_named_and_cost_nothing_but_themselves(
    pair,
):
    """A write of the second process, the last move of the first, a folder: each is lost
    on both, and training goes on to the same losses and the same last checkpoint as
    without a fault."""
    undisturbed, config, done = pair
    steps = {step: store.path_of(config.run_folder, step) for step in (2, 4, 6, 8)}
    for step, reason in ((4, "File too large"), (6, "not today"), (8, "not today")):
        said = f"warning: could not write {steps[step]}: "
        (line,) = [line for line in done.stderr.splitlines() if said in line]
        assert reason in line
    for key in ("loss", "val_loss_random"):
        assert metrics(config, key) == metrics(undisturbed, key)
        assert len(metrics(config, key)) >= 5
    assert names(config.run_folder / "checkpoints") == [steps[2].name, "step_00000010"]
    ours = newest(config)
    assert_same(ours["tensors"], newest(undisturbed)["tensors"])
    losses = metrics(config, "val_loss_random")
    # every evaluation here is the best so far
    assert losses[10] == min(losses.values())
    assert ours["best"] == {"step": 10, "loss": losses[10]}
    assert store.best_of(config.run_folder).name == "step_00000010"


def test_the_best_that_is_lost_is_not_the_best(state, procs, monkeypatch):
    state, config = state
    warnings = []
    saver = Saver(config, procs, META, warnings.append)

    def fail(*paths):
        raise OSError("no room")

    monkeypatch.setattr(os, "rename", fail)
    state.progress.step = 4
    saver.save(state, {"step": 4, "loss": 1.0})
    assert saver.written is None
    assert state.progress.best is None
    assert len(warnings) == 1
    assert "no room. Is the disk full?" in warnings[0]
    assert not names(config.run_folder / "checkpoints"), "its remains take room"


def test_a_bug_in_writing_is_not_told_as_a_full_disk(state, procs, monkeypatch):
    state, config = state
    saver = Saver(config, procs, META, pytest.fail)
    monkeypatch.setattr(store, "digest", lambda contents: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        saver.save(state, None)


def test_killed_while_a_checkpoint_is_written_a_run_resumes_from_the_one_before(
    base, pair, procs
):
    whole = change(base, name="whole")
    config = change(base, name="killed")
    saved = config.run_folder / "checkpoints"
    assert names(saved) == [".step_00000004.tmp", "step_00000002"]
    part = store.parts(saved / ".step_00000004.tmp")[0]
    # as if it had happened a little earlier
    os.truncate(part, part.stat().st_size // 2)
    (saved / ".step_00000000.tmp").mkdir()  # as if an older one had just been removed,
    (config.run_folder / ".best.0123abcd.tmp").touch()  # and the pointer been written
    train.train(config, procs)
    train.train(whole, procs)
    ours = store.find(config.run_folder)
    expected = store.find(whole.run_folder)
    for a, b in zip(ours, expected, strict=True):
        assert_same(read_checkpoint(a)["tensors"], read_checkpoint(b)["tensors"])
    assert metrics(config) == metrics(whole)
    assert names(saved) == names(whole.run_folder / "checkpoints")
    assert set(names(config.run_folder)) - set(names(whole.run_folder)) <= {"killed.pt"}


def test_parts_of_several_processes_are_what_loading_and_converting_take(
    copy, tmp_path
):
    config, older, last = copy
    best = config.run_folder / "best"
    best.write_text(older.name + "\n")  # which in the run was the newest
    for path, source in ((config.run_folder, last), (best, older)):
        tensors = read_checkpoint(source)["tensors"]
        for weights, prefix in (("ema", "ema."), ("raw", "model.")):
            loaded = load(path, weights)
            for name, p in loaded.model.named_parameters():
                assert_same(p.detach(), tensors[prefix + name], name)
            assert (loaded.step, loaded.weights) == (store.step_of(source), weights)
    convert(str(config.run_folder), tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert_same(
        exported, {n: p.detach() for n, p in load(last).model.named_parameters()}
    )
    assert load(tmp_path / "export").step == 10
