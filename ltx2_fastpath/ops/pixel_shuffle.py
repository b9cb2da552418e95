"""Channels-last 3-D pixel shuffle of the diffusion decoder's upsamplers, without its duplicate first frame, in one copy.

Formula      out[b, t·s_t + i, h·s_h + j, w·s_w + k, c] = x[b, t, h, w, c, i, j, k], channels packed (c, i, j, k).
Shapes       x [B, T, H, W, C·s_t·s_h·s_w], evenly spaced tokens with contiguous channels, C and the strides powers of two; result
             [B, T·s_t, H·s_h, W·s_w, C], or that without its first frame, laid out as the host's slice of the whole.
Dtypes       bf16, fp16, fp32.
"""

import math

import triton
import triton.language as tl

from .support import DEVICE_TYPES, DTYPES, layout, on_device, token_stride

CANDIDATES = (None,)
ELEMENTS, WARPS = 4096, 4  # that a program takes, in whole tokens, and its warps


def eager(x, stride, drop):
    """The host's arithmetic."""
    s_t, s_h, s_w = stride
    batch, frames, height, width, packed = x.shape
    x = x.reshape(batch, frames, height, width, packed // math.prod(stride), s_t, s_h, s_w)
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(batch, frames * s_t, height * s_h, width * s_w, -1)
    return x[:, 1:] if drop else x


@triton.jit(do_not_specialize=["frames", "height", "width"])
def _pixel_shuffle_kernel(
    p_x, p_out, frames, height, width, x_batch, x_token, drop: tl.constexpr,
    C: tl.constexpr, S_T: tl.constexpr, S_H: tl.constexpr, S_W: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program takes tokens of one line of the grid and some of their channels: [TOKENS, BLOCK_C, positions].
    S: tl.constexpr = S_T * S_H * S_W
    blocks = tl.cdiv(width, TOKENS)
    line = tl.program_id(0) // blocks
    h = line % height
    t = line // height % frames
    b = (line // (height * frames)).to(tl.int64)
    w = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    token = ((t * height + h) * width + w).to(tl.int64)
    o_x = (b * x_batch + token * x_token)[:, None] + tl.program_id(1) * BLOCK_C * S + tl.arange(0, BLOCK_C * S)[None, :]
    b_x = tl.load(p_x + o_x, mask=(w < width)[:, None])
    w = w[:, None, None]
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :, None]
    s = tl.arange(0, S)[None, None, :]
    frame = t * S_T + s // (S_H * S_W)
    o_out = ((b * frames * S_T + frame) * (height * S_H) + h * S_H + s // S_W % S_H) * (width * S_W) + w * S_W + s % S_W
    tl.store(p_out + o_out * C + c, tl.reshape(b_x, (TOKENS, BLOCK_C, S)), mask=(w < width) & (frame >= drop))


def signature(x, stride, drop):
    return layout(x), tuple(stride), drop


def refusal(x, stride, drop) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    if x.ndim != 5:
        return f"x: expected rank 5 [B, T, H, W, C·s_t·s_h·s_w], got {list(x.shape)}"
    if x.dtype not in DTYPES or x.device.type not in DEVICE_TYPES:
        return f"x: {x.dtype} on {x.device}; expected {', '.join(map(str, DTYPES))} on {' or '.join(DEVICE_TYPES)}"
    channels, rest = divmod(x.shape[4], math.prod(stride))
    if rest or any(size & (size - 1) for size in (channels, *stride)):
        return f"stride: {tuple(stride)} of {x.shape[4]} channels; expected powers of two"
    if x.numel() == 0 or x.shape[:4].numel() >= 2**31:
        return f"x: {x.shape[:4].numel()} tokens, expected 1 to 2^31 - 1"
    if x.stride(4) != 1 or token_stride(x, 1) is None:
        return f"x: tokens must be evenly spaced and channels contiguous, got strides {x.stride()}"
    return None


def rehearsals(x, stride, drop):
    """Nothing: a copy has no arithmetic."""
    return ()


def launch(candidate, x, stride, drop):
    """Launch without checks; `refusal` must have returned None for this layout."""
    batch, frames, height, width, packed = x.shape
    s_t, s_h, s_w = stride
    channels = packed // math.prod(stride)
    out = x.new_empty(batch, frames * s_t, height * s_h, width * s_w, channels)
    block_c = min(channels, max(1, ELEMENTS // math.prod(stride)))
    tokens = max(1, ELEMENTS // (block_c * math.prod(stride)))
    with on_device(x):
        _pixel_shuffle_kernel[(batch * frames * height * triton.cdiv(width, tokens), channels // block_c)](
            x, out, frames, height, width, x.stride(0), token_stride(x, 1), int(drop),
            channels, s_t, s_h, s_w, tokens, block_c, num_warps=WARPS,
        )  # fmt: skip
    return out[:, 1:] if drop else out


def pixel_shuffle(x, stride, drop):
    """Channels to positions, as the decoder's upsamplers do it.

    Args:
        x: [B, T, H, W, C·s_t·s_h·s_w], bf16, fp16 or fp32, tokens evenly spaced.
        stride: (s_t, s_h, s_w).
        drop: whether the result's first frame is left out.

    Returns:
        A new tensor [B, T·s_t, H·s_h, W·s_w, C], or a view of one without its first frame, which is not written then.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.
    """
    if reason := refusal(x, stride, drop):
        raise ValueError(f"pixel_shuffle: {reason}")
    return launch(CANDIDATES[0], x, stride, drop)
