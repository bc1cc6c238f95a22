"""The engine: generation by any plan, with a KV cache for decoders and full passes for
encoders. Read down: `generate` checks, an `Engine` takes batch after batch, `follow`
takes step after step. A plan whose steps are known is followed without waiting for the
device; the model decides steps in `adaptive` and `speculation`.

Shapes: B samples in flight, T positions, G steps, N inputs of a pass, V vocabulary. A
place is an index in the prediction order: place i of the buffers (B, T + 1) has the
token of position `order[b, i]`. Nobody reads place T."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import AOGPT, ModelConfig, head_chunk
from ..runtime import devices
from ..runtime.errors import UserError
from ..systems import log_linear_noise
from . import cached as caching
from .adaptive import adapt
from .batch import OnUnmasked, Tally
from .cached import KVCache, Step, decoding_copy, inputs_kept, make_steps, ragged
from .compiled import GraphRunner, Stage, few_shapes, ladder, many_shapes
from .plans import Plan, Samples, group_sizes, order_plan, stack_plans
from .scores import best_first, rounding_of, rule_of, scores_of
from .speculation import speculate
from .token_choice import TokenChoice, choose_tokens

# Logits whose tokens are drawn at once on a CPU: they and their copies stay in its
# cache.
CPU_CHUNK_ELEMENTS = 2**19
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

    def rows(self) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Yield tokens, steps and log-probabilities of each sample, as long as it
        is."""
        for b, length in enumerate(self.length.tolist()):
            tokens = self.tokens[b, :length].tolist()
            step = self.step[b, :length].tolist()
            log_probs = self.log_probs[b, :length].tolist()
            yield tokens, step, log_probs


