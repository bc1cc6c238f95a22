"""Experiments: run configs tuned alike, trained and resumed; verdicts and pages made of them."""

import dataclasses
import functools
import importlib
import json
import math
import re
import shutil
import subprocess
import threading
import tomllib
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from helpers import ROOT, run_main, run_script, tiny_config

from data.loader import read_tokens
from runtime.validation import FileError
from studies import experiment as experiments
from studies import figures, findings, measures, pages, runner, runs, verdicts
from studies.decoding_speed import SYSTEMS
from studies.experiment import RunConfig, load_experiment
from studies.verdicts import Claim, Ratio, is_number, judged, ratio_of, verdict
from training import config as configuration

SHIPPED = experiments.experiment_names()


@pytest.mark.parametrize("name", SHIPPED)
def test_run_configs_of_a_recipe_are_tuned_alike_and_claims_are_of_them(name):
    experiment = load_experiment(name)
    assert experiment.title and experiment.source and experiment.setting
    assert not re.search("reproduced|reversed|unresolved", experiment.meaning, re.IGNORECASE)
    for recipe, run_configs in experiment.recipes.items():
        assert len({json.dumps(one.tune) for one in run_configs.values()}) == 1
        for one in run_configs.values():
            assert one.description and all(len(values) >= 3 for values in one.tune.values())
            configs = [experiment.config(recipe, one, seed, {}) for seed in (0, 1)]
            differences = configuration.differences(*configs)
            assert differences.keys() == {"name", "seed", "order.seed"}
            others = [experiment.config(recipe, other, 0, {}) for other in run_configs.values()]
            same_data = next(other for other in others if other.data == configs[0].data)
            assert configs[0].eval == same_data.eval
            start = {"init_from": configs[0].train.init_from}  # what a run starts from may differ
            assert configs[0].train == dataclasses.replace(same_data.train, **start)
            assert configs[0].model.block_size == same_data.model.block_size
    known = {one for recipe in experiment.recipes.values() for one in recipe}
    sides = [side for claim in experiment.claims for side in (claim.lower, claim.higher)]
    sides += [side for ratio in experiment.ratios for side in (*ratio.of, *ratio.to)]
    if experiment.bench:
        known = set(SYSTEMS) | {f"{system}_{size}" for system in SYSTEMS for size in (1, 8)}
    assert all(side.partition(":")[0] in known or is_number(side) for side in sides)
    assert known >= {one for measure in experiment.measures for one in measure.run_configs}
    assert experiment.figure in figures.DRAWINGS


@pytest.mark.parametrize("name", [n for n in SHIPPED if (pages.RESULTS / f"{n}.json").exists()])
def test_verdicts_and_tables_are_those_of_the_runs_that_are_shipped(name, monkeypatch):
    """Every claim is of something that was measured; with the rows nothing is trained again."""
    experiment = load_experiment(name)
    found = json.loads((pages.RESULTS / f"{name}.json").read_text())
    parts = {part: found[part] for part in ("claims", "ratios")}
    assert findings.judgements(experiment, found["recipes"]) == parts
    said = [claim for claims in found["claims"].values() for claim in claims]
    assert said and not any(claim["verdict"] == verdicts.UNMEASURED for claim in said)
    table = "\n".join(pages.tables(experiment, found)) + "\n"
    assert (pages.RESULTS / f"{name}.md").read_text() == table
    if not experiment.bench:
        monkeypatch.setattr(runner, "finished_run", None)
        monkeypatch.setattr(runner, "find_dataset", None)
        results = runner.Results(pages.RESULTS / f"{name}.runs.jsonl")
        again = runner.Runner(experiment, results).train(experiment.seeds)
        assert json.loads(json.dumps(again)) == found["recipes"]
    assert findings.PAGE.read_text() == pages.page()


def test_a_verdict_needs_all_seeds_and_two_standard_errors():
    for differences, monte_carlo, word in (
        ([0.1, 0.2, 0.15], 0.0, "reproduced"),
        ([-0.1, -0.2, -0.15], 0.0, "reversed"),
        ([0.1, 0.2, -0.01], 0.0, "unresolved"),  # a seed disagrees
        ([0.1, 0.2, 0.15], 0.08, "unresolved"),  # other orders might have said otherwise
        ([0.01, 0.5, 0.02], 0.0, "unresolved"),  # the seeds agree, but scatter
        ([0.5], 0.0, "unresolved"),  # one seed shows nothing
        ([0.0, 0.0, 0.0], 0.0, "unresolved"),
    ):
        assert verdict(differences, monte_carlo)["verdict"] == word


