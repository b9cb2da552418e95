"""Every fused operation against its eager chain at production shapes: first the bits, then microseconds and bandwidth.

The arguments are laid out as in the model: ada values are views of one tensor, tables come from the model's own embeddings.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import apply_split_rotary_emb

import ltx2_fastpath
from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import ada_values, gated_residual, head_gate, qk_norm_split_rope, rms_norm_modulate
from ltx2_fastpath.ops.rope_tables import Rope
from ltx2_fastpath.ops.support import IndexedRows, full
from ltx2_fastpath.testing import models
from ltx2_fastpath.testing.models import Clip

from . import timing
from .forward import make_fast

EPS = 1e-6
TEXT_TOKENS = 1024
#: How ada values come: a row for all tokens, a row for each, or few distinct rows and the index of each token's.
ROW, PER_TOKEN, INDEXED = "row", "per token", "indexed"
SHORT, MEDIUM, LARGE, LONG = Clip(512, 768, 121), Clip(704, 1280, 121), Clip(1088, 1920, 121), Clip(1088, 1920, 241)
# (clip, batch size): what one guidance pass and two rows of classifier-free guidance have.
VIDEOS = ((SHORT, 1), (SHORT, 2), (MEDIUM, 1), (MEDIUM, 2), (LARGE, 1), (LONG, 1))
AUDIOS = ((SHORT, 1), (SHORT, 2), (LONG, 1))
AUDIO_TO_VIDEO = ((SHORT, 1), (MEDIUM, 1), (MEDIUM, 2))
VIDEO_TO_AUDIO = ((MEDIUM, 1), (SHORT, 2))
IMAGE_TO_VIDEO = ((SHORT, 1), (MEDIUM, 1), (MEDIUM, 2))


class Case(NamedTuple):
    """One operation at one shape.

    Attributes:
        operation, shape: for people; the shape is batch x tokens x width.
        op: a module of `ltx2_fastpath.ops`.
        make: builds the op's arguments, and a call of the host's chain on the same values.
    """

    operation: str
    shape: str
    op: Any
    make: Callable[[], tuple[tuple, Callable[[], object]]]


class Maker:
    """Builds arguments for the ops on `device`, for a transformer whose own weights are not needed (they can be on meta).

    The transformer must be fast (`ltx2_fastpath.enable`) for its compact rotary tables to be among them.
    """

    def __init__(self, transformer: LTX2VideoTransformer3DModel, device: str | torch.device, dtype: torch.dtype):
        self.transformer = transformer
        self.device = torch.device(device)
        self.dtype = dtype
        self._generator = torch.Generator(self.device).manual_seed(0)
        config = transformer.config
        self.video_width = config.num_attention_heads * config.attention_head_dim
        self.audio_width = config.audio_num_attention_heads * config.audio_attention_head_dim

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self.dtype, device=self.device)

    def ada(self, kind: str, count: int, batch: int, tokens: int, width: int) -> tuple[tuple, tuple]:
        """`count` ada values as the op gets them, and as the host does: views of one tensor."""
        if kind != INDEXED:
            values = self.normal(batch, 1 if kind == ROW else tokens, count, width).unbind(2)
            return values, values
        rows, index = self.normal(2, count, width), self.index(batch, tokens)
        return tuple(IndexedRows(row, index) for row in rows.unbind(1)), rows[index].unbind(2)

    def index(self, batch: int, tokens: int) -> torch.Tensor:
        """Which of two timesteps a token has: those of the first sixteenth, about a frame, are clean."""
        index = torch.ones((batch, tokens), dtype=torch.int32, device=self.device)
        index[:, : tokens // 16] = 0
        return index

    def tokens(self, clip: Clip) -> tuple[int, int]:
        """Video and audio tokens of a clip."""
        frames, rows, columns, audio = models.latent_sizes(self.transformer.config, *clip)
        return frames * rows * columns, audio

    def ropes(self, clip: Clip, batch: int, cross: bool) -> tuple:
        """What the video and the audio side of an attention get as rotary embeddings; between the two if `cross`."""
        transformer = self.transformer
        frames, rows, columns, audio = models.latent_sizes(transformer.config, *clip)
        video_coords = transformer.rope.prepare_video_coords(
            batch, frames, rows, columns, self.device, fps=models.FRAME_RATE
        )  # fmt: skip
        audio_coords = transformer.audio_rope.prepare_audio_coords(batch, audio, self.device).contiguous()
        if cross:
            return transformer.cross_attn_rope(video_coords[:, :1]), transformer.cross_attn_audio_rope(audio_coords[:, :1])
        return transformer.rope(video_coords), transformer.audio_rope(audio_coords)

    def qk_norm(self, width: int) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(width, eps=EPS, dtype=self.dtype, device=self.device)
        norm.weight.copy_(1.5 + 0.1 * self.normal(width))
        return norm

    def block_norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, eps=EPS, elementwise_affine=False)


def host_qk_norm_rope(norm_q, norm_k, q, k, rope_q, rope_k):
    """The host's own arithmetic for qk_norm_split_rope, which has an eager chain of the same bits but other launches."""
    q, k = norm_q(q), norm_k(k)
    return apply_split_rotary_emb(q, rope_q), apply_split_rotary_emb(k, rope_k)


