"""Any checkpoint as a model of lm-evaluation-harness: likelihoods in any order, and
generation.

Importing this module registers the model under the name "aogpt"; eval_tasks.py is the
script:

    import lm_eval, aogpt.evaluation.harness
    settings = "run=out/NAME,order=random"
    lm_eval.simple_evaluate(model="aogpt", model_args=settings, tasks=["piqa"])

The harness is the package lm_eval: pip install -r requirements/harness.txt.

Shapes: B rows of a batch, T positions, D width, N scored tokens."""

import copy
import functools
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..checkpoints import Loaded, load
from ..data.tokenizers import without_lone_surrogates
from ..model import head_chunk
from ..orders import OrderConfig, orders_at
from ..runtime.command_line import ModelOptions
from ..runtime.devices import (
    attention_of_many_shapes,
    autocast,
    pick_device,
    pick_dtype,
)
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from ..runtime.randomness import REQUESTS, philox_bits, to_uniform
from ..runtime.validation import Count, check_value, check_values
from ..sampling import modes
from ..sampling.engine import Decoder, OnUnmasked
from ..sampling.modes import BATCH_SIZE, DecodingOptions
from ..sampling.token_choice import TokenChoice
from ..systems import log_linear_noise

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    # `eval_tasks.py --help` works all the same; `require_lm_eval` says what to do.
    lm_eval = None
    TemplateLM = object


@dataclass(frozen=True, kw_only=True)
class Settings(ModelOptions):
    """Options of the model besides those of decoding."""

    num_orders: Count = 8
    """Random orders, or an encoder's masks, sampled per request."""


# The options of decoding that `HarnessModel.complete` uses.
TAKEN = {"mode", "batch_size", "compile", *modes.MODE_OPTIONS}
REQUESTS_COUNTED = ("all", "spanning", "truncated", "windows", "generated")


class ScoringPass(NamedTuple):
    """A pass over a request. A decoder predicts along the order; an encoder sees the
    tokens of the steps before `first` and predicts the rest."""

    tokens: list[int]
    order: Tensor  # LongTensor (T,) of positions
    first: int  # the step from which on tokens are scored
    weight: float  # of the sum of their log-probabilities


class AnswerSettings(NamedTuple):
    """The settings of the answers to a task."""

    choice: TokenChoice
    max_tokens: int
    until: tuple[str, ...]  # texts that end an answer


