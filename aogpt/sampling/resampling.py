"""Gaps of a plain GPT, filled without training: sampling-importance-resampling (Rubin
1987). A decoder of any order fills gaps in the same way, read from left to right.

A plain GPT continues texts. But what it says of whole texts also says what fits into a
gap: p(filling | left, right) is p(filling | left) p(right | left, filling), up to a
factor. So

1. draw K continuations of the left text from q, the model at a temperature below 1;
2. weight each by p(filling | left) p(right | left, filling) / q(filling | left);
3. take fillings in proportion to their weights.

This is exact as K grows. The effective sample size, 1 / sum of squared weights, says
how many of the K continuations count: where it is near 1, more are needed. What comes
from one continuation, lengths and copies, counts once, with the sum of its weights.

The first n tokens of a continuation are a filling of n tokens, so lengths from 2 to 6
are drawn at the cost of 6, and compared by the probability of the whole text. The pass
that draws token n + 1 also says how probable the first token after a filling of n
tokens is. By that, K fillings are chosen from all rows and lengths (sequential Monte
Carlo, Gordon et al. 1993), and only these read the rest of the text, each different one
once. Several gaps are filled one after the other.

Shapes: K rows (continuations), T positions of the longest text, n tokens of a filling,
m tokens of known text after it, V vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..model import AOGPT, ModelConfig
from ..runtime.devices import supports_float64
from ..runtime.errors import UserError
from ..runtime.randomness import RESAMPLED_TOKENS, RESAMPLING, philox_bits, to_uniform
from .cached import KVCache, cached_hidden, float32_logits, make_steps
from .engine import Generation
from .gaps import Gapped, Scores, TooLong, log_probs_along
from .modes import BATCH_SIZE, Context, Mode, check_can_resample
from .race import draw
from .token_choice import TokenChoice, probabilities

DRAWS = 64  # continuations
TEMPERATURE = 0.75  # at which they are drawn
RESAMPLED = 2**32  # of random numbers: an index that no gap has


@dataclass(frozen=True)
class Weighted:
    """Different fillings of a text, the best first.

    Where all have one length, the most probable text is the best. Where lengths differ,
    the probability of the text after the first gap counts twice: alone the probability
    of the whole text prefers a likely phrase that the text after it does not go on
    from."""

    tokens: list[list[int]]  # of the whole text
    contexts: list[Context]  # the tokens, None in the gaps
    scores: list[Scores]  # nats per token; none given both sides
    weights: list[float]  # estimates of p(filling | known text); their sum is 1
    effective_sample_size: float  # of the continuations, the least of all gaps
    # Estimate of log p(known text after the first gap | text before it), nats, summed
    # over the lengths of the gaps. Its exponential is unbiased, so that the estimate is
    # too small on average.
    log_evidence: float
    model_calls: int  # forward passes
    token_forwards: int  # inputs of those passes

    def resampled(
        self,
        count: int,
        seed: int,
    ) -> list[int]:
        """Return the numbers of `count` fillings, drawn by weight, each
        independently."""
        bits = philox_bits(
            seed,
            RESAMPLED,
            range(count),
            1,
            RESAMPLING,
        )
        uniforms = torch.from_numpy(to_uniform(bits)[:, 0])
        weights = torch.tensor(self.weights).double()
        return _inverse(weights, uniforms)


@torch.no_grad()
def as_generation(
    model: AOGPT,
    weighted: Weighted,
    numbers: Sequence[int],
) -> Generation:
    """Return fillings, by their numbers, as samples that were made from left to right.
    Log-probabilities are those of each token of a gap given all text on its left."""
    rows = []
    blanks = []
    for i in numbers:
        is_blank = [token is None for token in weighted.contexts[i]]
        rows.append(torch.tensor(weighted.tokens[i]))
        blanks.append(torch.tensor(is_blank))
    tokens = pad_sequence(rows, batch_first=True)  # (B, T)
    blank = pad_sequence(blanks, batch_first=True)
    length = torch.tensor([len(row) for row in rows])
    order = torch.arange(tokens.shape[1]).repeat(len(rows), 1)
    log_probs = torch.zeros(tokens.shape, dtype=torch.float64)
    batches = range(0, len(rows), BATCH_SIZE)
    for start in batches:
        part = slice(start, start + BATCH_SIZE)
        log_probs[part] = log_probs_along(
            model, tokens[part], order[part], length[part], torch.zeros(1)
        )
    model_calls = weighted.model_calls + len(batches)
    return Generation(
        tokens=tokens,
        step=torch.where(blank, blank.cumsum(dim=1) - 1, -1),
        log_probs=torch.where(blank, log_probs, 0.0),
        length=length,
        model_calls=model_calls,
        token_forwards=weighted.token_forwards + int(length.sum()),
        nfe=torch.full((len(rows),), model_calls),
        order=order,
    )


class Rows:
    """K texts that are continued, with their keys and values. What is drawn, and the
    numbers of tokens, are on the host."""

    def __init__(
        self,
        model: AOGPT,
        left: list[int],
        draws: int,
        length: int,
    ):
        """left: the tokens that all begin with; draws: K; length: T."""
        self.model = model
        weight = model.wte.weight
        device = weight.device
        self.draw_device = device
        if not supports_float64(device):
            self.draw_device = torch.device("cpu")
        self.cache = KVCache(
            model.config,
            draws,
            length,
            device,
            weight.dtype,
        )
        self.tokens = torch.zeros(draws, length, dtype=torch.long)
        self.tokens[:, : len(left)] = torch.tensor(left, dtype=torch.long)
        self.order = torch.arange(length, device=device).expand(draws, length)
        self.known = torch.full((draws,), len(left))  # tokens
        self.cached = torch.zeros(draws, dtype=torch.long)  # inputs in the cache
        self.model_calls = 0
        self.token_forwards = 0

    def read(self, count: Tensor) -> Tensor:
        """Compute the next `count` (K,) inputs of each row. Return their final hidden
        states (N, D), those of a row after those of the row before. Input i holds token
        i - 1 and predicts token i."""
        (step,) = make_steps(
            cached=self.cached[None],
            known=(self.cached + count - 1).clamp(min=0)[None],
            count=count[None],
            candidates=count[None],
            size=count[None],
            device=self.order.device,
            grouped=False,  # each token given those before it alone
        )
        self.model_calls += 1
        self.token_forwards += int(count.sum())
        self.cached = self.cached + count
        tokens = self.tokens.to(self.order.device)
        return cached_hidden(
            self.model,
            tokens,
            self.order,
            step,
            self.cache,
        )

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return log p (rows, V) of the next token after each state, in float64."""
        logits = float32_logits(self.model, hidden)
        logits = logits.to(self.draw_device)
        return logits.double().log_softmax(dim=-1)

    def next_log_probs(self) -> Tensor:
        """Return log p (K, V) of the next token of every row. Rows with the same tokens
        are computed once."""
        first = self.first_of_equals()
        is_first = first == torch.arange(len(first))
        # After `cut` the input that predicts the next token may be in the cache, but
        # its state is not kept: compute it again.
        self.cached = torch.minimum(self.cached, self.known)
        count = (self.known + 1 - self.cached) * is_first
        hidden = self.read(count)
        # The last state of each row that was computed, and the place of its row there.
        is_read = count > 0
        last = count.cumsum(0) - 1
        last = last[is_read]
        place = is_read.cumsum(0) - 1
        log_probs = self.log_probs(hidden[last.to(hidden.device)])
        self.take(first)
        place_of_equal = place[first]
        return log_probs[place_of_equal.to(log_probs.device)]

    def first_of_equals(self) -> Tensor:
        """Return the first row (K,) that holds the same tokens as each row."""
        places: dict[tuple[int, ...], int] = {}
        first = []
        texts = zip(self.tokens.tolist(), self.known.tolist(), strict=True)
        for row, (tokens, known) in enumerate(texts):
            text = tuple(tokens[:known])
            first.append(places.setdefault(text, row))
        return torch.tensor(first)

    def append(self, tokens: Tensor) -> None:
        """Add the next token (K,) to every row."""
        self.tokens[torch.arange(len(tokens)), self.known] = tokens
        self.known = self.known + 1

    def take(self, rows: Tensor) -> None:
        """Replace every row by one of these rows (K,)."""
        is_changed = rows != torch.arange(len(rows))
        changed = is_changed.nonzero().flatten()
        to = changed.to(self.order.device)
        source = rows[changed].to(self.order.device)
        for tensor in self.cache.keys + self.cache.values:
            tensor[to] = tensor[source]
        self.tokens = self.tokens[rows]
        self.known = self.known[rows]
        self.cached = self.cached[rows]

    def cut(self, known: Tensor) -> None:
        """Forget all tokens of each row after the first `known` (K,)."""
        self.known = known
        # input `known` holds the last of these tokens and stays
        self.cached = torch.minimum(self.cached, known + 1)

    def read_text(
        self,
        text: list[int],
        skip: int,
    ) -> Tensor:
        """Add a text to every row, and return log p (K,) of its tokens from number
        `skip` on. Rows with the same tokens are computed once."""
        first = self.first_of_equals()
        start = self.known
        places = start[:, None] + torch.arange(len(text))
        added = torch.tensor(text, dtype=torch.long)
        added = added.expand(places.shape)
        self.tokens.scatter_(1, places, added)
        self.known = start + len(text)
        total = torch.zeros(len(first), dtype=torch.float64)
        if len(text) > skip:
            is_first = first == torch.arange(len(first))
            # the inputs that predict tokens `cached` to the last of the text
            count = (self.known - self.cached) * is_first
            states = self.read(count).split(count.tolist())
            wanted = torch.tensor(text[skip:], device=self.draw_device)
            index = wanted[:, None]
            for row in is_first.nonzero().flatten().tolist():
                last = states[row][-len(wanted) :]
                log_probs = self.log_probs(last)
                total[row] = float(log_probs.gather(1, index).sum())
            self.take(first)
        return total[first]


