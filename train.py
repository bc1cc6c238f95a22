"""Train an AO-GPT, alone or under torchrun.

    python train.py configs/quickstart.toml
    torchrun --nproc_per_node=8 train.py configs/aogpt_small.toml --optim.lr 3e-4
    python train.py --plot RUN [RUN ...] [--plot-out FILE.png] [--plot-x tokens|steps]
    python train.py configs/aogpt_7b.toml --plan --world-size 64 [--gpu NAME] [--mfu 0.4]
        [--plan-json FILE]

The first argument is a config file; every key of it can be overridden. The run lives in OUT/NAME.
Started again with the same command, it goes on from its newest checkpoint and gives the same
weights as if it had never stopped. SIGTERM and Ctrl-C finish the step, save and exit. --plot trains
nothing: it draws runs (folders OUT/NAME) against each other into one picture, out/compare.png
unless --plot-out says otherwise. --plan trains nothing, either: it prints the memory, time and
traffic that the run would need on so many GPUs (--plan --help for its options).
"""

from __future__ import annotations

from runtime.errors import UserError

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoints.errors import CheckpointError
from data.loader import TokenDataset
from model import AOGPT
from objectives import ao_ar_loss, groupwise_loss, masked_nll, score_entropy
from runtime.command_line import run_script
from runtime.devices import autocast, available_memory, deterministic, pick_dtype
from runtime.files import write_text
from runtime.lock import locked_for_all
from runtime.processes import Processes, StopRequest, processes
from runtime.randomness import philox_bits
from training import config as configuration
from training import memory_plan, plots
from training.batches import (
    Batch,
    PendingLosses,
    accumulation_steps,
    check_given_first,
    micro_batches,
)
from training.config import Config
from training.metrics import Log
from training.optimizers import learning_rates, move, set_learning_rates
from training.parallel import compiled, gradient_exchange, replicate
from training.state import Progress, Saver, State, not_finite_message, start
from training.validation import best_by, evaluate
from variants import parameter_counts


def main() -> int:
    arguments = sys.argv[1:]
    if any(word.startswith("--plot") for word in arguments):
        return plots.plot_command(arguments)
    if "--plan" in arguments:
        return memory_plan.print_plan(arguments, __doc__)
    config = configuration.from_command_line(arguments, __doc__)
    sharded = config.train.parallel == "fsdp"  # which needs a group even of one process
    with (
        deterministic(config.train.deterministic),
        processes(config.train.device, config.train.timeout, group=sharded) as procs,
    ):
        return train(config, procs)


def train(config: Config, procs: Processes) -> int:
    """Make or resume the run, train it to its last step or until it is asked to stop, and save it.

    Returns the exit status. Raises ValueError for data or processes that do not fit the
    configuration, for a run that cannot be resumed under it, and for one whose losses are not
    finite; CheckpointError if the last checkpoint could not be written.
    """
    data, val_data = open_data(config, procs)
    stop = StopRequest(procs)
    with locked_for_all(config.run_folder, procs):
        state = start(config, data.meta, procs)
        if state.progress.step >= config.train.steps:
            return already_finished(config, procs, state.progress)
        introduce(config, data, state.model, procs)

        log = Log(config, procs, state.model, state.progress, data.block_size)
        saver = Saver(config, procs, data.meta, log.warn)
        with closing(log), closing(saver), compiled(state.model, config, procs):
            saved = training_loop(config, procs, state, data, val_data, stop, log, saver)
        return finish(config, procs, state.progress, saved)


def training_loop(
    config: Config,
    procs: Processes,
    state: State,
    data: TokenDataset,
    val_data: TokenDataset | None,
    stop: StopRequest,
    log: Log,
    saver: Saver,
) -> Path | None:
    """Train until the last step, or until asked to stop. Returns the path of the last checkpoint;
    None if it could not be written."""
    progress = state.progress
    model, losses = replicate(state.model, procs), PendingLosses()
    with closing(micro_batches(data, config, procs, progress.step)) as batches:
        while progress.step < config.train.steps and not stop.requested:
            # An optimizer step. Its loss stays on the device: nobody waits for it here, so that the
            # next step is queued while the GPU is still at this one.
            loss, norm = train_step(progress.step, model, state.optimizer, batches, config, procs)
            update(state, loss, norm)
            # From here on, progress.step counts this step: it is the number of steps made.
            losses.add(progress.step, loss, norm)
            report(losses.arrived(), config, progress, log)

            # All processes must leave the loop after the same step: those that went on would wait
            # for the others' gradients. Each sees its own signals, and losses arrive at each in its
            # own time, so they agree here, by one small message between CPUs.
            stop.agree(failed=progress.skipped_in_a_row >= config.train.max_skipped_steps)
            if stop.failed:  # some steps late, as the losses are
                what = f"loss or gradient of {progress.skipped_in_a_row} steps in a row"
                raise UserError(not_finite_message(config, progress.step, what))

            last = progress.step == config.train.steps
            evaluating = val_data and (last or progress.step % config.eval.interval == 0)
            saving = last or stop.requested or progress.step % config.checkpoint.interval == 0
            if evaluating or saving:
                # Both read the weights, hence wait for the device anyway: let the log and the
                # counts of skipped steps catch up, for they belong into the checkpoint.
                report(losses.arrived(wait=True), config, progress, log)
                # One checkpoint at a time; only now it is known whether the best one was written.
                saver.wait()
            best = progress.best
            if evaluating:
                val_losses = evaluate(state.model, state.averages, val_data, config, procs)
                log.validation(val_losses)
                val_loss = val_losses[""][best_by(config)].mean
                if math.isfinite(val_loss) and (best is None or val_loss < best["loss"]):
                    best = {"step": progress.step, "loss": val_loss}
            if saving or best != progress.best:
                # The saver sets progress.best to this one, but only once its checkpoint exists:
                # under fsdp that is in the next saver.wait().
                saver.save(state, best)
                log.restart_clock()  # the speed in the log is that of training alone
    return saver.wait()


