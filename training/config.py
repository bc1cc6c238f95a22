"""Configuration: nested dataclasses, filled from a TOML file, overridden on the command line.

    python train.py configs/aogpt_small.toml --optim.lr 3e-4 --train.steps 100000

A key that does not exist, a value of the wrong type or an impossible combination is a ValueError
that names the key, the file and the nearest valid name. Nothing in a config file is ever executed.

Every table of the file is a dataclass. Types say what a value may be (`Count`, `Literal[...]`),
`check_values` compares; only what several keys must be together is written out below.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from annotated_types import Ge, Interval

from model import ModelConfig
from objectives import DECODER_OBJECTIVES, ObjectiveConfig
from orders import FIXED, OrderConfig, OrderKind
from runtime.errors import UserError
from runtime.validation import (
    Amount,
    BelowOne,
    Count,
    NonNegative,
    Positive,
    Probability,
    Ratio,
    Seed,
    Table,
    check_values,
    from_values,
    read_toml,
)
from variants import check_config


class _Section(Table):
    """A table of the config that checks its own values under its own name: [eval] is EvalConfig."""

    def __post_init__(self):
        table = type(self).__name__.removesuffix("Config").lower()
        check_values(self, name=f"{table}.{{}}".format)


@dataclass(frozen=True)
class DataConfig(_Section):
    folder: str = "data/openwebtext"
    """Folder that data/prepare.py wrote."""
    verify: bool = False
    """Check the token files before training even if this machine has checked them before, and they
    have not changed since."""
    random_length_prob: Probability = 0.0
    """Share of the steps whose whole batch is cut to a random length, so that the model also learns
    sequences shorter than block_size (LLaDA: 0.01). Uniform in 1 to block_size, rounded up to an
    eighth of it: at most 8 shapes."""


@dataclass(frozen=True)
class OptimConfig(_Section):
    lr: Amount = 6e-4
    """Peak learning rate."""
    min_lr_ratio: Ratio = 0.1
    """The rate ends at lr * min_lr_ratio."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls after its warm-up."""
    warmup_steps: NonNegative = 2000
    decay_steps: NonNegative = 0
    """The step at which the rate has come down, and stays there; 0: the last of the run. Beyond the
    last: the run is the beginning of a longer one."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    weight_decay: Amount = 0.05
    """On matrices only: not on biases, norm weights and the start vector."""
    grad_clip: Annotated[float, Ge(0)] = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    ema_decay: Ratio = 0.9999
    """Decay of the averaged weights, warmed up as min(ema_decay, (1 + t) / (10 + t))."""
    more_ema_decays: tuple[Ratio, ...] = ()
    """Decays of further averages, e.g. [0.99, 0.999], each as large as the weights: their losses
    stand in metrics.jsonl beside those of ema_decay's, which alone is evaluated and sampled from
    after the run."""
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of attention and MLP, AdamW with lr and the betas for all other
    weights."""
    muon_lr: Amount = 0.02
    """Muon's peak learning rate, on lr's schedule. Its updates are orthogonal matrices, so it does
    not compare with AdamW's, and carries over from width to width."""
    muon_momentum: BelowOne = 0.95


@dataclass(frozen=True)
class TrainConfig(_Section):
    steps: Count = 500_000
    """Optimizer steps of the whole run."""
    batch_size: Count = 512
    """Sequences in one optimizer step, over all processes."""
    micro_batch_size: Count = 16
    """Sequences in one forward pass of one process."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix work; auto: bfloat16 on a GPU that has it, float32 elsewhere. Weights
    stay float32."""
    device: str = "auto"
    init_from: str = ""
    """Start from the weights of this run, export or released checkpoint. GPT-2's become an adaLN
    decoder that computes exactly what GPT-2 does until it is trained, or a two-stream one, whose
    query stream is new."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes. ddp: each holds everything and has its share of the batch. fsdp:
    weights, averaged weights and optimizer are cut among them, too, and so are checkpoints."""
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    """What the backward pass computes again instead of keeping it. block: every block from its
    input; selective: all of a block but its matrix products and its attention."""
    reduce_every_micro_batch: bool = False
    """Exchange gradients after every micro-batch instead of once a step: more communication, but
    under fsdp no process ever holds the gradients of all weights."""
    timeout: Positive = 1800.0
    """Seconds that a process waits for the others until it ends with an error (when they start, at
    least 300); longer than writing a checkpoint."""
    compile: bool = True
    """Compile the model with torch.compile (needs a C++ compiler on a CPU)."""
    deterministic: bool = False
    """The same bits in every run on a GPU, too, by slower operations; PyTorch ends with an error
    that names one which has no such form. A CPU's are the same anyway."""
    log_interval: Count = 10
    """Steps between lines of metrics.jsonl."""
    max_skipped_steps: Count = 10
    """Stop after this many steps in a row with a non-finite loss or gradient."""

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size % self.micro_batch_size:
            raise UserError(
                f"train.batch_size ({self.batch_size}) must be a multiple of "
                f"train.micro_batch_size ({self.micro_batch_size})"
            )


