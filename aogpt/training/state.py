"""The state of a run: start and resume it (saving.py saves it)."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..checkpoints import CheckpointError, load, store
from ..checkpoints.load import Loaded
from ..data.loader import changed_files
from ..data.tokenizers import HUB, other_tokenizer
from ..model import Transformer
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..systems import build_model
from . import config as configuration
from . import parallel
from .config import Config
from .muon import local
from .optimizers import EMA, allocate_state, learning_rate, make_optimizers, named_state
from .val_losses import saved_losses, validation_orders
from .warm_start import check_start, differing_keys, warm_start

# Keys (or tables) that differ when a run resumes (docs/training.md). REFUSED: an error;
# the value names what cannot change. TOLD: a note with this consequence. All others may
# change freely.
REFUSED = {
    "model": "architecture",
    "optim.kind": "optimizer",
    "data.tokenizer": "tokenizer",
    "data.tokenizer_sha256": "tokenizer",
    "data.vocab_size": "tokenizer",
    "data.eot": "end-of-text id",
}
NOW = "from this step on"
OTHER_LOSS = "losses before and after this step do not compare"
SHUFFLED = (
    "the epoch goes on in other data or another shuffle: blocks may be read twice or "
    "never"
)
TOLD = {
    "optim": NOW,
    "model.dropout": NOW,
    "train.dtype": NOW,
    "order": OTHER_LOSS,
    "objective": OTHER_LOSS,
    "schedule": OTHER_LOSS,
    "eval.sequences": OTHER_LOSS,
    "eval.draws": OTHER_LOSS,
    "data.val": OTHER_LOSS,
    "seed": SHUFFLED,
    "data.train": SHUFFLED,
    "data.max_tokens": SHUFFLED,
    "train.init_from": "without effect, as the run has weights of its own",
    "train.batch_size": (
        "the data goes on after the {sequences:,} sequences read so far"
    ),
}
# On a source whose own score leaves out what a run learns to predict from [None].
FIRST_TOKENS = (
    "it has no start token: the losses of this run are also of the first token of a "
    "block; to score the same tokens of both: python eval_ppl.py RUN {source}"
)


@dataclass
class Progress:
    """The progress of a run. Its fields are keys of checkpoints.store.StateFile."""

    step: int = 0
    sequences: int = 0  # trained on so far; the next batch starts there
    tokens: int = 0
    best: dict | None = None  # {"step", "loss"} of the best checkpoint that exists
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """The state that training changes; data, orders and learning rate depend on the
    step alone."""

    model: Transformer
    average: EMA  # of the weights
    optimizers: list[torch.optim.Optimizer]  # AdamW, and Muon if optim.kind says so
    progress: Progress


def start(config: Config, data_meta: Mapping[str, Any], procs: Processes) -> State:
    """Return the state of the newest checkpoint, or a new one, with the weights of
    train.init_from if set. Raises UserError for another run's folder, CheckpointError
    if no checkpoint can be read."""
    torch.manual_seed(config.seed)
    # Each process verifies some of the files.
    share = slice(procs.rank, None, procs.world_size)
    read = functools.partial(store.read_values, share=share)
    folder = config.run_folder
    # (path, values), None for a new run
    newest = store.read_newest(folder, read, procs)
    if newest is None:
        problem = history_in(folder) if procs.main else None
        problem = procs.gather(problem)[0]
        if problem:
            raise UserError(problem)
    else:
        path, values = newest
        check_same_run(
            config,
            data_meta,
            path,
            values,
            procs.print0,
        )
        check_same_data(values["data"], data_meta, procs)
        best = values["best"]
        values["best"] = procs.gather(existing_best(config, data_meta, values))[0]
        if best is not None and values["best"] != best:
            if values["best"] is None:
                now = "the next validation chooses another"
            else:
                now = "now it is step {step} (loss {loss:.4f})".format(**values["best"])
            procs.print0(
                f"the best checkpoint (step {best['step']}, loss {best['loss']:.4f}) "
                f"is gone: {now}"
            )

    weights = None  # random
    if config.train.init_from and newest is None:
        source = load(config.train.init_from)
        check_window(config, source)
        check_same_tokenizer(config, source, data_meta)
        weights = initial_weights(config, source.model)
        procs.print0(f"started from the weights of {config.train.init_from}")
        changed = []
        for name, before, now in differing_keys(source.model.config, config.model):
            changed.append(f"model.{name} = {now!r} (was {before!r})")
        if changed:
            procs.print0(f"other than in its source: {', '.join(changed)}")
        if source.scored_from and not config.model.is_encoder:
            procs.print0(FIRST_TOKENS.format(source=config.train.init_from))
        del source
    # empty: drawing the weights of a large model, to be replaced, would take minutes
    model = parallel.build(config, procs, weights, empty=newest is not None)
    state = State(
        model=model,
        average=EMA(model, config.optim.ema_decay),
        optimizers=make_optimizers(model, config),
        progress=Progress(),
    )
    if procs.main:
        store.remove_partial(folder)
    if newest is None:
        if procs.main:
            (folder / store.NONE_YET).mkdir(parents=True, exist_ok=True)
        return state
    restore(state, path, values)
    if procs.main:  # a kill may have prevented it
        store.settle(folder, values, config.checkpoint.keep)
    procs.print0(f"resumed from {path}")
    return state


def check_window(config: Config, source: Loaded) -> None:
    """Raise UserError for blocks that are longer than the window of the attention of
    the model to start from."""
    window = source.window
    block_size = config.model.block_size
    if window is not None and block_size > window:
        raise UserError(
            f"{config.train.init_from} has a sliding window of {window} tokens, which "
            f"our model does not have: give at most --model.block-size {window} (it is "
            f"{block_size})"
        )


def check_same_tokenizer(
    config: Config, source: Loaded, data_meta: Mapping[str, Any]
) -> None:
    """Raise UserError if the data has another tokenizer than the model to start
    from."""
    for key, (theirs, ours) in other_tokenizer(vars(source), data_meta).items():
        tokenizer = "its tokenizer"
        file = Path(source.path).with_name(HUB)
        if file.is_file():
            tokenizer += f" (--tokenizer {file})"
        raise UserError(
            f"cannot start from {source.path}: its {key} is {theirs!r}, that of "
            f"{config.data.folder} is {ours!r}; prepare the data with {tokenizer}, or "
            "leave out --train.init-from"
        )


def initial_weights(config: Config, source: Transformer) -> dict[str, Tensor]:
    """Return the initial weights of a run that starts from a model, by name: where it
    has no others, the source's own tensors, not copies."""
    with torch.device("meta"):
        empty = build_model(config.model)
    shapes = {name: p.shape for name, p in empty.named_parameters()}
    theirs: dict[str, Tensor] = dict(source.named_parameters())
    if shapes == {name: p.shape for name, p in theirs.items()}:
        check_start(empty, source)
        return theirs
    initial = build_model(config.model)
    warm_start(initial, source)
    return dict(initial.named_parameters())


