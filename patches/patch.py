"""Patch: one replaced forward of one module, and where the host keeps forwards.

accelerate and diffusers both wrap ``module.forward`` in hooks and keep the forward that they wrapped: accelerate in
``module._old_forward``, diffusers' HookRegistry in the function references of ``module._diffusers_hook``. Putting a new
``module.forward`` over such a wrapper would bypass the hook, or be lost when it is removed. So a patch replaces the innermost
forward, wherever it is kept, and `undo` looks for the replacement wherever hooks have moved it since.
"""

import functools
import types
from dataclasses import dataclass, field

MISSING = object()


def _slots(module):
    """Every (namespace, key) in which a forward of `module` is kept now."""
    namespaces = [(vars(module), "forward"), (vars(module), "_old_forward")]
    registry = vars(module).get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        namespaces += [(vars(reference), "forward"), (vars(reference), "original_forward")]
    return [(namespace, key) for namespace, key in namespaces if key in namespace]


def _memories(module):
    """Every (namespace, key) in which the hooks' wrappers remember what they wrapped; nothing that they call."""
    for namespace, key in _slots(module):
        wrapper = namespace[key]
        while isinstance(wrapper, functools.partial) and "__wrapped__" in vars(wrapper):
            yield vars(wrapper), "__wrapped__"
            wrapper = wrapper.__wrapped__


def _is_bound(value, function, module) -> bool:
    return isinstance(value, types.MethodType) and value.__func__ is function and value.__self__ is module


@dataclass
class Patch:
    """Replace `stock`, the forward of `owner`'s class, by the function `replacement` for this one instance.

    Raises:
        LookupError: from `apply`, if something that is neither stock nor a known hook has replaced the forward.
    """

    owner: object
    stock: types.FunctionType
    replacement: types.FunctionType
    original: object = field(default=MISSING, init=False)

    def apply(self) -> None:
        held = [(namespace, key) for namespace, key in _slots(self.owner) if _is_bound(namespace[key], self.stock, self.owner)]
        if held:
            namespace, key = held[-1]
            self.original = namespace[key]
        elif not _slots(self.owner):
            namespace, key = vars(self.owner), "forward"
        else:
            raise LookupError("its forward was replaced by something else")
        namespace[key] = types.MethodType(self.replacement, self.owner)

    def undo(self) -> None:
        """Put back what was there; a no-op where the replacement is no longer in place."""
        for namespace, key in (*_slots(self.owner), *_memories(self.owner)):
            if not _is_bound(namespace[key], self.replacement, self.owner):
                continue
            if self.original is MISSING and namespace is vars(self.owner) and key == "forward":
                del namespace[key]
            elif self.original is MISSING:
                namespace[key] = types.MethodType(self.stock, self.owner)
            else:
                namespace[key] = self.original
