"""Train an AO-GPT, alone or under torchrun.

    python train.py configs/quickstart.toml
    torchrun --nproc_per_node=8 train.py configs/aogpt_small.toml --optim.lr 3e-4

The first argument is a config file; every key of it can be overridden. The run lives in OUT/NAME. Started again with
the same command, it goes on from its newest checkpoint and gives the same weights as if it had never stopped. SIGTERM
and Ctrl-C finish the step, save and exit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
import config as configuration
from checkpoint import EMA, CheckpointError
from config import Config
from data.loader import TokenDataset
from model import AOGPT
from objectives import (
    DECODER_OBJECTIVES,
    ao_ar_loss,
    groupwise_loss,
    held_out_nll,
    masked_nll,
    masks_at,
    score_entropy,
)
from orders import OrderConfig, orders_at, philox_bits
from runtime import Processes, autocast, peak_flops, pick_dtype, processes, run_script, to_json


def main() -> int:
    config = configuration.from_command_line(sys.argv[1:], __doc__)
    with processes(config.train.device) as procs:
        return train(config, procs)


@dataclass
class Progress:
    """Where the run stands; everything else that changes is in the model, the averaged weights and the optimizer."""

    step: int = 0
    best: dict = field(default_factory=lambda: {"step": None, "loss": math.inf})
    skipped: int = 0
    skipped_in_a_row: int = 0


def train(config: Config, procs: Processes) -> int:
    folder = config.run_folder
    data = TokenDataset(config.data.folder, "train", config.model.block_size, verify=config.data.verify)
    held_out = None
    if config.eval.interval:
        held_out = TokenDataset(config.data.folder, "val", config.model.block_size, verify=config.data.verify)
    check_fits(config, data, procs)
    say = print if procs.main else (lambda *_, **__: None)
    stop = StopRequest(procs)

    torch.manual_seed(config.seed)
    model = AOGPT(config.model).to(procs.device)
    if config.train.init_from and not checkpoint.find(folder):
        checkpoint.initialise(model, checkpoint.load_model(config.train.init_from, device=procs.device))
        say(f"started from the weights of {config.train.init_from}")
    ema = EMA(model, config.optim.ema_decay)
    optimizer = make_optimizer(model, config)
    progress = resume(config, data.meta, model, ema, optimizer, procs.main, say)
    if len(set(procs.gather(progress.step))) > 1:
        raise ValueError(f"the processes see different checkpoints in {folder}; put --out on a disk that all share")
    if progress.step >= config.train.steps:
        if procs.main and not (folder / "loss.png").exists():
            plot_losses(folder)
        say(f"{folder} is finished at step {progress.step}; give more --train.steps to go on, or another --name")
        return 0
    if procs.main:
        checkpoint.write_atomically(folder / "config.toml", lambda f: f.write(configuration.to_toml(config).encode()))
    counts = model.num_params()
    say(f"parameters: {sum(counts.values()):,} (" + ", ".join(f"{k} {v:,}" for k, v in counts.items()) + ")")
    tokens_per_step = config.train.batch_size * config.model.block_size
    say(f"{data.num_blocks:,} blocks of {config.model.block_size} tokens, {tokens_per_step:,} tokens a step, ", end="")
    say(f"{config.train.steps * config.train.batch_size / data.num_blocks:.2f} epochs; run folder {folder}")

    if config.train.compile:
        compile_model(model, procs)
    parallel = DistributedDataParallel(model) if procs.world_size > 1 else model
    log = Log(config, procs, model, progress)
    saved = None
    while progress.step < config.train.steps and not stop.agreed:
        loss, norm = train_step(progress.step, parallel, optimizer, data, config, procs, stop)
        if math.isfinite(loss) and math.isfinite(norm):
            optimizer.step()
            ema.update(model)
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        log.training(loss, norm, optimizer.param_groups[0]["lr"])
        if progress.skipped_in_a_row >= config.train.max_skipped_steps:
            log.close()
            raise ValueError(non_finite_message(config, progress))

        last = progress.step == config.train.steps
        better, best_before = False, progress.best
        if held_out and (last or progress.step % config.eval.interval == 0):
            better = evaluate(model, ema, held_out, config, procs, progress, log)
        if better or last or stop.agreed or progress.step % config.checkpoint.interval == 0:
            saved = save(config, procs, progress, model, ema, optimizer, data.meta, better, log)
            if saved is None:
                progress.best = best_before
            log.restart_clock()
    log.close()
    if procs.main:
        plot_losses(folder)
    if saved is None:
        raise CheckpointError("the last checkpoint could not be written (see above); free some space and start again")
    if progress.step < config.train.steps:
        say(f"stopped at step {progress.step} and saved {saved}; the same command goes on from there")
    else:
        say(f"finished {progress.step} steps; next: python sample.py {folder}")
    return 0


# ---- one step --------------------------------------------------------------------------------------------------------


def train_step(step: int, model, optimizer, data: TokenDataset, config: Config, procs: Processes, stop) -> tuple:
    """Gradients of the global batch of `step`, clipped. Returns (loss, gradient norm), the same on every process.

    The global batch is cut into micro-batches first and among processes second, so which sequences and orders it holds
    depends on neither.
    """
    t, device = config.train, procs.device
    if config.model.dropout:  # dropout, too, follows from the step alone
        torch.manual_seed(int(philox_bits(config.seed, step, range(procs.rank, procs.rank + 1), 1)[0, 0]))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
    micro_steps = t.batch_size // (t.micro_batch_size * procs.world_size)
    total = torch.zeros((), device=device)
    for micro in range(micro_steps):
        first = (micro * procs.world_size + procs.rank) * t.micro_batch_size
        rows = range(first, first + t.micro_batch_size)
        tokens = data.batch(config.seed, step, rows, t.batch_size).to(device)
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
    """Mean loss of the sequences `rows` of the global batch of `step`, nats per token."""
    objective, length = config.objective, config.model.block_size
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


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine from lr to lr * min_lr_ratio at the end of the run."""
    o = config.optim
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    done = (step - o.warmup_steps) / max(1, config.train.steps - o.warmup_steps)
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(model: AOGPT, config: Config) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    o = config.optim
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)


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
    """Validation losses of the averaged weights. Returns whether the run's own order distribution is at its best."""
    kinds = ["l2r"] if config.model.attention == "causal" else ["random"]
    if config.model.target != "none":
        kinds.append("random")
    goal = config.stage(config.train.steps)[0].kind  # a schedule is judged by where it leads, from the first step on
    if goal.startswith("fixed"):
        kinds.append("fixed")
    with ema.applied(model):
        model.eval()
        losses = {kind: validation_loss(model, held_out, kind, config, procs) for kind in kinds}
        model.train()
    own = {"l2r": "l2r", "random": "random", "mixture": "random"}.get(goal, "fixed")
    loss = losses.get(own, losses[kinds[0]])
    better = loss < progress.best["loss"]
    if better:
        progress.best = {"step": progress.step, "loss": loss}
    log.validation(losses)
    return better


