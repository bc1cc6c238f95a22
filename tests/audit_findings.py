"""Verdicts of an experiment recomputed from its JSONL and TOML files alone, with none
of the project's code:

    python tests/audit_findings.py E13
"""

import json
import math
import re
import statistics
import sys
import tomllib
from collections import Counter
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).resolve().parents[1]


def rows_of(lines: list[str]) -> dict:
    """{(recipe, run config, tuned values as in the folder's name): {seed: result}}; a
    run that was measured has a row without measures, too, and the row with them
    counts."""
    results: dict = {}
    for line in lines:
        row = json.loads(line)
        recipe, folder = row["run"].split("/")[-2:]
        stem, seed = re.fullmatch(r"(.*)_s(\d+)", folder).groups()
        parts = re.fullmatch(r"(.*?)((?:_(?:muon_)?lr|_beta2)(\S*))?", stem)
        name, _, tuned = parts.groups()
        by_seed = results.setdefault((recipe, name, tuned or ""), {})
        result = row["result"]
        earlier = by_seed.get(int(seed))
        if not earlier or len(result["measured"]) >= len(earlier["measured"]):
            by_seed[int(seed)] = result
    return results


def figure(result: dict, kind: str) -> float | None:
    if "-" in kind:
        one, factor, other = re.fullmatch(r"(\w+)-([\d.]+)\*(\w+)", kind).groups()
        return figure(result, one) - float(factor) * figure(result, other)
    if kind in result["measured"]:
        return result["measured"][kind][0]
    losses = result["losses"]
    tokens = result["tokens"]
    if kind.startswith("lowest_"):
        return min(losses[kind[7:]])
    if not kind.startswith("tokens_to_"):
        return losses[kind][-1]
    goal = float(kind[10:])
    curve = losses["training"]
    for n, loss in enumerate(curve):
        if loss <= goal:
            share = (curve[n - 1] - goal) / (curve[n - 1] - loss) if n else 0
            return (tokens[n - 1] + share * (tokens[n] - tokens[n - 1])) / 1e6
    return None


def audited(name: str, folder: Path = ROOT) -> dict[str, tuple[float, float]]:
    """{"RECIPE: CLAIM": (difference, p value after Holm)} of the primary claims."""
    toml = tomllib.loads((folder / f"studies/configs/findings/{name}.toml").read_text())
    lines = (folder / f"results/findings/{name}.runs.jsonl").read_text().splitlines()
    rows = rows_of(lines)
    tuning = toml.get("tuning_seeds", [100, 101])
    by = toml.get("tune_by", "training")

    def runs_of(recipe: str, config: str) -> list[dict]:
        tuned_as = toml["run_configs"][config].get("tuned_as") or config
        tuned_on = toml.get("tune_on") or [tuned_as]
        losses: dict[str, list] = {}
        for (row_recipe, one, tuned), seeds in rows.items():
            if row_recipe == recipe and one in tuned_on:
                results = [seeds[seed] for seed in tuning if seed in seeds]
                losses.setdefault(tuned, [])
                losses[tuned] += [figure(result, by) for result in results]
        means = {}
        for tuned, values in losses.items():
            if len(values) == len(tuning) * len(tuned_on):
                means[tuned] = statistics.mean(values)
        best = min(means, key=means.get)
        seed_results = rows[recipe, config, best]
        return [
            seed_results[seed] for seed in seeds_in(toml, recipe) if seed not in tuning
        ]

    verdicts = {}
    tests = 0  # also the claims whose runs are missing
    for claim in toml["claims"]:
        for recipe in claim.get("primary", ()):
            tests += 1
            configs = []
            for side in (claim["higher"], claim["lower"]):
                configs += [term.partition(":")[0] for term in side.split(" - ")]
            try:
                for config in configs:
                    runs_of(recipe, config)
            except (KeyError, ValueError):  # a run, or what it is tuned on
                continue
            key = f"{recipe}: {claim['says']}"
            if "success" in claim:
                sides = []
                for config in (claim["higher"], claim["lower"]):
                    results = runs_of(recipe, config)
                    sides.append([figure(result, toml["kind"]) for result in results])
                verdicts[key] = counted(sides, claim["success"])
                continue
            # by run config, its terms: (factor, values, errors)
            samples: dict[str, list] = {}
            censored = False  # or on the unigram plateau: nothing can be said
            factors: dict[tuple, int] = {}
            for sign, text in ((1, claim["higher"]), (-1, claim["lower"])):
                for n, term in enumerate(text.split(" - ")):
                    config, _, kind = term.partition(":")
                    figure_of = (config, kind or toml["kind"])
                    factors.setdefault(figure_of, 0)
                    factors[figure_of] += sign * (-1) ** n
            for (config, kind), factor in factors.items():
                values = []
                errors = []
                if not factor:
                    continue
                for result in runs_of(recipe, config):
                    value = figure(result, kind)
                    if on_plateau(result, kind, value):
                        censored = True
                    if value is None:
                        if factor < 0:
                            censored = True
                        value = result["tokens"][-1] / 1e6
                    values.append(value)
                    errors.append(error_of(result, kind))
                samples.setdefault(config, []).append((factor, values, errors))
            of_configs = [summed(terms) for terms in samples.values()]
            margin = claim.get("margin", 0)
            mean, p = tested(of_configs, margin, censored)
            if claim.get("ranks") and not censored:
                p = ranked([values for values, _ in of_configs], margin)
            verdicts[key] = (mean, p)
    order = sorted(verdicts, key=lambda key: verdicts[key][1])
    least = 0.0
    for rank, key in enumerate(order):
        least = max(least, min(1.0, (tests - rank) * verdicts[key][1]))
        verdicts[key] = verdicts[key][0], least
    return verdicts


