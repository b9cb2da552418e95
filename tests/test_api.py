"""The public functions: what they find, what they refuse, how they switch, and how they fall back."""

import copy
import gc
import threading
import types
import warnings
import weakref

import accelerate
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2Pipeline
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches import handle as handle_module
from ltx2_fastpath.patches.transformer.host import KNOWN

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter
SMALL = dict(height=64, width=96, num_frames=9, text_tokens=16)


def insides(transformer) -> dict:
    """Everything that each module holds, by identity."""
    return {name: {key: id(value) for key, value in vars(module).items()} for name, module in transformer.named_modules()}


def forward(transformer, **options):
    with torch.no_grad():
        return transformer(**models.inputs(transformer, **SMALL | options))


def equal(a, b) -> bool:
    return all(map(torch.equal, a, b))


def fast_calls(handle) -> int:
    return sum(site.fast for site in handle.sites.values())


@pytest.mark.parametrize("pipeline_class", [LTX2Pipeline, LTX2ConditionPipeline])
def test_enable_takes_a_pipeline_and_computes_the_same_with_kernels(stand_ins, any_width, pipeline_class):
    pipe = models.tiny_pipeline("2.3", pipeline_class)

    def call():
        return pipe(**models.TINY_CALL, generator=torch.Generator().manual_seed(0), output_type="latent")

    stock = call()
    before = insides(pipe.transformer)
    handle = ltx2_fastpath.enable(pipe)
    assert handle.active and handle.reason is None and handle.skipped == {} and insides(pipe.transformer) != before

    fast = call()
    assert torch.equal(stock.frames, fast.frames) and torch.equal(stock.audio, fast.audio)
    assert fast_calls(handle) > 100 and stand_ins["head_gate"] > 10 and not handle.stock_calls

    ltx2_fastpath.disable(pipe)
    assert not handle.active and insides(pipe.transformer) == before
    launched = stand_ins.total()
    assert torch.equal(call().frames, stock.frames) and stand_ins.total() == launched


def test_enable_finds_the_transformer_behind_every_wrapper(transformer):
    compiled = torch.compile(transformer)
    modular = types.SimpleNamespace(transformer=transformer)  # a modular pipeline: some object with that component
    handle = ltx2_fastpath.enable(transformer)
    assert handle.active
    for behind in (modular, compiled, types.SimpleNamespace(transformer=compiled)):
        assert ltx2_fastpath.enable(behind) is handle
        assert "active" in str(ltx2_fastpath.report(behind))
    ltx2_fastpath.disable(types.SimpleNamespace(transformer=compiled))
    assert not handle.active


def test_enable_and_disable_are_idempotent(transformer):
    before = insides(transformer)
    ltx2_fastpath.disable(transformer)  # never enabled
    assert insides(transformer) == before

    handle = ltx2_fastpath.enable(transformer)
    patched = insides(transformer)
    assert patched != before
    assert ltx2_fastpath.enable(transformer) is handle and insides(transformer) == patched

    ltx2_fastpath.disable(transformer)
    ltx2_fastpath.disable(transformer)
    assert insides(transformer) == before

    again = ltx2_fastpath.enable(transformer)
    assert again.active and insides(transformer).keys() == patched.keys() and insides(transformer) != before
    ltx2_fastpath.disable(transformer)
    assert insides(transformer) == before


def test_other_transformers_are_untouched(version):
    one, other = models.tiny_transformer(version), models.tiny_transformer(version)
    before = insides(other)
    handle, classes = ltx2_fastpath.enable(one), (type(one), *{type(module) for module in one.modules()})
    assert insides(other) == before and "not enabled" in str(ltx2_fastpath.report(other))
    assert all("ltx2_fastpath" not in cls.forward.__module__ for cls in classes if hasattr(cls, "forward"))
    ltx2_fastpath.disable(other)
    assert handle.active


