"""Averaged weights, and checkpoints: written whole or not at all, verified, kept; and
whatever is cut, damaged, foreign or hostile is refused."""

import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import pytest
import torch
from helpers import ROOT, Hostile, assert_same, flip_byte, read_checkpoint, wait_for
from safetensors.torch import load_file, save_file

from aogpt.checkpoints import CheckpointError, load, store
from aogpt.checkpoints.load import config_of
from aogpt.model import ModelConfig
from aogpt.runtime.files import write_atomically
from aogpt.systems import build_model
from aogpt.training.checkpoint import Progress, State, named_tensors, plain_values
from aogpt.training.config import Config
from aogpt.training.optimizers import EMA
from convert import convert

TINY = ModelConfig(
    vocab_size=19, block_size=8, n_layer=1, n_head=2, n_embd=8, cond_dim=4
)
DATA = {"tokenizer": "bytes", "vocab_size": 17}


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return build_model(TINY)


def tiny_state(step):
    """Return a model after one update, its average and its optimizer; every step has
    other weights."""
    model = tiny_model(step)
    ema = EMA(model, 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(TINY.vocab_size, (2, 8))
    model(tokens, torch.arange(8).expand(2, 8)).mean().backward()
    optimizer.step()
    ema.update()
    return State(model, ema, [optimizer], Progress(step))


def save(run_folder, step, keep=2, best=None):
    """Save `tiny_state`; best: the step of the best checkpoint."""
    state = tiny_state(step)
    best = best and {"step": best, "loss": 1.0}
    values = plain_values(state, best, Config(name="tiny", model=TINY), DATA)
    return store.write(run_folder, values, named_tensors(state), keep)


def weights(model):
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_ema_is_the_warmed_up_average_computed_plainly_in_float64(decay):
    model = tiny_model()
    generator = torch.Generator().manual_seed(int(decay * 1e4))
    ema = EMA(model, decay)
    expected = {name: p.double() for name, p in weights(model).items()}
    assert_same(ema.weights, weights(model))
    for t in range(200):
        for p in weights(model).values():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        ema.update()
        d = min(decay, (1 + t) / (10 + t))
        for name, p in weights(model).items():
            expected[name] = d * expected[name] + (1 - d) * p.double()
    assert ema.updates == 200
    # 200 roundings to float32 (2^-24 relative)
    for name, average in ema.weights.items():
        torch.testing.assert_close(
            average.double(), expected[name], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_has_its_own_weights_again_after_the_average_was_applied(fail):
    model = tiny_model(0)
    average = EMA(model, 0.9)
    for p in weights(model).values():
        p.mul_(2)
    own = {name: p.clone() for name, p in weights(model).items()}
    assert not torch.equal(own["start"], average.weights["start"])
    with contextlib.suppress(KeyError), average.applied():
        assert_same(weights(model), average.weights)
        if fail:
            raise KeyError
    assert_same(weights(model), own)


def test_the_last_k_are_kept_and_the_best_besides(tmp_path):
    for step in range(1, 8):
        path = save(tmp_path, step, keep=3, best=2)
    assert store.find(tmp_path) == [
        store.path_of(tmp_path, step) for step in (2, 5, 6, 7)
    ]
    assert (tmp_path / "best").read_text() == "step_00000002\n"
    # others may read it as they may read any file of this user
    for file in path.iterdir():
        assert file.stat().st_mode == (tmp_path / "best").stat().st_mode
    save(tmp_path, 8, keep=1, best=8)
    assert store.find(tmp_path) == [store.path_of(tmp_path, 8)]
    assert store.best_of(tmp_path) == store.path_of(tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoints"]


def test_checkpoints_are_ordered_by_step_and_other_files_are_left_alone(tmp_path):
    other_names = [
        ".step_00000009.tmp",
        "step_9",
        "step_00000009.old",
        "notes",
        "step_00000009x",
    ]
    assert store.read_newest(tmp_path, store.read_values) is None
    assert store.read_newest(tmp_path / "not there", store.read_values) is None
    for name in ["step_100000000", "step_00000020", "step_00000003", *other_names]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000004").touch()
    names = [path.name for path in store.find(tmp_path)]
    assert names == ["step_00000003", "step_00000020", "step_100000000"]
    assert store.find(tmp_path, up_to=20)[-1].name == "step_00000020"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "the disk is full"), KeyboardInterrupt()]
)
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_trace(tmp_path, error):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new" * 10_000)
        file.flush()
        assert path.read_bytes() == b"old"
        raise error

    with pytest.raises(type(error)) as raised:
        write_atomically(path, fail)
    if isinstance(error, OSError):
        assert f"the disk is full: '{path}'" in str(raised.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_own_leftovers_are_removed(tmp_path):
    theirs = [".notes.tmp", ".metrics.jsonl.tmp", "x.0123abcd.tmp"]
    for name in (*theirs, ".best.0123abcd.tmp", ".metrics.jsonl.89abcdef.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".dir.tmp").mkdir()
    (tmp_path / "checkpoints" / ".step_00000003.tmp").mkdir(parents=True)
    store.remove_partial(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*theirs, ".dir.tmp", "checkpoints"}


def change_state(path, **changes):
    """Another state.json with a checksum that fits."""
    contents = json.loads((path / "state.json").read_text()) | changes
    contents["sha256"] = store.digest(contents)
    (path / "state.json").write_text(json.dumps(contents))


WEIGHTS = "model.safetensors"
STATE = "state.json"
# what is done to a checkpoint, given as its folder -> what the message says
DAMAGES = {
    "no part": (lambda p: (p / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "of another save": (
        lambda p: shutil.copy(p.with_name("step_00000001") / WEIGHTS, p),
        f"{WEIGHTS} is missing, not a part of it, or has another checksum",
    ),
    "no state": (lambda p: (p / STATE).unlink(), "state.json: there is no such file"),
    "other state": (lambda p: (p / STATE).write_text("[1]"), STATE),
    "nested": (lambda p: (p / STATE).write_text("[" * 10**5), STATE),
    "a newer format": (
        lambda p: change_state(p, format="aogpt-checkpoint-9"),
        "not of the format aogpt-checkpoint-3",
    ),
    "a part elsewhere": (
        lambda p: change_state(p, parts={"../x": ""}),
        "../x is missing",
    ),
    "a tensor without a shape": (
        lambda p: change_state(p, tensors={"model.wte.weight": None}),
        "tensors",
    ),
    "no number of steps": (lambda p: change_state(p, step=None), "step"),
}


@pytest.mark.parametrize("damage_name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path, capsys, damage_name
):
    older = save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage, words = DAMAGES[damage_name]
    damage(newest)
    path, values = store.read_newest(tmp_path, store.read_values)
    assert path == older
    assert values["step"] == 1
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"warning: {newest}" in warning
    assert words in warning
    assert "the one before it" in warning
    with pytest.raises(CheckpointError, match=f"{newest}"):
        load(newest, "raw")
    assert load(tmp_path, "raw").path == str(older)


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_no_flipped_byte_goes_unnoticed_unless_it_changes_nothing(tmp_path, file):
    """Bytes anywhere: in tensors, in the header, in names, numbers and white space of
    the JSON."""
    path = save(tmp_path, 1)
    expected = read_checkpoint(path)
    original = (path / file).read_bytes()
    rng = random.Random(0)
    noticed = 0
    for _ in range(60):
        (path / file).write_bytes(original)
        flip_byte(path / file, rng.randrange(len(original)), rng.randrange(1, 256))
        try:
            contents = read_checkpoint(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            noticed += 1
        else:
            assert_same(contents, expected)
    assert noticed > 20


def test_a_checkpoint_of_other_tensors_than_its_model_has_is_named(tmp_path):
    path = save(tmp_path, 1)
    sizes = json.loads((path / "state.json").read_text())["model_config"]
    for changes, words in (
        ({"n_layer": 2}, "it lacks blocks.1"),
        ({"n_embd": 16}, "in the model"),
        ({"n_head": 3}, "must be a multiple of model.n_head"),
        ({"colour": 1}, "colour"),
    ):
        change_state(path, model_config=sizes | changes)
        with pytest.raises(CheckpointError, match=f"{path} cannot be used: .*{words}"):
            load(path)


FOREIGN = {  # writes a file -> what the message says
    "other keys": (
        lambda path: torch.save({"iter_num": 3, "net": {}}, path),
        "iter_num",
    ),
    "list": (lambda path: torch.save([1, 2], path), "its object is \\[1, 2\\]"),
    "safetensors": (lambda path: save_file({"net.w": torch.zeros(1)}, path), "net.w"),
    "text": (lambda path: path.write_text("just some text\n" * 50), "cannot be read"),
    "empty": (lambda path: path.touch(), "cannot be read"),
    "other zip": (lambda path: zipfile.ZipFile(path, "w").close(), "cannot be read"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_an_error_that_says_what_was_found_and_what_is_supported(
    tmp_path, name
):
    write, words = FOREIGN[name]
    write(tmp_path / "foreign.pt")
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}/foreign.pt.*{words}.*supported are"
    ):
        load(tmp_path / "foreign.pt")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["zip", "legacy", "bare pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    tmp_path, layout, inside
):
    """As a file of its own and beside a config.json; alone and among tensors."""
    target = tmp_path / "touched"
    path = tmp_path / "pytorch_model.bin"
    hostile = Hostile(target)
    contents = (
        {"vocab_embed.embedding": torch.zeros(3), "x": hostile} if inside else hostile
    )
    if layout == "bare pickle":
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(contents, path, _use_new_zipfile_serialization=layout == "zip")
    (tmp_path / "config.json").write_text("{}")
    for given in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"bin cannot be read.* can run code"):
            load(given)
    assert not target.exists()
    # the file is a real attack: a reader that trusts it runs it
    if layout != "bare pickle":
        torch.load(path, weights_only=False)
        assert target.exists()


@pytest.mark.parametrize(
    "text", ["step_00000009", "../../other/checkpoints/step_00000001", ""]
)
def test_a_pointer_to_what_is_not_a_checkpoint_of_the_run_is_a_clear_error(
    tmp_path, text
):
    save(tmp_path / "run", 1)
    save(tmp_path / "other", 1)
    best = tmp_path / "run" / "best"
    best.write_text(text)
    with pytest.raises(
        CheckpointError, match="state.json: there is no|does not hold the name"
    ):
        load(best)


def test_what_is_not_there_is_a_clear_error(tmp_path):
    for path, words in (
        ("nowhere", "there is no .*nowhere here or on Hugging Face"),
        (tmp_path, "holds no checkpoints/step_"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(path)
    with pytest.raises(ValueError, match="weights is 'last', but it must be one of"):
        load(tmp_path, "last")


def test_a_folder_of_an_earlier_versions_hub_option_loads(tmp_path):
    shutil.unpack_archive(ROOT / "tests" / "hub_export_0.1.zip", tmp_path)
    folder = tmp_path / "hub_export"
    loaded = load(folder)
    assert (loaded.step, loaded.tokenizer) == (20, "bytes")
    assert config_of(folder) == loaded.model.config
    stored = load_file(folder / "model.safetensors")
    for name, p in loaded.model.named_parameters():
        assert torch.equal(p, stored[f"model.{name}"].float()), name
    settings = json.loads((folder / "config.json").read_text())
    settings["aogpt"]["step"] = 4
    for contents, words in (
        (settings, "config.json is damaged"),
        ({"model_type": "aogpt"}, str(folder)),
        ({"model_type": "aogpt", "aogpt": 5}, str(folder)),
        ({"model_type": "aogpt", "aogpt": {}}, str(folder)),
    ):
        (folder / "config.json").write_text(json.dumps(contents))
        with pytest.raises(CheckpointError, match=words):
            load(folder)


def test_an_export_is_read_from_a_repository_with_its_tokenizer(tmp_path, monkeypatch):
    """test_data.py has an export with a vocabulary of the user's."""
    save(tmp_path / "run", 1)
    convert(str(tmp_path / "run"), tmp_path / "export")
    patterns = []

    def snapshot_download(repo, allow_patterns):
        patterns.extend(allow_patterns)
        return tmp_path / "export"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load("me/mine").step == 1
    assert {"tokenizer.tiktoken", "tokenizer.json", "config.json"} <= set(patterns)
    assert not any("*.py" in pattern for pattern in patterns)


def test_load_gives_both_weights_of_the_last_checkpoint_the_best_or_a_step(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9, best=2)
    for checkpoint, step in (("last", 3), ("best", 2), ("1", 1), ("2", 2)):
        state = tiny_state(step)
        for kind, expected in (
            ("ema", state.average.weights),
            ("raw", weights(state.model)),
        ):
            loaded = load(tmp_path, kind, checkpoint=checkpoint)
            assert_same(weights(loaded.model), expected)
            assert (loaded.step, loaded.weights) == (step, kind)
            assert loaded.path == str(store.path_of(tmp_path, step))
            assert (loaded.tokenizer, loaded.vocab_size) == ("bytes", 17)
            assert not loaded.model.training
            assert loaded.model.config == TINY
        assert not torch.equal(state.average.weights["start"], state.model.start)
    assert load(tmp_path / "best").step == 2
    for checkpoint in ("4", "01", "newest", "../x", "-1"):
        with pytest.raises(
            CheckpointError, match="no checkpoint .*; it has last, best, 1, 2, 3$"
        ):
            load(tmp_path, checkpoint=checkpoint)
    with pytest.raises(
        CheckpointError, match="--checkpoint best: .* is not a run folder"
    ):
        load(store.path_of(tmp_path, 1), checkpoint="best")
    (tmp_path / "best").unlink()
    with pytest.raises(
        CheckpointError, match="no checkpoint 'best'; it has last, 1, 2, 3$"
    ):
        load(tmp_path, checkpoint="best")


def test_what_a_killed_convert_left_is_removed_by_the_next(tmp_path):
    save(tmp_path / "run", 1)

    def convert_and_die():
        with mock.patch("convert.write_json", lambda *_: os.kill(os.getpid(), 9)):
            convert(str(tmp_path / "run"), tmp_path / "to")

    process = multiprocessing.get_context("fork").Process(target=convert_and_die)
    process.start()
    process.join()
    assert process.exitcode == -9
    assert len(list(tmp_path.iterdir())) == 2
    convert(str(tmp_path / "run"), tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "to"]
    with pytest.raises(CheckpointError, match="exists already"):
        convert(str(tmp_path / "run"), tmp_path / "to")


WRITER = """
import sys
import test_checkpoint
for step in range(1, 1_000_000):
    test_checkpoint.save(sys.argv[1], step, keep=1, best=step)
"""


def test_a_reader_of_a_run_that_replaces_its_only_checkpoint_gets_a_whole_one(tmp_path):
    """Both as fast as they can. A checkpoint that goes while it is read is an error in
    one line."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], env=env) as writer:
        try:
            wait_for((tmp_path / "best").exists, writer)
            for checkpoint in ("last", "best"):
                steps = []
                # a busy machine may hold the writer
                while len(steps) < 12 or len(set(steps)) < 4:
                    assert writer.poll() is None
                    with contextlib.suppress(CheckpointError):
                        loaded = load(tmp_path, checkpoint=checkpoint)
                        steps.append(loaded.step)
                        average = tiny_state(loaded.step).average.weights
                        assert_same(weights(loaded.model), average)
                assert steps == sorted(steps)
        finally:
            writer.kill()
