"""Whole forwards of full-size transformers: is every bit that of the stock forward, and did the kernels compute it?"""

import pytest
import torch
from test_block import expected_launches

import ltx2_fastpath
from ltx2_fastpath.first_sight import FirstSight
from ltx2_fastpath.ops import cuda, gated_residual, head_gate, qk_norm_split_rope, rms_norm_modulate
from ltx2_fastpath.testing import models

SMALL = dict(height=512, width=768, num_frames=121)
LARGE = dict(height=704, width=1280, num_frames=121)
TINY = dict(height=512, width=768, num_frames=9)
GUIDANCE = ("cfg", "stg", "isolated")


@pytest.fixture(scope="module", params=models.CONFIGS)
def version(request):
    return request.param


@pytest.fixture
def model(full_size, version):
    transformer = full_size(version)
    yield transformer
    ltx2_fastpath.disable(transformer)


def op_sites(handle) -> dict:
    return {name: site for name, site in handle.sites.items() if isinstance(site, FirstSight)}


class Calls:
    """What the sites of `handle` did within the context: `fast` and `stock`, {site: calls}."""

    def __init__(self, handle):
        self._handle = handle

    def __enter__(self):
        self._before = {name: (site.fast, site.stock) for name, site in op_sites(self._handle).items()}
        return self

    def __exit__(self, *exception):
        after = {name: (site.fast, site.stock) for name, site in op_sites(self._handle).items()}
        self.fast = {name: after[name][0] - self._before[name][0] for name in after}
        self.stock = {name: after[name][1] - self._before[name][1] for name in after}


def forward(model, kwargs):
    with torch.no_grad():
        return model(**kwargs)


def stock_forward(model, kwargs):
    with ltx2_fastpath.disabled(model):
        return forward(model, kwargs)


def assert_equal(fast, stock):
    for name, mine, host in zip(("video", "audio"), fast, stock):
        different = int((mine != host).sum())
        assert torch.equal(mine, host), f"{name}: {different} of {host.numel()} values differ"


