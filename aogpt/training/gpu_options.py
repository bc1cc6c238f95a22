"""Options of training on a GPU that are off by default: kernels."""

from typing import cast

import torch
from torch import Tensor, nn

from ..model import AOGPT, Pass, RMSNorm, Transformer
from ..runtime.devices import can_run_triton
from ..runtime.errors import UserError
from .config import TrainConfig


def use_gpu_options(
    model: Transformer, train: TrainConfig, device: torch.device
) -> None:
    """Let a model use the kernels that a config asks for. Raises UserError where they
    cannot run, or not with this model."""
    if train.fused_norm:
        check_fused_norm(model, device)
        model.pass_type = FusedPass
    if train.flash3:
        activate_flash3(device)


class FusedPass(Pass):
    """A training pass in which one kernel gathers, shifts and scales for adaLN."""

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """Return shifts and scales by position, (block_size, D), and gates for each
        step, (B, T, D)."""
        outputs = []
        for number, part in enumerate(linear(self.adaln_input).chunk(parts, dim=-1)):
            is_gate = number % 3 == 2
            outputs.append(self.lookup(part) if is_gate else part)
        return tuple(outputs)

    def modulated_norm(
        self, norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor
    ) -> Tensor:
        """Return the norm of x (B, T, D) with the shift and scale, tables
        (block_size, D), of each step's target."""
        from .norm_kernel import modulated_norm  # which imports Triton

        rms_norm = cast(RMSNorm, norm)
        y, _ = modulated_norm(
            x, rms_norm.weight, shift, scale, self.targets, self.inverse, rms_norm.eps
        )
        return y


def check_fused_norm(model: Transformer, device: torch.device) -> None:
    """Raise UserError where the fused norm cannot run, or not for this model."""
    if not can_run_triton(device):
        raise UserError(
            "train.fused_norm needs an NVIDIA GPU and Triton: pass "
            "--train.no-fused-norm"
        )
    has_adaln = isinstance(model, AOGPT) and model.adaln_f is not None
    if not has_adaln or not isinstance(model.norm_f, RMSNorm):
        raise UserError(
            "train.fused_norm is for decoders with model.target = 'adaln' and "
            "model.norm = 'rmsnorm': pass --train.no-fused-norm"
        )


def activate_flash3(device: torch.device) -> None:
    """Let PyTorch take FlashAttention 3 in place of its own."""
    attention = torch.nn.attention
    # Older versions of PyTorch do not have this function.
    implementations: list[str] = getattr(
        attention, "list_flash_attention_impls", list
    )()
    if device.type != "cuda" or "FA3" not in implementations:
        raise UserError(
            "train.flash3 needs an NVIDIA GPU and a PyTorch that knows FlashAttention "
            "3: pass --train.no-flash3"
        )
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"train.flash3: FlashAttention 3 cannot be loaded ({error}); install its "
            "wheel or pass --train.no-flash3"
        ) from None
