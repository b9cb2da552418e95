"""The LTX-2 models that the tests, the demo, the notebooks and the benchmark share: real shapes, random weights.

Needs torch, diffusers and transformers; knows nothing of this package's kernels and patches, so the
same model can serve as the stock side of every comparison.

The configurations are those of the published diffusers checkpoints (Lightricks/LTX-2, diffusers/LTX-2.3-Diffusers,
Lightricks/LTX-2.5-Diffusers), as diffusers' own conversion script writes them.
"""

import copy
import inspect
from typing import NamedTuple

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

_EVERY_VERSION = dict(
    in_channels=128,
    out_channels=128,
    patch_size=1,
    patch_size_t=1,
    num_attention_heads=32,
    attention_head_dim=128,
    cross_attention_dim=4096,
    vae_scale_factors=(8, 32, 32),
    pos_embed_max_pos=20,
    base_height=2048,
    base_width=2048,
    audio_in_channels=128,
    audio_out_channels=128,
    audio_patch_size=1,
    audio_patch_size_t=1,
    audio_num_attention_heads=32,
    audio_attention_head_dim=64,
    audio_cross_attention_dim=2048,
    audio_scale_factor=4,
    audio_pos_embed_max_pos=20,
    audio_sampling_rate=16000,
    audio_hop_length=160,
    num_layers=48,
    activation_fn="gelu-approximate",
    qk_norm="rms_norm_across_heads",
    norm_elementwise_affine=False,
    norm_eps=1e-6,
    caption_channels=3840,
    attention_bias=True,
    attention_out_bias=True,
    rope_theta=10000.0,
    rope_double_precision=True,
    rope_type="split",
    causal_offset=1,
    timestep_scale_multiplier=1000,
    cross_attn_timestep_scale_multiplier=1000,
)
_SINCE_2_3 = dict(
    gated_attn=True,
    audio_gated_attn=True,
    cross_attn_mod=True,
    audio_cross_attn_mod=True,
    perturbed_attn=True,
    use_prompt_embeddings=False,
)

#: Keyword arguments of `diffusers.LTX2VideoTransformer3DModel` for each published version, at full size. In 2.5 the
#: prompt modulation still depends on the timestep (`use_prompt_adaln_single` keeps its default, True).
CONFIGS: dict[str, dict] = {
    "2.0": _EVERY_VERSION,
    "2.3": _EVERY_VERSION | _SINCE_2_3,
    "2.5": _EVERY_VERSION | _SINCE_2_3 | dict(ff_bias=False, use_keyframes_abs_pos_embedding=True),
}

_TINY = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=4,
    audio_cross_attention_dim=8,
    caption_channels=16,
)

FRAME_RATE = 24.0  # frames a second, the pipelines' default
TIMESTEP = 909.375  # 1000 sigma of one step: the sixth of the distilled schedule
STG_BLOCK = 28  # the block that the pipelines perturb by default

#: Arguments for one call of a `tiny_pipeline`, a fraction of a second on a CPU. `spatio_temporal_guidance_blocks` names
#: a block that two layers have (the pipelines' default, 28, would perturb nothing and say nothing).
TINY_CALL = dict(
    prompt="a lighthouse in a storm",
    negative_prompt="blurry",
    height=64,
    width=96,
    num_frames=9,
    num_inference_steps=2,
    spatio_temporal_guidance_blocks=[1],
    max_sequence_length=16,
)


class Clip(NamedTuple):
    """The size of a video: pixels, multiples of 32, and frames, one more than a multiple of 8. Written 512x768x121."""

    height: int
    width: int
    num_frames: int

    @classmethod
    def parse(cls, text: str) -> "Clip":
        """Raises ValueError if `text` is not a clip that LTX-2 can make."""
        try:
            clip = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise ValueError(f"expected HEIGHTxWIDTHxFRAMES, got {text!r}") from None
        if min(clip) < 1 or clip.height % 32 or clip.width % 32 or clip.num_frames % 8 != 1:
            raise ValueError(f"height and width must be multiples of 32 and frames 8n + 1, got {text!r}")
        return clip

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.num_frames}"


