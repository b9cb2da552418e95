"""Do we recognise the host by what it computes and by the private names that it has, and nothing else?"""

import functools
import importlib

import accelerate
import diffusers
import pytest
import torch
from diffusers.models import normalization
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches import ROOMS, host
from ltx2_fastpath.patches.transformer import host as transformer_host

import ltx2_fastpath
from ltx2_fastpath.testing import models

MODULES = (transformer_ltx2, normalization)
KNOWN = transformer_host.KNOWN
ROOM = ROOMS[0]


def place(name):
    """(owner, attribute) of a name in `KNOWN`, such as "RMSNorm.forward"."""
    owner, _, attribute = name.rpartition(".")
    if owner:
        return next(getattr(module, owner) for module in MODULES if hasattr(module, owner)), attribute
    return next(module for module in MODULES if hasattr(module, attribute)), attribute


def changed(self, hidden_states, *args, **kwargs):
    return hidden_states + 1


def without_source():
    """A function whose source cannot be read, as in a frozen application."""
    namespace = {}
    exec("def forward(self, hidden_states):\n    return hidden_states", namespace)
    return namespace["forward"]


def test_installed_diffusers_is_known():
    assert host.unknown_sources(ROOM) == [] and host.missing_names() == []
    assert transformer_host.methods().keys() == KNOWN.keys()
    assert {place(name)[1] for name in KNOWN} >= {"forward", "__call__", "get_mod_params", "apply_split_rotary_emb"}


@pytest.mark.parametrize("name", KNOWN)
def test_changed_source_is_not_known(monkeypatch, name):
    monkeypatch.setattr(*place(name), changed)
    assert host.unknown_sources(ROOM) == [name]


def test_every_changed_source_is_named(monkeypatch):
    for name in ("apply_split_rotary_emb", "LTX2Attention.forward"):
        monkeypatch.setattr(*place(name), changed)
    assert sorted(host.unknown_sources(ROOM)) == ["LTX2Attention.forward", "apply_split_rotary_emb"]


@pytest.mark.parametrize("name", ["RMSNorm.forward", "LTX2PerturbedAttnProcessor.__call__"])
def test_unreadable_source_is_not_known(monkeypatch, name):
    monkeypatch.setattr(*place(name), without_source())
    assert host.unknown_sources(ROOM) == [name]


def test_release_without_one_of_the_names_is_not_known(monkeypatch):
    monkeypatch.delattr(transformer_ltx2, "LTX2PerturbedAttnProcessor")
    (missing,) = host.unknown_sources(ROOM)
    assert "LTX2PerturbedAttnProcessor" in missing


def test_source_hash_depends_on_the_source_alone():
    def one(x):
        return x + 1

    first = one

    def one(x):
        return x + 1

    assert first is not one and host.source_hash(first) == host.source_hash(one)
    assert host.source_hash(one) != host.source_hash(changed)
    assert len(host.source_hash(one)) == 16 and int(host.source_hash(one), 16) > 0


@pytest.mark.parametrize("function", [without_source(), len, "not a function"])
def test_source_hash_is_none_where_the_source_cannot_be_read(function):
    assert host.source_hash(function) is None


class Gone:
    """A class attribute that is not there."""

    def __init__(self, name):
        self.name = name

    def __get__(self, instance, owner):
        raise AttributeError(self.name)


def without(monkeypatch, name):
    """Take away a name of `host.PRIVATE`, whether this build of torch has it or not."""
    module, _, attributes = name.partition(":")
    *path, last = attributes.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    if isinstance(owner, type):  # which may have it from a base that cannot be changed
        monkeypatch.setattr(owner, last, Gone(last))
    else:
        monkeypatch.delattr(owner, last, raising=name not in host.PRIVATE_OF_CUDA)


def without_in_modules(monkeypatch, name):
    """Modules that are made from now on have another name for it."""
    init = torch.nn.Module.__init__

    def renamed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        vars(self)[f"{name}_of_another_release"] = vars(self).pop(name)

    monkeypatch.setattr(torch.nn.Module, "__init__", renamed)


