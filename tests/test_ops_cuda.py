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
