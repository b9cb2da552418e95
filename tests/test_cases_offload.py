"""Offloaded pipelines: hooks of accelerate and diffusers around our forwards, weights that are elsewhere between calls."""

import functools

import accelerate
import pytest
import setups
import torch
from diffusers.hooks import apply_group_offloading
from setups import CPU, Together, fast_at

from ltx2_fastpath import disable, enable, report
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("any_width")


def load_lora(pipe):
    pipe.load_lora_weights(setups.lora(), adapter_name="style")


def are_accelerate_wrappers(modules) -> bool:
    return all(
        isinstance(module.forward, functools.partial) and module.forward.func.__module__ == "accelerate.hooks"
        for module in modules
    )


def test_sequential_offload_then_enable_then_lora_then_disable(stand_ins):
    both = Together(stand_ins, functools.partial(models.tiny_pipeline, "2.3", setups.CpuPipeline))
    both.do(setups.CpuPipeline.enable_sequential_cpu_offload)
    enable(both.ours)
    without_lora = setups.generate(both.ours)
    both.check(setups.generate)
    assert both.ours.transformer.transformer_blocks[1].attn1.norm_q.weight.is_meta

    both.do(load_lora)
    both.check(setups.generate)
    assert not setups.equal(setups.generate(both.ours), without_lora)  # the LoRA shows
    assert report(both.ours).stock_calls == {}

    disable(both.ours)
    both.check(setups.generate, fast=False)
    assert are_accelerate_wrappers(both.ours.transformer.transformer_blocks)
    both.check_restored()


