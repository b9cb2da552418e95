"""What the fast path will do on this machine, and why: the check behind ``python -m ltx2_fastpath``.

Every operation is judged by `FirstSight`, as in a pipeline, on synthetic arguments of production width; then one full-width
layer of LTX-2.3 runs stock and fast, and the bits are compared. The findings are one dict that `json` can write. What they
mean (`outcome`) and what to do about them (`problems`) are functions of the findings alone.
"""

import contextlib
import logging
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import api
from .console import align
from .environment import PACKAGES, environment
from .first_sight import FirstSight, advice, same_bits

SCHEMA = 1  # raised when the meaning of a key changes
ROWS = 4096
HEADS = 32
DECODER_WIDTH = 256  # of the last stage of LTX-2.5's diffusion decoder, in heads of 64
WIDTHS = {4096: "video", 2048: "audio"}
CUDA, TRITON = "CUDA C++", "Triton"
_DTYPE = torch.bfloat16

Case = tuple[str, int, Any, tuple]


def findings(progress: Callable[[str], None] = lambda text: None) -> dict:
    """Everything that was found out, with `outcome` and `problems` filled in. `progress` is told what is done now."""
    started = time.monotonic()
    progress("versions")
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(),
        "triton_error": _triton_error(),
        "host": host(),
        "operations": [],
        "layer": None,
    }
    if not _blockers(found):
        with _quiet(), torch.no_grad():
            device = torch.device("cuda", torch.cuda.current_device())
            for name, width, op, args in cases(device):
                progress(f"{name}, width {width}")
                found["operations"].append({"operation": name, "width": width, "candidates": judge(op, args)})
            progress("one layer of LTX-2.3")
            found["layer"] = layer(device)
    found["outcome"] = outcome(found)
    found["problems"] = [{"problem": what, "advice": todo} for what, todo in problems(found)]
    found["seconds"] = round(time.monotonic() - started, 1)
    return found


def _triton_error() -> str | None:
    try:
        from .ops import support  # noqa: F401
    except Exception as error:  # a broken Triton raises anything, a DLL's OSError included
        return f"{type(error).__name__}: {error}"
    return None


