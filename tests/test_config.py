"""training/config.py: files, overrides, and errors that name key, file and nearest valid name."""

import math
import typing

import pytest
import torch
from helpers import ROOT, change
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from model import ModelConfig
from orders import OrderConfig, OrderKind
from runtime.validation import keys_of
from training import config as configuration
from training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimConfig,
    StageConfig,
    TrainConfig,
    WandbConfig,
)
from variants import build_model

KEYS = [key for key in keys_of(Config) if not key.startswith("schedule.")]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture
def load(tmp_path):
    """Write text to a file and load it; the file is called run.toml."""

    def write_and_load(text):
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return configuration.load_toml(path)

    return write_and_load


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_builds_its_model_and_survives_to_toml_and_back(path, load):
    config = configuration.load_toml(path)
    assert config.name == path.stem, "two configs with one name would share a run folder"
    with torch.device("meta"):
        build_model(config.model)
    assert load(configuration.to_toml(config)) == config


def any_table(table, **keys):
    """Any valid table: every key varies over what its type declares, or over what is given here."""
    hints = typing.get_type_hints(table, include_extras=True)
    return st.builds(table, **{name: st.from_type(hint) for name, hint in hints.items()} | keys)


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

# AO-GPT's architecture (section 4 and appendix B.3), and what the others have in its place.
MODEL_OF_THE_PAPER = {
    "attention": "causal",
    "cond_dim": 128,
    "noise": False,
    "mask_token": None,
    "position": "learned",
    "position_init": "normal",
    "start": "attended",
    "norm": "rmsnorm",
    "norm_bias": True,
    "qk_norm": True,
    "attn_bias": True,
    "mlp_bias": True,
    "gelu": "erf",
    "tied_head": False,
    "head_bias": True,
    "value_residual": False,
}
GPT2_NORM = {"norm": "layernorm", "qk_norm": False}
TIED = {"tied_head": True, "head_bias": False}
ENCODER = {"attention": "full", "mask_token": 50257}  # the first id after GPT-2's
RADD = ENCODER | GPT2_NORM | {"position": "rotary", "gelu": "tanh", "attn_bias": False}
MODELS_OF_THE_PAPER = {
    "sigmagpt": GPT2_NORM | TIED,
    "gpt2": GPT2_NORM | TIED | {"gelu": "tanh", "start": "hidden"},
    "encoder": ENCODER,
    "radd": RADD,
    "sedd": RADD | {"norm_bias": False, "noise": True},
}


@pytest.mark.parametrize("size", SIZES_OF_THE_PAPER)
@pytest.mark.parametrize("system", ORDERS_OF_THE_PAPER)
def test_configs_of_the_paper_have_its_values(system, size):
    """arXiv 2506.19935, appendix B.3 and table 3; 0.5M tokens a step."""
    config = configuration.load_toml(ROOT / "configs" / f"{system}_{size}.toml")
    m, o, t = config.model, config.optim, config.train
    assert (m.n_layer, m.n_head, m.n_embd, o.lr) == SIZES_OF_THE_PAPER[size]
    kinds = config.order.kind, m.target, config.objective.kind
    assert kinds == ORDERS_OF_THE_PAPER[system]
    assert system != "aogpt" or config.order.l2r_prob == 0.1
    assert (m.vocab_size, m.block_size, m.dropout) == (50304, 1024, 0.0)
    architecture = MODEL_OF_THE_PAPER | MODELS_OF_THE_PAPER.get(system, {})
    assert {key: getattr(m, key) for key in architecture} == architecture
    assert (o.kind, o.beta1, o.beta2, o.weight_decay) == ("adamw", 0.9, 0.95, 0.05)
    assert (o.schedule, o.warmup_steps, o.min_lr_ratio) == ("cosine", 2000, 0.1)
    assert (o.grad_clip, o.ema_decay) == (1.0, 0.0 if system == "sigmagpt" else 0.9999)
    assert (t.steps, t.batch_size * m.block_size) == (500_000, 2**19)
    assert config.data.folder == "data/openwebtext" and not config.data.random_length_prob


