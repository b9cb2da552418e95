"""The public functions: find the transformer behind a pipeline, apply all patches or none, put everything back."""

import collections
import contextlib
import functools
import logging
import sys
import threading
import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from .report import Report

logger = logging.getLogger("ltx2_fastpath")

QUALITIES = ("lossless", "high")
_switching = threading.Lock()  # a second enable during the first would find our forwards and take them for another's
_handles: "weakref.WeakKeyDictionary[torch.nn.Module, FastPath]" = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """What a thread has chosen for itself. All is there from the start: a compiled block is guarded by what is not there, too."""

    def __init__(self):
        self.disabled = 0  # contexts of `disabled` that it is in
        self.qualities: tuple[str, ...] = ()  # that of each context of `quality` that it is in, the innermost last


class _Chosen(str):
    """A quality, told from the same one chosen by another context by its identity."""


class FastPath:
    """The handle kept for one transformer: its switch, its sites, its patches, and why it is not active if it is not.

    Attributes:
        quality: that of the requests that do not choose another by the context `quality`.
        cuda_graphs: whether whole forwards are replayed as CUDA graphs.
        active: whether the patches are in place and the switch is on.
        reason: why nothing was changed, or None.
        sites: the `FirstSight` of every place where an op stands, by name.
        skipped: modules that could not be patched, with the reason; the others are fast.
        audio_stream: whether audio runs on a CUDA stream of its own beside the video; set it to False for a profile whose kernels
            do not overlap. The bits are the same.
        stock_calls: {(place, reason): calls} in which a patched forward took the stock path.
    """

    def __init__(self, transformer: torch.nn.Module, quality: str):
        self._transformer = weakref.ref(transformer)
        self._patches: dict[str, Any] = {}
        self._thread = _Thread()
        self._warned: set[str] = set()
        self.quality = quality
        self.cuda_graphs = False
        self.audio_stream = True
        self.active = False
        self.reason: str | None = None
        self.sites: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self.stock_calls: collections.Counter[tuple[str, str]] = collections.Counter()

    def _apply(self) -> None:
        told, self.reason = self.reason, _why_unsupported()
        if self.reason is not None:
            if self.reason != told:
                logger.warning(
                    "The fast path stays off: %s. The pipeline runs as before. `python -m ltx2_fastpath` says what to do.",
                    self.reason,
                )
            return
        from . import patches
        from .sites import build_sites

        patches.forget_copies(self._transformer())
        self.sites = build_sites(self._warned)
        applied = {}
        self.skipped = {}
        try:
            for name, patch in patches.build(self, self._transformer()).items():
                try:
                    patch.apply()
                except LookupError as error:
                    self.skipped[name] = str(error)
                else:
                    applied[name] = patch
        except BaseException:
            _undo(applied)
            raise
        self._patches = applied
        self.active = bool(applied)
        if not applied:
            self.reason = "no block could be patched"
        if self.skipped:
            logger.warning(
                "The fast path leaves %d modules alone: %s. They compute as before; results are not affected."
                " `print(ltx2_fastpath.report(pipe))` lists them.",
                len(self.skipped),
                _summary(self.skipped),
            )

    def _restore(self) -> None:
        self.active = False
        _undo(self._patches)
        self._patches = {}

    @property
    def tier(self) -> str:
        """The quality that this thread computes with."""
        chosen = self._thread.qualities
        return chosen[-1] if chosen else self.quality

    def why_not(self, x: torch.Tensor) -> str | None:
        """Why a call on `x` takes the stock path; None if it takes the fast one. Reads metadata only."""
        if torch.compiler.is_compiling():
            return "torch.compile is tracing"
        if torch.jit.is_tracing():
            return "torch.jit is tracing"
        if torch._C._functorch.maybe_current_level() is not None:
            return "torch.func transforms the call"
        return self.why_not_traced(x) or _why_not_device(x.device, x.dtype)

    def why_not_traced(self, x: torch.Tensor) -> str | None:
        """`why_not` for code that Dynamo follows into a compiled graph; device and dtype are for the caller to look at."""
        if not self.active:
            return "switched off by disable()"
        if self._thread.disabled:
            return "switched off by disabled()"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "hooks are set on all modules"  # and we read norms that we should call
        if type(x) is not torch.Tensor:
            return f"the hidden states are a {type(x).__name__}"
        if x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type):
            return "autocast is active"
        return None

    def _blocks(self):
        """The transformer's blocks; none where a deep copy has outlived the transformer."""
        transformer = self._transformer()
        return () if transformer is None else transformer.transformer_blocks

    def is_compiled(self) -> bool:
        """Whether the blocks were compiled one by one (`compile_repeated_blocks`)."""
        return any(block._compiled_call_impl is not None for block in self._blocks())

    @property
    def covers_all_blocks(self) -> bool:
        """Whether every block calls our forward and nothing else, so that a block can be handed what only ours understands."""
        patches = [self._patches.get(f"transformer_blocks.{i}") for i in range(len(self._blocks()))]
        return bool(patches) and all(patch and patch.is_called(block) for patch, block in zip(patches, self._blocks()))

    def blocks_take_rows(self) -> bool:
        """Whether every block understands `IndexedRows`, and no hook reads what the blocks are given."""
        hooked = any(block._forward_hooks or block._forward_pre_hooks for block in self._blocks())
        return self.covers_all_blocks and not self.is_compiled() and not hooked

    def count_stock(self, place: str, reason: str) -> None:
        """Note for the report that a patched forward took the stock path."""
        if not torch.compiler.is_compiling():
            self.stock_calls[place, reason] += 1

    def __repr__(self) -> str:
        return f"<FastPath {self.quality}, {'active' if self.active else self.reason or 'switched off'}>"


