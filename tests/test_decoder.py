"""The diffusion decoder: stock's bits whatever is decoded and however attention is computed, and nothing left behind."""

import copy
import functools
import gc
import types
import weakref

import accelerate
import pytest
import torch
from diffusers import LTX2VideoDiffusionDecodePipeline
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host

import ltx2_fastpath
from ltx2_fastpath.testing import decoder as decoders
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter
BLOCKS, LAST_BLOCKS, UPSAMPLERS = 7, 2, 4  # of a tiny decoder
CALLS = {"decoder.norm1": LAST_BLOCKS, "decoder.norm2": BLOCKS, "decoder.qk_norm_rope_3d": BLOCKS, "decoder.mlp": BLOCKS}
CALLS["decoder.pixel_shuffle"] = UPSAMPLERS
# 2 x 2 tiles of a tiny clip, in two groups of frames where there are seventeen.
TILES = dict(tile_sample_min_height=48, tile_sample_stride_height=32, tile_sample_min_width=64, tile_sample_stride_width=48)
FRAME_TILES = dict(tile_sample_min_num_frames=12, tile_sample_stride_num_frames=8)


class Own:
    """A processor of somebody's own: what it makes of q, k and v depends on each of their values, and on the grid."""

    def __call__(self, attn, hidden_states, block_mask=None):
        assert block_mask is None
        query, key, value = attn.project_qkv(hidden_states)
        assert query.is_contiguous() and key.is_contiguous()
        return attn.to_out[0]((query * key.roll(1, 3) + value.roll(1, 2) * 0.5).flatten(4))


@functools.cache
def _original(dtype):
    return decoders.tiny_decoder(dtype)


def tiny(dtype=torch.float32, processor=Own):
    decoder = copy.deepcopy(_original(dtype))
    if processor is not None:
        decoder.set_attn_processor(processor())
    return decoder


def decode(decoder, *, batch=1, steps=None, seed=0, **clip):
    offloaded = decoder.device.type == "meta"
    latents = decoders.latents(_original(decoder.dtype) if offloaded else decoder, **decoders.TINY_CLIP | clip, batch_size=batch)
    with torch.no_grad():
        return decoder.decode(latents, torch.Generator().manual_seed(seed), steps, return_dict=False)[0]


def insides(decoder) -> dict:
    """Everything that each module holds: methods by what they are bound to, all else by identity."""

    def kept(value):
        return value if isinstance(value, types.MethodType) else id(value)

    return {name: {key: kept(value) for key, value in vars(module).items()} for name, module in decoder.named_modules()}


def calls(decoder) -> dict:
    """{site: (fast, first, stock)}"""
    return {row["site"]: (row["fast"], row["first"], row["stock"]) for row in ltx2_fastpath.report(decoder).rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, dict(batch=2), dict(steps=2), dict(batch=2, steps=2)])
def test_whole_video(stand_ins, any_width, dtype, options):
    decoder = tiny(dtype)
    stock = decode(decoder, **options)
    handle = ltx2_fastpath.enable(decoder)
    assert handle.active and not handle.skipped
    assert torch.equal(decode(decoder, **options), stock) and stock.isfinite().all() and stock.std() > 0.1
    assert {site: sum(counts) for site, counts in calls(decoder).items()} == expected_calls(**options)
    launched = stand_ins.total()
    assert torch.equal(decode(decoder, **options), stock) and not handle.stock_calls
    assert stand_ins.total() - launched == sum(expected_calls(**options).values())  # none of them for a comparison


