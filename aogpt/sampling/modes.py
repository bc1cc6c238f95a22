"""The modes of generation as scripts offer them: options, plans, and samples from a
seed alone.

Shapes: B samples, T positions of the longest."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..data.tokenizers import Tokenizer
from ..model import AOGPT, ModelConfig
from ..orders import inverse_permutation, orders_at, parse_order
from ..runtime.command_line import visible
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from ..runtime.validation import LARGEST, Count, check_values, flag
from ..scoring import check_boolean
from . import plans
from .ends import cut_at_end
from .engine import Decoder, Generation
from .plans import Plan, Schedule
from .scores import SCORES, Score
from .token_choice import TokenChoice

Mode = Literal[
    "mdm",
    "even",
    "l2r",
    "random",
    "order",
    "adaptive",
    Score,
    "speculative",
]
UnmaskFirst = Literal[Score, "random"]
# The tokens of a sample, None where they are to be generated.
Context = list[int | None]


class ModeOption(NamedTuple):
    """An option that only some modes have."""

    default: Any  # in these modes
    modes: tuple[str, ...]


# Without `steps` a sample takes one for each of its tokens to generate.
MODE_OPTIONS = {
    "steps": ModeOption(None, ("mdm", "even")),
    "schedule": ModeOption("linear", ("mdm", "even")),
    "group_size": ModeOption(1, ("l2r", "random", "order", "adaptive")),
    "unmask_by": ModeOption("confidence", ("adaptive",)),
    "threshold": ModeOption(None, ("adaptive",)),
    "entropy_bound": ModeOption(None, ("adaptive",)),
    "block": ModeOption(None, ("adaptive",)),
    "order": ModeOption(None, ("order", "speculative")),
    "draft": ModeOption(8, ("speculative",)),
}
Bound = Annotated[float, Interval(ge=0)]
RECORDS_NOTE = (
    "note: this run was trained on records: where these have prompts, a sample without "
    "one means nothing (sample.py --prompts DATA)"
)
MOST_AT_ONCE = 1024  # samples that are planned and generated together
BATCH_SIZE = 16  # samples in flight, if the user does not say


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(TokenChoice):
    """The options that say how positions are filled in. Scripts nest them without a
    prefix:
    `decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")]`."""

    mode: Mode | None = None
    """mdm (default; l2r for a plain GPT): masked diffusion, exact: every position
    unmasks at its own random time, drawn from --seed.
    even: a random order in groups of equal size.
    l2r: left to right.
    random: a random order, one group of --group-size after the other.
    order: the same in orders drawn from --order; the default where that is given.
    adaptive: the positions of which the model is most confident first.
    confidence, entropy, margin: adaptive with that as --unmask-by.
    speculative: drafted in parallel, verified in one causal pass; exact as one token a
    step."""
    steps: Count | None = None
    """Steps of mdm and even; by default one per token to generate."""
    schedule: Schedule | None = None
    """Schedule of mdm and even. linear (default): about equally many tokens in every
    step.
    cosine: few at first, many at the end."""
    group_size: Count | None = None
    """Tokens a step of l2r, random, order and adaptive; by default 1.
    With --threshold or --entropy-bound the most of a step; by default any number."""
    unmask_by: UnmaskFirst | None = None
    """adaptive: first where the likeliest token is most probable (default), or the
    entropy least, or the likeliest token furthest above the second, or at random."""
    threshold: Bound | None = None
    """adaptive: in a step all tokens whose confidence or margin is at least this, or
    entropy (nats) at most; one at least."""
    entropy_bound: Bound | None = None
    """adaptive: in a step tokens whose entropies (nats), without the largest, add up to
    at most this (EB-sampler); one at least."""
    block: Count | None = None
    """adaptive: tokens of blocks that are filled in one after the other
    (semi-autoregressive);
    counted from the beginning of a sample, prompt and all."""
    order: str | None = None
    """order, speculative: a distribution over orders, KIND or KIND:setting=value, such
    as slots:block=8: the kinds of order.kind in a training config; by default a
    uniformly random order, as in random."""
    draft: Annotated[int, Interval(ge=2, le=LARGEST)] | None = None
    """speculative: tokens drafted at once; by default 8."""
    batch_size: Count | None = None
    """Samples in flight at once, fewer where memory runs out; by default 16.
    In float32 rounding moved no token of 131,072; in bfloat16 samples depend on
    this."""
    compile: bool = False
    """torch.compile the model: minutes at the start, worth it for many samples. On a
    GPU also take ragged attention and CUDA graphs."""

    def __post_init__(self):
        check_values(self)


def with_mode_defaults(
    options: DecodingOptions,
    l2r_only: bool = False,
    until_end: bool = False,
) -> DecodingOptions:
    """Return the options with the defaults of their mode. Raises UserError for options
    without meaning in the mode, and for values that exclude each other.

    l2r_only: of the model; until_end: samples are cut at their end-of-text. Both matter
    only where no mode is given."""
    mode: str | None = options.mode
    unmask_by: str | None = options.unmask_by
    if mode is None:
        mode = "mdm"
        if options.order is not None:
            mode = "order"
        elif l2r_only or until_end:
            mode = "l2r"
    if mode in get_args(Score):
        if unmask_by not in (None, mode):
            raise UserError(
                f"--mode {mode} says what to unmask by: leave out --unmask-by"
            )
        unmask_by = mode
        mode = "adaptive"
    values: dict[str, Any] = {}
    for name, (default, modes) in MODE_OPTIONS.items():
        value = unmask_by if name == "unmask_by" else getattr(options, name)
        if mode in modes:
            values[name] = default if value is None else value
        elif value is not None:
            offered = list(modes)
            if modes == ("adaptive",) and name != "unmask_by":
                offered += get_args(Score)
            raise UserError(
                f"{flag(name)} has no meaning with --mode {mode}: leave it out, or "
                f"take --mode {' or '.join(offered)}"
            )
    if options.threshold is not None or options.entropy_bound is not None:
        values["group_size"] = options.group_size  # the model chooses how many
    resolved = replace(options, mode=mode, **values)
    check_combination(resolved)
    return resolved


def check_combination(options: DecodingOptions) -> None:
    """Raise UserError for values that exclude each other. options: with the mode's
    defaults."""
    if options.order in SCORES:
        raise UserError(
            f"--order {options.order} is no distribution over orders: take --mode "
            f"{options.order}"
        )
    if options.order is not None:
        parse_order(options.order, "--order")
    if options.unmask_by == "random":
        limits = (options.threshold, options.entropy_bound, options.block)
        if limits != (None, None, None):
            raise UserError(
                "--threshold, --entropy-bound and --block need a score to choose by: "
                "give another --unmask-by"
            )
    elif options.unmask_by is not None and options.threshold is not None:
        plans.check_threshold(options.unmask_by, options.threshold)


def end_note(options: DecodingOptions) -> str:
    """Return a line on samples that are cut at their end-of-text, where positions after
    it can be filled in before those in front of it; "" where they come last. options:
    with the mode's defaults."""
    from_left = options.mode == "l2r" or options.block is not None
    if options.order is not None:
        from_left = parse_order(options.order, "--order").kind == "l2r"
    if from_left:
        return ""
    name = options.mode if options.mode != "adaptive" else options.unmask_by
    return (
        f"note: --mode {name} can fill in what follows the end of a text before the "
        "text, which costs right answers: take --mode l2r, or --mode confidence "
        "--block 4"
    )