@pytest.mark.parametrize("hooked", [False, True])
def test_nothing_keeps_a_transformer_in_memory(stand_ins, any_width, version, hooked):
    transformer = models.tiny_transformer(version)
    if hooked:
        accelerate.hooks.add_hook_to_module(transformer, accelerate.hooks.ModelHook())
        accelerate.hooks.add_hook_to_module(transformer.transformer_blocks[0], accelerate.hooks.ModelHook())
    handle = ltx2_fastpath.enable(transformer)
    assert handle.active
    for guidance in ("cfg", "stg", "cfg", "stg"):
        forward(transformer, guidance=guidance)
    alive = [*map(weakref.ref, (transformer, transformer.transformer_blocks[0], transformer.rope))]
    del transformer
    gc.collect()  # the transformer, which takes with it what the handle knows of its modules
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    ltx2_fastpath.enable(models.tiny_transformer(version))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_disable_frees_what_the_handle_kept_at_once(stand_ins, any_width, transformer, cuda_graphs):
    """Tables and states of the passes before can be large; they must not wait for Python's garbage collector."""
    handle = ltx2_fastpath.enable(transformer, cuda_graphs=cuda_graphs)
    for guidance in ("cfg", "stg", "cfg", "stg"):
        forward(transformer, guidance=guidance, image_to_video=True)
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(handle)
        ltx2_fastpath.disable(transformer)
        del handle
        assert kept() is None
    finally:
        gc.enable()


class FluxTransformer2DModel(torch.nn.Module):
    """Another model by the look of it."""


NOT_OURS = {
    "another transformer": (FluxTransformer2DModel(), "found FluxTransformer2DModel"),
    "a pipeline with another transformer": (
        type("FluxPipeline", (), {"transformer": FluxTransformer2DModel()})(),
        "found FluxPipeline with transformer FluxTransformer2DModel",
    ),
    "a compiled module": (torch.compile(torch.nn.Linear(2, 2)), "found OptimizedModule with transformer Linear"),
    "a pipeline without a transformer": (type("StableDiffusionPipeline", (), {})(), "found StableDiffusionPipeline"),
    "a pipeline that lost its transformer": (types.SimpleNamespace(transformer=None), "found SimpleNamespace"),
    "a path": ("Lightricks/LTX-2", "found str"),
    "None": (None, "found NoneType"),
    "an object": (object(), "found object"),
}


@pytest.mark.parametrize("function", [ltx2_fastpath.enable, ltx2_fastpath.disable, ltx2_fastpath.report])
@pytest.mark.parametrize("case", NOT_OURS)
def test_type_error_names_what_was_found(function, case):
    found, named = NOT_OURS[case]
    with pytest.raises(TypeError, match="LTX2VideoTransformer3DModel") as caught:
        function(found)
    assert named in str(caught.value)


@pytest.mark.parametrize("case", NOT_OURS)
def test_contexts_raise_type_error_before_their_blocks_run(case):
    found, named = NOT_OURS[case]
    for context in (ltx2_fastpath.disabled(found), ltx2_fastpath.quality(found, "high")):
        with pytest.raises(TypeError, match=named), context:
            pytest.fail("the block ran")


@pytest.mark.parametrize("quality", ["fast", "", "LOSSLESS"])
def test_unknown_quality_lists_the_known_ones_and_changes_nothing(transformer, quality):
    before = insides(transformer)
    for ask in (
        lambda: ltx2_fastpath.enable(transformer, quality=quality),
        lambda: ltx2_fastpath.quality(transformer, quality).__enter__(),
    ):
        with pytest.raises(ValueError, match="'lossless', 'high'") as caught:
            ask()
        assert repr(quality) in str(caught.value) and insides(transformer) == before


def test_all_or_none_where_a_patch_fails_half_way(transformer, monkeypatch):
    from ltx2_fastpath.patches.patch import Patch

    before, applied = insides(transformer), []

    def apply(self):
        if len(applied) == 9:
            raise MemoryError("half way")
        applied.append(self)
        original(self)

    original = Patch.apply
    monkeypatch.setattr(Patch, "apply", apply)
    with pytest.raises(MemoryError, match="half way"):
        ltx2_fastpath.enable(transformer)
    assert len(applied) == 9 and insides(transformer) == before
    assert "not enabled" in str(ltx2_fastpath.report(transformer))

    monkeypatch.undo()
    assert ltx2_fastpath.enable(transformer).active


