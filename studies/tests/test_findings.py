"""Experiments: run configs tuned alike, trained and resumed; verdicts and pages made of
them."""

import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import statistics
import threading
import tomllib
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import audit_findings
import numpy as np
import pytest
import tomli_w
from helpers import ROOT, prepared, run_main, run_script, tiny_config, write_jsonl
from scipy import stats

from aogpt.data.loader import read_tokens
from aogpt.runtime.command_line import check_repeated
from aogpt.runtime.errors import UserError
from aogpt.runtime.validation import FileError
from aogpt.training import config as configuration
from aogpt.training.config import Config
from studies import experiment as experiments
from studies import (
    figures,
    findings,
    front_figures,
    measures,
    pages,
    runner,
    runs,
    verdicts,
)
from studies.experiment import RunConfig, load_experiment
from studies.measures import unigram
from studies.systems_page import inequalities, systems_page
from studies.verdicts import (
    BORDERLINE,
    BORDERLINE_OPPOSITE,
    CONFIRMED,
    OPPOSITE,
    UNDECIDED,
    Claim,
    is_number,
    judged,
)

SHIPPED = experiments.experiment_names()


@pytest.mark.parametrize("name", SHIPPED)
def test_run_configs_of_a_recipe_are_tuned_alike_and_claims_are_of_them(name):
    experiment = load_experiment(name)
    assert experiment.title
    assert experiment.source
    assert experiment.setting
    assert experiment.figure in figures.DRAWINGS
    assert experiment.parts.keys() <= experiment.recipes.keys()
    for texts in experiment.parts.values() or [vars(experiment)]:
        assert not re.search(r"\d", texts["short"].replace("A3", ""))
        assert texts["short"] or not pages.has_results(name)
        text = texts["answer"] + texts["caveats"] + str(texts["row"])
        assert not re.search("supported|undecided", text)  # verdicts are computed
        assert texts["row"]["theme"] in pages.THEMES
    for recipe, run_configs in experiment.recipes.items():
        check_run_configs(experiment, recipe, run_configs)
    check_claims(experiment)


def check_run_configs(experiment, recipe, run_configs):
    """Those of one recipe have the same grid, and on the same data the same evaluation
    and training, whatever they start from."""
    assert len({json.dumps(one.tune) for one in run_configs.values()}) == 1
    first = {}  # by data and steps
    for one in run_configs.values():
        assert one.description
        assert all(len(grid) >= 3 for grid in one.tune.values())
        config = experiment.config(recipe, one, 0, {})
        other_seed = experiment.config(recipe, one, 1, {})
        differences = configuration.differences(config, other_seed)
        assert differences.keys() == {"name", "seed", "order.seed"}
        same_data = first.setdefault((config.data, config.train.steps), config)
        init_from = same_data.train.init_from
        assert dataclasses.replace(config.train, init_from=init_from) == same_data.train
        assert config.eval == same_data.eval
        assert config.model.block_size == same_data.model.block_size


def check_claims(experiment):
    """Claims and measures are of run configs that there are; at most three
    claims are primary under a recipe."""
    run_configs = {name for recipe in experiment.recipes.values() for name in recipe}
    sides = []
    for claim in experiment.claims:
        assert len(claim.primary) <= len(experiment.recipes)
        sides += [claim.lower, claim.higher]
        # Of numbers of runs: at one limit, of single terms.
        assert claim.success in (None, experiment.success)
        if claim.success is not None:
            assert " - " not in claim.lower + claim.higher
            assert not claim.ranks
    for recipe in experiment.recipes:
        assert sum(recipe in claim.primary for claim in experiment.claims) <= 3
    for side in sides:
        for term in side.split(" - "):
            name = term.partition(":")[0]
            assert name in run_configs | set(experiment.best_of) or is_number(term)
    for candidates in experiment.best_of.values():
        assert run_configs >= set(candidates)
    for measure in experiment.measures:
        assert run_configs >= set(measure.run_configs)


WITH_PAGES = [name for name in SHIPPED if list(pages.RESULTS.glob(f"{name}.*md"))]


def test_rows_without_a_page_are_of_an_experiment_that_is_said_to_be_unfinished():
    unfinished = re.findall(r"^- (E\d+): ", pages.overview(), re.MULTILINE)
    for file in pages.RESULTS.glob("*.runs.jsonl"):
        name = file.name.removesuffix(".runs.jsonl")
        assert (name in WITH_PAGES) != (name in unfinished)


@pytest.mark.parametrize("name", WITH_PAGES)
def test_the_pages_are_those_of_the_runs_that_are_shipped(name):
    """Every claim is of something that was measured, and no row is missing."""
    experiment, recipes = pages.load_results(name)
    claims = pages.judgements(experiment, recipes)
    for of_recipe in claims.values():
        assert not any(claim["verdict"] == verdicts.UNMEASURED for claim in of_recipe)
    written = pages.pages_of(experiment, recipes)
    assert {recipe for page in written for recipe in page.recipes} == recipes.keys()
    for page in written:
        text = "\n".join(pages.page_of(page, claims))
        assert (pages.RESULTS / f"{page.name}.md").read_text() == text
    for entries in recipes.values():
        for entry in entries.values():
            seeds = [row["seed"] for row in entry["runs"]]
            assert seeds
            assert not set(seeds) & set(experiment.tuning_seeds)


@pytest.mark.parametrize("name", WITH_PAGES)
def test_verdicts_are_those_that_an_independent_script_computes_from_the_rows(name):
    experiment, recipes = pages.load_results(name)
    primary = any(claim.primary for claim in experiment.claims)
    audited = audit_findings.audited(name, ROOT) if primary else {}
    for recipe, claims in pages.judgements(experiment, recipes).items():
        for claim in (claim for claim in claims if claim["primary"]):
            mean, p = audited.pop(f"{recipe}: {claim['says']}")
            assert claim["mean"] == pytest.approx(mean)
            assert claim["p_holm"] == pytest.approx(p)
            holds = (claim["median"] if claim["ranks"] else mean) + claim["margin"] > 0
            if claim["no_verdict"]:
                assert claim["verdict"] == verdicts.NO_VERDICT
            elif p >= 0.1:
                assert claim["verdict"].partition(" (")[0] == UNDECIDED
            elif p > 0.025:
                assert claim["verdict"] == (
                    BORDERLINE if holds else BORDERLINE_OPPOSITE
                )
            else:
                assert claim["verdict"] == (CONFIRMED if holds else OPPOSITE)
    assert not audited


def test_e38_over_seeds_alone_is_what_its_text_says():
    """By hand in its text: the rule of its verdicts counts the error of samples, which
    the spread over seeds has already."""
    experiment = audit_findings.read("E38")
    text = experiment.toml["answer"] + experiment.toml["caveats"]
    p_values = []
    for recipe in ("narrow", "wide"):
        for kind in ("tokens_a_pass", "tokens_a_pass_l2r"):
            claim = {"higher": f"eighth:{kind}", "lower": f"whole:{kind}"}
            samples, _ = experiment.samples(recipe, claim)
            alone = [(values, 0.0) for values, _ in samples]
            mean, error, degrees = audit_findings.welch(alone)
            half_width = error * stats.t.ppf(0.975, degrees)
            assert f"± {half_width:.3f}" in text
            if kind == "tokens_a_pass":
                assert f"{mean:.3f} ± {half_width:.3f}" in text
                p_values.append(2 * stats.t.sf(mean / error, degrees))
    assert f"Holm's p {2 * p_values[0]:.3f} and {p_values[1]:.2f}" in text


def test_the_numbers_with_128_masks_are_those_of_their_rows():
    """E29's text has them by hand, since they were evaluated after its page."""
    experiment, recipes = pages.load_results("E29")
    report = json.loads((pages.RESULTS / "E29.masks.json").read_text())
    by_seed = {}
    for row in report["results"]:
        by_seed[int(row["run"].rpartition("_s")[2])] = row
    runs = []
    for run in recipes["fast"]["encoder_ce"]["runs"]:
        row = by_seed.pop(run["seed"])
        figure = [row["nll"], row["monte_carlo_error"]]
        runs.append({**run, "measured": {"eval_random": figure}})
    assert not by_seed
    entries = dict(recipes["fast"])
    entries["encoder_ce"] = {**entries["encoder_ce"], "runs": runs}

    def filled(text: str) -> str:
        return pages.filled(text, experiment, {"fast": entries})

    text = experiment.answer
    for expected in (
        "{fast: encoder_ce}",
        "it is {fast: encoder_ce - rotary}",
        "{fast: encoder_ce - mask_query_short} better at equal operations",
        "{fast: encoder_ce - mask_query} at equal bytes",
        "{fast: adaln_11 - encoder_ce} behind alone",
        "{fast: adaln_rotary_11 - encoder_ce} beside rotation",
    ):
        assert filled(expected) in text


def test_the_overviews_are_those_of_the_runs_that_are_shipped():
    assert (pages.RESULTS / "README.md").read_text() == pages.overview()
    text = pages.filled((experiments.CONFIGS / "targets.md").read_text())
    assert (pages.RESULTS / "targets.md").read_text() == text
    assert (pages.RESULTS / "systems.md").read_text() == systems_page()


