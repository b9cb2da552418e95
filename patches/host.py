"""What we take for granted of the host, looked at when the fast path is enabled: known sources, and names that are private.

A release is recognised by what it computes, not by its number: each room lists, in its `host.py`, the hash of the source of
every method whose arithmetic it takes over. Private names of torch, diffusers and accelerate, which a release may rename without
a word, are all listed here.
"""

import functools
import hashlib
import importlib
import inspect
import types
from collections.abc import Callable

import torch

#: Private names that we read, as "module:attributes". Each is looked for before anything is patched.
PRIVATE = (
    "torch.nn.modules.module:_global_forward_hooks",
    "torch.nn.modules.module:_global_forward_pre_hooks",
    "torch.nn.modules.dropout:_DropoutNd",
    "torch.nn:Module._compiled_call_impl",
    "torch._C:_functorch.maybe_current_level",
    "torch:Tensor._version",
    "diffusers.models.attention_dispatch:_AttentionBackendRegistry.get_active_backend",
)
#: The same, of builds of torch with CUDA.
PRIVATE_OF_CUDA = ("torch._C:_cuda_getDevice", "torch._C:_cuda_getCurrentRawStream")
#: What a module has of its own from the start.
PRIVATE_OF_MODULES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


@functools.lru_cache(maxsize=256)
def source_hash(function) -> str | None:
    """First 16 hexadecimal digits of the sha256 of a function's source; None where the source cannot be read.

    A decorator of diffusers is looked through; of anybody else's wrapper the wrapper's own source is hashed, whatever it says it
    wraps.
    """
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__") and _is_hosts_own(function):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return None
    try:
        return hashlib.sha256(inspect.getsource(function.__code__).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def _is_hosts_own(function: types.FunctionType) -> bool:
    return function.__globals__.get("__name__", "").partition(".")[0] == "diffusers"


def unknown_sources(room) -> list[str]:
    """The methods of a room's model whose source is not one that we know; empty if the host is supported."""
    try:
        host = room.host()
        methods: dict[str, Callable] = host.methods()
    except (AttributeError, ImportError) as error:
        return [str(error)]
    return [name for name, function in methods.items() if source_hash(function) not in host.KNOWN[name]]


def missing_names() -> list[str]:
    """The private names that are not there in this process."""
    listed = PRIVATE + (PRIVATE_OF_CUDA if torch.cuda.is_available() else ())
    module = torch.nn.Module()
    missing = [name for name in listed if not _is_there(name)]
    missing += [f"torch.nn:Module().{name}" for name in PRIVATE_OF_MODULES if name not in vars(module)]
    return missing + _missing_slots()


def _is_there(name: str) -> bool:
    module, attributes = name.split(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def _missing_slots() -> list[str]:
    """Where hooks of accelerate and diffusers keep what they have wrapped (patch.py), as far as it is not as we know it."""
    import accelerate.hooks
    import diffusers.hooks

    hooked, registered = torch.nn.Identity(), torch.nn.Identity()
    accelerate.hooks.add_hook_to_module(hooked, accelerate.hooks.ModelHook())
    missing = [f"accelerate: Module().{name}" for name in ("_hf_hook", "_old_forward") if name not in vars(hooked)]
    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(registered)
    registry.register_hook(diffusers.hooks.ModelHook(), "a look")
    if vars(registered).get("_diffusers_hook") is not registry:
        return [*missing, "diffusers: Module()._diffusers_hook"]
    references = getattr(registry, "_fn_refs", None)
    if not references:
        return [*missing, "diffusers: HookRegistry()._fn_refs"]
    slots = ("forward", "original_forward")
    return missing + [f"diffusers: HookRegistry()._fn_refs[0].{name}" for name in slots if name not in vars(references[0])]