def report(
    losses: Iterator[tuple[int, float, float]], config: Config, progress: Progress, log: Log
) -> None:
    """Log the losses of steps that have ended, and count those that `update` has skipped."""
    for step, loss, norm in losses:
        if math.isfinite(loss + norm):
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        # Steps are counted from 1 in the log, but from 0 where something is drawn or scheduled.
        log.training(step, loss, norm, learning_rates(step - 1, config))


# ---- one step: nothing in it waits for the device ------------------------------------------------


def train_step(
    step: int, model, optimizer, batches: Iterator[Batch], config: Config, procs: Processes
) -> tuple[Tensor, Tensor]:
    """Gradients of the global batch of `step`, which counts from 0, clipped.

    Returns (loss, gradient norm): 0-dimensional tensors on the device, the same on every process.
    """
    if config.model.dropout:
        # What dropout drops follows from the step, too, so that a resumed run drops the same; and
        # every process drops something else.
        one_row = range(procs.rank, procs.rank + 1)
        torch.manual_seed(int(philox_bits(config.seed, step, one_row, width=1)[0, 0]))
    set_learning_rates(optimizer, learning_rates(step, config))

    # The sum of the gradients of all micro-batches is that of the global batch, in less memory. It
    # is exchanged between the processes in the last backward pass (see gradient_exchange).
    micro_steps = accumulation_steps(config, procs)
    dtype = pick_dtype(config.train.dtype, procs.device)
    total = torch.zeros((), device=procs.device)
    for index in range(micro_steps):
        batch = next(batches)
        with gradient_exchange(model, last=index == micro_steps - 1, config=config):
            with autocast(procs.device, dtype):
                loss = training_loss(model, batch, config, step) / micro_steps
            loss.backward()
        total += loss.detach()

    # Without clipping, the norm is still wanted: it shows gradients that are not finite.
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip or math.inf)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return procs.mean(total), norm


def training_loss(model, batch: Batch, config: Config, step: int) -> Tensor:
    """Mean loss of a micro-batch, nats per token."""
    match config.objective.kind:
        case "ar" | "ao_ar":
            return ao_ar_loss(model, batch.tokens, batch.order, batch.weight)
        case "groupwise":
            _, group = config.stage(step)
            records = batch.weight, batch.given
            return groupwise_loss(model, batch.tokens, batch.order, group, *records)
        case "score_entropy":
            # [MASK] comes right after the tokens, so its id is the number of tokens.
            vocab_size = config.model.mask_token
            return score_entropy(model, batch.tokens, batch.masks, vocab_size).mean()
        case "lambda_dce" | "k_dce" | "t_dce":  # which differ in how their masks are drawn
            return masked_nll(model, batch.tokens, batch.masks).mean()


def update(state: State, loss: Tensor, norm: Tensor) -> None:
    """End a step: move the weights and their average by its gradients, unless these are not finite.

    A single bad batch must not ruin a long run, so such a step changes nothing. The device decides:
    an `if` here would wait for it in every step. `report` counts these steps later.
    """
    finite = (loss + norm).isfinite().float()  # 1 or 0, on the device
    move(state.optimizer, finite)
    for ema in state.averages:
        ema.update(state.model, finite)
    state.optimizer.zero_grad(set_to_none=True)
    state.progress.step += 1


# ---- before and after the loop -------------------------------------------------------------------


