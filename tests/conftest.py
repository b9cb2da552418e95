"""What every test file shares: the interpreter switch, the gpu marker, and tiny models of every version."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must be set before any module that has kernels is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Tiny tensors gain nothing from a second thread, and wait for it whenever something else runs on that core:
    # test_models.py took 67 s instead of 16 s beside one busy process on two cores.
    torch.set_num_threads(1)

import collections
import gc
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ltx2_fastpath
from ltx2_fastpath.testing import models

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreter: runs kernels on CPU tensors, for which TRITON_INTERPRET must be 1")


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="needs Triton's interpreter: set TRITON_INTERPRET=1"))


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


@pytest.fixture
def nan_memory(monkeypatch):
    """Fresh floating-point memory holds NaN, so that an output that a kernel does not write shows."""

    def filled(allocate):
        def allocate_filled(*args, **options):
            tensor = allocate(*args, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_filled

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, filled(getattr(torch.Tensor, name)))


@pytest.fixture
def normal():
    """normal(*shape, dtype=...): other normal values at each call, the same in each run of the test, every one exact in fp16.

    A product of two values of 11 bits is exact in fp32. So it makes no difference that the interpreter does not fuse a
    product and a sum, which the kernels do where the host does.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).half().to(dtype)

    return draw


class NoComputation(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs))):
            raise AssertionError(f"{function} was called where only metadata may be read")
        return function(*args, **(kwargs or {}))  # arithmetic on dtypes


@pytest.fixture
def no_computation():
    """A context in which no tensor can be computed, copied or read."""
    return NoComputation()


def ops() -> dict:
    """The fused operations by name: the modules of ltx2_fastpath.ops that have kernels to choose from."""
    package = importlib.import_module("ltx2_fastpath.ops")
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    modules = {name: importlib.import_module(f"ltx2_fastpath.ops.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "CANDIDATES")}


def replace_kernels(monkeypatch) -> collections.Counter:
    """What `stand_ins` does, for callers with a monkeypatch of their own."""
    launches = collections.Counter()

    def stand_in(name, op):
        def launch(candidate, *args):
            launches[name] += 1
            return op.eager(*args)

        return launch

    for name, op in ops().items():
        monkeypatch.setattr(op, "launch", stand_in(name, op))
        monkeypatch.setattr(op, "rehearsals", lambda *args: ())
    return launches


def refuse_nothing(monkeypatch) -> None:
    """What `any_width` does, for callers with a monkeypatch of their own."""
    for op in ops().values():
        monkeypatch.setattr(op, "refusal", lambda *args: None)


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels replaced by the eager chain of their op, and counted: {name of the op: launches}. Nothing is rehearsed.

    So a whole patched forward takes milliseconds. Real refusals still apply, see `any_width`.
    """
    return replace_kernels(monkeypatch)


@pytest.fixture
def any_width(monkeypatch):
    """No op refuses anything: with `stand_ins`, models too narrow for the kernels take the fast path."""
    refuse_nothing(monkeypatch)


@pytest.fixture
def run_python(tmp_path):
    """run_python(code, **environment): what a fresh interpreter prints; the test fails if it exits with an error.

    It starts in `tmp_path` and does not interpret Triton's kernels. An environment variable of None is removed.
    """

    def run(code: str, **environment) -> str:
        merged = os.environ | {"TRITON_INTERPRET": None} | environment
        merged = {name: value for name, value in merged.items() if value is not None}
        done = subprocess.run([sys.executable, "-c", code], env=merged, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def far_apart(tmp_path):
    """far_apart(rows, width): normal values [rows, width] whose rows lie up to 2^31 elements apart, all in 2^31 and more.

    The memory is a sparse file, of which only the pages that are touched exist. It begins 2^31 elements before the first
    row, so that an offset that wrapped around would read zeros from it instead of crashing the tests.
    """

    def make(rows: int, width: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        step = 2**31 // (rows - 1) // 64 * 64 + 64
        size = 2**31 + step * (rows - 1) + width
        storage = torch.from_file(str(tmp_path / f"sparse-{rows}-{width}"), shared=True, size=size, dtype=dtype)
        tensor = storage.as_strided((rows, width), (step, 1), 2**31)
        return tensor.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).half())

    return make


@pytest.fixture(scope="session")
def full_size():
    """full_size(version): the transformer of that version at full size, bf16, on the GPU.

    The last one built is kept for the next test that asks for it (38 GB and some seconds each), disabled. A test that asks for
    another must not hold on to it.
    """
    built = {}

    def build(version: str):
        if version not in built:
            built.clear()
            gc.collect()
            torch.cuda.empty_cache()
            built[version] = models.build_transformer(version, device="cuda", dtype=torch.bfloat16)
        ltx2_fastpath.disable(built[version])
        return built[version]

    yield build
    built.clear()
    gc.collect()
    torch.cuda.empty_cache()
