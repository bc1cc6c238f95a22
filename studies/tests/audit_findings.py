"""Verdicts and differences of an experiment recomputed from its JSONL and TOML files
alone, with none of the project's code:

    python studies/tests/audit_findings.py E13
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

ROOT = Path(__file__).resolve().parents[2]


def rows_of(lines: list[str]) -> dict:
    """Return {(recipe, run config, tuned values as in the folder's name): {seed:
    result}}. A run that was measured has a row without measures, too, and the row with
    them counts."""
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
    """Return a figure of a run, as studies/verdicts.py names it; None if the run has
    not reached its goal."""
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
            share = 0.0  # of the way from the evaluation before
            if n:
                share = (curve[n - 1] - goal) / (curve[n - 1] - loss)
            return (tokens[n - 1] + share * (tokens[n] - tokens[n - 1])) / 1e6
    return None


class Experiment:
    """The rows of an experiment, and which of them are tuned."""

    def __init__(self, toml: dict, lines: list[str]):
        self.toml = toml
        self.rows = rows_of(lines)
        self.tuning_seeds = toml.get("tuning_seeds", [100, 101])
        self.tune_by = toml.get("tune_by", "training")
        self.tune_by_success = toml.get("tune_by_success")

    def best_values(self, recipe: str, config: str) -> str:
        """Return the tuned values of a run config with the lowest mean loss over all
        tuning seeds, or with the most successes. Raises ValueError if no value has all
        of its runs."""
        if not self.toml["recipes"][recipe].get("tune"):
            return ""  # the values that the file has
        means = self.tuning_losses(recipe, config)
        lowest = min(means.values())
        equal = [tuned for tuned, mean in means.items() if mean == lowest]
        if self.tune_by_success is not None and len(equal) > 1:
            return self.nearest_to_middle(recipe, config, equal)
        return equal[0]

    def nearest_to_middle(self, recipe: str, config: str, among: list[str]) -> str:
        """Return the tuned values that are fewest steps, squared and added, from the
        middle of the grid; of those the lowest."""
        grid = self.toml["recipes"][recipe]["tune"]
        grid = self.toml["run_configs"][config].get("tune", grid)
        distances = {}
        for tuned in among:
            # In the order of the grid: the first key stands before the first value.
            chosen = re.split("_[a-z_0-9]*[a-z_]", tuned)
            steps = []
            for values, value in zip(grid.values(), chosen, strict=True):
                steps.append(values.index(float(value)) - len(values) // 2)
            squared = sum(step**2 for step in steps)
            distances[tuned] = (squared, steps)
        return min(distances, key=distances.get)

    def tuning_losses(self, recipe: str, config: str) -> dict[str, float]:
        """Return the mean loss over all tuning seeds of each tuned value that has all
        of its runs."""
        tuned_as = self.toml["run_configs"][config].get("tuned_as") or config
        tuned_on = self.toml.get("tune_on") or [tuned_as]
        losses: dict[str, list] = {}
        for (row_recipe, row_config, tuned), results in self.rows.items():
            if row_recipe != recipe or row_config not in tuned_on:
                continue
            losses.setdefault(tuned, [])
            for seed in self.tuning_seeds:
                if seed not in results:
                    continue
                if self.tune_by_success is None:
                    losses[tuned].append(figure(results[seed], self.tune_by))
                else:
                    right = figure(results[seed], self.toml["kind"])
                    losses[tuned].append(float(right < self.tune_by_success))
        means = {}
        for tuned, values in losses.items():
            if len(values) == len(self.tuning_seeds) * len(tuned_on):
                means[tuned] = statistics.mean(values)
        return means

    def runs_of(self, recipe: str, config: str) -> list[dict]:
        """Return the result of each reported seed. Raises KeyError or ValueError if a
        run is missing. A name of `best_of` means the run config with the lowest tuning
        loss of those that it lists."""
        candidates = self.toml.get("best_of", {}).get(config)
        if candidates:
            lowest = {}
            for name in candidates:
                lowest[name] = min(self.tuning_losses(recipe, name).values())
            config = min(lowest, key=lowest.get)
        results = self.rows[recipe, config, self.best_values(recipe, config)]
        seeds = seeds_in(self.toml, recipe, config)
        return [results[seed] for seed in seeds if seed not in self.tuning_seeds]

    def has_runs(self, recipe: str, claim: dict) -> bool:
        """Return whether all runs that a claim is about are there."""
        try:
            for side in (claim["higher"], claim["lower"]):
                for term in side.split(" - "):
                    self.runs_of(recipe, term.partition(":")[0])
        except (KeyError, ValueError):
            return False
        return True

    def verdict(self, recipe: str, claim: dict) -> tuple[float, float]:
        """Return the difference of a claim and its p value, before Holm."""
        if "success" in claim:
            sides = []
            for config in (claim["higher"], claim["lower"]):
                results = self.runs_of(recipe, config)
                sides.append([figure(result, self.toml["kind"]) for result in results])
            return counted(sides, claim["success"])
        of_configs, censored = self.samples(recipe, claim)
        margin = claim.get("margin", 0)
        mean, p = tested(of_configs, margin, censored)
        if claim.get("ranks") and not censored:
            p = ranked([values for values, _ in of_configs], margin)
        return mean, p

    def samples(self, recipe: str, claim: dict) -> tuple[list[tuple], bool]:
        """Return for each run config of a claim its values with their sign and their
        shared error, and whether nothing can be said."""
        # by run config, its terms: (factor, values, errors)
        samples: dict[str, list] = {}
        censored = False  # or on the unigram plateau: nothing can be said
        for (config, kind), factor in factors_of(claim, self.toml["kind"]).items():
            if not factor:
                continue
            values = []
            errors = []
            for result in self.runs_of(recipe, config):
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
        return [summed(terms) for terms in samples.values()], censored

    def interval(
        self, recipe: str, higher: str, lower: str | None
    ) -> tuple[float, float]:
        """Return the difference of two figures, or one figure, and half of its 95%
        interval; a difference also has the errors that seeds share."""
        if lower is None:
            config, _, kind = higher.partition(":")
            results = self.runs_of(recipe, config)
            values = [figure(result, kind or self.toml["kind"]) for result in results]
            error = statistics.stdev(values) / len(values) ** 0.5
            return statistics.mean(values), error * stats.t.ppf(0.975, len(values) - 1)
        samples, _ = self.samples(recipe, {"higher": higher, "lower": lower})
        mean, error, degrees = welch(samples)
        return mean, error * stats.t.ppf(0.975, degrees)


def factors_of(claim: dict, default_kind: str) -> dict[tuple[str, str], int]:
    """Return {(run config, kind of figure): its factor in higher - lower}."""
    factors: dict[tuple[str, str], int] = {}
    for sign, side in ((1, claim["higher"]), (-1, claim["lower"])):
        for place, term in enumerate(side.split(" - ")):
            config, _, kind = term.partition(":")
            key = (config, kind or default_kind)
            factors.setdefault(key, 0)
            factors[key] += sign * (-1) ** place
    return factors


def read(name: str, folder: Path = ROOT) -> Experiment:
    """Return an experiment with the rows of its runs."""
    toml = tomllib.loads((folder / f"studies/configs/findings/{name}.toml").read_text())
    lines = (folder / f"results/findings/{name}.runs.jsonl").read_text().splitlines()
    return Experiment(toml, lines)


def audited(name: str, folder: Path = ROOT) -> dict[str, tuple[float, float]]:
    """Return {"RECIPE: CLAIM": (difference, p value after Holm)} of the primary
    claims."""
    experiment = read(name, folder)
    verdicts = {}
    tests = 0  # also the claims whose runs are missing
    for claim in experiment.toml["claims"]:
        for recipe in claim.get("primary", ()):
            tests += 1
            if experiment.has_runs(recipe, claim):
                key = f"{recipe}: {claim['says']}"
                verdicts[key] = experiment.verdict(recipe, claim)
    order = sorted(verdicts, key=lambda key: verdicts[key][1])
    least = 0.0
    for rank, key in enumerate(order):
        mean, p = verdicts[key]
        least = max(least, min(1.0, (tests - rank) * p))
        verdicts[key] = (mean, least)
    return verdicts


def seeds_in(toml: dict, recipe: str, config: str) -> range:
    """Return the seeds of the runs of a run config that are reported, if none is a
    tuning seed."""
    first = toml.get("first_seed", 0)
    number = toml.get("seeds", 3)
    fewer = toml.get("seeds_of", {})
    return range(
        first, first + min(number, fewer.get(recipe, number), fewer.get(config, number))
    )


def summed(terms: list[tuple]) -> tuple[list[float], float]:
    """Return the sum of the terms of one run config for each seed, and the error that
    the seeds share."""
    sums = []
    errors = []
    for seed in range(len(terms[0][1])):
        total = 0.0
        variance = 0.0
        for factor, values, term_errors in terms:
            total += factor * values[seed]
            variance += (factor * term_errors[seed]) ** 2
        sums.append(total)
        errors.append(variance**0.5)
    return sums, statistics.mean(errors)


def on_plateau(result: dict, kind: str, value: float | None) -> bool:
    """Return whether a loss is within 0.1 of the unigram entropy of its text."""
    measured = result["measured"]
    unigram = measured["unigram"]
    if kind.startswith("eval_"):
        unigram = measured.get("unigram_test", unigram)
    elif kind not in result["losses"]:
        return False
    return value > unigram[0] - 0.1


def error_of(result: dict, kind: str) -> float:
    """Return the Monte Carlo error of a measured figure, whose samples all seeds
    share."""
    one, _, rest = kind.partition("-")
    factor, _, other = rest.partition("*")
    _, error = result["measured"].get(one, [0, 0])
    _, other_error = result["measured"].get(other, [0, 0])
    of_other = float(factor or 0) * (other_error or 0)
    return ((error or 0) ** 2 + of_other**2) ** 0.5


def tested(samples: list, margin: float, censored: bool) -> tuple[float, float]:
    """Return the sum of the means, and the two-sided p value of it and the margin, by
    Welch's test."""
    mean, error, degrees = welch(samples)
    if censored:
        return mean, 1.0
    if error == 0:  # all seeds agree
        return mean, float(mean + margin == 0)
    return mean, 2 * stats.t.sf(abs(mean + margin) / error, degrees)


