"""3-D neighbourhood attention: each token of a grid attends to a window of tokens around it.

Formula      out[i] = sum over j in window(i) of p[j] · v[j] / sum of p[j],  p[j] = exp(q[i] · k[j] - r[i]), nothing else scaled.
             Along each axis of n tokens a window of w begins at clamp(i - w // 2, 0, n - w): at the borders it is shifted inward,
             never cut, as NATTEN's na3d and diffusers' block mask have it.
Rounding     scores, exponentials (base 2, the hardware's approximation), sums and products in fp32; each p[j] is rounded to the
             dtype before it meets v[j]; one rounding at the end. r[i], which cancels, keeps p[j] small.
Order        along T, then H, in steps of several key rows of W. Where a step begins depends on the query's H and W in the grid
             alone, and keys of other queries that share its step add exact zeros. So frames that are computed on their own (see
             `Slab`) have the bits of the whole, and every run has the same. The two implementations have different orders.
Shapes       q, k, v [B, T, H, W, heads, 64], a contiguous last dimension, other strides of any multiple of 16 bytes.
Dtypes       bf16, fp16; fp32 in the Triton form.
Costs        in proportion to tokens · window. Nothing is kept of scores or masks.

A NaN or an infinity in k or v may also reach queries within the same tile whose windows do not hold it.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import cuda
from .support import DEVICE_TYPES, DTYPES, on_device

HEAD_DIM = 64
MOST = 11  # of a window along an axis
_LOG2_E = 1.4426950408889634
_LOWEST = -3.0e38


class Slab(NamedTuple):
    """Where the frames at hand lie in a longer grid: q's from `origin` on, k's and v's from `key_origin` on."""

    frames: int  # the whole grid's T
    origin: int
    key_origin: int


