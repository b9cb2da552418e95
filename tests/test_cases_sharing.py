"""One transformer in several hands: pipelines that share it, copies, files, threads."""

import collections
import concurrent.futures
import contextlib
import copy
import functools
import gc
import io
import sys
import threading
import weakref

import conftest
import pytest
import setups
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel
from ltx2_fastpath.patches.transformer.guidance import _Reuse
from setups import Together, anatomy, differences

from ltx2_fastpath import disable, disabled, enable, report
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("any_width")


LONG = dict(height=512, width=512, num_frames=25, image_to_video=True)  # enough tokens to embed distinct timesteps once


def scale_weights(transformer, factor=1.25):
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.mul_(factor)


def test_pipelines_that_share_a_transformer_share_its_fast_path(stand_ins):
    both = Together(stand_ins, models.tiny_pipeline)
    first = both.ours
    second = LTX2ImageToVideoPipeline(**first.components)
    third = type(first).from_pipe(first)
    handle = enable(first)
    assert enable(second) is handle and enable(third) is handle
    for pipe in (first, third):
        before = stand_ins.total()
        assert setups.equal(setups.generate(pipe), setups.generate(both.stock))
        assert stand_ins.total() > before
    with disabled(second):
        before = stand_ins.total()
        setups.generate(first)
        assert stand_ins.total() == before
    disable(third)
    assert not handle.active and "not enabled" in str(report(first))
    both.check(setups.generate, fast=False)
    both.check_restored()


def test_other_models_and_components_are_untouched(stand_ins):
    both = Together(stand_ins, models.tiny_pipeline)
    enable(both.ours)
    both.check(setups.generate)
    for name, component in both.ours.components.items():
        if isinstance(component, torch.nn.Module) and name != "transformer":
            # The text connectors are made of the same attention class.
            assert not [module for module in component.modules() if "forward" in vars(module)], name
    other, before = setups.tiny(), stand_ins.total()
    untouched = anatomy(other)
    enable(both.ours)
    assert differences(anatomy(other), untouched) == []
    setups.step(other)
    assert stand_ins.total() == before


def test_transformer_is_swapped_under_a_pipeline(stand_ins):
    """Two-stage pipelines and `pipe.transformer = other`: the handle belongs to the transformer, not to the pipeline."""
    both = Together(stand_ins)
    first = both.ours.transformer
    handle = enable(both.ours)
    both.ours.transformer = setups.tiny()
    assert "not enabled" in str(report(both.ours)) and handle.active
    both.check(fast=False)
    enable(both.ours)
    both.check()
    disable(both.ours)
    both.check_restored()
    assert handle.active
    disable(first)
    assert not [module for module in first.modules() if "forward" in vars(module)]


class TestCopy:
    """`copy.deepcopy` copies instance forwards, so the copy runs ours, bound to itself."""

    def test_computes_with_its_own_weights(self, stand_ins):
        both = Together(stand_ins)
        enable(both.ours)
        original = setups.step(both.ours.transformer)
        for pipe in (both.stock, both.ours):
            pipe.transformer = copy.deepcopy(pipe.transformer)
            scale_weights(pipe.transformer)
        stock, ours = both.stock.transformer, both.ours.transformer
        for _ in range(2):
            assert setups.equal(setups.step(stock), setups.step(ours))
        assert not setups.equal(setups.step(ours), original)

    @pytest.mark.parametrize("original", ["lives", "disabled", "gone"])
    def test_has_a_switch_of_its_own(self, stand_ins, original):
        stock, first = setups.tiny(), setups.tiny()
        enable(first)
        setups.step(first)
        ours = copy.deepcopy(first)
        if original == "disabled":
            disable(first)
        elif original == "gone":
            alive = weakref.ref(first)
            del first
            gc.collect()
            assert alive() is None

        def check(fast):
            before = stand_ins.total()
            assert setups.equal(setups.step(stock), setups.step(ours))
            assert (stand_ins.total() > before) == fast

        check(fast=original != "disabled")  # until told otherwise, the copy does what the original does
        handle = enable(ours)
        assert handle.active and handle.skipped == {}
        check(fast=True)
        with disabled(ours):
            check(fast=False)
        disable(ours)
        check(fast=False)
        assert differences(anatomy(stock), anatomy(ours)) == []
        if original == "lives":
            before = stand_ins.total()
            setups.step(first)
            assert stand_ins.total() > before

    def test_is_stock_after_disable_without_enable(self, stand_ins):
        stock, first = setups.tiny(), setups.tiny()
        enable(first)
        ours = copy.deepcopy(first)
        disable(ours)
        before = stand_ins.total()
        assert setups.equal(setups.step(stock), setups.step(ours)) and stand_ins.total() == before
        assert differences(anatomy(stock), anatomy(ours)) == []

    def test_of_an_offloaded_transformer(self, stand_ins):
        both = Together(stand_ins)
        for pipe in (both.stock, both.ours):
            pipe.enable_sequential_cpu_offload()
        enable(both.ours)
        for pipe in (both.stock, both.ours):
            pipe.transformer = copy.deepcopy(pipe.transformer)
        both.check()
        disable(both.ours)
        both.check(fast=False)

    def test_of_a_block_put_elsewhere(self, stand_ins):
        """Layers duplicated to make a deeper model."""
        both = Together(stand_ins)
        enable(both.ours)
        for pipe in (both.stock, both.ours):
            pipe.transformer.transformer_blocks.append(copy.deepcopy(pipe.transformer.transformer_blocks[0]))
        both.check()
        disable(both.ours)
        both.check(fast=False)


