"""head_gate: out * 2·sigmoid(logits) per head in one launch, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_ltx2

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops import head_gate as op

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_memory")]
DTYPES = (torch.float32, torch.float16)


def make_args(normal, *, dtype=torch.float32, batch=2, tokens=5, heads=3, head_dim=40):
    return normal(batch, tokens, heads, head_dim, dtype=dtype), normal(batch, tokens, heads, dtype=dtype)


def run(*args):
    """What a call of a site does."""
    assert op.refusal(*args) is None
    return op.launch(op.CANDIDATES[0], *args)


def contract(x, logits):
    """The module's docstring in plain torch. The exponential is numpy's, as it is in the interpreter."""
    exponential = torch.from_numpy(np.exp(-logits.float().contiguous().numpy()))
    gates = 2.0 * (1 / (1 + exponential)).to(x.dtype)
    return (x * gates.unsqueeze(-1)).flatten(2)


def assert_close(actual, expected):
    """numpy and torch may round an exponential to either neighbour in fp32: two steps there, in fp16 at most one rounding
    of the gate and one of the product."""
    bound = 2 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=bound, atol=torch.finfo(actual.dtype).smallest_normal, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("processor", [transformer_ltx2.LTX2AudioVideoAttnProcessor, transformer_ltx2.LTX2PerturbedAttnProcessor])
def test_eager_chain_is_the_hosts(normal, monkeypatch, processor, dtype):
    """What the host's processor hands to the output projection is our eager chain on what its attention returned."""
    attention = transformer_ltx2.LTX2Attention(
        24, heads=3, kv_heads=3, dim_head=8, apply_gated_attention=True, processor=processor()
    )
    attention.to(dtype).requires_grad_(False)
    seen = {}
    dispatch = transformer_ltx2.dispatch_attention_fn

    def recorded(*args, **kwargs):
        seen["attended"] = dispatch(*args, **kwargs)
        return seen["attended"]

    monkeypatch.setattr(transformer_ltx2, "dispatch_attention_fn", recorded)
    attention.to_gate_logits.register_forward_hook(lambda module, args, output: seen.update(logits=output))
    attention.to_out[0].register_forward_pre_hook(lambda module, args: seen.update(gated=args[0]))
    attention(normal(2, 5, 24, dtype=dtype))
    assert torch.equal(op.eager(seen["attended"], seen["logits"]), seen["gated"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, tokens, heads, head_dim", [(1, 1, 1, 4), (2, 5, 3, 40), (1, 3, 17, 128), (2, 2, 32, 64)])
def test_keeps_the_contract_and_stays_close_to_eager(normal, dtype, batch, tokens, heads, head_dim):
    args = make_args(normal, dtype=dtype, batch=batch, tokens=tokens, heads=heads, head_dim=head_dim)
    result = run(*args)
    assert result.dtype == dtype and result.shape == (batch, tokens, heads * head_dim) and result.is_contiguous()
    assert torch.equal(result, contract(*args))
    assert_close(result, op.eager(*args))


@pytest.mark.filterwarnings("ignore:.* encountered in")
def test_every_fp16_logit(normal):
    logits = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16).view(1, -1, 256)
    x = normal(1, 256, 256, 4, dtype=torch.float16)
    result, expected = run(x, logits), op.eager(x, logits)
    assert same_bits(result, contract(x, logits))
    assert_close(result, expected)
    differ = (result != expected).view(x.shape).any(3) & ~logits.isnan()
    assert differ.sum() <= 10  # numpy's and torch's exponentials round two logits of 63,488 to different sides


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_of_x(normal, dtype):
    x, logits = make_args(normal, dtype=dtype, heads=8, head_dim=8)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 6e-8, 60000.0, -1.0]
    x[0, :, :] = torch.tensor(special, dtype=dtype)
    logits[0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 100.0, -100.0, 1e-7], dtype=dtype)
    assert same_bits(run(x, logits), contract(x, logits))
    assert_close(run(x, logits), op.eager(x, logits))


