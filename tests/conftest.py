"""What every test file shares: the interpreter switch, the gpu marker, and tiny models of every version."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must be set before any module that has kernels is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Tiny tensors gain nothing from a second thread, and wait for it whenever something else runs on that core:
    # test_models.py took 67 s instead of 16 s beside one busy process on two cores.
    torch.set_num_threads(1)

from pathlib import Path

import pytest

from ltx2_fastpath.bench import models

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=models.CONFIGS)
def version(request) -> str:
    """Every published LTX-2 version in turn."""
    return request.param


@pytest.fixture
def transformer(version):
    """A `models.tiny_transformer`, the test's own to patch and to break (built in 20 ms, so never shared)."""
    return models.tiny_transformer(version)


@pytest.fixture
def pipe(version):
    """A `models.tiny_pipeline`, the test's own (built in 90 ms, so never shared)."""
    return models.tiny_pipeline(version)