def row(seed, loss, error, **measured):
    losses = {"training": [9.0, loss], "training_error": [1.0, error], "l2r": [8.0, loss / 2]}
    told = {"seed": seed, "commit": "", "tokens": [1, 2], "losses": losses}
    return told | {"measured": measured}


def measured(**figures):
    return {"tokens": [], "losses": {}, "measured": figures}


def test_a_claim_is_judged_by_paired_differences_at_the_end_and_the_errors_of_both_sides():
    entries = {
        "a": {"runs": [row(0, 2.0, 0.03), row(1, 2.1, 0.03)]},
        "b": {"runs": [row(0, 2.5, 0.04), row(1, 2.7, 0.04)]},
    }
    found = judged(Claim("b is worse", "a", "b"), "training", entries)
    assert found["differences"] == pytest.approx([0.5, 0.6])
    monte_carlo = math.sqrt(2 * (0.03**2 + 0.04**2)) / 2
    assert found["monte_carlo_error"] == pytest.approx(monte_carlo)
    assert found["error"] == pytest.approx(math.hypot(0.05, monte_carlo))
    assert found["verdict"] == "reproduced" and found["mean"] == pytest.approx(0.55)
    left = judged(Claim("", "b:l2r", "a:l2r"), "training", entries)
    assert left["differences"] == pytest.approx([-0.25, -0.3]) and left["monte_carlo_error"] == 0
    at_half = judged(Claim("", "a:training@0.5", "b:training"), "training", entries)
    assert at_half["differences"] == pytest.approx([2.5 - 9, 2.7 - 9])
    assert at_half["monte_carlo_error"] == pytest.approx(math.sqrt(2 * (1 + 0.04**2)) / 2)
    # Two seeds agree, but the third did not end: those that did may be the lucky ones.
    entries["a"]["runs"].append(row(2, 2.0, 0.03))
    entries["b"]["runs"].append({"seed": 2, "tokens": [], "losses": {}, "commit": ""})
    left_out = judged(Claim("", "a", "b"), "training", entries)
    assert left_out["differences"] == pytest.approx([0.5, 0.6])
    assert left_out["verdict"] == "unresolved (a run did not end)"


def test_a_side_of_a_claim_is_a_measured_figure_a_loss_or_a_number():
    entries = {
        "a": {"runs": [measured(gain=[0.3, 0.1]), measured(gain=[0.5, None])]},
        "b": {"runs": [row(0, 2.0, 0.0, training=[1.0, 0.3]), row(1, 2.0, 0)]},
        "same": {"runs": [measured(gain=[0.3, 0.1])] * 4},
    }
    for lower, higher, differences, monte_carlo in (
        ("0", "a:gain", [0.3, 0.5], 0.1 / 2),
        ("0", "same:gain", [0.3] * 4, 0.1),  # the same samples for all seeds do not average out
        ("b", "1.5", [0.5, -0.5], 0.3 / 2),  # of a loss and a figure of one name the figure counts
    ):
        found = judged(Claim("", lower, higher), "training", entries)
        assert found["differences"] == differences
        assert found["monte_carlo_error"] == pytest.approx(monte_carlo)
    assert judged(Claim("", "a:speed", "1"), "training", entries)["verdict"] == "not measured"
    assert judged(Claim("", "c:gain", "1"), "training", entries) is None


def test_two_losses_that_are_still_frequencies_of_tokens_tell_nothing():
    def of(*losses, value=0.0):
        figures = dict.fromkeys(("eval_random", "ptb_random"), [value, 0.01])
        figures["unigram"] = [3.0, None]
        return {"runs": [row(n, x, 0.0, **figures) for n, x in enumerate(losses)]}

    entries = {"a": of(2.95, 2.96, value=2.95), "b": of(2.97, 2.98, value=2.99), "c": of(2.5, 2.6)}
    for lower, higher, word in (
        ("a", "b", "unresolved (plateau)"),
        ("a", "c", "reversed"),
        ("a", "3.5", "reproduced"),
        ("a:eval_random", "b:eval_random", "unresolved (plateau)"),
        ("a:ptb_random", "b:ptb_random", "reproduced"),  # measured of another text
    ):
        assert judged(Claim("", lower, higher), "training", entries)["verdict"] == word
    alike = judged(Claim("", "b", "a", margin=0.03), "training", entries)
    assert alike["verdict"] == "reproduced" and alike["differences"] == pytest.approx([0.01, 0.01])
    assert " -0.0200 |" in pages.claims_table([alike])[-1]  # that table tells what was measured
    assert judged(Claim("", "b", "a", margin=0.01), "training", entries)["verdict"] == "reversed"


