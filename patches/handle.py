"""The handle kept for one model: its switch, its settings, its sites and patches, and what the replaced forwards ask of it."""

import collections
import contextlib
import functools
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.modules import module as torch_module

from . import host
from .patch import Patch, strip

if TYPE_CHECKING:
    from . import Room

logger = logging.getLogger("ltx2_fastpath")
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")


class Site(Protocol):
    """One place of a model, as reports show it.

    Attributes:
        site: its name. fast, stock: calls answered by us, and by the stock computation. first: calls that computed both and
        compared. left_out: whether the user has left it out. notes: how it was verified, or why not.
    """

    site: str
    fast: int
    stock: int
    first: int
    left_out: bool

    @property
    def notes(self) -> list[str]: ...


class Parts(Protocol):
    """What a room puts in the place of one model's forwards."""

    @property
    def sites(self) -> dict[str, Site]:
        """The sites by name."""
        ...

    def patches(self) -> dict[str, Patch]:
        """The patches by the name of the module that each belongs to; nothing is applied yet."""
        ...

    def configured(self) -> None:
        """The handle's settings have changed."""
        ...


class Choices(threading.local):
    """What a thread has chosen for one model, whatever is enabled and disabled meanwhile.

    All is there from the start: a compiled block is guarded by what is not there, too.
    """

    def __init__(self):
        self.disabled = 0  # contexts of `disabled` that it is in
        self.qualities: tuple[str, ...] = ()  # that of each context of `quality` that it is in, the innermost last
        self.began: tuple[str | None] | None = None  # why the forward of the model that it is in began in stock; in none: None


