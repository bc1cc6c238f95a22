"""checkpoint.py: averaged weights, atomic writing, and files that are cut, damaged, foreign or hostile."""

import io
import os
import pickle
import random
import zipfile

import pytest
import torch
from helpers import Hostile, assert_same, flip_byte, limited_file_size

from checkpoints import load as checkpoint
from checkpoints import store
from checkpoints.errors import CheckpointError
from model import AOGPT, ModelConfig
from runtime.files import write_atomically
from training.averages import EMA
from training.state import training_state

TINY = ModelConfig(vocab_size=19, block_size=8, n_layer=1, n_head=2, n_embd=8, cond_dim=4)


def tiny_model(seed=0):
    torch.manual_seed(seed)
    return AOGPT(TINY)


def tiny_state(step, seed=0):
    """What training would save at this step: a model after one update, its average and its optimizer."""
    model = tiny_model(seed)
    ema = EMA(model, 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(TINY.vocab_size, (2, 8))
    model(tokens, torch.arange(8).expand(2, 8)).mean().backward()
    optimizer.step()
    ema.update(model)
    data = {"tokenizer": "bytes", "vocab_size": 17}
    return training_state(
        step, model, ema, optimizer, {"seed": seed}, data, {"step": None, "loss": 1.0}
    )


# ---- averaged weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.9999])
def test_ema_is_the_warmed_up_average_computed_plainly_in_float64(decay):
    model, generator = tiny_model(), torch.Generator().manual_seed(int(decay * 1e4))
    ema = EMA(model, decay)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for t in range(200):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        ema.update(model)
        d = min(decay, (1 + t) / (10 + t))
        for name, p in model.named_parameters():
            expected[name] = d * expected[name] + (1 - d) * p.detach().double()
    assert ema.updates == 200
    for name, average in ema.weights.items():
        # every update rounds to float32 (2^-24 relative) and forgets earlier rounding as it forgets weights; of values
        # of about 1, 200 roundings stay far below 1e-5
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_without_any_update_the_average_is_the_start_and_the_first_update_weighs_it_by_a_tenth():
    model = tiny_model()
    ema = EMA(model, 0.9999)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_same(ema.weights, start)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert_same(ema.weights, start)  # a copy: the model may change without it
    ema.update(model)
    for name, average in ema.weights.items():
        torch.testing.assert_close(average, start[name] + 0.9)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_has_its_own_weights_again_after_the_average_was_applied(fail):
    model, average = tiny_model(0), EMA(tiny_model(1), 0.9)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        with average.applied(model):
            assert_same({name: p.detach() for name, p in model.named_parameters()}, average.weights)
            if fail:
                raise KeyError
    except KeyError:
        pass
    assert_same({name: p.detach() for name, p in model.named_parameters()}, own)


def test_weights_of_another_model_are_refused_by_name_and_by_shape():
    weights = EMA(tiny_model(), 0.9).weights
    with pytest.raises(CheckpointError, match=r"1 names differ, e\.g\. start"):
        checkpoint.copy_parameters(
            tiny_model(), {name: w for name, w in weights.items() if name != "start"}
        )
    with pytest.raises(CheckpointError, match=r"start is \(3,\) in the file, \(8,\) in the model"):
        checkpoint.copy_parameters(tiny_model(), weights | {"start": torch.zeros(3)})


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read_back_bit_for_bit(tmp_path):
    state = tiny_state(7)
    path = store.save(tmp_path, state, keep=1, best=False)
    assert path == tmp_path / "checkpoints" / "step_00000007.pt"
    assert_same(store.read(path), state)
    assert_same(store.read(path, verify=True), state)


def test_the_last_k_are_kept_and_the_best_besides(tmp_path):
    for step in range(1, 8):
        store.save(tmp_path, tiny_state(step, seed=step), keep=3, best=step == 2)
    assert [path.name for path in store.find(tmp_path)] == [
        f"step_0000000{n}.pt" for n in (5, 6, 7)
    ]
    assert_same(store.read(tmp_path / "best.pt"), tiny_state(2, seed=2))
    store.save(tmp_path, tiny_state(8, seed=8), keep=1, best=True)
    assert [path.name for path in store.find(tmp_path)] == ["step_00000008.pt"]
    assert_same(store.read(tmp_path / "best.pt"), tiny_state(8, seed=8))
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "best.pt",
        "checkpoints",
        "step_00000008.pt",
    ]


