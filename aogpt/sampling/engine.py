"""The engine: generation by any plan, with a KV cache for decoders and full passes for
encoders. Read down: `Engine.generate` checks, `generate_batch` takes some samples in
flight, `follow` takes step after step (`Batch.take_step`). A plan whose steps are known
is followed without waiting for the device; the model decides steps in `adaptive` and
`speculation`.

Shapes: B samples in flight, T positions, G steps."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model import AOGPT, ModelConfig
from ..runtime import devices
from ..runtime.errors import UserError
from .adaptive import adapt
from .batch import Batch, CachedBatch, EncoderBatch, OnUnmasked, Tally
from .cached import decoding_copy, make_steps
from .plans import Plan, Samples, group_sizes, order_plan, stack_plans
from .scores import ALL_SCORES
from .speculation import speculate
from .token_choice import TokenChoice

# Not cuDNN's attention, which takes 23 to 440 ms to plan each new shape.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Steps between two looks at which samples have ended, which wait for the device.
STEPS_TO_END = 8


@dataclass
class Generation:
    """Samples, and what they cost."""

    # LongTensor (B, T) in sequence order; 0 past the end of a shorter sample
    tokens: Tensor
    # LongTensor (B, T): the step or round of each position; -1: given, or past the end
    step: Tensor
    # (B, T) nats of each generated token under the model, given what was known then,
    # among the ids that may be drawn, before temperature and truncation; else 0
    log_probs: Tensor
    length: Tensor  # LongTensor (B,), positions of each sample
    model_calls: int  # forward passes, all batches together
    token_forwards: int  # inputs of those passes, without padding
    nfe: Tensor  # LongTensor (B,), forward passes that each sample took part in
    # LongTensor (B, T), positions in the order in which they became known: that of the
    # context, on which a decoder's predictions depend; those of one step in no order
    order: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: list["Generation"]) -> "Generation":
        """Return samples that were generated in parts as one."""
        return Generation(
            tokens=torch.cat([part.tokens for part in parts]),
            step=torch.cat([part.step for part in parts]),
            log_probs=torch.cat([part.log_probs for part in parts]),
            length=torch.cat([part.length for part in parts]),
            model_calls=sum(part.model_calls for part in parts),
            token_forwards=sum(part.token_forwards for part in parts),
            nfe=torch.cat([part.nfe for part in parts]),
            order=torch.cat([part.order for part in parts]),
        )

    def rows(self) -> Iterator["SampleRow"]:
        """Yield each sample, as long as it is."""
        for b, length in enumerate(self.length.tolist()):
            yield SampleRow(
                tokens=self.tokens[b, :length].tolist(),
                step=self.step[b, :length].tolist(),
                log_probs=self.log_probs[b, :length].tolist(),
                order=self.order[b][self.order[b] < length].tolist(),
            )


class SampleRow(NamedTuple):
    """A sample of a `Generation`, by position, and the order of its positions."""

    tokens: list[int]
    step: list[int]
    log_probs: list[float]
    order: list[int]


class Engine:
    """A model that generates, whose weights must stay as they are meanwhile. Keep one
    to generate in a loop."""

    def __init__(
        self,
        model: AOGPT,
        choice: TokenChoice | None = None,
        vocab_size: int | None = None,
        batch_size: int | None = None,
        compile: bool = False,
    ):
        """model: in eval mode, on any device.

        choice: how tokens are drawn. vocab_size: only ids below it are drawn, as the
        rows that pad the token table are not tokens. batch_size: samples in flight,
        halved while memory runs out; None: all. compile: torch.compile the blocks,
        which takes minutes; on a GPU also take ragged attention and CUDA graphs."""
        if vocab_size is not None and vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}; give at least 1")
        self.choice = choice or TokenChoice()
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.device = model.wte.weight.device
        self.batch: Batch | None = None  # of the last plan, for others of its shape
        self.batch_class: type[Batch] = CachedBatch
        if model.config.is_encoder:
            self.batch_class = EncoderBatch
        self.shapes: Callable[[], Any] = contextlib.nullcontext
        self.model = model
        self.compiled = compile
        if compile:
            from . import compiled

            self.model = compiled.compiled_copy(model)
            self.batch_class = compiled.batch_class_for(model)
            self.shapes = compiled.many_shapes

    @torch.no_grad()
    def generate(
        self,
        plan: Plan,
        tokens: Tensor | None = None,
        uniforms: Tensor | torch.Generator | None = None,
        *,
        forced: Tensor | None = None,
        end_token: int | None = None,
        progress: OnUnmasked = None,
    ) -> Generation:
        """Generate the samples of a plan.

        Args:
            tokens: LongTensor (B, T) with the given tokens; the rest is ignored.
            uniforms: float64 (B, T) in sequence order, in [0, 1), or a CPU generator of
                them. Sample b depends on row b alone, up to rounding.
            forced: LongTensor (B, T): take these tokens instead of drawing any, for
                log-probabilities.
            end_token: samples end before the first one that follows all given tokens;
                for decoders and plans from left to right.
            progress: called after every step with the number of positions that it
                unmasked, below 0 where a smaller batch begins again.

        Raises UserError for what does not fit together, without memory, and for output
        that is not finite."""
        B, T = plan.order.shape
        tokens, uniforms = self.checked(plan, tokens, uniforms, forced)
        is_encoder = self.model.config.is_encoder
        if end_token is not None and (is_encoder or not is_from_left_to_right(plan)):
            raise UserError(
                "only samples of a decoder from left to right can end at end-of-text: "
                "others fill in what follows it before the text; take mode l2r"
            )
        size = min(B, self.batch_size or B)
        unmasked = 0

        def count(positions: int) -> None:
            nonlocal unmasked
            unmasked += positions
            if progress is not None:
                progress(positions)

        while True:
            try:
                parts = []
                for start in range(0, B, size):
                    rows = slice(start, start + size)
                    part = self.generate_batch(
                        size,
                        plan[rows],
                        tokens[rows],
                        uniforms[rows],
                        forced=None if forced is None else forced[rows],
                        end_token=end_token,
                        progress=count,
                    )
                    parts.append(part)
                samples = parts[0] if len(parts) == 1 else Generation.joined(parts)
                return samples if end_token is None else cut_at_end(samples, end_token)
            except (MemoryError, RuntimeError) as error:
                if not devices.out_of_memory(error):
                    raise
            # Out of the except clause, whose frames keep tensors alive.
            self.batch = None
            devices.release_memory(self.device)
            count(-unmasked)  # take back what was reported; `unmasked` is 0 again
            if size == 1:
                raise UserError(
                    f"memory ran out with one sample of {T} tokens on {self.device}: "
                    "take shorter samples or more steps"
                )
            size //= 2

    def generate_batch(
        self,
        size: int,
        plan: Plan,
        tokens: Tensor,
        uniforms: Tensor,
        forced: Tensor | None,
        end_token: int | None,
        progress: OnUnmasked,
    ) -> Generation:
        """Generate up to `size` samples from checked tensors (B, T), by position."""
        # 1. Fill the batch up with samples of length 0.
        rows, T = plan.order.shape
        length = plan.length
        missing = size - rows
        if missing:
            nothing = order_plan(Samples(missing, length=0), "l2r")
            plan = stack_plans([plan, nothing], T)
            tokens = F.pad(tokens, (0, 0, 0, missing))
            uniforms = F.pad(uniforms, (0, 0, 0, missing))
            if forced is not None:
                forced = F.pad(forced, (0, 0, 0, missing))

        # 2. Generate.
        known = plan.given.sum(dim=1)
        tally = Tally(
            known=known,
            step=torch.full_like(plan.step, -1),
            nfe=torch.zeros_like(known),
            places=torch.arange(T),
            progress=progress,
        )
        # Triton's kernels run on the current GPU.
        on_device = torch.accelerator.device_index(self.device.index)
        with on_device, sdpa_kernel(KERNELS), self.shapes():
            batch = self.batch_of(size, T)
            batch.begin(plan, tokens, uniforms, forced)
            if plan.draft:
                speculate(batch, plan, tally)
            elif plan.pace:
                adapt(batch, plan, tally)
            else:
                follow(batch, plan, tally, end_token)

        # 3. Wait for the device, and put the results in sequence order.
        if batch.has_nan or not batch.log_probs[:, :T].isfinite().all():
            raise UserError(
                "the output of the model is not finite: its weights overflowed or hold "
                "NaN"
            )
        order = batch.order[:, :T].cpu()
        by_place = (batch.tokens[:, :T].cpu(), tally.step, batch.log_probs[:, :T].cpu())
        by_position = []
        for values in by_place:
            by_position.append(torch.empty_like(values).scatter_(1, order, values))
        tokens, steps, log_probs = (values[:rows] for values in by_position)
        return Generation(
            tokens=tokens,
            step=steps,
            log_probs=log_probs,
            length=length,
            model_calls=tally.calls,
            token_forwards=tally.forwards,
            nfe=tally.nfe[:rows],
            order=order[:rows].clone(),  # the buffer serves the next batch
        )

    def batch_of(self, size: int, length: int) -> Batch:
        """Return the buffers of `size` samples of `length` positions."""
        batch = self.batch
        if batch is None or (batch.B, batch.T) != (size, length):
            self.batch = batch = None  # its memory is free for the next one
            model = self.model
            if not self.compiled:
                model = decoding_copy(model, size)
            batch = self.batch_class(model, size, length, self.choice, self.vocab_size)
            self.batch = batch
        return batch

    def checked(
        self,
        plan: Plan,
        tokens: Tensor | None,
        uniforms: Tensor | torch.Generator | None,
        forced: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the given tokens, 0 elsewhere, and the uniforms, drawn where they are
        not tensors. Raises UserError for a plan that the model cannot follow, and for
        what does not fit it."""
        c = self.model.config
        B, T = plan.order.shape
        if self.model.training:
            raise UserError("the model is in training mode; call model.eval() first")
        if B == 0 or T > c.block_size:
            raise UserError(
                f"the plan is of {B} samples of {T} tokens; give at least one, of at "
                f"most {c.block_size}"
            )
        check_plan(plan, c)
        given = plan.given
        if tokens is None:
            if given.any():
                raise UserError("the plan has given positions: pass their tokens")
            tokens = torch.zeros_like(plan.order)
        if forced is not None:  # nothing is drawn
            if plan.draft:
                raise UserError("speculation draws its tokens; force none")
            uniforms = torch.zeros(plan.order.shape, dtype=torch.float64)
        elif plan.unmask_by != "order" and ALL_SCORES[plan.unmask_by].needs_targets:
            raise UserError(f"the {plan.unmask_by} order needs forced tokens")
        if not isinstance(uniforms, Tensor):
            uniforms = torch.rand(
                plan.order.shape, generator=uniforms, dtype=torch.float64
            )
        if tokens.shape == plan.order.shape:  # another one is refused below
            tokens = tokens.cpu().where(given, 0)
        ids = c.vocab_size if c.mask_token is None else c.mask_token
        for name, values, end in (
            ("tokens", tokens, ids),
            ("forced", forced, min(ids, self.vocab_size or ids)),
            ("uniforms", uniforms, 1),
        ):
            if values is None:
                continue
            is_inside = ((values >= 0) & (values < end)).all()
            if values.shape != plan.order.shape or not is_inside:
                raise UserError(
                    f"{name} must be {tuple(plan.order.shape)} numbers from 0 to "
                    f"below {end}"
                )
        return tokens, uniforms