def build_transformer(
    version: str,
    *,
    num_layers: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LTX2VideoTransformer3DModel:
    """A full-width transformer of `version` with random weights, in eval mode and without gradients.

    `num_layers` shortens the stack (48 layers are 18.99 B parameters for 2.3). The weights are drawn on `device` in
    `dtype`, so nothing passes through host memory; the same seed gives the same weights on the same kind of device.
    The global random state is not touched.

    Raises ValueError if `version` is not a key of `CONFIGS`.
    """
    config = _config(version)
    if num_layers is not None:
        config["num_layers"] = num_layers
    return _random_transformer(config, torch.device(device), dtype, seed)


def tiny_transformer(
    version: str, *, num_layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **switches
) -> LTX2VideoTransformer3DModel:
    """A transformer with every switch of `version` but video width 16 and audio width 8, 2 heads each, on the CPU.

    `switches` override single configuration entries, for what the host supports and no published checkpoint uses
    (`use_prompt_adaln_single=False`, `rope_type="interleaved"`).

    Raises ValueError if `version` is not a key of `CONFIGS`.
    """
    config = _config(version) | _TINY | dict(num_layers=num_layers) | switches
    return _random_transformer(config, torch.device("cpu"), dtype, seed)


def outline(version: str) -> LTX2VideoTransformer3DModel:
    """A full-width transformer of one layer on the meta device: sizes and rotary embeddings without memory.

    Raises ValueError if `version` is not a key of `CONFIGS`.
    """
    with torch.device("meta"):
        return LTX2VideoTransformer3DModel(**_config(version) | dict(num_layers=1))


def twin(transformer: LTX2VideoTransformer3DModel) -> LTX2VideoTransformer3DModel:
    """A second instance over the same parameters, to compile or patch on its own. Make it before patching the first."""
    return copy.deepcopy(transformer, {id(parameter): parameter for parameter in transformer.parameters()})


def latent_sizes(config, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
    """Latent frames, rows and columns of a clip at 24 frames a second, and its audio tokens.

    Raises ValueError for a height or width (pixels) that is no multiple of the VAE's spatial factor, 32.
    """
    temporal, spatial, _ = config.vae_scale_factors
    if height % spatial or width % spatial:
        raise ValueError(f"height and width must be multiples of {spatial}, got {height} and {width}")
    latents_per_second = config.audio_sampling_rate / config.audio_hop_length / config.audio_scale_factor
    audio_tokens = round(num_frames / FRAME_RATE * latents_per_second)
    return (num_frames - 1) // temporal + 1, height // spatial, width // spatial, audio_tokens


def inputs(
    transformer: LTX2VideoTransformer3DModel,
    *,
    height: int,
    width: int,
    num_frames: int,
    batch_size: int = 1,
    image_to_video: bool = False,
    guidance: str = "cfg",
    given_latents: bool = False,
    text_tokens: int = 1024,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict:
    """The keyword arguments that diffusers' LTX-2 pipelines pass to `transformer.forward` in one denoising step.

    `height`, `width` (pixels, multiples of 32) and `num_frames` are those of the pipeline call, at 24 frames a second.
    `batch_size` counts the rows of this forward: for one video the default guidance runs "cfg" with two rows (negative and
    positive prompt), then "stg" and "isolated" with one each. `device` and `dtype` default to the transformer's.

    Calls that are given their latents, and those of pipelines that lay out what they draw (`LTX2ConditionPipeline`,
    `LTX2InContextPipeline`), have them token by token in memory in every pass: `given_latents`. Those that `LTX2Pipeline`
    draws lie channel by channel where the guidance is not "cfg".

    Shapes, with S_v = latent frames x height/32 x width/32 video tokens and S_a audio tokens (25 a second):
    hidden_states [B, S_v, in_channels], audio_hidden_states [B, S_a, audio_in_channels], the text embeddings
    [B, text_tokens, width] all in `dtype`; the text mask int64 [B, text_tokens], all ones because the connectors fill
    padding with registers; timestep and sigma float32 [B], one stride-0 tensor. With `image_to_video`, timestep is
    [B, S_v], zero on the first latent frame, and audio_timestep is [B]. The perturbation mask is None for "stg" too:
    the transformer then perturbs every row.

    Raises ValueError for a size that is no multiple of 32 and for an unknown `guidance`.
    """
    config = transformer.config
    device = torch.device(device) if device is not None else transformer.device
    dtype = dtype if dtype is not None else transformer.dtype
    latent_frames, latent_height, latent_width, audio_tokens = latent_sizes(config, height, width, num_frames)
    if guidance not in ("cfg", "stg", "isolated"):
        raise ValueError(f"guidance must be 'cfg', 'stg' or 'isolated', got {guidance!r}")

    video_tokens = latent_frames * latent_height * latent_width
    text_width, audio_text_width = _text_widths(config)
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        # The pipelines keep latents in float32 and round them to the model's dtype for each step.
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    # Packing [B, C, F, H, W] copies nothing, so tokens lie channel by channel, until a concatenation for two prompts copies them.
    video = noise(batch_size, config.in_channels, video_tokens).transpose(1, 2)
    if guidance == "cfg" or given_latents:
        video = video.contiguous()
    sigma = torch.tensor(TIMESTEP, device=device).expand(batch_size)
    if image_to_video:
        is_first_frame = torch.zeros(batch_size, video_tokens, device=device)
        is_first_frame[:, : latent_height * latent_width] = 1.0
        timesteps = dict(timestep=sigma.unsqueeze(-1) * (1 - is_first_frame), audio_timestep=sigma)
    else:
        timesteps = dict(timestep=sigma)
    text_mask = torch.ones(batch_size, text_tokens, dtype=torch.int64, device=device)

    return dict(
        hidden_states=video,
        audio_hidden_states=noise(batch_size, audio_tokens, config.audio_in_channels),
        encoder_hidden_states=noise(batch_size, text_tokens, text_width),
        audio_encoder_hidden_states=noise(batch_size, text_tokens, audio_text_width),
        **timesteps,
        sigma=sigma,
        encoder_attention_mask=text_mask,
        audio_encoder_attention_mask=text_mask,
        num_frames=latent_frames,
        height=latent_height,
        width=latent_width,
        fps=FRAME_RATE,
        audio_num_frames=audio_tokens,
        video_coords=transformer.rope.prepare_video_coords(
            batch_size, latent_frames, latent_height, latent_width, device, fps=FRAME_RATE
        ),
        audio_coords=transformer.audio_rope.prepare_audio_coords(batch_size, audio_tokens, device).contiguous(),
        isolate_modalities=guidance == "isolated",
        spatio_temporal_guidance_blocks=[_stg_block(transformer)] if guidance == "stg" else None,
        perturbation_mask=None,
        # The pipelines say True unless told otherwise; the documented setting for 2.0 is False.
        use_cross_timestep=config.cross_attn_mod,
        attention_kwargs=None,
        return_dict=False,
    )


def tiny_pipeline(version: str = "2.3", pipeline_class: type | None = None, *, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A real `pipeline_class` (default `LTX2Pipeline`) on the CPU whose every component is real, tiny and random.

    Text encoder (Gemma 3 for every version), tokenizer (characters), connectors, transformer (`tiny_transformer`),
    video VAE (8 x 32 x 32 compression), audio VAE, vocoder (with bandwidth extension since 2.3) and scheduler. Call it
    with `pipe(**TINY_CALL, generator=torch.Generator().manual_seed(0), output_type=...)`; image pipelines want an
    `image` as well. The global random state is not touched.

    Raises ValueError if `version` is not a key of `CONFIGS`, TypeError if `pipeline_class` needs a component that is
    not among these.
    """
    pipeline_class = pipeline_class or LTX2Pipeline
    transformer = tiny_transformer(version, dtype=dtype, seed=seed)
    config = transformer.config
    text_in_transformer = config.use_prompt_embeddings  # 2.0: the transformer, not the connectors, projects the text

    # torch.manual_seed would also reseed the GPUs, which fork_rng(devices=[]) does not restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        tokenizer = _tiny_tokenizer()
        text_encoder = _tiny_text_encoder(len(tokenizer), config.caption_channels)
        connectors = LTX2TextConnectors(
            caption_channels=config.caption_channels,
            text_proj_in_factor=text_encoder.config.text_config.num_hidden_layers + 1,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=8,
            video_gated_attn=config.gated_attn,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=8 if text_in_transformer else 4,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=8,
            audio_gated_attn=config.audio_gated_attn,
            rope_type="split",
            per_modality_projections=not text_in_transformer,
            video_hidden_dim=config.cross_attention_dim,
            audio_hidden_dim=config.audio_cross_attention_dim,
            proj_bias=not text_in_transformer,
        )
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
        )
        models = dict(
            text_encoder=text_encoder,
            connectors=connectors,
            vae=_tiny_video_vae(config.in_channels),
            audio_vae=audio_vae,
            vocoder=_tiny_vocoder(audio_vae, bandwidth_extension=not text_in_transformer),
        )
    components = {name: _cast(model, dtype).eval().requires_grad_(False) for name, model in models.items()}
    components["transformer"] = transformer
    components["tokenizer"] = tokenizer
    components["scheduler"] = _scheduler()
    accepted = inspect.signature(pipeline_class).parameters
    pipe = pipeline_class(**{name: component for name, component in components.items() if name in accepted})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_pipeline(transformer: LTX2VideoTransformer3DModel, pipeline_class: type | None = None):
    """A `pipeline_class` (default `LTX2Pipeline`) around `transformer`, of any size, that ends at the latents.

    Its VAEs are small and random: only their sizes and statistics are used and, for an image, the video encoder. There is no
    text encoder; the connectors pass embeddings on, at the transformer's widths, with a mask of ones as the real ones do.
    Call it with `pipe(**latents_request(transformer), height=..., width=..., num_frames=..., num_inference_steps=...)`. The
    global random state is not touched.
    """
    width = transformer.config.audio_in_channels
    audio_channels = min(8, width // 2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        vae = _tiny_video_vae(transformer.config.in_channels)
        # It keeps as many statistics as it has base channels, and compresses four mel bins to one.
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=width,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            resolution=32,
            latent_channels=audio_channels,
            mel_bins=4 * width // audio_channels,
        )
    vae, audio_vae = (
        _cast(model, transformer.dtype).eval().requires_grad_(False).to(transformer.device) for model in (vae, audio_vae)
    )
    pipe = (pipeline_class or LTX2Pipeline)(
        scheduler=_scheduler(),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=None,
        tokenizer=None,
        connectors=_Connectors(transformer),
        transformer=transformer,
        vocoder=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_request(
    transformer: LTX2VideoTransformer3DModel, *, text_tokens: int = 1024, noise_for: Clip | None = None, seed: int = 0
) -> dict:
    """The keyword arguments of one call of a `latents_pipeline`, without size and steps: guidance is the pipeline's default.

    Two prompts [1, text_tokens, width] in the transformer's dtype, and a generator in a fresh state: make a request for each
    call. The same seed gives the same request on the same kind of device. With `noise_for`, the size of the call, the request
    brings the noise that the pipeline would draw, as packed `latents` float32 [1, video tokens, in_channels].
    """
    device = transformer.device
    generator = torch.Generator(device).manual_seed(seed)
    size = 2, text_tokens, max(_text_widths(transformer.config))
    prompt, negative_prompt = torch.randn(size, generator=generator, device=device).to(transformer.dtype).split(1)
    mask = torch.ones(1, text_tokens, dtype=torch.int64, device=device)
    given = {}
    if noise_for is not None:
        frames, height, width, _ = latent_sizes(transformer.config, *noise_for)
        same = torch.Generator(device).set_state(generator.get_state())
        noise = torch.randn(1, transformer.config.in_channels, frames, height, width, generator=same, device=device)
        given = dict(latents=noise.flatten(2).mT.contiguous())
    return dict(
        **given,
        prompt_embeds=prompt,
        prompt_attention_mask=mask,
        negative_prompt_embeds=negative_prompt,
        negative_prompt_attention_mask=mask,
        spatio_temporal_guidance_blocks=[_stg_block(transformer)],
        use_cross_timestep=transformer.config.cross_attn_mod,
        generator=generator,
        output_type="latent",
    )


class _Connectors(torch.nn.Module):
    """Stands for the text connectors of a `latents_pipeline`."""

    def __init__(self, transformer: LTX2VideoTransformer3DModel):
        super().__init__()
        self.device, self.dtype = transformer.device, transformer.dtype  # the pipeline asks every component
        self.widths = _text_widths(transformer.config)

    def forward(self, prompt_embeds, attention_mask, padding_side="left"):
        video, audio = (prompt_embeds[..., :width].contiguous() for width in self.widths)
        return video, audio, torch.ones_like(attention_mask)


def _text_widths(config) -> tuple[int, int]:
    """The widths of the text embeddings for video and for audio."""
    if config.use_prompt_embeddings:
        return config.caption_channels, config.caption_channels
    return config.cross_attention_dim, config.audio_cross_attention_dim


def _stg_block(transformer: LTX2VideoTransformer3DModel) -> int:
    """The pipelines' default, or the last block: one that is not there would perturb nothing and say nothing."""
    return min(STG_BLOCK, len(transformer.transformer_blocks) - 1)


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        base_shift=0.95,
        max_shift=2.05,
        shift_terminal=0.1,
        use_dynamic_shifting=True,
    )


def _config(version: str) -> dict:
    if version not in CONFIGS:
        raise ValueError(f"unknown LTX-2 version {version!r}, known are {', '.join(map(repr, CONFIGS))}")
    return dict(CONFIGS[version])


def _random_transformer(config: dict, device: torch.device, dtype: torch.dtype, seed: int) -> LTX2VideoTransformer3DModel:
    with torch.device("meta"):
        transformer = LTX2VideoTransformer3DModel(**config)
    transformer = _cast(transformer, dtype).to_empty(device=device)
    _draw_weights(transformer, torch.Generator(device).manual_seed(seed))
    return transformer.eval().requires_grad_(False)


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    # diffusers' own `to` warns about float32 modules on every cast, also for models that have none.
    return torch.nn.Module.to(model, dtype)


@torch.no_grad()
def _draw_weights(transformer: LTX2VideoTransformer3DModel, generator: torch.Generator) -> None:
    """Weights under which every part of the block shows in the output.

    torch's own initialisation would not do: gates come out near 0.02, so in bf16 most updates round away against the
    hidden states, and q/k norm weights of exactly 1 or an all-zero table would hide a kernel that forgets them.
    """
    for module in transformer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, torch.nn.Linear) and name == "weight":
                parameter.normal_(std=module.in_features**-0.5, generator=generator)
            elif isinstance(module, torch.nn.RMSNorm):
                parameter.normal_(mean=1.5, std=0.1, generator=generator)
            else:  # biases, scale-shift tables, the keyframe embedding
                parameter.normal_(std=0.2, generator=generator)


def _tiny_tokenizer() -> GemmaTokenizer:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["▁", *map(chr, range(ord("!"), ord("~") + 1))]
    return GemmaTokenizer(vocab={token: i for i, token in enumerate(special + every_byte + characters)})


def _tiny_text_encoder(vocab_size: int, hidden_size: int) -> Gemma3ForConditionalGeneration:
    width = dict(hidden_size=hidden_size, intermediate_size=32, num_attention_heads=2)
    config = Gemma3Config(
        text_config=dict(vocab_size=vocab_size, num_hidden_layers=2, num_key_value_heads=1, head_dim=hidden_size // 2, **width),
        vision_config=dict(num_hidden_layers=1, image_size=28, patch_size=14, **width),
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


def _tiny_video_vae(latent_channels: int) -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=latent_channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True, True, True),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False, False, False, False),
        upsample_factor=(2, 2, 1, 2),
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


def _tiny_vocoder(audio_vae: AutoencoderKLLTX2Audio, *, bandwidth_extension: bool) -> LTX2Vocoder | LTX2VocoderWithBWE:
    mel_bins = audio_vae.config.mel_bins
    channels = audio_vae.config.output_channels * mel_bins
    size = dict(in_channels=channels, hidden_channels=32, resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]])
    # The factors multiply to the samples of one mel frame, 240 at 24 kHz and 160 at 16 kHz; the extension turns each
    # hop of 80 samples at 16 kHz into 240 at 48 kHz.
    to_24_khz = dict(upsample_factors=[6, 5, 8], upsample_kernel_sizes=[12, 11, 16])
    if not bandwidth_extension:
        return LTX2Vocoder(**size, **to_24_khz, output_sampling_rate=24000)
    vocoder = LTX2VocoderWithBWE(
        **size,
        upsample_factors=[8, 5, 4],
        upsample_kernel_sizes=[16, 11, 8],
        **{f"bwe_{name}": value for name, value in (size | to_24_khz).items()},
        num_mel_channels=mel_bins,
    )
    # Checkpoints carry these bases as buffers; the constructor leaves them zero, which would silence the extension.
    vocoder.mel_stft.stft_fn.forward_basis.normal_(std=0.1)
    vocoder.mel_stft.mel_basis.uniform_()
    return vocoder
