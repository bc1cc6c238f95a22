"""aogpt/training/config.py: files, overrides, and errors that name key and
file."""

import copy
import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from helpers import ROOT, change
from hypothesis import given
from hypothesis import strategies as st

import train
from aogpt.runtime.errors import UserError
from aogpt.runtime.validation import FileError
from aogpt.systems import build_model
from aogpt.training import config as configuration
from aogpt.training import removed_keys
from aogpt.training.config import Config
from aogpt.training.val_losses import validation_orders

OLD_RUNS = [
    json.loads(line)
    for line in (ROOT / "tests" / "old_runs.jsonl").read_text().splitlines()
]
NOT_OPTIONS = [f"model.{name}" for name in configuration.NOT_OPTIONS]
KEYS = [key for key in configuration.dotted(Config()) if key != "schedule"]
KEYS = [key for key in KEYS if key not in NOT_OPTIONS]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture
def load(tmp_path):
    """Write text to run.toml and load it."""

    def write_and_load(text):
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return configuration.load_toml(path)

    return write_and_load


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_builds_its_model_and_survives_to_toml_and_back(
    path, load
):
    config = configuration.load_toml(path)
    assert config.name == path.stem, (
        "two configs with one name would share a run folder"
    )
    with torch.device("meta"):
        build_model(config.model)
    assert load(configuration.to_toml(config)) == config
    assert configuration.differences(config, config) == {}
    assert configuration.from_dict(asdict(config), "a checkpoint") == config


@pytest.mark.parametrize("run", OLD_RUNS, ids=lambda run: run["system"])
def test_the_config_of_an_old_run_loads_without_the_keys_that_were_removed(run, load):
    """Saved at 4349f6ec by runs of one step."""
    config = configuration.from_dict(run["config"], "an old run")
    assert config.name == run["system"]
    assert load(configuration.to_toml(config)) == config
    with torch.device("meta"):
        build_model(config.model)


@pytest.mark.parametrize("key", removed_keys.DEFAULTS)
def test_a_removed_key_of_an_old_run_is_refused_where_it_was_set(key):
    values = copy.deepcopy(OLD_RUNS[0]["config"])
    table, _, name = key.partition(".")
    assert values[table][name] == removed_keys.DEFAULTS[key]
    values[table][name] = 3
    with pytest.raises(FileError, match=f"an old run: unknown key '{key}'.*4349f6ec"):
        configuration.from_dict(values, "an old run")


@pytest.mark.parametrize("key", ["order.kind", "order.mixed", "schedule.kind"])
@pytest.mark.parametrize("kind", ["random_l2r", "sliding"])
def test_a_removed_kind_of_orders_is_refused_by_name(key, kind):
    values = copy.deepcopy(OLD_RUNS[0]["config"])
    table, _, name = key.partition(".")
    if table == "schedule":
        values[table] = [{"step": 3, name: kind}]
    else:
        values[table][name] = kind
    with pytest.raises(FileError, match=f"an old run: {key} is '{kind}', .*4349f6e"):
        configuration.from_dict(values, "an old run")


SIZES_OF_THE_PAPER = {"small": (12, 12, 768, 6e-4), "medium": (24, 16, 1024, 3e-4)}
ORDERS_OF_THE_PAPER = {
    "aogpt": ("mixture", "adaln", "ao_ar"),
    "sigmagpt": ("random", "input", "ao_ar"),
    "gpt": ("l2r", "none", "ar"),
    "gpt2": ("l2r", "none", "ar"),
    "encoder": ("random", "none", "lambda_dce"),
    "radd": ("random", "none", "lambda_dce"),
    "sedd": ("random", "none", "score_entropy"),
    "a3": ("random", "two_stream", "groupwise"),
}


