"""A whole pipeline call with the full-size transformer: every guidance pass of every step, and what the passes share."""

import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio, LTX2ImageToVideoPipeline, LTX2Pipeline
from PIL import Image

import ltx2_fastpath
from ltx2_fastpath.bench import models

DEVICE = "cuda"
# The first step shows that there are STG passes, the second verifies their prefix, the third and fourth reuse it.
STEPS = 4
TEXT_TOKENS = 128


class Connectors(torch.nn.Module):
    """Stands for the text connectors: gives prompts of the transformer's widths, and masks of ones as they do."""

    def __init__(self, transformer):
        super().__init__()
        self.device, self.dtype = transformer.device, transformer.dtype
        config = transformer.config
        if config.use_prompt_embeddings:
            self.widths = config.caption_channels, config.caption_channels
        else:
            self.widths = config.cross_attention_dim, config.audio_cross_attention_dim

    def forward(self, prompt_embeds, attention_mask, padding_side="left"):
        video, audio = (prompt_embeds[..., :width].contiguous() for width in self.widths)
        return video, audio, torch.ones_like(attention_mask)


def make_pipeline(transformer, pipeline_class=LTX2Pipeline):
    """A pipeline that ends at the latents: its VAEs are small, and only their sizes and statistics are used (and, for an
    image, the video encoder); prompts are passed as embeddings."""
    # Its statistics are those of latents packed to the transformer's width: 8 channels of 16 mel bins.
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=transformer.config.audio_in_channels,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=8,
        mel_bins=64,
    )
    vae = models._tiny_video_vae(transformer.config.in_channels)
    vae, audio_vae = (models._cast(module, transformer.dtype).eval().to(DEVICE) for module in (vae, audio_vae))
    pipe = pipeline_class(
        scheduler=models.tiny_pipeline().scheduler,
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=None,
        tokenizer=None,
        connectors=Connectors(transformer),
        transformer=transformer,
        vocoder=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


# At the size of a real request the CFG and STG passes have been seen to share bits; the other is limited by the host.
LARGE = dict(height=512, width=768, num_frames=121)
SMALL = dict(height=256, width=384, num_frames=25)


def call(pipe, **options):
    """The video and audio latents of one request."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    dtype = pipe.transformer.dtype
    prompts = torch.randn(2, TEXT_TOKENS, 4096, generator=generator, device=DEVICE).to(dtype)
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.int64, device=DEVICE)
    output = pipe(
        prompt_embeds=prompts[:1],
        prompt_attention_mask=mask,
        negative_prompt_embeds=prompts[1:],
        negative_prompt_attention_mask=mask,
        num_inference_steps=STEPS,
        generator=generator,
        output_type="latent",
        **options,
    )
    return output.frames, output.audio


@pytest.mark.parametrize("size, cuda_graphs", [(LARGE, False), (SMALL, True)], ids=["large", "small, CUDA graphs"])
def test_text_to_video_with_every_guidance_pass(full_size, size, cuda_graphs):
    pipe = make_pipeline(full_size("2.3"))
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
            reused = handle.sites["guidance.prefix"].fast
            assert reused >= STEPS, handle.sites["guidance.prefix"].notes
            blocks = handle.sites["ada_values"].fast + handle.sites["ada_values"].stock
            assert blocks == 2 * 3 * STEPS * layers - reused * models.STG_BLOCK
        assert not handle.stock_calls
    finally:
        ltx2_fastpath.disable(pipe)


def test_image_to_video(full_size):
    pipe = make_pipeline(full_size("2.3"), LTX2ImageToVideoPipeline)
    image = Image.new("RGB", (384, 256), "teal")
    stock = call(pipe, image=image, **SMALL)
    handle = ltx2_fastpath.enable(pipe)
    try:
        fast = call(pipe, image=image, **SMALL)
        assert torch.equal(fast[0], stock[0]) and torch.equal(fast[1], stock[1])
        assert handle.sites["norm1"].fast > 100 and not handle.stock_calls
    finally:
        ltx2_fastpath.disable(pipe)
