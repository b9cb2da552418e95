"""torch.compile beside the fast path: one frame for all blocks, no graph break, and the same values."""

import copy

import pytest
import setups
import torch
from setups import Together
from torch._dynamo.testing import CompileCounter

from ltx2_fastpath import disable, disabled, enable, quality, report
from ltx2_fastpath.bench import models

pytestmark = pytest.mark.usefixtures("any_width", "fresh_compiler")
LAYERS = 12  # more than torch compiles one after the other before it gives up (recompile_limit, 8)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def both(stand_ins):
    return Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", num_layers=LAYERS)))


def compile_blocks(pipe) -> CompileCounter:
    """Compile a pipeline's blocks without a graph break; counts what is compiled, and computes it as eager code does."""
    counter = CompileCounter()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=counter)
    return counter


@pytest.fixture(scope="module")
def operations() -> int:
    """How many operations the host's block has as a graph."""
    torch._dynamo.reset()
    pipe = setups.pipeline_of(setups.tiny())
    counter = compile_blocks(pipe)
    setups.step(pipe.transformer)
    assert counter.frame_count == 1
    return counter.op_count


def test_blocks_compiled_after_enable(both, operations):
    enable(both.ours)
    counter = compile_blocks(both.ours)
    for _ in range(2):
        both.check(fast=False)  # compiled: Inductor fuses the plain arithmetic
    assert (counter.frame_count, counter.op_count) == (1, operations)  # one frame for twelve blocks, the host's operations
    assert not {place for place, _ in report(both.ours).stock_calls} & {"block", "attn1"}

    disable(both.ours)
    both.check(fast=False)
    assert counter.frame_count <= 2  # the host's forward, once more


def test_blocks_compiled_before_enable(both):
    counter = compile_blocks(both.ours)
    both.check(fast=False)
    assert counter.frame_count == 1
    enable(both.ours)
    for _ in range(2):
        both.check(fast=False)
    assert counter.frame_count == 2  # once more for all twelve, not once for each
    disable(both.ours)
    both.check(fast=False)
    assert counter.frame_count == 2  # what was compiled for the host is used again


def test_switching_costs_a_frame_for_each_enable(both):
    counter = compile_blocks(both.ours)
    for _ in range(2):
        enable(both.ours)
        both.check(fast=False)
        with disabled(both.ours):
            both.check(fast=False)
        disable(both.ours)
        both.check(fast=False)
    assert counter.frame_count <= 3


def test_switching_the_quality_costs_one_frame_in_all(both):
    enable(both.ours)
    counter = compile_blocks(both.ours)
    both.check(fast=False)
    assert counter.frame_count == 1
    for _ in range(3):
        with quality(both.ours, "high"):
            setups.step(both.ours.transformer)
        both.check(fast=False)
    assert counter.frame_count == 2  # blocks with a text mask and blocks without
    dropped = {row["site"]: row["fast"] for row in report(both.ours).rows if row["site"].endswith("text.mask")}
    assert dropped == {"text.mask": 3, "audio_text.mask": 3}


def test_kinds_of_passes_compile_as_they_would_without_us(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(num_layers=1)))
    enable(both.ours)
    counters = [compile_blocks(both.stock), compile_blocks(both.ours)]
    for options in (dict(), dict(guidance="isolated", image_to_video=True)):
        both.check(fast=False, **options)
    stock, ours = ((counter.frame_count, counter.op_count) for counter in counters)
    assert ours == stock


def test_whole_transformer_compiled(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(num_layers=1)))
    counter = CompileCounter()
    ours = torch.compile(both.ours.transformer, backend=counter)
    handle = enable(ours)
    assert handle.active and enable(both.ours) is handle
    inputs = models.inputs(both.stock.transformer, **setups.SMALL)
    expected = setups.run(both.stock.transformer, **inputs)
    with torch.no_grad():
        for _ in range(2):
            assert setups.equal(expected, ours(**inputs))
        assert counter.frame_count > 0
        disable(ours)
        assert setups.equal(expected, ours(**inputs))
    assert not [module for module in both.ours.transformer.modules() if "forward" in vars(module)]


def test_whole_transformer_compiled_is_lossless_in_every_quality(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(num_layers=1)))
    counter = CompileCounter()
    ours = torch.compile(both.ours.transformer, backend=counter)
    enable(ours)
    inputs = models.inputs(both.stock.transformer, **setups.SMALL)
    expected = setups.run(both.stock.transformer, **inputs)
    with torch.no_grad():
        assert setups.equal(expected, ours(**inputs))
        frames = counter.frame_count
        with quality(ours, "high"):
            assert setups.equal(expected, ours(**inputs))
    assert counter.frame_count == frames > 0


def test_compiled_blocks_told_to_run_eagerly(both):
    enable(both.ours)
    counter = compile_blocks(both.ours)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            both.check()
    assert counter.frame_count == 0


def test_copy_of_an_enabled_transformer_compiled(stand_ins):
    stock = setups.tiny()
    original = setups.tiny()
    enable(original)
    ours = copy.deepcopy(original)
    counter = CompileCounter()
    ours.compile_repeated_blocks(fullgraph=True, backend=counter)
    for _ in range(2):
        assert setups.equal(setups.step(stock), setups.step(ours))
    assert counter.frame_count <= 2


def test_one_block_compiled(both):
    enable(both.ours)
    both.ours.transformer.transformer_blocks[3].compile(fullgraph=True, backend="eager")
    for _ in range(2):
        both.check()
