"""Results of scripts: nothing is overwritten unasked, nothing that is no plain file is replaced,
nothing is lost."""

import os
import stat
import threading
from pathlib import Path

import pytest
from helpers import assert_user_error, limited_file_size, run_script

from runtime.files import write_atomically
from runtime.outputs import Outputs

ANSWER = "the answer\n"


def write(path, *inputs, overwrite=False):
    with Outputs({"--json": path}, inputs, overwrite) as outputs:
        outputs.write(path, ANSWER)


@pytest.fixture
def there(tmp_path):
    """A file of the user's."""
    path = tmp_path / "o.json"
    path.write_text("mine")
    return path


def test_what_exists_is_replaced_only_when_asked_and_keeps_its_mode(there):
    there.chmod(0o640)
    with pytest.raises(ValueError, match=r"--json .*o\.json exists already; pass --overwrite"):
        write(there)
    assert there.read_text() == "mine"
    write(there, overwrite=True)
    assert there.read_text() == ANSWER and stat.S_IMODE(there.stat().st_mode) == 0o640
    write(there, overwrite=True)  # and an empty file holds nothing that could be lost
    (there.parent / "empty").touch()
    write(there.parent / "empty")
    assert (there.parent / "empty").read_text() == ANSWER


def test_a_script_may_write_its_own_results_again_while_it_runs(tmp_path):
    with Outputs({"--json": tmp_path / "x"}) as outputs:
        outputs.write(tmp_path / "x", "first")
        outputs.write(tmp_path / "x", ANSWER)
    assert (tmp_path / "x").read_text() == ANSWER


@pytest.mark.parametrize("name", ["config.toml", "checkpoints/step_00000001/model.safetensors"])
def test_inputs_are_never_replaced(there, name):
    with pytest.raises(ValueError, match="is a file that is read"):
        write(there, there, overwrite=True)
    run = there.parent / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).write_text("mine")
    with pytest.raises(ValueError, match="is a file that is read"):
        write(run / name, run, overwrite=True)
    (run / "link").symlink_to(run / name)
    with pytest.raises(ValueError, match="is a file that is read"):
        write(run / "link", run, overwrite=True)
    assert (run / name).read_text() == "mine"
    (run / "samples.html").write_text("earlier")  # lies there, but is read by nothing
    write(run / "samples.html", run, overwrite=True)


@pytest.mark.parametrize("read", ["model.safetensors", "best", "."])
def test_what_lies_beside_named_weights_is_never_replaced(tmp_path, read):
    """By no name: also not by another one of the same file."""
    (tmp_path / "checkpoints").mkdir()
    kept = [tmp_path / n for n in ("model.safetensors", "best", "config.json", "checkpoints/x.bin")]
    for file in kept:
        file.write_text("mine")
    other = tmp_path / "other.jsonl"
    os.link(kept[0], other)
    for file in (*kept, other):
        with pytest.raises(ValueError, match="is a file that is read"):
            write(file, tmp_path / read, overwrite=True)
    assert all(file.read_text() == "mine" for file in kept)


def test_links_in_a_circle_are_an_error_of_one_line(run, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    arguments = ["--num-samples", 1, "--steps", 1, "--jsonl", loop]
    assert_user_error(run_script("sample.py", run, *arguments, check=False), "Symlink loop")


def test_two_results_can_go_to_one_device(tmp_path):
    Outputs({"--json": Path(os.devnull), "--html": Path(os.devnull)})


def test_two_results_cannot_have_one_name(tmp_path):
    with pytest.raises(ValueError, match="--json and --html name the same file"):
        Outputs({"--json": tmp_path / "x", "--html": tmp_path / "y" / ".." / "x"})


def test_a_link_goes_on_to_lead_to_its_file_and_names_of_one_file_to_that(there):
    link, second = there.parent / "link", there.parent / "second"
    link.symlink_to(there)
    os.link(there, second)
    write(link, overwrite=True)
    assert link.is_symlink() and there.read_text() == second.read_text() == ANSWER


def test_a_device_and_a_fifo_are_written_to_and_stay(tmp_path):
    write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "fifo")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "fifo").read_text()))
    reader.start()
    write(tmp_path / "fifo")
    reader.join()
    assert found == [ANSWER] and stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_what_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is a folder; name a file"):
        write(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        write(tmp_path / "no" / "x")

    def read_only(*arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.open", read_only)
    with pytest.raises(ValueError, match="cannot be written: .*Read-only"):
        write(tmp_path / "x")


def test_a_result_that_still_cannot_be_written_is_printed_or_kept_elsewhere(
    tmp_path, capsys, monkeypatch
):
    files = {"--json": tmp_path / "x.json", "--plot": tmp_path / "x.png"}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(OSError, match="could not write .*x.json: it is printed instead.*x.png"):
        with Outputs(files) as outputs:
            with limited_file_size(4):
                for path, content in zip(files.values(), (ANSWER, b"12345"), strict=True):
                    outputs.write(path, content)
    assert ANSWER in capsys.readouterr().out
    assert [path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()] == [b"12345"]
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_temporary_names_are_nobody_elses(tmp_path):
    theirs = tmp_path / ".x.tmp"
    theirs.write_text("mine")
    write_atomically(tmp_path / "x", lambda file: file.write(b"1"))
    assert theirs.read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("linked", [False, True])
def test_no_device_is_replaced_by_the_file_of_a_run(tmp_path, linked):
    """A FIFO stands for devices, which only an administrator can make."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    with pytest.raises(FileExistsError, match="fifo is no regular file and is not replaced"):
        write_atomically(link if linked else fifo, lambda file: file.write(b"1"))
    assert fifo.is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_text_that_has_no_place_in_a_file_is_written_as_its_numbers(tmp_path):
    with Outputs({"--html": tmp_path / "o.html"}) as outputs:
        outputs.write(tmp_path / "o.html", "half a pair: \ud800\n")
    assert (tmp_path / "o.html").read_text() == "half a pair: \\ud800\n"


def test_what_is_read_later_is_an_input_too_and_what_comes_meanwhile_stays(tmp_path, capsys):
    """Whatever code reads it, and whether or not the script has listed it."""
    read, late = tmp_path / "read.json", tmp_path / "late.json"
    read.write_text("mine")
    with pytest.raises(OSError, match="printed instead"):
        with Outputs({"--json": read, "--jsonl": late}, overwrite=True) as outputs:
            assert read.read_text() == "mine"
            outputs.write(read, ANSWER)
            outputs.write(late, ANSWER)
            outputs.write(late, ANSWER)  # its own
    assert read.read_text() == "mine" and late.read_text() == ANSWER
    late.unlink()
    with pytest.raises(OSError, match="printed instead"), Outputs({"--json": late}) as outputs:
        late.write_text("yours")
        outputs.write(late, ANSWER)
    assert late.read_text() == "yours" and ANSWER in capsys.readouterr().out