def history_in(folder: Path) -> str | None:
    """Return why no run can start in a folder without checkpoints: it holds files of
    another run; else None. A run that was killed before its first checkpoint may start
    again."""
    if (folder / store.NONE_YET).exists():
        return None
    for name in ("config.toml", "metrics.jsonl", "best"):
        if (folder / name).exists():
            return (
                f"{folder} holds the {name} of another run, but no checkpoint: mount "
                f"its disk, choose another --name, or move {folder} away to start anew"
            )
    return None


def check_same_run(
    config: Config, meta: Mapping[str, Any], path: Path, values: dict, print0: Callable
) -> None:
    """Print which keys have changed since a checkpoint, with consequences; reset its
    `values` that no longer hold. Raises UserError for keys that cannot change."""
    old = configuration.from_dict(values["config"], str(path))
    step = values["step"]
    values.setdefault("sequences", step * old.train.batch_size)  # of older versions
    values.setdefault("tokens", 0)
    changes = changes_of(old, config, values["data"], meta)
    for key, (before, after) in changes.items():
        part = entry_of(key, REFUSED)
        if part is not None and key not in TOLD:
            raise UserError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it "
                f"is {after!r}: the {part} of a run cannot change; set it back, or "
                "start another with --name"
            )
    for key, (before, after) in changes.items():
        effect = entry_of(key, TOLD)
        note = ""
        if effect is not None:
            note = "; " + effect.format(sequences=values["sequences"])
        if key in ("data.train", "data.val"):
            split = key.removeprefix("data.")
            key = f"the split {split} in {config.data.folder}"
        print0(f"changed since {path}: {key} = {after!r} (was {before!r}){note}")
    if learning_rate(step, old) != learning_rate(step, config):
        before = learning_rate(max(0, step - 1), old)
        after = learning_rate(step, config)
        print0(
            f"the learning rate goes from {before:.3g} to {after:.3g} at step "
            f"{step + 1}"
        )
    best = values["best"]
    if best and measure_of(old, values["data"]) != measure_of(config, meta):
        print0(
            f"the best checkpoint (step {best['step']}, loss {best['loss']:.4f}) was "
            "chosen by another measure: it will be chosen again"
        )
        values["best"] = None
    if changes:  # the change may be the cure of skipped steps
        values["skipped_in_a_row"] = 0


