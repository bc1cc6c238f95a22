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
import math
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import budget
import checkpoint
import config as configuration
from checkpoint import EMA, CheckpointError
from config import Config
from data.loader import LENGTHS, TokenDataset
from metrics import Log, plot_losses, plot_runs, tokens_of
from model import AOGPT
from objectives import (
    DECODER_OBJECTIVES,
    ao_ar_loss,
    evaluation_masks,
    groupwise_loss,
    masked_nll,
    masks_at,
    score_entropy,
    token_nll,
)
from optim import MuonAdamW, learning_rates, make_optimizer, set_learning_rates
from orders import OrderConfig, orders_at, philox_bits
from runtime import Processes, autocast, pick_dtype, processes, run_script

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
    with processes(config.train.device) as procs:
        return train(config, procs)


def plot(arguments: list[str]) -> int:
    """`--plot RUN [RUN ...]`: draw runs against each other."""
    import tyro

    a = tyro.cli(PlotArguments, args=arguments, prog="train.py", description="Draw runs against each other.")
    if not a.plot:
        raise ValueError("--plot needs run folders, e.g. python train.py --plot out/one out/other")
    plot_runs(list(a.plot), a.plot_out, a.plot_x)
    print(f"wrote {a.plot_out}")
    return 0


@dataclass
class Progress:
    """Where the run stands; everything else that changes is in the model, the averaged weights and the optimizer."""

    step: int = 0
    best: dict = field(default_factory=lambda: {"step": None, "loss": math.inf})
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """What a checkpoint holds: everything that training changes."""

    model: AOGPT
    ema: EMA
    optimizer: torch.optim.AdamW | MuonAdamW
    progress: Progress


def train(config: Config, procs: Processes) -> int:
    data, held_out = open_data(config, procs)
    say = print if procs.main else (lambda *_, **__: None)
    stop = StopRequest(procs)
    state = start(config, data, procs, say)
    progress = state.progress
    if progress.step >= config.train.steps:
        return already_finished(config, procs, progress, say)
    introduce(config, data, state.model, procs, say)

    log = Log(config, procs, state.model, progress)
    with compiled(state.model, config, procs):
        saved = train_steps(config, procs, state, data, held_out, stop, log)
    log.close()
    return finish(config, procs, progress, saved, say)


def train_steps(config: Config, procs: Processes, state: State, data, held_out, stop: StopRequest, log: Log):
    """Train until the last step, or until asked to stop. Returns the last checkpoint's path; None if not written."""
    progress, saved = state.progress, None
    parallel = DistributedDataParallel(state.model) if procs.world_size > 1 else state.model
    while progress.step < config.train.steps and not stop.agreed:
        loss, norm = train_step(progress.step, parallel, state.optimizer, data, config, procs, stop)
        update(state, loss, norm)
        log.training(loss, norm, learning_rates(progress.step - 1, config))
        if progress.skipped_in_a_row >= config.train.max_skipped_steps:
            log.close()
            raise ValueError(non_finite_message(config, progress))

        last = progress.step == config.train.steps
        better, best_before = False, progress.best
        if held_out and (last or progress.step % config.eval.interval == 0):
            better = evaluate(state.model, state.ema, held_out, config, procs, progress, log)
        if better or last or stop.agreed or progress.step % config.checkpoint.interval == 0:
            saved = save(config, procs, state, data.meta, better, log)
            if saved is None:
                progress.best = best_before
            log.restart_clock()
    return saved


# ---- one step --------------------------------------------------------------------------------------------------------


def train_step(step: int, model, optimizer, data: TokenDataset, config: Config, procs: Processes, stop) -> tuple:
    """Gradients of the global batch of `step`, clipped. Returns (loss, gradient norm), the same on every process.

    The global batch is cut into micro-batches first and among processes second, so which sequences and orders it holds
    depends on neither.
    """
    t, device = config.train, procs.device
    length = tokens_of(config, range(step, step + 1)) // t.batch_size
    if config.model.dropout:  # dropout, too, follows from the step alone
        torch.manual_seed(int(philox_bits(config.seed, step, range(procs.rank, procs.rank + 1), 1)[0, 0]))
    set_learning_rates(optimizer, learning_rates(step, config))
    micro_steps = t.batch_size // (t.micro_batch_size * procs.world_size)
    total = torch.zeros((), device=device)
    for micro in range(micro_steps):
        first = (micro * procs.world_size + procs.rank) * t.micro_batch_size
        rows = range(first, first + t.micro_batch_size)
        tokens = data.batch(config.seed, step, rows, t.batch_size)[:, :length].to(device)
        synchronise = procs.world_size == 1 or micro == micro_steps - 1
        with contextlib.nullcontext() if synchronise else model.no_sync():
            with autocast(device, pick_dtype(t.dtype, device)):
                loss = training_loss(model, tokens, step, rows, config) / micro_steps
            loss.backward()
        total += loss.detach()
    clip = config.optim.grad_clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return stop.agree(total.item()), norm.item()


