"""pixel_shuffle: channels to positions in one copy, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host

from ltx2_fastpath.first_sight import FirstSight, same_layout
from ltx2_fastpath.ops import pixel_shuffle as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
STRIDES = [(1, 2, 2), (2, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("stride", STRIDES)
def test_is_the_hosts(normal, stride, drop, dtype):
    upsampler = host.LTX2VideoVaePixelShuffleUpsampler(16, stride).to(dtype).requires_grad_(False)
    x = normal(2, 3, 2, 5, 16, dtype=dtype)
    expected = upsampler(x, drop_leading_frame=drop)
    args = upsampler.proj(x), stride, drop and stride[0] == 2
    assert torch.equal(op.eager(*args), expected)
    found = op.pixel_shuffle(*args)
    assert torch.equal(found, expected) and same_layout(found, expected)


@pytest.mark.parametrize("width, channels", [(1, 1), (3, 4096), (700, 8), (17, 256)])
def test_lines_that_no_block_divides(normal, width, channels):
    x = normal(1, 2, 2, width, 2 * channels)
    assert torch.equal(op.pixel_shuffle(x, (2, 1, 1), True), op.eager(x, (2, 1, 1), True))


def test_strided_tokens(normal):
    x = normal(2, 4, 2, 3, 64)
    for part in (x[:, 1:], x[..., 32:], x[:, 2:, :, :, :32]):
        assert torch.equal(op.pixel_shuffle(part, (2, 2, 2), True), op.eager(part, (2, 2, 2), True))


def test_tokens_may_lie_more_than_two_to_the_31_elements_apart(far_apart):
    far = far_apart(3, 128)
    for x in (far.view(3, 1, 1, 1, 128), far.view(1, 1, 1, 3, 128)):
        assert torch.equal(op.pixel_shuffle(x, (1, 2, 2), False), op.eager(x, (1, 2, 2), False))


def test_first_sight_takes_it(normal):
    x = normal(2, 3, 2, 5, 64)
    site = FirstSight("here", op)
    assert torch.equal(site(x, (2, 2, 2), True), site(x, (2, 2, 2), True)) and site.fast == 1
    others = [(x, (2, 2, 2), False), (x, (1, 2, 2), True), (x[:1], (2, 2, 2), True)]
    assert len({op.signature(x, (2, 2, 2), True), *(op.signature(*other) for other in others)}) == 4


REFUSALS = {
    "rank": (lambda x: (x[0], (2, 2, 2), True), "x: expected rank 5"),
    "dtype": (lambda x: (x.double(), (2, 2, 2), True), "x: torch.float64"),
    "device": (lambda x: (x.to("meta"), (2, 2, 2), True), "x: torch.float32 on meta"),
    "stride": (lambda x: (x, (3, 1, 1), True), "stride: (3, 1, 1)"),
    "channels": (lambda x: (x[..., :24], (2, 2, 2), True), "stride: (2, 2, 2) of 24"),
    "empty": (lambda x: (x[:0], (2, 2, 2), True), "x: 0 tokens"),
    "uneven": (lambda x: (x[:, :, :1], (2, 2, 2), True), "x: tokens must be evenly spaced"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    x = normal(2, 3, 2, 5, 64)
    with no_computation:
        assert op.refusal(x, (2, 2, 2), True) is None
    bad = change(x)
    with no_computation:
        assert op.refusal(*bad).startswith(named)
    with pytest.raises(ValueError, match="^pixel_shuffle: "):
        op.pixel_shuffle(*bad)
