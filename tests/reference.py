"""What the tests compare the project with: the formulas written out, and exact
enumerations.

`log_probs` is the decoder of the paper (arXiv 2506.19935, section 3) and its target
variants, `encoder_outputs` the encoders, from their formulas alone: one sequence and
one head at a time, with a table of the inputs that each step sees; they use no layer,
no fused kernel and no code of the project, only the named parameters. The rest
enumerates every sequence, every order and every plan of tiny problems. The last part
builds the models, plans and samples that are compared with them."""

import functools
import itertools
import math
import re
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import torch
from scipy.stats import chi2

from aogpt.model import ModelConfig
from aogpt.sampling.engine import Engine
from aogpt.sampling.modes import parse_mode
from aogpt.sampling.plans import Samples
from aogpt.sampling.scores import SCORES
from aogpt.scoring import masked_log_probs, token_log_probs
from aogpt.systems import build_model

# of each chi-square test; seeds are fixed, so an accepted test stays accepted
LEVEL = 1e-4

# ---- the decoder, from its formulas --------------------------------------------------


def log_probs(config, params, tokens, order, group=1):
    """Return log p(x[order[i]] | x[order[:i]]), (B, T) in prediction order,
    differentiable in `params` (name -> tensor). group: of decoders with queries of
    their own (two_stream, mask_query), whose step i is predicted from the groups before
    its own."""
    rows = []
    for x, s in zip(tokens, order, strict=True):
        rows.append(_Formulas(config, params).decoded(x, s, group))
    return torch.stack(rows)


def encoder_outputs(config, params, tokens, masked, sigma=None):
    """Return the outputs of the head for every token before [MASK], (B, T, [MASK]),
    with [MASK] in place of the masked tokens. sigma: (B,) noise levels, for SEDD."""
    rows = []
    for b in range(len(tokens)):
        noise = None if sigma is None else sigma[b]
        rows.append(_Formulas(config, params).encoded(tokens[b], masked[b], noise))
    return torch.stack(rows)


UNMODULATED = (0, 0, 1, 0, 0, 1)  # shift, scale and gate of attention and of the MLP


