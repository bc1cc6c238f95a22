"""train.py: one step, exact resume after any kind of end, processes, skipped steps, and
what the run folder holds."""

import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    ALONE,
    ROOT,
    assert_same,
    change,
    encoder_config,
    flip_byte,
    limited_file_size,
    make_data,
    metrics,
    newest,
    of_system,
    read_checkpoint,
    read_lines,
    tiny_config,
    wait_for,
    write_config,
)

import sample
import train
from aogpt import objectives
from aogpt.checkpoints import CheckpointError, store
from aogpt.data.loader import TokenDataset
from aogpt.objectives import masked_nll, masks_at
from aogpt.orders import orders_at
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_jsonl
from aogpt.runtime.processes import Processes
from aogpt.training import checkpoint
from aogpt.training import config as configuration
from aogpt.training.metrics import drop_later_rows
from aogpt.training.optimizers import learning_rate
from aogpt.training.val_losses import Loss, read_metrics


def assert_same_run(config, reference):
    """Same weights, average, optimizer, counters (bit for bit), losses and files; names
    and paths may differ."""
    assert_same_states(config, reference)
    assert metrics(config) == metrics(reference)
    assert files(config.run_folder).keys() == files(reference.run_folder).keys()


def assert_same_states(config, reference, best=True):
    """The newest checkpoints are equal, without their configs; best: with the best
    loss."""
    ours = newest(config)
    theirs = newest(reference)
    for state in (ours, theirs):
        del state["config"]
        if not best:
            del state["best"]
    assert_same(ours, theirs)