def test_checkpoints_are_ordered_by_step_and_other_files_are_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    others = [
        ".step_00000009.pt.tmp",
        "step_9.pt",
        "step_00000009.pt.old",
        "notes.txt",
        "step_00000009.txt",
    ]
    for name in ["step_100000000.pt", "step_00000020.pt", "step_00000003.pt", *others]:
        (folder / name).touch()
    assert [path.name for path in store.find(tmp_path)] == [
        "step_00000003.pt",
        "step_00000020.pt",
        "step_100000000.pt",
    ]


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_trace(tmp_path, error):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new" * 10_000)
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_the_file_under_the_final_name_is_complete_whenever_it_can_be_seen(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def write(file):
        for _ in range(100):
            file.write(b"x" * 10_000)
            file.flush()
            assert path.read_bytes() == b"old"

    write_atomically(path, write)
    assert path.read_bytes() == b"x" * 1_000_000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_full_disk_is_an_error_and_the_last_good_checkpoint_stays(tmp_path, share):
    good = store.save(tmp_path, tiny_state(1), keep=1, best=True)
    state = tiny_state(2, seed=2)
    with (
        pytest.raises(CheckpointError, match="could not write .*step_00000002.pt") as error,
        limited_file_size(int(good.stat().st_size * share)),
    ):
        store.save(tmp_path, state, keep=1, best=True)
    assert "File too large" in str(error.value)  # the system's own reason
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    for path in (good, tmp_path / "best.pt"):
        assert_same(store.read(path, verify=True), tiny_state(1))


def test_a_full_disk_at_the_first_checkpoint_leaves_nothing(tmp_path):
    state = tiny_state(1)
    with pytest.raises(CheckpointError, match="could not write"), limited_file_size(100):
        store.save(tmp_path, state, keep=1, best=True)
    assert not list((tmp_path / "checkpoints").iterdir())


# ---- reading what is cut or damaged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, 0.5, 0.99, -1])
def test_a_cut_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capsys, size):
    older = store.save(tmp_path, tiny_state(1), keep=2, best=False)
    newest = store.save(tmp_path, tiny_state(2, seed=2), keep=2, best=False)
    full = newest.stat().st_size
    os.truncate(
        newest, full + size if size < 0 else size if isinstance(size, int) else int(full * size)
    )
    path, state = store.read_newest(tmp_path)
    assert path == older
    assert_same(state, tiny_state(1))
    warning = capsys.readouterr().err
    assert f"warning: {newest} " in warning and "the one before it" in warning


@pytest.mark.parametrize("seed", range(5))
def test_no_flipped_byte_goes_unnoticed_unless_it_changes_nothing(tmp_path, seed):
    """Bytes anywhere in the file: in tensors, in the pickle, in the zip's headers and padding."""
    state = tiny_state(1)
    path = store.save(tmp_path, state, keep=1, best=False)
    original, rng, noticed = path.read_bytes(), random.Random(seed), 0
    for _ in range(40):
        path.write_bytes(original)
        flip_byte(path, rng.randrange(len(original)), rng.randrange(1, 256))
        try:
            found = store.read(path, verify=True)
        except CheckpointError as error:
            assert str(path) in str(error)
            noticed += 1
        else:
            assert_same(found, state)
    assert noticed > 0