def training_loss(model, tokens: torch.Tensor, step: int, rows: range, config: Config) -> torch.Tensor:
    """Mean loss of tokens (B, T), the sequences `rows` of the global batch of `step`, nats per token."""
    objective, length = config.objective, tokens.shape[1]
    if objective.kind in DECODER_OBJECTIVES:
        order_config, group = config.stage(step)
        order = orders_at(order_config, config.seed, step, rows, length).to(tokens.device)
        if objective.kind == "groupwise":
            return groupwise_loss(model, tokens, order, group)
        return ao_ar_loss(model, tokens, order)
    masks = masks_at(objective, config.seed, step, rows, config.train.batch_size, length).to(tokens.device)
    if objective.kind == "score_entropy":
        return score_entropy(model, tokens, masks, config.model.mask_token).mean()
    return masked_nll(model, tokens, masks).mean()


def update(state: State, loss: float, norm: float) -> None:
    """End a step: move the weights and their average by its gradients, unless these are not finite."""
    progress = state.progress
    if math.isfinite(loss) and math.isfinite(norm):
        state.optimizer.step()
        state.ema.update(state.model)
        progress.skipped_in_a_row = 0
    else:
        progress.skipped += 1
        progress.skipped_in_a_row += 1
    state.optimizer.zero_grad(set_to_none=True)
    progress.step += 1


class StopRequest:
    """SIGTERM or SIGINT on any process, agreed on by all, so that all stop after the same step."""

    def __init__(self, procs: Processes):
        self.procs, self.signalled, self.agreed = procs, False, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        if self.signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the step
        self.signalled = True

    def agree(self, loss: float) -> float:
        """Mean loss over processes; sets `agreed` when any process was asked to stop. One small CPU reduction."""
        if self.procs.world_size == 1:
            self.agreed = self.signalled
            return loss
        shared = torch.tensor([loss / self.procs.world_size, float(self.signalled)], dtype=torch.float64)
        dist.all_reduce(shared)
        self.agreed = bool(shared[1] > 0)
        return float(shared[0])


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(model, ema: EMA, held_out: TokenDataset, config: Config, procs, progress: Progress, log: Log) -> bool:
    """Validation losses of the averaged and of the last weights. Returns whether the averaged ones are at their best
    under the run's own order distribution."""
    kinds = ["l2r"] if config.model.attention == "causal" else ["random"]
    if config.model.target != "none":
        kinds.append("random")
    goal = config.stage(config.train.steps)[0].kind  # a schedule is judged by where it leads, from the first step on
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


def validation(model, held_out: TokenDataset, kind: str, config: Config, procs: Processes) -> tuple[float, list]:
    """Mean nats per token of the first eval.sequences blocks, each under one order that never changes, and the curve of
    these losses by step: at most CURVE_POINTS means over equal parts of the order (see metrics.py)."""
    order_config = config.stage(config.train.steps)[0] if kind == "fixed" else OrderConfig(kind=kind)
    count, size = min(config.eval.sequences, held_out.num_blocks), config.train.micro_batch_size
    share, total = procs.share(count), 0.0
    sums = torch.zeros(2, min(CURVE_POINTS, config.model.block_size), dtype=torch.float64)  # of losses, and how many
    for start in range(share.start, share.stop, size):
        rows = range(start, min(start + size, share.stop))
        tokens = held_out.blocks(list(rows)).to(procs.device)
        with autocast(procs.device, pick_dtype(config.train.dtype, procs.device)):
            nll = token_nll(model, tokens, order_config, config.seed, 0, rows, count).cpu()
        total += float(nll.mean(dim=1).sum())
        sums += by_step(nll, order_config, config, rows, count, sums.shape[1])
    totals, sums = zip(*procs.gather((total, sums)), strict=True)
    losses, counts = sum(sums).tolist()
    return sum(totals) / count, [x / n if n else None for x, n in zip(losses, counts, strict=True)]


def by_step(nll: torch.Tensor, orders: OrderConfig, config: Config, rows: range, total: int, points: int):
    """Sums of the losses by the share of the sequence that is known, and their numbers: (2, points), float64.

    nll: (B, T), what `token_nll` gave for the sequences `rows`. The step of a token is the number of known tokens. An
    encoder has no order, but its masked tokens have all the others as context: at step i a uniformly random set of i,
    as a random order of a decoder has.
    """
    length, sums = nll.shape[1], torch.zeros(2, points, dtype=torch.float64)
    if config.model.attention == "full":
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
    held_out = TokenDataset(config.data.folder, "val", size, verify=verify) if config.eval.interval else None
    check_fits(config, data, procs)
    return data, held_out


def start(config: Config, data: TokenDataset, procs: Processes, say) -> State:
    """The run's state: new, started from other weights, or as its newest checkpoint left it."""
    torch.manual_seed(config.seed)
    model = AOGPT(config.model).to(procs.device)
    if config.train.init_from and not checkpoint.find(config.run_folder):
        checkpoint.initialise(model, checkpoint.load_model(config.train.init_from, device=procs.device))
        say(f"started from the weights of {config.train.init_from}")
    ema = EMA(model, config.optim.ema_decay)
    optimizer = make_optimizer(model, config)
    progress = resume(config, data.meta, model, ema, optimizer, procs.main, say)
    if len(set(procs.gather(progress.step))) > 1:
        raise ValueError(
            f"the processes see different checkpoints in {config.run_folder}; put --out on a disk that all share"
        )
    return State(model, ema, optimizer, progress)