def changes_of(
    old: Config, config: Config, old_meta: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, tuple]:
    """Return {key: (before, after)} of keys of the config, the tokenizer and the splits
    of the data that have changed."""
    changes = configuration.differences(old, config)
    for key, pair in other_tokenizer(old_meta, meta).items():
        changes[f"data.{key}"] = pair
    ends = (old_meta.get("eot"), meta.get("eot"))
    if None not in ends and ends[0] != ends[1]:
        changes["data.eot"] = ends
    for split in ("train", "val"):
        before = checksums_of(old_meta, split)
        after = checksums_of(meta, split)
        if before != after:
            changes[f"data.{split}"] = (before, after)
    return changes


def checksums_of(meta: Mapping[str, Any], split: str) -> str | None:
    """Return the SHA-256 of the tokens of a split, and of their roles: which of them
    are of a prompt. None for a split that does not exist."""
    entry = meta.get("splits", {}).get(split, {})
    checksum = entry.get("sha256")
    if roles := entry.get("roles"):
        checksum = f"{checksum}, of roles {roles['sha256']}"
    return checksum


def measure_of(config: Config, meta: Mapping[str, Any]) -> tuple:
    """Return everything that the validation losses of a run are measured with, for a
    comparison: also the SHA-256 of a file of orders."""
    orders, name = validation_orders(config)
    orders_sha256 = None
    if orders[name].orders.unmixed == "file":
        record = meta.get("files", {}).get(str(Path(config.order.file)), {})
        orders_sha256 = record.get("sha256")
    return (
        config.seed,
        config.eval.sequences,
        config.eval.draws,
        checksums_of(meta, "val"),
        orders,
        name,
        orders_sha256,
    )


def existing_best(config: Config, meta: Mapping[str, Any], values: dict) -> dict | None:
    """Return the best checkpoint of the `values` of the newest one, {"step", "loss"}.
    If it has been removed: the best of those that exist and that were validated as the
    run validates now, None without one."""
    folder = config.run_folder
    best = values["best"]
    if best is None or store.path_of(folder, best["step"]).is_dir():
        return best
    losses = saved_losses(config)
    best = None
    for path in store.find(folder, up_to=values["step"]):
        loss = losses.get(cast(int, store.step_of(path)))
        if loss is None:
            continue
        with contextlib.suppress(CheckpointError):
            saved = store.read_values(path, share=slice(0))
            old = configuration.from_dict(saved["config"], str(path))
            if measure_of(old, saved["data"]) == measure_of(config, meta):
                best = better_of(best, saved["step"], loss)
    return best


