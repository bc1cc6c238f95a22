"""The engine: generation by any plan, with a KV cache for decoders and full passes for encoders.

A plan is known before the model runs, so the shapes of every step are known on the host: nothing in the loop waits for
the device, caches are allocated once, the adaLN tables are computed once, and only positions that are being revealed
reach the output head. Compiled, the sizes of a step are rounded up to few widths, so that no new shapes turn up.

Shapes: B samples in flight, T positions, G groups, N items of a step, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import model as model_module
from model import AOGPT, MLP, KVCache, ParallelPass, log_linear_noise, ragged
from runtime.devices import available_memory, out_of_memory, release_memory
from sampling.plans import (
    Plan,
    adaptive_plan,
    group_sizes,
    l2r_plan,
    mdm_plan,
    random_plan,
    speculative_plan,
)
from sampling.token_choice import (
    ACCEPTED,
    CORRECTED,
    TokenChoice,
    choose_tokens,
    draw,
    fresh_uniforms,
    probabilities,
)

__all__ = [
    "Engine",
    "Generation",
    "Plan",
    "TokenChoice",
    "adaptive_plan",
    "choose_tokens",
    "generate",
    "group_sizes",
    "l2r_plan",
    "mdm_plan",
    "random_plan",
    "speculative_plan",
]

CPU_CHUNK_ELEMENTS = (
    2**19
)  # logits whose tokens are drawn at once on a CPU: they and their copies stay in its cache


BUFFERS = {
    "order": torch.long,
    "tokens": torch.long,
    "log_probs": torch.float,
    "uniforms": torch.float64,
}


@dataclass
class Generation:
    """Samples and how they came about.

    tokens: LongTensor (B, T) in sequence order; 0 past the end of a shorter sample.
    step: LongTensor (B, T), the step of the plan (speculative: the round) at which each position was revealed, -1 for
        given ones and past the end.
    log_probs: float tensor (B, T), log-probability (nats) of each revealed token under the model, given what was known
        when it was revealed, among the ids that may be drawn, before temperature and truncation; 0 where step is -1.
    length: LongTensor (B,), positions of each sample.
    model_calls: forward passes of the model, all batches together.
    token_forwards: inputs those passes were fed, padding left out.
    """

    tokens: Tensor
    step: Tensor
    log_probs: Tensor
    length: Tensor
    model_calls: int
    token_forwards: int

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: list[Generation]) -> Generation:
        """Samples that were generated in parts, as one."""
        return Generation(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.step for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.length for part in parts]),
            sum(part.model_calls for part in parts),
            sum(part.token_forwards for part in parts),
        )

    def rows(self) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Tokens, steps and log-probabilities of each sample, as long as it is."""
        for b, length in enumerate(self.length.tolist()):
            yield tuple(
                values[b, :length].tolist() for values in (self.tokens, self.step, self.log_probs)
            )


