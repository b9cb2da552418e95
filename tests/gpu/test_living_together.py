"""Full-size transformers under offloads, adapters and caches, with the real kernels: equal to stock set up alike, and no slower.

``pytest tests/gpu/test_living_together.py -s`` prints the medians. The forwards of both sides take turns; on a set-up that is
bound by transfers they take the same time.
"""

import gc
import statistics
import time

import pytest
import setups
import torch
from diffusers import LTX2Pipeline, PyramidAttentionBroadcastConfig
from diffusers.models.transformers import transformer_ltx2
from peft import LoraConfig

import ltx2_fastpath
from ltx2_fastpath.testing import models

DEVICE = torch.device("cuda")
SIZE = dict(height=512, width=768, num_frames=121)  # 6,144 video tokens
SHORT = dict(height=512, width=768, num_frames=9)  # 768
SLOWER_AT_MOST = 1.02  # the medians of equal code differ by less


@pytest.fixture
def build():
    """build(layers): a full-width LTX-2.3 transformer on the GPU; its memory is free again after the test."""
    built = []

    def make(layers, **options):
        options = dict(dtype=torch.bfloat16) | options
        built.append(models.build_transformer("2.3", num_layers=layers, device=DEVICE, **options))
        return built[-1]

    yield make
    for transformer in built:
        ltx2_fastpath.disable(transformer)
    built.clear()
    gc.collect()
    torch.cuda.empty_cache()


def forward(transformer, kwargs):
    with torch.no_grad(), transformer.cache_context("cond_uncond"):
        return transformer(**kwargs)


def kernel_calls(handle) -> int:
    """How many kernels of ours ran: the blocks' sites, without tables and prefixes."""
    return sum(site.fast for name, site in handle.sites.items() if hasattr(site, "op"))


def check(transformer, kwargs, *, calls=3, stock=None, launches=15):
    """`calls` forwards as set up: equal to stock's (given, or taken with the fast path off), and computed by kernels.

    After the first sight every block makes at least so many launches: of 25, less the audio's where there is too little of it.
    """
    handle = ltx2_fastpath.enable(transformer)
    assert handle.active and not handle.skipped, handle.reason or handle.skipped
    if stock is None:
        with ltx2_fastpath.disabled(transformer):
            stock = [forward(transformer, kwargs) for _ in range(calls)]
    handle.stock_calls.clear()
    for i in range(calls):
        before = kernel_calls(handle)
        output = forward(transformer, kwargs)
        assert setups.equal(stock[i], output), f"call {i}"
        assert i == 0 or kernel_calls(handle) - before >= launches * len(transformer.transformer_blocks), i
    assert not handle.stock_calls, handle.stock_calls
    return handle


def compare_times(name, transformer, kwargs, rounds=3):
    """Medians in milliseconds of stock and fast forwards that take turns; fast must not be slower."""
    times = {"stock": [], "fast": []}

    def timed(side):
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward(transformer, kwargs)
        torch.cuda.synchronize()
        times[side].append(1000 * (time.perf_counter() - start))

    for i in range(rounds):
        for side in ("stock", "fast") if i % 2 else ("fast", "stock"):
            if side == "stock":
                with ltx2_fastpath.disabled(transformer):
                    timed(side)
            else:
                timed(side)
    stock, fast = (statistics.median(times[side]) for side in ("stock", "fast"))
    print(f"\n{name}: stock {stock:.1f} ms, fast {fast:.1f} ms, {stock / fast:.2f}x")
    assert fast <= stock * SLOWER_AT_MOST, times


