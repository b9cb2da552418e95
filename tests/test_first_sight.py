"""FirstSight: does a kernel that is not exact, or fails, ever reach a result?"""

import gc
import logging
import types

import pytest
import torch

from ltx2_fastpath.first_sight import FirstSight, numbered, same_bits


def eager(x):
    return x * 2 + 1


def test_numbers_name_sites_and_come_again():
    first, second = FirstSight("first", None), FirstSight("second", None)
    number = first.number
    assert numbered(number) is first and numbered(second.number) is second and number != second.number
    del first
    gc.collect()
    assert numbered(number) is None
    assert FirstSight("third", None).number <= number


def make_op(*, kernels=None, refusal=None, rehearsals=()):
    """A stand-in for a module of ltx2_fastpath.ops. `kernels` are its candidates by name; `launches` lists those that ran."""
    kernels = {"kernel": eager} if kernels is None else kernels
    launches = []

    def launch(candidate, x):
        launches.append(candidate)
        return kernels[candidate](x)

    return types.SimpleNamespace(
        CANDIDATES=tuple(kernels),
        signature=lambda x: (x.dtype, x.shape),
        refusal=lambda x: refusal,
        rehearsals=lambda x: rehearsals,
        launch=launch,
        eager=eager,
        launches=launches,
    )


def one_bit_wrong(x):
    """The eager result with the lowest bit of its last element flipped."""
    result = eager(x)
    result.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return result


def raises(x):
    raise RuntimeError("no kernel image\nand more lines")


def out_of_memory(x):
    raise torch.OutOfMemoryError("CUDA out of memory")


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def calls(site, count, *, shape=(3,)):
    """Call the site `count` times with other values each time; every result must be the eager one."""
    for i in range(count):
        x = torch.full(shape, float(i))
        assert torch.equal(site(x), eager(x))


def test_first_call_verifies_and_returns_eager_and_later_calls_launch(caplog):
    returned = []
    op = make_op(kernels={"kernel": lambda x: returned.append(eager(x)) or returned[-1]})
    site = FirstSight("norm1", op)
    x = torch.arange(3.0)

    first = site(x)
    assert torch.equal(first, eager(x)) and first is not returned[0]
    assert op.launches == ["kernel"] and (site.fast, site.stock) == (0, 1)

    for count in (1, 2, 3):
        result = site(x)
        assert result is returned[-1]  # the kernel's own tensor, not a copy and not eager's
        assert len(op.launches) == 1 + count and (site.fast, site.stock) == (count, 1)

    (verdict,) = site.verdicts.values()
    assert verdict.fast and verdict.candidate == "kernel" and "bit-equal on the live input" in verdict.note
    assert "rehearsal" not in verdict.note
    assert warnings_in(caplog) == []


def test_kernel_with_one_wrong_bit_never_serves(caplog):
    op = make_op(kernels={"kernel": one_bit_wrong})
    site = FirstSight("norm1", op)
    calls(site, 4)
    assert op.launches == ["kernel"] and (site.fast, site.stock) == (0, 4)
    (warning,) = warnings_in(caplog)
    assert "norm1" in warning and "'kernel' gave other bits" in warning and "results are not affected" in warning


def test_kernel_right_on_the_live_input_but_wrong_in_rehearsal_never_serves(caplog):
    op = make_op(
        kernels={"kernel": lambda x: eager(x) if x.numel() == 3 else one_bit_wrong(x)},
        rehearsals=[(torch.ones(3),), (torch.ones(4096),)],
    )
    site = FirstSight("norm1", op)
    calls(site, 3)
    assert op.launches == ["kernel", "kernel"]  # both rehearsals; the live input has nothing to add
    assert (site.fast, site.stock) == (0, 3)
    assert len(warnings_in(caplog)) == 1


def test_kernel_wrong_on_the_live_input_but_right_in_rehearsal_never_serves():
    op = make_op(
        kernels={"kernel": lambda x: eager(x) if x.numel() == 4096 else one_bit_wrong(x)}, rehearsals=[(torch.ones(4096),)]
    )
    site = FirstSight("norm1", op)
    calls(site, 3)
    assert op.launches == ["kernel", "kernel"] and (site.fast, site.stock) == (0, 3)