def validation_loss(model, held_out: TokenDataset, kind: str, config: Config, procs: Processes) -> float:
    """Mean nats per token of the first eval.sequences blocks, each under one order that never changes."""
    order_config = config.stage(config.train.steps)[0] if kind == "fixed" else OrderConfig(kind=kind)
    count, size = min(config.eval.sequences, held_out.num_blocks), config.train.micro_batch_size
    share, total = procs.share(count), 0.0
    for start in range(share.start, share.stop, size):
        rows = range(start, min(start + size, share.stop))
        tokens = held_out.blocks(list(rows)).to(procs.device)
        with autocast(procs.device, pick_dtype(config.train.dtype, procs.device)):
            total += float(held_out_nll(model, tokens, order_config, config.seed, 0, rows, count).sum())
    return sum(procs.gather(total)) / count


# ---- starting, resuming, saving --------------------------------------------------------------------------------------


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


def compile_model(model: AOGPT, procs: Processes) -> None:
    if procs.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ValueError("train.compile needs a C++ compiler on a CPU and there is none; pass --train.no-compile")
    model.compile(dynamic=False)


def resume(config: Config, data_meta: dict, model, ema: EMA, optimizer, main: bool, say) -> Progress:
    """Load the run's newest readable checkpoint, if it has one, and say what has changed since."""
    found = checkpoint.read_newest(config.run_folder)
    if found is None:
        return Progress()
    path, state = found
    old = configuration.from_dict(state["config"], str(path))
    for key, (before, after) in configuration.differences(old, config).items():
        if key.startswith("model."):
            raise ValueError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it is {after!r}: the architecture "
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


def save(config: Config, procs, progress: Progress, model, ema, optimizer, data_meta, better: bool, log: Log):
    """Write a checkpoint on the main process. Returns its path; None, after a warning, when it could not be written."""
    path = None
    if procs.main:
        state = checkpoint.training_state(
            progress.step, model, ema, optimizer, configuration.to_dict(config), data_meta, progress.best
        ) | {"skipped": progress.skipped, "skipped_in_a_row": progress.skipped_in_a_row}
        try:
            path = checkpoint.save(config.run_folder, state, config.checkpoint.keep, better)
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


# ---- reporting -------------------------------------------------------------------------------------------------------


