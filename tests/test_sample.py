"""sample.py: every mode, prompts and infilling; the same samples for any batches and
processes; bad arguments."""
# ruff: noqa: F811  (fixtures are imported by their names)

import dataclasses
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    LENGTH,
    MODES,
    ROOT,
    column,
    data_of,
    read_lines,
    torchrun,
    wait_for,
    write_rows,
)

import sample
from aogpt import checkpoints as checkpoint
from aogpt.checkpoints import store
from aogpt.data.tokenizers import get_tokenizer
from aogpt.orders import ORDER_KINDS, orders_at, parse_order
from aogpt.runtime.command_line import visible
from aogpt.runtime.randomness import PLANS, philox_bits
from aogpt.sampling import engine, modes

ROWS = [
    {"prompt": "the "},
    {"prompt": "[MASK:2]the[MASK:1] é[MASK:3]"},
    {"prompt": "", "length": 7},
]
# of these, as `check_given` wants them
PARTS = [["the ", 12], [2, "the", 1, " é", 3], [7]]


@pytest.fixture
def draw(script, run, tmp_path):
    """Sample from the run: the JSON objects of the samples."""

    def call(*arguments, path=run):
        file = tmp_path / "samples.jsonl"
        status, _, err = script(
            sample, path, "--overwrite", "--jsonl", file, *arguments
        )
        assert status == 0, err
        return read_lines(file)

    return call


@pytest.fixture
def prompts(tmp_path):
    """Write a file of prompts: rows of a .jsonl file, or the text of a .txt file."""

    def write(content):
        if not isinstance(content, str):
            return write_rows(tmp_path / "prompts.jsonl", content)
        path = tmp_path / "prompts.txt"
        path.write_text(content)
        return path

    return write


def check_given(line, *expected):
    """A sample of these: text that is given, and numbers of tokens that are not."""
    given = []
    for part in expected:
        given += part.encode() if isinstance(part, str) else [None] * part
    assert line["length"] == len(given)
    rows = zip(line["tokens"], line["step"], line["log_probs"], given, strict=True)
    for token, step, log_prob, wanted in rows:
        if wanted is None:
            assert 0 <= token < 257
            assert step >= 0
            assert log_prob < 0
        else:
            assert (token, step, log_prob) == (wanted, -1, 0)


def test_every_sample_is_printed_and_written_with_all_that_made_it(
    script, run, tmp_path
):
    path = tmp_path / "samples.jsonl"
    words = "--num-samples 3 --mode mdm:steps=5 --seed 4".split()
    status, out, err = script(sample, run, *words, "--jsonl", path)
    assert status == 0
    lines = read_lines(path)
    assert len(lines) == 3
    assert not out
    _, out, _ = script(sample, run, *words)
    assert out.count("=== sample") == 3
    expected = {"num_samples": 3, "seed": 4, "mode": "mdm:steps=5", "top_p": 1.0}
    for line in lines:
        assert visible(line["text"]) in out
        assert line["text"] == get_tokenizer("bytes").decode(line["tokens"])
        check_given(line, LENGTH)
        assert all(step < 5 for step in line["step"])
        assert (line["prompt_index"], line["prompt"]) == (0, "")
        assert 1 <= line["model_calls"] <= 5
        assert line["token_forwards"] >= 3 * LENGTH
        settings = line["settings"]
        assert line["seconds"] > 0
        assert settings["dtype"] == "float32"
        assert expected.items() <= settings.items()
        assert f"{store.find(run)[-1]} (step 40, ema weights)" in settings["checkpoint"]
        assert settings["versions"]["torch"] == torch.__version__
    assert "3 samples of 16 tokens" in err
    assert "model calls" in err


