"""Every op at the shapes of real requests: are its bits those of the eager chain, by every implementation?

Memory is filled with NaN before a kernel writes to it. What torch's release decides is the order of the last warp sum: the
candidates of the other order are left out here, FirstSight rejects them.
"""

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import (
    ada_values,
    cuda,
    gated_residual,
    head_gate,
    qk_norm_split_rope,
    rms_norm_modulate,
)
from ltx2_fastpath.ops.numerics import HALVES, PAIRS
from ltx2_fastpath.ops.rope_tables import Rope, compact_tables
from ltx2_fastpath.ops.support import IndexedRows, full
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("nan_memory")
DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ORDER = HALVES if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9) else PAIRS
NORMS = [candidate for candidate in rms_norm_modulate.CANDIDATES if candidate[1] == ORDER]
FASTEST, SPARE = NORMS[0], NORMS[-1]  # CUDA C++ where it can be had, and Triton
IMPLEMENTATIONS = cuda.IMPLEMENTATIONS
FIRST = IMPLEMENTATIONS[:1]
needs_cuda_core = pytest.mark.skipif("cuda" not in IMPLEMENTATIONS, reason="needs cuda.core")


@pytest.fixture
def values():
    """values(*shape, dtype=...): other normal values on the GPU at each call, the same in each run of the test."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return lambda *shape, dtype=BF16: torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def check(op, args, candidates):
    """Every candidate's bits are those of the eager chain, and the public function takes the arguments."""
    assert op.refusal(*args) is None
    assert candidates
    expected = op.eager(*args)
    for candidate in candidates:
        assert_same_bits(op.launch(candidate, *args), expected, candidate)


def assert_same_bits(found, expected, candidate):
    if same_bits(plain(found), plain(expected)):
        return
    pairs = [(mine, host) for mine, host in zip(flat(plain(found)), flat(plain(expected))) if not same_bits(mine, host)]
    pytest.fail(f"{candidate}: {[int((mine != host).sum()) for mine, host in pairs]} values differ")


def plain(found):
    """Tensors for indexed rows."""
    if isinstance(found, (torch.Tensor, IndexedRows)):
        return full(found)
    return [plain(part) for part in found]


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [tensor for part in found for tensor in flat(part)]


def make_norm(width):
    return RMSNorm(width, eps=1e-6, elementwise_affine=False)


