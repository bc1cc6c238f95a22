"""The pages of the experiments in results/findings, made from the rows of their runs:
no number or verdict on them is written by hand. Texts name the numbers in them:

    {fast: random - fixed}         difference of two run configs, with its 95% interval
    {fast: l2r10:eval_l2r}         a loss or measure of one, mean over seeds
    {star: rotary}                 of a question of success: how many runs succeed
    {fast: l2r10 each}             one a seed, in order of size
    {fast: l2r10 range}            the least and the largest: "2.01 to 2.06"
    {fast: l2r10:parameters}       parameters of one; mflops: of a trained token
    {fast: a - b, 4 digits}        three digits after the point unless it says otherwise
    {fast: a:random@0.5 - b}       a term of a difference after a share of the tokens
    {fast: a - b, p}               its p value by Welch's test, of successes by
                                   Fisher's, not corrected
    {fast: a - b, p by ranks}      by ranks, not corrected
    {fast: a - b, Holm's p}        of the marked claim of these two sides, corrected
    {fast: a - b, verdict}         the verdict on the marked claim that a is above b
    {fast: a - b, seeds 8 to 15}   of these seeds alone
    {E20 fast: random - fixed}     of another experiment
    <<it is {fast: a} || not run>> a passage, or another one as long as a run config
                                   that it names has not all its runs
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import read_toml
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.measures import mean_and_half_width
from studies.runner import MissingRow, Recipes, Results, Runner, commits_of, with_best
from studies.runs import ROOT
from studies.verdicts import (
    CONFIRMED,
    OPPOSITE,
    Claim,
    deciding_p,
    figure_of,
    is_number,
    judged,
    tokens_to,
    with_verdicts,
)

RESULTS = ROOT / "results" / "findings"
FRONT = {"front.md": "README.md", "audit.md": "audit.md"}
"""The pages in results/ on all experiments, by their texts in CONFIGS."""
TOKENS = {
    "reversal": "character",
    "books_bytes": "byte",
    "shuffled": "byte",
    "chorales": "note",
    "sudoku6": "cell",
}
"""What a token of prepared data is, by folder, where it has a name."""
CONTRARY = {CONFIRMED: OPPOSITE, OPPOSITE: CONFIRMED}
"""The verdict on the contrary of a claim, where it is another one."""
SHARE = "share of test records"
FEW = 4  # below that many seeds their values are shown, not a mean

Speeds = dict[str, dict[str, list[float]]]
"""Trained tokens a second of each repetition, by recipe and run config."""


@functools.cache
def titles() -> dict[str, dict[str, str]]:
    return read_toml(ROOT / "studies" / "configs" / "findings" / "titles.toml")


def title_of(kind: str) -> str:
    """Return a loss or figure in words: eval_random_m8 -> any order, 8 orders. A name
    without a known part, such as that of a run config, stays as it is."""

    def words_of(part: str) -> str:
        for pattern, words in titles()["parts"].items():
            if match := re.fullmatch(pattern, part):
                return words.format(*match.groups())
        return part

    names = titles()["names"]
    if kind in names:
        return names[kind]
    parts = kind.split("_")
    words = [words_of(part) for part in parts]
    if words == parts:
        return kind
    return ", ".join(filter(None, words))


# ---- numbers -------------------------------------------------------------------------


@functools.cache
def load_results(name: str) -> tuple[Experiment, Recipes]:
    """Return an experiment and its reported results, made of the rows of its runs:
    those of the run configs all of whose runs are there. Raises MissingRow if there is
    none."""
    experiment = load_experiment(name)
    file = RESULTS / f"{name}.runs.jsonl"
    rows = Results(file, complete=True)
    runner = Runner(experiment, rows, partial=True)
    recipes = runner.train(experiment.seeds)
    for recipe in list(recipes):
        if not recipes[recipe]:
            del recipes[recipe]
    if not recipes:
        raise MissingRow(f"{file} has not all runs of any run config")
    return experiment, reported(experiment, recipes)


def not_run(experiment: Experiment, recipes: Recipes) -> list[str]:
    """Return the titles of the recipes, and of the run configs of the others, without
    results."""
    titles = []
    for recipe, run_configs in experiment.recipes.items():
        if recipe not in recipes:
            titles.append(title_of(recipe))
            continue
        for name, one in run_configs.items():
            if name not in recipes[recipe]:
                titles.append(f"{title_of(recipe)}: {one.description or name}")
    return titles


def has_results(name: str) -> bool:
    try:
        load_results(name)
    except MissingRow:
        return False
    return True


def reported(experiment: Experiment, recipes: Recipes) -> Recipes:
    """Return results without the runs of seeds that the rates were tuned on, unless
    there are no others: one seed with --quick is not tuned."""
    seeds = experiment.tuning_seeds
    result: Recipes = {}
    for recipe, entries in recipes.items():
        result[recipe] = {}
        for name, entry in entries.items():
            runs = entry["runs"]
            reported_runs = [run for run in runs if run.get("seed") not in seeds]
            result[recipe][name] = dict(entry)
            result[recipe][name]["runs"] = reported_runs or runs
    return result


def judgements(experiment: Experiment, recipes: Recipes) -> dict[str, list[dict]]:
    """Return the experiment's claims under each recipe, with the verdicts of the
    primary ones."""
    claims: dict[str, list[dict]] = {}
    for recipe, entries in recipes.items():
        claims[recipe] = []
        all_entries = with_best(experiment.best_of, entries)
        for claim in experiment.claims:
            judgement = judged(claim, experiment.kind, all_entries)
            if judgement:
                judgement["primary"] = recipe in claim.primary
                claims[recipe].append(judgement)
    tests = sum(len(claim.primary) for claim in experiment.claims)
    with_verdicts(primary_of(claims), tests)
    return claims


def primary_of(claims: dict[str, list[dict]]) -> list[dict]:
    primary = []
    for under_recipe in claims.values():
        primary += [claim for claim in under_recipe if claim["primary"]]
    return primary


def value_of(row: dict, kind: str) -> float | None:
    figure = figure_of(row, kind)
    return figure.value if figure else None


def mean_cell(values: list[float | None], form: str = ".3f") -> str:
    """Return a mean over seeds with the half-width of its 95% CI; of few seeds their
    values; a dash if a value is missing."""
    if not values or None in values:
        return "-"
    if len(values) < FEW:
        return ", ".join(f"{value:{form}}" for value in values)
    mean, half_width = mean_and_half_width(values)
    return f"{mean:{form}} ± {half_width:{form}}"


def form_of(kind: str) -> str:
    """Return how a figure is printed: right answers as a percentage, gains of
    ensembles, which may be small, with five digits."""
    if is_share(kind):
        return ".1%"
    return ".5f" if kind.startswith("gain_") else ".3f"


def unit_of(
    kind: str, experiment: Experiment, recipe: str, names: Iterable[str]
) -> str:
    """Return the unit of a figure of some run configs of a recipe; "" where the
    figure's title says it."""
    if is_share(kind):
        return SHARE
    if kind.startswith("tokens_a_pass"):
        return ""
    return f"nats per {token_of(experiment, recipe, names)}"


