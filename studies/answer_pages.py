"""The pages of systems on tasks, in results/tasks: README.md, the figure and the
details. `entries` are the systems of a task, as `runner.train` returns them, with the
"decoders" of each run.
"""

import re
import statistics

from aogpt.runtime.outputs import markdown_table
from studies.drawing import new_figure
from studies.experiment import Experiment
from studies.figures import styles_of, with_caption
from studies.pages import mean_cell, tuned_cell, value_of
from studies.runner import commits_of
from studies.runs import ROOT

CONFIGS = ROOT / "studies" / "configs" / "tasks"
RESULTS = ROOT / "results" / "tasks"
RECIPE = "fast"
COMPARED = {  # a system and its decoder, chosen beforehand
    "GPT, left to right": ("gpt", "l2r"),
    "AO-GPT, most confident first": ("aogpt", "confidence"),
    "two streams, most confident first": ("two_stream", "confidence"),
    "encoder, most confident first": ("encoder", "confidence"),
}

EASY = 0.95  # right answers of every system: such a task is in the details only

Entries = dict[str, dict]


def values_of(entry: dict, decoder: str, key: str) -> list[float]:
    """Return a measure of a decoder, one a seed."""
    return [run["decoders"][decoder][key] for run in entry["runs"]]


def mean_of(entry: dict, decoder: str, key: str) -> float:
    return statistics.mean(values_of(entry, decoder, key))


def decoders_of(entry: dict) -> list[str]:
    return list(entry["runs"][0]["decoders"])


def exact_cell(entry: dict, decoder: str) -> str:
    return mean_cell(values_of(entry, decoder, "exact_match"), ".1%")


def task_table(entries: Entries) -> list[str]:
    lines = []
    for name, entry in entries.items():
        for decoder in decoders_of(entry):
            possible = ""
            limits = values_of(entry, decoder, "limit")
            if None not in limits:
                possible = f"{statistics.mean(limits):.1%}"
            seconds = mean_of(entry, decoder, "seconds")
            records = mean_of(entry, decoder, "records")
            lines.append(
                [
                    name,
                    decoder,
                    exact_cell(entry, decoder),
                    possible,
                    f"{mean_of(entry, decoder, 'nfe'):.1f}",
                    f"{mean_of(entry, decoder, 'token_forwards'):.0f}",
                    f"{1000 * seconds / records:.1f}",
                ]
            )
    head = [
        "system",
        "decoded",
        "exact match",
        "possible",
        "NFE",
        "inputs",
        "ms a record",
    ]
    return markdown_table(head, lines, left=2)


def is_hard(entries: Entries) -> bool:
    """Return whether one of the compared systems is often wrong."""
    for name, decoder in COMPARED.values():
        if mean_of(entries[name], decoder, "exact_match") < EASY:
            return True
    return False


def summary_table(results: dict[str, Entries]) -> list[str]:
    """Return how often each system is right, on the hard tasks."""
    lines = []
    for task, entries in results.items():
        if is_hard(entries):
            line = [task]
            for name, decoder in COMPARED.values():
                line.append(exact_cell(entries[name], decoder))
            lines.append(line)
    return markdown_table(["task", *COMPARED], lines)


# By the first word of a decoder.
MARKERS = {
    "l2r": ">",
    "random": "o",
    "confidence": "s",
    "margin": "^",
    "threshold": "D",
    "entropy": "v",
    "speculative": "*",
    "mdm": "X",
    "even": "P",
}


