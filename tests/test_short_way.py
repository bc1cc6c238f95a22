"""The way of a training step, a sample and a score through the code is short: how many
functions of the project run, and in how many files. `pytest -rP
tests/test_short_way.py` lists them."""

import functools
import sys

import pytest
import torch
from helpers import ALONE, ROOT, prepared, small_config

import eval_ppl
import sample
import train

# What one reads to understand a training step.
MOST_OF_STEP = (40, 9)
# After the model is loaded, up to the end of the command: words of sample.py MODEL, and
# how many functions in how many files they may run.
MOST_OF_SAMPLES = {
    "--mode mdm:steps=4 --length 16 --num-samples 2": (104, 14),
    "": (110, 14),
    "--mode confidence --length 16": (109, 15),
    "--mode l2r --temperature 0.7 --top-p 0.9 --prompt Once --length 16": (109, 14),
}
MOST_OF_SCORE = (101, 14)


class Functions:
    """The functions of the project that this thread calls between `start` and `stop`.

    places: (file, name) of each. Comprehensions and generator expressions belong to the
    function that they stand in; tests do not count."""

    def __init__(self):
        self.places = set()

    def start(self):
        sys.setprofile(self.record)

    def stop(self):
        sys.setprofile(None)

    def record(self, frame, event, argument):
        code = frame.f_code
        is_part = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
        file = code.co_filename.removeprefix(f"{ROOT}/")
        is_ours = not file.startswith(("/", ".", "<", "tests/"))
        if event == "call" and is_ours and not is_part:
            self.places.add((file, code.co_qualname))


def check(functions, most, file, name):
    """Check that these functions are few, and that this one is among them."""
    files = {place[0] for place in functions.places}
    print(len(functions.places), "functions in", len(files), "files")
    print("\n".join("  ".join(place) for place in sorted(functions.places)))
    assert (file, name) in functions.places
    assert len(functions.places) <= most[0]
    assert len(files) <= most[1]


def functions_of_step(config, monkeypatch):
    """The functions that run between the fourth optimizer step and the fifth."""
    functions = Functions()
    steps = []
    plain = torch.optim.AdamW.step

    def step(optimizer, *arguments, **keywords):
        if len(steps) == 4:
            functions.stop()
        steps.append(optimizer)
        plain(optimizer, *arguments, **keywords)
        if len(steps) == 4:
            functions.start()

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train.train(config, ALONE)
    assert len(steps) == config.train.steps
    return functions


@pytest.mark.parametrize("name", ["quickstart", "aogpt_small"])
def test_a_training_step_runs_through_few_functions(name, data, tmp_path, monkeypatch):
    """A step without a validation, a checkpoint or a row of metrics. The thread that
    prepares the batches ahead of it is not counted."""
    functions = functions_of_step(small_config(name, data, tmp_path), monkeypatch)
    check(functions, MOST_OF_STEP, "aogpt/model.py", "MLP.forward")


def clear_caches():
    """Forget what functions of the package have computed, as in a new process."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "aogpt":
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def functions_of_command(script, words, monkeypatch):
    """The functions that run in a command of a new process after it has loaded its
    model."""
    functions = Functions()
    load = script.load

    def then_record(*arguments):
        loaded = load(*arguments)
        functions.start()
        return loaded

    clear_caches()
    monkeypatch.setattr(script, "load", then_record)
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    try:
        script.main()
    finally:
        functions.stop()
    return functions


MODEL = ROOT / "results" / "books_model"


@pytest.mark.parametrize("words", MOST_OF_SAMPLES)
def test_a_sample_runs_through_few_functions(words, monkeypatch):
    functions = functions_of_command(sample, [MODEL, *words.split()], monkeypatch)
    most = MOST_OF_SAMPLES[words]
    check(functions, most, "aogpt/sampling/batch.py", "Batch.take_step")


def test_a_score_runs_through_few_functions(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("The old horse was tired, so they gave him water. " * 200)
    data = prepared(
        "text", tmp_path / "data", text, tokenizer="english", val_fraction=0.5
    )
    words = [MODEL, "--datasets", data, "--max-sequences", 2]
    functions = functions_of_command(eval_ppl, words, monkeypatch)
    check(functions, MOST_OF_SCORE, "aogpt/model.py", "AOGPT.forward")