def test_a_flipped_byte_in_every_tensor_is_noticed(tmp_path):
    path = store.save(tmp_path, tiny_state(1), keep=1, best=False)
    original = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [archive.read(name) for name in archive.namelist() if "/data/" in name]
    places = {original.find(record) + len(record) // 2 for record in records if len(record) >= 64}
    assert len(places) > 20
    for place in places:
        path.write_bytes(original)
        flip_byte(path, place, 1)
        with pytest.raises(CheckpointError, match="damaged"):
            store.read(path, verify=True)


def test_all_checkpoints_broken_is_an_error_and_nothing_is_deleted(tmp_path, capsys):
    for step in (1, 2):
        os.truncate(store.save(tmp_path, tiny_state(step), keep=2, best=False), 50)
    with pytest.raises(CheckpointError, match=f"none of the 2 checkpoints in {tmp_path}"):
        store.read_newest(tmp_path)
    assert capsys.readouterr().err.count("warning") == 2
    assert len(store.find(tmp_path)) == 2


def test_a_run_without_checkpoints_has_none_to_go_on_from(tmp_path):
    assert store.read_newest(tmp_path) is None
    assert store.read_newest(tmp_path / "not there") is None


# ---- reading what is foreign or hostile ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["zip", "legacy", "bare pickle", "inside a checkpoint"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, layout):
    path, target = tmp_path / "model.pt", tmp_path / "touched"
    hostile = Hostile(target)
    if layout == "bare pickle":
        path.write_bytes(pickle.dumps(hostile))
    elif layout == "inside a checkpoint":
        torch.save(tiny_state(1) | {"config": hostile}, path)
    else:
        torch.save(hostile, path, _use_new_zipfile_serialization=layout == "zip")
    for verify in (False, True):
        with pytest.raises(CheckpointError, match="model.pt cannot be read"):
            store.read(path, verify=verify)
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    assert not target.exists()
    if layout in ("zip", "legacy"):  # the file is a real attack: a reader that trusts it runs it
        torch.load(path, weights_only=False).close()
        assert target.exists()


def foreign_files():
    def torch_file(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return {
        "dict of other keys": (torch_file({"iter_num": 3, "net": {}}), "iter_num"),
        "list": (torch_file([1, 2]), "list"),
        "tensor": (torch_file(torch.zeros(3)), "Tensor"),
        "safetensors": (len(header).to_bytes(8, "little") + header + bytes(4), ""),
        "text": (b"just some text\n" * 50, ""),
        "empty": (b"", ""),
        "zeros": (bytes(1000), ""),
        "other zip": (_zip_with("hello.txt"), ""),
    }


def _zip_with(name):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "hello")
    return buffer.getvalue()


@pytest.mark.parametrize("name", foreign_files())
def test_a_foreign_file_is_an_error_that_says_what_was_found_and_what_is_supported(tmp_path, name):
    path = tmp_path / "foreign.pt"
    content, found = foreign_files()[name]
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    message = str(error.value)
    assert str(path) in message and found in message
    assert "supported" in message


def test_a_checkpoint_that_lacks_its_parts_is_a_clear_error(tmp_path):
    path = tmp_path / "half.pt"
    torch.save({"format": store.FORMAT, "step": 3}, path)
    with pytest.raises(CheckpointError, match="half.pt"):
        checkpoint.load(path)


# ---- loading a model -------------------------------------------------------------------------------------------------


def test_load_gives_the_averaged_or_the_last_weights_of_the_newest_checkpoint_in_eval_mode(
    tmp_path,
):
    store.save(tmp_path, tiny_state(1), keep=2, best=True)
    newest = tiny_state(2, seed=2)
    path = store.save(tmp_path, newest, keep=2, best=False)
    for weights, expected in (("ema", newest["ema"]["weights"]), ("raw", newest["model"])):
        loaded = checkpoint.load(tmp_path, weights)
        assert_same({name: p.detach() for name, p in loaded.model.named_parameters()}, expected)
        assert (loaded.path, loaded.step, loaded.weights) == (str(path), 2, weights)
        assert (loaded.tokenizer, loaded.vocab_size) == ("bytes", 17)
        assert not loaded.model.training
        assert loaded.model.config == TINY
    assert not torch.equal(newest["ema"]["weights"]["start"], newest["model"]["start"])
    best = checkpoint.load_model(tmp_path / "best.pt")
    assert_same(
        {name: p.detach() for name, p in best.named_parameters()}, tiny_state(1)["ema"]["weights"]
    )


def test_a_path_that_is_not_there_or_has_not_trained_and_unknown_weights_are_clear_errors(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"there is no .*nowhere; give a run folder \(out/NAME\) or a checkpoint",
    ):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoints/step_"):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match="'last'; give 'ema' or 'raw'"):
        checkpoint.load(tmp_path, "last")