def is_resampled(
    gapped: Gapped,
    mode: Mode | None,
    config: ModelConfig,
) -> bool:
    """Return whether the gaps of a text are filled in here: because the user says so,
    or as a plain GPT cannot fill them otherwise."""
    return mode == "resampling" or (config.l2r_only and not gapped.only_continues)


@torch.no_grad()
def fill_by_resampling(
    model: AOGPT,
    gapped: Gapped,
    *,
    seed: int,
    draws: int = DRAWS,
    choice: TokenChoice | None = None,
    vocab_size: int | None = None,
) -> Weighted:
    """Return weighted fillings of the gaps of a text, by a plain GPT.

    Args:
        gapped: the text. What is before the first gap must not be empty where the model
            has no start token.
        draws: K, the continuations. More come nearer to the exact distribution.
        choice: how they are drawn; weights correct for it. Tokens outside of top-k or
            top-p are never drawn, so with these the result is exact for the rest only.
        vocab_size: only ids below it are drawn.

    Raises UserError where no filling has a probability above 0 in float64, and for
    models that do not read from left to right in the cache as plain GPTs do; TooLong
    where the longest text does not fit into a block."""
    check_can_resample(model.config)
    choice = choice or TokenChoice(temperature=TEMPERATURE)
    lengths = _lengths_that_fit(gapped, model.config.block_size)
    longest = [sizes[-1] for sizes in lengths]
    longest_text = gapped.context(longest)
    rows = Rows(
        model,
        left=gapped.known[0],
        draws=draws,
        length=len(longest_text),
    )
    log_gaps = torch.zeros(draws, dtype=torch.float64)  # log p of what fills them
    log_right = torch.zeros(draws, dtype=torch.float64)  # of the known text after them
    weights = torch.zeros(draws, dtype=torch.float64)  # their logarithms
    origin = torch.arange(draws)  # the continuation that each row comes from
    filled: list[list[int]] = [[] for _ in range(draws)]  # lengths of the gaps so far
    effective = math.inf
    log_evidence = 0.0
    texts_after = gapped.known[1:]
    for number, (sizes, after) in enumerate(zip(lengths, texts_after, strict=True)):
        start = rows.known
        proposals = _draw(
            rows,
            sizes,
            after=after,
            choice=choice,
            vocab_size=vocab_size,
            seed=seed,
            number=number,
        )
        # 1. Choose K of all rows and lengths.
        fillings = [proposals[n] for n in sizes]
        log_weights = [filling.log_weight for filling in fillings]
        by_length = _sums(weights, log_weights)
        weights = _normalised(by_length, draws)
        log_evidence += float(by_length.logsumexp(dim=0)) - math.log(draws)
        origin_by_length = origin.repeat(len(sizes))
        effective = min(effective, _sample_size(weights, origin_by_length))
        chosen = _systematic(weights, draws, seed, number)
        old = filled
        filled = []
        chosen_rows = []
        chosen_lengths = []
        for i in chosen:
            row = i % draws
            n = sizes[i // draws]
            filled.append([*old[row], n])
            chosen_rows.append(row)
            chosen_lengths.append(n)
        ancestors = torch.tensor(chosen_rows)
        origin = origin[ancestors]
        log_p = [filling.log_p for filling in fillings]
        log_gaps = _sums(log_gaps, log_p)[chosen]
        log_next = [filling.log_next for filling in fillings]
        log_right = _sums(log_right, log_next)[chosen]
        rows.take(ancestors)
        rows.cut(start[ancestors] + torch.tensor(chosen_lengths))
        # 2. Weight these by the rest of the text after the gap.
        weights = rows.read_text(after, skip=1)
        log_right = log_right + weights
        shares = _normalised(weights, draws)
        effective = min(effective, _sample_size(shares, origin))
    log_evidence += float(weights.logsumexp(dim=0)) - math.log(draws)
    fillings = Fillings(
        lengths=filled,
        log_gaps=log_gaps,
        log_right=log_right,
        weights=_normalised(weights, draws),
    )
    return _merged(
        gapped,
        rows,
        fillings,
        effective,
        log_evidence,
    )


@dataclass
class Fillings:
    """The fillings of all gaps that the K rows end with."""

    lengths: list[list[int]]  # of the gaps
    log_gaps: Tensor  # (K,) log p of what fills them, nats
    log_right: Tensor  # (K,) log p of the known text after them, nats
    weights: Tensor  # (K,) of sum 1


@dataclass
class Proposal:
    """The fillings of one length of a gap, (K,) each, nats."""

    log_p: Tensor  # of the filling
    log_q: Tensor  # of the filling under the distribution that it was drawn from
    log_next: Tensor  # of the first token after it; 0 where none is known

    @property
    def log_weight(self) -> Tensor:
        return self.log_p - self.log_q + self.log_next


def _draw(
    rows: Rows,
    sizes: range,
    after: list[int],
    choice: TokenChoice,
    vocab_size: int | None,
    seed: int,
    number: int,
) -> dict[int, Proposal]:
    """Continue every row by the longest of the lengths of gap `number`. Return the
    fillings of each length. after: the known tokens after the gap."""
    K = len(rows.tokens)
    longest = sizes[-1]
    bits = philox_bits(
        seed,
        number,
        range(K),
        longest,
        RESAMPLED_TOKENS,
    )
    uniforms = torch.from_numpy(to_uniform(bits)).to(rows.draw_device)
    log_p = torch.zeros(K, dtype=torch.float64)
    log_q = torch.zeros_like(log_p)
    proposals = {}
    for n in range(longest + 1):
        if n == longest and not after:
            proposals[n] = Proposal(log_p, log_q, torch.zeros_like(log_p))
            break
        log_probs = rows.next_log_probs()
        if n in sizes:
            log_next = torch.zeros_like(log_p)
            if after:
                log_next = log_probs[:, after[0]].cpu()
            proposals[n] = Proposal(log_p, log_q, log_next)
        if n == longest:
            break
        q = probabilities(log_probs[:, :vocab_size], choice)
        token = draw(q, uniforms[:, n])
        index = token[:, None]
        p_token = log_probs.gather(1, index).squeeze(1)
        q_token = q.gather(1, index).squeeze(1)
        log_p = log_p + p_token.cpu()
        log_q = log_q + q_token.log().cpu()
        rows.append(token.cpu())
    return proposals


def _sums(row_values: Tensor, added: list[Tensor]) -> Tensor:
    """Return what rows have (K,) plus what their fillings of each length add, (K,)
    each: the sums of all rows for the first length, then for the next, (N,)."""
    return torch.cat([row_values + values for values in added])


def _normalised(log_weights: Tensor, draws: int) -> Tensor:
    """Return weights (N,) of sum 1."""
    if not log_weights.isfinite().any():
        raise UserError(
            f"none of {draws} continuations leads to the text after the gap: draw more "
            "(--num-samples), or at a higher temperature"
        )
    return log_weights.softmax(dim=0)


def _sample_size(weights: Tensor, origin: Tensor) -> float:
    """Return the effective sample size of weights (N,) of sum 1, of which those with
    one origin (N,) are one sample."""
    origin_weights = torch.zeros_like(weights).index_add(0, origin, weights)
    return float(1 / origin_weights.square().sum())


def _systematic(
    weights: Tensor,
    draws: int,
    seed: int,
    number: int,
) -> list[int]:
    """Draw K indexes in proportion to weights (N,): those at equal distances, shifted
    by one random number (systematic resampling). number: of the gap."""
    bits = philox_bits(
        seed,
        number,
        range(1),
        1,
        RESAMPLING,
    )
    shift = float(to_uniform(bits)[0, 0])
    strata = torch.arange(draws).double()
    strata = (strata + shift) / draws
    return _inverse(weights, strata)


def dropped_note(gapped: Gapped, block_size: int) -> str:
    """Return a note on lengths that resampling does not try, as they do not fit into a
    block; "" where it tries all."""
    lengths = _lengths_that_fit(gapped, block_size)
    tried = math.prod(len(sizes) for sizes in lengths)
    return gapped.dropped_note(tried, block_size)


def _lengths_that_fit(gapped: Gapped, block_size: int) -> list[range]:
    """Return the lengths of the gaps, of which all combinations fit into a block."""
    shortest = [sizes[0] for sizes in gapped.lengths]
    room = block_size - len(gapped.context(shortest))
    lengths = []
    for sizes in gapped.lengths:
        longest = min(sizes[-1], sizes[0] + room)
        lengths.append(range(sizes[0], longest + 1))
    total = len(gapped.context([sizes[-1] for sizes in lengths]))
    if total > block_size:
        raise TooLong(
            f"with its longest gaps the text has {total} tokens, and a block "
            f"{block_size}: give narrower ranges"
        )
    return lengths


def _inverse(weights: Tensor, uniforms: Tensor) -> list[int]:
    """Return the index that each uniform number (N,) in [0, 1) picks, in proportion to
    weights."""
    ends = weights.cumsum(dim=0)
    index = torch.searchsorted(ends, uniforms * ends[-1], right=True)
    last = int((weights > 0).nonzero()[-1])  # not one of weight 0 after rounding
    return index.clamp(max=last).tolist()


def _merged(
    gapped: Gapped,
    rows: Rows,
    fillings: Fillings,
    effective: float,
    log_evidence: float,
) -> Weighted:
    """Return the different fillings, with the weights of equal ones added up."""
    shares: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    in_gaps = {}
    right = {}
    for row, sizes in enumerate(fillings.lengths):
        length = int(rows.known[row])
        tokens = rows.tokens[row, :length].tolist()
        key = (tuple(tokens), tuple(sizes))
        shares[key] = shares.get(key, 0.0) + float(fillings.weights[row])
        in_gaps[key] = float(fillings.log_gaps[row])
        right[key] = float(fillings.log_right[row])
    quality = {}
    for key in shares:
        quality[key] = in_gaps[key] + right[key]
        if gapped.combinations > 1:  # the text after the gap counts twice
            quality[key] += right[key]
    best = sorted(quality, key=lambda key: -quality[key])
    count_right = sum(map(len, gapped.known[1:]))
    scores = []
    for key in best:
        count = count_right + sum(key[1])
        mean_right = math.nan
        if count_right:
            mean_right = right[key] / count_right
        score = Scores(
            right=mean_right,
            joint=(in_gaps[key] + right[key]) / count,
            filling=math.nan,
        )
        scores.append(score)
    return Weighted(
        tokens=[list(tokens) for tokens, _ in best],
        contexts=[gapped.context(sizes) for _, sizes in best],
        scores=scores,
        weights=[shares[key] for key in best],
        effective_sample_size=effective,
        log_evidence=log_evidence,
        model_calls=rows.model_calls,
        token_forwards=rows.token_forwards,
    )
