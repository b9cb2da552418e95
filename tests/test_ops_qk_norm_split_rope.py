"""qk_norm_split_rope: RMSNorm across heads and split RoPE of q and k in one launch, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.transformers import transformer_ltx2
from test_ops_rms_norm_modulate import rsqrt

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import head_gate
from ltx2_fastpath.ops import qk_norm_split_rope as op
from ltx2_fastpath.ops.rope_tables import CompactTables, Rope

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def make_norm(normal, width, dtype=torch.float32, eps=1e-6):
    norm = torch.nn.RMSNorm(width, eps=eps, dtype=dtype)
    norm.weight.data = normal(width, dtype=dtype)
    return norm.requires_grad_(False)


def make_rope(normal, batch, tokens, heads, half):
    """cos and sin as the host lays them out, [B, S, H, r] seen as [B, H, S, r]. Any values do, and show more than an angle's."""
    return tuple(normal(batch, tokens, heads, half).transpose(1, 2) for _ in range(2))


def make_args(normal, *, dtype=torch.float32, batch=2, tokens_q=5, tokens_k=3, heads=4, head_dim=128, norm=True, rope=True):
    width = heads * head_dim
    q, k = (normal(batch, tokens, width, dtype=dtype) for tokens in (tokens_q, tokens_k))
    norms = [make_norm(normal, width, dtype) if norm else None for _ in range(2)]
    ropes = [make_rope(normal, batch, tokens, heads, head_dim // 2) if rope else None for tokens in (tokens_q, tokens_k)]
    return *norms, q, k, *ropes


def contract_of_side(norm, x, rope):
    """The module's docstring in plain torch, the sum in the promised order. (Squares are exact, so FMA makes no difference.)"""
    if norm is not None:
        values = x.float()
        threads = torch.zeros(*x.shape[:2], 128)
        for chunk in values.unflatten(2, (-1, 128, 4)).unbind(2):
            for element in chunk.unbind(3):
                threads = threads + element * element
        lanes = threads.unflatten(2, (4, 32))
        while lanes.shape[-1] > 1:
            low, high = lanes.chunk(2, dim=-1)
            lanes = low + high
        w_0, w_1, w_2, w_3 = lanes.squeeze(-1).unbind(-1)
        rstd = rsqrt(((w_0 + w_2) + (w_1 + w_3)) / x.shape[2] + norm.eps)
        x = (norm.weight.float() * (rstd[..., None] * values)).to(x.dtype)
    if rope is None:
        return x
    cos, sin = (table.transpose(1, 2) for table in rope)  # [B, S, H, r]
    first, second = x.float().unflatten(2, (cos.shape[2], 2, -1)).unbind(3)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=3)
    return turned.flatten(2).to(x.dtype)


def contract(norm_q, norm_k, q, k, rope_q, rope_k):
    return contract_of_side(norm_q, q, rope_q), contract_of_side(norm_k, k, rope_k)


def assert_close(actual, expected, norm, x, rope):
    """Within what another order of the sum, FMA, and one rounding to the dtype can do.

    A sum of D positive terms is off by at most D steps of fp32 whatever the order, its reciprocal root by half of that; each
    of the two sides, and two more steps for division and root. In the dtype the norm may then fall to the neighbouring value,
    and so may the result. The rotation mixes two values of the norm.
    """
    fp32, dtype = torch.finfo(torch.float32).eps / 2, torch.finfo(x.dtype).eps
    exact = x.double() if norm is None else torch.nn.functional.rms_norm(x.double(), x.shape[2:], norm.weight.double(), norm.eps)
    size = exact.abs()
    if rope is not None:
        cos, sin = (table.transpose(1, 2).double().abs() for table in rope)
        first, second = size.unflatten(2, (cos.shape[2], 2, -1)).unbind(3)
        size = torch.stack((first * cos + second * sin, second * cos + first * sin), dim=3).flatten(2)
    assert ((actual.double() - expected.double()).abs() <= size * (fp32 * (x.shape[2] + 8) + 2 * dtype)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("heads, head_dim", [(4, 128), (3, 8)])
def test_split_rope_is_the_hosts(normal, dtype, heads, head_dim):
    x = normal(2, 5, heads * head_dim, dtype=dtype)
    angle = torch.randn(2, 5, heads, head_dim // 2, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    cos, sin = angle.cos(), angle.sin()  # with all their bits: the eager chain must fuse what the host fuses
    assert torch.equal(op.split_rope(x, cos, sin), transformer_ltx2.apply_split_rotary_emb(x, (cos, sin)))
    assert torch.equal(op.split_rope(x[:, ::2], cos[:, :, ::2], sin[:, :, ::2]), op.split_rope(x, cos, sin)[:, ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("with_rope", [True, False])
@pytest.mark.parametrize("processor", [transformer_ltx2.LTX2AudioVideoAttnProcessor, transformer_ltx2.LTX2PerturbedAttnProcessor])
def test_eager_chain_is_the_hosts(normal, monkeypatch, processor, with_rope, dtype):
    """The query and key that the host's processor attends with are our eager chain on its projections."""
    attention = transformer_ltx2.LTX2Attention(
        24, heads=3, kv_heads=3, dim_head=8, cross_attention_dim=16, rope_type="split", processor=processor()
    )
    attention.to(dtype).requires_grad_(False)
    attention.norm_q, attention.norm_k = make_norm(normal, 24, dtype), make_norm(normal, 24, dtype)
    seen = {}
    dispatch = transformer_ltx2.dispatch_attention_fn

    def recorded(query, key, *args, **kwargs):
        seen.update(query=query, key=key)
        return dispatch(query, key, *args, **kwargs)

    monkeypatch.setattr(transformer_ltx2, "dispatch_attention_fn", recorded)
    for name in ("to_q", "to_k"):
        getattr(attention, name).register_forward_hook(lambda module, args, output, name=name: seen.update({name: output}))
    ropes = [make_rope(normal, 2, tokens, 3, 4) if with_rope else None for tokens in (5, 7)]
    attention(
        normal(2, 5, 24, dtype=dtype),
        encoder_hidden_states=normal(2, 7, 16, dtype=dtype),
        query_rotary_emb=ropes[0],
        key_rotary_emb=ropes[1],
    )
    query, key = op.eager(attention.norm_q, attention.norm_k, seen["to_q"], seen["to_k"], *ropes)
    assert torch.equal(query, seen["query"].flatten(2)) and torch.equal(key, seen["key"].flatten(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm, rope", [(True, True), (True, False), (False, True)], ids=["norm-rope", "norm", "rope"])
@pytest.mark.parametrize(
    "batch, tokens_q, tokens_k, heads, head_dim", [(2, 5, 3, 4, 128), (1, 3, 3, 8, 64), (2, 1, 4, 8, 128), (1, 1, 1, 16, 64)]
)
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, norm, rope, batch, tokens_q, tokens_k, heads, head_dim):
    args = make_args(
        normal, dtype=dtype, batch=batch, tokens_q=tokens_q, tokens_k=tokens_k, heads=heads, head_dim=head_dim,
        norm=norm, rope=rope,
    )  # fmt: skip
    results = op.qk_norm_split_rope(*args)
    assert [(x.shape, x.dtype, x.is_contiguous()) for x in results] == [(x.shape, dtype, True) for x in args[2:4]]
    assert same_bits(results, contract(*args))
    expected = op.eager(*args)
    if not norm:
        assert same_bits(results, expected)  # products of 11-bit values are exact, so the rotation is
    for i in range(2):
        assert_close(results[i], expected[i], args[i], args[2 + i], args[4 + i])


def test_order_of_the_sum_shows(normal):
    """The inputs of the contract test tell torch's order on the GPU from a plain sum; else any order would pass."""
    norm_q, norm_k, q, k, *_ = args = make_args(normal, rope=False, tokens_q=20, heads=16)
    plain = norm_q.weight * (1 / (q.square().sum(2, keepdim=True) / q.shape[2] + norm_q.eps).sqrt() * q)
    assert not torch.equal(plain, contract(*args)[0])


def test_strided_inputs_are_read_and_left_alone(normal):
    norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal)
    together = torch.full((2, 7, 1032), float("nan"))  # projections of one fused product
    together[:, :5, 4:516], together[:, :3, 516:1028] = q, k
    tables = torch.full((2, 6, 4, 136), float("nan"))  # cos and sin in one
    tables[:, :5, :, :64], tables[:, :5, :, 68:132] = rope_q[0].transpose(1, 2), rope_q[1].transpose(1, 2)
    by_head = tuple(table.contiguous() for table in rope_k)
    before = together.clone(), tables.clone()
    by_token = tuple(tables[:, :5, :, start : start + 64].transpose(1, 2) for start in (0, 68))
    result = op.qk_norm_split_rope(
        norm_q, norm_k, together[:, :5, 4:516], together[:, :3, 516:1028], by_token, by_head
    )  # fmt: skip
    assert same_bits(result, contract(norm_q, norm_k, q, k, rope_q, rope_k))
    assert same_bits(before, (together, tables))


def test_tables_of_one_row_serve_the_batch(normal):
    norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal)
    ropes = [tuple(table[:1].expand(2, -1, -1, -1) for table in rope) for rope in (rope_q, rope_k)]
    assert same_bits(op.qk_norm_split_rope(norm_q, norm_k, q, k, *ropes), contract(norm_q, norm_k, q, k, *ropes))


def test_same_tables_for_q_and_k(normal):
    norm_q, norm_k, q, k, rope, _ = make_args(normal, tokens_q=4, tokens_k=4)
    args = norm_q, norm_k, q, k, rope, rope
    assert same_bits(op.qk_norm_split_rope(*args), contract(*args))


def test_eps_of_each_norm(normal):
    norm_q, norm_k, q, k, *_ = make_args(normal, rope=False)
    norm_q.eps, norm_k.eps = 0.5, 2.0
    args = norm_q, norm_k, q, k, None, None
    assert same_bits(op.qk_norm_split_rope(*args), contract(*args))
    exchanged = make_norm(normal, 512, eps=0.5)
    exchanged.weight = norm_k.weight
    assert not torch.equal(contract_of_side(norm_k, k, None), contract_of_side(exchanged, k, None))


@pytest.mark.parametrize("groups", [1, 2])
def test_compact_tables_give_what_full_ones_give(normal, groups):
    norm_q, norm_k, q, k, *_ = make_args(normal, tokens_q=6, tokens_k=6)
    ropes = [make_compact(normal, groups, batch=2, tokens=6, heads=4, half=64) for _ in range(2)]
    full = [tuple(rope) for rope in ropes]
    assert full[0][0].shape == (2, 4, 6, 64)
    for compact_args, full_args in (
        ((norm_q, norm_k, q, k, *ropes), (norm_q, norm_k, q, k, *full)),
        ((None, None, q, k, ropes[0], ropes[0]), (None, None, q, k, full[0], full[0])),
        ((None, None, q, k, ropes[0], full[1]), (None, None, q, k, *full)),
    ):
        assert same_bits(op.eager(*compact_args), op.eager(*full_args))
        assert same_bits(op.qk_norm_split_rope(*compact_args), contract(*full_args))


def make_compact(normal, groups, *, batch, tokens, heads, half):
    """Tables of three rows and, with two groups, of three rows of columns."""
    cos, sin = (normal(3, heads * half) for _ in range(2))
    columns = normal(3, heads * half // 4, 4) if groups == 2 else None
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, (batch, tokens), generator=generator) for _ in range(groups)]
    return Rope(CompactTables(cos, sin, torch.stack(rows).to(torch.int32), heads, columns))


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(normal, dtype):
    args = norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal, dtype=dtype, tokens_q=6)
    q[0, 0], q[0, 1, 3], q[0, 2, 200], q[0, 3] = 0.0, float("nan"), float("inf"), 6e-8
    q[0, 4] = 60000.0 if dtype == torch.float16 else 1e20
    rope_q[0][1, 0, 0], rope_q[1][1, 1, 1, 5], rope_k[0][0, 0] = float("inf"), float("nan"), 0.0
    results = op.qk_norm_split_rope(*args)
    assert same_bits(results, contract(*args))
    for result, eager in zip(results, op.eager(*args)):
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(test(result), test(eager))


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far = far_apart(rows=3, width=512)[:, None]
    _, _, near, _, rope, _ = make_args(normal, dtype=torch.float16, batch=3, tokens_q=1, norm=False)
    for x, y, tables in ((far, near, rope), (far.transpose(0, 1), near.transpose(0, 1), [t.transpose(0, 2) for t in rope])):
        for args in ((x, y), (y, x)):
            assert same_bits(
                op.qk_norm_split_rope(None, None, *args, tables, tables), contract(None, None, *args, tables, tables)
            )


def test_tables_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    near = normal(3, 1, 512), normal(1, 3, 512), normal(1, 1, 512 * 3)
    far = far_apart(rows=3, width=1024, dtype=torch.float32)[:, :256]
    by_batch = far.view(3, 1, 4, 64).transpose(1, 2)
    by_token = by_batch.transpose(0, 2)
    by_head = far_apart(rows=12, width=64, dtype=torch.float32)[None, :, None]
    assert by_head.stride(1) * 11 > 2**31
    for x, table in zip(near, (by_batch, by_token)):
        assert same_bits(
            op.qk_norm_split_rope(None, None, x, x, (table, table), (table, table)),
            contract(None, None, x, x, (table, table), (table, table)),
        )
    x = near[2]
    assert same_bits(
        op.qk_norm_split_rope(None, None, x, x, (by_head, by_head), (by_head, by_head)),
        contract(None, None, x, x, (by_head, by_head), (by_head, by_head)),
    )


def hooked(norm):
    norm.register_forward_hook(lambda module, args, output: output)
    return norm


def prehooked(norm):
    norm.register_forward_pre_hook(lambda module, args: None)
    return norm


def overridden(norm):
    norm.forward = lambda x: x
    return norm


class Subclass(torch.nn.RMSNorm):
    """As PEFT's wrappers are: something other than what it was."""


def shifted(x):
    """The same values, one element away from an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def spread(x):
    """The same values, rows an odd number of elements apart."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., :-1].copy_(x)


def both(rope, change):
    return tuple(change(table) for table in rope)


def of_weight(norm, weight):
    """`norm` with a weight that lies in memory as `weight` does."""
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


REFUSALS = {  # {number of the argument: change}, message
    "one norm": ({1: lambda _: None}, "norms and tables: give both or neither"),
    "one table": ({4: lambda _: None}, "norms and tables: give both or neither"),
    "nothing": (dict.fromkeys((0, 1, 4, 5), lambda _: None), "norms and tables: nothing to do"),
    "rank of q": ({2: lambda q: q[0]}, "q: expected rank 3"),
    "rank of k": ({3: lambda k: k[None]}, "k: expected rank 3"),
    "dtype of q": ({2: torch.Tensor.double, 3: torch.Tensor.double}, "q: dtype torch.float64"),
    "dtype of k": ({3: torch.Tensor.half}, "q: dtype torch.float32; expected"),
    "device of q": ({2: lambda q: q.to("meta"), 3: lambda k: k.to("meta")}, "q: on meta"),
    "device of k": ({3: lambda k: k.to("meta")}, "q: on cpu"),
    "batch": ({3: lambda k: k[:1]}, "q: shape [2, 5, 512] beside [1, 3, 512]"),
    "width": ({2: lambda q: q[..., :256], 3: lambda k: k[..., :256]}, "q: width 256 is not a multiple of 512"),
    "layout of q": ({2: lambda q: q.mT.contiguous().mT}, "q: rows must be contiguous and aligned"),
    "layout of k": ({3: lambda k: k.mT.contiguous().mT}, "k: rows must be contiguous and aligned"),
    "alignment of q": ({2: shifted}, "q: rows must be contiguous and aligned"),
    "alignment of the rows of k": ({3: spread}, "k: rows must be contiguous and aligned"),
    "no queries": ({2: lambda q: q[:, :0]}, "q: empty"),
    "no keys": ({3: lambda k: k[:, :0], 5: lambda rope: both(rope, lambda t: t[:, :, :0])}, "k: empty"),
    "hooked norm": ({0: hooked}, "norm_q: not a plain torch.nn.RMSNorm"),
    "norm with pre-hook": ({1: prehooked}, "norm_k: not a plain torch.nn.RMSNorm"),
    "norm with another forward": ({0: overridden}, "norm_q: not a plain torch.nn.RMSNorm"),
    "norm without weight": ({0: lambda _: torch.nn.RMSNorm(512, eps=1e-6, elementwise_affine=False)}, "norm_q: not a plain"),
    "norm without eps": ({0: lambda _: torch.nn.RMSNorm(512)}, "norm_q: not a plain"),
    "wrapped norm": ({1: lambda _: Subclass(512, eps=1e-6)}, "norm_k: not a plain"),
    "another norm": ({1: lambda _: torch.nn.LayerNorm(512)}, "norm_k: not a plain"),
    "width of a norm": ({1: lambda _: torch.nn.RMSNorm(1024, eps=1e-6)}, "norm_k: weight is"),
    "dtype of a norm": ({0: lambda _: torch.nn.RMSNorm(512, eps=1e-6, dtype=torch.float16)}, "norm_q: weight is torch.float16"),
    "device of a norm": (
        {0: lambda _: torch.nn.RMSNorm(512, eps=1e-6, device="meta")},
        "norm_q: weight is torch.float32 on meta",
    ),
    "alignment of a weight": ({0: lambda norm: of_weight(norm, torch.ones(513)[1:])}, "norm_q: weight must be contiguous and"),
    "stride of a weight": ({1: lambda norm: of_weight(norm, torch.ones(1024)[::2])}, "norm_k: weight must be contiguous and"),
    "rank of k alone": ({3: lambda k: k[0]}, "k: expected rank 3"),
    "rank of a table": ({4: lambda rope: both(rope, lambda t: t[0])}, "cos_q: shape [4, 5, 64], expected [B, H, S, r]"),
    "batch of a table": ({4: lambda rope: both(rope, lambda t: t[:1])}, "cos_q: shape [1, 4, 5, 64]"),
    "tokens of a table": ({5: lambda rope: (rope[0], rope[1][:, :, :2])}, "sin_k: shape [2, 4, 2, 64]"),
    "width of a table": ({4: lambda rope: both(rope, lambda t: t[..., :32])}, "cos_q: shape [2, 4, 5, 32]; head_dim"),
    "fewer heads": ({5: lambda rope: both(rope, lambda t: t[:, :2])}, "cos_k: shape [2, 2, 3, 64]; head_dim"),
    "other heads": ({5: lambda rope: both(rope, lambda t: t.reshape(2, 8, 3, 32))}, "rope_k: 8 heads, rope_q 4"),
    "dtype of a table": ({4: lambda rope: (rope[0], rope[1].half())}, "sin_q: torch.float16 on cpu, expected torch.float32"),
    "device of a table": ({5: lambda rope: both(rope, lambda t: t.to("meta"))}, "cos_k: torch.float32 on meta"),
    "layout of a table": ({4: lambda rope: both(rope, lambda t: t.mT.contiguous().mT)}, "cos_q: rows must be contiguous"),
    "alignment of a table": ({5: lambda rope: (rope[0], shifted(rope[1]))}, "sin_k: rows must be contiguous and aligned"),
    "sin unlike cos": ({5: lambda rope: (rope[0], rope[1].contiguous())}, "sin_k: strides"),
}


def changed(args, change):
    return [change.get(i, lambda arg: arg)(arg) for i, arg in enumerate(args)]


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = make_args(normal)
    with no_computation:
        assert op.refusal(*good) is None
        assert op.refusal(*good[:4], None, None) is None and op.refusal(None, None, *good[2:]) is None
        op.signature(*good)
    bad = changed(good, change)
    with no_computation:
        assert named in op.refusal(*bad)
    with pytest.raises(ValueError, match="^qk_norm_split_rope: ") as caught:
        op.qk_norm_split_rope(*bad)
    assert named in str(caught.value)


def test_head_dim_that_no_kernel_has_is_refused(normal):
    for heads, head_dim in ((16, 32), (2, 256)):
        args = make_args(normal, heads=heads, head_dim=head_dim)
        assert "head_dim must be 64 or 128" in op.refusal(*args)
        assert op.refusal(*args[:4], None, None) is None  # without tables heads do not matter


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(tokens=5), "rope_q: for [2, 5] tokens"),
        (dict(batch=1), "rope_q: for [1, 6] tokens"),
        (dict(heads=8), "rope_q: for [2, 6] tokens of 512 channels"),
        (dict(heads=16, half=16), "rope_q: head_dim must be 64 or 128, got 32"),
    ],
)
def test_refusal_of_compact_tables(normal, change, named):
    norm_q, norm_k, q, k, *_ = make_args(normal, tokens_q=6, tokens_k=6)
    size = dict(batch=2, tokens=6, heads=4, half=64)
    good, bad = make_compact(normal, 2, **size), make_compact(normal, 2, **size | change)
    assert op.refusal(norm_q, norm_k, q, k, good, good) is None
    assert named in op.refusal(norm_q, norm_k, q, k, bad, bad)


