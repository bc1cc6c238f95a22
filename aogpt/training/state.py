"""The state of a run: start, resume and save it."""

import contextlib
import datetime
import functools
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from ..checkpoints import CheckpointError, load, store
from ..checkpoints.adapters import check_base, weights_sha256
from ..data.loader import changed_files
from ..data.tokenizers import HUB, RECORDED, other_tokenizer
from ..model import Transformer
from ..runtime.errors import UserError, reason_of
from ..runtime.processes import Processes
from ..systems import build_model
from . import config as configuration
from . import optimizers, parallel
from .adapters import alpha_of, trainable
from .config import Config
from .metrics import read_metrics
from .optimizers import EMA, MuonAdamW, learning_rate
from .validation import best_by, validation_orders
from .warm_start import check_start, warm_start

# Keys (or tables) that differ when a run resumes (docs/training.md). REFUSED: an error; the value
# names what cannot change. TOLD: a note with this consequence. All others may change freely.
REFUSED = {"model": "architecture", "optim.kind": "optimizer"}
REFUSED |= {"optim.more_ema_decays": "list of averages"}
REFUSED |= {"train.lora_rank": "rank of the adapters"}
REFUSED |= dict.fromkeys((f"data.{key}" for key in RECORDED), "tokenizer")
NOW = "from this step on"
OTHER_LOSS = "losses before and after this step do not compare"
SHUFFLED = "the epoch goes on in other data or another shuffle: blocks may be read twice or never"
TOLD = dict.fromkeys(
    ("optim", "model.dropout", "train.dtype", "data.random_length_prob"), NOW
)
COMPARED = (
    "order",
    "objective",
    "schedule",
    "eval.sequences",
    "eval.draws",
    "data.val",
)
TOLD |= dict.fromkeys(COMPARED, OTHER_LOSS) | dict.fromkeys(
    ("seed", "data.train", "data.max_tokens", "data.mix"), SHUFFLED
)
TOLD |= {"train.init_from": "without effect, as the run has weights of its own"}
TOLD |= {
    "train.batch_size": "the data goes on after the {sequences:,} sequences read so far"
}


@dataclass
class Progress:
    """Where a run is. Its fields are keys of checkpoints.store.State."""

    step: int = 0
    sequences: int = 0  # trained on so far; the next batch starts there
    tokens: int = 0
    best: dict | None = None  # {"step", "loss"} of the best checkpoint that exists
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """Everything that training changes; data, orders and learning rate depend on the step."""

    model: Transformer
    averages: list[EMA]  # of optim.ema_decay, and of optim.more_ema_decays
    optimizer: torch.optim.AdamW | MuonAdamW
    progress: Progress
    adapter: dict | None = (
        None  # checkpoints.adapters.Adapter, where it alone is trained
    )


def start(config: Config, data_meta: dict, procs: Processes) -> State:
    """The state of the newest checkpoint, or a new one, with the weights of train.init_from if set.
    Raises UserError for another run's folder, CheckpointError if no checkpoint can be read."""
    torch.manual_seed(config.seed)
    share = slice(
        procs.rank, None, procs.world_size
    )  # each process verifies some of the files
    read = functools.partial(store.read_values, share=share)
    # None: random
    folder = config.run_folder
    weights = None
    adapter = None
    found = store.read_newest(folder, read, procs)
    if found:
        check_same_run(config, data_meta, *found, procs.print0)
        check_same_data(found[1]["data"], data_meta, procs)
    else:
        if problem := procs.gather(history_in(folder) if procs.main else None)[0]:
            raise UserError(problem)
    if config.train.init_from and (not found or config.train.lora_rank):
        source = load(config.train.init_from)
        if not found:
            for key, (theirs, ours) in other_tokenizer(vars(source), data_meta).items():
                file = Path(source.path).with_name(HUB)
                option = f" (--tokenizer {file})" if file.is_file() else ""
                raise UserError(
                    f"cannot start from {source.path}: its {key} is {theirs!r}, that of "
                    f"{config.data.folder} is {ours!r}; prepare the data with its "
                    f"tokenizer{option}, or leave out --train.init-from"
                )
        weights = initial_weights(config, source.model)
        if not found:
            procs.print0(f"started from the weights of {config.train.init_from}")
        if config.train.lora_rank:
            adapter = adapter_of(config, source.model, weights)
            if found:
                check_base(source.model, found[1]["adapter"], source.path)
        del source
    # empty: drawing the weights of a large model, to be replaced, would take minutes
    model = parallel.build(config, procs, weights, empty=found is not None)
    decays = config.optim.ema_decay, *config.optim.more_ema_decays
    averages = [EMA(model, decay) for decay in decays]
    state = State(
        model, averages, optimizers.make_optimizer(model, config), Progress(), adapter
    )
    if procs.main:
        store.remove_partial(folder)
        if not found:
            (folder / store.NONE_YET).mkdir(parents=True, exist_ok=True)
    if found:
        restore(state, *found)
        if procs.main:  # a kill may have prevented it
            store.settle(folder, found[1], config.checkpoint.keep)
        procs.print0(f"resumed from {found[0]}")
    return state