@pytest.mark.parametrize("kind", ORDER_KINDS)
def test_every_kind_of_order_is_one_to_sample_by(draw, kind, tmp_path):
    """A token a step, in the orders drawn; what is given comes first."""
    rows = np.tile(np.arange(LENGTH), (3, 1))
    np.save(tmp_path / "orders.npy", np.random.default_rng(0).permuted(rows, axis=1))
    settings = {"block": "3", "file": f"{tmp_path}/orders.npy"}
    text = kind
    for key in ORDER_KINDS[kind].settings:
        if key in settings:
            text += ":" if text == kind else ","
            text += f"{key}={settings[key]}"
    numbers = philox_bits(5, 0, range(3), LENGTH, PLANS) >> np.uint64(11)
    orders = []
    for row in numbers:  # the first number of a sample is the seed of its order
        order = parse_order(text, "--mode")
        (drawn,) = orders_at(order, int(row[0]), 0, range(1), LENGTH).tolist()
        if kind == "random":
            drawn = row.argsort().tolist()
        orders.append(drawn)
    words = ["--mode", text, "--seed", 5, "--num-samples", 3]
    assert column(draw(*words), "order") == orders
    filled = draw(*words, "--prompt", "[MASK:2]the[MASK:11]")
    for line, order in zip(filled, orders, strict=True):
        rest = [position for position in order if position not in (2, 3, 4)]
        assert line["order"] == [2, 3, 4, *rest]


# One of each way to plan: by a random time, a schedule, an order, a score or drafts.
OF_EACH_KIND = [
    "mdm:schedule=cosine",
    "even:steps=5",
    "l2r:group=5",
    "slots:block=3,group=2",
    "entropy:entropy_bound=9,block=5",
    "speculative",
]


@pytest.mark.parametrize("mode", OF_EACH_KIND)
def test_a_sample_follows_from_the_seed_its_prompt_and_its_number(draw, prompts, mode):
    """Whatever the number of samples, other prompts and batches."""

    def samples(rows, count, size, seed=3):
        words = ["--mode", mode, "--prompts", prompts(rows)]
        words += ["--num-samples", count, "--batch-size", size, "--seed", seed]
        drawn = {}
        for i, line in enumerate(draw(*words)):
            drawn[line["prompt_index"], i % count] = (line["tokens"], line["step"])
        return drawn

    rows = [{"prompt": "the ", "length": 9}, *ROWS[1:]]
    whole = samples([*rows, {"prompt": "m"}], 5, 16)
    assert len({str(value) for value in whole.values()}) == len(whole) == 20
    for count, size, some in ((1, 1, rows), (2, 16, rows[:2]), (5, 3, rows)):
        part = samples(some, count, size)
        assert part == {key: whole[key] for key in part}
        assert len(part) == count * len(some)
    assert samples(rows, 1, 16, seed=4)[0, 0] != whole[0, 0]


@pytest.mark.slow(reason="starts two processes")
def test_two_processes_share_a_file_of_prompts_and_one_writes_the_page(
    draw, run, prompts, tmp_path
):
    arguments = ["--mode", "confidence", "--num-samples", 3]
    arguments += ["--prompts", prompts(ROWS)]
    files = ["--jsonl", tmp_path / "two.jsonl", "--html", tmp_path / "two.html"]
    done = torchrun(2, "sample.py", run, *arguments, *files)
    two = read_lines(tmp_path / "two.jsonl")
    one = draw(*arguments)
    for key in ("tokens", "step", "text", "prompt_index"):
        assert column(two, key) == column(one, key)
    # other batches round differently, and the file holds six digits
    for ours, theirs in zip(two, one, strict=True):
        np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], atol=1e-5)
    assert not done.stdout
    shown = data_of((tmp_path / "two.html").read_text())["samples"]
    texts = ["".join(one["pieces"]) for one in shown]
    assert texts == column(two, "text")


def test_speculation_takes_fewer_calls_and_its_greedy_text_is_that_of_single_steps(
    draw,
):
    common = ["--num-samples", 1, "--temperature", 0, "--prompt", "the mo"]
    (plain_l2r,) = draw("--mode", "l2r", *common)
    (speculative,) = draw("--mode", "speculative:order=l2r", *common)
    assert speculative["tokens"] == plain_l2r["tokens"]
    assert speculative["settings"]["mode"] == "speculative:order=l2r"
    (plain_slots,) = draw("--mode", "slots:block=4", *common)
    (slots,) = draw("--mode", "speculative:order=slots,block=4", *common)
    assert slots["tokens"] == plain_slots["tokens"]
    assert slots["model_calls"] < plain_slots["model_calls"]