def test_is_plain_only_for_a_norm_that_can_be_read(normal):
    x = normal(1, 1, 512)
    assert op.is_plain(make_norm(normal, 512), x)
    for norm in (
        make_norm(normal, 512, torch.float16),
        torch.nn.RMSNorm(512, eps=1e-6, device="meta"),
        hooked(make_norm(normal, 512)),
        Subclass(512, eps=1e-6),
    ):
        assert not op.is_plain(norm, x)


def test_signature_tells_layouts_norms_and_tables_apart(normal):
    args = norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal, tokens_q=3)
    same = op.signature(make_norm(normal, 512), make_norm(normal, 512), q.clone(), k.clone(), rope_q, rope_k)
    assert same == op.signature(*args)
    compact = [make_compact(normal, groups, batch=2, tokens=3, heads=4, half=64) for groups in (1, 2)]
    changes = [
        {0: lambda _: make_norm(normal, 512, eps=1e-5)},
        {1: hooked},
        {0: lambda _: None, 1: lambda _: None},
        {2: torch.Tensor.half},
        {3: lambda k: k.transpose(0, 1).contiguous().transpose(0, 1)},
        {2: shifted},
        {4: lambda _: None, 5: lambda _: None},
        {5: lambda _: rope_q},  # q and k share their tables
        {4: lambda rope: both(rope, torch.Tensor.contiguous)},
        {4: lambda _: compact[0], 5: lambda _: compact[0]},
        {4: lambda _: compact[1], 5: lambda _: compact[1]},
    ]
    signatures = {same}
    for change in changes:
        fresh = make_norm(normal, 512), make_norm(normal, 512), *args[2:]  # a hook stays on the norm it is put on
        signatures.add(op.signature(*changed(fresh, change)))
    assert len(signatures) == 1 + len(changes)


