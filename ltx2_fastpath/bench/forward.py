"""Whole forwards of the transformer: stock, compiled, fast, high, and the floor, taking turns over one set of weights."""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._dynamo
from diffusers import LTX2VideoTransformer3DModel
from torch._inductor.utils import fresh_cache

import ltx2_fastpath
from ltx2_fastpath.testing import models
from ltx2_fastpath.testing.models import Clip

from . import floor, launches, timing

EAGER, COMPILED, FAST, FAST_COMPILED, FLOOR = "eager", "compiled", "fast", "fast + compile", "floor"
#: The arm that is not lossless: quality "high". It runs where it is asked for.
HIGH = "high"
#: Compiled arms may fail (no C compiler, a graph break); they are left out then, and the section says so.
COMPILED_ARMS = (COMPILED, FAST_COMPILED)
#: Arms and guidance passes of each section, with the rows of each pass for one video.
FORWARD_ARMS = (EAGER, FAST, COMPILED, FAST_COMPILED, FLOOR)
STEP_ARMS, STEP_PASSES = (EAGER, FAST, COMPILED, FLOOR), {"cfg": 2, "stg": 1, "isolated": 1}
#: In modular pipelines every prompt has a pass of its own, and all passes get one latents tensor.
MODULAR_PASSES = {"positive": 1, "negative": 1, "stg": 1, "isolated": 1}
EAGER_GRAPH, FAST_GRAPHS = "eager as a graph", "fast + graphs"
SMALL_ARMS, SMALL_CLIP = (EAGER, FAST, EAGER_GRAPH, FAST_GRAPHS), Clip(512, 768, 9)

_LATENTS = ("hidden_states", "audio_hidden_states")
_TEXT = ("encoder_hidden_states", "audio_encoder_hidden_states")
_COORDINATES = ("video_coords", "audio_coords")
# What a forward needs beside its weights: an upper bound for choosing the number of layers, not a measurement.
_BYTES_PER_TOKEN = 500_000
_BYTES_ELSEWHERE = 3 * 2**30


class Unusable(RuntimeError):
    """There is nothing to measure here: the fast path is off, or the GPU too small."""


class Instances(NamedTuple):
    """Module instances over one set of weights, so that no arm has to be switched, patched or recompiled for another."""

    stock: LTX2VideoTransformer3DModel
    compiled: LTX2VideoTransformer3DModel
    fast: LTX2VideoTransformer3DModel
    fast_compiled: LTX2VideoTransformer3DModel
    high: LTX2VideoTransformer3DModel | None = None

    def handles(self) -> list[ltx2_fastpath.FastPath]:
        """Those of the arms whose blocks are not compiled."""
        return [make_fast(self.fast)] + ([make_fast(self.high, "high")] if self.high is not None else [])


def instances_of(transformer: LTX2VideoTransformer3DModel, *, high: bool = False) -> Instances:
    """`transformer`, which must be stock and stays so, and its twins. Raises Unusable as `make_fast` does."""
    instances = Instances(transformer, *(models.twin(transformer) for _ in range(3 + high)))
    instances.handles()
    make_fast(instances.fast_compiled)
    return instances


def make_fast(transformer: LTX2VideoTransformer3DModel, quality: str = "lossless") -> ltx2_fastpath.FastPath:
    """Enable the fast path and return its handle, the same one for the same quality.

    Raises:
        Unusable: it stays off; the message says why.
    """
    handle = ltx2_fastpath.enable(transformer, quality=quality)
    if not handle.active:
        raise Unusable(f"the fast path is off: {handle.reason}")
    return handle