def block_note(options: DecodingOptions, longest: int) -> str:
    """Return a line on orders in blocks that are longer than all samples; "" for
    others. longest: tokens of the longest sample."""
    if options.order is None:
        return ""
    orders = parse_order(options.order, "--order")
    if not orders.has_longer_blocks(longest):
        return ""
    return (
        f"note: --order {options.order}: blocks of {orders.block} are longer than the "
        f"samples, {longest} tokens, which are one block each"
    )


def with_default_steps(
    options: DecodingOptions, contexts: list[Context]
) -> DecodingOptions:
    """Return the options with the steps that mdm and even take by default, one per
    token to generate, if that is the same for all contexts."""
    if options.steps is not None or options.mode not in MODE_OPTIONS["steps"].modes:
        return options
    counts = {max(1, context.count(None)) for context in contexts}
    if len(counts) > 1:
        return options
    return replace(options, steps=counts.pop())


def check_mode(options: DecodingOptions, config: ModelConfig) -> None:
    """Raise UserError if a model cannot generate so. options: with the mode's
    defaults."""
    if config.l2r_only and options.mode == "l2r" and options.group_size != 1:
        raise UserError(
            f"--group-size {options.group_size} needs a model that is conditioned on "
            "the target position; this one is a plain GPT: leave it out"
        )
    elif config.l2r_only and options.mode == "adaptive":
        raise UserError(
            f"--mode adaptive (by {options.unmask_by}) needs a model that is "
            "conditioned on the target position; this one is a plain GPT: leave out "
            "--mode, or take --mode l2r"
        )
    elif config.l2r_only and options.mode != "l2r":
        raise UserError(
            f"--mode {options.mode} needs a model that is conditioned on the target "
            "position; this one is a plain GPT: leave out --mode, or take --mode l2r"
        )
    if options.mode == "speculative" and config.is_encoder:
        raise UserError("--mode speculative needs causal attention; take another mode")


