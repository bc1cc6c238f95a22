"""The encoder: full attention over a partly masked sequence, which predicts the masked
tokens; the masked diffusion models that the paper compares with (RADD, SEDD), on
AO-GPT's own blocks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import (
    Block,
    HeadLoss,
    Layer,
    ModelConfig,
    Pass,
    PositionTable,
    Transformer,
    attention,
)
from ..scoring import at_least_float32, check_boolean

NOISE_EPS = 1e-3  # the share of tokens that are never masked, so that noise is finite


class FullPass(Pass):
    """A pass in which every position sees all others, or those for which a mask
    (B, 1, 1, T) is True."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of attention, (B, T, D), for q, k and v (B, T, H, D/H)."""
        return attention(q, k, v, mask=self.allowed, dropout=self.dropout)

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """Return adaLN's shifts, scales and gates: `parts` tensors (B, 1, D)."""
        table = linear(self.adaln_input)  # (B, 1, parts D): one for all positions
        return table.chunk(parts, dim=-1)


class ScoreOutputs(HeadLoss):
    """The two numbers that score entropy needs of the head's outputs o, log-scores:
    log sum_y exp(o_y), and o_x of the true token x."""

    def forward(self, head: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """Return both numbers, (2, B, T), for x (B, T, D) and targets (B, T)."""
        pairs = super().forward(head, x, targets)  # (B, T, 2)
        return pairs.movedim(-1, 0)

    def losses(self, head: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """Return both numbers, (n, 2), for x (n, D) and targets (n,)."""
        logits = at_least_float32(head(x))
        normaliser = logits.logsumexp(dim=-1)
        output = logits.gather(1, targets[:, None]).squeeze(1)
        return torch.stack([normaliser, output], dim=1)


class Encoder(Transformer):
    """A model of the masked tokens of a sequence. `hidden` and `logits` take tokens
    (B, T), with [MASK] where one is masked; a model with noise also takes noise levels
    sigma (B,). lengths (B,): of rows that are shorter than T."""

    has_start = False

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        c = config
        assert c.mask_token is not None
        self.mask_token = c.mask_token
        if c.position != "rotary":
            self.wpe = PositionTable(c, c.block_size, c.n_embd)
        self.noise: NoiseEmbedding | None = None
        if c.noise:
            self.noise = NoiseEmbedding(c.cond_dim)
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
        """Return -log p(true token | unmasked tokens) at masked positions, (B, T),
        nats, in sequence order; 0 elsewhere. With noise, whose outputs are scores,
        (2, B, T): see `ScoreOutputs`.

        tokens LongTensor (B, T), all of them; masked BoolTensor (B, T)."""
        inputs = self.with_masks(tokens, masked)
        x = self.hidden(inputs, sigma, lengths)
        nll = self.loss(self.head_logits, x, tokens)
        return nll if self.config.noise else nll * masked

    def log_probs(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """Return log p(true token | unmasked tokens) at masked positions, 0 elsewhere,
        (B, T)."""
        if not self.config.noise:
            return -self(tokens, masked, lengths=lengths)
        sigma = self.noise_of(masked, lengths)
        normaliser, output = self(tokens, masked, sigma, lengths)
        return (output - normaliser) * masked

    def masked_hidden(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states (B, T, D), by position, with the masked tokens
        unknown."""
        sigma = None
        if self.config.noise:
            sigma = self.noise_of(masked, lengths)
        inputs = self.with_masks(tokens, masked)
        return self.hidden(inputs, sigma, lengths)

    def hidden(
        self, tokens: Tensor, sigma: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states (B, T, D)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        allowed = None
        if lengths is not None:  # no position sees padding
            exists = positions < lengths[:, None]  # (B, T)
            allowed = exists[:, None, None]
        adaln_input = None
        if self.noise is not None:
            level = self.noise(sigma)  # (B, cond_dim)
            adaln_input = F.silu(level).unsqueeze(1)
        p = FullPass(self, positions, adaln_input=adaln_input, allowed=allowed)
        x = self.embed(tokens, positions)
        return self.run_blocks(x, p)

    def with_masks(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Return the tokens, with [MASK] at masked positions."""
        check_boolean(masked, "masked")
        return torch.where(masked, self.mask_token, tokens)

    def noise_of(self, masked: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the noise level at which the share of masked tokens is expected,
        (B,)."""
        total = masked.shape[1] if lengths is None else lengths
        share = masked.double().sum(1) / total
        return log_linear_noise(share)

    def head_logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., mask_token) of final hidden states (..., D): [MASK],
        the first id after the tokens, has none."""
        return super().head_logits(x)[..., : self.mask_token]


class NoiseEmbedding(Layer):
    """A layer that computes a vector (B, dim) from a noise level (B,): 256 cosines and
    sines, then an MLP (SEDD)."""

    conditions = ("fc.weight", "fc.bias", "proj.weight", "proj.bias")

    def __init__(self, dim: int):
        super().__init__()
        self.fc = nn.Linear(256, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, sigma: Tensor) -> Tensor:
        """Return the vectors (B, dim) of noise levels sigma (B,)."""
        numbers = torch.arange(128, device=sigma.device, dtype=torch.float64)
        frequency = 10000.0 ** (-numbers / 128)
        angle = sigma.double()[:, None] * frequency  # (B, 128)
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        hidden = F.silu(self.fc(waves.to(self.fc.weight)))
        return self.proj(hidden)


def log_linear_noise(t: Tensor) -> Tensor:
    """Return the noise level sigma(t) = -log(1 - (1 - NOISE_EPS) t): tokens are masked
    at rate (1 - NOISE_EPS) t."""
    return -torch.log1p(-(1 - NOISE_EPS) * t)
