"""LTX-2.5's diffusion video decoder with random weights: at the published size, which is the class's default, or tiny."""

import torch
from diffusers import LTX2VideoDiffusionDecodePipeline, LTX2VideoDiffusionDecoderModel

from .models import _cast, _draw_weights, _scheduler

_TINY = dict(
    latent_channels=4,
    decoder_head_dim=8,
    decoder_stage_channels=(32, 16, 16, 16, 16),
    decoder_stage_depths=(1, 1, 1, 2, 2),
    decoder_stage_kernels=((3, 1, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
    decoder_upsample_channel_reductions=(2, 1, 1, 1),
    decoder_stage5_kernel=(5, 5, 5),
    decoder_t_emb_dim=8,
)

#: The smallest clip that a `tiny_decoder` decodes: 9 x 16 x 24 tokens in its last stage.
TINY_CLIP = dict(height=64, width=96, num_frames=9)


def build_decoder(dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", *, seed: int = 0, **switches):
    """A decoder of the published size (0.42 B parameters), in eval mode and without gradients, its weights drawn on `device`.

    `switches` override entries of the configuration. The global random state is not touched.
    """
    device = torch.device(device)
    with torch.device("meta"):
        decoder = LTX2VideoDiffusionDecoderModel(**switches)
    decoder = _cast(decoder, dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    _draw_weights(decoder, generator)
    with torch.no_grad():  # statistics unlike zeros and ones, so that a forgotten denormalisation shows
        decoder.latents_mean.normal_(std=0.1, generator=generator)
        decoder.latents_std.normal_(std=0.1, generator=generator).add_(1)
    return decoder.eval().requires_grad_(False)


def tiny_decoder(dtype: torch.dtype = torch.float32, *, seed: int = 0, **switches):
    """A decoder on the CPU of all parts and the published compression but some 60,000 parameters, two heads and small windows."""
    return build_decoder(dtype, "cpu", seed=seed, **_TINY | switches)


def latents(decoder, height: int, width: int, num_frames: int, seed: int = 0, batch_size: int = 1) -> torch.Tensor:
    """Random latents [B, C, F', H', W'] of a clip (pixels, frames) in the decoder's dtype and on its device.

    Raises ValueError for a size that the decoder's latents do not have.
    """
    config = decoder.config
    spatial, temporal = config.spatial_compression_ratio, config.temporal_compression_ratio
    if height % spatial or width % spatial or num_frames % temporal != 1:
        raise ValueError(f"height and width must be multiples of {spatial} and frames {temporal}n + 1")
    shape = batch_size, config.latent_channels, num_frames // temporal + 1, height // spatial, width // spatial
    generator = torch.Generator(decoder.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=decoder.device).to(decoder.dtype)


def decode_pipeline(decoder) -> LTX2VideoDiffusionDecodePipeline:
    """A real decoding pipeline around `decoder`."""
    pipe = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=_scheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe
