"""The modes of generation as scripts offer them: their options, their plans, and samples that follow from a seed alone.

`options` is a script's arguments (or a part of them): a dataclass that has the fields named in each docstring.

Shapes: B samples, T positions of the longest.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from model import AOGPT, ModelConfig
from runtime.processes import Processes
from sampling.engine import Generation, TokenChoice, generate
from sampling.plans import Plan, adaptive_plan, l2r_plan, mdm_plan, random_plan, speculative_plan

Mode = Literal["mdm", "even", "l2r", "random", "adaptive", "speculative"]

# The options that only some modes have: their defaults there, and these modes.
MODE_OPTIONS = {
    "steps": (None, ("mdm", "even")),
    "schedule": ("linear", ("mdm", "even")),
    "group_size": (1, ("l2r", "random", "adaptive")),
    "reveal_by": ("confidence", ("adaptive",)),
    "draft": (8, ("speculative",)),
    "order": ("random", ("speculative",)),
}
LEAST = {"num_samples": 1, "batch_size": 1, "length": 1, "steps": 1, "group_size": 1, "draft": 2}


def with_defaults(options):
    """The options with the defaults of their mode. ValueError for what has no meaning or is out of range.

    options: `mode`, every name in MODE_OPTIONS and LEAST, `seed` and `noise`.
    """
    defaults = {}
    for name, (default, modes) in MODE_OPTIONS.items():
        if options.mode in modes:
            defaults[name] = default if getattr(options, name) is None else getattr(options, name)
        elif getattr(options, name) is not None:
            raise ValueError(
                f"{flag(name)} has no meaning with --mode {options.mode}: leave it out, or take --mode "
                f"{' or '.join(modes)}"
            )
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= 2**31:
            raise ValueError(f"{flag(name)} is {value}; give at least {least} (and at most 2**31)")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}; give an integer from 0 to 2**63 - 1")
    if options.mode == "speculative" and options.noise != "float64":
        raise ValueError(
            f"--noise {options.noise} has no meaning with --mode speculative, which draws exactly; leave it out"
        )
    return dataclasses.replace(options, **defaults)


def flag(name: str) -> str:
    """A field's name on the command line."""
    return "--" + name.replace("_", "-")


def with_steps(options, contexts: list[list[int | None]]):
    """The options with the steps that modes which have them take by default: one per token of the longest request.

    contexts: as in `draw`.
    """
    if options.steps or options.mode not in MODE_OPTIONS["steps"][1]:
        return options
    return dataclasses.replace(options, steps=max(context.count(None) for context in contexts))


def check_model(options, config: ModelConfig) -> None:
    """ValueError if the model cannot generate so. options: `mode` and `group_size`, with defaults."""
    if (
        config.attention == "causal"
        and config.target == "none"
        and (options.mode != "l2r" or options.group_size > 1)
    ):
        what = (
            f"--group-size {options.group_size}"
            if options.mode == "l2r"
            else f"--mode {options.mode}"
        )
        raise ValueError(
            f"{what} needs a model that is told its target position; this one takes --mode l2r, group size 1"
        )
    if options.mode == "speculative" and config.is_encoder:
        raise ValueError(
            "--mode speculative needs causal attention, and this model has full attention; take another mode"
        )


# ---- all the randomness, whatever the batches and processes ----------------------------------------------------------


def draw(options, contexts: list[list[int | None]]) -> tuple[Plan, Tensor, Tensor]:
    """Plan, given tokens (B, T) and uniform numbers (B, T) of all samples, `num_samples` in a row for each context.

    Args:
        options: `seed`, `num_samples`, and what `make_plan` asks for.
        contexts: the tokens of a sample, None where they are to be generated.
    """
    options, generator = with_steps(options, contexts), torch.Generator().manual_seed(options.seed)
    length = torch.tensor([len(context) for context in contexts])
    tokens = pad_sequence([torch.tensor([t or 0 for t in c]) for c in contexts], batch_first=True)
    given = pad_sequence(
        [torch.tensor([t is not None for t in c]) for c in contexts], batch_first=True
    )
    length, tokens, given = (
        v.repeat_interleave(options.num_samples, dim=0) for v in (length, tokens, given)
    )
    plan = make_plan(options, length, given, generator)
    return plan, tokens, torch.rand(tokens.shape, generator=generator, dtype=torch.float64)


def make_plan(options, length: Tensor, given: Tensor, generator: torch.Generator) -> Plan:
    """The plan of a mode.

    Args:
        options: `mode` and every name in MODE_OPTIONS, with defaults and steps.
        length: LongTensor (B,). given: BoolTensor (B, T).
    """
    B, a = len(length), options
    match a.mode:
        case "mdm" | "even":
            return mdm_plan(
                B, length, a.steps, generator, given, even=a.mode == "even", schedule=a.schedule
            )
        case "l2r":
            return l2r_plan(B, length, given, a.group_size)
        case "random":
            return random_plan(B, length, generator, given, a.group_size)
        case "adaptive":
            return adaptive_plan(B, length, a.reveal_by, generator, given, a.group_size)
        case "speculative":
            return speculative_plan(
                B, length, a.draft, generator if a.order == "random" else None, given
            )


def generate_shared(
    model: AOGPT,
    drawn: tuple[Plan, Tensor, Tensor],
    choice: TokenChoice,
    vocab_size: int,
    procs: Processes,
    *,
    batch_size: int,
    compile: bool = False,
    label: str | None = None,
) -> list[Generation]:
    """Generate what `draw` gave, every process its share; the parts in order, on every process.

    label: before the progress bar. Raises ValueError as `decode.generate` does.
    """
    plan, tokens, uniforms = drawn
    own = procs.share(len(plan))
    rows, parts = slice(own.start, own.stop), []
    quiet = None if procs.main else True
    total = int(plan[rows].revealed().sum())
    with tqdm(total=total, unit="token", desc=label, disable=quiet, leave=False) as bar:
        if own:  # with more processes than samples, some have none
            options = {"choice": choice, "vocab_size": vocab_size, "batch_size": batch_size}
            options |= {"compile": compile, "progress": bar.update}
            parts = [_generate(model, plan[rows], tokens[rows], uniforms=uniforms[rows], **options)]
    return sum(procs.gather(parts), [])


def _generate(*arguments, **options) -> Generation:
    try:
        return generate(*arguments, **options)
    except (
        ValueError
    ) as error:  # too little memory: the engine knows what would fit, but not the option's name
        raise ValueError(str(error).replace("a batch size of ", "--batch-size ")) from error


def rows_of(parts: list[Generation]) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, steps and log-probabilities of each sample, as long as it is."""
    rows = [
        row
        for p in parts
        for row in zip(p.tokens, p.step, p.log_probs, p.length.tolist(), strict=True)
    ]
    return [tuple(v[:length].tolist() for v in values) for *values, length in rows]
