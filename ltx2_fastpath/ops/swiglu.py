"""SwiGLU's activation, ``silu(gate) * up``, in one launch and into a given buffer.

Formula      out = round(round(gate / (1 + exp(-gate))) · up), where round is to the dtype; exp and the division in fp32.
Order        pointwise. torch's exponential is CUDA's expf, which is libdevice's; the rehearsal runs every 16-bit gate, so for
             bf16 and fp16 equality is proved by exhaustion.
Shapes       gate, up and out contiguous and of one shape: two products, as the decoder has them.
Dtypes       bf16, fp16, fp32, the same for all.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .support import DEVICE_TYPES, DTYPES, INTERPRETED, layout, on_device, random

# Whose exponential: libdevice's, which the interpreter has not, or Triton's own approximation.
CANDIDATES = ("triton",) if INTERPRETED else ("libdevice", "triton")
BLOCK, WARPS = 2048, 4


def eager(gate, up, out=None):
    """The host's arithmetic. A new tensor whatever `out` is: first sight compares it with what the kernel wrote there."""
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _swiglu_kernel(p_gate, p_up, p_out, count, LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_x < count
    b_gate = tl.load(p_gate + o_x, mask=inside).to(tl.float32)
    b_up = tl.load(p_up + o_x, mask=inside).to(tl.float32)
    b_exp = libdevice.exp(-b_gate) if LIBDEVICE else tl.exp(-b_gate)
    b_silu = tl.div_rn(b_gate, 1.0 + b_exp).to(DTYPE).to(tl.float32)
    tl.store(p_out + o_x, (b_silu * b_up).to(DTYPE), mask=inside)


def signature(gate, up, out=None):
    return layout(gate), layout(up), layout(out)


def refusal(gate, up, out=None) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    for name, x in (("gate", gate), ("up", up), ("out", out)):
        if x is None:
            continue
        if x.dtype not in DTYPES or x.dtype != gate.dtype:
            return f"{name}: dtype {x.dtype}; expected one of {', '.join(map(str, DTYPES))}, the same for all"
        if x.device.type not in DEVICE_TYPES or x.device != gate.device:
            return f"{name}: on {x.device}; expected one device of type {' or '.join(DEVICE_TYPES)} for all"
        if x.shape != gate.shape or not x.is_contiguous():
            return f"{name}: shape {list(x.shape)}, strides {x.stride()}; expected contiguous {list(gate.shape)}"
        if x.numel() == 0:
            return f"{name}: empty"
    if out is not None and out.data_ptr() in (gate.data_ptr(), up.data_ptr()):
        return "out: is gate or up, which first sight would find overwritten"
    return None


def rehearsals(gate, up, out=None):
    """Every value that a 16-bit gate can have; for fp32 a sweep of as many."""
    if gate.dtype == torch.float32:
        values = torch.linspace(-30, 30, 65536, dtype=gate.dtype, device=gate.device)
    else:
        values = torch.arange(-32768, 32768, device=gate.device).to(torch.int16).view(gate.dtype)
    yield values, torch.ones_like(values)
    yield values, random(65536, dtype=gate.dtype, device=gate.device)


def launch(candidate, gate, up, out=None):
    """Launch without checks; `refusal` must have returned None for this layout."""
    out = torch.empty_like(gate) if out is None else out
    count = gate.numel()
    with on_device(gate):
        _swiglu_kernel[(triton.cdiv(count, BLOCK),)](
            gate, up, out, count, candidate == "libdevice", BLOCK, num_warps=WARPS, enable_fp_fusion=False
        )
    return out


def swiglu(gate, up, out=None, *, candidate=CANDIDATES[0]):
    """``silu(gate) * up`` in one launch.

    Args:
        gate, up: contiguous, of one shape, bf16, fp16 or fp32.
        out: where the result goes, contiguous and of the same shape, neither gate nor up; or None for a new tensor.
        candidate: one of ``CANDIDATES``.

    Returns:
        `out`, or a new tensor. (A site that runs the eager chain returns a new one, and leaves `out` as it is.)

    Raises:
        ValueError: an argument has the wrong dtype, device, shape or layout; the message names it.
    """
    if reason := refusal(gate, up, out):
        raise ValueError(f"swiglu: {reason}")
    return launch(candidate, gate, up, out)
