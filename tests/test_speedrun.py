"""speedrun.py: arms are tuned alike, trained over seeds, resumed, and told as they are."""

import json
import subprocess
import tomllib

import pytest
import tomli_w
from helpers import ROOT, change, tiny_config

from runtime.validation import FileError
from studies import speedrun
from studies.experiments import arms as of_experiments
from studies.experiments.arms import crossing
from studies.speedrun import load_track
from training import config as configuration

TRACKS = sorted(path.stem for path in (ROOT / "studies" / "configs" / "speedrun").glob("*.toml"))


@pytest.mark.parametrize("name", TRACKS)
def test_every_arm_of_a_shipped_track_is_a_configuration_that_keeps_to_the_track(name):
    track = load_track(name)
    for arm in track.arms.values():
        first, other = (track.config(arm, seed, {}) for seed in (0, 1))
        assert configuration.differences(first, other).keys() == {"name", "seed"}
        assert first.data.folder == track.base["data"]["folder"]
        assert first.model.block_size == track.base["model"]["block_size"]
        assert arm.why and all(len(values) >= 3 for values in arm.tune.values()), arm.name


@pytest.mark.parametrize("name", TRACKS)
def test_arms_that_are_compared_at_equal_tokens_have_as_many(name):
    track, tokens = load_track(name), {}
    for arm in track.arms.values():
        config = track.config(arm, 0, {})
        tokens[arm.name] = config.train.steps * config.train.batch_size * config.model.block_size
        assert config.train.steps % config.eval.interval == 0
    shares = {
        "-x4": 4,
        "-x5": 5,
        "-x10": 10,
        "-half": 0.5,
        "-461k": 9 / 8,
        "-512k": 5 / 4,
        "-614k": 3 / 2,
        "-683k": 5 / 3,
    }
    base = "tenth" if "tenth" in tokens else "fast-values"
    for arm, count in tokens.items():
        times = next((v for end, v in shares.items() if arm.endswith(end)), 1)
        times *= 10 if arm.startswith("paper") and "tenth" in tokens else 1
        assert count == pytest.approx(times * tokens[base], rel=1e-3), arm


@pytest.mark.parametrize("name", TRACKS)
def test_the_results_that_are_shipped_make_a_table(name):
    results = list((ROOT / "results" / "speedrun" / name).glob("*.json"))
    lines = speedrun.table(load_track(name))
    assert all(any(f"| {path.stem} " in line for line in lines) for path in results)
    page = (ROOT / "results" / "speedrun.md").read_text().splitlines()
    assert not results or not set(lines) - set(page)


def made_up(arm, losses, tokens=100, tuned=(1, 2, 3), best=2):
    runs = [
        {"seed": n, "loss": loss, "tokens": tokens, "tuned": {"x": best}}
        for n, loss in enumerate(losses)
    ]
    tuning = [{"tuned": {"x": value}} for value in tuned]
    return {"arm": arm, "why": "", "runs": runs, "tuning": tuning}


def test_what_one_change_gives_is_told_by_its_seeds():
    """Four times the tokens are worth 1 nat, so 2% of them 0.0143. Of three differences that are a
    hundredth apart the 95% interval is 4.30 * 0.01 / sqrt(3) = 0.0248 to either side."""
    known = [made_up("fast", [2.0, 2.1, 2.2]), made_up("fast-x4", [1.0, 1.1, 1.2], tokens=400)]
    for arm, shift in (("fast-a", -0.1), ("fast-b", 0.1), ("fast-c", -0.02), ("fast-d", 0.0)):
        spread = 0.001 if arm == "fast-d" else 0.01
        losses = [2.0 + shift - spread, 2.1 + shift, 2.2 + shift + spread]
        known.append(made_up(arm, losses))
    known.append(made_up("fast-e", [1.995, 2.095, 2.195]))
    known.append(made_up("fast2", [1.0, 1.0, 1.0]))
    found = {}
    for line in speedrun.ingredients(known)[3:]:
        arm, difference, word, _ = (cell.strip() for cell in line.split("|")[1:-1])
        found[arm] = difference, word
    assert found == {
        "fast-a": ("-0.1000 +- 0.0248", "pays"),
        "fast-b": ("+0.1000 +- 0.0248", "costs"),
        "fast-c": ("-0.0200 +- 0.0248", "no difference"),
        "fast-d": ("+0.0000 +- 0.0025", "no difference"),
        "fast-e": ("-0.0050 +- 0.0000", "too little"),
    }
    assert speedrun.ingredients(known[:1]) == []
    assert not speedrun.is_at_edge(known[0]) and speedrun.is_at_edge(made_up("a", [1.0], best=3))