def test_what_a_system_is_given_more_or_less_of_is_named():
    experiment, recipes = pages.load_results("E21")
    paper = inequalities(experiment, recipes, "chorales", "adaln_11")
    wide = inequalities(experiment, recipes, "chorales", "adaln")
    fixed = inequalities(experiment, recipes, "chorales", "fixed")
    half = inequalities(experiment, recipes, "chorales", "mask_query_half")
    tuned = inequalities(experiment, recipes, "chorales", "encoder")
    untuned = inequalities(experiment, recipes, "sudoku", "encoder")
    assert tuned == []
    assert paper == ["no rotary attention"]
    assert wide == ["more adaLN than the paper's 6 to 8%", "no rotary attention"]
    assert fixed == ["best value at the grid boundary"]
    assert half == ["rates of the run with all tokens"]
    assert untuned == ["loss not tuned (not tried: unweighted, weighted by n / k)"]
    for name, page in pages.FRONT.items():
        text = pages.filled((experiments.CONFIGS / name).read_text())
        assert (pages.RESULTS.parent / page).read_text() == text


def by_seed(*losses, **measured):
    return {
        "runs": [row(seed, loss, 0.5, **measured) for seed, loss in enumerate(losses)]
    }


def test_a_difference_is_tested_by_welch_and_one_of_the_same_runs_in_pairs():
    """Against scipy. The Monte Carlo error of a loss is in the spread over seeds
    already."""
    low = [2.0, 2.1, 1.9, 2.05]
    high = [2.5, 2.7, 2.2, 2.9]
    entries = {"a": by_seed(*low), "b": by_seed(*high)}
    for claim, expected in (
        (Claim("", "a", "b"), stats.ttest_ind(high, low, equal_var=False)),
        (Claim("", "a", "2.3"), stats.ttest_1samp([2.3 - x for x in low], 0)),
        (Claim("", "a:l2r", "a"), stats.ttest_1samp([x / 2 for x in low], 0)),
    ):
        result = judged(claim, "training", entries)
        interval = expected.confidence_interval(0.95)
        assert result["p"] == pytest.approx(expected.pvalue)
        assert result["mean"] - result["half_width"] == pytest.approx(interval.low)
        assert result["mean"] + result["half_width"] == pytest.approx(interval.high)
        assert result["seeds"] == 4
        assert result["verdict"] == ""
    more = judged(Claim("", "a", "b"), "training", entries | {"b": by_seed(*high, 2.4)})
    assert more["p"] == pytest.approx(
        stats.ttest_ind([*high, 2.4], low, equal_var=False).pvalue
    )
    assert more["seeds"] == 4
    within = judged(Claim("", "b", "a", margin=0.6), "training", entries)
    shifted = stats.ttest_ind([x + 0.6 for x in low], high, equal_var=False)
    assert within["p"] == pytest.approx(shifted.pvalue)
    assert within["mean"] < 0
    assert judged(Claim("", "a", "1"), "training", {"a": by_seed(2.0)})["p"] is None


def test_a_side_of_a_claim_may_be_an_earlier_loss_or_a_sum_of_two():
    entries = {"a": by_seed(2.0, 2.1, 1.9, 2.05)}
    earlier = judged(Claim("", "a:training@0.5", "9.5"), "training", entries)
    assert earlier["mean"] == 0.5
    twice_half = judged(Claim("", "a:training-2*l2r", "0"), "training", entries)
    assert twice_half["mean"] == 0


def welch_half_width(samples):
    """95% half-width of a sum of means of samples of one size, by Welch's degrees."""
    size = len(samples[0])
    parts = [np.var(sample, ddof=1) / size for sample in samples]
    degrees = sum(parts) ** 2 / sum(part**2 / (size - 1) for part in parts)
    return stats.t.ppf(0.975, degrees) * math.sqrt(sum(parts))


def test_the_difference_of_two_gaps_has_the_errors_of_all_four_sides():
    a = np.array([2.0, 2.1, 1.9, 2.05])
    b = np.array([2.5, 2.7, 2.2, 2.9])
    sides = {"a": a, "b": b, "c": a + 1, "d": 2 * a}
    entries = {name: by_seed(*losses) for name, losses in sides.items()}
    result = judged(Claim("", "b - a", "d - c"), "training", entries)
    expected = 2 * a.mean() - (a.mean() + 1) - b.mean() + a.mean()
    assert result["mean"] == pytest.approx(expected)
    half_width = welch_half_width(list(sides.values()))
    assert result["half_width"] == pytest.approx(half_width)


def test_an_error_that_all_seeds_share_is_added_once():
    gains = [0.3, 0.5, 0.4, 0.6]
    entries = {
        "a": {"runs": [measured(gain=[gain, 0.2]) for gain in gains]},
        "same": {"runs": [measured(gain=[0.3, 0.1])] * 4},
    }
    judgement = judged(Claim("", "0", "a:gain"), "training", entries)
    error = math.hypot(np.std(gains, ddof=1) / 2, 0.2)
    assert judgement["p"] == pytest.approx(2 * stats.t.sf(0.45 / error, 3))
    judgement = judged(Claim("", "0", "same:gain"), "training", entries)
    assert judgement["p"] == pytest.approx(2 * stats.t.sf(3, 3))
    unknown = judged(Claim("", "a:speed", "1"), "training", entries)
    assert unknown["verdict"] == verdicts.UNMEASURED
    assert judged(Claim("", "c:gain", "1"), "training", entries) is None


def test_a_claim_with_a_loss_on_the_plateau_or_a_run_that_did_not_end_is_undecided():

    def of_text(*losses, **scores):
        return by_seed(*losses, unigram=[3.0, None], unigram_test=[2.6, None], **scores)

    entries = {
        "a": of_text(2.95, 2.5, eval_random=[2.55, None], ptb_random=[2.95, None]),
        "b": of_text(2.5, 2.6),
        "c": of_text(2.1, 2.2, eval_random=[2.4, None], ptb_random=[2.0, None]),
    }

    def verdict(lower, higher):
        return judged(Claim("", lower, higher), "training", entries)["verdict"]

    assert verdict("b", "a") == verdict("a", "b") == verdicts.PLATEAU
    assert verdict("c", "a:lowest_training") == verdicts.PLATEAU
    # Of the text that it is scored on, and of other text.
    assert verdict("c:eval_random", "a:eval_random") == verdicts.PLATEAU
    assert verdict("c:ptb_random", "a:ptb_random") == ""
    assert verdict("c", "b") == ""
    entries["b"]["runs"][1] |= {"tokens": [], "losses": {}, "measured": {}}
    assert verdict("c", "b") == verdicts.UNFINISHED


def test_tokens_to_a_goal_are_a_lower_bound_where_a_run_does_not_reach_it():
    def runs(*curves):
        tokens = [1_000_000, 2_000_000, 4_000_000]
        losses = [{"training": list(curve)} for curve in curves]
        return {
            "runs": [{"seed": 0, "tokens": tokens, "losses": one} for one in losses]
        }

    entries = {
        "soon": runs((3, 2, 1), (2.6, 2, 2)),
        "late": runs((4, 3, 2.9), (4, 3, 2)),
    }
    claim = Claim("", "soon:tokens_to_2.5", "late:tokens_to_2.5")
    judgement = judged(claim, "x", entries)
    soon = (1.5 + 1 + 0.1 / 0.6) / 2
    late = (4 + 3) / 2
    assert judgement["mean"] == pytest.approx(late - soon)
    assert judgement["verdict"] == ""
    turned = Claim("", "late:tokens_to_2.5", "soon:tokens_to_2.5")
    assert judged(turned, "x", entries)["verdict"] == verdicts.UNFINISHED


def test_primary_claims_share_the_error_of_an_experiment():
    """Holm: the smallest p value times 3, the next times 2."""

    def claim(p, mean=0.1, verdict="", margin=0.0, by_ranks=None):
        return {
            "says": "",
            "p": p,
            "mean": mean,
            "median": -mean,
            "p_rank": by_ranks,
            "ranks": by_ranks is not None,
            "no_verdict": "",
            "verdict": verdict,
            "margin": margin,
        }

    for claims, words in (
        (
            [claim(0.01), claim(0.008, -1.0), claim(0.5)],
            [CONFIRMED, OPPOSITE, UNDECIDED],
        ),
        # the first fails: all do
        ([claim(0.04), claim(0.048), claim(0.036)], [UNDECIDED] * 3),
        (
            [claim(0.005), claim(None, 0.2), claim(0.01)],
            [CONFIRMED, UNDECIDED, CONFIRMED],
        ),
        (
            [claim(0.001, verdict=verdicts.PLATEAU), claim(0.1)],
            [verdicts.PLATEAU, UNDECIDED],
        ),
        ([claim(0.01, -0.05, margin=0.1)], [CONFIRMED]),
        ([claim(0.01, -0.05, margin=0.01)], [OPPOSITE]),
        ([claim(0.025)], [CONFIRMED]),
        ([claim(0.026), claim(0.05, -1.0)], [BORDERLINE, BORDERLINE_OPPOSITE]),
        ([claim(0.09)], [BORDERLINE]),
        ([claim(0.1)], [UNDECIDED]),
        # its median says otherwise than its mean
        ([claim(0.5, by_ranks=0.01)], [OPPOSITE]),
        ([claim(0.01, by_ranks=0.5)], [UNDECIDED]),
    ):
        verdicts.with_verdicts(claims, len(claims))
        assert [c["verdict"] for c in claims] == words


