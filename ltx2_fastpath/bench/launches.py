"""What a call runs on the GPU: how many launches, and how much of the time are matrix products, attention and all the rest."""

import re
from collections import defaultdict
from collections.abc import Callable

import torch

MATRIX, ATTENTION, REST = "matrix products", "attention", "rest"
MEMSET, COPY = "memset", "copy"

# The first pattern that is found decides. Inductor names a kernel after every operation fused into it, the one before an
# attention or a matrix product included, so its pointwise kernels and reductions come first.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (MEMSET, r"^memset"),
        (COPY, r"^memcpy"),
        (REST, r"^triton_(poi|red|per|for)_"),
        (ATTENTION, r"sdpa|flash|fmha|attention|softmax"),
        (MATRIX, r"nvjet|cutlass|cublas|gemm|gemv|splitk|xmma|^triton_tem_"),
        (REST, r""),
    )
)
_LISTED = 25


def kind_of(name: str) -> str:
    """MATRIX, ATTENTION, MEMSET, COPY or REST, by the name that the profiler gives a kernel."""
    return next(kind for kind, pattern in _KINDS if pattern.search(name))


def profile(call: Callable) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel, memset and copy of one call, in order."""
    from torch.autograd import DeviceType

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = (e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def breakdown(kernels: list[tuple[str, float]]) -> dict:
    """Counts and milliseconds of a profile.

    Memsets are counted apart and their time goes to the matrix products: cuBLAS clears its split-K workspaces with them.
    Copies are counted apart and their time goes to the rest. `rest_kernels` lists the rest by name, the slowest first.
    """
    counts = {"kernels": 0, "memsets": 0, "copies": 0}
    split_us = {MATRIX: 0.0, ATTENTION: 0.0, REST: 0.0}
    rest: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for name, microseconds in kernels:
        kind = kind_of(name)
        counts[{MEMSET: "memsets", COPY: "copies"}.get(kind, "kernels")] += 1
        part = {MEMSET: MATRIX, COPY: REST}.get(kind, kind)
        split_us[part] += microseconds
        if part == REST:
            rest[name][0] += 1
            rest[name][1] += microseconds
    slowest = sorted(rest.items(), key=lambda item: -item[1][1])[:_LISTED]
    return {
        "launches": counts,
        "split_ms": {part: us / 1e3 for part, us in split_us.items()},
        "rest_kernels": [{"name": name, "launches": count, "ms": us / 1e3} for name, (count, us) in slowest],
    }