def test_strided_inputs_are_read_and_left_alone(normal):
    x, logits = make_args(normal)
    attended = torch.full((2, 4, 7, 44), float("nan"))  # as an attention in [B, H, S, d] returns it
    attended[:, :3, 1:6, :40] = x.transpose(1, 2)
    gates = torch.full((3, 10, 5), float("nan"))
    gates[1:, ::2, 1:4] = logits
    before = attended.clone(), gates.clone()
    result = run(attended[:, :3, 1:6, :40].transpose(1, 2), gates[1:, ::2, 1:4])
    assert torch.equal(result, contract(x, logits))
    assert same_bits(before, (attended, gates))


def test_rows_may_lie_more_than_two_to_the_31_elements_apart(far_apart, normal):
    far = far_apart(rows=3, width=8)
    x, logits = make_args(normal, dtype=torch.float16, batch=3, tokens=1, heads=2, head_dim=4)
    by_batch, far_logits = far.view(3, 1, 2, 4), far[:, None, :2]
    three = normal(1, 1, 3, dtype=torch.float16)
    for args in (
        (by_batch, logits),
        (by_batch.transpose(0, 1), logits.transpose(0, 1)),
        (far[None, None], three),  # heads lie apart
        (x, far_logits),
        (x.transpose(0, 1), far_logits.transpose(0, 1)),
    ):
        assert torch.equal(run(*args), contract(*args))


REFUSALS = {
    "rank of x": (lambda x, g: (x.flatten(2), g), "x: expected rank 4"),
    "rank of logits": (lambda x, g: (x, g[..., None]), "logits: shape [2, 5, 3, 1], expected [2, 5, 3]"),
    "batch": (lambda x, g: (x, g[:1]), "logits: shape [1, 5, 3]"),
    "tokens": (lambda x, g: (x, g[:, :4]), "logits: shape [2, 4, 3]"),
    "number of heads": (lambda x, g: (x, g[..., :2]), "logits: shape [2, 5, 2]"),
    "dtype of x": (lambda x, g: (x.double(), g.double()), "x: torch.float64"),
    "dtype of logits": (lambda x, g: (x, g.half()), "logits: dtype torch.float16"),
    "device of x": (lambda x, g: (x.to("meta"), g.to("meta")), "x: on meta"),
    "device of logits": (lambda x, g: (x, g.to("meta")), "logits: on meta"),
    "head_dim": (lambda x, g: (x[..., :38], g), "x: head_dim 38"),
    "layout of x": (lambda x, g: (x.mT.contiguous().mT, g), "x: heads must be contiguous and aligned"),
    "alignment of x": (lambda x, g: (x.new_zeros(x.numel() + 1)[1:].view(x.shape), g), "x: heads must be contiguous and aligned"),
    "layout of logits": (lambda x, g: (x, g.mT.contiguous().mT), "logits: the last dimension must be contiguous"),
    "no tokens": (lambda x, g: (x[:, :0], g[:, :0]), "x: empty"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_argument_and_reads_metadata_only(normal, no_computation, case):
    change, named = REFUSALS[case]
    good = make_args(normal)
    bad = change(*good)
    with no_computation:
        assert op.refusal(*good) is None
        assert named in op.refusal(*bad)
        op.signature(*good)


def test_signature_tells_layouts_apart(normal):
    x, logits = make_args(normal)
    same = op.signature(x.clone(), logits.clone())
    assert same == op.signature(x, logits)
    swapped = x.transpose(1, 2).contiguous().transpose(1, 2)
    others = [(swapped, logits), (x.half(), logits), (x, logits.mT.contiguous().mT), (x[:, :4], logits[:, :4])]
    assert len({same, *(op.signature(*args) for args in others)}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 32])
def test_rehearsal_holds_every_16_bit_logit_and_leaves_the_random_state_alone(normal, dtype, heads):
    args = make_args(normal, dtype=dtype, heads=heads, head_dim=4)
    before = torch.get_rng_state()
    (trial,) = op.rehearsals(*args)
    assert torch.equal(before, torch.get_rng_state())
    x, logits = trial
    assert op.refusal(*trial) is None and x.dtype == dtype and x.shape[2:] == (heads, 4)
    assert logits.view(torch.int16).unique().numel() == 65536
    assert x.float().std() > 0.9


def test_rehearsal_in_fp32_sweeps_both_signs(normal):
    (trial,) = op.rehearsals(*make_args(normal, heads=3))
    assert op.refusal(*trial) is None
    assert trial[1].min() < -20 and trial[1].max() > 20 and trial[1].unique().numel() > 60000