def token_of(experiment: Experiment, recipe: str, names: Iterable[str]) -> str:
    """Return what a token of some run configs is, such as "byte"; "token" where that
    differs among them."""
    tokens = set()
    for name in names:
        run_config = experiment.recipes[recipe][name]
        folder = experiment.base.get("data", {}).get("folder", "")
        folder = run_config.changes.get("data.folder", folder)
        tokens.add(TOKENS.get(Path(folder).name, "token"))
    if len(tokens) > 1:
        return "token"
    return tokens.pop()


def is_share(kind: str) -> bool:
    return kind.startswith("exact_")


def figure_cell(experiment: Experiment, kind: str, rows: list[dict]) -> str:
    """Return a figure of some runs: the number that succeed if claims are about that,
    or else the mean."""
    values = [value_of(row, kind) for row in rows]
    if experiment.success is not None and kind == experiment.kind:
        measured = [value for value in values if value is not None]
        successes = sum(value >= experiment.success for value in measured)
        return f"{successes} of {len(values)} runs"
    return mean_cell(values, form_of(kind))


def difference_cell(claim: dict, form: str = "+.3f") -> str:
    if claim["mean"] is None:
        return "-"
    if claim["successes"]:
        higher, lower = claim["successes"]
        return f"{higher} against {lower} of {claim['seeds']} runs"
    if claim["half_width"] is None or claim["seeds"] < FEW:
        seeds = "seed" if claim["seeds"] == 1 else "seeds"
        return f"{claim['mean']:{form}} ({claim['seeds']} {seeds})"
    unsigned = form.lstrip("+")
    return f"{claim['mean']:{form}} ± {claim['half_width']:{unsigned}}"


