"""The figures of the front pages, made from the rows in results/: conditioning.png
(ways to condition a decoder beside an encoder), orders.png (why orders matter),
speed.png (decoding beside an encoder)."""

import json
import statistics
from dataclasses import dataclass

from studies import tasks
from studies.drawing import COLORS, new_figure, png
from studies.experiment import Experiment
from studies.figures import Entries
from studies.measures import mean_and_half_width
from studies.pages import load_results, value_of
from studies.runner import with_best
from studies.runs import ROOT
from studies.verdicts import Claim, judged

RESULTS = ROOT / "results"
BLUE, BLACK, ORANGE = COLORS[:3]
GREY = "#707070"
WAYS = {
    "adaln_11": "adaLN alone",
    "adaln_rotary_11": "both: adaLN and rotated",
    "rotary": "rotated queries",
    "two_stream": "two streams",
    "mask_query": "[MASK] as the query",
}
"""The run configs of the decoders, in words, from top to bottom; adaLN takes the
paper's share of a block."""


@dataclass(frozen=True)
class DataSet:
    """A panel of the figure on conditioning: a recipe of an experiment."""

    title: str
    experiment: str
    recipe: str
    unit: str
    limit: float | None = None  # larger differences are written at the edge


LOSSES = [
    DataSet("chorales", "E21", "chorales", "nats a note"),
    DataSet("books, 2 layers", "E22", "fast", "nats a byte"),
    DataSet("books, 4 layers", "E29", "fast", "nats a byte"),
    DataSet("6x6 Sudoku", "E34", "sudoku", "nats a cell", limit=0.25),
    DataSet("facts backwards", "E32", "reversal", "nats a character"),
]
CAPTION = (
    "Line at 0: an encoder with the best of three tuned losses (star: line at its "
    "runs, weighted loss), about the same size, the same tokens. Blue: the decoder "
    "is ahead; orange: the encoder is;\ngrey: no difference shows. Bars: 95%, 8 seeds. "
    "Filled: claimed before the runs; hollow: observed. adaLN takes the paper's share "
    "of a block (vector 11; star: 32);\nadaLN alone has no rotary attention, all "
    "others have. A [MASK] and two streams take 1.5 to 1.8 times the operations of "
    "rotated queries and of an encoder. One budget for each data set, and the gaps "
    "still move."
)
STAR = DataSet("path in a star", "E26", "star", "runs of 20 that find it")


def conditioning_figure() -> bytes:
    """Return a PNG: the losses of decoders minus that of an encoder, with intervals,
    and how many runs find the path in a star."""
    figure, axes = new_figure(columns=6, size=(13.5, 3.9), sharey=True)
    for place, data in zip(axes, LOSSES, strict=False):
        draw_losses(place, data)
    draw_star(axes[-1])
    axes[0].set_yticks(range(len(WAYS)), list(WAYS.values()))
    axes[0].set_ylim(len(WAYS) - 0.4, -0.6)
    figure.suptitle(
        "How a decoder is conditioned on its target, and the data, decide whether "
        "it is ahead of an encoder",
        fontweight="bold",
    )
    figure.supxlabel(CAPTION, fontsize=8.5)
    return png(figure)


def draw_losses(axes, data: DataSet) -> None:
    experiment, recipes = load_results(data.experiment)
    entries = with_best(experiment.best_of, recipes[data.recipe])
    for row, name in enumerate(WAYS):
        if name not in entries:
            draw_not_run(axes, row)
            continue
        marked = is_marked(experiment, data.recipe, name, "best_encoder")
        draw_difference(axes, difference(entries, name), row, marked, data.limit)
    axes.axvline(0, color=BLACK, linewidth=1, zorder=0)
    if data.limit:
        axes.set_xlim(-0.05, data.limit)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(data.title)
    axes.set_xlabel(data.unit)