def initial_weights(config: Config, source: Transformer) -> dict[str, Tensor]:
    """Return the initial weights of a run that starts from a model, by name: where it
    has no others, the source's own tensors, not copies."""
    with torch.device("meta"):
        empty = build_model(config.model)
    shapes = {name: p.shape for name, p in empty.named_parameters()}
    theirs = dict(source.named_parameters())
    if shapes == {name: p.shape for name, p in theirs.items()}:
        check_start(empty, source)
        return theirs
    initial = build_model(config.model)
    warm_start(initial, source)
    return dict(initial.named_parameters())


def adapter_of(config: Config, base: Transformer, weights: dict[str, Tensor]) -> dict:
    """Return what a run of adapters records of them. Raises UserError for a model with
    weights that the base does not have."""
    added = weights.keys() - dict(base.named_parameters()).keys()
    if added:
        raise UserError(
            f"train.lora_rank trains adapters alone, but the model adds {sorted(added)[0]}: "
            "set model.target = 'rotary' and model.query_at = 'before_target', or 'none'"
        )
    rank = config.train.lora_rank
    return {
        "rank": rank,
        "alpha": alpha_of(rank),
        "base": config.train.init_from,
        "base_sha256": weights_sha256(base),
    }


def history_in(folder: Path) -> str | None:
    """Why no run can start in a folder without checkpoints: it holds files of another run; else
    None. A run that was killed before its first checkpoint may start again."""
    held = [
        name
        for name in ("config.toml", "metrics.jsonl", "best")
        if (folder / name).exists()
    ]
    if not held or (folder / store.NONE_YET).exists():
        return None
    what = f"{folder} holds the {held[0]} of another run, but no checkpoint"
    return f"{what}: mount its disk, choose another --name, or move {folder} away to start anew"