def check(model, version, kwargs, *, image_to_video, guidance):
    """A stock forward, and fast ones at first sight, at first sight of distinct timesteps, and when all is verified."""
    handle = ltx2_fastpath.enable(model)
    assert handle.active and not handle.skipped, handle.reason or handle.skipped
    stock = stock_forward(model, kwargs)
    assert stock[0].isfinite().all() and stock[0].float().std() > 0.1
    for _ in range(1 + image_to_video):
        assert_equal(forward(model, kwargs), stock)
    with Calls(handle) as calls:
        fast = forward(model, kwargs)
    assert_equal(fast, stock)

    fallen_back = {name: op_sites(handle)[name].notes for name, count in calls.stock.items() if count}
    assert fallen_back == {}
    isolated = guidance == "isolated"
    perturbed = guidance == "stg" and version != "2.0"
    expected = expected_launches(
        version, layers=len(model.transformer_blocks), perturbed=perturbed, a2v=not isolated, v2a=not isolated
    )
    assert sum(calls.fast.values()) == sum(expected.values())


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("image_to_video", [False, True], ids=["t2v", "i2v"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_forward_at_512x768x121(model, version, caplog, batch_size, image_to_video, guidance):
    kwargs = models.inputs(model, **SMALL, batch_size=batch_size, image_to_video=image_to_video, guidance=guidance)
    check(model, version, kwargs, image_to_video=image_to_video, guidance=guidance)
    assert [record.getMessage() for record in caplog.records if record.name == "ltx2_fastpath"] == []


@pytest.mark.parametrize("version", ["2.3"], indirect=True, scope="module")
@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("image_to_video", [False, True], ids=["t2v", "i2v"])
def test_forward_at_704x1280x121(model, version, image_to_video, guidance):
    kwargs = models.inputs(model, **LARGE, image_to_video=image_to_video, guidance=guidance)
    check(model, version, kwargs, image_to_video=image_to_video, guidance=guidance)


def test_disabled_and_disable_are_the_stock_forward(model):
    """What the other tests take for stock is what the model computed before it was enabled, and computes after."""
    kwargs = models.inputs(model, **TINY, batch_size=2, image_to_video=True)
    before = forward(model, kwargs)
    handle = ltx2_fastpath.enable(model)
    forward(model, kwargs)
    with Calls(handle) as calls:
        assert_equal(stock_forward(model, kwargs), before)
    assert sum(calls.fast.values()) == sum(calls.stock.values()) == 0
    ltx2_fastpath.disable(model)
    assert_equal(forward(model, kwargs), before)


@pytest.mark.parametrize("num_frames", [1, 9])
def test_few_tokens(model, version, num_frames):
    """One audio token for a single frame: torch sums under 16 rows in other orders."""
    kwargs = models.inputs(model, height=256, width=256, num_frames=num_frames, batch_size=1)
    handle = ltx2_fastpath.enable(model)
    stock = stock_forward(model, kwargs)
    for _ in range(2):
        assert_equal(forward(model, kwargs), stock)
    with Calls(handle) as calls:
        assert_equal(forward(model, kwargs), stock)
    assert calls.fast["norm1"] == calls.fast["attn1.qk_norm_split_rope"] == len(model.transformer_blocks)


@pytest.mark.parametrize(
    "context", [torch.inference_mode, lambda: torch.cuda.stream(torch.cuda.Stream())], ids=["inference", "stream"]
)
def test_in_inference_mode_and_on_another_stream(model, context):
    kwargs = models.inputs(model, **TINY, batch_size=2, image_to_video=True)
    stock = forward(model, kwargs)
    handle = ltx2_fastpath.enable(model)
    with Calls(handle) as calls:
        for _ in range(3):
            with context():
                outputs = forward(model, kwargs)
                torch.cuda.synchronize()
            assert_equal(outputs, stock)
    # The first calls of the first two forwards verified: modulations for each token, then by index.
    assert calls.fast["norm1"] == 3 * len(model.transformer_blocks) - 2


def stacked(first: dict, second: dict) -> dict:
    """The inputs of one forward whose rows are those of both."""
    return {name: torch.cat([first[name], value]) if isinstance(value, torch.Tensor) else value for name, value in second.items()}


def test_passes_of_a_step_that_share_a_prefix(model):
    """The STG pass starts where it differs from the CFG pass of its step, once that was seen to give its bits.

    For that the latents must lie alike in memory; diffusers' pipelines hand in a view, see patches/high.py.
    """
    handle = ltx2_fastpath.enable(model)
    layers = len(model.transformer_blocks)
    for step in range(4):
        stg = models.inputs(model, **SMALL, guidance="stg", seed=2 * step)
        stg["hidden_states"] = stg["hidden_states"].contiguous()
        cfg = stacked(models.inputs(model, **SMALL, seed=2 * step + 1), stg | dict(spatio_temporal_guidance_blocks=None))
        assert_equal(forward(model, cfg), stock_forward(model, cfg))
        with Calls(handle) as calls:
            fast = forward(model, stg)
        assert_equal(fast, stock_forward(model, stg))
    reused = handle.sites["guidance.prefix"].fast
    assert reused >= 1, handle.sites["guidance.prefix"].notes
    assert calls.fast["ada_values"] == layers - models.STG_BLOCK


@pytest.mark.parametrize("version", ["2.3"], indirect=True, scope="module")
def test_with_triton_alone(model, version, monkeypatch):
    """Without cuda.core. Its QK-norm + RoPE takes full tables, which the video's and the audio's stream share."""
    monkeypatch.setattr(cuda, "IMPLEMENTATIONS", ("triton",))
    for op in (gated_residual, head_gate, qk_norm_split_rope, rms_norm_modulate):
        monkeypatch.setattr(op, "CANDIDATES", tuple(c for c in op.CANDIDATES if "triton" in (c, c[0])))
        assert op.CANDIDATES
    kwargs = models.inputs(model, **SMALL)
    handle = ltx2_fastpath.enable(model)
    stock = stock_forward(model, kwargs)
    for _ in range(6):
        assert_equal(forward(model, kwargs), stock)
    for name in ("norm1", "norm2", "attn1.qk_norm_split_rope", "video_to_audio_attn.qk_norm_split_rope", "attn1.head_gate"):
        site = handle.sites[name]
        assert site.fast == 6 * len(model.transformer_blocks) - 1 and "triton" in site.notes[0], site.notes


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_cuda_graphs(model, guidance):
    handle = ltx2_fastpath.enable(model, cuda_graphs=True)
    graphs = handle.sites["cuda_graphs"]
    kwargs = models.inputs(model, **TINY, guidance=guidance)
    for seed in range(5):
        other = models.inputs(model, **TINY, guidance=guidance, seed=seed)
        kwargs |= {name: other[name] for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states")}
        assert_equal(forward(model, kwargs), stock_forward(model, kwargs))
    assert graphs.fast >= 2, graphs.notes
