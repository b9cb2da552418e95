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

from .rms_norm_modulate import CANDIDATES as CANDIDATES
from .rms_norm_modulate import (
    launch_rows,
    new_rows,
    norm_key,
    refusal_of_modulation,
    refusal_of_norm,
    refusal_of_rows,
    refusal_of_width,
    rehearsal_rows,
)
from .support import full, layout, random


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