def check_same_run(
    config: Config, meta: dict, path: Path, values: dict, print0: Callable
) -> None:
    """Print which keys have changed since a checkpoint, with consequences; reset its `values` that
    no longer hold. Raises UserError for keys that cannot change."""
    old = configuration.from_dict(values["config"], str(path))
    step = values["step"]
    values.setdefault("sequences", step * old.train.batch_size)  # of older versions
    values.setdefault("tokens", 0)
    changes = configuration.differences(old, config)
    metas = (values["data"], meta)
    changes |= {f"data.{key}": pair for key, pair in other_tokenizer(*metas).items()}
    for split in ("train", "val"):
        before, after = (
            data.get("splits", {}).get(split, {}).get("sha256") for data in metas
        )
        changes |= {f"data.{split}": (before, after)} if before != after else {}
    for key, (before, after) in changes.items():
        if key not in TOLD and (
            what := REFUSED.get(key, REFUSED.get(key.partition(".")[0]))
        ):
            now = f"was trained with {key} = {before!r}, but now it is {after!r}"
            why = f"the {what} of a run cannot change; set it back, or start another with --name"
            raise UserError(f"{config.run_folder} {now}: {why}")
    for key, (before, after) in changes.items():
        effect = TOLD.get(key, TOLD.get(key.partition(".")[0], "")).format(**values)
        if key in ("data.train", "data.val"):
            key = f"the split {key[5:]} in {config.data.folder}"
        note = effect and f"; {effect}"
        print0(f"changed since {path}: {key} = {after!r} (was {before!r}){note}")
    if learning_rate(step, old) != learning_rate(step, config):
        rates = learning_rate(max(0, step - 1), old), learning_rate(step, config)
        print0(
            "the learning rate goes from {:.3g} to {:.3g}".format(*rates),
            f"at step {step + 1}",
        )
    best = values["best"]
    orders = [validation_orders(which) for which in (old, config)]
    measured = changes.keys() & {"seed", "eval.sequences", "eval.draws", "data.val"}
    if best and (measured or orders[0] != orders[1]):
        chosen = f"step {best['step']}, loss {best['loss']:.4f}"
        print0(
            f"the best checkpoint ({chosen}) was chosen by another measure: it will be chosen again"
        )
        values["best"] = None
    if changes:  # the change may be the cure of skipped steps
        values["skipped_in_a_row"] = 0


def check_same_data(before: dict, now: dict, procs: Processes) -> None:
    """Print what is not known to be unchanged in the files of the data since a
    checkpoint. The main process reads them, all must call. Raises UserError for a file
    that does not match its checksum."""
    error = None
    notes = []
    if procs.main:
        try:
            notes = changed_files(before.get("files", {}), now.get("files", {}))
        except (UserError, OSError) as failure:
            error = str(failure)
    if error := procs.gather(error)[0]:
        raise UserError(error)
    for note in notes:
        procs.print0(note)


def named_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state, not copied, by their names in a checkpoint."""
    tensors = {
        f"model.{name}": p.detach() for name, p in trainable(state.model).items()
    }
    for i, ema in enumerate(state.averages):
        prefix = f"ema{ema.decay:g}" if i else "ema"
        tensors |= {
            f"{prefix}.{name}": average for name, average in ema.weights.items()
        }
    for name, values in optimizers.named_state(state.model, state.optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return tensors


def plain_values(
    state: State, best: dict | None, config: Config, data_meta: dict
) -> dict:
    """Everything else, as JSON values: keys of checkpoints.store.State."""
    ema = state.averages[0]
    return asdict(state.progress) | {
        "best": best,
        "adapter": state.adapter,
        "ema": {"updates": int(ema.updates), "decay": ema.decay},
        "model_config": asdict(state.model.config),
        "config": asdict(config),
        "data": data_meta,
    }


@torch.no_grad()
def restore(state: State, path: Path, values: dict) -> None:
    """Fill a state from a checkpoint; any number of processes may have written it."""
    optimizers.allocate_state(state.optimizer)
    tensors = named_tensors(state)
    if odd := sorted(values["tensors"].keys() - tensors.keys()):
        raise CheckpointError(
            f"{path} holds {odd[0]}, which this run does not have; start another with --name"
        )
    store.read_tensors(path, values, tensors)
    if name := not_finite(tensors):
        raise CheckpointError(
            f"{path}: {name} is not finite; remove it to resume from another"
        )
    for ema in state.averages:
        ema.updates.fill_(values["ema"]["updates"])
    for field in fields(Progress):
        setattr(state.progress, field.name, values[field.name])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor whose shard on this process has a number that is not finite."""
    finite = [store.is_finite(parallel.local(tensor)) for tensor in tensors.values()]
    return next(
        (name for name, ok in zip(tensors, finite, strict=True) if not ok), None
    )


