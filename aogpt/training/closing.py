"""What a run prints when it ends."""

import shlex

from ..checkpoints import store
from .checkpoint import Progress
from .config import Config


def closing_lines(
    config: Config, progress: Progress, first_step: int, of_records: bool
) -> str:
    """Return two lines for the end of a run: its newest and best checkpoint, and what
    was trained and what comes next. first_step: where this start of it began.
    of_records: whether its data has prompts."""
    folder = config.run_folder
    step = progress.step
    skipped = ""
    if progress.skipped:
        skipped = f", {progress.skipped} of them skipped (loss or gradient not finite)"
    if step < config.train.steps:
        end = (
            f"stopped at step {step}{skipped} and saved {store.path_of(folder, step)}; "
            "run the same command to continue"
        )
    else:
        end = f"finished {step} steps{skipped}"
        more = "more --train.steps"
        if step == first_step:
            end = f"{folder} was finished before, at step {step}: no step trained"
            more += " or another --name"
        options = sample_options(config, of_records)
        end += f"; next: python sample.py {folder} {options}, or {more}"
    return f"{newest_and_best(progress)}\n{end}"


def sample_options(config: Config, of_records: bool) -> str:
    """Return the options with which sample.py shows best what a run has learnt."""
    orders, _ = config.last_stage()
    if of_records:
        return '--mode l2r --prompt "..." --until-end'
    sharper = "--temperature 0.7 --top-p 0.9"
    if config.model.is_encoder or config.model.l2r_only:
        return sharper
    if orders.is_any_order or orders.is_l2r:
        return f"--mode l2r {sharper}"  # reads best
    return f"--mode {shlex.quote(orders.option)} {sharper}"  # it knows no other orders


def newest_and_best(progress: Progress) -> str:
    """Return which checkpoints the end of a run leaves: the newest and the best."""
    best = progress.best
    newest = f"step {progress.step}"
    if best is None:
        return f"newest checkpoint: {newest}; none has a finite validation loss"
    loss = f"(validation loss {best['loss']:.4f})"
    if best["step"] == progress.step:
        return f"the newest checkpoint, {newest} {loss}, is the best"
    return (
        f"newest checkpoint: {newest}, which scripts use; best: step {best['step']} "
        f"{loss}, --checkpoint best"
    )