def sprinkled(x):
    """x with what arithmetic treats specially strewn over it: NaN, infinities, zeros of both signs, denormals, extremes."""
    info = torch.finfo(x.dtype)
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.tiny, info.tiny / 4, -info.tiny / 2, info.max, info.min],
        device=x.device,
        dtype=x.dtype,
    )
    x = x.clone()
    rows = x.view(-1, x.shape[-1])
    for i in range(0, min(len(rows), 200), 2):  # every second row stays finite
        rows[i, (7 * i) % rows.shape[1]] = special[i // 2 % len(special)]
    rows[1:200:10] *= info.tiny * 8  # whole rows of denormals
    return x


def indexed(values, *, rows, batch, tokens, width, count, dtype=BF16):
    """Per-token ada values of a few distinct timesteps, as the block gets them."""
    index = (torch.arange(batch * tokens, device=DEVICE) * 7 % rows).to(torch.int32).view(batch, tokens)
    return [IndexedRows(value, index) for value in values(rows, count, width, dtype=dtype).unbind(1)]


def ada_rows(values, *, batch, tokens, width, count=9, dtype=BF16):
    """Ada values [B, T, D] as the block gets them: every ninth row of one allocation."""
    return values(batch, tokens, count, width, dtype=dtype).unbind(2)


# --- norms and residuals: (batch, tokens, width) of the streams, the prompts and the smallest requests
VIDEO = [(1, 6144, 4096), (2, 6144, 4096), (1, 14080, 4096), (2, 14080, 4096), (1, 32640, 4096), (1, 63240, 4096)]
AUDIO = [(1, 126, 2048), (2, 126, 2048), (1, 251, 2048)]
TEXT = [(1, 1024, 4096), (2, 1024, 2048)]
FEW = [(1, 1, 2048), (1, 2, 4096), (1, 7, 2048), (1, 8, 4096), (1, 15, 2048), (1, 16, 4096), (2, 5, 2048)]


@pytest.mark.parametrize("batch, tokens, width", VIDEO + AUDIO)
def test_norm_and_modulation(values, batch, tokens, width):
    x, norm = values(batch, tokens, width), make_norm(width)
    shift, scale, *_ = ada_rows(values, batch=batch, tokens=1, width=width)
    check(rms_norm_modulate, (norm, x, scale, shift), [FASTEST])
    check(rms_norm_modulate, (norm, x, *indexed(values, rows=2, batch=batch, tokens=tokens, width=width, count=2)), [FASTEST])
    if tokens <= 14080:
        shift, scale, *_ = ada_rows(values, batch=batch, tokens=tokens, width=width)
        check(rms_norm_modulate, (norm, x, scale, shift), [FASTEST])


@pytest.mark.parametrize("batch, tokens, width", TEXT)
def test_modulation_of_the_prompts(values, batch, tokens, width):
    shift, scale = ada_rows(values, batch=batch, tokens=1, width=width, count=2)
    check(rms_norm_modulate, (None, values(batch, tokens, width), scale, shift), NORMS)


@pytest.mark.parametrize("batch, tokens, width", VIDEO + AUDIO)
def test_residuals(values, batch, tokens, width):
    x, update, norm = values(batch, tokens, width), values(batch, tokens, width), make_norm(width)
    kinds = [ada_rows(values, batch=batch, tokens=1, width=width)]
    kinds.append(indexed(values, rows=2, batch=batch, tokens=tokens, width=width, count=5))
    if tokens <= 14080:
        kinds.append(ada_rows(values, batch=batch, tokens=tokens, width=width))
    for gate, *ada in kinds:
        first, second = ada[:2], ada[2:4]
        check(gated_residual, (norm, x, update, gate, first), [FASTEST])  # text cross-attention, feed-forward
        check(gated_residual, (norm, x, update, gate, first, second), [FASTEST])  # between the streams
        check(gated_residual, (None, x, update, gate), [FASTEST])  # the end of the block
    gate, *ada = kinds[0]
    check(gated_residual, (norm, x, update, gate), [FASTEST])  # 2.0: no modulation, no gate
    check(gated_residual, (norm, x, update, None, ada[:2], ada[2:4]), [FASTEST])


@needs_cuda_core
@pytest.mark.parametrize("batch, tokens, width", FEW)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norms_of_few_rows(values, batch, tokens, width, dtype):
    """torch sums under 16 rows in an order that depends on how many there are."""
    norm = make_norm(width)
    gate, *ada = ada_rows(values, batch=batch, tokens=1, width=width, dtype=dtype)
    for _ in range(20):
        x, update = (values(batch, tokens, width, dtype=dtype) for _ in range(2))
        check(rms_norm_modulate, (norm, x, *ada[:2]), [FASTEST])
        check(gated_residual, (norm, x, update, gate, ada[:2], ada[2:4]), [FASTEST])


@pytest.mark.parametrize("width", [4096, 2048])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_norms_in_other_dtypes(values, width, dtype):
    x, update, norm = values(2, 6144, width, dtype=dtype), values(2, 6144, width, dtype=dtype), make_norm(width)
    for tokens in (1, 6144):
        gate, *ada = ada_rows(values, batch=2, tokens=tokens, width=width, dtype=dtype)
        check(rms_norm_modulate, (norm, x, *ada[:2]), [FASTEST])
        check(rms_norm_modulate, (None, x, *ada[:2]), [FASTEST])
        check(gated_residual, (norm, x, update, gate, ada[:2], ada[2:4]), [FASTEST])
        check(gated_residual, (None, x, update, gate), [FASTEST])


@pytest.mark.parametrize("width, tokens", [(4096, 6144), (2048, 126)])
def test_norms_in_triton(values, width, tokens):
    """The form that runs where cuda.core is not installed."""
    x, update, norm = values(2, tokens, width), values(2, tokens, width), make_norm(width)
    gate, *ada = ada_rows(values, batch=2, tokens=1, width=width)
    check(rms_norm_modulate, (norm, x, *ada[:2]), [SPARE])
    check(gated_residual, (norm, x, update, gate, ada[:2], ada[2:4]), [SPARE])
    check(gated_residual, (None, x, update, gate), [SPARE])
    assert SPARE[0] == "triton"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_norms_and_residuals_of_special_values(values, dtype):
    x, update = (sprinkled(values(2, 300, 2048, dtype=dtype)) for _ in range(2))
    gate, *ada = (sprinkled(value.contiguous()) for value in ada_rows(values, batch=2, tokens=300, width=2048, dtype=dtype))
    norm = make_norm(2048)
    check(rms_norm_modulate, (norm, x, *ada[:2]), [FASTEST])
    check(rms_norm_modulate, (None, x, *ada[:2]), [FASTEST])
    check(gated_residual, (norm, x, update, gate, ada[:2], ada[2:4]), [FASTEST])
    check(gated_residual, (None, x, update, gate), [FASTEST])


def test_norms_of_strided_rows(values):
    wide = values(3, 400, 4096 + 64)
    x, update = wide[1:, 100:, 64:], wide[:2, :300, :4096]
    by_token = values(300, 2, 4096).transpose(0, 1)
    gate, *ada = ada_rows(values, batch=2, tokens=1, width=4096)
    norm = make_norm(4096)
    for args in ((x, update), (by_token, x), (x, by_token)):
        check(gated_residual, (norm, *args, gate, ada[:2], ada[2:4]), [FASTEST])
        check(rms_norm_modulate, (norm, args[0], *ada[:2]), [FASTEST])


# --- q and k: (batch, tokens of q, tokens of k, head_dim), 32 heads each
PAIRS_OF_TOKENS = [
    (1, 6144, 6144, 128), (2, 6144, 6144, 128), (1, 14080, 14080, 128), (2, 14080, 14080, 128), (1, 32640, 32640, 128),
    (1, 63240, 63240, 128), (1, 126, 126, 64), (2, 126, 126, 64), (1, 251, 251, 64), (1, 6144, 126, 64), (1, 14080, 126, 64),
    (2, 14080, 126, 64), (1, 126, 14080, 64), (2, 126, 6144, 64),
]  # fmt: skip
TEXT_PAIRS = [(1, 6144, 1024, 128), (2, 14080, 1024, 128), (2, 126, 1024, 64)]


def make_qk(values, batch, tokens_q, tokens_k, head_dim, dtype=BF16):
    """Two norms with weights, q and k as their projections leave them."""
    width = 32 * head_dim
    norms = []
    for _ in range(2):
        norm = torch.nn.RMSNorm(width, eps=1e-6, device=DEVICE, dtype=dtype)
        norm.weight.data = values(width, dtype=dtype)
        norms.append(norm.requires_grad_(False))
    return *norms, values(batch, tokens_q, width, dtype=dtype), values(batch, tokens_k, width, dtype=dtype)


def make_rope(values, batch, tokens, head_dim):
    """cos and sin as the host lays them out: [B, S, H, r] seen as [B, H, S, r]."""
    angle = values(batch, tokens, 32, head_dim // 2, dtype=FP32) * 100
    return angle.cos().transpose(1, 2), angle.sin().transpose(1, 2)


@pytest.mark.parametrize("batch, tokens_q, tokens_k, head_dim", PAIRS_OF_TOKENS)
def test_qk_norm_and_rope(values, batch, tokens_q, tokens_k, head_dim):
    qk = make_qk(values, batch, tokens_q, tokens_k, head_dim)
    rope_q = make_rope(values, batch, tokens_q, head_dim)
    check(qk_norm_split_rope, (*qk, rope_q, make_rope(values, batch, tokens_k, head_dim)), FIRST)
    if tokens_q == tokens_k:
        check(qk_norm_split_rope, (*qk, rope_q, rope_q), FIRST)
    if tokens_q <= 14080:
        check(
            qk_norm_split_rope, (None, None, *qk[2:], rope_q, make_rope(values, batch, tokens_k, head_dim)), IMPLEMENTATIONS[:1]
        )


@pytest.mark.parametrize("batch, tokens_q, tokens_k, head_dim", TEXT_PAIRS)
def test_qk_norm_without_rope(values, batch, tokens_q, tokens_k, head_dim):
    check(qk_norm_split_rope, (*make_qk(values, batch, tokens_q, tokens_k, head_dim), None, None), FIRST)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("tokens_q, tokens_k, head_dim", [(6144, 6144, 128), (6144, 126, 64)])
def test_qk_norm_and_rope_in_other_dtypes(values, dtype, tokens_q, tokens_k, head_dim):
    qk = make_qk(values, 2, tokens_q, tokens_k, head_dim, dtype)
    ropes = [make_rope(values, 2, tokens, head_dim) for tokens in (tokens_q, tokens_k)]
    check(qk_norm_split_rope, (*qk, *ropes), FIRST)
    check(qk_norm_split_rope, (*qk, None, None), FIRST)


@pytest.mark.parametrize("tokens_q, tokens_k, head_dim", [(6144, 6144, 128), (126, 6144, 64)])
def test_qk_norm_and_rope_in_triton(values, tokens_q, tokens_k, head_dim):
    qk = make_qk(values, 1, tokens_q, tokens_k, head_dim)
    ropes = [make_rope(values, 1, tokens, head_dim) for tokens in (tokens_q, tokens_k)]
    assert IMPLEMENTATIONS[-1] == "triton"
    check(qk_norm_split_rope, (*qk, *ropes), IMPLEMENTATIONS[-1:])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_qk_norm_and_rope_of_special_values(values, dtype):
    norm_q, norm_k, q, k = make_qk(values, 2, 300, 300, 128, dtype)
    ropes = [tuple(sprinkled(table.contiguous()) for table in make_rope(values, 2, 300, 128)) for _ in range(2)]
    check(qk_norm_split_rope, (norm_q, norm_k, sprinkled(q), sprinkled(k), *ropes), FIRST)
    check(qk_norm_split_rope, (norm_q, norm_k, sprinkled(q), sprinkled(k), None, None), FIRST)


def test_qk_of_strided_rows(values):
    norm_q, norm_k, *_ = make_qk(values, 1, 1, 1, 128)
    fused = values(2, 700, 3 * 4096)  # projections of one product
    q, k = fused[:, :500, :4096], fused[:, 200:, 4096:8192]
    by_head = tuple(table.contiguous() for table in make_rope(values, 2, 500, 128))  # [B, H, S, r] for real
    one_row = tuple(table.expand(2, -1, -1, -1) for table in make_rope(values, 1, 500, 128))
    for rope in (by_head, one_row):
        check(qk_norm_split_rope, (norm_q, norm_k, q, k, rope, rope), FIRST)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("frames, height, width", [(16, 16, 24), (16, 22, 40)])
def test_compact_rope_tables(values, batch, frames, height, width):
    """The model's own embeddings: their tables, and the kernels that read them, beside the host's full ones."""
    video = LTX2AudioVideoRotaryPosEmbed(4096, modality="video", rope_type="split", num_attention_heads=32)
    cross = LTX2AudioVideoRotaryPosEmbed(2048, modality="video", rope_type="split", num_attention_heads=32)
    audio = LTX2AudioVideoRotaryPosEmbed(2048, modality="audio", rope_type="split", scale_factors=(4,), num_attention_heads=32)
    coords = video.prepare_video_coords(batch, frames, height, width, torch.device(DEVICE))
    audio_coords = audio.prepare_audio_coords(batch, 126, torch.device(DEVICE))
    ropes = {}
    for name, embed, at in (("video", video, coords), ("cross", cross, coords[:, :1]), ("audio", audio, audio_coords)):
        compact = compact_tables(at, embed)
        assert compact is not None and same_bits(compact.full(), embed(at))
        assert len(compact.cos) * 4 < batch * at.shape[2] or name == "audio"
        ropes[name] = Rope(compact), embed(at)

    for q, k, head_dim in (("video", "video", 128), ("cross", "audio", 64), ("audio", "cross", 64), ("audio", "audio", 64)):
        (rope_q, full_q), (rope_k, full_k) = ropes[q], ropes[k]
        args = make_qk(values, batch, full_q[0].shape[2], full_k[0].shape[2], head_dim)
        expected = qk_norm_split_rope.eager(*args, full_q, full_k)
        for tables in ((rope_q, rope_k), (full_q, rope_k), (rope_q, full_k)):
            assert qk_norm_split_rope.refusal(*args, *tables) is None
            found = qk_norm_split_rope.launch(IMPLEMENTATIONS[0], *args, *tables)
            assert_same_bits(found, expected, (q, k))
        check(qk_norm_split_rope, (None, None, *args[2:], rope_q, rope_k), FIRST)


# --- ada values
def block_pairs(values, *, batch, tokens, dtype=BF16):
    """(table, temb) of every kind in a 2.3 block. -> pairs"""
    video, audio = values(5, 4096, dtype=dtype), values(5, 2048, dtype=dtype)
    return (
        (values(9, 4096, dtype=dtype), values(batch, tokens, 9 * 4096, dtype=dtype)),
        (values(9, 2048, dtype=dtype), values(batch, 1, 9 * 2048, dtype=dtype)),
        (values(2, 4096, dtype=dtype), values(batch, 1, 2 * 4096, dtype=dtype)),
        (values(2, 2048, dtype=dtype), values(batch, 1, 2 * 2048, dtype=dtype)),
        (video[:4], values(batch, 1, 4 * 4096, dtype=dtype)),
        (video[4:], values(batch, 1, 4096, dtype=dtype)),
        (audio[:4], values(batch, 1, 4 * 2048, dtype=dtype)),
        (audio[4:], values(batch, 1, 2048, dtype=dtype)),
    )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("batch, tokens", [(1, 1), (2, 1), (1, 6144), (2, 6144), (1, 14080)])
def test_ada_values(values, dtype, batch, tokens):
    pairs = block_pairs(values, batch=batch, tokens=tokens, dtype=dtype)
    check(ada_values, pairs, ada_values.CANDIDATES)
    rows = values(2, 9 * 4096, dtype=dtype)
    index = (torch.arange(batch * tokens, device=DEVICE) % 2).to(torch.int32).view(batch, tokens)
    check(ada_values, ((pairs[0][0], IndexedRows(rows, index)), *pairs[1:]), ada_values.CANDIDATES)


def test_ada_values_of_promoted_and_special_values(values):
    pairs = ((values(9, 4096, dtype=FP32), values(2, 3, 9 * 4096)), (values(2, 2048), values(2, 1, 2 * 2048, dtype=FP16)))
    check(ada_values, pairs, ada_values.CANDIDATES)
    table, temb = values(2, 4096), values(1, 300, 2 * 4096)
    check(ada_values, ((sprinkled(table), sprinkled(temb)),), ada_values.CANDIDATES)


def test_more_than_two_to_the_31_ada_values(values):
    """Per-token timesteps of a long video: offsets that 32 bits do not hold, written and then read."""
    tokens = 60_000
    table, temb = values(9, 4096), values(1, tokens, 9 * 4096)
    assert temb.numel() > 2**31
    (ada,) = ada_values.launch(ada_values.CANDIDATES[0], (table, temb))
    for j in range(9):
        assert same_bits(ada[j], table[j] + temb.view(1, tokens, 9, 4096)[:, :, j])
    del temb
    x, update, norm = values(1, tokens, 4096), values(1, tokens, 4096), make_norm(4096)
    check(rms_norm_modulate, (norm, x, ada[7], ada[8]), NORMS[:1])
    check(gated_residual, (norm, x, update, ada[6], (ada[7], ada[8]), (ada[4], ada[5])), NORMS[:1])
    check(gated_residual, (None, x, update, ada[8]), NORMS[:1])


# --- head gates: (batch, tokens, head_dim), 32 heads
@pytest.mark.parametrize(
    "batch, tokens, head_dim",
    [
        (1, 6144, 128),
        (2, 6144, 128),
        (1, 14080, 128),
        (2, 14080, 128),
        (1, 63240, 128),
        (1, 126, 64),
        (2, 126, 64),
        (2, 14080, 64),
    ],
)
def test_head_gate(values, batch, tokens, head_dim):
    logits = values(batch, tokens, 32) * 4
    check(head_gate, (values(batch, tokens, 32, head_dim), logits), IMPLEMENTATIONS)
    check(head_gate, (values(batch, 32, tokens, head_dim).transpose(1, 2), logits), IMPLEMENTATIONS)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_gate_of_every_16_bit_logit(values, dtype, head_dim):
    logits = torch.arange(-32768, 32768, device=DEVICE).to(torch.int16).view(dtype).view(1, -1, 32)
    assert logits.view(torch.int16).unique().numel() == 65536
    ones = torch.ones(1, 2048, 32, head_dim, device=DEVICE, dtype=dtype)
    for x in (ones, values(1, 2048, 32, head_dim, dtype=dtype), sprinkled(values(1, 2048, 32, head_dim, dtype=dtype))):
        check(head_gate, (x, logits), IMPLEMENTATIONS)


def test_head_gate_in_fp32(values):
    """exp and division are torch's own here too, or FirstSight leaves the site to torch: never other bits."""
    x, logits = values(2, 6144, 32, 128, dtype=FP32), values(2, 6144, 32, dtype=FP32) * 8
    site = FirstSight("attn1.head_gate", head_gate)
    for _ in range(2):
        assert same_bits(site(x, logits), head_gate.eager(x, logits))
    assert site.fast + site.stock == 2


# --- what the public functions promise
def test_public_functions_run_the_kernels(values):
    norm, x = make_norm(4096), values(2, 300, 4096)
    _, scale, shift, *_ = ada_rows(values, batch=2, tokens=1, width=4096)
    calls = {
        rms_norm_modulate.rms_norm_modulate: (rms_norm_modulate, (norm, x, scale, shift)),
        qk_norm_split_rope.qk_norm_split_rope: (
            qk_norm_split_rope,
            (*make_qk(values, 2, 300, 126, 64), make_rope(values, 2, 300, 64), make_rope(values, 2, 126, 64)),
        ),
        ada_values.ada_values: (ada_values, block_pairs(values, batch=2, tokens=1)),
    }
    for function, (op, args) in calls.items():
        launched = []
        with pytest.MonkeyPatch.context() as patch:
            launch = op.launch
            patch.setattr(op, "launch", lambda *args, launch=launch, launched=launched: launched.append(1) or launch(*args))
            found = function(*args)
        assert_same_bits(found, op.eager(*args), function.__name__)
        assert launched == [1]


def test_rows_that_are_not_aligned_are_refused_not_read(values):
    """A kernel that reads four elements at once faults on them, and takes the process's CUDA context with it."""

    def shifted(x):
        return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)

    norm, x, update = make_norm(4096), values(2, 300, 4096), values(2, 300, 4096)
    gate, scale, shift, *_ = ada_rows(values, batch=2, tokens=1, width=4096)
    site, residual = FirstSight("norm1", rms_norm_modulate), FirstSight("norm2", gated_residual)
    gates, heads = FirstSight("attn1.head_gate", head_gate), values(2, 300, 32, 128)
    logits = values(2, 300, 32)
    for _ in range(2):
        for change in (lambda x: x, shifted):  # the aligned ones first: their verdict must not serve the others
            args = norm, change(x), scale, shift
            assert same_bits(site(*args), rms_norm_modulate.eager(*args))
            args = norm, x, change(update), gate, (scale, shift)
            assert same_bits(residual(*args), gated_residual.eager(*args))
            args = change(heads), logits
            assert same_bits(gates(*args), head_gate.eager(*args))
    torch.cuda.synchronize()
    assert (site.fast, residual.fast, gates.fast) == (1, 1, 1)


def test_first_sight_accepts_what_this_file_tests(values):
    """The verdicts that a request gets on this machine, rehearsals included."""
    for tokens, width in ((6144, 4096), (126, 2048)):
        x, norm = values(1, tokens, width), make_norm(width)
        gate, scale, shift, *_ = ada_rows(values, batch=1, tokens=1, width=width)
        head_dim = width // 32
        qk, rope = make_qk(values, 1, tokens, tokens, head_dim), make_rope(values, 1, tokens, head_dim)
        for op, args in (
            (rms_norm_modulate, (norm, x, scale, shift)),
            (gated_residual, (norm, x, x, gate, (scale, shift))),
            (gated_residual, (None, x, x, gate)),
            (qk_norm_split_rope, (*qk, rope, rope)),
            (head_gate, (values(1, tokens, 32, head_dim), values(1, tokens, 32))),
            (ada_values, block_pairs(values, batch=1, tokens=1)),
        ):
            before = torch.get_rng_state(), torch.cuda.get_rng_state()
            site = FirstSight("here", op)
            site(*args)
            site(*args)
            (verdict,) = site.verdicts.values()
            assert verdict.fast and site.fast == 1, verdict
            assert "bit-equal" in verdict.note
            assert torch.equal(before[0], torch.get_rng_state()) and torch.equal(before[1], torch.cuda.get_rng_state())


def test_widths_here_are_the_published_models():
    for config in models.CONFIGS.values():
        video = config["num_attention_heads"], config["attention_head_dim"]
        audio = config["audio_num_attention_heads"], config["audio_attention_head_dim"]
        assert (video, audio) == ((32, 128), (32, 64))
