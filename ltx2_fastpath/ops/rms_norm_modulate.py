"""RMSNorm + modulate: ``rms_norm(x) * (1 + scale) + shift``, bit-exact with diffusers' eager chain, in one launch.

Formula      rstd = rsqrt(mean(x²) + eps) in fp32; n = round(x · rstd); out = round(round(n · round(1 + scale)) + shift),
             where round is to the dtype of x. The squares are rounded to fp32 before they are added (no FMA).
Order        torch's generic reduction: L lanes a row, 32 at 16 rows or more, 64 from 8, 128 from 4, 256 from 2, 512 for one
             row; lane t adds elements 4t…4t+3 of each chunk of 4·L to four accumulators of its own, chunk after chunk;
             ((a0 + a1) + a2) + a3; then over the lanes by halves, in the last warp by halves or by pairs
             (numerics.WARP_ORDERS).
Shapes       x [B, S, D] with D a multiple of 4·L, last dimension contiguous; scale and shift [B, 1, D] (row modulation) or
             [B, S, D] (per-token), with equal strides, or a per-token one as support.IndexedRows.
Dtypes       bf16, fp16, fp32, the same for all three.
Verified on  NVIDIA H200.

With ``norm=None`` only the modulation is computed (the prompts of LTX-2.3's text cross-attention). The kernels also serve
gated_residual.py: with an update they first form h = round(x + round(update · gate)), store h, and normalise that; and they can
write two differently modulated outputs of one norm.
"""

import torch
import triton
import triton.language as tl

from . import cuda
from .numerics import WARP_ORDERS, lane_sum, quads
from .support import DEVICE_TYPES, DTYPES, INTERPRETED, IndexedRows, full, is_untouched, layout, on_device, random

CANDIDATES = tuple((implementation, order) for implementation in cuda.IMPLEMENTATIONS for order in WARP_ORDERS)


def eager(norm, x, scale, shift):
    """The host's arithmetic around its own norm module (None: the modulation alone)."""
    return (x if norm is None else norm(x)) * (1 + full(scale)) + full(shift)


@triton.jit
def _row(p_index, row, b, t, batch_stride, token_stride):
    offset = b * batch_stride + t * token_stride
    if p_index is not None:
        offset = tl.load(p_index + row).to(tl.int64) * token_stride
    return offset


