"""qk_norm_rope_3d: RMSNorm of each head, query scale and 3-D RoPE of q and k in one launch, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host
from test_ops_rms_norm_modulate import hooked, rsqrt, shifted

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import qk_norm_rope_3d as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)
GRID = (3, 2, 5)


def make_attention(normal, *, heads=2, head_dim=64, dtype=torch.float32):
    attention = host.LTX2VideoVaeNeighborhoodAttention(heads * head_dim, (3, 3, 3), head_dim=head_dim)
    attention = attention.to(dtype).requires_grad_(False)
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.copy_(normal(head_dim))
    return attention


def make_args(normal, *, grid=GRID, batch=2, heads=2, head_dim=64, dtype=torch.float32, scale=None):
    attention = make_attention(normal, heads=heads, head_dim=head_dim, dtype=dtype)
    q, k = (normal(batch, *grid, heads, head_dim, dtype=dtype) for _ in range(2))
    rope = op.tables(attention.rope, grid, torch.device("cpu"))
    return attention.norm_q, attention.norm_k, scale or attention.scale, q, k, rope


def contract_of_side(norm, scale, x, rope):
    """The module's docstring in plain torch, the sum in the promised order. (Squares are exact, so FMA makes no difference.)"""
    values = x.float()
    lanes = torch.zeros(x.shape[:-1] + (32,))
    for element in values.unflatten(-1, (-1, 4)).unbind(-1):
        lanes[..., : x.shape[-1] // 4] += element * element
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, dim=-1)
        lanes = low + high
    rstd = rsqrt(lanes / x.shape[-1] + norm.eps)
    normed = (norm.weight.float() * (rstd * values)).to(x.dtype) * scale
    frames = slice(rope.origin, rope.origin + x.shape[1])
    cos, sin = (
        torch.cat([t[frames, None, None].expand(*x.shape[1:4], -1), h[None, :, None].expand(*x.shape[1:4], -1),
                   w[None, None].expand(*x.shape[1:4], -1)], dim=-1)[:, :, :, None]
        for t, h, w in (rope.axes(rope.cos), rope.axes(rope.sin))
    )  # fmt: skip
    even, odd = normed.float()[..., ::2], normed.float()[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def contract(norm_q, norm_k, scale, q, k, rope):
    return contract_of_side(norm_q, scale, q, rope), contract_of_side(norm_k, 1.0, k, rope)


def assert_close(actual, expected, norm, scale, x):
    """Within what another order of the sum and a rounding to the dtype at each step can do; a rotation mixes two values."""
    fp32, dtype = torch.finfo(torch.float32).eps / 2, torch.finfo(x.dtype).eps
    size = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], norm.weight.double(), norm.eps).abs() * scale
    size = size.unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*x.shape[:-1], -1, 2).flatten(-2)
    assert ((actual.double() - expected.double()).abs() <= size * (fp32 * (x.shape[-1] + 8) + 2 * dtype)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("heads, head_dim", [(2, 64), (3, 8), (1, 128)])
def test_eager_chain_is_the_hosts(normal, dtype, heads, head_dim):
    attention = make_attention(normal, heads=heads, head_dim=head_dim, dtype=dtype)
    x = normal(2, *GRID, heads * head_dim, dtype=dtype)
    q, k = (project(x).view(2, *GRID, heads, head_dim) for project in (attention.to_q, attention.to_k))
    rope = op.tables(attention.rope, GRID, x.device)
    found = op.eager(attention.norm_q, attention.norm_k, attention.scale, q, k, rope)
    assert same_bits(found, attention.project_qkv(x)[:2])
    for origin in (1, 2):  # a part of the frames turns as it does in the whole
        part = op.eager(attention.norm_q, attention.norm_k, attention.scale, q[:, origin:], k[:, origin:], rope.slab(origin))
        assert same_bits(part, [whole[:, origin:] for whole in found])


@pytest.mark.parametrize("head_dim, pairs", [(64, (8, 12, 12)), (128, (16, 24, 24)), (8, (0, 2, 2)), (16, (2, 3, 3))])
def test_tables_are_the_hosts_angles(head_dim, pairs):
    embed = host.LTX2VideoVaeRotaryPosEmbed3D(head_dim)
    rope = op.tables(embed, (5, 40, 300), torch.device("cpu"))
    assert rope.pairs == pairs and rope.cos.dtype == torch.float32
    for size, dim, cos, sin in zip(rope.grid, embed.rope_dim_split, rope.axes(rope.cos), rope.axes(rope.sin)):
        angles = torch.arange(size, dtype=torch.float32)[:, None] * embed._inv_freqs(dim, torch.device("cpu"))[None]
        assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())


@pytest.mark.parametrize("candidate", op.CANDIDATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, head_dim", [(4, 64), (3, 8), (1, 16), (2, 128)])
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, heads, head_dim, candidate):
    args = make_args(normal, heads=heads, head_dim=head_dim, dtype=dtype, scale=0.3)
    results = op.qk_norm_rope_3d(*args, candidate=candidate)
    if candidate == "tree":  # the interpreter's reduction has an order of its own
        assert same_bits(results, contract(*args))
    norm_q, norm_k, scale, q, k, _ = args
    expected = op.eager(*args)
    assert_close(results[0], expected[0], norm_q, scale, q)
    assert_close(results[1], expected[1], norm_k, 1.0, k)
    assert all(result.is_contiguous() and result.dtype == dtype for result in results)


@pytest.mark.parametrize("width, heads", [(1, 1), (33, 2), (17, 8), (3, 32)])
def test_lines_that_no_block_divides(normal, width, heads):
    args = make_args(normal, grid=(2, 1, width), heads=heads, head_dim=8)
    assert same_bits(op.qk_norm_rope_3d(*args, candidate="tree"), contract(*args))