@pytest.fixture
def track(data, tmp_path, monkeypatch):
    """A track of seconds: a baseline that learns nothing, and two arms."""
    base = change(tiny_config(data, tmp_path, steps=20), optim__lr=0.0, eval__interval=10)
    arms = {
        "still": {"why": "a rate of zero"},
        "moving": {"from": "still", "why": "Adam", "tune": {"optim.lr": [1e-4, 1e-2]}},
        "faster": {"from": "moving", "why": "Muon", "optim.kind": "muon"},
    }
    values = {"goal": 5.0, "base": tomllib.loads(configuration.to_toml(base))}
    monkeypatch.setattr(speedrun, "TRACKS", tmp_path)
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(speedrun, "OUT", tmp_path / "runs")
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(values | {"arms": arms}))
    return load_track("tiny")


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["speedrun.py", *map(str, words)])
    speedrun.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_arms_inherit_are_tuned_with_seed_0_and_trained_over_seeds(
    track, tmp_path, monkeypatch, capsys
):
    """20 steps at 1e-2 learn more than at 1e-4, and nothing is learned at 0, whatever the seed."""
    assert "Not run yet: still, moving, faster" in run(monkeypatch, capsys, "tiny")
    run(monkeypatch, capsys, "tiny", "still", "--seeds", 1, "--processes", 2)
    out = run(monkeypatch, capsys, "tiny", "still", "faster", "--seeds", 2, "--jobs", 2)
    still, faster = (
        json.loads((tmp_path / "results" / "tiny" / f"{arm}.json").read_text())
        for arm in ("still", "faster")
    )
    assert [r["seed"] for r in faster["runs"]] == [0, 1]
    assert [r["tuned"] for r in faster["tuning"]] == [{"optim.lr": 1e-4}, {"optim.lr": 1e-2}]
    assert faster["runs"][0] == min(faster["tuning"], key=lambda r: r["loss"])
    assert all(r["tuned"] == {"optim.lr": 1e-2} for r in faster["runs"])
    assert faster["config"]["optim"]["kind"] == "muon" and still["tuning"] == []
    losses = [max(r["loss"] for r in result["runs"]) for result in (faster, still)]
    assert losses[0] < losses[1] - 0.1
    assert all(r["tokens_to_goal"] is None for r in still["runs"])
    commit = (tmp_path / "runs" / "tiny" / "still_s1" / "commit").read_text()
    assert commit and still["commit"] == commit == still["runs"][1]["commit"]
    # Both again: every run is there already, so that nothing is trained and nothing changes.
    monkeypatch.setattr(of_experiments, "train_to_the_end", None)
    again = run(monkeypatch, capsys, "tiny", "faster", "--seeds", 2)
    assert f"{faster['runs'][0]['loss']:.4f}" in out and out.splitlines()[-1] in again
    assert "Not run yet: moving" in run(
        monkeypatch, capsys, "tiny", "--markdown", tmp_path / "a.md"
    )
    assert "Not run yet: moving" in (tmp_path / "a.md").read_text()
    # An arm that the track has no more keeps its line.
    lines = (tmp_path / "tiny.toml").read_text().partition("[arms.faster]")[0]
    (tmp_path / "tiny.toml").write_text(lines)
    left = run(monkeypatch, capsys, "tiny")
    assert f"{faster['runs'][0]['loss']:.4f}"[:4] in left and "| faster" in left


def test_time_is_measured_in_turns_and_told_as_shares_of_the_first_arm(
    track, tmp_path, monkeypatch, capsys
):
    """100 tokens at 10, 20 and 25 a second take 10, 5 and 4 seconds; 300 at 60, 60 and 25 take 5,
    5 and 12, half, once and three times that; the goal after 60 takes a fifth of it."""
    folder = tmp_path / "results" / "tiny"
    folder.mkdir(parents=True)
    for arm, tokens, goal in (("still", 100, None), ("moving", 300, 60)):
        result = made_up(arm, [2.0, 2.2], tokens)
        for one in result["runs"]:
            one |= {"tokens_to_goal": goal, "any_order": one["loss"], "tuned": {"optim.lr": 1e-4}}
        (folder / f"{arm}.json").write_text(json.dumps(result))
    made, asked = iter((10, 60, 20, 60, 25, 25)), []

    def pretended(config, processes):
        asked.append((config.name.split("_")[0], config.optim.lr))
        return next(made)

    with monkeypatch.context() as patched:
        patched.setattr(speedrun, "speed_of_short_run", pretended)
        run(monkeypatch, capsys, "tiny", "still", "moving", "--turns", 3)
    assert asked[:3] == [("still", 1e-4), ("moving", 1e-4), ("still", 1e-4)] and len(asked) == 6
    kept = json.loads((tmp_path / "results" / "tiny.speeds.json").read_text())
    assert kept["tokens_per_second"] == {"still": [10, 20, 25], "moving": [60, 60, 25]}
    still, moving = (line.split("|") for line in speedrun.time_table(track)[2:])
    assert [cell.strip() for cell in still[3:7]] == [
        "0.02 (0.01 - 0.025)", "5", "1 (1 - 1)", "-",
    ]  # fmt: skip
    assert [cell.strip() for cell in moving[4:7]] == [
        "5", "1 (0.5 - 3)", "0.2 (0.1 - 0.6)",
    ]  # fmt: skip


