"""Systems on tasks: who is right how often, in how many steps, decoded in which order.

studies/configs/tasks/systems.toml says it all: a `base` configuration, `arms`, systems that are tuned
alike (`tune`) and trained over seeds on every one of the `tasks`, and `decoders`, by which each
of them answers the test split.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoints.load import Loaded, load
from data.tasks import TASKS
from evaluation.tasks import ON_PAGE, Answers, Questions, answer, open_questions, page_of
from evaluation.text_measures import mean_and_reach
from model import ModelConfig
from runtime.processes import Processes
from runtime.reports import markdown_table, new_figure, png
from runtime.validation import read_toml
from sampling.modes import DecodingOptions, check_mode, with_mode_defaults
from studies.experiments import suite
from studies.experiments.arms import ROOT, commits_of, read_arms, run_of
from studies.experiments.kept import Kept
from studies.experiments.report import tuned_cell
from studies.experiments.suite import Experiment
from training.config import Config

SYSTEMS = ROOT / "studies" / "configs" / "tasks" / "systems.toml"
RESULTS = ROOT / "results" / "tasks"
RECIPE = "fast"
BATCH = 100  # records in flight
TOO_FEW = 0.01  # of the answers: nobody compares what it costs to be wrong


@dataclass(frozen=True)
class TaskExperiment:
    """One task, the systems that are trained on it, and how they decode."""

    task: str
    says: str
    """What is asked."""
    experiment: Experiment
    decoders: dict[str, DecodingOptions]
    """By name; without a temperature, which is the task's."""


def load_tasks(file: Path = SYSTEMS) -> dict[str, TaskExperiment]:
    """All tasks of a file, by name."""
    values = read_toml(file)
    arms, tasks, tune = values.pop("arms"), values.pop("tasks"), values.pop("tune")
    decoders = {
        name: DecodingOptions(**options) for name, options in values.pop("decoders").items()
    }
    found = {}
    for task, changes in tasks.items():
        says = changes.pop("says")
        fixed = {"data.folder": f"data/{task}", "model.block_size": TASKS[task].length}
        tables = {"recipe": fixed | changes | {"tune": tune}}
        tables |= {name: {"from": "recipe"} | arm for name, arm in arms.items()}
        recipes = {RECIPE: read_arms(tables, f"task {task}")}
        del recipes[RECIPE]["recipe"]
        settings = values | {"recipes": recipes, "x": {}, "claims": []}
        experiment = Experiment(name=f"tasks/{task}", **settings)
        found[task] = TaskExperiment(task, says, experiment, decoders)
    return found


# ---- decoding ------------------------------------------------------------------------------------


def possible_decoders(of: TaskExperiment, model: ModelConfig) -> dict[str, DecodingOptions]:
    """Those of the decoders that a model can do, with all that they leave open."""
    found = {}
    for name, options in of.decoders.items():
        options = replace(
            options, temperature=TASKS[of.task].temperature, batch_size=options.batch_size or BATCH
        )
        options = with_mode_defaults(options)
        with contextlib.suppress(ValueError):  # a plain GPT goes from left to right, say
            check_mode(options, model)
            found[name] = options
    return found


class Decodings:
    """What a run makes of the test split, decoder by decoder; it is loaded when the first of them
    is not known yet, and trained first where it is not there."""

    def __init__(self, of: TaskExperiment, config: Config, limit: int | None, kept: Kept):
        self.of, self.config, self.limit, self.kept = of, config, limit, kept
        self.possible = possible_decoders(of, config.model)

    def summary(self, decoder: str) -> dict:
        """`Answers.summary`."""
        options = self.possible[decoder]
        settings = [f"limit {self.limit}", *changes_of(options)]
        return self.kept.of(self.config, [settings], functools.partial(self.decode, options))

    def decode(self, options: DecodingOptions) -> dict:
        loaded, questions = self.asked
        self.answer(loaded, questions.first(options.batch_size), options)  # what is made once
        return self.answer(loaded, questions, options).summary()

    def answer(self, loaded: Loaded, questions: Questions, options: DecodingOptions) -> Answers:
        alone = Processes(0, 1, torch.device("cpu"))
        return answer(loaded, questions, options, self.config.seed, alone)

    def page(self) -> str:
        """HTML on which some records fill in, by confidence."""
        loaded, questions = self.asked
        options = self.possible[ANY_ORDER]
        answers = self.answer(loaded, questions.first(ON_PAGE), options)
        return page_of(loaded, questions, answers, {"task": self.of.task, "decoded": ANY_ORDER})

    @functools.cached_property
    def asked(self) -> tuple[Loaded, Questions]:
        loaded = load(run_of(self.config).config.run_folder)
        return loaded, open_questions(self.config.data.folder, "test", loaded, self.limit)