def test_file_of_the_whole_model_loads_without_us(stand_ins, run_python, tmp_path):
    transformer = setups.tiny()
    inputs = models.inputs(transformer, **setups.SMALL)
    expected = setups.run(transformer, **inputs)
    enable(transformer)
    setups.step(transformer)
    torch.save(transformer, tmp_path / "model.pt")
    torch.save((inputs, expected), tmp_path / "step.pt")
    transformer.save_pretrained(tmp_path / "pretrained")
    printed = run_python(f"""
import sys, torch
from diffusers import LTX2VideoTransformer3DModel
inputs, expected = torch.load({str(tmp_path / "step.pt")!r}, weights_only=False)
torch.set_num_threads(1)
for transformer in (
    torch.load({str(tmp_path / "model.pt")!r}, weights_only=False),
    LTX2VideoTransformer3DModel.from_pretrained({str(tmp_path / "pretrained")!r}),
):
    with torch.no_grad():
        output = transformer(**inputs)
    # Not to the bit: CPUs choose kernels by where weights lie in memory, and loaded ones lie elsewhere.
    print(all(torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5) for mine, theirs in zip(output, expected)))
print("ltx2_fastpath" in sys.modules)
""")
    assert printed.split() == ["True", "True", "False"]
    assert enable(transformer).active
    disable(transformer)
    assert not [module for module in transformer.modules() if "forward" in vars(module)]


def test_file_of_the_whole_model_loads_with_us_and_can_be_enabled(stand_ins):
    stock, transformer = setups.tiny(), setups.tiny()
    enable(transformer)
    file = io.BytesIO()
    torch.save(transformer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, LTX2VideoTransformer3DModel) and "not enabled" in str(report(loaded))
    before = stand_ins.total()
    assert setups.equal(setups.step(stock), setups.step(loaded)) and stand_ins.total() == before
    assert enable(loaded).skipped == {}
    assert setups.equal(setups.step(stock), setups.step(loaded)) and stand_ins.total() > before
    disable(loaded)
    assert differences(anatomy(stock), anatomy(loaded)) == []


def test_state_dict_is_the_hosts(stand_ins):
    stock, transformer = setups.tiny(), setups.tiny()
    enable(transformer)
    setups.step(transformer)
    assert transformer.state_dict().keys() == stock.state_dict().keys()
    transformer.load_state_dict(setups.tiny("2.3", seed=7).state_dict())
    assert setups.equal(setups.step(transformer), setups.step(setups.tiny("2.3", seed=7)))