def test_successes_are_compared_by_fishers_test():
    """Against scipy and the independent script. A run that did not end fails."""
    entries = {"good": by_seed(*[0.95] * 7, 0.9), "bad": by_seed(*[0.4] * 7, 1.0)}
    claim = Claim("", "bad", "good", success=0.9)
    judgement = judged(claim, "training", entries)
    expected = stats.fisher_exact([[8, 0], [1, 7]]).pvalue
    assert judgement["p"] == pytest.approx(expected)
    assert judgement["mean"] == 7 / 8
    assert judgement["successes"] == [8, 1]
    assert judgement["verdict"] == ""
    assert pages.difference_cell(judgement) == "8 against 1 of 8 runs"
    judgement["primary"] = True
    verdicts.with_verdicts([judgement], 1)
    assert judgement["verdict"] == CONFIRMED
    line = pages.verdict_line(judgement)
    assert f"8 against 1 of 8 runs, Holm's p by Fisher's test {expected:.2g}" in line
    turned = judged(Claim("", "good", "bad", success=0.9), "training", entries)
    verdicts.with_verdicts([turned], 1)
    assert turned["verdict"] == OPPOSITE
    figures = [[0.95] * 7 + [0.9], [0.4] * 7 + [1.0]]
    mean, p = audit_findings.counted(figures, 0.9)
    assert mean == judgement["mean"]
    assert p == pytest.approx(expected)
    for row in entries["good"]["runs"][:2]:
        row |= {"tokens": [], "losses": {}, "measured": {}}
    assert judged(claim, "training", entries)["successes"] == [6, 1]
    for row in entries["good"]["runs"]:
        row["losses"] = {}
    assert judged(claim, "training", entries)["verdict"] == verdicts.UNMEASURED


def test_without_successes_differences_are_rarely_found():
    """Of 2,000 pairs of 20 runs that succeed half of the time, at most 5% differ."""
    rng = np.random.default_rng(0)
    claim = Claim("", "a", "b", success=1.0)
    low = 0
    for _ in range(2000):
        entries = {name: by_seed(*rng.integers(2, size=20)) for name in "ab"}
        low += judged(claim, "training", entries)["p"] < 0.05
    assert 10 < low <= 100


def test_a_page_tells_what_run_configs_cost_and_reach_with_fewer_tokens():
    """Half of the tokens at 1.5 times the operations a token and a median of 1.25 times
    the time."""
    experiment = dataclasses.replace(
        load_experiment("E22"),
        equal_time={
            "rotary": "rotary",
            "two_stream": "two_stream_half",
            "encoder": "encoder",
        },
    )
    entries = {
        "rotary": by_seed(2.0),
        "two_stream": by_seed(1.9),
        "two_stream_half": by_seed(1.95),
        "encoder": by_seed(2.1),
    }
    for name, entry in entries.items():
        entry |= {"description": "d", "parameters": 1234, "flops": 2.5e6}
        if name.startswith("two_stream"):
            entry["flops"] *= 1.5
        for row in entry["runs"]:
            row["measured"] = {}
            row["losses"]["eval_random"] = row["losses"]["training"]
    for row in entries["two_stream_half"]["runs"]:
        row["tokens"] = [tokens / 2 for tokens in row["tokens"]]
    speeds = {"rotary": [5000, 4000, 2000], "two_stream": [4000, 3500, 1500]}
    lines = pages.equal_time_tables(experiment, {"fast": entries}, {"fast": speeds})
    cells = [
        [cell.strip() for cell in line.split("|")] for line in lines if "|" in line
    ]
    # a line in the logarithm of the tokens: 1.9 + 0.05 log2(1.5), and of 1.25
    assert cells[2][2:-1] == ["1,234", "2.50", "1.00 (1.00 to 1.00)", "2.000", "", ""]
    assert cells[3][2:-1] == [
        "1,234",
        "3.75",
        "1.25 (1.14 to 1.33)",
        "1.900",
        "1.950 (0.75, 0.62)",
        "1.929, 1.916",
    ]
    assert cells[4][4] == "not measured"
    assert cells[2][1] == "`--model.target rotary --model.position rotary`"
    assert cells[4][1] == "`--model.target none --model.attention full`"
    assert "README.md#what-each-costs" in lines[0]
    alone = dataclasses.replace(experiment, equal_time={"rotary": "rotary"})
    lines = pages.equal_time_tables(alone, {"fast": entries}, {})
    assert not any("half of the tokens" in line for line in lines)
    for name in SHIPPED:
        shipped = load_experiment(name)
        for entries in shipped.recipes.values():
            assert {*shipped.equal_time, *shipped.equal_time.values()} <= entries.keys()
    run_configs = experiment.recipes["fast"]
    whole = experiment.config("fast", run_configs["two_stream"], 0, {})
    half = experiment.config("fast", run_configs["two_stream_half"], 0, {})
    assert whole.train.steps == 2 * half.train.steps


@pytest.mark.parametrize("name", SHIPPED)
def test_no_color_is_used_twice_in_a_panel(name):
    experiment = load_experiment(name)
    for run_configs in experiment.recipes.values():
        families = {}
        for one in run_configs:
            family = one.split("_")[0] if experiment.families else ""
            families.setdefault(family, []).append(one)
        for names in families.values():
            colors = [style.color for style in figures.styles_of(names).values()]
            assert len(set(colors)) == len(names)


def test_the_axis_names_the_loss_that_all_curves_draw():
    losses = {"random": [3.0, 2.5], "training": [2.0, 1.5]}
    row = {"tokens": [1e6, 2e6], "losses": losses, "measured": {}}
    entries = {
        "fixed": {"description": "one order", "runs": [row] * 4},
        "random": {"description": "all orders", "runs": [row] * 4},
    }
    run_configs = {name: experiments.RunConfig(name, {}, {}) for name in entries}
    drawn = []
    for names in ([], ["fixed"], ["fixed", "random"]):
        experiment = experiments.Experiment(
            name="X",
            kind="eval_random",
            figure_losses=dict.fromkeys(names, "training"),
            base={"data": {"folder": "data/chorales"}},
            recipes={"all": run_configs},
        )
        _, axes = figures.new_figure()
        figures.draw_curves(axes, figures.Panel(experiment, "all", entries))
        labels = axes.get_legend_handles_labels()[1]
        drawn.append((axes.get_ylabel(), labels[0]))
    assert drawn == [
        ("loss, any order, nats per note", "one order"),
        ("loss, any order, nats per note", "one order: training orders"),
        ("loss, training orders, nats per note", "one order"),
    ]


def test_a_table_of_several_units_names_them_by_column():
    """Where run configs differ in what a token is, it is a token."""
    books = experiments.RunConfig("books", {}, {})
    sudoku = experiments.RunConfig("sudoku", {"data.folder": "data/sudoku6"}, {})
    experiment = experiments.Experiment(
        name="X",
        base={"data": {"folder": "data/books_bytes"}},
        recipes={"all": {"books": books, "sudoku": sudoku}},
    )
    assert pages.token_of(experiment, "all", ["books"]) == "byte"
    assert pages.token_of(experiment, "all", ["sudoku"]) == "cell"
    assert pages.token_of(experiment, "all", ["books", "sudoku"]) == "token"

    losses = {"random": [2.0]}
    measured = {"exact_sudoku6": [0.5, 0.0], "tokens_a_pass": [3.0, 0.0]}
    row = {"tokens": [1e6], "losses": losses, "measured": measured}
    recipes = {"all": {"sudoku": {"description": "", "runs": [row]}}}

    def head(kind: str, *shown: str) -> str:
        changed = dataclasses.replace(experiment, kind=kind, shown=shown)
        return pages.main_table(changed, recipes)[0]

    assert "nats per cell" in head("random")
    solved = head("exact_sudoku6", "random")
    assert "solved Sudokus, share of test records" in solved
    assert "any order, nats per cell" in solved
    passes = head("tokens_a_pass", "random")
    assert "tokens a pass, random orders |" in passes
    assert "any order, nats per cell" in passes


def test_systems_have_their_colors_and_variants_others():
    names = ["l2r", "random", "encoder", "encoder_dropout", "two_stream", "l2r50"]
    styles = figures.styles_of(names)
    places = [figures.PALETTE.index(styles[name].color) for name in names]
    assert places[:3] == [1, 0, 2]
    assert places[4] == 3
    assert not {places[3], places[5]} & set(figures.SYSTEMS.values())
    assert styles["encoder_dropout"].line == "--"
    assert styles["l2r50"].line == "-"  # not a kind of l2r


