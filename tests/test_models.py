"""The shared builders: do they make what the published checkpoints and the real pipelines make?"""

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline, LTX2VideoTransformer3DModel
from PIL import Image

from ltx2_fastpath.testing import models

SMALL = dict(height=64, width=96, num_frames=9, text_tokens=16)


def call(pipe, output_type="latent", **options):
    generator = torch.Generator().manual_seed(0)
    return pipe(**models.TINY_CALL | options, generator=generator, output_type=output_type)


def record_forwards(transformer) -> list[dict]:
    """The keyword arguments of every forward of `transformer` from now on."""
    forwards = []
    transformer.register_forward_pre_hook(lambda module, args, kwargs: forwards.append(kwargs), with_kwargs=True)
    return forwards


def layout(kwargs: dict) -> dict:
    """`kwargs` with each tensor reduced to dtype, shape and the strides of the dimensions that have any steps."""

    def describe(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.dtype, value.shape, [step for step, size in zip(value.stride(), value.shape) if size > 1]

    return {name: describe(value) for name, value in kwargs.items()}


@pytest.mark.parametrize(
    "version, parameters",
    # 2.3 adds gates, three more modulation rows and the prompt modulation, and drops the caption projections.
    [("2.0", 18_876_174_592), ("2.3", 18_988_838_144), ("2.5", 18_987_859_200)],
)
def test_full_size(version, parameters):
    with torch.device("meta"):
        transformer = LTX2VideoTransformer3DModel(**models.CONFIGS[version])
    assert sum(parameter.numel() for parameter in transformer.parameters()) == parameters


def test_switches_of_each_version():
    old, gated, keyframed = (models.tiny_transformer(version) for version in ("2.0", "2.3", "2.5"))

    assert old.transformer_blocks[0].attn1.to_gate_logits is None
    assert old.transformer_blocks[0].scale_shift_table.shape[0] == 6
    assert hasattr(old, "caption_projection") and not hasattr(old, "prompt_adaln")
    for transformer in (gated, keyframed):
        assert transformer.transformer_blocks[0].audio_to_video_attn.to_gate_logits is not None
        assert transformer.transformer_blocks[0].scale_shift_table.shape[0] == 9
        assert hasattr(transformer, "prompt_adaln") and not hasattr(transformer, "caption_projection")

    assert gated.transformer_blocks[0].ff.net[0].proj.bias is not None
    assert keyframed.transformer_blocks[0].ff.net[0].proj.bias is None
    assert keyframed.transformer_blocks[0].audio_ff.net[0].proj.bias is not None
    assert keyframed.keyframes_abs_pos_embedding.abs().min() > 0

    without = models.tiny_transformer("2.3", use_prompt_adaln_single=False)
    assert not hasattr(without, "prompt_adaln")


def test_build_transformer_is_full_width_and_frozen():
    transformer = models.build_transformer("2.3", num_layers=1, dtype=torch.bfloat16)
    assert len(transformer.transformer_blocks) == 1
    assert transformer.transformer_blocks[0].attn1.to_q.weight.shape == (4096, 4096)
    assert transformer.transformer_blocks[0].audio_attn1.to_q.weight.shape == (2048, 2048)
    assert {parameter.dtype for parameter in transformer.parameters()} == {torch.bfloat16}
    assert not transformer.training and not any(parameter.requires_grad for parameter in transformer.parameters())

    video, audio = transformer(**models.inputs(transformer, **SMALL))
    for output in (video, audio):
        assert output.isfinite().all() and 0.1 < output.float().std() < 10


def test_weights_follow_the_seed_and_leave_global_random_state_alone(version):
    before = torch.get_rng_state()
    first, again, other = (models.tiny_transformer(version, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)

    first, again, other = (call(models.tiny_pipeline(version, seed=seed)).frames for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_every_weight_shows_in_the_output(transformer):
    transformer.requires_grad_(True)
    video, audio = transformer(**models.inputs(transformer, **SMALL, image_to_video=True))
    (video.square().sum() + audio.square().sum()).backward()
    silent = {name for name, weight in transformer.named_parameters() if weight.grad is None or not weight.grad.abs().sum() > 0}
    # Only the keyframe pipelines pass the mask that adds this embedding.
    assert silent <= {"keyframes_abs_pos_embedding"}


def test_values_stay_in_range_over_48_layers(version):
    transformer = models.tiny_transformer(version, num_layers=48)
    spreads = []
    for block in transformer.transformer_blocks:
        block.register_forward_hook(lambda module, args, output: spreads.append([x.std() for x in output]))
    with torch.no_grad():
        transformer(**models.inputs(transformer, **SMALL))
    assert torch.tensor(spreads).shape == (48, 2)
    assert all(0.3 < spread < 30 for pair in spreads for spread in pair)


@pytest.mark.parametrize(
    "height, width, num_frames, video_tokens, audio_tokens",
    [(512, 768, 121, 6144, 126), (704, 1280, 121, 14080, 126), (512, 768, 9, 768, 9), (512, 768, 1, 384, 1)],
)
def test_token_counts(height, width, num_frames, video_tokens, audio_tokens):
    transformer = models.tiny_transformer("2.3")
    kwargs = models.inputs(transformer, height=height, width=width, num_frames=num_frames, batch_size=2)
    assert kwargs["hidden_states"].shape == (2, video_tokens, 4)
    assert kwargs["audio_hidden_states"].shape == (2, audio_tokens, 4)
    assert kwargs["video_coords"].shape == (2, 3, video_tokens, 2)
    assert kwargs["encoder_hidden_states"].shape == (2, 1024, 16)


@pytest.mark.parametrize("image_to_video", [False, True])
def test_inputs_are_what_the_pipeline_passes(version, image_to_video):
    pipe = models.tiny_pipeline(version, LTX2ImageToVideoPipeline if image_to_video else LTX2Pipeline)
    forwards = record_forwards(pipe.transformer)
    image = dict(image=Image.new("RGB", (96, 64), "teal")) if image_to_video else {}
    call(pipe, use_cross_timestep=version != "2.0", **image)

    assert len(forwards) == 3 * models.TINY_CALL["num_inference_steps"]
    for passed, guidance, batch_size in zip(forwards, ("cfg", "stg", "isolated"), (2, 1, 1)):
        built = models.inputs(pipe.transformer, **SMALL, batch_size=batch_size, image_to_video=image_to_video, guidance=guidance)
        assert layout(built) == layout(passed)
        if image_to_video:
            assert torch.equal(built["timestep"] == 0, passed["timestep"] == 0)
        for name in ("video_coords", "audio_coords", "encoder_attention_mask"):
            assert torch.equal(built[name], passed[name])


@pytest.mark.parametrize("image_to_video", [False, True])
def test_pipeline_that_ends_at_the_latents_passes_the_same(version, image_to_video):
    transformer = models.tiny_transformer(version)
    before = torch.get_rng_state()
    pipe = models.latents_pipeline(transformer, LTX2ImageToVideoPipeline if image_to_video else None)
    assert torch.equal(before, torch.get_rng_state())
    assert type(pipe) is (LTX2ImageToVideoPipeline if image_to_video else LTX2Pipeline)
    forwards = record_forwards(transformer)
    image = dict(image=Image.new("RGB", (96, 64), "teal"), image_crf=0) if image_to_video else {}

    def request(seed):
        size = {name: value for name, value in SMALL.items() if name != "text_tokens"}
        return pipe(
            **models.latents_request(transformer, text_tokens=16, seed=seed), **size, **image, num_inference_steps=2
        )  # fmt: skip

    first, again, other = map(request, (0, 0, 1))
    assert len(forwards) == 3 * 3 * 2
    for passed, guidance, batch_size in zip(forwards[:6], 2 * ("cfg", "stg", "isolated"), 2 * (2, 1, 1)):
        built = models.inputs(transformer, **SMALL, batch_size=batch_size, image_to_video=image_to_video, guidance=guidance)
        assert layout(built) == layout(passed)
        assert torch.equal(built["encoder_attention_mask"], passed["encoder_attention_mask"])
    assert not torch.equal(*forwards[0]["encoder_hidden_states"])
    assert first.frames.shape == (1, 4, 2, 2, 3) and first.audio.shape[0] == 1
    for name in ("frames", "audio"):
        assert first[name].isfinite().all() and first[name].std() > 0.1
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_inputs_follow_the_seed(transformer):
    first, again, other = (
        models.inputs(transformer, **SMALL, dtype=torch.bfloat16, seed=seed)["hidden_states"] for seed in (1, 1, 2)
    )
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pipeline_decodes_video_and_sound(version, dtype):
    output = call(models.tiny_pipeline(version, dtype=dtype), output_type="np")
    assert output.frames.shape == (1, 9, 64, 96, 3)
    assert np.isfinite(output.frames).all() and output.frames.std() > 0.02
    assert output.audio.shape[:2] == (1, 2) and output.audio.shape[2] > 7000
    assert output.audio.isfinite().all() and output.audio.float().std() > 0.02
    frames = call(models.tiny_pipeline(version, dtype=dtype), output_type="pil").frames[0]
    assert len(frames) == 9 and frames[0].size == (96, 64)


def test_tiny_call_perturbs_a_block(pipe):
    stg, without_stg = call(pipe).frames, call(pipe, spatio_temporal_guidance_blocks=[28]).frames
    perturbs = pipe.transformer.config.perturbed_attn  # not in 2.0, whose blocks ignore the request
    assert torch.equal(stg, without_stg) != perturbs


def test_condition_pipeline_runs(version):
    pipe = models.tiny_pipeline(version, LTX2ConditionPipeline)
    assert isinstance(pipe, LTX2ConditionPipeline)
    assert call(pipe).frames.shape == (1, 4, 2, 2, 3)


@pytest.mark.parametrize("build", [models.build_transformer, models.tiny_transformer, models.tiny_pipeline])
def test_unknown_version_names_the_known_ones(build):
    with pytest.raises(ValueError, match="'2.4', known are '2.0', '2.3', '2.5'"):
        build("2.4")


@pytest.mark.parametrize("wrong", [dict(height=100), dict(width=100), dict(guidance="none")])
def test_inputs_name_the_bad_argument(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        models.inputs(models.tiny_transformer("2.3"), **SMALL | wrong)
