"""Configuration: nested dataclasses, read from a TOML file, overridden on the command line.

Types give the range of each value, `Config` checks combinations, and `train.py --help` shows the
comments on fields."""

import itertools
import math
import re
import shlex
import textwrap
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import tomli_w
import torch
from annotated_types import Ge, Interval

from ..checkpoints.load import config_of
from ..model import ModelConfig
from ..objectives import DECODER_OBJECTIVES, Kind, ObjectiveConfig
from ..orders import OrderConfig, OrderKind
from ..runtime import validation
from ..runtime.devices import pick_dtype
from ..runtime.errors import UserError
from ..runtime.validation import (
    Amount,
    BelowOne,
    Count,
    NonNegative,
    Probability,
    Seed,
    Table,
)
from ..systems import check_config
from .warm_start import with_shape_of


@dataclass(frozen=True)
class DataConfig(Table):
    folder: str = "data/openwebtext"  # folder that data/prepare.py wrote
    # more data sets of the same tokenizer, as FOLDER=0.1 (share of the sequences); data.folder has
    # the rest and the validation split
    mix: tuple[str, ...] = ()
    verify: bool = False  # check the checksums of the token files before training
    # share of the steps with shorter sequences, so that the model learns these, too (LLaDA: 0.01);
    # their length in tokens is uniform in 1 to block_size, rounded up to an eighth of it
    random_length_prob: Probability = 0.0
    max_tokens: NonNegative = (
        0  # train on this many tokens, in blocks spread over the data; 0: all
    )


@dataclass(frozen=True)
class OptimConfig(Table):
    lr: Amount = 6e-4  # peak learning rate
    min_lr_ratio: Probability = 0.1  # the learning rate ends at lr * min_lr_ratio
    # decay after the warm-up; wsd: constant, then linear in the last decay_share of the steps
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_share: Probability = 0.2  # wsd: share of the steps that decay; 0: none
    warmup_steps: NonNegative = 2000  # steps of linear warm-up
    decay_steps: NonNegative = 0  # step at which the decay ends; 0: the last of the run
    beta1: BelowOne = 0.9  # AdamW: decay of the average gradient
    beta2: BelowOne = 0.95  # AdamW: decay of the average squared gradient
    weight_decay: Amount = 0.05  # on matrices only
    grad_clip: Annotated[float, Ge(0)] = (
        1.0  # largest gradient norm; 0 switches clipping off
    )
    ema_decay: Probability = (
        0.9999  # of the averaged weights; at step t at most (1 + t) / (10 + t)
    )
    # decays of more averages, which are validated and logged, too
    more_ema_decays: tuple[Probability, ...] = ()
    kind: Literal["adamw", "muon"] = (
        "adamw"  # muon: Muon for matrices of blocks, else AdamW
    )
    muon_lr: Amount = 0.02  # Muon's peak learning rate; not comparable with lr
    muon_momentum: BelowOne = 0.95  # Muon: decay of the average gradient


@dataclass(frozen=True)
class TrainConfig(Table):
    steps: Count = 500_000  # optimizer steps of the whole run
    epochs: Amount = 0.0  # passes over the data, instead of steps
    batch_size: Count = 512  # sequences in one optimizer step, over all processes
    # sequences in one forward pass of one process; lowered to a divisor of its share of the batch
    micro_batch_size: Count = 16
    # precision of matrix products; auto: bfloat16 on a CUDA GPU that has it, and on a CPU
    # that has it for models of width 512 and more; else float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = (
        "auto"  # auto (a GPU if there is one), cpu, cuda or another of PyTorch's
    )
    # start from the weights of this run, export or pretrained model, and take from it the keys of
    # [model] that are not set
    init_from: str = ""
    # train adapters (LoRA) of this rank alone, on matrices of init_from, which stay as they are;
    # 0: all weights
    lora_rank: NonNegative = 0
    # with several processes: ddp: each holds the whole state; fsdp: weights, averages, optimizer
    # state and checkpoints are sharded
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # less memory, more time: block: the backward pass recomputes every block; selective: all of a
    # block except matrix products and attention
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    # exchange gradients after every micro-batch, not once a step: more traffic, but with fsdp less
    # memory, as gradients stay sharded
    reduce_every_micro_batch: bool = False
    # seconds to wait for other processes; must exceed the time to write a checkpoint
    timeout: Annotated[float, Interval(gt=0, le=1e6)] = 1800.0
    compile: bool = True  # use torch.compile (needs a C++ compiler on a CPU)
    # max-autotune-no-cudagraphs: try more ways to multiply matrices; minutes at the start
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    # on a GPU: norm, shift and scale of adaLN as one kernel; not measured yet
    fused_norm: bool = False
    flash3: bool = False  # on a GPU: FlashAttention 3, where its wheel is installed
    deterministic: bool = False  # bit-identical runs on a GPU, too; slower
    log_interval: Count = 10  # steps between rows of metrics.jsonl
    max_skipped_steps: Count = 10  # stop after this many non-finite steps in a row