def mean_tokens_to(goal: float, rows: list[dict], kind: str) -> float | None:
    """Return the mean over runs; None if one of them does not reach it."""
    reached = [tokens_to(goal, row, kind) for row in rows]
    return None if None in reached else statistics.mean(reached)


def tuned_cell(entry: dict) -> str:
    """Return "lr 0.001" for {"optim.lr": 0.001}, with whether that is at the boundary
    of the grid, of which run config else it is the best value, and whether nothing was
    tuned. A retired entry of a leaderboard does not know the last two."""
    values = []
    for key, value in entry["tuned"].items():
        values.append(f"{key.rpartition('.')[2]} {value:g}")
    words = ", ".join(values)
    if words and entry.get("tuning") == []:
        return f"{words} (not tuned)"
    if entry["at_boundary"]:
        words += " (boundary)"
    if entry.get("tuned_as"):
        words += f" (as {entry['tuned_as']})"
    return words


def cost_cell(entry: dict, kind: str) -> str:
    """Return the parameters of a run config, or its MFLOPs a trained token."""
    if kind == "parameters":
        return f"{entry['parameters']:,}"
    return f"{entry['flops'] / 1e6:.2f}"


NUMBER = re.compile(r"\{(E\d+ )?([^{}:]+): ([^{},]+)((?:, [^{},]+)*)\}")
PASSAGE = re.compile(r"<<(.*?)\|\|(.*?)>>", re.S)
THEMES = (
    "orders",
    "share of left to right",
    "encoder or decoder",
    "conditioning",
    "starts and data",
)
"""Of experiments, in the order of the page of all."""
JUDGED = ("p", "p by ranks", "Holm's p", "verdict")


@dataclass(frozen=True)
class Shown:
    """What a text wants to show of a number that it names."""

    digits: int = 3  # after the point
    judged: str = ""  # one of JUDGED, in place of the number
    margin: float = 0.0  # of the claim that is judged
    seeds: range | None = None  # of these runs alone


def shown_by(words: str) -> Shown:
    """Return what options such as ", 4 digits, seeds 8 to 15" ask for; ", margin 0.02"
    is of a claim with one. Raises UserError for an unknown one."""
    shown = Shown()
    for option in words.split(", ")[1:]:
        if digits := re.fullmatch(r"(\d) digits", option):
            shown = replace(shown, digits=int(digits[1]))
        elif seeds := re.fullmatch(r"seeds (\d+) to (\d+)", option):
            first = int(seeds[1])
            last = int(seeds[2])
            if first > last or shown.seeds is not None:
                raise UserError(f"a number of a text cannot be of {option}")
            shown = replace(shown, seeds=range(first, last + 1))
        elif margin := re.fullmatch(r"margin (-?\d+\.\d+)", option):
            shown = replace(shown, margin=float(margin[1]))
        elif option in JUDGED:
            shown = replace(shown, judged=option)
        else:
            raise UserError(f"a number of a text has no option {option!r}")
    return shown