def test_weights_and_compile_are_those_asked_for(draw, run, monkeypatch):
    exact = column(draw("--mode", "l2r"), "tokens")
    compiled = []
    # averaged else
    assert column(draw("--mode", "l2r", "--weights", "raw"), "tokens") != exact
    assert column(draw("--mode", "l2r", path=store.find(run)[-1]), "tokens") == exact

    def new_engine(*arguments, compile, **settings):
        compiled.append(compile)
        return engine.Engine(*arguments, **settings)

    monkeypatch.setattr(modes, "Engine", new_engine)
    draw()
    draw("--compile")
    assert compiled == [False, True]


PROMPTS = {
    "[MASK:2]é[MASK:03] 🎉[MASK:1]": [2, "é", 3, " 🎉", 1],
    "é🎉": ["é🎉", 10],
    "<|endoftext|>": ["<|endoftext|>", 3],
    "[MASK:2][MASK:3]\n": [5, "\n"],
    "[MASKED][MASK:1][mask]": ["[MASKED]", 1, "[mask]"],
}


@pytest.mark.parametrize(
    "mode, prompt",
    [
        *itertools.product(["mdm"], list(PROMPTS)[1:]),
        *itertools.product(MODES, list(PROMPTS)[:1]),
    ],
)
def test_given_text_is_kept_and_every_mask_filled_with_so_many_tokens(
    draw, mode, prompt
):
    for line in draw("--mode", mode, "--prompt", prompt, "--num-samples", 2):
        check_given(line, *PROMPTS[prompt])
        assert line["prompt"] == prompt


def test_a_file_of_prompts_gives_every_prompt_its_samples_in_its_order(draw, prompts):
    alone = draw("--prompt", "any")
    same = draw("--prompts", prompts("\ufeffany\n"))
    assert column(same, "tokens") == column(alone, "tokens")
    path = prompts("the\r\n\n  \nany \n\u2028é\x0c\n")
    words = "--num-samples 2 --batch-size 4 --length 12".split()
    samples = draw("--prompts", path, *words)
    texts = ["the", "any ", "\u2028é\x0c"]
    assert column(samples, "prompt_index") == [0, 0, 1, 1, 2, 2]
    for line in samples:
        prompt = texts[line["prompt_index"]]
        assert line["prompt"] == prompt
        assert line["settings"]["prompts"] == str(path)
        check_given(line, prompt, 12 - len(prompt.encode()))


def test_an_encoder_takes_every_mode_but_speculation(
    script, draw, mistake, encoder, prompts
):
    """Rows of a .jsonl file have their own kinds and lengths."""
    rows = ["--prompts", prompts(ROWS)]
    for mode in MODES:
        if "speculative" not in mode:
            samples = draw("--mode", mode, *rows, "--num-samples", 1, path=encoder)
            for line, expected in zip(samples, PARTS, strict=True):
                check_given(line, *expected)
    status, out, err = script(sample, encoder, *rows, "--num-samples", 2)
    assert status == 0
    assert "6 samples of 7 to 16 tokens" in err
    assert "=== sample 3 of prompt 2 ===" in out
    said = mistake(sample, encoder, "--mode", "speculative")
    assert "needs causal attention" in said
    assert "take another mode" in said


def test_a_model_without_target_positions_continues_left_to_right(draw, plain, prompts):
    rows = prompts(
        [{"prompt": ""}, {"prompt": "any"}, {"prompt": "the[MASK:2][MASK:2]"}]
    )
    samples = draw("--mode", "l2r", "--num-samples", 1, "--prompts", rows, path=plain)
    steps = [[*range(16)], [-1] * 3 + [*range(13)], [-1] * 3 + [*range(4)]]
    assert column(samples, "step") == steps


