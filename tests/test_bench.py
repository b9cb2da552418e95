"""The benchmark without a GPU: what is compared and counted, in which order, and what is not timed."""

import importlib.util
import io
import json
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ltx2_fastpath
from ltx2_fastpath.bench import __main__ as cli
from ltx2_fastpath.bench import document, floor, forward, kernels, launches, pipeline, plot, setups, table, timing
from ltx2_fastpath.bench.timing import Sample
from ltx2_fastpath.console import Progress
from ltx2_fastpath.ops import ada_values
from ltx2_fastpath.ops.support import IndexedRows
from ltx2_fastpath.testing import models
from ltx2_fastpath.testing.models import Clip

TINY_CLIP = Clip(64, 96, 9)
PROFILE = [
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", 600.0),
    ("Memset (Device)", 2.0),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", 300.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", 50.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", 51.0),
    ("_ada_values_kernel", 7.0),
    ("Memcpy DtoD (Device -> Device)", 3.0),
]


class FakeMeter:
    """Answers with fixed numbers and keeps what it timed, in order."""

    def __init__(self):
        self.timed = []

    def seconds(self, call):
        call()
        return 1.5

    def synchronisations(self, call):
        call()
        return 0

    def peak(self, call):
        return call(), 2**31

    def time(self, call):
        self.timed.append(call)
        return Sample(12.0, 4.0)

    time_cold = time

    def kernels(self, call):
        return PROFILE

    def copy_bandwidth(self):
        return 4e12


