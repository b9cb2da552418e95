"""Weights that are not plain weights: adapters, packed and cast weights. Modules are called, never read."""

import itertools

import pytest
import setups
import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from setups import Together, fast_at

from ltx2_fastpath import disable, enable, report

pytestmark = pytest.mark.usefixtures("any_width")
STYLE, POSE = setups.lora(seed=1), setups.lora(seed=2, targets=("to_q", "net.0.proj", "net.2"))


def load(pipe, weights, name):
    pipe.load_lora_weights(dict(weights), adapter_name=name)


def set_adapters(pipe, *args):
    pipe.set_adapters(*args)


def fuse(pipe, **options):
    pipe.fuse_lora(**options)


def unfuse(pipe):
    pipe.unfuse_lora()


def unload(pipe):
    pipe.unload_lora_weights()


def disable_lora(pipe):
    pipe.disable_lora()


def enable_lora(pipe):
    pipe.enable_lora()


def delete(pipe, name):
    pipe.delete_adapters(name)


@pytest.mark.parametrize("first", ["enable", "load"])
def test_lora_from_loading_to_unloading(stand_ins, first):
    both = Together(stand_ins)
    seen = {"plain": setups.step(both.ours.transformer)}

    def check(name):
        both.check()
        seen[name] = setups.step(both.ours.transformer)

    if first == "enable":
        enable(both.ours)
    both.do(load, STYLE, "style")
    enable(both.ours)
    check("style")
    both.do(load, POSE, "pose")
    both.do(set_adapters, ["style", "pose"], [0.5, 2.0])
    check("style and pose")
    both.do(set_adapters, ["pose"])
    check("pose")
    both.do(disable_lora)
    check("off")
    both.do(enable_lora)
    both.do(delete, "pose")
    both.do(set_adapters, ["style"])
    both.do(fuse, lora_scale=0.7)
    check("fused")
    both.do(unfuse)
    check("unfused")
    both.do(unload)
    check("unloaded")
    assert report(both.ours).stock_calls == {} and report(both.ours).skipped == {}
    assert setups.equal(seen["off"], seen["plain"])
    torch.testing.assert_close(seen["unfused"], seen["fused"])
    torch.testing.assert_close(seen["unloaded"], seen["plain"])
    different = [seen[name] for name in ("plain", "style", "style and pose", "pose", "fused")]
    assert not any(setups.equal(a, b) for a, b in itertools.combinations(different, 2))
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_lora_scale_of_one_call(stand_ins):
    both = Together(stand_ins)
    both.do(load, STYLE, "style")
    enable(both.ours)
    kwargs = [dict(attention_kwargs={"scale": scale}) for scale in (0.0, 0.5, 1.0)]
    outputs = []
    for options in kwargs * 2:
        inputs = setups.models.inputs(both.stock.transformer, **setups.SMALL) | options
        both.check(lambda pipe, inputs=inputs: setups.run(pipe.transformer, **inputs))
        outputs.append(setups.run(both.ours.transformer, **inputs))
    assert not setups.equal(outputs[0], outputs[1]) and setups.equal(outputs[0], outputs[3])


ADAPTERS = {
    "LoRA on to_q": LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False),
    "LoRA on everything": LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    "LoRA on the gates": LoraConfig(r=2, target_modules=["to_gate_logits"], init_lora_weights=False),
    "LoRA on the feed-forwards": LoraConfig(r=2, target_modules=["net.0.proj", "net.2"], init_lora_weights=False),
    "DoRA": LoraConfig(r=2, target_modules=["to_q", "to_out.0"], use_dora=True, init_lora_weights=False),
    "LoHa": LoHaConfig(r=2, target_modules=["to_q", "to_v"], init_weights=False),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter(stand_ins, adapter):
    both = Together(stand_ins)
    plain = setups.step(both.stock.transformer)
    for pipe in (both.stock, both.ours):
        torch.manual_seed(0)
        pipe.transformer.add_adapter(ADAPTERS[adapter])
    enable(both.ours)
    for _ in range(2):
        assert both.check()["qk_norm_split_rope"] == 12
    assert not setups.equal(setups.step(both.ours.transformer), plain)
    disable(both.ours)
    both.check_restored()


@pytest.mark.parametrize("norm", ["norm_q", "norm_k"])
@pytest.mark.parametrize("first", ["enable", "adapter"])
def test_lora_that_replaces_a_norm(stand_ins, norm, first):
    """`modules_to_save` wraps the norm in another module, with weights of its own."""
    both = Together(stand_ins)
    if first == "enable":
        enable(both.ours)
        both.check()
    for pipe in (both.stock, both.ours):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["to_q"], modules_to_save=[norm], init_lora_weights=False)
        pipe.transformer.add_adapter(config)
        for name, parameter in pipe.transformer.named_parameters():
            if "modules_to_save" in name:
                parameter.data.mul_(3)
    enable(both.ours)
    for _ in range(2):
        assert both.check()["qk_norm_split_rope"] == 8  # the norms are called, RoPE is fused in the attentions that have it
    assert fast_at(both.ours, "attn1.split_rope") > 0
    both.do("disable_adapters")
    both.check()
    disable(both.ours)
    both.check_restored()