def check_plan(plan: Plan, config: ModelConfig) -> None:
    """Raise UserError for a plan that models of a config cannot follow."""
    if config.l2r_only and (plan.draft or not is_one_by_one_l2r(plan)):
        raise UserError(
            "this model is a plain GPT, which predicts one token after the other from "
            "left to right: take mode l2r, one token a step, and give the beginning of "
            "a text alone"
        )
    if plan.draft and config.is_encoder:
        raise UserError(
            "speculation needs causal attention, which an encoder does not have: take "
            "another mode"
        )


def is_one_by_one_l2r(plan: Plan) -> bool:
    """Return whether a plan is from left to right, one position a step, and nothing
    that is given follows."""
    identity = torch.arange(plan.order.shape[1])
    is_l2r = torch.equal(plan.order, identity.expand_as(plan.order))
    at_once = (group_sizes(plan) > 1).any()
    return is_l2r and plan.unmask_by == "order" and not at_once


def is_from_left_to_right(plan: Plan) -> bool:
    """Return whether what a plan generates is generated from left to right."""
    both = plan.generated[:, 1:] & plan.generated[:, :-1]
    falls = (plan.order.diff(dim=1) < 0) & both
    return plan.unmask_by == "order" and not bool(falls.any())


def follow(batch: Batch, plan: Plan, tally: Tally, end_token: int | None) -> None:
    """Take the steps of a plan that is known, apart from which positions the model
    prefers."""
    tally.step = plan.step.where(plan.generated, -1)
    chosen = plan.unmask_by != "order"
    sizes = group_sizes(plan).T  # (G, B) positions that each step unmasks
    if len(sizes) == 0:
        return
    steps_at_once = len(sizes) if end_token is None else STEPS_TO_END
    cached = torch.zeros_like(tally.known)
    for size in sizes.split(steps_at_once):
        # 1. The numbers of these steps, (G, B), are known before they are taken.
        if end_token is not None:
            size = size * ~ended(batch, tally, end_token)
        known = tally.known + size.cumsum(dim=0) - size
        after = batch.inputs_kept(known, targets_fixed=not chosen)
        before = torch.cat([cached[None], after[:-1]])
        cached = after[-1]
        candidates = size
        if chosen:  # every position left is a candidate
            candidates = (size > 0) * (plan.length - known)
        count = batch.count(before, known, candidates, plan.length)
        steps = make_steps(
            cached=before,
            known=known,
            count=count,
            candidates=candidates,
            size=size,
            device=batch.device,
            unmask_by=plan.unmask_by,
        )

        # 2. Take them.
        for step, unmasked in zip(steps, size.sum(dim=1).tolist(), strict=True):
            if unmasked:
                batch.take_step(step)
                tally.calls += 1
                if tally.progress is not None:
                    tally.progress(unmasked)
        tally.known = tally.known + size.sum(dim=0)
        tally.forwards += int(count.sum())
        tally.nfe += (size > 0).sum(dim=0)


