"""The script of a day with a GPU: jobs have time limits, and go on where they
stopped."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from aogpt.runtime.errors import UserError
from aogpt.training.config import from_command_line
from studies import gpu_day
from studies.gpu_day import Job, Options, run_part

OBJECTIVES = {"gpt": "ar", "encoder": "lambda_dce"}


@pytest.fixture
def jobs_of(tmp_path, monkeypatch):
    """Run a part of these jobs: the exit status, and what became of each by name."""

    def run(*jobs, minutes=None, small=False):
        monkeypatch.setattr(gpu_day, "training", lambda o, folder: list(jobs))
        options = Options(part="training", out=tmp_path, minutes=minutes, small=small)
        status = run_part(options)
        rows = {}
        for job in jobs:
            file = tmp_path / "training" / f"{job.name}.done.json"
            rows[job.name] = json.loads(file.read_text()) if file.exists() else None
        return status, rows

    return run


def script(tmp_path, text):
    file = tmp_path / "job.py"
    file.write_text(text)
    return str(file)


def test_a_part_goes_on_with_what_is_not_done(jobs_of, tmp_path, capsys):
    counts = tmp_path / "counts"
    work = script(tmp_path, f"open({str(counts)!r}, 'a').write('x'); print('worked')")
    good = Job("good", 60, work)
    bad = Job("bad", 60, "studies.no_such_module")
    status, rows = jobs_of(good, bad)
    assert status == 1
    assert rows["good"]["status"] == "done"
    assert rows["bad"]["status"] == "failed"
    assert rows["good"]["commit"]
    assert rows["good"]["versions"]["torch"]
    assert "worked" in (tmp_path / "training" / "good.log").read_text()
    assert "no_such_module" in (tmp_path / "training" / "bad.log").read_text()
    status, rows = jobs_of(good)
    assert status == 0 and counts.read_text() == "x", "it is not done twice"
    assert "good" in capsys.readouterr().out
    # Another command of that name is another job: a rehearsal does not stand for it.
    _, rows = jobs_of(Job("good", 60, f"{work} again"))
    assert counts.read_text() == "xx"
    assert rows["good"]["command"].endswith("again")
    assert gpu_day.report([good], tmp_path / "training") == 1


def test_a_model_is_not_evaluated_before_its_training_is_done(jobs_of, tmp_path):
    trained = Job("trained", 60, "studies.no_such_module")
    evaluated = Job("evaluated", 60, script(tmp_path, "print(1)"), needs=("trained",))
    status, rows = jobs_of(trained, evaluated)
    assert status == 1
    assert rows["evaluated"] is None
    status, rows = jobs_of(replace(trained, command=evaluated.command), evaluated)
    assert status == 0
    assert rows["evaluated"]["status"] == "done"


@pytest.mark.parametrize("may_be_cut", [False, True])
def test_a_job_whose_time_is_up_is_asked_to_stop(may_be_cut, jobs_of, tmp_path):
    saved = tmp_path / "saved"
    text = f"""
import signal, sys, time

def save(*_):
    open({str(saved)!r}, 'w').write('state')
    sys.exit(1)

signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
    job = Job("long", 3, script(tmp_path, text), may_be_cut)
    status, rows = jobs_of(job)
    assert saved.read_text() == "state"
    assert rows["long"]["status"] == ("done" if may_be_cut else "cut")
    assert status == (0 if may_be_cut else 1)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow(reason="the other signal")),
    ],
)
def test_a_job_does_not_outlive_the_script(number, tmp_path):
    """A job that did would still run beside the same command given again. In the
    background of a shell, Ctrl-C is ignored and SIGTERM is not."""
    work = f"""
import signal, sys, time

def save(*_):
    open({str(tmp_path / "saved")!r}, 'w').write('state')
    sys.exit(1)

signal.signal(signal.SIGTERM, save)
open({str(tmp_path / "begun")!r}, 'w').close()
time.sleep(300)
"""
    day = f"""
import signal, sys
from studies import gpu_day
job = gpu_day.Job("long", 300, {script(tmp_path, work)!r})
gpu_day.training = lambda o, folder: [job]
if {number == signal.SIGTERM}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = ["gpu_day", "training", "--out", {str(tmp_path)!r}]
gpu_day.main()
"""
    process = subprocess.Popen([sys.executable, "-c", day], cwd=gpu_day.ROOT)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() != 0
    assert (tmp_path / "saved").read_text() == "state"
    assert not (tmp_path / "training" / "long.done.json").exists(), "it is done again"