def test_one_thread_opts_out_while_another_generates(stand_ins, monkeypatch):
    both = Together(stand_ins)
    enable(both.ours)
    both.check()
    expected = setups.step(both.stock.transformer)
    launches = collections.Counter()  # by the thread that launches
    for op in conftest.ops().values():

        def counted(*args, launch=op.launch):
            launches[threading.get_ident()] += 1
            return launch(*args)

        monkeypatch.setattr(op, "launch", counted)
    together = threading.Barrier(2, timeout=60)

    def generate(context):
        with context:
            together.wait()
            equal = [setups.equal(setups.step(both.ours.transformer), expected) for _ in range(5)]
            together.wait()
        return all(equal), launches[threading.get_ident()]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        opted_out, generating = threads.map(generate, [disabled(both.ours), contextlib.nullcontext()])
    assert opted_out == (True, 0)
    assert generating == (True, 5 * 50)  # every launch of two layers in five steps
    assert set(report(both.ours).stock_calls.values()) <= {5, 10, 40} and all(
        "disabled()" in reason for _, reason in report(both.ours).stock_calls
    )


@pytest.mark.parametrize("offload", [False, True])
def test_threads_generate_with_one_transformer(stand_ins, offload):
    """Each with shapes of its own, new to the fast path, so that verdicts and tables are made while others are used."""
    both = Together(stand_ins)
    if offload:
        both.do("enable_group_offload", onload_device=setups.CPU, offload_type="leaf_level")
    enable(both.ours)
    sizes = [dict(height=32 * (2 + i), width=96, seed=i) for i in range(4)]
    expected = [setups.step(both.stock.transformer, **size) for size in sizes]
    start = threading.Barrier(len(sizes), timeout=60)

    def generate(i):
        start.wait()
        return all(setups.equal(setups.step(both.ours.transformer, **sizes[i]), expected[i]) for _ in range(4))

    with concurrent.futures.ThreadPoolExecutor(len(sizes)) as threads:
        assert list(threads.map(generate, range(len(sizes)))) == [True] * len(sizes)
    assert stand_ins.total() > 0 and report(both.ours).stock_calls == {}


def test_threads_that_guide_at_the_same_time_reuse_their_own_passes(stand_ins):
    """Two requests whose CFG and STG passes alternate: neither finds the other's states, nor loses its own."""
    both = Together(stand_ins)
    handle = enable(both.ours)
    turns = [threading.Event() for _ in range(2)]

    def request(i):
        equal = []
        for _ in range(5):
            for guidance in ("cfg", "stg"):
                assert turns[i].wait(60)
                turns[i].clear()
                options = dict(seed=i, guidance=guidance)
                equal.append(setups.equal(setups.step(both.ours.transformer, **options), expected[i][guidance]))
                turns[1 - i].set()
        return all(equal)

    expected = [
        {guidance: setups.step(both.stock.transformer, seed=i, guidance=guidance) for guidance in ("cfg", "stg")}
        for i in range(2)
    ]
    turns[0].set()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(request, range(2))) == [True, True]
    # Each thread: the first step shows that there are STG passes, the second that prompts are made anew for each pass, the third
    # verifies (for both), the others reuse.
    assert handle.sites["guidance.prefix"].fast >= 4


@pytest.fixture
def hasty_threads():
    """Threads take turns every 10 µs instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_enable_and_disable_at_the_same_time(stand_ins, hasty_threads):
    """A server that calls enable at every request."""
    both = Together(stand_ins)
    for _ in range(3):
        start = threading.Barrier(4, timeout=60)

        def request(switch, start=start):
            start.wait()
            return switch(both.ours)

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            handles = set(threads.map(request, [enable] * 4))
        assert len(handles) == 1 and handles.pop().active
        both.check()
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            list(threads.map(request, [disable] * 4))
        both.check(fast=False)
        both.check_restored()


def test_enable_and_disable_can_be_called_twice_and_out_of_order(stand_ins):
    both = Together(stand_ins)
    disable(both.ours)
    both.check_restored()
    handle = enable(both.ours)
    patched = anatomy(both.ours.transformer)
    assert enable(both.ours) is handle and differences(anatomy(both.ours.transformer), patched) == []
    both.check()
    disable(both.ours)
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_enable_on_flux_names_what_was_found():
    config = dict(num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=1, axes_dims_rope=(2, 2, 4))
    flux = FluxTransformer2DModel(in_channels=4, joint_attention_dim=8, pooled_projection_dim=8, **config)
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = FluxPipeline(**dict.fromkeys(names), transformer=flux)
    for function in (enable, disable, report, functools.partial(next, disabled(pipe).gen)):
        with pytest.raises(TypeError, match="FluxPipeline with transformer FluxTransformer2DModel"):
            function(pipe)
    with pytest.raises(TypeError, match="found FluxTransformer2DModel"):
        enable(flux)
    assert not [module for module in flux.modules() if "forward" in vars(module)]


def test_disabled_transformer_holds_nothing_of_ours(stand_ins):
    """After disable the sites, and the tables and states that they keep, can be freed, whatever wrapped our forwards."""
    both = Together(stand_ins)
    handle = enable(both.ours)
    both.do(setups.CpuPipeline.enable_sequential_cpu_offload)
    both.do("enable_cache", setups.pab())
    both.check()
    sites = [weakref.ref(site) for site in handle.sites.values()]
    disable(both.ours)
    del handle
    gc.collect()
    assert not [site for site in sites if site() is not None]


def test_transformer_can_be_freed_while_it_is_enabled(stand_ins):
    transformer = setups.tiny()
    enable(transformer)
    setups.step(transformer)
    alive = [weakref.ref(module) for module in transformer.modules()]
    del transformer
    gc.collect()
    assert not [module for module in alive if module() is not None]


def disable_elsewhere(pipe):
    """As another thread does it."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(disable, pipe).result()