def test_a_ratio_is_of_differences_seed_by_seed():
    def of(*pairs):
        return {"runs": [measured(x=[x, None], y=[y, None]) for x, y in pairs]}

    entries = {"a": of((3.0, 2.5), (4.0, 3.0)), "b": of((1.0, 0.0), (2.0, 0.0))}
    share = Ratio("share of the gap", ("a:x", "a:y"), ("a:x", "b:x"))
    assert ratio_of(share, "x", entries)["values"] == pytest.approx([0.5 / 2, 1 / 2])
    times = Ratio("times", ("a:x", "0"), ("b:x", "0"))
    assert ratio_of(times, "x", entries)["values"] == pytest.approx([3.0, 2.0])
    assert ratio_of(Ratio("", ("a", "c"), ("a", "0")), "x", entries) is None


def test_figures_are_read_from_what_scripts_write():
    sampler = {"temperature": 0.9, "top_p": 1.0, "mode": "mdm", "steps": 8}
    sampler |= {"group_size": None, "draft": None}
    of_samples = {"nll": 2.0, "standard_error": math.nan, "entropy": 2.5, "nfe": 7.5}
    of_samples |= {"entropy_standard_error": 0.1, "nfe_standard_error": 0.2}
    found = measures.of_generation({"rows": [{"sampler": sampler} | of_samples]})
    assert found == {
        "judge_t0.9_p1_mdm8": [2.0, None],
        "entropy_t0.9_p1_mdm8": [2.5, 0.1],
        "nfe_t0.9_p1_mdm8": [7.5, 0.2],
    }
    lower = {"judge_t0.7_p1_mdm8": [1.0, None], "entropy_t0.7_p1_mdm8": [2.1, 0.1]}
    matched = measures.at_entropy(found | lower, 2.2)
    assert matched == {"matched_mdm8": [pytest.approx(1.25), None]}
    assert measures.at_entropy(found | lower, 2.6) == {}  # above both
    rouge = {"rouge_1": [0.5, 0.7], "rouge_2": [0.0, 0.0], "rouge_l": [0.5, 0.5]}
    left = {"given": "left", "mode": "l2r", "nll": [3.0, 2.0]} | rouge
    both = {"given": "both", "mode": "random", "nll": [2.5, 1.9]} | rouge
    found = measures.of_infilling({"rows": [left, both]})
    assert found["gain"] == [pytest.approx(0.3), None]
    assert found["gain_low"] == [pytest.approx(0.3 - 12.7062 * 0.2, abs=1e-4), None]
    assert found["nll_both"] == [pytest.approx(2.2), None]
    assert found["rouge1_both_random"] == [pytest.approx(0.6), None]


def test_two_keys_are_tuned_together_until_the_best_has_all_its_neighbours():
    rates = {"a": [1, 2, 4, 8, 16], "b": [1, 2, 4, 8]}
    found = runner.search(rates, lambda v: abs(math.log2(v["a"] * v["b"]) - 2) + v["a"] / 100)
    tried = [tuple(values.values()) for values, _ in found]
    best = tuple(runner.best_of(RunConfig("x", {}, rates), found).values())
    assert best == (1, 4) and {(2, 4), (1, 2), (1, 8)} <= set(tried) and len(tried) < 20


def test_values_are_tried_from_the_middle_for_as_long_as_the_loss_falls():
    for losses, tried in (
        ([5, 4, 3, 2], [1, 2, 3]),
        ([9, 9, 5, 2, 4, 3, 9], [2, 3, 4]),
        ([9, 1, 2, 4, 3, 9, 9], [0, 1, 2, 3, 4]),  # 3 beside 4 does not lead away from 1
        ([9, 5, 3, math.inf], [1, 2, 3]),
        ([3, 2, math.inf, math.inf], [0, 1, 2, 3]),
        ([1], []),
    ):
        grid = {"x": list(range(len(losses)))}
        found = runner.search(grid, lambda values, at=losses: at[values["x"]])
        assert found == [({"x": place}, losses[place]) for place in tried if len(losses) > 1]
        if found:
            assert losses[runner.best_of(RunConfig("a", {}, {}), found)["x"]] == min(losses)
    with pytest.raises(ValueError, match="no run of a ended: lower the values"):
        runner.best_of(RunConfig("a", {}, {}), [({"x": 1}, math.inf)])