@pytest.mark.parametrize("size", SIZES_OF_THE_PAPER)
@pytest.mark.parametrize("system", ORDERS_OF_THE_PAPER)
def test_configs_of_the_paper_have_its_values(system, size):
    """arXiv 2506.19935, appendix B.3 and table 3; 0.5M tokens a step."""
    path = ROOT / "configs" / f"{system}_small.toml"
    words = [str(path)]
    if size == "medium":  # the options in the comment
        (options,) = re.findall(r"# Medium: (.*\n#.*)\n", path.read_text())
        words += options.replace("\n#", " ").split()
    config = configuration.from_command_line(words, "")
    assert config.name == f"{system}_{size}"
    m = config.model
    o = config.optim
    t = config.train
    assert (m.n_layer, m.n_head, m.n_embd, o.lr) == SIZES_OF_THE_PAPER[size]
    kinds = config.order.kind, m.target, config.objective.kind
    assert kinds == ORDERS_OF_THE_PAPER[system]
    assert system != "aogpt" or config.order.l2r_prob == 0.1
    assert (m.vocab_size, m.block_size, m.dropout) == (50304, 1024, 0.0)
    assert (o.kind, o.beta1, o.beta2, o.weight_decay) == ("adamw", 0.9, 0.95, 0.05)
    assert (o.schedule, o.warmup_steps, o.min_lr_ratio) == ("cosine", 2000, 0.1)
    assert o.ema_decay == (0.0 if system == "sigmagpt" else 0.9999)
    assert (t.steps, t.batch_size * m.block_size) == (500_000, 2**19)
    assert config.data.folder == "data/openwebtext"


def test_a3_grows_its_groups_from_left_to_right_before_orders_are_random():
    config = configuration.load_toml(ROOT / "configs" / "a3_small.toml")
    stages = [(stage.kind, stage.group) for stage in config.schedule]
    assert stages == [("l2r", 1), ("l2r", 2), ("l2r", 3), ("l2r", 4), ("random", 4)]
    shares = [stage.step / config.train.steps for stage in config.schedule]
    assert shares == [0, 0.1, 0.2, 0.3, 0.4]


def test_names_of_any_text_marks_of_byte_order_and_integers_for_numbers_are_read(load):
    config = Config(name="run \N{PARTY POPPER} \x7f")
    assert load(b"\xef\xbb\xbf" + configuration.to_toml(config).encode()) == config
    lr = load("[optim]\nlr = 1").optim.lr
    assert lr == 1
    assert type(lr) is float


NOT_TOML = "run.toml is not a TOML file"
UNKNOWN = "run.toml: unknown key '{}'; the keys are"
ENCODER_FILE = '[model]\nattention = "full"\ntarget = "none"\nmask_token = 50257\n'