def figure(results: dict[str, Entries]) -> bytes:
    """Return a PNG with a panel for each hard task, right answers over model calls, a
    point for each seed, system (its color) and decoder (its marker), and a panel with
    the legend."""
    hard = {}
    for task, entries in results.items():
        if is_hard(entries):
            hard[task] = entries
    rows = len(hard) // 2 + 1
    size = (9.6, 3.9 * rows + 0.4)
    drawing, grid = new_figure(rows, 2, size, squeeze=False)
    drawing.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    places = list(grid.flat)
    for axes, (task, entries) in zip(places, hard.items(), strict=False):
        draw_task(axes, entries)
        axes.set_title(task, fontsize=10)
    names: dict[str, None] = {}  # a task may have systems of its own
    for entries in hard.values():
        names.update(dict.fromkeys(entries))
    draw_legend(places[len(hard)], list(names))
    for axes in places[len(hard) + 1 :]:
        axes.remove()
    caption = (
        "A point for each seed; a line joins the seeds of a system and decoder. "
        "Systems that make the same number of calls are drawn side by side."
    )
    return with_caption(drawing, caption, columns=2)


def draw_task(axes, entries: Entries) -> None:
    from matplotlib.ticker import StrMethodFormatter

    styles = styles_of(entries)
    for number, (name, entry) in enumerate(entries.items()):
        aside = 1 + 0.02 * number  # or systems would hide each other
        for decoder in decoders_of(entry):
            shares = values_of(entry, decoder, "exact_match")
            calls = [aside * mean_of(entry, decoder, "nfe")] * len(shares)
            is_only = len(decoders_of(entry)) == 1  # larger, or others would hide it
            axes.plot(
                calls,
                shares,
                color=styles[name].color,
                marker=marker_of(decoder),
                markersize=9 if is_only else 5,
                zorder=5 if is_only else 2,
                linewidth=0.8,
                alpha=0.7,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="model calls (NFE) for a record", ylim=(-0.05, 1.05))
    axes.set_ylabel("share of test records answered right")
    axes.grid(alpha=0.3)


def draw_legend(axes, names: list[str]) -> None:
    """Fill a panel with the colors of systems and the markers of decoders."""
    labels = {"adaln_rotary": "adaLN beside rotation"}
    for title, (name, _) in COMPARED.items():
        labels[name] = title.split(",")[0]
    for name, style in styles_of(names).items():
        label = labels.get(name, name)
        axes.plot([], [], "s", color=style.color, label=label)
    for decoder, marker in MARKERS.items():
        axes.plot([], [], marker, color="grey", label=decoder)
    axes.legend(loc="center", fontsize=9, ncols=2, frameon=False)
    axes.set_axis_off()


def marker_of(decoder: str) -> str:
    return MARKERS[re.split(r"\W", decoder)[0]]


def page(results: dict[str, Entries]) -> str:
    """Return README.md: studies/configs/tasks/page.md with its table. results: the
    systems of each task."""
    text = (CONFIGS / "page.md").read_text()
    return text.replace("TABLE", "\n".join(summary_table(results)))


def details(tasks: dict[str, Experiment], results: dict[str, Entries]) -> str:
    """Return every system and decoder, losses, rates and commits as Markdown."""
    parameters: dict[str, int] = {}
    for entries in results.values():
        for name, entry in entries.items():
            parameters.setdefault(name, entry["parameters"])
    sizes = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    setting = next(iter(tasks.values())).setting
    lines = ["# Tasks: details", "", f"{setting} Parameters: {sizes}.", ""]
    for task, entries in results.items():
        lines += [f"## {task}: {tasks[task].title}", "", *task_table(entries), ""]
        runs = []
        for name, entry in entries.items():
            runs += entry["runs"]
            losses = [value_of(run, "random") for run in entry["runs"]]
            loss = mean_cell(losses, ".4f")
            lines.append(f"- {name}: any-order loss {loss}; {tuned_cell(entry)}")
        tokens = sorted({run["tokens"][-1] for run in runs})
        counts = ", ".join(f"{count / 1e6:.1f}M" for count in tokens)
        lines += ["", f"{counts} tokens. Commit {commits_of(runs)}.", ""]
    missing = [task for task in tasks if task not in results]
    if missing:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join(lines).rstrip() + "\n"
