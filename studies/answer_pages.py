"""Tables, verdicts, figure and page of systems on tasks: results/tasks.md. `entries` are the
systems of a task, as `runner.train` returns them, with the "decoders" of each run.
"""

import math
import re
import statistics

from scipy.stats import binom

from data.puzzles import TASKS
from evaluation.text_measures import mean_and_reach
from runtime.outputs import markdown_table, new_figure, png
from studies.experiment import Experiment
from studies.pages import tuned_cell
from studies.runner import commits_of
from studies.runs import ROOT

CONFIGS, RESULTS = ROOT / "studies" / "configs" / "tasks", ROOT / "results" / "tasks"
RECIPE = "fast"
ANY_ORDER, LEFT_TO_RIGHT = "confidence", "l2r"  # the decoders compared, chosen beforehand
IN_SUMMARY = {"aogpt": (LEFT_TO_RIGHT, ANY_ORDER), "gpt": (LEFT_TO_RIGHT,)}  # others: any order
DIFFERENT, SAME = 0.01, 0.05  # shares of right answers: further apart than this, or closer
TOO_FEW = 0.01  # of right answers, for what they cost to matter
RARE = 0.00135  # a normal variable is above three standard deviations so often

Entries = dict[str, dict]


def values_of(entry: dict, decoder: str, key: str) -> list[float]:
    """A figure of a decoder, one a seed."""
    return [run["decoders"][decoder][key] for run in entry["runs"]]


def mean_of(entry: dict, decoder: str, key: str) -> float:
    return statistics.mean(values_of(entry, decoder, key))


def decoders_of(entry: dict) -> list[str]:
    return list(entry["runs"][0]["decoders"])


def exact_cell(entry: dict, decoder: str) -> str:
    """The share of right answers over seeds, with the half-width of its 95% CI."""
    values = values_of(entry, decoder, "exact_match")
    mean, half_width = mean_and_reach(values)
    return f"{mean:.1%}" if len(values) == 1 else f"{mean:.1%} ± {half_width:.1%}"


Share = tuple[float, float]
"""Of right answers, and its standard error."""


def share_of(entry: dict, decoder: str) -> Share:
    """Over the answers of all seeds. The error is the larger of that over answers (at least that of
    one answer) and that over seeds."""
    values, answers = values_of(entry, decoder, "exact_match"), answers_of(entry, decoder)
    share = statistics.mean(values)
    over_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return share, max(math.sqrt(max(share * (1 - share), 1 / answers) / answers), over_seeds)


def answers_of(entry: dict, decoder: str) -> int:
    return sum(values_of(entry, decoder, "records"))


def compared(ours: Share, other: Share) -> str:
    """wins or loses: they differ by two standard errors and by DIFFERENT. tie: including two
    standard errors they are within SAME. Otherwise unresolved."""
    difference, half_width = ours[0] - other[0], 2 * math.hypot(ours[1], other[1])
    if abs(difference) > max(DIFFERENT, half_width):
        return "wins" if difference > 0 else "loses"
    return "tie" if abs(difference) + half_width <= SAME else "unresolved"


def against_l2r(entries: Entries) -> str:
    """What any order is worth on a task: AO-GPT by confidence against the plain GPT."""
    if not {"aogpt", "gpt"} <= entries.keys():
        return "-"
    return compared(share_of(entries["aogpt"], ANY_ORDER), share_of(entries["gpt"], LEFT_TO_RIGHT))


def limit_of(entry: dict, decoder: str) -> float | None:
    """The largest possible share of right answers; None if unknown."""
    limits = values_of(entry, decoder, "limit")
    return None if None in limits else statistics.mean(limits)


def meets_limit(entry: dict, decoder: str) -> bool:
    """Whether the share of right answers is what perfect conditionals reach: within a hundredth, or
    as many (or few) would be seen in more than one of 700 runs (three standard errors, since by
    chance some of dozens of cells are two away)."""
    limit, answers = limit_of(entry, decoder), answers_of(entry, decoder)
    share = mean_of(entry, decoder, "exact_match")
    right = round(share * answers)
    count, probability = (right, limit) if share < limit else (answers - right, 1 - limit)
    return abs(share - limit) <= 0.01 * limit or binom.cdf(count, answers, probability) > RARE