@pytest.mark.parametrize("norm, rope", [(True, True), (True, False), (False, True)])
def test_rehearsals_are_many_eligible_rows_and_leave_the_random_state_alone(normal, norm, rope):
    args = make_args(normal, dtype=torch.bfloat16, norm=norm, rope=rope)
    before = torch.get_rng_state()
    trials = list(op.rehearsals(*args))
    assert torch.equal(before, torch.get_rng_state())
    assert trials
    for trial in trials:
        assert op.refusal(*trial) is None
        assert (trial[0], trial[1]) == args[:2] and (trial[4] is not None) == rope
        for x in trial[2:4]:
            assert x.dtype == torch.bfloat16 and x.shape[0] * x.shape[1] >= 4096 and x.shape[2] == 512
        assert not torch.equal(trial[2], trial[3])


def test_compiled_it_is_the_eager_chain(normal, monkeypatch):
    monkeypatch.setattr(op, "launch", lambda *args: pytest.fail("launched while compiling"))
    compiled = torch.compile(op.qk_norm_split_rope, backend="eager", fullgraph=True)
    for options in (dict(), dict(norm=False), dict(rope=False)):
        args = make_args(normal, **options)
        assert same_bits(compiled(*args), op.eager(*args))


def test_custom_op_of_a_number_that_stands_for_another_op(normal, stand_ins):
    """A graph that another process saved brings that process's numbers."""
    other = FirstSight("head_gate", head_gate)
    norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal, batch=1, tokens_q=2, tokens_k=1)
    weights, tables = (norm_q.weight, norm_k.weight), (*rope_q, *rope_k)
    result = torch.ops.ltx2_fastpath.qk_norm_split_rope(other.number, q, k, *weights, *tables, norm_q.eps, norm_k.eps)
    assert same_bits(result, op.eager(norm_q, norm_k, q, k, rope_q, rope_k)) and other.fast == other.stock == 0


