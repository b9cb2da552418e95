"""Frames for people: the host's bytes by torch, for every dtype, value and shape, and by the host where they are not ours."""

import copy
import types

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor
from ltx2_fastpath.patches.frames import parts as frames_module

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Pipe(types.SimpleNamespace):
    """A pipeline as far as `enable` looks at one."""

    def __init__(self, processor=None):
        super().__init__(transformer=models.tiny_transformer("2.0"), video_processor=processor or VideoProcessor())

    @property
    def site(self):
        """The row of the report, as (fast, stock), and its notes."""
        rows = [row for row in ltx2_fastpath.report(self).rows if row["site"] == "frames"]
        return (rows[0]["fast"], rows[0]["stock"], rows[0]["notes"]) if rows else (0, 0, [])


@pytest.fixture
def pipe():
    made = Pipe()
    ltx2_fastpath.enable(made)
    return made


def video(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.7).to(dtype)


def equal(ours, stock) -> bool:
    assert [len(frames) for frames in ours] == [len(frames) for frames in stock]
    pairs = [pair for frames in zip(ours, stock) for pair in zip(*frames)]
    assert all(mine.mode == theirs.mode and mine.size == theirs.size for mine, theirs in pairs)
    return all(mine.tobytes() == theirs.tobytes() for mine, theirs in pairs)


def stock(pixels, output_type="pil", **options):
    with np.errstate(invalid="ignore"):
        return VideoProcessor().postprocess_video(pixels, output_type, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 5, 4, 6), (2, 3, 1, 1, 1), (3, 3, 2, 7, 3)])
def test_pil_frames_are_the_hosts(pipe, dtype, shape):
    pixels = video(*shape, dtype=dtype)
    before = pixels.clone()
    found = pipe.video_processor.postprocess_video(pixels, "pil")
    assert equal(found, stock(pixels)) and torch.equal(pixels, before)
    assert pipe.site[:2] == (1, 0) and f"bit-equal in rehearsal for {str(dtype)[6:]} on cpu" in pipe.site[2]
    assert equal(pipe.video_processor.postprocess_video(video=pixels, output_type="pil"), stock(pixels)) and pipe.site[0] == 2


def test_a_chunk_is_some_frames_of_which_none_is_lost(pipe, monkeypatch):
    pixels = video(2, 3, 7, 4, 5)
    for chunk in (1, 3 * 4 * 5, 3 * 3 * 4 * 5, 2**22):
        monkeypatch.setattr(frames_module, "_CHUNK", chunk)
        assert equal(pipe.video_processor.postprocess_video(pixels, "pil"), stock(pixels))


