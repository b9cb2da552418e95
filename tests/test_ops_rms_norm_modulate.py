"""rms_norm_modulate: norm, scale and shift in one launch, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from diffusers.models.normalization import RMSNorm

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import rms_norm_modulate as op
from ltx2_fastpath.ops.numerics import HALVES, PAIRS
from ltx2_fastpath.ops.support import IndexedRows
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def make_norm(width, eps=1e-6):
    return RMSNorm(width, eps=eps, elementwise_affine=False)


def make_args(normal, *, dtype=torch.float32, batch=2, tokens=9, width=256, per_token=False):
    rows = tokens if per_token else 1
    x = normal(batch, tokens, width, dtype=dtype)
    return make_norm(width), x, normal(batch, rows, width, dtype=dtype), normal(batch, rows, width, dtype=dtype)


def contract(norm, x, scale, shift, order=HALVES):
    """The module's docstring in plain torch; squares and sums in the promised order."""
    if norm is not None:
        values = x.float()
        count = op.lanes_of(x.shape[0] * x.shape[1])
        lanes = torch.zeros(*x.shape[:2], count, 4)
        for chunk in values.unflatten(2, (-1, count, 4)).unbind(2):
            lanes = lanes + chunk * chunk
        first, second, third, fourth = lanes.unbind(3)
        total = warp_sum(((first + second) + third) + fourth, order)
        rstd = rsqrt(total * (1 / x.shape[2]) + norm.eps)
        x = (values * rstd).to(x.dtype)
    return x * (1 + scale) + shift


def rsqrt(x):
    """numpy's, as it is in the interpreter; torch's own rounds a few values to the other side."""
    return torch.from_numpy(1 / np.sqrt(x.numpy()))


def warp_sum(lanes, order):
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        low, high = (
            (lanes[..., :half], lanes[..., half:]) if order == HALVES or half > 16 else (lanes[..., 0::2], lanes[..., 1::2])
        )
        lanes = low + high
    return lanes


def assert_close(actual, expected, args):
    """Within what another order of the sum and one rounding to the dtype can do.

    A sum of D positive terms is off by at most D steps of fp32 whatever the order, its reciprocal root by half of that; each
    of the two sides, and two more steps for division and root. In the dtype, the norm may then fall to the neighbouring value,
    and so may the product and the sum.
    """
    norm, x, scale, shift = args
    exact = norm(x.double()) * (1 + scale.double())
    fp32, dtype = torch.finfo(torch.float32).eps / 2, torch.finfo(x.dtype).eps
    bound = exact.abs() * (fp32 * (x.shape[2] + 4) + 2 * dtype) + (exact + shift.double()).abs() * dtype
    assert ((actual.double() - expected.double()).abs() <= bound).all()


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_eager_chain_is_the_hosts(version):
    """What the stock block passes to its attentions is our eager chain on its norms and ada values."""
    transformer = models.tiny_transformer(version, num_layers=1, dtype=torch.bfloat16)
    block = transformer.transformer_blocks[0]
    seen = {}
    block.register_forward_pre_hook(lambda module, args, kwargs: seen.update(block=kwargs), with_kwargs=True)
    for name in ("attn1", "audio_attn1", "attn2", "audio_attn2"):
        getattr(block, name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: seen.update({name: (args, kwargs)}), with_kwargs=True
        )
    with torch.no_grad():
        transformer(**models.inputs(transformer, height=64, width=96, num_frames=9, batch_size=2, image_to_video=True))

    for prefix, temb in (("", "temb"), ("audio_", "temb_audio")):
        table = getattr(block, f"{prefix}scale_shift_table")
        shift, scale, *_ = block.get_mod_params(table, seen["block"][temb], 2)
        hidden = seen["block"][f"{prefix}hidden_states"]
        normed = op.eager(getattr(block, f"{prefix}norm1"), hidden, scale, shift)
        assert torch.equal(normed, seen[f"{prefix}attn1"][1]["hidden_states"])

        text = seen["block"][f"{prefix}encoder_hidden_states"]
        if version == "2.3":
            table = getattr(block, f"{prefix}prompt_scale_shift_table")
            shift, scale = block.get_mod_params(table, seen["block"][f"temb_prompt{prefix and '_audio'}"], 2)
            text = op.eager(None, text, scale, shift)
        assert torch.equal(text, seen[f"{prefix}attn2"][1]["encoder_hidden_states"])


@pytest.mark.parametrize("per_token", [False, True], ids=["row", "per-token"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, tokens, width", [(1, 16, 128), (2, 9, 384), (1, 17, 1280), (1, 9, 512), (1, 5, 512), (1, 2, 1024), (1, 1, 2048)]
)
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, batch, tokens, width, per_token):
    args = make_args(normal, dtype=dtype, batch=batch, tokens=tokens, width=width, per_token=per_token)
    result = op.rms_norm_modulate(*args)
    assert result.dtype == dtype and result.is_contiguous()
    assert torch.equal(result, contract(*args))
    assert_close(result, op.eager(*args), args)