def host() -> dict:
    """error: why LTX-2 cannot be imported from diffusers, or None. unknown: the methods that we replace whose source we do not
    know, and private names that are not there; None where that cannot be found out because Triton is missing."""
    try:
        import diffusers
        from diffusers import LTX2VideoTransformer3DModel  # noqa: F401
    except Exception as error:  # no diffusers, one without LTX-2, or one that cannot be imported here
        return {"error": f"{type(error).__name__}: {error}", "unknown": None}
    if _triton_error():
        return {"error": None, "unknown": None}
    from .patches import ROOMS
    from .patches.host import missing_names, unknown_sources

    rooms = [room for room in ROOMS if hasattr(diffusers, room.model)]
    unknown = [name for room in rooms for name in unknown_sources(room)]
    return {"error": None, "unknown": unknown + missing_names()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What falls back is told in the findings, so no warnings beside them."""
    logger = logging.getLogger("ltx2_fastpath")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def cases(device: torch.device) -> Iterator[Case]:
    """(name, width, op, arguments) of every operation at both widths, and of the decoder's, with bf16 values drawn at random."""
    from diffusers.models.normalization import RMSNorm

    from .ops import ada_values, gated_residual, head_gate, qk_norm_split_rope, rms_norm_modulate
    from .ops.support import random

    def normal(*shape, dtype=_DTYPE):
        return random(*shape, dtype=dtype, device=device)

    for width in WIDTHS:
        rows = normal(4, 1, ROWS, width).unbind(0)
        values = normal(1, 1, 5, width).unbind(2)
        modulations = values[1:3], values[3:5]
        norm = RMSNorm(width, eps=1e-6, elementwise_affine=False)
        per_token = normal(9, width), normal(1, ROWS, 9 * width)
        by_row = [(normal(n, width), normal(1, 1, n * width)) for n in (2, 4, 1)]
        yield "ada values", width, ada_values, (per_token, *by_row)
        del per_token
        yield "RMSNorm + modulate", width, rms_norm_modulate, (norm, rows[0], *modulations[0])
        yield "gated residual + RMSNorm", width, gated_residual, (norm, rows[0], rows[1], values[0], *modulations)
        yield "gated residual", width, gated_residual, (None, rows[0], rows[1], values[0])

        qk_norms = [torch.nn.RMSNorm(width, eps=1e-6, dtype=_DTYPE, device=device).requires_grad_(False) for _ in range(2)]
        for qk_norm in qk_norms:
            qk_norm.weight.copy_(1 + 0.1 * normal(width))
        for name, make_rope in (("QK-norm + RoPE", _full_rope), ("QK-norm + compact RoPE", _compact_rope)):
            rope = make_rope(normal, width)
            yield name, width, qk_norm_split_rope, (*qk_norms, rows[0], rows[1], rope, rope)
        yield "QK-norm", width, qk_norm_split_rope, (*qk_norms, rows[0], rows[1], None, None)
        yield "head gate", width, head_gate, (rows[0].unflatten(2, (HEADS, -1)), normal(1, ROWS, HEADS))
    yield from _decoder_cases(device, normal)


def _decoder_cases(device: torch.device, normal) -> Iterator[Case]:
    from .ops import pixel_shuffle, qk_norm_rope_3d, residual_rms_norm, swiglu, swiglu_mlp

    width, hidden, grid = DECODER_WIDTH, 4 * DECODER_WIDTH, (2, 2, ROWS // 4)

    def norm(size):
        made = torch.nn.RMSNorm(size, eps=1e-6, dtype=_DTYPE, device=device).requires_grad_(False)
        made.weight.copy_(1 + 0.1 * normal(size))
        return made

    x, update, *_ = rows = normal(2, 1, *grid, width)
    scale, shift = normal(2, 1, 1, 1, 1, width)
    yield "decoder: residual + RMSNorm + modulate", width, residual_rms_norm, (norm(width), x, (update,), (scale, shift))
    q, k = rows.unflatten(5, (-1, 64))
    pairs = 8, 12, 12
    angle = normal(sum(size * of_axis for size, of_axis in zip(grid, pairs)), dtype=torch.float32)
    rope = qk_norm_rope_3d.Tables(angle.cos(), angle.sin(), grid, pairs)
    yield "decoder: QK-norm + 3-D RoPE", width, qk_norm_rope_3d, (norm(64), norm(64), 0.125, q, k, rope)
    linears = [
        torch.nn.Linear(*sizes, bias=False, dtype=_DTYPE, device=device) for sizes in [(width, hidden)] * 2 + [(hidden, width)]
    ]
    yield "decoder: SwiGLU", width, swiglu, tuple(normal(2, ROWS, hidden))
    yield "decoder: MLP", width, swiglu_mlp, (*linears, x, ROWS // 2)
    yield "decoder: pixel shuffle", width, pixel_shuffle, (normal(1, *grid, 8 * width), (2, 2, 2), True)


def _full_rope(normal, width: int):
    angle = normal(1, ROWS, HEADS, width // HEADS // 2, dtype=torch.float32).transpose(1, 2)
    return angle.cos(), angle.sin()


def _compact_rope(normal, width: int):
    """Tables in which every third channel of a token depends on one coordinate of 64 and the others on another."""
    from .ops.rope_tables import CompactTables, Rope

    steps, channels = int(ROWS**0.5), width // 2
    angle = normal(steps, channels, dtype=torch.float32)
    columns = normal(steps, channels // 4, 2, dtype=torch.float32)
    token = torch.arange(ROWS, device=angle.device)
    rows = torch.stack((token // steps, token % steps)).view(2, 1, ROWS).to(torch.int32)
    return Rope(CompactTables(angle.cos(), angle.sin(), rows, HEADS, torch.cat((columns.cos(), columns.sin()), dim=2)))


def judge(op, args: tuple) -> list[dict]:
    """What `FirstSight` says of each candidate of `op` on `args`; of an implementation, only up to the first that verifies.

    A dict per candidate: implementation, candidate, ok, note (how it was verified, or why it was not), and compile_s, the
    seconds of the first launch, which is all compilation.
    """
    if reason := op.refusal(*args):
        return [{"implementation": None, "candidate": None, "ok": False, "note": reason, "compile_s": None}]
    tried: list[dict] = []
    for candidate in op.CANDIDATES:
        implementation = _implementation(candidate)
        if any(earlier["ok"] and earlier["implementation"] == implementation for earlier in tried):
            continue
        seconds: list[float] = []
        site = FirstSight("machine check", _with_one_candidate(op, candidate, seconds))
        try:
            site(*args)
            (verdict,) = site.verdicts.values()
            ok, note = verdict.fast, verdict.note
        except torch.OutOfMemoryError:
            ok, note = False, "too little GPU memory"
        tried.append(
            {
                "implementation": implementation,
                "candidate": None if candidate is None else str(candidate),
                "ok": ok,
                "note": note,
                "compile_s": round(seconds[0], 2) if seconds else None,
            }
        )
    return tried


def _implementation(candidate) -> str:
    name = candidate[0] if isinstance(candidate, tuple) else candidate
    return CUDA if name == "cuda" else TRITON


def _with_one_candidate(op, candidate, seconds: list[float]):
    """`op` with no candidate but one, which notes how long its launches take."""

    def launch(*args):
        started = time.perf_counter()
        try:
            return op.launch(*args)
        finally:
            seconds.append(time.perf_counter() - started)

    return types.SimpleNamespace(**vars(op) | {"CANDIDATES": (candidate,), "launch": launch})


def layer(device: torch.device) -> dict:
    """`compare` on one full-width layer of LTX-2.3 with random weights and 4,096 video tokens."""
    try:
        from .testing import models

        transformer = models.build_transformer("2.3", num_layers=1, device=device, dtype=_DTYPE)
        return compare(transformer, models.inputs(transformer, height=512, width=512, num_frames=121))
    except Exception as error:  # too little memory, a driver's error: told, not raised
        return {"equal": None, "fast": 0, "stock": 0, "note": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def compare(transformer: torch.nn.Module, inputs: dict) -> dict:
    """Forwards of `transformer`, stock and fast, on `inputs`.

    Returns:
        equal: whether the fast path gave stock's bits, at its first call, which verifies, and at its second; None where it
        stayed off. fast, stock: calls of operations in the second forward. note: why it stayed off, or None.
    """
    expected = transformer(**inputs)
    handle = api.enable(transformer)
    try:
        if not handle.active:
            return {"equal": None, "fast": 0, "stock": 0, "note": handle.reason}
        equal = same_bits(tuple(transformer(**inputs)), tuple(expected))
        before = _calls(transformer)
        equal = same_bits(tuple(transformer(**inputs)), tuple(expected)) and equal
        fast, stock = (after - then for after, then in zip(_calls(transformer), before))
        return {"equal": equal, "fast": fast, "stock": stock, "note": None}
    finally:
        api.disable(transformer)


def _calls(transformer) -> tuple[int, int]:
    rows = api.report(transformer).rows
    return sum(row["fast"] for row in rows), sum(row["stock"] for row in rows)


def outcome(found: dict) -> dict:
    """What somebody who calls ``enable`` on this machine gets.

    Returns:
        active: whether the lossless fast path will run, with every operation. partial: whether it will run without some of them.
        cuda, triton, stock: the operations by what computes them. equal: what `compare` found.
    """
    computed_by: dict[str, set] = {}
    for row in found["operations"]:
        implementation = next((tried["implementation"] for tried in row["candidates"] if tried["ok"]), None)
        computed_by.setdefault(row["operation"], set()).add(implementation)
    stock = [name for name, by in computed_by.items() if None in by]
    triton = [name for name, by in computed_by.items() if None not in by and TRITON in by]
    cuda = [name for name, by in computed_by.items() if by == {CUDA}]
    ran = bool(found["layer"]) and found["layer"]["equal"] is True and found["layer"]["fast"] > 0
    complete = ran and not stock
    return {
        "active": complete,
        "partial": ran and not complete,
        "cuda": cuda,
        "triton": triton,
        "stock": stock,
        "equal": found["layer"] and found["layer"]["equal"],
    }


def problems(found: dict) -> list[tuple[str, str]]:
    """(what is missing or wrong, what to do about it), what keeps the fast path off first."""
    listed = _blockers(found)
    layer_note = found["layer"] and found["layer"]["note"]
    if layer_note:
        listed.append((f"one layer of LTX-2.3 could not be compared ({layer_note})", _after_error(layer_note)))
    if found["layer"] and found["layer"]["equal"] is False:
        listed.append(("one layer of LTX-2.3 gave other bits than stock diffusers", f"Do not use the fast path here. {_REPORT}"))
    failed: dict[tuple[str, str], list[str]] = {}
    for row in found["operations"]:
        if not any(tried["ok"] for tried in row["candidates"]):
            note = "; ".join(tried["note"] for tried in row["candidates"])
            failed.setdefault((note, _after_error(note)), []).append(f"{row['operation']} at width {row['width']}")
    listed += [(f"{', '.join(where)}: stock, because {note}", todo) for (note, todo), where in failed.items()]
    at = found["environment"]
    if not at["triton_cache_writable"]:
        listed.append(("Triton's cache folder cannot be written to", "Set TRITON_CACHE_DIR to a folder that can."))
    if at["cuda-core"] is None and at["cuda"]:
        wheel = "'cuda-core[cu12]'" if at["cuda"].startswith("12.") else "'cuda-core[cu13]'"
        listed.append(
            (
                "cuda.core is not installed, so the kernels run in their Triton form",
                f"pip install {wheel}. No CUDA toolkit is needed.",
            )
        )
    return listed


_REPORT = "Please report it, with the output of `python -m ltx2_fastpath --json`."


def _blockers(found: dict) -> list[tuple[str, str]]:
    """The problems that keep the fast path off altogether."""
    at, host_error, unknown = found["environment"], found["host"]["error"], found["host"]["unknown"]
    listed = []
    if at["gpu"] is None and not at["cuda"] and not at["hip"]:
        listed.append(("this build of torch has no CUDA", "Install one that has; pytorch.org says which fits your driver."))
    elif at["gpu"] is None:
        listed.append(("no CUDA device is available", "Check that nvidia-smi lists the GPU and CUDA_VISIBLE_DEVICES names it."))
    elif at["cuda"] and at["gpu_capability"] < [8, 0]:
        listed.append(("the GPU is older than compute capability 8.0", "Use an Ampere GPU or a newer one."))
    if found["triton_error"]:
        todo = "Reinstall torch and triton." if at["triton"] else "pip install triton (torch for CUDA on Linux brings it)."
        listed.append((f"Triton cannot be imported ({found['triton_error']})", todo))
    known = "pip install 'diffusers>=0.38,<=0.42.1', the releases that are known."
    if host_error:
        listed.append((f"LTX-2 cannot be imported from diffusers ({host_error})", known))
    elif unknown:
        listed.append((f"this diffusers release is not known: {', '.join(unknown)} differ", known))
    return listed


def _after_error(note: str) -> str:
    if known := advice(note):
        return known
    if "OutOfMemory" in note or "too little GPU memory" in note:
        return "Free GPU memory (this check needs a few GB) and run it again."
    if "compiler" in note:
        return "Install a C compiler (Triton builds a launcher with it), or 'cuda-core[cu13]'."
    return f"Results are not affected, only speed. {_REPORT}"


def text(found: dict) -> str:
    """The findings for a person."""
    at, outcome_ = found["environment"], found["outcome"]
    gpu = "none"
    if at["gpu"]:
        gpu = f"{at['gpu']}, compute capability {'.'.join(map(str, at['gpu_capability']))}, {at['gpu_memory_gib']} GiB"
    host_ = found["host"]
    sources = "sources known"
    if host_["unknown"] is None:
        sources = "cannot be used" if host_["error"] else "sources not checked"
    elif host_["unknown"]:
        sources = f"sources not known: {', '.join(host_['unknown'])}"
    runtime = f", for CUDA {at['cuda']}" if at["cuda"] else f", for ROCm {at['hip']}" if at["hip"] else ", without CUDA"
    versions = {name: at[name] or "not installed" for name in PACKAGES}
    versions["torch"] += runtime
    versions["diffusers"] += f", {sources}"
    lines = [
        f"ltx2_fastpath {at['ltx2_fastpath']} on this machine",
        "",
        align([["GPU", gpu], ["driver", at["driver"] or "-"], ["python", at["python"]], *map(list, versions.items())], left=2),
    ]
    if found["operations"]:
        rows = [["operation", "width", "implementation", "verified", "first launch s"]]
        notes = []
        for row in found["operations"]:
            for tried in row["candidates"]:
                seconds = "" if tried["compile_s"] is None else f"{tried['compile_s']:.2f}"
                verified = "bit-equal" if tried["ok"] else "no"
                rows.append([row["operation"], str(row["width"]), tried["implementation"] or "-", verified, seconds])
                if not tried["ok"]:
                    notes.append(f"{row['operation']}, width {row['width']}, {tried['implementation'] or 'all'}: {tried['note']}")
        lines += ["", f"Each operation against its eager chain, {ROWS:,} rows, bf16:", align(rows, left=4), *notes]
    if found["layer"]:
        lines += ["", _layer_text(found["layer"])]
    lines += ["", *_outcome_text(outcome_)]
    if found["problems"]:
        lines += ["", "What to do:"]
        lines += [f"- {entry['problem']}.\n  {entry['advice']}" for entry in found["problems"]]
    return "\n".join(lines)


def _layer_text(layer_: dict) -> str:
    what = f"One full-width layer of LTX-2.3, {ROWS:,} video tokens"
    if layer_["equal"] is None:
        return f"{what}: not compared ({layer_['note']})."
    bits = "bit-equal with stock diffusers" if layer_["equal"] else "OTHER BITS than stock diffusers"
    return f"{what}: {bits}; {layer_['fast']} calls fast, {layer_['stock']} stock."


def _outcome_text(outcome_: dict) -> list[str]:
    if outcome_["active"]:
        lines = ["You will get the lossless fast path."]
    elif outcome_["partial"]:
        lines = [
            "You will get the lossless fast path in part. What is listed as stock runs as in diffusers; results are the same."
        ]
    elif outcome_["equal"] is False:
        return ["The fast path is NOT lossless here."]
    else:
        return ["You will get stock diffusers: `enable` changes nothing here, and results are the same."]
    for title, names in ((CUDA, outcome_["cuda"]), (TRITON, outcome_["triton"]), ("stock", outcome_["stock"])):
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    return lines
