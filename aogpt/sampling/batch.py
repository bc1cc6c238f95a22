"""The types that the three ways to follow a plan share: the tally of a batch, and the
part of the engine that they call.

Shapes: B samples in flight, T positions, N inputs of a pass, V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..model import AOGPT
from .cached import KVCache, Step
from .compiled import Stage
from .token_choice import TokenChoice

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


class EngineParts(Protocol):
    """The part of an `Engine` that `adapt` and `speculate` use; its methods say there
    what they do."""

    model: AOGPT
    choice: TokenChoice
    device: torch.device
    B: int
    T: int
    cache: KVCache | None
    tokens: Tensor
    predicting: Stage

    def count(
        self, cached: Tensor, known: Tensor, candidates: Tensor, length: Tensor
    ) -> Tensor: ...

    def call(self, stage: Stage, step: Step, *tensors: Tensor) -> Any: ...

    def prefer(
        self, step: Step, hidden: Tensor, index: Tensor, by: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def unmask(self, step: Step, hidden: Tensor, index: Tensor) -> None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def uniforms_at(self, row: Tensor, place: Tensor) -> Tensor: ...

    def store(
        self, row: Tensor, place: Tensor, tokens: Tensor, logits: Tensor
    ) -> None: ...