def cases(make: Maker) -> Iterator[Case]:
    """Every case, in the order of the block."""
    yield from _ada_values(make)
    yield from _norms(make)
    yield from _qk_norms(make)
    yield from _pointwise(make)


def _streams(make: Maker) -> Iterator[tuple[int, int, int]]:
    """(batch, tokens, width) of the video and the audio stream."""
    for clip, batch in VIDEOS:
        yield batch, make.tokens(clip)[0], make.video_width
    for clip, batch in AUDIOS:
        yield batch, make.tokens(clip)[1], make.audio_width


def _modulations(make: Maker) -> Iterator[tuple[str, int, int, int]]:
    """(kind of ada values, batch, tokens, width)"""
    for sizes in _streams(make):
        yield ROW, *sizes
    for kind in (PER_TOKEN, INDEXED):
        for clip, batch in IMAGE_TO_VIDEO:
            yield kind, batch, make.tokens(clip)[0], make.video_width


def _shape(*sizes) -> str:
    return " x ".join(map(str, sizes))


def _both(op, *args):
    return args, functools.partial(op.eager, *args)


def _ada_values(make: Maker) -> Iterator[Case]:
    block = make.transformer.transformer_blocks[0]
    video, audio = block.video_a2v_cross_attn_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table
    tables = [block.scale_shift_table, block.audio_scale_shift_table]
    if block.cross_attn_adaln:
        tables += [block.prompt_scale_shift_table, block.audio_prompt_scale_shift_table]
    tables += [video[:4], video[4:], audio[:4], audio[4:]]

    def arguments(kind, batch, tokens):
        pairs: list[tuple] = []
        host_pairs: list[tuple] = []
        for rows, width in (table.shape for table in tables):
            table, temb = make.normal(rows, width), make.normal(batch, 1, rows * width)
            host_temb = temb
            if not pairs and kind != ROW:  # per-token timesteps reach the block through the first table alone
                (temb,), (host_temb,) = make.ada(kind, 1, batch, tokens, rows * width)
            pairs.append((table, temb))
            host_pairs.append((table, host_temb))
        return tuple(pairs), functools.partial(ada_values.eager, *host_pairs)

    sizes = [(ROW, batch, 1) for batch in (1, 2)]
    sizes += [(kind, batch, make.tokens(clip)[0]) for kind in (PER_TOKEN, INDEXED) for clip, batch in IMAGE_TO_VIDEO]
    for kind, batch, tokens in sizes:
        shape = _shape(batch, tokens, make.video_width)
        yield Case(f"ada values, {kind}", shape, ada_values, functools.partial(arguments, kind, batch, tokens))