def draw_not_run(axes, row: int) -> None:
    """Say so in the middle of a row."""
    axes.text(
        0.5,
        row,
        "not run",
        ha="center",
        va="center",
        color=GREY,
        transform=axes.get_yaxis_transform(),
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def draw_difference(
    axes, claim: dict, row: int, filled: bool, limit: float | None
) -> None:
    mean = claim["mean"]
    half_width = claim["half_width"]
    color = GREY
    if mean - half_width > 0:
        color = ORANGE
    elif mean + half_width < 0:
        color = BLUE
    if limit and mean > limit:
        text = f"{mean:.2f} ± {half_width:.2f} →"
        axes.text(limit, row, text, ha="right", va="center", color=color, fontsize=9)
        return
    axes.errorbar(
        mean,
        row,
        xerr=half_width,
        fmt="o",
        color=color,
        markerfacecolor=color if filled else "white",
        markersize=7,
        capsize=3,
    )


def difference(entries: Entries, name: str) -> dict:
    """Return how much the loss of a run config is above the best encoder's, as `judged`
    does."""
    return judged(Claim("", "best_encoder", name), "eval_random", entries)


def is_marked(experiment: Experiment, recipe: str, name: str, encoder: str) -> bool:
    """Return whether a run config beside an encoder is a claim that was marked, and
    whose runs test it."""
    for claim in experiment.claims:
        if claim.no_verdict:
            continue
        sides = {side.partition(":")[0] for side in (claim.lower, claim.higher)}
        if recipe in claim.primary and sides == {name, encoder}:
            return True
    return False


def draw_star(axes) -> None:
    """Draw how many runs of each decoder find the path, and of the encoder a line."""
    experiment, recipes = load_results(STAR.experiment)
    entries = recipes[STAR.recipe]

    def successes(name: str) -> int:
        answers = [value_of(run, experiment.kind) for run in entries[name]["runs"]]
        return sum(answer >= experiment.success for answer in answers)

    for row, way in enumerate(WAYS):
        name = way.removesuffix("_11")  # E26 has a vector of 32
        if name not in entries:
            draw_not_run(axes, row)
            continue
        count = successes(name)
        marked = is_marked(experiment, STAR.recipe, name, "encoder")
        color = BLUE if marked else "white"
        axes.barh(row, count, height=0.5, color=color, edgecolor=BLUE)
        color = "white" if marked else BLUE
        axes.text(count - 0.5, row, count, ha="right", va="center", color=color)
    axes.axvline(successes("encoder"), color=BLACK, linewidth=1)
    axes.set_xlim(0, 20.5)
    axes.set_title(STAR.title)
    axes.set_xlabel(STAR.unit)


ORDERS = {"l2r": "left to right", "fixed": "one random order", "random": "all orders"}
SUDOKU = [
    ("gpt", "l2r", "GPT, left to right"),
    ("aogpt", "random", "AO-GPT, random order"),
    ("aogpt", "l2r", "AO-GPT, left to right"),
    ("aogpt", "confidence", "AO-GPT, most confident first"),
    ("encoder", "l2r", "encoder, left to right"),
    ("encoder", "confidence", "encoder, most confident first"),
]
"""System, decoder and label of the rows of the right panel of `orders_figure`."""


def orders_figure() -> bytes:
    """Return a PNG: the loss on books by order of training, and Sudokus that are solved
    by order of decoding; a dot for each seed."""
    figure, (left, right) = new_figure(
        columns=2, size=(11, 3.4), width_ratios=[1, 1.25]
    )
    experiment, recipes = load_results("E20")
    for row, name in enumerate(ORDERS):
        runs = recipes["fast"][name]["runs"]
        losses = [value_of(run, experiment.kind) for run in runs]
        left.plot(losses, [row] * len(losses), "o", color=BLUE, alpha=0.5)
        mean, _ = mean_and_half_width(losses)
        left.text(mean, row - 0.22, f"{mean:.3f}", ha="center")
    left.set_yticks(range(len(ORDERS)), list(ORDERS.values()))
    left.set_ylim(len(ORDERS) - 0.5, -0.6)
    left.set_xlim(1.6, 2.15)
    left.set_xlabel("trained and scored along the same orders,\nnats a byte (16 seeds)")
    left.set_title("Books: left to right is learned best of three", fontweight="bold")
    of_tasks, decoders = tasks.load_tasks()
    entries = tasks.load_results({"sudoku6": of_tasks["sudoku6"]}, decoders)["sudoku6"]
    colors = {"gpt": BLACK, "aogpt": BLUE, "encoder": ORANGE}
    for row, (system, decoder, _) in enumerate(SUDOKU):
        shares = []
        for run in entries[system]["runs"]:
            shares.append(100 * run["decoders"][decoder]["exact_match"])
        right.plot(shares, [row] * len(shares), "o", color=colors[system], alpha=0.7)
    right.axhspan(0.5, 3.5, color=BLUE, alpha=0.08)
    right.text(101, 0.8, "the same weights", color=BLUE, fontsize=9, ha="right")
    right.set_yticks(range(len(SUDOKU)), [label for _, _, label in SUDOKU])
    right.set_ylim(len(SUDOKU) - 0.5, -0.6)
    right.set_xlim(40, 102)
    right.set_xlabel("6x6 Sudokus solved, % (3 seeds)")
    right.set_title("Sudoku: the order of decoding decides", fontweight="bold")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    return png(figure)


SPEEDS = {
    "CPU, two threads, 52M": ("decoding_cpu.json", GREY),
    "H100, CUDA graphs on both sides, 426M": ("gpu/decode_kernels.json", BLUE),
    "H100, compiled, no graphs, 426M": ("gpu/decode.json", ORANGE),
}
"""File and colour of the lines of `speed_figure`, by label."""


def speed_figure() -> bytes:
    """Return a PNG: the time of an encoder beside AO-GPT's by number of steps, a dot
    for each plan of AO-GPT and a line through the medians."""
    figure, axes = new_figure(size=(7.5, 4))
    steps = [64, 256, 1024]
    for shift, (label, (name, color)) in enumerate(SPEEDS.items(), start=-1):
        rows = json.loads((RESULTS / name).read_text())["rows"]
        ratios = []
        for place, count in enumerate(steps):
            ours = seconds_of(rows, "ours", count)
            encoder = statistics.median(seconds_of(rows, "encoder", count))
            x = place + 0.08 * shift
            plans = [encoder / seconds for seconds in ours]
            axes.plot([x] * len(plans), plans, ".", color=color, markersize=7)
            ratios.append(encoder / statistics.median(ours))
            axes.text(
                x + 0.03,
                1.08 * ratios[-1],
                f"{ratios[-1]:.1f}",
                color=color,
                va="bottom",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        xs = [place + 0.08 * shift for place in range(len(steps))]
        axes.plot(xs, ratios, color=color, linewidth=1, label=label)
    axes.axhline(25, color=BLACK, linestyle="--", linewidth=1)
    words = "the paper: about 25, against SEDD's eager code (not timed here)"
    axes.text(2.45, 20, words, fontsize=8.5, ha="right")
    axes.axhline(1, color=BLACK, linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 25, 50], ["1", "2", "5", "10", "25", "50"])
    axes.minorticks_off()
    axes.set_ylim(0.9, 80)
    axes.set_xlim(-0.35, 2.5)
    axes.set_xticks(range(len(steps)), [f"{count:,}" for count in steps])
    axes.set_xlabel("steps for 1,024 tokens, in an order that was drawn before")
    axes.set_ylabel("time of an encoder, AO-GPT = 1")
    axes.set_title(
        "On an H100 AO-GPT decodes faster than an encoder, by less than 25",
        fontweight="bold",
        fontsize=10.5,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    return png(figure)


def seconds_of(rows: list[dict], system: str, steps: int) -> list[float]:
    """Return the seconds of each repetition, whichever version of the benchmark wrote
    the rows."""
    for row in rows:
        if row["system"] == system and row["steps"] == steps:
            if "by_repeat" in row:
                return row["by_repeat"]["seconds"]
            return row["all_seconds"]
    raise ValueError(f"no row of {system} with {steps} steps")


FIGURES = {
    "conditioning.png": conditioning_figure,
    "orders.png": orders_figure,
    "speed.png": speed_figure,
}
"""What makes each figure, by its name in results/."""