def test_a_rehearsal_is_limited_by_its_minutes_alone(jobs_of, tmp_path):
    job = Job("slow", 1, script(tmp_path, "import time; time.sleep(3)"))
    status, rows = jobs_of(job, small=True)
    assert status == 0
    assert rows["slow"]["status"] == "done"


def test_no_job_begins_without_time(jobs_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpu_day.MINUTES, "training", 0)
    status, rows = jobs_of(Job("late", 60, script(tmp_path, "")))
    assert status == 1
    assert rows["late"] is None
    assert "no time is left" in capsys.readouterr().out


def test_every_part_lists_jobs_that_exist(tmp_path, monkeypatch):
    """Full size and small; the limits of a part fit into its minutes where jobs take
    them. Runs have settings that exist."""
    monkeypatch.chdir(gpu_day.ROOT)
    folder = tmp_path / "model"
    for part in gpu_day.MINUTES:
        jobs_of_part = getattr(gpu_day, part)
        for small in (False, True):
            options = Options(part=part, small=small, folder=None if small else folder)
            jobs = jobs_of_part(options, tmp_path)
            names = [job.name for job in jobs]
            assert len(set(names)) == len(names)
            for job in jobs:
                assert 0 < job.seconds <= 60 * gpu_day.MINUTES[part]
                target = job.words[0]
                if target.endswith(".py"):
                    assert (gpu_day.ROOT / target).exists()
                if target == "train.py" and "--train.init-from" not in job.words:
                    config = from_command_line(list(job.words[1:]), "")
                    assert config.name == job.name
                    assert config.optim.kind == "muon"
                    kind = job.name.partition("_")[0]
                    assert config.objective.kind == OBJECTIVES.get(kind, "ao_ar")
                    assert (config.model.mask_token is None) == (kind != "encoder")
    with pytest.raises(UserError, match="--folder"):
        gpu_day.pretrained(Options(part="pretrained"), tmp_path)


def test_figures_are_held_against_their_targets(tmp_path):
    training = [
        {"system": "aogpt", "times_gpt": [1.04, 1.0, 1.2], "mfu": 0.3},
        {"system": "gpt", "times_gpt": [1.0, 1.0, 1.0], "mfu": 0.4},
    ]
    decoding = [
        {"system": "ours", "times_floor": 2.6, "times_ours": 1.0, "steps": 64},
        {"system": "encoder", "times_ours": 26.0, "steps": 64},
        {"system": "l2r", "times_floor": 9.0, "times_ours": 2.0, "steps": 64},
    ]
    for name, rows in (("plain", training), ("compared_32", decoding)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "cpu.json").write_text('{"rows": [{"system": "gpt", "mfu": null}]}')
    names = ["plain", "compared_32", "cpu", "not_run"]
    jobs = [Job(name, 60, "x.py") for name in names]
    assert gpu_day.targets(jobs, tmp_path) == [
        ["plain", "aogpt: times_gpt", "1.04", "at most 1.05", "met"],
        ["plain", "gpt: mfu", "0.4", "at least 0.41", "missed"],
        ["compared_32", "ours: times_floor, 64 steps", "2.6", "at most 2.5", "missed"],
        ["compared_32", "encoder: times_ours, 64 steps", "26", "at least 25", "met"],
    ]


@pytest.mark.slow(reason="rehearses a day of experiments")
@pytest.mark.parametrize("part", ["decoding", "training"])
def test_the_rehearsal_of_a_part_ends_well(part, tmp_path):
    assert run_part(Options(part=part, small=True, out=tmp_path, minutes=9)) == 0