def expected_calls(batch=1, steps=1):
    return {
        "decoder.norm1": LAST_BLOCKS * steps,
        **dict.fromkeys(("decoder.norm2", "decoder.qk_norm_rope_3d", "decoder.mlp"), BLOCKS + LAST_BLOCKS * (steps - 1)),
        "decoder.pixel_shuffle": UPSAMPLERS,
    }


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_tiled(stand_ins, any_width, steps, batch):
    decoder = tiny()
    whole = decode(decoder, batch=batch, steps=steps, num_frames=17)
    decoder.enable_tiling(**TILES, **FRAME_TILES)
    stock = decode(decoder, batch=batch, steps=steps, num_frames=17)
    assert not torch.equal(whole, stock)
    ltx2_fastpath.enable(decoder)
    assert torch.equal(decode(decoder, batch=batch, steps=steps, num_frames=17), stock)
    assert sum(calls(decoder)["decoder.pixel_shuffle"]) == UPSAMPLERS - 1 + 2 * 2 * 2
    decoder.disable_tiling()
    assert torch.equal(decode(decoder, batch=batch, steps=steps, num_frames=17), whole)


def test_mlp_tiles(stand_ins, any_width, monkeypatch):
    """A clip of fewer tokens than one tile has, and of several."""
    decoder = tiny()
    for size in (16384, 1000):
        monkeypatch.setattr(host, "_SWIGLU_TILE_SIZE", size)
        stock = decode(decoder, batch=2)
        ltx2_fastpath.enable(decoder)
        assert torch.equal(decode(decoder, batch=2), stock) and torch.equal(decode(decoder, batch=2), stock)
        ltx2_fastpath.disable(decoder)
    assert stand_ins["swiglu_mlp"] > 2 * BLOCKS


def test_real_refusals_and_kernels():
    """Under the interpreter copies are ours, and norms of widths that the kernel does not take are the host's."""
    decoder = tiny()
    stock = decode(decoder)
    ltx2_fastpath.enable(decoder, without=("decoder.qk_norm_rope_3d", "decoder.mlp"))  # which take half a minute
    assert torch.equal(decode(decoder), stock) and torch.equal(decode(decoder), stock)
    found = calls(decoder)
    assert found["decoder.pixel_shuffle"] == (UPSAMPLERS, UPSAMPLERS, 0)
    assert found["decoder.norm2"][0] == 0 and "expected a width of 128" in str(ltx2_fastpath.report(decoder))


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_default_processor_and_another(stand_ins, any_width, when):
    stock = {}
    for name, processor in (("flex", None), ("own", Own)):
        stock[name] = decode(tiny(processor=processor))
    assert not torch.equal(*stock.values())
    decoder = tiny(processor=None if when == "after" else Own)
    ltx2_fastpath.enable(decoder)
    assert torch.equal(decode(decoder), stock["flex" if when == "after" else "own"])
    decoder.set_attn_processor(Own() if when == "after" else host.LTX2VideoVaeNeighborhoodAttnProcessor())
    assert torch.equal(decode(decoder), stock["own" if when == "after" else "flex"])
    assert sum(calls(decoder)["decoder.qk_norm_rope_3d"]) == 2 * BLOCKS


def test_errors_are_stocks(stand_ins, any_width):
    decoder = tiny()

    def outcome():
        with pytest.raises(ValueError) as raised:
            decode(decoder, height=32, width=32)  # a side of one is under the window
        return str(raised.value)

    stock = outcome()
    ltx2_fastpath.enable(decoder)
    assert outcome() == stock and "at least its kernel size" in stock
    with pytest.raises(ValueError) as raised, torch.no_grad():
        decoder.decoder.det_stages[0][0].attn.project_qkv(torch.zeros(2, 32))
    assert "not enough values to unpack" in str(raised.value)


def test_disable_leaves_nothing(stand_ins, any_width):
    decoder = tiny()
    before, stock = insides(decoder), decode(decoder)
    handle = ltx2_fastpath.enable(decoder)
    patched = insides(decoder)
    assert patched != before and len(handle.patches) == 3 * BLOCKS + UPSAMPLERS
    decode(decoder)
    assert insides(decoder) == patched
    with ltx2_fastpath.disabled(decoder):
        launched = stand_ins.total()
        assert torch.equal(decode(decoder), stock) and stand_ins.total() == launched
    ltx2_fastpath.disable(decoder)
    assert insides(decoder) == before and torch.equal(decode(decoder), stock) and stand_ins.total() == launched