def words(text):
    """Return arguments or parts of a message, with bars between."""
    return text.split(" | ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--prompt | xxxxxxxxxxxxxxxx", "16 tokens | length is 16 | at most 16"),
        ("--length | 17", "length is 17 | at most 16"),
        ("--mode | mmd", "mode mmd: there is no such mode | mdm, even"),
        ("--mode | mdm:steps=0", "mode mdm:steps=0: steps is 0 | at least 1"),
        ("--mode | mdm:steps=few", "'steps=few' is not a setting of mdm"),
        ("--mode | mdm:schedule=sine", "schedule is 'sine' | 'linear', 'cosine'"),
        ("--mode | l2r:steps=4", "'steps=4' is not a setting of l2r; it has group"),
        ("--mode | slots:block=0", "mode slots:block=0: | block is 0"),
        ("--mode | l2r:group=2,group=4", "l2r:group=2,group=4: group is given twice"),
        ("--mode | l2r:group=9999999999", "group is 9999999999 | 2147483648"),
        ("--mode | speculative:order=up", "'up'"),
        ("--mode | confidence:threshold=2", "the threshold is 2: for confidence"),
        ("--mode | file:file=no.npy", "no.npy cannot be read"),
        ("--temperature | -1", "temperature is -1"),
        (
            "--jsonl | no/such/x.jsonl",
            "--jsonl no/such/x.jsonl | in a folder that exists",
        ),
        ("--html | tests", "--html tests cannot be written: name a file"),
        (
            "--html | /tmp/no.file | --jsonl | /tmp/../tmp/no.file",
            "the same file | different",
        ),
        ("--device | banana", "device 'banana'"),
        ("--seed | 9999999999999999999999", "seed"),
        ("--modes | l2r", "--modes | --mode"),
        ("--prompt | a | --prompts | b.txt", "one of --prompt and --prompts"),
        ("--prompts | nowhere.txt", "nowhere.txt: there is no such file"),
        ("--prompts | README.md", "--prompts README.md | .txt | .jsonl"),
        ("--prompt | a [MASK:]", "'[MASK:]' is not a mask | [MASK:n]"),
        ("--prompt | [MASK:1] [MASK:0]", "'[MASK:0]' is not a mask | at least 1"),
        (f"--prompt | [MASK:{'9' * 5000}]", "is not a mask"),
        (f"--prompt | [MASK:{'9' * 9}]", "exceed what the model takes"),
        ("--prompt | xxxxxxxxxxxxxxxx[MASK:1]", "--prompt: text | 16 tokens; shorten"),
        ("--prompt | a[MASK:1] | --length | 8", "--prompt | leave out the length"),
    ],
    ids=lambda text: text[:40],
)
def test_a_bad_argument_of_sample_ends_with_status_2_and_a_message(
    mistake, run, arguments, message
):
    said = mistake(sample, run, *words(arguments))
    assert all(word in said for word in words(message)), said


BAD_FILES = [
    ("txt", b"", "is empty"),
    ("txt", b"ok\n\ncaf\xe9\n", "line 3 | UTF-8"),
    ("txt", b"\n\nxxxxxxxxxxxxxxxx", "line 3 | 16 tokens | length is 16"),
    ("jsonl", b'{"prompt": "a"}\n{"prompt": ', "line 2 | not JSON"),
    ("jsonl", b'\n"text"', "line 2 | must be a table of keys"),
    ("jsonl", b"{}", "line 1 | it lacks prompt"),
    ("jsonl", b'{"prompt": "a", "lenght": 3}', "line 1 | 'lenght'"),
    ("jsonl", b'{"infill": "a[MASK]"}', "line 1 | 'infill' | prompt, length"),
    ("jsonl", b'{"prompt": ["a"]}', "line 1 | prompt | must be a string"),
    ("jsonl", b'{"prompt": "a", "length": true}', "line 1 | must be an integer"),
    ("jsonl", b'{"prompt": "a", "length": 0}', "line 1 | 1 tokens | length is 0"),
    ("jsonl", b'{"prompt": "[MASK:1]", "length": 3}', "line 1 | leave out the length"),
]