def board_page(of: TaskExperiment, arms: dict[str, dict]) -> str:
    """The page of AO-GPT with seed 0, which is trained first where it is not there."""
    arm = of.experiment.recipes[RECIPE]["aogpt"]
    config = of.experiment.config(RECIPE, arm, 0, arms["aogpt"]["tuned"])
    return Decodings(of, config, ON_PAGE, Kept(None)).page()


def changes_of(options: DecodingOptions) -> list[str]:
    """What options are, where they are not as by default: new options make no others of them."""
    default = vars(DecodingOptions())
    return [f"{key} {value}" for key, value in vars(options).items() if value != default[key]]


def run_task(
    of: TaskExperiment,
    seeds: int,
    jobs: int,
    quick: bool,
    limit: int | None,
    progress: Callable[[bool], None] = lambda made: None,
    keep: Path | None = None,
) -> dict:
    """Train what is missing of a task, then decode with all of it. What the file `keep` holds of
    either is not done again, and what is done comes to it."""
    experiment = of.experiment
    trained = suite.train(experiment, [RECIPE], seeds, jobs, quick, progress, keep)[RECIPE]
    kept = Kept(keep)
    for seed in range(seeds):
        decodings = {}
        for name, found in trained.items():
            arm = experiment.recipes[RECIPE][name]
            config = experiment.config(RECIPE, arm, seed, found["tuned"], quick)
            decodings[name] = Decodings(of, config, limit, kept)
            found["runs"][seed]["decoders"] = {}
        # What is compared in time is measured one system after the other.
        for decoder in of.decoders:
            for name, of_run in decodings.items():
                if decoder in of_run.possible:
                    trained[name]["runs"][seed]["decoders"][decoder] = of_run.summary(decoder)
    return trained


# ---- tables --------------------------------------------------------------------------------------

HEAD = ["system", "decoded", "exact match", "possible", "NFE", "inputs", "ms a record"]


def values_of(arm: dict, decoder: str, key: str) -> list[float]:
    """A figure of a decoder, one a seed."""
    return [run["decoders"][decoder][key] for run in arm["runs"]]


def decoders_of(arm: dict) -> list[str]:
    return list(arm["runs"][0]["decoders"])


def mean_of(arm: dict, decoder: str, key: str) -> float:
    return statistics.mean(values_of(arm, decoder, key))


def share_cell(values: list[float]) -> str:
    """A share over seeds, with half its 95% interval."""
    mean, reach = mean_and_reach(values)
    return f"{mean:.1%}" if len(values) == 1 else f"{mean:.1%} +- {reach:.1%}"


def task_table(arms: dict[str, dict]) -> list[str]:
    """A line for every system and decoder."""
    rows = []
    for name, arm in arms.items():
        for decoder in decoders_of(arm):
            records = arm["runs"][0]["decoders"][decoder]["records"]
            rows.append(
                [
                    name,
                    decoder,
                    share_cell(values_of(arm, decoder, "exact_match")),
                    limit_cell(arm, decoder),
                    f"{mean_of(arm, decoder, 'nfe'):.1f}",
                    f"{mean_of(arm, decoder, 'token_forwards'):.0f}",
                    f"{1000 * mean_of(arm, decoder, 'seconds') / records:.1f}",
                ]
            )
    return markdown_table(HEAD, rows, left=2)


# ---- verdicts ------------------------------------------------------------------------------------

ANY_ORDER, LEFT_TO_RIGHT = "confidence", "l2r"  # the decoders that are compared, chosen beforehand
IN_SUMMARY = {"aogpt": (LEFT_TO_RIGHT, ANY_ORDER), "gpt": (LEFT_TO_RIGHT,)}  # others: any order
DIFFERENT, SAME = 0.01, 0.05  # shares of right answers: more than this apart, or less


@dataclass(frozen=True)
class Share:
    """Of right answers, and its standard error."""

    value: float
    error: float