def files(folder):
    """{path within the folder: bytes} of all its files, without the lock."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "lock":
            contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    """Return an undisturbed run of 40 steps."""
    config = tiny_config(data, tmp_path_factory.mktemp("reference"))
    train.train(config, ALONE)
    return config


def copy_of(reference, out, **changes):
    """Return the finished run, copied to another folder, to be damaged or continued."""
    shutil.copytree(reference.run_folder, out / reference.name)
    return change(reference, out=str(out), **changes)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("system, clip", [("AO-GPT", 0.25), ("encoder", math.inf)])
def test_a_step_is_the_gradient_of_the_mean_loss_of_its_global_batch_clipped(
    data, system, clip, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "MAX_GRAD_NORM", clip)
    config = of_system(tiny_config(data, tmp_path, model__dropout=0.0), system)
    updates = []

    def stop(*arguments):  # the gradients are there, and the weights not yet updated
        updates.append(arguments)
        raise Stopped

    monkeypatch.setattr(train, "update", stop)
    with pytest.raises(Stopped):
        train.train(config, ALONE)
    ((state, loss, reported),) = updates
    tokens = TokenDataset(data, "train", 16).batch(7, 0, range(8), 8)
    plain = copy.deepcopy(state.model)
    plain.zero_grad()
    if system == "encoder":
        masks = masks_at(config.objective, 7, 0, range(8), total=8, length=16)
        expected = masked_nll(plain, tokens, masks).mean()
    else:
        order = orders_at(config.order, 7, 0, range(8), 16)
        expected = plain(tokens, order).mean()
    expected.backward()
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    norm = gradient.double().norm().item()
    assert norm > clip or math.isinf(clip), "clipping must have something to do here"
    # Two micro-batches are summed in another order than one batch: float32 rounding,
    # relative 1e-7 an operation.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert reported.item() == pytest.approx(norm, rel=1e-5)
    factor = min(1, clip / norm)
    for p, q in zip(state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, factor * q.grad, rtol=1e-3, atol=1e-6)


def test_a_resume_is_exact_with_muon_too(data, tmp_path):
    whole = tiny_config(
        data,
        tmp_path / "whole",
        steps=20,
        model__dropout=0.0,
        optim__kind="muon",
        optim__min_lr_ratio=1.0,
        checkpoint__interval=100,
    )
    train.train(whole, ALONE)
    config = change(whole, out=str(tmp_path), train__steps=7)
    train.train(config, ALONE)
    train.train(change(config, train__steps=20), ALONE)
    # a run that ends at step 7 is evaluated there
    assert_same_states(config, whole, best=False)
    ours = [row for row in metrics(config) if row["step"] != 7]
    assert ours == [row for row in metrics(whole) if row["step"] != 7]


def test_a_finished_run_leaves_its_config_metrics_curve_and_the_last_checkpoints(
    reference,
):
    folder = reference.run_folder
    lines = read_lines(reference.run_folder / "metrics.jsonl")
    assert configuration.load_toml(folder / "config.toml") == reference
    expected = ["best"]
    for saved in ("checkpoints/step_00000036", "checkpoints/step_00000040"):
        for kind in ("ema", "model", "optimizer"):
            expected.append(f"{saved}/{kind}.safetensors")
        expected.append(f"{saved}/state.json")
    assert list(files(folder)) == [*expected, "config.toml", "metrics.jsonl"]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 41))
    for line in training:
        assert line["lr"] == learning_rate(line["step"] - 1, reference)
        assert line["tokens"] == line["step"] * 8 * 16
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
        assert line["skipped_steps"] == 0
        assert line["mfu"] is None
        assert 2**20 < line["memory_bytes"] < 2**40  # Python with PyTorch in it
    assert training[-1]["loss"] < training[0]["loss"] - 1
    assert list(metrics(reference, "val_loss_l2r")) == [5, 10, 15, 20, 25, 30, 35, 40]
    losses = metrics(reference, "val_loss_random")
    best = read_checkpoint(store.best_of(folder))
    assert best["step"] == min(losses, key=losses.get) == best["best"]["step"]
    assert best["best"]["loss"] == min(losses.values())


def test_a_finished_run_started_again_says_so_and_changes_nothing(
    reference, tmp_path, capsys
):
    config = copy_of(reference, tmp_path)
    before = files(config.run_folder)
    assert train.train(config, ALONE) == 0
    out = capsys.readouterr().out
    assert "had finished 40 steps; best: step " in out
    assert " --top-p 0.9, or more --train.steps" in out
    assert files(config.run_folder) == before


def test_what_has_changed_is_said_and_used_and_what_cannot_change_is_an_error(
    reference, tmp_path, capsys
):
    other = make_data(tmp_path, words=3000, seed=1)
    config = copy_of(
        reference,
        tmp_path / "out",
        train__steps=42,
        optim__lr=1e-4,
        data__folder=str(other),
    )
    train.train(config, ALONE)
    said = capsys.readouterr().out
    assert "optim.lr = 0.0001 (was 0.003)" in said
    assert "train.steps = 42 (was 40)" in said
    assert all(f"the split {split} in {other}" in said for split in ("train", "val"))
    assert metrics(config, "lr")[42] == learning_rate(41, config)
    assert configuration.load_toml(config.run_folder / "config.toml") == config
    before = files(config.run_folder)
    words = "optim.kind = 'adamw', but now it is 'muon', which cannot change"
    with pytest.raises(UserError, match=words):
        train.train(change(config, train__steps=43, optim__kind="muon"), ALONE)
    assert files(config.run_folder) == before


DRIVER = """
# Forks a run of train.py whenever it is asked to, which may die before its n-th file
# operation, or when a file grows past a size. Its output goes to files.
import json, os, resource, signal, sys
import torch, torch._dynamo, tyro
import train
from aogpt.runtime.command_line import run_script

def die_before(count):
    left = [count]
    def wrap(function):
        def call(*arguments, **keywords):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return call
    for name in ("fsync", "replace", "rename", "mkdir", "unlink"):
        setattr(os, name, wrap(getattr(os, name)))

