"""The pages of the experiments in results/findings, made from their JSON: no number or verdict on
them is written by hand. Texts name the numbers in them:

    {fast: random - fixed}         the difference of two run configs, with its 95% interval
    {fast: l2r10:eval_l2r}         a loss or measure of one, mean over seeds
    {fast: l2r10 each}             one a seed, in order of size
    {E20 fast: random - fixed}     of another experiment
"""

import functools
import re
import statistics

from aogpt.evaluation.text_measures import mean_and_half_width
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import read_results, read_toml
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.runs import ROOT
from studies.verdicts import (
    Claim,
    figure_of,
    judged,
    ratio_of,
    tokens_to,
    with_verdicts,
)

RESULTS = ROOT / "results" / "findings"
FEW = 4  # below that many seeds their values are shown, not a mean


@functools.cache
def titles() -> dict[str, dict[str, str]]:
    return read_toml(ROOT / "studies" / "configs" / "findings" / "titles.toml")


def title_of(kind: str) -> str:
    """A loss or figure in words: eval_random_m8 -> any order, 8 orders. A name without a known
    part, such as that of a run config, stays as it is."""

    def words_of(part: str) -> str:
        for pattern, words in titles()["parts"].items():
            if match := re.fullmatch(pattern, part):
                return words.format(*match.groups())
        return part

    parts = kind.split("_")
    words = [words_of(part) for part in parts]
    by_parts = kind if words == parts else ", ".join(filter(None, words))
    return titles()["names"].get(kind, by_parts)


# ---- numbers -------------------------------------------------------------------------------------


def reported(experiment: Experiment, found: dict) -> dict[str, dict[str, dict]]:
    """The run configs of each recipe without the runs of seeds that the rates were tuned on, if
    there are others: one seed with --quick is not tuned."""
    tuned_on = experiment.tuning_seeds

    def kept(entry: dict) -> dict:
        runs = [row for row in entry["runs"] if row.get("seed") not in tuned_on]
        return entry | {"runs": runs or entry["runs"]}

    return {
        recipe: {name: kept(entry) for name, entry in entries.items()}
        for recipe, entries in found["recipes"].items()
    }


def judgements(experiment: Experiment, found: dict) -> dict[str, list[dict]]:
    """The experiment's claims under each recipe, with the verdicts of the primary ones."""
    claims: dict[str, list[dict]] = {}
    for recipe, entries in reported(experiment, found).items():
        pairs = [
            (claim, judged(claim, experiment.kind, entries))
            for claim in experiment.claims
        ]
        claims[recipe] = [
            c | {"primary": recipe in claim.primary} for claim, c in pairs if c
        ]
    with_verdicts(
        [c for of_recipe in claims.values() for c in of_recipe if c["primary"]]
    )
    return claims


def value_of(row: dict, kind: str) -> float | None:
    found = figure_of(row, kind)
    return found.value if found else None


def mean_cell(values: list[float | None], form: str = ".3f") -> str:
    """A mean over seeds with the half-width of its 95% CI; of few seeds their values; a dash if a
    value is missing."""
    if not values or None in values:
        return "-"
    if len(values) < FEW:
        return ", ".join(f"{value:{form}}" for value in values)
    mean, half_width = mean_and_half_width(values)
    return f"{mean:{form}} ± {half_width:{form}}"


def difference_cell(claim: dict, form: str = "+.3f") -> str:
    if claim["mean"] is None:
        return "-"
    if claim["half_width"] is None or claim["seeds"] < FEW:
        return f"{claim['mean']:{form}} ({claim['seeds']} seed{'s' * (claim['seeds'] != 1)})"
    return f"{claim['mean']:{form}} ± {claim['half_width']:.3f}"


def mean_tokens_to(goal: float, rows: list[dict], kind: str) -> float | None:
    """Mean over runs; None if one of them does not reach it."""
    reached = [tokens_to(goal, row, kind) for row in rows]
    return None if None in reached else statistics.mean(reached)


def tuned_cell(entry: dict) -> str:
    """{"optim.lr": 0.001} -> "lr 0.001", and whether that is at the boundary of the grid."""
    words = ", ".join(
        f"{k.rpartition('.')[2]} {v:g}" for k, v in entry["tuned"].items()
    )
    return words + " (boundary)" * entry["at_boundary"]


