"""sharded.py: checkpoints of several processes, written in the background, whole or not there, and never code."""

import json
import math
import os
import pickle
import shutil
import threading
import time

import parallel_jobs
import pytest
import torch
from helpers import (
    Hostile,
    assert_same,
    change,
    metrics,
    run_script,
    tiny_config,
    torchrun,
    write_config,
)
from safetensors.torch import load_file
from test_train import files
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import sample
import train
from checkpoints import load as checkpoint
from checkpoints import sharded, store
from checkpoints.errors import CheckpointError
from runtime.processes import processes
from training import state as states


@pytest.fixture(scope="module")
def procs():
    """This process as one that may write sharded checkpoints."""
    with processes("cpu", 60.0, group=True) as alone:
        yield alone


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded")
    config = tiny_config(
        data, out, steps=10, model__dropout=0.0, train__parallel="fsdp", eval__interval=2
    )
    return change(config, checkpoint__interval=2)


@pytest.fixture(scope="module")
def pair(base):
    """Two runs of two processes: an undisturbed one, and what one with faults said."""
    config, faulty = change(base, name="two"), change(base, name="faulty")
    done = torchrun(
        2, "tests/parallel_jobs.py", f"run={write_config(config)}", f"faulty={write_config(faulty)}"
    )
    return config, faulty, done


@pytest.fixture
def copy(pair, tmp_path):
    """The undisturbed run to damage; its two checkpoints, of steps 8 and 10."""
    config = change(pair[0], out=str(tmp_path))
    shutil.copytree(pair[0].run_folder, config.run_folder, symlinks=True)
    return config, *store.find(config.run_folder)


@pytest.fixture
def state(base, procs, tmp_path):
    """The state of a run that is about to begin, and its configuration."""
    config = change(base, out=str(tmp_path))
    return parallel_jobs.start(config, procs)[0], config


META = {"tokenizer": "bytes", "vocab_size": 257}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_state_at_its_step_whatever_happens_while_it_is_written(
    state, procs, monkeypatch
):
    (state, config), gate, warnings = state, threading.Event(), []
    plain = HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(
        HuggingFaceStorageWriter, "write_data", lambda *a: gate.wait(60) and plain(*a)
    )
    saver = states.Saver(config, procs, META, warnings.append)
    for p in state.model.parameters():
        state.optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": p.detach() / 2,
            "exp_avg_sq": p.detach() / 4,
        }
    before, state.progress.step = parallel_jobs.full_state(state), 3
    path = saver.save(state, state.progress.best)
    for tensor in [*state.model.parameters(), *state.ema.weights.values()]:
        tensor.detach().fill_(7)
    for values in state.optimizer.state.values():
        for tensor in values.values():
            tensor.fill_(7)
    saver.poll()
    assert not path.exists() and names(path.parent) == [".step_00000003.tmp"], (
        "it must not pass for a checkpoint yet"
    )
    gate.set()
    assert saver.wait() and names(path.parent) == [path.name] and not warnings
    assert_same(sharded.read_all(path, ""), before)
    assert store.read(path, verify=True)["step"] == 3


def test_the_newest_and_the_best_are_kept_and_best_is_a_link_to_it(state, procs):
    state, config = state
    saver, folder = states.Saver(config, procs, META, pytest.fail), config.run_folder
    best, kept = {1: 3.0, 2: 1.0, 6: 0.5}, {}
    for step in range(1, 9):
        state.progress.step, before = step, state.progress.best
        if step in best:
            state.progress.best = {"step": step, "loss": best[step]}
        saver.save(state, before)
        assert saver.wait()
        kept[step] = [store.step_of(path) for path in store.find(folder)]
        assert (folder / "best").resolve().name == f"step_{state.progress.best['step']:08d}"
    assert kept[5] == [2, 4, 5] and kept[8] == [6, 7, 8]
    assert (
        os.readlink(folder / "best") == "checkpoints/step_00000006"
        and not (folder / "best.pt").exists()
    )


def test_nothing_in_a_checkpoint_is_a_pickle_but_a_state_that_is_read_without_running_code(pair):
    for path in store.find(pair[0].run_folder):
        assert names(path)[-1] == "state.pt" and len(names(path)) == 3
        for shard in names(path)[:-1]:
            assert shard.startswith("shard-") and load_file(path / shard)
        torch.load(path / "state.pt", weights_only=True)