def open_data(config: Config, procs: Processes) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split and, if there are evaluations, the validation split, checked against the
    configuration."""
    folder, size, verify = config.data.folder, config.model.block_size, config.data.verify
    data, val_data = TokenDataset(folder, "train", size, verify=verify), None
    if config.eval.interval:
        val_data = TokenDataset(folder, "val", size, verify=verify)
    check_fits(config, data, procs)
    if data.of_records and config.model.l2r_only:
        check_given_first(data, config.data.folder)
    return data, val_data


def check_fits(config: Config, data: TokenDataset, procs: Processes) -> None:
    """Raise ValueError for what only data and processes together can show to be impossible."""
    t, model, data_vocab = config.train, config.model, data.meta["vocab_size"]
    if t.batch_size % (t.micro_batch_size * procs.world_size):
        raise UserError(
            f"train.batch_size ({t.batch_size}) must be a multiple of train.micro_batch_size "
            f"({t.micro_batch_size}) times the {procs.world_size} processes"
        )
    if data.of_records and config.data.random_length_prob:
        raise UserError(
            f"{config.data.folder} holds records, which are not cut: leave out "
            "data.random_length_prob"
        )
    if data.of_records and config.model.l2r_only and config.order.kind != "l2r":
        raise UserError(
            f"{config.data.folder} holds records, which a model that is not told its targets reads "
            "with what is given in front: give order.kind = 'l2r', or another model.target"
        )
    check_memory(config, procs)
    if data_vocab > model.vocab_size:
        raise UserError(
            f"the data in {config.data.folder} has a vocabulary of {data_vocab}, but "
            f"model.vocab_size is {model.vocab_size}; set it to at least that (a multiple of 64 is "
            "fastest)"
        )
    if model.mask_token is not None and model.mask_token < data_vocab:
        raise UserError(
            f"model.mask_token is {model.mask_token}, a token of the data in "
            f"{config.data.folder}; set it to {data_vocab}, the first id after its vocabulary, and "
            "model.vocab_size above that"
        )


def check_memory(config: Config, procs: Processes) -> None:
    """Raise ValueError for what cannot fit, before memory is taken: a machine without any left may
    kill the run without a word."""
    free = available_memory(procs.device)
    if free is None:
        return
    t, model = config.train, config.model
    one_layer = 4 * t.micro_batch_size * model.block_size * model.n_embd  # of what it yields
    state = memory_plan.state_bytes(config, memory_plan.meta_model(config), procs.world_size)
    for what, needed, change in (
        (f"a micro-batch of {t.micro_batch_size:,} sequences", one_layer, "train.micro_batch_size"),
        ("the model with its optimizer", sum(state.values()), "model.n_embd or model.n_layer"),
    ):
        if needed > free:
            raise UserError(
                f"{what} needs more than {needed / 2**30:,.0f} GiB of memory, and "
                f"{free / 2**30:,.0f} GiB are free; lower {change}"
            )


def already_finished(config: Config, procs: Processes, progress: Progress) -> int:
    """Say that there is nothing to do, and draw the curve if the run was killed before that."""
    folder = config.run_folder
    if procs.main and not (folder / "loss.png").exists():
        plots.plot_losses(folder, config.objective.kind)
    procs.print0(
        f"{folder} is finished at step {progress.step}; give more --train.steps to go on, "
        "or another --name"
    )
    return 0


def introduce(config: Config, data: TokenDataset, model: AOGPT, procs: Processes) -> None:
    """Write the run's configuration and say what is about to be trained, on how much."""
    folder, t, size = config.run_folder, config.train, data.block_size
    if procs.main:
        write_text(folder / "config.toml", configuration.to_toml(config))
    counts = parameter_counts(model)
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    epochs = t.steps * t.batch_size / data.num_blocks
    procs.print0(f"parameters: {sum(counts.values()):,} ({parts})")
    procs.print0(
        f"{data.num_blocks:,} blocks of {size} tokens, {t.batch_size * size:,} tokens a step, "
        f"{epochs:.2f} epochs; run folder {folder}"
    )
    if share := config.data.random_length_prob:
        procs.print0(f"{share:.2%} of the steps at a random length below that")


def finish(config: Config, procs: Processes, progress: Progress, saved: Path | None) -> int:
    """Draw the curve and say how the run ended. Raises CheckpointError if its last checkpoint was
    not written."""
    if procs.main:
        plots.plot_losses(config.run_folder, config.objective.kind)
    if saved is None:
        raise CheckpointError(
            "the last checkpoint could not be written (see above); free some space and start again"
        )
    if progress.step < config.train.steps:
        procs.print0(
            f"stopped at step {progress.step} and saved {saved}; the same command goes on from "
            "there"
        )
    else:
        mode = " --mode l2r" if config.model.l2r_only else ""  # the default goes in random order
        procs.print0(
            f"finished {progress.step} steps; next: python sample.py {config.run_folder}{mode}"
        )
    return 0


if __name__ == "__main__":
    run_script(main)
