"""The encoder: full attention over a partly masked sequence, which predicts the masked tokens; the
masked diffusion models that the paper compares with (RADD, SEDD), on AO-GPT's own blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import AOGPT, ModelConfig, Pass, attention, inverse_permutation
from .chunked_head import ChunkedHead
from .scoring import Scoring, check_boolean, check_mask, group_log_probs


class FullPass(Pass):
    """Every position sees all, or those that a mask (B, 1, 1, T) allows."""

    def __init__(self, config: ModelConfig, condition, allowed: Tensor | None):
        super().__init__(config, None, condition)
        self.allowed = allowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=self.allowed, dropout=self.dropout)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        return linear(self.condition).chunk(
            parts, dim=-1
        )  # (B, 1, D): one for all positions


class Encoder(ChunkedHead, Scoring, AOGPT):
    def make_inputs(self) -> None:
        c = self.config
        self.wpe = (
            nn.Embedding(c.block_size, c.n_embd) if c.position != "rotary" else None
        )
        self.noise = NoiseEmbedding(c.cond_dim) if c.noise else None

    def forward(
        self, tokens: Tensor, masked: Tensor, sigma: Tensor | None = None, lengths=None
    ) -> Tensor:
        """-log p(true token | unmasked tokens) at masked positions, (B, T), nats, in sequence
        order; 0 elsewhere. With noise, whose outputs are scores, (2, B, T): see `head_loss`.

        tokens (B, T); masked BoolTensor (B, T); sigma (B,) noise levels, for a model with noise;
        lengths (B,) of rows that are shorter than T."""
        x = self.hidden(self.with_masks(tokens, masked), sigma, lengths)
        nll = self.head_loss(x, tokens)
        return nll if self.config.noise else nll * masked

    def logits(
        self, tokens: Tensor, masked: Tensor, sigma=None, lengths=None
    ) -> Tensor:
        """(B, T, mask_token), in sequence order. Arguments as for `forward`."""
        return self.head_logits(
            self.hidden(self.with_masks(tokens, masked), sigma, lengths)
        )

    def with_masks(self, tokens: Tensor, masked: Tensor) -> Tensor:
        check_boolean(masked, "masked")
        return torch.where(masked, self.config.mask_token, tokens)

    def hidden(
        self, tokens: Tensor, sigma: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (B, T, D); tokens (B, T) with [MASK] in place."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        allowed = condition = None
        if lengths is not None:  # no position sees padding
            allowed = (positions < lengths[:, None])[:, None, None]
        if self.config.noise:
            condition = F.silu(self.noise(sigma)).unsqueeze(1)  # (B, 1, cond_dim)
        p = FullPass(self.config, condition, allowed)
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight[: len(positions)]
        return self.trunk(x, positions, p)

    def head_logits(self, x: Tensor) -> Tensor:
        return super().head_logits(x)[
            ..., : self.config.mask_token
        ]  # the tokens end at [MASK]

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Without noise as in `AOGPT`, (B, T). With noise, (2, B, T): the log of the summed
        exponentials of the output, and the output of the true token; score entropy needs both."""
        if not self.config.noise:
            return super().head_loss(x, targets)
        pairs = self.in_chunks(self._normaliser_and_output, x, targets)  # (B T, 2)
        return pairs.T.reshape(2, *targets.shape)

    def _normaliser_and_output(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = at_least_float32(self.head_logits(x))
        output = logits.gather(1, targets[:, None]).squeeze(1)
        return torch.stack([logits.logsumexp(dim=-1), output], dim=1)

    @torch.no_grad()
    def masked_log_probs(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """As `Scoring.masked_log_probs`. The time of noise is the share of masked tokens."""
        check_mask(self, tokens, masked)
        if lengths is not None:  # padding is not predicted
            positions = torch.arange(masked.shape[1], device=masked.device)
            masked = masked & (positions < lengths[:, None])
        if not self.config.noise:
            return -self(tokens, masked, lengths=lengths)
        normaliser, output = self(
            tokens, masked, self._noise_of(masked, lengths), lengths
        )
        return (output - normaliser) * masked

    @torch.no_grad()
    def masked_logits(
        self, tokens: Tensor, masked: Tensor, order: Tensor | None = None
    ) -> Tensor:
        """As `Scoring.masked_logits`; no order matters."""
        check_mask(self, tokens, masked)
        sigma = self._noise_of(masked, None) if self.config.noise else None
        return self.head_logits(
            self.hidden(self.with_masks(tokens, masked), sigma)[masked]
        )

    @torch.no_grad()
    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """As `Scoring.token_log_probs`, in T passes: every step masks what is left."""
        return group_log_probs(self, tokens, order, group=1)

    @torch.no_grad()
    def parallel_log_probs(
        self,
        tokens: Tensor,
        order: Tensor,
        known: Tensor,
        steps: Tensor | None = None,
        lengths=None,
    ) -> Tensor:
        """As `Scoring.parallel_log_probs`; steps BoolTensor (B, T): 0 at all others."""
        step_of = inverse_permutation(order)
        masked = step_of >= known[:, None]
        if lengths is not None:
            masked &= step_of < lengths[:, None]
        if steps is not None:
            check_boolean(steps, "steps")
        else:
            steps = torch.arange(order.shape[1], device=order.device) >= known[:, None]
        inputs = self.with_masks(tokens, masked)
        sigma = self._noise_of(masked, lengths) if self.config.noise else None
        row, step = steps.nonzero(as_tuple=True)
        targets = order[row, step]
        logits = self.head_logits(self.hidden(inputs, sigma, lengths)[row, targets])
        found = (
            at_least_float32(logits)
            .log_softmax(-1)
            .gather(1, tokens[row, targets, None])
        )
        log_probs = torch.zeros(order.shape, device=order.device, dtype=found.dtype)
        log_probs[row, step] = found.squeeze(1)
        return log_probs

    def _noise_of(self, masked: Tensor, lengths: Tensor | None) -> Tensor:
        total = masked.shape[1] if lengths is None else lengths
        return log_linear_noise(masked.double().sum(1) / total)


class NoiseEmbedding(nn.Module):
    """Vector (B, dim) of a noise level (B,): 256 cosines and sines, then an MLP (SEDD)."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc = nn.Linear(256, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, sigma: Tensor) -> Tensor:
        frequency = 10000.0 ** (
            -torch.arange(128, device=sigma.device, dtype=torch.float64) / 128
        )
        angle = sigma.double()[:, None] * frequency
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.fc.weight)
        return self.proj(F.silu(self.fc(waves)))


def log_linear_noise(t: Tensor, eps: float = 1e-3) -> Tensor:
    """Noise level sigma(t) = -log(1 - (1 - eps) t): tokens are masked at rate (1 - eps) t."""
    return -torch.log1p(-(1 - eps) * t)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
