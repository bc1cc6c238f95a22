"""The pages of the manual: commands parse and name files that exist, many of them run,
links lead somewhere, and the example of docs/method.md prints what the page says."""

import functools
import gzip
import importlib
import json
import os
import re
import shlex
import string
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tyro
from helpers import ROOT, prepared, shell_lines, tracked, write_jsonl, write_rows

import convert
import eval_ppl
from aogpt import __main__ as commands
from aogpt.data import prepare
from aogpt.runtime.command_line import check_repeated
from aogpt.training import config as configuration
from studies import prepare as study_data
from studies.measures import with_options

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
RESULTS = [
    p for p in sorted((ROOT / "results").rglob("*.md")) if "details" not in p.name
]
BEGIN = ("python ", "torchrun ", "make ", "pip ", "source ", "aogpt ")
OUTPUTS = (
    "--out",
    "--json",
    "--jsonl",
    "--html",
    "--samples",
    "--dest",
)  # files that need not be
DATASETS = (*prepare.DATASETS, *study_data.DATASETS)
MADE = (
    "stories_bytes",
    "own",
    "openwebtext",
    "books_english",
    "questions",
    "chorales_alto",
    "books_smollm2",
    "ptb_smollm2",
    "wikitext103_smollm2",
)  # folders under data/ that users make
RECORDS = {
    "names": ["anna", "otto", "maria"] * 10,
    "proteins": ["MKV", "ACDEFGH", "WYRS"] * 10,
}
FOLDERS = (*MADE, *RECORDS, *DATASETS)


def commands_of(text):
    """Return the command lines in the code of a page, without what is around them in a
    shell."""
    snippets = re.findall(r"`([^`\n]+)`", text)
    for line in shell_lines(text):
        snippets += re.findall(
            r"^(?:    |\t)\s*(?:[A-Z_]+=\S+ |srun |.*\| )*(.*)", line
        )
    commands = []
    for command in snippets:
        if command.startswith("aogpt "):  # the installed command
            command = f"python -m {command}"
        if command.startswith(BEGIN):
            commands.append(shlex.split(command, comments=True))
    return commands


def commands_on(pages):
    """{the words of a command: the first page that has it}"""
    page_names = {}
    for page in pages:
        for words in commands_of(page.read_text()):
            page_names.setdefault(tuple(words), page.name)
    return page_names


COMMANDS = commands_on(PAGES)
PARSED = COMMANDS | commands_on(
    [*RESULTS, ROOT / "extras" / "README.md", ROOT / "studies" / "README.md"]
)


def script_of(words):
    """Return the words after python or torchrun and its options: the script or module,
    its arguments. The command `aogpt` is `python -m aogpt`."""
    rest = [word for word in words[1:] if word != "-m"]
    if words[0] == "aogpt":
        rest = list(words)
    first = next((i for i, word in enumerate(rest) if not word.startswith("--")), 0)
    if rest[first] == "aogpt":  # a command of the package, as `python -m aogpt score`
        return " ".join(rest[first : first + 2]), rest[first + 2 :]
    return rest[first], rest[first + 1 :]


def cases_of(commands):
    """Return parameters of a test of {words: page}. A command is slow if earlier ones
    have its script and all of its options."""
    covered = set()
    cases = []
    for words, page in commands.items():
        script, arguments = script_of(words)
        options = [word.partition("=")[0] for word in arguments if word[:2] == "--"]
        parts = {(script, option) for option in ("", *options)}
        marks = []
        if parts <= covered:
            marks = [pytest.mark.slow(reason="its options are those of other commands")]
        covered |= parts
        case = pytest.param(words, id=f"{page}: {' '.join(words)}", marks=marks)
        cases.append(case)
    return cases


def module_of(script):
    """Return the module whose main reads the words of a script."""
    if script.startswith("aogpt "):
        return commands
    if script == "data/prepare.py":
        return prepare
    return importlib.import_module(script.removesuffix(".py"))


class Parsed(Exception):
    """Raised with what a command line means, in place of doing it."""


def stop(function):
    """Return a function of the same arguments that raises them."""

    @functools.wraps(function)
    def raise_parsed(*values, **named):
        raise Parsed(values[0] if values else named)

    return raise_parsed


