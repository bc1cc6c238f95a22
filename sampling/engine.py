"""The engine: generation by any plan, with a KV cache for decoders and full passes for encoders.

A plan is known before the model runs, so the shapes of every step are known on the host: nothing in
the loop waits for the device, the cache is allocated once, adaLN is computed once per position, and
only positions that are being unmasked reach the output head. Compiled, the sizes of a step are
rounded up to few shapes, so that no new ones turn up.

Shapes: B samples in flight, T positions, G groups (steps), N items of a step, V vocabulary.
A *slot* is a place in the prediction order; slot T, the last column of a buffer, takes what nobody
reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import AOGPT
from runtime.devices import (
    attention_of_many_shapes,
    available_memory,
    current,
    out_of_memory,
    release_memory,
)
from runtime.errors import UserError
from sampling.cached import KVCache, float32_logits, ragged
from sampling.compiled import CompiledShapes, StepRunner, with_compiled_blocks
from sampling.packed import packed
from sampling.passes import (
    DecoderPasses,
    EncoderPasses,
    Step,
    StepShape,
    shapes_of,
    steps_of,
    triton_kernels,
)
from sampling.plans import Plan, l2r_plan, stack_plans
from sampling.token_choice import (
    ACCEPTED,
    CORRECTED,
    TokenChoice,
    choose_tokens,
    draw,
    fresh_uniforms,
    probabilities,
)
from variants import head_chunk

# Of an engine, (B, T + 1) each.
BUFFERS = {
    "order": torch.long,
    "tokens": torch.long,
    "log_probs": torch.float,
    "uniforms": torch.float64,
}
# Logits whose tokens are drawn at once on a CPU: they and their copies stay in its cache.
CPU_CHUNK_ELEMENTS = 2**19


@dataclass
class Generation:
    """Samples and how they came about.

    tokens: LongTensor (B, T) in sequence order; 0 past the end of a shorter sample.
    step: LongTensor (B, T), the step of the plan (speculative: the round) at which each position
        was unmasked, -1 for given ones and past the end.
    log_probs: float tensor (B, T), log-probability (nats) of each generated token under the model,
        given what was known when it was unmasked, among the ids that may be drawn, before
        temperature and truncation; 0 where step is -1.
    length: LongTensor (B,), positions of each sample.
    model_calls: forward passes of the model, all batches together.
    token_forwards: inputs those passes were fed, padding left out.
    nfe: LongTensor (B,), forward passes that each sample took part in.
    """

    tokens: Tensor
    step: Tensor
    log_probs: Tensor
    length: Tensor
    model_calls: int
    token_forwards: int
    nfe: Tensor

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
            torch.cat([part.nfe for part in parts]),
        )

    def rows(self) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Tokens, steps and log-probabilities of each sample, as long as it is."""
        for b, length in enumerate(self.length.tolist()):
            values = (self.tokens, self.step, self.log_probs)
            yield tuple(v[b, :length].tolist() for v in values)


