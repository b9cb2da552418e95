"""Hardware and software, as far as a verdict or a figure can depend on them: for the machine check and the benchmark."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from . import __version__

PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft", "cuda-core")


def environment() -> dict:
    """What this process runs on, as a dict that `json` can write; None for what is not there or cannot be found out."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    driver, power_limit_w = _driver(gpu)
    return {
        "gpu": gpu and gpu.name,
        "gpu_capability": gpu and [gpu.major, gpu.minor],
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 1),
        "gpu_power_limit_w": power_limit_w,
        "driver": driver,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "system": platform.system(),
        "python": platform.python_version(),
        "ltx2_fastpath": __version__,
        "commit": _commit(),
        **{name: _version(name) for name in PACKAGES},
        "triton_cache_writable": _triton_cache_writable(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _driver(gpu) -> tuple[str | None, float | None]:
    """Version of NVIDIA's driver and the power limit in watts; without a GPU of torch's, of the first that nvidia-smi lists."""
    which = [f"--id=GPU-{gpu.uuid}"] if getattr(gpu, "uuid", None) else []
    answer = _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits", *which)
    if not answer:
        return None, None
    driver, limit = answer.splitlines()[0].split(", ")
    try:
        return driver, float(limit)
    except ValueError:  # "[N/A]"
        return driver, None


def _commit() -> str | None:
    """The commit of the checkout that this package is imported from, with "+" if it has changes; None for an installed copy."""
    git = "git", "-C", str(Path(__file__).parent)
    if _output(*git, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _output(*git, "rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if _output(*git, "status", "--porcelain", "--untracked-files=no") else "")


def _triton_cache_writable() -> bool:
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton/cache").expanduser())
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)
