"""Caches of the host keep tensors from step to step: is what they keep what they would keep without us?"""

import pytest
import setups
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from setups import Together

from ltx2_fastpath import disable, enable, report
from ltx2_fastpath.ops import gated_residual
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("any_width")
# PAB keeps one state for all guidance passes of a step, and the passes differ in batch size.
CFG_ALONE = dict(stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0)


def pab_of(pipe) -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: pipe.current_timestep,
    )


def taylorseer_of(pipe) -> TaylorSeerCacheConfig:
    return setups.taylorseer()


def lite_taylorseer_of(pipe) -> TaylorSeerCacheConfig:
    return setups.taylorseer(use_lite_mode=True)


CACHES = {"PAB": pab_of, "TaylorSeer": taylorseer_of, "TaylorSeer lite": lite_taylorseer_of}


@pytest.mark.parametrize("first", ["cache", "enable"])
@pytest.mark.parametrize("cache", CACHES)
def test_five_steps_with_every_second_from_a_cache(stand_ins, cache, first):
    def generate(pipe):
        return setups.generate(pipe, num_inference_steps=5, **(CFG_ALONE if cache == "PAB" else {}))

    both = Together(stand_ins, models.tiny_pipeline)
    without_cache = generate(both.stock)
    if first == "enable":
        enable(both.ours)
    both.do(lambda pipe: pipe.transformer.enable_cache(CACHES[cache](pipe)))
    enable(both.ours)
    for _ in range(2):  # the second call starts with caches that the first left
        launched = both.check(generate)
    cached = generate(both.ours)
    assert not setups.equal(cached, without_cache)  # the cache was used
    assert launched["ada_values"] > 0 and report(both.ours).stock_calls == {}

    both.do("disable_cache")
    both.check(generate)
    assert setups.equal(generate(both.ours), without_cache)
    disable(both.ours)
    both.check_restored()


def test_pab_computes_every_second_attention(stand_ins):
    both = Together(stand_ins)
    both.do("enable_cache", setups.pab())
    enable(both.ours)
    attentions = [both.check()["qk_norm_split_rope"] for _ in range(5)]
    assert attentions == [12, 0, 12, 0, 12]


def test_kernel_that_wrote_into_an_attention_output_would_corrupt_pab(stand_ins, monkeypatch):
    """The test above convicts it: what PAB keeps is the tensor that the next step of the block reads."""

    def in_place(candidate, norm, x, update, gate, *modulations):
        result = gated_residual.eager(norm, x, update, gate, *modulations)
        update.mul_(2)
        return result

    both = Together(stand_ins)
    both.do("enable_cache", setups.pab())
    enable(both.ours)
    both.check()
    monkeypatch.setattr(gated_residual, "launch", in_place)
    equal = [setups.equal(setups.step(both.stock.transformer), setups.step(both.ours.transformer)) for _ in range(3)]
    assert not all(equal)


def test_caches_hold_the_tensors_that_they_would_hold_without_us(stand_ins):
    both = Together(stand_ins)
    both.do("enable_cache", setups.pab())
    enable(both.ours)
    for _ in range(3):
        both.check()
        kept = [
            [
                module._diffusers_hook.get_hook("pyramid_attention_broadcast").state.cache
                for name, module in pipe.transformer.named_modules()
                if name.endswith(("attn1", "attn2", "_attn"))
            ]
            for pipe in (both.stock, both.ours)
        ]
        assert len(kept[0]) == 12
        assert setups.equal(*kept)


def with_default_guidance(pipe):
    pipe.transformer.enable_cache(pab_of(pipe))
    setups.generate(pipe)


def with_first_block_cache(pipe):
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    setups.step(pipe.transformer)


def with_mag_cache(pipe):
    pipe.transformer.enable_cache(MagCacheConfig(mag_ratios=[1.0] * 5, num_inference_steps=5))
    setups.step(pipe.transformer)


def with_a_second_cache(pipe):
    pipe.transformer.enable_cache(setups.taylorseer())
    pipe.transformer.enable_cache(setups.pab())


def without_a_context(pipe):
    pipe.transformer.enable_cache(setups.taylorseer())
    pipe.transformer(**models.inputs(pipe.transformer, **setups.SMALL))


def with_fused_qkv(pipe):
    pipe.transformer.fuse_qkv_projections()
    setups.step(pipe.transformer)


@pytest.mark.parametrize("first", ["enable", "the rest"])
@pytest.mark.parametrize(
    "fails",
    [
        with_default_guidance,
        with_first_block_cache,
        with_mag_cache,
        with_a_second_cache,
        without_a_context,
        with_fused_qkv,
    ],
)
def test_what_fails_on_ltx2_fails_with_the_same_error(stand_ins, fails, first):
    both = Together(stand_ins, models.tiny_pipeline)
    if first == "enable":
        enable(both.ours)
    errors = []
    for pipe in (both.stock, both.ours):
        with torch.no_grad(), pytest.raises(Exception) as caught:
            fails(pipe)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    enable(both.ours)
    disable(both.ours)
    both.check_restored()