def task_table(entries: Entries) -> list[str]:
    """A line for every system and decoder."""
    lines = []
    for name, entry in entries.items():
        for decoder in decoders_of(entry):
            nfe, inputs, seconds, records = (
                mean_of(entry, decoder, key)
                for key in ("nfe", "token_forwards", "seconds", "records")
            )
            cells = [exact_cell(entry, decoder), limit_cell(entry, decoder), f"{nfe:.1f}"]
            cells += [f"{inputs:.0f}", f"{1000 * seconds / records:.1f}"]
            lines.append([name, decoder, *cells])
    head = ["system", "decoded", "exact match", "possible", "NFE", "inputs", "ms a record"]
    return markdown_table(head, lines, left=2)


def limit_cell(entry: dict, decoder: str) -> str:
    limit = limit_of(entry, decoder)
    if limit is None:
        return ""
    return f"{limit:.1%} ({'met' if meets_limit(entry, decoder) else 'not met'})"


def summary_table(results: dict[str, Entries]) -> list[str]:
    """A line for every task: how often each system is right, and what any order is worth."""
    systems = next(iter(results.values()))
    shown = [(name, by) for name in systems for by in IN_SUMMARY.get(name, (ANY_ORDER,))]
    lines = [
        [task, *(exact_cell(entries[name], by) for name, by in shown), against_l2r(entries)]
        for task, entries in results.items()
    ]
    return markdown_table(["task", *(f"{name}, {by}" for name, by in shown), "any order"], lines)


def costs_of(results: dict[str, Entries]) -> list[dict]:
    """What an encoder takes relative to AO-GPT, a ratio for each seed, where both are right equally
    often by the same decoder in as many steps, and not almost never."""
    costs = []
    for task, entries in results.items():
        if not {"aogpt", "encoder"} <= entries.keys():
            continue
        both = entries["aogpt"], entries["encoder"]
        for decoder in (name for name in decoders_of(both[0]) if name in decoders_of(both[1])):
            shares = [share_of(entry, decoder) for entry in both]
            steps = [mean_of(entry, decoder, "nfe") for entry in both]
            few = min(share for share, _ in shares) < TOO_FEW
            if few or steps[0] != steps[1] or compared(*shares) != "tie":
                continue
            cost = {"task": task, "decoder": decoder, "nfe": steps[0], "shares": shares}
            for key in ("token_forwards", "seconds"):
                pairs = zip(*(values_of(entry, decoder, key) for entry in both), strict=True)
                cost[key] = [theirs / ours for ours, theirs in pairs]
            costs.append(cost)
    return costs


def cost_table(costs: list[dict]) -> list[str]:
    """Means over seeds with the half-widths of their 95% CIs."""
    lines = []
    for cost in costs:
        cells = [f"{share:.1%}" for share, _ in cost["shares"]]
        for ratios in (cost["token_forwards"], cost["seconds"]):
            mean, half_width = mean_and_reach(ratios)
            cells.append(f"{mean:.1f}" + f" ± {half_width:.1f}" * (len(ratios) > 1))
        lines.append([cost["task"], cost["decoder"], f"{cost['nfe']:.1f}", *cells])
    head = ["task", "decoded", "NFE", "aogpt", "encoder", "inputs, times", "seconds, times"]
    return markdown_table(head, lines, left=2) if lines else ["Nowhere."]


def cost_summary(costs: list[dict]) -> str:
    """The range of the table, in a sentence."""
    if not costs:
        return "- Nowhere does an encoder tie with AO-GPT in as many steps."
    times = {f"({c['task']}, {c['decoder']})": statistics.mean(c["seconds"]) for c in costs}
    least, most = min(times, key=times.get), max(times, key=times.get)
    return (
        f"- Where an encoder ties with AO-GPT in as many steps, it takes {times[least]:.1f} "
        f"{least} to {times[most]:.1f} times {most} the seconds, with half of the decoders more "
        f"than {statistics.median(times.values()):.1f} times."
    )


