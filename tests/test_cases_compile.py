"""torch.compile beside the fast path: one frame for all blocks, no graph break, and the same values."""

import copy

import pytest
import setups
import torch
from setups import Together, anatomy, differences
from torch._dynamo.testing import CompileCounter

from ltx2_fastpath import disable, disabled, enable, report
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


def compile_blocks(both) -> list[CompileCounter]:
    """Compile the blocks of both sides without a graph break; the counters of what was compiled."""
    counters = []
    for pipe in (both.stock, both.ours):
        counters.append(CompileCounter())
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=counters[-1])
    return counters


def compiled(counters) -> list[tuple[int, int]]:
    return [(counter.frame_count, counter.op_count) for counter in counters]


def test_blocks_compiled_after_enable(both):
    enable(both.ours)
    counters = compile_blocks(both)
    for _ in range(2):
        both.check(fast=False)  # compiled: Inductor fuses the plain arithmetic
    stock, ours = compiled(counters)
    assert stock == ours and ours[0] == 1  # one frame for twelve blocks, with the host's operations
    assert not {place for place, _ in report(both.ours).stock_calls} & {"block", "attn1"}

    disable(both.ours)
    both.check(fast=False)
    assert compiled(counters)[1][0] <= 2  # the host's forward, once more


def test_blocks_compiled_before_enable(both):
    counters = compile_blocks(both)
    both.check(fast=False)
    assert compiled(counters)[1][0] == 1
    enable(both.ours)
    for _ in range(2):
        both.check(fast=False)
    assert compiled(counters)[1][0] == 2  # once more for all twelve, not once for each
    disable(both.ours)
    both.check(fast=False)
    assert compiled(counters)[1][0] == 2  # what was compiled for the host is used again
    both.check_restored()


def test_switching_costs_no_frame_beyond_the_two(both):
    counters = compile_blocks(both)
    for _ in range(3):
        enable(both.ours)
        both.check(fast=False)
        with disabled(both.ours):
            both.check(fast=False)
        disable(both.ours)
        both.check(fast=False)
    # Each enable makes a forward of its own.
    assert compiled(counters)[1][0] <= 4


def test_kinds_of_passes_compile_as_they_would_without_us(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(num_layers=1)))
    enable(both.ours)
    counters = compile_blocks(both)
    for options in (dict(), dict(image_to_video=True), dict(guidance="isolated")):
        both.check(fast=False, **options)
    stock, ours = compiled(counters)
    assert ours == stock


def test_whole_transformer_compiled(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", num_layers=1)))
    counters = [CompileCounter(), CompileCounter()]
    stock, ours = (torch.compile(pipe.transformer, backend=counter) for pipe, counter in zip((both.stock, both.ours), counters))
    handle = enable(ours)
    assert handle.active and enable(both.ours) is handle
    inputs = models.inputs(both.stock.transformer, **setups.SMALL)
    with torch.no_grad():
        for _ in range(2):
            assert setups.equal(stock(**inputs), ours(**inputs))
    assert counters[1].frame_count == counters[0].frame_count
    disable(ours)
    with torch.no_grad():
        assert setups.equal(stock(**inputs), ours(**inputs))
    assert differences(anatomy(both.stock.transformer), anatomy(both.ours.transformer)) == []


def test_compiled_blocks_told_to_run_eagerly(both):
    enable(both.ours)
    counters = compile_blocks(both)
    both.check(fast=False)
    with torch.compiler.set_stance("force_eager"):
        both.check()
    assert compiled(counters)[1][0] == 1


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
    for pipe in (both.stock, both.ours):
        pipe.transformer.transformer_blocks[3].compile(fullgraph=True, backend="eager")
    for _ in range(2):
        both.check()
