"""Any checkpoint as a model of lm-evaluation-harness: likelihoods in any order, and generation.

Importing this module registers the model under the name "aogpt"; eval_tasks.py is the script:

    import lm_eval, evaluation.harness
    lm_eval.simple_evaluate(model="aogpt", model_args="run=out/NAME,order=random", tasks=["piqa"])

The harness is the package lm_eval: pip install -r requirements-harness.txt.

Shapes: B rows of a batch, T positions, D width, N scored tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from checkpoints.load import Loaded, load
from data.tokenizers import get_tokenizer
from orders import OrderConfig, orders_at
from runtime.command_line import ModelOptions
from runtime.devices import attention_of_many_shapes, autocast, pick_device, pick_dtype
from runtime.errors import UserError
from runtime.processes import Processes
from runtime.randomness import philox_bits, to_uniform
from runtime.validation import Count, check_values
from sampling.engine import Engine
from sampling.modes import DecodingOptions, mode_plan, with_mode_defaults
from sampling.plans import stack_plans
from sampling.token_choice import TokenChoice
from variants import log_linear_noise

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:  # `eval_tasks.py --help` works all the same; `require_lm_eval` says what to do
    lm_eval, TemplateLM = None, object

SHOWN_TOKENS = 32  # of a text, in messages
# Tokens generated left to right before the first look for a stop string; then twice as many, ...
FIRST_LOOK = 32


@dataclass(frozen=True, kw_only=True)
class Settings(ModelOptions):
    """How a checkpoint answers the harness."""

    order: Literal["l2r", "random"] | None = None
    """Log-likelihoods left to right (decoders; their default), or in any order: an estimate of the
    ELBO in which the context is known (encoders; their default)."""
    num_orders: Count = 8
    """Random orders, or an encoder's masks, drawn per request."""
    mode: Literal["l2r", "mdm", "even", "random", "adaptive"] | None = None
    """Of generation, one position a step, as in sample.py; by default l2r for decoders and mdm for
    encoders."""
    steps: Count | None = None
    """Of modes mdm and even; by default one per token."""
    batch_size: Count = 16
    """Rows of a pass; it does not change the results."""
    compile: bool = False
    """torch.compile generation: minutes at the start."""


class ScoringPass(NamedTuple):
    """One pass over a request. A decoder predicts along the order; an encoder sees what comes
    before step `first` and predicts the rest."""

    tokens: list[int]
    order: Tensor
    """LongTensor (T,) of positions."""
    first: int
    """The step from which on tokens are scored."""
    weight: float
    """Of the sum of their log-probabilities."""


class GenerationSettings(NamedTuple):
    """What a generation request asks for."""

    choice: TokenChoice
    max_tokens: int
    until: tuple[str, ...]
    """Strings that end the answer."""


