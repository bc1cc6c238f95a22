"""findings.py: arms are compared seed by seed, and the verdict is what the numbers say."""

import importlib
import io
import json
import math
import re
import shutil
import subprocess
import time
import tomllib
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from helpers import ROOT, change, run_script, tiny_config

from data.loader import read_tokens
from runtime.validation import FileError
from studies import findings
from studies.experiments import arms as of_arms
from studies.experiments import measures, report, suite, tuning, verdicts
from studies.experiments.measures import SYSTEMS
from studies.experiments.suite import load_experiment
from studies.experiments.verdicts import Claim, Ratio, is_number, judged, ratio_of, verdict
from training import config as configuration
from training.optimizers import learning_rates

SHIPPED = suite.names()


# ---- what is shipped -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_arms_of_a_recipe_are_tuned_alike_and_share_data_and_evaluation(name):
    experiment = load_experiment(name)
    assert experiment.title and experiment.source and experiment.setting
    # Verdicts are computed: what is written by hand would be wrong after the next run.
    assert not re.search("reproduced|reversed|unresolved", experiment.meaning, re.IGNORECASE)
    for recipe, arms in experiment.recipes.items():
        tried = {json.dumps(arm.tune) for arm in arms.values()}
        assert len(tried) == 1 and all(len(v) >= 3 for v in arms[next(iter(arms))].tune.values())
        for arm in arms.values():
            configs = [experiment.config(recipe, arm, seed, {}) for seed in (0, 1)]
            differences = configuration.differences(*configs)
            assert differences.keys() == {"name", "seed", "order.seed"} and arm.why
            others = [experiment.config(recipe, other, 0, {}) for other in arms.values()]
            same_data = next(other for other in others if other.data == configs[0].data)
            for kept in ("eval", "train"):
                assert getattr(configs[0], kept) == getattr(same_data, kept)
            assert configs[0].model.block_size == same_data.model.block_size


@pytest.mark.parametrize("name", SHIPPED)
def test_claims_are_of_arms_and_losses_that_there_are(name):
    experiment = load_experiment(name)
    arms = {arm for recipe in experiment.recipes.values() for arm in recipe}
    sides = [side for claim in experiment.claims for side in (claim.lower, claim.higher)]
    sides += [side for ratio in experiment.ratios for side in (*ratio.of, *ratio.to)]
    if experiment.bench:
        arms = set(SYSTEMS) | {f"{system}_{size}" for system in SYSTEMS for size in (1, 8)}
        words = experiment.bench.arguments
        assert int(words[words.index("--repeats") + 1]) >= 2  # of one, nothing can be said
    for side in sides:
        assert side.partition(":")[0] in arms or is_number(side)
    assert arms >= {arm for measure in experiment.measures for arm in measure.arms}
    assert experiment.figure in report.DRAWINGS


def test_the_page_is_made_of_the_results_that_are_shipped():
    assert findings.PAGE.read_text() == report.page()


def test_the_overview_counts_the_claims_that_were_there_before_the_runs():
    claims = [
        {"says": says, "verdict": verdict}
        for says, verdict in [
            ("a", "reversed"),
            ("b", "reproduced"),
            ("c", "reversed"),
            ("d (asked after the runs)", "unresolved"),
        ]
    ]
    experiment = load_experiment("E5")
    *_, row, end = report.overview([(experiment, {"claims": {"one": claims, "two": claims[3:]}})])
    assert row.split("|")[-2].strip() == "one: 1 reproduced, 2 reversed" and not end
    # As GitHub makes them of headings.
    assert "[E5](#e5-is-the-gap-to-an-encoder-one-of-order-ensembles)" in row


