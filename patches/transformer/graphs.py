"""CUDA graphs: the whole forward captured once per shape and pass kind, then replayed (`enable(pipe, cuda_graphs=True)`).

Small videos are bound by the host, which takes longer to launch four thousand kernels than the GPU to run them. Latents, prompts,
timesteps and masks are copied into the graph's inputs; everything else a forward depends on (Python arguments, coordinates,
weights and their places in memory, adapters, attention processors and backends, torch's numeric switches) is compared before each
replay, and another value means another graph. A graph is used only after a replay on inputs that it was not captured with, into
outputs that held no numbers, gave the eager forward's bits.
"""

import contextlib
import threading
import weakref
from typing import NamedTuple

import torch

from ltx2_fastpath.first_sight import is_capturing, remember, same_bits, told

from .host import COORDINATES, ROPES, STREAMS, transformer_ltx2
from .rope import tables_of
from .survey import State, Survey, switches

LIMIT = 8  # graphs kept; the one not replayed for longest is dropped
_SMALL = 64  # elements of a CPU tensor whose values are part of what a graph is for
_KINDS = 256  # kinds of forward that are remembered as seen or as refused


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict
    outputs: tuple
    alive: object
    survey: "weakref.ref[Survey]"  # of the modules and weights that are baked in, by their addresses
    state: State
    bytes: int


class Graphs:
    """The graphs of one transformer.

    Attributes:
        site: its name in reports; fast: forwards replayed; stock: forwards run eagerly, `first` of them for a capture; left_out:
        whether none is replayed; notes: memory, and why not.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.first = 0
        self.left_out = False
        self._graphs: dict[tuple, _Graph] = {}  # the one replayed last comes last
        self._seen: dict[tuple, None] = {}
        self._refused: dict[tuple, str] = {}
        self._reasons: dict[str, None] = {}
        self._pool = None
        # One thread captures or replays at a time; the one that does may call `clear`, from a hook.
        self._lock = threading.RLock()

    @property
    def notes(self) -> list[str]:
        graphs = list(self._graphs.values())
        memory = [f"{len(graphs)} graphs, {sum(graph.bytes for graph in graphs) / 2**30:.2f} GiB"] if graphs else []
        return memory + sorted({*list(self._reasons), *list(self._refused.values())})

    def clear(self) -> None:
        """Drop all graphs and their memory; waits for a replay or a capture of another thread."""
        with self._lock:
            for known in (self._graphs, self._seen, self._refused, self._reasons):
                known.clear()

    def refuse(self, reason: str) -> None:
        """Note why a forward was not replayed."""
        self.stock += 1
        remember(self._reasons, reason, None, _KINDS)

    def forward(self, parts, transformer, survey, arguments, stock):
        """The result of `stock(**arguments)`, replayed where that is possible."""
        key = tables = None
        reason = "left out" if self.left_out else _why_not(arguments)
        if reason is None:
            key, tables = _key(parts, transformer, arguments)
            reason = "an argument cannot be an input of a graph" if key is None else self._refused.get(key)
        if reason is None and not self._lock.acquire(blocking=False):
            reason = "another thread was replaying or capturing"
        if reason is not None:
            self.refuse(reason)
            return stock(**arguments)
        try:
            return self._forward(key, tables, survey, arguments, stock)
        finally:
            self._lock.release()

    def _forward(self, key, tables, survey: Survey, arguments, stock):
        captured = self._graphs.pop(key, None)
        if captured is not None and (captured.survey() is not survey or captured.state != survey.state()):
            remember(self._reasons, "weights, adapters or processors changed: captured again", None, _KINDS)
            captured = None
        if captured is None:
            if key not in self._seen:  # every site gets its verdict first
                remember(self._seen, key, None, _KINDS)
                self.refuse("a kind of forward that had not been seen before")
                return stock(**arguments)
            self.stock += 1
            self.first += 1
            expected = stock(**arguments)
            with torch.cuda.device(arguments["hidden_states"].device):
                self._capture(key, tables, survey, arguments, stock)
            return expected
        self._graphs[key] = captured
        self.fast += 1
        outputs = _replay(captured, arguments)
        if arguments["return_dict"]:
            return transformer_ltx2.AudioVisualModelOutput(*outputs)
        return outputs

    def _capture(self, key, tables, survey, arguments, stock) -> None:
        while len(self._graphs) >= LIMIT:
            del self._graphs[next(iter(self._graphs))]
        if not self._graphs:  # torch refuses to capture into a pool whose graphs are all gone, while memory of theirs is in use
            self._pool = torch.cuda.graph_pool_handle()
        plain = {**arguments, "return_dict": False}
        before = torch.cuda.memory_reserved()
        inputs = {name: value.clone() for name, value in arguments.items() if _on_gpu(value) and name not in COORDINATES}
        graph = torch.cuda.CUDAGraph()
        try:
            with _undone_on_failure(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = stock(**{**plain, **inputs})
            alive = [arguments[name] for name in COORDINATES], tables
            size = max(0, torch.cuda.memory_reserved() - before)
            captured = _Graph(graph, inputs, outputs, alive, weakref.ref(survey), survey.state(), size)
            fresh = {**plain, **_other_latents(arguments)}
            expected = stock(**fresh)
            for output in outputs:
                output.fill_(float("nan"))
            equal = same_bits(_replay(captured, fresh), expected) and not any(bool(output.isnan().any()) for output in expected)
        except Exception as error:
            remember(self._refused, key, f"capture failed: {told(error)}", _KINDS)
            return
        if equal:
            self._graphs[key] = captured
        else:
            remember(self._refused, key, "the replay gave other bits than the eager forward", _KINDS)


def _other_latents(arguments: dict) -> dict:
    """The latents with their tokens one place further, laid out in memory as they were."""
    names = [f"{stream}hidden_states" for stream in STREAMS]
    return {name: arguments[name].clone().copy_(arguments[name].roll(1, 1)) for name in names}


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


def _on_gpu(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _replay(captured: _Graph, arguments: dict) -> tuple:
    for name, value in captured.inputs.items():
        value.copy_(arguments[name])
    captured.graph.replay()
    return tuple(output.clone() for output in captured.outputs)


def _key(parts, transformer, arguments) -> tuple:
    """(what a graph is for, or None if the arguments cannot be made inputs of one; the tables that it reads)"""
    described: list[tuple] = []
    for name, value in arguments.items():
        if name in COORDINATES:
            if value is None:
                return None, None
        elif _on_gpu(value):
            described.append((name, value.shape, value.stride(), value.dtype, value.device))
        elif isinstance(value, torch.Tensor):
            if value.numel() > _SMALL:
                return None, None
            described.append((name, value.dtype, str(value.tolist())))
        elif name != "return_dict":
            described.append((name, repr(value)))
    video, audio = (arguments[name] for name in COORDINATES)
    coordinates = (video, audio, video[:, 0:1], audio[:, 0:1])
    found = [tables_of(parts, name, getattr(transformer, name), at) for name, at in zip(ROPES, coordinates)]
    tables = [table for table in found if table is not None and table.compact is not None]
    if len(tables) < len(ROPES):
        return None, None
    return (*described, *(table.number for table in tables), switches()), tables


def _why_not(arguments) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if is_capturing():
        return "a CUDA graph is being captured"
    device = arguments["hidden_states"].device
    if any(value.device != device for value in arguments.values() if _on_gpu(value)):
        return "the arguments are on several devices"
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return "the current stream is not the default stream"
    return None
