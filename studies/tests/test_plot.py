"""studies/plot.py: runs drawn against each other."""

from helpers import read_lines, write_rows
from matplotlib.figure import Figure

from studies import plot

PNG = b"\x89PNG\r\n\x1a\n"


def write_metrics(folder, rows):
    folder.mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def test_losses_stand_over_the_tokens_seen_when_they_were_measured():
    rows = [{"step": step, "loss": 1.0, "tokens": 100 * step} for step in (10, 20)]
    rows += [{"step": 15, "val_loss_l2r": 2.0, "val_loss_l2r_raw": 3.0}]
    axes = Figure().subplots()
    plot.draw(
        axes, [*rows, {"step": 20, "val_loss_l2r": 1.5}], tuple(rows[-1])[1:], "black"
    )
    averaged, raw = axes.lines
    assert averaged.get_xydata().tolist() == [[1500, 2.0], [2000, 1.5]]
    assert raw.get_xydata().tolist() == [[1500, 3.0]]
    assert raw.get_linestyle() == "--"


def test_a_panel_names_the_runs_that_have_no_values_for_it():
    runs = {
        "out/any": [{"step": 1, "val_loss_random": 2.0}],
        "out/gpt": [{"step": 1, "val_loss_l2r": 2.0}],
    }
    axes = Figure().subplots()
    plot.draw_runs(axes, runs, ("val_loss_random",))
    assert len(axes.lines) == 1
    assert [text.get_text() for text in axes.texts] == ["no values: gpt"]


def test_plot_draws_runs_of_now_and_of_before_into_one_png(
    run, encoder, tmp_path, printed
):
    keys = ("step", "loss", "tokens", "val_loss_l2r", "val_loss_random")
    before = [
        {key: line[key] for key in keys if key in line}
        for line in read_lines(run / "metrics.jsonl")
    ]
    old = write_metrics(tmp_path / "old $x_1$ run", before)
    many = [
        write_metrics(
            tmp_path / str(i), read_lines(run / "metrics.jsonl")[: 10 + 3 * i]
        )
        for i in range(10)
    ]
    out = tmp_path / "pictures" / "compare.png"
    said = printed(plot, run, old, encoder, *many, "--out", out)
    assert f"wrote {out}" in said
    assert out.read_bytes().startswith(PNG)


def test_what_cannot_be_drawn_is_an_error_that_names_it(mistake, run, tmp_path):
    nothing = write_metrics(tmp_path / "nothing", [{"step": 1}])
    out = tmp_path / "out.png"
    for runs, file, words in (
        ([run, tmp_path / "nowhere"], out, "nowhere: it has no metrics.jsonl"),
        ([nothing], out, "nothing: it has no metrics.jsonl with losses"),
        ([], out, "give run folders"),
        ([run], tmp_path / "out.pdf", "with --out a file NAME.png"),
    ):
        assert words in mistake(plot, *runs, "--out", file)
    assert not list(tmp_path.glob("out.*"))
