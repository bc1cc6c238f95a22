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

The same command resumes the run, with the same result as if it had never
stopped. SIGTERM and Ctrl-C finish the step, save and exit. See also:
    python -m aogpt.training.plan    memory and time of a run
    python -m aogpt.training.plot    its curves"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from aogpt.checkpoints import CheckpointError
from aogpt.data.loader import (
    Mixture,
    TokenDataset,
    find_dataset,
    open_training_data,
)
from aogpt.data.tokenizers import FILES, get_tokenizer
from aogpt.objectives import ao_ar_loss, groupwise_loss, masked_nll, score_entropy
from aogpt.runtime.command_line import run_script
from aogpt.runtime.devices import autocast, deterministic, precision_note
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import locked_for_all, write_text
from aogpt.runtime.processes import Processes, StopRequest, processes
from aogpt.runtime.randomness import DROPOUT, philox_bits
from aogpt.systems import parameter_counts
from aogpt.training import config as configuration
from aogpt.training.batches import Batch, PendingLosses, micro_batches
from aogpt.training.config import Config, refuse
from aogpt.training.gpu_options import use_gpu_options
from aogpt.training.metrics import Log, in_units
from aogpt.training.optimizers import optimizers, set_learning_rates
from aogpt.training.parallel import compiled, gradient_exchange, replicate
from aogpt.training.state import (
    Saver,
    State,
    newest_and_best,
    not_finite_message,
    start,
)
from aogpt.training.validation import best_by, evaluate


def main() -> int:
    config = configuration.from_command_line(sys.argv[1:], __doc__)
    # needs a group even of one process
    t = config.train
    sharded = config.train.parallel == "fsdp"
    with (
        deterministic(t.deterministic),
        processes(t.device, t.timeout, group=sharded) as procs,
    ):
        return train(config, procs)


def train(config: Config, procs: Processes) -> int:
    """Start or resume a run; train to its last step or until a signal. Returns the exit status."""
    source = find_dataset(config.data.folder)
    d = config.data
    data = open_training_data(
        source, config.model.block_size, d.verify, d.max_tokens, d.mix
    )
    config = config.with_steps(data.num_blocks)
    folder = config.run_folder
    t = config.train
    validated = config.eval.interval > 0
    val_data = (
        TokenDataset(source, "val", data.block_size, d.verify) if validated else None
    )
    files = data.files() | (val_data.files() if val_data else {})
    data.meta = {**data.meta, "files": files}  # to see at a resume whether they changed
    check_fits(config, data, procs)
    stop = StopRequest(procs)
    with locked_for_all(folder, procs):
        state = start(config, data.meta, procs)
        saved = folder
        if state.progress.step < t.steps:
            if procs.main:
                write_text(folder / "config.toml", configuration.to_toml(config))
                if (name := data.meta["tokenizer"]) in FILES:
                    get_tokenizer(name, folder=source).keep(folder)
            counts = parameter_counts(state.model)
            tokens = t.batch_size * data.block_size
            parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
            procs.print0(f"parameters: {sum(counts.values()):,} ({parts})")
            amount = f"{data.num_blocks:,} blocks of {data.block_size} tokens, "
            amount += (
                f"{t.batch_size} examples" if data.of_records else f"{tokens:,} tokens"
            )
            epochs = in_units(
                t.steps * t.batch_size / data.num_blocks, ((1, "epochs"),)
            )
            procs.print0(f"{amount} a step, {epochs}; run folder {folder}")
            if isinstance(data, Mixture):
                procs.print0(*data.describe(t.steps * t.batch_size), sep="\n")
            notes = (
                *data.meta.get("notes", ()),
                precision_note(t.dtype, procs.device, config.model.n_embd),
            )
            procs.print0("".join(f"{note}\n" for note in notes if note), end="")
            saved = training_loop(config, procs, state, data, val_data, stop)
    if saved is None:
        raise CheckpointError(
            "the last checkpoint was not written: free some disk space and run the same command"
        )
    step = state.progress.step
    mode = " --temperature 0.7 --top-p 0.9"
    if data.of_records:
        mode = ' --mode l2r --prompt "..." --until-end'
    how = f"finished {step} steps; next: python sample.py {folder}{mode}, or more --train.steps"
    if step < t.steps:
        how = f"stopped at step {step} and saved {saved}; run the same command to continue"
    procs.print0(newest_and_best(config, state.progress), how, sep="\n")
    return 0