def welch(samples: list) -> tuple[float, float, float]:
    """Return the sum of the means, its standard error and its degrees of freedom."""
    mean = sum(statistics.mean(values) for values, _ in samples)
    shared = sum(error**2 for _, error in samples)
    variance = 0.0
    squares = 0.0
    for values, _ in samples:
        part = statistics.variance(values) / len(values)
        variance += part
        squares += part**2 / (len(values) - 1)
    degrees = variance**2 / squares if squares else math.inf
    return mean, (variance + shared) ** 0.5, degrees


def ranked(samples: list[list[float]], margin: float) -> float:
    """Return the exact two-sided p value of Mann and Whitney: the share of all ways to
    divide the runs between the two configs in which the sum of the first one's ranks is
    as far from its mean."""
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
    """Return the difference of the shares of runs with at least this figure, and
    Fisher's exact two-sided p value: the sum over all tables with these margins that
    are no likelier."""
    higher, lower = sides
    higher_hits = sum(value >= least for value in higher)
    lower_hits = sum(value >= least for value in lower)
    hits = higher_hits + lower_hits

    def ways(first: int) -> int:
        return math.comb(len(higher), first) * math.comb(len(lower), hits - first)

    tables = [ways(first) for first in range(hits + 1)]
    extreme = sum(number for number in tables if number <= ways(higher_hits))
    difference = higher_hits / len(higher) - lower_hits / len(lower)
    return difference, extreme / sum(tables)


if __name__ == "__main__":
    for claim, (mean, p) in audited(sys.argv[1]).items():
        print(f"{claim}: {mean:+.4f}, p {p:.3g}")