class Saver:
    """Writes the checkpoints of a run, one at a time: under ddp the main process writes while the
    others wait; under fsdp every process writes its shards in the background."""

    def __init__(
        self, config: Config, procs: Processes, data_meta: dict, warn: Callable
    ):
        self.config = config
        self.procs = procs
        self.data_meta = data_meta
        self.warn = warn
        self.group = None  # for the background, apart from the messages of training
        if config.train.parallel == "fsdp":
            limit = datetime.timedelta(seconds=config.train.timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self.pending = (
            None  # (future, error, state, best, path) of the checkpoint under way
        )
        self.written = None  # the path of the last one; None if it could not be written

    def save(self, state: State, best: dict | None) -> None:
        """Write the state, or start to; best: {"step", "loss"}, progress.best once it is written.
        All processes must call, after `wait`; all raise UserError if the state is not finite."""
        config = self.config
        tensors = named_tensors(state)
        if name := next(filter(None, self.procs.gather(not_finite(tensors))), None):
            raise UserError(not_finite_message(config, state.progress, name))
        values = plain_values(state, best, config, self.data_meta)
        path = store.path_of(config.run_folder, state.progress.step)
        arguments = config.run_folder, values, tensors, config.checkpoint.keep
        if self.group:
            # `finish` reads only dtypes and shapes of `tensors`: training goes on changing values
            finish = functools.partial(store.finish, *arguments)
            temporary = store.temporary_of(path)
            future = store.start_writing_shards(temporary, tensors, finish, self.group)
            self.pending = future, None, state, best, path
            return
        error = None
        if self.procs.main:
            try:
                store.write(*arguments)
            except (OSError, SafetensorError) as failure:
                error = reason_of(failure)
        self.pending = None, self.procs.gather(error)[0], state, best, path
        self.wait()

    def wait(self) -> Path | None:
        """Wait until nothing is being written. Returns the last checkpoint; None, after a warning,
        if it could not be written."""
        if not self.pending:
            return self.written
        (future, error, state, best, path), self.pending = self.pending, None
        try:
            if future:
                future.result()
        except CheckpointException as failure:  # the same on every process
            cause = next(iter(failure.failures.values()))[0]
            if not isinstance(cause, OSError):
                raise cause from failure
            error = reason_of(cause)
        self.written = None if error else path
        if error is None:
            state.progress.best = best
        elif self.procs.main:
            shutil.rmtree(
                store.temporary_of(path), ignore_errors=True
            )  # frees its space
            last = last_good(self.config, store.step_of(path) - 1)
            self.warn(f"could not write {path}: {error}; {last}. Is the disk full?")
        return self.written

    close = wait  # for contextlib.closing


def last_good(config: Config, step: int) -> str:
    for path in reversed(store.find(config.run_folder, up_to=step)):
        with contextlib.suppress(CheckpointError):
            if not store.read_values(path, share=slice(0))[
                "skipped_in_a_row"
            ]:  # as at a stop
                return f"the last good checkpoint is {path}"
    return "there is no earlier checkpoint"


def not_finite_message(config: Config, progress: Progress, what: str) -> str:
    """Why a run with numbers that are not finite ends, and what to do."""
    good = last_good(config, progress.step - progress.skipped_in_a_row)
    remove = "if no loss after that checkpoint is finite, remove it and all later ones"
    last = remove if good.startswith("the last") else f"move {config.run_folder} away"
    advice = f"Lower --optim.lr, or set --optim.grad-clip, and start again; {last}"
    return f"{what} is not finite at step {progress.step}; {good}. {advice}"


def newest_and_best(config: Config, progress: Progress) -> str:
    """The validation losses of the newest and the best checkpoint, for the end of a run."""
    best = progress.best
    key = f"val_loss_{best_by(config)}"
    if best is None:
        return "no checkpoint was validated (see --eval.interval)"
    rows = read_metrics(config.run_folder / "metrics.jsonl")
    losses = {
        row["step"]: f"validation loss {row[key]:.4f}" for row in rows if row.get(key)
    }
    newest = f"step {progress.step} ({losses.get(progress.step, 'not validated')})"
    if best["step"] == progress.step:
        return f"the newest checkpoint, {newest}, is the best"
    chosen = f"step {best['step']} (validation loss {best['loss']:.4f})"
    return f"newest checkpoint: {newest}, which scripts use; best: {chosen}, --checkpoint best"
