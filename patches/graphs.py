"""CUDA graphs: the whole forward captured once per shape and pass kind, then replayed (`enable(pipe, cuda_graphs=True)`).

Small videos are bound by the host, which takes longer to launch four thousand kernels than the GPU to run them. Latents, prompts,
timesteps and masks are copied into the graph's inputs; everything else a forward depends on (Python arguments, coordinates,
weights and their places in memory, adapters, attention processors and backends, torch's numeric switches) is compared before each
replay, and another value means another graph. A graph is used only after its first replay gave the eager forward's bits.
"""

import collections
import contextlib
import threading
import weakref
from typing import NamedTuple

import torch

from ltx2_fastpath.first_sight import same_bits

from .host import transformer_ltx2
from .rope import ROPES, tables_of
from .survey import State, switches

LIMIT = 8  # graphs kept; the one not replayed for longest is dropped
_SMALL = 64  # elements of a CPU tensor whose values are part of what a graph is for


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict
    outputs: tuple
    alive: object
    survey: weakref.ref  # of the modules and weights that are baked in, by their addresses
    state: State


class Graphs:
    """The graphs of one transformer.

    Attributes:
        site: its name in reports; fast: forwards replayed; stock: forwards run eagerly; notes: memory, and why not.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self._graphs: collections.OrderedDict = collections.OrderedDict()
        self._seen: set = set()
        self._refused: dict = {}
        self._reasons: set[str] = set()
        self._pool = None
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def notes(self) -> list[str]:
        memory = [f"{len(self._graphs)} graphs, {self._bytes / 2**30:.2f} GiB"] if self._graphs else []
        return memory + sorted(self._reasons | set(self._refused.values()))

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()

    def refuse(self, reason: str) -> None:
        """Note why a forward was not replayed."""
        self.stock += 1
        self._reasons.add(reason)

    def forward(self, fast, transformer, survey, arguments, stock):
        """The result of `stock(**arguments)`, replayed where that is possible."""
        reason = _why_not()
        key = None if reason is not None else _key(fast, transformer, arguments)
        if reason is None and key is None:
            reason = "an argument is neither a small CPU tensor, a CUDA tensor nor a plain value"
        if reason is not None:
            self._reasons.add(reason)
        if key is None or key in self._refused or not self._lock.acquire(blocking=False):
            self.stock += 1
            return stock(**arguments)
        try:
            return self._forward(key, survey, arguments, stock)
        finally:
            self._lock.release()

    def _forward(self, key, survey, arguments, stock):
        captured = self._graphs.get(key)
        if captured is not None and not (captured.survey() is survey and captured.state == survey.state()):
            del self._graphs[key]
            self._reasons.add("weights, adapters or processors changed: captured again")
            captured = None
        if captured is None:
            if key not in self._seen:  # every site gets its verdict first
                self._seen.add(key)
                self.stock += 1
                return stock(**arguments)
            expected = stock(**arguments)
            self.stock += 1
            self._capture(key, survey, arguments, stock, expected)
            return expected
        self._graphs.move_to_end(key)
        self.fast += 1
        outputs = _replay(captured, arguments)
        if arguments["return_dict"]:
            return transformer_ltx2.AudioVisualModelOutput(*outputs)
        return outputs

    def _capture(self, key, survey, arguments, stock, expected):
        while len(self._graphs) >= LIMIT:
            self._graphs.popitem(last=False)
        if not self._graphs:  # torch refuses to capture into a pool whose graphs are all gone, while memory of theirs is in use
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved()
        inputs = {name: value.clone() for name, value in arguments.items() if _on_gpu(value) and name not in _COORDINATES}
        graph = torch.cuda.CUDAGraph()
        try:
            with _undone_on_failure(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = stock(**{**arguments, **inputs, "return_dict": False})
            alive = [arguments[name] for name in _COORDINATES], _tables(key)
            captured = _Graph(graph, inputs, outputs, alive, weakref.ref(survey), survey.state())
            results = _replay(captured, arguments)
        except Exception as error:
            self._refused[key] = f"capture failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        if not same_bits(results, tuple(expected.to_tuple() if arguments["return_dict"] else expected)):
            self._refused[key] = "the replay gave other bits than the eager forward"
            return
        self._bytes += max(0, torch.cuda.memory_reserved() - before)
        self._graphs[key] = captured


@contextlib.contextmanager
def _undone_on_failure():
    """Where a capture fails, torch stays on the capture's stream, and the generator of the device draws nothing any more."""
    stream = torch.cuda.current_stream()
    try:
        yield
    except Exception:
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise


_COORDINATES = ("video_coords", "audio_coords")


def _on_gpu(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _replay(captured: _Graph, arguments: dict) -> tuple:
    for name, value in captured.inputs.items():
        value.copy_(arguments[name])
    captured.graph.replay()
    return tuple(output.clone() for output in captured.outputs)


class _Tables:
    """Compact RoPE tables as a part of a key: equal only to themselves, and kept alive."""

    def __init__(self, tables):
        self.tables = tables

    def __eq__(self, other):
        return isinstance(other, _Tables) and all(a is b for a, b in zip(self.tables, other.tables))

    def __hash__(self):
        return hash(tuple(map(id, self.tables)))


def _tables(key):
    return next(part for part in key if isinstance(part, _Tables))


def _key(fast, transformer, arguments):
    """What a graph is for, or None if the arguments cannot be made inputs of one."""
    parts: list[tuple] = []
    for name, value in arguments.items():
        if name in _COORDINATES:
            if value is None:
                return None
        elif _on_gpu(value):
            parts.append((name, value.shape, value.stride(), value.dtype, value.device))
        elif isinstance(value, torch.Tensor):
            if value.numel() > _SMALL:
                return None
            parts.append((name, value.dtype, str(value.tolist())))
        elif name != "return_dict":
            parts.append((name, repr(value)))
    video, audio = (arguments[name] for name in _COORDINATES)
    coordinates = (video, audio, video[:, 0:1], audio[:, 0:1])
    tables = [tables_of(fast, name, getattr(transformer, name), at) for name, at in zip(ROPES, coordinates)]
    if any(table is None for table in tables):
        return None
    return (*parts, _Tables(tables), switches())


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if torch.cuda.current_stream() != torch.cuda.default_stream():
        return "the current stream is not the default stream"
    return None
