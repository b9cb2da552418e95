"""QK-norm + 3-D RoPE of LTX-2.5's diffusion decoder: RMSNorm of each head, query scale, rotation; q and k in one launch.

Formula      rstd = rsqrt(sum(x²) / d + eps) in fp32 over the d elements of a head; n = round(weight · (rstd · x));
             for q also n = round(n · scale); then for each pair of neighbours, (even, odd) = (n[2p], n[2p + 1]),
             out[2p]     = round(even · cos[p] - odd · sin[p])
             out[2p + 1] = round(even · sin[p] + odd · cos[p]),  two products and a sum each rounded to fp32 (no FMA).
             The first pairs of a head turn by the token's frame, the next by its row, the last by its column.
Order        aten's vectorised layer-norm kernel in its RMS form: lane t of a warp adds elements 4t…4t+3 with FMA, in order; then
             over the lanes by halves. (The lanes past the end of a head, and the block's other three warps, add zeros.)
Shapes       q, k [B, T, H, W, heads, d] with a contiguous d, a power of two from 8 to 128, and evenly spaced tokens, as
             ``to_q(x).view(...)`` and the chunks of a packed product have them; weights [d]; tables: `tables(...)`.
Dtypes       bf16, fp16, fp32, the weights' the same; tables fp32.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .numerics import warp_sum
from .qk_norm_split_rope import is_plain, norm_key
from .support import DEVICE_TYPES, DTYPES, layout, on_device, random, token_stride

CANDIDATES = ("shuffle", "tree")  # how the sum over lanes is written; see numerics.warp_sum
ROWS, WARPS = 64, 4  # heads of tokens that a program takes, and its warps


class Tables(NamedTuple):
    """cos and sin by axis, flat and one axis after the other: fp32 [T · pairs[0] + H · pairs[1] + W · pairs[2]] each."""

    cos: torch.Tensor
    sin: torch.Tensor
    grid: tuple[int, int, int]  # the whole grid's T, H, W
    pairs: tuple[int, int, int]  # of a head, for each axis
    origin: int = 0  # the frame of the grid that is q's and k's first

    def slab(self, origin: int) -> "Tables":
        """For q and k that hold only some frames, from `origin` on."""
        return self._replace(origin=origin)

    def axes(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` (cos or sin) as [T, pairs[0]], [H, pairs[1]], [W, pairs[2]]."""
        sizes = [size * pairs for size, pairs in zip(self.grid, self.pairs)]
        return [part.view(size, -1) if part.numel() else part.view(size, 0) for part, size in zip(values.split(sizes), self.grid)]


def tables(rope, grid: tuple[int, int, int], device: torch.device) -> Tables:
    """The tables of a grid (T, H, W), by the arithmetic of `rope`, the host's module: what it makes of the pair (1, 0)."""
    dim_t, dim_h, dim_w = rope.rope_dim_split
    pairs = dim_t // 2, dim_h // 2, dim_w // 2
    ends = [0, pairs[0], pairs[0] + pairs[1], sum(pairs)]
    found = []
    for axis, size in enumerate(grid):
        shape = [1, 1, 1, 1, 1, 2 * sum(pairs)]
        shape[1 + axis] = size
        units = torch.tensor([1.0, 0.0], device=device).repeat(sum(pairs)).expand(shape)
        found.append(rope(units).view(size, -1, 2)[:, ends[axis] : ends[axis + 1]].reshape(-1, 2))
    cos, sin = torch.cat(found).unbind(1)
    return Tables(cos.contiguous(), sin.contiguous(), grid, pairs)


def eager(norm_q, norm_k, scale, q, k, rope):
    """The host's arithmetic around its own norm modules."""
    return rotated(norm_q(q) * scale, rope), rotated(norm_k(k), rope)


def rotated(x, rope):
    """Rotate x [B, T, H, W, heads, d] by `Tables`. -> x's shape and dtype"""
    frames, height, width = x.shape[1:4]
    rows = slice(rope.origin, rope.origin + frames), slice(height), slice(width)
    parts = []
    for axis, part in enumerate(x.split([2 * pairs for pairs in rope.pairs], dim=-1)):
        shape = [1, 1, 1, 1, 1, rope.pairs[axis]]
        shape[1 + axis] = x.shape[1 + axis]
        cos, sin = (rope.axes(table)[axis][rows[axis]].view(shape) for table in (rope.cos, rope.sin))
        even, odd = part.unflatten(-1, (-1, 2)).unbind(-1)
        even, odd = even.float(), odd.float()
        parts.append(torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype))
    return torch.cat(parts, dim=-1)


