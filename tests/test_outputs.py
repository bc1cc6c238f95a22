"""Results of scripts: nothing is overwritten unasked, no device is replaced, nothing is
lost."""

import os
import stat
from pathlib import Path

import pytest
from helpers import limited_file_size

from aogpt.runtime.files import write_atomically
from aogpt.runtime.outputs import Outputs, escaped

ANSWER = "the answer\n"


def write(path, *inputs, overwrite=False):
    with Outputs({"--json": path}, inputs, overwrite) as outputs:
        outputs.write(path, ANSWER)


@pytest.fixture
def there(tmp_path):
    """Return a file of the user's."""
    path = tmp_path / "o.json"
    path.write_text("mine")
    return path


def test_what_exists_is_replaced_only_when_asked_and_keeps_its_mode_and_its_link(there):
    there.chmod(0o640)
    message = r"--json .*o\.json exists already; pass --overwrite"
    with pytest.raises(ValueError, match=message):
        write(there)
    assert there.read_text() == "mine"
    link = there.parent / "link"
    empty = there.parent / "empty"
    link.symlink_to(there)
    write(link, overwrite=True)
    assert link.is_symlink()
    assert there.read_text() == ANSWER
    assert stat.S_IMODE(there.stat().st_mode) == 0o640
    empty.touch()  # holds nothing that could be lost
    with Outputs({"--json": empty}) as outputs:
        outputs.write(empty, "first")
        outputs.write(empty, ANSWER)
    assert empty.read_text() == ANSWER


def test_two_results_cannot_have_one_name_unless_it_is_a_device(tmp_path):
    Outputs({"--json": Path(os.devnull), "--html": Path(os.devnull)})
    with pytest.raises(ValueError, match="--json and --html name the same file"):
        Outputs({"--json": tmp_path / "x", "--html": tmp_path / "y" / ".." / "x"})


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step_00000030/state.json",
        "checkpoints/step_00000030/a.safetensors",
        "metrics.jsonl",
        "config.toml",
        "best",
        "config.json",
        "tokenizer.json",
        "meta.json",
        "train.roles.bin",
    ],
)
@pytest.mark.parametrize("by", ["name", "link", "moved"])
def test_no_result_replaces_a_file_of_a_run_an_export_or_a_data_set(tmp_path, name, by):
    own = tmp_path / "own" / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    path = own
    if by == "link":
        (tmp_path / "link").symlink_to(tmp_path / "second")
        (tmp_path / "second").symlink_to(own)
        path = tmp_path / "link"
    elif by == "moved":  # the run's own file is a link to another place
        own.rename(tmp_path / "moved")
        own.symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="which no result replaces"):
        write(path, overwrite=True)
    assert own.read_text() == "mine"


def test_results_in_the_folder_of_a_run_are_results(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("samples.html", "loss.png", "result.json", "samples.jsonl"):
        write(tmp_path / name)
        write(tmp_path / name, overwrite=True)
        assert (tmp_path / name).read_text() == ANSWER


def test_of_two_processes_with_one_new_result_one_is_refused(tmp_path, capsys):
    path = tmp_path / "o.json"
    first = Outputs({"--json": path})
    second = Outputs({"--json": path})
    with first:
        first.write(path, ANSWER)
        first.write(path, ANSWER * 2)  # its own, which it may replace
    with pytest.raises(OSError, match="another process has written it.*o.json"):
        with second:
            second.write(path, "another answer\n")
    assert path.read_text() == ANSWER * 2
    assert "another answer" in capsys.readouterr().out  # not lost
    assert [each.name for each in tmp_path.iterdir()] == ["o.json"]


def test_a_device_and_a_pipe_are_written_to_and_stay():
    write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{writing}")
    with Outputs({"--json": path}) as outputs:
        outputs.write(path, "half an answer", part=True)
        outputs.write(path, ANSWER)
    os.close(writing)
    with open(reading) as file:
        assert file.read() == ANSWER


def test_a_fifo_that_nobody_may_read_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo cannot be written: name a file"):
        write(tmp_path / "fifo", overwrite=True)


def test_what_cannot_be_written_is_told_before_the_work(there, tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "no" / "x", there / "x"):
        with pytest.raises(
            ValueError, match="cannot be written: name a file, in a fol"
        ):
            write(path)
    with pytest.raises(ValueError, match="is an input"):
        write(there, there, overwrite=True)
    monkeypatch.setattr("os.access", lambda *arguments: False)
    with pytest.raises(ValueError, match="that you may write to"):
        write(tmp_path / "x")


def test_a_result_that_cannot_be_written_is_printed_and_others_are_written(
    tmp_path, capsys
):
    files = {"--json": tmp_path / "x.json", "--plot": tmp_path / "x.png"}
    with pytest.raises(OSError, match="could not write .*x.json: .*File too large"):
        with Outputs(files) as outputs:
            with limited_file_size(4):
                for path, content in zip(files.values(), (ANSWER, b"123"), strict=True):
                    outputs.write(path, content)
    assert ANSWER in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    path = tmp_path / "parts.json"
    with Outputs({"--json": path}) as outputs:  # no error: the whole is there
        with limited_file_size(4):
            outputs.write(path, "half an answer", part=True)
        outputs.write(path, ANSWER)
    assert path.read_text() == ANSWER


@pytest.mark.parametrize("linked", [False, True])
def test_no_device_is_replaced_by_the_file_of_a_run(tmp_path, linked):
    """A FIFO stands for devices, which only an administrator can make."""
    fifo = tmp_path / "fifo"
    link = tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    with pytest.raises(FileExistsError, match="fifo is not a regular file"):
        write_atomically(link if linked else fifo, lambda file: file.write(b"1"))
    assert fifo.is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<b>", r"\<b>"),
        (r"\<b>", r"\<b>"),
        (r"\\<b>", r"\\\<b>"),
        (r"\\\<!--", r"\\\<!--"),
        ("1 < 2", "1 < 2"),
    ],
)
def test_no_name_reaches_markdown_as_html(text, expected):
    """An odd number of backslashes before it makes "<" text; escaped twice is
    escaped."""
    assert escaped(text) == escaped(escaped(text)) == expected
