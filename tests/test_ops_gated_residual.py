"""gated_residual: the residual alone, or with norm and modulations, in one launch, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from test_ops_rms_norm_modulate import assert_close, hooked, make_indexed, make_norm, shifted
from test_ops_rms_norm_modulate import contract as norm_contract

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import gated_residual as op
from ltx2_fastpath.ops.numerics import HALVES, PAIRS
from ltx2_fastpath.ops.support import IndexedRows, full
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def make_args(normal, *, dtype=torch.float32, batch=2, tokens=9, width=256, per_token=False, modulations=2):
    rows = tokens if per_token else 1
    x, update = normal(batch, tokens, width, dtype=dtype), normal(batch, tokens, width, dtype=dtype)
    gate, *ada = (normal(batch, rows, width, dtype=dtype) for _ in range(1 + 2 * modulations))
    return make_norm(width), x, update, gate, *zip(ada[::2], ada[1::2])


def run(*args, candidate=op.CANDIDATES[0]):
    """What a call of a site does."""
    assert op.refusal(*args) is None
    return op.launch(candidate, *args)


def contract(norm, x, update, gate, *modulations, order=HALVES):
    """The module's docstring in plain torch."""
    hidden = x + (update if gate is None else update * gate)
    if norm is None:
        return hidden
    nothing = torch.zeros(1, 1, x.shape[2], dtype=x.dtype)
    pairs = modulations or [(nothing, nothing)]
    return hidden, *(norm_contract(norm, hidden, scale, shift, order) for scale, shift in pairs)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_eager_chain_is_the_hosts(version):
    """The inputs of the stock block's submodules follow from its updates, gates and ada values by our eager chain."""
    transformer = models.tiny_transformer(version, num_layers=1, dtype=torch.bfloat16)
    block = transformer.transformer_blocks[0]
    seen = {}

    def record(module, args, kwargs, output):
        inputs = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen[module] = inputs, kwargs.get("encoder_hidden_states"), output

    for name in ("attn1", "attn2", "audio_to_video_attn", "video_to_audio_attn", "ff", "audio_attn1", "audio_attn2", "audio_ff"):
        getattr(block, name).register_forward_hook(record, with_kwargs=True)
    block.register_forward_hook(lambda module, args, kwargs, output: seen.update(block=(kwargs, output)), with_kwargs=True)
    with torch.no_grad():
        transformer(**models.inputs(transformer, height=64, width=96, num_frames=9, batch_size=2, image_to_video=True))
    kwargs, outputs = seen["block"]

    def stream(prefix, cross_norm, own_cross, other_cross, output):
        def part(name):
            return getattr(block, prefix + name)

        audio = prefix and "_audio"
        ada = block.get_mod_params(part("scale_shift_table"), kwargs[f"temb{audio}"], 2)
        _, _, gate_msa, shift_mlp, scale_mlp, gate_mlp = ada[:6]
        table = getattr(block, f"{'audio' if prefix else 'video'}_a2v_cross_attn_scale_shift_table")
        cross = block.get_mod_params(table[:4], kwargs[f"temb_ca{audio}_scale_shift"], 2)
        (cross_gate,) = block.get_mod_params(table[4:], kwargs[f"temb_ca{audio}_gate"], 2)

        text_modulation, text_gate = (), None
        if version == "2.3":
            shift, scale, text_gate = ada[6:]
            text_modulation = ((scale, shift),)
        hidden = kwargs[f"{prefix}hidden_states"]
        hidden, normed = op.eager(part("norm2"), hidden, seen[part("attn1")][2], gate_msa, *text_modulation)
        assert torch.equal(normed, seen[part("attn2")][0])

        a2v, v2a = (cross[0], cross[1]), (cross[2], cross[3])
        hidden, for_a2v, for_v2a = op.eager(cross_norm, hidden, seen[part("attn2")][2], text_gate, a2v, v2a)
        for_own, for_other = (for_v2a, for_a2v) if prefix else (for_a2v, for_v2a)
        assert torch.equal(for_own, seen[own_cross][0]) and torch.equal(for_other, seen[other_cross][1])

        hidden, normed = op.eager(part("norm3"), hidden, seen[own_cross][2], cross_gate, (scale_mlp, shift_mlp))
        assert torch.equal(normed, seen[part("ff")][0])
        assert torch.equal(op.eager(None, hidden, seen[part("ff")][2], gate_mlp), output)

    stream("", block.audio_to_video_norm, block.audio_to_video_attn, block.video_to_audio_attn, outputs[0])
    stream("audio_", block.video_to_audio_norm, block.video_to_audio_attn, block.audio_to_video_attn, outputs[1])