def test_module_with_a_foreign_forward_is_left_alone_and_reported(stand_ins, any_width, transformer, caplog):
    block = transformer.transformer_blocks[1]
    calls = []

    def foreign(*args, **kwargs):
        calls.append(1)
        return type(block).forward(block, *args, **kwargs)

    block.forward = foreign
    stock = forward(transformer)
    handle = ltx2_fastpath.enable(transformer)
    assert handle.active and list(handle.skipped) == ["transformer_blocks.1"]
    assert block.forward is foreign
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "transformer_blocks.1" in caplog.text
    assert "transformer_blocks.1: left alone" in str(ltx2_fastpath.report(transformer))

    for _ in range(2):
        assert equal(forward(transformer), stock)
    assert len(calls) == 3 and handle.sites["norm1"].fast == 1  # the other block, in the second forward
    ltx2_fastpath.disable(transformer)
    assert block.forward is foreign


def test_disabled_computes_the_stock_way_and_can_be_nested(stand_ins, any_width, transformer):
    stock = forward(transformer)
    handle = ltx2_fastpath.enable(transformer)
    forward(transformer)
    launched = stand_ins.total()
    with ltx2_fastpath.disabled(transformer):
        assert equal(forward(transformer), stock)
        with ltx2_fastpath.disabled(types.SimpleNamespace(transformer=transformer)):
            assert equal(forward(transformer), stock)
        assert equal(forward(transformer), stock)
        assert stand_ins.total() == launched and handle.active
    assert handle.stock_calls["block", "switched off by disabled()"] == 3 * len(transformer.transformer_blocks)
    assert equal(forward(transformer), stock) and stand_ins.total() > launched


def test_disabled_ends_where_an_exception_leaves_it(stand_ins, any_width, transformer):
    handle = ltx2_fastpath.enable(transformer)
    forward(transformer)
    with pytest.raises(KeyError), ltx2_fastpath.disabled(transformer), ltx2_fastpath.disabled(transformer):
        raise KeyError("inside")
    launched, stock_calls = stand_ins.total(), dict(handle.stock_calls)
    forward(transformer)
    assert stand_ins.total() > launched and handle.stock_calls == stock_calls


def test_disabled_is_a_no_op_where_nothing_is_enabled(transformer):
    before = insides(transformer)
    with ltx2_fastpath.disabled(transformer):
        assert insides(transformer) == before
    assert insides(transformer) == before


def test_disable_inside_disabled(stand_ins, any_width, transformer):
    before = insides(transformer)
    ltx2_fastpath.enable(transformer)
    with ltx2_fastpath.disabled(transformer):
        ltx2_fastpath.disable(transformer)
        assert insides(transformer) == before
    ltx2_fastpath.enable(transformer)
    forward(transformer)
    assert stand_ins.total() > 0


def test_disabled_holds_for_its_own_thread_only(stand_ins, any_width, transformer):
    stock = forward(transformer)
    handle = ltx2_fastpath.enable(transformer)
    forward(transformer)
    inside, leave, results = threading.Event(), threading.Event(), {}

    def other():
        with ltx2_fastpath.disabled(transformer):
            inside.set()
            leave.wait(60)
            before = fast_calls(handle)
            results["outputs"] = forward(transformer)
            results["launched"] = fast_calls(handle) - before
        before = fast_calls(handle)
        forward(transformer)
        results["launched after"] = fast_calls(handle) - before

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    before = fast_calls(handle)
    assert equal(forward(transformer), stock) and fast_calls(handle) > before and not handle.stock_calls
    leave.set()
    thread.join(60)
    assert equal(results["outputs"], stock) and results["launched"] == 0 and results["launched after"] > 0


def test_unknown_host_source_stays_stock(transformer, monkeypatch, caplog):
    before = insides(transformer)
    monkeypatch.setitem(KNOWN, "LTX2Attention.forward", {"0000000000000000"})
    handle = ltx2_fastpath.enable(transformer)
    assert not handle.active and insides(transformer) == before
    assert "LTX2Attention.forward" in handle.reason and "not known" in handle.reason
    (record,) = caplog.records
    assert "LTX2Attention.forward" in record.getMessage()
    assert handle.reason in str(ltx2_fastpath.report(transformer))
    ltx2_fastpath.disable(transformer)
    assert insides(transformer) == before


def test_host_method_replaced_by_another_library_stays_stock(transformer, monkeypatch):
    def patched(self, *args, **kwargs):
        raise AssertionError("not called here")

    monkeypatch.setattr(transformer_ltx2.LTX2AudioVideoAttnProcessor, "__call__", patched)
    handle = ltx2_fastpath.enable(transformer)
    assert not handle.active and "LTX2AudioVideoAttnProcessor.__call__" in handle.reason


