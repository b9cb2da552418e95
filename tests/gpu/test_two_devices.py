"""Two GPUs in one process: a model on the one that is not current, and a model of which each has a half."""

import accelerate
import pytest
import setups
import torch

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SIZE = dict(height=512, width=768, num_frames=9)


@pytest.fixture(autouse=True)
def first_is_current():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    torch.cuda.empty_cache()


def forward(transformer, kwargs):
    with torch.no_grad():
        return transformer(**kwargs)


def kernel_calls(handle) -> int:
    return sum(site.fast for name, site in handle.sites.items() if hasattr(site, "op"))


@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
@pytest.mark.parametrize("image_to_video", [False, True], ids=["t2v", "i2v"])
def test_model_on_the_device_that_is_not_current(image_to_video, guidance):
    transformer = models.build_transformer("2.3", num_layers=2, device="cuda:1", dtype=torch.bfloat16)
    kwargs = models.inputs(transformer, **SIZE, image_to_video=image_to_video, guidance=guidance)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    allocated = torch.cuda.memory_allocated(0)
    for launched in (False, True, True):
        before = kernel_calls(handle)
        outputs = forward(transformer, kwargs)
        assert setups.equal(outputs, stock) and outputs[0].device == torch.device("cuda:1")
        assert not launched or kernel_calls(handle) > before
    assert torch.cuda.memory_allocated(0) == allocated  # nothing of it was on the other
    assert not handle.stock_calls and not [site for site in handle.sites.values() if "gave other bits" in "".join(site.notes)]


def test_one_model_on_each_device():
    """Two transformers, or one moved: verdicts and tables are per device."""
    first, second = (models.build_transformer("2.3", num_layers=2, device=f"cuda:{i}", dtype=torch.bfloat16) for i in range(2))
    for transformer in (first, second):
        kwargs = models.inputs(transformer, **SIZE)
        stock = forward(transformer, kwargs)
        handle = ltx2_fastpath.enable(transformer)
        for _ in range(2):
            assert setups.equal(forward(transformer, kwargs), stock)
        assert kernel_calls(handle) > 0
    first.to("cuda:1")
    kwargs = models.inputs(first, **SIZE)
    with ltx2_fastpath.disabled(first):
        stock = forward(first, kwargs)
    for _ in range(2):
        assert setups.equal(forward(first, kwargs), stock)


@pytest.mark.parametrize("first", ["enable", "dispatch"])
def test_halves_on_two_devices(first):
    """An explicit device map: accelerate sends every block's arguments to that block's device."""
    transformer = models.build_transformer("2.3", num_layers=4, device="cuda:0", dtype=torch.bfloat16)
    kwargs = models.inputs(transformer, **SIZE)
    places = {name: 0 for name, _ in transformer.named_children() if name != "transformer_blocks"}
    places |= {f"transformer_blocks.{i}": i // 2 for i in range(4)}
    places |= {"scale_shift_table": 0, "audio_scale_shift_table": 0}
    if first == "enable":
        ltx2_fastpath.enable(transformer)
    accelerate.dispatch_model(transformer, places, force_hooks=True)
    assert transformer.transformer_blocks[3].attn1.to_q.weight.device == torch.device("cuda:1")
    handle = ltx2_fastpath.enable(transformer)
    assert handle.active and not handle.skipped
    for image_to_video in (False, True):
        kwargs = models.inputs(transformer, **SIZE, image_to_video=image_to_video, device="cuda:0")
        with ltx2_fastpath.disabled(transformer):
            stock = forward(transformer, kwargs)
        handle.stock_calls.clear()
        for launched in (False, True, True):
            before = kernel_calls(handle)
            outputs = forward(transformer, kwargs)
            assert setups.equal(outputs, stock) and outputs[0].device == torch.device("cuda:0")
            # q and k norms are hooked and so are called; at least twelve sites of each block are left.
            assert not launched or kernel_calls(handle) - before >= 4 * 12
    assert not handle.stock_calls
    ltx2_fastpath.disable(transformer)
    assert setups.equal(forward(transformer, kwargs), stock)
