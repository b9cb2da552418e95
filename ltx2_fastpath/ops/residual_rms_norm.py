"""Residual sums + RMSNorm with a weight + modulate, in one launch: the chains of LTX-2.5's diffusion decoder.

Formula      h = round(x + update) for each update in turn; rstd = rsqrt(sum(h²) / D + eps) in fp32;
             n = round(weight · (rstd · h)); out = round(round(n · round(1 + scale)) + shift), or n without a modulation.
Order        aten's vectorised layer-norm kernel in its RMS form: 128 threads a row; thread t adds elements 4t…4t+3 of each chunk
             of 512 to one accumulator, with FMA, in order; then by halves over a warp's lanes, then over the warps.
Shapes       x and updates [B, tokens..., D], of one shape, evenly spaced tokens and a contiguous D of 128, 256 or a multiple of
             512; weight [D]; scale and shift [B, 1..., D].
Dtypes       bf16, fp16, fp32, the same for all.

rms_norm_modulate.py is another sum in another order: diffusers' RMSNorm without a weight.
"""

import math

import torch
import triton
import triton.language as tl

from .numerics import lane_sum, warp_sum
from .qk_norm_split_rope import is_plain, norm_key
from .support import DEVICE_TYPES, DTYPES, layout, on_device, random, token_stride

CANDIDATES = ("shuffle", "tree")  # how the sum over a warp's lanes is written; see numerics.warp_sum
CHUNK = 512
ELEMENTS, WARPS = 4096, 4  # that a program takes, in whole rows, and its warps
MOST_UPDATES = 2


def eager(norm, x, updates, modulation=None, keep=True):
    """The host's arithmetic around its own norm module; see `residual_rms_norm`."""
    for update in updates:
        x = x + update
    if norm is None:
        return x
    normed = norm(x)
    if modulation is not None:
        scale, shift = modulation
        normed = normed * (1 + scale) + shift
    return (x, normed) if updates and keep else normed


@triton.jit
def _summed(p_x, p_first, p_second, o_x, o_first, o_second, inside, UPDATES: tl.constexpr):
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_x = tl.load(p_x + o_x, mask=inside, other=0).to(tl.float32)
    if UPDATES > 0:
        b_x = (b_x + tl.load(p_first + o_first, mask=inside, other=0).to(tl.float32)).to(DTYPE).to(tl.float32)
    if UPDATES > 1:
        b_x = (b_x + tl.load(p_second + o_second, mask=inside, other=0).to(tl.float32)).to(DTYPE).to(tl.float32)
    return b_x


@triton.jit
def _normed(b_x, rstd, p_weight, p_scale, p_shift, o_d, MODULATED: tl.constexpr, DTYPE: tl.constexpr):
    b_weight = tl.load(p_weight + o_d)[None, :].to(tl.float32)
    b_n = (b_weight * (rstd * b_x)).to(DTYPE)
    if MODULATED:
        b_scale = (1 + tl.load(p_scale + o_d)[None, :].to(tl.float32)).to(DTYPE).to(tl.float32)
        b_n = (b_n.to(tl.float32) * b_scale).to(DTYPE)
        b_n = (b_n.to(tl.float32) + tl.load(p_shift + o_d)[None, :].to(tl.float32)).to(DTYPE)
    return b_n


