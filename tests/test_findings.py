"""findings.py: arms are compared seed by seed, and the verdict is what the numbers say."""

import json
import math
import tomllib

import pytest
import tomli_w
from helpers import ROOT, change, run_script, tiny_config

import findings
from experiments import arms as of_arms
from experiments import report, suite
from experiments.suite import Claim, judged, load_experiment, verdict
from training import config as configuration

SHIPPED = suite.names()


# ---- what is shipped -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_arms_of_a_recipe_are_tuned_alike_and_share_data_and_evaluation(name):
    experiment = load_experiment(name)
    assert experiment.title and experiment.source and experiment.setting
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
    for claim in experiment.claims:
        for side in (claim.lower, claim.higher):
            assert side.partition(":")[0] in arms
    assert experiment.figure in ("curves", "sweep", "averages")


def test_the_page_is_made_of_the_results_that_are_shipped():
    if findings.PAGE.exists():
        assert findings.PAGE.read_text() == report.page()


# ---- verdicts ------------------------------------------------------------------------------------


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
    arms["b"]["runs"][0] = {"seed": 0, "tokens": [], "losses": {}, "commit": ""}  # did not end
    assert judged(Claim("", "a", "b"), "own", arms)["differences"] == pytest.approx([0.6])


# ---- an experiment, from its file to its figure --------------------------------------------------


@pytest.fixture
def tiny(data, tmp_path, monkeypatch):
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
        ],
    }
    monkeypatch.setattr(suite, "CONFIGS", tmp_path)
    monkeypatch.setattr(suite, "OUT", tmp_path / "runs")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(findings, "PAGE", tmp_path / "findings.md")
    monkeypatch.setattr(findings, "ROOT", tmp_path)
    (tmp_path / "E7.toml").write_text(tomli_w.dumps(values))
    return tmp_path


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["findings.py", *map(str, words)])
    findings.main()
    return capsys.readouterr().out


def test_an_experiment_runs_is_judged_and_told_and_goes_on(tiny, monkeypatch, capsys):
    chosen = "E7", "--recipes", "slow"
    out = run(monkeypatch, capsys, *chosen, "--jobs", 2)
    found = json.loads((tiny / "results" / "E7.json").read_text())
    arms, claims = found["recipes"]["slow"], found["claims"]["slow"]
    for arm in arms.values():
        tried = arm["tuning"]
        assert arm["tuned"] == min(tried, key=lambda pilot: pilot["loss"])["tuned"]
        assert len(tried) == 2
    assert [run["seed"] for run in arms["moving"]["runs"]] == [0, 1]
    ends = {
        name: [run["losses"]["random"][-1] for run in arm["runs"]] for name, arm in arms.items()
    }
    differences = [a - b for a, b in zip(ends["still"], ends["moving"], strict=True)]
    assert claims[0]["differences"] == pytest.approx(differences)
    assert [claim["verdict"] for claim in claims] == ["reproduced", "reversed"]
    assert len(arms["moving"]["runs"][0]["losses"]["random_error"]) == 4
    assert "| moving" in out and "reproduced" in out and "reversed" in out
    assert (tiny / "results" / "E7.png").read_bytes().startswith(b"\x89PNG")
    folder = tiny / "runs" / "E7" / "slow"
    pilot = configuration.load_toml(folder / "moving_beta20.9_s0_pilot" / "config.toml")
    assert (pilot.train.steps, pilot.eval.interval, pilot.seed) == (5, 5, 0)
    # Again: every run is there, so nothing is trained and nothing changes.
    monkeypatch.setattr(of_arms, "train_to_the_end", None)
    run(monkeypatch, capsys, *chosen)
    assert json.loads((tiny / "results" / "E7.json").read_text()) == found
    run(monkeypatch, capsys, "page")
    page = (tiny / "findings.md").read_text()
    assert "## E7: learning" in page and "One has to learn." in page and "reversed" in page


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
    ],
)
def test_what_is_not_there_is_named(tiny, monkeypatch, capsys, words, message):
    with pytest.raises(ValueError, match=message):
        run(monkeypatch, capsys, *words)


@pytest.mark.slow
def test_the_first_experiment_runs_quickly_from_the_text_of_the_repository(tmp_path):
    done = run_script("findings.py", "E1", "--seeds", 1, "--quick", "--jobs", 2)
    assert "unresolved" in done.stdout
    assert (ROOT / "out" / "findings" / "quick" / "E1.png").stat().st_size > 10_000