class FastPath:
    """The handle kept for one model: its switch, its sites, its patches, and why it is not active if it is not.

    Attributes:
        quality: that of the requests that do not choose another by the context `quality`.
        cuda_graphs: whether whole forwards are replayed as CUDA graphs.
        without: the names of the sites that are left out.
        active: whether the patches are in place and the switch is on.
        reason: why nothing was changed, or None.
        sites: every place of the model where something of ours stands, by name.
        skipped: modules that could not be patched, with the reason; the others are fast.
        audio_stream: whether audio runs on a CUDA stream of its own beside the video; set it to False for a profile whose kernels
            do not overlap. The bits are the same.
        stock_calls: {(place, reason): calls} in which a patched forward took the stock path.
        partly: {(place, reason): calls} in which a fast forward went without something that it could have used.
        layers_of: {(place, reason): numbers of the layers in which either was}; nothing for what is not in a layer.
    """

    def __init__(self, room: "Room", model: torch.nn.Module, choices: Choices):
        self._room = room
        self._model = weakref.ref(model)
        self._choices = choices
        self.warned: set[str] = set()
        self._parts: Parts | None = None
        self.quality = "lossless"
        self.cuda_graphs = False
        self.without: tuple[str, ...] = ()
        self.audio_stream = True
        self.active = False
        self.reason: str | None = None
        self.sites: dict[str, Site] = {}
        self.patches: dict[str, Patch] = {}
        self.skipped: dict[str, str] = {}
        self.stock_calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.partly: collections.Counter[tuple[str, str]] = collections.Counter()
        self.layers_of: dict[tuple[str, str], set[int]] = {}
        self._switching = threading.RLock()
        self._running = 0  # forwards of the model, in all threads
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    @property
    def component(self) -> str:
        """What pipelines call the model."""
        return self._room.component

    def configure(self, quality: str | None, cuda_graphs: bool | None, without: tuple[str, ...] | None) -> None:
        """Change the settings that are not None."""
        self.quality = self.quality if quality is None else quality
        self.cuda_graphs = self.cuda_graphs if cuda_graphs is None else cuda_graphs
        self.without = self.without if without is None else without
        for name, site in self.sites.items():
            site.left_out = name in self.without
        if self._parts is not None:
            self._parts.configured()

    def apply(self) -> None:
        """Put all patches in place, or none where that cannot be: then `reason` says why."""
        if self.patches:  # a forward that began before `restore` still needs them
            self.active = True
            return
        told, self.reason = self.reason, why_unsupported(self._room)
        if self.reason is not None:
            if self.reason != told:
                logger.warning(
                    "The fast path stays off: %s. The pipeline runs as before. `python -m ltx2_fastpath` says what to do.",
                    self.reason,
                )
            return
        model = self._model()
        assert model is not None  # the caller holds it
        forget_copies(model)
        parts = self._room.parts(self, model)
        self.sites = parts.sites
        applied: dict[str, Patch] = {}
        self.skipped = {}
        try:
            for name, patch in parts.patches().items():
                try:
                    patch.apply()
                except LookupError as error:
                    self.skipped[name] = str(error)
                else:
                    applied[name] = patch
        except BaseException:
            _undo(applied)
            raise
        self._parts, self.patches = parts, applied
        self._layers.update({patch.owner: int(number[1]) for name, patch in applied.items() if (number := _LAYER.search(name))})
        self.active = bool(applied)
        if not applied:
            self.reason = "nothing could be patched"
        if self.skipped:
            logger.warning(
                "The fast path leaves %d modules alone: %s. They compute as before; results are not affected."
                " `print(ltx2_fastpath.report(pipe))` lists them.",
                len(self.skipped),
                _summary(self.skipped),
            )

    def restore(self) -> None:
        """Put back what was there before `apply`: now, or when forwards that are running have ended as they began."""
        with self._switching:
            self.active = False
            self._undo_when_idle()

    def _undo_when_idle(self) -> None:
        if not self.active and not self._running:
            _undo(self.patches)
            self.patches = {}
            self._parts = None  # which holds this handle: both go when the last outside reference does

    @contextlib.contextmanager
    def one_forward(self) -> Iterator[None]:
        """Within the block, which is a forward of the model, this thread's calls take the path that the first of them takes."""
        mine = vars(self._choices)
        outer = mine["began"]
        with self._switching:
            self._running += 1
        mine["began"] = outer or (self.why_off(),)
        try:
            yield
        finally:
            mine["began"] = outer
            with self._switching:
                self._running -= 1
                self._undo_when_idle()

    @property
    def layers(self) -> int:
        """How many layers have patches."""
        return len(set(self._layers.values()))

    @property
    def tier(self) -> str:
        """The quality that this thread computes with."""
        chosen = self._choices.qualities
        return chosen[-1] if chosen else self.quality

    def why_off(self) -> str | None:
        """Why a call takes the stock path whatever it is about; None if it does not."""
        if not self.active:
            return "switched off by disable()"
        return "switched off by disabled()" if self._choices.disabled else None

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
        began = self._choices.began
        off = self.why_off() if began is None else began[0]
        if off is not None:
            return off
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "hooks are set on all modules"  # and we read norms that we should call
        if type(x) is not torch.Tensor:
            return f"the hidden states are a {type(x).__name__}"
        if x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type):
            return "autocast is active"
        return None

    def count_stock(self, place: str, reason: str, module: torch.nn.Module | None = None) -> None:
        """Note for the report that a patched forward took the stock path, and in which layer `module` is."""
        self._count(self.stock_calls, place, reason, module)

    def count_partly(self, place: str, reason: str, module: torch.nn.Module) -> None:
        """Note for the report that a fast forward went without `place`, and in which layer `module` is."""
        self._count(self.partly, place, reason, module)

    def _count(self, counter, place, reason, module) -> None:
        if torch.compiler.is_compiling():
            return
        counter[place, reason] += 1
        if module is not None and (layer := self._layers.get(module)) is not None:
            self.layers_of.setdefault((place, reason), set()).add(layer)

    def __repr__(self) -> str:
        return f"<FastPath {self.quality}, {'active' if self.active else self.reason or 'switched off'}>"


def forget_copies(model: torch.nn.Module) -> None:
    """Make `model` stock where a deep copy made it run the replacements of another; a no-op for its own."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else (model,):
        strip(module)


@functools.lru_cache(maxsize=256)
def _why_not_device(device: torch.device, dtype: torch.dtype) -> str | None:
    from ltx2_fastpath.ops.support import DEVICE_TYPES, DTYPES

    if device.type not in DEVICE_TYPES:
        return f"the hidden states are on {device.type}"
    if dtype not in DTYPES:
        return f"the hidden states are {dtype}"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def why_unsupported(room: "Room") -> str | None:
    """Why no model of `room` can be patched in this process; None if one can."""
    try:
        from ltx2_fastpath.ops import support
    except Exception as error:  # a broken Triton raises anything, a DLL's OSError included
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if not torch.cuda.is_available() and "cpu" not in support.DEVICE_TYPES:
        return "no CUDA device is available"
    if names := host.unknown_sources(room):
        return f"this diffusers release is not known ({', '.join(names)} differ)"
    if names := host.missing_names():
        return f"private names that the fast path needs are not there ({', '.join(names)})"
    return None


def _undo(patches: dict[str, Patch]) -> None:
    for patch in reversed(patches.values()):
        patch.undo()


def _summary(skipped: dict[str, str]) -> str:
    name, reason = next(iter(skipped.items()))
    return f"{name} ({reason})" + (f" and {len(skipped) - 1} more" if len(skipped) > 1 else "")