ENABLE_TWICE = """
import logging, sys
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("ltx2_fastpath").addHandler(handler)
import torch
import ltx2_fastpath
from ltx2_fastpath.testing import models
transformer = models.tiny_transformer("2.3")
kwargs = models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16)
with torch.no_grad():
    stock = transformer(**kwargs)
before = {name: dict(vars(module)) for name, module in transformer.named_modules()}
handle = ltx2_fastpath.enable(transformer)
assert not handle.active
after = {name: dict(vars(module)) for name, module in transformer.named_modules()}
assert all(before[name].keys() == after[name].keys() for name in before)
assert not any("ltx2_fastpath" in str(getattr(value, "__module__", "")) for held in after.values() for value in held.values())
with torch.no_grad():
    assert all(map(torch.equal, stock, transformer(**kwargs)))
assert len(records) == 1 and handle.reason in records[0].getMessage(), records
ltx2_fastpath.disable(transformer)
ltx2_fastpath.enable(transformer)
print(ltx2_fastpath.report(transformer))
"""


def test_without_cuda_nothing_changes_and_the_report_says_why(run_python):
    assert "no CUDA device is available" in run_python(ENABLE_TWICE, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    "error, said",
    [
        ("ImportError('DLL load failed while importing libtriton')", "ImportError: DLL load failed"),
        ("OSError('libcuda.so.1: cannot open shared object file')", "OSError: libcuda.so.1"),
    ],
)
def test_triton_that_cannot_be_imported_changes_nothing_and_the_report_says_why(run_python, tmp_path, error, said):
    # torch and diffusers look for Triton themselves, and not all of what they do withstands an OSError: load them first.
    first = "import torch, diffusers, sys\nfrom ltx2_fastpath.testing import models\n"
    first += "models.tiny_transformer('2.3')\n"
    first += "for name in [name for name in sys.modules if name.partition('.')[0] == 'triton']: del sys.modules[name]\n"
    first += f"sys.path.insert(0, {str(tmp_path / 'stub')!r})\n"
    (tmp_path / "stub" / "triton").mkdir(parents=True)
    (tmp_path / "stub" / "triton" / "__init__.py").write_text(f"raise {error}\n")
    printed = run_python(first + ENABLE_TWICE, TRITON_INTERPRET="1")
    assert "Triton cannot be imported" in printed and said in printed


def test_package_is_imported_without_triton_or_diffusers(run_python):
    printed = run_python(
        "import sys\n"
        "sys.modules['triton'] = sys.modules['diffusers'] = None\n"
        "import ltx2_fastpath\n"
        "print(ltx2_fastpath.__version__, [name for name in ltx2_fastpath.__all__ if not hasattr(ltx2_fastpath, name)])\n"
    )
    assert printed == f"{ltx2_fastpath.__version__} []\n"


def test_import_of_the_package_loads_no_kernels(run_python):
    printed = run_python(
        "import sys, ltx2_fastpath\nprint([name for name in sys.modules if name.startswith(('triton', 'ltx2_fastpath.ops'))])\n"
    )
    assert printed == "[]\n"