def better_of(best: dict | None, step: int, loss: float) -> dict | None:
    """Return the best checkpoint, {"step", "loss"}, when that of `step` has this
    validation loss."""
    if math.isfinite(loss) and (best is None or loss < best["loss"]):
        return {"step": step, "loss": loss}
    return best


def entry_of(key: str, table: dict[str, str]) -> str | None:
    """Return the entry of a dotted key in a table, or of the table that holds the
    key."""
    group = key.partition(".")[0]
    return table.get(key, table.get(group))


def check_same_data(
    before: Mapping[str, Any], now: Mapping[str, Any], procs: Processes
) -> None:
    """Print which files of the data are not known to be unchanged since a
    checkpoint. The main process reads them, all must call. Raises UserError for a file
    that does not match its checksum."""
    error = None
    notes = []
    if procs.main:
        try:
            notes = changed_files(before.get("files", {}), now.get("files", {}))
        except (UserError, OSError) as failure:
            error = str(failure)
    error = procs.gather(error)[0]
    if error:
        raise UserError(error)
    for note in notes:
        procs.print0(note)


def check_epochs(
    epochs: float, num_blocks: int, config: Config, progress: Progress
) -> None:
    """Raise UserError for a number of passes over `num_blocks` blocks in a run that has
    read some of them in batches of another size: the steps were counted with this
    one."""
    batch_size = config.train.batch_size
    if epochs and progress.sequences != progress.step * batch_size:
        left = max(0.0, epochs * num_blocks - progress.sequences)
        steps = progress.step + math.ceil(left / batch_size)
        raise UserError(
            f"--train.epochs counts steps of {batch_size} sequences, but the run's "
            f"first {progress.step} had others: for {epochs:g} epochs in all give "
            f"--train.steps {steps}"
        )


def named_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state, not copied, by their names in a checkpoint."""
    tensors = {}
    for name, p in state.model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
    for name, average in state.average.weights.items():
        tensors[f"ema.{name}"] = average
    for name, values in named_state(state.model, state.optimizers).items():
        for key, value in values.items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def plain_values(
    state: State, best: dict | None, config: Config, data_meta: Mapping[str, Any]
) -> dict:
    """Return everything else, as JSON values: keys of checkpoints.store.StateFile."""
    ema = state.average
    values = asdict(state.progress)
    values["best"] = best
    values["ema"] = {"updates": int(ema.updates), "decay": ema.decay}
    values["model_config"] = asdict(state.model.config)
    values["config"] = asdict(config)
    values["data"] = data_meta
    return values


@torch.no_grad()
def restore(state: State, path: Path, values: dict) -> None:
    """Fill a state from a checkpoint; any number of processes may have written it."""
    allocate_state(state.optimizers)
    tensors = named_tensors(state)
    unknown = sorted(values["tensors"].keys() - tensors.keys())
    if unknown:
        raise CheckpointError(
            f"{path} holds {unknown[0]}, which this run does not have; start another "
            "with --name"
        )
    store.read_tensors(path, cast(store.StateFile, values), tensors)
    name = not_finite(tensors)
    if name:
        raise CheckpointError(
            f"{path}: {name} is not finite; remove it to resume from another"
        )
    state.average.updates.fill_(values["ema"]["updates"])
    for field in fields(Progress):
        setattr(state.progress, field.name, values[field.name])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor whose shard on this process has a number that is not
    finite."""
    # All are asked before one is read, which waits for the device.
    finite = [store.is_finite(local(tensor)) for tensor in tensors.values()]
    for name, is_finite in zip(tensors, finite, strict=True):
        if not is_finite:
            return name
    return None