def seeds_in(toml: dict, recipe: str) -> range:
    """The seeds of the runs of a recipe that are reported, if none is a tuning seed."""
    first = toml.get("first_seed", 0)
    number = toml.get("seeds_of", {}).get(recipe, toml.get("seeds", 3))
    return range(first, first + number)


def summed(terms: list[tuple]) -> tuple[list[float], float]:
    """The runs of one config: the sum of its terms for each seed, and the error that
    the seeds share."""
    sums = []
    errors = []
    for seed in range(len(terms[0][1])):
        sums.append(sum(factor * values[seed] for factor, values, _ in terms))
        squares = [(factor * own[seed]) ** 2 for factor, _, own in terms]
        errors.append(sum(squares) ** 0.5)
    return sums, statistics.mean(errors)


def on_plateau(result: dict, kind: str, value: float | None) -> bool:
    """Whether a loss is within 0.1 of the unigram entropy of its text."""
    measured = result["measured"]
    unigram = measured["unigram"]
    if kind.startswith("eval_"):
        unigram = measured.get("unigram_test", unigram)
    elif kind not in result["losses"]:
        return False
    return value > unigram[0] - 0.1


def error_of(result: dict, kind: str) -> float:
    """Monte Carlo error of a measured figure, whose samples all seeds share."""
    one, _, rest = kind.partition("-")
    factor, _, other = rest.partition("*")
    errors = [result["measured"].get(key, [0, 0])[1] or 0 for key in (one, other)]
    return (errors[0] ** 2 + (float(factor or 0) * errors[1]) ** 2) ** 0.5


def tested(samples: list, margin: float, censored: bool) -> tuple[float, float]:
    """The sum of the means, and the two-sided p value of it and the margin, by Welch's
    test."""
    mean = sum(statistics.mean(values) for values, _ in samples)
    if censored:
        return mean, 1.0
    shared = sum(error**2 for _, error in samples)
    variance = 0.0
    squares = 0.0
    for values, _ in samples:
        part = statistics.variance(values) / len(values)
        variance += part
        squares += part**2 / (len(values) - 1)
    if variance + shared == 0:  # all seeds agree
        return mean, float(mean + margin == 0)
    t = abs(mean + margin) / (variance + shared) ** 0.5
    return mean, 2 * stats.t.sf(t, variance**2 / squares)


def ranked(samples: list[list[float]], margin: float) -> float:
    """The exact two-sided p value of Mann and Whitney: in how many of all ways to
    divide the runs between the two configs is the sum of the first one's ranks as far
    from its mean?"""
    first, second = samples
    pool = [value + margin for value in first] + [-value for value in second]
    if len(set(pool)) < len(pool):
        raise ValueError("equal values: this test is for distinct ones")
    size = len(first)
    total = len(pool)
    # {(how many are chosen, sum of their ranks): number of ways}
    ways = Counter({(0, 0): 1})
    for rank in range(1, total + 1):
        for (count, ranks), number in list(ways.items()):
            if count < size:
                ways[count + 1, ranks + rank] += number
    sums = {ranks: number for (count, ranks), number in ways.items() if count == size}
    rank_of = {value: rank for rank, value in enumerate(sorted(pool), start=1)}
    middle = size * (total + 1) / 2
    distance = abs(sum(rank_of[value] for value in pool[:size]) - middle)
    extreme = [sums[ranks] for ranks in sums if abs(ranks - middle) >= distance]
    return sum(extreme) / sum(sums.values())


def counted(sides: list[list[float]], least: float) -> tuple[float, float]:
    """The difference of the shares of runs with at least this figure, and Fisher's
    exact two-sided p value: the sum over all tables with these margins that are no
    likelier."""
    hits = [sum(value >= least for value in values) for values in sides]
    sizes = [len(values) for values in sides]

    def ways(first: int) -> int:
        return math.comb(sizes[0], first) * math.comb(sizes[1], sum(hits) - first)

    tables = [ways(first) for first in range(sum(hits) + 1)]
    extreme = sum(number for number in tables if number <= ways(hits[0]))
    return hits[0] / sizes[0] - hits[1] / sizes[1], extreme / sum(tables)


if __name__ == "__main__":
    for claim, (mean, p) in audited(sys.argv[1]).items():
        print(f"{claim}: {mean:+.4f}, p {p:.3g}")
