"""Train an AO-GPT, alone or under torchrun.

    python train.py configs/quickstart.toml --optim.lr 3e-4
    torchrun --nproc_per_node=8 train.py configs/aogpt_small.toml

Options override keys of the config file. Those that people change most:

    --name, --out              the run is kept in the folder OUT/NAME
    --seed                     of initial weights, data and orders
    --data.folder              a dataset that data/prepare.py made
    --model.n-layer, --model.n-head, --model.n-embd, --model.block-size
    --optim.lr                 peak learning rate
    --train.steps              optimizer steps
    --train.batch-size         sequences in a step, over all processes
    --train.micro-batch-size   sequences in a forward pass of one process
    --train.init-from          start from the weights of a run or a release
    --eval.interval            steps between validations

The same command resumes the run, with the same weights as if it had never
stopped. SIGTERM and Ctrl-C finish the step, save and exit.
python -m studies.plot draws its curves."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import io
import shutil
import sys
import time
from contextlib import closing, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from aogpt.checkpoints import CheckpointError, store
from aogpt.data.loader import TokenDataset, file_record, find_dataset
from aogpt.data.tokenizers import FILES, get_tokenizer
from aogpt.orders import read_orders
from aogpt.runtime.command_line import counted, run_script
from aogpt.runtime.devices import autocast, deterministic
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import locked_for_all, sha256_file, write_text
from aogpt.runtime.processes import Processes, processes
from aogpt.runtime.randomness import DROPOUT, philox_bits
from aogpt.training import config as configuration
from aogpt.training.batches import PendingLosses, micro_batches
from aogpt.training.checkpoint import Saver, State, StopRequest, better_of, start
from aogpt.training.config import Config
from aogpt.training.metrics import Log
from aogpt.training.optimizers import MAX_GRAD_NORM, learning_rate
from aogpt.training.parallel import compiled, replicate, set_gradient_exchange
from aogpt.training.summary import first_lines, last_line
from aogpt.training.val_losses import best_by, evaluate, read_metrics

if TYPE_CHECKING:  # half a second to import, which --help and one process do not need
    from torch.distributed.tensor import DTensor

PACE_STEPS = 12  # of a trial that measures the pace for train.minutes


def main() -> int:
    """Train the run of the command line. Returns the exit status."""
    config = configuration.from_command_line(sys.argv[1:], __doc__)
    t = config.train
    with deterministic(t.deterministic):
        # FSDP needs a group even of one process.
        with processes(t.device, t.timeout, group=t.parallel == "fsdp") as procs:
            return train(config, procs)


def train(config: Config, procs: Processes) -> int:
    """Start or resume a run; train to its last step or until a signal. Returns the exit
    status."""
    source = find_dataset(config.data.folder)
    data = TokenDataset(
        source, "train", config.model.block_size, max_tokens=config.data.max_tokens
    )
    if config.train.epochs:
        config = config.with_steps(config.steps_of_epochs(data.num_blocks))
    if any(orders.base_kind == "file" for orders in config.all_orders()):
        read_orders(config.order.file, config.model.block_size)  # to say what is wrong
        path = Path(config.order.file)
        data.files[str(path)] = file_record(path, sha256_file(path))
    val_data = None
    files = dict(data.files)
    if config.eval.interval > 0:
        val_data = TokenDataset(source, "val", data.block_size)
        files.update(val_data.files)
    # Checkpoints record all of them, to see at a resume whether one has changed.
    data.meta = {**data.meta, "files": files}
    check_fits(config, data, procs)
    if config.data.end == "given":
        for dataset in (data, val_data):
            if dataset is not None:
                dataset.give_end()
    stop = StopRequest(procs)
    folder = config.run_folder
    with locked_for_all(folder, procs):
        if config.train.minutes:
            config = config.with_steps(
                steps_of_minutes(config, procs, data, val_data, stop)
            )
        configured = config.optim.warmup_steps
        config = config.with_short_warmup()
        if config.optim.warmup_steps != configured:
            procs.print0(
                f"warm-up of {config.optim.warmup_steps} steps, not {configured}: the "
                f"run has {config.train.steps}"
            )
        state = start(config, data.meta, procs)
        first_step = state.progress.step
        if state.progress.step < config.train.steps:
            if procs.main:
                write_text(folder / "config.toml", configuration.to_toml(config))
                tokenizer = data.meta["tokenizer"]
                if tokenizer in FILES:
                    get_tokenizer(tokenizer, folder=source).keep(folder)
            for line in first_lines(config, state, data):
                procs.print0(line)
            training_loop(config, procs, state, data, val_data=val_data, stop=stop)
    predicts_end = data.of_records and not data.end_given
    procs.print0(last_line(config, state.progress, first_step, predicts_end))
    return 0


def check_fits(config: Config, data: TokenDataset, procs: Processes) -> None:
    """Raise UserError if the data or the number of processes does not fit the
    configuration."""
    m = config.model
    folder = config.data.folder
    vocab_size = data.meta["vocab_size"]
    # This refuses processes that cannot share the batch.
    config.micro_batch_size(procs.world_size)
    if data.of_records and m.l2r_only and config.order.kind != "l2r":
        raise UserError(
            f"{folder} has prompts: set order.kind = 'l2r', or another "
            "model.target than 'none'"
        )
    for orders in config.all_orders():
        if not m.is_encoder:
            orders.check_blocks(data.block_size, f"the blocks of {folder}")
    if vocab_size > (m.mask_token or m.vocab_size):
        raise UserError(
            f"the data in {folder} has a vocabulary of {vocab_size}: set "
            "model.vocab_size to that or above; of an encoder, set model.mask_token to "
            "that and model.vocab_size above it"
        )


def training_loop(
    config: Config,
    procs: Processes,
    state: State,
    data: TokenDataset,
    val_data: TokenDataset | None,
    stop: StopRequest,
) -> None:
    """Train until the last step or a signal. val_data: None without validation. Raises
    CheckpointError if the last checkpoint could not be written."""
    t = config.train
    progress = state.progress
    objective = config.objective.definition
    micro_batch_size = config.micro_batch_size(procs.world_size)
    micro_steps = t.batch_size // (micro_batch_size * procs.world_size)
    precision = autocast(procs.device, config.dtype_on(procs.device))
    is_sharded = t.parallel == "fsdp"
    has_peers = procs.world_size > 1 or is_sharded

    # Not 0 if the batch size changed at a resume.
    data.shift = progress.sequences - progress.step * t.batch_size
    datasets = [data] if val_data is None else [data, val_data]
    batches = micro_batches(data, config, procs, progress.step)
    losses = PendingLosses()
    log = Log(config, procs, progress, data)
    saver = Saver(config, procs, data.meta, log.warn)
    graphs = nullcontext()
    if t.compile:
        procs.print0("compiling: the first steps take minutes (--train.no-compile)")
        graphs = compiled(state.model, procs)

    with closing(log), graphs, closing(batches):
        model = replicate(state.model, procs)
        if val_data is not None and t.init_from and progress.step == 0:
            # The losses of the source's weights, before the first step changes them.
            validate(config, procs, state, val_data, log)

        while progress.step < t.steps and not stop.requested:
            step = progress.step
            for optimizer in state.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, config, group["peak_lr"])
            if config.model.dropout:
                seed_dropout(config.seed, step, procs.rank)

            # Forward and backward. Nothing waits for the loss, so that a GPU has its
            # next step before it needs it.
            loss = torch.zeros((), device=procs.device)
            for micro_step in range(micro_steps):
                # Tokens (B, T) and their orders or masks: `make_batch` in batches.py.
                batch = next(batches)
                if has_peers:
                    is_last = micro_step == micro_steps - 1
                    set_gradient_exchange(model, is_last)
                with precision:
                    part = objective.loss(model, batch, config.objective) / micro_steps
                part.backward()
                loss += part.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            if has_peers:
                loss = procs.mean(loss)
            if is_sharded:
                norm = cast("DTensor", norm).full_tensor()
            # The optimizers' step and the average; adds 1 to progress.step.
            update(state, loss, norm)

            losses.add(progress.step, loss, norm)
            # Adds to progress.sequences, tokens and skipped steps, and logs.
            log.count_and_log(losses.arrived())
            # All processes must stop, and save, after the same step.
            stop.agree(progress, datasets)
            validates = val_data is not None and (
                progress.step % config.eval.interval == 0 or progress.step == t.steps
            )
            ends = progress.step == t.steps or stop.requested
            if saver.note_due(progress.step, ends) or validates:
                # So that the checkpoint has the counts of all steps.
                log.count_and_log(losses.arrived(wait=True))
                # What progress.best is to be once this step is saved.
                best = progress.best
                if val_data is not None and validates:
                    best = validate(config, procs, state, val_data, log)
                if saver.should_save(progress, best, ends):
                    saver.save(state, best)
                    log.restart_clock()
    if stop.error is not None:
        raise stop.error
    if saver.written is None:
        raise CheckpointError(
            "the last checkpoint was not written: free some disk space and run the "
            "same command"
        )


def update(state: State, loss: Tensor, norm: Tensor) -> None:
    """Update weights and their average; a loss or gradient that is not finite changes
    neither. As in torch.amp.GradScaler, the device decides, so that nothing waits for
    it."""
    finite = (loss + norm).isfinite().float()  # 1 or 0
    for optimizer in state.optimizers:
        # Fused AdamW and Muon skip the step where found_inf is 1.
        optimizer.found_inf = 1 - finite  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.average.update(finite)
    state.progress.step += 1


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make the random numbers of a step the same after a resume, and different on every
    process."""
    row = range(rank, rank + 1)
    bits = philox_bits(seed, step, row, width=1, stream=DROPOUT)
    torch.manual_seed(int(bits[0, 0]))


