"""Train an AO-GPT, alone or under torchrun.

    python train.py configs/quickstart.toml
    torchrun --nproc_per_node=8 train.py configs/aogpt_small.toml --optim.lr 3e-4
    python train.py --plot RUN [RUN ...] [--plot-out FILE.png] [--plot-x tokens|steps]
    python train.py configs/aogpt_7b.toml --plan --world-size 64 [--gpu NAME] [--mfu 0.4] [--plan-json FILE]

The first argument is a config file; every key of it can be overridden. The run lives in OUT/NAME. Started again with
the same command, it goes on from its newest checkpoint and gives the same weights as if it had never stopped. SIGTERM
and Ctrl-C finish the step, save and exit. --plot trains nothing: it draws runs (folders OUT/NAME) against each other
into one picture, out/compare.png unless --plot-out says otherwise. --plan trains nothing, either: it prints the memory,
time and traffic that the run would need on so many GPUs (--plan --help for its options).
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from checkpoints import store as checkpoint
from checkpoints.store import EMA, CheckpointError
from data.loader import LENGTHS, TokenDataset
from model import AOGPT
from objectives import (
    DECODER_OBJECTIVES,
    Masks,
    ao_ar_loss,
    evaluation_masks,
    groupwise_loss,
    masked_nll,
    masks_at,
    score_entropy,
    token_nll,
)
from orders import OrderConfig, orders_at, philox_bits
from runtime.command_line import run_script
from runtime.devices import autocast, pick_dtype
from runtime.processes import Processes, StopRequest, processes
from training import config as configuration
from training import memory_plan as budget
from training.config import Config
from training.metrics import Log, plot_losses, plot_runs, tokens_of
from training.optimizers import learning_rates, move, set_learning_rates
from training.parallel import compile_model, drop_gathered, micro_step, replicate
from training.state import Progress, Saver, State, start

CURVE_POINTS = 64


@dataclass(frozen=True)
class PlotArguments:
    plot: tuple[Path, ...]
    """Run folders to draw against each other."""
    plot_out: Path = Path("out/compare.png")
    """The PNG to write."""
    plot_x: Literal["tokens", "steps"] = "tokens"
    """What stands on the x axis."""


def main() -> int:
    if any(word.startswith("--plot") for word in sys.argv[1:]):
        return plot(sys.argv[1:])
    if "--plan" in sys.argv[1:]:
        return budget.print_plan(sys.argv[1:], __doc__)
    config = configuration.from_command_line(sys.argv[1:], __doc__)
    sharded = config.train.parallel == "fsdp"
    with processes(config.train.device, config.train.timeout, group=sharded) as procs:
        return train(config, procs)


def plot(arguments: list[str]) -> int:
    """`--plot RUN [RUN ...]`: draw runs against each other."""
    import tyro

    a = tyro.cli(
        PlotArguments, args=arguments, prog="train.py", description="Draw runs against each other."
    )
    if not a.plot:
        raise ValueError("--plot needs run folders, e.g. python train.py --plot out/one out/other")
    plot_runs(list(a.plot), a.plot_out, a.plot_x)
    print(f"wrote {a.plot_out}")
    return 0


def train(config: Config, procs: Processes) -> int:
    data, held_out = open_data(config, procs)
    say = print if procs.main else (lambda *_, **__: None)
    stop = StopRequest(procs)
    state = start(config, data.meta, procs, say)
    progress = state.progress
    if progress.step >= config.train.steps:
        return already_finished(config, procs, progress, say)
    introduce(config, data, state.model, procs, say)

    log = Log(config, procs, state.model, progress)
    saver = Saver(config, procs, data.meta, log.warn)
    with compiled(state.model, config, procs):
        saved = train_steps(config, procs, state, data, held_out, stop, log, saver)
    log.close()
    return finish(config, procs, progress, saved, say)


def train_steps(
    config: Config,
    procs: Processes,
    state: State,
    data,
    held_out,
    stop: StopRequest,
    log: Log,
    saver,
):
    """Train until the last step, or until asked to stop. Returns the last checkpoint's path; None if not written."""
    progress, saved = state.progress, None
    model, results = replicate(state.model, procs), Results()
    with (
        contextlib.closing(Batches(data, config, procs, progress.step)) as batches,
        contextlib.closing(saver),
    ):
        while progress.step < config.train.steps and not stop.agreed:
            loss, norm = train_step(progress.step, model, state.optimizer, batches, config, procs)
            update(state, loss, norm)
            results.put(progress.step, loss, norm)
            report(results.ready(), config, progress, log)
            stop.agree(failed=progress.skipped_in_a_row >= config.train.max_skipped_steps)
            if stop.failed:
                log.close()
                raise ValueError(non_finite_message(config, progress))
            last = progress.step == config.train.steps
            evaluating = held_out and (last or progress.step % config.eval.interval == 0)
            saving = last or stop.agreed or progress.step % config.checkpoint.interval == 0
            saver.poll()
            if evaluating or saving:
                report(results.ready(wait=True), config, progress, log)
                saver.wait()  # if the best one could not be written, the one before it is the best again
            best_before = progress.best
            better = evaluating and evaluate(
                state.model, state.ema, held_out, config, procs, progress, log
            )
            if better or saving:
                saved = saver.save(state, best_before)
                log.restart_clock()
    return saved if saver.wait() else None


