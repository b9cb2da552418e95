"""CUDA C++ kernels: compiled by NVRTC through cuda.core at first use, without a toolkit, and launched in 5 µs.

A Triton launch costs 18 µs of host time and an unrolled Triton norm up to 15 s of compilation; the same kernel here costs 5 µs
and 0.4 s. Where cuda.core is missing (it is an optional extra) the ops launch their Triton form instead.
"""

import functools
import importlib.util
import pathlib

import torch

from .numerics import DTYPES, INTERPRETED

_FOLDER = pathlib.Path(__file__).parent
INSTALLED = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
#: The implementations that an op with both forms tries, in order.
IMPLEMENTATIONS = ("cuda", "triton") if INSTALLED and not INTERPRETED else ("triton",)


def launch(device: torch.device, kernel: str, parameters: tuple, blocks: int, threads: int, *args) -> None:
    """Launch the template `kernel` of the file of that name on the current stream of `device`, which must be current.

    `parameters` are the template's: a torch dtype, ints and bools. `args` are ints (addresses, or long long) and floats (double).
    """
    run, config, function = _prepared(device, kernel, parameters, blocks, threads)
    run(_stream(torch._C._cuda_getCurrentRawStream(device.index)), config, function, *args)


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """Where the tensors lie in memory; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.lru_cache(maxsize=4096)
def _prepared(device, kernel, parameters, blocks, threads):
    from cuda.core import LaunchConfig, launch

    return launch, LaunchConfig(grid=blocks, block=threads), _compile(device, kernel, parameters)


@functools.lru_cache(maxsize=512)
def _compile(device, kernel, parameters):
    from cuda.core import Device, Program, ProgramOptions

    Device(device.index).set_current()
    major, minor = torch.cuda.get_device_capability(device)
    source = (_FOLDER / "dtypes.cuh").read_text() + (_FOLDER / f"{kernel}.cu").read_text()
    name = f"{kernel}<{', '.join(map(_parameter, parameters))}>"
    # fma=False: no product and sum become one rounding unless the source says so.
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}", fma=False)
    return Program(source, code_type="c++", options=options).compile("cubin", name_expressions=(name,)).get_kernel(name)


def _parameter(value) -> str:
    if isinstance(value, torch.dtype):
        return str(DTYPES.index(value))
    return str(int(value))


@functools.lru_cache(maxsize=256)
def _stream(handle: int):
    from cuda.core import Stream

    return Stream.from_handle(handle)