@pytest.mark.parametrize("file", sorted(report.RESULTS.glob("E*.json")), ids=lambda file: file.stem)
def test_verdicts_and_tables_are_those_of_the_runs_that_are_shipped(file):
    """Nobody has written a verdict by hand; and every claim is of something that was measured."""
    experiment, found = load_experiment(file.stem), json.loads(file.read_text())
    assert findings.judgements(experiment, found["recipes"]) == {
        part: found[part] for part in ("claims", "ratios")
    }
    table = "\n".join(report.tables(experiment, found)) + "\n"
    assert file.with_suffix(".md").read_text() == table
    said = [claim for claims in found["claims"].values() for claim in claims]
    assert said and not any(claim["verdict"] == verdicts.UNMEASURED for claim in said)


def test_runs_that_were_there_have_no_part_in_the_time_that_is_left():
    """Of 12 runs 9 were there, one took an hour: the other two will take two."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with suite.RunsBar("E1", 12, file=terminal) as bar:
        for made in [False] * 9 + [True]:
            bar.done(made)
        bar.start_t -= 3600
        assert re.search(r"10/12 \[1:00:\d\d<2:00:\d\d", str(bar))


def test_the_encoder_beside_the_order_ensembles_is_that_of_the_findings():
    recipes = json.loads((report.RESULTS / "E5.json").read_text())["recipes"]
    kinds = ("eval_random", "eval_random_m8", "eval_random_m64")
    columns = [("aogpt10", kind) for kind in kinds] + [("encoder", "eval_random")]
    lines = (ROOT / "results" / "order_ensembles.md").read_text().splitlines()
    for recipe, line in (("sinusoidal", "| sine tables"), ("fast", "| fast")):
        means = [report.mean_over_seeds(recipes[recipe][arm], kind)[0] for arm, kind in columns]
        (row,) = [text for text in lines if text.startswith(line)]
        assert row.strip("| ").split(" | ")[1:] == [f"{mean:.4f}" for mean in means]


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_runs_at_the_papers_scale_have_the_papers_size_and_what_their_arm_changes(name):
    experiment = load_experiment(name)
    if experiment.bench:
        assert experiment.scale["command"].startswith("python -m studies.bench")
        return
    configs = {(r, a): c for r in experiment.recipes for a, c in experiment.at_scale(r).items()}
    for config in configs.values():
        assert (config.model.n_layer, config.model.n_embd, config.model.block_size) == (
            12,
            768,
            1024,
        )
        assert config.data.folder == "data/openwebtext" and config.model.vocab_size == 50304
    if name == "E2":
        shares = [configs["paper", arm].order.l2r_prob for arm in ("l2r0", "l2r5", "l2r100")]
        assert shares == [0.0, 0.05, 1.0] and configs["fast", "l2r0"].model.position == "rotary"
    if name == "E5":
        prefix = configs["sinusoidal", "encoder_prefix"]
        assert prefix.model.is_encoder and prefix.objective.prefix_prob == 0.1
    if name == "E11":
        for recipe in ("sinusoidal", "fast"):
            direct, curriculum = (configs[recipe, arm] for arm in ("direct", "curriculum"))
            assert [stage.kind for stage in direct.schedule] == ["l2r", "random"]
            assert direct.schedule[1].step == direct.train.steps // 10
            assert {stage.group for stage in curriculum.schedule} == {1, 2, 3, 4}
            assert curriculum.schedule[-1].step == 0.4 * curriculum.train.steps
    if name in ("E1", "E2", "E3"):
        lengths = {
            (recipe, c.train.steps, c.optim.decay_steps) for (recipe, _), c in configs.items()
        }
        assert lengths == {("paper", 20_000, 500_000), ("fast", 20_000, 0)}
    if name == "E4":
        assert all(len(c.optim.more_ema_decays) == 3 for c in configs.values())
        for recipe, peak in (("sinusoidal", "lr"), ("fast", "muon_lr")):
            last = [
                learning_rates(19_999, configs[recipe, arm])[peak]
                for arm in ("constant", "falling")
            ]
            assert last[1] < 0.02 * last[0]


@pytest.mark.parametrize(
    "differences, monte_carlo, word",
    [
        ([0.1, 0.2, 0.15], 0.0, "reproduced"),
        ([-0.1, -0.2, -0.15], 0.0, "reversed"),
        ([0.1, 0.2, -0.01], 0.0, "unresolved"),  # a seed disagrees
        ([0.3, 0.3, -1e-6], 0.0, "unresolved"),  # by however little
        ([0.1, 0.2, 0.15], 0.08, "unresolved"),  # other orders might have said otherwise
        ([0.01, 0.5, 0.02], 0.0, "unresolved"),  # the seeds agree, but scatter
        ([0.5], 0.0, "unresolved"),  # one seed shows nothing
        ([], 0.0, "unresolved"),
        ([0.0, 0.0, 0.0], 0.0, "unresolved"),
    ],
)
def test_a_verdict_needs_all_seeds_and_two_standard_errors(differences, monte_carlo, word):
    assert verdict(differences, monte_carlo)["verdict"] == word


def result(seed, own, error):
    losses = {"own": [9.0, own], "own_error": [1.0, error], "l2r": [8.0, own / 2]}
    return {"seed": seed, "commit": "", "tokens": [1, 2], "losses": losses}


def test_a_claim_is_judged_by_paired_differences_at_the_end_and_the_errors_of_both_sides():
    arms = {
        "a": {"runs": [result(0, 2.0, 0.03), result(1, 2.1, 0.03)]},
        "b": {"runs": [result(0, 2.5, 0.04), result(1, 2.7, 0.04)]},
    }
    found = judged(Claim("b is worse", "a", "b"), "own", arms)
    assert found["differences"] == pytest.approx([0.5, 0.6])
    monte_carlo = math.sqrt(2 * (0.03**2 + 0.04**2)) / 2
    assert found["monte_carlo_error"] == pytest.approx(monte_carlo)
    # two differences of 0.5 and 0.6: their mean's standard error is 0.05
    assert found["error"] == pytest.approx(math.hypot(0.05, monte_carlo))
    assert found["verdict"] == "reproduced" and found["mean"] == pytest.approx(0.55)
    left = judged(Claim("", "b:l2r", "a:l2r"), "own", arms)
    assert left["differences"] == pytest.approx([-0.25, -0.3]) and left["monte_carlo_error"] == 0
    assert judged(Claim("", "a", "c"), "own", arms) is None
    at_half = judged(Claim("", "a:own@0.5", "b:own"), "own", arms)
    assert at_half["differences"] == pytest.approx([2.5 - 9, 2.7 - 9])
    assert at_half["monte_carlo_error"] == pytest.approx(math.sqrt(2 * (1 + 0.04**2)) / 2)
    # Two seeds agree, but the third did not end: those that did may be the lucky ones.
    arms["a"]["runs"].append(result(2, 2.0, 0.03))
    arms["b"]["runs"].append({"seed": 2, "tokens": [], "losses": {}, "commit": ""})
    left_out = judged(Claim("", "a", "b"), "own", arms)
    assert left_out["differences"] == pytest.approx([0.5, 0.6])
    assert left_out["verdict"] == "unresolved (a run did not end)"


def measured(**figures):
    return {"tokens": [], "losses": {}, "measured": figures}


def test_a_measure_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    """Its table, or its JSON, was written, and not the file of its figures."""
    monkeypatch.setattr(of_arms, "ROOT", tmp_path)
    for stale in ("m.report.md", "m.report.json"):
        (tmp_path / stale).write_text("")
    # As the scripts do, it replaces nothing that it is not told to.
    (tmp_path / "eval_ppl.py").write_text(
        "import json, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        "there = file.exists() or file.with_suffix('.md').exists()\n"
        "assert not there or '--overwrite' in sys.argv, 'exists already'\n"
        "row = {'orders': 'l2r', 'ensemble': 1, 'group': 1, 'nll': 2.0, 'monte_carlo_error': 0.1,"
        " 'gain': None, 'bits_per_byte': None}\n"
        "file.write_text(json.dumps({'results': [row]}))\n"
    )
    measure = measures.Measure("eval_ppl.py", ("RUN",))
    assert measures.figures_of(measure, ["RUN"], tmp_path / "m.json") == {"eval_l2r": [2.0, 0.1]}
    (tmp_path / "eval_ppl.py").unlink()  # from here on the figures can only be read
    assert measures.figures_of(measure, ["RUN"], tmp_path / "m.json") == {"eval_l2r": [2.0, 0.1]}


def test_a_side_of_a_claim_is_a_measured_figure_a_loss_or_a_number():
    arms = {
        "a": {"runs": [measured(gain=[0.3, 0.1]), measured(gain=[0.5, None])]},
        "b": {"runs": [result(0, 2.0, 0.0) | {"measured": {"own": [1.0, 0.3]}}, result(1, 2.0, 0)]},
    }
    found = judged(Claim("it gains", "0", "a:gain"), "own", arms)
    assert found["differences"] == [0.3, 0.5]
    assert found["monte_carlo_error"] == pytest.approx(0.1 / 2)
    # Measures draw the same for all seeds: their chance does not average out.
    same = {"runs": [measured(gain=[0.3, 0.1])] * 4}
    assert judged(Claim("", "0", "a:gain"), "own", {"a": same})["monte_carlo_error"] == 0.1
    # of a loss and a figure of one name the figure counts
    assert judged(Claim("", "b", "1.5"), "own", arms)["differences"] == [0.5, -0.5]
    assert judged(Claim("", "a:speed", "1"), "own", arms)["verdict"] == "not measured"
    assert judged(Claim("", "c:gain", "1"), "own", arms) is None


def test_two_losses_that_are_still_frequencies_of_tokens_tell_nothing():
    def runs(*losses):
        unigram = {"measured": {"unigram": [3.0, None]}}
        return {"runs": [result(seed, loss, 0.0) | unigram for seed, loss in enumerate(losses)]}

    arms = {"a": runs(2.95, 2.96), "b": runs(2.97, 2.98), "c": runs(2.5, 2.6)}
    assert judged(Claim("", "a", "b"), "own", arms)["verdict"] == "unresolved (plateau)"
    for lower, higher, word in (("c", "b", "reproduced"), ("a", "c", "reversed")):
        assert judged(Claim("", lower, higher), "own", arms)["verdict"] == word
    assert judged(Claim("", "a", "3.5"), "own", arms)["verdict"] == "reproduced"
    for arm, loss in (("a", 2.95), ("b", 2.99)):  # measured of the same text; or of another
        for run in arms[arm]["runs"]:
            run["measured"] |= {"eval_random": [loss, 0.01], "ptb_random": [loss, 0.01]}
    for kind, word in (("eval_random", "unresolved (plateau)"), ("ptb_random", "reproduced")):
        assert judged(Claim("", f"a:{kind}", f"b:{kind}"), "own", arms)["verdict"] == word
    # Alike within a margin: the difference is what it is below the margin.
    alike = judged(Claim("", "b", "a", margin=0.03), "own", arms)
    assert alike["verdict"] == "reproduced" and alike["differences"] == pytest.approx([0.01, 0.01])
    assert " -0.0200 |" in report.claims_table([alike])[-1]  # that table tells what was measured
    assert judged(Claim("", "b", "a", margin=0.01), "own", arms)["verdict"] == "reversed"


def test_a_ratio_is_of_differences_seed_by_seed():
    runs = {"a": [(3.0, 2.5), (4.0, 3.0)], "b": [(1.0, 0.0), (2.0, 0.0)]}
    arms = {
        name: {"runs": [measured(x=[x, None], y=[y, None]) for x, y in values]}
        for name, values in runs.items()
    }
    share = Ratio("share of the gap", ("a:x", "a:y"), ("a:x", "b:x"))
    assert ratio_of(share, "x", arms)["values"] == pytest.approx([0.5 / 2, 1 / 2])
    times = Ratio("times", ("a:x", "0"), ("b:x", "0"))
    assert ratio_of(times, "x", arms)["values"] == pytest.approx([3.0, 2.0])
    assert ratio_of(Ratio("", ("a", "c"), ("a", "0")), "x", arms) is None


# ---- measures ------------------------------------------------------------------------------------


def test_figures_are_read_from_what_scripts_write():
    """The keys of the rows are those that the scripts' own tests pin."""
    sampler = {"temperature": 0.9, "top_p": 1.0, "mode": "mdm", "steps": 8}
    sampler |= {"group_size": None, "draft": None}
    of_samples = {"nll": 2.0, "standard_error": math.nan, "entropy": 2.5, "nfe": 7.5}
    of_samples |= {"entropy_standard_error": 0.1, "nfe_standard_error": 0.2}
    figures = measures.of_generation({"rows": [{"sampler": sampler} | of_samples]})
    assert figures == {
        "judge_t0.9_p1_mdm8": [2.0, None],
        "entropy_t0.9_p1_mdm8": [2.5, 0.1],
        "nfe_t0.9_p1_mdm8": [7.5, 0.2],
    }
    lower = {"judge_t0.7_p1_mdm8": [1.0, None], "entropy_t0.7_p1_mdm8": [2.1, 0.1]}
    matched = measures.at_entropy(figures | lower, 2.2)
    assert matched == {"matched_mdm8": [pytest.approx(1.25), None]}
    assert measures.at_entropy(figures | lower, 2.6) == {}  # above both
    rouge = {"rouge_1": [0.5, 0.7], "rouge_2": [0.0, 0.0], "rouge_l": [0.5, 0.5]}
    rows = [
        {"given": "left", "mode": "l2r", "nll": [3.0, 2.0]} | rouge,
        {"given": "both", "mode": "random", "nll": [2.5, 1.9]} | rouge,
    ]
    figures = measures.of_infilling({"rows": rows})
    assert figures["gain"] == [pytest.approx(0.3), None]
    # Gains of 0.5 and 0.1: a standard error of 0.2, and Student's t of one degree of freedom.
    assert figures["gain_low"] == [pytest.approx(0.3 - 12.7062 * 0.2, abs=1e-4), None]
    assert figures["nll_both"] == [pytest.approx(2.2), None]
    assert figures["rouge1_both_random"] == [pytest.approx(0.6), None]


