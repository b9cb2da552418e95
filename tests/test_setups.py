"""The setups that people have on small cards: what guidance passes share stays shared, and an unknown hook turns that off."""

import contextlib
import functools
import types

import pytest
import setups
import torch
from diffusers.hooks import HookRegistry, ModelHook, group_offloading
from peft import LoraConfig

from ltx2_fastpath import disable, enable, report
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("stand_ins", "any_width")]
LAYERS, PERTURBED = 4, 3


def cast(transformer):
    transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)


def group_offload(transformer, **options):
    transformer.enable_group_offload(onload_device=setups.CPU, offload_device=setups.CPU, **options)


def leaves(transformer):
    group_offload(transformer, offload_type="leaf_level")


def blocks(transformer):
    group_offload(transformer, offload_type="block_level", num_blocks_per_group=1)


def pairs_of_blocks(transformer):
    group_offload(transformer, offload_type="block_level", num_blocks_per_group=2)


def lora(transformer):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=list(setups.ATTENTION_PROJECTIONS), init_lora_weights=False)
    transformer.add_adapter(config)


def lora_then_cast(transformer):
    lora(transformer)
    cast(transformer)


def cast_and_leaves_and_lora(transformer):
    lora(transformer)
    cast(transformer)
    leaves(transformer)


SETUPS = [cast, leaves, blocks, pairs_of_blocks, lora, lora_then_cast, cast_and_leaves_and_lora]


class Steps:
    """Guided steps, with latents given, of a stock transformer and one of ours that are set up alike."""

    def __init__(self, setup, first):
        self.stock, self.ours = (setups.tiny(num_layers=LAYERS, dtype=torch.bfloat16) for _ in range(2))
        if first == "enable":
            enable(self.ours)
        for transformer in (self.stock, self.ours):
            setup(transformer)
        self.handle = enable(self.ours)
        self.prefix = self.handle.sites["guidance.prefix"]
        stg = models.inputs(self.ours, **setups.SMALL, guidance="stg", given_latents=True)
        self.passes = setups.two_rows(stg), stg | dict(spatio_temporal_guidance_blocks=[PERTURBED])

    def check(self, between=lambda transformer: None):
        for transformer in (self.stock, self.ours):
            between(transformer)
        for kwargs in self.passes:
            assert setups.equal(setups.run(self.ours, **kwargs), setups.run(self.stock, **kwargs))


@pytest.mark.parametrize("first", ["enable", "set up"])
@pytest.mark.parametrize("setup", SETUPS)
def test_stg_passes_start_at_the_perturbed_block(setup, first):
    steps = Steps(setup, first)
    for _ in range(4):
        steps.check()
    assert steps.prefix.fast == 2, steps.prefix.notes  # the first step finds out, the second compares
    assert report(steps.ours).stock_calls == {} and report(steps.ours).skipped == {}
    disable(steps.ours)
    steps.check()


@pytest.mark.parametrize("setup", [cast, leaves, blocks])
def test_weights_that_change_between_the_passes_are_seen(setup):
    """Hooks put weights elsewhere all the time; what somebody does to them in place shows in their versions."""
    steps = Steps(setup, "set up")
    for _ in range(3):
        steps.check()
    assert steps.prefix.fast == 1
    cfg, stg = steps.passes
    outputs = []
    for transformer in (steps.stock, steps.ours):
        setups.run(transformer, **cfg)
        with torch.no_grad():
            transformer.transformer_blocks[0].scale_shift_table.mul_(1.5)
            transformer.transformer_blocks[0].attn1.to_q.bias.copy_(torch.ones(()))
        outputs.append(setups.run(transformer, **stg))
    assert setups.equal(*outputs) and steps.prefix.fast == 1


class Watches(ModelHook):
    """Somebody's hook, which counts the calls that it sees."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("also", [lambda transformer: None, cast, leaves])
@pytest.mark.parametrize("where", ["transformer_blocks.0", "transformer_blocks.0.attn1.to_q", "proj_in"])
def test_an_unknown_hook_sees_every_call_and_is_named(where, also):
    hooks = {}

    def setup(transformer):
        also(transformer)
        hooks[id(transformer)] = Watches()
        registry = HookRegistry.check_if_exists_or_initialize(transformer.get_submodule(where))
        registry.register_hook(hooks[id(transformer)], "somebody's")

    steps = Steps(setup, "set up")
    for _ in range(4):
        steps.check()
    assert steps.prefix.fast == 0 and [hook.calls for hook in hooks.values()] == [8, 8]
    assert any("Watches" in note for note in steps.prefix.notes)


@pytest.mark.parametrize("method", ["pre_forward", "post_forward"])
def test_a_hook_of_a_release_that_is_not_known_is_an_unknown_hook(monkeypatch, method):
    original = getattr(group_offloading.GroupOffloadingHook, method)
    monkeypatch.setattr(
        group_offloading.GroupOffloadingHook, method, lambda self, *args, **kwargs: original(self, *args, **kwargs)
    )
    steps = Steps(leaves, "set up")
    for _ in range(4):
        steps.check()
    assert steps.prefix.fast == 0 and any("GroupOffloadingHook" in note for note in steps.prefix.notes)


def test_a_wrapper_around_a_hooked_layer_sees_every_call():
    def setup(transformer):
        cast(transformer)
        layer = transformer.transformer_blocks[0].attn1.to_q
        forward, layer.calls = layer.forward, 0

        def wrapper(*args, **kwargs):
            layer.calls += 1
            return forward(*args, **kwargs)

        layer.forward = wrapper

    steps = Steps(setup, "set up")
    for _ in range(4):
        steps.check()
    assert steps.prefix.fast == 0 and steps.ours.transformer_blocks[0].attn1.to_q.calls == 8


class Stream:
    """A CUDA stream as far as group offloading asks for one."""

    def synchronize(self):
        pass


@pytest.fixture
def streams(monkeypatch):
    """Group offloading can have streams, and so prefetch, on the CPU; `on`: the groups that have been fetched and not freed."""

    class Backend:
        Stream, current_stream = Stream, Stream

        def __init__(self, device=None):
            pass

        def stream(self, stream):
            return contextlib.nullcontext()

    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Backend)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    here = types.SimpleNamespace(on=set())
    groups = group_offloading.ModuleGroup
    onload, offload = groups.onload_, groups.offload_

    def onload_(self):
        here.on.add(self)
        onload(self)

    def offload_(self):
        here.on.discard(self)
        offload(self)

    monkeypatch.setattr(groups, "onload_", onload_)
    monkeypatch.setattr(groups, "offload_", offload_)
    return here


def _with_stream(config, *args, **kwargs):
    return config(*args, **kwargs | dict(stream=Stream()))


@pytest.mark.parametrize("options", [dict(offload_type="leaf_level"), dict(offload_type="block_level", num_blocks_per_group=1)])
def test_prefetching_goes_on_where_blocks_are_skipped(streams, options):
    """What was prefetched for a block that is skipped is freed, and what was not is fetched: no more stays on the GPU."""
    config = group_offloading.GroupOffloadingConfig

    def setup(transformer):
        with pytest.MonkeyPatch.context() as patch:  # that the CPU has no streams is looked at before this
            made = functools.partial(_with_stream, config)
            patch.setattr(group_offloading, "GroupOffloadingConfig", made)
            group_offload(transformer, **options)

    steps = Steps(setup, "set up")
    left = []
    for _ in range(4):
        steps.check()
        left.append(len(streams.on))
    assert steps.prefix.fast == 2 and left == [left[0]] * 4
