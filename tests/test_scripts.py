"""Mistakes that all scripts catch, and the help of each."""

import pytest
import torch
from helpers import Hostile

import eval_ppl
import sample
import train


def test_a_run_that_is_not_there_or_has_no_checkpoint_is_an_error_for_both_scripts(
    script, tmp_path, data
):
    for module, options in ((sample, []), (eval_ppl, ["--datasets", data])):
        status, _, err = script(module, tmp_path / "nowhere", *options)
        assert status == 2 and "give a run folder (out/NAME) or a checkpoint" in err
        status, _, err = script(module, tmp_path, *options)
        assert status == 2 and "holds no checkpoints/step_N" in err
        status, _, err = script(module, *options)
        assert status == 2 and "RUN" in err


def test_a_pickle_that_would_run_code_or_is_foreign_is_refused_and_runs_nothing(
    script, tmp_path
):
    torch.save(Hostile(tmp_path / "touched"), tmp_path / "hostile.pt")
    status, out, err = script(sample, tmp_path / "hostile.pt")
    assert (
        status == 2 and "hostile.pt cannot be read as a checkpoint" in err and not out
    )
    assert not (tmp_path / "touched").exists()
    torch.save({"net": 1, "iteration": 2}, tmp_path / "foreign.pt")
    status, _, err = script(sample, tmp_path / "foreign.pt")
    assert (
        status == 2
        and "foreign.pt cannot be used: net is int" in err
        and "supported" in err
    )


HELP = [
    (train, ["optim.lr"]),
    (sample, ["top-p", "jsonl"]),
    (eval_ppl, ["num-orders", "json"]),
]


@pytest.mark.parametrize("module, fields", HELP, ids=["train", "sample", "eval_ppl"])
def test_help_exits_0_and_shows_an_example_and_every_option(script, module, fields):
    status, out, _ = script(module, "--help")
    assert status == 0 and f"python {module.__name__}.py" in out
    assert all(f"--{name}" in out for name in fields)