def conclusions(results: dict[str, Entries]) -> list[str]:
    """What the tables come to, in sentences."""
    verdicts = {task: against_l2r(entries) for task, entries in results.items()}
    tasks_of = {
        word: ", ".join(task for task, found in verdicts.items() if found == word) or "nowhere"
        for word in ("wins", "tie", "loses", "unresolved")
    }
    far = []
    for task in (task for task, verdict in verdicts.items() if verdict == "wins"):
        ours = share_of(results[task]["aogpt"], ANY_ORDER)
        other = share_of(results[task]["gpt"], LEFT_TO_RIGHT)
        if ours[0] > 0.95 and other[0] < 0.5:
            cells = [f"{share:.1%} ± {2 * error:.1%}" for share, error in (ours, other)]
            far.append(f"{task} ({cells[0]} against {cells[1]})")
    cells = [
        (meets_limit(entry, decoder), limit_of(entry, decoder), f"{task}, {name}, {decoder}")
        for task, entries in results.items()
        for name, entry in entries.items()
        for decoder in decoders_of(entry)
        if limit_of(entry, decoder) is not None
    ]
    not_met = "; ".join(cell for met, _, cell in cells if not met) or "none"
    together = [met for met, limit, _ in cells if limit < 1]
    return [
        "- Any order wins: {wins}. It ties: {tie}. It loses: {loses}. Unresolved: "
        "{unresolved}.".format(**tasks_of),
        f"- AO-GPT is right in more than 95%, and the plain GPT in less than half: "
        f"{', '.join(far) or 'nowhere'} (with two standard errors).",
        f"- The possible share is met in {sum(met for met, *_ in cells)} of {len(cells)} ways to "
        f"decode, and in {sum(together)} of the {len(together)} in which it is less than 1, since "
        f"positions are sampled together. Not met: {not_met}.",
        cost_summary(costs_of(results)),
    ]


MARKERS = {  # by the first word of a decoder's name
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
    """PNG: a panel for each task, exact match over NFE, a point with its 95% CI for each system
    (its color) and decoder (its marker)."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    drawing, grid = new_figure(rows, columns, (4.6 * columns, 3.6 * rows + 0.5), squeeze=False)
    for axes in grid.flat[len(results) :]:
        axes.remove()
    for axes, (task, entries) in zip(grid.flat, results.items(), strict=False):
        for number, (name, entry) in enumerate(entries.items()):
            axes.plot([], [], "s", color=f"C{number}", label=name)
            of_kind: dict[str, list[tuple]] = {}
            for decoder in decoders_of(entry):
                share, half_width = mean_and_reach(values_of(entry, decoder, "exact_match"))
                bar = 0.0 if math.isnan(half_width) else half_width
                point = mean_of(entry, decoder, "nfe"), share, bar
                of_kind.setdefault(re.split(r"\W", decoder)[0], []).append(point)
            for kind, points in of_kind.items():
                x, y, bars = zip(*sorted(points), strict=True)
                style = {"marker": MARKERS.get(kind, "P"), "markersize": 5, "linewidth": 0.7}
                if len(decoders_of(entry)) == 1:  # which others would hide
                    style |= {"markersize": 9, "zorder": 5}
                axes.errorbar(x, y, yerr=bars, color=f"C{number}", alpha=0.7, capsize=2, **style)
        axes.set(title=task, xlabel="NFE", ylabel="exact match", ylim=(-0.05, 1.05))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for name, marker in MARKERS.items():
        grid.flat[0].plot([], [], marker, color="gray", label=name)
    legend = [part[-len(MARKERS) :] for part in grid.flat[0].get_legend_handles_labels()]
    drawing.legend(*legend, ncols=9, loc="outside lower center")
    return png(drawing, dpi=120)


def page(tasks: dict[str, Experiment], results: dict[str, Entries]) -> str:
    """results: the systems of each task."""
    sizes = ", ".join(f"{n} {e['parameters']:,}" for n, e in next(iter(results.values())).items())
    setting = next(iter(tasks.values())).setting
    lines = [(CONFIGS / "page.md").read_text(), f"{setting} Parameters: {sizes}.", ""]
    lines += [*summary_table(results), "", *conclusions(results), ""]
    lines += ["![exact match over NFE](tasks/tasks.png)", ""]
    lines += ["## What an encoder costs beside AO-GPT, where they tie", ""]
    lines += [*cost_table(costs_of(results)), ""]
    for task, entries in results.items():
        tuned = ", ".join(f"{n} {tuned_cell(e)}" for n, e in entries.items() if e["tuned"])
        runs = [run for entry in entries.values() for run in entry["runs"]]
        counts = ", ".join(f"{n / 1e6:.1f}M" for n in sorted({run["tokens"][-1] for run in runs}))
        lines += [f"## {task}: {tasks[task].title}", "", *task_table(entries), ""]
        chosen = f" Tuned: {tuned}." if tuned else ""
        lines += [f"{counts} tokens.{chosen} Commit {commits_of(runs)}.", ""]
        if TASKS[task].board:
            file = f"tasks/{task}.html"
            lines += [f"[A page]({file}) on which some of them fill in, in AO-GPT's own order.", ""]
    if missing := [task for task in tasks if task not in results]:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join(lines).rstrip() + "\n"
