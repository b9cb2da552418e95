"""Gated residual, alone or followed by RMSNorm and up to two modulations, in one launch.

Formula      h = round(x + round(update · gate)), or round(x + update) without a gate; then, where a norm follows, the outputs
             of rms_norm_modulate.py on h: none modulated (LTX-2.0's text cross-attention), one, or two from one norm (the
             a2v/v2a site).
Order        that of rms_norm_modulate.py.
Shapes       x, update [B, S, D], last dimension contiguous; gate, scale, shift [B, 1, D], [B, S, D] or IndexedRows.
             Neither x nor update is written to: caches such as PAB keep them.
Dtypes       bf16, fp16, fp32, the same for all.
Verified on  NVIDIA H200.
"""

import torch

from .numerics import full, layout, random
from .rms_norm_modulate import (
    CANDIDATES,
    launch_rows,
    new_rows,
    norm_key,
    refusal_of_modulation,
    refusal_of_norm,
    refusal_of_rows,
    refusal_of_width,
    rehearsal_rows,
)


def eager(norm, x, update, gate, *modulations):
    """The host's arithmetic. Returns (h, out, ...), or h alone where `norm` is None."""
    hidden = x + (update if gate is None else update * full(gate))
    if norm is None:
        return hidden
    normed = norm(hidden)
    if not modulations:
        return hidden, normed
    return hidden, *(normed * (1 + full(scale)) + full(shift) for scale, shift in modulations)


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
        reason = reason or refusal_of_width(x)
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
    row = random(5, 1, 1, x.shape[2], dtype=x.dtype, device=x.device)
    gate = None if gate is None else row[4]
    pairs = [(row[2 * i], row[2 * i + 1]) for i in range(len(modulations))]
    for rows in rehearsal_rows(x):
        yield norm, rows, rows.flip(1), gate, *pairs


def launch(candidate, norm, x, update, gate, *modulations):
    """Launch without checks; `refusal` must have returned None for this layout."""
    return _launch(candidate, x, update, gate, modulations, None if norm is None else norm.eps)


def _launch(candidate, x, update, gate, modulations, eps):
    hidden = new_rows(x)
    outs = [] if eps is None else [new_rows(x) for _ in range(max(1, len(modulations)))]
    launch_rows(candidate, x, update, gate, hidden, modulations, outs, eps)
    return (hidden, *outs) if outs else hidden


@torch.library.custom_op("ltx2_fastpath::gated_residual", mutates_args=())
def _op(implementation: str, order: int, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    return _launch((implementation, order), x, update, gate, (), None)


@_op.register_fake
def _(implementation, order, x, update, gate):
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
        candidate: (implementation, order of the final warp sum), one of ``CANDIDATES``.

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
