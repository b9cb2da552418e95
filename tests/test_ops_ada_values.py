"""ada_values: every table + temb add of a block in one launch, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import ada_values as op
from ltx2_fastpath.ops.support import IndexedRows, full

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def make_pairs(normal, *, dtype=torch.float32, batch=2, tokens=5):
    """Video and audio tables as a block has them: other heights and widths, one of them a slice, row and per-token tembs."""
    cross = normal(5, 24, dtype=dtype)
    return (
        (normal(9, 40, dtype=dtype), normal(batch, tokens, 9 * 40, dtype=dtype)),
        (normal(6, 7, dtype=dtype), normal(batch, 1, 6 * 7, dtype=dtype)),
        (cross[:4], normal(batch, tokens, 4 * 24, dtype=dtype)),
        (cross[4:], normal(batch, 1, 24, dtype=dtype)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_eager_chain_is_the_hosts(normal, dtype):
    pairs = make_pairs(normal, dtype=dtype)
    host = [LTX2VideoTransformerBlock.get_mod_params(table, temb, temb.shape[0]) for table, temb in pairs]
    assert same_bits(op.eager(*pairs), host)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, tokens", [(1, 1), (2, 5), (3, 2)])
def test_equals_eager(normal, dtype, batch, tokens):
    pairs = make_pairs(normal, dtype=dtype, batch=batch, tokens=tokens)
    values = op.ada_values(*pairs)
    assert same_bits(values, op.eager(*pairs))
    assert [len(rows) for rows in values] == [9, 6, 4, 1]
    assert {row.shape for row in values[0]} == {(batch, tokens, 40)} and {row.shape for row in values[1]} == {(batch, 1, 7)}


def test_single_pair(normal):
    pairs = make_pairs(normal)[:1]
    assert same_bits(op.ada_values(*pairs), op.eager(*pairs))


def test_strided_tembs(normal):
    (table, _), (other, _), *_ = make_pairs(normal)
    wide = normal(4, 10, 9 * 40 + 3)
    pairs = (
        (table, wide[1::2, 2:9:3, 1 : 9 * 40 + 1]),  # every stride but the last is another
        (other, normal(6 * 7).expand(2, 3, -1)),  # one row serves all
        (table, wide[:2].transpose(0, 1)[:2, :, : 9 * 40]),  # tokens lie further apart than batch rows
    )
    assert same_bits(op.ada_values(*pairs), op.eager(*pairs))


def test_indexed_tembs_give_indexed_values(normal):
    """Of a temb with few distinct rows only those are added to; the index goes along."""
    (table, _), (other, row), (cross, per_token), _ = make_pairs(normal)
    index = torch.tensor([[0, 2, 2, 1], [1, 0, 0, 2]], dtype=torch.int32)
    indexed = IndexedRows(normal(3, 9 * 40), index)
    for temb in (indexed, IndexedRows(normal(5, 2 * 9 * 40)[:, 3 : 3 + 9 * 40], index)):
        pairs = ((table, temb), (other, row), (cross, per_token))
        plain = ((table, temb.full()), *pairs[1:])
        assert temb.full().shape == (2, 4, 360) and torch.equal(temb.full()[1, 3], temb.values[2])
        for values in (op.ada_values(*pairs), op.eager(*pairs)):
            assert all(value.index is index and value.values.shape == (temb.values.shape[0], 40) for value in values[0])
            assert same_bits([[full(value) for value in of_pair] for of_pair in values], op.eager(*plain))
    assert op.refusal(*pairs) is None and op.signature(*pairs) != op.signature(*plain)


def test_batches_may_differ(normal):
    pairs = (normal(2, 8), normal(3, 2, 16)), (normal(3, 8), normal(1, 4, 24))
    assert same_bits(op.ada_values(*pairs), op.eager(*pairs))


@pytest.mark.parametrize(
    "table_dtype, temb_dtype", [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_result_has_the_promoted_dtype(normal, table_dtype, temb_dtype):
    pairs = ((normal(3, 24, dtype=table_dtype), normal(2, 2, 72, dtype=temb_dtype)),)
    values = op.ada_values(*pairs)
    assert values[0][0].dtype == torch.float32 and same_bits(values, op.eager(*pairs))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_special_values(normal):
    table, temb = normal(2, 8), normal(1, 2, 16)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 3e38, -3e38])
    table[0], temb[0, 0, :8], temb[0, 1, :8] = special, special, special.flip(0)
    assert same_bits(op.ada_values((table, temb)), op.eager((table, temb)))


def test_neighbours_of_the_inputs_are_not_read_or_written(normal):
    around = normal(4, 4, 60)
    around[0], around[:, 0], around[..., 48:] = (float("nan") for _ in range(3))
    before = around.clone()
    values = op.ada_values((normal(2, 24), around[1:, 1:, :48]))
    assert all(row.isfinite().all() for row in values[0])
    assert same_bits(around, before)


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart):
    temb = far_apart(rows=3, width=16)[None]
    assert 2**30 < temb.stride(1) < 2**31 < 2 * temb.stride(1)
    table = torch.arange(16.0, dtype=temb.dtype).view(2, 8)
    assert same_bits(op.ada_values((table, temb)), op.eager((table, temb)))
    batched = temb.transpose(0, 1)
    assert same_bits(op.ada_values((table, batched)), op.eager((table, batched)))


REFUSALS = {
    "no pairs": (lambda a, b: (), "at least one"),
    "rank of a table": (lambda a, b: (a, (b[0][None], b[1])), "table 1: expected rank 2"),
    "rank of a temb": (lambda a, b: (a, (b[0], b[1][0])), "temb 1: expected rank 3"),
    "rank of the first temb": (lambda a, b: ((a[0], a[1][0, 0]),), "temb 0: expected rank 3"),
    "no rank at all": (lambda a, b: ((a[0], torch.tensor(1.0)),), "temb 0: expected rank 3"),
    "dtype of a table": (lambda a, b: ((a[0].double(), a[1].double()),), "table 0: unsupported dtype torch.float64"),
    "dtype of a temb": (lambda a, b: ((a[0], a[1].double()),), "temb 0: unsupported dtype torch.float64"),
    "mixed results": (lambda a, b: (a, (b[0].half(), b[1].half())), "table 1, temb 1: dtypes"),
    "device of a table": (lambda a, b: ((a[0].to("meta"), a[1]),), "table 0: on meta"),
    "device of a temb": (lambda a, b: (a, (b[0], b[1].to("meta"))), "temb 1: on meta"),
    "a device without kernels": (lambda a, b: ((a[0].to("meta"), a[1].to("meta")),), "table 0: on meta"),
    "width": (lambda a, b: (a, (b[0], b[1][..., :-1])), "temb 1: width 41, but table 1"),
    "number of rows": (lambda a, b: (a, (b[0][:5], b[1])), "temb 1: width 42, but table 1"),
    "layout of a table": (lambda a, b: (a, (b[0].t().contiguous().t(), b[1])), "table 1: rows must be contiguous"),
    "layout of a temb": (lambda a, b: (a, (b[0], b[1].mT.contiguous().mT)), "temb 1: the last dimension"),
    "no tokens": (lambda a, b: ((a[0], a[1][:, :0]),), "temb 0: empty"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = make_pairs(normal, tokens=3)[:2]
    good = (good[0], (good[1][0], good[1][1].repeat(1, 3, 1)))
    bad = change(*good)
    with no_computation:
        assert op.refusal(*good) is None
        assert named in op.refusal(*bad)
        op.signature(*good)
    with pytest.raises(ValueError, match="^ada_values: ") as caught:
        op.ada_values(*bad)
    assert named in str(caught.value)


def test_signature_tells_layouts_apart(normal):
    (table, temb), *_ = make_pairs(normal)
    same = op.signature((table.clone(), temb.clone()))
    assert same == op.signature((table, temb)) and hash(same) == hash(op.signature((table, temb)))
    others = [(table.half(), temb), (table, temb[:, :1]), (table, temb.transpose(0, 1).contiguous().transpose(0, 1))]
    assert len({same, *(op.signature(pair) for pair in others)}) == 4


def test_compiled_it_is_the_eager_chain(normal, monkeypatch):
    monkeypatch.setattr(op, "launch", lambda *args: pytest.fail("launched while compiling"))
    pairs = make_pairs(normal)
    compiled = torch.compile(lambda *pairs: op.ada_values(*pairs), backend="eager", fullgraph=True)
    assert same_bits(list(compiled(*pairs)), op.eager(*pairs))