def choose_layers(version: str, wanted: int | None, clips: list[Clip], rows: int, free_bytes: int) -> tuple[int, str | None]:
    """The number of layers to build, and a note if they are fewer than the published model has.

    Without a wish these are all that leave room, in `free_bytes`, for forwards of `rows` rows of the largest of `clips`.

    Raises:
        Unusable: not even one layer fits.
    """
    published = models.CONFIGS[version]["num_layers"]
    if wanted is not None:
        return wanted, f"{wanted} of {published} layers, as asked" if wanted < published else None
    transformer = models.outline(version)
    layer = sum(parameter.numel() for parameter in transformer.transformer_blocks.parameters())
    elsewhere = sum(parameter.numel() for parameter in transformer.parameters()) - layer
    tokens = max(math.prod(models.latent_sizes(transformer.config, *clip)[:3]) for clip in clips)
    room = free_bytes - 2 * elsewhere - _BYTES_ELSEWHERE - _BYTES_PER_TOKEN * tokens * rows
    layers = min(published, room // (2 * layer))
    if layers < 1:
        raise Unusable(f"{free_bytes / 2**30:.0f} GiB of free GPU memory are too little for one layer at this shape")
    if layers < published:
        return layers, f"{layers} of {published} layers: the GPU has {free_bytes / 2**30:.0f} GiB free"
    return layers, None


@torch.no_grad()
def measure(
    section: dict,
    instances: Instances,
    clip: Clip,
    passes: dict[str, int],
    arms: tuple[str, ...],
    meter,
    *,
    image_to_video: bool = False,
    given_latents: bool = False,
    repeats: int,
    progress: Callable[[str], None],
) -> None:
    """Add to `section` (its name, version and notes) the measurements of every arm.

    A call of an arm is a forward for each of `passes`, {guidance: rows}, on inputs that all arms share. Equality comes first,
    on a call of the fast arm that verifies nothing any more, as none of the timed ones does. That call belongs to a second
    request; how often it waits for the GPU is counted. If that is red there are no times.
    The difference of a compiled arm or of `high` from stock is reported, not judged.
    """
    inputs = _inputs(instances.stock, clip, passes, image_to_video, given_latents)
    hidden, audio = (next(iter(inputs.values()))[name] for name in _LATENTS)
    section |= {
        "clip": str(clip),
        "video_tokens": hidden.shape[1],
        "audio_tokens": audio.shape[1],
        "passes": passes,
        "image_to_video": image_to_video,
        "given_latents": given_latents,
        "layers": len(instances.fast.transformer_blocks),
        "dtype": str(hidden.dtype).removeprefix("torch."),
        "arms": {},
    }
    calls = _prepare(section, instances, inputs, arms, meter, progress)
    add_report(section, instances.fast)
    if not section["equal"]:
        return

    records, title = section["arms"], f"{section['section']} {clip}"
    progress(f"{title}: {repeats} rounds of {', '.join(calls)}")
    for name, samples in timing.interleave(calls, meter.time, repeats).items():
        records[name] |= timing.summary(samples)
    for name, call in calls.items():
        progress(f"{title}: {name}, profile")
        with _one_stream(instances):
            kernels = meter.kernels(call)
        if not kernels:
            section["notes"].append(f"{name}: the profiler saw no kernels")
        records[name] |= launches.breakdown(kernels)
    for record in records.values():
        record["speed_up"] = records[EAGER]["gpu_ms"] / record["gpu_ms"]
        if FLOOR in records:
            record["times_floor"] = record["gpu_ms"] / records[FLOOR]["gpu_ms"]
    if HIGH in records:
        records[HIGH]["over_fast"] = records[FAST]["gpu_ms"] / records[HIGH]["gpu_ms"]


@contextlib.contextmanager
def _one_stream(instances):
    """A fast transformer's audio after its video, not beside it: kernels that overlap take longer, and would count twice."""
    handles = instances.handles()
    for handle in handles:
        handle.audio_stream = False
    try:
        yield
    finally:
        for handle in handles:
            handle.audio_stream = True


def _inputs(transformer, clip, passes, image_to_video, given_latents) -> dict[str, dict]:
    """The arguments of every pass. As in the pipelines all rows have the same latents, and the last rows have the same text."""
    inputs: dict[str, dict] = {}
    for name, rows in passes.items():
        guidance = name if name in STEP_PASSES else "cfg"
        size = dict(clip._asdict(), batch_size=rows)
        kwargs = models.inputs(
            transformer, **size, guidance=guidance, image_to_video=image_to_video, given_latents=given_latents
        )  # fmt: skip
        inputs[name] = kwargs
    if passes == MODULAR_PASSES:
        for name in _LATENTS:
            inputs["positive"][name] = inputs["negative"][name] = inputs["isolated"][name] = inputs["stg"][name]
        for name in _TEXT:
            inputs["positive"][name] = inputs["isolated"][name] = inputs["stg"][name]
            inputs["negative"][name] = inputs["negative"][name].flip(1)
        return inputs
    first = next(iter(inputs.values()))
    for kwargs in inputs.values():
        for name in _LATENTS:
            kwargs[name].copy_(first[name][-1:].clone())
        for name in _TEXT:
            kwargs[name][-1:].copy_(first[name][-1:].clone())
    return inputs


def _prepare(section, instances, inputs, arms, meter, progress) -> dict[str, Callable]:
    """The first call of every arm, for its seconds, and the third, for its outputs and memory. Returns the arms to time."""
    calls: dict[str, Callable] = {}
    expected: dict[str, torch.Tensor] = {}
    section["equal"] = True
    # A shape that follows another would be compiled for any size; every section gets code for its own sizes, as a first one does.
    torch._dynamo.reset()
    for name in arms:
        progress(f"{section['section']} {section['clip']}: {name}, first call")
        try:
            call = _call(name, instances, inputs)
            with fresh_cache():  # of Inductor and of Triton: what an earlier run has compiled must not count
                record = {"first_call_s": meter.seconds(call)}
            call()  # what depends on the order of the passes is verified here, not in the first call
            for kwargs in inputs.values():  # a second request, with coordinates of its own
                kwargs |= {coordinates: kwargs[coordinates].clone() for coordinates in _COORDINATES}
            call()
            record["synchronisations"] = meter.synchronisations(call)
            outputs, record["peak_bytes"] = meter.peak(call)
        except Exception as error:
            if name not in COMPILED_ARMS:
                raise
            reason = (str(error).strip() or "no message").splitlines()[0]
            section["notes"].append(f"{name} is left out: {type(error).__name__}: {reason}")
            continue
        section["arms"][name], calls[name] = record, call
        if name == EAGER:
            expected = outputs
        elif name != FLOOR:
            record |= compare(outputs, expected)
        if name in (FAST, FAST_GRAPHS) and not all(record["equal"].values()):
            section["equal"] = False
            break
    return calls


def _call(name: str, instances: Instances, inputs: dict[str, dict]) -> Callable[[], dict[str, torch.Tensor] | None]:
    """The call that an arm times."""

    def forwards(transformer):
        outputs = {}
        for guidance, kwargs in inputs.items():
            outputs[f"{guidance} video"], outputs[f"{guidance} audio"] = transformer(**kwargs)
        return outputs

    if name == FLOOR:
        return floor.record(instances.stock, lambda: forwards(instances.stock))
    if name == EAGER_GRAPH:
        return _captured(lambda: forwards(instances.stock))
    if name == FAST_GRAPHS:
        replayed = models.twin(instances.stock)
        ltx2_fastpath.enable(replayed, cuda_graphs=True)
        return lambda: forwards(replayed)
    transformer = {
        EAGER: instances.stock,
        COMPILED: instances.compiled,
        FAST: instances.fast,
        FAST_COMPILED: instances.fast_compiled,
        HIGH: instances.high,
    }[name]
    if name in COMPILED_ARMS:
        # The host branches on a tensor in the block that spatio-temporal guidance perturbs, which breaks that block's graph.
        transformer.compile_repeated_blocks(fullgraph="stg" not in inputs, dynamic=False)
    return lambda: forwards(transformer)


def _captured(call: Callable) -> Callable:
    """`call`, its kernels captured as one CUDA graph and replayed without anything copied in or out."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay():
        graph.replay()
        return outputs

    return replay


def compare(outputs: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict:
    """Which outputs equal the expected ones of the same name, and how far the others are from them."""
    return {
        "equal": {key: torch.equal(outputs[key], value) for key, value in expected.items()},
        "max_abs_difference": {key: (outputs[key].float() - value.float()).abs().max().item() for key, value in expected.items()},
    }


def add_report(section: dict, transformer: LTX2VideoTransformer3DModel) -> None:
    """Add to `section` the report of its fast transformer, and a note if nothing in there is fast."""
    report = ltx2_fastpath.report(transformer)
    section["fast_path"] = {"status": report.status, "sites": report.rows, "skipped": report.skipped}
    if not any(site["fast"] for site in report.rows):
        section["notes"].append("no fused operation ran: every site computes its eager chain")