@torch.no_grad()
def generate(
    model: AOGPT,
    plan: Plan,
    tokens: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    choice: TokenChoice | None = None,
    vocab_size: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    compile: bool = False,
    halve: bool | None = None,
) -> Generation:
    """Generate the samples of a plan.

    Args:
        model: in eval mode, on any device.
        plan: B samples of up to T <= block_size positions. A decoder that is not told its target position (GPT) makes
            sense of plans that continue a text from left to right, one token a step.
        tokens: LongTensor (B, T) that holds the given tokens at the plan's given positions; the rest is ignored.
        generator: CPU generator of one uniform number per position, or
        uniforms: those numbers, float64 (B, T) in sequence order, in [0, 1): sample b depends on row b alone. The same
            sample in another batch has logits that differ by rounding: in float32 that moves a token once in about a
            million (where a draft is rejected more often), in bfloat16 often.
        choice: temperature, top-p, top-k, noise.
        vocab_size: only ids below it are drawn (the rows that pad the token table are not tokens).
        batch_size: samples in flight at once; all by default.
        progress: called after every step with the number of positions it unmasked; with less than 0 where memory ran
            out and a smaller batch begins again.
        compile: torch.compile the step, with CUDA graphs on a GPU; worth its minutes for many samples.
        halve: whether to take smaller batches where memory runs out; by default only if no batch_size is given.

    Raises ValueError for what does not fit together, if memory does not suffice, and after the
    last step if the model's output was not finite. Whoever generates in a loop should keep an `Engine`.
    """
    B, T = plan.order.shape
    for name, value in (("vocab_size", vocab_size), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1, or None for all")
    tokens, uniforms = _check(model, plan, tokens, uniforms, generator)
    halve = batch_size is None if halve is None else halve
    size = _size_that_fits(model, T, min(B, batch_size or B), halve)
    generated = 0

    def count(positions: int) -> None:
        nonlocal generated
        generated += positions
        if progress is not None:
            progress(positions)

    while True:
        try:
            engine = Engine(model, size, T, choice or TokenChoice(), vocab_size, compile)
            return engine.run(plan, tokens, uniforms, count)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if not halve or size == 1:
                raise ValueError(
                    f"memory ran out with a batch of {size} samples of {T} tokens on "
                    f"{model.wte.weight.device}: {_advice(size // 2)}"
                ) from error
        # Begin again with half as many, and give back what the full batch took.
        size //= 2
        count(-generated)
        engine = None
        release_memory(model.wte.weight.device)


def _size_that_fits(model: AOGPT, length: int, batch_size: int, halve: bool) -> int:
    """The batch size, halved for as long as its cache and buffers do not fit into memory; where it
    may not be halved, a ValueError that says which would.

    What these take is known exactly. The rest, the tensors of a step, is found out by running it.
    """
    device = model.wte.weight.device
    free, one = available_memory(device), bytes_per_sample(model, length)
    if free is None:
        return batch_size
    while halve and batch_size > 1 and batch_size * one > free:
        batch_size //= 2
    if batch_size * one > free:
        raise ValueError(
            f"the cache of {batch_size} samples of {length} tokens takes "
            f"{batch_size * one / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB are free on {device}: "
            f"{_advice(free // one)}"
        )
    return batch_size


def _advice(batch_size: int) -> str:
    if batch_size:
        return f"take a batch size of {batch_size} or less"
    return "not even one sample fits: take shorter samples or more steps"


def bytes_per_sample(model: AOGPT, length: int) -> int:
    """Bytes of the cache and the buffers that an engine allocates for each sample in flight."""
    numbers = sum(dtype.itemsize for dtype in BUFFERS.values()) * (length + 1)
    if model.config.is_encoder:
        return numbers
    dtype = model.wte.weight.dtype
    cache = KVCache(model.config, 1, length, device="meta", dtype=dtype)
    return numbers + cache.keys.nbytes + cache.values.nbytes


def _check(model, plan, tokens, uniforms, generator) -> tuple[Tensor, Tensor]:
    """Tokens, 0 where they are not given, and uniforms, both (B, T); ValueError if they do not fit model and plan."""
    B, T = plan.order.shape
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if B == 0:
        raise ValueError("the plan holds no samples; plan at least one")
    if T > model.config.block_size:
        raise ValueError(
            f"samples of {T} tokens, but the model was built for up to {model.config.block_size}"
        )
    if plan.draft and (model.config.is_encoder or model.config.target == "none"):
        raise ValueError(
            "speculative decoding needs a decoder that is told its target position; use another plan"
        )
    if tokens is None:
        if plan.given().any():
            raise ValueError("the plan has given positions: pass their tokens")
        tokens = torch.zeros(B, T, dtype=torch.long)
    if uniforms is None:
        uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    for name, value in (("tokens", tokens), ("uniforms", uniforms)):
        if value.shape != (B, T):
            raise ValueError(f"{name} are {tuple(value.shape)}, but the plan is for {(B, T)}")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1); torch.rand in float64 makes such numbers")
    given = tokens.cpu()[plan.given()]
    ids = model.config.vocab_size if model.config.mask_token is None else model.config.mask_token
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < ids:
        raise ValueError(f"a given token is outside the model's vocabulary of {ids}")
    return tokens.cpu().where(plan.given(), 0), uniforms


