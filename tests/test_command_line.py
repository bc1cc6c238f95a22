"""How scripts end: one line for a user's mistake, a traceback for a bug, and no result
lost."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ALONE, ROOT, prepared, run_script, tiny_config
from hypothesis import example, given, settings
from hypothesis import strategies as st

import eval_ppl
import sample
import train
from aogpt.checkpoints import load
from aogpt.data import prepare
from aogpt.data.loader import find_dataset
from aogpt.model import RMSNorm
from aogpt.runtime import command_line
from aogpt.runtime.command_line import show, visible
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_text
from aogpt.runtime.outputs import Outputs, markdown_table
from aogpt.training.config import Config
from aogpt.training.metrics import Log

MAIN = """
import os, signal, sys
from aogpt.runtime.command_line import run_script
from aogpt.runtime.errors import UserError
def main():
    {}
    print("not reached")
run_script(main)
"""
SMALLER = "use a smaller batch or fewer samples:"
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def test_an_option_is_not_given_twice(mistake, run):
    """The last one alone would count."""
    quickstart = ROOT / "configs/quickstart.toml"
    for module, options, twice in (
        (sample, [run, "--rows", 1, "--num-samples", 1, "--rows=2"], "--rows"),
        (sample, [run, "--num-samples", 1, "--num_samples", 2], "--num-samples"),
        (eval_ppl, [run, "--orders", "l2r", "--orders", "random"], "--orders"),
        (prepare, ["text", "--source", "a.txt", "--source", "a.txt"], "--source"),
        (train, [quickstart, "--seed", 1, "--seed", 2], "--seed"),
    ):
        message = f"{twice} is given twice; give it once, with all its values"
        assert message in mistake(module, *options)


@pytest.mark.parametrize("module", [sample, eval_ppl])
def test_a_script_without_a_run_asks_for_one(mistake, tmp_path, data, module):
    options = ["--datasets", data] if module is eval_ppl else []
    said = mistake(module, tmp_path / "nowhere", *options)
    assert "give a run folder (out/NAME) or a checkpoint" in said
    assert "holds no checkpoints/step_N" in mistake(module, tmp_path, *options)
    assert "RUN" in mistake(module, *options)


@pytest.mark.parametrize(
    "body, status, out, err",
    [
        (INTERRUPT, 130, "", "interrupted"),
        (
            "print('\\u00e9\\u4e2d\\ud800', 'x' * 10**6, 'end'); return",
            0,
            "\\xe9\\u4e2d\\ud800 " + "x" * 10**6 + " end",
            "",
        ),
    ],
)
def test_a_script_ends_in_one_line_and_shows_everything(body, status, out, err):
    command = [sys.executable, "-c", MAIN.format(body)]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "RANK": "3"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    ending = done.returncode, done.stdout.strip(), done.stderr.strip()
    assert ending == (status, out, err)


@pytest.mark.parametrize(
    "body, status, err",
    [
        ("raise UserError('give --x')", 2, "error (rank 3): give --x"),
        ("open('/x')", 2, "error (rank 3): [Errno 2] No such file or directory: '/x'"),
        ("raise MemoryError", 2, f"error (rank 3): out of memory; {SMALLER}"),
        ("return 5", 5, ""),
    ],
)
def test_a_mistake_is_told_in_one_line(body, status, err, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("sys.argv", ["script.py"])  # not the words of pytest
    with pytest.raises(SystemExit) as stop:
        exec(MAIN.format(body), {})
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out, printed.err.strip()) == (status, "", err)


def test_under_torchrun_a_mistake_stands_once_at_the_end():
    launch = "-m torch.distributed.run --standalone --nproc_per_node=2 train.py"
    words = [*launch.split(), "configs/quickstart.toml", "--data.folder", "/nowhere"]
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    message = "error: /nowhere is not a prepared dataset"
    assert done.stderr.count(message) == 1
    *_, last, frame = done.stderr.splitlines()
    assert message in last
    assert set(frame) == {"="}


def test_a_bug_in_the_model_keeps_its_traceback(run, data, script, monkeypatch):
    """The error itself arrives."""

    def forward(self, *arguments):
        raise ValueError("a bug")

    monkeypatch.setattr(RMSNorm, "forward", forward)
    for module, words in ((eval_ppl, ["--datasets", data]), (sample, [])):
        with pytest.raises(ValueError, match="a bug"):
            script(module, run, *words)


def test_the_traceback_of_a_mistake_is_shown_on_demand(tmp_path, script, monkeypatch):
    monkeypatch.setenv("AOGPT_TRACEBACK", "1")
    status, _, err = script(sample, tmp_path)
    assert status == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_a_reader_that_leaves_ends_the_script_without_a_traceback():
    body = MAIN.format("for i in range(10**6): print(i)")
    piped = f"{sys.executable} -c '{body}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "0\n", "")


def fail(text):
    def main():
        raise UserError(text)

    with contextlib.suppress(SystemExit):
        command_line.run_script(main)


def draw(text):
    record = {"text": text, "prompt_index": 0}
    sample.Report.print(SimpleNamespace(lengths=[]), [record], several=False)


def warn(text):
    Log.warn(SimpleNamespace(_print=lambda line, file: show(line)), text)


ROUTES = {
    "print": show,
    "print0": ALONE.print0,
    "error": fail,
    "sample": draw,
    "warning": warn,
}
ROUTES["table"] = lambda text: show(*markdown_table([text], [[text]]), sep="\n")


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=30)
@given(st.text())
@example("\x1b]0;title\x07\r\x9b31m\u202e\u2028<b>\nerror: forged")
def test_no_foreign_text_controls_the_terminal_or_forges_a_line(route, text):
    stream = io.StringIO()
    stream.isatty = lambda: True
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        ROUTES[route](text)
    shown = stream.getvalue()
    assert not {c for c in shown if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
    assert not set(shown) & set(
        "\u2028\u2029\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069"
    )
    if route in ("error", "warning"):
        assert shown.count("\n") == 1
    if route == "print":
        assert shown == visible(text) + "\n"


@settings(max_examples=30)
@given(st.text(min_size=1))
@example("<script>alert(1)</script>\n<img src=x>|")
def test_no_name_is_html_or_a_cell_or_a_line_of_a_markdown_page(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("page") / "page.md"
    table = markdown_table(["run", "loss"], [[name, "1"]])
    Outputs({}).write_report(path.with_suffix(".json"), {}, [f"# {name}", *table])
    lines = path.read_text().split("\n")
    assert len(lines) == 5
    assert not any(re.search(r"(?<!\\)<[a-zA-Z/!?]", line) for line in lines)
    assert len(re.findall(r"(?<!\\)\|", lines[3])) == 3


def test_a_tilde_is_the_home_directory_in_options_and_keys(
    printed, tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("some text " * 9)
    monkeypatch.setenv("HOME", str(tmp_path))
    printed(prepare, *"text --source=~/a.txt --tokenizer bytes --out=~/o".split())
    assert find_dataset("~/o") == tmp_path / "o"
    assert Config(out="~/runs", name="x").run_folder == tmp_path / "runs" / "x"
    (tmp_path / "w.pt").write_bytes(b"")
    with pytest.raises(UserError, match=f"{tmp_path}/w.pt cannot be read"):
        load("~/w.pt")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for use in (find_dataset, load, lambda path: Config(out=path).run_folder):
        with pytest.raises(UserError, match="~/o: .*Write the path without ~"):
            use("~/o")


@pytest.mark.parametrize("size", [200, 255])
def test_a_long_name_works_or_is_refused_in_a_line(tmp_path, size):
    source = tmp_path / ("n" * (size - 4) + ".txt")
    source.write_text("some text " * 9)
    out = prepared("text", tmp_path / ("o" * size), source)
    assert (Path(out) / "meta.json").is_file()
    out = tmp_path / ("\N{GREEK SMALL LETTER OMEGA}" * (size // 2))
    write_text(out, "text")
    assert out.read_text() == "text"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_message_that_is_too_long_is_cut(script):
    name = "a/" * 20_000
    status, _, err = script(sample, name + "b", "--prompts", f"{name}.txt")
    assert status == 2
    assert len(err) < 2100
    assert re.search(r"\.\.\. \([34]\d,\d{3} characters\)$", err.strip())


def test_a_file_is_not_named_as_a_folder(mistake, run, tmp_path):
    new = f"{tmp_path}/new"
    for words in (["--html", f"{new}/"], [f"--html={new}/"], ["--html", f"{new}/."]):
        message = mistake(sample, run, *words)
        assert f"--html {new} cannot be written: name a file" in message
    assert not list(tmp_path.iterdir())


VARIABLES = [
    ("TQDM_MININTERVAL", ["sample.py", "--help"], 2),
    ("MPLBACKEND", ["-c", "import aogpt.runtime.environment, matplotlib.pyplot"], 0),
]


@pytest.mark.parametrize("name, words, status", VARIABLES)
def test_a_variable_that_a_package_cannot_read_is_named(name, words, status):
    done = run_script(*words, check=False, **{name: "nonsense"})
    assert done.returncode == status
    assert done.stderr.count("\n") == (status > 0)
    if status:
        assert done.stderr.startswith(f"error: {name}: ")


def test_a_variable_of_wandb_that_is_wrong_is_named(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    config = tiny_config(data, tmp_path, wandb__mode="offline")
    with pytest.raises(UserError, match="wandb: .*; check WANDB_MODE"):
        train.train(config, ALONE)


def test_train_helps_without_docstrings():
    done = run_script("-OO", "train.py", "--help")
    assert "--train.steps" in done.stdout


def test_a_prompt_is_read_as_utf_8_in_any_locale(run, tmp_path):
    file = tmp_path / "samples.jsonl"
    words = ["--prompt", "\u00e9\u65e5", "--num-samples", 1, "--jsonl", file]
    run_script(
        "sample.py", run, *words, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"
    )
    row = json.loads(file.read_text())
    assert row["prompt"] == "\u00e9\u65e5"
    assert row["text"].startswith("\u00e9\u65e5")


@pytest.mark.parametrize("option", ["--prompt", "--jsonl", "--prompts"])
def test_a_text_or_name_that_is_not_utf_8_is_refused(mistake, run, option):
    message = mistake(sample, run, option, os.fsdecode(b"a\xff"))
    assert message == r"error: 'a\udcff': give a name or text in UTF-8"


SCRIPTS = [
    [name.name]
    for name in sorted(ROOT.glob("*.py"))
    if name.name not in ("conftest.py", "model.py")
]


@pytest.mark.parametrize(
    "words",
    [
        *SCRIPTS,
        ["data/prepare.py"],
        ["-m", "aogpt", "fill"],
        ["-m", "studies.plot"],
        ["-m", "studies.bench"],
    ],
    ids=" ".join,
)
def test_without_the_environment_a_line_says_to_activate_it(words):
    """-S: without the packages that are installed."""
    done = subprocess.run(
        [sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "requirements.txt; activate the environment: . .venv/bin/activate" in line