def share_of(arm: dict, decoder: str) -> Share:
    """Of the answers of all seeds. The error is the larger of that over answers, which is that of
    one answer where all are right or none, and that over seeds."""
    values = values_of(arm, decoder, "exact_match")
    share = statistics.mean(values)
    over_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Share(share, max(error_of(share, answers_of(arm, decoder)), over_seeds))


def told_of(share: Share) -> str:
    return f"{share.value:.1%} +- {2 * share.error:.1%}"


def answers_of(arm: dict, decoder: str) -> int:
    return sum(run["decoders"][decoder]["records"] for run in arm["runs"])


def error_of(share: float, answers: int) -> float:
    """The standard error of a share of so many answers; that of one where all are right or none."""
    return math.sqrt(max(share * (1 - share), 1 / answers) / answers)


def compared(ours: Share, other: Share) -> str:
    """wins or loses: they differ by two standard errors and by a hundredth; tie: with as much to
    either side they are less than five hundredths apart; else unresolved."""
    difference = ours.value - other.value
    reach = 2 * math.hypot(ours.error, other.error)
    if abs(difference) > max(DIFFERENT, reach):
        return "wins" if difference > 0 else "loses"
    return "tie" if abs(difference) + reach <= SAME else "unresolved"


def against_l2r(arms: dict[str, dict]) -> str:
    """What any order is worth on a task: AO-GPT by confidence against the plain GPT."""
    if not {"aogpt", "gpt"} <= arms.keys():
        return "-"
    return compared(share_of(arms["aogpt"], ANY_ORDER), share_of(arms["gpt"], LEFT_TO_RIGHT))


def limit_of(arm: dict, decoder: str) -> float | None:
    """The share of right answers that is possible; None where it is not known."""
    limits = values_of(arm, decoder, "limit")
    return None if None in limits else statistics.mean(limits)


def meets_limit(arm: dict, decoder: str) -> bool:
    """Whether the share of right answers is what is possible: as many of them, or as few, would be
    seen in more than one of 700 runs of perfect conditionals (three standard errors, since of
    dozens of cells some are two away by chance), or it is within a hundredth: no model's are
    perfect."""
    limit, answers = limit_of(arm, decoder), answers_of(arm, decoder)
    share = mean_of(arm, decoder, "exact_match")
    if abs(share - limit) <= 0.01 * limit:
        return True
    right = round(share * answers)
    if share < limit:
        return chance_of_at_most(right, answers, limit) > RARE
    return chance_of_at_most(answers - right, answers, 1 - limit) > RARE


RARE = 0.00135  # of a normal distribution so much is more than three standard deviations above


def chance_of_at_most(count: int, of: int, share: float) -> float:
    """Of a binomial distribution."""
    if share in (0, 1):
        return float(share == 0 or count == of)
    terms = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(share)
        + (of - k) * math.log1p(-share)
        for k in range(count + 1)
    )
    return math.fsum(map(math.exp, terms))


def limit_cell(arm: dict, decoder: str) -> str:
    limit = limit_of(arm, decoder)
    if limit is None:
        return ""
    return f"{limit:.1%} ({'met' if meets_limit(arm, decoder) else 'not met'})"


def summary_table(results: dict[str, dict]) -> list[str]:
    """A line for every task: how often each system is right, and what any order is worth."""
    arms = next(iter(results.values()))
    shown = [(name, decoder) for name in arms for decoder in IN_SUMMARY.get(name, (ANY_ORDER,))]
    rows = [
        [
            task,
            *(share_cell(values_of(found[name], by, "exact_match")) for name, by in shown),
            against_l2r(found),
        ]
        for task, found in results.items()
    ]
    head = ["task", *(f"{name}, {by}" for name, by in shown), "any order"]
    return markdown_table(head, rows)


@dataclass(frozen=True)
class Cost:
    """What an encoder takes beside AO-GPT with one decoder: multiples, one for each seed."""

    task: str
    decoder: str
    nfe: float
    shares: list[Share]  # of right answers, AO-GPT's and the encoder's
    inputs: list[float]
    seconds: list[float]


