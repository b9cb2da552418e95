"""Patch: is the innermost forward replaced and put back, wherever hooks keep it? And what of copies and files?"""

import copy
import types

import accelerate
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.hooks import HookRegistry, ModelHook
from ltx2_fastpath.patches.patch import Patch

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter
SMALL = dict(height=64, width=96, num_frames=9, text_tokens=16)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append("stock")
        return x + 1


def replacement(self, x):
    self.calls.append("ours")
    return x + 1


replacement.__name__ = "forward"


def called(layer) -> list[str]:
    """What ran, in order, when the layer was called."""
    layer.calls.clear()
    assert layer(1) == 2
    return list(layer.calls)


class AccelerateHook(accelerate.hooks.ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        module.calls.append("accelerate")
        return args, kwargs


class WrappingHook(ModelHook):
    """A hook of diffusers that looks on, as offloading's does."""

    def pre_forward(self, module, *args, **kwargs):
        module.calls.append("wrapping")
        return args, kwargs


class ReplacingHook(ModelHook):
    """A hook of diffusers that calls the forward itself, as the caches' do."""

    def new_forward(self, module, *args, **kwargs):
        module.calls.append("replacing")
        return self.fn_ref.original_forward(*args, **kwargs)


def add(kind, layer):
    if kind == "accelerate":
        accelerate.hooks.add_hook_to_module(layer, AccelerateHook())
    else:
        hook = {"wrapping": WrappingHook, "replacing": ReplacingHook}[kind]()
        HookRegistry.check_if_exists_or_initialize(layer).register_hook(hook, kind)


def remove(kind, layer):
    if kind == "accelerate":
        accelerate.hooks.remove_hook_from_module(layer)
    else:
        layer._diffusers_hook.remove_hook(kind)


KINDS = ("accelerate", "wrapping", "replacing")
# Hooks before the patch, hooks after it, in the order in which they are added.
ORDERS = [
    *[((), ())],
    *[((kind,), ()) for kind in KINDS],
    *[((), (kind,)) for kind in KINDS],
    *[((one,), (other,)) for one in KINDS for other in KINDS if one != other],
    *[((one, other), ()) for one in KINDS for other in KINDS if one != other],
    *[((), (one, other)) for one in KINDS for other in KINDS if one != other],
]


@pytest.mark.parametrize("before, after", ORDERS)
def test_replacement_runs_innermost_in_every_order_and_undo_ends_it(before, after):
    layer = Layer()
    for kind in before:
        add(kind, layer)
    outside_in = [*reversed(before), "stock"]
    assert called(layer) == outside_in

    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    assert called(layer) == [*outside_in[:-1], "ours"]
    for kind in after:
        add(kind, layer)
    outside_in = [*reversed(before + after), "stock"]
    assert called(layer) == [*outside_in[:-1], "ours"]

    patch.undo()
    assert called(layer) == outside_in
    patch.undo()
    assert called(layer) == outside_in

    for kind in reversed(before + after):
        remove(kind, layer)
    assert called(layer) == ["stock"]


@pytest.mark.parametrize("before, after", [order for order in ORDERS if any(order)])
def test_hooks_removed_in_between(before, after):
    layer = Layer()
    for kind in before:
        add(kind, layer)
    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    for kind in after:
        add(kind, layer)
    for kind in reversed(before + after):
        remove(kind, layer)
    assert called(layer) == ["ours"]
    patch.undo()
    assert called(layer) == ["stock"]


@pytest.mark.parametrize("before, after", ORDERS)
def test_patched_again_after_undo(before, after):
    layer = Layer()
    for kind in before:
        add(kind, layer)
    first = Patch(layer, Layer.forward, replacement)
    first.apply()
    for kind in after:
        add(kind, layer)
    first.undo()
    second = Patch(layer, Layer.forward, replacement)
    second.apply()
    assert called(layer) == [*reversed(before + after), "ours"]
    second.undo()
    assert called(layer) == [*reversed(before + after), "stock"]


def namespaces(layer) -> list[dict]:
    """What the layer and the references of its hooks hold. Bound methods are equal if they call the same on the same."""
    references = getattr(vars(layer).get("_diffusers_hook"), "_fn_refs", ())
    return [dict(vars(holder)) for holder in (layer, *references)]


@pytest.mark.parametrize("before", [before for before, after in ORDERS if not after])
def test_undo_restores_the_namespace(before):
    layer = Layer()
    for kind in before:
        add(kind, layer)
    held = namespaces(layer)
    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    assert namespaces(layer) != held
    patch.undo()
    assert namespaces(layer) == held


def test_undo_leaves_the_bound_method_that_a_removed_hook_left():
    layer = Layer()
    add("accelerate", layer)
    remove("accelerate", layer)
    held = namespaces(layer)
    assert "forward" in vars(layer)
    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    assert called(layer) == ["ours"]
    patch.undo()
    assert namespaces(layer) == held


@pytest.mark.parametrize("kind", ["accelerate", "wrapping"])
def test_undo_reaches_what_hooks_only_remember(kind):
    """A hook's wrapper tells `inspect` what it wraps; nothing calls it, but it would keep the handle and be pickled."""
    layer = Layer()
    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    add(kind, layer)
    assert layer.forward.__wrapped__.__func__ is replacement
    patch.undo()
    assert layer.forward.__wrapped__.__func__ is Layer.forward


@pytest.mark.parametrize(
    "foreign",
    [
        lambda layer: lambda x: x + 1,
        lambda layer: types.MethodType(lambda self, x: x + 1, layer),
        lambda layer: Layer().forward,  # the stock forward, but of another layer
    ],
)
def test_foreign_forward_is_left_alone(foreign):
    layer = Layer()
    layer.forward = foreign(layer)
    held = dict(vars(layer))
    patch = Patch(layer, Layer.forward, replacement)
    with pytest.raises(LookupError, match="replaced by something else"):
        patch.apply()
    assert vars(layer) == held
    patch.undo()
    assert vars(layer) == held


def test_forward_set_over_ours_survives_undo():
    layer = Layer()
    patch = Patch(layer, Layer.forward, replacement)
    patch.apply()
    ours = layer.forward
    layer.forward = foreign = lambda x: ours(x)
    assert called(layer) == ["ours"]
    patch.undo()
    assert layer.forward is foreign


def test_other_instances_and_the_class_are_untouched():
    layer, other = Layer(), Layer()
    Patch(layer, Layer.forward, replacement).apply()
    assert called(layer) == ["ours"] and called(other) == ["stock"] and called(Layer()) == ["stock"]


def forward(transformer, **options):
    with torch.no_grad():
        return transformer(**models.inputs(transformer, **SMALL | options))


def equal(a, b) -> bool:
    return all(map(torch.equal, a, b))


def insides(transformer) -> dict:
    return {name: dict(vars(module)) for name, module in transformer.named_modules()}


def test_enable_and_disable_restore_every_module_exactly(stand_ins, any_width, transformer):
    before = insides(transformer)
    ltx2_fastpath.enable(transformer)
    changed = {name for name, held in insides(transformer).items() if held.keys() != before[name].keys()}
    assert {"transformer_blocks.0", "transformer_blocks.1", "transformer_blocks.1.attn1"} <= changed
    for guidance in ("cfg", "stg"):
        forward(transformer, guidance=guidance)
    ltx2_fastpath.disable(transformer)
    after = insides(transformer)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name].keys() == before[name].keys()
        assert all(after[name][key] is before[name][key] for key in before[name])


