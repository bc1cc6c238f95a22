"""Configuration: nested dataclasses, filled from a TOML file, overridden on the command line.

    python train.py configs/aogpt_small.toml --optim.lr 3e-4 --train.steps 100000

A key that does not exist, a value of the wrong type or an impossible combination is a ValueError that names the key,
the file and the nearest valid name. Nothing in a config file is ever executed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from model import ModelConfig
from objectives import DECODER_OBJECTIVES, ObjectiveConfig
from orders import OrderConfig, OrderKind


@dataclass(frozen=True)
class DataConfig:
    folder: str = "data/openwebtext"
    """Folder that data/prepare.py wrote."""
    verify: bool = False
    """Check the sha256 of the token files before training."""
    random_length_prob: float = 0.0
    """Share of the steps whose whole batch is cut to a random length, so that the model also learns sequences shorter
    than block_size (LLaDA: 0.01). Uniform in 1 to block_size, rounded up to an eighth of it: at most 8 shapes."""

    def __post_init__(self):
        if not 0.0 <= self.random_length_prob <= 1.0:
            raise ValueError(
                f"data.random_length_prob is a probability, but it is {self.random_length_prob}; give a number "
                "from 0 to 1"
            )


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """The cosine ends at lr * min_lr_ratio."""
    warmup_steps: int = 2000
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05
    """On matrices only: not on biases, norm weights and the start vector."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    ema_decay: float = 0.9999
    """Decay of the averaged weights, warmed up as min(ema_decay, (1 + t) / (10 + t))."""
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of attention and MLP, AdamW with lr and the betas for all other weights. Unlike AdamW
    alone it waits for the device in every step, to learn whether the gradients are finite."""
    muon_lr: float = 6e-4
    """Muon's peak learning rate, on lr's schedule. Its updates are scaled to the size of AdamW's: start from AdamW's
    rate."""
    muon_momentum: float = 0.95

    def __post_init__(self):
        for name, low, high in (
            ("min_lr_ratio", 0, 1),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
            ("ema_decay", 0, 1),
            ("lr", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("grad_clip", 0, math.inf),
            ("warmup_steps", 0, math.inf),
            ("muon_lr", 0, math.inf),
            ("muon_momentum", 0, 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high or value == math.inf and name != "grad_clip":
                bound = "or more" if high == math.inf else f"to {high}"
                raise ValueError(
                    f"optim.{name} is {value}; give a finite number from {low} {bound}"
                )
        if 1 in (self.beta1, self.beta2, self.muon_momentum):
            raise ValueError("optim.beta1, optim.beta2 and optim.muon_momentum must be below 1")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 500_000
    """Optimizer steps of the whole run."""
    batch_size: int = 512
    """Sequences in one optimizer step, over all processes."""
    micro_batch_size: int = 16
    """Sequences in one forward pass of one process."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix work; auto: bfloat16 on a GPU that has it, float32 elsewhere. Weights stay float32."""
    device: str = "auto"
    init_from: str = ""
    """Start from the weights of this run, export or released checkpoint. GPT-2's become an adaLN decoder that computes
    exactly what GPT-2 does until it is trained."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes. ddp: each holds everything and has its share of the batch. fsdp: weights, averaged weights
    and optimizer are cut among them, too, and so are checkpoints."""
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    """What the backward pass computes again instead of keeping it. block: every block from its input; selective: all of
    a block but its matrix products and its attention."""
    reduce_every_micro_batch: bool = False
    """Exchange gradients after every micro-batch instead of once a step: more communication, but under fsdp no process
    ever holds the gradients of all weights."""
    timeout: float = 1800.0
    """Seconds that a process waits for the others until it ends with an error (when they start, at least 300); longer
    than writing a checkpoint."""
    compile: bool = True
    """Compile the model with torch.compile (needs a C++ compiler on a CPU)."""
    log_interval: int = 10
    """Steps between lines of metrics.jsonl."""
    max_skipped_steps: int = 10
    """Stop after this many steps in a row with a non-finite loss or gradient."""

    def __post_init__(self):
        for name in (
            "steps",
            "batch_size",
            "micro_batch_size",
            "log_interval",
            "max_skipped_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"train.timeout is {self.timeout}; give a number of seconds above 0")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"train.batch_size ({self.batch_size}) must be a multiple of "
                f"train.micro_batch_size ({self.micro_batch_size})"
            )