def costs_of(results: dict[str, dict]) -> list[Cost]:
    """Where both are right as often by the same decoder in as many steps, and not hardly ever."""
    costs = []
    for task, arms in results.items():
        if not {"aogpt", "encoder"} <= arms.keys():
            continue
        encoder, ours = arms["encoder"], arms["aogpt"]
        for decoder in (name for name in decoders_of(ours) if name in decoders_of(encoder)):
            shares = [share_of(arm, decoder) for arm in (ours, encoder)]
            steps = [mean_of(arm, decoder, "nfe") for arm in (ours, encoder)]
            few = min(share.value for share in shares) < TOO_FEW
            if few or steps[0] != steps[1] or compared(*shares) != "tie":
                continue
            ratios = []
            for key in ("token_forwards", "seconds"):
                pairs = zip(*(values_of(arm, decoder, key) for arm in (encoder, ours)), strict=True)
                ratios.append([theirs / own for theirs, own in pairs])
            costs.append(Cost(task, decoder, steps[0], shares, *ratios))
    return costs


def cost_table(costs: list[Cost]) -> list[str]:
    """Means over seeds with half their 95% intervals."""
    rows = []
    for cost in costs:
        cells = [f"{share.value:.1%}" for share in cost.shares]
        for ratios in (cost.inputs, cost.seconds):
            mean, reach = mean_and_reach(ratios)
            cells.append(f"{mean:.1f}" + f" +- {reach:.1f}" * (len(ratios) > 1))
        rows.append([cost.task, cost.decoder, f"{cost.nfe:.1f}", *cells])
    head = ["task", "decoded", "NFE", "aogpt", "encoder", "inputs, times", "seconds, times"]
    return markdown_table(head, rows, left=2) if rows else ["Nowhere."]


def cost_told(costs: list[Cost]) -> str:
    """The range of the table, in a sentence."""
    if not costs:
        return "- Nowhere does an encoder tie with AO-GPT in as many steps."
    ordered = sorted(costs, key=lambda cost: statistics.mean(cost.seconds))
    times = [statistics.mean(cost.seconds) for cost in ordered]
    least, most = (f"({cost.task}, {cost.decoder})" for cost in (ordered[0], ordered[-1]))
    return (
        f"- Where an encoder ties with AO-GPT in as many steps, it takes {times[0]:.1f} {least} to "
        f"{times[-1]:.1f} times {most} the seconds, with half of the decoders more than "
        f"{statistics.median(times):.1f} times."
    )


def conclusions(results: dict[str, dict]) -> list[str]:
    """What the tables come to, in sentences."""
    verdicts = {task: against_l2r(arms) for task, arms in results.items()}
    of_word = {
        word: ", ".join(task for task, found in verdicts.items() if found == word) or "nowhere"
        for word in ("wins", "tie", "loses", "unresolved")
    }
    far = []
    for task, arms in results.items():
        if verdicts[task] == "wins":
            ours, other = share_of(arms["aogpt"], ANY_ORDER), share_of(arms["gpt"], LEFT_TO_RIGHT)
            if ours.value > 0.95 and other.value < 0.5:
                far.append(f"{task} ({told_of(ours)} against {told_of(other)})")
    cells = [
        (meets_limit(arm, decoder), limit_of(arm, decoder), f"{task}, {name}, {decoder}")
        for task, arms in results.items()
        for name, arm in arms.items()
        for decoder in decoders_of(arm)
        if limit_of(arm, decoder) is not None
    ]
    not_met = "; ".join(cell for met, _, cell in cells if not met) or "none"
    together = [met for met, limit, _ in cells if limit < 1]
    return [
        "- Any order wins: {wins}. It ties: {tie}. It loses: {loses}. Unresolved: "
        "{unresolved}.".format(**of_word),
        f"- AO-GPT is right in more than 95%, and the plain GPT in less than half: "
        f"{', '.join(far) or 'nowhere'} (with two standard errors).",
        f"- What is possible is met in {sum(met for met, *_ in cells)} of {len(cells)} ways to "
        f"decode, and in {sum(together)} of the {len(together)} in which positions that are drawn "
        f"together make less than all right answers possible. Not met: {not_met}.",
        cost_told(costs_of(results)),
    ]


# ---- the figure and the page ---------------------------------------------------------------------


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


