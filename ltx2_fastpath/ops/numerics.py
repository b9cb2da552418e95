"""Rounding and reduction-order helpers that the Triton kernels share.

Equality with eager torch hangs on two things: where a value is rounded to the tensor's dtype, and in which order a sum is
taken. Rounding is a plain ``.to(dtype)`` at each point where eager stores a tensor; every kernel is launched with
``enable_fp_fusion=False`` so that the compiler adds no fused multiply-adds of its own. The orders are spelled out here.
"""

import contextlib
import types
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
# Under Triton's interpreter (TRITON_INTERPRET=1) the kernels run on CPU tensors, which is how they are tested anywhere.
DEVICE_TYPES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# How torch's generic reduction combines the 32 lanes of a warp: torch 2.9 and later shuffle by 16, 8, 4, 2, 1; earlier
# releases by 1, 2, 4, 8, 16. FirstSight tries them in this sequence.
HALVES, PAIRS = 0, 1
WARP_ORDERS = (HALVES, PAIRS)


def is_untouched(module: torch.nn.Module) -> bool:
    """Whether calling `module` calls its class's forward: no hooks, no other forward. (Removed hooks leave that one, bound.)"""
    if "forward" in module.__dict__:
        forward = module.__dict__["forward"]
        bound = isinstance(forward, types.MethodType) and forward.__self__ is module
        if not bound or forward.__func__ is not type(module).forward:
            return False
    return not (module._forward_hooks or module._forward_pre_hooks)


_HERE = contextlib.nullcontext()


def on_device(x: torch.Tensor):
    """A context in which `x`'s device is the current one; costs a comparison where it already is."""
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        return torch.cuda.device(x.device)
    return _HERE


class IndexedRows(NamedTuple):
    """A tensor [B, S, D] of which few rows are distinct: values [n, D] and, for each token, its row: index int32 [B, S]."""

    values: torch.Tensor
    index: torch.Tensor

    def full(self) -> torch.Tensor:
        """The tensor itself, [B, S, D]."""
        return self.values[self.index]


def full(x):
    """`x` as a tensor."""
    return x.full() if isinstance(x, IndexedRows) else x


def layout(x: torch.Tensor | IndexedRows | None):
    """What a kernel's fitness can depend on: the metadata of a tensor and its alignment, hashable."""
    if x is None:
        return None
    if isinstance(x, IndexedRows):
        return layout(x.values), layout(x.index)
    return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal values for a rehearsal, from a generator of our own: the caller's random state must not move."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


@triton.jit
def lane_sum(lanes, ROWS: tl.constexpr, LEVELS: tl.constexpr, ORDER: tl.constexpr):
    """Sum [ROWS, 2^LEVELS] over its lanes as torch does: by halves down to a warp, then by halves or adjacent pairs. -> [ROWS]"""
    for level in tl.static_range(LEVELS):
        if ORDER == 0 or LEVELS - level > 5:
            low, high = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, 1 << (LEVELS - level - 1))), (0, 2, 1)))
        else:
            low, high = tl.split(tl.reshape(lanes, (ROWS, 1 << (LEVELS - level - 1), 2)))
        lanes = low + high
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def quads(values, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Split [ROWS, 4·LANES] into the four elements that each lane owns. -> four of [ROWS, LANES]"""
    even, odd = tl.split(tl.reshape(values, (ROWS, LANES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