class _Formulas:
    """Compute the formulas for one sequence. A stream has a row for each input;
    `visible` has a row for each query, and whether it sees each input."""

    def __init__(self, config, params):
        self.config = config
        self.params = params
        self.first_values = None

    def decoded(self, tokens, order, group):
        config = self.config
        params = self.params
        if config.target == "mask_query":
            return self.decoded_by_mask_queries(tokens, order, group)
        T = len(order)
        step = torch.arange(T)
        inputs = order[:-1]
        x = torch.cat([params["start"][None], params["wte.weight"][tokens[inputs]]])
        own = torch.cat([step[:1], inputs + 1])  # 0: of the start
        if config.position != "rotary":
            x = x + params["wpe.weight"][own]
        if config.target == "input":
            x = x + params["wtpe.weight"][order]
        # the first input that later steps see
        first = 1 if config.start == "hidden" else 0
        # The last input of the group that the token of input i is in, the start before
        # them all.
        end = ((step + group - 1) // group * group).clamp(max=T - 1)
        visible = between(step.clamp(max=first), end)
        # where queries stand
        targets = order + (config.query_at == "target")
        condition = None
        if config.target == "two_stream":
            x = self.query_stream(x, visible, own, order, targets, group, first)
        else:
            if config.target == "adaln":
                condition = params["wtpe.weight"][order]
            # A plain GPT is not conditioned on its target, by rotation either.
            turned = own if config.target == "none" else targets
            for layer in range(config.n_layer):
                name = f"blocks.{layer}."
                if config.target in ("shared", "per_block"):
                    prefix = "" if config.target == "shared" else name
                    x = x + params[prefix + "wtpe.weight"][order]
                x = self.block(name, x, condition, visible, turned, own)
        return self.chosen(x, condition, tokens[order])

    def query_stream(self, content, visible, own, order, targets, group, first):
        """Return the final states of the query stream: a learned vector plus its
        position (row 0 of the table is the start's), which reads the contents of the
        groups before its own, inputs `first` (0 is [None]) to the group's start. Both
        streams share all weights; queries are never keys."""
        queries = self.params["query"].expand(len(order), -1)
        if self.config.position != "rotary":
            queries = queries + self.params["wpe.weight"][order + 1]
        step = torch.arange(len(order))
        starts = step - step % group
        seen_by_query = between(starts.clamp(max=first), starts)
        for layer in range(self.config.n_layer):
            name = f"blocks.{layer}."
            keys = self.norm(name + "norm1.", content)
            asking = self.norm(name + "norm1.", queries)
            contents = self.attention(name, keys, keys, visible, own, own)
            answers = self.attention(name, asking, keys, seen_by_query, targets, own)
            content = self.residual(name, content, contents, UNMODULATED)
            queries = self.residual(name, queries, answers, UNMODULATED)
        return queries

    def decoded_by_mask_queries(self, tokens, order, group):
        """Among 2T inputs, contents and then their [MASK] queries, a content sees those
        before it and itself, a query the contents before its group and itself."""
        T = len(order)
        queries = self.params["query"].expand(T, -1)
        x = torch.cat([self.params["wte.weight"][tokens[order]], queries])
        positions = torch.cat([order, order])
        if self.config.position != "rotary":
            x = x + self.params["wpe.weight"][positions]
        visible = torch.zeros(2 * T, 2 * T, dtype=torch.bool)
        for i in range(T):
            visible[i, : i + 1] = True
            visible[T + i, : i - i % group] = True
            visible[T + i, T + i] = True
        for layer in range(self.config.n_layer):
            name = f"blocks.{layer}."
            x = self.block(name, x, None, visible, positions, positions)
        return self.chosen(x[T:], None, tokens[order])

    def encoded(self, tokens, masked, sigma):
        config = self.config
        T = len(tokens)
        x = self.params["wte.weight"][tokens.masked_fill(masked, config.mask_token)]
        if config.position != "rotary":
            x = x + self.params["wpe.weight"][:T]
        condition = None if sigma is None else self.noise_condition(sigma)
        positions = torch.arange(T)
        visible = torch.ones(T, T, dtype=torch.bool)
        for layer in range(config.n_layer):
            name = f"blocks.{layer}."
            x = self.block(name, x, condition, visible, positions, positions)
        return self.outputs(x, condition)[:, : config.mask_token]

    def noise_condition(self, sigma):
        """Apply an MLP with SiLU to 128 cosines and 128 sines of sigma, frequencies 1
        to 10000 ** (-127 / 128)."""
        angles = [float(sigma) * 10000 ** (-k / 128) for k in range(128)]
        waves = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        x = torch.tensor([waves], dtype=self.params["wte.weight"].dtype)
        return self.linear("noise.proj.", _silu(self.linear("noise.fc.", x)))

    def chosen(self, x, condition, tokens):
        """Return the log-probabilities of tokens."""
        outputs = self.outputs(x, condition)
        of_tokens = outputs.gather(1, tokens[:, None]).squeeze(1)
        return of_tokens - outputs.exp().sum(1).log()

    def outputs(self, x, condition):
        head = self.params["wte.weight" if self.config.tied_head else "head.weight"]
        bias = self.params["head.bias"] if self.config.head_bias else 0
        x = self.norm("norm_f.", x)
        if condition is not None:
            shift, scale = self.linear("adaln_f.", _silu(condition)).chunk(2, dim=1)
            x = x * (1 + scale) + shift
        return x @ head.T + bias

    def block(self, name, x, condition, visible, query_positions, key_positions):
        modulation = UNMODULATED
        if condition is not None:
            modulation = self.linear(name + "adaln.", _silu(condition))
            modulation = modulation.split(self.config.n_embd, dim=1)
        shift, scale, *_ = modulation
        h = self.norm(name + "norm1.", x) * (1 + scale) + shift
        attended = self.attention(name, h, h, visible, query_positions, key_positions)
        return self.residual(name, x, attended, modulation)

    def residual(self, name, x, attended, modulation):
        _, _, gate1, shift2, scale2, gate2 = modulation
        x = x + gate1 * attended
        h = self.norm(name + "norm2.", x) * (1 + scale2) + shift2
        up = self.linear(name + "mlp.fc.", h)
        if self.config.mlp == "swiglu":
            h = _silu(self.linear(name + "mlp.gate.", h)) * up
        else:
            h = _gelu(self.config, up)
        return x + gate2 * self.linear(name + "mlp.proj.", h)

    def attention(self, name, asking, content, visible, query_positions, key_positions):
        """Return the output of every row of `asking`, which sees rows of `content`. The
        positions count where keys and queries are rotated."""
        c = self.config
        name = name + "attn."
        size = c.head_width or c.n_embd // c.n_head
        key_heads = c.n_kv_head or c.n_head
        sizes = [c.n_head * size, key_heads * size, key_heads * size]
        queries, _, _ = self.linear(name + "qkv.", asking).split(sizes, dim=1)
        _, keys, values = self.linear(name + "qkv.", content).split(sizes, dim=1)
        if c.value_residual:
            if self.first_values is None:
                self.first_values = values
            a, b = self.params[name + "mix"]
            values = a * values + b * self.first_values
        outputs = []
        for head in range(c.n_head):
            shared = head // (c.n_head // key_heads)
            query = self.head_norm(name + "q_norm.", queries.split(size, dim=1)[head])
            key = self.head_norm(name + "k_norm.", keys.split(size, dim=1)[shared])
            value = values.split(size, dim=1)[shared]
            query = _rotated(c, query, query_positions)
            key = _rotated(c, key, key_positions)
            weights = (query @ key.T / math.sqrt(size)).exp() * visible
            outputs.append(weights @ value / weights.sum(dim=1, keepdim=True))
        return self.linear(name + "proj.", torch.cat(outputs, dim=1))

    def linear(self, name, x):
        y = x @ self.params[name + "weight"].T
        return y + self.params[name + "bias"] if name + "bias" in self.params else y

    def norm(self, name, x):
        if self.config.norm == "rmsnorm":
            return self.rms_norm(name, x)
        x = self.rms_norm(name, x - x.mean(dim=1, keepdim=True))
        return x + self.params[name + "bias"] if name + "bias" in self.params else x

    def head_norm(self, name, x):
        return self.rms_norm(name, x) if self.config.qk_norm else x

    def rms_norm(self, name, x):
        mean_square = x.pow(2).mean(dim=1, keepdim=True) + self.config.norm_eps
        return x / mean_square.sqrt() * self.params[name + "weight"]


def between(first, last):
    """Return which inputs each query sees: those from first[i] to last[i]."""
    inputs = torch.arange(len(first))
    return (inputs >= first[:, None]) & (inputs <= last[:, None])


def _rotated(config, x, positions):
    """Return vectors with coordinates i and i + size / 2 turned by the angle position *
    base ** (-2 i / size), or by less for slow ones (Llama 3.1)."""
    if config.position == "learned":
        return x
    size = x.shape[1]
    rates = [config.rope_base ** (-2 * i / size) for i in range(size // 2)]
    if config.rope_scaling:
        factor, low, high, length = config.rope_scaling
        for i, rate in enumerate(rates):
            turns = length * rate / (2 * math.pi)
            if turns < low:
                rates[i] = rate / factor
            elif turns <= high:
                smooth = (turns - low) / (high - low)
                rates[i] = (1 - smooth) * rate / factor + smooth * rate
    angles = positions[:, None] * torch.tensor(rates, dtype=torch.float64)
    first, second = x.chunk(2, dim=1)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def _silu(x):
    return x / (1 + (-x).exp())


def _gelu(config, x):
    if config.gelu == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + inner.tanh())
    return 0.5 * x * (1 + (x / math.sqrt(2)).erf())


# ---- random models and orders --------------------------------------------------------


def randomise(model, seed, scale=1.0):
    """Give every parameter a random value of a size that matters (at first adaLN does
    nearly nothing)."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if "norm" in name and name.endswith("weight"):
                noise = 1 + 0.3 * noise
            elif name.endswith("bias"):
                noise = 0.3 * noise
            elif p.dim() == 2 and not name.startswith(("wte", "wpe", "wtpe")):
                noise = scale * noise / math.sqrt(p.shape[1])
            p.copy_(noise)
    return model.eval()


def parameters(model):
    return dict(model.named_parameters())


TOKENS = 11  # of the small models


def random_tokens(vocab_size, batch_size, length, seed):
    return torch.randint(vocab_size, (batch_size, length), generator=seeded(seed))


def random_orders(batch_size, length, seed):
    generator = seeded(seed)
    return torch.stack(
        [torch.randperm(length, generator=generator) for _ in range(batch_size)]
    )


def random_text(batch_size, length, seed=0, vocab_size=TOKENS):
    """Return tokens and orders, (B, T) both."""
    tokens = random_tokens(vocab_size, batch_size, length, seed)
    return tokens, random_orders(batch_size, length, seed + 1)


def order_through(context, target, length):
    """Return the order (context, target, all others): step len(context) predicts
    `target`."""
    rest = [p for p in range(length) if p not in context and p != target]
    return [*context, target, *rest]


# ---- enumeration of tiny problems ----------------------------------------------------


def all_sequences(vocab_size, length):
    """Return every sequence, (vocab_size ** length, length), the last position running
    fastest."""
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))


def listed_contexts(length):
    """Return every (context, target): positions in every order, and a position that is
    not among them."""
    listed = []
    for size in range(length):
        for context in itertools.permutations(range(length), size):
            rest = [p for p in range(length) if p not in context]
            listed += [(context, target) for target in rest]
    return listed


def conditionals(model, vocab_size, length):
    """Return {(context, target): float64 (V ** T,)}: p(x_target | x_context listed in
    that order) for every sequence x. Of two_stream also {(context, sizes, target): ...}
    (`given_groups`)."""
    sequences = all_sequences(vocab_size, length)
    keys = listed_contexts(length)
    orders = [order_through(context, target, length) for context, target in keys]
    rows = token_log_probs(
        model,
        sequences.repeat(len(keys), 1),
        torch.tensor(orders).repeat_interleave(len(sequences), dim=0),
    )
    rows = rows.unflatten(0, (len(keys), len(sequences)))
    result = {}
    for (context, target), row in zip(keys, rows, strict=True):
        result[context, target] = row[:, len(context)].double().exp()
    if not in_groups(model):
        return result
    for context, target in keys:
        order = torch.tensor(order_through(context, target, length))
        order = order.expand_as(sequences)
        for sizes in ordered_sums(len(context)):
            starts = group_starts(sizes, length).expand_as(sequences)
            with torch.no_grad():
                log_probs = -model(sequences, order, starts)[:, len(context)]
            result[context, sizes, target] = log_probs.double().exp()
    return result


def exact_loss(conditional, orders, size=1, given=0):
    """Return nats per token of every sequence, (V ** T,), over these orders. size: of
    an ensemble, over all other members; the first `given` steps of every order are the
    prompt."""
    total = 0
    for order in orders:
        prompt = order[:given]
        for step in range(given, len(order)):
            target = order[step]
            own = conditional[tuple(order[:step]), target]
            # Members are drawn from p(target) after every order of the same context.
            of_each_order = []
            for context in itertools.permutations(order[given:step]):
                of_each_order.append(conditional[(*prompt, *context), target])
            means = []
            for members in itertools.product(of_each_order, repeat=size - 1):
                ensemble = torch.stack([own, *members])
                means.append(ensemble.mean(dim=0))
            total = total - torch.stack(means).log().mean(dim=0)
    return total / sum(len(order) - given for order in orders)


def in_groups(model):
    """Return whether it matters to a model what was predicted in one step."""
    return model.config.target == "two_stream" and model.config.group_attention


def ordered_sums(total):
    """Return all ways to write `total` as an ordered sum of positive integers."""
    parts = range(1, total + 1)
    return [(n, *rest) for n in parts for rest in ordered_sums(total - n)] or [()]


def group_starts(sizes, length):
    """Return LongTensor (length,): the first step of every step's group, groups of
    these sizes, then of one."""
    starts = []
    for size in sizes:
        starts += [len(starts)] * size
    starts += range(len(starts), length)
    return torch.tensor(starts)


def given_groups(conditional, context, sizes, target):
    """Return p(x_target | x_context in groups of these sizes, perhaps 0), (V ** T,)."""
    context = tuple(context)
    grouped = (context, tuple(size for size in sizes if size), target)
    if grouped in conditional:
        return conditional[grouped]
    return conditional[context, target]


def encoder_conditionals(model, vocab_size, length):
    """Return the same dictionary for an encoder: a context listed in another order is
    the same context."""
    sequences = all_sequences(vocab_size, length)
    result = {}
    for masked in mask_sets(length):
        context = [p for p in range(length) if p not in masked]
        rows = torch.tensor([p in masked for p in range(length)]).expand_as(sequences)
        probabilities = masked_log_probs(model, sequences, rows).double().exp()
        for listed in itertools.permutations(context):
            for target in masked:
                result[listed, target] = probabilities[:, target]
    return result


def mask_sets(length):
    """Return every non-empty set of masked positions, as a tuple."""
    sets = []
    for size in range(1, length + 1):
        sets += itertools.combinations(range(length), size)
    return sets


def mdm_weight(masked, length):
    """Return int_0^1 (1/t) t^m (1-t)^(n-m) dt = B(m, n-m+1) = (m-1)! (n-m)! / n!,
    exactly."""
    m = len(masked)
    product = math.factorial(m - 1) * math.factorial(length - m)
    return Fraction(product, math.factorial(length))


def compositions(total, parts):
    """Return all ways to write `total` as an ordered sum of `parts` non-negative
    integers."""
    if parts == 1:
        return [(total,)]
    firsts = range(total + 1)
    return [(n, *rest) for n in firsts for rest in compositions(total - n, parts - 1)]


def exact_plans(free, given, steps, schedule="linear"):
    """Yield every (probability, order, group sizes) when each position of `free`
    unmasks at its own U(0, 1) time, observed in `steps` equal steps. With the cosine
    schedule the share of masked positions at time t is sin(pi t / 2), t falling from 1
    to 0."""
    masked = [Fraction(steps - i, steps) for i in range(steps + 1)]
    if schedule == "cosine":
        masked = [math.sin(math.pi / 2 * float(t)) for t in masked]
    shares = [a - b for a, b in itertools.pairwise(masked)]
    for perm in itertools.permutations(free):
        for counts in compositions(len(free), steps):
            probability = 1
            for share, n in zip(shares, counts, strict=True):
                probability = probability * share**n / math.factorial(n)
            yield probability, (*given, *perm), counts


def even_sizes(n, steps, schedule="linear"):
    """Return the sizes of the groups of an even plan: differences of the number of
    positions unmasked, n (1 - t) rounded up, or by the cosine schedule n (1 - sin(pi t
    / 2)) rounded."""
    steps = min(n, steps)
    unmasked = []
    for i in range(steps + 1):
        if schedule == "linear":
            unmasked.append(-(-n * i // steps))
        else:
            masked = math.sin(math.pi / 2 * (steps - i) / steps)
            unmasked.append(round(n * (1 - masked)))
    return tuple(b - a for a, b in itertools.pairwise(unmasked))


def fixed_plans(free, given, counts):
    """Yield every (probability, order, group sizes) of a uniformly random order in
    groups of given sizes."""
    probability = Fraction(1, math.factorial(len(free)))
    for perm in itertools.permutations(free):
        yield probability, (*given, *perm), counts


def plan_distribution(conditional, plans, n_given=0):
    """Return the distribution over all sequences, (V ** T,), of decoding by a random
    plan: tokens of a group are independent, each given the groups before it in the
    order in which they were unmasked."""
    total = 0
    for probability, order, counts in plans:
        product = torch.ones_like(next(iter(conditional.values())))
        known_count = n_given
        for g, count in enumerate(counts):
            groups = (*[1] * n_given, *counts[:g])
            context = order[:known_count]
            for target in order[known_count : known_count + count]:
                product = product * given_groups(conditional, context, groups, target)
            known_count += count
        assert known_count == len(order)
        total = total + float(probability) * product
    return total


def _certainty(conditional, target, vocab_size, length, by):
    """Return, for the distribution at `target` that each sequence belongs to, its
    highest probability, minus its entropy, or how far its highest probability is above
    the second."""
    probs = conditional.view((vocab_size,) * length)
    ranked = probs.sort(target, descending=True).values
    certain = {
        "confidence": probs.amax(target, True),
        "entropy": (probs * probs.log()).sum(target, True),
        "margin": ranked.narrow(target, 0, 1) - ranked.narrow(target, 1, 1),
    }[by]
    return certain.expand_as(probs).flatten()


def paced_distribution(conditional, vocab_size, length, options, given=()):
    """Return the distribution over all sequences, (V ** T,), of decoding where the
    model chooses the positions of a step (`paced_choice`). Equals are ranked in
    uniformly random order."""

    def probability(x, context, sizes):
        free = [p for p in range(length) if p not in context]
        if not free:
            return 1.0
        probs = {p: given_groups(conditional, context, sizes, p) for p in free}

        def scores_by(score):
            scores = {}
            for p in free:
                of_sequences = _certainty(probs[p], p, vocab_size, length, score)
                scores[p] = of_sequences[x].item()
            return scores

        scores = scores_by(options.name)
        certain = scores_by("entropy")
        choices = Counter()
        for ranked in itertools.permutations(free):
            chosen = paced_choice({p: scores[p] for p in ranked}, certain, options)
            choices[tuple(chosen)] += 1
        total = 0.0
        for chosen, times in choices.items():
            share = times / choices.total()
            rest = probability(x, (*context, *chosen), (*sizes, len(chosen)))
            total += share * rest * math.prod(probs[p][x].item() for p in chosen)
        return total

    sequences = range(vocab_size**length)
    values = [probability(x, tuple(given), (1,) * len(given)) for x in sequences]
    return torch.tensor(values, dtype=torch.float64)


def paced_choice(scores, certain, options):
    """Return the positions of the next step, best first, of those left {position:
    score}, equals (to seven digits: the same number, rounded differently) in their
    order; certain: minus the entropy of each; options: what bounds a step."""
    block = options.block
    if block is not None:
        first = min(scores) // block
        scores = {p: score for p, score in scores.items() if p // block == first}
    ranked = sorted(scores, key=lambda p: round(scores[p], 7), reverse=True)
    count = len(ranked)
    least = options.threshold
    if least is not None:
        if options.name == "entropy":
            least = -least
        count = sum(score >= least for score in scores.values())
    if options.entropy_bound is not None:
        entropies = [-certain[p] for p in ranked]
        within = 0
        for k in range(1, len(ranked) + 1):
            total = sum(entropies[:k]) - max(entropies[:k])
            within += total <= options.entropy_bound
        count = min(count, within)
    limits = (options.threshold, options.entropy_bound)
    most = options.group or (1 if limits == (None, None) else len(ranked))
    return ranked[: min(max(count, 1), most)]


# ---- the choice of a token, by definition --------------------------------------------


def truncated(probs, choice):
    """Return a list of probabilities with zeros for the tokens that are cut off: sort
    (lower id first among equals), keep top_k, renormalise, keep the shortest head whose
    mass reaches top_p, and at least one token; renormalise."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: choice.top_k]
    mass = sum(probs[i] for i in ranked)
    kept_ids = []
    reached = 0.0
    for i in ranked:
        kept_ids.append(i)
        reached += probs[i] / mass
        if reached >= choice.top_p:
            break
    mass = sum(probs[i] for i in kept_ids)
    return [probs[i] / mass if i in kept_ids else 0.0 for i in range(len(probs))]


def tempered(logits, temperature):
    if temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    weights = [math.exp((v - max(logits)) / temperature) for v in logits]
    return [w / sum(weights) for w in weights]


def with_choice(conditional, choice, vocab_size, length):
    """Return the conditionals after temperature, top-k and nucleus, by the definitions
    above."""
    result = {}
    cache = {}
    for (context, target), p in conditional.items():
        by_position = p.view((vocab_size,) * length)
        rows = by_position.movedim(target, -1).reshape(-1, vocab_size)
        chosen = []
        for row in rows:
            key = tuple(row.tolist())
            if key not in cache:
                probs = tempered(row.log().tolist(), choice.temperature)
                cache[key] = truncated(probs, choice)
            chosen.append(cache[key])
        chosen = torch.tensor(chosen, dtype=torch.float64)
        by_position = chosen.view((vocab_size,) * length)
        result[context, target] = by_position.movedim(-1, target).flatten()
    return result


# ---- chi-square ----------------------------------------------------------------------


def chi_square_p(observed, expected):
    """Return the p value of Pearson's test of counts (K,) against expected counts (K,)
    of the same total. Cells are merged, smallest first, until each expects 5; what
    cannot be but was observed is p = 0."""
    observed = observed.double()
    expected = expected.double()
    assert abs(float(observed.sum() - expected.sum())) < 1e-6 * float(expected.sum())
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    index = expected.argsort()
    cells = []
    seen = 0.0
    wanted = 0.0
    for o, e in zip(observed[index].tolist(), expected[index].tolist(), strict=True):
        seen = seen + o
        wanted = wanted + e
        if wanted >= 5:
            cells.append((seen, wanted))
            seen = 0.0
            wanted = 0.0
    assert len(cells) >= 2, "too few counts to test anything"
    cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def accept(counts, distribution):
    """Return whether counts (K,) pass for draws from a distribution (K,); 1e-5: SEDD's
    is of float32 sums."""
    total = float(distribution.sum())
    assert abs(total - 1) < 1e-5
    return chi_square_p(counts, counts.sum() * distribution / total) > LEVEL


# ---- models, plans and samples -------------------------------------------------------

TINY = {
    "vocab_size": TOKENS + 1,
    "block_size": 9,
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 12,
    "cond_dim": 5,
}
# Every setting that a decoder of the Llama family has: Llama 3, Qwen2 and Qwen3 in one.
LLAMA = {
    "position": "rotary",
    "n_kv_head": 1,
    "head_width": 6,
    "mlp": "swiglu",
    "mlp_width": 20,
    "norm_eps": 1e-6,
    "rope_base": 500.0,
    "rope_scaling": (4.0, 0.1, 1.0, 8),
    "attn_proj_bias": False,
    "mlp_bias": False,
    "tied_head": True,
    "head_bias": False,
}
OF_GPT2 = {"norm": "layernorm", "qk_norm": False, "tied_head": True, "head_bias": False}
FAST = {"position": "rotary", "value_residual": True}
DECODERS = {
    "GPT-2": {**OF_GPT2, "target": "none", "gelu": "tanh", "start": "hidden"},
    "sigma-GPT": {**OF_GPT2, "target": "input"},
    "AO-GPT": {},
    "shared": {"target": "shared"},
    "per_block": {"target": "per_block"},
    "two_stream": {"target": "two_stream"},
    "AO-GPT, rotary": {"position": "rotary"},
    "target rotary": {**FAST, "target": "rotary"},
    "Llama": {**LLAMA, "target": "rotary", "query_at": "before_target"},
    "mask_query": {"target": "mask_query"},
}
RADD = {
    "attention": "full",
    "target": "none",
    "mask_token": TOKENS,
    "position": "rotary",
    "norm": "layernorm",
    "qk_norm": False,
    "gelu": "tanh",
    "attn_bias": False,
}
ENCODERS = {
    "RADD": RADD,
    "SEDD": {**RADD, "norm_bias": False, "noise": True},
    "encoder AO-GPT": {"attention": "full", "target": "none", "mask_token": TOKENS},
}
SYSTEMS = {**DECODERS, **ENCODERS}
# Systems that the tests of all systems do without.
ONE_BY_ONE = "two_stream, one by one"  # never trained in groups
ROTARY_GPT = "GPT, rotary"  # plain, with the fast recipe
ROTATED = {
    f"{system}, rotary": {**DECODERS[system], "position": "rotary"}
    for system in ("sigma-GPT", "shared", "per_block")
}
OTHERS = {
    **ROTATED,
    ONE_BY_ONE: {"target": "two_stream", "group_attention": False},
    "mask_query, rotary": {**FAST, "target": "mask_query"},
    "two_stream, rotary": {**FAST, "target": "two_stream"},
    ROTARY_GPT: {**FAST, "target": "none"},
    "Llama, plain": {**LLAMA, "target": "none", "start": "hidden"},
    "Llama, A3": {
        **LLAMA,
        "target": "two_stream",
        "query_at": "before_target",
        "tied_head": False,
    },
    "per_block, both": {"target": "per_block", "position": "both"},
}


def tiny_model(system, tokens=None, **settings):
    """Return the config of a small model of a system. tokens: their number, beside
    [MASK] of an encoder."""
    values = dict(TINY)
    values.update(SYSTEMS[system] if system in SYSTEMS else OTHERS[system])
    values.update(settings)
    if tokens is not None:
        values["vocab_size"] = tokens
        if system in ENCODERS:
            values["vocab_size"] = tokens + 1
            values["mask_token"] = tokens
    return ModelConfig(**values)


def make_system(
    system, seed=0, dtype=torch.float64, scale=1.0, tokens=None, **settings
):
    """Return a small random model of a system; see `tiny_model`."""
    config = tiny_model(system, tokens, **settings)
    return randomise(build_model(config).to(dtype), seed, scale)


def enumerable_system(
    system, seed, length=4, tokens=3, n_head=2, n_embd=8, cond_dim=4, **settings
):
    """Return a float64 model of 4 positions and 3 tokens, 81 sequences, and its
    conditionals."""
    model = make_system(
        system,
        seed,
        tokens=tokens,
        block_size=length,
        n_head=n_head,
        n_embd=n_embd,
        cond_dim=cond_dim,
        **settings,
    )
    enumerate_them = encoder_conditionals if system in ENCODERS else conditionals
    return model, enumerate_them(model, tokens, length)


def modes(text):
    """Return the modes in a list that is separated by commas."""
    return re.split(r",\s+", text.strip())


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def some_given(batch_size, length, seed):
    """Return masks (B, T) of given positions: rows with nothing given, everything given
    and random subsets given."""
    given = torch.rand(batch_size, length, generator=seeded(seed)) < 0.4
    given[0] = False
    given[1] = True
    return given


# Of a mode, and their types.
ARGUMENTS = {
    "steps": int,
    "schedule": str,
    "group": int,
    "threshold": float,
    "entropy_bound": float,
    "block": int,
    "draft": int,
    "order": str,
}


@functools.cache
def options_of(mode):
    """Return the arguments of a mode, such as "mdm:steps=3,schedule=cosine", and its
    name; None where one is not written."""
    name, _, written = mode.partition(":")
    options = dict.fromkeys(ARGUMENTS)
    options["schedule"] = "linear"
    for setting in written.split(",") if written else ():
        key, _, value = setting.partition("=")
        options[key] = ARGUMENTS[key](value)
    return SimpleNamespace(name=name, **options)


# Modes in which the model chooses how many positions a step unmasks.
PACED = modes("""
    confidence:threshold=0.45, margin:threshold=0.15,group=2,
    entropy:threshold=0.95, entropy:entropy_bound=0.95,
    confidence:entropy_bound=1.9,group=3,
    confidence:threshold=0.4,entropy_bound=1.0, confidence:block=2,
    entropy:block=3,group=2, confidence:threshold=0.45,block=3
""")


def generate(
    model,
    plan,
    tokens=None,
    *,
    generator=None,
    uniforms=None,
    forced=None,
    end_token=None,
    progress=None,
    **settings,
):
    """Return the samples of a new engine with these settings."""
    return Engine(model, **settings).generate(
        plan,
        tokens,
        generator if uniforms is None else uniforms,
        forced=forced,
        end_token=end_token,
        progress=progress,
    )


def make_plan(mode, batch_size, length, given=None, seed=0):
    """Return a plan of a mode, as --mode has it."""
    return parse_mode(mode)(Samples(batch_size, length, seeded(seed), given))


def plans_of(options, free, given):
    """Return every (probability, order, group sizes) of a mode whose plans do not
    depend on the model."""
    # Speculation has the exact joint of the order, whatever is drafted.
    size = options.group or 1
    groups = tuple(min(size, len(free) - i) for i in range(0, len(free), size))
    if "l2r" in (options.name, options.order):
        return [(1, (*given, *free), groups)]
    if options.name == "mdm":
        return exact_plans(free, given, options.steps, options.schedule)
    if options.name == "even":
        groups = even_sizes(len(free), options.steps, options.schedule)
    return fixed_plans(free, given, groups)


def distribution_of(mode, conditional, vocab_size, length, prompt=()):
    """Return the distribution over all sequences that a plan of `make_plan` must give;
    prompt: {position: token}."""
    o = options_of(mode)
    free = [p for p in range(length) if p not in prompt]
    context = tuple(sorted(prompt))
    if o.name in SCORES:
        expected = paced_distribution(conditional, vocab_size, length, o, context)
    else:
        plans = plans_of(o, free, context)
        expected = plan_distribution(conditional, plans, len(context))
    sequences = all_sequences(vocab_size, length)
    for position, token in dict(prompt).items():
        expected = expected * (sequences[:, position] == token)
    return expected


def prompt_rows(prompt, batch_size, length):
    """Return given and tokens, (B, T) both, of a prompt {position: token} that every
    row has."""
    tokens = torch.tensor([prompt.get(p, 0) for p in range(length)])
    given = torch.tensor([p in prompt for p in range(length)])
    return given.expand(batch_size, length), tokens.expand(batch_size, length)


def sequence_counts(tokens, vocab_size):
    """Return how often each sequence of `all_sequences` occurs among tokens (B, T)."""
    length = tokens.shape[1]
    place = torch.tensor([vocab_size ** (length - 1 - i) for i in range(length)])
    return (tokens * place).sum(dim=1).bincount(minlength=vocab_size**length)


def sampled_counts(model, plan, seed, tokens=None, choice=None, **settings):
    samples = generate(
        model, plan, tokens, generator=seeded(seed), choice=choice, **settings
    )
    vocab_size = model.config.mask_token or model.config.vocab_size
    return sequence_counts(samples.tokens, vocab_size)


def log_probs_of_steps(model, tokens, order, steps, is_drafted=False):
    """Return the log-probability of each token of a row in its order, (T,), given those
    of earlier steps, or all before it where they were drafted; 0 of what is given.
    steps: in that order, -1 where given."""
    is_generated = steps >= 0
    starts = torch.arange(len(order))
    if not is_drafted:
        starts = torch.searchsorted(steps, steps).where(is_generated, starts)
    text = tokens[None]
    order = order[None]
    if in_groups(model):
        with torch.no_grad():
            log_probs = -model(text, order, starts[None])
    else:
        log_probs = token_log_probs(model, text, order, known=starts[None])
    return log_probs[0].where(is_generated, 0)
