"""What a run prints when it begins and when it ends."""

import shlex
from collections.abc import Iterator

from ..checkpoints import store
from ..data.loader import TokenDataset
from ..runtime.command_line import counted
from ..systems import parameter_counts
from .checkpoint import Progress, State
from .config import Config


def first_lines(config: Config, state: State, data: TokenDataset) -> Iterator[str]:
    """Yield the size of the model, the data, the folder of the run, and notes."""
    t = config.train
    counts = parameter_counts(state.model)
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items())
    yield f"parameters: {sum(counts.values()):,} ({parts})"
    amount = f"{t.batch_size * data.block_size:,} tokens"
    if data.of_records:
        amount = f"{t.batch_size} examples"
    left = t.steps - state.progress.step
    epochs = (state.progress.sequences + left * t.batch_size) / data.num_blocks
    yield (
        f"{counted(data.num_blocks, 'blocks')} of {data.block_size} tokens, {amount} a "
        f"step, {epochs:.3g} epochs; run folder {config.run_folder}"
    )
    yield from data.meta.get("notes", [])
    yield from notes_on_records(config, data)


def notes_on_records(config: Config, data: TokenDataset) -> Iterator[str]:
    """Yield notes for a run on records: on ends that other orders than left to right
    do not learn, and on a model that cannot see where a record begins."""
    m = config.model
    orders, _ = config.last_stage()
    if "lengths" not in data.meta["splits"][data.split]:
        return
    if not data.end_given and not m.l2r_only and not orders.is_l2r:
        yield (
            "note: samples of this run end from left to right alone (--until-end); set "
            "data.end = 'given' to have records that end in any order"
        )
    hides_beginning = m.is_encoder or m.target == "mask_query" or m.start == "hidden"
    if m.position == "rotary" and hides_beginning:
        yield (
            "note: with rotary positions alone this model knows distances between "
            "tokens, not where a record begins: set model.position = 'both'"
        )


def last_line(
    config: Config, progress: Progress, first_step: int, predicts_end: bool
) -> str:
    """Return what was trained, the best checkpoint, and what comes next. first_step:
    where this start of the run began. predicts_end: whether its data are records whose
    end the model predicts, as one more token."""
    folder = config.run_folder
    step = progress.step
    skipped = ""
    if progress.skipped:
        skipped = f", {progress.skipped} of them skipped (loss or gradient not finite)"
    best = "no checkpoint has a finite validation loss"
    if progress.best is not None:
        loss = progress.best["loss"]
        best = f"best: step {progress.best['step']} (validation loss {loss:.4f})"
    elif not config.eval.interval:
        best = "not validated (eval.interval = 0)"
    if step < config.train.steps:
        return (
            f"stopped at step {step}{skipped} and saved {store.path_of(folder, step)}; "
            f"{best}; run the same command to continue"
        )
    verb = "had finished" if step == first_step else "finished"
    return (
        f"{verb} {step} steps{skipped}; {best}; next: python sample.py {folder} "
        f"{sample_options(config, predicts_end)}, or more --train.steps"
    )


def sample_options(config: Config, predicts_end: bool) -> str:
    """Return the options with which sample.py shows best what a run has learnt."""
    orders, _ = config.last_stage()
    if predicts_end:
        return '--mode l2r --prompt "..." --until-end'
    sharper = "--temperature 0.7 --top-p 0.9"
    if config.model.is_encoder or config.model.l2r_only:
        return sharper
    if orders.is_any_order or orders.is_l2r:
        return f"--mode l2r {sharper}"  # reads best
    return f"--mode {shlex.quote(orders.option)} {sharper}"  # it knows no other orders