def test_a_seed_far_from_the_others_is_inside_of_its_figure():
    """Points beside a mean are shifted, which matplotlib leaves out of the limits."""
    drawing, axes = figures.new_figure()
    style = figures.styles_of(["a"])["a"]
    figures.draw_mean(axes, 0.0, [1.0] * 20 + [9.0], "a", style)
    assert axes.get_ylim()[1] > 9
    assert figures.with_caption(drawing, "caption", 1)[:4] == b"\x89PNG"


def test_without_an_effect_at_most_a_twentieth_of_experiments_get_a_verdict():
    """Three claims against one baseline of 8 seeds, with spreads that differ
    fourfold."""
    rng = np.random.default_rng(0)
    spoken = 0
    experiments = 800
    spreads = {"a": 1, "b": 1, "c": 2, "d": 4}
    for _ in range(experiments):
        entries = {name: by_seed(*rng.normal(2, s, 8)) for name, s in spreads.items()}
        claims = [judged(Claim("", "a", other), "training", entries) for other in "bcd"]
        verdicts.with_verdicts(claims, len(claims))
        spoken += any(claim["verdict"] in (CONFIRMED, OPPOSITE) for claim in claims)
    assert spoken <= stats.binom.ppf(0.999, experiments, 0.05)


def test_a_run_config_on_both_sides_of_a_claim_is_one_sample():
    """Without an effect at most 5% of 4,000 p values are below 0.05. Were the runs of
    `fixed` two samples, it would be 10.7%."""
    rng = np.random.default_rng(0)
    claim = Claim("", "random - fixed", "fixed - l2r")
    low = 0
    for _ in range(4000):
        entries = {
            name: by_seed(*rng.normal(2, 1, 8)) for name in ("l2r", "fixed", "random")
        }
        low += judged(claim, "training", entries)["p"] < 0.05
    assert 100 < low <= 200


def test_equal_sides_of_a_claim_are_merged_and_those_that_cancel_are_left_out():
    entries = {
        "a": by_seed(2.0, 2.2, 1.9),
        "b": by_seed(2.4, 2.5, 2.9),
        "c": by_seed(1.0, 1.4, 1.1),
    }
    twice = judged(Claim("", "a - b", "b - c"), "training", entries)
    samples = [2 * np.array([2.4, 2.5, 2.9]), [2.0, 2.2, 1.9], [1.0, 1.4, 1.1]]
    assert twice["half_width"] == pytest.approx(welch_half_width(samples))
    assert twice["mean"] == pytest.approx(2 * 2.6 - 6.1 / 3 - 3.5 / 3)
    assert twice["p_rank"] is None  # ranks are of two run configs
    one = judged(Claim("", "a", "b"), "training", entries)
    for lower, higher in (("a - c", "b - c"), ("a:training", "b:training@1")):
        assert judged(Claim("", lower, higher), "training", entries) == one


def test_ranks_of_two_run_configs_are_compared_exactly():
    """Against all ways to divide the runs between two configs, and scipy's signed
    ranks."""
    first = [0.3, 0.9, 0.35, 0.4]
    second = [0.5, 0.55, 0.6, 0.45]
    entries = {"a": by_seed(*first), "b": by_seed(*second)}
    judgement = judged(Claim("", "a", "b"), "training", entries)
    sums = [sum(ranks) for ranks in itertools.combinations(range(1, 9), 4)]
    ranks = sum(stats.rankdata(first + second)[:4])
    p = np.mean([abs(one - 18) >= abs(ranks - 18) for one in sums])
    assert judgement["p_rank"] == pytest.approx(p)
    audited = audit_findings.ranked([second, [-value for value in first]], 0)
    assert judgement["p_rank"] == pytest.approx(audited)
    differences = np.subtract.outer(second, first)
    assert judgement["median"] == pytest.approx(np.median(differences))
    shifted = judged(Claim("", "a", "b", margin=0.2), "training", entries)
    higher = [value + 0.2 for value in second]
    expected = stats.mannwhitneyu(higher, first, method="exact")
    assert shifted["p_rank"] == pytest.approx(expected.pvalue)
    one = judged(Claim("", "a", "0.32", margin=0.01), "training", entries)
    expected = stats.wilcoxon([0.33 - value for value in first])
    assert one["p_rank"] == pytest.approx(expected.pvalue)
    single = judged(Claim("", "a", "1"), "training", {"a": by_seed(2.0)})
    assert single["p_rank"] is None


def test_a_failed_run_hides_a_difference_from_means_and_not_from_ranks():
    entries = {
        "learns": by_seed(*np.linspace(0.04, 0.05, 7), 0.3),
        "fails": by_seed(*np.linspace(0.09, 0.11, 8)),
    }
    means = judged(Claim("", "learns", "fails"), "training", entries)
    verdicts.with_verdicts([means], 1)
    assert means["verdict"] == UNDECIDED
    ranks = judged(Claim("", "learns", "fails", ranks=True), "training", entries)
    verdicts.with_verdicts([ranks], 1)
    assert ranks["verdict"] == CONFIRMED
    assert ranks["p_holm"] == means["p_rank"]
    assert ranks["p_holm"] == pytest.approx(16 / 12870 * 9, rel=1)


def test_reports_of_losses_and_answers_are_read():
    """The seed of a fixed order is not a part of a figure's name: it differs from run
    to run."""

    def result(orders, ensemble=1, gain=None, gain_error=None):
        return {
            "dataset": "books",
            "orders": orders,
            "ensemble": ensemble,
            "monte_carlo_error": None,
            "gain": gain,
            "gain_error": gain_error,
            "nll": 2.0,
        }

    results = [
        result("fixed_random:seed=3"),
        result("fixed_blockwise:block=4,seed=3"),
        result("random"),
        result("random", ensemble=64, gain=0.5, gain_error=0.1),
    ]
    figures = measures.of_perplexity({"results": results})
    expected = {"gain_random_m64"}
    for name in ("fixed_random", "fixed_blockwise4", "random", "random_m64"):
        expected |= {f"eval_{name}", f"nats_books_{name}"}
    assert figures.keys() == expected
    assert figures["gain_random_m64"] == [0.5, 0.1]
    answer = {"task": "sudoku6", "exact_match": 0.25, "standard_error": 0.02}
    figures = measures.of_answers({"results": [answer]})
    assert figures == {"exact_sudoku6": [0.25, 0.02]}


def test_seeds_begin_above_those_of_a_pilot_and_a_recipe_may_have_fewer():
    experiment = experiments.Experiment(
        name="X", first_seed=200, seeds_of={"long": 2, "l2r": 1}
    )
    assert list(experiment.seeds_in("long", "random", 3)) == [200, 201]
    assert list(experiment.seeds_in("short", "random", 3)) == [200, 201, 202]
    assert list(experiment.seeds_in("long", "random", 1)) == [200]
    assert list(experiment.seeds_in("long", "l2r", 3)) == [200]
    assert list(experiment.seeds_in("short", "l2r", 3)) == [200]
    with pytest.raises(UserError, match="seeds_of names 'l2x'"):
        experiments.experiment_of("X", {"seeds_of": {"l2x": 2}}, "X")


@pytest.mark.parametrize("name", SHIPPED)
def test_no_option_of_a_measure_is_given_twice(name):
    """Scripts refuse that, also where --quick has an option of the measure."""
    for measure in load_experiment(name).measures:
        for quick in (False, True):
            check_repeated(list(measure.words(quick)))
        assert " ".join(measure.words(True)).endswith(" ".join(measure.quick))


def test_a_measure_is_of_some_recipes_and_run_configs():
    measure = measures.Measure("x.py", (), run_configs=("a",), recipes=("r",))
    assert measure.applies_to("r", "a")
    assert not measure.applies_to("r", "b")
    assert not measure.applies_to("s", "a")
    assert measures.Measure("x.py", ()).applies_to("s", "b")


def row(seed, loss, error, **measured):
    losses = {
        "training": [9.0, loss],
        "training_error": [1.0, error],
        "l2r": [8.0, loss / 2],
    }
    return {
        "seed": seed,
        "commit": "",
        "tokens": [1, 2],
        "losses": losses,
        "measured": measured,
    }


def measured(**figures):
    return {"tokens": [], "losses": {}, "measured": figures}


def test_two_keys_are_tuned_together_until_the_best_has_all_its_neighbours():
    rates = {"a": [1, 2, 4, 8, 16], "b": [1, 2, 4, 8]}
    tuning = runner.search(
        rates, lambda v: abs(math.log2(v["a"] * v["b"]) - 2) + v["a"] / 100
    )
    tried = [tuple(values.values()) for values, _ in tuning]
    best = tuple(runner.best_of(RunConfig("x", {}, rates), tuning).values())
    assert best == (1, 4)
    assert {(2, 4), (1, 2), (1, 8)} <= set(tried)
    assert len(tried) < 20


