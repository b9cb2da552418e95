"""Gated residual, alone or followed by RMSNorm and up to two modulations, in one launch.

Formula      h = round(x + round(update · gate)), or round(x + update) without a gate; then, where a norm follows, the outputs
             of rms_norm_modulate.py on h: none modulated (LTX-2.0's text cross-attention), one, or two from one norm (the
             a2v/v2a site).
Order        that of rms_norm_modulate.py.
Shapes       x, update [B, S, D], last dimension contiguous; gate, scale, shift [B, 1, D] or [B, S, D]. Neither x nor update is
             written to: caches such as PAB keep them.
Dtypes       bf16, fp16, fp32, the same for all.
Verified on  NVIDIA H200.
"""

import torch
import triton
import triton.language as tl

from .numerics import layout, on_device, random
from .rms_norm_modulate import (
    CANDIDATES,
    launch_rows,
    norm_key,
    refusal_of_modulation,
    refusal_of_norm,
    refusal_of_rows,
    strides,
)


def eager(norm, x, update, gate, *modulations):
    """The host's arithmetic. Returns (h, out, ...), or h alone where `norm` is None."""
    hidden = x + (update if gate is None else update * gate)
    if norm is None:
        return hidden
    normed = norm(hidden)
    if not modulations:
        return hidden, normed
    return hidden, *(normed * (1 + scale) + shift for scale, shift in modulations)


@triton.jit(do_not_specialize=["tokens"])
def _residual_kernel(
    p_x, p_update, p_gate, p_out, tokens, x_batch, x_token, update_batch, update_token, gate_batch, gate_token,
    D: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    b = row // tokens
    t = row % tokens
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_d < D
    b_x = tl.load(p_x + b * x_batch + t * x_token + o_d, mask=inside).to(tl.float32)
    b_update = tl.load(p_update + b * update_batch + t * update_token + o_d, mask=inside).to(tl.float32)
    if GATE:
        b_gate = tl.load(p_gate + b * gate_batch + t * gate_token + o_d, mask=inside).to(tl.float32)
        b_update = (b_update * b_gate).to(DTYPE).to(tl.float32)
    tl.store(p_out + row * D + o_d, (b_x + b_update).to(DTYPE), mask=inside)


def signature(norm, x, update, gate, *modulations):
    return (
        norm is not None and norm_key(norm), layout(x), layout(update), layout(gate),
        *((layout(scale), layout(shift)) for scale, shift in modulations),
    )  # fmt: skip


def refusal(norm, x, update, gate, *modulations) -> str | None:
    """Why the kernels cannot take these arguments, naming one; None if they can. Reads metadata only."""
    reason = refusal_of_rows("x", x) or refusal_of_rows("update", update, x)
    if gate is not None:
        reason = reason or refusal_of_rows("gate", gate, x, broadcast=True)
    if norm is None:
        return reason or ("modulations: need a norm" if modulations else None)
    reason = reason or refusal_of_norm(norm, x)
    if len(modulations) > 2:
        reason = reason or f"modulations: at most 2, got {len(modulations)}"
    for i, (scale, shift) in enumerate(modulations):
        reason = reason or refusal_of_modulation(f" {i}", x, scale, shift)
    return reason


def rehearsals(norm, x, update, gate, *modulations):
    """Synthetic arguments with enough rows to convict a wrong summation order; nothing to rehearse without a norm."""
    if norm is None:
        return
    rows = random(1, 8200, x.shape[2], dtype=x.dtype, device=x.device)
    spare = [rows[:, i : i + 1] for i in range(5)]
    gate = None if gate is None else spare.pop()
    yield norm, rows[:, 8:4104], rows[:, 4104:], gate, *((spare.pop(), spare.pop()) for _ in modulations)


def launch(candidate, norm, x, update, gate, *modulations):
    """Launch without checks; `refusal` must have returned None for this layout."""
    if norm is None:
        return _launch_residual(x, update, gate)
    return _launch(candidate, x, update, gate, modulations, norm.eps)


def _launch_residual(x, update, gate):
    batch, tokens, width = x.shape
    out = torch.empty((batch, tokens, width), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(width), 2048)
    with on_device(x):
        _residual_kernel[(batch * tokens, triton.cdiv(width, block))](
            x, update, gate, out, tokens, *strides(x), *strides(update), *strides(gate),
            D=width, BLOCK=block, GATE=gate is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launch(candidate, x, update, gate, modulations, eps):
    hidden, *outs = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(1 + max(1, len(modulations))))
    launch_rows(candidate, x, update, gate, hidden, modulations, outs, eps)
    return hidden, *outs


@torch.library.custom_op("ltx2_fastpath::gated_residual", mutates_args=())
def _op(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    return _launch_residual(x, update, gate)


@_op.register_fake
def _(x, update, gate):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("ltx2_fastpath::gated_residual_norm", mutates_args=())
def _norm_op(
    implementation: str,
    order: int,
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor | None,
    scales: list[torch.Tensor],
    shifts: list[torch.Tensor],
    eps: float,
) -> list[torch.Tensor]:
    return list(_launch((implementation, order), x, update, gate, list(zip(scales, shifts)), eps))


@_norm_op.register_fake
def _(implementation, order, x, update, gate, scales, shifts, eps):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(1 + max(1, len(scales)))]


def gated_residual(norm, x, update, gate, *modulations, candidate=CANDIDATES[0]):
    """``h = x + update * gate``, then the norm of h and its modulations, in one launch.

    Args:
        norm: a diffusers ``RMSNorm`` without weight, or None for the residual alone.
        x, update: [B, S, D], bf16, fp16 or fp32, last dimension contiguous.
        gate: [B, 1, D] or [B, S, D], or None for a plain residual.
        modulations: up to two (scale, shift) pairs, [B, 1, D] or [B, S, D] each.
        candidate: (implementation, order of the final warp sum), one of ``CANDIDATES``; without a norm it is not read.

    Returns:
        h alone where norm is None; else (h, normed) without modulations, or (h, out) or (h, out, out). New tensors [B, S, D].

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.
    """
    if torch.compiler.is_compiling():
        return eager(norm, x, update, gate, *modulations)
    if reason := refusal(norm, x, update, gate, *modulations):
        raise ValueError(f"gated_residual: {reason}")
    return launch(candidate, norm, x, update, gate, *modulations)