def filled(
    text: str, experiment: Experiment | None = None, recipes: Recipes | None = None
) -> str:
    """Return a text with its numbers. Raises UserError for one that names what is not
    there, MissingRow if its runs are missing."""

    def number(match: re.Match) -> str:
        name, recipe, sides, options = match.groups()
        source = experiment
        results = recipes
        if name:
            source, results = load_results(name.strip())
        shown = shown_by(options)
        if shown.seeds is not None:
            results = of_seeds(results, shown.seeds)
        entries = with_best(source.best_of, results.get(recipe, {}))
        higher, _, lower = of_seeds_or_mean(sides)[0].partition(" - ")
        for side in (higher, lower):
            runs = entries.get(side.partition(":")[0], {}).get("runs", ())
            if not all(run["tokens"] for run in runs):
                raise UserError(
                    f"{source.name}: a run behind {match[0]} diverged; say so in words"
                )
        cell = None
        if entries:
            cell = cell_of(sides, shown, source, recipe, results)
        if cell is None:
            declared = {*source.recipes.get(recipe, {}), *source.best_of}
            names = {side.partition(":")[0] for side in (higher, lower) if side}
            is_declared = all(name in declared or is_number(name) for name in names)
            all_run = all(name in entries or is_number(name) for name in names)
            error = MissingRow if is_declared and not all_run else UserError
            raise error(
                f"{source.name} has no {match[0]}; see its run configs and measures"
            )
        return cell

    def passage(match: re.Match) -> str:
        with_numbers, otherwise = match.groups()
        try:
            return NUMBER.sub(number, with_numbers).strip()
        except MissingRow:
            return otherwise.strip()

    return NUMBER.sub(number, PASSAGE.sub(passage, text))


def cell_of(
    sides: str, shown: Shown, experiment: Experiment, recipe: str, recipes: Recipes
) -> str | None:
    """Return a number of a text; None if there is no such number."""
    entries = with_best(experiment.best_of, recipes[recipe])
    sides, seeds = of_seeds_or_mean(sides)
    higher, _, lower = sides.partition(" - ")
    run_config, _, kind = higher.partition(":")
    if shown.judged and not lower or shown.margin and not shown.judged:
        return None
    if kind in ("parameters", "mflops") and run_config in entries:
        return cost_cell(entries[run_config], kind)
    if shown.judged in ("Holm's p", "verdict"):
        return marked_cell(shown, higher, lower, experiment, recipe, recipes)
    # counts of runs that succeed are compared by Fisher's test
    success = experiment.success if lower and ":" not in sides else None
    claim = Claim("", lower or "0", higher, margin=shown.margin, success=success)
    judgement = judged(claim, experiment.kind, entries)
    if not judgement or judgement["mean"] is None:
        return None
    if shown.judged:
        p = judgement["p_rank" if shown.judged == "p by ranks" else "p"]
        return p_cell(p) or None
    form = f".{shown.digits}f"
    if lower:
        return difference_cell(judgement, form)
    rows = entries[run_config]["runs"]
    values = [value_of(row, kind or experiment.kind) for row in rows]
    if seeds == "each":
        return ", ".join(f"{value:{form}}" for value in sorted(values))
    if seeds == "range":
        return f"{min(values):{form}} to {max(values):{form}}"
    if experiment.success is not None and not kind:
        return figure_cell(experiment, experiment.kind, rows)
    return mean_cell(values, form)


def of_seeds_or_mean(sides: str) -> tuple[str, str]:
    """Return the sides of a number, and how its seeds are shown: "each", "range", or ""
    for their mean."""
    for seeds in ("each", "range"):
        if sides.endswith(f" {seeds}"):
            return sides.removesuffix(f" {seeds}"), seeds
    return sides, ""


def of_seeds(recipes: Recipes, seeds: range) -> Recipes:
    """Return results of these seeds alone, without the run configs that lack one."""
    result: Recipes = {}
    for recipe, entries in recipes.items():
        result[recipe] = {}
        for name, entry in entries.items():
            runs = [run for run in entry["runs"] if run["seed"] in seeds]
            if len(runs) == len(seeds):
                result[recipe][name] = {**entry, "runs": runs}
    return result


def marked_cell(
    shown: Shown,
    higher: str,
    lower: str,
    experiment: Experiment,
    recipe: str,
    recipes: Recipes,
) -> str | None:
    """Return Holm's p of the marked claim of two sides with this margin, or the verdict
    on the statement that `lower` is the lower one; None if there is none. Without a
    margin the claim may say the contrary, with one it is no claim."""
    turned = {}
    for claim in experiment.claims:
        if claim.margin == shown.margin:
            if (claim.higher, claim.lower) == (higher, lower):
                turned[claim.says] = False
            elif (claim.higher, claim.lower) == (lower, higher) and not claim.margin:
                turned[claim.says] = True
    for claim in judgements(experiment, recipes)[recipe]:
        if not claim["primary"] or claim["says"] not in turned:
            continue
        if shown.judged == "verdict":
            verdict = claim["verdict"]
            is_turned = turned[claim["says"]]
            return CONTRARY.get(verdict, verdict) if is_turned else verdict
        if deciding_p(claim) is not None:
            return p_cell(claim["p_holm"])
    return None