class CountsCalls(torch.nn.Module):
    """A projection whose weight is no matrix of floats, or must not be read outside its forward."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.unpacked().to(x.dtype), self.bias)


class PackedBytes(CountsCalls):
    """Like bitsandbytes' and GGUF's layers: ``weight`` is a flat uint8 parameter with a scale beside it."""

    def __init__(self, linear):
        super().__init__(linear)
        self.scale = linear.weight.abs().max() / 127
        packed = (linear.weight / self.scale).round().to(torch.int8).view(torch.uint8)
        self.weight = torch.nn.Parameter(packed.flatten()[:, None], requires_grad=False)

    def unpacked(self):
        return self.weight.view(torch.int8).view(self.out_features, self.in_features).float() * self.scale


class Float8(CountsCalls):
    """Like fp8 checkpoints: a float8 weight with a scale."""

    def __init__(self, linear):
        super().__init__(linear)
        self.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def unpacked(self):
        return self.weight.float() * 1.5


class QuantisedTensor(torch.Tensor):
    """Like torchao's tensors: it looks like a float matrix, and its data are not where a pointer would say."""

    @staticmethod
    def __new__(cls, matrix):
        return torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype, device=matrix.device)

    def __init__(self, matrix):
        self.step = matrix.abs().max() / 127
        self.codes = (matrix / self.step).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return value.codes.float() * value.step if isinstance(value, cls) else value

        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        return function(*(plain(value) for value in args), **{name: plain(value) for name, value in (kwargs or {}).items()})


def quantised(linear):
    linear.weight = torch.nn.Parameter(QuantisedTensor(linear.weight.data), requires_grad=False)
    return linear


PROJECTIONS = ("to_q", "to_k", "to_v", "to_gate_logits", "to_out.0", "net.0.proj", "net.2")


@pytest.mark.parametrize("first", ["enable", "quantise"])
@pytest.mark.parametrize("quantise", [PackedBytes, Float8, quantised])
def test_quantised_projections_are_called(stand_ins, quantise, first):
    both = Together(stand_ins)
    plain = setups.step(both.stock.transformer)
    if first == "enable":
        enable(both.ours)
    for pipe in (both.stock, both.ours):
        for name, linear in list(pipe.transformer.transformer_blocks.named_modules()):
            if name.endswith(PROJECTIONS):
                pipe.transformer.transformer_blocks.set_submodule(name, quantise(linear))
    enable(both.ours)
    for _ in range(2):
        launched = both.check()
    assert launched["qk_norm_split_rope"] == 12 and launched["head_gate"] == 12
    assert not setups.equal(setups.step(both.stock.transformer), plain)
    if quantise is not quantised:
        layers = [[m for m in pipe.transformer.modules() if isinstance(m, CountsCalls)] for pipe in (both.stock, both.ours)]
        assert len(layers[0]) == 2 * (6 * 5 + 2 * 2)
        setups.step(both.ours.transformer)  # one more, as the stock side had one to compare with `plain`
        assert [layer.calls for layer in layers[0]] == [layer.calls for layer in layers[1]]
    disable(both.ours)
    both.check(fast=False)


@pytest.mark.parametrize("first", ["enable", "cast"])
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_layerwise_casting(stand_ins, storage, first):
    both = Together(stand_ins)
    plain = setups.step(both.stock.transformer)
    if first == "enable":
        enable(both.ours)
    both.do("enable_layerwise_casting", storage_dtype=storage, compute_dtype=torch.float32)
    enable(both.ours)
    for _ in range(3):
        assert both.check()["qk_norm_split_rope"] == 12
    assert both.ours.transformer.transformer_blocks[0].attn1.to_q.weight.dtype == storage
    assert not setups.equal(setups.step(both.ours.transformer), plain)
    disable(both.ours)
    both.check(fast=False)
    both.check_restored()


def test_layerwise_casting_of_everything(stand_ins):
    """Norms and tables too: what is read at the wrong time is in the storage dtype."""
    both = Together(stand_ins)

    def cast(pipe):
        pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32, skip_modules_pattern=())

    enable(both.ours)
    both.do(cast)
    for _ in range(2):
        both.check()
    disable(both.ours)
    both.check_restored()


def test_adapters_on_quantised_projections(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    for pipe in (both.stock, both.ours):
        for name, linear in list(pipe.transformer.transformer_blocks.named_modules()):
            if name.endswith("to_q"):
                quantised(linear)
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    both.check()
    assert all(isinstance(block.attn1.to_k, BaseTunerLayer) for block in both.ours.transformer.transformer_blocks)


def test_weights_loaded_into_an_enabled_transformer(stand_ins):
    both = Together(stand_ins)
    enable(both.ours)
    both.check()
    other = setups.tiny("2.3", seed=5).state_dict()
    both.do("load_state_dict", other)
    both.check()
    both.do("load_state_dict", {name: weight * 2 for name, weight in other.items()}, assign=True)
    both.check()
    both.do("to", torch.float64)
    both.check(fast=False)  # not a dtype that kernels take
    both.do("to", torch.float16)
    both.check()