def already_finished(config: Config, procs: Processes, progress: Progress, say) -> int:
    folder = config.run_folder
    if procs.main and not (folder / "loss.png").exists():
        plot_losses(folder)
    say(f"{folder} is finished at step {progress.step}; give more --train.steps to go on, or another --name")
    return 0


def introduce(config: Config, data: TokenDataset, model: AOGPT, procs: Processes, say) -> None:
    """Write the run's configuration and say what is about to be trained, on how much."""
    folder, t, size = config.run_folder, config.train, config.model.block_size
    if procs.main:
        checkpoint.write_atomically(folder / "config.toml", lambda f: f.write(configuration.to_toml(config).encode()))
    counts = model.num_params()
    say(f"parameters: {sum(counts.values()):,} (" + ", ".join(f"{k} {v:,}" for k, v in counts.items()) + ")")
    say(f"{data.num_blocks:,} blocks of {size} tokens, {t.batch_size * size:,} tokens a step, ", end="")
    say(f"{t.steps * t.batch_size / data.num_blocks:.2f} epochs; run folder {folder}")
    if config.data.random_length_prob:
        say(f"{config.data.random_length_prob:.2%} of the steps at a random length below that")


def finish(config: Config, procs: Processes, progress: Progress, saved: Path | None, say) -> int:
    """Draw the curve and say how the run ended. Raises CheckpointError if its last checkpoint was not written."""
    if procs.main:
        plot_losses(config.run_folder)
    if saved is None:
        raise CheckpointError("the last checkpoint could not be written (see above); free some space and start again")
    if progress.step < config.train.steps:
        say(f"stopped at step {progress.step} and saved {saved}; the same command goes on from there")
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
        raise ValueError("train.compile needs a C++ compiler on a CPU and there is none; pass --train.no-compile")
    model.compile(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=4 * LENGTHS):
        yield


def resume(config: Config, data_meta: dict, model, ema: EMA, optimizer, main: bool, say) -> Progress:
    """Load the run's newest readable checkpoint, if it has one, and say what has changed since."""
    found = checkpoint.read_newest(config.run_folder)
    if found is None:
        return Progress()
    path, state = found
    old = configuration.from_dict(state["config"], str(path))
    for key, (before, after) in configuration.differences(old, config).items():
        if key.startswith("model.") or key == "optim.kind":
            what = "architecture" if key.startswith("model.") else "optimizer"
            raise ValueError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it is {after!r}: the {what} "
                "of a run cannot change; set it back, or start another run with --name"
            )
        say(f"changed since {path}: {key} = {after!r} (was {before!r})")
    if state["data"]["tokenizer"] != data_meta["tokenizer"]:
        raise ValueError(
            f"{config.run_folder} was trained on {state['data']['tokenizer']} tokens, but {config.data.folder} holds "
            f"{data_meta['tokenizer']} tokens; use the data it was trained on, or start another run with --name"
        )
    if state["data"]["splits"]["train"]["sha256"] != data_meta["splits"]["train"]["sha256"]:
        say(f"changed since {path}: the training data in {config.data.folder}")
    checkpoint.copy_parameters(model, state["model"])
    for name, average in ema.weights.items():
        average.copy_(state["ema"]["weights"][name])
    ema.updates = state["ema"]["updates"]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)  # the configuration rules, not the checkpoint
    if main:
        checkpoint.finish_interrupted_save(config.run_folder, state, path, config.checkpoint.keep)
    say(f"resumed from {path}")
    return Progress(**{key: state[key] for key in ("step", "best", "skipped", "skipped_in_a_row")})


def save(config: Config, procs, state: State, data_meta: dict, better: bool, log: Log):
    """Write a checkpoint on the main process. Returns its path; None, after a warning, when it could not be written."""
    path, progress = None, state.progress
    if procs.main:
        contents = checkpoint.training_state(
            progress.step,
            state.model,
            state.ema,
            state.optimizer,
            configuration.to_dict(config),
            data_meta,
            progress.best,
        ) | {"skipped": progress.skipped, "skipped_in_a_row": progress.skipped_in_a_row}
        try:
            path = checkpoint.save(config.run_folder, contents, config.checkpoint.keep, better)
        except CheckpointError as error:
            log.warn(str(error))
    return procs.gather(path)[0]


def non_finite_message(config: Config, progress: Progress) -> str:
    good = checkpoint.find(config.run_folder, up_to=progress.step)
    where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
    return (
        f"loss or gradient was not finite {progress.skipped_in_a_row} steps in a row, up to step {progress.step}; "
        f"{where}. Lower --optim.lr, or set --optim.grad-clip, and start again"
    )


if __name__ == "__main__":
    run_script(main)