REFUSED = [  # a config file, and what the message says besides the file's name
    # not a config file at all
    *(
        (text, NOT_TOML)
        for text in ("[optim\nlr = 1", "name = ", b"name = '\xff'", "import os")
    ),
    # a key that does not exist
    ("[optim]\nwarmup_step = 1", UNKNOWN.format("optim.warmup_step")),
    ("[train]\nstep = 2", UNKNOWN.format("train.step")),
    ("lr = 1.0", UNKNOWN.format("lr")),  # the right name in the wrong place
    # a value that is none, or out of its range
    ("model = 3", "model is 3, but it must be a table"),
    ("schedule = 3", "schedule is 3, but it must be a list"),
    ('[optim]\nkind = "adam"', "optim.kind is 'adam'", "'adamw', 'muon'"),
    ('[order]\nkind = "randm"', "order.kind is 'randm'", "'mixture'"),
    ("[optim]\nlr = nan", "optim.lr is nan"),
    ("[order]\nl2r_prob = 1.5", "order.l2r_prob is 1.5", "at most 1"),
    *((f'name = "{name}"', "name is '") for name in ("", "a/b", ".", "..")),
    # values that do not go together
    ("[model]\nn_embd = 100\nn_head = 3", "model.n_embd (100)", "model.n_head (3)"),
    (
        "[train]\nsteps = 8\nepochs = 3",
        "train.steps and train.epochs: leave one of them out",
    ),
    (
        "[train]\nminutes = 8\nepochs = 3",
        "train.minutes and train.epochs: leave one of them out",
    ),
    ("[train]\ntimeout = 1e30", "train.timeout is 1", "at most 1000000"),
    ("[train]\nmax_iters = 2", UNKNOWN.format("train.max_iters")),
    (
        '[order]\nkind = "fixed_blockwise"\nblock = 2048',
        "block 2048",
        "model.block_size, 1024",
    ),
    ('[order]\nblock = 1\n[[schedule]]\nkind = "fixed_blockwise"', "order.block is 1"),
    ("[[schedule]]\nstep = 2\n[[schedule]]\nstep = 2", "schedule: steps must rise"),
    ("[[schedule]]\nstep = -1", "schedule.step is -1, but it must be at least 0"),
    ('[[schedule]]\nkind = "rnd"', "schedule.kind is 'rnd'", "must be one of"),
    ("[objective]\ngroup = 0", "group is 0"),
    ("[objective]\nprefix_prob = 0.1", "prefix_prob is for encoders", "'ao_ar'"),
    (
        '[objective]\nkind = "ar"\n[order]\nkind = "l2r"\n[[schedule]]\nstep = 2',
        "'ar' needs",
        "'l2r', but it is 'random'",
    ),
    ('[model]\ntarget = "none"', "model.target", "order.kind", "'l2r'"),
    ('[objective]\nkind = "ar"', "needs order.kind = 'l2r', but it is 'mixture'"),
    (
        '[objective]\nkind = "k_dce"',
        "does not fit model.attention = 'causal'",
        "'ao_ar'",
    ),
    ('[objective]\nkind = "groupwise"', "needs model.target = 'two_stream'"),
    (ENCODER_FILE, "does not fit model.attention = 'full'", "'score_entropy'"),
    (ENCODER_FILE + 'noise = true\n[objective]\nkind = "k_dce"', "belong together"),
    (
        ENCODER_FILE + '[objective]\nkind = "k_dce"\n[[schedule]]',
        "an encoder has no order",
    ),
]


@pytest.mark.parametrize("text, words", [(text, words) for text, *words in REFUSED])
def test_a_config_that_cannot_be_is_an_error_that_names_its_file_and_its_keys(
    load, text, words
):
    with pytest.raises(ValueError, match=r"run\.toml") as error:
        load(text)
    for word in words:
        assert word in str(error.value)


GROUPS = (
    '[model]\ntarget = "two_stream"\nblock_size = 64\n'
    '[objective]\nkind = "groupwise"\ngroup = {group}\n'
    '[order]\nkind = "{kind}"\nblock = 8\n'
    "[optim]\nwarmup_steps = 0\n[train]\nsteps = 400\n"
    '[[schedule]]\nstep = 0\nkind = "l2r"\ngroup = 4\n'
    '[[schedule]]\nstep = {last}\nkind = "slots"\ngroup = 4\n'
)


def test_a_stage_after_the_last_step_is_not_validated(load):
    config = load(GROUPS.format(group=4, kind="l2r", last=400))
    orders, name = validation_orders(config)
    assert name == "own"
    assert orders[name].orders.kind == "l2r"


def test_a_stage_has_its_own_share(load):
    stages = '[[schedule]]\nstep = 3\nkind = "mixture"\n'
    config = load('[order]\nkind = "mixture"\nl2r_prob = 0.7\n' + stages)
    assert config.stage(3)[0].l2r_prob == 0.1


def test_a_model_without_target_positions_trains_from_left_to_right_alone(load):
    """Scores and samples of a plain GPT are from left to right, whatever its run."""
    for kind in ('"l2r"', '"mixture"\nl2r_prob = 1.0'):
        load(f'[model]\ntarget = "none"\n[order]\nkind = {kind}')
    for kind in ("r2l", "fixed_random", "random", "mixture"):
        with pytest.raises(UserError, match=f"'{kind}' needs target positions.*l2r"):
            load(f'[model]\ntarget = "none"\n[order]\nkind = "{kind}"')


def test_the_command_line_overrides_the_file_and_leaves_the_rest_alone():
    path = ROOT / "configs" / "quickstart.toml"
    options = (
        "--optim.lr 3e-4 --model.target input --train.compile --name other".split()
    )
    base = configuration.load_toml(path)
    config = configuration.from_command_line([str(path), *options], "")
    changed = {
        key: after
        for key, (_, after) in configuration.differences(base, config).items()
    }
    given = {
        "name": "other",
        "model.target": "input",
        "optim.lr": 3e-4,
        "train.compile": True,
    }
    assert changed == given