@functools.lru_cache(maxsize=256)
def _why_not_device(device: torch.device, dtype: torch.dtype) -> str | None:
    from .ops.numerics import DEVICE_TYPES, DTYPES

    if device.type not in DEVICE_TYPES:
        return f"the hidden states are on {device.type}"
    if dtype not in DTYPES:
        return f"the hidden states are {dtype}"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def _why_unsupported() -> str | None:
    """Why no transformer can be patched in this process; None if one can."""
    try:
        from .ops import numerics
    except Exception as error:  # a broken Triton raises anything, a DLL's OSError included
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if not torch.cuda.is_available() and "cpu" not in numerics.DEVICE_TYPES:
        return "no CUDA device is available"
    from .patches import host

    if names := host.unknown_sources():
        return f"this diffusers release is not known ({', '.join(names)} differ)"
    return None


def _undo(patches) -> None:
    for patch in reversed(patches.values()):
        patch.undo()


def _summary(skipped: dict[str, str]) -> str:
    name, reason = next(iter(skipped.items()))
    return f"{name} ({reason})" + (f" and {len(skipped) - 1} more" if len(skipped) > 1 else "")


def _transformer_of(pipe) -> torch.nn.Module:
    """The LTX-2 transformer behind a pipeline, a modular pipeline, a compiled module, or `pipe` itself.

    Raises:
        TypeError: there is none; the message names what was found.
    """
    from diffusers import LTX2VideoTransformer3DModel

    found = pipe
    if not isinstance(pipe, torch.nn.Module):
        found = getattr(pipe, "transformer", None)
    while hasattr(found, "_orig_mod"):
        found = found._orig_mod
    if isinstance(found, LTX2VideoTransformer3DModel):
        return found
    inside = "" if found is pipe or found is None else f" with transformer {type(found).__name__}"
    raise TypeError(
        f"expected a pipeline with an LTX2VideoTransformer3DModel, or that model, but found {type(pipe).__name__}{inside}"
    )


def _forget_copies(transformer: torch.nn.Module) -> None:
    """Make stock what a deep copy brought along of another transformer's forwards."""
    if (patches := sys.modules.get(f"{__package__}.patches")) is not None:
        patches.forget_copies(transformer)


def _handle_of(transformer: torch.nn.Module) -> FastPath | None:
    """The handle of `transformer`, or None. A deep copy of an enabled one has none, but its forwards; here they go."""
    fast = _handles.get(transformer)
    if fast is None:
        _forget_copies(transformer)
    return fast