def test_run_configs_can_share_the_value_that_is_best_for_some_of_them(monkeypatch):
    """tune_on: the mean over them; tuned_as: another run config's; by the figure of
    tune_by."""
    grid = {"optim.lr": [1.0, 2.0, 3.0, 4.0, 5.0]}
    changes = {"a": {}, "b": {"optim.beta1": 0.5}, "c": {"optim.beta1": 0.6}}
    configs = {n: RunConfig(n, change, grid) for n, change in changes.items()}
    wanted = {0.9: 2.0, 0.5: 4.0, 0.6: 5.0}  # the best rate of each

    def result(self, recipe, config, commands):
        far = (config.optim.lr - wanted[config.optim.beta1]) ** 2
        return {
            "seed": config.seed,
            "tokens": [1, 2],
            "losses": {"training": [-far, far]},
        }

    monkeypatch.setattr(runner.Runner, "result", result)
    for more, tuned in (
        ({}, [2.0, 4.0, 5.0]),
        ({"tune_on": ["a", "b"]}, [3.0, 3.0, 3.0]),
        ({"as": "a"}, [2.0, 2.0, 5.0]),
        ({"tune_by": "lowest_training"}, [5.0, 1.0, 1.0]),
        ({"as": "a", "chosen": ("b",)}, [2.0]),
    ):
        options = dict(more)
        second = dataclasses.replace(configs["b"], tuned_as=options.pop("as", ""))
        changed = dict(configs, b=second)
        chosen = options.pop("chosen", ())
        experiment = experiments.Experiment(name="X", recipes={"r": changed}, **options)
        tuner = runner.Runner(experiment, runner.Results(), chosen=chosen)
        entries = tuner.train(1)["r"]
        assert [entry["tuned"]["optim.lr"] for entry in entries.values()] == tuned


def test_values_are_tuned_by_the_number_of_runs_that_succeed(monkeypatch, tmp_path):
    """Of equal numbers the values nearest to the middle count, whatever the losses. The
    audit, which reads rows alone, chooses the same."""
    rates = [1.0, 2.0, 4.0, 8.0, 16.0]
    grid = {"optim.muon_lr": rates, "optim.lr": rates}
    one = RunConfig("a", {}, grid)
    values = {
        "kind": "exact_star",
        "tune_by_success": 0.9,
        "recipes": {"r": {"tune": grid}},
        "run_configs": {"a": {}},
    }
    measure = experiments.Measure(script="eval_tasks.py", arguments=["{run}"])
    experiment = experiments.Experiment(
        name="X",
        recipes={"r": {"a": one}},
        measures=[measure],
        kind="exact_star",
        tune_by_success=0.9,
    )
    for successes, best in (
        ({(4.0, 4.0): 1, (8.0, 4.0): 2}, (8.0, 4.0)),
        ({(2.0, 4.0): 1, (8.0, 4.0): 1, (4.0, 8.0): 1}, (2.0, 4.0)),
        ({}, (4.0, 4.0)),
    ):
        lines = []

        def result(self, recipe, config, commands, won=successes, lines=lines):
            assert commands == [["eval_tasks.py", str(config.run_folder)]]
            place = (config.optim.muon_lr, config.optim.lr)
            right = 0.95 if config.seed - 100 < won.get(place, 0) else 0.89
            row = {"measured": {"exact_star": [right, None]}, "tokens": [1]}
            row["losses"] = {"training": [-config.optim.lr]}
            lines.append(json.dumps({"run": str(config.run_folder), "result": row}))
            return row

        monkeypatch.setattr(runner.Runner, "result", result)
        tuner = runner.Runner(experiment, runner.Results())
        tuned = runner.best_of(one, tuner.tune("r", [one]))
        assert tuple(tuned.values()) == best
        audited = audit_findings.Experiment(values, lines).best_values("r", "a")
        assert audited == "{:g}_lr{:g}".format(*best)


def test_tuning_goes_down_where_every_run_has_diverged():
    """And takes the lower one of equal values."""
    grid = {"x": [1, 2, 3, 4, 5, 6, 7]}
    one = RunConfig("a", {}, grid)
    for losses, best in (
        ([1.0, 0.5, *[math.inf] * 5], 2),
        ([9.0, 9.0, 1.0, 0.9, 1.0, 0.9, 1.5], 4),
    ):
        tried = runner.search(
            grid, lambda values, at=losses: at[grid["x"].index(values["x"])]
        )
        assert runner.best_of(one, tried) == {"x": best}


def test_a_number_of_runs_that_diverged_is_not_printed():
    entries = {"a": by_seed(1.0, 2.0, 3.0), "b": by_seed(2.0, 3.0, 4.0)}
    experiment = experiments.Experiment(name="E7", recipes={"slow": {}})
    text = "{slow: b - a}, {slow: b}"
    filled = pages.filled(text, experiment, {"slow": entries})
    assert filled == "1.000 (3 seeds), 2.000, 3.000, 4.000"
    entries["a"]["runs"][1]["tokens"] = []
    with pytest.raises(UserError, match="a run behind {slow: b - a} diverged"):
        pages.filled(text, experiment, {"slow": entries})


def test_two_processes_add_rows_to_one_file(tmp_path):
    file = tmp_path / "E7.runs.jsonl"
    both = [runner.Results(file), runner.Results(file)]  # each has read no row
    for seed, results in enumerate(both):
        config = Config(seed=seed)
        result = {"tokens": [1], "losses": {"training": [1.0]}, "seed": seed}
        results.of(config, [], lambda result=result: result)
    seeds = [row["result"]["seed"] for row in runs.rows_by("key", file).values()]
    assert seeds == [0, 1]


def test_the_unigram_entropy_is_of_predicted_tokens(tmp_path):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        [f"[GIVEN]{'z' * 9}[/GIVEN]{'ab'[i % 2]}" for i in range(40)],
    )
    folder = prepared(
        "records", tmp_path / "data", source, tokenizer="bytes", block_size=12
    )
    # One of two letters, then the end.
    assert unigram(str(folder)) == pytest.approx(1.5 * math.log(2), abs=0.01)


def test_results_at_hand_count_when_tuning():
    """A rate that the search would not reach, whose runs are on file, is chosen if it
    is best."""
    losses = {1.0: 3.0, 2.0: 2.0, 3.0: 1.0, 4.0: 2.0, 5.0: 0.5}
    grid = {"optim.lr": list(losses)}
    one = RunConfig("a", {}, grid)
    results = runner.Results()
    experiment = experiments.Experiment(name="X", recipes={"r": {"a": one}})
    tuner = runner.Runner(experiment, results)

    def save(lr, seed):
        config = experiment.config("r", one, seed, {"optim.lr": lr})
        row = {"tokens": [1], "losses": {"training": [losses[lr]]}, "seed": seed}
        results.of(config, [], lambda: row)

    for lr, seed in itertools.product((2.0, 3.0, 4.0), experiment.tuning_seeds):
        save(lr, seed)
    assert runner.best_of(one, tuner.tune("r", [one])) == {"optim.lr": 3.0}
    for seed in experiment.tuning_seeds:
        save(5.0, seed)
    assert runner.best_of(one, tuner.tune("r", [one])) == {"optim.lr": 5.0}


def test_values_are_tried_from_the_middle_for_as_long_as_the_loss_falls():
    one = RunConfig("a", {}, {})
    for losses, tried in (
        ([5, 4, 3, 2], [1, 2, 3]),
        ([9, 9, 5, 2, 4, 3, 9], [2, 3, 4]),
        # 3 beside 4 does not lead away from 1
        ([9, 1, 2, 4, 3, 9, 9], [0, 1, 2, 3, 4]),
        ([9, 5, 3, math.inf], [1, 2, 3]),
        ([3, 2, math.inf, math.inf], [0, 1, 2, 3]),
        ([1], []),
    ):
        grid = {"x": list(range(len(losses)))}
        tried_losses = runner.search(grid, lambda values, at=losses: at[values["x"]])
        assert tried_losses == [({"x": place}, losses[place]) for place in tried]
        if tried_losses:
            best = runner.best_of(one, tried_losses)
            assert losses[best["x"]] == min(losses)
    with pytest.raises(ValueError, match="no run of a ended: lower the values"):
        runner.best_of(one, [({"x": 1}, math.inf)])


EXPERIMENT = """
title = "learning"
row = { theme = "orders" }
source = "everybody"
setting = "A tiny model."
answer = "One has to learn: {slow: still - moving} nats."
kind = "random"
goal = 5.0
seeds = 2
tuning_seeds = [7]
figure = "curves"
shown = ["l2r"]
claims = [
    { says = "moving wins", lower = "moving", higher = "still", primary = ["slow"] },
    { says = "who does not is better", lower = "still:l2r", higher = "moving:l2r" },
    { says = "measured", lower = "moving:eval_l2r", higher = "still:l2r" },
]
[recipes]
slow = { tune = { "optim.beta2" = [0.9, 0.95] } }
muon = { "optim.kind" = "muon", tune = { "optim.muon_lr" = [0.01, 0.02] } }
[run_configs]
still = { description = "no rate", "optim.lr" = 0.0, "optim.muon_lr" = 0.0 }
moving = { description = "a rate", "optim.lr" = 1e-2 }
[[measures]]
script = "eval_ppl.py"
arguments = ["{run}", "--datasets", "{data}", "--orders", "l2r"]
run_configs = ["moving"]
"""