def filled(
    text: str, experiment: Experiment | None = None, found: dict | None = None
) -> str:
    """A text with its numbers. Raises UserError for one that names what is not there."""

    def number(match: re.Match) -> str:
        name, recipe, sides = match.groups()
        of, results = (experiment, found) if not name else results_of(name.strip())
        entries = reported(of, results).get(recipe)
        kind = of.kind
        higher, _, lower = sides.removesuffix(" each").partition(" - ")
        claim = Claim("", lower or "0", higher)
        judgement = entries and judged(claim, kind, entries)
        if not judgement or judgement["mean"] is None:
            raise UserError(
                f"{of.name} has no {match[0]}; see its run configs and measures"
            )
        if lower:
            return difference_cell(judgement, ".3f")
        name, _, of_side = higher.partition(":")
        values = [value_of(row, of_side or kind) for row in entries[name]["runs"]]
        one_by_one = ", ".join(f"{value:.3f}" for value in sorted(values))
        return one_by_one if sides.endswith(" each") else mean_cell(values)

    return re.sub(r"\{(E\d+ )?([^{}:]+): ([^{}]+)\}", number, text)


@functools.cache
def results_of(name: str) -> tuple[Experiment, dict]:
    return load_experiment(name), read_results(
        RESULTS / f"{name}.json", "make it again"
    )


# ---- the page of an experiment -------------------------------------------------------------------


def page_of(experiment: Experiment, found: dict) -> list[str]:
    """Question, answer, figure, a table of at most five columns, primary claims, caveats."""
    e = experiment
    verdicts = []
    for recipe, claims in judgements(e, found).items():
        verdicts += [
            f"- *{title_of(recipe)}*: {verdict_line(claim)}"
            for claim in claims
            if claim["primary"]
        ]
    lines = [f"# {e.name}. {e.title}", ""]
    lines += [filled(e.answer, e, found).strip(), "", f"![{e.name}]({e.name}.png)", ""]
    lines += [*main_table(e, found), "", interval_of(reported(e, found)), ""]
    lines += [*verdicts, ""] if verdicts else []
    lines += [f"**Setting.** {e.setting}", ""]
    lines += [f"**Elsewhere.** {e.source}", ""] * bool(e.source)
    lines += [f"**Caveats.** {filled(e.caveats, e, found).strip()}", ""] * bool(
        e.caveats
    )
    again = f"`python -m studies.findings {e.name} --jobs 2`"
    return [*lines, f"Repeat it: {again}. [Details]({e.name}.details.md).", ""]


def verdict_line(claim: dict) -> str:
    """Return a primary claim with its difference, its p value after Holm's correction and its
    verdict; with its median difference where the verdict is from ranks."""
    difference = difference_cell(claim) + claim["unit"]
    test = ""
    if claim["ranks"] and claim["median"] is not None:
        difference += f" (median {claim['median']:+.3f})"
        test = " by ranks"
    p = "" if claim["p"] is None else f", Holm's p{test} {claim['p_holm']:.2g}"
    return f"{claim['says']}: {difference}{p}: **{claim['verdict']}**"


def interval_of(recipes: dict[str, dict]) -> str:
    """What the numbers of a table are over."""
    counts = sorted(
        {len(e["runs"]) for entries in recipes.values() for e in entries.values()}
    )
    told = " or ".join(map(str, counts))
    if counts[-1] < FEW:
        return f"{told} seeds, one by one."
    few = " (fewer than four: one by one)" if counts[0] < FEW else ""
    return f"±: 95% interval over {told} seeds{few}."


