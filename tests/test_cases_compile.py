"""torch.compile beside the fast path: one frame for all blocks, no graph break, and the same values.

Models too narrow for the kernels compile to the host's graph, operation for operation. In wide ones QK-norm + RoPE is opaque.
"""

import copy

import accelerate
import pytest
import setups
import torch
from setups import Together
from torch._dynamo.testing import CompileCounter

from ltx2_fastpath import disable, disabled, enable, quality, report
from ltx2_fastpath.ops import qk_norm_split_rope
from ltx2_fastpath.testing import models

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


WIDE = dict(
    num_attention_heads=8,
    attention_head_dim=128,
    cross_attention_dim=1024,
    audio_num_attention_heads=16,
    audio_attention_head_dim=64,
    audio_cross_attention_dim=1024,
)
ATTENTIONS = 6  # of a layer, each with its opaque op


@pytest.fixture
def wide(stand_ins):
    return Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", num_layers=LAYERS, **WIDE)))


def test_wide_blocks_have_an_opaque_op(wide, operations):
    enable(wide.ours)
    counter = compile_blocks(wide.ours)
    for _ in range(2):
        assert wide.check() == {"qk_norm_split_rope": ATTENTIONS * LAYERS}
    assert counter.frame_count == 1 and counter.op_count < operations
    rows = {row["site"]: row for row in report(wide.ours).rows if row["site"].endswith("qk_norm_split_rope")}
    assert len(rows) == ATTENTIONS
    for row in rows.values():
        assert (row["fast"], row["first"]) == (2 * LAYERS - 1, 1) and "bit-equal" in row["notes"][0]


def test_wide_blocks_switched_off_are_the_hosts(wide, operations):
    enable(wide.ours)
    counter = compile_blocks(wide.ours)
    wide.check()
    for _ in range(2):
        with disabled(wide.ours):
            wide.check(fast=False)
        wide.check()
    assert counter.frame_count == 2  # one with, one without; switching back and forth compiles no more
    disable(wide.ours)
    wide.check(fast=False)
    assert counter.frame_count <= 3


def test_opaque_op_that_does_not_verify(wide, monkeypatch, caplog):
    def one_bit_wrong(candidate, *args):
        q, k = qk_norm_split_rope.eager(*args)
        q.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return q, k

    monkeypatch.setattr(qk_norm_split_rope, "launch", one_bit_wrong)
    enable(wide.ours)
    compile_blocks(wide.ours)
    for _ in range(2):
        wide.check(fast=False)
    assert [record.levelname for record in caplog.records if record.name == "ltx2_fastpath"] == ["WARNING"]


def test_norm_with_a_hook_stays_the_hosts_in_a_compiled_block(wide):
    for transformer in (wide.stock.transformer, wide.ours.transformer):
        for block in transformer.transformer_blocks:
            block.attn1.norm_q.register_forward_hook(lambda norm, args, output: output * 2)
    enable(wide.ours)
    compile_blocks(wide.ours)
    for _ in range(2):
        assert wide.check() == {"qk_norm_split_rope": (ATTENTIONS - 1) * LAYERS}


def test_inductor_differs_from_eager_no_more_than_without_us(stand_ins):
    """The graph is not the host's, so its bits need not be those of the host's compiled graph either."""
    wide = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", num_layers=1, **WIDE)))
    enable(wide.ours)
    expected = setups.step(wide.stock.transformer)
    errors = {}
    for name, pipe in (("stock", wide.stock), ("ours", wide.ours)):
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        outputs = setups.step(pipe.transformer)
        errors[name] = max((a - b).abs().max().item() for a, b in zip(outputs, expected))
    assert wide.launches["qk_norm_split_rope"] == ATTENTIONS
    assert 0 < errors["ours"] <= 2 * errors["stock"] < 1e-4


def test_hooks_removed_before_compiling(wide):
    """They leave a bound forward in every module, norms included."""
    for transformer in (wide.stock.transformer, wide.ours.transformer):
        accelerate.cpu_offload(transformer, "cpu")
        accelerate.hooks.remove_hook_from_module(transformer, recurse=True)
        assert "forward" in vars(transformer.transformer_blocks[0].attn1.norm_q)
    enable(wide.ours)
    counter = compile_blocks(wide.ours)
    for _ in range(2):
        assert wide.check() == {"qk_norm_split_rope": ATTENTIONS * LAYERS}
    assert counter.frame_count == 1


def test_norm_replaced_or_moved_after_compiling(wide):
    """What stock would see of a norm, a compiled block with the opaque op must see too."""
    enable(wide.ours)
    compile_blocks(wide.ours)
    compile_blocks(wide.stock)
    wide.check()
    for transformer in (wide.stock.transformer, wide.ours.transformer):
        transformer.transformer_blocks[1].attn1.norm_q.forward = lambda x: x * 5
    wide.check()
    errors = []
    for transformer in (wide.stock.transformer, wide.ours.transformer):
        transformer.transformer_blocks[2].attn1.norm_q.to("meta")
        with pytest.raises(Exception) as raised:
            setups.step(transformer)
        errors.append(raised.type)
    assert errors[0] is errors[1]


def test_attentions_compiled_one_by_one(stand_ins):
    """Their blocks are not compiled, so they are given tables that remember whether they were unpacked."""
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(num_layers=3)))
    enable(both.ours)
    frames = []
    for pipe in (both.stock, both.ours):
        counter = CompileCounter()
        for block in pipe.transformer.transformer_blocks:
            for name in ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn"):
                getattr(block, name).compile(backend=counter)
        frames.append(counter)
    for _ in range(3):
        both.check()
    assert frames[0].frame_count == frames[1].frame_count


def test_export_holds_nothing_of_us(wide):
    """What is exported is for processes that do not know our op."""
    enable(wide.ours)
    attention = wide.ours.transformer.transformer_blocks[0].attn1
    hidden, rope = torch.randn(1, 6, 1024), (torch.randn(1, 8, 6, 64), torch.randn(1, 8, 6, 64))
    with torch.no_grad():
        exported = torch.export.export(attention, (hidden,), dict(query_rotary_emb=rope), strict=True)
    assert len(list(exported.graph.nodes)) > 20
    assert not [node for node in exported.graph.nodes if "ltx2_fastpath" in str(node.target)]