@pytest.mark.parametrize("site_is_there", [True, False])
def test_custom_op_is_its_site(normal, stand_ins, site_is_there):
    """What a compiled graph holds: verified at its first run, launched from then on; the eager chain once its site is gone."""
    site = FirstSight("attn1", op)
    number = site.number if site_is_there else -1
    norm_q, norm_k, q, k, rope_q, rope_k = make_args(normal, batch=1, tokens_q=2, tokens_k=1)
    none = (None, None)
    for norms, keys, tables in (
        ((norm_q, norm_k), k, (rope_q, rope_k)),
        ((norm_q, norm_k), q.flip(1), (rope_q, None)),  # of q, for both
        ((norm_q, norm_k), k, none),
        (none, k, (rope_q, rope_k)),
    ):
        of_k = tables[0] if tables[1] is None else tables[1]
        expected = op.eager(*norms, q, keys, tables[0], of_k)
        weights = [norm and norm.weight for norm in norms]
        args = number, q, keys, *weights, *(tables[0] or none), *(tables[1] or none), norm_q.eps, norm_k.eps
        before = site.fast, site.stock
        for _ in range(2):
            assert same_bits(torch.ops.ltx2_fastpath.qk_norm_split_rope(*args), expected)
        assert (site.fast - before[0], site.stock - before[1]) == ((1, 1) if site_is_there else (0, 0))
        torch.library.opcheck(
            torch.ops.ltx2_fastpath.qk_norm_split_rope.default, args, test_utils=("test_schema", "test_faketensor")
        )


def test_traceable(normal):
    norm, x = make_norm(normal, 1024), normal(1, 2, 1024)
    assert op.traceable(norm, norm, x, 1024, 8) and op.traceable(norm, norm, x, 1024, 16)
    assert not op.traceable(norm, norm, x, 1024, 32)  # heads of 32
    assert not op.traceable(norm, norm, x, 512, 4)
    assert not op.traceable(norm, norm, x.double(), 1024, 8) and not op.traceable(norm, norm, x.to("meta"), 1024, 8)
    for other in (hooked(make_norm(normal, 1024)), Subclass(1024, eps=1e-6), torch.nn.RMSNorm(1024), torch.nn.LayerNorm(1024)):
        assert not op.traceable(norm, other, x, 1024, 8)