@triton.jit(do_not_specialize=["tokens"])
def _residual_rms_norm_kernel(
    p_x, p_first, p_second, p_weight, p_scale, p_shift, p_hidden, p_out, tokens,
    x_batch, x_token, first_batch, first_token, second_batch, second_token, scale_batch, shift_batch, eps,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WARPS_OF_ROW: tl.constexpr, LANES: tl.constexpr,
    UPDATES: tl.constexpr, KEEP: tl.constexpr, NORM: tl.constexpr, MODULATED: tl.constexpr, SHUFFLE: tl.constexpr,
    LANE_LEVELS: tl.constexpr, WARP_LEVELS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    blocks = tl.cdiv(tokens, ROWS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (token < tokens)[:, None]
    o_d = tl.arange(0, CHUNK)
    o_x = (b * x_batch + token * x_token)[:, None] + o_d[None, :]
    o_first = (b * first_batch + token * first_token)[:, None] + o_d[None, :]
    o_second = (b * second_batch + token * second_token)[:, None] + o_d[None, :]
    o_out = ((b * tokens + token) * D)[:, None] + o_d[None, :]
    b_sum = tl.zeros((ROWS, CHUNK // 4), tl.float32)
    b_x = tl.zeros((ROWS, CHUNK), tl.float32)
    for c in tl.static_range(0, D, CHUNK):
        b_x = _summed(p_x, p_first, p_second, o_x + c, o_first + c, o_second + c, inside, UPDATES)
        if KEEP:
            tl.store(p_hidden + o_out + c, b_x.to(DTYPE), mask=inside)
        if NORM:
            even, odd = tl.split(tl.reshape(b_x, (ROWS, CHUNK // 2, 2)))
            x_0, x_2 = tl.split(tl.reshape(even, (ROWS, CHUNK // 4, 2)))
            x_1, x_3 = tl.split(tl.reshape(odd, (ROWS, CHUNK // 4, 2)))
            b_sum = tl.fma(x_3, x_3, tl.fma(x_2, x_2, tl.fma(x_1, x_1, tl.fma(x_0, x_0, b_sum))))
    if NORM:
        warps = warp_sum(tl.reshape(b_sum, (ROWS * WARPS_OF_ROW, LANES)), ROWS * WARPS_OF_ROW, LANES, LANE_LEVELS, SHUFFLE)
        total = lane_sum(tl.reshape(warps, (ROWS, WARPS_OF_ROW)), ROWS, WARP_LEVELS, 0)
        rstd = tl.rsqrt(tl.div_rn(total, D * 1.0) + eps)[:, None]
        if MODULATED:
            p_scale += b * scale_batch
            p_shift += b * shift_batch
        for c in tl.static_range(0, D, CHUNK):
            if D > CHUNK:  # from the cache, and added again: a row of one chunk is still in registers
                b_x = _summed(p_x, p_first, p_second, o_x + c, o_first + c, o_second + c, inside, UPDATES)
            b_n = _normed(b_x, rstd, p_weight, p_scale, p_shift, o_d + c, MODULATED, DTYPE)
            tl.store(p_out + o_out + c, b_n, mask=inside)


def signature(norm, x, updates, modulation=None, keep=True):
    return (
        norm is not None and norm_key(norm), layout(x), tuple(map(layout, updates)),
        modulation and tuple(map(layout, modulation)), keep,
    )  # fmt: skip


def _refusal_of_rows(name, x, like) -> str | None:
    if x.shape != like.shape or x.ndim < 3:
        return f"{name}: shape {list(x.shape)}, expected [B, tokens..., D] like x's {list(like.shape)}"
    if x.dtype != like.dtype or x.dtype not in DTYPES:
        return f"{name}: dtype {x.dtype}, expected {like.dtype}, one of {', '.join(map(str, DTYPES))}"
    if x.device != like.device or x.device.type not in DEVICE_TYPES:
        return f"{name}: on {x.device}, expected {like.device} of type {' or '.join(DEVICE_TYPES)}"
    step = token_stride(x, 1)
    if step is None:
        return f"{name}: tokens must be evenly spaced, got strides {x.stride()}"
    if x.stride(-1) != 1 or step % 4 or x.stride(0) % 4 or x.data_ptr() % (4 * x.element_size()):
        return f"{name}: rows must be contiguous and aligned to four elements, got strides {x.stride()}"
    return None


def refusal(norm, x, updates, modulation=None, keep=True) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    if len(updates) > MOST_UPDATES:
        return f"updates: at most {MOST_UPDATES}, got {len(updates)}"
    if norm is None and (modulation is not None or not updates):
        return "norm: None, so updates and no modulation are expected"
    for name, rows in (("x", x), *((f"update {i}", update) for i, update in enumerate(updates))):
        if reason := _refusal_of_rows(name, rows, x):
            return reason
    width = x.shape[-1]
    if width not in (128, 256) and width % CHUNK or x.numel() == 0:
        return f"x: shape {list(x.shape)}; expected a width of 128, 256 or a multiple of {CHUNK}, and some tokens"
    if norm is None:
        return None
    if not is_plain(norm, x) or norm.weight.shape != x.shape[-1:] or norm.weight.stride() != (1,):
        return "norm: not a plain torch.nn.RMSNorm with a contiguous weight [D] of x's dtype and device"
    for name, row in zip(("scale", "shift"), modulation or ()):
        if row.shape != (x.shape[0], *(1,) * (x.ndim - 2), width) or row.stride(-1) != 1:
            return f"{name}: shape {list(row.shape)}, strides {row.stride()}; expected contiguous rows [B, 1..., D] for x"
        if row.dtype != x.dtype or row.device != x.device:
            return f"{name}: {row.dtype} on {row.device}, x: {x.dtype} on {x.device}"
    return None


def rehearsals(norm, x, updates, modulation=None, keep=True):
    """Synthetic rows, enough to convict a wrong summation order, which a small live input may not."""
    if norm is None:
        return
    shape = [1] * (x.ndim - 2) + [4096, x.shape[-1]]
    rows, *others = random(1 + len(updates), *shape, dtype=x.dtype, device=x.device)
    if modulation is not None:
        modulation = tuple(random(2, *(1,) * (x.ndim - 1), x.shape[-1], dtype=x.dtype, device=x.device, seed=1))
    yield norm, rows, tuple(others), modulation, keep


def launch(candidate, norm, x, updates, modulation=None, keep=True):
    """Launch without checks; `refusal` must have returned None for this layout."""
    batch, width = x.shape[0], x.shape[-1]
    tokens = math.prod(x.shape[1:-1])
    chunk = min(width, CHUNK)
    keep = norm is None or bool(updates) and keep
    hidden = torch.empty_like(x, memory_format=torch.contiguous_format) if keep else None
    out = None if norm is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = (*updates, None, None)[:2]
    scale, shift = modulation or (None, None)
    strides: list[int | None] = []
    for tensor in (x, first, second):
        strides += (0, 0) if tensor is None else (tensor.stride(0), token_stride(tensor, 1))
    strides += [0 if row is None else row.stride(0) for row in (scale, shift)]
    rows = ELEMENTS // chunk
    warps_of_row = chunk // 128
    with on_device(x):
        _residual_rms_norm_kernel[(batch * triton.cdiv(tokens, rows),)](
            x, first, second, None if norm is None else norm.weight, scale, shift, hidden, out, tokens, *strides,
            0.0 if norm is None else norm.eps, width, chunk, rows, warps_of_row, 32, len(updates), keep, norm is not None,
            modulation is not None, candidate == "shuffle", 5, warps_of_row.bit_length() - 1,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    if norm is None:
        return hidden
    return (hidden, out) if keep else out


def residual_rms_norm(norm, x, updates, modulation=None, keep=True, *, candidate=CANDIDATES[0]):
    """``h = x + updates[0] + updates[1]``, then ``norm(h) * (1 + scale) + shift``, in one launch.

    Args:
        norm: a plain ``torch.nn.RMSNorm`` module with a weight [D], or None for the sums alone.
        x: [B, tokens..., D], bf16, fp16 or fp32, last dimension contiguous, tokens evenly spaced.
        updates: none, one or two tensors of x's shape, added in turn.
        modulation: (scale, shift), [B, 1..., D] each, or None.
        keep: whether h is wanted beside the normed tensor.
        candidate: one of ``CANDIDATES``.

    Returns:
        h alone where norm is None; (h, normed) where there are updates and `keep`; else the normed tensor. All are new.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.
    """
    if reason := refusal(norm, x, updates, modulation, keep):
        raise ValueError(f"residual_rms_norm: {reason}")
    return launch(candidate, norm, x, updates, modulation, keep)