def without_slot_of_accelerate(monkeypatch, name):
    add = accelerate.hooks.add_hook_to_module

    def renamed(module, *args, **kwargs):
        module = add(module, *args, **kwargs)
        vars(module)[f"{name}_of_another_release"] = vars(module).pop(name)
        return module

    monkeypatch.setattr(accelerate.hooks, "add_hook_to_module", renamed)


def without_slot_of_diffusers(monkeypatch, name):
    """A slot of the module, of its registry, or of the registry's reference to a function."""
    register = diffusers.hooks.HookRegistry.register_hook

    def renamed(self, *args, **kwargs):
        register(self, *args, **kwargs)
        for holder in (vars(self._module_ref), vars(self), vars(self._fn_refs[0])):
            if name in holder and not (name == "forward" and holder is vars(self._module_ref)):
                holder[f"{name}_of_another_release"] = holder.pop(name)
                break
        else:
            raise AssertionError(name)

    monkeypatch.setattr(diffusers.hooks.HookRegistry, "register_hook", renamed)


RENAMED = dict.fromkeys(host.PRIVATE, without)
RENAMED |= dict.fromkeys(host.PRIVATE_OF_MODULES, without_in_modules)
RENAMED |= dict.fromkeys(("_hf_hook", "_old_forward"), without_slot_of_accelerate)
RENAMED |= dict.fromkeys(("_diffusers_hook", "_fn_refs", "forward", "original_forward"), without_slot_of_diffusers)


def forward(transformer):
    with torch.no_grad():
        return transformer(**models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", RENAMED)
def test_release_that_renames_a_private_name_stays_stock(stand_ins, any_width, monkeypatch, caplog, name):
    """Nothing is changed, nothing raises, and the reason has the name; with the name back the same model is fast."""
    transformer = models.tiny_transformer("2.3")
    stock = forward(transformer)
    before = {path: dict(vars(module)) for path, module in transformer.named_modules()}
    with monkeypatch.context() as patch:
        RENAMED[name](patch, name)
        handle = ltx2_fastpath.enable(transformer)
        status = str(ltx2_fastpath.report(transformer))
        ltx2_fastpath.disable(transformer)
    assert not handle.active and handle.reason in status
    assert handle.reason.startswith("private names that the fast path needs are not there (")
    listed = handle.reason.partition("(")[2].removesuffix(")").split(", ")
    assert any(each == name or each.endswith(f".{name}") for each in listed), handle.reason
    (record,) = [record for record in caplog.records if record.name == "ltx2_fastpath"]
    assert handle.reason in record.getMessage() and "\n" not in record.getMessage()
    assert {path: dict(vars(module)) for path, module in transformer.named_modules()} == before

    handle = ltx2_fastpath.enable(transformer)
    assert handle.active and host.missing_names() == []
    assert all(map(torch.equal, forward(transformer), stock)) and stand_ins.total() > 0


@pytest.mark.parametrize("name", host.PRIVATE_OF_CUDA)
def test_private_names_of_builds_with_cuda_are_looked_for_there_alone(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    without(monkeypatch, name)
    assert name in host.missing_names()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host.missing_names() == []


PRIVATE_NAMES_RENAMED = """
import torch, diffusers
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from ltx2_fastpath.testing import models
transformer = models.tiny_transformer("2.3")
del torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
del torch.nn.modules.dropout._DropoutNd, torch.nn.Module._compiled_call_impl, torch._C._functorch.maybe_current_level
del _AttentionBackendRegistry.get_active_backend
import sys
for name in [name for name in sys.modules if name.startswith("ltx2_fastpath")]:
    del sys.modules[name]
import ltx2_fastpath
handle = ltx2_fastpath.enable(transformer)
from ltx2_fastpath.patches.transformer import parts  # with all that stands in it
print(handle.active, handle.reason)
"""


def test_private_names_are_not_needed_to_import_the_package(run_python):
    said = run_python(PRIVATE_NAMES_RENAMED, TRITON_INTERPRET="1")
    assert said.startswith("False private names that the fast path needs are not there (")
    assert all(name in said for name in host.PRIVATE if name != "torch:Tensor._version")