def _require_known(quality: str) -> None:
    if quality not in QUALITIES:
        raise ValueError(f"unknown quality {quality!r}; choose from {', '.join(map(repr, QUALITIES))}")


def enable(pipe, *, quality: str = "lossless", cuda_graphs: bool = False) -> FastPath:
    """Make the LTX-2 transformer behind `pipe` fast, unless told otherwise without changing a bit of what it computes.

    Args:
        pipe: an LTX-2 pipeline of diffusers (any task, modular too), its transformer, or that behind ``torch.compile``.
        quality: "lossless", bit-exact with stock eager diffusers; or "high", which may differ from it by roundings and is a
            little faster. Calling again changes it; the context `quality` chooses for single requests.
        cuda_graphs: replay whole forwards as CUDA graphs, for small videos where the host is the limit. Costs the graphs'
            memory (see `report`); calling again changes it.

    Returns:
        The handle of that transformer. Calling again returns the same handle. Where the fast path cannot run (no CUDA, a
        diffusers release that is not known, a broken Triton) nothing is changed and `report(pipe)` says why.

    Raises:
        TypeError: `pipe` has no LTX-2 transformer; the message names what was found.
        ValueError: an unknown quality; the message lists the known ones.
    """
    _require_known(quality)
    transformer = _transformer_of(pipe)
    with _switching:
        fast = _handles.get(transformer) or FastPath(transformer, quality)
        fast.quality = quality
        if not fast.active:
            fast._apply()
        _handles[transformer] = fast
    if fast.cuda_graphs and not cuda_graphs and fast.active:
        fast.sites["cuda_graphs"].clear()
    fast.cuda_graphs = cuda_graphs
    return fast


def disable(pipe) -> None:
    """Put back everything that `enable` replaced; a no-op where it was not enabled.

    Raises:
        TypeError: `pipe` has no LTX-2 transformer.
    """
    transformer = _transformer_of(pipe)
    with _switching:
        fast = _handles.pop(transformer, None)
        if fast is not None:
            fast._restore()
        _forget_copies(transformer)


@contextlib.contextmanager
def disabled(pipe):
    """Within the block, and in this thread only, `pipe` computes the stock way. Can be nested; restores on exceptions.

    Raises:
        TypeError: `pipe` has no LTX-2 transformer.
    """
    fast = _handle_of(_transformer_of(pipe))
    if fast is None:
        yield
        return
    fast._thread.disabled += 1
    entered = vars(fast._thread)  # a generator may leave the context in another thread than the one that entered it
    try:
        yield
    finally:
        entered["disabled"] -= 1


@contextlib.contextmanager
def quality(pipe, name: str):
    """Within the block, and in this thread only, `pipe` computes with quality `name`. Can be nested; restores on exceptions.

    "lossless": the bits of stock. "high": also what is not bit-exact, but in each place within a bf16 ULP of the eager chain and
    at most twice as far from fp64. So far these are two things: text masks that mask nothing are dropped, and latents are laid
    out alike for all guidance passes. A no-op where `pipe` is not enabled or computes the stock way, and in a transformer that
    is compiled as a whole (compiled blocks take part).

    Raises:
        TypeError: `pipe` has no LTX-2 transformer.
        ValueError: an unknown quality; the message lists the known ones.
    """
    _require_known(name)
    fast = _handle_of(_transformer_of(pipe))
    if fast is None:
        yield
        return
    mine = _Chosen(name)
    fast._thread.qualities += (mine,)
    entered = vars(fast._thread)  # as in `disabled`; and contexts of generators and coroutines need not end in turn
    try:
        yield
    finally:
        entered["qualities"] = tuple(chosen for chosen in entered["qualities"] if chosen is not mine)


def report(pipe) -> Report:
    """What the fast path does in `pipe`: a printable object, rendered as a table in notebooks.

    Raises:
        TypeError: `pipe` has no LTX-2 transformer.
    """
    return Report(_handle_of(_transformer_of(pipe)))
