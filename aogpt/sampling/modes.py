"""The modes of generation as scripts offer them: options, texts with gaps as contexts,
and samples from a seed alone.

Shapes: B samples, T positions of the longest."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..data.record_end import RecordEnd
from ..data.tokenizers import Tokenizer
from ..model import AOGPT, ModelConfig
from ..orders import ORDER_KINDS, parse_settings, setting_types
from ..runtime.command_line import visible
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..runtime.randomness import PLANS, TOKENS, philox_bits, to_uniform
from ..runtime.validation import Count, check_value, check_values
from ..scoring import check_boolean
from .engine import Engine, Generation, check_plan
from .plans import MODES, Context, Plan, Samples, order_plan, score_plan
from .records import MOST_CONTEXTS, contexts_with_end, end_first, without_end
from .scores import SCORES
from .token_choice import TokenChoice

PlanFunction = Callable[[Samples], Plan]  # what the text of a mode means

MOST_AT_ONCE = 1024  # samples that are planned and generated together
BATCH_SIZE = 16  # samples in flight, if the user does not say

# [MASK:3] in a text is three tokens to fill in, [MASK] one.
MASK = re.compile(r"(\[MASK\b[^\]]*\]?)")
LENGTH = re.compile(r"\[MASK(?::0*([1-9]\d{0,8}))?\]")  # without leading zeros


# ---- modes ---------------------------------------------------------------------------


@functools.cache
def parse_mode(text: str, option: str = "mode") -> PlanFunction:
    """Return the plan function that NAME or NAME:argument=value,... means, such as
    mdm:steps=64,schedule=cosine. A mode along an order also takes the settings of the
    order: slots:block=8,group=4, or speculative:order=slots,block=8."""
    name, _, written = text.partition(":")
    function = plan_function(name, option)
    parameters = arguments_of(function)
    types = {key: plain_type(parameters[key].annotation) for key in parameters}
    # Which settings the mode takes besides its arguments depends on its order.
    order = function.keywords.get("order")
    if "order" in parameters:
        named = re.search(r"(?:^|,)order=([^,]*)", written)
        order = named[1] if named else parameters["order"].default
    if order is not None:
        types.update(setting_types(order))
    values = {}
    if written:
        _, values = parse_settings(text, types, option)
    arguments: dict[str, Any] = {}
    of_order = []
    for key, value in values.items():
        if key in parameters:
            hint = parameters[key].annotation
            check_value(value, hint, f"{option} {text}: {key}")
            arguments[key] = value
        else:
            of_order.append(f"{key}={value}")
    if of_order:
        arguments["order"] = f"{order}:{','.join(of_order)}"
    planned = functools.partial(function, **arguments)
    try:
        planned(example_samples())
    except UserError as error:
        raise UserError(f"{option} {text}: {error}") from None
    return planned


def plan_function(name: str, option: str) -> functools.partial[Plan]:
    """Return the function that plans the samples of a mode."""
    if name in MODES:
        return functools.partial(MODES[name])
    if name in SCORES:
        return functools.partial(score_plan, by=name)
    if name in ORDER_KINDS:
        return functools.partial(order_plan, order=name)
    names = ", ".join([*MODES, *SCORES, *ORDER_KINDS])
    raise UserError(f"{option} {name}: there is no such mode; modes are {names}")


def arguments_of(function: functools.partial[Plan]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a mode, by name."""
    signature = inspect.signature(function.func, eval_str=True)
    samples, *arguments = signature.parameters.values()
    return {p.name: p for p in arguments if p.name not in function.keywords}


def plain_type(hint: Any) -> type:
    """Return the type to read the words of an argument with: int for Count | None."""
    for option in get_args(hint):
        if get_origin(hint) is Literal:
            return str
        if option is not NoneType:
            return plain_type(option)
    return hint


def example_samples() -> Samples:
    """Return one sample of two positions, of which a random order takes the second one
    first: what is wrong with a mode is wrong with it as well."""
    uniforms = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    return Samples(1, 2, uniforms)


def check_mode(mode: PlanFunction, config: ModelConfig) -> None:
    """Raise UserError if a model cannot generate in a mode."""
    check_plan(mode(example_samples()), config)


def default_mode(config: ModelConfig) -> str:
    """Return the mode of a model where none is given."""
    return "l2r" if config.l2r_only else "mdm"


def modes_help() -> str:
    """Return a table of all modes with their arguments."""
    rows = {name: plan_function(name, "mode") for name in MODES}
    rows[", ".join(SCORES)] = plan_function("confidence", "mode")
    rows[", ".join(ORDER_KINDS)] = plan_function("random", "mode")
    lines = [
        "NAME or NAME:argument=value,...; by default mdm, and l2r for a plain GPT."
    ]
    for names, function in rows.items():
        arguments = []
        for key, parameter in arguments_of(function).items():
            value = "" if parameter.default is None else parameter.default
            arguments.append(f"{key}={value}")
        (sentence, *_) = re.split(r"(?<=\.)\s", inspect.getdoc(function.func) or "")
        sentence = " ".join(sentence.split())
        lines.append(f"{names} ({', '.join(arguments)}): {sentence}")
    return "\n".join(lines)


