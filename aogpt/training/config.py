"""Configuration: nested dataclasses, read from a TOML file, overridden on the command
line.

Types give the range of each value, `Config` checks combinations, and `train.py --help`
shows the comments on fields."""

import functools
import itertools
import math
import textwrap
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
from annotated_types import Interval

from ..checkpoints import store
from ..checkpoints.load import config_of
from ..model import ModelConfig
from ..objectives import OBJECTIVES, ObjectiveConfig
from ..orders import OrderConfig, OrderKind
from ..runtime import validation
from ..runtime.devices import pick_dtype
from ..runtime.errors import UserError
from ..runtime.validation import (
    Amount,
    BelowOne,
    Count,
    FileName,
    NonNegative,
    Probability,
    Seed,
)
from ..systems import check_config, system_of
from .removed_keys import advice_on, without_removed_keys
from .warm_start import with_shape_of

# Keys of [model] that are no options: details of published layouts, which a config
# sets, and what train.init_from takes from a pretrained decoder.
NOT_OPTIONS = (
    "norm",
    "norm_bias",
    "gelu",
    "attn_bias",
    "head_bias",
    "tied_head",
    "noise",
    "position_init",
    "mlp_bias",
    "n_kv_head",
    "head_width",
    "mlp",
    "attn_proj_bias",
    "norm_eps",
    "rope_base",
    "rope_scaling",
)


@dataclass(frozen=True)
class DataConfig:
    """The data of a run."""

    folder: str = "data/openwebtext"  # folder that data/prepare.py wrote
    # train on this many tokens of data.folder, in blocks spread over it; 0: all
    max_tokens: NonNegative = 0
    # the end of a record: predicted, as one more token, which only left to right can
    # use; or given, known before any token, so that records of an any-order model end
    # in any order
    end: Literal["predicted", "given"] = "predicted"


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its learning rates and the averaged weights."""

    lr: Amount = 6e-4  # peak learning rate
    min_lr_ratio: Probability = 0.1  # the learning rate ends at lr * min_lr_ratio
    # decay after the warm-up; wsd: constant, then linear in the last fifth of the steps
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: NonNegative = 2000  # steps of linear warm-up
    beta1: BelowOne = 0.9  # AdamW: decay of the average gradient
    beta2: BelowOne = 0.95  # AdamW: decay of the average squared gradient
    weight_decay: Amount = 0.05  # on matrices only
    # of the averaged weights; at step t at most (1 + t) / (10 + t)
    ema_decay: Probability = 0.9999
    # muon: Muon for matrices of blocks, else AdamW
    kind: Literal["adamw", "muon"] = "adamw"
    muon_lr: Amount = 0.02  # Muon's peak learning rate; not comparable with lr


@dataclass(frozen=True)
class TrainConfig:
    """The steps of a run and the ways to run them."""

    steps: Count = 500_000  # optimizer steps of the whole run
    epochs: Amount = 0.0  # passes over the data, instead of steps
    # instead of steps: those that this machine makes in this time, by the pace of some
    # steps before the first one; a run that resumes keeps their number
    minutes: Amount = 0.0
    batch_size: Count = 512  # sequences in one optimizer step, over all processes
    # sequences in one forward pass of one process; lowered to a divisor of its share of
    # the batch
    micro_batch_size: Count = 16
    # precision of matrix products; auto: bfloat16 on a CUDA GPU that has it, and on a
    # CPU that has it for models of width 512 and more; else float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # auto (CUDA if there is a GPU), cpu, cuda or another of PyTorch's
    device: str = "auto"
    # start from the weights of this run, export or pretrained model, and take from it
    # the keys of [model] that are not set and that its weights depend on: all but
    # dropout, block_size, and target and query_at of a plain GPT
    init_from: str = ""
    # with several processes: ddp: each holds the whole state; fsdp: weights, averages,
    # optimizer state and checkpoints are sharded
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # block: the backward pass recomputes every block, for less memory and more time
    activation_checkpointing: Literal["none", "block"] = "none"
    # seconds to wait for other processes; must exceed the time to write a checkpoint
    timeout: Annotated[float, Interval(gt=0, le=1e6)] = 1800.0
    compile: bool = True  # use torch.compile (needs a C++ compiler on a CPU)
    deterministic: bool = False  # bit-identical runs on a GPU, too; slower
    log_interval: Count = 10  # steps between rows of metrics.jsonl


@dataclass(frozen=True)
class EvalConfig:
    """The validation during training."""

    interval: NonNegative = 1000  # steps between validations; 0 switches them off
    sequences: Count = 256  # validation sequences
    # random orders or masks per sequence
    draws: Annotated[int, Interval(ge=1, le=1000)] = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints of a run."""

    interval: Count = 1000  # steps between checkpoints; the last step is always saved
    keep: Count = 3  # newest checkpoints kept, besides the best one


@dataclass(frozen=True)
class WandbConfig:
    """The log on Weights & Biases."""

    # log to Weights & Biases, in the project that WANDB_PROJECT names, else aogpt
    mode: Literal["disabled", "online", "offline"] = "disabled"


