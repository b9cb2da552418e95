"""Do we recognise the host by what it computes, and nothing else?"""

import pytest
from diffusers.models import activations, normalization
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches import host

MODULES = (transformer_ltx2, normalization, activations)


def place(name):
    """(owner, attribute) of a name in `host.KNOWN`, such as "RMSNorm.forward"."""
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
    assert host.unknown_sources() == []
    assert {place(name)[1] for name in host.KNOWN} >= {"forward", "__call__", "get_mod_params", "apply_split_rotary_emb"}


@pytest.mark.parametrize("name", host.KNOWN)
def test_changed_source_is_not_known(monkeypatch, name):
    monkeypatch.setattr(*place(name), changed)
    assert host.unknown_sources() == [name]


def test_every_changed_source_is_named(monkeypatch):
    for name in ("apply_split_rotary_emb", "LTX2Attention.forward"):
        monkeypatch.setattr(*place(name), changed)
    assert sorted(host.unknown_sources()) == ["LTX2Attention.forward", "apply_split_rotary_emb"]


@pytest.mark.parametrize("name", ["RMSNorm.forward", "LTX2PerturbedAttnProcessor.__call__"])
def test_unreadable_source_is_not_known(monkeypatch, name):
    monkeypatch.setattr(*place(name), without_source())
    assert host.unknown_sources() == [name]


def test_release_without_one_of_the_names_is_not_known(monkeypatch):
    monkeypatch.delattr(transformer_ltx2, "LTX2PerturbedAttnProcessor")
    (missing,) = host.unknown_sources()
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