class OneByOne(Executor):
    def __init__(self, jobs):
        pass

    def submit(self, function, *arguments):
        done = Future()
        try:
            done.set_result(function(*arguments))
        except runner.MissingRow as error:
            done.set_exception(error)
        return done


@pytest.fixture
def tiny(data, tmp_path, monkeypatch, run_here):
    """An experiment of seconds: a run config that learns nothing, one that does."""
    base = tiny_config(
        data,
        tmp_path,
        steps=20,
        eval__interval=5,
        eval__draws=2,
        model__n_layer=1,
        train__micro_batch_size=8,
    )
    pages.titles()  # kept: they are read from the folder that is replaced here
    values = tomllib.loads(EXPERIMENT)
    values["base"] = tomllib.loads(configuration.to_toml(base))
    for module in (experiments, pages):
        monkeypatch.setattr(module, "CONFIGS", tmp_path)
    for module in (experiments, pages, findings):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(findings, "CONFIGS", tmp_path)
    pages.load_results.cache_clear()
    monkeypatch.setattr(experiments, "OUT", tmp_path / "runs")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runs, "run_alone", run_here)
    monkeypatch.setattr(runner, "ThreadPoolExecutor", OneByOne)
    # 20 steps learn no more than frequencies
    monkeypatch.setattr(verdicts, "NOTHING", -math.inf)
    (tmp_path / "common.toml").write_text("[base]\n[recipes]\n")
    (tmp_path / "page.md").write_text("# Findings\n\nTABLE\n")
    (tmp_path / "front.md").write_text("It learns: {E7 slow: moving:l2r}\n")
    (tmp_path / "audit.md").write_text("Every number.\n")
    (tmp_path / "E7.toml").write_text(tomli_w.dumps(values))
    return tmp_path


def write(folder, changes):
    """Change the values of the experiment."""
    file = folder / "E7.toml"
    file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | changes))


run = functools.partial(run_main, findings)