def figure(results: dict[str, dict]) -> bytes:
    """PNG: a panel for each task, exact match over NFE, a point with its 95% interval for each
    system (its colour) and decoder (its marker)."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    drawing, grid = new_figure(rows, columns, (4.6 * columns, 3.6 * rows + 0.5), squeeze=False)
    for axes in grid.flat[len(results) :]:
        axes.remove()
    for axes, (task, arms) in zip(grid.flat, results.items(), strict=False):
        for number, (name, arm) in enumerate(arms.items()):
            axes.plot([], [], "s", color=f"C{number}", label=name)
            of_kind: dict[str, list[tuple]] = {}
            for decoder in decoders_of(arm):
                share, reach = mean_and_reach(values_of(arm, decoder, "exact_match"))
                point = mean_of(arm, decoder, "nfe"), share, 0.0 if math.isnan(reach) else reach
                of_kind.setdefault(re.split(r"\W", decoder)[0], []).append(point)
            for kind, points in of_kind.items():
                x, y, bars = zip(*sorted(points), strict=True)
                style = {"marker": MARKERS.get(kind, "P"), "markersize": 5, "linewidth": 0.7}
                if len(decoders_of(arm)) == 1:  # that others would hide
                    style |= {"markersize": 9, "zorder": 5}
                axes.errorbar(x, y, yerr=bars, color=f"C{number}", alpha=0.7, capsize=2, **style)
        axes.set(title=task, xlabel="NFE", ylabel="exact match", ylim=(-0.05, 1.05))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for name, marker in MARKERS.items():
        grid.flat[0].plot([], [], marker, color="gray", label=name)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    drawing.legend(
        handles[-len(MARKERS) :], labels[-len(MARKERS) :], ncols=9, loc="outside lower center"
    )
    return png(drawing, dpi=120)


INTRODUCTION = """# Systems on tasks

    python -m studies.tasks --jobs 2        # train what is missing of all tasks, decode, write this page
    python -m studies.tasks star sudoku6    # of these
    python -m studies.tasks page            # this page, of what there is

Systems of equal size under one recipe, trained over seeds, and asked a thousand records (reversal:
a hundred) whose keys none of those has that they were trained on ([data](../docs/data.md)). Exact
match: all of an answer is right, mean over seeds with half its 95% interval; decoded greedily, but
copy, replace and shuffle at temperature 1, where what is *possible* for perfect conditionals is
known in closed form, and *met* if it is within three standard errors, or a hundredth of it. NFE:
passes that a record took part in; inputs: tokens that they were fed, a record; time: of one thread
of a CPU, a hundred records in flight, the systems one after the other. Decoders: *l2r* from left to
right, *random* in random order, *mdm* and *even* as masked diffusion in so many steps, the others
in the order of which the model is surest, and *speculative* in random order, which an encoder
cannot; a plain GPT goes from left to right. *Any order* is AO-GPT by confidence, one position a
step, against the plain GPT: it *wins* or *loses* if they differ by two standard errors and a
hundredth, *ties* if by less than five hundredths with as much to either side, and is else
*unresolved*. That a flexible order can also do harm is no new observation ("The Flexibility Trap",
arXiv 2601.15165). A sentence in the middle of a book's page is filled in by [E10](findings.md) of
the findings."""


def page(tasks: dict[str, TaskExperiment], results: dict[str, dict]) -> str:
    """results: the arms of each task, as `run_task` gives them."""
    first = next(iter(results.values()))
    sizes = ", ".join(f"{name} {arm['parameters']:,}" for name, arm in first.items())
    setting = next(iter(tasks.values())).experiment.setting
    lines = [INTRODUCTION, "", f"{setting} Parameters: {sizes}.", "", *summary_table(results), ""]
    lines += [*conclusions(results), "", "![exact match over NFE](tasks/tasks.png)", ""]
    lines += [
        "## What an encoder costs beside AO-GPT, where they tie",
        "",
        *cost_table(costs_of(results)),
        "",
    ]
    for task, arms in results.items():
        tuned = ", ".join(
            f"{name} {tuned_cell(arm['tuned'])}" + " (edge)" * arm["edge"]
            for name, arm in arms.items()
            if arm["tuned"]
        )
        commits = commits_of(run for arm in arms.values() for run in arm["runs"])
        tokens = {run["tokens"][-1] for arm in arms.values() for run in arm["runs"]}
        told = ", ".join(f"{n / 1e6:.1f}M" for n in sorted(tokens))
        lines += [f"## {task}: {tasks[task].says}", "", *task_table(arms), ""]
        chosen = f" Tuned: {tuned}." if tuned else ""
        lines += [f"{told} tokens.{chosen} Commit {commits}.", ""]
        if TASKS[task].board:
            file = f"tasks/{task}.html"
            lines += [f"[A page]({file}) on which some of them fill in, in AO-GPT's own order.", ""]
    if missing := [task for task in tasks if task not in results]:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join(lines).rstrip() + "\n"