torch.set_num_threads(1)
while line := sys.stdin.readline():
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate((os.devnull, order["output"], order["errors"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(order["environment"])
        sys.argv = ["train.py", order["path"]]
        if order["operation"]:
            die_before(order["operation"])
        if order["file_size"]:
            # the kernel then ends the process in the middle of its write
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"],) * 2)
        try:
            run_script(train.main)
        except SystemExit as stop:
            # taking the interpreter down would take longer than the run
            os._exit(stop.code)
    print(child, flush=True)
    # until it is asked for the status, the process id stays the child's
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def has_reached(config, step):
    """Return whether metrics.jsonl has the line of a step (the last line may be half
    written)."""
    path = config.run_folder / "metrics.jsonl"
    return path.exists() and f'{{"step": {step}, "loss"' in path.read_text()


class Driver:
    """Starts runs of train.py, one at a time, as children of a process with all imports
    done."""

    def __init__(self, process):
        self.process = process

    def ask(self, order=""):
        print(order, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(
        self, path, operation=None, file_size=None, output=os.devnull, **environment
    ):
        """Return the process id of a run that is to die before that operation or past
        that file size."""
        order = {
            "path": str(path),
            "operation": operation,
            "file_size": file_size,
            "output": str(output),
            "errors": str(self.errors_of(path)),
            "environment": environment,
        }
        return self.ask(json.dumps(order))

    def status(self):
        """Wait for the run; its exit status, or minus the number of the signal that
        ended it."""
        return self.ask()

    def run(self, path, **options):
        self.start(path, **options)
        return self.status()

    @staticmethod
    def errors_of(path):
        return path.with_suffix(".errors.txt")


@pytest.fixture(scope="module")
def driver():
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Driver(process)
        os.killpg(process.pid, signal.SIGKILL)  # and a run that a failed test has left


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow(reason="another seed"))]
)
def test_killed_at_random_moments_and_resumed_a_run_ends_the_same_bit_for_bit(
    reference, tmp_path, driver, seed
):
    config = change(reference, out=str(tmp_path))
    rng = random.Random(seed)
    path = write_config(config)
    weights = store.find(reference.run_folder)[-1] / "model.safetensors"
    for share in (0.1, 0.999):  # killed in the middle of writing a checkpoint
        size = int(weights.stat().st_size * share)
        assert driver.run(path, file_size=size) == -signal.SIGXFSZ
        (left,) = (config.run_folder / "checkpoints").glob(".*.tmp")
        assert not (left / "state.json").exists(), "the run did not die in the middle"
    for step in sorted(rng.sample(range(1, 30), 2)):
        # ended while it starts, resumes or makes its first steps
        child = driver.start(path)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
        driver.status()
        child = driver.start(path)  # killed soon after it has got as far as `step`
        wait_for(lambda: has_reached(config, step))  # noqa: B023
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert driver.status() == -signal.SIGKILL
    assert driver.run(path) == 0
    assert_same_run(config, reference)


@pytest.mark.slow(reason="a process for every file operation")
def test_killed_before_any_file_operation_a_run_ends_the_same_bit_for_bit(
    data, tmp_path, driver
):
    """With the weights, the losses, the best checkpoint and the files of an undisturbed
    one."""
    reference = tiny_config(
        data,
        tmp_path,
        "reference",
        steps=8,
        checkpoint__interval=3,
        checkpoint__keep=1,
        eval__interval=4,
    )
    assert driver.run(write_config(reference)) == 0
    for n in range(1, 200):
        config = change(reference, name=f"killed_before_{n}")
        path = write_config(config)
        status = driver.run(path, operation=n)
        if status == 0:  # a run has fewer operations than n
            break
        assert status == -signal.SIGKILL
        assert driver.run(path) == 0
        assert_same_run(config, reference)
        best = store.best_of(config.run_folder)
        assert best.name == store.best_of(reference.run_folder).name
    assert n > 16


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow(reason="the other signal")),
    ],
)
def test_a_signal_finishes_the_step_saves_exits_0_and_the_run_goes_on_exactly(
    data, tmp_path, number, driver
):
    # Only the signal saves; at a constant rate a run of fewer steps is the beginning of
    # a long one.
    config = tiny_config(
        data, tmp_path, steps=100_000, eval__interval=0, optim__min_lr_ratio=1.0
    )
    path = write_config(change(config, checkpoint__interval=100_000))
    out = tmp_path / "out.txt"
    child = driver.start(path, output=out)
    wait_for(lambda: has_reached(config, 3))
    os.kill(child, number)
    assert driver.status() == 0
    assert "Traceback" not in driver.errors_of(path).read_text()
    said = r"stopped at step (\d+) and saved .*; not validated \(eval.interval = 0\); "
    said += "run the same command to continue"
    step = int(re.search(said, out.read_text())[1])
    assert newest(config)["step"] == step == max(metrics(config, "loss")) >= 3
    resumed = change(config, train__steps=step + 4)
    undisturbed = change(resumed, name="same")
    train.train(resumed, ALONE)
    train.train(undisturbed, ALONE)
    assert_same_states(resumed, undisturbed)
    assert metrics(resumed) == metrics(undisturbed)


