"""The hooks that offloading and casting put around forwards: which of them only bring a module's weights.

Such a hook sees every call, but what it does depends on nothing in it. So calls may be left out (a block that is skipped), and
what was seen of a forward holds for the next. What any other hook makes of the calls that it sees, nobody knows.
"""

from diffusers.hooks import group_offloading, layerwise_casting

from ..host import source_hash

# As in host.py: first 16 digits of sha256 over the source. This GroupOffloadingHook fetches what the layer before it should have
# fetched, but did not because it was not called.
_KNOWN = {
    layerwise_casting.LayerwiseCastingHook: {"pre_forward": "55516d4273dbcbca", "post_forward": "41dd6415ebfa8a62"},
    layerwise_casting.PeftInputAutocastDisableHook: {"new_forward": "657746cb0bc52c29"},
    group_offloading.GroupOffloadingHook: {"pre_forward": "a1661f9f998ee1a6", "post_forward": "36e77bc23e077033"},
}


def hooks_of(module) -> list:
    """What accelerate and diffusers have put around the forward of `module`."""
    at = vars(module)
    found = [at["_hf_hook"]] if "_hf_hook" in at else []
    return found + list(at["_diffusers_hook"].hooks.values()) if "_diffusers_hook" in at else found


def why_watching(module) -> str | None:
    """Which hook of `module` may see or change its calls; None where all only bring its weights."""
    plain = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    watching = [getattr(hook, "__qualname__", type(hook).__name__) for hook in plain]
    watching += [type(hook).__name__ for hook in hooks_of(module) if not _only_brings(type(hook))]
    return f"a hook, {watching[0]}, watches a {type(module).__name__}" if watching else None


def managing(module) -> str | None:
    """Which hook of `module` may bring its weights on a CUDA stream of its choice; None where all cast them in the call's."""
    kinds = [type(hook) for hook in hooks_of(module)]
    casting = layerwise_casting.LayerwiseCastingHook, layerwise_casting.PeftInputAutocastDisableHook
    return next((kind.__name__ for kind in kinds if kind not in casting or not _only_brings(kind)), None)


def give_back(block) -> None:
    """Free what was fetched for the first layer of `block`: its call would do so, but the block is skipped."""
    for hook in hooks_of(block):
        fetched = getattr(hook, "next_group", None)
        if fetched is not None and any(module is fetched.offload_leader for module in block.modules() if module is not block):
            fetched.offload_()


def _only_brings(kind: type) -> bool:
    known = _KNOWN.get(kind)
    return known is not None and all(source_hash(vars(kind).get(name)) == value for name, value in known.items())
