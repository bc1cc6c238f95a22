"""The engine: generation by any plan, with a KV cache for decoders and full passes for
encoders. Plans whose steps are known are followed without waiting for the device; the
model decides steps in `adaptive` and `speculation`.

Shapes: B samples in flight, T positions, G steps, N inputs of a pass, V vocabulary. A
slot is a place in the prediction order, in the cache and in the buffers (B, T + 1);
nobody reads slot T."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import AOGPT, head_chunk
from ..runtime import devices
from ..runtime.command_line import show
from ..runtime.errors import UserError
from ..systems import log_linear_noise
from . import cached as caching
from .adaptive import adapt, reorder
from .cached import KVCache, Step, decoding_copy
from .compiled import GraphRunner, few_shapes, ladder, many_shapes
from .kernel_check import Kernels, load_kernels
from .plans import Plan, group_sizes, l2r_plan, stack_plans
from .speculation import speculate
from .token_choice import TokenChoice, choose_tokens, known_text, without_repeats

# Logits whose tokens are drawn at once on a CPU: they and their copies stay in its
# cache.
CPU_CHUNK_ELEMENTS = 2**19
STEPS_TO_END = (
    8  # between two looks at which samples have ended, which wait for the device
)


@dataclass
class Generation:
    """Samples, and what they cost."""

    tokens: Tensor  # LongTensor (B, T) in sequence order; 0 past the end of a shorter sample
    step: Tensor  # LongTensor (B, T): the step or round of each position, -1 given or past the end
    log_probs: Tensor  # (B, T) nats of each generated token under the model, given what was known
    # then, among the ids that may be drawn, before temperature and truncation; else 0
    length: Tensor  # LongTensor (B,), positions of each sample
    model_calls: int  # forward passes, all batches together
    token_forwards: int  # inputs of those passes, without padding
    nfe: Tensor  # LongTensor (B,), forward passes that each sample took part in
    order: Tensor  # LongTensor (B, T), positions in the order in which they became known: that of
    # the context, on which a decoder's predictions depend; those of one step in no
    # order

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: list["Generation"]) -> "Generation":
        """Samples that were generated in parts, as one."""
        values = zip(*(vars(part).values() for part in parts), strict=True)
        return Generation(
            *(torch.cat(v) if torch.is_tensor(v[0]) else sum(v) for v in values)
        )

    def rows(self) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Tokens, steps and log-probabilities of each sample, as long as it is."""
        for b, length in enumerate(self.length.tolist()):
            yield tuple(
                v[b, :length].tolist() for v in (self.tokens, self.step, self.log_probs)
            )


