"""Any checkpoint as a model of lm-evaluation-harness: likelihoods left to right or in any order, and generation.

Importing this module registers the model under the name "aogpt"; eval_tasks.py is the script around it:

    import lm_eval, evaluation.harness
    lm_eval.simple_evaluate(model="aogpt", model_args="run=out/NAME,order=random", tasks=["hellaswag"])

The harness is the package lm_eval: pip install -r requirements-harness.txt.

Shapes: B rows of a pass, T positions, D width, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from checkpoints import load as checkpoint
from data.tokenizers import get_tokenizer
from model import HEAD_CHUNK_ELEMENTS, log_linear_noise
from orders import OrderConfig, orders_at
from runtime.devices import autocast, pick_device, pick_dtype
from runtime.processes import Processes
from runtime.randomness import philox_bits
from sampling.engine import generate
from sampling.plans import Plan, adaptive_plan, l2r_plan, mdm_plan, random_plan
from sampling.token_choice import TokenChoice

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:  # the constructor says so; --help works all the same
    lm_eval, TemplateLM, register_model = None, object, lambda name: lambda cls: cls

OrderKind = Literal["l2r", "random"]
Mode = Literal["l2r", "mdm", "even", "random", "adaptive"]
DTYPES = ("auto", "float32", "bfloat16")
SHOWN = 32  # tokens of a text, in messages
FIRST_LOOK = 32  # tokens generated left to right before the first look for a stop string; then twice as many, ...


class Row(NamedTuple):
    """One pass over a request. order: LongTensor (T,) of positions, scored from step `first` on; the sum counts
    `weight` times. A decoder predicts along the order; an encoder sees the steps before `first`, predicts the rest."""

    tokens: list[int]
    order: Tensor
    first: int
    weight: float


class Wanted(NamedTuple):
    """What a generation request asks for. length: its most tokens. until: strings that end it."""

    choice: TokenChoice
    length: int
    until: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a checkpoint answers the harness."""

    order: OrderKind | None = None
    """Log-likelihoods left to right (decoders; their default), or in any order: an estimate of the ELBO in which the
    context is known (encoders; their default)."""
    num_orders: int = 8
    """Random orders, or an encoder's masks, drawn per request."""
    mode: Mode | None = None
    """Of generation, one position a step, as in sample.py; by default l2r for decoders and mdm for encoders."""
    steps: int | None = None
    """Of modes mdm and even; by default one per token."""
    batch_size: int = 16
    """Rows of a pass; it does not change the results."""
    seed: int = 0
    """Of the random orders and of the tokens that are drawn."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self):
        for name in ("num_orders", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; give a whole number from 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed!r}; give an integer from 0 to 2**63 - 1")
        for name, known in (
            ("order", (None, "l2r", "random")),
            ("mode", (None, *get_args(Mode))),
            ("dtype", DTYPES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")
        if self.steps and self.mode in ("l2r", "random", "adaptive"):
            raise ValueError(
                f"mode {self.mode!r} has no steps; leave them out, or take mode mdm or even"
            )


@register_model("aogpt")
class HarnessModel(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness.

    The log-likelihood, in nats, of a continuation of n tokens x_c..x_{T-1} given its context x_0..x_{c-1} is

    order l2r, decoders      sum_{i >= c} log p(x_i | x_<i), exact.
    order random, decoders   mean over M orders s of sum_{i >= c} log p(x[s_i] | x[s_<i]); s is the context in ascending
                             order, then the continuation in uniformly random order.
    order random, encoders   mean over M masks S of n / |S| sum_{i in S} log p(x_i | x outside S); S is k uniformly
                             random positions of the continuation: the context is always visible (k-DCE, RADD). k is
                             uniform on 1..n, stratified: 1 + floor(n ((u + j / M) mod 1)) for mask j, one u a request.

    The last two estimate without bias E_s log p(continuation | context, s), the any-order ELBO, which is at most
    log E_s p (the paper, section 2). SEDD is given the noise level of the share of masked positions, context included.
    Estimates are a function of (seed, tokens of the request, M) alone, whatever the batches and processes.

    is_greedy: every scored token was the likeliest where it was predicted, in all passes. So greedy decoding gives the
    continuation, left to right or along any of the orders drawn; for an encoder it is what each of the masks says.

    Conventions of the harness: an empty context is one end-of-text token, whatever the model (thus GPT-2, which has no
    start token, scores every token). A context that is too long loses its beginning. A rolling log-likelihood is the
    sum over windows of block_size - 1 tokens, each after the one token before it, the last after as many as fit.
    block_size counts context and continuation together.

    Generation fills max_gen_toks positions after the context by `decode.generate` (l2r: until all rows have stopped),
    then cuts at the first end-of-text or stop string. It is greedy unless do_sample or a temperature above 0 is given.

    Args:
        run: what `checkpoint.load` takes, or what it gives.
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
        self.procs = processes or Processes(0, 1, pick_device(a.device))
        self._rank, self._world_size, self._device = (
            self.procs.rank,
            self.procs.world_size,
            self.procs.device,
        )
        self.loaded = (
            run
            if isinstance(run, checkpoint.Loaded)
            else checkpoint.load(str(run), a.weights, self.device)
        )
        self.model, self.tokenizer = (
            self.loaded.model.to(self.device),
            get_tokenizer(self.loaded.tokenizer),
        )
        self.encoder, self.dtype = (self.model.config.is_encoder, pick_dtype(a.dtype, self.device))
        order, mode = ("random", "mdm") if self.encoder else ("l2r", "l2r")
        self.settings = dataclasses.replace(a, order=a.order or order, mode=a.mode or mode)
        self._check()

    def _check(self) -> None:
        a, config = self.settings, self.model.config
        if self.encoder and a.order == "l2r":
            raise ValueError(
                "this model is an encoder and has no left-to-right likelihood; take order random"
            )
        if not self.encoder and config.target == "none" and (a.order, a.mode) != ("l2r", "l2r"):
            raise ValueError(
                "this model is not told its target position; take order l2r and mode l2r"
            )
        ids = config.mask_token if self.encoder else config.vocab_size
        if not self.tokenizer.vocab_size == self.loaded.vocab_size <= ids:
            raise ValueError(
                f"{self.loaded.path} knows {min(self.loaded.vocab_size, ids)} tokens, but its tokenizer, "
                f"{self.tokenizer.name}, has {self.tokenizer.vocab_size}: text cannot be scored with it"
            )

    # ---- what the harness asks of a model ----------------------------------------------------------------------------

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
        """(log-likelihood, is_greedy) of each (context, continuation); split into tokens as the harness does it."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            tokens = (
                self._encode_pair(context, continuation)
                if context
                else ([], self.tok_encode(continuation))
            )
            pairs.append(((context, continuation), *tokens))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            width = self.model.config.block_size - 1
            own = list(
                get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, width, context_len=1
                )
            )
            windows += [(None, *make_disjoint_window(window)) for window in own]
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The same for (anything, context, continuation), tokens."""
        self._check_room(requests)
        block = self.model.config.block_size
        pairs = [((c or [self.prefix_token_id])[len(x) - block :], x) for _, c, x in requests]
        draws = 1 if self.settings.order == "l2r" else self.settings.num_orders
        # The longest first: if memory does not suffice, it shows at once.
        passes = sorted(
            (-len(c) - len(x), i, draw)
            for i, (c, x) in enumerate(pairs)
            if x
            for draw in range(draws)
        )
        values, greedy = [[] for _ in pairs], [True] * len(pairs)
        quiet = True if disable_tqdm or self.rank else None
        with tqdm(
            total=len(passes), desc=self.settings.order, unit="pass", disable=quiet, leave=False
        ) as bar:
            for start in range(0, len(passes), self.settings.batch_size):
                batch = passes[start : start + self.settings.batch_size]
                scores = self.score([self.row(*pairs[i], draw) for _, i, draw in batch])
                for (_, i, _), (value, best) in zip(batch, scores, strict=True):
                    values[i].append(value)
                    greedy[i] &= best
                bar.update(len(batch))
        return [(math.fsum(v) / draws, best) for v, best in zip(values, greedy, strict=True)]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context; gen_kwargs: until, max_gen_toks, do_sample, temperature, top_p, top_k."""
        groups, copies = defaultdict(list), Counter()
        for number, request in enumerate(requests):
            context, settings = request.args
            wanted = self._wanted(settings)
            tokens = (self.tok_encode(context) or [self.eot_token_id])[
                wanted.length - self.model.config.block_size :
            ]
            copies[id(request)] += (
                1  # a request that is to be answered several times is there several times
            )
            groups[wanted].append((len(tokens), number, tokens, copies[id(request)]))
        texts = [""] * len(requests)
        quiet = True if disable_tqdm or self.rank else None
        with tqdm(
            total=len(requests), desc=self.settings.mode, unit="text", disable=quiet, leave=False
        ) as bar:
            for wanted, group in groups.items():
                group.sort(reverse=True)
                for start in range(0, len(group), self.settings.batch_size):
                    _, numbers, contexts, repeats = zip(
                        *group[start : start + self.settings.batch_size], strict=True
                    )
                    for number, text in zip(
                        numbers, self.complete(contexts, repeats, wanted), strict=True
                    ):
                        texts[number] = text
                    bar.update(len(numbers))
        return texts

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def _check_room(self, requests) -> None:
        """ValueError, with the longest, if there are continuations that leave no room for a token of context."""
        block, lengths = (
            self.model.config.block_size,
            [len(continuation) for *_, continuation in requests],
        )
        if max(lengths, default=0) < block:
            return
        longest, many = lengths.index(max(lengths)), sum(length >= block for length in lengths)
        _, context, continuation = requests[longest]
        end, start = (
            self.tokenizer.decode(part) for part in (context[-SHOWN:], continuation[:SHOWN])
        )
        raise ValueError(
            f"{many} of {len(requests)} requests have no room: the model takes {block} tokens, one of context among "
            f"them, and request {longest + 1} has a continuation of {lengths[longest]} tokens, which begins {start!r} "
            f"after a context that ends in {end!r}. Leave its task or its row out, or take a model of a larger "
            "block size"
        )

    def row(self, context: list[int], continuation: list[int], draw: int) -> Row:
        """Pass `draw` over a request, by the definitions above; tokens that fit into the model."""
        a, c, n = self.settings, len(context), len(continuation)
        tokens, positions = context + continuation, torch.arange(c + n)
        if a.order == "l2r":
            return Row(tokens, positions, c, 1.0)
        key = digest(context, continuation)
        order = orders_at(OrderConfig("random"), a.seed, key, range(draw, draw + 1), n)[0]
        order = torch.cat([positions[:c], c + order])
        if not self.encoder:
            return Row(tokens, order, c, 1.0)
        u = (
            int(philox_bits(a.seed, key, range(1), n + 1)[0, 0]) >> 11
        ) * 2.0**-53  # the column that orders leave out
        k = min(n, 1 + int(n * ((u + draw / a.num_orders) % 1.0)))
        return Row(tokens, order, c + n - k, n / k)

    @torch.no_grad()
    def score(self, rows: list[Row]) -> list[tuple[float, bool]]:
        """Of each row: its weighted sum of log-probabilities, and whether every scored token is the likeliest."""
        length = torch.tensor([len(row.tokens) for row in rows])
        steps = torch.arange(int(length.max()))
        tokens = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
        order = torch.stack([torch.cat([row.order, steps[len(row.order) :]]) for row in rows])
        scored = (steps >= torch.tensor([row.first for row in rows])[:, None]) & (
            steps < length[:, None]
        )
        counts = scored.sum(dim=1).tolist()
        tokens, order, scored, length = (v.to(self.device) for v in (tokens, order, scored, length))
        with autocast(self.device, self.dtype):
            # Padding comes after all else in the order of a decoder, so that nothing sees it.
            hidden = (
                self._masked(tokens, order, scored, length)
                if self.encoder
                else self.model.hidden(tokens, order)
            )
            log_probs, best = self._read(hidden[scored], tokens.gather(1, order)[scored])
        parts = zip(
            rows, log_probs.double().cpu().split(counts), best.cpu().split(counts), strict=True
        )
        return [(row.weight * float(values.sum()), bool(hits.all())) for row, values, hits in parts]

    def _masked(self, tokens: Tensor, order: Tensor, scored: Tensor, length: Tensor) -> Tensor:
        """Hidden states (B, T, D) of an encoder in the steps of `order`, the scored ones masked, padding not seen."""
        masked = torch.zeros_like(scored).scatter_(1, order, scored)
        sigma = (
            log_linear_noise(masked.sum(dim=1) / length.double())
            if self.model.config.noise
            else None
        )
        ragged = length if int(length.min()) < tokens.shape[1] else None
        hidden = self.model.hidden(
            tokens.where(~masked, self.model.config.mask_token), sigma, ragged
        )
        return hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))

    def _read(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D), (N,) -> log-probability of each target, whether no token is likelier; few logits alive at once."""
        rows, log_probs, best = (
            max(256, HEAD_CHUNK_ELEMENTS // self.model.config.vocab_size),
            [],
            [],
        )
        for x, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = self.model.logits(x)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_probs.append(logits.log_softmax(dim=-1).gather(1, target[:, None]).squeeze(1))
            best.append(logits[:, : self.loaded.vocab_size].argmax(dim=-1) == target)
        return torch.cat(log_probs), torch.cat(best)

    # ---- generation --------------------------------------------------------------------------------------------------

    def _wanted(self, settings: dict) -> Wanted:
        """gen_kwargs of a request; ValueError for what this model cannot do."""
        from lm_eval.models.utils import normalize_gen_kwargs

        block = self.model.config.block_size
        settings = dict(normalize_gen_kwargs(settings, default_max_gen_toks=min(256, block // 2)))
        sampled, length = settings.pop("do_sample"), settings.pop("max_gen_toks")
        until = tuple(stop for stop in settings.pop("until") if stop)
        temperature = float(settings.pop("temperature", 1.0))
        top_p, top_k = (
            settings.pop("top_p", None),
            settings.pop("top_k", None),
        )  # 0 and -1 mean "all" elsewhere
        if settings:
            raise ValueError(
                f"generation setting {', '.join(settings)} is not supported: until, max_gen_toks, do_sample, "
                "temperature, top_p and top_k are"
            )
        if not 1 <= length < block:
            raise ValueError(
                f"max_gen_toks is {length}, but the model takes {block} tokens, at least one of context among them; "
                f"give gen_kwargs max_gen_toks=N, N from 1 to {block - 1}"
            )
        temperature = temperature if sampled else 0.0
        choice = TokenChoice(
            temperature, 1.0 if top_p is None else top_p, top_k if top_k and top_k > 0 else None
        )
        return Wanted(choice, length, until)

    def complete(self, contexts: list[list[int]], repeats: list[int], wanted: Wanted) -> list[str]:
        """The text after each context, a function of (seed, context, repeat) alone."""
        generators, uniforms = [], []
        for context, repeat in zip(contexts, repeats, strict=True):
            generators.append(
                torch.Generator().manual_seed(digest(context, [self.settings.seed, repeat]) % 2**63)
            )
            uniforms.append(
                torch.rand(wanted.length, generator=generators[-1], dtype=torch.float64)
            )
        tokens, texts = [[] for _ in contexts], [""] * len(contexts)
        waiting, done = range(len(contexts)), 0
        while waiting:
            # Left to right, later tokens do not change earlier ones: a row that has stopped need not go on.
            end = (
                min(wanted.length, max(FIRST_LOOK, 2 * done))
                if self.settings.mode == "l2r"
                else wanted.length
            )
            known = [contexts[i] + tokens[i] for i in waiting]
            plan = stacked(
                [
                    self._plan(len(k), end - done, generators[i])
                    for i, k in zip(waiting, known, strict=True)
                ]
            )
            drawn = [
                torch.cat([torch.zeros(len(contexts[i])).double(), uniforms[i][:end]])
                for i in waiting
            ]
            given = pad_sequence(
                [torch.tensor(k + [0] * (end - done)) for k in known], batch_first=True
            )
            options = {"choice": wanted.choice, "vocab_size": self.loaded.vocab_size}
            got = generate(
                self._generator,
                plan,
                given,
                uniforms=pad_sequence(drawn, batch_first=True),
                **options,
            )
            unfinished = []
            for i, row, length in zip(
                waiting, got.tokens.tolist(), got.length.tolist(), strict=True
            ):
                tokens[i] = row[len(contexts[i]) : length]
                texts[i], stopped = self._cut(tokens[i], wanted.until)
                unfinished += [] if stopped or end == wanted.length else [i]
            waiting, done = unfinished, end
        return texts

    @functools.cached_property
    def _generator(self):
        """The model in the precision of generation."""
        return copy.deepcopy(self.model).bfloat16() if self.dtype == torch.bfloat16 else self.model

    def _cut(self, tokens: list[int], until: tuple[str, ...]) -> tuple[str, bool]:
        """The text up to the first end-of-text or stop string, and whether there is one."""
        end = tokens.index(self.eot_token_id) if self.eot_token_id in tokens else None
        text = self.tokenizer.decode(tokens[:end])
        found = [place for stop in until if (place := text.find(stop)) >= 0]
        return text[: min(found, default=None)], bool(found) or end is not None

    def _plan(self, known: int, new: int, generator: torch.Generator) -> Plan:
        """Of one row: `known` given tokens, then `new` to generate."""
        a, given, length = self.settings, (torch.arange(known + new) < known)[None], known + new
        match a.mode:
            case "mdm" | "even":
                return mdm_plan(1, length, a.steps or new, generator, given, even=a.mode == "even")
            case "random":
                return random_plan(1, length, generator, given)
            case "adaptive":
                return adaptive_plan(1, length, "confidence", generator, given)
            case _:
                return l2r_plan(1, length, given)


def stacked(plans: list[Plan]) -> Plan:
    """One plan of plans of one row each, which may differ in length."""
    length = torch.cat([plan.length for plan in plans])
    positions = torch.arange(int(length.max()))
    order = torch.stack(
        [torch.cat([plan.order[0], positions[len(plan.order[0]) :]]) for plan in plans]
    )
    step = pad_sequence([plan.step[0] for plan in plans], batch_first=True)
    return Plan(order, step, length, plans[0].unmask_by)


def digest(*parts: list[int]) -> int:
    """64 bits that tell lists of integers apart."""
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest())


def require_lm_eval() -> None:
    if lm_eval is None:
        raise ValueError("this needs the package lm_eval: pip install -r requirements-harness.txt")