def _norms(make: Maker) -> Iterator[Case]:
    def modulate(kind, batch, tokens, width):
        norm, x = make.block_norm(width), make.normal(batch, tokens, width)
        (shift, scale), (host_shift, host_scale) = make.ada(kind, 2, batch, tokens, width)
        return (norm, x, scale, shift), functools.partial(rms_norm_modulate.eager, norm, x, host_scale, host_shift)

    def residual(modulations, kind, batch, tokens, width):
        norm = make.block_norm(width) if modulations else None
        rows = norm, make.normal(batch, tokens, width), make.normal(batch, tokens, width)
        args, host_args = (
            (*rows, gate, *zip(values[::2], values[1::2]))
            for gate, *values in make.ada(kind, 1 + 2 * modulations, batch, tokens, width)
        )
        return args, functools.partial(gated_residual.eager, *host_args)

    operations = (
        ("RMSNorm + modulate", rms_norm_modulate, modulate),
        ("gated residual + norm + 1 modulation", gated_residual, functools.partial(residual, 1)),
        ("gated residual + norm + 2 modulations", gated_residual, functools.partial(residual, 2)),
        ("gated residual", gated_residual, functools.partial(residual, 0)),
    )
    for operation, op, arguments in operations:
        for kind, *sizes in _modulations(make):
            yield Case(f"{operation}, {kind}", _shape(*sizes), op, functools.partial(arguments, kind, *sizes))


def _qk_norms(make: Maker) -> Iterator[Case]:
    def arguments(batch, tokens, width, ropes):
        norms = make.qk_norm(width), make.qk_norm(width)
        return *norms, make.normal(batch, tokens[0], width), make.normal(batch, tokens[1], width), *ropes

    def with_rope(clip, batch, sides, width, cross, compact):
        with ltx2_fastpath.disabled(make.transformer):
            ropes = make.ropes(clip, batch, cross)
        stock = ropes[sides[0]], ropes[sides[1]]
        if compact:
            ropes = make.ropes(clip, batch, cross)
        tokens = make.tokens(clip)
        args = arguments(batch, (tokens[sides[0]], tokens[sides[1]]), width, (ropes[sides[0]], ropes[sides[1]]))
        norm_q, norm_k, q, k, *_ = args
        return args, functools.partial(host_qk_norm_rope, norm_q, norm_k, q, k, *stock)

    def without_rope(batch, tokens, width):
        return _both(qk_norm_split_rope, *arguments(batch, (tokens, TEXT_TOKENS), width, (None, None)))

    video, audio = 0, 1
    attentions = [(*at, (video, video), make.video_width, False) for at in VIDEOS]
    attentions += [(*at, (audio, audio), make.audio_width, False) for at in AUDIOS]
    attentions += [(*at, (video, audio), make.audio_width, True) for at in AUDIO_TO_VIDEO]
    attentions += [(*at, (audio, video), make.audio_width, True) for at in VIDEO_TO_AUDIO]
    for compact in (False, True):
        operation = "QK-norm + RoPE, compact tables" if compact else "QK-norm + RoPE"
        for clip, batch, sides, width, cross in attentions:
            tokens_q, tokens_k = (make.tokens(clip)[side] for side in sides)
            shape = _shape(batch, f"{tokens_q}/{tokens_k}", width)
            build = functools.partial(with_rope, clip, batch, sides, width, cross, compact)
            yield Case(operation, shape, qk_norm_split_rope, build)
    for batch, tokens, width in _streams(make):
        shape = _shape(batch, f"{tokens}/{TEXT_TOKENS}", width)
        yield Case("QK-norm", shape, qk_norm_split_rope, functools.partial(without_rope, batch, tokens, width))