# ---- the page of an experiment -------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """What one page is about: an experiment, or a recipe of it that asks a question of
    its own."""

    name: str  # of its file, without the suffix
    experiment: Experiment  # with the texts of the page and its recipes alone
    recipes: Recipes


def pages_of(experiment: Experiment, recipes: Recipes) -> list[Page]:
    """Return the pages of an experiment: one for each of its parts that has results, or
    one for all of it."""
    if not experiment.parts:
        return [Page(experiment.name, experiment, recipes)]
    result = []
    for recipe, texts in experiment.parts.items():
        if recipe in recipes:
            name = f"{experiment.name}.{recipe}"
            own = {recipe: experiment.recipes[recipe]}
            part = replace(experiment, recipes=own, **texts)
            result.append(Page(name, part, {recipe: recipes[recipe]}))
    return result


def page_of(page: Page, claims: dict[str, list[dict]]) -> list[str]:
    """Return the lines of a page: question, answer in a sentence and with its numbers,
    figure, a table of at most five columns, primary claims, caveats. claims: what
    `judgements` returns of the whole experiment, whose claims are corrected
    together."""
    e = page.experiment
    recipes = page.recipes
    answer = filled(e.answer, e, recipes)
    lines = [f"# {e.name}. {e.title}", ""]
    if e.short:
        lines += [f"**{e.short}**", ""]
    lines += [answer.strip(), ""]
    if e.figure_on_page:
        lines += [f"![{e.name}]({page.name}.png)", ""]
    lines += [*main_table(e, recipes), "", interval_of(recipes), ""]
    if e.equal_time:
        speeds, costs = read_speeds(e.name)
        lines += equal_time_tables(e, recipes, speeds)
        lines += decoding_tables(e, costs)
    verdicts = []
    for recipe in recipes:
        for claim in claims[recipe]:
            if claim["primary"]:
                verdicts.append(f"- *{title_of(recipe)}*: {verdict_line(claim)}")
    if verdicts:
        lines += [*verdicts, ""]
    if missing := not_run(e, recipes):
        lines += [f"**Not run yet.** {'; '.join(missing)}.", ""]
    lines += [f"**Setting.** {e.setting.strip()}", ""]
    if e.source:
        lines += [f"**Elsewhere.** {e.source.strip()}", ""]
    if e.caveats:
        lines += [f"**Caveats.** {filled(e.caveats, e, recipes).strip()}", ""]
    return [*lines, "[How to read and repeat this page](README.md).", ""]


def verdict_line(claim: dict) -> str:
    """Return a primary claim with its difference, its p value after Holm's correction
    and its verdict; with its median difference where the verdict is from ranks."""
    difference = difference_cell(claim) + claim["unit"]
    test = ""
    if claim["ranks"] and claim["median"] is not None:
        difference += f" (median {claim['median']:+.3f})"
        test = " by ranks"
    if claim["successes"]:
        test = " by Fisher's test"
    p = "" if claim["p"] is None else f", Holm's p{test} {claim['p_holm']:.2g}"
    line = f"{claim['says']}: {difference}{p}: **{claim['verdict']}**"
    if claim["no_verdict"]:
        line += f", {claim['no_verdict']}"
    return line


def interval_of(recipes: Recipes) -> str:
    """Return what the numbers of a table are over."""
    counts = set()
    for entries in recipes.values():
        for entry in entries.values():
            counts.add(len(entry["runs"]))
    words = " or ".join(map(str, sorted(counts)))
    if max(counts) < FEW:
        return f"{words} seeds, one by one."
    if min(counts) < FEW:
        words += " seeds (fewer than four: one by one)"
    else:
        words += " seeds"
    return f"±: 95% interval over {words}."


def main_table(experiment: Experiment, recipes: Recipes) -> list[str]:
    """Return the figures of each run config under each recipe: the compared one and, as
    far as there is room in five columns, others that some run has."""
    descriptions = {}
    for entries in recipes.values():
        for name, entry in entries.items():
            descriptions.setdefault(name, entry["description"] or name)
    room = max(1, 5 // len(recipes))
    kinds = [experiment.kind]
    for kind in experiment.shown:
        if kind not in kinds and is_measured(kind, recipes):
            kinds.append(kind)
    kinds = kinds[:room]
    columns = [(recipe, kind) for recipe in recipes for kind in kinds]
    lines = []
    for name, description in descriptions.items():
        line = [description]
        for recipe, kind in columns:
            cell = ""
            if name in recipes[recipe]:
                cell = figure_cell(experiment, kind, recipes[recipe][name]["runs"])
            line.append(cell)
        lines.append(line)
    units = []
    for recipe, kind in columns:
        units.append(unit_of(kind, experiment, recipe, recipes[recipe]))
    same_unit = len(set(units)) == 1
    head = []
    for (recipe, kind), unit in zip(columns, units, strict=True):
        words = []
        if len(recipes) > 1:
            words.append(title_of(recipe))
        if len(kinds) > 1:
            words.append(title_of(kind))
        if not same_unit:
            words.append(unit)
        head.append(", ".join(filter(None, words)))
    corner = []
    if len(recipes) > 1 and len(kinds) == 1:
        corner.append(title_of(kinds[0]))
    if same_unit:
        corner.append(units[0])
    return markdown_table([", ".join(corner), *head], lines)


def is_measured(kind: str, recipes: Recipes) -> bool:
    for entries in recipes.values():
        for entry in entries.values():
            if any(figure_of(row, kind) for row in entry["runs"]):
                return True
    return False


def equal_time_tables(
    experiment: Experiment, recipes: Recipes, speeds: Speeds
) -> list[str]:
    """Return a table for each recipe: what each run config costs, its loss, and the
    loss of the run config that stands for it with fewer tokens, which takes a share of
    the operations and of the time of the first run config. The columns of such
    stand-ins are left out where there are none."""
    first = next(iter(experiment.equal_time))
    has_parts = any(name != other for name, other in experiment.equal_time.items())
    lines = [
        "**What each costs** ([how it is measured](README.md#what-each-costs)).",
        "",
    ]
    head = ["parameters", "MFLOPs a token", "time a token", "all tokens"]
    if has_parts:
        head += ["half of the tokens", "at equal operations, time"]
    for recipe, entries in recipes.items():
        rows = []
        for name, other in experiment.equal_time.items():
            if name not in entries:
                continue
            entry = entries[name]
            times = times_beside(speeds.get(recipe, {}), name, first)
            time = "not measured"
            if times:
                time = spread_cell(times)
            part = ""
            on_line = ""
            if other != name and {first, other} <= entries.keys():
                runs = entries[other]["runs"]
                loss = figure_cell(experiment, experiment.kind, runs)
                tokens, operations = costs_beside(entries[other], entries[first])
                losses = []
                for rows_of_runs in (runs, entry["runs"]):
                    values = [value_of(row, experiment.kind) for row in rows_of_runs]
                    losses.append(statistics.fmean(values))
                at_operations = loss_at(*losses, tokens, tokens / operations)
                share = "not measured"
                at_time = "not measured"
                if times:
                    slower = statistics.median(times)
                    share = f"{tokens * slower:.2f}"
                    at_time = f"{loss_at(*losses, tokens, 1 / slower):.3f}"
                part = f"{loss} ({operations:.2f}, {share})"
                on_line = f"{at_operations:.3f}, {at_time}"
            row = [
                options_of(experiment, recipe, name),
                cost_cell(entry, "parameters"),
                cost_cell(entry, "mflops"),
                time,
                figure_cell(experiment, experiment.kind, entry["runs"]),
            ]
            rows.append([*row, part, on_line] if has_parts else row)
        title = f"{title_of(recipe)}: {title_of(experiment.kind)}"
        lines += markdown_table([title, *head], rows)
        lines.append("")
    return lines


def decoding_tables(experiment: Experiment, costs: dict[str, dict]) -> list[str]:
    """Return a table for each recipe whose memory and decoding were measured; times
    are beside the first run config's. costs: by recipe and run config, the fields of
    `Costs`."""
    first = next(iter(experiment.equal_time))
    lines = []
    for recipe, by_name in costs.items():
        samples = by_name[first]["samples"]
        head = [title_of(recipe), "training step, MB", "decoding, MB"]
        for steps in by_name[first]["steps"]:
            head.append(f"time of {samples} samples in {steps} steps")
        rows = []
        for name, own in by_name.items():
            row = [options_of(experiment, recipe, name)]
            for key in ("training_bytes", "decoding_bytes"):
                row.append(f"{own[key] / 1e6:.1f}")
            pairs = zip(own["seconds"], by_name[first]["seconds"], strict=True)
            for seconds, seconds_of_first in pairs:
                times = [a / b for a, b in zip(seconds, seconds_of_first, strict=True)]
                row.append(spread_cell(times))
            rows.append(row)
        lines += [*markdown_table(head, rows), ""]
    return lines


def spread_cell(values: list[float]) -> str:
    """Return the median, with the least and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def costs_beside(part: dict, other: dict) -> tuple[float, float]:
    """Return the tokens and the operations of a run, as shares of those of another
    one."""
    tokens = part["runs"][0]["tokens"][-1] / other["runs"][0]["tokens"][-1]
    return tokens, tokens * part["flops"] / other["flops"]