def main_table(experiment: Experiment, found: dict) -> list[str]:
    """Figures of each run config under each recipe: the compared one and, as far as there is room
    in four columns and for some 18 numbers, others."""
    recipes = reported(experiment, found)
    lines = []
    names = list(
        dict.fromkeys(name for entries in recipes.values() for name in entries)
    )
    room = max(1, min(4, 18 // len(names)) // len(recipes))
    kinds = list(dict.fromkeys([experiment.kind, *experiment.shown]))[:room]
    columns = [(recipe, kind) for recipe in recipes for kind in kinds]
    for name in names:
        cells = [
            mean_cell([value_of(row, kind) for row in recipes[recipe][name]["runs"]])
            if name in recipes[recipe]
            else ""
            for recipe, kind in columns
        ]
        described = next(e[name]["description"] for e in recipes.values() if name in e)
        lines.append([described or name, *cells])
    several = [len(recipes) > 1, len(columns) > len(recipes)]
    head = [
        ", ".join(
            title_of(one) for one, told in zip(column, several, strict=True) if told
        )
        for column in columns
    ]
    first = "" if all(several) or not several[0] else f"{title_of(columns[0][1])}, "
    return markdown_table([first + "nats per token", *head], lines)


def details_of(experiment: Experiment, found: dict) -> list[str]:
    """All figures, claims, rates tried and commits."""
    claims = judgements(experiment, found)
    lines = [f"# {experiment.name}: details", ""]
    for recipe, entries in reported(experiment, found).items():
        description = experiment.descriptions.get(recipe)
        lines += [
            f"## {title_of(recipe)}" + (f": {description}" if description else ""),
            "",
        ]
        lines += [*losses_table(experiment, entries), ""]
        lines += [*claims_table(claims[recipe]), ""] if claims[recipe] else []
        for ratio in (
            ratio_of(one, experiment.kind, entries) for one in experiment.ratios
        ):
            lines += (
                [f"{ratio['says']}: {mean_cell(ratio['values'])}", ""] if ratio else []
            )
    seeds = ", ".join(map(str, experiment.tuning_seeds))
    tuned = f"Rates are tuned on seeds {seeds}, which no table holds."
    return [*lines, f"{tuned} Commit {found['commit']}, torch {found['torch']}.", ""]


def losses_table(experiment: Experiment, entries: dict[str, dict]) -> list[str]:
    """A line for each run config: losses and measures, tokens to the goal, what was tuned."""
    main = experiment.kind
    goal = experiment.goal
    rows = [row for entry in entries.values() for row in entry["runs"]]
    kinds = list(dict.fromkeys([main, *experiment.shown]))
    columns = {kind: title_of(kind) for kind in kinds}
    if any("excess" in row["measured"] for row in rows):
        columns["excess"] = "above the entropy"
    head = [
        "run config",
        *columns.values(),
        *[f"tokens to {goal}"] * (goal is not None),
    ]
    head += ["parameters", "tuned", "losses of the values tried"]
    lines = []
    for name, entry in entries.items():
        cells = [
            mean_cell([value_of(row, kind) for row in entry["runs"]])
            for kind in columns
        ]
        if goal is not None:
            reached = mean_tokens_to(goal, entry["runs"], "training")
            cells.append("-" if reached is None else f"{reached / 1e6:.2f}M")
        tried = [
            ", ".join(f"{v:g}" for v in one["tuned"].values()) + f": {one['loss']:.3f}"
            for one in entry["tuning"]
        ]
        cells += [f"{entry['parameters']:,}", tuned_cell(entry), "; ".join(tried)]
        lines.append([name, *cells])
    return markdown_table(head, lines)


def claims_table(claims: list[dict]) -> list[str]:
    """A line for each claim: the difference without the margin that its p values allow for, p by
    Welch's test and by ranks, and of primary claims Holm's p of the one that their verdict is
    from."""
    lines = []
    for claim in claims:
        welch, ranks = (
            "" if claim[key] is None else f"{claim[key]:.2g}" for key in ("p", "p_rank")
        )
        holm = ""
        if "p_holm" in claim:
            holm = f"{claim['p_holm']:.2g}" + (" (ranks)" if claim["ranks"] else "")
        difference = difference_cell(claim) + claim["unit"]
        verdict = claim["verdict"] or "also looked at"
        lines.append([claim["says"], difference, welch, ranks, holm, verdict])
    head = ["claim", "difference", "p (Welch)", "p (ranks)", "Holm's p", "verdict"]
    return markdown_table(head, lines)


# ---- the page of all -----------------------------------------------------------------------------


def overview() -> str:
    """results/findings/README.md: studies/configs/findings/page.md with a row an experiment."""
    rows = []
    missing = []
    for name in experiment_names():
        if not (RESULTS / f"{name}.json").exists():
            missing.append(name)
            continue
        experiment, found = results_of(name)
        told, says = (
            filled(experiment.row.get(key, ""), experiment, found)
            for key in ("found", "says")
        )
        link = f"[{experiment.title}]({name}.md)"
        rows.append([link, told, says, how_sure(experiment, found)])
    head = ["question", "found, by recipe", "elsewhere", "how sure"]
    table = markdown_table(head, rows, left=4)
    text = filled((CONFIGS / "page.md").read_text())
    if missing:
        table += ["", f"Not run yet: {', '.join(missing)}."]
    return text.replace("TABLE", "\n".join(table))


def how_sure(experiment: Experiment, found: dict) -> str:
    """The verdicts on the primary claims, or the number of seeds that a look is of."""
    claims = [
        c for of in judgements(experiment, found).values() for c in of if c["primary"]
    ]
    if not claims:
        runs = [
            e["runs"]
            for es in reported(experiment, found).values()
            for e in es.values()
        ]
        return f"looked at, {min(map(len, runs))} seeds"
    words = [claim["verdict"] for claim in claims]
    counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    return f"{', '.join(counts)}; {claims[0]['seeds']} seeds"
