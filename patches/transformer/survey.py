"""A module's modules and tensors, listed once, so that a look at all of them in every forward costs 3 ms instead of 9."""

import weakref
from typing import NamedTuple

import torch
from diffusers.models import attention_dispatch

from ..patch import is_foreign
from . import hooks
from .host import transformer_ltx2


class State(NamedTuple):
    """What a forward depends on besides its arguments: `settings`, by which kernels are chosen, and which `weights` there are."""

    settings: list
    weights: list


class Survey:
    """Tells the state that a forward computes with, and who watches it."""

    def __init__(self, module):
        self._of = weakref.ref(module)
        self._children, self._tensors, self._stateful = [], [], []
        self._modules = [child for child in module.modules() if child is not module]
        for each in (module, *self._modules):
            if each._modules:
                self._children.append((each._modules, list(each._modules.items())))
            for store in (each._parameters, each._buffers):
                self._tensors += [(store, name, tensor) for name, tensor in store.items() if tensor is not None]
            if "processor" in vars(each):
                self._stateful.append((each, _processor_state))
            elif hasattr(each, "scaling"):
                self._stateful.append((each, _adapter_state))
        self._has_inference = any(tensor.is_inference() for _, _, tensor in self._tensors)
        # Of a tensor that wraps others (torchao's, DTensor) neither address nor version tells anything.
        self._wrapped = [tensor for _, _, tensor in self._tensors if hasattr(tensor, "__tensor_flatten__")]

    def holds(self, module) -> bool:
        """Whether these are still the modules and the tensors of `module`."""
        return (
            self._of() is module
            and all(len(store) == len(items) and all(store.get(k) is v for k, v in items) for store, items in self._children)
            and all(store.get(name) is tensor for store, name, tensor in self._tensors)
        )

    def why_watched(self) -> str | None:
        """What in the transformer may see every call; hooks on itself are around all that a forward does, and no matter."""
        return why_watched(self._modules)

    def why_unforeseen(self) -> str | None:
        """Why two forwards may compute differently though their `state` is the same; None if they cannot."""
        if self._has_inference:
            return "the weights are inference tensors, whose changes cannot be seen"
        plain = transformer_ltx2.LTX2AudioVideoAttnProcessor, transformer_ltx2.LTX2PerturbedAttnProcessor
        if any(read is _processor_state and type(module.processor) not in plain for module, read in self._stateful):
            return "the attention's processors are not diffusers' own, and may have a state"
        return None

    def moves(self) -> bool:
        """Whether hooks put the weights elsewhere in memory in each forward: their versions are all that can be compared."""
        return any("_diffusers_hook" in vars(module) for module in (self._of(), *self._modules))

    def state(self) -> State:
        """Equal for two forwards only if both compute with the same weights, adapters, processors and backends."""
        settings = [switches(), *(read(module) for module, read in self._stateful)]
        if self.moves():
            return State(settings, [tensor._version for _, _, tensor in self._tensors])
        weights = [_place(tensor) for _, _, tensor in self._tensors]
        weights += [_place(tensor) for wrapper in self._wrapped for tensor in _inner(wrapper)]
        return State(settings, weights)


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _inner(wrapper) -> list[torch.Tensor]:
    """The plain tensors that a wrapper holds, wrappers in it included."""
    inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
    return [plain for tensor in inner for plain in (_inner(tensor) if hasattr(tensor, "__tensor_flatten__") else [tensor])]


def why_watched(modules) -> str | None:
    """What in `modules` may see every call, or make each another; None if nothing does."""
    for module in modules:
        at = vars(module)
        hooked = module._forward_hooks or module._forward_pre_hooks or "_diffusers_hook" in at or "_hf_hook" in at
        if hooked and (reason := hooks.why_watching(module)):
            return reason
        if "forward" in at and is_foreign(module):
            return "a module's forward was replaced by something else"
        if module.training and at.get("p") and isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return "a dropout is in training mode"
    return None


def switches() -> tuple:
    """torch's and diffusers' switches that choose kernels."""
    cuda = torch.backends.cuda
    return (
        attention_dispatch._AttentionBackendRegistry.get_active_backend()[0],
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def _processor_state(attention):
    processor = attention.processor
    return id(processor), getattr(processor, "_attention_backend", None)


def _adapter_state(layer):
    active = tuple(getattr(layer, "active_adapters", ()))
    return tuple(sorted(layer.scaling.items())), active, getattr(layer, "disable_adapters", None), bool(layer.merged)
