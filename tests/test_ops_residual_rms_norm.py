"""residual_rms_norm: sums, RMSNorm with a weight and modulation in one launch, under Triton's interpreter."""

import pytest
import torch
from diffusers.models.autoencoders import ltx2_diffusion_decoder as host
from test_ops_rms_norm_modulate import hooked, rsqrt, shifted

from ltx2_fastpath.first_sight import FirstSight, same_bits
from ltx2_fastpath.ops import residual_rms_norm as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)
GRID = (2, 3, 3)


def make_norm(normal, width, dtype=torch.float32, eps=1e-6):
    norm = torch.nn.RMSNorm(width, eps=eps, dtype=dtype).requires_grad_(False)
    norm.weight.copy_(normal(width))
    return norm


def make_args(normal, *, dtype=torch.float32, width=256, updates=1, modulated=True, batch=2):
    x, *others = (normal(batch, *GRID, width, dtype=dtype) for _ in range(1 + updates))
    rows = tuple(normal(batch, 1, 1, 1, width, dtype=dtype) for _ in range(2)) if modulated else None
    return make_norm(normal, width, dtype), x, tuple(others), rows


def contract(norm, x, updates, modulation=None, keep=True):
    """The module's docstring in plain torch, the sum in the promised order; a product and a sum for FMA, as the interpreter."""
    for update in updates:
        x = x + update
    if norm is None:
        return x
    width = x.shape[-1]
    values = x.float()
    threads = torch.zeros(*x.shape[:-1], 128)
    used = min(128, width // 4)
    for chunk in values.unflatten(-1, (-1, used, 4)).unbind(-3):
        for element in chunk.unbind(-1):
            threads[..., :used] += element * element
    sums = threads.unflatten(-1, (4, 32))
    for axis in (-1, -2):
        while sums.shape[axis] > 1:
            low, high = sums.chunk(2, dim=axis)
            sums = low + high
    rstd = rsqrt(sums[..., 0] / width + norm.eps)
    normed = (norm.weight.float() * (rstd * values)).to(x.dtype)
    if modulation is not None:
        normed = normed * (1 + modulation[0]) + modulation[1]
    return (x, normed) if updates and keep else normed


def assert_close(actual, expected, norm, hidden, modulation):
    """Within what another order of the sum and a rounding to the dtype at each step can do."""
    fp32, dtype = torch.finfo(torch.float32).eps / 2, torch.finfo(hidden.dtype).eps
    scale, shift = (row.double() for row in modulation) if modulation else (torch.zeros(1), torch.zeros(1))
    exact = torch.nn.functional.rms_norm(hidden.double(), hidden.shape[-1:], norm.weight.double(), norm.eps) * (1 + scale)
    bound = exact.abs() * (fp32 * (hidden.shape[-1] + 8) + 3 * dtype) + (exact + shift).abs() * dtype
    assert ((actual.double() - expected.double()).abs() <= bound).all()


class Recorded(torch.nn.Module):
    """Stands for an attention or a feed-forward: gives what it is told, keeps what it got."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x, *_):
        self.input = x
        return self.output


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_eager_chain_is_the_hosts(normal, dtype):
    block = host.LTX2VideoVaeDiffusionNABlock(32, (3, 3, 3), 32, head_dim=8).to(dtype).requires_grad_(False)
    for parameter in block.parameters():
        parameter.copy_(normal(*parameter.shape) * 0.2)
    hidden, context, attention, mlp = (normal(2, *GRID, 32, dtype=dtype) for _ in range(4))
    block.attn, block.mlp = Recorded(attention), Recorded(mlp)
    modulation = tuple(normal(2, 1, 1, 1, 32, dtype=dtype) for _ in range(7))
    output = block(hidden, context, modulation)
    ada = [modulation[i] + block.scale_shift_table[i] for i in range(7)]

    update = block.context_proj(context)
    first, normed = op.eager(block.norm1, hidden, (update,), (ada[0], ada[1]))
    assert torch.equal(normed, block.attn.input)
    second, normed = op.eager(block.norm2, first, (attention,), (ada[3], ada[4]))
    assert torch.equal(normed, block.mlp.input)
    assert torch.equal(op.eager(None, second, (mlp,)), output)
    # across the end of a block
    assert torch.equal(op.eager(None, second, (mlp, update)), output + update)
    assert torch.equal(op.eager(block.norm1, second, (mlp,), None, False), block.norm1(output))

    plain = host.LTX2VideoVaeNABlock(32, (3, 3, 3), head_dim=8).to(dtype).requires_grad_(False)
    plain.attn, plain.mlp = Recorded(attention), Recorded(mlp)
    output = plain(hidden)
    assert torch.equal(op.eager(plain.norm1, hidden, ()), plain.attn.input)
    first, normed = op.eager(plain.norm2, hidden, (attention,))
    assert torch.equal(normed, plain.mlp.input)
    assert torch.equal(op.eager(None, first, (mlp,)), output)


@pytest.mark.parametrize("candidate", op.CANDIDATES)
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("updates", [0, 1, 2])
@pytest.mark.parametrize(
    "dtype, width", [(torch.float32, 1024), (torch.float16, 256), (torch.float32, 512), (torch.float16, 2048)]
)
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, width, updates, modulated, candidate):
    args = make_args(normal, dtype=dtype, width=width, updates=updates, modulated=modulated)
    norm, x, others, modulation = args
    expected = op.eager(*args)
    for keep in (True, False):
        found = op.residual_rms_norm(*args, keep, candidate=candidate)
        if candidate == "tree":  # the interpreter's reduction has an order of its own
            assert same_bits(found, contract(*args, keep))
        if updates and keep:
            hidden, found = found
            assert torch.equal(hidden, expected[0])
        eager = expected[1] if updates else expected
        assert found.dtype == dtype and found.is_contiguous()
        assert_close(found, eager, norm, expected[0] if updates else x, modulation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("width", [128, 256, 1536])
def test_sums_alone_equal_eager(normal, dtype, width, updates):
    _, x, others, _ = make_args(normal, dtype=dtype, width=width, updates=updates, modulated=False)
    assert torch.equal(op.residual_rms_norm(None, x, others), op.eager(None, x, others))


def test_strided_inputs_are_read_and_left_alone(normal):
    norm, x, (update,), modulation = make_args(normal, updates=1)
    longer = torch.full((2, 3, 3, 3, 256), float("nan"))  # an upsampler's output without its first frame
    longer[:, 1:] = x
    wide = torch.full((2, *GRID, 512), float("nan"))
    wide[..., 256:] = update
    rows = torch.full((2, 1, 1, 1, 7 * 256), float("nan"))  # chunks of one product
    rows[..., :256], rows[..., 512:768] = modulation
    before = [tensor.clone() for tensor in (longer, wide, rows)]
    args = norm, longer[:, 1:], (wide[..., 256:],), (rows[..., :256], rows[..., 512:768])
    assert same_bits(op.residual_rms_norm(*args, candidate="tree"), contract(*args))
    assert same_bits(before, [longer, wide, rows])


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    norm, near = make_norm(normal, 128, torch.float16), normal(3, 1, 1, 1, 128, dtype=torch.float16)
    far = far_apart(3, 128).view(3, 1, 1, 1, 128)
    for x, y in ((far, near), (far.transpose(0, 3), near.transpose(0, 3))):
        for args in ((norm, x, (y,)), (norm, y, (x,)), (norm, y, (y, x))):
            assert same_bits(op.residual_rms_norm(*args, candidate="tree"), contract(*args))


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(normal, dtype):
    norm, x, (update,), modulation = make_args(normal, dtype=dtype)
    x[0, 0, 0, 0, 3], x[0, 0, 0, 1, 5], update[0, 0, 0, 2, 6] = float("nan"), float("inf"), -float("inf")
    x[0, 0, 1], update[0, 0, 1] = 0.0, -0.0
    x[0, 0, 2], update[0, 0, 2] = torch.finfo(dtype).smallest_normal / 2, 0.0
    args = norm, x, (update,), modulation
    assert same_bits(op.residual_rms_norm(*args, candidate="tree"), contract(*args))


def test_first_sight_takes_what_equals_eager(normal, monkeypatch):
    """On a CPU torch sums in another order, so the kernel is taken where eager is the contract."""
    monkeypatch.setattr(op, "eager", contract)
    monkeypatch.setattr(op, "CANDIDATES", ("tree",))
    for args in (
        make_args(normal, updates=2),
        make_args(normal, updates=0, modulated=False),
        (None, *make_args(normal, modulated=False)[1:3]),
    ):
        site = FirstSight("here", op)
        assert same_bits(site(*args), site(*args))
        assert site.fast == 1 and site.first == 1
        for trial in op.rehearsals(*args):
            assert op.refusal(*trial) is None and trial[1].shape[:-1].numel() >= 4096
    assert list(op.rehearsals(None, args[1], args[2])) == []


REFUSALS = {
    "three updates": (lambda n, x, u, m: (n, x, u * 3, m), "updates: at most 2"),
    "nothing to do": (lambda n, x, u, m: (None, x, (), None), "norm: None"),
    "modulation without norm": (lambda n, x, u, m: (None, x, u, m), "norm: None"),
    "rank": (lambda n, x, u, m: (n, x[0, 0, 0], (), None), "x: shape"),
    "shape of update": (lambda n, x, u, m: (n, x, (u[0][:, :1],), m), "update 0: shape"),
    "dtype of x": (lambda n, x, u, m: (n, x.double(), (), None), "x: dtype torch.float64"),
    "dtype of update": (lambda n, x, u, m: (n, x, (u[0].half(),), m), "update 0: dtype torch.float16"),
    "device": (lambda n, x, u, m: (n, x, (u[0].to("meta"),), m), "update 0: on meta"),
    "uneven": (lambda n, x, u, m: (n, x, (u[0].transpose(1, 2).contiguous().transpose(1, 2),), m), "update 0: tokens"),
    "alignment": (lambda n, x, u, m: (n, shifted(x), u, m), "x: rows must be contiguous and aligned"),
    "width": (lambda n, x, u, m: (n, x[..., :192], (), None), "x: shape"),
    "empty": (lambda n, x, u, m: (n, x[:, :0], (), None), "x: shape"),
    "hook": (lambda n, x, u, m: (hooked(n), x, u, m), "norm: not a plain"),
    "other width": (lambda n, x, u, m: (torch.nn.RMSNorm(128, eps=1e-6), x, u, m), "norm: not a plain"),
    "scale": (lambda n, x, u, m: (n, x, u, (x, m[1])), "scale: shape"),
    "shift": (lambda n, x, u, m: (n, x, u, (m[0], m[1].half())), "shift: torch.float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    args = make_args(normal)
    with no_computation:
        assert op.refusal(*args) is None
        hash(op.signature(*args))
    bad = change(*args)
    with no_computation:
        assert op.refusal(*bad).startswith(named)
    with pytest.raises(ValueError, match="^residual_rms_norm: "):
        op.residual_rms_norm(*bad)


def test_signature_tells_layouts_and_norms_apart(normal):
    norm, x, (update,), modulation = args = make_args(normal)
    others = [
        (None, x, (update,)),
        (norm, x, (), modulation),
        (norm, x, (update, update), modulation),
        (norm, x, (update,)),
        (norm, x, (update,), modulation, False),
        (norm, x, (shifted(update),), modulation),
        (torch.nn.RMSNorm(256, eps=1e-5), x, (update,), modulation),
    ]
    assert len({op.signature(*args), *(op.signature(*other) for other in others)}) == 1 + len(others)
