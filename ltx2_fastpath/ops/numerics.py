"""Summation orders that the Triton kernels share.

Equality with eager torch hangs on two things: where a value is rounded to the tensor's dtype, and in which order a sum is
taken. Rounding is a plain ``.to(dtype)`` at each point where eager stores a tensor; every kernel is launched with
``enable_fp_fusion=False`` so that the compiler adds no fused multiply-adds of its own. The orders are spelled out here.
"""

import triton
import triton.language as tl

# How torch's generic reduction combines the 32 lanes of a warp: torch 2.9 and later shuffle by 16, 8, 4, 2, 1; earlier
# releases by 1, 2, 4, 8, 16. FirstSight tries them in this sequence.
HALVES, PAIRS = 0, 1
WARP_ORDERS = (HALVES, PAIRS)


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


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def warp_sum(lanes, ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, SHUFFLE: tl.constexpr):
    """Sum [ROWS, LANES = 2^LEVELS] over its lanes by halves, as a warp does. -> [ROWS]

    With SHUFFLE, for threads that hold two neighbouring lanes: those of each kind are added by Triton's own reduction, which
    shuffles by halves too (in the releases known; the interpreter's does not), and the two kinds at last.
    """
    if SHUFFLE:
        even, odd = tl.split(tl.reshape(lanes, (ROWS, LANES // 2, 2)))
        total = tl.reduce(even, 1, _plus) + tl.reduce(odd, 1, _plus)
    else:
        total = lane_sum(lanes, ROWS, LEVELS, 0)
    return total