def _pointwise(make: Maker) -> Iterator[Case]:
    config = make.transformer.config
    heads = {make.video_width: config.num_attention_heads, make.audio_width: config.audio_num_attention_heads}

    def gate(batch, tokens, width):
        x = make.normal(batch, tokens, heads[width], width // heads[width])
        return _both(head_gate, x, make.normal(batch, tokens, heads[width]))

    def prompt(batch, tokens, width):
        (shift, scale), _ = make.ada(ROW, 2, batch, tokens, width)
        return _both(rms_norm_modulate, None, make.normal(batch, tokens, width), scale, shift)

    for sizes in _streams(make):
        yield Case("head gate", _shape(*sizes), head_gate, functools.partial(gate, *sizes))
    for width in (make.video_width, make.audio_width):
        for batch in (1, 2):
            sizes = batch, TEXT_TOKENS, width
            yield Case("prompt modulation", _shape(*sizes), rms_norm_modulate, functools.partial(prompt, *sizes))


def bytes_moved(args, result) -> int:
    """Bytes that an operation cannot avoid: each distinct input tensor read once, each result written once.

    A tensor given twice counts once (rotary tables shared by q and k), and so does a broadcast row. What a result shares with
    the input (the index of indexed rows) is not written.
    """
    read, written = ({(x.data_ptr(), x.shape, x.stride()): x for x in _tensors(value)} for value in (args, result))
    return sum(map(_bytes, read.values())) + sum(_bytes(x) for key, x in written.items() if key not in read)


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, Rope):
        yield from _tensors(value.compact)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _expanded(result):
    """`result` with every IndexedRows as the tensor that it stands for."""
    if isinstance(result, (torch.Tensor, IndexedRows)):
        return full(result)
    return [_expanded(item) for item in result]


def _bytes(x: torch.Tensor) -> int:
    return math.prod(size for size, step in zip(x.shape, x.stride()) if step) * x.element_size()


def measure(case: Case, meter, repeats: int) -> dict:
    """One row of results. It has times only where the fused operation gave the bits of the host's chain.

    `equal` is None, with the reason in `note`, where the operation refuses these arguments (an optional package is missing)
    or the GPU has too little memory for the eager chain.
    """
    row: dict[str, Any] = {"operation": case.operation, "shape": case.shape, "equal": None}
    try:
        args, eager = case.make()
        if reason := case.op.refusal(*args):
            return row | {"note": reason}
        site = FirstSight(case.operation, case.op)
        site(*args)
        (verdict,) = site.verdicts.values()
        result = site(*args)
        row |= {"equal": verdict.fast and same_bits(_expanded(result), eager()), "note": verdict.note}
        if not row["equal"]:
            return row
        row["bytes"] = bytes_moved(args, result)
        del result
        samples = timing.interleave({"eager": eager, "fused": lambda: site(*args)}, meter.time_cold, repeats)
    except torch.OutOfMemoryError:
        return row | {"equal": None, "note": "too little GPU memory"}
    row |= {name: timing.summary(of_arm) for name, of_arm in samples.items()}
    row["speed_up"] = row["eager"]["gpu_ms"] / row["fused"]["gpu_ms"]
    row["gb_s"] = row["bytes"] / row["fused"]["gpu_ms"] / 1e6
    return row


@torch.no_grad()
def run(section: dict, version: str, meter, *, device="cuda", repeats: int, progress, save) -> None:
    """Fill `section` with a row per case, and call `save` after each. Raises `forward.Unusable` where the fast path is off."""
    transformer = models.outline(version)
    make_fast(transformer)
    todo = list(cases(Maker(transformer, device, torch.bfloat16)))
    progress("kernels: copy bandwidth")
    bandwidth = meter.copy_bandwidth()
    section |= {"version": version, "dtype": "bfloat16", "copy_gb_s": bandwidth / 1e9, "equal": True, "rows": []}
    for i, case in enumerate(todo, 1):
        progress(f"kernels {i}/{len(todo)}: {case.operation}, {case.shape}")
        row = measure(case, meter, repeats)
        if "gb_s" in row:
            row["copy_share"] = row["gb_s"] / section["copy_gb_s"]
        section["equal"] = section["equal"] and row["equal"] is not False
        section["rows"].append(row)
        save()
