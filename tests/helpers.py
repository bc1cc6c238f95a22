"""What several test files use: scripts run as processes, tiny runs, and comparisons."""

import contextlib
import html.parser
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aogpt.checkpoints import store
from aogpt.data.loader import TokenDataset, load_meta, read_tokens, spread
from aogpt.data.prepare import Prepare, prepare
from aogpt.data.tokenizers import get_tokenizer
from aogpt.model import ModelConfig
from aogpt.objectives import ObjectiveConfig
from aogpt.orders import OrderConfig
from aogpt.runtime.devices import has_compiler
from aogpt.runtime.processes import Processes
from aogpt.training import config as configuration

ROOT = Path(__file__).resolve().parent.parent
ALONE = Processes(0, 1, torch.device("cpu"))
LENGTH = 16  # the block size of tiny_config

# The file of GPT-2's tokenizer lies beside the real text.
if (
    "AOGPT_DATA" in os.environ
    and (Path(os.environ["AOGPT_DATA"]) / "tiktoken").is_dir()
):
    os.environ.setdefault(
        "TIKTOKEN_CACHE_DIR", str(Path(os.environ["AOGPT_DATA"]) / "tiktoken")
    )

needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ,
    reason="needs TIKTOKEN_CACHE_DIR or AOGPT_DATA/tiktoken",
)

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="torch.compile needs a C++ compiler"
)


def tracked(*patterns):
    """Return the names of the files of the project that match, as git lists them."""
    listing = ["git", "ls-files", *patterns]
    return subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()


def make_data(folder, words=4000, seed=0):
    """Prepare a dataset of bytes and return its folder: random English words, so that
    there is something to learn."""
    rng = random.Random(seed)
    vocabulary = "any order model token mask block step learn the of predict".split()
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(vocabulary) for _ in range(words)))
    return prepared("text", folder / "data", text, val_fraction=0.2)


def shell_lines(text):
    """Return the lines of commands of a shell: continued ones joined, and the variables
    that the text sets in the place of their names."""
    text = re.sub(r"\\\n\s*", "", text)
    for name, value in re.findall(r'^\s*([A-Z]+)="(.*)"$', text, re.M):
        text = text.replace(f"${name} ", f"{value} ")
    return text.splitlines()


def some_slow(cases, is_quick, reason):
    """Return the parameters of a test: the cases, those marked as slow for which
    is_quick(*case) is false."""
    marked = []
    for case in cases:
        marks = [] if is_quick(*case) else [pytest.mark.slow(reason=reason)]
        marked.append(pytest.param(*case, marks=marks))
    return marked


def prepared(name, out, *source, tokenizer="bytes", **options):
    """Prepare a dataset in this process; returns its folder."""
    settings = Prepare(name, out=out, source=source, tokenizer=tokenizer, **options)
    return prepare(settings)


def documents(folder, split="test"):
    """Return the text of every document of a prepared split, whose checksum is
    right."""
    tokens = read_tokens(folder, split, verify=True)
    text = get_tokenizer(load_meta(folder)["tokenizer"]).decode(tokens)
    return text.split("<|endoftext|>")[:-1]


def val_blocks(data, count):
    """Return blocks of the validation split, spread over it, as scripts choose them."""
    dataset = TokenDataset(data, "val", LENGTH)
    return dataset.blocks(spread(count, dataset.num_blocks))


def write_rows(path, rows):
    """Write objects as a JSONL file; returns its path."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_jsonl(path, texts, field="text"):
    """Write texts as a JSONL file; returns its path."""
    return write_rows(path, [{field: text} for text in texts])


def tiny_config(data, out, name="run", steps=40, **changes):
    """Return the config of a run of a second. Dropout is on: its random numbers, too,
    must survive a resume."""
    config = configuration.Config(
        name=name,
        out=str(out),
        seed=7,
        model=ModelConfig(
            vocab_size=320,
            block_size=LENGTH,
            n_layer=2,
            n_head=2,
            n_embd=32,
            cond_dim=8,
            dropout=0.1,
        ),
        order=OrderConfig("mixture", 0.25),
        data=configuration.DataConfig(str(data)),
        optim=configuration.OptimConfig(lr=3e-3, warmup_steps=5, ema_decay=0.9),
        train=configuration.TrainConfig(
            steps=steps,
            batch_size=8,
            micro_batch_size=4,
            device="cpu",
            compile=False,
            log_interval=1,
        ),
        eval=configuration.EvalConfig(interval=5, sequences=7),
        checkpoint=configuration.CheckpointConfig(interval=4, keep=2),
    )
    return change(config, **changes)


def change(config, **changes):
    """Return a changed config: change(config, optim__lr=1.0) sets optim.lr."""
    for key, value in changes.items():
        table, _, name = key.rpartition("__")
        owner = getattr(config, table) if table else config
        changed = replace(owner, **{name: value})  # the name is a variable
        config = replace(config, **{table: changed}) if table else changed
    return config


def small_config(name, data, out, **changes):
    """Return a config of configs/ at a small size, for a few steps on a CPU."""
    config = configuration.load_toml(ROOT / "configs" / f"{name}.toml")
    config = change(
        config,
        out=str(out),
        data__folder=str(data),
        model__vocab_size=320,
        model__block_size=64,
        model__n_layer=2,
        model__n_head=4,
        model__n_embd=32,
        optim__warmup_steps=1,
        train__steps=9,
        train__batch_size=8,
        train__micro_batch_size=8,
        train__device="cpu",
        train__compile=False,
        train__log_interval=100,
        eval__interval=100,
        checkpoint__interval=100,
    )
    return change(config, **changes)


def encoder_config(config, noise=False):
    """Return the config of the same run of a model with full attention, trained on
    random masks. noise: of SEDD."""
    model = replace(
        config.model, attention="full", target="none", mask_token=257, noise=noise
    )
    objective = ObjectiveConfig("score_entropy" if noise else "lambda_dce")
    order = OrderConfig("random")
    return replace(config, model=model, objective=objective, order=order)


def of_system(config, system):
    """Return the config of the same run of an AO-GPT, an "encoder", a "plain GPT" or of
    "two streams"."""
    if system == "encoder":
        return encoder_config(config)
    if system == "plain GPT":
        return change(config, order=OrderConfig("l2r"), model__target="none")
    if system == "two streams":
        objective = ObjectiveConfig("groupwise", group=2)
        return change(config, model__target="two_stream", objective=objective)
    return config


def write_config(config):
    """Write the config file of a run beside its folder; returns its path."""
    path = Path(config.out) / f"{config.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configuration.to_toml(config))
    return path


def run_script(*arguments, check=True, timeout=600, **environment):
    """Run a script of the project as a user would; the finished process. check: it
    succeeds."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    output = f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not (check and done.returncode), output
    return done


