"""QK-norm + split RoPE: RMSNorm across all heads, then rotation of (first half, second half) pairs; q and k in one launch.

Formula      rstd = rsqrt(sum(x²) / D + eps) in fp32; n = round(weight · (rstd · x)); then per head, with r = head_dim / 2,
             out[j]     = round(fma(-sin[j], n[j + r], n[j] · cos[j]))
             out[j + r] = round(fma( sin[j], n[j], n[j + r] · cos[j])),  all in fp32 up to the one final rounding.
Order        aten's vectorised layer-norm kernel in its RMS form: 128 threads a row; thread t adds elements 4t…4t+3 of each chunk
             of 512 to one accumulator, with FMA, in order; shuffles by 16, 8, 4, 2, 1; then (w0 + w2) + (w1 + w3).
Shapes       q [B, S_q, D], k [B, S_k, D], last dimension contiguous, D a multiple of 512 (1,024 in CUDA C++), head_dim 64 or
             128; weights [D]; cos and sin [B, H, S, r] in fp32 with a contiguous last dimension and equal strides, or in compact
             form (rope_tables.Rope). Without tables (text cross-attention) only the norm is computed; without norms only the
             rotation.
Dtypes       bf16, fp16, fp32; weights of the same dtype.
Verified on  NVIDIA H200.

Two implementations of this one contract: "cuda" (qk_norm_split_rope.cu, see cuda.py) and "triton", where cuda.core is missing
or its kernel does not verify.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..first_sight import numbered
from . import cuda
from .numerics import HALVES, lane_sum, quads
from .rope_tables import Rope
from .support import DEVICE_TYPES, DTYPES, is_untouched, layout, on_device, random

CHUNK = 512
CUDA_CHUNK = 1024  # lanes of two halves of a head share two chunks
HEAD_DIMS = (64, 128)
NO_ROPE, FULL, ONE_ROW, ROW_AND_COLUMNS = range(4)  # how the CUDA kernel finds a token's cos and sin
CANDIDATES = cuda.IMPLEMENTATIONS


def eager(norm_q, norm_k, q, k, rope_q, rope_k):
    """The host's arithmetic: its own norm modules, then diffusers' ``apply_split_rotary_emb``."""
    if norm_q is not None:
        q, k = norm_q(q), norm_k(k)
    if rope_q is None:
        return q, k
    return split_rope(q, *rope_q), split_rope(k, *rope_k)


def split_rope(x, cos, sin):
    """Rotate x [B, S, H·2r] by fp32 tables [B, H, S, r]. -> [B, S, H·2r] of x's dtype."""
    batch, heads, tokens, half = cos.shape
    pairs = x.reshape(batch, tokens, heads, 2, half).permute(3, 0, 2, 1, 4).float()
    first, second = pairs * cos
    first = torch.addcmul(first, -sin, pairs[1])
    second = torch.addcmul(second, sin, pairs[0])
    return torch.stack((first, second), dim=3).permute(0, 2, 1, 3, 4).reshape(batch, tokens, -1).to(x.dtype)