def test_old_gpu_takes_the_stock_path(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    handle_module._why_not_device.cache_clear()
    try:
        reason = handle_module._why_not_device(torch.device("cuda", 0), torch.float16)
    finally:
        handle_module._why_not_device.cache_clear()
    assert "8.0" in reason


def test_report_says_what_every_site_did(stand_ins, any_width, transformer):
    report = ltx2_fastpath.report(transformer)
    assert str(report) == "ltx2_fastpath: not enabled" and "not enabled" in report._repr_html_()

    handle = ltx2_fastpath.enable(transformer)
    assert str(ltx2_fastpath.report(transformer)) == "ltx2_fastpath: active (lossless)"
    for _ in range(2):
        forward(transformer)
    with ltx2_fastpath.disabled(transformer):
        forward(transformer)
    report = ltx2_fastpath.report(transformer)
    layers = len(transformer.transformer_blocks)
    rows = {row["site"]: row for row in report.rows}
    assert (rows["norm1"]["fast"], rows["norm1"]["first"], rows["norm1"]["stock"]) == (2 * layers - 1, 1, 0)
    assert any("bit-equal" in note and " at [" in note for note in rows["norm1"]["notes"])
    assert report.stock_calls["block", "switched off by disabled()"] == layers
    assert "norm3.without_residual" not in rows  # never reached

    text, html = str(report), report._repr_html_()
    lines = {line.split()[0]: line.split()[1:4] for line in text.splitlines() if line.startswith("  norm")}
    assert lines["norm1"] == [str(2 * layers - 1), "1", "0"]
    assert f"block: {layers} calls took the stock path: switched off by disabled()" in text
    assert "<table>" in html and f"<td>norm1</td><td>{2 * layers - 1}</td><td>1</td><td>0</td>" in html
    assert repr(report) == text

    # A snapshot: later calls do not change it.
    forward(transformer)
    assert str(report) == text and str(ltx2_fastpath.report(transformer)) != text

    ltx2_fastpath.disable(transformer)
    assert str(ltx2_fastpath.report(transformer)) == "ltx2_fastpath: not enabled"
    assert repr(handle) == "<FastPath lossless, switched off>"


def test_report_html_escapes_what_it_quotes(transformer):
    handle = ltx2_fastpath.enable(transformer)
    handle.count_stock("block", "<b>&")
    handle.skipped["module <1>"] = "a & b"
    html = ltx2_fastpath.report(transformer)._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "module &lt;1&gt;: left alone: a &amp; b" in html and "<b>&" not in html


def test_nothing_warns(transformer, stand_ins, any_width):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ltx2_fastpath.enable(transformer)
        forward(transformer)
        ltx2_fastpath.disable(transformer)


def test_a_deep_copy_is_what_its_report_says(stand_ins, any_width):
    """The copy was never enabled: once something asks, it computes the stock way, and the original goes on fast."""
    transformer = models.tiny_transformer("2.3")
    ltx2_fastpath.enable(transformer)
    for ask in (ltx2_fastpath.report, lambda twin: ltx2_fastpath.disabled(twin).__enter__()):
        twin = copy.deepcopy(transformer)
        ask(twin)
        stand_ins.clear()
        forward(twin)
        assert sum(stand_ins.values()) == 0 and ltx2_fastpath.report(twin).status == "not enabled"
    forward(transformer)
    forward(transformer)
    assert sum(stand_ins.values()) > 0 and ltx2_fastpath.report(transformer).status.startswith("active")


def test_without_leaves_sites_out_and_says_so(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3")
    stock = forward(transformer)
    handle = ltx2_fastpath.enable(transformer, without=("attn1.head_gate", "ada_values"))
    for _ in range(2):
        assert equal(forward(transformer), stock)
    sites = handle.sites
    assert sites["attn1.head_gate"].fast == sites["ada_values"].fast == 0 < sites["attn2.head_gate"].fast
    row = next(row for row in ltx2_fastpath.report(transformer).rows if row["site"] == "ada_values")
    assert row["stock"] > 0 and row["notes"] == ["left out by enable(..., without=...)"]
    ltx2_fastpath.enable(transformer)  # what is not named stays as it is
    forward(transformer)
    assert sites["ada_values"].fast == 0
    ltx2_fastpath.enable(transformer, without=())
    for _ in range(2):
        assert equal(forward(transformer), stock)
    assert sites["ada_values"].fast > 0 and sites["attn1.head_gate"].fast > 0


def test_every_site_can_be_left_out_and_all_at_once(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3")
    stock = forward(transformer)
    names = tuple(ltx2_fastpath.enable(transformer).sites)
    ltx2_fastpath.enable(transformer, without=names)
    for _ in range(2):
        assert equal(forward(transformer), stock)
    assert stand_ins.total() == 0 and fast_calls(ltx2_fastpath.enable(transformer)) == 0


@pytest.mark.parametrize("without", [("attn1.head_gates",), "ada_values", ("ada_values", "none")])
def test_unknown_sites_are_named_with_the_known_ones_and_nothing_changes(transformer, without):
    before = insides(transformer)
    with pytest.raises(ValueError, match="without: ") as raised:
        ltx2_fastpath.enable(transformer, without=without)
    if not isinstance(without, str):
        assert repr(without[-1]) in str(raised.value) and "ada_values" in str(raised.value)
    assert insides(transformer) == before and "not enabled" in str(ltx2_fastpath.report(transformer))