@dataclass(frozen=True)
class StageConfig:
    """A stage of a schedule of orders (A3's curriculum), which applies from `step`
    on."""

    step: NonNegative = 0
    kind: OrderKind = "random"
    l2r_prob: Probability = 0.1  # of a mixture; that of [order] is not taken over
    # steps in a group (only with objective.kind = "groupwise"); that of [objective] is
    # not taken over
    group: Count = 1

    def __post_init__(self):
        validation.check_values(self, name="schedule.{}".format)

    def orders(self, first: OrderConfig) -> OrderConfig:
        """Return the orders of the stage. first: those of [order], whose other settings
        it takes over."""
        return replace(first, kind=self.kind, l2r_prob=self.l2r_prob)


@dataclass(frozen=True)
class Config:
    """The configuration of a run: a config file with all its tables."""

    name: FileName = "aogpt"  # the run's name; its folder is OUT/NAME
    out: str = "out"  # folder that holds the run folders
    seed: Seed = 0  # seed of the initial weights, the data shuffle and the orders
    model: ModelConfig = field(default_factory=ModelConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: tuple[StageConfig, ...] = ()  # [[schedule]]: stages of orders and groups
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def run_folder(self) -> Path:
        """Return the folder that holds the run: OUT/NAME."""
        return validation.expand_home(self.out) / self.name

    def micro_batch_size(self, world_size: int) -> int:
        """Return the number of sequences in a forward pass of each of `world_size`
        processes: train.micro_batch_size, or the largest number below it that divides
        the process's share of the batch. Raises UserError if processes cannot have
        equal shares."""
        share, rest = divmod(self.train.batch_size, world_size)
        if rest > 0:
            raise UserError(
                f"train.batch_size ({self.train.batch_size}) must be a multiple of the "
                f"{world_size} processes"
            )
        size = min(share, self.train.micro_batch_size)
        while share % size > 0:
            size -= 1
        return size

    def with_steps(self, steps: int) -> "Config":
        """Return the configuration of a run of this length."""
        # train.minutes stays, as a resume reads the pace from config.toml.
        return replace(self, train=replace(self.train, steps=steps, epochs=0.0))

    def steps_of_epochs(self, num_blocks: int) -> int:
        """Return the steps of train.epochs, passes over `num_blocks` blocks."""
        sequences = self.train.epochs * num_blocks
        return max(1, math.ceil(sequences / self.train.batch_size))

    def with_short_warmup(self) -> "Config":
        """Return the configuration with a tenth of the steps as its warm-up, if that is
        longer than the run."""
        steps = self.train.steps
        if self.optim.warmup_steps <= steps:
            return self
        return replace(self, optim=replace(self.optim, warmup_steps=steps // 10))

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the precision of matrix products on a device: train.dtype."""
        return pick_dtype(self.train.dtype, device, self.model.n_embd)

    def all_orders(self) -> list[OrderConfig]:
        """Return the orders of [order] and those of each stage of the schedule."""
        return [self.order, *(stage.orders(self.order) for stage in self.schedule)]

    def stage(self, step: int) -> tuple[OrderConfig, int]:
        """Return the orders at a step (from 0), and the steps of an order that are
        predicted at once: 1 unless the objective is in groups."""
        orders = self.order
        group = self.objective.group
        started = [stage for stage in self.schedule if stage.step <= step]
        if started:
            last = started[-1]
            orders = last.orders(self.order)
            group = last.group
        if not self.objective.definition.in_groups:
            group = 1
        return orders, group

    def last_stage(self) -> tuple[OrderConfig, int]:
        """Return the orders of the last step of the run, and its steps at once."""
        return self.stage(self.train.steps - 1)

    def __post_init__(self):
        validation.check_values(self, name=str)
        for table in ("data", "optim", "train", "eval", "checkpoint", "wandb"):
            validation.check_values(getattr(self, table), name=f"{table}.{{}}".format)
        check_config(self.model)
        check_objective(self.objective, self.model)
        check_orders(self)


def check_objective(objective: ObjectiveConfig, m: ModelConfig) -> None:
    """Raise UserError if the objective is not one of this model's."""
    kind = objective.kind
    fitting = [
        name
        for name, definition in OBJECTIVES.items()
        if definition.for_encoders == m.is_encoder
    ]
    if kind not in fitting:
        raise UserError(
            f"objective.kind = {kind!r} does not fit model.attention = "
            f"{m.attention!r}; give one of {fitting}"
        )
    if objective.definition.of_scores != m.noise:
        raise UserError(
            "objective.kind = 'score_entropy' and model.noise = true belong together"
        )
    has_groups = system_of(m).query_stream and m.group_attention
    if objective.definition.in_groups and not has_groups:
        raise UserError(
            f"objective.kind = {kind!r} needs model.target = 'two_stream' and "
            "model.group_attention = true"
        )


def check_orders(config: Config) -> None:
    """Raise UserError if the orders, or those of a stage, are not for this model."""
    m = config.model
    objective = config.objective.kind
    if config.data.end == "given" and m.l2r_only:
        raise UserError(
            "data.end = 'given' is for any-order models: a plain GPT (model.target = "
            "'none') cannot see the end before the text; set it to 'predicted'"
        )
    steps = [stage.step for stage in config.schedule]
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise UserError(
            "schedule: steps must rise from one [[schedule]] table to the next"
        )
    if m.is_encoder:
        if bool(config.schedule) or not config.order.is_any_order:
            raise UserError(
                "an encoder has no order: set order.kind to 'random', no [[schedule]]"
            )
        return
    for orders in config.all_orders():  # this checks the settings of the stages
        orders.check_blocks(m.block_size, "model.block_size")
        if m.l2r_only and not orders.is_l2r:
            raise UserError(
                f"order.kind = {orders.kind!r} needs target positions: set "
                "model.target to 'adaln', or order.kind to 'l2r'"
            )
        if objective == "ar" and orders.kind != "l2r":
            raise UserError(
                f"objective.kind = 'ar' needs order.kind = 'l2r', but it is "
                f"{orders.kind!r}"
            )


def load_toml(path: str | Path) -> Config:
    """Read a config file; missing keys have their defaults. Raises UserError and
    OSError."""
    values = validation.read_toml(Path(path))
    train = values.get("train")
    if isinstance(train, dict) and train.get("epochs"):
        for key in ("steps", "minutes"):
            if train.get(key):
                raise UserError(
                    f"{path} has train.{key} and train.epochs: leave one of them out"
                )
    return from_dict(values, str(path))


def from_dict(values: dict, source: str) -> Config:
    """Return the configuration of a checkpoint; source: its path, for errors."""
    values = without_removed_keys(values)
    return validation.from_values(values, Config, source, advice_on(values))


def from_command_line(arguments: list[str], description: str) -> Config:
    """Return the configuration of `CONFIG.toml [--table.key value ...]`. Raises
    UserError for an option that does not exist and for values that do not go together;
    a value of another type ends in tyro's message."""
    import tyro

    for name in NOT_OPTIONS:
        hint = ModelConfig.__annotations__[name]
        ModelConfig.__annotations__[name] = Annotated[hint, tyro.conf.Suppress]
    if arguments and not arguments[0].startswith("-"):
        path = arguments[0]
        words = arguments[1:]
        default = load_toml(path)
    elif "--help" in arguments or "-h" in arguments:
        path = "CONFIG.toml"
        words = arguments
        default = Config()
    else:
        raise UserError(
            "give a config file first, e.g. python train.py configs/quickstart.toml"
        )
    given = given_in(words)
    lengths = [key for key in ("steps", "epochs", "minutes") if f"train.{key}" in given]
    if len(lengths) > 1:
        options = " and ".join(f"--train.{key}" for key in lengths)
        raise UserError(f"give one of {options}, not both")
    if lengths:
        for key in {"epochs", "minutes"} - set(lengths):
            words.append(f"--train.{key}=0")
    # A function with these defaults: tyro would show a mistake in a class in a box.
    configured = functools.partial(Config, **vars(default))
    config = tyro.cli(
        configured,
        args=words,
        prog=f"python train.py {path}",
        # indented, as tyro joins lines that begin with a letter
        description=textwrap.indent(description or "", " "),
    )
    if not config.train.init_from:
        return config
    for key in validation.read_toml(Path(path)).get("model", {}):
        given.add(f"model.{key}")
    return with_source(config, given)


def with_source(config: Config, given: set[str]) -> Config:
    """Take the model keys that are not given from the source, train.init_from; for a
    run that has a checkpoint from its config.toml, since the source may be gone."""
    begun = config.run_folder / "config.toml"
    if begun.is_file() and store.find(config.run_folder):
        source = load_toml(begun).model
    else:
        source = config_of(config.train.init_from)
    given_keys = {key.removeprefix("model.") for key in given}
    return replace(config, model=with_shape_of(source, config.model, given_keys))


def given_in(words: list[str]) -> set[str]:
    """Return the dotted keys that the options of a command line set."""
    given = set()
    for word in words:
        if word.startswith("--"):
            key = word[2:].partition("=")[0].replace("-", "_")
            given.add(key)
            given.add(key.replace(".no_", "."))  # --train.no-compile
    return given


def to_toml(config: Config) -> str:
    """Return a TOML document that `load_toml` reads back to an equal Config."""
    values = asdict(config)
    # TOML has no None: such a key is left out.
    model = values["model"]
    values["model"] = {key: value for key, value in model.items() if value is not None}
    return tomli_w.dumps(values)


def differences(old: Config, new: Config) -> dict[str, tuple]:
    """Return {dotted key: (old value, new value)} of the values that differ."""
    before = dotted(old)
    after = dotted(new)
    return {
        key: (before[key], value)
        for key, value in after.items()
        if before[key] != value
    }


def dotted(config: Config) -> dict[str, Any]:
    """Return {dotted key: value}, such as optim.lr."""
    values = {}
    for key, value in asdict(config).items():
        if not isinstance(value, dict):
            values[key] = value
            continue
        for inner, inner_value in value.items():
            values[f"{key}.{inner}"] = inner_value
    return values