def training_loop(
    config: Config,
    procs: Processes,
    state: State,
    data: TokenDataset,
    val_data,
    stop: StopRequest,
) -> Path | None:
    """Train until the last step or a signal. Returns the path of the last checkpoint, None if it
    could not be written. val_data: TokenDataset, or None without validation."""
    progress = state.progress
    t = config.train
    changed = None
    log = Log(config, procs, progress, data)
    saver = Saver(config, procs, data.meta, log.warn)
    data.shift = progress.sequences - progress.step * t.batch_size
    batches = micro_batches(data, config, procs, progress.step)
    due = False
    use_gpu_options(state.model, t, procs.device)
    graphs = nullcontext()
    if t.compile:
        graphs = compiled(state.model, procs, t.compile_mode)
    with closing(log), closing(saver), graphs, closing(batches):
        model = replicate(state.model, procs)
        losses = PendingLosses()
        saved_at = time.monotonic()
        if val_data and t.init_from and progress.step == 0:
            # What the source gives, before the first step changes it.
            before = evaluate(state.model, state.averages, val_data, config, procs)
            log.validation(before, val_data.num_blocks)
        while progress.step < t.steps and not stop.requested:
            # Nothing waits for the loss here, so that a GPU has its next step before it needs it.
            loss, norm = train_step(
                progress.step, model, state.optimizer, batches, config, procs
            )
            update(state, loss, norm)  # adds 1 to progress.step
            try:
                for files in filter(None, (data, val_data)):
                    files.check_unchanged()
            except (UserError, OSError) as error:
                # raised after a checkpoint
                changed = error
                stop.signalled = True
            losses.add(progress.step, loss, norm)
            log.training(losses.arrived())
            # All processes must stop, and save, after the same step.
            by_clock = 0 < 60 * config.checkpoint.minutes < time.monotonic() - saved_at
            stop.agree(progress.skipped_in_a_row >= t.max_skipped_steps, by_clock)
            if stop.failed:
                what = f"loss or gradient of {progress.skipped_in_a_row} steps in a row"
                raise UserError(not_finite_message(config, progress, what))

            last = progress.step == t.steps
            best = progress.best
            validating = val_data and (
                last or progress.step % config.eval.interval == 0
            )
            due |= last or stop.requested or stop.due
            due |= progress.step % config.checkpoint.interval == 0
            if validating or due:  # both wait for the device anyway
                log.training(losses.arrived(wait=True))
                saver.wait()  # updates progress.best
                best = progress.best
            # The state before a skipped step may be the cause: save only after a step that counted.
            good = last or stop.requested or not progress.skipped_in_a_row
            if validating:
                val_losses = evaluate(
                    state.model, state.averages, val_data, config, procs
                )
                log.validation(val_losses, val_data.num_blocks)
                val_loss = val_losses[""][best_by(config)].mean
                better = best is None or val_loss < best["loss"]
                if good and math.isfinite(val_loss) and better:
                    best = {"step": progress.step, "loss": val_loss}
            if good and (due or best != progress.best):
                saver.save(state, best)  # sets progress.best once the checkpoint exists
                due = False
                log.restart_clock()
                saved_at = time.monotonic()
        saved = saver.wait()
        if changed:
            raise changed
        return saved