def check_context(context: Context, config: ModelConfig, scored_from: int) -> None:
    """Raise UserError if a model cannot generate there. scored_from: of `Loaded`."""
    if scored_from:
        check_start(context[0] is not None, scored_from)
    if config.l2r_only:
        first = context.index(None)
        if any(token is not None for token in context[first:]):
            raise UserError(
                "this model can only continue a text: write one mask, at the end"
            )


def check_start(has_text: bool, scored_from: int) -> None:
    """Raise UserError for a model without a start token that gets no text to begin
    with. scored_from: of `Loaded`."""
    if scored_from and not has_text:
        raise UserError(
            "this model has no start token, as its tokenizer writes none: begin with "
            "text"
        )


def changed_settings(settings: Mapping, shown: Collection[str] = ()) -> list[str]:
    """Return the options of decoding that are not at their default, as "top_p 0.9", for
    the notes beside a table. shown: names of those that are said elsewhere."""
    defaults: dict[str, object] = {}
    for name, (default, _) in MODE_OPTIONS.items():
        defaults[name] = default
    left_out = {"mode", "batch_size", *shown}
    changed = []
    for field in fields(DecodingOptions):
        value = settings.get(field.name, field.default)
        default = defaults.get(field.name, field.default)
        is_changed = value not in (field.default, default, [])
        if field.name not in left_out and is_changed:
            changed.append(f"{field.name} {value}")
    return changed


# ---- plans of samples ----------------------------------------------------------------


class PlannedSamples(NamedTuple):
    """Samples whose randomness is drawn before the model runs: whatever the batches and
    processes, they come out the same."""

    plan: Plan
    tokens: Tensor  # LongTensor (B, T), by position: the given tokens
    # float64 (B, T) in [0, 1), by position: what tokens are drawn with
    uniforms: Tensor


def contexts_of(tokens: Tensor, given: Tensor, length: Tensor) -> list[Context]:
    """Return the contexts of rows: tokens (B, T), given BoolTensor (B, T), length
    (B,)."""
    check_boolean(given, "given")
    contexts = []
    rows = zip(tokens.tolist(), given.tolist(), length.tolist(), strict=True)
    for row_tokens, row_given, row_length in rows:
        context: Context = []
        for token, is_given in zip(row_tokens, row_given, strict=True):
            context.append(token if is_given else None)
        contexts.append(context[:row_length])
    return contexts


class Part(NamedTuple):
    """Samples that are planned and generated together."""

    contexts: range  # places in the list of contexts
    samples: range  # numbers of the samples of each context


