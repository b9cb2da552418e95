"""neighborhood_attention: each token attends to a window around it, under Triton's interpreter."""

import types

import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import cuda
from ltx2_fastpath.ops import neighborhood_attention as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)
# Scores, probabilities and sums of values of up to about 4, in units of the dtype's eps.
BOUND = {torch.float32: 16, torch.float16: 4}


def make(normal, *grid, batch=1, heads=1, dtype=torch.float32):
    q, k, v = (normal(batch, *grid, heads, op.HEAD_DIM, dtype=dtype) for _ in range(3))
    return q * 0.125, k, v


def dense(q, k, v, window):
    """The contract in fp64 with one mask of tokens × tokens, written position by position."""
    grid = q.shape[1:4]
    axes = []
    for size, wide in zip(grid, window):
        axis = torch.zeros(size, size, dtype=torch.bool)
        for i in range(size):
            start = min(max(i - wide // 2, 0), size - wide)
            axis[i, start : start + wide] = True
        axes.append(axis)
    seen = torch.einsum("ax,by,cz->abcxyz", *(axis.double() for axis in axes)).bool().view(grid.numel(), grid.numel())
    x_q, x_k, x_v = (x.double().flatten(1, 3).transpose(1, 2) for x in (q, k, v))
    scores = (x_q @ x_k.mT).masked_fill(~seen, -float("inf"))
    return (scores.softmax(-1) @ x_v).transpose(1, 2).reshape(q.shape)


def assert_close(actual, expected):
    bound = BOUND[actual.dtype] * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


def test_eager_is_what_the_hosts_processor_computes(normal):
    attention = ltx2_diffusion_decoder.LTX2VideoVaeNeighborhoodAttention(128, (3, 5, 5)).requires_grad_(False)
    hidden = normal(2, 4, 6, 5, 128)
    seen = []
    attention.to_out[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attention(hidden)
    expected = op.eager(*attention.project_qkv(hidden), (3, 5, 5))
    torch.testing.assert_close(seen[0].view(expected.shape), expected)


@pytest.mark.parametrize("size", range(1, 14))
def test_eager_keeps_the_window_rule(normal, size):
    for window in range(1, min(size, op.MOST) + 1, 2):
        for axis in range(3):
            grid, windows = [1, 1, 1], [1, 1, 1]
            grid[axis], windows[axis] = size, window
            args = *(x.double() for x in make(normal, *grid)), tuple(windows)
            torch.testing.assert_close(op.eager(*args), dense(*args))


AXES = [(window, size) for window in (1, 3, 7, 11) for size in sorted({window, window + 1, 13})]


@pytest.mark.parametrize("window, size", AXES)
def test_window_along_one_axis(normal, window, size):
    for axis in range(3):
        grid, windows = [1, 1, 1], [1, 1, 1]
        grid[axis], windows[axis] = size, window
        args = *make(normal, *grid), tuple(windows)
        assert_close(op.neighborhood_attention(*args), dense(*args))


CASES = [
    ((3, 5, 5), (3, 5, 5), 1, 1),
    ((5, 6, 9), (3, 5, 5), 2, 1),
    ((3, 9, 8), (3, 7, 7), 1, 2),
    ((2, 3, 13), (1, 3, 9), 2, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid, window, batch, heads", CASES)
def test_keeps_the_contract(normal, dtype, grid, window, batch, heads):
    args = *make(normal, *grid, batch=batch, heads=heads, dtype=dtype), window
    result = op.neighborhood_attention(*args)
    assert result.dtype == dtype and result.shape == args[0].shape and result.is_contiguous()
    assert_close(result, dense(*args))


def test_the_largest_window(normal):
    """Of which a frame is enough: along T all of them see the same keys."""
    q, k, v = make(normal, 11, 11, 12, dtype=torch.float16)
    result = op.neighborhood_attention(q[:, 5:6], k, v, (11, 11, 11), slab=op.Slab(11, 5, 0))
    assert_close(result, dense(q, k, v, (11, 11, 11))[:, 5:6])


def test_large_scores(normal):
    q, k, v = make(normal, 3, 5, 6)
    q = q * 1000
    torch.testing.assert_close(
        op.neighborhood_attention(q, k, v, (3, 3, 3)).double(), dense(q, k, v, (3, 3, 3)), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("window", [(3, 3, 3), (5, 1, 3)])
@pytest.mark.parametrize("size", range(1, 6))
def test_slabs_have_the_bits_of_the_whole(normal, window, size):
    frames = 6
    q, k, v = make(normal, frames, 3, 5, batch=2, dtype=torch.float16)
    whole = op.neighborhood_attention(q, k, v, window)
    for begin in range(0, frames, size):
        end = min(begin + size, frames)
        first, last = op.keys_of(frames, window[0], begin, end)
        args = q[:, begin:end], k[:, first:last], v[:, first:last], window
        slab = op.Slab(frames, begin, first)
        assert torch.equal(op.neighborhood_attention(*args, slab=slab), whole[:, begin:end])
        torch.testing.assert_close(op.eager(*args, slab), op.eager(q, k, v, window)[:, begin:end])


def test_strided_inputs_are_read_and_left_alone(normal):
    args = make(normal, 3, 4, 5, heads=2)
    packed = torch.full((1, 3, 4, 5, 2, 256), float("nan"))
    for i, x in enumerate(args):
        packed[..., 64 * i : 64 * i + 64] = x
    before = packed.clone()
    result = op.neighborhood_attention(*packed.split(64, dim=-1)[:3], (3, 3, 3))
    assert torch.equal(result, op.neighborhood_attention(*args, (3, 3, 3)))
    assert same_bits(before, packed)


def test_positions_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far = far_apart(rows=3, width=64)
    near = far.clone()
    for axis in range(1, 5):
        shape = [1] * 5 + [64]
        shape[axis] = 3
        window = tuple(3 if axis == 1 + i else 1 for i in range(3))
        assert torch.equal(
            op.neighborhood_attention(*[far.view(shape)] * 3, window), op.neighborhood_attention(*[near.view(shape)] * 3, window)
        )


def changed(index, change):
    return lambda *args: (*args[:index], change(args[index]), *args[index + 1 :])


REFUSALS = {
    "rank": (changed(0, lambda q: q[0]), "q: shape [4, 5, 6, 2, 64]"),
    "head_dim": (lambda q, k, v, *rest: (q[..., :32], k[..., :32], v[..., :32], *rest), "q: shape [1, 4, 5, 6, 2, 32]"),
    "heads": (changed(1, lambda k: k[..., :1, :]), "k: shape [1, 4, 5, 6, 1, 64]"),
    "frames of k": (changed(1, lambda k: k[:, :3]), "v: shape"),
    "frames of k and v": (lambda q, k, v, *rest: (q, k[:, :3], v[:, :3], *rest), "k: 3 frames, q has 4"),
    "float64": (lambda q, k, v, *rest: (q.double(), k.double(), v.double(), *rest), "q: dtype torch.float64"),
    "dtype": (changed(2, lambda v: v.half()), "v: dtype torch.float16"),
    "device": (changed(1, lambda k: k.to("meta")), "k: on meta"),
    "empty": (lambda q, k, v, *rest: (q[:0], k[:0], v[:0], *rest), "q: empty"),
    "layout": (changed(2, lambda v: v.mT.contiguous().mT), "v: heads must be contiguous"),
    "alignment": (changed(0, lambda q: q.new_zeros(q.numel() + 1)[1:].view(q.shape)), "q: heads must be contiguous and aligned"),
    "even window": (changed(3, lambda window: (3, 4, 3)), "window: (3, 4, 3), expected three odd sizes"),
    "large window": (changed(3, lambda window: (3, 13, 3)), "window: (3, 13, 3), expected three odd sizes"),
    "window of two": (changed(3, lambda window: (3, 3)), "window: (3, 3), expected three odd sizes"),
    "window above T": (changed(3, lambda window: (5, 3, 3)), "window: (5, 3, 3) is larger than the grid, (4, 5, 6)"),
    "window above H": (changed(3, lambda window: (3, 7, 3)), "window: (3, 7, 3) is larger than the grid"),
    "window above W": (changed(3, lambda window: (3, 3, 7)), "window: (3, 3, 7) is larger than the grid"),
    "slab past the end": (changed(4, lambda slab: op.Slab(8, 5, 4)), "slab: 4 frames from 5 on of 8"),
    "keys too late": (changed(4, lambda slab: op.Slab(8, 4, 4)), "k: frames 4 to 7; the queries see 3 to 7"),
    "keys too early": (changed(4, lambda slab: op.Slab(8, 0, 0)), "k: frames 0 to 3; the queries see 0 to 4"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = *make(normal, 4, 5, 6, heads=2), (3, 3, 3), None
    bad = change(*good)
    with no_computation:
        assert op.refusal(*good) is None
        assert named in op.refusal(*bad)
    with pytest.raises(ValueError, match="^neighborhood_attention: ") as caught:
        op.neighborhood_attention(*bad[:4], slab=bad[4])
    assert named in str(caught.value)


def test_only_the_triton_form_takes_fp32(normal):
    args = *make(normal, 3, 3, 3), (3, 3, 3), None
    assert op.refusal(*args, "triton") is None
    assert "q: dtype torch.float32" in op.refusal(*args, "cuda")
    assert op.implementation_for(args[0]) == "triton"


@pytest.mark.parametrize("window", [(11, 11, 11), (3, 7, 7), (3, 5, 5)])
@pytest.mark.parametrize("room", [227, 163, 99])
def test_the_ring_of_the_cuda_form_fits_the_device(monkeypatch, window, room):
    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=room * 1024, shared_memory_per_multiprocessor=(room + 1) * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    parameters, shared = op._instance.__wrapped__(torch.device("cuda", 0), torch.bfloat16, window, op.CUDA_TILING)
    assert 2 <= parameters[-2] <= op.CUDA_TILING.most_slots and shared <= room * 1024


@pytest.mark.skipif(not cuda.INSTALLED, reason="cuda.core is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("window", [(11, 11, 11), (3, 5, 5)])
def test_nvrtc_compiles_the_cuda_form(architecture, window):
    tiling = op.CUDA_TILING
    parameters = (torch.bfloat16, *window, tiling.tiles, *tiling.bricks, tiling.chunk, 8, tiling.blocks)
    code, name = cuda.compiled(architecture, "neighborhood_attention", parameters)
    assert code.code_type == "cubin" and code.symbol_mapping[name]