@pytest.fixture
def parse(monkeypatch):
    """(script, words) -> the arguments, as the script's own main reads them."""
    cli = tyro.cli
    subcommands = tyro.extras.subcommand_cli_from_dict

    def parse_only(wanted, *rest, **options):
        if not isinstance(wanted, type):  # a function, which it would call
            wanted = stop(wanted)
        raise Parsed(cli(wanted, *rest, **options))

    def parse_command(commands, **options):
        stopped = {}
        for name, command in commands.items():
            stopped[name] = command if isinstance(command, type) else stop(command)
        raise Parsed(subcommands(stopped, **options))

    def call(script, words):
        if script == "train.py":
            monkeypatch.setattr(
                configuration, "with_source", lambda config, given: config
            )
            return configuration.from_command_line(words, "")
        module = module_of(script)
        monkeypatch.setattr(tyro, "cli", parse_only)
        monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", parse_command)
        name = script.split() if module is commands else [script]
        monkeypatch.setattr("sys.argv", [*name, *words])
        with pytest.raises(Parsed) as parsed:
            if script == "convert.py":
                tyro.cli(module.convert)
            else:
                module.main()
        return parsed.value.args[0]

    return call


def check_files(words):
    """Words that look like files of the repository are such, or what a user makes."""
    folders = {path.name for path in ROOT.iterdir()}
    for before, word in zip(("", *words), words, strict=False):
        first, *inner_parts = word.split("/")
        if (
            before in OUTPUTS
            or not inner_parts
            or first not in folders
            or first == "out"
        ):
            continue
        is_dataset = first == "data" and inner_parts[0] in FOLDERS
        assert is_dataset or (ROOT / word).exists(), f"{word} does not exist"


def test_commands_name_scripts_and_files_that_exist():
    for words in PARSED:
        check_files(words)
        if words[0] == "make":
            target = next(word for word in words[1:] if "=" not in word)
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        for option, file in zip(words, words[1:], strict=False):
            assert (words[0], option) != ("pip", "-r") or (ROOT / file).is_file()
        if words[0] in ("python", "torchrun"):
            script, _ = script_of(words)
            module = ROOT / f"{script.replace('.', '/')}.py"
            is_command = script == "pytest" or script.startswith("aogpt ")
            file = ROOT / script
            assert is_command or file.is_file() or module.is_file(), script


def has_options(words):
    """Return whether a command runs a script of ours with arguments to parse."""
    if words[0] not in ("python", "torchrun"):
        return False
    script, arguments = script_of(words)
    if script == "pytest" or script.startswith("tests/"):
        return False
    return bool(arguments) and "--help" not in arguments


WITH_OPTIONS = {words: page for words, page in PARSED.items() if has_options(words)}


