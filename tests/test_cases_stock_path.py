"""Where kernels must not run, or fail: the host's path, the host's results, and the report says why."""

import contextlib
import types

import conftest
import pytest
import setups
import torch
from ltx2_fastpath.patches import handle as handle_module
from ltx2_fastpath.patches.transformer import parts as transformer_parts
from setups import Together, outcome

from ltx2_fastpath import disable, enable, report
from ltx2_fastpath.ops import support
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("any_width")


REFUSALS = {name: op.refusal for name, op in conftest.ops().items()}
OPS = sorted(name for name, op in conftest.ops().items() if op in transformer_parts._ops().values())  # the transformer's


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ltx2_fastpath"]


def reasons(pipe) -> set[str]:
    return {reason for _, reason in report(pipe).stock_calls}


TABLES = (
    "scale_shift_table",
    "audio_scale_shift_table",
    "prompt_scale_shift_table",
    "audio_prompt_scale_shift_table",
    "video_a2v_cross_attn_scale_shift_table",
    "audio_a2v_cross_attn_scale_shift_table",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", TABLES)
def test_table_of_another_dtype_than_the_model(stand_ins, table, dtype):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", dtype=dtype)))
    for pipe in (both.stock, both.ours):
        for block in pipe.transformer.transformer_blocks:
            getattr(block, table).data = getattr(block, table).data.float()
    enable(both.ours)
    inputs = models.inputs(both.stock.transformer, **setups.SMALL, dtype=dtype)
    for _ in range(2):
        expected, found = (outcome(lambda pipe=pipe: setups.run(pipe.transformer, **inputs)) for pipe in (both.stock, both.ours))
        assert type(expected[0]) is type(found[0])
        assert expected == found if isinstance(expected[0], type) else setups.equal(expected, found)
    assert stand_ins.total() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_model_of_another_dtype_than_its_tables(stand_ins, dtype):
    """All tables in fp32, as checkpoints with `_keep_in_fp32_modules` have them, under every dtype of the rest."""
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", dtype=dtype)))
    for pipe in (both.stock, both.ours):
        for block in pipe.transformer.transformer_blocks:
            for table in TABLES:
                getattr(block, table).data = getattr(block, table).data.float()
    enable(both.ours)
    inputs = models.inputs(both.stock.transformer, **setups.SMALL, dtype=dtype)
    expected, found = (outcome(lambda pipe=pipe: setups.run(pipe.transformer, **inputs)) for pipe in (both.stock, both.ours))
    assert expected == found if isinstance(expected[0], type) else setups.equal(expected, found)


def test_autocast_takes_the_stock_path(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    plain = setups.step(both.ours.transformer)

    def autocast(pipe):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return setups.step(pipe.transformer)

    both.check(autocast, fast=False)
    assert not setups.equal(autocast(both.ours), plain)
    assert reasons(both.ours) == {"autocast is active"}
    both.check()


def gradients(transformer, **options):
    """The gradients of every parameter, after a forward and a backward with gradients."""
    transformer.requires_grad_(True)
    transformer.zero_grad()
    inputs = models.inputs(transformer, **setups.SMALL | options)
    with transformer.cache_context("cond_uncond"):
        video, audio = transformer(**inputs)
    (video.square().mean() + audio.square().mean()).backward()
    return [video.detach(), audio.detach(), *(parameter.grad for parameter in transformer.parameters())]


@pytest.mark.parametrize("version", models.CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_takes_the_stock_path_and_gets_the_hosts_gradients(stand_ins, version, checkpointing):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version)))
    enable(both.ours)
    both.do("train")
    if checkpointing:
        both.do("enable_gradient_checkpointing")

    def train(pipe):
        found = gradients(pipe.transformer, image_to_video=True)
        return [gradient for gradient in found if gradient is not None]  # none for the keyframe embedding

    both.check(train, fast=False)
    assert reasons(both.ours) == {"gradients are enabled"}
    assert len(train(both.ours)) > 100
    both.do("eval")
    both.check()  # and without gradients, the fast one