MODE_HELP = tyro.conf.arg(metavar="MODE", help=modes_help())


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(TokenChoice):
    """The options that say how positions are filled in. Scripts nest them without a
    prefix:
    `decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")]`."""

    mode: Annotated[str | None, MODE_HELP] = None
    batch_size: Count = BATCH_SIZE
    """Samples in flight at once, fewer where memory runs out.
    In float32 rounding moved no token of 131,072; in bfloat16 samples depend on
    this."""
    compile: bool = False
    """torch.compile the model: minutes at the start, worth it for many samples. On a
    GPU also take ragged attention and CUDA graphs."""

    def __post_init__(self):
        check_values(self, name=str)
        if self.mode is not None:
            parse_mode(self.mode)

    @property
    def plan(self) -> PlanFunction:
        """Return the plan function of the mode."""
        assert self.mode is not None
        return parse_mode(self.mode)

    def engine(self, model: AOGPT, vocab_size: int | None) -> Engine:
        """Return what generates so with a model."""
        return Engine(
            model,
            choice=self,  # these options are a TokenChoice
            vocab_size=vocab_size,
            batch_size=self.batch_size,
            compile=self.compile,
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
    changed = []
    for field in fields(DecodingOptions):
        value = settings.get(field.name, field.default)
        is_shown = field.name in ("batch_size", *shown)
        if value != field.default and not is_shown:
            changed.append(f"{field.name} {value}")
    return changed


# ---- contexts ------------------------------------------------------------------------


def encode_gaps(text: str, tokenizer: Tokenizer, longest: int) -> Context:
    """Return the tokens of a text with masks, None in its gaps. Raises UserError for a
    text without a mask, for a mask that is not written correctly, and for more than
    `longest` tokens."""
    first, *parts = MASK.split(text)  # then masks and texts in turn
    if not parts:
        raise UserError("there is no mask; write [MASK:n] for n new tokens")
    tokens: Context = [*tokenizer.encode(first)]
    for mask, after in zip(parts[::2], parts[1::2], strict=True):
        length = LENGTH.fullmatch(mask)
        if length is None:
            raise UserError(
                f"{mask[:40]!r} is not a mask; write [MASK:n] for n tokens, n at least "
                "1"
            )
        # A mask can name any length: no list is made that is longer than necessary.
        tokens += [None] * min(int(length[1] or 1), longest + 1)
        if after:
            tokens += tokenizer.encode_after(after)
    if len(tokens) > longest:
        raise UserError(
            f"text and masks exceed what the model takes, {longest} tokens; shorten "
            "them"
        )
    return tokens


def continued(
    tokens: list[int], length: int | None, longest: int, end: RecordEnd | None
) -> Context:
    """Return the tokens of a prompt, and None for each that follows: up to `length`
    tokens in all, by default `longest`, then the end of a record, where it is given.
    Without a length that of a record is drawn later: see `contexts_with_end`."""
    if end is not None and length is None and len(tokens) <= longest:
        return [*tokens]
    total = longest if length is None else length
    if not len(tokens) < total <= longest:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and the length is {total}: it must "
            f"exceed the prompt and be at most {longest}, what the model takes"
        )
    context = [*tokens, *[None] * (total - len(tokens))]
    return context if end is None else [*context, end.token]


def refuse_masks(text: str, advice: str) -> None:
    """Raise UserError for a text that has a mask where none is allowed."""
    mask = MASK.search(text)
    if mask is not None:
        raise UserError(f"the text has a mask, {mask[0][:40]}: {advice}")


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


# ---- plans of samples ----------------------------------------------------------------


class PlannedSamples(NamedTuple):
    """Samples whose randomness is drawn before the model runs: whatever the batches and
    processes, they come out the same."""

    plan: Plan
    tokens: Tensor  # LongTensor (B, T), by position: the given tokens
    # float64 (B, T) in [0, 1), by position: what tokens are drawn with
    uniforms: Tensor