@triton.jit
def _modulated(b_n, p_scale, p_shift, p_out, DTYPE: tl.constexpr):
    b_scale = (1 + tl.load(p_scale).to(tl.float32)).to(DTYPE).to(tl.float32)
    b_shift = tl.load(p_shift).to(tl.float32)
    b_scaled = (b_n.to(tl.float32) * b_scale).to(DTYPE).to(tl.float32)
    tl.store(p_out, (b_scaled + b_shift).to(DTYPE))


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_modulate_kernel(
    p_x, p_update, p_gate, p_hidden, p_scale_0, p_shift_0, p_out_0, p_scale_1, p_shift_1, p_out_1,
    p_gate_index, p_mod_0_index, p_mod_1_index, tokens, x_batch, x_token, update_batch, update_token, gate_batch, gate_token,
    mod_0_batch, mod_0_token, mod_1_batch, mod_1_token, eps,
    D: tl.constexpr, UPDATE: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    b = row // tokens
    t = row % tokens
    o_d = tl.arange(0, 4 * LANES)
    p_x += b * x_batch + t * x_token + o_d
    if UPDATE:
        p_update += b * update_batch + t * update_token + o_d
        p_hidden += row * D + o_d
    if GATE:
        p_gate += _row(p_gate_index, row, b, t, gate_batch, gate_token) + o_d

    b_sum = tl.zeros((4 * LANES,), tl.float32)
    if UPDATE or NORM:
        for c in tl.range(0, D, 4 * LANES, loop_unroll_factor=8):
            b_x = tl.load(p_x + c)
            if UPDATE:
                b_update = tl.load(p_update + c).to(tl.float32)
                if GATE:
                    b_update = (b_update * tl.load(p_gate + c).to(tl.float32)).to(DTYPE).to(tl.float32)
                b_x = (b_x.to(tl.float32) + b_update).to(DTYPE)
                tl.store(p_hidden + c, b_x)
            b_square = b_x.to(tl.float32) * b_x.to(tl.float32)
            b_sum += b_square
    rstd = 1.0
    if NORM:
        a_0, a_1, a_2, a_3 = quads(b_sum, 1, LANES)
        rstd = tl.rsqrt(lane_sum(((a_0 + a_1) + a_2) + a_3, 1, LEVELS, ORDER) * (1.0 / D) + eps)

    if NORM or OUTPUTS > 0:
        o_0 = _row(p_mod_0_index, row, b, t, mod_0_batch, mod_0_token) + o_d
        o_1 = _row(p_mod_1_index, row, b, t, mod_1_batch, mod_1_token) + o_d
        if UPDATE:
            p_x = p_hidden
            tl.debug_barrier()
        for c in tl.range(0, D, 4 * LANES, loop_unroll_factor=8):
            b_n = tl.load(p_x + c)
            if NORM:
                b_n = (b_n.to(tl.float32) * rstd).to(DTYPE)
            o_out = row * D + c + o_d
            if OUTPUTS == 0:
                tl.store(p_out_0 + o_out, b_n)
            if OUTPUTS >= 1:
                _modulated(b_n, p_scale_0 + o_0 + c, p_shift_0 + o_0 + c, p_out_0 + o_out, DTYPE)
            if OUTPUTS >= 2:
                _modulated(b_n, p_scale_1 + o_1 + c, p_shift_1 + o_1 + c, p_out_1 + o_out, DTYPE)


def launch_rows(candidate, x, update, gate, hidden, modulations, outs, eps):
    """Launch either implementation on rows x [B, S, D]; what is None is left out. `candidate` is (implementation, order)."""
    implementation, order = candidate
    batch, tokens, width = x.shape
    rows = batch * tokens
    lanes = 32 if eps is None else lanes_of(rows)
    if width % (4 * lanes):
        raise ValueError(f"x: width {width} is not a multiple of {4 * lanes}")
    (scale_0, shift_0), (scale_1, shift_1) = (*modulations, (None, None), (None, None))[:2]
    out_0, out_1 = (*outs, None, None)[:2]
    steps = (*strides(x), *strides(update), *strides(gate), *strides(scale_0), *strides(scale_1))
    indices = [row.index if isinstance(row, IndexedRows) else None for row in (gate, scale_0, scale_1)]
    gate, scale_0, shift_0, scale_1, shift_1 = (
        row.values if isinstance(row, IndexedRows) else row for row in (gate, scale_0, shift_0, scale_1, shift_1)
    )
    tensors = (x, update, gate, hidden, scale_0, shift_0, out_0, scale_1, shift_1, out_1, *indices)
    switches = (update is not None, gate is not None, eps is not None, len(modulations), lanes, order)
    with on_device(x):
        if implementation == "cuda":
            ints = [*cuda.addresses(*tensors), tokens, *steps]
            parameters = (x.dtype, width, *switches)
            cuda.launch(x.device, "rms_norm_modulate", parameters, (tokens, batch), lanes, ints, (eps or 0.0,))
        else:
            _rms_norm_modulate_kernel[(rows,)](
                *tensors, tokens, *steps, eps or 0.0, width, *switches, lanes.bit_length() - 1,
                num_warps=lanes // 32, enable_fp_fusion=False,
            )  # fmt: skip


def lanes_of(rows: int) -> int:
    """How many lanes torch's reduction gives each of so many rows."""
    return 512 >> (min(rows, 16).bit_length() - 1)


def new_rows(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised contiguous tensor of x's shape and dtype (a third of `torch.empty`'s host time)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def strides(x: torch.Tensor | IndexedRows | None) -> tuple[int, int]:
    """The strides from batch row to batch row and from token to token; 0 where one row serves all tokens."""
    if x is None:
        return 0, 0
    if isinstance(x, IndexedRows):
        return 0, x.values.stride(0)
    batch, token, _ = x.stride()
    return batch, token if x.shape[1] > 1 else 0


def norm_key(norm):
    """What of a norm module the kernel depends on: its eps, or None for a module that must be called instead.

    A module with weights, hooks, a forward of its own or of another class is not the plain RMSNorm that the kernel computes.
    """
    plain = (
        type(norm).__name__ == "RMSNorm"
        and getattr(norm, "weight", True) is None
        and getattr(norm, "bias", True) is None
        and is_untouched(norm)
    )
    return norm.eps if plain else None


def refusal_of_rows(name: str, x: torch.Tensor, like: torch.Tensor | None = None, *, broadcast: bool = False) -> str | None:
    """Why `x` cannot be read as rows [B, S, D] (or, with `broadcast`, as [B, 1, D] too) beside `like`; None if it can."""
    like = x if like is None else like
    if broadcast and isinstance(x, IndexedRows):
        return _refusal_of_indexed(name, x, like)
    if x.ndim != 3:
        return f"{name}: expected rank 3, got {list(x.shape)}"
    if x.dtype != like.dtype or x.dtype not in DTYPES:
        return f"{name}: dtype {x.dtype}, expected {like.dtype}, one of {', '.join(map(str, DTYPES))}"
    if x.device != like.device or x.device.type not in DEVICE_TYPES:
        return f"{name}: on {x.device}, expected {like.device} of type {' or '.join(DEVICE_TYPES)}"
    shapes = [like.shape, (like.shape[0], 1, like.shape[2])] if broadcast else [like.shape]
    if x.shape not in shapes:
        return f"{name}: shape {list(x.shape)}, expected {' or '.join(str(list(s)) for s in shapes)}"
    if x.stride(2) != 1 or x.stride(0) % 4 or x.stride(1) % 4 or x.data_ptr() % (4 * x.element_size()):
        return f"{name}: rows must be contiguous and aligned to four elements, got strides {x.stride()}"
    if x.numel() == 0:
        return f"{name}: empty"
    return None


def _refusal_of_indexed(name: str, x: IndexedRows, like: torch.Tensor) -> str | None:
    if x.index.shape != like.shape[:2] or x.index.dtype != torch.int32 or not x.index.is_contiguous():
        return f"{name}: index {x.index.dtype} {list(x.index.shape)}, expected contiguous int32 {list(like.shape[:2])}"
    if x.index.device != like.device:
        return f"{name}: index on {x.index.device}, expected {like.device}"
    values = x.values
    if values.ndim != 2 or values.shape[1] != like.shape[2] or values.dtype != like.dtype or values.device != like.device:
        return f"{name}: values {values.dtype} {list(values.shape)}, expected {like.dtype} [n, {like.shape[2]}] on {like.device}"
    if values.stride(1) != 1 or values.stride(0) % 4 or values.data_ptr() % (4 * values.element_size()):
        return f"{name}: value rows must be contiguous and aligned to four elements, got strides {values.stride()}"
    return None


def refusal_of_norm(norm, x: torch.Tensor) -> str | None:
    """Why the reduction over the rows of `x` cannot be reproduced; None if it can."""
    if norm_key(norm) is None:
        return "norm: not a plain RMSNorm without weights or hooks, so it is called"
    rows = x.shape[0] * x.shape[1]
    if rows < 16 and not cuda.INSTALLED and not INTERPRETED:
        return f"x: {rows} rows; under 16 Triton's form of the reduction takes 11 s to compile, and cuda.core is not installed"
    return refusal_of_width(x, lanes_of(rows))


def refusal_of_width(x: torch.Tensor, lanes: int = 32) -> str | None:
    """Why `lanes` threads cannot have four elements of a row each in every chunk; None if they can."""
    if x.shape[2] % (4 * lanes):
        return f"x: width {x.shape[2]} is not a multiple of {4 * lanes}"
    return None


def refusal_of_modulation(suffix: str, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> str | None:
    """Why `scale` and `shift` cannot modulate the rows of `x`; None if they can."""
    reason = refusal_of_rows(f"scale{suffix}", scale, x, broadcast=True)
    reason = reason or refusal_of_rows(f"shift{suffix}", shift, x, broadcast=True)
    if reason is None and isinstance(scale, IndexedRows) != isinstance(shift, IndexedRows):
        return f"shift{suffix}: indexed rows, or not, as scale{suffix}"
    if reason is None and isinstance(scale, IndexedRows):
        if scale.index is not shift.index:
            return f"shift{suffix}: its index must be scale{suffix}'s"
        scale, shift = scale.values, shift.values
    if reason is None and (scale.shape != shift.shape or scale.stride() != shift.stride()):
        return f"shift{suffix}: shape and strides must be scale{suffix}'s"
    return reason


def signature(norm, x, scale, shift):
    return norm is not None and norm_key(norm), layout(x), layout(scale), layout(shift)


def refusal(norm, x, scale, shift) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    reason = refusal_of_rows("x", x)
    reason = reason or (refusal_of_width(x) if norm is None else refusal_of_norm(norm, x))
    return reason or refusal_of_modulation("", x, scale, shift)


def rehearsals(norm, x, scale, shift):
    """Synthetic arguments with enough rows to convict a wrong summation order, which a short live input may not."""
    if norm is None:
        return
    row = random(1, 2, x.shape[2], dtype=x.dtype, device=x.device)
    for rows in rehearsal_rows(x):
        yield norm, rows, row[:, :1], row[:, 1:]


def rehearsal_rows(x):
    """4,096 rows at once, or where x has under 16, which torch reduces in another order, 64 times as many as x has."""
    rows = x.shape[0] * x.shape[1]
    trials = (1, 4096) if rows >= 16 else (64, rows)
    return random(trials[0], 1, trials[1], x.shape[2], dtype=x.dtype, device=x.device, seed=1)


def launch(candidate, norm, x, scale, shift):
    """Launch without checks; `refusal` must have returned None for this layout."""
    return _launch(candidate, x, scale, shift, None if norm is None else norm.eps)


def _launch(candidate, x, scale, shift, eps):
    out = new_rows(x)
    launch_rows(candidate, x, None, None, None, [(scale, shift)], [out], eps)
    return out


def rms_norm_modulate(norm, x, scale, shift, *, candidate=CANDIDATES[0]):
    """``norm(x) * (1 + scale) + shift`` in one launch.

    Args:
        norm: a diffusers ``RMSNorm`` without weight, of which only eps is read; or None for the modulation alone.
        x: [B, S, D], bf16, fp16 or fp32; D a multiple of 128 (of more under 16 rows), last dimension contiguous.
        scale, shift: [B, 1, D], [B, S, D] or IndexedRows, of x's dtype and device, with equal strides.
        candidate: (implementation, order of the final warp sum), one of ``CANDIDATES``.

    Returns:
        A new contiguous tensor [B, S, D] of x's dtype.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.

    Under ``torch.compile`` the plain expression is traced instead, for Inductor to fuse.
    """
    if torch.compiler.is_compiling():
        return eager(norm, x, scale, shift)
    if reason := refusal(norm, x, scale, shift):
        raise ValueError(f"rms_norm_modulate: {reason}")
    return launch(candidate, norm, x, scale, shift)