@pytest.fixture
def with_start(tiny):
    """The experiment `tiny` with arms that go on from a run of their own, in stages."""
    file = tiny / "E7.toml"
    values = tomllib.loads(file.read_text())
    values["runs"] = {"first": {"why": "from left to right", "order.kind": "l2r"}}
    stages = [{"step": 0, "kind": "l2r"}, {"step": 8, "kind": "random"}]
    values["arms"]["moving"] |= {"train.init_from": "first", "schedule": stages}
    file.write_text(tomli_w.dumps(values))
    return load_experiment("E7")


def test_an_arm_goes_on_from_a_run_of_its_recipe_in_stages(with_start):
    arm, first = with_start.recipes["slow"]["moving"], with_start.other_run("slow", "first")
    assert first.seed == suite.OTHER_SEED and first.order.kind == "l2r"
    assert first.optim.beta2 == 0.95 and not first.train.init_from  # the middle of two values
    config = with_start.config("slow", arm, 1, {})
    assert config.train.init_from == str(first.run_folder)
    assert [stage.step for stage in config.schedule] == [0, 8]
    assert suite.number_of_runs(with_start, ["slow"], 2, quick=False) == 2 * (2 + 2)


@pytest.mark.parametrize(
    "losses, tried",
    [
        ([5, 4, 3, 2], [1, 2, 3]),
        ([2, 3, 4, 5], [0, 1, 2, 3]),
        ([9, 2, 3, 5], [0, 1, 2, 3]),
        ([9, 9, 5, 2, 4, 3, 9], [2, 3, 4]),
        ([9, 1, 2, 4, 3, 9, 9], [0, 1, 2, 3, 4]),  # 3 beside 4 does not lead away from 1
        ([9, 8, 7, 4, 3, 2, 1], [2, 3, 4, 5, 6]),
        ([9, 5, 3, 5], [1, 2, 3]),
        ([9, 5, 3, math.inf], [1, 2, 3]),
        ([3, 2, math.inf, math.inf], [0, 1, 2, 3]),
        ([math.inf, 1], [0, 1]),
        ([1, 1, 1], [0, 1, 2]),
        ([1], []),
    ],
)
def test_values_are_tried_from_the_middle_for_as_long_as_the_loss_falls(losses, tried):
    found = tuning.search(list(range(len(losses))), lambda place: losses[place])
    assert found == [(place, losses[place]) for place in tried]
    arm = of_arms.Arm("a", {}, {"x": [1, 2]}, "")
    if found:
        assert losses[tuning.best_of(arm, found)] == min(losses)
    with pytest.raises(ValueError, match="no run of a ended: lower the values"):
        tuning.best_of(arm, [({"x": 1}, math.inf)])
    with pytest.raises(ValueError, match="a tunes x, y: choose one"):
        tuning.choices_of(of_arms.Arm("a", {}, {"x": [1, 2], "y": [1, 2]}, ""))


