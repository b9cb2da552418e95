"""Attention processors and backends that users choose, and modules that cannot be patched, hooked or read."""

import logging

import pytest
import setups
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from diffusers.models.transformers import transformer_ltx2
from setups import Together, fast_at
from torch.nn.modules import module as torch_module

from ltx2_fastpath import disable, enable, report

pytestmark = pytest.mark.usefixtures("any_width", "backend_of_the_process")
NAMES = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


@pytest.fixture
def backend_of_the_process():
    with setups.attention_backend_of_its_own():
        yield


@pytest.fixture
def backend_calls(monkeypatch):
    """{backend: calls}, counted where diffusers dispatches."""
    calls = {}

    def count(name, backend):
        def counted(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return backend(*args, **kwargs)

        return counted

    backends = _AttentionBackendRegistry._backends
    monkeypatch.setattr(
        _AttentionBackendRegistry, "_backends", {name: count(name.value, backend) for name, backend in backends.items()}
    )
    return calls


@pytest.mark.parametrize("first", ["enable", "backend"])
def test_backend_is_honoured(stand_ins, backend_calls, first):
    both = Together(stand_ins)
    if first == "enable":
        enable(both.ours)
        both.check()
    both.do("set_attention_backend", "_native_math")
    enable(both.ours)
    backend_calls.clear()
    assert both.check()["qk_norm_split_rope"] == 12
    assert backend_calls == {"_native_math": 2 * 12}  # theirs and ours
    both.do("reset_attention_backend")
    with attention_backend("native"):
        backend_calls.clear()
        both.check()
        assert backend_calls == {"native": 2 * 12}
    both.do("set_attention_backend", "native")
    disable(both.ours)
    backend_calls.clear()
    both.check(fast=False)
    assert backend_calls == {"native": 2 * 12}
    both.check_restored()
    assert both.ours.transformer.transformer_blocks[0].attn1.processor._attention_backend is AttentionBackendName.NATIVE


def test_backend_that_cannot_run_fails_with_the_same_error(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    errors = []
    for pipe in (both.stock, both.ours):
        with pytest.raises(Exception) as caught:
            pipe.transformer.set_attention_backend("_native_cudnn")
            setups.step(pipe.transformer)
        errors.append((caught.type, str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]


class Doubling(transformer_ltx2.LTX2PerturbedAttnProcessor):
    """A processor of the user's own."""

    calls = 0

    def __call__(self, attn, hidden_states, *args, **kwargs):
        type(self).calls += 1
        return 2 * super().__call__(attn, hidden_states, *args, **kwargs)


class Narrow:
    """One that knows no perturbations, which the host then drops with a warning."""

    _attention_backend = _parallel_config = None

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb, key_rotary_emb):
        values = attn.to_v(hidden_states if encoder_hidden_states is None else encoder_hidden_states)
        return attn.to_out[0](values.mean(1, keepdim=True)).expand_as(hidden_states)


@pytest.mark.parametrize("processor", [Doubling, Narrow])
@pytest.mark.parametrize("first", ["enable", "processor"])
def test_foreign_processor_is_called_and_the_rest_stays_fast(stand_ins, processor, first):
    both = Together(stand_ins)
    plain = setups.step(both.stock.transformer)
    if first == "enable":
        enable(both.ours)
        both.check()
    both.do("set_attn_processor", processor())
    Doubling.calls = 0
    handle = enable(both.ours)
    handle.stock_calls.clear()
    launched = both.check()
    assert not setups.equal(setups.step(both.ours.transformer), plain)
    assert launched["qk_norm_split_rope"] == launched["head_gate"] == 0 and launched["gated_residual"] == 16
    assert Doubling.calls in (0, 3 * 12)
    assert set(report(both.ours).stock_calls) == {(name, f"the processor is {processor.__name__}") for name in NAMES}

    disable(both.ours)
    both.check(fast=False)
    both.check_restored()
    assert type(both.ours.transformer.transformer_blocks[0].attn1.processor) is processor  # left alone


def test_foreign_processor_in_one_attention(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    both.do(lambda pipe: pipe.transformer.transformer_blocks[1].audio_attn1.set_processor(Doubling()))
    for _ in range(2):
        launched = both.check()
    assert launched["qk_norm_split_rope"] == launched["head_gate"] == 11


def test_hosts_other_processor(stand_ins):
    """A 2.0 processor in a 2.3 model does not know perturbations; the host drops them with a warning."""
    both = Together(stand_ins)
    enable(both.ours)
    both.do("set_attn_processor", transformer_ltx2.LTX2AudioVideoAttnProcessor())
    for guidance in ("cfg", "stg"):
        both.check(guidance=guidance)


def test_default_processors_are_set_again(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    both.do("set_attn_processor", Doubling())
    both.do("set_attn_processor", transformer_ltx2.LTX2PerturbedAttnProcessor())
    assert both.check()["qk_norm_split_rope"] == 12


class TestPartly:
    """Where one piece is out of reach, the rest is fast and the report names the piece."""

    @pytest.mark.parametrize("norm", ["norm_q", "norm_k"])
    def test_hooked_norm_is_called_and_rope_stays_fused(self, stand_ins, norm):
        both = Together(stand_ins)
        called = []

        def hook(pipe):
            module = getattr(pipe.transformer.transformer_blocks[0].attn1, norm)
            module.register_forward_hook(lambda module, args, output: called.append(pipe) or output * 2)

        both.do(hook)
        enable(both.ours)
        for _ in range(3):
            launched = both.check()
        assert called.count(both.ours) == called.count(both.stock) == 3
        # The hooked attention fuses RoPE, its like in the other block everything.
        assert launched["qk_norm_split_rope"] == 12
        assert fast_at(both.ours, "attn1.split_rope") == 2 and fast_at(both.ours, "attn1.qk_norm_split_rope") == 2
        report_text = str(report(both.ours))
        assert "attn1.split_rope" in report_text

    def test_norm_on_meta_is_called_and_rope_stays_fused(self, stand_ins):
        both = Together(stand_ins)

        def offload(pipe):
            from accelerate import cpu_offload

            cpu_offload(pipe.transformer.transformer_blocks[0].attn1.norm_q, "cpu")

        both.do(offload)
        enable(both.ours)
        for _ in range(2):
            launched = both.check()
        assert both.ours.transformer.transformer_blocks[0].attn1.norm_q.weight.is_meta
        assert launched["qk_norm_split_rope"] == 12 and fast_at(both.ours, "attn1.split_rope") == 1

    @pytest.mark.parametrize("norm", ["norm1", "audio_norm2", "audio_to_video_norm", "norm3"])
    def test_hooked_block_norm_is_called(self, stand_ins, norm):
        both = Together(stand_ins)

        def hook(pipe):
            module = getattr(pipe.transformer.transformer_blocks[0], norm)
            module.register_forward_hook(lambda module, args, output: output * 2)

        plain = setups.step(both.stock.transformer)
        both.do(hook)
        enable(both.ours)
        for _ in range(2):
            both.check()
        assert not setups.equal(setups.step(both.ours.transformer), plain)

    @pytest.mark.parametrize("kind", ["forward", "pre-forward"])
    def test_hook_on_all_modules_of_the_process(self, stand_ins, kind):
        """Profilers and counters set them; the norms, which the fast path reads instead of calling, have them too."""
        both = Together(stand_ins)
        enable(both.ours)
        both.check()
        plain, seen = setups.step(both.stock.transformer), []

        def double(module, args, output=None):
            if type(module) is torch.nn.RMSNorm:
                seen.append(module)
                return output * 2 if kind == "forward" else (args[0] + 1,)

        register = torch_module.register_module_forward_hook
        if kind == "pre-forward":
            register = torch_module.register_module_forward_pre_hook
        hook = register(double)
        try:
            both.check(fast=False)
            assert len(seen) == 2 * 2 * 12 and not setups.equal(setups.step(both.ours.transformer), plain)
        finally:
            hook.remove()
        both.check()

    @pytest.mark.parametrize("piece", ["transformer_blocks.0", "transformer_blocks.1.attn2", "time_embed", "rope"])
    def test_module_that_cannot_be_patched_leaves_the_others_fast(self, stand_ins, caplog, piece):
        both = Together(stand_ins)

        def replace(pipe):
            module = pipe.transformer.get_submodule(piece)
            forward = module.forward
            module.forward = lambda *args, **kwargs: forward(*args, **kwargs)

        both.do(replace)
        with caplog.at_level(logging.WARNING, logger="ltx2_fastpath"):
            handle = enable(both.ours)
        assert handle.active
        skipped = report(both.ours).skipped
        assert skipped == {piece: "its forward was replaced by something else"} and piece in str(report(both.ours))
        assert piece in report(both.ours)._repr_html_()
        (warning,) = [record.getMessage() for record in caplog.records]
        assert piece in warning and "leaves 1 modules alone" in warning
        for _ in range(2):
            for guidance in ("cfg", "stg", "isolated"):
                launched = both.check(guidance=guidance)
        assert launched["gated_residual"] > 0
        disable(both.ours)
        both.check(fast=False)
        both.check_restored()

    def test_block_of_another_class_is_left_alone(self, stand_ins):
        class Block(transformer_ltx2.LTX2VideoTransformerBlock):
            def forward(self, *args, **kwargs):
                video, audio = super().forward(*args, **kwargs)
                return video * 2, audio

        both = Together(stand_ins)

        def swap(pipe):
            pipe.transformer.transformer_blocks[0].__class__ = Block

        both.do(swap)
        enable(both.ours)
        for _ in range(2):
            launched = both.check()
        assert launched["ada_values"] == 1 and launched["qk_norm_split_rope"] == 12

    def test_no_block_can_be_patched(self, stand_ins, caplog):
        both = Together(stand_ins)

        def wrap(pipe):
            for module in pipe.transformer.modules():
                forward = module.forward
                module.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)

        both.do(wrap)
        handle = enable(both.ours)
        assert not handle.active and "could be patched" in str(report(both.ours))
        both.check(fast=False)
        disable(both.ours)
        both.check_restored()

    def test_block_swapped_after_enable_gets_what_the_host_would_give_it(self, stand_ins):
        """Long image-to-video inputs and guidance passes: what blocks of ours are handed, a block of the host does not know."""
        both = Together(stand_ins)
        enable(both.ours)
        both.do(lambda pipe: pipe.transformer.transformer_blocks.__setitem__(1, setups.tiny("2.3", seed=3).transformer_blocks[1]))
        size = dict(height=512, width=512, num_frames=25)
        for _ in range(3):
            for guidance, batch_size in (("cfg", 2), ("stg", 1), ("isolated", 1)):
                both.check(guidance=guidance, batch_size=batch_size)
            both.check(**size, image_to_video=True)

    def test_hook_on_a_block_sees_what_the_host_would_show_it(self, stand_ins):
        """A user's hook on a block reads its arguments as tensors."""
        both = Together(stand_ins)
        shapes = {"stock": [], "ours": []}
        size = dict(height=512, width=512, num_frames=25)
        for name, pipe in (("stock", both.stock), ("ours", both.ours)):

            def look(module, args, kwargs, name=name):
                tensors = [kwargs[key] for key in ("hidden_states", "temb", "temb_audio", "temb_ca_scale_shift")]
                tensors += [*kwargs["video_rotary_emb"], *kwargs["ca_audio_rotary_emb"]]
                shapes[name].append([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])

            pipe.transformer.transformer_blocks[1].register_forward_pre_hook(look, with_kwargs=True)
        enable(both.ours)
        for _ in range(2):
            both.check(**size, image_to_video=True)
        assert shapes["stock"] == shapes["ours"] and len(shapes["stock"]) == 2