def test_the_speed_of_an_arm_is_that_of_a_short_run_that_is_thrown_away(track, monkeypatch):
    config = track.config(track.arms["moving"], 0, {"optim.lr": 1e-2})
    monkeypatch.setattr(speedrun, "TIMED_TOKENS", 1)
    monkeypatch.setattr(speedrun, "TIMED_STEPS", 10)
    assert speedrun.speed_of_short_run(config, 1) > 0
    assert not config.run_folder.exists()


def test_a_run_that_was_stopped_and_resumed_has_the_commits_of_both(track, monkeypatch):
    """train.py ends well, too, when a signal stops it."""
    config = track.config(track.arms["still"], 0, {})
    stopped = subprocess.CompletedProcess([], 0)
    with monkeypatch.context() as patch:
        patch.setattr(of_experiments, "run_alone", lambda *words, **options: stopped)
        patch.setattr(of_experiments, "commit", lambda: "one")
        with pytest.raises(ValueError, match="stopped before its last step"):
            of_experiments.run_of(config)
    monkeypatch.setattr(of_experiments, "commit", lambda: "two")
    assert of_experiments.run_of(config).commit == "one, two"


def test_a_track_is_laid_over_the_one_that_it_is_from(track, tmp_path):
    (tmp_path / "smaller.toml").write_text(
        'from = "tiny"\ngoal = 4.0\n[base.optim]\nwarmup_steps = 3\n'
        '[arms.moving]\nfrom = "still"\n"optim.lr" = 1e-3\n[arms.last]\nfrom = "faster"\n'
    )
    smaller = load_track("smaller")
    assert smaller.goal == 4.0 and [*smaller.arms] == ["still", "moving", "faster", "last"]
    arms = {name: smaller.config(arm, 0, {}) for name, arm in smaller.arms.items()}
    assert arms["last"].optim.kind == "muon" and arms["moving"].optim.lr == 1e-3
    changed = configuration.differences(track.config(track.arms["still"], 0, {}), arms["still"])
    assert changed.keys() == {"out", "optim.warmup_steps"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["tinny"], "there is no track 'tinny'; choose one of tiny"),
        (["tiny", "fatser"], "there is no arm 'fatser'; tiny has still, moving, faster"),
    ],
)
def test_what_is_not_there_is_named(track, monkeypatch, capsys, words, message):
    with pytest.raises(ValueError, match=message):
        run(monkeypatch, capsys, *words)


@pytest.mark.parametrize(
    "text, message",
    [
        ("goal = [[", "tiny.toml is not a TOML file"),
        ("goal = 4.0", "track tiny: it lacks base"),
        ('goal = "low"\n[base]\n[arms.a]', "track tiny: goal is 'low', but it must be a number"),
        ("goal = 4.0\n[base]\n[arms]\na = 1", "arms.a is 1, but it must be a table of keys"),
        ("goal = 4.0\n[base]\n[arms.a]\ntune = 3", "track tiny: a.tune is 3, but it must be a"),
        ('from = "tiny2"\narms = 3', "tiny.toml is damaged"),
    ],
)
def test_what_is_wrong_in_a_track_is_named(track, tmp_path, text, message):
    (tmp_path / "tiny.toml").rename(tmp_path / "tiny2.toml")
    (tmp_path / "tiny.toml").write_text(text)
    with pytest.raises(FileError, match=message):
        load_track("tiny")


def test_the_goal_is_reached_between_two_evaluations():
    before, line = {"tokens": 100, "val_loss_random": 3.0}, {"tokens": 200, "val_loss_random": 2.0}
    key = "val_loss_random"
    assert crossing([before, line], key, 2.25) == 175 and crossing([line], key, 2.25) == 200
    assert crossing([before], key, 2.25) is None


@pytest.mark.parametrize("text", ["[]", '{"arm": "x", "runs": []}', "[" * 99999, "{", "\0"])
def test_results_that_are_none_are_one_line(tmp_path, monkeypatch, text):
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path)
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "x.json").write_text(text)
    with pytest.raises(FileError, match=f"{tmp_path}/bytes.*is damaged"):
        speedrun.table(load_track("bytes"))
