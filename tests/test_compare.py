"""eval_ppl.py A B."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from helpers import ALONE, LENGTH, prepared, tiny_config, write_jsonl
from scipy import stats
from test_eval_ppl import by_name, direct, evaluate  # noqa: F401  (a fixture)

import eval_ppl
import train
from aogpt.checkpoints import load_model, store
from aogpt.scoring import token_log_probs
from convert import convert

# ruff: noqa: F811  (fixtures are imported by their names)
SENTENCE = "the order of any mask"  # 21 bytes: a block of 16 and a row of 5


@pytest.fixture(scope="module")
def raw(run):
    """Return the folder of the last weights of the run, as a model of its own."""
    convert(str(run), run.parent / "raw", "raw")
    return run.parent / "raw"


@pytest.fixture(scope="module")
def longer(data, run):
    """Return a model of twice the block size."""
    config = tiny_config(
        data, run.parent, "longer", steps=6, model__block_size=2 * LENGTH
    )
    train.train(config, ALONE)
    return config.run_folder


def with_settings(export, **settings):
    """Change the settings of an export."""
    place = export / "config.json"
    values = json.loads(place.read_text()) | settings
    values["sha256"] = store.digest(values)
    place.write_text(json.dumps(values))


def of_text(tmp_path, text):
    """Return the folder of one text, prepared."""
    file = write_jsonl(tmp_path / "a.jsonl", [text])
    return prepared("text", tmp_path / f"text{len(text)}", file, split="test")


@pytest.fixture
def compare(evaluate):
    def call(a, b, options="", **more):
        return evaluate(options, path=a, other=b, **more)

    return call


@pytest.mark.parametrize(
    "several", [False, True], ids=["one document", "several documents"]
)
@pytest.mark.parametrize("kind, draws", [("l2r", 1), ("random", 3)])
def test_the_difference_is_paired(
    compare, run, raw, data, several, kind, draws, tmp_path
):
    """Against numpy, from the losses of each model along the same orders."""
    count = 21
    clusters = np.zeros(21)
    if several:  # 3 blocks each, with end-of-text
        texts = [letter * (3 * LENGTH - 1) for letter in "aeioulx"]
        source = write_jsonl(tmp_path / "letters.jsonl", texts)
        clusters = np.arange(21) // 3
        data = prepared("text", tmp_path / "letters", source, split="val")
    options = f"--max-sequences {count} --num-orders {draws} --seed 3 --orders {kind}"
    report = compare(run, raw, options, datasets=[data])
    one = direct(run, data, kind, draws, seed=3, count=count, weights="ema")
    two = direct(run, data, kind, draws, seed=3, count=count, weights="raw")
    gap = (one - two).mean(axis=2)  # (21, draws)
    mean = gap.mean()
    per_sequence = gap.mean(axis=1)
    errors = [(per_sequence.std(ddof=1) / math.sqrt(count), count - 1)]
    if several:
        sums = np.bincount(clusters, per_sequence - mean)
        errors.append((sums.std(ddof=1) * math.sqrt(7) / count, 6))
    half_widths = [error * stats.t.ppf(0.975, degrees) for error, degrees in errors]
    half = max(half_widths)
    error, degrees = errors[-1]
    [row] = report["differences"]
    assert row["nll"]["difference"] == pytest.approx(mean, abs=1e-7)
    assert row["nll"]["half_width_95"] == pytest.approx(half, rel=1e-3)
    p_value = 2 * stats.t.sf(abs(mean) / error, degrees)
    assert row["p"] == pytest.approx(p_value, rel=1e-2)
    assert row["p_by"] == ("document" if several else "sequence")
    if draws > 1:  # of the same orders: less than that of two estimates
        expected = math.sqrt(gap.var(axis=1, ddof=1).mean() / (count * draws))
        assert row["monte_carlo_error"] == pytest.approx(expected, rel=1e-3)
    assert f" {row['nll']['difference']:.4f} ± " in report["terminal"]
    assert "has trained on" not in report["terminal"]


def test_a_model_does_not_differ_from_itself(compare, run, encoder, tmp_path):
    for path, options in (
        (run, "--orders l2r random confidence --group 2"),
        (encoder, ""),
    ):
        report = compare(path, path, f"{options} --max-sequences 5")
        for row in report["differences"]:
            assert row["nll"]["difference"] == 0, row
            assert row["nll"]["half_width_95"] == 0, row
            assert row["p"] == 1, row
    report = compare(run, run, "--orders l2r", datasets=[of_text(tmp_path, "the")])
    [one] = report["differences"]
    # one sequence, shorter than a block, tells nothing
    assert (one["nll"]["difference"], one["p"], one["tokens"]) == (0, None, 4)


def test_models_of_other_blocks_and_kinds(
    compare, run, longer, encoder, plain, tmp_path
):
    """In blocks of the shorter model; what both have in common; also shorter than a
    block."""
    data = of_text(tmp_path, SENTENCE)
    report = compare(longer, run, "--orders l2r", datasets=[data])
    assert "note: A has trained on" in report["terminal"]
    tokens = torch.tensor([[*SENTENCE.encode(), 256]])
    for result, path in zip(report["results"], (longer, run), strict=True):
        model = load_model(path)
        log_probs = []
        for block in (tokens[:, :LENGTH], tokens[:, LENGTH:]):
            order = torch.arange(block.shape[1])[None]
            log_probs.append(token_log_probs(model, block, order).double())
        expected = -torch.cat(log_probs, dim=1).mean().item()
        assert result["nll"] == pytest.approx(expected, rel=1e-6)
        bits = expected / math.log(2) * 22 / 21  # end-of-text has no bytes
        assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        assert (result["sequences"], result["tokens"]) == (2, 22)
    for a, b, orders in ((longer, encoder, ["random"]), (run, plain, ["l2r"])):
        report = compare(a, b, "--max-sequences 3")
        assert [row["orders"] for row in report["differences"]] == orders
    [row] = compare(plain, encoder, "--max-sequences 3 --orders l2r")["differences"]
    assert row["nll"]["difference"] == pytest.approx(row["nll"]["a"] - row["nll"]["b"])


def test_neither_scores_a_first_token_that_one_cannot(
    compare, run, plain, data, tmp_path
):
    """One is an export without a start token, as GPT-2."""
    convert(str(plain), tmp_path / "export")
    with_settings(tmp_path / "export", scored_from=1)
    report = compare(run, tmp_path / "export", "--max-sequences 5")
    note = "the first token of a block is not scored, except after a prompt"
    assert report["terminal"].count(note) == 1
    for result, path in zip(report["results"], (run, plain), strict=True):
        losses = direct(path, data, "l2r", draws=1, seed=0, count=5)
        expected = losses[:, 0, 1:].mean()
        assert result["nll"] == pytest.approx(expected, rel=1e-6)
        assert result["tokens"] == 5 * (LENGTH - 1)


def test_what_cannot_be_compared_or_scored_is_told(
    mistake, run, raw, plain, encoder, data, tmp_path
):
    other = shutil.copytree(raw, tmp_path / "other")
    with_settings(other, tokenizer="gpt2", tokenizer_sha256="0" * 64)
    for words, message in (
        (
            [run, other, "--datasets", data],
            "has gpt2 tokens, of another vocabulary: compare models",
        ),
        (
            [plain, encoder, "--datasets", data],
            "both score in one pass: give --orders l2r",
        ),
        ([run, raw, "third", "--datasets", data], "third"),
        (
            [run, raw, "--datasets", data, "--bound", "iw"],
            "leave out --ensemble or --bound",
        ),
        ([run, raw], "give RUN first, then --datasets"),
        ([run, "--datasets", "my.txt"], "text --source FILE ... --out data/my"),
        ([run, "--datasets", "a/x", "b/x"], "two texts are called 'x'"),
    ):
        assert message in mistake(eval_ppl, *words)