class Launched(TorchDispatchMode):
    """The matrix products and attentions that run under it, with the shapes of their tensors, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name in ("aten::addmm", "aten::mm", "aten::bmm") or "scaled_dot_product" in name:
            tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
            self.calls.append((name, [(x.shape, x.stride(), x.dtype) for x in tensors]))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def high(monkeypatch):
    """Stands for quality "high": lossless, but the video is too large by a thousandth. Holds the transformers that have it."""
    enable, made = ltx2_fastpath.enable, []

    def stand_in(transformer, *, quality="lossless", **options):
        assert quality == "high" or transformer not in made, "enabled in another quality"
        if quality == "high" and transformer not in made:
            made.append(transformer)
            transformer.register_forward_hook(lambda module, args, output: (1.001 * output[0], output[1]))
        return enable(transformer, **options)

    monkeypatch.setattr(ltx2_fastpath, "enable", stand_in)
    return made


def tiny_inputs(transformer, **options):
    return models.inputs(transformer, **TINY_CLIP._asdict(), text_tokens=16, **options)


# The floor


@pytest.mark.parametrize(
    "options", [{}, dict(guidance="stg"), dict(guidance="isolated", batch_size=2), dict(image_to_video=True)]
)
@torch.no_grad()
def test_floor_is_the_matrix_products_and_attentions_of_the_forward(transformer, options):
    inputs = tiny_inputs(transformer, **options)
    expected = transformer(**inputs)
    recorded = floor.record(transformer, lambda: transformer(**inputs))

    with Launched() as stock:
        transformer(**inputs)
    with Launched() as alone:
        assert recorded() is None
    assert alone.calls == stock.calls
    linears = sum(name != "aten::_scaled_dot_product_flash_attention_for_cpu" for name, _ in stock.calls)
    assert len(recorded.calls) == len(stock.calls) > linears > 40 * len(transformer.transformer_blocks) / 2

    # Recording leaves nothing behind.
    assert all(torch.equal(a, b) for a, b in zip(transformer(**inputs), expected))
    assert not any(module._forward_pre_hooks for module in transformer.modules())
    with Launched() as again:
        transformer(**inputs)
    assert again.calls == stock.calls and len(recorded.calls) == len(stock.calls)


@torch.no_grad()
def test_floor_runs_on_few_random_tensors():
    transformer = models.tiny_transformer("2.3", num_layers=4)
    shallow = models.tiny_transformer("2.3", num_layers=2)
    deep, flat = (floor.record(t, lambda t=t: t(**tiny_inputs(t))) for t in (transformer, shallow))
    assert len(deep.calls) > len(flat.calls)

    def inputs_of(recorded):
        return {id(x): x for call in recorded.calls for x in call.args if not isinstance(x, torch.nn.Parameter) and x is not None}

    assert len(inputs_of(deep)) == len(inputs_of(flat))
    assert all(x.std() > 0.3 for x in inputs_of(deep).values() if x.numel() > 100)


def test_floor_gives_the_dispatcher_back_after_an_error():
    dispatch = floor.transformer_ltx2.dispatch_attention_fn
    transformer = models.tiny_transformer("2.3")

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        floor.record(transformer, fail)
    assert floor.transformer_ltx2.dispatch_attention_fn is dispatch
    assert not any(module._forward_pre_hooks for module in transformer.modules())


# Kernel names


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN", launches.MATRIX),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x1_tn_align8>", launches.MATRIX),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", launches.MATRIX),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16>", launches.MATRIX),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", launches.MATRIX),
        ("triton_tem_fused_addmm_12", launches.MATRIX),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", launches.ATTENTION),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel_traits<128>>", launches.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", launches.ATTENTION),
        ("triton_poi_fused__scaled_dot_product_flash_attention_addmm_mul_sigmoid_7", launches.REST),
        ("triton_red_fused_addmm_mean_pow_rsqrt_2", launches.REST),
        ("triton_per_fused_addmm_t_view_0", launches.REST),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>", launches.REST),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", launches.REST),
        ("_qk_norm_split_rope_kernel", launches.REST),
        ("void qk_norm_split_rope<0, 4096, 128, true, 1, true>(void const*)", launches.REST),
        ("void rms_norm_modulate<0, 4096, true, true, true, 2, 0>(void const*)", launches.REST),
        ("Memset (Device)", launches.MEMSET),
        ("Memcpy HtoD (Pageable -> Device)", launches.COPY),
    ],
)
def test_kind_of(name, kind):
    assert launches.kind_of(name) == kind


def test_breakdown():
    result = launches.breakdown(PROFILE)
    assert result["launches"] == {"kernels": 5, "memsets": 1, "copies": 1}
    assert result["split_ms"] == {"matrix products": 0.602, "attention": 0.3, "rest": pytest.approx(0.111)}
    add, ada, copy = result["rest_kernels"]
    assert add == {"name": PROFILE[3][0], "launches": 2, "ms": pytest.approx(0.101)}
    assert ada["name"] == "_ada_values_kernel" and copy["name"].startswith("Memcpy")


# Taking turns


def test_interleave():
    order = []

    def measure(call):
        order.append(call())
        return Sample(len(order), 0.0)

    samples = timing.interleave({name: lambda name=name: name for name in "abc"}, measure, 4)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert [sample.gpu_ms for sample in samples["b"]] == [2, 4, 9, 11]
    assert timing.summary(samples["b"]) == {
        "gpu_ms": 6.5,
        "host_ms": 0.0,
        "raw_gpu_ms": [2, 4, 9, 11],
        "raw_host_ms": [0.0] * 4,
    }


# Bytes


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def test_bytes_of_a_modulation():
    x = zeros(2, 100, 512)
    shift, scale = zeros(2, 1, 2, 512).unbind(2)
    moved = kernels.bytes_moved((None, x, scale, shift), torch.empty_like(x))
    assert moved == 2 * (2 * 100 * 512) + 2 * (2 * 100 * 512) + 2 * 2 * (2 * 512)

    shift, scale = zeros(2, 100, 2, 512).unbind(2)
    moved = kernels.bytes_moved((None, x, scale, shift), torch.empty_like(x))
    assert moved == 2 * (4 * 2 * 100 * 512)

    # A row that is repeated by its stride is read once.
    row = zeros(1, 1, 512)
    moved = kernels.bytes_moved((None, x, row.expand(2, 100, 512), row.expand(2, 100, 512)), torch.empty_like(x))
    assert moved == 2 * (2 * 2 * 100 * 512) + 2 * 512


def test_bytes_of_qk_norm_and_rope():
    q, k = zeros(1, 64, 512), zeros(1, 64, 512)
    norms = [torch.nn.RMSNorm(512, dtype=torch.bfloat16) for _ in "qk"]
    tables = [zeros(1, 64, 4, 64, dtype=torch.float32).transpose(1, 2) for _ in range(4)]
    shared, apart = (tables[:2], tables[:2]), (tables[:2], tables[2:])
    rows = 4 * 64 * 512 * 2 + 2 * 512 * 2
    table_bytes = 4 * 64 * 64 * 4
    results = q.clone(), k.clone()
    assert kernels.bytes_moved((*norms, q, k, *shared), results) == rows + 2 * table_bytes
    assert kernels.bytes_moved((*norms, q, k, *apart), results) == rows + 4 * table_bytes
    assert kernels.bytes_moved((*norms, q, k, None, None), results) == rows


def test_bytes_of_ada_values():
    pairs = [(zeros(9, 16), zeros(2, 5, 9 * 16)), (zeros(2, 8), zeros(2, 1, 2 * 8))]
    moved = kernels.bytes_moved(tuple(pairs), ada_values.eager(*pairs))
    assert moved == 2 * (9 * 16 + 2 * (2 * 5 * 9 * 16)) + 2 * (2 * 8 + 2 * (2 * 2 * 8))


def test_bytes_of_indexed_ada_values():
    index = torch.zeros((2, 5), dtype=torch.int32)
    pairs = [(zeros(9, 16), IndexedRows(zeros(2, 9 * 16), index)), (zeros(2, 8), zeros(2, 1, 2 * 8))]
    moved = kernels.bytes_moved(tuple(pairs), ada_values.eager(*pairs))
    assert moved == 2 * (9 * 16 + 2 * (2 * 9 * 16)) + 4 * (2 * 5) + 2 * (2 * 8 + 2 * (2 * 2 * 8))


# Operations


def stub_op(*, equal=True, refused=None):
    """x + 1, whose kernel is right or is not."""
    return types.SimpleNamespace(
        CANDIDATES=(None,),
        signature=lambda x: x.shape,
        refusal=lambda x: refused,
        rehearsals=lambda x: (),
        eager=lambda x: x + 1,
        launch=lambda candidate, x: x + (1 if equal else 1 + 1e-6),
    )


def stub_case(op):
    x = torch.ones(3, 4)
    return kernels.Case("increment", "3 x 4", op, lambda: ((x,), lambda: op.eager(x)))


def test_equal_operation_is_timed():
    meter = FakeMeter()
    row = kernels.measure(stub_case(stub_op()), meter, repeats=6)
    assert row["equal"] is True and row["bytes"] == 2 * 4 * 12 and row["speed_up"] == 1.0
    assert row["gb_s"] == pytest.approx(96 / 12e-3 / 1e9)
    assert len(meter.timed) == 12 and len(row["fused"]["raw_gpu_ms"]) == 6
    assert torch.equal(meter.timed[0](), torch.full((3, 4), 2.0))


@pytest.mark.parametrize(
    "op, equal, note",
    [(stub_op(equal=False), False, "other bits"), (stub_op(refused="x: too short"), None, "x: too short")],
)
def test_no_timing_without_equal_bits(op, equal, note):
    meter = FakeMeter()
    row = kernels.measure(stub_case(op), meter, repeats=6)
    assert row["equal"] is equal and note in row["note"]
    assert not meter.timed and "eager" not in row and "speed_up" not in row


def test_no_timing_where_the_host_disagrees_with_the_op():
    op, meter = stub_op(), FakeMeter()
    case = kernels.Case("increment", "1", op, lambda: ((torch.ones(1),), lambda: torch.ones(1)))
    assert kernels.measure(case, meter, repeats=6)["equal"] is False
    assert not meter.timed


def test_operation_without_memory_is_passed_over():
    def make():
        raise torch.OutOfMemoryError

    row = kernels.measure(kernels.Case("increment", "huge", stub_op(), make), FakeMeter(), repeats=6)
    assert row == {"operation": "increment", "shape": "huge", "equal": None, "note": "too little GPU memory"}


@pytest.fixture
def narrow():
    """A fast 2.3 transformer on meta, as narrow as the kernels take it: eight heads."""
    width = dict(num_attention_heads=8, audio_num_attention_heads=8, cross_attention_dim=1024, audio_cross_attention_dim=512)
    with torch.device("meta"):
        transformer = models.LTX2VideoTransformer3DModel(**models.CONFIGS["2.3"] | width | dict(num_layers=1))
    ltx2_fastpath.enable(transformer)
    return transformer


@torch.no_grad()
def test_every_case_is_one_that_its_op_takes(narrow, monkeypatch):
    for name in ("SHORT", "MEDIUM", "LARGE", "LONG"):
        monkeypatch.setattr(kernels, name, Clip(64, 96, 41))
    small = ((Clip(64, 96, 41), 1), (Clip(64, 96, 41), 2))
    for name in ("VIDEOS", "AUDIOS", "AUDIO_TO_VIDEO", "VIDEO_TO_AUDIO", "IMAGE_TO_VIDEO"):
        monkeypatch.setattr(kernels, name, small)
    seen = set()
    for case in kernels.cases(kernels.Maker(narrow, "cpu", torch.float32)):
        args, eager = case.make()
        assert case.op.refusal(*args) is None, case
        # The host's chain gets the same values, whatever the op gets them in.
        result = case.op.eager(*args)
        assert kernels.same_bits(kernels._expanded(result), eager()), case
        assert kernels.bytes_moved(args, result) > 0
        seen.add(case.operation)
    assert {"QK-norm + RoPE", "QK-norm + RoPE, compact tables", "QK-norm", "head gate", "prompt modulation"} < seen
    for operation in ("ada values", "RMSNorm + modulate", "gated residual", "gated residual + norm + 2 modulations"):
        assert {f"{operation}, row", f"{operation}, per token", f"{operation}, indexed"} < seen


def test_production_shapes():
    maker = kernels.Maker(models.outline("2.3"), "cpu", torch.bfloat16)
    found = list(kernels.cases(maker))
    assert [maker.tokens(clip) for clip in (kernels.SHORT, kernels.MEDIUM, kernels.LARGE, kernels.LONG)] == [
        (6144, 126), (14080, 126), (32640, 126), (63240, 251)
    ]  # fmt: skip
    rotated = [case.shape for case in found if case.operation == "QK-norm + RoPE"]
    assert rotated == [
        "1 x 6144/6144 x 4096", "2 x 6144/6144 x 4096", "1 x 14080/14080 x 4096", "2 x 14080/14080 x 4096",
        "1 x 32640/32640 x 4096", "1 x 63240/63240 x 4096", "1 x 126/126 x 2048", "2 x 126/126 x 2048", "1 x 251/251 x 2048",
        "1 x 6144/126 x 2048", "1 x 14080/126 x 2048", "2 x 14080/126 x 2048", "1 x 126/14080 x 2048", "2 x 126/6144 x 2048",
    ]  # fmt: skip
    assert len({(case.operation, case.shape) for case in found}) == len(found)


def test_kernels_section_is_saved_row_by_row(monkeypatch):
    good, bad = stub_case(stub_op()), stub_case(stub_op(equal=False))
    monkeypatch.setattr(kernels, "cases", lambda maker: [good, bad, good])
    section, saved = {"section": "kernels"}, []
    kernels.run(
        section, "2.3", FakeMeter(), device="cpu", repeats=2, progress=lambda text: None,
        save=lambda: saved.append(json.loads(json.dumps(section))),
    )  # fmt: skip
    assert [len(state["rows"]) for state in saved] == [1, 2, 3]
    assert [state["equal"] for state in saved] == [True, False, False]
    assert section["copy_gb_s"] == 4000 and section["rows"][0]["copy_share"] == section["rows"][0]["gb_s"] / 4000

    text = table.section_text(section)
    assert text.count("1.00x") == 2 and text.count("DIFFER") == 1 and "not timed" in text


# Forwards


def measured(instances, arms=("eager", "fast", "floor"), passes=None, meter=None, **options):
    meter, section = meter or FakeMeter(), {"section": "forward", "version": "2.3", "notes": []}
    forward.measure(
        section, instances, TINY_CLIP, passes or {"cfg": 1}, arms, meter, repeats=3, progress=lambda text: None, **options
    )  # fmt: skip
    return section, meter


def test_twins_share_weights_and_nothing_else(high):
    transformer = models.tiny_transformer("2.3")
    assert forward.instances_of(transformer).high is None and not high
    instances = forward.instances_of(transformer, high=True)
    assert instances.stock is transformer and high == [instances.high]
    for twin in instances[1:]:
        assert all(a is b for a, b in zip(transformer.parameters(), twin.parameters()))
        assert not set(map(id, transformer.modules())) & set(map(id, twin.modules()))
    active = [str(ltx2_fastpath.report(instance)).split("\n")[0] for instance in instances]
    assert [": active" in status for status in active] == [False, False, True, True, True]


def test_forward_section(stand_ins, any_width):
    instances = forward.instances_of(models.tiny_transformer("2.3"))
    section, meter = measured(instances, image_to_video=True)
    assert section["equal"] and section["arms"]["fast"]["equal"] == {"cfg video": True, "cfg audio": True}
    assert section["arms"]["fast"]["max_abs_difference"] == {"cfg video": 0.0, "cfg audio": 0.0}
    assert len(meter.timed) == 9 and meter.timed[:3] == meter.timed[3:6][-1:] + meter.timed[3:5]
    for record in section["arms"].values():
        assert record["gpu_ms"] == 12 and record["times_floor"] == 1.0 and record["speed_up"] == 1.0
        assert record["launches"]["kernels"] == 5 and record["peak_bytes"] == 2**31 and record["first_call_s"] == 1.5
        assert record["synchronisations"] == 0
    assert section["video_tokens"] == 12 and section["audio_tokens"] == 9 and section["layers"] == 2
    assert any(site["fast"] for site in section["fast_path"]["sites"])
    text = table.section_text(json.loads(json.dumps(section)))
    assert "bit-equal" in text and "image to video" in text


def test_high_arm_takes_turns_and_is_not_judged(stand_ins, any_width, high):
    class Meter(FakeMeter):
        """A call takes 10 ms more than the one before it in the first round, and is profiled without an audio stream."""

        def time(self, call):
            self.timed.append(call)
            return Sample(10.0 * (1 + self.timed.index(call)), 1.0)

        def kernels(self, call):
            assert [handle.audio_stream for handle in instances.handles()] == [False, False]
            return PROFILE

    instances = forward.instances_of(models.tiny_transformer("2.3"), high=True)
    section, meter = measured(instances, ("eager", "fast", "high", "floor"), meter=Meter())
    arms = section["arms"]
    assert section["equal"] and list(arms) == ["eager", "fast", "high", "floor"]
    assert [arm["gpu_ms"] for arm in arms.values()] == [10, 20, 30, 40]
    assert arms["high"]["over_fast"] == 20 / 30 and arms["high"]["speed_up"] == 10 / 30
    assert not any("over_fast" in arm for name, arm in arms.items() if name != "high")
    assert arms["high"]["equal"] == {"cfg video": False, "cfg audio": True}
    assert 0 < arms["high"]["max_abs_difference"]["cfg video"] < 0.01
    rounds = [meter.timed[i : i + 4] for i in (0, 4, 8)]
    assert len(meter.timed) == 12 and all(set(calls) == set(rounds[0]) for calls in rounds)
    assert [handle.audio_stream for handle in instances.handles()] == [True, True]

    head, *rows = table.section_text(section).splitlines()[1:]
    assert head.endswith("over fast") and [row.split()[-1] for row in rows] == ["-", "-", "0.67x", "-"]


def test_no_timing_of_an_unequal_forward(stand_ins, any_width):
    transformer, other = models.tiny_transformer("2.3"), models.tiny_transformer("2.3", seed=1)
    instances = forward.instances_of(transformer)._replace(fast=other)
    ltx2_fastpath.enable(other)
    section, meter = measured(instances, arms=("eager", "fast", "compiled", "floor"))
    assert section["equal"] is False and not meter.timed
    assert section["arms"].keys() == {"eager", "fast"} and "gpu_ms" not in section["arms"]["eager"]
    assert section["arms"]["fast"]["max_abs_difference"]["cfg video"] > 0
    text = table.section_text(section)
    assert "NOT EQUAL, so not timed: fast differs from eager in cfg video, cfg audio" in text and "12.0" not in text


@torch.no_grad()
def test_passes_of_a_step_share_latents_and_prompt():
    arguments = models.tiny_transformer("2.3"), TINY_CLIP, forward.STEP_PASSES, True
    for given, laid_out in ((False, [True, False, False]), (True, 3 * [True])):
        passes = forward._inputs(*arguments, given)
        assert [kwargs["hidden_states"].is_contiguous() for kwargs in passes.values()] == laid_out
    both, *singles = passes.values()
    for name, value in both.items():
        if isinstance(value, torch.Tensor):
            assert all(torch.equal(value[-1:], single[name]) for single in singles), name
    for name in ("hidden_states", "audio_hidden_states"):
        assert torch.equal(both[name][0], both[name][1]) and both[name][0].std() > 0.5
    assert not torch.equal(*both["encoder_hidden_states"])


@torch.no_grad()
def test_passes_of_a_modular_step_have_one_latents_tensor():
    """A prompt each: positive, negative, and the positive again where something is perturbed."""
    passes = forward._inputs(models.tiny_transformer("2.3"), TINY_CLIP, forward.MODULAR_PASSES, False, False)
    positive, negative, stg, isolated = (passes[name] for name in forward.MODULAR_PASSES)
    for name in ("hidden_states", "audio_hidden_states"):
        assert all(kwargs[name] is stg[name] for kwargs in passes.values()) and len(stg[name]) == 1
    for name in ("encoder_hidden_states", "audio_encoder_hidden_states"):
        assert positive[name] is stg[name] is isolated[name] and not torch.equal(negative[name], stg[name])
    assert stg["spatio_temporal_guidance_blocks"] and not positive.get("spatio_temporal_guidance_blocks")
    assert isolated["isolate_modalities"] and not negative.get("isolate_modalities")


def test_step_is_timed_as_it_is_in_its_later_steps(stand_ins, any_width):
    """The second pass starts where it begins to differ from the first, as the fast path has found out by then."""
    instances = forward.instances_of(models.tiny_transformer("2.3", num_layers=3))
    # One row, for CPUs sum in another order for two. Of five calls the first shows the second pass and the next verifies.
    section, _ = measured(instances, ("eager", "fast"), {"cfg": 1, "stg": 1})
    (prefix,) = (site for site in section["fast_path"]["sites"] if site["site"] == "guidance.prefix")
    assert section["equal"] and prefix["fast"] == 3


def test_compiled_arms(stand_ins, any_width):
    """A graph break is allowed only where the host has one: it branches on a tensor under spatio-temporal guidance."""
    instances = forward.instances_of(models.tiny_transformer("2.3", num_layers=1))
    asked = []
    for twin in (instances.compiled, instances.fast_compiled):

        def compile_repeated_blocks(twin=twin, **options):
            asked.append(options)
            if twin is instances.compiled:
                type(twin).compile_repeated_blocks(twin, **options, backend="eager")

        twin.compile_repeated_blocks = compile_repeated_blocks
    section, meter = measured(instances, ("eager", "fast", "compiled", "fast + compile"), {"cfg": 2, "stg": 1})
    assert section["equal"] and not section["notes"]
    assert asked == 2 * [{"fullgraph": False, "dynamic": False}] and len(meter.timed) == 12
    names = {f"{guidance} {modality}" for guidance in ("cfg", "stg") for modality in ("video", "audio")}
    assert section["arms"]["compiled"]["equal"] == dict.fromkeys(names, True)
    assert instances.compiled.transformer_blocks[0]._compiled_call_impl is not None

    instances.compiled.compile_repeated_blocks = lambda **options: asked.append(options)
    measured(instances, ("eager", "compiled"))
    assert asked[2:] == [{"fullgraph": True, "dynamic": False}]


def test_compiled_arm_that_fails_is_left_out(stand_ins, any_width):
    instances = forward.instances_of(models.tiny_transformer("2.3"))

    def fail(**options):
        raise RuntimeError("no compiler\nat all")

    instances.compiled.compile_repeated_blocks = fail
    section, _ = measured(instances, ("eager", "fast", "compiled", "floor"))
    assert section["notes"] == ["compiled is left out: RuntimeError: no compiler"]
    assert section["arms"].keys() == {"eager", "fast", "floor"} and section["arms"]["floor"]["gpu_ms"] == 12


def test_instances_need_an_active_fast_path(monkeypatch):
    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: "the moon is full")
    with pytest.raises(forward.Unusable, match="the moon is full"):
        forward.instances_of(models.tiny_transformer("2.3"))


def test_choose_layers():
    gib, clips = 2**30, [Clip(512, 768, 121), Clip(704, 1280, 121)]
    assert forward.choose_layers("2.3", None, clips, 1, 139 * gib) == (48, None)
    layers, note = forward.choose_layers("2.3", None, clips, 1, 24 * gib)
    assert 10 < layers < 30 and note == f"{layers} of 48 layers: the GPU has 24 GiB free"
    assert forward.choose_layers("2.3", None, clips, 2, 24 * gib)[0] < layers
    assert forward.choose_layers("2.3", 4, clips, 1, 2 * gib) == (4, "4 of 48 layers, as asked")
    with pytest.raises(forward.Unusable, match="4 GiB"):
        forward.choose_layers("2.3", None, clips, 1, 4 * gib)


# Pipeline calls


class Clock(FakeMeter):
    """The first call takes 60 s, the second 30 s, the third 20 s."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def seconds(self, call):
        call()
        self.calls += 1
        return 60 / self.calls