@triton.jit
def _rotate(
    p_x, p_weight, p_out, o_x, o_out, inside, b_cos, b_sin, scale, eps,
    D: tl.constexpr, SCALE: tl.constexpr, SHUFFLE: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_x = tl.load(p_x + o_x, mask=inside, other=0).to(tl.float32)
    b_weight = tl.load(p_weight + tl.arange(0, D)).to(tl.float32)
    even, odd = tl.split(tl.reshape(b_x, (ROWS, D // 2, 2)))
    x_0, x_2 = tl.split(tl.reshape(even, (ROWS, D // 4, 2)))
    x_1, x_3 = tl.split(tl.reshape(odd, (ROWS, D // 4, 2)))
    b_sum = tl.fma(x_3, x_3, tl.fma(x_2, x_2, tl.fma(x_1, x_1, x_0 * x_0)))
    rstd = tl.rsqrt(tl.div_rn(warp_sum(b_sum, ROWS, D // 4, LEVELS, SHUFFLE), D * 1.0) + eps)[:, None]
    w_even, w_odd = tl.split(tl.reshape(b_weight, (1, D // 2, 2)))
    even = (w_even * (rstd * even)).to(DTYPE).to(tl.float32)
    odd = (w_odd * (rstd * odd)).to(DTYPE).to(tl.float32)
    if SCALE:
        even = (even * scale).to(DTYPE).to(tl.float32)
        odd = (odd * scale).to(DTYPE).to(tl.float32)
    b_out = tl.join(even * b_cos - odd * b_sin, even * b_sin + odd * b_cos)
    tl.store(p_out + o_out, tl.reshape(b_out, (ROWS, D)).to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["frames", "height", "width", "origin", "start_h", "start_w"])
def _qk_norm_rope_3d_kernel(
    p_q, p_k, p_weight_q, p_weight_k, p_out_q, p_out_k, p_cos, p_sin,
    frames, height, width, origin, start_h, start_w, q_batch, q_token, q_head, k_batch, k_token, k_head, scale, eps_q, eps_k,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS_T: tl.constexpr, PAIRS_H: tl.constexpr, PAIRS_W: tl.constexpr,
    ALIGNED: tl.constexpr, SHUFFLE: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    # A program takes heads of tokens along one line of the grid, so that only the column differs among them.
    blocks = tl.cdiv(width * HEADS, ROWS)
    line = tl.program_id(0) // blocks
    h = line % height
    t = line // height % frames
    b = (line // (height * frames)).to(tl.int64)
    o_row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = (o_row < width * HEADS)[:, None]
    w = o_row // HEADS
    head = o_row % HEADS
    token = ((t * height + h) * width + w).to(tl.int64)
    o_d = tl.arange(0, D)[None, :]

    pair = tl.arange(0, D // 2)[None, :]
    o_h = start_h + h * PAIRS_H + pair - PAIRS_T
    o_w = start_w + w[:, None] * PAIRS_W + pair - (PAIRS_T + PAIRS_H)
    o_table = tl.where(pair < PAIRS_T, (origin + t) * PAIRS_T + pair, tl.where(pair < PAIRS_T + PAIRS_H, o_h, o_w))
    if ALIGNED:  # each axis has whole groups of four pairs: 16 bytes of a table at a time
        o_table = tl.max_contiguous(tl.multiple_of(o_table, (1, 4)), (1, 4))
    b_cos = tl.load(p_cos + o_table, mask=inside, other=0)
    b_sin = tl.load(p_sin + o_table, mask=inside, other=0)

    o_out = ((b * frames * height * width + token) * HEADS + head)[:, None] * D + o_d
    o_q = (b * q_batch + token * q_token + head * q_head)[:, None] + o_d
    _rotate(p_q, p_weight_q, p_out_q, o_q, o_out, inside, b_cos, b_sin, scale, eps_q, D, True, SHUFFLE, ROWS, LEVELS)
    o_k = (b * k_batch + token * k_token + head * k_head)[:, None] + o_d
    _rotate(p_k, p_weight_k, p_out_k, o_k, o_out, inside, b_cos, b_sin, scale, eps_k, D, False, SHUFFLE, ROWS, LEVELS)


def signature(norm_q, norm_k, scale, q, k, rope):
    return norm_key(norm_q), norm_key(norm_k), scale, layout(q), layout(k), rope.grid, rope.pairs, layout(rope.cos)


def refusal(norm_q, norm_k, scale, q, k, rope) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    for side, norm, x in (("q", norm_q, q), ("k", norm_k, k)):
        if x.ndim != 6 or x.shape != q.shape:
            return f"{side}: shape {list(x.shape)}, expected [B, T, H, W, heads, d], the same for q and k"
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            return f"{side}: dtype {x.dtype}; expected one of {', '.join(map(str, DTYPES))}, the same for q and k"
        if x.device.type not in DEVICE_TYPES or x.device != q.device:
            return f"{side}: on {x.device}; expected one device of type {' or '.join(DEVICE_TYPES)} for q and k"
        if x.shape[5] not in (8, 16, 32, 64, 128):
            return f"{side}: {x.shape[5]} elements a head, expected a power of two from 8 to 128"
        if x.numel() == 0 or x.shape[:5].numel() >= 2**31:
            return f"{side}: {x.shape[:5].numel()} heads of tokens, expected 1 to 2^31 - 1"
        step = token_stride(x, 2)
        if step is None:
            return f"{side}: tokens must be evenly spaced, got strides {x.stride()}"
        if x.stride(5) != 1 or step % 4 or x.stride(4) % 4 or x.stride(0) % 4 or x.data_ptr() % (4 * x.element_size()):
            return f"{side}: heads must be contiguous and aligned to four elements, got strides {x.stride()}"
        if not is_plain(norm, x) or norm.weight.shape != x.shape[5:] or norm.weight.stride() != (1,):
            return f"norm_{side}: not a plain torch.nn.RMSNorm with a contiguous weight [d] of {side}'s dtype and device"
    frames, height, width = q.shape[1:4]
    if (height, width) != rope.grid[1:] or not 0 <= rope.origin <= rope.grid[0] - frames:
        return f"rope: frames from {rope.origin} on of a grid {rope.grid}, q has {list(q.shape[1:4])}"
    if 2 * sum(rope.pairs) != q.shape[5]:
        return f"rope: {rope.pairs} pairs for {q.shape[5]} elements a head"
    if rope.cos.device != q.device:
        return f"rope: on {rope.cos.device}, q on {q.device}"
    return None


def rehearsals(norm_q, norm_k, scale, q, k, rope):
    """Synthetic heads, enough to convict a wrong summation order, which a small live input may not."""
    heads, dim = q.shape[4:]
    grid = 4, 32, math.ceil(32 / heads)
    x_q, x_k = random(2, 1, *grid, heads, dim, dtype=q.dtype, device=q.device)
    size = sum(size * pairs for size, pairs in zip(grid, rope.pairs))
    angle = random(size, dtype=torch.float32, device=q.device)
    yield norm_q, norm_k, scale, x_q, x_k, Tables(angle.cos(), angle.sin(), grid, rope.pairs)


def launch(candidate, norm_q, norm_k, scale, q, k, rope):
    """Launch without checks; `refusal` must have returned None for this layout."""
    batch, frames, height, width, heads, dim = q.shape
    pairs_t, pairs_h, pairs_w = rope.pairs
    start_h = rope.grid[0] * pairs_t
    start_w = start_h + height * pairs_h
    out_q, out_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    strides = [stride for x in (q, k) for stride in (x.stride(0), token_stride(x, 2), x.stride(4))]
    aligned = functools.reduce(math.gcd, rope.pairs) % 4 == 0
    with on_device(q):
        _qk_norm_rope_3d_kernel[(batch * frames * height * triton.cdiv(width * heads, ROWS),)](
            q, k, norm_q.weight, norm_k.weight, out_q, out_k, rope.cos, rope.sin,
            frames, height, width, rope.origin, start_h, start_w, *strides, scale, norm_q.eps, norm_k.eps,
            heads, dim, *rope.pairs, aligned, candidate == "shuffle", ROWS, (dim // 4).bit_length() - 1,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_k


def qk_norm_rope_3d(norm_q, norm_k, scale, q, k, rope, *, candidate=CANDIDATES[0]):
    """RMSNorm of each head, the query's scale and 3-D RoPE of q and k in one launch.

    Args:
        norm_q, norm_k: plain ``torch.nn.RMSNorm`` modules with weights [d].
        scale: what the normed q is multiplied with.
        q, k: [B, T, H, W, heads, d], bf16, fp16 or fp32, last dimension contiguous, tokens evenly spaced.
        rope: `tables(...)` of the grid, or their ``slab(t0)`` for q and k that hold T of its frames, from t0 on.
        candidate: one of ``CANDIDATES``.

    Returns:
        Two new contiguous tensors shaped like q and k.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.
    """
    if reason := refusal(norm_q, norm_k, scale, q, k, rope):
        raise ValueError(f"qk_norm_rope_3d: {reason}")
    return launch(candidate, norm_q, norm_k, scale, q, k, rope)
