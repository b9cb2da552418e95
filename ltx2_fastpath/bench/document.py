"""The results as one JSON document: where they were measured, how, and every median with the raw values behind it."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import diffusers
import torch

import ltx2_fastpath

SCHEMA = 1  # raised when the meaning of a key changes


def new(command: str, options: dict) -> dict:
    """A document without sections, and not complete until the benchmark says so at its end."""
    return {
        "schema": SCHEMA,
        "command": command,
        "options": options,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(),
        "complete": False,
        "sections": [],
    }


def save(document: dict, path: Path) -> None:
    """Write `document` so that the file holds either the old or the new one, whenever the process is killed."""
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[[\d.,e\s-]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)  # lists of numbers on one line
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n")
    os.replace(draft, path)


def environment() -> dict:
    """Hardware and software, as far as a number can depend on them; None for what cannot be found out."""
    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    driver, power_limit_w = _driver(gpu)
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 1),
        "gpu_power_limit_w": power_limit_w,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "system": platform.system(),
        "ltx2_fastpath": ltx2_fastpath.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "diffusers": diffusers.__version__,
        "cuda.core": _installed("cuda-core"),
    }


def _installed(distribution: str) -> str | None:
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
    """Version of the driver and the power limit in watts."""
    query = "--query-gpu=driver_version,power.limit"
    answer = gpu and _output("nvidia-smi", query, "--format=csv,noheader,nounits", f"--id=GPU-{gpu.uuid}")
    if not answer:
        return None, None
    driver, limit = answer.split(", ")
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