def record_forwards(transformer) -> list[dict]:
    """The keyword arguments of every forward of `transformer` from now on."""
    forwards = []
    transformer.register_forward_pre_hook(lambda module, args, kwargs: forwards.append(kwargs), with_kwargs=True)
    return forwards


def measured_pipeline(arms, steps=2, given_latents=False):
    meter, section = Clock(), {"section": "pipeline", "version": "2.3", "notes": []}
    pipeline.measure(section, arms, TINY_CLIP, given_latents, steps, meter, lambda text: None)
    return section, meter


def test_pipelines_share_weights_and_nothing_else(high):
    transformer = models.tiny_transformer("2.3")
    assert list(pipeline.arms_of(transformer)) == ["eager", "fast"] and not high
    arms = pipeline.arms_of(transformer, high=True)
    assert list(arms) == ["eager", "fast", "high"]
    twins = [arm.pipe.transformer for arm in arms.values()]
    assert twins[0] is transformer and high == [twins[2]] and len(set(map(id, twins))) == 3
    for twin in twins:
        assert all(a is b for a, b in zip(transformer.parameters(), twin.parameters()))
    assert [": active" in str(ltx2_fastpath.report(twin)) for twin in twins] == [False, True, True]
    assert len({id(arm.pipe.scheduler) for arm in arms.values()}) == 3


