"""gelu: what can be said without a GPU of a kernel that only CUDA has. tests/gpu runs it."""

import pytest
import torch
from diffusers.models.activations import GELU
from torch._subclasses import FakeTensorMode

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import cuda
from ltx2_fastpath.ops import gelu as op

EVERY_BF16 = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_eager_chain_is_the_hosts(normal, dtype, approximate):
    module = GELU(8, 24, approximate=approximate).to(dtype).requires_grad_(False)
    x = normal(2, 5, 8, dtype=dtype)
    assert torch.equal(op.eager(module.proj(x), approximate), module(x))


def test_beyond_the_table_gelu_is_half_x_or_x_or_zero():
    """What the kernel computes outside of its table, for every bf16 value there, NaN and infinities included."""
    magnitude = EVERY_BF16.view(torch.int16) & 0x7FFF
    below, above = magnitude < op._LOW, magnitude >= op._LOW + op._SIZE
    assert below.sum() + above.sum() + 2 * op._SIZE == EVERY_BF16.numel()
    x = EVERY_BF16.float()
    expected = torch.where(below, 0.5 * x, torch.where(x > 0, x, x * 0.0)).to(torch.bfloat16)
    outside = below | above
    assert same_bits(op.eager(EVERY_BF16, "tanh")[outside], expected[outside])
    assert op.eager(EVERY_BF16, "tanh")[~outside].unique().numel() > op._SIZE  # and inside it is not


def test_table_holds_torchs_own_values():
    table = op._table(torch.device("cpu"), "tanh")
    inside = EVERY_BF16.view(torch.int16) & 0x7FFF
    inside = (inside >= op._LOW) & (inside < op._LOW + op._SIZE)
    positive, negative = EVERY_BF16[inside & (EVERY_BF16 > 0)], EVERY_BF16[inside & (EVERY_BF16 < 0)]
    assert torch.equal(table[: op._SIZE], op.eager(positive, "tanh"))
    assert torch.equal(table[op._SIZE :].sort().values, op.eager(negative, "tanh").sort().values)
    assert torch.equal(table[op._SIZE :], op.eager(-positive, "tanh"))


def test_rehearsal_holds_every_bf16_value():
    (trial,) = op.rehearsals(torch.zeros(8, dtype=torch.bfloat16), "tanh")
    x, approximate = trial
    assert x.dtype == torch.bfloat16 and x.view(torch.int16).unique().numel() == 65536 and approximate == "tanh"


REFUSALS = {
    "device": (lambda x: (x.cpu(), "tanh"), "x: on cpu"),
    "dtype": (lambda x: (x.half(), "tanh"), "x: dtype torch.float16"),
    "layout": (lambda x: (x.t(), "tanh"), "x: must be contiguous"),
    "size": (lambda x: (x.new_empty(1, 12), "tanh"), "with a multiple of 8 elements; got [1, 12]"),
    "no elements": (lambda x: (x.new_empty(0, 16), "tanh"), "x: empty"),
    "few elements": (lambda x: (x.new_empty(4, 8192), "tanh"), "x: 32768 elements"),
    "another approximation": (lambda x: (x, "none"), "approximate: 'none'"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument(monkeypatch, case):
    change, named = REFUSALS[case]
    monkeypatch.setattr(cuda, "IMPLEMENTATIONS", ("cuda", "triton"))
    with FakeTensorMode():
        good = torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda")
        bad = change(good)
        assert op.refusal(good, "tanh") is None
        assert named in op.refusal(*bad)
        with pytest.raises(ValueError, match="^gelu: ") as caught:
            op.gelu(*bad)
    assert named in str(caught.value)


def test_without_cuda_core_it_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "IMPLEMENTATIONS", ("triton",))
    with FakeTensorMode():
        assert "cuda.core" in op.refusal(torch.empty(4, 16, dtype=torch.bfloat16, device="cuda"), "tanh")


def test_signature_tells_layouts_apart():
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    assert op.signature(x, "tanh") == op.signature(x.clone(), "tanh")
    others = [(x, "none"), (x.half(), "tanh"), (x[:2], "tanh"), (x.t(), "tanh"), (x.new_zeros(65)[1:].view(4, 16), "tanh")]
    assert len({op.signature(x, "tanh"), *(op.signature(*args) for args in others)}) == 1 + len(others)


def test_compiled_it_is_the_eager_chain(normal, monkeypatch):
    monkeypatch.setattr(op, "launch", lambda *args: pytest.fail("launched while compiling"))
    x = normal(2, 16, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(op.gelu, backend="eager", fullgraph=True)(x), op.eager(x, "tanh"))


def test_custom_op_has_a_fake():
    with FakeTensorMode():
        x = torch.empty(4, 16, dtype=torch.bfloat16, device="cuda")
        out = torch.ops.ltx2_fastpath.gelu(x, "tanh")
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
