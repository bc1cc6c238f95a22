"""The encoder: full attention over a partly masked sequence, which predicts the masked
tokens; the masked diffusion models that the paper compares with (RADD, SEDD), on AO-GPT's
own blocks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import (
    Block,
    HeadLoss,
    ModelConfig,
    Pass,
    PositionTable,
    Transformer,
    attention,
    in_chunks,
)
from ..scoring import at_least_float32, check_boolean


class FullPass(Pass):
    """Every position sees all, or those that a mask (B, 1, 1, T) allows."""

    def __init__(
        self, config: ModelConfig, condition: Tensor | None, allowed: Tensor | None
    ):
        super().__init__(config, targets=None, condition=condition)
        self.allowed = allowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=self.allowed, dropout=self.dropout)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        # (B, 1, D): one for all positions
        return linear(self.condition).chunk(parts, dim=-1)


class ScoreOutputs(HeadLoss):
    """What score entropy needs of the head's outputs o, log-scores: log sum_y exp(o_y) and
    o_x of the true token x."""

    def forward(self, head: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (2, B, T)."""

        def normaliser_and_output(x: Tensor, targets: Tensor) -> Tensor:
            logits = at_least_float32(head(x))
            output = logits.gather(1, targets[:, None]).squeeze(1)
            return torch.stack([logits.logsumexp(dim=-1), output], dim=1)

        x = x.flatten(0, 1)
        pairs = in_chunks(normaliser_and_output, x, targets.flatten(), self.vocab_size)
        return pairs.T.reshape(2, *targets.shape)


class Encoder(Transformer):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        c = config
        if c.position != "rotary":
            self.wpe = PositionTable(c, c.block_size, c.n_embd)
        self.noise = NoiseEmbedding(c.cond_dim) if c.noise else None
        self.add_blocks(Block)
        if c.noise:
            self.loss = ScoreOutputs(c)

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor,
        sigma: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """-log p(true token | unmasked tokens) at masked positions, (B, T), nats, in
        sequence order; 0 elsewhere. With noise, whose outputs are scores, (2, B, T): see
        `ScoreOutputs`.

        tokens LongTensor (B, T); masked BoolTensor (B, T); sigma (B,) noise levels, for a
        model with noise; lengths (B,) of rows that are shorter than T."""
        x = self.hidden(self.with_masks(tokens, masked), sigma, lengths)
        nll = self.loss(self.head_logits, x, tokens)
        return nll if self.config.noise else nll * masked

    def log_probs(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """log p(true token | unmasked tokens) at masked positions, 0 elsewhere, (B, T)."""
        if not self.config.noise:
            return -self(tokens, masked, lengths=lengths)
        sigma = self.noise_of(masked, lengths)
        normaliser, output = self(tokens, masked, sigma, lengths)
        return (output - normaliser) * masked

    def masked_hidden(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (B, T, D), by position, with the masked tokens unknown."""
        sigma = self.noise_of(masked, lengths) if self.config.noise else None
        return self.hidden(self.with_masks(tokens, masked), sigma, lengths)

    def hidden(
        self,
        tokens: Tensor,
        sigma: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, D); tokens (B, T) with [MASK] in place."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        allowed = None
        if lengths is not None:  # no position sees padding
            allowed = (positions < lengths[:, None])[:, None, None]
        condition = None
        if self.noise is not None:
            condition = F.silu(self.noise(sigma)).unsqueeze(1)  # (B, 1, cond_dim)
        p = FullPass(self.config, condition, allowed)
        x = self.embed(tokens, positions)
        if self.config.rotates:
            p.key_angles = p.query_angles = self.angles_at(positions, x.dtype)
        return self.run_blocks(x, p)

    def logits(
        self,
        tokens: Tensor,
        masked: Tensor,
        sigma: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """(B, T, mask_token), in sequence order. Arguments as for `forward`."""
        inputs = self.with_masks(tokens, masked)
        return self.head_logits(self.hidden(inputs, sigma, lengths))

    def with_masks(self, tokens: Tensor, masked: Tensor) -> Tensor:
        check_boolean(masked, "masked")
        return torch.where(masked, self.config.mask_token, tokens)

    def noise_of(self, masked: Tensor, lengths: Tensor | None) -> Tensor:
        """The noise level at which the share of masked tokens is expected, (B,)."""
        total = masked.shape[1] if lengths is None else lengths
        return log_linear_noise(masked.double().sum(1) / total)

    def head_logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., mask_token): the tokens end at [MASK]."""
        return self.head(x)[..., : self.config.mask_token]


class NoiseEmbedding(nn.Module):
    """Vector (B, dim) of a noise level (B,): 256 cosines and sines, then an MLP (SEDD)."""

    conditions = ("fc.weight", "fc.bias", "proj.weight", "proj.bias")

    def __init__(self, dim: int):
        super().__init__()
        self.fc = nn.Linear(256, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, sigma: Tensor) -> Tensor:
        numbers = torch.arange(128, device=sigma.device, dtype=torch.float64)
        angle = sigma.double()[:, None] * 10000.0 ** (-numbers / 128)
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.fc.weight)
        return self.proj(F.silu(self.fc(waves)))


def log_linear_noise(t: Tensor, eps: float = 1e-3) -> Tensor:
    """Noise level sigma(t) = -log(1 - (1 - eps) t): tokens are masked at rate
    (1 - eps) t."""
    return -torch.log1p(-(1 - eps) * t)