def test_pipelines_need_an_active_fast_path(monkeypatch):
    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: "the moon is full")
    with pytest.raises(forward.Unusable, match="the moon is full"):
        pipeline.arms_of(models.tiny_transformer("2.3"))


def test_pipeline_section(stand_ins, any_width, high):
    transformer = models.tiny_transformer("2.3")
    arms = pipeline.arms_of(transformer, high=True)
    forwards = record_forwards(transformer)
    section, meter = measured_pipeline(arms)

    # One call of each arm: three forwards a step, with the pipeline's guidance and the text of a real request.
    assert meter.calls == 3 and len(forwards) == 2 * 3
    assert [len(kwargs["hidden_states"]) for kwargs in forwards] == 2 * [2, 1, 1]
    assert [kwargs["spatio_temporal_guidance_blocks"] for kwargs in forwards] == 2 * [None, [1], None]
    assert [kwargs["isolate_modalities"] for kwargs in forwards] == 2 * [False, False, True]
    assert forwards[0]["encoder_hidden_states"].shape == (2, 1024, 16) and stand_ins.total() > 0

    assert section["equal"] and section["steps"] == 2 and section["clip"] == "64x96x9" and section["layers"] == 2
    assert (section["video_tokens"], section["audio_tokens"], section["text_tokens"]) == (12, 9, 1024)
    eager, fast, approximate = section["arms"].values()
    assert eager == {"peak_bytes": 2**31, "seconds": 60.0, "speed_up": 1.0}
    assert fast.pop("prefixes_reused") == 0  # CPUs sum in another order for the two rows of the CFG pass
    assert fast == {
        "peak_bytes": 2**31, "seconds": 30.0, "speed_up": 2.0, "equal": {"video": True, "audio": True},
        "max_abs_difference": {"video": 0.0, "audio": 0.0},
    }  # fmt: skip
    assert approximate["speed_up"] == 3.0 and approximate["equal"] == {"video": False, "audio": False}
    assert all(30 < decibels < 120 for decibels in approximate["psnr_db"].values())
    assert any(site["fast"] for site in section["fast_path"]["sites"]) and not section["notes"]

    text = table.section_text(json.loads(json.dumps(section)))
    assert "2 steps" in text and "bit-equal" in text and f"{approximate['psnr_db']['video']:.1f}" in text