def add_lora(transformer, rank=16):
    """A LoRA on all attention projections, with weights that show and stay in range."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(setups.ATTENTION_PROJECTIONS), init_lora_weights=False)
    torch.manual_seed(0)
    transformer.add_adapter(config)
    return transformer


STREAMS = {
    "no stream": dict(),
    "stream": dict(use_stream=True),
    "stream, recorded": dict(use_stream=True, record_stream=True),
}
LEVELS = {"blocks": dict(offload_type="block_level", num_blocks_per_group=1), "leaves": dict(offload_type="leaf_level")}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("first", ["offload", "enable"])
def test_group_offload_of_blocks(build, first, stream):
    transformer = build(4)
    kwargs = models.inputs(transformer, **SHORT)
    plain = forward(transformer, kwargs)
    if first == "enable":
        ltx2_fastpath.enable(transformer)
    transformer.enable_group_offload(onload_device=DEVICE, **LEVELS["blocks"], **STREAMS[stream])
    check(transformer, kwargs, stock=[plain] * 3)
    assert transformer.transformer_blocks[0].attn1.to_q.weight.device.type == "cpu"
    ltx2_fastpath.disable(transformer)
    assert setups.equal(forward(transformer, kwargs), plain)
    assert transformer.transformer_blocks[0].attn1.to_q.weight.device.type == "cpu"  # still offloading


@pytest.mark.parametrize("stream", ["no stream", "stream"])
def test_group_offload_of_leaves(build, stream):
    transformer = build(2)
    kwargs = models.inputs(transformer, **SHORT, batch_size=2, image_to_video=True)
    plain = forward(transformer, kwargs)
    ltx2_fastpath.enable(transformer)
    transformer.enable_group_offload(onload_device=DEVICE, **LEVELS["leaves"], **STREAMS[stream])
    check(transformer, kwargs, stock=[plain] * 3)


def test_lora_on_a_full_size_transformer_and_its_group_offload(build):
    """Rank 16 on all attention projections of 48 layers; then block offload of the same 38 GB with a stream beside it."""
    transformer = build(48)
    kwargs = models.inputs(transformer, **SIZE)
    plain = forward(transformer, kwargs)
    add_lora(transformer)
    check(transformer, kwargs, calls=2)
    stock = forward(transformer, kwargs)
    assert not setups.equal(stock, plain)
    compare_times("48 layers with a LoRA of rank 16", transformer, kwargs)

    ltx2_fastpath.disable(transformer)
    transformer.enable_group_offload(onload_device=DEVICE, **LEVELS["blocks"], **STREAMS["stream"])
    check(transformer, kwargs, stock=[stock] * 3)
    compare_times("48 layers with a LoRA under block offload with a stream", transformer, kwargs)


def test_pab_keeps_what_no_kernel_writes_into(build):
    """Five steps, every second from the cache."""
    transformer = build(2)
    inputs = [models.inputs(transformer, **SIZE, seed=seed) for seed in range(5)]
    config = dict(spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000))
    outputs = {}
    for enabled in (False, True, True):
        if enabled:
            handle = ltx2_fastpath.enable(transformer)
            before = kernel_calls(handle)
        transformer.enable_cache(PyramidAttentionBroadcastConfig(**config, current_timestep_callback=lambda: 500))
        outputs[enabled] = [forward(transformer, kwargs) for kwargs in inputs]
        transformer._reset_stateful_cache()
        transformer.disable_cache()
        if enabled:
            assert all(map(setups.equal, outputs[True], outputs[False]))
            assert kernel_calls(handle) > before
    assert not handle.stock_calls


def test_layerwise_casting_to_float8(build):
    transformer = build(2)
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    kwargs = models.inputs(transformer, **SIZE, dtype=torch.bfloat16)
    check(transformer, kwargs)
    compare_times("2 layers cast to float8", transformer, kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(build, dtype):
    """fp16 and fp32 are fast where they verify: in the norms for one, whose order does not depend on the dtype."""
    transformer = build(2, dtype=dtype)
    kwargs = models.inputs(transformer, **SHORT, batch_size=2)
    handle = check(transformer, kwargs, calls=2, launches=5)
    print("\n", ltx2_fastpath.report(transformer))
    assert handle.sites["norm1"].fast > 0 and handle.sites["ada_values"].fast > 0


def test_model_left_on_the_cpu():
    transformer = models.tiny_transformer("2.3")
    kwargs = models.inputs(transformer, **setups.SMALL)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    assert setups.equal(forward(transformer, kwargs), stock)
    assert {reason for _, reason in handle.stock_calls} == {"the hidden states are on cpu"} and kernel_calls(handle) == 0


def generate(pipe):
    with torch.no_grad():
        options = dict(generator=torch.Generator().manual_seed(0), output_type="latent")
        output = pipe(**models.TINY_CALL, **options)
    return output.frames, output.audio


OFFLOADS = {
    "sequential": LTX2Pipeline.enable_sequential_cpu_offload,
    "model": LTX2Pipeline.enable_model_cpu_offload,
    "groups of blocks": lambda pipe: pipe.enable_group_offload(DEVICE, **LEVELS["blocks"]),
    "groups of blocks, stream": lambda pipe: pipe.enable_group_offload(DEVICE, **LEVELS["blocks"], use_stream=True),
    "groups of leaves, stream": lambda pipe: pipe.enable_group_offload(DEVICE, **LEVELS["leaves"], use_stream=True),
}


@pytest.mark.parametrize("first", ["offload", "enable"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_pipeline_offloaded_by_its_own_methods(offload, first):
    """The calls that users make. The model is tiny, so only the ops without a width of their own launch."""
    stock, ours = models.tiny_pipeline(dtype=torch.bfloat16), models.tiny_pipeline(dtype=torch.bfloat16)
    if first == "enable":
        ltx2_fastpath.enable(ours)
    for pipe in (stock, ours):
        OFFLOADS[offload](pipe)
    handle = ltx2_fastpath.enable(ours)
    for _ in range(3):
        before = kernel_calls(handle)
        assert setups.equal(generate(stock), generate(ours))
        assert kernel_calls(handle) > before
    assert not handle.skipped and not handle.stock_calls
    for pipe in (stock, ours):
        pipe.load_lora_weights({name: weight.bfloat16() for name, weight in setups.lora().items()}, adapter_name="style")
    before = kernel_calls(handle)
    assert setups.equal(generate(stock), generate(ours)) and kernel_calls(handle) > before
    ltx2_fastpath.disable(ours)
    before = kernel_calls(handle)
    assert setups.equal(generate(stock), generate(ours)) and kernel_calls(handle) == before
    assert setups.differences(setups.anatomy(stock.transformer), setups.anatomy(ours.transformer)) == []


def test_cuda_graphs_follow_what_is_done_to_the_transformer(build):
    """A graph that was captured before a change must not be replayed after it."""
    transformer = build(2)
    kwargs = models.inputs(transformer, **SHORT)
    other = models.build_transformer("2.3", num_layers=2, device=DEVICE, dtype=torch.bfloat16, seed=1)
    graphs = ltx2_fastpath.enable(transformer, cuda_graphs=True).sites["cuda_graphs"]
    outputs = []

    def settle():
        for _ in range(4):
            with ltx2_fastpath.disabled(transformer):
                outputs.append(forward(transformer, kwargs))
            assert setups.equal(forward(transformer, kwargs), outputs[-1])

    def double_weights():
        with torch.no_grad():
            transformer.transformer_blocks[1].ff.net[2].weight.mul_(2)

    changes = {
        "nothing": lambda: None,
        "LoRA": lambda: add_lora(transformer),
        "LoRA's weight": lambda: transformer.set_adapters(["default"], [0.5]),
        "LoRA off": lambda: transformer.disable_adapters(),
        "LoRA unloaded": lambda: transformer.unload_lora(),
        "weights in place": double_weights,
        "other weights": lambda: transformer.load_state_dict(other.state_dict(), assign=True),
        "another block": lambda: transformer.transformer_blocks.__setitem__(1, other.transformer_blocks[0]),
        "offload": lambda: transformer.enable_group_offload(onload_device=DEVICE, **LEVELS["blocks"]),
    }
    for name, change in changes.items():
        replayed = graphs.fast
        change()
        settle()
        print(f"{name}: {graphs.fast - replayed} of 4 forwards replayed; {graphs.notes}")
        if name not in ("another block", "offload"):
            assert graphs.fast > replayed
    assert not setups.equal(outputs[0], outputs[4]) and not setups.equal(outputs[4], outputs[8])


def test_a_capture_that_fails_leaves_nothing_behind(build, monkeypatch):
    transformer = build(2)
    kwargs, others = models.inputs(transformer, **SHORT), models.inputs(transformer, **SIZE)
    expected = [forward(transformer, each) for each in (kwargs, others)]
    graphs = ltx2_fastpath.enable(transformer, cuda_graphs=True).sites["cuda_graphs"]
    dispatch = transformer_ltx2.dispatch_attention_fn

    def synchronising(query, *args, **options):
        if torch.cuda.is_current_stream_capturing():
            query.sum().item()
        return dispatch(query, *args, **options)

    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(transformer_ltx2, "dispatch_attention_fn", synchronising)
        for _ in range(4):
            assert setups.equal(forward(transformer, kwargs), expected[0])
    assert graphs.fast == 0 and any("capture failed" in note for note in graphs.notes), graphs.notes
    assert torch.cuda.current_stream() == stream and torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.randn(8, device=DEVICE).isfinite().all()
    for _ in range(4):
        assert setups.equal(forward(transformer, others), expected[1])
    assert graphs.fast == 2, graphs.notes


def test_threads_with_streams_of_their_own(build):
    """Two requests of different sizes at the same time, each thread on its own stream."""
    import concurrent.futures

    transformer = build(2)
    inputs = [models.inputs(transformer, **size) for size in (SHORT, SIZE)]
    expected = [forward(transformer, kwargs) for kwargs in inputs]
    torch.cuda.synchronize()
    handle = ltx2_fastpath.enable(transformer)

    def request(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outputs = [forward_alone(transformer, inputs[i]) for _ in range(5)]
        stream.synchronize()
        return all(setups.equal(output, expected[i]) for output in outputs)

    def forward_alone(transformer, kwargs):
        with torch.no_grad():  # a cache context would be shared
            return transformer(**kwargs)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(request, range(2))) == [True, True]
    assert kernel_calls(handle) > 0 and not handle.stock_calls


def test_more_than_two_to_the_31_ada_values(build):
    """60,000 tokens with a timestep each: 2.2 · 10⁹ ada values, of which the last are read by the last norm of the block."""
    free, _ = torch.cuda.mem_get_info()
    if free < 60e9:
        pytest.skip("needs 60 GB")
    transformer = build(1)
    block, sites = transformer.transformer_blocks[0], ltx2_fastpath.enable(transformer).sites
    tokens, width = 60_000, 4096
    assert tokens * 9 * width > 2**31
    generator = torch.Generator(DEVICE).manual_seed(0)
    temb = torch.randn(1, tokens, 9 * width, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    x, update = torch.randn(2, 1, tokens, width, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    with torch.no_grad():
        for launched in range(2):
            (ada,) = sites["ada_values"]((block.scale_shift_table, temb))
            expected = block.scale_shift_table[None, None] + temb.view(1, tokens, 9, width)
            assert all(torch.equal(found, expected[:, :, i]) for i, found in enumerate(ada))
            assert sites["ada_values"].fast == launched
            normed = sites["norm1"](block.norm1, x, ada[7], ada[8])
            assert torch.equal(normed, block.norm1(x) * (1 + expected[:, :, 7]) + expected[:, :, 8])
            hidden, normed = sites["norm3"](block.norm3, x, update, ada[6], (ada[7], ada[8]))
            assert torch.equal(hidden, x + update * expected[:, :, 6])
            assert torch.equal(normed, block.norm3(hidden) * (1 + expected[:, :, 7]) + expected[:, :, 8])
            assert sites["norm1"].fast == sites["norm3"].fast == launched, (sites["norm1"].notes, sites["norm3"].notes)
            del ada, expected, normed, hidden


@pytest.mark.parametrize("first", ["enable", "compile"])
def test_blocks_compiled_by_inductor(first):
    """Compiled blocks stay compiled, and give what they give without us; nothing runs eagerly on the side."""
    torch._dynamo.reset()
    stock = models.tiny_transformer("2.3", num_layers=12, dtype=torch.bfloat16).to(DEVICE)
    ours = models.tiny_transformer("2.3", num_layers=12, dtype=torch.bfloat16).to(DEVICE)
    kwargs = models.inputs(stock, **setups.SMALL)
    if first == "enable":
        ltx2_fastpath.enable(ours)
    for transformer in (stock, ours):
        transformer.compile_repeated_blocks(fullgraph=True)
    handle = ltx2_fastpath.enable(ours)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expected = forward(stock, kwargs)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - frames
    for _ in range(2):
        assert setups.equal(forward(ours, kwargs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - frames <= 2 * compiled
    assert kernel_calls(handle) == 0
    torch._dynamo.reset()


UNWRITABLE = """
import importlib.util, logging
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "cuda" else find(name, *rest)  # Triton alone
import torch, diffusers
from ltx2_fastpath.testing import models
import ltx2_fastpath
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("ltx2_fastpath").addHandler(handler)
transformer = models.build_transformer("2.3", num_layers=1, device="cuda", dtype=torch.bfloat16)
kwargs = models.inputs(transformer, height=256, width=256, num_frames=9)
with torch.no_grad():
    stock = transformer(**kwargs)
    ltx2_fastpath.enable(transformer)
    for _ in range(2):
        print(all(map(torch.equal, transformer(**kwargs), stock)))
print(len(records), "TRITON_CACHE_DIR" in records[0].getMessage(), records[0].getMessage())
"""


def test_kernel_cache_that_cannot_be_written(run_python, tmp_path):
    """Triton's home is a file, as homes are read-only elsewhere: it cannot cache, nothing fails, one line says what to set."""
    (tmp_path / "home").touch()
    printed = run_python(UNWRITABLE, TRITON_HOME=str(tmp_path / "home"), TRITON_CACHE_DIR=None)
    assert printed.splitlines()[:2] == ["True", "True"]
    assert printed.splitlines()[2].startswith("1 True"), printed