def test_checkpoints_that_fail_on_any_process_are_named_and_cost_nothing_but_themselves(pair):
    """A write of the second process, the last move of the first, a folder: each is lost on both, and training goes on
    to the same losses and the same last checkpoint as without a fault."""
    undisturbed, config, done = pair
    steps = {step: config.run_folder / "checkpoints" / f"step_{step:08d}" for step in (2, 4, 6, 8)}
    for step, reason in ((4, "File too large"), (6, "not today"), (8, "not today")):
        said = [
            line
            for line in done.stderr.splitlines()
            if f"warning: could not write {steps[step]}: " in line
        ]
        assert (
            len(said) == 1
            and reason in said[0]
            and f"the last good checkpoint is {steps[2]}" in said[0]
        ), step
    for key in ("loss", "val_loss_random"):
        assert metrics(config, key) == metrics(undisturbed, key) and len(metrics(config, key)) >= 5
    path, ours = store.read_newest(config.run_folder)
    assert names(path.parent) == [steps[2].name, "step_00000010"]
    assert_same(
        sharded.read_all(path, ""), sharded.read_all(store.find(undisturbed.run_folder)[-1], "")
    )
    losses = metrics(config, "val_loss_random")
    assert losses[10] == min(losses.values()), "every evaluation here is the best so far"
    assert (
        ours["best"] == {"step": 10, "loss": losses[10]}
        and (config.run_folder / "best").resolve() == path.resolve()
    )


def test_the_best_that_is_lost_is_not_the_best(state, procs, monkeypatch):
    (state, config), warnings = state, []
    saver = states.Saver(config, procs, META, warnings.append)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    state.progress.step, before = 4, state.progress.best
    state.progress.best = {"step": 4, "loss": 1.0}
    assert saver.save(state, before)
    assert not saver.wait() and state.progress.best == before == {"step": None, "loss": math.inf}
    assert len(warnings) == 1 and "no room; there is no earlier checkpoint" in warnings[0]
    assert not names(config.run_folder / "checkpoints"), "its remains take room"
    assert saver.wait(), "a failure is told once"