EXPERIMENT = """
title = "learning"
source = "everybody"
setting = "A tiny model."
meaning = "One has to learn."
kind = "random"
goal = 5.0
seeds = 2
figure = "curves"
shown = ["l2r"]
claims = [
    { says = "who learns is better", lower = "moving", higher = "still" },
    { says = "who does not is better", lower = "still:l2r", higher = "moving:l2r" },
    { says = "measured", lower = "moving:eval_l2r", higher = "still:l2r" },
]
ratios = [{ says = "share", of = ["still", "moving"], to = ["still", "0"] }]
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
        done.set_result(function(*arguments))
        return done


@pytest.fixture
def tiny(data, tmp_path, monkeypatch, script):
    """An experiment of seconds: a run config that learns nothing, one that does."""

    def run_alone(name, *arguments, processes=1):
        status, out, errors = script(importlib.import_module(Path(name).stem), *arguments)
        return subprocess.CompletedProcess([name, *arguments], status, out, errors)

    sizes = {"model__n_layer": 1, "train__micro_batch_size": 8}
    base = tiny_config(data, tmp_path, steps=20, eval__interval=5, eval__draws=2, **sizes)
    pages.titles()  # kept: they are read from the folder that is replaced here
    values = tomllib.loads(EXPERIMENT) | {"base": tomllib.loads(configuration.to_toml(base))}
    for module in (experiments, pages):
        monkeypatch.setattr(module, "CONFIGS", tmp_path)
    for module in (experiments, pages, findings):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(experiments, "OUT", tmp_path / "runs")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(findings, "PAGE", tmp_path / "findings.md")
    for module in (runs, measures):
        monkeypatch.setattr(module, "run_alone", run_alone)
    monkeypatch.setattr(runner, "ThreadPoolExecutor", OneByOne)
    monkeypatch.setattr(verdicts, "NOTHING", -math.inf)  # 20 steps learn no more than frequencies
    (tmp_path / "common.toml").write_text("[base]\n[recipes]\n")
    (tmp_path / "page.md").write_text("# Findings\n")
    (tmp_path / "E7.toml").write_text(tomli_w.dumps(values))
    return tmp_path


def write(folder, changes):
    """Change the values of the experiment."""
    file = folder / "E7.toml"
    file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | changes))


run = functools.partial(run_main, findings)


def test_an_experiment_runs_is_judged_and_told_and_goes_on(tiny, monkeypatch, capsys):
    out = run(monkeypatch, capsys, "E7")
    found = json.loads((tiny / "results" / "E7.json").read_text())
    entries, claims = found["recipes"]["slow"], found["claims"]["slow"]
    for entry in entries.values():
        best = min(entry["tuning"], key=lambda tried: tried["loss"])
        assert entry["tuned"] == best["tuned"] and len(entry["tuning"]) == 2
    assert [one["seed"] for one in entries["moving"]["runs"]] == [0, 1]
    of_runs = zip(entries["still"]["runs"], entries["moving"]["runs"], strict=True)
    pairs = [[one["losses"]["random"][-1] for one in pair] for pair in of_runs]
    assert claims[0]["differences"] == pytest.approx([a - b for a, b in pairs])
    assert [c["verdict"] for c in claims] == ["reproduced", "reversed", "reproduced"]
    assert found["ratios"]["slow"][0]["values"] == pytest.approx([1 - b / a for a, b in pairs])
    first = entries["moving"]["runs"][0]
    assert first["measured"]["eval_l2r"][0] < entries["still"]["runs"][0]["losses"]["l2r"][-1]
    config = tiny / "runs" / "E7" / "slow" / "moving_beta20.9_s0" / "config.toml"
    tokens = read_tokens(configuration.load_toml(config).data.folder, "val")
    shares = [np.mean(tokens == token) for token in np.unique(tokens)]
    entropy = -sum(share * math.log(share) for share in shares)
    assert first["measured"]["unigram"][0] == pytest.approx(entropy)
    assert len(first["losses"]["random_error"]) == 4 and first["tokens_per_second"] > 0
    assert "| moving" in out and "reproduced" in out and "reversed" in out
    assert (tiny / "results" / "E7.png").read_bytes().startswith(b"\x89PNG")
    assert entries["moving"]["at_boundary"] and "(boundary)" in out
    assert entries["moving"]["parameters"] > 10_000 and "parameters" in out
    run(monkeypatch, capsys, "E7", "--seeds", "1")
    part = json.loads((tiny / "runs" / "part" / "E7.json").read_text())
    assert part["recipes"]["slow"]["moving"]["runs"][0] == first
    assert json.loads((tiny / "results" / "E7.json").read_text()) == found
    monkeypatch.setattr(runs, "run_alone", None)
    for _ in range(2):
        run(monkeypatch, capsys, "E7")
        assert json.loads((tiny / "results" / "E7.json").read_text()) == found
        shutil.rmtree(tiny / "runs", ignore_errors=True)
    run(monkeypatch, capsys, "page")
    page = (tiny / "findings.md").read_text()
    assert "## E7: learning" in page and "One has to learn." in page and "reversed" in page


def test_results_are_kept_of_the_runs_that_were_not_changed_since(tiny, monkeypatch, capsys):
    trained, alone = [], runs.run_alone

    def seen(script, *arguments, **options):
        trained.extend([Path(arguments[0]).stem] * (script == "train.py"))
        return alone(script, *arguments, **options)

    monkeypatch.setattr(runs, "run_alone", seen)
    recipes = tomllib.loads((tiny / "E7.toml").read_text())["recipes"]
    write(tiny, {"recipes": {"slow": recipes["slow"]}})
    chosen = "E7", "--seeds", "1"
    run(monkeypatch, capsys, *chosen)
    file = tiny / "results" / "E7.runs.jsonl"
    lines = file.read_text().splitlines()
    assert len(trained) == 4 and len(lines) == 4 + 1  # one of them is measured, too
    lost = next(line for line in lines if "still" in line)
    file.write_text("\n".join(line for line in lines if line != lost) + "\n")
    shutil.rmtree(tiny / "runs")
    run_configs = tomllib.loads((tiny / "E7.toml").read_text())["run_configs"]
    run_configs["moving"]["optim.lr"] = 2e-2
    write(tiny, {"run_configs": run_configs})
    trained.clear()
    run(monkeypatch, capsys, *chosen)
    first = Path(json.loads(lost)["run"]).name
    assert sorted(trained) == ["moving_beta20.95_s0", "moving_beta20.9_s0", first]
    file.write_text("{")
    with pytest.raises(ValueError, match=r"E7\.runs\.jsonl line 1: this is not JSON"):
        run(monkeypatch, capsys, *chosen)


def test_a_run_config_goes_on_from_a_helper_of_its_recipe_in_stages(tiny):
    run_configs = tomllib.loads((tiny / "E7.toml").read_text())["run_configs"]
    run_configs["moving"]["schedule"] = [{"step": 0, "kind": "l2r"}, {"step": 8, "kind": "random"}]
    run_configs["moving"]["train.init_from"] = "first"
    helpers = {"first": {"description": "from left to right", "order.kind": "l2r"}}
    write(tiny, {"run_configs": run_configs, "helpers": helpers})
    experiment = load_experiment("E7")
    one, first = experiment.recipes["slow"]["moving"], experiment.helper_configs("slow")["first"]
    assert first.seed == experiments.HELPER_SEED and first.order.kind == "l2r"
    assert first.optim.beta2 == 0.95 and not first.train.init_from  # the middle of two values
    config = experiment.config("slow", one, 1, {})
    assert config.train.init_from == str(first.run_folder)
    assert [stage.step for stage in config.schedule] == [0, 8]


def test_what_is_wrong_in_an_experiment_is_named_before_a_run_is_trained(tiny, monkeypatch, capsys):
    with pytest.raises(ValueError, match="there is no experiment 'E8'; choose one of E7"):
        load_experiment("E8")
    for changes, message in (
        ({"colour": 3}, "E7.toml is damaged: TypeError: .*colour"),
        ({"run_configs": {"still": {"tune": [1]}}}, "experiment E7: still.tune is"),
        ({"claims": [{"says": "", "lower": "still"}]}, "experiment E7: it lacks .*higher"),
    ):
        before = (tiny / "E7.toml").read_text()
        write(tiny, changes)
        with pytest.raises(FileError, match=message):
            load_experiment("E7")
        (tiny / "E7.toml").write_text(before)
    of = {"script": "eval_ppl.py", "arguments": ["{run}", "--datasets", "data/bytes/nothing"]}
    write(tiny, {"measures": [of], "recipes": {"slow": {"optim.beta2": 0.9}}})
    with pytest.raises(FileNotFoundError, match="data/bytes/nothing"):
        run(monkeypatch, capsys, "E7")
    assert not list((tiny / "runs").rglob("*_s1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E1", "E6", "E7"])  # E6: models of another, a judge; E7: bench
def test_experiments_run_quickly_from_the_text_of_the_repository(name):
    done = run_script("-m", "studies.findings", name, "--seeds", 1, "--quick", "--jobs", 2)
    assert "unresolved" in done.stdout
    assert (ROOT / "out" / "findings" / "quick" / f"{name}.png").stat().st_size > 10_000


def test_after_an_interrupt_no_further_run_starts(tiny, monkeypatch):
    """The first of four run configs is interrupted: the two that may have started since go on until
    the others are cancelled."""
    started, cancelled = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **how):
            super().shutdown(wait=False, **how)
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
