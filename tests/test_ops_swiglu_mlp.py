"""swiglu_mlp: the decoder's MLP in tiles, with torch's products and our activation between, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host
from test_ops_rms_norm_modulate import hooked
from test_ops_swiglu import contract as activated

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import swiglu
from ltx2_fastpath.ops import swiglu_mlp as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)
GRID = (2, 3, 4)


def make_args(normal, *, batch=1, width=16, hidden=32, tile=7, dtype=torch.float32):
    mlp = host.LTX2VideoVaeSwiGLU(width, hidden).to(dtype).requires_grad_(False)
    for parameter in mlp.parameters():
        parameter.copy_(normal(*parameter.shape) * 0.3)
    return mlp.w_gate, mlp.w_up, mlp.w_down, normal(batch, *GRID, width, dtype=dtype), tile


def contract(w_gate, w_up, w_down, x, tile):
    """The module's docstring in plain torch."""
    parts = []
    for part in x.flatten(1, -2).split(tile, 1):
        rows = part.reshape(-1, x.shape[-1])
        middle = activated(rows @ w_gate.weight.T, rows @ w_up.weight.T)
        parts.append((middle @ w_down.weight.T).view(part.shape))
    return torch.cat(parts, 1).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tile", [5, 24, 100])
def test_eager_chain_is_the_hosts(normal, monkeypatch, dtype, batch, tile):
    monkeypatch.setattr(host, "_SWIGLU_TILE_SIZE", tile)
    mlp = host.LTX2VideoVaeSwiGLU(16, 32).to(dtype).requires_grad_(False)
    x = normal(batch, *GRID, 16, dtype=dtype)
    for given in (x, x[..., ::2].repeat_interleave(2, -1), x.transpose(1, 3)):
        assert same_bits(op.eager(mlp.w_gate, mlp.w_up, mlp.w_down, given, tile), mlp(given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tile", [1, 5, 8, 24, 100])
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, batch, tile):
    args = make_args(normal, batch=batch, tile=tile, dtype=dtype)
    before = args[3].clone()
    found = op.swiglu_mlp(*args)
    assert same_bits(found, contract(*args)) and found.is_contiguous() and torch.equal(args[3], before)
    torch.testing.assert_close(found, op.eager(*args), rtol=0.01, atol=0.01)


def test_allocates_two_buffers_and_the_result(normal, monkeypatch):
    """Whatever the number of tiles."""
    args = make_args(normal, tile=2)
    monkeypatch.setattr(swiglu, "launch", lambda candidate, gate, up, out: out)  # the interpreter's allocates
    made = []
    for name in ("empty_like", "new_empty"):
        owner = torch if name == "empty_like" else torch.Tensor
        allocate = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, allocate=allocate, **options: made.append(1) or allocate(*args, **options))
    op.launch(op.CANDIDATES[0], *args)
    assert len(made) == 2


def test_first_sight(normal, monkeypatch):
    monkeypatch.setattr(op, "eager", contract)
    args = make_args(normal)
    site = FirstSight("here", op)
    assert same_bits(site(*args), site(*args)) and site.fast == 1
    (trial,) = op.rehearsals(*args)
    assert op.refusal(*trial) is None and trial[3].shape[:-1].numel() >= 4096
    launch = swiglu.launch
    monkeypatch.setattr(swiglu, "launch", lambda candidate, gate, up, out: launch(candidate, gate, up, out).mul_(1.01))
    wrong = FirstSight("there", op)
    assert same_bits(wrong(*args), wrong(*args)) and wrong.fast == 0


def biased(linear):
    return torch.nn.Linear(linear.in_features, linear.out_features)


REFUSALS = {
    "rank": (lambda g, u, d, x, t: (g, u, d, x[0, 0, 0], t), "x: shape"),
    "empty": (lambda g, u, d, x, t: (g, u, d, x[:0], t), "x: shape"),
    "layout": (lambda g, u, d, x, t: (g, u, d, x.transpose(1, 2), t), "x: shape"),
    "dtype": (lambda g, u, d, x, t: (g, u, d, x.double(), t), "x: torch.float64"),
    "device": (lambda g, u, d, x, t: (g, u, d, x.to("meta"), t), "x: torch.float32 on meta"),
    "bias": (lambda g, u, d, x, t: (biased(g), u, d, x, t), "w_gate: not a plain"),
    "hook": (lambda g, u, d, x, t: (g, hooked(u), d, x, t), "w_up: not a plain"),
    "kind": (lambda g, u, d, x, t: (g, u, torch.nn.Sequential(d), x, t), "w_down: not a plain"),
    "dtype of a weight": (lambda g, u, d, x, t: (g, u.half(), d, x, t), "w_up: not a plain"),
    "width": (lambda g, u, d, x, t: (g, u, d, x.repeat(1, 1, 1, 1, 2), t), "w_gate: shapes"),
    "weights": (lambda g, u, d, x, t: (g, u, g, x, t), "w_gate: shapes"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    args = make_args(normal)
    with no_computation:
        assert op.refusal(*args) is None
        hash(op.signature(*args))
    bad = change(*args)
    with no_computation:
        hash(op.signature(*bad))
        assert op.refusal(*bad).startswith(named)
    with pytest.raises(ValueError, match="^swiglu_mlp: "):
        op.swiglu_mlp(*bad)


def test_signature_tells_layouts_weights_and_tiles_apart(normal):
    w_gate, w_up, w_down, x, tile = args = make_args(normal)
    half, watched = torch.nn.Linear(16, 32, bias=False).half(), hooked(torch.nn.Linear(16, 32, bias=False))
    others = [(w_gate, w_up, w_down, x, 8), (w_gate, w_up, w_down, x[:, :1], tile)]
    others += [(half, w_up, w_down, x, tile), (watched, w_up, w_down, x, tile)]
    assert len({op.signature(*args), *(op.signature(*each) for each in others)}) == 5