def loss_at(part: float, whole: float, part_share: float, share: float) -> float:
    """Return the loss at a share of the tokens, on the line through the losses at
    `part_share` and at all of them, in the logarithm of the tokens."""
    return whole + (part - whole) * math.log(share) / math.log(part_share)


def times_beside(speeds: dict[str, list[float]], name: str, first: str) -> list[float]:
    """Return the time a token of a run config, divided by that of the first one, of
    each repetition; none where it was not measured."""
    pairs = zip(speeds.get(first, []), speeds.get(name, []), strict=False)
    return [first_speed / speed for first_speed, speed in pairs]


def read_speeds(name: str) -> tuple[Speeds, dict[str, dict]]:
    """Return the trained tokens a second of an experiment's run configs, measured in
    turn, and their memory and decoding (`Costs`), by recipe; none where they were not
    measured."""
    file = RESULTS / f"{name}.speeds.json"
    if not file.exists():
        return {}, {}
    measured = json.loads(file.read_text())
    return measured["tokens_per_second"], measured.get("costs", {})


def options_of(experiment: Experiment, recipe: str, name: str) -> str:
    """Return the options of train.py by which a run config is conditioned on its
    target."""
    run_config = experiment.recipes[recipe][name]
    model = experiment.config(recipe, run_config, 0, run_config.untuned).model
    if model.attention == "full":
        return "`--model.target none --model.attention full`"
    return f"`--model.target {model.target} --model.position {model.position}`"


