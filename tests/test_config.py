"""config.py: files, overrides, and errors that name the key, the file and the nearest valid name."""

import dataclasses
import math
import typing

import pytest
import torch
from helpers import ROOT, assert_user_error, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from model import AOGPT, ModelConfig
from orders import OrderConfig
from training import config as configuration
from training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimConfig,
    TrainConfig,
    WandbConfig,
)

SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture
def load(tmp_path):
    """Write text to a file and load it; the file is called run.toml."""

    def write_and_load(text):
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return configuration.load_toml(path)

    return write_and_load


# ---- what is shipped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_under_its_own_name_and_its_model_can_be_built(path):
    config = configuration.load_toml(path)
    assert config.name == path.stem, "two configs with one name would share a run folder"
    with torch.device("meta"):
        AOGPT(config.model)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_survives_to_toml_and_back(path, load):
    config = configuration.load_toml(path)
    assert load(configuration.to_toml(config)) == config


# ---- round trip of any config ----------------------------------------------------------------------------------------

positive = st.integers(1, 10**12)
ratio = st.floats(0, 1)
beta = st.floats(0, 1, exclude_max=True)
amount = st.floats(0, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"), max_size=20)
run_name = text.filter(lambda s: s.strip(".") and "/" not in s)


def one_of(cls, name):
    return st.sampled_from(typing.get_args(typing.get_type_hints(cls)[name]))


@st.composite
def configs(draw):
    """Any valid Config: every key of every table varies."""
    heads, steps, micro = draw(positive), draw(positive), draw(positive)
    model = ModelConfig(
        *(draw(positive) for _ in range(3)),
        n_head=heads,
        n_embd=heads * draw(st.integers(1, 1000)),
        target=draw(one_of(ModelConfig, "target")),
        cond_dim=draw(positive),
        norm=draw(one_of(ModelConfig, "norm")),
        gelu=draw(one_of(ModelConfig, "gelu")),
        dropout=draw(st.floats(0, 1, exclude_max=True)),
        **{
            name: draw(st.booleans())
            for name in ("qk_norm", "attn_bias", "mlp_bias", "norm_bias", "tied_head", "head_bias")
        },
    )
    kinds = (
        ("l2r", "fixed_random")
        if model.target == "none"
        else typing.get_args(OrderConfig.__annotations__["kind"])
    )
    return Config(
        name=draw(run_name),
        out=draw(text),
        seed=draw(st.integers(0, 2**62)),
        model=model,
        order=OrderConfig(
            draw(st.sampled_from(kinds)),
            draw(ratio),
            draw(st.integers(1, model.block_size)),
            draw(st.integers(0, 99)),
        ),
        data=DataConfig(draw(text), draw(st.booleans()), draw(ratio)),
        optim=OptimConfig(
            *(
                draw(values)
                for values in (
                    amount,
                    ratio,
                    st.integers(0, steps),
                    beta,
                    beta,
                    amount,
                    amount,
                    ratio,
                )
            ),
            *(draw(values) for values in (one_of(OptimConfig, "kind"), amount, beta)),
        ),
        train=TrainConfig(
            steps,
            micro * draw(positive),
            micro,
            draw(one_of(TrainConfig, "dtype")),
            draw(text),
            init_from=draw(text),
            compile=draw(st.booleans()),
            log_interval=draw(positive),
            max_skipped_steps=draw(positive),
        ),
        eval=EvalConfig(draw(st.integers(0, 10**9)), draw(positive)),
        checkpoint=CheckpointConfig(draw(positive), draw(positive)),
        wandb=WandbConfig(draw(one_of(WandbConfig, "mode")), draw(text)),
    )


@settings(deadline=None, max_examples=100)
@given(configs())
def test_any_config_survives_to_toml_and_back(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_bytes(configuration.to_toml(config).encode())
    assert configuration.load_toml(path) == config
    assert configuration.differences(config, configuration.load_toml(path)) == {}


@settings(deadline=None, max_examples=50)
@given(configs())
def test_any_config_survives_the_plain_values_of_a_checkpoint(config):
    assert configuration.from_dict(configuration.to_dict(config), "a checkpoint") == config


def test_a_name_beyond_the_basic_plane_survives_to_toml_and_back(load):
    config = Config(name="run \N{PARTY POPPER}")
    assert load(configuration.to_toml(config)) == config


# ---- unknown keys, wrong types, impossible combinations --------------------------------------------------------------


@pytest.mark.parametrize(
    "text, key, nearest",
    [
        ("[optim]\nlearning_rte = 1.0", "optim.learning_rte", "optim."),
        ("[optim]\nwarmup_step = 1", "optim.warmup_step", "optim.warmup_steps"),
        ("[model]\nn_heads = 2", "model.n_heads", "model.n_head"),
        ("[train]\nbatchsize = 2", "train.batchsize", "train.batch_size"),
        ("[modle]\nn_layer = 2", "modle", "model"),
        ("[checkpoints]\nkeep = 2", "checkpoints", "checkpoint"),
        ("seeed = 2", "seeed", "seed"),
        ("lr = 1.0", "lr", "optim.lr"),  # the right name in the wrong place
        ("[model]\nl2r_prob = 0.5", "model.l2r_prob", "order.l2r_prob"),
    ],
)
def test_an_unknown_key_is_named_with_its_file_and_the_nearest_valid_one(load, text, key, nearest):
    with pytest.raises(ValueError, match="run.toml: unknown key") as error:
        load(text)
    assert f"unknown key '{key}'; did you mean '{nearest}" in str(error.value)


def test_an_unknown_key_like_no_other_gets_the_list_of_keys(load):
    with pytest.raises(
        ValueError, match=r"run\.toml: unknown key 'zzz'.*name, out, seed, model, order"
    ):
        load("zzz = 1")


@pytest.mark.parametrize("key", configuration.valid_keys())
def test_a_wrong_type_is_an_error_for_every_key(load, key):
    """A list is right for no key; a string is wrong for numbers, a number for strings."""
    table, _, name = key.rpartition(".")
    head = f"[{table}]\n" if table else ""
    hint = typing.get_type_hints(typing.get_type_hints(Config)[table] if table else Config)[name]
    wrong = ["[1]", "1979-05-27"] + (["1", "true"] if hint is str else ['"1"'])
    wrong += {int: ["1.0", "true"], float: ["true"], bool: ["1"]}.get(hint, [])
    for value in wrong:
        with pytest.raises(ValueError, match="must be") as error:
            load(f"{head}{name} = {value}")
        assert "run.toml" in str(error.value) and key in str(error.value), value


def test_an_integer_is_taken_for_a_number_and_becomes_a_float(load):
    lr = load("[optim]\nlr = 1").optim.lr
    assert lr == 1 and type(lr) is float


def test_a_table_given_as_a_value_is_an_error_that_shows_how_to_write_it(load):
    with pytest.raises(ValueError, match=r"run\.toml: 'model' is a table; write \[model\]"):
        load("model = 3")


def test_a_wrong_choice_lists_the_choices_and_the_nearest(load):
    with pytest.raises(
        ValueError, match=r"run\.toml: order\.kind is 'randm'.*'mixture'.*did you mean 'random'"
    ):
        load('[order]\nkind = "randm"')


@pytest.mark.parametrize(
    "text, named",
    [
        ("[model]\nn_embd = 100\nn_head = 3", ["model.n_embd (100)", "model.n_head (3)"]),
        ("[model]\nvocab_size = 0", ["model.vocab_size"]),
        ("[model]\ndropout = 1.0", ["model.dropout"]),
        ("[order]\nl2r_prob = 1.5", ["order.l2r_prob", "1.5"]),
        ("[order]\nblock = 0", ["order.block"]),
        (
            '[order]\nkind = "fixed_blockwise"\nblock = 2048',
            ["order.block (2048)", "model.block_size (1024)"],
        ),
        ('[model]\ntarget = "none"', ["model.target", "order.kind", "'l2r'"]),
        ('[model]\ntarget = "none"\n[order]\nkind = "random"', ["model.target", "order.kind"]),
        ("[optim]\nlr = -1.0", ["optim.lr", "-1.0"]),
        ("[optim]\nlr = nan", ["optim.lr", "nan"]),
        ("[optim]\nbeta2 = 1.1", ["optim.beta2"]),
        ("[optim]\nmuon_lr = -1.0", ["optim.muon_lr", "-1.0"]),
        ("[optim]\nmuon_momentum = 1.0", ["optim.muon_momentum"]),
        ('[optim]\nkind = "mu"', ["optim.kind", "'adamw', 'muon'"]),
        ("[data]\nrandom_length_prob = 1.5", ["data.random_length_prob", "1.5", "from 0 to 1"]),
        ("[optim]\nema_decay = 2.0", ["optim.ema_decay"]),
        (
            "[optim]\nwarmup_steps = 11\n[train]\nsteps = 10",
            ["optim.warmup_steps (11)", "train.steps (10)"],
        ),
        (
            "[train]\nbatch_size = 8\nmicro_batch_size = 3",
            ["train.batch_size (8)", "train.micro_batch_size (3)"],
        ),
        ("[train]\nsteps = 0", ["train.steps"]),
        ("[eval]\ninterval = -1", ["eval.interval"]),
        ("[checkpoint]\nkeep = 0", ["checkpoint.keep"]),
        ("seed = -1", ["seed is -1"]),
        ('name = ""', ["name"]),
        ('name = "a/b"', ["name", "a/b"]),
    ],
)
def test_an_impossible_value_or_combination_names_its_keys_and_the_file(load, text, named):
    with pytest.raises(ValueError) as error:
        load(text)
    for word in ["run.toml", *named]:
        assert word in str(error.value)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_would_put_the_run_outside_its_folder_is_an_error(load, name):
    with pytest.raises(ValueError, match="name"):
        load(f'name = "{name}"')


def test_a_model_without_target_positions_may_train_on_any_order_that_never_changes(load):
    for kind in ('"l2r"', '"fixed_random"', '"mixture"\nl2r_prob = 1.0'):
        load(f'[model]\ntarget = "none"\n[order]\nkind = {kind}')


@pytest.mark.parametrize("text", ["[optim\nlr = 1", "name = ", b"name = '\xff'", "import os"])
def test_a_file_that_is_not_toml_is_an_error_that_names_it(load, text):
    with pytest.raises(ValueError, match=r"run\.toml is not a TOML file"):
        load(text)


def test_a_missing_file_is_an_error_that_names_the_nearest_and_a_folder_the_file_in_it():
    with pytest.raises(ValueError, match="quickstrat.toml; did you mean .*configs/quickstart.toml"):
        configuration.load_toml(ROOT / "configs" / "quickstrat.toml")
    with pytest.raises(ValueError, match="no config file nowhere/x.toml"):
        configuration.load_toml("nowhere/x.toml")
    with pytest.raises(ValueError, match="configs is a folder"):
        configuration.load_toml(ROOT / "configs")


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_the_file_and_leaves_the_rest_alone():
    path = ROOT / "configs" / "quickstart.toml"
    options = [
        "--optim.lr",
        "3e-4",
        "--model.target",
        "input",
        "--train.compile",
        "--name",
        "other",
    ]
    base, config = (
        configuration.load_toml(path),
        configuration.from_command_line([str(path), *options], ""),
    )
    changed = {key: after for key, (_, after) in configuration.differences(base, config).items()}
    assert changed == {
        "name": "other",
        "model.target": "input",
        "optim.lr": 3e-4,
        "train.compile": True,
    }
    # every key, whatever its kind, can be given on the command line
    for key in configuration.valid_keys():
        table, _, name = key.rpartition(".")
        value = getattr(getattr(base, table) if table else base, name)
        option = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            given = [option if value else f"--{table}.no-{name}".replace("_", "-")]
        else:
            given = [option, str(value)] if value != "" else [option + "="]
        assert configuration.from_command_line([str(path), *given], "") == base


@pytest.mark.parametrize(
    "options, words",
    [
        (["--optim.lrr", "1"], ["--optim.lrr", "--optim.lr"]),
        (["--optim.lr", "fast"], ["--optim.lr", "fast"]),
        (["--order.kind", "randm"], ["--order.kind", "'random'"]),
        (["--train.micro-batch-size", "3"], ["train.batch_size", "train.micro_batch_size"]),
        (["--model.target", "none"], ["model.target", "order.kind"]),
        (["--optim.lr", "-1"], ["optim.lr"]),
    ],
)
def test_a_bad_override_exits_with_status_2_and_names_the_key_and_the_file(options, words, capsys):
    with pytest.raises(SystemExit) as stop:
        configuration.from_command_line([str(ROOT / "configs" / "quickstart.toml"), *options], "")
    assert stop.value.code == 2
    message = "".join(
        capsys.readouterr().err.replace("│", " ").split()
    )  # the box may break lines anywhere
    for word in [*words, "quickstart.toml"]:
        assert "".join(word.split()) in message


def test_a_bad_file_ends_the_script_with_status_2_and_no_traceback(tmp_path):
    (tmp_path / "run.toml").write_text("[optim]\nwarmup_step = 1")
    assert_user_error(
        run_script("train.py", tmp_path / "run.toml", check=False), "run.toml", "optim.warmup_steps"
    )


def test_no_config_file_is_an_error_that_shows_a_command():
    with pytest.raises(
        ValueError, match=r"config file first, e\.g\. python train\.py configs/quickstart\.toml"
    ):
        configuration.from_command_line(["--optim.lr", "1"], "")


def test_help_shows_every_key_and_exits_0(capsys):
    with pytest.raises(SystemExit) as stop:
        configuration.from_command_line(["--help"], "Train an AO-GPT")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "Train an AO-GPT" in shown
    for key in configuration.valid_keys():
        assert "--" + key.replace("_", "-") in shown, key


# ---- differences -----------------------------------------------------------------------------------------------------


def test_differences_are_the_dotted_keys_that_changed_with_both_values():
    old = Config()
    new = dataclasses.replace(
        old, seed=3, optim=dataclasses.replace(old.optim, lr=1.0, grad_clip=math.inf)
    )
    changed = {"seed": (0, 3), "optim.lr": (6e-4, 1.0), "optim.grad_clip": (1.0, math.inf)}
    assert configuration.differences(old, new) == changed
