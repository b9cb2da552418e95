"""A transformer's modules and tensors, listed once, so that a look at all of them in every forward costs 3 ms instead of 9."""

import weakref


class Survey:
    """What a forward depends on besides its arguments, and who watches it."""

    def __init__(self, transformer):
        self._transformer = weakref.ref(transformer)
        self._children, self._tensors, self._stateful = [], [], []
        for module in transformer.modules():
            if module._modules:
                self._children.append((module._modules, list(module._modules.items())))
            for store in (module._parameters, module._buffers):
                self._tensors += [(store, name, tensor) for name, tensor in store.items() if tensor is not None]
            if "processor" in vars(module):
                self._stateful.append((module, _processor_state))
            elif hasattr(module, "scaling"):
                self._stateful.append((module, _adapter_state))
        self._block_modules = list(transformer.transformer_blocks.modules())

    def holds(self, transformer) -> bool:
        """Whether these are still the modules and the tensors of `transformer`."""
        return (
            self._transformer() is transformer
            and all(len(store) == len(items) and all(store.get(k) is v for k, v in items) for store, items in self._children)
            and all(store.get(name) is tensor for store, name, tensor in self._tensors)
        )

    def is_hooked(self) -> bool:
        """Whether hooks of torch, diffusers or accelerate are on the blocks or on anything in them."""
        return any(
            module._forward_hooks or module._forward_pre_hooks or "_diffusers_hook" in vars(module) or "_hf_hook" in vars(module)
            for module in self._block_modules
        )

    def state(self) -> list:
        """Equal for two forwards only if both compute with the same weights, adapters, processors and backends."""
        weights = [(t.data_ptr(), None if t.is_inference() else t._version) for _, _, t in self._tensors]
        return weights + [read(module) for module, read in self._stateful]


def _processor_state(attention):
    processor = attention.processor
    return id(processor), getattr(processor, "_attention_backend", None)


def _adapter_state(layer):
    active = tuple(getattr(layer, "active_adapters", ()))
    return tuple(sorted(layer.scaling.items())), active, getattr(layer, "disable_adapters", None), bool(layer.merged)