def test_strided_pixels(pipe):
    wide = video(2, 3, 9, 8, 8, dtype=torch.bfloat16)
    for pixels in (wide[:, :, 1:], wide[..., ::2], wide.transpose(3, 4), wide[:1].expand(2, -1, -1, -1, -1), wide.flip(4)):
        assert equal(pipe.video_processor.postprocess_video(pixels, "pil"), stock(pixels))
    assert pipe.site[:2] == (5, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_value(pipe, dtype):
    pixels = frames_module.rehearsal(dtype, torch.device("cpu"))
    assert pixels.isinf().any() and not pixels.isnan().any() and (pixels.abs() > 1).any() and (pixels == 0).any()
    if dtype in (torch.bfloat16, torch.float16):
        assert all(len(channel.unique()) > 60_000 for channel in pixels[0])
    assert equal(pipe.video_processor.postprocess_video(pixels, "pil"), stock(pixels)) and pipe.site[:2] == (1, 0)


@pytest.mark.parametrize("place", [0, -1])
def test_nan_is_the_hosts(pipe, place):
    for dtype in DTYPES:
        pixels = video(2, 3, 3, 4, 4, dtype=dtype)
        pixels.view(-1)[place] = float("nan")
        with np.errstate(invalid="ignore"):
            found = pipe.video_processor.postprocess_video(pixels, "pil")
        assert equal(found, stock(pixels))
    fast, stock_calls, notes = pipe.site
    assert (fast, stock_calls) == (0, 4) and "pixels are NaN" in notes


@pytest.mark.parametrize("output_type", ["np", "pt"])
def test_arrays_and_tensors_are_the_hosts(pipe, output_type):
    pixels = video(2, 3, 3, 4, 4, dtype=torch.bfloat16)
    found, expected = pipe.video_processor.postprocess_video(pixels, output_type), stock(pixels, output_type)
    assert found.dtype == expected.dtype and (found == expected).all() and type(found) is type(expected)
    assert (pipe.video_processor.postprocess_video(pixels) == stock(pixels, "np")).all()


def refused(pipe, pixels, **options):
    """A call that is the host's in result and error."""
    try:
        expected = stock(pixels, **options)
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            pipe.video_processor.postprocess_video(pixels, "pil", **options)
        assert str(raised.value) == str(error)
    else:
        assert equal(pipe.video_processor.postprocess_video(pixels, "pil", **options), expected)
    assert pipe.site[0] == 0


def test_what_is_not_ours_is_the_hosts(pipe):
    pixels = video(1, 3, 2, 4, 4)
    refused(pipe, pixels.clamp(0, 1), do_denormalize=[False] * 2)
    refused(pipe, pixels, do_denormalize=[True] * 2)
    refused(pipe, pixels[:, :1])
    refused(pipe, pixels[:, :2])
    refused(pipe, torch.ones(1, 3, 2, 4, 4, dtype=torch.int32))
    refused(pipe, pixels[0])
    refused(pipe, pixels[:, :, :0])
    refused(pipe, pixels[:0])
    refused(pipe, pixels.requires_grad_())
    refused(pipe, pixels.detach().numpy())
    refused(pipe, pixels.detach(), nonsense=True)
    with pytest.raises(ValueError, match="does not exist"):
        pipe.video_processor.postprocess_video(pixels.detach(), "latent")


def test_processors_that_compute_otherwise_are_the_hosts():
    pixels = video(1, 3, 2, 4, 4).clamp(0, 1)
    plain = VideoProcessor(do_normalize=False)
    expected = plain.postprocess_video(pixels, "pil")
    pipe = Pipe(plain)
    ltx2_fastpath.enable(pipe)
    assert equal(plain.postprocess_video(pixels, "pil"), expected) and pipe.site[:2] == (0, 1)

    class Dim(VideoProcessor):
        @staticmethod
        def denormalize(images):
            return VideoProcessor.denormalize(images) * 0.5

    pipe = Pipe(Dim())
    ltx2_fastpath.enable(pipe)
    assert "postprocess_video" not in vars(pipe.video_processor)

    pipe = Pipe()
    pipe.video_processor.denormalize = Dim.denormalize
    ltx2_fastpath.enable(pipe)
    assert equal(pipe.video_processor.postprocess_video(pixels, "pil"), Dim().postprocess_video(pixels, "pil"))
    assert pipe.site[:2] == (0, 1) and "denormalize was replaced" in pipe.site[2]


def test_other_bytes_in_rehearsal_leave_it_to_the_host(pipe, monkeypatch):
    ours = frames_module.frames
    monkeypatch.setattr(frames_module, "frames", lambda pixels: ours(pixels * 0.99))
    pixels = video(1, 3, 2, 4, 4)
    for _ in range(2):
        assert equal(pipe.video_processor.postprocess_video(pixels, "pil"), stock(pixels))
    assert pipe.site == (0, 2, ["other bytes than the host's for float32 on cpu"])


def test_switches():
    pipe, pixels = Pipe(), video(1, 3, 2, 4, 4)
    before = dict(vars(pipe.video_processor))
    ltx2_fastpath.enable(pipe)
    method = pipe.video_processor.postprocess_video
    assert method(pixels, "pil") and pipe.site[0] == 1
    with ltx2_fastpath.disabled(pipe):
        assert equal(method(pixels, "pil"), stock(pixels)) and pipe.site[0] == 1
    ltx2_fastpath.enable(pipe, without=("frames",))
    assert equal(method(pixels, "pil"), stock(pixels)) and pipe.site[:2] == (1, 1)
    ltx2_fastpath.enable(pipe, without=())
    ltx2_fastpath.enable(pipe.transformer)  # which is not about the pipeline's frames
    assert method(pixels, "pil") and pipe.site[0] == 2

    twin = copy.deepcopy(pipe)
    assert equal(twin.video_processor.postprocess_video(pixels, "pil"), stock(pixels))
    ltx2_fastpath.report(twin)  # here copies are found out
    assert "postprocess_video" not in vars(twin.video_processor)

    ltx2_fastpath.disable(pipe)
    assert vars(pipe.video_processor) == before
    assert equal(method(pixels, "pil"), stock(pixels))  # somebody kept it


def test_a_method_of_somebody_elses_is_left_alone():
    pipe = Pipe()
    pipe.video_processor.postprocess_video = theirs = lambda video, output_type: "theirs"
    ltx2_fastpath.enable(pipe)
    assert pipe.video_processor.postprocess_video is theirs
    assert "video_processor" in ltx2_fastpath.report(pipe).skipped
    ltx2_fastpath.disable(pipe)
    assert pipe.video_processor.postprocess_video is theirs


def test_a_processor_alone_is_no_model():
    pipe = types.SimpleNamespace(video_processor=VideoProcessor())
    with pytest.raises(TypeError, match="expected an LTX2VideoTransformer3DModel or .* but found SimpleNamespace$"):
        ltx2_fastpath.enable(pipe)