@pytest.mark.parametrize("per_token", [False, True], ids=["row", "per-token"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, tokens, width", [(1, 1, 128), (2, 3, 384), (1, 2, 2560)])
def test_residual_alone_equals_eager(normal, dtype, batch, tokens, width, gated, per_token):
    _, x, update, gate = make_args(
        normal, dtype=dtype, batch=batch, tokens=tokens, width=width, per_token=per_token, modulations=0
    )
    gate = gate if gated else None
    result = run(None, x, update, gate)
    assert result.dtype == dtype and result.is_contiguous()
    assert torch.equal(result, op.eager(None, x, update, gate))


@pytest.mark.parametrize("per_token", [False, True], ids=["row", "per-token"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("modulations", [0, 1, 2])
@pytest.mark.parametrize("dtype, width", [(torch.float32, 384), (torch.float16, 128)])
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, width, modulations, gated, per_token):
    norm, x, update, gate, *pairs = make_args(normal, dtype=dtype, width=width, per_token=per_token, modulations=modulations)
    args = norm, x, update, gate if gated else None, *pairs
    results = run(*args)
    assert len(results) == 1 + max(1, modulations)
    assert same_bits(results, contract(*args))

    expected = op.eager(*args)
    assert torch.equal(results[0], expected[0])
    zero = torch.zeros(1, 1, width, dtype=dtype)
    for result, eager, (scale, shift) in zip(results[1:], expected[1:], pairs or [(zero, zero)]):
        assert_close(result, eager, (norm, expected[0], scale, shift))


@pytest.mark.parametrize("order", [HALVES, PAIRS])
def test_each_candidate_sums_in_its_own_order(normal, order):
    args = make_args(normal, width=512)
    candidates = [candidate for candidate in op.CANDIDATES if candidate[1] == order]
    assert candidates
    for candidate in candidates:
        results = run(*args, candidate=candidate)
        assert same_bits(results, contract(*args, order=order))
        assert not same_bits(results, contract(*args, order=PAIRS if order == HALVES else HALVES))


@pytest.mark.parametrize("with_norm", [True, False])
def test_strided_inputs_are_read_and_left_alone(normal, with_norm):
    norm, x, update, gate, *pairs = make_args(normal, per_token=True)
    hidden, sliced = torch.full((3, 20, 264), float("nan")), torch.full((9, 2, 512), float("nan"))
    hidden[1:, 2::2, 8:], sliced[..., 256:] = x, update.transpose(0, 1)
    ada = torch.full((2, 9, 9, 256), float("nan"))  # as the host unbinds its ada values
    for i, value in enumerate((gate, *pairs[0], *pairs[1])):
        ada[:, :, i] = value
    before = [tensor.clone() for tensor in (hidden, sliced, ada)]
    gate, *values = ada.unbind(2)[:5]
    pairs = [values[:2], values[2:]] if with_norm else []
    args = norm if with_norm else None, hidden[1:, 2::2, 8:], sliced[..., 256:].transpose(0, 1), gate, *pairs
    assert same_bits(run(*args), contract(*args))
    assert same_bits(before, [hidden, sliced, ada])


def test_row_gate_beside_per_token_modulation_and_the_reverse(normal):
    for per_token in (False, True):
        norm, x, update, _, pair = make_args(normal, per_token=per_token, modulations=1)
        gate = normal(2, 1 if per_token else 9, 256)
        assert same_bits(run(norm, x, update, gate, pair), contract(norm, x, update, gate, pair))
    *args, first, second = make_args(normal)
    mixed = *args, first, tuple(value.repeat(1, 9, 1) for value in second)
    assert same_bits(run(*mixed), contract(*args, first, second))


def test_indexed_gate_and_modulations_are_per_token_ones(normal):
    norm, x, update, row_gate, row_pair = make_args(normal, modulations=1)
    gate, *ada = make_indexed(normal, count=5)
    for args in (
        (norm, x, update, gate, ada[:2], ada[2:]),
        (norm, x, update, gate, ada[:2]),
        (norm, x, update, gate, row_pair, ada[2:]),
        (norm, x, update, row_gate, ada[:2]),
        (norm, x, update, None, ada[:2]),
        (norm, x, update, gate),
        (None, x, update, gate),
    ):
        plain = *map(full, args[:4]), *(tuple(map(full, pair)) for pair in args[4:])
        assert same_bits(run(*args), contract(*plain))
        assert same_bits(op.eager(*args), op.eager(*plain))


def test_refusal_of_indexed_gate_and_modulations_names_the_argument(normal):
    norm, x, update, *_ = make_args(normal, modulations=0)
    gate, *ada = make_indexed(normal, count=5)
    short = IndexedRows(gate.values, gate.index[:, :4])
    assert op.refusal(norm, x, update, short, ada[:2]).startswith("gate: index")
    assert op.refusal(norm, x, update, gate, ada[:2], (short, short)).startswith("scale 1: index")


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
def test_special_values(normal, dtype, with_norm):
    norm, x, update, gate, *pairs = make_args(normal, dtype=dtype, per_token=True)
    x[0, 0], update[0, 0] = 0.0, -0.0
    x[0, 1, 3], update[0, 2, 3], gate[0, 3, 3] = (float("nan"),) * 3
    x[0, 4, 5], update[0, 5, 5], gate[0, 6, 5] = float("inf"), -float("inf"), float("inf")
    update[0, 7], gate[0, 7] = (300.0, 300.0) if dtype == torch.float16 else (1e30, 1e30)
    update[0, 8], gate[0, 8] = (6e-8, 0.5) if dtype == torch.float16 else (1e-45, 0.5)
    args = (norm, x, update, gate, *pairs) if with_norm else (None, x, update, gate)
    results = run(*args)
    assert same_bits(results, contract(*args))
    assert same_bits(results[0] if with_norm else results, op.eager(None, x, update, gate))


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far, near = far_apart(rows=3, width=128)[:, None], normal(3, 1, 128, dtype=torch.float16)
    for x, y in ((far, near), (far.transpose(0, 1), near.transpose(0, 1))):
        for args in ((x, y, y), (y, x, y), (y, y, x)):
            assert torch.equal(run(None, *args), contract(None, *args))


def test_fused_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far = far_apart(rows=3, width=128)[:, None].expand(3, 6, 128)  # each row six times, to have 16
    near = normal(3, 6, 128, dtype=torch.float16)
    norm = make_norm(128)
    for args in ((far, near, near), (near, far, near), (near, near, far)):
        assert same_bits(run(norm, *args, (near, near)), contract(norm, *args, (near, near)))
    pairs = (near, near), (far, far)
    assert same_bits(run(norm, near, near, near, *pairs), contract(norm, near, near, near, *pairs))


REFUSALS = {
    "rank of x": (lambda n, x, u, g, *m: (n, x[0], u, g, *m), "x: expected rank 3"),
    "rank of update": (lambda n, x, u, g, *m: (n, x, u[0], g, *m), "update: expected rank 3"),
    "rank of gate": (lambda n, x, u, g, *m: (n, x, u, g[0], *m), "gate: expected rank 3"),
    "rank of a shift": (lambda n, x, u, g, m0, m1: (n, x, u, g, m0, (m1[0], m1[1][0])), "shift 1: expected rank 3"),
    "dtype of x": (lambda n, x, u, g, *m: (n, x.int(), u.int(), g.int()), "x: dtype torch.int32"),
    "dtype of update": (lambda n, x, u, g, *m: (n, x, u.half(), g, *m), "update: dtype torch.float16, expected torch.float32"),
    "dtype of gate": (lambda n, x, u, g, *m: (n, x, u, g.half(), *m), "gate: dtype torch.float16"),
    "dtype of a scale": (lambda n, x, u, g, m0, m1: (n, x, u, g, (m0[0].half(), m0[1]), m1), "scale 0: dtype torch.float16"),
    "device of x": (lambda n, x, u, g, *m: (n, x.to("meta"), u, g, *m), "x: on meta"),
    "device of update": (lambda n, x, u, g, *m: (n, x, u.to("meta"), g, *m), "update: on meta, expected cpu"),
    "device of gate": (lambda n, x, u, g, *m: (n, x, u, g.to("meta"), *m), "gate: on meta, expected cpu"),
    "tokens of update": (lambda n, x, u, g, *m: (n, x, u[:, :1], g, *m), "update: shape [2, 1, 256], expected [2, 9, 256]"),
    "tokens of gate": (lambda n, x, u, g, *m: (n, x, u, g[:, :2], *m), "gate: shape [2, 2, 256]"),
    "batch of gate": (lambda n, x, u, g, *m: (n, x, u, g[:1], *m), "gate: shape [1, 9, 256]"),
    "width of gate": (lambda n, x, u, g, *m: (n, x, u, g[..., :128], *m), "gate: shape [2, 9, 128]"),
    "tokens of a scale": (lambda n, x, u, g, m0, m1: (n, x, u, g, m0, (m1[0][:, :2], m1[1])), "scale 1: shape [2, 2, 256]"),
    "shift unlike scale": (lambda n, x, u, g, m0, m1: (n, x, u, g, m0, (m1[0][:, :1], m1[1])), "shift 1: shape and strides"),
    "layout of x": (lambda n, x, u, g, *m: (n, x.mT.contiguous().mT, u, g, *m), "x: rows must be contiguous and aligned"),
    "layout of update": (
        lambda n, x, u, g, *m: (n, x, u.mT.contiguous().mT, g, *m),
        "update: rows must be contiguous and aligned",
    ),
    "layout of gate": (lambda n, x, u, g, *m: (n, x, u, g.mT.contiguous().mT, *m), "gate: rows must be contiguous and aligned"),
    "alignment of update": (lambda n, x, u, g, *m: (n, x, shifted(u), g, *m), "update: rows must be contiguous and aligned"),
    "alignment of gate": (lambda n, x, u, g, *m: (None, x, u, shifted(g)), "gate: rows must be contiguous and aligned"),
    "no tokens": (lambda n, x, u, g, *m: (n, x[:, :0], u[:, :0], g[:, :0]), "x: empty"),
    "width": (lambda n, x, u, g, *m: (n, x[..., :64], u[..., :64], g[..., :64]), "x: width 64 is not a multiple of 128"),
    "width without norm": (lambda n, x, u, g, *m: (None, x[..., :64], u[..., :64], g[..., :64]), "x: width 64 is not a"),
    "few rows": (lambda n, x, u, g, *m: (n, x[:1, :3], u[:1, :3], None), "x: width 256 is not a multiple of 1024"),
    "three modulations": (lambda n, x, u, g, *m: (n, x, u, g, *m, m[0]), "modulations: at most 2, got 3"),
    "modulation without norm": (lambda n, x, u, g, *m: (None, x, u, g, *m), "modulations: need a norm"),
    "norm with weight": (lambda n, x, u, g, *m: (RMSNorm(256, eps=1e-6), x, u, g, *m), "norm: not a plain RMSNorm"),
    "norm with hook": (lambda n, x, u, g, *m: (hooked(n), x, u, g, *m), "norm: not a plain RMSNorm"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = make_args(normal, per_token=True)
    with no_computation:
        assert op.refusal(*good) is None and op.refusal(*good[:3], None, *good[4:]) is None
        assert op.refusal(*good[:4]) is None and op.refusal(None, *good[1:4]) is None
        op.signature(*good)
    bad = change(*good)
    with no_computation:
        assert named in op.refusal(*bad)


def test_signature_tells_layouts_and_norms_apart(normal):
    args = norm, x, update, gate, first, second = make_args(normal)
    same = op.signature(make_norm(256), x.clone(), update.clone(), gate.clone(), first, second)
    assert same == op.signature(*args)
    others = [
        (make_norm(256, 1e-5), *args[1:]),
        (None, *args[1:]),
        (hooked(make_norm(256)), *args[1:]),
        (norm, x, update, None, first, second),
        (norm, x, update, x, first, second),
        (norm, x, update, gate, first),
        (norm, x, update, gate),
        (norm, x, update, gate, first, (x, update)),
        (norm, x, update.transpose(0, 1).contiguous().transpose(0, 1), gate, first, second),
        (norm, x, shifted(update), gate, first, second),
    ]
    assert len({same, *(op.signature(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("modulations", [0, 1, 2])
def test_rehearsals_are_many_eligible_rows_and_leave_the_random_state_alone(normal, modulations, gated):
    norm, x, update, gate, *pairs = make_args(normal, dtype=torch.bfloat16, modulations=modulations)
    before = torch.get_rng_state()
    (trial,) = op.rehearsals(norm, x, update, gate if gated else None, *pairs)
    assert torch.equal(before, torch.get_rng_state())
    assert trial[0] is norm and (trial[3] is not None) == gated and len(trial) == 4 + modulations
    assert trial[1].dtype == torch.bfloat16 and trial[1].shape[0] * trial[1].shape[1] >= 4096 and trial[1].shape[2] == 256
    assert op.refusal(*trial) is None
    tensors = [trial[1][0, 0], trial[2][0, 0], *(value[0, 0] for value in (trial[3],) if gated)]
    tensors += [value[0, 0] for pair in trial[4:] for value in pair]
    assert len({tuple(tensor.tolist()) for tensor in tensors}) == len(tensors)  # no argument could stand for another


def test_nothing_to_rehearse_without_a_norm(normal):
    _, x, update, gate = make_args(normal, modulations=0)
    assert list(op.rehearsals(None, x, update, gate)) == []