@pytest.mark.parametrize("order", [HALVES, PAIRS])
def test_each_candidate_sums_in_its_own_order(normal, order):
    args = make_args(normal, width=512)
    candidates = [candidate for candidate in op.CANDIDATES if candidate[1] == order]
    assert candidates
    for candidate in candidates:
        result = op.rms_norm_modulate(*args, candidate=candidate)
        assert torch.equal(result, contract(*args, order=order))
        assert not torch.equal(result, contract(*args, order=PAIRS if order == HALVES else HALVES))  # the input tells them apart


@pytest.mark.parametrize("per_token", [False, True], ids=["row", "per-token"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, tokens, width", [(1, 1, 128), (2, 3, 384)])
def test_modulation_alone_equals_eager(normal, dtype, batch, tokens, width, per_token):
    _, x, scale, shift = make_args(normal, dtype=dtype, batch=batch, tokens=tokens, width=width, per_token=per_token)
    assert torch.equal(op.rms_norm_modulate(None, x, scale, shift), op.eager(None, x, scale, shift))


@pytest.mark.parametrize("with_norm", [True, False])
def test_strided_inputs(normal, with_norm):
    norm, x, scale, shift = make_args(normal)
    norm = norm if with_norm else None
    hidden = torch.full((3, 20, 264), float("nan"))
    hidden[1:, 2::2, 8:] = x
    ada = torch.full((2, 9, 4, 256), float("nan"))  # as the host unbinds its ada values
    ada[:, :, 1], ada[:, :, 3] = scale, shift
    before = hidden.clone(), ada.clone()
    _, rows, _, per_token = ada.transpose(1, 2).unbind(1)
    result = op.rms_norm_modulate(norm, hidden[1:, 2::2, 8:], rows, per_token)
    assert torch.equal(result, contract(norm, x, rows, per_token))
    assert same_bits(before, (hidden, ada))

    tokens_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    one_row_for_all = normal(256).expand(2, 1, 256)
    result = op.rms_norm_modulate(norm, tokens_first, one_row_for_all, one_row_for_all)
    assert torch.equal(result, contract(norm, x, one_row_for_all, one_row_for_all))


def make_indexed(normal, *, count=2, rows=3, batch=2, tokens=9, width=256, dtype=torch.float32):
    """Per-token values of few distinct rows, as the host unbinds its ada values: strided, with one index."""
    values = normal(rows, count, width, dtype=dtype).unbind(1)
    index = torch.randint(rows, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return [IndexedRows(value, index) for value in values]


@pytest.mark.parametrize("with_norm", [True, False])
def test_indexed_modulation_is_per_token_modulation(normal, with_norm):
    norm, x, *_ = make_args(normal)
    norm = norm if with_norm else None
    scale, shift = make_indexed(normal)
    assert op.refusal(norm, x, scale, shift) is None
    result = op.rms_norm_modulate(norm, x, scale, shift)
    assert torch.equal(result, contract(norm, x, scale.full(), shift.full()))
    assert torch.equal(op.eager(norm, x, scale, shift), op.eager(norm, x, scale.full(), shift.full()))
    assert op.signature(norm, x, scale, shift) != op.signature(norm, x, scale.full(), shift.full())


INDEXED_REFUSALS = {
    "shape of the index": (lambda s, b: (IndexedRows(s.values, s.index[:, :4]), b), "scale: index torch.int32 [2, 4]"),
    "dtype of the index": (lambda s, b: (IndexedRows(s.values, s.index.long()), b), "scale: index torch.int64"),
    "layout of the index": (lambda s, b: (IndexedRows(s.values, s.index.t().contiguous().t()), b), "scale: index"),
    "device of the index": (lambda s, b: (s, IndexedRows(b.values, b.index.to("meta"))), "shift: index on meta"),
    "width of the rows": (lambda s, b: (IndexedRows(s.values[:, :128], s.index), b), "scale: values torch.float32 [3, 128]"),
    "dtype of the rows": (lambda s, b: (s, IndexedRows(b.values.half(), b.index)), "shift: values torch.float16"),
    "layout of the rows": (lambda s, b: (IndexedRows(s.values.t().contiguous().t(), s.index), b), "scale: value rows must be"),
    "alignment of the rows": (lambda s, b: (IndexedRows(shifted(s.values), s.index), b), "scale: value rows must be"),
    "one full": (lambda s, b: (s, b.full()), "shift: indexed rows, or not, as scale"),
    "another index": (lambda s, b: (s, IndexedRows(b.values, b.index.clone())), "shift: its index must be scale's"),
    "shift strided unlike scale": (lambda s, b: (s, IndexedRows(b.values.contiguous(), b.index)), "shift: shape and strides"),
}


@pytest.mark.parametrize("case", INDEXED_REFUSALS)
def test_refusal_of_indexed_modulation_names_the_argument(normal, no_computation, case):
    change, named = INDEXED_REFUSALS[case]
    norm, x, *_ = make_args(normal)
    bad = change(*make_indexed(normal))
    with no_computation:
        assert named in op.refusal(norm, x, *bad)
    with pytest.raises(ValueError, match="^rms_norm_modulate: "):
        op.rms_norm_modulate(norm, x, *bad)


def test_eps_is_the_modules(normal):
    _, x, scale, shift = make_args(normal)
    for eps in (1e-6, 0.5):
        norm = make_norm(256, eps)
        assert torch.equal(op.rms_norm_modulate(norm, x, scale, shift), contract(norm, x, scale, shift))
    assert not torch.equal(contract(norm, x, scale, shift), contract(make_norm(256), x, scale, shift))


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(normal, dtype):
    norm, x, scale, shift = make_args(normal, dtype=dtype, per_token=True)
    x[0, 0], x[0, 1, 3], x[0, 2, 200], x[0, 3] = 0.0, float("nan"), float("inf"), 6e-8
    x[0, 4] = 60000.0 if dtype == torch.float16 else 1e20  # squares overflow in fp32, not in fp16
    scale[1, 0], scale[1, 1], shift[1, 2] = -1.0, float("inf"), -float("inf")
    args = norm, x, scale, shift
    result = op.rms_norm_modulate(*args)
    assert same_bits(result, contract(*args))
    eager = op.eager(*args)
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(result), test(eager))


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far, near = far_apart(rows=3, width=128)[:, None], normal(3, 1, 128, dtype=torch.float16)
    for x, y in ((far, near), (far.transpose(0, 1), near.transpose(0, 1))):
        assert torch.equal(op.rms_norm_modulate(None, x, y, y), contract(None, x, y, y))
        assert torch.equal(op.rms_norm_modulate(None, y, x, x), contract(None, y, x, x))


def hooked(norm):
    norm.register_forward_hook(lambda module, args, output: output)
    return norm


def prehooked(norm):
    norm.register_forward_pre_hook(lambda module, args: None)
    return norm


def overridden(norm):
    norm.forward = lambda x: x
    return norm


def shifted(x):
    """The same values, one element away from an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def spread(x):
    """The same values, rows an odd number of elements apart."""
    return torch.empty(*x.shape[:2], x.shape[2] + 1, dtype=x.dtype)[..., :-1].copy_(x)


REFUSALS = {
    "rank of x": (lambda n, x, s, b: (n, x[0], s, b), "x: expected rank 3"),
    "rank of scale": (lambda n, x, s, b: (n, x, s[0], b), "scale: expected rank 3"),
    "rank of shift": (lambda n, x, s, b: (n, x, s, b[None]), "shift: expected rank 3"),
    "dtype of x": (lambda n, x, s, b: (n, x.double(), s.double(), b.double()), "x: dtype torch.float64"),
    "dtype of scale": (lambda n, x, s, b: (n, x, s.half(), b), "scale: dtype torch.float16, expected torch.float32"),
    "dtype of shift": (lambda n, x, s, b: (n, x, s, b.half()), "shift: dtype torch.float16, expected torch.float32"),
    "device of x": (lambda n, x, s, b: (n, x.to("meta"), s.to("meta"), b.to("meta")), "x: on meta"),
    "device of scale": (lambda n, x, s, b: (n, x, s.to("meta"), b), "scale: on meta, expected cpu"),
    "device of shift": (lambda n, x, s, b: (n, x, s, b.to("meta")), "shift: on meta, expected cpu"),
    "tokens of scale": (lambda n, x, s, b: (n, x, s[:, :4], b), "scale: shape [2, 4, 256], expected [2, 9, 256] or [2, 1, 256]"),
    "batch of scale": (lambda n, x, s, b: (n, x, s[:1], b), "scale: shape [1, 9, 256]"),
    "width of shift": (lambda n, x, s, b: (n, x, s, b[..., :128]), "shift: shape [2, 9, 128]"),
    "shift unlike scale": (lambda n, x, s, b: (n, x, s[:, :1], b), "shift: shape and strides must be scale's"),
    "shift strided unlike scale": (
        lambda n, x, s, b: (n, x, s, b.transpose(0, 1).contiguous().transpose(0, 1)),
        "shift: shape and strides must be scale's",
    ),
    "layout of x": (lambda n, x, s, b: (n, x.mT.contiguous().mT, s, b), "x: rows must be contiguous and aligned"),
    "layout of scale": (lambda n, x, s, b: (n, x, s.mT.contiguous().mT, b), "scale: rows must be contiguous and aligned"),
    "layout of shift": (lambda n, x, s, b: (n, x, s, b.mT.contiguous().mT), "shift: rows must be contiguous and aligned"),
    "alignment of x": (lambda n, x, s, b: (n, shifted(x), s, b), "x: rows must be contiguous and aligned"),
    "alignment of the rows of x": (lambda n, x, s, b: (n, spread(x), s, b), "x: rows must be contiguous and aligned"),
    "alignment of scale": (lambda n, x, s, b: (None, x, shifted(s), b), "scale: rows must be contiguous and aligned"),
    "no tokens": (lambda n, x, s, b: (n, x[:, :0], s[:, :0], b[:, :0]), "x: empty"),
    "width": (lambda n, x, s, b: (n, x[..., :200], s[..., :200], b[..., :200]), "x: width 200 is not a multiple of 128"),
    "width without norm": (lambda n, x, s, b: (None, x[..., :64], s[..., :64], b[..., :64]), "x: width 64 is not a multiple"),
    "few rows": (lambda n, x, s, b: (n, x[:1, :3], s[:1, :3], b[:1, :3]), "x: width 256 is not a multiple of 1024"),
    "norm with weight": (lambda n, x, s, b: (RMSNorm(256, eps=1e-6), x, s, b), "norm: not a plain RMSNorm"),
    "norm with hook": (lambda n, x, s, b: (hooked(n), x, s, b), "norm: not a plain RMSNorm"),
    "norm with pre-hook": (lambda n, x, s, b: (prehooked(n), x, s, b), "norm: not a plain RMSNorm"),
    "norm with another forward": (lambda n, x, s, b: (overridden(n), x, s, b), "norm: not a plain RMSNorm"),
    "another norm": (lambda n, x, s, b: (torch.nn.LayerNorm(256, elementwise_affine=False), x, s, b), "norm: not a plain"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = make_args(normal, per_token=True)
    with no_computation:
        assert op.refusal(*good) is None and op.refusal(None, *good[1:]) is None
        op.signature(*good)
    bad = change(*good)
    with no_computation:
        assert named in op.refusal(*bad)
    with pytest.raises(ValueError, match="^rms_norm_modulate: ") as caught:
        op.rms_norm_modulate(*bad)
    assert named in str(caught.value)


def test_rmsnorm_of_another_library_is_refused(normal):
    """Another class of that name may compute something else (torch's own rounds at other points)."""
    _, x, scale, shift = make_args(normal)
    foreign = torch.nn.RMSNorm(256, eps=1e-6, elementwise_affine=False)
    assert op.refusal(foreign, x, scale, shift) is not None


def test_signature_tells_layouts_and_norms_apart(normal):
    norm, x, scale, shift = make_args(normal)
    same = op.signature(make_norm(256), x.clone(), scale.clone(), shift.clone())
    assert same == op.signature(norm, x, scale, shift)
    others = [
        (make_norm(256, 1e-5), x, scale, shift),
        (None, x, scale, shift),
        (hooked(make_norm(256)), x, scale, shift),
        (norm, x.half(), scale, shift),
        (norm, x.transpose(0, 1).contiguous().transpose(0, 1), scale, shift),
        (norm, shifted(x), scale, shift),
        (norm, x, x, shift),
        (norm, x, scale, x),
    ]
    assert len({same, *(op.signature(*args) for args in others)}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_rehearsals_are_many_eligible_rows_and_leave_the_random_state_alone(normal, dtype):
    args = make_args(normal, dtype=dtype, per_token=True)
    before = torch.get_rng_state()
    (trial,) = op.rehearsals(*args)
    (again,) = op.rehearsals(*args)
    assert torch.equal(before, torch.get_rng_state())
    assert same_bits(trial[1:], again[1:])
    norm, x, scale, shift = trial
    assert norm is args[0] and x.dtype == dtype and x.shape[0] * x.shape[1] >= 4096 and x.shape[2] == 256
    assert op.refusal(*trial) is None
    assert x.float().std() > 0.9 and not torch.equal(x[0, 0], scale[0, 0]) and not torch.equal(scale[0, 0], shift[0, 0])


def test_compiled_it_is_the_eager_chain(normal, monkeypatch):
    monkeypatch.setattr(op, "launch", lambda *args: pytest.fail("launched while compiling"))
    args = make_args(normal)
    compiled = torch.compile(op.rms_norm_modulate, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*args), op.eager(*args))