def test_a_run_of_minutes_keeps_its_steps_when_it_is_killed_and_when_they_double(
    data, tmp_path, driver
):
    config = tiny_config(data, tmp_path, train__minutes=0.08)
    path = write_config(config)
    child = driver.start(path)
    wait_for(lambda: has_reached(config, 4))
    os.kill(child, signal.SIGKILL)
    assert driver.status() == -signal.SIGKILL
    begun = configuration.load_toml(config.run_folder / "config.toml").train
    assert begun.minutes == 0.08
    assert begun.steps > 4
    assert driver.run(path) == 0
    same = change(config, name="same", train__minutes=0.0, train__steps=begun.steps)
    train.train(same, ALONE)
    assert_same_run(config, same)
    assert not (config.run_folder / "pace").exists()
    file = config.run_folder / "config.toml"
    child = driver.start(write_config(change(config, train__minutes=0.16)))
    wait_for(lambda: configuration.load_toml(file).train.steps == 2 * begun.steps)
    os.kill(child, signal.SIGKILL)
    driver.status()


def test_minutes_of_a_run_that_was_counted_in_steps_are_from_now_on(
    data, tmp_path, monkeypatch
):
    """The first steps are timed even if one of them is skipped, and no folder but the
    run's own is touched."""
    config = tiny_config(data, tmp_path, steps=5)
    train.train(config, ALONE)
    other = tmp_path / f"{config.name}.pace"
    other.mkdir()
    spoil(monkeypatch, {4}, "loss")
    train.train(change(config, train__minutes=0.005), ALONE)
    assert newest(config)["step"] > 5
    assert newest(config)["config"]["train"]["minutes"] == 0.005
    assert other.exists()
    assert not (config.run_folder / "pace").exists()


def test_a_start_without_a_checkpoint_begins_with_no_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, remaining in ((1, [0, 1]), (0, [])):
        write_jsonl(path, [{"step": number} for number in range(3)])
        drop_later_rows(path, step)
        assert [row["step"] for row in read_metrics(path)] == remaining


def test_a_warm_up_longer_than_the_run_is_a_tenth_of_it(data, tmp_path, capsys):
    config = tiny_config(data, tmp_path, steps=20, optim__warmup_steps=21)
    train.train(config, ALONE)
    assert "warm-up of 2 steps, not 21: the run has 20\n" in capsys.readouterr().out
    assert newest(config)["config"]["optim"]["warmup_steps"] == 2


def spoil(monkeypatch, bad_steps, target):
    """Make the loss, or only its gradient, non-finite at some steps (of two
    micro-batches), as a bad batch would."""
    calls = [0]
    plain = objectives.ao_ar_loss

    def loss(model, tokens, order, *_):
        calls[0] += 1
        if calls[0] / 2 not in bad_steps:
            return plain(model, tokens, order)
        if target == "loss":
            return plain(model, tokens, order) * math.nan

        def spoil_once(gradient):
            handle.remove()
            return gradient * math.inf

        handle = model.start.register_hook(spoil_once)
        return plain(model, tokens, order)

    monkeypatch.setattr(objectives, "ao_ar_loss", loss)