def train_step(
    step: int,
    model,
    optimizer,
    batches: Iterator[Batch],
    config: Config,
    procs: Processes,
) -> tuple[Tensor, Tensor]:
    """Compute the clipped gradients of the global batch of `step` (from 0), without waiting for the
    device. Returns loss (nats) and gradient norm, 0-dimensional, the same on every process."""
    if config.model.dropout:  # the same after a resume, and different on every process
        one_row = range(procs.rank, procs.rank + 1)
        torch.manual_seed(
            int(philox_bits(config.seed, step, one_row, 1, DROPOUT)[0, 0])
        )
    set_learning_rates(optimizer, step, config)

    t = config.train
    micro_steps = t.batch_size // (
        config.micro_batch_size(procs.world_size) * procs.world_size
    )
    dtype = config.dtype_on(procs.device)
    total = torch.zeros((), device=procs.device)
    for index in range(micro_steps):
        batch = next(batches)
        with gradient_exchange(
            model, t.reduce_every_micro_batch or index == micro_steps - 1
        ):
            with autocast(procs.device, dtype):
                loss = training_loss(model, batch, config, step) / micro_steps
            loss.backward()
        total += loss.detach()

    # The norm shows gradients that are not finite, also without clipping.
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), config.optim.grad_clip or math.inf
    )
    return procs.mean(total), norm.full_tensor() if hasattr(
        norm, "full_tensor"
    ) else norm


def training_loss(model, batch: Batch, config: Config, step: int) -> Tensor:
    """Mean loss of a micro-batch, nats per token."""
    match config.objective.kind:
        case "ar" | "ao_ar":
            return ao_ar_loss(model, batch.tokens, batch.order, batch.weight)
        case "groupwise":
            settings = config.stage(step)[1], batch.weight, batch.given
            return groupwise_loss(model, batch.tokens, batch.order, *settings)
        case "score_entropy":
            vocab_size = (
                config.model.mask_token
            )  # [MASK] is the first id after the tokens
            losses = score_entropy(model, batch.tokens, batch.masks, vocab_size)
            return losses.mean(dim=1).mean()
        case "lambda_dce" | "masked_ce" | "k_dce" | "t_dce":  # one loss, other masks
            return masked_nll(model, batch.tokens, batch.masks).mean()


def update(state: State, loss: Tensor, norm: Tensor) -> None:
    """Update weights and averages; a loss or gradient that is not finite changes neither. As in
    torch.amp.GradScaler, the device decides, so that nothing waits for it."""
    finite = (loss + norm).isfinite().float()  # 1 or 0
    for each in optimizers(state.optimizer):
        each.grad_scale = None
        each.found_inf = 1 - finite
    state.optimizer.step()
    for ema in state.averages:
        ema.update(state.model, finite)
    state.optimizer.zero_grad(set_to_none=True)
    state.progress.step += 1


def check_fits(config: Config, data: TokenDataset, procs: Processes) -> None:
    """Raise UserError if the data or the number of processes does not fit the configuration."""
    m = config.model
    folder = config.data.folder
    config.micro_batch_size(
        procs.world_size
    )  # refuses processes that cannot share the batch
    whole = f"{folder} has prompts, which stay whole: leave out data.random_length_prob"
    refuse(data.of_records and config.data.random_length_prob, whole)
    ahead = f"{folder} has prompts: set order.kind = 'l2r', or another model.target than 'none'"
    refuse(data.of_records and m.l2r_only and config.order.kind != "l2r", ahead)
    vocab_size = data.meta["vocab_size"]
    more = f"the data in {folder} has a vocabulary of {vocab_size}: set model.vocab_size to that"
    refuse(vocab_size > m.vocab_size, f"{more} or above (it is {m.vocab_size})")
    mask = f"model.mask_token is {m.mask_token}, a token of the data in {folder}; set it to "
    mask += f"{vocab_size}, and model.vocab_size above that"
    refuse(m.mask_token is not None and m.mask_token < vocab_size, mask)


if __name__ == "__main__":
    run_script(main)
