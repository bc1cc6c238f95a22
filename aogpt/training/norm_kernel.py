"""RMSNorm, shift and scale of adaLN as one Triton kernel, forward and backward.

y[b, i] = x[b, i] / rms(x[b, i]) * weight * (1 + scale[t]) + shift[t], where t =
targets[b, i], and rows of `targets` are permutations. Rows of the tables are read where
they are: the gathered shifts and scales (B, T, D) and their gradients, which would be
written and read again, never exist. The reference is `Pass.modulated_norm` of model.py.

The backward kernel has a program for each position t. It goes through the batch, to the
step inverse[b, t] that predicts t, so that sums over the batch need no atomics and have
a fixed order.

Shapes: B sequences, T steps, D width. Opt in: its speed on a GPU has not been
measured."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def fits(width: int, dtype: torch.dtype) -> bool:
    """Return whether a program can hold rows of this width."""
    return width <= 8192 and dtype in (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("aogpt::modulated_norm", mutates_args=())
def modulated_norm(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    targets: Tensor,
    inverse: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the modulated norm (B, T, D) in the type of the tables, which under
    autocast is that of the product that follows, and 1 / rms of each row, float32
    (B, T).

    x (B, T, D), weight (D,), shift and scale (at least T, D) by position, targets and
    inverse (B, T): the position of each step and the step of each position."""
    B, T, D = x.shape
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=shift.dtype, device=x.device)
    rrms = torch.empty(
        B,
        T,
        dtype=torch.float32,
        device=x.device,
    )
    _forward[(B * T,)](
        x,
        weight,
        shift,
        scale,
        targets,
        y,
        rrms,
        shift.stride(0),
        scale.stride(0),
        eps,
        D=D,
        WIDTH=triton.next_power_of_2(D),
        num_warps=warps_of(D),
    )
    return y, rrms


@modulated_norm.register_fake
def _(
    x,
    weight,
    shift,
    scale,
    targets,
    inverse,
    eps,
):
    rrms = x.new_empty(x.shape[:2], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=shift.dtype), rrms


@torch.library.custom_op("aogpt::modulated_norm_backward", mutates_args=())
def modulated_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    inverse: Tensor,
    rrms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x (B, T, D), and by position, float32 (T, D), the sums
    over the batch of the gradient of y and of its product with x / rms(x)."""
    B, T, D = x.shape
    x = x.contiguous()
    grad = grad.contiguous()
    grad_x = torch.empty_like(x)
    sums = torch.empty(
        T,
        D,
        dtype=torch.float32,
        device=x.device,
    )
    products = torch.empty_like(sums)
    _backward[(T,)](
        grad,
        x,
        weight,
        scale,
        inverse,
        rrms,
        grad_x,
        sums,
        products,
        scale.stride(0),
        B,
        T,
        D=D,
        WIDTH=triton.next_power_of_2(D),
        num_warps=warps_of(D),
    )
    return grad_x, sums, products


@modulated_norm_backward.register_fake
def _(
    grad,
    x,
    weight,
    scale,
    inverse,
    rrms,
):
    T, D = x.shape[1:]
    sums = x.new_empty((T, D), dtype=torch.float32)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, sums, torch.empty_like(sums)


def keep_for_backward(ctx, inputs, output) -> None:
    """Save the tensors that the backward pass reads."""
    x, weight, shift, scale, targets, inverse, eps = inputs
    ctx.save_for_backward(
        x,
        weight,
        scale,
        inverse,
        output[1],
    )
    ctx.rows = shift.shape[0]
    ctx.shift_dtype = shift.dtype
    ctx.set_materialize_grads(False)


def backward(ctx, grad: Tensor, _):
    """Return the gradients of the inputs of `modulated_norm` for that of y, (B, T, D);
    None for those that have none."""
    x, weight, scale, inverse, rrms = ctx.saved_tensors
    grad_x, sums, products = modulated_norm_backward(
        grad, x, weight, scale, inverse, rrms
    )
    T = x.shape[1]
    grad_weight = ((1 + scale[:T].float()) * products).sum(0)
    grad_scale = products * weight.float()
    unread = (0, 0, 0, ctx.rows - T)  # positions that these sequences do not have
    pad = torch.nn.functional.pad
    return (
        grad_x,
        grad_weight.to(weight.dtype),
        pad(sums, unread).to(ctx.shift_dtype),
        pad(grad_scale, unread).to(scale.dtype),
        None,
        None,
        None,
    )


modulated_norm.register_autograd(backward, setup_context=keep_for_backward)


def warps_of(width: int) -> int:
    """Return the warps of a program that holds rows of this width."""
    return 4 if width <= 1024 else 8


@triton.jit
def _load_row(
    pointer,
    start,
    d,
    D: tl.constexpr,
):
    """Return the numbers start + d of a tensor in float32, 0 for d >= D."""
    numbers = tl.load(pointer + start + d, mask=d < D, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _forward(
    x,
    weight,
    shift,
    scale,
    targets,
    y,
    rrms,
    shift_stride,
    scale_stride,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    values = _load_row(x, row * D, d, D)
    factor = 1 / tl.sqrt(tl.sum(values * values, axis=0) / D + eps)
    target = tl.load(targets + row)
    weights = _load_row(weight, 0, d, D)
    scales = _load_row(scale, target * scale_stride, d, D)
    shifts = _load_row(shift, target * shift_stride, d, D)
    result = values * factor * weights * (1 + scales)
    result += shifts
    tl.store(y + row * D + d, result.to(y.dtype.element_ty), mask=d < D)
    tl.store(rrms + row, factor)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    scale,
    inverse,
    rrms,
    grad_x,
    sums,
    products,
    scale_stride,
    B,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    weights = _load_row(weight, 0, d, D)
    weights = weights * (1 + _load_row(scale, position * scale_stride, d, D))
    total = tl.zeros((WIDTH,), tl.float32)
    product = tl.zeros((WIDTH,), tl.float32)
    for b in range(B):
        row = b * T + tl.load(inverse + b * T + position)
        factor = tl.load(rrms + row)
        normed = _load_row(x, row * D, d, D) * factor
        grad_row = _load_row(grad, row * D, d, D)
        total += grad_row
        product += grad_row * normed
        weighted = grad_row * weights
        along = tl.sum(weighted * normed, axis=0) / D
        result = factor * (weighted - normed * along)
        tl.store(grad_x + row * D + d, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(sums + position * D + d, total, mask=inside)
    tl.store(products + position * D + d, product, mask=inside)
