"""Samples in flight: what is known of them, and the three parts of a step, `predict`,
`prefer` and `unmask`. They are tensor code: shapes follow from the numbers of a `Step`,
and nothing waits for the device.

Shapes: B samples, T positions, N inputs of a pass, D width, V vocabulary. A place is an
index in the prediction order: place i of the buffers (B, T + 1) has the token of
position `order[b, i]`. Place T is written to where a row has nothing to write, and
never read."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..model import AOGPT, head_chunk
from ..systems import log_linear_noise
from .cached import (
    KVCache,
    Step,
    cached_hidden,
    float32_logits,
    inputs_kept,
    modulation_tables,
    ragged,
)
from .plans import Plan
from .scores import best_first, rounding_of, scores_of
from .token_choice import TokenChoice, choose_tokens

# Logits whose tokens are drawn at once on a CPU: they and their copies stay in its
# cache.
CPU_CHUNK_ELEMENTS = 2**19
WITHOUT_FLOAT64 = ("mps",)  # kinds of devices

OnUnmasked = Callable[[int], Any] | None  # called with the number of positions unmasked


@dataclass
class Tally:
    """The progress and the cost of the samples of a batch."""

    known: Tensor  # (B,) tokens
    step: Tensor  # (B, T) the round of each place, -1: none
    nfe: Tensor  # (B,) passes that each sample took part in
    places: Tensor  # (T,) 0 to T - 1
    progress: OnUnmasked
    rounds: int = 0
    calls: int = 0
    forwards: int = 0

    def called(self, count: Tensor) -> None:
        """Count a pass of `count` (B,) inputs."""
        self.calls = self.calls + 1
        self.forwards = self.forwards + int(count.sum())
        self.nfe += count > 0

    def unmask(self, size: Tensor) -> None:
        """Count the next `size` (B,) places of each row as known."""
        after = self.known + size
        newly = (self.places >= self.known[:, None]) & (self.places < after[:, None])
        self.step = self.step.where(~newly, self.rounds)
        self.known = after
        self.rounds = self.rounds + 1
        if self.progress is not None:
            self.progress(int(size.sum()))


class Batch(abc.ABC):
    """The state of B samples, and what advances it. How a model predicts is in
    subclasses: `predict`, `count` and `inputs_kept` of a `CachedBatch` or an
    `EncoderBatch`."""

    def __init__(
        self,
        model: AOGPT,
        size: int,
        length: int,
        choice: TokenChoice,
        vocab_size: int | None,
    ):
        """size: B; length: T."""
        self.model = model
        self.B = size
        self.T = length
        self.choice = choice
        self.vocab_size = vocab_size
        self.device = model.wte.weight.device
        # Draws take float64; where the device has none, they are made on the CPU.
        self.draw_device = self.device
        if self.device.type in WITHOUT_FLOAT64:
            self.draw_device = torch.device("cpu")
        # logits alive at once
        self.head_rows = head_chunk(model.config.vocab_size, self.device.type)
        # By place. The addresses stay, as CUDA graphs need.
        shape = (size, length + 1)
        self.places = torch.arange(length + 1, device=self.device)
        self.order = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros_like(self.order)
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        # whether any prediction was NaN, also one that a later one replaces
        self.has_nan = torch.zeros((), dtype=torch.bool, device=self.device)
        # By position.
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=self.draw_device)
        self.forced: Tensor | None = None  # tokens that are not drawn
        self.length = torch.zeros(size, dtype=torch.long, device=self.device)
        self.padded = False  # whether some rows are shorter than T

    def begin(
        self, plan: Plan, tokens: Tensor, uniforms: Tensor, forced: Tensor | None
    ) -> None:
        """Take samples (B, T) in flight: tokens, uniforms and forced by position."""
        T = self.T
        self.order[:, :T].copy_(plan.order)
        self.tokens[:, :T].copy_(tokens.gather(1, plan.order))
        self.uniforms[:, :T].copy_(uniforms)
        self.forced = None if forced is None else forced.to(self.device)
        self.length.copy_(plan.length)
        self.padded = bool((plan.length < T).any())
        self.log_probs.zero_()
        self.has_nan.zero_()

    # ---- a step ----------------------------------------------------------------------

    def take_step(self, step: Step) -> None:
        """Predict some places, and unmask some of them."""
        hidden, index = self.predict(step)
        if step.unmask_by != "order":
            index, _ = self.prefer(step, hidden, index)
        self.unmask(step, hidden, index)

    @abc.abstractmethod
    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return hidden states (N, D), and which of them predicts each place,
        (B, T + 1); it means something for candidates alone. With two rows of 5 and 2
        inputs, of which the last 2 and 1 predict places 3, 4 and 1: index[0, 3:5] is
        3 4, and index[1, 1] is 6."""

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
        targets = torch.zeros_like(place)
        if self.forced is not None:
            targets = self.forced[row, self.order[row, place]]
        states = hidden[index[row, place]]
        names = by or [step.unmask_by]
        parts = []
        for chunk, chunk_targets in zip(
            states.split(self.head_rows), targets.split(self.head_rows), strict=True
        ):
            parts.append(scores_of(self.logits(chunk), names, chunk_targets))
        candidate_scores = torch.cat(parts).to(self.device)

        # 2. The scores by place. Known places stay in front (infinity; equals stay in
        #    order), places that come later or that a row does not have stay behind,
        #    and so does place T.
        is_unknown = self.places >= step.known[:, None]
        by_place = []
        for score in candidate_scores.unbind(dim=-1):
            scores = torch.full_like(self.log_probs, -torch.inf)
            scores[row, place] = score
            scores = scores.where(is_unknown, torch.inf)
            scores[:, self.T] = -torch.inf
            by_place.append(scores)
            self.has_nan.logical_or_(scores.isnan().any())

        # 3. Highest score first; equals in the order of the plan.
        tolerance = rounding_of(self.model.wte.weight.dtype)
        preferred = best_first(by_place[0], tolerance)
        self.order.copy_(self.order.gather(1, preferred))
        sorted_scores = [scores.gather(1, preferred) for scores in by_place]
        return index.gather(1, preferred), torch.stack(sorted_scores)

    def unmask(self, step: Step, hidden: Tensor, index: Tensor) -> None:
        """Draw the tokens of the next `step.size` places of each row, or store forced
        ones. hidden, index: as `predict` gives them."""
        row, _, place = ragged(
            step.known, step.size, total=step.all_size, unused=self.T
        )
        for rows, places in zip(
            row.split(self.head_rows), place.split(self.head_rows), strict=True
        ):
            logits = self.logits(hidden[index[rows, places]])
            size = max(1, len(logits))
            if logits.device.type == "cpu":
                size = max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
            for start in range(0, len(logits), size):
                chunk = slice(start, start + size)
                self.draw(logits[chunk], rows[chunk], places[chunk])

    def draw(self, logits: Tensor, row: Tensor, place: Tensor) -> None:
        """Draw tokens (N,) from logits (N, V), or take forced ones, and store them."""
        if self.forced is not None:
            tokens = self.forced[row, self.order[row, place]]
        else:
            uniforms = self.uniforms_at(row, place)
            tokens = choose_tokens(logits, uniforms, self.choice)
        self.store(row, place, tokens, logits)

    # ---- tokens ----------------------------------------------------------------------

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (N, V), those of ids that may not be drawn minus infinity."""
        logits = float32_logits(self.model, hidden).to(self.draw_device)
        if self.vocab_size is not None:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def uniforms_at(self, row: Tensor, place: Tensor) -> Tensor:
        """Return the uniform number of the position in each place, (N,)."""
        position = self.order[row.to(self.device), place.to(self.device)]
        return self.uniforms[row.to(self.draw_device), position.to(self.draw_device)]

    def store(self, row: Tensor, place: Tensor, tokens: Tensor, logits: Tensor) -> None:
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

    # ---- what a pass computes --------------------------------------------------------

    @abc.abstractmethod
    def count(
        self, cached: Tensor, known: Tensor, candidates: Tensor, length: Tensor
    ) -> Tensor:
        """Return the inputs of a pass that predicts the candidates after `known`
        tokens, of rows (B,) or of all steps (G, B), on the host."""

    @abc.abstractmethod
    def inputs_kept(self, known: Tensor, targets_fixed: bool = True) -> Tensor:
        """Return how many inputs are in the cache after a pass with `known` tokens; see
        `cached.inputs_kept`."""


class CachedBatch(Batch):
    """Samples of a decoder, with a KV cache."""

    kernel: ModuleType | None = None  # `attention_kernel`; None: attend under masks

    def __init__(self, model: AOGPT, size: int, length: int, *settings: Any):
        super().__init__(model, size, length, *settings)
        c = model.config
        dtype = model.wte.weight.dtype
        self.cache = KVCache(c, size, length, self.device, dtype)
        # What adaLN gives all positions, unless that is larger than the cache.
        self.tables: list[Tensor] | None = None
        table_bytes = c.block_size * (6 * c.n_layer + 2) * c.n_embd * dtype.itemsize
        cache_tensors = self.cache.keys + self.cache.values
        if table_bytes <= sum(tensor.nbytes for tensor in cache_tensors):
            self.tables = modulation_tables(model)

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        hidden = cached_hidden(
            self.model,
            self.tokens,
            self.order[:, :-1],
            step,
            cache=self.cache,
            tables=self.tables,
            kernel=self.kernel,
        )
        start = step.count.cumsum(0) - step.count
        if step.first is None:
            index = start[:, None] + (self.places - step.cached[:, None])
        else:  # queries come last
            queries = start + step.count - step.candidates
            index = queries[:, None] + (self.places - step.first[:, None])
        return hidden, index.clamp(0, step.inputs - 1)

    def count(
        self, cached: Tensor, known: Tensor, candidates: Tensor, length: Tensor
    ) -> Tensor:
        return (candidates > 0) * (known + candidates - cached)

    def inputs_kept(self, known: Tensor, targets_fixed: bool = True) -> Tensor:
        return inputs_kept(self.model, known, targets_fixed)


class EncoderBatch(Batch):
    """Samples of an encoder, which reads whole rows, with [MASK] where a token is not
    known."""

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return what `Batch.predict` does, for the rows with candidates."""
        T = self.T
        encoder: Any = self.model  # of systems/encoder.py
        c = encoder.config
        order = self.order[:, :T]
        is_known = self.places[:T] < step.known[:, None]
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

    def count(
        self, cached: Tensor, known: Tensor, candidates: Tensor, length: Tensor
    ) -> Tensor:
        return (candidates > 0) * length

    def inputs_kept(self, known: Tensor, targets_fixed: bool = True) -> Tensor:
        return torch.zeros_like(known)