def test_what_is_known_counts_as_tried():
    losses, asked = [5, 1, 4, 3, 2], []

    def loss_of(place):
        asked.append(place)
        return losses[place]

    found = tuning.search(list(range(5)), loss_of, known=lambda place: place in (1, 2, 3))
    assert found == [(0, 5), (1, 1), (2, 4), (3, 3)] and sorted(asked) == [0, 1, 2, 3]


# ---- an experiment, from its file to its figure --------------------------------------------------


class OneByOne(Executor):
    def __init__(self, jobs):
        pass

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


@pytest.fixture
def here(script):
    """A stand-in for processes (those are for test_speedrun.py and the slow tests below): the
    scripts run in this one, each in its turn."""

    def run_alone(name, *arguments, processes=1):
        status, out, errors = script(importlib.import_module(Path(name).stem), *arguments)
        return subprocess.CompletedProcess([name, *arguments], status, out, errors)

    return run_alone


@pytest.fixture
def tiny(data, tmp_path, monkeypatch, here):
    """An experiment of seconds: an arm that learns nothing, one that does."""
    base = change(tiny_config(data, tmp_path, steps=20), eval__interval=5, eval__draws=2)
    values = {
        "title": "learning",
        "source": "everybody",
        "setting": "A tiny model.",
        "meaning": "One has to learn.",
        "kind": "random",
        "goal": 5.0,
        "seeds": 2,
        "figure": "curves",
        "shown": ["l2r"],
        "base": tomllib.loads(configuration.to_toml(base)),
        "recipes": {
            "slow": {"why": "", "tune": {"optim.beta2": [0.9, 0.95]}},
            "muon": {"optim.kind": "muon", "tune": {"optim.muon_lr": [0.01, 0.02]}},
        },
        "arms": {
            "still": {"why": "no rate", "optim.lr": 0.0, "optim.muon_lr": 0.0},
            "moving": {"why": "a rate", "optim.lr": 1e-2},
        },
        "claims": [
            {"says": "who learns is better", "lower": "moving", "higher": "still"},
            {"says": "who does not is better", "lower": "still:l2r", "higher": "moving:l2r"},
            {"says": "measured", "lower": "moving:eval_l2r", "higher": "still:l2r"},
        ],
        "ratios": [{"says": "share", "of": ["still", "moving"], "to": ["still", "0"]}],
        "measures": [
            {
                "script": "eval_ppl.py",
                "arguments": ["{run}", "--datasets", "{data}", "--orders", "l2r"],
                "arms": ["moving"],
            }
        ],
    }
    monkeypatch.setattr(suite, "CONFIGS", tmp_path)
    monkeypatch.setattr(suite, "OUT", tmp_path / "runs")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(findings, "PAGE", tmp_path / "findings.md")
    monkeypatch.setattr(findings, "ROOT", tmp_path)
    for module in (of_arms, measures):
        monkeypatch.setattr(module, "run_alone", here)
    monkeypatch.setattr(of_arms, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(verdicts, "NOTHING", -math.inf)  # 20 steps learn no more than frequencies
    (tmp_path / "E7.toml").write_text(tomli_w.dumps(values))
    (tmp_path / "common.toml").write_text("[base]\n[recipes]\n")
    return tmp_path


def tried_config(folder):
    run = folder / "runs" / "E7" / "slow" / "moving_beta20.9_s0"
    return configuration.load_toml(run / "config.toml")


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["findings.py", *map(str, words)])
    findings.main()
    return capsys.readouterr().out


