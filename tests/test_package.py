"""The package as a user installs it: what the wheel holds, and the library from another
folder, which has a `data/` and a `model.py` of its own."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from helpers import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="needs setuptools"
)
SOURCES = ("aogpt", "pyproject.toml", "README.md", "LICENSE")


BUILDS = pytest.mark.slow(reason="builds and installs a wheel")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the installed package, and the wheel."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", *options, "--wheel-dir", str(folder), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", *options, "--target", str(folder / "site"), str(wheel)],
        check=True,
        capture_output=True,
    )
    return folder / "site", wheel


@BUILDS
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(site):
    names = set(zipfile.ZipFile(site[1]).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"aogpt"}
    for path in (ROOT / "aogpt").rglob("*"):
        name = str(path.relative_to(ROOT))
        if path.is_file() and "__pycache__" not in name:
            assert name in names, name


USE = """
import json, sys
sys.path.insert(0, {site!r})
import aogpt, os
assert os.path.dirname(aogpt.__file__).startswith({site!r}), aogpt.__file__
model = aogpt.load({model!r})
print(json.dumps([aogpt.__version__, model.score(["She went home."])[0].nats]))
"""


def run_elsewhere(tmp_path, code):
    """Run Python in a folder that has modules of our old names."""
    (tmp_path / "data").mkdir(exist_ok=True)
    for name in ("model.py", "data/__init__.py", "runtime.py", "training.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    return subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )


@BUILDS
def test_the_installed_library_scores_a_text_from_another_folder(site, tmp_path):
    import aogpt

    model = str(ROOT / "results" / "books_model")
    code = USE.format(site=str(site[0]), model=model)
    done = run_elsewhere(tmp_path, code)
    assert done.returncode == 0, done.stderr
    version, nats = json.loads(done.stdout)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version == project["version"] == aogpt.__version__
    assert nats == aogpt.load(model).score(["She went home."])[0].nats


@BUILDS
def test_the_installed_command_runs_from_another_folder(site, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(site[0])!r})\n"
        f"sys.argv = ['aogpt', 'rank', {str(ROOT / 'results' / 'books_model')!r}, "
        "'The [cat|tax] barked.']\n"
        "from aogpt.__main__ import console\n"
        "console()\n"
    )
    done = run_elsewhere(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "The cat barked." in done.stdout


def test_a_model_from_a_hub_needs_no_extra():
    """Its tokenizer.json and its download: of `pip install .` and requirements.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = (ROOT / "requirements.txt").read_text()
    for package in ("tokenizers", "safetensors", "tiktoken"):
        assert any(line.startswith(package) for line in project["dependencies"])
        assert f"\n{package}==" in requirements


def test_the_command_says_which_release_this_is(monkeypatch, capsys):
    import aogpt
    from aogpt import __main__

    monkeypatch.setattr(sys, "argv", ["aogpt", "--version"])
    __main__.main()
    assert capsys.readouterr().out == f"aogpt {aogpt.__version__}\n"


def test_a_model_is_loaded_without_the_compiler_of_torch():
    script = (
        "import sys, aogpt\n"
        "model = aogpt.load('results/books_model')\n"
        "model.score(['The old horse was tired.'])\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