@dataclass(frozen=True)
class EvalConfig:
    interval: int = 1000
    """Steps between evaluations on the validation split; 0 switches them off."""
    sequences: int = 256
    """Sequences scored, left-to-right and in one random order each."""

    def __post_init__(self):
        if self.interval < 0 or self.sequences < 1:
            raise ValueError(
                "eval.interval must not be negative and eval.sequences must be at least 1"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    interval: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints kept, besides the best one."""

    def __post_init__(self):
        if self.interval < 1 or self.keep < 1:
            raise ValueError("checkpoint.interval and checkpoint.keep must be at least 1")


@dataclass(frozen=True)
class WandbConfig:
    mode: Literal["disabled", "online", "offline"] = "disabled"
    project: str = "aogpt"


@dataclass(frozen=True)
class StageConfig:
    """One stage of an order schedule (A3's curriculum): from `step` on, these orders and groups."""

    step: int = 0
    kind: OrderKind = "random"
    l2r_prob: float = 0.1
    group: int = 1
    """Steps in a group (objective.kind = "groupwise" only)."""

    def __post_init__(self):
        OrderConfig(self.kind, self.l2r_prob)  # refuses what is no order distribution
        if self.step < 0 or self.group < 1:
            raise ValueError(
                "schedule: a stage's step must not be negative and its group must be at least 1"
            )


@dataclass(frozen=True)
class Config:
    name: str = "aogpt"
    """The run's name; its folder is OUT/NAME."""
    out: str = "out"
    """Folder that holds the run folders."""
    seed: int = 0
    """Of the weights, the data shuffle and the orders."""
    model: ModelConfig = field(default_factory=ModelConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: tuple[StageConfig, ...] = ()
    """Stages that replace order.kind, order.l2r_prob and objective.group as training goes on: [[schedule]] tables."""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def run_folder(self) -> Path:
        return Path(self.out) / self.name

    def __post_init__(self):
        if self.name in ("", ".", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name is {self.name!r}; give a plain folder name without a path")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; give an integer from 0 to 2**63 - 1")
        if self.optim.warmup_steps > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps ({self.optim.warmup_steps}) exceeds train.steps ({self.train.steps}): the "
                "learning rate would never reach its peak; lower the first or raise the second"
            )
        self._check_objective()
        if [stage.step for stage in self.schedule] != sorted(
            {stage.step for stage in self.schedule}
        ):
            raise ValueError(
                "schedule: the steps of the stages must rise from one [[schedule]] table to the next"
            )
        blockwise = any(stage.kind == "fixed_blockwise" for stage in (self.order, *self.schedule))
        if blockwise and self.order.block > self.model.block_size:
            raise ValueError(
                f"order.block ({self.order.block}) exceeds model.block_size ({self.model.block_size}); lower it"
            )

    def _check_objective(self) -> None:
        """Raise ValueError where architecture, objective and orders do not go together."""
        kind, model = self.objective.kind, self.model
        if (kind in DECODER_OBJECTIVES) != (model.attention == "causal"):
            role = "an encoder (model.attention = 'full')" if model.is_encoder else "a decoder"
            fit = (
                "lambda_dce, k_dce, t_dce or score_entropy"
                if model.is_encoder
                else "ar, ao_ar or groupwise"
            )
            raise ValueError(
                f"objective.kind = {kind!r} does not fit {role}; set objective.kind to {fit}"
            )
        if (kind == "score_entropy") != model.noise:
            raise ValueError(
                "objective.kind = 'score_entropy' and model.noise = true belong together"
            )
        if kind == "groupwise" and model.target != "two_stream":
            raise ValueError("objective.kind = 'groupwise' needs model.target = 'two_stream'")
        if model.is_encoder and (self.schedule or self.order.kind not in ("random", "mixture")):
            raise ValueError(
                "an encoder predicts in no order: set order.kind to 'random' and leave out [[schedule]]"
            )
        for stage in (self.order, *self.schedule):
            random = stage.kind == "random" or stage.kind == "mixture" and stage.l2r_prob < 1
            if model.attention == "causal" and model.target == "none" and random:
                raise ValueError(
                    f"order.kind = {stage.kind!r} needs a model that is told its target position, but model.target is "
                    "'none'; set model.target to 'adaln' or 'input', or order.kind to 'l2r'"
                )
            if kind == "ar" and stage.kind != "l2r":
                raise ValueError(
                    f"objective.kind = 'ar' needs order.kind = 'l2r', but it is {stage.kind!r}"
                )

    def stage(self, step: int) -> tuple[OrderConfig, int]:
        """Orders and group size in force at a step."""
        current = [stage for stage in self.schedule if stage.step <= step]
        if not current:
            return self.order, self.objective.group
        last = current[-1]
        return dataclasses.replace(self.order, kind=last.kind, l2r_prob=last.l2r_prob), last.group


# ---- TOML ------------------------------------------------------------------------------------------------------------


def load_toml(path: str | Path) -> Config:
    """Read a config file; keys it leaves out take their defaults."""
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        folder = Path(path).parent
        found = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
        nearest = difflib.get_close_matches(Path(path).name, found, n=1)
        hint = f"; did you mean {folder / nearest[0]}?" if nearest else ""
        raise ValueError(f"there is no config file {path}{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    except IsADirectoryError:
        raise ValueError(
            f"{path} is a folder; give the .toml file, e.g. {Path(path) / 'config.toml'}"
        ) from None
    return from_dict(values, str(path))


def from_dict(values: dict, source: str) -> Config:
    """Build a Config from nested plain values; `source` is what error messages call it."""
    try:
        return _build(Config, values, source, "")
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith(source) else f"{source}: {message}"
        ) from None


def _build(cls, values: dict, source: str, prefix: str):
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        name = prefix + key
        if key not in hints:
            raise ValueError(f"{source}: unknown key {name!r}{_nearest(key, prefix)}")
        if key == "schedule":
            arguments[key] = _build_schedule(value, source)
        elif dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ValueError(
                    f"{source}: {name!r} is a table; write [{name}] and its keys below it"
                )
            arguments[key] = _build(hints[key], value, source, name + ".")
        else:
            arguments[key] = _typed(value, hints[key], source, name)
    return cls(**arguments)


def _build_schedule(value, source: str) -> tuple[StageConfig, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(stage, dict) for stage in value):
        raise ValueError(
            f"{source}: schedule must be a list of tables; write [[schedule]] and its keys below it"
        )
    return tuple(_build(StageConfig, stage, source, "schedule.") for stage in value)


def _typed(value, hint, source: str, name: str):
    if typing.get_origin(hint) is Literal:
        options = typing.get_args(hint)
        if value in options:
            return value
        near = difflib.get_close_matches(str(value), [str(o) for o in options], n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{source}: {name} is {value!r}, but it must be one of {', '.join(map(repr, options))}{guess}"
        )
    if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint):
        if value is None:
            return None
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
        raise ValueError(f"{source}: {name} is {value!r}, but it must be {words[hint]}")
    return value


def valid_keys() -> list[str]:
    """Every dotted key of a config file, those of [[schedule]] left out."""
    keys = []
    for name, hint in typing.get_type_hints(Config).items():
        inner = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else None
        keys += [name] if inner is None else [f"{name}.{key}" for key in inner]
    keys.remove("schedule")
    return keys


def _nearest(key: str, prefix: str) -> str:
    keys = valid_keys() + [f"schedule.{f.name}" for f in dataclasses.fields(StageConfig)]
    elsewhere = [k for k in keys if k.rsplit(".", 1)[-1] == key]
    here = [k for k in keys if k.startswith(prefix)] if prefix else [k.split(".")[0] for k in keys]
    near = (
        elsewhere
        or difflib.get_close_matches(prefix + key, here, n=1)
        or difflib.get_close_matches(key, keys, n=1)
    )
    return (
        f"; did you mean {near[0]!r}?"
        if near
        else f"; the keys are {', '.join(dict.fromkeys(here))}"
    )


def to_dict(config: Config) -> dict:
    return dataclasses.asdict(config)


def to_toml(config: Config) -> str:
    """The whole configuration as a TOML document that `load_toml` reads back to an equal Config."""
    values = to_dict(config)
    stages = values.pop("schedule")
    lines = [
        f"{key} = {_toml_value(value)}"
        for key, value in values.items()
        if not isinstance(value, dict)
    ]
    tables = [(f"[{name}]", inner) for name, inner in values.items() if isinstance(inner, dict)]
    for title, inner in tables + [("[[schedule]]", stage) for stage in stages]:
        lines += ["", title]
        lines += [
            f"{key} = {_toml_value(value)}" for key, value in inner.items() if value is not None
        ]
    return "\n".join(lines) + "\n"


def _toml_value(value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # TOML's strings, integers, floats and booleans are JSON's, but for surrogate pairs and the bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(old: Config, new: Config) -> dict[str, tuple]:
    """Dotted keys whose values differ: {key: (old value, new value)}."""

    def flat(values: dict, prefix: str = "") -> dict:
        result = {}
        for key, value in values.items():
            result |= (
                flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
            )
        return result

    before, after = flat(to_dict(old)), flat(to_dict(new))
    return {key: (before[key], after[key]) for key in after if before[key] != after[key]}


def from_command_line(arguments: list[str], description: str) -> Config:
    """`CONFIG.toml [--table.key value ...]` -> Config. Exits with status 2 and tyro's message for an unknown option."""
    import tyro

    if arguments and not arguments[0].startswith("-"):
        path, overrides = arguments[0], arguments[1:]
        default = load_toml(path)
    elif "--help" in arguments or "-h" in arguments:
        path, overrides, default = "CONFIG.toml", arguments, Config()
    else:
        raise ValueError("give a config file first, e.g. python train.py configs/quickstart.toml")
    return tyro.cli(
        Config, default=default, args=overrides, prog=f"train.py {path}", description=description
    )
