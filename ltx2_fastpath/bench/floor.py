"""The floor: the matrix products and attentions of a stock forward, alone, in the same order and on inputs of the same layout.

A fast path that leaves them all to cuBLAS and cuDNN cannot be faster than this, measured in the same run.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_ltx2


class Floor:
    """The recorded calls; calling it runs them all. Each result is freed as soon as it is there, which costs nothing."""

    def __init__(self):
        self.calls: list[Callable[[], torch.Tensor]] = []
        self._stand_ins = {}

    def stand_in(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """Normal values laid out like `x`, one tensor for all calls alike: zeros would draw less power, copies more memory."""
        key = role, x.dtype, x.shape, x.stride()
        if key not in self._stand_ins:
            self._stand_ins[key] = torch.randn_like(x)
        return self._stand_ins[key]

    def __call__(self) -> None:
        for call in self.calls:
            call()


def record(transformer: torch.nn.Module, forward: Callable) -> Floor:
    """The floor of `forward`, which must run `transformer` the stock way: every Linear and every dispatched attention."""
    floor = Floor()
    dispatch = transformer_ltx2.dispatch_attention_fn

    def on_linear(module, args):
        floor.calls.append(functools.partial(F.linear, floor.stand_in("input", args[0]), module.weight, module.bias))

    def on_attention(query, key, value, **options):
        inputs = [floor.stand_in(role, x) for role, x in (("query", query), ("key", key), ("value", value))]
        floor.calls.append(functools.partial(dispatch, *inputs, **options))
        return dispatch(query, key, value, **options)

    linears = [module for module in transformer.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [linear.register_forward_pre_hook(on_linear) for linear in linears]
    transformer_ltx2.dispatch_attention_fn = on_attention
    try:
        forward()
    finally:
        transformer_ltx2.dispatch_attention_fn = dispatch
        for hook in hooks:
            hook.remove()
    return floor