@triton.jit
def _rotate_row(
    p_x, p_weight, p_out, p_cos, p_sin, row, tokens, x_batch, x_token, rope_batch, rope_head, rope_token, eps,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = 512 // HEAD_DIM
    b = row // tokens
    s = row % tokens
    o_d = tl.arange(0, 512)
    p_x += b * x_batch + s * x_token + o_d
    rstd = 1.0
    if NORM:
        b_sum = tl.zeros((1, 128), tl.float32)
        for c in tl.static_range(D // 512):
            x_0, x_1, x_2, x_3 = quads(tl.load(p_x + c * 512).to(tl.float32), 1, 128)
            b_sum = tl.fma(x_0, x_0, b_sum)
            b_sum = tl.fma(x_1, x_1, b_sum)
            b_sum = tl.fma(x_2, x_2, b_sum)
            b_sum = tl.fma(x_3, x_3, b_sum)
        warps = lane_sum(tl.reshape(b_sum, (4, 32)), 4, 5, ORDER)
        low, high = tl.split(tl.permute(tl.reshape(warps, (2, 2)), (1, 0)))
        even, odd = tl.split(low + high)
        rstd = tl.rsqrt(tl.div_rn(even + odd, D * 1.0) + eps)
    for c in tl.static_range(D // 512):
        b_n = tl.load(p_x + c * 512)
        if NORM:
            b_weight = tl.load(p_weight + c * 512 + o_d).to(tl.float32)
            b_n = (b_weight * (rstd * b_n.to(tl.float32))).to(DTYPE)
        if ROPE:
            b_pair = tl.permute(tl.reshape(b_n.to(tl.float32), (HEADS, 2, HALF)), (0, 2, 1))
            first, second = tl.split(b_pair)
            o_rope = (c * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None] * rope_head + tl.arange(0, HALF)[None, :]
            o_rope += b * rope_batch + s * rope_token
            b_cos = tl.load(p_cos + o_rope)
            b_sin = tl.load(p_sin + o_rope)
            turned_first = tl.fma(-b_sin, second, first * b_cos)
            turned_second = tl.fma(b_sin, first, second * b_cos)
            b_pair = tl.permute(tl.join(turned_first, turned_second), (0, 2, 1))
            b_n = tl.reshape(b_pair, (512,)).to(DTYPE)
        tl.store(p_out + row * D + c * 512 + o_d, b_n)


@triton.jit(do_not_specialize=["batch", "tokens_q", "tokens_k"])
def _qk_norm_split_rope_kernel(
    p_q, p_k, p_weight_q, p_weight_k, p_out_q, p_out_k, p_cos_q, p_sin_q, p_cos_k, p_sin_k,
    batch, tokens_q, tokens_k, q_batch, q_token, k_batch, k_token,
    rope_q_batch, rope_q_head, rope_q_token, rope_k_batch, rope_k_head, rope_k_token, eps_q, eps_k,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Where q and k have as many rows they alternate, so that the k row finds the tables of its q row in L2.
    is_k = row >= batch * tokens_q
    index = row - batch * tokens_q
    if tokens_q == tokens_k:
        is_k = row % 2 == 1
        index = row // 2
    elif row < batch * tokens_q:
        index = row
    if is_k:
        _rotate_row(
            p_k, p_weight_k, p_out_k, p_cos_k, p_sin_k, index, tokens_k, k_batch, k_token,
            rope_k_batch, rope_k_head, rope_k_token, eps_k, D, HEAD_DIM, NORM, ROPE, ORDER,
        )  # fmt: skip
    else:
        _rotate_row(
            p_q, p_weight_q, p_out_q, p_cos_q, p_sin_q, index, tokens_q, q_batch, q_token,
            rope_q_batch, rope_q_head, rope_q_token, eps_q, D, HEAD_DIM, NORM, ROPE, ORDER,
        )  # fmt: skip


class Norm(NamedTuple):
    """What a compiled graph hands over of a ``torch.nn.RMSNorm``; computes the same."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm_key(norm):
    """What of a norm module the kernel depends on, or None for a module that must be called instead.

    Weights can be on another device (offload), wrapped (PEFT) or hooked; only a plain ``torch.nn.RMSNorm`` is read.
    """
    weight = _readable_weight(norm)
    return None if weight is None else (norm.eps, layout(weight))


def _readable_weight(norm):
    """The weight of a plain ``torch.nn.RMSNorm`` without hooks, or of a `Norm`; None for any other module."""
    if type(norm) is Norm:
        return norm.weight
    if type(norm) is not torch.nn.RMSNorm or norm.eps is None or not is_untouched(norm):
        return None
    weight = norm._parameters["weight"]  # five times as fast as norm.weight
    return weight if type(weight) is torch.nn.Parameter else None


def _heads(rope) -> int:
    return rope.compact.heads if isinstance(rope, Rope) else rope[0].shape[1]


def _rows_a_token(rope) -> int:
    return len(rope.compact.rows) if isinstance(rope, Rope) else 0


def _tables(rope, compact: bool) -> tuple:
    """cos, sin, columns and rows as the kernel takes them; None for what there is not."""
    if rope is None:
        return None, None, None, None
    if compact:
        return rope.compact.cos, rope.compact.sin, rope.compact.columns, rope.compact.rows
    return *rope, None, None


def is_plain(norm, x) -> bool:
    """Whether `norm` can be read instead of called, for rows like `x`'s."""
    weight = _readable_weight(norm)
    return weight is not None and weight.device == x.device and weight.dtype == x.dtype


def signature(norm_q, norm_k, q, k, rope_q, rope_k):
    norms = norm_q and (norm_key(norm_q), norm_key(norm_k))
    return layout(q), layout(k), norms, _rope_key(rope_q), _rope_key(rope_k), rope_q is rope_k


def _rope_key(rope):
    if rope is None:
        return None
    if isinstance(rope, Rope):
        compact = rope.compact
        return layout(compact.cos), compact.rows.shape, compact.heads
    return layout(rope[0]), layout(rope[1])


def _refusal_of_side(side, norm, x, rope, other) -> str | None:
    if x.dtype not in DTYPES or x.dtype != other.dtype:
        return f"{side}: dtype {x.dtype}; expected one of {', '.join(map(str, DTYPES))}, the same for q and k"
    if x.device.type not in DEVICE_TYPES or x.device != other.device:
        return f"{side}: on {x.device}; expected one device of type {' or '.join(DEVICE_TYPES)} for q and k"
    if x.shape[0] != other.shape[0] or x.shape[2] != other.shape[2]:
        return f"{side}: shape {list(x.shape)} beside {list(other.shape)}; batch and width must agree"
    if x.shape[2] % CHUNK:
        return f"{side}: width {x.shape[2]} is not a multiple of {CHUNK}"
    if x.stride(2) != 1 or x.stride(1) % 4 or x.stride(0) % 4 or x.data_ptr() % 16:
        return f"{side}: rows must be contiguous and aligned to four elements, got strides {x.stride()}"
    if x.numel() == 0:
        return f"{side}: empty"
    if norm is not None:
        weight = _readable_weight(norm)
        if weight is None:
            return f"norm_{side}: not a plain torch.nn.RMSNorm with a weight, so it is called"
        if weight.dtype != x.dtype or weight.device != x.device or weight.numel() != x.shape[2]:
            return f"norm_{side}: weight is {weight.dtype} on {weight.device}, {side} {x.dtype} on {x.device}"
        if weight.stride() != (1,) or weight.data_ptr() % 16:
            place = f"strides {weight.stride()} and address {weight.data_ptr():#x}"
            return f"norm_{side}: weight must be contiguous and aligned to 16 bytes, got {place}"
    if rope is None:
        return None
    if isinstance(rope, Rope):
        return _refusal_of_compact(side, x, rope.compact)
    cos, sin = rope
    for name, table in (("cos", cos), ("sin", sin)):
        if table.ndim != 4 or table.shape[0] != x.shape[0] or table.shape[2] != x.shape[1]:
            return f"{name}_{side}: shape {list(table.shape)}, expected [B, H, S, r] for {side} {list(x.shape)}"
        if table.shape[1] * table.shape[3] * 2 != x.shape[2] or table.shape[3] * 2 not in HEAD_DIMS:
            return f"{name}_{side}: shape {list(table.shape)}; head_dim must be 64 or 128 and H·2r = {x.shape[2]}"
        if table.dtype != torch.float32 or table.device != x.device:
            return f"{name}_{side}: {table.dtype} on {table.device}, expected torch.float32 on {x.device}"
        if table.stride(3) != 1 or any(stride % 4 for stride in table.stride()[:3]) or table.data_ptr() % 16:
            return f"{name}_{side}: rows must be contiguous and aligned to four elements, got strides {table.stride()}"
    if cos.stride() != sin.stride():
        return f"sin_{side}: strides {sin.stride()}, expected cos_{side}'s {cos.stride()}"
    return None


def _refusal_of_compact(side, x, compact) -> str | None:
    if compact.rows.shape[1:] != x.shape[:2] or compact.cos.shape[1] * 2 != x.shape[2]:
        return (
            f"rope_{side}: for {list(compact.rows.shape[1:])} tokens of {compact.cos.shape[1]} channels, {side} {list(x.shape)}"
        )
    if x.shape[2] // compact.heads not in HEAD_DIMS:
        return f"rope_{side}: head_dim must be 64 or 128, got {x.shape[2] // compact.heads}"
    if compact.cos.device != x.device:
        return f"rope_{side}: on {compact.cos.device}, {side} on {x.device}"
    return None


def refusal(norm_q, norm_k, q, k, rope_q, rope_k) -> str | None:
    """Why neither kernel can take these arguments, naming one; None if they can. Reads metadata only."""
    if (norm_q is None) != (norm_k is None) or (rope_q is None) != (rope_k is None):
        return "norms and tables: give both or neither"
    if norm_q is None and rope_q is None:
        return "norms and tables: nothing to do"
    for side, x in (("q", q), ("k", k)):
        if x.ndim != 3:
            return f"{side}: expected rank 3 [B, S, D], got {list(x.shape)}"
    reason = _refusal_of_side("q", norm_q, q, rope_q, k) or _refusal_of_side("k", norm_k, k, rope_k, q)
    if reason is None and rope_q is not None and _heads(rope_q) != _heads(rope_k):
        return f"rope_k: {_heads(rope_k)} heads, rope_q {_heads(rope_q)}"
    return reason


def rehearsals(norm_q, norm_k, q, k, rope_q, rope_k):
    """Synthetic rows, enough to convict a wrong summation order, which a short live input may not."""
    x_q, x_k = random(2, 1, 4096, q.shape[2], dtype=q.dtype, device=q.device)
    rope = None
    if rope_q is not None:
        heads = _heads(rope_q)
        angle = random(1, 4096, heads, q.shape[2] // heads // 2, dtype=torch.float32, device=q.device).transpose(1, 2)
        rope = angle.cos(), angle.sin()
    yield norm_q, norm_k, x_q, x_k, rope, rope


def launch(implementation, norm_q, norm_k, q, k, rope_q, rope_k):
    """Launch without checks; `refusal` must have returned None for this layout."""
    (batch, tokens_q, width), tokens_k = q.shape, k.shape[1]
    weight_q, eps_q = (None, 0.0) if norm_q is None else (norm_q.weight, norm_q.eps)
    weight_k, eps_k = (None, 0.0) if norm_k is None else (norm_k.weight, norm_k.eps)
    head_dim = HEAD_DIMS[-1] if rope_q is None else width // _heads(rope_q)
    compact = implementation == "cuda" and _rows_a_token(rope_q) == _rows_a_token(rope_k) > 0
    cos_q, sin_q, columns_q, rows_q = _tables(rope_q, compact)
    cos_k, sin_k, columns_k, rows_k = _tables(rope_k, compact)
    out_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    out_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    norm, rope = norm_q is not None, rope_q is not None
    strides = (*cos_q.stride()[:3], *cos_k.stride()[:3]) if rope and not compact else (0, 0, 0, 0, 0, 0)
    tensors = (q, k, weight_q, weight_k, out_q, out_k)
    sizes = (tokens_q, tokens_k, *q.stride()[:2], *k.stride()[:2], *strides)
    with on_device(q):
        if implementation == "cuda":
            if width % CUDA_CHUNK:
                raise ValueError(f"q: width {width} is not a multiple of {CUDA_CHUNK}, which the CUDA kernel needs")
            kind = (FULL, ONE_ROW, ROW_AND_COLUMNS)[len(rows_q) if compact else 0] if rope else NO_ROPE
            paired = rope and rope_q is rope_k and tokens_q == tokens_k
            parameters = (q.dtype, width, head_dim, norm, kind, paired)
            blocks = (tokens_q if paired else tokens_q + tokens_k, batch)
            tables = (cos_q, sin_q, columns_q, rows_q, cos_k, sin_k, columns_k, rows_k)
            ints = [*cuda.addresses(*tensors, *tables), *sizes]
            cuda.launch(q.device, "qk_norm_split_rope", parameters, blocks, 128, ints, (eps_q, eps_k))
        else:
            # More warps make the split trees shuffle through shared memory: 25,000 µs at 8 against 115 at 4.
            _qk_norm_split_rope_kernel[(batch * (tokens_q + tokens_k),)](
                *tensors, cos_q, sin_q, cos_k, sin_k, batch, *sizes, eps_q, eps_k,
                width, head_dim, norm, rope, HALVES, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out_q, out_k


@torch.library.custom_op("ltx2_fastpath::qk_norm_split_rope", mutates_args=())
def _op(
    site: int,
    q: torch.Tensor,
    k: torch.Tensor,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    cos_q: torch.Tensor | None,
    sin_q: torch.Tensor | None,
    cos_k: torch.Tensor | None,
    sin_k: torch.Tensor | None,
    eps_q: float,
    eps_k: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    norm_q = None if weight_q is None else Norm(weight_q, eps_q)
    norm_k = None if weight_k is None else Norm(weight_k, eps_k)
    rope_q = None if cos_q is None else (cos_q, sin_q)
    rope_k = rope_q if cos_k is None else (cos_k, sin_k)
    found = numbered(site)
    # Numbers are this process's own; a graph that another one saved brings others, which here may stand for another op.
    compute = found if found is not None and found.op.eager is eager else eager
    return compute(norm_q, norm_k, q, k, rope_q, rope_k)


@_op.register_fake
def _(site, q, k, weight_q, weight_k, cos_q, sin_q, cos_k, sin_k, eps_q, eps_k):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))


def traceable(norm_q, norm_k, x, width: int, heads: int) -> bool:
    """Whether `traced` takes these norms and rows of `width` elements, of x's dtype and device. Asked while Dynamo traces."""
    known = x.device.type in DEVICE_TYPES and x.dtype in DTYPES and width % CUDA_CHUNK == 0 and width // heads in HEAD_DIMS
    # `norm.forward is not None` is there to be read: what is read guards the graph, so a forward that is replaced later is seen.
    return known and all(norm.forward is not None and is_plain(norm, x) for norm in (norm_q, norm_k))


def traced(site, norm_q, norm_k, q, k, rope_q, rope_k=None):
    """What `site`, a `FirstSight` of this op, gives, as one opaque node of a compiled graph, which verifies when it first runs.

    Without `rope_k` k takes q's tables; that two tuples are the same one cannot be traced.

    Measured beside Inductor's own code for this (H200, LTX-2.3): a compiled forward takes 353.5 instead of 368.1 ms at
    512x768x121 and 948.2 instead of 968.0 at 704x1280x121.
    """
    cos_q, sin_q = rope_q or (None, None)
    cos_k, sin_k = rope_k or (None, None)
    return _op(site.number, q, k, norm_q.weight, norm_k.weight, cos_q, sin_q, cos_k, sin_k, norm_q.eps, norm_k.eps)


def qk_norm_split_rope(norm_q, norm_k, q, k, rope_q=None, rope_k=None, *, implementation=CANDIDATES[0]):
    """RMSNorm across heads and split RoPE of q and k in one launch.

    Args:
        norm_q, norm_k: plain ``torch.nn.RMSNorm`` modules with weights [D], or None for the rotation alone.
        q, k: [B, S_q, D] and [B, S_k, D], bf16, fp16 or fp32; D a multiple of 512, last dimension contiguous.
        rope_q, rope_k: (cos, sin), fp32 [B, H, S, r] each with any strides but a contiguous r of 32 or 64; a
            ``rope_tables.Rope``; or None. Give the same object twice where q and k share their tables.
        implementation: "cuda" or "triton".

    Returns:
        Two new contiguous tensors shaped like q and k.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, shape or layout; the message names it.
    """
    if torch.compiler.is_compiling():
        return eager(norm_q, norm_k, q, k, rope_q, rope_k)
    if reason := refusal(norm_q, norm_k, q, k, rope_q, rope_k):
        raise ValueError(f"qk_norm_split_rope: {reason}")
    return launch(implementation, norm_q, norm_k, q, k, rope_q, rope_k)
