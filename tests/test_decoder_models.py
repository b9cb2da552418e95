"""The decoders with random weights: the published one's size, and a tiny one that decodes."""

import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from ltx2_fastpath.testing import decoder as models


def test_full_size_is_the_published_one():
    with torch.device("meta"):
        decoder = LTX2VideoDiffusionDecoderModel()
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 417_133_616
    assert decoder.config.decoder_stage_channels == (2048, 1024, 512, 512, 256)


def test_tiny_decoder_decodes_and_follows_its_seed():
    before = torch.get_rng_state()
    decoder, same, other = models.tiny_decoder(), models.tiny_decoder(), models.tiny_decoder(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert decoder.dtype == torch.float32 and not decoder.training
    weights = [torch.cat([value.flatten() for value in model.state_dict().values()]) for model in (decoder, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

    clip = models.TINY_CLIP
    latents = models.latents(decoder, **clip)
    pipe = models.decode_pipeline(decoder)
    frames = pipe(latents, generator=torch.Generator().manual_seed(0), output_type="pt").frames
    assert frames.shape == (1, clip["num_frames"], 3, clip["height"], clip["width"])
    assert frames.isfinite().all() and frames.std() > 0.1
    assert not torch.equal(latents, models.latents(decoder, **clip, seed=1))
    assert models.tiny_decoder(torch.float16).dtype == torch.float16


def test_sizes_that_latents_do_not_have_are_refused():
    decoder = models.tiny_decoder()
    for size in ((65, 96, 9), (64, 97, 9), (64, 96, 10)):
        with pytest.raises(ValueError, match="multiples of 32"):
            models.latents(decoder, *size)
