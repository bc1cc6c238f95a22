"""A NaN among the predictions of a model: every number that is reported for the text is
then nan, or there is an error. No estimator takes it for a token that is not scored."""

import dataclasses
import json
import math

import pytest
from helpers import ALONE, encoder_config, tiny_config
from torch import nn

import eval_ppl
import train
from aogpt import checkpoints
from aogpt.objectives import ObjectiveConfig
from aogpt.runtime.errors import UserError
from aogpt.text_model import TextModel

PLACES = 9  # of the predictions of the first pass; blocks have 16


class NaNHead(nn.Module):
    """The head of a model whose prediction `place`, counted over all passes, is NaN."""

    def __init__(self, head, place):
        super().__init__()
        self.head = head
        self.left = place

    def forward(self, x):
        logits = self.head(x)
        rows = logits.flatten(0, -2)
        if 0 <= self.left < len(rows):
            rows[self.left] = math.nan
        self.left -= len(rows)
        return logits


@pytest.fixture(scope="module")
def sedd(run, data):
    config = encoder_config(tiny_config(data, run.parent, "sedd", steps=6))
    noisy = dataclasses.replace(config.model, noise=True)
    objective = ObjectiveConfig("score_entropy")
    config = dataclasses.replace(config, model=noisy, objective=objective)
    train.train(config, ALONE)
    return config.run_folder


def loaded_with(run, place):
    loaded = checkpoints.load(run)
    if place is not None:
        loaded.model.head = NaNHead(loaded.model.head, place)
    return loaded


ESTIMATORS = {
    "l2r": ("run", "--orders l2r"),
    "random orders": ("run", "--orders random --num-orders 2"),
    "groups": ("run", "--orders random --num-orders 2 --group 4"),
    "ensembles": ("run", "--orders random --num-orders 2 --ensemble 1 2"),
    "weighted bound": ("run", "--orders random --num-orders 3 --bound iw"),
    "decoding rule": ("run", "--orders confidence"),
    "paced decoding rule": ("run", "--orders confidence:threshold=0.1"),
    "plain GPT": ("plain", "--orders l2r"),
    "encoder, ELBO": ("encoder", "--orders random --num-orders 2"),
    "encoder, l2r": ("encoder", "--orders l2r"),
    "score entropy": ("sedd", "--orders score_entropy --num-orders 2"),
    "SEDD as probabilities": ("sedd", "--orders random --num-orders 2"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_nan_is_the_loss_or_an_error(
    name, request, script, data, tmp_path, monkeypatch
):
    fixture, words = ESTIMATORS[name]
    run = request.getfixturevalue(fixture)
    words = [*words.split(), "--max-sequences", 3, "--overwrite", "--batch-size", 2]

    def results(place):
        monkeypatch.setattr(eval_ppl, "load", lambda *_: loaded_with(run, place))
        path = tmp_path / "out.json"
        status, out, err = script(
            eval_ppl, run, "--datasets", data, "--json", path, *words
        )
        if status:
            assert "not finite" in err
            return None, out
        rows = json.loads(path.read_text())["results"]
        return [(row["nll"], row["bits_per_byte"], row["gain"]) for row in rows], out

    clean, _ = results(None)
    errors = 0
    for place in range(PLACES):
        reported, out = results(place)
        if reported is None:
            errors += 1
            continue
        for numbers, before in zip(reported, clean, strict=True):
            if numbers == before:  # a prediction that is not scored
                continue
            errors += 1
            # JSON has no NaN.
            assert numbers[:2] == (None, None)
            assert " nan |" in out
            assert "nan to nan" in out
    assert errors > PLACES // 3


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_no_score_rank_or_blank(run, place):
    def text_model():
        return TextModel(loaded_with(run, place))

    with pytest.raises(UserError, match="not finite"):
        text_model().score(["the cat"])
    with pytest.raises(UserError, match="not finite"):
        text_model().rank(["[a|the] cat"])
    with pytest.raises(UserError, match="not finite"):
        text_model().blanks(["[MASK:3]"])
    for mode in ("l2r", "confidence", "speculative"):
        with pytest.raises(UserError, match="not finite"):
            text_model().fill(["[MASK:3] cat"], mode=mode)
