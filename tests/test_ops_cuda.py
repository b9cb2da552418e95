"""The kernels in CUDA C++: does NVRTC compile each of them, for every generation of GPUs that they are meant for?"""

import pytest
import torch

from ltx2_fastpath.ops import cuda
from ltx2_fastpath.ops import qk_norm_split_rope as qk

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

DTYPES = torch.bfloat16, torch.float16, torch.float32
ARCHITECTURES = "sm_80", "sm_90", "sm_120"
HALVES, PAIRS = 0, 1


def instances():
    """(kernel, template parameters) as the launchers choose them for the published models."""
    for dtype in DTYPES:
        # update, gate, norm, outputs, lanes, order
        for switches in (
            (False, False, True, 1, 32, HALVES),
            (False, False, True, 1, 32, PAIRS),
            (False, False, False, 1, 32, HALVES),
            (True, True, True, 2, 32, HALVES),
            (True, False, True, 0, 32, HALVES),
            (True, True, False, 0, 32, HALVES),
            (True, True, True, 1, 512, HALVES),
        ):
            yield "rms_norm_modulate", (dtype, 4096, *switches)
        # head_dim, norm, how cos and sin are found, paired
        for switches in (
            (128, True, qk.ROW_AND_COLUMNS, True),
            (128, True, qk.ROW_AND_COLUMNS, False),
            (128, True, qk.FULL, True),
            (128, False, qk.FULL, True),
            (128, True, qk.NO_ROPE, False),
            (64, True, qk.ONE_ROW, False),
        ):
            yield "qk_norm_split_rope", (dtype, 2048 if switches[0] == 64 else 4096, *switches)
        yield "head_gate", (dtype, 32, 128)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["rms_norm_modulate", "qk_norm_split_rope", "head_gate"])
def test_nvrtc_compiles(architecture, kernel):
    count = 0
    for name, parameters in instances():
        if name == kernel:
            code, name = cuda.compiled(architecture, kernel, parameters)
            assert code.code_type == "cubin" and len(code.code) > 1000 and code.symbol_mapping[name]
            count += 1
    assert count


def test_an_error_in_a_kernel_is_told(tmp_path, monkeypatch):
    for file in cuda._FOLDER.glob("*.cu*"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "wrong.cu").write_text("template <int SIZE> __global__ void wrong() { undeclared(SIZE); }")
    monkeypatch.setattr(cuda, "_FOLDER", tmp_path)
    with pytest.raises(Exception, match="undeclared"):
        cuda.compiled("sm_90", "wrong", (2048,))


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """The folder in which compiled kernels are kept."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path / "ltx2_fastpath"


HEAD_GATE = "sm_90", "head_gate", (torch.bfloat16, 32, 128)


def test_the_next_process_finds_a_kernel_on_disk(on_disk, monkeypatch):
    pytest.importorskip("cuda.core.utils", reason="this cuda.core keeps nothing on disk")
    compiled, name = cuda.compiled(*HEAD_GATE)
    with monkeypatch.context() as patch:
        patch.setattr("cuda.core.Program", lambda *args, **options: pytest.fail("compiled again"))
        found, _ = cuda.compiled(*HEAD_GATE)
    assert bytes(found.code) == bytes(compiled.code) and found.symbol_mapping == {name: compiled.symbol_mapping[name]}
    for other in (("sm_80", *HEAD_GATE[1:]), (*HEAD_GATE[:2], (torch.float16, 32, 128))):  # are no such kernel
        assert bytes(cuda.compiled(*other)[0].code) != bytes(compiled.code)


@pytest.mark.parametrize("where", ["a file", "no folder can be made"])
def test_kernels_are_compiled_where_none_can_be_kept(tmp_path, monkeypatch, where):
    taken = tmp_path / "taken"
    taken.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(taken if where == "a file" else taken / "below"))
    code, name = cuda.compiled(*HEAD_GATE)
    assert len(code.code) > 1000 and code.symbol_mapping[name]


def test_a_kernel_whose_file_is_half_there_is_compiled(on_disk, monkeypatch):
    compiled, name = cuda.compiled(*HEAD_GATE)
    for file in on_disk.rglob("*"):
        if file.is_file() and file.stat().st_size < 1000:
            file.unlink()  # the symbol's
    found, _ = cuda.compiled(*HEAD_GATE)
    assert bytes(found.code) == bytes(compiled.code) and found.symbol_mapping[name] == compiled.symbol_mapping[name]