def test_killed_while_a_checkpoint_is_written_a_run_goes_on_from_the_one_before_without_a_trace(
    base, procs
):
    whole, config = change(base, name="whole"), change(base, name="killed")
    done = run_script("tests/parallel_jobs.py", f"killed={write_config(config)}", check=False)
    folder = config.run_folder / "checkpoints"
    assert done.returncode == -9 and names(folder) == [".step_00000004.tmp", "step_00000002"]
    shard = next((folder / ".step_00000004.tmp").glob("shard-*"))
    os.truncate(shard, shard.stat().st_size // 2)  # as if it had happened a little earlier
    (
        folder / ".step_00000000.tmp"
    ).mkdir()  # as if an older one had just been removed, and a link been made
    (config.run_folder / ".best.tmp").symlink_to("checkpoints/step_00000002")
    train.train(config, procs)
    train.train(whole, procs)
    for ours, expected in zip(*map(store.find, (config.run_folder, whole.run_folder)), strict=True):
        assert_same(sharded.read_all(ours, ""), sharded.read_all(expected, ""))
    assert metrics(config) == metrics(whole)
    assert set(files(config.run_folder)) - set(files(whole.run_folder)) <= {"killed.pt"}


def test_an_error_in_training_waits_for_the_checkpoint_that_is_being_written(
    base, procs, monkeypatch
):
    config = change(base, name="error", train__max_skipped_steps=1)
    write, step = HuggingFaceStorageWriter.write_data, train.train_step

    def slow(*arguments):
        time.sleep(0.5)
        return write(*arguments)

    def spoilt(number, *arguments):
        loss, norm = step(number, *arguments)
        return loss, norm * (math.nan if number == 2 else 1)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", slow)
    monkeypatch.setattr(train, "train_step", spoilt)
    with pytest.raises(ValueError, match="not finite 1 steps in a row, up to step 3"):
        train.train(config, procs)
    assert names(config.run_folder / "checkpoints") == ["step_00000002"]


# ---- reading what is damaged, foreign or hostile ---------------------------------------------------------------------


def damage(path, how, other):
    """Spoil a checkpoint; `other` is one of the same run."""
    first, second = sorted(path.glob("shard-*"))
    if how in ("first missing", "second missing"):
        (first if how.startswith("first") else second).unlink()
    elif how == "cut":
        os.truncate(second, second.stat().st_size - 1)
    elif how == "empty":
        os.truncate(first, 0)
    elif how == "garbage":
        (path / "shard-x.safetensors").write_bytes(b"\x10" * 1000)
    elif how == "one too many":
        shutil.copy(sorted(other.glob("shard-*"))[0], path / "shard-x.safetensors")
    elif how == "of another model":
        from safetensors.torch import save_file

        save_file({"model.start": torch.zeros(8)}, second)
    elif how == "no state":
        (path / "state.pt").unlink()
    elif how == "cut state":
        os.truncate(path / "state.pt", 500)
    else:
        torch.save(
            torch.load(path / "state.pt") | {"config": Hostile(path.parent / "touched")},
            path / "state.pt",
        )


DAMAGES = [
    "first missing",
    "second missing",
    "cut",
    "empty",
    "garbage",
    "one too many",
    "of another model",
]


@pytest.mark.parametrize("how", [*DAMAGES, "no state", "cut state", "hostile state"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(copy, capsys, how):
    config, older, newest = copy
    damage(newest, how, older)
    path, _ = store.read_newest(config.run_folder)
    warning = capsys.readouterr().err
    assert path == older and str(newest) in warning and "trying the one before it" in warning
    assert not (newest.parent / "touched").exists()
    with pytest.raises(CheckpointError, match=f"{newest}"):
        checkpoint.load(newest)


def test_a_run_goes_on_exactly_from_the_checkpoint_before_a_damaged_one(copy, pair, procs, capsys):
    config, older, newest = copy
    damage(newest, "first missing", older)
    train.train(config, procs)
    assert f"resumed from {older}" in capsys.readouterr().out
    ours, expected = metrics(config, "loss"), metrics(pair[0], "loss")
    assert (
        max(abs(ours[step] - expected[step]) for step in expected) < 1e-5
    )  # two processes sum in another order
    assert store.read_newest(config.run_folder)[0] == newest


def test_no_pickle_of_torchs_own_sharded_format_is_read(copy):
    """torch.distributed.checkpoint keeps a pickle .metadata in its own format; here it is a file like any other."""
    config, _, newest = copy
    (newest / ".metadata").write_bytes(pickle.dumps(Hostile(newest / "touched")))
    assert checkpoint.load(config.run_folder).path == str(newest)
    assert not (newest / "touched").exists()


# ---- using them ------------------------------------------------------------------------------------------------------


def test_best_and_run_are_what_loading_sampling_and_converting_take(copy, script, tmp_path):
    config, older, newest = copy
    best = config.run_folder / "best"
    best.unlink()
    best.symlink_to(older.relative_to(config.run_folder))  # which in the run was the newest
    for path, source in ((config.run_folder, newest), (best, older), (older, older)):
        for weights, prefix in (("ema", "ema."), ("raw", "model.")):
            loaded = checkpoint.load(path, weights)
            expected = sharded.read_all(source, prefix)
            assert_same({name: p.detach() for name, p in loaded.model.named_parameters()}, expected)
            assert (loaded.step, loaded.weights, loaded.tokenizer) == (
                store.step_of(source),
                weights,
                "bytes",
            )
    code, out, err = script(
        sample, best, "--num-samples", "1", "--jsonl", tmp_path / "samples.jsonl"
    )
    assert code == 0 and "step 8" in out + err, err
    run_script("convert.py", config.run_folder, tmp_path / "export")
    assert names(tmp_path / "export") == ["config.json", "model.safetensors"]
    expected = sharded.read_all(newest, "ema.")
    assert_same(load_file(tmp_path / "export" / "model.safetensors"), expected)
    loaded = checkpoint.load(tmp_path / "export")
    assert_same({name: p.detach() for name, p in loaded.model.named_parameters()}, expected)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["step"] == 10