def plan_samples(
    mode: PlanFunction,
    contexts: list[Context],
    seed: int,
    num_samples: int = 1,
    keys: Sequence[int] | None = None,
    first: int = 0,
) -> PlannedSamples:
    """Return the plan of all samples, `num_samples` in a row for each context, with
    numbers from `first` on: functions of (seed, key of the context, number, length)
    alone. keys: integers below 2**64, by default the place of each context."""
    tokens = []
    given = []
    sort_numbers: list[Tensor] = []  # in [0, 1), by which a plan orders positions
    uniforms: list[Tensor] = []
    numbers = range(first, first + num_samples)
    for key, context in zip(keys or range(len(contexts)), contexts, strict=True):
        T = len(context)
        given += [torch.tensor([token is not None for token in context])] * num_samples
        tokens += [torch.tensor([token or 0 for token in context])] * num_samples
        for stream, rows in ((PLANS, sort_numbers), (TOKENS, uniforms)):
            bits = philox_bits(seed, key, numbers, T, stream)
            rows += torch.from_numpy(to_uniform(bits))
    samples = Samples(
        len(tokens),
        length=torch.tensor([len(row) for row in tokens]),
        uniforms=pad_sequence(sort_numbers, batch_first=True),
        given=pad_sequence(given, batch_first=True),
    )
    return PlannedSamples(
        plan=mode(samples),
        tokens=pad_sequence(tokens, batch_first=True),
        uniforms=pad_sequence(uniforms, batch_first=True),
    )


# ---- samples -------------------------------------------------------------------------


def generate_distributed(
    engine: Engine,
    planned: PlannedSamples,
    procs: Processes,
    label: str = "",
    end_token: int | None = None,
) -> Generation:
    """Generate what is planned, every process its share; all samples on every process.

    label: before the progress bar. end_token: as of `Engine.generate`, whose errors are
    raised."""
    share = procs.share(len(planned.tokens))
    rows = slice(share.start, share.stop)
    plan = planned.plan[rows]
    samples = None
    with tqdm(
        total=int(plan.generated.sum()),
        unit="token",
        desc=visible(label),
        disable=None if procs.main else True,  # None: without a terminal
        leave=False,
    ) as bar:
        if share:  # with more processes than samples, some have none
            samples = engine.generate(
                plan,
                planned.tokens[rows],
                planned.uniforms[rows],
                end_token=end_token,
                progress=bar.update,
            )
    parts = [part for part in procs.gather(samples) if part is not None]
    return parts[0] if len(parts) == 1 else Generation.joined(parts)


def generate_samples(
    engine: Engine,
    mode: PlanFunction,
    contexts: dict[int, Context],
    seed: int,
    num_samples: int = 1,
    procs: Processes | None = None,
    label: str = "",
    end: RecordEnd | None = None,
    end_token: int | None = None,
) -> Iterator[tuple[list[int], Generation]]:
    """Yield the samples of contexts, with the key of the context of each one: in parts
    of at most MOST_AT_ONCE samples, as soon as they are there. `num_samples` of one
    context follow one another.

    contexts: by keys below 2**32, on which the samples depend. end: of records, where
    it is given. Other arguments are those of `generate_distributed`."""
    procs = procs or Processes(0, 1, engine.device)
    if end is not None:  # samples of one context differ in length
        contexts = contexts_with_end(
            end, contexts, seed, num_samples, engine.model.config.block_size
        )
        num_samples = 1
    together = max(1, MOST_AT_ONCE // num_samples)
    all_keys = list(contexts)
    for start in range(0, len(all_keys), together):
        keys = all_keys[start : start + together]
        chosen = [contexts[key] for key in keys]
        for first in range(0, num_samples, MOST_AT_ONCE):
            count = min(MOST_AT_ONCE, num_samples - first)
            planned = plan_samples(mode, chosen, seed, count, keys, first)
            if end is not None:
                planned = planned._replace(plan=end_first(planned.plan))
            samples = generate_distributed(engine, planned, procs, label, end_token)
            if end is not None:
                samples = without_end(samples)
            yield [key % MOST_CONTEXTS for key in keys for _ in range(count)], samples


def generate_rows(engine: Engine, planned: PlannedSamples) -> list[list[int]]:
    """Return the tokens of samples that are made by this process alone."""
    samples = engine.generate(planned.plan, planned.tokens, planned.uniforms)
    return [row.tokens for row in samples.rows()]


def text_until_end(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the text of the tokens up to the first end-of-text."""
    if tokenizer.eot in tokens:
        tokens = tokens[: tokens.index(tokenizer.eot)]
    return tokenizer.decode(tokens)


def sample_records(samples: Generation, tokenizer: Tokenizer) -> list[dict]:
    """Return a dict of every sample, as sample.py --jsonl writes it. Its lists are as
    long as the sample; step -1: given; log_probs: nats; order: the positions in the
    order in which they became known."""
    records = []
    for row, nfe in zip(samples.rows(), samples.nfe.tolist(), strict=True):
        record = {
            "text": tokenizer.decode(row.tokens),
            "length": len(row.tokens),
            "tokens": row.tokens,
            "step": row.step,
            "order": row.order,
            "log_probs": [round(log_prob, 6) for log_prob in row.log_probs],
            "nfe": nfe,
        }
        records.append(record)
    return records