@dataclass(frozen=True)
class EvalConfig(_Section):
    interval: NonNegative = 1000
    """Steps between evaluations on the validation split; 0 switches them off."""
    sequences: Count = 256
    """Sequences scored."""
    draws: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Random orders (of an encoder sets of masked positions) under which each is scored. From 2 on,
    metrics.jsonl has the error of their mean."""


@dataclass(frozen=True)
class CheckpointConfig(_Section):
    interval: Count = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: Count = 3
    """Newest checkpoints kept, besides the best one."""


@dataclass(frozen=True)
class WandbConfig(_Section):
    mode: Literal["disabled", "online", "offline"] = "disabled"
    project: str = "aogpt"


@dataclass(frozen=True)
class StageConfig(Table):
    """One stage of an order schedule (A3's curriculum): from `step` on, these orders and groups."""

    step: NonNegative = 0
    kind: OrderKind = "random"
    l2r_prob: Probability = 0.1
    group: Count = 1
    """Steps in a group (objective.kind = "groupwise" only)."""

    def __post_init__(self):
        check_values(self, name="schedule.{}".format)


@dataclass(frozen=True)
class Config(Table):
    """Everything that decides what a run computes, and where it is kept."""

    name: str = "aogpt"
    """The run's name; its folder is OUT/NAME."""
    out: str = "out"
    """Folder that holds the run folders."""
    seed: Seed = 0
    """Of the weights, the data shuffle and the orders."""
    model: ModelConfig = field(default_factory=ModelConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    schedule: tuple[StageConfig, ...] = ()
    """Stages that replace order.kind, order.l2r_prob and objective.group as training goes on:
    [[schedule]] tables."""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def run_folder(self) -> Path:
        return Path(self.out) / self.name

    def stage(self, step: int) -> tuple[OrderConfig, int]:
        """Orders and group size in force at a step: those of the last stage that has begun."""
        begun = [stage for stage in self.schedule if stage.step <= step]
        if not begun:
            return self.order, self.objective.group
        last = begun[-1]
        return dataclasses.replace(self.order, kind=last.kind, l2r_prob=last.l2r_prob), last.group

    def __post_init__(self):
        check_values(self, name=str)
        check_config(self.model)
        if self.name in ("", ".", "..") or Path(self.name).name != self.name:
            raise UserError(f"name is {self.name!r}; give a plain folder name without a path")
        if self.optim.warmup_steps > self.train.steps:
            raise UserError(
                f"optim.warmup_steps ({self.optim.warmup_steps}) exceeds train.steps "
                f"({self.train.steps}): the learning rate would never reach its peak; lower the "
                "first or raise the second"
            )
        if 0 < self.optim.decay_steps < self.optim.warmup_steps:
            raise UserError(
                f"optim.decay_steps ({self.optim.decay_steps}) is before the end of the warm-up; "
                f"give at least optim.warmup_steps ({self.optim.warmup_steps}), or 0 for the last "
                "step"
            )
        decays = self.optim.ema_decay, *self.optim.more_ema_decays
        if len({f"{decay:g}" for decay in decays}) < len(decays):  # names of metrics and tensors
            raise UserError(
                "optim.ema_decay and optim.more_ema_decays name a decay twice, to six digits; give "
                "each once"
            )
        self._check_objective()
        self._check_orders()

    def _check_objective(self) -> None:
        """Raise ValueError where architecture and objective do not go together."""
        kind, encoder = self.objective.kind, self.model.is_encoder
        if encoder and kind in DECODER_OBJECTIVES:
            raise UserError(
                f"objective.kind = {kind!r} does not fit an encoder (model.attention = 'full'); "
                "set objective.kind to lambda_dce, k_dce, t_dce or score_entropy"
            )
        if not encoder and kind not in DECODER_OBJECTIVES:
            raise UserError(
                f"objective.kind = {kind!r} does not fit a decoder; set objective.kind to ar, "
                "ao_ar or groupwise"
            )
        if (kind == "score_entropy") != self.model.noise:
            raise UserError(
                "objective.kind = 'score_entropy' and model.noise = true belong together"
            )
        if kind == "groupwise" and self.model.target != "two_stream":
            raise UserError("objective.kind = 'groupwise' needs model.target = 'two_stream'")
        if kind == "groupwise" and not self.model.group_attention:
            raise UserError("objective.kind = 'groupwise' needs model.group_attention = true")

    def _check_orders(self) -> None:
        """Raise ValueError for orders, of the run or of a stage, that its model cannot learn."""
        model, stages = self.model, (self.order, *self.schedule)
        if model.is_encoder:
            if self.schedule or self.order.kind not in ("random", "mixture"):
                raise UserError(
                    "an encoder predicts in no order: set order.kind to 'random' and leave out "
                    "[[schedule]]"
                )
            return
        for stage in stages:
            orders = dataclasses.replace(self.order, kind=stage.kind)  # raises for its settings
            orders.check_length(model.block_size)
            # An order that never changes can be learnt without being told; one drawn anew cannot.
            drawn = stage.kind not in (*FIXED, "mixture") or (
                stage.kind == "mixture" and stage.l2r_prob < 1
            )
            if drawn and model.l2r_only:
                raise UserError(
                    f"order.kind = {stage.kind!r} needs a model that is told its target position, "
                    "but model.target is 'none'; set model.target to 'adaln' or 'input', or "
                    "order.kind to 'l2r'"
                )
            if stage.kind != "l2r" and self.objective.kind == "ar":
                raise UserError(
                    f"objective.kind = 'ar' needs order.kind = 'l2r', but it is {stage.kind!r}"
                )
        steps = [stage.step for stage in self.schedule]
        if any(after <= before for before, after in zip(steps, steps[1:], strict=False)):
            raise UserError(
                "schedule: the steps of the stages must rise from one [[schedule]] table to the "
                "next"
            )


# ---- reading -------------------------------------------------------------------------------------


def load_toml(path: str | Path) -> Config:
    """Read a config file; keys it leaves out take their defaults. Raises ValueError."""
    path = Path(path)
    try:
        values = read_toml(path)
    except FileNotFoundError:
        found = [p.name for p in path.parent.glob("*.toml")]
        nearest = difflib.get_close_matches(path.name, sorted(found), n=1)
        hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
        raise UserError(f"there is no config file {path}{hint}") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder; give the .toml file, e.g. {path / 'config.toml'}"
        ) from None
    return from_dict(values, str(path))


def from_dict(values: dict, source: str) -> Config:
    """Build a Config from nested plain values; `source` is what error messages call it."""
    return from_values(values, Config, source)


def from_command_line(arguments: list[str], description: str) -> Config:
    """`CONFIG.toml [--table.key value ...]` -> Config. Exits with status 2 and tyro's message for
    an option that is unknown or wrong."""
    import tyro

    if arguments and not arguments[0].startswith("-"):
        path, overrides = arguments[0], arguments[1:]
        default = load_toml(path)
    elif "--help" in arguments or "-h" in arguments:
        path, overrides, default = "CONFIG.toml", arguments, Config()
    else:
        raise UserError("give a config file first, e.g. python train.py configs/quickstart.toml")
    return tyro.cli(
        Config, default=default, args=overrides, prog=f"train.py {path}", description=description
    )


# ---- writing and comparing -----------------------------------------------------------------------


def to_dict(config: Config) -> dict:
    return dataclasses.asdict(config)


def to_toml(config: Config) -> str:
    """The whole configuration as a TOML document that `load_toml` reads back to an equal Config."""
    values = to_dict(config)
    for table in values.values():
        if isinstance(table, dict):  # TOML has no None: such a key is left out
            for key in [key for key, value in table.items() if value is None]:
                del table[key]
    return tomli_w.dumps(values)


def differences(old: Config, new: Config) -> dict[str, tuple]:
    """Dotted keys whose values differ: {key: (old value, new value)}."""
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    return {key: (before[key], after[key]) for key in after if before[key] != after[key]}


def _flat(values: dict, prefix: str = "") -> dict:
    """Nested dicts as one, with dotted keys."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