def parts_of(contexts: int, samples: int) -> Iterator[Part]:
    """Yield all samples of all contexts in parts of at most MOST_AT_ONCE, in order."""
    together = max(1, MOST_AT_ONCE // samples)
    for first in range(0, contexts, together):
        chosen = range(first, min(first + together, contexts))
        for start in range(0, samples, MOST_AT_ONCE):
            yield Part(chosen, range(start, min(start + MOST_AT_ONCE, samples)))


def plan_samples(
    options: DecodingOptions,
    contexts: list[Context],
    seed: int,
    num_samples: int = 1,
    keys: Sequence[int] | None = None,
    first: int = 0,
) -> PlannedSamples:
    """Return the plan of all samples, `num_samples` in a row for each context, with
    numbers from `first` on: functions of (seed, key of the context, number, length)
    alone.

    options: with the mode's defaults. keys: integers below 2**64, by default the place
    of each context."""
    tokens = []
    given = []
    steps = []
    sort_keys: list[Tensor] = []
    uniforms: list[Tensor] = []
    numbers = range(first, first + num_samples)
    orders = None
    if options.order is not None:
        orders = parse_order(options.order, "--order")
    for key, context in zip(keys or range(len(contexts)), contexts, strict=True):
        T = len(context)
        given += [torch.tensor([token is not None for token in context])] * num_samples
        tokens += [torch.tensor([token or 0 for token in context])] * num_samples
        step_count = options.steps or max(1, context.count(None))
        steps += [step_count] * num_samples
        # The numbers in [0, 1) by which the plan puts positions in order.
        if orders is None:
            bits = philox_bits(
                seed,
                key,
                numbers,
                T,
                PLANS,
            )
            sort_keys += torch.from_numpy(to_uniform(bits))
        else:
            order = orders_at(
                orders,
                seed,
                key,
                numbers,
                T,
                PLANS,
            )
            sort_keys += inverse_permutation(order).double() / T
        bits = philox_bits(
            seed,
            key,
            numbers,
            T,
            TOKENS,
        )
        uniforms += torch.from_numpy(to_uniform(bits))
    plan = _mode_plan(
        options,
        length=torch.tensor([len(row) for row in tokens]),
        given=pad_sequence(given, batch_first=True),
        steps=torch.tensor(steps),
        sort_keys=pad_sequence(sort_keys, batch_first=True),
    )
    return PlannedSamples(
        plan=plan,
        tokens=pad_sequence(tokens, batch_first=True),
        uniforms=pad_sequence(uniforms, batch_first=True),
    )


def masked_up_to(planned: PlannedSamples, width: int) -> PlannedSamples:
    """Return samples of `width` positions, whose plan is that of shorter ones: the
    positions after those unmask last, all in one step. So an encoder reads [MASK]
    there, and not where a sample ends. For orders that the model does not choose."""
    plan = plans.stack_plans([planned.plan], width)
    last_step = plan.step.where(plan.valid, -1).amax(dim=1, keepdim=True)
    missing = width - planned.tokens.shape[1]
    return PlannedSamples(
        plan=replace(
            plan,
            step=plan.step.where(plan.valid, last_step + 1),
            length=torch.full_like(plan.length, width),
        ),
        tokens=F.pad(planned.tokens, (0, missing)),
        uniforms=F.pad(planned.uniforms, (0, missing)),
    )


def _mode_plan(
    options: DecodingOptions,
    length: Tensor,
    given: Tensor,
    steps: Tensor,
    sort_keys: Tensor,
) -> Plan:
    """Return the plan of a mode. length, steps (B,), given BoolTensor (B, T), sort_keys
    (B, T)."""
    B = len(length)
    o: Any = options  # none of the mode's own options is None
    match o.mode:
        case "mdm" | "even":
            return plans.mdm_plan(
                B,
                length,
                steps,
                generator=sort_keys,
                given=given,
                even=o.mode == "even",
                schedule=o.schedule,
            )
        case "l2r":
            return plans.l2r_plan(B, length, given, o.group_size)
        case "random" | "order":
            return plans.sorted_plan(
                B,
                length,
                sort_keys,
                given=given,
                group=o.group_size,
            )
        case "adaptive":
            return plans.adaptive_plan(
                B,
                length,
                by=o.unmask_by,
                generator=sort_keys,
                given=given,
                group=o.group_size,
                threshold=o.threshold,
                entropy_bound=o.entropy_bound,
                block=o.block,
            )
        case "speculative":
            return plans.speculative_plan(
                B, length, o.draft, generator=sort_keys, given=given
            )
    raise AssertionError(f"there is no mode {o.mode}")


# ---- samples -------------------------------------------------------------------------


def generate_distributed(
    model: AOGPT,
    planned: PlannedSamples,
    options: DecodingOptions,
    vocab_size: int,
    procs: Processes,
    label: str = "",
    end_token: int | None = None,
) -> Generation:
    """Generate what is planned, every process its share; all samples on every process.

    label: before the progress bar. end_token: samples end before it, see `cut_at_end`.
    Raises what `generate` raises."""
    share = procs.share(len(planned.tokens))
    rows = slice(share.start, share.stop)
    plan = planned.plan[rows]
    uniforms = planned.uniforms[rows]
    decoder = Decoder(
        model,
        choice=options,
        vocab_size=vocab_size,
        batch_size=options.batch_size or BATCH_SIZE,
        compile=options.compile,
    )
    total = int(plan.generated.sum())
    progress = tqdm(
        total=total,
        unit="token",
        desc=visible(label),
        disable=None if procs.main else True,  # None: without a terminal
        leave=False,
    )
    samples = None
    with progress as bar:
        if share:  # with more processes than samples, some have none
            samples = decoder.generate(
                plan,
                planned.tokens[rows],
                uniforms=uniforms,
                end_token=end_token,
                progress=bar.update,
            )
    if samples is not None and end_token is not None:
        samples = cut_at_end(decoder, samples, plan, end_token)
    parts = procs.gather(samples)
    return Generation.joined([part for part in parts if part is not None])


def generate_rows(
    model: AOGPT,
    contexts: list[Context],
    options: DecodingOptions,
    vocab_size: int,
    seed: int,
    count: int = 1,
    width: int | None = None,
) -> list[list[int]]:
    """Return the tokens of `count` samples in a row for each context, made by this
    process alone. options: with the mode's defaults. width: see `masked_up_to`."""
    planned = plan_samples(options, contexts, seed, count)
    if width is not None:
        planned = masked_up_to(planned, width)
    alone = Processes(0, 1, model.wte.weight.device)
    samples = generate_distributed(
        model,
        planned,
        options,
        vocab_size,
        alone,
    )
    return [tokens for tokens, _, _ in samples.rows()]


def text_until(
    tokenizer: Tokenizer, tokens: list[int], stop: Sequence[str] = ()
) -> str:
    """Return the text of the tokens up to the first end-of-text or stop string."""
    if tokenizer.eot in tokens:
        tokens = tokens[: tokens.index(tokenizer.eot)]
    text = tokenizer.decode(tokens)
    return text[: first_stop(text, stop)]


def first_stop(text: str, stop: Sequence[str], after: int = 0) -> int:
    """Return where the first of the stop strings begins, from `after` on, or else where
    the text ends."""
    end = len(text)
    for string in stop:
        place = text.find(string, after)
        if place >= 0:
            end = min(end, place)
    return end


def sample_records(
    samples: Generation,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str, str]] = (("prompt", ""),),
) -> list[dict]:
    """Return a dict of every sample, as sample.py --jsonl writes it. Its lists are as
    long as the sample; step -1: given; log_probs: nats; order: the positions in the
    order in which they became known.

    prompts: of each, "prompt" or "infill" and its text; samples are in equal number for
    each, those of a prompt one after the other."""
    records = []
    nfe = samples.nfe.tolist()
    orders = samples.order.tolist()
    for number, (tokens, step, log_probs) in enumerate(samples.rows()):
        length = len(tokens)
        prompt_index = number * len(prompts) // len(nfe)
        kind, prompt = prompts[prompt_index]
        record = {
            "text": tokenizer.decode(tokens),
            "prompt_index": prompt_index,
            kind: prompt,
            "length": length,
            "tokens": tokens,
            "step": step,
            "order": [position for position in orders[number] if position < length],
            "log_probs": [round(log_prob, 6) for log_prob in log_probs],
            "nfe": nfe[number],
        }
        records.append(record)
    return records
