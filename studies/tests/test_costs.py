"""Memory and time of run configs beside each other."""

import dataclasses

import pytest
import torch

from aogpt.model import ModelConfig
from aogpt.objectives import ObjectiveConfig
from aogpt.training.config import Config, TrainConfig
from studies import pages
from studies.costs import costs_in_turn
from studies.experiment import load_experiment

DECODER = ModelConfig(
    vocab_size=32,
    block_size=16,
    n_layer=2,
    n_head=2,
    n_embd=32,
    position="rotary",
    target="mask_query",
)
ENCODER = dataclasses.replace(
    DECODER, position="learned", attention="full", target="none", mask_token=31
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_memory_and_decoding_are_measured_in_turn(threads):
    """Weights, their average, gradients and two moments are five times the parameters;
    only the rest grows with the batch."""
    train = TrainConfig(batch_size=4)
    configs = {
        "mask_query": Config(model=DECODER, train=train),
        "larger": Config(model=DECODER, train=TrainConfig(batch_size=8)),
        "encoder": Config(
            model=ENCODER, train=train, objective=ObjectiveConfig("lambda_dce")
        ),
    }
    costs = costs_in_turn(configs, repetitions=3)
    parameters = 2 * 12 * 32 * 32 + 32 * 32
    for own in costs.values():
        assert own["training_bytes"] > 5 * 4 * parameters
        assert own["decoding_bytes"] > 0
        assert own["steps"] == (4, 16)
        assert [len(seconds) for seconds in own["seconds"]] == [3, 3]
    grown = costs["larger"]["training_bytes"] - costs["mask_query"]["training_bytes"]
    assert 0 < grown < costs["mask_query"]["training_bytes"]


def test_a_page_shows_memory_and_times_beside_the_first():
    first = {
        "training_bytes": 1_000_000,
        "decoding_bytes": 1_000_000,
        "samples": 8,
        "steps": [4, 16],
        "seconds": [[2.0, 2.0], [4.0, 4.0]],
    }
    encoder = {**first, "training_bytes": 1_300_000}
    encoder["seconds"] = [[3.0, 2.0], [4.0, 6.0]]
    costs = {"fast": {"rotary": first, "encoder": encoder}}
    lines = pages.decoding_tables(load_experiment("E22"), costs)
    cells = [cell.strip() for cell in lines[3].split("|")]
    assert cells[1] == "`--model.target none --model.attention full`"
    assert cells[2] == "1.3"
    assert cells[4:6] == ["1.25 (1.00 to 1.50)", "1.25 (1.00 to 1.50)"]
    assert "time of 8 samples in 16 steps" in lines[0]