def run_main(module, monkeypatch, capsys, *words):
    """Run a script's main in this process; what it prints."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, words)])
    module.main()
    return capsys.readouterr().out


def torchrun(processes, *arguments, **keywords):
    """Run a script under torchrun, in this number of processes on this machine."""
    return run_script(
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *arguments,
        **keywords,
    )


def assert_user_error(done, *words):
    """Check that a script ended as for a user's mistake: status 2, these words, no
    traceback."""
    assert done.returncode == 2, (
        f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    assert "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    assert all(word in message for word in words), f"{words} are not in: {message}"


@contextlib.contextmanager
def chromium():
    """Yield a browser of playwright; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = "chromium", "chromium-browser", "google-chrome"
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"needs Chromium: none of {names} is on PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_for(condition, process=None):
    """Poll until the condition holds; fails when the process has ended, or after ten
    minutes."""
    end = time.monotonic() + 600
    while not condition():
        ended = process and process.poll() is not None
        assert not ended, f"it ended: {process.returncode}, {process.communicate()}"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def read_lines(path):
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(config, key=None):
    """Return the lines of metrics.jsonl without times; with `key`, {step: value} of
    those with it."""
    lines = read_lines(config.run_folder / "metrics.jsonl")
    if key:
        return {line["step"]: line[key] for line in lines if key in line}
    varying = ("tokens_per_second", "memory_bytes")
    return [{k: v for k, v in line.items() if k not in varying} for line in lines]


def assert_same(a, b, where=""):
    """Check that nested dicts and lists are equal, tensors bit for bit (and of one
    dtype)."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def assert_same_losses(config, reference, tolerance):
    """Check that two runs have the same training and validation losses."""
    for key in ("loss", "val_loss_l2r", "val_loss_random"):
        ours = metrics(config, key)
        expected = metrics(reference, key)
        assert ours.keys() == expected.keys()
        assert len(ours) > 1
        ours = list(ours.values())
        expected = list(expected.values())
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance, err_msg=key)


def flip_byte(path, at, mask=0xFF):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ mask
        file.seek(at)
        file.write(bytes([byte]))


@contextlib.contextmanager
def limited_file_size(size):
    """Inside the block, writing past `size` bytes of a file fails, as on a full
    disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Hostile:
    """An object that creates a file when a reader that trusts it unpickles it."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def read_checkpoint(path):
    """Return the values of a checkpoint, its tensors under "tensors", without those
    that depend on the number of processes."""
    values = store.read_values(path)
    contents = {k: v for k, v in values.items() if k not in ("parts", "sha256")}
    contents["tensors"] = store.read_all(path, values)
    return contents


def newest(config):
    """Return the values of the newest checkpoint of a run."""
    return read_checkpoint(store.find(config.run_folder)[-1])


MODES = [
    "mdm:steps=5",
    "mdm:steps=5,schedule=cosine",
    "even:steps=5",
    "l2r",
    "l2r:group=3",
    "random:group=2",
    "confidence",
    "entropy:group=2",
    "speculative:draft=4",
    "speculative:order=l2r",
]


def column(samples, key):
    return [line[key] for line in samples]


def data_of(document: str) -> dict:
    """Return the data that the script of a page reads, found by an HTML parser."""
    tags = []
    scripts = []
    parser = html.parser.HTMLParser()

    def data(text):
        if tags[-1:] == ["script"] and text.strip():
            scripts.append(text)

    parser.handle_starttag = lambda tag, _: tags.append(tag)
    parser.handle_data = data
    parser.feed(document)
    parser.close()
    assert tags.count("script") == len(scripts) == 2
    assert "img" not in tags
    return json.loads(scripts[0])


class NoHostReads(TorchDispatchMode):
    """Refuse what makes the host wait for a device: to read values, or sizes of
    them."""

    WAITS = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "masked_select",
        "_unique2",
        "equal",
    )

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.__name__.partition(".")[0]
        assert name not in self.WAITS, f"{function} waits for the device"
        # A boolean index is a nonzero in disguise.
        if name in ("index", "index_put", "index_put_"):
            given = [i for i in arguments[1] if i is not None]
            assert all(i.dtype not in (torch.bool, torch.uint8) for i in given), (
                function
            )
        return function(*arguments, **(keywords or {}))