@torch.no_grad()
def generate(
    model: AOGPT,
    plan: Plan,
    tokens: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    forced: Tensor | None = None,
    choice: TokenChoice | None = None,
    vocab_size: int | None = None,
    batch_size: int | None = None,
    halve: bool | None = None,
    progress: Callable[[int], None] | None = None,
    compile: bool = False,
    kernels: bool = False,
) -> Generation:
    """Generate the samples of a plan.

    Args:
        model: in eval mode, on any device.
        plan: B samples of up to T <= block_size positions. A decoder that is not told its target
            position (GPT) makes sense of plans that continue a text from left to right, one token
            a step.
        tokens: LongTensor (B, T) that holds the given tokens at the plan's given positions; the
            rest is ignored.
        generator: CPU generator of one uniform number per position, or
        uniforms: those numbers, float64 (B, T) in sequence order, in [0, 1): sample b depends on
            row b alone. The same sample in another batch has logits that differ by rounding: in
            float32 that moves a token once in about a million (where a draft is rejected more
            often), in bfloat16 often.
        forced: LongTensor (B, T): take these tokens instead of drawing any. The log-probabilities
            are then what decoding by this plan would give this text.
        choice: temperature, top-p, top-k, noise.
        vocab_size: only ids below it are drawn (the rows that pad the token table are not tokens).
        batch_size: samples in flight at once; by default all.
        halve: whether to halve the batch for as long as memory runs out; by default only where no
            batch_size is given.
        progress: called after every step with the number of positions it unmasked; and with less
            than 0 where a smaller batch begins again.
        compile: torch.compile the blocks; worth its minutes for many samples.
        kernels: on a GPU, Triton kernels and, compiled, CUDA graphs.

    Raises ValueError for what does not fit together; where memory does not suffice and the batch
    may not be halved; and after the last step if the model's output was not finite. Whoever
    generates in a loop should keep an `Engine`, whose batch size is fixed.
    """
    B, T = plan.order.shape
    for name, value in (("vocab_size", vocab_size), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; give at least 1, or None for all")
    choice = choice or TokenChoice()
    if forced is not None:
        uniforms = _check_forced(model, plan, forced)
    tokens, uniforms = _check(model, plan, choice, tokens, uniforms, generator)
    halve = batch_size is None if halve is None else halve
    # The cache and the buffers are known to fit or not before anything is allocated. What a step
    # takes beside them is found out by running out of memory.
    size = _size_that_fits(model, T, min(B, batch_size or B), halve)
    generated = 0

    def count(positions: int) -> None:
        nonlocal generated
        generated += positions
        if progress is not None:
            progress(positions)

    while True:
        try:
            engine = Engine(model, size, T, choice, vocab_size, compile, kernels)
            return engine.run(plan, tokens, uniforms, count, forced)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if not halve or size == 1:
                raise UserError(
                    f"memory ran out with a batch of {size} samples of {T} tokens on "
                    f"{model.wte.weight.device}: {_advice(size // 2)}"
                ) from error
        # Give back what the batch took, and begin again with half as many samples.
        engine = None
        release_memory(model.wte.weight.device)
        size //= 2
        count(-generated)  # take back what was reported; `generated` is 0 again


def _check(model, plan, choice, tokens, uniforms, generator) -> tuple[Tensor, Tensor]:
    """Tokens, 0 where they are not given, and uniforms, both (B, T); ValueError if they do not fit
    model, plan and choice."""
    (B, T), config = plan.order.shape, model.config
    if model.training:
        raise UserError("the model is in training mode; call model.eval() first")
    if B == 0:
        raise UserError("the plan holds no samples; plan at least one")
    if T > config.block_size:
        raise UserError(
            f"samples of {T} tokens, but the model was built for up to {config.block_size}"
        )
    if plan.draft and (config.is_encoder or config.l2r_only):
        raise UserError(
            "speculative decoding needs a decoder that is told its target position; use another "
            "plan"
        )
    if plan.draft and choice.noise != "float64":
        raise UserError(
            f"speculative decoding draws exactly; {choice.noise} noise has no meaning there"
        )
    given = plan.given_positions()
    if tokens is None:
        if given.any():
            raise UserError("the plan has given positions: pass their tokens")
        tokens = torch.zeros(B, T, dtype=torch.long)
    if uniforms is None:
        uniforms = torch.rand(B, T, generator=generator, dtype=torch.float64)
    for name, value in (("tokens", tokens), ("uniforms", uniforms)):
        if value.shape != (B, T):
            raise UserError(f"{name} are {tuple(value.shape)}, but the plan is for {(B, T)}")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise UserError("uniforms must lie in [0, 1); torch.rand in float64 makes such numbers")
    prompt = tokens.cpu()[given]
    ids = config.vocab_size if config.mask_token is None else config.mask_token
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < ids:
        raise UserError(f"a given token is outside the model's vocabulary of {ids}")
    return tokens.cpu().where(given, 0), uniforms


def _check_forced(model, plan: Plan, forced: Tensor) -> Tensor:
    """Uniforms, which nothing is drawn with; ValueError where these tokens cannot be forced."""
    if plan.draft:
        raise UserError("speculation draws what it is to verify; force tokens on another plan")
    if forced.shape != plan.order.shape:
        raise UserError(
            f"forced are {tuple(forced.shape)}, but the plan is for {tuple(plan.order.shape)}"
        )
    ids = model.config.vocab_size if model.config.mask_token is None else model.config.mask_token
    if forced.numel() and not 0 <= int(forced.min()) <= int(forced.max()) < ids:
        raise UserError(f"a forced token is outside the model's vocabulary of {ids}")
    return torch.zeros(forced.shape, dtype=torch.float64)


# ---- memory --------------------------------------------------------------------------------------


def bytes_per_sample(model: AOGPT, length: int) -> int:
    """Bytes of the cache and the buffers that an engine allocates for each sample in flight."""
    buffers = sum(dtype.itemsize for dtype in BUFFERS.values()) * (length + 1) + torch.long.itemsize
    if model.config.is_encoder:
        return buffers
    cache = KVCache(model.config, 1, length, "meta", model.wte.weight.dtype)
    return buffers + cache.nbytes


def _size_that_fits(model, length: int, batch_size: int, halve: bool) -> int:
    """The batch size, halved for as long as its cache and buffers do not fit into memory; where it
    may not be halved, a ValueError that says which size would fit.

    Only what is known exactly is looked at, not what a step needs beside it.
    """
    device = model.wte.weight.device
    free, one = available_memory(device), bytes_per_sample(model, length)
    if free is None:
        return batch_size
    while halve and batch_size > 1 and batch_size * one > free:
        batch_size //= 2
    if batch_size * one > free:
        raise UserError(
            f"the cache of {batch_size} samples of {length} tokens takes "
            f"{batch_size * one / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB are free on {device}: "
            f"{_advice(free // one)}"
        )
    return batch_size


def _advice(batch_size: int) -> str:
    if batch_size:
        return f"take a batch size of {batch_size} or less"
    return "not even one sample fits: take shorter samples or more steps"


# ---- the engine ----------------------------------------------------------------------------------


class Engine(nn.Module):
    """The state of B samples in flight, and the steps that advance it.

    One engine serves any number of batches and plans: what is allocated, packed or compiled once
    stays. The model's weights must stay as they are meanwhile.

    Buffers (their addresses stay, as CUDA graphs need): order, tokens and log_probs by slot,
    uniforms by position, (B, T + 1) each; length (B,).
    """

    @torch.no_grad()
    def __init__(
        self,
        model: AOGPT,
        batch_size: int,
        length: int,
        choice: TokenChoice,
        vocab_size: int | None = None,
        compile: bool = False,
        kernels: bool = False,
    ):
        super().__init__()
        self.B, self.T = batch_size, length
        self.choice, self.vocab_size = choice, vocab_size
        self.model = with_compiled_blocks(model) if compile else packed(model)
        passes = EncoderPasses if model.config.is_encoder else DecoderPasses
        device = model.wte.weight.device
        self.kernels = triton_kernels(device) if kernels else None
        self.passes = passes(self.model, batch_size, length, self.kernels)
        # Positions whose logits are alive at once.
        self.head_rows = head_chunk(model.config.vocab_size, device.type)
        for name, dtype in BUFFERS.items():
            zeros = torch.zeros(batch_size, length + 1, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)
        lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.register_buffer("length", lengths, persistent=False)
        self.padded = False  # whether some rows are shorter than T
        self.forced: Tensor | None = None  # (B, T + 1), by position: tokens that are not drawn
        self.eval()
        self.shapes = CompiledShapes() if compile else None
        self.runner = StepRunner(device, kernels) if compile else None

    @torch.no_grad()
    def generate(
        self, plan: Plan, tokens=None, *, generator=None, uniforms=None, progress=None
    ) -> Generation:
        """As the function of that name, with the same checks, for plans of T positions, always B
        samples at a time."""
        if plan.order.shape[1] != self.T:
            raise UserError(
                f"the plan is for {plan.order.shape[1]} positions, but this engine is for {self.T}"
            )
        checked = _check(self.model, plan, self.choice, tokens, uniforms, generator)
        return self.run(plan, *checked, progress)

    @torch.no_grad()
    def run(
        self, plan: Plan, tokens: Tensor, uniforms: Tensor, progress=None, forced=None
    ) -> Generation:
        """`generate` of what `_check` has checked."""
        batches = [slice(start, start + self.B) for start in range(0, len(plan), self.B)]
        if self.shapes is not None and not plan.draft and not plan.pace:
            # Of all batches at once: the fewest shapes that serve them.
            plans = [plan[rows] for rows in batches]
            self.shapes.prepare(
                [shape for p in plans for shape in shapes_of(p, steps_of(p, self.passes))]
            )
        with current(self.order.device), attention_of_many_shapes():
            parts = []
            for rows in batches:
                self.forced = None
                if forced is not None:
                    missing = self.B - len(forced[rows])  # rows and a column that nobody reads
                    self.forced = F.pad(forced[rows], (0, 1, 0, missing)).to(self.order.device)
                parts.append(self._batch(plan[rows], tokens[rows], uniforms[rows], progress))
        return Generation.joined(parts)

    def _batch(self, plan: Plan, tokens: Tensor, uniforms: Tensor, progress) -> Generation:
        """Generate up to B samples."""
        # 1. Fill the batch up with samples of length 0, and the buffers with it.
        rows, missing = len(plan), self.B - len(plan)
        if missing:
            plan = stack_plans([plan, l2r_plan(missing, length=0)], self.T)
            tokens, uniforms = (F.pad(v, (0, 0, 0, missing)) for v in (tokens, uniforms))
        self.order[:, : self.T].copy_(plan.order)
        self.tokens[:, : self.T].copy_(tokens.gather(1, plan.order))
        self.uniforms[:, : self.T].copy_(uniforms)
        self.length.copy_(plan.length)
        self.padded = bool((plan.length < self.T).any())
        self.log_probs.zero_()
        # 2. Generate.
        if plan.draft:
            calls, forwards, step, nfe = self._speculate(plan, progress)
        elif plan.pace:
            calls, forwards, step, nfe = self._go_at_pace(plan, progress)
        else:
            calls, forwards, nfe = self._follow(plan, progress)
            step = plan.step.where(plan.generated(), -1)
        # 3. Wait for the device, and put the results in sequence order.
        if not self.log_probs[:, : self.T].isfinite().all():
            raise UserError(
                "the model's output is not finite (its weights overflowed or hold NaN); nothing "
                "was generated"
            )
        order = self.order[:, : self.T].cpu()
        by_slot = (self.tokens[:, : self.T].cpu(), step, self.log_probs[:, : self.T].cpu())
        in_sequence = [torch.empty_like(v).scatter_(1, order, v)[:rows] for v in by_slot]
        return Generation(*in_sequence, plan.length[:rows], calls, forwards, nfe[:rows])

    # ---- plans whose steps are known -------------------------------------------------------------

    def _follow(self, plan: Plan, progress) -> tuple[int, int, Tensor]:
        """Take the steps of a plan; model calls, token-forwards, and the calls of each row (B,)."""
        steps = steps_of(plan, self.passes)
        shapes = shapes_of(plan, steps)
        if self.shapes is not None:
            shapes = [self.shapes.fit(shape) for shape in shapes]
        extents = self.passes.extents(steps, self.T, compiled=self.shapes is not None)
        unmasked = steps.size.sum(dim=1).tolist()
        # All that the loop needs goes to the device in one piece, before it begins: (G, 4, B), the
        # four fields of a step after one another.
        on_device = torch.stack(steps, dim=1).to(self.order.device)
        for g, shape in enumerate(shapes):
            self._run(self.take_step, on_device[g], plan.unmask_by, shape, extents[g], self.padded)
            if progress is not None:
                progress(unmasked[g])
        return len(shapes), int(steps.count.sum()), (steps.size > 0).sum(dim=0)

    def _run(self, function: Callable, step: Tensor, *shape):
        """function(Step, *shape), compiled if this engine is. step: (4, B)."""
        if self.runner is None:
            return function(Step(*step), *shape)
        return self.runner(function, step, *shape)

    def take_step(
        self, step: Step, unmask_by: str, shape: StepShape, extent: int, padded: bool
    ) -> None:
        """One step: pure tensor code whose shapes follow from all arguments but the first."""
        # 1. Predict.
        hidden, item = self.predict(step, shape, extent, padded, grouped=True)
        # 2. Let the model choose which positions come next, unless the plan says so.
        if unmask_by != "order":
            left = (step.size > 0) * (self.length - step.known)  # candidates: all that is left
            candidates = step.known, left, shape.candidates
            item, _ = self._reorder(hidden, item, *candidates, unmask_by)
        # 3. Draw the tokens of the next `size` slots of each row.
        row, slot = self._slots(step.known, step.size, shape.unmasked)
        for rows, slots in zip(row.split(self.head_rows), slot.split(self.head_rows), strict=True):
            self._draw_tokens(rows, slots, self._logits(hidden[item[rows, slots]]))

    def predict(
        self, step: Step, shape: StepShape, extent: int, padded: bool, grouped: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and which of them predicts each slot, as the passes' `predict` says.
        padded: whether some rows are shorter than T. grouped: whether the tokens of a step are a
        group; speculation settles them one by one."""
        length = self.length if padded else None
        return self.passes.predict(self.tokens, self.order, length, step, shape, extent, grouped)

    def _slots(self, first: Tensor, count: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Row and slot, (total,) each, of `count` slots of each row from `first` on; slot T for
        what `total` has too many."""
        row, column, valid = ragged(count, total)
        return row, torch.where(valid, first[row] + column, self.T)

    def _reorder(
        self, hidden: Tensor, item: Tensor, known: Tensor, left: Tensor, total: int, *by: str
    ) -> tuple[Tensor, list[Tensor]]:
        """Put the candidates of every row in the order in which the model prefers them.

        Args:
            hidden, item: as `predict` gives them.
            known, left: (B,), the first candidate's slot and the number of them. total: of all.
            by: scores, see `_scores`; the first decides.

        Returns: `item` in that order; and the scores (B, T + 1) of its slots, infinite where they
            are no candidates': above for what is known, below for what comes later.
        """
        # 1. The scores of every candidate, (total, scores).
        row, slot = self._slots(known, left, total)
        found = torch.cat(
            [self._scores(x, by) for x in hidden[item[row, slot]].split(self.head_rows)]
        )
        # 2. Their place by slot. Known slots stay in front (infinity; the sort is stable), slots
        #    that come later or that a row does not have stay behind, and so does slot T.
        shape = (self.B, self.T + 1)
        slots, by_slot = torch.arange(self.T + 1, device=found.device), []
        for score in found.unbind(dim=-1):
            scores = torch.full(shape, -torch.inf, dtype=torch.float, device=score.device)
            scores[row, slot] = score.float()
            scores = scores.where(slots >= known[:, None], torch.inf)
            by_slot.append(scores.where(slots < self.T, -torch.inf))
        # 3. Highest score first.
        preferred = by_slot[0].argsort(dim=1, descending=True, stable=True)
        self.order.copy_(self.order.gather(1, preferred))
        return item.gather(1, preferred), [scores.gather(1, preferred) for scores in by_slot]

    def _scores(self, hidden: Tensor, by: tuple[str, ...]) -> Tensor:
        """What the model is sure of, the higher the surer, (N, scores). confidence: the
        log-probability of the likeliest token; entropy: minus the entropy; margin: the difference
        of the probabilities of the two likeliest."""
        log_probs = self._logits(hidden).float().log_softmax(dim=-1)
        scores = []
        for name in by:
            match name:
                case "confidence":
                    scores.append(log_probs.amax(dim=-1))
                case "margin":
                    first, second = log_probs.topk(2, dim=-1).values.exp().unbind(dim=-1)
                    scores.append(first - second)
                case "entropy":
                    # 0 times minus infinity is not a number, but 0 times the least number is 0.
                    least = torch.finfo(torch.float).min
                    scores.append((log_probs.exp() * log_probs.clamp(min=least)).sum(dim=-1))
        return torch.stack(scores, dim=-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V), those of ids that may not be drawn minus infinity."""
        logits = float32_logits(self.model, hidden)
        if self.vocab_size is not None:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def _uniforms(self, row: Tensor, slot: Tensor) -> Tensor:
        """The uniform number of the position in each slot, (N,)."""
        return self.uniforms[row, self.order[row, slot]]

    def _draw_tokens(self, row: Tensor, slot: Tensor, logits: Tensor) -> None:
        """Draw and store the tokens of the slots, or store those that are forced; on a CPU a few at
        a time."""
        if self.forced is not None:
            self._write(row, slot, self.forced[row, self.order[row, slot]], logits)
            return
        if self.kernels is not None and self.kernels.can_choose(logits, self.choice):
            uniforms = self._uniforms(row, slot)
            self._store(row, slot, *self.kernels.choose(logits, uniforms, self.choice))
            return
        size = len(logits)
        if logits.device.type == "cpu":
            size = max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
        chunks = zip(row.split(size), slot.split(size), logits.split(size), strict=True)
        for row, slot, logits in chunks:
            tokens = choose_tokens(logits, self._uniforms(row, slot), self.choice)
            self._write(row, slot, tokens, logits)

    def _write(self, row: Tensor, slot: Tensor, tokens: Tensor, logits: Tensor) -> None:
        """Store tokens (N,) and their log-probabilities."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
        self._store(row, slot, tokens, log_probs)

    def _store(self, row: Tensor, slot: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        self.tokens[row, slot] = tokens
        self.log_probs[row, slot] = log_probs.float()

    # ---- plans whose steps the model chooses -----------------------------------------------------

    def _go_at_pace(self, plan: Plan, progress) -> tuple[int, int, Tensor, Tensor]:
        """Unmask what the model is sure enough of until every row is complete; model calls,
        token-forwards, the round (B, T) in which each slot was unmasked, -1 for the others, and the
        calls of each row (B,).

        How many positions a row unmasks depends on the model, so every round waits once for it.
        """
        known, generated = plan.given_positions().sum(dim=1), plan.generated()
        cached, slots = torch.zeros_like(known), torch.arange(self.T)
        round_of = torch.full_like(plan.step, -1)
        calls, forwards, nfe = 0, 0, torch.zeros_like(known)
        while (known < plan.length).any():
            # 1. The candidates of a row: what is left of the block that it is in.
            block = plan.step.gather(1, known.clamp(max=self.T - 1)[:, None])
            candidate = generated & (slots >= known[:, None]) & (plan.step == block)
            left = candidate.sum(dim=1)
            # 2. Predict them all, best first, and see how many of them to take.
            count = (left > 0) * self.passes.fed(cached, known + left, plan.length)
            step = Step(cached=cached, known=known, count=count, size=left)
            hidden, item, step = self._predict_now(step, grouped=True)
            by = [plan.unmask_by] + ["entropy"] * (plan.pace.entropy_bound is not None)
            candidates = step.known, step.size, int(left.sum())
            item, scores = self._reorder(hidden, item, *candidates, *by)
            size = self._sure_enough(plan, step, scores)
            # 3. Draw their tokens.
            taken = size.cpu()
            row, slot = self._slots(step.known, size, int(taken.sum()))
            for rows, at in zip(row.split(self.head_rows), slot.split(self.head_rows), strict=True):
                self._draw_tokens(rows, at, self._logits(hidden[item[rows, at]]))
            cached = self.passes.kept(known, chosen=True)
            newly = (slots >= known[:, None]) & (slots < (known + taken)[:, None])
            round_of, known = round_of.where(~newly, calls), known + taken
            calls, forwards, nfe = calls + 1, forwards + int(count.sum()), nfe + (left > 0)
            if progress is not None:
                progress(int(taken.sum()))
        return calls, forwards, round_of, nfe

    def _sure_enough(self, plan: Plan, step: Step, scores: list[Tensor]) -> Tensor:
        """How many candidates each row unmasks, (B,); see `Pace`.

        scores: as `_reorder` gives them, the last one minus the entropy where there is a bound."""
        pace = plan.pace
        slots = torch.arange(self.T + 1, device=scores[0].device)
        ends = step.known + step.size
        enough = (slots >= step.known[:, None]) & (slots < ends[:, None])
        candidate = enough
        if pace.threshold is not None:
            least = {
                "confidence": math.log(pace.threshold) if pace.threshold else -math.inf,
                "margin": pace.threshold,
                "entropy": -pace.threshold,
            }
            enough = enough & (scores[0] >= least[plan.unmask_by])
        if pace.entropy_bound is not None:
            entropy = (-scores[-1]).where(candidate, 0).double()
            others = entropy.cumsum(dim=1) - entropy.cummax(dim=1).values
            enough = enough & (others <= pace.entropy_bound)
        size = enough.sum(dim=1).clamp(min=1)
        return torch.minimum(size if pace.most is None else size.clamp(max=pace.most), step.size)

    # ---- speculative decoding --------------------------------------------------------------------

    def _speculate(self, plan: Plan, progress) -> tuple[int, int, Tensor, Tensor]:
        """Draft and verify until every row is complete; model calls, token-forwards, the round
        (B, T) in which each slot was settled, -1 for the others, and the calls of each row (B,).

        How many drafts a row accepts depends on the model, so every round waits once for it.
        """
        known = plan.given_positions().sum(dim=1)
        cached, slots = torch.zeros_like(known), torch.arange(self.T)
        round_of = torch.full_like(plan.step, -1)
        rounds, calls, forwards, nfe = 0, 0, 0, torch.zeros_like(known)
        while (left := plan.length - known).any():
            # 1. Draft up to `draft` slots of each row: in parallel, or without the model.
            size = left.clamp(max=plan.draft)
            if plan.draft_by == "model":
                count = (size > 0) * (known - cached + size)
                draft_probs = self._draft(Step(cached=cached, known=known, count=count, size=size))
                calls, forwards, nfe = calls + 1, forwards + int(count.sum()), nfe + (size > 0)
                # The first was drawn given all that it depends on, and its input is cached.
                first = cached = known + (size > 0)
            else:
                draft_probs, first = self._draft_from_pairs(known, size), known
            # 2. Verify the others. Where something is left behind a full draft, the same pass
            #    predicts one slot more.
            bonus = (left > plan.draft).long()
            n_verify = known + size + bonus - first
            settled = first - known  # if no row has anything to verify
            if n_verify.any():
                count = (n_verify > 0) * (first - cached + n_verify)
                step = Step(cached=cached, known=known + size, count=count, size=n_verify)
                settled = settled + self._verify(step, first, known, size, draft_probs)
                calls, forwards, nfe = calls + 1, forwards + int(count.sum()), nfe + (n_verify > 0)
            # 3. What is settled is known. Of its inputs the draft pass left the first in the cache,
            #    the verification the others.
            reached = known + settled
            newly = (slots >= known[:, None]) & (slots < reached[:, None])
            round_of = round_of.where(~newly, rounds)
            rounds += 1
            known = cached = reached
            if progress is not None:
                progress(int(newly.sum()))
        return calls, forwards, round_of, nfe

    def _draft(self, step: Step) -> Tensor:
        """Draw the next `size` slots of each row in parallel; the distributions (sum of size, V)
        that they were drawn from."""
        logits, row, slot = self._predict_slots(step, first=step.known)
        probs = probabilities(logits, self.choice)
        self._write(row, slot, draw(probs, self._uniforms(row, slot)), logits)
        return probs

    def _draft_from_pairs(self, known: Tensor, size: Tensor) -> Tensor:
        """Draft the next `size` slots of each row, one after the other: what most often follows the
        token on its left in what is known or drafted, or else the most frequent token there. The
        distributions (sum of size, V) that they were drawn from, each certain of one token."""
        T, V, device = self.T, self.model.config.vocab_size, self.order.device
        known_, size_ = known.to(device), size.to(device)
        # 1. The known tokens in sequence order, -1 where none is known: column p + 1 is position p.
        ordered = self.tokens[:, :T].where(torch.arange(T, device=device) < known_[:, None], -1)
        text = torch.full((self.B, T + 1), -1, device=device)
        text.scatter_(1, self.order[:, :T] + 1, ordered)
        rows = torch.arange(self.B, device=device)
        for column in range(int(size.max())):
            drafts = column < size_
            slot = torch.where(drafts, known_ + column, T)
            position = self.order[rows, slot]
            # 2. Every known token has a vote, and each that follows the token on the left more than
            #    all of them together.
            left = text[rows, position][:, None]
            follows = (text[:, :-1] == left) & (left >= 0) & (text[:, 1:] >= 0)
            counts = (text[:, 1:] >= 0).long() + follows * 2 * T
            votes = torch.zeros(self.B, V, dtype=torch.long, device=device)
            votes.scatter_add_(1, text[:, 1:].clamp(min=0), counts)
            guess = votes.argmax(dim=1)
            # 3. It is part of the text for the drafts after it.
            self.tokens[rows, slot] = guess
            text[rows, position + 1] = torch.where(drafts, guess, text[rows, position + 1])
        row, slot = self._slots(known_, size_, int(size.sum()))
        return F.one_hot(self.tokens[row, slot], V).double()

    def _verify(
        self, step: Step, first: Tensor, known: Tensor, size: Tensor, draft_probs: Tensor
    ) -> Tensor:
        """Settle the drafts of a round; how many slots of each row, from `first` on, are settled,
        (B,).

        A draft x is kept with probability min(1, q(x) / p(x)), where p is the distribution that it
        was drawn from and q that of the order's joint, in which the drafts before it are known.
        The first that is not kept is drawn again from (q - p)+, and those after it are dropped:
        what is settled then follows q (Leviathan et al. 2023).

        Example: known = 3, three drafts a, b, c (size = 3), of which the first needs no
        verification (first = 4), and a bonus slot (step.size = 3). As in `AOGPT.parallel_hidden`,
        input i holds the token of slot i - 1 and predicts slot i:

            slot, input   input token   slot holds   column
            3             x of slot 2   a            -        settled, and its input is cached
            4             a             b            0
            5             b             c            1
            6             c             nothing      2        bonus: drawn if b and c are kept

        If b is kept and c is not, `stop` is column 1: b and a new token in slot 5 are settled.

        Args, (B,) each and on the host:
            step: the pass in which the drafts are known; its size: slots from `first` on to verify,
                drafts, and the bonus slot after them where there is one.
            first: the first slot to verify.
            known: tokens known before the round. size: slots drafted, from slot `known` on.
            draft_probs: as `_draft` gives them.
        """
        # 1. Predict all drafts in one causal pass, as if they were known. N = sum of n_verify:
        #    entry n is slot `first` + `column[n]` of row `row[n]`.
        logits, row, slot = self._predict_slots(step, first)
        q = probabilities(logits, self.choice)  # (N, V)
        first, known, size, n_verify = (v.to(q.device) for v in (first, known, size, step.size))
        column = slot - first[row]
        is_draft = slot < (known + size)[row]  # the others are bonus slots
        # Drafts stand in draft_probs row after row; what needs no verification is skipped. A bonus
        # slot was not drafted: with p = 0 it is drawn from q.
        drafted_before = (size.cumsum(0) - size)[row]
        p = draft_probs[(drafted_before + slot - known[row]).clamp(max=len(draft_probs) - 1)]
        p = p * is_draft[:, None]
        # 2. Accept each with probability min(1, q / p), by a coin of its own: u p < q.
        token, uniforms = self.tokens[row, slot][:, None], self._uniforms(row, slot)
        coin = fresh_uniforms(uniforms, ACCEPTED)
        accept = coin * p.gather(1, token).squeeze(1) < q.gather(1, token).squeeze(1)
        # Log-probabilities under q replace those of the draft. This also writes slots that are not
        # kept; step 4 or the next round overwrites them.
        self._write(row, slot, token.squeeze(1), logits)
        # 3. `stop` (B,): the first column of each row that is not an accepted draft, be it a
        #    rejected draft or the bonus slot; `n_verify`, one past the last, where there is none.
        not_kept = torch.where(accept & is_draft, self.T, column)
        stop = n_verify.scatter_reduce(0, row, not_kept, "amin")
        draws = stop < n_verify
        # 4. Draw the slot of that column: a rejected draft from (q - p)+, with a fresh uniform
        #    number, since its own decided the draft; a bonus token from q, with its own.
        #    `entry` (B,): which of the N entries that slot is. Rows without such a slot take some
        #    other entry, and draw into slot T.
        entry = (n_verify.cumsum(0) - n_verify + stop).clamp(max=len(q) - 1)
        weights = (q[entry] - p[entry]).clamp(min=0)
        # p = q up to rounding leaves nothing to draw from, and q is right then.
        weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, q[entry])
        corrected = fresh_uniforms(uniforms[entry], CORRECTED)
        uniforms = torch.where(is_draft[entry], corrected, uniforms[entry])
        slot = torch.where(draws, first + stop, self.T)
        row = torch.arange(self.B, device=q.device)
        self._write(row, slot, draw(weights, uniforms), logits[entry])
        return (stop + draws).cpu()  # those accepted, and the one drawn

    def _predict_slots(self, step: Step, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, V) of `size` slots of each row from `first` on, their rows and slots (N,).

        step, first: on the host, since how far a round gets is not known before it.
        """
        hidden, item, on_device = self._predict_now(step)
        total, first = int(step.size.sum()), first.to(self.order.device)
        row, slot = self._slots(first, on_device.size, total)
        return self._logits(hidden[item[row, slot]]), row, slot

    def _predict_now(self, step: Step, grouped: bool = False) -> tuple[Tensor, Tensor, Step]:
        """`predict` of a step that is on the host, and the step on the device."""
        compiled = self.shapes is not None
        # `predict` looks at the inputs alone: no slots are drawn in it, none are candidates.
        shape = StepShape(
            items=int(step.count.sum()), width=int(step.count.max()), unmasked=0, candidates=0
        )
        if compiled:
            shape = self.shapes.fit(shape)
        (extent,) = self.passes.extents(Step(*(v[None] for v in step)), self.T, compiled)
        on_device = torch.stack([*step]).to(self.order.device)
        hidden, item = self._run(self.predict, on_device, shape, extent, self.padded, grouped)
        return hidden, item, Step(*on_device)