@dataclass(frozen=True)
class Decoder:
    """A model and how it generates."""

    model: AOGPT  # in eval mode, on any device
    choice: TokenChoice = TokenChoice()  # how tokens are drawn
    # Only ids below it are drawn: the rows that pad the token table are not tokens.
    vocab_size: int | None = None
    # Samples in flight at once, halved while memory runs out; None: all.
    batch_size: int | None = None
    # torch.compile the blocks; worth its minutes for many samples. On a GPU it also
    # takes ragged attention and CUDA graphs.
    compile: bool = False

    @torch.no_grad()
    def generate(
        self,
        plan: Plan,
        tokens: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
        forced: Tensor | None = None,
        end_token: int | None = None,
        progress: OnUnmasked = None,
    ) -> Generation:
        """Generate the samples of a plan. Arguments and errors: see the function
        `generate`."""
        B, T = plan.order.shape
        inputs = check_inputs(
            self.model,
            plan,
            self.choice,
            tokens=tokens,
            uniforms=uniforms,
            generator=generator,
            forced=forced,
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
                engine = Engine(
                    self.model,
                    size,
                    T,
                    choice=self.choice,
                    vocab_size=self.vocab_size,
                    compile=self.compile,
                    end_token=end_token,
                )
                return engine.run(plan, inputs, count)
            except (MemoryError, RuntimeError) as error:
                if not devices.out_of_memory(error):
                    raise
            # Out of the except clause, whose frames keep tensors alive.
            device = self.model.wte.weight.device
            devices.release_memory(device)
            count(-unmasked)  # take back what was reported; `unmasked` is 0 again
            if size == 1:
                raise UserError(
                    f"memory ran out with one sample of {T} tokens on {device}: take "
                    "shorter samples or more steps"
                )
            size //= 2


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
    compile: bool = False,
    end_token: int | None = None,
    progress: OnUnmasked = None,
) -> Generation:
    """Generate the samples of a plan. To generate in a loop, keep an `Engine`.

    Args:
        tokens: LongTensor (B, T) with the given tokens; the rest is ignored.
        generator: CPU generator of one uniform number per position.
        uniforms: or those numbers, float64 (B, T) in sequence order, in [0, 1). Sample
            b depends on row b alone, up to rounding.
        forced: LongTensor (B, T): take these tokens instead of drawing any, for
            log-probabilities.
        end_token: a sample in which it and all before it are known is generated no
            further, where its plan fixes the steps and nothing given follows.
        progress: called after every step with the number of positions that it unmasked,
            below 0 where a smaller batch begins again.

    The others are fields of `Decoder`. Raises UserError for what does not fit together,
    without memory, and for output that is not finite."""
    decoder = Decoder(
        model,
        choice=choice or TokenChoice(),
        vocab_size=vocab_size,
        batch_size=batch_size,
        compile=compile,
    )
    return decoder.generate(
        plan,
        tokens,
        generator=generator,
        uniforms=uniforms,
        forced=forced,
        end_token=end_token,
        progress=progress,
    )


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of the samples of a plan, (B, T) by position, on the CPU."""

    tokens: Tensor  # LongTensor, 0 where none is given
    uniforms: Tensor  # float64 in [0, 1)
    forced: Tensor | None  # LongTensor


def check_inputs(
    model: AOGPT,
    plan: Plan,
    choice: TokenChoice,
    tokens: Tensor | None,
    uniforms: Tensor | None,
    generator: torch.Generator | None,
    forced: Tensor | None,
) -> Inputs:
    """Return the inputs of a plan, with uniforms drawn by the generator where none are
    given. Raises UserError if they do not fit model, plan and choice."""
    c = model.config
    B, T = plan.order.shape
    given = plan.given
    if model.training:
        raise UserError("the model is in training mode; call model.eval() first")
    if B == 0:
        raise UserError("the plan has no samples")
    if T > c.block_size:
        raise UserError(
            f"samples of {T} tokens, but the model takes up to {c.block_size}"
        )
    check_plan(plan, c)
    if plan.draft and forced is not None:
        raise UserError("speculation draws its tokens; force none")
    if plan.unmask_by != "order" and forced is None:
        if rule_of(plan.unmask_by).needs_targets:
            raise UserError(f"the {plan.unmask_by} order needs forced tokens")
    if tokens is None:
        if given.any():
            raise UserError("the plan has given positions: pass their tokens")
        tokens = torch.zeros(B, T, dtype=torch.long)
    if forced is not None:  # nothing is drawn
        uniforms = torch.zeros(B, T, dtype=torch.float64)
    elif uniforms is None:
        uniforms = torch.rand(
            B,
            T,
            generator=generator,
            dtype=torch.float64,
        )
    for name, value in (("tokens", tokens), ("uniforms", uniforms), ("forced", forced)):
        if value is not None and value.shape != (B, T):
            raise UserError(
                f"{name} are {tuple(value.shape)}, but the plan is for {(B, T)}"
            )
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise UserError(
            "uniforms must lie in [0, 1); torch.rand in float64 makes such numbers"
        )
    ids = c.vocab_size if c.mask_token is None else c.mask_token
    for name, values in (("given", tokens.cpu()[given]), ("forced", forced)):
        if values is not None and ((values < 0) | (values >= ids)).any():
            raise UserError(
                f"a {name} token is outside the model's vocabulary of {ids}"
            )
    return Inputs(
        tokens=tokens.cpu().where(given, 0),
        uniforms=uniforms,
        forced=forced,
    )


def check_plan(plan: Plan, config: ModelConfig) -> None:
    """Raise UserError for a plan that a model cannot follow."""
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
    """Return whether a plan is from left to right, one position a step."""
    identity = torch.arange(plan.order.shape[1])
    is_l2r = torch.equal(plan.order, identity.expand_as(plan.order))
    at_once = (group_sizes(plan) > 1).any()
    return is_l2r and not at_once and plan.unmask_by == "order" and plan.pace is None


class Engine:
    """The state of B samples in flight, and what advances it. It serves any number of
    batches and plans of T positions; the model's weights must stay as they are
    meanwhile."""

    @torch.no_grad()
    def __init__(
        self,
        model: AOGPT,
        batch_size: int,
        length: int,
        choice: TokenChoice | None = None,
        vocab_size: int | None = None,
        compile: bool = False,
        end_token: int | None = None,
    ):
        """batch_size: B; length: T. The others are those of `Decoder` and
        `generate`."""
        c = model.config
        weight = model.wte.weight
        device = weight.device
        self.B = batch_size
        self.T = length
        if vocab_size is not None and vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}; give at least 1")
        self.vocab_size = vocab_size
        self.end_token = end_token
        self.choice = choice or TokenChoice()
        self.compiled = compile
        self.device = device
        # Draws take float64; where the device has none, they are made on the CPU.
        self.draw_device = device
        if not devices.supports_float64(device):
            self.draw_device = torch.device("cpu")
        # 1. The model, and what its steps run on.
        records = compile and devices.can_run_triton(device)
        self.attention = attention_kernel_for(model) if records else None
        many_sizes = records and not c.is_encoder
        self.model = decoding_copy(model, batch_size, compile, many_sizes)
        self.head_rows = head_chunk(c.vocab_size, device.type)  # logits alive at once
        # 2. The cache of a decoder, and what adaLN gives all positions, unless that is
        #    larger than the cache.
        self.cache: KVCache | None = None
        self.tables: list[Tensor] | None = None
        if not c.is_encoder:
            self.cache = KVCache(
                c,
                batch_size,
                length,
                device,
                weight.dtype,
            )
            parts = 6 * c.n_layer + 2
            table_bytes = c.block_size * parts * c.n_embd * weight.dtype.itemsize
            cache_bytes = sum(
                tensor.nbytes for tensor in self.cache.keys + self.cache.values
            )
            if table_bytes <= cache_bytes:
                self.tables = caching.modulation_tables(self.model)
        # 3. Buffers of what is known of the samples. Their addresses stay, as CUDA
        #    graphs need.
        shape = (batch_size, length + 1)
        self.order = torch.zeros(shape, dtype=torch.long, device=device)
        self.tokens = torch.zeros_like(self.order)
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        # whether any prediction was NaN, also one that a later one replaces
        self.has_nan = torch.zeros((), dtype=torch.bool, device=device)
        # by position
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=self.draw_device)
        self.length = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.forced: Tensor | None = None  # by position: tokens that are not drawn
        self.padded = False  # whether some rows are shorter than T
        # 4. The stages of a step, and their graphs.
        self.graphs: GraphRunner | None = None
        buffers: tuple[Tensor, ...] = ()
        if records:
            rows = torch.zeros(
                5,
                batch_size,
                dtype=torch.long,
                device=device,
            )
            self.graphs = GraphRunner(rows)
            buffers = self.make_buffers()
        if c.is_encoder:
            self.predicting = Stage(Engine.encode, size=lambda step: 1)
        else:
            self.predicting = Stage(Engine.predict, size=lambda step: step.inputs)
        self.preferring = Stage(
            Engine.prefer, size=lambda step: step.all_candidates, buffers=buffers
        )
        self.unmasking = Stage(
            Engine.unmask, size=lambda step: step.all_size, buffers=buffers
        )

    @torch.no_grad()
    def generate(
        self,
        plan: Plan,
        tokens: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
        progress: OnUnmasked = None,
    ) -> Generation:
        """Generate the samples of a plan, with the checks of the function of this
        name."""
        length = plan.order.shape[1]
        if length != self.T:
            raise UserError(
                f"a plan for {length} positions does not fit this engine, which is for "
                f"{self.T}"
            )
        inputs = check_inputs(
            self.model,
            plan,
            self.choice,
            tokens=tokens,
            uniforms=uniforms,
            generator=generator,
            forced=None,
        )
        return self.run(plan, inputs, progress)

    @torch.no_grad()
    def run(self, plan: Plan, inputs: Inputs, progress: OnUnmasked) -> Generation:
        """Generate the samples of a plan from checked inputs, B at a time."""
        shapes = many_shapes() if self.compiled else contextlib.nullcontext()
        # Triton's kernels run on the current GPU.
        on_device = torch.accelerator.device_index(self.device.index)
        with on_device, devices.attention_of_many_shapes(), shapes:
            parts = []
            for start in range(0, len(plan.order), self.B):
                rows = slice(start, start + self.B)
                forced = inputs.forced
                part = Inputs(
                    tokens=inputs.tokens[rows],
                    uniforms=inputs.uniforms[rows],
                    forced=None if forced is None else forced[rows],
                )
                parts.append(self.run_batch(plan[rows], part, progress))
        return Generation.joined(parts)

    def run_batch(self, plan: Plan, inputs: Inputs, progress: OnUnmasked) -> Generation:
        """Generate up to B samples."""
        # 1. Fill the batch up with samples of length 0, and the buffers with it.
        T = self.T
        rows = len(plan.order)
        missing = self.B - rows
        length = plan.length
        tokens = inputs.tokens
        uniforms = inputs.uniforms
        forced = inputs.forced
        if missing:
            nothing = order_plan(Samples(missing, length=0), "l2r")
            plan = stack_plans([plan, nothing], T)
            tokens = F.pad(tokens, (0, 0, 0, missing))
            uniforms = F.pad(uniforms, (0, 0, 0, missing))
        if forced is not None:
            forced = F.pad(forced, (0, 0, 0, missing)).to(self.device)
        self.order[:, :T].copy_(plan.order)
        self.tokens[:, :T].copy_(tokens.gather(1, plan.order))
        self.uniforms[:, :T].copy_(uniforms)
        self.forced = forced
        self.length.copy_(plan.length)
        self.padded = bool((plan.length < T).any())
        self.log_probs.zero_()
        self.has_nan.zero_()
        if self.cache is None:
            self.predicting.variant = self.padded
        self.preferring.variant = plan.unmask_by
        if self.graphs is not None:
            self.record_graphs(plan)

        # 2. Generate.
        known = plan.given.sum(dim=1)
        tally = Tally(
            known=known,
            step=torch.full_like(plan.step, -1),
            nfe=torch.zeros_like(known),
            places=torch.arange(T),
            progress=progress,
        )
        if plan.draft:
            speculate(self, plan, tally)
        elif plan.pace:
            adapt(self, plan, tally)
        else:
            follow(self, plan, tally)

        # 3. Wait for the device, and put the results in sequence order.
        if self.has_nan or not self.log_probs[:, :T].isfinite().all():
            raise UserError(
                "the model's output is not finite: its weights overflowed or hold NaN"
            )
        order = self.order[:, :T].cpu()
        tokens = self.tokens[:, :T].cpu()
        log_probs = self.log_probs[:, :T].cpu()
        return Generation(
            tokens=torch.empty_like(tokens).scatter_(1, order, tokens)[:rows],
            step=torch.empty_like(tally.step).scatter_(1, order, tally.step)[:rows],
            log_probs=torch.empty_like(log_probs).scatter_(1, order, log_probs)[:rows],
            length=length,
            model_calls=tally.calls,
            token_forwards=tally.forwards,
            nfe=tally.nfe[:rows],
            order=order[:rows].clone(),  # the buffer serves the next batch
        )

    # ---- a step ----------------------------------------------------------------------

    def count(
        self, cached: Tensor, known: Tensor, candidates: Tensor, length: Tensor
    ) -> Tensor:
        """Return the inputs of a pass that predicts the candidates after `known`
        tokens, of rows (B,) or of all steps (G, B), on the host."""
        inputs = known + candidates - cached
        if self.cache is None:
            inputs = length
        return (candidates > 0) * inputs

    def take_step(self, step: Step) -> None:
        """Predict and unmask. Each stage is tensor code whose shapes follow from the
        numbers of the step: without graphs these are self.predict(step) (`encode` of an
        encoder), self.prefer(...) and self.unmask(...)."""
        hidden, index = self.call(self.predicting, step)
        if step.unmask_by != "order":
            index, _ = self.call(self.preferring, step, hidden, index)
        self.call(self.unmasking, step, hidden, index)

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return hidden states (N, D), and which of them predicts each place, (B, T +
        1); it means something for candidates alone. With two rows of 5 and 2 inputs, of
        which the last 2 and 1 predict places 3, 4 and 1: index[0, 3:5] is 3 4, and
        index[1, 1] is 6."""
        assert self.cache is not None
        hidden = caching.cached_hidden(
            self.model,
            self.tokens,
            self.order[:, :-1],
            step,
            cache=self.cache,
            tables=self.tables,
            kernel=self.attention,
        )
        place = torch.arange(self.T + 1, device=self.device)
        start = step.count.cumsum(0) - step.count
        if step.first is None:
            index = start[:, None] + (place - step.cached[:, None])
        else:  # queries come last
            queries = start + step.count - step.candidates
            index = queries[:, None] + (place - step.first[:, None])
        return hidden, index.clamp(0, step.inputs - 1)

    def encode(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return what `predict` does, for an encoder: it reads the rows with
        candidates, with [MASK] where a token is not known."""
        T = self.T
        encoder: Any = self.model  # of systems/encoder.py
        c = encoder.config
        order = self.order[:, :T]
        is_known = torch.arange(T, device=self.device) < step.known[:, None]
        ordered = torch.where(is_known, self.tokens[:, :T], c.mask_token)
        sequence = torch.empty_like(ordered).scatter_(1, order, ordered)
        is_idle = (step.candidates == 0).to(torch.uint8)
        rows = is_idle.argsort(stable=True)[: step.active]
        lengths = self.length[rows] if self.padded else None
        sigma = None
        if c.noise:
            # The level of the share of masked tokens; bfloat16 is too coarse for it.
            total = torch.full_like(rows, T)
            if lengths is not None:
                total = lengths.clamp(min=1)
            known = step.known[rows].to(self.draw_device).double()
            sigma = log_linear_noise(1 - known / total.to(self.draw_device))
        hidden = encoder.hidden(sequence[rows], sigma, lengths)
        # Position p of the i-th of these rows is state i T + p.
        starts = torch.arange(len(rows), device=self.device) * T
        start = torch.zeros_like(step.known).scatter_(0, rows, starts)
        return hidden.flatten(0, 1), start[:, None] + self.order

    def prefer(
        self, step: Step, hidden: Tensor, index: Tensor, by: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Put the candidates of every row in the order in which the model prefers them,
        by the first of the scores `by`; None: by that of the step.

        hidden, index: as `predict` gives them. Returns `index` in that order, and the
        scores of its places, (scores, B, T + 1): inf where known, -inf where a place is
        not a candidate."""
        # 1. The scores of every candidate, (N, scores).
        row, _, place = ragged(
            step.known, step.candidates, total=step.all_candidates, unused=self.T
        )
        if self.forced is None:
            targets = torch.zeros_like(place)
        else:
            targets = self.forced_at(row, place)
        state_chunks = hidden[index[row, place]].split(self.head_rows)  # (n, D) each
        target_chunks = targets.split(self.head_rows)
        names = by or [step.unmask_by]
        parts = []
        for states, chunk_targets in zip(state_chunks, target_chunks, strict=True):
            parts.append(scores_of(self.logits(states), names, chunk_targets))
        candidate_scores = torch.cat(parts).to(self.device)

        # 2. The scores by place. Known places stay in front (infinity; equals stay in
        #    order), places that come later or that a row does not have stay behind,
        #    and so does place T.
        places = torch.arange(self.T + 1, device=self.device)
        is_unknown = places >= step.known[:, None]
        exists = places < self.T
        by_place = []
        for score in candidate_scores.unbind(dim=-1):
            scores = torch.full_like(self.log_probs, -torch.inf)
            scores[row, place] = score
            scores = scores.where(is_unknown, torch.inf)
            scores = scores.where(exists, -torch.inf)
            by_place.append(scores)
            self.has_nan.logical_or_(scores.isnan().any())

        # 3. Highest score first; equals in the order of the plan.
        tolerance = rounding_of(self.model.wte.weight.dtype)
        preferred = best_first(by_place[0], tolerance)
        self.order.copy_(self.order.gather(1, preferred))
        sorted_scores = torch.stack(
            [scores.gather(1, preferred) for scores in by_place]
        )
        return index.gather(1, preferred), sorted_scores

    # ---- tokens ----------------------------------------------------------------------

    def unmask(self, step: Step, hidden: Tensor, index: Tensor) -> None:
        """Draw the tokens of the next `step.size` places of each row, or store forced
        ones. hidden, index: as `predict` gives them."""
        row, _, place = ragged(
            step.known,
            step.size,
            total=step.all_size,
            unused=self.T,
        )
        row_chunks = row.split(self.head_rows)
        place_chunks = place.split(self.head_rows)
        for rows, places in zip(row_chunks, place_chunks, strict=True):
            logits = self.logits(hidden[index[rows, places]])
            if self.forced is not None:
                self.store(rows, places, self.forced_at(rows, places), logits)
                continue
            size = max(1, len(logits))
            if logits.device.type == "cpu":
                size = max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
            for start in range(0, len(logits), size):
                chunk = slice(start, start + size)
                self.draw(logits[chunk], rows[chunk], places[chunk])

    def draw(self, logits: Tensor, row: Tensor, place: Tensor) -> None:
        """Draw tokens (N,) from logits (N, V) and store them."""
        uniforms = self.uniforms_at(row, place)
        tokens = choose_tokens(logits, uniforms, self.choice)
        self.store(row, place, tokens, logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (N, V), those of ids that may not be drawn minus infinity."""
        logits = caching.float32_logits(self.model, hidden).to(self.draw_device)
        if self.vocab_size is not None:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def uniforms_at(self, row: Tensor, place: Tensor) -> Tensor:
        """Return the uniform number of the position in each place, (N,)."""
        position = self.order[row.to(self.device), place.to(self.device)]
        return self.uniforms[row.to(self.draw_device), position.to(self.draw_device)]

    def forced_at(self, row: Tensor, place: Tensor) -> Tensor:
        """Return the forced tokens of the positions in places, (N,)."""
        assert self.forced is not None
        return self.forced[row, self.order[row, place]]

    def store(
        self,
        row: Tensor,
        place: Tensor,
        tokens: Tensor,
        logits: Tensor,
    ) -> None:
        """Store tokens (N,) and their log-probabilities under logits (N, V)."""
        if logits.dtype != torch.float64:
            logits = logits.float()
        all_log_probs = logits.log_softmax(dim=-1)
        log_probs = all_log_probs.gather(1, tokens[:, None].to(logits.device))
        row = row.to(self.device)
        place = place.to(self.device)
        self.tokens[row, place] = tokens.to(self.device)
        log_probs = log_probs.squeeze(1).float().to(self.device)
        self.log_probs[row, place] = log_probs
        self.has_nan.logical_or_(log_probs.isnan().any())

    def ended(self, tally: Tally) -> Tensor:
        """Return the rows, BoolTensor (B,), that have generated end-of-text after all
        that is given, and all before it."""
        is_unknown = tally.places >= tally.known[:, None]  # (B, T), by place
        is_generated = (tally.step >= 0) & ~is_unknown
        position = self.order[:, :-1].cpu()
        is_given = (tally.step < 0) & ~is_unknown
        last_given = position.where(is_given, -1).amax(dim=1, keepdim=True)
        is_end = self.tokens[:, :-1].cpu() == self.end_token
        is_end = is_end & is_generated & (position > last_given)
        first_end = position.where(is_end, self.T).amin(dim=1)
        first_unknown = position.where(is_unknown, self.T).amin(dim=1)
        return first_end < first_unknown

    # ---- CUDA graphs -----------------------------------------------------------------

    def make_buffers(self) -> tuple[Tensor, Tensor]:
        """Return the tensors from which graphs read what `predict` gives: hidden states
        and index."""
        longest = ladder(self.B * (self.T + 1))[-1]
        hidden = torch.zeros(
            longest,
            self.model.config.n_embd,
            dtype=self.model.wte.weight.dtype,
            device=self.device,
        )
        return hidden, torch.zeros_like(self.order)

    def record_graphs(self, plan: Plan) -> None:
        """Record what the steps of a plan may need, so that none has to wait. Its first
        step, which also computes what is given, runs without a graph if it is larger
        than others."""
        assert self.graphs is not None
        if self.forced is not None:
            return
        sizes = group_sizes(plan).sum(dim=0)  # (G,) positions that each step unmasks
        left = int(sizes.sum())
        largest = int(sizes.max()) if left else 0
        chosen = plan.pace is not None or plan.unmask_by != "order"
        if chosen:  # every position that is left is a candidate
            inputs = left + self.B
        else:  # those unmasked before, computed again with their targets, and the next
            inputs = 2 * largest
        stages: list[tuple[Stage, int]] = []
        if self.cache is None:
            stages.append((self.predicting, 1))
        elif self.attention is not None:
            stages.append((self.predicting, inputs))
        if plan.pace is None and not plan.draft:
            stages.append((self.unmasking, largest))
            if chosen:
                stages.append((self.preferring, left))
        self.graphs.record_all(self, stages, plan.unmask_by)

    def call(self, stage: Stage, step: Step, *tensors: Tensor) -> Any:
        """Return the result of a stage, by a CUDA graph where one is recorded. A graph
        could not read forced tokens, which each batch has at another address."""
        if self.graphs is None:
            if self.compiled:
                places = self.T if self.cache is None else self.cache.unused_slot
                step = few_shapes(step, places)
            return stage.function(self, step, *tensors)
        if self.forced is not None:
            return stage.function(self, step, *tensors)
        if step.first is not None:  # no graph has such places
            with torch.compiler.set_stance("force_eager"):
                return stage.function(self, step, *tensors)
        return self.graphs(self, stage, step, *tensors)


def attention_kernel_for(model: AOGPT) -> ModuleType | None:
    """Return the kernel of a model's ragged attention on a GPU; None: it attends under
    masks."""
    if model.config.is_encoder or model.separate_queries:
        return None
    from . import attention_kernel  # which imports Triton

    if not attention_kernel.can_attend(model.config.head_dim, model.wte.weight.dtype):
        return None
    return attention_kernel


def follow(engine: Engine, plan: Plan, tally: Tally) -> None:
    """Take the steps of a plan that is known, apart from which positions the model
    prefers."""
    tally.step = plan.step.where(plan.generated, -1)
    chosen = plan.unmask_by != "order"
    sizes = group_sizes(plan).T  # (G, B) positions that each step unmasks
    if len(sizes) == 0:
        return
    steps_at_once = len(sizes)
    if engine.end_token is not None:
        steps_at_once = STEPS_TO_END
    cached = torch.zeros_like(tally.known)
    for size in sizes.split(steps_at_once):
        # 1. The numbers of these steps, (G, B), are known before they are taken.
        if engine.end_token is not None:
            size = size * ~engine.ended(tally)
        known = tally.known + size.cumsum(dim=0) - size
        after = inputs_kept(engine.model, known, targets_fixed=not chosen)
        before = torch.cat([cached[None], after[:-1]])
        cached = after[-1]
        candidates = size
        if chosen:  # every position left is a candidate
            candidates = (size > 0) * (plan.length - known)
        count = engine.count(before, known, candidates, plan.length)
        steps = make_steps(
            cached=before,
            known=known,
            count=count,
            candidates=candidates,
            size=size,
            device=engine.device,
            unmask_by=plan.unmask_by,
        )

        # 2. Take them.
        for step, unmasked in zip(steps, size.sum(dim=1).tolist(), strict=True):
            if unmasked:
                engine.take_step(step)
                tally.calls += 1
                if tally.progress is not None:
                    tally.progress(unmasked)
        tally.known = tally.known + size.sum(dim=0)
        tally.forwards += int(count.sum())
        tally.nfe += (size > 0).sum(dim=0)