def test_patched_forwards_keep_the_stock_signature(transformer):
    import inspect

    modules = [transformer.transformer_blocks[0], transformer.transformer_blocks[0].attn1, transformer]
    before = [inspect.signature(module.forward) for module in modules]
    ltx2_fastpath.enable(transformer)
    assert [inspect.signature(module.forward) for module in modules] == before
    assert {module.forward.__name__ for module in modules} == {"forward"}


def test_deepcopy_computes_with_its_own_weights(stand_ins, any_width, transformer):
    handle = ltx2_fastpath.enable(transformer)
    original = forward(transformer)
    twin = copy.deepcopy(transformer)
    assert equal(forward(twin), original)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    changed = forward(twin)
    assert not equal(changed, original) and equal(forward(transformer), original)

    stock = models.tiny_transformer(transformer_version(transformer))
    stock.load_state_dict(twin.state_dict())
    assert equal(forward(stock), changed)

    # The two switch independently of each other.
    ltx2_fastpath.disable(transformer)
    assert equal(forward(twin), changed) and not handle.active
    other = ltx2_fastpath.enable(twin)
    assert other is not handle and other.active and not other.skipped
    for _ in range(2):
        assert equal(forward(twin), changed)
    assert other.sites["norm1"].fast > 0
    ltx2_fastpath.disable(twin)
    launched = stand_ins.total()
    assert equal(forward(twin), changed) and stand_ins.total() == launched
    assert equal(forward(transformer), original)


def test_deepcopy_of_hooked_blocks(stand_ins, any_width):
    """Under accelerate's hooks. A copy under diffusers' own runs the original's forward, with or without us."""
    transformer = models.tiny_transformer("2.3")
    expected = forward(transformer)
    for block in transformer.transformer_blocks:
        block.calls = []
        add("accelerate", block)
    ltx2_fastpath.enable(transformer)
    twin = copy.deepcopy(transformer)
    ltx2_fastpath.disable(transformer)
    handle = ltx2_fastpath.enable(twin)
    assert handle.active and not handle.skipped
    for _ in range(2):
        assert equal(forward(twin), expected)
    assert handle.sites["norm1"].fast > 0 and not handle.stock_calls
    ltx2_fastpath.disable(twin)
    assert equal(forward(twin), expected)
    assert [block.calls for block in twin.transformer_blocks] == [["accelerate"] * 3] * 2
    assert [block.calls for block in transformer.transformer_blocks] == [[], []]


