"""Head gate: ``out * 2·sigmoid(logits)`` per head, in one launch.

Formula      g = round(2 · round(1 / (1 + exp(-logit)))) in the dtype of the logits; out = round(x · g).
Shapes       x [B, S, H, d] with any strides but a contiguous d; logits [B, S, H] likewise. Result [B, S, H·d], contiguous.
Dtypes       bf16, fp16, fp32, the same for both.
Order        pointwise. torch's exp and division are not the hardware's approximations; the rehearsal runs every 16-bit logit,
             so for bf16 and fp16 equality is proved by exhaustion.
Verified on  NVIDIA H200.
"""

import torch
import triton
import triton.language as tl

from . import cuda
from .support import DEVICE_TYPES, DTYPES, layout, on_device, random

CANDIDATES = cuda.IMPLEMENTATIONS


def eager(x, logits):
    """The host's arithmetic (both LTX-2 attention processors)."""
    gates = 2.0 * torch.sigmoid(logits)
    return (x * gates.unsqueeze(-1)).flatten(2, 3)


@triton.jit(do_not_specialize=["tokens"])
def _head_gate_kernel(
    p_x, p_logits, p_out, tokens, x_batch, x_token, x_head, logits_batch, logits_token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    b = row // tokens
    t = row % tokens
    o_h = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_h < HEADS)[:, None] & (o_d < HEAD_DIM)[None, :]
    b_logit = tl.load(p_logits + b * logits_batch + t * logits_token + o_h, mask=o_h < HEADS).to(tl.float32)
    b_sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-b_logit)).to(DTYPE).to(tl.float32)
    b_gate = (2.0 * b_sigmoid).to(DTYPE).to(tl.float32)
    o_x = b * x_batch + t * x_token + o_h[:, None] * x_head + o_d[None, :]
    b_x = tl.load(p_x + o_x, mask=inside).to(tl.float32)
    o_out = row * HEADS * HEAD_DIM + o_h[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_out + o_out, (b_x * b_gate[:, None]).to(DTYPE), mask=inside)


def signature(x, logits):
    return layout(x), layout(logits)


def refusal(x, logits) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    if x.ndim != 4:
        return f"x: expected rank 4 [B, S, H, d], got {list(x.shape)}"
    if logits.shape != x.shape[:3]:
        return f"logits: shape {list(logits.shape)}, expected {list(x.shape[:3])}"
    if x.dtype not in DTYPES or logits.dtype != x.dtype:
        return f"logits: dtype {logits.dtype}, x: {x.dtype}; expected one of {', '.join(map(str, DTYPES))} for both"
    if x.device.type not in DEVICE_TYPES or logits.device != x.device:
        return f"logits: on {logits.device}, x: on {x.device}; expected one device of type {' or '.join(DEVICE_TYPES)}"
    if x.shape[3] % 4:
        return f"x: head_dim {x.shape[3]} is not a multiple of 4"
    if x.stride(3) != 1 or any(stride % 4 for stride in x.stride()[:3]) or x.data_ptr() % (4 * x.element_size()):
        return f"x: heads must be contiguous and aligned to four elements, got strides {x.stride()}"
    if logits.stride(2) != 1:
        return f"logits: the last dimension must be contiguous, got strides {logits.stride()}"
    if x.numel() == 0:
        return "x: empty"
    return None


def rehearsals(x, logits):
    """Every value that a 16-bit logit can have; for fp32 a sweep of as many."""
    heads = x.shape[2]
    if x.dtype == torch.float32:
        values = torch.linspace(-30, 30, 65536, dtype=x.dtype, device=x.device)
    else:
        values = torch.arange(-32768, 32768, device=x.device).to(torch.int16).view(x.dtype)
    values = values[: values.numel() // heads * heads].view(1, -1, heads)
    yield random(*values.shape, x.shape[3], dtype=x.dtype, device=x.device), values


def launch(implementation, x, logits):
    """Launch without checks; `refusal` must have returned None for this layout."""
    batch, tokens, heads, head_dim = x.shape
    out = torch.empty((batch, tokens, heads * head_dim), dtype=x.dtype, device=x.device)
    sizes = (tokens, *x.stride()[:3], *logits.stride()[:2])
    with on_device(x):
        if implementation == "cuda":
            parameters = (x.dtype, heads, head_dim)
            ints = [*cuda.addresses(x, logits, out), *sizes]
            cuda.launch(x.device, "head_gate", parameters, (tokens, batch), 256, ints)
        else:
            block_d = triton.next_power_of_2(head_dim)
            block_h = min(triton.next_power_of_2(heads), max(1, 2048 // block_d))
            _head_gate_kernel[(batch * tokens, triton.cdiv(heads, block_h))](
                x, logits, out, *sizes, heads, head_dim, block_h, block_d, num_warps=4, enable_fp_fusion=False
            )
    return out