def test_disabled_by_another_thread_while_blocks_are_skipped(stand_ins, monkeypatch):
    """A guidance pass that has begun to skip blocks ends as it began."""
    both = Together(stand_ins)
    prefix = enable(both.ours).sites["guidance.prefix"]
    for _ in range(4):
        for guidance in ("cfg", "stg"):
            both.check(guidance=guidance)
    assert prefix.fast > 0
    both.check()
    at_block = _Reuse.at_block

    def skip_and_disable(self, *states):
        skipped = at_block(self, *states)
        disable_elsewhere(both.ours)
        return skipped

    monkeypatch.setattr(_Reuse, "at_block", skip_and_disable)
    reused = prefix.fast
    both.check(guidance="stg")
    assert prefix.fast == reused + 1
    both.check_restored()


@pytest.mark.parametrize("op", ["ada_values", "head_gate"])
@pytest.mark.parametrize("options", [{}, LONG], ids=["t2v", "long i2v"])
def test_disabled_by_another_thread_in_the_middle_of_a_forward(stand_ins, monkeypatch, op, options):
    """It ends as it began; the patches go with it."""
    both = Together(stand_ins)
    enable(both.ours)
    for _ in range(2):
        both.check(**options)
    module = conftest.ops()[op]

    def launch_and_disable(*args, launch=module.launch):
        disable_elsewhere(both.ours)
        return launch(*args)

    monkeypatch.setattr(module, "launch", launch_and_disable)
    both.check(**options)
    both.check(fast=False, **options)
    both.check_restored()


def test_reports_beside_requests_of_new_shapes(stand_ins, hasty_threads):
    """A dashboard that asks all the time, while sites learn signatures and the report's counters get new rows."""
    both = Together(stand_ins)
    enable(both.ours)
    ended = threading.Event()

    def watch():
        asked = 0
        while not ended.is_set():
            str(report(both.ours))
            asked += 1
        return asked

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        watchers = [threads.submit(watch) for _ in range(2)]
        try:
            for i in range(6):
                setups.step(both.ours.transformer, height=32 * (1 + i % 3), width=32 * (2 + i), seed=i)
                with disabled(both.ours):
                    setups.step(both.ours.transformer, height=64, width=96)
        finally:
            ended.set()
        assert all(watcher.result() > 1 for watcher in watchers)


def test_enabled_anew_beside_a_request_with_graphs(stand_ins, hasty_threads):
    """A server that calls enable at every request, with other settings, while another thread is in a forward."""
    both = Together(stand_ins)
    handle = enable(both.ours, cuda_graphs=True)
    expected, ended = setups.step(both.stock.transformer), threading.Event()

    def switch():
        while not ended.is_set():
            for graphs in (False, True):
                assert enable(both.ours, cuda_graphs=graphs) is handle

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        switching = threads.submit(switch)
        try:
            assert all(setups.equal(setups.step(both.ours.transformer), expected) for _ in range(5))
        finally:
            ended.set()
        switching.result()
