"""CUDA C++ kernels: compiled at first use by NVRTC through cuda.core, without a toolkit, and launched through the driver.

A Triton launch costs 18 µs of host time and an unrolled Triton norm up to 15 s of compilation; the same kernel here costs about
4 µs and 0.4 s. Where cuda.core is missing (it is an optional extra) the ops launch their Triton form instead.
"""

import ctypes
import functools
import importlib.util
import pathlib
import struct
import threading

import torch
import triton

from .support import DTYPES, INTERPRETED

_FOLDER = pathlib.Path(__file__).parent
INSTALLED = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
#: The implementations that an op with both forms tries, in order.
IMPLEMENTATIONS = ("cuda", "triton") if INSTALLED and not INTERPRETED else ("triton",)
_MOST_ARGUMENTS = 64
_MOST_ON_DISK = 256 * 2**20  # bytes; a kernel has about 20 kB
_SYMBOL = b" symbol"
_MOST_BATCH_ROWS = 65_535
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet


class _Arguments(threading.local):
    """Room for the arguments of one launch, and the array of their addresses that the driver reads."""

    def __init__(self):
        self.values = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS)
        start = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*range(start, start + 8 * _MOST_ARGUMENTS, 8))
        self.address = ctypes.addressof(self.pointers)


_arguments = _Arguments()


def launch(
    device: torch.device,
    kernel: str,
    parameters: tuple,
    blocks: tuple[int, int],
    threads: int,
    ints: list,
    doubles: tuple = (),
    shared: int = 0,
) -> None:
    """Launch the template `kernel` of the file of that name on the current stream of `device`, which must be current.

    `blocks` are the grid's, along x and y. `parameters` are the template's: a torch dtype, ints and bools. The kernel's arguments
    are `ints` (addresses, or long long), then `doubles`. `shared`: bytes of dynamic shared memory.

    Raises:
        ValueError: more batch rows than a grid has room for along y.
        RuntimeError: the driver refuses the launch; the message has its status.
    """
    if blocks[1] > _MOST_BATCH_ROWS:
        raise ValueError(f"{kernel}: a batch of {blocks[1]} rows; a grid has room for {_MOST_BATCH_ROWS}")
    run, function = _prepared(device, kernel, parameters, shared)
    arguments = _arguments
    struct.pack_into(f"{len(ints)}q{len(doubles)}d", arguments.values, 0, *ints, *doubles)
    stream = _stream(torch._C._cuda_getCurrentRawStream(device.index))
    (status,) = run(function, *blocks, 1, threads, 1, 1, shared, stream, arguments.address, 0)
    if int(status) == _INVALID_CONTEXT:
        torch.cuda.synchronize(device)  # makes the device's context this thread's
        (status,) = run(function, *blocks, 1, threads, 1, 1, shared, stream, arguments.address, 0)
    if int(status):
        raise RuntimeError(f"launching {kernel}{parameters}: {status.name}")


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """Where the tensors lie in memory; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled(architecture: str, kernel: str, parameters: tuple):
    """The template `kernel` with `parameters` as machine code for `architecture` ("sm_90"), and the name that it has there."""
    from cuda.core import Program, ProgramOptions

    source = (_FOLDER / "dtypes.cuh").read_text() + (_FOLDER / f"{kernel}.cu").read_text()
    name = f"{kernel}<{', '.join(map(_parameter, parameters))}>"
    # fma=False: no product and sum become one rounding unless the source says so.
    options = ProgramOptions(std="c++17", arch=architecture, fma=False)
    kept, key = _on_disk(source, options, name)
    if (code := _found(kept, key, name)) is None:
        code = Program(source, code_type="c++", options=options).compile("cubin", name_expressions=(name,))
        _keep(kept, key, code, name)
    return code, name


def _on_disk(source: str, options, name: str) -> tuple:
    """(what keeps compiled kernels beside Triton's, so that the next process need not compile them; the key of this one)

    (None, b"") where there is none: older releases of cuda.core have no such thing, and folders may be read-only.
    """
    try:
        from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

        key = make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin", name_expressions=(name,))
        return FileStreamProgramCache(pathlib.Path(triton.knobs.cache.dir) / "ltx2_fastpath", max_size_bytes=_MOST_ON_DISK), key
    except (ImportError, OSError):
        return None, b""


def _found(kept, key: bytes, name: str):
    from cuda.core import ObjectCode

    code, symbol = (None, None) if kept is None else (kept.get(key), kept.get(key + _SYMBOL))
    return ObjectCode.from_cubin(code, symbol_mapping={name: symbol}) if code and symbol else None


def _keep(kept, key: bytes, code, name: str) -> None:
    if kept is not None:
        try:
            kept[key], kept[key + _SYMBOL] = code, code.symbol_mapping[name]
        except OSError:
            return  # no room; what was compiled serves this process


@functools.lru_cache(maxsize=512)
def _prepared(device, kernel, parameters, shared):
    from cuda.bindings import driver
    from cuda.core import Device

    Device(device.index).set_current()
    major, minor = torch.cuda.get_device_capability(device)
    code, name = compiled(f"sm_{major}{minor}", kernel, parameters)
    function = code.get_kernel(name)
    _kept.append(function)
    if shared:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(
            attribute, shared, driver.CUkernel(int(function.handle)), driver.CUdevice(device.index)
        )
        if int(status):
            raise RuntimeError(f"{kernel}{parameters}: {shared} bytes of shared memory: {status.name}")
    return driver.cuLaunchKernel, driver.CUfunction(int(function.handle))


@functools.lru_cache(maxsize=256)
def _stream(handle: int):
    from cuda.bindings import driver

    return driver.CUstream(handle)


_kept: list = []  # compiled kernels own what their handles stand for


def _parameter(value) -> str:
    if isinstance(value, torch.dtype):
        return str(DTYPES.index(value))
    return str(int(value))