@pytest.mark.parametrize("words", cases_of(WITH_OPTIONS))
def test_a_command_parses(words, parse, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    script, arguments = script_of(words)
    if any("=orders.npy" in word for word in arguments):  # a mode reads the file
        orders = tmp_path / "orders.npy"
        np.save(orders, np.arange(64)[None])
        arguments = [word.replace("=orders.npy", f"={orders}") for word in arguments]
    if script == "train.py" and arguments[0].startswith("CONFIG"):
        arguments = ["configs/quickstart.toml", *arguments[1:]]
    check_repeated(arguments)
    got = parse(script, arguments)
    if script == "eval_ppl.py":
        eval_ppl.check_arguments(got)
        names = {name for name in got.datasets if "/" not in name}
        assert names <= set(DATASETS)
    if script == "sample.py":
        assert got.decoding
    if script == "data/prepare.py":
        assert got.name in (*prepare.DATASETS, "NAME")
    if script == "studies.prepare":
        assert got.name in study_data.DATASETS


# ---- commands that run ---------------------------------------------------------------

# Options that make a run small, also in place of those of the command.
SMALL = {
    "sample.py": ["--num-samples", "1", "--overwrite"],
    "aogpt blanks": [],
    "aogpt fill": [],
    "aogpt generate": [],
    "aogpt rank": [],
    "aogpt score": [],
    "convert.py": [],
    "eval_ppl.py": ["--max-sequences", "1", "--num-orders", "2", "--block-size", "32"],
    "eval_gen.py": [
        "--num-samples",
        "2",
        "--length",
        "16",
        "--judge",
        "RUN",
        "--overwrite",
    ],
    "data/prepare.py": ["--limit", "20"],
    "studies.eval_infill": ["--num-passages", "2", "--overwrite"],
    "train.py": (
        "--train.steps 1 --train.no-compile --train.batch_size 2 "
        "--train.micro_batch_size 2 --model.n_layer 1 --model.n_embd 32 --model.n_head "
        "2 --model.block_size 32 --optim.warmup_steps 1 --eval.sequences 2"
    ).split(),
}
USER_FILES = ("MY.txt", "wiki.test.raw", "MORE.jsonl", "MY.jsonl", "samples.jsonl")
LEFT_OUT = {
    "ENCODER": "no encoder at hand",
    "score_entropy": "no SEDD at hand",
    "raw": "the books model has averaged weights alone",
    "FOLDER/tokenizer.json": "of another model",
    "--train.init-from": "of another size than the small run",
    "--order.file": "no orders at hand",
    "file:file=orders.npy": "no orders at hand",
    "configs/own_text.toml": "no such config",
    "CONFIG.toml": "a placeholder",
    "MODEL": "a placeholder",
    "SRC": "a placeholder",
    "NAME": "a placeholder",
    "lambada": "slow: many sets",
}


def small_commands():
    """Return the commands to run, (script, arguments) in small: of those that differ in
    values alone the first."""
    shortened = {}
    for words in COMMANDS:
        if words[0] not in ("python", "torchrun"):
            continue
        script, arguments = script_of(words)
        if script not in SMALL or not arguments or LEFT_OUT.keys() & set(arguments):
            continue
        options = {word for word in arguments if word.startswith("--")}
        more = list(SMALL[script])
        has_masks = any("[MASK" in word for word in arguments)
        if script == "sample.py" and "--prompts" not in options and not has_masks:
            more += ["--length", "24"]
        if script == "data/prepare.py":
            dataset = prepare.DATASETS[arguments[0]]
            if (dataset.hub or dataset.url) and "--source" not in options:
                continue  # large, or a download
            if "--tokenizer" not in options:
                more += ["--tokenizer", "english"]
            more += ["--out", f"made{len(shortened)}"]
        if script == "train.py":
            more += ["--out", f"made{len(shortened)}"]
        if script == "eval_ppl.py" and "--json" in options:
            more.append("--overwrite")
        mode = arguments[arguments.index("--mode") + 1] if "--mode" in arguments else ""
        kind = arguments[0] if script == "data/prepare.py" else ""
        text = arguments[1] if script.startswith("aogpt ") else ""
        key = script, *sorted(options), mode, kind, text
        shortened.setdefault(key, (script, with_options(arguments, more)))
    return list(shortened.values())


@pytest.mark.slow(reason="every command of the documentation")
def test_commands_run(tmp_path, monkeypatch, script):
    """In a folder in which their files exist, with MY.txt on the standard input."""
    to_run = small_commands()
    assert {name for name, _ in to_run} == SMALL.keys()
    assert len(to_run) >= 30
    write = {name: tmp_path / name for name in USER_FILES}
    for path in write.values():
        text = "The old horse was tired, and so they gave him some water. " * 120
        path.write_text(json.dumps({"text": text}) if path.suffix == ".jsonl" else text)
    (tmp_path / "MORE.jsonl.gz").write_bytes(
        gzip.compress(write["MORE.jsonl"].read_bytes())
    )
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "It was", "length": 12}])
    questions = [{"prompt": f"{i}+1=", "text": f"{i + 1}"} for i in range(40)]
    write_rows(tmp_path / "questions.jsonl", questions)
    for name, texts in RECORDS.items():
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    data = prepared(
        "text",
        tmp_path / "prepared",
        write["MY.txt"],
        tokenizer="english",
        val_fraction=0.5,
    )
    for name in ("out", "data"):
        (tmp_path / name).mkdir()
    for name in RECORDS:
        prepared(
            "records",
            tmp_path / "data" / name,
            tmp_path / f"{name}.jsonl",
            tokenizer=f"alphabet:{string.ascii_letters}",
            block_size=24,
        )
    for name in ("results", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    runs = set()
    for _, arguments in to_run:
        runs |= {word for word in arguments if re.match("RUN$|FOLDER$|out/", word)}
    runs -= {arguments[1] for name, arguments in to_run if name == "convert.py"}
    for name in runs:
        (tmp_path / name).symlink_to(ROOT / "results" / "books_model")
    for name in (*DATASETS, *(f"data/{name}" for name in MADE)):
        (tmp_path / name).symlink_to(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "main", lambda: tyro.cli(convert.convert), False)
    stdin = os.dup(0)
    try:
        for name, arguments in to_run:
            with open("MY.txt") as text:
                os.dup2(text.fileno(), 0)
            command = name.split()[1:]  # of aogpt
            status, out, err = script(module_of(name), *command, *arguments)
            assert status == 0, f"{name} {arguments}\n{out}\n{err}"
    finally:
        os.dup2(stdin, 0)


RESULT = re.compile(r"^    python -m (aogpt .*?) +# (\S.*\d.*)$", re.M)


def results_shown():
    """Return (command, what it prints as the page says) of each command with such a
    comment, and of the command whose sample README quotes."""
    shown = []
    for page in PAGES:
        for command, comment in RESULT.findall(page.read_text()):
            shown.append((command, comment.split(", ")))
    readme = (ROOT / "README.md").read_text().replace("\\\n", "")
    of_books = re.compile(r"^    python -m (aogpt fill results/books.*)$", re.M)
    command = of_books.search(readme)[1]
    sample_of = re.search(r'The last prints "(.*?)"', readme)
    return [*shown, (command, [sample_of[1]])]


@pytest.mark.slow(reason="a process for each command")
@pytest.mark.parametrize(("command", "results"), results_shown())
def test_a_command_prints_what_the_page_says(command, results):
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for result in results:
        assert result in done.stdout


# ---- pages ---------------------------------------------------------------------------


def without_code(text):
    text = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text):
    """Return anchors of the headings of a page, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in titles
    }


@pytest.mark.parametrize(
    "page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        file, _, anchor = link.partition("#")
        if link.startswith(("https://", "http://")):
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target.read_text()), (
            f"{page.name} links to {link}"
        )


def test_every_page_is_on_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    assert all(f": {page.relative_to(ROOT)}\n" in nav for page in PAGES)


def test_files_and_names_that_contributing_tells_to_edit_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    text = text.partition("## To change X")[2].partition("## Enter the speedrun")[0]
    files = tracked()
    source = "\n".join((ROOT / name).read_text() for name in tracked("*.py"))
    for code in re.findall(r"`([^`-][^` ]*)`", text):
        name = code.rpartition(".")[2]
        if "/" in code or name in ("py", "md", "yml"):
            file = code.rstrip("/").replace("EN.toml", "E2.toml")
            assert (
                any(f"/{one}".endswith(f"/{file}") for one in files)
                or (ROOT / file).is_dir()
            ), code
        else:
            assert re.search(rf"\b{name}\b", source), code


@pytest.mark.slow(reason="runs a program of some seconds")
@pytest.mark.parametrize(
    "page", ["README", "docs/method", "docs/own_order_policy", "docs/log_probs_for_rl"]
)
def test_the_code_of_a_page_prints_what_the_page_says(page, tmp_path):
    """All code of the page is one program. Numbers may differ in the last place."""
    text = (ROOT / f"{page}.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    if page == "README":
        code = textwrap.dedent(
            re.search(r"^    import aogpt\n(    .*\n)+", text, re.M)[0]
        )
    shown = "".join(re.findall(r"```text\n(.*?)```", text, re.S))
    (tmp_path / "example.py").write_text(code)
    for name in ("results", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "example.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    number = r"-?\d+(?:\.\d+)?%?"
    assert re.sub(number, "0", done.stdout) == re.sub(number, "0", shown)
    printed = re.findall(number, done.stdout)
    for ours, theirs in zip(printed, re.findall(number, shown), strict=True):
        last_place = 1.01 if "%" in ours else 0.011
        difference = float(ours.strip("%")) - float(theirs.strip("%"))
        assert abs(difference) < last_place, f"{ours} is not {theirs}"