class Tiling(NamedTuple):
    """How the CUDA C++ form cuts its work; see neighborhood_attention.cu. Only `bricks` and `tiles` show in the bits, and those
    along T do not."""

    tiles: int
    bricks: tuple[int, int, int]
    chunk: int
    blocks: int = 1
    most_slots: int = 24

    def pitch(self, window: int) -> int:
        return max(4 * self.bricks[2] + window - 1, (3 + window + 7) // 8 * 8)


CUDA_TILING = Tiling(tiles=2, bricks=(1, 4, 2), chunk=2)
TRITON_TILE = (4, 4, 4)  # queries of a program, along T, H and W
TRITON_KEYS, TRITON_WARPS = 32, 4  # keys of a step, at least


def keys_of(frames: int, window: int, begin: int, end: int) -> tuple[int, int]:
    """The frames [first, last + 1) that queries of the frames [begin, end) see, of a grid of `frames`."""
    first, last = (min(max(t - window // 2, 0), frames - window) for t in (begin, end - 1))
    return first, last + window


def eager(q, k, v, window, slab=None):
    """The contract in plain torch, frame by frame with dense scores: for small grids. -> q's shape and dtype"""
    slab = slab or Slab(q.shape[1], 0, 0)
    height, width = q.shape[2:4]
    wide = torch.promote_types(q.dtype, torch.float32)
    seen_h, seen_w = (_seen(size, w, q.device) for size, w in zip((height, width), window[1:]))
    seen = (seen_h[:, None, :, None] & seen_w[None, :, None, :]).view(height * width, height * width)
    frames = []
    for t in range(slab.origin, slab.origin + q.shape[1]):
        first, end = keys_of(slab.frames, window[0], t, t + 1)
        near = slice(first - slab.key_origin, end - slab.key_origin)
        x_q, x_k, x_v = (x.flatten(1, 3).transpose(1, 2).to(wide) for x in (q[:, t - slab.origin, None], k[:, near], v[:, near]))
        scores = (x_q @ x_k.mT).masked_fill(~seen.repeat(1, window[0]), -float("inf"))
        attended = (scores.softmax(-1) @ x_v).to(q.dtype)
        frames.append(attended.transpose(1, 2).unflatten(1, (height, width)))
    return torch.stack(frames, 1)


def _seen(size: int, window: int, device: torch.device) -> torch.Tensor:
    """Which positions see which along an axis: bool [size, size]."""
    position = torch.arange(size, device=device)
    behind = position - (position - window // 2).clamp(0, size - window)[:, None]
    return (behind >= 0) & (behind < window)


@triton.jit
def _window_start(position, size, WINDOW: tl.constexpr):
    return tl.maximum(tl.minimum(position - WINDOW // 2, size - WINDOW), 0)


@triton.jit(do_not_specialize=["heads", "frames", "height", "width", "count", "origin", "key_origin"])
def _neighborhood_attention_kernel(
    p_q, p_k, p_v, p_out, heads, frames, height, width, count, origin, key_origin,
    q_batch, q_t, q_h, q_w, q_head, k_batch, k_t, k_h, k_w, k_head, v_batch, v_t, v_h, v_w, v_head,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TILE_T: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    # A program takes a tile of queries of one head; neighbours along W run at the same time.
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    tiles_w = tl.cdiv(width, TILE_W)
    tiles_h = tl.cdiv(height, TILE_H)
    tiles_t = tl.cdiv(origin + count, TILE_T) - origin // TILE_T
    tile = tl.program_id(0)
    w_0 = tile % tiles_w * TILE_W
    tile //= tiles_w
    h_0 = tile % tiles_h * TILE_H
    tile //= tiles_h
    t_0 = (origin // TILE_T + tile % tiles_t) * TILE_T
    tile //= tiles_t
    head = (tile % heads).to(tl.int64)
    b = (tile // heads).to(tl.int64)
    t_last = origin + count - 1

    # Queries outside of the grid compute their nearest neighbour's and are not stored.
    o_m = tl.arange(0, TILE_T * TILE_H * TILE_W)
    t = t_0 + o_m // (TILE_H * TILE_W)
    h = h_0 + o_m // TILE_W % TILE_H
    w = w_0 + o_m % TILE_W
    inside = (t >= origin) & (t <= t_last) & (h < height) & (w < width)
    t = tl.minimum(tl.maximum(t, origin), t_last)
    h = tl.minimum(h, height - 1)
    w = tl.minimum(w, width - 1)
    o_d = tl.arange(0, D)
    o_q = b * q_batch + (t - origin).to(tl.int64) * q_t + h.to(tl.int64) * q_h + w.to(tl.int64) * q_w + head * q_head
    b_q = tl.load(p_q + o_q[:, None] + o_d[None, :])
    start_t = _window_start(t, frames, KT)[:, None]
    start_h = _window_start(h, height, KH)[:, None]
    start_w = _window_start(w, width, KW)[:, None]

    # The keys of a step: ROWS rows of COLUMNS keys from the first row and column on that the tile sees.
    o_n = tl.arange(0, ROWS * COLUMNS)
    halo_t = _window_start(tl.maximum(t_0, origin), frames, KT)
    halo_h = _window_start(h_0, height, KH)
    key_w = _window_start(w_0, width, KW) + o_n % COLUMNS
    seen_w = (key_w[None, :] >= start_w) & (key_w[None, :] < start_w + KW)
    p_k += b * k_batch + head * k_head
    p_v += b * v_batch + head * v_head
    o_k = key_w.to(tl.int64) * k_w
    o_v = key_w.to(tl.int64) * v_w

    b_reference = tl.full((TILE_T * TILE_H * TILE_W,), LOWEST, tl.float32)
    b_sum = tl.zeros((TILE_T * TILE_H * TILE_W,), tl.float32)
    b_out = tl.zeros((TILE_T * TILE_H * TILE_W, D), tl.float32)
    planes = _window_start(tl.minimum(t_0 + TILE_T - 1, t_last), frames, KT) + KT - halo_t
    STEPS: tl.constexpr = (TILE_H + KH - 1 + ROWS - 1) // ROWS
    for step in range(planes * STEPS):
        key_t = halo_t + step // STEPS
        key_h = halo_h + step % STEPS * ROWS + o_n // COLUMNS
        exists = (key_h < height) & (key_w < width)
        plane = (key_t - key_origin).to(tl.int64)
        o_k_row = plane * k_t + key_h.to(tl.int64) * k_h + o_k
        o_v_row = plane * v_t + key_h.to(tl.int64) * v_h + o_v
        b_k = tl.load(p_k + o_k_row[None, :] + o_d[:, None], mask=exists[None, :], other=0)
        b_v = tl.load(p_v + o_v_row[:, None] + o_d[None, :], mask=exists[:, None], other=0)
        seen = seen_w & (key_h[None, :] >= start_h) & (key_h[None, :] < start_h + KH)
        seen = seen & (key_t >= start_t) & (key_t < start_t + KT)
        b_s = tl.where(seen, tl.dot(b_q, b_k, input_precision="ieee") * LOG2_E, -float("inf"))
        now = tl.maximum(b_reference, tl.max(b_s, 1))
        factor = tl.exp2(b_reference - now)
        b_p = tl.exp2(b_s - now[:, None])
        b_sum = b_sum * factor + tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(DTYPE), b_v, b_out * factor[:, None], input_precision="ieee")
        b_reference = now

    o_token = ((b * count + t - origin) * height + h) * width + w
    p_rows = p_out + ((o_token * heads + head) * D)[:, None] + o_d[None, :]
    tl.store(p_rows, (b_out / b_sum[:, None]).to(DTYPE), mask=inside[:, None])


def refusal(q, k, v, window, slab=None, implementation="triton") -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    if q.ndim != 6 or q.shape[5] != HEAD_DIM:
        return f"q: shape {list(q.shape)}, expected [B, T, H, W, heads, {HEAD_DIM}]"
    dtypes = DTYPES if implementation == "triton" else DTYPES[:2]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 6 or x.shape[:1] != q.shape[:1] or x.shape[2:] != q.shape[2:] or x.shape[1] != k.shape[1] and x is not q:
            return f"{name}: shape {list(x.shape)}, q: {list(q.shape)}, k: {list(k.shape)}; only the frames of q may differ"
        if x.dtype not in dtypes or x.dtype != q.dtype:
            return f"{name}: dtype {x.dtype}; expected one of {', '.join(map(str, dtypes))}, the same for q, k and v"
        if x.device.type not in DEVICE_TYPES or x.device != q.device:
            return f"{name}: on {x.device}; expected one device of type {' or '.join(DEVICE_TYPES)} for q, k and v"
        if x.numel() == 0:
            return f"{name}: empty"
        piece = 16 // x.element_size()
        if x.stride(5) != 1 or any(stride % piece for stride in x.stride()[:5]) or x.data_ptr() % 16:
            return f"{name}: heads must be contiguous and aligned to 16 bytes, got strides {x.stride()}"
    if len(window) != 3 or any(size not in range(1, MOST + 1, 2) for size in window):
        return f"window: {tuple(window)}, expected three odd sizes up to {MOST}"
    count, keys = q.shape[1], k.shape[1]
    if slab is None and count != keys:
        return f"k: {keys} frames, q has {count}, and no slab says where they lie"
    slab = slab or Slab(count, 0, 0)
    grid = (slab.frames, *q.shape[2:4])
    if any(size < least for size, least in zip(grid, window)):
        return f"window: {tuple(window)} is larger than the grid, {grid}"
    if not 0 <= slab.origin <= slab.frames - count:
        return f"slab: {count} frames from {slab.origin} on of {slab.frames}"
    first, end = keys_of(slab.frames, window[0], slab.origin, slab.origin + count)
    if slab.key_origin > first or slab.key_origin + keys < end:
        return f"k: frames {slab.key_origin} to {slab.key_origin + keys - 1}; the queries see {first} to {end - 1}"
    return None


def implementation_for(q) -> str:
    """The faster implementation that takes q: "cuda" on devices of capability 8.0 and later where cuda.core is installed."""
    fits = q.is_cuda and q.dtype in DTYPES[:2] and "cuda" in cuda.IMPLEMENTATIONS
    return "cuda" if fits and torch.cuda.get_device_capability(q.device) >= (8, 0) else "triton"


def launch(implementation, q, k, v, window, slab=None, tiling=CUDA_TILING):
    """Launch without checks; `refusal` must have returned None for these arguments."""
    batch, count, height, width, heads, _ = q.shape
    slab = slab or Slab(count, 0, 0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    strides = [stride for x in (q, k, v) for stride in x.stride()[:5]]
    with on_device(q):
        if implementation == "cuda":
            parameters, shared = _instance(q.device, q.dtype, tuple(window), tiling)
            sizes = (2 * tiling.tiles * tiling.bricks[0], 2 * tiling.bricks[1], 4 * tiling.bricks[2])
            tiles = _tiles((count, height, width), sizes) * batch * heads
            blocks = min(tiles, tiling.blocks * cuda.multiprocessors(q.device))
            threads = 32 * tiling.bricks[0] * tiling.bricks[1] * tiling.bricks[2]
            grid = (batch, slab.frames, height, width, heads, count, slab.origin, slab.key_origin)
            ints = [*cuda.addresses(q, k, v, out), *grid, *strides]
            cuda.launch(q.device, "neighborhood_attention", parameters, (blocks, 1), threads, ints, shared=shared)
        else:
            columns = max(triton.next_power_of_2(TRITON_TILE[2] + window[2] - 1), 8)
            # Tiles lie where they lie in the whole grid, so that a query has one place in its tile.
            reach = slab.origin % TRITON_TILE[0] + count, height, width
            _neighborhood_attention_kernel[(_tiles(reach, TRITON_TILE) * batch * heads,)](
                q, k, v, out, heads, slab.frames, height, width, count, slab.origin, slab.key_origin, *strides,
                *window, *TRITON_TILE, max(TRITON_KEYS // columns, 1), columns, HEAD_DIM, _LOG2_E, _LOWEST,
                num_warps=TRITON_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _tiles(grid, tile) -> int:
    count = 1
    for size, step in zip(grid, tile):
        count *= -(-size // step)
    return count


@functools.lru_cache(maxsize=64)
def _instance(device: torch.device, dtype: torch.dtype, window: tuple[int, int, int], tiling: Tiling) -> tuple[tuple, int]:
    """The kernel's template parameters and its bytes of shared memory: as many slots as the device has room for."""
    properties = torch.cuda.get_device_properties(device)
    room = min(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor // tiling.blocks - 1024)
    slot = 2 * tiling.chunk * tiling.pitch(window[2]) * 2 * HEAD_DIM + 16  # keys, values, and two barriers
    slots = min(room // slot, tiling.most_slots)
    return (dtype, *window, tiling.tiles, *tiling.bricks, tiling.chunk, slots, tiling.blocks), slots * slot


def neighborhood_attention(q, k, v, window, *, slab=None, implementation=None):
    """3-D neighbourhood attention with the window of `diffusers`' LTX-2.5 decoder, and of NATTEN's ``na3d``, at scale 1.

    Args:
        q, k, v: [B, T, H, W, heads, 64], bf16, fp16 or (Triton) fp32, of one dtype and device; last dimension contiguous, strides
            of multiples of 16 bytes.
        window: three odd sizes up to 11, along T, H and W; none larger than the grid.
        slab: where q, k and v are frames of a longer grid, a `Slab`. k and v must hold every frame that `keys_of` names.
        implementation: "cuda" or "triton"; the faster one that fits if None. Bits are the same only within one.

    Returns:
        A new contiguous tensor shaped like q. With a slab: the bits that these frames have in the whole grid's result.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout, or the window is larger than the grid; the
            message names it.
    """
    implementation = implementation or implementation_for(q)
    if reason := refusal(q, k, v, window, slab, implementation):
        raise ValueError(f"neighborhood_attention: {reason}")
    return launch(implementation, q, k, v, window, slab)