def test_an_experiment_runs_is_judged_and_told_and_goes_on(tiny, monkeypatch, capsys):
    recipes = tomllib.loads((tiny / "E7.toml").read_text())["recipes"]
    write(tiny, {"recipes": {"slow": recipes["slow"]}})
    out = run(monkeypatch, capsys, "E7")
    experiment, recipes = pages.load_results("E7")
    entries = recipes["slow"]
    claims = pages.judgements(experiment, recipes)["slow"]
    for entry in entries.values():
        best = min(entry["tuning"], key=lambda tried: tried["loss"])
        assert entry["tuned"] == best["tuned"]
        assert len(entry["tuning"]) == 2
    assert [one["seed"] for one in entries["moving"]["runs"]] == [0, 1]
    means = {}
    for name, entry in entries.items():
        losses = [one["losses"]["random"][-1] for one in entry["runs"]]
        means[name] = statistics.mean(losses)
    difference = means["still"] - means["moving"]
    assert claims[0]["mean"] == pytest.approx(difference)
    assert claims[0]["primary"]
    assert claims[0]["verdict"] in (CONFIRMED, UNDECIDED)
    assert claims[1]["mean"] < 0
    assert claims[1]["verdict"] == ""
    first = entries["moving"]["runs"][0]
    untrained = entries["still"]["runs"][0]["losses"]["l2r"][-1]
    assert first["measured"]["eval_l2r"][0] < untrained
    name = f"moving_beta2{entries['moving']['tuned']['optim.beta2']}_s0"
    config = tiny / "runs" / "E7" / "slow" / name / "config.toml"
    tokens = read_tokens(configuration.load_toml(config).data.folder, "val")
    shares = [np.mean(tokens == token) for token in np.unique(tokens)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert first["measured"]["unigram"][0] == pytest.approx(entropy)
    assert len(first["losses"]["random_error"]) == 4
    assert first["tokens_per_second"] > 0
    assert "| moving" in out
    assert "observed" in out
    assert claims[0]["verdict"] in out
    figure = tiny / "results" / "E7.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert entries["moving"]["at_boundary"]
    assert "(boundary)" in out
    assert entries["moving"]["parameters"] > 10_000
    assert "parameters" in out
    page = (tiny / "results" / "E7.md").read_text()
    assert "# E7. learning" in page
    assert f"learn: {difference:.3f} (2 seeds) nats." in page
    assert f"**{claims[0]['verdict']}**" in page
    # Nothing is trained again, with the folders of the runs or with the rows alone.
    monkeypatch.setattr(runs, "run_alone", None)
    for _ in range(2):
        assert run(monkeypatch, capsys, "E7") == out
        assert (tiny / "results" / "E7.md").read_text() == page
        shutil.rmtree(tiny / "runs", ignore_errors=True)
    details = run(monkeypatch, capsys, "details", "E7")
    assert details
    assert out.startswith(details)
    # With fewer seeds there is a figure, and the page stays that of all.
    figure.unlink()
    run(monkeypatch, capsys, "E7", "--seeds", "1")
    assert (tiny / "runs" / "part" / "E7.png").exists()
    assert not figure.exists()
    assert (tiny / "results" / "E7.md").read_text() == page
    with pytest.raises(UserError, match="E7 has no table of costs"):
        run(monkeypatch, capsys, "speeds", "E7")
    run(monkeypatch, capsys, "page")
    assert (tiny / "results" / "E7.md").read_text() == page
    assert figure.exists()
    assert "[learning](E7.md)" in (tiny / "results" / "README.md").read_text()
    assert (tiny / "README.md").read_text().startswith("It learns: ")


def test_pages_are_of_experiments_whose_rows_are_all_there(tiny, monkeypatch, capsys):
    monkeypatch.setattr(runs, "run_alone", None)  # and nothing is trained for a page
    with pytest.raises(
        runner.MissingRow, match=r"E7\.runs\.jsonl has not all runs of any"
    ):
        run(monkeypatch, capsys, "details", "E7")
    (tiny / "front.md").write_text("Nothing yet.\n")
    run(monkeypatch, capsys, "page")
    assert "\n- E7: " in (tiny / "results" / "README.md").read_text()
    for words in ((), ("E7", "E8"), ("page", "E7")):
        with pytest.raises(ValueError, match="name one experiment, or: details"):
            run(monkeypatch, capsys, *words)


def test_details_of_runs_that_were_not_tuned_say_so():
    entries = {"a": by_seed(2.0, 2.2), "b": by_seed(1.0, 1.2)}
    for entry in entries.values():
        entry |= {"tuned": {"optim.lr": 1e-3}, "tuned_as": "", "tuning": []}
        entry |= {"at_boundary": False, "parameters": 1234}
        for run_row in entry["runs"]:
            run_row |= {"commit": "abc", "measured": {}}
    experiment = dataclasses.replace(load_experiment("E22"), claims=[])
    details = "\n".join(pages.details_of(experiment, {"fast": entries}))
    assert "lr 0.001 (not tuned)" in details
    assert "Nothing was tuned" in details
    assert "Rates are tuned on" not in details
    entries["a"]["tuning"] = [{"tuned": {"optim.lr": 1e-3}, "loss": 2.0}]
    details = "\n".join(pages.details_of(experiment, {"fast": entries}))
    assert "Rates are tuned on" in details
    assert "Nothing was tuned" not in details


def test_a_name_may_stand_for_the_run_config_that_was_tuned_lowest():
    """By tuning runs, not by reported ones; only once all candidates have results. The
    independent script takes the same one."""

    def entry(loss, *tuning):
        return by_seed(loss) | {"tuning": [{"loss": value} for value in tuning]}

    best_of = {"best": ["one", "other"]}
    entries = {"one": entry(1.0, 3.0, 2.5), "other": entry(1.5, 2.4, 2.6)}
    assert runner.with_best(best_of, entries)["best"] is entries["other"]
    assert "best" not in entries
    del entries["other"]["tuning"]
    assert runner.with_best(best_of, entries) == entries
    assert runner.with_best(best_of, {"one": entries["one"]}) == {"one": entries["one"]}
    lines = []
    for name, rate, seed, loss in (
        ("one", 0.1, 100, 2.5),
        ("one", 0.2, 100, 3.0),
        ("one", 0.1, 0, 1.0),
        ("other", 0.1, 100, 2.6),
        ("other", 0.2, 100, 2.4),
        ("other", 0.2, 0, 1.5),
    ):
        folder = f"out/r/{name}_lr{rate}_s{seed}"
        result = {"losses": {"training": [loss]}, "measured": {}, "tokens": [1]}
        lines.append(json.dumps({"run": folder, "result": result}))
    toml = {
        "recipes": {"r": {"tune": {"lr": [0.1, 0.2]}}},
        "run_configs": {"one": {}, "other": {}},
        "best_of": best_of,
        "tuning_seeds": [100],
        "seeds": 1,
    }
    experiment = audit_findings.Experiment(toml, lines)
    (result,) = experiment.runs_of("r", "best")
    assert result["losses"]["training"] == [1.5]


def test_a_cell_says_whose_rate_a_run_config_has_and_whether_it_was_tuned():
    entry = {
        "tuned": {"optim.lr": 1e-3, "optim.muon_lr": 0.02},
        "tuned_as": "",
        "tuning": [{"tuned": {"optim.lr": 1e-3}, "loss": 2.0}],
        "at_boundary": False,
    }
    assert pages.tuned_cell(entry) == "lr 0.001, muon_lr 0.02"
    entry["tuned_as"] = "whole"
    entry["at_boundary"] = True
    assert pages.tuned_cell(entry) == "lr 0.001, muon_lr 0.02 (boundary) (as whole)"
    entry["tuning"] = []
    entry["at_boundary"] = False
    assert pages.tuned_cell(entry) == "lr 0.001, muon_lr 0.02 (not tuned)"
    entry["tuned"] = {}
    entry["tuned_as"] = ""
    assert pages.tuned_cell(entry) == ""


def test_a_number_of_a_text_may_have_more_digits_or_be_what_a_run_config_costs():
    entries = {"a": by_seed(2.0, 2.2, 2.1, 2.1), "b": by_seed(1.0, 1.2, 1.1, 1.1)}
    for entry in entries.values():
        entry |= {"parameters": 1234, "flops": 2.5e6}
    experiment = dataclasses.replace(load_experiment("E22"), kind="training")
    texts = {
        "{fast: a - b}": "1.000 ± 0.141",
        "{fast: a - b, 4 digits}": "1.0000 ± 0.1413",
        "{fast: a, 4 digits}": "2.1000 ± 0.1299",
        "{fast: b:mflops}, {fast: b:parameters}": "2.50, 1,234",
    }
    for text, expected in texts.items():
        assert pages.filled(text, experiment, {"fast": entries}) == expected
    with pytest.raises(ValueError, match="E22 has no {fast: c:mflops}"):
        pages.filled("{fast: c:mflops}", experiment, {"fast": entries})
    with pytest.raises(ValueError, match="no option '4 places'"):
        pages.filled("{fast: a - b, 4 places}", experiment, {"fast": entries})
    # a question of success
    experiment = dataclasses.replace(load_experiment("E26"), kind="training")
    shares = {"a": by_seed(1.0, 0.9, 0.89, 0.4), "b": by_seed(0.1, 0.2, 0.1, 0.1)}
    text = pages.filled("{star: a}, {star: a each}", experiment, {"star": shares})
    assert text == "2 of 4 runs, 0.400, 0.890, 0.900, 1.000"
    text = pages.filled("{star: a range}", experiment, {"star": shares})
    assert text == "0.400 to 1.000"
    text = pages.filled("{star: a - b}, {star: a - b, p}", experiment, {"star": shares})
    p = stats.fisher_exact([[2, 2], [0, 4]]).pvalue
    assert text == f"2 against 0 of 4 runs, {p:.2g}"


def test_a_text_may_name_p_values_some_seeds_alone_and_earlier_losses():
    """Against scipy."""
    low = [1.0, 1.3, 1.15, 1.12, 2.4, 2.5]
    high = [2.0, 2.2, 2.15, 2.1, 1.1, 1.0]
    entries = {"a": by_seed(*high), "b": by_seed(*low), "c": by_seed(5.0, 5.1)}
    for entry in entries.values():
        for run in entry["runs"]:
            last = run["losses"]["training"][-1]
            run["losses"]["training"] = [last + 1 + run["seed"] % 2, last]
            run["tokens"] = [5, 10]
    claims = [
        Claim("b is lower", "b", "a", primary=["fast"]),
        Claim("the same, not marked", "b", "a"),
        Claim("a is lower", "a", "c", primary=["fast"]),
    ]
    experiment = dataclasses.replace(
        load_experiment("E22"), kind="training", claims=claims
    )

    def shown(text):
        return pages.filled(text, experiment, {"fast": entries})

    test = stats.ttest_ind(high[:4], low[:4], equal_var=False)
    p = test.pvalue
    interval = test.confidence_interval()
    half_width = (interval.high - interval.low) / 2
    other = stats.ttest_ind([5.0, 5.1], high[:4], equal_var=False).pvalue
    p_rank = stats.mannwhitneyu(high[:4], low[:4], method="exact").pvalue
    assert shown("{fast: a - b, p, seeds 0 to 3}") == f"{p:.2g}"
    assert shown("{fast: a - b, p by ranks, seeds 0 to 3}") == f"{p_rank:.2g}"
    assert p < other
    # of two marked claims the smaller p counts twice, whatever the order of the sides
    assert shown("{fast: a - b, Holm's p, seeds 0 to 3}") == f"{2 * p:.2g}"
    assert shown("{fast: b - a, seeds 0 to 3, Holm's p}") == f"{2 * p:.2g}"
    assert shown("{fast: a, seeds 4 to 5, 1 digits}") == "1.1, 1.0"
    assert shown("{fast: a - b, seeds 0 to 3}") == f"0.970 ± {half_width:.3f}"
    assert shown("{fast: c:training@0.5 - c}") == "1.500 (2 seeds)"
    for text in (
        "{fast: b - c, Holm's p}",  # no marked claim
        "{fast: a - b, seeds 9 to 12}",
        "{fast: a - b, seeds 0 to 6}",  # one more than there are
        "{fast: a - b, Holm's p, seeds 0 to 0}",
        "{fast: a, p}",
        "{slow: a - b, p}",
    ):
        with pytest.raises(ValueError, match="E22 has no"):
            shown(text)
    assert shown("{fast: a - b, verdict, seeds 0 to 3}") == CONFIRMED
    assert shown("{fast: b - a, verdict, seeds 0 to 3}") == OPPOSITE  # of the contrary
    for text in ("{fast: a, seeds 3 to 0}", "{fast: a, seeds 0 to 1, seeds 2 to 3}"):
        with pytest.raises(ValueError, match="a number of a text cannot be of seeds"):
            shown(text)


def test_equal_runs_that_differ_by_the_margin_decide_nothing():
    """Whatever 0.9 - 1.0 + 0.1 is in floating point."""
    claim = Claim("b is as low, within 0.1", "b", "a", margin=0.1)
    for high, low in ((0.9, 1.0), (0.3, 0.4)):
        entries = {"a": by_seed(*[high] * 8), "b": by_seed(*[low] * 8)}
        assert judged(claim, "training", entries)["p"] == 1


def test_a_text_names_a_claim_by_its_margin():
    """Two marked claims of the same run configs, the second with a margin."""
    low = [1.0, 1.3, 1.15, 1.12]
    high = [2.0, 2.2, 2.15, 2.1]
    entries = {"a": by_seed(*high), "b": by_seed(*low)}
    claims = [
        Claim("a is as low, within 1.5", "a", "b", margin=1.5, primary=["fast"]),
        Claim("b is lower", "b", "a", primary=["fast"]),
    ]
    experiment = dataclasses.replace(
        load_experiment("E22"), kind="training", claims=claims
    )

    def shown(text):
        return pages.filled(text, experiment, {"fast": entries})

    plain = stats.ttest_ind(high, low, equal_var=False).pvalue
    shifted = stats.ttest_ind(high, [loss + 1.5 for loss in low], equal_var=False)
    p = shifted.pvalue
    assert plain < p < 0.05
    assert shown("{fast: a - b, Holm's p}") == f"{2 * plain:.2g}"
    assert shown("{fast: b - a, margin 1.5, p}") == f"{p:.2g}"
    assert shown("{fast: b - a, margin 1.5, Holm's p}") == f"{p:.2g}"
    assert shown("{fast: a - b, verdict}") == CONFIRMED
    assert shown("{fast: b - a, margin 1.5, verdict}") == CONFIRMED
    for text in (
        "{fast: a - b, margin 1.5, verdict}",  # its contrary is no claim
        "{fast: b - a, margin 0.2, verdict}",
        "{fast: b - a, margin 1.5}",
    ):
        with pytest.raises(ValueError, match="E22 has no"):
            shown(text)


def test_a_passage_stands_where_its_runs_are_there():
    experiment = load_experiment("E22")
    recipes = {"fast": {"adaln": by_seed(2.0, 2.2, eval_random=(2.0, 0.0))}}

    def shown(text):
        return pages.filled(text, experiment, recipes)

    assert shown("It is <<{fast: adaln} || not run>>.") == "It is 2.000, 2.000."
    assert shown("It is <<{fast: adaln} and {fast: rotary} || not run>>.") == (
        "It is not run."
    )
    for misspelt in ("<<{fast: adeln} || not run>>", "<<{slow: adaln} || not run>>"):
        with pytest.raises(UserError, match="E22 has no"):
            shown(misspelt)
    with pytest.raises(runner.MissingRow, match="E22 has no"):
        shown("{fast: rotary}")


def test_front_figures_are_of_the_rows():
    """Of each decoder its difference from the encoder, filled where it was claimed."""
    experiment, recipes = pages.load_results("E34")
    entries = runner.with_best(experiment.best_of, recipes["sudoku"])
    claim = front_figures.difference(entries, "rotary")
    shown = pages.filled("{E34 sudoku: rotary:eval_random - best_encoder:eval_random}")
    assert shown == f"{claim['mean']:.3f} ± {claim['half_width']:.3f}"
    marked = {
        name: front_figures.is_marked(experiment, "sudoku", name, "best_encoder")
        for name in front_figures.WAYS
    }
    assert marked.pop("mask_query")
    assert not any(marked.values())
    for make in front_figures.FIGURES.values():
        assert make().startswith(b"\x89PNG")


def test_an_experiment_that_is_partly_run_has_a_page_that_names_the_rest(
    tiny, monkeypatch, capsys
):
    """Its verdicts are as strict as if all its primary claims were there."""
    recipes = tomllib.loads((tiny / "E7.toml").read_text())["recipes"]
    claims = tomllib.loads((tiny / "E7.toml").read_text())["claims"]
    claims[0]["primary"] = ["slow", "muon"]
    write(tiny, {"recipes": {"slow": recipes["slow"]}, "claims": claims})
    run(monkeypatch, capsys, "E7")
    write(tiny, {"recipes": recipes})
    pages.load_results.cache_clear()
    monkeypatch.setattr(runs, "run_alone", None)
    run(monkeypatch, capsys, "page")
    page = (tiny / "results" / "E7.md").read_text()
    assert "**Not run yet.** muon." in page
    overview = (tiny / "results" / "README.md").read_text()
    assert "Partly run: E7 (not yet: muon)." in overview
    experiment, recipes = pages.load_results("E7")
    (judgement,) = [
        claim
        for claim in pages.judgements(experiment, recipes)["slow"]
        if claim["primary"]
    ]
    assert judgement["p_holm"] == pytest.approx(min(1.0, 2 * judgement["p"]))
    # A run config alone that lacks a run is left out, too.
    file = tiny / "results" / "E7.runs.jsonl"
    lines = file.read_text().splitlines()
    remaining = [line for line in lines if not re.search(r"moving_\S*_s0\"", line)]
    assert len(remaining) < len(lines)
    file.write_text("\n".join(remaining) + "\n")
    pages.load_results.cache_clear()
    experiment, recipes = pages.load_results("E7")
    assert list(recipes["slow"]) == ["still"]
    assert pages.not_run(experiment, recipes) == ["slow: a rate", "muon"]
    assert not any(pages.judgements(experiment, recipes)["slow"])


def test_results_are_kept_of_the_runs_that_were_not_changed_since(
    tiny, monkeypatch, capsys
):
    trained = []
    alone = runs.run_alone

    def seen(script, *arguments, **options):
        if script == "train.py":
            trained.append(Path(arguments[0]).stem)
        return alone(script, *arguments, **options)

    monkeypatch.setattr(runs, "run_alone", seen)
    recipes = tomllib.loads((tiny / "E7.toml").read_text())["recipes"]
    write(tiny, {"recipes": {"slow": recipes["slow"]}})
    run(monkeypatch, capsys, "E7", "--seeds", "1")
    file = tiny / "results" / "E7.runs.jsonl"
    lines = file.read_text().splitlines()
    assert len(trained) == len(lines) == 4 + 2  # tuned on another seed
    lost = next(line for line in lines if "still" in line)
    file.write_text("\n".join(line for line in lines if line != lost) + "\n")
    shutil.rmtree(tiny / "runs")
    run_configs = tomllib.loads((tiny / "E7.toml").read_text())["run_configs"]
    run_configs["moving"]["optim.lr"] = 2e-2
    write(tiny, {"run_configs": run_configs})
    trained.clear()
    run(monkeypatch, capsys, "E7", "--seeds", "1")
    first = Path(json.loads(lost)["run"]).name
    changed = [name for name in trained if name.startswith("moving")]
    assert len(changed) == 3
    assert sorted(trained) == sorted([*changed, first])
    file.write_text("{")
    with pytest.raises(ValueError, match=r"E7\.runs\.jsonl line 1: this is not JSON"):
        run(monkeypatch, capsys, "E7", "--seeds", "1")


def test_a_run_config_goes_on_from_a_helper_of_its_recipe_in_stages(tiny):
    run_configs = tomllib.loads((tiny / "E7.toml").read_text())["run_configs"]
    run_configs["moving"]["schedule"] = [
        {"step": 0, "kind": "l2r"},
        {"step": 8, "kind": "random"},
    ]
    run_configs["moving"]["train.init_from"] = "first"
    helpers = {"first": {"description": "from left to right", "order.kind": "l2r"}}
    write(tiny, {"run_configs": run_configs, "helpers": helpers})
    experiment = load_experiment("E7")
    one = experiment.recipes["slow"]["moving"]
    first = experiment.helper_configs("slow")["first"]
    assert first.seed == experiments.HELPER_SEED
    assert first.order.kind == "l2r"
    # the middle of two values
    assert first.optim.beta2 == 0.95
    assert not first.train.init_from
    config = experiment.config("slow", one, 1, {})
    assert config.train.init_from == str(first.run_folder)
    assert [stage.step for stage in config.schedule] == [0, 8]


def test_what_is_wrong_in_an_experiment_is_named_before_a_run_is_trained(
    tiny, monkeypatch, capsys
):
    with pytest.raises(
        ValueError, match="there is no experiment 'E8'; choose one of E7"
    ):
        load_experiment("E8")
    for changes, message in (
        ({"colour": 3}, "E7.toml is damaged: TypeError: .*colour"),
        ({"run_configs": {"still": {"tune": [1]}}}, "experiment E7: still.tune is"),
        (
            {"claims": [{"says": "", "lower": "still"}]},
            "experiment E7: it lacks .*higher",
        ),
    ):
        before = (tiny / "E7.toml").read_text()
        write(tiny, changes)
        with pytest.raises(FileError, match=message):
            load_experiment("E7")
        (tiny / "E7.toml").write_text(before)
    measure = {
        "script": "eval_ppl.py",
        "arguments": ["{run}", "--datasets", "data/bytes/nothing"],
    }
    write(tiny, {"measures": [measure], "recipes": {"slow": {"optim.beta2": 0.9}}})
    with pytest.raises(FileNotFoundError, match="data/bytes/nothing"):
        run(monkeypatch, capsys, "E7")
    assert not list((tiny / "runs").rglob("*_s1"))


@pytest.mark.slow(reason="runs experiments")
@pytest.mark.parametrize(
    ("name", "run_configs", "size"),  # size: bytes, fewer for two curves
    [
        ("E13", (), 10_000),
        ("E26", ("rotary", "gpt"), 5_000),
        ("E28", ("rotary", "encoder"), 10_000),
    ],
    ids=["text", "star", "facts"],
)
def test_experiments_run_quickly_from_prepared_data(name, run_configs, size):
    quick = ROOT / "out" / "findings" / "quick"
    shutil.rmtree(quick / name, ignore_errors=True)
    rows = pages.RESULTS / f"{name}.runs.jsonl"
    before = rows.read_bytes() if rows.exists() else None
    options = ["--seeds", 1, "--quick", "--jobs", 2]
    if run_configs:
        options += ["--run-configs", *run_configs]
    done = run_script("-m", "studies.findings", name, *options)
    assert "observed" in done.stdout or "undecided" in done.stdout
    assert (quick / f"{name}.png").stat().st_size > size
    assert (rows.read_bytes() if rows.exists() else None) == before


def test_after_an_interrupt_no_further_run_starts(tiny, monkeypatch):
    """The first of four run configs is interrupted: the two that may have started since
    go on until the others are cancelled."""
    started = []
    cancelled = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **options):
            super().shutdown(wait=False, **options)
            cancelled.set()
            super().shutdown()

    def work(config, processes=1):
        started.append(config)
        if config.run_folder.parent.name == "slow" and config.name.startswith("still"):
            raise KeyboardInterrupt
        assert cancelled.wait(600)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "finished_run", work)
    monkeypatch.setattr(runner, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        runner.Runner(load_experiment("E7"), runner.Results(), jobs=2).train(50)
    assert 1 <= len(started) <= 3


def test_passes_are_those_of_each_sample(tmp_path):
    model = str(runs.ROOT / "results" / "books_model")
    modes = ["--modes", "l2r", "speculative:order=l2r,draft=4"]
    words = ["--samples", "2", "--length", "8"]
    report = runs.report_of("studies.passes", model, *modes, *words)
    assert report["results"][0]["tokens_a_pass"] == 1
    figures = measures.of_passes(report)
    assert list(figures) == ["tokens_a_pass", "tokens_a_pass_l2r"]
    assert 0.5 <= figures["tokens_a_pass_l2r"][0] <= 4
