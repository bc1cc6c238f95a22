"""A NaN among the predictions of a model: every number that is reported for the text is
then nan, or there is an error. No estimator takes it for a token that is not scored."""

import functools
import json
import math

import pytest
from helpers import ALONE, of_system, prepared, tiny_config, write_rows
from torch import nn

import eval_gen
import eval_ppl
import train
from aogpt import checkpoints
from aogpt.data.loader import TokenDataset
from aogpt.evaluation import judges
from aogpt.runtime.errors import UserError
from aogpt.systems import build_model
from aogpt.text_model import TextModel
from aogpt.training import val_losses

PLACES = 6  # of the predictions of the first pass; blocks have 16


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


def loaded_with(run, place):
    loaded = checkpoints.load(run)
    if place is not None:
        loaded.model.head = NaNHead(loaded.model.head, place)
    return loaded


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    rows = [{"prompt": f"{n}+{n}=", "text": str(n + n)} for n in range(3, 60)]
    folder = tmp_path_factory.mktemp("records")
    file = write_rows(folder / "r.jsonl", rows)
    return prepared("records", folder / "data", file, block_size=16)


@pytest.fixture(scope="module")
def of_records(records, tmp_path_factory):
    """Return the run on records of a system, trained when it is first asked for."""
    out = tmp_path_factory.mktemp("runs")

    @functools.cache
    def call(system):
        config = tiny_config(records, out, system.replace(" ", "_"), steps=6)
        config = of_system(config, system)
        train.train(config, ALONE)
        return config.run_folder

    return call


SYSTEMS = ["AO-GPT", "encoder", "plain GPT", "two streams"]
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
OF_RECORDS = {
    "records, l2r": ("AO-GPT", "--orders l2r"),
    "records, random orders": ("AO-GPT", "--orders random --num-orders 2"),
    "records, weighted bound": ("AO-GPT", "--orders random --num-orders 3 --bound iw"),
    "records, decoding rule": ("AO-GPT", "--orders margin"),
    "records, ensembles": ("AO-GPT", "--orders random --ensemble 1 2"),
    "records, encoder": ("encoder", "--orders random --num-orders 2"),
    "records, plain GPT": ("plain GPT", "--orders l2r"),
    "records, two streams": ("two streams", "--orders random --group 2"),
}


@pytest.mark.parametrize("name", ESTIMATORS | OF_RECORDS)
def test_a_nan_is_the_loss_or_an_error(
    name, request, script, data, records, of_records, tmp_path, monkeypatch
):
    if name in OF_RECORDS:
        data = records
        system, words = OF_RECORDS[name]
        run = of_records(system)
    else:
        fixture, words = ESTIMATORS[name]
        run = request.getfixturevalue(fixture)
    words = [*words.split(), "--max-sequences", 3, "--overwrite"]

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
    assert errors > (1 if name in OF_RECORDS else PLACES // 3)


@pytest.mark.parametrize("kind", ["text", "records"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_nan_is_the_validation_loss(system, kind, data, records, tmp_path):
    folder = {"text": data, "records": records}[kind]
    config = tiny_config(folder, tmp_path, steps=6, eval__sequences=2)
    config = of_system(config, system)
    val_data = TokenDataset(folder, "val", config.model.block_size)
    model = build_model(config.model)
    model.eval()
    head = model.head
    for orders, group in val_losses.validation_orders(config)[0].values():

        def loss(place, orders=orders, group=group):
            model.head = head if place is None else NaNHead(head, place)
            return val_losses.validation_loss(
                model, val_data, orders, config, ALONE, group=group
            ).mean

        clean = loss(None)
        seen = [loss(place) for place in range(32)]
        assert all(math.isnan(value) or value == clean for value in seen)
        assert any(math.isnan(value) for value in seen)


@pytest.mark.parametrize("place", [0, 3, 30])
def test_a_nan_of_the_judge_is_an_error(run, plain, place, script, monkeypatch):
    judge_of = judges.Judge.__init__

    def broken(self, *arguments):
        judge_of(self, *arguments)
        self.model.head = NaNHead(self.model.head, place)

    monkeypatch.setattr(judges.Judge, "__init__", broken)
    words = ["--judge", plain, "--num-samples", 2, "--mode", "mdm:steps=4"]
    status, _, err = script(eval_gen, run, *words)
    assert status == 2
    assert "NaN" in err


@pytest.mark.parametrize("other", ["first", "second"])
def test_a_nan_of_one_of_two_models_is_their_difference(
    other, run, plain, data, script, tmp_path, monkeypatch
):
    broken = {"first": str(run), "second": str(plain)}[other]

    def load(path, *_):
        return loaded_with(path, 3 if str(path) == broken else None)

    monkeypatch.setattr(eval_ppl, "load", load)
    file = tmp_path / "out.json"
    words = ["--datasets", data, "--orders", "l2r", "--max-sequences", 3]
    status, out, _ = script(eval_ppl, run, plain, *words, "--json", file)
    assert status == 0
    [row] = json.loads(file.read_text())["differences"]
    numbers = [row["nll"]["difference"], row["nll"]["half_width_95"], row["p"]]
    assert numbers == [None, None, None]
    assert "nan \N{PLUS-MINUS SIGN} nan" in out


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_no_score_rank_or_blank(run, place):
    for estimate in (
        lambda model: model.score(["the cat"]),
        lambda model: model.rank(["[a|the] cat"]),
        lambda model: model.blanks(["[MASK:3]"]),
        lambda model: model.fill(["[MASK:3] cat"], mode="l2r"),
        lambda model: model.fill(["[MASK:3] cat"], mode="confidence"),
        lambda model: model.fill(["[MASK:3] cat"], mode="speculative"),
    ):
        with pytest.raises(UserError, match="not finite"):
            estimate(TextModel(loaded_with(run, place)))


@pytest.mark.parametrize("orders", [1, 2])
def test_a_nan_is_no_probability_of_a_part(run, orders):
    """Three tokens are predicted in each order; of a pair first both, and then one
    given each of two tokens."""

    def score(model):
        model.score(["the cat"], predict=[(1, 4)], orders=orders)

    def pairs(model):
        model.pairs(["the cat"], first=1, second=4, top=2)

    for estimate, count in ((score, 3 * orders), (pairs, 4)):
        for place in range(count):
            with pytest.raises(UserError, match="not finite"):
                estimate(TextModel(loaded_with(run, place)))