def test_a_bad_override_exits_with_status_2_and_names_the_key_and_the_file(capsys):
    path = ROOT / "configs" / "quickstart.toml"
    with pytest.raises(SystemExit) as stop:
        configuration.from_command_line([str(path), "--order.kind", "randm"], "")
    assert stop.value.code == 2
    # the box may break lines anywhere
    message = "".join(capsys.readouterr().err.replace("│", " ").split())
    for word in ["--order.kind", "'random'", "quickstart.toml"]:
        assert "".join(word.split()) in message


def parsed(*options):
    return configuration.from_command_line(
        [str(ROOT / "configs" / "quickstart.toml"), *options], ""
    )


@pytest.mark.parametrize("option", ["--optim.learning-rate", "--lr", "--train.epoch"])
def test_an_option_that_does_not_exist_exits_with_status_2(option, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(option, "3")
    assert stop.value.code == 2
    assert option in capsys.readouterr().err


def test_epochs_become_steps(tmp_path):
    by_epochs = tmp_path / "epochs.toml"
    by_epochs.write_text("[train]\nepochs = 3")
    steps = configuration.from_command_line(
        [str(by_epochs), "--train.steps", "4000"], ""
    )
    assert (steps.train.steps, steps.train.epochs) == (4000, 0)
    config = parsed("--train.epochs", "2.5")
    config = config.with_steps(config.steps_of_epochs(1001))
    assert (config.train.steps, config.train.epochs) == (math.ceil(2.5 * 1001 / 16), 0)
    again = configuration.from_dict(asdict(config), "")
    assert again == config
    with pytest.raises(UserError, match="give one of --train.steps and --train.epochs"):
        parsed("--train.epochs", "2", "--train.steps=3")
    with pytest.raises(UserError, match="one of --train.steps and --train.minutes, no"):
        parsed("--train.steps", "40", "--train.minutes", "2")


@given(world=st.integers(1, 40), share=st.integers(1, 60), most=st.integers(1, 70))
def test_micro_batches_fit_the_number_of_processes(world, share, most):
    config = change(
        Config(), train__batch_size=world * share, train__micro_batch_size=most
    )
    size = config.micro_batch_size(world)
    assert share % size == 0
    assert size <= most
    assert not any(
        share % larger == 0 for larger in range(size + 1, min(share, most) + 1)
    )
    with pytest.raises(
        UserError, match=f"multiple of the {world * share + 1} processes"
    ):
        config.micro_batch_size(world * share + 1)


@pytest.mark.parametrize(
    "path, words",
    [
        ("run.toml", "warmup_steps"),
        ("nowhere.toml", "nowhere.toml"),
        (".", "there is no such file"),
        (
            "--optim.lr",
            "config file first, e.g. python train.py configs/quickstart.toml",
        ),
    ],
)
def test_a_bad_file_ends_the_script_with_status_2_and_one_line(
    script, tmp_path, monkeypatch, path, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[optim]\nwarmup_step = 1")
    status, out, err = script(train, path)
    assert status == 2
    assert not out
    assert words in err
    assert err.count("\n") == 1


def test_help_shows_what_people_change_first_then_every_key_with_its_meaning(
    script, monkeypatch, columns=80
):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, shown, _ = script(train, "--help")
    assert status == 0
    assert max(map(len, shown.splitlines())) <= columns
    first = "\n".join(shown.splitlines()[:28])
    for key in (
        "name",
        "data.folder",
        "model.n-layer",
        "optim.lr",
        "train.steps",
        "eval.interval",
    ):
        assert f"--{key}" in first, key
    boxes = shown[shown.index("-h, --help") :]
    for key in KEYS:
        assert "--" + key.replace("_", "-") in boxes, key
    for key in NOT_OPTIONS:
        assert "--" + key.replace("_", "-") + " " not in boxes, key
