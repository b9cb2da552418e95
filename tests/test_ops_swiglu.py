"""swiglu: silu(gate) * up in one launch and into a given buffer, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host
from test_ops_rms_norm_modulate import shifted

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import swiglu as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def contract(gate, up, out=None):
    """The module's docstring in plain torch. The exponential is numpy's, as it is in the interpreter."""
    exponential = torch.from_numpy(np.exp(-gate.float().numpy()))
    return (gate.float() / (1 + exponential)).to(gate.dtype) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_eager_chain_is_the_hosts(normal, dtype):
    """Between the host's products, in one tile and in several."""
    mlp = host.LTX2VideoVaeSwiGLU(8, 16).to(dtype).requires_grad_(False)
    seen = {}
    for name in ("w_gate", "w_up"):
        mlp.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: seen.update({name: output}))
    mlp.w_down.register_forward_pre_hook(lambda module, args: seen.update(down=args[0]))
    for tokens in (5, host._SWIGLU_TILE_SIZE + 3):
        mlp(normal(2, tokens, 8, dtype=dtype))
        assert torch.equal(op.eager(seen["w_gate"], seen["w_up"]), seen["down"])
        assert op.refusal(seen["w_gate"], seen["w_up"]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (2, 5, 48), (1, 3, 2048)])
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, shape):
    gate, up = normal(*shape, dtype=dtype) * 4, normal(*shape, dtype=dtype)
    found = op.swiglu(gate, up)
    assert found.dtype == dtype and same_bits(found, contract(gate, up))
    bound = 4 * torch.finfo(dtype).eps  # two roundings, and the two exponentials' last bits
    torch.testing.assert_close(found, op.eager(gate, up), rtol=bound, atol=torch.finfo(dtype).smallest_normal)


def test_writes_into_the_buffer_and_nowhere_else(normal):
    gate, up = normal(3, 100), normal(3, 100)
    before = gate.clone(), up.clone()
    buffer = torch.full((5, 100), 7.0)
    found = op.swiglu(gate, up, buffer[1:4])
    assert found.data_ptr() == buffer[1:4].data_ptr() and same_bits(buffer[1:4], contract(gate, up))
    assert (buffer[[0, 4]] == 7).all() and same_bits(before, (gate, up))
    untouched = buffer.clone()
    assert same_bits(op.eager(gate, up, buffer[:3]), op.eager(gate, up)) and same_bits(buffer, untouched)


@pytest.mark.filterwarnings("ignore:.* encountered in")
def test_every_fp16_gate():
    gate = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16)
    for up in (torch.ones_like(gate), gate.flip(0)):
        assert same_bits(op.swiglu(gate, up), contract(gate, up))


@pytest.mark.filterwarnings("ignore:.* encountered in")
def test_first_sight_compares_the_buffer_with_a_tensor_of_its_own(normal, monkeypatch):
    monkeypatch.setattr(op, "eager", contract)
    gate, up, out = normal(3, 100), normal(3, 100), torch.zeros(3, 100)
    site = FirstSight("here", op)
    first, second = site(gate, up, out), site(gate, up, out)
    assert site.fast == 1 and second is out and first is not out and same_bits(first, second)
    monkeypatch.setattr(op, "launch", lambda candidate, gate, up, out=None: gate * up)
    wrong = FirstSight("there", op)
    assert same_bits(wrong(gate, up, out), wrong(gate, up, out)) and wrong.fast == 0


REFUSALS = {
    "dtype": (lambda g, u, o: (g.double(), u.double()), "gate: dtype torch.float64"),
    "dtype of up": (lambda g, u, o: (g, u.half()), "up: dtype torch.float16"),
    "device": (lambda g, u, o: (g, u, o.to("meta")), "out: on meta"),
    "shape": (lambda g, u, o: (g, u[:2], o), "up: shape"),
    "layout": (lambda g, u, o: (g, u.T.contiguous().T), "up: shape"),
    "layout of out": (lambda g, u, o: (g, u, o.T.contiguous().T), "out: shape"),
    "empty": (lambda g, u, o: (g[:0], u[:0]), "gate: empty"),
    "in place": (lambda g, u, o: (g, u, g), "out: is gate or up"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    args = normal(3, 8), normal(3, 8), normal(3, 8)
    with no_computation:
        assert op.refusal(*args) is None
        hash(op.signature(*args))
    bad = change(*args)
    with no_computation:
        assert op.refusal(*bad).startswith(named)
    with pytest.raises(ValueError, match="^swiglu: "):
        op.swiglu(*bad)


def test_signature_tells_layouts_apart(normal):
    gate, up, out = normal(3, 8), normal(3, 8), normal(3, 8)
    args = [(gate, up), (gate, up, out), (gate, shifted(up)), (gate.half(), up.half())]
    assert len({op.signature(*each) for each in args}) == len(args)
