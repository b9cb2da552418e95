"""A whole pipeline call with the full-size transformer: every guidance pass of every step, and what the passes share."""

import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from PIL import Image

import ltx2_fastpath
from ltx2_fastpath.testing import models

# The first step shows that there are STG passes, the second verifies their prefix, the third and fourth may reuse it.
STEPS = 4


# At the size of a real request one row and two give the same bits, where their latents lie alike in memory. With 128 text tokens
# they do not: for so few, cuBLAS picks other kernels. The small one is limited by the host.
CLIP = models.Clip(512, 768, 121)
LARGE = dict(**CLIP._asdict(), text_tokens=1024)
SMALL = dict(height=256, width=384, num_frames=25, text_tokens=128)


def call(pipe, *, text_tokens, noise_for=None, **options):
    """The video and audio latents of one request."""
    request = models.latents_request(pipe.transformer, text_tokens=text_tokens, noise_for=noise_for)
    output = pipe(**request, num_inference_steps=STEPS, **options)
    return output.frames, output.audio


@pytest.mark.parametrize("size, cuda_graphs", [(LARGE, False), (SMALL, True)], ids=["large", "small, CUDA graphs"])
def test_text_to_video_with_every_guidance_pass(full_size, size, cuda_graphs):
    pipe = models.latents_pipeline(full_size("2.3"))
    stock = call(pipe, **size)
    handle = ltx2_fastpath.enable(pipe, cuda_graphs=cuda_graphs)
    try:
        first, second = call(pipe, **size), call(pipe, **size)
        for fast in (first, second):
            assert torch.equal(fast[0], stock[0]) and torch.equal(fast[1], stock[1])
        assert stock[0].isfinite().all() and stock[0].std() > 0.1 and stock[1].float().std() > 0.1
        layers = len(pipe.transformer.transformer_blocks)
        if cuda_graphs:
            assert handle.sites["cuda_graphs"].fast >= 3, handle.sites["cuda_graphs"].notes
        else:
            prefix, ada_values = handle.sites["guidance.prefix"], handle.sites["ada_values"]
            assert ada_values.fast + ada_values.stock == 2 * 3 * STEPS * layers
            # Stock's STG passes have other bits than its CFG passes: their latents lie otherwise in memory.
            assert prefix.fast == 0 and "in stock, too" in prefix.notes[0], prefix.notes
            with ltx2_fastpath.quality(pipe, "high"):
                high = call(pipe, **size)
            assert prefix.fast == STEPS - 2, prefix.notes
            assert ada_values.fast + ada_values.stock == 3 * 3 * STEPS * layers - prefix.fast * models.STG_BLOCK
            for close, exact in zip(high, stock):
                assert 0 < (close.double() - exact.double()).square().mean().sqrt() < 0.1 * exact.double().std()
        assert not handle.stock_calls
    finally:
        ltx2_fastpath.disable(pipe)


@pytest.mark.parametrize("pipeline_class, gives_latents", [(LTX2Pipeline, True), (LTX2ConditionPipeline, False)])
def test_prefixes_are_reused_where_latents_lie_alike(full_size, pipeline_class, gives_latents):
    """Lossless: stock's own STG pass has the bits of its CFG pass up to the block that is perturbed."""
    pipe = models.latents_pipeline(full_size("2.3"), pipeline_class)
    options = LARGE | dict(noise_for=CLIP if gives_latents else None)
    stock = call(pipe, **options)
    handle = ltx2_fastpath.enable(pipe)
    try:
        for _ in range(2):
            fast = call(pipe, **options)
            assert torch.equal(fast[0], stock[0]) and torch.equal(fast[1], stock[1])
        prefix = handle.sites["guidance.prefix"]
        assert prefix.fast == (STEPS - 2) + STEPS, prefix.notes  # the first call finds out and verifies
        assert not handle.stock_calls
    finally:
        ltx2_fastpath.disable(pipe)


def test_image_to_video(full_size):
    pipe = models.latents_pipeline(full_size("2.3"), LTX2ImageToVideoPipeline)
    # An image that is not compressed first needs no PyAV.
    image = dict(image=Image.new("RGB", (384, 256), "teal"), image_crf=0)
    stock = call(pipe, **image, **SMALL)
    handle = ltx2_fastpath.enable(pipe)
    try:
        fast = call(pipe, **image, **SMALL)
        assert torch.equal(fast[0], stock[0]) and torch.equal(fast[1], stock[1])
        assert handle.sites["norm1"].fast > 100 and not handle.stock_calls
    finally:
        ltx2_fastpath.disable(pipe)