@torch.no_grad()
def generate(
    model: AOGPT,
    plan: Plan,
    tokens: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    forced: Tensor | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> Generation:
    """Generate the samples of a plan. To generate in a loop, keep an `Engine`.

    Args: model: in eval mode, on any device. tokens: LongTensor (B, T) with the given
    tokens; the rest is ignored. generator: CPU generator of one uniform number per
    position, or uniforms: those numbers, float64 (B, T) in sequence order, in [0, 1):
    sample b depends on row b alone, up to rounding. forced: LongTensor (B, T): take
    these tokens instead of drawing any, for log-probabilities. batch_size: samples in
    flight at once, halved while memory runs out; by default all. progress: called after
    every step with the number of positions it unmasked, below 0 where a smaller batch
    begins again. **settings: choice, vocab_size, compile, kernels and end_token, of
    `Engine`.

    Raises UserError for what does not fit together, without memory, and for output not
    finite."""
    (B, T), device = plan.order.shape, model.wte.weight.device
    choice = settings.get("choice") or TokenChoice()
    inputs = check_inputs(model, plan, choice, tokens, uniforms, generator, forced)
    size = min(B, batch_size or B)
    generated = 0

    def count(positions: int) -> None:
        nonlocal generated
        generated += positions
        if progress is not None:
            progress(positions)

    while True:
        try:
            return Engine(model, size, T, **settings).run(plan, *inputs, count)
        except (MemoryError, RuntimeError) as error:
            if not devices.out_of_memory(error):
                raise
        # Out of the except clause, whose frames keep tensors alive.
        devices.release_memory(device)
        count(-generated)  # take back what was reported; `generated` is 0 again
        if size == 1:
            tried = f"memory ran out with one sample of {T} tokens on {device}"
            raise UserError(f"{tried}: take shorter samples or more steps")
        size //= 2


def check_inputs(
    model,
    plan: Plan,
    choice,
    tokens,
    uniforms,
    generator,
    forced,
) -> tuple:
    """Tokens, 0 where they are not given, uniforms and forced tokens, (B, T) each;
    UserError if they do not fit model, plan and choice."""
    (B, T), c, given = plan.order.shape, model.config, plan.given_positions()
    inexact = choice.noise != "float64" or choice.avoids_repeats or forced is not None
    exact = "take another noise, no penalty or ban of repeats, and force no tokens"
    unfit = plan.draft and (c.is_encoder or c.l2r_only)
    for wrong, message in (
        (model.training, "the model is in training mode; call model.eval() first"),
        (
            T > c.block_size,
            f"samples of {T} tokens, but the model takes up to {c.block_size}",
        ),
        (
            unfit,
            "speculative decoding needs a decoder that is conditioned on the target position",
        ),
        (plan.draft and inexact, f"speculation draws exactly; {exact}"),
        (
            plan.unmask_by == "oracle" and forced is None,
            "the oracle order needs forced tokens",
        ),
        (
            tokens is None and given.any(),
            "the plan has given positions: pass their tokens",
        ),
    ):
        if wrong:
            raise UserError(message)
    if tokens is None:
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
    return tokens.cpu().where(given, 0), uniforms, forced


class Tally:
    """Progress and cost of the samples of a batch."""

    def __init__(self, plan: Plan, progress: Callable[[int], None] | None):
        self.known = plan.given_positions().sum(dim=1)  # (B,) tokens
        self.step = torch.full_like(
            plan.step, -1
        )  # (B, T) the round of each slot, -1: none
        self.nfe = torch.zeros_like(self.known)
        self.slots = torch.arange(plan.order.shape[1])
        self.rounds = self.calls = self.forwards = 0
        self.progress = progress or (lambda positions: None)

    def called(self, count: Tensor) -> None:
        """A pass of `count` (B,) inputs."""
        self.calls = self.calls + 1
        self.forwards = self.forwards + int(count.sum())
        self.nfe += count > 0

    def unmask(self, size: Tensor) -> None:
        """The next `size` (B,) slots of each row are known now."""
        after = self.known + size
        newly = (self.slots >= self.known[:, None]) & (self.slots < after[:, None])
        self.step = self.step.where(~newly, self.rounds)
        self.known = after
        self.rounds = self.rounds + 1
        self.progress(int(size.sum()))


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
        kernels: bool | Kernels = False,
        end_token: int | None = None,
    ):
        """vocab_size: only ids below it are drawn (the rows that pad the token table
        are not tokens). compile: torch.compile the blocks; worth its minutes for many
        samples. On a GPU it also takes Triton kernels and CUDA graphs. kernels: take
        the kernels without compiling, too; or exactly these. end_token: a sample in
        which it and all before it are known is generated no further, where its plan
        fixes the steps."""
        self.B = batch_size
        self.T = length
        self.vocab_size = vocab_size
        self.end_token = end_token
        self.choice = choice or TokenChoice()
        self.compiled = compile
        weight = model.wte.weight
        c = model.config
        self.device = device = weight.device
        # Draws take float64; where the device has none, they are made on the CPU.
        self.draw_device = (
            device if devices.supports_float64(device) else torch.device("cpu")
        )
        self.kernels: Kernels | None = None
        if isinstance(kernels, Kernels):
            self.kernels = kernels
        elif compile or kernels:
            self.kernels = load_kernels(model, vocab_size)
            if self.kernels is not None and self.choice.noise != "float64":
                show(
                    f"noise {self.choice.noise}: tokens are drawn without the kernel",
                    file=sys.stderr,
                )
        records = compile and self.kernels is not None and self.kernels.graphs
        self.model = decoding_copy(
            model, compile, many_sizes=records and not c.is_encoder
        )
        self.cache = self.tables = None
        if not c.is_encoder:
            self.cache = KVCache(c, batch_size, length, device, weight.dtype)
            # What adaLN gives all positions, unless that is larger than the cache.
            table = (
                c.block_size * (6 * c.n_layer + 2) * c.n_embd * weight.dtype.itemsize
            )
            if table <= sum(t.nbytes for t in self.cache.keys + self.cache.values):
                self.tables = caching.modulation_tables(self.model)
        self.head_rows = head_chunk(c.vocab_size, device.type)  # logits alive at once
        # Their addresses stay, as CUDA graphs need.
        self.order = torch.zeros(
            batch_size,
            length + 1,
            dtype=torch.long,
            device=device,
        )
        self.tokens, self.log_probs = torch.zeros_like(self.order), self.order.float()
        self.uniforms = self.order.to(self.draw_device).double()  # by position
        self.length = torch.zeros(
            batch_size,
            dtype=torch.long,
            device=device,
        )
        self.forced: Tensor | None = None  # by position: tokens that are not drawn
        self.padded = False  # whether some rows are shorter than T
        self.graphs: GraphRunner | None = None
        if records:
            self.graphs = self.make_graphs()

    def make_graphs(self) -> GraphRunner:
        """A runner of the stages of a step: `predict`, `prefer` and `unmask`."""
        width = self.model.config.n_embd
        dtype = self.model.wte.weight.dtype
        longest = ladder(self.B * (self.T + 1))[-1]
        hidden = torch.zeros(
            longest,
            width,
            dtype=dtype,
            device=self.device,
        )
        index = torch.zeros_like(self.order)
        rows = torch.zeros(
            5,
            self.B,
            dtype=torch.long,
            device=self.device,
        )
        return GraphRunner(rows, {"prefer": (hidden, index), "unmask": (hidden, index)})

    @torch.no_grad()
    def generate(
        self,
        plan: Plan,
        tokens=None,
        *,
        generator=None,
        uniforms=None,
        progress=None,
    ) -> Generation:
        """As the function of that name, with the same checks."""
        if plan.order.shape[1] != self.T:
            wrong = f"a plan for {plan.order.shape[1]} positions"
            raise UserError(f"{wrong} does not fit this engine, which is for {self.T}")
        inputs = check_inputs(
            self.model, plan, self.choice, tokens, uniforms, generator, None
        )
        return self.run(plan, *inputs, progress)

    @torch.no_grad()
    def run(
        self,
        plan: Plan,
        tokens,
        uniforms,
        forced,
        progress,
    ) -> Generation:
        """`generate` of what `check_inputs` has checked, B samples at a time."""
        compiled = many_shapes() if self.compiled else contextlib.nullcontext()
        with devices.current(self.device), devices.attention_of_many_shapes(), compiled:
            parts = []
            for start in range(0, len(plan), self.B):
                rows = slice(start, start + self.B)
                inputs = (
                    v if v is None else v[rows] for v in (tokens, uniforms, forced)
                )
                parts.append(self._batch(plan[rows], *inputs, progress))
        return Generation.joined(parts)

    def _batch(
        self,
        plan: Plan,
        tokens,
        uniforms,
        forced,
        progress,
    ) -> Generation:
        """Generate up to B samples."""
        # 1. Fill the batch up with samples of length 0, and the buffers with it.
        rows = len(plan)
        missing = self.B - len(plan)
        T = self.T
        if missing:
            plan = stack_plans([plan, l2r_plan(missing, length=0)], T)
            tokens, uniforms = (
                F.pad(v, (0, 0, 0, missing)) for v in (tokens, uniforms)
            )
        self.order[:, :T].copy_(plan.order)
        self.tokens[:, :T].copy_(tokens.gather(1, plan.order))
        self.uniforms[:, :T].copy_(uniforms)
        self.forced = forced
        if forced is not None:
            self.forced = F.pad(forced, (0, 1, 0, missing)).to(self.device)
        self.length.copy_(plan.length)
        self.padded = bool((plan.length < T).any())
        self.log_probs.zero_()
        if self.graphs is not None:
            self.record_graphs(plan)
        # 2. Generate.
        tally = Tally(plan, progress)
        drive = speculate if plan.draft else adapt if plan.pace else follow
        drive(self, plan, tally)
        # 3. Wait for the device, and put the results in sequence order.
        if not self.log_probs[:, :T].isfinite().all():
            raise UserError(
                "the model's output is not finite: its weights overflowed or hold NaN"
            )
        order = self.order[:, :T].cpu()
        by_slot = self.tokens[:, :T].cpu(), tally.step, self.log_probs[:, :T].cpu()
        made = [torch.empty_like(v).scatter_(1, order, v)[:rows] for v in by_slot]
        cost = tally.calls, tally.forwards, tally.nfe[:rows]
        order = order[:rows].clone()  # the buffer serves the next batch
        return Generation(*made, plan.length[:rows], *cost, order)

    # ---- passes: (B,) or (G, B) numbers of rows, on the host
    # -------------------------------------

    def count(
        self,
        cached: Tensor,
        known: Tensor,
        candidates: Tensor,
        length: Tensor,
    ) -> Tensor:
        """Inputs of a pass that predicts the candidates after `known` tokens."""
        return (candidates > 0) * (
            length if self.cache is None else known + candidates - cached
        )

    def cached_after(self, known: Tensor, chosen: bool) -> Tensor:
        """Inputs in the cache after a pass with `known` tokens. The key of the last
        known token depends on its target, so it stays only if that target was fixed in
        the pass: not where the model has yet to choose it. Inputs of two streams do not
        depend on targets. With mask_query, the contents of all known tokens stay."""
        target = self.model.config.target
        if self.cache is None:
            return torch.zeros_like(known)
        if target == "mask_query":
            return known
        return known + (not chosen or target == "two_stream")

    def steps(self, *rows: Tensor, **more) -> list[Step]:
        """As `make_steps`, of (G, B) numbers; compiled, of few shapes."""
        steps = caching.make_steps(*rows, self.device, **more)
        if self.compiled and self.graphs is None:
            slots = self.T if self.cache is None else self.cache.unused_slot
            return [few_shapes(step, slots) for step in steps]
        return steps

    def call(
        self,
        stage: Callable,
        step: Step,
        *tensors: Tensor,
    ):
        """stage(step, *tensors), by a CUDA graph where one is recorded. A graph could
        not read forced tokens, which each batch has at another address."""
        if self.graphs is None or self.forced is not None:
            return stage(step, *tensors)
        if step.first is not None:  # no graph has such places
            with torch.compiler.set_stance("force_eager"):
                return stage(step, *tensors)
        sizes = {
            "predict": 1 if self.cache is None else step.inputs,
            "prefer": step.all_candidates,
            "unmask": step.all_size,
        }
        size = sizes[stage.__name__]
        return self.graphs(
            stage, size, self.variant(stage, step.unmask_by), step, *tensors
        )

    def variant(self, stage: Callable, unmask_by: str):
        """What a stage depends on beside sizes and tensors."""
        if stage.__name__ == "prefer":
            return unmask_by
        if stage.__name__ == "predict" and self.cache is None:
            return self.padded
        return None

    def record_graphs(self, plan: Plan) -> None:
        """Record what the steps of a plan may need, so that none has to wait. Its first
        step, which also computes what is given, runs without a graph if it is larger
        than others."""
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
        stages = []
        if self.cache is None:
            stages.append((self.predict, 1, self.padded))
        elif self.kernels.attention is not None:
            stages.append((self.predict, inputs, None))
        if plan.pace is None and not plan.draft:
            stages.append((self.unmask, largest, None))
            if chosen:
                stages.append((self.prefer, left, plan.unmask_by))
        self.graphs.record_all(stages)

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        """Hidden states (N, D), and which of them predicts each slot, (B, T + 1); it
        means something for candidates alone."""
        if self.cache is None:
            return self._encode(step)
        hidden = caching.cached_hidden(
            self.model,
            self.tokens,
            self.order[:, :-1],
            step,
            self.cache,
            self.tables,
            self.kernels.attention if self.kernels else None,
        )
        slot = torch.arange(self.T + 1, device=self.device)
        start = step.count.cumsum(0) - step.count
        if step.first is None:
            index = start[:, None] + (slot - step.cached[:, None])
        else:  # queries come last
            queries = start + step.count - step.candidates
            index = queries[:, None] + (slot - step.first[:, None])
        return hidden, index.clamp(0, step.inputs - 1)

    def _encode(self, step: Step) -> tuple[Tensor, Tensor]:
        """`predict` of an encoder: the rows with candidates, [MASK] where a token is
        not known."""
        T = self.T
        c = self.model.config
        order = self.order[:, : self.T]
        known = torch.arange(T, device=self.device) < step.known[:, None]
        ordered = torch.where(known, self.tokens[:, :T], c.mask_token)
        sequence = torch.empty_like(ordered).scatter_(1, order, ordered)
        rows = (
            (step.candidates == 0).to(torch.uint8).argsort(stable=True)[: step.active]
        )
        lengths = self.length[rows] if self.padded else None
        sigma = None
        if (
            c.noise
        ):  # the level of the share of masked tokens; bfloat16 is too coarse for it
            total = (
                torch.full_like(rows, T) if lengths is None else lengths.clamp(min=1)
            )
            known = step.known[rows].to(self.draw_device)
            total = total.to(self.draw_device)
            sigma = log_linear_noise(1 - known.double() / total)
        hidden = self.model.hidden(sequence[rows], sigma, lengths)
        # Position p of the i-th of these rows is state i T + p.
        starts = torch.arange(len(rows), device=self.device) * T
        start = torch.zeros_like(step.known).scatter_(0, rows, starts)
        return hidden.flatten(0, 1), start[:, None] + self.order

    def ended(self, tally: Tally) -> Tensor:
        """BoolTensor (B,): the rows that have generated end-of-text and all before
        it."""
        if self.end_token is None:
            return torch.zeros_like(tally.known, dtype=torch.bool)
        unknown = tally.slots >= tally.known[:, None]  # (B, T), by slot
        is_end = (
            (self.tokens[:, :-1].cpu() == self.end_token) & (tally.step >= 0) & ~unknown
        )
        position = self.order[:, :-1].cpu()
        first_end = position.where(is_end, self.T).amin(dim=1)
        return first_end < position.where(unknown, self.T).amin(dim=1)

    def take_step(self, step: Step) -> None:
        """Predict and unmask. Each stage is tensor code whose shapes follow from the
        numbers of the step."""
        hidden, index = self.call(self.predict, step)
        if step.unmask_by != "order":
            index = self.call(self.prefer, step, hidden, index)
        self.call(self.unmask, step, hidden, index)

    def prefer(
        self,
        step: Step,
        hidden: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Put the candidates in the order in which the model prefers them; `index`
        so."""
        index, _ = reorder(self, hidden, index, step, [step.unmask_by])
        return index

    def unmask(
        self,
        step: Step,
        hidden: Tensor,
        index: Tensor,
    ) -> None:
        """Draw the tokens that the step unmasks."""
        row, slot = self.slots(step.known, step.size, step.all_size)
        self.draw(hidden, index, step.known, row, slot)

    def slots(
        self,
        first: Tensor,
        count: Tensor,
        total: int,
    ) -> tuple[Tensor, Tensor]:
        """Row and slot, (total,) each, of `count` slots of each row from `first` on;
        slot T in the entries beyond these."""
        row, column, valid = caching.ragged(count, total)
        return row, torch.where(valid, first[row] + column, self.T)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V), those of ids that may not be drawn minus infinity."""
        logits = caching.float32_logits(self.model, hidden).to(self.draw_device)
        if self.vocab_size is not None:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def uniforms_at(self, row: Tensor, slot: Tensor) -> Tensor:
        """The uniform number of the position in each slot, (N,)."""
        position = self.order[row.to(self.device), slot.to(self.device)].to(
            self.draw_device
        )
        return self.uniforms[row.to(self.draw_device), position]

    def forced_at(self, row: Tensor, slot: Tensor) -> Tensor:
        """The forced tokens of the positions in slots, (N,)."""
        return self.forced[row, self.order[row, slot]]

    def draw(
        self,
        hidden: Tensor,
        index: Tensor,
        known: Tensor,
        row: Tensor,
        slot: Tensor,
    ) -> None:
        """Draw the tokens of the slots, given `known` (B,) of each row, or store forced
        ones."""
        text = None
        if self.choice.avoids_repeats and self.forced is None:
            text = known_text(self.tokens, self.order, known)
        for rows, slots in zip(
            row.split(self.head_rows), slot.split(self.head_rows), strict=True
        ):
            logits = self.logits(hidden[index[rows, slots]])
            if self.forced is not None:
                self.store(rows, slots, self.forced_at(rows, slots), logits)
                continue
            size = len(logits)
            if logits.device.type == "cpu":
                size = max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
            for r, s, chunk in zip(
                *(v.split(size) for v in (rows, slots, logits)), strict=True
            ):
                self.draw_from(chunk, r, s, text)

    def draw_from(
        self,
        logits: Tensor,
        row: Tensor,
        slot: Tensor,
        text: Tensor | None,
    ) -> None:
        """Draw tokens (N,) from logits (N, V) and store them. text: by position, (B,
        T), where repeats are avoided."""
        allowed = logits
        if text is not None:
            allowed = without_repeats(
                logits, text[row], self.order[row, slot], self.choice
            )
        uniforms = self.uniforms_at(row, slot)
        kernel = None if self.kernels is None else self.kernels.choice
        if kernel is None or not kernel.can_choose(allowed, self.choice):
            tokens = choose_tokens(allowed, uniforms, self.choice)
            self.store(row, slot, tokens, logits)
            return
        tokens, log_probs = kernel.choose(allowed, uniforms, self.choice)
        if text is not None:  # log-probabilities are those of the model
            self.store(row, slot, tokens, logits)
            return
        self.tokens[row, slot] = tokens
        self.log_probs[row, slot] = log_probs

    def store(
        self,
        row: Tensor,
        slot: Tensor,
        tokens: Tensor,
        logits: Tensor,
    ) -> None:
        """Store tokens (N,) and their log-probabilities."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.log_softmax(dim=-1).gather(
            1, tokens[:, None].to(logits.device)
        )
        at = row.to(self.device), slot.to(self.device)
        self.tokens[at] = tokens.to(self.device)
        self.log_probs[at] = log_probs.squeeze(1).float().to(self.device)


def follow(
    engine: Engine,
    plan: Plan,
    tally: Tally,
) -> None:
    """Take the steps of a plan that is known, apart from which positions the model
    prefers."""
    # (G, B)
    sizes = group_sizes(plan).T
    chosen = plan.unmask_by != "order"
    at_once = len(sizes) if engine.end_token is None else STEPS_TO_END
    cached = torch.zeros_like(tally.known)
    tally.step = plan.step.where(plan.generated(), -1)
    for size in sizes.split(at_once) if len(sizes) else ():
        size = size * ~engine.ended(tally)
        known = tally.known + size.cumsum(dim=0) - size
        after = engine.cached_after(known, chosen)
        before = torch.cat([cached[None], after[:-1]])
        cached = after[-1]
        # Where the model chooses, every position left is a candidate.
        candidates = (size > 0) * (plan.length - known) if chosen else size
        count = engine.count(before, known, candidates, plan.length)
        steps = engine.steps(
            before, known, count, candidates, size, unmask_by=plan.unmask_by
        )
        for step, unmasked in zip(steps, size.sum(dim=1).tolist(), strict=True):
            if unmasked:
                engine.take_step(step)
                tally.calls += 1
                tally.progress(unmasked)
        tally.known = tally.known + size.sum(dim=0)
        tally.forwards += int(count.sum())
        tally.nfe += (size > 0).sum(dim=0)
