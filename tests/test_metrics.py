"""training/metrics.py and training/plots.py: what an evaluation line holds, curves by step of the
order, and runs drawn against each other."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import (
    ALONE,
    LENGTH,
    change,
    encoder_config,
    limited_file_size,
    newest,
    run_script,
    tiny_config,
)
from matplotlib.figure import Figure

import checkpoints as checkpoint
import train
from data.loader import TokenDataset
from objectives import evaluation_masks, token_nll
from orders import OrderConfig, orders_at
from training import metrics, plots, validation
from training.config import ObjectiveConfig, StageConfig
from training.metrics import drop_later_lines, read_metrics

RANDOM = OrderConfig("random")
COSTS = {"grad_norm", "tokens", "tokens_per_second", "memory_bytes", "skipped_steps"}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def val_data(data, count):
    return TokenDataset(data, "val", LENGTH).blocks(range(count))


def any_order(model, data, config):
    """Validation loss and curve in random orders."""
    val_data = TokenDataset(data, "val", LENGTH)
    return validation.validation_loss(model, val_data, OrderConfig("random"), config, ALONE)


# ---- evaluation lines ----------------------------------------------------------------------------


def test_an_evaluation_line_holds_losses_of_both_weights_curves_and_costs(run):
    lines = lines_of(run)
    evaluations = [line for line in lines if "val_loss_l2r" in line]
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert len(evaluations) == 8
    for line in evaluations:
        kinds = [f"val_{what}_{kind}" for what in ("loss", "curve") for kind in ("l2r", "random")]
        assert line.keys() == {"step", *kinds, "val_loss_l2r_raw", "val_loss_random_raw"} | COSTS
        for key in ("grad_norm", "tokens", "tokens_per_second", "skipped_steps"):
            assert line[key] == steps[line["step"]][key], key
        assert 2**20 < line["memory_bytes"] < 2**40


def test_a_run_that_predicts_groups_is_judged_by_them(data, tmp_path):
    """And by the last stage of its schedule, from the first step on."""
    stages = StageConfig(0, "l2r", group=1), StageConfig(3, "random", group=4)
    config = tiny_config(data, tmp_path, steps=6, eval__interval=3, eval__draws=2, schedule=stages)
    config = change(config, model__target="two_stream", objective=ObjectiveConfig("groupwise"))
    assert validation.best_by(config) == "own"
    train.train(config, ALONE)
    line = lines_of(config.run_folder)[-1]
    model, tokens = checkpoint.load_model(config.run_folder), val_data(data, 7)
    for kind, group in (("own", 4), ("random", 1)):
        draws = [
            token_nll(model, tokens, OrderConfig("random"), 7, draw, range(7), 7, group=group)
            for draw in range(2)
        ]
        assert line[f"val_loss_{kind}"] == pytest.approx(float(torch.stack(draws).mean()), abs=1e-5)
    assert line["val_loss_own"] != line["val_loss_random"]


def test_lines_that_hold_what_no_line_does_are_left_out(tmp_path):
    good = {"step": 1, "loss": None, "mfu": "unknown", "val_curve_l2r": [1.0, None]}
    odd = [
        {"tokens": [1]},
        {"loss": "unknown"},
        {"step": -1},
        {"step": 2**40},
        {"x": {}},
        {"val_curve_l2r": 1},
        {"tokens": 10**30},
    ]
    lines = [good, *({"step": 2} | change for change in odd), good]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [good, good]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, share):
    (tmp_path / "lines").write_text("first\n")
    second = "second" * 100 + "\n"
    with limited_file_size(6 + int(share * len(second))), pytest.raises(OSError, match="too large"):
        metrics.append(tmp_path / "lines", second)
    assert (tmp_path / "lines").read_text() == "first\n"
    metrics.append(tmp_path / "lines", second)
    assert (tmp_path / "lines").read_text() == f"first\n{second}"


@pytest.mark.parametrize("full", [range(3, 6), range(7, 99)], ids=["for a while", "to the end"])
def test_lines_wait_until_the_disk_has_room(data, tmp_path, monkeypatch, capsys, full):
    append, calls = metrics.append, []

    def on_a_full_disk(path, text):
        calls.append(text)
        if len(calls) in full and "val_loss" not in text.splitlines()[-1]:
            raise OSError(28, "No space left on device")
        append(path, text)

    configs = [tiny_config(data, tmp_path, name, steps=10, eval__interval=5) for name in "ab"]
    train.train(configs[0], ALONE)
    monkeypatch.setattr(metrics, "append", on_a_full_disk)
    train.train(configs[1], ALONE)
    seen, expected = (
        [[line["step"], line.get("loss")] for line in lines_of(c.run_folder)] for c in configs[::-1]
    )
    assert seen == expected and len(seen) == 12
    assert "No space left on device; its lines wait" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["l2r", "random"])
def test_a_curve_is_the_mean_over_sequences_of_the_loss_at_every_step(run, data, kind):
    model = checkpoint.load_model(run, "ema")
    order = orders_at(OrderConfig(kind), 7, 0, range(7), LENGTH)
    expected = -model.token_log_probs(val_data(data, 7), order).double().mean(dim=0)
    last = lines_of(run)[-1]
    # batches of 4 and 3 against one of 7: float32 rounding only
    np.testing.assert_allclose(last[f"val_curve_{kind}"], expected, rtol=1e-5)
    assert np.mean(last[f"val_curve_{kind}"]) == pytest.approx(last[f"val_loss_{kind}"], rel=1e-12)


@pytest.mark.parametrize("points", [1, 5, 16])
def test_a_long_curve_is_the_mean_over_equal_parts_of_the_order(run, data, points, monkeypatch):
    config = tiny_config(data, "")
    model = checkpoint.load_model(run, "ema")
    whole = any_order(model, data, config).curve
    monkeypatch.setattr(validation, "CURVE_POINTS", points)
    loss, _, curve = any_order(model, data, config)
    parts = [[whole[i] for i in range(LENGTH) if i * points // LENGTH == j] for j in range(points)]
    np.testing.assert_allclose(curve, [np.mean(part) for part in parts], rtol=1e-12)
    assert np.dot(curve, [len(part) for part in parts]) / LENGTH == pytest.approx(loss, rel=1e-12)


def test_the_curve_of_an_encoder_is_the_mean_over_masked_tokens_by_the_number_of_known_ones(
    encoder, data
):
    config = encoder_config(tiny_config(data, ""))
    model, tokens = checkpoint.load_model(encoder, "ema"), val_data(data, 7)
    masked = evaluation_masks(7, 0, range(7), 7, LENGTH).masked
    log_probs = model.masked_log_probs(tokens, masked)
    expected = [[] for _ in range(LENGTH)]
    for b in range(7):
        expected[LENGTH - int(masked[b].sum())] += (-log_probs[b][masked[b]]).tolist()
    loss, _, curve = any_order(model, data, config)
    assert 0 < sum(value is None for value in curve) <= LENGTH - 2, (
        "7 sequences cannot have 16 numbers of known tokens"
    )
    assert [value is None for value in curve] == [not part for part in expected]
    for value, part in zip(curve, expected, strict=True):
        assert not part or value == pytest.approx(np.mean(part), rel=1e-5)
    # stratified numbers of masked tokens: the mean of the sequences' own means is the ELBO
    known = (LENGTH - masked.sum(dim=1)).tolist()
    per_sequence = [float(-log_probs[b][masked[b]].double().mean()) for b in range(7)]
    assert loss == pytest.approx(np.mean(per_sequence), rel=1e-5) and len(set(known)) > 1


@pytest.mark.parametrize("system", ["decoder", "encoder"])
def test_more_draws_give_the_mean_over_orders_or_masks_and_its_error(system, run, encoder, data):
    """The error is that of what a draw gives, over draws; one draw has none. 1e-5: float32."""
    config = tiny_config(data, "")
    config = encoder_config(config) if system == "encoder" else config
    model = checkpoint.load_model(encoder if system == "encoder" else run, "ema")
    tokens, means = val_data(data, 7), []
    for draw in range(3):
        if system == "encoder":
            masks = evaluation_masks(7, draw, range(7), 7, LENGTH)
            nll = -model.masked_log_probs(tokens, masks.masked) * masks.weight[:, None]
        else:
            nll = -model.token_log_probs(tokens, orders_at(RANDOM, 7, draw, range(7), LENGTH))
        means.append(float(nll.double().mean()))
    loss, error, curve = any_order(model, data, change(config, eval__draws=3))
    assert loss == pytest.approx(np.mean(means), rel=1e-5)
    assert error == pytest.approx(np.std(means, ddof=1) / 3**0.5, rel=1e-3) and error > 1e-4
    if system == "decoder":
        assert np.mean(curve) == pytest.approx(loss, rel=1e-12)
    single = any_order(model, data, config)
    assert single.mean == pytest.approx(means[0], rel=1e-5) and single.error is None


def test_an_evaluation_line_has_the_error_of_random_orders_and_other_averages(data, tmp_path):
    """Of left to right there is one order, whatever is drawn. An average of decay 0 is the last
    weights."""
    config = tiny_config(data, tmp_path, steps=20, eval__draws=3)
    config = change(config, optim__more_ema_decays=(0.0, 0.5))
    train.train(config, ALONE)
    evaluations = [line for line in lines_of(config.run_folder) if "val_loss_l2r" in line]
    best = min(evaluations, key=lambda line: line["val_loss_random"])
    assert newest(config)["best"] == {"step": best["step"], "loss": best["val_loss_random"]}
    for line in evaluations:
        assert line["val_error_random"] > 0 and "val_error_l2r" not in line
        for kind in ("l2r", "random"):
            of = {name: line[f"val_loss_{kind}{name}"] for name in ("", "_raw", "_ema0", "_ema0.5")}
            assert of["_ema0"] == of["_raw"] != of[""]
            assert line["step"] < 20 or len(set(of.values())) == 3  # both averages warm up alike


# ---- drawing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective, of_loss", [("ao_ar", "own orders"), ("score_entropy", "score")]
)
def test_the_curve_of_a_run_says_of_which_bound_every_line_is(
    tmp_path, monkeypatch, objective, of_loss
):
    """SEDD is trained by a bound of its own, and validated by a likelihood."""
    losses = {f"val_loss_{kind}": 3.0 for kind in ("random", "own")}
    folder = write_lines(tmp_path / "run", [{"step": 1, "loss": 4.0}, {"step": 1} | losses])
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or PNG)
    plots.plot_losses(folder, objective)
    of_training, *of_validation = (text.get_text() for text in legend_of(figures[0]))
    assert of_loss in of_training and len(of_validation) == 2
    assert ("likelihood" in of_validation[0]) == (objective == "score_entropy")


def legend_of(figure):
    return figure.axes[0].get_legend().get_texts()


PNG = b"\x89PNG\r\n\x1a\n"


def write_lines(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn(lines, *keys, over="tokens"):
    """What draw_panel draws for the panel of these keys: [(x, y, line style)]."""
    axes = Figure().subplots()
    (panel,) = (panel for panel in plots.PANELS if panel.keys == keys)
    plots.draw_panel(axes, lines, panel, "black", over)
    return [
        (line.get_xdata().tolist(), line.get_ydata().tolist(), line.get_linestyle())
        for line in axes.lines
    ]


def test_losses_stand_over_the_tokens_seen_when_they_were_measured():
    training = [{"step": step, "loss": 1.0, "tokens": 100 * step} for step in (10, 20)]
    lines = [
        *training,
        {"step": 15, "val_loss_l2r": 2.0, "val_loss_l2r_raw": 3.0},
        {"step": 20, "val_loss_l2r": 1.5},
    ]
    keys = ("val_loss_l2r", "val_loss_l2r_raw")
    assert drawn(lines, *keys) == [([1500, 2000], [2.0, 1.5], "-"), ([1500], [3.0], "--")]
    assert drawn(lines, *keys, over="steps") == [([15, 20], [2.0, 1.5], "-"), ([15], [3.0], "--")]
    assert drawn(lines, "val_loss_fixed", "val_loss_fixed_raw") == []


def test_the_curve_drawn_is_that_of_the_last_evaluation_with_a_gap_where_nothing_was_measured():
    lines = [
        {"step": 5, "val_curve_random": [9.0, 9.0]},
        {"step": 9, "val_curve_random": [3.0, None, 2.0, 1.0]},
    ]
    ((x, y, _),) = drawn(lines, "val_curve_random", "val_curve_l2r")
    assert x == [0.125, 0.375, 0.625, 0.875] and y[::2] == [3.0, 2.0] and math.isnan(y[1])


def test_skipped_steps_leave_no_point_in_the_training_loss():
    lines = [
        {"step": step, "loss": None if step == 2 else 4.0, "tokens": step} for step in (1, 2, 3)
    ]
    plain, smooth = drawn(lines, "loss")
    assert plain[:2] == ([1, 3], [4.0, 4.0]) and smooth[1] == pytest.approx([4.0, 4.0])


def test_smoothing_keeps_a_constant_and_the_first_value_and_averages_over_a_fiftieth():
    assert plots.smoothed(np.full(500, 3.0)) == pytest.approx(3.0)
    values = np.arange(500.0)
    smooth = plots.smoothed(values)
    assert smooth[0] == 0.0
    # an average with decay 1 - 1/10 lags nine values behind a line
    assert smooth[-1] == pytest.approx(499 - 9, abs=0.1)
    np.testing.assert_array_equal(plots.smoothed(values[:50]), values[:50])


def test_runs_are_called_by_their_names_or_where_these_are_alike_by_their_paths(tmp_path):
    one, other, same = tmp_path / "one", tmp_path / "cost$2", tmp_path / "more" / "one"
    assert plots.run_labels([one, other]) == ["one", "cost\\$2"]
    assert plots.run_labels([one, other, same]) == [str(one), "cost\\$2", str(same)]


def test_plot_draws_runs_of_now_and_of_before_into_one_png(run, encoder, tmp_path):
    keys = ("step", "loss", "tokens", "val_loss_l2r", "val_loss_random")
    before = [{key: line[key] for key in keys if key in line} for line in lines_of(run)]
    old = write_lines(tmp_path / "old $x_1$ run", before)
    out = tmp_path / "pictures" / "compare.png"
    done = run_script("train.py", "--plot", run, old, encoder, "--plot-out", out)
    assert f"wrote {out}" in done.stdout and out.read_bytes().startswith(PNG)


@pytest.mark.parametrize("count", [1, 12])
def test_one_run_and_many_can_be_drawn(run, tmp_path, count):
    folders = [write_lines(tmp_path / str(i), lines_of(run)[: 10 + 3 * i]) for i in range(count)]
    (tmp_path / "out.png").write_bytes(plots.plot_runs(folders, tmp_path / "out.png", over="steps"))
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_what_cannot_be_drawn_is_an_error_that_names_it(script, run, tmp_path):
    out = ["--plot-out", tmp_path / "out.png"]
    (tmp_path / "empty").mkdir()
    cut = write_lines(tmp_path / "cut", [])
    (cut / "metrics.jsonl").write_text('{"step": 1, "lo')
    nothing = write_lines(tmp_path / "nothing", [{"step": 1}])
    for arguments, words in (
        ([run, tmp_path / "nowhere", *out], "nowhere: there is no such folder"),
        ([run, tmp_path / "empty", *out], "empty: it has no metrics.jsonl"),
        ([cut, *out], "cut: its metrics.jsonl has no whole line"),
        ([nothing, *out], "nothing: its metrics.jsonl holds no losses"),
        (out, "--plot needs run folders"),
        (
            [run, "--plot-out", tmp_path / "out.pdf"],
            "out.pdf: the plot is a PNG; name a file that ends in .png",
        ),
    ):
        status, _, err = script(train, "--plot", *arguments)
        assert status == 2 and words in err, err
    assert not list(tmp_path.glob("out.*"))


def test_a_file_with_odd_lines_is_kept_aside_before_it_is_cut(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1, "loss": 2.0}\n{"step": 2, "note": "mine"}\n{"step": 3, "loss": 1.0}\n{"st'
    path.write_text(text)
    drop_later_lines(path, 2)
    assert [line["step"] for line in read_metrics(path)] == [1]
    assert path.with_name("metrics.jsonl.damaged").read_text() == text
    assert "metrics.jsonl line 2 is no line of a run" in capsys.readouterr().err
    drop_later_lines(path, 1)
    assert not capsys.readouterr().err