# ---- the sizes of every step, known before the first -----------------------------------------------------------------


@dataclass
class Steps:
    """What each group of a plan feeds and reveals; LongTensors (G, B) on the host.

    cached: inputs in the cache before the step. known: tokens known. count: inputs fed. size: positions revealed.
    """

    cached: Tensor
    known: Tensor
    count: Tensor
    size: Tensor

    @staticmethod
    def of(plan: Plan, encoder: bool) -> Steps:
        size = group_sizes(plan).T
        given = (plan.valid() & (plan.step < 0)).sum(dim=1)
        known = given + size.cumsum(dim=0) - size
        if encoder:
            cached, count = torch.zeros_like(known), (size > 0) * plan.length
        elif plan.unmask_by == "order":
            # The first copy of a step is the true input of its slot and stays.
            cached = torch.cat([torch.zeros_like(known[:1]), known[:-1] + 1])
            count = (size > 0) * (known - cached + size)
        else:
            # Every position left is a candidate; the copies stand for an order that is yet to be chosen.
            cached = torch.cat([torch.zeros_like(known[:1]), known[:-1]])
            count = (size > 0) * (plan.length - cached)
        return Steps(cached, known, count, size)

    def needs(self, plan: Plan) -> list[tuple[int, ...]]:
        """Of every step: items, items of the widest row, positions revealed, and positions that could be if the model
        chooses among all that are left."""
        candidates = (self.size > 0) * (plan.length - self.known) * (plan.unmask_by != "order")
        columns = (
            self.count.sum(dim=1),
            self.count.amax(dim=1),
            self.size.sum(dim=1),
            candidates.sum(dim=1),
        )
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _head_rows(config) -> int:
    """Rows whose logits are alive at once."""
    return max(1, model_module.HEAD_CHUNK_ELEMENTS // config.vocab_size)


class Shapes:
    """The few shapes that compiled steps have. A shape: items, width, reveals and candidates of a step.

    Groups of one plan differ in size, and each new shape costs a compilation: a step takes a shape that is there if it
    is large enough and not more than four times too large.
    """

    def __init__(self):
        self.made: list[tuple[int, ...]] = []

    def prepare(self, needs: list[tuple[int, ...]]) -> None:
        """Make the shapes that a list of steps will take: one for the largest and all down to a quarter of it, ..."""
        waiting = sorted(needs, key=max, reverse=True)
        while waiting := [need for need in waiting if self._find(need) is None]:
            largest = self._rounded(max(waiting[0]))
            level = [need for need in waiting if 4 * max(*need, 8) >= largest]
            self.made.append(tuple(self._rounded(max(sizes)) for sizes in zip(*level, strict=True)))

    def fit(self, need: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a step takes."""
        if self._find(need) is None:
            self.prepare([need])
        return self._find(need)

    def _find(self, need: tuple[int, ...]) -> tuple[int, ...] | None:
        for shape in self.made:
            if all(n <= size for n, size in zip(need, shape, strict=True)) and max(
                shape
            ) <= 4 * max(*need, 8):
                return shape
        return None

    @staticmethod
    def _rounded(n: int) -> int:
        """Up to a multiple of 8, and to three significant bits: 8, 16, ..., 64, 80, 96, 112, 128, 160, ..."""
        unit = 1 << max(n.bit_length() - 3, 3)
        return -(-n // unit) * unit


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU, its weight laid out by oneDNN: for few rows 2 to 4 times as fast."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: Tensor, then: str = "none", variant: str = "") -> Tensor:
        """`then`: an activation that is applied to the output where it is computed."""
        return torch.ops.mkldnn._linear_pointwise(
            x.to(self.weight.dtype), self.packed, self.bias, then, [], variant
        )


class PackedMLP(nn.Module):
    def __init__(self, mlp: MLP):
        super().__init__()
        self.approximate, self.fc, self.proj = (
            mlp.approximate,
            PackedLinear(mlp.fc),
            PackedLinear(mlp.proj),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x, "gelu", self.approximate))


def packed(model: AOGPT) -> AOGPT:
    """The model with packed linear layers, sharing all parameters, where that makes it faster: in float32 on a CPU."""
    if not _can_pack(model):
        return model
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            replacement = {nn.Linear: PackedLinear, MLP: PackedMLP}.get(type(child))
            if replacement:
                setattr(module, name, replacement(child))
    return model


def _can_pack(model: AOGPT) -> bool:
    weight = model.wte.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


# ---- the engine ------------------------------------------------------------------------------------------------------


class Engine(nn.Module):
    """The state of B samples in flight, and the steps that advance it.

    One engine serves any number of batches and plans: what is allocated, packed or compiled once stays. The model's
    weights must stay as they are meanwhile.

    Buffers (their addresses stay, as CUDA graphs need): order, tokens, log_probs by prediction step, uniforms by
    position; a last column takes what nobody reads.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: AOGPT,
        batch_size: int,
        length: int,
        choice: TokenChoice,
        vocab_size=None,
        compile=False,
    ):
        super().__init__()
        self.model, self.choice, self.vocab_size = (
            model if compile else packed(model),
            choice,
            vocab_size,
        )
        self.B, self.T, self.shapes = batch_size, length, Shapes() if compile else None
        self.encoder = model.config.is_encoder
        device, dtype = model.wte.weight.device, model.wte.weight.dtype
        for name, kind in BUFFERS.items():
            self.register_buffer(
                name,
                torch.zeros(batch_size, length + 1, dtype=kind, device=device),
                persistent=False,
            )
        self.register_buffer(
            "length", torch.zeros(batch_size, dtype=torch.long, device=device), persistent=False
        )
        self.cache = None
        if not self.encoder:
            self.cache = KVCache(model.config, batch_size, length, device=device, dtype=dtype)
            self.tables = model.modulations()
        self.eval()
        how = {"dynamic": False, "mode": "reduce-overhead" if device.type == "cuda" else "default"}
        self._step = torch.compile(self.step, **how) if compile else self.step
        self._pass = torch.compile(self.parallel_pass, **how) if compile else self.parallel_pass

    @torch.no_grad()
    def generate(
        self, plan: Plan, tokens=None, *, generator=None, uniforms=None, progress=None
    ) -> Generation:
        """As the function of that name, for plans of T positions, B samples at a time."""
        if plan.order.shape[1] != self.T:
            raise ValueError(
                f"the plan is for {plan.order.shape[1]} positions, but this engine is for {self.T}"
            )
        return self.run(plan, *_check(self.model, plan, tokens, uniforms, generator), progress)

    @torch.no_grad()
    def run(self, plan: Plan, tokens: Tensor, uniforms: Tensor, progress=None) -> Generation:
        """`generate` without its checks."""
        if plan.draft and self.choice.noise != "float64":
            raise ValueError(
                f"speculative decoding draws exactly; {self.choice.noise} noise has no meaning there"
            )
        batches = [slice(start, start + self.B) for start in range(0, len(plan), self.B)]
        if (
            self.shapes is not None and not plan.draft
        ):  # of all batches at once: the fewest shapes that serve them
            self.shapes.prepare(
                [need for rows in batches for need in self._steps(plan[rows]).needs(plan[rows])]
            )
        parts = [
            self._batch(plan[rows], tokens[rows], uniforms[rows], progress) for rows in batches
        ]
        return Generation.joined(parts)

    def _batch(self, plan: Plan, tokens: Tensor, uniforms: Tensor, progress) -> Generation:
        plan, tokens, uniforms, rows = *self._padded(plan, tokens, uniforms), len(plan)
        self.order[:, : self.T].copy_(plan.order)
        self.tokens[:, : self.T].copy_(tokens.gather(1, plan.order))
        self.uniforms[:, : self.T].copy_(uniforms)
        self.length.copy_(plan.length)
        self.log_probs.zero_()
        step = plan.step.where(plan.generated(), -1)
        if plan.draft:
            calls, forwards, step = self._speculate(plan, step, progress)
        else:
            calls, forwards = self._follow(plan, progress)
        if not self.log_probs[:, : self.T].isfinite().all():
            raise ValueError(
                "the model's output is not finite (its weights overflowed or hold NaN); nothing was generated"
            )
        order = self.order[:, : self.T].cpu()
        ordered = (self.tokens[:, : self.T].cpu(), step, self.log_probs[:, : self.T].cpu())
        in_sequence = (torch.empty_like(v).scatter_(1, order, v)[:rows] for v in ordered)
        return Generation(*in_sequence, plan.length[:rows], calls, forwards)

    def _padded(self, plan: Plan, tokens: Tensor, uniforms: Tensor):
        """Fill the batch up with empty samples."""
        missing = self.B - len(plan)
        if not missing:
            return plan, tokens, uniforms
        order = torch.arange(self.T).expand(missing, -1)
        plan = Plan(
            torch.cat([plan.order, order]),
            torch.cat([plan.step, torch.full_like(order, -1)]),
            torch.cat([plan.length, torch.zeros(missing, dtype=torch.long)]),
            plan.unmask_by,
            plan.draft,
        )
        return plan, *(torch.cat([v, v.new_zeros(missing, self.T)]) for v in (tokens, uniforms))

    def _steps(self, plan: Plan) -> Steps:
        return Steps.of(plan, self.encoder)

    def _follow(self, plan: Plan, progress) -> tuple[int, int]:
        """Take the steps of a plan whose group sizes are fixed; model calls and token-forwards."""
        steps = self._steps(plan)
        active = (
            (steps.size == 0).to(torch.uint8).argsort(dim=1, stable=True)
        )  # rows that reveal something first
        on_device = torch.stack([steps.cached, steps.known, steps.count, steps.size, active], dim=1)
        on_device = on_device.to(self.order.device)
        needs, reached = steps.needs(plan), (steps.cached + steps.count).amax(dim=1).tolist()
        shapes = self._shapes_of(needs)
        shorter = bool((plan.length < self.T).any())
        for g, revealed in enumerate(steps.size.sum(dim=1).tolist()):
            rows = self.B if self.shapes else int((steps.size[g] > 0).sum())
            host = {
                "rows": rows,
                "shorter": shorter,
                "cache_length": self._cache_length(reached[g]),
            }
            self._compiled(self._step, *on_device[g], plan.unmask_by, shapes[g], **host)
            if progress is not None:
                progress(revealed)
        return len(needs), int(steps.count.sum())

    def _shapes_of(self, needs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        if self.shapes is None:
            return needs
        self.shapes.prepare(needs)
        return [self.shapes.fit(need) for need in needs]

    def _cache_length(self, n: int) -> int:
        """Cache slots that are read; compiled, a multiple of 256 or all."""
        return min(self.T, -(-n // 256) * 256) if self.shapes else n

    def _compiled(self, function, *arguments, **keywords):
        """Call a compiled function; beyond its default limit of shapes torch.compile would run it uncompiled."""
        if self.shapes is None:
            return function(*arguments, **keywords)
        with torch._dynamo.config.patch(recompile_limit=64):
            return function(*arguments, **keywords)

    def step(
        self, cached, known, count, size, active, reveal, shape, *, rows, shorter, cache_length
    ) -> None:
        """One step of the loop: pure tensor code whose shapes are the host numbers alone.

        Args:
            cached, known, count, size: (B,) as in `Steps`. active: (B,) rows that reveal something first.
            reveal: as in `Plan`. shape: as in `Shapes`, at least what the step needs.
            rows: encoder: how many of the active rows are fed. shorter: some rows are shorter than T.
            cache_length: decoder: cache slots that are read.
        """
        items, width, reveals, candidates = shape
        if self.encoder:
            x, item = self._full_pass(known, active[:rows], shorter)
        else:
            x, item = self.parallel_pass(cached, known, count, items, width, cache_length)
        if reveal != "order":
            item = self._reorder(x, item, known, size, reveal, candidates)
        row, column, valid = ragged(size, reveals)
        slot = torch.where(valid, known[row] + column, self.T)
        self._reveal(x, item, row, slot)

    def parallel_pass(self, cached, known, count, items, width, length) -> tuple[Tensor, Tensor]:
        """Feed a decoder `count` steps of each row from `cached` on; hidden states (N, D) and the item (B, T + 1) that
        holds the prediction of each step."""
        steps = ParallelPass(cached, known, count, items, width, length)
        x = self.model.parallel_hidden(
            self.tokens, self.order[:, : self.T], steps, self.cache, self.tables
        )
        slots = torch.arange(self.T + 1, device=x.device)
        return x, ((count.cumsum(0) - count - cached)[:, None] + slots).clamp(0, items - 1)

    def _full_pass(self, known, active, shorter) -> tuple[Tensor, Tensor]:
        """The same for an encoder: full attention over the rows that reveal something, and over no others."""
        visible = torch.arange(self.T, device=known.device) < known[:, None]
        ordered = torch.where(visible, self.tokens[:, : self.T], self.model.config.mask_token)
        order = self.order[:, : self.T]
        inputs = torch.empty_like(ordered).scatter_(1, order, ordered)[active]
        sigma, lengths = None, self.length[active]
        if (
            self.model.config.noise
        ):  # float64: bfloat16 would round a share near 1 to an infinite level
            sigma = log_linear_noise(1 - known[active].double() / lengths.clamp(min=1))
        x = self.model.hidden(inputs, sigma, lengths if shorter else None)
        first = torch.zeros_like(known).scatter_(
            0, active, torch.arange(len(active), device=known.device) * self.T
        )
        return x.flatten(0, 1), first[:, None] + self.order

    def _reorder(self, x, item, known, size, reveal, candidates) -> Tensor:
        """Put the candidates of every row that reveals something in the order in which the model prefers them."""
        row, column, valid = ragged((size > 0) * (self.length - known), candidates)
        slot = torch.where(valid, known[row] + column, self.T)
        wanted = x[item[row, slot]]
        score = torch.cat(
            [self._score(part, reveal) for part in wanted.split(_head_rows(self.model.config))]
        )
        scores = torch.full_like(self.log_probs, -torch.inf)
        scores[row, slot] = score.to(scores.dtype)
        steps = torch.arange(self.T + 1, device=x.device)
        scores = scores.where(steps >= known[:, None], torch.inf).where(steps < self.T, -torch.inf)
        preferred = scores.argsort(dim=1, descending=True, stable=True)
        self.order.copy_(self.order.gather(1, preferred))
        return item.gather(1, preferred)

    def _score(self, x: Tensor, reveal: str) -> Tensor:
        log_probs = self._logits(x).float().log_softmax(dim=-1)
        if reveal == "confidence":
            return log_probs.amax(dim=-1)
        return (log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float).min)).sum(dim=-1)

    def _reveal(self, x, item, row, slot) -> None:
        """Draw the tokens of some steps from the hidden states of their items."""
        for rows, slots in zip(
            *(v.split(_head_rows(self.model.config)) for v in (row, slot)), strict=True
        ):
            logits = self._logits(x[item[rows, slots]])
            few = (
                max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
                if logits.device.type == "cpu"
                else len(logits)
            )
            for part, r, s in zip(*(v.split(few) for v in (logits, rows, slots)), strict=True):
                self._write(r, s, choose_tokens(part, self._uniforms(r, s), self.choice), part)

    def _logits(self, x: Tensor) -> Tensor:
        """Logits (N, V), those of ids that may not be drawn minus infinity."""
        logits = self.model.logits(x)
        if self.vocab_size is not None:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def _uniforms(self, row: Tensor, slot: Tensor) -> Tensor:
        return self.uniforms[row, self.order[row, slot]]

    def _write(self, row, slot, drawn, logits) -> None:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self.tokens[row, slot] = drawn
        self.log_probs[row, slot] = (
            logits.log_softmax(dim=-1).gather(1, drawn[:, None]).squeeze(1).float()
        )

    # ---- self-speculative decoding -----------------------------------------------------------------------------------

    def _speculate(self, plan: Plan, step: Tensor, progress) -> tuple[int, int, Tensor]:
        """Draft and verify until every row is complete; model calls, token-forwards and the round of each step.

        How many drafts a row accepts depends on the model, so every round waits once for the device.
        """
        known = (plan.valid() & (plan.step < 0)).sum(dim=1)
        cached, rounds, calls, forwards, steps = (
            torch.zeros_like(known),
            0,
            0,
            0,
            torch.arange(self.T),
        )
        while (left := plan.length - known).any():
            size = left.clamp(max=plan.draft)
            bonus = (
                left > plan.draft
            ).long()  # after a full draft the verification predicts one step more
            count = (size > 0) * (known - cached + size)
            verified = (size > 0) * (size - 1 + bonus)
            draft_probs = self._draft(cached, known, count, size)
            accepted = self._verify(known, size, verified, draft_probs) if verified.any() else size
            reached = known + accepted
            newly = (steps >= known[:, None]) & (steps < reached[:, None])
            step = step.where(~newly, rounds)
            rounds += 1
            forwards += int(count.sum() + verified.sum())
            calls += 1 + bool(verified.any())
            known = cached = torch.where(size > 0, reached, known)
            if progress is not None:
                progress(int(newly.sum()))
        return calls, forwards, step

    def _draft(self, cached: Tensor, known: Tensor, count: Tensor, size: Tensor) -> Tensor:
        """Draw `size` positions of each row in parallel; the distributions (sum of size, V) they were drawn from."""
        x, item, row, slot = self._predict(cached, known, count, known, size)
        logits = self._logits(x[item[row, slot]])
        probs = probabilities(logits, self.choice)
        self._write(row, slot, draw(probs, self._uniforms(row, slot)), logits)
        return probs

    def _verify(self, known: Tensor, size: Tensor, verified: Tensor, draft_probs: Tensor) -> Tensor:
        """Compare the drafts after the first of each row with what the model says once the drafts before them are
        known; (B,) how many steps of each row are settled.

        A draft x is kept with probability min(1, q(x) / p(x)), q the distribution in the order's joint, p that of the
        draft. The first that is not is drawn again from (q - p)+, and those after it are dropped.
        """
        x, item, row, slot = self._predict(known + 1, known + size, verified, known + 1, verified)
        logits = self._logits(x[item[row, slot]])
        q = probabilities(logits, self.choice)
        known, size, verified = (v.to(x.device) for v in (known, size, verified))
        column = slot - known[row] - 1
        drafted = column < (size - 1)[row]
        p = draft_probs[((size.cumsum(0) - size)[row] + column + 1).clamp(max=len(draft_probs) - 1)]
        p = p * drafted[:, None]  # a step that was not drafted is drawn from q itself
        token, uniforms = self.tokens[row, slot][:, None], self._uniforms(row, slot)
        accept = fresh_uniforms(uniforms, ACCEPTED) * p.gather(1, token).squeeze(1) < q.gather(
            1, token
        ).squeeze(1)
        stop = verified.scatter_reduce(
            0, row, torch.where(accept & drafted, self.T, column), "amin"
        )
        self._write(row, slot, token.squeeze(1), logits)
        last = (verified.cumsum(0) - verified + stop).clamp(max=len(q) - 1)
        rest = (q[last] - p[last]).clamp(min=0)
        rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, q[last])  # p = q up to rounding
        uniforms = torch.where(
            drafted[last], fresh_uniforms(uniforms[last], CORRECTED), uniforms[last]
        )
        slot = torch.where(stop < verified, known + 1 + stop, self.T)
        self._write(torch.arange(self.B, device=x.device), slot, draw(rest, uniforms), logits[last])
        return (size.clamp(max=1) + stop + (stop < verified)).cpu()

    def _predict(self, cached, known, count, start, size):
        """One pass on host numbers; and the row and slot of the `size` steps of each row from `start` on."""
        ((items, width, _, _),) = self._shapes_of([(int(count.sum()), int(count.max()), 0, 0)])
        reached = self._cache_length(int((cached + count).max()))
        cached, known, count, start, size = torch.stack([cached, known, count, start, size]).to(
            self.order.device
        )
        x, item = self._compiled(self._pass, cached, known, count, items, width, reached)
        row, column, _ = ragged(size, int(size.sum()))
        return x, item, row, start[row] + column