@dataclass(frozen=True)
class EvalConfig(Table):
    interval: NonNegative = 1000  # steps between validations; 0 switches them off
    sequences: Count = 256  # validation sequences
    draws: Annotated[int, Interval(ge=1, le=1000)] = (
        1  # random orders or masks per sequence
    )


@dataclass(frozen=True)
class CheckpointConfig(Table):
    interval: Count = 1000  # steps between checkpoints; the last step is always saved
    minutes: Amount = (
        0.0  # also save this many minutes after the last; 0: only by steps
    )
    keep: Count = 3  # newest checkpoints kept, besides the best one


@dataclass(frozen=True)
class WandbConfig(Table):
    mode: Literal["disabled", "online", "offline"] = (
        "disabled"  # log to Weights & Biases
    )
    project: str = "aogpt"


@dataclass(frozen=True)
class StageConfig(Table):
    """A stage of a schedule of orders (A3's curriculum), which applies from `step` on."""

    step: NonNegative = 0
    kind: OrderKind = "random"
    l2r_prob: Probability = 0.1
    group: Count = 1  # steps in a group (only with objective.kind = "groupwise")

    def __post_init__(self):
        validation.check_values(self, name="schedule.{}".format)


@dataclass(frozen=True)
class Config(Table):
    name: str = "aogpt"  # the run's name; its folder is OUT/NAME
    out: str = "out"  # folder that holds the run folders
    seed: Seed = 0  # seed of the initial weights, the data shuffle and the orders
    model: ModelConfig = field(default_factory=ModelConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: tuple[
        StageConfig, ...
    ] = ()  # [[schedule]] tables: stages of orders and groups
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def run_folder(self) -> Path:
        return validation.expand_home(self.out) / self.name

    def micro_batch_size(self, world_size: int) -> int:
        """Sequences in a forward pass of each of `world_size` processes: train.micro_batch_size, or
        the largest number below it that divides the process's share of the batch. Raises UserError
        if processes cannot have equal shares."""
        share, rest = divmod(self.train.batch_size, world_size)
        uneven = f"train.batch_size ({self.train.batch_size}) must be a multiple of the"
        refuse(rest, f"{uneven} {world_size} processes")
        most = min(share, self.train.micro_batch_size)
        return max(n for n in range(1, most + 1) if share % n == 0)

    def with_steps(self, num_blocks: int) -> "Config":
        """The configuration with train.epochs, passes over `num_blocks` blocks, as train.steps."""
        t = self.train
        steps = (
            max(1, math.ceil(t.epochs * num_blocks / t.batch_size))
            if t.epochs
            else t.steps
        )
        return replace(self, train=replace(t, steps=steps, epochs=0.0))

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the precision of matrix products on a device: train.dtype."""
        return pick_dtype(self.train.dtype, device, self.model.n_embd)

    def stage(self, step: int) -> tuple[OrderConfig, int]:
        """Orders and group size at a step (from 0)."""
        started = [stage for stage in self.schedule if stage.step <= step]
        if not started:
            return self.order, self.objective.group
        last = started[-1]
        return replace(self.order, kind=last.kind, l2r_prob=last.l2r_prob), last.group

    def __post_init__(self):
        validation.check_values(self, name=str)
        for table in ("data", "optim", "train", "eval", "checkpoint", "wandb"):
            validation.check_values(getattr(self, table), name=f"{table}.{{}}".format)
        check_config(self.model)
        o = self.optim
        t = self.train
        steps = [stage.step for stage in self.schedule]
        is_path = self.name in ("", ".", "..") or Path(self.name).name != self.name
        refuse(is_path, f"name is {self.name!r}; give a folder name without a path")
        late = f"optim.warmup_steps ({o.warmup_steps}) exceeds train.steps ({t.steps}); lower it"
        refuse(o.warmup_steps > t.steps, late)
        early = (
            f"optim.decay_steps ({o.decay_steps}) is below optim.warmup_steps; raise it"
        )
        refuse(0 < o.decay_steps < o.warmup_steps, early)
        names = [
            f"{decay:g}" for decay in (o.ema_decay, *o.more_ema_decays)
        ]  # of tensors
        twice = "optim.ema_decay and optim.more_ema_decays must differ in their first six digits"
        refuse(len(set(names)) < len(names), twice)
        falling = any(after <= before for before, after in itertools.pairwise(steps))
        refuse(
            falling, "schedule: steps must rise from one [[schedule]] table to the next"
        )

        kind = self.objective.kind
        m = self.model
        if t.lora_rank:
            refuse(not t.init_from, "train.lora_rank needs a base: set train.init_from")
            refuse(
                t.parallel == "fsdp",
                "train.lora_rank trains little: set train.parallel to 'ddp'",
            )
            refuse(
                o.kind == "muon",
                "train.lora_rank needs optim.kind = 'adamw', as its matrices are thin",
            )
        fitting = [
            k for k in get_args(Kind) if m.is_encoder != (k in DECODER_OBJECTIVES)
        ]
        system = (
            "an encoder (model.attention = 'full')" if m.is_encoder else "a decoder"
        )
        unfit = (
            f"objective.kind = {kind!r} does not fit {system}; give one of {fitting}"
        )
        refuse(kind not in fitting, unfit)
        apart = (
            "objective.kind = 'score_entropy' and model.noise = true belong together"
        )
        refuse((kind == "score_entropy") != m.noise, apart)
        groups = m.target == "two_stream" and m.group_attention
        needs = "needs model.target = 'two_stream' and model.group_attention = true"
        refuse(
            kind == "groupwise" and not groups, f"objective.kind = 'groupwise' {needs}"
        )

        ordered = bool(self.schedule) or self.order.kind not in ("random", "mixture")
        none = "an encoder has no order: set order.kind to 'random', no [[schedule]]"
        refuse(m.is_encoder and ordered, none)
        for stage in (self.order, *self.schedule) if not m.is_encoder else ():
            # This checks its settings.
            orders = replace(self.order, kind=stage.kind, l2r_prob=stage.l2r_prob)
            orders.check_length(m.block_size)
            refuse(
                m.l2r_only and not orders.is_fixed,
                f"order.kind = {stage.kind!r} needs target positions: set model.target to "
                "'adaln', or order.kind to 'l2r'",
            )
            refuse(
                kind == "ar" and stage.kind != "l2r",
                "objective.kind = 'ar' needs order.kind = 'l2r', but it is "
                f"{stage.kind!r}",
            )


def refuse(wrong: object, message: str) -> None:
    if wrong:
        raise UserError(message)


def load_toml(path: str | Path) -> Config:
    """Read a config file; missing keys have their defaults. Raises UserError and OSError."""
    is_pretrained = (Path(path) / "config.json").is_file()
    if is_pretrained and (Path(path) / "tokenizer.json").is_file():
        raise UserError(
            f"{path} is a pretrained model, not a config file; to start from it: python "
            f"train.py configs/smollm2.toml --train.init-from {shlex.quote(str(path))} "
            "--data.folder DATA"
        )
    values = validation.read_toml(Path(path))
    train = values.get("train")
    both = isinstance(train, dict) and "steps" in train and train.get("epochs")
    refuse(both, f"{path} has train.steps and train.epochs: leave one of them out")
    return validation.from_values(values, Config, str(path))


def from_dict(values: dict, source: str) -> Config:
    return validation.from_values(values, Config, source)


def from_command_line(arguments: list[str], description: str) -> Config:
    """`CONFIG.toml [--table.key value ...]` -> Config. Raises UserError for an option that does not
    exist; a wrong value ends in tyro's message."""
    import tyro

    if arguments and not arguments[0].startswith("-"):
        (path, *overrides), default = arguments, load_toml(arguments[0])
    elif "--help" in arguments or "-h" in arguments:
        path = "CONFIG.toml"
        overrides = arguments
        default = Config()
    else:
        raise UserError(
            "give a config file first, e.g. python train.py configs/quickstart.toml"
        )
    overrides, given = check_options(overrides)
    both = {"train.steps", "train.epochs"} <= given
    refuse(both, "give one of --train.steps and --train.epochs, not both")
    overrides += ["--train.epochs=0"] * ("train.steps" in given)
    # indented, as tyro joins lines that begin with a letter
    names = {
        "prog": f"train.py {path}",
        "description": textwrap.indent(description, " "),
    }
    config = tyro.cli(Config, default=default, args=overrides, **names)
    given |= {
        f"model.{key}" for key in validation.read_toml(Path(path)).get("model", {})
    }
    return with_source(config, given) if config.train.init_from else config


def with_source(config: Config, given: set[str]) -> Config:
    """Take the model keys that are not given from the source, train.init_from; for a run that has
    begun from its config.toml, since the source may be gone."""
    own = config.run_folder / "config.toml"
    source = (
        load_toml(own).model if own.is_file() else config_of(config.train.init_from)
    )
    given = {key.removeprefix("model.") for key in given}
    return replace(config, model=with_shape_of(source, config.model, given))


def check_options(words: list[str]) -> tuple[list[str], set[str]]:
    """The words of a command line, in which 1e3 is written out for integer keys, and the keys that
    they set. Raises UserError for a key that does not exist."""
    keys = validation.keys_of(Config)
    given = set()
    result = []
    whole = False
    for word in words:
        option, equals, value = (
            word.partition("=") if word.startswith("--") else ("", "", word)
        )
        if option not in ("", "--help"):
            key = re.sub(
                r"\.\d+(?=\.)", "", option[2:].replace("-", "_")
            )  # schedule.0.step
            key = (
                key if key in keys else re.sub(r"\bno_(?!.*\.)", "", key)
            )  # train.no_compile
            refuse(
                key not in keys,
                f"unknown option {option}{validation.nearest_key(key, Config, validation.flag)}",
            )
            whole = int in (keys[key], *get_args(keys[key]))
            given.add(key)
        if whole and re.fullmatch(r"[\d.]+[eE]\+?\d+", value):
            value = f"{validation.number(value)}"
        result.append(option + equals + value)
    return result, given


def to_toml(config: Config) -> str:
    """A TOML document that `load_toml` reads back to an equal Config."""
    values = asdict(config)
    model = values["model"].items()  # TOML has no None: such a key is left out
    return tomli_w.dumps(values | {"model": {k: v for k, v in model if v is not None}})


def differences(old: Config, new: Config) -> dict[str, tuple]:
    """{dotted key: (old value, new value)} of the values that differ."""
    before = asdict(old)
    after = asdict(new)
    pairs = {}
    for key, value in after.items():
        inner = isinstance(value, dict)
        pairs |= (
            {f"{key}.{k}": (before[key][k], v) for k, v in value.items()}
            if inner
            else {}
        )
        pairs |= {} if inner else {key: (before[key], value)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