def test_slabs_give_the_bits_of_the_whole(normal):
    norm_q, norm_k, scale, q, k, rope = make_args(normal, grid=(5, 2, 3))
    whole = op.qk_norm_rope_3d(norm_q, norm_k, scale, q, k, rope)
    for start, end in ((0, 2), (2, 5), (4, 5), (1, 4)):
        parts = op.qk_norm_rope_3d(norm_q, norm_k, scale, q[:, start:end], k[:, start:end], rope.slab(start))
        assert same_bits(parts, [x[:, start:end] for x in whole])


def test_strided_inputs_are_read_and_left_alone(normal):
    norm_q, norm_k, scale, q, k, rope = make_args(normal)
    packed = torch.full((2, *GRID, 3, 2, 64), float("nan"))
    packed[..., 0, :, :], packed[..., 1, :, :] = q, k
    before = packed.clone()
    chunks = packed[..., 0, :, :], packed[..., 1, :, :]
    assert same_bits(
        op.qk_norm_rope_3d(norm_q, norm_k, scale, *chunks, rope, candidate="tree"), contract(norm_q, norm_k, scale, q, k, rope)
    )
    assert same_bits(packed, before)


def test_tokens_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    norm_q, norm_k, scale, _, near, rope = make_args(normal, grid=(1, 1, 3), batch=1, dtype=torch.float16)
    far = far_apart(3, 128).view(1, 1, 1, 3, 2, 64)
    for q, k in ((far, near), (near, far)):
        args = norm_q, norm_k, scale, q, k, rope
        assert same_bits(op.qk_norm_rope_3d(*args, candidate="tree"), contract(*args))


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(normal, dtype):
    norm_q, norm_k, scale, q, k, rope = make_args(normal, dtype=dtype)
    for x in (q, k):
        x[0, 0, 0, 0, 0, 3], x[0, 0, 0, 1, 0, 5], x[0, 0, 0, 2, 0, 6] = float("nan"), float("inf"), -float("inf")
        x[0, 0, 0, 3], x[0, 0, 0, 4] = 0.0, torch.finfo(dtype).smallest_normal / 2
    args = norm_q, norm_k, scale, q, k, rope
    assert same_bits(op.qk_norm_rope_3d(*args, candidate="tree"), contract(*args))


def test_first_sight_takes_what_equals_eager(normal, monkeypatch):
    """On a CPU torch sums in another order, so the kernel is taken where eager is the contract."""
    monkeypatch.setattr(op, "eager", contract)
    args = make_args(normal)
    site = FirstSight("here", op)
    assert same_bits(site(*args), site(*args))
    assert site.fast == 1 and site.first == 1
    (trial,) = op.rehearsals(*args)
    assert op.refusal(*trial) is None and trial[3].shape[:5].numel() >= 4096


REFUSALS = {
    "rank": (lambda nq, nk, s, q, k, r: (nq, nk, s, q.flatten(4), k, r), "q: shape"),
    "shape of k": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k[:1], r), "k: shape"),
    "dtype of q": (lambda nq, nk, s, q, k, r: (nq, nk, s, q.double(), k.double(), r), "q: dtype torch.float64"),
    "dtype of k": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k.half(), r), "k: dtype torch.float16"),
    "device": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k.to("meta"), r), "k: on meta"),
    "elements": (lambda nq, nk, s, q, k, r: (nq, nk, s, q[..., :40], k[..., :40], r), "q: 40 elements a head"),
    "empty": (lambda nq, nk, s, q, k, r: (nq, nk, s, q[:0], k[:0], r), "q: 0 heads"),
    "uneven": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k.transpose(1, 2).contiguous().transpose(1, 2), r), "k: tokens must be"),
    "alignment": (lambda nq, nk, s, q, k, r: (nq, nk, s, shifted(q), k, r), "q: heads must be contiguous and aligned"),
    "hook": (lambda nq, nk, s, q, k, r: (hooked(nq), nk, s, q, k, r), "norm_q: not a plain"),
    "dtype of norm": (lambda nq, nk, s, q, k, r: (nq, nk.half(), s, q, k, r), "norm_k: not a plain"),
    "rows": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k, r._replace(grid=(3, 5, 2))), "rope: frames from 0 on of a grid"),
    "frames": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k, r.slab(1)), "rope: frames from 1 on of a grid"),
    "pairs": (lambda nq, nk, s, q, k, r: (nq, nk, s, q, k, r._replace(pairs=(8, 12, 8))), "rope: (8, 12, 8) pairs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    args = make_args(normal)
    with no_computation:
        assert op.refusal(*args) is None
        hash(op.signature(*args))
    bad = change(*args)
    with no_computation:
        assert op.refusal(*bad).startswith(named)
    with pytest.raises(ValueError, match="^qk_norm_rope_3d: "):
        op.qk_norm_rope_3d(*bad)


def test_signature_tells_layouts_and_norms_apart(normal):
    norm_q, norm_k, scale, q, k, rope = args = make_args(normal)
    others = [
        (norm_q, norm_k, 0.5, q, k, rope),
        (norm_q, norm_k, scale, q, shifted(k), rope),
        (norm_q, norm_k, scale, q[:, :2], k[:, :2], rope),
        (torch.nn.RMSNorm(64, eps=1e-5), norm_k, scale, q, k, rope),
        (norm_q, norm_k, scale, q, k, rope._replace(grid=(4, 2, 5))),
    ]
    assert len({op.signature(*args), *(op.signature(*other) for other in others)}) == 1 + len(others)
