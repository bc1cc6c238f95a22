"""aogpt/training/metrics.py: rows of metrics.jsonl, progress, and curves by step of the
order."""

import json
import re

import helpers
import numpy as np
import pytest
import torch
from helpers import (
    ALONE,
    LENGTH,
    change,
    encoder_config,
    read_lines,
    tiny_config,
    val_blocks,
)

import train
from aogpt.checkpoints import load_model
from aogpt.data.loader import TokenDataset
from aogpt.evaluation.likelihood import token_nll
from aogpt.objectives import evaluation_masks
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime.randomness import SCORED_ORDERS
from aogpt.scoring import masked_log_probs, token_log_probs
from aogpt.training import metrics, val_losses
from aogpt.training.checkpoint import Progress
from aogpt.training.config import ObjectiveConfig, StageConfig
from aogpt.training.val_losses import read_metrics

RANDOM = OrderConfig("random")
COSTS = ("grad_norm", "tokens", "tokens_per_second", "skipped_steps")


def lines_of(folder):
    return read_lines(folder / "metrics.jsonl")


def any_order(model, data, config):
    """Validation loss in random orders."""
    val_data = TokenDataset(data, "val", LENGTH)
    return val_losses.validation_loss(
        model, val_data, OrderConfig("random"), config, ALONE
    )


@pytest.mark.parametrize(
    "order, target, names, best",
    [
        (OrderConfig("l2r"), "none", ["l2r"], "l2r"),
        (OrderConfig("mixture", 1.0), "none", ["l2r"], "l2r"),
        (OrderConfig("mixture"), "input", ["l2r", "random"], "random"),
        (OrderConfig("r2l"), "adaln", ["l2r", "random", "fixed"], "fixed"),
        (OrderConfig("slots", block=4), "adaln", ["l2r", "random", "own"], "own"),
    ],
)
def test_a_run_is_judged_by_its_own_orders(data, order, target, names, best):
    config = tiny_config(data, "", order=order, model__target=target)
    orders, own = val_losses.validation_orders(config)
    assert list(orders) == names
    assert val_losses.best_by(config) == own == best


def test_a_run_that_predicts_groups_is_judged_by_them(data, tmp_path):
    """And by the last stage of its schedule, from the first step on."""
    stages = StageConfig(0, "l2r", group=1), StageConfig(3, "random", group=4)
    config = tiny_config(
        data, tmp_path, steps=6, eval__interval=3, eval__draws=2, schedule=stages
    )
    config = change(
        config, model__target="two_stream", objective=ObjectiveConfig("groupwise")
    )
    assert val_losses.best_by(config) == "own"
    train.train(config, ALONE)
    line = lines_of(config.run_folder)[-1]
    model = load_model(config.run_folder)
    tokens = val_blocks(data, 7)
    for kind, group in (("own", 4), ("random", 1)):
        draws = [
            token_nll(
                model,
                tokens,
                OrderConfig("random"),
                seed=7,
                draw=draw,
                rows=range(7),
                total=7,
                group=group,
            ).means()
            for draw in range(2)
        ]
        mean = float(torch.stack(draws).mean())
        assert line[f"val_loss_{kind}"] == pytest.approx(mean, abs=1e-5)
    assert line["val_loss_own"] != line["val_loss_random"]


def test_what_is_no_row_is_left_out_and_later_rows_are_dropped(data, tmp_path):
    """As a kill or a full disk may leave them; old rows say "unknown" where mfu is."""
    config = tiny_config(data, tmp_path)
    path = config.run_folder / "metrics.jsonl"
    rows = [{"step": 1, "mfu": "unknown"}, {"step": 3}]
    lines = [
        json.dumps(rows[0]),
        "",
        "[1]",
        '{"loss": 1}',
        '{"step": "2"}',
        json.dumps(rows[1]),
    ]
    path.parent.mkdir()
    path.write_bytes("\n".join([*lines, '{"step": 4, "lo']).encode() + b"\xff")
    assert read_metrics(path) == rows
    metrics.Log(
        config, ALONE, Progress(step=2), TokenDataset(data, "train", LENGTH)
    ).close()
    assert path.read_text() == json.dumps(rows[0]) + "\n"
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_full_disk_loses_rows_and_not_the_run(data, tmp_path, monkeypatch, capsys):
    config = tiny_config(data, tmp_path, steps=6, eval__interval=0)
    plain = metrics.to_json

    def on_a_full_disk(row):
        if row["step"] in (3, 4):
            raise OSError(28, "No space left on device")
        return plain(row)

    monkeypatch.setattr(metrics, "to_json", on_a_full_disk)
    train.train(config, ALONE)
    assert [line["step"] for line in lines_of(config.run_folder)] == [1, 2, 5, 6]
    said = capsys.readouterr().err
    assert said.count("is lost: [Errno 28] No space left on device") == 2