def test_an_experiment_runs_is_judged_and_told_and_goes_on(tiny, monkeypatch, capsys):
    chosen = ("E7",)
    out = run(monkeypatch, capsys, *chosen)
    found = json.loads((tiny / "results" / "E7.json").read_text())
    arms, claims = found["recipes"]["slow"], found["claims"]["slow"]
    for arm in arms.values():
        tried = arm["tuning"]
        assert arm["tuned"] == min(tried, key=lambda run: run["loss"])["tuned"]
        assert len(tried) == 2
    assert [run["seed"] for run in arms["moving"]["runs"]] == [0, 1]
    ends = {
        name: [run["losses"]["random"][-1] for run in arm["runs"]] for name, arm in arms.items()
    }
    differences = [a - b for a, b in zip(ends["still"], ends["moving"], strict=True)]
    assert claims[0]["differences"] == pytest.approx(differences)
    words = ["reproduced", "reversed", "reproduced"]
    assert [claim["verdict"] for claim in claims] == words
    assert found["ratios"]["slow"][0]["values"] == pytest.approx(
        [1 - b / a for a, b in zip(ends["still"], ends["moving"], strict=True)]
    )
    seen = arms["moving"]["runs"][0]
    assert seen["measured"]["eval_l2r"][0] < arms["still"]["runs"][0]["losses"]["l2r"][-1]
    tokens = read_tokens(tried_config(tiny).data.folder, "val")
    shares = [np.mean(tokens == token) for token in np.unique(tokens)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert seen["measured"]["unigram"][0] == pytest.approx(entropy)
    assert len(arms["moving"]["runs"][0]["losses"]["random_error"]) == 4
    assert "| moving" in out and "reproduced" in out and "reversed" in out
    assert (tiny / "results" / "E7.png").read_bytes().startswith(b"\x89PNG")
    assert arms["moving"]["edge"] and arms["moving"]["parameters"] > 10_000
    assert "(edge)" in out and "parameters" in out
    # Of fewer recipes or seeds the results are others.
    for fewer in (("--recipes", "slow"), ("--seeds", "1")):
        run(monkeypatch, capsys, *chosen, *fewer)
        part = json.loads((tiny / "runs" / "part" / "E7.json").read_text())
        assert part["recipes"]["slow"]["moving"]["runs"][0] == arms["moving"]["runs"][0]
        assert json.loads((tiny / "results" / "E7.json").read_text()) == found
    # Again: every run is there, so nothing is trained and nothing changes.
    monkeypatch.setattr(of_arms, "run_alone", None)
    run(monkeypatch, capsys, *chosen)
    assert json.loads((tiny / "results" / "E7.json").read_text()) == found
    # Nor does anybody train who has the results, but not the runs.
    shutil.rmtree(tiny / "runs")
    run(monkeypatch, capsys, *chosen)
    assert json.loads((tiny / "results" / "E7.json").read_text()) == found
    run(monkeypatch, capsys, "page")
    page = (tiny / "findings.md").read_text()
    assert "## E7: learning" in page and "One has to learn." in page and "reversed" in page


def test_results_are_kept_of_the_runs_that_were_not_changed_since(tiny, monkeypatch, capsys):
    trained, alone = [], of_arms.run_alone

    def seen(script, *arguments, **options):
        trained.extend([Path(arguments[0]).stem] * (script == "train.py"))
        return alone(script, *arguments, **options)

    monkeypatch.setattr(of_arms, "run_alone", seen)
    chosen = "E7", "--recipes", "slow", "--seeds", "1"
    run(monkeypatch, capsys, *chosen)
    assert len(trained) == 4
    file = tiny / "results" / "E7.runs.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 4 + 1  # one of them is measured, too
    file.write_text("\n".join(lines[1:]) + "\n")
    shutil.rmtree(tiny / "runs")
    values = tomllib.loads((tiny / "E7.toml").read_text())
    values["arms"]["moving"]["optim.lr"] = 2e-2
    (tiny / "E7.toml").write_text(tomli_w.dumps(values))
    trained.clear()
    run(monkeypatch, capsys, *chosen)
    first = Path(json.loads(lines[0])["run"]).name
    changed = ["moving_beta20.95_s0", "moving_beta20.9_s0"]
    assert first.startswith("still") and sorted(trained) == [*changed, first]
    file.write_text("{")
    with pytest.raises(ValueError, match=r"E7\.runs\.jsonl line 1: this is not JSON"):
        run(monkeypatch, capsys, *chosen)
    file.write_text("{}")
    with pytest.raises(FileError, match=r"E7\.runs\.jsonl is damaged: .*; remove it"):
        run(monkeypatch, capsys, *chosen)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"claims": [{"says": "", "lower": "still"}]}, "experiment E7: it lacks .*higher"),
        ({"colour": 3}, "E7.toml is damaged: TypeError: .*colour"),
        ({"arms": {"still": {"tune": [1]}}}, "experiment E7: still.tune is"),
    ],
)
def test_what_is_wrong_in_an_experiment_is_named(tiny, change, message):
    values = tomllib.loads((tiny / "E7.toml").read_text()) | change
    (tiny / "E7.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(FileError, match=message):
        load_experiment("E7")


def test_the_configs_of_an_experiment_can_be_launched_by_hand(tiny, monkeypatch, capsys):
    out = run(monkeypatch, capsys, "E7", "--configs")
    assert "for python train.py" in out
    files = sorted((tiny / "runs" / "E7").glob("*/*.toml"))
    assert len(files) == 2 + 2 + 1 + 2  # in "muon" the arm "still" has a rate of its own
    assert configuration.load_toml(files[0]).train.steps == 20


@pytest.mark.parametrize(
    "words, message",
    [
        (["E8"], "there is no experiment 'E8'; choose one of E7"),
        (["E7", "--recipes", "fast"], "E7 has no recipe 'fast'; it has slow, muon"),
        (["E7", "--configs", "--jobs", 2], "train nothing: leave out --seeds, --jobs"),
    ],
)
def test_what_is_not_there_is_named(tiny, monkeypatch, capsys, words, message):
    with pytest.raises(ValueError, match=message):
        run(monkeypatch, capsys, *words)


def test_data_of_measures_are_missed_before_anything_is_trained(tiny, monkeypatch, capsys):
    values = tomllib.loads((tiny / "E7.toml").read_text())
    values["measures"][0]["arguments"][2] = "data/bytes/nothing"
    (tiny / "E7.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(FileNotFoundError, match="data/bytes/nothing"):
        run(monkeypatch, capsys, "E7")
    assert not (tiny / "runs").exists()


@pytest.mark.slow
def test_the_first_experiment_runs_quickly_from_the_text_of_the_repository(tmp_path):
    done = run_script("-m", "studies.findings", "E1", "--seeds", 1, "--quick", "--jobs", 2)
    assert "unresolved" in done.stdout
    assert (ROOT / "out" / "findings" / "quick" / "E1.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E6", "E7"])  # models of another, a judge; a benchmark
def test_experiments_with_measures_run_quickly(name):
    run_script("-m", "studies.findings", name, "--seeds", 1, "--quick", "--jobs", 2)
    assert (ROOT / "out" / "findings" / "quick" / f"{name}.png").stat().st_size > 10_000


def test_after_an_interrupt_nothing_new_begins():
    begun = []

    def work(number):
        begun.append(number)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt), of_arms.side_by_side(2) as pool:
        for number in range(50):
            pool.submit(work, number)
        raise KeyboardInterrupt
    assert len(begun) < 10