def details_of(experiment: Experiment, recipes: Recipes) -> list[str]:
    """Return all figures, claims, rates tried and commits."""
    claims = judgements(experiment, recipes)
    lines = [f"# {experiment.name}: details", ""]
    rows = []
    is_tuned = False
    for recipe, entries in recipes.items():
        title = title_of(recipe)
        if description := experiment.descriptions.get(recipe):
            title += f": {description}"
        lines += [f"## {title}", "", *losses_table(experiment, entries), ""]
        if claims[recipe]:
            lines += [*claims_table(claims[recipe]), ""]
        for entry in entries.values():
            rows += entry["runs"]
            if entry["tuning"]:
                is_tuned = True
    seeds = ", ".join(map(str, experiment.tuning_seeds))
    tuning = f"Rates are tuned on seeds {seeds}, which no table holds."
    if not is_tuned:
        tuning = "Nothing was tuned: rates stand in the file or are a grid's middle."
    return [*lines, f"{tuning} Commit {commits_of(rows)}.", ""]


def losses_table(experiment: Experiment, entries: dict[str, dict]) -> list[str]:
    """Return a line for each run config: losses and measures, tokens to the goal, what
    was tuned."""
    main = experiment.kind
    goal = experiment.goal
    rows = [row for entry in entries.values() for row in entry["runs"]]
    kinds = list(dict.fromkeys([main, *experiment.shown]))
    columns = {kind: title_of(kind) for kind in kinds}
    if any("excess" in row["measured"] for row in rows):
        columns["excess"] = "above the entropy"
    head = ["run config", *columns.values()]
    if goal is not None:
        head.append(f"tokens to {goal}")
    head += ["parameters", "tuned", "losses of the values tried"]
    lines = []
    for name, entry in entries.items():
        cells = [figure_cell(experiment, kind, entry["runs"]) for kind in columns]
        if goal is not None:
            reached = mean_tokens_to(goal, entry["runs"], "training")
            cells.append("-" if reached is None else f"{reached / 1e6:.2f}M")
        tried = []
        for one in entry["tuning"]:
            values = ", ".join(f"{value:g}" for value in one["tuned"].values())
            tried.append(f"{values}: {one['loss']:.3f}")
        cells += [f"{entry['parameters']:,}", tuned_cell(entry), "; ".join(tried)]
        lines.append([name, *cells])
    return markdown_table(head, lines)