class Log:
    """metrics.jsonl, the progress bar and Weights & Biases, on the main process only."""

    def __init__(self, config: Config, procs: Processes, model: AOGPT, progress: Progress):
        self.config, self.procs, self.progress, self.active = config, procs, progress, procs.main
        self.path = config.run_folder / "metrics.jsonl"
        dtype = pick_dtype(config.train.dtype, procs.device)
        self.flops = model.flops_per_token(config.model.block_size)
        self.peak = peak_flops(procs.device, dtype)
        self.wandb, self.warned = None, False
        self.clock, self.clock_step = time.perf_counter(), progress.step
        if not self.active:
            return
        drop_later_lines(self.path, progress.step)
        if config.wandb.mode != "disabled":
            self.wandb = start_wandb(config)
        self.bar = tqdm(total=config.train.steps, initial=progress.step, unit="step", disable=None, dynamic_ncols=True)

    def training(self, loss: float, norm: float, lr: float) -> None:
        step = self.progress.step
        if not self.active:
            return
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        if step % self.config.train.log_interval and step != self.config.train.steps and math.isfinite(loss + norm):
            return
        steps, seconds = step - self.clock_step, time.perf_counter() - self.clock
        tokens_per_step = self.config.train.batch_size * self.config.model.block_size
        speed = tokens_per_step * steps / seconds if steps else None
        mfu = self.flops * speed / (self.peak * self.procs.world_size) if self.peak and speed else "unknown"
        self._write(
            {
                "step": step,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "tokens": step * tokens_per_step,
                "tokens_per_second": speed,
                "mfu": mfu,
                "skipped_steps": self.progress.skipped,
            }
        )
        if not sys.stderr.isatty():
            percent = mfu if mfu == "unknown" else f"{mfu:.1%}"
            rest = f", {speed:,.0f} tokens/s, MFU {percent}" if speed else ""
            print(f"step {step}: loss {loss:.4f}{rest}", flush=True)
        self.restart_clock()

    def validation(self, losses: dict[str, float]) -> None:
        if self.active:
            text = ", ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items())
            self._say(f"step {self.progress.step}: validation {text} nats per token (averaged weights)")
            self._write({"step": self.progress.step} | {f"val_loss_{kind}": loss for kind, loss in losses.items()})
        self.restart_clock()

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}", file=sys.stderr)

    def close(self) -> None:
        if self.active:
            self.bar.close()
            if self.wandb:
                self.wandb.finish()

    def _say(self, text: str, file=None) -> None:
        tqdm.write(text, file=file or sys.stdout)
        sys.stdout.flush()

    def restart_clock(self) -> None:
        self.clock, self.clock_step = time.perf_counter(), self.progress.step

    def _write(self, values: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(to_json(values) + "\n")
        except OSError as error:
            if not self.warned:
                self.warn(f"cannot write {self.path}: {error}; training goes on without it")
            self.warned = True
        if self.wandb:
            numbers = {k: v for k, v in values.items() if k != "step" and isinstance(v, int | float)}
            self.wandb.log(numbers, step=values["step"])


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl, without any that a kill or a full disk cut short."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def drop_later_lines(path: Path, step: int) -> None:
    """Keep the lines of metrics.jsonl up to `step`: the steps after the checkpoint are about to be run again."""
    kept = [to_json(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    if path.exists():
        checkpoint.write_atomically(path, lambda file: file.write("".join(kept).encode()))


def start_wandb(config: Config):
    """Start or continue the Weights & Biases run of this run folder: one id across resumes."""
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb.mode is set but wandb is not installed; pip install wandb, or leave it out") from None
    id_file = config.run_folder / "wandb_id"
    if not id_file.exists():
        checkpoint.write_atomically(id_file, lambda f: f.write(secrets.token_hex(4).encode()))
    try:
        return wandb.init(
            project=config.wandb.project,
            name=config.name,
            id=id_file.read_text(),
            resume="allow",
            mode=config.wandb.mode,
            dir=str(config.run_folder),
            config=asdict(config),
        )
    except wandb.errors.Error as error:
        raise ValueError(f"Weights & Biases did not start: {error}; log in, or pass --wandb.mode offline") from error


def plot_losses(folder: Path) -> None:
    """Draw metrics.jsonl as loss.png: training loss, and validation loss in every order."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    labels = {
        "loss": "training, the run's own orders",
        "val_loss_l2r": "validation, left to right",
        "val_loss_random": "validation, random order",
        "val_loss_fixed": "validation, the run's fixed order",
    }
    for key, label in labels.items():
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            style = {"linewidth": 0.8, "alpha": 0.6} if key == "loss" else {"marker": "o", "markersize": 3}
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = folder / ".loss.png.tmp"
    figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
    os.replace(temporary, folder / "loss.png")


if __name__ == "__main__":
    run_script(main)