@pytest.mark.parametrize("target, empty", [("loss", "loss"), ("gradient", "grad_norm")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    data, tmp_path, monkeypatch, target, empty
):
    """test_parallel.py has the weights, averages and moments, which stay."""
    monkeypatch.setattr(checkpoint, "MAX_SKIPPED_STEPS", 3)
    config = tiny_config(data, tmp_path, steps=9, eval__interval=0)
    config = change(config, checkpoint__interval=1, checkpoint__keep=99)
    spoil(monkeypatch, {4, 5, 7, 8}, target)  # never three in a row
    train.train(config, ALONE)
    paths = store.find(config.run_folder)
    # no checkpoint has a skipped step pending
    assert [store.step_of(path) for path in paths] == [1, 2, 3, 6, 9]
    checkpoints = [read_checkpoint(path) for path in paths]
    assert not any(values["skipped_in_a_row"] for values in checkpoints)
    assert [values["ema"]["updates"] for values in checkpoints] == [1, 2, 3, 4, 5]
    skipped = list(metrics(config, "skipped_steps").values())
    assert skipped == [0, 0, 0, 1, 2, 2, 3, 4, 4]
    values = metrics(config, empty)
    assert [step for step in values if values[step] is None] == [4, 5, 7, 8]
    train.train(change(config, train__steps=20, train__log_interval=10), ALONE)
    assert metrics(config, "skipped_steps")[20] == 4, "the count must survive a resume"


def test_losses_that_stay_not_finite_end_the_run_and_a_lower_rate_goes_on(
    data, tmp_path, monkeypatch, script
):
    """The update of step 5 ruins the weights: its loss was finite, and none after it
    is."""
    monkeypatch.setattr(checkpoint, "MAX_SKIPPED_STEPS", 4)
    config = tiny_config(data, tmp_path, steps=12, eval__interval=0)
    path = write_config(change(config, checkpoint__interval=2))

    def ruin(state, *arguments):
        update(state, *arguments)
        if state.progress.step == 5:
            state.model.start.data.fill_(3e38)

    update = train.update
    monkeypatch.setattr(train, "update", ruin)
    status, _, err = script(train, path)
    monkeypatch.setattr(train, "update", update)
    assert status == 2
    assert "gradient of 4 steps in a row is not finite at step 9: resume with a" in err
    assert store.step_of(store.find(config.run_folder)[-1]) == 4
    assert script(train, path, "--optim.lr", "1e-3")[0] == 0
    assert metrics(config, "skipped_steps")[12] == 0


def test_under_other_settings_the_count_of_skipped_steps_starts_anew(
    data, tmp_path, monkeypatch, capsys
):
    """The last step of a run is saved whatever it was."""
    monkeypatch.setattr(checkpoint, "MAX_SKIPPED_STEPS", 4)
    config = tiny_config(data, tmp_path, steps=5, eval__interval=0)
    spoil(monkeypatch, {4, 5, 6, 7}, "loss")
    train.train(config, ALONE)
    out = capsys.readouterr().out
    assert "finished 5 steps, 2 of them skipped (loss or gradient not finite)" in out
    assert newest(config)["skipped_in_a_row"] == 2
    train.train(change(config, train__steps=8), ALONE)
    assert metrics(config, "skipped_steps")[8] == 4


def test_a_full_disk_keeps_the_earlier_checkpoint_and_costs_nothing_later(
    reference, tmp_path, script
):
    undisturbed = copy_of(reference, tmp_path / "undisturbed", train__steps=47)
    train.train(undisturbed, ALONE)
    config = copy_of(reference, tmp_path / "full", train__steps=47)
    before = files(config.run_folder / "checkpoints")
    size = max(map(len, before.values())) // 2  # room for everything but a checkpoint
    path = write_config(config)
    with limited_file_size(size):
        status, _, err = script(train, path)
    assert status == 2
    assert "could not write" in err
    assert "free some disk space" in err
    assert "disk full" in err
    # nothing unfinished is left, and only at its last step may the run end in an error
    assert files(config.run_folder / "checkpoints") == before
    assert max(metrics(config, "loss")) == 47
    train.train(config, ALONE)
    assert_same_run(config, undisturbed)


def test_a_damaged_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    reference, tmp_path, capsys
):
    config = copy_of(reference, tmp_path)
    older, broken = store.find(config.run_folder)
    weights = broken / "model.safetensors"
    flip_byte(weights, weights.stat().st_size // 2)
    train.train(config, ALONE)
    said = capsys.readouterr()
    assert f"warning: {broken}" in said.err
    assert f"resumed from {older}" in said.out
    assert_same_run(config, reference)
    for path in store.find(config.run_folder):
        os.truncate(path / "model.safetensors", 1000)
    before = files(config.run_folder)
    message = "none of the 2 checkpoints in .* can be read"
    with pytest.raises(CheckpointError, match=message):
        train.train(config, ALONE)
    # no run starts anew over broken checkpoints
    assert files(config.run_folder) == before


MOMENT = "optimizer.blocks.0.mlp.fc.weight.exp_avg"


@pytest.mark.parametrize(
    "name, message",
    [(MOMENT, f"{MOMENT} is "), ("optimizer.x.step", "which this run does not have")],
)
def test_a_state_that_is_not_the_runs_is_named_and_nothing_goes_on_from_it(
    reference, tmp_path, name, message
):
    """Its checksums fit: a moment has another shape, or there is one of no weight."""
    config = copy_of(reference, tmp_path, train__steps=50)
    path = store.find(config.run_folder)[-1]
    values = store.read_values(path)
    tensors = store.read_all(path, values)
    tensors[name] = torch.zeros(3)
    store.write(config.run_folder, values, tensors, keep=9)
    before = files(config.run_folder)
    with pytest.raises(CheckpointError, match=message):
        train.train(config, ALONE)
    assert files(config.run_folder) == before


def test_what_is_not_finite_is_never_kept(data, tmp_path, monkeypatch):
    """Gradients can be finite and their squares not: the loss shows nothing."""
    config = tiny_config(data, tmp_path, checkpoint__interval=2, eval__interval=0)

    def huge_moments(state, *arguments):
        update(state, *arguments)
        if state.progress.step == 5:
            (adamw,) = state.optimizers
            next(iter(adamw.state.values()))["exp_avg_sq"].fill_(math.inf)

    update = train.update
    monkeypatch.setattr(train, "update", huge_moments)
    message = "exp_avg_sq is not finite at step 6: resume with a lower --optim.lr"
    with pytest.raises(ValueError, match=message):
        train.train(config, ALONE)
    assert [store.step_of(path) for path in store.find(config.run_folder)] == [2, 4]


def test_data_or_processes_that_do_not_fit_are_clear_errors(data, tmp_path):
    config = tiny_config(data, tmp_path)
    nowhere = tmp_path / "nowhere"
    for changed, message in (
        (
            change(config, data__folder=str(nowhere)),
            "make it with: python data/prepare.py",
        ),
        (
            change(config, model__vocab_size=256),
            "vocabulary of 257: set model.vocab_size to that or above",
        ),
        (change(config, model__block_size=10**6), "lower block_size to at most"),
        (
            change(encoder_config(config), model__mask_token=256),
            "vocabulary of 257: .* of an encoder, set model.mask_token to that",
        ),
    ):
        with pytest.raises((UserError, OSError), match=message):
            train.train(changed, ALONE)
    assert not config.run_folder.exists(), "a run that cannot start must leave nothing"
    message = r"train\.batch_size \(8\) must be a multiple of the 3 processes"
    three = Processes(0, 3, torch.device("cpu"))
    with pytest.raises(UserError, match=message):
        train.check_fits(config, TokenDataset(data, "train", 16), three)
    slots = change(config, order__block=12, order__kind="slots")
    with pytest.raises(UserError, match="order.block 12 exceeds the blocks of .* 8 to"):
        train.check_fits(slots, TokenDataset(data, "train", 8), ALONE)


@pytest.mark.parametrize("split, damage", [("train", "overwritten"), ("val", "cut")])
def test_a_token_file_that_changes_under_a_run_ends_it_in_one_line_and_a_checkpoint(
    data, tmp_path, monkeypatch, split, damage
):
    data = shutil.copytree(data, tmp_path / "data")
    config = tiny_config(
        data, tmp_path, train__micro_batch_size=1, checkpoint__interval=30
    )
    update = train.update
    path = data / f"{split}.bin"

    def change_the_file(state, *arguments):
        update(state, *arguments)
        if state.progress.step == 9:
            path.write_bytes(
                bytes(path.stat().st_size if damage == "overwritten" else 0)
            )

    monkeypatch.setattr(train, "update", change_the_file)
    with pytest.raises(UserError, match=f"{split}.bin has changed since it was opened"):
        train.train(config, ALONE)
    assert newest(config)["step"] == 9


def unmount(folder):
    """As a `checkpoints` that is a link to a disk which is not mounted."""
    shutil.move(folder / "checkpoints", folder.parent / "disk")
    (folder / "checkpoints").symlink_to(folder.parent / "nowhere")


def removed(folder):
    shutil.rmtree(folder / "checkpoints")
    (folder / "best").unlink()


@pytest.mark.parametrize("lose", [unmount, removed])
def test_a_history_without_checkpoints_is_refused_and_stays_as_it_was(
    reference, tmp_path, lose
):
    config = copy_of(reference, tmp_path)
    lose(config.run_folder)
    before = files(config.run_folder)
    message = "holds the config.toml of another run, but no checkpoint: mount its disk"
    with pytest.raises(UserError, match=message):
        train.train(config, ALONE)
    assert files(config.run_folder) == before
    shutil.move(config.run_folder, tmp_path / "away")
    assert train.train(change(config, train__steps=5), ALONE) == 0


@pytest.mark.parametrize("steps", [0, 4])
def test_a_run_killed_before_its_first_checkpoint_was_whole_starts_again(
    data, tmp_path, steps
):
    config = tiny_config(data, tmp_path, steps=6)  # saves at steps 4, 5 and 6
    train.train(config, ALONE)
    before = metrics(config)
    rows = read_lines(config.run_folder / "metrics.jsonl")
    shutil.rmtree(config.run_folder / "checkpoints")
    (config.run_folder / "best").unlink()
    store.temporary_of(store.path_of(config.run_folder, 4)).mkdir(parents=True)
    (config.run_folder / store.NONE_YET).mkdir()
    lines = [json.dumps(row) for row in rows if row["step"] <= steps]
    lines.append('{"step": 5, "lo')  # half written
    (config.run_folder / "metrics.jsonl").write_text("\n".join(lines))
    assert train.train(config, ALONE) == 0
    assert metrics(config) == before


def validations(monkeypatch, *losses):
    """Make the next validations give these losses."""
    remaining = iter(losses)

    def evaluate(*arguments):
        return {"ema": {"random": Loss(next(remaining), None)}, "raw": {}}

    monkeypatch.setattr(train, "evaluate", evaluate)


def test_the_end_of_a_run_names_the_best_checkpoint_with_its_loss(
    data, tmp_path, script, monkeypatch
):
    config = tiny_config(data, tmp_path, steps=10)
    validations(monkeypatch, 2.0, 3.25, 1.0)
    for _ in range(2):  # also of a run that was finished already
        status, out, _ = script(train, write_config(config))
        assert status == 0
        assert "finished 10 steps; best: step 5 (validation loss 2.0000)" in out
    status, out, err = script(sample, config.run_folder, "--checkpoint", "best")
    assert status == 0
    assert "step_00000005 (step 5, ema weights)" in out + err
    status, out, _ = script(train, write_config(config), "--train.steps", "15")
    assert "finished 15 steps; best: step 15 (validation loss 1.0000)" in out


def test_a_best_checkpoint_that_is_gone_makes_way_for_the_next_validation(
    data, tmp_path, script, monkeypatch
):
    validations(monkeypatch, 1.0, 1.5, 1.25, 1.75, 1.5)
    config = tiny_config(data, tmp_path, steps=8, eval__interval=2, checkpoint__keep=9)
    path = write_config(change(config, checkpoint__interval=2))
    assert script(train, path)[0] == 0
    shutil.rmtree(store.path_of(config.run_folder, 2))
    status, _, err = script(sample, config.run_folder, "--checkpoint", "best")
    assert status == 2
    assert "step_00000002/state.json: there is no such file" in err
    status, out, _ = script(train, path, "--train.steps", 10)
    assert status == 0
    assert "(step 2, loss 1.0000) is gone: it will be chosen again" in out
    assert newest(config)["best"] == {"step": 10, "loss": 1.5}
    assert store.best_of(config.run_folder).name == "step_00000010"


def test_a_validation_loss_that_is_not_finite_was_measured(
    data, tmp_path, monkeypatch, capsys
):
    validations(monkeypatch, math.nan)
    train.train(tiny_config(data, tmp_path, steps=6, eval__interval=6), ALONE)
    out = capsys.readouterr().out
    assert "finished 6 steps; no checkpoint has a finite validation loss" in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_told_by_its_reason(data, tmp_path, driver):
    path = write_config(tiny_config(data, tmp_path, steps=5))
    assert driver.run(path, output="/dev/full") == 2
    said = driver.errors_of(path).read_text()
    assert "the output cannot be written: [Errno 28]" in " ".join(said.split())
    assert "Traceback" not in said