def claims_table(claims: list[dict]) -> list[str]:
    """Return a line for each claim: the difference without the margin that its p values
    allow for, p by Welch's test (of successes Fisher's) and by ranks, and of primary
    claims Holm's p of the one that their verdict is from."""
    lines = []
    for claim in claims:
        welch = p_cell(claim["p"])
        if claim["successes"]:
            welch += " (Fisher)"
        ranks = p_cell(claim["p_rank"])
        holm = p_cell(claim.get("p_holm"))
        if holm and claim["ranks"]:
            holm += " (ranks)"
        difference = difference_cell(claim) + claim["unit"]
        verdict = claim["verdict"] or "observed"
        lines.append([claim["says"], difference, welch, ranks, holm, verdict])
    head = ["claim", "difference", "p (Welch)", "p (ranks)", "Holm's p", "verdict"]
    return markdown_table(head, lines)


def p_cell(p: float | None) -> str:
    """Return a p value: where limits are near with three digits after the point."""
    if p is None:
        return ""
    return f"{p:.3f}" if 0.01 <= p < 0.2 else f"{p:.2g}"


# ---- the page of all -----------------------------------------------------------------


def overview() -> str:
    """Return results/findings/README.md: studies/configs/findings/page.md with a row
    for each experiment, by theme."""
    rows: dict[str, list[list[str]]] = {theme: [] for theme in THEMES}
    missing = []
    partial = []
    for name in experiment_names():
        if not has_results(name):
            missing.append(f"- {name}: {load_experiment(name).title}")
            continue
        experiment, recipes = load_results(name)
        if parts := not_run(experiment, recipes):
            partial.append(f"{name} (not yet: {'; '.join(parts)})")
        claims = judgements(experiment, recipes)
        for page in pages_of(experiment, recipes):
            row = page.experiment.row
            link = f"[{page.experiment.title}]({page.name}.md)"
            answer = filled(row.get("found", ""), page.experiment, page.recipes)
            rows[row["theme"]].append([link, answer, how_sure(page, claims)])
    head = ["", "question", "found", "how sure"]
    lines = []
    for theme, of_theme in rows.items():
        name = f"**{theme}**"
        for row in of_theme:
            lines.append([name, *row])
            name = ""
    table = markdown_table(head, lines, left=4)
    text = filled((CONFIGS / "page.md").read_text())
    if missing:
        table += [
            "",
            "Claims are written for these, and they are not run yet:",
            "",
            *missing,
        ]
    if partial:
        table += ["", f"Partly run: {', '.join(partial)}."]
    return text.replace("TABLE", "\n".join(table))


def how_sure(page: Page, all_claims: dict[str, list[dict]]) -> str:
    """Return the verdicts on the primary claims, or the number of seeds that a look is
    of. all_claims: as in `page_of`."""
    claims = primary_of({recipe: all_claims[recipe] for recipe in page.recipes})
    if not claims:
        counts = []
        for entries in page.recipes.values():
            for entry in entries.values():
                counts.append(len(entry["runs"]))
        return f"observed, {min(counts)} seeds"
    words = [claim["verdict"] for claim in claims]
    counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    seeds = " or ".join(map(str, sorted({claim["seeds"] for claim in claims})))
    text = f"{', '.join(counts)}; {seeds} seeds"
    if limit := page.experiment.row.get("limit"):
        text += f"; {limit}"
    return text