def test_verdict_says_that_it_was_rehearsed():
    site = FirstSight("norm1", make_op(rehearsals=[(torch.ones(4096),)]))
    calls(site, 2)
    (verdict,) = site.verdicts.values()
    assert verdict.fast and "rehearsal" in verdict.note and site.fast == 1


def test_kernel_that_raises_at_first_sight_never_serves(caplog):
    op = make_op(kernels={"kernel": raises})
    site = FirstSight("norm1", op)
    calls(site, 3)
    assert op.launches == ["kernel"] and (site.fast, site.stock) == (0, 3)
    (warning,) = warnings_in(caplog)
    assert "RuntimeError: no kernel image" in warning and "more lines" not in warning


def test_kernel_that_raises_in_call_three_of_eight_is_given_up_with_one_warning(caplog):
    served = []

    def kernel(x):
        served.append(x)
        return raises(x) if len(served) == 3 else eager(x)

    site = FirstSight("norm1", make_op(kernels={"kernel": kernel}))
    calls(site, 8)
    assert len(served) == 3 and (site.fast, site.stock) == (1, 7)
    (warning,) = warnings_in(caplog)
    assert "its launch failed (RuntimeError: no kernel image)" in warning


def test_second_candidate_serves_where_the_first_is_wrong(caplog):
    op = make_op(kernels={"halves": one_bit_wrong, "broken": raises, "pairs": eager, "spare": eager})
    site = FirstSight("norm1", op)
    calls(site, 3)
    assert op.launches == ["halves", "broken", "pairs", "pairs", "pairs"]
    assert (site.fast, site.stock) == (2, 1) and warnings_in(caplog) == []
    (verdict,) = site.verdicts.values()
    assert verdict.candidate == "pairs" and "pairs" in verdict.note


def test_every_failing_candidate_is_named(caplog):
    site = FirstSight("norm1", make_op(kernels={"halves": one_bit_wrong, "pairs": raises}))
    calls(site, 2)
    (warning,) = warnings_in(caplog)
    assert "'halves' gave other bits" in warning and "'pairs' failed (RuntimeError" in warning


def test_refusal_is_not_a_fault(caplog):
    op = make_op(refusal="x: empty")
    site = FirstSight("norm1", op)
    calls(site, 3)
    assert op.launches == [] and (site.fast, site.stock) == (0, 3)
    assert [verdict.note for verdict in site.verdicts.values()] == ["x: empty"]
    assert warnings_in(caplog) == []


def test_out_of_memory_passes_through_at_first_sight_and_is_judged_anew():
    kernels = {"kernel": out_of_memory}
    op = make_op(kernels=kernels)
    site = FirstSight("norm1", op)
    with pytest.raises(torch.OutOfMemoryError):
        site(torch.ones(3))
    assert site.verdicts == {}
    kernels["kernel"] = eager
    calls(site, 2)
    assert (site.fast, site.stock) == (1, 1)


def test_out_of_memory_passes_through_later_and_the_verdict_stays():
    kernels = {"kernel": eager}
    site = FirstSight("norm1", make_op(kernels=kernels))
    calls(site, 2)
    kernels["kernel"] = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        site(torch.ones(3))
    kernels["kernel"] = eager
    calls(site, 1)
    assert (site.fast, site.stock) == (2, 1)


def test_error_of_the_eager_chain_passes_through_unchanged():
    op = make_op()
    op.eager = raises
    with pytest.raises(RuntimeError, match="no kernel image"):
        FirstSight("norm1", op)(torch.ones(3))
    assert op.launches == []


def test_verdict_is_per_signature(caplog):
    op = make_op(kernels={"kernel": lambda x: eager(x) if x.shape == (3,) else one_bit_wrong(x)})
    site = FirstSight("norm1", op)
    calls(site, 2, shape=(3,))
    calls(site, 2, shape=(5,))
    calls(site, 2, shape=(3,))
    assert [verdict.fast for verdict in site.verdicts.values()] == [True, False]
    assert (site.fast, site.stock) == (3, 3)


