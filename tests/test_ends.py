"""Samples that are cut at their end-of-text: the numbers that are written are those of
the tokens that are written."""

import json

import pytest
import torch
from reference import log_probs_of_steps, make_system

import sample
from aogpt.checkpoints.load import Loaded
from aogpt.data.tokenizers import AlphabetTokenizer

TOKENIZER = AlphabetTokenizer("abcd")
END = TOKENIZER.eot
# The infilling has text on the right of a gap, in which texts may end as well.
TEXTS = {
    "no prompt": [],
    "prompt": ["--prompt", "abc"],
    "gaps": ["--prompt", "a[MASK:3]b[MASK:3]c[MASK:3]"],
}


@pytest.fixture
def draw(monkeypatch, script, tmp_path):
    """Sample from a random model of a system with --until-end: the model, and the JSON
    objects of the samples."""

    def call(system, *arguments):
        model = make_system(
            system, seed=1, tokens=TOKENIZER.vocab_size, block_size=12, scale=0.7
        ).float()
        loaded = Loaded(
            model=model,
            path="",
            step=0,
            weights="raw",
            tokenizer=TOKENIZER.name,
            vocab_size=TOKENIZER.vocab_size,
        )
        monkeypatch.setattr(sample, "load", lambda *_: loaded)
        file = tmp_path / "samples.jsonl"
        words = ["--jsonl", file, "--overwrite", "--until-end", "--num-samples", 12]
        status, _, err = script(sample, tmp_path, *words, *arguments)
        assert status == 0, err
        return model, [json.loads(line) for line in file.read_text().splitlines()]

    return call


@pytest.mark.parametrize(
    "system, mode",
    [
        ("AO-GPT", "l2r"),
        ("AO-GPT", "l2r:group=3"),
        ("AO-GPT", "speculative:order=l2r"),
        ("GPT-2", "l2r"),
        ("two_stream", "l2r:group=3"),
        ("mask_query", "speculative:order=l2r"),
        ("target rotary", "l2r"),
    ],
)
def test_log_probs_are_those_of_the_tokens_that_stay(draw, system, mode):
    """Of generated tokens each given those of earlier steps of the written order, or by
    speculation given all before it. 1e-4: six digits a token."""
    cut = 0
    for name, text in TEXTS.items():
        if system == "GPT-2" and name == "gaps":
            continue
        model, lines = draw(system, "--mode", mode, *text)
        for line in lines:
            cut += line["length"] < 12
            assert line["length"] == len(line["tokens"]) == len(line["order"])
            if line["length"]:
                order = torch.tensor(line["order"])
                expected = log_probs_of_steps(
                    model,
                    torch.tensor(line["tokens"]),
                    order,
                    torch.tensor(line["step"])[order],
                    is_drafted="speculative" in mode,
                )
                total = expected.sum().item()
                assert sum(line["log_probs"]) == pytest.approx(total, abs=1e-4)
            if name == "gaps":  # the given text stays
                given = {0: 0, 4: 1, 8: 2}
                for position, token in given.items():
                    assert line["tokens"][position] == token
                    assert line["step"][position] == -1
            last_given = line["step"][::-1].index(-1) if -1 in line["step"] else 0
            assert END not in line["tokens"][line["length"] - last_given :]
    assert cut > 3


@pytest.mark.parametrize("mode", ["random", "mdm", "confidence:block=4", "speculative"])
def test_other_modes_and_encoders_do_not_end(draw, mode):
    with pytest.raises(AssertionError, match="only samples of a decoder from left"):
        draw("AO-GPT", "--mode", mode)
    with pytest.raises(AssertionError, match="only samples of a decoder from left"):
        draw("RADD", "--mode", "l2r")