def test_progress_is_told_in_plain_lines(data, tmp_path, capsys):
    config = tiny_config(
        data, tmp_path, steps=25, train__log_interval=10, eval__interval=20
    )
    train.train(config, ALONE)
    out, err = capsys.readouterr()
    line = r"step 10/25  loss \d\.\d{4}  [\d,]+ tokens/s  gradient norm [\d.]+  "
    assert len(re.findall(line + r"lr 0\.00\d+  [\d.]+ min left\n", out)) == 1
    blocks = TokenDataset(data, "val", LENGTH).num_blocks
    said = (
        f"step 20/25  validation loss of the averaged weights on 7 of {blocks} blocks, "
    )
    losses = r"left to right \d\.\d{4}, any order \d\.\d{4}\n"
    assert re.search(said + "nats per token: " + losses, out)
    assert not err
    each_step = change(config, name="every", train__log_interval=1)
    train.train(each_step, ALONE)
    losses = helpers.metrics(each_step, "loss")
    means = {1: losses[1]}
    for first, last in ((2, 10), (11, 20), (21, 25)):
        means[last] = np.mean([losses[step] for step in range(first, last + 1)])
    assert helpers.metrics(config, "loss") == pytest.approx(means)


@pytest.mark.parametrize("system", ["decoder", "encoder"])
def test_more_draws_give_the_mean_over_orders_or_masks_and_its_error(
    system, run, encoder, data
):
    """The error is that of what a draw gives, over draws; one draw has none. 1e-5:
    float32."""
    config = tiny_config(data, "")
    config = encoder_config(config) if system == "encoder" else config
    model = load_model(encoder if system == "encoder" else run, "ema")
    tokens = val_blocks(data, 7)
    means = []
    for draw in range(3):
        if system == "encoder":
            masks = evaluation_masks(
                seed=7, step=draw, rows=range(7), total=7, length=LENGTH
            )
            nll = -masked_log_probs(model, tokens, masks.masked) * masks.weight[:, None]
        else:
            order = orders_at(RANDOM, 7, draw, range(7), LENGTH, SCORED_ORDERS)
            nll = -token_log_probs(model, tokens, order)
        means.append(float(nll.double().mean()))
    loss, error = any_order(model, data, change(config, eval__draws=3))
    assert loss == pytest.approx(np.mean(means), rel=1e-5)
    assert error == pytest.approx(np.std(means, ddof=1) / 3**0.5, rel=1e-3)
    assert error > 1e-4
    single = any_order(model, data, config)
    assert single.mean == pytest.approx(means[0], rel=1e-5)
    assert single.error is None


def test_an_evaluation_line_has_the_error_of_random_orders(data, tmp_path):
    """Left to right is one order, whatever is drawn."""
    config = tiny_config(data, tmp_path, steps=20, eval__draws=3)
    train.train(config, ALONE)
    evaluations = [
        line for line in lines_of(config.run_folder) if "val_loss_l2r" in line
    ]
    training = {
        line["step"]: line for line in lines_of(config.run_folder) if "loss" in line
    }
    for line in evaluations:
        for key in COSTS:
            assert line[key] == training[line["step"]][key]
        assert line["val_error_random"] > 0
        assert "val_error_l2r" not in line
        for kind in ("l2r", "random"):
            assert line[f"val_loss_{kind}"] != line[f"val_loss_{kind}_raw"]