class HarnessModel(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness.

    The log-likelihood, in nats, of a continuation of n tokens x_c..x_{T-1} given its
    context x_0..x_{c-1} is

    order l2r, decoders      sum_{i >= c} log p(x_i | x_<i), exact
    order random, decoders   mean over M orders s of sum_{i>=c} log p(x[s_i] | x[s_<i])
    order random, encoders   mean over M masks S of n / |S| sum_{i in S} of
                             log p(x_i | x outside S)

    An order s is the context in ascending order, then the continuation in a uniformly
    random order. A mask S is k uniformly random positions of the continuation (k-DCE,
    RADD), with k uniform on 1..n and stratified over the masks.

    The last two estimate without bias the any-order ELBO, E_s log p(continuation |
    context, s), and depend on (seed, tokens of the request, M) alone. is_greedy: every
    scored token was the most probable one, in all passes. An empty context is
    end-of-text; one that is too long loses its beginning; a token that spans the two
    belongs to the continuation. Generation is a function of (seed, context,
    repetition): max_gen_toks positions cut at the first end-of-text or stop string.

    run: what `load` takes or returns. options: fields of `Settings` and
    `DecodingOptions`; `order` is that of log-likelihoods, `mode` that of generation.
    max_batch_size: without effect."""

    def __init__(
        self,
        run,
        processes: Processes | None = None,
        max_batch_size: int | None = None,
        **options,
    ):
        require_lm_eval()
        super().__init__()
        names = {field.name for field in fields(Settings)}
        settings = {}
        decoding_settings = {}
        for name, value in options.items():
            if name in names:
                settings[name] = value
            else:
                decoding_settings[name] = value
        a = Settings(**settings)
        check_values(a, name=str)
        decoding = DecodingOptions(**decoding_settings)
        self.settings = a
        self.procs = processes or Processes(0, 1, pick_device(a.device))
        # The harness reads `rank`, `world_size` and `device`, its properties of these.
        self._rank = self.procs.rank
        self._world_size = self.procs.world_size
        self._device = self.procs.device
        if not isinstance(run, Loaded):
            run = load(
                str(run),
                a.weights,
                self.device,
                a.block_size,
                a.checkpoint,
            )
        self.loaded = run
        self.model = run.model.to(self.device)
        self.tokenizer = run.get_tokenizer()
        self.dtype = pick_dtype(a.dtype, self.device)
        self.prefix = [self.tokenizer.eot]  # of an empty context
        if run.system and getattr(self.tokenizer, "starts", ()):
            self.prefix = []
        config = self.model.config
        self.block_size = config.block_size
        self.is_encoder = config.is_encoder
        # --order is that of log-likelihoods, and of those modes that have one.
        self.order = decoding.order or ("random" if self.is_encoder else "l2r")
        mode = decoding.mode or ("mdm" if self.is_encoder else "l2r")
        order = None
        if mode in modes.MODE_OPTIONS["order"].modes:
            order = decoding.order
        decoding = replace(
            decoding,
            mode=mode,
            order=order,
        )
        self.decoding = modes.with_mode_defaults(decoding)
        self.batch_size = decoding.batch_size or BATCH_SIZE
        # The numbers of requests: all, with a token across, with a truncated context.
        self.counts: Counter = Counter()
        self._check()

    def _check(self) -> None:
        """Raise UserError for options that do not go together or with the model."""
        check_value(self.order, Literal["l2r", "random"], "order")
        if self.is_encoder and self.order == "l2r":
            raise UserError(
                "an encoder has no left-to-right likelihood; take order random"
            )
        if self.model.config.l2r_only:
            if self.order != "l2r" or self.decoding.mode != "l2r":
                raise UserError(
                    "this model is a plain GPT; take order l2r and mode l2r"
                )
        if not self.decoding.is_exact:
            raise UserError(
                "how tokens are drawn is for the tasks to say; give --gen-kwargs"
            )
        for field in fields(DecodingOptions):
            is_default = getattr(self.decoding, field.name) == field.default
            if field.name not in TAKEN and not is_default:
                raise UserError(
                    f"--{field.name} is not for tasks of the harness: leave it out"
                )

    @property
    def eot_token_id(self) -> int:
        """Return the id of end-of-text."""
        return self.tokenizer.eot

    def tok_encode(self, string: str, **options) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer.encode(string)

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of both together, divided at the last boundary of tokens
        within the context, whose trailing spaces belong to the continuation."""
        text = context + continuation
        size = len(without_lone_surrogates(context.rstrip()).encode())
        size += self.tokenizer.adds_space  # before the text, in its first token
        tokens = self.tok_encode(text)
        ends = self.tokenizer.byte_lengths[tokens].cumsum()
        split = int(np.searchsorted(ends, size, side="right"))
        boundary = ends[split - 1] if split else 0
        self.counts["spanning"] += int(boundary < size)
        return tokens[:split], tokens[split:]

    def loglikelihood(
        self, requests, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of the continuation of each (context,
        continuation), texts, and whether every token of it was the most probable one;
        (0.0, True) of one without tokens."""
        pairs = []
        for request in requests:
            context, continuation = request.args
            if context:
                before, after = self._encode_pair(context, continuation)
            else:
                before = [self.prefix_token_id]
                after = self.tok_encode(continuation)
                if after[:1] == before:  # the text has it
                    after = after[1:]
            pairs.append((request.args, before, after))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def request_counts(self) -> dict[str, int]:
        """Count the requests of all processes; `spanning`: with a token across context
        and continuation, `truncated`: whose context lost its beginning; `windows`: of
        whole texts; `generated`: answers."""
        of_processes = self.procs.gather(self.counts)
        totals = {}
        for name in REQUESTS_COUNTED:
            totals[name] = sum(counts[name] for counts in of_processes)
        return totals

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the numbers that all processes give, (processes,)."""
        return torch.tensor(self.procs.gather(tensor.item()))

    def gather_object(self, obj, dst: int = 0) -> list | None:
        """Return the objects that all processes give on process `dst`, else None."""
        gathered = self.procs.gather(obj)
        return gathered if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all processes."""
        self.procs.gather(None)

    def loglikelihood_rolling(
        self, requests, disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text."""
        windows = []
        counts = []
        for request in requests:
            (text,) = request.args
            of_text = list(self._windows(self.tok_encode(text)))
            for context, continuation in of_text:
                windows.append((None, context, continuation))
            counts.append(len(of_text))
        self.counts["windows"] += len(windows)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        totals = []
        start = 0
        for count in counts:
            of_text = scores[start : start + count]
            totals.append(math.fsum(value for value, _ in of_text))
            start += count
        return totals

    def _windows(self, tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield contexts and continuations that together predict every token of a text
        once. A window is a block long with its context, of which there is one token at
        least after the first window. (The harness's own models count the context apart,
        and predict one token more a window.)"""
        text = self.prefix + tokens
        start = len(self.prefix)
        while start < len(text):
            size = self.block_size - 1 if start else self.block_size
            end = min(start + size, len(text))
            yield text[max(0, end - self.block_size) : start], text[start:end]
            start = end

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (anything, context, continuation), tokens,
        and whether every token of it was the most probable one."""
        draws = 1 if self.order == "l2r" else self.settings.num_orders
        pairs = []
        passes = []
        for i, (_, context, continuation) in enumerate(requests):
            if context in ([], [self.prefix_token_id]):
                context = self.prefix
            if len(context[-1:]) + len(continuation) > self.block_size:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit in the "
                    f"model's {self.block_size}: leave out its task or row"
                )
            context = self._fitting(context, len(continuation))
            pairs.append((context, continuation))
            if continuation:  # one of no tokens has no pass: its log-likelihood is 0
                length = len(context) + len(continuation)
                for draw in range(draws):
                    passes.append((-length, i, draw))
        # Long ones first: little padding, and if memory does not suffice, it shows at
        # once.
        passes.sort()
        values: list[list[float]] = [[] for _ in pairs]
        greedy = [True] * len(pairs)
        # None: quiet without a terminal
        quiet = True if disable_tqdm or self.rank else None
        starts = range(0, len(passes), self.batch_size)
        for start in tqdm(
            starts,
            desc=self.order,
            disable=quiet,
            leave=False,
        ):
            numbers = []
            batch = []
            for _, i, draw in passes[start : start + self.batch_size]:
                context, continuation = pairs[i]
                numbers.append(i)
                batch.append(self.scoring_pass(context, continuation, draw))
            for i, (value, is_greedy) in zip(numbers, self.score(batch), strict=True):
                values[i].append(value)
                greedy[i] &= is_greedy
        means = [math.fsum(of_draws) / draws for of_draws in values]
        return list(zip(means, greedy, strict=True))

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context; gen_kwargs: see `generation_settings`."""
        self.counts["generated"] += len(requests)
        groups = defaultdict(list)
        copies: Counter = Counter()
        for number, request in enumerate(requests):
            context, gen_kwargs = request.args
            settings = self.generation_settings(gen_kwargs)
            tokens = self.tok_encode(context) or self.prefix
            tokens = self._fitting(tokens, settings.max_tokens)
            copies[id(request)] += 1  # a request that is repeated is answered anew
            groups[settings].append((tokens, copies[id(request)], number))
        texts = [""] * len(requests)
        progress = tqdm(
            desc=self.decoding.mode,
            unit="token",
            disable=True if disable_tqdm or self.rank else None,
            leave=False,
        )
        with progress as bar:
            for settings, group in groups.items():
                group.sort(key=lambda request: -len(request[0]))
                contexts = [context for context, _, _ in group]
                repeats = [repeat for _, repeat, _ in group]
                numbers = [number for _, _, number in group]
                answers = self.complete(
                    contexts,
                    repeats,
                    settings,
                    bar.update,
                )
                for number, text in zip(numbers, answers, strict=True):
                    texts[number] = text
        return texts

    def _fitting(self, context: list[int], new: int) -> list[int]:
        """Return the end of a context that leaves room for new tokens; count the
        request."""
        excess = max(0, len(context) + new - self.block_size)
        self.counts["all"] += 1
        if excess:
            self.counts["truncated"] += 1
        return context[excess:]

    def scoring_pass(
        self, context: list[int], continuation: list[int], draw: int
    ) -> ScoringPass:
        """Return the pass `draw` over a request, by the definitions above."""
        a = self.settings
        c = len(context)
        n = len(continuation)
        tokens = context + continuation
        positions = torch.arange(c + n)
        if self.order == "l2r":
            return ScoringPass(
                tokens,
                positions,
                first=c,
                weight=1.0,
            )
        # The request itself is the key of its random numbers, whatever its place and
        # process.
        key = digest(context, continuation)
        row = range(draw, draw + 1)
        order = orders_at(
            OrderConfig("random"), a.seed, key, row, length=n, stream=REQUESTS
        )[0]
        order = torch.cat([positions[:c], c + order])
        if not self.is_encoder:
            return ScoringPass(
                tokens,
                order,
                first=c,
                weight=1.0,
            )
        # A uniform order leaves the first of its n + 1 random numbers unused.
        u = float(
            to_uniform(
                philox_bits(
                    a.seed,
                    key,
                    range(1),
                    n + 1,
                    REQUESTS,
                )
            )[0, 0]
        )
        masked = min(n, 1 + int(n * ((u + draw / a.num_orders) % 1.0)))
        return ScoringPass(
            tokens,
            order,
            first=c + n - masked,
            weight=n / masked,
        )

    @torch.no_grad()
    def score(self, passes: list[ScoringPass]) -> list[tuple[float, bool]]:
        """Return for each pass the weighted sum of log-probabilities, and whether all
        tokens are likeliest."""
        length = torch.tensor([len(p.tokens) for p in passes])
        first = torch.tensor([p.first for p in passes])
        rows = [torch.tensor(p.tokens) for p in passes]
        tokens = pad_sequence(rows, batch_first=True)
        # Padding comes last in the order of a decoder, so that nothing sees it.
        steps = torch.arange(tokens.shape[1])
        orders = []
        for p in passes:
            orders.append(torch.cat([p.order, steps[len(p.order) :]]))
        order = torch.stack(orders)
        scored = (steps >= first[:, None]) & (steps < length[:, None])
        counts = scored.sum(dim=1).tolist()
        tokens = tokens.to(self.device)
        order = order.to(self.device)
        scored = scored.to(self.device)
        with autocast(self.device, self.dtype), attention_of_many_shapes():
            if self.is_encoder:
                length = length.to(self.device)
                hidden = self._encoder_hidden(
                    tokens,
                    order,
                    scored,
                    length,
                )
            else:
                hidden = self.model.hidden(tokens, order)
            targets = tokens.gather(1, order)[scored]
            # Logits of few tokens at once.
            size = head_chunk(self.model.config.vocab_size, self.device.type)
            parts = []
            chunks = zip(hidden[scored].split(size), targets.split(size), strict=True)
            for hidden_chunk, target_chunk in chunks:
                parts.append(self._score_tokens(hidden_chunk, target_chunk))
            results = torch.cat(parts)
        log_probs, hits = results.double().cpu().unbind(dim=1)
        scores = []
        parts = zip(
            passes,
            log_probs.split(counts),
            hits.split(counts),
            strict=True,
        )
        for p, values, hit in parts:
            scores.append((p.weight * float(values.sum()), bool(hit.all())))
        return scores

    def _encoder_hidden(
        self, tokens: Tensor, order: Tensor, scored: Tensor, length: Tensor
    ) -> Tensor:
        """Return the hidden states of an encoder by step, (B, T, D). Scored steps are
        masked, and padding is invisible."""
        config = self.model.config
        masked = torch.zeros_like(scored).scatter_(1, order, scored)
        sigma = None
        if config.noise:
            sigma = log_linear_noise(masked.sum(dim=1) / length.double())
        lengths = None
        if int(length.min()) < tokens.shape[1]:
            lengths = length
        inputs = tokens.where(~masked, config.mask_token)
        hidden = self.model.hidden(inputs, sigma, lengths)
        return hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))

    def _score_tokens(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return for each target (N,), from hidden states (N, D), its log-probability,
        and 1 where no id of the tokenizer is more probable, (N, 2). (Rows that pad the
        token table count in the probabilities.)"""
        logits = self.model.head_logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)
        hits = logits[:, : self.loaded.vocab_size].argmax(dim=-1) == targets
        return torch.stack([log_probs, hits.to(log_probs.dtype)], dim=1)

    def generation_settings(self, gen_kwargs: dict) -> AnswerSettings:
        """Return how to answer with these settings of a task."""
        from lm_eval.models.utils import normalize_gen_kwargs

        default = min(256, self.block_size // 2)
        given = dict(normalize_gen_kwargs(gen_kwargs, default_max_gen_toks=default))
        do_sample = given.pop("do_sample")
        max_tokens = given.pop("max_gen_toks")
        until = tuple(stop for stop in given.pop("until") if stop)
        temperature = given.pop("temperature", 1.0)
        temperature = float(temperature) if do_sample else 0.0
        top_p = given.pop("top_p", None)
        top_k = given.pop("top_k", None)
        if given:
            raise UserError(
                f"generation setting {', '.join(given)} is not supported: until, "
                "max_gen_toks, do_sample, temperature, top_p and top_k are"
            )
        if not 1 <= max_tokens < self.block_size:
            raise UserError(
                f"max_gen_toks is {max_tokens}: give --gen-kwargs max_gen_toks=N, N "
                f"from 1 to {self.block_size - 1}"
            )
        if top_p is None:
            top_p = 1.0
        if not top_k or top_k < 0:  # 0 and -1 mean "all" elsewhere
            top_k = None
        choice = TokenChoice(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        return AnswerSettings(choice, max_tokens, until)

    def complete(
        self,
        contexts: list[list[int]],
        repeats: list[int],
        settings: AnswerSettings,
        progress: OnUnmasked,
    ) -> list[str]:
        """Return the text after each context, a function of (seed, context, repeat)
        alone."""
        keys = []
        rows = []
        for context, repeat in zip(contexts, repeats, strict=True):
            keys.append(digest(context, [repeat]))
            rows.append(context + [None] * settings.max_tokens)
        planned = modes.plan_samples(
            self.decoding,
            rows,
            self.settings.seed,
            keys=keys,
        )
        decoder = Decoder(
            self._generator,
            choice=settings.choice,
            vocab_size=self.loaded.vocab_size,
            batch_size=self.batch_size,
            compile=self.decoding.compile,
        )
        samples = decoder.generate(
            planned.plan, planned.tokens, uniforms=planned.uniforms, progress=progress
        )
        answers = []
        for context, (tokens, _, _) in zip(contexts, samples.rows(), strict=True):
            new = tokens[len(context) :]
            answers.append(modes.text_until(self.tokenizer, new, settings.until))
        return answers

    @functools.cached_property
    def _generator(self):
        """Return the model in the precision of generation; likelihoods keep its float32
        weights."""
        if self.dtype == torch.bfloat16:
            return copy.deepcopy(self.model).bfloat16()
        return self.model


if lm_eval is not None:
    register_model("aogpt")(HarnessModel)


def digest(*parts: Sequence[int]) -> int:
    """Return 64 bits that tell lists of integers apart."""
    data = json.dumps(parts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def require_lm_eval() -> None:
    """Raise UserError where lm-evaluation-harness is not installed."""
    if lm_eval is None:
        raise UserError(
            "this needs the package lm_eval: pip install -r requirements/harness.txt"
        )
