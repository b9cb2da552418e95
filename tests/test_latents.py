"""How latents lie in memory, which decides whether the STG pass has the bits of the CFG pass and can start where it is perturbed.

Calls of LTX2ConditionPipeline and LTX2InContextPipeline lay them out token by token for all passes, and so do those of
LTX2Pipeline that are given their latents. What LTX2Pipeline draws it hands to the STG pass in another layout, but in "high".
"""

import pytest
import setups
import torch
from diffusers import LTX2ConditionPipeline, LTX2InContextPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from PIL import Image

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("stand_ins", "any_width")]
TOKENS, CHANNELS, WIDTH = 512, 128, 4096


def view_of(tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` [B, S, C] as the pipelines pack them: channel by channel in memory."""
    return tokens.mT.contiguous().mT


def inputs(transformer, **options) -> dict:
    """One row, whose latents are a view."""
    kwargs = models.inputs(transformer, **setups.SMALL | options)
    return kwargs | {name: view_of(kwargs[name]) for name in ("hidden_states", "audio_hidden_states")}


def laid_out(kwargs) -> dict:
    return kwargs | {name: kwargs[name].contiguous() for name in ("hidden_states", "audio_hidden_states")}


def high(transformer, kwargs):
    with ltx2_fastpath.quality(transformer, "high"):
        return setups.run(transformer, **kwargs)


def laid(transformer) -> list[int]:
    handle = ltx2_fastpath.api._handle_of(transformer)
    return [handle.sites["latents"].fast, handle.sites["audio_latents"].fast]


@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
def test_high_computes_what_stock_computes_of_latents_laid_out(guidance):
    transformer = setups.tiny(dtype=torch.bfloat16)
    kwargs = inputs(transformer, guidance=guidance)
    assert not kwargs["hidden_states"].is_contiguous() and not kwargs["audio_hidden_states"].is_contiguous()
    stock = setups.run(transformer, **kwargs)
    ltx2_fastpath.enable(transformer)
    with ltx2_fastpath.disabled(transformer):
        expected = setups.run(transformer, **laid_out(kwargs))
    assert not setups.equal(expected, stock)
    for count in (1, 2):
        assert setups.equal(high(transformer, kwargs), expected)
        assert laid(transformer) == [count, count]
        assert setups.equal(setups.run(transformer, **kwargs), stock)
        assert not kwargs["hidden_states"].is_contiguous()  # the caller's tensors stay as they are
    high(transformer, laid_out(kwargs))
    assert laid(transformer) == [2, 2]


def test_the_stg_pass_starts_late_in_high_and_not_where_stock_has_other_bits():
    transformer = setups.tiny(dtype=torch.bfloat16)
    stg = inputs(transformer, guidance="stg")
    cfg = setups.two_rows(stg)
    stock = setups.run(transformer, **stg)
    handle = ltx2_fastpath.enable(transformer)
    prefix = handle.sites["guidance.prefix"]
    for _ in range(4):
        setups.run(transformer, **cfg)
        assert setups.equal(setups.run(transformer, **stg), stock)
    assert (prefix.fast, prefix.stock) == (0, 4)
    assert "not bit-equal" in prefix.notes[0] and "in stock, too" in prefix.notes[0]
    assert prefix._current.kept == ()  # nothing is kept for a pass that it cannot serve

    with ltx2_fastpath.disabled(transformer):
        expected = setups.run(transformer, **laid_out(stg))
    for _ in range(4):
        high(transformer, cfg)
        assert setups.equal(high(transformer, stg), expected)
    assert prefix.fast == 2  # the first shows that there are such passes, the second verifies
    setups.run(transformer, **cfg)
    assert setups.equal(setups.run(transformer, **stg), stock) and prefix.fast == 2


def test_what_was_kept_counts_and_not_the_pass_before():
    """A pass that keeps nothing, as one with the fast path off, may lie between the one that did and the STG pass."""
    transformer = setups.tiny(dtype=torch.bfloat16)
    view = inputs(transformer, guidance="stg")
    stg = laid_out(view)
    cfg = setups.two_rows(view)
    of_views = cfg | {name: view_of(cfg[name]) for name in ("hidden_states", "audio_hidden_states")}
    stock = setups.run(transformer, **stg)
    prefix = ltx2_fastpath.enable(transformer).sites["guidance.prefix"]
    for _ in range(3):
        setups.run(transformer, **cfg)
        assert setups.equal(setups.run(transformer, **stg), stock)
    assert prefix.fast == 1
    setups.run(transformer, **of_views)
    with ltx2_fastpath.disabled(transformer):
        setups.run(transformer, **cfg)
    assert setups.equal(setups.run(transformer, **stg), stock)


def test_a_pipeline_shares_its_prefix_in_high():
    pipe = models.tiny_pipeline(dtype=torch.bfloat16)
    stock = setups.generate(pipe, num_inference_steps=4)
    handle = ltx2_fastpath.enable(pipe)
    assert setups.equal(setups.generate(pipe, num_inference_steps=4), stock)
    assert handle.sites["guidance.prefix"].fast == 0 and laid(pipe.transformer) == [0, 0]
    with ltx2_fastpath.quality(pipe, "high"):
        close = setups.generate(pipe, num_inference_steps=4)
    assert handle.sites["guidance.prefix"].fast == 2
    assert laid(pipe.transformer)[0] == 2 * 4  # the STG and the isolated pass of each step
    assert not setups.equal(close, stock)
    assert setups.equal(setups.generate(pipe, num_inference_steps=4), stock)


@pytest.mark.parametrize(
    "pipeline_class, options",
    [
        (LTX2Pipeline, dict(latents=torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(0)))),
        (LTX2Pipeline, dict(latents=torch.randn(1, 4, 2, 2, 3, generator=torch.Generator().manual_seed(0)), noise_scale=0.5)),
        (LTX2ConditionPipeline, {}),
        (LTX2InContextPipeline, dict(reference_conditions=[LTX2ReferenceCondition(Image.new("RGB", (96, 64), "teal"))])),
    ],
    ids=["packed latents", "latents of a stage before", "conditions", "a reference in the context"],
)
def test_lossless_calls_share_their_prefix_where_latents_lie_alike(pipeline_class, options):
    pipe = models.tiny_pipeline("2.3", pipeline_class, dtype=torch.bfloat16)
    options = options | dict(num_inference_steps=4)
    stock = setups.generate(pipe, **options)
    prefix = ltx2_fastpath.enable(pipe).sites["guidance.prefix"]
    assert setups.equal(setups.generate(pipe, **options), stock)
    assert prefix.fast == 2, prefix.notes  # the first shows that there are such passes, the second verifies


def near(x, weight, bias, generator):
    """As a trained layer has them."""
    return x, weight, bias


def wide(x, weight, bias, generator):
    """Rows of weights over 40 octaves, and biases of their size."""
    scale = torch.exp2(torch.randint(-20, 21, (WIDTH, 1), generator=generator).float())
    return x, weight * scale, bias * scale[:, 0]


def large_bias(x, weight, bias, generator):
    return x, weight, 64 * bias


def denormal(x, weight, bias, generator):
    """Every eighth latent too small for a normal bf16."""
    return torch.where(torch.rand(x.shape, generator=generator) < 0.125, x * 1e-39, x), weight, bias


def huge_channel(x, weight, bias, generator):
    x[..., 7] = 1000.0
    return x, weight, bias


OPERANDS = near, wide, large_bias, denormal, huge_channel


def distance_of_one_rounding_less(operands, width: int, device) -> float:
    """The budget of the tier, for the only layer that reads latents. -> ULP at most between it and the eager chain"""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, TOKENS, CHANNELS), (WIDTH, CHANNELS), (WIDTH,)))
    drawn = operands(x, weight / CHANNELS**0.5, bias / 8, generator)
    x, weight, bias = (operand.bfloat16().to(device) for operand in drawn)
    weight, bias = weight[:width], bias[:width]
    two_roundings = torch.nn.functional.linear(view_of(x), weight, bias)
    one_rounding = torch.nn.functional.linear(x, weight, bias)
    product = x.double() @ weight.double().T
    truth = product + bias.double()
    errors = [(y.double() - truth).abs() for y in (two_roundings, one_rounding)]
    assert not torch.equal(two_roundings, one_rounding)
    assert errors[1].max() <= 2 * errors[0].max() and errors[1].mean() < errors[0].mean()
    # In units of the larger of the product and the output: where they cancel, the output's own ULP says nothing of either.
    ulp = torch.exp2(torch.floor(torch.log2(torch.maximum(product.abs(), truth.abs()))) - 7)
    return ((two_roundings.double() - one_rounding.double()).abs() / ulp).max().item()


@pytest.mark.parametrize("operands", OPERANDS)
def test_one_rounding_less_is_nearer_to_fp64_and_within_an_ulp(operands):
    assert distance_of_one_rounding_less(operands, WIDTH, "cpu") <= 1