def ended(batch: Batch, tally: Tally, end_token: int) -> Tensor:
    """Return the rows, BoolTensor (B,), that have generated end-of-text after all that
    is given."""
    is_known = tally.places < tally.known[:, None]  # (B, T), by place
    position = batch.order[:, :-1].cpu()
    is_given = (tally.step < 0) & is_known
    last_given = position.where(is_given, -1).amax(dim=1, keepdim=True)
    is_end = (batch.tokens[:, :-1].cpu() == end_token) & is_known
    return (is_end & (position > last_given)).any(dim=1)


def cut_at_end(samples: Generation, end_token: int) -> Generation:
    """Return samples that were generated from left to right, each up to the end-of-text
    after all of its given tokens. What they cost stays what it was."""
    T = samples.tokens.shape[1]
    position = torch.arange(T)
    exists = position < samples.length[:, None]
    is_given = exists & (samples.step < 0)
    last_given = position.where(is_given, -1).amax(dim=1, keepdim=True)
    is_end = (samples.tokens == end_token) & exists & (position > last_given)
    length = torch.minimum(position.where(is_end, T).amin(dim=1), samples.length)
    is_kept = position < length[:, None]
    return replace(
        samples,
        length=length,
        tokens=samples.tokens.where(is_kept, 0),
        step=samples.step.where(is_kept, -1),
        log_probs=samples.log_probs.where(is_kept, 0),
    )
