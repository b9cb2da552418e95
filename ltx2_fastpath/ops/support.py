"""What the ops share that is no arithmetic: dtypes and devices, modules that may be read, layouts, rows with an index."""

import contextlib
import itertools
import types
from typing import NamedTuple

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
# Under Triton's interpreter (TRITON_INTERPRET=1) the kernels run on CPU tensors, which is how they are tested anywhere.
DEVICE_TYPES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_untouched(module: torch.nn.Module) -> bool:
    """Whether calling `module` calls its class's forward: no hooks, no other forward. (Removed hooks leave that one, bound.)"""
    if "forward" in module.__dict__:
        forward = module.__dict__["forward"]
        bound = isinstance(forward, types.MethodType) and forward.__self__ is module
        if not bound or forward.__func__ is not type(module).forward:
            return False
    return not (module._forward_hooks or module._forward_pre_hooks)


_HERE = contextlib.nullcontext()


def on_device(x: torch.Tensor):
    """A context in which `x`'s device is the current one; costs a comparison where it already is."""
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        return torch.cuda.device(x.device)
    return _HERE


class IndexedRows(NamedTuple):
    """A tensor [B, S, D] of which few rows are distinct: values [n, D] and, for each token, its row: index int32 [B, S]."""

    values: torch.Tensor
    index: torch.Tensor

    def full(self) -> torch.Tensor:
        """The tensor itself, [B, S, D]."""
        return self.values[self.index]


def full(x):
    """`x` as a tensor."""
    return x.full() if isinstance(x, IndexedRows) else x


def layout(x: torch.Tensor | IndexedRows | None):
    """What a kernel's fitness can depend on: the metadata of a tensor and its alignment, hashable."""
    if x is None:
        return None
    if isinstance(x, IndexedRows):
        return layout(x.values), layout(x.index)
    return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16


def token_stride(x: torch.Tensor, inner: int) -> int | None:
    """The step from token to token of x [B, token dimensions..., `inner` dimensions]; None where they are not evenly spaced."""
    dimensions = [(size, step) for size, step in zip(x.shape[1:-inner], x.stride()[1:-inner]) if size > 1]
    if not dimensions:
        return 0
    evenly = all(outer == size * step for (_, outer), (size, step) in itertools.pairwise(dimensions))
    return dimensions[-1][1] if evenly else None


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal values for a rehearsal, from a generator of our own: the caller's random state must not move."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)