def report(results, config: Config, progress: Progress, log: Log) -> None:
    """Count and log steps that have come to their end."""
    for step, loss, norm in results:
        if math.isfinite(loss + norm):
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        log.training(step, loss, norm, learning_rates(step - 1, config))


# ---- one step: nothing in it waits for the device --------------------------------------------------------------------


def train_step(
    step: int, model, optimizer, batches: Batches, config: Config, procs: Processes
) -> tuple:
    """Gradients of the global batch of `step`, clipped. Returns (loss, gradient norm), 0-dimensional tensors on the
    device, the same on every process.

    The global batch is cut into micro-batches first and among processes second, so which sequences and orders it holds
    depends on neither.
    """
    t, device = config.train, procs.device
    if config.model.dropout:  # dropout, too, follows from the step alone
        torch.manual_seed(
            int(philox_bits(config.seed, step, range(procs.rank, procs.rank + 1), 1)[0, 0])
        )
    set_learning_rates(optimizer, learning_rates(step, config))
    micro_steps = batches.micro_steps
    total = torch.zeros((), device=device)
    for micro in range(micro_steps):
        batch = batches.next(step, micro)
        with micro_step(model, micro == micro_steps - 1, config):
            with autocast(device, pick_dtype(t.dtype, device)):
                loss = training_loss(model, batch, config, step) / micro_steps
            loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip or math.inf)
    return procs.mean(total), norm.full_tensor() if isinstance(norm, DTensor) else norm


def training_loss(model, batch: Batch, config: Config, step: int) -> torch.Tensor:
    """Mean loss of a micro-batch, nats per token."""
    kind = config.objective.kind
    if kind == "groupwise":
        return groupwise_loss(model, batch.tokens, batch.which, config.stage(step)[1])
    if kind in DECODER_OBJECTIVES:
        return ao_ar_loss(model, batch.tokens, batch.which)
    if kind == "score_entropy":
        return score_entropy(model, batch.tokens, batch.which, config.model.mask_token).mean()
    return masked_nll(model, batch.tokens, batch.which).mean()


