"""The public functions: find the models behind a pipeline, apply all patches or none, put everything back."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .patches import ROOMS, Room
from .patches.handle import Choices, FastPath, forget_copies
from .report import Report

QUALITIES = ("lossless", "high")
_switching = threading.Lock()  # a second enable during the first would find our forwards and take them for another's
_handles: "weakref.WeakKeyDictionary[torch.nn.Module, FastPath]" = weakref.WeakKeyDictionary()
_choices: "weakref.WeakKeyDictionary[torch.nn.Module, Choices]" = weakref.WeakKeyDictionary()


class _Chosen(str):
    """A quality, told from the same one chosen by another context by its identity."""


def _models_of(pipe) -> list[tuple[Room, torch.nn.Module]]:
    """The models that can be made fast in a pipeline, a modular pipeline, a compiled module, or that `pipe` itself is.

    Raises:
        TypeError: there is none; the message names what was found.
    """
    import diffusers

    found, others = [], []
    for room in ROOMS:
        model: Any = pipe if isinstance(pipe, torch.nn.Module) else getattr(pipe, room.component, None)
        while hasattr(model, "_orig_mod"):
            model = model._orig_mod
        if isinstance(model, getattr(diffusers, room.model, ())):
            found.append((room, model))
        elif model is not None and model is not pipe and not room.beside:
            others.append(f" with {room.component} {type(model).__name__}")
    if all(room.beside for room, _ in found):
        known = " or ".join(f"an {room.model}" for room in ROOMS if not room.beside)
        raise TypeError(f"expected {known}, or a pipeline with one, but found {type(pipe).__name__}{' and'.join(others)}")
    return found


def _handle_of(model: torch.nn.Module) -> FastPath | None:
    """The handle of `model`, or None. A deep copy of an enabled one has none, but its forwards; here they go."""
    handle = _handles.get(model)
    if handle is None:
        forget_copies(model)
    return handle


def _choices_of(pipe) -> list[Choices]:
    """What threads have chosen for each model of `pipe`."""
    with _switching:
        models = [model for _, model in _models_of(pipe)]
        for model in models:
            _handle_of(model)
        return [_choices.setdefault(model, Choices()) for model in models]


def _require_known(quality: str | None) -> None:
    if quality is not None and quality not in QUALITIES:
        raise ValueError(f"unknown quality {quality!r}; choose from {', '.join(map(repr, QUALITIES))}")


def enable(
    pipe, *, quality: str | None = None, cuda_graphs: bool | None = None, without: tuple[str, ...] | None = None
) -> FastPath:
    """Make the models behind `pipe` fast, unless told otherwise without changing a bit of what they compute.

    What is not named in a second call stays as it is.

    Args:
        pipe: an LTX-2 pipeline of diffusers (any task, modular too), its transformer, or that behind ``torch.compile``.
        quality: "lossless" (the default), bit-exact with stock eager diffusers; or "high", which may differ from it by roundings
            and is a little faster. The context `quality` chooses for single requests.
        cuda_graphs: replay whole forwards as CUDA graphs (default: False), for small videos where the host is the limit. Costs
            the graphs' memory (see `report`); False drops them.
        without: names of sites, as in `report`, that compute the stock way (default: none), to find out which one a doubt is
            about.

    Returns:
        The handle of the model, of the transformer where a pipeline has several. Calling again returns the same handle. Where
        the fast path cannot run (no CUDA, a diffusers release that is not known, a broken Triton) nothing is changed and
        `report(pipe)` says why.

    Raises:
        TypeError: `pipe` has no model that can be made fast; the message names what was found.
        ValueError: an unknown quality, or an unknown site; the message lists the known ones.
    """
    _require_known(quality)
    if isinstance(without, str):
        raise ValueError(f"without: expected a tuple of names of sites, got {without!r}")
    handles: list[tuple[torch.nn.Module, FastPath]] = []
    fresh: list[FastPath] = []
    with _switching:
        for room, model in _models_of(pipe):
            if room.beside and not any(handle.active for _, handle in handles):
                continue
            handle = _handles.get(model) or FastPath(room, model, _choices.setdefault(model, Choices()))
            if not handle.active:
                handle.apply()
                fresh.append(handle)
            handles.append((model, handle))
        known = {name for _, handle in handles for name in handle.sites}
        if known and (unknown := [name for name in without or () if name not in known]):
            for handle in fresh:
                handle.restore()
            raise ValueError(f"without: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(sorted(known))}")
        for model, handle in handles:
            handle.configure(quality, cuda_graphs, without)
            _handles[model] = handle
    return handles[0][1]


def disable(pipe) -> None:
    """Put back everything that `enable` replaced; a no-op where it was not enabled.

    A forward that is running, in this thread or another, ends as it began; then its patches go.

    Raises:
        TypeError: `pipe` has no model that can be made fast.
    """
    with _switching:
        for _, model in _models_of(pipe):
            handle = _handles.get(model)
            if handle is not None:
                handle.restore()
            if handle is None or not handle.patches:  # else a forward is running: it ends as it began
                _handles.pop(model, None)
                forget_copies(model)


@contextlib.contextmanager
def disabled(pipe) -> Iterator[None]:
    """Within the block, and in this thread only, `pipe` computes the stock way. Can be nested; restores on exceptions.

    Raises:
        TypeError: `pipe` has no model that can be made fast.
    """
    entered = []
    for choices in _choices_of(pipe):
        choices.disabled += 1
        entered.append(vars(choices))  # a generator may leave the context in another thread than the one that entered it
    try:
        yield
    finally:
        for mine in entered:
            mine["disabled"] -= 1


@contextlib.contextmanager
def quality(pipe, name: str) -> Iterator[None]:
    """Within the block, and in this thread only, `pipe` computes with quality `name`. Can be nested; restores on exceptions.

    "lossless": the bits of stock. "high": also what is not bit-exact, but in each place within a bf16 ULP of the eager chain and
    at most twice as far from fp64. So far these are two things: text masks that mask nothing are dropped, and latents are laid
    out alike for all guidance passes. A no-op where `pipe` is not enabled or computes the stock way, and in a transformer that
    is compiled as a whole (compiled blocks take part).

    Raises:
        TypeError: `pipe` has no model that can be made fast.
        ValueError: an unknown quality; the message lists the known ones.
    """
    _require_known(name)
    chosen = _Chosen(name)
    entered = []
    for choices in _choices_of(pipe):
        choices.qualities += (chosen,)
        entered.append(vars(choices))
    try:
        yield
    finally:  # contexts of generators and coroutines need not end in turn, nor in the thread that entered them
        for mine in entered:
            mine["qualities"] = tuple(other for other in mine["qualities"] if other is not chosen)


def report(pipe) -> Report:
    """What the fast path does in `pipe`: a printable object, rendered as a table in notebooks.

    Raises:
        TypeError: `pipe` has no model that can be made fast.
    """
    with _switching:
        handles = [(room, _handle_of(model)) for room, model in _models_of(pipe)]
        enabled = any(handle is not None for room, handle in handles if not room.beside)
        return Report([handle for room, handle in handles if enabled or not room.beside])