def validate(
    config: Config, procs: Processes, state: State, val_data: TokenDataset, log: Log
) -> dict | None:
    """Validate and log the losses. Returns what the best checkpoint is if this step is
    saved, {"step", "loss"}: the best one so far, or this step."""
    losses = evaluate(state.model, state.average, val_data, config, procs)
    log.validation(losses, val_data.num_blocks)
    selecting = losses["ema"][best_by(config)]
    return better_of(state.progress.best, state.progress.step, selecting.mean)


def steps_of_minutes(
    config: Config,
    procs: Processes,
    data: TokenDataset,
    val_data: TokenDataset | None,
    stop: StopRequest,
) -> int:
    """Return the last step of a run whose steps, with their validations, fit into
    train.minutes from now on. The first steps of the run are timed in a folder inside
    its own, which is removed. A run whose steps were counted so before keeps the pace
    of its config.toml."""
    start_time = time.perf_counter()
    t = config.train
    begun = config.run_folder / "config.toml"
    if begun.is_file():
        before = configuration.load_toml(begun).train
        if before.minutes:
            return max(1, round(before.steps * t.minutes / before.minutes))
    trial = replace(
        config,
        out=str(config.run_folder),
        name="pace",
        train=replace(t, steps=PACE_STEPS, minutes=0.0, log_interval=PACE_STEPS),
        eval=replace(config.eval, interval=0),
        wandb=configuration.WandbConfig(),
    )
    if procs.main:
        shutil.rmtree(trial.run_folder, ignore_errors=True)
    procs.gather(None)  # the others wait for it
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        state = start(trial, data.meta, procs)
        training_loop(trial, procs, state, data, val_data=None, stop=stop)
    if stop.requested:
        raise KeyboardInterrupt
    # Without the first step, which compiles: the last row is of the steps since the row
    # before it, that of step 1 or of a step that was skipped.
    *_, previous, last = read_metrics(trial.run_folder / "metrics.jsonl")
    tokens = last["tokens"] - previous["tokens"]
    seconds = tokens / last["tokens_per_second"] / (last["step"] - previous["step"])
    validation = 0.0
    if val_data is not None:
        moment = time.perf_counter()
        evaluate(state.model, state.average, val_data, config, procs)
        validation = time.perf_counter() - moment
    procs.gather(None)
    if procs.main:
        shutil.rmtree(trial.run_folder, ignore_errors=True)
    left = 60 * t.minutes - validation - (time.perf_counter() - start_time)
    pace = seconds + validation / max(1, config.eval.interval)
    steps = procs.gather(max(1, int(left / pace)))[0]
    done = 0
    if checkpoints := store.find(config.run_folder):
        done = store.step_of(checkpoints[-1])
    procs.print0(
        f"{counted(steps, 'steps')} in {t.minutes:g} minutes: a step takes "
        f"{seconds:.2g} s, a validation {validation:.2g} s"
    )
    return done + steps


if __name__ == "__main__":
    run_script(main)