def update(state: State, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """End a step: move the weights and their average by its gradients, unless these are not finite."""
    finite = (loss + norm).isfinite().float()
    move(state.optimizer, finite)
    state.ema.update(state.model, finite)
    state.optimizer.zero_grad(set_to_none=True)
    state.progress.step += 1


@dataclass
class Batch:
    """A micro-batch. tokens: LongTensor (B, T). which: the order of every sequence, (B, T), or the masks."""

    tokens: torch.Tensor
    which: torch.Tensor | Masks


def drawn(config: Config, step: int, rows: range, length: int) -> torch.Tensor | Masks:
    """The orders, or the masks, of the sequences `rows` of the global batch of `step`."""
    if config.objective.kind in DECODER_OBJECTIVES:
        return orders_at(config.stage(step)[0], config.seed, step, rows, length)
    return masks_at(config.objective, config.seed, step, rows, config.train.batch_size, length)


class Batches:
    """The micro-batches of this process, made by a thread while the one before is at work."""

    def __init__(self, data: TokenDataset, config: Config, procs: Processes, step: int):
        t = config.train
        self.data, self.config, self.procs = data, config, procs
        self.micro_steps = t.batch_size // (t.micro_batch_size * procs.world_size)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self.ahead = None

    def next(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of `step`, on the device; the one after it is begun."""
        place = step, micro
        if self.ahead is None or self.ahead[0] != place:
            self.ahead = place, self.thread.submit(self.make, *place)
        batch = self.ahead[1].result()
        after = (step, micro + 1) if micro + 1 < self.micro_steps else (step + 1, 0)
        self.ahead = (
            (after, self.thread.submit(self.make, *after))
            if after[0] < self.config.train.steps
            else None
        )
        device = self.procs.device
        move_to = functools.partial(torch.Tensor.to, device=device, non_blocking=True)
        return Batch(move_to(batch.tokens), map_tensors(move_to, batch.which))

    def make(self, step: int, micro: int) -> Batch:
        """The micro-batch in pinned memory, if it goes to a GPU."""
        c, t = self.config, self.config.train
        first = (micro * self.procs.world_size + self.procs.rank) * t.micro_batch_size
        rows = range(first, first + t.micro_batch_size)
        length = tokens_of(c, range(step, step + 1)) // t.batch_size
        tokens = self.data.batch(c.seed, step, rows, t.batch_size)[:, :length].contiguous()
        which = drawn(c, step, rows, length)
        if self.procs.device.type == "cuda":
            return Batch(tokens.pin_memory(), map_tensors(torch.Tensor.pin_memory, which))
        return Batch(tokens, which)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def map_tensors(function, which: torch.Tensor | Masks) -> torch.Tensor | Masks:
    if isinstance(which, Masks):
        return Masks(*(function(getattr(which, name)) for name in ("masked", "weight", "sigma")))
    return function(which)


class Results:
    """Losses and gradient norms of steps that the device may still be at."""

    def __init__(self):
        self.waiting = deque()

    def put(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        values, event = torch.stack([loss.detach(), norm.detach()]), None
        if values.is_cuda:
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.waiting.append((step, values, event))

    def ready(self, wait: bool = False):
        """Yield (step, loss, norm) of those that have ended; with `wait`, of all."""
        while self.waiting:
            step, values, event = self.waiting[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self.waiting.popleft()
            yield step, *values.tolist()


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    model, ema: EMA, held_out: TokenDataset, config: Config, procs, progress: Progress, log: Log
) -> bool:
    """Validation losses of the averaged and of the last weights. Returns whether the averaged ones are at their best
    under the run's own order distribution."""
    kinds = ["l2r"] if config.model.attention == "causal" else ["random"]
    if config.model.target != "none":
        kinds.append("random")
    goal = config.stage(config.train.steps)[
        0
    ].kind  # a schedule is judged by where it leads, from the first step on
    if goal.startswith("fixed"):
        kinds.append("fixed")
    model.eval()
    raw = {kind: validation(model, held_out, kind, config, procs) for kind in kinds}
    with ema.applied(model):
        averaged = {kind: validation(model, held_out, kind, config, procs) for kind in kinds}
    model.train()
    own = {"l2r": "l2r", "random": "random", "mixture": "random"}.get(goal, "fixed")
    loss, _ = averaged.get(own, averaged[kinds[0]])
    better = loss < progress.best["loss"]
    if better:
        progress.best = {"step": progress.step, "loss": loss}
    log.validation(averaged, raw)
    return better


def validation(
    model, held_out: TokenDataset, kind: str, config: Config, procs: Processes
) -> tuple[float, list]:
    """Mean nats per token of the first eval.sequences blocks, each under one order that never changes, and the curve of
    these losses by step: at most CURVE_POINTS means over equal parts of the order (see metrics.py)."""
    order_config = (
        config.stage(config.train.steps)[0] if kind == "fixed" else OrderConfig(kind=kind)
    )
    count, size = min(config.eval.sequences, held_out.num_blocks), config.train.micro_batch_size
    share, total = procs.share(count), 0.0
    sums = torch.zeros(
        2, min(CURVE_POINTS, config.model.block_size), dtype=torch.float64
    )  # of losses, and how many
    largest = math.ceil(count / procs.world_size)
    for first in range(share.start, share.start + largest, size):
        rows = range(first, min(first + size, share.stop)) or range(
            1
        )  # a pass too many: sharded ones are common work
        tokens = held_out.blocks(list(rows)).to(procs.device)
        with autocast(procs.device, pick_dtype(config.train.dtype, procs.device)):
            nll = token_nll(model, tokens, order_config, config.seed, 0, rows, count).cpu()
        if first < share.stop:
            total += float(nll.mean(dim=1).sum())
            sums += by_step(nll, order_config, config, rows, count, sums.shape[1])
    drop_gathered(model)
    totals, sums = zip(*procs.gather((total, sums)), strict=True)
    losses, counts = sum(sums).tolist()
    return sum(totals) / count, [x / n if n else None for x, n in zip(losses, counts, strict=True)]


def by_step(
    nll: torch.Tensor, orders: OrderConfig, config: Config, rows: range, total: int, points: int
):
    """Sums of the losses by the share of the sequence that is known, and their numbers: (2, points), float64.

    nll: (B, T), what `token_nll` gave for the sequences `rows`. The step of a token is the number of known tokens. An
    encoder has no order, but its masked tokens have all the others as context: at step i a uniformly random set of i,
    as a random order of a decoder has.
    """
    length, sums = nll.shape[1], torch.zeros(2, points, dtype=torch.float64)
    if config.model.is_encoder:
        masks = evaluation_masks(config.seed, 0, rows, total, length)
        count = masks.masked.sum(dim=1)
        step, losses = length - count, nll.sum(dim=1) / masks.weight
    else:
        step = torch.arange(length)
        losses = nll.gather(1, orders_at(orders, config.seed, 0, rows, length)).sum(dim=0)
        count = torch.full_like(step, len(nll))
    place = step * points // length
    sums[0].index_add_(0, place, losses)
    sums[1].index_add_(0, place, count.double())
    return sums


# ---- starting, resuming, saving --------------------------------------------------------------------------------------


def open_data(config: Config, procs: Processes) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split and, if there are evaluations, the validation split, checked against the configuration."""
    size, verify = config.model.block_size, config.data.verify
    data = TokenDataset(config.data.folder, "train", size, verify=verify)
    held_out = (
        TokenDataset(config.data.folder, "val", size, verify=verify)
        if config.eval.interval
        else None
    )
    check_fits(config, data, procs)
    return data, held_out


def already_finished(config: Config, procs: Processes, progress: Progress, say) -> int:
    folder = config.run_folder
    if procs.main and not (folder / "loss.png").exists():
        plot_losses(folder)
    say(
        f"{folder} is finished at step {progress.step}; give more --train.steps to go on, or another --name"
    )
    return 0


def introduce(config: Config, data: TokenDataset, model: AOGPT, procs: Processes, say) -> None:
    """Write the run's configuration and say what is about to be trained, on how much."""
    folder, t, size = config.run_folder, config.train, config.model.block_size
    if procs.main:
        checkpoint.write_atomically(
            folder / "config.toml", lambda f: f.write(configuration.to_toml(config).encode())
        )
    counts = model.num_params()
    say(
        f"parameters: {sum(counts.values()):,} ("
        + ", ".join(f"{k} {v:,}" for k, v in counts.items())
        + ")"
    )
    say(
        f"{data.num_blocks:,} blocks of {size} tokens, {t.batch_size * size:,} tokens a step, ",
        end="",
    )
    say(f"{t.steps * t.batch_size / data.num_blocks:.2f} epochs; run folder {folder}")
    if config.data.random_length_prob:
        say(f"{config.data.random_length_prob:.2%} of the steps at a random length below that")


def finish(config: Config, procs: Processes, progress: Progress, saved: Path | None, say) -> int:
    """Draw the curve and say how the run ended. Raises CheckpointError if its last checkpoint was not written."""
    if procs.main:
        plot_losses(config.run_folder)
    if saved is None:
        raise CheckpointError(
            "the last checkpoint could not be written (see above); free some space and start again"
        )
    if progress.step < config.train.steps:
        say(
            f"stopped at step {progress.step} and saved {saved}; the same command goes on from there"
        )
    else:
        say(f"finished {progress.step} steps; next: python sample.py {config.run_folder}")
    return 0


def check_fits(config: Config, data: TokenDataset, procs: Processes) -> None:
    """Raise ValueError for what only data and processes together can show to be impossible."""
    t = config.train
    if t.batch_size % (t.micro_batch_size * procs.world_size):
        raise ValueError(
            f"train.batch_size ({t.batch_size}) must be a multiple of train.micro_batch_size ({t.micro_batch_size}) "
            f"times the {procs.world_size} processes"
        )
    if data.meta["vocab_size"] > config.model.vocab_size:
        raise ValueError(
            f"the data in {config.data.folder} has a vocabulary of {data.meta['vocab_size']}, but model.vocab_size is "
            f"{config.model.vocab_size}; set it to at least that (a multiple of 64 is fastest)"
        )
    mask_token = config.model.mask_token
    if mask_token is not None and mask_token < data.meta["vocab_size"]:
        raise ValueError(
            f"model.mask_token is {mask_token}, a token of the data in {config.data.folder}; set it to "
            f"{data.meta['vocab_size']}, the first id after its vocabulary, and model.vocab_size above that"
        )


@contextlib.contextmanager
def compiled(model: AOGPT, config: Config, procs: Processes):
    """Inside the block the model is compiled, if the configuration says so: once for every shape it is called with.

    These are at most LENGTHS in training, and the whole and the last batch of an evaluation: more than torch.compile's
    default limit, past which it would go on uncompiled.
    """
    if not config.train.compile:
        yield
        return
    if procs.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ValueError(
            "train.compile needs a C++ compiler on a CPU and there is none; pass --train.no-compile"
        )
    compile_model(model)
    with torch._dynamo.config.patch(recompile_limit=4 * LENGTHS):
        yield


def non_finite_message(config: Config, progress: Progress) -> str:
    good = checkpoint.find(config.run_folder, up_to=progress.step)
    where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
    return (
        f"loss or gradient was not finite {progress.skipped_in_a_row} steps in a row, up to step {progress.step}; "
        f"{where}. Lower --optim.lr, or set --optim.grad-clip, and start again"
    )


if __name__ == "__main__":
    run_script(main)