def test_block_shared_by_two_transformers_belongs_to_the_first(stand_ins, any_width):
    first, second = models.tiny_transformer("2.3"), models.tiny_transformer("2.3", seed=1)
    second.transformer_blocks[1] = first.transformer_blocks[1]
    expected = forward(first), forward(second)
    handle, other = ltx2_fastpath.enable(first), ltx2_fastpath.enable(second)
    assert not handle.skipped and "transformer_blocks.1" in other.skipped and "transformer_blocks.0" not in other.skipped
    for _ in range(2):
        assert equal(forward(first), expected[0]) and equal(forward(second), expected[1])
    ltx2_fastpath.disable(second)
    assert equal(forward(second), expected[1]) and equal(forward(first), expected[0])
    assert handle.active and handle.sites["norm1"].fast > 2
    ltx2_fastpath.disable(first)
    launched = stand_ins.total()
    assert equal(forward(first), expected[0]) and equal(forward(second), expected[1]) and stand_ins.total() == launched


def transformer_version(transformer) -> str:
    if not transformer.config.gated_attn:
        return "2.0"
    return "2.3" if transformer.config.ff_bias else "2.5"


def test_deepcopy_outlives_the_original(stand_ins, any_width, version):
    transformer = models.tiny_transformer(version)
    expected = forward(transformer)
    ltx2_fastpath.enable(transformer)
    forward(transformer)
    twin = copy.deepcopy(transformer)
    del transformer
    for guidance in ("cfg", "stg", "isolated"):
        forward(twin, guidance=guidance, image_to_video=True)
    assert equal(forward(twin), expected)
    ltx2_fastpath.disable(twin)
    assert equal(forward(twin), expected)


LOAD = """
import sys
import torch
sys.modules["ltx2_fastpath"] = None  # as where the package is not installed
from diffusers import LTX2VideoTransformer3DModel
{load}
try:
    import ltx2_fastpath
except ImportError:
    pass
else:
    raise AssertionError("the package was importable")
for module in transformer.modules():
    forward = vars(module).get("forward")
    assert forward is None or forward.__func__ is type(module).forward, forward
inputs, expected = torch.load("inputs.pt", weights_only=False)
torch.set_num_threads(1)
with torch.no_grad():
    outputs = transformer.eval()(**inputs)
# Not to the bit: CPUs choose kernels by where weights lie in memory, and loaded ones lie elsewhere.
print(all(torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5) for mine, theirs in zip(outputs, expected)))
"""


@pytest.mark.parametrize("how", ["torch.save", "save_pretrained"])
def test_saved_while_enabled_it_loads_as_a_stock_model_without_us(stand_ins, any_width, run_python, tmp_path, how):
    transformer = models.tiny_transformer("2.3")
    inputs = models.inputs(transformer, **SMALL)
    with torch.no_grad():
        expected = transformer(**inputs)
    ltx2_fastpath.enable(transformer)
    forward(transformer)
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    if how == "torch.save":
        torch.save(transformer, tmp_path / "model.pt")
        load = 'transformer = torch.load("model.pt", weights_only=False)'
    else:
        transformer.save_pretrained(tmp_path / "model")
        load = 'transformer = LTX2VideoTransformer3DModel.from_pretrained("model")'
    assert run_python(LOAD.format(load=load)).strip() == "True"


def test_loaded_model_can_be_enabled(stand_ins, any_width, tmp_path):
    transformer = models.tiny_transformer("2.3")
    ltx2_fastpath.enable(transformer)
    torch.save(transformer, tmp_path / "model.pt")
    transformer.save_pretrained(tmp_path / "model")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (loaded, LTX2VideoTransformer3DModel.from_pretrained(tmp_path / "model")):
        assert "not enabled" in str(ltx2_fastpath.report(other))
        expected = forward(other)  # CPUs choose kernels by where weights lie in memory, and loaded ones lie elsewhere
        handle = ltx2_fastpath.enable(other)
        assert handle.active and not handle.skipped
        for _ in range(2):
            assert equal(forward(other), expected)
        assert handle.sites["norm1"].fast > 0
        ltx2_fastpath.disable(other)
        assert equal(forward(other), expected)


def test_state_dict_and_parameters_do_not_change(transformer):
    before = {name: id(tensor) for name, tensor in transformer.named_parameters()}
    keys, modules = list(transformer.state_dict()), [name for name, _ in transformer.named_modules()]
    ltx2_fastpath.enable(transformer)
    assert {name: id(tensor) for name, tensor in transformer.named_parameters()} == before
    assert list(transformer.state_dict()) == keys and [name for name, _ in transformer.named_modules()] == modules