@pytest.mark.parametrize("name", ["a3_small", "a3_medium", "a3_small_fast"])
def test_a3_grows_its_groups_from_left_to_right_before_orders_are_random(name):
    config = configuration.load_toml(ROOT / "configs" / f"{name}.toml")
    assert (config.model.target, config.objective.kind) == ("two_stream", "groupwise")
    stages = [(stage.kind, stage.group) for stage in config.schedule]
    assert stages == [("l2r", 1), ("l2r", 2), ("l2r", 3), ("l2r", 4), ("random", 4)]
    shares = [stage.step / config.train.steps for stage in config.schedule]
    assert shares == [0, 0.1, 0.2, 0.3, 0.4]
    assert config.order.kind == "random" and config.objective.group == 4


@st.composite
def configs(draw):
    """Any valid Config of a decoder: every key varies but those that only encoders have."""
    count, size = st.integers(1, 2**31), st.integers(1, 2**15)
    heads, steps, micro = draw(st.integers(1, 2**12)), draw(count), draw(size)
    sizes = {
        "vocab_size": st.integers(1, 2**24),
        "cond_dim": st.integers(1, 2**17),
        "n_layer": st.integers(1, 10_000),
        "block_size": st.integers(2, 2**20),
        "n_head": st.just(heads),
        "n_embd": st.integers(1, 2**17 // heads).map(heads.__mul__),
    }
    fixed = {"attention": "causal", "noise": False, "mask_token": None, "position": "learned"}
    targets = st.sampled_from(("none", "input", "adaln", "shared", "per_block"))
    fixed = {key: st.just(value) for key, value in fixed.items()}
    dropout = st.floats(0, 1, exclude_max=True)
    model = draw(any_table(ModelConfig, target=targets, dropout=dropout, **sizes, **fixed))
    without = ("l2r", "fixed_random")
    kinds = st.sampled_from(without if model.target == "none" else typing.get_args(OrderKind))
    blocks = st.integers(2, model.block_size)
    order = any_table(OrderConfig, kind=kinds, block=blocks, file=st.text(min_size=1))
    stages = sorted(draw(st.sets(st.integers(0, 2**31), max_size=3)))
    stages = [draw(any_table(StageConfig, kind=kinds, step=st.just(step))) for step in stages]
    optim = any_table(
        OptimConfig,
        warmup_steps=st.integers(0, steps),
        decay_steps=st.sampled_from((0, steps, 2**31)),
        more_ema_decays=st.sampled_from(((), (0.1234,), (0.1234, 0.5678))),
    )
    batches = {"micro_batch_size": st.just(micro), "batch_size": size.map(micro.__mul__)}
    name = st.text(max_size=20).filter(lambda s: s.strip(".") and "/" not in s and "\0" not in s)
    return Config(
        name=draw(name),
        out=draw(st.text(max_size=20)),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=model,
        order=draw(order),
        schedule=tuple(stages),
        data=draw(any_table(DataConfig)),
        optim=draw(optim),
        train=draw(any_table(TrainConfig, steps=st.just(steps), **batches)),
        eval=draw(any_table(EvalConfig)),
        checkpoint=draw(any_table(CheckpointConfig)),
        wandb=draw(any_table(WandbConfig)),
    )


@settings(deadline=None, max_examples=60)
@given(configs())
def test_any_config_survives_to_toml_and_back_and_the_plain_values_of_a_checkpoint(
    tmp_path_factory, config
):
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_bytes(configuration.to_toml(config).encode())
    assert configuration.load_toml(path) == config
    assert configuration.differences(config, configuration.load_toml(path)) == {}
    assert configuration.from_dict(configuration.to_dict(config), "a checkpoint") == config


def test_names_of_any_text_marks_of_byte_order_and_integers_for_numbers_are_read(load):
    config = Config(name="run \N{PARTY POPPER} \x7f")
    assert load(b"\xef\xbb\xbf" + configuration.to_toml(config).encode()) == config
    lr = load("[optim]\nlr = 1").optim.lr
    assert lr == 1 and type(lr) is float


NOT_TOML = "run.toml is not a TOML file"
UNKNOWN = "run.toml: unknown key '{}'; did you mean '{}'?"

REFUSED = [  # a config file, and what the message says besides the file's name
    # not a config file at all
    *((text, NOT_TOML) for text in ("[optim\nlr = 1", "name = ", b"name = '\xff'", "import os")),
    # a key that does not exist: the nearest one is named
    ("[optim]\nwarmup_step = 1", UNKNOWN.format("optim.warmup_step", "optim.warmup_steps")),
    ("[optim]\nlearning_rte = 1.0", "unknown key 'optim.learning_rte'; did you mean 'optim."),
    ("[model]\nn_heads = 2", UNKNOWN.format("model.n_heads", "model.n_head")),
    ("[train]\nstep = 2", UNKNOWN.format("train.step", "train.steps")),  # not schedule.step
    ("[train]\nbatchsize = 2", UNKNOWN.format("train.batchsize", "train.batch_size")),
    ("[modle]\nn_layer = 2", UNKNOWN.format("modle", "model")),
    ("[checkpoints]\nkeep = 2", UNKNOWN.format("checkpoints", "checkpoint")),
    ("seeed = 2", UNKNOWN.format("seeed", "seed")),
    ("lr = 1.0", UNKNOWN.format("lr", "optim.lr")),  # the right name in the wrong place
    ("[model]\nl2r_prob = 0.5", UNKNOWN.format("model.l2r_prob", "order.l2r_prob")),
    ("zzz = 1", "unknown key 'zzz'; the keys are name, out, seed, model, order"),
    ("name = " + "[" * 10_000, NOT_TOML),
    ("a" + ".a" * 100 + " = 1", "nested too deep"),
    # a table that is none
    ("model = 3", "model is 3, but it must be a table"),
    ("schedule = 3", "schedule is 3, but it must be a list"),
    # a value out of its range
    ('[optim]\nkind = "adam"', "optim.kind is 'adam'", "'adamw', 'muon'; did you mean 'adamw'?"),
    ('[order]\nkind = "randm"', "order.kind is 'randm'", "'mixture'"),
    ("[order]\nl2r_prob = 1.5", "order.l2r_prob", "1.5"),
    ("[order]\nblock = 0", "order.block"),
    ("[optim]\nlr = -1.0", "optim.lr is -1.0; give a number at least 0 and finite"),
    ("[optim]\nlr = nan", "optim.lr is nan"),
    ("[optim]\nlr = inf", "optim.lr is inf"),
    ("[optim]\ngrad_clip = -1", "optim.grad_clip is -1; give a number at least 0"),
    ("[optim]\nbeta2 = 1.0", "optim.beta2 is 1.0", "below 1"),
    ("[optim]\nmuon_lr = -1.0", "optim.muon_lr is -1.0"),
    ("[optim]\nmuon_momentum = 1.0", "optim.muon_momentum"),
    ("[optim]\nema_decay = 2.0", "optim.ema_decay"),
    ("[data]\nrandom_length_prob = 1.5", "data.random_length_prob is 1.5", "at most 1"),
    ("[train]\nsteps = 0", "train.steps is 0; give a number at least 1"),
    ("[train]\ntimeout = 0", "train.timeout is 0; give a number above 0 and finite"),
    ("[eval]\ninterval = -1", "eval.interval"),
    ("[checkpoint]\nkeep = 0", "checkpoint.keep"),
    ("seed = -1", "seed is -1"),
    *((f'name = "{name}"', "name is '") for name in ("", "a/b", ".", "..")),
    # values that do not go together
    ("[model]\nn_embd = 100\nn_head = 3", "model.n_embd (100)", "model.n_head (3)"),
    ("[optim]\nwarmup_steps = 11\n[train]\nsteps = 10", "_steps (11)", "train.steps (10)"),
    ("[optim]\nwarmup_steps = 11\ndecay_steps = 10", "decay_steps (10)", "warmup_steps (11)"),
    ("[optim]\nema_decay = 0.9\nmore_ema_decays = [0.8, 0.9]", "a decay twice"),
    ("[optim]\nmore_ema_decays = [1.5]", "optim.more_ema_decays is 1.5"),
    ("[train]\nbatch_size = 8\nmicro_batch_size = 3", "batch_size (8)", "micro_batch_size (3)"),
    ('[order]\nkind = "fixed_blockwise"\nblock = 2048', "(2048)", "model.block_size (1024)"),
    ('[order]\nkind = "fixed_blockwise"\nblock = 1', "order.block is 1", "at least 2"),
    ('[order]\nblock = 1\n[[schedule]]\nkind = "fixed_blockwise"', "order.block is 1"),
    ('[model]\ntarget = "none"', "model.target", "order.kind", "'l2r'"),
    ('[model]\ntarget = "none"\n[order]\nkind = "random"', "model.target", "order.kind"),
]


@pytest.mark.parametrize("text, words", [(text, words) for text, *words in REFUSED])
def test_a_config_that_cannot_be_is_an_error_that_names_its_file_and_its_keys(load, text, words):
    with pytest.raises(ValueError, match=r"run\.toml") as error:
        load(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_type_is_an_error_for_every_key(load, key):
    table, _, name = key.rpartition(".")
    head = f"[{table}]\n" if table else ""
    hint = typing.get_type_hints(typing.get_type_hints(Config)[table] if table else Config)[name]
    wrong = ["[true]", "1979-05-27"] + (["1", "true"] if hint is str else ['"1"'])
    wrong += {int: ["1.0", "true"], float: ["true"], bool: ["1"]}.get(hint, [])
    for value in wrong:
        with pytest.raises(ValueError, match="must be") as error:
            load(f"{head}{name} = {value}")
        assert "run.toml" in str(error.value) and key in str(error.value), value


def test_a_model_without_target_positions_may_train_on_any_order_that_never_changes(load):
    for kind in ('"l2r"', '"fixed_random"', '"mixture"\nl2r_prob = 1.0'):
        load(f'[model]\ntarget = "none"\n[order]\nkind = {kind}')


@pytest.mark.parametrize("name", ["configs/quickstrat.toml", "nowhere/x.toml", "configs"])
def test_a_missing_file_and_a_folder_are_errors_that_name_it(name):
    with pytest.raises(OSError, match=name):
        configuration.load_toml(name)


def test_the_command_line_overrides_the_file_and_leaves_the_rest_alone():
    path = ROOT / "configs" / "quickstart.toml"
    options = "--optim.lr 3e-4 --model.target input --train.compile --name other".split()
    base = configuration.load_toml(path)
    config = configuration.from_command_line([str(path), *options], "")
    changed = {key: after for key, (_, after) in configuration.differences(base, config).items()}
    expected = {"name": "other", "model.target": "input", "optim.lr": 3e-4, "train.compile": True}
    assert changed == expected
    # every key, whatever its kind, can be given on the command line
    for key in KEYS:
        table, _, name = key.rpartition(".")
        value = getattr(getattr(base, table) if table else base, name)
        option = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            given = [option if value else f"--{table}.no-{name}".replace("_", "-")]
        elif isinstance(value, tuple):
            given = [option, *map(str, value)]
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
    # the box may break lines anywhere
    message = "".join(capsys.readouterr().err.replace("│", " ").split())
    for word in [*words, "quickstart.toml"]:
        assert "".join(word.split()) in message


def test_a_bad_file_and_none_end_the_script_with_status_2_and_one_line(script, tmp_path):
    (tmp_path / "run.toml").write_text("[optim]\nwarmup_step = 1")
    status, out, err = script(train, tmp_path / "run.toml")
    assert status == 2 and not out and "run.toml" in err and "optim.warmup_steps" in err
    status, out, err = script(train, "--optim.lr", 1)
    assert status == 2 and "config file first, e.g. python train.py configs/quickstart.toml" in err


def test_help_shows_every_key_and_exits_0(capsys):
    with pytest.raises(SystemExit) as stop:
        configuration.from_command_line(["--help"], "Train an AO-GPT")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "Train an AO-GPT" in shown
    for key in KEYS:
        assert "--" + key.replace("_", "-") in shown, key


def test_differences_are_the_dotted_keys_that_changed_with_both_values():
    old = Config()
    new = change(old, seed=3, optim__lr=1.0, optim__grad_clip=math.inf)
    changed = {"seed": (0, 3), "optim.lr": (6e-4, 1.0), "optim.grad_clip": (1.0, math.inf)}
    assert configuration.differences(old, new) == changed