def test_more_steps_are_timed_without_another_warm_up(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3")
    arms = pipeline.arms_of(transformer)
    forwards, told = record_forwards(transformer), []
    pipeline.warm_up(arms, TINY_CLIP, False, told.append)
    assert len(forwards) == 3 * 3 and len(told) == 2
    assert not measured_pipeline(arms, 3)[0]["notes"] and not measured_pipeline(arms, 2)[0]["notes"]
    assert len(forwards) == 3 * (3 + 3 + 2)


def test_reused_prefixes_are_those_of_the_timed_call(stand_ins, any_width, monkeypatch):
    request = models.latents_request
    one_row = dict(guidance_scale=1.0, audio_guidance_scale=1.0)  # for CPUs sum in another order for two
    monkeypatch.setattr(models, "latents_request", lambda *args, **options: request(*args, **options) | one_row)
    arms = pipeline.arms_of(models.tiny_transformer("2.3", num_layers=3))
    pipeline.warm_up(arms, TINY_CLIP, False, lambda text: None)
    assert arms["fast"].reused == 1
    section, _ = measured_pipeline(arms, 4)
    assert section["equal"] and section["arms"]["fast"]["prefixes_reused"] == 4
    assert "4 of 4" in table.section_text(section)


def test_given_latents_are_the_noise_that_would_be_drawn(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3", dtype=torch.bfloat16)
    arms = pipeline.arms_of(transformer)
    forwards = record_forwards(transformer)
    drawn, given = (measured_pipeline(arms, given_latents=given)[0] for given in (False, True))
    assert (drawn["given_latents"], given["given_latents"]) == (False, True) and drawn["equal"] and given["equal"]
    assert "latents given" in table.section_text(given) and "latents given" not in table.section_text(drawn)
    before, after = forwards[:6], forwards[6:]
    for name in ("hidden_states", "audio_hidden_states"):
        assert torch.equal(before[0][name], after[0][name]) and before[0][name].std() > 0.5
    assert [kwargs["hidden_states"].is_contiguous() for kwargs in before] == 2 * [True, False, False]
    assert all(kwargs["hidden_states"].is_contiguous() for kwargs in after)


def test_no_timing_of_an_unequal_pipeline(stand_ins, any_width, high):
    arms = pipeline.arms_of(models.tiny_transformer("2.3"), high=True)
    arms["fast"] = pipeline.arms_of(models.tiny_transformer("2.3", seed=1))["fast"]
    section, meter = measured_pipeline(arms)
    assert section["equal"] is False and meter.calls == 2 and section["arms"].keys() == {"eager", "fast"}
    assert not any("seconds" in arm or "speed_up" in arm for arm in section["arms"].values())
    assert section["arms"]["fast"]["max_abs_difference"]["video"] > 0
    text = table.section_text(section)
    assert text.endswith("NOT EQUAL, so not timed: fast differs from eager in video, audio") and "60.0" not in text


def test_psnr():
    reference = torch.tensor([-1.0, 0.0, 1.0, 3.0])  # a range of 4
    assert pipeline.psnr(reference + 0.04, reference) == pytest.approx(40)
    assert pipeline.psnr(reference + torch.tensor([0.0, 0.0, 0.0, 0.8]), reference) == pytest.approx(20)
    assert pipeline.psnr(reference.clone(), reference) is None


# Document, table and picture


def canned(*, red=False) -> dict:
    """A document with a section of forwards and one of kernels."""
    arms = {}
    for name, milliseconds in (("eager", 1205.4), ("compiled", 935.0), ("fast", 903.6), ("floor", 868.2)):
        arms[name] = (
            {"first_call_s": 2.5, "peak_bytes": 41 * 2**30, "synchronisations": 7}
            | timing.summary([Sample(milliseconds, 449.5)] * 3)
            | launches.breakdown(PROFILE)
            | {"speed_up": 1205.4 / milliseconds, "times_floor": milliseconds / 868.2}
        )
    for name, equal, difference in (("compiled", False, 0.0625), ("fast", not red, 0.0)):
        arms[name] |= {"equal": {"cfg video": equal}, "max_abs_difference": {"cfg video": difference}}
    forwards = {
        "section": "forward", "version": "2.3", "notes": ["48 of 48 layers"], "clip": "704x1280x121", "video_tokens": 14080,
        "audio_tokens": 126, "passes": {"cfg": 1}, "image_to_video": False, "layers": 48, "dtype": "bfloat16", "equal": not red,
        "arms": arms,
    }  # fmt: skip
    times = timing.summary([Sample(0.1, 0.02)] * 2)
    rows = [
        {"operation": "head gate", "shape": "1 x 6144 x 4096", "equal": True, "note": "bit-equal", "bytes": 10**8, "eager": times,
         "fused": times, "speed_up": 1.0, "gb_s": 1000.0, "copy_share": 0.77},
        {"operation": "QK-norm", "shape": "1 x 1 x 2048", "equal": None, "note": "q: 1 rows"},
    ]  # fmt: skip
    if red:
        rows.append({"operation": "QK-norm", "shape": "1 x 126/1024 x 2048", "equal": False, "note": "gave other bits"})
    kernel = {"section": "kernels", "dtype": "bfloat16", "copy_gb_s": 4270.0, "equal": not red, "rows": rows}
    return document.new("forward", {"repeats": 3}) | {"sections": [forwards, kernel]}


def canned_pipeline() -> dict:
    """A section of pipeline calls."""
    return {
        "section": "pipeline", "version": "2.3", "notes": [], "clip": "512x768x121", "video_tokens": 6144, "audio_tokens": 126,
        "text_tokens": 1024, "steps": 30, "passes": {"cfg": 2, "stg": 1, "isolated": 1}, "image_to_video": False, "layers": 48,
        "dtype": "bfloat16", "equal": True,
        "arms": {
            "eager": {"peak_bytes": 41 * 2**30, "seconds": 60.0, "speed_up": 1.0},
            "fast": {"peak_bytes": 40 * 2**30, "seconds": 33.0, "speed_up": 60 / 33, "prefixes_reused": 30,
                     "equal": {"video": True, "audio": True}, "max_abs_difference": {"video": 0.0, "audio": 0.0}},
            "high": {"peak_bytes": 40 * 2**30, "seconds": 30.0, "speed_up": 2.0, "prefixes_reused": 29,
                     "equal": {"video": False, "audio": True}, "max_abs_difference": {"video": 0.125, "audio": 0.0},
                     "psnr_db": {"video": 61.23, "audio": None}},
        },
    }  # fmt: skip


def test_pipeline_table():
    first, *rows = table.section_text(canned_pipeline()).splitlines()
    assert first.startswith("pipeline 512x768x121: LTX-2.3, 48 layers, bfloat16, text to video, 6144 video and 126 audio tokens")
    assert first.endswith("rows: cfg of 2, stg of 1, isolated of 1, 1024 text tokens, 30 steps")
    assert [" ".join(row.split()) for row in rows] == [
        "arm seconds speed-up s a step STG prefixes reused peak GiB max difference PSNR video/audio",
        "eager 60.00 1.00x 2.000 - 41.0 - -",
        "fast 33.00 1.82x 1.100 30 of 30 40.0 bit-equal -",
        "high 30.00 2.00x 1.000 29 of 30 40.0 0.12 61.2/equal dB",
    ]


def test_table():
    lines = table.section_text(canned()["sections"][0]).splitlines()
    assert lines[0].startswith("forward 704x1280x121: LTX-2.3, 48 layers, bfloat16, text to video, 14080 video")
    assert lines[1] == "48 of 48 layers"
    head, eager, compiled, fast, alone = lines[2:]
    assert head.split()[:3] == ["arm", "GPU", "ms"] and len({len(line) for line in (eager, compiled, fast, alone)}) <= 2
    assert eager.split()[:4] == ["eager", "1205.4", "1.00x", "1.388"]
    assert fast.split()[:6] == ["fast", "903.6", "1.33x", "1.041", "449.5", "7"] and fast.endswith("bit-equal")
    assert compiled.endswith("0.062") and alone.endswith("-")
    assert eager.index("1205.4") + len("1205.4") == fast.index("903.6") + len("903.6") == head.index("GPU ms") + len("GPU ms")

    lines = table.section_text(canned()["sections"][1]).splitlines()
    assert lines[0] == "kernels: bfloat16, L2 cold; a large copy moves 4270 GB/s"
    assert " ".join(lines[2].split()) == "head gate 1 x 6144 x 4096 equal 100.0 100.0 1.00x 1000 77 % 20 20"
    assert " ".join(lines[3].split()) == "QK-norm 1 x 1 x 2048 -"
    assert lines[4] == "QK-norm, 1 x 1 x 2048: not timed: q: 1 rows"

    red = canned(red=True)
    assert "903.6" not in table.section_text(red["sections"][0])
    assert "DIFFER" in table.section_text(red["sections"][1])


def test_document(tmp_path):
    path = tmp_path / "results.json"
    results = canned()
    document.save(results, path)
    document.save(results, path)
    assert json.loads(path.read_text()) == results
    assert '"raw_gpu_ms": [ 1205.4, 1205.4, 1205.4 ]' in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert results["schema"] == 1 and results["complete"] is False and results["options"] == {"repeats": 3}
    environment = results["environment"]
    assert torch.__version__.startswith(environment["torch"])  # which may go on: +cpu, +cu130
    assert environment["ltx2_fastpath"] == ltx2_fastpath.__version__
    assert environment.keys() >= {"gpu", "driver", "triton", "diffusers", "cuda-core", "commit", "gpu_power_limit_w"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot(tmp_path):
    for results in (canned(), canned(red=True)):
        plot.save(results, tmp_path / "results.png")
        assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    forwards, operations = plot.draw(canned()).axes
    assert [patch.get_height() for patch in forwards.patches if patch.get_height()] == [1205.4, 935.0, 903.6, 868.2]
    assert [patch.get_width() for patch in operations.patches] == [pytest.approx(77)]
    assert len(plot.draw(canned(red=True)).axes) == 1  # an unequal forward has no bars
    forwards, pipelines = plot.draw({**canned(), "sections": [canned()["sections"][0], canned_pipeline()]}).axes
    assert [patch.get_height() for patch in pipelines.patches if patch.get_height()] == [60.0, 33.0, 30.0]
    assert forwards.get_ylabel() == "GPU time (ms)" and pipelines.get_ylabel() == "seconds"
    assert [label.get_text() for label in pipelines.get_xticklabels()] == ["pipeline 512x768x121\n6144 video tokens, 30 steps"]
    unequal = canned() | {"sections": [canned_pipeline() | {"equal": False}]}
    with pytest.raises(ValueError, match="nothing was timed"):
        plot.draw(canned() | {"sections": []})
    with pytest.raises(ValueError, match="nothing was timed"):
        plot.draw(unequal)


def test_progress():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, expected in ((Terminal(), "\r\x1b[K    0 s  first\r\x1b[K    0 s  second\r\x1b[K"), (io.StringIO(), None)):
        progress = Progress(stream)
        progress("first")
        progress("second")
        progress.clear()
        assert stream.getvalue() == (expected or "    0 s  first\n    0 s  second\n")


# Clips and the command line


def test_clips():
    clip = Clip.parse("512x768x121")
    assert clip == (512, 768, 121) and str(clip) == "512x768x121"
    for text in ("512x768", "512x768x121x1", "axbxc", "510x768x121", "512x768x120", "0x768x121", "-32x768x121"):
        with pytest.raises(ValueError, match=text):
            Clip.parse(text)


def test_choices_of_the_command_line():
    assert set(cli.VERSIONS) == set(models.CONFIGS)
    assert cli.ARMS == forward.FORWARD_ARMS


@pytest.mark.parametrize("argv", [[], ["kernels"], ["forward", "--shape", "64x64x9"], ["step"], ["small"], ["pipeline"]])
def test_needs_a_gpu(argv, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(argv) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err == "error: the benchmark needs a CUDA device, and torch sees none\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["everything"], "invalid choice"),
        (["forward", "--shape", "512x768x120"], "frames 8n + 1"),
        (["forward", "--repeats", "0"], "must be at least 1"),
        (["kernels", "--layers", "4"], "unrecognized arguments"),
        (["forward", "--arms", "floor,fused"], "unknown 'fused', choose from eager,fast,compiled,fast + compile,floor"),
        (["pipeline", "--steps", "1"], "must be at least 2, got 1"),
        (["pipeline", "--repeats", "3"], "unrecognized arguments"),
        (["pipeline", "--image-to-video"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["kernels", "--plot", "x.png"])
    assert exit_.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(argv, sections): the command line on a pretended GPU that measures `sections`. -> (status, document)"""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "CudaMeter", FakeMeter)
    monkeypatch.setattr(document, "environment", lambda: {"gpu": "none"})

    def pretend(argv, sections):
        def measure(options, clips, results, meter, progress, save):
            for section in sections:
                if isinstance(section, BaseException):
                    raise section
                results["sections"].append(section)
                yield section

        monkeypatch.setattr(cli, "_sections", measure)
        path = tmp_path / "results.json"
        return cli.main([*argv, "--json", str(path)]), json.loads(path.read_text())

    return pretend


def test_run(run, capsys):
    sections = canned()["sections"]
    status, saved = run(["forward", "--shape", "512x768x9", "--repeats", "3"], sections)
    assert status == 0 and saved["complete"] and saved["sections"] == json.loads(json.dumps(sections))
    assert saved["command"] == "forward" and saved["options"]["shape"] == ["512x768x9"] and saved["options"]["repeats"] == 3
    assert "json" not in saved["options"]
    output = capsys.readouterr().out
    assert all(table.section_text(section) in output for section in sections)


def test_run_that_finds_a_difference(run):
    status, saved = run(["forward"], canned(red=True)["sections"])
    assert status == 1 and saved["complete"]


@pytest.mark.parametrize("end, expected", [(KeyboardInterrupt(), 130), (forward.Unusable("off"), 2), (OSError("disk full"), 2)])
def test_run_that_is_cut_short_keeps_what_was_finished(run, end, expected):
    status, saved = run(["forward"], [canned()["sections"][0], end])
    assert status == expected and not saved["complete"] and len(saved["sections"]) == 1


@pytest.mark.parametrize(
    "asked, arms",
    [
        ("floor", ("eager", "fast", "floor")),
        ("floor, fast + compile,eager", ("eager", "fast", "fast + compile", "floor")),
        ("eager,fast", ("eager", "fast")),
    ],
)
def test_arms_keep_their_order_and_the_first_two(asked, arms):
    assert cli.parser().parse_args(["forward", "--arms", asked]).arms == arms


def test_sections(monkeypatch, high):
    tiny = models.tiny_transformer("2.3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 141 * 2**30))
    monkeypatch.setattr(models, "build_transformer", lambda version, **options: tiny)
    calls = []
    monkeypatch.setattr(
        forward, "measure", lambda section, instances, *args, **options: calls.append((section["section"], *args[:3], options))
    )
    monkeypatch.setattr(pipeline, "warm_up", lambda arms, clip, *rest: calls.append(("warm-up", list(arms), clip, rest[0])))
    monkeypatch.setattr(
        pipeline, "measure", lambda section, arms, *args: calls.append((section["section"], list(arms), *args[:3]))
    )

    def sections_of(*argv):
        calls.clear()
        options, results = cli.parser().parse_args(argv), {"sections": []}
        clips = [Clip.parse(shape) for shape in getattr(options, "shape", None) or [cli.SHAPE]]
        yielded = list(cli._sections(options, clips, results, FakeMeter(), lambda text: None, lambda: None))
        assert yielded == results["sections"]
        return calls

    short, medium = sections_of("forward", "--shape", "512x768x121", "--shape", "704x1280x121", "--batch-size", "2")
    assert short[:4] == ("forward", (512, 768, 121), {"cfg": 2}, forward.FORWARD_ARMS) and medium[1] == (704, 1280, 121)
    assert short[4]["repeats"] == 10
    ((_, clip, passes, arms, options),) = sections_of("step", "--quick", "--image-to-video")
    assert clip == (512, 768, 121) and passes == {"cfg": 2, "stg": 1, "isolated": 1} and arms == ("eager", "fast", "floor")
    assert options["repeats"] == 2 and options["image_to_video"]
    ((_, _, passes, _, _),) = sections_of("step", "--modular")
    assert passes == {"positive": 1, "negative": 1, "stg": 1, "isolated": 1}
    ((_, clip, passes, arms, options),) = sections_of("small", "--repeats", "7")
    assert clip == (512, 768, 9) and arms == forward.SMALL_ARMS and options["repeats"] == 7
    assert not high

    ((_, _, _, arms, _),) = sections_of("forward", "--arms", "floor", "--high")
    assert arms == ("eager", "fast", "high", "floor") and len(high) == 1
    ((_, _, _, arms, _),) = sections_of("forward", "--arms", "compiled,floor", "--quick")
    assert arms == ("eager", "fast", "floor")

    ((_, _, _, arms, options),) = sections_of("step", "--high", "--given-latents")
    assert options["given_latents"]
    assert arms == ("eager", "fast", "high", "compiled", "floor")

    both, three = ["eager", "fast"], ["eager", "fast", "high"]
    medium, large = (512, 768, 121), (704, 1280, 121)
    assert sections_of("pipeline") == [("warm-up", both, medium, False), ("pipeline", both, medium, False, 30)]
    assert sections_of("pipeline", "--quick")[1:] == [("pipeline", both, medium, False, 4)]
    assert [section[3] for section in sections_of("pipeline", "--given-latents")] == [True, True]
    asked = "--high", "--shape", "512x768x121", "--shape", "704x1280x121", "--steps", "8", "--steps", "30"
    assert sections_of("pipeline", *asked) == [
        (name, three, clip, False, *steps)
        for clip in (medium, large)
        for name, *steps in (("warm-up",), ("pipeline", 8), ("pipeline", 30))
    ]


def test_pipeline_from_the_command_line(stand_ins, any_width, high, monkeypatch, tmp_path, capsys):
    gpu = types.SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (139 * 2**30, 141 * 2**30))
    pretended = types.SimpleNamespace(cuda=gpu, bfloat16=torch.bfloat16, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(cli, "torch", pretended)  # the fast path must go on seeing that there is no GPU
    monkeypatch.setattr(timing, "CudaMeter", Clock)
    monkeypatch.setattr(models, "build_transformer", lambda version, **options: models.tiny_transformer(version))
    path = tmp_path / "pipeline.json"
    argv = ["pipeline", "--high", "--shape", "64x96x9", "--steps", "2", "--steps", "3", "--json", str(path)]
    assert cli.main(argv) == 0
    saved = json.loads(path.read_text())
    assert saved["complete"] and saved["options"]["steps"] == [2, 3] and saved["options"]["high"] is True
    assert [section["steps"] for section in saved["sections"]] == [2, 3]
    assert all(list(section["arms"]) == ["eager", "fast", "high"] for section in saved["sections"])
    output = capsys.readouterr().out
    assert all(table.section_text(section) in output for section in saved["sections"])


@pytest.mark.parametrize(
    "name",
    ["fp8 casting", "group offload, leaves", "two LoRAs, rank 32", "torchao int8 weights", "bitsandbytes nf4", "GGUF Q8_0"],
)
def test_setups(stand_ins, any_width, monkeypatch, name):
    """Real hooks, adapters and quantisers, on a tiny model whose widths can be divided into blocks of codes."""
    wide = dict(
        num_attention_heads=2, attention_head_dim=32, audio_num_attention_heads=2, audio_attention_head_dim=32,
        cross_attention_dim=64, audio_cross_attention_dim=64,
    )  # fmt: skip
    tiny = models.tiny_transformer("2.3", dtype=torch.bfloat16, **wide)
    monkeypatch.setattr(models, "build_transformer", lambda version, **options: tiny)
    monkeypatch.setattr(setups, "_device", lambda: torch.device("cpu"))
    section = {"section": "setups", "version": "2.3", "notes": []}
    found = list(setups.run(section, name, TINY_CLIP, 2, FakeMeter(), repeats=1, progress=lambda text: None))
    if not found[0]["arms"]:
        pytest.skip(found[0]["notes"][0])
    assert [list(each["passes"]) for each in found] == [["cfg", "stg", "isolated"], ["cfg"]]
    for each in found:
        assert each["equal"] and list(each["arms"]) == ["eager", "fast"]
        sites = {site["site"]: site for site in each["fast_path"]["sites"]}
        assert sites["norm1"]["fast"] > 0 and sites["attn1.head_gate"]["fast"] > 0
        text = table.section_text(json.loads(json.dumps(each)))
        assert f"({name})" in text and "bit-equal" in text
    assert "not enabled" in str(ltx2_fastpath.report(tiny))


def test_a_setup_whose_package_is_missing_is_left_out_and_says_so(monkeypatch):
    monkeypatch.setitem(setups.SETUPS, "bitsandbytes nf4", setups.Setup(pytest.fail, "no_such_package"))
    section = {"section": "setups", "version": "2.3", "notes": []}
    (found,) = setups.run(section, "bitsandbytes nf4", TINY_CLIP, 2, FakeMeter(), repeats=1, progress=lambda text: None)
    assert table.section_text(found) == "setups (bitsandbytes nf4): left out: no_such_package is not installed"


def test_an_unknown_setup_is_named_with_the_known_ones():
    options = cli.parser().parse_args(["setups", "--setup", "fp8"])
    with pytest.raises(forward.Unusable, match="unknown setup 'fp8'; choose from 'bf16', 'fp8 casting'"):
        list(cli._sections(options, [TINY_CLIP], {"sections": []}, FakeMeter(), lambda text: None, lambda: None))