def test_gradients_enabled_for_frozen_weights(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    both.check(lambda pipe: pipe.transformer(**models.inputs(pipe.transformer, **setups.SMALL)), fast=False)
    assert reasons(both.ours) == {"gradients are enabled"}


def test_inference_mode_is_fast(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)

    def infer(pipe):
        with torch.inference_mode():
            return setups.step(pipe.transformer)

    for _ in range(3):
        both.check(infer)
    both.check()
    assert reasons(both.ours) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("version", models.CONFIGS)
def test_every_dtype_that_verifies_is_fast(stand_ins, version, dtype):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version, dtype=dtype)))
    enable(both.ours)
    for guidance in ("cfg", "stg", "isolated"):
        for _ in range(2):
            both.check(guidance=guidance)
    assert report(both.ours).stock_calls == {}
    notes = {
        note for row in report(both.ours).rows if not row["site"].endswith((".tables", ".distinct")) for note in row["notes"]
    }
    assert notes and all("bit-equal" in note for note in notes)


def test_dtype_that_kernels_do_not_take(stand_ins):
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny("2.3", dtype=torch.float64)))
    enable(both.ours)
    both.check(fast=False)
    assert reasons(both.ours) >= {"the hidden states are torch.float64"}


def test_widths_that_kernels_do_not_take(stand_ins, monkeypatch):
    """Sixteen channels are no multiple of a warp's: the norms refuse, compute the eager chain and say so."""
    for name, op in conftest.ops().items():
        monkeypatch.setattr(op, "refusal", REFUSALS[name])
    both = Together(stand_ins)
    enable(both.ours)
    for _ in range(2):
        launched = both.check()
    assert launched["rms_norm_modulate"] == launched["qk_norm_split_rope"] == 0 and launched["ada_values"] == 2
    rows = {row["site"]: row for row in report(both.ours).rows}
    for site in ("norm1", "norm2", "attn1.qk_norm_split_rope"):
        assert "not a multiple of" in "".join(rows[site]["notes"]) and rows[site]["fast"] == 0


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu", "meta"])
def test_device_that_kernels_do_not_run_on_is_named(monkeypatch, device):
    handle_module._why_not_device.cache_clear()
    monkeypatch.setattr(support, "DEVICE_TYPES", ("cuda",))
    assert handle_module._why_not_device(torch.device(device), torch.bfloat16) == f"the hidden states are on {device}"
    assert handle_module._why_not_device(torch.device(device, 0), torch.bfloat16) == f"the hidden states are on {device}"
    handle_module._why_not_device.cache_clear()


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_are_launched_on_the_tensors_device(monkeypatch, current):
    """The part of it that needs no second GPU (tests/gpu/test_two_devices.py): the device is made current, if it is not."""
    entered = []

    @contextlib.contextmanager
    def make_current(device):
        entered.append(device)
        yield

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    device = torch.device("cuda:1")
    with support.on_device(types.SimpleNamespace(is_cuda=True, device=device, get_device=lambda: 1)):
        assert entered == ([] if current == 1 else [device])
    with support.on_device(torch.ones(1)):
        assert len(entered) == 1 - current


def test_model_on_another_device_than_the_kernels(stand_ins):
    transformer = setups.tiny()
    enable(transformer)
    inputs = models.inputs(transformer, **setups.SMALL)
    inputs = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    transformer.to("meta")
    video, audio = setups.run(transformer, **inputs)
    assert video.is_meta and video.shape == inputs["hidden_states"].shape and audio.is_meta
    assert stand_ins.total() == 0 and reasons(transformer) == {"the hidden states are on meta"}


def test_process_without_a_gpu(monkeypatch, stand_ins, caplog):
    """As on a laptop: nothing is changed, with one line that says why."""
    monkeypatch.setattr(support, "DEVICE_TYPES", ("cuda",))
    both = Together(stand_ins, models.tiny_pipeline)
    handle = enable(both.ours)
    assert not handle.active and handle.reason == "no CUDA device is available"
    assert len(warnings_in(caplog)) == 1 and "no CUDA device" in str(report(both.ours))
    both.check(setups.generate, fast=False)
    both.check_restored()
    disable(both.ours)
    both.check_restored()