@pytest.mark.parametrize("capturing", [True, False])
def test_nothing_is_judged_while_a_stream_is_captured(monkeypatch, capturing):
    op = make_op()
    site = FirstSight("norm1", op)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    calls(site, 2)
    assert op.launches == ([] if capturing else ["kernel", "kernel"])
    assert len(site.verdicts) == (0 if capturing else 1)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    calls(site, 2)
    assert (site.fast, site.stock) == ((1, 3) if capturing else (3, 1))


def test_judged_signature_launches_while_a_stream_is_captured(monkeypatch):
    op = make_op()
    site = FirstSight("norm1", op)
    calls(site, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls(site, 2)
    assert (site.fast, site.stock) == (2, 1) and len(op.launches) == 3


def test_one_cause_is_told_once_over_several_sites(caplog):
    warned = set()
    sites = [FirstSight(name, make_op(kernels={"kernel": raises}), warned) for name in ("norm1", "norm2", "norm3")]
    other = FirstSight("gate", make_op(kernels={"kernel": one_bit_wrong}), warned)
    alone = FirstSight("elsewhere", make_op(kernels={"kernel": raises}))
    for site in (*sites, other, alone):
        calls(site, 2)
    told = warnings_in(caplog)
    assert [name for name in ("norm1", "norm2", "norm3", "gate", "elsewhere") for text in told if f"at {name} is" in text] == [
        "norm1",
        "gate",
        "elsewhere",
    ]
    assert len(told) == 3
    # Told once, but every site's report has it.
    assert all("RuntimeError" in verdict.note for site in sites for verdict in site.verdicts.values())


@pytest.mark.parametrize(
    "error, advised",
    [
        (OSError(30, "Read-only file system", "/root/.triton/cache"), True),
        (PermissionError(13, "Permission denied", "/root/.triton"), True),
        (RuntimeError("no kernel image"), False),
    ],
)
def test_unwritable_kernel_cache_is_answered_with_advice(caplog, error, advised):
    def kernel(x):
        raise error

    calls(FirstSight("norm1", make_op(kernels={"kernel": kernel})), 1)
    (warning,) = warnings_in(caplog)
    assert ("TRITON_CACHE_DIR" in warning) == advised


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_takes_any_nan_for_any_nan_and_tells_the_zeros_apart(dtype):
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    nan = torch.tensor([float("nan"), 1.0], dtype=dtype)
    other_nan = nan.clone()
    other_nan.view(integers)[0] ^= 1  # another payload
    other_nan.view(integers)[0] ^= -(2 ** (8 * dtype.itemsize - 1))  # another sign
    assert other_nan[0].isnan() and not torch.equal(nan.view(integers), other_nan.view(integers))
    assert same_bits(nan, other_nan)

    assert not same_bits(nan, torch.tensor([2.0, 1.0], dtype=dtype))
    assert not same_bits(torch.tensor([2.0, 1.0], dtype=dtype), nan)
    zero = torch.zeros(2, dtype=dtype)
    assert same_bits(zero, zero.clone()) and not same_bits(zero, -zero)
    next_to_zero = zero.clone()
    next_to_zero.view(integers)[1] = 1  # the smallest denormal
    assert not same_bits(zero, next_to_zero)
    infinite = torch.tensor([float("inf"), 1.0], dtype=dtype)
    assert same_bits(infinite, infinite.clone()) and not same_bits(infinite, -infinite) and not same_bits(infinite, nan)


def test_same_bits_needs_the_same_structure_shape_and_dtype():
    x = torch.ones(2, 3)
    assert same_bits([(x, x), (x,)], ((x, x), [x]))
    assert not same_bits([(x, x), (x,)], [(x, x)])
    assert not same_bits([(x, x), (x,)], [(x, x), (x + 1,)])
    assert not same_bits(x, x.half()) and not same_bits(x, x.bfloat16())
    assert not same_bits(x, x[:1]) and not same_bits(x, x.view(3, 2))


def test_same_bits_looks_through_strides():
    x = torch.arange(12.0).view(3, 4)
    assert same_bits(x.t(), x.t().contiguous()) and same_bits(x[:, ::2], x[:, ::2].clone())
    assert not same_bits(x[:, ::2], x[:, 1::2])