@pytest.mark.parametrize("version", models.CONFIGS)
@pytest.mark.parametrize("first", ["offload", "enable"])
def test_sequential_offload_computes_the_same_whichever_comes_first(stand_ins, version, first):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version)))
    if first == "enable":
        enable(both.ours)
    both.do(setups.CpuPipeline.enable_sequential_cpu_offload)
    enable(both.ours)
    for _ in range(3):
        launched = both.check()
    # The q and k norms are offloaded and so are called; RoPE is still fused, in all four attentions of two layers that have it.
    assert launched["qk_norm_split_rope"] == 2 * 4
    assert fast_at(both.ours, "attn1.split_rope") > 0 and fast_at(both.ours, "attn1.qk_norm_split_rope") == 0
    assert report(both.ours).skipped == {} and report(both.ours).stock_calls == {}
    assert all(parameter.is_meta for parameter in both.ours.transformer.parameters())

    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_norms_are_fused_again_once_their_hooks_are_removed(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    assert both.check()["qk_norm_split_rope"] == 2 * 6
    both.do(setups.CpuPipeline.enable_sequential_cpu_offload)
    assert both.check()["qk_norm_split_rope"] == 2 * 4
    both.do(setups.CpuPipeline.remove_all_hooks)
    assert both.check()["qk_norm_split_rope"] == 2 * 6
    disable(both.ours)
    both.check_restored()


@pytest.mark.parametrize("first", ["offload", "enable"])
def test_model_offload_hooks_the_transformer_anew_after_every_call(stand_ins, first):
    both = Together(stand_ins, functools.partial(models.tiny_pipeline, "2.3", setups.CpuPipeline))
    if first == "enable":
        enable(both.ours)
    both.do(setups.CpuPipeline.enable_model_cpu_offload)
    enable(both.ours)
    hooks = []
    for _ in range(2):
        hooks.append(both.ours.transformer._hf_hook)
        both.check(setups.generate)
    assert both.ours.transformer._hf_hook not in hooks  # hooked anew, and still fast
    assert report(both.ours).stock_calls == {}

    disable(both.ours)
    both.check(setups.generate, fast=False)
    both.check_restored()
    assert are_accelerate_wrappers([both.ours.transformer])


BLOCKS = dict(offload_type="block_level", num_blocks_per_group=1)
GROUPS = {
    "blocks": BLOCKS,
    "pairs of blocks": BLOCKS | dict(num_blocks_per_group=2),
    "leaves": dict(offload_type="leaf_level"),
}


@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
@pytest.mark.parametrize("first", ["offload", "enable"])
@pytest.mark.parametrize("groups", GROUPS)
def test_group_offload(stand_ins, tmp_path, groups, first, to_disk):
    both = Together(stand_ins)
    if first == "enable":
        enable(both.ours)
    for pipe, folder in ((both.stock, "stock"), (both.ours, "ours")):
        # Weights offloaded to disk are not in memory between calls: what is read too late, or kept, is other memory.
        path = dict(offload_to_disk_path=str(tmp_path / folder)) if to_disk else {}
        pipe.transformer.enable_group_offload(onload_device=CPU, offload_device=CPU, **GROUPS[groups], **path)
    enable(both.ours)
    for _ in range(3):
        both.check()
    assert report(both.ours).skipped == {} and report(both.ours).stock_calls == {}

    disable(both.ours)
    both.check(fast=False)  # still offloading
    both.check_restored()
    registry = both.ours.transformer.transformer_blocks[0]._diffusers_hook
    assert registry.get_hook("group_offloading") is not None
    assert (tmp_path / "ours").exists() == to_disk


@pytest.mark.parametrize("groups", ["blocks", "leaves"])
def test_group_offload_follows_adapters_that_come_and_go(stand_ins, groups):
    """diffusers takes its hooks off, loads, and hooks again."""
    both = Together(stand_ins)
    enable(both.ours)
    both.do("enable_group_offload", onload_device=CPU, offload_device=CPU, **GROUPS[groups])
    both.check()
    both.do(load_lora)
    both.check()
    both.do(setups.CpuPipeline.unload_lora_weights)
    both.check()
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("groups", ["blocks", "leaves"])
def test_group_offload_with_a_stream_says_what_it_says_without_us(groups, enabled):
    """Streams need an accelerator (tests/gpu); without one the host's own error must come."""
    transformer = setups.tiny()
    if enabled:
        enable(transformer)
    with pytest.raises(ValueError, match="streams"):
        transformer.enable_group_offload(onload_device=CPU, use_stream=True, **GROUPS[groups])


def test_group_offload_of_blocks_alone(stand_ins):
    """Hooks on single blocks rather than on the model."""
    both = Together(stand_ins)
    enable(both.ours)
    both.do(lambda pipe: apply_group_offloading(pipe.transformer.transformer_blocks[0], CPU, CPU, "leaf_level"))
    both.check()
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_explicit_device_map_with_a_block_on_disk(stand_ins, tmp_path):
    both = Together(stand_ins)
    children = [name for name, _ in both.stock.transformer.named_children() if name != "transformer_blocks"]
    parameters = [name for name, _ in both.stock.transformer.named_parameters(recurse=False)]
    places = dict.fromkeys([*children, *parameters, "transformer_blocks.0"], "cpu") | {"transformer_blocks.1": "disk"}
    enable(both.ours)
    for pipe, folder in ((both.stock, "stock"), (both.ours, "ours")):
        accelerate.dispatch_model(pipe.transformer, places, main_device="cpu", offload_dir=tmp_path / folder)
    for _ in range(2):
        both.check()
    assert both.ours.transformer.transformer_blocks[1].scale_shift_table.is_meta
    assert not both.ours.transformer.transformer_blocks[0].scale_shift_table.is_meta
    assert report(both.ours).stock_calls == {}
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_rotary_tables_follow_their_block_to_its_device(stand_ins):
    """With a device map a hook sends each block's arguments to that block's device; ours must go along like the host's tuple."""
    transformer = setups.tiny()
    host_tables = transformer.rope(models.inputs(transformer, **setups.SMALL)["video_coords"])
    enable(transformer)
    passed = []
    block = transformer.transformer_blocks[0]
    block.register_forward_pre_hook(lambda module, args, kwargs: passed.append(kwargs), with_kwargs=True)
    setups.step(transformer)
    ropes = {name: value for name, value in passed[0].items() if "rotary_emb" in name}
    assert len(ropes) == 4
    assert all(map(torch.equal, ropes["video_rotary_emb"], host_tables))
    for device in ("meta", torch.device("meta")):
        moved = accelerate.utils.send_to_device(ropes, device, non_blocking=True)
        for name, rope in moved.items():
            tables = list(rope)
            assert [table.device.type for table in tables] == ["meta", "meta"]
            assert [table.shape for table in tables] == [table.shape for table in ropes[name]]
    staying = accelerate.utils.send_to_device(ropes, "cpu")
    assert all(staying[name] is ropes[name] for name in ropes)  # the same object, so q and k are seen to share it


@pytest.mark.parametrize("appended", [False, True])
def test_hook_that_replaces_or_joins_another(stand_ins, appended):
    class Doubles(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 2

    both = Together(stand_ins)
    plain = setups.step(both.stock.transformer)

    def hook(pipe):
        accelerate.hooks.add_hook_to_module(pipe.transformer.transformer_blocks[0].attn1, Doubles(), append=appended)

    both.do(hook)
    enable(both.ours)
    both.do(hook)
    both.check()
    assert not setups.equal(setups.step(both.ours.transformer), plain)
    both.do(lambda pipe: accelerate.hooks.remove_hook_from_module(pipe.transformer, recurse=True))
    both.check()
    disable(both.ours)
    assert setups.equal(setups.step(both.ours.transformer), plain)
    both.check_restored()


def test_nothing_is_kept_of_weights_between_calls(stand_ins, tmp_path):
    """Weights that change while they are offloaded are the ones that the next call uses."""
    both = Together(stand_ins)
    enable(both.ours)
    both.do("enable_group_offload", onload_device=CPU, offload_device=CPU, **BLOCKS)
    before = setups.step(both.ours.transformer)
    both.check()
    for pipe in (both.stock, both.ours):
        for name, parameter in pipe.transformer.named_parameters():
            if "norm_q" in name or "scale_shift_table" in name:
                parameter.data = parameter.data * 1.5
    both.check()
    assert not setups.equal(setups.step(both.ours.transformer), before)