def hook_attentions(decoder):
    for module in decoder.modules():
        if isinstance(module, host.LTX2VideoVaeNeighborhoodAttention):
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def hook_blocks(decoder):
    for module in decoder.modules():
        if isinstance(module, (host.LTX2VideoVaeNABlock, host.LTX2VideoVaeDiffusionNABlock)):
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def offload(decoder):
    accelerate.cpu_offload(decoder.decoder, "cpu")


def double_rotations(decoder):
    for module in decoder.modules():
        if isinstance(module, host.LTX2VideoVaeRotaryPosEmbed3D):
            module.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("hook", [hook_attentions, hook_blocks, offload, double_rotations])
def test_hooks_set_before_and_after(stand_ins, any_width, hook):
    plain = tiny()
    hook(plain)
    stock = decode(plain)
    for first in ("hook", "enable"):
        decoder = tiny()
        before = insides(decoder)
        if first == "enable":
            ltx2_fastpath.enable(decoder)
        hook(decoder)
        hooked = insides(decoder)
        assert ltx2_fastpath.enable(decoder).active
        assert torch.equal(decode(decoder), stock) and stand_ins["pixel_shuffle"] > 0
        ltx2_fastpath.disable(decoder)
        if first == "hook" and hook is not offload:  # whose hooks put other parameters there in every call
            assert insides(decoder) == hooked
        assert torch.equal(decode(decoder), stock)
        if first == "enable" and hook in (hook_attentions, hook_blocks):
            accelerate.hooks.remove_hook_from_module(decoder, recurse=True)
            kept = {key for at, now in insides(decoder).items() for key in now.keys() - before[at].keys()}
            assert kept <= {"forward"}  # which accelerate leaves, bound to the class's


def test_hooked_norms_are_called_as_by_stock(stand_ins):
    """Of hidden states that nobody changes afterwards."""

    def watch(decoder):
        seen = []
        for name, module in decoder.named_modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.register_forward_hook(lambda module, args, output, name=name: seen.append((name, args[0], output)))
        return seen

    plain, decoder = tiny(), tiny()
    seen_stock, seen = watch(plain), watch(decoder)
    ltx2_fastpath.enable(decoder)
    assert torch.equal(decode(decoder), decode(plain)) and stand_ins["pixel_shuffle"] > 0
    assert [name for name, *_ in seen] == [name for name, *_ in seen_stock]
    assert all(torch.equal(a, b) for mine, theirs in zip(seen, seen_stock) for a, b in zip(mine[1:], theirs[1:]))


def test_deep_copies_and_moves(stand_ins, any_width):
    decoder = tiny()
    stock = decode(decoder)
    ltx2_fastpath.enable(decoder)
    decode(decoder)
    twin = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    assert torch.equal(decode(twin), stock)
    launched = stand_ins.total()
    assert "not enabled" in str(ltx2_fastpath.report(twin)) and torch.equal(decode(twin), stock)
    assert stand_ins.total() == launched
    assert not torch.equal(decode(decoder), stock)

    decoder = tiny()
    expected = decode(copy.deepcopy(decoder).to(torch.float16))
    ltx2_fastpath.enable(decoder)
    decode(decoder)
    assert torch.equal(decode(decoder.to(torch.float16)), expected)


def test_calls_that_must_take_the_stock_path(stand_ins, any_width):
    decoder = tiny()
    latents = decoders.latents(decoder, **decoders.TINY_CLIP)
    stock = decode(decoder)
    handle = ltx2_fastpath.enable(decoder)
    with torch.enable_grad():
        video = decoder.decode(latents, torch.Generator().manual_seed(0)).sample
    assert torch.equal(video, stock) and stand_ins.total() == 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decoder.decode(latents, torch.Generator().manual_seed(0))
    assert stand_ins.total() == 0
    assert {reason for _, reason in handle.stock_calls} == {"gradients are enabled", "autocast is active"}
    doubled = tiny().double()
    expected = decode(doubled)
    ltx2_fastpath.enable(doubled)
    assert torch.equal(decode(doubled), expected) and stand_ins.total() == 0


