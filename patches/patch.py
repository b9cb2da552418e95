"""Patch: one replaced forward of one module, and where the host keeps forwards.

accelerate and diffusers both wrap ``module.forward`` in hooks and keep the forward that they wrapped: accelerate in
``module._old_forward``, diffusers' HookRegistry in the function references of ``module._diffusers_hook``. Putting a new
``module.forward`` over such a wrapper would bypass the hook, or be lost when it is removed. So a patch replaces the innermost
forward, wherever it is kept, and `undo` looks for the replacement wherever hooks have moved it since.
"""

import functools
import types
import weakref

# Functions that stand in for a forward, and the modules in which they were put. A deep copy of a patched module runs the same
# functions, and nothing here knows it.
_replacements: weakref.WeakSet = weakref.WeakSet()
_owners: weakref.WeakSet = weakref.WeakSet()
#: Where the functions come from that hooks put in a forward's place.
_WRAPPERS = ("accelerate.hooks", "diffusers.hooks.hooks", "diffusers.hooks.layerwise_casting")


def _slots(module, method="forward"):
    """Every (namespace, key) in which a forward of `module`, or another method, which no hook wraps, is kept now."""
    namespaces = [(vars(module), method)]
    if method == "forward":
        namespaces.append((vars(module), "_old_forward"))
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
            wrapper = vars(wrapper)["__wrapped__"]


def _is_bound(value, function, module) -> bool:
    return isinstance(value, types.MethodType) and value.__func__ is function and value.__self__ is module


def is_foreign(module) -> bool:
    """Whether a forward that `module` keeps is none of these: its class's, a replacement, a wrapper of the hooks."""
    return any(_is_foreign(namespace[key], module) for namespace, key in _slots(module) if namespace[key] is not None)


def _is_foreign(forward, module) -> bool:
    if isinstance(forward, functools.partial) and getattr(forward.func, "__module__", None) in _WRAPPERS:
        return False
    function = getattr(forward, "__func__", None)
    known = function is type(module).forward or function in _replacements
    return not (known and _is_bound(forward, function, module))


def strip(module) -> None:
    """Take out the replacements that a deep copy brought along from the module it was made of."""
    if module in _owners:
        return
    others = {function.__name__ for function in _replacements} - {"forward"}
    slots = [slot for method in ("forward", *others) for slot in _slots(module, method)]
    for namespace, key in (*slots, *_memories(module)):
        if not isinstance(namespace[key], types.MethodType) or namespace[key].__func__ not in _replacements:
            continue
        if namespace is vars(module) and key != "_old_forward":
            del namespace[key]
        else:
            namespace[key] = types.MethodType(type(module).forward, module)


class Patch:
    """Replace `stock`, a method of `owner`'s class, by the function `replacement` for this one instance.

    A patch does not keep `owner`, nor a method bound to it: whoever holds the patches must not hold the model with them.
    """

    def __init__(self, owner: object, stock: types.FunctionType, replacement: types.FunctionType):
        self._owner = weakref.ref(owner)
        self.stock = stock
        self.replacement = replacement
        self._was_held = False

    @property
    def owner(self):
        """The module whose forward is replaced; None if it is gone."""
        return self._owner()

    def apply(self) -> None:
        """Raises LookupError if something that is neither stock nor a known hook has replaced the forward."""
        owner = self._owner()
        slots = _slots(owner, self.stock.__name__)
        held = [(namespace, key) for namespace, key in slots if _is_bound(namespace[key], self.stock, owner)]
        if held:
            namespace, key = held[-1]
            self._was_held = True
        elif not slots:
            namespace, key = vars(owner), self.stock.__name__
        else:
            raise LookupError(f"its {self.stock.__name__} was replaced by something else")
        namespace[key] = types.MethodType(self.replacement, owner)
        _replacements.add(self.replacement)
        _owners.add(owner)

    def is_called(self, module) -> bool:
        """Whether a call of `module` is a call of the replacement, with nothing around it or in its place."""
        return _is_bound(vars(module).get("forward"), self.replacement, module)

    def is_in_place(self) -> bool:
        """Whether a call of the owner reaches the replacement, be it through the wrappers of hooks."""
        owner = self._owner()
        return owner is not None and any(_is_bound(namespace[key], self.replacement, owner) for namespace, key in _slots(owner))

    def undo(self) -> None:
        """Put back what was there; a no-op where the replacement, or its owner, is no longer in place."""
        owner = self._owner()
        if owner is None:
            return
        _owners.discard(owner)
        for namespace, key in (*_slots(owner, self.stock.__name__), *_memories(owner)):
            if not _is_bound(namespace[key], self.replacement, owner):
                continue
            if namespace is vars(owner) and key != "_old_forward" and not self._was_held:
                del namespace[key]
            else:
                namespace[key] = types.MethodType(self.stock, owner)