def fails_from(op, monkeypatch, call, error):
    """The launches of `op` raise from the `call`-th forward on; forwards are counted by the test through the returned list."""
    forwards = []
    launch = op.launch

    def failing(*args):
        if len(forwards) >= call:
            raise error
        return launch(*args)

    monkeypatch.setattr(op, "launch", failing)
    return forwards


@pytest.mark.parametrize("op", OPS)
def test_launch_that_raises_in_step_three_of_eight(stand_ins, monkeypatch, caplog, op):
    both = Together(stand_ins)
    forwards = fails_from(conftest.ops()[op], monkeypatch, 3, RuntimeError("an illegal instruction was encountered"))
    enable(both.ours)
    launched = []
    for _ in range(8):
        forwards.append(None)
        launched.append(both.check()[op])
    assert launched[0] == launched[1] > 0 and launched[2:] == [0] * 6  # not tried again
    (warning,) = warnings_in(caplog)
    assert "illegal instruction" in warning and "results are not affected" in warning
    assert "illegal instruction" in str(report(both.ours))
    assert stand_ins.total() > 0
    disable(both.ours)
    both.check_restored()


def flip_one_bit(result):
    """The result with the lowest bit of one element of one tensor flipped."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(torch.utils._pytree.tree_leaves(result))
    tensor = tensors[-1]
    flipped = tensor.clone()
    flipped.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return torch.utils._pytree.tree_map(lambda leaf: flipped if leaf is tensor else leaf, result)


@pytest.mark.parametrize("op", OPS)
def test_kernel_with_one_wrong_bit_never_reaches_an_output(stand_ins, monkeypatch, caplog, op):
    both = Together(stand_ins)
    module = conftest.ops()[op]
    monkeypatch.setattr(module, "launch", lambda candidate, *args, launch=module.launch: flip_one_bit(launch(candidate, *args)))
    enable(both.ours)
    both.check()
    assert both.check()[op] == 0  # convicted at first sight
    (warning,) = warnings_in(caplog)
    assert "other bits than the eager chain" in warning


def test_wrong_bit_would_show(stand_ins, monkeypatch):
    """The test above is sensitive: the same bit, flipped after the verdict, does reach the output."""
    module = conftest.ops()["gated_residual"]
    both = Together(stand_ins)
    enable(both.ours)
    both.check()
    monkeypatch.setattr(module, "launch", lambda candidate, *args, launch=module.launch: flip_one_bit(launch(candidate, *args)))
    assert not setups.equal(setups.step(both.stock.transformer), setups.step(both.ours.transformer))


@pytest.mark.parametrize(
    "error",
    [
        OSError(30, "Read-only file system", "/home/user/.triton/cache/{}"),
        PermissionError(13, "Permission denied", "/home/user/.triton/cache/{}"),
        NotADirectoryError(20, "Not a directory", "/dev/null/.triton/cache/{}"),
        OSError(28, "No space left on device", "/home/user/.triton/cache/{}"),
        OSError(122, "Disk quota exceeded", "/home/user/.triton/cache/{}"),
    ],
    ids=lambda error: error.strerror,
)
def test_unwritable_kernel_cache_is_told_once_with_what_to_set(stand_ins, monkeypatch, caplog, error):
    """Triton names a folder for each kernel, so every op fails with a message of its own."""
    for name, op in conftest.ops().items():

        def failing(*args, name=name):
            raise type(error)(error.errno, error.strerror, error.filename.format(name))

        monkeypatch.setattr(op, "launch", failing)
    both = Together(stand_ins)
    enable(both.ours)
    for _ in range(2):
        both.check(fast=False)
    (warning,) = warnings_in(caplog)
    assert "TRITON_CACHE_DIR" in warning and error.strerror in warning
    assert sum(error.strerror in line for line in str(report(both.ours)).splitlines()) > 20  # every site says why


def test_kernel_cache_below_a_file_really_raises_what_is_recognised(tmp_path, monkeypatch):
    """What Triton itself raises where its cache cannot be made."""
    from triton.runtime.cache import FileCacheManager

    from ltx2_fastpath.first_sight import advice, told

    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError) as caught:
        FileCacheManager("kernel")
    assert "TRITON_CACHE_DIR" in advice(told(caught.value))