@pytest.mark.parametrize("suffix, content, message", BAD_FILES)
def test_a_bad_file_of_prompts_is_an_error_that_names_file_and_line(
    mistake, run, tmp_path, suffix, content, message
):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    said = mistake(sample, run, "--prompts", path)
    assert all(word in said for word in (str(path), *words(message))), said


def test_a_model_without_a_start_token_needs_text_to_begin_with(
    mistake, run, monkeypatch, draw
):
    load = checkpoint.load
    monkeypatch.setattr(
        sample, "load", lambda *a: dataclasses.replace(load(*a), scored_from=1)
    )
    message = "this model has no start token, as its tokenizer"
    assert f"--prompt: {message}" in mistake(sample, run)
    assert f"--prompt: {message}" in mistake(sample, run, "--prompt", "[MASK:1]a")
    check_given(draw("--prompt", "a[MASK:1]")[0], "a", 1)


def test_what_a_user_expects_of_prompts(draw, plain, prompts):
    (line,) = draw("--num-samples", 1, path=plain)
    assert line["settings"]["mode"] == "l2r"
    assert draw("--prompt", "None", "--num-samples", 1)[0]["text"].startswith("None")
    words = ["--num-samples", 1, "--prompts"]
    first, _, last = draw(*words, prompts("ok\nno\nany\n"))
    # Rows that are not used may be too long.
    lines = draw(*words, prompts(f"ok\n{'x' * 40}\nany\n"), "--rows", 1, 3)
    assert column(lines, "prompt_index") == [0, 2]
    assert column(lines, "tokens") == [first["tokens"], last["tokens"]]


def test_until_end_without_a_mode_draws_what_l2r_draws(draw):
    wanted = column(draw("--mode", "l2r", "--until-end"), "tokens")
    assert column(draw("--until-end"), "tokens") == wanted


@pytest.mark.parametrize("prompts", [[], ["--prompts", "prompts.txt"]])
def test_samples_in_parts_are_those_at_once_and_are_written_as_they_come(
    script, run, tmp_path, monkeypatch, prompts
):
    """Each part is on the disk before the next one begins."""
    (tmp_path / "prompts.txt").write_text("the\nof a\nstep\n")
    monkeypatch.chdir(tmp_path)
    words = [run, "--num-samples", 5, "--device", "cpu", *prompts, "--mode", "random"]
    assert script(sample, *words, "--jsonl", "whole.jsonl")[0] == 0
    monkeypatch.setattr(modes, "MOST_AT_ONCE", 2)
    seen = []
    generate = sample.modes.generate_distributed

    def spy(*arguments, **options):
        path = tmp_path / "parts.jsonl"
        seen.append(len(path.read_text().splitlines()) if path.exists() else 0)
        return generate(*arguments, **options)

    monkeypatch.setattr(sample.modes, "generate_distributed", spy)
    status, _, err = script(sample, *words, "--jsonl", "parts.jsonl")
    assert status == 0, err
    whole = read_lines(tmp_path / "whole.jsonl")
    parts = read_lines(tmp_path / "parts.jsonl")
    for key in ("tokens", "prompt_index", "order", "text", "step"):
        assert column(parts, key) == column(whole, key)
    assert seen[:3] == [0, 2, 4]
    assert len(seen) == 3 * max(1, len(prompts) // 2 * 3)
    assert parts[-1]["token_forwards"] == whole[-1]["token_forwards"]


def test_a_huge_number_of_samples_takes_no_more_memory_than_a_part(run, tmp_path):
    """The first rows are there long before the last."""
    path = tmp_path / "many.jsonl"
    words = ["--num-samples", "100000000", "--jsonl", str(path), "--device", "cpu"]
    command = [sys.executable, "sample.py", str(run), *words, "--mode", "mdm:steps=2"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(path.exists, process)
    peak = Path(f"/proc/{process.pid}/status")
    if peak.exists():
        (line,) = [x for x in peak.read_text().splitlines() if x.startswith("VmHWM")]
        assert int(line.split()[1]) < 2 * 2**20  # kB
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert len(read_lines(path)) >= modes.MOST_AT_ONCE