class HarnessModel(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness.

    The log-likelihood, in nats, of a continuation of n tokens x_c..x_{T-1} given its context
    x_0..x_{c-1} is

    order l2r, decoders     sum_{i >= c} log p(x_i | x_<i), exact.
    order random, decoders  mean over M orders s of sum_{i >= c} log p(x[s_i] | x[s_<i]); s is the
                            context in ascending order, then the continuation in uniformly random
                            order.
    order random, encoders  mean over M masks S of n / |S| sum_{i in S} log p(x_i | x outside S); S
                            is k uniformly random positions of the continuation: the context is
                            always visible (k-DCE, RADD). k is uniform on 1..n, stratified: 1 +
                            floor(n ((u + j / M) mod 1)) for mask j, one u a request.

    The last two estimate without bias E_s log p(continuation | context, s), the any-order ELBO,
    which is at most log E_s p (the paper, section 3). SEDD is given the noise level of the share of
    masked positions, context included. Estimates are a function of (seed, tokens of the request, M)
    alone, whatever the batches and processes.

    is_greedy: every scored token was the likeliest where it was predicted, in all passes. So greedy
    decoding gives the continuation, left to right or along any of the orders drawn; for an encoder
    it is what each of the masks says.

    Conventions of the harness: an empty context is one end-of-text token, whatever the model (thus
    GPT-2, which has no start token, scores every token). A context that is too long loses its
    beginning. A rolling log-likelihood is the sum over windows of block_size - 1 tokens, each after
    the one token before it, the last after as many as fit. block_size counts context and
    continuation together.

    Generation fills max_gen_toks positions after the context (l2r: until all rows have stopped),
    then cuts at the first end-of-text or stop string. It is greedy unless do_sample or a
    temperature above 0 is given. Samples are a function of (seed, context, how often it was asked).

    Args:
        run: what `checkpoints` loads, or what it gives.
        processes: this process among those that share the requests.
        max_batch_size: what the harness may pass; of no consequence.
        settings: fields of `Settings`.

    Raises ValueError for what the model cannot do, or if lm_eval is not installed.
    """

    def __init__(
        self, run, processes: Processes | None = None, max_batch_size: int | None = None, **settings
    ):
        require_lm_eval()
        super().__init__()
        a = Settings(**settings)
        check_values(a, name=str)
        self.procs = processes or Processes(0, 1, pick_device(a.device))
        # What the harness reads: `rank`, `world_size` and `device` are its properties of these.
        self._rank, self._world_size = self.procs.rank, self.procs.world_size
        self._device = self.procs.device

        if not isinstance(run, Loaded):
            run = load(str(run), a.weights, self.device, a.block_size)
        self.loaded = run
        self.model = run.model.to(self.device)
        self.tokenizer = get_tokenizer(run.tokenizer)
        self.block_size = self.model.config.block_size
        self.is_encoder = self.model.config.is_encoder
        self.dtype = pick_dtype(a.dtype, self.device)
        order, mode = ("random", "mdm") if self.is_encoder else ("l2r", "l2r")
        self.settings = dataclasses.replace(a, order=a.order or order, mode=a.mode or mode)
        self._check_model()
        options = DecodingOptions(mode=self.settings.mode, steps=a.steps)
        self.sampling = with_mode_defaults(options)
        self._engine: Engine | None = None

    def _check_model(self) -> None:
        """ValueError if the model cannot do what the settings say."""
        a, config = self.settings, self.model.config
        if self.is_encoder and a.order == "l2r":
            raise UserError(
                "this model is an encoder and has no left-to-right likelihood; take order random"
            )
        if config.l2r_only and (a.order, a.mode) != ("l2r", "l2r"):
            raise UserError(
                "this model is not told its target position; take order l2r and mode l2r"
            )
        ids = config.mask_token if self.is_encoder else config.vocab_size
        if not self.tokenizer.vocab_size == self.loaded.vocab_size <= ids:
            raise UserError(
                f"{self.loaded.path} knows {min(self.loaded.vocab_size, ids)} tokens, but its "
                f"tokenizer, {self.tokenizer.name}, has {self.tokenizer.vocab_size}: text cannot "
                "be scored with it"
            )

    # ---- what the harness asks of a model --------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eot

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        return self.tokenizer.encode(string)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.procs.gather(tensor.item()))

    def gather_object(self, obj, dst: int = 0) -> list | None:
        gathered = self.procs.gather(obj)
        return gathered if self.rank == dst else None

    def barrier(self) -> None:
        self.procs.gather(None)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, is_greedy) of each (context, continuation); split into tokens as the
        harness does it."""
        split = []
        for context, continuation in (request.args for request in requests):
            if context:
                tokens = self._encode_pair(context, continuation)
            else:
                tokens = [], self.tok_encode(continuation)
            split.append(((context, continuation), *tokens))
        return self._loglikelihood_tokens(split, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            tokens, size = self.tok_encode(text), self.block_size - 1
            own = get_rolling_token_windows(tokens, self.prefix_token_id, size, context_len=1)
            own = [(None, *make_disjoint_window(window)) for window in own]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The same for (anything, context, continuation), tokens."""
        self._check_room(requests)
        pairs = []
        for _, context, continuation in requests:
            context = context or [self.prefix_token_id]
            pairs.append((context[len(continuation) - self.block_size :], continuation))
        draws = 1 if self.settings.order == "l2r" else self.settings.num_orders
        passes = []
        for i, (context, continuation) in enumerate(pairs):
            if continuation:  # one of no tokens has no pass: its log-likelihood is 0
                length = len(context) + len(continuation)
                passes += [(-length, i, draw) for draw in range(draws)]
        # The longest first: rows of a batch are then of similar length, and if memory does not
        # suffice, it shows at once.
        passes.sort()
        values, greedy = [[] for _ in pairs], [True] * len(pairs)
        with self._progress(len(passes), self.settings.order, "pass", disable_tqdm) as bar:
            for start in range(0, len(passes), self.settings.batch_size):
                batch = passes[start : start + self.settings.batch_size]
                with attention_of_many_shapes():
                    scores = self.score(
                        [self.scoring_pass(*pairs[i], draw) for _, i, draw in batch]
                    )
                for (_, i, _), (value, is_greedy) in zip(batch, scores, strict=True):
                    values[i].append(value)
                    greedy[i] &= is_greedy
                bar.update(len(batch))
        return [(math.fsum(v) / draws, best) for v, best in zip(values, greedy, strict=True)]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context; gen_kwargs: until, max_gen_toks, do_sample,
        temperature, top_p, top_k."""
        # Requests of equal settings share batches. One that is to be answered several times is
        # there several times: its copies are told apart.
        groups, copies, longest = defaultdict(list), Counter(), 0
        for number, request in enumerate(requests):
            context, gen_kwargs = request.args
            settings = self.generation_settings(gen_kwargs)
            tokens = self.tok_encode(context) or [self.eot_token_id]
            tokens = tokens[settings.max_tokens - self.block_size :]
            copies[id(request)] += 1
            groups[settings].append((tokens, copies[id(request)], number))
            longest = max(longest, len(tokens) + settings.max_tokens)
        if longest and not self.is_encoder:
            self._engine_for(longest)  # the first and only one
        texts = [""] * len(requests)
        with self._progress(len(requests), self.settings.mode, "text", disable_tqdm) as bar:
            for settings, group in groups.items():
                group.sort(key=lambda item: -len(item[0]))  # the longest first, as above
                for start in range(0, len(group), self.settings.batch_size):
                    batch = group[start : start + self.settings.batch_size]
                    contexts, repeats, numbers = zip(*batch, strict=True)
                    answers = self.complete(contexts, repeats, settings)
                    for number, text in zip(numbers, answers, strict=True):
                        texts[number] = text
                    bar.update(len(batch))
        return texts

    def _progress(self, total: int, label: str, unit: str, disable: bool) -> tqdm:
        quiet = True if disable or self.rank else None  # None: quiet where there is no terminal
        return tqdm(total=total, desc=label, unit=unit, disable=quiet, leave=False)

    # ---- scoring ---------------------------------------------------------------------------------

    def _check_room(self, requests) -> None:
        """ValueError, with the longest, if continuations leave no room for a token of context."""
        lengths = [len(continuation) for *_, continuation in requests]
        many = sum(length >= self.block_size for length in lengths)
        if many == 0:
            return
        longest = lengths.index(max(lengths))
        _, context, continuation = requests[longest]
        end = self.tokenizer.decode(context[-SHOWN_TOKENS:])
        start = self.tokenizer.decode(continuation[:SHOWN_TOKENS])
        raise UserError(
            f"{many} of {len(requests)} requests have no room: the model takes {self.block_size} "
            f"tokens, one of context among them, and request {longest + 1} has a continuation of "
            f"{lengths[longest]} tokens, which begins {start!r} after a context that ends in "
            f"{end!r}. Leave its task or its row out, or take a model of a larger block size"
        )

    def scoring_pass(self, context: list[int], continuation: list[int], draw: int) -> ScoringPass:
        """Pass `draw` over a request, by the definitions above; tokens that fit into the model."""
        a, c, n = self.settings, len(context), len(continuation)
        tokens, positions = context + continuation, torch.arange(c + n)
        if a.order == "l2r":
            return ScoringPass(tokens, positions, first=c, weight=1.0)
        # The request itself names its random numbers: neither its place among the others nor the
        # process that scores it changes them.
        key = digest(context, continuation)
        order = orders_at(OrderConfig("random"), a.seed, key, range(draw, draw + 1), n)[0]
        order = torch.cat([positions[:c], c + order])
        if not self.is_encoder:
            return ScoringPass(tokens, order, first=c, weight=1.0)
        # The first number of a row decides between kinds of orders; with one kind it is unused.
        u = float(to_uniform(philox_bits(a.seed, key, range(1), n + 1))[0, 0])
        masked = min(n, 1 + int(n * ((u + draw / a.num_orders) % 1.0)))
        return ScoringPass(tokens, order, first=c + n - masked, weight=n / masked)

    @torch.no_grad()
    def score(self, passes: list[ScoringPass]) -> list[tuple[float, bool]]:
        """Of each pass: its weighted sum of log-probabilities, and whether every scored token is
        the likeliest."""
        length = torch.tensor([len(p.tokens) for p in passes])
        first = torch.tensor([p.first for p in passes])
        steps = torch.arange(int(length.max()))
        tokens = pad_sequence([torch.tensor(p.tokens) for p in passes], batch_first=True)
        # Padding comes after all else in the order of a decoder, so that nothing sees it.
        order = torch.stack([torch.cat([p.order, steps[len(p.order) :]]) for p in passes])
        scored = (steps >= first[:, None]) & (steps < length[:, None])
        counts = scored.sum(dim=1).tolist()
        tokens, order, scored, length = (v.to(self.device) for v in (tokens, order, scored, length))

        with autocast(self.device, self.dtype):
            if self.is_encoder:
                hidden = self._encoder_hidden(tokens, order, scored, length)
            else:
                hidden = self.model.hidden(tokens, order)
            targets = tokens.gather(1, order)[scored]
            # As a batch of one row of N tokens; it keeps few logits alive at once.
            results = self.model.head_in_chunks(
                self._log_prob_and_hit, hidden[scored][None], targets[None]
            )
        log_probs, hits = results.double().cpu().unbind(dim=1)
        parts = zip(passes, log_probs.split(counts), hits.split(counts), strict=True)
        return [(p.weight * float(values.sum()), bool(hit.all())) for p, values, hit in parts]

    def _encoder_hidden(
        self, tokens: Tensor, order: Tensor, scored: Tensor, length: Tensor
    ) -> Tensor:
        """Hidden states (B, T, D) in the steps of `order`, the scored ones masked, padding not
        seen."""
        config = self.model.config
        masked = torch.zeros_like(scored).scatter_(1, order, scored)
        sigma = log_linear_noise(masked.sum(dim=1) / length.double()) if config.noise else None
        lengths = length if int(length.min()) < tokens.shape[1] else None
        hidden = self.model.hidden(tokens.where(~masked, config.mask_token), sigma, lengths)
        return hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))

    def _log_prob_and_hit(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(N, D), (N,) -> (N, 2): log-probability of each target, and 1 where no id of the
        tokenizer is likelier. (Rows that pad the token table count in the probabilities.)"""
        logits = self.model.head_logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)
        hits = logits[:, : self.loaded.vocab_size].argmax(dim=-1) == targets
        return torch.stack([log_probs, hits.to(log_probs.dtype)], dim=1)

    # ---- generation ------------------------------------------------------------------------------

    def generation_settings(self, gen_kwargs: dict) -> GenerationSettings:
        """gen_kwargs of a request, as the harness means them; ValueError for what this model cannot
        do."""
        from lm_eval.models.utils import normalize_gen_kwargs

        default = min(256, self.block_size // 2)
        given = dict(normalize_gen_kwargs(gen_kwargs, default_max_gen_toks=default))
        do_sample, max_tokens = given.pop("do_sample"), given.pop("max_gen_toks")
        until = tuple(stop for stop in given.pop("until") if stop)
        temperature = float(given.pop("temperature", 1.0)) if do_sample else 0.0
        top_p, top_k = given.pop("top_p", None), given.pop("top_k", None)
        given.pop("temperature", None)
        if given:
            raise UserError(
                f"generation setting {', '.join(given)} is not supported: until, max_gen_toks, "
                "do_sample, temperature, top_p and top_k are"
            )
        if not 1 <= max_tokens < self.block_size:
            raise UserError(
                f"max_gen_toks is {max_tokens}, but the model takes {self.block_size} tokens, at "
                "least one of context among them; give gen_kwargs max_gen_toks=N, N from 1 to "
                f"{self.block_size - 1}"
            )
        top_k = top_k if top_k and top_k > 0 else None  # 0 and -1 mean "all" elsewhere
        choice = TokenChoice(temperature, 1.0 if top_p is None else top_p, top_k)
        return GenerationSettings(choice, max_tokens, until)

    def complete(
        self, contexts: Sequence[list[int]], repeats: Sequence[int], settings: GenerationSettings
    ) -> list[str]:
        """The text after each context, a function of (seed, context, repeat) alone."""
        generators = [
            torch.Generator().manual_seed(digest(context, [self.settings.seed, repeat]) % 2**63)
            for context, repeat in zip(contexts, repeats, strict=True)
        ]
        uniforms = [
            torch.rand(settings.max_tokens, generator=generator, dtype=torch.float64)
            for generator in generators
        ]
        answers, texts = [[] for _ in contexts], [""] * len(contexts)
        waiting, done = list(range(len(contexts))), 0
        while waiting:
            # Left to right, later tokens do not change earlier ones, so that a row that has stopped
            # need not go on: look after 32 tokens, 64, 128, ... In other orders all are needed.
            end = settings.max_tokens
            if self.settings.mode == "l2r":
                end = min(end, max(FIRST_LOOK, 2 * done))
            engine = self._engine_for(max(len(contexts[i]) for i in waiting) + end)
            plans = []
            given = torch.zeros(len(waiting), engine.T, dtype=torch.long)
            drawn = torch.zeros(len(waiting), engine.T, dtype=torch.float64)
            for row, i in enumerate(waiting):
                known = contexts[i] + answers[i]
                length = len(known) + end - done
                is_given = (torch.arange(length) < len(known))[None]
                plan = mode_plan(self.sampling, torch.tensor([length]), is_given, generators[i])
                plans.append(plan)
                given[row, : len(known)] = torch.tensor(known)
                start = len(contexts[i])
                drawn[row, start : start + end] = uniforms[i][:end]
            engine.choice = settings.choice
            made = engine.generate(stack_plans(plans, engine.T), given, uniforms=drawn)
            unfinished = []
            for row, i in enumerate(waiting):
                start = len(contexts[i])
                answers[i] = made.tokens[row, start : start + end].tolist()
                texts[i], stopped = self._cut(answers[i], settings.until)
                if not stopped and end < settings.max_tokens:
                    unfinished.append(i)
            waiting, done = unfinished, end
        return texts

    def _engine_for(self, length: int) -> Engine:
        """An engine for so many positions. What it allocates, packs and computes once, the cache,
        the weights and the modulations, serves all requests.

        A decoder reads only as much of its cache as is filled: the engine of the longest request
        serves the shorter ones. An encoder computes every position, so its engine is no longer than
        needed, rounded up to a power of two for there to be few."""
        if self.is_encoder:
            length = min(self.block_size, 1 << (length - 1).bit_length())
        kept = self._engine
        if kept is not None and (kept.T == length or kept.T > length and not self.is_encoder):
            return kept
        self._engine = kept = None  # its memory is free before the next one takes some
        size, vocab_size = self.settings.batch_size, self.loaded.vocab_size
        compile = self.settings.compile
        self._engine = Engine(self._generator, size, length, TokenChoice(), vocab_size, compile)
        return self._engine

    @functools.cached_property
    def _generator(self):
        """The model in the precision of generation: likelihoods keep its float32 weights."""
        return copy.deepcopy(self.model).bfloat16() if self.dtype == torch.bfloat16 else self.model

    def _cut(self, tokens: list[int], until: tuple[str, ...]) -> tuple[str, bool]:
        """The text up to the first end-of-text or stop string, and whether there is one."""
        end = tokens.index(self.eot_token_id) if self.eot_token_id in tokens else None
        text = self.tokenizer.decode(tokens[:end])
        found = [place for stop in until if (place := text.find(stop)) >= 0]
        return text[: min(found, default=None)], bool(found) or end is not None


if lm_eval is not None:
    register_model("aogpt")(HarnessModel)


def digest(*parts: Sequence[int]) -> int:
    """64 bits that tell lists of integers apart."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest())


def require_lm_eval() -> None:
    if lm_eval is None:
        raise UserError("this needs the package lm_eval: pip install -r requirements-harness.txt")