def test_sites_can_be_left_out(stand_ins, any_width):
    decoder = tiny()
    stock = decode(decoder)
    ltx2_fastpath.enable(decoder, without=tuple(CALLS))
    assert torch.equal(decode(decoder), stock) and stand_ins.total() == 0
    with pytest.raises(ValueError, match=r"unknown 'norm1'; choose from decoder\.mlp"):
        ltx2_fastpath.enable(decoder, without=("norm1",))
    ltx2_fastpath.enable(decoder, without=())
    decode(decoder)
    assert stand_ins.total() > 0


def test_the_decode_pipeline_and_its_frames(stand_ins, any_width):
    decoder = tiny()
    pipe = decoders.decode_pipeline(decoder)
    assert type(pipe) is LTX2VideoDiffusionDecodePipeline
    latents = decoders.latents(decoder, **decoders.TINY_CLIP)

    def frames():
        made = pipe(latents, torch.Generator().manual_seed(0)).frames
        return [frame.tobytes() for video in made for frame in video]

    stock, before = frames(), insides(decoder)
    handle = ltx2_fastpath.enable(pipe)
    assert handle.component == "diffusion_decoder" and frames() == stock and stand_ins.total() > 0
    assert calls(pipe)["frames"] == (1, 0, 0)
    ltx2_fastpath.disable(pipe)
    assert insides(decoder) == before and "postprocess_video" not in vars(pipe.video_processor) and frames() == stock


def test_beside_a_transformer(stand_ins, any_width):
    transformer, decoder = models.tiny_transformer("2.5"), tiny()
    pipe = types.SimpleNamespace(transformer=transformer, diffusion_decoder=decoder)
    inputs = models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16)
    with torch.no_grad():
        video, audio = transformer(**inputs)
    stock = decode(decoder)
    handle = ltx2_fastpath.enable(pipe, without=("decoder.mlp", "norm1"))
    assert handle.component == "transformer"
    with torch.no_grad():
        assert all(map(torch.equal, transformer(**inputs), (video, audio)))
    assert torch.equal(decode(decoder), stock)
    report = ltx2_fastpath.report(pipe)
    assert report.status == "active (lossless)"
    sites = {row["site"] for row in report.rows}
    assert {"norm2", "decoder.norm2"} <= sites and stand_ins["swiglu_mlp"] == 0
    with ltx2_fastpath.disabled(pipe):
        launched = stand_ins.total()
        assert torch.equal(decode(decoder), stock) and stand_ins.total() == launched
    ltx2_fastpath.disable(decoder)
    assert "transformer active (lossless)" in str(ltx2_fastpath.report(pipe)) or handle.active
    ltx2_fastpath.disable(pipe)
    assert not handle.active and ltx2_fastpath.report(pipe).status == "not enabled"


def test_an_object_with_neither_model():
    with pytest.raises(TypeError, match="LTX2VideoTransformer3DModel or an LTX2VideoDiffusionDecoderModel.* found Linear"):
        ltx2_fastpath.enable(torch.nn.Linear(1, 1))
    pipe = types.SimpleNamespace(transformer=torch.nn.Linear(1, 1), diffusion_decoder=torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="with transformer Linear and with diffusion_decoder Linear"):
        ltx2_fastpath.report(pipe)


def test_nothing_keeps_a_decoder_in_memory(stand_ins, any_width):
    decoder = tiny()
    handle = ltx2_fastpath.enable(decoder)
    decode(decoder)
    alive = [*map(weakref.ref, (decoder, decoder.decoder.diff_blocks[0]))]
    del decoder
    gc.collect()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 2 and handle.active


def test_tables_are_made_once_a_grid(stand_ins, any_width):
    decoder = tiny()
    handle = ltx2_fastpath.enable(decoder)
    grids = handle._parts.grids
    decode(decoder)
    made = len(grids._tables)
    assert made == 5
    decode(decoder)
    assert len(grids._tables) == made
    decode(decoder, num_frames=17)
    assert len(grids._tables) > made
